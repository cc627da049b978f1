"""Speed of windows, selected tokens and slots in one softmax, against transformers' BertModel in the same run.

    python benchmarks/windowed.py --check-floors
    python benchmarks/windowed.py --dtype bfloat16 --check-floors

The models have the shape of all-MiniLM-L6-v2. Every round times every model once, in an order that rotates; results are
medians over the rounds of the ratios within a round. A mixed batch has short and long texts, and is compared with the
sum of the times of the short and of the long ones apart.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import floors
import measuring
import torch
import uneven
from contenders import OWN, WINDOWED, WINDOWS, build, make_action, make_batch, rows_for
from docs_sources import span
from plots import Panel, machine_name, plot_panels

from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "Wall clock of one forward per model, length and round, models interleaved within a round in an order that rotates "
    "from round to round; ratios are taken within a round, medians over rounds. Short texts get more rounds than long "
    "ones, and one untimed call of each model up to 1024 tokens. eval, no gradients, sdpa, random weights and tokens, "
    "vocabulary 1000, no padding; all models have as many positions as the longest text needs, and two segments. Luna "
    "runs as its heads run it: nothing reads the packed states after the last layer. Mixed batches: padded on the "
    "right, with an attention mask; the short and the long texts apart have none."
)
PEER, ALONE = "bert", "abc-window-64"
SHORT, LONG = (8, 100), (2, 1024)  # rows and length of the short and the long texts of a mixed batch
MIXED = tuple(name for name in WINDOWED if name.endswith("-w256") or name == floors.SELECTED)
SETTINGS = ("models", "layers", "width", "heads", "tokens_per_batch", "dtype", "device", "threads", "rounds")

Seconds = dict[str, list[float]]  # of every round, by what was timed


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with what the contenders' builders ask for besides."""
    sizes = {"layers": 6, "width": 384, "heads": 12, "tokens_per_batch": 1, "rounds": 5}
    parser = measuring.make_parser(__doc__, lengths=[16, 64, 128, 512, 1024, 4096, 8192], **sizes)
    models = {"nargs": "+", "choices": [*WINDOWED], "metavar": "MODEL"}
    parser.add_argument("--models", default=[*WINDOWED], help=f"default: {' '.join(WINDOWED)}", **models)
    measuring.add_dtype(parser)
    parser.set_defaults(mode="forward", checkpointing=False, padding=False, slots=0)
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    options.max_length = max(options.lengths[-1], LONG[1])
    return options


def rounds_for(length: int, rounds: int) -> int:
    """Rounds of a length: as many as take as long as those of 1024 tokens, but at least two."""
    return max(2, min(5 * rounds, rounds * 1024 // length))


def make_calls(options: argparse.Namespace) -> dict[str, Callable[..., None]]:
    """The timed call of every model, which takes a batch."""
    calls = {}
    for name in (PEER, *options.models):
        action = make_action(build(name, options), options)
        own = {"reads_packed_states": False} if name in OWN and OWN[name][0] == "luna" else {}
        calls[name] = lambda batch, action=action, own=own: action({**batch, **own})
    return calls


def interleave(actions: dict[str, Callable[[], None]], rounds: int, device: str, warm_up: bool = True) -> Seconds:
    """Seconds of every action of every round."""
    times: Seconds = {name: [] for name in actions}
    for turn in range(-1 if warm_up else 0, rounds):
        for name in measuring.rotated(list(actions), max(turn, 0)):
            taken = measuring.seconds(actions[name], device)
            if turn >= 0:
                times[name].append(taken)
    return times


def measure_length(length: int, calls: dict[str, Callable[..., None]], options: argparse.Namespace) -> dict[str, Any]:
    """One entry of the result's `lengths`: time, speed over BERT and time over a window alone."""
    rows = rows_for(length, options)
    batch = make_batch(options, rows, length)
    actions = {name: partial(call, batch) for name, call in calls.items()}
    times = interleave(actions, rounds_for(length, options.rounds), options.device, length <= 1024)
    models: dict[str, dict[str, Any]] = {name: {"seconds": measuring.summary(taken)} for name, taken in times.items()}
    for name in options.models:
        models[name]["speed_over_bert"] = measuring.compare(times[PEER], times[name])
        if ALONE in times and name != ALONE:
            models[name]["time_over_window"] = measuring.compare(times[name], times[ALONE])
    speeds = ", ".join(f"{name} {models[name]['speed_over_bert']['median']:.2f}" for name in options.models)
    progress(f"{rows} x {length} tokens, speed over BERT: {speeds}")
    return {"length": length, "rows": rows, "models": models}


def measure_mixed(call: Callable[..., None], options: argparse.Namespace) -> dict[str, Any]:
    """Time of short and long texts in one batch, relative to the sum of the short and of the long ones apart."""
    lengths = [length for rows, length in (SHORT, LONG) for _ in range(rows)]
    together = uneven.make_batch(lengths, options.device)
    del together["labels"]
    parts = {"together": together, "short": make_batch(options, *SHORT), "long": make_batch(options, *LONG)}
    times = interleave({kind: partial(call, batch) for kind, batch in parts.items()}, options.rounds, options.device)
    apart = [short + long for short, long in zip(times["short"], times["long"], strict=True)]
    return measuring.compare(times["together"], apart)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    torch.set_num_threads(options.threads)
    calls = make_calls(options)
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "lengths": [measure_length(length, calls, options) for length in options.lengths],
        "mixed": {name: measure_mixed(calls[name], options) for name in options.models if name in MIXED},
    }
    return {**result, "floors": floors.check_windowed(result)}


def describe(name: str) -> tuple[int, str, str]:
    """The window, the selected tokens and the slots of a model."""
    family, fields = WINDOWED[name]
    if name == ALONE:
        return fields["memory_size"], "none", "none"
    slots = "Luna, 64" if family == "luna" else f"{fields['memory_control']}, {fields['memory_size']}"
    selected = "none"
    if number := fields.get("num_selected_tokens"):
        selected = f"{number}, by {fields.get('num_selection_queries', 16)} queries"
    return fields["local_window"], selected, slots


def markdown(result: dict[str, Any]) -> str:
    """Speed over BERT, a row for each model; then BERT's time and the time of mixed batches."""
    rows, lengths = [], result["lengths"]
    for name in result["settings"]["models"]:
        models = {row["length"]: row["models"][name] for row in lengths}
        cells = [f"{model['speed_over_bert']['median']:.2f}" for model in models.values()]
        over = models.get(floors.SELECTED_LENGTH, {}).get("time_over_window")
        mixed = result["mixed"].get(name)
        cells.append(f"{over['median']:.2f}" if over else "-")
        cells.append(f"{mixed['median']:.2f} ({span(mixed['quartiles'], 2)})" if mixed else "-")
        rows.append([*map(str, describe(name)), *cells])
    milliseconds = [f"{1e3 * row['models'][PEER]['seconds']['median']:,.0f} ms" for row in lengths]
    rows.append(["BERT", "", "", *milliseconds, "-", "-"])
    header = ["window", "selected", "slots", *(f"{row['length']:,}" for row in lengths)]
    header += [f"time over a window of 64 alone, {floors.SELECTED_LENGTH:,}", "mixed batch over its parts (quartiles)"]
    return markdown_table(header, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Time per token against length, a panel for each size of window."""

    def curve(name: str) -> dict[int, float]:
        rows = result["lengths"]
        return {r["length"]: 1e6 * r["models"][name]["seconds"]["median"] / r["rows"] / r["length"] for r in rows}

    panels, settings = [], result["settings"]
    for window in WINDOWS:
        curves = {"BERT": curve(PEER)}
        for name in settings["models"]:
            size, selected, slots = describe(name)
            if size == window:
                chosen = selected.partition(", ")[2]  # the number goes with the window, and colours are by label
                curves[f"slots: {slots}" + (f"; selected tokens, {chosen}" if chosen else "")] = curve(name)
        if len(curves) > 1:
            panels.append(Panel(f"window of {window}: time of a forward per token (microseconds)", curves))
    tokens = settings["tokens_per_batch"]
    batch = f"batches of {tokens} tokens (at least one text)" if tokens > 1 else "one text"
    title = (
        f"{settings['layers']} layers of width {settings['width']}, {batch}, {settings['dtype']}, "
        f"{machine_name(result['machine'])}"
    )
    plot_panels(panels, title, path, peers=["BERT"])


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        batched = f"-{options.tokens_per_batch}-tokens" if options.tokens_per_batch > 1 else ""
        subject = f"windowed-{options.layers}-layer{batched}"
        return measuring.publish(options, subject, run(options, arguments), markdown, plot)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
