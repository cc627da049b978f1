"""LAVO encoders (Zhang et al., "Linear Attention via Orthogonal Memory", 2023, arXiv 2312.11135).

RoBERTa with an orthogonal memory and a window; see `attention_lavo.py` for the maths. All parameters except the bases
and the bias of the window's positions have RoBERTa's names and shapes.
"""

from .attention_lavo import LavoAttention
from .configuration_lavo import LavoConfig
from .modeling_encoder import (
    EncoderModelMixin,
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)
from .positions import EncoderPreTrainedModel


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


__all__ = [
    "LavoForMaskedLM",
    "LavoForMultipleChoice",
    "LavoForQuestionAnswering",
    "LavoForSequenceClassification",
    "LavoForTokenClassification",
    "LavoModel",
    "LavoPreTrainedModel",
]
