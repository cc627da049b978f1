"""Parity of ABC with its definition, a third-party ABC module and a Linformer block; ABC's authors released no code.

Tolerance: 1e-5 in float32. In float64, where ours is exact, twice the distance between the other code's float32 and
float64 runs.
"""

import pytest
import torch
from official_luna import Fixture

from luna_hf import AbcConfig, AbcModel
from luna_hf.ops.attention import product, softmax_attention, split_heads
from luna_hf.ops.memory_control import control_weights
from luna_hf.ops.memory_read import attend_heads

PRECISIONS = [pytest.param(torch.float32, id="float32"), pytest.param(torch.float64, id="float64")]
BACKENDS = ["eager", "sdpa"]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, fixture: Fixture, case: str, what: str):
    limit = 1e-5 if ours.dtype == torch.float32 else 2 * fixture.float32_error(case)
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert ours.shape == theirs.shape and difference <= limit, f"{what}: {difference:.2e} > {limit:.2e}"


def projections(weights: dict[str, torch.Tensor], theirs: str) -> dict[str, torch.Tensor]:
    """Weights of query, key and value; `theirs` is a pattern for the initial of the name."""
    names = [(name, kind) for name in ("query", "key", "value") for kind in ("weight", "bias")]
    return {f"{name}.{kind}": weights[f"{theirs.format(name[0])}.{kind}"] for name, kind in names}


def make_attention(config: AbcConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype):
    """A model of one layer, and its attention with these weights."""
    model = AbcModel(config).eval().to(dtype)
    attention = model.encoder.layer[0].attention.self
    attention.load_state_dict(weights)
    return model, attention


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("case", ["self", "padded", "cross"])
def test_equation_7(case, dtype):
    fixture = Fixture("abc", "equation7")
    query, key, value, logits = (fixture.input(case, name).to(dtype) for name in ("q", "k", "v", "slot_logits"))
    padding = fixture.input(case, "padding_mask")
    phi = control_weights(logits.transpose(-1, -2), None if padding is None else ~padding)
    memory_k, memory_v = product(phi, key), product(phi, value)
    output, _ = softmax_attention(query, memory_k, memory_v, scaling=query.shape[-1] ** -0.5)
    assert_near(output, fixture.output(case, "bidirectional"), fixture, case, "output")
    if case == "self":
        assert_near(memory_k, fixture.output(case, "final_memory_k"), fixture, case, "memory of the keys")
        assert_near(memory_v, fixture.output(case, "final_memory_v"), fixture, case, "memory of the values")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("case", ["plain", "padded"])
def test_third_party_module(case, dtype, backend):
    """It has two controls on projected keys and values: equation 7 with W = compress^T W_k, and with W_v.

    The bias of the projection adds a constant to a slot's logits, which cancels in equation 7.
    """
    fixture = Fixture("abc", "bidirectional_self")
    options, weights = fixture.config, {name: tensor.to(dtype) for name, tensor in fixture.weights().items()}
    heads, slots = options["num_heads"], options["num_landmarks"]
    config = AbcConfig(
        hidden_size=options["embed_dim"],
        num_attention_heads=heads,
        memory_size=slots,
        share_control=False,
        **{"vocab_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 16},
        attn_implementation=backend,
    )
    ours = projections(weights, "{}_proj")
    model, attention = make_attention(config, {**ours, "control.weight": torch.zeros(heads * slots, 32)}, dtype)
    states, padding = fixture.input(case, "query").to(dtype), fixture.input(case, "key_padding_mask")
    _, context = model.begin(states, None if padding is None else ~padding)

    def write(side: str):
        matrix = weights[f"{side}_proj.weight"].unflatten(0, (heads, -1))  # (h, c, d)
        control = torch.matmul(weights[f"compress_{side}"].T, matrix).flatten(0, 1)  # (h * m, d)
        sources = tuple(split_heads(layer(states), heads) for layer in (attention.key, attention.value))
        return attention.write_mlp(states, sources, control, context)

    with torch.no_grad():
        query = split_heads(attention.query(states), heads)
        output, _ = attend_heads(attention, query, write("k").key, write("v").value, None)
        output = torch.nn.functional.linear(output, weights["out_proj.weight"], weights["out_proj.bias"])
    for name in ("eq7_output", "output"):
        assert_near(output, fixture.output(case, name), fixture, case, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("case", ["case0", "case1"])
def test_linformer_block(case, dtype, backend):
    """The whole attention module with their weights: one matrix for keys and values, no masked slots."""
    fixture = Fixture("linformer", "linformer_bidirectional")
    options, weights = fixture.config, {name: tensor.to(dtype) for name, tensor in fixture.weights().items()}
    heads = options["num_head"]
    config = AbcConfig(
        memory_control="linformer",
        hidden_size=options["transformer_dim"],
        num_attention_heads=heads,
        memory_size=options["linformer_k"],
        max_position_embeddings=options["max_seq_len"],
        share_control=False,
        **{"vocab_size": 8, "num_hidden_layers": 1, "intermediate_size": 8},
        attn_implementation=backend,
    )
    ours = projections(weights, "W_{}")
    ours["control.weight"] = weights["attn.E"].flatten(0, 1)
    model, attention = make_attention(config, ours, dtype)
    states, keep = fixture.input(case, "hidden").to(dtype), fixture.input(case, "mask") != 0
    with torch.no_grad():
        for name, layer in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
            assert_near(split_heads(layer(states), heads), fixture.output(case, name), fixture, case, name)
        output, _, _ = attention(states, *model.begin(states, keep if not keep.all() else None))
        core = fixture.output(case, "core").transpose(1, 2).flatten(-2)
        assert_near(output, core, fixture, case, "core")
        output = torch.nn.functional.linear(output, weights["ff.weight"], weights["ff.bias"])
        assert_near(output, fixture.output(case, "output"), fixture, case, "output")
