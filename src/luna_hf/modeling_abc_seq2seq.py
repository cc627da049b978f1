"""The ABC encoder-decoder (Peng et al. 2022, section 2): cross-attention writes the source with its own control."""

from transformers import GenerationMixin

from .abc_control import SharedControl
from .attention_abc import AbcAttention
from .attention_abc_causal import AbcCausalAttention
from .configuration_abc import AbcConfig
from .modeling_abc import AbcModel
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_seq2seq import (
    ConditionalGenerationMixin,
    CrossDecoderMixin,
    Seq2SeqModelMixin,
    Seq2SeqPreTrainedModel,
)


class AbcCrossDecoder(SharedControl, CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the ABC encoder-decoder."""

    config: AbcConfig
    base_model_prefix = "abc"
    _no_split_modules = [*CrossDecoderMixin._no_split_modules, "AbcControl"]
    attention_class = AbcCausalAttention
    cross_attention_class = AbcAttention


class AbcSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The ABC encoder-decoder without a head."""

    config: AbcConfig
    base_model_prefix = "abc"
    encoder_class = AbcModel
    decoder_class = AbcCrossDecoder


class AbcForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The ABC encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: AbcConfig
    base_model_prefix = "abc"
    base_model_class = AbcSeq2SeqModel


__all__ = ["AbcForConditionalGeneration", "AbcSeq2SeqModel"]
