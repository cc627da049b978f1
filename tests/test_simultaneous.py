"""Simultaneous translation: policies, streams of tokens and of text, `generate(policy=...)`, latencies, training."""

import copy
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
import train_translation
import translate_while_reading
from helpers import FAMILIES, padded_batch, random_ids, refused, tiny_seq2seq_model
from safetensors.torch import load_file, save_file
from tiny_training import start
from tiny_translation import arguments, write_parallel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast
from translation.latency import (
    average_lagging,
    differentiable_average_lagging,
    length_adaptive_average_lagging,
    mean_latencies,
)
from translation.pairs import EncodedPairs, Order, updates

from luna_hf import MemoryCache
from luna_hf.scripting import read_json
from luna_hf.simultaneous import (
    Policy,
    ReadAll,
    SimultaneousTranslator,
    TranslationStream,
    WaitK,
    Words,
    finished_words,
)

families = pytest.mark.parametrize("family", list(FAMILIES))
LENGTHS = (9, 14, 4)
ENDS = [3, 5, 7, 9, 11, 13]


class Pairwise(Policy):
    """A user's policy: two tokens for each one."""

    def needed(self, written):
        return 2 * written + 2


class Constant(Policy):
    """A wrong policy: it returns `found` of what has been written."""

    def __init__(self, found):
        self.needed = found


@torch.no_grad()
def make(family, ends=ENDS, **fields):
    """A model whose translations are varied, and depend on what has been read of the source."""
    model = tiny_seq2seq_model(family, source_is_causal=True, tie_word_embeddings=False, **fields).double()
    for name, weight in model.named_parameters():
        if "embeddings" in name and weight.ndim == 2:
            weight.normal_(std=2.0 if "position" in name else 1.0)
        elif weight.ndim == 2:
            weight.normal_(std=1.6 / weight.shape[1] ** 0.5)
        elif "bias" in name:
            weight.zero_()
    model.generation_config.eos_token_id = ends
    return model


# ---- policies ----


def test_policies():
    lengths = torch.tensor([3, 8])
    assert WaitK(2).visible(lengths, 5).tolist() == [[2, 3, 3, 3, 3], [2, 3, 4, 5, 6]]
    assert ReadAll().visible(lengths, 2).tolist() == [[3, 3], [8, 8]]
    assert Pairwise().visible(lengths, 3).tolist() == [[2, 3, 3], [2, 4, 6]]
    assert WaitK(torch.tensor(3).numpy()[()]).visible(lengths, 1).tolist() == [[3], [3]]
    for k in (0, 2.5):
        with refused(f"`k` is {k}"):
            WaitK(k)


@torch.no_grad()
def test_wrong_policies_are_refused_by_streams_and_by_generate():
    model, ids = make("abc_memory", position_embedding_type="sinusoidal"), random_ids(1, 8)
    wrong = {
        "round them": lambda written: 1.5 * written + 1,
        "full_like": lambda _: 3,
        "shape": lambda _: torch.tensor([3]),
        "may not fall": lambda written: 9 - written,
    }
    for named, found in wrong.items():
        for use in (TranslationStream, lambda model, policy: model.generate(ids, policy=policy, max_new_tokens=3)):
            with pytest.raises((TypeError, ValueError), match=named):
                use(model, Constant(found))
    with pytest.raises(TypeError, match="3 is no policy"):
        TranslationStream(model, 3)
    stream = TranslationStream(model, Constant(lambda written: torch.full_like(written, 3)), max_new_tokens=5)
    stream.read(ids)
    with refused("must grow"):
        stream.write()


# ---- streams of tokens ----


@families
@pytest.mark.parametrize("policy", [WaitK(1), WaitK(3), Pairwise(), ReadAll()], ids=["wait-1", "wait-3", "own", "all"])
@torch.no_grad()
def test_a_stream_writes_what_generate_does(family, policy):
    """Three streams at once; and no translation ends before its source."""
    model, batch = make(family), padded_batch(list(LENGTHS))
    made = model.generate(**batch, policy=policy, max_new_tokens=14, num_beams=1)[:, 1:]
    others = model.generate(**batch, policy=WaitK(2), max_new_tokens=14, num_beams=1)[:, 1:]
    assert not torch.equal(made, others) and len(made.unique()) > 1
    stream, parts = TranslationStream(model, policy, 3, max_new_tokens=20), []
    for place in range(max(LENGTHS)):
        column = slice(place, place + 1)
        stream.read(batch["input_ids"][:, column], batch["attention_mask"][:, column])
        stream.end(torch.tensor(LENGTHS) == place + 1)
        parts.append(stream.write())
    written = torch.cat(parts, 1)
    for row, length in enumerate(LENGTHS):
        own = [token for token in written[row].tolist() if token != model.config.pad_token_id]
        until = next((place for place, token in enumerate(made[row].tolist()) if token in ENDS), 14)
        assert own[:until] == made[row, :until].tolist()
        ends_early = (made[row] == torch.tensor(ENDS)[:, None]).any(0).nonzero().flatten()[:1].tolist()
        shown = policy.visible(torch.tensor([length]), 14)[0]
        assert all(shown[place] == length for place in ends_early)
    assert stream.done.all() and stream.ready().sum() == 0


@families
@torch.no_grad()
def test_beams_follow_a_policy(family):
    """Reading all first equals the ordinary search; rows do not depend on their batch."""
    model, batch = make(family, [3]), padded_batch(list(LENGTHS))
    options = {"num_beams": 3, "max_new_tokens": 8}
    plain = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, policy=ReadAll(), **options), plain)
    made = model.generate(**batch, policy=WaitK(2), **options)
    assert not torch.equal(made, plain)
    for row, length in enumerate(LENGTHS):
        alone = model.generate(batch["input_ids"][row : row + 1, :length], policy=WaitK(2), **options)[0]
        assert made[row, : len(alone)].tolist() == alone.tolist()


@families
@torch.no_grad()
def test_a_saved_stream_goes_on(family, tmp_path):
    model, ids = make(family), random_ids(2, 9)
    stream = TranslationStream(model, WaitK(2), 2, max_new_tokens=9)
    stream.read(ids[:, :5])
    stream.write()
    kept, made = stream.state_dict(), []
    save_file(kept, tmp_path / "state.safetensors")
    for one in (stream, *(TranslationStream(model, WaitK(2), 2, max_new_tokens=9) for _ in range(2))):
        if made:  # from memory, which the first stream left alone, and from the file
            one.load_state_dict(kept if len(made) == 1 else load_file(tmp_path / "state.safetensors"))
        one.read(ids[:, 5:])
        one.end()
        made.append(one.write())
    loaded = one
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert loaded.cache.nbytes == stream.cache.nbytes
    with refused("no state of a stream"):
        loaded.load_state_dict(stream.cache.state_dict())
    with refused("no tensor"):
        MemoryCache(model.config).load_state_dict({"layers.9.key": torch.zeros(1)})
    whole = MemoryCache(tiny_seq2seq_model(family).config)
    state = stream.cache.state_dict()
    with refused("another model"):
        whole.load_state_dict(state)
    with refused("not all of them"):
        MemoryCache(model.config).load_state_dict({name: state[name] for name in list(state)[1:]})
    with refused("causal source"):  # a state of an earlier version
        whole.load_state_dict({name: tensor for name, tensor in state.items() if name != "made_for"})


@families
@torch.no_grad()
def test_a_stream_after_a_failed_call(family, monkeypatch):
    """Nothing is read or written twice, and no token is lost."""
    model, ids = make(family, None), random_ids(1, 9)
    decoder = model.get_decoder().encoder.layer[1]
    for part, name in ((decoder, "write_source"), (model.get_encoder().encoder.layer[1], "forward")):
        stream = TranslationStream(model, WaitK(2))
        stream.read(ids[:, :4])
        with monkeypatch.context() as patch:
            patch.setattr(part, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.read(ids[:, 4:])
        for call in (stream.write, lambda stream=stream: stream.read(ids[:, 4:])):
            with refused("Create another state"):
                call()
    stream = TranslationStream(model, WaitK(2))
    stream.read(ids)
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.write()
    for call in (stream.write, stream.state_dict):
        with refused("`write` has failed"):
            call()
    policy = WaitK(2)
    stream, expected = TranslationStream(model, policy), TranslationStream(model, policy)
    for one in (stream, expected):
        one.read(ids)
    with monkeypatch.context() as patch:
        patch.setattr(WaitK, "needed", lambda self, written: interrupted() if (written == 3).any() else written + 2)
        with pytest.raises(KeyboardInterrupt):
            stream.write()
    with refused("no state to save"):  # which would lack what has been written
        stream.state_dict()
    assert torch.equal(stream.write(), expected.write())


def interrupted(*args):
    raise KeyboardInterrupt


@torch.no_grad()
def test_an_endless_source_keeps_the_state_and_stays_finite():
    model = tiny_seq2seq_model("leapformer", source_is_causal=True, position_embedding_type="sinusoidal")
    stream, sizes = TranslationStream(model, WaitK(3)), set()
    for number in range(12):
        stream.read(random_ids(1, 500, seed=number))
        stream.write()
        sizes.add(stream.cache.nbytes)
    assert len(sizes) == 1 and stream.written.item() == 5998
    assert all(state.isfinite().all() for layer in stream.cache.layers for state in layer.states.values())


def test_streams_refuse_what_cannot_be():
    with refused("source_is_causal"):
        TranslationStream(tiny_seq2seq_model("luna"), WaitK(2))
    with refused("training mode"):
        TranslationStream(make("luna").train(), WaitK(2))
    for field in ({"forced_bos_token_id": 5}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [4]}, {"min_length": 3}):
        model = make("luna")
        model.generation_config.update(**field)
        with refused("generation_config"):
            TranslationStream(model, WaitK(2))
    stream = TranslationStream(make("luna"), WaitK(2))
    stream.read(random_ids(1, 3))
    stream.end()
    with refused("has ended"):
        stream.read(random_ids(1, 1))
    cache = MemoryCache(tiny_seq2seq_model("luna").config)
    whole = tiny_seq2seq_model("luna")
    whole.base_model.write_source(cache, random_ids(1, 3))
    with refused("cannot go on"):
        whole.base_model.write_source(cache, random_ids(1, 3))


@torch.no_grad()
def test_generate_goes_on_only_with_the_source_that_was_read():
    model, ids = make("abc_memory", [3]), random_ids(1, 7)
    cache = MemoryCache(model.config)
    model.base_model.write_source(cache, ids)
    made = model.generate(ids, cache=copy.deepcopy(cache), max_new_tokens=5)
    assert torch.equal(made, model.generate(ids, max_new_tokens=5))
    for other in (ids.roll(1), ids[:, :5]):
        with refused("another source"):
            model.generate(other, cache=copy.deepcopy(cache), max_new_tokens=5)
    with refused("Leave `cache` out"):
        model.generate(ids, cache=cache, policy=WaitK(2))
    states = model.base_model.encoder(ids)
    for source in ({"inputs_embeds": model.get_input_embeddings()(ids)}, {"encoder_outputs": states}):
        with refused("`input_ids`"):
            model.generate(**source, cache=copy.deepcopy(cache), max_new_tokens=5)
    partly = model.generate(ids, policy=WaitK(2), max_new_tokens=3, return_dict_in_generate=True)
    with refused("only a part"):
        model.generate(ids, cache=partly.cache, decoder_input_ids=partly.sequences, max_new_tokens=5)
    made = model.generate(ids, policy=WaitK(2), max_new_tokens=9, return_dict_in_generate=True)
    whole = tiny_seq2seq_model("abc_memory")
    written = MemoryCache(whole.config)
    whole.base_model.write_source(written, ids)
    for one, own in ((model, made.cache), (whole, written)):
        with refused("another source"):
            one.generate(ids.roll(1), cache=own, max_new_tokens=5)


@families
@torch.no_grad()
def test_a_policy_counts_the_tokens_of_prompts(family):
    """Not their padding; also in chunks, which are not used."""
    model, ids = make(family, [3]), random_ids(2, 12)
    prompts = torch.tensor([[2, 5, 6, 7, 8], [1, 1, 1, 2, 9]])
    options = {"policy": WaitK(1), "num_beams": 1, "max_new_tokens": 5}
    given = {"decoder_input_ids": prompts, "decoder_attention_mask": (prompts != 1).long()}
    made = model.generate(ids, **given, **options)
    assert torch.equal(model.generate(ids, **given, **options, prefill_chunk_size=2), made)
    mask = torch.ones_like(ids)
    for kind in (torch.bool, torch.float):
        assert torch.equal(model.generate(ids, attention_mask=mask.to(kind), **given, **options), made)
    for row, first in enumerate((0, 3)):
        alone = model.generate(ids[row : row + 1], decoder_input_ids=prompts[row : row + 1, first:], **options)[0]
        assert made[row, first : first + len(alone)].tolist() == alone.tolist()


@torch.no_grad()
def test_a_stream_starts_as_generate_does():
    model, ids = make("luna", None), random_ids(1, 5)
    for first in (2, 40):
        model.generation_config.decoder_start_token_id = first
        stream, parts = TranslationStream(model, WaitK(2)), []
        for token in ids.split(1, dim=1):
            stream.read(token)
            parts.append(stream.write())
        written = torch.cat(parts, 1)
        made = model.generate(ids, policy=WaitK(2), max_new_tokens=9, num_beams=1)
        assert made[0, 0] == first and torch.equal(made[:, 1 : 1 + written.shape[1]], written)


@torch.no_grad()
def test_a_policy_with_other_inputs_and_a_forced_end():
    model, ids = make("luna"), random_ids(1, 12)
    options = {"policy": WaitK(2), "num_beams": 1, "max_new_tokens": 5}
    made = model.generate(ids, **options)
    for source in (
        {"inputs_embeds": model.get_input_embeddings()(ids)},
        {"encoder_outputs": model.base_model.encoder(ids)},
    ):
        assert torch.equal(model.generate(**source, **options), made)
    forced = model.generate(ids, **options, forced_eos_token_id=3)
    assert forced[0, -1] == 3 and torch.equal(forced[:, :-1], made[:, :-1])


@torch.no_grad()
def test_rows_without_tokens():
    stream = TranslationStream(make("luna"), WaitK(2), 3, max_new_tokens=4)
    stream.read(torch.empty(3, 0, dtype=torch.long))
    stream.read(random_ids(3, 4), torch.tensor([[1] * 4, [0] * 4, [1] * 4]))
    for wrong in (torch.tensor([0, 2]), torch.tensor([1, 1, 0]), torch.tensor(True)):
        with refused("boolean mask"):
            stream.end(wrong)
    stream.end()
    stream.write()
    assert stream.done.all() and stream.written[1] == 0
    with refused("`max_new_tokens` is 0"):
        TranslationStream(make("luna"), WaitK(2), max_new_tokens=0)


# ---- streams of text ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny wait-k translation run."""
    folder = tmp_path_factory.mktemp("run")
    data = write_parallel(folder / "data")
    words = arguments(data, folder / "out", wait_k="[2, 0]", model__source_is_causal=True)
    assert start(train_translation, words) == 0
    return data, folder / "out"


def test_text_in_pieces_of_any_size(run):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(run[1]), AutoTokenizer.from_pretrained(run[1])
    translator = SimultaneousTranslator(model, tokenizer, WaitK(2))
    text = "two red dogs see one cat  and run"
    ids = tokenizer(text, return_tensors="pt").input_ids
    made = model.generate(ids, policy=WaitK(2), num_beams=1, max_new_tokens=len(ids[0]) + 18)
    expected = tokenizer.decode(made[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for size in (1, 3, 100):
        chunks = [text[place : place + size] for place in range(0, len(text), size)]
        pieces = list(translator.stream(chunks, max_new_tokens=20))
        assert "".join(pieces) == expected
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert list(translator.stream([tokens[:3], tokens[3:]], max_new_tokens=20)) == pieces
    assert list(translator.stream([text[:7], tokenizer(text[7:], add_special_tokens=False).input_ids], 20)) == pieces
    assert list(translator.stream([torch.tensor(tokens)], max_new_tokens=20)) == pieces
    whole = tokenizer(text).input_ids
    for wrong, error in ((b"two dogs", TypeError), (whole, ValueError), (torch.tensor(whole), ValueError)):
        with pytest.raises(error, match="chunk"):
            list(translator.stream([wrong]))
    for nothing in ([], ["", " "]):
        with refused("empty"):
            list(translator.stream(nothing))
    first = next(iter(translator.stream(endless())))
    assert first.strip()


def test_words_are_finished_by_the_space_behind_them():
    for text in ("two  dogs\n run", " two", "two ", " \t", "", "a b" * 9):
        whole = "".join(re.findall(r"\s*\S+(?=\s)", text))
        for size in (1, 2, 50):
            done, rest = "", ""
            for place in range(0, len(text), size):
                new, rest = finished_words(rest, text[place : place + size])
                done += new
            assert (done, done + rest) == (whole, text)
    start, rest = time.process_time(), ""
    for letter in "x" * 20_000:
        rest = finished_words(rest, letter)[1]
    assert time.process_time() - start < 2


def test_the_example_prints_words_as_they_arrive(run, capsys):
    assert translate_while_reading.main([str(run[1]), "--wait", "2", "--text", "two red dogs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["two", "red", "dogs"]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(run[1]), AutoTokenizer.from_pretrained(run[1])
    pieces = SimultaneousTranslator(model, tokenizer, WaitK(2)).stream(["two red dogs"])
    assert "".join(line[16:] for line in lines) == "".join(pieces)
    assert translate_while_reading.main([str(run[0])]) == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "wordpiece"])
def test_words_are_yielded_as_soon_as_they_end(kind, run):
    """A word has ended when another one begins."""
    tokenizer = AutoTokenizer.from_pretrained(run[1]) if kind == "byte-level" else word_tokenizer(kind)
    ids = tokenizer("zwei rot hund", add_special_tokens=False).input_ids
    written = iter(ids)
    stream = SimpleNamespace(read=lambda _: None, write=lambda: torch.tensor([[next(written)]]))
    translator, found = SimultaneousTranslator(SimpleNamespace(device="cpu"), tokenizer, WaitK(1)), []
    words = Words(translator.decode)
    for number in range(len(ids)):
        found += [(number, piece) for piece in translator.translate(stream, [0], words)]
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in ("zwei", "zwei rot")]
    assert found == [*zip(lengths, ("zwei", " rot"), strict=True)] and words.text() == " hund"


def word_tokenizer(kind):
    """A tokenizer of a few words and their ends, whose decoder leaves out the space before a text."""
    space, more = ("\u2581", "") if kind == "metaspace" else ("", "##")
    pieces = [space + "zw", more + "ei", space + "rot", space + "hu", more + "nd"]
    vocabulary = {piece: place for place, piece in enumerate(["[UNK]", *pieces])}
    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    else:
        backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], 0))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def endless():
    while True:
        yield "two dogs "


def test_special_tokens_of_both_ends_are_read():
    """Of a tokenizer that opens a text, too."""
    backend = Tokenizer(models.BPE(vocab={"[C]": 0, "[S]": 1, "a": 2, "b": 3}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[C]", sep_token="[S]")
    assert SimultaneousTranslator(None, tokenizer, WaitK(1)).special_tokens() == ([], [])
    backend.post_processor = processors.TemplateProcessing(single="[C] $A [S]", special_tokens=[("[C]", 0), ("[S]", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[C]", sep_token="[S]")
    assert SimultaneousTranslator(None, tokenizer, WaitK(1)).special_tokens() == ([0], [1])


# ---- latency ----


def test_latencies_of_the_papers():
    """Wait-k lags by k where source and target are equally long (Ma et al. 2019; Cherry and Foster 2019)."""
    for k in (1, 3, 5):
        delays = WaitK(k).visible(torch.tensor([12]), 12)[0].tolist()
        assert average_lagging(delays, 12) == pytest.approx(k)
        assert differentiable_average_lagging(delays, 12) == pytest.approx(k)
        assert length_adaptive_average_lagging(delays, 12, 12) == pytest.approx(k)
    whole = [6] * 6  # the source is read first: AL is its length, and DAL is, too
    assert average_lagging(whole, 6) == 6 and differentiable_average_lagging(whole, 6) == pytest.approx(6)


def test_latencies_by_hand():
    """Three source tokens, six target tokens: a rate of two."""
    delays = [1, 1, 2, 2, 3, 3]
    assert average_lagging(delays, 3) == pytest.approx((1 + 0.5 + 1 + 0.5 + 1) / 5)
    # With a reference of twelve tokens, an ideal translator would write four for each source token.
    assert length_adaptive_average_lagging(delays, 3, 12) == pytest.approx((1 + 0.75 + 1.5 + 1.25 + 2) / 5)
    assert differentiable_average_lagging(delays, 3) == pytest.approx(1.0)
    assert mean_latencies(WaitK(1), [4, 4], [4, 4], [4, 4]) == {
        "average_lagging": 1.0,
        "length_adaptive_average_lagging": 1.0,
        "differentiable_average_lagging": 1.0,
    }


def test_latencies_by_the_papers_formulas():
    """The equations, term by term: five source tokens, a translation of four by wait-2, a reference of three."""
    g, x, y, reference = [2, 3, 4, 5], 5, 4, 3
    assert WaitK(2).visible(torch.tensor([x]), y)[0].tolist() == g
    tau = min(t for t in range(1, y + 1) if g[t - 1] == x)

    def lag(length):
        return sum(g[t - 1] - (t - 1) / (length / x) for t in range(1, tau + 1)) / tau

    assert average_lagging(g, x) == pytest.approx(lag(y)) == pytest.approx(1.625)
    assert average_lagging(g, x, reference) == pytest.approx(lag(reference)) == pytest.approx(1.0)
    # Too many tokens lower the lag by the reference's length, and too few that by their own; LAAL is the larger.
    assert length_adaptive_average_lagging(g, x, reference) == pytest.approx(1.625)
    assert length_adaptive_average_lagging(g, x, 5) == pytest.approx(lag(5)) == pytest.approx(2.0)


@pytest.mark.parametrize("latency", [average_lagging, differentiable_average_lagging])
@pytest.mark.parametrize(("delays", "source"), [([], 3), ([1], 0)])
def test_latencies_of_nothing_are_refused(latency, delays, source):
    with refused("at least 1 target token"):
        latency(delays, source)


# ---- training ----


def test_each_batch_draws_its_k_and_a_resumed_run_the_same():
    rows = [torch.arange(4, 4 + length).numpy() for length in (3, 5, 2, 4, 6, 3, 2, 5)]
    encoded, order = EncodedPairs(rows, rows, 0), Order(12, 1, 1, 0, 0)
    whole = updates(encoded, order, 1, 2, waits=[1, 0])
    first = [next(whole)[0]["visible_source"] for _ in range(12)]
    later = updates(encoded, order, 1, 2, first_update=7, waits=[1, 0])
    assert all(torch.equal(next(later)[0]["visible_source"], found) for found in first[7:])
    starts = {bool((found[:, 0] == 1).all()) for found in first}
    assert starts == {True, False}


def test_a_recipe_trains_and_scores_it(run):
    figures = json.loads((run[1] / "metrics.json").read_text())
    scores = figures["test"]["simultaneous"]
    assert scores.keys() == {"2"} and scores["2"]["average_lagging"] > 0 and "bleu" in scores["2"]
    assert json.loads((run[1] / "config.json").read_text())["source_is_causal"]
    card, lagging = (run[1] / "README.md").read_text(), scores["2"]["average_lagging"]
    assert "| k | BLEU | chrF | AL | LAAL | DAL |" in card and f"| {lagging:.2f} |" in card
    assert "validation split, with k = 2 (the first value of `wait_k`), is" in card


def test_the_card_shows_how_to_translate_while_reading(run, monkeypatch, capsys):
    *_, example = re.findall(r"```python\n(.*?)```", (run[1] / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(run[1].parent)
    exec(re.sub(r'(?<=from_pretrained\()".*?"', '"out"', example), {})
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    assert capsys.readouterr().out == "".join(SimultaneousTranslator(model, tokenizer, WaitK(2)).stream(["A text."]))


def test_long_sources_are_cut_at_every_k(tmp_path):
    """As in training: the model takes no more tokens."""
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.en").write_text("one two red dog runs cat sees\n" * 8)
        (tmp_path / f"{split}.de").write_text("eins\n" * 8)
    limits = {"max_length": 8, "truncate_source": True, "model__max_position_embeddings": 8}
    limits["model__position_embedding_type"] = "learned"
    options = {**limits, "vocab_size": 262, "max_steps": 2, "eval_steps": 2, "wait_k": "[5]"}
    words = arguments(tmp_path, tmp_path / "out", **options, model__source_is_causal=True)
    assert start(train_translation, words) == 0
    assert 0 < read_json(tmp_path / "out" / "metrics.json")["test"]["simultaneous"]["5"]["average_lagging"] <= 8


def test_an_ordinary_model_is_continued(run, tmp_path, capsys):
    """Its weights are the start: a learning rate of almost zero keeps them."""
    data, _ = run
    assert start(train_translation, arguments(data, tmp_path / "plain")) == 0
    continued = {"initial_weights": tmp_path / "plain", "wait_k": "[3]", "learning_rate": 1e-12, "max_steps": 2}
    words = arguments(data, tmp_path / "out", **continued, average_checkpoints=1, model__source_is_causal=True)
    assert start(train_translation, words) == 0
    plain, model = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("plain", "out"))
    kept = plain.state_dict()
    own = {name: value for name, value in model.state_dict().items() if name in kept}
    assert all(torch.allclose(value, kept[name], atol=1e-6) for name, value in own.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "were new" in card and "trained\nfrom the weights of" in card


def test_a_recipe_that_does_not_fit(run, tmp_path, capsys):
    assert start(train_translation, arguments(run[0], tmp_path, wait_k="[2]")) == 2
    assert "source_is_causal" in capsys.readouterr().err
    words = arguments(run[0], tmp_path, wait_k="[-1]", model__source_is_causal=True)
    assert start(train_translation, words) == 2
