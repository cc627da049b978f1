"""The causal running sum of outer products, in chunks: time and memory linear in n.

Shape letters: b batch, h heads, n tokens, p and r sizes of the factors. `keep` masks are boolean with True = keep.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing
from transformers.utils.generic import maybe_autocast

from .dispatch import choose
from .recompute import may_recompute, save_inputs
from .tokens import first_places

# Chunk size of the causal scan: at this size products within a chunk cost about as much as those with the state.
SCAN_CHUNK = 64

# Where chunks are computed again in the backward pass, a group of them has as many as the root of their number divided
# by this. More chunks in a group mean fewer states to keep, but more to hold while a group is computed again.
_GROUPS = 8


def causal_scan(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    state: Tensor | None = None,
    keep: Tensor | None = None,
    chunk_size: int = SCAN_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute the causal running sum `out_t = x_t (state + sum_{j<=t} y_j^T z_j)`, in time and memory linear in n.

    This is the operator behind linear attention, Luna's causal average (section 3.3) and the causal memory of ABC. It
    runs in float32 or wider whatever the input dtypes, because half-precision sums stop growing.

    The factors x and y are (b, h, n, p), z is (b, h, n, r), the state (b, h, p, r). Padding, masked by `keep` (b, n),
    adds nothing, but still reads the sum. No result depends on `chunk_size`. Returns the outputs (b, h, n, r) in `x`'s
    dtype, and the state after the last token.
    """
    if keep is not None:
        padding = ~keep[:, None, :, None]
        y, z = y.masked_fill(padding, 0.0), z.masked_fill(padding, 0.0)
    precise = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state = x.new_zeros(*x.shape[:2], x.shape[-1], z.shape[-1], dtype=precise)
    with maybe_autocast(x.device.type, enabled=False):
        if x.shape[2] == 1:
            out, state = scan_token(*(states.to(precise) for states in (x, y, z)), state)
        else:
            short = not is_tracing(x) and x.shape[2] <= chunk_size
            out, state = _SCANS["loop" if short else choose("causal_scan", x)](x, y, z, state, chunk_size)
    return out.to(x.dtype), state


def scan_token(x: Tensor, y: Tensor, z: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan a single token (b, h, 1, ...), which reads the state after it."""
    after = torch.addcmul(state, y.mT, z)
    return torch.matmul(x, after), after


def _scan_in_a_loop(x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    scan = _Scan.apply if may_recompute(x) else _scan_chunks
    return scan(x, y, z, state, chunk_size, False)


class _Scan(torch.autograd.Function):
    """`_scan_chunks`, which keeps its inputs only: its gradients are scans as well, two of them from the end."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int, backwards: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y, z, state)
        ctx.chunk_size, ctx.backwards = chunk_size, backwards
        return _scan_chunks(x, y, z, state, chunk_size, backwards)

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor, state_grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, y, z, state), size, backwards = ctx.saved_tensors, ctx.chunk_size, ctx.backwards
        needs_x, needs_y, needs_z, needs_state = ctx.needs_input_grad[:4]
        grads: list[Tensor | None] = [None] * 6
        with maybe_autocast(x.device.type, enabled=False):
            if needs_x:
                grads[0] = _Scan.apply(out_grad, z, y, state.mT, size, backwards)[0].to(x.dtype)
            if needs_y:
                grads[1] = _Scan.apply(z, out_grad, x, state_grad.mT, size, not backwards)[0].to(y.dtype)
            if needs_z or needs_state:
                grads[2], grads[3] = _Scan.apply(y, x, out_grad, state_grad, size, not backwards)
                grads[2] = grads[2].to(z.dtype)
        return tuple(grads)


def _scan_chunks(
    x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Scan one chunk after the other, or from the last token to the first."""
    # Tokens before heads, as in the outputs of projections and in their gradients.
    chunks = zip(*(states.transpose(1, 2).split(chunk_size, dim=1) for states in (x, y, z)), strict=True)
    sums, outputs, order = state.flatten(0, 1), [], -1 if backwards else 1
    for chunk in list(chunks)[::order]:
        own = (states.transpose(1, 2).flatten(0, 1).to(state.dtype) for states in chunk)
        out, sums = scan_chunk(*own, sums, backwards)
        outputs.append(out.unflatten(0, (-1, x.shape[1])).transpose(1, 2))
    return torch.cat(outputs[::order], dim=1).transpose(1, 2), sums.view_as(state)


def scan_chunk(x: Tensor, y: Tensor, z: Tensor, state: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Scan one chunk (b h, n, p), (b h, n, p), (b h, n, r), given the state (b h, p, r) before it."""
    after = torch.baddbmm(state, y.transpose(1, 2), z)
    within = torch.bmm(x, y.transpose(1, 2))
    within = within.triu_() if backwards else within.tril_()
    return torch.baddbmm(torch.bmm(within, z), x, state), after


def _scan_at_once(x: Tensor, y: Tensor, z: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    length = x.shape[2]
    x, y, z = (to_chunks(states.to(state.dtype), chunk_size) for states in (x, y, z))  # (b, h, chunks, chunk_size, ...)
    sums = torch.cat([state.unsqueeze(2), torch.matmul(y.transpose(-1, -2), z)], dim=2).cumsum(2)
    within = torch.matmul(x, y.transpose(-1, -2)).tril()
    out = torch.matmul(within, z) + torch.matmul(x, sums[:, :, :-1])
    return first_places(out.flatten(2, 3), length, dim=2), sums[:, :, -1]


_SCANS = {"loop": _scan_in_a_loop, "at_once": _scan_at_once}


def to_chunks(states: Tensor, chunk_size: int, fill: float = 0.0) -> Tensor:
    """Split (b, h, n, c) into chunks (b, h, chunks, chunk_size, c), padded at the end."""
    # In a graph at least two chunks, because it would be recompiled for a single one.
    chunks = (states.shape[2] + (2 if is_tracing(states) else 1) * chunk_size - 1) // chunk_size
    padded = F.pad(states, (0, 0, 0, chunks * chunk_size - states.shape[2]), value=fill)
    return padded.unflatten(2, (chunks, chunk_size))


Rows = Sequence[Tensor | None]  # (b, h, n, ...) each


def scan_in_chunks(
    step: Callable[..., tuple[list[Tensor], Any]], tokens: Rows, state: Any, sizes: list[int]
) -> tuple[list[Tensor], Any]:
    """Apply `step(chunk, state) -> (outputs, state)` to one chunk of the tokens after the other.

    For the backward pass only the states between groups of chunks are kept; each group is computed again.

    Args:
        step: reads and returns chunks (b h, n, ...) of tokens, and the state. It must not hold tensors of all tokens.
        tokens: (b, h, n, ...) each; `None` is passed on.
        state: before the first token: a tensor, or a tuple with `None` where there is none.
        sizes: of the chunks.

    Returns:
        The outputs (b, h, n, ...) for all tokens, and the state after the last.
    """
    heads = tokens[0].shape[1]
    # Tokens before heads, as in the outputs of projections. Split once: the backward of `split` is one concatenation,
    # that of each slice a full-length tensor.
    parts = ([None] * len(sizes) if row is None else row.transpose(1, 2).split(sizes, dim=1) for row in tokens)
    chunks = list(zip(*parts, strict=True))

    def scan_group(group: Sequence[Rows], state: Any) -> tuple[list[list[Tensor]], Any]:
        results = []
        for chunk in group:
            chunk = [None if part is None else part.transpose(1, 2).flatten(0, 1) for part in chunk]
            outputs, state = step(chunk, state)
            results.append([out.unflatten(0, (-1, heads)).transpose(1, 2) for out in outputs])
        return results, state

    if may_recompute(tokens[0]):
        results, number = [], max(1, round(math.sqrt(len(sizes) / _GROUPS)))
        for first in range(0, len(sizes), number):
            outputs, state = save_inputs(scan_group, chunks[first : first + number], state)
            results += outputs
    else:
        results, state = scan_group(chunks, state)
    return [torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*results, strict=True)], state
