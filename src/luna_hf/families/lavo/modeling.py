"""LAVO models (Zhang et al., "Linear Attention via Orthogonal Memory", 2023, arXiv 2312.11135).

RoBERTa with an orthogonal memory and a window; `attention.py` has the maths. All parameters of an encoder except the
bases and the bias of the window's positions have RoBERTa's names and shapes. In an encoder-decoder, cross-attention
reads the orthogonal memory alone (section 3.4).
"""

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
from .attention import LavoAttention, LavoCausalAttention
from .configuration import LavoConfig


class LavoPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the LAVO encoders."""

    config: LavoConfig
    base_model_prefix = "lavo"


class LavoModel(EncoderModelMixin, LavoPreTrainedModel):
    """The LAVO encoder without a head."""

    attention_class = LavoAttention


class LavoForMaskedLM(MaskedLMMixin, LavoPreTrainedModel):
    """LAVO with a masked language modelling head."""

    base_model_class = LavoModel


class LavoForSequenceClassification(SequenceClassificationMixin, LavoPreTrainedModel):
    """LAVO with a sequence classification or regression head."""

    base_model_class = LavoModel


class LavoForMultipleChoice(MultipleChoiceMixin, LavoPreTrainedModel):
    """LAVO with a multiple-choice head, for tasks such as RACE and CommonsenseQA."""

    base_model_class = LavoModel


class LavoForTokenClassification(TokenClassificationMixin, LavoPreTrainedModel):
    """LAVO with a token classification head."""

    base_model_class = LavoModel


class LavoForQuestionAnswering(QuestionAnsweringMixin, LavoPreTrainedModel):
    """LAVO with a span head for extractive question answering."""

    base_model_class = LavoModel


class LavoCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The LAVO decoder without a head."""

    config: LavoConfig
    base_model_prefix = "lavo"
    attention_class = LavoCausalAttention


class LavoForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """LAVO with a causal language modelling head; generates with a decoding state of constant size."""

    config: LavoConfig
    base_model_prefix = "lavo"
    base_model_class = LavoCausalModel


class LavoCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the LAVO encoder-decoder."""

    config: LavoConfig
    base_model_prefix = "lavo"
    attention_class = LavoCausalAttention
    cross_attention_class = LavoAttention


class LavoStreamingDecoder(StreamingDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the LAVO encoder-decoder with a causal source."""

    config: LavoConfig
    base_model_prefix = "lavo"
    attention_class = LavoCausalAttention


class LavoSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The LAVO encoder-decoder without a head."""

    config: LavoConfig
    base_model_prefix = "lavo"
    encoder_class = LavoModel
    decoder_class = LavoCrossDecoder
    streaming_classes = (LavoCausalModel, LavoStreamingDecoder)


class LavoForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The LAVO encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: LavoConfig
    base_model_prefix = "lavo"
    base_model_class = LavoSeq2SeqModel


__all__ = [
    "LavoCausalModel",
    "LavoForCausalLM",
    "LavoForConditionalGeneration",
    "LavoForMaskedLM",
    "LavoForMultipleChoice",
    "LavoForQuestionAnswering",
    "LavoForSequenceClassification",
    "LavoForTokenClassification",
    "LavoModel",
    "LavoPreTrainedModel",
    "LavoSeq2SeqModel",
]
