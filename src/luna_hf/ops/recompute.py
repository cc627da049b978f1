"""Memory of a training step: what is cheap to compute again is not kept for the backward pass.

Every tensor that an operation's gradient needs stays in memory until the backward pass. `save_inputs` keeps the
inputs of a function instead. The numbers stay the same, dropout included; the function runs again in the backward
pass, up to the last tensor that a gradient needs, so that a linear layer at its end is not applied again.

By then, modules may have other parameters (`torch.func.functional_call`), adapters, hooks or another mode. So these
functions do not call modules, but what `snapshot` makes of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
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
