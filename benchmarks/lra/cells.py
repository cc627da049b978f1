"""One cell of the table: a model on a task, trained with several learning rates and seeds, on the Trainer.

    <output>/<recipe>/<task>/<model>/
        lr<rate>-seed<seed>/   settings.json, checkpoint-* while it runs; then model.safetensors and run.json
        cell.json, curve.png   the chosen learning rate, its scores, and the curves of all runs

A run that was killed continues from its last checkpoint as if nothing had happened; finished ones are kept. Validation
chooses the checkpoint of each run, and the learning rate. The test split is read for that rate alone, once a run.
"""

import dataclasses
import hashlib
import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import safetensors.torch
import torch
from datasets import Dataset
from tasks.arguments import FinetuneTrainingArguments
from tasks.labels import SINGLE_LABEL
from tasks.runs import train
from tasks.trainer import Diverged, FinetuneTrainer, checkpoints, find_checkpoint
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed

from luna_hf.scripting import UserError, progress, read_json, write_json

from .models import PLUGINS, build
from .recipes import Recipe
from .tasks import Task

SETTINGS, RUN, TEST, WEIGHTS = "settings.json", "run.json", "test.json", "model.safetensors"
Result = dict[str, Any]


@dataclass
class Cell:
    """A model on a task; `splits` are train, validation and test."""

    task: Task
    splits: dict[str, Dataset]
    model: str
    recipe: Recipe
    folder: Path
    bf16: bool = False

    def __post_init__(self) -> None:
        self.digests = {split: digest(rows) for split, rows in self.splits.items()}

    def run_folder(self, rate: float, seed: int) -> Path:
        """The folder of a run."""
        return self.folder / f"lr{rate:g}-seed{seed}"


# ---- rows ----


def columns(task: Task) -> tuple[str, ...]:
    """The columns that hold a row's inputs."""
    return {"tokens": ("input_ids",), "pixels": ("pixel_values",), "pairs": ("input_ids", "input_ids_2")}[task.inputs]


def lengths(rows: Dataset, task: Task) -> list[int]:
    """The longest input of every row."""
    found: list[int] = []
    for batch in rows.with_format("arrow").iter(1000):
        parts = [pc.list_value_length(batch[name]).to_numpy(zero_copy_only=False) for name in columns(task)]
        found += np.max(parts, 0).tolist()
    return found


def digest(rows: Dataset) -> str:
    """Hash of a split; a second for 100 million tokens."""
    found = hashlib.blake2b(digest_size=16)
    for batch in rows.with_format("arrow").iter(1000):
        for column in batch.itercolumns():
            values = column.combine_chunks()
            if hasattr(values, "flatten"):
                found.update(pc.list_value_length(values).to_numpy(zero_copy_only=False).tobytes())
                values = values.flatten()
            found.update(values.to_numpy(zero_copy_only=False).tobytes())
    return found.hexdigest()


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows: inputs padded with 0 to the longest, masks where something is padded, and labels."""
    batch = {"labels": torch.tensor([row["label"] for row in rows])}
    for name in ("input_ids", "input_ids_2", "pixel_values"):
        if name not in rows[0]:
            continue
        parts = [np.asarray(row[name]) for row in rows]
        sizes = torch.tensor([len(part) for part in parts])
        padded = np.zeros((len(parts), int(sizes.max())), np.int64)
        for place, part in zip(padded, parts, strict=True):
            place[: len(part)] = part
        batch[name] = torch.from_numpy(padded)
        if sizes.min() < sizes.max():
            mask = torch.arange(padded.shape[1]) < sizes[:, None]
            batch[name.replace("input_ids", "attention_mask")] = mask.long()
    return batch


def majority(cell: Cell) -> float:
    """What guessing the most frequent training label scores on the validation split."""
    values, counts = np.unique(cell.splits["train"]["label"], return_counts=True)
    return float(np.mean(np.asarray(cell.splits["validation"]["label"]) == values[counts.argmax()]))


# ---- runs ----


class Progress(TrainerCallback):
    """A line for every evaluation."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Print the step, the training loss since the last evaluation, and the validation accuracy."""
        loss = next((row["loss"] for row in reversed(state.log_history) if "loss" in row), math.nan)
        accuracy = metrics.get("eval_accuracy", math.nan)
        progress(f"  {state.global_step:,} of {state.max_steps:,} updates: loss {loss:.4f}, validation {accuracy:.2%}")


def make_trainer(cell: Cell, rate: float, seed: int, folder: Path) -> FinetuneTrainer:
    """A Trainer with a new model."""
    set_seed(seed)
    recipe, train = cell.recipe, cell.splits["train"]
    same = ("weight_decay", "warmup_steps", "adam_beta2", "adam_epsilon", "max_grad_norm")
    arguments = FinetuneTrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        learning_rate=rate,
        lr_scheduler_type=recipe.scheduler,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.eval_batch_size,
        eval_strategy="steps",
        save_strategy="steps",
        **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), recipe.eval_steps),
        **{name: getattr(recipe, name) for name in same},
        metric_for_best_model="accuracy",
        greater_is_better=True,
        label_names=["labels"],
        bf16=cell.bf16,
        seed=seed,
        data_seed=seed,
        report_to="none",
        disable_tqdm=True,
    )
    arguments.include_num_input_tokens_seen = "no"
    trainer = FinetuneTrainer(
        problem_type=SINGLE_LABEL,
        lengths=lengths(train, cell.task),
        scores=lambda logits, labels: {"accuracy": float((logits.argmax(-1) == labels).mean())},
        model=build(cell.model, cell.task, recipe),
        args=arguments,
        train_dataset=train.with_format("numpy"),
        eval_dataset=sorted_by_length(cell.splits["validation"], cell.task),
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress())
    return trainer


def sorted_by_length(rows: Dataset, task: Task) -> Dataset:
    """The rows by falling length, so that batches hold little padding."""
    return rows.select(np.argsort(-np.asarray(lengths(rows, task)), kind="stable")).with_format("numpy")


def settings(cell: Cell, rate: float, seed: int) -> dict[str, Any]:
    """Everything that decides what a run computes."""
    own = {"model": cell.model, "rate": rate, "seed": seed, "bf16": cell.bf16, "plugin": PLUGINS.get(cell.model)}
    task = {f"task_{name}": value for name, value in dataclasses.asdict(cell.task).items()}
    recipe = {name: value for name, value in dataclasses.asdict(cell.recipe).items() if name != "learning_rates"}
    return {**own, **task, **recipe, **{f"data_{split}": found for split, found in cell.digests.items()}}


def check_settings(folder: Path, wanted: dict[str, Any]) -> None:
    """Write the settings of a run, or compare them with those that the folder has.

    Raises:
        UserError: They differ.
    """
    path = folder / SETTINGS
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, wanted)
        return
    before = read(path)
    changed = [name for name in wanted if before.get(name) != wanted[name]]
    changed = [f"{name} {before.get(name)!r} instead of {wanted[name]!r}" for name in changed]
    if changed:
        raise UserError(f"{folder} holds a run with {', '.join(changed[:3])}. Choose another --output, or remove it.")


def read(path: Path) -> Result:
    """The content of a JSON file."""
    return read_json(path)


def train_run(cell: Cell, rate: float, seed: int) -> Result:
    """Train one model unless that is done, from where a kill has left it: the content of `run.json`.

    Raises:
        UserError: The folder has a run with other settings.
    """
    folder = cell.run_folder(rate, seed)
    check_settings(folder, settings(cell, rate, seed))
    if not (folder / RUN).is_file():
        progress(f"{cell.model} on {cell.task.name}, learning rate {rate:g}, seed {seed}")
        trainer = make_trainer(cell, rate, seed, folder)
        start = find_checkpoint(folder, progress)
        result: Result = {"rate": rate, "seed": seed, "validation": None, "diverged": None}
        try:
            train(trainer, start, patience=0)
            # Of the best weights, which were just loaded: they must score as they did.
            result["validation"] = accuracy(trainer, trainer.eval_dataset)
            result["best_step"] = trainer.state.best_global_step
            safetensors.torch.save_file(trainer.model.state_dict(), folder / WEIGHTS)
        except Diverged as error:
            result["diverged"] = str(error)
        write_json(folder / RUN, {**result, **describe(cell, trainer)})
    for path in checkpoints(folder):
        shutil.rmtree(path)
    return read(folder / RUN)


def accuracy(trainer: FinetuneTrainer, rows: Dataset) -> float:
    """Share of the rows that the trainer's model classifies correctly."""
    return trainer.predict(rows).metrics["test_accuracy"]


def describe(cell: Cell, trainer: FinetuneTrainer) -> Result:
    """What a run cost, and its learning curve."""
    steps, seconds = trainer.state.global_step, trainer.seconds
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "steps": steps,
        "seconds": round(seconds, 2),
        "rows_per_second": steps * cell.recipe.batch_size / max(seconds, 1e-9),
        "curve": curve(trainer.state.log_history),
    }


def curve(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Step, mean training loss since the step before, and validation loss and accuracy."""
    rows: dict[int, dict[str, float]] = {}
    names = {"loss": "loss", "eval_loss": "validation_loss", "eval_accuracy": "accuracy"}
    for entry in log:
        row = rows.setdefault(int(entry["step"]), {"step": int(entry["step"])})
        row |= {new: entry[old] for old, new in names.items() if old in entry}
    return [row for row in rows.values() if "accuracy" in row]


def test_run(cell: Cell, run: Result) -> float:
    """Accuracy of a finished run on the test split, which is read the first time only."""
    folder = cell.run_folder(run["rate"], run["seed"])
    path = folder / TEST
    if not path.is_file():
        trainer = make_trainer(cell, run["rate"], run["seed"], folder)
        trainer.model.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
        write_json(path, {"accuracy": accuracy(trainer, sorted_by_length(cell.splits["test"], cell.task))})
    return read(path)["accuracy"]


# ---- cells ----


def finished_runs(cell: Cell) -> list[Result]:
    """All finished runs of a cell, also of earlier commands."""
    runs = []
    for path in sorted(cell.folder.glob(f"lr*-seed*/{RUN}")):
        runs.append(read(path))
        check_settings(path.parent, settings(cell, runs[-1]["rate"], runs[-1]["seed"]))
    return runs


def best_rate(runs: list[Result]) -> float | None:
    """The learning rate with the best mean validation accuracy over its seeds; `None` if every run diverged."""
    scores: dict[float, list[float]] = {}
    for run in runs:
        scores.setdefault(run["rate"], []).append(-1.0 if run["validation"] is None else run["validation"])
    rate = max(scores, key=lambda rate: statistics.mean(scores[rate]))
    return rate if max(scores[rate]) >= 0 else None


def run_cell(cell: Cell, rates: list[float], seeds: list[int]) -> Result:
    """Train what is missing, choose the learning rate, and test it: what `cell.json` holds besides its header."""
    for rate in rates:
        for seed in seeds:
            train_run(cell, rate, seed)
    runs = finished_runs(cell)
    rate = best_rate(runs)
    for run in runs:
        if run["rate"] == rate and run["validation"] is not None:
            run["test"] = test_run(cell, run)
    return {
        "task": dataclasses.asdict(cell.task),
        "rows": {split: len(rows) for split, rows in cell.splits.items()},
        "model": cell.model,
        "recipe": dataclasses.asdict(cell.recipe),
        "bf16": cell.bf16,
        "majority": majority(cell),
        "rate": rate,
        "runs": runs,
    }
