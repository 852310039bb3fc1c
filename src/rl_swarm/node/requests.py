"""Describes what a node needs done with its model: sample, or train.

A node alone does it at once. A process that plays several nodes gathers the requests of all, and can serve them
together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_swarm.learning.policy import Policy
from rl_swarm.learning.trainer import Update
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group
from rl_swarm.telemetry.journal import Stopwatch


@dataclass
class SampleRequest:
    """Completions of these questions."""

    policy: Policy
    questions: Sequence[Question]
    count: int
    seed: int
    watch: Stopwatch
    greedy: bool = False
    completions: list[list[Completion]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        return [question.prompt for question in self.questions]

    def run(self) -> None:
        with self.watch("generate"):
            self.completions = self.policy.sample(self.prompts, self.count, self.seed, self.greedy)


@dataclass
class Published:
    """Nothing: from here on the others' rollouts are needed."""

    def run(self) -> None: ...


@dataclass
class TrainRequest:
    """An update on these groups."""

    policy: Policy
    groups: Sequence[Group]
    watch: Stopwatch
    update: Update = field(default_factory=Update)

    def run(self) -> None:
        with self.watch("train"):
            self.update = self.policy.learn(self.groups)


Work = SampleRequest | Published | TrainRequest


def update_batches(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """What the updates of a round are made on, one after the other; there is at least one."""
    if not size:
        return [groups]
    useful = [group for group in groups if group.has_signal]
    return [useful[start : start + size] for start in range(0, len(useful), size)] or [[]]
