"""Entropy of attention maps and similarity of slots equal a literal computation, and probing changes nothing."""

import math

import pytest
import torch
from engine.probe import normalised_entropy, probe
from helpers import FAMILIES, padded_batch, tiny_model
from transformers import RobertaConfig, RobertaForMaskedLM

LENGTHS = [12, 5, 9]  # of 8 slots, the second row uses 5


def literal_entropy(weights, queries, keys):
    """Mean of -sum p log p / log(keys), row by row; `queries` and `keys` are numbers, right-padded rows."""
    found = []
    for row, (used_queries, used_keys) in enumerate(zip(queries, keys, strict=True)):
        for head in weights[row].tolist():
            for query in head[:used_queries]:
                assert math.isclose(sum(query[:used_keys]), 1, rel_tol=1e-4)
                found.append(-sum(p * math.log(p) for p in query[:used_keys] if p > 0) / math.log(used_keys))
    return sum(found) / len(found)


def literal_similarity(slots, used):
    found = [
        torch.cosine_similarity(row[i], row[j], dim=0).item()
        for row, count in zip(slots, used, strict=True)
        for i in range(count)
        for j in range(count)
        if i != j
    ]
    return sum(found) / len(found)


def packed_contexts(model, batch):
    """Y_P of every layer, from the next packed states: P' = LN(P + Y_P), undone for a norm without weights."""
    norms = [layer.attention.self.packed_layer_norm for layer in model.base_model.encoder.layer]
    seen = []
    hooks = [norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for norm in norms]
    states = model(**batch, output_packed_hidden_states=True).packed_hidden_states
    for hook in hooks:
        hook.remove()
    return [total - before for total, before in zip(seen, states[:-1], strict=True)]


@pytest.mark.parametrize("kind", ["base", "mlm"])
@pytest.mark.parametrize(("dynamic", "each"), [(True, 1), (True, 2), (False, 1)])
def test_luna_equals_a_literal_computation(kind, dynamic, each):
    model = tiny_model(kind=kind, dynamic_projection=dynamic, tokens_per_slot=each)
    batch = padded_batch(LENGTHS)
    result = probe(model, batch)

    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True, output_pack_attentions=True)
        contexts = packed_contexts(model, batch)
    slots = [min(8, math.ceil(length / each)) if dynamic else 8 for length in LENGTHS]
    expected = {
        "pack_entropy": [literal_entropy(weights, slots, LENGTHS) for weights in outputs.pack_attentions],
        "unpack_entropy": [literal_entropy(weights, LENGTHS, slots) for weights in outputs.attentions],
        "slot_similarity": [literal_similarity(context, slots) for context in contexts],
    }
    assert result.keys() == expected.keys()
    for name, values in expected.items():
        assert len(values) == 2 and result[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
        assert all(value < 1 for value in values)


def abc_slots(model, layer, states):
    """phi (h, m, n) and the keys of the slots (h, m, c) of one layer of an ABC-MLP on a row's states: equation 7."""
    attention, heads = model.encoder.layer[layer].attention.self, model.config.num_attention_heads
    phi = (model.control.weight @ states.T).softmax(-1).unflatten(0, (heads, -1))
    keys = attention.key(states).unflatten(-1, (heads, -1)).transpose(0, 1)  # (h, n, c)
    return phi, phi @ keys


@pytest.mark.parametrize("kind", ["base", "mlm"])
def test_abc_equals_a_literal_computation(kind):
    model = tiny_model("abc_memory", kind, initializer_range=0.5, memory_size=5)
    batch = padded_batch(LENGTHS)
    result = probe(model, batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True, output_hidden_states=True)
        expected = {"read_entropy": [literal_entropy(read, LENGTHS, [5, 5, 5]) for read in outputs.attentions]}
        expected |= {"write_entropy": [], "slot_similarity": []}
        for layer in range(2):
            rows = []
            for row, length in enumerate(LENGTHS):
                states = outputs.hidden_states[layer][row, :length]
                rows.append(abc_slots(model.base_model, layer, states))
            write = [literal_entropy(phi[None], [5], [n]) for (phi, _), n in zip(rows, LENGTHS, strict=True)]
            expected["write_entropy"].append(sum(write) / 3)
            heads = [head for _, keys in rows for head in keys]
            expected["slot_similarity"].append(literal_similarity(heads, [5] * len(heads)))
    assert result.keys() == expected.keys()
    for name, values in expected.items():
        assert len(values) == 2 and result[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
        assert all(value < 0.999 for value in values)
    assert not any("write" in vars(module) for module in model.modules())


@pytest.mark.parametrize("control", ["linformer", "random", "cluster", "local_to_global", "compressive"])
def test_other_slots_have_no_entropy_of_writing_and_empty_ones_do_not_count(control):
    model = tiny_model("abc_memory", "mlm", memory_control=control, memory_size=8)
    result = probe(model, padded_batch(LENGTHS))
    assert result.keys() == {"read_entropy", "slot_similarity"} and all(len(values) == 2 for values in result.values())
    assert all(0 < value <= 1 for value in result["read_entropy"])
    (short,) = padded_batch([5])["input_ids"]  # a row of five tokens fills at most five slots
    alone = probe(model, {"input_ids": short[None]})
    assert all(0 < value <= 1.0001 for value in alone["read_entropy"])
    assert alone["read_entropy"][0] > 0.9 or control == "linformer"


@pytest.mark.parametrize("control", ["full", "sliding_window", "dilated"])
def test_abc_without_slots_has_one_kind_of_map(control):
    options = {"memory_control": control, "memory_size": 3, "initializer_range": 0.2}
    model = tiny_model("abc_memory", "mlm", **options)
    result = probe(model, padded_batch(LENGTHS))
    assert result.keys() == {"attention_entropy"} and all(0.1 < value < 0.999 for value in result["attention_entropy"])
    flat = tiny_model("abc_memory", "mlm", **options)
    for layer in flat.base_model.encoder.layer:
        torch.nn.init.zeros_(layer.attention.self.query.weight)
        torch.nn.init.zeros_(layer.attention.self.query.bias)
    assert probe(flat, padded_batch(LENGTHS))["attention_entropy"] == pytest.approx([1.0] * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family):
    model = tiny_model(family, "mlm")
    (short,) = padded_batch([5])["input_ids"]
    alone = probe(model, {"input_ids": short[None]})
    ids = torch.full((1, 12), 1)
    ids[0, :5] = short
    padded = probe(model, {"input_ids": ids, "attention_mask": (ids != 1).long()})
    for name, values in alone.items():
        assert padded[name] == pytest.approx(values, abs=1e-5), name


def test_roberta_has_one_kind_of_map():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=120, initializer_range=0.5, **shape))
    batch = padded_batch(LENGTHS)
    result = probe(model, batch)
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**batch, output_attentions=True).attentions
    expected = [literal_entropy(weights, LENGTHS, LENGTHS) for weights in maps]
    assert result == {"attention_entropy": pytest.approx(expected, rel=1e-4)}
    assert max(expected) < 0.99


def test_one_slot_has_nothing_to_compare():
    result = probe(tiny_model(kind="mlm", projection_length=1), padded_batch(LENGTHS))
    assert result["unpack_entropy"] == result["slot_similarity"] == [None] * 2
    assert all(0 < value < 1 for value in result["pack_entropy"])


def test_uniform_and_one_hot_maps_are_the_extremes():
    keys = torch.tensor([[True] * 4, [True, True, False, False]])
    queries = torch.tensor([[True, True], [True, False]])
    uniform = (keys / keys.sum(-1, keepdim=True))[:, None, None, :].expand(2, 3, 2, 4)
    assert normalised_entropy(uniform, queries, keys) == pytest.approx(1)
    assert normalised_entropy(torch.eye(4)[None, None, :2].expand(2, 3, 2, 4), queries, keys) == 0
    # A query that does not count may hold anything.
    spoilt = uniform.clone()
    spoilt[1, :, 1] = torch.tensor([1.0, 0, 0, 0])
    assert normalised_entropy(spoilt, queries, keys) == pytest.approx(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_probing_changes_nothing(family):
    model = tiny_model(family, "mlm", hidden_dropout_prob=0.3).train()
    batch = padded_batch(LENGTHS)
    backend, before = model.config._attn_implementation, torch.get_rng_state()
    assert backend == "sdpa"
    first = probe(model, batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and model.base_model.training and model.config._attn_implementation == backend
    assert model.base_model.config._attn_implementation == backend
    hooks = sum(len(module._forward_hooks) for module in model.modules())  # transformers adds its own once
    assert first == probe(model, batch)  # no dropout
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
