"""What the benchmarks share: their command, the measured rounds, and peak memory.

A benchmark says what it measures, as actions by length and model. This module times them in turn and writes a result
with machine and versions; `summaries.py` describes its form.
"""

import argparse
import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import floors
import torch
from plots import plot

from luna_hf import FAMILIES
from luna_hf.scripting import Parser, UserError, describe_run, progress, reason, run_script, write_text

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NO_SETTINGS = ("output", "data", "check_floors")
RESULTS = Path(__file__).resolve().parent / "results"
Result = dict[str, Any]


# ---- command line and results ----


@dataclass(frozen=True)
class Benchmark:
    """A command that times models beside peers.

    Args:
        script: its `__file__`.
        protocol: how it measures, for the result.
        parse: reads the command line.
        measure: returns what the result holds besides header, settings and floors.
        subject: first part of the file name.
        markdown: the printed table.
    """

    script: str
    protocol: str
    parse: Callable[[Sequence[str]], argparse.Namespace]
    measure: Callable[[argparse.Namespace], Result]
    subject: Callable[[argparse.Namespace], str]
    markdown: Callable[[Result], str]

    def main(self, arguments: Sequence[str]) -> int:
        """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

        def script() -> int:
            options = self.parse(arguments)
            require_device(options.device)
            torch.set_num_threads(options.threads)
            header = describe_run(self.script, arguments, options.device)
            settings = {name: value for name, value in vars(options).items() if name not in _NO_SETTINGS}
            result = {**header, "protocol": self.protocol, "settings": settings, **self.measure(options)}
            result["floors"] = floors.check(Path(self.script).stem, result)
            path, result = write_result(options.output, self.subject(options), options.device, options.dtype, result)
            print(self.markdown(result), floors.table(result["floors"]), sep="\n\n")
            if len({entry.get("length") for entry in result["lengths"]}) > 1:
                plot(result, path.with_suffix(".png"))
            return int(options.check_floors and not all(check["holds"] for check in result["floors"]))

        return run_script(script)


def make_parser(description: str, **defaults: Any) -> Parser:
    """The options of a speed benchmark: its own, by name and default, and those that all have."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**defaults, "device": "cpu", "threads": 1}.items():
        many = isinstance(default, list)
        shown = " ".join(map(str, default)) if many else default
        kind = {"type": str if isinstance(default, str) else positive, "nargs": "+" if many else None}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"default: {shown}", **kind)
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result and its plot")
    parser.add_argument("--check-floors", action="store_true", help="exit with status 1 if a floor is missed")
    return parser


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


def write_result(folder: Path, subject: str, device: str, dtype: str, result: dict[str, Any]) -> tuple[Path, Any]:
    """Write `<subject>-<device>-<dtype>-torch<version>.json`, with floats rounded to six digits.

    Returns:
        The path, and the content as a reader of the file sees it: tables and plots must show what the file holds.
    """
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
    path = folder / f"{subject}-{name}-{dtype}-torch{torch.__version__.split('+')[0]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rounded(result), indent=1) + "\n")
    return path, json.loads(path.read_text(encoding="utf-8"))


def rounded(value: Any) -> Any:
    """A result with floats of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def slots_of(family: str, number: int) -> dict[str, int]:
    """The config field for a family's number of slots; empty for a family without slots."""
    field = FAMILIES[family].config.slots_field
    return {field: number} if field else {}


# ---- clock and memory ----


def synchronize(device: str) -> None:
    """Wait for an accelerator: the clock must see the work, not its launch."""
    if device != "cpu":
        torch.accelerator.synchronize()


def seconds(action: Callable[[], Any], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call by a clock, by default that on the wall."""
    synchronize(device)
    start = clock()
    action()
    synchronize(device)
    return clock() - start


def rotated(names: Sequence[Any], turn: int) -> list[Any]:
    """The names in their order, starting with a different one each round."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def interleave(
    actions: dict[Hashable, Callable[[], Any]],
    rounds: int,
    device: str,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of every action of every round, by a clock; each round starts with another action.

    Both numbers of a ratio are then measured near each other, so that a machine that slows down for a minute slows all.
    """
    times: dict[Any, list[float]] = {key: [] for key in actions}
    for turn in range(-1 if warm_up else 0, rounds):
        for key in rotated(list(actions), max(turn, 0)):
            taken = seconds(actions[key], device, clock)
            if turn >= 0:
                times[key].append(taken)
        progress(f"round {turn + 1} of {rounds}" if turn >= 0 else "warmed up")
    return times


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
