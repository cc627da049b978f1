"""Tables and plot of `minilm_cost.py`."""

import math
import re
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import summaries
from minilm_report import is_shared
from minilm_tasks import TITLES
from plots import COLORS, panels, plain, save

from luna_hf.scripting import markdown_table

TEACHER, BAG, BM25, FLOAT32 = "teacher", "bag of word vectors", "BM25", "pytorch"
WINDOWS = (128, 256)
TASKS = ("race", "novels", "papers", "qmsum")  # plotted, with their mean
# What the tables call the ways of `benchmarks/deployment.py`.
DTYPES = {
    FLOAT32: "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "torchao-int8": "int8, torchao",
    "onnx": "ONNX float32",
    "onnx-int8": "ONNX int8",
}
Result = dict[str, Any]


def windows(size: int) -> str:
    """What the source is called where it reads windows."""
    return f"{TEACHER}, windows of {size}"


# ---- tables ----


def text(result: Result) -> str:
    """All tables."""
    made = ", ".join(f"{name} {number}" for name, number in result["packages"].items())
    tables = {
        f"Texts a second in float32, over the {TEACHER}'s (in one pass; above its positions, on windows of "
        f"{WINDOWS[-1]}; in brackets the quartiles)": speeds(result, 1),
        "The same for batches of short texts": speeds(result, None),
        "Peak memory of a pass beyond the weights, MiB": memory(result),
        f"Number formats: texts a second over the same model in float32, and in brackets over the {TEACHER}'s in the "
        "same format; peak memory; cosine to the vectors in float32": formats(result),
    }
    found = "\n\n".join(f"{title}:\n\n{table}" for title, table in tables.items() if table)
    return found + (f"\n\nMade with {made}." if made and formats(result) else "")


def entries(result: Result, way: str = FLOAT32) -> list[Result]:
    """The entries of single texts in a number format, by length."""
    return [entry for entry in result["lengths"] if entry["call"] == way and entry["rows"] == 1]


def names_in(found: Sequence[Result]) -> list[str]:
    """The contenders of some entries that need a model, the source first."""
    names = dict.fromkeys(name for entry in found for name in entry["models"] if name not in (BAG, BM25))
    return sorted(names, key=lambda name: not name.startswith(TEACHER))


def over_teacher(models: Result, name: str) -> Result | None:
    """A contender's speed over the source's: in one pass, or on windows where it cannot read the text in one."""
    peers = models[name].get("speed_over", {})
    return peers.get(TEACHER if TEACHER in models else windows(WINDOWS[-1]))


def speeds(result: Result, rows: int | None) -> str:
    """A row for each length of single texts, or of batches: the source's texts a second, and the ratios to it."""
    found = [entry for entry in result["lengths"] if entry["call"] == FLOAT32 and (entry["rows"] == 1) == (rows == 1)]
    names = [name for name in names_in(found) if name != TEACHER]
    names = [name for name in names if any(over_teacher(e["models"], name) for e in found if name in e["models"])]
    table = []
    for entry in found:
        models = entry["models"]
        base = TEACHER if TEACHER in models else windows(WINDOWS[-1])
        cells = [f"{entry['rows']} x {entry['length']:,}" if rows != 1 else f"{entry['length']:,}"]
        cells.append(f"{entry['rows'] / models[base]['seconds']['median']:,.2f}")
        for name in names:
            over = over_teacher(models, name) if name in models else None
            cells.append("1" if name == base else f"{over['median']:.2f} ({quartiles(over)})" if over else "-")
        table.append(cells)
    return markdown_table(["tokens", f"{TEACHER}, texts a second", *names], table) if table else ""


def quartiles(summary: Result) -> str:
    """The quartiles of a ratio."""
    return " to ".join(f"{value:.2f}" for value in summary["quartiles"])


def mebibytes(models: Result, name: str) -> str:
    """The peak memory of a contender, or a dash."""
    value = summaries.figure(models, name, "MiB") if name in models else None
    return "-" if value is None else f"{value:,.{int(value < 10)}f}"


def memory(result: Result) -> str:
    """A row for each length: peak memory of every contender."""
    found = entries(result)
    names = names_in(found)
    rows = [[f"{entry['length']:,}", *(mebibytes(entry["models"], name) for name in names)] for entry in found]
    return markdown_table(["tokens", *names], rows)


def formats(result: Result) -> str:
    """A row for each model and number format: size, closeness, and speed and memory by length."""
    lengths = [entry["length"] for way in DTYPES if way != FLOAT32 for entry in entries(result, way)]
    lengths, rows = list(dict.fromkeys(lengths)), []
    for name, ways in result["models"].items():
        for way, own in ways.items() if len(ways) > 1 else ():
            found = {entry["length"]: entry["models"] for entry in entries(result, way)}
            cells = [name, DTYPES[way], f"{own['bytes'] / 1e6:.0f}", f"{own['cosine']:.4f}"]
            for length in lengths:
                # Where the source cannot read a text in one pass, its windows stand in its row.
                key = windows(WINDOWS[-1]) if name == TEACHER and TEACHER not in found[length] else name
                cells += [relative(found[length], key, way), mebibytes(found[length], key)]
            rows.append(cells)
    header = [f"{n:,} tokens, {what}" for n in lengths for what in ("speed", "MiB")]
    return markdown_table(["", "format", "MB", "cosine", *header], rows) if rows else ""


def relative(models: Result, name: str, way: str) -> str:
    """The speed of a contender over its own in float32, and over the source's."""
    own = "1" if way == FLOAT32 else f"{models[name]['over_float32']['median']:.2f}"
    over = None if name.startswith(TEACHER) else over_teacher(models, name)
    return f"{own} (x {over['median']:.2f})" if over else own


# ---- scores against time ----


class Point(NamedTuple):
    """A contender in a panel; `seconds` are those of a document."""

    name: str
    seconds: float
    score: float


def curve(result: Result, name: str) -> dict[int, float]:
    """Seconds of a text by its tokens."""
    return {
        entry["length"]: entry["models"][name]["seconds"]["median"]
        for entry in entries(result)
        if name in entry["models"]
    }


def at(seconds: dict[int, float], tokens: float) -> float:
    """Seconds between the measured lengths, or beyond them: a power of the tokens from each length to the next."""
    lengths = sorted(seconds)
    if len(lengths) == 1:
        return seconds[lengths[0]] * tokens / lengths[0]
    place = min(max(bisect(lengths, tokens), 1), len(lengths) - 1)
    low, high = lengths[place - 1 : place + 1]
    power = math.log(seconds[high] / seconds[low]) / math.log(high / low)
    return seconds[low] * (tokens / low) ** power


def cost(result: Result, name: str, tokens: float) -> float | None:
    """Seconds in which a contender of `minilm.py` reads a text, if they were measured.

    A conversion costs the same before its training.
    """
    whole = curve(result, TEACHER)
    if found := re.fullmatch(r"teacher, cut at (\d+)", name):
        return at(whole, min(tokens, int(found[1])))
    if found := re.fullmatch(r"teacher, .* of (\d+)", name):
        own = curve(result, windows(int(found[1])))
        return at({**whole, **own}, tokens) if own else None
    own = curve(result, name.removesuffix(", untrained"))
    return at(own, tokens) if own else None


def task_points(result: Result, scores: Result, task: str) -> list[Point]:
    """The contenders of a task whose cost is known."""
    tokens = result["document_tokens"][task]
    costs = {name: cost(result, name, tokens) for name in scores.get(task, {}) if not is_shared(name)}
    return [Point(name, own, scores[task][name]["score"]) for name, own in costs.items() if own is not None]


def mean_points(groups: Sequence[Sequence[Point]]) -> list[Point]:
    """The means of those that have all tasks."""
    named = [{point.name: point for point in group} for group in groups]
    found = [[own[name] for own in named] for name in named[0] if all(name in own for own in named)]
    count = len(groups)
    return [Point(own[0].name, sum(p.seconds for p in own) / count, sum(p.score for p in own) / count) for own in found]


def plot(result: Result, scores: Result, path: Path) -> None:
    """Draw the scores of long texts against the seconds of a document, a panel for each task and one for their mean."""
    found = {task: task_points(result, scores, task) for task in TASKS}
    groups = {f"{TITLES[t]}, {result['document_tokens'][t]:,.0f} tokens a document": found[t] for t in TASKS}
    # Without a score of a conversion a task would only remove others from the mean.
    judged = [task for task in TASKS if any(point.name in result["models"] for point in found[task])]
    if len(judged) > 1:
        groups[f"Mean of {', '.join(TITLES[task] for task in judged)}"] = mean_points([found[t] for t in judged])
    groups = {title: points for title, points in groups.items() if points}
    figure, axes = panels(math.ceil(len(groups) / 2), 2, (13, 5 * math.ceil(len(groups) / 2)), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    own = [name for name in result["models"] if name != TEACHER]
    drawn = list(zip(axes.flat, groups.items(), strict=False))
    for axis, (title, points) in drawn:
        draw(axis, title, points, {name: f"tab:{color}" for name, color in zip(own, COLORS, strict=False)})
    figure.draw_without_rendering()  # the labels need the final places of the axes
    for axis, (_, points) in drawn:
        label(axis, points)
    save(figure, path)


def draw(axis: Any, title: str, points: Sequence[Point], colors: dict[str, str]) -> None:
    """The points of a panel: the source's gray, conversions coloured, and hollow before their training."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for point in points:
        color = colors.get(point.name.removesuffix(", untrained"), "0.5")
        hollow = point.name not in colors and color != "0.5"
        marker = "s" if color == "0.5" else "o"
        axis.plot(point.seconds, point.score, marker, color=color, markerfacecolor="white" if hollow else color)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(base=10))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set(title=title, xlabel="seconds a document", ylabel="nDCG@10 x 100")
    axis.set_xlim(min(point.seconds for point in points) / 2, max(point.seconds for point in points) * 30)
    axis.margins(y=0.12)
    plain(axis)


def label(axis: Any, points: Sequence[Point]) -> None:
    """Write the name beside each point, where it covers no point and no other name, with a line to it."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    scale = axis.figure.dpi / 72
    places = {point: axis.transData.transform((point.seconds, point.score)) for point in points}
    taken = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in places.values()]
    inside = axis.get_window_extent()
    offsets = [(side, up) for side in (8, -8, 40, -40) for up in range(-120, 121, 6)]
    for point in sorted(points, key=lambda point: -point.score):
        line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        own = {"textcoords": "offset points", "fontsize": 9, "va": "center", "arrowprops": line}
        written = axis.annotate(point.name, (point.seconds, point.score), (0, 0), **own)
        size = Text.get_window_extent(written)
        for side, up in sorted(offsets, key=lambda offset: (abs(offset[1]), abs(offset[0]))):
            x, y = places[point] + scale * np.array([side, up])
            box = Bbox.from_bounds(x - size.width * (side < 0), y - size.height / 2, size.width, size.height)
            if inside.count_contains(box.get_points()) == 2 and not box.count_overlaps(taken):
                break
        written.set(position=(side, up), horizontalalignment="left" if side > 0 else "right")
        taken.append(box)
