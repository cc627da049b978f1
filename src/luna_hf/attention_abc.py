"""ABC: attention with bounded-memory control (Peng et al., ACL 2022), in encoders.

Keys and values are written into a memory of m slots by a control strategy (`memory_control.py`); the queries read it
with multi-head softmax attention, through transformers' attention interface. Projections have RoBERTa's names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import is_tracing

from .attention_base import KeyMask, Linear, attend, attend_heads, product
from .configuration_abc import AbcConfig
from .functional import move_to_ranks, split_heads, write_to_slots
from .memory_control import (
    cluster_slots,
    compressive_slots,
    control_weights,
    first_places,
    from_windows,
    global_slots,
    interleave,
    random_slots,
    slot_counts,
    to_windows,
    undo_interleave,
    window_mask,
    window_weights,
)

# Heads whose windows are attended at a time in inference on a CPU: a window's keys and values are copies, which take
# twice the memory of the states, and stay in cache when they are few.
_WINDOW_HEADS = 2


class AbcMasks(NamedTuple):
    """What all layers know about the padding of a batch."""

    keep: Tensor | None  # (b, n) boolean, `None` where nothing is padded
    tokens: KeyMask | None  # of full attention: the same for the backend
    ranks: Tensor  # (b or 1, n) places among the real tokens of a row
    lengths: Tensor  # (b or 1, 1) real tokens of a row


class Memory(NamedTuple):
    """Written slots: keys and values (b, h, m, c), and which slots hold something (`None`: all)."""

    key: Tensor
    value: Tensor
    filled: Tensor | None  # (b, 1 or h, m) boolean


class AbcControl(nn.Module):
    """The learned part of a control: W of equation 7 (h * m, d), or Linformer's matrix (h * m, N)."""

    def __init__(self, config: AbcConfig) -> None:
        super().__init__()
        columns = {"mlp": config.hidden_size, "linformer": config.max_position_embeddings}[config.memory_control]
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads * config.memory_size, columns))

    def forward(self) -> Tensor:
        """The matrix, for the layers that share it."""
        return self.weight


def has_control(config: AbcConfig) -> bool:
    """Whether the strategy has parameters."""
    return config.memory_control in ("mlp", "linformer")


class AbcSelfAttention(nn.Module):
    """Write the memory, read the memory."""

    is_causal = False  # transformers' sdpa takes a missing attribute for True

    def __init__(self, config: AbcConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.layer_index = 0  # the model numbers its layers
        width = config.hidden_size
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.control = AbcControl(config) if has_control(config) and not config.share_control else None

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None, masks: AbcMasks, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One attention.

        Args:
            hidden_states: (b, n, d) token states, already normed in a pre-norm model.
            memory: the control's matrix if the layers share one, else `None`.
            masks: from `AbcModel.begin`.

        Returns:
            Output before its projection (b, n, d); `memory` as it was; and the weights (b, h, n, m) where the backend
            has them (eager): of windows over their tokens in order, of full attention (b, h, n, n).
        """
        query, key, value = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        control = self.config.memory_control
        if control == "full":
            output, weights = attend(self, query, key, value, masks.tokens, self.num_heads, **kwargs)
            return output, memory, weights
        query, key, value = (split_heads(states, self.num_heads) for states in (query, key, value))
        if control in ("sliding_window", "dilated"):
            output, weights = self.attend_window(query, key, value, masks, **kwargs)
            return output, memory, weights
        written = self.write(hidden_states, key, value, memory, masks)
        filled = None if written.filled is None else written.filled.unsqueeze(-2)  # (b, 1 or h, 1, m)
        output, weights = attend_heads(self, query, written.key, written.value, filled, **kwargs)
        return output, memory, weights

    def write(
        self, hidden_states: Tensor, key: Tensor, value: Tensor, memory: Tensor | None, masks: AbcMasks
    ) -> Memory:
        """The slots for states (b, n, d) with keys and values (b, h, n, c); `memory` and `masks` as in `forward`."""
        weight = self.control() if self.control is not None else memory
        return _WRITERS[self.config.memory_control](self, hidden_states, key, value, weight, masks)

    def write_mlp(self, hidden_states: Tensor, key: Tensor, value: Tensor, weight: Tensor, masks: AbcMasks) -> Memory:
        """Equation 7."""
        # Batched, so that the tokens come last and their softmax runs over neighbours in memory.
        expanded = weight.expand(hidden_states.shape[0], -1, -1)
        logits = product(expanded, hidden_states.transpose(1, 2)).unflatten(1, (self.num_heads, -1))  # (b, h, m, n)
        phi = control_weights(logits, masks.keep, self.config.control_activation)
        filled = (phi != 0).any(-1) if self.config.control_activation == "relu" else None
        return Memory(product(phi, key), product(phi, value), filled)

    def write_linformer(
        self, hidden_states: Tensor, key: Tensor, value: Tensor, weight: Tensor, masks: AbcMasks
    ) -> Memory:
        """Section 3.1: phi_i is the i-th column of the matrix, i being the token's place in its row."""
        # A selection and not a slice, whose layout depends on the length being N: one graph for all lengths.
        columns = torch.arange(key.shape[2], device=key.device)
        phi = weight.index_select(1, columns).unflatten(0, (self.num_heads, -1))  # (h, m, n)
        key, value = (move_to_ranks(states, masks.ranks, masks.keep) for states in (key, value))
        return Memory(product(phi, key), product(phi, value), None)

    def write_random(self, hidden_states: Tensor, key: Tensor, value: Tensor, weight: None, masks: AbcMasks) -> Memory:
        """Appendix A.2: a slot is the sum of its tokens."""
        seed = self.config.control_seed if self.config.share_control else self.config.control_seed + self.layer_index
        slots = random_slots(masks.ranks, self.config.memory_size, seed)
        return self.write_slots(key, value, slots[:, None], masks.keep)

    def write_cluster(self, hidden_states: Tensor, key: Tensor, value: Tensor, weight: None, masks: AbcMasks) -> Memory:
        """Equation 6: a slot is the centroid of its tokens."""
        config = self.config
        slots = cluster_slots(
            key, masks.ranks, masks.lengths, masks.keep, config.memory_size, config.cluster_iterations
        )
        return self.write_slots(key, value, slots, masks.keep, mean=True)

    def write_compressive(
        self, hidden_states: Tensor, key: Tensor, value: Tensor, weight: None, masks: AbcMasks
    ) -> Memory:
        """Equation 8: a slot is the mean of neighbours."""
        slots = compressive_slots(masks.ranks, masks.lengths, self.config.memory_size)
        return self.write_slots(key, value, slots[:, None], masks.keep, mean=True)

    def write_global(self, hidden_states: Tensor, key: Tensor, value: Tensor, weight: None, masks: AbcMasks) -> Memory:
        """Appendix A.1: a slot is a token."""
        slots, chosen = global_slots(masks.ranks, masks.lengths, self.config.memory_size)
        chosen = chosen if masks.keep is None else chosen & masks.keep
        return self.write_slots(key, value, slots[:, None], chosen)

    def write_slots(self, key: Tensor, value: Tensor, slots: Tensor, keep: Tensor | None, mean: bool = False) -> Memory:
        """Sums over the tokens of a slot, or their means."""
        num_slots = self.config.memory_size
        kept = None if keep is None else keep[:, None]
        counts = slot_counts(slots, num_slots, kept)  # (b, 1 or h, m)
        tokens = counts.clamp(min=1).unsqueeze(-1) if mean else 1
        # Half precision only at the end: there a sum stops growing, or is too large where the mean is not.
        precise = torch.promote_types(key.dtype, torch.float32)
        key, value = (
            (write_to_slots(states.to(precise), slots, num_slots, kept) / tokens).to(states.dtype)
            for states in (key, value)
        )
        return Memory(key, value, counts > 0)

    def attend_window(
        self, query: Tensor, key: Tensor, value: Tensor, masks: AbcMasks, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Sections 3.3 and A.4: attention to the neighbours; (b, n, d) and weights (b, h, n, m)."""
        # While training all at once, even without gradients: re-entrant checkpointing must draw the same dropout twice.
        whole = self.training or torch.is_grad_enabled()
        if whole or query.device.type != "cpu" or is_tracing(query):
            return self._attend_window(query, key, value, masks, **kwargs)
        parts = zip(*(states.split(_WINDOW_HEADS, dim=1) for states in (query, key, value)), strict=True)
        outputs, weights = zip(*(self._attend_window(*part, masks, **kwargs) for part in parts), strict=True)
        return torch.cat(outputs, dim=-1), None if weights[0] is None else torch.cat(weights, dim=1)

    def _attend_window(
        self, query: Tensor, key: Tensor, value: Tensor, masks: AbcMasks, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The same for a part of the heads, block by block."""
        length, window, keep = query.shape[2], self.config.memory_size, masks.keep
        states = [move_to_ranks(states, masks.ranks, keep).transpose(1, 2) for states in (query, key, value)]
        # Moved to the front, the real tokens are the first ones.
        real = None if keep is None else torch.arange(length, device=query.device) < masks.lengths
        dilated = self.config.memory_control == "dilated"
        if dilated:
            # A graph is the same for even and odd lengths, and has two places of either kind at least.
            extra = 2 * ((length + 3) // 2) - length if is_tracing(query) else length % 2
            if is_tracing(query) or extra:
                states = [nn.functional.pad(part, (0, 0, 0, 0, 0, extra)) for part in states]
                real = query.new_ones(1, length, dtype=torch.bool) if real is None else real
                real = nn.functional.pad(real, (0, extra), value=False)
            states = [interleave(part) for part in states]
            real = None if real is None else interleave(real)
        rows, places = states[0].shape[:2]
        if real is not None and real.shape[0] != rows:
            real = real.repeat(rows // real.shape[0], 1)
        mask = window_mask(real, places, window, query.device)
        mask = mask if real is not None else mask.repeat(rows, 1, 1, 1)
        blocks = to_windows(*(part.transpose(1, 2) for part in states), window)
        output, weights = attend_heads(self, *blocks, mask, **kwargs)  # (rows * blocks, m, d)
        output = from_windows(output, rows, places)
        weights = None if weights is None else window_weights(weights, rows, places, window).transpose(1, 2)
        if dilated:
            output = first_places(undo_interleave(output), length)
            weights = None if weights is None else first_places(undo_interleave(weights), length)
        if keep is not None:
            output = output.gather(1, masks.ranks.unsqueeze(-1).expand(output.shape))
            if weights is not None:
                weights = weights.gather(1, masks.ranks[..., None, None].expand(weights.shape))
        return output, None if weights is None else weights.transpose(1, 2)


_WRITERS: dict[str, Callable[..., Memory]] = {
    "mlp": AbcSelfAttention.write_mlp,
    "linformer": AbcSelfAttention.write_linformer,
    "random": AbcSelfAttention.write_random,
    "cluster": AbcSelfAttention.write_cluster,
    "compressive": AbcSelfAttention.write_compressive,
    "local_to_global": AbcSelfAttention.write_global,
}
