"""ABC models (Peng et al., "ABC: Attention with Bounded-memory Control", ACL 2022, arXiv 2110.02488).

RoBERTa with attention to a memory of fixed size; `attention.py` has the maths. All parameters of an encoder except
the control's have RoBERTa's names and shapes. In an encoder-decoder, cross-attention writes the source with its own
control.
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
from .attention import AbcAttention, AbcCausalAttention, SharedControl
from .configuration import AbcConfig


class AbcPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the ABC encoders."""

    config: AbcConfig
    base_model_prefix = "abc"


class AbcModel(SharedControl, EncoderModelMixin, AbcPreTrainedModel):
    """The ABC encoder without a head."""

    attention_class = AbcAttention


class AbcForMaskedLM(MaskedLMMixin, AbcPreTrainedModel):
    """ABC with a masked language modelling head."""

    base_model_class = AbcModel


class AbcForSequenceClassification(SequenceClassificationMixin, AbcPreTrainedModel):
    """ABC with a sequence classification or regression head."""

    base_model_class = AbcModel


class AbcForMultipleChoice(MultipleChoiceMixin, AbcPreTrainedModel):
    """ABC with a multiple-choice head, for tasks such as RACE and CommonsenseQA."""

    base_model_class = AbcModel


class AbcForTokenClassification(TokenClassificationMixin, AbcPreTrainedModel):
    """ABC with a token classification head."""

    base_model_class = AbcModel


class AbcForQuestionAnswering(QuestionAnsweringMixin, AbcPreTrainedModel):
    """ABC with a span head for extractive question answering."""

    base_model_class = AbcModel


class AbcCausalModel(SharedControl, DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The ABC decoder without a head."""

    config: AbcConfig
    base_model_prefix = "abc"
    attention_class = AbcCausalAttention


class AbcForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """ABC with a causal language modelling head; generates with a decoding state of constant size."""

    config: AbcConfig
    base_model_prefix = "abc"
    base_model_class = AbcCausalModel


class AbcCrossDecoder(SharedControl, CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the ABC encoder-decoder."""

    config: AbcConfig
    base_model_prefix = "abc"
    attention_class = AbcCausalAttention
    cross_attention_class = AbcAttention


class AbcStreamingDecoder(SharedControl, StreamingDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the ABC encoder-decoder with a causal source."""

    config: AbcConfig
    base_model_prefix = "abc"
    attention_class = AbcCausalAttention


class AbcSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The ABC encoder-decoder without a head."""

    config: AbcConfig
    base_model_prefix = "abc"
    encoder_class = AbcModel
    decoder_class = AbcCrossDecoder
    streaming_classes = (AbcCausalModel, AbcStreamingDecoder)


class AbcForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The ABC encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: AbcConfig
    base_model_prefix = "abc"
    base_model_class = AbcSeq2SeqModel


__all__ = [
    "AbcCausalModel",
    "AbcForCausalLM",
    "AbcForConditionalGeneration",
    "AbcForMaskedLM",
    "AbcForMultipleChoice",
    "AbcForQuestionAnswering",
    "AbcForSequenceClassification",
    "AbcForTokenClassification",
    "AbcModel",
    "AbcPreTrainedModel",
    "AbcSeq2SeqModel",
]
