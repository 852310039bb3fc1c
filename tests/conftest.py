"""What all tests share: two cores are plenty, and property tests give the same verdict on every run."""

import atexit
import os
import shutil
import signal
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SWARM_WEB", "false")  # tests of the dashboard ask for it
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rl-swarm-private-")  # nodes' private directories
if not os.path.exists("/dev/nvidiactl"):  # read when triton is imported, which transformers does on the way
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=100)
settings.load_profile("steady")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under `nohup`; what a test starts would inherit that
    signal.signal(signal.SIGHUP, lambda signum, frame: None)

# Tests of these files share nothing and start processes: each goes to whichever worker is free. All other files stay
# whole.
SPREAD = (
    "test_stopping.py",
    "test_shared_folder.py",
    "test_swarm.py",
    "test_mistakes.py",
    "test_cli.py",
    "test_url_swarm.py",
)
# What takes longest begins first, so that no worker is left with it at the end.
LONG = (
    *SPREAD, "test_cuda.py", "test_faults.py", "test_data_parallel.py", "test_scale.py",
    "test_page.py", "test_warmup.py",
    "test_disk.py", "test_peers.py", "test_benchmarks.py", "test_smollm2.py", "test_notebook.py", "test_fuzzed_api.py",
    "test_slow_clients.py", "test_sandbox.py", "test_debate.py", "test_docs_page.py", "test_memory.py", "test_api.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if item.path.name not in SPREAD:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


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
