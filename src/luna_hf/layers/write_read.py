"""Attention in two steps, called by hand: write a context to a memory once, then read it with any queries."""

from torch import Tensor

from ..ops.attention import float32_products
from ..ops.context import make_context, make_encoder_context
from .memory_attention import Memory, MemoryAttention


def write_memory(
    attention: MemoryAttention,
    states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    slot_states: Tensor | None = None,
    slot_mask: Tensor | None = None,
) -> Memory:
    """Write a context once, for any number of reads with `read_memory`.

    Writing takes time linear in the length of the context. The memory does not grow with it: a read costs the same
    after 500 tokens as after 50,000 (except with ABC's `full` and its windows, which keep every token).

    Args:
        attention: attention module of an encoder layer, such as `model.encoder.layer[0].attention.self`.
        states: (b, n, d) the context, already normed in a pre-norm model.
        attention_mask: (b, n) padding mask, 1 for tokens and 0 for padding; no padding by default.
        slot_states: the layer's other input: Luna's packed states (b, l, d), or the control matrix shared by the
            layers of an ABC model (`model.control()`).
        slot_mask: (b, l), 1 for the packed states in use; by default derived from the config and the padding mask.

    Raises:
        ValueError: The family needs `slot_states`, but it is `None`.
    """
    keep, slot_keep = (None if mask is None else mask != 0 for mask in (attention_mask, slot_mask))
    slots_alone, mixes = {"local_window": 0}, attention.has_slots
    context = make_encoder_context(attention.config, states, keep, slots_alone, mixes=mixes)
    context = context._replace(slot_keep=slot_keep)
    with float32_products(states):
        return attention.write(states, slot_states, attention.prepare(attention.config, states, slot_states, context))


def read_memory(
    attention: MemoryAttention, hidden_states: Tensor, memory: Memory, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read a context written with `write_memory`, as in cross-attention.

    Args:
        attention: the module that wrote the memory.
        hidden_states: (b, n, d) queries, of any length.
        memory: the result of `write_memory`.
        attention_mask: (b, n) padding mask of the queries, of use only where a read depends on their positions (in
            LeaPformer's `cosine` and `rotary`); no padding by default.

    Returns:
        The concatenated heads (b, n, d), before the output projection (`layer.attention.output.dense`), and with eager
        attention the weights (b, h, n, slots); `None` for LeaPformer.

    Raises:
        ValueError: The memory is a window, which can be read only by the tokens it was written from.
    """
    keep = None if attention_mask is None else attention_mask != 0
    context = make_context(keep, hidden_states.shape[1], hidden_states.device)
    with float32_products(hidden_states):
        return attention.read(hidden_states, memory, context)
