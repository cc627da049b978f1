"""Mixed layers: identities with other attention, switches of a forward pass, gradients of causal layers, full layers.

The literal definition is `reference/mixed.py`. `test_reference_<family>.py` compares encoders with it and
`test_causal_models.py` causal models; both, like all shared tests, run the variants with a `local_window`.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    FAMILIES,
    MIXING_FAMILIES,
    MODELS,
    covering,
    inputs_for,
    model_class,
    normal_states,
    padded_batch,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_model,
    weighted_sum,
    window_of,
)
from reference import causal as reference
from test_causal_models import step_by_step
from test_reference_abc import assert_near, padded_rows
from test_warm_start import batch_for, make_source
from test_warm_start import states as states_of
from test_write_read import by_heads, make_attention
from variants import ROWS

from luna_hf import MemoryCache
from luna_hf.families.abc.configuration import CAUSAL_CONTROLS, WITHOUT_SLOTS
from luna_hf.ops.context import make_context
from luna_hf.ops.memories import SlotMemory, WindowMemory
from luna_hf.ops.memory_read import read_memories

every_family = pytest.mark.parametrize("family", FAMILIES)
families = pytest.mark.parametrize("family", MIXING_FAMILIES)
backends = pytest.mark.parametrize("backend", ["eager", "sdpa"])
WINDOW = 5
PADDED = padded_batch([23, 9, 2])
REAL = PADDED["attention_mask"] == 1


def float64(family, kind="base", **fields):
    """A float64 model with attention far from uniform; equal parameters for equal seeds."""
    make = tiny_causal_model if kind == "causal" else tiny_model
    model = make(family, **({} if kind == "causal" else {"kind": kind}), **fields).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".self." in name and parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def with_weights_of(model, other):
    """The model with another's weights where names and shapes agree."""
    given, own = other.state_dict(), model.state_dict()
    own.update({name: weight for name, weight in given.items() if name in own and own[name].shape == weight.shape})
    model.load_state_dict(own)
    return model


def hidden(model, **reads):
    """States of a padded batch's real tokens."""
    return model(**PADDED, **reads)[0][REAL]


# ---- the bias ----


@backends
@pytest.mark.parametrize("window", [0, 4])
@torch.no_grad()
def test_a_slot_with_the_logarithm_of_its_tokens_equals_these_tokens(backend, window):
    """A slot that is the mean of s equal keys and values; alone, and beside a window."""
    attention, query = make_attention(backend), by_heads(11, seed=0)
    sizes, key, value = torch.tensor([3, 1, 7]), by_heads(3, seed=1), by_heads(3, seed=2)
    equal = SlotMemory(key.repeat_interleave(sizes, 2), value.repeat_interleave(sizes, 2))
    bias = sizes.double().log().expand(2, query.shape[1], 3)
    beside = [WindowMemory(by_heads(11, seed=3), by_heads(11, seed=4), None, window)] if window else []
    expected, _ = read_memories(attention, query, [equal, *beside])
    output, _ = read_memories(attention, query, [SlotMemory(key, value, bias=bias), *beside])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@backends
@torch.no_grad()
def test_the_bias_is_that_of_each_head_and_empty_slots_stay_unread(backend):
    attention, query, key, value = make_attention(backend), *(by_heads(6, seed) for seed in range(3))
    bias = torch.randn(2, query.shape[1], 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    filled = torch.tensor([[True] * 6, [True, False, True, True, False, True]])[:, None]
    output, _ = read_memories(attention, query, [SlotMemory(key, value, filled, bias)])
    logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias.unsqueeze(-2)
    weights = logits.masked_fill(~filled.unsqueeze(-2), -torch.inf).softmax(-1)
    torch.testing.assert_close(output, (weights @ value).transpose(1, 2).flatten(2), rtol=0, atol=1e-12)


# ---- other attention as a special case ----


@families
@pytest.mark.parametrize("kind", ["base", "causal"])
@torch.no_grad()
def test_without_window_and_bias_a_mixed_model_is_the_papers(family, kind):
    paper = float64(family, kind)
    mixed = with_weights_of(float64(family, kind, local_window=WINDOW, slot_count_bias=False), paper)
    assert dict(mixed.named_parameters()).keys() == dict(paper.named_parameters()).keys()
    torch.testing.assert_close(hidden(mixed, local_window=0), hidden(paper), rtol=0, atol=1e-12)
    assert (hidden(mixed) - hidden(paper)).abs().max() > 1e-3


@backends
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("kind", ["base", "causal"])
@torch.no_grad()
def test_without_slots_a_mixed_layer_is_a_sliding_window(kind, window, backend):
    mixed = float64("abc_memory", kind, local_window=window)
    fields = {"memory_control": "sliding_window", "memory_size": window}
    sliding = with_weights_of(float64("abc_memory", kind, **fields), mixed)
    for model in (mixed, sliding):
        model.set_attn_implementation(backend)
    torch.testing.assert_close(hidden(mixed, read_slots=False), hidden(sliding), rtol=0, atol=1e-12)
    if kind == "causal":
        parts = random_ids(2, 31).split([9, 1, 1, 13, 7], dim=1)
        caches = [MemoryCache(model.config) for model in (mixed, sliding)]
        for part in parts:
            ours, theirs = (
                model(part, cache=cache, **reads).logits
                for model, cache, reads in zip((mixed, sliding), caches, ({"read_slots": False}, {}), strict=True)
            )
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@families
@backends
@torch.no_grad()
def test_without_slots_a_window_over_the_row_is_softmax_attention(family, backend):
    """Of the projections with which the tokens read; Luna's packed states then change no token."""
    fields = {"tie_kv": False} if family == "luna" else {}
    mixed = float64(family, local_window=46, slot_counts="all", **fields)
    full = with_weights_of(float64("abc_memory", memory_control="full"), mixed)
    for model in (mixed, full):
        model.set_attn_implementation(backend)
    torch.testing.assert_close(hidden(mixed, read_slots=False), hidden(full), rtol=0, atol=1e-12)
    assert (hidden(mixed) - hidden(full)).abs().max() > 1e-3


# ---- switches of a forward pass ----


@families
@pytest.mark.parametrize("kind", ["base", "causal"])
@torch.no_grad()
def test_a_smaller_window_for_one_pass(family, kind):
    """Equals that of a model configured with it."""
    model = float64(family, kind, local_window=WINDOW)
    assert torch.equal(hidden(model, local_window=WINDOW, read_slots=True), hidden(model))
    for window in (1, 2, 4):
        smaller = with_weights_of(float64(family, kind, local_window=window), model)
        torch.testing.assert_close(hidden(model, local_window=window), hidden(smaller), rtol=0, atol=1e-12)


@families
@pytest.mark.parametrize("reads", [{"local_window": 0}, {"local_window": 2}, {"read_slots": False}], ids=str)
@torch.no_grad()
def test_switches_while_decoding(family, reads):
    """Every pass reads as asked; the state holds all that a later pass may ask for."""
    model, ids = float64(family, "causal", local_window=WINDOW, num_hidden_layers=1), random_ids(2, 30)
    whole, switched = model(ids).logits, model(ids, **reads).logits
    cache, logits = MemoryCache(model.config), []
    for index, part in enumerate(ids.split([7, 1, 1, 12, 1, 8], dim=1)):
        logits.append(model(part, cache=cache, **(reads if index % 2 else {})).logits)
    sizes = [part.shape[1] for part in logits]
    for index, (part, *expected) in enumerate(
        zip(logits, whole.split(sizes, 1), switched.split(sizes, 1), strict=True)
    ):
        torch.testing.assert_close(part, expected[index % 2], rtol=0, atol=1e-12)


@families
@pytest.mark.parametrize("kind", [*MODELS, "causal"])
@torch.no_grad()
def test_every_head_takes_the_switches(family, kind):
    mixed, paper = (
        tiny_causal_model(family, **fields) if kind == "causal" else tiny_model(family, kind, **fields)
        for fields in ({"local_window": WINDOW}, {})
    )
    inputs = inputs_for("mlm" if kind == "causal" else kind)
    results = [mixed(**inputs, **reads)[0] for reads in ({}, {"local_window": 0}, {"read_slots": False})]
    for index, first in enumerate(results):
        assert not any(torch.allclose(first, second, atol=1e-5) for second in results[:index])
    for wrong in ({"local_window": WINDOW + 1}, {"local_window": -1}, {"local_window": 0, "read_slots": False}):
        with refused(*wrong, *wrong.values(), WINDOW):
            mixed(**inputs, **wrong)
    for name, value in (("local_window", 2), ("local_window", 0), ("read_slots", False)):
        with refused(name, value):
            paper(**inputs, **{name: value})
    expected = paper(**inputs)[0]
    assert torch.equal(paper(**inputs, local_window=None, read_slots=None)[0], expected)


def test_a_window_beside_a_memory_without_slots_is_refused():
    for control in WITHOUT_SLOTS:
        with refused("local_window", WINDOW, control):
            tiny_model("abc_memory", memory_control=control, local_window=WINDOW)


@families
def test_the_scale_of_each_head_starts_at_one(family):
    for family_model in (FAMILIES[family].base_model, FAMILIES[family].causal_lm):
        config = tiny_model(family, local_window=WINDOW).config
        scales = {n: p for n, p in family_model(config).named_parameters() if n.endswith("slot_scale")}
        assert len(scales) == 2
        assert all(scale.shape == (4,) and (scale == 1).all() for scale in scales.values())


@pytest.mark.parametrize(
    ("family", "dtype", "kind", "backend"),
    covering(list(FAMILIES), [torch.float32, torch.bfloat16, torch.float16], ["base", "causal"], ["eager", "sdpa"]),
)
def test_a_row_of_padding_stays_finite(family, kind, backend, dtype):
    """States and gradients, although the row has neither a slot nor a token to read."""
    make = tiny_causal_model if kind == "causal" else tiny_model
    model = make(family, **window_of(family, WINDOW), attn_implementation=backend).to(dtype)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1] = 0
    output = model(random_ids(2, 12), attention_mask=mask)[0]
    assert output.isfinite().all()
    output.double().square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if not parameter.grad.isfinite().all()]


# ---- causal layers, with gradients ----

CAUSAL = {
    **{control: {"memory_control": control} for control in CAUSAL_CONTROLS if control not in WITHOUT_SLOTS},
    "mlp-relu": {"control_activation": "relu"},
    "mlp-sigmoid": {"control_activation": "sigmoid", "share_control": False},
}
CAUSAL_CASES = [("abc_memory", fields) for fields in CAUSAL.values()]
CAUSAL_CASES += [("luna", {}), ("luna", {"tie_kv": False, "pack_activation": "elu", "slot_count_bias": False})]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize(("family", "fields"), CAUSAL_CASES, ids=str)
def test_causal_layers_equal_their_definition(family, fields, side):
    """Output and every gradient, of padded rows."""
    fields = {"local_window": 4, "num_hidden_layers": 1, "position_embedding_type": "sinusoidal", **fields}
    model = float64(family, "causal", **fields)
    attention, keep = model.base_model.encoder.layer[0].attention.self, padded_rows(side)
    states = normal_states(*keep.shape, 48).requires_grad_()
    context = make_context(keep, keep.shape[1], states.device, window=4)
    output, _, _ = attention(states, model.base_model.first_slot_states(), context)

    own = dict(model.base_model.named_parameters())
    weights = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
    literal, name = states.detach().clone().requires_grad_(), "encoder.layer.0.attention.self"
    config, loss, loss_ref = SimpleNamespace(**model.config.to_dict()), 0.0, 0.0
    for row, kept in enumerate(keep[:-1]):
        x = literal[row][kept]
        projected = reference.project(weights, name, x, config)
        expected = ROWS[family].causal_reference(weights, name, 0, x, projected, config)
        expected = expected.transpose(0, 1).flatten(1)
        assert_near(output[row][kept], expected, 1e-10, f"row {row}")
        loss, loss_ref = loss + weighted_sum(output[row][kept]), loss_ref + weighted_sum(expected)
    assert output.isfinite().all()
    (loss + 0.0 * output[-1].sum()).backward()
    loss_ref.backward()
    assert_near(states.grad, literal.grad, 1e-8, "gradient of the states")
    checked = [parameter for parameter in own if ".self." in parameter or parameter.startswith("control")]
    assert any(parameter.endswith("slot_scale") for parameter in checked) == model.config.slot_count_bias
    for parameter in checked:
        assert_near(own[parameter].grad, weights[parameter].grad, 1e-8, f"gradient of {parameter}")


@every_family
@torch.no_grad()
def test_the_state_after_16_tokens_is_as_large_as_after_500(family):
    model = float64(family, "causal", **window_of(family, WINDOW))
    first, second = (model(random_ids(2, length)).cache for length in (16, 500))
    assert first.nbytes == second.nbytes > 0
    for layer in second.layers if ROWS[family].mixes else ():
        assert layer.states["window_key"].shape == layer.states["window_value"].shape == (2, 4, WINDOW, 12)


@every_family
@torch.no_grad()
def test_long_texts_decode_as_in_parallel(family):
    """Beyond the window and several chunks, token by token."""
    model, ids = float64(family, "causal", **window_of(family, WINDOW), num_hidden_layers=2), random_ids(1, 200)
    whole = model(ids).logits
    cache = model(ids[:, :130]).cache
    steps, _ = step_by_step(model, ids[:, 130:], cache)
    torch.testing.assert_close(steps, whole[:, 130:], rtol=0, atol=1e-10)


# ---- layers with full attention ----


@every_family
@torch.no_grad()
def test_a_full_layer_is_softmax_attention_and_the_others_are_unchanged(family):
    """Layer by layer, each with the states of the layer before."""
    fields = {"num_hidden_layers": 3, **window_of(family, WINDOW)}
    model = float64(family, full_attention_layers=[1], **fields)
    names = {name for name, _ in model.encoder.layer[1].attention.self.named_parameters()}
    assert names == {f"{side}.{part}" for side in ("query", "key", "value") for part in ("weight", "bias")}
    full = with_weights_of(float64("abc_memory", num_hidden_layers=3, memory_control="full"), model)
    mixed = with_weights_of(float64(family, **fields), model)
    embeddings, *states = model(**PADDED, output_hidden_states=True).hidden_states
    keep = PADDED["attention_mask"].bool()
    slot_states, own = mixed.begin(embeddings, keep)
    _, of_full = full.begin(embeddings, keep)
    before, slot_states = mixed.encoder.layer[0](embeddings, slot_states, own)
    between, _ = full.encoder.layer[1](before, None, of_full)
    after, _ = mixed.encoder.layer[2](between, slot_states, own)  # the slot states pass the full layer by
    for ours, theirs in zip(states, (before, between, after), strict=True):
        torch.testing.assert_close(ours[REAL], theirs[REAL], rtol=0, atol=1e-12)


@families
@backends
@torch.no_grad()
def test_full_layers_ignore_the_switches(family, backend):
    model = float64(family, full_attention_layers=[0, 1], local_window=WINDOW, attn_implementation=backend)
    expected = hidden(model)
    for reads in ({"local_window": 0}, {"read_slots": False}):
        assert torch.equal(hidden(model, **reads), expected)


@every_family
@torch.no_grad()
def test_a_roberta_whose_layers_all_stay_full_stays_itself(family):
    source = make_source(dtype=torch.float64)
    model = model_class(family, "mlm").from_roberta(
        source, full_attention_layers=[0, 1, 2], **window_of(family, WINDOW)
    )
    batch = batch_for(source)
    torch.testing.assert_close(states_of(model, batch), states_of(source, batch), rtol=0, atol=1e-12)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[real], source(**batch).logits[real], rtol=0, atol=1e-11)


@families
@torch.no_grad()
def test_a_warm_start_with_a_window_over_the_row_and_without_slots_is_the_source(family):
    """Every trained projection is where the window reads it."""
    source = make_source(dtype=torch.float64)
    fields = {"local_window": 40, "full_attention_layers": [0]} | ({"tie_kv": False} if family == "luna" else {})
    model = model_class(family, "mlm").from_roberta(source, **fields)
    batch = batch_for(source)
    ours = model.base_model(**batch, read_slots=False).last_hidden_state[batch["attention_mask"].bool()]
    torch.testing.assert_close(ours, states_of(source, batch), rtol=0, atol=1e-12)


@every_family
def test_indices_of_full_layers(family):
    for wrong in ([3], [-1], [0, 0]):
        with refused("full_attention_layers", wrong):
            tiny_model(family, full_attention_layers=wrong)
    for none in (None, []):
        assert not tiny_causal_model(family, full_attention_layers=none).config.full_attention_layers


@every_family
def test_every_parameter_gets_a_gradient_if_all_layers_are_full(family):
    """As distributed training requires: what only other layers would use is not left behind."""
    model = tiny_model(family, "mlm", full_attention_layers=[0, 1], **window_of(family, WINDOW)).train()
    model(**inputs_for("mlm", labels=True)).loss.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
