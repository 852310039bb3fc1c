"""Starts child processes: forked from a server, shielded from the terminal, ended with their parent.

The terminal sends Ctrl-C and its own end to every process that runs in it. Only the parent acts on these and tells its
children. Every child holds one end of a pipe whose other end only its parent has. When the parent ends, however it
ends, the pipe closes and the child ends too.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from rl_swarm.errors import UserError

Context = SpawnContext | ForkServerContext

FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP)
LOST = 255  # multiprocessing's exit code for all children of a fork server that has died, also for those that run
TRIES, PAUSE = 5, 0.2  # at starting a process, and the seconds in between
LONGEST_MESSAGE = 1 << 16


def context_for(gpu: bool) -> Context:
    """Choose how children start: with a GPU afresh, else forked from a server that has imported torch once."""
    if gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_swarm.node.preload"])
    return context


class ChildProcess:
    """Runs `target(*arguments, pipe)` in a process of its own."""

    def __init__(self, context: Context, name: str, target: Callable[..., None], *arguments: object) -> None:
        self.process, self.pipe = _start(context, name, target, arguments)
        self._said = b""

    def exit_code(self) -> int | None:
        """Return None while the process runs. A child that outlives its fork server counts as killed once it ends."""
        code = self.process.exitcode
        if code != LOST:
            return code
        return None if self._holds_pipe() else -signal.SIGKILL

    def is_orphan(self) -> bool:
        """Tell whether the process runs although its fork server has died."""
        return self.process.exitcode == LOST and self.exit_code() is None

    def message(self) -> str:
        """Return the last message of the child."""
        self._holds_pipe()
        return self._said.decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code() is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def join(self, seconds: float) -> None:
        """Wait for the end of the process, at most `seconds`."""
        deadline = time.monotonic() + seconds
        self.process.join(seconds)
        while self.is_orphan() and (left := deadline - time.monotonic()) > 0:
            self.pipe.poll(left)

    def _holds_pipe(self) -> bool:
        """Read what is in the pipe; return False once the child has closed its end."""
        try:
            while self.pipe.poll():
                self._said = self.pipe.recv_bytes(LONGEST_MESSAGE)
        except (EOFError, OSError):
            return False
        return True


def _start(
    context: Context, name: str, target: Callable[..., None], arguments: tuple[object, ...]
) -> tuple[BaseProcess, Connection]:
    """Start a process; start the fork server again if it has died, also when it dies at this moment."""
    for tries in range(1, TRIES + 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), name=name)
        try:
            if isinstance(context, ForkServerContext):
                with _deaf_children():
                    forkserver.ensure_running()
                process.start()  # the server may import for seconds before it answers, and Ctrl-C is heard meanwhile
            else:
                with _deaf_children():
                    process.start()
        except (EOFError, OSError) as error:
            ours.close()  # ends the child if there is one nevertheless
            if tries == TRIES:
                raise UserError(f"No process can be started for {name}: {error or 'its server died'}.") from error
            time.sleep(PAUSE)
        else:
            return process, ours
        finally:
            theirs.close()
    raise AssertionError("unreachable")


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Block the terminal's signals in processes that are started meanwhile, until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)
    try:
        resource_tracker.ensure_running()  # which unblocks some, if it was not running
        signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent(pipe: Connection) -> threading.Event:
    """End this child with its parent, and leave the terminal's signals to the parent. SIGTERM sets the event."""
    stop = threading.Event()
    for number in FROM_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_TERMINAL)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    return stop


def _end_with_parent(pipe: Connection) -> None:
    """Wait for the other end of a pipe to close, and end this process."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
