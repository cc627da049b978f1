"""Metrics of the tasks, by name. A correlation is 0 where it is undefined: for one row, or if a side is constant."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

_f1 = partial(f1_score, zero_division=0)
# Functions of references and predictions.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "f1": _f1,
    "macro_f1": partial(_f1, average="macro"),
    "micro_f1": partial(_f1, average="micro"),
    "exact_match": accuracy_score,
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda *sides: np.nan_to_num(stats.pearsonr(*sides).statistic) if len(sides[0]) > 1 else 0.0,
    "spearmanr": lambda *sides: np.nan_to_num(stats.spearmanr(*sides).statistic),
    "mse": mean_squared_error,
}


def compute(names: Sequence[str], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Some of `METRICS`, from finite numbers: classes or numbers (b,), or zeros and ones or numbers (b, c)."""
    sides = [side.astype(float) if side.dtype.kind == "f" else side for side in (references, predictions)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constants and classes that are missing: the values above are meant
        return {name: float(METRICS[name](*sides)) for name in names}
