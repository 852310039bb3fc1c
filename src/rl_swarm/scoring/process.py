"""Starts the scoring process, asks it, and goes on where an answer broke it."""

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
# Of the clock, for one reply. The process stops an item by itself, after less time of its processor.
SCORE_SECONDS = 30.0
QUESTION_SECONDS = 120.0
OVERTIME_SECONDS = 5.0  # that a call may take beyond its `seconds`
MAX_REPLY = 64 << 20

Who = Literal["o", "p"]  # whose answers: the node's own, or a peer's


class ScorerBroke(Exception):
    """What was asked broke the child that was asked (`alone`), or was not answered in time."""

    def __init__(self, why: str, alone: bool = False) -> None:
        super().__init__(why)
        self.alone = alone


class ScorerGone(ScorerBroke):
    """The process had ended before, which is no answer's fault."""


class ScoringProcess:
    """With `seconds`, a call is about the rollouts of a peer: it goes to a child of its own, it takes at most
    about that long, and it returns what it got done, the first questions or the first scores."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.restarts = 0  # times that a child was lost
        self.late = 0  # questions and answers of peers that were given up
        self.kept_from: dict[str, bool] = {}
        self._ready: set[Who] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: dict[Who, int] = {}
        self._prepare("o")
        log.log(
            logging.INFO if all(self.kept_from.values()) else logging.WARNING,
            "scoring: %s",
            self.protection(),
        )

    def protection(self) -> str:
        """What the scoring process was seen to be kept from."""
        return describe(self.kept_from)

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        return self._questions({"do": "questions", "items": [[seed] for seed in seeds]}, seconds, len(seeds))

    def held_out(self, count: int) -> list[Question]:
        return self._questions({"do": "held_out", "count": count}, None, None)

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        """The task's own score of every answer. An answer that breaks the process gets 0 and costs the others
        nothing."""
        items = [[question.number, question.seed, _text(answer)] for question, answer in answered]
        who: Who = "o" if seconds is None else "p"
        scores: list[float] = []
        self._prepare(who)
        deadline = None if seconds is None else time.monotonic() + seconds
        gone = 0
        while len(scores) < len(items):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            request = {"do": "score", "items": items[len(scores) :]}
            try:
                for score in self._ask(who, request, SCORE_SECONDS, left):
                    if len(scores) == len(items):
                        raise Rejected(RejectReason.SCHEMA, "more scores than answers")
                    scores.append(convert(score, float))
                break
            except ScorerGone:
                gone += 1
                if gone > 3:
                    raise TaskError("the scoring process ends again and again") from None
            except ScorerBroke:
                scores.append(0.0)
            except Rejected as error:  # it says what no scorer says: whatever it is, it is replaced
                log.warning("the scoring process gave no scores: %s", error)
                self.close()
                self.restarts += 1
                scores[:] = [0.0] * len(items)
        self._count_late(len(items) - len(scores), "answers", seconds)
        return scores

    def solutions(self, questions: Sequence[Question]) -> list[str | None]:
        """An answer to every question that the task's own score calls right, or None where none is known."""
        request = {"do": "solutions", "items": [[question.number, question.seed] for question in questions]}
        try:
            return [None if made is None else str(made) for made in self._ask("o", request, QUESTION_SECONDS)]
        except ScorerBroke as error:
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
        who: Who = "o" if seconds is None else "p"
        for attempt in range(2):
            found: list[Question] = []
            try:
                for made in self._ask(who, request, QUESTION_SECONDS, seconds):
                    found.append(convert(made, Question))
            except (ScorerBroke, Rejected) as error:
                if attempt and seconds is None:
                    raise TaskError(
                        f"the tasks {[task.name for task in self.tasks]} make no questions: {error}"
                    ) from error
            else:
                break
        if count is not None:
            self._count_late(count - len(found), "questions", seconds)
        return found

    def _count_late(self, number: int, what: str, seconds: float | None) -> None:
        if number > 0:
            self.late += number
            log.warning("%d %s of a peer are left out: the others took %g s", number, what, seconds)

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

    def _prepare(self, who: Who) -> None:
        """Has the child of that name ready, with the tasks made."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
            self.restarts += 1
        if who in self._ready:
            return
        problem = ""
        for _ in range(3):
            if self._process is None:
                self._start()
            replies: list[Any] = []
            try:
                replies.extend(self._replies(who, {"do": "tasks", "tasks": self.tasks}, START_SECONDS))
                self.kept_from = replies[0]
                self._ready.add(who)
                return
            except ScorerBroke as error:
                problem = f"{error} ({self._last_words()})"
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

    def _last_words(self) -> str:
        if self._process is None or self._process.stderr is None:
            return ""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        lines = self._process.stderr.read(4096).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def _ask(self, who: Who, request: Mapping[str, object], each: float, total: float | None = None) -> Iterator[Any]:
        """The replies of a child that is ready. `ScorerBroke` leaves it behind; the next call has another one."""
        self._prepare(who)
        try:
            yield from self._replies(who, {**request, "seconds": total}, each, total)
        except ScorerBroke as error:
            self.restarts += 1
            if error.alone:
                self._ready.discard(who)
            else:
                self.close()
            raise

    def _replies(
        self, who: Who, request: Mapping[str, object], each: float, total: float | None = None
    ) -> Iterator[Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise ScorerGone("it is not running")
        pipe = self._pipes[who]
        last = math.inf if total is None else time.monotonic() + total + OVERTIME_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if selector.select(0) and os.read(pipe, 1):
                raise ScorerBroke("it speaks without being asked")
            try:
                process.stdin.write(who.encode() + msgspec.json.encode(request) + b"\n")
                process.stdin.flush()
            except OSError as error:
                raise ScorerGone("it has ended") from error
            rest = b""
            while True:
                *lines, rest = (rest + _read(selector, pipe, min(time.monotonic() + each, last))).split(b"\n")
                if len(rest) > MAX_REPLY:
                    raise ScorerBroke("its answer is too long")
                for line in lines:
                    try:
                        reply = msgspec.json.decode(line)
                    except UNREADABLE as error:
                        raise ScorerBroke("its answer is not JSON") from error
                    if not isinstance(reply, dict) or not reply.keys() & {"end", "error", "broke", "gone"}:
                        yield reply
                    elif "error" in reply:
                        raise TaskError(reply["error"])
                    elif "broke" in reply:
                        raise ScorerBroke(reply["broke"], alone=True)
                    elif "gone" in reply:
                        raise ScorerGone(reply["gone"], alone=True)
                    else:
                        return


def _read(selector: selectors.BaseSelector, pipe: int, deadline: float) -> bytes:
    if not selector.select(max(0.0, deadline - time.monotonic())):
        raise ScorerBroke("it took too long")
    chunk = os.read(pipe, 1 << 20)
    if not chunk:
        raise ScorerGone("it has ended")
    return chunk


def _text(answer: str) -> str:
    """Without lone surrogates, which no JSON can carry."""
    return answer if answer.isascii() else answer.encode(errors="replace").decode()
