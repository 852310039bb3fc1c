"""Estimates how long an experiment takes from some rounds of one run, and shows its progress."""

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from rl_swarm.experiment.arms import Job
from rl_swarm.experiment.measures import Run
from rl_swarm.monitor.charts import BAR, DONE
from rl_swarm.node.evaluation import mean
from rl_swarm.node.settings import NodeSettings
from rl_swarm.plural import counted

SETTLED = 20.0  # seconds after which the estimate follows the pace instead of the plan


@dataclass
class Costs:
    """Holds the seconds that a node's steps take."""

    local: float  # per group: ask, answer, score, publish
    external: float  # per round: collect
    train: float  # per group
    evaluation: float  # per held-out score, sampled and greedy
    start: float = 0.0  # per run

    @classmethod
    def of(
        cls,
        run: Run,
        settings: NodeSettings,
        evaluating: float,
        evaluations: float,
        start: float = 0.0,
        rounds: int = 0,
        took: float = 0.0,
    ) -> "Costs":
        """Estimate costs from the last `rounds` of a run, which took so long together, or from its nodes' own times."""
        lines = [line for node in run.nodes for line in node.rounds[-rounds:]]
        arm = run.job.arm

        def spent(*phases: str) -> float:
            return mean([sum(getattr(line.seconds, phase) or 0.0 for phase in phases) for line in lines])

        noted = mean([line.seconds.total for line in lines]) * len(run.nodes) * rounds
        more = took / noted if noted and took else 1.0  # time spent for all nodes is in no node's log
        local = more * spent("questions", "generate", "score", "publish", "report") / settings.learning.local_groups
        answers = settings.evaluation.held_out_questions * (settings.evaluation.held_out_samples + 1)
        return cls(
            local,
            more * spent("collect"),
            more * spent("train") / (arm.epochs * (settings.learning.local_groups + arm.external_groups)),
            evaluating / evaluations / len(run.nodes)
            if evaluations
            else local * answers / settings.sampling.generations,
            start,
        )

    def seconds(self, job: Job, settings: NodeSettings, played: int = 0) -> float:
        """Estimate the seconds that are left of a run."""
        each = self.local * settings.learning.local_groups + self.external * (job.arm.external_groups > 0)
        each += self.train * job.arm.epochs * (settings.learning.local_groups + job.arm.external_groups)
        evaluations = job.evaluations(settings, played, job.rounds) + 1  # the last one comes after all rounds
        return self.start + job.count * (each * (job.rounds - played) + self.evaluation * evaluations)


def makespan(seconds: Sequence[float], at_once: int) -> float:
    """Return when the last of some runs ends, started in this order, so many at once."""
    lanes = [0.0] * at_once
    for each in seconds:
        heapq.heapreplace(lanes, lanes[0] + each)
    return max(lanes)


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 95:
        return f"{10 * max(1, round(seconds / 10))} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class ProgressBars:
    """Shows the progress of runs: bars in a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, jobs: Sequence[Job], done: Mapping[str, int]) -> None:
        self.console, self.jobs = console, jobs  # in the order of their starts
        self.done = dict(done)  # rounds, by run
        self.whole = {job.name: 1.0 for job in jobs}  # weight of each run; its seconds, once they are known
        self.since: tuple[float, float] | None = None  # when those were known, and the time left then
        self.at_once = 1
        self.printed = -1
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(complete_style=BAR, finished_style=DONE),
            TextColumn("{task.fields[says]}", markup=False),
        )
        self.display = Progress(*columns, console=console, disable=not console.is_terminal)
        what = "learning rate" if jobs[0].tuning else "run"
        self.all = self.display.add_task(counted(len(jobs), what), total=1.0, says="")
        self.tasks: dict[str, TaskID] = {}

    def expect(self, seconds: Callable[[Job], float], at_once: int) -> None:
        """Begin to say how much time is left, from how long each run takes."""
        self.at_once = at_once
        self.whole = {job.name: seconds(job) for job in self.jobs}
        self.since = (time.monotonic(), makespan(self._planned(), at_once))

    def show(self, running: Mapping[str, int]) -> None:
        """Show the rounds of the runs that go on."""
        self.done |= {name: max(self.done.get(name, 0), done) for name, done in running.items()}
        rounds = {job.name: job.rounds for job in self.jobs}
        share, left = 1 - sum(self._planned()) / sum(self.whole.values()), self._left()
        says = "timing a few rounds first" if left is None else f"{100 * share:.0f} %"
        if left:
            says += f", {duration(left)} left"
        if not self.console.is_terminal:
            self._line(says, share, [f"{name} {done}/{rounds[name]}" for name, done in running.items()])
            return
        for name in [name for name in self.tasks if name not in running]:
            self.display.remove_task(self.tasks.pop(name))
        for name in running:
            if name not in self.tasks:
                self.tasks[name] = self.display.add_task(f"  {name}", total=rounds[name], says="")
            played = f"{self.done[name]} of {rounds[name]} rounds"
            self.display.update(self.tasks[name], completed=self.done[name], says=played)
        self.display.update(self.all, completed=share, says=says)

    def _planned(self) -> list[float]:
        """Return the planned seconds that are left of every run."""
        return [self.whole[job.name] * (1 - self.done.get(job.name, 0) / job.rounds) for job in self.jobs]

    def _left(self) -> float | None:
        """Estimate the time that is left, at the pace since the plan."""
        if self.since is None:
            return None
        since, planned = self.since
        left, took = makespan(self._planned(), self.at_once), time.monotonic() - since
        return left * took / (planned - left) if took > SETTLED and planned > left else left

    def _line(self, says: str, share: float, running: Sequence[str]) -> None:
        if int(share * 10) > self.printed:
            self.printed = int(share * 10)
            self.console.print(f"{says}: {', '.join(running)}", soft_wrap=True)
