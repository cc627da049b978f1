"""ABC encoders (Peng et al., "ABC: Attention with Bounded-memory Control", ACL 2022, arXiv 2110.02488).

A RoBERTa whose attention reads a memory of fixed size. The arithmetic is in `memory_control.py` and
`attention_abc.py`. Every parameter but the control's has RoBERTa's name and shape.
"""

from .abc_control import SharedControl
from .attention_abc import AbcAttention
from .configuration_abc import AbcConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_encoder import (
    EncoderModelMixin,
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)


class AbcPreTrainedModel(BoundedMemoryPreTrainedModel):
    """What all ABC models share."""

    config: AbcConfig
    base_model_prefix = "abc"


class AbcModel(SharedControl, EncoderModelMixin, AbcPreTrainedModel):
    """The ABC encoder without a head."""

    _no_split_modules = [*BoundedMemoryPreTrainedModel._no_split_modules, "AbcControl"]
    attention_class = AbcAttention


class AbcForMaskedLM(MaskedLMMixin, AbcPreTrainedModel):
    """ABC with a masked language modelling head."""

    base_model_class = AbcModel


class AbcForSequenceClassification(SequenceClassificationMixin, AbcPreTrainedModel):
    """ABC with a sequence classification or regression head."""

    base_model_class = AbcModel


class AbcForMultipleChoice(MultipleChoiceMixin, AbcPreTrainedModel):
    """ABC with a head that scores choices, for RACE, CommonsenseQA and the like."""

    base_model_class = AbcModel


class AbcForTokenClassification(TokenClassificationMixin, AbcPreTrainedModel):
    """ABC with a token classification head."""

    base_model_class = AbcModel


class AbcForQuestionAnswering(QuestionAnsweringMixin, AbcPreTrainedModel):
    """ABC with a span (extractive question answering) head."""

    base_model_class = AbcModel


__all__ = [
    "AbcForMaskedLM",
    "AbcForMultipleChoice",
    "AbcForQuestionAnswering",
    "AbcForSequenceClassification",
    "AbcForTokenClassification",
    "AbcModel",
    "AbcPreTrainedModel",
]
