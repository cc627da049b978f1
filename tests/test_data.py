"""From documents to rows: tokenizer, token stores, blocks, mixtures, masks, streams, and the baseline."""

import math
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from data import corpus as corpora
from data import prepare, rows, streaming, token_store
from data.masking import Masking, make_masking, word_starts
from data.rows import Blocks, Frame, Mixture, Plan
from data.tokenizer import borders, encode, train_tokenizer
from helpers import refused, tiny_tokenizer
from tiny_data import TEXTS, prepared, same, settings, write_texts
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from luna_hf.scripting import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, max_length=64)


def store_of(tokens, vocabulary=100):
    return token_store.TokenStore(np.array(tokens, np.uint16), np.bincount(tokens, minlength=vocabulary), 1)


def restored(batch):
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


# ---- tokenizer ----


def test_tokenizer_has_robertas_layout_and_survives_saving(tmp_path):
    words = ["the", "token", "reads", "every", "packed", "sequence", "of", "fixed", "length", "in", "its", "layer"]
    trained = train_tokenizer([" ".join(random.Random(0).choices(words, k=500))], 300, max_length=40)
    trained.save_pretrained(tmp_path)
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 299]) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        assert len(tokenizer) == 300 and tokenizer.model_max_length == 40
        # The mask swallows the space before it, as RoBERTa's does, so that it stands for a word with its space.
        assert tokenizer("of <mask> of").input_ids == tokenizer("of<mask> of").input_ids
        assert tokenizer.convert_ids_to_tokens(tokenizer("token<mask> of").input_ids) == [
            *["<s>", *tokenizer.tokenize("token"), "<mask>", *tokenizer.tokenize(" of"), "</s>"]
        ]
        for text in ("the packed sequence", "any bytes: é 語 \n\t x"):
            assert tokenizer.decode(encode(tokenizer, [text])[0]) == text


def test_special_tokens_in_the_text_are_text_and_nothing_is_cut():
    tokenizer = tiny_tokenizer()
    tokenizer("short", truncation=True, max_length=4, padding="max_length")  # a setting that stays
    texts = ["the <s> tag and <mask>", "every token reads the packed sequence in turn " * 50, "short"]
    ids = encode(tokenizer, texts)
    assert [tokenizer.decode(each) for each in ids] == texts
    assert not set(ids[0]) & set(tokenizer.all_special_ids)


# ---- blocks and their order ----


@pytest.mark.parametrize("ends", [[2], []])
@pytest.mark.parametrize("block_size", [3, 32])
def test_every_token_is_in_exactly_one_block(block_size, ends):
    tokens = [random.Random(block_size).randrange(4, 99) for _ in range(64)]
    blocks = Blocks(store_of(tokens), Frame(block_size, 0, ends[0] if ends else None))
    cut = [blocks[index] for index in range(len(blocks))]
    assert {len(block) for block in cut[:-1]} == {block_size} and 2 <= len(cut[-1]) <= block_size
    inner = [block[1 : len(block) - len(ends)].tolist() for block in cut]
    assert [token for part in inner for token in part] == tokens
    assert [block.tolist() for block in cut] == [[0, *part, *ends] for part in inner]
    assert all(block.dtype == np.int64 for block in cut)
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_mixture_keeps_the_weights_in_every_cycle_and_repeats_no_block_early():
    lengths, weights = (50, 2000, 7), [0.25, 0.7, 0.05]
    mixture = Mixture(lengths, weights, seed=0)
    order = [mixture(row) for row in range(4000)]
    patterns = set()
    for start in range(0, 4000, 1000):
        sources = [source for source, _ in order[start : start + 1000]]
        assert Counter(sources) == {0: 250, 1: 700, 2: 50}
        patterns.add(tuple(sources))
        assert max(Counter(sources[:100]).values()) < 90  # mixed, not one after the other
    assert len(patterns) == 4
    for source, length in enumerate(lengths):
        blocks = [block for of, block in order if of == source]
        epochs = [blocks[start : start + length] for start in range(0, len(blocks) - length + 1, length)]
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    # Row by row in any order, and the same in every version.
    again = Mixture(lengths, weights, seed=0)
    assert [again(row) for row in (12345, 1000, 0, 999, 1)] == [(1, 536), (0, 26), (0, 18), (1, 580), (1, 1899)]
    assert [Mixture(lengths, weights, seed=1)(row) for row in range(99)] != order[:99]


def test_quotas_fill_a_cycle_and_leave_out_no_source():
    assert rows.quotas([1, 1, 1]) == [334, 333, 333] and rows.quotas([2]) == [1000]
    assert rows.quotas([0.6994, 0.3006]) == [699, 301]
    with pytest.raises(UserError, match=r"source 2 .*0\.0001"):
        rows.quotas([1, 0.0001])


# ---- masks ----


def test_masking_proportions():
    tokenizer = tiny_tokenizer()
    masking = make_masking(tokenizer, 0.3, whole_words=False)
    ids = np.random.default_rng(0).integers(4, len(tokenizer) - 1, (700, 64))
    ids[:, 0], ids[:, -1], ids[:, 32] = 0, 2, 2
    pairs = [masking(row, np.random.default_rng((5, number))) for number, row in enumerate(ids)]
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


def test_every_row_has_a_target_if_it_can_and_the_same_in_every_version():
    special = np.arange(90) < 4
    never = Masking(1e-9, 3, np.arange(4, 90), special)
    targets = Counter()
    for seed in range(200):
        _, labels = never(np.array([0, 5, 6, 7, 2]), np.random.default_rng(seed))
        targets.update(np.flatnonzero(labels != -100).tolist())
    assert set(targets) == {1, 2, 3} and sum(targets.values()) == 200 and min(targets.values()) > 40
    inputs, labels = never(np.array([0, 2, 2]), np.random.default_rng(0))
    assert inputs.tolist() == [0, 2, 2] and (labels == -100).all()
    inputs, labels = Masking(0.3, 3, np.arange(4, 90), special)(np.arange(2, 22), np.random.default_rng((0, 2, 7)))
    assert inputs.tolist() == [2, 3, 4, 5, 3, 7, 3, 9, 10, 11, 3, 13, 14, 3, 16, 17, 18, 19, 20, 21]
    assert labels[labels != -100].tolist() == [6, 8, 12, 15, 17]


def test_whole_words_are_masked_whole():
    starts = np.array([False] * 4 + [True, False, False])  # 4 starts a word, 5 and 6 continue one
    masking = Masking(0.3, 3, np.array([4, 5, 6]), np.array([True] * 4 + [False] * 3), starts)
    # Words: (4 5 6) (4) (4 5), and (6 5) after an end token, though no token there starts one.
    row = np.array([0, 4, 5, 6, 4, 4, 5, 2, 6, 5, 2])
    words = [[1, 2, 3], [4], [5, 6], [8, 9]]
    picked = Counter()
    for seed in range(4000):
        _, labels = masking(row, np.random.default_rng(seed))
        chosen = set(np.flatnonzero(labels != -100).tolist())
        assert chosen and all(chosen.issuperset(word) or not chosen.intersection(word) for word in words)
        picked.update(index for index, word in enumerate(words) if word[0] in chosen)
    # 0.3, and a quarter of the rows in which no word was picked (0.7^4); standard deviation 0.0077.
    assert all(abs(picked[index] / 4000 - (0.3 + 0.7**4 / 4)) < 0.035 for index in range(4))


def test_words_start_where_the_vocabulary_marks_them():
    def starting(model):
        backend = Tokenizer(model)
        backend.pre_tokenizer = Metaspace() if isinstance(model, Unigram) else Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
        return set(tokenizer.convert_ids_to_tokens(np.flatnonzero(word_starts(tokenizer)).tolist()))

    pieces = {"[UNK]": 0, "read": 1, "##s": 2, "##er": 3, "a": 4}
    assert starting(WordPiece(pieces, unk_token="[UNK]")) == {"[UNK]", "read", "a"}
    assert starting(Unigram([("[UNK]", 0.0), ("▁read", -1.0), ("s", -1.0), ("▁a", -1.0)], unk_id=0)) == {"▁read", "▁a"}
    # Ġ and ▁ may also be letters or signs of a text.
    odd = {**pieces, "Ġ": 5, "▁": 6, "##Ġ": 7}
    assert starting(WordPiece(odd, unk_token="[UNK]")) == {"[UNK]", "read", "a", "Ġ", "▁"}
    with pytest.raises(UserError, match="whole_word_masking"):
        starting(WordPiece({"[UNK]": 0, "read": 1}, unk_token="[UNK]"))
    bytes_ = tiny_tokenizer()
    tokens = set(bytes_.convert_ids_to_tokens(np.flatnonzero(word_starts(bytes_)).tolist()))
    assert {"Ġ", "Ċ"} <= tokens and not {"s", "<mask>"} & tokens


def test_a_tokenizer_without_the_tokens_that_rows_need_is_refused(tmp_path):
    pieces = Tokenizer(WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[PAD]": 4}, unk_token="[UNK]"))
    full = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    assert borders(PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", **full)) == (1, 2)  # as BERT's
    for name in full:
        some = {key: value for key, value in full.items() if key != name}
        lacking = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", **some)
        with pytest.raises(UserError, match=r"mask token|bos or cls"):
            prepared(tmp_path, lacking, data=str(write_texts(tmp_path / "a.txt")))


# ---- training rows ----


def updates_of(text, count, first=0, processes=1, accumulation=1, micro_batch=8):
    """Input ids and labels of the rows of the first updates, in the order of the run, from all processes."""
    plans = [Plan(micro_batch, accumulation, processes, index) for index in range(processes)]
    found = []
    for update in zip(*(islice(text.rows.updates(plan, first), count) for plan in plans), strict=True):
        for batch in (batches[part] for part in range(accumulation) for batches in update):
            for ids, keep, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
                found.append((ids[keep == 1].tolist(), labels[keep == 1].tolist()))
    return found


def test_rows_do_not_depend_on_processes_passes_or_where_a_run_starts(tmp_path, tokenizer):
    file = str(write_texts(tmp_path / "a.txt"))
    text, late = prepared(tmp_path, tokenizer, data=file), prepared(tmp_path, tokenizer, data=file)
    whole = updates_of(text, 20)
    assert len(whole) == 160
    for layout in ((2, 1, 4), (1, 4, 2), (4, 2, 1), (2, 2, 2)):
        assert updates_of(text, 20, 0, *layout) == whole
    late.rows.load_state_dict(text.rows.state_dict())
    assert updates_of(late, 7, first=13) == whole[104:]


def test_batches_are_padded_and_masks_change_from_epoch_to_epoch(tmp_path, tokenizer):
    text = prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    count = text.facts["training_blocks"]
    batches = next(text.rows.updates(Plan(count, 2, 1, 0)))
    lengths = []
    for batch in batches:
        assert all(tensor.shape == (count, 16) and tensor.dtype == torch.int64 for tensor in batch.values())
        padding = batch["attention_mask"] == 0
        assert ((batch["input_ids"] == 1) == padding).all() and (batch["labels"][padding] == -100).all()
        lengths.append(sorted(batch["attention_mask"].sum(1).tolist()))
        tokens = restored(batch)
        assert (tokens[~padding] > 2).sum() == text.facts["training_tokens"]  # an epoch: every token once
    assert lengths[0] == lengths[1] and lengths[0][0] < 16 and set(lengths[0][1:]) == {16}
    rows_of = [{tuple(row.tolist()) for row in batch["labels"]} for batch in batches]
    assert len(rows_of[0] & rows_of[1]) < count / 4


@pytest.mark.parametrize("from_stream", [False, True])
def test_separate_documents_are_numbered(tmp_path, tokenizer, from_stream):
    """In training and evaluation: the tokens up to an end token are one text. Masks and all else stay the same."""
    data = str(write_texts(tmp_path / "texts.jsonl"))
    texts = [prepared(tmp_path, tokenizer, data=data, streaming=from_stream, separate_documents=x) for x in (0, 1)]
    batches = [next(text.rows.updates(Plan(8, 1, 1, 0)))[0] for text in texts]
    held_out = [
        {name: torch.stack([row[name] for row in text.held_out]) for name in text.held_out[0]} for text in texts
    ]
    for plain, separate in (batches, held_out):
        numbers = separate.pop("seq_idx")
        assert same(plain, separate) and numbers.max() > 0
        ended = (separate["input_ids"] == 2).long()
        assert torch.equal(numbers, ended.cumsum(1) - ended)


# ---- held-out rows and the baseline ----


def test_evaluation_masks_are_fixed_by_the_seed(tokenizer):
    block = np.array([0, *range(10, 40), 2])
    masking = make_masking(tokenizer, 0.3, whole_words=False)
    first, again, other = (prepare.held_out_rows([block, block, block[-9:]], masking, 1, seed) for seed in (0, 0, 1))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0]["labels"], first[1]["labels"])
    assert not torch.equal(first[0]["labels"], other[0]["labels"])
    assert [row["attention_mask"].sum().item() for row in first] == [32, 32, 9]
    assert {len(row["input_ids"]) for row in first} == {32}


def test_a_part_of_the_held_out_blocks_comes_from_all_of_them():
    blocks = Blocks(store_of(list(range(3, 83))), Frame(10, 0, 2))
    assert [block[1] for block in prepare.spread_blocks(blocks, 4)] == [3, 19, 43, 59]
    assert len(prepare.spread_blocks(blocks, 99)) == len(blocks) == 10


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_text_is_evaluated_whole_and_not_trained_on(tmp_path, tokenizer, streaming):
    write_texts(tmp_path / "data/train.jsonl", TEXTS[:15])
    write_texts(tmp_path / "data/validation.jsonl", TEXTS[15:])
    text = prepared(tmp_path, tokenizer, data=str(tmp_path / "data"), validation="validation", streaming=streaming)
    assert text.facts["training_documents"] == (None if streaming else 15)
    assert text.facts["held_out_documents"] == 8
    inner = [token for row in text.held_out for token in restored(row).tolist() if token > 2]
    assert inner == [token for ids in encode(tokenizer, TEXTS[15:]) for token in ids]


def test_unigram_baseline_equals_a_literal_computation():
    counts = np.bincount([4, 4, 4, 5, 6, 5, 4], minlength=9)
    held_out = [{"labels": torch.tensor([-100, 4, 7])}, {"labels": torch.tensor([5, -100, 4])}]
    expected = -sum(math.log((counts[token] + 1) / (7 + 9)) for token in [4, 7, 5, 4]) / 4
    result = prepare.unigram_baseline(counts, held_out)
    assert result == {"loss": pytest.approx(expected, rel=1e-12), "accuracy": 0.5, "targets": 4}
    few, many = store_of([4, 4, 5], vocabulary=6), store_of([5] * 9, vocabulary=6)
    assert prepare.mixed_counts([few, many], (0.5, 0.5)).tolist() == pytest.approx([0, 0, 0, 0, 4, 8])
    assert prepare.mixed_counts([few, many], (0.25, 0.75)).tolist() == pytest.approx([0, 0, 0, 0, 2, 10])


def test_a_mixture_is_prepared_with_its_weights(tmp_path, tokenizer):
    sections = [{"path": str(write_texts(tmp_path / f"{weight}.txt")), "weight": weight} for weight in (3, 1)]
    text = prepared(tmp_path, tokenizer, data=sections, eval_blocks=8, held_out_fraction=0.5)
    assert len(text.held_out) == text.facts["evaluated_blocks"] == 8 < text.facts["held_out_blocks"]
    assert [text.rows.mixture(row)[0] for row in range(1000)].count(1) == 250
    assert text.facts["training_blocks"] == sum(map(len, text.rows.blocks))


def test_too_few_documents_to_train_or_to_evaluate_on_are_refused(tmp_path, tokenizer, monkeypatch):
    one = str(write_texts(tmp_path / "one.txt", TEXTS[:1]))
    for fraction in (0.999999, 1e-9):
        for streams in (False, True):
            changes = {"data": one, "held_out_fraction": fraction, "streaming": streams}
            with monkeypatch.context() as patch:  # before the long work
                patch.setattr(token_store, "encode", None)
                with refused("one.txt", "`held_out_fraction`", error=UserError):
                    next(corpora.open_corpus(settings(tmp_path, **changes)).training_documents())
                with refused("one.txt", "`held_out_fraction`", error=UserError):
                    prepared(tmp_path, tokenizer, **changes)
    few = {"data": str(write_texts(tmp_path / "a.txt", TEXTS[:6])), "held_out_fraction": 0.5, "streaming": True}
    prepared(tmp_path, tokenizer, 0, 9, **few)
    with pytest.raises(UserError, match="part 9 of 9"):
        next(prepared(tmp_path, tokenizer, 8, 9, **few).rows.updates(Plan(2, 1, 9, 8)))


# ---- streaming ----


@pytest.fixture
def small_buffer(monkeypatch):
    monkeypatch.setattr(streaming, "SHUFFLE_BLOCKS", 5)


def streamed(folder, tokenizer, index=0, processes=1, **changes):
    return prepared(folder, tokenizer, index, processes, **{"streaming": True, "block_size": 8, **changes})


@pytest.mark.parametrize(("kind", "processes"), [("txt", 1), ("jsonl", 2), ("parquet", 2)])
def test_a_stream_resumes_exactly_where_it_stopped(tmp_path, tokenizer, small_buffer, kind, processes):
    long = [f"{number} {' '.join(TEXTS)}" for number in range(6)]  # several updates in one document
    sections = [
        {"path": str(write_texts(tmp_path / f"a.{kind}", [f"a {text}" for text in TEXTS])), "weight": 3},
        {"path": str(write_texts(tmp_path / f"b.{kind}", long)), "weight": 1},
    ]
    index = processes - 1
    plan = Plan(4, 2, processes, index)
    first = streamed(tmp_path, tokenizer, 0, processes, data=sections)  # builds the stores
    text = streamed(tmp_path, tokenizer, index, processes, data=sections)
    if processes > 1:  # do not draw the same sources and places at the same time
        assert (first.rows._sources(0) != text.rows._sources(0)).any()
        assert first.rows.readers[0].seed != text.rows.readers[0].seed
    whole = list(islice(text.rows.updates(plan), 125))
    assert [reader.drawn for reader in text.rows.readers] == [750, 250]  # the weights
    for stop in (0, 1, 17, 33):
        state, step = None, 0
        for end in (stop, stop + 1, 40):  # resumed twice, the first time for one update
            text = streamed(tmp_path, tokenizer, index, processes, data=sections)
            if state:
                text.rows.load_state_dict(state)
            rest = list(islice(text.rows.updates(plan, step), end - step))
            for expected, update in zip(whole[step:end], rest, strict=True):
                assert all(same(a, b) for a, b in zip(expected, update, strict=True))
            torch.save(text.rows.state_dict(), tmp_path / "state.pt")
            state, step = torch.load(tmp_path / "state.pt", weights_only=True), end
    with pytest.raises(ValueError, match="3"):
        next(text.rows.updates(plan, 3))


def test_a_stream_gives_all_training_text_and_no_held_out_text(tmp_path, tokenizer, small_buffer):
    texts = [f"{chr(0x4E00 + number)} {text}" for number, text in enumerate(TEXTS)]  # with different first characters
    changes = {"data": str(write_texts(tmp_path / "a.txt", texts)), "held_out_fraction": 0.4}
    corpus = corpora.open_corpus(settings(tmp_path, **changes))
    sides = Counter(corpus.side_of(text) for text in texts)
    assert sides["held_out"] >= 3
    seen = []
    for index in range(2):
        text = streamed(tmp_path, tokenizer, index, 2, **changes)
        (batch,) = next(text.rows.updates(Plan(400, 1, 2, index)))
        assert batch["labels"].shape == (400, 8) and (batch["attention_mask"] == 1).all()
        tokens = [token for row in restored(batch).tolist() for token in row[1:-1]]
        read = tokenizer.decode(tokens, errors="ignore")
        seen.append({text for text in texts if text[0] in read})
        assert text.facts["training_tokens"] is None and text.facts["unigram_from"] == "held-out text"
        assert text.facts["held_out_documents"] == sides["held_out"]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == {text for text in texts if corpus.side_of(text) == "training"}


def test_the_buffer_shuffles_and_drops_nothing(tmp_path, tokenizer, small_buffer):
    file = str(write_texts(tmp_path / "a.txt", [f"the document {number}" for number in range(150)]))
    reader, in_order = (streamed(tmp_path, tokenizer, data=file).rows.readers[0] for _ in range(2))
    drawn = [tuple(reader.draw().tolist()) for _ in range(60)]
    left = [tuple(row) for row in reader.buffer.tolist()]
    expected = [tuple(in_order.next_block().tolist()) for _ in range(65)]
    assert sorted(drawn + left) == sorted(expected) and drawn != expected[:60]


def test_held_out_text_of_a_stream_is_read_no_further_than_needed(tmp_path, tokenizer, monkeypatch):
    texts = [f"document {number}: " + "the packed sequence " * 10 for number in range(2000)]
    monkeypatch.setattr(token_store, "_LIMITED_CHARACTERS", 500)
    read = []
    monkeypatch.setattr(token_store, "encode", lambda tokenizer, texts: read.extend(texts) or encode(tokenizer, texts))
    file = str(write_texts(tmp_path / "a.txt", texts))
    assert streamed(tmp_path, tokenizer, data=file, eval_blocks=3).facts["evaluated_blocks"] == 3
    assert 1 <= len(read) < 20
