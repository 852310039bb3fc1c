"""What all tests share: two cores are plenty, and property tests give the same verdict on every run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=100)
settings.load_profile("steady")


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
