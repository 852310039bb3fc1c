"""Makes what nodes without a model publish: text from a seed, and an environment that scores it.

A publication has 8 questions of about 400 characters with 8 completions each of about 300: English prose and
arithmetic, so that it compresses as real answers do.
"""

import json
import pydoc_data.topics
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from rl_swarm.environments.base import Environment
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Publication

QUESTIONS, COMPLETIONS = 8, 8


class Prose:
    """Draws English that repeats itself as English does, from the texts of Python's own manual."""

    def __init__(self) -> None:
        text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        words = re.sub(r"[^\w\s.,;:'()?!-]|_", " ", text).split()
        self.text = " ".join(words)
        self.starts = [0, *accumulate(len(word) + 1 for word in words)]  # of every word

    def passage(self, length: int, rng: random.Random) -> str:
        start = self.starts[rng.randrange(len(self.starts) - 1 - length)]
        end = self.starts[bisect_left(self.starts, start + length)]
        return self.text[start : end - 1]

    def prompt(self, seed: int) -> str:
        rng = random.Random(seed)
        terms = [rng.randint(2, 9999) for _ in range(4)]
        return f"{self.passage(340, rng)}\nWhat is {terms[0]} * {terms[1]} + {terms[2]} - {terms[3]}?"

    def response(self, rng: random.Random, right: bool) -> str:
        steps = "\n".join(
            f"{a} {sign} {b} = {a + b if sign == '+' else a * b}"
            for a, b, sign in ((rng.randint(2, 9999), rng.randint(2, 999), rng.choice("+*")) for _ in range(3))
        )
        return f"{self.passage(220, rng)}\n{steps}\n<answer>{rng.randint(1000, 99999)}{'!' * right}</answer>"


class Arithmetic(Environment):
    """Scores what `Prose` writes. About half of the groups have signal."""

    def __init__(self) -> None:
        self.prose = Prose()

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        return [Question("arithmetic", 0, seed, self.prose.prompt(seed), None) for seed in seeds]

    def held_out(self, count: int) -> list[Question]:
        return self.questions(range(count))

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        return [float(text.endswith("!</answer>")) for _, text in answered]

    def well_formed(self, text: str) -> bool:
        return text.endswith("</answer>")

    def generate(self, questions: int, rng: random.Random) -> list[list[Completion]]:
        shares = [rng.choice((0.0, 0.3, 0.6, 1.0)) for _ in range(questions)]
        return [
            [Completion(self.prose.response(rng, rng.random() < share), True) for _ in range(COMPLETIONS)]
            for share in shares
        ]


class TimedArithmetic(Arithmetic):
    """Counts the seconds of making questions again: they are no cost of the network."""

    def __init__(self, environment: Arithmetic, clock: Callable[[], float]) -> None:
        self.prose, self.clock, self.seconds = environment.prose, clock, 0.0

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        started = self.clock()
        made = super().questions(seeds, seconds)
        self.seconds += self.clock() - started
        return made


def plain_json(publication: Publication) -> bytes:
    """Encode a publication in the layout of the system we replace."""
    rollouts = {
        number: [{"prompt": a.prompt, "response": a.response, "reward": a.reward} for a in given]
        for number, given in publication.rollouts.items()
    }
    fields = ("peer_id", "round", "stage", "timestamp")
    return json.dumps({**{name: getattr(publication, name) for name in fields}, "rollouts": rollouts}).encode()
