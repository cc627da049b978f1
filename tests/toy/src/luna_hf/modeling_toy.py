"""Toy encoders; the attention is in `attention_toy.py`."""

from .attention_toy import ToyAttention
from .configuration_toy import ToyConfig
from .modeling_encoder import (
    EncoderModelMixin,
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)
from .positions import EncoderPreTrainedModel


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


__all__ = [
    "ToyForMaskedLM",
    "ToyForMultipleChoice",
    "ToyForQuestionAnswering",
    "ToyForSequenceClassification",
    "ToyForTokenClassification",
    "ToyModel",
    "ToyPreTrainedModel",
]
