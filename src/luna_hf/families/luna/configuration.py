"""Configuration of Luna (Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021)."""

from huggingface_hub.dataclasses import strict

from ...configuration import BoundedMemoryConfig


@strict
class LunaConfig(BoundedMemoryConfig):
    r"""
    Configuration of the Luna models. The defaults are the paper's base model (12 layers, width 768, 128 slots, tied
    keys and values).

    It has the fields of all families (see `BoundedMemoryConfig`), and its own.

    Args:
        projection_length: number of slots `l` of the packed sequence P.
        num_projected_attention_heads: number of heads of the pack attention; must divide `hidden_size`. Defaults to
            `num_attention_heads`, which causal attention always has: decoder-only models accept no other number.
        tie_kv: whether keys and values share one matrix, in both pack and unpack attention. The base model has 132 M
            parameters if tied and 146 M if not (147 M in the paper).
        dynamic_projection: whether a row with fewer tokens than slots uses only as many slots as it has tokens.
            Otherwise, and always in decoder-only models, every row uses all slots.
        tokens_per_slot: with `dynamic_projection` only: a row uses one slot for every `tokens_per_slot` tokens, rounded
            up, until all slots are used. With a value of 4 and 128 slots, a row of 128 tokens uses 32 slots, and one of
            512 tokens or more uses all of them. Not in the paper; makes short texts faster.
        pack_activation: decoders only: activation of the pack attention, `"softplus"` (log2(1 + 2^x), as in the
            authors' code) or `"elu"` (elu(x) + 1), divided by the number of tokens so far; or, not in the paper,
            `"exp"`, divided by its running sum: softmax over the tokens so far, without dropout. Only `"exp"` lets a
            slot hold few tokens, which recall needs.
        classifier_pooling: `"cls"` and `"mean"` read the token states. `"packed_max"` (a projection and a maximum, as
            in the authors' code), `"packed_mean"` (as in the paper) and `"packed_attention"` (attention of `<s>` over
            P) read the packed states.

    `preset` returns the models of the paper and of the authors' release:

    ```python
    >>> from luna_hf import LunaConfig

    >>> LunaConfig.preset("large").num_hidden_layers
    24
    >>> LunaConfig.preset("base-2048").projection_length
    256
    ```
    """

    model_type = "luna"
    state_fields = (*BoundedMemoryConfig.state_fields, "projection_length", "pack_activation")
    slots_field = "projection_length"
    removed_fields = ("segment_length", "packed_self_attention")
    # `base` is the model of the paper's section 4.3; the authors' release added the others.
    presets = {
        "base": {},
        "base-2048": {"max_position_embeddings": 2048, "projection_length": 256},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }

    minimum = {
        **BoundedMemoryConfig.minimum,
        "projection_length": 1,
        "tokens_per_slot": 1,
        "num_projected_attention_heads": 1,
    }
    choices = {
        **BoundedMemoryConfig.choices,
        "pack_activation": ("softplus", "elu", "exp"),
        "classifier_pooling": ("cls", "mean", "packed_max", "packed_mean", "packed_attention"),
    }

    projection_length: int = 128
    num_projected_attention_heads: int | None = None
    tie_kv: bool = True
    dynamic_projection: bool = True
    tokens_per_slot: int = 1
    pack_activation: str = "softplus"

    def validate_values(self) -> None:
        """Validate every field, at construction and again when the config is saved."""
        super().validate_values()
        one = self.tokens_per_slot == 1 or self.dynamic_projection
        self._require("tokens_per_slot", one, "1 without `dynamic_projection`")
        heads = self.num_projected_attention_heads
        if heads is not None:
            self._require_divides("num_projected_attention_heads")
        if self.is_decoder and not self.is_encoder_decoder:
            same = "None in a decoder, which packs and unpacks with the same heads"
            self._require("num_projected_attention_heads", heads in (None, self.num_attention_heads), same)


__all__ = ["LunaConfig"]
