"""The causal scan against its definition: forward, gradients, states, padding, both schedules, every precision."""

import itertools

import pytest
import torch
from reference import causal as reference

from luna_hf import dispatch
from luna_hf.functional import causal_scan

CHUNKS = (1, 7, 16, 64, 100)
SIZES = (5, 3)  # p and r


@pytest.fixture(params=["loop", "at_once"])
def schedule(request, monkeypatch):
    """Both ways in which the chunks are treated."""
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "causal_scan", {"default": request.param})
    return request.param


def make(length, batch=2, heads=2, seed=0, dtype=torch.float64, sizes=SIZES):
    """x, y, z and a state."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, sizes[0]), (length, sizes[0]), (length, sizes[1]), sizes]
    return [torch.randn(batch, heads, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def gradients(outputs, tensors):
    """Of a sum with fixed weights, so that every entry counts differently."""
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    loss = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, tensors)


def relative_rms(ours, exact):
    """Root mean square of the difference over that of the exact result."""
    return ((ours.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()).item()


LENGTHS = {1, 2, 257, 1000, *(chunk + offset for chunk in CHUNKS for offset in (-1, 0, 1))} - {0}


@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_forward_state_and_all_gradients_equal_the_definition(schedule, length):
    tensors = [tensor.requires_grad_() for tensor in make(length, batch=1)]
    expected = reference.scan(*tensors)
    expected_gradients = gradients(expected, tensors)
    for chunk_size in CHUNKS:
        near_a_chunk = abs(length - chunk_size) <= 1 or length in (1, 2, 257, 1000)
        if not near_a_chunk:
            continue
        actual = causal_scan(*tensors, chunk_size=chunk_size)
        scale = length**0.5
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13 * scale)
        for ours, exact in zip(gradients(actual, tensors), expected_gradients, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-13 * length)


def test_without_a_state_the_sum_begins_at_zero(schedule):
    x, y, z, state = make(100)
    expected = causal_scan(x, y, z, torch.zeros_like(state), chunk_size=16)
    torch.testing.assert_close(causal_scan(x, y, z, chunk_size=16), expected, rtol=0, atol=0)


@pytest.mark.parametrize("places", [(1,), (63,), (64,), (65,), (16, 17), (1, 2, 3, 99)], ids=str)
def test_a_sequence_may_be_split_anywhere(schedule, places):
    x, y, z, state = make(100)
    expected, last = reference.scan(x, y, z, state)
    outputs, bounds = [], [0, *places, 100]
    for first, end in itertools.pairwise(bounds):
        out, state = causal_scan(*(part[:, :, first:end] for part in (x, y, z)), state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [7, 64])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_adds_nothing(schedule, side, chunk_size):
    """Whatever stands there: a padded row equals the row alone, gradients too, and those at padding are zero."""
    real, length = 70, 100
    kept = {"left": range(30, 100), "right": range(70), "middle": [*range(20), *range(50, 100)]}[side]
    keep = torch.zeros(2, length, dtype=torch.bool)
    keep[0, list(kept)] = True
    keep[1] = True
    x, y, z, state = make(length)
    with torch.no_grad():
        for tensor in (y, z):
            tensor[~keep[:, None, :].expand(tensor.shape[:3])] = torch.nan
    tensors = [tensor.requires_grad_() for tensor in (x, y, z, state)]
    out, last = causal_scan(*tensors, keep=keep, chunk_size=chunk_size)
    ours = gradients((out[:1, :, list(kept)], last[:1]), tensors)
    alone = [tensor[:1, :, list(kept)].detach().requires_grad_() for tensor in (x, y, z)]
    alone.append(state[:1].detach().requires_grad_())
    assert alone[0].shape[2] == real
    expected = reference.scan(*alone)
    torch.testing.assert_close((out[:1, :, list(kept)], last[:1]), expected, rtol=1e-12, atol=1e-12)
    for name, actual, exact in zip("xyz", ours, gradients(expected, alone), strict=False):
        torch.testing.assert_close(actual[:1, :, list(kept)], exact, rtol=1e-12, atol=1e-12)
        assert torch.isfinite(actual).all() and not actual[~keep[:, None].expand(actual.shape[:3])].any(), name


def test_a_row_of_padding_leaves_the_state(schedule):
    x, y, z, state = make(40)
    keep = torch.tensor([[True], [False]]).expand(2, 40)
    out, last = causal_scan(x, y, z, state, keep, chunk_size=16)
    assert torch.equal(last[1], state[1]) and torch.isfinite(out).all()
    torch.testing.assert_close(out[1], x[1] @ state[1])


@pytest.mark.parametrize("chunk_size", [3, 100])
def test_gradcheck(schedule, chunk_size):
    tensors = [tensor.requires_grad_() for tensor in make(7, batch=1, sizes=(2, 3))]
    keep = torch.tensor([[False, True, True, True, False, True, True]])
    assert torch.autograd.gradcheck(lambda *t: causal_scan(*t, keep=keep, chunk_size=chunk_size), tensors)


def test_float32_error(schedule):
    """At most 1e-6 of the result over 2,048 tokens, of sums that grow all the time and of sums that do not."""
    for offset in (0.0, 1.0):
        x, y, z, state = make(2048, batch=1, dtype=torch.float32, sizes=(16, 16))
        y, z = y + offset, z + offset
        expected, last = reference.scan(*(tensor.double() for tensor in (x, y, z, state)))
        out, ours = causal_scan(x, y, z, state)
        assert out.dtype == ours.dtype == torch.float32
        assert relative_rms(out, expected) <= 1e-6 and relative_rms(ours, last) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_sums_in_float32(schedule, dtype):
    """Only the output is rounded, once: at most half of its epsilon (the bound of a rounding), relative."""
    x, y, z, state = make(1000, dtype=dtype)
    y, z = y.abs(), z.abs()  # a sum that only grows: in half precision it would stop
    expected, last = reference.scan(*(tensor.double() for tensor in (x, y, z, state)))
    out, ours = causal_scan(x, y, z, state.float())
    assert out.dtype == dtype and ours.dtype == torch.float32
    assert relative_rms(ours, last) <= 1e-6
    assert relative_rms(out, expected) <= torch.finfo(dtype).eps / 2


def test_autocast_does_not_reach_the_sums(schedule):
    x, y, z, state = make(300, dtype=torch.float32)
    expected = causal_scan(x, y, z, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = causal_scan(x, y, z, state)
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, exact)
