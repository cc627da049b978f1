"""The authors' parameter names and ours, as data, and the translation of a checkpoint in both directions.

A name that stands in no table is an error; `None` marks what has no counterpart on purpose. In the tables `{}` is the
number of a layer, and a module's name stands for its `.weight` and `.bias`.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from fairseq_checkpoint import HEADS, NORM
from shared import UserError
from torch import Tensor

# The attention of a layer: pack, then unpack; tied models have `pc_proj` and `c_proj`, untied ones the other four.
ATTENTION = {
    "pq_proj": "pack.query",
    "pc_proj": "pack.key_value",
    "pk_proj": "pack.key",
    "pv_proj": "pack.value",
    "q_proj": "query",
    "c_proj": "key_value",
    "k_proj": "key",
    "v_proj": "value",
}
LAYER = {
    **{f"self_attn.{theirs}": f"attention.self.{ours}" for theirs, ours in ATTENTION.items()},
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "self_atten_proj_layer_norm": "attention.self.packed_layer_norm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
ENCODER_MODULES = {
    "emb_layer_norm": "embeddings.LayerNorm",
    "proj_emb_layer_norm": "packed_embeddings.LayerNorm",
    "layer_norm": "encoder.final_layer_norm",
    "proj_layer_norm": "packed_layer_norm",
    **{f"layers.{{}}.{theirs}": f"encoder.layer.{{}}.{ours}" for theirs, ours in LAYER.items()},
}
ENCODER_TENSORS = {
    "projected_embeddings": "packed_embeddings.weight",
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "embed_positions.weight": "embeddings.position_embeddings.weight",
    "segment_embeddings.weight": "embeddings.token_type_embeddings.weight",
    # Buffers of models with sinusoidal positions, which the constructor computes.
    "projected_positions": None,
    "embed_positions._float_tensor": None,
    "embed_positions.version": None,
}
LM_HEAD_MODULES = {"dense": "lm_head.dense", "layer_norm": "lm_head.layer_norm"}
LM_HEAD_TENSORS = {"weight": "lm_head.decoder.weight", "bias": "lm_head.bias"}
CLASSIFIER_MODULES = {
    "dense": "classifier.dense",
    "out_proj": "classifier.out_proj",
    "in_proj": "pooling.in_proj",
    "attn.q_proj": "pooling.query",
    "attn.k_proj": "pooling.key",
    "attn.v_proj": "pooling.value",
    "attn.out_proj": "pooling.output",
    "layernorm": "pooling.LayerNorm",
}
# Of ours, what is another name for a parameter that stands in a table.
OUR_ALIASES = {"lm_head.decoder.bias": "lm_head.bias"}


def _whole(modules: Mapping[str, str], tensors: Mapping[str, str | None]) -> dict[str, str | None]:
    kinds = ("weight", "bias")
    return {**{f"{a}.{kind}": f"{b}.{kind}" for a, b in modules.items() for kind in kinds}, **tensors}


# Complete names to complete names, by part of the model.
ENCODER = _whole(ENCODER_MODULES, ENCODER_TENSORS)
LM_HEAD = _whole(LM_HEAD_MODULES, LM_HEAD_TENSORS)
CLASSIFIER = _whole(CLASSIFIER_MODULES, {})
THEIR_ENCODER, THEIR_LM_HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
OUR_ENCODER = "luna."
TIED = f"{THEIR_LM_HEAD}weight"
EMBEDDING = f"{THEIR_ENCODER}embed_tokens.weight"
_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=layer\.)\d+")


class Translated(NamedTuple):
    """Tensors under new names, and the names of those that found no use."""

    tensors: dict[str, Tensor]
    unused: list[str]


def look_up(name: str, table: Mapping[str, str | None]) -> str | None:
    """The counterpart of a name, `None` if there is none on purpose.

    Raises:
        KeyError: The name stands nowhere in the table.
    """
    number = _NUMBER.search(name)
    target = table[_NUMBER.sub("{}", name, count=1)]
    return target if target is None or number is None else target.format(number[0])


def inverse(table: Mapping[str, str | None]) -> dict[str, str]:
    """Ours to theirs."""
    return {ours: theirs for theirs, ours in table.items() if ours is not None}


def split(name: str) -> tuple[str, str, Mapping[str, str | None]]:
    """The part of the authors' model that a name belongs to, the rest of the name, and the part's table."""
    parts = ((THEIR_ENCODER, ENCODER), (THEIR_LM_HEAD, LM_HEAD))
    for prefix, table in parts:
        if name.startswith(prefix):
            return prefix, name.removeprefix(prefix), table
    if name.startswith(HEADS) and name.count(".") > 1:
        prefix = ".".join(name.split(".")[:2]) + "."
        return prefix, name.removeprefix(prefix), CLASSIFIER
    raise KeyError(name)


def to_ours(weights: Mapping[str, Tensor], part: str | None, norm_offset: float = 0.0) -> Translated:
    """Translate the authors' tensors.

    Args:
        weights: under their full names (see `fairseq_checkpoint.official_names`).
        part: what the model has on its encoder: `"lm_head"`, a classification head's name, or `None`.
        norm_offset: added to the weight of every LayerNorm, which is then in float32 at least.

    Raises:
        UserError: A name that stands in no table.
    """
    wanted = {None: None, "lm_head": THEIR_LM_HEAD}.get(part, f"{HEADS}{part}.")
    tensors, unused, unknown = {}, [], []
    for name, tensor in weights.items():
        try:
            prefix, rest, table = split(name)
            ours = look_up(rest, table)
        except KeyError:
            unknown.append(name)
            continue
        if ours is None or prefix not in (THEIR_ENCODER, wanted):
            unused.append(name)
            continue
        if prefix == THEIR_ENCODER and part is not None:
            ours = OUR_ENCODER + ours
        tensors[ours] = _shifted(name, tensor, norm_offset)
    if unknown:
        raise UserError(
            f"The checkpoint has {len(unknown)} tensors that this converter does not know, so it is not the authors' "
            f"masked language model: {', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}."
        )
    return Translated(tensors, unused)


def to_theirs(tensors: Mapping[str, Tensor], part: str | None, norm_offset: float = 0.0) -> dict[str, Tensor]:
    """Translate the state of a model of ours; the inverse of `to_ours`.

    Raises:
        UserError: A parameter that the authors' model does not have.
    """
    encoder, lm_head, classifier = inverse(ENCODER), inverse(LM_HEAD), inverse(CLASSIFIER)
    theirs, unknown = {}, []
    for name, tensor in tensors.items():
        if name in OUR_ALIASES:
            continue
        try:
            if part is None or name.startswith(OUR_ENCODER):
                full = THEIR_ENCODER + look_up(name.removeprefix(OUR_ENCODER), encoder)
            elif part == "lm_head":
                full = THEIR_LM_HEAD + look_up(name, lm_head)
            else:
                full = f"{HEADS}{part}." + look_up(name, classifier)
        except KeyError:
            unknown.append(name)
            continue
        theirs[full] = _shifted(full, tensor, -norm_offset).to(tensor.dtype)
    if unknown:
        raise UserError(f"The authors' code has no counterpart of {', '.join(unknown[:5])}.")
    return theirs


def _shifted(name: str, tensor: Tensor, offset: float) -> Tensor:
    if not offset or not NORM.search(name):
        return tensor
    # Half precision has fewer digits for 1 + w than for a small w.
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + offset
