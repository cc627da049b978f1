"""Configuration of ABC (Peng et al., "ABC: Attention with Bounded-memory Control", ACL 2022)."""

from huggingface_hub.dataclasses import strict

from ...configuration import BoundedMemoryConfig

CONTROLS = (
    "mlp",
    "linformer",
    "random",
    "cluster",
    "sliding_window",
    "dilated",
    "local_to_global",
    "compressive",
    "full",
)

# Strategies that also have a causal form, with a decoding state of constant size.
CAUSAL_CONTROLS = ("mlp", "linformer", "random", "sliding_window")

# Controls that keep every token, to which a local window adds nothing.
WITHOUT_SLOTS = ("sliding_window", "dilated", "full")

ACTIVATIONS = ("exp", "relu", "sigmoid")


@strict
class AbcConfig(BoundedMemoryConfig):
    r"""
    Configuration of the ABC models. The defaults are the paper's base model with 64 slots (12 layers, width 768, a
    learned control shared by all layers).

    It has the fields of all families (see `BoundedMemoryConfig`), and its own.

    Args:
        memory_control: control strategy that writes the memory. With learned parameters: `"mlp"` (the paper's ABC-MLP;
            each slot is a learned attention over the tokens, equation 7) and `"linformer"` (one weight per position and
            slot, section 3.1). Without parameters: `"random"` (a random slot per token, appendix A.2), `"cluster"`
            (centroids of k-means, section 3.2), `"sliding_window"` (the `memory_size` tokens around each token,
            including itself, section 3.3), `"dilated"` (the same over every other token, appendix A.4),
            `"local_to_global"` (evenly spaced tokens, appendix A.1) and `"compressive"` (means of neighbouring tokens,
            appendix A.3). `"full"` is ordinary softmax attention in quadratic time, for comparison. Decoders support
            `"mlp"`, `"linformer"` (positions wrap around at the end of the matrix), `"random"` and `"sliding_window"`
            (the last `memory_size` tokens).
        memory_size: number of slots `m` per head, or the window's length; ignored by `"full"`. Empty slots are never
            read.
        control_activation: `"mlp"` only: `"exp"`, or the paper's ablations `"relu"` and `"sigmoid"`.
        share_control: `"mlp"`, `"linformer"` and `"random"` only: whether all layers share one control. An encoder and
            a decoder have one each, and each layer's cross-attention has its own.
        control_seed: `"random"` only: seed of the random slots.
        cluster_iterations: `"cluster"` only: number of k-means iterations in each layer.

    ```python
    >>> from luna_hf import AbcConfig

    >>> AbcConfig(memory_control="sliding_window", memory_size=128).memory_size
    128
    ```
    """

    # Not "abc", which flash-linear-attention registers for its causal model: one process may import both packages.
    model_type = "abc_memory"
    state_fields = (*BoundedMemoryConfig.state_fields, "memory_control", "memory_size", "control_activation")
    slots_field = "memory_size"
    presets = {
        # Both sizes of the paper.
        "base": {},
        "base-128": {"memory_size": 128},
        # Reads long texts much as the softmax of a trained encoder does, without training: see docs/window.md.
        "selected": {
            "memory_control": "compressive",
            "memory_size": 16,
            "local_window": 64,
            "num_selected_tokens": 128,
            "num_selection_queries": 32,
        },
    }

    minimum = {**BoundedMemoryConfig.minimum, "memory_size": 1, "control_seed": 0, "cluster_iterations": 1}
    choices = {**BoundedMemoryConfig.choices, "memory_control": CONTROLS, "control_activation": ACTIVATIONS}

    memory_control: str = "mlp"
    memory_size: int = 64
    control_activation: str = "exp"
    share_control: bool = True
    control_seed: int = 0
    cluster_iterations: int = 2

    def fixed_length(self) -> str | None:
        """Like `BoundedMemoryConfig.fixed_length`; Linformer's matrix has one column per position."""
        if self.memory_control != "linformer":
            return None
        return "its control (`linformer`) has learned weights for every position, which cannot be extended"

    def for_cross_attention(self) -> "AbcConfig":
        """Like `BoundedMemoryConfig.for_cross_attention`; the decoder does not share its control with it."""
        return super().for_cross_attention()._with(share_control=False)

    def validate_values(self) -> None:
        """Validate every field, at construction and again when the config is saved."""
        super().validate_values()
        if self.is_decoder:
            causal = f"one of {', '.join(CAUSAL_CONTROLS)} in a causal model"
            self._require("memory_control", self.memory_control in CAUSAL_CONTROLS, causal)
        has_slots = self.memory_control not in WITHOUT_SLOTS
        if self.is_decoder and self.is_encoder_decoder:
            slots = "a control with slots in an encoder-decoder that reads its source whole (`source_is_causal=False`)"
            self._require("memory_control", has_slots or self.source_is_causal, slots)
        without = f"0 with memory_control={self.memory_control!r}"
        self._require("local_window", has_slots or not self.local_window, without)


__all__ = ["AbcConfig"]
