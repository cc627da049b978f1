"""Other ways to run the same model give the same numbers: compiled, exported, other attention backends and precisions,
embeddings instead of ids, explicit positions."""

import pytest
import torch
from helpers import (
    FAMILY_OWN_VARIANTS,
    FAMILY_VARIANTS,
    MODELS,
    inputs_for,
    padded_batch,
    random_ids,
    refused,
    tiny_model,
    variants_of,
)
from torch._dynamo.testing import CompileCounterWithBackend
from variants import COMMON, ROWS

from luna_hf import FAMILIES

families = pytest.mark.parametrize("family", list(FAMILIES))
kinds = pytest.mark.parametrize("kind", MODELS)
variants = pytest.mark.parametrize("variant", list(COMMON))

# The tiny models have 8 slots: lengths on either side of that number, and equal to it.
SHAPES = [(3, 12), (2, 5), (4, 31), (3, 8), (2, 3), (5, 64), (3, 9)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def uneven(batch, length, seed=0):
    """Rows of unequal lengths, the longest of them full."""
    return padded_batch([max(1, length - 2 * row) for row in range(batch)], seed)


def assert_equal_outputs(actual, expected, atol=1e-5):
    # Float32: a compiler or another backend adds up in another order.
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in expected:
            torch.testing.assert_close(actual[name], expected[name], atol=atol, rtol=1e-4, msg=name)


# torch.compile.


# Every model, and every variant of one of them.
COMPILED = [(family, kind, "default") for family in FAMILIES for kind in MODELS]
COMPILED += [(family, "mlm", variant) for family, variant in FAMILY_VARIANTS if variant != "default"]


@pytest.mark.parametrize(("family", "kind", "variant"), COMPILED)
@torch.no_grad()
def test_one_graph_serves_all_lengths(family, kind, variant):
    model = tiny_model(family, kind, num_hidden_layers=2 if kind == "base" else 1, **variants_of(family)[variant])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for batch, length in SHAPES:
        inputs = uneven(batch, length, seed=length)
        if kind == "choice":
            inputs = {name: torch.stack([tensor, tensor], dim=1) for name, tensor in inputs.items()}
        assert_equal_outputs(compiled(**inputs), model(**inputs))
    assert counter.frame_count == 1


@families
@pytest.mark.parametrize("given", ["full-mask", "no-mask", "left-padding", "padded-ids-only"])
@torch.no_grad()
def test_one_graph_for_every_form_of_mask(family, given):
    model = tiny_model(family, "base", num_hidden_layers=1)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for batch, length in SHAPES:
        inputs = uneven(batch, length, seed=length)
        if given == "full-mask":
            ids = random_ids(batch, length)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        elif given == "no-mask":
            inputs = {"input_ids": random_ids(batch, length)}
        elif given == "left-padding":
            inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
        else:
            del inputs["attention_mask"]
        assert_equal_outputs(compiled(**inputs), model(**inputs))
    assert counter.frame_count == 1


# A family's default, and its own variants: most of them take too long to be compiled again and again.
TRAINED = [(family, "default") for family in FAMILIES]
TRAINED += [
    pytest.param(family, variant, marks=[] if variant in ROWS[family].compiled_training else pytest.mark.slow)
    for family, variant in FAMILY_OWN_VARIANTS
]


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


@pytest.mark.parametrize(("family", "variant"), TRAINED)
def test_a_training_step_compiles_once(family, variant):
    model = tiny_model(family, "mlm", num_hidden_layers=1, **variants_of(family)[variant]).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    lengths = (12, 5, 31)
    assert_equal_steps(compiled, model, [inputs_for("mlm", length=n, seed=n, labels=True) for n in lengths])


@pytest.mark.slow
@families
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "base"])
def test_inductor_trains_with_the_same_numbers(family, kind):
    # Inductor's backward pass distinguishes inputs with fewer tokens than slots: one graph on either side, no more.
    model = tiny_model(family, kind).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for lengths in ((12, 31, 20, 64), (5, 7, 6)):
        assert_equal_steps(compiled, model, [inputs_for(kind, length=n, seed=n, labels=True) for n in lengths])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equal_steps(compiled, model, [inputs_for(kind, length=25, labels=True)])


@families
@torch.no_grad()
def test_inductor_gives_the_same_numbers(family):
    # The default backend, which generates code, at a length above and one below the number of slots.
    model = tiny_model(family, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (12, 5):
        assert_equal_outputs(compiled(**uneven(3, length)), model(**uneven(3, length)))


# torch.export.


EXPORTED = [(family, kind, "default") for family in FAMILIES for kind in MODELS if kind != "choice"]
EXPORTED += [(family, "mlm", variant) for family, variant in FAMILY_OWN_VARIANTS]


@pytest.mark.parametrize(("family", "kind", "variant"), EXPORTED)
@torch.no_grad()
def test_one_export_serves_every_batch_and_length(family, kind, variant):
    layers = 2 if variant == "default" else 1
    model = tiny_model(family, kind, num_hidden_layers=layers, **variants_of(family)[variant])
    # From two tokens on: the compiler treats a length of 1 as a constant, for any model.
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    program = torch.export.export(model, (), uneven(3, 12), dynamic_shapes=shapes, strict=False)
    for batch_size, num_tokens in [*SHAPES, (1, 2), (1, 20)]:
        inputs = uneven(batch_size, num_tokens, seed=num_tokens)
        assert_equal_outputs(program.module()(**inputs), model(**inputs))


@families
@torch.no_grad()
def test_an_exported_program_can_be_stored(family, tmp_path):
    model = tiny_model(family, "sequence", position_embedding_type="sinusoidal", num_hidden_layers=1)
    example = uneven(3, 12)
    automatic = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in example}
    program = torch.export.export(model, (), example, dynamic_shapes=automatic, strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in ((2, 5), (4, 31)):
        assert_equal_outputs(loaded(**uneven(*shape)), model(**uneven(*shape)))


# Attention backends.


SWITCHED = [(family, kind, variant) for family in FAMILIES for kind in MODELS for variant in COMMON]
SWITCHED += [(family, "mlm", variant) for family, variant in FAMILY_OWN_VARIANTS]


@pytest.mark.parametrize(("family", "kind", "variant"), SWITCHED)
@torch.no_grad()
def test_changing_the_attention_backend_keeps_the_numbers(family, kind, variant):
    model = tiny_model(family, kind, attn_implementation="eager", **variants_of(family)[variant])
    inputs = inputs_for(kind)
    eager = model(**inputs)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
            implementation
        }
        assert_equal_outputs(model(**inputs), eager)


@families
def test_the_backend_can_be_chosen_on_loading(family, tmp_path):
    model = tiny_model(family, "base")
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    for implementation in ("eager", "sdpa"):
        loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
        assert loaded.config._attn_implementation == implementation
        assert_equal_outputs(loaded(**uneven(3, 12)), model(**uneven(3, 12)))


@families
def test_flash_attention_without_the_package_says_so(family, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: False)
    monkeypatch.setattr("transformers.utils.import_utils._is_package_available", lambda *_, **__: (False, "N/A"))
    model = tiny_model(family)
    with refused("FlashAttention2", error=ImportError):
        model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "sdpa"


@families
def test_an_unknown_backend_is_refused(family):
    model = tiny_model(family)
    with refused("no_such_attention"):
        model.set_attn_implementation("no_such_attention")
    with refused("no_such_attention"):
        tiny_model(family, attn_implementation="no_such_attention")


# Precision. Bounds: relative error of a state over the whole tensor; bfloat16 keeps 8 bits (one rounding 2^-9 = 0.2 %),
# float16 11 (0.02 %). Three layers of some dozen roundings each stay below 10 and 20 of them.

PRECISIONS = {"bf16": (torch.bfloat16, 0.02), "fp16": (torch.float16, 0.004)}
precisions = pytest.mark.parametrize("precision", list(PRECISIONS))


def relative_error(actual, expected, least=0.0):
    """Error of the whole tensor, relative to its root mean square or to `least`, whichever is more."""
    size = max(expected.square().mean().sqrt().item(), least)
    return (actual.float() - expected).square().mean().sqrt().item() / size


@families
@kinds
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
    # The head of multiple choice may add up larger terms to next to nothing.
    least = 0.1 if kind == "choice" else 0.0
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in expected:
            assert relative_error(output[name], expected[name], least) < bound
    assert relative_error(loss, expected_loss) < bound
    assert gradient.isfinite().all()
    # Errors of the backward pass add to those of the forward pass, and a gradient is a small difference: that of
    # multiple choice between rows that score nearly the same.
    assert relative_error(gradient, expected_gradient) < 5 * bound


CONVERTED = [(family, variant) for family, variant in FAMILY_VARIANTS if variant not in ROWS[family].inexact_in_half]


@pytest.mark.parametrize(("family", "variant"), CONVERTED)
@precisions
@torch.no_grad()
def test_a_converted_model_stays_near_float32(family, variant, precision):
    dtype, bound = PRECISIONS[precision]
    model, inputs = tiny_model(family, **variants_of(family)[variant]), uneven(3, 31)
    expected = model(**inputs).last_hidden_state
    states = model.to(dtype)(**inputs).last_hidden_state
    assert states.dtype == dtype
    assert relative_error(states, expected) < bound


@families
@kinds
@precisions
def test_a_converted_model_trains(family, kind, precision):
    dtype, _ = PRECISIONS[precision]
    model, batch = tiny_model(family, kind).to(dtype).train(), inputs_for(kind, labels=True)
    output = model(**batch)
    (output[0].float().pow(2).mean()).backward()
    assert output[0].isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Embeddings and positions.


@families
@kinds
@variants
@torch.no_grad()
def test_embeddings_in_place_of_ids(family, kind, variant):
    model, inputs = tiny_model(family, kind, **COMMON[variant]), inputs_for(kind)
    expected = model(**inputs)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    for name, tensor in model(inputs_embeds=embeds, **inputs).items():
        assert torch.equal(tensor, expected[name]), name


@families
@variants
@torch.no_grad()
def test_explicit_positions(family, variant):
    model, inputs = tiny_model(family, "mlm", **COMMON[variant]), uneven(3, 12)
    default = model(**inputs).logits
    padding_idx, mask = model.config.pad_token_id, inputs["attention_mask"]
    counted = mask.cumsum(1) * mask + padding_idx
    assert torch.equal(model(**inputs, position_ids=counted).logits, default)
    moved = model(**inputs, position_ids=counted + 5 * mask).logits
    assert (moved - default).abs().max() > 1e-3


@families
@torch.no_grad()
def test_explicit_segments(family):
    model, inputs = tiny_model(family, "mlm", type_vocab_size=2), uneven(3, 12)
    default = model(**inputs).logits
    zeros = torch.zeros_like(inputs["input_ids"])
    assert torch.equal(model(**inputs, token_type_ids=zeros).logits, default)
    zeros[:, 4:] = 1
    assert (model(**inputs, token_type_ids=zeros).logits - default).abs().max() > 1e-3
