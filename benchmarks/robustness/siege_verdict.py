"""Judges a siege: takes the figures of both swarms, and returns a sentence for every missed bar."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LEAST_RATIO = 0.9  # of the control's rounds per minute
MAX_GROWTH = 1.1  # of memory, from the first third to the last, or beyond the control's in the last
PROCESS_GROWTH = 64.0  # MiB, of one process, more than the control's largest has
MAX_LATE = 0.2  # of the control's rounds that may end by the deadline: else the deadline sets the pace
PACE = 0.15  # by which the harmless processes' processor time may differ from the hostile ones'
MAX_SILENT = 0.1  # of the requests to the dashboard that may go unanswered
# One-sided 97.5 % points of Student's distribution, by degrees of freedom.
STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class Side:
    """Holds the figures of one swarm over the measured time."""

    rounds: int
    minutes: float
    late_rounds: int  # rounds that ended by the deadline or by a timeout
    memory: tuple[float, float]  # MiB of all its processes together, in the first and in the last third
    largest: float  # MiB of the largest process in the last third
    score: float | None  # held-out, mean of the nodes, at the round that both reached
    beside_seconds: float  # processor time of the hostile processes, or of those that burn as much
    own_seconds: tuple[float, float] = (0.0, 0.0)  # of its own processes, and of its daemons among them
    restarts: int = 0  # of nodes
    dashboard: tuple[int, int] = (0, 0)  # requests, and how many were not answered
    dashboard_worst: float = 0.0  # seconds
    refused: Mapping[str, int] = field(default_factory=dict)  # by reason

    @property
    def pace(self) -> float:
        return self.rounds / self.minutes if self.minutes else 0.0

    @property
    def growth(self) -> float:
        return self.memory[1] / self.memory[0] if self.memory[0] else math.inf


@dataclass(frozen=True)
class Siege:
    attack: Side
    control: Side
    round: int | None  # at which scores are compared
    plain: Sequence[float] = ()  # scores of swarms without attackers, other seeds, same round
    harm: Sequence[str] = ()  # what changed outside, commands that ran, foreign weights, settings taken
    ended: Sequence[str] = ()  # hostile processes that ended by themselves, and why

    @property
    def ratio(self) -> float:
        return self.attack.pace / self.control.pace if self.control.pace else 0.0


def lowest_score(scores: Sequence[float]) -> float | None:
    """Return the lower end of the 95 % prediction interval for one more swarm like these; None for fewer than two."""
    if len(scores) < 2:
        return None
    student = STUDENT[min(len(scores) - 1, len(STUDENT) - 1)]
    return statistics.mean(scores) - student * statistics.stdev(scores) * math.sqrt(1 + 1 / len(scores))


def violations(siege: Siege) -> Iterator[str]:
    attack, control = siege.attack, siege.control
    yield from siege.harm
    if siege.ratio < LEAST_RATIO:
        yield f"rounds per minute were {siege.ratio:.2f} of the control's, and {LEAST_RATIO} is the least"
    # A swarm that has played fewer rounds grows later, up to what the other has.
    if attack.growth > MAX_GROWTH and attack.memory[1] > MAX_GROWTH * control.memory[1]:
        yield (
            f"memory grew from {attack.memory[0]:.0f} to {attack.memory[1]:.0f} MiB; the control has "
            f"{control.memory[1]:.0f}"
        )
    if attack.largest > control.largest + PROCESS_GROWTH:
        yield f"a process has {attack.largest:.0f} MiB, the largest of the control {control.largest:.0f}"
    if attack.dashboard[1] > MAX_SILENT * attack.dashboard[0]:
        yield f"the dashboard left {attack.dashboard[1]} of {attack.dashboard[0]} requests unanswered"
    if attack.restarts > control.restarts:
        yield f"{attack.restarts} nodes were started again, in the control {control.restarts}"
    scores = [*siege.plain, *([control.score] if control.score is not None else [])]
    lowest = lowest_score(scores)
    if attack.score is None:
        yield "there is no held-out score of a round that both reached; play longer"
    elif lowest is not None and attack.score < lowest:
        yield f"the held-out score was {attack.score:.3f}; seeds without attackers give at least {lowest:.3f}"


def empty(siege: Siege) -> Iterator[str]:
    """Say why a run shows nothing: an attack that did not take place, or a rule that set the pace of both."""
    control = siege.control
    yield from siege.ended
    if control.late_rounds > MAX_LATE * max(1, control.rounds):
        yield (
            f"{control.late_rounds} of the control's {control.rounds} rounds ended by the deadline: choose a later one"
        )


def doubts(siege: Siege) -> Iterator[str]:
    """Say why a run shows less than it could."""
    attack, control = siege.attack, siege.control
    if abs(control.beside_seconds - attack.beside_seconds) > PACE * max(attack.beside_seconds, 1.0):
        yield (
            f"the control's processes burned {control.beside_seconds:.0f} s of processor time, the hostile ones "
            f"{attack.beside_seconds:.0f} s"
        )
    if lowest_score([*siege.plain, control.score or 0.0]) is None:
        yield "fewer than two swarms without attackers have a score: --scatter 2 or more"
