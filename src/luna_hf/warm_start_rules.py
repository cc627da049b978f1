"""What a warm start asks of a family: how its models take the place of a trained encoder of RoBERTa's architecture."""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# What a rule of a table may be, besides the source's name whose values are taken.
INITIALISED = "initialised as in a new model"
ZERO = "zero"
IDENTITY = "the identity"

ATTENTION = "encoder.layer.{}.attention"
CONVOLUTION = f"{ATTENTION}.convolution.weight"
POSITIONS = "embeddings.position_embeddings.weight"
SEGMENTS = "embeddings.token_type_embeddings.weight"

# The decoder's own bias comes first: where the matrices are not tied, it need not be the head's.
HEAD_NAMES = {
    "lm_head.dense.weight": ("lm_head.dense.weight",),
    "lm_head.dense.bias": ("lm_head.dense.bias",),
    "lm_head.layer_norm.weight": ("lm_head.layer_norm.weight",),
    "lm_head.layer_norm.bias": ("lm_head.layer_norm.bias",),
    "lm_head.decoder.weight": ("lm_head.decoder.weight",),
    "lm_head.bias": ("lm_head.decoder.bias", "lm_head.bias"),
}


@dataclass(frozen=True)
class Layout:
    """Where a model type keeps what all encoders of RoBERTa's architecture have; the encoder's names are the same.

    Args:
        head: for each parameter of our masked-LM head, the source's names for it, the first that exists being taken.
        counts_pad_rows: whether `max_position_embeddings` counts the rows of the table up to the pad's.
        has_pad_rows: whether the table has those rows at all.
        fixed_head_activation: whether the head uses gelu whatever `hidden_act` says.
        ordered_vocabulary: whether token ids go from frequent to rare.
    """

    head: dict[str, tuple[str, ...]]
    counts_pad_rows: bool = True
    has_pad_rows: bool = True
    fixed_head_activation: bool = True
    ordered_vocabulary: bool = True


@dataclass
class LoadedSource:
    """A source: its config, its parameters by our names for the encoder's and its own for the head's."""

    config: PreTrainedConfig
    layout: Layout
    tensors: dict[str, Tensor]
    names: dict[str, str]  # our name of the encoder's, or its own -> its name in the source
    ignored: list[str]  # in the files, but of no parameter of a masked-LM model

    @property
    def embedding(self) -> Tensor:
        """(vocabulary, d), the word embedding; its type is that of the source."""
        return self.tensors["embeddings.word_embeddings.weight"]

    @property
    def first(self) -> int:
        """Rows in front of the table of positions that belong to no token."""
        return self.config.pad_token_id + 1 if self.layout.has_pad_rows else 0

    @property
    def longest(self) -> int:
        """Tokens that the source takes."""
        counted = self.config.pad_token_id + 1 if self.layout.counts_pad_rows else 0
        return self.config.max_position_embeddings - counted


@dataclass
class WarmStartRules:
    """A family's part in a warm start; this class serves families without rules.

    What the source has is copied, the convolution starts at zero, and everything else is initialised as in a new model.
    A subclass says where its family differs; the fields that it adds are keywords of `warm_start`.

    Args:
        loaded: the source.
        config: of the new model.
        seed: of what is drawn.

    Attributes:
        table: for parameters that the source lacks, or that need not fit: the name without the base model's prefix and
            with `{}` for the number of the layer -> the rule that makes it. A rule is the source's name whose values
            are taken, `INITIALISED`, `ZERO`, `IDENTITY`, or words that the subclass's `make` knows.
        decided: field of the config that follows from the source -> its value, and why it can have no other.
        layout: how to read the family's own models as sources; `None` if they cannot be.
    """

    loaded: LoadedSource
    config: PreTrainedConfig
    seed: int

    table: ClassVar[dict[str, str]] = {}
    decided: ClassVar[dict[str, tuple[object, str]]] = {}
    layout: ClassVar[Layout | None] = None

    @classmethod
    def options(cls) -> list[str]:
        """Keywords of `warm_start` that the family has besides fields of its config."""
        return [item.name for item in fields(cls)][len(fields(WarmStartRules)) :]

    @staticmethod
    def slots_field(config: PreTrainedConfig) -> str | None:
        """The field that counts the slots of a model's memory; `None` if it has no slots."""
        return getattr(config, "slots_field", None)

    @staticmethod
    def kind(name: str, config: PreTrainedConfig) -> str:
        """What a parameter is under a config, beyond its shape: the source's own is kept if it is of the same kind."""
        return ""

    def check(self) -> None:
        """Raise a ValueError for a source or options that do not go with the config."""

    def rule(self, template: str) -> str:
        """The rule for a parameter, by its name in `table`."""
        # A swapped model starts as it would without the convolution.
        return self.table.get(template, ZERO if template == CONVOLUTION else INITIALISED)

    def make(self, rule: str, layer: str | None, empty: Tensor) -> Tensor:
        """The values that a rule other than `INITIALISED` gives, in any floating-point type.

        Args:
            rule: from the table, with the number of the layer.
            layer: that number; `None` outside the layers.
            empty: the parameter, with nothing in it yet.
        """
        if rule == ZERO:
            return torch.zeros_like(empty)
        return torch.eye(len(empty)) if rule == IDENTITY else self.loaded.tensors[rule].clone()

    def finish(self, new: dict[str, str]) -> None:
        """Raise a ValueError for an option without effect; `new` is that of the report."""


def spread_places(count: int, length: int) -> Tensor:
    """(count,) long: the middles of `count` equal parts of `length` places."""
    return (2 * torch.arange(count) + 1) * length // (2 * count)
