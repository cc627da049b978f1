"""Tables and plots of finished cells."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from luna_hf.scripting import markdown_table

TITLES = {"listops": "ListOps", **{name: name.capitalize() for name in ("text", "retrieval", "image", "pathfinder")}}
_FLAT = 0.98  # of the training loss in the second quarter of a run, above which that in the last has not fallen
# What the models are called in this benchmark. A number behind a name is one of slots.
_LABELS = {
    "luna": "Luna",
    "luna-tied": "Luna, tied key and value",
    "luna-packed": "Luna, pooled over P",
    "abc": "ABC",
    "linformer": "Linformer",
    "leapformer": "LeaPformer",
    "cosformer": "cosFormer",
    "linear": "linear attention",
    "lavo": "LAVO",
    "window": "window alone",
    "roberta": "softmax (sdpa)",
    "roberta-eager": "softmax (eager)",
}
Cell = dict[str, Any]


def label(name: str) -> str:
    """A model's name in tables."""
    base, _, slots = name.rpartition("-")
    if slots.isdecimal() and base in _LABELS:
        return f"{_LABELS[base]}, {slots} slots"
    return _LABELS.get(name, name)


# ---- one cell ----


def chosen(cell: Cell) -> list[dict[str, Any]]:
    """The runs with the chosen learning rate that did not diverge, which are those that were tested."""
    return [run for run in cell["runs"] if "test" in run]


def scores(cell: Cell, split: str) -> list[float]:
    """Accuracies of the chosen runs in per cent: `validation` or `test`."""
    return [100 * run[split] for run in chosen(cell)]


def spread(values: Sequence[float]) -> str:
    """Mean, and with several values their sample deviation and number."""
    if not values:
        return "diverged"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def is_flat(curve: Sequence[dict[str, float]]) -> bool:
    """Whether the training loss has not fallen by 2 % from the second quarter of a run to its last."""
    losses = [row["loss"] for row in curve if "loss" in row]
    quarter = len(losses) // 4
    if not quarter:
        return False
    return statistics.mean(losses[-quarter:]) > _FLAT * statistics.mean(losses[quarter : 2 * quarter])


def verdict(cell: Cell) -> str:
    """Whether a cell is at chance: its validation accuracy is within three standard errors of a guess."""
    runs, guess = chosen(cell), max(cell["majority"], 1 / cell["task"]["num_labels"])
    if not runs:
        return "diverged"
    error = math.sqrt(guess * (1 - guess) / cell["rows"]["validation"])
    if statistics.mean(run["validation"] for run in runs) > guess + 3 * error:
        return ""
    flat = all(is_flat(run["curve"]) for run in runs)
    return "at chance, training loss flat" if flat else "at chance, training loss falling"


def details(cells: Sequence[Cell]) -> str:
    """A row for every cell: scores, learning rate, cost, and whether it is at chance."""
    header = ["task", "model", "learning rate", "validation (%)", "test (%)", "majority (%)", "updates x rows"]
    header += ["training rows", "longest", "parameters", "s / 1,000 updates", "remark"]
    rows = []
    for cell in cells:
        recipe, runs = cell["recipe"], cell["runs"]
        pace = statistics.median(run["seconds"] / max(1, run["steps"]) for run in runs)
        rates = len({run["rate"] for run in runs})
        rate = "-" if cell["rate"] is None else f"{cell['rate']:g} of {rates}"
        row = [TITLES[cell["task"]["name"]], label(cell["model"]), rate]
        row += [spread(scores(cell, "validation")), spread(scores(cell, "test")), f"{100 * cell['majority']:.1f}"]
        row += [f"{recipe['steps']:,} x {recipe['batch_size']}", f"{cell['rows']['train']:,}"]
        row += [f"{cell['task']['max_length']:,}", f"{runs[0]['parameters']:,}", f"{1000 * pace:.0f}"]
        rows.append([*row, verdict(cell)])
    return markdown_table(header, rows)


# ---- tables over cells ----


def settings(cell: Cell) -> tuple[int, int, int]:
    """What must be equal in a column: updates, training rows and the longest input."""
    return cell["recipe"]["steps"], cell["rows"]["train"], cell["task"]["max_length"]


def columns(cells: Sequence[Cell]) -> dict[str, dict[str, Cell]]:
    """By task, and settings where there are several, the cells by model."""
    found: dict[str, dict[str, Cell]] = {}
    for task, title in TITLES.items():
        own = [cell for cell in cells if cell["task"]["name"] == task]
        kinds = sorted({settings(cell) for cell in own})
        for cell in own:
            updates, rows, longest = settings(cell)
            name = f"{title} ({updates:,} x {rows:,} rows of {longest:,})" if len(kinds) > 1 else title
            found.setdefault(name, {})[cell["model"]] = cell
    return found


def accuracy(cells: Sequence[Cell]) -> str:
    """Test accuracy by model and task, and the mean of the models that have all columns, if each is another task."""
    found = columns(cells)
    one_each = len(found) == len({cell["task"]["name"] for cell in cells})
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    rows = []
    for model in models:
        values = [scores(own[model], "test") if model in own else None for own in found.values()]
        texts = ["-" if value is None else spread(value) for value in values]
        mean = f"{statistics.mean(map(statistics.mean, values)):.2f}" if all(values) and one_each else "-"
        rows.append([label(model), *texts, mean])
    return markdown_table(["test accuracy (%)", *found, "mean"], rows)


def text(result: dict[str, Any]) -> str:
    """The Markdown of a result of `report.py`."""
    sources = dict.fromkeys(cell["task"]["source"] for cell in result["cells"])
    parts = [accuracy(result["cells"]), "Every cell:", details(result["cells"])]
    parts.append("\n".join(f"- {source}" for source in sources))
    return "\n\n".join(parts)


# ---- plots ----


def plot_curves(cells: Sequence[Cell], path: Path) -> None:
    """Write a PNG: validation accuracy and training loss against updates, a column for each task.

    Of several cells, there is a curve for each seed of the chosen learning rate, with the number of updates if most
    have another; of one cell, for every run.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    tasks = [task for task in TITLES if any(cell["task"]["name"] == task for cell in cells)]
    styles: dict[str, dict[str, str]] = {}  # the same in every column
    figure = Figure(figsize=(max(7, 4.6 * len(tasks)), 6.4), layout="constrained")
    axes = figure.subplots(2, len(tasks), squeeze=False, sharex="col")
    for column, task in enumerate(tasks):
        own = [cell for cell in cells if cell["task"]["name"] == task]
        for name, run in _curves(own, every_run=len(cells) == 1):
            steps = [row["step"] for row in run["curve"]]
            new = {"label": name, "color": f"C{len(styles) % 10}", "linestyle": "-" if len(styles) < 10 else "--"}
            style = styles.setdefault(name, new)
            axes[0, column].plot(steps, [100 * row["accuracy"] for row in run["curve"]], **style)
            axes[1, column].plot(steps, [row.get("loss", math.nan) for row in run["curve"]], **style)
        axes[0, column].axhline(100 * own[0]["majority"], color="black", linestyle=":", linewidth=1)
        axes[0, column].set_title(f"{TITLES[task]} (dotted: majority class)", fontsize=10)
        axes[1, column].set_xlabel("updates")
    axes[0, 0].set_ylabel("validation accuracy (%)")
    axes[1, 0].set_ylabel("training loss (nats)")
    for axis in axes.flat:
        axis.grid(True, color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], **style) for style in styles.values()]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right upper")
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _curves(cells: Sequence[Cell], every_run: bool) -> list[tuple[str, dict[str, Any]]]:
    if every_run:
        runs = cells[0]["runs"]
        return [(f"{label(cells[0]['model'])}, {run['rate']:g}, seed {run['seed']}", run) for run in runs]
    usual = statistics.mode(cell["recipe"]["steps"] for cell in cells)
    named = [(cell, "" if cell["recipe"]["steps"] == usual else f", {cell['recipe']['steps']:,}") for cell in cells]
    return [(f"{label(cell['model'])}{steps}", run) for cell, steps in named for run in chosen(cell)]
