"""The tasks of the small English models, and the table of their scores."""

import statistics
from pathlib import Path
from typing import Any

from finetuning import IMDB, SETTING, Finetuning, condense, score_cell
from running import publish, read_json
from study_plots import panels, plain, save

from luna_hf.scripting import UserError, markdown_table

# The models of the table; the last is the yardstick.
SHIPPED = ("luna-mini-en", "abc-mini-en", "roberta-mini-en")
SMALL = {"learning_rate": 3e-4, "warmup_steps": 0.06}
_RACE = {**SMALL, "dataset_config": "middle", "max_eval_samples": 200}
_IMDB = {**IMDB, **SMALL}


def _glue(name: str, rows: int, epochs: int, evaluated: int = 10**6) -> Finetuning:
    return Finetuning("glue", rows, epochs, 128, {**SMALL, "max_eval_samples": evaluated, "task_name": name})


TASKS = {
    "sst2": _glue("sst2", 20000, 1),
    "mrpc": _glue("mrpc", 3166, 3),
    "qnli": _glue("qnli", 4000, 1, evaluated=2000),
    "qqp": _glue("qqp", 8000, 1),
    "stsb": _glue("stsb", 5243, 6),
    "race-middle": Finetuning("race", 160, 1, 512, _RACE, "training/finetune_race.py"),
    "csqa": Finetuning("commonsense_qa", 2000, 1, 128, SMALL, "training/finetune_csqa.py"),
    "imdb-512": Finetuning("imdb", 600, 2, 512, _IMDB),
    "imdb-2048": Finetuning("imdb", 600, 2, 2048, _IMDB),
}
# Others repeat one of these: IMDB's two classes are of equal size, and RACE has one part.
METRICS = ("accuracy", "f1", "pearson", "spearmanr")
DATASETS = {
    "race-middle": ("ehovy/race", "middle"),
    "csqa": ("tau/commonsense_qa", "default"),
    "imdb-512": ("stanfordnlp/imdb", "plain_text"),
    "imdb-2048": ("stanfordnlp/imdb", "plain_text, 2,048 tokens"),
}
# Turc et al., "Well-Read Students Learn Better", 2019, and the table in google-research/bert: GLUE's test sets.
PUBLISHED = {
    "BERT-Tiny": {"sst2": {"accuracy": 83.2}, "mrpc": {"accuracy": 71.1, "f1": 81.1}, "qnli": {"accuracy": 81.5},
                  "qqp": {"accuracy": 83.4, "f1": 62.2}, "stsb": {"pearson": 74.3, "spearmanr": 73.6}},
    "BERT-Mini": {"sst2": {"accuracy": 85.9}, "mrpc": {"accuracy": 71.8, "f1": 81.1}, "qnli": {"accuracy": 84.1},
                  "qqp": {"accuracy": 86.2, "f1": 66.4}, "stsb": {"pearson": 75.4, "spearmanr": 73.3}},
}  # fmt: skip
PROTOCOL = (
    "Every model is finetuned on the same rows in the same order, with one setting for all models and tasks, and three "
    "seeds of head and order; there is one pretraining seed. The learning rate was chosen on MNLI, which is not in the "
    "table. The weights after the last step count; nothing is chosen by the scores. Scores are those of the dev split "
    "(QNLI: 2,000 rows, RACE: 200, CommonsenseQA and IMDB's test split: 1,000). Long texts are cut. For 2,048 tokens, "
    "Luna's positions are repeated, and those of the twin extrapolated. The machine was shared, under an uneven load, "
    "so seconds are not comparable. Published figures are those of GLUE's test sets."
)


def publish_scores(runs: Path, results: Path, header: dict[str, Any]) -> None:
    """Write the scores of all finished runs as JSON, Markdown and plot; those of others stay as they were published.

    Raises:
        UserError: There is no finished run.
    """
    tasks: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for model in SHIPPED:
        for task in TASKS:
            path = runs / model / "finetune" / task / "results.json"
            if not path.is_file():
                continue
            found = condense(read_json(path))
            (own,) = found.pop("models").values()
            tasks[task] = found
            rows += _rows(model, task, own)
    if not rows:
        raise UserError(f"{runs} has no finished run. Run `python experiments/mini.py finetune` first.")
    for path in results.glob("mini-scores-*.json"):
        rows += _published(read_json(path), tasks, rows)
    rows.sort(key=lambda row: (SHIPPED.index(row["model"]), list(TASKS).index(row["task"])))
    tasks = {task: tasks[task] for task in TASKS if task in tasks}
    result = {
        **{name: header[name] for name in ("command", "date", "machine", "versions")},
        "protocol": PROTOCOL,
        "setting": {**SETTING, **SMALL},
        "tasks": tasks,
        "rows": rows,
    }
    publish(results, "mini-scores", "bf16", result, table, {"": plot})


def _published(
    result: dict[str, Any], tasks: dict[str, dict[str, Any]], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of an earlier result that no run replaces, of the same protocol; their tasks join `tasks`."""
    new, kept = {(row["model"], row["task"]) for row in rows}, []
    for row in result["rows"]:
        about = result["tasks"][row["task"]]
        same = all(
            about[name] == tasks.get(row["task"], about)[name] for name in ("train_rows", "epochs", "max_length")
        )
        if same and (row["model"], row["task"]) not in new:
            tasks.setdefault(row["task"], about)
            kept.append(row)
    return kept


def _rows(model: str, task: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each metric of a task: a score from 0 to 1 for each seed."""
    dataset, config = DATASETS.get(task, ("nyu-mll/glue", task))
    kind = "text-classification" if TASKS[task].script == Finetuning.script else "multiple-choice"
    shared = {"model": model, "task": task, "type": kind, "dataset": dataset, "config": config}
    shared |= {"split": "test" if task.startswith("imdb") else "validation", "seeds": own["seeds"]}
    shared |= {"max_length": TASKS[task].max_length, "training_seconds": own["training_seconds"]}
    metrics = [metric for metric in own["scores"][0] if metric in METRICS]
    return [{**shared, "metric": metric, "values": [score[metric] for score in own["scores"]]} for metric in metrics]


def table(result: dict[str, Any]) -> str:
    """A Markdown row for each score, and the average over the tasks of at most 512 tokens."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in result["rows"]:
        cells.setdefault((row["task"], row["metric"]), {})[row["model"]] = [100 * value for value in row["values"]]
    models = [name for name in SHIPPED if any(name in own for own in cells.values())]
    lines = []
    for (task, metric), own in cells.items():
        about = result["tasks"][task]
        line = [task, metric, f"{about['max_length']:,}", f"{about['train_rows']:,} x {about['epochs']:g}"]
        line += [score_cell(own[model]) if model in own else "-" for model in models]
        lines.append([*line, *(str(known.get(task, {}).get(metric, "-")) for known in PUBLISHED.values())])
    lines.append(["**average**", "", "up to 512", "", *(f"{average(cells, model):.1f}" for model in models), "-", "-"])
    return markdown_table(["task", "score", "tokens", "rows x epochs", *models, *PUBLISHED], lines)


def average(cells: dict[tuple[str, str], dict[str, list[float]]], model: str) -> float:
    """Mean over the tasks of at most 512 tokens that all models have; a task's scores count as one, their mean."""
    tasks: dict[str, list[float]] = {}
    models = {name for own in cells.values() for name in own}
    for (task, _), own in cells.items():
        if TASKS[task].max_length <= 512 and set(own) == models:
            tasks.setdefault(task, []).append(statistics.mean(own[model]))
    return statistics.mean(map(statistics.mean, tasks.values())) if tasks else float("nan")


def plot(result: dict[str, Any], path: Path) -> None:
    """A group of bars for each task's first score: mean over the seeds, and a dot for each seed."""
    tasks = list(result["tasks"])
    models = [name for name in SHIPPED if any(row["model"] == name for row in result["rows"])]
    figure, axis = panels(1, 1, (11, 4.2))
    for number, model in enumerate(models):
        for place, task in enumerate(tasks):
            scores = [100 * value for value in first_score(result, model, task)]
            if scores:
                left = place + 0.27 * (number - (len(models) - 1) / 2)
                label = model if task == tasks[0] else None
                axis.bar(left, statistics.mean(scores), 0.25, color=f"C{number}", alpha=0.75, label=label)
                axis.plot([left] * len(scores), scores, "k.", markersize=4)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_ylabel("score (%)")
    axis.legend(frameon=False, ncols=len(models))
    plain(axis)
    save(figure, path)


def first_score(result: dict[str, Any], model: str, task: str) -> list[float]:
    """A model's scores by seed in the first metric of a task; empty if it has none."""
    rows = [row for row in result["rows"] if (row["model"], row["task"]) == (model, task)]
    return rows[0]["values"] if rows else []
