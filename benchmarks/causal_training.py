"""Time and memory of a training step of the causal models against the length, beside GPT-2's.

    python benchmarks/causal_training.py

A step is forward, backward and fused AdamW on one text. The models are those of generation.py. See docs/speed.md for
the protocol.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring
import torch
from generation import DYNAMIC, OWN, build, random_tokens
from plots import Panel, machine_name, plot_panels

from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "One training step on one text of random tokens: forward with labels at all positions, backward and fused AdamW; "
    "random weights, no dropout, each model's default attention. Time: wall clock; every round times every model at "
    "every length, in an order that rotates from round to round; ratios are taken within a round, medians over rounds. "
    "Memory: peak resident size of a step minus the size before it, each model and length in its own process after a "
    "step on a tiny input (on an accelerator: peak allocated, in one process), where freed blocks of 1 MiB and more go "
    "back to the system; and held_bytes: weights, gradients and both moments."
)
SETTINGS = ("layers", "width", "heads", "vocab_size", "rows", "dtype", "device", "threads", "rounds")
PEER = DYNAMIC  # in training GPT-2 has no cache
NAMES = (*OWN, PEER)
WARM_UP_LENGTH = 16


def make_step(name: str, setting: argparse.Namespace) -> tuple[Callable[[int], None], int]:
    """A training step on a text of a given length, and the bytes that model and optimizer hold between steps."""
    model = build(name, setting).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(length: int) -> None:
        ids = random_tokens(length, setting)
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    step(WARM_UP_LENGTH)
    return step, 4 * sum(parameter.nbytes for parameter in model.parameters())


def peak_memory(name: str, length: int, setting: argparse.Namespace) -> int:
    """Peak bytes of a step, with what model and optimizer hold; run it in a separate process."""
    step, held = make_step(name, setting)
    return held + measuring.extra_memory(lambda: step(length), setting.device)


def measure_time(setting: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Seconds of every round by length and model."""
    steps = {name: make_step(name, setting)[0] for name in NAMES}
    times: dict[int, dict[str, list[float]]] = {length: {name: [] for name in NAMES} for length in setting.lengths}
    for turn in range(setting.rounds):
        for length, taken in times.items():
            for name in measuring.rotated(NAMES, turn):
                step = steps[name]
                taken[name].append(measuring.seconds(lambda step=step, length=length: step(length), setting.device))
        progress(f"round {turn + 1} of {setting.rounds}")
    return times


def describe_length(length: int, times: dict[str, list[float]], memory: dict[str, int]) -> dict[str, Any]:
    """One entry of the result's `lengths`."""
    models: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        models[name] = {"seconds": measuring.summary(taken), "peak_memory_bytes": memory[name]}
        if name != PEER:
            models[name]["speed_over"] = {PEER: measuring.compare(times[PEER], taken)}
            models[name]["memory_over"] = {PEER: memory[name] / memory[PEER]}
    return {"length": length, "models": models}


def markdown(result: dict[str, Any]) -> str:
    """A row for every length and model: seconds, speed relative to GPT-2 with its range, memory and its share."""
    rows = []
    for row in result["lengths"]:
        for name, model in row["models"].items():
            cells = [f"{row['length']:,}", name, f"{model['seconds']['median']:.2f}", "-"]
            cells += [f"{model['peak_memory_bytes'] / 2**20:,.0f}", "-"]
            if name != PEER:
                speed = model["speed_over"][PEER]
                cells[3] = f"{speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f})"
                cells[5] = f"{model['memory_over'][PEER]:.2f}"
            rows.append(cells)
    speed, memory = f"speed over {PEER} (range)", f"memory / {PEER}"
    return markdown_table(["tokens", "model", "seconds", speed, "MiB", memory], rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time per token and memory against length."""
    rows = {row["length"]: row["models"] for row in result["lengths"]}
    times = {name: {n: 1e6 * row[name]["seconds"]["median"] / n for n, row in rows.items()} for name in NAMES}
    memory = {name: {n: row[name]["peak_memory_bytes"] / 2**20 for n, row in rows.items()} for name in NAMES}
    panels = [Panel("training step, microseconds per token", times), Panel("peak memory (MiB)", memory)]
    settings = result["settings"]
    title = (
        f"causal training, {settings['layers']} layers of width {settings['width']}, {settings['dtype']}, "
        f"{machine_name(result['machine'])}"
    )
    plot_panels(panels, title, path, peers=[PEER])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with the positions that the models need."""
    sizes = {"layers": 4, "width": 768, "heads": 12, "vocab_size": 50257, "rounds": 3}
    parser = measuring.make_parser(__doc__, lengths=[1024, 4096], **sizes)
    measuring.add_dtype(parser)
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    options.longest, options.room, options.rows = max(WARM_UP_LENGTH, *options.lengths), 0, 1
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(options.threads)
    memory = measuring.measure_memory(peak_memory, dict.fromkeys(options.lengths, NAMES), options)
    times = measure_time(options)
    return {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "peers": [PEER],
        "lengths": [describe_length(n, times[n], memory[n]) for n in options.lengths],
        "floors": [],
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        subject = f"causal_training-{options.layers}-layer"
        return measuring.publish(options, subject, run(options, arguments), markdown, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
