"""The metrics of the scripts are those of scikit-learn and scipy, called here directly, also where they degenerate."""

import warnings

import evaluate
import numpy as np
import pytest
from helpers import ROOT
from scipy import stats
from sklearn import metrics

FOLDER = ROOT / "training" / "tasks" / "metrics" / "scores"


@pytest.fixture(scope="module")
def load():
    loaded = {}

    def metric(name):
        if name not in loaded:
            loaded[name] = evaluate.load(str(FOLDER), name, keep_in_memory=True)
        return loaded[name]

    return metric


RANDOM = np.random.default_rng(0)
BINARY = {
    "random": (RANDOM.integers(0, 2, 200), RANDOM.integers(0, 2, 200)),
    "mostly right": (np.arange(60) % 3 == 0, (np.arange(60) % 3 == 0) ^ (np.arange(60) == 7)),
    "all right": ([0, 1, 1], [0, 1, 1]),
    "all wrong": ([1, 0, 0], [0, 1, 1]),
    "constant zero predicted": ([0] * 5, [0, 1, 1, 0, 1]),
    "constant one predicted": ([1] * 5, [0, 1, 1, 0, 1]),
    "constant references": ([0, 1, 1], [1, 1, 1]),
    "no ones at all": ([0, 0], [0, 0]),
    "only ones": ([1, 1], [1, 1]),
    "one row": ([1], [1]),
}
THREE = {
    "random": (RANDOM.integers(0, 3, 200), RANDOM.integers(0, 3, 200)),
    "a class never predicted": ([0, 0, 1, 1], [0, 2, 1, 2]),
    "a class that never occurs": ([0, 3, 1], [0, 1, 1]),
    "constant": ([2] * 4, [0, 1, 2, 2]),
}
NUMBERS = {
    "random": (RANDOM.normal(size=100), RANDOM.uniform(0, 5, 100)),
    "ties": ([1.0, 1.0, 2.0, 2.0, 3.0], [0.0, 0.5, 0.5, 4.0, 4.0]),
    "linear": ([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]),
    "reversed": ([3.0, 2.0, 1.0], [0.5, 2.0, 2.5]),
    "tiny spread": (1 + 1e-9 * np.arange(5), [0.0, 1.0, 2.0, 2.5, 5.0]),
    "large numbers": (1e8 + np.arange(5.0), [1.0, 2.0, 2.0, 4.0, 5.0]),
    "two rows": ([1.0, 2.0], [5.0, 4.0]),
    "constant predictions": ([2.3] * 4, [0.0, 1.0, 2.0, 5.0]),
    "constant references": ([0.0, 1.0, 2.0], [0.1] * 3),
}


def arrays(pair, dtype):
    return np.asarray(pair[0], dtype=dtype), np.asarray(pair[1], dtype=dtype)


def same(found, expected):
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("case", list(BINARY))
@pytest.mark.parametrize("task", ["sst2", "mnli", "qnli", "rte", "wnli", "mrpc", "qqp", "cola", "multiple_choice"])
def test_glue_classification(load, task, case):
    predictions, references = arrays(BINARY[case], int)
    expected = {"accuracy": metrics.accuracy_score(references, predictions)}
    if task in ("mrpc", "qqp"):
        expected["f1"] = metrics.f1_score(references, predictions, zero_division=0)
    elif task == "cola":
        expected = {"matthews_correlation": metrics.matthews_corrcoef(references, predictions)}
    same(load(task).compute(predictions=predictions, references=references), expected)


@pytest.mark.parametrize("case", [*BINARY, *(f"three, {name}" for name in THREE)])
def test_single_label_of_ones_own(load, case):
    predictions, references = arrays(BINARY[case] if case in BINARY else THREE[case.partition(", ")[2]], int)
    expected = {
        "accuracy": metrics.accuracy_score(references, predictions),
        "macro_f1": metrics.f1_score(references, predictions, average="macro", zero_division=0),
        "matthews_correlation": metrics.matthews_corrcoef(references, predictions),
    }
    same(load("single_label").compute(predictions=predictions, references=references), expected)


@pytest.mark.parametrize("case", list(NUMBERS))
@pytest.mark.parametrize("task", ["stsb", "regression"])
def test_regression(load, task, case):
    predictions, references = arrays(NUMBERS[case], float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy says that constants have no correlation, and returns NaN
        expected = {
            "pearson": float(stats.pearsonr(predictions, references)[0]),
            "spearmanr": float(stats.spearmanr(predictions, references)[0]),
        }
    if task == "regression":
        expected["mse"] = metrics.mean_squared_error(references, predictions)
    same(load(task).compute(predictions=predictions, references=references), expected)


MULTI = {
    "random": (RANDOM.integers(0, 2, (40, 3)), RANDOM.integers(0, 2, (40, 3))),
    "right": ([[0, 1], [1, 1]], [[0, 1], [1, 1]]),
    "nothing predicted": ([[0, 0], [0, 0]], [[0, 1], [1, 1]]),
    "a label that never occurs": ([[0, 1], [0, 1]], [[0, 1], [0, 0]]),
    "no label at all": ([[0, 0]], [[0, 0]]),
}


@pytest.mark.parametrize("case", list(MULTI))
def test_several_labels(load, case):
    predictions, references = arrays(MULTI[case], int)
    expected = {
        "micro_f1": metrics.f1_score(references, predictions, average="micro", zero_division=0),
        "macro_f1": metrics.f1_score(references, predictions, average="macro", zero_division=0),
        "exact_match": metrics.accuracy_score(references, predictions),
    }
    same(load("multi_label").compute(predictions=predictions, references=references), expected)


def test_regression_on_several_targets(load):
    predictions, references = RANDOM.normal(size=(9, 2)), RANDOM.normal(size=(9, 2))
    found = load("regression_of_several").compute(predictions=predictions, references=references)
    same(found, {"mse": metrics.mean_squared_error(references, predictions)})


def test_unknown_configuration_is_named():
    with pytest.raises(KeyError, match="Unknown configuration 'sst-2'"):
        evaluate.load(str(FOLDER), "sst-2", keep_in_memory=True)
