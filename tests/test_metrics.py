"""Metrics of the tasks: their values, which side is the truth, degenerate cases, and the best run."""

import numpy as np
import pytest
from tasks.metrics import compute
from tasks.report import choose

# Three of four are right; the truth has one positive, the answers two. 2 * 1 / (1 + 2) and 2 * 2 / (2 + 3).
ANSWERS, TRUTH = [1, 1, 0, 0], [1, 0, 0, 0]
MATTHEWS = 1 / 3**0.5
VALUES = {
    "accuracy": 3 / 4,
    "f1": 2 / 3,
    "macro_f1": (2 / 3 + 4 / 5) / 2,
    **dict.fromkeys(("matthews_correlation", "pearson", "spearmanr"), MATTHEWS),
    "mse": 1 / 4,
}


def scores(names, answers, truth):
    return compute(names.split(), np.array(answers), np.array(truth))


def test_metrics_of_single_values():
    assert scores(" ".join(VALUES), ANSWERS, TRUTH) == pytest.approx(VALUES)


def test_metrics_of_rows_with_several_values():
    found = scores("micro_f1 macro_f1 exact_match", [[1, 0], [1, 1], [0, 0]], [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert found == pytest.approx({"micro_f1": 2 / 3, "macro_f1": 2 / 3, "exact_match": 1 / 3})
    absent = scores("micro_f1 macro_f1", [[1, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 1, 0]])
    assert absent == {"micro_f1": 1.0, "macro_f1": 1.0} and scores("macro_f1", [[0]], [[0]]) == {"macro_f1": 0.0}
    assert scores("mse", [[1.0, 2.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]) == {"mse": 2.0}


def test_what_is_undefined_counts_as_zero():
    assert scores("accuracy f1", [0, 0], [0, 0]) == {"accuracy": 1.0, "f1": 0.0}
    assert scores("matthews_correlation", [1, 1], [0, 1]) == {"matthews_correlation": 0.0}
    for answers, truth in (([0.1] * 3, [0.0, 1.0, 2.0]), ([1.0, 2.0], [0.3] * 2), ([1.0], [2.0])):
        assert scores("pearson spearmanr", answers, truth) == {"pearson": 0.0, "spearmanr": 0.0}
    # Pearson is linear, Spearman goes by ranks, with ties shared.
    found = scores("pearson spearmanr", [1.0, 2.0, 2.0, 10.0], [1.0, 2.0, 3.0, 4.0])
    assert found == pytest.approx({"spearmanr": 4.5 / (4.5 * 5) ** 0.5, "pearson": 13.5 / (52.75 * 5) ** 0.5})


def results(metric, values):
    """Runs by batch size and seed; `None` is one that diverged."""
    shared = {"model": "m", "learning_rate": 1.0, "dropout": None, "development": "dev", "main_metric": metric}
    return [
        {**shared, "batch_size": batch, "seed": seed, "scores": {"dev": {metric: value}}, "diverged": value is None}
        for (batch, seed), value in values.items()
    ]


def test_the_best_error_is_the_smallest():
    errors = {(8, 1): 0.5, (8, 2): 0.3, (16, 1): 0.1, (16, 2): 0.9}
    best, setting = choose(results("mse", errors), greater_is_better=False)
    assert (best["batch_size"], best["seed"]) == (8, 2)
    assert (setting["median"], setting["best"], setting["worst"]) == (0.4, 0.3, 0.5)


# The runs of two settings, and what is chosen: batch size and seed, the setting's median, best and worst.
DIVERGED = {
    "the worst of three": ([0.9, None, 0.7], [0.6, 0.6, 0.6], (8, 1), (0.7, 0.9, None)),
    "half of a setting": ([0.9, None], [0.1, 0.2], (16, 2), (pytest.approx(0.15), 0.2, 0.1)),
    "half of every setting": ([0.1, None], [None, 0.2], (16, 2), (None, 0.2, None)),
    "all but one": ([None, None], [None, 0.0], (16, 2), (None, 0.0, None)),
}


@pytest.mark.parametrize("case", list(DIVERGED))
@pytest.mark.parametrize("sign", [1, -1])
def test_a_diverged_run_ranks_below_every_other(case, sign):
    first, second, chosen, figures = DIVERGED[case]
    values = {(8, seed): value for seed, value in enumerate(first, 1)}
    values |= {(16, seed): value for seed, value in enumerate(second, 1)}
    signed = {run: None if value is None else sign * value for run, value in values.items()}
    best, setting = choose(results("mse", signed), greater_is_better=sign > 0)
    assert (best["batch_size"], best["seed"]) == chosen
    found = [None if value is None else sign * value for value in map(setting.get, ("median", "best", "worst"))]
    assert tuple(found) == figures
    assert choose(results("mse", dict.fromkeys(values)), greater_is_better=sign > 0) is None
