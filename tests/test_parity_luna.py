"""Parity with the authors' own code, inner states included.

Tolerances come from each fixture. In float32: twice the distance between the authors' float32 and float64 runs (two
float32 runs may lie on either side of the exact result), at most 1e-4. In float64 our result is exact, so the authors'
float32 error remains, plus a quarter: the fixtures do not record which parts of their float64 run stay in float32, and
a softmax in float32, for example, changes the difference by up to 14 %.
"""

import pytest
import torch
from official_luna import (
    Fixture,
    attention_weights,
    classifier_config,
    encoder_weights,
    head_weights,
    mlm_config,
    mlm_weights,
    part,
    sentence_encoder_config,
)

from luna_hf import (
    LunaConfig,
    LunaForMaskedLM,
    LunaForSequenceClassification,
    LunaModel,
    read_memory,
    write_memory,
)
from luna_hf.families.luna.attention import LunaAttention

MLM = ["tied_dynamic", "tied_fixed", "untied_dynamic", "untied_fixed"]
SENTENCE = [
    "pre_norm_learned",
    "pre_norm_sinusoidal_untied",
    "post_norm_sinusoidal_fixed",
    "post_norm_pheads2_segments",
]
ATTENTIONS = ["tied_self", "tied_cross", "untied_self", "untied_cross"]
HEADS = {
    "cls_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}
PRECISIONS = [
    pytest.param(dtype, backend, id=f"{str(dtype).removeprefix('torch.')}-{backend}")
    for dtype in (torch.float32, torch.float64)
    for backend in ("eager", "sdpa")
]


def cases(group: str, names: list[str]):
    return [pytest.param(n, c, id=f"{n}-{c}") for n in names for c in Fixture(group, n).cases]


def tolerance(fixture: Fixture, case: str, dtype: torch.dtype) -> float:
    error = fixture.float32_error(case)
    return 1.25 * error if dtype == torch.float64 else min(2 * error + 1e-6, 1e-4)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, atol: float, what: str):
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert ours.shape == theirs.shape and difference <= atol, f"{what}: {difference:.2e} > {atol:.2e}"


def prepare(model, weights, dtype, implementation):
    model.load_state_dict(weights)
    model.set_attn_implementation(implementation)
    return model.to(dtype).eval()


def assert_states_near(fixture, case, outputs, prefix_last, num_layers, atol):
    hidden, packed = outputs.hidden_states, outputs.packed_hidden_states
    assert len(hidden) == len(packed) == num_layers + 1
    for i in range(num_layers):  # the last one, after the final norms of a pre-norm model, is checked below
        assert_near(hidden[i], fixture.output(case, f"hidden.{i}.x"), atol, f"hidden.{i}.x")
    # The authors cut P to the longest row; we cut to the padded length and mask, so ours may be longer.
    longest = fixture.output(case, "hidden.0.px").shape[1]
    for i in range(num_layers + 1):
        assert_near(packed[i][:, :longest], fixture.output(case, f"hidden.{i}.px"), atol, f"hidden.{i}.px")
    assert_near(outputs.last_hidden_state, fixture.output(case, f"{prefix_last}.x"), atol, "last x")
    last = outputs.packed_last_hidden_state[:, :longest]
    assert_near(last, fixture.output(case, f"{prefix_last}.px"), atol, "last px")
    theirs = fixture.output(case, "px_padding_mask")
    ours = outputs.packed_attention_mask
    if theirs is None or ours is None:
        assert theirs is None or not theirs.any()
        assert ours is None or ours.all()
    else:
        assert torch.equal(ours[:, :longest] == 0, theirs)
        assert not ours[:, longest:].any()


@pytest.mark.parametrize(("dtype", "implementation"), PRECISIONS)
@pytest.mark.parametrize(("name", "case"), cases("luna_mlm", MLM))
def test_masked_lm(name, case, dtype, implementation):
    fixture = Fixture("luna_mlm", name)
    config = mlm_config(fixture)
    model = prepare(LunaForMaskedLM(config), mlm_weights(fixture.weights()), dtype, implementation)
    tokens = fixture.input(case, "tokens").long()
    atol = tolerance(fixture, case, dtype)
    with torch.no_grad():
        states = {"output_hidden_states": True, "output_packed_hidden_states": True}
        outputs = model.luna(tokens, unpad_inputs=False, **states)
        logits = model(tokens, unpad_inputs=False).logits
    assert_states_near(fixture, case, outputs, "last", config.num_hidden_layers, atol)
    assert_near(logits, fixture.output(case, "logits"), atol, "logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MLM)
def test_sparse_prediction_gives_the_authors_masked_logits(name, dtype):
    fixture, case = Fixture("luna_mlm", name), "case0"
    config = mlm_config(fixture, sparse_prediction=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = prepare(LunaForMaskedLM(config), mlm_weights(fixture.weights()), dtype, "eager").train()
    tokens, masked = fixture.input(case, "tokens").long(), fixture.output(case, "masked_tokens").bool()
    logits = model(tokens, labels=tokens.masked_fill(~masked, -100)).logits
    assert_near(
        logits.detach(), fixture.output(case, "masked_logits"), tolerance(fixture, case, dtype), "masked logits"
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("name", "case"), cases("luna_mlm", MLM))
def test_classification_heads(name, case, head):
    fixture = Fixture("luna_mlm", name)
    config = classifier_config(fixture, head)
    assert config.classifier_pooling == HEADS[head]
    ours = head_weights(fixture.weights(), head)
    model = prepare(LunaForSequenceClassification(config), ours, torch.float64, "sdpa")
    with torch.no_grad():
        logits = model(fixture.input(case, "tokens").long()).logits
    assert_near(logits, fixture.output(case, f"head.{head}"), tolerance(fixture, case, torch.float64), head)


@pytest.mark.parametrize(("dtype", "implementation"), PRECISIONS)
@pytest.mark.parametrize(("name", "case"), cases("luna_sentence_encoder", SENTENCE))
def test_sentence_encoder(name, case, dtype, implementation):
    fixture = Fixture("luna_sentence_encoder", name)
    config = sentence_encoder_config(fixture)
    model = prepare(LunaModel(config), encoder_weights(fixture.weights()), dtype, implementation)
    segments = fixture.input(case, "segment_labels")
    atol = tolerance(fixture, case, dtype)
    with torch.no_grad():
        outputs = model(
            fixture.input(case, "tokens").long(),
            token_type_ids=None if segments is None else segments.long(),
            output_hidden_states=True,
            output_packed_hidden_states=True,
            unpad_inputs=False,
        )
    assert_states_near(fixture, case, outputs, "final", config.num_hidden_layers, atol)
    assert_near(outputs.last_hidden_state[:, 0], fixture.output(case, "cls"), atol, "cls")


@pytest.mark.parametrize(("dtype", "implementation"), PRECISIONS)
@pytest.mark.parametrize(("name", "case"), cases("luna_attention", ATTENTIONS))
def test_attention(name, case, dtype, implementation):
    """The attention module alone, self and cross: Y_P, the unpack weights, and the output after W_o."""
    fixture = Fixture("luna_attention", name)
    options, weights = fixture.config, fixture.weights()
    config = LunaConfig(
        hidden_size=options["embed_dim"],
        num_attention_heads=options["num_heads"],
        num_projected_attention_heads=options["num_pheads"],
        tie_kv=options["tie_kv"],
        attn_implementation=implementation,
    )
    out_proj = part(weights, "out_proj.")
    attention = LunaAttention(config)
    ours = attention_weights({n: t for n, t in weights.items() if not n.startswith("out_proj")})
    missing, unexpected = attention.load_state_dict(ours, strict=False)
    assert set(missing) == {"packed_layer_norm.weight", "packed_layer_norm.bias"} and not unexpected
    attention = attention.to(dtype).eval()
    packed_contexts = []
    attention.pack.register_forward_hook(lambda module, args, output: packed_contexts.append(output[0]))

    query, packed = fixture.input(case, "query").to(dtype), fixture.input(case, "pquery").to(dtype)
    context = fixture.input(case, "context")
    padding = [fixture.input(case, name) for name in ("context_padding_mask", "pcontext_padding_mask")]
    tokens, slots = (None if mask is None else ~mask for mask in padding)
    with torch.no_grad():
        memory = write_memory(
            attention, query if context is None else context.to(dtype), tokens, slot_states=packed, slot_mask=slots
        )
        mixed, unpack_weights = read_memory(attention, query, memory)
        output = torch.nn.functional.linear(mixed, out_proj["weight"].to(dtype), out_proj["bias"].to(dtype))
    atol = tolerance(fixture, case, dtype)
    assert_near(packed_contexts[0], fixture.output(case, "packed"), atol, "packed")
    assert_near(output, fixture.output(case, "output"), atol, "output")
    if implementation == "eager":
        assert_near(unpack_weights, fixture.output(case, "unpack_weights"), atol, "unpack weights")
