"""Toy models; the attention is in `attention.py`."""

from transformers import GenerationMixin

from ...models.base import BoundedMemoryPreTrainedModel
from ...models.conditional_generation import ConditionalGenerationMixin
from ...models.decoder import CausalLMMixin, DecoderModelMixin
from ...models.encoder import EncoderModelMixin, EncoderPreTrainedModel
from ...models.encoder_decoder import (
    CrossDecoderMixin,
    Seq2SeqModelMixin,
    Seq2SeqPreTrainedModel,
)
from ...models.encoder_heads import (
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)
from ...models.streaming import StreamingDecoderMixin
from .attention import ToyAttention, ToyCausalAttention
from .configuration import ToyConfig


class ToyPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the toy encoders."""

    config: ToyConfig
    base_model_prefix = "toy"


class ToyModel(EncoderModelMixin, ToyPreTrainedModel):
    """The toy encoder without a head."""

    attention_class = ToyAttention


class ToyForMaskedLM(MaskedLMMixin, ToyPreTrainedModel):
    """The toy encoder with a masked language modelling head."""

    base_model_class = ToyModel


class ToyForSequenceClassification(SequenceClassificationMixin, ToyPreTrainedModel):
    """The toy encoder with a sequence classification or regression head."""

    base_model_class = ToyModel


class ToyForMultipleChoice(MultipleChoiceMixin, ToyPreTrainedModel):
    """The toy encoder with a multiple-choice head."""

    base_model_class = ToyModel


class ToyForTokenClassification(TokenClassificationMixin, ToyPreTrainedModel):
    """The toy encoder with a token classification head."""

    base_model_class = ToyModel


class ToyForQuestionAnswering(QuestionAnsweringMixin, ToyPreTrainedModel):
    """The toy encoder with a span head."""

    base_model_class = ToyModel


class ToyCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The toy decoder without a head."""

    config: ToyConfig
    base_model_prefix = "toy"
    attention_class = ToyCausalAttention


class ToyForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """The toy decoder with a causal language modelling head."""

    config: ToyConfig
    base_model_prefix = "toy"
    base_model_class = ToyCausalModel


class ToyCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the toy encoder-decoder."""

    config: ToyConfig
    base_model_prefix = "toy"
    attention_class = ToyCausalAttention
    cross_attention_class = ToyAttention


class ToyStreamingDecoder(StreamingDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the toy encoder-decoder with a causal source."""

    config: ToyConfig
    base_model_prefix = "toy"
    attention_class = ToyCausalAttention


class ToySeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The toy encoder-decoder without a head."""

    config: ToyConfig
    base_model_prefix = "toy"
    encoder_class = ToyModel
    decoder_class = ToyCrossDecoder
    streaming_classes = (ToyCausalModel, ToyStreamingDecoder)


class ToyForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The toy encoder-decoder with a language modelling head."""

    config: ToyConfig
    base_model_prefix = "toy"
    base_model_class = ToySeq2SeqModel


__all__ = [
    "ToyCausalModel",
    "ToyForCausalLM",
    "ToyForConditionalGeneration",
    "ToyForMaskedLM",
    "ToyForMultipleChoice",
    "ToyForQuestionAnswering",
    "ToyForSequenceClassification",
    "ToyForTokenClassification",
    "ToyModel",
    "ToyPreTrainedModel",
    "ToySeq2SeqModel",
]
