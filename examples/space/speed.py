"""Time against the length of the text, measured here: bounded memory beside a BERT of the same size."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

from luna_hf import BoundedMemoryConfig
from luna_hf.scripting import UserError

LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
ROUNDS = 3
OURS, TWIN = "bounded memory", "BERT"
HEADER = ["tokens", f"{OURS}, ms", f"{TWIN}, ms", "times as fast"]
COLOURS = {OURS: "tab:orange", TWIN: "tab:blue"}


class Measured(NamedTuple):
    """One length: median time in seconds, by the name of the model."""

    length: int
    seconds: dict[str, float]


def measure(config: BoundedMemoryConfig, lengths: Sequence[int]) -> Iterator[Measured]:
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


def make_models(config: BoundedMemoryConfig, longest: int) -> dict[str, PreTrainedModel]:
    """An encoder of a config, and its twin: transformers' BERT with the same sizes."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = {name: getattr(config, name) for name in names}
    ours = type(config).from_dict({**config.to_dict(), "max_position_embeddings": longest})
    twin = BertConfig(**sizes, max_position_embeddings=longest)
    return {OURS: AutoModel.from_config(ours).eval(), TWIN: BertModel(twin, add_pooling_layer=False).eval()}


@torch.inference_mode()
def measure_length(models: dict[str, PreTrainedModel], length: int) -> Measured:
    """Measure models at one length; they take turns, and the median leaves out a slow first call."""
    ids = torch.randint(4, models[OURS].config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    calls = {name: lambda model=model: model(ids, torch.ones_like(ids)) for name, model in models.items()}
    with one_thread():
        rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return Measured(length, {name: statistics.median(turn[name] for turn in rounds) for name in calls})


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


def table(measured: Sequence[Measured]) -> list[list[str]]:
    """One row for each length: texts for the columns of `HEADER`."""
    return [
        [
            f"{length:,}",
            *(f"{1000 * times[name]:,.0f}" for name in (OURS, TWIN)),
            f"{times[TWIN] / times[OURS]:.2f}",
        ]
        for length, times in measured
    ]


def draw_speed(measured: Sequence[Measured]) -> Figure:
    """Time against length; linear axes, on which quadratic growth is a curve."""
    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    lengths = [row.length for row in measured]
    for name, colour in COLOURS.items():
        times = [1000 * row.seconds[name] for row in measured]
        axes.plot(lengths, times, label=name, color=colour, marker="o", linewidth=2)
    axes.set_title("Time to read one text", fontsize=12, fontweight="bold")
    axes.set(xlabel="length of the text in tokens", ylabel="milliseconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
