# luna_hf 0.2.0. SPDX-License-Identifier: Apache-2.0
# Joined from the package's modules by `save_pretrained`; changes belong there.

"""Configuration of Luna (Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021)."""

import copy
import difflib
import os
import sys
from collections.abc import Callable
from typing import Any
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging


# ---- configuration.py ----
#
# Configuration fields and their validation, shared by all model families.


logger = logging.get_logger(__name__)


# Keywords that transformers passes to a config without declaring them as fields, besides those that begin with `_`.
_LIBRARY_KEYWORDS = {
    *("add_cross_attention", "attn_implementation", "auto_map", "experts_implementation", "model_type"),
    *("name_or_path", "num_labels", "output_attentions", "per_layer_config", "quantization_config", "tokenizer_class"),
    *("torch_dtype", "trust_remote_code"),
}


def is_ours(cls: type) -> bool:
    """Whether a class is the package's own: not a user's, and not one from the code of a checkpoint."""
    return cls.__module__.startswith("luna_hf.")


def saved_file(cls: type) -> str:
    """Name, without `.py`, of the file in a saved folder that holds the class; see `hub.py` for the package's own."""
    *rooms, name = cls.__module__.split(".")
    return f"{name}_{rooms[-1]}" if is_ours(cls) else name


def add_peft_targets(model_type: str) -> None:
    """Let PEFT adapt by default what it adapts in RoBERTa, if it is imported; `value` may be a matrix shared with keys.

    Each of its methods has a table by `model_type`.
    """
    constants = sys.modules.get("peft.utils.constants")
    for table in vars(constants).values() if constants else ():
        if isinstance(table, dict) and "roberta" in table:
            names = table["roberta"]
            table.setdefault(model_type, [*names, *("key_value" for name in names if name == "value")])


@strict
class BoundedMemoryConfig(PreTrainedConfig):
    r"""
    Configuration fields shared by all model families. Use a family's own class, such as `LunaConfig`. Types and
    defaults are those of the signature.

    Args:
        vocab_size: number of rows of the token embedding and of the output layer.
        hidden_size: width `d` of the token states and, where the family has one, of the memory.
        num_hidden_layers: number of layers.
        num_attention_heads: number of attention heads; must divide `hidden_size`.
        intermediate_size: inner width of the feed-forward network.
        hidden_act: activation of the feed-forward network and the masked-LM head: a key of
            `transformers.activations.ACT2FN`.
        hidden_dropout_prob: dropout probability of the embeddings and of each sub-layer's output.
        attention_probs_dropout_prob: dropout probability of the attention weights.
        activation_dropout: dropout probability after the activation of the feed-forward network.
        max_position_embeddings: maximum input length of an encoder, in tokens. (RoBERTa's field of this name
            also counts the rows of its position table that no token uses.) Decoders, and encoders without positions,
            have no table and accept inputs of any length.
        first_position: encoders and encoder-decoders only: row of the position table, or number of the sinusoid, of the
            first token. The row before it belongs to padding. Defaults to 2, as in RoBERTa, or 1 if `pad_token_id` is
            0. Models saved by versions that lack this field have `pad_token_id + 1`.
        position_period: encoders with learned positions only: number of rows of the position table, which are
            repeated. The first token has row 0, the others have rows 1 to `position_period - 1` in turn. Inputs may
            then have up to `max_position_embeddings` tokens, although the table is shorter.
        position_embedding_type: `"learned"` (encoders and encoder-decoders only, and their default); `"sinusoidal"`
            (fixed positions, added to token embeddings scaled by `sqrt(hidden_size)`); or `"rotary"` (decoder-only
            models, and the default of most; queries and keys are rotated by angles proportional to the position).
        type_vocab_size: number of segment (token type) embeddings; 0 for none.
        embedding_size: encoder-only models: width of the token, position and segment embeddings and their LayerNorm,
            whose states are then projected to `hidden_size`, as in small ELECTRAs; defaults to `hidden_size`, without a
            projection.
        embedding_layer_norm: whether to apply LayerNorm to the embeddings.
        norm_first: whether layers are pre-norm, with a final LayerNorm, instead of post-norm.
        layer_norm_eps: epsilon of all LayerNorms.
        initializer_range: standard deviation of the normal initialisation of matrices and embeddings.
        conv_kernel_size: kernel size of an optional depthwise convolution over the token states, added to the attention
            output of each layer: 0 for none, as in the papers, or an odd number. In a decoder it is causal.
        conv_initializer_range: standard deviation of the convolution's initial filters; defaults to
            `initializer_range`, with which a token hardly sees its neighbours at first. `conv_kernel_size ** -0.5`
            keeps the scale of the states; encoders that learn to recall need it.
        local_window: number of tokens, itself included, that each token reads in one softmax with the slots: the tokens
            around it, or in a decoder the latest ones. 0 for none, as in the papers. Needs a mechanism that reads
            slots.
        slot_count_bias: with `local_window` only: whether the logarithm of the number of tokens that a slot stands for
            is added to its logit, with a learned scale per head. Without it, a slot weighs as much as a single token.
        slot_counts: with `local_window` only: which tokens the slots of a query stand for. `"outside"`: those that it
            does not read exactly, so a text that fits into every window is read by softmax attention. `"all"`: all
            tokens of the text, and each slot for at least one, as in models saved by versions that lack this field.
        global_tokens: with `local_window` only: which tokens a task head marks if it gets no `global_attention_mask`:
            `"first"` (the first token), `"question"` (the tokens before the first separator, if a second text follows
            and they are at most `max_global_tokens`; otherwise the first token), `"none"`, or `"auto"` (`"first"` for
            sequence classification, `"question"` for question answering and multiple choice, `"none"` for other heads).
        global_tokens_read_all: whether marked tokens read all tokens, instead of only what every token reads.
        max_global_tokens: maximum number of marked tokens in a row. Compiled and exported models always reserve this
            many places.
        num_selected_tokens: encoders with a `local_window` only: number of tokens `m` that each head of each layer
            selects from the whole text, to be read exactly by every query: those that `num_selection_queries` evenly
            spaced queries attend to most outside their own windows. 0 for none.
        softmax_length: with `num_selected_tokens` only: texts of up to this many tokens select all their tokens, so
            they are read exactly, as by softmax attention, and take its time. Compiled and exported models always
            reserve this many places.
        num_selection_queries: with `num_selected_tokens` only: number of queries `r` that select.
        sep_token_id: the token between two texts, for `global_tokens`; defaults to `eos_token_id`, as in RoBERTa.
            Without either, `token_type_ids` tell the texts apart.
        full_attention_layers: encoders only: indices (from 0) of the layers that keep RoBERTa's softmax attention, in
            quadratic time. `"all"` becomes the list of all layers.
        sparse_prediction: whether to apply the masked-LM head only to labelled positions in training. Loss and
            gradients stay the same, but `logits` then has the shape `(number of labels, vocab_size)`.
        unpad_inputs: encoders only: whether the computation skips padding. By default, it does where that is faster,
            but not with eager attention, or if hidden states or attentions are returned; `False` always computes
            padding. Outputs have the same shape either way and are the same at real tokens. The last states of padding
            are zero, except with `False`.
        classifier_pooling: input of the classification heads: `"cls"` (the first token's state) or `"mean"` (the mean
            over all tokens). A family may add others.
        classifier_dropout: dropout probability of the classification heads; defaults to `hidden_dropout_prob`.
        classifier_hidden_size: inner width of the sequence-classification and multiple-choice heads; defaults to
            `hidden_size`.
        classifier_activation: activation of the sequence-classification and multiple-choice heads.
        pad_token_id, bos_token_id, eos_token_id: special tokens, as in RoBERTa.
        tie_word_embeddings: whether the language modelling head shares its output matrix with the token embedding.
        scale_embedding: whether token embeddings are multiplied by `sqrt(hidden_size)`; by default, if positions are
            sinusoidal, and in an encoder-decoder.
        is_decoder: whether the model is causal. Set automatically by the `...ForCausalLM` classes; see `as_decoder`.
        is_encoder_decoder: whether the model has an encoder and a decoder. Set automatically by the
            `...ForConditionalGeneration` classes; see `as_encoder_decoder`. The fields above apply to both parts,
            except `full_attention_layers`.
        decoder_layers: encoder-decoders only: number of layers of the decoder; defaults to `num_hidden_layers`.
        source_is_causal: encoder-decoders only: whether the encoder is causal, too, and each target token reads the
            source tokens that have been written before it, for simultaneous translation (LeaPformer, section 4.3).
            Cross-attention then also reads a `local_window`, of the latest source tokens.
        decoder_vocab_size: encoder-decoders only: vocabulary size of the target; defaults to `vocab_size`, and follows
            it if they share embeddings.
        share_encoder_decoder_embeddings: encoder-decoders only: whether source and target share one token embedding,
            which needs one vocabulary.
        decoder_start_token_id: encoder-decoders only: the target's first input; defaults to `eos_token_id`, as in
            fairseq.
        use_cache: decoders only: whether a forward pass outside training returns the decoding state.
        chunk_size_feed_forward: number of tokens that the feed-forward network processes at a time. By default (0),
            1,024 on a CPU; on other devices, 16,384 in inference and all at once in training.

    Raises:
        ValueError: A value is out of range, or a keyword is not a field. A file may hold others, which become
            attributes.
    """

    model_type = "bounded_memory"
    keys_to_ignore_at_inference = ["cache"]  # the Trainer gathers all other outputs
    base_model_fsdp_plan = {"embeddings": "free_full_weight", "encoder.layer.*": "free_full_weight"}
    # Fields that a decoding state depends on: models that differ in one cannot share a state. Families add theirs.
    state_fields = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "conv_kernel_size", "position_embedding_type"),
        *("local_window", "slot_count_bias", "is_encoder_decoder", "source_is_causal"),
    )
    # Values of `position_embedding_type`, in an encoder or encoder-decoder, and in a decoder alone; the first is the
    # default.
    positions: ClassVar[dict[bool, tuple[str, ...]]] = {
        False: ("learned", "sinusoidal"),
        True: ("rotary", "sinusoidal"),
    }
    # Name of the field that holds the family's number of slots, if it has any.
    slots_field: ClassVar[str | None] = None
    # Whether queries read marked and selected tokens in one softmax with the slots or the window.
    reads_exact_tokens: ClassVar[bool] = True
    # Fields of earlier versions. Saved files may have them; nothing reads them any more.
    removed_fields: ClassVar[tuple[str, ...]] = ()
    presets: ClassVar[dict[str, dict[str, Any]]] = {"base": {}}
    # Smallest values of numbers, and the values of other fields. Families add theirs.
    minimum: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 1),
        **dict.fromkeys(("intermediate_size", "max_position_embeddings", "first_position", "embedding_size"), 1),
        **dict.fromkeys(("max_global_tokens", "num_selection_queries", "classifier_hidden_size"), 1),
        **dict.fromkeys(("decoder_layers", "decoder_vocab_size"), 1),
        **dict.fromkeys(("type_vocab_size", "local_window", "num_selected_tokens", "softmax_length"), 0),
        **dict.fromkeys(("chunk_size_feed_forward", "conv_kernel_size", "decoder_start_token_id"), 0),
        "position_period": 2,
    }
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "slot_counts": ("outside", "all"),
        "global_tokens": ("auto", "none", "first", "question"),
        "classifier_pooling": ("cls", "mean"),
        "hidden_act": tuple(sorted(ACT2FN)),
        "classifier_activation": tuple(sorted(ACT2FN)),
        "problem_type": (None, "regression", "single_label_classification", "multi_label_classification"),
    }
    # `hub.write_code` while the package is imported; transformers copies the code that came with a checkpoint.
    write_code: ClassVar[Callable[..., None] | None] = None

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
    first_position: int | None = None
    position_period: int | None = None
    position_embedding_type: str | None = None
    type_vocab_size: int = 0
    embedding_size: int | None = None
    embedding_layer_norm: bool = True
    norm_first: bool = False
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    conv_kernel_size: int = 0
    conv_initializer_range: float | int | None = None
    local_window: int = 0
    slot_count_bias: bool = True
    slot_counts: str = "outside"
    global_tokens: str = "auto"
    global_tokens_read_all: bool = True
    max_global_tokens: int = 128
    num_selected_tokens: int = 0
    softmax_length: int = 0
    num_selection_queries: int = 16
    sep_token_id: int | None = None
    full_attention_layers: list[int] | str | None = None
    sparse_prediction: bool = False
    unpad_inputs: bool | None = None
    classifier_pooling: str = "cls"
    classifier_dropout: float | int | None = None
    classifier_hidden_size: int | None = None
    classifier_activation: str = "tanh"
    pad_token_id: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    scale_embedding: bool | None = None
    is_decoder: bool = False
    decoder_layers: int | None = None
    source_is_causal: bool = False
    decoder_vocab_size: int | None = None
    share_encoder_decoder_embeddings: bool = True
    decoder_start_token_id: int | None = None
    use_cache: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._auto_class = None if is_ours(cls) else "AutoConfig"  # transformers copies the file of a class that has one

    def __post_init__(self, **kwargs: Any) -> None:
        if not kwargs.pop("_from_file", False):
            self.refuse_unknown(kwargs)
        if self.position_embedding_type is None:
            self.position_embedding_type = self.positions[self.is_decoder][0]
        if self.first_position is None:
            self.first_position = 2 if self.pad_token_id else 1
        if self.is_encoder_decoder:
            self._complete_encoder_decoder()
        self.validate_values()
        # Other libraries read it of every config; transformers looks names up in it wherever it exists.
        kwargs["auto_map"] = kwargs.get("auto_map") or {}
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # Here, because transformers sets the keywords of `from_pretrained` after the config is complete.
        if name == "full_attention_layers" and value == "all":
            value = list(range(self.num_hidden_layers))
        super().__setattr__(name, value)
        if name == "vocab_size" and self.share_encoder_decoder_embeddings and self.decoder_vocab_size is not None:
            self.decoder_vocab_size = value

    def validate_values(self) -> None:
        """Validate every field, at construction and again when the config is saved."""
        for name, smallest in self.minimum.items():
            value = getattr(self, name)
            self._require(name, value is None or value >= smallest, f"at least {smallest}")
        for name, values in self.choices.items():
            self._require(name, getattr(self, name) in values, f"one of {', '.join(map(str, values))}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "classifier_dropout"):
            self._require(name, 0 <= (getattr(self, name) or 0) < 1, "a probability in [0, 1)")
        for name in ("layer_norm_eps", "initializer_range", "conv_initializer_range"):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "above 0")
        odd = not self.conv_kernel_size or self.conv_kernel_size % 2 == 1
        self._require("conv_kernel_size", odd, "0 (none) or odd, for example 5")
        self._require("pad_token_id", 0 <= self.pad_token_id < self.vocab_size, f"in [0, vocab_size={self.vocab_size})")
        self._require_divides("num_attention_heads")
        self._validate_positions()
        self._validate_exact_tokens()
        if self.is_encoder_decoder and not self.is_decoder:
            self._validate_encoder_decoder()

    def _validate_positions(self) -> None:
        alone = self.is_decoder and not self.is_encoder_decoder
        positions, kind = self.positions[alone], "a decoder" if alone else "an encoder"
        found = self.position_embedding_type
        self._require("position_embedding_type", found in positions, f"{' or '.join(positions)} in {kind}")
        if found == "rotary":
            self._require_even_heads()
        is_encoder = not self.is_decoder and not self.is_encoder_decoder
        self._require("embedding_size", is_encoder or self.embedding_size is None, "None unless in an encoder")
        has_table = is_encoder and found == "learned"
        only = "None in a model other than an encoder with learned positions"
        self._require("position_period", has_table or self.position_period is None, only)

    def _validate_exact_tokens(self) -> None:
        full, layers = self.full_attention_layers, range(self.num_hidden_layers)
        fits = full is None or (isinstance(full, list) and sorted({*full} & {*layers}) == sorted(full))
        allowed = f"None, 'all' or a list of different indices below num_hidden_layers={len(layers)}"
        self._require("full_attention_layers", fits, allowed)
        if self.is_decoder:
            self._require("full_attention_layers", not full, "None in a decoder, whose state has constant size")
        selected = self.num_selected_tokens
        self._require("softmax_length", selected or not self.softmax_length, "0 without `num_selected_tokens`")
        selects = self.reads_exact_tokens and self.local_window and not self.is_decoder
        allowed = "0 unless an encoder with a `local_window` reads it in one softmax with slots"
        self._require("num_selected_tokens", selects or not selected, allowed)

    def _validate_encoder_decoder(self) -> None:
        tokens, start = self.decoder_vocab_size, self.decoder_start_token_id
        same = f"vocab_size={self.vocab_size}, or share_encoder_decoder_embeddings=False"
        is_shared = self.share_encoder_decoder_embeddings
        self._require("decoder_vocab_size", not is_shared or tokens == self.vocab_size, same)
        fits = start is not None and start < tokens
        self._require("decoder_start_token_id", fits, f"in [0, decoder_vocab_size={tokens})")
        self.decoder_part().validate_values()
        if self.source_is_causal:
            self.encoder_part().validate_values()

    def _complete_encoder_decoder(self) -> None:
        """Set the fields of an encoder-decoder that follow from others."""
        if self.decoder_layers is None:
            self.decoder_layers = self.num_hidden_layers
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.decoder_start_token_id is None:
            ends = self.eos_token_id
            self.decoder_start_token_id = ends[0] if isinstance(ends, list) else ends

    def fixed_length(self) -> str | None:
        """Return the reason why the model cannot take longer inputs even with more positions, or `None` if it can."""
        return None

    def longest_input(self) -> int | None:
        """Return the maximum input length in tokens, or `None` if there is none."""
        positions = self.position_embedding_type
        is_limited = positions == "learned" or (positions != "none" and not self.is_decoder)
        return self.max_position_embeddings if is_limited else None

    def embedding_width(self) -> int:
        """Return the width of the embeddings, which is the states' unless `embedding_size` says otherwise."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    def position_rows(self) -> int:
        """Return the number of positions in the position table."""
        longest, period = self.max_position_embeddings, self.position_period
        return longest if period is None else min(longest, period)

    def mixed_window(self) -> int:
        """Return the window that a pass may narrow or leave out, and beside which it may leave out the slots, or 0."""
        return self.local_window

    def as_decoder(self) -> "BoundedMemoryConfig":
        """Return the config of the causal model of the same size: `self`, or a copy with `is_decoder=True`.

        Learned positions, which would limit the length, become a decoder's default.

        Raises:
            ValueError: The family's causal model does not support a field's value, or the config is an
                encoder-decoder's.
        """
        self.refuse_encoder_decoder("A causal model")
        if self.is_decoder:
            return self
        learned = self.position_embedding_type == "learned"
        position = self.positions[True][0] if learned else self.position_embedding_type
        config = self._with(is_decoder=True, position_embedding_type=position)
        config.validate_values()
        return config

    def as_encoder_decoder(self) -> "BoundedMemoryConfig":
        """Return the config of the encoder-decoder of the same size: `self`, or a copy with `is_encoder_decoder=True`.

        Raises:
            ValueError: The config is a causal model's, or the family's decoder does not support a field's value.
        """
        if self.is_decoder:
            raise ValueError(
                "An encoder-decoder needs an encoder's config or its own, but this is a causal model's "
                "(`is_decoder=True`)."
            )
        if self.is_encoder_decoder:
            return self
        config = self._with(is_encoder_decoder=True)
        config._complete_encoder_decoder()
        config.validate_values()
        return config

    def encoder_part(self) -> "BoundedMemoryConfig":
        """Return the config of an encoder-decoder's encoder; a causal one has both marks, as the decoder's has."""
        scales = self.scales_embedding()
        if self.source_is_causal:
            return self._with(is_decoder=True, scale_embedding=scales, use_cache=False)
        return self._with(is_encoder_decoder=False, scale_embedding=scales)

    def decoder_part(self) -> "BoundedMemoryConfig":
        """Return the config of an encoder-decoder's decoder, with both `is_decoder` and `is_encoder_decoder`."""
        sizes = {"num_hidden_layers": self.decoder_layers, "vocab_size": self.decoder_vocab_size}
        encoders_own = {"full_attention_layers": None, "num_selected_tokens": 0, "softmax_length": 0}
        return self._with(is_decoder=True, scale_embedding=self.scales_embedding(), **sizes, **encoders_own)

    def for_cross_attention(self) -> "BoundedMemoryConfig":
        """Return the config with which a decoder creates its cross-attention; to a whole source, it has no window."""
        window = self.local_window if self.source_is_causal else 0
        return self._with(local_window=window, num_selected_tokens=0, softmax_length=0)

    def _with(self, **values: Any) -> "BoundedMemoryConfig":
        """Return a copy with other values, which are not validated."""
        config = copy.deepcopy(self)
        for name, value in values.items():
            setattr(config, name, value)
        return config

    def scales_embedding(self) -> bool:
        """Return whether token embeddings are multiplied by the root of the width."""
        if self.scale_embedding is not None:
            return self.scale_embedding
        return self.position_embedding_type == "sinusoidal" or self.is_encoder_decoder

    def refuse_encoder_decoder(self, kind: str) -> None:
        """Raise a `ValueError` if the config is an encoder-decoder's, which `kind` of model cannot have."""
        if self.is_encoder_decoder:
            raise ValueError(
                f"{kind} cannot have the config of an encoder-decoder (`is_encoder_decoder=True`). Load it with "
                "AutoModelForSeq2SeqLM, or without its head with AutoModel."
            )

    def _require(self, name: str, accepted: Any, allowed: str) -> None:
        """Raise a `ValueError` that names a field, its value and what is allowed, unless the value is accepted."""
        if not accepted:
            raise ValueError(f"{type(self).__name__}: `{name}` is {getattr(self, name)!r}, but must be {allowed}.")

    def _require_divides(self, name: str) -> None:
        heads, width = getattr(self, name), self.hidden_size
        divisors = ", ".join(str(count) for count in range(1, width + 1) if width % count == 0)
        self._require(name, width % heads == 0, f"a divisor of `hidden_size` ({width}): one of {divisors}")

    def _require_even_heads(self) -> None:
        even = "chosen so that the head size is even, as rotary positions require"
        self._require("num_attention_heads", self.hidden_size // self.num_attention_heads % 2 == 0, even)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "BoundedMemoryConfig":
        """Return a config of the family's authors, one of `presets`, with fields overridden by keyword.

        Raises:
            ValueError: `name` is unknown.
        """
        return cls(**{**cls.preset_fields(name), **overrides})

    @classmethod
    def preset_fields(cls, name: str) -> dict[str, Any]:
        """Return the fields of one of `presets`.

        Raises:
            ValueError: `name` is unknown.
        """
        if name not in cls.presets:
            raise ValueError(f"{cls.__name__} has no preset {name!r}. Choose one of {', '.join(cls.presets)}.")
        return cls.presets[name]

    def to_dict(self) -> dict[str, Any]:
        """Like `PreTrainedConfig.to_dict`. PEFT calls it before it looks up what to adapt."""
        add_peft_targets(self.model_type)
        return super().to_dict()

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Like `PreTrainedConfig.save_pretrained`, plus the code that lets the Auto classes load without luna_hf."""
        if is_ours(type(self)):
            self.write_code(self, save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        """Like transformers', which uploads what is newer; the code was written before."""
        times = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in times.items() if not name.endswith(".py")}

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Like `PreTrainedConfig.get_config_dict`, but refuse a checkpoint with weights that would not load.

        Raises:
            ValueError: Its `model_type` is neither this class's nor a parent's.
        """
        values, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        found = values.get("model_type", cls.model_type)
        types = {found, *(part.get("model_type") for part in values.values() if isinstance(part, dict))}
        if not types & {parent.model_type for parent in cls.__mro__ if hasattr(parent, "model_type")}:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a model of type {found}, not {cls.model_type}. The Auto "
                "classes load it as it is; `from_pretrained_encoder` converts encoders such as BERT and RoBERTa."
            )
        return values, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Like `PreTrainedConfig.from_dict`, but drop misspelt names and removed fields; other unknown names are kept.

        Warns of what is dropped, except for removed fields that were not set. Transformers saves every attribute ever
        set on a config, and the saved file must load again.
        """
        if "slot_counts" not in config_dict and config_dict.get("local_window"):
            # From a version whose slots stood for all tokens, and whose heads marked none.
            config_dict = {**config_dict, "slot_counts": "all", "global_tokens": "none"}
        if "first_position" not in config_dict:
            config_dict = {**config_dict, "first_position": config_dict.get("pad_token_id", cls.pad_token_id) + 1}
        dropped, options = set(), {} if kwargs.get("return_unused_kwargs") else kwargs  # a model refuses unused ones
        for name, value in {**config_dict, **options}.items():
            field = cls._similar_field(name) if cls._is_unknown(name) else None
            if field or name in cls.removed_fields:
                dropped.add(name)
            if field or (name in cls.removed_fields and value):
                advice = f"Did you mean `{field}`?" if field else "Earlier versions had it."
                logger.warning(f"{cls.__name__} has no field `{name}`: its value is ignored. {advice}")
        kept = {name: value for name, value in config_dict.items() if name not in dropped}
        return super().from_dict({**kept, "_from_file": True}, **kwargs)

    @classmethod
    def refuse_unknown(cls, keywords: dict[str, Any]) -> None:
        """Raise a `ValueError` for a keyword that is no field; transformers would keep it as an attribute."""
        for name, value in keywords.items():
            if cls._is_unknown(name) and (name not in cls.removed_fields or value):
                field = cls._similar_field(name)
                advice = f"Did you mean `{field}`?" if field else f"`help({cls.__name__})` lists its fields."
                raise ValueError(f"{cls.__name__} has no field `{name}`. {advice}")

    @classmethod
    def _similar_field(cls, name: str) -> str | None:
        known = [*cls.__dataclass_fields__, "num_labels"]
        return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), None)

    @classmethod
    def _is_unknown(cls, name: str) -> bool:
        return not name.startswith("_") and name not in cls.__dataclass_fields__ and name not in _LIBRARY_KEYWORDS


# ---- families/luna/configuration.py ----


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
