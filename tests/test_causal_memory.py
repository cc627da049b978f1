"""The causal memory against its definition in float64: every normaliser and every schedule."""

import itertools

import pytest
import torch
from helpers import gradients, relative_rms, rms
from reference import causal as reference

from luna_hf.ops import causal_memory, dispatch
from luna_hf.ops.causal_memory import CausalMemory, attend_causal_memory

SLOTS, SIZE = 6, 4
# Each mechanism with its normaliser.
MECHANISMS = {
    "luna": "steps",
    "linformer": "none",
    "random": "written",
    "relu": "total",
    "exp": "softmax",
    "sigmoid": "softmax",
}
FORMS = {"softmax": ("loop", "tree")}
CASES = [(name, form) for name, kind in MECHANISMS.items() for form in FORMS.get(kind, ("loop", "at_once"))]
cases = pytest.mark.parametrize(("mechanism", "form"), CASES)
# Bound on the float32 error under large logits, relative to the root mean square of the exact result.
FLOAT32 = 1e-6


@pytest.fixture
def use(monkeypatch):
    """A function that selects the schedule: chunk by chunk, all chunks at once, or the tree."""

    def choose(form):
        for operation in ("causal_scan", "causal_memory", "causal_softmax_memory"):
            monkeypatch.setitem(dispatch.IMPLEMENTATIONS, operation, {"default": form})

    return choose


def make(mechanism, length, batch=2, heads=2, seed=0, scale=1.0, dtype=torch.float64):
    """Query, key, value and write weights (for exp and sigmoid: logits before the activation)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, written = (
        torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64)
        for size in (SIZE, SIZE, SIZE, SLOTS)
    )
    if mechanism == "luna":
        written = written.exp()
    elif mechanism == "relu":
        written = written - 1.0  # many zeros: slots stay unwritten for some tokens
    elif mechanism == "linformer":
        written = written / max(length, 1) ** 0.5
    elif mechanism == "random":
        written = torch.eye(SLOTS, dtype=torch.float64)[draw(length, seed)].expand(batch, heads, -1, -1).clone()
    else:
        written = written * scale
    return [tensor.to(dtype) for tensor in (query, key, value, written)]


def draw(length, seed):
    return torch.randint(SLOTS, (length,), generator=torch.Generator().manual_seed(seed + 1)).tolist()


def attend(mechanism, query, key, value, written, nothing=None, **kwargs):
    """The implementation, given the reference's arguments; `nothing` fills the padding."""
    normaliser = MECHANISMS[mechanism]
    if mechanism == "luna" and "steps" not in kwargs:
        keep, length = kwargs.get("keep"), query.shape[2]
        steps = torch.arange(1, length + 1)[None] if keep is None else keep.long().cumsum(1).clamp(min=1)
        kwargs["steps"] = steps
    if mechanism == "relu":
        written = torch.relu(written)
    elif mechanism == "sigmoid":
        written = torch.nn.functional.logsigmoid(written)
    if nothing is not None:
        padding = ~kwargs["keep"][:, None, :, None]
        key, value, written = (states.masked_fill(padding, nothing) for states in (key, value, written))
    return attend_causal_memory(query, key, value, written, normaliser, **kwargs)


def define(mechanism, query, key, value, written):
    """Outputs and read weights of the definition."""
    if mechanism == "luna":
        return reference.luna(query, key, value, written)
    if mechanism in ("linformer", "random"):
        return reference.recurrence(query, key, value, written, unwritten=mechanism == "linformer")
    return reference.mlp(query, key, value, written, mechanism)


def assert_near(ours, exact, atol=1e-11):
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=atol)


@cases
def test_outputs_and_gradients_equal_the_definition(use, mechanism, form):
    use(form)
    for length in (1, 2, 8, 15, 16, 17, 64, 65, 130):
        tensors = [tensor.requires_grad_() for tensor in make(mechanism, length, batch=1)]
        expected = define(mechanism, *tensors)
        expected_gradients = gradients(expected, tensors)
        for chunk_size in (64,) if form == "tree" else (1, 16, 64):
            if length == 130 and chunk_size == 1:
                continue
            *actual, _ = attend(mechanism, *tensors, need_weights=True, chunk_size=chunk_size)
            assert_near(tuple(actual), expected)
            for ours, exact in zip(gradients(actual, tensors), expected_gradients, strict=True):
                assert_near(ours, exact)


@cases
def test_a_sequence_may_be_split_anywhere(use, mechanism, form):
    """Outputs and the final state equal those of a single pass, also when tokens arrive one at a time."""
    use(form)
    tensors = make(mechanism, 80)
    expected, _ = define(mechanism, *tensors)
    _, _, whole = attend(mechanism, *tensors)
    for places in ((1,), (16, 17), (40, 41, 42, 79)):
        bounds, outputs, memory = [0, *places, 80], [], None
        for first, end in itertools.pairwise(bounds):
            steps = torch.arange(first + 1, end + 1)[None] if mechanism == "luna" else None
            part = [tensor[:, :, first:end] for tensor in tensors]
            out, read, memory = attend(mechanism, *part, memory=memory, steps=steps)
            assert read is None
            outputs.append(out)
        assert_near(torch.cat(outputs, dim=2), expected)
        assert_near(sums(memory), sums(whole))
        assert [part is None for part in memory] == [part is None for part in whole]


def sums(memory):
    """Key and value sums after division, which does not depend on their unit."""
    if memory.total is None or memory.peak is None:
        return tuple(part for part in memory if part is not None)
    return memory.key / memory.total, memory.value / memory.total.transpose(-1, -2)


@cases
def test_a_padded_row_equals_the_row_alone(use, mechanism, form):
    """Outputs, gradients and state, with NaN at the padding; the last row holds padding only."""
    use(form)
    length = 90
    kept = [[*range(length)], [*range(70, 90)], [*range(30)], [*range(5), *range(75, 90)]]
    keep = torch.zeros(len(kept) + 1, length, dtype=torch.bool)
    for row, places in enumerate(kept):
        keep[row, places] = True
    tensors = [tensor.requires_grad_() for tensor in make(mechanism, length, batch=len(keep))]
    out, read, memory = attend(mechanism, *tensors, nothing=torch.nan, keep=keep, need_weights=True, chunk_size=16)
    assert torch.isfinite(out).all() and torch.isfinite(read).all()
    # Every output gets a gradient, including those at padding.
    for name, gradient in zip(("query", "key", "value", "written"), gradients((out, read), tensors), strict=True):
        assert torch.isfinite(gradient).all(), name
        if name != "query":
            assert not gradient[~keep[:, None].expand(gradient.shape[:3])].any(), name
    for row, places in enumerate(kept):
        inside = (slice(row, row + 1), slice(None), places)
        alone = [tensor.detach()[inside].requires_grad_() for tensor in tensors]
        expected = define(mechanism, *alone)
        assert_near((out[inside], read[inside]), expected)
        ours = gradients((out[inside], read[inside]), tensors)
        for actual, exact in zip(ours, gradients(expected, alone), strict=True):
            assert_near(actual[inside], exact)
        _, _, single = attend(mechanism, *alone)
        row_memory = CausalMemory(*(None if part is None else part[row : row + 1] for part in memory))
        assert_near(sums(row_memory), sums(single))


@cases
def test_a_row_of_padding_leaves_the_state(use, mechanism, form):
    """In one chunk, in several chunks and for a single token."""
    use(form)
    _, _, before = attend(mechanism, *make(mechanism, 20))
    for length in (1, 30):
        tensors, keep = make(mechanism, length, seed=3), torch.zeros(2, length, dtype=torch.bool)
        steps = torch.full((2, length), 20) if mechanism == "luna" else None
        out, _, after = attend(mechanism, *tensors, memory=before, keep=keep, steps=steps, chunk_size=8)
        assert torch.isfinite(out).all()
        assert_near(tuple(p for p in after if p is not None), tuple(p for p in before if p is not None), atol=1e-14)


@cases
def test_masked_slots_are_not_read(use, mechanism, form):
    """The result equals that without these slots; every row has its own number."""
    use(form)
    tensors = make(mechanism, 40)
    slots = torch.arange(SLOTS) < torch.tensor([[3], [5]])
    out, read, _ = attend(mechanism, *tensors, slots=slots, need_weights=True)
    for row, count in ((0, 3), (1, 5)):
        query, key, value, written = (tensor[row : row + 1] for tensor in tensors)
        expected, weights = define(mechanism, query, key, value, written[..., :count])
        assert_near(out[row : row + 1], expected)
        assert_near(read[row : row + 1, ..., :count], weights)
        assert not read[row, ..., count:].any()


@cases
def test_gradcheck(use, mechanism, form):
    use(form)
    keep = torch.tensor([[False, True, True, False, True]])
    # Keep away from the kink of relu.
    tensors = make(mechanism, 5, batch=1, heads=1)
    if mechanism == "relu":
        tensors[3] = tensors[3].sign() * (tensors[3].abs() + 0.1)
    tensors = [tensor[..., :3].detach().requires_grad_() for tensor in tensors]
    if mechanism == "random":
        tensors[3].requires_grad_(False)

    def attends(*tensors):
        return attend(mechanism, *tensors, keep=keep, chunk_size=2)[0]

    assert torch.autograd.gradcheck(attends, tensors)


# ---- large logits ----


def extreme(shape, scale, length=200, seed=0, mechanism="exp"):
    """Slot logits that are far apart: noise, or noise on a rising or falling slope."""
    query, key, value, logits = make(mechanism, length, seed=seed, scale=scale)
    slope = {"noise": 0.0, "rising": 1.0, "falling": -1.0}[shape]
    # The slope spans ten times the scale.
    logits = logits + slope * torch.arange(length)[:, None] * (10 * scale / length)
    return [tensor.float() for tensor in (query, key, value, logits)]


@pytest.mark.parametrize(("shape", "scale"), [("noise", 8), ("rising", 30), ("rising", 300), ("falling", 100)], ids=str)
@pytest.mark.parametrize("form", ["loop", "tree"])
@pytest.mark.parametrize("mechanism", ["exp", "sigmoid"])
def test_large_logits_in_float32(use, mechanism, form, shape, scale):
    """No NaN, and errors no larger than for ordinary logits; one row is padded on the left."""
    use(form)
    tensors = extreme(shape, scale, length=140)
    keep = torch.ones(2, 140, dtype=torch.bool)
    keep[1, :90] = False
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    out, read, memory = attend(mechanism, *ours, keep=keep, need_weights=True)
    assert all(torch.isfinite(part).all() for part in (out, read, *(part for part in memory if part is not None)))
    for row, first in ((0, 0), (1, 90)):
        inside = (slice(row, row + 1), slice(None), slice(first, None))
        exact = [tensor[inside].double().requires_grad_() for tensor in tensors]
        expected = define(mechanism, *exact)
        for actual, wanted in zip((out, read), expected, strict=True):
            assert relative_rms(actual[inside].detach(), wanted.detach()) <= FLOAT32
        # If all slots hold the same, the query's gradient vanishes; so the values' gradient sets the scale.
        actual, wanted = gradients((out[inside],), ours), gradients(expected[:1], exact)
        scale = rms(wanted[2])
        for name, one, other in zip("qkvw", actual, wanted, strict=True):
            assert rms(one[inside] - other) <= FLOAT32 * scale, name


@pytest.mark.parametrize("form", ["loop", "tree"])
@pytest.mark.parametrize("difference", [-2000.0, 100.0, 2000.0])
def test_a_state_with_extreme_peaks_can_be_continued(use, form, difference):
    """The earlier tokens dominate, or vanish: no NaN either way, in one chunk and token by token."""
    use(form)
    first, second = extreme("noise", 30, length=40), extreme("noise", 30, length=40, seed=5)
    first[3] = first[3] - difference
    exact = [torch.cat(pair, dim=2).double() for pair in zip(first, second, strict=True)]
    expected, _ = define("exp", *exact)
    for parts in ([40], [1] * 40):
        _, _, memory = attend("exp", *first)
        outputs = []
        for chunk in zip(*(tensor.split(parts, 2) for tensor in second), strict=True):
            out, _, memory = attend("exp", *chunk, memory=memory)
            outputs.append(out)
        assert relative_rms(torch.cat(outputs, dim=2), expected[:, :, 40:]) <= FLOAT32
        assert all(torch.isfinite(part).all() for part in memory if part is not None)


@pytest.mark.parametrize("form", ["loop", "tree"])
def test_a_first_token_of_very_small_logits(use, form):
    """It is read at full weight until larger ones follow."""
    use(form)
    tensors = extreme("noise", 1, length=20)
    tensors[3][:, :, 0] -= 1e4
    tensors[3][:, :, 10:] += 1e4
    out, _, _ = attend("exp", *tensors)
    expected, _ = define("exp", *(tensor.double() for tensor in tensors))
    assert relative_rms(out[:, :, :1], expected[:, :, :1]) <= FLOAT32
    assert relative_rms(out, expected) <= FLOAT32


def chunk_sizes(monkeypatch, logits, keep=None):
    """Sizes of the chunks that the loop forms for these slot logits."""
    sizes, attend_tokens = [], causal_memory.attend_tokens

    def record(tokens, *args):
        sizes.append(tokens.query.shape[1])
        return attend_tokens(tokens, *args)

    monkeypatch.setattr(causal_memory, "attend_tokens", record)
    states = [torch.zeros(*logits.shape[:3], SIZE) for _ in range(3)]
    attend_causal_memory(*states, logits, "softmax", keep=keep)
    return sizes


def test_chunks_are_split_only_where_logits_rise(monkeypatch):
    ordinary = extreme("noise", 8)[3]
    assert chunk_sizes(monkeypatch, ordinary) == [64, 64, 64, 8]
    rising = ordinary.clone()
    rising[1, 0, 70:, 2] += 500.0  # one slot of one head of one row
    sizes = chunk_sizes(monkeypatch, rising)
    assert sizes[0] == 64 and sizes[-2:] == [64, 8] and sum(sizes) == 200
    # Halved until the rise stands between two of them, after token 69, or next to it.
    assert len(sizes) > 4 and 70 in [sum(sizes[:i]) for i in range(len(sizes))]
    falling = ordinary.clone()
    falling[:, :, 70:] -= 500.0
    assert chunk_sizes(monkeypatch, falling) == [64, 64, 64, 8]
    # Padding before the first token does not count as a rise.
    keep = torch.ones(2, 200, dtype=torch.bool)
    keep[:, :100] = False
    assert chunk_sizes(monkeypatch, ordinary, keep) == [64, 64, 64, 8]


# ---- precision and dropout ----


@cases
def test_half_precision_sums_in_float32(use, mechanism, form):
    """Only the output is rounded to bfloat16; the sums stay in float32."""
    use(form)
    tensors = make(mechanism, 300, dtype=torch.bfloat16)
    rounded = [tensor.double() for tensor in tensors]
    if mechanism == "sigmoid":  # its logarithm is taken in float32
        tensors[3] = tensors[3].float()
    expected, weights = define(mechanism, *rounded)
    out, read, memory = attend(mechanism, *tensors, need_weights=True)
    assert out.dtype == read.dtype == torch.bfloat16
    assert all(part is None or part.dtype == torch.float32 for part in memory if part is not None)
    for ours, exact in ((out, expected), (read, weights)):
        assert relative_rms(ours, exact) <= torch.finfo(torch.bfloat16).eps / 2


@cases
def test_autocast_does_not_reach_the_sums(use, mechanism, form):
    use(form)
    tensors = make(mechanism, 100, dtype=torch.float32)
    expected = attend(mechanism, *tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = attend(mechanism, *tensors)
    assert torch.equal(actual[0], expected[0]) and actual[0].dtype == torch.float32
    for ours, exact in zip(actual[2], expected[2], strict=True):
        assert (exact is None and ours is None) or torch.equal(ours, exact)


@cases
def test_dropout_acts_on_the_weights_that_are_read(use, mechanism, form):
    use(form)
    tensors = make(mechanism, 200)
    _, full, _ = attend(mechanism, *tensors, need_weights=True)
    torch.manual_seed(0)
    out, read, memory = attend(mechanism, *tensors, need_weights=True, dropout=0.25)
    dropped = (read == 0) & (full != 0)
    share = dropped.sum().item() / (full != 0).sum().item()
    assert 0.2 < share < 0.3
    assert_near(read[~dropped], full[~dropped] / 0.75)
    torch.manual_seed(1)
    assert not torch.equal(attend(mechanism, *tensors, dropout=0.25)[0], out)
    # Dropout leaves the written sums alone.
    assert_near(sums(memory), sums(attend(mechanism, *tensors)[2]))
