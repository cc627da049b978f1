"""The authors' parameter names and options, translated to ours, for the parity tests."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from luna_hf import LunaConfig

FIXTURES = Path(__file__).parent / "fixtures"

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
ENCODER = {
    "projected_embeddings": "packed_embeddings.weight",
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "embed_positions.weight": "embeddings.position_embeddings.weight",
    "segment_embeddings.weight": "embeddings.token_type_embeddings.weight",
    "emb_layer_norm": "embeddings.LayerNorm",
    "proj_emb_layer_norm": "packed_embeddings.LayerNorm",
    "layer_norm": "encoder.final_layer_norm",
    "proj_layer_norm": "packed_layer_norm",
    # Buffers that the constructor recomputes.
    "projected_positions": None,
    "embed_positions._float_tensor": None,
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
LM_HEAD = {"dense": "dense", "layer_norm": "layer_norm"}
CLASSIFIER = {
    "dense": "classifier.dense",
    "out_proj": "classifier.out_proj",
    "in_proj": "pooling.in_proj",
    "attn.q_proj": "pooling.query",
    "attn.k_proj": "pooling.key",
    "attn.v_proj": "pooling.value",
    "attn.out_proj": "pooling.output",
    "layernorm": "pooling.LayerNorm",
}


class Fixture:
    """One fixture: options, weights, and the inputs and outputs of each case."""

    def __init__(self, group: str, name: str):
        path = FIXTURES / group / name
        self.meta = json.loads(path.with_suffix(".json").read_text())
        self.tensors = load_file(path.with_suffix(".safetensors"))
        self.config = self.meta["config"]
        self.cases = list(self.meta["cases"])

    def weights(self) -> dict[str, torch.Tensor]:
        """The authors' state dict."""
        return {n.removeprefix("state_dict."): t for n, t in self.tensors.items() if n.startswith("state_dict.")}

    def input(self, case: str, name: str) -> torch.Tensor | None:
        """An input, or `None` if the case has none of that name."""
        return self.tensors.get(f"{case}.input.{name}")

    def output(self, case: str, name: str) -> torch.Tensor | None:
        """An output of the authors' code, or `None`."""
        return self.tensors.get(f"{case}.output.{name}")

    def float32_error(self, case: str) -> float:
        """How far the authors' own float32 run is from their float64 run."""
        return self.meta["max_abs_diff_float32_vs_float64"][case]


def translate(weights: dict[str, torch.Tensor], names: dict[str, str | None], prefix: str = "") -> dict:
    """Rename by table: an exact name, or a module name followed by `.weight` or `.bias`. Unknown names are an error."""
    translated = {}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if name in names:
            target = names[name]
        elif module in names:
            target = f"{names[module]}.{kind}"
        else:
            raise KeyError(name)
        if target is not None:
            translated[prefix + target] = tensor
    return translated


def encoder_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the authors' sentence encoder under the names of `LunaModel`."""
    translated = translate({n: t for n, t in weights.items() if not n.startswith("layers.")}, ENCODER)
    for name, tensor in weights.items():
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
            translated |= translate({match[2]: tensor}, LAYER, f"encoder.layer.{match[1]}.")
    return translated


def mlm_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the authors' masked language model under the names of `LunaForMaskedLM`."""
    encoder = part(weights, "encoder.sentence_encoder.")
    head = part(weights, "encoder.lm_head.")
    decoder = {"lm_head.decoder.weight": head.pop("weight"), "lm_head.bias": head["bias"]}
    decoder["lm_head.decoder.bias"] = head.pop("bias")
    ours = {f"luna.{n}": t for n, t in encoder_weights(encoder).items()}
    return ours | translate(head, LM_HEAD, "lm_head.") | decoder


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries under a prefix, without it."""
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def mlm_config(fixture: Fixture, **overrides) -> LunaConfig:
    """Our configuration for a `luna_mlm` fixture."""
    args = fixture.config["args"]
    return LunaConfig(
        vocab_size=fixture.config["vocab_size"],
        hidden_size=args["encoder_embed_dim"],
        num_hidden_layers=args["encoder_layers"],
        num_attention_heads=args["encoder_attention_heads"],
        intermediate_size=args["encoder_ffn_embed_dim"],
        projection_length=args["projection_length"],
        dynamic_projection=not args["fix_projection_length"],
        tie_kv=not args["untie_luna_kv"],
        max_position_embeddings=args["max_positions"],
        hidden_act=args["activation_fn"],
        classifier_activation=args["pooler_activation_fn"],
        tie_word_embeddings=not args["untie_weights_luna"],
        pad_token_id=fixture.config["padding_idx"],
        **overrides,
    )


def sentence_encoder_config(fixture: Fixture) -> LunaConfig:
    """Our configuration for a `luna_sentence_encoder` fixture."""
    options = fixture.config
    return LunaConfig(
        vocab_size=options["vocab_size"],
        hidden_size=options["embedding_dim"],
        num_hidden_layers=options["num_encoder_layers"],
        num_attention_heads=options["num_attention_heads"],
        num_projected_attention_heads=options["num_projected_attention_heads"],
        intermediate_size=options["ffn_embedding_dim"],
        projection_length=options["projection_length"],
        dynamic_projection=options["dynamic_projection"],
        tie_kv=options["tie_kv"],
        max_position_embeddings=options["max_seq_len"],
        hidden_act=options["activation_fn"],
        position_embedding_type="learned" if options["learned_pos_embedding"] else "sinusoidal",
        embedding_layer_norm=options["layernorm_embedding"],
        norm_first=options["normalize_before"],
        type_vocab_size=options.get("num_segments", 0),
        pad_token_id=options["padding_idx"],
    )
