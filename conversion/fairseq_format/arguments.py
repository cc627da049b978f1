"""The authors' arguments and the fields of our configuration: one table, read in both directions."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from luna_hf.scripting import UserError

MASKED_LM, TRANSLATION = "masked_lm", "translation"
# The authors' activations by their names, and transformers' names. Of two for one function, we write the first.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
    "tanh": "tanh",
    "linear": "linear",
}
_NOT = {False: True, True: False}


@dataclass(frozen=True)
class Argument:
    """One row.

    Args:
        theirs: the authors' argument.
        ours: our field.
        masked_lm: the authors' default in their masked language model; `None` if it has no such argument, or if the
            tensors show the value.
        translation: the same for their encoder-decoder.
        values: their values and ours, where they differ.
    """

    theirs: str
    ours: str
    masked_lm: Any = None
    translation: Any = None
    values: Mapping[Any, Any] | None = None

    def to_ours(self, value: Any) -> Any:
        """Our value for theirs.

        Raises:
            UserError: We have none.
        """
        if self.values is None:
            return value
        if value not in self.values:
            raise UserError(f"`{self.theirs}` is {value!r}. Choose one of {', '.join(map(str, self.values))}.")
        return self.values[value]

    def to_theirs(self, value: Any) -> Any:
        """Their value for ours.

        Raises:
            UserError: They have none.
        """
        if self.values is None:
            return value
        found = [theirs for theirs, ours in self.values.items() if ours == value]
        if not found:
            choices = ", ".join(map(str, dict.fromkeys(self.values.values())))
            raise UserError(f"`{self.ours}` is {value!r}, which the authors' code lacks. It has {choices}.")
        return found[0]


TABLE = (
    Argument("encoder_attention_heads", "num_attention_heads", 12, 8),
    Argument("activation_fn", "hidden_act", "gelu", "relu", ACTIVATIONS),
    Argument("pooler_activation_fn", "classifier_activation", "tanh", None, ACTIVATIONS),
    Argument("fix_projection_length", "dynamic_projection", False, False, _NOT),
    Argument("dropout", "hidden_dropout_prob", 0.1, 0.1),
    Argument("attention_dropout", "attention_probs_dropout_prob", 0.1, 0.0),
    Argument("activation_dropout", "activation_dropout", 0.0, 0.0),
    Argument("pooler_dropout", "classifier_dropout", 0.0),
    Argument("encoder_normalize_before", "norm_first", None, False),
    Argument("encoder_learned_pos", "position_embedding_type", None, False, {True: "learned", False: "sinusoidal"}),
    Argument("no_scale_embedding", "scale_embedding", None, False, _NOT),
    # Not one of theirs: their code had elu + 1 until August 2021, and softplus since.
    Argument("pack_activation", "pack_activation", None, "softplus"),
    # What the tensors show.
    Argument("encoder_layers", "num_hidden_layers"),
    Argument("encoder_embed_dim", "hidden_size"),
    Argument("encoder_ffn_embed_dim", "intermediate_size"),
    Argument("projection_length", "projection_length"),
    Argument("max_positions", "max_position_embeddings"),
    Argument("tokens_per_sample", "max_position_embeddings"),
    Argument("untie_luna_kv", "tie_kv", values=_NOT),
    Argument("untie_weights_luna", "tie_word_embeddings", values=_NOT),
)
# Other arguments that are read, with their defaults.
_OTHERS = {
    MASKED_LM: {"untie_weights_luna": False, "regression_target": False, "max_positions": 0},
    TRANSLATION: {
        "source_lang": "",
        "target_lang": "",
        "encoder_projected_attention_heads": 0,
        "no_token_positional_embeddings": False,
        "max_source_positions": 1024,
    },
}
_RUN = {"arch": "", "task": "", "criterion": ""}
# Arguments of encoder and decoder that our models have one field for.
_PAIRS = (
    *("embed_dim", "ffn_embed_dim", "attention_heads", "projected_attention_heads", "learned_pos", "normalize_before"),
)
# What translation chooses and the masked language model does not.
_FIXED = {
    "encoder_normalize_before": False,
    "encoder_learned_pos": True,
    "no_scale_embedding": True,
    "encoder_projected_attention_heads": 0,
}


def defaults(kind: str) -> dict[str, Any]:
    """The authors' arguments that define a model of a kind, with their defaults."""
    return {row.theirs: getattr(row, kind) for row in TABLE if getattr(row, kind) is not None}


def complete(kind: str, given: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """All arguments that define a model; `assumed` names those that have a default because the file lacks them.

    Args:
        kind: `MASKED_LM` or `TRANSLATION`.
        given: the arguments in the file, among others.
        overrides: values that replace them.

    Raises:
        UserError: An unknown name, a value of the wrong type, or a decoder that differs from its encoder.
    """
    known, overrides = {**_RUN, **_OTHERS[kind], **defaults(kind)}, overrides or {}
    if unknown := sorted(overrides.keys() - known.keys()):
        raise UserError(f"--override has no argument {', '.join(unknown)}. It has {', '.join(sorted(known))}.")
    present = {name: given[name] for name in known if given.get(name) is not None} | dict(overrides)
    for name in _PAIRS if kind == TRANSLATION else ():
        pair = [given.get(f"{part}_{name}") for part in ("encoder", "decoder")]
        if None not in pair and pair[0] != pair[1] and f"encoder_{name}" not in overrides:
            raise UserError(f"`encoder_{name}` is {pair[0]!r}, but `decoder_{name}` {pair[1]!r}: they must be equal.")
    values = {**known, **(_FIXED if kind == MASKED_LM else {})}
    if kind == MASKED_LM and "large" in str(given.get("arch")):  # the one default of theirs that no tensor shows
        values["encoder_attention_heads"] = 16
    for name, value in present.items():
        wanted = type(known[name])
        if type(value) is int and wanted is float:
            value = float(value)
        if type(value) is not wanted:
            raise UserError(f"The argument `{name}` is {value!r}, but must be of type {wanted.__name__}.")
        values[name] = value
    assumed = tuple(name for name in defaults(kind) if name not in present and name != "pack_activation")
    return argparse.Namespace(**values, assumed=assumed)


def to_fields(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Our fields for the arguments that no tensor shows.

    Raises:
        UserError: We lack a value.
    """
    return {row.ours: row.to_ours(getattr(options, row.theirs)) for row in TABLE if row.theirs in defaults(kind)}


def to_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    """The authors' arguments for the fields of a masked language model.

    Raises:
        UserError: They lack a value.
    """
    only_translation = defaults(TRANSLATION).keys() - defaults(MASKED_LM).keys()
    return {row.theirs: row.to_theirs(getattr(config, row.ours)) for row in TABLE if row.theirs not in only_translation}
