"""Which runs a command asks for, and whether a folder may hold them."""

import dataclasses
import functools
import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luna_hf.scripting import UserError
from tasks.arguments import FinetuneArguments, FinetuneTrainingArguments
from tasks.trainer import checkpoints

SETTINGS_FILE = "settings.json"
RUN_FILE = "run.json"
# Options that change nothing about what a run computes: another value may continue it.
_FREE = {
    *("model_name_or_path", "sweep", "sweep_batch_sizes", "sweep_learning_rates", "sweep_dropouts", "dropout"),
    *("seeds", "output_dir"),
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


def check_output(folder: Path, models: list[str]) -> None:
    """Make the output folder, if nothing is lost in it.

    Args:
        folder: `--output_dir`.
        models: `--model_name_or_path`, of which those that are folders must stay as they are.

    Raises:
        UserError: It is or holds one of the models, has files that no run of these scripts wrote, or cannot be made or
            written to.
    """
    whole = folder.resolve()
    for model in models:
        pretrained = Path(model).resolve()
        if Path(model).is_dir() and whole in (pretrained, *pretrained.parents):
            same = "is" if whole == pretrained else "holds"
            raise UserError(
                f"--output_dir {folder} {same} the model to start from, --model_name_or_path {model}, which would be "
                "overwritten. Name another --output_dir."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = not _is_ours(folder) and _first_file(folder)
        if not foreign:
            probe = folder / ".writable"
            probe.write_text("")
            probe.unlink(missing_ok=True)  # another process of the same run may have been faster
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written to ({error.strerror or error}).") from error
    if foreign:
        raise UserError(
            f"--output_dir {folder} holds files that no finetuning wrote ({foreign.relative_to(folder)}), so none of "
            "them is overwritten. Name a new or empty folder."
        )


def _is_ours(folder: Path) -> bool:
    """Whether a run of these scripts has written its settings here, be it finished or not."""
    return (folder / SETTINGS_FILE).is_file() or any(folder.glob(f"runs/*/*/{SETTINGS_FILE}"))


def _first_file(folder: Path) -> Path | None:
    """A file below the folder; hidden ones, such as a kill may leave half-written, and empty folders do not count."""
    return next((path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")), None)


def plan(arguments: FinetuneArguments, training: FinetuneTrainingArguments) -> list[Run]:
    """The runs, model by model. A single one uses the output folder itself.

    Raises:
        UserError: A batch of the sweep cannot be divided among the processes and accumulation steps.
    """
    share = training.world_size * training.gradient_accumulation_steps
    batches, rates = [training.per_device_train_batch_size * share], [training.learning_rate]
    dropouts = [arguments.dropout]
    if arguments.sweep:
        batches, rates = arguments.sweep_batch_sizes, arguments.sweep_learning_rates
        dropouts = arguments.sweep_dropouts or dropouts
    for batch in batches:
        if batch % share:
            raise UserError(
                f"A batch of {batch} rows cannot be divided among {training.world_size} process(es) and "
                f"{training.gradient_accumulation_steps} accumulation step(s)."
            )
    seeds = arguments.seeds or [training.seed]
    labels = unique_labels(arguments.model_name_or_path)
    combinations = list(itertools.product(arguments.model_name_or_path, batches, rates, dropouts, seeds))
    runs = []
    for model, batch, rate, dropout, seed in combinations:
        folder = Path(training.output_dir)
        if len(combinations) > 1:
            setting = f"batch{batch}-lr{rate:g}" + ("" if dropout is None else f"-dropout{dropout:g}")
            folder = folder / "runs" / labels[model] / f"{setting}-seed{seed}"
        runs.append(Run(model, labels[model], batch, rate, dropout, seed, folder))
    return runs


def unique_labels(models: list[str]) -> dict[str, str]:
    """A short name for each model: the last part of its path, with as many parts before it as it takes to be unique.

    Raises:
        UserError: A model is given twice.
    """
    if len(set(models)) < len(models):
        raise UserError("--model_name_or_path names a model twice.")
    parts = {model: Path(model).parts or (model,) for model in models}
    for depth in range(1, max(map(len, parts.values())) + 1):
        labels = {model: "-".join(part.strip("/") or "root" for part in parts[model][-depth:]) for model in models}
        if len(set(labels.values())) == len(models):
            return labels
    return {model: f"{index}-{parts[model][-1]}" for index, model in enumerate(models, 1)}


def run_settings(run: Run, arguments: FinetuneArguments, training: FinetuneTrainingArguments) -> dict[str, Any]:
    """All that decides what a run computes."""
    values = {**dataclasses.asdict(arguments), **training.to_dict()}
    kept = {name: value for name, value in values.items() if name not in _FREE and not name.startswith(_FREE_PREFIXES)}
    own = {name: value for name, value in dataclasses.asdict(run).items() if name not in ("label", "folder")}
    return json.loads(json.dumps({**own, "weights": weights_digest(run.model), **kept}, default=str))


@functools.lru_cache
def weights_digest(model: str) -> str | None:
    """SHA-256 of a local model's weights, so that a retrained checkpoint is not taken for the old one."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_settings(run: Run, settings: dict[str, Any]) -> None:
    """Compare with the run that the folder holds. One that has left nothing but its settings is no run.

    Raises:
        UserError: It holds a run with other settings.
    """
    path = run.folder / SETTINGS_FILE
    begun = (run.folder / RUN_FILE).is_file() or checkpoints(run.folder) or any(run.folder.glob("*.safetensors"))
    if not path.is_file() or not begun:
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        was = [f"{name} {before.get(name)!r} instead of {settings[name]!r}" for name in changed if name != "weights"]
        if "weights" in changed:
            was.insert(0, f"the weights of {run.model} have changed")
        raise UserError(
            f"{run.folder} holds a run with other settings: {', '.join(was[:5])}. Choose another --output_dir."
        )
