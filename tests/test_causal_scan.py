"""The causal scan against its definition: forward, gradients, padding, both schedules, every precision.

`test_causal_memory.py` tests states, splits and autocast through the memory.
"""

import pytest
import torch
from helpers import gradients, relative_rms
from reference import causal as reference

from luna_hf.ops import dispatch
from luna_hf.ops.scan import causal_scan

SIZES = (5, 3)  # p and r


@pytest.fixture(params=["loop", "at_once"])
def schedule(request, monkeypatch):
    """Both orders in which the chunks are computed."""
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "causal_scan", {"default": request.param})
    return request.param


def make(length, batch=2, heads=2, seed=0, dtype=torch.float64, sizes=SIZES):
    """x, y, z and a state."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, sizes[0]), (length, sizes[0]), (length, sizes[1]), sizes]
    return [torch.randn(batch, heads, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 100])
def test_outputs_state_and_gradients_equal_the_definition(schedule, chunk_size):
    for length in sorted({1, 2, chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size + 3, 129} - {0}):
        tensors = [tensor.requires_grad_() for tensor in make(length, batch=1)]
        actual, expected = causal_scan(*tensors, chunk_size=chunk_size), reference.scan(*tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        for ours, exact in zip(gradients(actual, tensors), gradients(expected, tensors), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-11)


def test_without_a_state_the_sum_starts_at_zero(schedule):
    x, y, z, state = make(100)
    expected = causal_scan(x, y, z, torch.zeros_like(state), chunk_size=16)
    torch.testing.assert_close(causal_scan(x, y, z, chunk_size=16), expected, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_size", [7, 64])
@pytest.mark.parametrize(
    "kept", [range(30, 100), range(70), [*range(20), *range(50, 100)]], ids=["left", "right", "in"]
)
def test_a_padded_row_equals_the_row_alone(schedule, kept, chunk_size):
    """With NaN at the padding; gradients are equal too, and zero at padding."""
    keep = torch.ones(2, 100, dtype=torch.bool)
    keep[0] = torch.isin(torch.arange(100), torch.tensor(list(kept)))
    x, y, z, state = make(100)
    for tensor in (y, z):
        tensor[~keep[:, None, :].expand(tensor.shape[:3])] = torch.nan
    tensors = [tensor.requires_grad_() for tensor in (x, y, z, state)]
    out, last = causal_scan(*tensors, keep=keep, chunk_size=chunk_size)
    ours = gradients((out[:1, :, keep[0]], last[:1]), tensors)
    alone = [tensor[:1, :, keep[0]].detach().requires_grad_() for tensor in (x, y, z)]
    alone.append(state[:1].detach().requires_grad_())
    expected = reference.scan(*alone)
    torch.testing.assert_close((out[:1, :, keep[0]], last[:1]), expected, rtol=1e-12, atol=1e-12)
    for name, actual, exact in zip("xyz", ours, gradients(expected, alone), strict=False):
        torch.testing.assert_close(actual[:1, :, keep[0]], exact, rtol=1e-12, atol=1e-12)
        assert torch.isfinite(actual).all() and not actual[~keep[:, None].expand(actual.shape[:3])].any(), name


def test_a_row_of_padding_leaves_the_state(schedule):
    x, y, z, state = make(40)
    keep = torch.tensor([[True], [False]]).expand(2, 40)
    out, last = causal_scan(x, y, z, state, keep, chunk_size=16)
    assert torch.equal(last[1], state[1]) and torch.isfinite(out).all()
    torch.testing.assert_close(out[1], x[1] @ state[1])


def test_float32_error(schedule):
    """At most 1e-6 of the result over 1,024 tokens, for sums that grow steadily and for sums that do not."""
    for offset in (0.0, 1.0):
        x, y, z, state = make(1024, batch=1, dtype=torch.float32, sizes=(16, 16))
        y, z = y + offset, z + offset
        expected, last = reference.scan(*(tensor.double() for tensor in (x, y, z, state)))
        out, ours = causal_scan(x, y, z, state)
        assert out.dtype == ours.dtype == torch.float32
        assert relative_rms(out, expected) <= 1e-6 and relative_rms(ours, last) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_sums_in_float32(schedule, dtype):
    """Only the output is rounded: half of the dtype's epsilon, relative, bounds one rounding."""
    x, y, z, state = make(1000, dtype=dtype)
    y, z = y.abs(), z.abs()  # a growing sum, which would stall in half precision
    expected, last = reference.scan(*(tensor.double() for tensor in (x, y, z, state)))
    out, ours = causal_scan(x, y, z, state.float())
    assert out.dtype == dtype and ours.dtype == torch.float32
    assert relative_rms(ours, last) <= 1e-6
    assert relative_rms(out, expected) <= torch.finfo(dtype).eps / 2
