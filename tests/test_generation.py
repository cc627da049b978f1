"""`generate` of the causal models: however transformers decodes, the state changes nothing."""

import copy
import gc

import pytest
import torch
from helpers import FAMILY_CAUSAL_VARIANTS, causal_variants_of, random_ids, refused, tiny_causal_model
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList, set_seed
from variants import ROWS

from luna_hf import FAMILIES, MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
causal_variants = pytest.mark.parametrize(("family", "variant"), FAMILY_CAUSAL_VARIANTS)

# How transformers decodes, by the arguments that ask for it.
METHODS = {
    "greedy": {},
    "multinomial": {"do_sample": True, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "beam": {"num_beams": 3},
    "beam-sample": {"num_beams": 3, "do_sample": True},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": True},
    "samples-returned": {"do_sample": True, "num_return_sequences": 3},
    "constrained": {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [9, 11]],
        "min_new_tokens": 4,
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [8],
        "forced_eos_token_id": 2,
    },
    "guided": {"guidance_scale": 1.5},
}
methods = pytest.mark.parametrize("method", list(METHODS))


def wordy_model(family, variant="default", **overrides):
    """In float64, with weights large enough that the text is not one token again and again; there is no `</s>`."""
    options = {**causal_variants_of(family)[variant], "tie_word_embeddings": False, "initializer_range": 0.2}
    model = tiny_causal_model(family, **{**options, **overrides}).double()
    model.generation_config.eos_token_id = None
    return model


def left_padded(rows, extra=0):
    """Ids and mask of rows of different lengths, `extra` columns of padding before the longest."""
    width = max(len(row) for row in rows) + extra
    ids, mask = torch.ones(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :], mask[index, width - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def prompts(*lengths):
    """Rows of these lengths."""
    return [random_ids(1, length, seed=length)[0] for length in lengths]


def with_logits(model, inputs, tokens=12, **options):
    """Generated ids, and the logits of every step (steps, rows, vocabulary)."""
    out = model.generate(**inputs, max_new_tokens=tokens, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits), out.past_key_values


def assert_same_generation(actual, expected):
    assert torch.equal(actual[0], expected[0])
    # Float64: the same sums in another order.
    torch.testing.assert_close(actual[1], expected[1], atol=1e-9, rtol=1e-9)


# The state against the whole text at every step.


@causal_variants
def test_the_state_changes_nothing(family, variant):
    model, inputs = wordy_model(family, variant), {"input_ids": random_ids(3, 11)}
    model.generation_config.no_repeat_ngram_size = 1  # monotonous text would prove little
    expected = with_logits(model, inputs, tokens=20, use_cache=False)
    assert expected[2] is None
    whole = with_logits(model, inputs, tokens=20)
    assert_same_generation(whole, expected)
    assert isinstance(whole[2], MemoryCache)
    # The last token has been generated, but not read.
    assert whole[2].tokens.tolist() == [30] * 3
    for size in (1, 4, 11):
        assert_same_generation(with_logits(model, inputs, tokens=20, prefill_chunk_size=size), expected)


@causal_variants
def test_padding_changes_no_row(family, variant):
    model, rows = wordy_model(family, variant), prompts(9, 4, 1, 13)
    singles = [with_logits(model, {"input_ids": row[None]}) for row in rows]
    for extra, options in ((0, {}), (5, {}), (0, {"use_cache": False}), (3, {"prefill_chunk_size": 4})):
        inputs = left_padded(rows, extra)
        sequences, logits, cache = with_logits(model, inputs, **options)
        for index, (ids, single_logits, _) in enumerate(singles):
            width = inputs["input_ids"].shape[1]
            assert_same_generation((sequences[index, width:], logits[:, index]), (ids[0, -12:], single_logits[:, 0]))
        if cache is not None:
            assert cache.tokens.tolist() == [len(row) + 11 for row in rows]


@families
@methods
def test_every_method_with_and_without_the_state(family, method):
    model, inputs = wordy_model(family), {"input_ids": random_ids(2, 7)}
    texts = []
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}):
        if method == "guided" and "prefill_chunk_size" in options:
            continue  # its unconditional half reads the prompt at once
        set_seed(0)
        texts.append(model.generate(**inputs, max_new_tokens=12, **METHODS[method], **options))
        assert torch.equal(texts[-1], texts[0])
    count = METHODS[method].get("num_return_sequences", 1)
    assert texts[0].shape == (2 * count, 19)
    if method != "greedy":
        assert not torch.equal(texts[0][::count], model.generate(**inputs, max_new_tokens=12))


@families
@pytest.mark.parametrize("method", ["beam", "constrained", "beams-returned"])
def test_padding_changes_no_method_without_chance(family, method):
    options = {name: value for name, value in METHODS[method].items() if name != "min_new_tokens"}
    model, rows = wordy_model(family), prompts(8, 3, 1)
    inputs = left_padded(rows, 2)
    batch = model.generate(**inputs, max_new_tokens=10, **options).unflatten(0, (3, -1))
    for row, texts in zip(rows, batch, strict=True):
        single = model.generate(row[None], max_new_tokens=10, **options)
        assert torch.equal(texts[:, -10:], single[:, -10:])


@families
def test_beams_take_their_states_with_them(family):
    # Beam search by hand: the best of all continuations two tokens long, found by trying all.
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
    with pytest.raises(ValueError, match="assisted generation"):
        model.generate(random_ids(1, 5), assistant_model=wordy_model(family), max_new_tokens=4)
    with pytest.raises(ValueError, match="assisted generation"):
        model.generate(random_ids(1, 5), prompt_lookup_num_tokens=2, max_new_tokens=4)


@families
@torch.no_grad()
def test_right_padding_is_warned_of_and_read_right(family, caplog):
    model, rows = wordy_model(family), prompts(8, 3)
    right = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.zeros(2, 8, dtype=torch.long)}
    for index, row in enumerate(rows):
        right["input_ids"][index, : len(row)], right["attention_mask"][index, : len(row)] = row, 1
    model.generate(**right, max_new_tokens=2)
    assert "right-padding" in caplog.text
    # By hand it goes: every row is read at its last token, and its next one follows that.
    cache = MemoryCache(model.config)
    logits = model(**right, past_key_values=cache).logits
    for index, row in enumerate(rows):
        torch.testing.assert_close(logits[index, : len(row)], model(row[None]).logits[0], atol=1e-9, rtol=1e-9)
    new = torch.tensor([[17], [23]])
    stepped = model(new, past_key_values=cache).logits[:, 0]
    for index, row in enumerate(rows):
        whole = model(torch.cat([row, new[index]])[None]).logits[0, -1]
        torch.testing.assert_close(stepped[index], whole, atol=1e-9, rtol=1e-9)


# When it stops.


@families
def test_length_limits(family):
    model, ids = wordy_model(family), random_ids(2, 7)
    long = model.generate(ids, max_new_tokens=30)
    assert torch.equal(model.generate(ids, max_length=20), long[:, :20])
    config = GenerationConfig(max_new_tokens=5, pad_token_id=1)
    assert torch.equal(model.generate(ids, generation_config=config), long[:, :12])
    with pytest.raises(ValueError, match="max_length"):
        model.generate(ids, max_length=7)


@families
def test_beyond_the_positions_of_training(family):
    model, ids = wordy_model(family), random_ids(1, 7)
    assert model.config.max_position_embeddings == 64
    expected = with_logits(model, {"input_ids": ids}, tokens=100, use_cache=False)
    assert_same_generation(with_logits(model, {"input_ids": ids}, tokens=100), expected)
    assert expected[1].isfinite().all()


@families
def test_rows_that_end_are_filled_and_disturb_no_other(family):
    model, rows = wordy_model(family), prompts(9, 4, 6)
    free = model.generate(**left_padded(rows), max_new_tokens=16)[:, 9:]
    ends = [free[0, 3].item(), free[1, 9].item()]
    batch = model.generate(**left_padded(rows), max_new_tokens=16, eos_token_id=ends)[:, 9:]
    for text, full in zip(batch, free, strict=True):
        hits = torch.isin(full, torch.tensor(ends)).nonzero()
        length = hits[0].item() + 1 if len(hits) else 16
        length = min(length, len(text))
        assert torch.equal(text[:length], full[:length])
        assert (text[length:] == 1).all()
    assert (batch[0, 4:] == 1).all()


@families
def test_own_stopping_criteria(family):
    class AfterFour(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 11)

    model, ids = wordy_model(family), random_ids(2, 7)
    stopped = model.generate(ids, max_new_tokens=16, stopping_criteria=StoppingCriteriaList([AfterFour()]))
    assert torch.equal(stopped, model.generate(ids, max_new_tokens=4))


# What is returned.


@causal_variants
def test_everything_that_can_be_returned(family, variant):
    model = wordy_model(family, variant, attn_implementation="eager")
    asked = ("scores", "logits", "hidden_states", "attentions")
    out = model.generate(
        random_ids(2, 7),
        max_new_tokens=4,
        return_dict_in_generate=True,
        **{f"output_{name}": True for name in asked},
    )
    slots = getattr(model.config, model.config.slots_field)
    for step in range(4):
        read = 7 if step == 0 else 1
        assert out.scores[step].shape == out.logits[step].shape == (2, 120)
        assert [states.shape for states in out.hidden_states[step]] == [(2, read, 48)] * 4
        assert [weights.shape for weights in out.attentions[step]] == [(2, 4, read, slots)] * 3
    # Of a whole pass over the text.
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], output_hidden_states=True, output_attentions=True)
    assert torch.equal(out.logits[0].argmax(-1), out.sequences[:, 7])
    for name, dim in (("hidden_states", 1), ("attentions", 2)):
        for layer, expected in enumerate(whole[name]):
            states = torch.cat([step[layer] for step in out[name]], dim=dim)
            torch.testing.assert_close(states, expected, atol=1e-9, rtol=1e-9)


@families
def test_transition_scores(family):
    model = wordy_model(family)
    out = model.generate(
        random_ids(2, 7), max_new_tokens=5, num_beams=3, return_dict_in_generate=True, output_scores=True
    )
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    with torch.no_grad():
        logits = model(out.sequences).logits[:, 6:-1].log_softmax(-1)
    expected = logits.gather(2, out.sequences[:, 7:, None])[..., 0]
    torch.testing.assert_close(scores.double(), expected, atol=1e-4, rtol=1e-4)  # `generate` scores in float32


@families
def test_embeddings_in_place_of_ids(family):
    model, rows = wordy_model(family), prompts(7, 4)
    inputs = left_padded(rows)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    for options in ({}, {"num_beams": 3}):
        expected = model.generate(**inputs, max_new_tokens=8, **options)[:, 7:]
        given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
        assert torch.equal(model.generate(**given, max_new_tokens=8, **options), expected)
        assert torch.equal(model.generate(**inputs, inputs_embeds=embeds, max_new_tokens=8, **options)[:, 7:], expected)


@families
def test_segments_are_continued(family):
    model, ids = wordy_model(family, type_vocab_size=2), random_ids(2, 7)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(2, -1)
    inputs = {"input_ids": ids, "token_type_ids": segments}
    expected = with_logits(model, inputs, use_cache=False)
    assert_same_generation(with_logits(model, inputs), expected)
    assert not torch.equal(expected[1], with_logits(model, {"input_ids": ids})[1])


@families
def test_wrong_arguments_are_refused(family):
    model, ids = wordy_model(family), random_ids(2, 7)
    with pytest.raises(ValueError, match="atention_mask"):
        model.generate(ids, atention_mask=torch.ones_like(ids), max_new_tokens=3)
    with pytest.raises(ValueError):
        model.generate(ids, attention_mask=torch.ones(2, 1, 7, 7), max_new_tokens=3)


# The state in the user's hands.


@causal_variants
def test_going_on_from_a_state(family, variant):
    model, inputs = wordy_model(family, variant), {"input_ids": random_ids(2, 7)}
    expected = with_logits(model, inputs, tokens=20)
    start = with_logits(model, inputs, tokens=8)
    branch = copy.deepcopy(start[2])
    # The whole text is given again, or only what the state has not read: the last token.
    sequences, logits, cache = with_logits(model, {"input_ids": start[0]}, tokens=12, past_key_values=start[2])
    assert cache is start[2]
    assert_same_generation((sequences, logits), (expected[0], expected[1][8:]))
    only = {"input_ids": start[0][:, -1:], "attention_mask": torch.ones(2, 15, dtype=torch.long)}
    sequences, logits, _ = with_logits(model, only, tokens=12, past_key_values=branch)
    assert_same_generation((sequences[:, 1:], logits), (expected[0][:, 15:], expected[1][8:]))


@causal_variants
def test_a_second_turn_of_padded_rows(family, variant):
    model, rows, answers = wordy_model(family, variant), prompts(9, 4), prompts(3, 6)
    first = left_padded(rows)
    sequences, _, cache = with_logits(model, first, tokens=5)
    second = left_padded(answers)
    ids = torch.cat([sequences, second["input_ids"]], dim=1)
    mask = torch.cat([first["attention_mask"], torch.ones(2, 5, dtype=torch.long), second["attention_mask"]], dim=1)
    expected = with_logits(model, {"input_ids": ids, "attention_mask": mask}, use_cache=False)
    forms = {
        "whole": {"input_ids": ids, "attention_mask": mask},
        "new": {"input_ids": ids[:, cache.get_seq_length() :], "attention_mask": mask},
    }
    for inputs in forms.values():
        got, logits, _ = with_logits(model, inputs, past_key_values=copy.deepcopy(cache))
        assert_same_generation((got[:, -12:], logits), (expected[0][:, -12:], expected[1]))
    chunked = with_logits(model, forms["whole"], past_key_values=copy.deepcopy(cache), prefill_chunk_size=4)
    assert_same_generation(chunked, expected)
    for index in range(2):  # and each row alone, without padding
        alone = ids[index][mask[index].bool()][None]
        got, logits, _ = with_logits(model, {"input_ids": alone})
        assert_same_generation((got[0, -12:], logits[:, 0]), (expected[0][index, -12:], expected[1][:, index]))


@families
@torch.no_grad()
def test_what_a_state_has_read_cannot_be_masked(family):
    # A row that ended early has read padding as tokens: its state is no state of the text without them.
    model, ids = wordy_model(family), random_ids(2, 7)
    cache = model(ids, use_cache=True).past_key_values
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 5:7] = 0
    new = {"input_ids": random_ids(2, 3), "attention_mask": mask}
    with refused("attention_mask", 5, 7):
        model(**new, past_key_values=cache)
    for options in ({}, {"cache_implementation": "static"}):
        with refused("attention_mask", 5, 7):
            model.generate(**new, past_key_values=cache, max_new_tokens=3, **options)
    cache = MemoryCache(model.config, compileable=True)
    model(ids, past_key_values=cache)
    with refused("attention_mask", 5, 7):
        model.generate(**new, past_key_values=cache, max_new_tokens=3)
    for state, seen in ((cache, 7), (MemoryCache(model.config), 0)):
        with refused("attention_mask", 12, 3, seen):
            model(random_ids(2, 3), attention_mask=torch.ones(2, 12), past_key_values=state)


@families
def test_a_state_of_ones_own_is_used_and_used_again(family):
    model, ids = wordy_model(family), random_ids(2, 7)
    cache = MemoryCache(model.config)
    text = model.generate(ids, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(text, model.generate(ids, max_new_tokens=6))
    assert cache.get_seq_length() == 12
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    other = random_ids(3, 5, seed=1)
    assert torch.equal(
        model.generate(other, past_key_values=cache, max_new_tokens=6), model.generate(other, max_new_tokens=6)
    )


@families
def test_a_copied_state_branches_the_text(family):
    model, ids = wordy_model(family), random_ids(1, 9)
    cache = MemoryCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for seed in (1, 2):
        branch = torch.cat([ids, random_ids(1, 4, seed=seed)], dim=1)
        text = model.generate(branch, past_key_values=copy.deepcopy(cache), max_new_tokens=8)
        assert torch.equal(text, model.generate(branch, max_new_tokens=8))
    assert cache.get_seq_length() == 9


@families
def test_other_caches_are_refused(family):
    model, ids = wordy_model(family), random_ids(2, 7)
    with refused("past_key_values", "DynamicCache", "MemoryCache"):
        model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=3)
    # Without "hybrid", which transformers itself takes for nothing.
    for name in ("offloaded", "quantized", "sliding_window", "offloaded_static", "dynamic_full"):
        with refused("cache_implementation", name):
            model.generate(ids, cache_implementation=name, max_new_tokens=3)
    with refused(2, 3):
        cache = MemoryCache(model.config)
        model.generate(ids, past_key_values=cache, max_new_tokens=3)
        model.generate(random_ids(3, 12), past_key_values=cache, max_new_tokens=3)
    with refused("num_hidden_layers", 3, 2):
        smaller = wordy_model(family, num_hidden_layers=2)
        smaller.generate(ids, past_key_values=MemoryCache(model.config), max_new_tokens=3)


@causal_variants
def test_the_state_has_the_same_size_after_any_length(family, variant):
    model = wordy_model(family, variant, num_hidden_layers=1).float()
    sizes = {}
    for tokens in (16, 400):
        cache = MemoryCache(model.config)
        model.generate(random_ids(2, 3), past_key_values=cache, max_new_tokens=tokens)
        sizes[tokens] = cache.nbytes
    with torch.no_grad():
        cache = MemoryCache(model.config)
        model(random_ids(2, 4096), past_key_values=cache)
    assert {*sizes.values(), cache.nbytes} == {sizes[16]}
    # What is stored is what is counted: no state is a part of a larger tensor.
    for layer in (*cache.layers, cache.rows):
        for tensor in (*layer.states.values(), *layer.constants.values()):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def bytes_of_all_tensors():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@families
@torch.no_grad()
def test_nothing_grows_over_4096_generated_tokens(family):
    model = wordy_model(family, num_hidden_layers=1, hidden_size=16, intermediate_size=16).float()
    # Step by step, without `generate`, which keeps the whole text.
    cache, sizes = MemoryCache(model.config), {}
    token = model(random_ids(1, 3), past_key_values=cache).logits[:, -1:].argmax(-1)
    for step in range(2, 4097):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        if step in (16, 4096):
            sizes[step] = cache.nbytes, bytes_of_all_tensors()
    assert cache.get_seq_length() == 4098
    assert sizes[16] == sizes[4096]


# Types and devices.


@causal_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_sums_in_float32(family, variant, dtype):
    model = wordy_model(family, variant).to(dtype)
    sequences, logits, cache = with_logits(model, left_padded(prompts(9, 4)))
    assert logits.isfinite().all()
    for layer in cache.layers:
        for name, tensor in layer.states.items():
            # A queue and a convolution keep token states, not sums.
            sums = variant not in ROWS[family].queues and name != "convolution"
            expected = torch.float32 if sums else dtype
            assert tensor.dtype == expected, name
    # The same text read at once, up to roundings.
    mask = torch.cat([left_padded(prompts(9, 4))["attention_mask"], torch.ones(2, 12, dtype=torch.long)], dim=1)
    with torch.no_grad():
        whole = model(sequences, attention_mask=mask).logits[:, 8:-1].transpose(0, 1).float()
    error = (logits.float() - whole).square().mean().sqrt() / whole.square().mean().sqrt()
    assert error < (0.02 if dtype == torch.bfloat16 else 0.004)


@families
def test_autocast(family):
    model = wordy_model(family).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sequences, logits, cache = with_logits(model, {"input_ids": random_ids(2, 7)})
    assert logits.isfinite().all()
    assert {state.dtype for state in cache.layers[0].states.values()} == {torch.float32}
    with torch.no_grad():
        whole = model(sequences).logits[:, 6:-1].transpose(0, 1)
    assert (logits.float() - whole).square().mean().sqrt() / whole.square().mean().sqrt() < 0.03


@families
def test_loaded_in_other_ways(family, tmp_path):
    model, ids = wordy_model(family).float(), random_ids(2, 7)
    model.save_pretrained(tmp_path)
    expected = model.generate(ids, max_new_tokens=8)
    for options in ({"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {"dtype": torch.float32}):
        loaded = type(model).from_pretrained(tmp_path, **options)
        assert loaded.generation_config.eos_token_id is None
        assert torch.equal(loaded.generate(ids, max_new_tokens=8), expected)
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    empty.eval().generation_config.eos_token_id = None
    assert torch.equal(empty.generate(ids, max_new_tokens=8), expected)


@families
def test_in_training_mode_and_with_gradients(family):
    # `generate` needs no gradient and leaves the mode alone; a state made with gradients can be used without.
    model, ids = wordy_model(family), random_ids(2, 7)
    expected = model.generate(ids, max_new_tokens=6)
    model.train()
    assert torch.equal(model.generate(ids, max_new_tokens=6), expected)  # without dropout
    assert model.training
    cache = MemoryCache(model.config)
    model(ids, past_key_values=cache)
    assert torch.equal(model.eval().generate(expected, past_key_values=cache, max_new_tokens=1)[:, :-1], expected)
