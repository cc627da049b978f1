"""Files that a library would misread or report obscurely: pretraining and finetuning refuse them alike."""

import re

import pyarrow
import pyarrow.parquet
import pytest
from data.corpus import open_corpus
from helpers import refused
from tasks.files import load_splits, read_files, require_text
from tasks.labels import read_labels
from tiny_data import TEXTS, settings, write_texts

from luna_hf.scripting import UserError


def finetuning(path):
    rows = read_files([path])
    require_text(rows, "text", str(path))
    return list(rows["text"])


def pretraining(path):
    (source,) = open_corpus(settings(path.parent, data=str(path))).sources
    return list(source.stream())


READERS = pytest.mark.parametrize("read", [finetuning, pretraining])
LONG = b"".join(b'{"text": "%d", "number": 1}\n' % number for number in range(9_000))  # beyond the first look
BAD = {
    "twice.csv": (b"text,number,text\na,1,b\n", ["'text' twice"]),
    "twice.tsv": (b"\xef\xbb\xbftext\ttext\na\tb\n", ["'text' twice"]),
    "ragged.csv": (b"text,number\na,1,x\nb,2,y\n", ["2 columns", "3 values"]),
    "latin.csv": ("text,number\nfür,1\n".encode("latin-1"), ["UTF-8", "byte 13", "iconv"]),
    "latin.jsonl": ('{"text": "für"}\n'.encode("latin-1"), ["UTF-8", "byte 11", "iconv"]),
    "utf-16.csv": ("text,number\nfür,1\n".encode("utf-16"), ["UTF-8", "UTF-16"]),
    "late.jsonl": (LONG + '{"text": "für"}\n'.encode("latin-1"), ["UTF-8"]),
    **{f"none.{kind}": (b"", ["empty"]) for kind in ("parquet", "csv", "jsonl")},
    "header.csv": (b"text,label\n", ["holds no "]),
    "kinds.jsonl": (b'{"text": "a"}\n{"text": {"x": 1}}\n', []),
    "keys.jsonl": (b'{"text": "%s"}\n' % (b"a" * 1000) * 11_000 + b'{"other": 1}\n' * 1_000_000, ["other columns"]),
}


@pytest.mark.parametrize(
    ("name", "read"),
    # Pretraining reads no .tsv.
    [(name, read) for name in BAD for read in (finetuning, pretraining) if (read, name[-4:]) != (pretraining, ".tsv")],
)
def test_a_bad_file_is_named(name, read, tmp_path):
    content, named = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read(tmp_path / name)
    message = str(raised.value)
    assert not [word for word in (name, *named) if word not in message], message
    assert not re.search(r"codec|arrow|Json|StopIteration|\n", message)


def test_a_bad_text_file_and_a_bad_parquet_file_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("a\n\nfür\n".encode("latin-1"))
    with refused("latin.txt", "byte 4", "iconv", error=UserError):
        pretraining(tmp_path / "latin.txt")
    table = pyarrow.table([pyarrow.array([{"x": 1}])], names=["text"])
    pyarrow.parquet.write_table(table, tmp_path / "struct.parquet")
    with refused("struct.parquet", "Row 0", "{'x': 1}", "`text`", error=UserError):
        finetuning(tmp_path / "struct.parquet")


def test_labels_of_several_types_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"label": 1}\n{"label": "one"}\n')
    with refused("`label`", "int, str", error=UserError):
        read_labels({"train": read_files([tmp_path / "a.jsonl"])}, "label")


@READERS
@pytest.mark.parametrize("name", ["A.CSV", "A.PARQUET"])
def test_endings_in_any_case(name, read, tmp_path):
    write_texts(tmp_path / name.lower()).rename(tmp_path / name)
    assert read(tmp_path / name) == TEXTS


def test_splits_with_endings_in_any_case(tmp_path):
    for split in ("train", "validation"):
        write_texts(tmp_path / f"{split}.csv").rename(tmp_path / f"{split}.CSV")
    assert {split: len(rows) for split, rows in load_splits(str(tmp_path)).items()} == {"train": 23, "validation": 23}


MISSING = {
    "a.csv": b'text,number\none,1\n,2\n"",3\ntwo,4\n',
    "a.jsonl": b'{"text": "one"}\n{"text": null}\n{"number": 3}\n{"text": "two"}\n',
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_texts_are_refused_in_finetuning_and_counted_in_pretraining(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(MISSING[name])
    with refused("Row 1", name, "`text`", error=UserError):
        finetuning(tmp_path / name)
    capsys.readouterr()
    for _ in range(2):  # said once, though read twice
        assert [text for text in pretraining(tmp_path / name) if text] == ["one", "two"]
    assert capsys.readouterr().err.count("2 of 4 rows") == 1


def test_an_empty_text_is_a_text_where_the_format_can_tell(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\n')
    assert finetuning(tmp_path / "a.jsonl") == ["one", ""]


def test_a_resumed_stream_counts_nothing(tmp_path, capsys):
    (tmp_path / "b.csv").write_bytes(MISSING["a.csv"] + b"three,5\n" * 20)
    (source,) = open_corpus(settings(tmp_path, data=str(tmp_path / "b.csv"))).sources
    assert "2 of 24 rows" in capsys.readouterr().err
    stream = source.stream()
    next(iter(stream))
    other = source.stream()
    other.load_state_dict(stream.state_dict())
    assert len(list(other)) == 23
    assert "rows" not in capsys.readouterr().err
