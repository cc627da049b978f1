"""`generate` with the causal models: decoding with the state equals decoding without it, for every method."""

import copy
import gc
from contextlib import suppress

import pytest
import torch
from helpers import (
    FAMILY_CAUSAL_KINDS,
    causal_variants_of,
    random_ids,
    refused,
    tiny_causal_model,
)
from transformers import DynamicCache, set_seed
from transformers.generation import stopping_criteria
from variants import ROWS

from luna_hf import FAMILIES, MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
causal_kinds = pytest.mark.parametrize(("family", "variant"), FAMILY_CAUSAL_KINDS)

# Decoding methods of transformers, by their arguments.
METHODS = {
    "greedy": {},
    "samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": True},
    "constrained": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [9, 11]]},
    "guided": {"guidance_scale": 1.5},
}


def wordy_model(family, variant="default", **overrides):
    """A float64 model with weights large enough for varied text, without `</s>`."""
    options = {**causal_variants_of(family)[variant], "tie_word_embeddings": False, "initializer_range": 0.2}
    model = tiny_causal_model(family, **{**options, **overrides}).double()
    model.generation_config.eos_token_id = None
    return model


@families
def test_continuous_batching_is_refused_at_once(family):
    model = tiny_causal_model(family)
    for start in (model.generate_batch, model.init_continuous_batching):
        with pytest.raises(ValueError, match="generate_batch"):
            start([[5, 6, 7], [8, 9]])


def left_padded(rows, extra=0):
    """Ids and mask of rows of different lengths, with `extra` columns of padding before the longest."""
    width = max(len(row) for row in rows) + extra
    ids, mask = torch.ones(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :], mask[index, width - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def prompts(*lengths):
    """Rows of these lengths."""
    return [random_ids(1, length, seed=length)[0] for length in lengths]


def with_logits(model, inputs, tokens=12, **options):
    """Generated ids, the logits of every step (steps, rows, vocabulary), and the state."""
    out = model.generate(**inputs, max_new_tokens=tokens, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits), out.cache


def assert_same_generation(actual, expected):
    assert torch.equal(actual[0], expected[0])
    # Float64: only the order of additions differs.
    torch.testing.assert_close(actual[1], expected[1], atol=1e-9, rtol=1e-9)


# ---- with and without the state ----


@causal_kinds
def test_the_state_changes_nothing(family, variant):
    model, inputs = wordy_model(family, variant), {"input_ids": random_ids(3, 11)}
    model.generation_config.no_repeat_ngram_size = 1  # monotonous text would prove little
    expected = with_logits(model, inputs, use_cache=False)
    assert expected[2] is None
    for options in ({}, {"prefill_chunk_size": 4}):
        actual = with_logits(model, inputs, **options)
        assert_same_generation(actual, expected)
        # The last token has been generated but not read.
        assert isinstance(actual[2], MemoryCache) and actual[2].tokens.tolist() == [22] * 3


@causal_kinds
def test_padding_changes_no_row(family, variant):
    model, rows = wordy_model(family, variant), prompts(9, 4, 1, 13)
    singles = [with_logits(model, {"input_ids": row[None]}) for row in rows]
    for extra, options in ((0, {}), (0, {"use_cache": False}), (3, {"prefill_chunk_size": 4})):
        inputs = left_padded(rows, extra)
        sequences, logits, cache = with_logits(model, inputs, **options)
        for index, (ids, single_logits, _) in enumerate(singles):
            width = inputs["input_ids"].shape[1]
            assert_same_generation((sequences[index, width:], logits[:, index]), (ids[0, -12:], single_logits[:, 0]))
        if cache is not None:
            assert cache.tokens.tolist() == [len(row) + 11 for row in rows]


@families
@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_and_without_the_state(family, method):
    model, inputs = wordy_model(family), {"input_ids": random_ids(2, 7)}
    texts = []
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}):
        if method == "guided" and "prefill_chunk_size" in options:
            continue  # the unconditional pass reads the prompt in one piece
        set_seed(0)
        texts.append(model.generate(**inputs, max_new_tokens=10, **METHODS[method], **options))
        assert torch.equal(texts[-1], texts[0])
    count = METHODS[method].get("num_return_sequences", 1)
    assert texts[0].shape == (2 * count, 17)
    if method != "greedy":
        assert not torch.equal(texts[0][::count], model.generate(**inputs, max_new_tokens=10))


@families
def test_padding_changes_no_beam(family):
    model, rows = wordy_model(family), prompts(8, 3, 1)
    batch = model.generate(**left_padded(rows, 2), max_new_tokens=10, **METHODS["beams"]).unflatten(0, (3, -1))
    for row, texts in zip(rows, batch, strict=True):
        single = model.generate(row[None], max_new_tokens=10, **METHODS["beams"])
        assert torch.equal(texts[:, -10:], single[:, -10:])


@families
def test_beam_search_finds_the_best_continuation(family):
    """Two tokens, against all pairs: a beam must keep its own state."""
    model, ids = wordy_model(family, vocab_size=12), random_ids(1, 5, vocab_size=12)
    found = model.generate(ids, max_new_tokens=2, num_beams=12, length_penalty=0.0)
    pairs = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(144, -1), pairs], dim=1)).logits.log_softmax(-1)
    scores = logits[:, 4].gather(1, pairs[:, :1]) + logits[:, 5].gather(1, pairs[:, 1:])
    assert found[0, 5:].tolist() == pairs[scores.argmax()].tolist()


@families
def test_assisted_generation_is_refused(family):
    model = wordy_model(family)
    for options in ({"assistant_model": wordy_model(family)}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation"):  # raised by transformers
            model.generate(random_ids(1, 5), max_new_tokens=4, **options)


@families
def test_text_may_exceed_the_positions_of_training(family):
    model, inputs = wordy_model(family, max_position_embeddings=16), {"input_ids": random_ids(1, 7)}
    expected = with_logits(model, inputs, tokens=40, use_cache=False)
    assert_same_generation(with_logits(model, inputs, tokens=40), expected)
    assert expected[1].isfinite().all()


@families
def test_a_default_call_may_exceed_the_positions_of_training(family, monkeypatch):
    """Without a limit of new tokens, `generate` adds 20 to a text of any length, and warns of nothing."""
    model, ids = wordy_model(family, max_position_embeddings=16), random_ids(2, 30)
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", pytest.fail)
    for given in (ids[:, :10], ids):
        assert model.generate(given).shape == (2, given.shape[1] + 20)


# ---- inputs and outputs ----


@causal_kinds
def test_returned_states_and_attentions_equal_those_of_one_pass(family, variant):
    model = wordy_model(family, variant, attn_implementation="eager")
    maps = ROWS[family].causal_maps
    asked = {"output_hidden_states": True, "output_attentions": maps}
    out = model.generate(random_ids(2, 7), max_new_tokens=4, return_dict_in_generate=True, **asked)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], **asked)
    for name, dim in (("hidden_states", 1), *[("attentions", 2)] * maps):
        assert [step[0].shape[dim] for step in out[name]] == [7, 1, 1, 1]
        for layer, expected in enumerate(whole[name]):
            states = torch.cat([step[layer] for step in out[name]], dim=dim)
            torch.testing.assert_close(states, expected, atol=1e-9, rtol=1e-9)


@families
def test_embeddings_in_place_of_ids(family):
    model, inputs = wordy_model(family), left_padded(prompts(7, 4))
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    for options in ({}, {"num_beams": 3}):
        expected = model.generate(**inputs, max_new_tokens=8, **options)[:, 7:]
        given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
        assert torch.equal(model.generate(**given, max_new_tokens=8, **options), expected)
        assert torch.equal(model.generate(**inputs, inputs_embeds=embeds, max_new_tokens=8, **options)[:, 7:], expected)


@families
def test_segments_continue(family):
    model, ids = wordy_model(family, type_vocab_size=2), random_ids(2, 7)
    inputs = {"input_ids": ids, "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(2, -1)}
    expected = with_logits(model, inputs, use_cache=False)
    assert_same_generation(with_logits(model, inputs), expected)
    assert not torch.equal(expected[1], with_logits(model, {"input_ids": ids})[1])


# ---- states handed in by the caller ----


@causal_kinds
def test_a_state_is_continued(family, variant):
    model, inputs = wordy_model(family, variant), {"input_ids": random_ids(2, 7)}
    model.generation_config.suppress_tokens = [1]  # `generate` would take it for padding of the text so far
    expected = with_logits(model, inputs, tokens=20)
    start = with_logits(model, inputs, tokens=8)
    branch = copy.deepcopy(start[2])
    # Given the whole text so far, or only the last token, which the state has not read.
    sequences, logits, cache = with_logits(model, {"input_ids": start[0]}, tokens=12, cache=start[2])
    assert cache is start[2]
    assert_same_generation((sequences, logits), (expected[0], expected[1][8:]))
    only = {"input_ids": start[0][:, -1:], "attention_mask": torch.ones(2, 15, dtype=torch.long)}
    sequences, logits, _ = with_logits(model, only, tokens=12, cache=branch)
    assert_same_generation((sequences[:, 1:], logits), (expected[0][:, 15:], expected[1][8:]))


@causal_kinds
def test_a_second_turn_of_padded_rows(family, variant):
    model, rows, answers = wordy_model(family, variant), prompts(9, 4), prompts(3, 6)
    model.generation_config.suppress_tokens = [1]  # `generate` would take it for padding of the text so far
    first = left_padded(rows)
    sequences, _, cache = with_logits(model, first, tokens=5)
    second = left_padded(answers)
    ids = torch.cat([sequences, second["input_ids"]], dim=1)
    mask = torch.cat([first["attention_mask"], torch.ones(2, 5, dtype=torch.long), second["attention_mask"]], dim=1)
    expected = with_logits(model, {"input_ids": ids, "attention_mask": mask}, use_cache=False)
    for new, options in ((0, {}), (0, {"prefill_chunk_size": 4}), (cache.get_seq_length(), {})):
        inputs = {"input_ids": ids[:, new:], "attention_mask": mask}
        got, logits, _ = with_logits(model, inputs, cache=copy.deepcopy(cache), **options)
        assert_same_generation((got[:, -12:], logits), (expected[0][:, -12:], expected[1]))
    for index in range(2):  # each row alone, without padding
        alone = ids[index][mask[index].bool()][None]
        got, logits, _ = with_logits(model, {"input_ids": alone})
        assert_same_generation((got[0, -12:], logits[:, 0]), (expected[0][index, -12:], expected[1][:, index]))


@families
@pytest.mark.parametrize("form", ["ids", "embeds"])
@torch.no_grad()
def test_a_prompt_that_does_not_continue_the_state_is_refused(family, form):
    """Transformers would read a text twice, or drop the first new tokens."""
    model, rows = wordy_model(family), prompts(7, 4)
    inputs, new, other = left_padded(rows), random_ids(2, 3, seed=1), random_ids(2, 10, seed=2)
    table = model.get_input_embeddings()

    def begin():
        return model(**inputs, cache=MemoryCache(model.config)).cache

    def ones(columns):
        return torch.ones(2, columns, dtype=torch.long)

    for ids, mask in ((inputs["input_ids"], inputs["attention_mask"]), (new, ones(3)), (new, ones(8))):
        given = {"input_ids": ids} if form == "ids" else {"inputs_embeds": table(ids)}
        with refused("cache", 7, ids.shape[1], 7 + ids.shape[1]):
            model.generate(**given, attention_mask=mask, cache=begin(), max_new_tokens=2)
    whole, mask = torch.cat([inputs["input_ids"], new], 1), torch.cat([inputs["attention_mask"], ones(3)], 1)
    expected = model.generate(whole, attention_mask=mask, max_new_tokens=4)[:, 10:]
    given = {"input_ids": whole} if form == "ids" else {"inputs_embeds": table(whole)}
    out = model.generate(**given, attention_mask=mask, cache=begin(), max_new_tokens=4)
    assert torch.equal(out[:, -4:], expected)
    if form == "ids":  # more new tokens than the state holds, or one row of another text
        for ids in (other, torch.cat([whole[:1], other[1:]])):
            with refused("cache", 7, 10, 17):
                model.generate(ids, attention_mask=mask, cache=begin(), max_new_tokens=2)


@families
@torch.no_grad()
def test_a_state_of_embeddings_is_continued_with_any_ids(family):
    model, ids = wordy_model(family), random_ids(2, 9)
    embeds = model.get_input_embeddings()(ids[:, :4])
    for parts in (({"inputs_embeds": embeds},), ({"input_ids": ids[:, :2]}, {"inputs_embeds": embeds[:, 2:]})):
        cache = MemoryCache(model.config)
        for part in (*parts, {"input_ids": ids[:, 4:6]}):
            model(**part, cache=cache)
        out = model.generate(ids, cache=cache, max_new_tokens=4)
        assert torch.equal(out, model.generate(ids, max_new_tokens=4))


@families
@torch.no_grad()
def test_tokens_in_the_state_cannot_be_masked_later(family):
    model, ids = wordy_model(family), random_ids(2, 7)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 5:7] = 0
    new = {"input_ids": random_ids(2, 3), "attention_mask": mask}
    for compileable in (False, True):
        cache = MemoryCache(model.config, compileable=compileable)
        model(ids, cache=cache)
        with refused("attention_mask", 5, 7):
            model(**new, cache=cache)
        with refused("attention_mask", 5, 7):
            model.generate(**new, cache=cache, max_new_tokens=3)
    for state, seen in ((cache, 7), (MemoryCache(model.config), 0)):
        with refused("attention_mask", 12, 3, seen):
            model(random_ids(2, 3), attention_mask=torch.ones(2, 12), cache=state)


@families
def test_a_state_can_be_copied_and_reset(family):
    model, ids = wordy_model(family), random_ids(1, 9)
    cache = MemoryCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    branch = torch.cat([ids, random_ids(1, 4, seed=1)], dim=1)
    expected = model.generate(branch, max_new_tokens=8)
    assert torch.equal(model.generate(branch, cache=copy.deepcopy(cache), max_new_tokens=8), expected)
    assert cache.get_seq_length() == 9
    assert torch.equal(model.generate(branch, cache=cache, max_new_tokens=8), expected)
    assert cache.get_seq_length() == 20
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    other = random_ids(3, 5, seed=1)
    expected = model.generate(other, max_new_tokens=6)
    assert torch.equal(model.generate(other, cache=cache, max_new_tokens=6), expected)


@families
@torch.no_grad()
def test_a_refused_or_interrupted_call_leaves_no_other_state(family, monkeypatch):
    model, other, ids = wordy_model(family), wordy_model(family, num_hidden_layers=1), random_ids(2, 9)
    cache, wrong = MemoryCache(model.config), MemoryCache(other.config)
    model(ids, cache=cache)
    other(ids, cache=wrong)
    before = cache.tokens
    states = {name: state for name, state in cache.state_dict().items() if name != "made_for"}
    for refusing, tensors in (
        (cache, wrong.state_dict()),
        (MemoryCache(model.config), {**states, "layers.9.key": ids}),
    ):
        seen = refusing.get_seq_length()
        with refused("Load"):
            refusing.load_state_dict(tensors)
        assert refusing.get_seq_length() == seen and refusing.nbytes == (cache.nbytes if seen else 0)
    model(ids, cache=cache)
    assert (cache.tokens - before == 9).all()
    rows = torch.tensor([1, 0])
    for name, given in (("reorder_cache", rows), ("batch_select_indices", rows), ("batch_repeat_interleave", 2)):
        own = copy.deepcopy(cache)
        with monkeypatch.context() as patch:
            patch.setattr(own.rows, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(own, name)(given)
        for call in (lambda own=own: model(random_ids(own.batch_size, 1), cache=own), own.state_dict):
            with refused("failed midway"):
                call()


def interrupted(*args):
    raise KeyboardInterrupt


@families
@torch.no_grad()
def test_positions_without_rows(family):
    """Also where their number is that of the heads."""
    model, length = wordy_model(family), 4
    assert model.config.num_attention_heads == length
    ids, positions = random_ids(2, length), torch.arange(length)
    expected = model(ids, position_ids=positions.expand(2, -1)).logits
    torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)


@families
def test_other_caches_are_refused(family):
    model, ids = wordy_model(family), random_ids(2, 7)
    with refused("cache", "DynamicCache", "MemoryCache"):
        model.generate(ids, cache=DynamicCache(), max_new_tokens=3)
    for name in ("offloaded", "quantized", "sliding_window", "offloaded_static"):
        with refused("cache_implementation", name):
            model.generate(ids, cache_implementation=name, max_new_tokens=3)


def bytes_of_all_tensors():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            with suppress(NotImplementedError):  # leftovers of other tests without a storage
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@families
@torch.no_grad()
def test_no_memory_grows_with_the_text(family):
    """Step by step, because `generate` itself keeps the whole text."""
    model = wordy_model(family, num_hidden_layers=1, hidden_size=16, intermediate_size=16).float()
    cache, sizes = MemoryCache(model.config), {}
    token = model(random_ids(1, 3), cache=cache).logits[:, -1:].argmax(-1)
    for step in range(2, 129):
        token = model(token, cache=cache).logits[:, -1:].argmax(-1)
        if step in (16, 128):
            sizes[step] = cache.nbytes, bytes_of_all_tensors()
    assert cache.get_seq_length() == 130
    assert sizes[16] == sizes[128]


@families
def test_training_mode_and_gradients(family):
    """`generate` keeps the mode of the model, and takes a state made with gradients."""
    model, ids = wordy_model(family), random_ids(2, 7)
    expected = model.generate(ids, max_new_tokens=6)
    model.train()
    assert torch.equal(model.generate(ids, max_new_tokens=6), expected)  # there is no dropout
    assert model.training
    cache = MemoryCache(model.config)
    model(ids, cache=cache)
    assert torch.equal(model.eval().generate(expected, cache=cache, max_new_tokens=1)[:, :-1], expected)
