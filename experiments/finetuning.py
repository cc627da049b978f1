"""Finetuning of a study's pretrained models with the commands of `training/`, and the table of the scores."""

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from running import DEVICE, launch, option_words, publish, read_json
from study_plots import plot_scores

from luna_hf.scripting import UserError, markdown_table, progress

# One setting for all models, and the last weights count: nothing is chosen by dev scores.
SETTING = {
    "learning_rate": 1e-3,  # these models are small and were pretrained at 3e-3
    "per_device_train_batch_size": 32,
    "weight_decay": 0.01,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "bf16": True,
    "use_cpu": DEVICE == "cpu",
    "disable_tqdm": True,
}
PROTOCOL = (
    "The pretrained systems (one pretraining seed), the same rows in the same order, one setting for all models and "
    "tasks, two seeds of head and order. The weights after the last step count; nothing is chosen by the scores. Long "
    "texts are cut, as the notes state, and the positions of pretraining are repeated to the length of the task. "
    "Scores are those of the dev split (IMDB: test), of at most 1,000 rows. The machine was shared, so seconds are not "
    "comparable."
)
EVALUATED = 1000  # rows of the dev split at most: one standard error is 1.6 points or less


@dataclass(frozen=True)
class Finetuning:
    """A task: folder of its data, limits that fit a CPU, further options, and its command."""

    folder: str
    rows: int
    epochs: int
    max_length: int
    options: dict[str, Any] = field(default_factory=dict)
    script: str = "training/finetune_glue.py"

    def words(self, data: Path, models: list[Path], seeds: list[int], folder: Path) -> list[str]:
        """Command line for these models and seeds."""
        options = {
            "dataset_name": data / self.folder,
            "output_dir": folder,
            "max_length": self.max_length,
            "max_train_samples": self.rows,
            "max_eval_samples": EVALUATED,
            "num_train_epochs": self.epochs,
            **SETTING,
            **self.options,
        }
        lists = ["--model_name_or_path", *map(str, models), "--seeds", *map(str, seeds)]
        return [*lists, *option_words(options)]


IMDB = {"text_columns": "text", "validation_split": "test"}
TASKS = {
    "sst2": Finetuning("glue", 8000, 2, 128, {"task_name": "sst2"}),
    "mrpc": Finetuning("glue", 4000, 3, 256, {"task_name": "mrpc"}),
    "qnli": Finetuning("glue", 4000, 2, 256, {"task_name": "qnli"}),
    "qqp": Finetuning("glue", 8000, 2, 128, {"task_name": "qqp"}),
    "csqa": Finetuning("commonsense_qa", 3000, 2, 128, script="training/finetune_csqa.py"),
    "imdb-512": Finetuning("imdb", 1500, 2, 512, IMDB),
    "imdb-2048": Finetuning("imdb", 1500, 2, 2048, IMDB),
}


def finetune(options: argparse.Namespace, models: list[Path], tasks: dict[str, Finetuning] = TASKS) -> None:
    """Finetune pretrained folders on the chosen ones of `tasks`; finished runs are skipped, overrides win.

    Raises:
        UserError: A model is missing, or a command failed.
    """
    for model in models:
        if not (model / "config.json").is_file():
            raise UserError(f"There is no pretrained model in {model}. Pretrain it first.")
    for task in options.tasks:
        progress(f"finetuning: {task}")
        folder = options.runs / "finetune" / task
        words = tasks[task].words(options.data, models, options.seeds or [0, 1], folder)
        launch(tasks[task].script, [*words, *options.overrides], options.threads)


def report(options: argparse.Namespace, subject: str, shared: dict[str, Any]) -> None:
    """Write the scores of the finished tasks, if any, as JSON, Markdown and plot; `shared` as of `shared_fields`."""
    paths = {task: options.runs / "finetune" / task / "results.json" for task in TASKS}
    tasks = {task: condense(read_json(path)) for task, path in paths.items() if path.is_file()}
    if tasks:
        head = {name: shared[name] for name in ("command", "date", "machine", "versions")}
        result = {**head, "protocol": PROTOCOL, "setting": SETTING, "tasks": tasks}
        publish(options.results, subject, shared["recipe"]["mixed_precision"], result, table, {"": plot_scores})


def condense(result: dict[str, Any]) -> dict[str, Any]:
    """A task's entry in the result file: every score of every seed, cost, and what was cut.

    Raises:
        UserError: A run diverged.
    """
    models: dict[str, dict[str, Any]] = {}
    split = result["development"]
    for run in result["runs"]:
        system = run["model"].rpartition("-seed")[0] or run["model"]
        if run.get("diverged"):
            raise UserError(f"{run['model']} diverged with seed {run['seed']}: there is no mean over the seeds.")
        own = models.setdefault(system, {})
        figures = {"seeds": run["seed"], "scores": run["scores"][split]}
        figures |= {name: run[name] for name in ("training_seconds", "tokens_per_second")}
        for name, value in figures.items():
            own.setdefault(name, []).append(value)
        own["notes"] = run["notes"]
    shared = {name: result["runs"][0][name] for name in ("train_rows", "epochs", "max_length")}
    return {"command": result["command"], "metric": result["main_metric"], **shared, "models": models}


def table(result: dict[str, Any]) -> str:
    """A Markdown row for each score: every model's mean over the seeds in per cent, with the extremes."""
    tasks = result["tasks"]
    systems = list(dict.fromkeys(system for task in tasks.values() for system in task["models"]))
    rows = []
    for name, task in tasks.items():
        own = task["models"]
        parts = [score for score in own[systems[0]]["scores"][0] if score != "mean"]
        for score in parts if task["metric"] == "mean" else [task["metric"]]:
            cells = [f"{task['max_length']:,}", f"{task['train_rows']:,} x {task['epochs']:g}"]
            cells += [score_cell([100 * scores[score] for scores in own[system]["scores"]]) for system in systems]
            rows.append([name, score, *cells])
    return markdown_table(["task", "score", "tokens", "rows x epochs", *systems], rows)


def score_cell(percent: list[float]) -> str:
    """Mean, and the extremes if there are several."""
    if len(percent) == 1:
        return f"{percent[0]:.1f}"
    return f"{statistics.mean(percent):.1f} ({min(percent):.1f} to {max(percent):.1f})"
