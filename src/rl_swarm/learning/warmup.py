"""Fine-tunes a model that scores nothing on right answers, before reinforcement learning.

Reinforcement learning needs answers that are occasionally correct. A model that never writes its answer as asked
earns 0 for every answer, and so learns nothing. Here it is trained on right answers to generated questions, never on
held-out ones. A step is the trainer's own: with advantage 1 and no behaviour policy, its gradient is that of the
answer's log-probability.
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
QUESTION_BATCH = 64
MAX_QUESTIONS = 8  # per example, before giving up


class WarmupError(UserError):
    """Raised when a model cannot be warmed up like this; the message says what would work."""


@dataclass(frozen=True)
class WarmupExample:
    """Holds a question and a completion that earns its full reward."""

    question: Question
    completion: str


def make_examples(
    environment: Reasoning, count: int, seed: int, fits: Callable[[str], bool] = lambda completion: True
) -> tuple[list[WarmupExample], list[str]]:
    """Return `count` examples that fit, and the tasks without any: their right answers are unknown or too long."""
    rng = random.Random(f"warm-up {seed}")
    examples: list[WarmupExample] = []
    asked: set[str] = set()
    for _ in range(0, MAX_QUESTIONS * count, QUESTION_BATCH):
        questions = environment.questions([rng.getrandbits(62) for _ in range(QUESTION_BATCH)])
        asked.update(question.task for question in questions)
        for question, completion in zip(questions, environment.solutions(questions), strict=True):
            if completion is not None and fits(completion):
                examples.append(WarmupExample(question, completion))
        if len(examples) >= count:
            break
    examples = examples[:count]
    return examples, sorted(asked - {example.question.task for example in examples})


def train(policy: Policy, examples: Sequence[WarmupExample], epochs: int, rate: float, seed: int) -> Iterator[float]:
    """Train step by step; yield the negative log-likelihood of the right answers before each step, in nats per token.

    The learning rate warms up and then decays linearly to 0.
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
    """Write an ordinary model directory atomically."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        policy.save(aside)
        os.rename(aside, out)
    except OSError as error:
        raise WarmupError(f"--out {out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _shuffled(count: int, seed: int) -> list[int]:
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers
