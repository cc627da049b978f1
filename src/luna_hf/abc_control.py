"""What ABC's encoders and decoders share (Peng et al., ACL 2022): the learned control matrix, and random slots."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_abc import AbcConfig
from .memory_attention import MemoryAttention


def random_slots(ranks: Tensor, num_slots: int, seed: int) -> Tensor:
    """ABC-Random (appendix A.2): phi_i = e_j with j uniform in {1..m}, here a hash of rank and seed.

    The hash gives the same draw on every machine, in every batch and at every length.

    Args:
        ranks: (b, n).
        num_slots: m.
        seed: seed of the draw.

    Returns:
        (b, n) long in [0, m).
    """
    # Two rounds of xor-shift and multiplication modulo 2^32, in int64 to avoid overflow.
    mask = 0xFFFFFFFF
    hashed = (ranks + (seed * 0x9E3779B1 & mask) + 0x7F4A7C15) & mask
    for _ in range(2):
        hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & mask
    hashed = hashed ^ (hashed >> 16)
    return hashed * num_slots >> 32  # scaled instead of taken modulo m, which would favour the first slots


class AbcControl(nn.Module):
    """The learned matrix of a control strategy: W of equation 7, (h * m, d), or Linformer's projection, (h * m, N)."""

    def __init__(self, config: AbcConfig) -> None:
        super().__init__()
        columns = {"mlp": config.hidden_size, "linformer": config.max_position_embeddings}[config.memory_control]
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads * config.memory_size, columns))

    def initialise(self, config: AbcConfig) -> None:
        """Initialise the matrix. A Linformer slot sums over N positions: 1 / sqrt(N) keeps it at a key's scale."""
        is_linformer = config.memory_control == "linformer"
        deviation = config.max_position_embeddings**-0.5 if is_linformer else config.initializer_range
        init.normal_(self.weight, mean=0.0, std=deviation)

    def forward(self) -> Tensor:
        """Return the matrix. Calling the module, unlike reading its attribute, runs FSDP's and accelerate's hooks."""
        return self.weight


def make_control(config: AbcConfig, shared: bool) -> AbcControl | None:
    """Create the model's shared control (`shared`) or a layer's own; `None` if the config has no such control."""
    is_learned = config.memory_control in ("mlp", "linformer")
    is_used = len(config.full_attention_layers or ()) < config.num_hidden_layers
    return AbcControl(config) if is_learned and is_used and config.share_control == shared else None


class SharedControl:
    """Mixin that adds a control shared by all layers to an ABC model, and passes its matrix from layer to layer."""

    def add_layers(self, config: AbcConfig) -> None:
        """Create the shared control, if any, and the layers."""
        self.control = make_control(config, shared=True)
        super().add_layers(config)

    def first_carried(self) -> Tensor | None:
        """Return the shared control matrix, or `None` if every layer has its own or the strategy has none."""
        return None if self.control is None else self.control()


class AbcControlled(MemoryAttention):
    """Attention with a control matrix that belongs to the layer or is shared by all layers."""

    def __init__(self, config: AbcConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.control = make_control(config, shared=False)

    def control_weight(self, carried: Tensor | None) -> Tensor | None:
        """Return the learned matrix, the layer's own or the shared one; `None` for strategies without parameters."""
        return carried if self.control is None else self.control()

    def drawn_slots(self, ranks: Tensor) -> Tensor:
        """Draw the slot of each token from its rank, per layer or once for all layers (appendix A.2)."""
        config = self.config
        seed = config.control_seed if config.share_control else config.control_seed + self.layer_idx
        return random_slots(ranks, config.memory_size, seed)
