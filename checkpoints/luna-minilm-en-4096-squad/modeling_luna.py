# luna_hf 0.2.0. SPDX-License-Identifier: Apache-2.0
# Joined from the package's modules by `save_pretrained`; changes belong there.

"""Luna models (Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021, arXiv 2106.01540).

Through every layer of an encoder pass the tokens X and a packed sequence P of fixed length. This file
has the embedding of P, the base models and the heads; the attention is in `attention.py`.

In an encoder-decoder (section 3.4) the packed states of the source are the queries with which the decoder's causal
attention packs the target, and with which its cross-attention packs the source again; this updates them for the next
layer. They do not depend on the target.
"""

import contextlib
import copy
import difflib
import inspect
import json
import math
import os
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import fields
from functools import reduce
from typing import Any
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors import safe_open
from torch import Tensor
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_outputs import MultipleChoiceModelOutput
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import CONFIG_NAME
from transformers.utils import TransformersKwargs
from transformers.utils import cached_file
from transformers.utils import find_adapter_config_file
from transformers.utils import is_peft_available
from transformers.utils import is_torchdynamo_exporting
from transformers.utils import is_tracing
from transformers.utils import logging
from transformers.utils import output_capturing
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder
from transformers.utils.output_capturing import capture_outputs

from .configuration_luna import BoundedMemoryConfig
from .configuration_luna import LunaConfig
from .configuration_luna import is_ours
from .configuration_luna import saved_file


# ---- ops/dispatch.py ----
#
# Chooses between implementations of an operation by device and mode, and the precision of matrix products.
#
# An operation with several implementations looks up its choice here. A new implementation, such as a kernel, is a new
# name in a row of `IMPLEMENTATIONS`.


# Implementation of each operation: "graph" while tracing or in a transform of `torch.func`, otherwise "cpu", or "cpu
# inference" in eval mode without gradients; re-entrant checkpointing, which must draw the same dropout twice, also runs
# without gradients, but in training mode. Everything else takes "default".
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    # On a CPU, chunks processed in turn stay in cache; graphs and accelerators avoid a loop over the length.
    "causal_scan": {"cpu": "loop", "default": "at_once"},
    "causal_memory": {"cpu": "loop", "default": "at_once"},
    # The loop inspects the data for rising maxima, which would break a graph.
    "causal_softmax_memory": {"graph": "tree", "default": "loop"},
    # Blocks copy the keys and values of their windows; a few blocks at a time, the copies fit in a CPU's cache.
    "window_blocks": {"cpu inference": "parts", "default": "whole"},
    # Features of linear attention, and each token's memory in causal LAVO, are several tensors as large as the queries
    # or larger; those of some hundred tokens fit in a CPU's cache.
    "token_parts": {"cpu inference": "parts", "default": "whole"},
    "nearest_centroid": {"cpu": "parts", "default": "whole"},
}


def choose(operation: str, states: Tensor, training: bool = True) -> str:
    """Return the name of an operation's implementation.

    Args:
        operation: a key of `IMPLEMENTATIONS`.
        states: an input, for its device.
        training: whether the calling module is in training mode.
    """
    row = IMPLEMENTATIONS[operation]
    if is_tracing(states) or torch._C._are_functorch_transforms_active():  # `vmap` reads no data and writes no `out`
        return row.get("graph", row["default"])
    if states.device.type != "cpu":
        return row["default"]
    if not training and not torch.is_grad_enabled() and "cpu inference" in row:
        return row["cpu inference"]
    return row.get("cpu", row["default"])


def _slow_cpu_dtypes() -> frozenset[torch.dtype]:
    """Half-precision dtypes that this CPU lacks matrix instructions for, which PyTorch then emulates."""
    support = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, query in support.items() if not getattr(torch.ops.mkldnn, query)())


SLOW_CPU_DTYPES = _slow_cpu_dtypes() if torch.backends.mkldnn.is_available() else frozenset()


def multiplies_in_float32(left: Tensor, right: Tensor) -> bool:
    """Whether a product is faster in float32, because this CPU would emulate the tensors' half-precision dtype."""
    return left.device.type == "cpu" and left.dtype == right.dtype and left.dtype in SLOW_CPU_DTYPES


def prefers_products(query: Tensor) -> bool:
    """Whether eager attention is faster than PyTorch's fused one, as on CPUs with bfloat16 matrix instructions."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.dtype not in SLOW_CPU_DTYPES


# ---- ops/attention.py ----
#
# What attention is made of: heads, softmax, the backends' padding masks, and products that are fast in half
# precision on every CPU.


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """Split (b, n, d) states into heads (b, h, n, c), c = d / h, as a view."""
    # Not `unflatten`: the older ONNX exporter would fix the length to that of the example input.
    return states.view(*states.shape[:-1], num_heads, states.shape[-1] // num_heads).transpose(1, 2)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `softmax(scaling q k^T) v` over the kept keys; a query with no key to attend to gives zeros.

    Queries (b, h, q, c) read keys and values (b, h, k, c) under a mask, boolean or added to the logits, that broadcasts
    to (b, h, q, k). Returns the output (b, h, q, c), and the weights (b, h, q, k) after dropout.
    """
    logits = torch.matmul(query * scaling, key.transpose(-1, -2))
    if keep is None:
        weights = masked_softmax(logits, None)
    elif keep.dtype == torch.bool:
        weights = masked_softmax(logits, keep)
    else:
        weights = masked_softmax(logits + keep, None)
    weights = F.dropout(weights, dropout) if dropout else weights
    return torch.matmul(weights, value), weights


def masked_softmax(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Softmax over the kept entries of the last dimension, in float32 or wider; zeros if nothing is kept."""
    # PyTorch accumulates a half-precision softmax in float32; an explicit cast would only store the logits twice.
    if keep is None:
        return logits.softmax(-1).to(logits.dtype)  # under autocast, softmax returns float32
    # The lowest finite number instead of -inf, which would make a fully masked row NaN, gradient included.
    lowest = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~keep, lowest).softmax(-1)
    return weights.masked_fill(~keep, 0.0).to(logits.dtype)


def count_bias(counts: Tensor, scale: Tensor) -> Tensor:
    """Compute `scale * log(max(counts, 1))`: the bias of slots that stand for counts (b, 1 or h, ..., m) of tokens.

    A slot that stands for less than a token, as most do where a text is shorter than the memory, weighs as much as one:
    otherwise the tokens of a window would outweigh what only the slots hold. Each head has its scale, (h,).
    """
    return log_counts(counts.to(torch.promote_types(scale.dtype, torch.float32)).clamp(min=1.0), scale)


def log_counts(counts: Tensor, scale: Tensor) -> Tensor:
    """Compute `scale * log(counts)` of positive counts (b, 1 or h, ...), with the scale (h,) of each head."""
    return (counts.log() * scale.view(-1, *(1 for _ in counts.shape[2:]))).to(scale.dtype)


# Block size of flex attention along the keys.
_FLEX_BLOCK = 128


class _LinearInFloat32(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and multiplies_in_float32(*args[:2]):
            states, *parameters = args
            parameters = (None if tensor is None else tensor.float() for tensor in parameters)
            return F.linear(states.float(), *parameters).to(states.dtype)
        return function(*args, **(kwargs or {}))


def float32_products(states: Tensor) -> AbstractContextManager:
    """Let linear layers compute in float32 where the CPU would have to emulate the dtype of `states`; for `with`.

    On CPUs without instructions for it (AVX2 and bfloat16, for example), PyTorch's emulation reaches only a few per
    cent of float32 throughput, while the conversion is cheap and loses no precision. A mode and not a subclass of
    `nn.Linear`, because quantization replaces modules by their exact type, and adapters wrap them.
    """
    # Not in graphs, which should be the same on whatever machine they are made.
    is_slow = states.dtype in SLOW_CPU_DTYPES and states.device.type == "cpu" and not is_tracing(states)
    return _LinearInFloat32() if is_slow else nullcontext()


def linear(layer: nn.Module, states: Tensor) -> Tensor:
    """Apply a linear layer to (..., in_features), see `float32_products`."""
    with float32_products(states):
        return layer(states)


class UnpaddedKeys(NamedTuple):
    """Positions of the kept keys, for variable-length kernels."""

    indices: Tensor  # (kept,) positions in the flattened (batch * keys)
    cu_seq_lens: Tensor  # (batch + 1,) int32, cumulative numbers of keys
    max_length: int


class KeyMask(NamedTuple):
    """A padding mask over keys in the form the attention backend expects; built once per forward pass."""

    keep: Tensor  # (batch, keys) boolean, True = may be attended to
    backend: Any  # eager, sdpa: (batch, 1, 1, keys) boolean, broadcast over heads and queries; others: native form
    unpadded: UnpaddedKeys | None = None  # flash attention only
    extra_keys: int = 0  # flex attention only: number of masked keys to append

    def for_queries(self, count: int) -> Any:
        """Return the backend's mask for `count` queries, rebuilt if it was made for another number."""
        if isinstance(self.backend, Tensor):
            made_for = self.backend.shape[2]
            return self.backend if made_for in (1, count) else self.backend[:, :, :1].expand(-1, -1, count, -1)
        if self.backend is None or self.backend.seq_lengths[0] == count:
            return self.backend
        return _flex_mask(self.keep, count)


def uses_flash(config: PreTrainedConfig) -> bool:
    """Whether the configured backend is a flash-attention kernel (installed, or loaded from the Hub)."""
    return "flash" in (config._attn_implementation or "")


def make_key_mask(
    config: PreTrainedConfig, keep: Tensor | None, queries: Tensor | None = None, keys: Tensor | None = None
) -> KeyMask | None:
    """Convert a boolean mask over keys to the form of the configured attention backend.

    Args:
        config: the model's configuration, for its `_attn_implementation`.
        keep: (b, k) boolean, or `None` if every key may be attended to.
        queries, keys: (b, q, d) and (b, k, d) states. Only their lengths and dtype are used, and only by backends other
            than eager, sdpa and flash attention.
    """
    if config._attn_implementation == "flex_attention":
        return flex_key_mask(keep, queries, keys)
    if keep is None:
        return None
    if uses_flash(config):
        lengths = keep.sum(-1, dtype=torch.int32)
        cumulated = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        indices = keep.flatten().nonzero().squeeze(-1)
        return KeyMask(keep, None, unpadded=UnpaddedKeys(indices, cumulated, int(lengths.max())))
    if config._attn_implementation in ("eager", "sdpa", None):
        # Left to broadcast: expanding the mask over the queries would cost up to a fifth of the attention's time.
        return KeyMask(keep, keep[:, None, None, :])
    mask = create_bidirectional_mask(
        config,
        inputs_embeds=queries,
        attention_mask=keep,
        encoder_hidden_states=keys,
        allow_is_bidirectional_skip=False,
    )
    return KeyMask(keep, mask)


def flex_key_mask(keep: Tensor | None, queries: Tensor, keys: Tensor) -> KeyMask | None:
    """Like `make_key_mask`, for flex attention."""
    # PyTorch's CPU kernel silently returns wrong results unless the number of keys is a multiple of the block size.
    extra = -keys.shape[1] % _FLEX_BLOCK
    if keep is None and not extra:
        return None
    if keep is None:
        keep = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    keep = F.pad(keep, (0, extra), value=False)
    return KeyMask(keep, _flex_mask(keep, queries.shape[1]), extra_keys=extra)


def _flex_mask(keep: Tensor, num_queries: int) -> Any:
    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return keep[b, k]

    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = keep.shape
    return create_block_mask(attends, batch, None, num_queries, length, device=keep.device)


# ---- ops/tokens.py ----
#
# Small operations on tokens and slots; `keep` masks are boolean with True = keep.


class _JoinGradients(torch.autograd.Function):
    generate_vmap_rule = True  # with `setup_context`, what torch.func asks for

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # Autograd passes zeros, not None, as the gradient of an unused output.
        return grads


def join_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, linked in autograd: a loss on one gives a zero gradient to all others.

    Distributed training stops where a parameter has no gradient at all.
    """
    return _JoinGradients.apply(*tensors)


def first_places(states: Tensor, length: int, dim: int = 1) -> Tensor:
    """Copy the first `length` positions of (b, n, ...); a slice's layout would depend on whether it drops any."""
    return states.index_select(dim, torch.arange(length, device=states.device))


def window_reach(window: int, causal: bool = False) -> tuple[int, int]:
    """Return how many tokens before and after a token its window, which includes the token, reaches."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def move_to_ranks(states: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Move each row's real tokens to the front of (b, h, n, c), in order, with zeros behind them."""
    if keep is None:
        return states
    # Padding, as zeros, to the places behind them: the older ONNX exporter loses states that share a place.
    behind = keep.sum(-1, keepdim=True) + (~keep).long().cumsum(-1) - 1
    return write_to_slots(states, torch.where(keep, ranks, behind)[:, None], states.shape[2], keep[:, None])


def write_to_slots(states: Tensor, slots: Tensor, num_slots: int, keep: Tensor | None = None) -> Tensor:
    """Add each kept state (b, h, n, c) to its slot: `sum_i e_{slot(i)} (x) s_i`, (b, h, m, c).

    Slots and the mask `keep` are broadcastable to (b, h, n); masked tokens write nothing.
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    batch, heads, length, size = states.shape
    # One `index_add` of whole rows to a (b * h * m, c) table is many times faster on CPU than adding single entries.
    # Tokens come before heads, as in the projections' output, so that flattening them is a view.
    first = num_slots * torch.arange(batch * heads, device=slots.device).view(batch, 1, heads)
    rows = slots.transpose(1, 2).expand(batch, length, heads) + first
    added = states.transpose(1, 2).flatten(0, 2)
    if torch.onnx.is_in_onnx_export():  # ONNX Runtime cannot add float16
        added = added.to(torch.promote_types(added.dtype, torch.float32))
    memory = added.new_zeros(batch * heads * num_slots, size).index_add(0, rows.flatten(), added)
    return memory.view(batch, heads, num_slots, size).to(states.dtype)


def first_kept(states: Tensor, keep: Tensor | None) -> Tensor:
    """State of each row's first real token (`<s>`, even if left-padded), or zeros: (b, n, d) to (b, d)."""
    if keep is None:
        return states[:, 0]
    index = keep.int().argmax(-1)  # (b,), the first True
    found = states[torch.arange(states.shape[0], device=states.device), index]
    # Padding's state is zero, but not its gradient, which every norm of a zero state enlarges.
    return found.masked_fill(~keep.any(-1, keepdim=True), 0.0)


def masked_mean(states: Tensor, keep: Tensor | None) -> Tensor:
    """Mean over the kept entries, or zeros if nothing is kept: (b, n, d) to (b, d)."""
    if keep is None:
        return states.mean(1)
    total = states.masked_fill(~keep.unsqueeze(-1), 0.0).sum(1)
    return total / keep.sum(-1, keepdim=True).clamp(min=1)


# ---- ops/exact_tokens.py ----
#
# Tokens that a query reads exactly although its window does not hold them: marked by the caller, or selected.
#
# *Marked* tokens are the same for all heads (Longformer's global attention; the local-to-global control of ABC,
# appendix A.1, with tokens that the caller chooses). *Selected* tokens are those that the attention of a few spaced
# queries asks for, in each layer and head. A softmax reads each token once: in the window, or as one of these; slots
# stand for the tokens that a query reads nowhere else.
#
# Shape letters: b batch, h heads, n tokens, g exact tokens, r spaced queries, c head size. Every mask is boolean with
# True = keep. `ranks` are indices among the real tokens of a row.


class ExactTokens(NamedTuple):
    """Some tokens of each row, at most g: where they are."""

    places: Tensor  # (b, 1 or h, g) long
    valid: Tensor  # (b, 1 or h, g) boolean, False where a row has fewer
    mask: Tensor  # (b, 1 or h, n) boolean, True for these tokens


def first_tokens(scores: Tensor, number: int, limits: Tensor | None = None) -> ExactTokens:
    """Choose the tokens with the highest scores (b, 1 or h, n), the first ones among equals; minus infinity for none.

    Chosen are at most `number`, g, or what `limits` (b or 1, 1) say for each row. A graph always has g places, other
    calls as many as there are tokens.
    """
    length = scores.shape[-1]
    if is_tracing(scores):
        scores = F.pad(scores, (0, number), value=-torch.inf)
    # A stable sort, because `topk` leaves open which of equal scores it takes. ONNX knows no other.
    order = {} if torch.onnx.is_in_onnx_export() else {"stable": True}
    best, places = scores.sort(dim=-1, descending=True, **order)
    valid = best[..., :number] > -torch.inf
    if limits is not None:
        valid = valid & (torch.arange(valid.shape[-1], device=scores.device) < limits.unsqueeze(1))
    places = torch.where(valid, places[..., :number], 0)
    chosen = torch.zeros_like(scores[..., :length], dtype=torch.long).scatter_add(-1, places, valid.long())
    return ExactTokens(places, valid, chosen > 0)


def marked_tokens(marked: Tensor, most: int) -> ExactTokens:
    """Find the marked tokens of every row.

    Args:
        marked: (b, n) boolean.
        most: number of marked tokens of a row, at most. A graph, which cannot count them, leaves out further ones.

    Raises:
        ValueError: A row has more.
    """
    number = most
    if not is_tracing(marked):
        number = int(marked.sum(-1).max())
        if number > most:
            raise ValueError(
                f"`global_attention_mask` marks {number} tokens of a row, but `max_global_tokens` is {most}: mark "
                "fewer, or set the config's field higher."
            )
    scores = torch.zeros(marked.shape, device=marked.device).masked_fill(~marked, -torch.inf)
    return first_tokens(scores.unsqueeze(1), number)


def spaced_places(ranks: Tensor, lengths: Tensor, keep: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """Find evenly spaced tokens of every row: those of rank floor(k n / r), k = 0 ... r - 1, with r = `number`.

    Ranks, lengths and mask are those of a `ForwardContext`. Returns ranks and places, (b or 1, r).
    """
    spaced = torch.arange(number, device=ranks.device) * lengths // number
    if keep is None:
        return spaced, spaced
    found = (ranks.unsqueeze(1) == spaced.unsqueeze(2)) & keep.unsqueeze(1)
    return spaced, found.long().argmax(-1)


@torch.no_grad()
def attention_asked(
    query: Tensor,
    key: Tensor,
    query_ranks: Tensor,
    ranks: Tensor,
    keep: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Average the attention that some queries (b, h, r, c) pay to each key (b, h, n, c) outside their own windows.

    Ranks (b or 1, r) and (b or 1, n), padding mask (b, n); a window of 0 tokens is none. Returns (b, h, n) float32, of
    a softmax over all tokens of the row.
    """
    logits = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))
    weights = masked_softmax(logits, None if keep is None else keep[:, None, None])
    if window:
        before, after = window_reach(window)
        distance = ranks.unsqueeze(1) - query_ranks.unsqueeze(2)
        outside = (distance < -before) | (distance > after)
        weights = weights * outside.unsqueeze(1).to(weights.dtype)
    return weights.mean(2).float()


def gather_tokens(states: Tensor, places: Tensor) -> Tensor:
    """Take tokens of every head: (b, h, n, c) at (b, 1 or h, g) to (b, h, g, c)."""
    batch, heads, length, size = states.shape
    # Whole rows of a (b * n * h, c) table, which projections lay out in this order.
    row, head = (torch.arange(count, device=states.device) for count in (batch, heads))
    rows = (row.view(-1, 1, 1) * length + places) * heads + head.view(1, -1, 1)
    table = states.transpose(1, 2).flatten(0, 2)
    return table.index_select(0, rows.flatten()).view(batch, heads, -1, size)


def put_tokens(states: Tensor, tokens: Tensor, chosen: ExactTokens) -> Tensor:
    """Replace the chosen tokens' states (b, n, ...) by others (b, g, ...); the choice is the same for all heads."""
    mask = chosen.mask[:, 0]
    batch, number = tokens.shape[:2]
    # The chosen tokens are in the order of the row.
    index = (mask.long().cumsum(-1) - 1).clamp(min=0) + number * torch.arange(batch, device=mask.device)[:, None]
    spread = tokens.flatten(0, 1).index_select(0, index.flatten()).view(*mask.shape, *tokens.shape[2:])
    return torch.where(mask.view(*mask.shape, *(1 for _ in tokens.shape[2:])), spread, states)


def in_order(mask: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Order a mask (b, 1 or h, n) as the real tokens of each row, with False behind them."""
    if keep is None:
        return mask
    return move_to_ranks(mask.unsqueeze(-1).float(), ranks, keep).squeeze(-1) > 0


def tokens_outside(left: Tensor | None, lengths: Tensor, length: int, window: int) -> Tensor:
    """Count the tokens that each query reads nowhere else: those left over that its window does not hold.

    Left over are tokens (b, 1 or h, n) that are read in no part but the window, in order (`in_order`); `None` for all.
    Rows have lengths (b or 1, 1), at most n = `length`. Returns (b or 1, 1 or h, n) float32 for the query of each rank,
    or (b or 1, 1 or h, 1) without a window.
    """
    if not window:
        total = lengths.unsqueeze(1) if left is None else left.sum(-1, keepdim=True)
        return total.float()
    first, end = window_edges(lengths, length, window)
    if left is None:
        return (lengths - (end - first)).clamp(min=0).unsqueeze(1).float()
    sums = F.pad(left.long().cumsum(-1), (1, 0))
    return (sums[..., -1:] - _at(sums, end) + _at(sums, first)).float()


def _at(sums: Tensor, places: Tensor) -> Tensor:
    """Look up (b, 1 or h, n) at (b or 1, p), the same for all heads: (b, 1 or h, p)."""
    if places.shape[0] == 1:
        return sums.index_select(-1, places[0])
    return sums.gather(-1, places.unsqueeze(1).expand(-1, sums.shape[1], -1))


def window_edges(lengths: Tensor, length: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the rank of the first token in the window of each rank, and of the first one behind it, (b or 1, n)."""
    before, after = window_reach(window)
    rank = torch.arange(length, device=lengths.device)
    end = torch.minimum(rank + after + 1, lengths)
    return torch.minimum((rank - before).clamp(min=0), end), end


# ---- ops/context.py ----
#
# The data that all layers of a forward pass share, built once by the model and passed as one argument.


class ForwardContext(NamedTuple):
    """Padding mask, token counts, cache and options of a forward pass, the same in every layer.

    A named tuple, because accelerate, FSDP and torch.compile traverse tuples. Every mask is boolean with True = keep.
    """

    keep: Tensor | None  # (b, n) padding mask; `None` if nothing is padded
    ranks: Tensor  # (b or 1, n) long: index of a token among its row's real tokens, counting earlier passes
    before: Tensor  # (b or 1, 1) long: number of real tokens of the row in earlier passes
    lengths: Tensor  # (b or 1, 1) long: number of real tokens of the row, including this pass
    rotation: Tensor | None = None  # (b or 1, n, 2, r / 2) of rotary positions, which rotate r entries of a head
    cache: Cache | None = None  # decoders only: a `state.MemoryCache`
    slot_keep: Tensor | None = None  # (b, l) mask of the slot states
    masks: Any = None  # the family's masks, in the attention backend's form
    window: int = 0  # number of tokens that a token reads besides the slots
    whole: bool = False  # encoders: whether every token reads every token, so that no slot is needed
    token_mask: KeyMask | None = None  # of all tokens, in the backend's form, where some or all of them are read
    marked: ExactTokens | None = None  # tokens that the caller marks
    selected: int = 0  # number of places for the tokens that each head selects
    written: Tensor | None = None  # (b, 1 or h, n) tokens that the slots are written from; `None` for all
    left: Tensor | None = None  # (b, 1 or h, n) the same tokens in order, if counted; `None` for all
    outside: Tensor | None = None  # (b or 1, 1 or h, 1 or n) how many of them the query of each rank reads in slots
    projected: tuple[Tensor, Tensor] | None = None  # the tokens' keys and values (b, h, n, c), if already computed
    updates_slots: bool = True  # whether something reads the slot states after the last layer
    slots: bool = True  # whether the slots are read
    options: dict[str, Any] = {}  # keyword arguments for the attention backend
    readers: Tensor | None = None  # (b, q) places of the tokens that write nothing, but whose outputs are of use
    source: Any = None  # cross-attention only: the `ForwardContext` of the source, while it is written

    def slot_tokens(self) -> Tensor | None:
        """Return the mask (b, 1 or h, n) of the tokens to write to the slots; `None` for all."""
        if self.written is None or self.keep is None:
            return self.written if self.keep is None else self.keep[:, None]
        return self.written & self.keep[:, None]

    def split(self, length: int, size: int) -> list[tuple[slice, "ForwardContext"]]:
        """Split the tokens into parts of at most `size`: where each is, and its context, without the family's masks."""
        parts = [slice(first, first + size) for first in range(0, length, size)]
        own = {name: getattr(self, name) for name in ("keep", "ranks", "rotation")}
        own = {name: tensor for name, tensor in own.items() if tensor is not None}
        return [
            (part, self._replace(masks=None, **{name: tensor[:, part] for name, tensor in own.items()}))
            for part in parts
        ]


def token_ranks(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Index of each token among its row's real tokens, (b, n) long; (1, n) if nothing is padded.

    Padding takes the rank of the real token to its left, or 0 if there is none.
    """
    if keep is None:
        return torch.arange(length, device=device)[None]
    return (keep.long().cumsum(-1) - 1).clamp(min=0)


def row_lengths(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Number of real tokens of each row, (b, 1) long; (1, 1) if nothing is padded."""
    if keep is None:
        return torch.full((1, 1), length, dtype=torch.long, device=device)
    return keep.sum(-1, keepdim=True)


def make_context(
    keep: Tensor | None,
    length: int,
    device: torch.device,
    cache: Cache | None = None,
    options: dict[str, Any] | None = None,
    window: int = 0,
) -> ForwardContext:
    """Build the context of a pass over (b, n) tokens from its padding mask and the cache.

    Args:
        keep: (b, n) padding mask, or `None` if nothing is padded.
        length: n.
        device: device of the tokens.
        cache: state of earlier passes; read, but not changed.
        options: keyword arguments of `forward`: what to read, see `ForwardContext`, and for the attention backend.
        window: the local window, if the options have none.
    """
    options = dict(options or {})
    given, slots = options.pop("local_window", None), options.pop("read_slots", None)
    reads = {"window": window if given is None else given, "slots": slots is not False}
    seen = None if cache is None else cache.tokens
    if seen is None:
        ranks, lengths = token_ranks(keep, length, device), row_lengths(keep, length, device)
        before = torch.zeros(1, 1, dtype=torch.long, device=device)
    else:
        before = seen.to(device).unsqueeze(1)
        # Left padding gets the rank of the last token of an earlier pass, or 0 without one.
        places = torch.arange(1, length + 1, device=device) if keep is None else keep.long().cumsum(-1)
        ranks, lengths = (places + before - 1).clamp(min=0), places[..., -1:] + before
    return ForwardContext(keep, ranks, before, lengths, cache=cache, options=options, **reads)


def whole_length(config: PreTrainedConfig, window: int) -> int:
    """Return the length up to which every token of a text reads every token in windows of this size, or 0."""
    if not window or config.slot_counts != "outside" or not config.reads_exact_tokens:
        return 0
    # The first token's window reaches to the last token; that of the last one reaches as far back.
    return max(window_reach(window)[1] + 1, config.num_selected_tokens, config.softmax_length)


def selected_places(config: PreTrainedConfig, lengths: Tensor) -> int:
    """Return how many tokens a head selects from rows of these lengths (b or 1, 1), at most."""
    number, all_of = config.num_selected_tokens, config.softmax_length
    is_unknown = is_tracing(lengths) or lengths.is_meta
    has_short = all_of > number and (is_unknown or int(lengths.min()) <= all_of)
    return all_of if has_short else number


def make_encoder_context(
    config: PreTrainedConfig,
    states: Tensor,
    keep: Tensor | None,
    options: dict[str, Any] | None = None,
    marked: Tensor | None = None,
    mixes: bool = True,
) -> ForwardContext:
    """Build the context of an encoder's pass over (b, n, d) states.

    Args:
        config: the model's configuration.
        states: input of the first layer.
        keep: (b, n) padding mask, or `None` if nothing is padded.
        options: see `make_context`; and `most_marked`, the largest number of marked tokens in a row, if known.
        marked: (b, n) boolean, the tokens that the caller marks.
        mixes: whether the attention reads its slots in one softmax with a window.

    Raises:
        ValueError: There are more marked tokens than `config.max_global_tokens`.
    """
    length, device, options = states.shape[1], states.device, dict(options or {})
    most = options.pop("most_marked", None) or config.max_global_tokens
    context = make_context(keep, length, device, options=options, window=config.local_window)
    if not (mixes and (config.local_window or marked is not None)):
        return context
    counts_outside, left = config.slot_counts == "outside", None
    if not is_tracing(states):
        context = context._replace(whole=length <= whole_length(config, context.window))
    if config.num_selected_tokens and not context.whole:
        context = context._replace(selected=selected_places(config, context.lengths))
    if marked is not None and not context.whole:
        marked = marked if keep is None else marked & keep
        chosen = marked_tokens(marked, most)
        if chosen.places.shape[-1]:
            left = in_order(~chosen.mask if keep is None else ~chosen.mask & keep[:, None], context.ranks, keep)
            context = context._replace(marked=chosen, written=~chosen.mask)
    if context.whole or context.marked is not None:
        context = context._replace(token_mask=make_key_mask(config, keep, queries=states, keys=states))
    if counts_outside and not context.whole:
        context = context._replace(left=left, outside=tokens_outside(left, context.lengths, length, context.window))
    return context


def drop_if_full(keep: Tensor) -> Tensor | None:
    """Return `None` for a mask that keeps everything; while tracing, where the data is unknown, return it unchanged."""
    if is_tracing(keep) or keep.device.type == "meta" or not keep.all():
        return keep
    return None


# ---- ops/convolution.py ----
#
# Depthwise convolutions along the tokens.


def depthwise_convolution(states: Tensor, weight: Tensor, keep: Tensor | None = None) -> Tensor:
    """Convolve (b, n, d) states along the tokens; tokens beyond the ends and padding (`keep`, (b, n)) count as zero.

    The weight (d, taps) has an odd number of taps; tap `taps // 2` is at the token itself.
    """
    if keep is not None:
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
    return _convolve(states, weight, padding=weight.shape[-1] // 2)


def _convolve(states: Tensor, weight: Tensor, padding: int = 0) -> Tensor:
    if is_tracing(states):  # Inductor lays a convolution out for one length, and would compile every other again
        states = F.pad(states, (0, 0, padding, padding))
        length, taps = states.shape[1] - weight.shape[-1] + 1, weight.unbind(-1)
        return sum(states[:, start : start + length] * tap for start, tap in enumerate(taps))
    # As the input of a conv2d, (b, d, 1, n) is a channels-last view: 3 to 5 times faster than conv1d on CPU.
    image, filters = states.transpose(1, 2).unsqueeze(2), weight[:, None, None, :]
    out = F.conv2d(image, filters, padding=(0, padding), groups=weight.shape[0])
    return out.squeeze(2).transpose(1, 2)


# ---- ops/recompute.py ----
#
# Memory of a training step: what is cheap to compute again is not kept for the backward pass.
#
# Every tensor that an operation's gradient needs stays in memory until the backward pass. `save_inputs` keeps the
# inputs of a function instead. The numbers stay the same, dropout included; the function runs again in the backward
# pass, up to the last tensor that a gradient needs, so that a linear layer at its end is not applied again.
#
# By then, modules may have other parameters (`torch.func.functional_call`), adapters, hooks or another mode. So these
# functions do not call modules, but what `snapshot` makes of them.


# Number of entries from which a tensor is worth the bookkeeping, some hundred microseconds.
LEAST_ENTRIES = 2**18


# Where hooks come from that take states of any shape, such as those that gather sharded weights.
_HARMLESS = ("transformers.utils.output_capturing", "transformers.modeling_utils", "torch.", "deepspeed.")


def may_recompute(states: Tensor, *modules: nn.Module) -> bool:
    """Whether to compute what follows from `states`, by these modules, again in the backward pass.

    Not in graphs, whose compiler decides by itself; not in transforms of `torch.func`, which know no saved tensors; and
    not where hooks would see the second computation.
    """
    # In this order: comparing the size would specialise a graph to it.
    if not torch.is_grad_enabled() or is_tracing(states) or torch._C._are_functorch_transforms_active():
        return False
    if states.numel() < LEAST_ENTRIES:
        return False
    return not any(_is_hooked(part) for module in modules for part in module.modules())


def _is_hooked(module: nn.Module) -> bool:
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or hooks_of_all._has_any_global_hook() or "forward" in vars(module)


class Snapshot:
    """A layer with the parameters and the mode that it has now, whatever becomes of the module."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Any) -> None:
        self.function, self.parameters = function, parameters
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        tensors = (given for given in self.parameters if isinstance(given, Tensor))
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def __call__(self, states: Tensor) -> Tensor:
        """Apply the layer.

        Raises:
            RuntimeError: A parameter has been changed in place since.
        """
        if self._versions() != self.versions:
            raise RuntimeError(
                "A parameter that is needed for the gradient has been modified in place: run the backward pass before "
                "the optimizer's step."
            )
        return self.function(states, *self.parameters)


def is_plain(module: nn.Module) -> bool:
    """Whether nothing but parameters and mode decides what a layer computes: neither adapters nor hooks."""
    if _is_hooked(module):
        return False
    return type(module) in (nn.Linear, nn.LayerNorm, nn.Dropout) or not [*module.parameters(), *module.buffers()]


def snapshot(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a linear layer, norm, dropout or module without parameters as it is now; `None` for others.

    Others are adapters and quantised layers, and modules with hooks.
    """
    if not is_plain(module):
        return None
    if type(module) is nn.Linear:
        return Snapshot(F.linear, module.weight, module.bias)
    if type(module) is nn.LayerNorm:
        return Snapshot(F.layer_norm, module.normalized_shape, module.weight, module.bias, module.eps)
    if type(module) is nn.Dropout:
        return Snapshot(F.dropout, module.p, module.training)
    return module


def is_watched(*modules: nn.Module) -> bool:
    """Whether hooks read or change what these modules get, and may count its rows, as PEFT's and NEFTune's do.

    Not those by which transformers records outputs and asks for gradients of the embedding, nor those of PyTorch and
    accelerate.
    """
    if hooks_of_all._has_any_global_hook():
        return True
    hooks = []
    for module in modules:
        for part in module.modules():
            if "forward" in vars(part) and not hasattr(part, "_hf_hook"):
                return True
            for found in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
                hooks.extend(found.values())
    return not all((getattr(hook, "__module__", None) or "").startswith(_HARMLESS) for hook in hooks)


def save_inputs(function: Callable[..., Any], *inputs: Any, module: nn.Module | None = None) -> Any:
    """Compute `function(*inputs)`, and keep only the inputs for the backward pass.

    Args:
        function: must not use parameters but those in `inputs` or a `snapshot`, nor hold tensors of the tokens itself:
            with gradient checkpointing, these would stay in memory.
        inputs: tensors, tuples of them, or anything else.
        module: one whose `training` the function reads.
    """
    leaves, structure = tree_flatten(inputs)
    training = module is not None and module.training

    def apply(*leaves: Any) -> Any:
        with float32_products(leaves[0]), _in_mode(module, training):  # which may be others in the backward pass
            return function(*tree_unflatten(leaves, structure))

    return checkpoint(apply, *leaves, use_reentrant=False)


@contextmanager
def _in_mode(module: nn.Module | None, training: bool) -> Iterator[None]:
    if module is None or module.training == training:
        yield
        return
    module.training = training
    try:
        yield
    finally:
        module.training = not training


# ---- ops/unpadding.py ----
#
# Variable-length texts without padding between them.
#
# An *unpadded batch* holds the tokens of all texts one after the other, (1, t, d): linear layers, norms and
# feed-forward networks run on it as they are. What mixes the tokens of a text, attention and convolutions, needs rows:
# the texts are sorted by length into a few *buckets*, rows (b, n, d) that are padded to the longest of their bucket. As
# a bucket is an ordinary padded batch, no text can reach another, and every mechanism works as it does there.
#
# Shape letters: t tokens of an unpadded batch, p places of all buckets, b texts of a bucket, n places of a text, l
# slot states.


# Keywords of a forward pass that say where texts begin, as flash attention's and Mamba's kernels call them.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


# What another bucket costs, by device type: as much as this many tokens of any width, and this many multiply-adds.
_BUCKET_COST = {"cpu": (24, 6e5)}


_BUCKET_COST_DEFAULT = (0, 2.4e9)


# Number of different lengths, at most, at which buckets may end.
_MOST_ENDS = 64


class Bucket(NamedTuple):
    """Texts of like lengths, as the rows of a padded batch."""

    rows: int  # b
    length: int  # n, the length of the longest
    keep: Tensor | None  # (b, n) padding mask; `None` if all have the same length


class UnpaddedBatch(NamedTuple):
    """Where the tokens of a batch are: in the input, without padding, and in the buckets."""

    shape: tuple[int, int]  # of the input
    tokens: Tensor | None  # (t,) places of the tokens in the flattened input; `None` for all in order
    positions: Tensor  # (1, t) index of each token in its text
    lengths: Tensor  # (texts, 1) numbers of tokens, in the order of the input
    longest: int  # length to which padding would extend every text
    buckets: tuple[Bucket, ...]
    gather: Tensor  # (p,) token of each place; padding repeats the last token of its text
    scatter: Tensor  # (t,) place of each token
    by_input: Tensor  # (texts,) for the texts in the order of the input, their numbers by length
    cost: float  # of its computation, in tokens

    def select(self, inputs: Tensor | None) -> Tensor | None:
        """Take the tokens from an input (1 or b, n, ...): (1, t, ...)."""
        if inputs is None or (self.tokens is None and inputs.shape[:2] == self.shape):
            return inputs if inputs is None else inputs.reshape(1, -1, *inputs.shape[2:])
        flat = inputs.expand(*self.shape, *inputs.shape[2:]).flatten(0, 1)
        return (flat if self.tokens is None else flat.index_select(0, self.tokens)).unsqueeze(0)

    def in_buckets(self, states: Tensor) -> list[Tensor]:
        """Split what belongs to the tokens, (t, ...), into the rows of every bucket; padding holds a token's."""
        places, parts, first = states.index_select(0, self.gather), [], 0
        for rows, length, _ in self.buckets:
            parts.append(places[first : first + rows * length].view(rows, length, *states.shape[1:]))
            first += rows * length
        return parts

    def restore(self, states: Tensor) -> Tensor:
        """Put states (1, t, d) back to the places of the input, with zeros at padding."""
        if self.tokens is None:
            return states.view(*self.shape, -1)
        flat = states.new_zeros(self.shape[0] * self.shape[1], states.shape[-1])
        return flat.index_copy(0, self.tokens, states.squeeze(0)).view(*self.shape, -1)


class UnpaddedContext(NamedTuple):
    """The counterpart of `ForwardContext` for an unpadded batch: a context for every bucket."""

    batch: UnpaddedBatch
    contexts: tuple[ForwardContext, ...]
    slots: tuple[int, ...] | None  # number of slot states (l) for each text of a bucket; `None` if texts share them
    lengths: Tensor  # (texts, 1) number of tokens

    def split(self, states: Tensor, slot_states: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """Split tokens (1, t, d) and slot states (texts, l, d), by length, into the rows of every bucket."""
        owned, first = [], 0
        for number, bucket in enumerate(self.batch.buckets):
            own = slot_states
            if self.slots is not None and slot_states is not None:
                own = slot_states[first : first + bucket.rows, : self.slots[number]]
            owned.append(own)
            first += bucket.rows
        return [*zip(self.batch.in_buckets(states.squeeze(0)), owned, strict=True)]

    def in_rows(
        self, function: Callable[..., tuple[Tensor, ...]], states: Tensor, slot_states: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply what needs whole texts, a function of (b, n, d) states, slot states and a context, bucket by bucket."""
        outputs, after = [], []
        for rows, context in zip(self.split(states, slot_states), self.contexts, strict=True):
            output, own = function(*rows, context)[:2]
            outputs.append(output.flatten(0, 1))
            if self.slots is not None and own is not None:
                own = F.pad(own, (0, 0, 0, slot_states.shape[1] - own.shape[1]))
            after.append(own)
        states = torch.cat(outputs).index_select(0, self.batch.scatter).unsqueeze(0)
        return states, after[0] if self.slots is None or after[0] is None else torch.cat(after)

    def restore(self, states: Tensor, slot_states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the states in the shape of the input, and the slot states with its texts in order."""
        if self.slots is not None and slot_states is not None:
            slot_states = slot_states.index_select(0, self.batch.by_input)
        return self.batch.restore(states), slot_states


def is_readable(tensor: Tensor | None) -> bool:
    """Whether the entries of a tensor can be read: not while tracing, and not on the meta device."""
    return tensor is None or not (is_tracing(tensor) or tensor.is_meta)


def find_starts(
    shape: tuple[int, int], keep: Tensor | None, position_ids: Tensor | None, boundaries: dict[str, Tensor | None]
) -> Tensor | None:
    """Find the first token of every text of a (b, n) input, if a row holds several: (b, n) boolean, or `None`.

    Texts begin where `cu_seq_lens_q` or `seq_idx` of the `boundaries` say, the keywords of `BOUNDARIES`; without them,
    where `position_ids` (1 or b, n) return to the row's first.

    Raises:
        ValueError: The boundaries do not match the input, or all positions are equal.
    """
    cumulated, of_keys, numbers = given = [boundaries.get(name) for name in BOUNDARIES]
    if not all(map(is_readable, given)):
        raise ValueError("A compiled or traced model reads one text per row: pad the texts (DataCollatorWithPadding).")
    marked = {}
    if cumulated is not None or of_keys is not None:
        marked["cu_seq_lens_q"] = _starts_from_lengths(shape, cumulated, of_keys)
    if numbers is not None:
        if numbers.shape != shape:
            raise ValueError(f"`seq_idx` must have shape {tuple(shape)}, but has shape {tuple(numbers.shape)}.")
        marked["seq_idx"] = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
    if position_ids is not None and shape[1] > 1 and is_readable(position_ids) and is_readable(keep):
        marked["position_ids"] = _starts_from_positions(shape, keep, position_ids)
    if not marked:
        return None
    (name, starts), *others = marked.items()
    for other, found in others:
        found = found.to(starts.device)
        if (found & ~starts).any() or (other == "seq_idx" and not torch.equal(found, starts)):
            raise ValueError(f"`{other}` restart within a text of `{name}`: let both mark the same texts, or give one.")
    return starts if starts[:, 1:].any() else None


def _starts_from_lengths(shape: tuple[int, int], cumulated: Tensor | None, of_keys: Tensor | None) -> Tensor:
    if cumulated is None or not (of_keys is None or torch.equal(cumulated, of_keys)):
        raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` must be equal: give the boundaries of the texts in both.")
    total = shape[0] * shape[1]
    ends = cumulated.tolist()
    if cumulated.dim() != 1 or not ends or (ends[0], ends[-1]) != (0, total) or (cumulated.diff() < 1).any():
        raise ValueError(f"`cu_seq_lens_q` must rise from 0 to the number of tokens, {total}, but is {ends}.")
    starts = torch.zeros(total, dtype=torch.bool, device=cumulated.device)
    starts[cumulated[:-1].long()] = True
    starts = starts.view(shape)
    if not starts[:, 0].all():
        raise ValueError(f"`cu_seq_lens_q` must hold the end of every row of {shape[1]} tokens, but is {ends}.")
    return starts


def _starts_from_positions(shape: tuple[int, int], keep: Tensor | None, position_ids: Tensor) -> Tensor:
    positions = position_ids.expand(shape)
    keep = torch.ones_like(positions, dtype=torch.bool) if keep is None else keep
    begins = positions.gather(1, keep.long().argmax(1, keepdim=True))  # (b, 1) of the first tokens
    counts = (positions[:, :-1] == begins) & (positions[:, 1:] == begins + 1) & ~keep[:, :-1] & ~keep[:, 1:]
    if (counts & (keep.flip(1).cumsum(1).flip(1)[:, 1:] > 0)).any():
        raise ValueError(
            "`position_ids` count a text of padding alone, which they cannot mark, as padding may have any position. "
            "Give `cu_seq_lens_q` and `cu_seq_lens_k`, or `seq_idx`."
        )
    # Real tokens only, one after the other.
    rows, columns = keep.nonzero(as_tuple=True)
    real, of_row = positions[keep], torch.ones_like(rows, dtype=torch.bool)
    of_row[1:] = rows[1:] != rows[:-1]
    first = begins[rows, 0]
    pairs = ~of_row[1:]
    if pairs.any() and (real[1:] == real[:-1])[pairs].all():
        raise ValueError(
            "All `position_ids` are equal, as of texts of one token each. Leave them out, or if these are "
            "texts, give `cu_seq_lens_q` and `cu_seq_lens_k`, or `seq_idx`."
        )
    starts = torch.zeros_like(keep)
    starts[rows[1:], columns[1:]] = (real[1:] <= real[:-1]) & (real[1:] == first[1:]) & pairs
    starts[:, 0] = True
    return starts


def bucket_cost(device: torch.device, width: int) -> float:
    """What another bucket costs, in tokens, for a model of this width."""
    tokens, products = _BUCKET_COST.get(device.type, _BUCKET_COST_DEFAULT)
    return tokens + products / width**2


def plan_buckets(lengths: Sequence[int], cost: float) -> list[int]:
    """Divide texts, given ascending lengths, such that all buckets have the fewest places, each counted `cost` more.

    Returns the number of texts in each bucket.
    """
    total = len(lengths)
    if not total:
        return []
    # The last text of each length; of many lengths, some of them.
    lasts = [i for i in range(1, total + 1) if i == total or lengths[i] > lengths[i - 1]]
    ends = lasts[:: -(-len(lasts) // _MOST_ENDS)]
    ends = ends if ends[-1] == total else [*ends, total]
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the texts up to each end: the cost, and which end is before
    starts = [0, *ends]
    for end in ends:
        length, least = lengths[end - 1], (float("inf"), 0)
        for number, (before, _) in enumerate(best):
            least = min(least, (before + (end - starts[number]) * length + cost, number))
        best.append(least)
    sizes, i = [], len(ends)
    while i:
        before = best[i][1]
        sizes.append(starts[i] - starts[before])
        i = before
    return sizes[::-1]


def unpad_batch(
    keep: Tensor | None,
    starts: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    width: int,
    border: int = 0,
) -> UnpaddedBatch:
    """Lay out a batch of `shape` (b, n) and width d without its padding.

    Args:
        keep: (b, n) padding mask; `None` if nothing is padded.
        starts: (b, n) from `find_starts`; `None` if every row is one text. A text may be padding alone.
        border: texts of up to this length share no bucket with longer ones.
    """
    if starts is None:
        texts = torch.arange(shape[0], device="cpu")[:, None].expand(shape).flatten()
    else:
        texts = starts.flatten().cpu().cumsum(0) - 1
    number_of_texts = int(texts[-1]) + 1
    tokens = None if keep is None else keep.flatten().cpu().nonzero().squeeze(-1)
    texts = texts if tokens is None else texts[tokens]
    lengths = texts.bincount(minlength=number_of_texts)
    first = lengths.cumsum(0) - lengths  # of each text, its first token
    order = lengths.argsort(stable=True)
    by_length = lengths[order].tolist()
    buckets, gathers, scatter, number, places = [], [], torch.empty_like(texts), 0, 0
    below, cost = bisect_right(by_length, border), bucket_cost(device, width)
    sizes = plan_buckets(by_length[:below], cost) + plan_buckets(by_length[below:], cost)
    for rows in sizes:
        own, length = order[number : number + rows], max(by_length[number + rows - 1], 1)
        index = torch.arange(length, device="cpu")
        mask = index < lengths[own, None]
        # The place of a text without tokens holds any other's.
        gather = (first[own, None] + index.clamp(max=lengths[own, None] - 1)).clamp(min=0)
        scatter[gather[mask]] = places + mask.flatten().nonzero().squeeze(-1)
        equal = by_length[number] == length
        buckets.append(Bucket(rows, length, None if equal else mask.to(device)))
        gathers.append(gather.flatten())
        number, places = number + rows, places + rows * length
    return UnpaddedBatch(
        shape=shape,
        tokens=None if tokens is None else tokens.to(device),
        positions=(torch.arange(len(texts), device="cpu") - first[texts]).unsqueeze(0).to(device),
        lengths=lengths.unsqueeze(1).to(device),
        longest=shape[1] if starts is None else by_length[-1],
        buckets=tuple(buckets),
        gather=torch.cat(gathers).to(device),
        scatter=scatter.to(device),
        by_input=order.argsort().to(device),
        cost=places + cost * len(buckets),
    )


# ---- ops/memories.py ----
#
# The memories that queries read: slots, which every query reads, and windows, which the tokens around them read.
#
# Shape letters: b batch, h heads, n tokens, q queries, m slots, w tokens of a window, s queries of a block, c head
# size. Every mask is boolean with True = keep.


class BlockPart(NamedTuple):
    """A memory as a table of keys and values, and which of them each block of queries reads."""

    key: Tensor  # (rows, h, c)
    value: Tensor  # (rows, h, c)
    places: Tensor  # (blocks, k) rows that a block reads
    terms: list[Tensor]  # of the mask, each (1 or blocks, 1 or h, 1 or s, 1 or k)

    def gather(self, states: Tensor, part: slice = slice(None)) -> Tensor:
        """Take the keys or values of some blocks, (blocks, h, k, c)."""
        return key_blocks(states, self.places[part]).transpose(1, 2)


class SlotMemory(NamedTuple):
    """Keys and values of slots, or of single tokens, which every query may read."""

    key: Tensor  # (b, h, m, c)
    value: Tensor  # (b, h, m, c)
    filled: KeyMask | Tensor | None = None  # slots that may be read; (b, 1 or h, m) if a tensor; `None` for all
    bias: Tensor | None = None  # (b, h, m) added to the logits
    # (b, 1 or h, 1 or q, 1 or m), also added, or a mask; beside a window, its queries are ordered as the window's.
    query_bias: Tensor | None = None

    def filled_slots(self) -> Tensor | None:
        """Return the mask as (b, 1 or h, m), or `None` if all slots may be read."""
        if isinstance(self.filled, KeyMask):
            return self.filled.keep[:, None, : self.key.shape[2]]
        return self.filled

    def mask_terms(self) -> list[Tensor]:
        """Return what the mask of a read is made of, each (b, 1 or h, 1 or q, 1 or m): masks, and what is added."""
        of_slots = (self.filled_slots(), self.bias)
        terms = [None if term is None else term.unsqueeze(2) for term in of_slots]
        return [term for term in (*terms, self.query_bias) if term is not None]

    def mask(self) -> Tensor | None:
        """Return the mask of a read, (b, 1 or h, 1 or q, m): boolean, or with a bias additive; `None` for no mask."""
        return join_masks([self.mask_terms()], [self.key.shape[2]], self.key)

    def in_blocks(self, block: int, blocks: int) -> BlockPart:
        """Let blocks of queries read the slots of their rows."""
        batch, slots, device = self.key.shape[0], self.key.shape[2], self.key.device
        # Not `repeat_interleave`, which would need one graph for a single block and another for several.
        rows = torch.arange(blocks, device=device) // (blocks // batch)  # of the batch, for each block
        terms = [
            term.index_select(0, rows) if term.shape[2] == 1 else query_blocks(term, block)
            for term in (term.expand(batch, -1, -1, -1) for term in self.mask_terms())
        ]
        places = rows[:, None] * slots + torch.arange(slots, device=device)
        return BlockPart(_as_rows(self.key), _as_rows(self.value), places, terms)


class Readers(NamedTuple):
    """Tokens of a pass that write nothing and read the latest tokens before them, each with its own keys."""

    places: Tensor  # (b, q) where they are among the n tokens of the pass
    key: Tensor  # (b, h, q, w, c)
    value: Tensor
    real: Tensor  # (b, q, w) whether a window holds a token there

    def take(self, states: Tensor) -> Tensor:
        """Select their states: (b, h, n, ...) to (b, h, q, ...)."""
        return states.gather(2, self.places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1]))

    def put(self, states: Tensor, own: Tensor, dim: int = 2) -> Tensor:
        """Put their results (b, h, q, x) into those of all tokens (b, h, n, x); or at dimension 1, without heads."""
        shape = (-1, *[1] * (dim - 1), self.places.shape[1], 1)
        return states.scatter(dim, self.places.view(shape).expand_as(own), own.to(states.dtype))


class WindowMemory(NamedTuple):
    """A sliding window: keys and values of tokens, each read by the queries around it, real tokens before padding.

    All windows of one read share the same order.
    """

    key: Tensor  # (b, h, earlier + n, c)
    value: Tensor
    real: Tensor | None  # (b, earlier + n) padding mask in this order; `None` if nothing is padded
    window: int  # number of tokens that a query may read, including itself
    earlier: int = 0  # number of tokens in front without a query, from an earlier pass
    ranks: Tensor | None = None  # (b, n) ranks of the tokens; `None` if already in order
    keep: Tensor | None = None  # (b, n) padding mask in the input's order
    ordered: bool = False  # whether keys and values are already in order, even if the queries are not
    causal: bool = False
    is_step: bool = False  # whether one query reads all, the last one's
    bias: Tensor | None = None  # (w,) added to the logits of a window's tokens, from the first to the last
    elsewhere: Tensor | None = None  # (b, 1 or h, n) tokens that another part of the same read holds
    readers: Readers | None = None  # tokens that write nothing, whose places in the order are those of others

    @classmethod
    def of_encoder(
        cls, key: Tensor, value: Tensor, window: int, context: ForwardContext, elsewhere: Tensor | None = None
    ) -> "WindowMemory":
        """Keep an encoder's keys and values (b, h, n, c), to be read by the tokens on either side."""
        if context.keep is None:
            return cls(key, value, None, window, elsewhere=elsewhere)
        real = torch.arange(key.shape[2], device=key.device) < context.lengths
        return cls(key, value, real, window, ranks=context.ranks, keep=context.keep, elsewhere=elsewhere)

    def read(self, weights: Tensor) -> Tensor:
        """Sum a causal window's values with weights (b, h, n, w) for the keys of `logits`: (b, h, n, c)."""
        if self.is_step:
            return torch.matmul(weights, self.value)
        given, weights = weights, self.put_in_order(weights)
        rows, places = weights.shape[0], weights.shape[2]
        part = self.in_blocks(self.window)
        value = part.gather(part.value)
        weights = band_weights(query_blocks(weights, self.window), value.shape[2])
        states = join_blocks(torch.matmul(weights, value).transpose(1, 2), rows, places)
        states = self.put_back(states).transpose(1, 2)
        if self.readers is None:
            return states
        own = torch.matmul(self.readers.take(given).unsqueeze(-2), self.readers.value).squeeze(-2)
        return self.readers.put(states, own)

    def as_slots(self) -> SlotMemory:
        """Let the query of a step read all tokens, or the ordered queries of a short row the whole row under a mask."""
        if self.is_step:
            bias = None if self.bias is None else self.bias.expand(1, 1, -1)
            return SlotMemory(self.key, self.value, self.real[:, None], bias)
        key, value, readable = self.ordered_tokens()
        place, (before, after) = torch.arange(key.shape[2], device=key.device), window_reach(self.window)
        offset = place - place[:, None]
        return SlotMemory(key, value, readable, query_bias=((offset >= -before) & (offset <= after))[None, None])

    def in_blocks(self, block: int) -> BlockPart:
        """Let blocks of ordered queries read what their windows reach."""
        key, value, readable = self.ordered_tokens()
        rows, _, length, _ = key.shape
        places, inside = key_places(rows, length, self.window, block, key.device, self.causal)
        reached = inside.unsqueeze(1)
        if readable is not None:
            readable = readable.expand(rows, -1, -1)
            reached = reached & key_blocks(_as_rows(readable), places).transpose(1, 2)
        terms = [window_mask(torch.ones_like(inside[:1]).unsqueeze(1), block), reached.unsqueeze(2)]
        if self.bias is not None:
            terms.append(band_weights(self.bias.expand(1, 1, block, self.window), block + self.window - 1))
        return BlockPart(_as_rows(key), _as_rows(value), places, terms)

    def ordered_tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and the mask (b, 1 or h, n) of the tokens to read, in the order of `put_in_order`."""
        key, value, readable = self.key, self.value, None if self.real is None else self.real[:, None]
        if not self.ordered:
            key, value = (move_to_ranks(states, self.ranks, self.keep) for states in (key, value))
        if self.elsewhere is not None:
            left = ~in_order(self.elsewhere, self.ranks, self.keep)
            readable = left if readable is None else readable & left
        return key, value, readable

    def put_in_order(self, query: Tensor) -> Tensor:
        """Move queries (b, h, n, c) to the places of their tokens, (b, h, earlier + n, c).

        Raises:
            ValueError: The number of queries differs from the number of tokens.
        """
        tokens = self.key.shape[2] - self.earlier
        if tokens != query.shape[2]:
            raise ValueError(
                f"A window can be read only by the {tokens} tokens it was written from, but there are {query.shape[2]} "
                "queries; for cross-attention, use a memory with slots."
            )
        query = move_to_ranks(query, self.ranks, self.keep)
        return F.pad(query, (0, 0, self.earlier, 0)) if self.earlier else query

    def put_back(self, states: Tensor) -> Tensor:
        """Undo `put_in_order`: (b, earlier + n, ...) to (b, n, ...)."""
        states = states[:, self.earlier :] if self.earlier else states
        if self.ranks is None:
            return states
        # Whole rows of a (b * places, ...) table: faster than `gather`, which takes single entries.
        rows, places = states.shape[:2]
        found = self.ranks + places * torch.arange(rows, device=states.device)[:, None]
        return states.flatten(0, 1).index_select(0, found.flatten()).view(*found.shape, *states.shape[2:])


Memories = Sequence[SlotMemory | WindowMemory]


def _as_rows(states: Tensor) -> Tensor:
    """Flatten (b, h, n, ...) to (b * n, h, ...)."""
    return states.transpose(1, 2).flatten(0, 1)


def join_masks(terms: Sequence[list[Tensor]], sizes: Sequence[int], like: Tensor) -> Tensor | None:
    """Join the mask's terms of several memories, and put the masks of their m keys (`sizes`) side by side.

    The result is boolean, or additive if a term is; `None` if there are no terms.
    """
    if not any(terms):
        return None
    if is_additive(terms):
        masks = [reduce(torch.add, added_terms(own, like)) for own in terms]
    else:
        every = like.new_ones(1, 1, 1, 1, dtype=torch.bool)
        masks = [reduce(torch.logical_and, own or [every]) for own in terms]
    if len(masks) == 1:  # with sizes, the older exporter to ONNX would keep the example's
        return masks[0].expand(-1, -1, -1, sizes[0])
    shape = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    return torch.cat([mask.expand(*shape, size) for mask, size in zip(masks, sizes, strict=True)], dim=-1)


def is_additive(terms: Sequence[list[Tensor]]) -> bool:
    """Whether the masks of several memories are added to the logits."""
    return any(term.is_floating_point() for own in terms for term in own)


def added_terms(terms: list[Tensor], like: Tensor) -> list[Tensor]:
    """Turn boolean terms into what is added to logits. Finite in sum, because a row of minus infinity would be NaN."""
    zero, unread = like.new_zeros(()), torch.finfo(like.dtype).min / 2
    added = [torch.where(term, zero, unread) if term.dtype == torch.bool else term for term in terms]
    return added or [zero.view(1, 1, 1, 1)]


def query_blocks(query: Tensor, block: int) -> Tensor:
    """Split queries into blocks, zero-padded at the end: (b, h, n, c) to (b * blocks, h, s, c)."""
    rows, length = query.shape[0], query.shape[2]
    blocks = _number_of_blocks(length, block)
    query, tracing = query.transpose(1, 2), is_tracing(query)
    # In a graph contiguous: padding by nothing keeps the layout, which a graph of another length does not expect.
    query = query.contiguous() if tracing else query
    if tracing or blocks * block > length:
        query = F.pad(query, (0, 0, 0, 0, 0, blocks * block - length))
    query = query.flatten(0, 1)
    # And a copy: Inductor checks whether two views in a row end in the shape that they began with. They do for a single
    # block alone, so that a graph would serve either one block or several, but not both.
    query = first_places(query, query.shape[0], 0) if tracing else query
    return query.view(rows * blocks, block, *query.shape[1:]).transpose(1, 2)


def key_places(
    rows: int, length: int, window: int, block: int, device: torch.device, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Find the keys that each block reaches, (b * blocks, s + w - 1).

    Returns:
        Indices of joined rows, (b, n, ...) flattened to (b * n, ...), and which of them lie within the block's row; the
        others are its first token.
    """
    # The number of blocks is never a dimension by itself, or a graph would be recompiled for a single block.
    blocks = _number_of_blocks(length, block)
    number = torch.arange(rows * blocks, device=device)[:, None]
    row, (before, _) = number // blocks, window_reach(window, causal)
    # Not `number % blocks`: PyTorch's exporter to ONNX takes no remainder by a number that a graph computes.
    position = (number - row * blocks) * block - before + torch.arange(block + window - 1, device=device)
    within = (position >= 0) & (position < length)
    # Not `position.clamp`, whose bounds AOTInductor of PyTorch 2.13 cannot derive.
    return row * length + torch.where(within, position, 0), within


def key_blocks(joined: Tensor, places: Tensor) -> Tensor:
    """Gather what some blocks reach, given their `key_places`: (b * n, ...) to (blocks, s + w - 1, ...)."""
    return joined.index_select(0, places.flatten()).view(*places.shape, *joined.shape[1:])


def window_mask(readable: Tensor, block: int) -> Tensor:
    """Mask the keys outside of queries' windows: (blocks, 1 or h, s + w - 1) to (blocks, 1 or h, s, s + w - 1)."""
    keys, device = readable.shape[-1], readable.device
    # The window of a block's query i starts at key i.
    offset = torch.arange(keys, device=device) - torch.arange(block, device=device)[:, None]
    band = (offset >= 0) & (offset <= keys - block)
    return readable.unsqueeze(-2) & band


def join_blocks(states: Tensor, rows: int, length: int) -> Tensor:
    """Join blocks and drop positions beyond the end: (b * blocks, s, ...) to (b, n, ...)."""
    places = _number_of_blocks(length, states.shape[1]) * states.shape[1]
    states = states.flatten(0, 1)
    if is_tracing(states) or places > length:
        # In a graph always copied, for the same reason as in `query_blocks`.
        kept = torch.arange(rows, device=states.device)[:, None] * places + torch.arange(length, device=states.device)
        states = states.index_select(0, kept.flatten())
    return states.view(rows, length, *states.shape[1:])


def window_weights(weights: Tensor, window: int) -> Tensor:
    """Select the weights of each query's window: (b * blocks, h, s, s + w - 1) to (b * blocks, h, s, w)."""
    block, keys = weights.shape[2:]
    return F.pad(weights.flatten(2), (0, block)).unflatten(2, (block, keys + 1))[..., :window]


def band_weights(weights: Tensor, keys: int) -> Tensor:
    """Invert `window_weights`, with zeros elsewhere: (b * blocks, h, s, w) to (b * blocks, h, s, keys = s + w - 1)."""
    block, window = weights.shape[2:]
    # Rows that are longer by one entry: in the flat matrix, each row then starts one entry later than the row before.
    return F.pad(weights, (0, keys + 1 - window)).flatten(2)[..., : block * keys].unflatten(2, (block, keys))


def _number_of_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


# ---- ops/memory_read.py ----
#
# Softmax attention through transformers' backends, to keys or to several memories, slots and windows, at once.
#
# Shape letters: b batch, h heads, n tokens, q queries, m slots, w tokens of a window, s queries of a block, c head
# size. Every mask is boolean with True = keep.


# Where windows are read in parts: the number of queries of a part, and at most of a block. A shorter block reads fewer
# keys beyond its windows, but copies more.
_PART_QUERIES, _PART_BLOCK = 512, 64


# Number of tokens beyond a window up to which its queries read the whole row under a mask, without blocks.
_SHORT_ROW = 128


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention for transformers' interface: (b, h, q, c) queries to (b, q, h, c) outputs, and the weights."""
    output, weights = softmax_attention(query, key, value, attention_mask, scaling, dropout)
    return output.transpose(1, 2), weights


def attend_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: KeyMask | Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head softmax attention with any numbers of queries and keys, through transformers' attention interface.

    Args:
        module: the calling module, with `config`, `is_causal = False` and `attention_dropout`.
        query, key, value: (b, h, q, c) and (b, h, k, c); logits are scaled by c^-1/2.
        mask: from `make_key_mask`, or `None`; or a tensor that broadcasts to (b, h, q, k), boolean (True = may be
            attended to) or added to the logits. Only eager and sdpa accept a tensor; other backends fall back to sdpa.

    Returns:
        The concatenated heads (b, q, d), and the weights (b, h, q, k) if the backend returns them (eager does).
    """
    backend = module.config._attn_implementation
    if isinstance(mask, Tensor):
        mask, backend = KeyMask(mask, mask), "eager" if backend == "eager" else "sdpa"
    elif mask is None and backend == "flex_attention":  # slots that may all be read, of any number
        mask = flex_key_mask(None, *(states.transpose(1, 2) for states in (query, key)))
    kwargs |= {
        "scaling": query.shape[-1] ** -0.5,
        "dropout": module.attention_dropout if module.training else 0.0,
        "is_causal": False,
    }
    # The flash path would take position ids that restart for packed documents, in queries and keys alike.
    kwargs.pop("position_ids", None)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
    if backend == "sdpa" and query.dtype == torch.bfloat16 and prefers_products(query):
        attention = eager_attention_forward
    if mask is not None and mask.unpadded is not None:
        output, weights = _attend_unpadded(attention, module, query, key, value, mask.unpadded, **kwargs)
        return output.flatten(-2), weights
    if mask is not None and mask.extra_keys:
        key, value = (F.pad(states, (0, 0, 0, mask.extra_keys)) for states in (key, value))
    backend_mask = None if mask is None else mask.for_queries(query.shape[2])
    output, weights = attention(module, query, key, value, backend_mask, **kwargs)
    if is_torchdynamo_exporting():
        # Which layout the kernel returns depends on whether gradients are recorded, and the exporter to ONNX does not.
        output = output.clone(memory_format=torch.contiguous_format)
    return output.flatten(-2), weights


def _attend_unpadded(
    attention: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keys: UnpaddedKeys, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call a variable-length kernel with all queries of every row, but only the kept keys.

    Transformers' flash path assumes that queries and keys are the same tokens, so a key mask would drop queries too.
    Passing explicit sequence boundaries and no mask avoids that.
    """
    batch, _, num_queries, _ = query.shape
    rows = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # (batch * length, heads, head_dim)
    query, key, value = rows
    key, value = key[keys.indices], value[keys.indices]
    borders = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * num_queries
    output, _ = attention(
        module,
        *(states.unsqueeze(0).transpose(1, 2) for states in (query, key, value)),  # (1, heads, total, head_dim)
        None,
        cu_seq_lens_q=borders,
        cu_seq_lens_k=keys.cu_seq_lens,
        max_length_q=num_queries,
        max_length_k=keys.max_length,
        **kwargs,
    )
    return output.view(batch, num_queries, *output.shape[-2:]), None


def read_memories(
    module: nn.Module, query: Tensor, memories: Memories, options: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention to several memories at once, for a module as in `attend_heads`.

    Queries (b, h, n, c), those of its tokens if a memory is a window, give the concatenated heads (b, n, d), and with
    eager attention the weights (b, h, n, keys) over the slots or window positions of each memory in turn.

    Raises:
        ValueError: The number of queries differs from the number of tokens in a window.
    """
    first, options = memories[0], options or {}
    if isinstance(first, WindowMemory) and first.is_step:
        memories = [first := first.as_slots()]
    if len(memories) == 1 and isinstance(first, SlotMemory):
        plain = isinstance(first.filled, KeyMask | None) and first.bias is None and first.query_bias is None
        return attend_heads(module, query, first.key, first.value, first.filled if plain else first.mask(), **options)
    windows = [memory for memory in memories if isinstance(memory, WindowMemory)]
    if not windows:
        return _read_slots(module, query, memories, options)
    if windows[0].readers is not None:
        return _read_by_readers(module, query, windows[0], options)
    query, widest = windows[0].put_in_order(query), max(memory.window for memory in windows)
    # Eager attention returns weights by window.
    is_short = not is_tracing(query) and module.config._attn_implementation != "eager"
    is_short = is_short and query.shape[2] <= widest + _SHORT_ROW
    if is_short and all(memory.bias is None and not memory.causal for memory in windows):
        memories = [memory.as_slots() if isinstance(memory, WindowMemory) else memory for memory in memories]
        output, weights = _read_slots(module, query, memories, options)
    else:
        output, weights = _read_blocks(module, query, memories, widest, options)
    weights = None if weights is None else windows[0].put_back(weights.transpose(1, 2)).transpose(1, 2)
    return windows[0].put_back(output), weights


def _read_by_readers(
    module: nn.Module, query: Tensor, window: WindowMemory, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Read a window, and what its readers read: each of them is a row of one query."""

    def as_rows(states: Tensor) -> Tensor:
        return states.transpose(1, 2).flatten(0, 1)

    output, weights = read_memories(module, query, [window._replace(readers=None)], options)
    readers, bias = window.readers, None if window.bias is None else window.bias.expand(1, 1, -1)
    slots = SlotMemory(as_rows(readers.key), as_rows(readers.value), readers.real.flatten(0, 1)[:, None], bias)
    own, shown = read_memories(module, as_rows(readers.take(query)).unsqueeze(2), [slots], options)
    output = readers.put(output, own.view(*readers.places.shape, -1), dim=1)
    if weights is not None:
        weights = readers.put(weights, shown.squeeze(2).unflatten(0, readers.places.shape).transpose(1, 2))
    return output, weights


def _read_slots(
    module: nn.Module, query: Tensor, memories: Sequence[SlotMemory], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    key, value = (torch.cat([memory[side] for memory in memories], 2) for side in (0, 1))
    sizes = [memory.key.shape[2] for memory in memories]
    mask = join_masks([memory.mask_terms() for memory in memories], sizes, key)
    return attend_heads(module, query, key, value, mask, **options)


def _read_blocks(
    module: nn.Module, query: Tensor, memories: Memories, widest: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Read with ordered queries (b, h, n, c): (b, n, d), and if eager the weights over slots and windows."""
    in_parts = choose("window_blocks", query, module.training) == "parts"
    rows, places = query.shape[0], query.shape[2]
    block = min(widest, _PART_BLOCK) if in_parts else widest
    query = query_blocks(query, block)
    blocks = query.shape[0]
    parts = [
        memory.in_blocks(block) if isinstance(memory, WindowMemory) else memory.in_blocks(block, blocks)
        for memory in memories
    ]
    sizes, table = [part.places.shape[1] for part in parts], _join_parts(parts)
    terms = [part.terms for part in parts]
    step = max(_PART_QUERIES // block, 1) if in_parts else blocks
    buffer = None
    if in_parts and is_additive(terms):  # new memory for the mask of each part would be slow
        terms = [added_terms(own, table.key) for own in terms]
        buffer = table.key.new_empty(min(step, blocks), query.shape[1], block, sum(sizes))
    reads = []
    for first in range(0, blocks, step) if in_parts else (0,):
        part = slice(first, first + step) if in_parts else slice(None)
        own = [[term if term.shape[0] == 1 else term[part] for term in added] for added in terms]
        if buffer is None:
            mask = join_masks(own, sizes, table.key)
        else:
            mask = buffer[: len(query[part])]
            for added, out in zip(own, mask.split(sizes, -1), strict=True):
                *others, last = added
                out.copy_(last) if not others else torch.add(reduce(torch.add, others).expand_as(out), last, out=out)
        key, value = table.gather(table.key, part), table.gather(table.value, part)
        reads.append(attend_heads(module, query[part], key, value, mask, **options))
    outputs, weights = zip(*reads, strict=True)
    output = join_blocks(outputs[0] if len(outputs) == 1 else torch.cat(outputs), rows, places)
    if weights[0] is None:
        return output, None
    # Without the weights of keys outside of the windows, which are zero.
    pieces = zip(memories, torch.cat(weights).split(sizes, -1), strict=True)
    weights = [
        window_weights(piece, memory.window) if isinstance(memory, WindowMemory) else piece for memory, piece in pieces
    ]
    return output, join_blocks(torch.cat(weights, -1).transpose(1, 2), rows, places).transpose(1, 2)


def _join_parts(parts: list[BlockPart]) -> BlockPart:
    """Join the tables of several memories, without their masks."""
    if len(parts) == 1:
        return parts[0]
    places, start = [], 0
    for part in parts:
        places.append(part.places + start)
        start += part.key.shape[0]
    key, value = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    return BlockPart(key, value, torch.cat(places, 1), [])


# ---- layers/recorded.py ----
#
# Models and layers that can be copied and pickled after their outputs were recorded.


class Recorded(nn.Module):
    """A module whose outputs transformers records (`_can_record_outputs`), or the model that has such modules.

    Transformers records with forward hooks that cannot be pickled, and marks the model that has them.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Leave out these hooks and the mark, so that a copy gets its own hooks when it needs them."""
        hooks = OrderedDict(
            (key, hook)
            for key, hook in self._forward_hooks.items()
            if getattr(hook, "__module__", None) != output_capturing.__name__
        )
        state = {**self.__dict__, "_forward_hooks": hooks}
        state.pop("_output_capturing_hooks_installed", None)
        return state


# ---- layers/memory_attention.py ----
#
# Attention in two halves: write a context to a memory of bounded size, then read it with queries.
#
#     self-attention    read(x, write(x))
#     cross-attention   read(y, write(x)), where the context is written once for any number of reads
#
# Each mechanism implements `write`; projections and reading are shared. The causal form is in `causal_attention.py`.


# Number of tokens per part where tokens are processed in parts.
_PART_TOKENS = 512


# Number of keys, relative to the width, up to which reading them again in the backward pass takes a few per cent of a
# layer's time.
_MOST_KEYS = 0.5


class Memory(NamedTuple):
    """The result of writing a context."""

    parts: Memories  # read together in one softmax
    slot_states: Tensor | None = None  # passed to the next layer alongside the tokens (Luna's packed states)
    marked: "MarkedReads | None" = None  # tokens of the context that read all of it


class MarkedReads(NamedTuple):
    """Tokens of an encoder that read all tokens, not the memory."""

    tokens: ExactTokens
    key: Tensor  # (b, h, n, c)
    value: Tensor  # (b, h, n, c)
    mask: KeyMask | None  # padding mask of all tokens


class MemoryAttention(Recorded):
    """Multi-head attention to a written context; each family implements `write`.

    The projections have RoBERTa's names; the output projection belongs to the layer.
    """

    is_causal = False  # transformers' sdpa defaults to True without this attribute
    has_slots = True  # whether a window of `config.local_window` is read in one softmax with them
    memory_class: type = SlotMemory  # the part that cross-attention writes and reads
    read_parts = read_memories

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // self.num_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        counts = config.local_window and config.slot_count_bias and self.has_slots
        self.slot_scale = nn.Parameter(torch.empty(self.num_heads)) if counts else None
        self.add_projections(config)

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the scales, such that a slot counts as many tokens as it stands for."""
        if self.slot_scale is not None:
            init.ones_(self.slot_scale)

    def add_projections(self, config: BoundedMemoryConfig) -> None:
        """Create the query, key and value projections."""
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def key_and_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (b, n, d) states to keys and values, (b, h, n, c) each."""
        shape = (*states.shape[:-1], self.num_heads, self.head_size)
        return self.key(states).view(shape).transpose(1, 2), self.value(states).view(shape).transpose(1, 2)

    @staticmethod
    def prepare(
        config: BoundedMemoryConfig, states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> ForwardContext:
        """Return the context with the masks that the layers need, in the backend's form; called once per forward pass.

        Args:
            config: the model's configuration.
            states: (b, n, d) input of the first layer.
            slot_states: its other input, see `write`.
            context: context of the forward pass.
        """
        return context

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Write a context to a memory.

        Args:
            states: (b, n, d), already normed in a pre-norm model.
            slot_states: what the layers pass on alongside the tokens to write the slots with: Luna's packed states
                (b, l, d), or the control matrix shared by the layers of an ABC model; `None` in other families.
            context: context of the tokens, with the family's masks (`prepare`).
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `write`.")

    def token_parts(self, states: Tensor, context: ForwardContext) -> list[tuple[slice, ForwardContext]]:
        """Return the parts of the tokens (b, h, n, c) that are processed at a time, with their contexts."""
        if choose("token_parts", states, self.training) == "whole":
            return [(slice(None), context)]
        return context.split(states.shape[2], _PART_TOKENS)

    def slot_memory(
        self,
        key: Tensor,
        value: Tensor,
        context: ForwardContext,
        filled: KeyMask | Tensor | None = None,
        counts: Tensor | None = None,
    ) -> SlotMemory:
        """Make the memory of slots, with the logarithm of their counts as a bias if the config asks for it.

        Softmax attention to s equal tokens equals attention to one slot, their mean, whose logit is larger by log s.

        Args:
            key, value, filled: see `SlotMemory`.
            context: context of the tokens that were written.
            counts: (b, 1 or h, m) number of tokens that each slot stands for; by default, the slots in use share a
                row's tokens evenly.
        """
        slots = SlotMemory(key, value, filled)
        if context.outside is not None:
            return self.weigh_slots(slots, context.outside, counts)
        if self.slot_scale is None:
            return slots
        if counts is None:
            used = slots.filled_slots()
            used = torch.ones_like(key[:, :1, :, 0], dtype=torch.bool) if used is None else used
            lengths = context.lengths.unsqueeze(1).to(torch.promote_types(self.slot_scale.dtype, torch.float32))
            counts = lengths / used.sum(-1, keepdim=True).clamp(min=1)  # (b, 1 or h, 1)
        return slots._replace(bias=count_bias(counts, self.slot_scale).expand(-1, -1, key.shape[2]))

    def weigh_slots(self, slots: SlotMemory, outside: Tensor, counts: Tensor | None) -> SlotMemory:
        """Let the slots of each query stand for the tokens that it reads nowhere else, divided as `counts` are.

        Args:
            slots: without a bias.
            outside: (b or 1, 1 or h, 1 or n) number of these tokens; a query that has none reads no slot. Or
                (b or 1, 1 or h, 1 or n, m), the number of them in each slot.
            counts: see `slot_memory`.
        """
        each = outside if outside.dim() == 4 else outside.unsqueeze(-1)
        some, unread = each > 0, torch.finfo(slots.key.dtype).min / 2
        if self.slot_scale is None:
            weight = torch.zeros((), dtype=slots.key.dtype, device=outside.device)
            return slots._replace(query_bias=torch.where(some, weight, unread))
        each = each.to(torch.promote_types(self.slot_scale.dtype, torch.float32)).clamp(min=1.0)
        slots = slots._replace(query_bias=torch.where(some, log_counts(each, self.slot_scale), unread))
        if outside.dim() == 4:
            return slots
        if counts is None:
            used = slots.filled_slots()
            counts = torch.ones_like(slots.key[:, :1, :, 0]) if used is None else used
        counts = counts.to(each.dtype)
        least = torch.finfo(counts.dtype).tiny ** 0.5  # whose gradient is finite
        shares = counts.clamp(min=least) / counts.sum(-1, keepdim=True).clamp(min=least)
        return slots._replace(bias=log_counts(shares, self.slot_scale).expand(-1, self.num_heads, -1))

    def write_own(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Like `write`, with what the context's own tokens also read: the tokens around them, and the exact ones."""
        mixes = context.window or context.marked is not None or context.selected
        if not (self.has_slots and mixes):
            return self.write(states, slot_states, context)
        if context.whole:
            return self.write_whole(states, slot_states, context)
        key, value = self.key_and_value(states)
        context, marked = context._replace(projected=(key, value)), context.marked
        selected = self.select_tokens(states, key, context) if context.selected else None
        exact = [chosen for chosen in (marked, selected) if chosen is not None]
        elsewhere = reduce(torch.logical_or, (chosen.mask for chosen in exact)) if exact else None
        if selected is not None:
            context = self.leave_to_slots(~elsewhere, context)
        parts = [
            SlotMemory(gather_tokens(key, chosen.places), gather_tokens(value, chosen.places), chosen.valid)
            for chosen in exact
        ]
        memory = self.write(states, slot_states, context)
        written = [
            part._replace(elsewhere=elsewhere) if isinstance(part, WindowMemory) else part for part in memory.parts
        ]
        if not context.slots:
            written = []
        if context.window:
            parts.append(WindowMemory.of_encoder(key, value, context.window, context, elsewhere))
        if marked is not None and self.config.global_tokens_read_all:
            memory = memory._replace(marked=MarkedReads(marked, key, value, context.token_mask))
        return memory._replace(parts=[*written, *parts])

    def write_whole(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Keep every token, to be read by all: softmax attention."""
        key, value = self.key_and_value(states)
        unused = self.unused_parameters(slot_states, context) if torch.is_grad_enabled() else []
        if unused:
            key, *_ = join_gradients(key, *unused)
        return Memory([SlotMemory(key, value, context.token_mask)], slot_states)

    def unused_parameters(self, slot_states: Tensor | None, context: ForwardContext) -> list[Tensor]:
        """Return what has no effect where every token is read; it gets a gradient of zero, as DDP requires."""
        return [] if self.slot_scale is None else [self.slot_scale]

    def select_tokens(self, states: Tensor, key: Tensor, context: ForwardContext) -> ExactTokens:
        """Select tokens for each head by the attention of a few evenly spaced queries.

        Args:
            states: (b, n, d).
            key: (b, h, n, c) keys of the tokens.
            context: context of the tokens.
        """
        keep, number = context.keep, self.config.num_selection_queries
        ranks, places = spaced_places(context.ranks, context.lengths, keep, number)
        with torch.no_grad():
            rows = gather_tokens(states.unsqueeze(1), places.unsqueeze(1)).squeeze(1)
            query = split_heads(self.query(rows), self.num_heads)
            scores = attention_asked(query, key, ranks, context.ranks, keep, context.window)
        may = context.slot_tokens()  # neither padding nor marked
        scores = scores if may is None else scores.masked_fill(~may, -torch.inf)
        limits, number, all_of = None, self.config.num_selected_tokens, self.config.softmax_length
        if context.selected > number:
            limits = torch.where(context.lengths <= all_of, all_of, number)
        return first_tokens(scores, context.selected, limits)

    def leave_to_slots(self, left: Tensor, context: ForwardContext) -> ForwardContext:
        """Write the slots from some tokens (b, h, n) only, and count those outside of each query's window."""
        context = context._replace(written=left)
        if context.outside is None:
            return context
        ordered = in_order(context.slot_tokens(), context.ranks, context.keep)
        outside = tokens_outside(ordered, context.lengths, left.shape[-1], context.window)
        return context._replace(left=ordered, outside=outside)

    def read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Read a memory with (b, n, d) states: (b, n, d) before the output projection, and the weights if eager."""
        memory = memory._replace(slot_states=None)
        if torch.is_grad_enabled() and self.config._attn_implementation != "eager":
            parts = memory.parts
            keys = sum(2 * part.window if isinstance(part, WindowMemory) else part.key.shape[2] for part in parts)
            # In this order: comparing the number of keys would specialise a graph.
            if may_recompute(hidden_states) and keys <= hidden_states.shape[-1] * _MOST_KEYS:
                project = snapshot(self.query)
                states = hidden_states if project else self.query(hidden_states)
                return save_inputs(self._read, states, memory, context, project or _same, module=self)
        return self._read(hidden_states, memory, context, self.query)

    def _read(
        self, hidden_states: Tensor, memory: Memory, context: ForwardContext | None, project: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_size)
        query = project(hidden_states).view(shape).transpose(1, 2)
        options = {} if context is None else context.options
        output, weights = self.read_parts(query, memory.parts, options)
        if memory.marked is None:
            return output, weights
        tokens, *sides = memory.marked
        whole, _ = attend_heads(self, gather_tokens(query, tokens.places), *sides, **options)
        weights = None if weights is None else weights.masked_fill(tokens.mask.unsqueeze(-1), 0.0)
        return put_tokens(output, whole, tokens), weights

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Self-attention: write the tokens to a memory and read it.

        Args:
            hidden_states: (b, n, d) token states, already normed in a pre-norm model.
            slot_states: see `write`.
            context: context of the forward pass.

        Returns:
            The output (b, n, d) before the output projection, `slot_states` for the next layer, and with eager
            attention the weights (b, h, n, keys).
        """
        memory = self.write_own(hidden_states, slot_states, context)
        output, weights = self.read(hidden_states, memory, context)
        return output, memory.slot_states, weights


def _same(states: Tensor) -> Tensor:
    return states


class FullAttention(MemoryAttention):
    """Softmax attention to all tokens, as in RoBERTa, for `config.full_attention_layers`."""

    has_slots = False

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Keep one slot per token; `slot_states` passes by unchanged."""
        mask = make_key_mask(self.config, context.keep, queries=states, keys=states)
        return Memory([SlotMemory(*self.key_and_value(states), mask)], slot_states)


# ---- layers/block.py ----
#
# A layer of an encoder or decoder, and the stack of layers.
#
# Parameters have RoBERTa's names, so that a RoBERTa checkpoint loads wherever the architectures agree. A family plugs
# in a `MemoryAttention`. What it writes its slots with passes from layer to layer alongside the tokens: `slot_states`,
# such as Luna's packed sequence, or `None`.


# Number of tokens that the feed-forward network takes at a time: on a CPU, whose cache they fit, and elsewhere.
_CPU_ROWS, _ROWS = 1024, 16384


class DepthwiseConvolution(nn.Module):
    """Depthwise convolution of `conv_kernel_size` taps over the token states, without bias."""

    def __init__(self, config: BoundedMemoryConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.conv_kernel_size))

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the filters."""
        init.normal_(self.weight, mean=0.0, std=config.conv_initializer_range or config.initializer_range)

    def forward(self, states: Tensor, context: ForwardContext) -> Tensor:
        """Convolve (b, n, d) states to the same shape."""
        return depthwise_convolution(states, self.weight, context.keep)


class SubLayerOutput(nn.Module):
    """End of a sub-layer: output projection, dropout and LayerNorm, grouped under RoBERTa's names.

    In a post-norm layer the LayerNorm follows the residual connection; in a pre-norm layer it precedes the sub-layer.
    """

    def __init__(self, config: BoundedMemoryConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)


class FeedForwardInput(nn.Module):
    """First half of the feed-forward network: projection, activation, dropout."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Map (..., d) to (..., intermediate_size)."""
        return self.dropout(self.activation(self.dense(states)))


class AttentionBlock(nn.Module):
    """Attention sub-layer: the family's attention (`self`, as in RoBERTa), output projection, optional convolution."""

    def __init__(
        self,
        config: BoundedMemoryConfig,
        layer_idx: int,
        attention_class: type[MemoryAttention],
        convolution_class: type[DepthwiseConvolution],
    ) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        full = layer_idx in (config.full_attention_layers or ())
        self.self = (FullAttention if full else attention_class)(config, layer_idx)
        self.output = SubLayerOutput(config, config.hidden_size)
        self.convolution = convolution_class(config, layer_idx) if config.conv_kernel_size else None

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the update that the layer adds to the states, before dropout: (b, n, d), and `slot_states`."""
        states = self.output.LayerNorm(hidden_states) if self.norm_first else hidden_states
        update, slot_states = self.attend(states, slot_states, context)
        if self.convolution is not None:
            convolved, _ = _in_rows(context, lambda rows, _, own: (self.convolution(rows, own), None), states, None)
            update = update + convolved
        return update, slot_states

    def attend(
        self, states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply attention and output projection to normed states (b, n, d)."""
        read, slot_states = _in_rows(context, self.self, states, slot_states)
        return self.output.dense(read), slot_states


def _in_rows(
    context: ForwardContext | UnpaddedContext, function: Callable[..., Any], states: Tensor, slot_states: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Apply what needs whole texts, a function of (b, n, d) states, slot states and a context."""
    if isinstance(context, ForwardContext):
        return function(states, slot_states, context)[:2]
    return context.in_rows(function, states, slot_states)


class TransformerLayer(Recorded, GradientCheckpointingLayer):
    """One layer of an encoder or decoder: attention and feed-forward network."""

    def __init__(self, config: BoundedMemoryConfig, *attention: Any) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.feed_forward_rows = config.chunk_size_feed_forward
        self.attention = AttentionBlock(config, *attention)
        self.intermediate = FeedForwardInput(config)
        self.output = SubLayerOutput(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Apply both sub-layers; returns token states (b, n, d) and `slot_states`."""
        with float32_products(hidden_states):
            update, slot_states = self.attention(hidden_states, slot_states, context)
            hidden_states = hidden_states + self.attention.output.dropout(update)
            return self.feed_forward(hidden_states, self.attention), slot_states

    def feed_forward(self, hidden_states: Tensor, before: nn.Module) -> Tensor:
        """Apply the feed-forward sub-layer with its residual connection, in blocks of tokens if that saves memory.

        Args:
            hidden_states: (b, n, d) the output of the sub-layer `before`, whose LayerNorm is still to be applied in a
                post-norm layer.
        """
        norm = self.output.LayerNorm if self.norm_first else before.output.LayerNorm
        rows = self.feed_forward_rows or _rows_at_a_time(hidden_states, self.training)
        flat = hidden_states.flatten(0, 1)
        if not rows or flat.shape[0] <= rows or is_watched(self.intermediate, self.output):
            return self._feed_forward(hidden_states, norm)
        return torch.cat([self._feed_forward(block, norm) for block in flat.split(rows)]).view_as(hidden_states)

    def _feed_forward(self, states: Tensor, norm: nn.LayerNorm) -> Tensor:
        parts: list[Any] = [None]
        if torch.is_grad_enabled() and may_recompute(states, self.intermediate, self.output):
            inner, output = self.intermediate, self.output
            parts = [snapshot(part) for part in (norm, inner.dense, inner.activation, inner.dropout, output.dense)]
        if None in parts:
            normed = norm(states)
            states = states if self.norm_first else normed
            update = self.output.dense(self.intermediate(normed))
        else:
            states, update = self._feed_forward_again(states, *parts)
        states = states + self.output.dropout(update)
        return states if self.norm_first else self.output.LayerNorm(states)

    def _feed_forward_again(
        self, states: Tensor, norm: Callable, dense: Callable, activation: Callable, dropout: Callable, last: Callable
    ) -> tuple[Tensor, Tensor]:
        """Return the states and their update, some of which is computed again in the backward pass."""

        def widen(states: Tensor) -> tuple[Tensor, Tensor]:
            normed = norm(states)
            return states if self.norm_first else normed, dense(normed)

        def narrow(inner: Tensor) -> Tensor:
            return last(dropout(activation(inner)))

        def apply(states: Tensor) -> tuple[Tensor, Tensor]:
            states, inner = widen(states)
            return states, narrow(inner)

        if self.gradient_checkpointing and self.training:  # memory counts more than time
            return save_inputs(apply, states)
        states, inner = save_inputs(widen, states)  # the large products are kept; norms and activations are cheap
        return states, save_inputs(narrow, inner)


def _rows_at_a_time(states: Tensor, training: bool) -> int:
    """Return how many tokens the feed-forward network takes at a time, whose inner states are large; 0 for all."""
    if is_tracing(states):
        return 0
    if states.device.type == "cpu":
        return _CPU_ROWS
    # Re-entrant checkpointing, which must draw the same dropout twice, also runs without gradients, but in training.
    return 0 if training or torch.is_grad_enabled() else _ROWS


class LayerStack(nn.Module):
    """The layers (`layer`, as in RoBERTa), and the final LayerNorm of a pre-norm model."""

    def __init__(
        self,
        config: BoundedMemoryConfig,
        *classes: type[nn.Module],
        layer_class: type[TransformerLayer] = TransformerLayer,
    ) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.layer = nn.ModuleList(layer_class(config, layer_idx, *classes) for layer_idx in layers)
        final = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.final_layer_norm = final if config.norm_first else nn.Identity()

    def forward(self, hidden_states: Tensor, slot_states: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Apply all layers, with their other inputs; returns token states (b, n, d) and `slot_states`."""
        for layer in self.layer:
            # Positional arguments, because re-entrant checkpointing gives keyword arguments no gradient.
            hidden_states, slot_states = layer(hidden_states, slot_states, *inputs)
        return self.final_layer_norm(hidden_states), slot_states


# ---- ops/positions.py ----
#
# Positions: ids as in RoBERTa, sinusoids, and rotary angles.


def rotation(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the cosines and sines of rotary positions (Su et al. 2021, RoFormer, equation 15).

    Positions (b, n) give (b, n, 2, size / 2), where `size` entries of a head are rotated, in `dtype` but at least
    float32.
    """
    angles = position_angles(positions, size // 2, size // 2)
    waves = torch.stack([angles.cos(), angles.sin()], dim=-2)
    return waves.to(torch.promote_types(dtype, torch.float32)).to(positions.device)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Sinusoidal position embeddings, sines in the first half and cosines in the second (fairseq's layout).

    Positions (...) give (..., dim) float32, with a last column of zeros if `dim` is odd.
    """
    half = dim // 2
    angles = position_angles(positions, half, max(half - 1, 1))
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1).float().to(positions.device)
    return F.pad(waves, (0, dim - 2 * half))


def position_angles(positions: Tensor, count: int, divisor: int) -> Tensor:
    """Compute the angles `position * 10000^(-i / divisor)` for i = 0 ... count - 1: (...) to (..., count).

    In float64, because in float32 the error of an angle grows with the position; on the CPU if the device is MPS, which
    lacks it.
    """
    device = torch.device("cpu") if positions.device.type == "mps" else positions.device
    exponents = -torch.arange(count, dtype=torch.float64, device=device) / divisor
    return positions.to(device).unsqueeze(-1) * 10000.0**exponents


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """Extend a position table by repeating its rows, or truncate it (Beltagy et al. 2020, Longformer, section 5).

    Repetition preserves the learned relations between neighbouring positions, except where two copies meet. The table
    (first + trained, d) begins with `first` rows that are no positions (in RoBERTa, those up to the padding row).
    Returns (first + length, d), with `length` at least 1.
    """
    rows = table[first:]
    repeated = rows.repeat(-(-length // rows.shape[0]), 1)[:length]
    return torch.cat([table[:first], repeated])


# ---- layers/embeddings.py ----
#
# Token, position and segment embeddings.


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions, called like an embedding.

    Computed in every pass: a table would be a buffer outside the state dict, which a model made on `meta` would lack,
    and which `model.to(dtype)` would round.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, position_ids: Tensor) -> Tensor:
        """Encode positions: (b, n) to (b, n, d) float32."""
        return sinusoids(position_ids, self.dim)


def token_positions(keep: Tensor, first: int) -> Tensor:
    """RoBERTa's position ids of a padding mask (b, n): `first + t` for the t-th real token, `first - 1` for padding."""
    return keep.long().cumsum(-1) * keep + first - 1  # `long` because ONNX has no cumsum of booleans


def repeated_positions(position_ids: Tensor, first: int, period: int) -> Tensor:
    """Position ids (..., n) whose rows repeat: positions 0 to `period - 1`, then 1 to `period - 1` again and again.

    `first` is the id of position 0, as in `token_positions`; the period is at least 2.
    """
    beyond = position_ids - first - 1  # position 1 is 0 here
    return torch.where(beyond < 0, position_ids, beyond % (period - 1) + first + 1)


def padding_row(config: BoundedMemoryConfig) -> int | None:
    """Return the token that only pads, or `None` if padding is also another special token, such as the last one."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    others = (*ends, config.bos_token_id, config.sep_token_id, config.decoder_start_token_id)
    return None if config.pad_token_id in others else config.pad_token_id


# Inputs that are rows of a table, and what helps if it lacks them.
_TABLES = {
    "Token ids": "Use the model's own tokenizer, or `resize_token_embeddings`.",
    "Position ids": "Use fewer positions, or `resize_position_embeddings`.",
    "`token_type_ids`": "Leave them out, or use a model with a larger `type_vocab_size`.",
}


class TokenEmbeddings(nn.Module):
    """Token, position and segment embeddings, LayerNorm, dropout, projection if widths differ; padding is zero."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width, self.period = config.embedding_width(), config.position_period
        # The embedding of `padding_idx` starts at zero and never learns.
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_row(config))
        self.scale = math.sqrt(width) if config.scales_embedding() else 1.0
        self.first_position = config.first_position
        # Decoders count positions from 0. That of an encoder-decoder has the positions of its encoder.
        self.offset = config.first_position if config.is_encoder_decoder else 0
        self.position_embeddings = None  # rotary: applied to queries and keys
        if config.position_embedding_type == "learned":
            rows = config.first_position + config.position_rows()
            self.position_embeddings = nn.Embedding(rows, width, padding_idx=config.first_position - 1)
        elif config.position_embedding_type == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.LayerNorm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_layer_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.embeddings_project = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        keep: Tensor | None,
    ) -> Tensor:
        """Embed (b, n) ids, or complete (b, n, `embedding_size` or d) token embeddings, to (b, n, d) states.

        Raises:
            ValueError: A table has no row for an id (on a CPU; an accelerator reports it by itself, later), or segments
                have no embeddings.
        """
        try:
            tokens = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            length = tokens.shape[1]
            if position_ids is None and self.position_embeddings is not None:
                every = torch.ones(1, length, dtype=torch.bool, device=tokens.device) if keep is None else keep
                position_ids = token_positions(every, self.first_position)
            states = tokens * self.scale if self.scale != 1.0 else tokens
            if self.period is not None:
                position_ids = repeated_positions(position_ids, self.first_position, self.period)
            if self.position_embeddings is not None:
                states = states + self.position_embeddings(position_ids + self.offset).to(states.dtype)
            if self.token_type_embeddings is not None:
                if token_type_ids is None:
                    token_type_ids = torch.zeros(1, length, dtype=torch.long, device=tokens.device)
                states = states + self.token_type_embeddings(token_type_ids)
            # All-zero ids, as many tokenizers return, are the same as none; traced, they cannot be read.
            elif token_type_ids is not None and not is_tracing(token_type_ids) and token_type_ids.any():
                raise ValueError(
                    f"`token_type_ids` contain {token_type_ids.max()}, but the model has no segment embeddings "
                    "(`type_vocab_size` is 0). Leave them out, or use a model with `type_vocab_size` above 0."
                )
        except IndexError:
            rows = None if position_ids is None else position_ids + self.offset
            raise self.missing_row(input_ids, rows, token_type_ids) from None
        # Masked before the norm, too: padding may hold anything, even NaN, which must not reach a state or a gradient.
        padding = None if keep is None else ~keep.unsqueeze(-1)
        states = states if padding is None else states.masked_fill(padding, 0.0)
        states = self.dropout(self.LayerNorm(states))
        states = states if self.embeddings_project is None else linear(self.embeddings_project, states)
        return states if padding is None else states.masked_fill(padding, 0.0)

    def missing_row(self, *given: Tensor | None) -> ValueError:
        """Return the error for token, position and segment ids, of which some have no row in their table."""
        tables = (self.word_embeddings, self.position_embeddings, self.token_type_embeddings)
        said = []
        for (name, advice), table, ids in zip(_TABLES.items(), tables, given, strict=True):
            rows = len(getattr(table, "weight", ()))
            if ids is not None and rows and (ids.min() < 0 or ids.max() >= rows):
                said.append(f"{name} run from {ids.min()} to {ids.max()}, but the table has {rows} rows. {advice}")
        return ValueError(" ".join(said))


# ---- models/adapters.py ----
#
# PEFT adapters in folders with the config of their model: where the base is, and what the adapter must hold.


_PLACE = ("cache_dir", "local_files_only", "token")


# Options that a config's `from_pretrained` uses up, but the weights need, too.
_SHARED = (*_PLACE, "force_download", "proxies", "trust_remote_code")


def base_of_adapter(
    cls: type[PreTrainedModel], source: str | os.PathLike | None, options: dict[str, Any]
) -> tuple[str | os.PathLike | None, dict[str, Any], set[str]]:
    """The base of an adapter, options of `from_pretrained` that put the adapter on it, and its tensors by name.

    The model gets the adapter's own config. Transformers would take the config from the base, whose head has other
    labels, or look for the base's weights beside the adapter's config. What is no adapter, or has no config or all
    weights, stays as it is, and so does a model in a subfolder.

    Raises:
        ImportError: peft is not installed.
        OSError: The adapter has no readable weights.
        ValueError: The class has no head, but the adapter's model had one; or the adapter names no base.
    """
    auto = options.get("adapter_kwargs") or {}  # of the Auto classes, which may have replaced the source
    adapter = auto.get("_adapter_model_path", source)
    place = {name: options[name] for name in _PLACE if options.get(name)}
    if options.get("subfolder"):  # not the adapter beside it
        auto = {name: value for name, value in auto.items() if name != "_adapter_model_path"}
        return adapter, {**options, "adapter_kwargs": auto}, set()
    place["revision"] = auto.get("revision") or options.get("revision")
    found = None if adapter is None else find_adapter_config_file(adapter, **place)
    if found is None or _has_weights(adapter):
        return source, options, set()
    if cached_file(adapter, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **place) is None:
        return source, options, set()
    if not is_peft_available():
        raise ImportError(f"{adapter} is an adapter, which needs the package peft: `pip install peft`.")
    config = options.get("config")
    if config is None:
        shared = {name: options[name] for name in _SHARED if name in options}
        wanted = {**options, "revision": place["revision"]}
        config, options = cls.config_class.from_pretrained(adapter, return_unused_kwargs=True, **wanted)
        options |= shared
    elif isinstance(config, PreTrainedConfig) and _is_of_base(config, cls, source, adapter):
        changes = _overrides(config, {**place, "revision": options.get("revision")})
        config = cls.config_class.from_pretrained(adapter, **place, **changes)
    with open(found, encoding="utf-8") as file:
        stored = json.load(file)
    base = stored.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{adapter} does not name its base model: save the base, and write its path into "
            "`base_model_name_or_path` of adapter_config.json."
        )
    # A collection of folders may be anywhere.
    beside = os.path.join(os.path.dirname(os.path.abspath(adapter)), os.path.basename(base))
    base = beside if os.path.isdir(adapter) and os.path.isdir(beside) and not os.path.isdir(base) else base
    tensors = adapter_tensors(adapter, place)
    start = f"{cls.base_model_prefix}."
    if not hasattr(cls, "base_model_class") and any(name.startswith(start) for name in tensors):
        raise ValueError(
            f"{adapter} is an adapter of a model with a head, which {cls.__name__} lacks: load it with the Auto "
            f"class of its head, or its base, {base}."
        )
    auto = {**auto, "_adapter_model_path": adapter, "revision": place["revision"]}
    return base, {**options, "config": config, "adapter_kwargs": auto, "revision": stored.get("revision")}, tensors


def _has_weights(source: str | os.PathLike) -> bool:
    """Whether a folder holds a whole model, perhaps in shards or as a variant, beside an adapter."""
    names = os.listdir(source) if os.path.isdir(source) else []
    kinds = (".safetensors", ".bin", ".index.json")
    return any(name.startswith(("model.", "pytorch_model.")) and name.endswith(kinds) for name in names)


def _is_of_base(
    config: PreTrainedConfig, cls: type[PreTrainedModel], source: str | os.PathLike, adapter: str | os.PathLike
) -> bool:
    """Whether a config was read from an adapter's base: by a user, or by an Auto class, which put it for the source."""
    is_replaced = config.name_or_path == str(source) != str(adapter)
    return bool(config.name_or_path) and (is_replaced or cls.__name__ not in (config.architectures or ()))


def _overrides(config: PreTrainedConfig, place: dict[str, Any]) -> dict[str, Any]:
    """What a user has changed in a base's config, with Transformers' names of options."""
    base = type(config).from_pretrained(config.name_or_path, **place)
    stock = base.to_dict()
    changed = {name: value for name, value in config.to_dict().items() if value != stock.get(name)}
    if (attention := config._attn_implementation) != base._attn_implementation:
        changed["attn_implementation"] = attention
    return changed


def adapter_tensors(adapter: str | os.PathLike, place: dict[str, Any]) -> set[str]:
    """The tensors of an adapter by the names that its model has for them.

    Raises:
        OSError: There is no such file, or it is damaged.
    """
    file = cached_file(adapter, "adapter_model.safetensors", _raise_exceptions_for_missing_entries=False, **place)
    if file is None:
        raise OSError(f"{adapter} has no adapter_model.safetensors. Save the adapter again with PEFT.")
    try:
        with safe_open(file, "pt") as tensors:
            return {name.removeprefix("base_model.model.") for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{file} is damaged ({error}). Save the adapter again.") from error


def refuse_random_head(
    model: PreTrainedModel, base: str | os.PathLike, tensors: set[str], options: dict[str, Any]
) -> None:
    """Refuse a head of which neither the base nor an adapter with these tensors has the weights.

    Args:
        model: with the adapter.
        base: the source of its base.
        tensors, options: from `base_of_adapter`.

    Raises:
        ValueError: Such a head.
    """
    name, start = type(model).__name__, f"{model.base_model_prefix}."
    place = {key: options[key] for key in (*_PLACE, "revision") if options.get(key)}
    config = model.config_class.get_config_dict(base, **place)[0]
    if model.base_model is model or name in (config.get("architectures") or ()):
        return
    wrapped = (key for key in model.state_dict() if not key.startswith(start) and "original_module" not in key)
    own = {key.replace(".modules_to_save.default", "").replace(".base_layer", "") for key in wrapped}
    random = own - tensors - model.all_tied_weights_keys.keys()
    if heads := {key.partition(".")[0] for key in random if "lora" not in key}:
        raise ValueError(
            f"{options['adapter_kwargs']['_adapter_model_path']} is an adapter without all weights of "
            f"{', '.join(sorted(heads))} of {name}, which would be random: load it with the Auto class of the head "
            "that it was trained with, or train it with these modules in `modules_to_save`."
        )


# ---- models/base.py ----
#
# Base classes shared by all models: loading and saving, input validation, and heads on a base model.


# Inputs of some model here, in the order in which a misspelt one is compared with them.
_INPUT_NAMES = (
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels", "cache"),
    *("use_cache", "logits_to_keep", "shift_labels", "start_positions", "end_positions", "num_items_in_batch"),
)


# Keywords of every transformers model, the option of flex attention, and what `generate` passes on for stop strings.
_OPTIONS = (*TransformersKwargs.__optional_keys__, "kernel_options", "tokenizer")


# What sentence-transformers' modules add to the inputs, and give to the model in the next pass.
_FOREIGN = ("token_embeddings", "all_layer_embeddings", "sentence_embedding", "token_weights_sum", "scores")


# What a pass of a model with a local window reads, see `ForwardContext`.
_READS = ("local_window", "read_slots")


_PACKED = (
    "texts packed into one row would share its memory. Pad them instead (`DataCollatorWithPadding`; in TRL, leave out "
    "`packing` and `padding_free`)."
)


_NO_CACHE = "the model is an encoder and has no cache."


_REFUSED_KEYWORDS = {
    "head_mask": "transformers 5 has no head masks.",
    "encoder_hidden_states": "the model has no cross-attention.",
    **dict.fromkeys(("cache", "past_key_values", "use_cache"), _NO_CACHE),
    **dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"), _PACKED),
}


@torch.compiler.assume_constant_result  # torch.compile cannot trace difflib
def _closest_input(name: str, outputs: tuple[str, ...]) -> str:
    known = [known for known in (*_INPUT_NAMES, *outputs) if known != name]
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


class BoundedMemoryPreTrainedModel(Recorded, PreTrainedModel):
    """Base class of all models: loading, saving and initialisation."""

    config: BoundedMemoryConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["TokenEmbeddings", "TransformerLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": TransformerLayer,
        "attentions": OutputRecorder(MemoryAttention, index=2),
    }

    auto_classes: tuple[str, ...] = ()  # that load the model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Transformers copies the file of a class with an `_auto_class`; `hub.py` writes the code of the package's own.
        cls._auto_class = None if is_ours(cls) else next(iter(cls.auto_classes), None)
        # With label smoothing, the Trainer compares logits with the next label only for classes that this table names.
        if "AutoModelForCausalLM" in cls.auto_classes:
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __new__(cls, *args: Any, **keywords: Any) -> "BoundedMemoryPreTrainedModel":
        """Refuse another architecture's config, and what `from_pretrained` passes on as the config has no such field.

        Raises:
            ValueError: The config is not the class's, or a keyword is neither a field nor a parameter of the class.
        """
        config, own = keywords.get("config", args[0] if args else None), cls.config_class
        # Not only `isinstance`: the code of a checkpoint has its own copy of the class.
        if isinstance(config, PreTrainedConfig) and not isinstance(config, own) and config.model_type != own.model_type:
            raise ValueError(
                f"{cls.__name__} needs a {own.__name__}, but got a {type(config).__name__}. Use a model class of that "
                "config, such as the Auto classes choose with `from_config`."
            )
        known = inspect.signature(cls.__init__).parameters if keywords else {}
        if not any(own.kind is own.VAR_KEYWORD for own in known.values()):
            cls.config_class.refuse_unknown({name: keywords[name] for name in keywords.keys() - known.keys()})
        return super().__new__(cls)

    def __init__(self, config: BoundedMemoryConfig, *args: Any, **kwargs: Any) -> None:
        if getattr(config, "add_cross_attention", False):
            raise ValueError(
                f"{type(self).__name__} has no cross-attention (`add_cross_attention=True`). Use the family's "
                "encoder-decoder (`...ForConditionalGeneration`), or another decoder."
            )
        config.validate_values()  # a field that `from_pretrained` changed
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Like `PreTrainedModel.from_pretrained`, but refuse a checkpoint whose weights are not the model's.

        A PEFT adapter with a `config.json` is loaded into its base model, with the labels of that config, and all
        weights are frozen. If `max_position_embeddings` is overridden, an encoder's positions are resized.

        Raises:
            ImportError: The source is an adapter, and peft is not installed.
            OSError: The source, or the base model or the weights of an adapter, cannot be found.
            ValueError: None of the base model's weights are in the checkpoint, none of the head's although it names
                this class, an adapter is for another head or names no base, positions cannot be resized, or a keyword
                is no field of the config.
        """
        source, kwargs, adapter = base_of_adapter(cls, pretrained_model_name_or_path, kwargs)
        config = kwargs.get("config")  # which the Auto classes read from the source, too
        is_own = not isinstance(config, PreTrainedConfig) or config.name_or_path == str(source)
        length, kwargs = cls.length_to_set(source, kwargs)
        verbosity = logging.get_verbosity()
        if source is not pretrained_model_name_or_path:
            logging.set_verbosity_error()  # transformers would call the head new, which the adapter holds
        try:
            model, info = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        except OSError as error:
            place = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
            if place is None:
                raise
            raise OSError(
                f"{place} is an adapter for {source}, which cannot be loaded. Put that model's folder beside the "
                "adapter's, or correct `base_model_name_or_path` in its adapter_config.json."
            ) from error
        finally:
            logging.set_verbosity(verbosity)
        if source is not None:
            model.refuse_random(source, set(info["missing_keys"]), is_own)
        if adapter:
            refuse_random_head(model, source, adapter, kwargs)
            model.requires_grad_(False)  # PEFT has frozen its matrices: biases and head would train without them
        if length is not None:
            model.resize_position_embeddings(length)
        return (model, info) if output_loading_info else model

    @classmethod
    def length_to_set(
        cls, source: str | os.PathLike | None, options: dict[str, Any]
    ) -> tuple[int | None, dict[str, Any]]:
        """The longest input to set after loading, if any, and the options of `from_pretrained` for that."""
        return None, options

    def refuse_random(self, source: str | os.PathLike, missing: set[str], is_own: bool) -> None:
        """Refuse a model whose base, or whose head as the checkpoint names it, lacks all weights.

        Args:
            source: what it was loaded from.
            missing: the names of its weights that the source lacks.
            is_own: whether its config is the source's, rather than that of an adapter that holds the head.

        Raises:
            ValueError: Such a model.
        """
        stored, names = self.config.architectures or [], self.state_dict().keys() - self.all_tied_weights_keys.keys()
        start = "" if self.base_model is self else f"{self.base_model_prefix}."
        base = {name for name in names if name.startswith(start)}
        name = type(self).__name__
        if base <= missing:
            held = f"{' and '.join(stored)}, which its own Auto class loads" if stored else "another model"
            raise ValueError(f"{source} has no weights of {name}, which would be random: it holds {held}.")
        if is_own and name in stored and names - base and names - base <= missing:
            raise ValueError(
                f"{source} has no weights of the head of {name}, although its config.json names this class "
                "(`architectures`). Save the whole model again, or correct that name to train a new head."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "initialise"):  # a luna_hf module with parameters or buffers unknown to transformers
            module.initialise(self.config)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Like `PreTrainedModel.save_pretrained`, plus the code that lets the Auto classes load without luna_hf."""
        # transformers registers only the saved class, but any head can be loaded from these files.
        self.config.auto_map = self.auto_map()
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """Map each Auto class to `file.Class`, for the model classes of the file that is saved beside the weights.

        That file has the models on the same base model. Transformers saves none for a class from `__main__`, or for a
        user's class that is not registered with `register_for_auto_class`.
        """
        classes, module = {"AutoConfig": cls.config_class}, cls.__module__
        if is_ours(cls) or (cls.is_remote_code() and module != "__main__"):
            base = getattr(cls, "base_model_class", cls)
            own = [each for each in vars(sys.modules[module]).values() if getattr(each, "__module__", None) == module]
            own = [each for each in own if getattr(each, "base_model_class", each) is base]
            classes |= {auto_class: each for each in own for auto_class in getattr(each, "auto_classes", ())}
        return {auto: f"{saved_file(each)}.{each.__name__}" for auto, each in classes.items()}

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Like `PreTrainedModel.resize_token_embeddings`.

        Raises:
            ValueError: No row would be left for the padding token; the model stays as it is.
        """
        padding, size = self.config.pad_token_id, new_num_tokens
        if size is not None and -(-size // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1) <= padding:
            raise ValueError(
                f"The vocabulary cannot be resized to {size} tokens, since padding is token {padding}. Set "
                "`config.pad_token_id` to a smaller one first."
            )
        return super().resize_token_embeddings(size, pad_to_multiple_of, mean_resizing)

    def get_position_embeddings(self) -> nn.Module | None:
        """The position table; `None` if there is none."""
        return self.base_model.embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Set `config.max_position_embeddings`, which limits no decoder; encoders also resize their table.

        Raises:
            ValueError: The number is below 1, or the attention has weights for each position.
        """
        trained, length = self.config.max_position_embeddings, new_num_position_embeddings
        reason = "a model needs at least 1" if length < 1 else length != trained and self.config.fixed_length()
        if reason:
            raise ValueError(f"The model cannot be resized from {trained} to {length} positions, since {reason}.")
        self.config.max_position_embeddings = length

    @classmethod
    def from_pretrained_encoder(
        cls, source: str | os.PathLike | PreTrainedModel, **options: Any
    ) -> "BoundedMemoryPreTrainedModel":
        """Warm-start an encoder from a trained one, such as RoBERTa, BERT, DistilBERT or ELECTRA; needs the package.

        Takes the arguments of `luna_hf.warm_start.warm_start`, which also returns the report: the weights of the
        encoder are kept, and in a masked-LM model those of the masked-LM head. New and unused parameters are logged.

        Raises:
            ImportError: luna_hf is not installed; the code in a checkpoint folder does not suffice.
            ValueError: `cls` is causal, the source cannot be read or mapped, or an option is invalid.
        """
        # Absolute and inside a `try`, so that transformers neither requires the package nor copies the file.
        try:
            from luna_hf.warm_start import warm_start
        except ImportError as error:
            raise ImportError(
                "`from_pretrained_encoder` needs luna_hf, not only a checkpoint's code: `pip install luna-hf`."
            ) from error
        model, made = warm_start(cls, source, **options)
        made.warn()
        return model

    @classmethod
    def from_roberta(
        cls, source: str | os.PathLike | PreTrainedModel, **options: Any
    ) -> "BoundedMemoryPreTrainedModel":
        """The earlier name of `from_pretrained_encoder`."""
        return cls.from_pretrained_encoder(source, **options)


class BaseModelMixin:
    """Shared by a family's encoder and decoder: embeddings, layers and input validation."""

    auto_classes = ("AutoModel",)
    attention_class: type[MemoryAttention]
    convolution_class: type[DepthwiseConvolution]
    own_keywords: tuple[str, ...] = ()  # keywords of `forward` besides those of every model

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        outputs = (f"output_{name}" for name in self._can_record_outputs)
        known = frozenset(("return_dict", *outputs, *_READS, *_OPTIONS, *_FOREIGN)) - _REFUSED_KEYWORDS.keys()
        self.known_keywords = known | set(self.own_keywords)
        self.embeddings = TokenEmbeddings(config)
        self.add_layers(config)
        self.gradient_checkpointing = False
        self.post_init()

    def add_layers(self, config: BoundedMemoryConfig) -> None:
        """Create the layers; a family overrides this to add modules beside them."""
        self.encoder = LayerStack(config, self.attention_class, self.convolution_class)

    def first_slot_states(self) -> Tensor | None:
        """Return the first layer's `slot_states`, see `MemoryAttention.write`."""
        return None

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embeddings.word_embeddings = value

    def check_keywords(self, keywords: dict[str, Any]) -> None:
        """Reject unknown and unsupported keywords; those that every transformers model accepts pass.

        Raises:
            ValueError: A keyword is unknown or not supported.
        """
        for name, value in keywords.items():
            if value is None or name in self.known_keywords:
                continue
            if name not in _REFUSED_KEYWORDS:
                outputs = tuple(f"output_{recorded}" for recorded in self._can_record_outputs)
                raise ValueError(f"The model has no input `{name}`.{_closest_input(name, outputs)}")
            if value is not False:  # switched off
                raise ValueError(f"`{name}` is not supported: {_REFUSED_KEYWORDS[name]}")
        if "local_window" in keywords or "read_slots" in keywords:
            self.check_reads(keywords.get("local_window"), keywords.get("read_slots"))
        if keywords.get("output_attentions") and "attentions" not in self._can_record_outputs:
            raise ValueError(
                f"`output_attentions` is not supported: a causal {self.config.model_type} model computes no attention "
                "weights. Leave it out."
            )

    def check_reads(self, window: int | None, slots: bool | None) -> None:
        """Reject a choice of window and slots that the model does not have, or that reads nothing.

        Raises:
            ValueError: The model has no local window, the window is too large, or both parts are left out.
        """
        if window is None and slots is None:
            return
        own = self.config.mixed_window()
        allowed = f"a pass reads a window of at most {own} tokens, slots, or both" if own else "neither can be given"
        if not own or not 0 <= (own if window is None else window) <= own or (window == 0 and slots is False):
            raise ValueError(
                f"`local_window` is {window} and `read_slots` {slots}, but with config.local_window="
                f"{self.config.local_window} {allowed}."
            )

    def check_positions(self, position_ids: Tensor | None, keep: Tensor | None) -> None:
        """Reject positions (b or 1, n) that fall between real tokens, as in packed texts; not while tracing.

        Raises:
            ValueError: The positions of a row fall.
        """
        if position_ids is None or position_ids.shape[-1] == 1 or is_tracing(position_ids) or position_ids.is_meta:
            return
        real = position_ids if keep is None else position_ids.masked_fill(~keep, position_ids.min())
        falls = position_ids < real.cummax(-1).values
        falls = falls if keep is None else falls & keep
        if falls.any():
            row, column = falls.reshape(-1, falls.shape[-1]).nonzero()[0].tolist()
            raise ValueError(f"`position_ids` fall at token {column} of row {row}, as in packed texts, but {_PACKED}")

    def check_shapes(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        with_past: bool = False,
        **by_token: Tensor | None,
    ) -> int:
        """Check the inputs' shapes and return their length; `with_past` also allows a mask over earlier tokens.

        Args:
            by_token: other inputs by name, (b, n) or broadcastable to it along the batch.

        Raises:
            ValueError: Not exactly one kind of input is given, it is empty or of the wrong type, or a shape does not
                match.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape
        if inputs_embeds is None and (len(shape) != 2 or input_ids.is_floating_point()):
            found = f"are {input_ids.dtype} of shape {tuple(shape)}"
            raise ValueError(f"`input_ids` must be integers of shape (batch, length), but {found}.")
        if inputs_embeds is not None and (len(shape) != 3 or shape[2] != self.config.embedding_width()):
            needed = f"(batch, length, {self.config.embedding_width()})"
            raise ValueError(f"`inputs_embeds` must have shape {needed}, but have shape {tuple(shape)}.")
        shape = shape[:2]
        if shape[0] == 0 or shape[1] == 0:
            raise ValueError(f"The input has no {'tokens (length 0)' if shape[0] else 'rows (batch size 0)'}.")
        for name, given in by_token.items():
            if given is not None and given.shape not in (shape, (1, shape[1]), shape[1:]):
                raise ValueError(f"`{name}` must have shape {tuple(shape)}, but has shape {tuple(given.shape)}.")
        fits = attention_mask is None or attention_mask.shape == shape
        if with_past and not fits:
            fits = (
                attention_mask.dim() == 2 and attention_mask.shape[0] == shape[0] and attention_mask.shape[1] > shape[1]
            )
        if not fits:
            raise ValueError(
                f"`attention_mask` must have shape {tuple(shape)} (batch, length), with 1 for tokens and 0 for "
                f"padding, but has shape {tuple(attention_mask.shape)}; masks over token pairs are not supported."
            )
        return shape[1]

    def tokens_to_keep(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return the padding mask (b, n), True for tokens; `None` if nothing is padded.

        Without an `attention_mask`, every `pad_token_id` is padding, as in the authors' code.

        Raises:
            ValueError: `attention_mask` is an additive mask.
        """
        if attention_mask is not None:
            if attention_mask.is_floating_point() and not is_tracing(attention_mask) and (attention_mask < 0).any():
                raise ValueError(
                    "`attention_mask` has negative entries, as in an additive mask. Use 1 for tokens and 0 for padding."
                )
            keep = attention_mask != 0
        elif input_ids is not None:
            keep = input_ids != self.config.pad_token_id
        else:
            return None
        return drop_if_full(keep)


class HeadMixin:
    """Shared by all heads: a base model under `base_model_prefix`, and an output class."""

    base_model_class: type[nn.Module]
    output_class: type[ModelOutput]
    # Tied weights and their sources; `{}` stands for the family's `base_model_prefix`.
    tied_weights: dict[str, str] = {}
    # Makes the Trainer pass `num_items_in_batch`; every loss here divides by it.
    accepts_loss_kwargs = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        prefix = getattr(cls, "base_model_prefix", "")
        tied = {name.format(prefix): source.format(prefix) for name, source in cls.tied_weights.items()}
        cls._tied_weights_keys = tied or None

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        # Computed here because torch.compile cannot trace `fields`.
        self.output_fields = tuple(field.name for field in fields(self.output_class))
        setattr(self, self.base_model_prefix, self.base_model_class(config))
        self.add_head(config)
        self.post_init()

    def make_output(self, outputs: ModelOutput, **own: Any) -> ModelOutput:
        """Return the head's output: its own fields, and those it shares with the base model's output."""
        for name in self.output_fields:
            own.setdefault(name, outputs.get(name))
        return self.output_class(**own)


# ---- models/encoder.py ----
#
# The encoder shared by all families, without a head.
#
# Each `...Mixin` implements a complete model; a family's class only names its parts.


class EncoderPreTrainedModel(BoundedMemoryPreTrainedModel):
    """Base class of all encoders: adds a position table of any length."""

    @classmethod
    def length_to_set(
        cls, source: str | os.PathLike | None, options: dict[str, Any]
    ) -> tuple[int | None, dict[str, Any]]:
        """The `max_position_embeddings` that a user or an adapter wants, if the weights have another.

        The model is loaded with that of its weights, and its positions are then resized.
        """
        config = options.get("config")
        given = isinstance(config, PreTrainedConfig)
        wanted = config.max_position_embeddings if given else options.get("max_position_embeddings")
        stored = {}
        if source is not None and wanted is not None:
            place = {name: value for name, value in options.items() if name not in ("trust_remote_code", "config")}
            with contextlib.suppress(OSError):  # a folder of weights alone
                stored, _ = cls.config_class.get_config_dict(source, **place)
        length = stored.get("max_position_embeddings", wanted)
        if length == wanted:
            return None, options
        if not given:
            return wanted, {**options, "max_position_embeddings": length}
        config = copy.deepcopy(config)
        config.max_position_embeddings = length
        return wanted, {**options, "config": config}

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Accept inputs of up to this number of tokens, in place, and set `config.max_position_embeddings`.

        Learned positions are repeated after the trained ones (`repeat_positions`), or cut; with a `position_period`,
        the table keeps its rows. Sinusoids are computed.

        Raises:
            ValueError: The number is below 1, the attention has weights for each position, or the table is not in
                memory (offloaded or sharded).
        """
        trained, table = self.config.position_rows(), None
        if new_num_position_embeddings != self.config.max_position_embeddings:
            table = self.get_position_embeddings()
        weight = getattr(table, "weight", None)
        if weight is not None and (len(weight) < trained or (weight.is_meta and hasattr(table, "_hf_hook"))):
            raise ValueError("The position table is sharded or offloaded. Resize it before you distribute the model.")
        super().resize_position_embeddings(new_num_position_embeddings)
        resize_table(table, trained, self.config.position_rows())


def resize_table(table: nn.Module | None, trained: int, length: int) -> None:
    """Resize a table of learned positions in place, from one number of positions to another; others need no change."""
    weight = getattr(table, "weight", None)
    if weight is not None:
        rows = repeat_positions(weight.detach(), table.num_embeddings - trained, length)
        table.weight, table.num_embeddings = nn.Parameter(rows, requires_grad=weight.requires_grad), len(rows)


# Keywords of the encoders' forward pass besides those of every model.
_OWN_KEYWORDS = (*BOUNDARIES, "max_length_q", "max_length_k", "unpad_inputs", "num_global_tokens")


class EncoderModelMixin(BaseModelMixin):
    """The encoder without a head, the base model of a family's task models."""

    auto_classes = ("AutoModel", "AutoModelForTextEncoding")
    convolution_class = DepthwiseConvolution
    own_keywords = _OWN_KEYWORDS
    one_text_per_row = False  # whether rows of several texts are refused, for a head or decoder that reads whole rows

    def __init__(self, config: BoundedMemoryConfig) -> None:
        for kind in ("is_decoder", "is_encoder_decoder"):
            if getattr(config, kind):
                name = type(self).__name__
                raise ValueError(f"{name} is an encoder, but the config has `{kind}=True`. Load it with AutoModel.")
        super().__init__(config)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (b, n) token ids.
            attention_mask: (b, n), 1 for tokens and 0 for padding on either side. Without it, every `pad_token_id` in
                `input_ids` is padding.
            token_type_ids: (b, n) segment ids, if the model has segment embeddings.
            position_ids: (b, n) rows of the position table; by default `config.first_position + t` for the t-th real
                token (from 0). Positions that begin at 0 are counted from there instead. Where they return to the row's
                first, the next text begins. Memories that depend on token order ignore them and use the order of the
                input.
            inputs_embeds: (b, n, d) token embeddings, instead of `input_ids`; before scaling, positions and LayerNorm.
            global_attention_mask: (b, n), 1 for tokens to mark, as in Longformer: every token reads them, and they read
                every token (`config.global_tokens_read_all`).

        Keyword Args:
            output_hidden_states, output_attentions, return_dict: as in Transformers. Attentions (eager only) are the
                read weights: (b, h, n, keys) over slots, marked tokens, selected tokens and window positions, in this
                order, as far as the layer has them; or (b, h, n, n) where every token is read. A token that is read as
                marked or selected has no weight in the window, and rows of marked tokens that read all others are zero.
                A family may record more.
            local_window, read_slots: for models with `config.local_window`. A smaller window for this
                pass, 0 for none; and `False` to read no slots.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: where the texts of a row begin, if it holds several.
                Each has its own memory. The output has the shape of the input, but packed states are (texts, l, d).
            unpad_inputs: overrides `config.unpad_inputs`.
            num_global_tokens: the largest number of marked tokens in a row, if known: compiled and
                exported models otherwise have `config.max_global_tokens` places for them.

        Raises:
            ValueError: A shape is wrong, the input is empty or longer than `max_position_embeddings`, `position_ids`
                fall within a text, or a keyword is unknown or not supported.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        hidden_states, slot_states, context = self.prepare_inputs(*inputs, kwargs)
        hidden_states, slot_states = self.encoder(hidden_states, slot_states, context)
        if isinstance(context, UnpaddedContext):
            hidden_states, slot_states = context.restore(hidden_states, slot_states)
        elif context.keep is not None and kwargs["unpad_inputs"] is not False:  # in every batch alike
            hidden_states = hidden_states.masked_fill(~context.keep.unsqueeze(-1), 0.0)
        return self.make_output(hidden_states, slot_states, context)

    def prepare_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        global_attention_mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, ForwardContext | UnpaddedContext]:
        """Check the arguments of `forward`, and decide all that is the same in every layer.

        Returns:
            The embedded tokens, (b, n, d), or (1, t, d) without padding; the first layer's `slot_states`, see
            `MemoryAttention.write`; and the context shared by all layers.

        Raises:
            ValueError: See `forward`.
        """
        self.check_keywords(keywords)
        if keywords.get("unpad_inputs") is None:
            keywords["unpad_inputs"] = self.config.unpad_inputs
        ids = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        longest = self.check_shapes(input_ids, inputs_embeds, attention_mask, **ids)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        keep, starts = self.tokens_to_keep(input_ids, attention_mask), None
        is_hidden_zero = keep is not None and keywords["unpad_inputs"] is not False
        if is_hidden_zero and input_ids is not None and attention_mask is not None:
            self.warn_of_hidden(input_ids, keep)
        marked = None if global_attention_mask is None else self.find_marked(inputs, global_attention_mask)
        may_hold_several = position_ids is not None
        for name in BOUNDARIES:
            may_hold_several = may_hold_several or keywords.get(name) is not None
        if may_hold_several:
            starts = self.find_texts(inputs, keep, position_ids, keywords)
            position_ids = self.table_positions(position_ids, keep)
        unpadded = None if keep is None and starts is None else self.unpad(inputs, keep, starts, keywords)
        longest, limit = longest if unpadded is None else unpadded.longest, self.config.max_position_embeddings
        if longest > limit and self.config.longest_input() is not None:
            raise ValueError(
                f"The input has {longest} tokens, but the model accepts at most {limit} (`max_position_embeddings`). "
                f"Pass `truncation=True, max_length={limit}` to the tokenizer or pipeline, or use a longer model."
            )
        options = {**keywords, "most_marked": keywords.get("num_global_tokens")}
        for name in _OWN_KEYWORDS:
            options.pop(name, None)
        if unpadded is None:
            hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
            return hidden_states, *self.begin(hidden_states, keep, marked, **options)
        if position_ids is None:
            position_ids = unpadded.positions + self.config.first_position
        else:
            position_ids = unpadded.select(position_ids)
            if ((position_ids[:, 1:] < position_ids[:, :-1]) & (unpadded.positions[:, 1:] > 0)).any():
                raise ValueError("`position_ids` fall within a text: count them up from each text's first token.")
        tokens = map(unpadded.select, (input_ids, inputs_embeds, token_type_ids, marked))
        input_ids, inputs_embeds, token_type_ids, marked = tokens
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, None)
        return hidden_states, *self.begin_unpadded(hidden_states, unpadded, marked, options)

    def begin(
        self, hidden_states: Tensor, keep: Tensor | None, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor | None, ForwardContext]:
        """Return the first layer's `slot_states` for (b, n, d) states, and the context shared by all layers."""
        context = self.make_context(hidden_states, keep, marked, options)
        slot_states = self.first_slot_states()
        return slot_states, self.attention_class.prepare(self.config, hidden_states, slot_states, context)

    def begin_unpadded(
        self, hidden_states: Tensor, unpadded: UnpaddedBatch, marked: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor | None, UnpaddedContext]:
        """Like `begin`, for an unpadded batch (1, t, d)."""
        slot_states, slots = self.text_slot_states(unpadded)
        marks = [None] * len(unpadded.buckets) if marked is None else unpadded.in_buckets(marked.squeeze(0))
        context, contexts = UnpaddedContext(unpadded, (), slots, unpadded.lengths), []
        for bucket, rows, mark in zip(unpadded.buckets, context.split(hidden_states, slot_states), marks, strict=True):
            own = self.make_context(rows[0], bucket.keep, mark, options)
            contexts.append(self.attention_class.prepare(self.config, *rows, own))
        return slot_states, context._replace(contexts=tuple(contexts))

    def make_context(
        self, states: Tensor, keep: Tensor | None, marked: Tensor | None, options: dict[str, Any]
    ) -> ForwardContext:
        """Return the context of (b, n, d) states, without the family's masks."""
        return make_encoder_context(self.config, states, keep, options, marked, self.attention_class.has_slots)

    def text_slot_states(self, unpadded: UnpaddedBatch) -> tuple[Tensor | None, tuple[int, ...] | None]:
        """Return the first layer's `slot_states` for an unpadded batch, and `UnpaddedContext.slots`."""
        return self.first_slot_states(), None

    def make_output(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext | UnpaddedContext
    ) -> BaseModelOutput:
        """Build the model's output from that of the last layer."""
        return BaseModelOutput(last_hidden_state=hidden_states)

    def warn_of_hidden(self, input_ids: Tensor, keep: Tensor) -> None:
        """Warn once of masked tokens (b, n) that are not padding: unlike in a BERT, their states are zero."""
        pad = self.config.pad_token_id
        if pad is not None and is_readable(keep) and ((input_ids != pad) & ~keep).any():
            logging.get_logger(__name__).warning_once(
                "`attention_mask` hides tokens that are not padding (`pad_token_id`). Their states are zero: pass "
                "1 for these tokens if you need states."
            )

    def find_marked(self, inputs: Tensor, global_attention_mask: Tensor) -> Tensor | None:
        """Return the marked tokens (b, n) of (b, n) or (b, n, d) inputs, or `None` if no token is marked.

        Raises:
            ValueError: The family has no marked tokens, or the mask has another shape.
        """
        if not self.config.reads_exact_tokens:
            raise ValueError(
                f"`global_attention_mask` is not supported: {self.config.model_type} models have no softmax over slots "
                "and window that marked tokens could join. Leave it out."
            )
        if global_attention_mask.shape != inputs.shape[:2]:
            raise ValueError(
                f"`global_attention_mask` must have the shape of the input, {tuple(inputs.shape[:2])}, but has shape "
                f"{tuple(global_attention_mask.shape)}."
            )
        marked = global_attention_mask != 0
        return marked if not is_readable(marked) or marked.any() else None

    def find_texts(
        self, inputs: Tensor, keep: Tensor | None, position_ids: Tensor | None, keywords: dict[str, Any]
    ) -> Tensor | None:
        """Return where the texts of (b, n) or (b, n, d) inputs begin, see `find_starts`.

        Raises:
            ValueError: A row holds several texts, and is read as one, or all are padding; or positions fall in a row
                that is one text.
        """
        markers = {name: keywords[name] for name in BOUNDARIES if keywords.get(name) is not None}
        starts = find_starts(inputs.shape[:2], keep, position_ids, markers)
        if starts is None:
            self.check_positions(position_ids, keep)
        elif self.one_text_per_row:
            raise ValueError(
                f"`{next(iter(markers), 'position_ids')}` marks several texts in a row, but what reads this encoder "
                "takes one text per row: pad the texts (DataCollatorWithPadding), whose padding is not computed."
            )
        elif keep is not None and not keep.any():
            raise ValueError("The rows hold several texts, but all tokens are padding.")
        return starts

    def unpad(
        self, inputs: Tensor, keep: Tensor | None, starts: Tensor | None, keywords: dict[str, Any]
    ) -> UnpaddedBatch | None:
        """Leave out the padding of a batch, or return `None` to compute its rows as they are.

        Args:
            inputs: (b, n) or (b, n, d).
            keep, starts: see `unpad_batch`.
            keywords: keyword arguments of `forward`, with its `unpad_inputs` or the config's.

        Raises:
            ValueError: Several texts in a row, and an input or output that only padded rows have.
        """
        wanted, needs_rows = keywords["unpad_inputs"], []
        if starts is None and wanted is False:
            return None
        if keywords.get("packed_states") is not None:
            needs_rows.append("packed_states")
        one_text = starts is not None and len(inputs) == 1 and keep is None  # whose states are those of its row
        for name in self._can_record_outputs:
            output = f"output_{name}"
            is_asked = keywords.get(output, getattr(self.config, output, False))
            if is_asked and not (one_text and name == "hidden_states"):
                needs_rows.append(output)
        if starts is not None and needs_rows:
            raise ValueError(f"`{needs_rows[0]}` needs one text per row: pad the texts (DataCollatorWithPadding).")
        if starts is None:
            # Eager attention is for looking at attention, row by row.
            is_automatic = wanted is None and self.config._attn_implementation != "eager"
            if needs_rows or not is_readable(keep) or not (wanted or is_automatic):
                return None
            if not wanted and is_watched(*self.children()):
                return None
        shape, window = inputs.shape[:2], keywords.get("local_window")
        border = whole_length(self.config, self.config.local_window if window is None else window)
        unpadded = unpad_batch(keep, starts, shape, inputs.device, self.config.hidden_size, border)
        if starts is not None:
            return unpadded
        has_empty_row = not unpadded.lengths.all()
        return None if has_empty_row or not (wanted or unpadded.cost < shape[0] * shape[1]) else unpadded

    def table_positions(self, position_ids: Tensor | None, keep: Tensor | None) -> Tensor | None:
        """Return rows of the position table for `position_ids` (1 or b, n), which may count from 0 instead.

        No token has row 0, so that positions from 0, as `DataCollatorWithFlattening` counts them, are no rows.

        Raises:
            ValueError: They start in between, at a row that no token has.
        """
        if position_ids is None:
            return None
        first = self.config.first_position
        real = position_ids if keep is None else position_ids.masked_fill(~keep, first)
        begin = real.amin(-1, keepdim=True)
        if is_readable(begin) and ((begin > 0) & (begin < first)).any():
            raise ValueError(f"`position_ids` start at {begin.max()}. Count them from 0, or from {first}.")
        return position_ids + (begin == 0) * first


# ---- models/encoder_heads.py ----
#
# The task heads of encoders, what they are made of, and their losses.
#
# Each `...Mixin` implements a complete model; a family's class only names its parts:
#
#     class LunaForMaskedLM(MaskedLMMixin, LunaPreTrainedModel):
#         base_model_class = LunaModel
#
# Every loss divides by `num_items_in_batch` if the Trainer passes it, so that gradient accumulation is equivalent to
# one large batch.


def classifier_dropout(config: BoundedMemoryConfig) -> nn.Dropout:
    """Create the dropout layer of a classification head."""
    p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if p is None else p)


class MaskedLMHead(nn.Module):
    """Masked-LM head as in RoBERTa: dense, activation, LayerNorm, and an output layer tied to the token embedding."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width = config.embedding_width()
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the bias of the output layer, a parameter that transformers does not initialise."""
        init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Compute logits: (..., d) to (..., vocab_size)."""
        with float32_products(states):
            return self.decoder(self.layer_norm(self.activation(self.dense(states))))


class TokenPooling(nn.Module):
    """Pool the token states to one vector per row, by `"cls"` or `"mean"`."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.pool = {"cls": first_kept, "mean": masked_mean}[config.classifier_pooling]

    def forward(self, outputs: ModelOutput, keep: Tensor | None) -> Tensor:
        """Pool the base model's outputs, given the padding mask (b, n), to (b, d)."""
        return self.pool(outputs.last_hidden_state, keep)


class ClassificationHead(nn.Module):
    """Head over a pooled state: dropout, dense, activation, dropout, output layer."""

    def __init__(self, config: BoundedMemoryConfig, num_labels: int) -> None:
        super().__init__()
        inner = config.classifier_hidden_size or config.hidden_size
        self.dropout = classifier_dropout(config)
        self.dense = nn.Linear(config.hidden_size, inner)
        self.activation = ACT2FN[config.classifier_activation]
        self.out_proj = nn.Linear(inner, num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute logits: (b, d) to (b, num_labels)."""
        states = self.activation(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(states))


def first_marked(keep: Tensor) -> Tensor:
    """Mark the first real token of every row: padding mask (b, n) to (b, n)."""
    return keep & (keep.long().cumsum(-1) == 1)


def question_marked(keep: Tensor, ends: Tensor, most: int) -> Tensor:
    """Mark the tokens before the first separator, the question's, given a padding mask (b, n).

    `ends` (b, n) is True for separators, or for all tokens from the one that ends the first text. Where the question
    has more than `most` tokens, or no second text follows, the first token is marked.
    """
    ended = (ends & keep).long().cumsum(-1) > 0
    # A single separator at the end leaves no second text.
    last = keep.long().cumsum(-1) == keep.sum(-1, keepdim=True)
    is_pair, question = (ended & keep & ~last).any(-1, keepdim=True), keep & ~ended
    return torch.where(is_pair & (question.sum(-1, keepdim=True) <= most), question, first_marked(keep))


def cross_entropy(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Cross-entropy of logits (..., classes) and labels (...), of which -100 are ignored, in float32 or wider.

    The mean over the labels, or the sum divided by `num_items_in_batch` if given.

    Raises:
        ValueError: Labels are no integers, have another shape, or (on a CPU) are no classes.
    """
    if labels.is_floating_point():
        raise ValueError(f"`labels` are {labels.dtype}, but classes are integers: convert them with `labels.long()`.")
    rows = logits.shape[:-1]
    if labels.numel() != rows.numel() or (len(rows) > 1 and labels.shape != rows):
        advice = " For several classes at once, pass floats." if labels.shape == logits.shape else ""
        raise ValueError(f"`labels` have shape {tuple(labels.shape)}, but must have {tuple(rows)}.{advice}")
    reduction, classes = "mean" if num_items_in_batch is None else "sum", logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    try:
        loss = F.cross_entropy(logits, labels.flatten().to(logits.device, torch.long), reduction=reduction)
    except IndexError:
        found = f"from {labels[labels != -100].min()} to {labels.max()}"
        raise ValueError(
            f"`labels` run {found}, but the model has the classes 0 to {classes - 1} (`num_labels`, or `vocab_size`); "
            "only -100 is ignored."
        ) from None
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def problem_of(labels: Tensor, config: BoundedMemoryConfig) -> str:
    """The `problem_type` that labels stand for.

    One output means regression, integer labels single-label, and float labels multi-label classification.
    """
    if config.num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


@torch.compiler.assume_constant_result
def kept_problem(config: BoundedMemoryConfig, problem: str) -> str:
    """`config.problem_type`, set to `problem` if it is `None`; a compiled graph does not depend on the field."""
    config.problem_type = config.problem_type or problem
    return config.problem_type


def classification_loss(
    logits: Tensor, labels: Tensor, problem: str, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Loss of a `problem_type`: regression (MSE), single-label (cross-entropy) or multi-label (BCE).

    Logits are (b, num_labels), labels (b,), or (b, num_labels) for multi-label classification and regression with
    several targets.

    Raises:
        ValueError: The shapes of labels and logits do not match, or there is no such `problem_type`.
    """
    if problem == "single_label_classification":
        return cross_entropy(logits, labels, num_items_in_batch)
    losses = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}
    if problem not in losses:
        known = ", ".join(("single_label_classification", *losses))
        raise ValueError(f"`problem_type` is {problem!r}, but must be one of {known}.")
    if labels.numel() != logits.numel():
        raise ValueError(
            f"`labels` have shape {tuple(labels.shape)}, but {problem} with {logits.shape[-1]} outputs needs "
            f"{tuple(logits.shape)}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits).view_as(logits)
    if num_items_in_batch is None:
        return losses[problem](logits, labels)
    return losses[problem](logits, labels, reduction="sum") / num_items_in_batch


class EncoderHeadMixin(HeadMixin):
    """A head on an encoder; each head implements `add_head`, `predict` and `head_loss`."""

    one_text_per_row = False  # whether the head reads whole rows, which must not hold several texts
    marks = "none"  # what `config.global_tokens="auto"` marks

    def __init__(self, config: BoundedMemoryConfig) -> None:
        if config.is_decoder:
            raise ValueError(
                f"{type(self).__name__} needs an encoder, but the config is a causal model's (`is_decoder=True`). "
                f"Load it with AutoModelForCausalLM, or without its head with AutoModel."
            )
        config.refuse_encoder_decoder(type(self).__name__)
        super().__init__(config)
        self.base_model.one_text_per_row = self.one_text_per_row

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput | SequenceClassifierOutput | MultipleChoiceModelOutput | TokenClassifierOutput:
        """Like `EncoderModelMixin.forward`, with a head.

        Args:
            labels: what to predict, see the class; a label of -100 is ignored.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            An `output_class` with `loss` if labels are given, and `logits`, see the class.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        logits, labels = self.predict(outputs, labels, *inputs)
        loss = None if labels is None else self.head_loss(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute logits from the base model's outputs; returns them and the labels of the loss."""
        raise NotImplementedError(f"{type(self).__name__} must implement `predict`.")

    def head_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Compute the loss: cross-entropy, unless the head has another."""
        return cross_entropy(logits, labels, num_items_in_batch)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        global_attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Run the base model; without a `global_attention_mask`, the head marks what `config.global_tokens` says."""
        marks = self.config.global_tokens if self.config.local_window and self.config.reads_exact_tokens else "none"
        marks = self.marks if marks == "auto" else marks
        if global_attention_mask is None and marks != "none":
            keep = self.base_model.tokens_to_keep(input_ids, attention_mask)
            if keep is None:
                keep = torch.ones_like(input_ids if inputs_embeds is None else inputs_embeds[..., 0]).bool()
            starts = self.base_model.find_texts(keep, keep, position_ids, kwargs)
            ends = self.text_ends(input_ids, token_type_ids) if marks == "question" and starts is None else None
            most = self.config.max_global_tokens
            global_attention_mask = first_marked(keep) if ends is None else question_marked(keep, ends, most)
            if starts is not None:  # several texts in a row
                global_attention_mask = global_attention_mask | (starts & keep)
            kwargs["num_global_tokens"] = 1 if ends is None else most
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return self.base_model(*inputs, global_attention_mask=global_attention_mask, return_dict=True, **kwargs)

    def text_ends(self, input_ids: Tensor | None, token_type_ids: Tensor | None) -> Tensor | None:
        """Return where the first text of a pair has ended, (b, n) boolean: separators, or tokens of another type."""
        end = self.config.eos_token_id if self.config.sep_token_id is None else self.config.sep_token_id
        ends = [input_ids == end] if input_ids is not None and isinstance(end, int) else []
        if token_type_ids is not None:
            second = token_type_ids != 0
            # Without ids, the separator is the last token of the first text.
            ends.append(second if ends else second | F.pad(second[:, 1:], (0, 1)))
        if not ends and not torch.compiler.is_compiling():
            logging.get_logger(__name__).warning_once(
                "The model cannot tell where the question ends, and marks its first token alone: set "
                "`model.config.sep_token_id` to the tokenizer's, or pass `token_type_ids`."
            )
        return reduce(torch.logical_or, ends) if ends else None


class MaskedLMMixin(EncoderHeadMixin):
    """Masked language modelling.

    `labels` are the token ids (b, n) to predict, `logits` (b, n, vocab_size). In training with `sparse_prediction`, the
    head runs only on labelled positions, and logits are (number of labels, vocab_size).
    """

    auto_classes = ("AutoModelForMaskedLM", "AutoModelForPreTraining")
    output_class = MaskedLMOutput
    tied_weights = {
        "lm_head.decoder.weight": "{}.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.lm_head = MaskedLMHead(config)

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, tied to the token embedding."""
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer, and the head's bias by the output layer's."""
        self.lm_head.decoder = new_embeddings
        self.lm_head.bias = new_embeddings.bias

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied weights; `lm_head.bias` is the output layer's bias even if the matrices are not tied."""
        tied = super().get_expanded_tied_weights_keys(all_submodels)
        return tied or {name: source for name, source in self._tied_weights_keys.items() if name.endswith("bias")}

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`."""
        states = outputs.last_hidden_state
        if labels is not None and self.training and self.config.sparse_prediction:
            labelled = labels != -100
            states, labels = states[labelled], labels[labelled]
        return self.lm_head(states), labels


class SequenceClassificationMixin(EncoderHeadMixin):
    """Classification of, or regression on, a whole sequence or pair of sequences.

    `labels` are class indices or values (b,), or (b, num_labels), see `classification_loss`; `logits` (b, num_labels).
    """

    auto_classes = ("AutoModelForSequenceClassification",)
    one_text_per_row = True
    marks = "first"
    output_class = SequenceClassifierOutput
    pooling_class: type[nn.Module] = TokenPooling

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.pooling = self.pooling_class(config)
        self.classifier = ClassificationHead(config, config.num_labels)

    def predict(
        self,
        outputs: ModelOutput,
        labels: Tensor | None,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        *inputs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`, from one pooled vector per row."""
        keep = self.base_model.tokens_to_keep(input_ids, attention_mask)
        return self.classifier(self.pooling(outputs, keep)), labels

    def head_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Compute the loss for `config.problem_type`, which is kept: pipelines decide by it what they show."""
        if torch.compiler.is_compiling():
            problem = kept_problem(self.config, problem_of(labels, self.config))
            return classification_loss(logits, labels, problem, num_items_in_batch)
        problem = self.config.problem_type or problem_of(labels, self.config)
        loss = classification_loss(logits, labels, problem, num_items_in_batch)  # raises if the labels do not fit
        self.config.problem_type = problem
        return loss


class MultipleChoiceMixin(EncoderHeadMixin):
    """Multiple choice: one score per choice, with a softmax over the choices.

    The inputs have an additional dimension, (b, choices, n) or (b, choices, n, d). `labels` are the indices of the
    correct choices (b,), `logits` (b, choices).
    """

    auto_classes = ("AutoModelForMultipleChoice",)
    one_text_per_row = True
    marks = "question"
    output_class = MultipleChoiceModelOutput
    pooling_class: type[nn.Module] = TokenPooling

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.pooling = self.pooling_class(config)
        self.classifier = ClassificationHead(config, 1)

    def encode(self, *inputs: Tensor | None, **kwargs: Any) -> ModelOutput:
        """Like `EncoderHeadMixin.encode`, with a row for each choice.

        Raises:
            ValueError: The input has no dimension for the choices.
        """
        ids = inputs[0]
        if ids is not None and ids.dim() != 3:
            raise ValueError(f"`input_ids` must have shape (batch, choices, length), but have {tuple(ids.shape)}.")
        return super().encode(*(None if tensor is None else tensor.flatten(0, 1) for tensor in inputs), **kwargs)

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`."""
        ids, mask = (None if tensor is None else tensor.flatten(0, 1) for tensor in inputs[:2])
        scores = self.classifier(self.pooling(outputs, self.base_model.tokens_to_keep(ids, mask)))
        num_choices = next(tensor for tensor in inputs if tensor is not None).shape[1]
        return scores.view(-1, num_choices), labels


class TokenClassificationMixin(EncoderHeadMixin):
    """Token classification: `labels` are class indices (b, n), `logits` (b, n, num_labels)."""

    auto_classes = ("AutoModelForTokenClassification",)
    output_class = TokenClassifierOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`."""
        return linear(self.classifier, self.dropout(outputs.last_hidden_state)), labels


class QuestionAnsweringMixin(EncoderHeadMixin):
    """Extractive question answering: start and end of the answer span."""

    auto_classes = ("AutoModelForQuestionAnswering",)
    one_text_per_row = True
    marks = "question"
    output_class = QuestionAnsweringModelOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = 2
        self.loss_type = "ForQuestionAnswering"  # also of subclasses with another name
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Like `EncoderModelMixin.forward`, with a head.

        Args:
            start_positions: (b,) first token of the answer; positions beyond the input are ignored by the loss.
            end_positions: (b,) last token of the answer.
            num_items_in_batch: number of rows in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if both positions are given; `start_logits` and `end_logits` (b, n), of padding -10,000.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        logits = linear(self.qa_outputs, outputs.last_hidden_state)
        if (keep := self.base_model.tokens_to_keep(input_ids, attention_mask)) is not None:
            logits = logits.masked_fill(~keep.unsqueeze(-1), -1e4)  # finite in sums, and in half precision
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
            )
        return self.make_output(outputs, loss=loss, start_logits=start_logits, end_logits=end_logits)


# ---- models/policy.py ----
#
# `generate(policy=...)`: a source that is known from the start, read as far as a policy has read it at each token.


def needed(policy: Any, written: Tensor) -> Tensor:
    """Ask a policy what it needs, and check the answer.

    Args:
        policy: see `EndAfterSource`.
        written: see `luna_hf.simultaneous.Policy.needed`.

    Raises:
        TypeError: It is no policy, or does not return integers of the shape of `written`.
        ValueError: It needs fewer tokens for a later target token.
    """
    if not hasattr(policy, "needed"):
        raise TypeError(f"{policy!r} is no policy. Pass `WaitK(3)`, or another one of `luna_hf.simultaneous`.")
    asked = torch.stack([written, written + 1])
    found = policy.needed(asked)
    if not isinstance(found, Tensor) or found.is_floating_point() or found.shape != asked.shape:
        raise TypeError(
            f"`needed` of {type(policy).__name__} must return integers in a tensor of the shape of `written`: round "
            "them, or use `torch.full_like(written, ...)` for a constant."
        )
    if (found[1] < found[0]).any():
        raise ValueError(f"`needed` of {type(policy).__name__} may not fall from one target token to the next.")
    return found[0]


# ---- families/luna/attention.py ----
#
# Luna's nested attention (Ma et al. 2021, section 3.1): pack the tokens into l slots, then unpack them again.
#
#     pack      Y_P = Attn(P, C, C)                 l queries over the tokens of the context C (C = X in an encoder)
#     unpack    Y_X = Attn(X, Y_P, Y_P) W_o         n queries over the l slots
#
# Packing writes the memory, unpacking reads it. Both are ordinary multi-head softmax attention, so both go through
# transformers' attention interface. The packed context has no output projection; W_o belongs to the layer
# (`attention.output.dense`, as in RoBERTa).
#
# Causal form (section 3.3): P does not depend on the tokens. It is a parameter of each layer, or in an encoder-decoder
# the packed states of the source (section 3.4), which change from layer to layer. With
# f(x, y, z)_t = x_t sum_{j<=t} y_j^T z_j / t,
#
#     A_pack   = omega(P W_pq (X W_pc)^T / sqrt(c))             omega: softplus or elu + 1, no softmax
#     A_unpack = softmax(f(X W_q / sqrt(c), X W_k, A_pack))     over the slots
#     Y        = f(A_unpack, A_pack, X W_v) W_o
#
# This is a causal memory (`ops/causal_memory.py`) written with weights A_pack and divided by the number of steps.
#
# With `pack_activation="exp"`, which is not in the paper, omega is exp and the sums are divided by the running sum of
# A_pack instead: a slot is then a softmax over the tokens so far, as in Luna's encoder. A slot can hold a single token,
# which a mean over all steps cannot.


class LunaMasks(NamedTuple):
    """Padding masks of the two attentions; `None` where every key may be read."""

    tokens: KeyMask | None
    slots: KeyMask | None


def slots_for(config: LunaConfig, tokens: Any) -> Any:
    """Return how many slots a row of so many tokens, a number or tensor, uses with dynamic projection, at most."""
    return (tokens + config.tokens_per_slot - 1) // config.tokens_per_slot


def valid_slots(config: LunaConfig, lengths: Tensor, num_slots: int) -> Tensor:
    """Dynamic projection: mask (b, l) of the slots in use; a row of t tokens uses its first `slots_for(config, t)`.

    Rows have lengths (b, 1); l is `num_slots`.
    """
    return torch.arange(num_slots, device=lengths.device) < slots_for(config, lengths)


class LunaProjections:
    """Query, key and value projections; with `tie_kv`, keys and values share one matrix."""

    def add_projections(self, config: LunaConfig) -> None:
        """Create the query, key and value projections."""
        width = config.hidden_size
        self.query = nn.Linear(width, width)
        if config.tie_kv:
            self.key_value = nn.Linear(width, width)
        else:
            self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def key_and_value(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project (b, n, d) states to keys and values, (b, h, n, c) each."""
        shape = (*states.shape[:-1], self.num_heads, self.head_size)
        if self.config.tie_kv:
            both = self.key_value(states).view(shape).transpose(1, 2)
            return both, both
        return self.key(states).view(shape).transpose(1, 2), self.value(states).view(shape).transpose(1, 2)


class LunaPackAttention(LunaProjections, Recorded):
    """Pack attention: the slots attend to the tokens of the context."""

    is_causal = False

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_projected_attention_heads or config.num_attention_heads
        self.head_size = config.hidden_size // self.num_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.add_projections(config)

    def forward(self, packed_query: Tensor, states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """Compute Y_P (b, l, d) from P (b, l, d) and (b, n, d) states; if eager, also the weights (b, h_p, l, n)."""
        shape = (*packed_query.shape[:-1], self.num_heads, self.head_size)
        query = self.query(packed_query).view(shape).transpose(1, 2)
        return attend_heads(self, query, *self.key_and_value(states), context.masks.tokens, **context.options)


class LunaAttention(LunaProjections, MemoryAttention):
    """A layer's pack and unpack attention, with the residual connection and LayerNorm of the packed states.

    The unpack projections belong to this module, under RoBERTa's names; the pack projections are in `pack`.
    """

    def __init__(self, config: LunaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.pack = LunaPackAttention(config)
        self.packed_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    @staticmethod
    def prepare(config: LunaConfig, states: Tensor, slot_states: Tensor, context: ForwardContext) -> ForwardContext:
        """Add the masks of tokens and slots to the context.

        The slot mask is `context.slot_keep` if given; otherwise dynamic projection derives it from the tokens. The slot
        states are the packed ones, (b, l, d).

        Raises:
            ValueError: `slot_states` is `None`.
        """
        if slot_states is None:
            raise ValueError("Luna needs packed states to write a memory: pass `slot_states`, (batch, slots, width).")
        slots = context.slot_keep
        if slots is None and config.dynamic_projection:
            batch, count = slot_states.shape[:2]
            if context.keep is not None or count > slots_for(config, states.shape[1]):
                slots = valid_slots(config, context.lengths, count).expand(batch, -1)
        slots = None if slots is None else drop_if_full(slots)
        masks = LunaMasks(
            tokens=make_key_mask(config, context.keep, queries=slot_states, keys=states),
            slots=make_key_mask(config, slots, queries=states, keys=slot_states),
        )
        return context._replace(slot_keep=slots, masks=masks)

    def write(self, states: Tensor, slot_states: Tensor, context: ForwardContext) -> Memory:
        """Pack (b, n, d) states into slots with the packed states (b, l, d), and update these for the next layer."""
        packed_context, slot_states = self.update_packed(states, slot_states, context)
        return Memory(
            [self.slot_memory(*self.key_and_value(packed_context), context, context.masks.slots)], slot_states
        )

    def write_whole(self, states: Tensor, slot_states: Tensor, context: ForwardContext) -> Memory:
        """Like `MemoryAttention.write_whole`; the packed states are updated where something reads them."""
        memory = super().write_whole(states, slot_states, context)
        if not context.updates_slots:
            return memory
        return memory._replace(slot_states=self.update_packed(states, slot_states, context)[1])

    def unused_parameters(self, slot_states: Tensor | None, context: ForwardContext) -> list[Tensor]:
        """Like `MemoryAttention.unused_parameters`."""
        unused = super().unused_parameters(slot_states, context)
        if context.updates_slots:
            return unused
        return [*unused, *self.pack.parameters(), *self.packed_layer_norm.parameters()]

    def update_packed(self, states: Tensor, slot_states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the packed context Y_P and the packed states for the next layer, (b, l, d) each."""
        queries = self.packed_layer_norm(slot_states) if self.config.norm_first else slot_states
        packed_context, _ = self.pack(queries, states, context)
        slot_states = slot_states + self.dropout(packed_context)
        return packed_context, slot_states if self.config.norm_first else self.packed_layer_norm(slot_states)


# ---- families/luna/modeling.py ----


@dataclass
class PackedOutput(ModelOutput):
    """Fields of the packed states, added to the outputs of Luna's models.

    Args:
        packed_hidden_states: packed states (b, l, d) after the embedding and after each layer, with
            `output_packed_hidden_states=True`.
        pack_attentions: pack weights (b, h_p, l, n) of each layer, with `output_pack_attentions=True` and eager
            attention. The usual `attentions` are the unpack weights (b, h, n, l).
        packed_states: what a later call can start from (b, l, d), with `output_packed_states=True`.
    """

    packed_hidden_states: tuple[Tensor, ...] | None = None
    pack_attentions: tuple[Tensor, ...] | None = None
    packed_states: Tensor | None = None


@dataclass
class LunaModelOutput(ModelOutput):
    """Output of `LunaModel`.

    Args:
        last_hidden_state: token states (b, n, d).
        packed_last_hidden_state: packed states (b, l, d), where l is `projection_length`, or with dynamic projection
            at most n / `tokens_per_slot`, rounded up, except in a traced, compiled or exported model. `None` with
            `softmax_length`, unless packed states are asked for (`output_packed_states`): short texts do not need them.
        packed_attention_mask: (b, l) long, 1 for slots in use: with dynamic projection, a row of t tokens uses only its
            first t / `tokens_per_slot` slots, rounded up, and the others are never read. `None` without dynamic
            projection.
        hidden_states: token states (b, n, d) after the embedding and after each layer.
        attentions: unpack weights (b, h, n, l) of each layer.
        packed_hidden_states: see `PackedOutput`.
        pack_attentions: see `PackedOutput`.
        packed_states: see `PackedOutput`.
    """

    last_hidden_state: Tensor | None = None
    packed_last_hidden_state: Tensor | None = None
    packed_attention_mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    packed_hidden_states: tuple[Tensor, ...] | None = None
    pack_attentions: tuple[Tensor, ...] | None = None
    packed_states: Tensor | None = None


@dataclass
class LunaMaskedLMOutput(PackedOutput, MaskedLMOutput):
    """`MaskedLMOutput` with the packed states."""


@dataclass
class LunaSequenceClassifierOutput(PackedOutput, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with the packed states."""


@dataclass
class LunaMultipleChoiceOutput(PackedOutput, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with the packed states."""


@dataclass
class LunaTokenClassifierOutput(PackedOutput, TokenClassifierOutput):
    """`TokenClassifierOutput` with the packed states."""


@dataclass
class LunaQuestionAnsweringOutput(PackedOutput, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with the packed states."""


class LunaPackedEmbeddings(Recorded):
    """The initial packed sequence P_0: a learned parameter shared by all rows, with LayerNorm and dropout."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        length, width = config.projection_length, config.hidden_size
        self.weight = nn.Parameter(torch.empty(length, width))
        self.scale = math.sqrt(width) if config.scales_embedding() else 1.0
        is_sinusoidal = config.position_embedding_type == "sinusoidal"
        self.positions = SinusoidalPositions(width) if is_sinusoidal else None
        self.LayerNorm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_layer_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialise(self, config: LunaConfig) -> None:
        """Initialise P_0 like the other embeddings."""
        init.normal_(self.weight, mean=0.0, std=config.initializer_range)

    def forward(self, batch: int, num_slots: int, keep: Tensor | None, packed_states: Tensor | None = None) -> Tensor:
        """Return P_0, (b, l, d) with l = `num_slots`; slots masked by `keep` (b, l) are zero.

        If an earlier call has left its `packed_states` (b, l, d), P_0 is these.
        """
        if packed_states is not None:
            return packed_states
        packed = self.weight[:num_slots]
        packed = packed * self.scale if self.scale != 1.0 else packed
        if self.positions is not None:
            packed = packed + self.positions(torch.arange(num_slots, device=packed.device)).to(packed.dtype)
        packed = self.dropout(self.LayerNorm(packed).expand(batch, -1, -1))
        return packed if keep is None else packed.masked_fill(~keep.unsqueeze(-1), 0.0)


class LunaPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the Luna encoders."""

    config: LunaConfig
    base_model_prefix = "luna"
    _no_split_modules = [*EncoderPreTrainedModel._no_split_modules, "LunaPackedEmbeddings"]
    _can_record_outputs = {
        **EncoderPreTrainedModel._can_record_outputs,
        "packed_hidden_states": [OutputRecorder(LunaPackedEmbeddings), OutputRecorder(TransformerLayer, index=1)],
        "pack_attentions": OutputRecorder(LunaPackAttention, index=1),
    }


class LunaModel(EncoderModelMixin, LunaPreTrainedModel):
    """The Luna encoder without a head; returns token states and packed states."""

    attention_class = LunaAttention
    own_keywords = (*EncoderModelMixin.own_keywords, "packed_states", "reads_packed_states")

    def add_layers(self, config: LunaConfig) -> None:
        """Create the layers, the embedding of P and, in a pre-norm model, P's final LayerNorm."""
        self.packed_embeddings = LunaPackedEmbeddings(config)
        super().add_layers(config)
        packed_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.packed_layer_norm = packed_norm if config.norm_first else nn.Identity()
        # Whether a head, or the caller without one, reads the packed states.
        self.reads_packed_states = not config.softmax_length

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        packed_states: torch.FloatTensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaModelOutput:
        """Like `EncoderModelMixin.forward`, with `output_packed_hidden_states` and `output_pack_attentions`.

        Args:
            packed_states: (b, l, d) the `packed_states` of an earlier call, from which P starts instead of the learned
                P_0. All slots are in use then, and a row without a token keeps what it is given.
            output_packed_states: keyword only; returns `packed_states` for a later call.
            reads_packed_states: keyword only; `False` if nothing reads the packed states that are returned, which may
                then be those of an earlier layer.

        Raises:
            ValueError: As in `EncoderModelMixin.forward`; also if `packed_states` have another shape, or a row holds
                several texts.
        """
        if kwargs.get("output_pack_attentions") and self.config._attn_implementation != "eager":
            raise ValueError(
                "`output_pack_attentions` needs eager attention, but the model uses "
                f'{self.config._attn_implementation}. Call `model.set_attn_implementation("eager")` first.'
            )
        wanted = kwargs.pop("output_packed_states", False)
        if wanted or packed_states is not None:
            kwargs["reads_packed_states"] = True
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        output = super().forward(*inputs, packed_states=packed_states, return_dict=True, **kwargs)
        if packed_states is not None:
            if output.packed_attention_mask is not None:
                output.packed_attention_mask = torch.ones_like(output.packed_attention_mask)
            keep = self.tokens_to_keep(input_ids, attention_mask)
            if keep is not None:
                packed = output.packed_last_hidden_state
                has_tokens = keep.any(-1)[:, None, None]
                output.packed_last_hidden_state = torch.where(has_tokens, packed, packed_states.to(packed.dtype))
        if wanted:
            output.packed_states = output.packed_last_hidden_state
        return output

    def begin(
        self, hidden_states: Tensor, keep: Tensor | None, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ForwardContext]:
        """Return P_0 (b, l, d), the first layer's packed states, and the context shared by all layers."""
        (batch, length, width), given = hidden_states.shape, options.pop("packed_states", None)
        context = self.make_context(hidden_states, keep, marked, options)
        num_slots = self.config.projection_length
        if given is not None:
            if given.shape != (batch, num_slots, width):
                raise ValueError(
                    f"`packed_states` must have shape {(batch, num_slots, width)}, but have {tuple(given.shape)}. Take "
                    f"them from a call with at least {num_slots * self.config.tokens_per_slot} tokens."
                )
            given = given.to(hidden_states.dtype)
            context = context._replace(slot_keep=torch.ones(given.shape[:2], dtype=torch.bool, device=given.device))
        elif self.config.dynamic_projection:
            # Slots beyond the padded length would be masked in every row, so they can be dropped.
            if not is_tracing(hidden_states):
                num_slots = min(num_slots, slots_for(self.config, length))
            else:  # taking the smaller number would specialise a graph to one side
                used = valid_slots(self.config, context.lengths, num_slots).expand(batch, -1)
                context = context._replace(slot_keep=used)
        packed_queries = hidden_states[:, :1].expand(-1, num_slots, -1)  # a stand-in: masks need only P's shape
        context = self.attention_class.prepare(self.config, hidden_states, packed_queries, context)
        return self.packed_embeddings(batch, num_slots, context.slot_keep, given), context

    def make_context(
        self, states: Tensor, keep: Tensor | None, marked: Tensor | None, options: dict[str, Any]
    ) -> ForwardContext:
        """Like `EncoderModelMixin.make_context`; packed states that nothing reads need not be updated."""
        options = dict(options)
        asked = options.pop("reads_packed_states", self.reads_packed_states)
        for name in ("output_packed_hidden_states", "output_pack_attentions"):
            asked = asked or options.get(name, getattr(self.config, name, False))
        context = make_encoder_context(self.config, states, keep, options, marked)
        return context._replace(updates_slots=asked)

    def text_slot_states(self, unpadded: UnpaddedBatch) -> tuple[Tensor, tuple[int, ...]]:
        """Return P_0 for every text, in as many slots as padded rows would have, and the slots of each bucket."""
        num_slots, slots, keep = self.config.projection_length, None, None
        if self.config.dynamic_projection:
            num_slots = min(num_slots, slots_for(self.config, unpadded.longest))
            slots = [min(num_slots, slots_for(self.config, bucket.length)) for bucket in unpadded.buckets]
            keep = valid_slots(self.config, unpadded.lengths.sort(dim=0).values, num_slots)
        texts = len(unpadded.lengths)
        return self.packed_embeddings(texts, num_slots, keep), tuple(slots or [num_slots] * len(unpadded.buckets))

    def make_output(
        self, hidden_states: Tensor, slot_states: Tensor, context: ForwardContext | UnpaddedContext
    ) -> LunaModelOutput:
        """Return the output with token states and packed states."""
        # A loss uses one of them; the last layer's parameters that serve only the other need a gradient, too.
        packed = self.packed_layer_norm(slot_states)
        if torch.is_grad_enabled():
            hidden_states, packed = join_gradients(hidden_states, packed)
        # Not `context.slot_keep`, which is `None` if nothing is padded: output fields must not depend on the data.
        slots = None
        if self.config.dynamic_projection:
            slots = valid_slots(self.config, context.lengths, packed.shape[1]).long().expand(packed.shape[0], -1)
        own = context.contexts[0] if isinstance(context, UnpaddedContext) else context
        if self.config.softmax_length and not own.updates_slots:
            packed = slots = None
        return LunaModelOutput(
            last_hidden_state=hidden_states, packed_last_hidden_state=packed, packed_attention_mask=slots
        )


def masked_max(states: Tensor, keep: Tensor | None) -> Tensor:
    """Maximum over the kept entries, or zeros if nothing is kept: (b, n, d) to (b, d)."""
    if keep is None:
        return states.amax(1)
    pooled = states.masked_fill(~keep.unsqueeze(-1), torch.finfo(states.dtype).min).amax(1)
    return pooled.masked_fill(~keep.any(-1, keepdim=True), 0.0)


class LunaPooling(nn.Module):
    """Pool the token states or the packed states to one vector per row (paper, Table 3)."""

    is_causal = False

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        self.config = config
        self.kind = config.classifier_pooling
        width = config.hidden_size
        if self.kind in ("cls", "mean"):
            self.tokens = TokenPooling(config)
        elif self.kind == "packed_max":
            self.in_proj = nn.Linear(width, width)
        elif self.kind == "packed_attention":
            self.attention_dropout = config.attention_probs_dropout_prob
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.output = nn.Linear(width, width)
            self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, outputs: LunaModelOutput, keep: Tensor | None) -> Tensor:
        """Pool the base model's outputs, given the padding mask (b, n), to (b, d)."""
        if self.kind in ("cls", "mean"):
            return self.tokens(outputs, keep)
        packed, slots = outputs.packed_last_hidden_state, outputs.packed_attention_mask
        slots = None if slots is None else drop_if_full(slots.bool())
        if self.kind == "packed_max":
            return masked_max(self.in_proj(packed), slots)
        if self.kind == "packed_mean":
            return masked_mean(packed, slots)
        first = first_kept(outputs.last_hidden_state, keep).unsqueeze(1)  # (b, 1, d)
        mask = make_key_mask(self.config, slots, queries=first, keys=packed)
        sides = (self.query(first), self.key(packed), self.value(packed))
        pooled, _ = attend_heads(self, *(split_heads(side, self.config.num_attention_heads) for side in sides), mask)
        return self.LayerNorm(self.output(pooled)).squeeze(1)


class LunaHeadMixin:
    """A head on Luna's token states, or on its packed states."""

    def add_head(self, config: LunaConfig) -> None:
        """Create the head's modules; only some of them read the packed states."""
        super().add_head(config)
        pooling = getattr(self, "pooling", None)
        self.luna.reads_packed_states = pooling is not None and pooling.kind.startswith("packed")


class LunaForMaskedLM(LunaHeadMixin, MaskedLMMixin, LunaPreTrainedModel):
    """Luna with a masked language modelling head."""

    base_model_class = LunaModel
    output_class = LunaMaskedLMOutput


class LunaForSequenceClassification(LunaHeadMixin, SequenceClassificationMixin, LunaPreTrainedModel):
    """Luna with a sequence classification or regression head."""

    base_model_class = LunaModel
    pooling_class = LunaPooling
    output_class = LunaSequenceClassifierOutput


class LunaForMultipleChoice(LunaHeadMixin, MultipleChoiceMixin, LunaPreTrainedModel):
    """Luna with a multiple-choice head, for tasks such as RACE and CommonsenseQA."""

    base_model_class = LunaModel
    pooling_class = LunaPooling
    output_class = LunaMultipleChoiceOutput


class LunaForTokenClassification(LunaHeadMixin, TokenClassificationMixin, LunaPreTrainedModel):
    """Luna with a token classification head."""

    base_model_class = LunaModel
    output_class = LunaTokenClassifierOutput


class LunaForQuestionAnswering(LunaHeadMixin, QuestionAnsweringMixin, LunaPreTrainedModel):
    """Luna with a span head for extractive question answering."""

    base_model_class = LunaModel
    output_class = LunaQuestionAnsweringOutput
