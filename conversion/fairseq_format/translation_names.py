"""The names of the authors' encoder-decoder, as tables (see `names.py`), and the translation of its tensors."""

from collections.abc import Mapping

from torch import Tensor

from luna_hf.scripting import UserError

from .names import ATTENTION, ENCODER, look_up, with_tensors

# The causal attention of a decoder layer. `pc_proj` is a key alone, and has no value.
_CAUSAL = {**ATTENTION, "pc_proj": "pack.key"}
_LAYER = {
    **{f"self_attn.{theirs}": f"attention.self.{ours}" for theirs, ours in _CAUSAL.items()},
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    **{f"encoder_attn.{theirs}": f"crossattention.self.{ours}" for theirs, ours in ATTENTION.items()},
    "encoder_attn.out_proj": "crossattention.output.dense",
    "encoder_attn_layer_norm": "crossattention.output.LayerNorm",
    "encoder_atten_proj_layer_norm": "crossattention.self.packed_layer_norm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
# Buffers, which our constructor computes, and the decoder's last packed states, which nothing reads.
_UNUSED = ("version", "embed_positions._float_tensor", "embed_positions.version", "projected_positions")
SOURCE = {
    **{name: ours for name, ours in ENCODER.items() if "emb_layer_norm" not in name},
    **with_tensors(
        {
            "layernorm_embedding": "embeddings.LayerNorm",
            "layernorm_porjected_embedding": "packed_embeddings.LayerNorm",  # the authors' spelling
        }
    ),
    **dict.fromkeys(_UNUSED),
}
TARGET = {
    **with_tensors(
        {
            "layernorm_embedding": "embeddings.LayerNorm",
            "layer_norm": "encoder.final_layer_norm",
            **{f"layers.{{}}.{theirs}": f"encoder.layer.{{}}.{ours}" for theirs, ours in _LAYER.items()},
        }
    ),
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "embed_positions.weight": "embeddings.position_embeddings.weight",
    **dict.fromkeys((*_UNUSED, "proj_layer_norm.weight", "proj_layer_norm.bias")),
}
OUTPUT = "decoder.output_projection.weight"
_TABLES = {"encoder.": SOURCE, "decoder.": TARGET}


def to_ours(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Translate the authors' tensors to those of `LunaForConditionalGeneration`, and list the unused ones.

    Raises:
        UserError: A name is in no table.
    """
    tensors, unused, unknown = {}, [], []
    for name, tensor in weights.items():
        if name == OUTPUT:
            tensors["lm_head.weight"] = tensor
            continue
        part = name[: name.find(".") + 1]
        try:
            ours = look_up(name.removeprefix(part), _TABLES[part])
        except KeyError:
            unknown.append(name)
            continue
        if ours is None:
            unused.append(name)
        else:
            tensors[f"luna.{part}{ours}"] = tensor
    if unknown:
        raise UserError(f"The checkpoint has tensors of unknown names: {', '.join(unknown[:5])}. It is not supported.")
    return tensors, unused
