"""The authors' fixtures by our names and options, through the converter that users run."""

import json
from pathlib import Path
from typing import Any

import torch
from fairseq_format.arguments import complete
from fairseq_format.checkpoint import Original
from fairseq_format.config import Head, make_config
from fairseq_format.names import ATTENTION, SENTENCE_ENCODER, to_ours
from safetensors.torch import load_file

from luna_hf import LunaConfig

FIXTURES = Path(__file__).parent / "fixtures"
CHECKPOINTS = FIXTURES / "luna_fairseq_checkpoint"  # written by the authors' code: `tied` and `untied`
MLM = ["tied_dynamic", "tied_fixed", "untied_dynamic", "untied_fixed"]  # of the group `luna_mlm`
# The classification heads of each, and what they read.
POOLINGS = {
    "cls_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}


class Fixture:
    """One fixture: options, weights, and the inputs and outputs of each case."""

    def __init__(self, group: str, name: str):
        self.path = FIXTURES / group / f"{name}.safetensors"
        self.meta = json.loads(self.path.with_suffix(".json").read_text())
        self.tensors = load_file(self.path)
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
        """How far the authors' float32 run is from their float64 run."""
        return self.meta["max_abs_diff_float32_vs_float64"][case]

    def original(self, **changes: Any) -> Original:
        """A `luna_mlm` fixture as an opened checkpoint, with changes to its arguments."""
        return Original(self.path.stem, self.weights(), complete("masked_lm", {**self.config["args"], **changes}))


def encoder_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the authors' sentence encoder by the names of `LunaModel`."""
    return to_ours({SENTENCE_ENCODER + name: tensor for name, tensor in weights.items()}, None)[0]


def attention_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the authors' attention alone by the names of `LunaAttention`."""
    return {f"{ATTENTION[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": t for name, t in weights.items()}


def mlm_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the authors' masked language model by the names of `LunaForMaskedLM`."""
    ours, _ = to_ours(weights, "lm_head")
    return {**ours, "lm_head.decoder.bias": ours["lm_head.bias"]}


def head_weights(weights: dict[str, torch.Tensor], head: str) -> dict[str, torch.Tensor]:
    """Weights of the authors' model with a classification head by the names of `LunaForSequenceClassification`."""
    return to_ours(weights, head)[0]


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries under a prefix, without it."""
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def mlm_config(fixture: Fixture, **overrides) -> LunaConfig:
    """Our configuration for a `luna_mlm` fixture with its masked-LM head."""
    return LunaConfig(**{**make_config(fixture.original(), Head("lm_head", "masked_lm")).to_diff_dict(), **overrides})


def classifier_config(fixture: Fixture, head: str) -> LunaConfig:
    """Our configuration for a `luna_mlm` fixture with one of its classification heads."""
    return make_config(fixture.original(), Head(head, "classification"))


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


def seq2seq_config(fixture: Fixture, **overrides) -> LunaConfig:
    """Our configuration for a `luna_seq2seq` fixture."""
    original = Original(fixture.path.stem, fixture.weights(), complete("translation", fixture.config["args"]))
    fields = make_config(original, Head("translation", "translation")).to_diff_dict()
    return LunaConfig(**{**fields, **overrides})
