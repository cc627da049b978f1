"""Memory of a causal scan in a training step: states are kept between groups of chunks, and each group runs again."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.utils.generic import maybe_autocast

from .recompute import may_recompute

# A group of a scan has as many chunks as the root of their number divided by this. More chunks in a group mean fewer
# states to keep, but more to hold while a group is computed again.
_GROUPS = 8


Rows = Sequence[Tensor | None]  # (b, n, h, ...) each


def scan_in_chunks(
    step: Callable[..., tuple[list[Tensor], Any]], tokens: Rows, state: Any, sizes: list[int]
) -> tuple[list[Tensor], Any]:
    """Apply `step(chunk, state) -> (outputs, state)` to one chunk of the tokens after the other.

    For the backward pass only the states between groups of chunks are kept; each group is computed again.

    Args:
        step: reads and returns chunks (b h, n, ...) of tokens, and the state.
        tokens: (b, h, n, ...) each; `None` is passed on.
        state: before the first token: a tensor, or a tuple with `None` where there is none.
        sizes: of the chunks.

    Returns:
        The outputs (b, h, n, ...) for all tokens, and the state after the last.
    """
    # Tokens before heads, as in the outputs of projections and in their gradients.
    rows, heads = [None if part is None else part.transpose(1, 2) for part in tokens], tokens[0].shape[1]

    def apply(chunk: Rows, state: Any) -> tuple[list[Tensor], Any]:
        chunk = [None if part is None else part.transpose(1, 2).flatten(0, 1) for part in chunk]
        outputs, state = step(chunk, state)
        return [out.unflatten(0, (-1, heads)).transpose(1, 2) for out in outputs], state

    if not may_recompute(tokens[0]):
        chunks = []
        for chunk in _split(rows, sizes):
            outputs, state = apply(chunk, state)
            chunks.append(outputs)
        outputs = [torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]
    else:
        number = max(1, round(math.sqrt(len(sizes) / _GROUPS)))
        groups = [sizes[first : first + number] for first in range(0, len(sizes), number)]
        leaves, structure = tree_flatten(state)
        results = _ScanInGroups.apply(apply, groups, structure, len(rows), *rows, *leaves)
        first = len(results) - len(leaves)
        outputs, state = results[:first], tree_unflatten(results[first:], structure)
    return [out.transpose(1, 2) for out in outputs], state


def _split(rows: Rows, sizes: list[int]) -> list[tuple[Tensor | None, ...]]:
    """The rows of every chunk."""
    # Split once: the backward of `split` is one concatenation, that of each slice a full-length tensor.
    parts = ([None] * len(sizes) if row is None else row.split(sizes, dim=1) for row in rows)
    return list(zip(*parts, strict=True))


class _ScanInGroups(torch.autograd.Function):
    """`apply`, chunk by chunk, with outputs and the gradients of the tokens written in place."""

    @staticmethod
    def forward(
        ctx: Any, apply: Callable[..., Any], groups: list[list[int]], structure: TreeSpec, count: int, *inputs: Any
    ) -> tuple[Tensor | None, ...]:
        rows, leaves = inputs[:count], list(inputs[count:])
        ctx.scan_chunk, ctx.groups, ctx.structure, ctx.count, ctx.drawn = apply, groups, structure, count, []
        kept, results, first = list(inputs), None, 0
        for group in groups:
            kept += leaves if first else []
            ctx.drawn.append((torch.get_rng_state(), get_device_states(*inputs)))
            state = tree_unflatten(leaves, structure)
            for size in group:
                part, first = slice(first, first + size), first + size
                outputs, state = apply(_narrow(rows, part), state)
                if results is None:
                    results = [out.new_empty(out.shape[0], rows[0].shape[1], *out.shape[2:]) for out in outputs]
                for result, out in zip(results, outputs, strict=True):
                    result[:, part] = out
            leaves = tree_flatten(state)[0]
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        return *results, *leaves

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        rows, states = kept[: ctx.count], kept[ctx.count :]
        width = len(needed) - ctx.count  # number of leaves of a state
        given_rows, given_state = given[: len(given) - width], given[len(given) - width :]
        if torch.is_grad_enabled():  # a second derivative goes through the tokens themselves, not through copies
            sizes = [size for group in ctx.groups for size in group]
            pairs = _pairs(ctx, 0, _split(rows, sizes), states[:width], _split(given_rows, sizes), given_state)
            return (None,) * 4 + _gradients(pairs, kept[: len(needed)], needed, create_graph=True)
        found = [
            torch.empty(row.shape, dtype=row.dtype, device=row.device) if want else None
            for row, want in zip(rows, needed[: ctx.count], strict=True)
        ]
        end = rows[0].shape[1]
        for index in reversed(range(len(ctx.groups))):
            start, sizes = end - sum(ctx.groups[index]), ctx.groups[index]
            leaves = [
                None if leaf is None else leaf.detach().requires_grad_(index > 0 or want)
                for leaf, want in zip(states[index * width : (index + 1) * width], needed[ctx.count :], strict=True)
            ]
            chunks = [
                [
                    None if row is None else row.detach().requires_grad_(want)
                    for row, want in zip(chunk, needed[: ctx.count], strict=True)
                ]
                for chunk in _split(_narrow(rows, slice(start, end)), sizes)
            ]
            own = [*leaves, *(row for chunk in chunks for row in chunk)]
            with torch.enable_grad():
                given_chunks = _split(_narrow(given_rows, slice(start, end)), sizes)
                pairs = _pairs(ctx, index, chunks, leaves, given_chunks, given_state)
                gradients = _gradients(pairs, own, [tensor is not None and tensor.requires_grad for tensor in own])
            given_state, of_tokens, end = gradients[:width], iter(gradients[width:]), start
            for size in sizes:
                part, start = slice(start, start + size), start + size
                for whole in found:
                    gradient = next(of_tokens)
                    if whole is not None:
                        whole[:, part] = 0.0 if gradient is None else gradient
        return None, None, None, None, *found, *given_state


def _narrow(rows: Rows, part: slice) -> list[Tensor | None]:
    return [None if row is None else row[:, part] for row in rows]


def _pairs(
    ctx: Any, index: int, chunks: Sequence[Rows], leaves: Rows, given_chunks: Sequence[Rows], given_state: Rows
) -> list[tuple[Tensor, Tensor]]:
    """Scan chunks again, with the random numbers of the group `index`: the outputs that have gradients, with them."""
    cpu, (devices, states) = ctx.drawn[index]
    pairs, state = [], tree_unflatten(leaves, ctx.structure)
    with torch.random.fork_rng(devices), maybe_autocast(chunks[0][0].device.type, enabled=False):
        torch.set_rng_state(cpu)
        set_device_states(devices, states)
        for chunk, given in zip(chunks, given_chunks, strict=True):
            outputs, state = ctx.scan_chunk(chunk, state)
            pairs += zip(outputs, given, strict=True)
    pairs += zip(tree_flatten(state)[0], given_state, strict=True)
    return [(out, grad) for out, grad in pairs if grad is not None and out is not None and out.requires_grad]


def _gradients(
    pairs: list[tuple[Tensor, Tensor]], inputs: Rows, needed: Sequence[bool], create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs that need one."""
    wanted = [tensor for tensor, want in zip(inputs, needed, strict=True) if want]
    if not (pairs and wanted):
        return (None,) * len(needed)
    roots, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(roots, wanted, grads, allow_unused=True, create_graph=create_graph))
    return tuple(next(found) if want else None for want in needed)
