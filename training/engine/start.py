"""The model and the tokenizer that a run starts with."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.models import MASKED, ModelKind, load_config, load_encoder, load_tokenizer, longest_input, make_config
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from engine.groups import check_groups
from engine.objective import PretrainingObjective
from engine.recipe import RunRecipe
from luna_hf.scripting import UserError, portable


class Choice(NamedTuple):
    """What a recipe chooses: a tokenizer (`None` if it is to be trained), its longest input, and notes on it."""

    tokenizer: PreTrainedTokenizerBase | None
    longest: int | float
    notes: list[str]


def choose(recipe: RunRecipe, objective: PretrainingObjective) -> Choice:
    """Load the tokenizer, and check the model that the recipe describes before anything is written.

    Raises:
        UserError: The model or the tokenizer is missing or does not fit the recipe.
    """
    kind, start, tokenizer, notes = objective.kind, recipe.model_name_or_path, None, []
    config = load_config(start, kind=kind) if start else None
    if recipe.tokenizer or start:
        name = recipe.tokenizer or start
        tokenizer = load_tokenizer(name, config, padded=kind is MASKED)
        tokenizer, notes = objective.adapt_tokenizer(tokenizer, portable(name), new_model=config is None)
    if config:
        longest = max(recipe.block_size, longest_input(config))  # positions are extended where needed
    else:
        config = make_config(recipe.model, tokenizer, len(tokenizer) if tokenizer else recipe.vocab_size, kind)
        longest = longest_input(config)
    if recipe.block_size > longest:
        raise UserError(
            f"`block_size` is {recipe.block_size}, but the model takes at most {longest} tokens. Lower `block_size`, "
            f"or raise `model.max_position_embeddings` (now {config.max_position_embeddings})."
        )
    if recipe.windows:
        recipe.windows.check(recipe.model.get("local_window", getattr(config, "local_window", 0)))
    if tokenizer:
        objective.check_tokenizer(recipe, tokenizer, longest)
    check_groups(parameter_names(config, kind), recipe.groups, recipe.max_steps)
    return Choice(tokenizer, longest, notes)


def parameter_names(config: PreTrainedConfig, kind: ModelKind = MASKED) -> list[str]:
    """The names of a model's parameters, without making them."""
    with torch.device("meta"):
        return [name for name, _ in kind.auto_class.from_config(config).named_parameters()]


def write_tokenizer(
    recipe: RunRecipe, objective: PretrainingObjective, choice: Choice, documents: Iterable[str], folder: Path
) -> None:
    """Train the tokenizer if none was chosen, and save it in `folder`."""
    tokenizer = choice.tokenizer
    if tokenizer is None:
        tokenizer = objective.train_tokenizer(documents, recipe.vocab_size, choice.longest)
        if len(tokenizer) < recipe.vocab_size:
            print(f"The text has enough pairs for only {len(tokenizer):,} of {recipe.vocab_size:,} tokens.")
    else:
        tokenizer.model_max_length = VERY_LARGE_INTEGER if math.isinf(choice.longest) else choice.longest
    tokenizer.save_pretrained(folder)


class Start(NamedTuple):
    """A model before its first update, the module that is called with batches, and notes for the user."""

    model: PreTrainedModel
    module: torch.nn.Module
    notes: list[str]


def make_start(
    recipe: RunRecipe,
    objective: PretrainingObjective,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Start:
    """Make or load the model, and what the objective needs beside it; a new model needs the tokenizer.

    Raises:
        UserError: A checkpoint is damaged, or the model does not fit the objective.
    """
    set_seed(recipe.seed)
    kind, start = objective.kind, recipe.model_name_or_path
    if start:
        fields = dict(recipe.model)
        if kind is MASKED and hasattr(load_config(start), "sparse_prediction"):
            fields.setdefault("sparse_prediction", True)
        model, notes = load_encoder(kind.auto_class, start, length=recipe.block_size, **fields)
    else:
        model, notes = kind.auto_class.from_config(make_config(recipe.model, tokenizer, len(tokenizer), kind)), []
    if start and not recipe.validation:
        notes.append(
            "Held-out documents are drawn anew: if the checkpoint was trained on this text, it has seen them. Name a "
            "`validation` text to be sure."
        )
    return Start(model, objective.make_module(model, recipe, accelerator), notes)
