"""What the benchmarks share: options, statistics, clock, peak memory and the writing of results."""

import argparse
import ctypes
import gc
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import floors
import torch

from luna_hf import FAMILIES
from luna_hf.scripting import Parser, UserError, progress, reason, write_text

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
RESULTS = Path(__file__).resolve().parent / "results"


# ---- command line and results ----


def make_parser(description: str, **defaults: Any) -> Parser:
    """The options of a speed benchmark: its own, by name and default, and those that all have."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**defaults, "device": "cpu", "threads": 1}.items():
        many = isinstance(default, list)
        shown = " ".join(map(str, default)) if many else default
        kind = {"type": str if isinstance(default, str) else positive, "nargs": "+" if many else None}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"default: {shown}", **kind)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result and its plot")
    parser.add_argument("--check-floors", action="store_true", help="exit with status 1 if a floor is missed")
    return parser


def add_dtype(parser: Parser) -> None:
    """Let a benchmark choose the dtype of its models."""
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")


def positive(text: str) -> int:
    """A whole number from 1, as an argument.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def require_device(device: str) -> None:
    """Find a missing device before minutes of measurements.

    Raises:
        UserError: This machine lacks the device.
    """
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"--device {device} cannot be used ({reason(error)}).") from error


def publish(
    options: argparse.Namespace,
    subject: str,
    result: dict[str, Any],
    report: Callable[[Any], str],
    plot: Callable[[Any, Path], None],
    markdown: bool = True,
) -> int:
    """Write a result, with a plot if there are several lengths, and print its report and its floors.

    `report` and `plot` get what the file holds; with `markdown` the report is kept beside it.

    Returns:
        The exit status.
    """
    dtype = result["settings"]["dtype"]
    path, result = write_result(options.output, subject, options.device, dtype, result)
    if markdown:
        path.with_suffix(".md").write_text(report(result) + "\n", encoding="utf-8")
    print(report(result), floors.table(result["floors"]), sep="\n\n")
    if len(result["lengths"]) > 1:
        plot(result, path.with_suffix(".png"))
    return int(options.check_floors and not all(check["holds"] for check in result["floors"]))


def write_result(folder: Path, subject: str, device: str, dtype: str, result: dict[str, Any]) -> tuple[Path, Any]:
    """Write `<subject>-<device>-<dtype>-torch<version>.json`, with floats rounded to six digits.

    Returns:
        The path, and the content as a reader of the file sees it: tables and plots must show what the file holds.
    """
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
    path = folder / f"{subject}-{name}-{dtype}-torch{torch.__version__.split('+')[0]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(_rounded(result), indent=1) + "\n")
    return path, json.loads(path.read_text(encoding="utf-8"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


# ---- statistics: pure functions ----


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes of the rounds, and the rounds themselves."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quartiles": [quartiles[0], quartiles[2]],
        "min": min(values),
        "max": max(values),
        "rounds": list(values),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios round by round: both numbers were measured within seconds of each other."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def compare(above: Any, below: Any) -> dict[str, Any]:
    """Summary of the ratios of two series of rounds; of two equal dicts, the summaries below each key."""
    if isinstance(above, dict):
        return {name: compare(above[name], below[name]) for name in above}
    return summary(ratios(above, below))


def growth(times: dict[int, Any], lengths: tuple[int, int]) -> dict[str, Any] | None:
    """Time at the longer of two lengths relative to the shorter, if both were measured."""
    short, long = lengths
    return compare(times[long], times[short]) if short in times and long in times else None


def win_length(speedups: dict[int, float]) -> float | None:
    """Length from which a model is faster, at that length and at every longer one measured.

    Args:
        speedups: measured length to median ratio (peer's time over the model's time; above 1: the model is faster).

    Returns:
        The shortest measured length if the model wins there already; otherwise the point where the ratio crosses 1,
        interpolated linearly in the logarithms of length and ratio. `None` if it loses at the longest.
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
    """Least-squares slope of log time against log length, two at least: 1 is linear, 2 quadratic."""
    x = [math.log(length) for length in seconds_per_row]
    y = [math.log(seconds) for seconds in seconds_per_row.values()]
    return statistics.linear_regression(x, y).slope


# ---- models of this package ----


def slots_of(family: str, number: int) -> dict[str, int]:
    """The config field for a family's number of slots; empty for a family without slots."""
    field = FAMILIES[family].config.slots_field
    return {field: number} if field else {}


# ---- clock and memory ----


def synchronize(device: str) -> None:
    """Wait for an accelerator: the clock must see the work, not its launch."""
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
    """The names in their order, starting with a different one each round."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def steady_allocator() -> None:
    """Return freed blocks of 1 MiB and more to the system; for a process that measures memory.

    By default glibc moves that limit with the program's history, and the same forward takes 60 or 105 MiB.
    """
    _set_allocator(_M_MMAP_THRESHOLD, 2**20)


def keeping_allocator() -> None:
    """Keep freed memory for the next call; for a process that times operators.

    By default glibc returns blocks of more than 32 MiB, and large operators pay for fresh pages in every call.
    """
    _set_allocator(_M_MMAP_THRESHOLD, 2**30)
    _set_allocator(_M_TRIM_THRESHOLD, 2**31 - 1)


def _set_allocator(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(option, value)


def extra_memory(action: Callable[[], Any], device: str) -> int:
    """Peak bytes of one call beyond what the process (or the accelerator) held before it.

    Only meaningful in a separate process: memory freed by an earlier call may still be resident.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    # Building a model may take more than its forward. Linux forgets the peak on request; elsewhere it stays a bound.
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident()
    action()
    # The kernel's counters are exact to some hundred KiB, which hides small differences.
    return max(0, _peak_resident() - before)


def _resident() -> int:
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return _peak_resident()


def _peak_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_memory(
    peak: Callable[[str, int, argparse.Namespace], int], names: dict[int, Sequence[str]], options: argparse.Namespace
) -> dict[int, dict[str, int]]:
    """Peak bytes by length and name, each measured by `peak(name, length, options)`.

    On a CPU each runs in a separate process. An accelerator's allocator counts exactly, whatever ran before.
    """

    def measure(name: str, length: int) -> int:
        if options.device != "cpu":
            return peak(name, length, options)
        return in_own_process(_peak, peak, name, length, options)

    memory: dict[int, dict[str, int]] = {}
    for length, present in names.items():
        progress(f"memory: length {length}")
        memory[length] = {name: measure(name, length) for name in present}
    return memory


def _peak(measure: Callable[..., int], name: str, length: int, options: argparse.Namespace) -> int:
    steady_allocator()
    torch.set_num_threads(options.threads)
    return measure(name, length, options)


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Result of a module-level function in a new process that has only imported the libraries.

    The process comes from a fork server: a plain fork would inherit this process's models and CUDA context, and a new
    interpreter takes longer to import than most measurements take, while its peak counter survives `exec`.
    """
    context = get_context("forkserver")
    peers = ("roberta", "modernbert")
    context.set_forkserver_preload(["luna_hf", *(f"transformers.models.{peer}.modeling_{peer}" for peer in peers)])
    with context.Pool(1) as pool:
        return pool.apply(function, args)
