"""Defines what is known of a swarm, as plain records: exactly the API's responses."""

from dataclasses import dataclass
from typing import Literal

from rl_swarm.monitor.run_reader import Phase


@dataclass(frozen=True)
class AnswerPair:
    """Holds a question that no node trained on, with a node's first and last answer to it; the texts are one line."""

    question: str
    before: str
    after: str
    before_right: bool
    after_right: bool
    key: str | None  # the right answer, where there is one
    task: str
    node: str
    name: str


@dataclass(frozen=True)
class Overview:
    name: str
    address: str
    swarm: str
    phase: Phase  # `stopped`: it has not finished, and no node is alive
    round: int
    stage: int
    rounds: int
    stages: int
    round_end: str
    seconds_to_next: float | None  # estimated from the pace or the interval
    nodes: int
    alive: int
    models: list[str]
    tasks: list[str]
    tokens: int  # generated, by the logs on this machine
    rollouts: int
    tokens_per_second: float
    reward: float | None  # mean of the nodes' last rounds
    reward_by_stage: list[float | None]  # the same in every stage; empty where a round has one
    held_out_start: float | None
    held_out_now: float | None
    held_out_protocol: str  # questions, samples and temperature of these
    headline: str  # the run in one sentence; empty while there is no held-out score
    example: AnswerPair | None  # became right, or wrong, as the score rose or fell; still wrong where it stayed
    external_share: float | None  # of the groups trained on
    has_logs: bool  # the nodes' logs can be read
    unreadable_lines: int  # in these logs
    can_stop: bool  # a user with the token can stop the run here
    experiment: str  # the experiment that it is a run of, if that is watched
    version: int  # grows when anything changes


@dataclass(frozen=True)
class NodeRow:
    """Holds a line of the leaderboard."""

    rank: int
    node: str
    name: str
    peer_id: str
    model: str
    alive: bool
    round: int | None
    participation: int
    reward: float | None  # mean of its last rounds
    total_reward: float
    trend: float | None
    wins: int
    held_out_start: float | None
    held_out_now: float | None
    tokens_per_second: float | None
    external_share: float | None
    role: str  # empty for an ordinary node


@dataclass(frozen=True)
class NodePage:
    total: int
    offset: int
    nodes: list[NodeRow]


@dataclass(frozen=True)
class Link:
    """Counts the groups that one node learned from another."""

    node: str
    name: str
    groups: int


@dataclass(frozen=True)
class TaskScore:
    task: str
    start: float | None
    now: float | None


@dataclass(frozen=True)
class NodeDetail:
    row: NodeRow
    device: str
    host: str
    joined: float | None
    last_heartbeat: float | None
    tokens: int
    rollouts: int
    peak_memory: float | None  # bytes
    restarts: int
    skipped: int  # times that it skipped rounds
    rejected: dict[str, int]  # rollouts of peers, by reason
    rejected_by_peers: dict[str, int]  # its own rollouts, by reason
    errors: dict[str, int]
    learned_from: list[Link]
    used_by: list[Link]
    held_out: list[TaskScore]
    checkpoints: list[int]  # rounds
    settings: dict[str, str]  # its own; without its log, those of the run
    hardware: dict[str, str]
    metrics: list[str]  # that have curves
    role_metrics: dict[str, float]  # the last ones of its role


@dataclass(frozen=True)
class Line:
    node: str
    name: str
    values: list[float | None]


@dataclass(frozen=True)
class Lines:
    """Holds one metric of several nodes over the same rounds, and their mean."""

    metric: str
    rounds: list[int]
    mean: list[float | None]
    lines: list[Line]


@dataclass(frozen=True)
class NodeCurves:
    """Holds several metrics of one node over the same rounds."""

    node: str
    name: str
    rounds: list[int]
    metrics: dict[str, list[float | None]]


@dataclass(frozen=True)
class Event:
    timestamp: float
    node: str
    name: str
    event: str
    round: int | None
    detail: str


@dataclass(frozen=True)
class EventPage:
    total: int
    offset: int
    events: list[Event]


@dataclass(frozen=True)
class ShownCompletion:
    """Holds one completion. Its author claims the reward; the advantage follows from the rewards of its group."""

    text: str
    reward: float
    advantage: float
    truncated: bool  # ended by the token limit
    shortened: bool  # shown in part


@dataclass(frozen=True)
class RolloutRow:
    id: str
    round: int
    stage: int
    number: int
    node: str
    name: str
    timestamp: float
    model: str
    task: str | None  # None if the question could not be generated again
    question: str
    answer: str | None  # None if unknown, or if several answers are right
    reward: float  # mean of the group
    completions: list[ShownCompletion]


@dataclass(frozen=True)
class RolloutPage:
    rollouts: list[RolloutRow]
    next: str | None  # where the next page begins; an empty page may have a next one
    unreadable: int  # publications that were left out


@dataclass(frozen=True)
class RunRow:
    run: str
    phase: Phase
    round: int
    rounds: int
    nodes: int
    reward: float | None
    held_out_start: float | None
    held_out_now: float | None
    current: bool  # the run that is being watched


@dataclass(frozen=True)
class RunPage:
    total: int
    offset: int
    runs: list[RunRow]


@dataclass(frozen=True)
class Stopping:
    stopping: bool


@dataclass(frozen=True)
class Health:
    status: Literal["alive", "stale", "waiting", "finished"]
    round: int
    alive: int
    seconds_since_heartbeat: float | None  # of any node of the swarm
