"""Shows a swarm while it runs: a changing picture in a terminal, plain lines elsewhere."""

import threading
import time
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.drawing import FRAMES_PER_SECOND, MAX_LISTED, Drawing, clock
from rl_swarm.monitor.records import Overview
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.plural import counted

LINE_EVERY = 10  # rounds, when there is no terminal
DRAW_SECONDS = 1.0  # between pictures
STATUS_LINE = 1  # of the picture: the one that moves between pictures


class LiveView:
    """Shows a run from its first second on, before there is anything but processes that start."""

    def __init__(self, view: RunView, console: Console, wanted: int = 0, sums_up: bool = True) -> None:
        self.drawing, self.console = Drawing(view, wanted=wanted), console
        self.sums_up = sums_up
        self.printed: object = None  # the step or round of the last line
        self.notes: list[str] = []
        self._drawn, self._lines = -1.0, list[list[Segment]]()
        self._size = (0, 0)
        self.live = (
            Live(get_renderable=lambda: self, console=console, refresh_per_second=FRAMES_PER_SECOND)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "LiveView":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.drawing.refresh(now=True)
            self._drawn = -1.0
            self.live.transient = error is not None  # what is said next matters
            self.live.stop()

    def update(self, restarts: int = 0) -> None:
        """Read what is new; the picture is drawn by a thread of its own."""
        overview = self.drawing.refresh()
        self.notes = [f"restarted {counted(restarts, 'time')}"] if restarts else []
        if not self.live:
            self._line(overview)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the whole picture once a second, and the line that moves each time."""
        now = time.monotonic()
        overview = snapshot.overview(self.drawing.follower)
        width, height = console.size
        ending = self.live is None or not self.live.is_started
        if now - self._drawn >= DRAW_SECONDS or self._size != (width, height) or ending:
            drawn = self.drawing.draw(width, height, self.notes, sums_up=self.sums_up)
            self._lines = console.render_lines(drawn, options.update(height=None), pad=False)
            self._drawn, self._size = now, (width, height)
        lines = list(self._lines)
        if not ending and len(lines) > STATUS_LINE:
            status = self.drawing.status(overview, width, self.drawing.clock() - self.drawing.started)
            lines[STATUS_LINE] = console.render_lines(status, options.update(height=None), pad=False)[0]
        for line in lines:
            yield from line
            yield Segment.line()

    def _line(self, overview: Overview) -> None:
        """Print a line for every step of the start, then for every few rounds."""
        if overview.phase == "waiting":
            step = self.drawing.start()
            if step.kind != self.printed:
                self.printed = step.kind
                self._say(step.text)
            return
        if overview.phase == "finished" and overview.alive and self.printed != "finished":
            self.printed = "finished"
            self._say("last answers to the unseen questions")
        if overview.phase != "running" or overview.round // LINE_EVERY == self.printed:
            return
        self.printed = overview.round // LINE_EVERY
        left = self.drawing.seconds_left(overview)
        rows = snapshot.nodes(self.drawing.follower).nodes
        learners = [row for row in rows if not row.role or row.held_out_start is not None]
        rewards = ", ".join(f"{row.name} {row.reward:.2f}" for row in learners if row.reward is not None)
        ending = f" | {clock(left)} left" if left is not None else ""
        self._say(f"round {overview.round}/{overview.rounds} | reward: {rewards or 'first answers'}{ending}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def watch(view: RunView, console: Console, stop: threading.Event) -> None:
    """Show a swarm until it has finished or `stop` is set; show it once without a terminal."""
    if not console.is_terminal:
        print_once(view, console)
        return
    with LiveView(view, console) as live:
        while not stop.is_set():
            live.update()
            if live.drawing.ended():
                break
            stop.wait(DRAW_SECONDS)


def print_once(view: RunView, console: Console, every: bool = False) -> None:
    """Print the swarm as it is; all nodes of a large one only if `every` is set."""
    drawing = Drawing(view)
    crowd = drawing.refresh().nodes > MAX_LISTED and not every
    height = console.height if crowd and console.is_terminal else None  # many nodes on one screen
    console.print(drawing.draw(console.width, height, every=every))
