"""LeaPformer's attention against a literal definition in float64: outputs, weights and gradients."""

from types import SimpleNamespace

import pytest
import torch
from helpers import gradients, in_turn, normal_states, random_ids, tiny_causal_model, tiny_model
from reference import leapformer as reference
from test_reference_abc import assert_near, padded_rows

from luna_hf import read_memory, write_memory
from luna_hf.ops.context import make_context

WIDTH, HEADS = 16, 2
REWEIGHTINGS = {
    "learned": {},
    "learned-elu": {"feature_map": "elu", "leap_factor": 2},
    "learned-wide": {"leap_factor": 1},
    "rotary": {"reweighting": "rotary", "feature_map": "elu"},
    "rotary-relu": {"reweighting": "rotary"},
    "linear": {"reweighting": "none", "feature_map": "elu"},
    "linear-relu": {"reweighting": "none"},
}
ENCODERS = {**REWEIGHTINGS, "cosine": {"reweighting": "cosine"}}
CAUSAL = {**REWEIGHTINGS, "learned-rotary": {"position_embedding_type": "rotary"}}
SIDES = ["left", "right", "middle"]


def make(kind, **fields):
    """The attention of one layer in float64, with weights far from uniform, and its config."""
    fields = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, **fields}
    model = (tiny_model if kind == "encoder" else tiny_causal_model)("leapformer", **fields).double()
    attention = model.base_model.encoder.layer[0].attention.self
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = noise * (1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2)
    return model.base_model, attention


def literal(attention):
    """The config, and copies of the parameters, which get separate gradients."""
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in attention.named_parameters()}
    return SimpleNamespace(**attention.config.to_dict()), weights


def by_tokens(heads):
    return heads.transpose(0, 1).flatten(1)


def assert_equal_results(ours, theirs, tensors, literal_tensors):
    """Outputs, and the gradients of all tensors."""
    for mine, expected in zip(ours, theirs, strict=True):
        assert_near(mine, expected, 1e-10, "output")
    for mine, expected in zip(gradients(ours, tensors), gradients(theirs, literal_tensors), strict=True):
        assert_near(mine, expected, 1e-8, "gradient")


def context_of(model, kind, states, keep):
    context = make_context(keep, states.shape[1], states.device, window=model.config.local_window)
    return context if kind == "encoder" else context._replace(rotation=model.rotation(context.ranks))


def check_padded_rows(reference, kind, model, attention, keep):
    """Compare padded rows with the rows alone, whatever the padding holds; the last is padding. Returns the output."""
    config, weights = literal(attention)
    states = normal_states(*keep.shape, WIDTH).requires_grad_()
    copies = states.detach().clone().requires_grad_()
    filled = torch.where(keep.unsqueeze(-1), states, 1e3)
    output, _, _ = attention(filled, None, context_of(model, kind, states, keep))
    assert output.isfinite().all()
    ours = [output[row][kept] for row, kept in enumerate(keep)]
    theirs = [
        by_tokens(reference.attention(weights, copies[row][kept], config, causal=kind == "causal")[0])
        for row, kept in enumerate(keep[:-1])
    ]
    theirs.append(0.0 * copies[-1][:0])
    assert_equal_results(ours, theirs, [states, *attention.parameters()], [copies, *weights.values()])
    return output


@pytest.mark.parametrize(
    ("kind", "variant", "side"),
    in_turn([*(("encoder", name) for name in ENCODERS), *(("causal", name) for name in CAUSAL)], SIDES),
)
def test_padded_rows(kind, variant, side):
    """A padded row equals the row alone, whatever its padding holds; a row of padding gives zeros."""
    model, attention = make(kind, **(ENCODERS if kind == "encoder" else CAUSAL)[variant])
    output = check_padded_rows(reference, kind, model, attention, padded_rows(side))
    assert not output[-1].any()


@pytest.mark.parametrize("variant", ENCODERS)
@pytest.mark.parametrize("length", [1, 2, 20])
def test_weights(variant, length):
    """They are returned only if asked for, by eager attention."""
    model, attention = make("encoder", **ENCODERS[variant], attn_implementation="eager")
    (config, weights), ids = literal(attention), random_ids(2, length)
    outputs = model(ids, output_attentions=True, output_hidden_states=True)
    for row in range(2):
        _, expected = reference.attention(weights, outputs.hidden_states[0][row], config)
        assert_near(outputs.attentions[0][row], expected, 1e-10, "weights")
        if "rotary" not in variant:
            # relu may leave a query without a key.
            total = (expected != 0).any(-1) if config.feature_map == "relu" else torch.ones(HEADS, length)
            assert_near(expected.sum(-1), total.double(), 1e-12, "sum of the weights")
    assert attention(outputs.hidden_states[0], *model.begin(outputs.hidden_states[0], None))[2] is None


@pytest.mark.parametrize("variant", ENCODERS)
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(variant, padded):
    """5 queries read a context of 9 tokens, with positions and lengths of either side alone."""
    _, attention = make("encoder", **ENCODERS[variant])
    config, weights = literal(attention)
    queries, context = (normal_states(2, n, WIDTH, seed=n).requires_grad_() for n in (5, 9))
    masks = torch.ones(2, 5), torch.ones(2, 9)
    if padded:
        masks[0][0, :2], masks[1][0, 6:] = 0, 0
    output, none = read_memory(attention, queries, write_memory(attention, context, masks[1]), masks[0])
    assert none is None
    copies = [part.detach().clone().requires_grad_() for part in (queries, context)]
    rows = ([part[row][mask[row] == 1] for part, mask in zip(copies, masks, strict=True)] for row in range(2))
    theirs = [by_tokens(reference.attention(weights, row, config, other)[0]) for row, other in rows]
    ours = [output[row][masks[0][row] == 1] for row in range(2)]
    tensors = [queries, context, *attention.parameters()]
    assert_equal_results(ours, theirs, tensors, [*copies, *weights.values()])


def test_the_reference_is_far_from_uniform():
    for variant in ENCODERS:
        config, weights = literal(make("encoder", **ENCODERS[variant])[1])
        output, maps = reference.attention(weights, normal_states(1, 30, WIDTH)[0], config)
        assert maps.max() > 2 * maps.mean(), variant
        for gradient in gradients([output], list(weights.values())):
            assert gradient.abs().max() > 1e-3, variant
