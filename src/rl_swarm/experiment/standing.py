"""Where an experiment stands: its runs as far as they have got, and what their arms have earned by then.

The measures are the report's. Where no run of an arm has finished yet they are of those that go on, up to the round that
all of them have played; arms are compared up to the round that both have. Every look reads what is new.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.evaluation import mean
from rl_swarm.experiment import measures
from rl_swarm.experiment.arms import RUNS, TUNING, Arm, Job, is_experiment, job_folders
from rl_swarm.experiment.measures import Measure, Values
from rl_swarm.network.files import LocalFiles
from rl_swarm.report import Phase, RunView
from rl_swarm.telemetry import journal

METRICS = ("fresh_local", "training_set", "held_out")
Points = list[tuple[int, float]]  # after so many rounds, a value


@dataclass(frozen=True)
class RunStands:
    run: str
    arm: str
    seed: int
    phase: Phase
    played: int
    rounds: int
    packed: bool  # only its numbers are here, and no run to look into


@dataclass(frozen=True)
class ArmStands:
    """What an arm has earned. Rewards are totals over nodes and rounds, as in the report."""

    arm: str
    nodes: int
    seeds: list[int]  # that are counted: those that have finished, or else those that go on
    played: int
    rounds: int
    training_set: Measure | None
    fresh_local: Measure | None
    held_out_start: Measure | None
    held_out: Measure | None  # at the last look
    against: (
        str | None
    )  # with whom it is compared, as shares more or less, up to the round that both have played
    training_set_change: Measure | None
    fresh_local_change: Measure | None
    held_out_change: Measure | None


@dataclass(frozen=True)
class Stands:
    name: str
    phase: Phase
    arms: list[ArmStands]
    runs: list[RunStands]
    tuning: int  # short runs that find out learning rates
    tuned: int  # of those, finished


class _RoundLine(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="round"):
    reward_local: float
    reward_training: float


class _HeldOutLine(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="held_out"):
    round: int  # after which it was measured; -1: before the first
    sampled: float


_LINE = msgspec.json.Decoder(_RoundLine | _HeldOutLine)


class NodeLog:
    """The few numbers of a node's log that are shown: thousands of rounds of many runs are kept."""

    def __init__(self, files: LocalFiles, path: str) -> None:
        self.files, self.path = files, path
        self._begin(0)

    def _begin(self, file: int) -> None:
        self.fresh, self.training = array("d"), array("d")
        self.held_out: Points = []
        self._file, self._read = file, 0

    def look(self) -> bool:
        """Reads what is new; a run that goes on after a crash has put another file in the old one's place."""
        try:
            file = self.files.stat(self.path).st_ino
        except OSError:  # somebody has removed it
            return False
        if file != self._file:
            self._begin(file)
        lines, self._read = journal.new_lines(self.files, self.path, self._read)
        for line in lines:
            with suppress(msgspec.DecodeError):  # the report, which needs them all, would say so
                found = _LINE.decode(line)
                if isinstance(found, _RoundLine):
                    self.fresh.append(found.reward_local)
                    self.training.append(found.reward_training)
                else:
                    self.held_out.append((found.round + 1, found.sampled))
        return bool(lines)

    def take(self, log: measures.NodeLog) -> None:
        """All of a log that was packed."""
        self.fresh = array("d", [line.reward_local for line in log.rounds])
        self.training = array("d", [line.reward_training for line in log.rounds])
        self.held_out = [(line.round + 1, line.sampled) for line in log.held_out]

    def scored(self, rounds: int) -> float:
        """The held-out score at the last look until then."""
        return [score for after, score in self.held_out if after <= rounds][-1]


class FollowedRun:
    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self.view = RunView(folder)
        self.packed = measures.is_packed(folder)
        self.logs: dict[str, NodeLog] = {}
        self.phase: Phase = "waiting"

    @property
    def played(self) -> int:
        known = [len(log.fresh) for log in self.logs.values() if log.held_out]
        return min(known) if len(known) == self.job.count else 0

    def look(self) -> bool:
        if self.phase == "finished":
            return False
        if self.packed:
            return self._unpack()
        before, self.phase = self.phase, self._phase()  # before the logs: when it has finished they are whole
        for node in self.view.here.folders_with(journal.METRICS, "logs"):
            self.logs.setdefault(node, NodeLog(self.view.here, f"logs/{node}/{journal.METRICS}"))
        return any([log.look() for log in self.logs.values()]) or self.phase != before

    def _unpack(self) -> bool:
        with suppress(UserError):  # the report would say so
            if run := measures.Run.read(self.folder):
                for number, log in enumerate(run.nodes):
                    self.logs[str(number)] = NodeLog(self.view.here, measures.PACKED)
                    self.logs[str(number)].take(log)
                self.phase = "finished"
        return self.phase == "finished"

    def _phase(self) -> Phase:
        self.view.refresh_swarm()
        for node in self.view.nodes.values():  # whose logs are read here, and not by the view
            node.alive = self.view.is_alive(node)
        return self.view.phase

    def stands(self) -> RunStands:
        job = self.job
        return RunStands(job.name, job.arm.label, job.seed, self.phase, self.played, job.rounds, self.packed)


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

    def each(self, value: Callable[[NodeLog], float]) -> dict[int, list[float]]:
        """A number of every node, by seed."""
        return {run.job.seed: [value(log) for log in run.logs.values()] for run in self.counted}


class Standing:
    """An experiment that is followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, FollowedRun] = {}
        self.tuning: dict[str, FollowedRun] = {}
        self._told: dict[str, tuple[object, ArmStands]] = {}  # by arm, and what it was made from

    def look(self) -> bool:
        """Reads what is new; whether there was anything."""
        found = [(RUNS, self.runs), (TUNING, self.tuning)]
        changed = [self._find(self.folder / kind, runs) for kind, runs in found]
        return any([*changed, *(run.look() for _, runs in found for run in list(runs.values()))])

    def _find(self, folder: Path, known: dict[str, FollowedRun]) -> bool:
        """Takes up new runs, and again those that somebody has removed and started anew."""
        jobs = {path: Job.read(path) for path in job_folders(folder)}
        new = {path.name: job for path, job in jobs.items() if job}
        changed = [name for name in {*new, *known} if name not in known or new.get(name) != known[name].job]
        for name in changed:
            known.pop(name, None)
            if name in new:
                known[name] = FollowedRun(folder / name, new[name])
        return bool(changed)

    def arms(self) -> list[FollowedArm]:
        by_label: dict[str, FollowedArm] = {}
        for run in sorted(self.runs.values(), key=lambda run: run.job.seed):
            by_label.setdefault(run.job.arm.label, FollowedArm(run.job.arm, [])).runs.append(run)
        return sorted(by_label.values(), key=lambda followed: followed.arm.place)

    def told(self) -> Stands:
        arms = self.arms()
        runs = [run.stands() for followed in arms for run in followed.runs]
        phases = {run.phase for run in [*self.runs.values(), *self.tuning.values()]}
        phase: Phase = next(
            p for p in ("running", "stopped", "waiting", "finished") if p in phases or p == "finished"
        )
        return Stands(
            name=self.folder.absolute().name,
            phase=phase if phases else "waiting",
            arms=[self._arm(followed, _base_of(followed, arms)) for followed in arms],
            runs=runs,
            tuning=len(self.tuning),
            tuned=sum(run.phase == "finished" for run in self.tuning.values()),
        )

    def _arm(self, followed: FollowedArm, base: FollowedArm | None) -> ArmStands:
        made_from = tuple(
            (run.job.seed, run.played, sum(len(log.held_out) for log in run.logs.values()))
            for one in (followed, base)
            if one
            for run in one.counted
        )
        before, told = self._told.get(followed.arm.label, (None, None))
        if told is None or before != made_from:
            told = _stands(followed, base)
            self._told[followed.arm.label] = (made_from, told)
        return told

    def curves(self, metric: str, points: int) -> dict[str, Points]:
        """Of every arm its mean over nodes and seeds, over rounds; where some seeds have got further, of those."""
        return {followed.arm.label: _curve(followed.runs, metric, points) for followed in self.arms()}


def followed(folder: Path) -> Standing:
    """The experiment in a folder, looked at once; a clear error if there is none."""
    if not is_experiment(folder):
        raise UserError(f"{folder} is no experiment. Give what `rl-swarm experiment sapo --out` was given.")
    standing = Standing(folder)
    standing.look()
    return standing


def _base_of(followed: FollowedArm, arms: Sequence[FollowedArm]) -> FollowedArm | None:
    """With whom an arm is compared: nodes that train alone and generate as much, or else the first arm."""
    alone = [one for one in arms if one.arm.is_plain]
    same = [one for one in alone if one.arm.local == followed.arm.local]
    base = (same or alone or list(arms))[0]
    return None if followed.arm.is_plain or base is followed else base


def _stands(followed: FollowedArm, base: FollowedArm | None) -> ArmStands:
    job, played = followed.runs[0].job, followed.played
    both = min(played, base.played) if base else 0

    def measure(value: Callable[[NodeLog], float], total: float = 1.0) -> Measure | None:
        values: Values = list(followed.each(value).values())
        return measures.measured(values, total) if played else None

    def change(value: Callable[[NodeLog], float]) -> Measure | None:
        return measures.compared(followed.each(value), base.each(value)) if base and both else None

    return ArmStands(
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
    )


def _curve(runs: Sequence[FollowedRun], metric: str, points: int) -> Points:
    logs = [log for run in runs for log in run.logs.values()]
    if metric == "held_out":
        scores: dict[int, list[float]] = {}
        for log in logs:
            for after, score in log.held_out:
                scores.setdefault(after, []).append(score)
        return [(after, mean(found)) for after, found in sorted(scores.items())]
    kept = [log.fresh if metric == "fresh_local" else log.training for log in logs]
    size = measures.window(runs[0].job.rounds, points)
    longest = max(map(len, kept), default=0)
    windows = [
        (start + size, [mean(one[start : start + size]) for one in kept if len(one) >= start + size])
        for start in range(0, longest - size + 1, size)
    ]
    return [(after, mean(values)) for after, values in windows]
