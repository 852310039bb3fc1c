"""Asks the tasks of reasoning-gym: short questions with answers that can be checked.

The answer stands between `<answer>` tags and nothing follows them. Questions are made and answers
scored in a process of their own (see `scoring`), because the scorers evaluate the answers.
"""

import importlib.metadata
from collections.abc import Sequence

from rl_swarm.environments.base import Environment
from rl_swarm.environments.presets import PRESETS
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.tasks import Task
from rl_swarm.scoring.process import ScoringProcess

OPEN, CLOSE = "<answer>", "</answer>"
MAX_ANSWER = 8192


class Reasoning(Environment):
    system_prompt = (
        "Think about the question, then give your final answer between <answer> and </answer>. "
        "Write nothing after the closing tag."
    )

    def __init__(self, tasks: Sequence[Task], partial_rewards: bool = False) -> None:
        super().__init__(tasks, partial_rewards)
        self.scorer = ScoringProcess(tasks)

    @classmethod
    def preset(cls, model: str) -> Sequence[Task]:
        return PRESETS["tiny" if model == "tiny" else "sapo"]

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"reasoning-gym": importlib.metadata.version("reasoning-gym")}

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        return self.scorer.questions(seeds, seconds)

    def held_out(self, count: int) -> list[Question]:
        return self.scorer.held_out(count)

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        answers = [extract(text) for _, text in answered]
        asked = [(q, answer) for (q, _), answer in zip(answered, answers, strict=True) if answer is not None]
        scores = iter(self.scorer.score(asked, seconds))
        rewards: list[float] = []
        for answer in answers:
            score = 0.0 if answer is None else next(scores, None)
            if score is None:  # out of time
                break
            rewards.append(self._reward(score))
        return rewards

    def solutions(self, questions: Sequence[Question]) -> list[str | None]:
        """Return a completion of every question that earns the full reward, or None where none is known."""
        answers = self.scorer.solutions(questions)
        completions = [None if answer is None else f"{OPEN}{answer.strip()}{CLOSE}" for answer in answers]
        asked = [(q, text) for q, text in zip(questions, completions, strict=True) if text is not None]
        rewards = iter(self.score(asked))
        return [text if text is not None and next(rewards) > 0.99 else None for text in completions]

    def well_formed(self, text: str) -> bool:
        return extract(text) is not None

    def close(self) -> None:
        self.scorer.close()

    def _reward(self, score: float) -> float:
        if self.partial_rewards:
            return min(max(score, 0.0), 1.0)
        return 1.0 if score >= 1.0 else 0.0


def extract(text: str) -> str | None:
    """Return the answer in a completion, or None when it is not well-formed."""
    body = text.rstrip()
    start = body.rfind(OPEN)
    if start < 0 or not body.endswith(CLOSE):
        return None
    answer = body[start + len(OPEN) : -len(CLOSE)].strip()
    return answer if CLOSE not in answer and 0 < len(answer) <= MAX_ANSWER else None
