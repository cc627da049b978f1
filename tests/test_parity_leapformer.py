"""Parity with the authors of LeaPformer and of cosFormer: attention on Long Range Arena and in translation.

Tolerance: 1e-5 in float32. In float64, where ours is exact, twice the distance between the authors' float32 and float64
runs.
"""

from typing import NamedTuple

import pytest
import torch
from official_luna import Fixture
from test_parity_abc import PRECISIONS, assert_near, projections
from torch.nn import functional as F

from luna_hf import LeapformerConfig, LeapformerModel
from luna_hf.families.leapformer.attention import FLOOR, attend_causally, map_features
from luna_hf.layers.memory_attention import Memory
from luna_hf.ops.attention import split_heads
from luna_hf.ops.context import ForwardContext, make_context

SIZES = {"vocab_size": 40, "num_hidden_layers": 1, "intermediate_size": 40, "max_position_embeddings": 24}
precisions = pytest.mark.parametrize("dtype", PRECISIONS)


class Kind(NamedTuple):
    """An attention of the code for Long Range Arena: its group of fixtures and our fields."""

    group: str
    fields: dict


KINDS = {
    "leapformer": Kind("leapformer", {"leap_factor": 2}),
    "cosformer": Kind("cosformer", {"reweighting": "cosine"}),
    "linear": Kind("linear_attention", {"reweighting": "none"}),
    "elu_linear": Kind("linear_attention", {"reweighting": "none", "feature_map": "elu"}),
    "rope": Kind("linear_attention", {"reweighting": "rotary", "feature_map": "elu"}),
    "softmax": Kind("linear_attention", {"reweighting": "none", "full_attention_layers": [0, 1]}),
}


def proportion(weights, theirs, side):
    """Weights of one network of learned proportions; a single layer is two layers: relu(x) - relu(-x) = x."""
    inner, outer = ([weights.get(f"{theirs}.{place}.{part}") for part in ("weight", "bias")] for place in (0, 2))
    if outer[0] is None:
        inner = [torch.cat([part, -part, torch.zeros_like(part).repeat(6, *[1] * (part.dim() - 1))]) for part in inner]
        outer = [torch.tensor([[1.0, -1.0, *[0.0] * 6]]).to(inner[0]), torch.zeros(1).to(inner[0])]
    parts = zip(("inner", "inner", "outer", "outer"), ("weight", "bias") * 2, (*inner, *outer), strict=True)
    return {f"{side}_proportion.{layer}.{part}": tensor for layer, part, tensor in parts}


def rotated(tensor, heads):
    """Their rotary pairs are neighbours in the first half of a head, ours are half of that half apart."""
    first, rest = tensor.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack([torch.cat([first[:, ::2], first[:, 1::2]], 1), rest], 1).flatten(0, 2)


def attention_weights(kind, weights, heads, prefix=""):
    """Our weights of an attention, from those of the code for Long Range Arena."""
    weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    ours = projections(weights, "W_{}")
    if kind == "leapformer":
        for side in ("query", "key"):
            ours |= proportion(weights, f"attn.{side[0]}_numer", side)
    if kind == "rope":
        for part in ("weight", "bias"):
            ours[f"query.{part}"] = ours[f"query.{part}"] * (len(ours["query.bias"]) // heads) ** -0.5  # they scale it
            for side in ("query", "key"):
                ours[f"{side}.{part}"] = rotated(ours[f"{side}.{part}"], heads)
    return ours


def make(dtype, heads, weights=None, width=32, **fields):
    """A model, and the attention of its first layer, with these weights if given."""
    config = LeapformerConfig(**{**SIZES, "hidden_size": width, "num_attention_heads": heads, **fields})
    model = LeapformerModel(config).eval().to(dtype)
    attention = model.encoder.layer[0].attention.self
    if weights is not None:
        attention.load_state_dict(weights)
    return model, attention


def as_theirs(context: ForwardContext, length: int) -> ForwardContext:
    """With the length of the padded batch instead of each row's, as in their cosFormer."""
    return context._replace(lengths=torch.full_like(context.lengths, length))


@precisions
@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("name", [*(f"{kind}_bidirectional" for kind in KINDS), "leapformer_bidirectional_inter1"])
def test_blocks(name, case, dtype):
    """An attention with its projections; the outputs of padding have no meaning."""
    kind = name.split("_bidirectional")[0]
    group, fields = KINDS[kind]
    fixture = Fixture(group, name)
    weights, heads = {n: t.to(dtype) for n, t in fixture.weights().items()}, fixture.config["num_head"]
    fields = {**fields, "full_attention_layers": [0]} if kind == "softmax" else fields
    model, attention = make(dtype, heads, attention_weights(kind, weights, heads), **fields)
    states, keep = fixture.input(case, "hidden").to(dtype), fixture.input(case, "mask") != 0
    slot_states, context = model.begin(states, None if keep.all() else keep)
    with torch.no_grad():
        if kind != "rope":
            for letter, layer in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
                assert_near(split_heads(layer(states), heads), fixture.output(case, letter), fixture, case, letter)
        if kind == "leapformer":
            for side in ("query", "key"):
                features = map_features(split_heads(getattr(attention, side)(states), heads), "relu")
                ours = getattr(attention, f"{side}_proportion")(features)
                theirs = fixture.output(case, f"{side[0]}_proportion")
                assert_near(*(part.transpose(1, 2)[keep] for part in (ours, theirs)), fixture, case, side)
        output, _, _ = attention(states, slot_states, as_theirs(context, keep.shape[1]))
        core = fixture.output(case, "core").transpose(1, 2).flatten(-2)
        assert_near(output[keep], core[keep], fixture, case, "core")
        output = F.linear(output, weights["ff.weight"], weights["ff.bias"])
        assert_near(output[keep], fixture.output(case, "output")[keep], fixture, case, "output")


def layer_weights(kind, weights, heads, number):
    """Our names and weights of a layer of a model for Long Range Arena."""
    theirs, ours = f"model.transformer_{number}", f"encoder.layer.{number}"
    names = {
        **{"mha.ff": "attention.output.dense", "norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"},
        **{"mlpblock.0": "intermediate.dense", "mlpblock.3": "output.dense"},
    }
    pairs = [(old, new, part) for old, new in names.items() for part in ("weight", "bias")]
    found = {f"{ours}.{new}.{part}": weights[f"{theirs}.{old}.{part}"] for old, new, part in pairs}
    own = attention_weights(kind, weights, heads, f"{theirs}.mha.")
    return found | {f"{ours}.attention.self.{name}": tensor for name, tensor in own.items()}


@precisions
@pytest.mark.parametrize("kind", KINDS)
def test_models_for_long_range_arena(kind, dtype):
    """Two pre-norm layers with learned positions, and their classifier over a mean with the padded length."""
    group, fields = KINDS[kind]
    fixture = Fixture(group, f"{kind}_lra_model")
    weights, heads = {n: t.to(dtype) for n, t in fixture.weights().items()}, fixture.config["num_head"]
    layout = {"norm_first": True, "embedding_layer_norm": False, "num_hidden_layers": 2}
    model, _ = make(dtype, heads, **layout, **fields)
    first = model.config.pad_token_id + 1
    ours = {"embeddings.word_embeddings.weight": weights["model.embeddings.word_embeddings.weight"]}
    positions = weights["model.embeddings.position_embeddings.weight"]
    ours["embeddings.position_embeddings.weight"] = F.pad(positions, (0, 0, first, 0))
    for number in (0, 1):
        ours |= layer_weights(kind, weights, heads, number)
    ours |= {f"encoder.final_layer_norm.{part}": weights[f"model.norm.{part}"] for part in ("weight", "bias")}
    model.load_state_dict(ours)
    ids, keep = fixture.input("case0", "input_ids"), fixture.input("case0", "mask") != 0
    with torch.no_grad():
        states = model.embeddings(ids, None, None, None, keep)
        slot_states, context = model.begin(states, keep)
        states, _ = model.encoder(states, slot_states, as_theirs(context, keep.shape[1]))
        if kind != "cosformer":
            assert torch.equal(states, model(ids, attention_mask=keep.long(), unpad_inputs=False).last_hidden_state)
        states = states.masked_fill(~keep.unsqueeze(-1), 0.0)
        assert_near(states, fixture.output("case0", "last_hidden_state"), fixture, "case0", "states")
        layers = (
            [weights[f"seq_classifer.mlpblock.{place}.{part}"] for part in ("weight", "bias")] for place in (0, 2)
        )
        inner, outer = layers
        logits = F.linear(F.relu(F.linear(states.mean(1), *inner)), *outer)
        assert_near(logits, fixture.output("case0", "logits"), fixture, "case0", "logits")


# ---- cosFormer's own code ----


def official(name, dtype):
    fixture = Fixture("cosformer", name)
    weights, heads = {n: t.to(dtype) for n, t in fixture.weights().items()}, fixture.config["num_heads"]
    _, attention = make(dtype, heads, projections(weights, "{}_proj"), reweighting="cosine")
    project = lambda states: F.linear(states, weights["out_proj.weight"], weights["out_proj.bias"])  # noqa: E731
    return fixture, attention, project


@precisions
@pytest.mark.parametrize("case", ["self", "cross"])
@torch.no_grad()
def test_cosformer(case, dtype):
    """Positions of both sides are divided by the larger length; keys and values have separate inputs."""
    fixture, attention, project = official("official_bidirectional", dtype)
    query, *others = (fixture.input(case, name) for name in ("query", "key", "value"))
    key, value = (query if other is None else other for other in others)
    contexts = [make_context(None, states.shape[1], states.device) for states in (query, key)]
    longest = max(query.shape[1], key.shape[1])
    asking, given = (as_theirs(context, longest) for context in contexts)
    written = attention.write(key.to(dtype), None, given)
    if case == "cross":
        values = attention.key_features(split_heads(attention.key(key.to(dtype)), attention.num_heads), given)
        values = values.rotated.mT @ split_heads(attention.value(value.to(dtype)), attention.num_heads)
        written = Memory([written.parts[0]._replace(value=values)])
    output = project(attention.read(query.to(dtype), written, asking)[0])
    for name in ("output", "output_quadratic"):
        assert_near(output, fixture.output(case, name), fixture, case, name)


@precisions
@torch.no_grad()
def test_causal_cosformer(dtype):
    """A causal model refuses it, since it needs the whole length; the scan computes it."""
    fixture, attention, project = official("official_causal", dtype)
    states = fixture.input("self", "query").to(dtype)
    context = make_context(None, states.shape[1], states.device)
    key, value = attention.key_and_value(states)
    query = attention.query_features(attention.queries(states), context)
    output, _ = attend_causally(query, attention.key_features(key, context), value)
    for name in ("output", "output_quadratic"):
        ours = project(output.transpose(1, 2).flatten(2))
        assert_near(ours, fixture.output("self", name), fixture, "self", name)


# ---- the translation code of LeaPformer ----


def translation(dtype):
    """Their queries are scaled; their normaliser is at least 0.1, ours with keys smaller by the ratio of the floors."""
    fixture = Fixture("leapformer", "mt_attention")
    weights, heads = {n: t.to(dtype) for n, t in fixture.weights().items()}, fixture.config["num_heads"]
    ours, shrunk = projections(weights, "{}_proj"), FLOOR / 0.1
    for side in ("query", "key"):
        ours |= proportion(weights, f"{side[0]}_LeaP", side)
    for part in ("weight", "bias"):
        ours[f"query.{part}"] = ours[f"query.{part}"] * (fixture.config["embed_dim"] // heads) ** -0.5
        ours[f"key.{part}"] = ours[f"key.{part}"] * shrunk
    ours["key_proportion.inner.weight"] = ours["key_proportion.inner.weight"] / shrunk
    _, attention = make(dtype, heads, ours, leap_factor=fixture.config["leap_factor"])
    project = lambda states: F.linear(states, weights["out_proj.weight"], weights["out_proj.bias"])  # noqa: E731
    return fixture, attention, project, shrunk


@precisions
@pytest.mark.parametrize("case", ["self", "self_padded", "cross", "clamp_active"])
@torch.no_grad()
def test_translation(case, dtype):
    fixture, attention, project, shrunk = translation(dtype)
    query, padding = fixture.input(case, "query").to(dtype), fixture.input(case, "key_padding_mask")
    source, keep = fixture.input(case, "key_value"), None if padding is None else ~padding
    source = query if source is None else source.to(dtype)
    context = make_context(keep, source.shape[1], source.device)
    own = make_context(None, query.shape[1], query.device)
    output = project(attention.read(query, attention.write(source, None, context), own)[0])
    for name in ("bidirectional_train", "bidirectional_linear", "bidirectional_infer"):
        theirs = fixture.output(case, name)
        if theirs is not None:
            assert_near(output, theirs, fixture, case, name)
    if case == "cross":
        return
    queries, (key, value) = attention.query_features(attention.queries(query), own), attention.key_and_value(source)
    keys = attention.key_features(key, context)
    output, sums = attend_causally(queries, keys, value, keep=keep)
    output = project(output.transpose(1, 2).flatten(2))
    for name in ("causal_train", "causal_incremental"):
        theirs = fixture.output(case, name)
        if theirs is not None:
            assert_near(output, theirs, fixture, case, name)
    # The heads' features in our state are cosines, then sines.
    state = {"kTv": sums.value / shrunk, "norm": sums.total.unsqueeze(-1) / shrunk}
    for name, tensor in state.items():
        for part, half in zip(("cos", "sin"), tensor.flatten(0, 1).chunk(2, dim=1), strict=True):
            theirs = fixture.output(case, f"final_state.{name}_{part}")
            if theirs is not None:
                assert_near(half, theirs, fixture, case, f"{name} {part}")
