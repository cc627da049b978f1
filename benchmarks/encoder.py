"""Speed and memory of this package's encoders, against transformers' RobertaModel and ModernBertModel.

    python benchmarks/encoder.py --check-floors
    python benchmarks/encoder.py --models roberta modernbert luna-tied --layers base --lengths 512 2048 4096 8192
    python benchmarks/encoder.py --mode class_step --checkpointing --lengths 512 2048 4096 --check-floors

One interleaved run: every round times every model once at every length, in an order that rotates from round to round.
Results are medians over the rounds of the ratios within a round, so that a machine that slows down for a minute slows
all models. See docs/speed.md for the protocol and the commands of the published results.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import floors
import measuring
import torch
from contenders import (
    BASE,
    CYCLE,
    MODEL_SETS,
    PEERS,
    WARM_UP_LENGTH,
    backend_of,
    build,
    contender_names,
    held_bytes,
    is_modernbert,
    is_training,
    make_action,
    make_batch,
    peak_memory,
    rows_for,
)
from plots import Panel, machine_name, plot_panels
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "Time: wall clock of one call per model, length and round, models interleaved within a round in an order that "
    "rotates from round to round; ratios are taken within a round, medians over rounds. Memory: peak resident size (on "
    "an accelerator: peak allocated) of one call minus the size before it, each model and length in its own process "
    "(on an accelerator in one), after building the model and one call on a tiny input; freed blocks of 1 MiB and more "
    "go back to the system. In a training step the gradients stay allocated, as while they are accumulated, so that "
    "this is memory beyond weights, gradients and moments. held_bytes: what "
    "the model holds between calls, its weights, and in training gradients and both moments. Random weights, random "
    "tokens, no dropout, each model's default attention, which is sdpa (roberta-eager: products and softmax one after "
    "the other; roberta-flash, modernbert-flash: flash-attn). forward: eval, no gradients, base models without pooler. "
    "mlm_step: forward, backward and fused AdamW of the masked-LM models, 15 % of the positions labelled; the models "
    "of this package and ModernBERT apply the head only there (sparse_prediction), which RoBERTa cannot. class_step: "
    "the same, for a classification of each text. Vocabularies are the published ones in training and with --layers "
    "base, else 1000."
)
DIFFERENCES = (
    "All models have the same width and heads, and as many positions as the longest input needs. Each has its "
    "published intermediate size: 3072 at width 768, ModernBERT 1152. With --layers base each has its published number "
    "of layers: 12, ModernBERT 22. ModernBERT differs in kind: gated feed-forward (three matrices instead of two), "
    "pre-norm, no biases, rotary positions, full attention in the first layer and every third one after it, and "
    "windows of 128 in the others, which its sdpa path computes as a masked full attention. It is measured over whole "
    "cycles of three layers only."
)
SETTINGS = (
    *("mode", "checkpointing", "layers", "width", "heads", "slots", "max_length", "dtype", "device"),
    *("threads", "tokens_per_batch", "rounds"),
)

Times = dict[int, dict[str, dict[str, list[float]]]]  # length, model, "unpadded" or "padded": seconds of every round


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with the models' names and the longest input derived from it."""
    sizes = {"tokens_per_batch": 4096, "width": 768, "heads": 12, "slots": 128, "rounds": 5}
    parser = measuring.make_parser(__doc__, lengths=[512, 2048, 4096, 8192, 16384], **sizes)
    add = parser.add_argument
    layers = f"layers of each model, or {BASE}: as many as published (default: {CYCLE}, one cycle of ModernBERT)"
    add("--layers", type=lambda text: text if text == BASE else measuring.positive(text), default=CYCLE, help=layers)
    add("--mode", choices=["forward", "mlm_step", "class_step"], default="forward", help="default: %(default)s")
    measuring.add_dtype(parser)
    sets = ", ".join(MODEL_SETS)
    add("--models", nargs="+", default=["standard"], metavar="MODEL", help=f"models, or one of the sets {sets}")
    add("--padding", action="store_true", help="also time batches where half of the rows lack a quarter of the tokens")
    add("--checkpointing", action="store_true", help="train with gradient checkpointing")
    options = parser.parse_args(arguments)
    if options.checkpointing and not is_training(options):
        parser.error("--checkpointing needs a training step: add --mode mlm_step or --mode class_step")
    try:
        options.names = contender_names(options.models)
    except ValueError as error:
        parser.error(str(error))
    for name in list(options.names):
        if obstacle := why_not(name, options):
            if name in options.models:
                parser.error(f"{name}: {obstacle}")
            progress(f"{name} is left out: {obstacle}")
            options.names.remove(name)
    options.lengths = sorted(set(options.lengths))
    options.max_length = options.lengths[-1]
    return options


def why_not(name: str, options: argparse.Namespace) -> str | None:
    """Why a model cannot be measured with these options and on this machine; a set of models leaves it out."""
    if is_modernbert(name) and options.layers != BASE and options.layers % CYCLE:
        return f"it has one global layer in {CYCLE}, and --layers {options.layers} is no multiple of {CYCLE}"
    if backend_of(name) == "flash_attention_2":
        if not is_flash_attn_2_available():
            return "it needs the package flash-attn and a GPU"
        if options.dtype == "float32" or options.device == "cpu":
            return "it needs --device cuda --dtype bfloat16"
    return None


def measure_time(models: dict[str, PreTrainedModel], options: argparse.Namespace) -> Times:
    """Seconds of every call; each round starts with another model, and with the other batch."""
    actions = {name: make_action(model, options) for name, model in models.items()}
    kinds = ["unpadded", "padded"] if options.padding else ["unpadded"]
    # On an accelerator the first call of a shape chooses kernels and takes memory; on a CPU it would only cost time.
    shapes = [(1, min(WARM_UP_LENGTH, options.max_length))]
    if options.device != "cpu":
        shapes = [(rows_for(length, options), length) for length in options.lengths]
    for shape in shapes:
        for action in actions.values():
            action(make_batch(options, *shape))
    times: Times = {n: {name: {kind: [] for kind in kinds} for name in models} for n in options.lengths}
    for turn in range(options.rounds):
        for length in options.lengths:
            batches = {kind: make_batch(options, rows_for(length, options), length, kind == "padded") for kind in kinds}
            for name in measuring.rotated(list(actions), turn):
                for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                    taken = measuring.seconds(partial(actions[name], batches[kind]), options.device)
                    times[length][name][kind].append(taken)
            took = ", ".join(f"{name} {times[length][name]['unpadded'][-1]:.3g} s" for name in models)
            progress(f"round {turn + 1} of {options.rounds}, length {length}: {took}")
    return times


def describe_model(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, int]:
    """Size of a model and the memory that it holds between calls."""
    layers, parameters = model.config.num_hidden_layers, model.num_parameters()
    return {"layers": layers, "parameters": parameters, "held_bytes": held_bytes(model, options)}


def describe_length(
    length: int, rows: int, times: dict[str, dict[str, list[float]]], memory: dict[str, int]
) -> dict[str, Any]:
    """One entry of the result's `lengths`: time, throughput, memory and ratios of every model."""
    models = {}
    for name, kinds in times.items():
        taken = measuring.summary(kinds["unpadded"])
        speed = rows * length / taken["median"]
        models[name] = {"seconds": taken, "tokens_per_second": speed, "peak_memory_bytes": memory[name]}
        # Peers are compared with the first of them only.
        if rivals := [peer for peer in PEERS[: 1 if name in PEERS else None] if peer in times and peer != name]:
            over = {peer: measuring.compare(times[peer]["unpadded"], kinds["unpadded"]) for peer in rivals}
            models[name]["speed_over"] = over
        if "padded" in kinds:
            models[name]["padded_over_unpadded"] = measuring.compare(kinds["padded"], kinds["unpadded"])
    return {"length": length, "rows": rows, "models": models}


def describe_growth(lengths: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Exponent of the time of one row against its length within `floors.GROWTH_RANGE`, fitted round by round."""
    low, high = floors.GROWTH_RANGE
    inside = [row for row in lengths if low <= row["length"] <= high]
    if len(inside) < 2:
        return None
    exponents, measured = {}, [row["length"] for row in inside]
    for name in inside[0]["models"]:
        by_length = [[taken / row["rows"] for taken in row["models"][name]["seconds"]["rounds"]] for row in inside]
        rounds = (dict(zip(measured, times, strict=True)) for times in zip(*by_length, strict=True))
        exponents[name] = measuring.summary([measuring.growth_exponent(times) for times in rounds])
    return {"range": [min(measured), max(measured)], "exponents": exponents}


def describe_wins(lengths: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The length from which each model of this package is faster than each peer, or `None`."""

    def win(name: str, peer: str) -> float | None:
        speeds = {row["length"]: row["models"][name]["speed_over"][peer]["median"] for row in lengths}
        return measuring.win_length(speeds)

    own = {name: model["speed_over"] for name, model in lengths[0]["models"].items() if "speed_over" in model}
    return {name: {peer: win(name, peer) for peer in peers} for name, peers in own.items()}


def table(result: dict[str, Any]) -> str:
    """Throughput, memory and ratios, a row for each length and model."""
    rows = []
    for row in result["lengths"]:
        for name, model in row["models"].items():
            over = [model.get("speed_over", {}).get(peer) for peer in result["peers"]]
            padding = model.get("padded_over_unpadded")
            cells = [f"{model['tokens_per_second']:.0f}", f"{model['peak_memory_bytes'] / 2**20:.1f}"]
            cells += [f"{one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})" if one else "" for one in over]
            rows.append([row["length"], name, *cells, f"{padding['median']:.3f}" if padding else ""])
    peers = [f"x {peer} (min-max)" for peer in result["peers"]]
    return markdown_table(["length", "model", "tokens/s", "MiB", *peers, "padded"], rows)


def conclusions(result: dict[str, Any]) -> str:
    """Win lengths and growth exponents in words."""
    shortest = min(row["length"] for row in result["lengths"])
    lines = []
    for name, wins in result["wins"].items():
        for peer, length in wins.items():
            how = "shortest length measured" if length == shortest else "interpolated"
            verdict = f"faster from {length:.0f} tokens ({how})" if length else "not faster at the longest length"
            lines.append(f"{name} against {peer}: {verdict}")
    if growth := result["growth"]:
        fitted = ", ".join(f"{name} {fit['median']:.3f}" for name, fit in growth["exponents"].items())
        lines.append(f"growth exponent of one row's time, {growth['range'][0]} to {growth['range'][1]}: {fitted}")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time per token, and per layer unless the models are whole, and memory against length."""
    rows, settings = result["lengths"], result["settings"]
    what = "forward" if settings["mode"] == "forward" else "training step"
    whole = settings["layers"] == BASE
    times, memory = {}, {}
    for name in result["models"]:
        parts = 1 if whole else settings["layers"]
        times[name] = {row["length"]: 1e6 / row["models"][name]["tokens_per_second"] / parts for row in rows}
        memory[name] = {row["length"]: row["models"][name]["peak_memory_bytes"] / 2**20 for row in rows}
    title = (
        f"{settings['layers']} layers of width {settings['width']}, batches of {settings['tokens_per_batch']} tokens "
        f"(at least one row), {settings['dtype']}, {machine_name(result['machine'])}"
    )
    speed = Panel(f"time of a {what} per token{'' if whole else ' and layer'} (microseconds)", times)
    plot_panels([speed, Panel(f"peak memory of a {what} (MiB)", memory)], title, path, peers=result["peers"])


def subject(options: argparse.Namespace) -> str:
    """First part of the file name."""
    chosen = options.models[0] if len(options.models) == 1 and options.models[0] in MODEL_SETS else "chosen"
    suffix = "" if chosen == "standard" else f"-{chosen}"
    layers = BASE if options.layers == BASE else f"{options.layers}-layer"
    kinds = "-padding" * options.padding + "-checkpointing" * options.checkpointing
    return f"encoder-{options.mode}-{layers}{kinds}{suffix}"


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    torch.set_num_threads(options.threads)
    # First, while this process is small: at 12 layers the models of the timed run take gigabytes together.
    memory = measuring.measure_memory(peak_memory, dict.fromkeys(options.lengths, options.names), options)
    models = {name: build(name, options) for name in options.names}
    times = measure_time(models, options)
    lengths = [describe_length(n, rows_for(n, options), times[n], memory[n]) for n in options.lengths]
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "differences": DIFFERENCES,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "peers": [name for name in models if name in PEERS],
        "models": {name: describe_model(model, options) for name, model in models.items()},
        "wins": describe_wins(lengths),
        "growth": describe_growth(lengths),
        "lengths": lengths,
    }
    return {**result, "floors": floors.check(result)}


def report(result: dict[str, Any]) -> str:
    """The table and the conclusions of a result."""
    return f"{table(result)}\n\n{conclusions(result)}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        return measuring.publish(options, subject(options), run(options, arguments), report, plot, markdown=False)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
