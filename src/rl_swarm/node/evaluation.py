"""Measures the held-out score, on a fixed set of questions that training never sees.

Answers are sampled as in training, and greedily. The share of well-formed answers and the accuracy among them tell
how much is format and how much is skill.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_swarm.environments.base import Environment
from rl_swarm.plural import counted
from rl_swarm.protocol.questions import Question
from rl_swarm.telemetry.schema import AnsweredQuestion, HeldOut

if TYPE_CHECKING:
    from rl_swarm.learning.policy import Policy

SAMPLING_SEED = 1


def evaluate(
    policy: "Policy", environment: Environment, questions: Sequence[Question], samples: int, greedy: bool
) -> HeldOut:
    sampled = policy.sample([q.prompt for q in questions], samples, SAMPLING_SEED)
    flat = [(q, c.text) for q, completions in zip(questions, sampled, strict=True) for c in completions]
    rewards = [environment.credit(reward) for reward in environment.score(flat)]
    formed = [environment.well_formed(text) for _, text in flat]
    tasks = [question.task for question, _ in flat]
    right_tasks, right = [], []  # of the well-formed answers
    for task, reward, good in zip(tasks, rewards, formed, strict=True):
        if good:
            right_tasks.append(task)
            right.append(reward)
    likeliest = []
    if greedy:
        answers = policy.sample([q.prompt for q in questions], 1, SAMPLING_SEED, greedy=True)
        scores = environment.score([(q, c[0].text) for q, c in zip(questions, answers, strict=True)])
        likeliest = [environment.credit(reward) for reward in scores]
    return HeldOut(
        questions=len(questions),
        samples=samples,
        temperature=policy.settings.sampling.temperature,
        sampled=mean(rewards),
        greedy=mean(likeliest) if greedy else None,
        well_formed=mean([float(good) for good in formed]),
        accuracy_well_formed=mean(right),
        by_task=means(tasks, rewards),
        greedy_by_task=means([q.task for q in questions], likeliest) if greedy else {},
        well_formed_by_task=means(tasks, [float(good) for good in formed]),
        accuracy_well_formed_by_task=means(right_tasks, right),
        examples=_one_per_task(flat, rewards),
    )


def protocol(questions: int, samples: int | None, temperature: float | None) -> str:
    """Say which questions and answers a score is the mean of, so that scores can be compared."""
    asked = counted(questions, "question")
    if samples is not None:
        asked += f" answered {counted(samples, 'time')}"
    return asked if temperature is None else f"{asked} at temperature {temperature:g}"


def means(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the mean value of every name."""
    found: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        found.setdefault(name, []).append(value)
    return {name: mean(found[name]) for name in sorted(found)}


def _one_per_task(answered: Sequence[tuple[Question, str]], rewards: Sequence[float]) -> list[AnsweredQuestion]:
    found: dict[str, AnsweredQuestion] = {}
    for (question, text), reward in zip(answered, rewards, strict=True):
        if question.task not in found:
            found[question.task] = AnsweredQuestion(question.task, question.prompt, question.answer, text, reward)
    return list(found.values())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
