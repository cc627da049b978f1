"""The causal memory of logits (the normaliser "softmax") for graphs: no control flow depends on data or length.

Token j enters what token t reads with weight exp(s_j - z_t), where z is the logarithm of the running sum. Split at
positions between the two, it is a product of factors of at most 1, whose underflow is harmless. This is how the
second half of each block of 16, 32 and 64 tokens reads the first, and how each block of 64 reads all earlier ones;
blocks of 8 are computed directly.

Shape letters as in `causal_memory.py`.
"""

import torch
from torch import Tensor

from .causal_slots import CausalMemory, SlotOptions, SlotTokens, read_weights
from .scan import to_chunks
from .tokens import first_places

# Block size at the leaves of a tree, its levels above them, and its number of tokens. The table over pairs of trees has
# fewer entries than the leaves up to a length of 8 * 64 * 64.
_LEAF, _LEVELS = 8, 3

_TREE = _LEAF << _LEVELS


def attend_in_a_tree(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Write (b, h, n, ...) tokens to the memory and read it: outputs, read weights and the state after them."""
    length, precise = tokens.query.shape[2], memory.key.dtype
    query, key, value, weights = (
        to_chunks(states.to(precise), _TREE, fill).flatten(2, 3)
        for states, fill in zip(tokens[:4], (0.0, 0.0, 0.0, -torch.inf), strict=True)
    )
    bias, beside = (
        None if part is None else to_chunks(part, _TREE).flatten(2, 3) for part in (tokens.bias, tokens.beside)
    )
    query = query * query.shape[-1] ** -0.5
    # Differences of large logarithms need float64, which MPS lacks.
    weights = weights.to(torch.float32 if query.device.type == "mps" else torch.float64)
    before = memory.peak + memory.total.clamp(min=torch.finfo(precise).tiny).to(weights.dtype).log()
    log_totals = torch.cat([before, weights], dim=2).logcumsumexp(2)
    blocks, log_totals = [_Trees(weights, log_totals, precise)], log_totals[:, :, 1:]
    blocks += [_Block(weights, log_totals, _LEAF << level, precise) for level in range(_LEVELS)]
    since = (memory.peak - log_totals).to(precise).exp()
    leaves = _Leaves(weights, log_totals, precise)

    logits = torch.matmul(query, memory.key) * since + leaves.sum_slots(query, key)
    for block in blocks:
        logits = logits + block.sum_slots(query, key)
    read, of_slots = read_weights(logits, None, options.slots, bias, beside, options.dropout)
    out = torch.matmul(of_slots * since, memory.value) + leaves.sum_tokens(of_slots, value)
    for block in blocks:
        out = out + block.sum_tokens(of_slots, value)

    peak = torch.maximum(memory.peak, weights.detach().amax(2, keepdim=True).to(precise))
    growth, written = (memory.peak - peak).exp(), (weights - peak).to(precise).exp()
    memory = CausalMemory(
        key=memory.key * growth + torch.matmul(key.transpose(-1, -2), written),
        value=memory.value * growth.transpose(-1, -2) + torch.matmul(written.transpose(-1, -2), value),
        total=memory.total * growth + written.sum(2, keepdim=True),
        peak=peak,
    )
    return first_places(out, length, dim=2), first_places(read, length, dim=2), memory


class _Leaves:
    """The leaves of the tree: all weights exp(s_j - z_t), j <= t, of each small block, (b, h, blocks, t, j, m)."""

    def __init__(self, logits: Tensor, log_totals: Tensor, precise: torch.dtype) -> None:
        logits, log_totals = self.cut(logits), self.cut(log_totals)
        later = torch.ones(_LEAF, _LEAF, dtype=torch.bool, device=logits.device).triu(1).unsqueeze(-1)
        difference = (logits.unsqueeze(-3) - log_totals.unsqueeze(-2)).to(precise)
        self.weights = difference.masked_fill(later, -torch.inf).exp()

    @staticmethod
    def cut(states: Tensor) -> Tensor:
        return states.unflatten(2, (-1, _LEAF))

    def sum_slots(self, query: Tensor, key: Tensor) -> Tensor:
        """Compute sum_j (q_t k_j) exp(s_j - z_t): (b, h, n, m)."""
        products = torch.matmul(self.cut(query), self.cut(key).transpose(-1, -2))
        return (products.unsqueeze(-1) * self.weights).sum(-2).flatten(2, 3)

    def sum_tokens(self, read: Tensor, value: Tensor) -> Tensor:
        """Compute sum_j (p_t exp(s_j - z_t)) v_j: (b, h, n, c)."""
        products = (self.cut(read).unsqueeze(-2) * self.weights).sum(-1)
        return torch.matmul(products, self.cut(value)).flatten(2, 3)


class _Block:
    """One level of the tree: in every block of 2 * `size` tokens, the second half reads the first."""

    def __init__(self, logits: Tensor, log_totals: Tensor, size: int, precise: torch.dtype) -> None:
        self.size = size
        middle = self.halves(log_totals)[0][..., -1:, :].detach()  # cancels in the product of `writes` and `reads`
        self.writes = (self.halves(logits)[0] - middle).to(precise).exp()
        self.reads = (middle - self.halves(log_totals)[1]).to(precise).exp()

    def halves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split (b, h, n, ...) into the first and second halves, (b, h, blocks, size, ...) each."""
        return states.unflatten(2, (-1, 2, self.size)).unbind(3)

    def join(self, second: Tensor) -> Tensor:
        """Place second halves (b, h, blocks, size, ...) in (b, h, n, ...), with zeros in the first halves."""
        return torch.stack([torch.zeros_like(second), second], dim=3).flatten(2, 4)

    def sum_slots(self, query: Tensor, key: Tensor) -> Tensor:
        """Like `_Leaves.sum_slots`, for this level."""
        state = torch.matmul(self.halves(key)[0].transpose(-1, -2), self.writes)
        return self.join(torch.matmul(self.halves(query)[1], state) * self.reads)

    def sum_tokens(self, read: Tensor, value: Tensor) -> Tensor:
        """Like `_Leaves.sum_tokens`, for this level."""
        state = torch.matmul(self.writes.transpose(-1, -2), self.halves(value)[0])
        return self.join(torch.matmul(self.halves(read)[1] * self.reads, state))


class _Trees:
    """Above the levels: every block of `_TREE` tokens reads all earlier ones."""

    def __init__(self, logits: Tensor, log_totals: Tensor, precise: torch.dtype) -> None:
        ends = log_totals[:, :, ::_TREE].detach()  # (b, h, 1 + blocks, m); cancels like a block's middle
        first, last = ends[:, :, :-1], ends[:, :, 1:]
        earlier = torch.ones(first.shape[2], first.shape[2], dtype=torch.bool, device=ends.device).tril(-1)
        between = (last.unsqueeze(2) - first.unsqueeze(3)).to(precise).masked_fill(~earlier.unsqueeze(-1), -torch.inf)
        self.between = between.exp()  # (b, h, reading block, written block, m)
        self.writes = (self.cut(logits) - last.unsqueeze(3)).to(precise).exp()
        self.reads = (first.unsqueeze(3) - self.cut(log_totals[:, :, 1:])).to(precise).exp()

    @staticmethod
    def cut(states: Tensor) -> Tensor:
        return states.unflatten(2, (-1, _TREE))

    def sum_slots(self, query: Tensor, key: Tensor) -> Tensor:
        """Like `_Leaves.sum_slots`, for earlier blocks."""
        states = torch.matmul(self.cut(key).transpose(-1, -2), self.writes)
        states = torch.einsum("bhrwm,bhwcm->bhrcm", self.between, states)
        return (torch.matmul(self.cut(query), states) * self.reads).flatten(2, 3)

    def sum_tokens(self, read: Tensor, value: Tensor) -> Tensor:
        """Like `_Leaves.sum_tokens`, for earlier blocks."""
        states = torch.matmul(self.writes.transpose(-1, -2), self.cut(value))
        states = torch.einsum("bhrwm,bhwmc->bhrmc", self.between, states)
        return torch.matmul(self.cut(read) * self.reads, states).flatten(2, 3)
