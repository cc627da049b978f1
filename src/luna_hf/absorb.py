"""Few slots: let an encoder on a CPU apply projections to these instead of the tokens, by an explicit transform."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import is_tracing

from .families.abc.attention import AbcAttention, Sources, sum_over
from .families.luna.attention import LunaAttention, LunaPackAttention
from .layers.block import AttentionBlock
from .ops.absorbed import absorbed_pack, absorbed_read, project_slots
from .ops.attention import product, project_heads
from .ops.context import ForwardContext
from .ops.memories import SlotMemory
from .ops.recompute import is_plain

# Costs in multiply-adds of a product with all tokens, as measured on CPUs: each logit's part in a softmax, alone and
# with the gradient, and one multiply-add of the many small products that fold slots and weights.
_SOFTMAX_COST, _SOFTMAX_COST_WITH_GRADIENT = 64, 128
_FOLDING_COST = 4
# What absorbing must at most cost of the other form to be chosen.
_WORTHWHILE = 0.9


def absorb_projections(model: PreTrainedModel) -> PreTrainedModel:
    """Let the layers of a Luna or ABC encoder with few slots project these instead of the tokens, in place.

    On a CPU with `sdpa` attention, in inference and training, wherever that takes fewer operations: up to about 50
    slots at width 768 (see `is_cheaper`). The numbers stay the same. Parameters and saved folders do not change.

    The layers then use weights without calling the modules that hold them, so hooks on the attention (`attention.self`)
    do not run. Projections with hooks, adapters or quantized weights, also if added later, keep the ordinary form.

    Args:
        model: an encoder, with or without a head.

    Returns:
        The model.

    Raises:
        ValueError: No layer of the model can do so.
    """
    if not any(isinstance(module, LunaAttention | AbcAttention) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no attention of a Luna or ABC encoder to transform.")
    for module in model.modules():
        module.__class__ = _ABSORBED.get(type(module), type(module))
    return model


def is_cheaper(
    tokens: int, slots: int, width: int, heads: int, matrices: int = 2, products: int = 2, training: bool = False
) -> bool:
    """Whether absorbing projections takes less time than applying them to the tokens.

    Multiply-adds per token, with n tokens, m slots, h heads and width d:

        applied     matrices * d^2 + 2 m d           projections, and two products of every head at its own size
        absorbed    products * h m d + 2 m d^2 / n   products of every head at full width, and folded weights

    A fused attention hides the softmax of the first form; the second stores its h m logits. Folding takes small
    products, each row's alone, which are slower. So few slots pay, h m well below d, from some hundred tokens.

    Args:
        tokens: n, the tokens of one row.
        slots, width, heads: m, d and h.
        matrices: number of projections of the tokens that are saved.
        products: number of products with all tokens that take their place.
        training: whether the module is in training mode. Re-entrant checkpointing first runs it without gradients, and
            must then choose as in the second run, which draws the same dropout.
    """
    applied = matrices * width**2 + 2 * slots * width
    folding = 2 * slots * width**2 / max(tokens, 1)
    softmax = _SOFTMAX_COST_WITH_GRADIENT if training or torch.is_grad_enabled() else _SOFTMAX_COST
    absorbed = products * heads * slots * (width + softmax) + _FOLDING_COST * folding
    return absorbed < _WORTHWHILE * applied


def may_absorb(attention: nn.Module, states: Tensor, *layers: nn.Module) -> bool:
    """Whether the weights of projections of (b, n, d) states can be used without calling these.

    Only on a CPU, where it was measured, with `sdpa`, outside of graphs, autocast and the transforms of `torch.func`,
    and for linear layers without adapters, quantized weights and hooks, by which PyTorch prunes and norms weights.
    """
    if is_tracing(states) or states.device.type != "cpu" or attention.config._attn_implementation != "sdpa":
        return False
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return False
    plain = all(type(layer) is nn.Linear and is_plain(layer) for layer in layers)
    return plain and all(type(layer.weight) in (Tensor, nn.Parameter) for layer in layers)


class AbsorbedBlock(AttentionBlock):
    """An `AttentionBlock` whose queries and output projection are applied to the slots where that is cheaper."""

    def attend(
        self, states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Like `AttentionBlock.attend`."""
        attention, output = self.self, self.output.dense
        # The tokens of an unpadded batch, whose context is another, are projected together.
        fits = isinstance(context, ForwardContext) and isinstance(attention, LunaAttention | AbcAttention)
        if not fits or context.whole or not may_absorb(attention, states, attention.query, output):
            return super().attend(states, slot_states, context)
        memory = attention.write_own(states, slot_states, context)
        (slots, *others), (_, length, width) = memory.parts, states.shape
        is_alone = not others and isinstance(slots, SlotMemory)
        sizes = length, slots.key.shape[2], width, attention.num_heads
        if not (is_alone and is_cheaper(*sizes, training=attention.training)):
            return output(attention.read(states, memory, context)[0]), memory.slot_states
        dropout = attention.attention_dropout if attention.training else 0.0
        sides = slots.key, slots.value, output, slots.mask(), dropout
        return absorbed_read(states, attention.query, *sides), memory.slot_states


class AbsorbedPackAttention(LunaPackAttention):
    """A `LunaPackAttention` that applies the projections of keys and values to the slots where that is cheaper."""

    def forward(self, packed_query: Tensor, states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """Like `LunaPackAttention.forward`."""
        layers = (self.key_value,) * 2 if self.config.tie_kv else (self.key, self.value)
        sizes = states.shape[1], packed_query.shape[1], states.shape[2], self.num_heads
        if not may_absorb(self, states, *layers) or not is_cheaper(*sizes, len(set(layers)), training=self.training):
            return super().forward(packed_query, states, context)
        query = project_heads(self.query, packed_query, self.num_heads)
        mask, dropout = context.masks.tokens, self.attention_dropout if self.training else 0.0
        return absorbed_pack(query, states, *layers, None if mask is None else mask.keep, dropout), None


class AbsorbedAbcAttention(AbcAttention):
    """An `AbcAttention` that writes states and projects the slots where that is cheaper."""

    def sources(self, states: Tensor, context: ForwardContext) -> Sources:
        """Like `AbcAttention.sources`."""
        sizes = states.shape[1], self.config.memory_size, states.shape[2], self.num_heads
        weighs = self.config.memory_control in ("mlp", "linformer") and context.projected is None
        weighs = weighs and may_absorb(self, states, self.key, self.value)
        if weighs and is_cheaper(*sizes, products=1, training=self.training):
            return (states[:, None],)
        return super().sources(states, context)

    def write_weighted(self, phi: Tensor, sources: Sources, tokens: Tensor | None = None) -> list[Tensor]:
        """Like `AbcAttention.write_weighted`."""
        if len(sources) == 2:
            return super().write_weighted(phi, sources, tokens)
        slots = product(phi.flatten(1, 2), sources[0].squeeze(1)).unflatten(1, (self.num_heads, -1))
        shares = phi.sum(-1) if tokens is None else sum_over(phi, tokens)
        return [project_slots(slots, shares, layer, self.num_heads) for layer in (self.key, self.value)]


_ABSORBED: dict[type[nn.Module], type[nn.Module]] = {
    AttentionBlock: AbsorbedBlock,
    LunaPackAttention: AbsorbedPackAttention,
    AbcAttention: AbsorbedAbcAttention,
}
