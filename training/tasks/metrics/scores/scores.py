"""Metrics of the finetuning commands as an `evaluate` module that works offline.

    evaluate.load("training/tasks/metrics/scores", "mrpc").compute(predictions=[1, 0], references=[1, 1])

The configuration is a task of GLUE, with the metrics of its leaderboard, or a kind of problem. A correlation is 0 where
it is undefined: for one row, or if a side is constant. All numbers must be finite.
"""

import warnings
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

_f1 = partial(f1_score, zero_division=0)
_ACCURACY = {"accuracy": accuracy_score}
_BOTH = {"accuracy": accuracy_score, "f1": _f1}
_MATTHEWS = {"matthews_correlation": matthews_corrcoef}
_CORRELATIONS = {
    "pearson": lambda *sides: np.nan_to_num(stats.pearsonr(*sides).statistic) if len(sides[0]) > 1 else 0.0,
    "spearmanr": lambda *sides: np.nan_to_num(stats.spearmanr(*sides).statistic),
}
_ERROR = {"mse": mean_squared_error}
_MACRO = {"macro_f1": partial(_f1, average="macro")}
# Functions of references and predictions.
METRICS = {
    **dict.fromkeys(("sst2", "mnli", "qnli", "rte", "wnli", "multiple_choice"), _ACCURACY),
    **dict.fromkeys(("mrpc", "qqp"), _BOTH),
    "cola": _MATTHEWS,
    "stsb": _CORRELATIONS,
    "single_label": {**_ACCURACY, **_MACRO, **_MATTHEWS},
    "multi_label": {"micro_f1": partial(_f1, average="micro"), **_MACRO, "exact_match": accuracy_score},
    "regression": {**_CORRELATIONS, **_ERROR},
    "regression_of_several": _ERROR,
}


class Scores(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise KeyError(f"Unknown configuration {self.config_name!r}. Known: {', '.join(METRICS)}.")
        number = self.config_name in ("stsb", "regression", "regression_of_several")
        value = datasets.Value("float64" if number else "int64")
        if self.config_name in ("multi_label", "regression_of_several"):
            value = datasets.List(value)
        return evaluate.MetricInfo(
            description="The metrics of GLUE and of other classification and regression, by scikit-learn and scipy.",
            citation="",
            inputs_description=__doc__,
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        sides = np.asarray(references), np.asarray(predictions)
        if not all(np.isfinite(side).all() for side in sides):
            raise ValueError("A reference or a prediction is not finite.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constants and classes that are missing: the values above are meant
            return {name: float(metric(*sides)) for name, metric in METRICS[self.config_name].items()}
