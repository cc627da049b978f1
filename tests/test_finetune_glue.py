"""GLUE and own data: tasks, labels, predictions, the finished folder in a pipeline, and what is refused."""

import re

import numpy as np
import pytest
import torch
from common.tables import read_table
from datasets import ClassLabel, Dataset, Features, List
from helpers import randomise
from helpers import refused as refused_error
from huggingface_hub import ModelCard
from tasks import classification
from tasks.files import load_splits
from tasks.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL, order_of, read_labels
from tasks.trainer import FinetuneTrainer
from tiny_finetuning import PLAIN, command, glue_folder, refused, run, tokenizer, topics, write_rows
from transformers import AutoConfig, AutoModelForSequenceClassification, RobertaConfig, pipeline

from luna_hf.scripting import UserError

TASKS = classification.TASKS


def answers(folder, name="test"):
    """The second column of a file of predictions."""
    return [row.split("\t")[1] for row in (folder / "predictions" / f"{name}.tsv").read_text().splitlines()[1:]]


# ---- the tasks of GLUE ----

METRICS = {
    "mnli": {"accuracy"},
    "stsb": {"pearson", "spearmanr", "mean"},
}


@pytest.mark.parametrize("task", list(METRICS))
def test_task_of_glue(task, luna, tmp_path):
    data = glue_folder(tmp_path / task, task, rows=18)
    summary = run(luna, tmp_path / "out", task_name=task, dataset_name=data, num_train_epochs=1, learning_rate=1e-4)
    spec, scores = TASKS[task], summary["runs"][0]["scores"]
    assert list(scores) == list(spec.development)  # the test splits have no labels
    assert all(set(part) == METRICS[task] for part in scores.values())
    assert summary["development"] == spec.development[0]
    assert summary["main_metric"] == ("mean" if "mean" in METRICS[task] else "accuracy")
    if "mean" in METRICS[task]:
        first, second = (value for name, value in scores["validation"].items() if name != "mean")
        assert scores["validation"]["mean"] == pytest.approx((first + second) / 2)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    if task == "stsb":
        assert (config.problem_type, config.num_labels) == (REGRESSION, 1)
    else:
        assert (config.id2label, config.problem_type) == (dict(enumerate(spec.labels)), SINGLE_LABEL)

    files = sorted(path.name for path in (tmp_path / "out" / "predictions").iterdir())
    assert files == sorted(f"{name}.tsv" for name in spec.answers)
    allowed = "|".join(spec.labels if spec.named else map(str, range(len(spec.labels)))) or r"[0-5]\.\d{3}"
    for name in files:
        text = (tmp_path / "out" / "predictions" / name).read_text()
        rows = "".join(rf"{index}\t({allowed})\n" for index in range(6))
        assert re.fullmatch(rf"index\tprediction\n{rows}", text)


def test_labels_and_answer_files_are_those_of_the_hub_and_the_leaderboard():
    assert {task: spec.answers[0] for task, spec in TASKS.items()} == {
        **{"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "qqp": "QQP", "stsb": "STS-B", "mnli": "MNLI-m"},
        **{"qnli": "QNLI", "rte": "RTE", "wnli": "WNLI"},
    }
    assert {task for task, spec in TASKS.items() if spec.named} == {"mnli", "qnli", "rte"}
    assert TASKS["mnli"].labels == ("entailment", "neutral", "contradiction")
    assert TASKS["rte"].labels == TASKS["qnli"].labels == ("entailment", "not_entailment")
    assert TASKS["wnli"].labels == ("not_entailment", "entailment")
    metrics = {"cola": ("matthews_correlation",), "stsb": ("pearson", "spearmanr")}
    metrics |= dict.fromkeys(("mrpc", "qqp"), ("accuracy", "f1"))
    assert {task: spec.metrics for task, spec in TASKS.items() if spec.metrics != ("accuracy",)} == metrics


def test_scores_of_stsb_are_written_from_0_to_5(tmp_path):
    data = glue_folder(tmp_path / "stsb", "stsb", rows=9)
    task = classification.TextClassification(
        classification.GlueArguments(["m"], task_name="stsb", dataset_name=str(data))
    )
    path = task.write_predictions(tmp_path, "test", np.array([[7.0], [-1.0], [2.5]]))
    assert path.read_text().split()[2:] == ["0", "5.000", "1", "0.000", "2", "2.500"]


# ---- own data ----


def test_own_classes_are_learnt_and_predicted_as_a_pipeline_does(luna, tmp_path, monkeypatch, capsys):
    texts, labels = topics(200, classes=3)
    names = [["canine", "feline", "other"][label] for label in labels]
    folder = tmp_path / "film reviews"
    for split, rows in (("train", slice(0, 120)), ("validation", slice(120, 150)), ("test", slice(150, 200))):
        write_rows(folder / f"{split}.csv", {"body": texts[rows], "kind": names[rows]})
    monkeypatch.chdir(tmp_path)
    files = {f"{split}_file": f"film reviews/{split}.csv" for split in ("train", "validation", "test")}
    learn = {"num_train_epochs": 10, "learning_rate": 1e-2, "dropout": 0.05, **PLAIN}
    fields = {"model_config": ["classifier_pooling=mean"], "text_columns": ["body"], "label_column": "kind"}
    summary = run(luna, tmp_path / "out", **files, **fields, **learn)
    scores = summary["runs"][0]["scores"]
    # Guessing gives 1/3; the deciding word is in every text.
    assert scores["validation"]["accuracy"] > 0.9 and scores["test"]["macro_f1"] > 0.8
    # Rows are evaluated from the longest to the shortest; the file has to undo that.
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    found = [answer["label"] for answer in classify(texts[150:])]
    assert answers(tmp_path / "out") == found
    right = sum(answer == name for answer, name in zip(found, names[150:], strict=True)) / 50
    assert right == pytest.approx(scores["test"]["accuracy"])
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.classifier_pooling, config.hidden_dropout_prob) == ("mean", 0.05)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "finetuned on film reviews" in card.text and "# luna-film-reviews\n" in card.text
    assert card.data.eval_results[0].dataset_name == "film reviews" and "film-reviews" in card.data.tags
    assert f"Predictions: {tmp_path / 'out' / 'predictions' / 'test.tsv'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dataset_name": "film reviews/"}, "film reviews"),
        ({"dataset_name": "./film reviews/../film reviews"}, "film reviews"),
        ({"dataset_name": "."}, "own data"),
        ({"dataset_name": ".."}, "own data"),
        ({"dataset_name": "someone/imdb"}, "imdb"),
        ({"train_file": "film reviews/train.csv"}, "film reviews"),
        ({"train_file": "film reviews/training-00000-of-00002.parquet"}, "film reviews"),
        ({"train_file": "outputs/film-train.csv"}, "film"),
        ({"train_file": "outputs/train_film.csv"}, "film"),
        ({"train_file": "outputs/film.training.csv"}, "film"),
        ({"train_file": "outputs/trains.csv"}, "trains"),
        ({"train_file": "outputs/train.csv"}, "own data"),
        ({"train_file": "./train.csv"}, "own data"),
        ({"train_file": "../home/train.csv"}, "own data"),
        ({"train_file": "../secret/train.csv"}, "own data"),
    ],
)
def test_own_data_are_named_after_their_file_or_place_but_not_after_the_user_or_the_current_folder(
    options, name, tmp_path, monkeypatch
):
    (tmp_path / "secret").mkdir()
    monkeypatch.chdir(tmp_path / "secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    files = {"validation_file": "test.csv"} if "train_file" in options else {}
    assert classification.own_name(classification.GlueArguments(["m"], **options, **files)) == name


def test_several_labels_per_row(luna, tmp_path):
    texts, _ = topics(60)
    labels = [sorted({"fox", "dog", "quick"} & set(text.split())) for text in texts]
    labels[3] = []
    train = write_rows(tmp_path / "train.jsonl", {"text": texts[:40], "label": labels[:40]})
    dev = write_rows(tmp_path / "dev.parquet", {"text": texts[40:], "label": labels[40:]})
    summary = run(luna, tmp_path / "out", train_file=train, validation_file=dev, test_file=dev, num_train_epochs=4)
    result = summary["runs"][0]
    assert set(result["scores"]["validation"]) == {"micro_f1", "macro_f1", "exact_match"}
    assert "3 labels: dog, fox, quick." in result["notes"]
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.problem_type, list(config.id2label.values())) == (MULTI_LABEL, ["dog", "fox", "quick"])
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu", top_k=None)
    for answer, found in zip(answers(tmp_path / "out"), classify(texts[40:]), strict=True):
        assert set(answer.split(",")) - {""} == {part["label"] for part in found if part["score"] > 0.5}
    assert "above 0.5" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("targets", [pytest.param(1, marks=pytest.mark.slow), 2])  # STS-B has one
def test_a_regression_and_the_call_of_its_card(targets, luna, tmp_path):
    texts, labels = topics(40)
    values = [[10.5 * label, -0.5] if targets == 2 else 10.5 * label for label in labels]
    files, suffix = {}, "json" if targets == 2 else "tsv"
    for split, rows in (("train", slice(0, 24)), ("validation", slice(24, 40))):
        columns = {"text": texts[rows], "label": values[rows]}
        files[f"{split}_file"] = write_rows(tmp_path / f"{split}.{suffix}", columns)
    summary = run(luna, tmp_path / "out", **files, test_file=files["validation_file"], num_train_epochs=1)
    metrics = {1: {"pearson", "spearmanr", "mse"}, 2: {"mse"}}[targets]
    assert set(summary["runs"][0]["scores"]["validation"]) == metrics
    assert summary["main_metric"] == {1: "pearson", 2: "mse"}[targets]
    assert 'function_to_apply="none"' in (tmp_path / "out" / "README.md").read_text()
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu", top_k=None)
    found = {part["label"]: part["score"] for part in classify([texts[24]], function_to_apply="none")[0]}
    wanted = dict(zip(sorted(found), map(float, answers(tmp_path / "out")[0].split(",")), strict=True))
    assert found == pytest.approx(wanted, abs=1e-3) and len(found) == targets


def test_a_folder_without_a_validation_split_may_use_its_test_split(luna, tmp_path, capsys):
    # As IMDB does.
    for split, count in (("train", 24), ("test", 12)):
        texts, labels = topics(count)
        write_rows(tmp_path / "imdb" / f"{split}.parquet", {"text": texts, "label": labels})
    options = {"dataset_name": tmp_path / "imdb", "num_train_epochs": 1, "class_names": ["bad", "good"]}
    message = refused(capsys, command(luna, tmp_path / "out", **options))
    assert "--validation_split" in message and "test, train" in message
    summary = run(luna, tmp_path / "out", **options, validation_split="test")
    assert list(summary["runs"][0]["scores"]) == ["test"] and not (tmp_path / "out" / "predictions").exists()
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "bad", 1: "good"}


def test_cut_texts_are_counted_and_longer_inputs_extend_the_positions(luna, tmp_path):
    texts, labels = topics(20)
    texts[4], texts[7] = " ".join(["token"] * 70), " ".join(["lazy"] * 50)
    lengths = [len(ids) for ids in tokenizer()(texts)["input_ids"]]
    file = write_rows(tmp_path / "all.csv", {"text": texts, "label": labels})
    for limit in (32, 60):
        options = {"train_file": file, "validation_file": file, "num_train_epochs": 1, "max_length": limit}
        result = run(luna, tmp_path / str(limit), **options)["runs"][0]
        lost = [length - limit for length in lengths if length > limit]
        assert result["cut"]["train"] == {"rows": len(lost), "tokens": sum(lost)} and lost
        assert any(note.startswith("train: 20 rows") and f"{sum(lost)} tokens" in note for note in result["notes"])
        assert any("extended from 40 to 60" in note for note in result["notes"]) == (limit == 60)
    classify = pipeline("text-classification", str(tmp_path / "60"), device="cpu")
    assert 0 < classify(texts[4], truncation=True)[0]["score"] <= 1
    assert AutoConfig.from_pretrained(tmp_path / "60").max_position_embeddings == 60


# ---- labels ----


def rows(values, feature=None):
    return Dataset.from_dict({"label": values}, features=feature and Features({"label": feature}))


CLASSES = ClassLabel(names=["zebra", "ant"])
KINDS = {
    "texts with NA": (["NA", "EU", "1"], None, None, SINGLE_LABEL, ["1", "EU", "NA"], [2, 1, 0]),
    "texts": (["b", "a", "b"], None, None, SINGLE_LABEL, ["a", "b"], [1, 0, 1]),
    "numbers": ([10, 9, 10], None, None, SINGLE_LABEL, ["9", "10"], [1, 0, 1]),
    "truth values": ([True, False], None, None, SINGLE_LABEL, ["False", "True"], [1, 0]),
    "named numbers": ([1, 0], None, ("no", "yes"), SINGLE_LABEL, ["no", "yes"], [1, 0]),
    "known texts": (["no", "yes"], None, ("yes", "no"), SINGLE_LABEL, ["yes", "no"], [1, 0]),
    "stored names": ([0, 1, 1], CLASSES, None, SINGLE_LABEL, ["zebra", "ant"], [0, 1, 1]),
    "stored lists": ([[], [1], [0, 1]], List(CLASSES), None, MULTI_LABEL, ["zebra", "ant"], [[0, 0], [0, 1], [1, 1]]),
    "lists of texts": ([["b"], ["a", "b"]], None, None, MULTI_LABEL, ["a", "b"], [[0, 1], [1, 1]]),
    "lists of numbers": ([[4], [2, 4]], None, None, MULTI_LABEL, ["2", "4"], [[0, 1], [1, 1]]),
    "regression": ([1.5, 2.0], None, None, REGRESSION, [], [1.5, 2.0]),
    "whole numbers with points": ([1.0, 0.0, 1.0], None, None, SINGLE_LABEL, ["0", "1"], [1, 0, 1]),
    "named numbers with points": ([1.0, 0.0], None, ("no", "yes"), SINGLE_LABEL, ["no", "yes"], [1, 0]),
    "whole numbers with points of a regression": ([1.0, 0.0], None, (), REGRESSION, [], [1.0, 0.0]),
    "whole numbers of a regression": ([0, 5], None, (), REGRESSION, [], [0.0, 5.0]),
    "two targets": ([[1.5, 2.0], [3.0, 4.0]], None, None, REGRESSION, [], [[1.5, 2.0], [3.0, 4.0]]),
}


@pytest.mark.parametrize("case", list(KINDS))
def test_the_kind_of_the_labels_follows_from_their_values(case):
    values, feature, known, problem, names, encoded = KINDS[case]
    labels = read_labels({"train": rows(values, feature)}, "label", known)
    assert (labels.problem_type, labels.names, labels.encode(values)) == (problem, names, encoded)
    assert labels.width == (len(names) or (2 if case == "two targets" else 1))


@pytest.mark.parametrize(
    ("train", "other", "known", "value"),
    [
        (["a", None], ["a"], None, "Row 1 of train"),
        (["a", "b"], ["a", " "], None, "Row 1 of validation"),
        ([1.0, float("nan")], [1.0], None, "Row 1 of train"),
        ([{"a": 1}], [{"a": 1}], None, "{'a': 1}"),
        (["a", "b"], ["a", "c"], None, "validation holds 'c'.*a, b"),
        ([0, 1], [2], None, "validation holds 2"),
        ([0, 1], [2], ("no", "yes"), "validation holds 2.*no, yes"),
        ([0, -1], [0], ("no", "yes"), "train holds -1"),
        (["no", "maybe"], ["no"], ("no", "yes"), "'maybe'"),
        ([0.5, 1.5], [0.5], ("no", "yes"), "float"),
        (["a", "b"], ["a"], (), "str"),
        (["1.0", "0", "NaN"], ["0"], None, "train holds 'NaN'"),
        (["1", "0"], ["0", "n/a", "1"], None, "validation holds 'n/a'"),
        (["0.5", "nan"], ["0.5"], (), "str"),
        ([0.5, 1.5], ["a"], None, "validation holds 'a'"),
        ([0.5, 1.5], ["nan"], None, "validation holds 'nan'"),
        ([0.5, 1.5], ["1_0"], None, "validation holds '1_0'"),
        ([4, 4], [4], None, "1 different values in 2 rows"),
        (list(range(60)), [0], None, "60 different values in 60 rows"),
        ([[0.5], [0.5, 1.5]], [[0.5]], None, r"\[1, 2\]"),
        ([1.0, 0.0], [0.5], None, "validation holds 0.5.*0, 1"),
        ([float(value) for value in range(60)] * 5, [0.0], None, "60 different values in 300 rows.*--regression"),
        ([0.5, float("inf")], [0.5], None, "Row 1 of train holds inf"),
        ([0.5, 1e39], [0.5], None, "train holds 1e\\+39"),
        ([[0.5], [1.5]], [[-1e20]], None, "validation holds -1e\\+20"),
        ([0.0, 1e19], [0.0], (), "train holds 1e"),
        ([[0], [1]], [1], None, "validation holds 1, .*list of labels"),
        ([[0, 1, 0], [1, 1, 0]], [[1, 0, 0]], None, r"train holds \[0, 1, 0\].*zero or a one"),
        ([[0, 1], [1, 0]], [[1, 0]], None, r"train holds \[0, 1\].*zero or a one"),
        ([[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0]], None, "zero or a one"),
        ([[True, False], [False, True]], [[True, False]], None, "zero or a one"),
        ([[0, 1], [1]], [[1, 1]], None, r"validation holds \[1, 1\]"),
        ([0, 1], [[1]], None, r"validation holds \[1\], .*one label"),
        (["a", "b", "a "], ["a"], None, "'a' and 'a '"),
        (["caf\u00e9", "cafe\u0301"], ["b"], None, "look alike"),
        (["a\nb", "c"], ["c"], None, r"Row 0 of train holds 'a\\nb'"),
        (["a", "b"], ["\x1b[2Ja"], None, r"Row 0 of validation holds '\\x1b\[2Ja'"),
    ],
)
def test_labels_that_do_not_fit_are_refused(train, other, known, value):
    with pytest.raises(UserError, match=value):
        read_labels({"train": rows(train), "validation": rows(other)}, "label", known)


@pytest.mark.parametrize("column", [[[0, 1], [1], []], [[0], [1]], [["0", "1"], ["1", "0"]], [["a", "a"], ["b"]]])
def test_lists_that_are_no_vectors_are_labels(column):
    labels = read_labels({"train": rows(column)}, "label")
    assert labels.problem_type == MULTI_LABEL and labels.names in (["0", "1"], ["a", "b"])


def test_targets_of_a_regression_may_be_zeros():
    labels = read_labels({"train": rows([[0.5, 1.0]]), "validation": rows([[0.0, 0.0]])}, "label")
    assert labels.problem_type == REGRESSION


def test_a_class_may_be_called_minus_one(luna, tmp_path):
    texts, labels = topics(24)
    columns = {"text": texts, "label": [2 * label - 1 for label in labels]}
    train = write_rows(tmp_path / "train.csv", columns)
    negative = {
        name: [value for value, label in zip(values, labels, strict=True) if not label]
        for name, values in columns.items()
    }
    dev = write_rows(tmp_path / "dev.csv", negative)
    result = run(luna, tmp_path / "out", train_file=train, validation_file=dev, test_file=dev, num_train_epochs=1)
    scores = result["runs"][0]["scores"]
    assert scores["validation"]["accuracy"] == scores["test"]["accuracy"]


def test_predictions_of_own_numbers_keep_every_digit(tmp_path):
    file = str(write_rows(tmp_path / "x.csv", {"text": ["a", "b"], "label": [1.5e-5, 2.5e-5]}))
    task = classification.TextClassification(
        classification.GlueArguments(["m"], train_file=file, validation_file=file, test_file=file)
    )
    numbers = np.random.default_rng(0).normal(1e-5, 1e-7, (1000, 1)).astype(np.float32)
    written = task.write_predictions(tmp_path, "test", numbers).read_text().splitlines()[1:]
    assert np.array_equal(np.float32([line.split("\t")[1] for line in written]), numbers[:, 0])


def test_predictions_are_the_names_of_the_classes(tmp_path):
    names = ['"x"', '5" nail', "a,b"]
    file = str(write_rows(tmp_path / "x.jsonl", {"text": list("abc"), "label": names}))
    options = {"train_file": file, "validation_file": file, "test_file": file}
    task = classification.TextClassification(classification.GlueArguments(["m"], **options))
    path = task.write_predictions(tmp_path, "test", np.eye(3))
    assert list(read_table([path])["prediction"]) == sorted(names)


# ---- the order of the classes ----


def test_a_classifier_that_is_finetuned_further_keeps_the_meaning_of_its_head(luna, tmp_path, capsys):
    names, (texts, labels) = ["fox", "dog"], topics(12)  # sorted, the data's are dog and fox
    model = AutoModelForSequenceClassification.from_pretrained(luna, id2label=dict(enumerate(names)))
    torch.manual_seed(0)
    with torch.no_grad():
        randomise(model)
        logits = model(**tokenizer()(texts, padding=True, return_tensors="pt")).logits
        model.classifier.out_proj.bias[0] -= (logits[:, 0] - logits[:, 1]).median() + 1e-4
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    classify = pipeline("text-classification", str(tmp_path / "model"), device="cpu")
    expected, truth = [each["label"] for each in classify(texts)], [names[label] for label in labels]
    assert set(expected) == set(names)
    file = write_rows(tmp_path / "own.csv", {"text": texts, "label": truth})
    own_files = dict.fromkeys(("train_file", "validation_file", "test_file"), file)
    summary = run(tmp_path / "model", tmp_path / "out", **own_files, **PLAIN, max_steps=1, learning_rate=0)
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == dict(enumerate(names))
    assert answers(tmp_path / "out") == expected
    right = np.mean([one == other for one, other in zip(expected, truth, strict=True)])
    assert summary["runs"][0]["scores"]["test"]["accuracy"] == pytest.approx(right)
    said = capsys.readouterr().out
    assert "order of the checkpoint: fox, dog" in said and "head of the checkpoint is kept" in said
    assert "Labels: fox, dog." in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("known", "column", "place", "names", "note"),
    [
        (["b", "a"], ["a", "b"], (1, 0), ("b", "a"), "order of the checkpoint: b, a"),
        (["c", "a", "b"], ["a", "b", "c"], (1, 2, 0), ("c", "a", "b"), "order of the checkpoint"),
        (["b", "a"], [["a"], ["a", "b"]], (1, 0), ("b", "a"), "order of the checkpoint"),
        (["a", "b"], ["a", "b"], (), (), ""),
        (["no", "yes"], [0, 1], (), ("no", "yes"), "labels 0, 1 are the checkpoint's no, yes"),
        (["no", "yes"], ["a", "b"], (), (), "classes are no, yes, but those of the data are a, b"),
        (["no", "yes"], [1, 2], (), (), "no, yes, but those of the data are 1, 2"),
        (["a", "b", "c"], ["a", "b"], (), (), "a, b, c, but those of the data are a, b"),
        (["no"], [0.5, 1.5], (), ("LABEL_0",), "no, but the data hold numbers"),
        (["LABEL_0", "LABEL_1"], ["a", "b"], (), (), ""),
    ],
)
def test_the_names_of_a_checkpoint_win(known, column, place, names, note):
    labels = read_labels({"train": rows(column)}, "label")
    order = order_of(RobertaConfig(id2label=dict(enumerate(known))), labels, "model")
    assert (order.place, order.names) == (place, names) and note in order.note and bool(note) == bool(order.note)
    encoded = np.array(labels.encode(column))
    assert np.array_equal(order.to_data(order.to_model(encoded)), encoded)
    if place and encoded.ndim == 2:
        assert np.array_equal(order.logits_to_data(order.to_model(encoded)), encoded)
    elif place:
        assert [known[index] for index in order.to_model(encoded)] == column


def test_the_mappings_of_a_checkpoint_must_agree():
    labels = read_labels({"train": rows(["a", "b"])}, "label")
    config = RobertaConfig()
    config.label2id = {"b": 0, "a": 1}
    assert order_of(config, labels, "model").place == (1, 0)
    config.id2label = {0: "a", 1: "b"}
    with refused_error("model", "id2label", "label2id", error=UserError):
        order_of(config, labels, "model")


@pytest.mark.parametrize(
    ("train", "other", "known"),
    [
        (([0, 1], ClassLabel(names=["a", "b"])), ([0, 1], ClassLabel(names=["b", "a"])), None),
        (([0, 1], None), ([0, 1], ClassLabel(names=["no", "yes"])), ("yes", "no")),
        (([0, 1], ClassLabel(names=["yes", "no"])), ([0, 1], None), ("no", "yes")),
        ((["a", "b"], None), ([0, 1], ClassLabel(names=["b", "a"])), None),
    ],
)
def test_classes_that_files_number_otherwise_are_refused(train, other, known):
    with pytest.raises(UserError, match="names its classes"):
        read_labels({"train": rows(*train), "validation": rows(*other)}, "label", known)


def test_stored_names_may_be_a_regression_or_numbers():
    numbered = rows([0, 1], ClassLabel(names=["0", "1"]))
    assert read_labels({"train": numbered}, "label", ()).problem_type == REGRESSION
    assert read_labels({"train": numbered}, "label", ("no", "yes")).names == ["no", "yes"]


# ---- files ----


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl", ".json"])
def test_files_of_every_kind_hold_the_same_rows(suffix, tmp_path):
    columns = {"text": ["one, two", 'a "quoted" line', "None"], "label": ["1", "007", "1e5"]}
    path = tmp_path / "a [1]" / f"x{suffix}"
    write_rows(path, columns)
    if suffix == ".tsv":
        path.write_text("text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in zip(*columns.values(), strict=True)))
    assert read_table([path]).to_dict() == columns


def test_folders_with_the_layouts_of_the_hub(tmp_path):
    for part in range(2):
        name = f"train-0000{part}-of-00002.parquet"
        write_rows(tmp_path / "config" / name, {"text": [f"part {part}"], "label": [part]})
    write_rows(tmp_path / "data" / "test-00000-of-00001.parquet", {"text": ["t"], "label": [0]})
    found = load_splits(str(tmp_path), "config")
    assert list(found) == ["train"] and found["train"]["text"][:] == ["part 0", "part 1"]
    assert list(load_splits(str(tmp_path))) == ["test"]


# ---- what is refused before any training ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    glue_folder(folder / "sst2", rows=9)
    glue_folder(folder / "stsb", "stsb", rows=9)
    texts, labels = topics(9)
    write_rows(folder / "good.csv", {"text": texts, "label": labels})
    write_rows(folder / "empty.parquet", {"text": [], "label": []})
    write_rows(folder / "numbers.jsonl", {"text": list(range(9)), "label": labels})
    write_rows(folder / "holes.jsonl", {"text": [None, *texts[1:]], "label": labels})
    (folder / "notes.docx").write_bytes(b"")
    return folder


def own(train="good.csv", dev="good.csv", **more):
    return {"train_file": train, "validation_file": dev, **more}


SST2, STSB = ({"task_name": name, "dataset_name": name} for name in ("sst2", "stsb"))
BAD = {
    "unknown task": ({"task_name": "sst-2"}, r"sst-2.*`sst2`"),
    "no data at all": ({}, "--task_name"),
    "both sources": ({**own(), "dataset_name": "sst2"}, "--dataset_name or --train_file"),
    "labels stated twice": ({**SST2, "class_names": ["a", "b"]}, "--class_names and --regression"),
    "a name twice": (own(class_names=["a", "a"]), "a, a"),
    "splits of files": (own(test_split="test"), "--train_file"),
    "too few names": (own(class_names=["a"]), r"good\.csv holds 1"),
    "no dev file": ({"train_file": "good.csv"}, "--validation_file"),
    "missing column": (own(text_columns=["body"]), r"good\.csv.*`body`.*text, label"),
    "missing file": (own(dev="none.csv"), r"none\.csv"),
    "empty file": (own(dev="empty.parquet"), r"empty\.parquet"),
    "unknown suffix": (own(dev="notes.docx"), r"notes\.docx.*\.parquet, \.jsonl"),
    "texts are numbers": (own(dev="numbers.jsonl"), r"Row 0 of numbers\.jsonl holds 0 .*`text`"),
    "a text is the label": (own(text_columns=["text", "label"]), "named twice: text, label, label"),
    "names of classes in the config": ({**SST2, "model_config": ["id2label={0: a}"]}, "id2label.*labels of the data"),
    "text is missing": (own(dev="holes.jsonl"), r"Row 0 of .*holes\.jsonl"),
    "missing dev split": ({**SST2, "validation_split": "dev"}, r"split dev.*--validation_split"),
    "the split to train on": ({**SST2, "train_split": "validation"}, "split validation .*--validation_split"),
    "training rows to predict": ({**SST2, "test_split": "train"}, "split train .*--test_split"),
    "other steps": ({**SST2, "eval_strategy": "steps", "save_strategy": "steps"}, "--save_steps 500 .*--eval_steps"),
    "one label to evaluate on": ({**own(), "regression": True, "max_eval_samples": 1}, "equal labels"),
    "training rows of another name": (
        {**SST2, "train_split": "validation", "validation_split": "train"},
        "Rename the files",
    ),
    "no such data set": ({"task_name": "sst2", "dataset_name": "no/such"}, "'no/such'"),
    **{
        f"{name} in the config": ({**SST2, "model_config": [f"{name}={value}"]}, rf"`(model\.)?{name}`")
        for name, value in {"name_or_path": "x", "length": 3, "to_dict": 1, "return_dict": False}.items()
    },
    "another padding token": ({**SST2, "model_config": ["pad_token_id=5"]}, "`pad_token_id` follows"),
    "a field twice": ({**SST2, "model_config": ["hidden_act=relu", "hidden_act=gelu"]}, "hidden_act twice"),
    "an infinite field": ({**SST2, "model_config": ["layer_norm_eps=1e400"]}, "`model.layer_norm_eps` is inf"),
    "unknown field": ({**SST2, "model_config": ["projection_lenght=3"]}, "`projection_length`"),
    "smoothing without classes": ({**STSB, "label_smoothing_factor": 0.1}, REGRESSION),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_refused_before_training(case, luna, data, tmp_path, monkeypatch, capsys):
    options, value = BAD[case]
    monkeypatch.chdir(data)
    monkeypatch.setattr(FinetuneTrainer, "train", None)
    assert re.search(value, refused(capsys, command(luna, tmp_path / "out", **options)))
