"""LeaPformer models (Agostinelli et al., "LeaPformer: Enabling Linear Transformers for Autoregressive and
Simultaneous Tasks via Learned Proportions", ICML 2024, arXiv 2405.13046), with cosFormer and plain linear attention.

RoBERTa with linear attention; `attention.py` has the maths. All parameters of an encoder except those of the learned
proportions have RoBERTa's names and shapes. In an encoder-decoder, cross-attention reads the sums over the source.
"""

from transformers import GenerationMixin

from ...layers.block import TransformerLayer
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
from .attention import LeapformerAttention, LeapformerCausalAttention
from .configuration import LeapformerConfig


class LeapformerPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the LeaPformer encoders."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"


class LeapformerModel(EncoderModelMixin, LeapformerPreTrainedModel):
    """The LeaPformer encoder without a head."""

    attention_class = LeapformerAttention


class LeapformerForMaskedLM(MaskedLMMixin, LeapformerPreTrainedModel):
    """LeaPformer with a masked language modelling head."""

    base_model_class = LeapformerModel


class LeapformerForSequenceClassification(SequenceClassificationMixin, LeapformerPreTrainedModel):
    """LeaPformer with a sequence classification or regression head."""

    base_model_class = LeapformerModel


class LeapformerForMultipleChoice(MultipleChoiceMixin, LeapformerPreTrainedModel):
    """LeaPformer with a multiple-choice head, for tasks such as RACE and CommonsenseQA."""

    base_model_class = LeapformerModel


class LeapformerForTokenClassification(TokenClassificationMixin, LeapformerPreTrainedModel):
    """LeaPformer with a token classification head."""

    base_model_class = LeapformerModel


class LeapformerForQuestionAnswering(QuestionAnsweringMixin, LeapformerPreTrainedModel):
    """LeaPformer with a span head for extractive question answering."""

    base_model_class = LeapformerModel


# No attentions: the state does not hold the earlier tokens.
_RECORDED = {"hidden_states": TransformerLayer}


class LeapformerCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The LeaPformer decoder without a head."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = _RECORDED
    attention_class = LeapformerCausalAttention


class LeapformerForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """LeaPformer with a causal language modelling head; generates with a decoding state of constant size."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = _RECORDED
    base_model_class = LeapformerCausalModel


class LeapformerCrossDecoder(CrossDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the LeaPformer encoder-decoder."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = {"hidden_states": TransformerLayer}  # no attentions, as in the causal model
    attention_class = LeapformerCausalAttention
    cross_attention_class = LeapformerAttention


class LeapformerStreamingDecoder(StreamingDecoderMixin, BoundedMemoryPreTrainedModel):
    """The decoder of the LeaPformer encoder-decoder with a causal source."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    _can_record_outputs = {"hidden_states": TransformerLayer}  # no attentions, as in the causal model
    attention_class = LeapformerCausalAttention


class LeapformerSeq2SeqModel(Seq2SeqModelMixin, Seq2SeqPreTrainedModel):
    """The LeaPformer encoder-decoder without a head."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    encoder_class = LeapformerModel
    decoder_class = LeapformerCrossDecoder
    streaming_classes = (LeapformerCausalModel, LeapformerStreamingDecoder)


class LeapformerForConditionalGeneration(ConditionalGenerationMixin, Seq2SeqPreTrainedModel, GenerationMixin):
    """The LeaPformer encoder-decoder with a language modelling head; generates with a state of constant size."""

    config: LeapformerConfig
    base_model_prefix = "leapformer"
    base_model_class = LeapformerSeq2SeqModel


__all__ = [
    "LeapformerCausalModel",
    "LeapformerForCausalLM",
    "LeapformerForConditionalGeneration",
    "LeapformerForMaskedLM",
    "LeapformerForMultipleChoice",
    "LeapformerForQuestionAnswering",
    "LeapformerForSequenceClassification",
    "LeapformerForTokenClassification",
    "LeapformerModel",
    "LeapformerPreTrainedModel",
    "LeapformerSeq2SeqModel",
]
