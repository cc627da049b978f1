"""What a warm start needs from a family: how its models start from a trained encoder with softmax attention."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# Rules of a table, besides the name of a source parameter to copy.
INITIALISED = "initialised as in a new model"
ZERO = "zero"
IDENTITY = "the identity"

# Slots stand for all tokens of a text that are read nowhere else, and badly if trained attention writes them
# (docs/results/teacher.md). Beside a window, the logits that write them therefore start at a tenth: the slots are near
# means of the text, yet unlike.
BLUR, BLURRED = 0.1, ", its logits times 0.1"

# Names of parameters.
ATTENTION = "encoder.layer.{}.attention"
CONVOLUTION = f"{ATTENTION}.convolution.weight"
POSITIONS = "embeddings.position_embeddings.weight"
SEGMENTS = "embeddings.token_type_embeddings.weight"
PROJECTION = "embeddings.embeddings_project"


@dataclass(frozen=True)
class Layout:
    """How a model type stores what all encoders of RoBERTa's architecture have.

    Args:
        names: what to replace in its parameters' names, in this order, for ours.
        fields: fields of our config that the source's has by another name -> that name.
        constants: fields of our config that the source's has not -> what its code computes with.
        counts_pad_rows: whether `max_position_embeddings` includes the rows of the position table up to padding's.
        has_pad_rows: whether the table has those rows.
        fixed_head_activation: whether the masked-LM head uses gelu regardless of `hidden_act`.
        ordered_vocabulary: whether token ids are ordered by frequency.
    """

    names: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    counts_pad_rows: bool = True
    has_pad_rows: bool = True
    fixed_head_activation: bool = True
    ordered_vocabulary: bool = True

    def rename(self, name: str) -> str:
        """Our name of a parameter of the source, without the prefix of its base model."""
        for theirs, ours in self.names.items():
            name = name.replace(theirs, ours)
        return name


@dataclass
class LoadedSource:
    """A source: its config, and its parameters by our names."""

    config: PreTrainedConfig
    layout: Layout
    tensors: dict[str, Tensor]
    names: dict[str, str]  # the same keys -> the name in the source
    ignored: list[str]  # in the files, but in no masked-LM model

    @property
    def values(self) -> dict[str, Any]:
        """The fields of the source's config, by our names where it has ours."""
        own = {item.name: getattr(self.config, item.name) for item in fields(self.config)}
        renamed = {ours: getattr(self.config, theirs) for ours, theirs in self.layout.fields.items()}
        return own | renamed | self.layout.constants

    @property
    def embedding(self) -> Tensor:
        """(vocabulary, d or `embedding_size`), the word embedding; its dtype is the source's."""
        return self.tensors["embeddings.word_embeddings.weight"]

    @property
    def first(self) -> int:
        """Rows at the start of the position table that belong to no token."""
        return self.config.pad_token_id + 1 if self.layout.has_pad_rows else 0

    @property
    def longest(self) -> int:
        """The source's longest input, in tokens."""
        counted = self.config.pad_token_id + 1 if self.layout.counts_pad_rows else 0
        return self.config.max_position_embeddings - counted


@dataclass
class WarmStartRules:
    """A family's part in a warm start; this class is for families without rules.

    Parameters of the source are copied, the convolution starts at zero, and the rest is initialised as in a new model.
    A subclass overrides what differs in its family; the fields it adds become keywords of `warm_start`.

    Args:
        loaded: the source.
        config: of the new model.
        seed: of everything random.

    Attributes:
        table: rules for parameters that the source lacks or that may not fit, by name, without the base model's prefix
            and with `{}` for the layer's number. A rule is the name of a source parameter to copy, `INITIALISED`,
            `ZERO`, `IDENTITY`, or words that the subclass's `make` understands.
        decided: fields of the config that the source decides -> their value, and the reason.
        layout: how to read the family's own models as sources; `None` if they cannot be sources.
        softmax: fields with which a model computes the source's softmax attention; `None` if there are none.
        text_option: an option that takes token ids of a text.
    """

    loaded: LoadedSource
    config: PreTrainedConfig
    seed: int

    table: ClassVar[dict[str, str]] = {}
    decided: ClassVar[dict[str, tuple[object, str]]] = {}
    layout: ClassVar[Layout | None] = None
    softmax: ClassVar[dict[str, object] | None] = None
    text_option: ClassVar[str | None] = None

    @classmethod
    def options(cls) -> list[str]:
        """Keywords of `warm_start` for the family, other than fields of its config."""
        return [item.name for item in fields(cls)][len(fields(WarmStartRules)) :]

    @staticmethod
    def slots_field(config: PreTrainedConfig) -> str | None:
        """The field with the number of slots of a model's memory; `None` if it has no slots."""
        return getattr(config, "slots_field", None)

    @property
    def blurs(self) -> bool:
        """Whether the slots start near means of the text."""
        return bool(getattr(self.config, "local_window", 0))

    @staticmethod
    def kind(name: str, config: PreTrainedConfig) -> str:
        """The kind of a parameter under a config, beyond its shape: the source's is kept if it is of the same kind."""
        return ""

    @staticmethod
    def without_effect(name: str, config: PreTrainedConfig) -> str:
        """The models to which a field or option applies, if it has no effect under a config; otherwise empty."""
        return ""

    def check(self) -> None:
        """Raise a ValueError if the source or the options do not fit the config."""

    def rule(self, template: str) -> str:
        """The rule for a parameter, by its name in `table`."""
        # With a zero convolution the model computes what it would without.
        return self.table.get(template, ZERO if template == CONVOLUTION else INITIALISED)

    def make(self, rule: str, layer: str | None, empty: Tensor) -> Tensor:
        """The values that a rule other than `INITIALISED` gives, in any floating-point dtype.

        Args:
            rule: from the table, with the layer's number.
            layer: that number; `None` outside the layers.
            empty: the parameter, uninitialised.
        """
        if rule == ZERO:
            return torch.zeros_like(empty)
        return torch.eye(len(empty)) if rule == IDENTITY else self.loaded.tensors[rule].clone()


def spread_places(count: int, length: int) -> Tensor:
    """(count,) long: the midpoints of `count` equal parts of `length` positions."""
    return (2 * torch.arange(count) + 1) * length // (2 * count)
