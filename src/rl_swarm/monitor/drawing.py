"""Draws a swarm in characters, for a terminal and a notebook's cell, from the same records as the page."""

import time
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import Event, NodeRow, Overview
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.plural import counted

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
MAX_EVENTS = 5
MAX_MODELS = 3  # that are named
LEAST_ROWS = 3  # of the table, even in a low terminal
LONGEST, LONGEST_PATH = 200, 1000  # characters of a peer's text, and of a path
LONGEST_TIME = 1e7  # seconds; longer times are not shown
TITLES = ("#", "node", "model", "rounds", "reward", "trend", "wins", "held-out", "tokens/s", "external")
WORTH = (
    "node",
    "reward",
    "trend",
    "wins",
    "#",
    "held-out",
    "external",
    "rounds",
    "tokens/s",
    "model",
)  # fmt: skip; what a narrow terminal shows first
GAP = 2  # between columns


class Drawing:
    """Follows a swarm and draws it."""

    def __init__(self, view: RunView, clock: Callable[[], float] = time.monotonic) -> None:
        self.follower, self.clock = Follower(view), clock
        self.started = clock()
        self._first: tuple[int, float] | None = None  # the first round that was seen, and when

    def refresh(self, now: bool = False) -> Overview:
        """Read what is new; with `now`, even if it was read just before."""
        self.follower.poll_now() if now else self.follower.poll()
        return snapshot.overview(self.follower)

    def ended(self) -> bool:
        """Return whether nothing more will come: the last round is over and no node measures its held-out score any
        more."""
        overview = snapshot.overview(self.follower)
        return overview.phase == "finished" and not overview.alive

    def seconds_left(self, overview: Overview) -> float | None:
        """Estimate the time left from the pace since the first round that was seen."""
        if overview.phase != "running":
            return None
        if self._first is None:
            self._first = (overview.round, self.clock())
        first, since = self._first
        done = overview.round - first
        return (self.clock() - since) / done * (overview.rounds - overview.round) if done > 0 else None

    def draw(self, width: int, height: int | None = None, notes: Sequence[str] = ()) -> Group:
        """Draw the whole view, in so many columns and lines, with `notes` at the end."""
        overview = snapshot.overview(self.follower)
        head: list[RenderableType] = [self._name(overview), self._progress(overview, width)]
        head += self._facts(overview, width)
        happened = snapshot.events(self.follower, limit=MAX_EVENTS).events
        foot: list[RenderableType] = [Text(), *(_event(event) for event in happened)] if happened else []
        foot += [Text(plain(note), style="yellow") for note in [*_unreadable(overview), *notes]]
        room = overview.nodes if height is None else max(LEAST_ROWS, height - len(head) - len(foot) - 3)
        page = snapshot.nodes(self.follower, limit=room)
        if page.total > room:
            foot.insert(0, Text(f"and {page.total - room} more", style="dim"))
        return Group(*head, _table([_cells(row, overview) for row in page.nodes], width), *foot)

    def _name(self, overview: Overview) -> Text:
        line = _line(plain(overview.name or overview.address), style="bold")
        if overview.name not in ("", overview.address):
            line.append(f"  {plain(overview.address)}", style="dim")
        return line

    def _progress(self, overview: Overview, width: int) -> Table:
        done = overview.rounds if overview.phase == "finished" else overview.round
        stage = f", stage {overview.stage + 1}/{overview.stages}" if overview.stages > 1 else ""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(
            _line(f"round {done}/{overview.rounds}{stage}", style="bold"),
            ProgressBar(max(1, overview.rounds), done, width=max(5, min(30, width // 6))),
            _line(self._phase(overview), style="dim"),
        )
        return grid

    def _phase(self, overview: Overview) -> str:
        if overview.phase == "waiting":
            return f"starting: {overview.alive} of {overview.nodes} online"
        if overview.phase == "stopped":
            return "stopped: no node is online"
        if overview.phase == "crashed":
            return f"crashed: {counted(len(overview.condition.crashed), 'node')} ended without leaving"
        if overview.phase == "finished":
            return "measuring the held-out score" if overview.alive else "finished"
        soon, left = overview.seconds_to_next, self.seconds_left(overview)
        known = [f"next in {clock(soon)}"] if soon else []
        return ", ".join(known + ([f"{clock(left)} left"] if left else [])) or "first rounds"

    def _facts(self, overview: Overview, width: int) -> list[Text]:
        named, more = overview.models[:MAX_MODELS], len(overview.models) - MAX_MODELS
        models = ", ".join(plain(model, 40) for model in named) + (f" and {more} more" if more > 0 else "")
        nodes = counted(overview.nodes, "node")
        online = f"{overview.alive} of {nodes} online" if overview.phase == "running" else nodes
        facts = [online, f"model {models}" if models else ""]
        if overview.held_out_now is not None:
            change = _change(overview.held_out_start, overview.held_out_now, 3)
            facts.append(f"held-out {change} ({self.follower.view.held_out_protocol()})")
        if overview.external_share is not None:
            facts.append(f"{overview.external_share:.0%} external groups")
        facts.append(counted(overview.rollouts, "rollout") if overview.rollouts else "")
        facts.append(counted(overview.tokens, "token") if overview.tokens else "")
        lines = [_line(line) for line in packed([fact for fact in facts if fact], width)]
        if overview.reward is not None:
            start = f"reward {_figure(overview.reward)}  "
            room = max(1, min(CURVE_WIDTH, width - len(start)))
            mean = snapshot.lines(self.follower, "reward_local", points=room, most=0, spread=False).mean
            lines.insert(0, _line(start).append(curve(mean), style="green"))
        if any(reward is not None for reward in overview.reward_by_stage):
            figures = ("–" if reward is None else _figure(reward) for reward in overview.reward_by_stage)
            lines.insert(1, _line(f"by stage {', '.join(figures)}"))
        return lines


def _unreadable(overview: Overview) -> list[str]:
    lines = overview.unreadable_lines
    return [f"{counted(lines, 'line')} of the nodes' logs cannot be read"] if lines else []


def curve(values: Sequence[float | None]) -> str:
    """Draw values as one line of block characters, from the lowest to the highest; a gap where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    steps = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[round((value - low) / span * steps) if span else 0] for value in values
    )


def packed(items: Sequence[str], width: int) -> list[str]:
    """Join items on as few lines as they fit."""
    lines: list[str] = []
    for item in items:
        if lines and cell_len(lines[-1]) + cell_len(item) + 3 <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


def plain(text: str, most: int = LONGEST) -> str:
    """Return a peer's text as one line without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


def marked(text: str, most: int = LONGEST) -> str:
    """Return a peer's text, safe in a line with markup."""
    return escape(plain(text, most))


def clock(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < LONGEST_TIME:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _cells(row: NodeRow, overview: Overview) -> dict[str, Text]:
    change, flat = row.trend, row.trend is None or abs(row.trend) <= 0.005
    behind = overview.round - row.round if row.round is not None else 0
    running = overview.phase == "running"
    note = " (offline)" if running and not row.alive else f" ({behind} behind)" if running and behind > 1 else ""
    sign = "•" if flat else "▲" if change and change > 0 else "▼"
    arrow = "" if change is None else f"{sign} {_figure(change, sign='+')}"
    colour = "dim" if flat else "green" if change and change > 0 else "red"
    cells = {
        "#": str(row.rank),
        "node": plain(row.name, 64) + (f" {plain(row.role, 32)}" if row.role else "") + note,
        "model": plain(row.model, 40),
        "rounds": str(row.participation),
        "reward": "" if row.reward is None else _figure(row.reward),
        "wins": str(row.wins),
        "held-out": "" if row.held_out_now is None else _change(row.held_out_start, row.held_out_now, 2),
        "tokens/s": "" if row.tokens_per_second is None else _figure(row.tokens_per_second, 0),
        "external": "" if row.external_share is None else f"{row.external_share:.0%}",
    }
    style = "" if row.alive or not running else "dim"
    return {title: Text(cell, style=style) for title, cell in cells.items()} | {"trend": Text(arrow, colour)}


def _table(rows: Sequence[dict[str, Text]], width: int) -> Table:
    """Draw the nodes, with as many columns as fit."""
    left, shown = width, set[str]()
    one_model = len({row["model"].plain for row in rows}) < 2  # which stands above the table
    for title in (title for title in WORTH if title != "model" or not one_model):
        wide = max([len(title), *(row[title].cell_len for row in rows)])
        if left >= wide or title == "node":
            shown.add(title)
            left -= wide + GAP
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    for title in (title for title in TITLES if title in shown):
        right = title not in ("node", "model")
        table.add_column(title, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[title] for title in TITLES if title in shown))
    return table


def _event(event: Event) -> Text:
    try:
        when = time.strftime("%H:%M:%S", time.localtime(event.timestamp))
    except (OverflowError, ValueError, OSError):  # no time at all
        when = "--:--:--"
    played = f" in round {event.round + 1}" if event.round is not None else ""
    line = _line(f"{when}  {plain(event.name, 64)} {plain(event.event)}{played}", style="dim")
    return line.append(f"  {plain(event.detail)}") if event.detail else line


def _change(start: float | None, now: float, digits: int) -> str:
    known = [_figure(value, digits) for value in (start, now) if value is not None]
    return " → ".join(dict.fromkeys(known))


def _figure(value: float, digits: int = 2, sign: str = "") -> str:
    """Format a number in few characters, however large it is."""
    return f"{value:{sign},.{digits}f}" if abs(value) < 1e6 else f"{value:{sign}.0e}"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
