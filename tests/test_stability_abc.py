"""Logits up to 1e3, in float32 and in half precision, against float64 on the same rounded inputs.

bfloat16 has steps of 4 between 512 and 1024, so rounding a logit may change its weight by a factor of e^2. The tests in
half precision therefore start from given logits, or from numbers with exact logits. In float32 arbitrary numbers are
compared; the tolerance follows from the effect of one rounding of the inputs in float64.
"""

import copy

import pytest
import torch
from helpers import covering, tiny_model
from torch import nn

from luna_hf.families.abc.attention import _WRITERS
from luna_hf.families.abc.configuration import ACTIVATIONS, CONTROLS
from luna_hf.ops.attention import split_heads
from luna_hf.ops.memory_control import control_weights

LARGE = 1000.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["eager", "sdpa"]
WIDTH, HEADS, SLOTS = 32, 2, 8
VARIANTS = {
    **{control: {"memory_control": control} for control in CONTROLS},
    "mlp-relu": {"control_activation": "relu"},
    "mlp-sigmoid": {"control_activation": "sigmoid"},
}


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers in [-1, 1)."""
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def slot_logits(kind: str) -> torch.Tensor:
    """(2, 2, 4, 40) logits of up to 1e3 in absolute value."""
    logits = LARGE * uniform(2, 2, 4, 40)
    return {
        "spread": logits,
        "high": LARGE - 4 * uniform(2, 2, 4, 40).abs(),
        "low": -LARGE + 4 * uniform(2, 2, 4, 40).abs(),
        "equal": torch.full_like(logits, LARGE),
        "one above": torch.full_like(logits, -LARGE).index_fill(-1, torch.tensor([5]), LARGE),
    }[kind]


def equation_7(logits: torch.Tensor, keep: torch.Tensor | None, activation: str) -> torch.Tensor:
    """The quotient in float64 by logarithms, because e^-1000 underflows in float64, too."""
    assert logits.dtype == torch.float64
    keep = torch.ones_like(logits, dtype=torch.bool) if keep is None else keep[:, None, None, :].expand_as(logits)
    if activation == "relu":
        alpha = logits.clamp(min=0) * keep
        return alpha / alpha.sum(-1, keepdim=True).clamp(min=1e-300)
    # log(1 / (1 + e^-x)) = min(x, 0) - log(1 + e^-|x|)
    log_alpha = logits if activation == "exp" else logits.clamp(max=0) - torch.log1p(torch.exp(-logits.abs()))
    log_alpha = log_alpha.masked_fill(~keep, -float("inf"))
    return torch.exp(log_alpha - torch.logsumexp(log_alpha, -1, keepdim=True))


@pytest.mark.parametrize("kind", ["spread", "high", "low", "equal", "one above"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_control_weights(dtype, activation, kind):
    """Weights and gradients are computed in float32 (1e-6, a few roundings) and rounded once.

    In float32 the difference of a logit to the largest has a relative error of 2^-24; where it matters it is below 100,
    and the weight is e^-difference, so the error stays below 1e-7. The gradient is a product of weights and the
    incoming gradient, which is at most 1.
    """
    logits = slot_logits(kind).to(dtype)
    keep = torch.arange(40) < torch.tensor([[40], [7]])
    weight = uniform(2, 2, 4, 40, seed=1).to(dtype)
    results = []
    for precision, function in ((dtype, control_weights), (torch.float64, equation_7)):
        inputs = logits.detach().to(precision, copy=True).requires_grad_()
        phi = function(inputs, keep, activation)
        assert phi.dtype == precision
        (phi * weight.to(precision)).sum().backward()
        results.append((phi.detach().double(), inputs.grad.double()))
    (phi, gradient), (phi_ref, gradient_ref) = results
    limit = 1e-12 if dtype == torch.float64 else 1e-6 + torch.finfo(dtype).eps
    assert phi.isfinite().all() and gradient.isfinite().all()
    assert (phi - phi_ref).abs().max() <= limit
    assert (gradient - gradient_ref).abs().max() <= limit


def make_model(control_options: dict, dtype: torch.dtype, backend: str) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "memory_size": SLOTS, "num_hidden_layers": 1}
    model = tiny_model("abc_memory", **{**sizes, **control_options})
    model.set_attn_implementation(backend)
    return model.to(dtype)


def run(model: nn.Module, states: torch.Tensor, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, list]:
    """Output of the attention in float64, and gradients of the states and all parameters involved."""
    attention = model.encoder.layer[0].attention.self
    states = states.detach().to(attention.query.weight.dtype, copy=True).requires_grad_()
    slot_states, context = model.begin(states, keep)
    output, _, _ = attention(states, slot_states, context)
    model.zero_grad()
    output.sum().backward()
    controls = [] if model.control is None else [model.control.weight.grad]
    return output.detach().double(), [states.grad, *controls, *(p.grad for p in attention.parameters())]


def exact_problem(model: nn.Module, control: str, large: bool) -> torch.Tensor:
    """Weights and (1, 32, d) states with memories and logits that are exact in 8 bits.

    Tokens are eight sign vectors, each repeated four times: means over a slot are tokens. Projections are multiples of
    the identity; the control's rows are 32 times a token, so that slot logits are multiples of 64 up to 1024 and the
    second largest weight is e^-64. Reading logits reach 1e3, or about 4 if not `large`.
    """
    tokens = uniform(SLOTS, WIDTH, seed=3).sign()
    gram = tokens @ tokens.T - WIDTH * torch.eye(SLOTS)
    assert gram.max() < WIDTH
    attention = model.encoder.layer[0].attention.self
    # Sums over several tokens lead to larger logits.
    sums = control in ("random", "linformer")
    scale = (32 if sums else 256) if large else (0.25 if sums else 1)
    identity = torch.eye(WIDTH)
    with torch.no_grad():
        for layer, factor in ((attention.query, scale), (attention.key, 1), (attention.value, 1)):
            layer.weight.copy_(factor * identity)
            layer.bias.zero_()
        if control == "mlp":
            model.control.weight.copy_((32 * tokens).repeat(HEADS, 1))
        elif control == "linformer":
            sparse = uniform(*model.control.weight.shape, seed=4)
            model.control.weight.copy_(torch.where(sparse.abs() > 0.75, sparse.sign(), 0))
    return tokens.repeat_interleave(4, 0)[None]


@pytest.mark.parametrize(("control", "dtype", "large", "backend"), covering(CONTROLS, DTYPES, [True, False], BACKENDS))
def test_attention_with_exact_logits(dtype, large, control, backend):
    """Only weights and output are rounded: 2 eps of the largest value, 1e-6 in float32."""
    outputs = []
    for precision in (dtype, torch.float64):
        model = make_model({"memory_control": control}, precision, backend)
        states = exact_problem(model, control, large)
        output, gradients = run(model, states)
        assert output.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
        outputs.append(output)
    limit = (2 * torch.finfo(dtype).eps + 1e-6) * outputs[1].abs().max()
    assert (outputs[0] - outputs[1]).abs().max() <= limit


def large_problem(model: nn.Module) -> torch.Tensor:
    """Arbitrary weights and (2, 40, d) states with slot logits and reading logits up to 1e3."""
    states, attention = uniform(2, 40, WIDTH, seed=5), model.encoder.layer[0].attention.self
    with torch.no_grad():
        for seed, layer in enumerate((attention.query, attention.key, attention.value)):
            layer.weight.copy_(uniform(WIDTH, WIDTH, seed=10 + seed))
            layer.bias.copy_(uniform(WIDTH, seed=20 + seed))
        if model.control is not None:
            control = uniform(*model.control.weight.shape, seed=30)
            if model.config.memory_control == "mlp":
                control = control * LARGE / (states @ control.T).abs().max()
            model.control.weight.copy_(control)
        factor = LARGE / largest_logit(model, states.to(attention.query.weight.dtype))
        attention.query.weight.mul_(factor)
        attention.query.bias.mul_(factor)
    return states


def largest_logit(model: nn.Module, states: torch.Tensor) -> float:
    """The largest reading logit (for windows, over all tokens)."""
    attention, control = model.encoder.layer[0].attention.self, model.config.memory_control
    layers = (attention.query, attention.key, attention.value)
    query, key, value = (split_heads(layer(states), HEADS) for layer in layers)
    if control in _WRITERS:
        key = _WRITERS[control](attention, states, (key, value), *model.begin(states, None)).key
    return (query @ key.mT).abs().max().item() / query.shape[-1] ** 0.5


def change_by_one_rounding(model: nn.Module, states: torch.Tensor) -> float:
    """The largest change of the float64 output when states and weights change by 2^-24, in three trials."""
    exact, moves = run(model, states)[0], []
    for seed in range(3):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for i, tensor in enumerate(moved.parameters()):
                tensor.mul_(1 + 2.0**-24 * uniform(*tensor.shape, seed=100 * seed + i).sign())
        noise = 1 + 2.0**-24 * uniform(*states.shape, seed=1000 + seed).sign()
        moves.append((run(moved, states * noise)[0] - exact).abs().max().item())
    return max(moves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_with_large_logits_in_float32(variant, backend):
    """The error is at most 8 times the effect of rounding the inputs once, because several products follow."""
    model = make_model(VARIANTS[variant], torch.float32, backend)
    states = large_problem(model).float()
    output, gradients = run(model, states)
    exact = copy.deepcopy(model).double()
    expected, _ = run(exact, states)
    limit = 8 * change_by_one_rounding(exact, states.double())
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert limit < 0.1 * expected.abs().max()  # otherwise the comparison would mean nothing
    assert (output - expected).abs().max() <= limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_precision_stays_finite(dtype, variant, backend):
    """Outputs and gradients, also of padded rows and of a row of padding."""
    model = make_model(VARIANTS[variant], dtype, backend)
    states = large_problem(model)
    for keep in (None, torch.arange(40) < torch.tensor([[3], [0]])):
        output, gradients = run(model, states, keep)
        assert output.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("control", ["compressive", "cluster"])
def test_the_mean_of_many_tokens_does_not_overflow_in_float16(control):
    """The sum of 256 keys of 300 exceeds float16; their mean is 300."""
    options = {"memory_control": control, "memory_size": 2, "max_position_embeddings": 512}
    model = make_model(options, torch.float16, "eager")
    attention = model.encoder.layer[0].attention.self
    states = torch.zeros(1, 512, WIDTH, dtype=torch.float16)
    key = torch.full((1, HEADS, 512, WIDTH // HEADS), 300.0, dtype=torch.float16)
    written = _WRITERS[control](attention, states, (key, key), *model.begin(states, None))
    filled = written.filled.expand(1, HEADS, 2)
    assert (written.key[filled] == 300).all() and (written.value[filled] == 300).all()
