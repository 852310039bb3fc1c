"""Retries what a synced folder, a server or a network refuses for a moment."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rl_swarm.protocol.wire import Incomplete
from rl_swarm.storage.files import LASTING, Refused

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds between tries at a document that cannot be read or written
TRIES = 5  # at a document that this process cannot go on without
GIVE_UP_AFTER = 30.0  # seconds, at a peer's document that is there but does not become whole


def poll_pauses(longest: float) -> Iterator[float]:
    """Yield the pauses between looks at something that is expected any moment: short at first."""
    pause = longest / 4
    while True:
        yield pause
        pause = min(2 * pause, longest)


def retry(act: Callable[[], T], stop: threading.Event, seconds: float = 0.0) -> T:
    """Repeat an action that fails, with growing pauses, `TRIES` times and for at least so many seconds.

    `FileNotFoundError` is an answer and is raised at once.
    """
    pause, deadline = FIRST_PAUSE, time.monotonic() + seconds
    for tries in itertools.count(1):
        try:
            return act()
        except FileNotFoundError:
            raise
        except (OSError, Incomplete) as error:
            if tries >= TRIES and (is_permanent(error) or time.monotonic() >= deadline):
                raise
            if tries == TRIES:
                log.warning("trying again for %.0f s: %s", deadline - time.monotonic(), error)
        if stop.wait(pause):
            break
        pause = min(2 * pause, FIRST_PAUSE * 2**TRIES)
    return act()


def is_permanent(error: Exception) -> bool:
    """Tell an error that a person has to mend from one that may pass."""
    return isinstance(error, (FileNotFoundError, Refused)) or getattr(error, "errno", None) in LASTING
