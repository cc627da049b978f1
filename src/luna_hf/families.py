"""The table of families: what `import luna_hf` registers, and what tests and benchmarks iterate over."""

from dataclasses import dataclass

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    RobertaTokenizer,
)

from .attention_abc import AbcSelfAttention
from .attention_luna import LunaSelfAttention
from .configuration_abc import AbcConfig
from .configuration_base import EncoderConfig
from .configuration_luna import LunaConfig
from .modeling_abc import (
    AbcForCausalLM,
    AbcForMaskedLM,
    AbcForMultipleChoice,
    AbcForQuestionAnswering,
    AbcForSequenceClassification,
    AbcForTokenClassification,
    AbcModel,
)
from .modeling_luna import (
    LunaForCausalLM,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForQuestionAnswering,
    LunaForSequenceClassification,
    LunaForTokenClassification,
    LunaModel,
)
from .tokenization_fairseq import FairseqBpeTokenizer
from .warm_start_abc import AbcRules
from .warm_start_luna import LunaRules
from .warm_start_rules import WarmStartRules


@dataclass(frozen=True)
class Family:
    """One row: configuration, attention module and models of a mechanism."""

    config: type[EncoderConfig]
    attention: type[nn.Module]
    base_model: type[PreTrainedModel]
    masked_lm: type[PreTrainedModel]
    causal_lm: type[PreTrainedModel]
    heads: dict[type, type[PreTrainedModel]]
    warm_start: type[WarmStartRules] = WarmStartRules

    @property
    def causal_models(self) -> tuple[type[PreTrainedModel], ...]:
        """Every class of the family whose tokens look back only."""
        return (self.causal_lm,)

    @property
    def models(self) -> tuple[type[PreTrainedModel], ...]:
        """Every encoder class of the family, the base model first."""
        return (self.base_model, self.masked_lm, *self.heads.values())


FAMILIES: dict[str, Family] = {
    "luna": Family(
        config=LunaConfig,
        attention=LunaSelfAttention,
        base_model=LunaModel,
        masked_lm=LunaForMaskedLM,
        causal_lm=LunaForCausalLM,
        heads={
            AutoModelForSequenceClassification: LunaForSequenceClassification,
            AutoModelForMultipleChoice: LunaForMultipleChoice,
            AutoModelForTokenClassification: LunaForTokenClassification,
            AutoModelForQuestionAnswering: LunaForQuestionAnswering,
        },
        warm_start=LunaRules,
    ),
    "abc_memory": Family(
        config=AbcConfig,
        attention=AbcSelfAttention,
        base_model=AbcModel,
        masked_lm=AbcForMaskedLM,
        causal_lm=AbcForCausalLM,
        heads={
            AutoModelForSequenceClassification: AbcForSequenceClassification,
            AutoModelForMultipleChoice: AbcForMultipleChoice,
            AutoModelForTokenClassification: AbcForTokenClassification,
            AutoModelForQuestionAnswering: AbcForQuestionAnswering,
        },
        warm_start=AbcRules,
    ),
}


def register() -> None:
    """Make every family known to the Auto classes, and its code part of what `save_pretrained` writes."""
    FairseqBpeTokenizer.register_for_auto_class("AutoTokenizer")
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config, exist_ok=True)
        # Both are known by their names from now on; the last is what a folder gets that names none.
        for tokenizer_class in (FairseqBpeTokenizer, RobertaTokenizer):
            AutoTokenizer.register(family.config, tokenizer_class, exist_ok=True)
        family.config.register_for_auto_class()
        auto_classes = {
            AutoModel: family.base_model,
            AutoModelForPreTraining: family.masked_lm,
            AutoModelForMaskedLM: family.masked_lm,
            AutoModelForCausalLM: family.causal_lm,
            **family.heads,
        }
        for auto_class, model_class in auto_classes.items():
            auto_class.register(family.config, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_class.__name__)
