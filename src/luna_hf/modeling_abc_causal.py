"""Causal ABC (Peng et al. 2022, section 2 and appendix B.1): the bare decoder and the language model."""

from transformers import GenerationMixin

from .abc_control import SharedControl
from .attention_abc_causal import AbcCausalAttention
from .configuration_abc import AbcConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_decoder import CausalLMMixin, DecoderModelMixin


class AbcCausalModel(SharedControl, DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The ABC decoder without a head."""

    config: AbcConfig
    base_model_prefix = "abc"
    _no_split_modules = [*BoundedMemoryPreTrainedModel._no_split_modules, "AbcControl"]
    attention_class = AbcCausalAttention


class AbcForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """ABC with a causal language modelling head; generates with a decoding state of constant size."""

    config: AbcConfig
    base_model_prefix = "abc"
    base_model_class = AbcCausalModel


__all__ = ["AbcCausalModel", "AbcForCausalLM"]
