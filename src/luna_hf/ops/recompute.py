"""Memory of a training step: what is cheap to compute again is not kept for the backward pass.

Every tensor that an operation's gradient needs stays in memory until the backward pass. `save_inputs` keeps the
inputs of a function instead. The numbers stay the same, dropout included; the function runs again in the backward
pass, up to the last tensor that a gradient needs, so that a linear layer at its end is not applied again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_tracing

from .attention import float32_products

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
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_watched(*modules: nn.Module) -> bool:
    """Whether hooks read or change what these modules get, and may count its rows, as PEFT's and NEFTune's do.

    Not those by which transformers records outputs and asks for gradients of the embedding, nor those of PyTorch.
    """
    hooks = (
        hook
        for module in modules
        for part in module.modules()
        for found in (part._forward_hooks, part._forward_pre_hooks)
        for hook in found.values()
    )
    return not all((getattr(hook, "__module__", None) or "").startswith(_HARMLESS) for hook in hooks)


def recomputed(function: Callable[..., Any], states: Tensor, *inputs: Any) -> Any:
    """Compute `function(states, *inputs)`, such that only the inputs are kept, if `may_recompute(states)`."""
    if not torch.is_grad_enabled():
        return function(states, *inputs)
    return save_inputs(function, states, *inputs) if may_recompute(states) else function(states, *inputs)


def save_inputs(function: Callable[..., Any], *inputs: Any) -> Any:
    """Compute `function(*inputs)`, and keep only the inputs for the backward pass.

    Args:
        function: must not hold tensors of the tokens itself: with gradient checkpointing, these would stay in memory.
        inputs: tensors, tuples of them, or anything else.
    """
    leaves, structure = tree_flatten(inputs)

    def apply(*leaves: Any) -> Any:
        with float32_products(leaves[0]):  # in the backward pass, the layer's own has ended
            return function(*tree_unflatten(leaves, structure))

    return checkpoint(apply, *leaves, use_reentrant=False)
