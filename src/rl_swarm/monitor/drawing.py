"""Draws a swarm in characters, for a terminal and a notebook's cell, from the same records as the page."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.charts import BAR, bar, chart, curve, figure, percentiles, spread, spread_line
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import AnswerPair, Event, NodeRow, Overview
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.plural import counted

CURVE_WIDTH = 60
MAX_EVENTS = 5
WIDE = 140  # columns from which curves and events stand beside the table
CHART_ROWS, WIDE_EVENTS = 8, 12
MAX_LISTED, BEST = 30, 10  # nodes that are all listed; the best of more than that
MAX_OFFLINE = 12  # that are named
FRAMES, FRAMES_PER_SECOND = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", 8
MAX_MODELS = 3  # that are named
MAX_ROWS = 10_000  # of the table, without a terminal
LEAST_ROWS = 3  # of the table, even in a low terminal
LONGEST, LONGEST_PATH = 200, 1000  # characters of a peer's text, and of a path
LONGEST_TIME = 1e7  # seconds; longer times are not shown
TITLES = ("#", "node", "model", "rounds", "reward", "trend", "wins", "test score", "tokens/s", "external")
WORTH = (
    "node",
    "reward",
    "trend",
    "wins",
    "#",
    "test score",
    "external",
    "rounds",
    "tokens/s",
    "model",
)  # fmt: skip; what a narrow terminal shows first
GAP = 2  # between columns


@dataclass(frozen=True)
class StartStep:
    kind: str
    text: str


class Drawing:
    """Follows a swarm and draws it."""

    def __init__(self, view: RunView, clock: Callable[[], float] = time.monotonic, wanted: int = 0) -> None:
        self.follower, self.clock = Follower(view), clock
        self.wanted = wanted  # nodes that are being started; 0: unknown
        self.started = clock()
        self._first: tuple[int, float] | None = None  # the first round that was seen, and when

    def refresh(self, now: bool = False) -> Overview:
        """Read what is new; with `now`, even if it was read just before."""
        self.follower.poll_now() if now else self.follower.poll()
        return snapshot.overview(self.follower)

    def ended(self) -> bool:
        """Return whether nothing more will come: the last round is over and no node measures its test score any
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

    def draw(
        self,
        width: int,
        height: int | None = None,
        notes: Sequence[str] = (),
        every: bool = False,
        sums_up: bool = True,
    ) -> Group:
        """Draw the whole view, in so many columns and lines, with `notes` at the end.

        `every` lists all nodes of a large swarm. With `sums_up` the sentence about the run is part of it.
        """
        overview = snapshot.overview(self.follower)
        head: list[RenderableType] = [self._name(overview), self.status(overview, width)]
        if sums_up and overview.headline:
            head.append(Text(overview.headline, style="bold"))
            if overview.example and overview.phase in ("finished", "stopped"):
                head += [answer_pair(overview.example), Text()]
        wide = width >= WIDE
        head += self._facts(overview, width, with_curve=not wide)
        foot: list[RenderableType] = [Text(plain(note), style="yellow") for note in [*_unreadable(overview), *notes]]
        happened = snapshot.events(self.follower, limit=WIDE_EVENTS if wide else MAX_EVENTS).events
        events: list[RenderableType] = [_event(event, whole=wide) for event in happened]
        crowd = overview.nodes > MAX_LISTED and not every
        if not wide and events and not crowd:
            foot = [Text(), *events, *foot]
        room = MAX_ROWS if height is None else max(LEAST_ROWS, height - len(head) - len(foot) - 3)
        if crowd:
            room = min(room, BEST)
        page = snapshot.nodes(self.follower, limit=MAX_ROWS if crowd else room)
        cells = [_cells(row, overview) for row in page.nodes[:room]]
        table, used = _table(cells, width * 3 // 5 if wide else width)
        left = max(WIDE // 2, used) if wide else width
        below: list[RenderableType] = []
        if page.total > room:
            more = " (`rl-swarm status --all` lists them)" if crowd else ""
            below.append(Text(f"and {page.total - room:,} more{more}", style="dim"))
        if crowd:
            used = len(head) + len(foot) + room + len(below) + 2  # the titles, and the prompt
            spare = None if height is None else height - used
            below += self._crowd(page.nodes, overview, left, spare)
        if not wide:
            return Group(*head, table, *below, *foot)
        beside = [*self._chart(width - left - GAP), *events]
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=left)
        grid.add_column(width=width - left - GAP)
        grid.add_row(Group(table, *below), Group(*beside))
        return Group(*head, Text(), grid, *foot)

    def _crowd(self, rows: Sequence[NodeRow], overview: Overview, width: int, room: int | None) -> list[Text]:
        """Sum up a swarm of many nodes: how their scores are spread, and who is offline."""
        scores = [row.held_out_now for row in rows if row.held_out_now is not None]
        what = "test scores"
        if not scores:
            scores, what = [row.reward for row in rows if row.reward is not None], "rewards"
        offline = [row.name for row in rows if not row.alive] if overview.phase == "running" else []
        named = ", ".join(plain(name, 64) for name in offline[:MAX_OFFLINE])
        more = f" and {len(offline) - MAX_OFFLINE:,} more" if len(offline) > MAX_OFFLINE else ""
        gone = [_line(f"offline: {named}{more}", style="yellow")] if offline else []
        if not scores:
            return gone
        title = _line("").append(f"{what} of {counted(len(scores), 'node')}", style="bold")
        whole = [Text(), title, *spread(scores, width), *([Text()] if gone else []), *gone]
        if room is None or len(whole) <= room:
            return whole
        return [title.append("  ").append_text(spread_line(scores)), percentiles(scores), *gone][: max(0, room)]

    def _chart(self, width: int) -> list[RenderableType]:
        """Draw the mean reward of the nodes over the rounds."""
        found = snapshot.lines(self.follower, "reward_local", points=width, most=0)
        lines = chart(found.mean, width, CHART_ROWS)
        if not lines:
            return []
        ends = f"{'':>7}round 1 to {found.rounds[-1] + 1:,}"
        title = Text("reward of fresh answers, mean of the nodes", style="bold")
        return [title, *lines, Text(ends, style="dim"), Text()]

    def _name(self, overview: Overview) -> Text:
        line = _line(plain(overview.name or overview.address), style="bold")
        if overview.name not in ("", overview.address):
            line.append(f"  {plain(overview.address)}", style="dim")
        return line

    def status(self, overview: Overview, width: int, seconds: float | None = None) -> Text:
        """Return the line that says where the run is. With the seconds since the start, it moves."""
        moving = seconds is not None and not (overview.phase == "finished" and not overview.alive)
        line = _line("").append(f"{spinner(seconds or 0.0)} {clock(seconds)}  " if moving else "", style=BAR)
        if overview.phase == "waiting":
            return line.append(self.start().text)
        done = overview.rounds if overview.phase == "finished" else overview.round
        stage = f", stage {overview.stage + 1}/{overview.stages}" if overview.stages > 1 else ""
        line.append(f"round {done}/{overview.rounds}{stage}  ", style="bold")
        line.append(bar(done, overview.rounds, max(5, min(40, width // 6))))
        return line.append(f"  {self._phase(overview)}", style="dim")

    def start(self) -> "StartStep":
        """Say what nodes do before the first round: load the model, then answer the held-out questions once."""
        overview = snapshot.overview(self.follower)
        wanted, ready = max(self.wanted, overview.nodes), overview.nodes
        loaded = max(ready, len(self._with_logs()))
        of_all = f" of {counted(wanted, 'node')}" if wanted else " nodes"
        if not wanted or loaded < wanted:
            return StartStep("load", f"loading the model, {loaded}{of_all} ready")
        if ready < wanted:
            return StartStep("score", f"first answers to the unseen questions, {ready}{of_all} ready")
        return StartStep("begin", f"{counted(ready, 'node')} ready, the first round begins")

    def _with_logs(self) -> list[str]:
        """Name the nodes that have a log on this machine: they have loaded their models."""
        files = self.follower.view.local_files
        try:
            return [name for name in files.names("logs") if files.has_folder(f"logs/{name}")]
        except OSError:
            return []

    def _phase(self, overview: Overview) -> str:
        if overview.phase == "stopped":
            return "stopped: no node is online"
        if overview.phase == "crashed":
            return f"crashed: {counted(len(overview.condition.crashed), 'node')} ended without leaving"
        if overview.phase == "finished":
            return "measuring the test score" if overview.alive else "finished"
        soon, left = overview.seconds_to_next, self.seconds_left(overview)
        known = [f"next in {clock(soon)}"] if soon else []
        return ", ".join(known + ([f"{clock(left)} left"] if left else [])) or "first rounds"

    def _facts(self, overview: Overview, width: int, with_curve: bool = True) -> list[Text]:
        named, more = overview.models[:MAX_MODELS], len(overview.models) - MAX_MODELS
        models = ", ".join(plain(model, 40) for model in named) + (f" and {more} more" if more > 0 else "")
        nodes = counted(overview.nodes, "node")
        online = f"{overview.alive:,} of {nodes} online" if overview.phase == "running" else nodes
        facts = [online, f"model {models}" if models else ""]
        if overview.reward is not None and not with_curve:
            facts.insert(0, f"reward {figure(overview.reward)}")
        if overview.held_out_now is not None:
            change = _change(overview.held_out_start, overview.held_out_now, 3)
            facts.append(f"test score {change} ({self.follower.view.held_out_protocol()})")
        if overview.external_share is not None:
            facts.append(f"{overview.external_share:.0%} external groups")
        facts.append(counted(overview.rollouts, "rollout") if overview.rollouts else "")
        facts.append(counted(overview.tokens, "token") if overview.tokens else "")
        lines = [_line(line) for line in packed([fact for fact in facts if fact], width)]
        if overview.reward is not None and with_curve:
            start = f"reward {figure(overview.reward)}  "
            room = max(1, min(CURVE_WIDTH, width - len(start)))
            mean = snapshot.lines(self.follower, "reward_local", points=room, most=0, spread=False).mean
            lines.insert(0, _line(start).append(curve(mean), style="green"))
        if any(reward is not None for reward in overview.reward_by_stage):
            figures = ("–" if reward is None else figure(reward) for reward in overview.reward_by_stage)
            lines.insert(1, _line(f"by stage {', '.join(figures)}"))
        return lines


def answer_pair(example: AnswerPair) -> Table:
    """Draw a question with the first and the last answer to it."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text("  asked", style="dim"), Text(example.question))
    for when, answer, right in (
        ("  before", example.before, example.before_right),
        ("  after", example.after, example.after_right),
    ):
        verdict = Text("right  ", style="green") if right else Text("wrong  ", style="red")
        grid.add_row(Text(when, style="dim"), verdict.append(answer or "(nothing)", style="default"))
    return grid


def spinner(seconds: float) -> str:
    """Return the sign of this moment: it changes several times a second."""
    return FRAMES[int(seconds * FRAMES_PER_SECOND) % len(FRAMES)]


def _unreadable(overview: Overview) -> list[str]:
    lines = overview.unreadable_lines
    return [f"{counted(lines, 'line')} of the nodes' logs cannot be read"] if lines else []


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
    arrow = "" if change is None else f"{sign} {figure(change, sign='+')}"
    colour = "dim" if flat else "green" if change and change > 0 else "red"
    cells = {
        "#": str(row.rank),
        "node": plain(row.name, 64) + (f" {plain(row.role, 32)}" if row.role else "") + note,
        "model": plain(row.model, 40),
        "rounds": str(row.participation),
        "reward": "" if row.reward is None else figure(row.reward),
        "wins": str(row.wins),
        "test score": "" if row.held_out_now is None else _change(row.held_out_start, row.held_out_now, 2),
        "tokens/s": "" if row.tokens_per_second is None else figure(row.tokens_per_second, 0),
        "external": "" if row.external_share is None else f"{row.external_share:.0%}",
    }
    style = "" if row.alive or not running else "dim"
    return {title: Text(cell, style=style) for title, cell in cells.items()} | {"trend": Text(arrow, colour)}


def _table(rows: Sequence[dict[str, Text]], width: int) -> tuple[Table, int]:
    """Draw the nodes, with as many columns as fit; return the width of that, too."""
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
    return table, min(width, width - left - GAP)


def _event(event: Event, whole: bool = False) -> Text:
    """Draw an event in one line, or in as many as it needs."""
    try:
        when = time.strftime("%H:%M:%S", time.localtime(event.timestamp))
    except (OverflowError, ValueError, OSError):  # no time at all
        when = "--:--:--"
    played = f" in round {event.round + 1}" if event.round is not None else ""
    line = _line(f"{when}  {plain(event.name, 64)} {plain(event.event)}{played}", style="dim")
    line.no_wrap = not whole
    return line.append(f"  {plain(event.detail)}") if event.detail else line


def _change(start: float | None, now: float, digits: int) -> str:
    known = [figure(value, digits) for value in (start, now) if value is not None]
    return " → ".join(dict.fromkeys(known))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
