"""Shows what a command does now: a line that moves in a terminal, nothing elsewhere."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rl_swarm.monitor.charts import BAR
from rl_swarm.monitor.drawing import FRAMES_PER_SECOND, clock, plain, spinner
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.plural import counted

LOOK_SECONDS = 1.0  # between looks at the swarm


class StepLine:
    """Holds the line: a spinner, the seconds, the last step, and what `progress` returns instead once there is any."""

    def __init__(self, text: str, progress: Callable[[], str] | None = None) -> None:
        self.text, self.progress = text, progress
        self.began = time.monotonic()

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self.began
        told = (self.progress() if self.progress else "") or self.text
        line = Text(f"{spinner(seconds)} {clock(seconds)}  ", style=BAR, no_wrap=True, overflow="ellipsis")
        return line.append(plain(told), style="default")


@contextmanager
def step(text: str, console: Console, progress: Callable[[], str] | None = None) -> Iterator[StepLine]:
    """Show the line at the end of the terminal, below what is printed meanwhile, and remove it at the end."""
    line = StepLine(text, progress)
    if not console.is_terminal:
        yield line
        return
    with Live(get_renderable=line.__rich__, console=console, refresh_per_second=FRAMES_PER_SECOND, transient=True):
        yield line


class LastStep(logging.Handler):
    """Puts the last message of the log into a line."""

    def __init__(self, line: StepLine) -> None:
        super().__init__(logging.INFO)
        self.line = line

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self.line.text = record.getMessage()


@contextmanager
def steps_of_log(text: str, progress: Callable[[], str] | None = None) -> Iterator[Callable[[], None]]:
    """Show the log's last step below the log. Call what this yields once the log is set up."""
    with step(text, Console(stderr=True, highlight=False), progress) as line:
        handler = LastStep(line)
        log = logging.getLogger("rl_swarm")
        try:
            yield lambda: log.addHandler(handler)
        finally:
            log.removeHandler(handler)


class SwarmProgress:
    """Says where a swarm in a folder is, reading its state once a second at most."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self._read, self._text = -LOOK_SECONDS, ""
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            if time.monotonic() - self._read >= LOOK_SECONDS:
                self._read, self._text = time.monotonic(), self._now()
            return self._text

    def _now(self) -> str:
        try:
            self.view.refresh_swarm()
        except OSError:
            return self._text
        state, manifest = self.view.state, self.view.manifest
        if state is None or manifest is None or state.phase != "running":
            return ""
        return f"round {state.round}/{manifest.rounds}, {counted(len(state.members), 'member')}"
