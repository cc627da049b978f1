"""What a training run can look at in an encoder's attention: its maps, and the slots of its memory.

It stands apart from the models, whose saved code needs none of it.
"""

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor, nn

from luna_hf.families.abc.attention import AbcAttention
from luna_hf.families.lavo.attention import LavoAttention
from luna_hf.families.leapformer.attention import LeapformerAttention
from luna_hf.families.luna.attention import LunaAttention
from luna_hf.layers.causal_attention import CausalAttention
from luna_hf.layers.memory_attention import FullAttention, MemoryAttention
from luna_hf.ops.context import ForwardContext
from luna_hf.ops.memories import Memories, WindowMemory
from luna_hf.ops.memory_control import control_weights


class AttentionMap(NamedTuple):
    """Attention weights."""

    weights: Tensor  # (b, h, q, k), summing to one over the keys in use
    queries: Tensor  # (b, q) boolean, True for queries that are not padding
    keys: Tensor  # (b, k), (b, 1 or h, k) or (b, h, q, k) boolean, True for keys in use


class Slots(NamedTuple):
    """States of slots."""

    states: Tensor  # (b, l, d), or per head (b, h, l, c)
    used: Tensor  # (b, l) or (b, h, l) boolean, True for slots that are not empty


Inspection = dict[str, AttentionMap | Slots]


def is_inspectable(module: nn.Module) -> bool:
    """Whether `inspect` takes a module: an encoder's attention."""
    return isinstance(module, MemoryAttention) and not isinstance(module, CausalAttention)


@singledispatch
def inspect(
    attention: MemoryAttention, states: Tensor, slot_states: Tensor | None, context: ForwardContext
) -> Inspection:
    """Return what can be inspected of an attention, by name.

    Args:
        attention: of an encoder, with eager attention.
        states, slot_states, context: the arguments of its `forward`.
    """
    memory = attention.write_own(states, slot_states, context)
    _, weights = attention.read(states, memory, context)
    return _of_parts(memory.parts, weights, _tokens(states, context))


def _tokens(states: Tensor, context: ForwardContext) -> Tensor:
    """Return the padding mask (b, n) of (b, n, d) states; all True if nothing is padded."""
    return torch.ones_like(states[..., 0], dtype=torch.bool) if context.keep is None else context.keep


def _of_parts(memories: Memories, weights: Tensor, tokens: Tensor) -> Inspection:
    """Return what is to be seen in each memory, given the weights (b, h, n, keys) of reading them together."""
    sizes = [memory.window if isinstance(memory, WindowMemory) else memory.key.shape[2] for memory in memories]
    found: Inspection = {}
    for memory, part in zip(memories, weights.split(sizes, -1), strict=True):
        total = part.sum(-1, keepdim=True)
        share = part / total.clamp(min=torch.finfo(part.dtype).tiny) if len(sizes) > 1 else part
        if isinstance(memory, WindowMemory):  # places beyond the text have no weight
            found["attention_entropy"] = AttentionMap(share, tokens, share > 0)
            continue
        filled, each = memory.filled_slots(), memory.key[..., 0]  # (b, h, m)
        used = torch.ones_like(each, dtype=torch.bool) if filled is None else filled.expand_as(each)
        found |= {"read_entropy": AttentionMap(share, tokens, used), "slot_similarity": Slots(memory.key, used)}
    return found


@inspect.register
def _(attention: FullAttention, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Inspection:
    found = inspect.dispatch(MemoryAttention)(attention, states, slot_states, context)
    return {"attention_entropy": found["read_entropy"]}


@inspect.register
def _(attention: LunaAttention, states: Tensor, slot_states: Tensor, context: ForwardContext) -> Inspection:
    queries = attention.packed_layer_norm(slot_states) if attention.config.norm_first else slot_states
    packed_context, pack_weights = attention.pack(queries, states, context)
    found = inspect.dispatch(MemoryAttention)(attention, states, slot_states, context)
    slots = context.slot_keep
    slots = torch.ones_like(packed_context[..., 0], dtype=torch.bool) if slots is None else slots
    found["pack_entropy"] = AttentionMap(pack_weights, slots, _tokens(states, context))
    if "read_entropy" in found:
        found["unpack_entropy"] = found.pop("read_entropy")._replace(keys=slots)
    return found | {"slot_similarity": Slots(packed_context, slots)}


@inspect.register
def _(attention: AbcAttention, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Inspection:
    found = inspect.dispatch(MemoryAttention)(attention, states, slot_states, context)
    control = attention.config.memory_control
    if control == "full":
        return {"attention_entropy": found["read_entropy"]}
    if control == "mlp":
        logits = attention.control_logits(states, attention.control_weight(slot_states))
        phi = control_weights(logits, context.keep, attention.config.control_activation)
        slots = found["slot_similarity"].used
        # Heads become batch rows, because each head fills different slots.
        tokens = _tokens(states, context).repeat_interleave(attention.num_heads, 0)
        found["write_entropy"] = AttentionMap(phi.flatten(0, 1).unsqueeze(1), slots.flatten(0, 1), tokens)
    return found


@inspect.register
def _(attention: LavoAttention, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Inspection:
    found: Inspection = {}
    for memory, _, weights in attention.attend(*attention.project(states), context):
        found |= _of_parts([memory], weights, _tokens(states, context))
    return found


@inspect.register
def _(
    attention: LeapformerAttention, states: Tensor, slot_states: Tensor | None, context: ForwardContext
) -> Inspection:
    if attention.config.reweighting == "rotary":  # whose weights are no distribution
        return {}
    tokens = _tokens(states, context)
    return {"attention_entropy": AttentionMap(attention.weights(states, context), tokens, tokens)}
