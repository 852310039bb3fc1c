"""Runs an experiment: plans, starts as many runs as fit, resumes them, and reports.

Every run is a process of its own in a directory of its own. The first plays a few rounds alone; the plan's hours and
bytes follow from those. Existing runs are finished or resumed, so the same command can be given again after Ctrl-C, a
crash or a power cut, with more seeds or arms too.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
from rich.console import Console

from rl_swarm.errors import UserError
from rl_swarm.experiment import report
from rl_swarm.experiment.arms import RUNS, TUNING, Arm, Job, Resolve, differences, files_of
from rl_swarm.experiment.measures import Run, Tuned
from rl_swarm.experiment.plan import Costs, ProgressBars, duration, makespan
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import read_manifest, read_state
from rl_swarm.node.evaluation import mean
from rl_swarm.node.processes import ChildProcess, context_for, obey_parent
from rl_swarm.node.settings import NodeSettings
from rl_swarm.node.swarm import SHARED, uses_gpu
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import Rejected
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.logs import start_logging

log = logging.getLogger(__name__)

PLAN_ROUNDS, PLAN_SECONDS = 3, 8.0  # that are timed at least, after a warm-up round
CUDA_BYTES = 1 << 30  # of a GPU's memory beside what a run allocates
SCORER_BYTES = 400 << 20  # of the scoring process beside a run
END_SECONDS = 60.0  # for a run to exit after it has closed its pipe
MAX_FAILURES = 3  # of one run, before the experiment gives up
TUNING_SEEDS = 10_000  # first seed of the learning-rate grid


class RunStatus(msgspec.Struct, frozen=True):
    """Reports a run's state after every round."""

    done: int = 0  # rounds
    evaluation_seconds: float = 0.0  # seconds spent on held-out questions by this process
    memory: int = 0  # peak, in bytes
    free: int = 0  # bytes available to it, its own included
    error: str = ""


@dataclass(frozen=True)
class Experiment:
    """Describes an experiment."""

    out: Path
    arms: Sequence[Arm]
    seeds: Sequence[int]
    nodes: int
    rounds: int
    resolve: Resolve
    settings: Mapping[str, object] = field(default_factory=dict)  # given by the user
    each: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rates: Sequence[float] = ()
    tune_seeds: int = 2
    tune_rounds: int = 100
    at_once: int = 0  # runs; 0: as many as fit
    user: NodeSettings = field(default_factory=NodeSettings)  # whose key and private directory are used
    keep_models: bool = False

    def job(self, arm: Arm, seed: int, rounds: int, rate: float | None, tuning: bool = False) -> Job:
        each = {number: dict(given) for number, given in self.each.items()}
        return Job(arm, seed, rounds, self.nodes, rate, tuning, dict(self.settings), each)

    def tuning(self) -> list[Job]:
        seeds = [TUNING_SEEDS + k for k in range(self.tune_seeds)] if self.rates else []
        return [
            self.job(arm, seed, self.tune_rounds, rate, tuning=True)
            for arm in self.arms
            for rate in self.rates
            for seed in seeds
        ]

    def runs(self, rates: Mapping[str, float]) -> list[Job]:
        return [self.job(arm, seed, self.rounds, rates.get(arm.label)) for seed in self.seeds for arm in self.arms]

    def node(self, job: Job) -> NodeSettings:
        """Return the settings of a run's first node."""
        return job.members(self.resolve)[0]

    def folder(self, job: Job) -> Path:
        return self.out / _kind(job) / job.name

    def files(self, job: Job) -> LocalFiles:
        return LocalFiles(self.out).below(f"{_kind(job)}/{job.name}")


@dataclass
class RunProcess:
    job: Job
    settings: NodeSettings  # of its first node
    process: ChildProcess
    status: RunStatus = field(default_factory=RunStatus)
    began: float = field(default_factory=time.monotonic)
    ready: tuple[float, RunStatus] | None = None  # time of its first report, and the report
    warm: tuple[float, RunStatus] | None = None  # the same after its first round

    def update(self, status: RunStatus) -> None:
        self.status = status
        if self.ready is None:
            self.ready = (time.monotonic(), status)
        elif self.warm is None:
            self.warm = (time.monotonic(), status)

    @property
    def is_timed(self) -> bool:
        """Return whether it has played enough rounds to plan by."""
        if self.warm is None or self.status.done >= self.job.rounds:
            return self.status.done >= self.job.rounds
        since, status = self.warm
        return self.status.done - status.done >= PLAN_ROUNDS and time.monotonic() - since >= PLAN_SECONDS

    def costs(self, run: Run) -> Costs:
        """Estimate costs from the rounds since it was warm, or from all rounds if it has ended before."""
        begun = self.ready[1].done if self.ready else 0
        evaluations = run.job.evaluations(self.settings, begun, run.played)
        if self.ready is None or self.warm is None or self.warm[1].done >= self.status.done:
            return Costs.of(run, self.settings, self.status.evaluation_seconds, evaluations)
        since, status = self.warm
        took = time.monotonic() - since - (self.status.evaluation_seconds - status.evaluation_seconds)
        start = self.ready[0] - self.began - self.ready[1].evaluation_seconds
        return Costs.of(
            run, self.settings, self.status.evaluation_seconds, evaluations, start, self.status.done - status.done, took
        )


class Runner:
    def __init__(self, experiment: Experiment, console: Console, stop: threading.Event) -> None:
        self.experiment, self.console, self.stop = experiment, console, stop
        self.costs: Costs | None = None
        self.all: list[Job] = []  # planned runs
        self.at_once = experiment.at_once
        self.failures: dict[str, int] = {}
        self.on_gpu = uses_gpu(experiment.node(experiment.job(experiment.arms[0], 0, 1, None)).model)
        self.context = context_for(self.on_gpu)

    def run(self, only_plan: bool = False) -> Path | None:
        """Run everything and write the report; return None when stopped, or when only a plan was wanted."""
        experiment = self.experiment
        tuning = experiment.tuning()
        rates = {arm.label: experiment.rates[0] for arm in experiment.arms} if experiment.rates else {}
        self.all = [*tuning, *experiment.runs(rates)]
        for job in tuning:
            self._check(job)
        for job in self.all:  # raises on impossible specialists and strategies, before anything is started
            experiment.node(job)
            job.specialists()
        LocalFiles(experiment.out).make()
        if not self._play(tuning, only_plan):
            return None
        rates = self._choose(tuning)
        jobs = experiment.runs(rates)
        for job in jobs:
            self._check(job)
        self.all = [*tuning, *jobs]
        if not self._play(jobs, only_plan):
            return None
        return report.write([experiment.out], experiment.out)

    def _check(self, job: Job) -> None:
        """Raise if an existing run is not the wanted one."""
        folder = self.experiment.folder(job)
        old = Job.read(folder)
        if old is not None and (changed := differences(old, job)):
            raise UserError(
                f"{folder} is a run with other settings ({'; '.join(changed)}). Give the same ones, or another --out."
            )

    def _choose(self, tuning: Sequence[Job]) -> dict[str, float]:
        """Choose every arm's best learning rate, by the held-out score at the end of its short runs."""
        if not tuning:
            return {}
        experiment, chosen = self.experiment, report.read_rates(self.experiment.out)
        for arm in experiment.arms:
            scores = {}
            for rate in sorted(experiment.rates):
                jobs = [job for job in tuning if job.arm == arm and job.rate == rate]
                runs = [run for job in jobs if (run := Run.read(experiment.folder(job)))]
                scores[rate] = mean([mean([n.held_out[-1].sampled for n in run.nodes]) for run in runs])
            best = max(scores, key=lambda rate: scores[rate])
            seeds = sorted({job.seed for job in tuning})
            chosen[arm.label] = Tuned(
                best, {f"{rate:g}": score for rate, score in scores.items()}, seeds, experiment.tune_rounds
            )
            self.say(f"{arm.label}: learning rate {best:g}, by held-out score")
        LocalFiles(experiment.out).write(report.RATES, msgspec.json.format(msgspec.json.encode(chosen)))
        return {label: tuned.rate for label, tuned in chosen.items()}

    def _play(self, jobs: Sequence[Job], only_plan: bool) -> bool:
        """Run the unfinished jobs; return whether all have finished."""
        pending = [job for job in jobs if not is_finished(self.experiment.folder(job))]
        if not pending:
            return True
        pending.sort(key=self._turn)
        running: list[RunProcess] = []
        bars = ProgressBars(self.console, sorted(jobs, key=self._turn), self._played(jobs))
        with bars.display:
            try:
                while pending or running:
                    if self.stop.is_set():
                        return False
                    if self.costs is None and running and running[0].is_timed:
                        self._plan(running[0])
                        if only_plan:
                            return False
                    if self.costs and bars.since is None:
                        bars.expect(self._seconds, self.at_once)
                    room = 1 if self.costs is None else max(1, self.at_once)
                    while pending and len(running) < room:
                        running.append(self._start(pending.pop(0)))
                    for child in self._receive(running):
                        running.remove(child)
                        if not self._ended(child):
                            pending.insert(0, child.job)
                    bars.show({child.job.name: child.status.done for child in running})
            finally:
                if running and self.stop.is_set():
                    self.say("Stopping: the runs finish their rounds and save. (Ctrl-C again ends them at once.)")
                self._stop(running)
        return True

    def _plan(self, child: RunProcess) -> None:
        """Print how long all of it may take, and decide how many runs fit at once."""
        folder = self.experiment.folder
        run = Run.read(folder(child.job))
        if run is None:
            return
        self.costs = child.costs(run)
        need = child.status.memory + (CUDA_BYTES if self.on_gpu else SCORER_BYTES)
        fits = max(1, int(child.status.free * 0.9 // need))
        left = sorted((job for job in self.all if not is_finished(folder(job))), key=self._turn)
        if not self.at_once:
            most = min(os.cpu_count() or 1, fits)
            self.at_once = max(1, min(most, len(left)))  # the last may have finished by now
        played = self._played(left)
        seconds = [self._seconds(job, played.get(job.name, 0)) for job in left]
        tuning = sum(job.tuning for job in left)
        short = f" ({tuning} short ones for learning rates)" if tuning else ""
        self.say(
            f"Plan: {counted(len(left), 'run')}{short}, {self.at_once} at once, each with "
            f"{child.status.memory / 2**30:.1f} of {child.status.free / 2**30:.1f} GiB: about "
            f"{duration(makespan(seconds, self.at_once))}, if the machine is otherwise idle."
        )

    def _seconds(self, job: Job, played: int = 0) -> float:
        assert self.costs is not None
        return self.costs.seconds(job, self.experiment.node(job), played)

    def _played(self, jobs: Sequence[Job]) -> dict[str, int]:
        """Return the rounds of the runs that have begun, by name."""
        found = {}
        for job in jobs:
            folder = self.experiment.folder(job)
            if is_finished(folder):
                found[job.name] = job.rounds
            elif run := Run.read(folder):
                found[job.name] = run.played
        return found

    def _turn(self, job: Job) -> tuple[bool, int, int]:
        """Return a run's place in the order: seed by seed, the longest and largest first."""
        seeds = list(self.experiment.seeds)
        seed = job.seed if job.tuning else seeds.index(job.seed)
        return (not job.tuning, seed, -(job.arm.local_groups + job.arm.external_groups))

    def say(self, text: str) -> None:
        """Print a line; a terminal folds it between words."""
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def _start(self, job: Job) -> RunProcess:
        files = self.experiment.files(job)
        job.write(files)
        members = job.members(self.experiment.resolve)
        arguments = (job, members, files, self.experiment.user, self.experiment.keep_models)
        return RunProcess(job, members[0], ChildProcess(self.context, job.name, _child_main, *arguments))

    def _receive(self, running: Sequence[RunProcess]) -> list[RunProcess]:
        """Receive the runs' reports; return the runs that have ended."""
        wait([child.process.pipe for child in running], timeout=0.25)
        ended = []
        for child in running:
            pipe = child.process.pipe
            try:
                while pipe.poll():
                    child.update(msgspec.json.decode(pipe.recv_bytes(1 << 16), type=RunStatus))
            except (EOFError, OSError):
                child.process.join(END_SECONDS)
                ended.append(child)
        return ended

    def _ended(self, child: RunProcess) -> bool:
        """Return whether the run is over; a run that failed by accident is started again, from its last checkpoint."""
        if child.status.error:
            raise UserError(f"{child.job.name}: {child.status.error}")
        code = child.process.exit_code()
        if code == 0 and is_finished(self.experiment.folder(child.job)):
            return True
        name, where = child.job.name, self.experiment.folder(child.job) / "logs" / "swarm.log"
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] >= MAX_FAILURES:
            raise UserError(f"{name} has failed {MAX_FAILURES} times, the last time with exit code "
                            f"{code}. {where} says why.")  # fmt: skip
        self.at_once = self.at_once and max(1, self.at_once - 1)  # memory may have run out
        self.say(f"{name} ended with exit code {code} and is started again")
        return False

    def _stop(self, running: Sequence[RunProcess]) -> None:
        """Let the runs finish their rounds and save; a second Ctrl-C does not wait for that."""
        try:
            for child in running:
                child.process.signal(signal.SIGTERM)
            for child in running:
                while child.process.exit_code() is None:
                    child.process.join(END_SECONDS)
        finally:
            for child in running:
                child.process.signal(signal.SIGKILL)


def _kind(job: Job) -> str:
    return TUNING if job.tuning else RUNS


def is_finished(folder: Path) -> bool:
    store = FolderStore(files_of(folder))
    try:
        return read_state(store, read_manifest(store)).phase == "finished"
    except (OSError, Rejected):
        return False


def play(
    job: Job,
    settings: Sequence[NodeSettings],
    files: LocalFiles,
    user: NodeSettings,
    stop: threading.Event,
    keep_models: bool,
    pipe: Connection | None = None,
) -> bool:
    """Run one job, from its last checkpoint to its end (True) or until `stop` is set (False)."""
    from rl_swarm.experiment import lockstep
    from rl_swarm.learning.devices import hardware, peak_memory
    from rl_swarm.learning.memory import available

    members = [lockstep.RunMember(*both) for both in zip(job.identities(), settings, strict=True)]
    owner = Identity.derived("experiment", job.seed, 0)
    swarm = lockstep.LockstepSwarm(files, members, owner, user, job.specialists())
    device = swarm.nodes[0].policy.device
    free = available(device)
    files.write(report.MACHINE, msgspec.json.encode(hardware([device])))

    def on_round(swarm: lockstep.LockstepSwarm) -> None:
        if pipe is None:
            return
        pipe.send_bytes(
            msgspec.json.encode(RunStatus(swarm.done + 1, swarm.evaluation_seconds, peak_memory(device), free))
        )

    try:
        finished = swarm.run(stop, on_round)
        if finished and keep_models:
            swarm.save()
        elif finished:
            swarm.clear()
    finally:
        swarm.close()
    return finished


def _child_main(
    job: Job,
    members: Sequence[NodeSettings],
    files: LocalFiles,
    user: NodeSettings,
    keep_models: bool,
    pipe: Connection,
) -> None:
    # The runs share the cores, so a few texts must not occupy all of them.
    wanted = {**SHARED, "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
    stop = obey_parent(pipe)
    try:
        start_logging(user.telemetry, user.storage, files, job.name, terminal=False)
        play(job, members, files, user, stop, keep_models, pipe)
    except UserError as error:
        log.error("%s", error)
        pipe.send_bytes(msgspec.json.encode(RunStatus(error=str(error))))
        os._exit(1)
    except Exception:
        log.exception("%s failed", job.name)
        os._exit(1)
