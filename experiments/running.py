"""What the studies share: they run the training commands as a user does, and read what these leave."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from luna_hf.scripting import UserError, describe_run, run_script
from luna_hf.scripting import read_json as read_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
# Results are plotted as those of the benchmarks; `mini.py` trains a tokenizer.
sys.path.extend(str(ROOT / folder) for folder in ("benchmarks", "training"))
KEPT = "finished runs are kept; the same command continues"


def run_alone(
    script: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    study: Callable[[argparse.Namespace], None],
    arguments: Sequence[str],
    stopped: str = "nothing was written",
) -> int:
    """Run a study that needs no training command, on one CPU thread, and return its exit status."""

    def run() -> None:
        options = parse(arguments)
        torch.set_num_threads(1)
        options.header = describe_run(script, arguments, "cpu")
        study(options)

    return run_script(run, stopped=stopped)


def launch(script: str, words: Sequence[str], threads: int) -> None:
    """Run a training command and wait for it.

    Raises:
        UserError: It failed, and has printed the reason.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(ROOT / script), *words]
    # A second signal would stop it without saving, so Ctrl-C must not reach it directly.
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if child.returncode:
        raise UserError(f"{script} failed with status {child.returncode}.")
