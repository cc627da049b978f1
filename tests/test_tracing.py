"""Models for other runtimes: outputs as tuples, `torch.jit.trace`, ONNX files.

One variant per kind runs in every suite, the others in the slow one.
"""

import io

import pytest
import torch
from helpers import (
    FAMILY_CAUSAL_VARIANTS,
    FAMILY_KINDS,
    FAMILY_VARIANTS,
    MODELS,
    causal_variants_of,
    slow_unless,
    tiny_causal_model,
    tiny_model,
    variants_of,
)
from test_compile_export import SHAPES, dynamic_shapes, uneven
from torch import nn

from luna_hf import FAMILIES
from luna_hf.ops.scan import SCAN_CHUNK

families = pytest.mark.parametrize("family", list(FAMILIES))

# The tracer warns about every shape check, the exporter about every index.
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::UserWarning:torch.onnx")

SHAPES = [*SHAPES, (1, 1)]
CAUSAL_SHAPES = [(2, 5), (3, SCAN_CHUNK), (2, 2 * SCAN_CHUNK + 3)]


def make(family, kind, **options):
    """A tiny model of one layer; a causal one without a state, which a trace cannot return."""
    if kind == "causal":
        return tiny_causal_model(family, num_hidden_layers=1, use_cache=False, **options)
    return tiny_model(family, kind, num_hidden_layers=1, **options)


def make_batch(kind, shape, left=False):
    """Rows of unequal lengths, padded on the right or on the left."""
    inputs = uneven(kind, *shape, seed=shape[1])
    return {name: tensor.flip(-1) for name, tensor in inputs.items()} if left else inputs


def assert_same_numbers(run, model, kind, shapes=SHAPES):
    """`run` against the model, with padding on either side; without packed states, of which a graph has more."""
    outputs = slice(2 if kind == "span" else 1)
    for shape in shapes:
        for left in (False, True):
            inputs = make_batch(kind, shape, left)
            actual, expected = run(inputs)[outputs], model(**inputs, return_dict=True).to_tuple()[outputs]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


# ---- tuples ----


@families
@pytest.mark.parametrize("kind", [*MODELS, "causal"])
@torch.no_grad()
def test_tuples_hold_what_named_outputs_do(family, kind):
    model, inputs = make(family, kind), make_batch(kind, (3, 12))
    expected = model(**inputs).to_tuple()
    by_keyword = model(**inputs, return_dict=False)
    model.config.return_dict = False
    for outputs in (by_keyword, model(**inputs)):
        assert type(outputs) is tuple
        torch.testing.assert_close(outputs, expected, atol=0, rtol=0)


# ---- torch.jit.trace ----


def trace(model, inputs):
    """A function that runs the traced model."""
    model.config.return_dict = False
    traced = torch.jit.trace(model, example_kwarg_inputs=inputs, check_trace=False)
    return lambda inputs: traced(**inputs)


# Traces are made with more tokens than slots, and with fewer. In every suite, a head and each family are traced once.
TRACED = {"luna": "mixed", "abc_memory": "selected", "leapformer": "rotary", "lavo": "default"}
CASES = [
    slow_unless((family, kind) == ("luna", "span"), family, kind, "default")
    for family in FAMILIES
    for kind in MODELS
    if kind != "mlm"
]
CASES += [slow_unless(TRACED.get(case[0]) in (None, case[1]), case[0], "mlm", case[1]) for case in FAMILY_VARIANTS]
cases = pytest.mark.parametrize(("family", "kind", "variant"), CASES)


@cases
@torch.no_grad()
def test_one_trace_serves_all_lengths(family, kind, variant):
    model = make(family, kind, **variants_of(family)[variant])
    for example in ((3, 12), (3, 5)):
        assert_same_numbers(trace(model, make_batch(kind, example)), model, kind)


@pytest.mark.parametrize(
    ("family", "variant"),
    [slow_unless(case[1] == "default", *case) for case in FAMILY_CAUSAL_VARIANTS],
)
@torch.no_grad()
def test_one_causal_trace_serves_all_lengths(family, variant):
    model = make(family, "causal", **causal_variants_of(family)[variant])
    for length in (5, SCAN_CHUNK + 16):
        assert_same_numbers(trace(model, make_batch("causal", (3, length))), model, "causal", CAUSAL_SHAPES)


@families
@torch.no_grad()
def test_a_trace_of_embeddings_without_a_mask(family):
    model = make(family, "base")
    traced = trace(model, {"inputs_embeds": torch.randn(3, 12, 48)})
    for shape in SHAPES:
        embeds = {"inputs_embeds": torch.randn(*shape, 48)}
        torch.testing.assert_close(traced(embeds)[0], model(**embeds)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3])
@torch.no_grad()
def test_a_graph_has_all_slots_of_luna(tokens):
    model = make("luna", "base", tokens_per_slot=tokens)
    traced = trace(model, make_batch("base", (3, 12)))
    for shape in SHAPES:
        inputs = make_batch("base", shape)
        expected = model(**inputs, return_dict=True)
        _, packed, used = traced(inputs)
        assert packed.shape[1] == used.shape[1] == model.config.projection_length
        slots = expected.packed_attention_mask.shape[1]
        assert torch.equal(used[:, :slots], expected.packed_attention_mask) and not used[:, slots:].any()
        torch.testing.assert_close(packed[:, :slots], expected.packed_last_hidden_state, atol=1e-5, rtol=1e-4)


# ---- ONNX ----


class Positional(nn.Module):
    """A model as a function of two tensors: the older exporter passes a `None` for every other parameter."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)


def export_as_before(model, inputs):
    """A function that runs what the older exporter makes."""
    from onnx import load_from_string
    from onnx.reference import ReferenceEvaluator

    axes = {name: {axis: f"{name}_{axis}" for axis in range(tensor.dim())} for name, tensor in inputs.items()}
    example, file = tuple(inputs.values()), io.BytesIO()
    torch.onnx.export(Positional(model), example, file, dynamo=False, input_names=list(inputs), dynamic_axes=axes)
    session = ReferenceEvaluator(load_from_string(file.getvalue()))

    def run(inputs):
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return tuple(torch.as_tensor(output) for output in outputs)

    return run


@pytest.mark.parametrize(
    ("family", "kind", "variant"),
    [
        slow_unless(family == "luna", family, kind, variant)
        for family in FAMILIES
        for kind, variant in [*((kind, "default") for kind in MODELS), ("mlm", "convolution-segments-untied")]
    ]
    + [slow_unless(name == "full", "abc_memory", "mlm", name) for name in ("full", "relu", "sigmoid")],
)
@torch.no_grad()
def test_one_onnx_file_serves_all_lengths(family, kind, variant):
    model = make(family, kind, **variants_of(family)[variant])
    assert_same_numbers(export_as_before(model, make_batch(kind, (3, 12))), model, kind)


def export_to_runtime(model, inputs, path):
    """A function that runs the exported model in ONNX Runtime."""
    from onnxruntime import InferenceSession

    settings = {"dynamic_shapes": dynamic_shapes(), "dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(model, (), path, kwargs=inputs, **settings)
    session = InferenceSession(path)

    def run(inputs):
        return tuple(map(torch.from_numpy, session.run(None, {name: t.numpy() for name, t in inputs.items()})))

    return run


# The first case has a window, whose blocks the exporter must count, and a convolution. Each takes half a minute; every
# suite exports graphs (`test_compile_export.py`) and ONNX files (above).
RUNTIME_CASES = [("luna", "mlm", {"local_window": 4, "conv_kernel_size": 3, "tie_kv": False})]
RUNTIME_CASES += [("luna", kind, {}) for kind in ("sequence", "token", "span", "base") if kind in MODELS]
RUNTIME_CASES += [(family, "mlm", variants_of(family)[variant]) for family, variant in FAMILY_KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "options"), RUNTIME_CASES)
@torch.no_grad()
def test_onnx_runtime_serves_all_lengths(family, kind, options, tmp_path):
    model = make(family, kind, **options)
    run = export_to_runtime(model, make_batch(kind, (3, 12)), tmp_path / "model.onnx")
    assert_same_numbers(run, model, kind, [*SHAPES[:-1], (1, 2)])  # at least two tokens


# Models with a window, whose slots are sums.
HALF = [(family, "mlm", options) for family, options in (("abc_memory", {"local_window": 4}), ("lavo", {}))]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "options"), (*HALF, RUNTIME_CASES[0]))
@torch.no_grad()
def test_float16_in_onnx_runtime(family, kind, options, tmp_path):
    """ONNX Runtime lacks operations of float16, such as the sums of slots."""
    model = make(family, kind, **options).half()
    run = export_to_runtime(model, make_batch(kind, (3, 12)), tmp_path / "model.onnx")
    model.float()
    for shape in SHAPES[:2]:
        inputs = make_batch(kind, shape)
        (logits,) = run(inputs)
        assert logits.dtype == torch.float16
        torch.testing.assert_close(logits.float(), model(**inputs)[0], atol=0.02, rtol=0.02)
