"""What an environment is: questions made from seeds, and rewards for answers to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_swarm.errors import UserError

PEER_SECONDS = 5.0  # that a node spends on making, and again on scoring, the rollouts of one peer


class TaskError(UserError):
    """A task that cannot be used as configured."""


@dataclass(frozen=True)
class Question:
    """The question that a task makes from a seed, on every machine. `answer` is None where many are right."""

    task: str
    number: int  # of the task in the swarm's list: one task may stand there with several configurations
    seed: int
    prompt: str
    answer: str | None


class Environment(Protocol):
    """Tasks and how they are scored.

    `seconds` is for the rollouts of a peer: they are handled apart from the node's own, for at most about that
    long, and only the first questions or rewards come back where that is not enough.
    """

    stages: int
    system_prompt: str

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        """The training question of every seed; never one of the held-out set."""
        ...

    def held_out(self, count: int) -> list[Question]:
        """A fixed set of questions that `questions` never returns, tasks in turn."""
        ...

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        """A reward for every (question, completion)."""
        ...

    def well_formed(self, text: str) -> bool:
        """Whether a completion has the form of an answer, right or wrong."""
        ...

    def close(self) -> None: ...
