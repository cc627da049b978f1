"""GLUE and own data: tasks, labels, metrics, predictions, the finished folder in a pipeline, and what is refused."""

import json
import re

import pyarrow.parquet
import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, List, Value
from huggingface_hub import ModelCard
from tiny_finetuning import (
    MODEL_TYPES,
    RECIPES,
    checkpoint,
    command,
    finetune_arguments,
    finetune_data,
    finetune_glue,
    finetune_labels,
    finetune_trainer,
    glue_folder,
    run,
    tokenizer,
    topics,
    write_rows,
)
from transformers import AutoConfig, pipeline

from luna_hf import FAMILIES
from luna_hf.scripting import UserError

TASKS = finetune_glue.TASKS
LEARN = {"num_train_epochs": 8, "learning_rate": 1e-2, "early_stopping_patience": 0}
NAMES = [path.stem for path in RECIPES]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {model_type: checkpoint(folder / model_type, model_type) for model_type in MODEL_TYPES}


@pytest.fixture(scope="module")
def luna(models):
    return models["luna"]


# ---- the tasks of GLUE ----

METRICS = {
    "cola": {"matthews_correlation"},
    "mrpc": {"accuracy", "f1", "mean"},
    "qqp": {"accuracy", "f1", "mean"},
    "stsb": {"pearson", "spearmanr", "mean"},
}


@pytest.mark.parametrize("task", list(TASKS))
def test_task_of_glue(task, luna, tmp_path):
    data = glue_folder(tmp_path / task, task, rows=18)
    summary = run(luna, tmp_path / "out", task_name=task, dataset_name=data, num_train_epochs=1, learning_rate=1e-4)
    spec, scores = TASKS[task], summary["runs"][0]["scores"]
    assert set(scores) == set(spec.development)  # the test splits have no labels
    assert all(set(part) == METRICS.get(task, {"accuracy"}) for part in scores.values())
    assert summary["development"] == spec.development[0]
    if "mean" in METRICS.get(task, ()):
        first, second = (value for name, value in scores["validation"].items() if name != "mean")
        assert scores["validation"]["mean"] == pytest.approx((first + second) / 2)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    if task == "stsb":
        assert (config.problem_type, config.num_labels) == ("regression", 1)
    else:
        assert config.id2label == dict(enumerate(spec.labels)) and config.problem_type == "single_label_classification"

    files = sorted(path.name for path in (tmp_path / "out" / "predictions").iterdir())
    assert files == sorted(f"{name}.tsv" for name in spec.answers)
    allowed = set(spec.labels) if spec.named else {str(index) for index in range(len(spec.labels))}
    for name in files:
        header, *rows = (tmp_path / "out" / "predictions" / name).read_text().splitlines()
        assert header == "index\tprediction" and len(rows) == 6
        indices, answers = zip(*(row.split("\t") for row in rows), strict=True)
        assert indices == tuple("012345")
        if task == "stsb":
            assert all(re.fullmatch(r"\d\.\d{3}", answer) and float(answer) <= 5 for answer in answers)
        else:
            assert set(answers) <= allowed


def test_labels_and_answer_files_are_those_of_the_hub_and_the_leaderboard():
    assert {spec.answers for spec in TASKS.values()} == {
        *(("CoLA",), ("SST-2",), ("MRPC",), ("QQP",), ("STS-B",), ("QNLI",), ("RTE",), ("WNLI",)),
        ("MNLI-m", "MNLI-mm"),
    }
    assert {task for task, spec in TASKS.items() if spec.named} == {"mnli", "qnli", "rte"}
    assert TASKS["mnli"].labels == ("entailment", "neutral", "contradiction")
    assert TASKS["rte"].labels == TASKS["qnli"].labels == tuple(reversed(TASKS["wnli"].labels))


def test_a_folder_may_have_one_of_mnlis_dev_sets(luna, tmp_path, capsys):
    data = glue_folder(tmp_path / "mnli", "mnli", rows=18)
    for path in data.glob("*_mismatched.parquet"):
        path.unlink()
    run(luna, tmp_path / "out", task_name="mnli", dataset_name=data, num_train_epochs=1)
    assert "mnli has no split validation_mismatched: it is not evaluated." in capsys.readouterr().out


def test_predictions_stand_in_the_order_of_the_rows(luna, tmp_path):
    # Rows are evaluated by falling length; the file has to undo that.
    data = glue_folder(tmp_path / "sst2", "sst2", rows=60)
    run(luna, tmp_path / "out", task_name="sst2", dataset_name=data, num_train_epochs=8, learning_rate=1e-2)
    texts = pyarrow.parquet.read_table(data / "test.parquet")["sentence"].to_pylist()
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    answers = [["negative", "positive"].index(answer["label"]) for answer in classify(texts)]
    rows = (tmp_path / "out" / "predictions" / "SST-2.tsv").read_text().splitlines()[1:]
    assert [int(row.split("\t")[1]) for row in rows] == answers and len(set(answers)) == 2


# ---- own data ----


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_own_classes_are_learnt_and_work_in_a_pipeline(model_type, models, tmp_path):
    texts, labels = topics(300, classes=3)
    names = [["canine", "feline", "other"][label] for label in labels]
    files = {}
    for split, rows in (("train", slice(0, 200)), ("validation", slice(200, 250)), ("test", slice(250, 300))):
        columns = {"body": texts[rows], "kind": names[rows]}
        files[f"{split}_file"] = write_rows(tmp_path / f"{split}.csv", columns)
    summary = run(
        models[model_type],
        tmp_path / "out",
        **{**files, "text_columns": ["body"], "label_column": "kind", **LEARN},
        **({"model_config": ["classifier_pooling=mean"]} if model_type in FAMILIES else {}),
    )
    scores = summary["runs"][0]["scores"]
    # Guessing gives 1/3; the word that decides stands in every text.
    assert scores["validation"]["accuracy"] > 0.9 and scores["test"]["macro_f1"] > 0.8
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    found = [answer["label"] for answer in classify(texts[250:])]
    right = sum(answer == name for answer, name in zip(found, names[250:], strict=True)) / 50
    assert right == pytest.approx(scores["test"]["accuracy"])
    rows = (tmp_path / "out" / "predictions" / "test.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[1] for row in rows] == found


def test_several_labels_at_once(models, tmp_path, capsys):
    texts, first = topics(240)
    labels = [
        sorted({["fox", "dog"][label]} | ({"quick"} if "quick" in text else set()))
        for text, label in zip(texts, first, strict=True)
    ]
    labels[3] = []
    train = write_rows(tmp_path / "train.jsonl", {"text": texts[:200], "label": labels[:200]})
    dev = write_rows(tmp_path / "dev.parquet", {"text": texts[200:], "label": labels[200:]})
    summary = run(
        models["roberta"],
        tmp_path / "out",
        train_file=train,
        validation_file=dev,
        test_file=dev,
        **{**LEARN, "num_train_epochs": 16},
    )
    assert set(summary["runs"][0]["scores"]["validation"]) == {"micro_f1", "macro_f1", "exact_match"}
    assert summary["runs"][0]["scores"]["validation"]["micro_f1"] > 0.7
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.problem_type == "multi_label_classification"
    assert list(config.id2label.values()) == ["dog", "fox", "quick"]
    assert "3 labels: dog, fox, quick." in capsys.readouterr().out
    assert "its logit is above 0, its probability above 0.5" in (tmp_path / "out" / "README.md").read_text()
    row = (tmp_path / "out" / "predictions" / "test.tsv").read_text().splitlines()[1].split("\t")[1]
    assert set(row.split(",")) <= {"dog", "fox", "quick", ""}


def test_own_data_are_called_like_their_folder(luna, tmp_path, monkeypatch, capsys):
    texts, labels = topics(24)
    folder = tmp_path / "film reviews"
    for name in ("train", "test"):
        write_rows(folder / f"{name}.csv", {"text": texts, "label": labels})
    files = {f"{split}_file": f"{split}.csv" for split in ("train", "test")}
    monkeypatch.chdir(folder)
    run(luna, tmp_path / "out", **files, validation_file="test.csv", num_train_epochs=1)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "finetuned on film reviews" in card.text and "# luna-film-reviews\n" in card.text
    assert card.data.eval_results[0].dataset_name == "film reviews" and "film-reviews" in card.data.tags
    assert f"Predictions: {tmp_path / 'out' / 'predictions' / 'test.tsv'}" in capsys.readouterr().out
    own_name = finetune_glue._own_name
    arguments = finetune_glue.GlueArguments(["m"], dataset_name=".")
    assert own_name(arguments) == "film reviews"
    assert own_name(finetune_glue.GlueArguments(["m"], dataset_name="someone/imdb")) == "imdb"
    monkeypatch.setenv("HOME", str(folder))  # whose name is the user's
    arguments = finetune_glue.GlueArguments(["m"], train_file="train.csv", validation_file="test.csv")
    assert own_name(arguments) == "train"


def test_regression_and_the_function_of_its_card(luna, tmp_path):
    texts, labels = topics(80)
    train = write_rows(tmp_path / "train.csv", {"text": texts[:60], "label": [10.5 * label for label in labels[:60]]})
    dev = write_rows(tmp_path / "dev.csv", {"text": texts[60:], "label": [10.5 * label for label in labels[60:]]})
    summary = run(luna, tmp_path / "out", train_file=train, validation_file=dev, test_file=dev)
    assert set(summary["runs"][0]["scores"]["validation"]) == {"pearson", "spearmanr", "mse"}
    assert 'function_to_apply="none"' in (tmp_path / "out" / "README.md").read_text()
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    first = (tmp_path / "out" / "predictions" / "test.tsv").read_text().splitlines()[1].split("\t")[1]
    assert classify(texts[60], function_to_apply="none")[0]["score"] == pytest.approx(float(first), abs=1e-3)


def test_regression_on_two_targets(luna, tmp_path):
    texts, labels = topics(40)
    columns = {"text": texts, "label": [[label + 0.5, -1.5 * label] for label in labels]}
    file = write_rows(tmp_path / "all.jsonl", columns)
    summary = run(luna, tmp_path / "out", train_file=file, validation_file=file, num_train_epochs=1)
    assert set(summary["runs"][0]["scores"]["validation"]) == {"mse"}
    assert AutoConfig.from_pretrained(tmp_path / "out").num_labels == 2


def test_a_folder_without_a_validation_split_may_use_its_test_split(luna, tmp_path):
    # As IMDB is.
    for split, count in (("train", 24), ("test", 12)):
        texts, labels = topics(count)
        write_rows(tmp_path / "imdb" / f"{split}.parquet", {"text": texts, "label": labels})
    options = {"dataset_name": tmp_path / "imdb", "text_columns": ["text"], "num_train_epochs": 1}
    options["class_names"] = ["bad", "good"]
    assert finetune_glue.main(command(luna, tmp_path / "out", **options)) == 2
    summary = run(luna, tmp_path / "out", **options, validation_split="test")
    assert set(summary["runs"][0]["scores"]) == {"test"} and not (tmp_path / "out" / "predictions").exists()
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "bad", 1: "good"}


def test_cut_texts_are_counted_and_longer_inputs_extend_the_positions(luna, tmp_path, capsys):
    texts, labels = topics(20)
    texts[4], texts[7] = " ".join(["token"] * 70), " ".join(["lazy"] * 50)
    lengths = [len(ids) for ids in tokenizer()(texts)["input_ids"]]
    file = write_rows(tmp_path / "all.csv", {"text": texts, "label": labels})
    options = {"train_file": file, "validation_file": file, "num_train_epochs": 1}
    for limit in (32, 60):
        summary = run(luna, tmp_path / str(limit), **options, max_length=limit)
        lost = [length - limit for length in lengths if length > limit]
        assert summary["runs"][0]["cut"]["train"] == {"rows": len(lost), "tokens": sum(lost)} and lost
        printed = capsys.readouterr().out
        assert f"{len(lost)} ({len(lost) / 20:.1%}) were cut, which lost {sum(lost)} tokens" in printed
        extended = "Positions extended from 40 to 60 tokens: the 40 learned positions are repeated."
        assert (extended in printed) == (limit == 60)
    classify = pipeline("text-classification", str(tmp_path / "60"), device="cpu")
    assert 0 < classify(texts[4], truncation=True)[0]["score"] <= 1
    assert AutoConfig.from_pretrained(tmp_path / "60").max_position_embeddings == 60


def test_fields_of_the_config_and_dropout_reach_the_model(luna, tmp_path):
    data = glue_folder(tmp_path / "sst2", rows=9)
    options = {"task_name": "sst2", "dataset_name": data, "num_train_epochs": 1, "dropout": 0.3}
    run(luna, tmp_path / "out", **options, model_config=["classifier_pooling=packed_max"])
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.classifier_pooling, config.hidden_dropout_prob) == ("packed_max", 0.3)


# ---- labels ----


def rows(values, feature=None):
    features = None if feature is None else Features({"label": feature})
    return Dataset.from_dict({"label": values}, features=features)


def test_labels_of_a_class_label_keep_its_order():
    feature = ClassLabel(names=["zebra", "ant"])
    labels = finetune_labels.read_labels({"train": rows([0, 1, 1], feature)}, "label")
    assert (labels.names, labels.encode([1, 0])) == (["zebra", "ant"], [1, 0])
    many = finetune_labels.read_labels({"train": rows([[0], [0, 1]], List(feature))}, "label")
    assert (many.names, many.problem_type) == (["zebra", "ant"], finetune_trainer.MULTI_LABEL)
    assert many.encode([[], [1], [0, 1]]) == [[0, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("values", "problem", "names", "encoded"),
    [
        (["b", "a", "b"], "single_label_classification", ["a", "b"], [1, 0, 1]),
        ([7, 3, 7], "single_label_classification", ["3", "7"], [1, 0, 1]),
        ([True, False], "single_label_classification", ["False", "True"], [1, 0]),
        ([1.5, 2.0], "regression", [], [1.5, 2.0]),
        ([[1.5, 2.0], [3.0, 4.0]], "regression", [], [[1.5, 2.0], [3.0, 4.0]]),
        ([["b"], ["a", "b"], []], "multi_label_classification", ["a", "b"], [[0, 1], [1, 1], [0, 0]]),
        ([[4], [2, 4]], "multi_label_classification", ["2", "4"], [[0, 1], [1, 1]]),
    ],
)
def test_kind_of_the_labels_follows_from_their_values(values, problem, names, encoded):
    labels = finetune_labels.read_labels({"train": rows(values)}, "label")
    assert (labels.problem_type, labels.names) == (problem, names)
    assert labels.encode(values) == encoded
    assert labels.width == (len(names) or (1 if isinstance(values[0], float) else 2))


@pytest.mark.parametrize(
    ("train", "other", "known", "message"),
    [
        (["a", None], ["a"], None, r"holds texts \(row 0\), nothing \(row 1\)"),
        (["a", " "], ["a"], None, r"nothing \(row 1\)"),
        ([1.0, float("nan")], [1.0], None, r"nothing \(row 1\)"),
        ([{"a": 1}], [{"a": 1}], None, "something else"),
        ([[["a"]]], [[["a"]]], None, "something else"),
        ([0, 1], ["0"], None, "holds whole numbers in train, but texts in validation"),
        (["a", "b"], ["c"], None, r"of validation holds 'c', which does not occur in training: a, b"),
        ([0, 1], [2], None, "of validation holds 2, which does not occur in training"),
        ([0, 1], [2], ("no", "yes"), r"of validation holds 2, but the labels go from 0 \(no\) to 1 \(yes\)"),
        ([0, -1], [0], ("no", "yes"), "of train holds -1"),
        (["no", "maybe"], ["no"], ("no", "yes"), "holds 'maybe', but the labels of this task are no, yes"),
        ([0.5, 1.5], [0.5], ("no", "yes"), "holds numbers, but this task has classes: no, yes"),
        ([4, 4], [4], None, "a single class, '4'"),
        (list(range(60)), [0], None, "60 different values in 60 rows.*decimal points"),
        ([[0.5], [0.5, 1.5]], [[0.5]], None, "different lengths: 1 .row 0 of train., 2 .row 1 of train."),
        ([[], []], [[]], None, "nothing but empty lists"),
    ],
)
def test_labels_that_do_not_fit_are_told(train, other, known, message):
    feature = List(Value("int64")) if train == [[], []] else None
    with pytest.raises(UserError, match=message):
        finetune_labels.read_labels({"train": rows(train, feature), "validation": rows(other, feature)}, "label", known)


def test_numbers_are_wanted_where_the_task_is_a_regression():
    read = finetune_labels.read_labels
    assert read({"train": rows([0, 5])}, "label", (), is_number=True).problem_type == "regression"
    with pytest.raises(UserError, match="holds texts, but this task needs a number"):
        read({"train": rows(["a", "b"])}, "label", (), is_number=True)


# ---- data ----


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_files_of_every_kind_hold_the_same_rows(suffix, tmp_path):
    columns = {"text": ["one, two", 'a "quoted"\nline', "ünï 語"], "label": [1, 0, 1], "score": [0.5, -1.0, 2.0]}
    read = finetune_data.read_file(write_rows(tmp_path / f"x{suffix}", columns))
    assert read.to_dict() == columns


def test_folders_as_the_hub_lays_them_out(tmp_path):
    for part in range(2):
        name = f"train-0000{part}-of-00002.parquet"
        write_rows(tmp_path / "config" / name, {"text": [f"part {part}"], "label": [part]})
    write_rows(tmp_path / "data" / "test-00000-of-00001.parquet", {"text": ["t"], "label": [0]})
    found = finetune_data.load_splits(str(tmp_path), "config")
    assert list(found) == ["train"] and found["train"]["text"][:] == ["part 0", "part 1"]
    assert list(finetune_data.load_splits(str(tmp_path))) == ["test"]


# ---- what is refused, before any training ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    glue_folder(folder / "sst2", rows=9)
    texts, labels = topics(9)
    write_rows(folder / "good.csv", {"text": texts, "label": labels})
    write_rows(folder / "empty.csv", {"text": [], "label": []})
    write_rows(folder / "numbers.csv", {"text": list(range(9)), "label": labels})
    write_rows(folder / "holes.jsonl", {"text": [None, *texts[1:]], "label": labels})
    (folder / "broken.parquet").write_bytes(b"PAR1 and no more")
    (folder / "notes.docx").write_bytes(b"")
    (folder / "nothing").mkdir()
    return folder


def own(train="good.csv", dev="good.csv", **more):
    return {"train_file": train, "validation_file": dev, **more}


SST2 = {"task_name": "sst2", "dataset_name": "sst2"}
BAD = {
    "unknown task": ({"task_name": "sst-2"}, r"GLUE has no task 'sst-2'\. Did you mean `sst2`\?"),
    "no data at all": ({}, "Give a --task_name, or own data"),
    "both sources": ({**own(), "dataset_name": "sst2"}, "exclude each other"),
    "names of a known task": ({**SST2, "class_names": ["a", "b"]}, "sst2 has its names"),
    "too few names": (own(class_names=["a"]), r"holds 1, but the labels go from 0 \(a\) to 0 \(a\)"),
    "no dev file": ({"train_file": "good.csv"}, "needs both --train_file and --validation_file"),
    "three columns": (own(text_columns=["a", "b", "c"]), "one or two columns"),
    "missing column": (own(text_columns=["body"]), r"good\.csv has no column `body`\. It has `text`, `label`"),
    "missing label": (own(label_column="y"), r"has no column `y`\. It has `text`, `label`"),
    "missing file": (own(dev="none.csv"), r"no file .*none\.csv"),
    "empty file": (own(dev="empty.csv"), r"empty\.csv is empty"),
    "damaged file": (own(dev="broken.parquet"), r"broken\.parquet cannot be read as parquet"),
    "unknown suffix": (own(dev="notes.docx"), r"only \.parquet, \.jsonl"),
    "texts are numbers": (own(dev="numbers.csv"), "holds int64, but must hold text"),
    "text is missing": (own(dev="holes.jsonl"), r"Row 0 of .*holes\.jsonl has no value"),
    "folder without splits": ({"task_name": "sst2", "dataset_name": "nothing"}, "has no file for train or"),
    "folder of another task": ({"task_name": "rte", "dataset_name": "sst2"}, "no column `sentence1`"),
    "missing split": ({**SST2, "validation_split": "dev"}, r"has no split dev.*--validation_split"),
    "missing test split": ({**SST2, "test_split": "hidden"}, "has no split 'hidden'"),
    "no such data set": ({"task_name": "sst2", "dataset_name": "no/such"}, "There is no data set 'no/such'"),
    "unknown field": ({**SST2, "model_config": ["projection_lenght=3"]}, "Did you mean `projection_length`"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_told_before_training(case, luna, data, tmp_path, monkeypatch, capsys):
    options, message = BAD[case]
    monkeypatch.chdir(data)
    monkeypatch.setattr(finetune_trainer.FinetuneTrainer, "train", None)
    assert finetune_glue.main(command(luna, tmp_path / "out", **options)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and re.search(message, printed), printed


def test_a_checkpoint_of_another_family_is_refused(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(data)
    for name, config, message in (
        ("gpt", {"model_type": "gpt2"}, "gpt2 checkpoint.*An encoder is needed"),
        ("empty", None, "holds no config.json"),
        ("missing", ..., "There is no model"),
    ):
        if config is not ...:
            (tmp_path / name).mkdir()
        if isinstance(config, dict):
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert finetune_glue.main(command(tmp_path / name, tmp_path / "out", **SST2)) == 2
        assert re.search(message, capsys.readouterr().err)


# ---- recipes ----


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_parses_and_is_a_manual(path, tmp_path):
    words = [str(path), "--model_name_or_path", "m", "--output_dir", str(tmp_path), "--use_cpu"]
    arguments, training = finetune_arguments.parse(finetune_glue.GlueArguments, words)
    content = yaml.safe_load(path.read_text())
    for key, value in content.items():
        parsed = getattr(arguments, key, getattr(training, key, None))
        assert parsed == (type(parsed)(value) if not isinstance(value, list) else [type(parsed[0])(v) for v in value])
    head = path.read_text().split("\n\n")[0]
    for word in ("command", "hardware", "wall time", "expect", f"training/recipes/finetune_glue/{path.name}"):
        assert word in head
    assert [line for line in path.read_text().splitlines() if re.match(r"\w+:", line) and "#" not in line] == []


def test_the_papers_recipe_is_the_papers():
    words = [str(next(path for path in RECIPES if path.stem == "paper")), "--model_name_or_path", "m"]
    arguments, training = finetune_arguments.parse(
        finetune_glue.GlueArguments, [*words, "--output_dir", "o", "--use_cpu"]
    )
    assert arguments.sweep and arguments.sweep_batch_sizes == [16, 32] and len(arguments.seeds) == 3
    assert arguments.sweep_learning_rates == [5e-6, 1e-5, 2e-5]
    assert (training.warmup_steps, training.weight_decay, training.adam_beta2) == (0.06, 0.1, 0.98)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_runs_shrunk(path, luna, data, tmp_path):
    words = [str(path), *command(luna, tmp_path / "out", dataset_name=data / "sst2", num_train_epochs=1)]
    if path.stem == "paper":
        words += ["--seeds", "1", "--sweep_batch_sizes", "4", "--sweep_learning_rates", "1e-5", "2e-5"]
    assert finetune_glue.main(words) == 0
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["runs"]) == 2
