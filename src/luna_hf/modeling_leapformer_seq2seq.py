"""The LeaPformer encoder-decoder (Agostinelli et al. 2024): cross-attention reads the sums over the source."""

from transformers import GenerationMixin

from .attention_leapformer import LeapformerAttention
from .attention_leapformer_causal import LeapformerCausalAttention
from .configuration_leapformer import LeapformerConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_layers import TransformerLayer
from .modeling_leapformer import LeapformerModel
from .modeling_seq2seq import (
    ConditionalGenerationMixin,
    CrossDecoderMixin,
    Seq2SeqModelMixin,
    Seq2SeqPreTrainedModel,
)


class LeapformerCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the LeaPformer encoder-decoder."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = {"hidden_states": TransformerLayer}  # no attentions, as in the causal model
    attention_class = LeapformerCausalAttention
    cross_attention_class = LeapformerAttention


class LeapformerSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The LeaPformer encoder-decoder without a head."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    encoder_class = LeapformerModel
    decoder_class = LeapformerCrossDecoder


class LeapformerForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The LeaPformer encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    base_model_class = LeapformerSeq2SeqModel


__all__ = ["LeapformerForConditionalGeneration", "LeapformerSeq2SeqModel"]
