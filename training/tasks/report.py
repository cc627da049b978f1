"""What finetuning leaves to be read: the table of all runs, and the model card."""

import re
import statistics
from pathlib import Path
from typing import Any

from common import cards
from huggingface_hub import EvalResult

from luna_hf import FAMILIES, markdown
from luna_hf.scripting import portable, portable_command, write_json, write_text
from tasks.labels import MULTI_LABEL
from tasks.task import Job

Result = dict[str, Any]
_SETTING = ("model", "batch_size", "learning_rate", "dropout")
_FORMATS = {
    **dict.fromkeys(("median", "best", "worst"), ".4f"),
    **dict.fromkeys(("parameters", "steps", "max_length"), ","),
    **dict.fromkeys(("seconds", "training_seconds", "tokens_per_second"), ",.0f"),
    **{"samples_per_second": ",.1f", "epochs": ".2f"},
}
# Options of a run that its card lists beside the setting.
_CARD_OPTIONS = ("num_train_epochs", "weight_decay", "warmup_steps", "lr_scheduler_type", "label_smoothing_factor")


# ---- settings and models ----


def headline(result: Result) -> float | None:
    """The score that a run is judged by; `None` if it diverged."""
    return None if result.get("diverged") else result["scores"][result["development"]][result["main_metric"]]


def setting_of(row: dict[str, Any]) -> tuple:
    """What the runs of one setting have in common: all but the seed."""
    return tuple(row[name] for name in _SETTING)


def group_runs(results: list[Result], greater_is_better: bool) -> list[dict[str, Any]]:
    """Median, best and worst over the seeds, for each model and setting; a run that diverged is the worst (`None`)."""
    groups = []
    for setting in dict.fromkeys(map(setting_of, results)):
        runs = [result for result in results if setting_of(result) == setting]
        values = sorted((value for value in map(headline, runs) if value is not None), reverse=greater_is_better)
        values += [None] * (len(runs) - len(values))
        middle = values[(len(runs) - 1) // 2 : len(runs) // 2 + 1]
        figures = {"median": None if None in middle else statistics.median(middle)}
        figures |= {"best": values[0], "worst": values[-1], "seeds": [run["seed"] for run in runs]}
        groups.append(dict(zip(_SETTING, setting, strict=True)) | figures)
    return groups


def choose(results: list[Result], greater_is_better: bool) -> tuple[Result, dict[str, Any]] | None:
    """Of one model's runs the best of the setting with the best median, and that setting; of equal ones the first.

    A setting has no median if half of its runs diverged. It is chosen, by its best run, only if no setting has one.

    Returns:
        `None` if every run diverged.
    """
    sign = 1 if greater_is_better else -1
    groups = group_runs(results, greater_is_better)
    for value in ("median", "best"):
        if ranked := [group for group in groups if group[value] is not None]:
            setting = max(ranked, key=lambda group: sign * group[value])
            own = [row for row in results if setting_of(row) == setting_of(setting) and not row.get("diverged")]
            return max(own, key=lambda result: sign * headline(result)), setting
    return None


# ---- the table ----


def write_report(job: Job, results: list[Result], folders: dict[str, Path]) -> None:
    """Write `results.json` and `results.md`; print the latter, and the folders of the models."""
    if not job.is_main:
        return
    better = job.task.greater_is_better
    settings = group_runs(results, better)
    for model, path in folders.items():
        best, chosen = choose([result for result in results if result["model"] == model], better)
        row = next(row for row in settings if setting_of(row) == setting_of(chosen))
        row |= {"best_seed": best["seed"], "weights": path.relative_to(job.folder).as_posix()}
    paths = ("folder", "model_name_or_path")
    summary = {
        "title": job.task.title,
        "task": job.task.name,
        "development": job.development,
        "main_metric": job.task.main_metric,
        "command": portable_command(["python", *job.command]),
        "settings": settings,
        "runs": [{**result, **{name: portable(result[name]) for name in paths}} for result in results],
    }
    text = report_text(summary)
    write_json(job.folder / "results.json", summary)
    write_text(job.folder / "results.md", text)
    job.print("\n" + text)
    for model, path in folders.items():
        job.print(f"The finetuned {model} is in {path}")


def report_text(summary: dict[str, Any]) -> str:
    """`results.md`: settings, runs, and how they were made."""
    runs, parts = summary["runs"], [f"# {markdown.escape(summary['title'])}"]
    if len(runs) > 1:
        empty = {"best_seed": "", "weights": ""}
        settings = [{**empty, **row, "seeds": " ".join(map(str, row["seeds"]))} for row in summary["settings"]]
        parts += [
            f"Settings, by {summary['development']} {summary['main_metric']} over the seeds. The last column has the "
            "weights of the best run of every model's best setting, which is the one with the best median.",
            table(settings, ["model", "setting", "seeds", "median", "best", "worst", "best_seed", "weights"]),
            "Runs:",
        ]
    scores = list(dict.fromkeys(f"{split} {metric}" for run in runs for split, metric, _ in measured(run)))
    costs = ["parameters", "epochs", "training_seconds", "samples_per_second", "tokens_per_second"]
    parts.append(table(runs, ["model", "setting", "seed", *(scores or [summary["main_metric"]]), *costs]))
    for model, notes in {run["model"]: run["notes"] for run in runs}.items():
        parts += [markdown.escape(f"{model}:"), markdown.bullets(notes)]
    lines = [f"Command: {markdown.code(summary['command'])}", f"Machine: {markdown.escape(runs[0]['hardware'])}."]
    return "\n\n".join([*parts, "\n".join([*lines, f"Versions: {markdown.escape(runs[0]['versions'])}."])]) + "\n"


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """A Markdown table of some keys of the rows, with `setting`: what a run was trained with, seed aside."""
    return markdown.table(
        [name.replace("_", " ") for name in columns], [_formatted(row, columns).values() for row in rows]
    )


def _formatted(row: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Values of a row as text. A score that is `None` or missing is that of a run that diverged."""
    found = {**row, **{f"{split} {metric}": f"{value:.4f}" for split, metric, value in measured(row)}}
    dropout = "" if row["dropout"] is None else f", dropout {row['dropout']:g}"
    found["setting"] = f"batch {row['batch_size']}, learning rate {row['learning_rate']:g}{dropout}"
    return {
        name: "diverged" if found.get(name) is None else format(found[name], _FORMATS.get(name, "")) for name in names
    }


def outcome_text(result: Result) -> str:
    """The scores of a run, or why it has none."""
    if result.get("diverged"):
        return f"Diverged: {result['diverged']}."
    return ", ".join(f"{split} {metric} {value:.4f}" for split, metric, value in measured(result))


def measured(result: Result) -> list[tuple[str, str, float]]:
    """Split, metric and value of every score."""
    scores = result.get("scores", {})
    return [(split, metric, value) for split, part in scores.items() for metric, value in part.items()]


# ---- the card ----


def write_card(job: Job, result: Result, folder: Path, picked: dict[str, Any] | None = None) -> None:
    """Fill `model_cards/finetuned.md` from a run and write it as the folder's README.md.

    `picked` has the numbers of `runs` and `settings` that the run was chosen from, and `seeds`, `median`, `worst` and
    `best` of its setting; it is `None` for the only run.
    """
    task, training = job.task, job.training
    base, best_step = portable(result["model_name_or_path"]), result["best_step"]
    default = training.hub_model_id or f"{result['model']}-{task.name}"
    name = job.arguments.model_name or re.sub(r"[^\w.-]+", "-", default.rpartition("/")[2])
    labels = ", ".join(result.get("labels", ()))
    trust = ", trust_remote_code=True" if result["model_type"] in FAMILIES else ""
    multiple = " Each one applies if its logit is above 0, its probability above 0.5."
    setting = {
        "learning rate": f"{result['learning_rate']:g}",
        "rows per update": result["batch_size"],
        "dropout": "the checkpoint's" if result["dropout"] is None else f"{result['dropout']:g}",
        "seed": result["seed"],
        **{name: training.to_dict()[name] for name in _CARD_OPTIONS},
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "float32",
    }
    resumed = f" since step {result['resumed_from_step']:,}, from which it was resumed"
    figures = ["parameters", "max_length", "main_metric", "development", "steps", "epochs", "seconds"]
    figures += ["samples_per_second", "tokens_per_second", "hardware", "versions"]
    scores = [(split + drawn_text(result, split), metric, value) for split, metric, value in measured(result)]
    text = cards.fill(
        "finetuned.md",
        result["model_type"],
        _metadata(job, name, result),
        **_formatted(result, figures),
        model_name=name,
        plain_length=result["max_length"],
        title=task.title,
        base=markdown.code(base),
        usage=markdown.code_block(task.usage(markdown.quoted(name), trust), "python"),
        labels=(f" Labels: {labels}." if labels else "") + multiple * (task.problem_type == MULTI_LABEL),
        scores=markdown.table(["split", "metric", "value"], [[*row[:2], f"{row[2]:.4f}"] for row in scores]),
        picked=picked_text(result, picked),
        dataset=task.dataset,
        notes=markdown.bullets(result["notes"]),
        setting=markdown.table(["option", "value"], setting.items()),
        best_step=result["steps"] if best_step is None else best_step,
        since=resumed if result["resumed_from_step"] else "",
        processes=f", on {result['processes']} processes" if result["processes"] > 1 else "",
        command=markdown.code(portable_command(["python", *job.command])),
    )
    write_text(folder / "README.md", text)


def picked_text(result: Result, picked: dict[str, Any] | None) -> str:
    """How far the card's figures hold for another seed."""
    if picked is None:
        return "It is one run with one seed: other seeds give somewhat different figures."
    count, metric, split = picked["settings"], result["main_metric"], result["development"]
    chosen = f"among {count} settings the one with the best median, and of its runs" if count > 1 else "of one setting"
    seeds = ", ".join(map(str, picked["seeds"]))
    found = f"The model was picked from {picked['runs']} runs: {chosen} (seeds {seeds}) the best."
    if picked["worst"] is None:
        return f"{found} With other seeds, runs of that setting diverged."
    low, high = sorted((picked["worst"], picked["best"]))
    return (
        f"{found} That setting's {metric} "
        f"on {split} has the median {picked['median']:.4f} ({low:.4f} to {high:.4f}): expect that of another seed."
    )


def drawn_text(result: Result, split: str) -> str:
    """The note beside a score that was measured on part of a split: ` (200 of 872 rows)`."""
    used, whole = result.get("drawn", {}).get(split, (0, 0))
    return f" ({used:,} of {whole:,} rows)" if whole else ""


def _metadata(job: Job, name: str, result: Result) -> str:
    """The card's YAML header, as the Hub reads it."""
    task = job.task
    shared = {"task_type": task.pipeline_tag, "dataset_type": task.dataset_name or task.name}
    results = [
        EvalResult(
            **shared,
            dataset_name=task.title + drawn_text(result, split),
            dataset_config=task.dataset_config,
            dataset_split=split,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(value, 4),
        )
        for split, metric, value in measured(result)
    ]
    return cards.metadata(
        name=name,
        model_type=result["model_type"],
        base_model=result["model_name_or_path"],
        tags=["luna_hf-finetuned", task.name],
        results=results,
        language=job.arguments.language,
        license=job.arguments.license,
        pipeline_tag=task.pipeline_tag if task.pipeline_tag == "text-classification" else None,
        datasets=[task.dataset_name] if task.dataset_name else None,
    )
