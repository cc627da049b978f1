"""What the benchmarks share: statistics, clock, peak memory, a description of the machine, and result files."""

import ctypes
import gc
import json
import math
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

import luna_hf
from luna_hf import FAMILIES

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
RESULTS = Path(__file__).resolve().parent / "results"


# Statistics: pure functions.


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes of what the rounds measured, and the values themselves."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quartiles": [quartiles[0], quartiles[2]],
        "min": min(values),
        "max": max(values),
        "rounds": list(values),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round: both numbers of a ratio were measured within seconds of each other."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def win_length(speedups: dict[int, float]) -> float | None:
    """Length from which a model is the faster one, that is faster at every measured length beyond it too.

    Args:
        speedups: measured length to median ratio (peer's time over the model's time; above 1: the model is faster).

    Returns:
        The shortest measured length if it wins there already; otherwise where the ratio crosses 1, interpolated
        linearly in the logarithms of length and ratio. `None` if it loses at the longest.
    """
    lengths = sorted(speedups)
    losing = [index for index, length in enumerate(lengths) if speedups[length] <= 1]
    if not losing:
        return float(lengths[0])
    last = losing[-1]
    if last == len(lengths) - 1:
        return None
    below, above = lengths[last], lengths[last + 1]
    low, high = math.log(speedups[below]), math.log(speedups[above])
    return math.exp(math.log(below) + (math.log(above) - math.log(below)) * -low / (high - low))


def growth_exponent(seconds_per_row: dict[int, float]) -> float:
    """Least-squares slope of log time against log length: 1 is linear, 2 quadratic.

    Raises:
        ValueError: Fewer than two lengths.
    """
    if len(seconds_per_row) < 2:
        raise ValueError(f"A growth exponent needs at least two lengths, but there are {len(seconds_per_row)}.")
    x = [math.log(length) for length in seconds_per_row]
    y = [math.log(seconds) for seconds in seconds_per_row.values()]
    return statistics.linear_regression(x, y).slope


# Models of this package.


def slots_of(family: str, number: int) -> dict[str, int]:
    """The field that gives a family's models so many slots; nothing where a family has none."""
    field = FAMILIES[family].config.slots_field
    return {field: number} if field else {}


# Clock and memory.


def synchronize(device: str) -> None:
    """Wait for an accelerator, so that the clock sees the work and not its launch."""
    if device != "cpu":
        torch.accelerator.synchronize()


def seconds(action: Callable[[], Any], device: str) -> float:
    """Wall-clock time of one call."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in their order, beginning with another one each round."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def steady_allocator() -> None:
    """Give every block of 1 MiB and more back when it is freed; for the process that measures memory.

    By default glibc moves that limit with the program's history, and the same forward takes 60 or 105 MiB.
    """
    _set_allocator(_M_MMAP_THRESHOLD, 2**20)


def keeping_allocator() -> None:
    """Keep what is freed for the next call; for a process that measures time where it must not depend on the allocator.

    By default glibc gives blocks of more than 32 MiB back, and what takes them pays for fresh pages in every call.
    """
    _set_allocator(_M_MMAP_THRESHOLD, 2**30)
    _set_allocator(_M_TRIM_THRESHOLD, 2**31 - 1)


def _set_allocator(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(option, value)


def extra_memory(action: Callable[[], Any], device: str) -> int:
    """Bytes that one call needs at its peak beyond what the process (or the accelerator) held before it.

    Only meaningful in a process of its own: what an earlier call freed may still be resident.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    _reset_peak_resident()
    before = _resident()
    action()
    # Small differences drown in the kernel's counters, which are exact to some hundred KiB only.
    return max(0, _peak_resident() - before)


def _reset_peak_resident() -> None:
    # Building a model may take more than its forward. Linux forgets the peak on request; elsewhere it stays a bound.
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _resident() -> int:
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return _peak_resident()


def _peak_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Result of a module-level function called in a new process, which has imported the libraries and nothing else.

    A fork server and not a plain fork: children must not inherit this process's models, nor its CUDA context. And not
    a started interpreter each: importing takes longer than most measurements, and the peak counter survives `exec`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(
        [
            "luna_hf",
            "transformers.models.roberta.modeling_roberta",
            "transformers.models.modernbert.modeling_modernbert",
        ]
    )
    with context.Pool(1) as pool:
        return pool.apply(function, args)


# Description of a run.


def cpu_name() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """Processor, what PyTorch uses of it, threads, and the accelerator if one is used."""
    described: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if device != "cpu":
        described["accelerator"] = torch.cuda.get_device_name()
    return described


def versions() -> dict[str, str]:
    """Versions of everything that the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "luna_hf": luna_hf.__version__,
    }


def header(script: str, arguments: Sequence[str], device: str) -> dict[str, Any]:
    """What every result file starts with: command, date, machine, versions."""
    return {
        "command": shlex.join(["python", "/".join(Path(script).resolve().parts[-2:]), *arguments]),
        "date": date.today().isoformat(),
        "machine": machine(device),
        "versions": versions(),
    }


def result_path(folder: Path, subject: str, device: str, dtype: str) -> Path:
    """`<subject>-<device>-<dtype>-torch<version>.json` in the folder, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
    version = torch.__version__.split("+")[0]
    return folder / f"{subject}-{name}-{dtype}-torch{version}.json"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """One file, readable in a diff."""
    path.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    # Six digits are more than a clock deserves, and fewer make the files change less.
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def progress(message: str) -> None:
    """A line for whoever waits; never part of the output."""
    print(message, file=sys.stderr, flush=True)
