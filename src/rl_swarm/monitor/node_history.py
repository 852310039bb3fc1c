"""Keeps a node's curves and sums, not the lines of its log."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, get_type_hints

from rl_swarm.monitor.edges import Edges
from rl_swarm.monitor.records import Event
from rl_swarm.monitor.run_reader import TREND_ROUNDS, NodeView
from rl_swarm.monitor.sentences import best_score, first_solved, told
from rl_swarm.monitor.series import Curves, number
from rl_swarm.node.settings import public_settings
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import EVENTS, read_lines
from rl_swarm.telemetry.schema import PHASES, Load, RoundRecord

NO_CURVE = (  # they say when, or are summed over the run
    "timestamp", "round", "stage", "policy_version", "local_groups", "local_with_signal", "external_scored",
    "generated_tokens",
)  # fmt: skip
NUMBERS = (int, float, float | None)
METRICS = tuple(name for name, kind in get_type_hints(RoundRecord).items() if kind in NUMBERS and name not in NO_CURVE)
LOADS = Load.__struct_fields__
MEASURED = (*METRICS, *(f"seconds.{phase}" for phase in PHASES), *(f"load.{part}" for part in LOADS))
_values = attrgetter(*MEASURED)
KEPT_LINES = 2 * TREND_ROUNDS  # of a log: the trend is made from them
MAX_NAMES = 1024  # of peers or reasons that are counted for one node
MAX_WORDS = 128  # settings of one node
MAX_NEWS = 8  # tasks that are told of as first solved at a time
ERRORS = ("failed", "push_failed")
LONGEST = 300  # characters of an event's detail
AHEAD = 1000  # rounds by which a log may be ahead of the state that was read before it


@dataclass
class NodeHistory:
    curves: Curves = field(default_factory=Curves)
    held_out: Curves = field(default_factory=Curves)
    tokens: float = 0.0
    rollouts: int = 0
    own_groups: int = 0  # with signal
    external_groups: int = 0  # trained on
    learned_from: Counter[str] = field(default_factory=Counter)  # by peer id
    edges: Edges = field(default_factory=Edges)  # the same round by round; without its log, its votes
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    rejected_by_peers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by author and reason
    errors: Counter[str] = field(default_factory=Counter)
    hardware: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    skipped: int = 0
    alive: bool | None = None  # at the last poll
    best_held_out: float | None = None
    solved: set[str] = field(default_factory=set)  # tasks with a right answer to a held-out question
    _rounds: int = 0  # lines of the view that were added
    _scores: int = 0
    _events: int = 0  # bytes of its events that were read
    _begun: bool = False  # it has joined before

    @property
    def external_share(self) -> float | None:
        groups = self.external_groups + self.own_groups
        return self.external_groups / groups if groups else None

    def update(self, view: NodeView, most_rounds: int, numbers: Mapping[str, int]) -> int:
        """Add what the view has read since the last time, then drop it from the view. Return how many lines that
        were. `numbers` are those of the peers on the map, by peer id."""
        lines = view.rounds[self._rounds :]
        if lines := [line for line in lines if line.round < most_rounds]:
            self._add(lines, numbers)
        del view.rounds[:-KEPT_LINES]
        self._rounds = len(view.rounds)
        scores = view.held_out[self._scores :]
        for line in scores:
            played = number(line.get("round"))
            if played is not None and -1 <= played < most_rounds:
                values = {key: [number(line[key])] for key in ("sampled", "greedy")}
                self.held_out.add([int(played) + 1], values)  # number of rounds played: 0 is before the first
        del view.held_out[1:-1]
        self._scores = len(view.held_out)
        return len(lines) + len(scores)

    def good_news(self, view: NodeView) -> list[Event]:
        """Return the best held-out scores and the first solved tasks among the scores that `update` has not read."""
        found = []
        for line in view.held_out[self._scores :]:
            score, when, played = (number(line.get(key)) for key in ("sampled", "timestamp", "round"))
            by_task = line.get("by_task")
            tasks = by_task.items() if isinstance(by_task, dict) else ()
            solved = {task for task, value in tasks if (number(value) or 0.0) > 0} - self.solved
            number_of_round = None if played is None or played < 0 else int(played)
            event = Event(when or 0.0, view.node, view.name, "", number_of_round, "")
            if score is not None and self.best_held_out is not None and when:
                found += [first_solved(event, task) for task in sorted(solved)[:MAX_NEWS]]
                found += [best_score(event, score, self.best_held_out)] if score > self.best_held_out else []
            self.best_held_out = max(filter(None, (score, self.best_held_out)), default=0.0)
            self.solved |= set(sorted(solved)[: MAX_NAMES - len(self.solved)])
        return found

    def _add(self, lines: Sequence[RoundRecord], numbers: Mapping[str, int]) -> None:
        columns = zip(*map(_values, lines), strict=True)
        rounds = [line.round for line in lines]
        self.curves.add(rounds, dict(zip(MEASURED, columns, strict=False)))
        for stage in {line.stage for line in lines if line.reward_by_stage}:
            rewards = [line.reward_local if line.stage == stage else None for line in lines]
            self.curves.add(rounds, {by_stage(stage): rewards})
        for line in lines:
            self.tokens += line.tokens_per_second * (line.seconds.generate or 0.0)
            self.rollouts += line.local_groups
            self.own_groups += line.local_with_signal
            self.external_groups += line.external_accepted
            count(self.learned_from, line.external_by_peer)
            taken = {numbers[peer]: n for peer, n in line.external_by_peer.items() if peer in numbers}
            self.edges.add(line.round, taken)
            count(self.rejected, line.external_rejected)

    def new_events(self, view: NodeView, files: LocalFiles) -> list[Event]:
        lines, self._events = read_lines(files, f"logs/{view.node}/{EVENTS}", self._events)
        return [event for line in lines if (event := self._event(line, view)) is not None]

    def _event(self, line: Mapping[str, Any], view: NodeView) -> Event | None:
        """Count a line of the log; a second `joined` of a node is a restart."""
        event = event_of(line, view)
        if event is None:
            return None
        if event.event in ("joined", "resumed"):
            self.hardware = words(line.get("hardware"))
            settings = line.get("settings")
            self.settings = words(public_settings(settings) if isinstance(settings, dict) else None)
            if self._begun or event.event == "resumed":
                self.restarts += 1
                after = f"after round {event.round + 1}" if event.round is not None else "from the start"
                event = told(replace(event, event="restarted", detail=f"{after}, {event.detail}"), line)
            self._begun = True
        self.skipped += event.event == "skipped"
        if event.event == "rejected":
            count_one(self.rejected_by_peers, (str(line.get("node")), str(line.get("reason"))))
        if event.event in ERRORS:
            count_one(self.errors, event.detail)
        return event


def by_stage(stage: int) -> str:
    """Return the name of the curve of one stage's rewards."""
    return f"reward_local.stage_{stage}"


def count(counter: Counter[str], found: Mapping[str, int]) -> None:
    """Add what a log counted. A peer wrote its names, so their number is bounded."""
    for name, times in found.items():
        if name in counter:
            counter[name] += times
        elif times and len(counter) < MAX_NAMES:
            counter[name] = times


def count_one(counter: Counter[Any], name: Any) -> None:
    if name in counter or len(counter) < MAX_NAMES:
        counter[name] += 1


def words(found: object) -> dict[str, str]:
    """Return a small table of a log as text."""
    if not isinstance(found, dict):
        return {}
    return {str(name)[:64]: str(value)[:LONGEST] for name, value in list(found.items())[:MAX_WORDS]}


def event_of(line: Mapping[str, Any], view: NodeView) -> Event | None:
    kind, when = line.get("event"), number(line.get("timestamp"))
    if not isinstance(kind, str) or not 0 < len(kind) <= 32 or when is None:
        return None
    played = number(line.get("round"))
    first, last = (number(line.get(name)) for name in ("first", "last"))
    skipped = f"rounds {first + 1:.0f} to {last + 1:.0f}" if first is not None and last is not None else ""
    shown = {
        "skipped": skipped,
        "rejected": f"{line.get('node')}: {line.get('reason')}. {line.get('detail')}",
        "not_asked": f"{line.get('peer')} for {line.get('rounds')} rounds",
        "joined": f"with {line.get('model')}",
        "resumed": f"with {line.get('model')}",
        "failed": str(line.get("error")),
        "push_failed": str(line.get("reason")),
    }
    others = {key: value for key, value in line.items() if key not in ("event", "timestamp", "round")}
    detail = shown.get(kind) or ", ".join(f"{key}: {value}" for key, value in others.items())
    number_of_round = None if played is None or played < 0 else int(played)
    return told(Event(when, view.node, view.name, kind, number_of_round, detail[:LONGEST]), line)
