"""The model against a literal definition in float64: states and the gradient of every parameter."""

from types import SimpleNamespace

import pytest
import torch
from helpers import random_ids, tiny_model
from reference.luna import encode_row

SLOTS = 8
VARIANTS = {
    "tied": {},
    "untied-packed-heads": {"tie_kv": False, "num_projected_attention_heads": 2},
    "fixed": {"dynamic_projection": False},
    "prenorm-sinusoidal": {"norm_first": True, "position_embedding_type": "sinusoidal", "embedding_layer_norm": False},
    "convolution-segments": {"conv_kernel_size": 5, "type_vocab_size": 2},
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(model, rows):
    """Reference states of every row, with weights that take gradients."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    config = SimpleNamespace(**model.config.to_dict())
    config.packed_heads = config.num_projected_attention_heads or config.num_attention_heads
    return weights, [encode_row(weights, row, config) for row in rows]


def weighted_sum(states: torch.Tensor) -> torch.Tensor:
    """A loss that depends on every entry in its own way."""
    return (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).sum()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 2, SLOTS - 1, SLOTS, 23])
def test_states_and_gradients(variant, length):
    model = tiny_model(num_hidden_layers=2, **VARIANTS[variant]).double()
    ids = random_ids(1, length)
    outputs = model(ids)
    x, p = outputs.last_hidden_state[0], outputs.packed_last_hidden_state[0]
    weights, [(x_ref, p_ref)] = reference(model, ids.tolist())
    torch.testing.assert_close(x, x_ref, rtol=0, atol=1e-10)
    torch.testing.assert_close(p, p_ref[: p.shape[0]], rtol=0, atol=1e-10)

    (weighted_sum(x) + weighted_sum(p)).backward()
    (weighted_sum(x_ref) + weighted_sum(p_ref[: p.shape[0]])).backward()
    assert_same_gradients(model, weights)


@pytest.mark.parametrize("length", [63, 257])
def test_longer_rows(length):
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=300).double()
    ids = random_ids(1, length)
    x = model(ids).last_hidden_state[0]
    weights, [(x_ref, _)] = reference(model, ids.tolist())
    torch.testing.assert_close(x, x_ref, rtol=0, atol=1e-10)
    weighted_sum(x).backward()
    weighted_sum(x_ref).backward()
    assert_same_gradients(model, weights)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_batch(variant, side):
    """Rows of different lengths, some shorter than P, padded in one batch: each equals its reference."""
    model = tiny_model(num_hidden_layers=2, **VARIANTS[variant]).double()
    rows = [random_ids(1, length, seed=length)[0].tolist() for length in (3, 13, SLOTS)]
    width = 16
    ids, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    outputs = model(ids, attention_mask=mask)
    weights, references = reference(model, rows)
    loss = loss_ref = 0.0
    for i, (x_ref, p_ref) in enumerate(references):
        x = outputs.last_hidden_state[i][mask[i] == 1]
        used = min(len(rows[i]), SLOTS) if model.config.dynamic_projection else SLOTS
        p = outputs.packed_last_hidden_state[i][:used]
        torch.testing.assert_close(x, x_ref, rtol=0, atol=1e-10)
        torch.testing.assert_close(p, p_ref[:used], rtol=0, atol=1e-10)
        loss, loss_ref = (
            loss + weighted_sum(x) + weighted_sum(p),
            loss_ref + weighted_sum(x_ref) + weighted_sum(p_ref[:used]),
        )
    loss.backward()
    loss_ref.backward()
    assert_same_gradients(model, weights)


def assert_same_gradients(model, weights):
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        expected = torch.zeros_like(parameter) if expected is None else expected
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
