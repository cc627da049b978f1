"""Recipes: the size of the models and how they are trained, a YAML file each, with a section for every task."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.options import did_you_mean, fill, read_yaml

from luna_hf.scripting import UserError

FOLDER = Path(__file__).resolve().parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """Everything but data, model, learning rate and seed. Fields named as in a config of the library mean the same.

    Args:
        name: of the file.
        share_layers: whether all layers have the same weights.
        classifier_pooling: "mean" over the tokens, "cls" (a learned first token), or one of Luna's "packed_*".
        classifier_hidden_size: inner width of the head.
        pixels: "values" multiplies a learned vector by the value of a pixel; "table" looks up its grey level.
        slots, window: of the models that have them.
        steps: updates. `warmup_steps` is for so many; with other `steps`, it is scaled.
        batch_size: rows of an update.
        eval_steps: updates between two evaluations.
        learning_rates: peaks to choose from.
        scheduler: name of a schedule of transformers.
    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    norm_first: bool
    position_embedding_type: str
    embedding_layer_norm: bool
    initializer_range: float
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float
    share_layers: bool
    classifier_pooling: str
    classifier_hidden_size: int
    pixels: Literal["values", "table"]
    slots: int
    window: int
    steps: int
    batch_size: int
    eval_batch_size: int
    eval_steps: int
    learning_rates: list[float]
    scheduler: str
    warmup_steps: int
    weight_decay: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float

    def shortened(self, steps: int | None) -> "Recipe":
        """The recipe with so many updates, its warm-up and evaluations in proportion."""
        if steps is None:
            return self
        scale = steps / self.steps
        own = {name: max(1, round(getattr(self, name) * scale)) for name in ("warmup_steps", "eval_steps")}
        return dataclasses.replace(self, steps=steps, **own)


def load_recipe(source: str, task: str) -> Recipe:
    """The recipe of a task.

    Args:
        source: name of a file of `recipes/`, or a path.
        task: what section of it holds besides what all tasks share.

    Raises:
        UserError: There is no such recipe, or a key is missing, unknown or has the wrong type.
    """
    path = Path(source) if source.endswith(".yaml") else FOLDER / f"{source}.yaml"
    if not path.is_file():
        raise UserError(f"There is no recipe {source}. Choose one of {', '.join(names())}, or a path to a YAML file.")
    values = read_yaml(path)
    own: Any = values.get(task)
    if not isinstance(own, dict):
        raise UserError(f"{path} has no section `{task}:`.")
    keys = {field.name for field in dataclasses.fields(Recipe)} - {"name"}
    shared = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for key in (*shared, *own):
        if key not in keys:
            raise UserError(f"Unknown key `{key}` in {path}.{did_you_mean(key, keys)}")
    return fill(Recipe, {"name": path.stem, **shared, **own}, f"{path}: ")


def names() -> list[str]:
    """The recipes of this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
