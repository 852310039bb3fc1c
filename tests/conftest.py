"""What all tests share: two cores are plenty, and property tests give the same verdict on every run."""

import atexit
import os
import shutil
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

# Files that take longest begin first, so that no process is left with one of them at the end.
LONG = (
    "test_swarm.py", "test_cuda.py", "test_roles.py", "test_faults.py", "test_cli.py", "test_team.py", "test_scale.py", "test_page.py",
    "test_warmup.py", "test_disk.py", "test_peers.py", "test_benchmarks.py", "test_smollm2.py", "test_notebook.py",
    "test_fuzzed_api.py", "test_sandbox.py", "test_debate.py", "test_docs_page.py", "test_memory.py", "test_url_swarm.py",
    "test_api.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


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
