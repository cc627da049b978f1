"""LeaPformer encoders (Agostinelli et al., "LeaPformer: Enabling Linear Transformers for Autoregressive and
Simultaneous Tasks via Learned Proportions", ICML 2024, arXiv 2405.13046), with cosFormer and plain linear attention.

RoBERTa with linear attention; see `attention_leapformer.py` for the maths. All parameters except those of the learned
proportions have RoBERTa's names and shapes.
"""

from .attention_leapformer import LeapformerAttention
from .configuration_leapformer import LeapformerConfig
from .modeling_encoder import (
    EncoderModelMixin,
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)
from .positions import EncoderPreTrainedModel


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


__all__ = [
    "LeapformerForMaskedLM",
    "LeapformerForMultipleChoice",
    "LeapformerForQuestionAnswering",
    "LeapformerForSequenceClassification",
    "LeapformerForTokenClassification",
    "LeapformerModel",
    "LeapformerPreTrainedModel",
]
