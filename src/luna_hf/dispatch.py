"""The one place that decides which implementation of an operation runs, and in which precision products are taken.

An operation looks its implementation up here and names no device itself. A new implementation (a kernel, say) is a new
name in a row of `IMPLEMENTATIONS`.
"""

import torch
from torch import Tensor
from transformers.utils import is_tracing

# For each operation the implementation by where it runs: in a "graph" that is being traced, else on a "cpu" or an
# "accelerator"; "inference" is either device outside training and without gradients (re-entrant checkpointing trains
# without gradients, and has to draw the same dropout twice). Any other place takes the "default".
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    # Chunks one after the other stay in a CPU's cache; a graph and an accelerator want no loop over the length.
    "causal_scan": {"cpu": "loop", "default": "at_once"},
    "causal_memory": {"cpu": "loop", "default": "at_once"},
    # The loop looks at the data to find rising maxima, which a graph cannot.
    "causal_softmax_memory": {"graph": "tree", "default": "loop"},
    # A window's keys and values are copies that fit a CPU's cache when they are those of a few heads.
    "window_heads": {"cpu inference": "parts", "default": "whole"},
    # A graph keeps all slots and masks those beyond the length: a minimum would bind it to lengths on one side of it.
    "dynamic_slots": {"graph": "mask", "default": "cut"},
    # A graph pads even and odd lengths alike, or it would be made again.
    "dilation": {"graph": "uniform", "default": "least"},
    # The inner states of the feed-forward network are the largest tensors of a model.
    "feed_forward": {"inference": "parts", "default": "whole"},
    "nearest_centroid": {"cpu": "parts", "default": "whole"},
}


def choose(operation: str, states: Tensor, training: bool = True) -> str:
    """The implementation of an operation.

    Args:
        operation: a row of `IMPLEMENTATIONS`.
        states: what it works on; decides the device.
        training: whether the calling module trains.
    """
    row = IMPLEMENTATIONS[operation]
    if is_tracing(states):
        return row.get("graph", row["default"])
    device = "cpu" if states.device.type == "cpu" else "accelerator"
    if not training and not torch.is_grad_enabled():
        for place in (f"{device} inference", "inference"):
            if place in row:
                return row[place]
    return row.get(device, row["default"])


def _slow_cpu_dtypes() -> frozenset[torch.dtype]:
    """Half-precision types that this CPU has no matrix instructions for (PyTorch then emulates them)."""
    support = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, query in support.items() if not getattr(torch.ops.mkldnn, query)())


SLOW_CPU_DTYPES = _slow_cpu_dtypes() if torch.backends.mkldnn.is_available() else frozenset()


def multiplies_in_float32(left: Tensor, right: Tensor) -> bool:
    """Whether a product of two half-precision tensors is faster in float32: on a CPU that would emulate it."""
    return left.device.type == "cpu" and left.dtype == right.dtype and left.dtype in SLOW_CPU_DTYPES


def prefers_products(query: Tensor) -> bool:
    """Whether plain products beat PyTorch's fused attention: they do on a CPU with bfloat16 matrix instructions."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.dtype not in SLOW_CPU_DTYPES
