"""ListOps follows its specification, caches survive kills, and data are reported under their real names."""

import io
from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, Features, Image, Value
from lra import cache
from lra.cache import digests, generated
from lra.listops import CLOSE, VOCAB_SIZE, ListOps, text
from lra.tasks import BYTES_VOCABULARY, load_task
from PIL import Image as Picture
from reference.listops import arguments, depth, evaluate, expressions
from scipy import stats

from luna_hf.scripting import UserError

PUBLISHED = ListOps()
SMALL = replace(PUBLISHED, max_depth=6, max_arguments=5, min_length=20, max_length=120)
UNLIKELY = 1e-3  # of a statistic under the specification; seeds are fixed


def drawn(spec, count, seed=0):
    """Written expressions and their values."""
    rows = islice(spec.draw(np.random.default_rng(seed)), count)
    return [(text(ids), value) for ids, value in rows]


@pytest.fixture(scope="module")
def rows():
    return drawn(PUBLISHED, 500)


# ---- ListOps ----


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 3 4 ]", 3),
        ("[MED 9 0 5 ]", 5),
        ("[SM 9 8 [MED 1 2 8 9 ] ]", 2),
    ],
)
def test_the_evaluator_knows_the_operators(words, value):
    assert evaluate(words) == value


def test_values_are_what_an_evaluator_finds(rows):
    for words, value in [*rows, *drawn(SMALL, 2000)]:
        assert evaluate(words) == value


def test_expressions_keep_to_the_published_limits(rows):
    assert ListOps(10, 10, 0.25, 500, 2000) == PUBLISHED
    lengths = [len(words.split()) for words, _ in rows]
    assert min(lengths) > 500 and max(lengths) < 2000
    assert max(depth(words) for words, _ in rows) == 10
    counts = np.bincount(np.concatenate([arguments(words)[:-1] for words, _ in rows]))
    assert counts[:2].sum() == 0 and len(counts) == 11 and counts[2:].all()


def test_digits_and_operators_are_uniform(rows):
    """Which trees are kept depends on their shape alone."""
    words = np.array(" ".join(words for words, _ in rows).split())
    for kinds in (list("0123456789"), ["[MIN", "[MAX", "[MED", "[SM"]):
        assert stats.chisquare([np.sum(words == kind) for kind in kinds]).pvalue > UNLIKELY


@pytest.mark.parametrize(("spec", "count"), [(SMALL, 1500), (PUBLISHED, 80)], ids=["small", "published"])
def test_shapes_are_those_of_a_literal_generator(spec, count):
    reference = list(islice(expressions(Random(0), spec), count))
    own = [words for words, _ in drawn(spec, 4 * count)]
    for measure in (
        lambda words: len(words.split()),
        depth,
        lambda words: np.mean(arguments(words)[:-1]),
        lambda words: words.count("[") / len(words.split()),
        evaluate,
        lambda words: arguments(words)[-2],  # of the root
    ):
        both = [[measure(words) for words in sample] for sample in (own, reference)]
        assert stats.ks_2samp(*both).pvalue > UNLIKELY


def test_expressions_follow_from_the_seed():
    assert drawn(SMALL, 20) == drawn(SMALL, 20) != drawn(SMALL, 20, seed=1)


# ---- cache ----

COLUMNS = {"input_ids": "int16"}
ROWS = {"train": 60, "validation": 20, "test": 15}


def numbers(generator):
    """Rows of which many are equal."""
    while True:
        number = generator.integers(1, 120)
        yield np.array([number, 5], np.int16)[: 1 + number % 2], int(number % 3)


def content(splits):
    return {split: split_rows.to_list() for split, split_rows in splits.items()}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(cache, "_PART", 10)


def make(folder, draw=numbers, rows=ROWS, seed=0, **parameters):
    return content(generated(folder, "numbers", parameters, draw, rows, COLUMNS, seed))


def test_no_row_is_repeated(tmp_path, small_parts):
    splits = make(tmp_path)
    assert {split: len(found) for split, found in splits.items()} == ROWS
    everything = [tuple(row["input_ids"]) for found in splits.values() for row in found]
    assert len(set(everything)) == len(everything) == sum(ROWS.values())
    assert all(row["label"] == row["input_ids"][0] % 3 for row in splits["train"])


def test_a_cache_is_made_once_for_what_it_depends_on(tmp_path, small_parts):
    def never(generator):
        raise AssertionError("drawn again")

    first = make(tmp_path, size=1)
    assert make(tmp_path, never, size=1) == first
    for changed in ({"size": 2}, {"size": 1, "seed": 1}, {"size": 1, "rows": {**ROWS, "train": 10}}):
        with pytest.raises(AssertionError):
            make(tmp_path, never, **changed)


def test_test_rows_do_not_depend_on_the_number_of_training_rows(tmp_path, small_parts):
    assert make(tmp_path)["test"] == make(tmp_path, rows={**ROWS, "train": 5})["test"]


@pytest.mark.parametrize("draws", [7, 33, 94])
def test_a_killed_generation_continues(tmp_path, small_parts, draws):
    """What is on disk stays, and the rest becomes what it would have been."""
    left = iter(range(draws))

    def killed(generator):
        for row in numbers(generator):
            if next(left, None) is None:
                raise KeyboardInterrupt
            yield row

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "killed", killed)
    (folder,) = (tmp_path / "killed").glob("numbers-*")
    assert not (folder / "files.json").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.arrow")}
    assert len(before) <= draws // 10 and bool(before) == (draws > 20)
    assert make(tmp_path / "killed") == make(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert not list(folder.glob(".*"))


def test_a_damaged_cache_is_made_anew(tmp_path, small_parts, capsys):
    first = make(tmp_path)
    path = next(tmp_path.rglob("train-000010.arrow"))
    path.write_bytes(path.read_bytes()[:-100])
    assert make(tmp_path) == first
    assert path.name in capsys.readouterr().err


def test_two_processes_do_not_generate_the_same(tmp_path, small_parts):
    def nested(generator):
        make(tmp_path)
        yield from numbers(generator)

    with pytest.raises(UserError, match="numbers-"):
        make(tmp_path, nested)


# ---- tasks ----

FEW = {"train": 12, "validation": 6, "test": 6}


@pytest.mark.parametrize(
    ("name", "column", "labels", "length", "vocabulary"),
    [("listops", "input_ids", 10, 2000, VOCAB_SIZE), ("pathfinder", "pixel_values", 2, 1024, 256)],
)
def test_generated_tasks(tmp_path, name, column, labels, length, vocabulary):
    task, splits = load_task(name, None, tmp_path, FEW)
    assert (task.name, task.num_labels, task.max_length, task.vocab_size) == (name, labels, length, vocabulary)
    assert {split: len(found) for split, found in splits.items()} == FEW
    keys = [key for found in splits.values() for key in digests(found, [column])]
    assert len(set(keys)) == len(keys)
    for row in splits["test"]:
        assert len(row[column]) <= length and max(row[column]) < vocabulary and row["label"] < labels
        if name == "listops":
            assert evaluate(text(row[column])) == row["label"] and row[column][-1] == CLOSE
        else:
            assert len(row[column]) == length and max(row[column]) == 255
    assert "generated" in task.source and "train 12" in task.source and "published" in task.source
    assert content(load_task(name, "anything", tmp_path, FEW)[1]) == content(splits)


def test_listops_is_cut(tmp_path):
    task, splits = load_task("listops", None, tmp_path, FEW, max_length=100)
    whole = load_task("listops", None, tmp_path, FEW)[1]
    assert task.max_length == 100 and "cut to 100" in task.source
    assert splits["test"]["input_ids"][:] == [ids[:100] for ids in whole["test"]["input_ids"]]


def write(folder, split, **columns):
    folder.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")


@pytest.fixture
def reviews(tmp_path):
    """50 training rows, of which ten are equal, and 20 to test."""
    texts = [f"Review {number}: schön" for number in range(40)] + ["The same."] * 10
    write(tmp_path / "reviews", "train", text=texts, label=[number % 2 for number in range(50)])
    write(tmp_path / "reviews", "test", text=[f"Test {number}" for number in range(20)], label=[0, 1] * 10)
    return tmp_path / "reviews"


def decode(ids):
    return bytes(token - 1 for token in ids).decode(errors="replace")


def test_text_is_read_as_bytes(reviews, tmp_path):
    task, splits = load_task("text", reviews, tmp_path, max_length=12)
    assert (task.inputs, task.vocab_size, task.max_length, task.num_labels) == ("tokens", BYTES_VOCABULARY, 12, 2)
    assert {decode(ids) for ids in splits["test"]["input_ids"]} == {f"Test {number}" for number in range(20)}
    assert all(min(ids) > 0 and len(ids) <= 12 for ids in splits["train"]["input_ids"])
    write(reviews, "test", text=["schön"], label=[1])
    ids = load_task("text", reviews, tmp_path)[1]["test"][0]["input_ids"]
    assert ids == [byte + 1 for byte in "schön".encode()]


def test_validation_rows_are_held_out_of_the_training_rows(reviews, tmp_path):
    task, splits = load_task("text", reviews, tmp_path)
    train, validation = ({decode(ids) for ids in splits[split]["input_ids"]} for split in ("train", "validation"))
    assert len(splits["train"]) == 45 and len(splits["validation"]) == len(validation) == 5 and not train & validation
    assert len(splits["test"]) == 20
    for words in ("a subset of IMDB", "train 50 of 25,000", "test 20 of 25,000", "held out", "read from reviews:"):
        assert words in task.source
    assert content(load_task("text", reviews, tmp_path)[1]) == content(splits)


def test_fewer_rows_are_drawn(reviews, tmp_path):
    whole = content(load_task("text", reviews, tmp_path)[1])
    task, splits = load_task("text", reviews, tmp_path, {"train": 7, "test": 3})
    assert {split: len(found) for split, found in splits.items()} == {"train": 7, "validation": 5, "test": 3}
    assert all(row in whole[split] for split, found in content(splits).items() for row in found)
    assert "train 7, validation 5, test 3 rows" in task.source
    with pytest.raises(UserError, match="45"):
        load_task("text", reviews, tmp_path, {"train": 46})


@pytest.mark.parametrize("column", ["pixels", "img"])
def test_images_are_read_in_grey(tmp_path, column):
    levels = np.random.default_rng(0).integers(0, 256, (20, 1024), dtype=np.uint8)
    for split, part in (("train", levels[:15]), ("test", levels[15:])):
        labels = list(range(len(part)))
        if column == "pixels":
            write(tmp_path / "images", split, pixels=part.tolist(), label=[label % 10 for label in labels])
            continue
        pictures = [{"bytes": png(image.reshape(32, 32)), "path": None} for image in part]
        rows = {"img": pictures, "label": [label % 10 for label in labels]}
        (tmp_path / "images").mkdir(exist_ok=True)
        Dataset.from_dict(rows, Features({"img": Image(), "label": Value("int64")})).to_parquet(
            tmp_path / "images" / f"{split}.parquet"
        )
    task, splits = load_task("image", tmp_path / "images", tmp_path)
    assert (task.inputs, task.vocab_size, task.max_length, task.num_labels) == ("pixels", 256, 1024, 10)
    assert "a subset of CIFAR-10" in task.source
    assert splits["test"]["pixel_values"][:] == levels[15:].tolist()
    assert len(splits["train"]) == 13 and len(splits["validation"]) == 2


def png(image):
    file = io.BytesIO()
    Picture.fromarray(np.stack([image] * 3, -1)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def pairs(tmp_path):
    folder = tmp_path / "pairs" / "tsv_data"
    folder.mkdir(parents=True)
    for part in ("train", "eval", "test"):
        lines = [f'{number % 2}.0\tP{number}\tQ\t{part} "{number}\tother {number} {"x" * 50}' for number in range(6)]
        (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder.parent


def test_pairs_are_read_from_the_published_tables(pairs, tmp_path):
    task, splits = load_task("retrieval", pairs, tmp_path / "cache", max_length=20)
    assert (task.inputs, task.vocab_size, task.max_length, task.num_labels) == ("pairs", BYTES_VOCABULARY, 20, 2)
    row = splits["validation"][3]
    assert decode(row["input_ids"]) == 'eval "3' and decode(row["input_ids_2"]) == "other 3 " + "x" * 12
    assert splits["train"]["label"][:] == [0, 1] * 3
    assert "AAN" in task.source and "held out" not in task.source
    (folder,) = (tmp_path / "cache").glob("retrieval-*")
    before = folder.stat().st_mtime_ns
    assert content(load_task("retrieval", pairs, tmp_path / "cache", max_length=20)[1]) == content(splits)
    assert folder.stat().st_mtime_ns == before
    assert len(load_task("retrieval", pairs, tmp_path / "cache")[1]["train"]["input_ids_2"][0]) == 58


@pytest.mark.parametrize("line", ["1.0\tA\tB\tone text", "yes\tA\tB\tone\ttwo"])
def test_a_wrong_table_is_named_and_leaves_nothing(pairs, tmp_path, line):
    with (pairs / "tsv_data" / "new_aan_pairs.eval.tsv").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="Line 7"):
        load_task("retrieval", pairs, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_errors_name_what_is_wrong(reviews, tmp_path):
    def refused(match, *arguments, **options):
        with pytest.raises(UserError, match=match):
            load_task(*arguments, tmp_path, **options)

    refused("1,024", "pathfinder", None, max_length=100)
    refused("new_aan_pairs.train.tsv", "retrieval", None)
    refused("new_aan_pairs.train.tsv", "retrieval", reviews)
    refused("nowhere", "retrieval", "nowhere/none")
    refused("nowhere", "text", "nowhere/none")
    refused("column `pixels`", "image", reviews)
    write(reviews, "test", text=["one"], label=[2])
    refused("label 2", "text", reviews)
    (reviews / "test.parquet").unlink()
    refused("'test'", "text", reviews)
    write(reviews, "train", pixels=[[0] * 900], label=[1])
    write(reviews, "test", pixels=[[0] * 900], label=[1])
    refused("900", "image", reviews)
