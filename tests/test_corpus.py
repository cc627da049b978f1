"""Corpora: what `data` and `validation` name, documents and their order, and errors reported before anything runs."""

import json
from itertools import islice

import datasets
import pytest
from common.fingerprint import changed_files
from data import corpus as corpora
from data import cpython_docs
from data.corpus import open_corpus
from tiny_data import TEXTS, settings, write_texts

from luna_hf.scripting import UserError

KINDS = ["txt", "jsonl", "json", "csv", "parquet"]


def opened(folder, **changes):
    return open_corpus(settings(folder, **changes))


def texts_of(folder, **changes):
    """The documents of the only source."""
    (source,) = opened(folder, **changes).sources
    return list(source.stream())


# ---- the documentation inside CPython ----


def test_cpython_corpus_is_topics_and_docstrings_without_repeated_paragraphs(tmp_path):
    for folder in ("pydoc_data", "test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text('"""Never read."""\n')
    (tmp_path / "pydoc_data" / "topics.py").write_text(
        "topics = {'b': 'Heading\\n*******\\n\\nWhat f does.\\n', 'a': 'Topic a.\\n'}\n"
    )
    (tmp_path / "first.py").write_text(
        '"""First module.\n\nShared paragraph of\nboth.\n"""\n\nraise SystemExit\n\n\n'
        'def f():\n    """What f does."""\n\n\n'
        'class C:\n    """What C is."""\n\n    def m(self):\n        """Method m."""\n'
    )
    (tmp_path / "second.py").write_text('"""Second module.\n\nShared paragraph of both.\n"""\n')
    (tmp_path / "broken.py").write_text("def :\n")
    documents, description, _ = cpython_docs.read_cpython(tmp_path)
    assert documents == [
        "Topic a.",
        "Heading\n\nWhat f does.",
        "First module.\n\nShared paragraph of\nboth.\n\nWhat C is.\n\nMethod m.",
        "Second module.",
    ]
    assert "2 topics" in description and "2 modules" in description
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="cpython"):
        cpython_docs.read_cpython(tmp_path / "none")


# ---- files and folders ----


def test_blank_lines_end_documents_and_files_are_read_in_order(tmp_path):
    write_texts(tmp_path / "inner" / "2.txt", ["three"])
    (tmp_path / "1.txt").write_bytes(b"\n\none\nline two\n \n\n\r\ntwo\r\nlines\n\n")
    (tmp_path / "ignored.md").write_text("no")
    (tmp_path / ".hidden.txt").write_text("no")
    assert texts_of(tmp_path, data=str(tmp_path)) == ["one\nline two", "two\nlines", "three"]


@pytest.mark.parametrize("kind", [*KINDS, "joined"])
def test_processes_share_the_documents_in_order_and_resume_where_they_stopped(tmp_path, kind):
    first, second = ("parquet", "txt") if kind == "joined" else (kind, kind)
    # Two files: they divide evenly among two processes, but not among three.
    files = [
        write_texts(tmp_path / f"[odd] *name/1.{first}", TEXTS[:12]),
        write_texts(tmp_path / f"[odd] *name/2.{second}", TEXTS[12:]),
    ]
    data = [str(file) for file in files] if kind == "joined" else str(files[0].parent)
    (source,) = opened(tmp_path, data=data).sources
    assert str(files[1].stat().st_mtime_ns) in json.dumps(source.identity)
    for processes in (1, 2, 3):
        parts = [list(source.stream(index, processes)) for index in range(processes)]
        assert sorted(text for part in parts for text in part) == sorted(TEXTS)
        assert processes > 1 or parts == [TEXTS]
        for index, part in enumerate(parts):
            assert len(part) >= len(TEXTS) // processes - 1
            for position in (0, 1, 5, len(part)):
                stream = source.stream(index, processes)
                read = list(islice(stream, position))
                for _ in range(2):  # the second time, nothing was read since
                    state = json.loads(json.dumps(stream.state_dict()))
                    stream = source.stream(index, processes)
                    stream.load_state_dict(state)
                assert read + list(stream) == part


def test_texts_that_look_like_missing_ones_are_kept_and_missing_ones_are_empty(tmp_path):
    texts = ["NA", "null", "a, b", 'quoted "x"', "two\nlines"]
    assert texts_of(tmp_path, data=str(write_texts(tmp_path / "a.csv", texts))) == texts
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert texts_of(tmp_path, data=str(tmp_path / "a.jsonl")) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"),
         {"train": [0, 1], "test": [2]}),
        (("train/b.jsonl", "validation/a.jsonl"), {"train": [0], "validation": [1]}),
        (("train.jsonl", "validation_matched.jsonl", "unsupervised.jsonl"),
         {"train": [0], "validation_matched": [1], "unsupervised": [2]}),
        (("a.jsonl", "b/c.jsonl"), {"train": [0, 1]}),
    ],
)  # fmt: skip
def test_files_of_a_folder_belong_to_splits_by_their_names(tmp_path, names, splits):
    folder = str(tmp_path / "data")
    for number, name in enumerate(names):
        write_texts(tmp_path / "data" / name, [f"document {number}"])
    for split, numbers in splits.items():
        expected = [f"document {number}" for number in numbers]
        assert texts_of(tmp_path, data=[{"path": folder, "split": split}]) == expected
    assert texts_of(tmp_path, data=folder) == [f"document {number}" for number in splits["train"]]
    rest = f", split train; not read: {', '.join(splits.keys() - {'train'})})" if len(splits) == 2 else ""
    assert rest in opened(tmp_path, data=folder).description
    with pytest.raises(UserError, match=rf"'dev', only: {', '.join(sorted(splits))}"):
        opened(tmp_path, data=[{"path": folder, "split": "dev"}])


def test_validation_is_a_split_of_the_data_or_another_text(tmp_path):
    write_texts(tmp_path / "data/train.parquet", ["one", "two"])
    write_texts(tmp_path / "data/validation.parquet", ["three"])
    write_texts(tmp_path / "other.txt", ["four"])
    for name, expected in {
        "validation": ["three"],
        str(tmp_path / "data"): ["three"],
        str(tmp_path / "data/validation.parquet"): ["three"],
        str(tmp_path / "other.txt"): ["four"],
    }.items():
        corpus = opened(tmp_path, data=str(tmp_path / "data"), validation=name)
        assert [list(source.stream()) for source in corpus.validation] == [expected]
        assert list(corpus.sources[0].stream()) == ["one", "two"]
        assert not any(corpus.is_held_out(text) for text in TEXTS)


def test_several_sources_have_weights_or_are_read_one_after_the_other(tmp_path):
    first, second = write_texts(tmp_path / "a.txt", TEXTS[:3]), write_texts(tmp_path / "b.csv", TEXTS[3:5], "body")
    sections = [{"path": str(first), "weight": 3}, {"path": str(second), "text_column": "body", "weight": 1}]
    corpus = opened(tmp_path, data=sections)
    assert corpus.description == "75.0% a.txt (1 text file); 25.0% b.csv (1 csv file)"
    assert corpus.weights == (0.75, 0.25)
    assert [list(source.stream()) for source in corpus.sources] == [TEXTS[:3], TEXTS[3:5]]
    assert texts_of(tmp_path, data=[str(first), {"path": str(second), "text_column": "body"}]) == TEXTS[:5]


# ---- the Hub ----


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Calls of the loader, which opens `org/texts` with two splits from local files."""
    files = {"train": str(write_texts(tmp_path / "hub/t.jsonl")), "test": str(write_texts(tmp_path / "hub/x.jsonl"))}
    calls = []

    def load_dataset_builder(name, config):
        calls.append((name, config))
        if name == "org/none":
            raise ConnectionError("no network")
        return datasets.load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "datasets"))

    monkeypatch.setattr(corpora, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(datasets.load, "increase_load_count", lambda name: None)  # needs a network
    return calls


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_of_the_hub_is_downloaded_once_or_streamed(tmp_path, hub, streaming):
    section = {"path": "org/texts", "name": "20231101.en", "split": "test"}
    (source,) = opened(tmp_path, data=[section], streaming=streaming).sources
    assert hub == [("org/texts", "20231101.en")]
    assert source.description == "org/texts (20231101.en), split test"
    assert not list((tmp_path / "datasets").rglob("*.arrow"))  # opening downloads nothing
    assert list(source.stream()) == TEXTS
    assert bool(list((tmp_path / "datasets").rglob("*.arrow"))) == (not streaming)
    (again,) = opened(tmp_path, data=[section], streaming=streaming).sources
    assert again.identity == source.identity and list(again.stream()) == TEXTS
    assert [list(source.stream(index, 2)) for index in range(2)] == [TEXTS[::2], TEXTS[1::2]]


def test_the_fingerprint_names_the_sources_that_change(tmp_path, hub):
    first, second, validation = (write_texts(tmp_path / name) for name in ("a.txt", "b.csv", "c.txt"))
    names = {"data": [str(first), str(second), "org/texts"], "validation": str(validation)}
    before = opened(tmp_path, **names).fingerprint()
    assert changed_files(before, opened(tmp_path, **names).fingerprint()) == []
    for path in (second, validation, tmp_path / "hub" / "t.jsonl"):
        write_texts(path, TEXTS[:5])
    changed = changed_files(before, opened(tmp_path, **names).fingerprint())
    assert set(changed) == {str(second), str(validation), "org/texts, split train"}


# ---- errors ----

ERRORS = [
    ({"data": "c.jsonl"}, "c.jsonl"),
    ({"data": "./a/b"}, "./a/b"),
    ({"data": "a.jsonl", "text_column": "body"}, "'body'.*text_column.*number, text"),
    ({"data": "late", "text_column": "body"}, "'body'.*text_column.*number, text"),
    ({"data": "a.jsonl", "text_column": "number"}, "'number' has int"),
    ({"data": "latin.txt"}, "latin.txt.* byte 15"),
    ({"data": "blank.txt"}, "blank.txt.*no text"),
    ({"data": "none.parquet"}, "none.parquet.*no text"),
    ({"data": "empty.jsonl"}, "empty.jsonl.*is empty"),
    ({"data": "broken.parquet"}, "broken.parquet.*cannot be read"),
    ({"data": "broken.jsonl"}, "broken.jsonl.*cannot be read"),
    ({"data": "a.docx"}, r"a.docx.*\.jsonl"),
    ({"data": "nothing"}, r"nothing.*\.jsonl"),
    ({"data": "mixed"}, r"mixed.*\.csv, \.txt"),
    ({"data": []}, "`data`"),
    ({"data": [{"path": "a.txt", "wieght": 1}]}, "`wieght`.*`weight`"),
    ({"data": [{"weight": 1}]}, "`path`"),
    ({"data": [{"path": "a.txt", "weight": -1}]}, "`weight`.*-1"),
    ({"data": [{"path": "a.txt", "weight": 1}, "a.jsonl"]}, "`weight`.*a.jsonl"),
    ({"data": "a.txt", "validation": "validation"}, "a.txt.*'validation', only: train"),
    ({"data": [{"path": "cpython", "split": "test"}]}, "cpython.*'test'"),
    ({"data": [{"path": "org/texts", "split": "dev"}]}, "org/texts.*dev.*train.*test"),
    ({"data": "org/texts", "text_column": "body"}, "org/texts.*'body'.*number, text"),
    ({"data": "org/none"}, "org/none.*no network"),
    ({"data": "a.txt", "validation": "a.txt"}, "`validation` 'a.txt'"),
]  # fmt: skip


def test_errors_are_found_when_the_corpus_is_opened(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "latin.txt": "one\n\ntwo\nthree ü".encode("latin-1"),
        "blank.txt": b" \n\n \n",
        "broken.parquet": b"PAR1 is all there is",
        "broken.jsonl": b'{"text": "one"}\n{"text": \n',
        "a.docx": b"x",
        "empty.jsonl": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    for name in ("a.txt", "a.jsonl", "mixed/a.txt", "mixed/b.csv", "late/2.parquet"):
        write_texts(tmp_path / name)
    write_texts(tmp_path / "late/1.parquet", column="body")
    write_texts(tmp_path / "none.parquet", [])
    (tmp_path / "nothing").mkdir()
    for changes, message in ERRORS:
        with pytest.raises(UserError, match=message):
            opened(tmp_path, **changes)


# ---- choice of documents ----


def test_held_out_documents_follow_from_text_and_seed(tmp_path):
    file = str(write_texts(tmp_path / "a.txt"))
    corpus = opened(tmp_path, data=file, held_out_fraction=0.1)
    documents = [f"document {number}" for number in range(5000)]
    held_out = {text for text in documents if corpus.is_held_out(text)}
    assert abs(len(held_out) / 5000 - 0.1) < 0.017  # four standard deviations
    assert sorted(held_out)[:3] == ["document 1010", "document 102", "document 1026"]  # in every version
    more = opened(tmp_path, data=file, held_out_fraction=0.2)
    assert all(more.is_held_out(text) for text in held_out)
    other = opened(tmp_path, data=file, held_out_fraction=0.1, seed=1)
    assert len(held_out & {text for text in documents if other.is_held_out(text)}) < 100
    assert {corpus.side_of(text) for text in held_out} == {"held_out"}


def test_documents_for_the_tokenizer_are_training_documents_from_the_whole_corpus(tmp_path):
    texts = [f"{number:03d} " + "x" * 96 for number in range(400)]
    changes = {"data": str(write_texts(tmp_path / "a.txt", texts)), "held_out_fraction": 0.1}
    corpus = opened(tmp_path, **changes)
    training = [text for text in texts if not corpus.is_held_out(text)]
    assert list(corpus.training_documents()) == training
    some = list(corpus.training_documents(limit=10_000))
    assert 2_500 <= sum(map(len, some)) <= 10_000
    assert some == [text for text in training if text in set(some)]
    assert min(sum(text[0] == digit for text in some) for digit in "0123") >= 5  # from every quarter
    assert corpora.spread_documents(iter(["x" * 50]), 10) == ["x" * 50]
    second = write_texts(tmp_path / "b.txt", ["b" * 100] * 99)
    sections = [{"path": changes["data"], "weight": 4}, {"path": str(second), "weight": 1}]
    streamed = opened(tmp_path, **{**changes, "data": sections}, streaming=True)
    assert list(streamed.training_documents(limit=5_000)) == training[:40] + ["b" * 100] * 10
