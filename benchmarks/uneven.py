"""Batches of variable-length texts: classifiers with their padding computed and left out, and RoBERTa's.

    python benchmarks/uneven.py

The lengths are drawn from those of SST-2, MRPC and IMDB (`length_mixes.json`); `full` has texts of one length, where
there is nothing to gain. Every round draws a new batch and runs every model on it, with a forward pass and with a
finetuning step.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import floors
import measuring
import torch
from contenders import ENCODER_VOCABULARY, OWN, PAD, configure
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "Sequence classifiers with random weights, vocabulary 1000, no dropout, sdpa. Padded: every row is computed to the "
    "longest of the batch (unpad_inputs=False). Default: the models leave padding out where that is faster. forward: "
    "eval, no gradients. finetune: forward, backward and fused AdamW. Every round draws the lengths of a batch from "
    "the quantiles of length_mixes.json and runs all models on it, in an order that rotates; ratios are taken within "
    "a round, medians over rounds."
)
MIXES = json.loads((Path(__file__).resolve().parent / "length_mixes.json").read_text(encoding="utf-8"))
FULL = "full"
FULL_LENGTH = 128
MODES = ("forward", "finetune")
PEER = "roberta"
MODELS = ("luna-tied", "abc-mlp-64", "leapformer", "lavo-64")
SETTINGS = ("models", "layers", "width", "heads", "slots", "rows", "dtype", "device", "threads", "rounds")

Seconds = dict[str, list[float]]  # of every round, by contender


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"layers": 2, "width": 768, "heads": 12, "slots": 128, "rows": 32, "rounds": 9}
    parser = measuring.make_parser(__doc__, **sizes)
    mixes = [name for name in MIXES if name != "note"]
    parser.add_argument("--mixes", nargs="+", choices=[*mixes, FULL], default=[*mixes, FULL], help="default: all")
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"default: {' '.join(MODELS)}")
    measuring.add_dtype(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(OWN):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; choose among {', '.join(OWN)}")
    options.mode, options.max_length = "forward", max(max(MIXES[name]) for name in mixes)
    return options


def draw_lengths(mix: str, rows: int, seed: int) -> list[int]:
    """The lengths of a batch."""
    draw = random.Random(seed)
    return [FULL_LENGTH if mix == FULL else draw.choice(MIXES[mix]) for _ in range(rows)]


def make_batch(lengths: Sequence[int], device: str) -> dict[str, Tensor]:
    """Random ids, padded on the right, and labels."""
    generator = torch.Generator().manual_seed(sum(lengths))
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, ENCODER_VOCABULARY, keep.shape, generator=generator).masked_fill(~keep, PAD)
    labels = torch.randint(0, 2, (len(lengths),), generator=generator)
    return {
        name: t.to(device) for name, t in {"input_ids": ids, "attention_mask": keep.long(), "labels": labels}.items()
    }


def build(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """A classifier with random weights."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(configure(name, options))
    return model.to(device=options.device, dtype=getattr(torch, options.dtype))


def make_calls(model: PreTrainedModel, mode: str) -> Callable[..., None]:
    """The timed call."""
    model.train(mode == "finetune")

    @torch.no_grad()
    def forward(batch: dict[str, Tensor], **options: Any) -> None:
        model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: dict[str, Tensor], **options: Any) -> None:
        optimizer.zero_grad()
        model(**batch, **options).loss.backward()
        optimizer.step()

    return step if mode == "finetune" else forward


def measure(mode: str, mix: str, models: dict[str, PreTrainedModel], options: argparse.Namespace) -> Seconds:
    """Time every contender on the same batches."""
    contenders: dict[str, Callable[..., None]] = {}
    for name, model in models.items():
        call = make_calls(model, mode)
        contenders[name] = call
        if name != PEER:
            contenders[f"{name}, padded"] = partial(call, unpad_inputs=False)
    times: Seconds = {name: [] for name in contenders}
    for turn in range(-1, options.rounds):  # the first warms up
        batch = make_batch(draw_lengths(mix, options.rows, turn), options.device)
        for name in measuring.rotated(list(contenders), max(turn, 0)):
            taken = measuring.seconds(partial(contenders[name], batch), options.device)
            if turn >= 0:
                times[name].append(taken)
    return times


def describe(mode: str, mix: str, times: Seconds, options: argparse.Namespace) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    batches = [draw_lengths(mix, options.rows, turn) for turn in range(options.rounds)]
    real = sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)
    models = {
        name: {
            "seconds": measuring.summary(times[name]),
            "speed_over_padded": measuring.compare(times[f"{name}, padded"], times[name]),
            "speed_over_roberta": measuring.compare(times[PEER], times[name]),
        }
        for name in options.models
    }
    return {"mode": mode, "mix": mix, "real_tokens": real, "models": models}


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    torch.set_num_threads(options.threads)
    models = {name: build(name, options) for name in (PEER, *options.models)}
    entries = []
    for mode in MODES:
        for mix in options.mixes:
            entries.append(describe(mode, mix, measure(mode, mix, models, options), options))
            speeds = {name: model["speed_over_padded"]["median"] for name, model in entries[-1]["models"].items()}
            progress(f"{mode}, {mix}: " + ", ".join(f"{name} x {speed:.2f}" for name, speed in speeds.items()))
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "lengths": entries,
    }
    return {**result, "floors": floors.check_uneven(result)}


def markdown(result: dict[str, Any]) -> str:
    """A row for each mode, mix and model."""
    rows = [
        [
            *(entry["mode"], entry["mix"], f"{entry['real_tokens']:.0%}", name),
            *(f"{one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})" for one in list(model.values())[1:]),
        ]
        for entry in result["lengths"]
        for name, model in entry["models"].items()
    ]
    return markdown_table(["", "lengths of", "real tokens", "model", "x padded (min-max)", "x roberta (min-max)"], rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        subject = f"uneven-{options.layers}-layer"
        return measuring.publish(options, subject, run(options, arguments), markdown, lambda *_: None)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
