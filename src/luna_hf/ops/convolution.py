"""Depthwise convolutions along the tokens."""

from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing


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
