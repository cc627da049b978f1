"""Of several runs of one model: which of them keeps its weights, and `best/<model>/`, the folder they end in.

The table names the setting with the best median over the seeds; the weights that are kept are those of the best run of
that setting. A setting's runs follow each other, so that no more than two runs hold weights at a time. At the end the
model is copied to a hidden folder, which is renamed when it is complete, and only then leaves the run's own folder.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments
from tasks.plan import RUN_FILE, SETTINGS_FILE
from tasks.report import Result, choose, setting_of, write_card, write_json

if TYPE_CHECKING:
    from tasks.runs import Task

# What every run leaves, with the logs of TensorBoard; the rest belongs to a model that can be loaded.
_LEFT = {RUN_FILE, SETTINGS_FILE, "predictions", "runs"}


def drop_losers(task: "Task", results: list[Result], training: FinetuneTrainingArguments) -> None:
    """Remove the models that cannot be the chosen one any more.

    Args:
        task: says which scores are better.
        results: of the finished runs of one model, in the order of the plan.
        training: tells the main process, which alone does it.
    """
    if training.process_index != 0:
        return
    current = [result for result in results if setting_of(result) == setting_of(results[-1])]
    before = [result for result in results if setting_of(result) != setting_of(results[-1])]
    kept = [choose(part, task.greater_is_better)[0]["folder"] for part in (current, before) if part]
    for result in results:
        if result["folder"] not in kept:
            _strip(Path(result["folder"]))


def chosen_without_weights(task: "Task", results: list[Result], folder: Path) -> int | None:
    """Index of the chosen run if its weights are gone, since an earlier command with fewer runs chose another one."""
    best, _ = choose(results, task.greater_is_better)
    if _weights(Path(best["folder"])):
        return None
    kept = best_folder(folder, best)
    if _weights(kept) and _read(kept).items() >= _content(best).items():
        return None
    return results.index(best)


def keep_best(
    task: "Task",
    results: list[Result],
    arguments: FinetuneArguments,
    training: FinetuneTrainingArguments,
    command: list[str],
) -> Path:
    """Bring the chosen model to `best/<model>/`, with a card that says from how many runs it was picked.

    Args:
        task: what was trained on.
        results: of all runs of one model; the chosen one has its weights.
        arguments, training, command: for the card.

    Returns:
        The folder with the model: that of the run itself if it is the only one.
    """
    best, setting = choose(results, task.greater_is_better)
    if len(results) == 1:
        return Path(best["folder"])
    target = best_folder(Path(training.output_dir), best)
    if training.process_index == 0:
        picked = {
            "runs": len(results),
            "settings": len({setting_of(result) for result in results}),
            **{name: setting[name] for name in ("seeds", "median", "best", "worst")},
        }
        content = {**_content(best), "picked": json.loads(json.dumps(picked))}
        if not _weights(target) or _read(target) != content:
            place = target
            if _weights(Path(best["folder"])):
                place = _copied(Path(best["folder"]), target)
            write_card(task, best, arguments, training, command, place, picked)
            write_json(place / RUN_FILE, content)
            if place != target:
                _replace(target, place)
        for result in results:
            _strip(Path(result["folder"]))
    training.distributed_state.wait_for_everyone()
    return target


def best_folder(folder: Path, result: Result) -> Path:
    """Where the chosen model of several runs ends."""
    return folder / "best" / result["model"]


def _content(result: Result) -> dict[str, Any]:
    """As a file holds it."""
    return json.loads(json.dumps({name: value for name, value in result.items() if name != "folder"}))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _copied(source: Path, target: Path) -> Path:
    """The model and its predictions in a hidden folder beside the target."""
    making = target.with_name(f".{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(source, making, ignore=shutil.ignore_patterns(SETTINGS_FILE, "runs", "checkpoint-*", ".*"))
    return making


def _replace(target: Path, complete: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    complete.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _strip(folder: Path) -> None:
    """Remove a run's model and card; its scores, settings and predictions stay."""
    for path in folder.iterdir():
        if path.name in _LEFT:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
