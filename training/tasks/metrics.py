"""Metrics of the tasks, by name. A correlation is 0 where it is undefined: for one row, or if a side is constant."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

_f1 = partial(f1_score, zero_division=0)


def _macro_f1(references: np.ndarray, predictions: np.ndarray) -> float:
    """Mean over the classes that occur; scikit-learn counts the others as 0 where a row has several labels."""
    if references.ndim == 1:
        return _f1(references, predictions, average="macro")
    scores = [_f1(*sides) for sides in zip(references.T, predictions.T, strict=True) if np.any(sides)]
    return float(np.mean(scores)) if scores else 0.0


# Functions of references and predictions.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "micro_f1": partial(_f1, average="micro"),
    "exact_match": accuracy_score,
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda *sides: np.nan_to_num(stats.pearsonr(*sides).statistic) if len(sides[0]) > 1 else 0.0,
    "spearmanr": lambda *sides: np.nan_to_num(stats.spearmanr(*sides).statistic),
    "mse": mean_squared_error,
}

# What tables call them, where their names do not say it.
TITLES = {"f1": "F1", "matthews_correlation": "Matthews' correlation", "spearmanr": "Spearman's correlation"}


class Scores(evaluate.Metric):
    """Some of `METRICS` as one metric of `evaluate`, which works offline.

    Args:
        names: the metrics.
        value: the type of a row's prediction and reference.
    """

    def __init__(self, names: Sequence[str], value: datasets.Value | datasets.List) -> None:
        self.names, self.value = names, value
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Metrics of GLUE and of other classification and regression, by scikit-learn and scipy.",
            citation="",
            features=datasets.Features({"predictions": self.value, "references": self.value}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        sides = np.asarray(references), np.asarray(predictions)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constants and classes that are missing: the values above are meant
            return {name: float(METRICS[name](*sides)) for name in self.names}


def compute(names: Sequence[str], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Some of `METRICS`, from finite numbers: classes or numbers (b,), or zeros and ones or numbers (b, c)."""
    has_floats = "f" in (predictions.dtype.kind, references.dtype.kind)
    value = datasets.Value("float64" if has_floats else "int64")
    scores = Scores(names, value if predictions.ndim == 1 else datasets.List(value))
    return scores.compute(predictions=predictions, references=references)
