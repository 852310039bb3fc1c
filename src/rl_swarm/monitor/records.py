"""Defines what is known of a swarm, as plain records: exactly the API's responses."""

from dataclasses import dataclass, field
from typing import Literal

from rl_swarm.monitor.run_reader import Phase


@dataclass(frozen=True)
class DamagedFile:
    path: str
    lines: int  # that cannot be read


@dataclass(frozen=True)
class LostNode:
    node: str
    name: str
    round: int | None  # the last one that it played
    last_sign: float | None


@dataclass(frozen=True)
class Condition:
    """Says what a viewer needs to know where a run does not just go on."""

    last_sign: float | None  # of life, of any node
    crashed: list[LostNode]  # they are gone without having left
    log_end: list[str]  # the last lines of logs/swarm.log, where nodes have crashed
    damaged: list[DamagedFile]
    resume: str  # the command that goes on with the run; empty where it cannot be resumed
    watch: str  # the command that opens the page again


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
    phase: Phase  # `stopped`, `crashed`: it has not finished, and no node is alive
    round: int
    stage: int
    rounds: int
    stages: int
    round_end: str
    seconds_to_next: float | None  # estimated from the pace or the interval
    seconds_left: float | None  # until the last round is over, estimated from the pace
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
    condition: Condition
    can_stop: bool  # a user with the token can stop the run here
    experiment: str  # the experiment that it is a run of, if that is watched
    version: int  # grows when anything changes


@dataclass(frozen=True)
class NodeRow:
    """Holds a line of the leaderboard."""

    rank: int  # by held-out score, then by reward
    node: str
    name: str
    peer_id: str
    model: str
    alive: bool
    round: int | None
    participation: int
    reward: float | None  # mean of its last rounds
    total_reward: float  # of all rounds, as the coordinator counted
    trend: float | None
    wins: int  # votes of other nodes: each votes every round for the peer with the highest mean reward
    held_out_start: float | None
    held_out_now: float | None
    tokens_per_second: float | None
    external_share: float | None
    role: str  # empty for an ordinary node
    spark: list[float | None] = field(default_factory=list)  # its reward over all rounds, in at most 40 points


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
    """Holds one metric of several nodes over the same rounds; mean and percentiles are those of all nodes."""

    metric: str
    rounds: list[int]
    mean: list[float | None]
    lines: list[Line]
    nodes: int = 0  # whose mean and percentiles these are; 0 where the lines are no nodes
    low: list[float | None] = field(default_factory=list)  # the 10th percentile; empty where nobody asked for it
    median: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)  # the 90th percentile
    recent: float | None = None  # mean of the nodes' last rounds: the overview's reward, which is the same number


@dataclass(frozen=True)
class NodeCurves:
    """Holds several metrics of one node over the same rounds."""

    node: str
    name: str
    rounds: list[int]
    metrics: dict[str, list[float | None]]


@dataclass(frozen=True)
class MapNodes:
    """Holds the nodes of the map, a list per property. The number of a node is its place in these lists."""

    node: list[str]
    name: list[str]
    joined: list[float | None]
    score: list[float | None]  # mean reward of its last rounds
    wins: list[int]  # votes received
    phase: list[str]  # of its round by the last heartbeat, `offline` or `finished`; empty where it does not say
    has_log: list[bool]  # else its edges are votes: the peer whose rollouts it found best
    seconds: list[list[float]]  # of its last round: sampling, scoring, collecting, training


@dataclass(frozen=True)
class MapRound:
    round: int
    edges: list[int]  # three numbers each: the learner, the author, and how many groups


@dataclass(frozen=True)
class SwarmMap:
    phase: Phase
    round: int
    nodes: MapNodes
    recent_rounds: int  # so many are kept each by itself
    rounds: list[MapRound]  # the newest last


@dataclass(frozen=True)
class MapFrame:
    round: int  # the first of the frame
    scores: list[float | None]  # mean reward of these rounds
    edges: list[int]  # as in a round of the map


@dataclass(frozen=True)
class Replay:
    """Holds a run round by round, or several rounds in a frame where it is long."""

    stride: int  # rounds in a frame
    nodes: list[str]
    frames: list[MapFrame]


@dataclass(frozen=True)
class Event:
    """Holds what happened to a node. Its sentence is `name`, `said`, `about_name` and `rest`."""

    timestamp: float
    node: str
    name: str
    event: str
    round: int | None
    detail: str
    said: str = ""
    about: str = ""  # another node, if it is known here
    about_name: str = ""
    rest: str = ""


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
    right: float  # share of it that is right, from 0 to 1
    truncated: bool  # ended by the token limit
    shortened: bool  # shown in part


@dataclass(frozen=True)
class ShownTest:
    """Holds a test of a program: a call, and the value that it should have."""

    call: str
    expected: str


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
    best: float  # reward of a perfect answer
    tests: list[ShownTest]  # where the answers are programs
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
    metrics: list[str]  # that any of these runs has a curve of


@dataclass(frozen=True)
class SettingRow:
    """Holds one setting of several runs."""

    name: str
    about: str  # what it is, where it is a setting of a node
    values: list[str | None]  # by run; None where it is not known
    differs: bool


@dataclass(frozen=True)
class SettingsTable:
    """Compares the public settings of runs."""

    runs: list[str]
    settings: list[SettingRow]


@dataclass(frozen=True)
class Stopping:
    stopping: bool


@dataclass(frozen=True)
class Health:
    status: Literal["alive", "stale", "waiting", "finished"]
    round: int
    alive: int
    seconds_since_heartbeat: float | None  # of any node of the swarm
