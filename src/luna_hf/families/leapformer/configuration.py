"""Configuration of LeaPformer (Agostinelli et al., ICML 2024), with cosFormer (Qin et al., ICLR 2022) and others."""

from huggingface_hub.dataclasses import strict

from ...configuration import BoundedMemoryConfig

REWEIGHTINGS = ("learned", "cosine", "rotary", "none")

# Re-weightings that need no length, and therefore also have a causal form.
CAUSAL_REWEIGHTINGS = ("learned", "rotary", "none")

FEATURE_MAPS = ("relu", "elu")

LEAP_FACTORS = (1, 2, 4)


@strict
class LeapformerConfig(BoundedMemoryConfig):
    r"""
    Configuration of the LeaPformer models: linear attention with a re-weighting. The defaults are LeaPformer at the
    size of RoBERTa-base, with the module of the paper's language models.

    In addition to the fields of all families (see `BoundedMemoryConfig`), of which `attention_probs_dropout_prob` is 0
    by default, as in the authors' code. Linear attention computes no weights to drop; it drops whole tokens instead,
    each for all queries of a head. `local_window` must be 0. Decoders have sinusoidal positions by default, like the
    paper's language models: rotary ones rotate the features of the numerator alone, so that outputs and rounding errors
    grow where the normaliser is tiny, as it may be with `"relu"` features.

    Args:
        reweighting: factor of the similarity of a query and a key. `"learned"` (LeaPformer, equation 10): the cosine of
            the difference of two proportions, which a small network derives from the query and from the key. `"cosine"`
            (cosFormer, equation 9): the same with static proportions, the position of a token divided by the number of
            real tokens; encoders only, since a decoder does not know that number. `"rotary"` (appendix A.6): rotary
            positions, which rotate the features of queries and keys. `"none"`: plain linear attention.
        feature_map: feature map of queries and keys: `"relu"`, or `"elu"` for elu + 1.
        leap_factor: `"learned"` only: the head size divided by the inner size of the network, 1, 2 or 4.

    ```python
    >>> from luna_hf import LeapformerConfig

    >>> LeapformerConfig.preset("cosformer").reweighting
    'cosine'
    ```
    """

    model_type = "leapformer"
    reads_exact_tokens = False
    state_fields = (*BoundedMemoryConfig.state_fields, "reweighting", "feature_map")
    positions = {**BoundedMemoryConfig.positions, True: ("sinusoidal", "rotary")}
    presets = {
        "base": {},
        "cosformer": {"reweighting": "cosine"},
        "linear": {"reweighting": "none", "feature_map": "elu"},
        "rope": {"reweighting": "rotary", "feature_map": "elu"},
    }

    choices = {
        **BoundedMemoryConfig.choices,
        "reweighting": REWEIGHTINGS,
        "feature_map": FEATURE_MAPS,
        "leap_factor": LEAP_FACTORS,
    }

    attention_probs_dropout_prob: float | int = 0.0
    reweighting: str = "learned"
    feature_map: str = "relu"
    leap_factor: int = 4

    def validate_values(self) -> None:
        """Validate every field, at construction and again when the config is saved."""
        super().validate_values()
        causal = f"one of {', '.join(CAUSAL_REWEIGHTINGS)} in a causal model, which does not know its length"
        self._require("reweighting", not self.is_decoder or self.reweighting in CAUSAL_REWEIGHTINGS, causal)
        if self.reweighting == "rotary":
            self._require_even_heads()
        no_softmax = "0, since linear attention has no softmax that a window could join"
        self._require("local_window", not self.local_window, no_softmax)


__all__ = ["LeapformerConfig"]
