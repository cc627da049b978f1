"""Chooses between implementations of an operation by device and mode, and the precision of matrix products.

An operation with several implementations looks up its choice here. A new implementation, such as a kernel, is a new
name in a row of `IMPLEMENTATIONS`.
"""

import torch
from torch import Tensor
from transformers.utils import is_tracing

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
