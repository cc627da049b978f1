"""What finished runs have recorded: recipe, figures and log of each, without the folders of this machine.

A run is the output folder of

- a pretraining command or `convert.py`, whose card holds the recipe;
- `finetune_embeddings.py`,
- `minilm_finetune.py`: an adapter, or
- another finetuning command; of several models, `OUTPUT_DIR/best/MODEL`.
"""

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import adapters
from catalogue import Stage
from common.machine import plural
from common.options import parse_yaml
from engine.log import read_log
from safetensors import safe_open
from tasks.arguments import REFUSED
from tasks.plan import RUN_FILE, SETTINGS_FILE, read_run
from transformers import TrainingArguments

from luna_hf.scripting import UserError, portable, read_json

_RECIPE = re.compile(r"^(```+)yaml\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_SETTING = ("batch_size", "learning_rate", "dropout", "seed")


def read_stages(run: Path) -> tuple[Path, list[Stage]]:
    """The folder with the model that a run has made, and its stages.

    Raises:
        UserError: It is no finished run, or one with several models.
    """
    if adapters.is_adapter(run) and (run / RUN_FILE).is_file():
        return run, [_adapter(run, read_json(run / RUN_FILE))]
    if (run / "metrics.json").is_file():
        figures = read_json(run / "metrics.json")
        return run, [_embeddings(run, figures) if "machine" in figures else _pretrained(run, figures)]
    if root := next((folder for folder in (run, run.parent.parent) if (folder / "results.json").is_file()), None):
        return _finetuned(run, root)
    raise UserError(f"{run} holds no finished run: it has neither metrics.json nor results.json.")


# ---- pretraining and conversion ----


def _pretrained(folder: Path, figures: dict[str, Any]) -> Stage:
    found = _RECIPE.search((folder / "README.md").read_text(encoding="utf-8"))
    if not found:
        raise UserError(f"{folder / 'README.md'} holds no recipe: no training command has written it.")
    return Stage(parse_yaml(found[2], f"The recipe in {folder / 'README.md'}"), figures, read_log(folder / "log.jsonl"))


def _portable(value: Any) -> Any:
    """A value of a recipe with portable paths."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return portable(value) if isinstance(value, str) and value else value


# ---- finetuning ----


def _embeddings(folder: Path, figures: dict[str, Any]) -> Stage:
    """The record of `finetune_embeddings.py`, in the words of the other commands."""
    training, history = figures.pop("training"), figures.pop("log")
    with safe_open(folder / "model.safetensors", "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    values = {"dataset_name": figures["dataset"], "max_length": figures["max_length"], **training}
    command = importlib.import_module("finetune_embeddings")
    recipe = {
        "model_name_or_path": portable(figures["model"]),
        "output_dir": "",
        **_options(command.EmbeddingArguments, command.TrainingArguments, values, command.REFUSED_HERE),
    }
    metrics = {
        **{name: _portable(value) for name, value in figures.items() if name not in ("machine", "versions", "seconds")},
        "scores": {"validation": figures["scores"]},
        "parameters": parameters,
        "training_seconds": figures["seconds"],
        **_made_on(figures),
    }
    log = [{"kind": "train", **row} for row in history]
    return Stage(recipe, metrics, log)


def _adapter(folder: Path, figures: dict[str, Any]) -> Stage:
    """The record of `minilm_finetune.py`, in the words of the other commands."""
    left_out = ("machine", "versions", "scores", "baseline", "unigram", "rows", "tokens", "seconds", "loss", "split")
    metrics = {
        **{name: value for name, value in figures.items() if name not in left_out},
        **(_held_out(figures) if "unigram" in figures else _scored(figures)),
        "parameters": adapters.parameters(folder),
        "train_rows": figures["rows"][0],
        "seen_tokens": figures["tokens"],
        "training_seconds": figures["seconds"],
        **_made_on(figures),
    }
    return Stage({}, metrics, [])


def _scored(figures: dict[str, Any]) -> dict[str, Any]:
    scores = {name: value / 100 for name, value in figures["scores"].items() if not name.startswith("f1_")}  # parts
    return {"scores": {figures["split"]: scores}}


def _held_out(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a masked LM."""
    found = {"held_out_targets": figures["scores"]["masked"]}
    for name, own in {"held_out": figures["scores"], "unigram": figures["unigram"]}.items():
        found |= {f"{name}_loss": own["loss"], f"{name}_accuracy": own["score"] / 100}
    return found


def _made_on(figures: dict[str, Any]) -> dict[str, str]:
    """Hardware and versions in words, from the head of a result."""
    machine = figures["machine"]
    device = machine.get("accelerator") or machine["cpu"]
    threads = f"{plural(machine['threads'], 'thread')}, {plural(machine['cores'], 'core')}"
    return {
        "hardware": f"{device}, {threads}, {machine['system']} {machine['architecture']}",
        "versions": ", ".join(f"{name} {version}" for name, version in figures["versions"].items()),
    }


def _finetuned(run: Path, root: Path) -> tuple[Path, list[Stage]]:
    results = read_json(root / "results.json")
    folder = run
    if run == root and (root / "best").is_dir():
        folder, *others = sorted((root / "best").iterdir())
        if others:
            named = ", ".join(str(path) for path in (folder, *others))
            raise UserError(f"{run} holds several models. Name one of them: {named}.")
    if not (result := read_run(folder)):
        raise UserError(f"There is no {folder / RUN_FILE}: {folder} holds no finished run.")
    settings = read_json(_run_folder(folder, root, result) / SETTINGS_FILE)
    command = Path(next(word for word in results["command"].split() if word.endswith(".py"))).stem
    kept = {name: value for name, value in result.items() if name not in ("folder", "history")}
    kept |= {"command": results["command"], "model_name_or_path": portable(result["model_name_or_path"])}
    log = [{"kind": "held_out", **row} for row in result["history"]]
    return folder, [Stage(_finetuning_recipe(command, result, settings), kept, log)]


def _run_folder(folder: Path, root: Path, result: dict[str, Any]) -> Path:
    """Where the run was trained, whose model may have been moved to `best/`."""
    if (folder / SETTINGS_FILE).is_file():
        return folder
    for path in (root / "runs" / folder.name).glob(f"*/{RUN_FILE}"):
        found = read_run(path.parent)
        if all(found[name] == result[name] for name in _SETTING):
            return path.parent
    raise UserError(f"The settings of {folder} are missing: {root / 'runs'} has been removed.")


def _finetuning_recipe(name: str, result: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The options that repeat one run of a sweep."""
    command = importlib.import_module(name).COMMAND
    return {
        "model_name_or_path": [portable(result["model_name_or_path"])],
        "output_dir": "",
        **_options(command.arguments, command.training, settings, REFUSED),
        "per_device_train_batch_size": result["batch_size"],
        **{key: result[key] for key in ("learning_rate", "dropout", "seed") if result[key] is not None},
    }


def _options(arguments: type, training: type, values: dict[str, Any], refused: Iterable[str]) -> dict[str, Any]:
    """Those of the values that a recipe needs: luna_hf's own options, and others that differ from the default."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    for one in training.__mro__[: training.__mro__.index(TrainingArguments)]:
        inherited -= set(inspect.get_annotations(one))
    defaults = training(output_dir="unused").to_dict()
    known = [field.name for kind in (arguments, training) for field in dataclasses.fields(kind) if field.init]
    left_out = {"model_name_or_path", "output_dir", *refused}
    return {
        key: _portable(values[key])
        for key in known
        if key not in left_out
        and values.get(key) not in (None, [], {})
        and not (key in inherited and values[key] == defaults.get(key))
    }
