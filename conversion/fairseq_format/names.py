"""The authors' parameter names and ours: one table, read in both directions.

`{}` stands for the number of a layer, `<head>` for the name of a classification head. A name in no row is an error, and
`None` marks one that has no counterpart on purpose.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from luna_hf.scripting import UserError

SENTENCE_ENCODER, LM_HEAD, HEADS = "encoder.sentence_encoder.", "encoder.lm_head.", "classification_heads."
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
# In the causal attention of a decoder, the pack has a key and no value.
_CAUSAL = {**{name: ours for name, ours in ATTENTION.items() if not name.startswith("p")}, "pq_proj": "pack.query"}
_CAUSAL["pc_proj"] = "pack.key"


def _attention(theirs: str, ours: str, projections: Mapping[str, str] = ATTENTION) -> dict[str, str]:
    rows = {f"{theirs}.{name}": f"{ours}.self.{own}" for name, own in projections.items()}
    return {**rows, f"{theirs}.out_proj": f"{ours}.output.dense", f"{theirs}_layer_norm": f"{ours}.output.LayerNorm"}


_FEED_FORWARD = {"fc1": "intermediate.dense", "fc2": "output.dense", "final_layer_norm": "output.LayerNorm"}
_ENCODER_LAYER = {
    **_attention("self_attn", "attention"),
    "self_atten_proj_layer_norm": "attention.self.packed_layer_norm",
    **_FEED_FORWARD,
}
_DECODER_LAYER = {
    **_attention("self_attn", "attention", _CAUSAL),
    **_attention("encoder_attn", "crossattention"),
    "encoder_atten_proj_layer_norm": "crossattention.self.packed_layer_norm",
    **_FEED_FORWARD,
}
_EMBEDDINGS = {
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "embed_positions.weight": "embeddings.position_embeddings.weight",
    "segment_embeddings.weight": "embeddings.token_type_embeddings.weight",
    # Buffers, which our constructor computes.
    **dict.fromkeys(("projected_positions", "embed_positions._float_tensor", "embed_positions.version", "version")),
}


def _rows(
    theirs: str, ours: str, modules: Mapping[str, str], tensors: Mapping[str, str | None], layer: Mapping[str, str]
) -> dict[str, str | None]:
    """Rows of a part of the model: modules, which have a weight and a bias, single tensors, and modules of a layer."""
    modules = {**modules, **{f"layers.{{}}.{name}": f"encoder.layer.{{}}.{own}" for name, own in layer.items()}}
    spelled = {f"{name}.{kind}": f"{own}.{kind}" for name, own in modules.items() for kind in ("weight", "bias")}
    return {theirs + name: own and ours + own for name, own in {**spelled, **tensors}.items()}


def _encoder(theirs: str, ours: str, norm: str, packed_norm: str) -> dict[str, str | None]:
    modules = {norm: "embeddings.LayerNorm", packed_norm: "packed_embeddings.LayerNorm"}
    modules |= {"layer_norm": "encoder.final_layer_norm", "proj_layer_norm": "packed_layer_norm"}
    tensors = {**_EMBEDDINGS, "projected_embeddings": "packed_embeddings.weight"}
    return _rows(theirs, ours, modules, tensors, _ENCODER_LAYER)


_CLASSIFIER = {
    "dense": "classifier.dense",
    "out_proj": "classifier.out_proj",
    "in_proj": "pooling.in_proj",
    "attn.q_proj": "pooling.query",
    "attn.k_proj": "pooling.key",
    "attn.v_proj": "pooling.value",
    "attn.out_proj": "pooling.output",
    "layernorm": "pooling.LayerNorm",
}
_LM_HEAD = {"dense": "dense", "layer_norm": "layer_norm"}, {"weight": "decoder.weight", "bias": "bias"}
_DECODER = {"layernorm_embedding": "embeddings.LayerNorm", "layer_norm": "encoder.final_layer_norm"}
# Nothing reads the decoder's last packed states.
_UNREAD = dict.fromkeys(("proj_layer_norm.weight", "proj_layer_norm.bias"))
NAMES = {
    **_encoder(SENTENCE_ENCODER, "luna.", "emb_layer_norm", "proj_emb_layer_norm"),
    **_rows(LM_HEAD, "lm_head.", *_LM_HEAD, {}),
    **_rows(f"{HEADS}<head>.", "", _CLASSIFIER, {}, {}),
    # Translation. `porjected` is the authors' spelling.
    **_encoder("encoder.", "luna.encoder.", "layernorm_embedding", "layernorm_porjected_embedding"),
    **_rows("decoder.", "luna.decoder.", _DECODER, {**_EMBEDDINGS, **_UNREAD}, _DECODER_LAYER),
    "decoder.output_projection.weight": "lm_head.weight",
}
# Second names of parameters that are in the table.
OUR_ALIASES = {"lm_head.decoder.bias": "lm_head.bias"}
_NUMBER = re.compile(r"(?<=\blayers\.)\d+|(?<=\blayer\.)\d+")
_HEAD = re.compile(rf"^{HEADS}([^.]+)\.")


def is_norm(name: str) -> bool:
    """Whether a tensor of the authors is the weight of a LayerNorm."""
    return "norm" in name and name.endswith(".weight")


def shift_norms(weights: Mapping[str, Tensor], offset: float) -> dict[str, Tensor]:
    """Add a number to every LayerNorm weight, in at least float32: `1 + w` needs more digits than `w`."""
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + offset
        if offset and is_norm(name)
        else tensor
        for name, tensor in weights.items()
    }


def _look_up(name: str, table: Mapping[str, str | None]) -> str | None:
    number = _NUMBER.search(name)
    found = table[_NUMBER.sub("{}", _HEAD.sub(f"{HEADS}<head>.", name), count=1)]
    return found and found.replace("{}", number[0] if number else "")


def to_ours(weights: Mapping[str, Tensor], part: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """Translate the authors' tensors.

    Args:
        weights: by their full names (see `checkpoint.full_names`).
        part: what to keep beside the encoder: `"lm_head"`, the name of a classification head, `"translation"` for an
            encoder-decoder, or `None` for an encoder alone.

    Returns:
        The tensors by our names, and the names of unused ones.

    Raises:
        UserError: A name is in no row.
    """
    tensors, unused, unknown = {}, [], []
    for name, tensor in weights.items():
        try:
            ours = _look_up(name, NAMES)
        except KeyError:
            unknown.append(name)
            continue
        head = _HEAD.match(name)
        owner = head[1] if head else "lm_head" if name.startswith(LM_HEAD) else None
        if ours is None or owner not in (None, part):
            unused.append(name)
        else:
            tensors[ours.removeprefix("luna.") if part is None else ours] = tensor
    if unknown:
        raise UserError(f"The checkpoint has tensors of unknown names: {', '.join(unknown[:5])}. It is not supported.")
    return tensors, unused


def to_theirs(tensors: Mapping[str, Tensor], part: str | None) -> dict[str, Tensor]:
    """Translate the state of one of our models; the inverse of `to_ours`.

    Raises:
        UserError: The authors' model lacks a parameter.
    """
    inverse = {ours: theirs for theirs, ours in NAMES.items() if ours is not None}
    theirs = {}
    for name, tensor in tensors.items():
        if name in OUR_ALIASES:
            continue
        try:
            found = _look_up(name if part is not None else f"luna.{name}", inverse)
        except KeyError:
            raise UserError(f"The authors' code has no counterpart of `{name}`.") from None
        theirs[found.replace("<head>", part or "")] = tensor
    return theirs
