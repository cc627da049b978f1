"""The authors' parameter names and ours, as tables, and the translation of a checkpoint in both directions.

A name in no table is an error. `None` marks a name that has no counterpart on purpose. `{}` stands for the number of a
layer, and the name of a module for its `.weight` and `.bias`.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from luna_hf.scripting import UserError

from .checkpoint import HEADS, LM_HEAD, SENTENCE_ENCODER, plain_norm

# A layer's attention: pack, then unpack. Tied models have `pc_proj` and `c_proj`, untied ones the other four.
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
_LAYER = {
    **{f"self_attn.{theirs}": f"attention.self.{ours}" for theirs, ours in ATTENTION.items()},
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "self_atten_proj_layer_norm": "attention.self.packed_layer_norm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}


def with_tensors(modules: Mapping[str, str], **tensors: str) -> dict[str, str | None]:
    """Spell out the weight and bias of each module, beside other tensors."""
    kinds = ("weight", "bias")
    return {**{f"{a}.{kind}": f"{b}.{kind}" for a, b in modules.items() for kind in kinds}, **tensors}


# Complete names to complete names, by part of the model.
ENCODER = {
    **with_tensors(
        {
            "emb_layer_norm": "embeddings.LayerNorm",
            "proj_emb_layer_norm": "packed_embeddings.LayerNorm",
            "layer_norm": "encoder.final_layer_norm",
            "proj_layer_norm": "packed_layer_norm",
            **{f"layers.{{}}.{theirs}": f"encoder.layer.{{}}.{ours}" for theirs, ours in _LAYER.items()},
        }
    ),
    "projected_embeddings": "packed_embeddings.weight",
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "embed_positions.weight": "embeddings.position_embeddings.weight",
    "segment_embeddings.weight": "embeddings.token_type_embeddings.weight",
    # Buffers of models with sinusoidal positions, which our constructor computes.
    "projected_positions": None,
    "embed_positions._float_tensor": None,
    "embed_positions.version": None,
}
MASKED_LM = with_tensors(
    {"dense": "lm_head.dense", "layer_norm": "lm_head.layer_norm"}, weight="lm_head.decoder.weight", bias="lm_head.bias"
)
CLASSIFIER = with_tensors(
    {
        "dense": "classifier.dense",
        "out_proj": "classifier.out_proj",
        "in_proj": "pooling.in_proj",
        "attn.q_proj": "pooling.query",
        "attn.k_proj": "pooling.key",
        "attn.v_proj": "pooling.value",
        "attn.out_proj": "pooling.output",
        "layernorm": "pooling.LayerNorm",
    }
)
# Second names of parameters that are in a table.
OUR_ALIASES = {"lm_head.decoder.bias": "lm_head.bias"}
OUR_ENCODER = "luna."
_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=layer\.)\d+")


def look_up(name: str, table: Mapping[str, str | None]) -> str | None:
    """The counterpart of a name, or `None` if it has none on purpose.

    Raises:
        KeyError: The name is not in the table.
    """
    number = _NUMBER.search(name)
    target = table[_NUMBER.sub("{}", name, count=1)]
    return target if target is None or number is None else target.format(number[0])


def _inverse(table: Mapping[str, str | None]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in table.items() if ours is not None}


def _split(name: str) -> tuple[str, Mapping[str, str | None]]:
    """The prefix of the part of the authors' model that a name belongs to, and the part's table."""
    for prefix, table in ((SENTENCE_ENCODER, ENCODER), (LM_HEAD, MASKED_LM)):
        if name.startswith(prefix):
            return prefix, table
    if name.startswith(HEADS) and name.count(".") > 1:
        return ".".join(name.split(".")[:2]) + ".", CLASSIFIER
    raise KeyError(name)


def to_ours(
    weights: Mapping[str, Tensor], part: str | None, norm_offset: float = 0.0
) -> tuple[dict[str, Tensor], list[str]]:
    """Translate the authors' tensors.

    Args:
        weights: by their full names (see `checkpoint.official_names`).
        part: the head to keep: `"lm_head"`, the name of a classification head, or `None` for the encoder alone.
        norm_offset: added to every LayerNorm weight, in at least float32.

    Returns:
        The tensors by our names, and the names of unused ones.

    Raises:
        UserError: A name is in no table.
    """
    wanted = {None: None, "lm_head": LM_HEAD}.get(part, f"{HEADS}{part}.")
    tensors, unused, unknown = {}, [], []
    for name, tensor in weights.items():
        try:
            prefix, table = _split(name)
            ours = look_up(name.removeprefix(prefix), table)
        except KeyError:
            unknown.append(name)
            continue
        if ours is None or prefix not in (SENTENCE_ENCODER, wanted):
            unused.append(name)
            continue
        if prefix == SENTENCE_ENCODER and part is not None:
            ours = OUR_ENCODER + ours
        tensors[ours] = plain_norm(name, tensor, norm_offset)
    if unknown:
        raise UserError(f"The checkpoint has tensors of unknown names: {', '.join(unknown[:5])}. It is not supported.")
    return tensors, unused


def to_theirs(tensors: Mapping[str, Tensor], part: str | None, norm_offset: float = 0.0) -> dict[str, Tensor]:
    """Translate the state of one of our models; the inverse of `to_ours`.

    Raises:
        UserError: The authors' model lacks a parameter.
    """
    head_prefix, head = (LM_HEAD, MASKED_LM) if part == "lm_head" else (f"{HEADS}{part}.", CLASSIFIER)
    theirs = {}
    for name, tensor in tensors.items():
        if name in OUR_ALIASES:
            continue
        in_encoder = part is None or name.startswith(OUR_ENCODER)
        prefix, table = (SENTENCE_ENCODER, ENCODER) if in_encoder else (head_prefix, head)
        try:
            full = prefix + look_up(name.removeprefix(OUR_ENCODER), _inverse(table))
        except KeyError:
            raise UserError(f"The authors' code has no counterpart of `{name}`.") from None
        theirs[full] = plain_norm(full, tensor, -norm_offset).to(tensor.dtype)
    return theirs
