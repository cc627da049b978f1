"""From documents to masked rows: tokenizer, token stores, blocks, mixtures, masks, streams, and the baseline."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, tiny_tokenizer
from tiny_data import TEXTS, UserError, data, masking, process, rows, settings, streaming, token_store, write_texts
from tiny_data import corpus as corpora
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

WORDS = ["the", "token", "reads", "every", "packed", "sequence", "of", "fixed", "length", "in", "its", "layer"]


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(TEXTS, 300, max_length=64)


def prepared(folder, tokenizer, index=0, processes=1, **changes):
    recipe = settings(folder, **changes)
    return data.prepare_text(recipe, corpora.open_corpus(recipe), tokenizer, process(index, processes))


def store_of(tokens, vocabulary=100):
    return token_store.TokenStore(np.array(tokens, np.uint16), np.bincount(tokens, minlength=vocabulary), 1)


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in ("input_ids", "attention_mask", "labels"))


# ---- tokenizer ----


def test_tokenizer_has_robertas_layout_and_survives_saving(tmp_path):
    texts = [" ".join(random.Random(0).choices(WORDS, k=500))]
    trained = data.train_tokenizer(texts, 300, max_length=40)
    assert trained.get_vocab() == data.train_tokenizer(texts, 300, max_length=40).get_vocab()
    trained.save_pretrained(tmp_path)
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 299]) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        assert len(tokenizer) == 300 and tokenizer.model_max_length == 40
        assert tokenizer.convert_ids_to_tokens(tokenizer("token<mask> of").input_ids) == [
            *["<s>", *tokenizer.tokenize("token"), "<mask>", *tokenizer.tokenize(" of"), "</s>"]
        ]
        # As RoBERTa's: the mask swallows the space before it, so that it stands for a word with its space.
        assert tokenizer("of <mask> of").input_ids == tokenizer("of<mask> of").input_ids
        for text in ("the packed sequence", "any bytes: é 語 \n\t x"):
            assert tokenizer.decode(data.encode(tokenizer, [text])[0]) == text


def test_special_tokens_in_the_text_are_text_and_nothing_is_cut():
    tokenizer = tiny_tokenizer()
    ids = data.encode(tokenizer, ["the <s> tag and <mask>"])[0]
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == "the <s> tag and <mask>"
    tokenizer("short", truncation=True, max_length=4, padding="max_length")  # a setting that stays
    long = "every token reads the packed sequence in turn " * 50
    assert tokenizer.decode(data.encode(tokenizer, [long, "short"])[0]) == long


# ---- token stores ----


def test_store_holds_every_token_of_every_document(tmp_path, tokenizer):
    texts = [*TEXTS, "", "  ", "é 語"]
    text = prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.parquet", texts)), held_out_fraction=0.3)
    corpus = corpora.open_corpus(settings(tmp_path, data=str(tmp_path / "a.parquet"), held_out_fraction=0.3))
    (folder,) = (tmp_path / "cache").iterdir()
    for name in ("training", "held_out"):
        store = token_store.open_store(folder, name)
        documents = [document for document in texts if document.strip() and corpus.side_of(document) == name]
        expected = data.encode(tokenizer, documents)
        joined = [token for ids in expected for token in [2, *ids]][1:]
        assert store.tokens.tolist() == joined and store.tokens.dtype == np.uint16
        assert store.documents == len(documents) > 3
        counts = Counter(token for ids in expected for token in ids)
        assert store.counts.tolist() == [counts[token] for token in range(len(tokenizer))]
        assert text.facts[f"{name}_documents"] == len(documents)
        assert text.facts[f"{name}_tokens"] == sum(map(len, expected))


def test_store_is_as_wide_as_the_vocabulary_needs(tmp_path):
    for vocabulary, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        writer = token_store.StoreWriter(tmp_path, "training", vocabulary, last=2)
        writer.add([vocabulary - 1, 5])
        writer.add([])
        writer.add([7])
        writer.close()
        store = token_store.open_store(tmp_path, "training")
        assert store.tokens.tolist() == [vocabulary - 1, 5, 2, 7] and store.tokens.dtype == dtype
        assert store.documents == 2


def test_tokens_are_kept_until_text_tokenizer_or_split_change(tmp_path, tokenizer, monkeypatch):
    file = write_texts(tmp_path / "a.txt")
    first = prepared(tmp_path, tokenizer, data=str(file))
    calls = []
    encode = token_store.encode
    monkeypatch.setattr(token_store, "encode", lambda *args: calls.append(1) or encode(*args))

    def builds(tokenizer=tokenizer, **changes):
        calls.clear()
        prepared(tmp_path, tokenizer, data=str(file), **changes)
        return bool(calls)

    assert not builds() and not builds(block_size=32, mask_probability=0.2, eval_blocks=3)
    tokenizer("a b", truncation=True, max_length=8, padding="max_length")  # changes how it pads, not what it cuts
    assert not builds()
    again = prepared(tmp_path, tokenizer, data=str(file))
    assert again.facts == first.facts and again.unigram == first.unigram
    assert builds(held_out_fraction=0.3) and builds(seed=5)
    assert builds(tokenizer=data.train_tokenizer(TEXTS, 290, max_length=64))
    write_texts(file, TEXTS[:-1])
    assert builds() and not builds()


def test_a_build_that_fails_or_is_killed_leaves_nothing_that_is_used(tmp_path, tokenizer, monkeypatch):
    file = write_texts(tmp_path / "a.txt")
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, tokenizer, data=str(file))
    assert not list(cache.iterdir())

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    killed = f"""
import os, sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
from pathlib import Path
from tiny_data import corpus, data, process, settings, token_store
from transformers import AutoTokenizer
token_store.StoreWriter.close = lambda self: os.kill(os.getpid(), {signal.SIGKILL})
recipe = settings(Path({str(tmp_path)!r}), data={str(file)!r})
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r})
data.prepare_text(recipe, corpus.open_corpus(recipe), tokenizer, process())
"""
    done = subprocess.run([sys.executable, "-c", killed], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = cache.iterdir()
    assert left.name.endswith(".building")
    running = left.with_name(left.name.replace(left.name.split(".")[-2], str(os.getppid())))
    running.mkdir()
    text = prepared(tmp_path, tokenizer, data=str(file))
    assert text.facts["training_documents"] + text.facts["held_out_documents"] == len(TEXTS)
    assert not left.exists() and running.exists()  # the folder of a process that still runs stays


def test_a_folder_that_another_process_has_built_meanwhile_is_used(tmp_path, tokenizer):
    recipe = settings(tmp_path, data=str(write_texts(tmp_path / "a.txt")))
    corpus = corpora.open_corpus(recipe)
    folder, other = tmp_path / "cache" / "x", tmp_path / "other"
    limits = {"training": None}
    token_store.build_stores(other, corpus.sources[0], lambda _: "training", limits, tokenizer)

    def slow(document):
        if not folder.exists():
            other.replace(folder)
            (folder / "marker").touch()
        return "training"

    token_store.build_stores(folder, corpus.sources[0], slow, limits, tokenizer)
    assert (folder / "marker").exists() and list((tmp_path / "cache").iterdir()) == [folder]


def test_documents_are_tokenized_in_batches_of_bounded_size(tmp_path, tokenizer, monkeypatch):
    sizes = []
    encode = token_store.encode
    monkeypatch.setattr(token_store, "encode", lambda t, texts: sizes.append(sum(map(len, texts))) or encode(t, texts))
    monkeypatch.setattr(token_store, "_BATCH_CHARACTERS", 200)
    prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    assert sum(sizes) == sum(map(len, TEXTS)) and max(sizes) < 200 + max(map(len, TEXTS))


def test_text_that_breaks_later_is_a_mistake_with_a_name(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "_LOOK_CHARACTERS", 1)
    (tmp_path / "a.txt").write_bytes(b"one\n\n\xff")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8"):
        prepared(tmp_path, tokenizer, data=str(tmp_path / "a.txt"))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 3 + "{")
    with pytest.raises(UserError, match=r"a\.jsonl .*cannot be read"):
        prepared(tmp_path, tokenizer, data=str(tmp_path / "a.jsonl"))


def test_cache_folder_that_cannot_be_written_is_named(tmp_path, tokenizer):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"`cache_dir` .*file cannot be written"):
        prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")), cache_dir=str(tmp_path / "file"))


# ---- blocks and their order ----


@pytest.mark.parametrize("block_size", [3, 7, 32])
def test_every_token_is_in_exactly_one_block(block_size):
    tokens = [random.Random(block_size).randrange(4, 99) for _ in range(64)]
    blocks = rows.Blocks(store_of(tokens), block_size, first=0, last=2)
    cut = [blocks[index] for index in range(len(blocks))]
    assert {len(block) for block in cut[:-1]} == {block_size} and 3 <= len(cut[-1]) <= block_size
    assert all((block[0], block[-1], block.dtype) == (0, 2, np.int64) for block in cut)
    assert [token for block in cut for token in block[1:-1]] == tokens
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_one_source_gives_every_block_once_an_epoch_in_changing_order():
    mixture = rows.Mixture([37], [1.0], seed=3)
    order = [mixture(row) for row in range(37 * 60)]
    epochs = [[block for _, block in order[start : start + 37]] for start in range(0, len(order), 37)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 60
    assert {source for source, _ in order} == {0}
    assert [rows.Mixture([37], [1.0], seed=3)(row) for row in (2000, 5, 1999, 36, 37)] == [
        order[row] for row in (2000, 5, 1999, 36, 37)
    ]
    assert [rows.Mixture([37], [1.0], seed=4)(row) for row in range(37)] != order[:37]


def test_mixture_keeps_the_weights_in_every_cycle_and_repeats_no_block_early():
    mixture = rows.Mixture([50, 2000, 7], [0.25, 0.7, 0.05], seed=0)
    order = [mixture(row) for row in range(4000)]
    patterns = set()
    for start in range(0, 4000, 1000):
        sources = [source for source, _ in order[start : start + 1000]]
        assert Counter(sources) == {0: 250, 1: 700, 2: 50}
        patterns.add(tuple(sources))
        assert max(Counter(sources[:100]).values()) < 90  # mixed, not one after the other
    assert len(patterns) == 4
    for source, length in enumerate((50, 2000, 7)):
        blocks = [block for of, block in order if of == source]
        for start in range(0, len(blocks) - length + 1, length):
            assert sorted(blocks[start : start + length]) == list(range(length))


def test_quotas_fill_a_cycle_and_no_source_is_left_out():
    assert rows.quotas([1, 1, 1]) == [334, 333, 333] and rows.quotas([2]) == [1000]
    assert rows.quotas([0.6994, 0.3006]) == [699, 301]
    with pytest.raises(UserError, match=r"source 2 .*less than one row of 1,000"):
        rows.quotas([1, 0.0001])


# ---- masks ----


def random_rows(count, length, vocabulary, seed=0):
    generator = np.random.default_rng(seed)
    ids = generator.integers(4, vocabulary - 1, (count, length))
    ids[:, 0], ids[:, -1], ids[:, length // 2] = 0, 2, 2
    return ids


def test_masking_proportions():
    tokenizer = tiny_tokenizer()
    how = masking.make_masking(tokenizer, 0.3, whole_words=False)
    ids = random_rows(700, 64, len(tokenizer))
    pairs = [masking.mask_row(row, how, np.random.default_rng((5, number))) for number, row in enumerate(ids)]
    inputs, labels = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    chosen, ordinary = labels != -100, ~np.isin(ids, tokenizer.all_special_ids)
    assert (labels[chosen] == ids[chosen]).all() and (inputs[~chosen] == ids[~chosen]).all()
    assert not (chosen & ~ordinary).any()
    # Standard deviations of these shares are 0.0022, 0.0035 and 0.0027.
    assert abs(chosen.sum() / ordinary.sum() - 0.3) < 0.012
    assert abs((inputs[chosen] == tokenizer.mask_token_id).mean() - 0.8) < 0.02
    assert abs((inputs[chosen] == labels[chosen]).mean() - 0.1) < 0.015
    replaced = inputs[chosen & (inputs != ids) & (inputs != tokenizer.mask_token_id)]
    assert not np.isin(replaced, tokenizer.all_special_ids).any() and len(set(replaced)) > 0.9 * (len(tokenizer) - 5)


def test_every_row_has_a_target_if_it_can():
    tokenizer = tiny_tokenizer()
    how = masking.make_masking(tokenizer, 1e-9, whole_words=False)
    targets = Counter()
    for seed in range(200):
        _, labels = masking.mask_row(np.array([0, 5, 6, 7, 2]), how, np.random.default_rng(seed))
        targets.update(np.flatnonzero(labels != -100).tolist())
    assert set(targets) == {1, 2, 3} and sum(targets.values()) == 200 and min(targets.values()) > 40
    inputs, labels = masking.mask_row(np.array([0, 2, 2]), how, np.random.default_rng(0))
    assert inputs.tolist() == [0, 2, 2] and (labels == -100).all()


def test_whole_words_are_masked_whole():
    starts = np.array([False] * 4 + [True, False, False])  # 4 starts a word, 5 and 6 continue one
    special = np.array([True] * 4 + [False] * 3)
    how = masking.Masking(0.3, 3, np.array([4, 5, 6]), special, starts)
    # Words: (4 5 6) (4) (4 5), and (6 5) after an end token, though no token there starts one.
    row = np.array([0, 4, 5, 6, 4, 4, 5, 2, 6, 5, 2])
    words = [[1, 2, 3], [4], [5, 6], [8, 9]]
    picked = Counter()
    for seed in range(4000):
        _, labels = masking.mask_row(row, how, np.random.default_rng(seed))
        chosen = set(np.flatnonzero(labels != -100).tolist())
        assert chosen and all(chosen.issuperset(word) or not chosen.intersection(word) for word in words)
        picked.update(index for index, word in enumerate(words) if word[0] in chosen)
    # 0.3, and the quarter of the rows in which no word was picked (0.7^4); standard deviation 0.0077.
    assert all(abs(picked[index] / 4000 - (0.3 + 0.7**4 / 4)) < 0.035 for index in range(4))


def test_words_start_where_the_vocabulary_says():
    def starting(tokenizer):
        marked = masking.word_starts(tokenizer)
        return {tokenizer.convert_ids_to_tokens(int(index)) for index in np.flatnonzero(marked)}

    special = {"unk_token": "[UNK]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "read": 4, "##s": 5, "##er": 6, "a": 7}
    pieces = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.pre_tokenizer = Whitespace()
    assert starting(PreTrainedTokenizerFast(tokenizer_object=pieces, **special)) >= {"read", "a"}
    assert not starting(PreTrainedTokenizerFast(tokenizer_object=pieces, **special)) & {"##s", "##er"}

    scores = [("<unk>", 0.0), ("▁read", -1.0), ("s", -1.0), ("▁a", -1.0)]
    unigram = Tokenizer(Unigram(scores, unk_id=0))
    unigram.pre_tokenizer = Metaspace()
    assert starting(PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>")) == {"▁read", "▁a"}

    tokens = starting(tiny_tokenizer())
    assert "Ġ" in tokens and "Ċ" in tokens and "s" not in tokens and "<mask>" not in tokens

    plain = Tokenizer(WordPiece({"[UNK]": 0, "read": 1}, unk_token="[UNK]"))
    with pytest.raises(UserError, match="does not tell where words start"):
        masking.word_starts(PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]"))


def test_a_tokenizer_without_the_tokens_that_rows_need_is_refused(tmp_path):
    pieces = Tokenizer(WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[PAD]": 4}, unk_token="[UNK]"))
    full = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    whole = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", **full)
    assert token_store.borders(whole) == (1, 2)  # as BERT's
    for name in full:
        some = {key: value for key, value in full.items() if key != name}
        lacking = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", **some)
        with pytest.raises(UserError, match=r"no mask token|lacks tokens that rows need"):
            prepared(tmp_path, lacking, data=str(write_texts(tmp_path / "a.txt")))


# ---- training rows ----


def first_updates(text, count, first=0, processes=1, accumulation=1, micro_batch=8):
    """Rows of the first updates, in the order of the run, put together from all processes."""
    parts = []
    for index in range(processes):
        plan = data.Plan(micro_batch, accumulation, processes, index)
        parts.append(list(islice(text.rows.updates(plan, first), count)))
    return [
        [parts[index][update][part] for part in range(accumulation) for index in range(processes)]
        for update in range(count)
    ]


def flat(updates):
    """Input ids and labels of every row, without padding."""
    found = []
    for batch in (batch for batches in updates for batch in batches):
        for ids, keep, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            found.append((ids[keep == 1], labels[keep == 1]))
    return found


def test_rows_do_not_depend_on_processes_passes_or_where_a_run_starts(tmp_path, tokenizer):
    text = prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    whole = flat(first_updates(text, 20))
    for layout in ((2, 1, 4), (1, 4, 2), (4, 2, 1), (2, 2, 2)):
        other = flat(first_updates(text, 20, 0, *layout))
        assert len(other) == len(whole) == 160
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(whole, other, strict=True))
    late = flat(first_updates(prepared(tmp_path, tokenizer, data=str(tmp_path / "a.txt")), 7, first=13))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(whole[104:], late, strict=True))
    assert text.rows.state_dict() == {}
    text.rows.load_state_dict({})


def test_batches_are_padded_and_masks_change_from_epoch_to_epoch(tmp_path, tokenizer):
    text = prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    count = text.facts["training_blocks"]
    batches = next(text.rows.updates(data.Plan(count, 2, 1, 0)))
    lengths = []
    for batch in batches:
        assert all(tensor.shape == (count, 16) and tensor.dtype == torch.int64 for tensor in batch.values())
        padding = batch["attention_mask"] == 0
        assert ((batch["input_ids"] == 1) == padding).all() and (batch["labels"][padding] == -100).all()
        lengths.append(sorted(batch["attention_mask"].sum(1).tolist()))
        restored = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        restored = restored[~padding & (restored > 2)]
        assert restored.numel() == text.facts["training_tokens"]  # an epoch: every token once
    assert lengths[0] == lengths[1] and lengths[0][0] < 16 and set(lengths[0][1:]) == {16}
    rows_of = [{tuple(row.tolist()) for row in batch["labels"]} for batch in batches]
    assert len(rows_of[0] & rows_of[1]) < count / 4


# ---- held-out rows and the baseline ----


def test_evaluation_masks_are_fixed_by_the_seed(tmp_path, tokenizer):
    file = str(write_texts(tmp_path / "a.txt"))
    first, again = prepared(tmp_path, tokenizer, data=file), prepared(tmp_path, tokenizer, data=file)
    assert len(first.held_out) == first.facts["held_out_blocks"] == first.facts["evaluated_blocks"] >= 3
    assert all(same(a, b) for a, b in zip(first.held_out, again.held_out, strict=True))
    blocks = [np.array([0, *range(10, 40), 2])] * 2
    how = masking.make_masking(tokenizer, 0.3, whole_words=False)
    fixed, other = (data.held_out_rows(blocks, how, 1, seed) for seed in (0, 1))
    assert not torch.equal(fixed[0]["labels"], fixed[1]["labels"])
    assert not torch.equal(fixed[0]["labels"], other[0]["labels"])
    uneven = data.held_out_rows([blocks[0], blocks[0][-9:]], how, 1, seed=0)
    assert [row["attention_mask"].sum().item() for row in uneven] == [32, 9]
    assert {len(row["input_ids"]) for row in uneven} == {32}


def test_a_part_of_the_held_out_blocks_comes_from_all_of_them(tmp_path, tokenizer):
    file = str(write_texts(tmp_path / "a.txt"))
    text = prepared(tmp_path, tokenizer, data=file, eval_blocks=4, held_out_fraction=0.5)
    assert len(text.held_out) == text.facts["evaluated_blocks"] == 4 < text.facts["held_out_blocks"]
    blocks = rows.Blocks(store_of(list(range(3, 83))), 10, 0, 2)
    assert [block[1] for block in data.spread_blocks(blocks, 4)] == [3, 19, 43, 59]
    assert len(data.spread_blocks(blocks, 99)) == len(blocks) == 10


def test_validation_text_is_evaluated_whole_and_not_trained_on(tmp_path, tokenizer):
    write_texts(tmp_path / "data/train.jsonl", TEXTS[:15])
    write_texts(tmp_path / "data/validation.jsonl", TEXTS[15:])
    text = prepared(tmp_path, tokenizer, data=str(tmp_path / "data"), validation="validation")
    assert (text.facts["training_documents"], text.facts["held_out_documents"]) == (15, 8)
    restored = [torch.where(row["labels"] == -100, row["input_ids"], row["labels"]) for row in text.held_out]
    inner = [token for row in restored for token in row.tolist() if token > 2]
    assert inner == [token for ids in data.encode(tokenizer, TEXTS[15:]) for token in ids]


def test_unigram_baseline_equals_a_literal_computation():
    counts = np.bincount([4, 4, 4, 5, 6, 5, 4], minlength=9)
    held_out = [{"labels": torch.tensor([-100, 4, 7])}, {"labels": torch.tensor([5, -100, 4])}]
    targets = [4, 7, 5, 4]
    expected = -sum(math.log((counts[token] + 1) / (7 + 9)) for token in targets) / len(targets)
    result = data.unigram_baseline(counts, held_out)
    assert result["loss"] == pytest.approx(expected, rel=1e-12)
    assert (result["accuracy"], result["targets"]) == (0.5, 4)


def test_baseline_of_a_mixture_weights_the_sources():
    few, many = store_of([4, 4, 5], vocabulary=6), store_of([5] * 9, vocabulary=6)
    assert data.mixed_counts([few, many], (0.5, 0.5)).tolist() == pytest.approx([0, 0, 0, 0, 4, 8])
    assert data.mixed_counts([few, many], (0.25, 0.75)).tolist() == pytest.approx([0, 0, 0, 0, 2, 10])


def test_nothing_to_train_or_to_evaluate_on_is_refused(tmp_path, tokenizer):
    one = str(write_texts(tmp_path / "one.txt", TEXTS[:1]))
    for fraction, message in ((0.999999, "is left to train on. Lower `held_out_fraction`"), (1e-9, "holds out none")):
        with pytest.raises(UserError, match=message):
            prepared(tmp_path, tokenizer, data=one, held_out_fraction=fraction)
        with pytest.raises(UserError, match=r"holds out none|has no text for process"):
            text = prepared(tmp_path, tokenizer, data=one, held_out_fraction=fraction, streaming=True)
            next(text.rows.updates(data.Plan(1, 1, 1, 0)))


def test_a_mixture_is_prepared_with_its_weights(tmp_path, tokenizer):
    first = write_texts(tmp_path / "a.txt", [f"a {text}" for text in TEXTS])
    second = write_texts(tmp_path / "b.txt", [f"b {text}" for text in TEXTS])
    sections = [{"path": str(first), "weight": 3}, {"path": str(second), "weight": 1}]
    text = prepared(tmp_path, tokenizer, data=sections, eval_blocks=8, held_out_fraction=0.5)
    assert len(text.held_out) == 8
    assert [text.rows.mixture(row)[0] for row in range(1000)].count(1) == 250
    assert text.facts["training_blocks"] == sum(map(len, text.rows.blocks))
    json.dumps(text.facts)


# ---- streaming ----


@pytest.fixture
def small_buffer(monkeypatch):
    monkeypatch.setattr(streaming, "SHUFFLE_BLOCKS", 5)


def streamed(folder, tokenizer, index=0, processes=1, **changes):
    return prepared(folder, tokenizer, index, processes, **{"streaming": True, "block_size": 8, **changes})


def restored(batch):
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_goes_on_exactly_where_it_stood(tmp_path, tokenizer, small_buffer, kind, processes):
    sections = [
        {"path": str(write_texts(tmp_path / f"a.{kind}", [f"a {text}" for text in TEXTS])), "weight": 2},
        {"path": str(write_texts(tmp_path / f"b.{kind}", [f"b {text}" for text in TEXTS])), "weight": 1},
    ]
    for index in range(processes):
        plan = data.Plan(4, 2, processes, index)
        whole = list(islice(streamed(tmp_path, tokenizer, index, processes, data=sections).rows.updates(plan), 40))
        for stop in (0, 1, 17, 33):
            text = streamed(tmp_path, tokenizer, index, processes, data=sections)
            assert len(list(islice(text.rows.updates(plan), stop))) == stop
            torch.save(text.rows.state_dict(), tmp_path / "state.pt")
            resumed = streamed(tmp_path, tokenizer, index, processes, data=sections)
            resumed.rows.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            rest = list(islice(resumed.rows.updates(plan, stop), 40 - stop))
            for expected, update in zip(whole[stop:], rest, strict=True):
                assert all(same(a, b) for a, b in zip(expected, update, strict=True))
        assert resumed.rows.readers[0].epoch >= 1  # the end of the text was passed


def test_a_stream_gives_all_training_text_and_no_held_out_text(tmp_path, tokenizer, small_buffer):
    texts = [f"{chr(0x4E00 + number)} {text}" for number, text in enumerate(TEXTS)]  # a first character of its own
    file = str(write_texts(tmp_path / "a.txt", texts))
    corpus = corpora.open_corpus(settings(tmp_path, data=file, held_out_fraction=0.4))
    sides = Counter(corpus.side_of(text) for text in texts)
    assert sides["held_out"] >= 3
    seen = []
    for index in range(2):
        text = streamed(tmp_path, tokenizer, index, 2, data=file, held_out_fraction=0.4)
        update = next(text.rows.updates(data.Plan(400, 1, 2, index)))
        ids = restored(update[0])
        assert ids.shape == (400, 8) and (update[0]["attention_mask"] == 1).all()
        read = tokenizer.decode([token for row in ids.tolist() for token in row[1:-1]], errors="ignore")
        seen.append({text for text in texts if text[0] in read})
        assert text.facts["training_tokens"] is None and text.facts["unigram_from"] == "held-out text"
        assert text.facts["held_out_documents"] == sides["held_out"]
        json.dumps(text.facts)
    assert not seen[0] & seen[1]
    assert all(corpus.side_of(text) == "training" for part in seen for text in part)
    assert len(seen[0] | seen[1]) == sides["training"]


def test_the_buffer_shuffles_and_drops_nothing(tmp_path, tokenizer, small_buffer):
    file = str(write_texts(tmp_path / "a.txt", [f"the document {number}" for number in range(150)]))
    reader = streamed(tmp_path, tokenizer, data=file).rows.readers[0]
    drawn = [tuple(reader.draw().tolist()) for _ in range(60)]
    left = [tuple(row) for row in reader.buffer.tolist()]
    text_order = streamed(tmp_path, tokenizer, data=file).rows.readers[0]
    expected = [tuple(text_order._next_block().tolist()) for _ in range(65)]
    assert sorted(drawn + left) == sorted(expected) and drawn != expected[:60]


def test_sources_of_a_stream_keep_their_weights(tmp_path, tokenizer, small_buffer):
    sections = [
        {"path": str(write_texts(tmp_path / "a.txt", ["aa aa aa aa aa"] * 3 + TEXTS)), "weight": 9},
        {"path": str(write_texts(tmp_path / "b.txt")), "weight": 1},
    ]
    text = streamed(tmp_path, tokenizer, data=sections)
    list(islice(text.rows.updates(data.Plan(10, 1, 1, 0)), 100))
    assert [reader.drawn for reader in text.rows.readers] == [900, 100]


def test_held_out_text_of_a_stream_is_read_no_further_than_needed(tmp_path, tokenizer, monkeypatch):
    texts = [f"document {number}: " + "the packed sequence " * 10 for number in range(2000)]
    file = str(write_texts(tmp_path / "a.txt", texts))
    recipe = settings(tmp_path, data=file, streaming=True, eval_blocks=3)
    corpus = corpora.open_corpus(recipe)
    monkeypatch.setattr(token_store, "_LIMITED_CHARACTERS", 500)
    asked = []
    monkeypatch.setattr(type(corpus), "is_held_out", lambda self, text: asked.append(text) or text[-2:-1] == "e")
    text = data.prepare_text(recipe, corpus, tokenizer, process())
    assert text.facts["evaluated_blocks"] == 3 and 1 <= len(asked) < 20


def test_a_stream_refuses_an_update_that_it_does_not_stand_at(tmp_path, tokenizer, small_buffer):
    text = streamed(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    with pytest.raises(ValueError, match="not where update 3 starts"):
        next(text.rows.updates(data.Plan(2, 1, 1, 0), 3))


def test_more_processes_than_documents_are_refused(tmp_path, tokenizer, small_buffer):
    file = str(write_texts(tmp_path / "a.txt", TEXTS[:6]))
    streamed(tmp_path, tokenizer, 0, 9, data=file, held_out_fraction=0.5)
    text = streamed(tmp_path, tokenizer, 8, 9, data=file, held_out_fraction=0.5)
    with pytest.raises(UserError, match="has no text for process 9 of 9"):
        next(text.rows.updates(data.Plan(2, 1, 9, 8)))


def test_other_processes_wait_for_the_stores(tmp_path, tokenizer, monkeypatch):
    file = str(write_texts(tmp_path / "a.txt"))
    waited = []

    def build(_):
        waited.append(1)
        prepared(tmp_path, tokenizer, data=file)

    monkeypatch.setattr(data, "time", SimpleNamespace(sleep=build))
    second = prepared(tmp_path, tokenizer, 1, 2, data=file)
    assert waited == [1]
    first = prepared(tmp_path, tokenizer, 0, 2, data=file)
    assert first.facts == second.facts and all(same(a, b) for a, b in zip(first.held_out, second.held_out, strict=True))
