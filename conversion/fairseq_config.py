"""Our configuration for a checkpoint of the authors.

What the shapes and names of the tensors tell is taken from them; the rest from the arguments.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from fairseq_checkpoint import HEADS, Options, Original, layers
from fairseq_names import EMBEDDING, THEIR_ENCODER, TIED
from shared import UserError
from torch import Tensor

from luna_hf import LunaConfig

# Specials of every fairseq dictionary.
BOS, PAD, EOS, UNK = 0, 1, 2, 3
# The authors' activations under transformers' names.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
    "tanh": "tanh",
    "linear": "linear",
}
# Which vector a classification head reads follows from its name.
POOLINGS = {"pooling_classification_head": "packed_max", "attention_classification_head": "packed_attention"}
SHAPED = ("embed_tokens.weight", "embed_positions.weight", "projected_embeddings", "layers.0.fc1.weight")
RANKING = ("sentence_ranking", "commonsense_qa")
HEAD_TYPES = ("classification", "regression", "ranking")


@dataclasses.dataclass(frozen=True)
class Head:
    """What a converted model has on its encoder.

    Args:
        part: `"lm_head"`, the name of a classification head, or `None` for an encoder alone.
        kind: `"masked_lm"`, `"encoder"`, or one of `HEAD_TYPES`.
        labels: names of the classes in the order of the outputs; empty if they are not known.
    """

    part: str | None
    kind: str
    labels: tuple[str, ...] = ()


def is_tied(original: Original) -> bool:
    """Whether the output layer is the matrix of the token embedding: it is absent, or the same and not said apart."""
    output = original.weights.get(TIED)
    if output is None:
        return True
    same = torch.equal(output, original.weights[EMBEDDING])
    return same and not original.options.untie_weights_luna


def classes(weights: Mapping[str, Tensor], name: str) -> int:
    """Number of outputs of a classification head.

    Raises:
        UserError: The head lacks a layer.
    """
    for part in ("dense.weight", "out_proj.weight"):
        layer = weights.get(f"{HEADS}{name}.{part}")
        if layer is None or layer.ndim != 2 or not len(layer):
            raise UserError(f"The head {name} is not whole: it has no `{part}`, or none with rows and columns.")
    return weights[f"{HEADS}{name}.out_proj.weight"].shape[0]


def make_config(original: Original, head: Head) -> LunaConfig:
    """Our configuration of a checkpoint.

    Raises:
        UserError: The checkpoint is none of the authors' masked language model, or its parts do not fit.
    """
    weights, options = original.weights, original.options
    encoder = {name.removeprefix(THEIR_ENCODER): tensor for name, tensor in weights.items()}
    _check_kind(encoder)
    vocab_size, width = encoder["embed_tokens.weight"].shape
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers(weights),
        "num_attention_heads": _attention_heads(original, width),
        "intermediate_size": encoder["layers.0.fc1.weight"].shape[0],
        "projection_length": encoder["projected_embeddings"].shape[0],
        "max_position_embeddings": encoder["embed_positions.weight"].shape[0] - PAD - 1,
        "tie_kv": "layers.0.self_attn.c_proj.weight" in encoder,
        "dynamic_projection": not options.fix_projection_length,
        "tie_word_embeddings": is_tied(original),
        "hidden_act": _activation("activation_fn", options),
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.attention_dropout,
        "activation_dropout": options.activation_dropout,
        "classifier_dropout": options.pooler_dropout,
        "classifier_activation": _activation("pooler_activation_fn", options),
    }
    if head.kind in HEAD_TYPES:
        fields |= _head_fields(weights, head)
    try:
        return LunaConfig(**fields)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_kind(encoder: Mapping[str, Tensor]) -> None:
    """Refuse encoders that the authors' masked language model never is."""
    required = ("embed_positions.weight", "emb_layer_norm.weight", "layers.0.fc1.weight")
    missing = [name for name in required if name not in encoder]
    flat = [name for name in SHAPED if name in encoder and encoder[name].ndim != 2]
    if flat:
        raise UserError(f"The checkpoint is damaged: {', '.join(flat)} should have rows and columns.")
    foreign = [name for name in ("layer_norm.weight", "segment_embeddings.weight") if name in encoder]
    if missing or foreign:
        what = f"it lacks {', '.join(missing)}" if missing else f"it has {', '.join(foreign)}"
        raise UserError(
            f"The checkpoint is an encoder of Luna, but not of the authors' masked language model: {what}. Those have "
            "learned positions, a LayerNorm on the embeddings, post-norm layers and no segments."
        )


def _head_fields(weights: Mapping[str, Tensor], head: Head) -> dict[str, Any]:
    inner = weights[f"{HEADS}{head.part}.dense.weight"].shape[0]
    fields: dict[str, Any] = {
        "classifier_pooling": POOLINGS.get(head.part, "cls"),
        "classifier_hidden_size": inner,
    }
    if head.kind == "regression":
        fields |= {"num_labels": 1, "problem_type": "regression"}
    elif head.kind == "classification":
        count = classes(weights, head.part)
        names = head.labels or tuple(f"LABEL_{index}" for index in range(count))
        fields |= {
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }
    return fields


def _attention_heads(original: Original, width: int) -> int:
    heads = original.options.encoder_attention_heads
    if heads < 1 or width % heads:
        where = "not in the file, so the authors' default" if "encoder_attention_heads" in original.assumed else "given"
        raise UserError(
            f"{heads} attention heads ({where}) do not divide the width {width}. Give the number that the model was "
            "trained with: --override encoder_attention_heads=N."
        )
    return heads


def _activation(name: str, options: Options) -> str:
    activation = getattr(options, name)
    if activation not in ACTIVATIONS:
        raise UserError(f"The argument `{name}` is {activation!r}; known are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[activation]
