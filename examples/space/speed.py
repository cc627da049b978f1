"""Time and memory against the length of the text, measured on this machine: Luna and a RoBERTa of the same size."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, RobertaConfig, RobertaModel

from luna_hf import LunaConfig, LunaModel
from luna_hf.scripting import UserError

LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
ROUNDS = 3
LUNA, TWIN = "Luna", "RoBERTa"
HEADER = ["tokens", "Luna, ms", "RoBERTa, ms", "Luna is x times as fast", "Luna, MiB", "RoBERTa, MiB"]
COLOURS = {LUNA: "tab:orange", TWIN: "tab:blue"}


class Measured(NamedTuple):
    """One length: median time in seconds and peak memory in bytes, by the name of the model."""

    length: int
    seconds: dict[str, float]
    memory: dict[str, int]


def measure(config: LunaConfig, lengths: Sequence[int]) -> Iterator[Measured]:
    """Measure both models at each length, the shortest first; one text, one thread.

    The models are encoders of the config's size with random weights, made for the longest length, since neither
    training nor the number of positions changes the time.

    Raises:
        UserError: No length is given.
    """
    if not lengths:
        raise UserError("No length is chosen. Choose at least one.")
    models = make_models(config, max(lengths))
    for length in sorted(lengths):
        yield measure_length(models, length)


def make_models(config: LunaConfig, longest: int) -> dict[str, PreTrainedModel]:
    """An encoder of a Luna's config, and its twin: transformers' RoBERTa with the same sizes."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = {name: getattr(config, name) for name in names}
    luna = LunaConfig.from_dict({**config.to_dict(), "max_position_embeddings": longest})
    # RoBERTa counts positions from the id after the padding token's.
    roberta = RobertaConfig(**sizes, max_position_embeddings=longest + 2, type_vocab_size=1)
    return {LUNA: LunaModel(luna).eval(), TWIN: RobertaModel(roberta, add_pooling_layer=False).eval()}


@torch.inference_mode()
def measure_length(models: dict[str, PreTrainedModel], length: int) -> Measured:
    """Measure models at one length: after a first call for the memory, they take turns."""
    ids = torch.randint(4, models[LUNA].config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    calls = {name: lambda model=model: model(ids, torch.ones_like(ids)) for name, model in models.items()}
    with one_thread():
        memory = {name: peak_bytes(call) for name, call in calls.items()}
        rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return Measured(length, {name: statistics.median(turn[name] for turn in rounds) for name in calls}, memory)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use only the calling thread, whose time `seconds` takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(call: Callable[[], object]) -> float:
    """Processor time of one call by this thread: other work on the machine does not count, as it would by the clock."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors take at once during a call, beyond those before it.

    PyTorch's profiler counts every tensor exactly, which the size of the process would not: it keeps freed memory.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def table(measured: Sequence[Measured]) -> list[list[str]]:
    """One row for each length: texts for the columns of `HEADER`."""
    return [
        [
            f"{length:,}",
            *(f"{1000 * times[name]:,.0f}" for name in (LUNA, TWIN)),
            f"{times[TWIN] / times[LUNA]:.2f}",
            *(f"{memory[name] / 2**20:,.1f}" for name in (LUNA, TWIN)),
        ]
        for length, times, memory in measured
    ]


def draw_speed(measured: Sequence[Measured]) -> Figure:
    """Time and memory against length; linear axes, on which quadratic growth is a curve."""
    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    lengths = [row.length for row in measured]
    for name, colour in COLOURS.items():
        style = {"label": name, "color": colour, "marker": "o", "linewidth": 2}
        time_axes.plot(lengths, [1000 * row.seconds[name] for row in measured], **style)
        memory_axes.plot(lengths, [row.memory[name] / 2**20 for row in measured], **style)
    titles = {time_axes: ("Time to read one text", "milliseconds"), memory_axes: ("Memory to read it", "MiB")}
    for axes, (title, unit) in titles.items():
        axes.set(xlabel="length of the text in tokens", ylabel=unit)
        axes.set_title(title, fontsize=12, fontweight="bold")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
