"""What the models of Long Range Arena cost: time and peak memory of a training step and of inference, by length.

    python benchmarks/lra/cost.py --check-floors
    python benchmarks/lra/cost.py --models roberta-eager roberta luna-16 --lengths 1024 2048 3072 4096

One interleaved run of the byte-level text classifier, in the form of Luna's table 2 and LeaPformer's: every round times
every model once at every length, in an order that rotates from round to round. Ratios are taken within a round.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lra_path  # noqa: F401

# isort: split
import floors
import measuring
import torch
from plots import Panel, machine_name, plot_panels
from torch import Tensor

from lra.models import build, find_encoder, load_plugin
from lra.recipes import load_recipe
from lra.results import label
from lra.tasks import Task
from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PEERS = ("roberta-eager", "roberta")
MODELS = ["luna-16", "luna-128", "luna-256", "abc", "linformer", "leapformer", "cosformer", "linear", "lavo", "window"]
MODES = ("training", "inference")
WARM_UP_LENGTH = 16
PROTOCOL = (
    "Byte-level text classification with the recipe's sizes, random weights, random bytes, no padding, no dropout. "
    "training: forward, backward and fused AdamW; inference: forward without gradients. Time: wall clock of one call "
    "per model, mode, length and round, interleaved in an order that rotates; ratios are taken within a round, medians "
    "over rounds. Memory: peak resident size (on an accelerator: peak allocated) of one call minus the size before it, "
    "each in its own process, after building the model and one call on a tiny input; weights and the state of the "
    "optimizer are not counted."
)
# Training on one CPU thread over softmax attention in steps (eager), and memory relative to it.
SPEED = {"luna-16": {1024: 2.2, 2048: 3.9, 4096: 7.0}}
MEMORY = {"luna-16": {4096: 0.17}}
BASE = {"threads": 1, "device": "cpu", "dtype": "float32"}  # of the recipes `small` and `luna`
SETTINGS = ("recipe", "tokens_per_batch", "max_length", "dtype", "device", "threads", "rounds")

Seconds = dict[int, dict[str, dict[str, list[float]]]]  # length, model, mode: of every round


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"lengths": [1024, 2048, 3072, 4096], "tokens_per_batch": 4096, "rounds": 5}
    parser = measuring.make_parser(__doc__, **sizes, recipe="small")
    measuring.add_dtype(parser)
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--plugin", type=Path, help="Python file that registers models of your own")
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    options.max_length = options.lengths[-1]
    options.names = list(dict.fromkeys([*PEERS, *options.models]))
    return options


# ---- what is timed ----


def make_model(name: str, options: argparse.Namespace) -> torch.nn.Module:
    """A classifier of bytes without dropout."""
    torch.manual_seed(0)
    if options.plugin:  # a process that measures memory has not seen it
        load_plugin(options.plugin)
    recipe = load_recipe(options.recipe, "text")
    recipe = dataclasses.replace(recipe, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    task = Task("text", "tokens", 257, options.max_length, 2, "random bytes")
    return build(name, task, recipe).to(device=options.device, dtype=getattr(torch, options.dtype))


def make_actions(model: torch.nn.Module) -> dict[str, Callable[[dict[str, Tensor]], None]]:
    """A training step and a forward pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def training(batch: dict[str, Tensor]) -> None:
        model.train()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    @torch.no_grad()
    def inference(batch: dict[str, Tensor]) -> None:
        model.eval()
        model(input_ids=batch["input_ids"])

    return {"training": training, "inference": inference}


def make_batch(options: argparse.Namespace, rows: int, length: int) -> dict[str, Tensor]:
    """Random bytes and labels."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 257, (rows, length), generator=generator)
    labels = torch.randint(2, (rows,), generator=generator)
    return {"input_ids": ids.to(options.device), "labels": labels.to(options.device)}


def rows_for(length: int, options: argparse.Namespace) -> int:
    """Rows of a batch."""
    return max(1, options.tokens_per_batch // length)


def peak_memory(name: str, length: int, options: argparse.Namespace) -> int:
    """Peak bytes of one call of `<model>/<mode>`; run it in a separate process."""
    name, _, mode = name.rpartition("/")
    action = make_actions(make_model(name, options))[mode]
    action(make_batch(options, 1, min(WARM_UP_LENGTH, length)))
    batch = make_batch(options, rows_for(length, options), length)
    return measuring.extra_memory(lambda: action(batch), options.device)


def measure_time(options: argparse.Namespace) -> tuple[Seconds, dict[str, int]]:
    """Seconds of every call, and the number of parameters of every model."""
    models = {name: make_model(name, options) for name in options.names}
    actions = {name: make_actions(model) for name, model in models.items()}
    for length in [min(WARM_UP_LENGTH, options.max_length)] if options.device == "cpu" else options.lengths:
        for own in actions.values():
            for action in own.values():
                action(make_batch(options, 1, length))
    times: Seconds = {n: {name: {mode: [] for mode in MODES} for name in models} for n in options.lengths}
    for turn in range(options.rounds):
        for length in options.lengths:
            batch = make_batch(options, rows_for(length, options), length)
            for name in measuring.rotated(list(actions), turn):
                for mode, action in actions[name].items():
                    times[length][name][mode].append(measuring.seconds(partial(action, batch), options.device))
            took = ", ".join(f"{name} {times[length][name]['training'][-1]:.3g} s" for name in models)
            progress(f"round {turn + 1} of {options.rounds}, length {length}, training: {took}")
    return times, {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


# ---- the result ----


def describe_length(
    length: int, rows: int, times: dict[str, dict[str, list[float]]], memory: dict[str, int]
) -> dict[str, Any]:
    """Time, memory and ratios of every model at one length."""
    models: dict[str, Any] = {}
    for name, own in times.items():
        models[name] = {}
        for mode, rounds in own.items():
            peak, seconds = memory[f"{name}/{mode}"], measuring.summary(rounds)
            models[name][mode] = {
                "seconds": seconds,
                "rows_per_second": rows / seconds["median"],
                "peak_memory_bytes": peak,
                "speed_over": {peer: measuring.compare(times[peer][mode], rounds) for peer in PEERS if peer != name},
                "memory_over": {peer: peak / max(1, memory[f"{peer}/{mode}"]) for peer in PEERS if peer != name},
            }
    return {"length": length, "rows": rows, "models": models}


def check(result: dict[str, Any]) -> list[floors.Check]:
    """The floors that apply to a run."""
    settings = result["settings"]
    if settings["recipe"] not in ("small", "luna") or any(settings[name] != value for name, value in BASE.items()):
        return []
    checks = []
    for row in result["lengths"]:
        for name, model in row["models"].items():
            own, length = model["training"], row["length"]
            if floor := SPEED.get(name, {}).get(length):
                speed = own["speed_over"]["roberta-eager"]["median"]
                checks.append(floors.compare(f"speed over eager at {length}", name, speed, floor, at_least=True))
            if ceiling := MEMORY.get(name, {}).get(length):
                share = own["memory_over"]["roberta-eager"]
                checks.append(floors.compare(f"memory relative to eager at {length}", name, share, ceiling))
    return checks


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    torch.set_num_threads(options.threads)
    if options.plugin:
        load_plugin(options.plugin)
    for name in options.names:
        find_encoder(name)
    parts = [f"{name}/{mode}" for name in options.names for mode in MODES]
    # First, while this process is small.
    memory = measuring.measure_memory(peak_memory, dict.fromkeys(options.lengths, parts), options)
    times, parameters = measure_time(options)
    result = {
        **describe_run("benchmarks/lra/cost.py", arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "peers": list(PEERS),
        "models": {name: {"parameters": number} for name, number in parameters.items()},
        "lengths": [describe_length(n, rows_for(n, options), times[n], memory[n]) for n in options.lengths],
    }
    return {**result, "floors": check(result)}


def report(result: dict[str, Any]) -> str:
    """For both modes speed and memory relative to both forms of softmax attention, in the form of Luna's table 2."""
    parts = []
    lengths = [f"{row['length']:,}" for row in result["lengths"]]
    for mode in MODES:
        for peer in result["peers"]:
            rows = []
            for name in result["models"]:
                own = [row["models"][name][mode] for row in result["lengths"]]
                speeds = [f"{one['speed_over'][peer]['median']:.2f}" if peer != name else "1" for one in own]
                shares = [f"{one['memory_over'][peer]:.2f}" if peer != name else "1" for one in own]
                rows.append([label(name), *speeds, *shares])
            header = ["model", *(f"speed, {n}" for n in lengths), *(f"memory, {n}" for n in lengths)]
            parts += [f"{mode.capitalize()}, relative to {label(peer)}:", markdown_table(header, rows)]
    rows = [
        [label(name), f"{number['parameters']:,}", *(_absolute(row["models"][name]) for row in result["lengths"])]
        for name, number in result["models"].items()
    ]
    header = ["model", "parameters", *(f"{n} tokens" for n in lengths)]
    parts += ["Seconds for a row and MiB for a batch, training / inference:", markdown_table(header, rows)]
    return "\n\n".join(parts)


def _absolute(model: dict[str, Any]) -> str:
    seconds = " / ".join(f"{1 / model[mode]['rows_per_second']:.3f}" for mode in MODES)
    memory = " / ".join(f"{model[mode]['peak_memory_bytes'] / 2**20:.0f}" for mode in MODES)
    return f"{seconds} s, {memory} MiB"


def plot(result: dict[str, Any], path: Path) -> None:
    """Time and memory of a training step against length."""
    rows, settings = result["lengths"], result["settings"]
    times, memory = {}, {}
    for name in result["models"]:
        own = {row["length"]: row["models"][name]["training"] for row in rows}
        times[name] = {length: 1e3 / one["rows_per_second"] for length, one in own.items()}
        memory[name] = {length: max(1, one["peak_memory_bytes"]) / 2**20 for length, one in own.items()}
    title = (
        f"recipe {settings['recipe']}, batches of {settings['tokens_per_batch']} tokens, {settings['dtype']}, "
        f"{machine_name(result['machine'])}"
    )
    panels = [
        Panel("training time of a row (milliseconds)", times),
        Panel("peak memory of a training step (MiB)", memory),
    ]
    plot_panels(panels, title, path, peers=result["peers"])


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        name = Path(options.recipe).stem
        subject = "lra-cost" if name == "small" else f"lra-cost-{name}"
        return measuring.publish(options, subject, run(options, arguments), report, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
