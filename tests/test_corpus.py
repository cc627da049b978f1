"""Corpora: what `data` and `validation` name, documents and their order, and mistakes told before anything runs."""

import json
import random
from itertools import islice

import datasets
import pytest
from tiny_data import TEXTS, UserError, cpython_docs, settings, write_texts
from tiny_data import corpus as corpora
from tiny_data import sources as readers

KINDS = ["txt", "jsonl", "json", "csv", "parquet"]


def opened(folder, **changes):
    return corpora.open_corpus(settings(folder, **changes))


def texts_of(source):
    return list(source.stream())


# ---- the documentation inside CPython ----


def make_library(folder, topics):
    (folder / "pydoc_data").mkdir(parents=True)
    (folder / "pydoc_data" / "topics.py").write_text(topics)
    (folder / "first.py").write_text(
        '"""First module.\n\nShared paragraph of\nboth.\n"""\n\nraise SystemExit\n\n\n'
        'def f():\n    """What f does."""\n\n\n'
        'class C:\n    """What C is."""\n\n    def m(self):\n        """Method m."""\n'
    )
    (folder / "second.py").write_text('"""Second module.\n\nShared paragraph of both.\n"""\n')
    (folder / "broken.py").write_text("def :\n")
    for skipped in ("test", "site-packages"):
        (folder / skipped).mkdir()
        (folder / skipped / "other.py").write_text('"""Never read."""\n')
    return folder


def test_cpython_corpus_is_topics_and_docstrings_without_repeated_paragraphs(tmp_path):
    library = make_library(tmp_path, "topics = {'b': 'Heading\\n*******\\n\\nWhat f does.\\n', 'a': 'Topic a.\\n'}\n")
    documents, description, _ = cpython_docs.read_cpython(library)
    assert documents == [
        "Topic a.",
        "Heading\n\nWhat f does.",
        "First module.\n\nShared paragraph of\nboth.\n\nWhat C is.\n\nMethod m.",
        "Second module.",
    ]
    assert "2 topics" in description and "2 modules" in description


@pytest.mark.parametrize(
    "quoted", [r"'One \"x\"\n\n\\d.\n'", r"'''One \"x\"\n\n\\d.\n'''", r"'One \"x\"\n' '\n\\d.\n'"]
)
def test_topics_are_the_same_in_every_format_of_the_file(tmp_path, quoted):
    file = tmp_path / "topics.py"
    file.write_text(f"# made by Sphinx\n\ntopics = {{'a': {quoted}}}\n")
    assert cpython_docs.read_topics(file) == ['One "x"\n\n\\d.\n']


def test_topics_of_this_interpreter_are_those_that_pydoc_shows():
    from pydoc_data import topics

    path = cpython_docs.Path(topics.__file__)
    assert cpython_docs.read_topics(path) == [topics.topics[name] for name in sorted(topics.topics)]


def test_python_without_sources_is_refused(tmp_path):
    with pytest.raises(UserError, match="comes without the sources"):
        cpython_docs.read_cpython(tmp_path)


# ---- files and folders ----


def test_blank_lines_end_documents_and_files_are_read_in_order(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "2.txt").write_text("three\n")
    (tmp_path / "1.txt").write_bytes(b"\n\none\nline two\n \n\n\r\ntwo\r\nlines\n\n")
    (tmp_path / "ignored.md").write_text("no")
    (tmp_path / ".hidden.txt").write_text("no")
    assert texts_of(opened(tmp_path, data=str(tmp_path)).sources[0]) == ["one\nline two", "two\nlines", "three"]
    assert list(readers.read_text_documents(tmp_path / "1.txt")) == ["one\nline two", "two\nlines"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_its_documents_in_order(tmp_path, kind):
    file = write_texts(tmp_path / f"some.{kind}")
    corpus = opened(tmp_path, data=str(file))
    assert texts_of(corpus.sources[0]) == TEXTS
    assert texts_of(corpus.sources[0]) == TEXTS  # again
    assert corpus.description == f"some.{kind} (1 {'text' if kind == 'txt' else kind} file)"
    json.dumps(corpus.sources[0].identity)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_documents_and_go_on_where_they_stood(tmp_path, kind, processes):
    for part in range(2):  # two files, so that they divide evenly among two processes and not among three
        write_texts(tmp_path / f"data/{part}.{kind}", TEXTS[part * 12 : part * 12 + 12])
    source = opened(tmp_path, data=str(tmp_path / "data")).sources[0]
    parts = [list(source.stream(index, processes)) for index in range(processes)]
    assert sorted(text for part in parts for text in part) == sorted(TEXTS)
    for index, part in enumerate(parts):
        assert len(part) >= len(TEXTS) // processes - 1
        for position in (0, 1, 5, len(part)):
            stream = source.stream(index, processes)
            documents = iter(stream)
            read = [next(documents) for _ in range(position)]
            state = json.loads(json.dumps(stream.state_dict()))
            resumed = source.stream(index, processes)
            resumed.load_state_dict(state)
            assert read + list(resumed) == part


def test_texts_that_pandas_takes_for_missing_ones_are_kept(tmp_path):
    texts = ["NA", "null", "a, b", 'quoted "x"', "two\nlines"]
    assert texts_of(opened(tmp_path, data=str(write_texts(tmp_path / "a.csv", texts))).sources[0]) == texts


def test_missing_texts_are_empty_ones(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert texts_of(opened(tmp_path, data=str(file)).sources[0]) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train.jsonl", "validation.jsonl"), {"train": [0], "validation": [1]}),
        (("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"),
         {"train": [0, 1], "test": [2]}),
        (("train/b.jsonl", "validation/a.jsonl"), {"train": [0], "validation": [1]}),
        (("train.jsonl", "validation_matched.jsonl", "unsupervised.jsonl"),
         {"train": [0], "validation_matched": [1], "unsupervised": [2]}),
        (("a.jsonl", "b/c.jsonl"), {"train": [0, 1]}),
    ],
)  # fmt: skip
def test_files_of_a_folder_belong_to_splits_by_their_names(tmp_path, names, splits):
    for number, name in enumerate(names):
        write_texts(tmp_path / "data" / name, [f"document {number}"])
    for split, numbers in splits.items():
        section = {"path": str(tmp_path / "data"), "split": split}
        assert texts_of(opened(tmp_path, data=[section]).sources[0]) == [f"document {number}" for number in numbers]
    default = opened(tmp_path, data=str(tmp_path / "data")).sources[0]
    assert texts_of(default) == [f"document {number}" for number in splits["train"]]
    with pytest.raises(UserError, match=rf"no split 'dev'\. Those that exist: {', '.join(sorted(splits))}\."):
        opened(tmp_path, data=[{"path": str(tmp_path / "data"), "split": "dev"}])


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
        assert [texts_of(source) for source in corpus.validation] == [expected]
        assert texts_of(corpus.sources[0]) == ["one", "two"]
        assert not any(corpus.is_held_out(text) for text in TEXTS)


def test_several_sources_have_weights_or_are_read_one_after_the_other(tmp_path):
    first, second = write_texts(tmp_path / "a.txt", TEXTS[:3]), write_texts(tmp_path / "b.csv", TEXTS[3:5], "body")
    sections = [{"path": str(first), "weight": 3}, {"path": str(second), "text_column": "body", "weight": 1}]
    weighted = opened(tmp_path, data=sections)
    assert weighted.weights == (0.75, 0.25) and [len(texts_of(source)) for source in weighted.sources] == [3, 2]
    assert weighted.description == "75.0% a.txt (1 text file); 25.0% b.csv (1 csv file)"
    joined = opened(tmp_path, data=[str(first), {"path": str(second), "text_column": "body"}])
    assert joined.weights == (1.0,) and texts_of(joined.sources[0]) == TEXTS[:5]
    stream = joined.sources[0].stream()
    read = list(islice(stream, 4))
    resumed = joined.sources[0].stream()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert read + list(resumed) == TEXTS[:5]


# ---- the Hub ----


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`org/texts` with splits and configurations, as the loader of `datasets` gives them; the calls."""
    files = {"train": str(write_texts(tmp_path / "hub/t.jsonl")), "test": str(write_texts(tmp_path / "hub/x.jsonl"))}
    calls = []

    def load_dataset_builder(name, config=None, **options):
        if name == "org/texts":
            calls.append((name, config))
            return datasets.load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "datasets"))
        return datasets.load_dataset_builder(name, config, **options)

    monkeypatch.setattr(corpora, "load_dataset_builder", load_dataset_builder)
    return calls


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_of_the_hub_is_downloaded_once_or_streamed(tmp_path, hub, streaming):
    section = {"path": "org/texts", "name": "20231101.en", "split": "test"}
    source = opened(tmp_path, data=[section], streaming=streaming).sources[0]
    assert hub == [("org/texts", "20231101.en")]
    assert source.description == "org/texts (20231101.en), split test"
    copies = list((tmp_path / "datasets").rglob("*.arrow"))
    assert not copies  # a look costs no download
    assert texts_of(source) == TEXTS
    assert bool(list((tmp_path / "datasets").rglob("*.arrow"))) == (not streaming)
    again = opened(tmp_path, data=[section], streaming=streaming).sources[0]
    assert again.identity == source.identity and texts_of(again) == TEXTS
    for index in range(2):
        assert list(source.stream(index, 2)) == TEXTS[index::2]


def test_mistakes_about_the_hub_name_what_exists(tmp_path, hub):
    with pytest.raises(UserError, match=r"org/texts.*train.*test"):
        opened(tmp_path, data=[{"path": "org/texts", "split": "dev"}])
    with pytest.raises(UserError, match=r"org/texts \(`data`\) has no column 'body'.*: number, text\."):
        opened(tmp_path, data="org/texts", text_column="body")
    unreachable = r"`data` is 'org/none': there is no such file or folder, and as a dataset of the Hub it cannot be"
    with pytest.raises(UserError, match=unreachable):
        opened(tmp_path, data="org/none")


# ---- mistakes ----


def bad_inputs(folder):
    """Names of mistakes, the keys that make them, and what the message must hold."""
    table, text = str(write_texts(folder / "a.jsonl")), str(write_texts(folder / "a.txt"))
    for name, content in {
        "latin.txt": "one\n\nfür".encode("latin-1"),
        "blank.txt": b" \n\n \n",
        "empty.txt": b"",
        "broken.parquet": b"PAR1 is all there is",
        "broken.jsonl": b'{"text": "one"}\n{"text": \n',
        "a.docx": b"x",
        "empty.jsonl": b"",
    }.items():
        (folder / name).write_bytes(content)
    write_texts(folder / "none.parquet", [])
    write_texts(folder / "blank.parquet", ["", "  "])
    write_texts(folder / "mixed/a.txt"), write_texts(folder / "mixed/b.csv")
    (folder / "nothing").mkdir()

    def path(name):
        return str(folder / name)

    return {
        "no such file": ({"data": path("c.jsonl")}, "no such file or folder"),
        "no such folder": ({"data": "texts"}, "no such file or folder"),
        "no such relative path": ({"data": "./a/b"}, "no such file or folder"),
        "column": ({"data": table, "text_column": "body"}, "no column 'body' (`text_column`). Those that exist: n"),
        "parquet column": ({"data": path("blank.parquet"), "text_column": "x"}, "Those that exist: number, text"),
        "not text": ({"data": table, "text_column": "number"}, "is not text, but int64"),
        "not UTF-8": ({"data": path("latin.txt")}, "latin.txt is not UTF-8 text"),
        "blank": ({"data": path("blank.txt")}, "holds no text: it is empty"),
        "empty": ({"data": path("empty.txt")}, "holds no text: it is empty"),
        "empty table": ({"data": path("none.parquet")}, "holds no text: it is empty"),
        "empty jsonl": ({"data": path("empty.jsonl")}, "empty.jsonl (`data`)"),
        "blank rows": ({"data": path("blank.parquet")}, "holds no text: 2 document(s), all blank"),
        "broken parquet": ({"data": path("broken.parquet")}, "broken.parquet (`data`) cannot be read"),
        "broken jsonl": ({"data": path("broken.jsonl")}, "broken.jsonl (`data`) cannot be read"),
        "ending": ({"data": path("a.docx")}, "Endings that can: .txt, .jsonl"),
        "nothing": ({"data": path("nothing")}, "holds no file that can be read"),
        "mixed": ({"data": path("mixed")}, "mixes files of several kinds: .csv, .txt"),
        "no entries": ({"data": []}, "empty list"),
        "entry": ({"data": [3]}, "neither a name nor a section"),
        "key": ({"data": [{"path": text, "wieght": 1}]}, "unknown key `wieght`. Did you mean `weight`?"),
        "no path": ({"data": [{"weight": 1}]}, "needs a `path`"),
        "weight": ({"data": [{"path": text, "weight": -1}]}, "must be a number above 0"),
        "split type": ({"data": [{"path": text, "split": 3}]}, "`split` of"),
        "some weights": ({"data": [{"path": text, "weight": 1}, table]}, "give every source a `weight`, or none"),
        "split of a file": ({"data": text, "validation": "validation"}, "has no split 'validation'"),
        "split of cpython": ({"data": "cpython", "validation": "test"}, "`cpython` (`validation`) has no splits"),
        "no validation": ({"data": text, "validation": path("c.txt")}, "`validation` is"),
        "validation is data": ({"data": text, "validation": text}, "is text that `data` trains on"),
    }  # fmt: skip


def test_mistakes_are_told_when_the_corpus_is_opened(tmp_path):
    for name, (changes, message) in bad_inputs(tmp_path / "bad").items():
        with pytest.raises(UserError) as error:
            opened(tmp_path, **changes)
        assert message in str(error.value), name


def test_the_byte_that_is_not_utf8_is_named_wherever_it_is(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\n\ntwo\nthree " + "ü".encode("latin-1") + b"\n")
    with pytest.raises(UserError, match="at byte 15"):
        list(readers.read_text_documents(file))


# ---- which documents ----


def test_held_out_documents_follow_from_text_and_seed(tmp_path):
    corpus = opened(tmp_path, data=str(write_texts(tmp_path / "a.txt")), held_out_fraction=0.1)
    documents = [f"document {number}" for number in range(5000)]
    held_out = {text for text in documents if corpus.is_held_out(text)}
    assert abs(len(held_out) / 5000 - 0.1) < 0.017  # four standard deviations
    random.Random(0).shuffle(documents)
    assert {text for text in documents if corpus.is_held_out(text)} == held_out
    more = opened(tmp_path, data=str(tmp_path / "a.txt"), held_out_fraction=0.2)
    assert all(more.is_held_out(text) for text in held_out)
    other = opened(tmp_path, data=str(tmp_path / "a.txt"), held_out_fraction=0.1, seed=1)
    assert len(held_out & {text for text in documents if other.is_held_out(text)}) < 100
    assert {corpus.side_of(text) for text in held_out} == {"held_out"}


def test_documents_for_the_tokenizer_are_training_documents_from_the_whole_corpus(tmp_path):
    texts = [f"{number:03d} " + "x" * 96 for number in range(400)]
    write_texts(tmp_path / "a.txt", texts)
    corpus = opened(tmp_path, data=str(tmp_path / "a.txt"), held_out_fraction=0.1)
    training = [text for text in texts if not corpus.is_held_out(text)]
    assert list(corpus.training_documents()) == training
    some = list(corpus.training_documents(limit=10_000))
    assert 2_500 <= sum(map(len, some)) <= 10_000
    assert some == [text for text in training if text in set(some)]
    assert min(sum(text[0] == digit for text in some) for digit in "0123") >= 5  # from every quarter
    streamed = opened(tmp_path, data=str(tmp_path / "a.txt"), held_out_fraction=0.1, streaming=True)
    assert list(streamed.training_documents(limit=10_000)) == training[:100]


def test_documents_for_the_tokenizer_follow_the_weights(tmp_path):
    first, second = write_texts(tmp_path / "a.txt", ["a" * 100] * 99), write_texts(tmp_path / "b.txt", ["b" * 100] * 99)
    sections = [{"path": str(first), "weight": 4}, {"path": str(second), "weight": 1}]
    corpus = opened(tmp_path, data=sections, streaming=True, held_out_fraction=1e-9)
    documents = list(corpus.training_documents(limit=5000))
    assert [text[0] for text in documents] == ["a"] * 40 + ["b"] * 10


def test_one_endless_document_is_no_less_than_itself():
    assert corpora.spread_documents(iter(["x" * 50]), 10) == ["x" * 50]
    assert list(readers.CountedStream(["a", "b", "c"], 1, 2)) == ["b"]
