"""Compiled and exported models, and models in other precisions, give the same numbers.

One variant per kind runs in every suite, the others in the slow one.
"""

import pytest
import torch
from datasets import Dataset
from helpers import (
    FAMILY_CAUSAL_VARIANTS,
    FAMILY_KINDS,
    FAMILY_VARIANTS,
    MODELS,
    causal_variants_of,
    inputs_for,
    padded_batch,
    random_ids,
    slow_unless,
    tiny_causal_model,
    tiny_model,
    tiny_tokenizer,
    variants_of,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.ao.nn.quantized.dynamic import Linear as QuantizedLinear
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments
from variants import ROWS

from luna_hf import FAMILIES

families = pytest.mark.parametrize("family", list(FAMILIES))

# The tiny models have 8 slots: lengths below, above and equal to that number.
SHAPES = [(3, 12), (2, 5), (4, 31), (3, 8), (5, 64)]


# Every head with the default variant, and every variant with the masked-LM head.
CASES = [(family, kind, "default") for family in FAMILIES for kind in MODELS if kind != "mlm"]
CASES += [(family, "mlm", variant) for family, variant in FAMILY_VARIANTS]
# In every suite, each family is compiled or exported once, which takes seconds: compiler and exporter need the same of
# the code. `test_exact_tokens_graphs.py` compiles ABC, and `test_tracing.py` traces every family.
COMPILED = {"luna": "mixed"}
EXPORTED = {"leapformer": "default", "lavo": "no-window"}


def encoders(chosen, cases=CASES):
    """Every case; those that are not chosen are slow."""
    values = [slow_unless(case[1:] == ("mlm", chosen.get(case[0])), *case) for case in cases]
    return pytest.mark.parametrize(("family", "kind", "variant"), values)


def decoders(*chosen):
    """The same for causal models, whose default variants have all that depends on the length."""
    values = [slow_unless(case in chosen, *case) for case in FAMILY_CAUSAL_VARIANTS]
    return pytest.mark.parametrize(("family", "variant"), values)


# Around the chunks of 64 tokens, and one or several of them.
CAUSAL_LENGTHS = (5, 64, 65, 130, 300)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def uneven(kind, batch, length, seed=0):
    """Rows of unequal lengths, one of them full; two choices of each row for multiple choice."""
    inputs = padded_batch([max(1, length - 2 * row) for row in range(batch)], seed)
    return {name: torch.stack([t, t.flip(0)], dim=1) for name, t in inputs.items()} if kind == "choice" else inputs


def assert_equal_outputs(actual, expected):
    # Float32: a compiler or another runtime adds up in another order.
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in expected:
            torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-4, msg=name)


# ---- torch.compile ----


@encoders(COMPILED)
@torch.no_grad()
def test_one_graph_serves_all_lengths(family, kind, variant):
    model = tiny_model(family, kind, num_hidden_layers=1, **variants_of(family)[variant])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for shape in SHAPES:
        inputs = uneven(kind, *shape, seed=shape[1])
        assert_equal_outputs(compiled(**inputs), model(**inputs))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("given", ["no-mask", "padded-ids-only", "positions"])
@torch.no_grad()
def test_one_graph_for_every_form_of_input(given):
    model = tiny_model("luna", "base", num_hidden_layers=1)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for shape in SHAPES:
        inputs = uneven("base", *shape)
        if given == "no-mask":
            inputs = {"input_ids": random_ids(*shape)}
        elif given == "positions":
            inputs["position_ids"] = torch.arange(2, 2 + shape[1]).repeat(shape[0], 1)
        else:
            del inputs["attention_mask"]
        assert_equal_outputs(compiled(**inputs), model(**inputs))
    assert counter.frame_count == 1


@decoders(("luna", "default"))
@torch.no_grad()
def test_one_causal_graph_serves_all_lengths(family, variant):
    model = tiny_causal_model(family, num_hidden_layers=1, use_cache=False, **causal_variants_of(family)[variant])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in CAUSAL_LENGTHS:
        inputs = uneven("causal", 3, length, seed=length)
        assert_equal_outputs(compiled(**inputs), model(**inputs))
    assert counter.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_window_compiles_for_every_length():
    """A length that divides by the window needs no padding, which would change the layout."""
    options = causal_variants_of("abc_memory")["sliding-window"]
    model = tiny_causal_model("abc_memory", num_hidden_layers=1, use_cache=False, **options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (12, 16, 31):
        ids = random_ids(2, length)
        assert_equal_outputs(compiled(ids), model(ids))


def assert_equal_steps(compiled, model, batches):
    """Loss and every gradient of training steps, compiled once."""
    for number, batch in enumerate(batches):
        results = []
        for step in (compiled, model):
            model.zero_grad()
            # The first step compiles; any later compilation is an error.
            forbid = number > 0 or torch._dynamo.config.error_on_recompile
            with torch._dynamo.config.patch(error_on_recompile=forbid):
                loss = step(**batch).loss
            loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        for compiled_result, result in zip(*results, strict=True):
            torch.testing.assert_close(compiled_result, result, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "variant"), [slow_unless(case == ("luna", "default"), *case) for case in FAMILY_VARIANTS]
)
def test_a_training_step_compiles_once(family, variant):
    model = tiny_model(family, "mlm", num_hidden_layers=1, **variants_of(family)[variant]).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_equal_steps(compiled, model, [inputs_for("mlm", length=n, seed=n, labels=True) for n in (12, 5, 31)])


@pytest.mark.parametrize(
    ("labels", "problem"),
    [(torch.tensor([0.5, 2.0]), "regression"), (torch.eye(3)[:2], "multi_label_classification")],
)
def test_compiled_training_keeps_the_kind_of_the_labels(labels, problem):
    outputs = 1 if problem == "regression" else 3
    model = tiny_model("luna", "sequence", num_hidden_layers=1, num_labels=outputs).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    batches = [{"input_ids": random_ids(2, n, seed=n), "labels": labels} for n in (12, 5, 31)]
    assert_equal_steps(compiled, model, batches)
    model.config.problem_type = None
    torch._dynamo.reset()
    compiled(**batches[0])
    assert model.config.problem_type == problem


@pytest.mark.slow
@families
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "base"])
def test_inductor_trains_with_the_same_numbers(family, kind):
    # Inductor's backward pass has one graph for inputs with fewer tokens than slots, and one for the others.
    model = tiny_model(family, kind).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for lengths in ((12, 31, 20, 64), (5, 7, 6)):
        assert_equal_steps(compiled, model, [inputs_for(kind, length=n, seed=n, labels=True) for n in lengths])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equal_steps(compiled, model, [inputs_for(kind, length=25, labels=True)])


@pytest.mark.slow
@families
def test_inductor_trains_with_a_convolution(family):
    """Inductor lays out PyTorch's convolution for one length: two lengths make two graphs, and so would every other."""
    model = tiny_model(family, "mlm", num_hidden_layers=1, conv_kernel_size=3).train()
    compiled = torch.compile(model, fullgraph=True)
    first, *others = (inputs_for("mlm", length=n, seed=n, labels=True) for n in (12, 31, 20, 64, 5, 8))
    assert_equal_steps(compiled, model, [first])
    assert_equal_steps(compiled, model, others)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_compiles_two_graphs(family, backend, tmp_path):
    """One for the first length and one for all others, whether shorter or longer than the memory."""
    lengths = [12, 5, 31, 8, 40, 7]
    rows = [{"input_ids": random_ids(1, n, seed=n)[0].tolist(), "labels": n % 2} for n in lengths for _ in range(2)]
    losses = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": backend}):
        model = tiny_model(family, "sequence", num_hidden_layers=1, conv_kernel_size=3)
        quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(
            tmp_path,
            max_steps=len(lengths),
            per_device_train_batch_size=2,
            learning_rate=0.01,
            logging_steps=1,
            train_sampling_strategy="sequential",
            **quiet,
            **compiled,
        )
        collator = DataCollatorWithPadding(tiny_tokenizer())
        trainer = Trainer(model, arguments, data_collator=collator, train_dataset=Dataset.from_list(rows))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and len(set(losses[0])) == len(lengths)
    assert counters["stats"]["unique_graphs"] == 2


# ---- torch.export ----


def dynamic_shapes(longest=64):
    """Every batch and length, from two tokens: the exporter specialises on a length of 1."""
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=longest)}
    return {"input_ids": axes, "attention_mask": axes}


@encoders(EXPORTED, [case for case in CASES if case[1] != "choice"])
@torch.no_grad()
def test_one_export_serves_every_batch_and_length(family, kind, variant, tmp_path):
    model = tiny_model(family, kind, num_hidden_layers=1, **variants_of(family)[variant])
    program = torch.export.export(model, (), uneven(kind, 3, 12), dynamic_shapes=dynamic_shapes(), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in [*SHAPES, (1, 2)]:
        inputs = uneven(kind, *shape, seed=shape[1])
        assert_equal_outputs(loaded(**inputs), model(**inputs))


# Unlike a trace, an export shows where code reads a size as a number.
@decoders(("luna", "default"), ("abc_memory", "sliding-window"))
@torch.no_grad()
def test_one_causal_export_serves_every_batch_and_length(family, variant):
    model = tiny_causal_model(family, num_hidden_layers=1, use_cache=False, **causal_variants_of(family)[variant])
    shapes = dynamic_shapes(4096)
    program = torch.export.export(model, (), uneven("causal", 3, 12), dynamic_shapes=shapes, strict=False).module()
    for rows, tokens in zip((2, 1, 3, 5, 2, 1), (2, *CAUSAL_LENGTHS), strict=False):
        inputs = uneven("causal", rows, tokens, seed=tokens)
        assert_equal_outputs(program(**inputs), model(**inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("luna", {}),
        ("luna", {"local_window": 3}),
        ("luna", {"local_window": 12}),  # the example is a single block
        ("abc_memory", {}),
        ("abc_memory", {"local_window": 3}),
        ("leapformer", {}),
        ("lavo", {}),
        ("lavo", {"local_window": 12}),
    ],
)
@torch.no_grad()
def test_one_compiled_package_serves_every_batch_and_length(family, options, tmp_path):
    model = tiny_model(family, "mlm", num_hidden_layers=1, conv_kernel_size=3, **options)
    program = torch.export.export(model, (), uneven("mlm", 3, 12), dynamic_shapes=dynamic_shapes(), strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    for shape in [*SHAPES, (1, 2)]:
        inputs = uneven("mlm", *shape, seed=shape[1])
        real = inputs["attention_mask"].bool()  # what padding reads is left open
        torch.testing.assert_close(compiled(**inputs).logits[real], model(**inputs).logits[real], atol=1e-5, rtol=1e-4)


# ---- precision ----

# Bounds on the relative error of a whole tensor. bfloat16 keeps 8 bits (one rounding is 2^-9, 0.2 %), float16 keeps 11
# (0.02 %). Three layers of some dozen roundings each stay below 10 and 20 roundings.
PRECISIONS = {"bf16": (torch.bfloat16, 0.02), "fp16": (torch.float16, 0.004)}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def relative_error(actual, expected, least=0.0):
    """Error of the whole tensor, relative to its root mean square or to `least`, whichever is larger."""
    size = max(expected.square().mean().sqrt().item(), least)
    return (actual.float() - expected).square().mean().sqrt().item() / size


@families
@pytest.mark.parametrize("kind", MODELS)
@precisions
def test_autocast_stays_near_float32(family, kind, precision):
    dtype, bound = PRECISIONS[precision]
    model, batch = tiny_model(family, kind).train(), inputs_for(kind, labels=True)

    def step():
        model.zero_grad()
        output = model(**batch)
        loss = output[0] if kind != "base" else output[0].pow(2).mean()
        loss.float().backward()
        return output, loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected, expected_loss, expected_gradient = step()
    with torch.autocast("cpu", dtype=dtype):
        output, loss, gradient = step()
    # The scores of multiple choice are small sums of larger terms.
    least = 0.1 if kind == "choice" else 0.0
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in expected:
            assert relative_error(output[name], expected[name], least) < bound
    assert relative_error(loss, expected_loss) < bound
    assert gradient.isfinite().all()
    # The errors of both passes add up, and a gradient may be a small difference.
    assert relative_error(gradient, expected_gradient) < 5 * bound


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        slow_unless(case in FAMILY_KINDS, *case)
        for case in FAMILY_VARIANTS
        if case[1] not in ROWS[case[0]].inexact_in_half
    ],
)
@precisions
def test_a_converted_model_stays_near_float32(family, variant, precision):
    dtype, bound = PRECISIONS[precision]
    model, inputs = tiny_model(family, **variants_of(family)[variant]), uneven("base", 3, 31)
    expected = model(**inputs).last_hidden_state.detach()
    states = model.to(dtype)(**inputs).last_hidden_state
    assert states.dtype == dtype
    assert relative_error(states.detach(), expected) < bound
    states.float().pow(2).mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# ---- quantization ----


@families
@pytest.mark.parametrize("kind", ["mlm", "sequence", "causal"])
@torch.no_grad()
def test_dynamic_quantization_replaces_every_linear_layer(family, kind):
    model = tiny_causal_model(family) if kind == "causal" else tiny_model(family, kind)
    inputs = uneven(kind, 3, 31)
    expected = model(**inputs).logits
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    replaced = {name for name, module in quantized.named_modules() if isinstance(module, QuantizedLinear)}
    assert replaced == linear
    # A weight is rounded by up to half a step, 1/255 of its tensor's range.
    error = relative_error(quantized(**inputs).logits, expected)
    assert 0 < error < 0.1
