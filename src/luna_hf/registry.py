"""The table of model families: `import luna_hf` exports and registers them, tests and benchmarks iterate over it."""

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    RobertaTokenizer,
)

from .configuration import BoundedMemoryConfig
from .families.abc import modeling as abc
from .families.abc.configuration import *
from .families.abc.modeling import *
from .families.abc.warm_start import AbcRules
from .families.lavo import modeling as lavo
from .families.lavo.configuration import *
from .families.lavo.modeling import *
from .families.leapformer import modeling as leapformer
from .families.leapformer.configuration import *
from .families.leapformer.modeling import *
from .families.luna import modeling as luna
from .families.luna.configuration import *
from .families.luna.modeling import *
from .families.luna.warm_start import LunaRules
from .families.warm_start_rules import WarmStartRules
from .tokenization_fairseq import FairseqBpeTokenizer

# Task heads of every family: Auto class and suffix of the class name.
_HEADS = {
    AutoModelForSequenceClassification: "ForSequenceClassification",
    AutoModelForMultipleChoice: "ForMultipleChoice",
    AutoModelForTokenClassification: "ForTokenClassification",
    AutoModelForQuestionAnswering: "ForQuestionAnswering",
}


def _model(kind: str) -> property:
    """A property of `Family`: the class `<Name><kind>`."""
    return property(lambda family: family.model(kind))


@dataclass(frozen=True)
class Family:
    """A row of the table: a mechanism's `<Name>Config`, the module of its models, and its rules for a warm start."""

    config: type[BoundedMemoryConfig]
    modeling: ModuleType
    warm_start: type[WarmStartRules] = WarmStartRules

    def model(self, kind: str) -> type[PreTrainedModel]:
        """Return the class `<Name><kind>`."""
        return getattr(self.modeling, self.config.__name__.removesuffix("Config") + kind)

    base_model = _model("Model")  # the encoder
    masked_lm = _model("ForMaskedLM")
    causal_model = _model("CausalModel")  # the decoder
    causal_lm = _model("ForCausalLM")
    seq2seq_model = _model("Seq2SeqModel")  # the encoder-decoder
    seq2seq_lm = _model("ForConditionalGeneration")

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
        """Register the family with the Auto classes."""
        AutoConfig.register(self.config.model_type, self.config, exist_ok=True)
        # Checkpoints find either by name; one that names no tokenizer class gets the last one registered.
        for tokenizer_class in (FairseqBpeTokenizer, _SavedTokenizer):
            AutoTokenizer.register(self.config, tokenizer_class, exist_ok=True)
        for model_class in (*self.models, self.causal_lm, self.seq2seq_lm):
            for auto_class in model_class.auto_classes:
                getattr(transformers, auto_class).register(self.config, model_class, exist_ok=True)
        AutoModel.register(self.config, _trunk(self), exist_ok=True)


class _SavedTokenizer(RobertaTokenizer):
    """Loads a `RobertaTokenizer`, which Transformers makes up where none is saved, with its special tokens alone."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> RobertaTokenizer:
        """Like `RobertaTokenizer.from_pretrained`.

        Raises:
            OSError: The folder or repository has no tokenizer.
        """
        tokenizer = RobertaTokenizer.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise OSError(
                f"{pretrained_model_name_or_path} has no tokenizer. Save the model's there, with "
                "`tokenizer.save_pretrained`."
            )
        return tokenizer


def _trunk(family: Family) -> type:
    """Return what AutoModel loads: it knows one class for a config class, whose config may also be a decoder's."""

    class Trunk:
        """Makes the encoder, decoder or encoder-decoder without a head, by its config."""

        config_class = family.config

        @staticmethod
        def from_pretrained(*args: Any, config: BoundedMemoryConfig, **kwargs: Any) -> PreTrainedModel:
            return model_class(config).from_pretrained(*args, config=config, **kwargs)

        @staticmethod
        def _from_config(config: BoundedMemoryConfig, **kwargs: Any) -> PreTrainedModel:
            return model_class(config)._from_config(config, **kwargs)

    def model_class(config: BoundedMemoryConfig) -> type[PreTrainedModel]:
        if config.is_decoder:
            return family.causal_model
        return family.seq2seq_model if config.is_encoder_decoder else family.base_model

    return Trunk


FAMILIES: dict[str, Family] = {
    family.config.model_type: family
    for family in (
        Family(LunaConfig, luna, LunaRules),
        Family(AbcConfig, abc, AbcRules),
        Family(LeapformerConfig, leapformer),
        Family(LavoConfig, lavo),
    )
}


def register() -> None:
    """Register every family, and the tokenizer of the authors' checkpoints."""
    FairseqBpeTokenizer.register_for_auto_class("AutoTokenizer")
    for family in FAMILIES.values():
        family.register()


# Without a loop, so that editors and the documentation, which do not run it, know the names.
__all__ = ["FAMILIES", "AbcConfig", "LavoConfig", "LeapformerConfig", "LunaConfig"]
__all__ += abc.__all__
__all__ += lavo.__all__
__all__ += leapformer.__all__
__all__ += luna.__all__
