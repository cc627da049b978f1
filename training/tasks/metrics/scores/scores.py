"""Metrics of the finetuning scripts as an `evaluate` module that needs no network.

    evaluate.load("training/metrics/scores", "mrpc").compute(predictions=[1, 0], references=[1, 1])

The configuration is a task of GLUE (the metrics that its leaderboard shows) or a kind of problem.
"""

from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = (
    "The metrics of GLUE's tasks, and of problems of one's own; the numbers are those of scikit-learn and scipy."
)
_CITATION = """@inproceedings{wang2019glue,
  title     = {{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author    = {Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and
               Bowman, Samuel R.},
  booktitle = {International Conference on Learning Representations},
  year      = {2019}
}"""


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Share of the rows that are right; of a row of several labels, all have to be."""
    right = predictions == references
    return float(right.all(axis=-1).mean() if right.ndim > 1 else right.mean())


def f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Harmonic mean of precision and recall of the ones; 0 where nothing is a one."""
    both = np.sum((predictions == 1) & (references == 1))
    either = np.sum(predictions == 1) + np.sum(references == 1)
    return float(2 * both / either) if either else 0.0


def macro_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean of the classes' F1, over those that occur in predictions or references."""
    classes = np.union1d(predictions, references)
    return float(np.mean([f1(predictions == label, references == label) for label in classes]))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of predicted and true classes (Gorodkin 2004 for more than two); 0 where either is constant."""
    classes = np.union1d(predictions, references)
    predicted = predictions[:, None] == classes
    true = references[:, None] == classes
    count = len(references)
    of_predicted, of_true = predicted.sum(0).astype(float), true.sum(0).astype(float)
    covariance = count * np.sum(predictions == references) - of_predicted @ of_true
    spread = (count**2 - of_predicted @ of_predicted) * (count**2 - of_true @ of_true)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Linear correlation; NaN where either side is constant, and for a single row."""
    first, second = predictions - predictions.mean(), references - references.mean()
    # Scaled before they are squared, so that tiny spreads do not vanish. A constant float may miss its mean by a digit.
    constant = np.all(predictions == predictions[0]) or np.all(references == references[0])
    if constant:
        return float("nan")
    first, second = first / np.linalg.norm(first), second / np.linalg.norm(second)
    return float(np.clip(first @ second, -1, 1))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[place]


def spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of the ranks."""
    return pearson(ranks(predictions), ranks(references))


def mean_squared_error(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean squared difference over all rows and targets."""
    return float(np.mean((predictions - references) ** 2))


def mean_f1_of_labels(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean over the columns of the F1 of each."""
    return float(np.mean([f1(predictions[:, label], references[:, label]) for label in range(references.shape[1])]))


_ACCURACY = {"accuracy": accuracy}
_PAIRS = {"accuracy": accuracy, "f1": f1}
_CORRELATIONS = {"pearson": pearson, "spearmanr": spearman}
METRICS = {
    "cola": {"matthews_correlation": matthews_correlation},
    "sst2": _ACCURACY,
    "mrpc": _PAIRS,
    "qqp": _PAIRS,
    "stsb": _CORRELATIONS,
    "mnli": _ACCURACY,
    "qnli": _ACCURACY,
    "rte": _ACCURACY,
    "wnli": _ACCURACY,
    "multiple_choice": _ACCURACY,
    "single_label": {"accuracy": accuracy, "macro_f1": macro_f1, "matthews_correlation": matthews_correlation},
    "multi_label": {"micro_f1": f1, "macro_f1": mean_f1_of_labels, "exact_match": accuracy},
    "regression": {**_CORRELATIONS, "mse": mean_squared_error},
    "regression_of_several": {"mse": mean_squared_error},
}
_VECTORS = {"multi_label": "int64", "regression_of_several": "float64"}
_NUMBERS = {"stsb", "regression"}


class Scores(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise KeyError(f"Unknown configuration {self.config_name!r}. Known: {', '.join(METRICS)}.")
        value = datasets.Value("float64" if self.config_name in _NUMBERS else "int64")
        if self.config_name in _VECTORS:
            value = datasets.Sequence(datasets.Value(_VECTORS[self.config_name]))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=__doc__,
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        return {name: metric(predictions, references) for name, metric in METRICS[self.config_name].items()}
