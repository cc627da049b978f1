"""Causal models of every family: no view of the future, exact decoding with a state, padding without effect.

`test_causal_scan.py` and `test_causal_memory.py` test the attention alone, `test_generation.py` tests `generate`.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CAUSAL_KINDS_FIRST,
    FAMILIES,
    FAMILY_CAUSAL_KINDS,
    FAMILY_CAUSAL_VARIANTS,
    HEADS,
    causal_variants_of,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_model,
)
from reference import causal as reference
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from variants import ROWS

from luna_hf import MemoryCache

families = pytest.mark.parametrize("model_type", FAMILIES)
# `test_equals_the_definition` runs every variant in every suite.
variants = pytest.mark.parametrize(("model_type", "variant"), CAUSAL_KINDS_FIRST)
kinds = pytest.mark.parametrize(("model_type", "variant"), FAMILY_CAUSAL_KINDS)
DEFINED = [case for case in FAMILY_CAUSAL_VARIANTS if ROWS[case[0]].causal_reference]


def make(model_type, variant="default", **overrides):
    """Two layers without dropout, with attention far from uniform."""
    options = {"num_hidden_layers": 2, **causal_variants_of(model_type)[variant], **overrides}
    model = tiny_causal_model(model_type, **options)
    unscaled = ROWS[model_type].unscaled.get(variant)
    shared = (f"{model.base_model_prefix}.embeddings.", f"{model.base_model_prefix}.encoder.", "lm_head.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Parameters of the attention, in its layers or shared by all of them.
            own = ".attention.self." in name or not name.startswith(shared)
            if own and not (unscaled and name.endswith(unscaled)):
                parameter.mul_(4.0)
    return model


def assert_near(ours, exact, tolerance=1e-5):
    """Relative to the largest logit, and to 1 where all are smaller."""
    assert ours.shape == exact.shape
    error = (ours.double() - exact.double()).abs().max().item() / max(1.0, exact.abs().max().item())
    assert error <= tolerance, f"{error:.1e} > {tolerance:.1e}"


# ---- the definition ----


def weights_of(model):
    """Float64 weights under the names of the base model, as the reference reads them."""
    state = {name.removeprefix(f"{model.base_model_prefix}."): p.detach() for name, p in model.state_dict().items()}
    return {name: tensor.double() for name, tensor in state.items()}


@pytest.mark.parametrize(("model_type", "variant"), DEFINED)
@torch.no_grad()
def test_equals_the_definition(model_type, variant):
    """In float64; the tolerance allows for angles and sinusoids, which the model computes in float32."""
    model = make(model_type, variant, max_position_embeddings=16).double()  # Linformer's columns repeat
    config, mechanism = SimpleNamespace(**model.config.to_dict()), ROWS[model_type].causal_reference
    for length in (1, 2, 21):
        ids = random_ids(1, length, seed=length)
        expected = reference.decode_row(weights_of(model), ids[0].tolist(), config, mechanism)
        assert_near(model(ids).logits[0], expected, 2e-6)


# ---- no future ----


@variants
def test_no_future(model_type, variant):
    """Gradients of later tokens are exactly zero over several chunks; those of earlier tokens are not."""
    model = make(model_type, variant)
    embeddings = torch.randn(1, 150, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    for place in (0, 1, 63, 64, 148):
        (gradient,) = torch.autograd.grad(logits[:, place].square().sum(), embeddings, retain_graph=True)
        assert not gradient[:, place + 1 :].any()
        assert gradient[:, max(0, place - 1) : place + 1].any(-1).all()


# ---- the state ----


@torch.no_grad()
def step_by_step(model, ids, cache=None):
    """Logits (b, n, v), computed token by token, and the state."""
    logits = []
    for token in ids.split(1, dim=1):
        outputs = model(token, cache=cache, use_cache=True)
        cache = outputs.cache
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1), cache


@variants
@torch.no_grad()
def test_decoding_in_parts_equals_the_parallel_form(model_type, variant):
    """Token by token and in longer parts, over several chunks and beyond `max_position_embeddings`."""
    model, ids = make(model_type, variant, max_position_embeddings=64), random_ids(2, 90)
    whole = model(ids, use_cache=True)
    names = [set(layer.states) for layer in whole.cache.layers]
    for sizes in ([1] * 90, [1, 63, 2, 24], [7, 5, 1, 1, 76]):
        cache = MemoryCache(model.config)
        parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split(sizes, dim=1)]
        assert_near(torch.cat(parts, dim=1), whole.logits)
        assert cache.get_seq_length() == 90 and cache.tokens.tolist() == [90, 90]
        assert [set(layer.states) for layer in cache.layers] == names


def scattered(rows, places, length, seed=5):
    """Ids and mask with the tokens of every row at its places, and random ids at padding."""
    ids, mask = random_ids(len(rows), length, seed=seed), torch.zeros(len(rows), length, dtype=torch.long)
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[index, place], mask[index, place] = row, 1
    return ids, mask


@variants
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(model_type, variant):
    """Rows padded on either side or in between, in one batch, and their continuations, in parallel and with a state."""
    model, lengths, width = make(model_type, variant), [90, 33, 7, 34, 5, 32, 6], 90
    rows = [random_ids(1, length + 6, seed=length)[0] for length in lengths]
    generator = torch.Generator().manual_seed(3)
    places = [torch.arange(width)]
    places += [torch.arange(width - length, width) for length in lengths[1:3]]
    places += [torch.arange(length) for length in lengths[3:5]]
    places += [torch.randperm(width, generator=generator)[:length].sort().values for length in lengths[5:]]
    ids, mask = scattered([row[:length] for row, length in zip(rows, lengths, strict=True)], places, width)
    cache = MemoryCache(model.config)
    logits = model(ids, attention_mask=mask, cache=cache, use_cache=True).logits
    assert cache.tokens.tolist() == lengths and cache.get_seq_length() == width
    assert torch.isfinite(logits).all()
    # Three more tokens in one pass, with a mask that covers the past; then single tokens, with a new mask or none.
    more = torch.stack([row[-6:] for row in rows])
    past = torch.cat([mask, torch.ones(len(rows), 3, dtype=torch.long)], dim=1)
    later = [model(more[:, :3], attention_mask=past, cache=cache, use_cache=True).logits]
    later.append(model(more[:, 3:4], attention_mask=torch.ones(len(rows), 1), cache=cache, use_cache=True).logits)
    later.append(step_by_step(model, more[:, 4:], cache)[0])
    later = torch.cat(later, dim=1)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        expected = model(row[None]).logits[0]
        assert_near(logits[index, places[index]], expected[:length])
        assert_near(later[index], expected[length:])


@variants
@torch.no_grad()
def test_padding_between_tokens_with_a_state(model_type, variant):
    """Single columns of padding, and a row of padding only."""
    model, ids = make(model_type, variant), random_ids(3, 24)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, [0, 3, 4, 10, 11, 12, 20]] = 0
    mask[2] = 0
    for sizes in ([1] * 24, [5, 1, 1, 4, 13]):
        cache, logits = MemoryCache(model.config), []
        for tokens, kept in zip(ids.split(sizes, dim=1), mask.split(sizes, dim=1), strict=True):
            logits.append(model(tokens, attention_mask=kept, cache=cache, use_cache=True).logits)
        logits = torch.cat(logits, dim=1)
        assert torch.isfinite(logits).all() and cache.tokens.tolist() == [24, 17, 0]
        assert_near(logits[0], model(ids[:1]).logits[0])
        assert_near(logits[1, mask[1] == 1], model(ids[1:2, mask[1] == 1]).logits[0])


@variants
@torch.no_grad()
def test_the_state_has_one_size(model_type, variant):
    model, sizes = make(model_type, variant), set()
    for length in (1, 16, 1030):
        for more in (1, 40):
            cache = MemoryCache(model.config)
            assert cache.nbytes == 0 and not cache.is_initialized
            for ids in (random_ids(2, length), random_ids(2, more)):
                model(ids, cache=cache, use_cache=True)
            sizes.add(cache.nbytes)
            # `nbytes` counts all that is stored: no tensor is a view of a larger one.
            for layer in (*cache.layers, cache.rows):
                for tensor in (*layer.states.values(), *layer.constants.values()):
                    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert len(sizes) == 1 and 0 < sizes.pop() < 2 * 2 * 48 * 8 * 40  # keys and values of some tens of slots, in bytes


@variants
@torch.no_grad()
def test_bfloat16(model_type, variant):
    """Sums stay in float32, a window has the model's dtype; logits stay within 3 % of float32 on average."""
    model, ids = make(model_type, variant), random_ids(2, 200)
    exact = model(ids).logits
    model = model.bfloat16()
    cache = MemoryCache(model.config)
    model(ids[:, :150], cache=cache, use_cache=True)
    parts = model(ids[:, 150:], cache=cache, use_cache=True).logits
    sum_dtype = torch.bfloat16 if variant in ROWS[model_type].queues else torch.float32
    for layer in cache.layers:
        assert layer.states
        for name, tensor in layer.states.items():
            in_model_dtype = name == "convolution" or name.startswith("window_")
            assert tensor.dtype == (torch.bfloat16 if in_model_dtype else sum_dtype), name
    whole = model(ids).logits
    assert whole.dtype == torch.bfloat16
    for logits, wanted in ((whole, exact), (parts, exact[:, 150:])):
        error = (logits.float() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
        assert error <= 0.03


@families
@torch.no_grad()
def test_when_a_state_is_made(model_type):
    """By default in inference, not in training; a state handed in is updated."""
    model, ids = make(model_type), random_ids(2, 12)
    assert isinstance(model(ids).cache, MemoryCache)
    assert model(ids, use_cache=False).cache is None
    assert make(model_type, use_cache=False)(ids).cache is None
    model.train()
    assert model(ids).cache is None and model(ids, use_cache=True).cache is None
    cache = MemoryCache(model.config)
    assert model(ids, cache=cache, use_cache=True).cache is cache and cache.get_seq_length() == 12


# ---- training ----


@families
def test_losses(model_type):
    """Every token is predicted from those before it; -100 and the last place have no label."""
    model, ids = make(model_type), random_ids(3, 20)
    labels = ids.masked_fill(torch.arange(20) % 5 == 3, -100)
    outputs = model(ids, labels=labels)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    expected = F.cross_entropy(outputs.logits.flatten(0, 1), shifted.flatten())
    torch.testing.assert_close(outputs.loss, expected)
    torch.testing.assert_close(model(ids, labels=labels, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    count = (shifted != -100).sum()
    for given in (count * 2, int(count) * 2):
        torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=given).loss, expected / 2)
    assert model(ids).loss is None


# ---- inputs and outputs ----


@families
@torch.no_grad()
def test_logits_to_keep(model_type):
    model, ids = make(model_type), random_ids(2, 20)
    logits = model(ids).logits
    for given, places in ((0, slice(None)), (1, slice(-1, None)), (4, slice(-4, None)), (torch.tensor([2, 9]), [2, 9])):
        torch.testing.assert_close(model(ids, logits_to_keep=given).logits, logits[:, places], rtol=0, atol=1e-6)


@families
@torch.no_grad()
def test_without_a_mask_every_token_counts(model_type):
    """The pad's id included."""
    model, ids = make(model_type), random_ids(2, 20)
    ids[:, 5] = model.config.pad_token_id
    expected = model(ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.equal(model(ids).logits, expected)
    mask = torch.ones_like(ids)
    mask[:, 5] = 0
    assert (model(ids, attention_mask=mask).logits[:, 6:] - expected[:, 6:]).abs().max() > 1e-3


@families
@pytest.mark.parametrize("variant", ["default", "prenorm-sinusoidal"])
@torch.no_grad()
def test_explicit_positions(model_type, variant):
    """They start at 0; for rotary positions only differences count. LAVO has none by default."""
    model, ids = make(model_type, variant), random_ids(2, 20)
    expected, places = model(ids).logits, torch.arange(20)[None]
    assert torch.equal(model(ids, position_ids=places).logits, expected)
    moved, stretched = (model(ids, position_ids=given).logits for given in (places + 9, places * 2))
    positions = model.config.position_embedding_type
    assert ((stretched - expected).abs().max().item() > 1e-3) is (positions != "none")
    assert torch.allclose(moved, expected, atol=1e-4) is (positions != "sinusoidal")


@variants
@torch.no_grad()
def test_backends_are_equal_and_weights_sum_to_one(model_type, variant):
    model, ids = make(model_type, variant), random_ids(3, 70)
    mask = torch.ones_like(ids)
    mask[1, :30], mask[2, 50:] = 0, 0
    model.set_attn_implementation("sdpa")
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    maps = ROWS[model_type].causal_maps
    outputs = model(ids, attention_mask=mask, output_attentions=maps, output_hidden_states=True)
    real = mask == 1
    assert_near(outputs.logits[real], expected[real])
    assert len(outputs.hidden_states) == 3
    if not maps:
        with refused("output_attentions", model_type):
            model(ids, output_attentions=True)
        return
    assert len(outputs.attentions) == 2
    keys = ROWS[model_type].causal_keys(model.config)
    for weights in outputs.attentions:
        assert weights.shape == (3, 4, 70, keys) and (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1).transpose(1, 2)[real], torch.ones(int(real.sum()), 4))
    step = model(ids[:, :1], cache=outputs.cache, use_cache=True, output_attentions=True)
    assert [weights.shape for weights in step.attentions] == [(3, 4, 1, keys)] * 2


# ---- checkpoints ----


@kinds
@torch.no_grad()
def test_saved_and_loaded(model_type, variant, tmp_path):
    """Bitwise; `AutoModel` loads the trunk, and encoder heads refuse the checkpoint."""
    model, ids = make(model_type, variant), random_ids(2, 70)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FAMILIES[model_type].causal_lm and loaded.config.is_decoder
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert type(trunk) is FAMILIES[model_type].causal_model
    assert torch.equal(trunk(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
    assert isinstance(trunk(ids).cache, MemoryCache)
    for auto_class in (AutoModelForMaskedLM, *HEADS.values()):
        with refused("AutoModelForCausalLM"):
            auto_class.from_pretrained(tmp_path)


@families
def test_a_causal_model_loads_the_weights_of_an_encoder(model_type, tmp_path):
    """Its embedding and every layer; the encoder's config does not change."""
    encoder = tiny_model(model_type, "mlm")
    encoder.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.is_decoder and not encoder.config.is_decoder
    ours, theirs = model.state_dict(), encoder.state_dict()
    shared = [name for name in ours.keys() & theirs.keys() if "encoder.layer." in name]
    assert len(shared) > 30
    for name in (*shared, f"{model.base_model_prefix}.embeddings.word_embeddings.weight"):
        assert torch.equal(ours[name], theirs[name]), name
    assert model.lm_head.weight is model.get_input_embeddings().weight


# ---- errors ----


@families
@torch.no_grad()
def test_wrong_states_are_refused(model_type):
    model, other, ids = make(model_type), make(model_type, num_hidden_layers=3), random_ids(2, 4)
    with refused("num_hidden_layers", 3, 2):
        model(ids, cache=other(ids).cache)
    cache = model(ids).cache
    with refused(2, 3):
        model(random_ids(3, 1), cache=cache)
    # A mask that covers the past has the rows of the input, and is at least as long.
    for shape in ((2, 2), (3, 8), (2, 8, 8)):
        with refused("attention_mask"):
            model(random_ids(2, 4), attention_mask=torch.ones(shape), cache=cache)
    assert cache.get_seq_length() == 4  # unchanged
    with refused("MemoryCache"):
        cache.crop(1)
    with refused("MemoryCache", error=NotImplementedError):
        cache.update(torch.zeros(1), torch.zeros(1), 0)


@families
def test_an_encoder_refuses_the_config_of_a_decoder(model_type):
    family, config = FAMILIES[model_type], tiny_causal_model(model_type).config
    assert type(AutoModel.from_config(config)) is family.causal_model
    with refused("AutoModel"):
        family.base_model(config)
