"""What the commands of this folder work on: the catalogue `zoo.yaml`, and the folders in `checkpoints/`.

checkpoints/NAME/
    config.json, model.safetensors, tokenizer*.json    the model in bfloat16, without code; or, in place of the weights,
    adapter_config.json, adapter_model.safetensors     those of an adapter on another checkpoint
    recipe.yaml, metrics.json, log.jsonl               the run that made it, and
    stages/1/, stages/2/ ...                           the same of the runs before it
    loss.png, golden.json                              the plot of all stages; inputs and outputs
    README.md                                          written by build.py
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from common.options import read_yaml
from common.sections import read_section
from engine.log import read_log
from huggingface_hub.errors import StrictDataclassError

from luna_hf.scripting import UserError, read_json

T = TypeVar("T")
# What reading JSON or YAML of another form than expected raises.
_ODD = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError),
    StrictDataclassError,
)
ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def named(what: str) -> Iterator[None]:
    """Name what is being read where its files hold other values than those of a run.

    Raises:
        UserError: They do.
    """
    try:
        yield
    except UserError:
        raise
    except _ODD as error:
        raise UserError(f"{what} cannot be used: a file holds something else than expected ({error!r}).") from error


def read_figures(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises a `UserError` if it is damaged, or holds NaN or an infinity."""
    content = read_json(path)
    try:
        json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise UserError(f"{path} holds NaN or an infinity.") from error
    return content


@dataclass(frozen=True)
class Entry:
    """What a person writes about a checkpoint, in `zoo.yaml`. No measured figure belongs here.

    Attributes:
        summary: what it is, in two sentences.
        data: the section of the catalogue's `data` that describes its text.
        language, license: as the Hub writes them.
        base: the checkpoint, or name on the Hub, of the model that its first run started from.
        command: what trains the model, if its recipes alone do not.
        twin: the checkpoint that it is compared with.
        task: for a finetuned model, the task of its rows in the results.
        datasets: names on the Hub.
        example: a text, or two that belong together, on which the card shows the model; else the first golden input.
        limits: what it cannot do.
    """

    summary: str
    data: str
    language: str
    license: str
    base: str = ""
    command: str = ""
    twin: str = ""
    task: str = ""
    datasets: list[str] = field(default_factory=list)
    example: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Zoo:
    """The catalogue, the checkpoints and the scores below a folder; by default of this repository.

    The scores lie in `experiments/results/mini-*.json` and `minilm_finetune.json`, each `{"rows": [ROW, ...]}`. A row
    has the keys `model` (a checkpoint, or the name of a baseline), `task`, `metric`, `split` and `values` (one a seed);
    `dataset` (on the Hub, for scores that are shown there), `config` (of the data set), `type` (the Hub's tag of the
    task) and `baseline` (true for a baseline) are optional. A file may also have `models`, the held-out figures of
    models by name, for those that are not shipped.
    """

    root: Path = ROOT

    @cached_property
    def _read(self) -> dict[str, Any]:
        return read_yaml(self.root / "model_cards" / "zoo.yaml")

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The entries by name; `defaults` hold for all of them."""
        shared = self._read.get("defaults", {})
        return {
            name: read_section(Entry, {**shared, **values}, f"zoo.yaml, {name}")
            for name, values in self._read["checkpoints"].items()
        }

    def entry(self, name: str) -> Entry:
        """One entry.

        Raises:
            UserError: There is none.
        """
        return _find(self.entries, name, "entry of model_cards/zoo.yaml")

    def data(self, entry: Entry) -> str:
        """The description of an entry's text."""
        return self._read["data"][entry.data].strip()

    @property
    def checkpoints(self) -> dict[str, "Checkpoint"]:
        """The shipped checkpoints by name."""
        paths = sorted((self.root / "checkpoints").glob("*/metrics.json"))
        return {path.parent.name: Checkpoint(path.parent) for path in paths}

    def checkpoint(self, name: str) -> "Checkpoint":
        """A shipped checkpoint.

        Raises:
            UserError: There is none of that name.
        """
        return _find(self.checkpoints, name, "folder of checkpoints/")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all files of scores."""
        return [row for result in self._results for row in result.get("rows", [])]

    def rows_with(self, name: str) -> list[dict[str, Any]]:
        """The rows of the files that have scores of a model: models of other files were trained in another way."""
        files = [result.get("rows", []) for result in self._results]
        return [row for rows in files if any(own["model"] == name for own in rows) for row in rows]

    def figures(self, name: str) -> dict[str, Any]:
        """The held-out figures of a model: those of its checkpoint, else of a result file; empty if it has none."""
        if name in self.checkpoints:
            return self.checkpoints[name].metrics
        return next((result["models"][name] for result in self._results if name in result.get("models", {})), {})

    @cached_property
    def _results(self) -> list[dict[str, Any]]:
        folder = self.root / "experiments" / "results"
        return [
            read_figures(path) for path in sorted([*folder.glob("mini-*.json"), *folder.glob("minilm_finetune.json")])
        ]


def _find(found: dict[str, T], name: str, kind: str) -> T:
    if name not in found:
        raise UserError(f"There is no {kind} named {name}. There are: {', '.join(found) or 'none'}.")
    return found[name]


@dataclass(frozen=True)
class Stage:
    """A run that made a checkpoint, or a part of one.

    Attributes:
        recipe: repeats it; empty for a part of the next stage's run.
        metrics: its figures, with the `command`.
        log: entries with `kind` and `step`.
    """

    recipe: dict[str, Any]
    metrics: dict[str, Any]
    log: list[dict[str, Any]]

    @property
    def script(self) -> str:
        """The script that the recipe is for, such as `training/pretrain_mlm.py`."""
        return next(word for word in self.metrics["command"].split() if word.endswith(".py"))

    @property
    def steps(self) -> int | None:
        """Updates."""
        return self.metrics.get("steps") or (self.log[-1]["step"] if self.log else None)

    @property
    def tokens(self) -> int | None:
        """Tokens that were read in training."""
        if "seen_tokens" in self.metrics:
            return self.metrics["seen_tokens"]
        speed = self.metrics.get("tokens_per_second")  # of finetuning
        return round(speed * self.metrics["training_seconds"]) if speed else None


@dataclass(frozen=True)
class Checkpoint:
    """A folder in `checkpoints/`."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config."""
        return read_json(self.folder / "config.json")

    @cached_property
    def golden(self) -> dict[str, Any]:
        """Inputs and outputs; see `golden.py`."""
        return read_figures(self.folder / "golden.json")

    @cached_property
    def stages(self) -> list[Stage]:
        """The runs that made it, in their order; the folder itself holds the last one."""
        earlier = (path.parent for path in (self.folder / "stages").glob("*/metrics.json"))
        folders = [*sorted(earlier, key=lambda folder: int(folder.name)), self.folder]
        return [_stage(folder) for folder in folders]

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of the last run."""
        return self.stages[-1].metrics


def _stage(folder: Path) -> Stage:
    recipe = folder / "recipe.yaml"
    values = read_yaml(recipe) if recipe.is_file() else {}
    return Stage(values, read_figures(folder / "metrics.json"), read_log(folder / "log.jsonl"))
