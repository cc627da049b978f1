"""The LAVO encoder-decoder (Zhang et al. 2023, section 3.4): cross-attention reads the orthogonal memory alone."""

from transformers import GenerationMixin

from .attention_lavo import LavoAttention
from .attention_lavo_causal import LavoCausalAttention
from .configuration_lavo import LavoConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_lavo import LavoModel
from .modeling_seq2seq import (
    ConditionalGenerationMixin,
    CrossDecoderMixin,
    Seq2SeqModelMixin,
    Seq2SeqPreTrainedModel,
)


class LavoCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the LAVO encoder-decoder."""

    config: LavoConfig
    base_model_prefix = "lavo"
    attention_class = LavoCausalAttention
    cross_attention_class = LavoAttention


class LavoSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The LAVO encoder-decoder without a head."""

    config: LavoConfig
    base_model_prefix = "lavo"
    encoder_class = LavoModel
    decoder_class = LavoCrossDecoder


class LavoForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The LAVO encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: LavoConfig
    base_model_prefix = "lavo"
    base_model_class = LavoSeq2SeqModel


__all__ = ["LavoForConditionalGeneration", "LavoSeq2SeqModel"]
