"""Configuration fields, validation and messages that every family of the zoo shares."""

import copy
import difflib
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Keywords that transformers itself hands to a config and that are no fields of it: never reported as misspelt.
_LIBRARY_KEYWORDS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
    "trust_remote_code",
}


@strict
class BoundedMemoryConfig(PreTrainedConfig):
    r"""
    Fields shared by all models of the zoo. Use a family's own class (for example `LunaConfig`), not this one.

    Args:
        vocab_size (`int`, defaults to 50265):
            Number of tokens; rows of the token embedding and of the tied output layer.
        hidden_size (`int`, defaults to 768):
            Width `d` of the token states (and of the memory, where a family has one).
        num_hidden_layers (`int`, defaults to 12):
            Number of layers.
        num_attention_heads (`int`, defaults to 12):
            Attention heads; must divide `hidden_size`.
        intermediate_size (`int`, defaults to 3072):
            Inner width of the feed-forward network.
        hidden_act (`str`, defaults to `"gelu"`):
            Activation of the feed-forward network and of the masked-LM head, a name of `transformers.activations`.
        hidden_dropout_prob (`float`, defaults to 0.1):
            Dropout on the embeddings and on the output of every sub-layer.
        attention_probs_dropout_prob (`float`, defaults to 0.1):
            Dropout on the attention probabilities.
        activation_dropout (`float`, defaults to 0.0):
            Dropout after the activation inside the feed-forward network.
        max_position_embeddings (`int`, defaults to 512):
            The longest input in tokens. The position table has `max_position_embeddings + pad_token_id + 1` rows,
            because positions start at `pad_token_id + 1` as in RoBERTa (whose own field counts those rows in).
            A decoder takes texts of any length, and has no such table.
        position_embedding_type (`str`, *optional*):
            `"learned"` (what `None` gives an encoder); `"sinusoidal"` (fixed; embeddings are then scaled by
            `sqrt(hidden_size)` before the positions are added); or, in decoders only, `"rotary"` (what `None` gives a
            decoder; queries and keys are turned by angles that grow with the position). Decoders have no learned
            positions, which would end.
        type_vocab_size (`int`, defaults to 0):
            Number of segment (token type) embeddings; 0 for none.
        embedding_layer_norm (`bool`, defaults to `True`):
            Whether the embeddings go through a LayerNorm.
        norm_first (`bool`, defaults to `False`):
            Pre-norm layers with final norms instead of post-norm ones.
        layer_norm_eps (`float`, defaults to 1e-5):
            Epsilon of every LayerNorm.
        initializer_range (`float`, defaults to 0.02):
            Standard deviation of the normal initialisation of matrices, embeddings and convolutions.
        conv_kernel_size (`int`, defaults to 0):
            0 for the paper's model. An odd `k` adds a depthwise convolution of `k` taps over the unpadded token states
            to the attention output of every layer, before the residual; in a decoder over the token itself and the
            `k - 1` before it.
        sparse_prediction (`bool`, defaults to `False`):
            In training, apply the masked-LM head only where there is a label. The loss and the gradients are those of
            the dense head; `logits` then has the shape `(number of labels, vocab_size)`.
        classifier_pooling (`str`, defaults to `"cls"`):
            What the classification heads read: `"cls"` (state of the first token) or `"mean"` (mean over the tokens).
            Families may offer more.
        classifier_dropout (`float`, *optional*):
            Dropout of the classification heads; `None` takes `hidden_dropout_prob`.
        classifier_hidden_size (`int`, *optional*):
            Inner width of the sequence classification head; `None` takes `hidden_size`.
        classifier_activation (`str`, defaults to `"tanh"`):
            Activation inside the sequence classification head.
        pad_token_id (`int`, defaults to 1), bos_token_id (`int`, defaults to 0), eos_token_id (`int`, defaults to 2):
            Special tokens, as in RoBERTa.
        tie_word_embeddings (`bool`, defaults to `True`):
            Whether the masked-LM output layer shares its matrix with the token embedding.
        is_decoder (`bool`, defaults to `False`):
            Whether the layers are causal. `...ForCausalLM` sets it by itself, see `as_decoder`.
        use_cache (`bool`, defaults to `True`):
            Of decoders: whether a forward pass outside training returns its state.
        chunk_size_feed_forward (`int`, defaults to 0):
            Number of rows that the feed-forward network treats at a time. 0: all at once in training, and in blocks
            that keep memory below that of the attention in inference.

    Raises:
        ValueError: A value is out of range, or a keyword looks like a misspelt field.
    """

    model_type = "bounded_memory"
    keys_to_ignore_at_inference = ["past_key_values"]  # a Trainer gathers all other outputs
    base_model_fsdp_plan = {"embeddings": "free_full_weight", "encoder.layer.*": "free_full_weight"}
    # Fields on which a decoding state depends, so that a state fits no model that differs in one; families add theirs.
    state_fields = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "conv_kernel_size", "position_embedding_type"),
    )
    # The field that holds the number of slots of the family's memory, if there is one.
    slots_field: ClassVar[str | None] = None

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    activation_dropout: float | int = 0.0
    max_position_embeddings: int = 512
    position_embedding_type: str | None = None
    type_vocab_size: int = 0
    embedding_layer_norm: bool = True
    norm_first: bool = False
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    conv_kernel_size: int = 0
    sparse_prediction: bool = False
    classifier_pooling: str = "cls"
    classifier_dropout: float | int | None = None
    classifier_hidden_size: int | None = None
    classifier_activation: str = "tanh"
    pad_token_id: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    is_decoder: bool = False
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_misspelt(kwargs)
        if self.position_embedding_type is None:
            self.position_embedding_type = "rotary" if self.is_decoder else "learned"
        self.validate_values()
        super().__post_init__(**kwargs)

    @classmethod
    def classifier_poolings(cls) -> tuple[str, ...]:
        """Values of `classifier_pooling` that the family accepts."""
        return ("cls", "mean")

    def validate_values(self) -> None:
        """Check every field; runs at construction and again when the config is saved."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            self._require(name, lambda value: value >= 1, "at least 1")
        self._require("max_position_embeddings", lambda value: value >= 1, "at least 1")
        self._require("type_vocab_size", lambda value: value >= 0, "0 (no token types) or more")
        self._require("layer_norm_eps", lambda value: value > 0, "above 0, for example 1e-5")
        self._require("initializer_range", lambda value: value > 0, "above 0, for example 0.02")
        self._require("chunk_size_feed_forward", lambda value: value >= 0, "0 (automatic) or more")
        self._require("classifier_hidden_size", lambda value: value is None or value >= 1, "None or at least 1")
        self._require("conv_kernel_size", lambda k: k == 0 or (k > 0 and k % 2 == 1), "0 (none) or an odd number, as 5")
        positions = ("rotary", "sinusoidal") if self.is_decoder else ("learned", "sinusoidal")
        kind = "a decoder" if self.is_decoder else "an encoder"
        self._require("position_embedding_type", lambda v: v in positions, f"{' or '.join(positions)} in {kind}")
        self._require_divides("num_attention_heads")
        if self.position_embedding_type == "rotary":
            head_size = self.hidden_size // self.num_attention_heads
            even = "such that heads have an even size, for rotary positions"
            self._require("num_attention_heads", lambda _: head_size % 2 == 0, even)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"):
            self._require(name, lambda p: 0 <= p < 1, "a probability in [0, 1)")
        self._require("classifier_dropout", lambda p: p is None or 0 <= p < 1, "None or a probability in [0, 1)")
        for name in ("hidden_act", "classifier_activation"):
            self._require(name, lambda act: act in ACT2FN, f"one of {', '.join(sorted(ACT2FN))}")
        poolings = self.classifier_poolings()
        self._require("classifier_pooling", lambda v: v in poolings, f"one of {', '.join(poolings)}")
        self._require("pad_token_id", lambda v: 0 <= v < self.vocab_size, f"in [0, vocab_size={self.vocab_size})")

    def fixed_length(self) -> str | None:
        """Why the model can take no longer inputs, however its positions are extended; `None` if it can."""
        return None

    def as_decoder(self) -> "BoundedMemoryConfig":
        """The config of a causal model of the same size: itself if it is one, else a copy with `is_decoder=True`.

        Learned positions, which would end, become rotary ones.

        Raises:
            ValueError: A field has a value that no causal model of the family can have.
        """
        if self.is_decoder:
            return self
        config = copy.deepcopy(self)
        config.is_decoder = True
        if config.position_embedding_type == "learned":
            config.position_embedding_type = "rotary"
        config.validate_values()
        return config

    def _require(self, name: str, accepts: Callable[[Any], bool], allowed: str) -> None:
        value = getattr(self, name)
        if not accepts(value):
            raise ValueError(f"{type(self).__name__}: `{name}` is {value!r}, but must be {allowed}.")

    def _require_divides(self, name: str) -> None:
        heads = getattr(self, name)
        if self.hidden_size % heads:
            divisors = [str(h) for h in range(1, self.hidden_size + 1) if self.hidden_size % h == 0]
            raise ValueError(
                f"{type(self).__name__}: `hidden_size` ({self.hidden_size}) is not a multiple of `{name}` ({heads}). "
                f"Choose a number of heads among {', '.join(divisors)}, or change `hidden_size`."
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`, but a misspelt name is left out with a warning instead of refused.

        Transformers writes every attribute that anyone has set on a config into its file; the file must load again.
        """
        misspelt = cls._misspelt(config_dict)
        for name, field in misspelt.items():
            logger.warning(f"{cls.__name__} has no field `{name}` (perhaps `{field}` is meant): its value is ignored.")
        return super().from_dict({name: v for name, v in config_dict.items() if name not in misspelt}, **kwargs)

    def _refuse_misspelt(self, keywords: dict[str, Any]) -> None:
        """Transformers keeps unknown keywords as attributes; one that looks like a field is a typing error."""
        for name, field in self._misspelt(keywords).items():
            raise ValueError(f"{type(self).__name__} has no field `{name}`. Did you mean `{field}`?")

    @classmethod
    def _misspelt(cls, keywords: dict[str, Any]) -> dict[str, str]:
        """Names that are no field but nearly one, and the field each resembles."""
        fields = list(cls.__dataclass_fields__)
        unknown = keywords.keys() - _LIBRARY_KEYWORDS - set(fields)
        known = [*fields, "num_labels"]
        close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in sorted(unknown)}
        return {name: match[0] for name, match in close.items() if match and not name.startswith("_")}
