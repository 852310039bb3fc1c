"""Tells which tests start processes, by the names in their code, and forbids it to all others.

`./run_tests.sh --fast` leaves out the tests that are marked `processes`. The marker is set here, so a new test needs no
line for it. A test that starts a process out of sight fails and says so; then the class that starts it belongs into
`STARTERS`, or `@pytest.mark.processes` before the test.
"""

import inspect
import multiprocessing.util
import os
import platform
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

TESTS = os.path.dirname(os.path.dirname(__file__))
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
STARTERS = {  # modules, functions and classes that start a process
    "subprocess", "multiprocessing", "fork", "forkpty",
    "Coding", "DataParallelPolicy", "Debate", "KernelManager", "LockstepSwarm", "NotebookClient", "PeerEngine",
    "Reasoning", "Sandbox", "ScoringProcess", "SharedScorer", "attack_swarm", "burn_beside", "visible_gpus",
}  # fmt: skip
_current: pytest.Item | None = None
_started: list[str] = []
_process = os.getpid()


def starts_processes(item: pytest.Item) -> bool:
    """Look for a starter in a test and its fixtures, and in what they call in this folder."""
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 (not in pytest's types)
    seen: set[int] = set()
    return any(_starts(part, seen) for part in (item.obj, *(found[-1].func for found in fixtures)))


def _starts(part: Any, seen: set[int]) -> bool:
    part = inspect.unwrap(part) if callable(part) and not isinstance(part, type) else part
    if id(part) in seen:
        return False
    seen.add(id(part))
    if isinstance(part, type):
        return any(_starts(each, seen) for each in vars(part).values() if callable(each) or isinstance(each, property))
    part = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
    if not isinstance(part, FunctionType) or not part.__code__.co_filename.startswith(TESTS):
        return False
    names = set(_names(part.__code__))
    if names & STARTERS:
        return True
    found = [part.__globals__[name] for name in names if name in part.__globals__]
    helpers = [
        each for each in found if isinstance(each, ModuleType) and str(getattr(each, "__file__", "")).startswith(TESTS)
    ]
    found += [getattr(helper, name) for helper in helpers for name in names if hasattr(helper, name)]
    return any(_starts(each, seen) for each in found)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _forbid(event: str) -> None:
    if _current is not None and os.getpid() == _process:
        _started.append(event)
        raise RuntimeError(f"{_current.nodeid} starts a process ({event}), and is not marked `processes`")


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS:
        _forbid(event)


def install() -> None:
    """Watch this process: Python tells before it starts another, except in `multiprocessing`."""
    platform.processor()  # asks `uname`, and remembers the answer: libraries ask it too
    sys.addaudithook(_audit)
    spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def spawnv_passfds(*arguments: Any) -> int:
        _forbid("multiprocessing")
        return int(spawn(*arguments))

    multiprocessing.util.spawnv_passfds = spawnv_passfds  # type: ignore[attr-defined]


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _current
    _current = None if item.get_closest_marker("processes") else item
    _started.clear()
    yield
    _current = None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = (yield).get_result()  # type: ignore[misc]
    if _started and report.passed:  # the error was caught on the way
        report.outcome, report.longrepr = "failed", f"{item.nodeid} starts a process, and is not marked `processes`"
        _started.clear()
