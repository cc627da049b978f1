"""A compiled decoding step gives the same text and compiles once, however long the text gets."""

import pytest
import torch
from helpers import FAMILY_CAUSAL_KINDS, FAMILY_CAUSAL_VARIANTS, random_ids, slow_unless
from test_generation import left_padded as pad
from test_generation import prompts, wordy_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

from luna_hf import FAMILIES, MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
kinds = pytest.mark.parametrize(
    ("family", "variant"), [slow_unless(case[1] == "default", *case) for case in FAMILY_CAUSAL_KINDS]
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(family, variant="default"):
    """One layer, and text that does not repeat itself."""
    model = wordy_model(family, variant, num_hidden_layers=1)
    model.generation_config.repetition_penalty = 1.5
    return model


def left_padded(length):
    """Three rows that begin with 0, 1 and 3 columns of padding."""
    return pad(prompts(length, length - 1, length - 3))


def compiled_with(backend):
    """Arguments that make `generate` compile the decoding step, on a CPU too."""
    # A function: `generate` copies its configuration, and a copied counter would count on its own.
    called = backend if isinstance(backend, str) else lambda graph, inputs: backend(graph, inputs)
    config = CompileConfig(backend=called, fullgraph=True, dynamic=False, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


@kinds
def test_one_compilation_serves_every_call(family, variant):
    model, counter = make(family, variant), CompileCounterWithBackend("eager")
    options = compiled_with(counter)
    for length, tokens in ((9, 20), (5, 12), (30, 4)):
        inputs = left_padded(length)
        expected = model.generate(**inputs, max_new_tokens=tokens)
        assert torch.equal(model.generate(**inputs, max_new_tokens=tokens, **options), expected)
    assert counter.frame_count == 1


def test_sampling_without_padding():
    model, counter, ids = make("luna"), CompileCounterWithBackend("eager"), random_ids(3, 9)
    texts = []
    for compiling in ({}, compiled_with(counter)):
        torch.manual_seed(0)
        texts.append(model.generate(ids, max_new_tokens=12, do_sample=True, **compiling))
    assert torch.equal(*texts)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("family", "variant"), [slow_unless(case == ("luna", "default"), *case) for case in FAMILY_CAUSAL_KINDS]
)
@torch.no_grad()
def test_a_step_compiled_by_hand(family, variant):
    """The state stays at its addresses, as a CUDA graph requires, and holds the same numbers."""
    model, counter = make(family, variant), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    ids, caches = random_ids(2, 20), [MemoryCache(model.config) for _ in range(2)]
    for cache in caches:
        model(ids[:, :5], cache=cache)

    def addresses():
        layers = (*caches[1].layers, caches[1].rows)
        return [state.data_ptr() for layer in layers for state in (*layer.states.values(), *layer.constants.values())]

    before = addresses()
    for column in range(5, 20):
        token = ids[:, column : column + 1]
        expected, got = (call(token, cache=c) for call, c in zip((model, compiled), caches, strict=True))
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-9, rtol=1e-9)
        assert addresses() == before
    assert counter.frame_count == 1
    torch.testing.assert_close(got.logits[:, 0], model(ids).logits[:, -1], atol=1e-9, rtol=1e-9)
    assert caches[1].get_seq_length() == 20
    assert torch.equal(caches[0].tokens, caches[1].tokens)


@families
def test_nothing_is_compiled_by_default(family, monkeypatch):
    model = make(family)
    monkeypatch.setattr(type(model), "get_compiled_call", lambda *_: pytest.fail("compiled without being asked"))
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    out = model.generate(random_ids(2, 5), max_new_tokens=4, compile_config=config, return_dict_in_generate=True)
    assert not out.cache.is_compileable
    # On an accelerator transformers compiles whenever the cache allows it.
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    for compileable in (False, True):
        cache = MemoryCache(model.config, compileable=compileable)
        assert model._valid_auto_compile_criteria({"cache": cache}, model.generation_config) == compileable


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("family", "variant"), FAMILY_CAUSAL_VARIANTS)
def test_every_variant_decodes_the_same_text(family, variant, backend):
    model, inputs = make(family, variant).float(), left_padded(9)
    options = {"max_new_tokens": 32, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, **compiled_with(backend))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)
