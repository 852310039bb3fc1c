"""Follows an experiment while it runs: the progress of its runs, and the measures of their arms so far.

The measures are the report's. An arm without a finished run is measured over its unfinished ones, up to the round that
all of them have played. Arms are compared up to the round that both have. Every poll reads what is new.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.experiment import conclusion, measures, packed
from rl_swarm.experiment.arms import RUNS, TUNING, Arm, Job, is_experiment, is_packed, job_folders, name_of
from rl_swarm.experiment.conclusion import ArmComparison, Verdict
from rl_swarm.experiment.measures import Measure, Values
from rl_swarm.monitor.run_reader import Phase, RunView
from rl_swarm.node.evaluation import mean
from rl_swarm.protocol.wire import UNREADABLE
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry import journal
from rl_swarm.telemetry.schema import HeldOutRecord, RoundRecord

METRICS = ("fresh_local", "training_set", "held_out")
Points = list[tuple[int, float]]  # rounds played, and a value


@dataclass(frozen=True)
class RunProgress:
    run: str
    arm: str
    seed: int
    phase: Phase
    played: int
    rounds: int
    packed: bool  # only its numbers are here, and no run that can be opened


@dataclass(frozen=True)
class ArmState:
    """Holds the measures of an arm. Rewards are totals over nodes and rounds, as in the report."""

    arm: str
    nodes: int
    seeds: list[int]  # of the finished runs, or of all where none has finished
    played: int
    rounds: int
    training_set: Measure | None
    fresh_local: Measure | None
    held_out_start: Measure | None
    held_out: Measure | None  # at the last evaluation
    against: str | None  # the arm it is compared with, up to the round that both have played
    training_set_change: Measure | None
    fresh_local_change: Measure | None
    held_out_change: Measure | None
    fresh_local_change_equal_tokens: Measure | None = (
        None  # when nodes had generated as much as those of the cheapest arm
    )
    held_out_change_equal_tokens: Measure | None = None


@dataclass(frozen=True)
class ExperimentState:
    name: str
    phase: Phase
    arms: list[ArmState]
    runs: list[RunProgress]
    tuning: int  # short runs of the learning-rate grid
    tuned: int  # of those, finished
    verdict: Verdict = "early"
    conclusion: str = ""  # one sentence


_LINE = msgspec.json.Decoder(RoundRecord | HeldOutRecord)


class FollowedNode:
    """Keeps the few numbers of a node's log that are shown: there are thousands of rounds of many runs."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, file: int) -> None:
        self.fresh, self.training, self.tokens = array("d"), array("d"), array("d")
        self.held_out: Points = []
        self._file, self._read = file, 0

    @classmethod
    def of(cls, log: measures.NodeLog) -> "FollowedNode":
        """Take all of a complete log."""
        found = cls()
        found.fresh.extend(line.reward_local for line in log.rounds)
        found.training.extend(line.reward_training for line in log.rounds)
        found.tokens.extend(line.generated_tokens for line in log.rounds)
        found.held_out += [(line.round + 1, line.sampled) for line in log.held_out]
        return found

    def poll(self, files: LocalFiles, path: str) -> bool:
        """Read what is new; a run that resumes after a crash has replaced its old file."""
        try:
            file = files.stat(path).st_ino
        except OSError:  # it was removed
            return False
        if file != self._file:
            self._begin(file)
        lines, self._read = journal.new_lines(files, path, self._read)
        for line in lines:
            with suppress(*UNREADABLE):  # the report needs every line, and would raise
                found = _LINE.decode(line)
                if isinstance(found, RoundRecord):
                    self.fresh.append(found.reward_local)
                    self.training.append(found.reward_training)
                    self.tokens.append(found.generated_tokens)
                else:
                    self.held_out.append((found.round + 1, found.sampled))
        return bool(lines)

    def scored(self, rounds: int) -> float:
        """Return the held-out score of the last evaluation until then, or of the first."""
        return ([score for after, score in self.held_out if after <= rounds] or [self.held_out[0][1]])[-1]

    def spent(self, rounds: int, share: float) -> list[float]:
        """Return the tokens generated so far after each of these rounds, per node that this one stands for."""
        return list(accumulate(tokens / share for tokens in self.tokens[:rounds]))


@dataclass
class FollowedRun:
    job: Job
    view: RunView | None  # None: only its numbers are here
    logs: dict[str, FollowedNode] = field(default_factory=dict)
    phase: Phase = "waiting"

    @property
    def played(self) -> int:
        known = [len(log.fresh) for log in self.logs.values() if log.held_out]
        return min(known) if len(known) == self.job.count else 0

    def poll(self) -> bool:
        if self.view is None or self.phase == "finished":
            return False
        files, before = self.view.local_files, self.phase
        self.phase = _phase(self.view)  # before the logs: those of a finished run are complete
        for node in files.folders_with(journal.METRICS, "logs"):
            self.logs.setdefault(node, FollowedNode())
        logs = [log.poll(files, f"logs/{node}/{journal.METRICS}") for node, log in self.logs.items()]
        return any(logs) or self.phase != before

    def progress(self) -> RunProgress:
        job, numbers_only = self.job, self.view is None
        return RunProgress(job.name, job.arm.label, job.seed, self.phase, self.played, job.rounds, numbers_only)


def _phase(view: RunView) -> Phase:
    view.refresh_swarm()
    for node in view.nodes.values():  # whose logs are read here, and not by the view
        node.alive = view.is_alive(node)
    return view.phase


@dataclass
class FollowedArm:
    arm: Arm
    runs: list[FollowedRun]

    @property
    def counted(self) -> list[FollowedRun]:
        finished = [run for run in self.runs if run.phase == "finished"]
        return finished or [run for run in self.runs if run.played]

    @property
    def played(self) -> int:
        return min((run.played for run in self.counted), default=0)

    def each(self, value: Callable[[FollowedNode], float]) -> dict[int, list[float]]:
        """Return a number of every node, by seed."""
        return {run.job.seed: [value(log) for log in run.logs.values()] for run in self.counted}

    @property
    def share(self) -> float:
        """Return how many nodes one node stands for: a pooled learner has the questions of all."""
        return self.runs[0].job.nodes / self.runs[0].job.count

    @property
    def tokens(self) -> float:
        """Return the tokens that a node has generated in the rounds played, on average."""
        return measures.measured(
            list(self.each(lambda log: sum(log.tokens[: self.played]) / self.share).values()), count=1
        ).mean


class ExperimentProgress:
    """Follows an experiment; a packed one is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = _packed(path) if is_packed(path) else {}
        self.tuning: dict[str, FollowedRun] = {}
        self._states: dict[str, tuple[object, ArmState]] = {}  # by arm, and what it was made from

    def poll(self) -> bool:
        """Read what is new; return whether there was anything."""
        if is_packed(self.path):
            return False
        found = [(RUNS, self.runs), (TUNING, self.tuning)]
        changed = [self._find(self.path / kind, runs) for kind, runs in found]
        return any([*changed, *(run.poll() for _, runs in found for run in list(runs.values()))])

    def _find(self, folder: Path, known: dict[str, FollowedRun]) -> bool:
        """Add new runs, and those that were removed and started anew."""
        jobs = {path: Job.read(path) for path in job_folders(folder)}
        new = {path.name: job for path, job in jobs.items() if job}
        changed = [name for name in {*new, *known} if name not in known or new.get(name) != known[name].job]
        for name in changed:
            known.pop(name, None)
            if name in new:
                known[name] = FollowedRun(new[name], RunView(folder / name))
        return bool(changed)

    def arms(self) -> list[FollowedArm]:
        by_label: dict[str, FollowedArm] = {}
        for run in sorted(self.runs.values(), key=lambda run: run.job.seed):
            by_label.setdefault(run.job.arm.label, FollowedArm(run.job.arm, [])).runs.append(run)
        return sorted(by_label.values(), key=lambda followed: followed.arm.place)

    def state(self) -> ExperimentState:
        arms = self.arms()
        budget = min((followed.tokens for followed in arms if followed.played), default=0.0)
        runs = [run.progress() for followed in arms for run in followed.runs]
        phases = {run.phase for run in [*self.runs.values(), *self.tuning.values()]}
        order: tuple[Phase, ...] = ("running", "crashed", "stopped", "waiting")
        phase: Phase = next((each for each in order if each in phases), "finished")
        phase = phase if phases else "waiting"
        states = [self._arm(followed, _base_of(followed, arms), budget) for followed in arms]
        verdict, says = conclusion.of(
            [_comparison(followed.arm, state) for followed, state in zip(arms, states, strict=True)],
            [run.phase == "finished" for run in self.runs.values()],
        )
        return ExperimentState(
            name=name_of(self.path),
            phase=phase,
            arms=states,
            runs=runs,
            tuning=len(self.tuning),
            tuned=sum(run.phase == "finished" for run in self.tuning.values()),
            verdict=verdict,
            conclusion=says,
        )

    def _arm(self, followed: FollowedArm, base: FollowedArm | None, budget: float) -> ArmState:
        made_from: tuple[object, ...] = (budget,) if base else ()
        made_from += tuple(
            (run.job.seed, run.played, sum(len(log.held_out) for log in run.logs.values()))
            for one in (followed, base)
            if one
            for run in one.counted
        )
        before, state = self._states.get(followed.arm.label, (None, None))
        if state is None or before != made_from:
            state = _arm_state(followed, base, budget)
            self._states[followed.arm.label] = (made_from, state)
        return state

    def curves(self, metric: str, points: int) -> dict[str, Points]:
        """Return every arm's mean over nodes and seeds by round; where some seeds are ahead, over those."""
        return {followed.arm.label: _curve(followed.runs, metric, points) for followed in self.arms()}


def followed(path: Path) -> ExperimentProgress:
    """Open the experiment in a folder or file and poll it once; raise a clear error if there is none."""
    if not is_experiment(path):
        raise UserError(f"{path} is no experiment. Give the directory that `rl-swarm experiment sapo --out` named.")
    progress = ExperimentProgress(path)
    progress.poll()
    return progress


def _packed(path: Path) -> dict[str, FollowedRun]:
    """Read the runs of a packed experiment."""
    found = {}
    for run in packed.read(path)[1]:
        logs = {str(number): FollowedNode.of(log) for number, log in enumerate(run.nodes)}
        found[run.job.name] = FollowedRun(run.job, None, logs, "finished")
    return found


def _base_of(followed: FollowedArm, arms: Sequence[FollowedArm]) -> FollowedArm | None:
    """Choose the arm to compare with: nodes that train alone and generate as much, or else the first arm."""
    alone = [one for one in arms if one.arm.is_plain]
    same = [one for one in alone if one.arm.local_groups == followed.arm.local_groups]
    base = (same or alone or list(arms))[0]
    return None if followed.arm.is_plain or base is followed else base


def _comparison(arm: Arm, state: ArmState) -> ArmComparison:
    """Return what the conclusion says of an arm."""
    return ArmComparison(arm, state.against, state.fresh_local_change_equal_tokens, len(state.seeds))


def _arm_state(followed: FollowedArm, base: FollowedArm | None, budget: float) -> ArmState:
    job, played = followed.runs[0].job, followed.played
    both = min(played, base.played) if base else 0

    def measure(value: Callable[[FollowedNode], float], total: float = 1.0) -> Measure | None:
        values: Values = list(followed.each(value).values())
        return measures.measured(values, total) if played else None

    def change(value: Callable[[FollowedNode], float]) -> Measure | None:
        return measures.compared(followed.each(value), base.each(value)) if base and both else None

    def equal(value: Callable[[FollowedNode, list[float]], float]) -> Measure | None:
        """Compare at the same number of generated tokens."""
        if not (base and both):
            return None
        ours, theirs = (
            one.each(lambda log, one=one: value(log, log.spent(one.played, one.share)))  # type: ignore[misc]
            for one in (followed, base)
        )
        return measures.compared(ours, theirs)

    return ArmState(
        arm=followed.arm.label,
        nodes=job.nodes,
        seeds=[run.job.seed for run in followed.counted],
        played=played,
        rounds=job.rounds,
        training_set=measure(lambda log: sum(log.training[:played]), job.nodes),
        fresh_local=measure(lambda log: sum(log.fresh[:played]), job.nodes),
        held_out_start=measure(lambda log: log.held_out[0][1]),
        held_out=measure(lambda log: log.scored(played)),
        against=base.arm.label if base else None,
        training_set_change=change(lambda log: mean(log.training[:both])),
        fresh_local_change=change(lambda log: mean(log.fresh[:both])),
        held_out_change=change(lambda log: log.scored(both)),
        fresh_local_change_equal_tokens=equal(
            lambda log, spent: mean(log.fresh[: measures.rounds_within(spent, budget)])
        ),
        held_out_change_equal_tokens=equal(lambda log, spent: measures.score_at(log.held_out, spent, budget)),
    )


def _curve(runs: Sequence[FollowedRun], metric: str, points: int) -> Points:
    logs = [log for run in runs for log in run.logs.values()]
    if metric == "held_out":
        scores: dict[int, list[float]] = {}
        for log in logs:
            for after, score in log.held_out:
                scores.setdefault(after, []).append(score)
        return [(after, mean(found)) for after, found in sorted(scores.items())]
    series = [log.fresh if metric == "fresh_local" else log.training for log in logs]
    size = measures.window(runs[0].job.rounds, points)
    longest = max(map(len, series), default=0)
    windows = [
        (start + size, [mean(one[start : start + size]) for one in series if len(one) >= start + size])
        for start in range(0, longest - size + 1, size)
    ]
    return [(after, mean(values)) for after, values in windows]
