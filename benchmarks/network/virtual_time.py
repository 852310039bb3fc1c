"""Runs blocking code in virtual time: every task is a thread, and only the one that is due next runs.

Code that sleeps or waits through `World` runs unchanged. Seconds pass when every task has said until when it waits.
"""

import heapq
import itertools
import threading
from collections.abc import Callable

STACK = 256 << 10  # bytes of a task's stack


class TaskEnded(BaseException):
    """Ends a task whose owner has left, or whose world has ended. No handler of errors catches it."""


class Task:
    def __init__(self, work: Callable[[], None], exists: Callable[[], bool]) -> None:
        self.work, self.exists = work, exists
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread: threading.Thread | None = None


class World:
    def __init__(self, start: float) -> None:
        self.now, self.ends = start, float("inf")
        self.failure: Exception | None = None
        self._waiting: list[tuple[float, int, Task]] = []  # by the time they continue
        self._numbers = itertools.count()
        self._running: Task | None = None
        self._done = threading.Lock()

    def clock(self) -> float:
        return self.now

    def spawn(self, work: Callable[[], None], delay: float = 0.0, exists: Callable[[], bool] = lambda: True) -> None:
        """Begin a task some seconds from now, if its owner still exists then."""
        heapq.heappush(self._waiting, (self.now + delay, next(self._numbers), Task(work, exists)))

    def sleep(self, seconds: float) -> None:
        """Let the other tasks run until then."""
        me = self._running
        assert me is not None
        heapq.heappush(self._waiting, (self.now + seconds, next(self._numbers), me))
        self._hand_over(me)
        if self.now > self.ends or not me.exists():
            raise TaskEnded

    def run(self, until: float) -> None:
        """Run until that moment; tasks that are still under way then end where they are."""
        self.ends = until
        before = threading.stack_size(STACK)
        self._done.acquire()
        self._hand_over(None)
        self._done.acquire()
        threading.stack_size(before)
        self.now = min(self.now, self.ends)
        if self.failure is not None:
            raise self.failure

    def _hand_over(self, me: Task | None) -> None:
        if not self._waiting:
            self._done.release()
            return
        self.now, _, task = heapq.heappop(self._waiting)
        self._running = task
        if task is me:
            return
        if task.thread is None:
            task.thread = threading.Thread(target=self._begin, args=(task,), daemon=True)
            task.thread.start()
        else:
            task.turn.release()
        if me is not None:
            me.turn.acquire()

    def _begin(self, task: Task) -> None:
        try:
            if self.now <= self.ends and task.exists():
                task.work()
        except TaskEnded:
            pass
        except Exception as error:  # noqa: BLE001 raised by `run`, in the thread that called it
            self.failure = self.failure or error
            self.ends = self.now
        self._hand_over(None)


class Stop(threading.Event):
    """Stands in for an event to wait on in virtual time. It is never set; tasks end when their owner leaves."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def wait(self, timeout: float | None = None) -> bool:
        self.world.sleep(float("inf") if timeout is None else timeout)
        return self.is_set()
