"""LAVO's attention against a literal definition in float64: outputs, weights and gradients."""

import pytest
import torch
from helpers import gradients, in_turn, normal_states, random_ids, tiny_causal_model, tiny_model
from reference import lavo as reference
from test_reference_abc import assert_near, padded_rows
from test_reference_leapformer import assert_equal_results, by_tokens, check_padded_rows, context_of, literal

from luna_hf import read_memory, write_memory

WIDTH, HEADS = 16, 2
PARTS = {
    "both": {},
    "both-odd-window": {"local_window": 5},
    "more-bases-than-entries": {"num_bases": 10},
    "wide-window": {"local_window": 20},
    "narrow-window": {"local_window": 1},
    "without-dissection": {"context_dissection": False},
    "without-position-bias": {"window_position_bias": False},
    "global": {"attention_parts": "global"},
    "global-of-values": {"attention_parts": "global", "context_dissection": False},
    "local": {"attention_parts": "local"},
    "no-window": {"local_window": 0},
}
CAUSAL = {**PARTS, "rotary": {"position_embedding_type": "rotary"}}
BOTH_KINDS = [("encoder", name) for name in PARTS] + [("causal", name) for name in CAUSAL]
kinds = pytest.mark.parametrize("kind", ["encoder", "causal"])


def make(kind, **fields):
    """The attention of one layer in float64, with weights far from uniform, and its base model."""
    fields = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, **fields}
    fields = {"num_bases": 3, "local_window": 4, **fields}
    model = (tiny_model if kind == "encoder" else tiny_causal_model)("lavo", **fields).double()
    attention = model.base_model.encoder.layer[0].attention.self
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = noise * {1: 0.5, 2: 1.5 * WIDTH**-0.5, 3: 1.0}[parameter.dim()]
    return model.base_model, attention


@pytest.mark.parametrize(("kind", "variant", "side"), in_turn(BOTH_KINDS, ["left", "right", "middle"]))
def test_padded_rows(kind, variant, side):
    """A padded row equals the row alone, whatever its padding holds; a row of padding stays finite."""
    model, attention = make(kind, **CAUSAL[variant])
    check_padded_rows(reference, kind, model, attention, padded_rows(side))


# Around the borders of the blocks in which a window is read.
LENGTHS = {1: [1, 2, 3], 4: [*range(1, 14)], 5: [*range(1, 17)], 64: [1, 63, 64, 65, 127, 128, 129, 300]}


@kinds
@pytest.mark.parametrize("window", LENGTHS)
def test_lengths(window, kind):
    """Outputs at every length, gradients at the longest."""
    model, attention = make(kind, local_window=window, num_attention_heads=1)
    config, weights = literal(attention)
    for length in LENGTHS[window]:
        states = normal_states(1, length, WIDTH, seed=length).requires_grad_()
        copy = states.detach().clone().requires_grad_()
        output, _, _ = attention(states, None, context_of(model, kind, states, None))
        expected, _ = reference.attention(weights, copy[0], config, causal=kind == "causal")
        assert_near(output[0], by_tokens(expected), 1e-10, f"output of {length} tokens")
    tensors, copies = [states, *attention.parameters()], [copy, *weights.values()]
    assert_equal_results([output[0]], [by_tokens(expected)], tensors, copies)


@pytest.mark.parametrize(("kind", "variant", "length"), in_turn(BOTH_KINDS, [11, 1, 2]))
def test_weights(kind, variant, length):
    """Over slots and window; they sum to one."""
    model, attention = make(kind, **CAUSAL[variant], attn_implementation="eager")
    (config, weights), ids = literal(attention), random_ids(2, length)
    outputs = model(ids, output_attentions=True, output_hidden_states=True)
    for row in range(2):
        _, expected = reference.attention(weights, outputs.hidden_states[0][row], config, causal=kind == "causal")
        assert_near(outputs.attentions[0][row], expected, 1e-10, "weights")
        assert_near(expected.sum(-1), torch.ones(HEADS, length, dtype=torch.float64), 1e-12, "sum of the weights")


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(padded, backend):
    """5 queries read a context of 9 tokens, without a window."""
    _, attention = make("encoder", attn_implementation=backend)
    config, weights = literal(attention)
    queries, context = (normal_states(2, n, WIDTH, seed=n).requires_grad_() for n in (5, 9))
    mask = torch.ones(2, 9)
    if padded:
        mask[0, 6:], mask[1, ::2] = 0, 0
    output, maps = read_memory(attention, queries, write_memory(attention, context, mask))
    copies = [part.detach().clone().requires_grad_() for part in (queries, context)]
    found = [reference.cross_attention(weights, copies[0][i], copies[1][i][mask[i] == 1], config) for i in range(2)]
    used = {name: parameter for name, parameter in attention.named_parameters() if name in READ_ACROSS}
    assert used.keys() == READ_ACROSS
    tensors, others = [queries, context, *used.values()], [*copies, *(weights[name] for name in used)]
    assert_equal_results([*output], [by_tokens(heads) for heads, _ in found], tensors, others)
    if backend == "eager":
        assert_near(maps, torch.stack([rows for _, rows in found]), 1e-10, "weights")


READ_ACROSS = {"bases", "query.weight", "query.bias", "value.weight", "value.bias"}


@kinds
def test_the_reference_is_far_from_uniform(kind):
    config, weights = literal(make(kind)[1])
    output, maps = reference.attention(weights, normal_states(1, 30, WIDTH)[0], config, causal=kind == "causal")
    for part in maps.split([3, 4], -1):
        assert part[:, 5:-5].max() > 1.5 * part[:, 5:-5].mean()
    for name, gradient in zip(weights, gradients([output], list(weights.values())), strict=True):
        assert gradient.abs().max() > 1e-3 or name == "key.bias", name
