"""Causal Luna (Ma et al. 2021, section 3.3): the bare decoder and the language model."""

from transformers import GenerationMixin

from .attention_luna_causal import LunaCausalAttention
from .configuration_luna import LunaConfig
from .modeling_base import BoundedMemoryPreTrainedModel
from .modeling_decoder import CausalLMMixin, DecoderModelMixin


class LunaCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The Luna decoder without a head."""

    config: LunaConfig
    base_model_prefix = "luna"
    attention_class = LunaCausalAttention


class LunaForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """Luna with a causal language modelling head; generates with a decoding state of constant size."""

    config: LunaConfig
    base_model_prefix = "luna"
    base_model_class = LunaCausalModel


__all__ = ["LunaCausalModel", "LunaForCausalLM"]
