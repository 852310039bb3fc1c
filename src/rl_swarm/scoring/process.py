"""Runs the scoring process, and restarts it when an answer breaks it."""

import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.protocol.wire import UNREADABLE, Rejected, convert
from rl_swarm.scoring.lockdown import describe

log = logging.getLogger(__name__)

START_SECONDS = 120.0
# In wall-clock time per reply. The process itself limits an item to less processor time.
SCORE_SECONDS = 30.0
QUESTION_SECONDS = 120.0
OVERTIME_SECONDS = 5.0  # that a call may take beyond its `seconds`
MAX_REPLY = 64 << 20

ChildName = Literal["o", "p"]  # for the node's own answers, or for peers'


class ScorerFailed(Exception):
    """Raised when a request broke its child (`child_alone`), or was not answered in time."""

    def __init__(self, reason: str, child_alone: bool = False) -> None:
        super().__init__(reason)
        self.child_alone = child_alone


class ScorerExited(ScorerFailed):
    """Raised when the process had ended before the request, so no answer caused it."""


class ScoringProcess:
    """Makes questions and scores answers in a separate process.

    With `seconds`, a call is about the rollouts of a peer. It goes to the child for peers, takes about that long at
    most, and returns the first questions or scores that were done in that time.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.restarts = 0  # times that a child was lost
        self.late = 0  # questions and answers of peers that were given up
        self.denied: dict[str, bool] = {}
        self._ready: set[ChildName] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: dict[ChildName, int] = {}
        self._prepare("o")
        log.log(logging.INFO if all(self.denied.values()) else logging.WARNING, "scoring: %s", self.protection())

    def protection(self) -> str:
        """Describe what the scoring process was shown to be kept from."""
        return describe(self.denied)

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        return self._questions({"do": "questions", "items": [[seed] for seed in seeds]}, seconds, len(seeds))

    def held_out(self, count: int) -> list[Question]:
        return self._questions({"do": "held_out", "count": count}, None, None)

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        """Return the task's own score of every answer. An answer that breaks the process gets 0."""
        items = [[question.number, question.seed, _text(answer)] for question, answer in answered]
        child: ChildName = "o" if seconds is None else "p"
        scores: list[float] = []
        self._prepare(child)
        deadline = None if seconds is None else time.monotonic() + seconds
        exits = 0
        while len(scores) < len(items):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            request = {"do": "score", "items": items[len(scores) :]}
            try:
                for score in self._ask(child, request, SCORE_SECONDS, left):
                    if len(scores) == len(items):
                        raise Rejected(RejectReason.SCHEMA, "more scores than answers")
                    scores.append(convert(score, float))
                break
            except ScorerExited:
                exits += 1
                if exits > 3:
                    raise TaskError("the scoring process ends again and again") from None
            except ScorerFailed:
                scores.append(0.0)
            except Rejected as error:  # the process is replaced, since no scorer replies like this
                log.warning("the scoring process gave no scores: %s", error)
                self.close()
                self.restarts += 1
                scores[:] = [0.0] * len(items)
        self._count_late(len(items) - len(scores), "answers", seconds)
        return scores

    def solutions(self, questions: Sequence[Question]) -> list[str | None]:
        """Return a right answer to every question by the task's own score, None where none is known."""
        request = {"do": "solutions", "items": [[question.number, question.seed] for question in questions]}
        try:
            return [None if made is None else str(made) for made in self._ask("o", request, QUESTION_SECONDS)]
        except ScorerFailed as error:
            raise TaskError(f"{error} while looking for right answers") from error

    def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            os.close(self._pipes["p"])
            self._process = None
        self._ready.clear()

    def _questions(self, request: dict[str, object], seconds: float | None, count: int | None) -> list[Question]:
        child: ChildName = "o" if seconds is None else "p"
        for attempt in range(2):
            found: list[Question] = []
            try:
                for made in self._ask(child, request, QUESTION_SECONDS, seconds):
                    found.append(convert(made, Question))
            except (ScorerFailed, Rejected) as error:
                if attempt and seconds is None:
                    raise TaskError(
                        f"the tasks {[task.name for task in self.tasks]} make no questions: {error}"
                    ) from error
            else:
                break
        if count is not None:
            self._count_late(count - len(found), "questions", seconds)
        return found

    def _count_late(self, number: int, kind: str, seconds: float | None) -> None:
        if number > 0:
            self.late += number
            log.warning("%d %s of a peer are left out: the others took %g s", number, kind, seconds)

    def _start(self) -> None:
        environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        environment |= {
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUTF8": "1",
            "TZ": "UTC",
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        peers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl_swarm.scoring.worker", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs],
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        except OSError:
            os.close(peers)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        self._pipes = {"o": self._process.stdout.fileno(), "p": peers}

    def _prepare(self, child: ChildName) -> None:
        """Start the child if necessary, and make its tasks."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
            self.restarts += 1
        if child in self._ready:
            return
        problem = ""
        for _ in range(3):
            if self._process is None:
                self._start()
            replies: list[Any] = []
            try:
                replies.extend(self._replies(child, {"do": "tasks", "tasks": self.tasks}, START_SECONDS))
                self.denied = replies[0]
                self._ready.add(child)
                return
            except ScorerFailed as error:
                problem = f"{error} ({self._stderr()})"
                self.close()
                if replies:  # it has started, and made all tasks before this one
                    task = self.tasks[min(len(replies), len(self.tasks)) - 1]
                    raise TaskError(
                        f"the task {task.name} with {task.config} breaks the scoring process: {problem}"
                    ) from error
            except TaskError:
                self.close()
                raise
        raise TaskError(f"the scoring process does not start: {problem}. `rl-swarm doctor` looks for the cause.")

    def _stderr(self) -> str:
        if self._process is None or self._process.stderr is None:
            return ""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        lines = self._process.stderr.read(4096).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def _ask(
        self, child: ChildName, request: Mapping[str, object], each: float, total: float | None = None
    ) -> Iterator[Any]:
        """Yield the replies of a child; after `ScorerFailed` the next call gets a new child."""
        self._prepare(child)
        try:
            yield from self._replies(child, {**request, "seconds": total}, each, total)
        except ScorerFailed as error:
            self.restarts += 1
            if error.child_alone:
                self._ready.discard(child)
            else:
                self.close()
            raise

    def _replies(
        self, child: ChildName, request: Mapping[str, object], each: float, total: float | None = None
    ) -> Iterator[Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise ScorerExited("it is not running")
        pipe = self._pipes[child]
        last = math.inf if total is None else time.monotonic() + total + OVERTIME_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if selector.select(0) and os.read(pipe, 1):
                raise ScorerFailed("it sends a reply without a request")
            try:
                process.stdin.write(child.encode() + msgspec.json.encode(request) + b"\n")
                process.stdin.flush()
            except OSError as error:
                raise ScorerExited("it has ended") from error
            rest = b""
            while True:
                *lines, rest = (rest + _read(selector, pipe, min(time.monotonic() + each, last))).split(b"\n")
                if len(rest) > MAX_REPLY:
                    raise ScorerFailed("its answer is too long")
                for line in lines:
                    try:
                        reply = msgspec.json.decode(line)
                    except UNREADABLE as error:
                        raise ScorerFailed("its answer is not JSON") from error
                    if not isinstance(reply, dict) or not reply.keys() & {"end", "error", "failed", "exited"}:
                        yield reply
                    elif "error" in reply:
                        raise TaskError(reply["error"])
                    elif "failed" in reply:
                        raise ScorerFailed(reply["failed"], child_alone=True)
                    elif "exited" in reply:
                        raise ScorerExited(reply["exited"], child_alone=True)
                    else:
                        return


def _read(selector: selectors.BaseSelector, pipe: int, deadline: float) -> bytes:
    if not selector.select(max(0.0, deadline - time.monotonic())):
        raise ScorerFailed("it took too long")
    chunk = os.read(pipe, 1 << 20)
    if not chunk:
        raise ScorerExited("it has ended")
    return chunk


def _text(answer: str) -> str:
    """Replace lone surrogates, which JSON cannot contain."""
    return answer if answer.isascii() else answer.encode(errors="replace").decode()
