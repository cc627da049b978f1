"""Bounded-memory, linear-time attention models for transformers.

Importing the package registers its families with the Auto classes:

    >>> import luna_hf
    >>> from transformers import AutoModelForMaskedLM
    >>> model = AutoModelForMaskedLM.from_config(luna_hf.LunaConfig())
"""

from .configuration_abc import AbcConfig
from .configuration_luna import LunaConfig
from .families import FAMILIES, register
from .modeling_abc import (
    AbcForCausalLM,
    AbcForMaskedLM,
    AbcForMultipleChoice,
    AbcForQuestionAnswering,
    AbcForSequenceClassification,
    AbcForTokenClassification,
    AbcModel,
    AbcPreTrainedModel,
)
from .modeling_luna import (
    LunaForCausalLM,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForQuestionAnswering,
    LunaForSequenceClassification,
    LunaForTokenClassification,
    LunaModel,
    LunaModelOutput,
    LunaPreTrainedModel,
)
from .state import MemoryCache
from .tokenization_fairseq import FairseqBpeTokenizer

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "AbcConfig",
    "AbcForCausalLM",
    "AbcForMaskedLM",
    "AbcForMultipleChoice",
    "AbcForQuestionAnswering",
    "AbcForSequenceClassification",
    "AbcForTokenClassification",
    "AbcModel",
    "AbcPreTrainedModel",
    "FairseqBpeTokenizer",
    "LunaConfig",
    "LunaForCausalLM",
    "LunaForMaskedLM",
    "LunaForMultipleChoice",
    "LunaForQuestionAnswering",
    "LunaForSequenceClassification",
    "LunaForTokenClassification",
    "LunaModel",
    "LunaModelOutput",
    "LunaPreTrainedModel",
    "MemoryCache",
]

register()
