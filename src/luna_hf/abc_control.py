"""The learned part of ABC's memory control, of one layer or shared by all; for encoders and decoders."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_abc import AbcConfig
from .memory_attention import MemoryAttention
from .memory_control import random_slots


class AbcControl(nn.Module):
    """The learned part of a control: W of equation 7 (h * m, d), or Linformer's matrix (h * m, N)."""

    def __init__(self, config: AbcConfig) -> None:
        super().__init__()
        columns = {"mlp": config.hidden_size, "linformer": config.max_position_embeddings}[config.memory_control]
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads * config.memory_size, columns))

    def initialise(self, config: AbcConfig) -> None:
        """Linformer's slots are sums over all positions: with this deviation they are as large as a key."""
        is_linformer = config.memory_control == "linformer"
        deviation = config.max_position_embeddings**-0.5 if is_linformer else config.initializer_range
        init.normal_(self.weight, mean=0.0, std=deviation)

    def forward(self) -> Tensor:
        """The matrix, for the layers that share it."""
        return self.weight


def make_control(config: AbcConfig, shared: bool) -> AbcControl | None:
    """The learned control of all layers (`shared`) or of one; `None` where the strategy has none there."""
    is_learned = config.memory_control in ("mlp", "linformer")
    return AbcControl(config) if is_learned and config.share_control == shared else None


class SharedControl:
    """What an ABC model has beside its layers: the control that they share, handed from layer to layer."""

    def add_layers(self, config: AbcConfig) -> None:
        """Create the shared control and the layers."""
        self.control = make_control(config, shared=True)
        super().add_layers(config)

    def first_carried(self) -> Tensor | None:
        """The control's matrix, if the layers share one."""
        return None if self.control is None else self.control()


class AbcControlled(MemoryAttention):
    """An attention whose control is the layer's own, or shared by all layers."""

    def __init__(self, config: AbcConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.control = make_control(config, shared=False)

    def control_weight(self, carried: Tensor | None) -> Tensor | None:
        """The learned matrix: the layer's, or the one that all share; `None` for the other strategies."""
        return carried if self.control is None else self.control()

    def drawn_slots(self, ranks: Tensor) -> Tensor:
        """Appendix A.2: the slots of tokens with these places in their rows, drawn for the layer or for all."""
        config = self.config
        seed = config.control_seed if config.share_control else config.control_seed + self.layer_idx
        return random_slots(ranks, config.memory_size, seed)
