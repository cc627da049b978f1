"""What attention is made of: heads, softmax, the backends' padding masks, and products that are fast in half
precision on every CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.utils import is_tracing

from .dispatch import SLOW_CPU_DTYPES, multiplies_in_float32


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
