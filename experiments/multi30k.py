"""Translation of Multi30k: Luna, ABC and a softmax encoder-decoder of the same size, trained the same way.

    python experiments/multi30k.py run --data DATA
    python experiments/multi30k.py report

`run` trains every recipe `multi30k_*.yaml` of a model that reads its source whole, in the given directions with each
seed, by `training/train_translation.py`, with a budget that fits a CPU (`SETTING`); finished runs are skipped. DATA has
the folder `multi30k`. `report` writes JSON, a table and a plot; published runs of the same recipe stay unless they have
been repeated.

Options that are not listed here, `--key value`, override those of the training command; they hold for every system.
"""

import argparse
import itertools
import statistics
import sys
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
    read_log,
    run_study,
    shared_fields,
)

# isort: split
from plots import panels, plain, save

from luna_hf.scripting import markdown_table, progress

SCRIPT, SUBJECT = "experiments/multi30k.py", "translation-multi30k"
RECIPES = ROOT / "training" / "recipes" / "train_translation"
SYSTEMS = {
    "softmax": "softmax (Pegasus)",
    "luna16": "Luna, 16 slots",
    "luna32": "Luna, 32 slots",
    "luna16_elu": "Luna, 16 slots, elu + 1",
    "abc16": "ABC, 16 slots",
    "luna16_window": "Luna, 16 slots and a window",
    "luna32_window": "Luna, 32 slots and a window",
    "abc16_window": "ABC, 16 slots and a window",
    "softmax_post": "softmax, post-norm (BART)",
    "luna16_post": "Luna, 16 slots, post-norm",
}
# Systems without a recipe of their own: that of another one, with other values.
WINDOW = {"model.local_window": 4}
VARIANTS = {
    "luna16_window": ("luna16", WINDOW),
    "luna32_window": ("luna32", WINDOW),
    "abc16_window": ("abc16", WINDOW),
    "softmax_post": ("softmax", {"model.model_type": "bart"}),
    "luna16_post": ("luna16", {"model.norm_first": False}),
}
# Six passes over the data instead of the recipes' seventy, so with less dropout.
SETTING = {
    "vocab_size": 4000,
    "batch_tokens": 1024,
    "max_steps": 3000,
    "warmup_steps": 300,
    "learning_rate": 3e-3,
    "eval_steps": 300,
    "save_steps": 100,
}
DROPOUT = {"softmax": {"model.dropout": 0.1, "model.attention_dropout": 0.0}}
OWN_DROPOUT = {"model.hidden_dropout_prob": 0.1, "model.attention_probs_dropout_prob": 0.0}
DIRECTIONS = ("en-de", "de-en")
METRICS = ("bleu", "bleu_lowercase", "chrf")
OWN = ("data", "model", "model_name", "output_dir", "seed", "source_language", "target_language")
PROTOCOL = (
    "Every run sees the same batches in the same order for its seed, with a joint BPE for each direction. The mean of "
    "the last checkpoints translates the test set of 2016 with a beam; BLEU and chrF are sacreBLEU's. Nothing is "
    "chosen by the scores."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/translation")
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--directions", nargs="+", choices=DIRECTIONS, default=["en-de"], help="default: en-de")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
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
        values |= {"model_name": name, "output_dir": folder, "seed": seed}
        recipe, changes = VARIANTS.get(system, (system, {}))
        values |= {**SETTING, **DROPOUT.get(recipe, OWN_DROPOUT), **changes}
        words = [str(RECIPES / f"multi30k_{recipe}.yaml"), *option_words(values), *options.overrides]
        launch("training/train_translation.py", words, options.threads)
        if not (folder / "metrics.json").is_file():
            raise KeyboardInterrupt
        describe(options, folder, system=system, direction=direction, seed=seed)


def report(options: argparse.Namespace) -> None:
    """Write scores and costs of the finished runs."""
    found = finished_runs(options.runs, "train", f"{Path(SCRIPT).name} run")
    result = {**shared_fields(SCRIPT, [run for _, run in found], OWN), "protocol": PROTOCOL}
    result["runs"] = [entry(path, run) for path, run in found]
    keep_published(result, options.results, SUBJECT, cell)
    publish(options.results, SUBJECT, result["recipe"]["mixed_precision"], result, text, {"": plot_losses})


def cell(run: dict[str, Any]) -> tuple[int, int, int]:
    """What identifies a run, in the order of the table: direction, system and seed."""
    return DIRECTIONS.index(run["direction"]), list(SYSTEMS).index(run["system"]), run["seed"]


def entry(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """A run in the result file."""
    figures, log = read_json(folder / "metrics.json"), read_log(folder, "held_out")
    curve = {"step": [point["step"] for point in log], "loss": [point["loss"] for point in log]}
    names = ("parameters", "vocabulary", "training_seconds", "held_out_loss", "unigram_loss")
    return {
        **{name: run[name] for name in ("system", "direction", "seed")},
        **{name: figures[name] for name in names},
        "model": run["recipe"]["model"],
        "scores": {name: figures["test"][name]["score"] for name in METRICS},
        "signatures": {name: figures["test"][name]["signature"] for name in METRICS},
        "samples": figures["test"]["samples"][:3],
        "curve": curve,
    }


def grouped(result: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs of every direction and system."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault((run["direction"], run["system"]), []).append(run)
    return groups


def text(result: dict[str, Any]) -> str:
    """A row for each direction and system: mean and extremes over the seeds."""
    rows, groups = [], grouped(result)
    for (direction, system), runs in groups.items():
        scores = {name: [run["scores"][name] for run in runs] for name in METRICS}
        twin = {run["seed"]: run["scores"]["bleu"] for run in groups.get((direction, "softmax"), [])}
        pairs = [run["scores"]["bleu"] - twin[run["seed"]] for run in runs if run["seed"] in twin]
        gap = f"{statistics.mean(pairs):+.2f}" if pairs and system != "softmax" else "-"
        loss = statistics.mean(run["held_out_loss"] for run in runs)
        seconds = statistics.median(run["training_seconds"] for run in runs)
        cells = [direction, SYSTEMS[system], f"{runs[0]['parameters'] / 1e6:.2f} M", str(len(runs))]
        cells += [score_cell(scores["bleu"]), gap, score_cell(scores["bleu_lowercase"]), score_cell(scores["chrf"])]
        rows.append([*cells, f"{loss:.3f}", f"{seconds:,.0f}"])
    header = ["direction", "model", "parameters", "seeds", "BLEU", "to softmax", "lower case", "chrF"]
    table = markdown_table([*header, "validation loss", "seconds"], rows)
    signatures = {name: value for run in result["runs"] for name, value in run["signatures"].items()}
    lines = [f"`{signature}` ({name.replace('_', ', ')})" for name, signature in signatures.items()]
    parts = [
        table,
        f"sacreBLEU: {'; '.join(lines)}.",
        *(examples(name, groups) for name in dict.fromkeys(key[0] for key in groups)),
    ]
    return "\n\n".join(parts)


def score_cell(values: list[float]) -> str:
    """Mean, and the extremes if there are several."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def examples(direction: str, groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """The first test sentences in a direction, as every system with the first seed translates them."""
    firsts = {system: runs[0]["samples"] for (of, system), runs in groups.items() if of == direction}
    given = next(iter(firsts.values()))
    rows = [[name, *(sample[name] for sample in given)] for name in ("source", "reference")]
    rows += [[SYSTEMS[system], *(sample["translation"] for sample in samples)] for system, samples in firsts.items()]
    return markdown_table([direction, *(f"example {number}" for number in range(1, len(given) + 1))], rows)


def plot_losses(result: dict[str, Any], path: Path) -> None:
    """Validation loss against updates, for each direction."""
    groups = grouped(result)
    directions = list(dict.fromkeys(direction for direction, _ in groups))
    figure, axes = panels(1, len(directions), (6 * len(directions), 4.2), squeeze=False)
    for axis, direction in zip(axes[0], directions, strict=True):
        for index, system in enumerate(SYSTEMS):
            for number, run in enumerate(groups.get((direction, system), [])):
                label = SYSTEMS[system] if number == 0 else None
                style = {"color": "black", "linestyle": "--"} if system == "softmax" else {"color": f"C{index}"}
                axis.plot(run["curve"]["step"], run["curve"]["loss"], label=label, alpha=0.8, **style)
        axis.set_title(direction)
        axis.set_xlabel("updates")
        axis.legend(frameon=False)
        plain(axis)
    axes[0][0].set_ylabel("validation loss (nats per token)")
    save(figure, path)


COMMANDS = {"run": run, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
