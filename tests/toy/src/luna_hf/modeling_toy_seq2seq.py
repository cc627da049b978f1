"""The toy encoder-decoder."""

from transformers import GenerationMixin

from .attention_toy import ToyAttention
from .attention_toy_causal import ToyCausalAttention
from .configuration_toy import ToyConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_seq2seq import ConditionalGenerationMixin, CrossDecoderMixin, Seq2SeqModelMixin, Seq2SeqPreTrainedModel
from .modeling_toy import ToyModel


class ToyCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the toy encoder-decoder."""

    config: ToyConfig
    base_model_prefix = "toy"
    attention_class = ToyCausalAttention
    cross_attention_class = ToyAttention


class ToySeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The toy encoder-decoder without a head."""

    config: ToyConfig
    base_model_prefix = "toy"
    encoder_class = ToyModel
    decoder_class = ToyCrossDecoder


class ToyForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The toy encoder-decoder with a language modelling head."""

    config: ToyConfig
    base_model_prefix = "toy"
    base_model_class = ToySeq2SeqModel


__all__ = ["ToyForConditionalGeneration", "ToySeq2SeqModel"]
