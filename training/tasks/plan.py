"""Which runs a command plans, and whether a folder may hold them."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.fingerprint import changed_files, fingerprint, model_files
from common.finish import check_end
from datasets import Dataset

from luna_hf import scripting
from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments
from tasks.task import Job
from tasks.trainer import checkpoints

SETTINGS_FILE = "settings.json"
RUN_FILE = "run.json"
_ADVICE = "Remove {}, or write to another folder."
# Options that change nothing about what a run computes: another value may continue it.
_FREE = {
    *("model_name_or_path", "sweep", "sweep_batch_sizes", "sweep_learning_rates", "sweep_dropouts", "dropout"),
    *("seeds", "output_dir", "accept_changed_data"),
    *("language", "license", "model_name", "push_to_hub", "resume_from_checkpoint", "report_to", "run_name"),
    *("use_cpu", "local_rank", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("disable_tqdm", "dataloader_num_workers", "per_device_eval_batch_size", "save_total_limit", "project"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "seed", "data_seed"),
}
_FREE_PREFIXES = ("hub_", "log", "trackio", "ddp_", "gradient_checkpointing", "activation_checkpointing")


@dataclass(frozen=True)
class Run:
    """One training: a model, a setting and a seed. `batch_size` counts the rows of an update; a `dropout` of `None` is
    that of the checkpoint.
    """

    model: str
    label: str
    batch_size: int
    learning_rate: float
    dropout: float | None
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """For messages and tables."""
        dropout = "" if self.dropout is None else f", dropout {self.dropout:g}"
        return f"{self.label}, batch {self.batch_size}, learning rate {self.learning_rate:g}{dropout}, seed {self.seed}"


def plan(arguments: FinetuneArguments, training: FinetuneTrainingArguments) -> list[Run]:
    """The runs, model by model. A single one uses the output folder itself.

    Raises:
        UserError: A batch of the sweep cannot be divided among the processes and accumulation steps, or two runs are
            the same.
    """
    share = training.world_size * training.gradient_accumulation_steps
    batches, rates = [training.per_device_train_batch_size * share], [training.learning_rate]
    dropouts = [arguments.dropout]
    if arguments.sweep:
        batches, rates = arguments.sweep_batch_sizes, arguments.sweep_learning_rates
        dropouts = arguments.sweep_dropouts or dropouts
    if odd := [batch for batch in batches if batch % share]:
        raise UserError(
            f"A batch of {odd[0]} rows cannot be divided among {training.world_size} process(es) and "
            f"{training.gradient_accumulation_steps} accumulation step(s)."
        )
    labels = unique_labels(arguments.model_name_or_path)
    seeds = arguments.seeds or [training.seed]
    combinations = list(itertools.product(labels, batches, rates, dropouts, seeds))
    runs = []
    for model, batch, rate, dropout, seed in combinations:
        folder = Path(training.output_dir)
        if len(combinations) > 1:
            setting = f"batch{batch}-lr{rate:g}" + ("" if dropout is None else f"-dropout{dropout:g}")
            folder = folder / "runs" / labels[model] / f"{setting}-seed{seed}"
        runs.append(Run(model, labels[model], batch, rate, dropout, seed, folder))
    folders = [run.folder for run in runs]
    if twice := [run.name for run in runs if folders.count(run.folder) > 1]:
        raise UserError(f"Two runs are the same, or too much alike to have a folder each: {twice[0]}.")
    return runs


def unique_labels(models: list[str]) -> dict[str, str]:
    """A short name per model: the last part of its path, with as many parts before it as it takes to be unique.

    Raises:
        UserError: A model occurs twice.
    """
    parts = {model: Path(os.path.abspath(model)).parts[1:] for model in models}  # also of `.` and `..`
    for depth in range(1, max(map(len, parts.values())) + 1):
        labels = {model: "-".join(parts[model][-depth:]) for model in models}
        if len(set(labels.values())) == len(models):
            return labels
    raise UserError(f"--model_name_or_path names a model twice: {' '.join(models)}.")


# ---- what a folder holds ----


def read_run(folder: Path) -> dict[str, Any]:
    """The content of `run.json`, with its `folder`; empty if the folder holds no finished run.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        return {}
    run = read_json(path)
    scores, notes = run.get("scores", {}), run.get("notes", [])
    try:
        right = all(map(math.isfinite, (value for split in scores.values() for value in split.values())))
        right = right and all(isinstance(note, str) for note in [*notes, *run.get("labels", [])])
    except (AttributeError, TypeError):
        right = False
    if not right or not isinstance(notes, list):
        raise UserError(f"{path} is damaged (its scores or notes are none). {_ADVICE.format(folder)}")
    run["folder"] = str(folder)
    return run


def read_json(path: Path) -> scripting.Record:
    """The content of a file that a run has written.

    Raises:
        UserError: It is damaged, or lacks a key.
    """
    return scripting.read_json(path, _ADVICE.format(path.parent))


def check_output(folder: Path, models: list[str], repository: str = "", token: str | None = None) -> None:
    """Create the output folder, unless something in it would be lost.

    Raises:
        UserError: It is or holds one of the models to start from, or files that no finetuning wrote; see also
            `check_end`.
    """
    for model in filter(lambda model: Path(model).is_dir(), models):
        if folder.resolve() in (Path(model).resolve(), *Path(model).resolve().parents):
            raise UserError(
                f"--output_dir {folder} contains --model_name_or_path {model}, which would be overwritten: "
                "name another folder."
            )
    check_end(folder, "--output_dir", repository, token)
    if any(folder.glob(SETTINGS_FILE)) or any(folder.glob(f"runs/*/*/{SETTINGS_FILE}")):
        return
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):  # hidden: what a kill left half-written
            raise UserError(
                f"--output_dir {folder} holds {path.relative_to(folder)}, which no run wrote. Name an empty folder."
            )


def is_begun(folder: Path) -> bool:
    """Whether a folder holds a run, and not only its settings."""
    return bool((folder / RUN_FILE).is_file() or checkpoints(folder) or any(folder.glob("*.safetensors")))


# ---- what a run is ----


def run_settings(run: Run, job: Job) -> dict[str, Any]:
    """Everything that decides what a run computes."""
    options = {**dataclasses.asdict(job.arguments), **job.training.to_dict()}
    own = {name: value for name, value in dataclasses.asdict(run).items() if name not in ("label", "folder")}
    if job.arguments.max_train_samples or job.arguments.max_eval_samples:
        own["drawn_with"] = job.training.seed
    return settings(run.model, options, own, job.task.digests)


def settings(model: str, options: dict[str, Any], own: dict[str, Any], data: dict[str, str]) -> dict[str, Any]:
    """What a settings file holds: a run's `own` values, its weights and data, and those of the options that matter.

    A checkpoint that was retrained, or whose config or tokenizer changed, is not taken for the old one.
    """
    weights = fingerprint(model_files(Path(model))) if Path(model).is_dir() else {}
    kept = {name: value for name, value in options.items() if name not in _FREE and not name.startswith(_FREE_PREFIXES)}
    return json.loads(json.dumps({**own, "weights": [*weights.values()], **kept, "data": data}, default=str))


def data_digest(rows: Dataset) -> str:
    """Hash of the rows of a split, whatever file, version or cache they come from; a second for 400,000 sentences."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in rows.with_format("arrow").iter(10_000):
        digest.update(json.dumps(batch.to_pydict(), default=repr).encode())
    return digest.hexdigest()


def check_settings(
    folder: Path, wanted: dict[str, Any], sources: dict[str, str], accept_changed_data: bool
) -> list[str]:
    """Compare settings with those of the run that a folder holds; returns a note if changed data are accepted.

    Raises:
        UserError: It holds a run with other settings or, unless they are accepted, other data; or a damaged file.
    """
    if not (folder / SETTINGS_FILE).is_file() or not is_begun(folder) or read_run(folder).get("diverged"):
        return []  # a run that diverged has left nothing to lose
    before = read_json(folder / SETTINGS_FILE)
    changed = [
        "the weights of the model, its config or its tokenizer have changed"
        if name == "weights"
        else f"{name} {before.get(name)!r} instead of {value!r}"
        for name, value in wanted.items()
        if name != "data"
        and before.get(name, value) != value  # earlier versions stored fewer settings, and hashes of fewer files
        and not (name == "weights" and {*before[name]} <= {*value})
    ]
    if changed:
        raise UserError(
            f"{folder} holds a run with other settings: {', '.join(changed[:5])}. Choose another --output_dir."
        )
    data = before.get("data", {})
    splits = changed_files(data if isinstance(data, dict) else {}, wanted["data"])
    names = ", ".join(sources.get(split, split) for split in splits)
    if splits and not accept_changed_data:
        raise UserError(
            f"{folder} holds a run with other data: {names} changed since. Restore the data, choose another "
            "--output_dir, or set --accept_changed_data true."
        )
    return [f"{names} changed after the first run had begun, which was accepted."] if splits else []
