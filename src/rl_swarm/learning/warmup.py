"""Gives a model that scores nothing a short supervised start.

Reinforcement needs answers that are sometimes right. A model that never writes its answer as it is asked to
earns 0 for all of them, and so learns nothing. Here it first learns from right answers to generated questions,
never held-out ones. A step is the trainer's own: with an advantage of 1 and nothing known about who sampled the
answer, its gradient is that of the answer's log-probability.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.errors import UserError
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.policy import Policy
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion

BATCH = 16  # examples per step
RATE = 2e-4
ASKED_AT_ONCE = 64
MAX_QUESTIONS = 8  # made for every example that is wanted, before giving up


class WarmUpError(UserError):
    """A model that cannot be warmed up like this; the message says what would work."""


@dataclass(frozen=True)
class WarmupExample:
    """A question and a completion that earns its full reward."""

    question: Question
    completion: str


def make_examples(
    environment: Reasoning, count: int, seed: int, fits: Callable[[str], bool] = lambda completion: True
) -> tuple[list[WarmupExample], list[str]]:
    """So many examples that fit, and the tasks that gave none: no right answer is known, or all are too long."""
    rng = random.Random(f"warm-up {seed}")
    examples: list[WarmupExample] = []
    asked: set[str] = set()
    for _ in range(0, MAX_QUESTIONS * count, ASKED_AT_ONCE):
        questions = environment.questions([rng.getrandbits(62) for _ in range(ASKED_AT_ONCE)])
        asked.update(question.task for question in questions)
        for question, completion in zip(questions, environment.solutions(questions), strict=True):
            if completion is not None and fits(completion):
                examples.append(WarmupExample(question, completion))
        if len(examples) >= count:
            break
    examples = examples[:count]
    return examples, sorted(asked - {example.question.task for example in examples})


def train(policy: Policy, examples: Sequence[WarmupExample], epochs: int, rate: float, seed: int) -> Iterator[float]:
    """One step at a time; yields how improbable the right answers were before it, in nats a token.

    The step size rises at the start and falls to nothing at the end, so that the last steps settle.
    """
    groups = [
        TrainingGroup(
            prompt=policy.prompt_ids(example.question.prompt),
            completions=[policy.encode(Completion(example.completion, ended=True))],
            advantages=[1.0],
            logprobs=None,
        )
        for example in examples
    ]
    order = [number for epoch in range(epochs) for number in _shuffled(len(groups), seed + epoch)]
    steps = step_count(len(groups), epochs)
    for step in range(steps):
        now = rate * min(1.0, (step + 1) / max(1.0, steps / 10)) * (1 - step / steps)
        for parameters in policy.trainer.optimizer.param_groups:
            parameters["lr"] = now
        batch = [groups[number] for number in order[step * BATCH : (step + 1) * BATCH]]
        yield policy.trainer.update(batch).nll


def step_count(examples: int, epochs: int) -> int:
    return -(-examples * epochs // BATCH)


def save(policy: Policy, out: Path) -> None:
    """A model directory like any other, whole or not at all."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        policy.save(aside)
        os.rename(aside, out)
    except OSError as error:
        raise WarmUpError(f"--out {out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _shuffled(count: int, seed: int) -> list[int]:
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers
