"""What finetuning leaves to be read: files written at once, the table of all runs, the model card, and the upload."""

import json
import os
import re
import statistics
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from engine.card import machine, portable, portable_command
from huggingface_hub import EvalResult, HfApi, ModelCardData

from luna_hf import FAMILIES
from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments
from tasks.trainer import MULTI_LABEL

if TYPE_CHECKING:
    from tasks.runs import Task

TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "finetuned.md"
Result = dict[str, Any]


def write_text(path: Path, text: str) -> None:
    """Write a file that is, after a kill at any moment, either the old one or the new one."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def machine_and_versions() -> dict[str, str]:
    """Hardware, and the versions of what computed."""
    found = machine()
    for package in ("datasets", "evaluate"):
        if f" {package} " not in found["versions"]:
            found["versions"] += f", {package} {version(package)}"
    return found


def headline(result: Result) -> float:
    """The score that a run is judged by."""
    return result["scores"][result["development"]][result["main_metric"]]


def setting_of(row: dict[str, Any]) -> tuple:
    """What the runs of one setting have in common: all but the seed."""
    return row["model"], row["batch_size"], row["learning_rate"], row["dropout"]


def group_runs(results: list[Result], greater_is_better: bool) -> list[dict[str, Any]]:
    """Median and best over the seeds, for each model and setting."""
    settings: dict[tuple, list[Result]] = {}
    for result in results:
        settings.setdefault(setting_of(result), []).append(result)
    groups = []
    for (model, batch, rate, dropout), runs in settings.items():
        values = [headline(run) for run in runs]
        groups.append(
            {
                "model": model,
                "batch_size": batch,
                "learning_rate": rate,
                "dropout": dropout,
                "seeds": [run["seed"] for run in runs],
                "median": statistics.median(values),
                "best": max(values) if greater_is_better else min(values),
                "worst": min(values) if greater_is_better else max(values),
            }
        )
    return groups


def choose(results: list[Result], greater_is_better: bool) -> tuple[Result, dict[str, Any]]:
    """Of one model's runs the best of the setting with the best median, and that setting; of equal ones the first."""
    sign = 1 if greater_is_better else -1
    setting = max(group_runs(results, greater_is_better), key=lambda group: sign * group["median"])
    own = [result for result in results if setting_of(result) == setting_of(setting)]
    return max(own, key=lambda result: sign * headline(result)), setting


def compare_models(results: list[Result], greater_is_better: bool, folders: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each model: its setting with the best median, the run that was kept of it, and what it cost.

    Args:
        results: of all runs.
        greater_is_better: whether scores are to be large.
        folders: of each model's weights.
    """
    rows = []
    for model in dict.fromkeys(result["model"] for result in results):
        own = [result for result in results if result["model"] == model]
        best, setting = choose(own, greater_is_better)
        rows.append(
            {
                **setting,
                "best_seed": best["seed"],
                "best_folder": folders[model],
                "parameters": best["parameters"],
                "training_seconds": statistics.median(result["training_seconds"] for result in own),
                "samples_per_second": statistics.median(result["samples_per_second"] for result in own),
                "tokens_per_second": statistics.median(result["tokens_per_second"] for result in own),
            }
        )
    return rows


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def setting_text(row: dict[str, Any]) -> str:
    """What a run was trained with, seed aside, in one cell."""
    dropout = "" if row["dropout"] is None else f", dropout {row['dropout']:g}"
    return f"batch {row['batch_size']}, learning rate {row['learning_rate']:g}{dropout}"


def report_text(summary: dict[str, Any]) -> str:
    """`results.md`: models, settings, runs, and how it was made."""
    metric, results = summary["main_metric"], summary["runs"]
    parts = [f"# {summary['title']}", ""]
    names = [*results[0]["scores"]]
    columns = [(split, name) for split in names for name in results[0]["scores"][split]]
    if len(summary["models"]) > 1 or len(results) > 1:
        parts += [
            f"Models, by {summary['development']} {metric}: the setting with the best median over seeds. The weights "
            "that are kept are those of its best run, in the folder named last (beside this file).",
            "",
            table(
                ["model", "parameters", "setting", "median", "its best run", "samples/s", "tokens/s", "weights"],
                [
                    [
                        *(row["model"], f"{row['parameters']:,}", setting_text(row)),
                        *(f"{row['median']:.4f}", f"{row['best']:.4f} (seed {row['best_seed']})"),
                        *(f"{row['samples_per_second']:,.1f}", f"{row['tokens_per_second']:,.0f}"),
                        f"`{row['best_folder']}`",
                    ]
                    for row in summary["models"]
                ],
            ),
            "",
            "Settings.",
            "",
            table(
                ["model", "setting", "seeds", "median", "best", "worst"],
                [
                    [
                        *(row["model"], setting_text(row)),
                        *(" ".join(map(str, row["seeds"])), f"{row['median']:.4f}"),
                        *(f"{row['best']:.4f}", f"{row['worst']:.4f}"),
                    ]
                    for row in summary["settings"]
                ],
            ),
            "",
            "Runs.",
            "",
        ]
    header = ["model", "setting", "seed", *(f"{split} {name}" for split, name in columns)]
    rows = [
        [
            *(run["model"], setting_text(run), run["seed"]),
            *(f"{run['scores'][split][name]:.4f}" for split, name in columns),
            *(f"{run['epochs']:.2f}", f"{run['training_seconds']:,.0f}", f"{run['samples_per_second']:,.1f}"),
        ]
        for run in results
    ]
    parts.append(table([*header, "epochs", "training s", "samples/s"], rows))
    first = results[0]
    for model in dict.fromkeys(run["model"] for run in results):
        notes = next(run["notes"] for run in results if run["model"] == model)
        parts += ["", f"{model}:", "", *(f"- {note}" for note in notes)]
    parts += [
        "",
        f"Command: `{summary['command']}`",
        f"Machine: {first['hardware']}.",
        f"Versions: {first['versions']}.",
    ]
    return "\n".join(parts) + "\n"


def finish_report(
    task: "Task",
    results: list[Result],
    folders: dict[str, Path],
    command: list[str],
    training: FinetuneTrainingArguments,
) -> dict[str, Any]:
    """Write `results.json` and `results.md`, and print the latter and where the models are.

    Args:
        task: what was trained on.
        results: of all runs.
        folders: of each model's weights.
        command: words of the command line.
        training: names the folder to write to.

    Returns:
        The content of `results.json`.
    """
    shown = [{**result, "folder": portable(result["folder"])} for result in results]
    for result in shown:
        result["model_name_or_path"] = portable(result["model_name_or_path"])
    folder = Path(training.output_dir)
    kept = {model: path.relative_to(folder).as_posix() for model, path in folders.items()}
    summary = {
        "title": task.title,
        "task": task.name,
        "development": next(iter(task.evaluation)),
        "main_metric": task.main_metric,
        "command": portable_command(["python", *command]),
        "models": compare_models(shown, task.greater_is_better, kept),
        "settings": group_runs(shown, task.greater_is_better),
        "runs": shown,
    }
    if training.process_index == 0:
        text = report_text(summary)
        write_json(folder / "results.json", summary)
        write_text(folder / "results.md", text)
        print("\n" + text, flush=True)
        for model, path in folders.items():
            print(f"The finetuned {model} is in {path}", flush=True)
    return summary


def write_card(
    task: "Task",
    result: Result,
    arguments: FinetuneArguments,
    training: FinetuneTrainingArguments,
    command: list[str],
    folder: Path,
    picked: dict[str, Any] | None = None,
) -> None:
    """Fill `model_cards/finetuned.md` from a run and write it as the folder's README.md.

    Args:
        task: what was trained on.
        result: of the run.
        arguments, training, command: of the script.
        folder: with the model.
        picked: numbers of `runs` and `settings` among which the run is the chosen one, and `seeds`, `median`, `worst`
            and `best` of its setting; `None` for the only run.
    """
    own_code = result["model_type"] in FAMILIES
    base = portable(result["model_name_or_path"])
    default = training.hub_model_id or f"{Path(base).name}-{task.name}"
    name = arguments.model_name or re.sub(r"[^\w.-]+", "-", default.rpartition("/")[2])
    measured = [(split, metric, value) for split, part in result["scores"].items() for metric, value in part.items()]
    label_names = task.model_fields().get("id2label")
    labels = f" Labels: {', '.join(label_names.values())}." if label_names else ""
    if task.problem_type == MULTI_LABEL:
        labels += " Each is counted as given where its logit is above 0, its probability above 0.5."
    setting = {
        "learning rate": f"{result['learning_rate']:g}",
        "rows of an update": result["batch_size"],
        "dropout": "the checkpoint's" if result["dropout"] is None else f"{result['dropout']:g}",
        "seed": result["seed"],
        "epochs at most": f"{training.num_train_epochs:g}",
        "weight decay": f"{training.weight_decay:g}",
        "warm-up": f"{training.warmup_steps:g}" + (" of the steps" if training.warmup_steps < 1 else " steps"),
        "schedule": training.lr_scheduler_type.value,
        "label smoothing": f"{training.label_smoothing_factor:g}",
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "float32",
    }
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        metadata=metadata(task, name, result, measured, arguments),
        model_name=name,
        title=task.title,
        base=base,
        model_type=result["model_type"],
        parameters=f"{result['parameters']:,}",
        usage=task.usage(name, ", trust_remote_code=True" if own_code else ""),
        trust_note=" With the package `luna_hf` imported, `trust_remote_code` is not needed." if own_code else "",
        labels=labels,
        max_length=f"{result['max_length']:,}",
        scores=table(
            ["split", "metric", "value"],
            [[split + drawn_text(result, split), metric, f"{value:.4f}"] for split, metric, value in measured],
        ),
        main_metric=task.main_metric,
        development=result["development"],
        picked=picked_text(result, picked),
        dataset=task.dataset,
        notes="\n".join(f"- {note}" for note in result["notes"]),
        setting=table(["option", "value"], [[key, value] for key, value in setting.items()]),
        steps=f"{result['steps']:,}",
        epochs=f"{result['epochs']:.2f}",
        best_step=result["best_step"] if result["best_step"] is not None else result["steps"],
        seconds=f"{result['seconds']:,.0f}",
        since=f" since step {result['resumed_from_step']:,}, from which it was continued"
        * bool(result["resumed_from_step"]),
        speed=f"{result['samples_per_second']:,.1f}",
        token_speed=f"{result['tokens_per_second']:,.0f}",
        processes=result["processes"],
        hardware=result["hardware"],
        versions=result["versions"],
        command=portable_command(["python", *command]),
    )
    write_text(folder / "README.md", text)


def picked_text(result: Result, picked: dict[str, Any] | None) -> str:
    """How far the card's figures hold for another seed."""
    if picked is None:
        return "It is one run with one seed: other seeds give somewhat different figures."
    count, metric, split = picked["settings"], result["main_metric"], result["development"]
    setting = f"of {count} settings the one with the best median, and of its runs" if count > 1 else "of one setting"
    seeds = ", ".join(map(str, picked["seeds"]))
    low, high = sorted((picked["worst"], picked["best"]))
    return (
        f"The model was picked from {picked['runs']} runs: {setting} (seeds {seeds}) the best. That setting's {metric} "
        f"on {split} has the median {picked['median']:.4f} ({low:.4f} to {high:.4f}): expect that of another seed."
    )


def drawn_text(result: Result, split: str) -> str:
    """What a score on a part of a split says of itself, wherever it stands: ` (200 of 872 rows)`."""
    used, whole = result.get("drawn", {}).get(split, (0, 0))
    return f" ({used:,} of {whole:,} rows)" if whole else ""


def metadata(
    task: "Task",
    name: str,
    result: Result,
    measured: list[tuple[str, str, float]],
    arguments: FinetuneArguments,
) -> str:
    """The card's YAML header, as the Hub reads it."""
    hub_name, own_code = task.dataset_name, result["model_type"] in FAMILIES
    results = [
        EvalResult(
            task_type=task.pipeline_tag,
            dataset_type=hub_name or task.name,
            dataset_name=task.title + drawn_text(result, split),
            dataset_config=task.dataset_config,
            dataset_split=split,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(value, 4),
        )
        for split, metric, value in measured
    ]
    is_hub_name = not Path(result["model_name_or_path"]).exists()
    return ModelCardData(
        language=arguments.language,
        license=arguments.license,
        library_name="transformers",
        pipeline_tag=task.pipeline_tag if task.pipeline_tag == "text-classification" else None,
        base_model=result["model_name_or_path"] if is_hub_name else None,
        datasets=[hub_name] if hub_name else None,
        tags=["luna_hf-finetuned", task.name, *(["linear-attention", "custom_code"] if own_code else [])],
        model_name=name,
        eval_results=results,
    ).to_yaml()


def reserve_repository(training: FinetuneTrainingArguments) -> str:
    """Create the repository before the training, so that a missing login is found then.

    Returns:
        Its full name; empty on other processes than the first.

    Raises:
        UserError: No name, no login, or the Hub refuses.
    """
    if training.process_index != 0:
        return ""
    name = training.hub_model_id or Path(training.output_dir).resolve().name
    try:
        made = HfApi().create_repo(name, token=training.hub_token, private=training.hub_private_repo, exist_ok=True)
    except Exception as error:  # network, login, rights: all of them the user's to mend
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--push_to_hub: the repository {name!r} cannot be made ({reason}).") from error
    return made.repo_id


def push_folder(model: Path, repository: str, training: FinetuneTrainingArguments) -> None:
    """Upload the folder of a model as it is, with its card; the table goes along."""
    if training.process_index != 0:
        return
    api, folder = HfApi(), Path(training.output_dir)
    # Settings and the run's file name folders of this machine; card and table have the figures.
    unwanted = ["checkpoint-*", "runs/*", ".*", "settings.json", "run.json"]
    api.upload_folder(
        repo_id=repository,
        folder_path=model,
        commit_message="Finetuned model",
        token=training.hub_token,
        ignore_patterns=unwanted,
    )
    if model != folder:
        api.upload_file(
            repo_id=repository,
            path_or_fileobj=str(folder / "results.md"),
            path_in_repo="results.md",
            token=training.hub_token,
        )
    print(f"Pushed {model} to {repository}.", flush=True)
