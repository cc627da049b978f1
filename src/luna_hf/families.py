"""The table of model families: `import luna_hf` exports and registers them, tests and benchmarks iterate over them."""

from dataclasses import dataclass
from types import ModuleType

import transformers
from transformers import (
    AutoConfig,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    RobertaTokenizer,
)

from . import (
    configuration_abc,
    configuration_lavo,
    configuration_leapformer,
    configuration_luna,
    modeling_abc,
    modeling_abc_causal,
    modeling_abc_seq2seq,
    modeling_lavo,
    modeling_lavo_causal,
    modeling_lavo_seq2seq,
    modeling_leapformer,
    modeling_leapformer_causal,
    modeling_leapformer_seq2seq,
    modeling_luna,
    modeling_luna_causal,
    modeling_luna_seq2seq,
)
from .configuration_abc import *
from .configuration_base import BoundedMemoryConfig
from .configuration_lavo import *
from .configuration_leapformer import *
from .configuration_luna import *
from .modeling_abc import *
from .modeling_abc_causal import *
from .modeling_abc_seq2seq import *
from .modeling_lavo import *
from .modeling_lavo_causal import *
from .modeling_lavo_seq2seq import *
from .modeling_leapformer import *
from .modeling_leapformer_causal import *
from .modeling_leapformer_seq2seq import *
from .modeling_luna import *
from .modeling_luna_causal import *
from .modeling_luna_seq2seq import *
from .tokenization_fairseq import FairseqBpeTokenizer
from .warm_start_abc import AbcRules
from .warm_start_luna import LunaRules
from .warm_start_rules import WarmStartRules

# Task heads of every family: Auto class and suffix of the class name.
_HEADS = {
    AutoModelForSequenceClassification: "ForSequenceClassification",
    AutoModelForMultipleChoice: "ForMultipleChoice",
    AutoModelForTokenClassification: "ForTokenClassification",
    AutoModelForQuestionAnswering: "ForQuestionAnswering",
}


@dataclass(frozen=True)
class Family:
    """A row of the table: a mechanism's `<Name>Config`, and the modules that define its models and their heads."""

    config: type[BoundedMemoryConfig]
    encoders: ModuleType
    decoders: ModuleType
    seq2seq: ModuleType
    warm_start: type[WarmStartRules] = WarmStartRules

    def model(self, kind: str) -> type[PreTrainedModel]:
        """Return the class `<Name><kind>`."""
        modules = {"Causal": self.decoders, "Seq2Seq": self.seq2seq, "ForConditionalGeneration": self.seq2seq}
        module = next((module for part, module in modules.items() if part in kind), self.encoders)
        return getattr(module, self.config.__name__.removesuffix("Config") + kind)

    @property
    def base_model(self) -> type[PreTrainedModel]:
        """The encoder."""
        return self.model("Model")

    @property
    def causal_model(self) -> type[PreTrainedModel]:
        """The decoder."""
        return self.model("CausalModel")

    @property
    def masked_lm(self) -> type[PreTrainedModel]:
        """The encoder with a masked language modelling head."""
        return self.model("ForMaskedLM")

    @property
    def causal_lm(self) -> type[PreTrainedModel]:
        """The decoder with a language modelling head."""
        return self.model("ForCausalLM")

    @property
    def seq2seq_model(self) -> type[PreTrainedModel]:
        """The encoder-decoder."""
        return self.model("Seq2SeqModel")

    @property
    def seq2seq_lm(self) -> type[PreTrainedModel]:
        """The encoder-decoder with a language modelling head."""
        return self.model("ForConditionalGeneration")

    @property
    def heads(self) -> dict[type, type[PreTrainedModel]]:
        """The encoders with a task head, by the Auto class that loads them."""
        return {auto_class: self.model(kind) for auto_class, kind in _HEADS.items()}

    @property
    def causal_models(self) -> tuple[type[PreTrainedModel], ...]:
        """Every decoder class of the family, the base model first."""
        return (self.causal_model, self.causal_lm)

    @property
    def seq2seq_models(self) -> tuple[type[PreTrainedModel], ...]:
        """Every encoder-decoder class of the family, the base model first."""
        return (self.seq2seq_model, self.seq2seq_lm)

    @property
    def models(self) -> tuple[type[PreTrainedModel], ...]:
        """Every encoder class of the family, the base model first."""
        return (self.base_model, self.masked_lm, *self.heads.values())

    def register(self) -> None:
        """Register the family with the Auto classes, so that `save_pretrained` also writes its code."""
        AutoConfig.register(self.config.model_type, self.config, exist_ok=True)
        self.config.register_for_auto_class()
        # Checkpoints find either by name; one that names no tokenizer class gets the last one registered.
        for tokenizer_class in (FairseqBpeTokenizer, RobertaTokenizer):
            AutoTokenizer.register(self.config, tokenizer_class, exist_ok=True)
        self.base_model.causal_model_class = self.causal_model
        self.base_model.seq2seq_model_class = self.seq2seq_model
        for model_class in (*self.models, self.causal_lm, self.seq2seq_lm):
            for auto_class in model_class.auto_classes:
                getattr(transformers, auto_class).register(self.config, model_class, exist_ok=True)


FAMILIES: dict[str, Family] = {
    family.config.model_type: family
    for family in (
        Family(LunaConfig, modeling_luna, modeling_luna_causal, modeling_luna_seq2seq, LunaRules),
        Family(AbcConfig, modeling_abc, modeling_abc_causal, modeling_abc_seq2seq, AbcRules),
        Family(LeapformerConfig, modeling_leapformer, modeling_leapformer_causal, modeling_leapformer_seq2seq),
        Family(LavoConfig, modeling_lavo, modeling_lavo_causal, modeling_lavo_seq2seq),
    )
}


def register() -> None:
    """Register every family, and the tokenizer of the authors' checkpoints."""
    FairseqBpeTokenizer.register_for_auto_class("AutoTokenizer")
    for family in FAMILIES.values():
        family.register()


__all__ = ["FAMILIES"]
__all__ += configuration_abc.__all__
__all__ += configuration_lavo.__all__
__all__ += configuration_leapformer.__all__
__all__ += configuration_luna.__all__
__all__ += modeling_abc.__all__
__all__ += modeling_abc_causal.__all__
__all__ += modeling_abc_seq2seq.__all__
__all__ += modeling_lavo.__all__
__all__ += modeling_lavo_causal.__all__
__all__ += modeling_lavo_seq2seq.__all__
__all__ += modeling_leapformer.__all__
__all__ += modeling_leapformer_causal.__all__
__all__ += modeling_leapformer_seq2seq.__all__
__all__ += modeling_luna.__all__
__all__ += modeling_luna_causal.__all__
__all__ += modeling_luna_seq2seq.__all__
