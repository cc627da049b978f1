"""Files that a library would misread or report obscurely: pretraining and finetuning refuse them alike."""

import json
import re
from contextlib import nullcontext

import pyarrow
import pyarrow.parquet
import pytest
from common.tables import read_table, require_text
from data.corpus import open_corpus
from datasets import ClassLabel, Dataset, Features
from helpers import refused
from tasks.files import load_splits
from tasks.labels import numbers_of_tables, read_labels
from tiny_data import TEXTS, settings, write_texts

from luna_hf.scripting import UserError


def finetuning(path):
    rows = read_table([path])
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
    "long.csv": (b"text,number\na,1\nb\nc,3\n", ["2 columns", "line 3 has 1 values"]),
    "long.tsv": (b"text\tnumber\na\t1\nb\t1\t2\n", ["2 columns", "line 3 has 3 values"]),
    "gap.csv": (b"text,number\na,1\n\nb,2\n\n", ["line 3 has 0 values"]),
    "open.csv": (b'text,number\na,1\n"b,2\nc,3\n', ["line 3", "quotes"]),
    "behind.csv": (b'text,number\n"a"b,1\n', ["line 2", "quotes"]),
    "nameless.csv": (b"\ntext\na\n", ["names of the columns"]),
    "old.tsv": (b"text\tnumber\ra\t1\rb\t2\r", ["CR alone", "tr "]),
    "keys.jsonl": (b'{"text": "a", "text": "b"}\n', ["line 1", "twice"]),
    "values.jsonl": (b'{"text": "a"}\n7\n', ["line 2 is 7", "object per line"]),
    "half.jsonl": (b'{"text": "\\ud83d"}\n', ["line 1", "surrogate"]),
    "folded.json": (b'{\n"text": ["a"]}\n', ["line 1", "object per line"]),
    "packed.jsonl.gz": (b"\x1f\x8b", ["compressed", "Unpack"]),
    "deep.jsonl": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["line 1", "nested"]),
    "numbered.csv": (b"text,Unnamed: 2,\na,1,2\n", ["'Unnamed: 2' twice"]),
    "kinds.jsonl": (b'{"text": "a"}\n{"text": {"x": 1}}\n', []),
}


@READERS
@pytest.mark.parametrize("name", BAD)
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


@READERS
def test_a_column_of_parquet_that_comes_twice_is_named(read, tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with refused("a.parquet", "'text' twice", error=UserError):
        read(tmp_path / "a.parquet")


def test_whole_numbers_beyond_64_bits_keep_their_digits(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"label": 123456789012345678901, "n": 2}\n{"label": 9223372036854775808, "n": -1}\n'
    )
    rows = read_table([tmp_path / "a.jsonl"])
    assert list(rows["label"]) == ["123456789012345678901", "9223372036854775808"] and list(rows["n"]) == [2, -1]


def test_labels_of_several_types_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"label": 1}\n{"label": "one"}\n')
    with refused("`label`", "int, str", error=UserError):
        read_labels({"train": read_table([tmp_path / "a.jsonl"])}, "label")


ODD = ["007", "1e5", "True", "null", "NA", "inf", "2026-01-02", "1_000", '"open', 'a 6" board', "\u2028 and \x0c"]


@READERS
@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_text_is_the_text_that_stands_in_the_file(kind, end, start, read, tmp_path):
    path = tmp_path / "a[b]*?{1,2}" / f"**.{kind}"
    path.parent.mkdir()
    if kind == "parquet":
        write_texts(path, ODD)
    elif kind in ("csv", "tsv"):
        quoted = [text if kind == "tsv" or '"' not in text[:1] else '"' + text.replace('"', '""') + '"' for text in ODD]
        lines = ["text\tn", *(f"{text}\t1" for text in quoted), ""]
        path.write_text(start + end.join(lines).replace("\t", "," if kind == "csv" else "\t") + end, newline="")
    else:
        rows = [json.dumps({"text": text}) for text in ODD]
        text = f"{end}[{', '.join(rows)}]" if kind == "json" else end.join([*rows, "", ""])
        path.write_text(start + text, newline="")
    assert read(path) == ODD


@READERS
def test_breaks_inside_of_fields_are_kept(read, tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text\r\n"a ""b"", c\r\nd"\r\n')
    (tmp_path / "a.tsv").write_bytes(b"text\ta\na\rb\t1\n")
    (tmp_path / "b.csv").write_text(f"text\n{'a' * 200_000}\n")
    assert [read(tmp_path / name) for name in ("a.csv", "a.tsv")] == [['a "b", c\r\nd'], ["a\rb"]]
    assert len(read(tmp_path / "b.csv")[0]) == 200_000


def test_other_columns_may_hold_anything(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1}\n{"text": "b", "id": "x", "more": [1, "y"]}\n')
    assert finetuning(tmp_path / "a.jsonl") == ["a", "b"]
    (tmp_path / "a.csv").write_text(",text\n0,a\n")  # pandas' index
    assert read_table([tmp_path / "a.csv"]).column_names == ["Unnamed: 0", "text"]


@pytest.mark.parametrize(
    ("train", "other", "found"),
    [
        ("0 1", "1 0", [[0, 1], [1, 0]]),
        ("0.5 1", "2 3", [[0.5, 1.0], [2, 3]]),
        ("1.0 2.0", "1 2", [[1.0, 2.0], [1, 2]]),
        ("007 010", "007 010", [["007", "010"]] * 2),
        ("1e5 2E3", "1e5 2E3", [["1e5", "2E3"]] * 2),
        ("12345678901234567890 2", "2 2", [["12345678901234567890", "2"], ["2", "2"]]),
        ("1 x", "1 1", [["1", "x"], ["1", "1"]]),
        ("True False", "True True", [["True", "False"], ["True", "True"]]),
        ("0 1", "1 high", [[0, 1], ["1", "high"]]),
        ("-1.5 +1e-3", ".5 7.", [[-1.5, 0.001], [0.5, 7.0]]),
        ("0 1", "1_0 1", [[0, 1], ["1_0", "1"]]),
        ("12 1\u0662", "12 1", [["12", "1\u0662"], ["12", "1"]]),
    ],
)
def test_labels_of_tables_are_numbers_if_those_of_the_training_data_are(train, other, found, tmp_path):
    for name, texts in {"train.csv": train, "other.tsv": other}.items():
        (tmp_path / name).write_text("\n".join(["label", *texts.split()]) + "\n")
    splits = {name: read_table([tmp_path / name]) for name in ("train.csv", "other.tsv")}
    assert [list(rows["label"]) for rows in numbers_of_tables(splits, "label").values()] == found


def test_texts_of_parquet_that_are_not_utf8_are_refused(tmp_path):
    texts = pyarrow.array([b"a\xff", b"b"])
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, texts.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with refused("a.parquet", "UTF8", error=UserError):
        read_table([tmp_path / "a.parquet"])


def test_classes_are_no_numbers(tmp_path):
    for names, is_refused in ((["5", "4", "3"], True), (["0", "1", "2"], False)):
        rows = Dataset.from_dict({"label": [0, 1, 2]}, Features({"label": ClassLabel(names=names)}))
        with refused("`label` of train", names[0], error=UserError) if is_refused else nullcontext():
            assert read_labels({"train": rows}, "label", ()).encode([2]) == [2.0]


def test_inferred_labels_of_the_hub_stay_numbers():
    rows = Dataset.from_dict({"label": [0, 1]})
    rows.info.builder_name = "csv"
    assert numbers_of_tables({"train": rows}, "label")["train"] is rows


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (["train.csv", "train.jsonl"], "several files.*train.csv, train.jsonl"),
        (["train.csv", "train-00000-of-00001.csv"], "several files"),
        (["train-00000-of-00003.csv", "train-00002-of-00003.csv"], "lacks part 1"),
        (["train.csv.gz"], "compressed"),
    ],
)
def test_splits_that_are_not_one_table_are_refused(names, value, tmp_path):
    for name in names:
        (tmp_path / name).write_text("text\na\n")
    with pytest.raises(UserError, match=value):
        load_splits(str(tmp_path))


def test_parts_with_other_columns_are_refused(tmp_path):
    for number, name in enumerate(("text", "label")):
        (tmp_path / f"train-0000{number}-of-00002.csv").write_text(f"{name}\na\n")
    with refused("train-00001", "columns label", "text", error=UserError):
        load_splits(str(tmp_path))


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
