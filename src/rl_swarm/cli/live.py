"""Shows a swarm while it runs: a changing picture in a terminal, plain lines elsewhere."""

import threading
from types import TracebackType

from rich.console import Console
from rich.live import Live

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.drawing import Drawing, clock
from rl_swarm.monitor.records import Overview
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.plural import counted

LINE_EVERY = 10  # rounds, when there is no terminal
DRAW_SECONDS = 1.0  # between pictures


class LiveView:
    def __init__(self, view: RunView, console: Console) -> None:
        self.drawing, self.console = Drawing(view), console
        self.drawn = -1.0
        self.printed = -1
        self.notes: list[str] = []
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "LiveView":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.drawing.refresh(now=True)
            self._draw()
            self.live.stop()

    def update(self, restarts: int = 0) -> None:
        overview = self.drawing.refresh()
        now = self.drawing.clock()
        if not self.live:
            self._line(overview)
        elif now - self.drawn >= DRAW_SECONDS:
            self.notes = [f"restarted {counted(restarts, 'time')}"] if restarts else []
            self._draw()
            self.drawn = now

    def _draw(self) -> None:
        assert self.live is not None
        width, height = self.console.size
        self.live.update(self.drawing.draw(width, height, self.notes), refresh=True)

    def _line(self, overview: Overview) -> None:
        left = self.drawing.seconds_left(overview)
        if overview.phase != "running" or overview.round // LINE_EVERY == self.printed:
            return
        self.printed = overview.round // LINE_EVERY
        rows = snapshot.nodes(self.drawing.follower).nodes
        learners = [row for row in rows if not row.role or row.held_out_start is not None]
        rewards = ", ".join(f"{row.name} {row.reward:.2f}" for row in learners if row.reward is not None)
        ending = f" | {clock(left)} left" if left is not None else ""
        self.console.print(
            f"round {overview.round}/{overview.rounds} | reward: {rewards or 'first answers'}{ending}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


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
    drawing = Drawing(view)
    drawing.refresh()
    console.print(drawing.draw(console.width))
