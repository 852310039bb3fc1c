"""What `up` and `status --watch` show while a swarm runs: a live table in a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_swarm.report import TREND_ROUNDS, NodeView, RunView

LINE_EVERY = 10  # rounds, when there is no terminal


class LiveView:
    def __init__(self, run: RunView, console: Console) -> None:
        self.run, self.console = run, console
        self.started = time.monotonic()
        self.first_round: tuple[int, float] | None = None  # the first round seen, and when
        self.said = -1
        self.live = (
            Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        )

    def __enter__(self) -> "LiveView":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.update(self.table(closing="finished"), refresh=True)
            self.live.stop()

    def update(self, restarts: int) -> None:
        self.run.refresh()
        if self.live:
            self.live.update(self.table(restarts))
        else:
            self.line()

    @property
    def round(self) -> int:
        return self.run.state.round if self.run.state else 0

    @property
    def total(self) -> int:
        return self.run.manifest.rounds if self.run.manifest else 1

    def seconds_left(self) -> float | None:
        """From the pace since the first round that was seen."""
        state = self.run.state
        if state is None or state.phase == "waiting":
            return None
        if self.first_round is None:
            self.first_round = (state.round, time.monotonic())
        first, since = self.first_round
        done = state.round - first
        return (time.monotonic() - since) / done * (self.total - state.round) if done > 0 else None

    def line(self) -> None:
        state = self.run.state
        if state is None or state.phase != "running" or state.round // LINE_EVERY == self.said:
            self.seconds_left()
            return
        self.said = state.round // LINE_EVERY
        left = self.seconds_left()
        nodes = ", ".join(
            f"{view.name} {view.reward():.2f}" for view in self.run.nodes.values() if view.has_reward
        )
        ending = f" | {clock(left)} left" if left is not None else ""
        self.console.print(
            f"round {state.round}/{self.total} | reward: {nodes or 'first answers'}{ending}",
            highlight=False,
            soft_wrap=True,
        )

    def table(self, restarts: int = 0, closing: str = "measuring the held-out score") -> Group:
        """The whole view. `closing` is said once the last round has ended."""
        finished = self.run.state is not None and self.run.state.phase == "finished"
        done = self.total if finished else self.round
        left = self.seconds_left()
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"round {done}/{self.total}", style="bold"),
            ProgressBar(self.total, done, width=30),
            Text(closing if finished else self._phase(left), style="dim"),
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("node", no_wrap=True)
        for title in ("reward", "trend", "held out", "tokens/s", "from others"):
            table.add_column(title, justify="right", no_wrap=True)
        for view in self.run.nodes.values():
            table.add_row(*self._row(view))
        foot = f"restarted {restarts} times" if restarts else ""
        return Group(head, table, Text(foot, style="yellow"))

    def _phase(self, left: float | None) -> str:
        if self.run.state is None or self.run.state.phase == "waiting":
            return f"starting: {len(self.run.nodes)} nodes are here, measuring where they stand"
        return (
            f"{clock(time.monotonic() - self.started)} so far, {clock(left)} left" if left else "first rounds"
        )

    def _row(self, view: NodeView) -> tuple[Text | str, ...]:
        change = view.reward() - view.reward(before=TREND_ROUNDS) if len(view.rounds) > TREND_ROUNDS else 0.0
        arrow = Text(f"{'▲' if change > 0.005 else '▼' if change < -0.005 else '•'} {change:+.2f}")
        arrow.stylize("green" if change > 0.005 else "red" if change < -0.005 else "dim")
        start, now = view.start, view.now
        held_out = (
            f"{start['sampled']:.2f} → {now['sampled']:.2f}" if start and now and now is not start else ""
        )
        if start and not held_out:
            held_out = f"{start['sampled']:.2f}"
        return (
            Text(view.name + self._lag(view), style="" if view.alive else "dim"),
            f"{view.reward():.2f}" if view.has_reward else "",
            arrow if view.rounds else "",
            held_out,
            f"{view.last.tokens_per_second:,.0f}" if view.last else "",
            str(view.external_taken) if view.rounds or not self.run.address.is_url else "",
        )

    def _lag(self, view: NodeView) -> str:
        behind = self.round - view.last.round if view.last else 0
        return f" ({behind} rounds behind)" if behind > 1 else ""


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
