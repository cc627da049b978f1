"""Settings for all tests, made before any library reads them."""

import gc
import json
import os
from pathlib import Path

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


@pytest.fixture(autouse=True)
def own_environment():
    """Restore the variables that transformers' training arguments set for the whole process."""
    names = ("ACCELERATE_", "FSDP_")
    before = {name: value for name, value in os.environ.items() if name.startswith(names)}
    yield
    for name in [name for name in os.environ if name.startswith(names)]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of texts to pretrain on; see `tiny_training.py`."""
    from tiny_training import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def luna(tmp_path_factory):
    """A checkpoint to finetune; see `tiny_finetuning.py`."""
    from tiny_finetuning import checkpoint

    return checkpoint(tmp_path_factory.mktemp("models") / "luna")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory):
    """Checkpoints of every kind in a folder like a clone; see `tiny_zoo.py`."""
    from tiny_zoo import make_zoo

    root = tmp_path_factory.mktemp("zoo")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(root)
        made = make_zoo(root)
    return made


def pytest_collection_finish():
    """Keep what is imported and collected out of later garbage collections; accelerate starts several in each run."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--write-faults", action="store_true", help="write the outcomes of test_faults.py to faults.json")


def pytest_terminal_summary(terminalreporter, config):
    """Print what became of the faulty runs of test_faults.py."""
    reports = [report for word in ("passed", "failed") for report in terminalreporter.getreports(word)]
    kinds = [content for report in reports for name, content in report.user_properties if name == "faults"]
    if not kinds:
        return
    from faults import tables

    from luna_hf.scripting import describe_run, write_json

    terminalreporter.write_line("\n" + tables(kinds))
    if config.getoption("write_faults"):
        path = Path(__file__).with_name("faults.json")
        before = json.loads(path.read_text(encoding="utf-8"))["kinds"] if path.exists() else []
        # A run of some commands or kinds replaces their outcomes only.
        merged = {(row["command"], row["kind"]): row for row in [*before, *kinds]}
        head = {**describe_run("", [], "cpu"), "command": "make test-faults"}
        write_json(path, {**head, "kinds": list(merged.values())})
