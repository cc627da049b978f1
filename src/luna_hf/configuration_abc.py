"""Configuration of ABC (Peng et al., "ABC: Attention with Bounded-memory Control", ACL 2022)."""

from huggingface_hub.dataclasses import strict

from .configuration_base import BoundedMemoryConfig
from .memory_control import ACTIVATIONS, CAUSAL_CONTROLS, CONTROLS


@strict
class AbcConfig(BoundedMemoryConfig):
    r"""
    Configuration of the ABC models. The defaults are the paper's base model with a memory of 64 (12 layers, width 768,
    learned control, its matrix shared by all layers).

    Besides the fields of all families (see `BoundedMemoryConfig`):

    Args:
        memory_control (`str`, defaults to `"mlp"`):
            How the memory is written. `"mlp"` is the paper's own (equation 7: a slot is a learned attention over the
            tokens), `"linformer"` a learned weight for every position and slot (section 3.1). Without parameters of
            their own: `"random"` (appendix A.2), `"cluster"` (section 3.2), `"sliding_window"` (section 3.3; the
            `memory_size` tokens around each token, itself among them), `"dilated"` (appendix A.4; the same among every
            other token), `"local_to_global"` (appendix A.1; tokens spread evenly over the text) and `"compressive"`
            (appendix A.3; means of neighbouring tokens). `"full"` is softmax attention to all tokens, in quadratic
            time, to compare with. A decoder has `"mlp"`, `"linformer"` (tokens beyond the matrix meet its columns again
            from the first), `"random"` or `"sliding_window"` (the last `memory_size` tokens).
        memory_size (`int`, defaults to 64):
            Number of slots `m` of every head. A row with fewer tokens than slots leaves slots empty where a token
            writes into one slot only; nobody reads those. `"full"` has no use for it.
        control_activation (`str`, defaults to `"exp"`):
            Of `"mlp"`: `"exp"`, or `"relu"` or `"sigmoid"` (the paper's ablations).
        share_control (`bool`, defaults to `True`):
            Of `"mlp"`, `"linformer"` and `"random"`: one control for all layers, or one for each.
        control_seed (`int`, defaults to 0):
            Of `"random"`: chooses the slots.
        cluster_iterations (`int`, defaults to 2):
            Of `"cluster"`: steps of k-means in every layer.

    ```python
    >>> from luna_hf import AbcConfig

    >>> AbcConfig(memory_control="sliding_window", memory_size=128).memory_size
    128
    ```
    """

    # "abc" is taken: flash-linear-attention registers it for its causal model, and one process may import both.
    model_type = "abc_memory"
    state_fields = (*BoundedMemoryConfig.state_fields, "memory_control", "memory_size", "control_activation")
    slots_field = "memory_size"

    memory_control: str = "mlp"
    memory_size: int = 64
    control_activation: str = "exp"
    share_control: bool = True
    control_seed: int = 0
    cluster_iterations: int = 2

    def fixed_length(self) -> str | None:
        """Linformer's matrix has as many columns as there are positions."""
        if self.memory_control != "linformer":
            return None
        return "its control (`linformer`) has learned weights for every position, which cannot be repeated"

    def validate_values(self) -> None:
        """Check every field; runs at construction and again when the config is saved."""
        super().validate_values()
        self._require("memory_control", lambda value: value in CONTROLS, f"one of {', '.join(CONTROLS)}")
        if self.is_decoder:
            causal = f"one of {', '.join(CAUSAL_CONTROLS)} in a causal model"
            self._require("memory_control", lambda value: value in CAUSAL_CONTROLS, causal)
        self._require("memory_size", lambda value: value >= 1, "at least 1 (the paper has 64 and 128)")
        self._require("control_activation", lambda value: value in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")
        self._require("control_seed", lambda value: value >= 0, "at least 0")
        self._require("cluster_iterations", lambda value: value >= 1, "at least 1")


__all__ = ["AbcConfig"]
