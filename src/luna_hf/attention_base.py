"""Transformers' attention backends for any numbers of queries and keys, their masks, and a linear layer that is fast in
half precision on any CPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dispatch import multiplies_in_float32, prefers_products
from .functional import softmax_attention, split_heads

# Keys that flex attention treats at a time.
_FLEX_BLOCK = 128


class Linear(nn.Linear):
    """`nn.Linear`, but half-precision weights on a CPU without such instructions are multiplied in float32.

    PyTorch's own emulation reaches a few per cent of the float32 rate there (AVX2 machines); the conversion costs
    little and loses no precision. Everywhere else this is `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        if multiplies_in_float32(input, self.weight):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias).to(input.dtype)
        return super().forward(input)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, in float32 where the device has no instructions for the half-precision type of both."""
    if multiplies_in_float32(left, right):
        return torch.matmul(left.float(), right.float()).to(left.dtype)
    return torch.matmul(left, right)


class UnpaddedKeys(NamedTuple):
    """Where the kept keys stand, for variable-length kernels."""

    indices: Tensor  # (kept,) positions in the flattened (batch * keys)
    cu_seq_lens: Tensor  # (batch + 1,) int32, cumulated numbers of keys
    max_length: int


class KeyMask(NamedTuple):
    """One mask over keys in the form that the chosen attention backend reads; made once per forward."""

    keep: Tensor  # (batch, keys) boolean, True = may be attended
    backend: Any  # eager, sdpa: (batch, 1, 1, keys) boolean, broadcast over heads and queries; others: their own form
    unpadded: UnpaddedKeys | None = None  # flash attention only
    extra_keys: int = 0  # flex attention only: masked keys to append

    def for_queries(self, count: int) -> Any:
        """The backend's mask for any number of queries, also where it was made for another one."""
        if isinstance(self.backend, Tensor):
            made_for = self.backend.shape[2]
            return self.backend if made_for in (1, count) else self.backend[:, :, :1].expand(-1, -1, count, -1)
        if self.backend is None or self.backend.seq_lengths[0] == count:
            return self.backend
        return _flex_mask(self.keep, count)


def uses_flash(config: PreTrainedConfig) -> bool:
    """Whether the configured backend is a flash-attention kernel (packaged, or from the Hub)."""
    return "flash" in (config._attn_implementation or "")


def make_key_mask(
    config: PreTrainedConfig, keep: Tensor | None, queries: Tensor | None = None, keys: Tensor | None = None
) -> KeyMask | None:
    """Turn a boolean mask over keys into what the configured attention backend needs.

    Args:
        config: the model's configuration (its `_attn_implementation` decides).
        keep: (b, k) boolean, or `None` if every key may be attended.
        queries, keys: (b, q, d) and (b, k, d) states whose lengths and dtype backends other than eager, sdpa and flash
            build their masks from.
    """
    if config._attn_implementation == "flex_attention":
        return _flex_key_mask(keep, queries, keys)
    if keep is None:
        return None
    if uses_flash(config):
        lengths = keep.sum(-1, dtype=torch.int32)
        cumulated = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        indices = keep.flatten().nonzero().squeeze(-1)
        return KeyMask(keep, None, unpadded=UnpaddedKeys(indices, cumulated, int(lengths.max())))
    if config._attn_implementation in ("eager", "sdpa", None):
        # Left to broadcast: expanding it to the queries costs up to a fifth of the attention.
        return KeyMask(keep, keep[:, None, None, :])
    mask = create_bidirectional_mask(
        config,
        inputs_embeds=queries,
        attention_mask=keep,
        encoder_hidden_states=keys,
        allow_is_bidirectional_skip=False,
    )
    return KeyMask(keep, mask)


def _flex_key_mask(keep: Tensor | None, queries: Tensor, keys: Tensor) -> KeyMask | None:
    # PyTorch's CPU kernel returns wrong numbers, without an error, if the keys do not fill whole blocks.
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
    """The attention interface's plain form: (b, h, q, c) queries to (b, q, h, c) outputs, and the weights."""
    output, weights = softmax_attention(query, key, value, attention_mask, scaling, dropout)
    return output.transpose(1, 2), weights


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: KeyMask | None,
    num_heads: int,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head softmax attention between any numbers of queries and keys, through transformers' attention interface.

    Args:
        module: the calling module, with `config`, `is_causal = False` and `attention_dropout`.
        query: (b, q, d) projected queries.
        key, value: (b, k, d) projected keys and values.
        mask: from `make_key_mask`, or `None`.
        num_heads: heads; each is scaled by its own (d / heads)^-1/2.

    Returns:
        (b, q, d) heads concatenated, and the weights (b, h, q, k) where the backend has them (eager).
    """
    query, key, value = (split_heads(states, num_heads) for states in (query, key, value))
    return attend_heads(module, query, key, value, mask, **kwargs)


def attend_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: KeyMask | Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `attend`, for states whose heads are split already.

    Args:
        module: see `attend`.
        query: (b, h, q, c).
        key, value: (b, h, k, c).
        mask: from `make_key_mask`, or `None`; or a boolean (True = may be attended) that broadcasts to (b, h, q, k),
            which only eager and sdpa can read: other backends leave the call to sdpa.

    Returns:
        (b, q, d) heads concatenated, and the weights (b, h, q, k) where the backend has them (eager).
    """
    backend = module.config._attn_implementation
    if isinstance(mask, Tensor):
        mask, backend = KeyMask(mask, mask), "eager" if backend == "eager" else "sdpa"
    kwargs |= {
        "scaling": query.shape[-1] ** -0.5,
        "dropout": module.attention_dropout if module.training else 0.0,
        "is_causal": False,
    }
    # Restarting position ids would be read as packed documents by the flash path, for queries and keys alike.
    kwargs.pop("position_ids", None)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
    if backend == "sdpa" and prefers_products(query):
        attention = eager_attention_forward
    if mask is not None and mask.unpadded is not None:
        output, weights = _attend_unpadded(attention, module, query, key, value, mask.unpadded, **kwargs)
        return output.flatten(-2), weights
    if mask is not None and mask.extra_keys:
        key, value = (F.pad(states, (0, 0, 0, mask.extra_keys)) for states in (key, value))
    backend_mask = None if mask is None else mask.for_queries(query.shape[2])
    output, weights = attention(module, query, key, value, backend_mask, **kwargs)
    return output.flatten(-2), weights


def _attend_unpadded(
    attention: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keys: UnpaddedKeys, **kwargs: Any
) -> tuple[Tensor, None]:
    """Variable-length call: all queries of every row, only the kept keys.

    The stock flash path takes queries and keys for the same tokens and drops queries by the key mask; with explicit
    sequence borders and no mask it does what it is told.
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
