"""Long reviews in equal time: `luna-mini-en` and its softmax twin, finetuned side by side on one thread each.

    python experiments/mini_long.py run --data DATA
    python experiments/mini_long.py report

`run` keeps IMDB's reviews of at least 500 words and finetunes both models at the same time, seed by seed; finished
seeds are skipped. Each model reads as many rows as it manages in the time of the other (`ROWS`); the seconds in the
table show how well that holds. DATA has the folder `imdb`. `report` writes JSON, a table and a plot.

Options that are not listed here, `--key value`, override those of the finetuning command.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mini
from datasets import load_dataset
from finetuning import IMDB, Finetuning, condense, score_cell
from mini_scores import SMALL
from running import launch_together, make_parser, publish, read_json, run_study
from study_plots import panels, plain, save

from luna_hf.scripting import UserError, markdown_table, progress

SCRIPT = "experiments/mini_long.py"
WORDS = 500
LENGTH = 2048
ROWS = {"luna-mini-en": 1964, "roberta-mini-en": 1230}  # that the models read in the same time
SETTING = {**SMALL, "per_device_train_batch_size": 8, "max_eval_samples": 500}
OWN = {"luna-mini-en": {"model_config": "classifier_pooling=mean"}}  # transformers' RoBERTa has no such choice
PROTOCOL = (
    f"Reviews of IMDB with at least {WORDS} words, cut at {LENGTH:,} tokens; one epoch. Both models are finetuned at "
    "the same time with one setting, on a thread each. Luna reads all of the reviews, the twin as many of them, drawn "
    "at random, as it manages in that time. Luna's classifier reads the mean of the states, that of transformers' "
    "RoBERTa the state of <s>. The weights after the last step count. Accuracy on 500 long reviews of the "
    "test split: one standard error is 2.2 points or less. From 512 tokens on, Luna's positions are repeated and those "
    "of the twin extrapolated."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    options, options.overrides = parser.parse_known_args(arguments)
    return options


def run(options: argparse.Namespace) -> None:
    """Finetune both models for every seed."""
    reviews = long_reviews(options.data / "imdb", options.runs / "mini-long" / "data")
    for seed in options.seeds:
        folders = {name: options.runs / "mini-long" / f"seed{seed}" / name for name in ROWS}
        if all((folder / "results.json").is_file() for folder in folders.values()):
            continue
        progress(f"long reviews, seed {seed}")
        commands = []
        for name, folder in folders.items():
            shutil.rmtree(folder, ignore_errors=True)  # a model that runs alone would be faster
            task = Finetuning(reviews.name, ROWS[name], 1, LENGTH, {**IMDB, **SETTING, **OWN.get(name, {})})
            words = task.words(reviews.parent, [mini.encoder_of(options, name, LENGTH)], [seed], folder)
            commands.append((task.script, [*words, *options.overrides]))
        launch_together(commands, options.threads)


def long_reviews(source: Path, folder: Path) -> Path:
    """Write the reviews of at least `WORDS` words, unless they are there, and return their folder.

    Raises:
        UserError: The reviews are missing.
    """
    for split in ("train", "test"):
        if not (source / f"{split}.parquet").is_file():
            raise UserError(f"There is no {source / split}.parquet. Name the folder that has `imdb`: --data DATA.")
        if not (folder / f"{split}.parquet").is_file():
            rows = load_dataset("parquet", data_files=str(source / f"{split}.parquet"), split="train")
            rows = rows.filter(lambda row: len(row["text"].split()) >= WORDS)
            folder.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(folder / f"{split}.parquet")
    return folder


def report(options: argparse.Namespace) -> None:
    """Write scores and seconds of the seeds of which both runs are finished.

    Raises:
        UserError: There is none.
    """
    models: dict[str, dict[str, list[Any]]] = {name: {} for name in ROWS}
    commands = []
    for path in sorted((options.runs / "mini-long").glob("seed*")):
        if all((path / name / "results.json").is_file() for name in ROWS):
            for name, own in models.items():
                results = read_json(path / name / "results.json")
                found = condense(results)
                (entry,) = found["models"].values()
                commands.append(found["command"])
                values = {"rows": found["train_rows"], "accuracy": entry["scores"][0]["accuracy"]}
                values |= {"seed": entry["seeds"][0], "seconds": entry["training_seconds"][0]}
                values |= {"tokens_per_second": entry["tokens_per_second"][0]}
                for field, value in values.items():
                    own.setdefault(field, []).append(value)
    if not commands:
        raise UserError(f"{options.runs / 'mini-long'} has no finished seed. Run `python {SCRIPT} run` first.")
    result = {"command": f"python {SCRIPT} report"}
    result |= {name: options.header[name] for name in ("date", "machine", "versions")}
    result |= {"finetuning": commands, "protocol": PROTOCOL, "setting": SETTING, "own": OWN, "models": models}
    publish(options.results, "long-reviews", "bf16", result, text, {"": plot})


def text(result: dict[str, Any]) -> str:
    """A row for each model."""
    header = ["model", "reviews read", "training seconds", "tokens a second", "accuracy (%)"]
    rows = []
    for name, own in result["models"].items():
        seconds, speed = (statistics.median(own[field]) for field in ("seconds", "tokens_per_second"))
        score = score_cell([100 * value for value in own["accuracy"]])
        rows.append([f"`{name}`", f"{own['rows'][0]:,}", f"{seconds:,.0f}", f"{speed:,.0f}", score])
    return markdown_table(header, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy against training seconds: a dot for each seed."""
    figure, axis = panels(1, 1, (5.5, 3.8))
    for name, own in result["models"].items():
        axis.plot(own["seconds"], [100 * value for value in own["accuracy"]], "o", label=name)
    axis.set_xlim(left=0)
    axis.set_xlabel("training seconds")
    axis.set_ylabel(f"accuracy on reviews of {WORDS} words or more (%)")
    axis.legend(frameon=False)
    plain(axis)
    save(figure, path)


COMMANDS = {"run": run, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
