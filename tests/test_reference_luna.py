"""Luna against a literal definition in float64: states and the gradient of every parameter."""

from types import SimpleNamespace

import pytest
import torch
from helpers import in_turn, padded_batch, random_ids, tiny_model, weighted_sum
from reference.luna import encode_row, slots_in_use

SLOTS = 8
VARIANTS = {
    "tied": {},
    "untied-packed-heads": {"tie_kv": False, "num_projected_attention_heads": 2},
    "fixed": {"dynamic_projection": False},
    "tokens-per-slot": {"tokens_per_slot": 3},
    "tokens-per-slot-mixed-prenorm-sinusoidal": {
        **{"tokens_per_slot": 2, "local_window": 5, "norm_first": True, "position_embedding_type": "sinusoidal"},
    },
    "prenorm-sinusoidal": {"norm_first": True, "position_embedding_type": "sinusoidal", "embedding_layer_norm": False},
    "convolution-segments": {"conv_kernel_size": 5, "type_vocab_size": 2},
    "mixed": {"local_window": 5},
    "mixed-untied-fixed-prenorm": {
        **{"local_window": 4, "tie_kv": False, "dynamic_projection": False, "norm_first": True},
    },
    "mixed-all": {"local_window": 5, "slot_counts": "all"},
    "selected": {"local_window": 4, "num_selected_tokens": 3, "num_selection_queries": 5},
    "softmax-length": {"local_window": 4, "num_selected_tokens": 3, "softmax_length": 6},
    "selected-untied-prenorm": {"local_window": 1, "num_selected_tokens": 6, "tie_kv": False, "norm_first": True},
    "mixed-without-bias": {"local_window": 3, "slot_count_bias": False},
    "mixed-full-layer": {"local_window": 5, "full_attention_layers": [0]},
}
PACKED = {
    "default": {},
    "tokens-per-slot": {"tokens_per_slot": 2},
    "mixed-prenorm": {"local_window": 4, "norm_first": True},
    "fixed-convolution": {"dynamic_projection": False, "conv_kernel_size": 3},
}


def reference(model):
    """Weights that take gradients, and the config of the reference."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    config = SimpleNamespace(**model.config.to_dict())
    config.packed_heads = config.num_projected_attention_heads or config.num_attention_heads
    return weights, config


def check(model, rows, side="right"):
    """Compare a padded batch with the reference of every row: both streams, and the gradient of every parameter."""
    inputs = padded_batch([len(row) for row in rows])
    if side == "left":
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    mask = inputs["attention_mask"] == 1
    inputs["input_ids"][mask] = torch.cat(rows)
    inputs["input_ids"][~mask] = 7
    outputs = model(**inputs, output_packed_states=True)
    weights, config = reference(model)
    loss = loss_ref = 0.0
    for i, row in enumerate(rows):
        x_ref, p_ref = encode_row(weights, row.tolist(), config)
        used = slots_in_use(len(row), config)
        x, packed = outputs.last_hidden_state[i][mask[i]], outputs.packed_last_hidden_state[i][:used]
        torch.testing.assert_close((x, packed), (x_ref, p_ref[:used]), rtol=0, atol=1e-10)
        loss = loss + weighted_sum(x) + weighted_sum(packed)
        loss_ref = loss_ref + weighted_sum(x_ref) + weighted_sum(p_ref[:used])
    check_gradients(model, weights, loss, loss_ref)


def check_gradients(model, weights, loss, loss_ref):
    """Compare the gradient of every parameter."""
    loss.backward()
    loss_ref.backward()
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        expected = torch.zeros_like(parameter) if expected is None else expected
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 2, SLOTS - 1, SLOTS, 23])
def test_one_row(variant, length):
    check(tiny_model(num_hidden_layers=2, **VARIANTS[variant]).double(), [random_ids(1, length)[0]])


def test_a_long_row():
    check(tiny_model(num_hidden_layers=1, max_position_embeddings=200).double(), [random_ids(1, 150)[0]])


@pytest.mark.parametrize(("variant", "side"), in_turn(VARIANTS, ["left", "right"]))
def test_padded_rows(variant, side):
    """Some rows are shorter than P."""
    rows = [random_ids(1, length, seed=length)[0] for length in (3, 13, SLOTS)]
    check(tiny_model(num_hidden_layers=2, **VARIANTS[variant]).double(), rows, side)


@pytest.mark.parametrize("variant", PACKED)
def test_packed_states_of_an_earlier_call(variant):
    model = tiny_model(num_hidden_layers=2, **PACKED[variant]).double()
    first, second = random_ids(1, 2 * SLOTS + 1, seed=1), random_ids(1, 5, seed=2)
    packed = model(first, output_packed_states=True).packed_states
    output = model(second, packed_states=packed)
    weights, config = reference(model)
    _, memory = encode_row(weights, first[0].tolist(), config)
    x_ref, p_ref = encode_row(weights, second[0].tolist(), config, memory)
    x, packed = output.last_hidden_state[0], output.packed_last_hidden_state[0]
    torch.testing.assert_close((x, packed), (x_ref, p_ref), rtol=0, atol=1e-10)
    check_gradients(model, weights, weighted_sum(x) + weighted_sum(packed), weighted_sum(x_ref) + weighted_sum(p_ref))
