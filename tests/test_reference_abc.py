"""ABC's attention against a literal definition in float64: outputs, weights and gradients for every strategy."""

from types import SimpleNamespace

import pytest
import torch
from helpers import covering, normal_states, random_ids, tiny_model, weighted_sum
from reference import abc as reference
from torch import nn

from luna_hf.families.abc.attention import random_slots
from luna_hf.families.abc.configuration import CONTROLS

SLOTS = 8
WIDTH, HEADS = 24, 2
VARIANTS = {
    **{control: {"memory_control": control} for control in CONTROLS},
    "mlp-relu": {"memory_control": "mlp", "control_activation": "relu"},
    "mlp-sigmoid": {"memory_control": "mlp", "control_activation": "sigmoid"},
    "cluster-4-steps": {"memory_control": "cluster", "cluster_iterations": 4},
}
# Slots and a window in one softmax.
WITH_SLOTS = [name for name in VARIANTS if name not in ("sliding_window", "dilated", "full")]
VARIANTS |= {f"{name}-mixed": {**VARIANTS[name], "local_window": 5} for name in WITH_SLOTS}
VARIANTS |= {
    f"{name}-selected": {**VARIANTS[name], "local_window": 4, "num_selected_tokens": 3, "num_selection_queries": 5}
    for name in WITH_SLOTS
}
for name in ("mlp", "local_to_global"):
    VARIANTS[f"{name}-mixed-all"] = {"memory_control": name, "local_window": 5, "slot_counts": "all"}
VARIANTS["compressive-selected-all"] = {**VARIANTS["compressive-selected"], "slot_counts": "all"}
VARIANTS["mlp-mixed-without-bias"] = {"memory_control": "mlp", "local_window": 4, "slot_count_bias": False}
BACKENDS = ["eager", "sdpa"]


def make_model(**fields):
    """A float64 model with attention far from uniform."""
    fields = {"memory_size": SLOTS, "hidden_size": WIDTH, "num_attention_heads": HEADS, **fields}
    model = tiny_model("abc_memory", intermediate_size=32, max_position_embeddings=300, **fields).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".self." in name or name.startswith("control"):
            spread = 2.0 if name.endswith("control.weight") else 1.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = noise * (spread * WIDTH**-0.5 if parameter.dim() == 2 else 0.2)
    return model


def make_states(batch: int, length: int) -> torch.Tensor:
    return normal_states(batch, length, WIDTH, seed=length).requires_grad_()


def control_of(model: nn.Module, layer: int) -> nn.Parameter | None:
    """The control matrix of a layer: its own, the shared one, or none."""
    own = model.encoder.layer[layer].attention.self.control
    owner = own if own is not None else model.control
    return None if owner is None else owner.weight


def attend(model: nn.Module, states: torch.Tensor, keep: torch.Tensor | None = None, layer: int = 0):
    """Output and weights of one attention module."""
    slot_states, context = model.begin(states, keep)
    output, same, weights = model.encoder.layer[layer].attention.self(states, slot_states, context)
    assert same is slot_states
    return output, weights


class Literal:
    """The reference with copies of a layer's parameters, which get separate gradients."""

    def __init__(self, model: nn.Module, layer: int = 0):
        attention, self.config = model.encoder.layer[layer].attention.self, SimpleNamespace(**model.config.to_dict())
        self.weights = {n: p.detach().clone().requires_grad_() for n, p in attention.named_parameters()}
        control = control_of(model, layer)
        self.control = None if control is None else control.detach().clone().requires_grad_()
        self.seed = model.config.control_seed + (0 if model.config.share_control else layer)

    def __call__(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cross(row, row)

    def cross(self, row: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = random_slots(torch.arange(len(context))[None], self.config.memory_size, self.seed)[0].tolist()
        return reference.attention(self.weights, row, self.config, self.control, slots, context)


def assert_near(ours: torch.Tensor | None, theirs: torch.Tensor | None, atol: float, what: str) -> None:
    ours = torch.zeros_like(theirs) if ours is None else ours
    theirs = torch.zeros_like(ours) if theirs is None else theirs
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda message: f"{what}: {message}")


def assert_same_gradients(model: nn.Module, literal: Literal, layer: int = 0) -> None:
    for name, parameter in model.encoder.layer[layer].attention.self.named_parameters():
        if not name.startswith("control"):
            assert_near(parameter.grad, literal.weights[name].grad, 1e-8, f"gradient of {name}")
    if literal.control is not None:
        assert_near(control_of(model, layer).grad, literal.control.grad, 1e-8, "gradient of the control")


def check_row(length: int, **fields) -> None:
    """Output, weights and gradients of one row in both backends."""
    model = make_model(num_hidden_layers=1, **fields)
    literal, states = Literal(model), make_states(1, length)
    row = states[0].detach().clone().requires_grad_()
    expected, expected_weights = literal(row)
    weighted_sum(expected).backward()
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        model.zero_grad()
        states.grad = None
        output, weights = attend(model, states)
        assert_near(output[0], expected, 1e-10, "output")
        weighted_sum(output[0]).backward()
        assert_near(states.grad[0], row.grad, 1e-8, "gradient of the states")
        assert_same_gradients(model, literal)
        if backend == "eager" and weights.shape[-1] != expected_weights.shape[-1]:  # every token was read
            assert weights.shape == (1, HEADS, length, length)
        elif backend == "eager":
            assert_near(weights[0], expected_weights, 1e-10, "weights")
            # Only relu may leave every slot empty.
            relu = fields.get("control_activation") == "relu"
            total = expected_weights.any(-1) if relu else torch.ones(HEADS, length)
            assert_near(weights[0].sum(-1), total.double(), 1e-12, "sum of the weights")
        else:
            assert weights is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_row(variant):
    for length in (1, 2, SLOTS - 1, SLOTS, SLOTS + 1, 63):
        check_row(length, **VARIANTS[variant])


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "full"])
def test_other_memory_sizes(variant):
    """One slot, an odd number of slots, more slots than tokens, and a long row."""
    for memory_size, length in ((1, 1), (1, 6), (5, 4), (5, 23), (40, 11), (16, 70)):
        check_row(length, **{**VARIANTS[variant], "memory_size": memory_size})


def padded_rows(side: str) -> torch.Tensor:
    """(4, 14) boolean: 3, 13, 8 and 0 tokens, padded on one side or in between."""
    keep = torch.zeros(4, 14, dtype=torch.bool)
    for row, length in enumerate((3, 13, SLOTS, 0)):
        start = 0 if side == "right" else 14 - length
        keep[row, start : start + length] = True
    if side == "middle":
        generator = torch.Generator().manual_seed(0)
        keep = torch.stack([row[torch.randperm(14, generator=generator)] for row in keep])
    return keep


@pytest.mark.parametrize(
    ("variant", "side", "backend"), covering(list(VARIANTS), ["left", "right", "middle"], BACKENDS)
)
def test_padded_rows(variant, side, backend):
    """A padded row equals the row alone, whatever its padding holds; a row of padding stays finite."""
    model = make_model(num_hidden_layers=1, **VARIANTS[variant])
    model.set_attn_implementation(backend)
    literal, keep = Literal(model), padded_rows(side)
    states = make_states(*keep.shape)
    with torch.no_grad():
        states[~keep] = states[~keep] * 1e3
    output, weights = attend(model, states, keep)
    assert output.isfinite().all() and (weights is None or weights.isfinite().all())
    loss = loss_ref = 0.0
    row_states = states.detach().clone().requires_grad_()
    for row, kept in enumerate(keep[:-1]):
        expected, expected_weights = literal(row_states[row][kept])
        assert_near(output[row][kept], expected, 1e-10, "output")
        if weights is not None and variant == "full":
            assert_near(weights[row][:, kept][:, :, kept], expected_weights, 1e-10, "weights")
            assert not weights[row][:, :, ~kept].any()
        elif weights is not None:
            assert_near(weights[row][:, kept], expected_weights, 1e-10, "weights")
        loss, loss_ref = loss + weighted_sum(output[row][kept]), loss_ref + weighted_sum(expected)
    # The row of padding belongs to the loss: its gradient is zero, not NaN.
    (loss + 0.0 * output[-1].sum()).backward()
    loss_ref.backward()
    assert_near(states.grad, row_states.grad, 1e-8, "gradient of the states")
    assert_same_gradients(model, literal)


@pytest.mark.parametrize("share_control", [True, False])
@pytest.mark.parametrize("control", ["mlp", "linformer", "random"])
def test_controls_of_the_layers(control, share_control):
    """In the whole model, each layer uses its own control or the shared one."""
    fields = {"memory_control": control, "share_control": share_control, "num_hidden_layers": 2, "control_seed": 5}
    model = make_model(**fields)
    calls = []
    for layer in model.encoder.layer:
        hook = lambda module, args, output: calls.append((args[0], output[0]))  # noqa: E731
        layer.attention.self.register_forward_hook(hook)
    model(random_ids(1, 21))
    assert len(calls) == 2
    for layer, (states, output) in enumerate(calls):
        expected, _ = Literal(model, layer)(states[0])
        assert_near(output[0], expected, 1e-10, f"layer {layer}")
    matrices = [name for name, _ in model.named_parameters() if name.endswith("control.weight")]
    if control == "random":
        assert not matrices
    elif share_control:
        assert matrices == ["control.weight"]
    else:
        assert matrices == [f"encoder.layer.{i}.attention.self.control.weight" for i in range(2)]


@pytest.mark.parametrize("share_control", [True, False])
def test_random_draws_of_the_layers(share_control):
    """Two layers with equal weights differ in their draws only."""
    model = make_model(memory_control="random", share_control=share_control, num_hidden_layers=2)
    first, second = (layer.attention.self for layer in model.encoder.layer)
    second.load_state_dict(first.state_dict())
    states = make_states(1, 63)
    outputs = [attend(model, states, layer=layer)[0] for layer in (0, 1)]
    assert torch.equal(*outputs) == share_control
    model.config.control_seed = 7
    assert not torch.equal(attend(model, states)[0], outputs[0])


def test_gradient_of_a_shared_control_is_the_sum_over_layers():
    shared, separate = (make_model(num_hidden_layers=2, share_control=share) for share in (True, False))
    weights = {name: p for name, p in shared.state_dict().items() if name != "control.weight"}
    own = {f"encoder.layer.{i}.attention.self.control.weight": shared.control.weight.detach() for i in range(2)}
    separate.load_state_dict(weights | own)
    for model in (shared, separate):
        weighted_sum(model(random_ids(2, 21)).last_hidden_state).backward()
    total = sum(control_of(separate, i).grad for i in range(2))
    assert_near(shared.control.weight.grad, total, 1e-9, "gradient")


# ---- the reference itself ----


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_the_window_is_the_papers_queue_read_later(m):
    """Section 3.3 is causal; an encoder's token reads the queue after its later neighbours have entered."""
    generator = torch.Generator().manual_seed(m)
    query, key, value = torch.randn(3, 11, 4, generator=generator, dtype=torch.float64)
    output, weights = reference.window(query, key, value, m)
    later = (m - 1) // 2
    keys, values = (reference.queue(states, m, 11 + later) for states in (key, value))
    filled = reference.queue(torch.ones(11, 1, dtype=torch.float64), m, 11 + later)
    for t in range(11):
        used = [bool(slot) for slot in filled[t + later]]
        expected, expected_weights = reference.read(query[t], keys[t + later], values[t + later], used)
        assert_near(output[t], expected, 1e-12, "output")
        assert_near(weights[t], expected_weights, 1e-12, "weights")


def test_the_reference_is_not_uniform():
    """The weights compared above are far from uniform, so that a mistake shows."""
    for control in CONTROLS:
        literal = Literal(make_model(num_hidden_layers=1, memory_control=control))
        output, weights = literal(make_states(1, 63)[0])
        assert weights.max() > 2 * weights[weights > 0].mean(), control
        weighted_sum(output).backward()
        for name, parameter in [*literal.weights.items(), ("control", literal.control)]:
            # A softmax ignores a constant added to the logits, such as the bias of the keys.
            assert parameter is None or name == "key.bias" or parameter.grad.abs().max() > 1e-2, (control, name)
