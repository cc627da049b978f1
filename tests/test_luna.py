"""Luna's packed stream in the models: slots, poolings and outputs."""

import pytest
import torch
from helpers import padded_batch, random_ids, refused, tiny_config, tiny_model

from luna_hf import LunaConfig, LunaForSequenceClassification, LunaModel


@pytest.mark.parametrize(
    ("keyword", "named"),
    [("output_packed_hiden_states", "output_packed_hidden_states"), ("output_pack_attentions", "eager")],
)
def test_wrong_keywords_are_refused_by_name(keyword, named):
    with refused(keyword, named):
        tiny_model()(random_ids(2, 4), **{keyword: True})


def test_joining_the_streams_keeps_exact_gradients():
    """A zero gradient of one stream must not disturb the other."""
    model = tiny_model().double()
    ids = random_ids(2, 12)
    outputs = model(ids)
    both = torch.autograd.grad(
        outputs[0].sum() + outputs[1].pow(2).sum(), model.parameters(), retain_graph=True, allow_unused=True
    )
    first = torch.autograd.grad(outputs[0].sum(), model.parameters(), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(outputs[1].pow(2).sum(), model.parameters(), allow_unused=True)
    for total, a, b in zip(both, first, second, strict=True):
        torch.testing.assert_close(total, a + b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_short_rows_use_as_many_slots_as_they_have_tokens(side):
    inputs = padded_batch([12, 3])
    if side == "left":
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    dynamic = tiny_model()(**inputs)
    assert dynamic.packed_attention_mask.tolist() == [[1] * 8, [1] * 3 + [0] * 5]
    fixed = tiny_model(dynamic_projection=False)(**inputs)
    assert fixed.packed_attention_mask is None and fixed.packed_last_hidden_state.shape == (2, 8, 48)
    torch.testing.assert_close(fixed.last_hidden_state[0], dynamic.last_hidden_state[0], rtol=0, atol=1e-6)
    assert (fixed.last_hidden_state[1] - dynamic.last_hidden_state[1]).abs().max() > 1e-3


@pytest.mark.parametrize(("tokens", "slots"), [(1, [8, 3]), (2, [6, 2]), (3, [4, 1]), (100, [1, 1])])
def test_rows_use_a_slot_for_so_many_tokens(tokens, slots):
    """Rounded up; no more are computed than the longest row of the batch uses."""
    output = tiny_model(tokens_per_slot=tokens)(**padded_batch([12, 3]))
    most = max(slots)
    assert output.packed_last_hidden_state.shape == (2, most, 48)
    assert output.packed_attention_mask.tolist() == [[1] * used + [0] * (most - used) for used in slots]


def test_tokens_per_slot_needs_dynamic_projection():
    with refused("tokens_per_slot", "dynamic_projection"):
        tiny_config(tokens_per_slot=2, dynamic_projection=False)


@pytest.mark.parametrize("pooling", ["packed_max", "packed_mean", "packed_attention"])
def test_packed_poolings_read_the_packed_states(pooling):
    torch.manual_seed(0)
    model = LunaForSequenceClassification(tiny_config(classifier_pooling=pooling)).eval()
    inputs = padded_batch([12, 3])
    outputs = model.luna(**inputs)
    packed, slots = outputs.packed_last_hidden_state, outputs.packed_attention_mask.bool()
    for row in range(2):
        kept = packed[row][slots[row]]
        if pooling == "packed_max":
            pooled = model.pooling.in_proj(kept).max(0).values
        elif pooling == "packed_mean":
            pooled = kept.mean(0)
        else:
            pooled = literal_attention_pooling(model.pooling, outputs.last_hidden_state[row, 0], kept, 4)
        expected = model.classifier(pooled)
        torch.testing.assert_close(model(**inputs).logits[row], expected, rtol=0, atol=1e-5)


def literal_attention_pooling(pooling, first, packed, heads):
    query, keys, values = pooling.query(first), pooling.key(packed), pooling.value(packed)
    size = len(first) // heads
    parts = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        weights = torch.softmax(keys[:, part] @ query[part] / size**0.5, 0)
        parts.append(weights @ values[:, part])
    return pooling.LayerNorm(pooling.output(torch.cat(parts)))


def test_base_size_of_the_paper():
    with torch.device("meta"):
        model = LunaModel(LunaConfig())
    assert model.packed_embeddings.weight.shape == (128, 768) and len(model.encoder.layer) == 12
    assert model.embeddings.position_embeddings.weight.shape == (514, 768)


def test_attention_maps_are_probabilities():
    model = tiny_model(num_projected_attention_heads=2)
    model.set_attn_implementation("eager")
    inputs = padded_batch([20, 3])
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_pack_attentions=True)
    assert len(out.attentions) == len(out.pack_attentions) == model.config.num_hidden_layers
    for unpack, pack in zip(out.attentions, out.pack_attentions, strict=True):
        assert unpack.shape == (2, 4, 20, 8) and pack.shape == (2, 2, 8, 20)
        torch.testing.assert_close(unpack.sum(-1), torch.ones(2, 4, 20))
        torch.testing.assert_close(pack.sum(-1), torch.ones(2, 2, 8))
        assert not pack[1, :, :, 3:].any(), "a pad was packed"
        assert not unpack[1, :, :, 3:].any(), "an unused slot was unpacked"


# ---- packed states that pass from one call to the next; values and gradients: `test_reference_luna.py` ----


@pytest.mark.parametrize("kind", ["mlm", "sequence", "token", "span"])
def test_every_head_passes_packed_states_on(kind):
    model, ids = tiny_model(kind=kind), random_ids(2, 12)
    first = model(ids, output_packed_states=True)
    assert first.packed_states.shape == (2, 8, 48) and model(ids).packed_states is None
    second = model(ids, packed_states=first.packed_states)
    assert not torch.allclose(first[0], second[0], atol=1e-5)


def test_with_packed_states_all_slots_are_in_use():
    model, ids = tiny_model(), random_ids(1, 15)
    packed = model(ids, output_packed_states=True).packed_states
    assert model(ids[:, :3], packed_states=packed).packed_attention_mask.tolist() == [[1] * 8]


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_rows_without_a_token_keep_their_packed_states(norm_first):
    model, ids = tiny_model(norm_first=norm_first), random_ids(2, 10)
    packed = model(ids, output_packed_states=True).packed_states
    mask = torch.tensor([[1], [0]]).expand(2, 10)
    after = model(ids, mask, packed_states=packed, output_packed_states=True).packed_states
    assert torch.equal(after[1], packed[1]) and (after[0] - packed[0]).abs().max() > 1e-3


def test_packed_states_of_another_shape_are_refused():
    with refused("packed_states", "(1, 8, 48)", "(1, 3, 48)"):
        tiny_model()(random_ids(1, 12), packed_states=torch.zeros(1, 3, 48))
    with refused("packed_states", "(1, 8, 48)", "24 tokens"):
        tiny_model(tokens_per_slot=3)(random_ids(1, 12), packed_states=torch.zeros(1, 4, 48))
