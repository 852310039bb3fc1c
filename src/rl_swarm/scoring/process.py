"""The node's side of the scoring process: start it, ask it, and start it again when an answer broke it."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rl_swarm.environments.base import Question, TaskError
from rl_swarm.environments.tasks import Task

START_SECONDS = 120.0
QUESTION_SECONDS = 120.0
BATCH = 512  # answers scored at once
SCORE_SECONDS = 10.0  # for a batch; the process itself stops one item after 2 s
PATIENCE_SECONDS = 60.0  # lost to the answers of one peer, however many of them break or stall the process
MAX_REPLY = 64 << 20


class ScorerBroke(Exception):
    """The scoring process died or did not answer in time."""


class ScoringProcess:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.restarts = 0
        self._lost = 0.0  # seconds, to answers that broke the process
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def questions(self, seeds: Sequence[int]) -> list[Question]:
        return self._questions({"do": "questions", "seeds": list(seeds)})

    def held_out(self, count: int) -> list[Question]:
        return self._questions({"do": "held_out", "count": count})

    def score(self, answered: Sequence[tuple[Question, str]]) -> list[float]:
        """The task's own score of every answer. An answer that breaks the process gets 0 and costs the others nothing."""
        items = [[question.number, question.seed, answer] for question, answer in answered]
        self._lost = 0.0
        batches = [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
        return [score for batch in batches for score in self._score(batch)]

    def solutions(self, questions: Sequence[Question]) -> list[str | None]:
        """An answer to every question that the task's own score calls right, or None where none is known."""
        items = [[question.number, question.seed] for question in questions]
        try:
            reply = self._ask({"do": "solutions", "items": items}, QUESTION_SECONDS)
        except ScorerBroke as error:
            self._restart()
            raise TaskError(f"{error} while looking for right answers") from error
        return [None if answer is None else str(answer) for answer in reply["solutions"]]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def _score(self, items: list[list[object]]) -> list[float]:
        if self._lost > PATIENCE_SECONDS:
            return [0.0] * len(items)
        started = time.monotonic()
        try:
            return [
                float(score) for score in self._ask({"do": "score", "items": items}, SCORE_SECONDS)["scores"]
            ]
        except ScorerBroke:
            self._restart()
            self._lost += time.monotonic() - started
        if len(items) == 1:
            return [0.0]
        half = len(items) // 2
        return self._score(items[:half]) + self._score(items[half:])

    def _questions(self, request: dict[str, object]) -> list[Question]:
        for attempt in range(2):
            try:
                reply = self._ask(request, QUESTION_SECONDS)
            except ScorerBroke as error:
                self._restart()
                if attempt:
                    raise TaskError(
                        f"the tasks {[task.name for task in self.tasks]} make no questions: {error}"
                    ) from error
            else:
                return [msgspec.convert(made, Question) for made in reply["questions"]]
        raise AssertionError("unreachable")

    def _start(self, tries: int = 3) -> None:
        kept = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")
        environment = {key: os.environ[key] for key in kept if key in os.environ}
        environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl_swarm.scoring.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment,
        )
        try:
            self._ask({"do": "tasks", "tasks": self.tasks}, START_SECONDS)
        except ScorerBroke as error:
            last_words = self._last_words()
            self.close()
            if tries > 1:
                self._start(tries - 1)
                return
            raise TaskError(
                f"the scoring process does not start: {error} ({last_words}). `rl-swarm doctor` looks for the cause."
            ) from error
        except TaskError:
            self.close()
            raise

    def _last_words(self) -> str:
        if self._process is None or self._process.stderr is None:
            return ""
        self._process.kill()
        lines = self._process.stderr.read(4096).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def _restart(self) -> None:
        self.close()
        self.restarts += 1
        self._start()

    def _ask(self, request: object, seconds: float) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ScorerBroke("it is not running")
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise ScorerBroke("it has ended") from error
        line = _read_line(process.stdout.fileno(), time.monotonic() + seconds)
        try:
            reply = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ScorerBroke("its answer is not JSON") from error
        if "error" in reply:
            raise TaskError(reply["error"])
        return reply


def _read_line(pipe: int, deadline: float) -> bytes:
    chunks: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while sum(map(len, chunks)) < MAX_REPLY:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise ScorerBroke("it took too long")
            chunk = os.read(pipe, 1 << 20)
            if not chunk:
                raise ScorerBroke("it has ended")
            chunks.append(chunk)
            if chunk.endswith(b"\n"):
                return b"".join(chunks)
    raise ScorerBroke("its answer is too long")
