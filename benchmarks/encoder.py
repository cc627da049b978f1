"""Speed and memory of this package's encoders beside transformers' RoBERTa, ModernBERT and BERT.

    python benchmarks/encoder.py --check-floors
    python benchmarks/encoder.py --models roberta modernbert luna-tied --layers base --lengths 512 2048 4096 8192
    python benchmarks/encoder.py --mode class_step --checkpointing --lengths 512 2048 4096 --check-floors
    python benchmarks/encoder.py --models windowed --layers 6 --width 384 --tokens-per-batch 1 --lengths 16 512 4096

See docs/results/speed.md for the protocol and the commands of the published results.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import measuring
import summaries
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
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from luna_hf.scripting import progress

PROTOCOL = (
    "Time: wall clock of one call per model, length and round, interleaved in an order that rotates from round to "
    "round; ratios are taken within a round, medians over rounds. Memory: peak resident size (on an accelerator: peak "
    "allocated) of one call minus the size before it, each model and length in its own process (on an accelerator in "
    "one), after building the model and one call on a tiny input; freed blocks of 1 MiB and more go back to the "
    "system. In a training step the gradients stay allocated, as while they are accumulated, so that this is memory "
    "beyond weights, gradients and moments. held_bytes: what the model holds between calls, its weights, and in "
    "training gradients and both moments. Random weights, random tokens, no dropout, each model's default attention, "
    "which is sdpa (roberta-eager: products and softmax one after the other; roberta-flash, modernbert-flash: "
    "flash-attn). forward: eval, no gradients, base models without pooler. mlm_step: forward, backward and fused AdamW "
    "of the masked-LM models, 15 % of the positions labelled; the models of this package and ModernBERT apply the head "
    "only there (sparse_prediction), which RoBERTa cannot. class_step: the same, for a classification of each text. "
    "Vocabularies are the published ones in training and with --layers base, else 1000. All models have the same width "
    "and heads, and as many positions as the longest input needs; each has its published intermediate size, and with "
    "--layers base its published number of layers. ModernBERT is measured over whole cycles of three layers only."
)
GROWTH_RANGE = (2048, 16384)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with the models' names and the longest input derived from it."""
    sizes = {"tokens_per_batch": 4096, "width": 768, "heads": 12, "slots": 128, "rounds": 5}
    parser = measuring.make_parser(__doc__, lengths=[512, 2048, 4096, 8192, 16384], **sizes)
    add = parser.add_argument
    layers = f"layers of each model, or {BASE}: as many as published (default: {CYCLE}, one cycle of ModernBERT)"
    add("--layers", type=lambda text: text if text == BASE else measuring.positive(text), default=CYCLE, help=layers)
    add("--mode", choices=["forward", "mlm_step", "class_step"], default="forward", help="default: %(default)s")
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


def describe_model(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, int]:
    """Size of a model and the memory that it holds between calls."""
    layers, parameters = model.config.num_hidden_layers, model.num_parameters()
    return {"layers": layers, "parameters": parameters, "held_bytes": held_bytes(model, options)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    # First, while this process is small: at 12 layers the models of the timed run take gigabytes together.
    memory = measuring.measure_memory(peak_memory, dict.fromkeys(options.lengths, options.names), options)
    models = {name: build(name, options) for name in options.names}
    calls = {name: make_action(model, options, name) for name, model in models.items()}
    kinds = ["unpadded", "padded"] if options.padding else ["unpadded"]
    # On an accelerator the first call of a shape chooses kernels and takes memory; on a CPU it would only cost time.
    for call in calls.values() if options.device == "cpu" else ():
        call(make_batch(options, 1, min(WARM_UP_LENGTH, options.max_length)))
    rows = {length: rows_for(length, options) for length in options.lengths}
    batches = {(n, kind): make_batch(options, rows[n], n, kind == "padded") for n in rows for kind in kinds}
    actions = {(name, *place): partial(calls[name], batch) for place, batch in batches.items() for name in calls}
    times = measuring.interleave(actions, options.rounds, options.device, warm_up=options.device != "cpu")
    peers, entries = [name for name in PEERS if name in models], []
    for length in options.lengths:
        own = summaries.describe(
            {name: times[name, length, "unpadded"] for name in models}, peers, peak_memory_bytes=memory[length]
        )
        for name in models if options.padding else ():
            ratios = summaries.ratios(times[name, length, "padded"], times[name, length, "unpadded"])
            own[name]["padded_over_unpadded"] = summaries.summary(ratios)
        entries.append({"length": length, "rows": rows[length], "models": own})
    described = {name: describe_model(model, options) for name, model in models.items()}
    return {"peers": peers, "models": described, "lengths": entries}


def subject(options: argparse.Namespace) -> str:
    """First part of the file name."""
    chosen = options.models[0] if len(options.models) == 1 and options.models[0] in MODEL_SETS else "chosen"
    suffix = "" if chosen == "standard" else f"-{chosen}"
    layers = BASE if options.layers == BASE else f"{options.layers}-layer"
    kinds = "-padding" * options.padding + "-checkpointing" * options.checkpointing
    return f"encoder-{options.mode}-{layers}{kinds}{suffix}"


def markdown(result: dict[str, Any]) -> str:
    """The table, then from which length each model is faster than each peer, and the growth of time."""
    entries, lines = result["lengths"], [summaries.table(result), ""]
    for name, model in entries[0]["models"].items():
        for peer in model.get("speed_over", ()) if name not in result["peers"] else ():
            speeds = {entry["length"]: summaries.figure(entry["models"], name, f"speed {peer}") for entry in entries}
            length = summaries.win_length(speeds)
            lines.append(f"{name} against {peer}: " + (f"faster from {length:.0f} tokens" if length else "not faster"))
    if growth := summaries.growth(result, within=GROWTH_RANGE):
        fitted = ", ".join(f"{name} {fit['median']:.3f}" for name, fit in growth.items())
        lines.append(f"growth exponent of one row's time, from {GROWTH_RANGE[0]} to {GROWTH_RANGE[1]} tokens: {fitted}")
    return "\n".join(lines)


main = measuring.Benchmark(__file__, PROTOCOL, parse, measure, subject, markdown).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
