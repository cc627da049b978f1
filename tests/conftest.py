"""What holds for all tests, set before any library reads it."""

import os

# Nothing reaches for the network: a name that is on no disk fails at once, not after retries. Processes that talk to
# the stand-in for the Hub set it back (hub_stub.py).
os.environ["HF_HUB_OFFLINE"] = "1"
# Runs in this process are compared bit by bit with runs in others; sums depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from accelerate.state import AcceleratorState

# Files that are laid over a copy of the repository (test_toy_mechanism.py), and belong to no package here.
collect_ignore = ["toy"]


@pytest.fixture(scope="module", autouse=True)
def own_accelerator():
    """Let no file of tests inherit another's precision: accelerate keeps it for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
