"""Runs a command of `rl-swarm` in a cell: real processes as in a shell, with the swarm drawn below the cell.

Interrupting the cell makes the nodes save and stop; running it again resumes. Restarting the kernel stops them too.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Group, RenderableType
from rich.text import Text

from rl_swarm.config.resolve import user_network
from rl_swarm.errors import UserError
from rl_swarm.monitor.drawing import Drawing, plain
from rl_swarm.monitor.run_reader import RunView, open_view
from rl_swarm.network.address import open_address
from rl_swarm.notebook.picture import HEIGHT, WIDTH, Cell

DRAW_SECONDS = 1.0
SAVING_SECONDS = 60.0  # for nodes to save and end when stopped
MAX_LINES = 40  # of a command's output, at its end
LAST_LINES = 3  # while it runs
# For a command that writes to no terminal, although a kernel claims one.
PLAIN = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}


def up(run: str | Path = "runs/notebook", from_base: bool = False, **settings: object) -> None:
    """Train a swarm on this machine, or resume it. Settings go by their names in docs/settings.md: `nodes=2`.

    `from_base`: nodes without a checkpoint begin again with the model.
    """
    root = Path(run)
    known = (root / "manifest.json").exists()
    if known and Drawing(RunView(root)).refresh().phase == "finished":
        watch(root)
        return
    base = ["--from-base"] if from_base else []
    _run(["up", "--resume" if known else "--run", str(root), *base], root, settings)


def join(address: str | Path, **settings: object) -> None:
    """Train a node of the swarm at an address, or resume it, until the swarm has finished."""
    _run(["join", str(address)], address, settings)


def coordinate(address: str | Path, **settings: object) -> None:
    """Coordinate the swarm at an address, founding it if there is none, until it has finished."""
    _run(["coordinate", str(address)], address, settings)


def watch(address: str | Path) -> None:
    """Show a swarm below the cell until it has finished or the cell is interrupted."""
    cell = Cell()
    with contextlib.suppress(KeyboardInterrupt), open_view(str(address), user_network) as view:
        drawing = Drawing(view)
        while True:
            drawing.refresh()
            cell.show(drawing.draw(WIDTH, HEIGHT))
            if drawing.ended():
                break
            time.sleep(DRAW_SECONDS)


def _run(arguments: list[str], address: str | Path, settings: Mapping[str, object]) -> None:
    """Run a command and show its swarm until it ends or the cell is interrupted."""
    with _open_drawing(address) as drawing:

        def picture(last: bool) -> RenderableType:
            drawing.refresh(now=last)
            return drawing.draw(WIDTH, HEIGHT)

        run_below_cell([*arguments, *set_flags(settings)], picture)


def run_below_cell(arguments: Sequence[str], picture: Callable[[bool], RenderableType]) -> None:
    """Run a command below the cell, with a picture and the command's last lines, until it ends or is interrupted.

    `picture` is told when it is the last.
    """
    cell, interrupted = Cell(), False
    with Command(arguments) as command:
        try:
            while not command.ended(DRAW_SECONDS):
                cell.show(_with_lines(picture(False), command.lines[-LAST_LINES:]))
        except KeyboardInterrupt:
            interrupted = True
            stopping = ["Stopping: it saves its state. (Interrupt again: at once.)"]
            cell.show(_with_lines(picture(False), stopping))
            command.stop()
        note = ["Stopped. Run the cell again to resume."] if interrupted else []
        cell.show(_with_lines(picture(True), command.lines + note))
    if command.process.returncode and not interrupted:
        raise UserError(command.complaint())


def set_flags(settings: Mapping[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={written(value)}")]


class Command:
    """Runs `rl-swarm` as a process of its own, which does not outlive this one."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._output: deque[str] = deque(maxlen=MAX_LINES)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rl_swarm.cli.below_cell", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **PLAIN},
            start_new_session=True,  # an interrupt goes to the cell, which stops the command
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def __enter__(self) -> "Command":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def lines(self) -> list[str]:
        """Return its last lines of output, without those on rounds, which the picture shows."""
        return [line for line in list(self._output) if not line.startswith("round ")]

    def complaint(self) -> str:
        """Return the command's own error message."""
        marked = [line.removeprefix("rl-swarm: ") for line in self.lines if line.startswith("rl-swarm: ")]
        return marked[-1] if marked else "\n".join(self.lines) or f"exit code {self.process.returncode}"

    def ended(self, within: float) -> bool:
        """Return whether it has ended, or ends within some seconds."""
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        self._listening.join(DRAW_SECONDS)
        return True

    def stop(self) -> None:
        """Let it save and end; kill it when interrupted again or when it takes too long."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            if not self.ended(SAVING_SECONDS):
                self.process.kill()
        except KeyboardInterrupt:
            self.process.kill()
        self.ended(SAVING_SECONDS)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._output.append(line.decode(errors="replace").rstrip())


@contextmanager
def _open_drawing(address: str | Path) -> Iterator[Drawing]:
    """Draw the swarm at an address, which may not be founded yet."""
    if open_address(address).peers:
        with open_view(str(address), user_network) as view:
            yield Drawing(view)
    else:
        yield Drawing(RunView(address))


def _with_lines(picture: RenderableType, lines: Sequence[str]) -> Group:
    return Group(picture, *(Text(plain(line)) for line in lines))


def written(value: object) -> str:
    """Format a value as a flag takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
