"""Settings for all tests, made before any library reads them."""

import os

# No test uses the network: an unknown name fails at once instead of after retries. Processes that talk to the stand-in
# for the Hub reset it (hub_stub.py).
os.environ["HF_HUB_OFFLINE"] = "1"
# Sums depend on the number of threads, and some tests compare processes bit by bit.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from accelerate.state import AcceleratorState

# Files for a copy of the repository (test_toy_mechanism.py), not for this one.
collect_ignore = ["toy"]


@pytest.fixture(scope="module", autouse=True)
def own_accelerator():
    """Reset accelerate's state, which holds the precision of the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
