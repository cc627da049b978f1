"""The softmax control of the learning experiments: transformers' RoBERTa with this package's convolution.

Importing this module registers the model type `roberta-conv` with the Auto classes, so that a recipe can name it. It is
part of the experiments and not of the package, which has no softmax family of its own so far: whatever the convolution
does for Luna, it does here for softmax attention, through the same module, at the same place (added to the output of
the attention before dropout, residual and norm), initialised alike.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    RobertaTokenizer,
)
from transformers import initialization as init
from transformers.models.roberta.modeling_roberta import RobertaAttention, RobertaPreTrainedModel

from luna_hf.modeling_base import DepthwiseConvolution


@strict
class RobertaConvConfig(RobertaConfig):
    """RoBERTa's configuration, and the taps of the convolution (odd)."""

    model_type = "roberta-conv"
    conv_kernel_size: int = 5


class RobertaConvAttention(RobertaAttention):
    """RoBERTa's attention sub-layer with the convolution over its input added to what the attention brings."""

    def __init__(self, config: RobertaConvConfig) -> None:
        super().__init__(config)
        self.convolution = DepthwiseConvolution(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        keep: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(b, n, d) to (b, n, d) and the attention maps; `keep` (b, n) is True for tokens, `None` without padding."""
        mixed, weights = self.self(hidden_states, attention_mask=attention_mask, **kwargs)
        mixed = self.output.dense(mixed) + self.convolution(hidden_states, keep)
        return self.output.LayerNorm(self.output.dropout(mixed) + hidden_states), weights


class RobertaConvPreTrainedModel(RobertaPreTrainedModel):
    """Initialisation of the convolution, as in the package."""

    config: RobertaConvConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DepthwiseConvolution):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)


class RobertaConvModel(RobertaConvPreTrainedModel, RobertaModel):
    """The encoder."""

    def __init__(self, config: RobertaConvConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        for layer in self.encoder.layer:
            layer.attention = RobertaConvAttention(config)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """As RoBERTa's; the (b, n) mask also tells the convolution where the padding is."""
        keep = None if attention_mask is None else attention_mask != 0
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, keep=keep, **kwargs)


class RobertaConvForMaskedLM(RobertaConvPreTrainedModel, RobertaForMaskedLM):
    """The encoder with RoBERTa's masked-LM head."""

    def __init__(self, config: RobertaConvConfig) -> None:
        super().__init__(config)
        self.roberta = RobertaConvModel(config, add_pooling_layer=False)
        self.post_init()


def register() -> None:
    """Make `roberta-conv` known to the Auto classes."""
    AutoConfig.register("roberta-conv", RobertaConvConfig, exist_ok=True)
    AutoTokenizer.register(RobertaConvConfig, RobertaTokenizer, exist_ok=True)
    AutoModel.register(RobertaConvConfig, RobertaConvModel, exist_ok=True)
    AutoModelForMaskedLM.register(RobertaConvConfig, RobertaConvForMaskedLM, exist_ok=True)


register()
