"""LeaPformer's peculiarities: the normaliser at its floor, precision, dropout of tokens, real lengths, one token."""

import math

import pytest
import torch
from helpers import normal_states, padded_batch, random_ids, refused, relative_rms, tiny_causal_model, tiny_model
from variants import ROWS

from luna_hf import LeapformerConfig
from luna_hf.families.leapformer.attention import (
    FLOOR,
    Features,
    LearnedProportion,
    attend_causally,
    implied_weights,
    map_features,
    read_sums,
    write_sums,
)
from luna_hf.layers import memory_attention
from luna_hf.ops.context import make_context

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VARIANTS = {"default": {}, **ROWS["leapformer"].encoder}
VARIANTS.pop("full-layer")
variants = pytest.mark.parametrize("variant", VARIANTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def attention_of(make, **fields):
    model = make("leapformer", num_hidden_layers=1, **fields)
    return model.base_model, model.base_model.encoder.layer[0].attention.self


def attend(kind, states, keep=None, dtype=torch.float32, change=lambda attention: None, **fields):
    """Output of one layer, and the gradients of its parameters and of the states."""
    base, attention = attention_of(tiny_model if kind == "encoder" else tiny_causal_model, **fields)
    with torch.no_grad():
        change(attention)
    attention.to(dtype)
    states = states.to(dtype).requires_grad_()
    context = make_context(keep, states.shape[1], states.device)
    if kind == "causal":
        context = context._replace(rotation=base.rotation(context.ranks))
    output, _, _ = attention(states, None, context)
    output.double().square().sum().backward()
    return output.detach(), [states.grad, *(p.grad for p in attention.parameters() if p.grad is not None)]


@dtypes
@pytest.mark.parametrize("kind", ["encoder", "causal"])
@pytest.mark.parametrize("side", ["query", "key"])
def test_without_features_the_output_is_zero_and_its_gradient_finite(side, kind, dtype):
    """relu of a query or of every key is zero."""

    def change(attention):
        getattr(attention, side).bias.fill_(-100.0)

    output, gradients = attend(kind, normal_states(2, 9, 48), dtype=dtype, change=change)
    assert not output.any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@variants
@dtypes
def test_a_row_of_padding_is_zero_and_its_gradient_finite(variant, dtype):
    keep = torch.tensor([[True] * 9, [False] * 9])
    output, gradients = attend("encoder", normal_states(2, 9, 48), keep, dtype, **VARIANTS[variant])
    assert output[0].any() and not output[1].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_a_single_token_reads_its_value(kind):
    states = normal_states(3, 1, 48)
    _, attention = attention_of(tiny_model if kind == "encoder" else tiny_causal_model, feature_map="elu")
    output, _ = attend(kind, states, dtype=torch.float64, feature_map="elu")
    torch.testing.assert_close(output, attention.double().value(states), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1.0, 1e3])
def test_the_quotient_is_exact_above_the_floor_and_bounded_below_it(scale):
    """Features of relu: a scale of the keys cancels wherever the normaliser stays above its floor."""
    query, key, value = normal_states(3, 11, 16).view(3, 1, 2, 11, 8)
    query, key = (map_features(states, "relu") for states in (query, key))

    def read(key):
        return read_sums(Features(query, query), write_sums(Features(key, key), value))

    torch.testing.assert_close(read(scale * key), read(key), rtol=1e-12, atol=1e-12)
    tiny = read(1e-9 * key)
    normaliser = (query @ (1e-9 * key).sum(2).unsqueeze(-1)).clamp(min=FLOOR)
    torch.testing.assert_close(tiny, (query @ (1e-9 * key).mT) @ value / normaliser, rtol=1e-12, atol=1e-12)
    assert tiny.abs().max() < value.abs().max()


def test_the_weights_are_those_of_the_output():
    query, key, value = normal_states(3, 11, 16).view(3, 1, 2, 11, 8)
    query, key = (Features(2 * states.relu(), states.relu()) for states in (query, key))
    output = read_sums(query, write_sums(key, value))
    torch.testing.assert_close(implied_weights(query, key) @ value, output, rtol=0, atol=1e-12)


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_long_texts_in_half_precision(variant, dtype):
    """Sums over 4,000 tokens neither overflow nor stop growing."""
    _, attention = attention_of(tiny_model, max_position_embeddings=4000, **VARIANTS[variant])
    states = 8 * normal_states(1, 4000, 48)
    context = make_context(None, 4000, states.device)
    exact, _, _ = attention.double()(states, None, context)
    half, _, _ = attention.to(dtype)(states.to(dtype), None, context)
    assert half.dtype == dtype and relative_rms(half, exact) < 0.03


@pytest.mark.parametrize("precision", ["autocast", "weights"])
def test_close_proportions_learn_in_bfloat16(precision):
    """Initial proportions differ by less than a rounding of 0.5. If they were equal, nothing would move them apart."""

    def gradients(dtype, autocast=False):
        torch.manual_seed(0)
        network = LearnedProportion(64, 32)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        network.to(dtype)
        features = map_features(normal_states(2, 40, 64).view(2, 1, 40, 64), "relu")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            proportions = network(features.to(dtype))
        relative = (proportions.double().unsqueeze(-1) - proportions.double().unsqueeze(-2)) * (math.pi / 2)
        relative.cos().sum().backward()
        return [parameter.grad.flatten().double() for parameter in network.parameters()][:3]

    half = gradients(torch.float32, autocast=True) if precision == "autocast" else gradients(torch.bfloat16)
    for actual, expected in zip(half, gradients(torch.float32), strict=True):
        assert torch.cosine_similarity(actual, expected, dim=0) > 0.99


@torch.no_grad()
def test_causal_sums_are_as_precise_as_the_encoders():
    """Of the last of 20,000 tokens, in float32."""
    query, key, value = normal_states(3, 20_000, 8).view(3, 1, 1, 20_000, 8)
    query, key = query.relu(), key.relu()
    exact = read_sums(Features(query, query), write_sums(Features(key, key), value))[:, :, -1]
    query, key, value = (states.float() for states in (query, key, value))
    output, memory = attend_causally(Features(query, query), Features(key, key), value)
    torch.testing.assert_close(output[:, :, -1].double(), exact, rtol=0, atol=1e-5)
    assert memory.value.dtype == memory.total.dtype == torch.float32


@torch.no_grad()
def test_cosformer_uses_real_lengths():
    """A padded row has the proportions of the row alone."""
    model = tiny_model("leapformer", reweighting="cosine")
    inputs = padded_batch([20, 7])
    alone = model(inputs["input_ids"][1:, :7]).last_hidden_state
    torch.testing.assert_close(model(**inputs).last_hidden_state[1:, :7], alone, rtol=0, atol=1e-5)


def test_dropout_leaves_out_whole_tokens():
    """All queries of a head lose the same tokens, and the others count more."""
    _, attention = attention_of(tiny_model, attention_probs_dropout_prob=0.5)
    states = normal_states(1, 12, 48)
    attention.double().train()
    _, value = attention.key_and_value(states)
    dropped = attention.drop_tokens(value)
    lost = (dropped == 0).all(-1)
    assert 0 < lost.sum() < lost.numel()
    torch.testing.assert_close(dropped[~lost], 2 * value[~lost])
    assert torch.equal(attention.eval().drop_tokens(value), value)


def test_presets_and_refusals():
    for name, fields in LeapformerConfig.presets.items():
        config = LeapformerConfig.preset(name)
        assert fields == {field: getattr(config, field) for field in fields}
    with refused("num_attention_heads", 16):
        tiny_model("leapformer", reweighting="rotary", num_attention_heads=16)
    assert tiny_model("leapformer", reweighting="rotary", num_attention_heads=24)(random_ids(1, 5))


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_size_of_the_learned_proportions(factor):
    """One network for the queries and one for the keys of each layer, shared by its heads."""
    counts = [
        tiny_model("leapformer", **fields).num_parameters()
        for fields in ({"leap_factor": factor}, {"reweighting": "none"})
    ]
    inner = 12 // factor
    assert counts[0] - counts[1] == 2 * 2 * (12 * inner + inner + inner + 1)


# ---- parts ----


@variants
@pytest.mark.parametrize("padded", [False, True])
def test_parts_of_the_tokens_add_up(variant, padded, monkeypatch):
    model = tiny_model("leapformer", **VARIANTS[variant]).double()
    batch = padded_batch([12, 5, 9]) if padded else {"input_ids": random_ids(2, 12)}
    whole = model(**batch).last_hidden_state  # gradients may be needed
    monkeypatch.setattr(memory_attention, "_PART_TOKENS", 5)
    with torch.no_grad():
        parts = model(**batch).last_hidden_state
    keep = batch.get("attention_mask", torch.ones(2, 12)).bool()
    torch.testing.assert_close(parts[keep], whole[keep], rtol=1e-10, atol=1e-12)
