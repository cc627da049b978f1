"""Long reviews, segment by segment: is a document read better than its beginning or its end?

    python experiments/segment_reviews.py run --data DATA
    python experiments/segment_reviews.py report --data DATA

`run` finetunes `checkpoints/luna-mini-en` on IMDB's reviews of at least 500 words: once in segments whose packed states
pass on, and once on the first segment alone. Finished runs are skipped. `report` streams the test split's long reviews
through both with `stream_document` and writes accuracy by length as JSON, a table and a plot. DATA has the folder
`imdb`.

Options of `run` that are not listed here, `--key value`, override those of the finetuning command.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from finetuning import IMDB, Finetuning
from mini_long import long_reviews
from mini_scores import SMALL
from running import ROOT, launch, make_parser, publish, read_json, run_study
from study_plots import panels, plain, save
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from luna_hf import stream_document
from luna_hf.scripting import UserError, markdown_table, progress

SCRIPT = "experiments/segment_reviews.py"
START = ROOT / "checkpoints" / "luna-mini-en"
SEGMENT, LONGEST = 256, 2048  # tokens of a segment, and of a training row
EPOCHS, ROWS = 2, 1964
POOLING = "classifier_pooling=packed_mean"
SYSTEMS = {
    "memory": (LONGEST, f"segment_length={SEGMENT} packed_self_attention=true {POOLING}"),
    "cut": (SEGMENT, POOLING),
}
# What of a review which model reads.
READINGS = {
    "all": ("memory", "all segments, P passed on"),
    "first": ("memory", "the same model, first segment"),
    "last": ("memory", "the same model, last segment"),
    "cut": ("cut", "trained on first segments, first segment"),
}
LENGTHS = (0, 1024, 2048)  # tokens from which a group of reviews begins
SETTING = {**IMDB, **SMALL, "per_device_train_batch_size": 8, "max_eval_samples": 100}
PROTOCOL = (
    f"`luna-mini-en` is finetuned for {EPOCHS} epochs on IMDB's reviews of 500 words or more, in segments of "
    f"{SEGMENT} tokens, {LONGEST:,} tokens at most; or on their first {SEGMENT} tokens. The classifier reads the mean "
    "of the packed states. Accuracy on reviews of 500 words or more of the test split, of any length; nothing is "
    "chosen by it."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/segment-reviews")
    parser.add_argument("--reviews", type=int, default=10**6, help="reviews to evaluate at most; default: all")
    options, options.overrides = parser.parse_known_args(arguments)
    return options


def run(options: argparse.Namespace) -> None:
    """Finetune both systems unless that is done."""
    reviews = long_reviews(options.data / "imdb", options.runs / "data")
    for system, (length, fields) in SYSTEMS.items():
        folder = options.runs / system
        if not (folder / "results.json").is_file():
            progress(system)
            task = Finetuning(reviews.name, ROWS, EPOCHS, length, SETTING)
            words = task.words(reviews.parent, [START], [0], folder)
            words += ["--model_config", *fields.split(), *options.overrides]
            launch(task.script, words, options.threads)


def report(options: argparse.Namespace) -> None:
    """Measure the finished runs and write their accuracies.

    Raises:
        UserError: A run or the test split is missing.
    """
    folders = {system: options.runs / system for system in SYSTEMS}
    if missing := [system for system, folder in folders.items() if not (folder / "results.json").is_file()]:
        raise UserError(f"{', '.join(missing)} is not trained. Run `python {SCRIPT} run` first.")
    if options.data is None:
        raise UserError("`report` reads the test split: name the folder that has `imdb`, --data DATA.")
    path = long_reviews(options.data / "imdb", options.runs / "data") / "test.parquet"
    rows = load_dataset("parquet", data_files=str(path), split="train")
    rows = rows.select(range(min(options.reviews, len(rows))))
    result = {"command": f"python {SCRIPT} report"}
    result |= {name: options.header[name] for name in ("date", "machine", "versions")}
    runs = [read_json(folder / "results.json") for folder in folders.values()]
    result |= {"finetuning": [run["command"] for run in runs], "protocol": PROTOCOL}
    result |= {"setting": SETTING, **measure(rows["text"], rows["label"], folders)}
    publish(options.results, "segment-reviews", "bf16", result, text, {"": plot})


def measure(texts: Sequence[str], labels: Sequence[int], folders: dict[str, Path]) -> dict[str, Any]:
    """Tokens of each review, and for each reading whether its class is right."""
    tokenizer = AutoTokenizer.from_pretrained(folders["memory"])
    models = {
        system: AutoModelForSequenceClassification.from_pretrained(folder).eval() for system, folder in folders.items()
    }
    tokens, right = [], {name: [] for name in READINGS}
    for number, (review, label) in enumerate(zip(texts, labels, strict=True), 1):
        ids = tokenizer(review, return_tensors="pt", verbose=False).input_ids
        tokens.append(ids.shape[1])
        *_, whole = stream_document(models["memory"], tokenizer, review)
        found = {"all": whole.logits}
        parts = {"first": ids[:, :SEGMENT], "last": ids[:, -SEGMENT:], "cut": ids[:, :SEGMENT]}
        found |= {name: classify(models[READINGS[name][0]], part) for name, part in parts.items()}
        for name, logits in found.items():
            right[name].append(int(logits.argmax(-1).item() == label))
        if number % 200 == 0:
            progress(f"{number:,} of {len(texts):,} reviews")
    return {"tokens": tokens, "right": right}


@torch.inference_mode()
def classify(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits (1, classes) of one segment."""
    return model(ids).logits


def groups(result: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Name and reviews of each group of lengths that has any."""
    ends = [*LENGTHS[1:], None]
    names = [f"up to {LENGTHS[1]:,}", *(f"{low + 1:,} to {high:,}" for low, high in itertools.pairwise(LENGTHS[1:]))]
    found = []
    for name, low, high in zip([*names, f"over {LENGTHS[-1]:,}"], LENGTHS, ends, strict=True):
        chosen = [row for row, tokens in enumerate(result["tokens"]) if low < tokens <= (high or tokens)]
        if chosen:
            found.append((name, chosen))
    return found


def accuracy(right: list[int], rows: list[int]) -> tuple[float, float]:
    """Accuracy of some rows and its standard error, in per cent."""
    mean = statistics.mean(right[row] for row in rows)
    return 100 * mean, 100 * (mean * (1 - mean) / len(rows)) ** 0.5


def text(result: dict[str, Any]) -> str:
    """A row for each reading, a column for each group of lengths."""
    found = groups(result)
    rows = []
    for name, right in result["right"].items():
        scores = [accuracy(right, chosen) for _, chosen in found]
        rows.append([READINGS[name][1], *(f"{mean:.1f} ± {error:.1f}" for mean, error in scores)])
    return markdown_table(["reading", *(f"{name} tokens ({len(chosen):,} reviews)" for name, chosen in found)], rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy against length, with standard errors."""
    figure, ((axis,),) = panels(1, 1, (7, 4.2), squeeze=False)
    found = groups(result)
    for index, (name, right) in enumerate(result["right"].items()):
        means, errors = zip(*(accuracy(right, chosen) for _, chosen in found), strict=True)
        places = [place + 0.06 * (index - 1.5) for place in range(len(found))]
        axis.errorbar(places, means, errors, fmt="o", capsize=3, label=READINGS[name][1])
    axis.set_xticks(range(len(found)), [f"{name} tokens" for name, _ in found])
    axis.set_ylabel("accuracy (%)")
    axis.legend(frameon=False)
    plain(axis)
    save(figure, path)


COMMANDS = {"run": run, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
