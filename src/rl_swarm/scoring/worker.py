"""The process in which questions are made and answers scored: `python -m rl_swarm.scoring.worker`.

reasoning-gym's scorers evaluate and parse the answers they are given, so they never run in the node.
Those that would run an answer as code are disarmed (see `harmless`). This process holds no key, no model
and no secret in its environment; it cannot write into files, its memory is limited, and its parent kills
it when it takes too long. It runs with PYTHONHASHSEED=0, because some tasks make other questions under
another hash seed.

It reads one JSON request per line and answers each with one line. What it does not protect against:
code that found another way in could read, create and delete files and open sockets as its user.
"""

import json
import math
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from types import FrameType
from typing import Any

import msgspec

from rl_swarm.environments.tasks import Task
from rl_swarm.scoring.harmless import disarm

MEMORY = 3 << 30
SECONDS_PER_ITEM = 2.0
# Tasks that plan all their questions when they are made, and so cannot have two thousand million of them.
PLANNED_AHEAD, FEW = {"acre", "gsm_symbolic", "list_functions", "word_ladder"}, 10_000
HELD_OUT_SHARE = 32  # of 256: prompts whose SHA-256 begins with a smaller byte are held out


class TooSlow(Exception):
    """Making or scoring one item took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def expire(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_held_out(prompt: str) -> bool:
    """By content, not by seed: a short task makes the same question from many seeds."""
    return sha256(prompt.encode()).digest()[0] < HELD_OUT_SHARE


class Tasks:
    """The tasks of one swarm."""

    def __init__(self, tasks: list[Task]) -> None:
        import reasoning_gym

        self.names = [task.name for task in tasks]
        self.weights = [task.weight for task in tasks]
        self.datasets = []
        for task in tasks:
            try:
                with time_limit(30):
                    size = FEW if task.name in PLANNED_AHEAD else 2**31
                    dataset = reasoning_gym.create_dataset(task.name, seed=0, size=size, **task.config)
                    dataset[0]
            except Exception as error:
                raise ValueError(
                    f"the task {task.name} with {task.config} cannot be used: {error}"
                ) from error
            self.datasets.append(dataset)
        self.entry = lru_cache(maxsize=4096)(self._entry)

    def _entry(self, number: int, seed: int) -> dict[str, Any]:
        with time_limit(10 * SECONDS_PER_ITEM):
            entry: dict[str, Any] = self.datasets[number][seed]
        return entry

    def question(self, seed: int) -> dict[str, object]:
        """The training question of a seed: which task, then the first of its questions that is not held out."""
        rng = random.Random(seed)
        number = rng.choices(range(len(self.names)), self.weights)[0]
        for _ in range(1000):
            made = self._drawn(number, rng)
            if made is not None and not is_held_out(str(made["prompt"])):
                return made
        raise ValueError(f"the task {self.names[number]} has too few different questions")

    def held_out(self, count: int) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for number in range(len(self.names)):
            rng, prompts = random.Random(f"held out {number}"), set[str]()
            wanted = count // len(self.names) + (number < count % len(self.names))
            for _ in range(100 * wanted):
                made = self._drawn(number, rng)
                if made is None:
                    continue
                prompt = str(made["prompt"])
                if len(prompts) < wanted and is_held_out(prompt) and prompt not in prompts:
                    prompts.add(prompt)
                    found.append(made)
                if len(prompts) == wanted:
                    break
        return found

    def _drawn(self, number: int, rng: random.Random) -> dict[str, object] | None:
        """A question of a task, or None where the task fails: it fails for that seed on every machine."""
        seed = rng.getrandbits(31) % self.datasets[number].size
        try:
            entry = self.entry(number, seed)
        except TooSlow:
            raise
        except Exception:  # noqa: BLE001 a task may raise anything
            return None
        answer = entry["answer"]
        return {
            "task": self.names[number],
            "number": number,
            "seed": seed,
            "prompt": str(entry["question"]),
            "answer": None if answer is None else str(answer),
        }

    def solution(self, number: int, seed: int) -> str | None:
        """An answer that the task's own scorer takes for right: the stored one, or an example where many are right."""
        entry = self.entry(number, seed)
        known = [entry["answer"]]
        known += [value for key, value in entry.get("metadata", {}).items() if "answer" in key]
        for value in known:
            for text in (str(value), json.dumps(value, default=str)):
                if value is not None and self.score(number, seed, text) > 0.99:
                    return text
        return None

    def score(self, number: int, seed: int, answer: str) -> float:
        entry = self.entry(number, seed)
        try:
            with time_limit(SECONDS_PER_ITEM):
                score = float(self.datasets[number].score_answer(answer, entry))
        except Exception:  # noqa: BLE001 a scorer that an answer breaks gives that answer nothing
            return 0.0
        return score if math.isfinite(score) else 0.0


def serve(requests: int, replies: int) -> None:
    tasks: Tasks | None = None
    with os.fdopen(requests, "rb") as incoming, os.fdopen(replies, "wb") as outgoing:
        for line in incoming:
            request = msgspec.json.decode(line)
            reply: object
            try:
                if request["do"] == "tasks":
                    tasks = Tasks(msgspec.convert(request["tasks"], list[Task]))
                    reply = {"ok": True}
                elif tasks is None:
                    reply = {"error": "no tasks yet"}
                elif request["do"] == "questions":
                    reply = {"questions": [tasks.question(seed) for seed in request["seeds"]]}
                elif request["do"] == "held_out":
                    reply = {"questions": tasks.held_out(request["count"])}
                elif request["do"] == "solutions":
                    reply = {"solutions": [tasks.solution(*item) for item in request["items"]]}
                else:
                    reply = {"scores": [tasks.score(*item) for item in request["items"]]}
            except (ValueError, TooSlow) as error:
                reply = {"error": str(error)}
            outgoing.write(msgspec.json.encode(reply) + b"\n")
            outgoing.flush()


def restrict() -> None:
    """Gives up what scoring does not need. Some limits do not exist on every system."""
    limits = {"RLIMIT_AS": MEMORY, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0}
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            continue


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node; this process ends with its pipe
    warnings.simplefilter("ignore")
    sys.set_int_max_str_digits(4300)
    requests, replies, errors = os.dup(0), os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # tasks print; the pipes are ours
        os.dup2(nothing, stream)
    try:
        disarm()  # before the limits: importing reasoning-gym may write byte code
        restrict()
        serve(requests, replies)
    except BaseException:
        os.write(errors, traceback.format_exc().encode()[-2000:])
        raise


if __name__ == "__main__":
    main()
