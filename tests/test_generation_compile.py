"""The decoding step compiled: the same text, and one compilation however long it gets."""

import pytest
import torch
from helpers import FAMILY_CAUSAL_VARIANTS, causal_variants_of, random_ids, tiny_causal_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig
from variants import ROWS

from luna_hf import FAMILIES, MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
causal_variants = pytest.mark.parametrize(("family", "variant"), FAMILY_CAUSAL_VARIANTS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wordy_model(family, variant="default", **overrides):
    """One layer in float64, with weights large enough that the text is not one token again and again; no `</s>`."""
    options = {**causal_variants_of(family)[variant], "tie_word_embeddings": False, "initializer_range": 0.2}
    model = tiny_causal_model(family, num_hidden_layers=1, **{**options, **overrides}).double()
    model.generation_config.eos_token_id = None
    model.generation_config.repetition_penalty = 1.5
    return model


def left_padded(batch, length):
    """Rows that begin with 0, 2, 4, ... columns of padding."""
    padding = torch.arange(length) < 2 * torch.arange(batch)[:, None]
    return {
        "input_ids": random_ids(batch, length, seed=length).masked_fill(padding, 1),
        "attention_mask": (~padding).long(),
    }


def compiled_with(backend):
    """What has `generate` compile the step of decoding, on a CPU too."""
    # A function: `generate` copies its configuration, and a copied counter would count for itself.
    called = backend if isinstance(backend, str) else lambda graph, inputs: backend(graph, inputs)
    config = CompileConfig(backend=called, fullgraph=True, dynamic=False, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


# Every variant with padding; without it a family's default, since the mask is all that makes a difference.
PADDED = [(*case, True) for case in FAMILY_CAUSAL_VARIANTS] + [(family, "default", False) for family in FAMILIES]


@pytest.mark.parametrize(("family", "variant", "padded"), PADDED)
def test_the_step_is_compiled_once(family, variant, padded):
    model, counter = wordy_model(family, variant), CompileCounterWithBackend("aot_eager")
    inputs = left_padded(3, 9) if padded else {"input_ids": random_ids(3, 9)}
    expected = model.generate(**inputs, max_new_tokens=64)
    got = model.generate(**inputs, max_new_tokens=64, **compiled_with(counter))
    assert torch.equal(got, expected)
    assert counter.frame_count == 1


@families
def test_one_compilation_serves_later_calls(family):
    model, counter = wordy_model(family), CompileCounterWithBackend("eager")
    options = compiled_with(counter)
    for length, tokens in ((9, 8), (5, 12), (30, 4)):
        inputs = left_padded(3, length)
        expected = model.generate(**inputs, max_new_tokens=tokens)
        assert torch.equal(model.generate(**inputs, max_new_tokens=tokens, **options), expected)
    assert counter.frame_count == 1


@families
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}], ids=["beam", "sample"])
def test_other_methods_compiled(family, options):
    model, counter, inputs = wordy_model(family), CompileCounterWithBackend("eager"), left_padded(3, 9)
    texts = []
    for compiling in ({}, compiled_with(counter)):
        torch.manual_seed(0)
        texts.append(model.generate(**inputs, max_new_tokens=12, **options, **compiling))
    assert torch.equal(*texts)
    # Sampling decodes with the compiled step; transformers' beam search does not use it.
    assert counter.frame_count == (1 if "do_sample" in options else 0)


# A family's default, and a state that is a queue.
BY_HAND = [(family, variant) for family in FAMILIES for variant in ("default", *ROWS[family].queues[-1:])]


@pytest.mark.parametrize(("family", "variant"), BY_HAND)
@torch.no_grad()
def test_a_step_compiled_by_hand(family, variant):
    model, counter = wordy_model(family, variant), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    ids, caches = random_ids(2, 20), [MemoryCache(model.config) for _ in range(2)]
    for cache in caches:
        model(ids[:, :5], past_key_values=cache)
    for column in range(5, 20):
        token = ids[:, column : column + 1]
        expected, got = (call(token, past_key_values=c) for call, c in zip((model, compiled), caches, strict=True))
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-9, rtol=1e-9)
    assert counter.frame_count == 1
    whole = model(ids).logits[:, -1]
    torch.testing.assert_close(got.logits[:, 0], whole, atol=1e-9, rtol=1e-9)
    assert caches[1].get_seq_length() == 20
    assert torch.equal(caches[0].tokens, caches[1].tokens)


@families
@torch.no_grad()
def test_the_compiled_step_writes_in_place(family):
    # What a CUDA graph needs: the state stays at its addresses.
    model, cache = wordy_model(family), MemoryCache(wordy_model(family).config)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    model(random_ids(2, 5), past_key_values=cache)
    token = random_ids(2, 1)

    def addresses():
        layers = (*cache.layers, cache.rows)
        return [state.data_ptr() for layer in layers for state in (*layer.states.values(), *layer.constants.values())]

    before = addresses()
    for step in (compiled, compiled, model):
        step(token, past_key_values=cache)
        assert addresses() == before


@families
def test_nothing_is_compiled_unasked(family, monkeypatch):
    model = wordy_model(family)
    assert not MemoryCache(model.config).is_compileable
    assert MemoryCache(model.config, compileable=True).is_compileable
    monkeypatch.setattr(type(model), "get_compiled_call", lambda *_: pytest.fail("compiles unasked"))
    # On an accelerator transformers compiles whatever it may.
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    config = model.generation_config
    for cache, compiles in ((MemoryCache(model.config), False), (MemoryCache(model.config, compileable=True), True)):
        assert model._valid_auto_compile_criteria({"past_key_values": cache}, config) == compiles
    monkeypatch.undo()
    monkeypatch.setattr(type(model), "get_compiled_call", lambda *_: pytest.fail("compiles unasked"))
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    out = model.generate(random_ids(2, 5), max_new_tokens=4, compile_config=config, return_dict_in_generate=True)
    assert not out.past_key_values.is_compileable


@pytest.mark.slow
@causal_variants
def test_inductor_decodes_the_same_text(family, variant):
    model, inputs = wordy_model(family, variant).float(), left_padded(3, 9)
    expected = model.generate(**inputs, max_new_tokens=32, return_dict_in_generate=True, output_logits=True)
    got = model.generate(
        **inputs, max_new_tokens=32, return_dict_in_generate=True, output_logits=True, **compiled_with("inductor")
    )
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)
