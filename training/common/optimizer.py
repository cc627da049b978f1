"""What a checkpoint may put into an optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

_OPTIONS = ("betas", "eps", "weight_decay")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@contextmanager
def fitting(optimizer: Optimizer) -> Iterator[None]:
    """Check a state that is loaded meanwhile: kernels trust its shapes, and would write beyond the end of a tensor.

    Raises:
        ValueError: It has other options than the optimizer, or moments in other shapes than the parameters.
    """

    def options() -> list[list[object]]:
        return [[group.get(name) for name in _OPTIONS] for group in optimizer.param_groups]

    own = options()
    yield
    if options() != own:
        raise ValueError(f"its optimizer has other values of {', '.join(_OPTIONS)}")
    for parameter, state in optimizer.state.items():
        found = [state[name] for name in _MOMENTS if name in state]
        if not all(isinstance(value, Tensor) and value.shape == parameter.shape for value in found):
            raise ValueError("the moments in its optimizer have other shapes than the parameters")
