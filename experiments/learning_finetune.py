"""Finetuning of the pretrained systems of `learning.py` on tasks, through the scripts of `training/`, and its table."""

import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finetune_csqa
import finetune_glue
import torch
from learning_plots import plot_scores
from measuring import progress, write_json

from luna_hf.scripting import UserError

# One setting for all models, chosen for none of them, and the last weights count: nothing is selected on the dev sets.
SETTING = {
    "learning_rate": 1e-3,  # these models are small and were trained with 3e-3
    "per_device_train_batch_size": 32,
    "weight_decay": 0.01,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "bf16": True,
    "use_cpu": not torch.cuda.is_available(),
    "disable_tqdm": True,
}
PROTOCOL = (
    "The pretrained systems (one pretraining seed), the same rows in the same order, the same setting for all models "
    "and tasks, two seeds of head and order; the weights after the last step count, nothing is chosen by the scores. "
    "Long texts are cut, which the notes count; the positions of pretraining are repeated to the length of the task. "
    "Scores are those of the dev split (IMDB: test), of at most 1,000 rows. Seconds are those of a shared "
    "machine and not comparable."
)


@dataclass(frozen=True)
class Finetuning:
    """A task: its script, folder of its data, further options, and as many rows and epochs as fit a CPU."""

    main: Callable[[list[str]], int]
    folder: str
    options: dict[str, Any]
    rows: int
    epochs: int
    max_length: int


_IMDB = {"text_columns": "text", "validation_split": "test"}
TASKS = {
    "sst2": Finetuning(finetune_glue.main, "glue", {"task_name": "sst2"}, rows=8000, epochs=2, max_length=128),
    "mrpc": Finetuning(finetune_glue.main, "glue", {"task_name": "mrpc"}, rows=4000, epochs=3, max_length=256),
    "qnli": Finetuning(finetune_glue.main, "glue", {"task_name": "qnli"}, rows=4000, epochs=2, max_length=256),
    "qqp": Finetuning(finetune_glue.main, "glue", {"task_name": "qqp"}, rows=8000, epochs=2, max_length=128),
    "csqa": Finetuning(finetune_csqa.main, "commonsense_qa", {}, rows=3000, epochs=2, max_length=128),
    "imdb-512": Finetuning(finetune_glue.main, "imdb", _IMDB, rows=1500, epochs=2, max_length=512),
    "imdb-2048": Finetuning(finetune_glue.main, "imdb", _IMDB, rows=1500, epochs=2, max_length=2048),
}
EVALUATED = 1000  # rows of the dev split at most: one standard error is 1.6 points or less


def command_words(task: str, data: Path, models: list[Path], seeds: list[int], folder: Path) -> list[str]:
    """Command line of the task's script."""
    own = TASKS[task]
    options = {
        "dataset_name": data / own.folder,
        "output_dir": folder,
        "max_length": own.max_length,
        "max_train_samples": own.rows,
        "max_eval_samples": EVALUATED,
        "num_train_epochs": own.epochs,
        **SETTING,
        **own.options,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["--model_name_or_path", *map(str, models), "--seeds", *map(str, seeds), *words]


def finetune(tasks: list[str], data: Path, models: list[Path], seeds: list[int], folder: Path, more: list[str]) -> None:
    """Run the tasks that are not finished.

    Args:
        tasks: names in `TASKS`.
        data: folder with the tasks' folders.
        models: pretrained folders.
        seeds: of head, order and dropout.
        folder: a folder for each task is made in it.
        more: further options of the scripts, which win.

    Raises:
        UserError: A model is not there; or a script failed, and has said why.
    """
    for model in models:
        if not (model / "config.json").is_file():
            raise UserError(f"There is no pretrained model in {model}. Run `pretrain` with that system first.")
    for task in tasks:
        progress(f"finetuning: {task}")
        if TASKS[task].main([*command_words(task, data, models, seeds, folder / task), *more]):
            raise UserError(f"Finetuning on {task} failed.")


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """`results.json` of every finished task, in the order of `TASKS`."""
    paths = {task: folder / task / "results.json" for task in TASKS}
    return {task: json.loads(path.read_text(encoding="utf-8")) for task, path in paths.items() if path.is_file()}


def condense(task: str, result: dict[str, Any]) -> dict[str, Any]:
    """What the report keeps of a task: every score of every seed, cost, and what was cut."""
    models: dict[str, dict[str, Any]] = {}
    split = result["development"]
    for run in result["runs"]:
        system = run["model"].rpartition("-seed")[0] or run["model"]
        own = models.setdefault(system, {"seeds": [], "scores": [], "training_seconds": [], "tokens_per_second": []})
        own["seeds"].append(run["seed"])
        own["scores"].append(run["scores"][split])
        own["training_seconds"].append(run["training_seconds"])
        own["tokens_per_second"].append(run["tokens_per_second"])
        own["notes"] = run["notes"]
    first = result["runs"][0]
    script = f"training/{TASKS[task].main.__module__}.py"
    return {
        "command": re.sub(r"benchmarks/\w+\.py", script, result["command"]),
        "metric": result["main_metric"],
        "train_rows": first["train_rows"],
        "epochs": first["epochs"],
        "max_length": first["max_length"],
        "models": models,
    }


def write_report(tasks: dict[str, dict[str, Any]], shared: dict[str, Any], command: str, path: Path) -> None:
    """Write and print what finetuning gave: JSON, Markdown and plot.

    Args:
        tasks: from `read_results`.
        shared: date, machine and versions of the pretraining.
        command: that makes the files.
        path: of the JSON file; the others stand beside it.
    """
    result = {
        "command": command,
        **shared,
        "protocol": PROTOCOL,
        "setting": SETTING,
        "tasks": {task: condense(task, found) for task, found in tasks.items()},
    }
    write_json(path, result)
    condensed = json.loads(path.read_text(encoding="utf-8"))["tasks"]  # table and plot show what the file says
    text = table(condensed)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    plot_scores(condensed, path.with_suffix(".png"))
    print(text)


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown row for every score that counts: every model's mean over the seeds in per cent, with the extremes."""
    systems = list(dict.fromkeys(system for result in results.values() for system in result["models"]))
    rows = [
        "| task | score | tokens | rows x epochs | " + " | ".join(systems) + " |",
        "| --- " * (len(systems) + 4) + "|",
    ]
    for task, result in results.items():
        own = result["models"]
        parts = [name for name in own[systems[0]]["scores"][0] if name != "mean"]
        names = parts if result["metric"] == "mean" else [result["metric"]]
        for name in names:
            cells = [
                task,
                name,
                f"{result['max_length']:,}",
                f"{result['train_rows']:,} x {result['epochs']:g}",
                *(score_cell([score[name] for score in own[system]["scores"]]) for system in systems),
            ]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def score_cell(values: list[float]) -> str:
    """Mean and extremes in per cent."""
    percent = [100 * value for value in values]
    return f"{statistics.mean(percent):.1f} ({min(percent):.1f} to {max(percent):.1f})"
