# luna_hf 0.2.0. SPDX-License-Identifier: Apache-2.0
# Joined from the package's modules by `save_pretrained`; changes belong there.

"""Luna models (Ma et al., "Luna: Linear Unified Nested Attention", NeurIPS 2021, arXiv 2106.01540).

Through every layer of an encoder pass the tokens X and a packed sequence P of fixed length. This file
has the embedding of P, the base models and the heads; the attention is in `attention.py`.

In an encoder-decoder (section 3.4) the packed states of the source are the queries with which the decoder's causal
attention packs the target, and with which its cross-attention packs the source again; this updates them for the next
layer. They do not depend on the target.
"""

import difflib
import inspect
import json
import math
import os
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from functools import partial
from functools import reduce
from typing import Any
from typing import NamedTuple
from typing import NoReturn

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
from transformers import GenerationConfig
from transformers import GenerationMixin
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerationMode
from transformers.generation import MaxLengthCriteria
from transformers.generation import StoppingCriteriaList
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import CONFIG_NAME
from transformers.utils import TransformersKwargs
from transformers.utils import cached_file
from transformers.utils import find_adapter_config_file
from transformers.utils import is_peft_available
from transformers.utils import is_torchdynamo_compiling
from transformers.utils import is_torchdynamo_exporting
from transformers.utils import is_tracing
from transformers.utils import logging
from transformers.utils import output_capturing
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple
from transformers.utils.generic import maybe_autocast
from transformers.utils.generic import merge_with_config_defaults
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


def project_heads(layer: nn.Module, states: Tensor, num_heads: int) -> Tensor:
    """Apply a linear layer to (b, n, d) states and split the result into heads (b, h, n, c)."""
    projected = layer(states)
    return projected.view(*projected.shape[:-1], num_heads, projected.shape[-1] // num_heads).transpose(1, 2)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, computed in float32 where the CPU would have to emulate their half-precision dtype."""
    if left.dtype not in SLOW_CPU_DTYPES or not multiplies_in_float32(left, right):
        return torch.matmul(left, right)
    return torch.matmul(left.float(), right.float()).to(left.dtype)


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


def weight_shares(weights: Tensor, dim: int) -> Tensor:
    """Divide weights by the sum of their absolute values over the slots, dimension `dim`; zeros stay zero."""
    weights = weights.abs()
    return weights / weights.sum(dim, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


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

    def layer_cache(self, layer_idx: int) -> CacheLayerMixin | None:
        """Return a layer's cache, or `None` without a cache."""
        return None if self.cache is None else self.cache.layers[layer_idx]


def token_ranks(keep: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Index of each token among its row's real tokens, (b, n) long; (1, n) if nothing is padded.

    Padding takes the rank of the real token to its left, or 0 if there is none.
    """
    if keep is None:
        return torch.arange(length, device=device)[None]
    return (keep.long().cumsum(-1) - 1).clamp(min=0)


def leading_padding(keep: Tensor) -> Tensor:
    """Padding before the first real token of a row, (b, n), from the mask of real tokens (b, n)."""
    return keep.long().cumsum(-1) == 0


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


def causal_convolution(states: Tensor, weight: Tensor) -> Tensor:
    """Convolve each token and the taps - 1 tokens before it: (b, taps - 1 + n, d) to (b, n, d).

    The states begin with those before the first token. The last tap of the weight (d, taps) is at the token itself.
    """
    return _convolve(states, weight)


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


def recomputed(function: Callable[..., Any], states: Tensor, *inputs: Any, module: nn.Module | None = None) -> Any:
    """Compute `function(states, *inputs)`, such that only the inputs are kept, if `may_recompute(states)`."""
    if not torch.is_grad_enabled() or not may_recompute(states):
        return function(states, *inputs)
    return save_inputs(function, states, *inputs, module=module)


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

    def in_buckets(self, states: Tensor) -> list[Tensor]:
        """Split what belongs to the tokens, (t, ...), into the rows of every bucket; padding holds a token's."""
        places, parts, first = states.index_select(0, self.gather), [], 0
        for rows, length, _ in self.buckets:
            parts.append(places[first : first + rows * length].view(rows, length, *states.shape[1:]))
            first += rows * length
        return parts


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

    @classmethod
    def of_decoder(cls, key: Tensor, value: Tensor, keep: Tensor | None) -> "SlotMemory":
        """Let each token read the tokens up to itself (b, h, n, c) that a mask (b, n) keeps; without any, itself."""
        causal = torch.ones(1, key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        if keep is not None:
            causal = causal & keep[:, None]
            empty = ~causal.any(-1, keepdim=True)
            causal = causal | empty & torch.eye(key.shape[2], dtype=torch.bool, device=key.device)
        return cls(key, value, query_bias=causal[:, None])

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

    @classmethod
    def of_decoder(
        cls, key: Tensor, value: Tensor, window: int, context: ForwardContext, cache: Any, prefix: str = ""
    ) -> "WindowMemory":
        """Return what new tokens read, and push them to the queue in the cache (Peng et al. 2022, section 3.3).

        Args:
            key, value: (b, h, n, c) keys and values of the new tokens.
            window: number of tokens that each token reads, including itself.
            context: context of the forward pass.
            cache: the layer's `MemoryCacheLayer`, or `None`.
            prefix: of the names of the queue's tensors in the cache, beside other states.
        """
        (batch, heads, length, size), keep, device = key.shape, context.keep, key.device
        names = (f"{prefix}key", f"{prefix}value")
        if cache is not None:  # newest last; zeros where there were fewer tokens
            zeros = key.new_zeros(batch, heads, window, size)
            queue = [cache.states.get(name, zeros).to(key.dtype) for name in names]
            if length == 1:
                pushed = [torch.cat(pair, dim=2)[:, :, 1:] for pair in zip(queue, (key, value), strict=True)]
                if keep is not None:  # padding is not pushed
                    real = keep[:, None, :, None]
                    pushed = [torch.where(real, new, old) for new, old in zip(pushed, queue, strict=True)]
                cache.write(**dict(zip(names, pushed, strict=True)))
                return cls(*pushed, _filled(window, context.ranks + 1), window, causal=True, is_step=True)
        ranks = None if keep is None else token_ranks(keep, length, device)
        # Real tokens move to the front, so that no padding lies between them.
        key, value = (move_to_ranks(states, ranks, keep) for states in (key, value))
        real = None if keep is None else torch.arange(length, device=device) < keep.sum(1, keepdim=True)
        order = {"ranks": ranks, "keep": keep, "ordered": True, "causal": True}
        if cache is None:
            return cls(key, value, real, window, **order).for_readers(context.readers)
        real = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
        key, value = (torch.cat(pair, dim=2) for pair in zip(queue, (key, value), strict=True))
        # The last real tokens, of the queue and the new ones, stay in the cache.
        last = real.sum(1, keepdim=True) + torch.arange(window, device=device)
        last = last[:, None, :, None].expand(-1, heads, -1, size)
        cache.write(**{name: states.gather(2, last) for name, states in zip(names, (key, value), strict=True)})
        real = torch.cat([_filled(window, context.before).expand(batch, -1), real], dim=1)
        return cls(key, value, real, window, earlier=window, **order).for_readers(context.readers)

    def for_readers(self, places: Tensor | None) -> "WindowMemory":
        """Return a causal window with what tokens at some places (b, q) read, which write nothing; see `Readers`."""
        if places is None:
            return self
        last = self.keep.long().cumsum(1).gather(1, places) + self.earlier  # the place behind the newest token
        found = last.unsqueeze(-1) + torch.arange(-self.window, 0, device=places.device)
        inside = found.clamp(min=0)  # (b, q, w)
        rows = torch.arange(places.shape[0], device=places.device)[:, None, None]
        real = (found >= 0) & self.real[rows, inside]
        key, value = (states.transpose(1, 2)[rows, inside].movedim(3, 1) for states in (self.key, self.value))
        return self._replace(readers=Readers(places, key, value, real))

    def logits(self, query: Tensor, window: int) -> Tensor:
        """Compute the logits of a causal window alone, to be read beside something else; see `read`.

        Args:
            query: (b, h, n, c).
            window: number of tokens to read, the latest of the w; the others get the lowest logit.

        Returns:
            (b, h, n, w), the query's own token last.
        """
        query = query * query.shape[-1] ** -0.5
        if self.is_step:
            logits = torch.matmul(query, self.key.transpose(-1, -2))
            logits = logits.masked_fill(~self.real[:, None, None], torch.finfo(logits.dtype).min)
        else:
            states = self.put_in_order(query)
            rows, places = states.shape[0], states.shape[2]
            part = self.in_blocks(self.window)
            logits = torch.matmul(query_blocks(states, self.window), part.gather(part.key).transpose(-1, -2))
            mask = join_masks([part.terms], [logits.shape[-1]], logits)
            logits = window_weights(logits.masked_fill(~mask, torch.finfo(logits.dtype).min), self.window)
            logits = self.put_back(join_blocks(logits.transpose(1, 2), rows, places)).transpose(1, 2)
            if self.readers is not None:
                own = torch.matmul(self.readers.key, self.readers.take(query).unsqueeze(-1)).squeeze(-1)
                own = own.masked_fill(~self.readers.real[:, None], torch.finfo(logits.dtype).min)
                logits = self.readers.put(logits, own)
        unread = torch.arange(logits.shape[-1], 0, -1, device=logits.device) > window
        return logits.masked_fill(unread, torch.finfo(logits.dtype).min)

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


def _filled(window: int, tokens: Tensor) -> Tensor:
    """Mask the filled end of a queue: number of tokens so far (b or 1, 1) to (b or 1, w)."""
    return torch.arange(window, 0, -1, device=tokens.device) <= tokens


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
    def rotary_size(config: BoundedMemoryConfig) -> int:
        """Return the number of entries of each head that rotary positions rotate."""
        return config.hidden_size // config.num_attention_heads

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


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Apply rotary positions: rotate entries i and i + c / 2 of each head (b, h, n, c) by the token's i-th angle.

    The product of two states rotated so, with the result (b or 1, n, 2, c / 2) of `rotation`, depends on their relative
    position.
    """
    cos, sin = rotation.unsqueeze(1).to(states.dtype).unbind(-2)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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


# ---- layers/cache.py ----
#
# The decoding state of causal models: a transformers `Cache` of constant size.


# States within that of a decoder.
_PARTS = ("source", "written")


# Name of the saved tensor that tells which models can load a state.
_MADE_FOR = "made_for"


# Prefix of the names of what a decoder keeps of the source.
SOURCE = "source_"


class MemoryCacheLayer(CacheLayerMixin):
    """State of one layer: named tensors with the batch as their first dimension.

    Without gradients, tensors are updated in place while their shapes stay the same, because a compiled decoding step
    needs them at fixed addresses. Running sums are float32 whatever the model's dtype.
    """

    is_croppable = False  # tokens cannot be removed from a sum
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Tensor] = {}
        # Tensors that do not depend on the input, kept from step to step, and the keys that they are valid for.
        self.constants: dict[str, Tensor] = {}
        self.constant_keys: dict[str, object] = {}

    def write(self, **states: Tensor | None) -> None:
        """Replace the named tensors; `None` leaves one unchanged."""
        may_overwrite = not torch.is_grad_enabled()  # no backward pass needs the old tensor
        # Outside of inference mode, its tensors cannot be written; a compiler cannot trace the question.
        any_tensor = is_torchdynamo_compiling() or torch.is_inference_mode_enabled()
        for name, state in states.items():
            if state is None:
                continue
            old = self.states.get(name)
            fits = old is not None and old.shape == state.shape and old.dtype == state.dtype and not old.requires_grad
            if may_overwrite and fits and (any_tensor or not old.is_inference()):
                old.copy_(state)
            else:
                self.states[name] = state if state.requires_grad else _own(state)
        self.is_initialized = True

    def lazy_initialization(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Do nothing: the first `write` creates the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> None:
        """Not supported: the state does not consist of keys and values.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("A MemoryCache holds no keys and values and works only with luna_hf models.")

    def get_seq_length(self) -> int:
        """Return 0: lengths are counted by `MemoryCache`, not per layer."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask, which covers only the new tokens."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1, for no maximum."""
        return -1

    def reset(self) -> None:
        """Discard the state."""
        self.__init__()

    def detach(self) -> None:
        """Cut the state off from the graph of gradients, in place."""
        self.states = {name: _own(state) for name, state in self.states.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, for beam search."""
        self.write(**{name: state.index_select(0, beam_idx.to(state.device)) for name, state in self.states.items()})

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.write(**{name: state.repeat_interleave(repeats, dim=0) for name, state in self.states.items()})

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index."""
        self.write(**{name: state[indices.to(state.device)] for name, state in self.states.items()})


def _own(state: Tensor) -> Tensor:
    # Copied, because a view would keep the larger tensor behind it in memory.
    state = state.detach().clone(memory_format=torch.contiguous_format)
    if not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(state)
    return state


class MemoryCache(Cache):
    """Decoding state of a causal model, its `cache`; as large after 16 tokens as after 16,000.

    That of an encoder-decoder also contains the memory that the source was written to, which is as large for 16 source
    tokens as for 16,000.

    `generate` creates one and returns it with `return_dict_in_generate=True`. Create one to carry the state from call
    to call:

    ```python
    >>> cache = MemoryCache(model.config)
    >>> with torch.no_grad():
    ...     for part in input_ids.split(512, dim=1):
    ...         logits = model(part, cache=cache).logits
    ```

    With gradients, a backward pass reaches back to the first token. `detach` ends it at the last `detach`. A state
    belongs to the weights that it was made with.

    Args:
        config: the model's configuration.
        compileable: whether `generate` may compile the decoding step, as with `cache_implementation="static"`.
    """

    is_unfinished = False  # whether a pass has begun, and has not ended

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        self.made_for_source = None
        if config.is_encoder_decoder and not config.is_decoder:
            self.made_for_source = config.encoder_part() if config.source_is_causal else None
            config = config.decoder_part()
        super().__init__(layers=[MemoryCacheLayer() for _ in range(config.num_hidden_layers)])
        self.compileable = compileable
        self.made_for = config
        # Input columns and real tokens so far, and a checksum of their ids, per row; they belong to no layer.
        self.rows = MemoryCacheLayer()
        # Where the source is causal: the states of its encoder, and of the cross-attentions that its tokens write to.
        self.source: MemoryCache | None = None
        self.written: MemoryCache | None = None

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the decoding step."""
        return self.compileable

    @property
    def is_initialized(self) -> bool:
        """Whether any token has been processed."""
        return "tokens" in self.rows.states

    @property
    def has_source(self) -> bool:
        """Whether the state of an encoder-decoder contains the memory of the source, or of its first tokens."""
        return self.written is not None or any(name.startswith(SOURCE) for name in self.layers[0].states)

    @property
    def parts(self) -> list["MemoryCache"]:
        """The states of the source, where it is causal."""
        return [part for part in (self.source, self.written) if part is not None]

    def note_source(self, checksum: Tensor) -> None:
        """Record the checksum (b,) of a whole source, by which `generate` knows it again."""
        self.rows.write(source=checksum)

    @property
    def source_checksum(self) -> Tensor | None:
        """The checksum (b,) of the source, or of what has been read of it; `None` if unknown."""
        rows = self.rows if self.source is None else self.source.rows
        return rows.states.get("source" if self.source is None else "checksum")

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes."""
        layers, parts = (*self.layers, self.rows), sum(part.nbytes for part in self.parts)
        own = (tensor for layer in layers for tensor in (*layer.states.values(), *layer.constants.values()))
        return parts + sum(tensor.nbytes for tensor in own)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token or source."""
        for state in (self.rows.states or self.layers[0].states).values():
            return state.shape[0]
        return max((part.batch_size for part in self.parts), default=-1)

    @property
    def tokens(self) -> Tensor | None:
        """Number of real tokens of each row, (b,) long; `None` before the first token."""
        tokens = self.rows.states.get("tokens")
        return None if tokens is None else tokens.clone()  # which the next pass does not change

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of input columns so far, padding included."""
        return int(self.rows.states["columns"][0]) if self.is_initialized else 0

    def begin(self) -> None:
        """Note that something begins to write to the layers, which `finish` or `count` ends.

        Raises:
            ValueError: An earlier pass has not ended, so that some layers have read more than others.
        """
        self.check_finished()
        self.is_unfinished = True

    def check_finished(self) -> None:
        """Refuse a state that is half written; errors as of `begin`."""
        for part in (self, self.source, self.written):
            if part is not None and part.is_unfinished:
                raise ValueError(
                    "A pass with the state in `cache` has failed midway, and left it unusable. Create another state, "
                    "or load one from before."
                )

    def finish(self) -> None:
        """Note that a pass has written to all layers."""
        self.is_unfinished = False

    def count(self, tokens: Tensor, columns: int, checksum: Tensor | int = -1) -> None:
        """Record a forward pass, which has written to all layers.

        Args:
            tokens: (b,) real tokens of each row so far, including this pass.
            columns: number of input columns of this pass.
            checksum: (b,) checksum of the ids in this pass; negative if unknown.
        """
        seen, before = self.rows.states.get("columns"), self.rows.states.get("checksum")
        if seen is None:
            seen = before = torch.zeros_like(tokens)
        checksum = (before + checksum).masked_fill((before < 0) | (checksum < 0), -1)
        self.rows.write(tokens=tokens, columns=seen + columns, checksum=checksum)
        self.is_unfinished = False

    def reset(self) -> None:
        """Discard the state."""
        super().reset()
        self.rows.reset()
        self.finish()
        self.source = self.written = None

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported, unless there is nothing to remove.

        Raises:
            ValueError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise ValueError("Tokens cannot be removed from a MemoryCache; keep a copy from before they were added.")

    def detach(self) -> None:
        """Cut the state off from the graph of gradients, for truncated back-propagation through a long text."""
        for layer in self.layers:
            layer.detach()
        for part in self.parts:
            part.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors of the state by name, which later passes do not change.

        Raises:
            ValueError: A pass has failed midway.
        """
        self.check_finished()
        places = {**{f"layers.{place}": layer for place, layer in enumerate(self.layers)}, "rows": self.rows}
        states = ((f"{place}.{name}", state) for place, layer in places.items() for name, state in layer.states.items())
        found = {name: state.detach().clone() for name, state in states}
        for name in _PARTS:
            part = getattr(self, name)
            found |= {} if part is None else {f"{name}.{key}": state for key, state in part.state_dict().items()}
        return {**found, _MADE_FOR: self._fingerprint(len(found))}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state by that of `state_dict`, of the same model.

        Raises:
            ValueError: The tensors are no state of the model.
        """
        tensors = dict(tensors)
        made_for = tensors.pop(_MADE_FOR, None)  # states of earlier versions have none
        if made_for is not None and not torch.equal(made_for.cpu(), self._fingerprint(len(tensors))):
            raise ValueError("The tensors are the state of another model, or not all of them. Load it with that model.")
        layers = {"rows": self.rows, **{f"layers.{place}": layer for place, layer in enumerate(self.layers)}}
        parts: dict[str, MemoryCache] = {}
        for name in tensors:
            if name.split(".")[0] not in _PARTS and name.rpartition(".")[0] not in layers:
                raise ValueError(f"The state of this model has no tensor {name!r}. Load a state that was made by it.")
        for name, config in zip(_PARTS, (self.made_for_source, self.made_for), strict=True):
            own = {key.removeprefix(f"{name}."): state for key, state in tensors.items() if key.startswith(f"{name}.")}
            if own and config is None:
                raise ValueError("The tensors are the state of a model with a causal source. Load it with that model.")
            if own:
                parts[name] = MemoryCache(config)
                parts[name].load_state_dict(own)
        self.reset()  # after all checks
        for name, tensor in tensors.items():
            place, _, own = name.rpartition(".")
            if place in layers:
                layers[place].write(**{own: tensor})
        for name, part in parts.items():
            setattr(self, name, part)

    def _fingerprint(self, count: int) -> Tensor:
        """A checksum of the fields that models must agree on to share a state, and the number of its tensors."""
        fields = json.dumps(state_fields(self.made_for), sort_keys=True, default=str)
        return torch.tensor([zlib.crc32(fields.encode()), count])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, for beam search."""
        self.begin()
        super().reorder_cache(beam_idx)
        for part in (self.rows, *self.parts):
            part.reorder_cache(beam_idx)
        self.finish()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.begin()
        super().batch_repeat_interleave(repeats)
        for part in (self.rows, *self.parts):
            part.batch_repeat_interleave(repeats)
        self.finish()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index."""
        self.begin()
        super().batch_select_indices(indices)
        for part in (self.rows, *self.parts):
            part.batch_select_indices(indices)
        self.finish()


def state_fields(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields, with their values, that models must agree on to share a state."""
    fields = {name: getattr(config, name) for name in ("model_type", *config.state_fields)}
    is_learned = fields.get("position_embedding_type") == "learned"
    if is_learned and not config.is_encoder_decoder:  # an encoder's config, converted by `as_decoder`
        fields["position_embedding_type"] = config.positions[True][0]
    return fields


# ---- models/generation.py ----
#
# Hooks of transformers' `generate` for models whose decoding state is a `MemoryCache`.


class GenerationHooks:
    """Mixin for models that generate, before `GenerationMixin`."""

    _is_stateful = True  # the state cannot be rolled back, which rules out assisted generation

    def is_endless(self) -> bool:
        """Whether the decoder accepts texts of any length, as without learned positions."""
        return self.get_decoder().config.longest_input() is None

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse continuous batching, which `generate_batch` starts with.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"Continuous batching (`generate_batch`) needs a cache of keys and values, but a {self.config.model_type} "
            "model has a state of constant size. Call `generate` with the prompts padded on the left."
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the state is a `MemoryCache`

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Create a `MemoryCache` unless one is given or `use_cache` is off; its size is always static."""
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic", "static"):
            raise ValueError(
                f"`cache_implementation` is {asked!r}, but a {self.config.model_type} model's state has constant size. "
                "Leave it out, or set it to 'static' to compile the decoding step."
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = MemoryCache(self.config, compileable=asked == "static")

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **others: Any
    ) -> ModelOutput:
        """Check that the prompt continues a given state, before transformers leaves out what the state contains."""
        if self.config.is_encoder_decoder:  # in chunks, transformers passes on masks of the whole target
            generation_config.prefill_chunk_size = None
        cache = self.get_decoder().open_cache(model_kwargs.get("cache"), False, input_ids.shape[0])
        if cache is not None and cache.is_initialized:
            translates = self.config.is_encoder_decoder
            mask = model_kwargs.get("decoder_attention_mask" if translates else "attention_mask")
            embeds = None if translates else model_kwargs.get("inputs_embeds")
            if translates and mask is None:
                generation_config._mask_length = input_ids.shape[1]
            columns = generation_config._mask_length if mask is None else mask.shape[1]  # of a mask that was dropped
            check_prompt(input_ids, embeds, mask, columns, cache)
        return super()._prefill(input_ids, generation_config, model_kwargs, **others)

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, has_default_max_length: bool, **others: Any
    ) -> GenerationConfig:
        """Like transformers', which lets a default length end at `max_position_embeddings`."""
        config, tokens = generation_config, generation_config.max_length
        config = super()._prepare_generated_length(config, has_default_max_length=has_default_max_length, **others)
        if has_default_max_length and config.max_new_tokens is None and self.is_endless():
            config.max_length = tokens + others["input_ids_length"]
        return config

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Like transformers', which warns of texts beyond `max_position_embeddings`; most models have no end."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria) and self.is_endless():
                criterion.max_position_embeddings = None
        return criteria

    @staticmethod
    def create_masks_for_generate(
        config: BoundedMemoryConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """Return the mask of the new tokens only: its shape stays constant, so a compiled step is not recompiled."""
        if attention_mask is None:
            return None
        length = inputs_embeds.shape[1]
        if kwargs.get("is_first_iteration"):
            check_mask_of_past(attention_mask, length, kwargs.get("cache"))
        return attention_mask[:, -length:]


def text_checksum(input_ids: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Sum each row's ids, weighted by hashes of their ranks, to tell texts apart: (b, n) to (b,); parts add up."""
    # Hashes of 20 bits (Knuth's multiplicative method): texts that differ in several tokens rarely share a sum, and
    # ids of 24 bits do not overflow it before 2 ** 19 tokens.
    weighted = input_ids * (((ranks + 1) * 2654435761 >> 12) % 2**20 + 1)
    return (weighted if keep is None else weighted.masked_fill(~keep, 0)).sum(1)


def check_prompt(
    input_ids: Tensor, inputs_embeds: Tensor | None, attention_mask: Tensor | None, columns: int, cache: MemoryCache
) -> None:
    """Check that a prompt (b, n) of `generate`, with a mask of so many columns, continues a state.

    Raises:
        ValueError: It is neither the state's text with more tokens, nor new tokens with a mask over all tokens.
    """
    seen, length = cache.get_seq_length(), (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
    continues = length > seen if columns == length else inputs_embeds is None and columns == seen + length
    if continues and input_ids.shape[1] == columns:
        keep = None if attention_mask is None else attention_mask[:, :seen] != 0
        given = text_checksum(input_ids[:, :seen], token_ranks(keep, seen, input_ids.device), keep)
        read = cache.rows.states["checksum"].to(given.device)
        continues = ((given == read) | (read < 0)).all()
    if not continues:
        raise ValueError(
            f"The state in `cache` contains {seen} tokens, and the given {length} do not continue it. Pass "
            f"the whole text, the same {seen} tokens and at least one more; or only new tokens, with an "
            f"`attention_mask` of {seen + length} columns."
        )


def check_mask_of_past(attention_mask: Tensor, length: int, cache: MemoryCache | None) -> None:
    """Check that a mask (b, n) or (b, seen + n) over n = `length` new tokens agrees with the state; not while tracing.

    Raises:
        ValueError: The mask's length, or its number of earlier real tokens, differs from the state's.
    """
    earlier = attention_mask[:, :-length]
    if earlier.shape[1] == 0 or is_tracing(attention_mask):
        return
    seen = 0 if cache is None else cache.get_seq_length()
    if earlier.shape[1] != seen:
        raise ValueError(
            f"`attention_mask` has {attention_mask.shape[1]} columns, but there are {length} new tokens and {seen} in "
            f"the state. It must have {length} or {seen + length} columns."
        )
    kept, read = (earlier != 0).sum(1), cache.tokens.to(earlier.device)
    if not torch.equal(kept, read):
        row = (kept != read).nonzero()[0].item()
        raise ValueError(
            f"`attention_mask` keeps {kept[row]} earlier tokens of row {row}, but the state contains {read[row]}, and "
            "they can no longer be masked (`generate` also adds the padding after a row that ends early). Leave the "
            "state out to process the whole text again, or pass the mask that the state was made with."
        )


# ---- models/decoder.py ----
#
# The decoder shared by all families, with its decoding state and language modelling head.


class CausalConvolution(DepthwiseConvolution):
    """Causal depthwise convolution; the cache keeps the states of the last taps - 1 tokens."""

    def forward(self, states: Tensor, context: ForwardContext) -> Tensor:
        """Convolve (b, n, d) states to the same shape, and update the cache."""
        keep, cache = context.keep, context.layer_cache(self.layer_idx)
        before = None if cache is None else cache.states.get("convolution")
        ranks = None
        if keep is not None:
            # Real tokens move to the front, so that no padding lies between them and the cached ones.
            ranks = token_ranks(keep, states.shape[1], keep.device)
            states = move_to_ranks(states.unsqueeze(1), ranks, keep).squeeze(1)
        if before is None:
            before = states.new_zeros(states.shape[0], self.weight.shape[-1] - 1, states.shape[-1])
        seen = torch.cat([before.to(states.dtype), states], dim=1)
        out = causal_convolution(seen, self.weight)
        if cache is not None:  # last, because writing in place overwrites `before`
            places = states.shape[1] if keep is None else keep.sum(1, keepdim=True)
            places = (places + torch.arange(before.shape[1], device=seen.device)).expand(seen.shape[0], -1)
            cache.write(convolution=seen.gather(1, places.unsqueeze(-1).expand(-1, -1, seen.shape[-1])))
        return out if ranks is None else out.gather(1, ranks.unsqueeze(-1).expand(out.shape))


class DecoderModelMixin(BaseModelMixin):
    """The decoder without a head, the base model of a family's causal language model."""

    convolution_class = CausalConvolution
    output_class = BaseModelOutputWithPast
    layer_inputs: tuple[str, ...] = ()  # keywords of `forward` for `run_layers`
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        is_rotary = config.position_embedding_type == "rotary"
        self.rotary_size = self.attention_class.rotary_size(config) if is_rotary else 0

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: MemoryCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ModelOutput:
        """
        Args:
            input_ids: (b, n) token ids.
            attention_mask: (b, n), or (b, seen + n) with a state; 1 for tokens and 0 for padding on either side.
                Without it nothing is padding, whatever its id.
            token_type_ids: (b, n) segment ids, if the model has segment embeddings.
            position_ids: (b, n) from 0; by default, counts real tokens, those in the state included.
            inputs_embeds: (b, n, d) token embeddings, instead of `input_ids`.
            cache: the state after earlier tokens, or a new `MemoryCache`; updated in place.
            use_cache: whether to return a state, created if none is given (but not in training); defaults to
                `config.use_cache`.

        Keyword Args:
            local_window, read_slots: see `EncoderModelMixin.forward`.

        Raises:
            ValueError: A shape is wrong, the input is empty, the cache belongs to another model or batch, the mask
                contradicts the tokens in the state, `position_ids` fall within a row, or a keyword is unknown.
        """
        layer_inputs = {name: kwargs.pop(name, None) for name in self.layer_inputs}
        if kwargs:
            self.check_keywords(kwargs)
        ids = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        self.check_shapes(input_ids, inputs_embeds, attention_mask, with_past=cache is not None, **ids)
        use_cache = use_cache and (cache is not None or not self.training)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        batch, length = inputs.shape[:2]
        cache = self.open_cache(cache, use_cache, batch)
        keep = None
        if attention_mask is not None:
            check_mask_of_past(attention_mask, length, cache)
            keep = self.tokens_to_keep(None, attention_mask[:, -length:])  # unlike in an encoder, ids are ignored
        if position_ids is not None:
            position_ids = position_ids.expand(position_ids.shape if position_ids.dim() > 1 else (1, -1))
            self.check_positions(position_ids, keep)
        context = make_context(keep, length, inputs.device, cache, kwargs, self.config.local_window)
        if self.config.position_embedding_type == "learned":
            self.check_length(length, context)
        positions = context.ranks if position_ids is None else position_ids
        context = context._replace(rotation=self.rotation(positions))
        hidden_states = self.embeddings(input_ids, inputs_embeds, positions, token_type_ids, keep)
        hidden_states = self.run_layers(hidden_states, context, **layer_inputs)
        if keep is not None:
            # Padding that has read nothing may have a state of zeros, whose gradient every norm enlarges.
            unread = leading_padding(keep) & (context.before == 0)
            hidden_states = hidden_states.masked_fill(unread.unsqueeze(-1), 0.0)
        if cache is not None:
            checksum = -1 if input_ids is None else text_checksum(input_ids, context.ranks, keep)
            cache.count(context.lengths[:, 0].expand(batch), length, checksum)
        return self.output_class(last_hidden_state=hidden_states, cache=cache if use_cache else None)

    def run_layers(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """Apply the layers to embedded tokens (b, n, d)."""
        if context.cache is not None:
            context.cache.begin()
        return self.encoder(hidden_states, self.first_slot_states(), context)[0]

    def check_length(self, length: int, context: ForwardContext) -> None:
        """Reject n tokens that go beyond the learned positions; skipped while tracing.

        Raises:
            ValueError: A row has more tokens than positions.
        """
        if is_tracing(context.lengths) or context.lengths.is_meta:
            return
        limit, seen = self.config.longest_input(), 0 if context.cache is None else context.cache.get_seq_length()
        if seen + length > limit and context.lengths.max() > limit:
            raise ValueError(
                f"A text has {context.lengths.max()} tokens, but {type(self).__name__} has {limit} learned positions "
                "(`max_position_embeddings`). Use fewer tokens, or a model with sinusoidal positions."
            )

    def rotation(self, positions: Tensor) -> Tensor | None:
        """Return the cosines and sines (b or 1, n, 2, r / 2) of rotary positions (b or 1, n); `None` if not rotary."""
        if not self.rotary_size:
            return None
        return rotation(positions, self.rotary_size, self.embeddings.word_embeddings.weight.dtype)

    def open_cache(self, cache: Any, use_cache: bool, batch: int) -> MemoryCache | None:
        """Validate the given cache; without one, create a new one if `use_cache`.

        Raises:
            ValueError: The cache is not a `MemoryCache`, was made for another model or batch size, or layers are
                checkpointed.
        """
        if cache is None:
            return MemoryCache(self.config) if use_cache else None
        if self.training and self.gradient_checkpointing:
            raise ValueError(
                "`cache` cannot be used with gradient checkpointing, which runs each layer twice, the second "
                "time from the updated state. Leave it out, or turn checkpointing off."
            )
        # Not `isinstance`: a model loaded from a checkpoint's code has its own copy of the class.
        if not hasattr(cache, "made_for"):
            raise ValueError(
                f"`cache` is a {type(cache).__name__}, but must be a `luna_hf.MemoryCache` for a "
                f"{self.config.model_type} model. Leave it out, or create one with `MemoryCache(model.config)`."
            )
        if cache.made_for is not self.config:
            own, given = state_fields(self.config), state_fields(cache.made_for)
            if own != given:
                wrong = [
                    f"{name}={given.get(name)!r}, not {own[name]!r}" for name in own if own[name] != given.get(name)
                ]
                raise ValueError(
                    f"The cache was made for a different model ({'; '.join(wrong)}). Create one from this config."
                )
            cache.made_for = self.config  # so that the next pass need not compare the two
        if cache.batch_size not in (-1, batch):
            raise ValueError(
                f"The cache holds {cache.batch_size} rows, but the input has {batch}. Create a new cache, or "
                "select or repeat its rows (`batch_select_indices`, `batch_repeat_interleave`)."
            )
        return cache


class CausalLMMixin(GenerationHooks, HeadMixin):
    """Causal language modelling, with an output layer tied to the token embedding, and `generate`."""

    auto_classes = ("AutoModelForCausalLM",)
    _supports_flash_attn = False
    _supports_flex_attn = False
    output_class = CausalLMOutputWithPast
    tied_weights = {"lm_head.weight": "{}.embeddings.word_embeddings.weight"}

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config.as_decoder())

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # also of subclasses with another name

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Like `DecoderModelMixin.forward`, with a head.

        Args:
            labels: (b, n) the token ids themselves, shifted internally; -100 is ignored, and so is the first token of
                a row that is padded on the left, which nothing predicts.
            logits_to_keep: number of final positions to compute logits for, 0 for all; or a tensor of positions.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.

        Keyword Args:
            shift_labels: (b, n) labels that are already shifted, instead of `labels`.

        Returns:
            `loss` if labels are given; `logits` (b, n, vocab_size); `cache`, the state after the last token.
        """
        # Not a parameter, because the Trainer would take it for a label column.
        shift_labels = kwargs.pop("shift_labels", None)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, cache=cache, use_cache=use_cache, return_dict=True, **kwargs)
        logits = linear(self.lm_head, slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if attention_mask is not None and cache is None:
            unread = leading_padding(attention_mask != 0)
            if labels is not None:
                labels = labels.masked_fill(F.pad(unread[:, :-1], (1, 0)), -100)
            if shift_labels is not None:
                shift_labels = shift_labels.masked_fill(unread, -100)
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
        return self.make_output(outputs, loss=loss, logits=logits)


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


# ---- ops/scan.py ----
#
# The causal running sum of outer products, in chunks: time and memory linear in n.
#
# Shape letters: b batch, h heads, n tokens, p and r sizes of the factors. `keep` masks are boolean with True = keep.


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


# ---- ops/causal_slots.py ----
#
# Slots that are written from left to right: their state, their normalisers, and how a token reads them.
#
# Shape letters: b batch, h heads, n tokens, m slots, c head size. Every mask is boolean with True = keep.


# The running maximum before the first token. Finite, because the difference of two infinities is NaN.
LOWEST = -1e30


class Normaliser(NamedTuple):
    """How the sums of a slot are divided, and whether a slot without a token can be read."""

    divisor: str | None  # "steps", the number of tokens so far; "total", the running sum of the weights; or none
    masks_empty: bool = False  # slots without a token yet are masked
    has_logits: bool = False  # the weights are logits, to be exponentiated

    @property
    def keeps_total(self) -> bool:
        """Whether the state holds the running sum of the weights."""
        return self.divisor == "total" or self.masks_empty


NORMALISERS = {
    "steps": Normaliser("steps"),  # Luna, section 3.3: a causal mean
    "none": Normaliser(None),  # ABC with Linformer's projection
    "written": Normaliser(None, masks_empty=True),  # ABC-Random
    "total": Normaliser("total", masks_empty=True),  # ABC-MLP with relu
    "softmax": Normaliser("total", has_logits=True),  # ABC-MLP, appendix B.1
}


@dataclass(frozen=True)
class SlotOptions:
    """How tokens write and read the slots; the layer's choices and what it knows about the tokens."""

    normaliser: Normaliser
    keep: Tensor | None = None  # (b, n) padding mask: padding writes nothing, and its outputs are meaningless
    steps: Tensor | None = None  # (b or 1, n) number of tokens so far, at least 1; for the divisor "steps" only
    slots: Tensor | None = None  # (b, m) slots that may be read; all by default
    used: Tensor | None = None  # (b, m) slots that share the tokens, see `slot_counts`; all by default
    dropout: float = 0.0  # probability of dropping a read weight
    need_weights: bool = False  # whether to return the read weights
    chunk_size: int = SCAN_CHUNK  # number of tokens per chunk, on which no result depends
    # Several keys in one softmax: (b, h, n, k) logits of k other keys that each token reads, such as a window's. The
    # logarithm of the number of tokens that a slot stands for, times the scale (h,), is added to its logit.
    beside: Tensor | None = None
    count_scale: Tensor | None = None
    # (b or 1, n) number of tokens that each token reads nowhere else, for which its slots stand; without any it reads
    # no slot. By default the slots stand for all tokens so far.
    outside: Tensor | None = None


class CausalMemory(NamedTuple):
    """The decoding state after some tokens."""

    key: Tensor  # (b, h, c, m) sum of k_j w_j
    value: Tensor  # (b, h, m, c) sum of w_j v_j
    total: Tensor | None = None  # (b, h, 1, m) sum of w_j, if the normaliser needs it
    peak: Tensor | None = None  # (b, h, 1, m) for logits only: the largest; all sums are divided by exp(peak)
    count: Tensor | None = None  # (b, h, 1, m) number of tokens that a slot stands for, if reads depend on it


def empty_memory(query: Tensor, value: Tensor, slots: int, normaliser: Normaliser) -> CausalMemory:
    """Return the state before the first token, for queries and values (b, h, n, c), in float32 or wider."""
    (batch, heads, _, size), dtype = query.shape, torch.promote_types(query.dtype, torch.float32)
    new = {"dtype": dtype, "device": query.device}
    row = (batch, heads, 1, slots)
    return CausalMemory(
        key=torch.zeros(batch, heads, size, slots, **new),
        value=torch.zeros(batch, heads, slots, value.shape[-1], **new),
        total=torch.zeros(row, **new) if normaliser.keeps_total else None,
        peak=torch.full(row, LOWEST, **new) if normaliser.has_logits else None,
    )


class SlotTokens(NamedTuple):
    """Tokens that write and read, (b, h, n, ...), or (b h, n, ...) in a chunk."""

    query: Tensor  # (..., n, c)
    key: Tensor  # (..., n, c)
    value: Tensor  # (..., n, c)
    weights: Tensor  # (..., n, m) write weights, or their logits
    divisor: Tensor | None = None  # (..., n, 1) of the sums, if it does not depend on the weights
    bias: Tensor | None = None  # (..., n, 1 or m) added to the logits of the slots
    beside: Tensor | None = None  # (..., n, k) logits of other keys in the same softmax


def divide_by_total(totals: Tensor, options: SlotOptions) -> tuple[Tensor | None, Tensor | None]:
    """Return the divisor of the sums, and which slots may be read, given the running sums of the weights."""
    # The gradient divides by the square of a total, which would underflow below the root of the smallest number.
    written = totals > torch.finfo(totals.dtype).tiny ** 0.5
    divisor = totals.masked_fill(~written, 1.0) if options.normaliser.divisor else None
    if not options.normaliser.masks_empty:
        return divisor, options.slots
    return divisor, written if options.slots is None else written & options.slots


def read_weights(
    logits: Tensor,
    divisor: Tensor | None,
    readable: Tensor | None,
    bias: Tensor | None,
    beside: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the softmax over all keys, and that of the slots divided by the divisor of the values' sums."""
    logits, num_slots = logits if divisor is None else logits / divisor, logits.shape[-1]
    logits = logits if bias is None else logits + bias
    if beside is not None:
        if readable is not None:
            logits = logits.masked_fill(~readable, torch.finfo(logits.dtype).min)
        logits, readable = torch.cat([logits, beside], dim=-1), None
    read = masked_softmax(logits, readable)
    read = F.dropout(read, dropout) if dropout else read
    of_slots = read[..., :num_slots]
    return read, of_slots if divisor is None else of_slots / divisor


def slot_bias(weights: Tensor, options: SlotOptions, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute the bias of the slots' logits by the number of tokens that they stand for: (b or 1, 1 or h, n, 1 or m).

    Write weights (b, h, n, m) in float32 or wider are zero, or minus infinity, at padding; `before` are the counts
    (b, h, 1, m) after earlier tokens. Also returns the counts to keep in the state.
    """
    scale, outside = options.count_scale, options.outside
    bias, count = weights.new_zeros(()), None
    if scale is not None:
        counts, count = slot_counts(weights, options, before)
        if outside is None:
            bias = count_bias(counts, scale)
        else:  # the tokens outside are divided as all tokens so far are
            least = torch.finfo(counts.dtype).tiny ** 0.5  # whose gradient is finite
            total = options.steps[:, None, :, None].to(counts.dtype) if count is None else counts.sum(-1, keepdim=True)
            tokens = outside[:, None, :, None].to(counts.dtype).clamp(min=1)
            bias = log_counts(tokens * counts.clamp(min=least) / total.clamp(min=least), scale)
    bias = bias.to(weights.dtype)
    if outside is not None:
        bias = torch.where((outside == 0)[:, None, :, None], torch.finfo(weights.dtype).min / 2, bias)
    return bias, count


def slot_counts(weights: Tensor, options: SlotOptions, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Count the tokens that each slot stands for, at every token: (b, h, n, m), or (b or 1, 1, n, 1) if all are equal.

    Every token counts once, divided among the slots in proportion to its write weights (their absolute values). With
    the divisor "steps", the slots share the tokens so far evenly. Also returns the counts after the last token, if they
    are to be kept in the state. Arguments as for `slot_bias`.
    """
    used = options.used
    if options.normaliser.divisor == "steps":
        slots = weights.shape[-1] if used is None else used.sum(-1)[:, None, None, None].clamp(min=1)
        return options.steps[:, None, :, None].to(weights.dtype) / slots, None
    has_logits, lowest = options.normaliser.has_logits, torch.finfo(weights.dtype).min
    if used is not None:
        weights = weights.masked_fill(~used[:, None, None], lowest if has_logits else 0.0)
    if has_logits:  # padding has minus infinity alone, whose softmax would be NaN
        shares = weights.clamp(min=lowest).softmax(-1).masked_fill(weights[..., :1] == -torch.inf, 0.0)
    else:
        shares = weight_shares(weights, dim=-1)
    counts = shares.cumsum(2)
    counts = counts if before is None else counts + before
    return counts, counts[:, :, -1:]


# ---- ops/causal_graph.py ----
#
# The causal memory of logits (the normaliser "softmax") for graphs: no control flow depends on data or length.
#
# Token j enters what token t reads with weight exp(s_j - z_t), where z is the logarithm of the running sum. Split at
# positions between the two, it is a product of factors of at most 1, whose underflow is harmless. This is how the
# second half of each block of 16, 32 and 64 tokens reads the first, and how each block of 64 reads all earlier ones;
# blocks of 8 are computed directly.
#
# Shape letters as in `causal_memory.py`.


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


# ---- ops/causal_memory.py ----
#
# Causal attention to a memory of slots, as in Luna (Ma et al. 2021, section 3.3) and ABC (Peng et al. 2022).
#
# Token j adds its key and value to every slot with weights w_j in R^m; token t reads the slots with softmax attention,
# after it and all earlier tokens have written:
#
#     K_t = sum_{j<=t} w_j (x) k_j / N_t,  V_t = sum_{j<=t} w_j (x) v_j / N_t,  out_t = softmax(q_t K_t^T / sqrt(c)) V_t
#
# Both running sums are causal scans (`ops/scan.py`): time and memory are linear in n, and the state has constant size.
# Mechanisms differ in their weights and in the divisor N_t (`NORMALISERS`). Everything runs in float32 or wider.
#
# Shape letters: b batch, h heads, n tokens, m slots, c head size. Every mask is boolean with True = keep.


# Largest rise of a slot's running maximum within a chunk. Exponentials are relative to the maximum at the chunk's end;
# an earlier token divides by sums smaller by up to e^40, twice in the gradient, and e^80 still fits in float32.
_LARGEST_RISE = 40.0


def attend_causal_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    normaliser: str,
    memory: CausalMemory | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, CausalMemory]:
    """Write to the memory and read it, from left to right.

    Args:
        query, key, value: (b, h, n, c).
        weights: (b, h, n, m) write weights; logits for "softmax".
        normaliser: one of `NORMALISERS`.
        memory: state after earlier tokens; empty by default.
        options: fields of `SlotOptions`.

    Returns:
        The outputs (b, h, n, c) in `query`'s dtype, without the values of the keys `beside`; the read weights
        (b, h, n, m + k) after dropout, or `None` if neither needed nor of use; and the state after the last token.
    """
    own = SlotOptions(NORMALISERS[normaliser], **options)
    kind, length = own.normaliser, query.shape[2]
    if memory is None:
        memory = empty_memory(query, value, weights.shape[-1], kind)
    precise = memory.key.dtype
    if own.keep is not None:
        # Padding may hold anything, even NaN: none of it may reach a sum or a gradient.
        padding = ~own.keep[:, None, :, None]
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
        weights = weights.to(precise).masked_fill(padding, -torch.inf if kind.has_logits else 0.0)
    divisor = own.steps.to(precise)[:, None, :, None] if kind.divisor == "steps" else None
    bias, count, beside = None, None, own.beside
    if own.count_scale is not None or own.outside is not None:
        bias, count = slot_bias(weights.to(precise), own, memory.count)
    if beside is not None:
        own, beside = replace(own, need_weights=True), beside.to(precise)
    if own.slots is not None:
        own = replace(own, slots=own.slots[:, None, None, :])
    tokens = SlotTokens(query, key, value, weights, divisor, bias, beside)
    with maybe_autocast(query.device.type, enabled=False):
        if length == 1:
            out, read, memory = attend_tokens(tokens, memory, own, scan_token)
        else:
            form = choose("causal_softmax_memory" if kind.has_logits else "causal_memory", query)
            out, read, memory = _FORMS[form](tokens, memory, own)
    return out.to(query.dtype), read.to(query.dtype) if own.need_weights else None, memory._replace(count=count)


def attend_tokens(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions, scan: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Write tokens to the memory and read it: outputs, read weights and the state after them.

    Args:
        tokens: so few that no exponential of logits underflows.
        memory: the state before them, in the precision to compute in.
        options: see `SlotOptions`; the mask of slots is broadcastable to the write weights.
        scan: `causal_scan` or a faster form for these tokens.
    """
    query, key, value, weights, divisor, bias, beside = tokens
    precise = memory.key.dtype
    query, key, value, weights = query.to(precise), key.to(precise), value.to(precise), weights.to(precise)
    if options.normaliser.has_logits:
        # The peak cancels in every quotient, so it needs no gradient.
        peak = torch.maximum(memory.peak, weights.detach().amax(-2, keepdim=True))
        growth, weights = (memory.peak - peak).exp(), (weights - peak).exp()
        memory = CausalMemory(memory.key * growth, memory.value * growth.mT, memory.total * growth, peak)
    readable = options.slots
    if memory.total is not None:
        totals = weights.cumsum(-2) + memory.total
        memory = memory._replace(total=totals[..., -1:, :].clone())  # a view would keep the totals of all tokens
        divisor, readable = divide_by_total(totals, options)
    logits, keys = scan(query * query.shape[-1] ** -0.5, key, weights, memory.key)
    read, divided = read_weights(logits, divisor, readable, bias, beside, options.dropout)
    out, values = scan(divided, weights, value, memory.value)
    return out, read, memory._replace(key=keys, value=values)


def _attend_at_once(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions
) -> tuple[Tensor, Tensor, CausalMemory]:
    """Without a loop over the tokens, on an accelerator or in a graph."""
    return attend_tokens(tokens, memory, options, partial(causal_scan, chunk_size=options.chunk_size))


def _attend_in_a_loop(
    tokens: SlotTokens, memory: CausalMemory, options: SlotOptions
) -> tuple[Tensor, Tensor | None, CausalMemory]:
    """Chunk by chunk."""
    batch, heads, length, _ = tokens.query.shape
    sizes = [min(options.chunk_size, length - first) for first in range(0, length, options.chunk_size)]
    if options.normaliser.has_logits:
        sizes = _split_at_rises(tokens.weights.detach(), sizes, memory.peak[:, :, 0], options.keep)
    slots = None if options.slots is None else options.slots.expand(-1, heads, 1, -1).flatten(0, 1)
    # Without tensors of all tokens: what the function below holds stays in memory until the backward pass.
    shared = SlotOptions(options.normaliser, slots=slots, dropout=options.dropout, need_weights=options.need_weights)
    divisor, bias = (
        None if part is None else part.expand(batch, heads, length, -1) for part in (tokens.divisor, tokens.bias)
    )

    def attend(chunk: Sequence[Tensor | None], state: CausalMemory) -> tuple[list[Tensor], CausalMemory]:
        out, read, state = attend_tokens(SlotTokens(*chunk), state, shared, scan_chunk)
        return [out, read] if shared.need_weights else [out], state

    state = CausalMemory(*(None if part is None else part.flatten(0, 1) for part in memory))
    (out, *read), state = scan_in_chunks(attend, tokens._replace(divisor=divisor, bias=bias), state, sizes)
    memory = CausalMemory(*(None if part is None else part.unflatten(0, (-1, heads)) for part in state))
    return out, read[0] if read else None, memory


def _split_at_rises(logits: Tensor, sizes: list[int], peak: Tensor, keep: Tensor | None) -> list[int]:
    """Halve chunks until no slot's running maximum rises too far within one; only extreme logits need it.

    Logits (b, h, n, m) are minus infinity at padding; `peak` (b, h, m) is the maximum before the first token.
    """
    chunks = logits.split(sizes, 2)
    ends = torch.stack([peak, *(chunk.amax(2) for chunk in chunks)]).cummax(0).values  # (1 + chunks, b, h, m)
    first = torch.stack([chunk[:, :, 0] for chunk in chunks])
    if keep is not None:
        # Before the first real token padding reads nothing, so a row starts at its first real token.
        row, kept = torch.arange(keep.shape[0], device=keep.device), keep.split(sizes, 1)
        written = [chunk[row, :, real.int().argmax(1)] for chunk, real in zip(chunks, kept, strict=True)]
        first = torch.where(ends[:-1] > LOWEST, first, torch.stack(written))
    rises = ends[1:] - torch.maximum(ends[:-1], first) > _LARGEST_RISE
    if not rises.any():
        return sizes
    split, start = [], 0
    for index, size in enumerate(sizes):
        if size > 1 and rises[index].any():
            inside = slice(start, start + size)
            part = None if keep is None else keep[:, inside]
            split += _split_at_rises(logits[:, :, inside], [size // 2, size - size // 2], ends[index], part)
        else:
            split.append(size)
        start += size
    return split


_FORMS = {"loop": _attend_in_a_loop, "at_once": _attend_at_once, "tree": attend_in_a_tree}


# ---- layers/causal_attention.py ----
#
# Causal attention: each token writes to the memory and then reads it, in one scan with a state of constant size.


class CausalAttention(MemoryAttention):
    """Causal attention to any memory; `forward` writes and reads it."""

    def write(self, states: Tensor, slot_states: Tensor | None, context: ForwardContext) -> Memory:
        """Not supported: a causal memory changes with every token.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Causal attention writes and reads in one scan and has no memory to share; write it with an encoder."
        )


class CausalMemoryAttention(CausalAttention):
    """Causal multi-head attention to a memory of slots; each family implements `write_weights`."""

    def write_weights(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return the weight of each token in each slot, (b, h, n, m), and one of `causal_slots.NORMALISERS`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `write_weights`.")

    def used_slots(self, slot_states: Tensor | None, context: ForwardContext) -> Tensor | None:
        """Return the mask (b, m) of the slots in use; all by default."""
        return None

    def project(self, hidden_states: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (b, h, n, c), and rotate queries and keys if positions are rotary."""
        query = project_heads(self.query, hidden_states, self.num_heads)
        key, value = self.key_and_value(hidden_states)
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        return query, key, value

    def forward(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Like `MemoryAttention.forward`; the weights run over slots and window, (b, h, n, m + w)."""
        query, key, value = self.project(hidden_states, context)
        weights, normaliser = self.write_weights(hidden_states, slot_states, context)
        used, memory = self.used_slots(slot_states, context), None
        cache = None if context.cache is None else context.cache.layers[self.layer_idx]
        if cache is not None and "value" in cache.states:
            memory = CausalMemory(*map(cache.states.get, CausalMemory._fields))
        options = {"slots": used, "used": used, "keep": context.keep, "steps": context.ranks + 1}
        if not context.slots:
            options["slots"] = torch.zeros(query.shape[0], weights.shape[-1], dtype=torch.bool, device=key.device)
        window = None
        if self.config.local_window:
            window = WindowMemory.of_decoder(key, value, self.config.local_window, context, cache, "window_")
            options |= {"beside": window.logits(query, context.window), "count_scale": self.slot_scale}
            if self.config.slot_counts == "outside":
                options["outside"] = (context.ranks + 1 - context.window).clamp(min=0)
        options["dropout"] = self.attention_dropout if self.training else 0.0
        options["need_weights"] = self.config._attn_implementation == "eager"
        output, read, state = attend_causal_memory(query, key, value, weights, normaliser, memory, **options)
        if window is not None:
            output = output + window.read(read[..., weights.shape[-1] :])
        if cache is not None:
            cache.write(**state._asdict())
        return output.transpose(1, 2).flatten(2), slot_states, read


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


# Names in a decoding state.
_SOURCE_QUERY, _SOURCE_SLOTS = f"{SOURCE}pack_query", f"{SOURCE}pack_slots"


def pack_weights(pack_query: Tensor, pack_key: Tensor, activation: str) -> Tensor:
    """Compute A_pack = omega(pq . pc / sqrt(c)), (b, h, n, l), in float32 or wider.

    Activations omega: "softplus", log2(1 + 2^x) (the authors' beta = ln 2); "elu", elu(x) + 1; or "exp", for which the
    logarithm is returned, because the sums are normalised in log space. P W_pq is (b or 1, h, l, c), X W_pc
    (b, h, n, c).
    """
    logits = product(pack_key, (pack_query * pack_query.shape[-1] ** -0.5).transpose(-1, -2))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if activation == "exp":
        return logits
    if activation == "elu":
        return F.elu(logits) + 1.0
    # Above the threshold PyTorch returns x itself; 40 makes that exact in float64, too.
    return F.softplus(logits, beta=math.log(2.0), threshold=40.0)


class LunaCausalPack(nn.Module):
    """A layer's P, unless it comes from a source, its query projection, and the key projection of the tokens."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        own = not config.is_encoder_decoder or config.source_is_causal
        self.slots = nn.Parameter(torch.empty(config.projection_length, width)) if own else None
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def initialise(self, config: LunaConfig) -> None:
        """Initialise P at the scale of normed token states: it has no LayerNorm, and near zero all slots coincide."""
        if self.slots is not None:
            init.normal_(self.slots, mean=0.0, std=1.0)

    def forward(self, batch: int) -> Tensor:
        """Return P W_pq, (1, l, d), or (b, l, d) where hooks may tell rows apart, as PEFT's do.

        Calling the module, unlike reading `slots`, runs FSDP's and accelerate's hooks.
        """
        return linear(self.query, self.slots.expand(batch if is_watched(self.query) else 1, -1, -1))


class LunaCausalAttention(LunaProjections, CausalMemoryAttention):
    """Causal pack and unpack attention; the projections have the names of `LunaAttention`."""

    def __init__(self, config: LunaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.pack = LunaCausalPack(config)

    def write_weights(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, str]:
        """Return A_pack (b, h, n, l), or its logarithm with "exp", and how the sums are normalised."""
        pack_key = project_heads(self.pack.key, hidden_states, self.num_heads)
        cache = None if context.cache is None else context.cache.layers[self.layer_idx]
        if self.pack.slots is None:
            pack_query = cache.states[_SOURCE_QUERY] if slot_states is None else self.source_query(slot_states)
        else:
            pack_query = self.pack_query(cache, hidden_states)
        activation = self.config.pack_activation
        weights = recomputed(pack_weights, pack_query, pack_key, activation)
        if activation == "exp":
            return weights, "softmax"
        dropout = self.attention_dropout if self.training else 0.0
        return F.dropout(weights, dropout) if dropout else weights, "steps"

    def used_slots(self, slot_states: Tensor | None, context: ForwardContext) -> Tensor | None:
        """Like `CausalMemoryAttention.used_slots`; in an encoder-decoder, the slots that the source uses."""
        if self.pack.slots is not None:
            return None
        if slot_states is None:
            return context.layer_cache(self.layer_idx).states.get(_SOURCE_SLOTS)
        return context.source.slot_keep

    def source_query(self, slot_states: Tensor) -> Tensor:
        """Return P W_pq, (b, h, l, c), with the packed states of the source (b, l, d)."""
        return project_heads(self.pack.query, slot_states, self.num_heads)

    def write_source(self, slot_states: Tensor, context: ForwardContext) -> None:
        """Keep P W_pq, and which slots the source uses."""
        kept = {_SOURCE_QUERY: self.source_query(slot_states), _SOURCE_SLOTS: context.source.slot_keep}
        context.layer_cache(self.layer_idx).write(**kept)

    def pack_query(self, cache: MemoryCacheLayer | None, hidden_states: Tensor) -> Tensor:
        """Return P W_pq, (b or 1, h, l, c) for states (b, n, d).

        It is cached while decoding, where it would cost more than the rest of the layer, but not with adapters and
        hooks, which may change from pass to pass.
        """
        is_transformed = torch._C._are_functorch_transforms_active()  # whose tensors have no address
        if cache is None or torch.is_grad_enabled() or is_transformed or not is_plain(self.pack.query):
            return split_heads(self.pack(hidden_states.shape[0]), self.num_heads)
        device = hidden_states.device.type
        if is_torchdynamo_compiling() and "pack_query" in cache.constants:
            return cache.constants["pack_query"]
        # It changes with the parameters' identity, version, data, dtype and device, and with autocast.
        key: list[object] = [torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None]
        for own in (self.pack.slots, *self.pack.query.parameters()):
            key += [id(own), own.data_ptr(), own.dtype, own.device, 0 if own.is_inference() else own._version]
        if cache.constant_keys.get("pack_query") != key:
            cache.constants["pack_query"] = self.pack_query(None, hidden_states).contiguous()
            cache.constant_keys["pack_query"] = key
        return cache.constants["pack_query"]


# ---- families/luna/modeling.py ----


class LunaCausalModel(DecoderModelMixin, BoundedMemoryPreTrainedModel):
    """The Luna decoder without a head."""

    config: LunaConfig
    base_model_prefix = "luna"
    attention_class = LunaCausalAttention


class LunaForCausalLM(CausalLMMixin, BoundedMemoryPreTrainedModel, GenerationMixin):
    """Luna with a causal language modelling head; generates with a decoding state of constant size."""

    config: LunaConfig
    base_model_prefix = "luna"
    base_model_class = LunaCausalModel
