"""Makes questions and scores answers, in processes of their own. `process` starts it, as
`python -m rl_swarm.scoring.worker`.

reasoning-gym's scorers evaluate and parse the answers they are given, so they never run in the node. The
process that the node starts only imports, which takes long. Then it forks one child for the node's own answers and
one for peers' answers, so that nothing a peer sent can affect the node's own rewards. Both lock themselves down (see
`lockdown`) before they read a task or an answer. Scorers that would run an answer as code are made safe
(`safe_scorers`). When an answer breaks a child, a new one is forked in a fraction of a second.

Children run with PYTHONHASHSEED=0, because some tasks make different questions under another hash seed. A request is
one line of JSON after the letter of its child; the child replies with a line per item and an end.
"""

import difflib
import gc
import json
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from types import FrameType
from typing import Any, BinaryIO

import msgspec

from rl_swarm.protocol.questions import is_held_out
from rl_swarm.protocol.tasks import PRESET_NAMES, Task
from rl_swarm.scoring.lockdown import lock_down, packages
from rl_swarm.scoring.safe_scorers import SCORERS, patch_libraries

# In processor time, so that load on the machine does not change a reward.
SCORE_SECONDS = 1.0  # the slowest honest answer known takes 0.2
QUESTION_SECONDS = 10.0
TASK_SECONDS = 10.0  # to make a task and its first questions
ALL_TASKS_SECONDS = 60.0  # of wall-clock time
GRACE_SECONDS = 1.0  # before the kernel ends the process: native code does not handle the Python signal
FIRST_QUESTIONS = 8
MAX_SLOW = 2  # questions in a row; number_sequence takes 14 s for one in hundreds
NO_MEMORY = 2  # the exit status of a child
# Tasks that make all their questions when they are created, and so need a small size.
PLANNED_AHEAD, FEW = {"acre", "gsm_symbolic", "list_functions", "word_ladder"}, 10_000
UNSEEDED = {"codeio"}  # runs its own programs, some of which use the global random generators


class TooSlow(BaseException):
    """Raised when one item takes too long. As a `BaseException` it passes `except Exception` in scorers."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def expire(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"it takes more than {seconds:g} s")

    signal.signal(signal.SIGPROF, expire)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def make(task: Task) -> Any:
    """Create the task's dataset; raise if it makes no questions within the limits of time and memory."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS or task.name == "composite":
        close = difflib.get_close_matches(task.name, [*PRESET_NAMES, *DATASETS], n=3)
        meant = f". Did you mean {', '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"reasoning-gym has no task {task.name!r} that a swarm can use{meant}")
    defaults = {field.name: field.default for field in fields(DATASETS[task.name][1])}
    for key in sorted(task.config):
        if key not in defaults or key in ("seed", "size"):
            known = ", ".join(sorted(defaults.keys() - {"seed", "size"})) or "none"
            raise ValueError(f"the task {task.name} has no setting {key!r}; it has {known}")
    try:
        with time_limit(TASK_SECONDS):
            size = FEW if task.name in PLANNED_AHEAD else 2**31
            dataset = reasoning_gym.create_dataset(task.name, seed=0, size=size, **task.config)
            started = time.process_time()
            for number in range(FIRST_QUESTIONS):
                dataset[number]
                if time.process_time() - started > 0.5:
                    break
    except (TooSlow, MemoryError) as error:
        why = str(error) or "it needs too much memory"
        raise ValueError(f"the task {task.name} makes no questions here: {why}{_suspect(task, defaults)}") from error
    except Exception as error:  # a task may raise anything
        raise ValueError(f"the task {task.name} with {task.config} cannot be used: {error}") from error
    return dataset


def _suspect(task: Task, defaults: dict[str, Any]) -> str:
    """Name the setting that is furthest from its default, and so the likely cause."""
    numbers = {
        key: abs(value) / max(abs(defaults[key]), 1)
        for key, value in task.config.items()
        if isinstance(value, int | float) and isinstance(defaults[key], int | float)
    }
    if not numbers:
        return ""
    key = max(numbers, key=numbers.__getitem__)
    return f". Its setting {key} is {task.config[key]}; the default is {defaults[key]}"


def entry_of(name: str, dataset: Any, seed: int) -> dict[str, Any]:
    """Return the question of a seed, always the same."""
    if name in UNSEEDED:
        from numpy.random import seed as seed_numpy

        random.seed(seed)
        seed_numpy(seed)
    entry: dict[str, Any] = dataset[seed]
    return entry


class Tasks:
    """Makes questions and scores answers of the tasks of one swarm."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.weights: list[float] = []
        self.datasets: list[Any] = []
        self.slow: set[tuple[int, int]] = set()  # (task, seed) of questions that are not tried again
        self.deadline = math.inf  # of the current request
        self.entry = lru_cache(maxsize=4096)(self._entry)

    def add(self, task: Task) -> None:
        self.datasets.append(make(task))
        self.names.append(task.name)
        self.weights.append(task.weight)

    def _entry(self, number: int, seed: int) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        if (number, seed) in self.slow:
            raise TooSlow("it was too slow before")
        try:
            with time_limit(min(QUESTION_SECONDS, max(left, 0.01))):
                return entry_of(self.names[number], self.datasets[number], seed)
        except TooSlow as error:
            if left > QUESTION_SECONDS:
                self.slow.add((number, seed))
            raise TooSlow(f"the task {self.names[number]} makes questions too slowly: {error}") from None

    def question(self, seed: int) -> dict[str, object]:
        """Return the training question of a seed: choose a task, then its first question that is not held out."""
        rng = random.Random(seed)
        number = rng.choices(range(len(self.names)), self.weights)[0]  # as in `manifest.task_index`
        for made in self._draws(number, rng, 1000):
            if not is_held_out(str(made["prompt"])):
                return made
        raise ValueError(f"the task {self.names[number]} has too few different questions")

    def held_out(self, count: int) -> Iterator[dict[str, object]]:
        for number in range(len(self.names)):
            rng, prompts = random.Random(f"held out {number}"), set[str]()
            wanted = count // len(self.names) + (number < count % len(self.names))
            if wanted == 0:
                continue
            for made in self._draws(number, rng, 100 * wanted):
                prompt = str(made["prompt"])
                if is_held_out(prompt) and prompt not in prompts:
                    prompts.add(prompt)
                    yield made
                if len(prompts) == wanted:
                    break

    def _draws(self, number: int, rng: random.Random, count: int) -> Iterator[dict[str, object]]:
        """Yield questions of a task. A seed that fails does so on every machine; slow questions are skipped."""
        slow = 0
        for _ in range(count):
            seed = rng.getrandbits(31) % self.datasets[number].size
            try:
                entry = self.entry(number, seed)
            except TooSlow:
                slow += 1
                if slow > MAX_SLOW or time.monotonic() > self.deadline:
                    raise
                continue
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 a task may raise anything
                continue
            slow, answer = 0, entry["answer"]
            yield {
                "task": self.names[number],
                "number": number,
                "seed": seed,
                "prompt": str(entry["question"]),
                "answer": None if answer is None else str(answer),
            }

    def solution(self, number: int, seed: int) -> str | None:
        """Return an answer that the task's own scorer accepts: the stored one, or an example of several."""
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
        scorer = SCORERS.get(self.names[number])
        try:
            with time_limit(SCORE_SECONDS):
                dataset = self.datasets[number]
                score = float(scorer(dataset, answer, entry) if scorer else dataset.score_answer(answer, entry))
        except MemoryError:
            raise  # leftovers could affect the next answer, so the child ends
        except (Exception, TooSlow):  # noqa: BLE001 an answer that breaks its scorer earns 0
            return 0.0
        return score if math.isfinite(score) else 0.0


def replies(request: dict[str, Any], tasks: Tasks, denied: dict[str, bool]) -> Iterator[object]:
    """Yield a reply per item; fewer if the request has a time limit that is reached."""
    action, seconds = request["do"], request.get("seconds")
    tasks.deadline = math.inf if seconds is None else time.monotonic() + seconds
    if action == "tasks":
        yield denied
        deadline = time.monotonic() + ALL_TASKS_SECONDS
        for task in msgspec.convert(request["tasks"], list[Task]):
            if time.monotonic() > deadline:
                raise ValueError(f"all tasks before {task.name} take more than {ALL_TASKS_SECONDS:g} s to make")
            tasks.add(task)
            yield task.name
    elif action == "held_out":
        yield from tasks.held_out(request["count"])
    else:
        actions: dict[str, Callable[..., object]] = {
            "questions": tasks.question,
            "solutions": tasks.solution,
            "score": tasks.score,
        }
        for item in request["items"]:
            if time.monotonic() > tasks.deadline:
                return
            try:
                yield actions[action](*item)
            except TooSlow:
                if seconds is None:
                    raise
                return


def serve(requests: BinaryIO, outgoing: BinaryIO, done: int, denied: dict[str, bool]) -> None:
    tasks = Tasks()
    for line in requests:
        last: dict[str, object] = {"end": True}
        try:
            for reply in replies(msgspec.json.decode(line), tasks, denied):
                outgoing.write(msgspec.json.encode(reply) + b"\n")
                outgoing.flush()
        except (ValueError, TooSlow) as error:
            last = {"error": str(error)}
        outgoing.write(msgspec.json.encode(last) + b"\n")
        outgoing.flush()
        os.write(done, b".")


@dataclass
class ScoringChild:
    pid: int
    requests: BinaryIO
    done: int

    def ask(self, line: bytes) -> bool:
        """Send a request, and return whether the child survived it."""
        with suppress(BrokenPipeError):
            self.requests.write(line)
            self.requests.flush()
            return os.read(self.done, 1) == b"."
        return False

    def ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.requests.close()
        os.close(self.done)


def exit_reason(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)} ended it"
    return "it needed too much memory" if os.WEXITSTATUS(status) == NO_MEMORY else "it ended"


def fork(replies_to: int, keep: int) -> ScoringChild:
    requests_out, requests_in = os.pipe()
    done_out, done_in = os.pipe()
    pid = os.fork()
    if pid:
        os.close(requests_out)
        os.close(done_in)
        return ScoringChild(pid, os.fdopen(requests_in, "wb"), done_out)
    status = 1
    try:
        mine = {0, 1, 2, requests_out, done_in, replies_to, keep}
        for other in set(range(3, 64)) - mine:  # above all the pipes of the other child
            with suppress(OSError):
                os.close(other)
        denied = lock_down(packages())
        with os.fdopen(requests_out, "rb") as requests, os.fdopen(replies_to, "wb") as outgoing:
            serve(requests, outgoing, done_in, denied)
        status = 0
    except MemoryError:
        status = NO_MEMORY
    except BaseException:  # noqa: BLE001 reported to the node
        with suppress(OSError):
            os.write(keep, traceback.format_exc().encode()[-2000:])
    finally:
        os._exit(status)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node; this process ends with its pipe
    warnings.simplefilter("ignore")
    peer_pipe = int(sys.argv[1])
    pipes = {b"o": os.dup(1), b"p": os.dup(peer_pipe)}
    os.close(peer_pipe)
    requests, errors = os.dup(0), os.dup(2)
    os.set_blocking(errors, False)  # a full pipe must not block
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # tasks print; the pipes are ours
        os.dup2(nothing, stream)
    os.close(nothing)
    try:
        gc.disable()  # importing leaves little to collect
        patch_libraries()  # imports everything
        gc.freeze()  # pages stay shared with the children
        gc.enable()
        os.environ.clear()
        children: dict[bytes, ScoringChild] = {}
        with os.fdopen(requests, "rb") as incoming:
            for line in incoming:
                name, reply = line[:1], b""
                child = children.pop(name, None)
                if child is None:
                    child = fork(pipes[name], errors)
                elif child.ended():
                    reply = msgspec.json.encode({"exited": "it had ended"})
                if not reply and not child.ask(line[1:]):
                    reply = msgspec.json.encode({"failed": exit_reason(os.waitpid(child.pid, 0)[1])})
                if reply:
                    child.close()
                    os.write(pipes[name], reply + b"\n")
                else:
                    children[name] = child
    except BaseException:
        with suppress(OSError):
            os.write(errors, traceback.format_exc().encode()[-2000:])
        raise


if __name__ == "__main__":
    main()
