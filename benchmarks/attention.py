"""Attention alone: linear attention, its re-weightings and LAVO against softmax attention, in training and inference.

    python benchmarks/attention.py
    python benchmarks/attention.py --heads 2 --size 32 --rows 8

The contenders are the attentions of the encoders after their projections. `eager` computes the softmax step by step and
stores its maps, like the softmax attention of the papers; `sdpa` is PyTorch's fused one. See docs/speed.md.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import measuring
import torch
from plots import Panel, machine_name, plot_panels
from torch import Tensor, nn
from torch.nn import functional as F

from luna_hf import LavoConfig, LeapformerConfig
from luna_hf.families.lavo.attention import LavoAttention, mean_of_parts
from luna_hf.families.leapformer.attention import LeapformerAttention
from luna_hf.ops.attention import softmax_attention
from luna_hf.ops.context import make_context
from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "Random normal queries, keys and values in the layout of the projections; no padding, no dropout, random "
    "parameters. training: forward, and backward to all inputs; inference: forward without gradients. Wall clock of "
    "one call; every round times every contender at every length, in an order that rotates from round to round; ratios "
    "are taken within a round, medians over rounds; the first round warms up. The process keeps freed memory for the "
    "next call. LAVO's window has as many tokens as it has slots."
)
TRAINING, INFERENCE = "training", "inference"
MODES = (TRAINING, INFERENCE)
EAGER, SDPA = "eager", "sdpa"
PEERS = (EAGER, SDPA)
REWEIGHTINGS = {"linear": "none", "cosformer": "cosine", "leapformer": "learned"}
OWN = (*REWEIGHTINGS, "lavo")
# Agostinelli et al. 2024, table 2: throughput in training at 4K tokens over softmax attention's, of whole models with 2
# layers of width 64, on a GPU.
PAPER = {"linear": 9.3, "cosformer": 8.0, "leapformer": 7.8}
SETTINGS = ("heads", "size", "slots", "rows", "threads", "device", "rounds")

Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value: (b, h, n, c)
Times = dict[int, dict[str, dict[str, list[float]]]]  # length, contender, mode: seconds of every round


@cache
def make_module(name: str, heads: int, size: int, slots: int) -> nn.Module:
    """The encoder attention of a contender, with random parameters."""
    shape = {"hidden_size": heads * size, "num_attention_heads": heads, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    if name in REWEIGHTINGS:
        return LeapformerAttention(LeapformerConfig(**shape, reweighting=REWEIGHTINGS[name]))
    config = LavoConfig(**shape, num_bases=slots, local_window=slots, attn_implementation="sdpa")
    module = LavoAttention(config)
    module.initialise(config)
    return module


def attend(name: str, inputs: Inputs, slots: int, training: bool) -> Tensor:
    """Outputs of a contender, (b, n, h, c)."""
    query, key, value = inputs
    heads, length, size = query.shape[1:]
    if name == EAGER:
        return softmax_attention(query, key, value, scaling=size**-0.5)[0].transpose(1, 2)
    if name == SDPA:
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    module = make_module(name, heads, size, slots).to(query).train(training)
    context = make_context(None, length, query.device, window=slots)
    if name in REWEIGHTINGS:
        return module.read_tokens(query, module.write_tokens(key, value, context), context)
    return mean_of_parts(module.attend(query, key, value, context))[0].unflatten(-1, (heads, size))


def make_inputs(length: int, options: argparse.Namespace) -> Inputs:
    """Queries, keys and values, tokens before heads in memory as projections leave them."""
    generator = torch.Generator().manual_seed(length)
    shape = (options.rows, length, options.heads, options.size)
    drawn = (torch.randn(shape, generator=generator).to(options.device) for _ in range(3))
    query, key, value = (states.transpose(1, 2) for states in drawn)
    return query, key, value


def make_action(name: str, length: int, mode: str, options: argparse.Namespace) -> Callable[[], None]:
    """The timed call."""
    inputs = make_inputs(length, options)
    if mode == INFERENCE:

        @torch.no_grad()
        def infer() -> None:
            attend(name, inputs, options.slots, training=False)

        return infer
    for states in inputs:
        states.requires_grad_()
    gradient = torch.ones(options.rows, length, options.heads, options.size, device=options.device)

    def train() -> None:
        torch.autograd.grad(attend(name, inputs, options.slots, training=True), inputs, gradient)

    return train


def measure_time(options: argparse.Namespace) -> Times:
    """Seconds of every round."""
    names = [*OWN, *PEERS]
    times: Times = {n: {name: {mode: [] for mode in MODES} for name in names} for n in options.lengths}
    for turn in range(-1, options.rounds):  # the first warms up
        for length, taken in times.items():
            for name in measuring.rotated(names, turn):
                for mode in MODES:
                    seconds = measuring.seconds(make_action(name, length, mode, options), options.device)
                    if turn >= 0:
                        taken[name][mode].append(seconds)
        progress(f"round {turn + 1} of {options.rounds}")
    return times


def describe_length(length: int, times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    contenders: dict[str, Any] = {}
    for name, modes in times.items():
        contenders[name] = {mode: {"seconds": measuring.summary(taken)} for mode, taken in modes.items()}
        for mode in MODES if name in OWN else ():
            rivals = {peer: measuring.compare(times[peer][mode], modes[mode]) for peer in PEERS}
            contenders[name][mode]["speed_over"] = rivals
            # Of the re-weighting: twice the features, and how their proportions are found.
            contenders[name][mode]["time_over_linear"] = measuring.compare(modes[mode], times["linear"][mode])
    return {"length": length, "contenders": contenders}


def markdown(result: dict[str, Any]) -> str:
    """A row for every length and contender: milliseconds, speed over the peers, time over linear attention."""
    rows = []
    for row in result["lengths"]:
        for name, modes in row["contenders"].items():
            cells = [f"{row['length']:,}", name, f"{PAPER[name]}" if name in PAPER else "-"]
            for mode in MODES:
                measured = modes[mode]
                cells.append(f"{1e3 * measured['seconds']['median']:,.1f}")
                over = [measured.get("speed_over", {}).get(peer) for peer in PEERS] + [measured.get("time_over_linear")]
                cells += [f"{ratio['median']:.2f}" if ratio else "-" for ratio in over]
            rows.append(cells)
    titles = ("ms", *(f"over {peer}" for peer in PEERS), "time / linear")
    header = ["length", "contender", "over softmax, paper", *(f"{mode}, {title}" for mode in MODES for title in titles)]
    return markdown_table(header, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time per token against length."""
    panels = []
    for mode in MODES:
        curves: dict[str, dict[int, float]] = {}
        for row in result["lengths"]:
            for name, modes in row["contenders"].items():
                seconds = modes[mode]["seconds"]["median"] / result["settings"]["rows"]
                curves.setdefault(name, {})[row["length"]] = 1e6 * seconds / row["length"]
        panels.append(Panel(f"{mode}, microseconds per token", curves))
    settings = result["settings"]
    title = f"attention alone, {settings['heads']} heads of {settings['size']}, {machine_name(result['machine'])}"
    plot_panels(panels, title, path, peers=PEERS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"heads": 12, "size": 64, "slots": 64, "rows": 1, "rounds": 5}
    options = measuring.make_parser(__doc__, lengths=[1024, 4096], **sizes).parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(options.threads)
    measuring.keeping_allocator()
    times = measure_time(options)
    return {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {**{name: getattr(options, name) for name in SETTINGS}, "dtype": "float32"},
        "peers": list(PEERS),
        "paper": PAPER,
        "lengths": [describe_length(length, taken) for length, taken in times.items()],
        "floors": [],
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        subject = f"attention-{options.heads}-heads-of-{options.size}"
        return measuring.publish(options, subject, run(options, arguments), markdown, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
