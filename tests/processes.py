"""New processes for tests, from a server that has imported the libraries once."""

import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

_HEAVY = [
    *("finetune_csqa", "finetune_glue", "finetune_race"),
    *("pretrain_clm", "pretrain_mlm", "convert"),
    *("accelerate", "datasets", "luna_hf", "matplotlib.pyplot", "torch.distributed", "transformers.pipelines"),
]


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A running process that calls a module-level function; unlike a fork of pytest, it has no threads or state."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    process = context.Process(target=target, args=arguments)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server imports `_HEAVY` by these names
        process.start()
    return process


def exit_code(process: BaseProcess, seconds: float = 120) -> int | None:
    """The exit code of a process; one that hangs is killed."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def run_pair(target: Callable[..., None], *arguments: Any) -> None:
    """Call a function with rank 0 and rank 1, each in its own process, and check that both succeed."""
    pair = [started(target, rank, *arguments) for rank in range(2)]
    assert [exit_code(process) for process in pair] == [0, 0]
