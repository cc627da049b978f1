"""A control that starts from the source's attention has its maps, asked from positions without words."""

import pytest
import torch
from helpers import TINY, randomise, tiny_model
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from luna_hf import AbcForMaskedLM
from luna_hf.families.abc.warm_start import OWN_ATTENTION
from luna_hf.warm_start import warm_start

HEADS, SIZE = TINY["num_attention_heads"], 8


def source(kind="roberta"):
    torch.manual_seed(0)
    if kind == "bert":
        model = BertForMaskedLM(BertConfig(**TINY, type_vocab_size=2))
    else:
        model = RobertaForMaskedLM(RobertaConfig(**{**TINY, "max_position_embeddings": 66}, type_vocab_size=1))
    randomise(model)
    return model.eval()


def literal_maps(model, layer, states):
    """(h, m, n): softmax of the layer's attention over tokens, asked from the midpoints of m equal parts."""
    embeddings = model.base_model.embeddings
    rows = embeddings.position_embeddings.weight[-TINY["max_position_embeddings"] :]
    places = embeddings.LayerNorm(rows + embeddings.token_type_embeddings.weight[0])
    step = len(places) / SIZE
    asking = torch.stack([places[int((slot + 0.5) * step)] for slot in range(SIZE)])
    attention = model.base_model.encoder.layer[layer].attention.self
    queries, keys = attention.query(asking), attention.key(states)
    size = queries.shape[-1] // HEADS
    maps = []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        maps.append(torch.softmax(queries[:, part] @ keys[:, part].T / size**0.5, dim=-1))
    return torch.stack(maps)


@pytest.mark.parametrize("kind", ["roberta", "bert"])
@torch.no_grad()
def test_shared_control_is_the_first_layers_attention(kind):
    model = source(kind)
    converted, report = warm_start(AbcForMaskedLM, model, memory_size=SIZE)
    assert report.new["abc.control.weight"] == OWN_ATTENTION
    states = torch.randn(20, TINY["hidden_size"])
    maps = F.linear(states, converted.abc.control.weight).T.unflatten(0, (HEADS, SIZE)).softmax(-1)
    torch.testing.assert_close(maps, literal_maps(model, 0, states), rtol=0, atol=1e-6)


@torch.no_grad()
def test_controls_of_their_own_are_each_layers_attention():
    model = source()
    converted, _ = warm_start(AbcForMaskedLM, model, memory_size=SIZE, share_control=False)
    states = torch.randn(20, TINY["hidden_size"])
    for index, layer in enumerate(converted.abc.encoder.layer):
        weight = layer.attention.self.control.weight
        maps = F.linear(states, weight).T.unflatten(0, (HEADS, SIZE)).softmax(-1)
        torch.testing.assert_close(maps, literal_maps(model, index, states), rtol=0, atol=1e-6)


@torch.no_grad()
def test_linformer_starts_as_the_maps_between_places():
    model = source()
    converted, _ = warm_start(AbcForMaskedLM, model, memory_control="linformer", memory_size=SIZE)
    embeddings = model.roberta.embeddings
    places = embeddings.LayerNorm(
        embeddings.position_embeddings.weight[2:] + embeddings.token_type_embeddings.weight[0]
    )
    weight = converted.abc.control.weight.unflatten(0, (HEADS, SIZE))
    torch.testing.assert_close(weight, literal_maps(model, 0, places), rtol=0, atol=1e-6)


@torch.no_grad()
def test_longer_linformer_weighs_all_positions():
    converted, _ = warm_start(AbcForMaskedLM, source(), memory_control="linformer", memory_size=SIZE, max_length=100)
    weight = converted.abc.control.weight
    assert weight.shape == (HEADS * SIZE, 100)
    torch.testing.assert_close(weight.sum(-1), torch.ones(HEADS * SIZE))
    torch.testing.assert_close(weight[:, :36], weight[:, 64:], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_activations_that_are_no_softmax_start_at_random(activation):
    _, report = warm_start(AbcForMaskedLM, source(), memory_size=SIZE, control_activation=activation)
    assert report.new["abc.control.weight"] != OWN_ATTENTION


@pytest.mark.parametrize(
    ("own", "fields", "said"),
    [
        (
            {"memory_control": "linformer"},
            {"max_length": 100},
            f"abc.control.weight: {OWN_ATTENTION}; the source's own (linformer, 32 x 64) does not fit",
        ),
        (
            {"share_control": False},
            {"memory_size": 4},
            f"abc.encoder.layer.{{0..1}}.attention.self.control.weight: {OWN_ATTENTION}; the source's own (mlp, 32 x "
            "48) does not fit",
        ),
        (
            {"conv_kernel_size": 3},
            {"conv_kernel_size": 5},
            "abc.encoder.layer.{0..1}.attention.convolution.weight: zero; the source's own (48 x 3) does not fit",
        ),
    ],
)
def test_trained_parts_that_do_not_fit_are_named(own, fields, said):
    abc = tiny_model("abc_memory", "mlm", memory_size=SIZE, **own)
    _, report = warm_start(AbcForMaskedLM, abc, **fields)
    assert f"  {said}" in report.lines("new")
    assert report.unused


@pytest.mark.parametrize("control", ["mlp", "linformer"])
@torch.no_grad()
def test_beside_a_window_a_control_starts_with_a_tenth_of_the_logits(control):
    model, fields = source(), {"memory_control": control, "memory_size": SIZE}
    alone, _ = warm_start(AbcForMaskedLM, model, **fields)
    beside, report = warm_start(AbcForMaskedLM, model, local_window=4, **fields)
    assert report.new["abc.control.weight"] == f"{OWN_ATTENTION}, its logits times 0.1"
    sharp, found = alone.abc.control.weight, beside.abc.control.weight
    expected = 0.1 * sharp if control == "mlp" else (0.1 * sharp.log()).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert sharp.std() > 1e-3
