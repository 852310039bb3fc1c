"""Computes the measures of a run from its nodes' logs, in pure functions.

Every measure is computed for every node of every seed first. An arm's measure is their mean, with an interval by
bootstrap: it resamples seeds, and nodes within each seed. With one seed it resamples nodes alone. Those share their
questions' difficulty and, where they exchange rollouts, much more, so the interval is too narrow; the report says so.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import Arm, Job, files_of
from rl_swarm.node.evaluation import mean
from rl_swarm.protocol.wire import UNREADABLE
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import METRICS, new_lines
from rl_swarm.telemetry.schema import After, HeldOutRecord, Number, RoundRecord

DRAWS = 1000  # of a bootstrap
FEWER_DRAWS = 200  # for every point of a curve
MAX_SHARE = 1e6  # a larger change is shown as this
WINDOWS = 20  # of a curve, before its drawdown is measured
SKILL = 0.25  # rise of a task's held-out score that counts as having learned it


class Score(msgspec.Struct, frozen=True):
    """Holds what is kept of a held-out score."""

    round: After  # -1: before the first
    sampled: Number
    greedy: Number | None
    by_task: dict[str, Number]
    greedy_by_task: dict[str, Number]

    @classmethod
    def of(cls, record: HeldOutRecord) -> "Score":
        return cls(record.round, record.sampled, record.greedy, record.by_task, record.greedy_by_task)


_LINE = msgspec.json.Decoder(RoundRecord | HeldOutRecord)


class Tuned(msgspec.Struct, frozen=True):
    """Records how an arm's learning rate was chosen: the held-out score at the end of every rate's runs."""

    rate: float
    scores: dict[str, float]  # by rate
    seeds: list[int]
    rounds: int


@dataclass
class NodeLog:
    rounds: list[RoundRecord] = field(default_factory=list)
    held_out: list[Score] = field(default_factory=list)

    @classmethod
    def read(cls, files: LocalFiles, path: str) -> "NodeLog":
        log = cls()
        for line in new_lines(files, path)[0]:
            try:
                found = _LINE.decode(line)
            except UNREADABLE as error:
                raise UserError(f"{files.root}/{path}: a line cannot be read ({error}).") from error
            if isinstance(found, RoundRecord):
                log.rounds.append(found)
            else:
                log.held_out.append(Score.of(found))
        return log

    def up_to(self, rounds: int) -> "NodeLog":
        return NodeLog(self.rounds[:rounds], [line for line in self.held_out if line.round < rounds])


@dataclass
class Run:
    """Holds one run: its nodes in the order of their names."""

    job: Job
    nodes: list[NodeLog]

    @classmethod
    def read(cls, folder: Path) -> "Run | None":
        """Read the run in a folder; None where there is none."""
        job, files = Job.read(folder), files_of(folder)
        logs = [NodeLog.read(files, f"logs/{node}/{METRICS}") for node in files.folders_with(METRICS, "logs")]
        return cls.of(job, logs) if job else None

    @classmethod
    def of(cls, job: Job, logs: Sequence[NodeLog]) -> "Run | None":
        """Make a run of its nodes' logs, up to the last round that all have; None where there is none."""
        played = min((len(log.rounds) for log in logs), default=0)
        return cls(job, [log.up_to(played) for log in logs]) if played else None

    @property
    def played(self) -> int:
        return len(self.nodes[0].rounds)

    @property
    def is_whole(self) -> bool:
        """Return whether all rounds were played, and all nodes evaluated after the last."""
        ends = [node.held_out[-1] for node in self.nodes if node.held_out]
        done = all(line.round == self.job.rounds - 1 and line.greedy is not None for line in ends)
        return self.played == self.job.rounds and len(ends) == len(self.nodes) and done

    @property
    def share(self) -> float:
        """Return how many nodes one node of this run stands for: a pooled learner has the questions of all."""
        return self.job.nodes / len(self.nodes)


def percent(share: float) -> str:
    """Format a share with its sign, and no -0; a larger one as a millionfold."""
    return f"{round(100 * min(share, MAX_SHARE)):+d}"


@dataclass(frozen=True)
class Measure:
    """Holds a mean over seeds and nodes, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


Values = Sequence[Sequence[float]]  # by seed and node
Point = tuple[float, float, float, float]  # of a curve: x, mean, and its interval


def measured(values: Values, total: float = 1.0, count: int = DRAWS) -> Measure:
    """Average over nodes and seeds, times `total`, with an interval."""
    known = [list(of_seed) for of_seed in values if of_seed]
    if not known:
        return Measure(0.0, 0.0, 0.0)
    rng = random.Random(0)
    draws = sorted(total * _mean(_drawn(known, rng)) for _ in range(count))
    return Measure(total * _mean(known), draws[int(0.025 * count)], draws[int(0.975 * count) - 1])


def compared(values: Mapping[int, Sequence[float]], base: Mapping[int, Sequence[float]]) -> Measure | None:
    """Return by which share the values are higher than the base, over the seeds that both have, drawn together."""
    seeds = sorted(values.keys() & base.keys())
    if not seeds or _mean([list(base[seed]) for seed in seeds]) == 0:
        return None
    rng = random.Random(0)
    draws = []
    for _ in range(DRAWS):
        drawn = [rng.choice(seeds) for _ in seeds]
        ours, theirs = (
            _mean([rng.choices(list(of[seed]), k=len(of[seed])) for seed in drawn]) for of in (values, base)
        )
        draws.append(ours / theirs - 1 if theirs else 0.0)
    draws.sort()
    ours, theirs = (_mean([list(of[seed]) for seed in seeds]) for of in (values, base))
    return Measure(ours / theirs - 1, draws[int(0.025 * DRAWS)], draws[int(0.975 * DRAWS) - 1])


def _drawn(values: Sequence[Sequence[float]], rng: random.Random) -> list[list[float]]:
    seeds = rng.choices(values, k=len(values))
    return [rng.choices(of_seed, k=len(of_seed)) for of_seed in seeds]


def _mean(values: Sequence[Sequence[float]]) -> float:
    return mean([mean(of_seed) for of_seed in values])


def window(rounds: int, points: int = 100) -> int:
    """Return the rounds per point of a curve. Short runs have fewer points: a few rounds would show noise."""
    return max(1, rounds // points, min(10, rounds // 20))


def seconds(line: RoundRecord) -> float:
    """Return the seconds of a round of this node; the nodes of a run take turns."""
    return line.seconds.total


def oscillation(rewards: Sequence[float]) -> float:
    """Return the mean drawdown: how far the reward lies below its highest value so far; 0 if it only rises.

    Rounds are averaged in windows first, because the reward of a few questions is noisy.
    """
    size = max(5, len(rewards) // WINDOWS)
    windows = [mean(rewards[start : start + size]) for start in range(0, len(rewards) - size + 1, size)]
    best = accumulate(windows, max, initial=0.0)  # so far
    return mean([max(0.0, before - value) for before, value in zip(best, windows, strict=False)])


@dataclass(frozen=True)
class Spread:
    """Measures how skills spread in one run, over all tasks that any node learned."""

    tasks: int  # that any node learned
    reach: float | None  # the share of the other nodes that had learned them by the end
    rounds: float | None  # from the first node to the others


def spread(nodes: Sequence[NodeLog]) -> Spread:
    """Measure the spread of skills. A node has a skill from the first score that is `SKILL` above its own start."""
    reached, lags, tasks = [], [], 0
    for task in nodes[0].held_out[0].by_task if nodes[0].held_out else ():
        since = [_learned(node, task) for node in nodes]
        known = sorted(number for number in since if number is not None)
        if not known:
            continue
        tasks += 1
        if len(nodes) > 1:
            reached.append((len(known) - 1) / (len(nodes) - 1))
            lags += [number - known[0] for number in known[1:]]
    return Spread(tasks, mean(reached) if reached else None, mean(lags) if lags else None)


def _learned(node: NodeLog, task: str) -> int | None:
    start = node.held_out[0].by_task.get(task, 0.0) if node.held_out else 0.0
    return next((line.round for line in node.held_out[1:] if line.by_task.get(task, 0.0) >= start + SKILL), None)


def held_out_at(node: NodeLog, spent: Sequence[float], budget: float) -> float:
    """Interpolate the held-out score at a budget between two evaluations."""
    return score_at([(line.round + 1, line.sampled) for line in node.held_out], spent, budget)


def score_at(scores: Sequence[tuple[int, float]], spent: Sequence[float], budget: float) -> float:
    """Interpolate a score at a budget; each was measured after so many rounds."""
    points = [(spent[min(after, len(spent)) - 1] if after else 0.0, score) for after, score in scores]
    for (x, y), (next_x, next_y) in pairwise(points):
        if x <= budget <= next_x and next_x > x:
            return y + (next_y - y) * (budget - x) / (next_x - x)
    return points[-1][1] if points else 0.0


def fresh_until(node: NodeLog, spent: Sequence[float], budget: float) -> float:
    """Average the reward of fresh rollouts over the rounds within a budget."""
    return mean([line.reward_local for line in node.rounds[: rounds_within(spent, budget)]])


def rounds_within(spent: Sequence[float], budget: float) -> int:
    """Return how many rounds a budget lasts, of which at least one is counted."""
    return max(1, min(len(spent), bisect_left(spent, budget * (1 - 1e-9)) + 1))


def tokens_spent(run: Run, node: NodeLog) -> list[float]:
    """Return the tokens generated so far, per node; a pooled learner's are divided among the nodes it stands for."""
    return list(accumulate(line.generated_tokens / run.share for line in node.rounds))


def seconds_spent(run: Run, node: NodeLog) -> list[float]:
    return list(accumulate(seconds(line) / run.share for line in node.rounds))


@dataclass
class ArmResult:
    """Holds an arm with all its runs."""

    label: str
    arm: Arm
    runs: list[Run]

    @property
    def rounds(self) -> int:
        return min(run.played for run in self.runs)

    @property
    def nodes(self) -> int:
        return self.runs[0].job.nodes

    def each(self, measure: Callable[[Run, NodeLog], float]) -> dict[int, list[float]]:
        """Return a number of every node, by seed."""
        return {run.job.seed: [measure(run, node) for node in run.nodes] for run in self.runs}

    def of(self, measure: Callable[[Run, NodeLog], float], total: float = 1.0) -> Measure:
        return measured(list(self.each(measure).values()), total)

    def budget(self, spent: Callable[[Run, NodeLog], list[float]]) -> float:
        """Return what a node of this arm spends in all its rounds, on average."""
        return self.of(lambda run, node: spent(run, node)[-1]).mean

    def curve(self, value: Callable[[RoundRecord], float]) -> list[Point]:
        """Average in windows of rounds: the last round of each, the mean over nodes and seeds, and its interval."""
        size = window(self.rounds)
        return [
            self._point(
                start + size,
                lambda run, node, start=start: mean([value(x) for x in node.rounds[start : start + size]]),  # type: ignore[misc]
            )
            for start in range(0, self.rounds - size + 1, size)
        ]

    def held_out_curve(self) -> list[Point]:
        """Return the sampled score after the rounds at which all nodes of all seeds were evaluated."""
        looks = [{line.round for line in node.held_out} for run in self.runs for node in run.nodes]
        return [
            self._point(
                played + 1,
                lambda run, node, played=played: next(x.sampled for x in node.held_out if x.round == played),  # type: ignore[misc]
            )
            for played in sorted(set.intersection(*looks))
        ]

    def tokens_after(self, rounds: int) -> float:
        """Return the tokens that a node has generated by then, on average."""
        spent = [tokens_spent(run, node) for run in self.runs for node in run.nodes]
        return mean([each[rounds - 1] if rounds else 0.0 for each in spent])

    def _point(self, at: float, value: Callable[[Run, NodeLog], float]) -> Point:
        found = measured(list(self.each(value).values()), count=FEWER_DRAWS)
        return (at, found.mean, found.low, found.high)

    def by_task(self, greedy: bool = False) -> dict[str, tuple[Measure, Measure]]:
        """Return the held-out score of every task at the start and at the end."""

        def scores(line: Score) -> dict[str, float]:
            return line.greedy_by_task if greedy else line.by_task

        first = self.runs[0].nodes[0].held_out
        if not first:
            return {}
        return {
            task: (
                self.of(lambda run, node, task=task: scores(node.held_out[0]).get(task, 0.0)),  # type: ignore[misc]
                self.of(lambda run, node, task=task: scores(node.held_out[-1]).get(task, 0.0)),  # type: ignore[misc]
            )
            for task in first[0].by_task
        }

    def spread(self) -> tuple[Measure | None, Measure | None, float]:
        """Return reach and rounds of the skills' spread over the seeds, and how many tasks any node learned."""
        found = [spread(run.nodes) for run in self.runs]
        reach = [[one.reach] for one in found if one.reach is not None]
        lag = [[one.rounds] for one in found if one.rounds is not None]
        tasks = median(one.tasks for one in found)
        return (measured(reach) if reach else None), (measured(lag) if lag else None), tasks
