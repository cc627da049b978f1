"""LAVO's peculiarities: orthogonal bases, precision, any length, the window's positions, switches of a pass."""

import pytest
import torch
from helpers import (
    normal_states,
    padded_batch,
    random_ids,
    refused,
    relative_rms,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
)

from luna_hf import LavoConfig, LavoForMaskedLM, LavoModel, MemoryCache, read_memory, write_memory
from luna_hf.families.lavo.attention import running_sums
from luna_hf.layers import memory_attention
from luna_hf.ops.context import make_context

MAKE = {"encoder": tiny_model, "causal": tiny_causal_model}
kinds = pytest.mark.parametrize("kind", MAKE)
WINDOW = 5


def attention_of(model):
    return model.base_model.encoder.layer[0].attention.self


def attend(attention, states, window=WINDOW, keep=None, **options):
    context = make_context(keep, states.shape[1], states.device, options=options, window=window)
    return attention(states, None, context)[0]


# ---- the bases ----


def test_the_bases_start_orthonormal():
    """The rows of each head; with more bases than entries, the columns. Heads and layers differ."""
    for bases in (4, 12, 30):
        for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
            model = LavoModel._from_config(tiny_config_for("lavo", num_bases=bases), dtype=dtype)
            drawn = torch.stack([layer.attention.self.bases for layer in model.encoder.layer]).float()
            assert drawn.shape == (2, 4, bases, 12)
            products = drawn @ drawn.mT if bases <= 12 else drawn.mT @ drawn
            torch.testing.assert_close(products, torch.eye(min(bases, 12)).expand_as(products), rtol=0, atol=error)
            assert len({tuple(head.flatten().tolist()) for head in drawn.flatten(0, 1)}) == 2 * 4


@torch.no_grad()
def test_with_one_head_and_values_equal_to_the_tokens_the_memory_is_the_papers():
    """Equations 5 and 6 compress the source itself."""
    attention = attention_of(tiny_model("lavo", num_attention_heads=1)).double()
    attention.value.weight.copy_(torch.eye(48))
    attention.value.bias.zero_()
    source, target = normal_states(1, 9, 48, seed=1), normal_states(1, 4, 48, seed=2)
    output, _ = read_memory(attention, target, write_memory(attention, source))
    means = (source[0] @ attention.bases[0].T).mean(0)
    memory = attention.bases[0] * means[:, None]
    expected = (attention.query(target[0]) @ memory.T).softmax(-1) @ memory
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-12)


def test_the_size_of_a_layer():
    """The paper counts 12 x 64 x 768 numbers in the bases of its language model, and P has 2 w - 1."""
    with torch.device("meta"):
        sizes = [
            LavoForMaskedLM(LavoConfig(**fields)).num_parameters()
            for fields in (
                {},
                {"attention_parts": "local", "window_position_bias": False},
                {"attention_parts": "local"},
            )
        ]
    assert sizes[0] - sizes[1] == 12 * (64 * 768 + 127) and sizes[2] - sizes[1] == 12 * 127


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, set()),
        ({"window_position_bias": False}, {"position_bias"}),
        ({"attention_parts": "local"}, {"bases"}),
        ({"attention_parts": "global"}, set()),
        ({"attention_parts": "global", "context_dissection": False}, {"key.weight", "key.bias", "position_bias"}),
        ({"local_window": 0}, {"key.weight", "key.bias", "position_bias"}),
    ],
)
@kinds
def test_there_are_only_parameters_in_use(kind, fields, missing):
    every = {f"{part}.{side}" for part in ("query", "key", "value") for side in ("weight", "bias")}
    names = {name for name, _ in attention_of(MAKE[kind]("lavo", **fields)).named_parameters()}
    assert names == {*every, "bases", "position_bias"} - missing


# ---- precision ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_long_texts_in_half_precision(dtype):
    """Sums over 4,000 tokens do not stop growing."""
    states = normal_states(1, 4000, 48) + 4
    for make in MAKE.values():
        attention = attention_of(make("lavo"))
        exact = attend(attention.double(), states)
        half = attend(attention.to(dtype), states.to(dtype))
        assert half.dtype == dtype and relative_rms(half, exact) < 0.03


@torch.no_grad()
def test_running_means_are_as_precise_as_a_mean():
    """Over 20,000 tokens in float32, at once and one chunk after the other."""
    bases, states = normal_states(1, 4, 8), normal_states(1, 20_000, 8)[None] + 1
    exact = (states @ bases.mT).mean(2)
    bases, states = bases.float(), states.float()
    whole = running_sums(states, bases)[:, :, -1] / 20_000
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=1e-5)
    sums = None
    for chunk in states.split(100, dim=2):
        sums = running_sums(chunk, bases, sums)[:, :, -1]
    torch.testing.assert_close((sums / 20_000).double(), exact, rtol=0, atol=1e-5)
    assert sums.dtype == torch.float32


# ---- length and position ----


@torch.no_grad()
def test_an_encoder_without_a_position_table_takes_any_length():
    model, learned = (tiny_model("lavo", **fields) for fields in ({}, {"position_embedding_type": "learned"}))
    assert model.get_position_embeddings() is None and model.config.longest_input() is None
    assert model(random_ids(1, 200)).last_hidden_state.isfinite().all()
    with refused(200, 64, "max_position_embeddings"):
        learned(random_ids(1, 200))
    assert learned.config.longest_input() == 64 and learned.config.as_decoder().longest_input() is None


@kinds
@torch.no_grad()
def test_only_the_window_knows_the_order(kind):
    """The global part of an encoder ignores it, and so does the last token of a decoder."""
    ids = random_ids(1, 30)
    order = torch.cat([torch.randperm(29, generator=torch.Generator().manual_seed(1)), torch.tensor([29])])
    for fields, changes in (({"local_window": 0}, False), ({}, True)):
        model = MAKE[kind]("lavo", num_hidden_layers=1, **fields)
        ours, theirs = (model(given)[0][:, -1] for given in (ids, ids[:, order]))
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5) is not changes


@kinds
@pytest.mark.parametrize("window", [1, 2, 4, 5])
@torch.no_grad()
def test_the_bias_of_a_place_chooses_a_neighbour(kind, window):
    """A bias on one place of the window makes every token copy the value of the token there."""
    attention = attention_of(MAKE[kind]("lavo", attention_parts="local", local_window=window)).double()
    attention.query.weight.zero_()
    attention.query.bias.zero_()
    states = normal_states(2, 23, 48)
    values = attention.value(states)
    for place in range(window):
        attention.position_bias.fill_(-1e9)
        offset = place - (window - 1 if kind == "causal" else window // 2)
        attention.position_bias[offset + window - 1] = 0.0
        tokens = torch.arange(max(0, -offset), min(23, 23 - offset))
        output = attend(attention, states, window)
        torch.testing.assert_close(output[:, tokens], values[:, tokens + offset], rtol=0, atol=1e-12)


# ---- one part of the output ----


@kinds
@torch.no_grad()
def test_a_pass_with_a_smaller_window_is_that_of_a_model_with_it(kind):
    """Its bias is that of the same distances; 0 leaves the local part out."""
    attention, states = attention_of(MAKE[kind]("lavo")).double(), normal_states(2, 17, 48)
    for window in (1, 2, 4, 0):
        smaller = attention_of(MAKE[kind]("lavo", local_window=window)).double()
        state = {name: attention.state_dict()[name] for name in smaller.state_dict()}
        if window:
            state["position_bias"] = attention.position_bias[WINDOW - window : WINDOW + window - 1]
        smaller.load_state_dict(state)
        output = attend(attention, states, local_window=window)
        torch.testing.assert_close(output, attend(smaller, states, window), rtol=0, atol=1e-12)
    local = attention_of(MAKE[kind]("lavo", attention_parts="local")).double()
    local.load_state_dict({name: attention.state_dict()[name] for name in local.state_dict()})
    torch.testing.assert_close(attend(attention, states, read_slots=False), attend(local, states), rtol=0, atol=1e-12)


@pytest.mark.parametrize("reads", [{"local_window": 0}, {"local_window": 2}, {"read_slots": False}], ids=str)
@torch.no_grad()
def test_switches_while_decoding(reads):
    """Parts of a text, the same in every pass, equal the text at once; with slots left out, the sum goes on."""
    model, ids = tiny_causal_model("lavo").double(), random_ids(2, 30)
    cache = MemoryCache(model.config)
    parts = [model(part, cache=cache, **reads).logits for part in ids.split([7, 1, 1, 12, 1, 8], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids, **reads).logits, rtol=0, atol=1e-10)
    if "read_slots" in reads:
        plain = MemoryCache(model.config)
        model(ids, cache=plain)
        first = [state.layers[0].states["total"] for state in (cache, plain)]
        torch.testing.assert_close(*first, rtol=0, atol=1e-10)


@kinds
def test_switches_that_are_refused(kind):
    wrong = [{"local_window": WINDOW + 1}, {"local_window": -1}, {"local_window": 0, "read_slots": False}]
    for part, given in (("both", wrong), ("global", [{"read_slots": False}]), ("local", [{"local_window": 0}])):
        model = MAKE[kind]("lavo", attention_parts=part)
        for reads in given:
            with refused(*reads, *reads.values(), WINDOW):
                model(random_ids(1, 9), **reads)


# ---- the state ----


@torch.no_grad()
def test_the_state_is_a_sum_and_a_window():
    model = tiny_causal_model("lavo")
    states = model(random_ids(2, 40)).cache.layers[0].states
    shapes = {name: tuple(tensor.shape) for name, tensor in states.items()}
    assert shapes == {"total": (2, 4, 8), "window_key": (2, 4, 5, 12), "window_value": (2, 4, 5, 12)}


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[12, 12], [12, 5]])
def test_parts_of_the_tokens_continue_each_other(lengths, monkeypatch):
    model, batch = tiny_causal_model("lavo").double(), padded_batch(lengths)
    with torch.enable_grad():  # gradients may be needed: all tokens at once
        whole = model(**batch)
    monkeypatch.setattr(memory_attention, "_PART_TOKENS", 5)
    parts = model(**batch)
    keep = batch["attention_mask"].bool()
    torch.testing.assert_close(parts.logits[keep], whole.logits[keep], rtol=1e-10, atol=1e-12)
    totals = [out.cache.layers[0].states["total"] for out in (parts, whole)]
    torch.testing.assert_close(*totals, rtol=1e-6, atol=1e-6)  # a state in float32
