"""The held-out score: a fixed set of questions that training never sees.

Sampled at temperature 1, which is how the model behaves while it learns, and greedily. The share of
well-formed answers and the accuracy among them tell how much is format and how much is skill.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rl_swarm.environments.base import Environment, Question

if TYPE_CHECKING:
    from rl_swarm.learning.policy import Policy

SAMPLING_SEED = 1


class Example(msgspec.Struct, frozen=True):
    task: str
    prompt: str
    answer: str | None
    completion: str
    reward: float


class HeldOut(msgspec.Struct, frozen=True):
    questions: int
    sampled: float
    greedy: float | None
    well_formed: float  # share of the sampled answers
    accuracy_well_formed: float  # reward among those
    by_task: dict[str, float]  # sampled
    examples: list[Example]


def evaluate(
    policy: "Policy", environment: Environment, questions: Sequence[Question], samples: int, greedy: bool
) -> HeldOut:
    sampled = policy.sample([q.prompt for q in questions], samples, SAMPLING_SEED)
    flat = [(q, c.text) for q, completions in zip(questions, sampled, strict=True) for c in completions]
    rewards = environment.score(flat)
    formed = [environment.well_formed(text) for _, text in flat]
    by_task: dict[str, list[float]] = {}
    for (question, _), reward in zip(flat, rewards, strict=True):
        by_task.setdefault(question.task, []).append(reward)
    greedy_score = None
    if greedy:
        greedy_answers = policy.sample([q.prompt for q in questions], 1, SAMPLING_SEED, greedy=True)
        greedy_score = mean(
            environment.score([(q, c[0].text) for q, c in zip(questions, greedy_answers, strict=True)])
        )
    return HeldOut(
        questions=len(questions),
        sampled=mean(rewards),
        greedy=greedy_score,
        well_formed=mean([float(f) for f in formed]),
        accuracy_well_formed=mean([r for r, f in zip(rewards, formed, strict=True) if f]),
        by_task={task: mean(values) for task, values in sorted(by_task.items())},
        examples=_one_per_task(flat, rewards),
    )


def _one_per_task(answered: Sequence[tuple[Question, str]], rewards: Sequence[float]) -> list[Example]:
    found: dict[str, Example] = {}
    for (question, text), reward in zip(answered, rewards, strict=True):
        if question.task not in found:
            found[question.task] = Example(question.task, question.prompt, question.answer, text, reward)
    return list(found.values())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
