"""ABC encoders (Peng et al., "ABC: Attention with Bounded-memory Control", ACL 2022, arXiv 2110.02488).

RoBERTa with attention to a memory of fixed size; see `memory_control.py` and `attention_abc.py` for the maths. All
parameters except the control's have RoBERTa's names and shapes.
"""

from .abc_control import SharedControl
from .attention_abc import AbcAttention
from .configuration_abc import AbcConfig
from .modeling_encoder import (
    EncoderModelMixin,
    MaskedLMMixin,
    MultipleChoiceMixin,
    QuestionAnsweringMixin,
    SequenceClassificationMixin,
    TokenClassificationMixin,
)
from .positions import EncoderPreTrainedModel


class AbcPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the ABC encoders."""

    config: AbcConfig
    base_model_prefix = "abc"


class AbcModel(SharedControl, EncoderModelMixin, AbcPreTrainedModel):
    """The ABC encoder without a head."""

    _no_split_modules = [*EncoderPreTrainedModel._no_split_modules, "AbcControl"]
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


__all__ = [
    "AbcForMaskedLM",
    "AbcForMultipleChoice",
    "AbcForQuestionAnswering",
    "AbcForSequenceClassification",
    "AbcForTokenClassification",
    "AbcModel",
    "AbcPreTrainedModel",
]
