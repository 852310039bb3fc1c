"""What all tests share: two cores are plenty, and property tests give the same verdict on every run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=100)
settings.load_profile("steady")
