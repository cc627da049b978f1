"""Simultaneous translation of Multi30k by wait-k: quality against latency, for every family and softmax attention.

    python experiments/multi30k_simultaneous.py run --data DATA
    python experiments/multi30k_simultaneous.py cost
    python experiments/multi30k_simultaneous.py report

`run` trains every system once for all k by `training/train_translation.py`, with half the updates of `multi30k.py`,
and scores it at each k; finished runs are skipped. DATA has the folder `multi30k`. `cost` measures state and time of a
token after long sources, with random weights. `report` writes JSON, tables and a plot; published runs of the same
recipe stay unless they have been repeated. Options that are not listed here, `--key value`, override those of the
training command.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import (
    ROOT,
    describe,
    finished_runs,
    keep_published,
    launch,
    make_parser,
    option_words,
    publish,
    read_json,
    run_study,
    shared_fields,
)

# isort: split
import torch
import yaml
from multi30k import DIRECTIONS, OWN, OWN_DROPOUT, SETTING, score_cell
from multi30k_parts import PARTS, WINDOW
from plots import panels, plain, save
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from luna_hf.scripting import markdown_table, progress, write_json
from luna_hf.simultaneous import TranslationStream, WaitK

SCRIPT, SUBJECT = "experiments/multi30k_simultaneous.py", "simultaneous-multi30k"
RECIPES = ROOT / "training" / "recipes" / "train_translation"
WAITS = (1, 3, 5, 7)
FULL = {"model.memory_control": "sliding_window", "model.memory_size": WINDOW, "model.local_window": 0}
# Systems: what the tables call them, the recipe, and what differs from it.
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softmax": ("softmax attention", "abc16", FULL),
    "softmax_convolution": (
        "softmax attention and a convolution",
        "abc16",
        {**FULL, "model.conv_kernel_size": 5},
    ),
    "abc": ("ABC, 16 slots and a window", "abc16", {}),
    "abc32": ("ABC, 32 slots and a window of 8", "abc16", {"model.memory_size": 32, "model.local_window": 8}),
    "abc32_convolution": (
        "ABC, 32 slots, a window of 8 and a convolution",
        "abc16",
        {"model.memory_size": 32, "model.local_window": 8, "model.conv_kernel_size": 5},
    ),
    "luna": ("Luna, 16 slots and a window", "luna16", {}),
    "lavo": ("LAVO, 16 bases and a window", "lavo", {}),
    "leapformer": ("LeaPformer", "leapformer", {}),
    "linear": ("LeaPformer without re-weighting", "leapformer", {"model.reweighting": "none"}),
}
# As in table 6 of the LeaPformer paper: one part is linear, the others keep softmax attention.
for _part, (_name, _reweighting) in itertools.product(PARTS, {"leapformer": "learned", "linear": "none"}.items()):
    SYSTEMS[f"{_name}_{_part}"] = (
        f"{'LeaPformer' if _name == 'leapformer' else 'no re-weighting'}, {_part} alone",
        "leapformer",
        {
            "model.model_type": "leapformer_parts",
            "model.reweighting": _reweighting,
            "model.softmax_parts": [part for part in PARTS if part != _part],
        },
    )
WHOLE, UPDATES = ("softmax", "abc", "abc32_convolution", "luna", "lavo", "leapformer", "linear"), 1500
# Texts that are translated at a time: a matter of speed, as are threads.
EVAL_BATCH = 256
# Sources of `cost`, which arrive in pieces; softmax attention would take hours for the longest. Tokens that are timed.
LENGTHS, PIECE, MOST_SOFTMAX, STEPS = (100, 1000, 10_000, 100_000), 1000, 10_000, 50


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/simultaneous")
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="default: both")
    add("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    options, options.overrides = parser.parse_known_args(arguments)
    return options


def run(options: argparse.Namespace) -> None:
    """Train every system in every direction, seed by seed, unless that is done."""
    for direction, seed, system in itertools.product(options.directions, options.seeds, options.systems):
        name = f"{system}-{direction}-seed{seed}"
        folder = options.runs / "train" / name
        if (folder / "run.json").exists():
            continue
        progress(name)
        source, target = direction.split("-")
        values = {"data": options.data / "multi30k", "source_language": source, "target_language": target}
        values |= {"model_name": name, "output_dir": folder, "seed": seed, "num_beams": 1, "wait_k": [*WAITS, 0]}
        _, recipe, changes = SYSTEMS[system]
        values |= {**SETTING, **OWN_DROPOUT, "max_steps": UPDATES, "eval_batch_size": EVAL_BATCH, **changes}
        words = [str(RECIPES / f"multi30k_wait_{recipe}.yaml"), *option_words(values), *options.overrides]
        script = (
            "experiments/multi30k_parts.py" if "model.softmax_parts" in changes else "training/train_translation.py"
        )
        launch(script, words, options.threads)
        if not (folder / "metrics.json").is_file():
            raise KeyboardInterrupt
        describe(options, folder, system=system, direction=direction, seed=seed)


def cost(options: argparse.Namespace) -> None:
    """Measure the state and the time of a token after sources of several lengths."""
    path = options.runs / "cost.json"
    options.runs.mkdir(parents=True, exist_ok=True)
    rows = read_json(path)["rows"] if path.is_file() else []
    measured = {(row["system"], row["length"]) for row in rows}
    for system, length in itertools.product(WHOLE, LENGTHS):
        if (system == "softmax" and length > MOST_SOFTMAX) or (system, length) in measured:
            continue
        _, recipe, changes = SYSTEMS[system]
        model = yaml.safe_load((RECIPES / f"multi30k_wait_{recipe}.yaml").read_text())["model"]
        model |= {name.removeprefix("model."): value for name, value in changes.items()}
        model |= {"memory_size": length + STEPS} if system == "softmax" else {}
        torch.manual_seed(0)
        config = AutoConfig.for_model(**model, vocab_size=SETTING["vocab_size"], is_encoder_decoder=True)
        stream = TranslationStream(AutoModelForSeq2SeqLM.from_config(config).eval(), WaitK(length + 1))
        for piece in torch.randint(4, SETTING["vocab_size"], (1, length)).split(PIECE, dim=1):
            stream.read(piece)
        seconds = []
        for _ in range(STEPS):  # reads a token and writes one
            token, start = torch.randint(4, SETTING["vocab_size"], (1, 1)), time.thread_time()
            stream.read(token)
            stream.write()
            seconds.append(time.thread_time() - start)
        if not all(tensor.isfinite().all() for tensor in stream.cache.state_dict().values()):
            raise FloatingPointError(f"The state of {system} is not finite after {length:,} source tokens.")
        rows.append({"system": system, "length": length, "bytes": stream.cache.nbytes, "seconds": seconds})
        write_json(path, {**options.header, "rows": rows})
        progress(f"{system}, {length}: {stream.cache.nbytes:,} bytes, {1000 * statistics.median(seconds):.2f} ms")


def report(options: argparse.Namespace) -> None:
    """Write scores, latencies and costs."""
    found, order = finished_runs(options.runs, "train", f"{Path(SCRIPT).name} run"), list(SYSTEMS)
    result = shared_fields(SCRIPT, [run for _, run in found], (*OWN, "wait_k", "eval_batch_size"))
    result["runs"] = [entry(path, run) for path, run in found]
    path = options.runs / "cost.json"
    result["cost"] = read_json(path) if path.is_file() else None
    keep_published(
        *(result, options.results, SUBJECT),
        lambda run: (DIRECTIONS.index(run["direction"]), order.index(run["system"]), run["seed"]),
    )
    publish(options.results, SUBJECT, "no", result, text, {"": plot})


def entry(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """A run in the result file."""
    figures = read_json(folder / "metrics.json")
    scores = {
        k: {"bleu": own["bleu"]["score"], "chrf": own["chrf"]["score"], "lagging": own["average_lagging"]}
        for k, own in figures["test"]["simultaneous"].items()
    }
    whole = {name: figures["test"][name]["score"] for name in ("bleu", "chrf")}
    own = {name: run[name] for name in ("system", "direction", "seed")}
    return {**own, "parameters": figures["parameters"], "scores": {**scores, "whole": whole}}


def text(result: dict[str, Any]) -> str:
    """A row for each direction and system: BLEU, chrF and AL at each k; and the cost of a token."""
    rows, groups = [], dict[tuple[str, str], list[dict[str, Any]]]()
    for own in result["runs"]:
        groups.setdefault((own["direction"], own["system"]), []).append(own)
    for (direction, system), runs in groups.items():
        cells = [direction, SYSTEMS[system][0], str(len(runs))]
        for k in (*map(str, WAITS), "whole"):
            part = [own["scores"][k] for own in runs]
            cells.append(
                f"{score_cell([one['bleu'] for one in part])} / {statistics.mean(o['chrf'] for o in part):.1f}"
            )
        lags = (statistics.mean(own["scores"][str(k)]["lagging"] for own in runs) for k in WAITS)
        rows.append([*cells, ", ".join(f"{lag:.1f}" for lag in lags)])
    header = ["direction", "model", "seeds", *(f"k = {k}" for k in WAITS), "whole source", "AL, in tokens"]
    parts = [f"BLEU / chrF:\n\n{markdown_table(header, rows)}"]
    if result["cost"]:
        lines = {system: [SYSTEMS[system][0]] for system in WHOLE}
        for row in result["cost"]["rows"]:
            lines[row["system"]].append(f"{row['bytes'] / 1024:,.0f} / {1000 * statistics.median(row['seconds']):.1f}")
        lines = [line + ["-"] * (len(LENGTHS) + 1 - len(line)) for line in lines.values()]
        header = ["", *(f"{length:,} source tokens" for length in LENGTHS)]
        parts.append(f"State in KiB / milliseconds of a token read and one written:\n\n{markdown_table(header, lines)}")
    return "\n\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """BLEU against average lagging, for each direction."""
    directions = list(dict.fromkeys(own["direction"] for own in result["runs"]))
    figure, axes = panels(1, len(directions), (6 * len(directions), 4.8), squeeze=False)
    for axis, direction in zip(axes[0], directions, strict=True):
        for index, system in enumerate(WHOLE):
            runs = [own for own in result["runs"] if (own["direction"], own["system"]) == (direction, system)]
            if not runs:
                continue
            points = [
                [statistics.mean(own["scores"][str(k)][name] for own in runs) for name in ("lagging", "bleu")]
                for k in WAITS
            ]
            style = {"color": "black", "linestyle": "--"} if system == "softmax" else {"color": f"C{index}"}
            axis.plot(*zip(*points, strict=True), marker="o", label=SYSTEMS[system][0], **style)
        axis.set_title(direction)
        axis.set_xlabel("average lagging (tokens)")
        plain(axis)
    axes[0][0].set_ylabel("BLEU")
    named = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)


COMMANDS = {"run": run, "cost": cost, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
