"""Configuration of LAVO (Zhang et al., "Linear Attention via Orthogonal Memory", 2023)."""

from huggingface_hub.dataclasses import strict

from ...configuration import BoundedMemoryConfig

PARTS = ("both", "global", "local")


@strict
class LavoConfig(BoundedMemoryConfig):
    r"""
    Configuration of the LAVO models. The defaults are the paper's language model, at the size of RoBERTa-base: 64
    orthogonal bases and a window of 64 tokens, without positions other than the window's.

    In addition to the fields of all families (see `BoundedMemoryConfig`), of which `local_window` is 64 by default. The
    window has its own softmax, whose output is averaged with that of the memory. `slot_count_bias` has no effect.
    `position_embedding_type` may also be `"none"`, the default: inputs then have any length, in encoders too. Rotary
    positions rotate the queries and keys of the window only.

    Args:
        num_bases: number of orthogonal bases `r` per head, which are the slots of the memory.
        attention_parts: output of the attention: `"both"`, the mean of the global part, which reads the memory, and of
            the local part, which reads the window; or one of them, `"global"` or `"local"`.
        context_dissection: whether the tokens pass through the local attention before they are written to the memory
            (section 3.2). Without it, or without a `local_window`, the memory holds their values.
        window_position_bias: whether the scores of the local attention get a learned bias that depends on the distance
            between query and key (section 3.3).

    ```python
    >>> from luna_hf import LavoConfig

    >>> LavoConfig(num_bases=32, local_window=256).position_embedding_type
    'none'
    ```
    """

    model_type = "lavo"
    state_fields = (*BoundedMemoryConfig.state_fields, "num_bases", "attention_parts", "context_dissection")
    positions = {is_decoder: ("none", *types) for is_decoder, types in BoundedMemoryConfig.positions.items()}
    slots_field = "num_bases"
    reads_exact_tokens = False
    # `lra`: appendix C.
    presets = {"base": {}, "lra": {"num_bases": 32, "local_window": 256}}

    minimum = {**BoundedMemoryConfig.minimum, "num_bases": 1}
    choices = {**BoundedMemoryConfig.choices, "attention_parts": PARTS}

    local_window: int = 64
    num_bases: int = 64
    attention_parts: str = "both"
    context_dissection: bool = True
    window_position_bias: bool = True

    def mixed_window(self) -> int:
        """Like `BoundedMemoryConfig.mixed_window`; with one part alone there is nothing to leave out."""
        return self.local_window if self.attention_parts == "both" else 0

    def validate_values(self) -> None:
        """Validate every field, at construction and again when the config is saved."""
        super().validate_values()
        is_local = self.attention_parts == "local"
        window = "at least 1 with attention_parts='local'"
        self._require("local_window", self.local_window or not is_local, window)
        memory = "'both' or 'global' in an encoder-decoder, whose cross-attention reads the memory"
        self._require("attention_parts", not (is_local and self.is_encoder_decoder), memory)


__all__ = ["LavoConfig"]
