"""What all tests share: two cores are plenty, and property tests give the same verdict on every run."""

import atexit
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SWARM_WEB", "false")  # tests of the dashboard ask for it
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rl-swarm-private-")  # nodes' private directories
if not os.path.exists("/dev/nvidiactl"):  # read when triton is imported, which transformers does on the way
    os.environ.setdefault("TRITON_INTERPRET", "1")

import process_guard
import pytest
from hypothesis import settings

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=100)
settings.load_profile("steady")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under `nohup`; what a test starts would inherit that
    signal.signal(signal.SIGHUP, lambda signum, frame: None)

# Tests of these files share nothing and take long: each goes to whichever worker is free. All other files stay whole.
SPREAD = (
    "test_shared_folder.py", "test_stopping.py", "test_swarm.py", "test_peers.py", "test_url_swarm.py",
    "test_mistakes.py", "test_cli.py",
)  # fmt: skip
# What takes longest begins first, so that no worker is left with it at the end.
LONG = (
    "test_fuzz.py", "test_page.py", "test_tables.py", "test_notebook.py", "test_lockstep.py", "test_cuda.py", *SPREAD,
    "test_data_parallel.py", "test_sandbox.py", "test_validate.py", "test_debate.py", "test_node.py",
    "test_slow_clients.py", "test_exchange_contract.py", "test_warmup.py", "test_attacks.py", "test_peer_to_peer.py",
    "test_hostile_requests.py", "test_docs_page.py", "test_fuzzed_api.py", "test_api.py", "test_roles.py",
    "test_faults.py", "test_scale.py", "test_disk.py", "test_benchmarks.py", "test_smollm2.py", "test_memory.py",
)  # fmt: skip
# Where CI is set, a test is left out for these reasons alone. They say what a machine is, not what is missing on it.
LEFT_OUT = (
    "all of 127.0.0.0/8 is this machine on Linux",
    "an ordinary user cannot run this Python",
    "only Linux has mount namespaces",
    "only root can",
    "reads /proc",
    "counts open files in /proc",
    "open files are counted in /proc",
    "the kernel's protections are Linux's",
    "the tests run as an ordinary user already",
    "this kernel has no openat2",
    "there is a driver",
    "with a GPU the kernels are compiled",
)
# Packages that are made for Linux on x86-64 alone.
LEFT_OUT_ELSEWHERE = ("hivemind is not installed", "could not import 'hivemind'", "needs Triton", "no monty here",
                      "could not import 'pynvml'", "no header that lists them")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    process_guard.install()
    config.pluginmanager.register(process_guard)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        """Hands out whole files, and those in `SPREAD` test by test."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if os.path.basename(file) in SPREAD else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if item.get_closest_marker("gpu") or process_guard.starts_processes(item):  # Triton compiles in processes
            item.add_marker("processes")


def may_be_left_out(reason: str) -> bool:
    elsewhere = (sys.platform, platform.machine()) != ("linux", "x86_64")
    return any(known in reason for known in (*LEFT_OUT, *(LEFT_OUT_ELSEWHERE if elsewhere else ())))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()  # type: ignore[misc]
    if "CI" in os.environ and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not item.get_closest_marker("gpu") and not may_be_left_out(reason):
            report.outcome, report.longrepr = "failed", f"left out where CI is set: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = (yield).get_result()  # type: ignore[misc]
    if "CI" in os.environ and report.skipped and not may_be_left_out(str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"left out where CI is set: {report.longrepr}"


@pytest.fixture(scope="session")
def s3():
    """An S3 server with a bucket, and the environment of a process that uses it."""
    from stores import BUCKET, S3

    server = S3()
    server.make_bucket(BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        yield server
    server.stop()
