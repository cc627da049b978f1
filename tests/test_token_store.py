"""The store of tokens: what it holds, when it is built, and what becomes of one that is damaged or unfinished."""

import copy
import errno
import json
import math
import multiprocessing
import os
import signal
from collections import Counter

import numpy as np
import pytest
from data import corpus as corpora
from data import prepare, token_store
from data.tokenizer import encode, train_tokenizer
from helpers import refused
from tiny_data import TEXTS, prepared, same, settings, write_texts

from luna_hf.scripting import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, max_length=64)


def test_store_holds_every_token_of_every_document(tmp_path, tokenizer):
    texts = [*TEXTS, "", "  ", "é 語"]
    changes = {"data": str(write_texts(tmp_path / "a.parquet", texts)), "held_out_fraction": 0.3}
    text = prepared(tmp_path, tokenizer, **changes)
    corpus = corpora.open_corpus(settings(tmp_path, **changes))
    (folder,) = (tmp_path / "cache").iterdir()
    for name in ("training", "held_out"):
        store = token_store.open_store(folder, name)
        expected = encode(tokenizer, [each for each in texts if each.strip() and corpus.side_of(each) == name])
        assert store.tokens.tolist() == [token for ids in expected for token in [2, *ids]][1:]
        counts = Counter(token for ids in expected for token in ids)
        assert store.counts.tolist() == [counts[token] for token in range(len(tokenizer))]
        assert text.facts[f"{name}_documents"] == store.documents == len(expected) > 3
        assert text.facts[f"{name}_tokens"] == sum(map(len, expected))
        assert text.facts[f"{name}_blocks"] == math.ceil(len(store.tokens) / 14)
    json.dumps(text.facts)


def test_store_is_as_wide_as_the_vocabulary_needs(tmp_path):
    for vocabulary, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        writer = token_store.StoreWriter(tmp_path, "training", vocabulary, last=2)
        for ids in ([vocabulary - 1, 5], [], [7]):
            writer.add(ids)
        writer.close()
        store = token_store.open_store(tmp_path, "training")
        assert store.tokens.tolist() == [vocabulary - 1, 5, 2, 7] and store.tokens.dtype == dtype
        assert (store.documents, store.size) == (2, 3)


def test_stores_are_kept_until_text_tokenizer_or_split_change(tmp_path, tokenizer, monkeypatch):
    file = write_texts(tmp_path / "a.txt")
    first = prepared(tmp_path, tokenizer, data=str(file))
    calls = []
    monkeypatch.setattr(token_store, "encode", lambda *args: calls.append(1) or encode(*args))

    def builds(tokenizer=tokenizer, **changes):
        calls.clear()
        text = prepared(tmp_path, tokenizer, data=str(file), **changes)
        assert bool(calls) or changes or (text.facts, text.unigram) == (first.facts, first.unigram)
        return bool(calls)

    assert not builds() and not builds(block_size=32, mask_probability=0.2, eval_blocks=3)
    tokenizer("a b", truncation=True, max_length=8, padding="max_length")  # does not affect `encode`
    assert not builds()
    assert builds(held_out_fraction=0.3) and builds(seed=5)
    other, ended = train_tokenizer([text.upper() for text in TEXTS], 300, max_length=64), copy.deepcopy(tokenizer)
    ended.eos_token = "<unk>"
    assert len(other) == len(tokenizer) and builds(tokenizer=other) and builds(tokenizer=ended)
    write_texts(file, TEXTS[:-1])
    assert builds()


def test_a_build_that_fails_or_is_killed_leaves_nothing_that_is_used(tmp_path, tokenizer, monkeypatch):
    file = str(write_texts(tmp_path / "a.txt"))
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, tokenizer, data=file)
    assert not list(cache.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(token_store.StoreWriter, "close", lambda self: os.kill(os.getpid(), signal.SIGKILL))
        killed = multiprocessing.get_context("fork").Process(
            target=prepared, args=(tmp_path, tokenizer), kwargs={"data": file}
        )
        killed.start()
        killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.endswith(".building")
    running = left.with_name(left.name.replace(str(killed.pid), str(os.getppid())))
    running.mkdir()
    text = prepared(tmp_path, tokenizer, data=file)
    assert text.facts["training_documents"] + text.facts["held_out_documents"] == len(TEXTS)
    assert not left.exists() and running.exists()  # the folder of a live process stays


def cut_evenly(path):
    os.truncate(path, path.stat().st_size // 4 * 2)


def last_id_out_of_range(path):
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")


BROKEN = {
    "an even cut": ("training.bin", cut_evenly),
    "an odd cut": ("training.bin", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "an id out of range": ("held_out.bin", last_id_out_of_range),
    "an empty description": ("training.json", lambda path: path.write_text("")),
    "other counts": ("training_counts.npy", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01")),
    "no manifest": ("files.json", lambda path: path.unlink()),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_cache_is_built_again(tmp_path, tokenizer, capsys, kind):
    file = str(write_texts(tmp_path / "a.txt"))
    first = prepared(tmp_path, tokenizer, data=file)
    (folder,) = (tmp_path / "cache").iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    name, damage = BROKEN[kind]
    damage(folder / name)
    again = prepared(tmp_path, tokenizer, data=file)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert again.facts == first.facts and all(map(same, again.held_out, first.held_out))
    assert f"{folder} is damaged: {name}" in capsys.readouterr().out


def test_the_cache_is_on_disk_before_it_counts_as_complete(tmp_path, tokenizer, monkeypatch):
    flushed = set()
    fsync, replace = os.fsync, token_store.Path.replace

    def complete(building, folder):
        assert flushed >= {path.stat().st_ino for path in building.iterdir() if path.name != "files.json"}
        assert building.stat().st_ino in flushed
        return replace(building, folder)

    monkeypatch.setattr(os, "fsync", lambda number: flushed.add(os.fstat(number).st_ino) or fsync(number))
    monkeypatch.setattr(token_store.Path, "replace", complete)
    prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    assert (tmp_path / "cache").stat().st_ino in flushed


def test_a_full_disk_names_the_cache_and_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_store.StoreWriter, "close", full)
    with refused("`cache_dir`", tmp_path / "cache", "No space left", error=UserError):
        prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "a.txt")))
    assert not list((tmp_path / "cache").iterdir())


def test_other_processes_wait_for_the_stores(tmp_path, tokenizer, monkeypatch):
    file = str(write_texts(tmp_path / "a.txt"))
    first = []
    monkeypatch.setattr(prepare.time, "sleep", lambda _: first.append(prepared(tmp_path, tokenizer, 0, 2, data=file)))
    second = prepared(tmp_path, tokenizer, 1, 2, data=file)
    assert [text.facts for text in first] == [second.facts]


def test_text_or_cache_that_fails_later_is_named(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "_LOOK_CHARACTERS", 1)
    (tmp_path / "a.txt").write_bytes(b"one\n\n\xff")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 3 + "{")
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(UserError, match=name):
            prepared(tmp_path, tokenizer, data=str(tmp_path / name))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache_dir.*file"):
        prepared(tmp_path, tokenizer, data=str(write_texts(tmp_path / "b.txt")), cache_dir=str(tmp_path / "file"))
