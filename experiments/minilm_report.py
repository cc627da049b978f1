"""Tables and plot of `minilm.py`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minilm_tasks import LONG, PLACES, SHORT, TITLES
from plots import panels, plain, save

from luna_hf.scripting import markdown_table

_KINDS = ("teacher", "bag", "BM25")
_SHARED = ("queries of the teacher", "documents of the teacher")


def text(result: dict[str, Any]) -> str:
    """All tables that have results."""
    scores = result["scores"]
    own = {task: {name: one for name, one in found.items() if not is_shared(name)} for task, found in scores.items()}
    hiding = [task for task, found in own.items() if any("places" in one for one in found.values())]
    tables = {
        "Short texts: correlation (STS, SICK), accuracy (Banking77, CLINC150, TREC) and nDCG@10, x 100": mean_table(
            own, SHORT
        ),
        "Long texts: nDCG@10 x 100": mean_table(own, [task for task in LONG if task not in hiding]),
        "How often, in percent, the right text comes first; also by its tokens, and by the place of the answer": hidden(
            {task: own[task] for task in hiding}
        ),
        late_title(result): late(result),
        "Queries of one model, documents of the other": shared(scores),
    }
    others = [task for task in scores if task not in TITLES]
    tables["Other tasks of mteb"] = mean_table(own, others)
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in tables.items() if table)


def is_shared(name: str) -> bool:
    """Whether a contender mixes two models."""
    return any(f", {words}" in name for words in _SHARED)


def names_in(found: Iterable[dict[str, Any]]) -> list[str]:
    """The names of contenders: ways of the source first, conversions last, each as they appear."""
    names = dict.fromkeys(name for scores in found for name in scores)
    return sorted(
        names, key=lambda name: next((n for n, kind in enumerate(_KINDS) if name.startswith(kind)), len(_KINDS))
    )


def cell(scores: dict[str, Any], name: str) -> str:
    """A score, or a dash where there is none."""
    return f"{scores[name]['score']:.2f}" if name in scores else "-"


def mean_table(scores: dict[str, Any], tasks: Iterable[str]) -> str:
    """A row for each contender, with the mean of those that have all tasks."""
    known = [task for task in tasks if scores.get(task)]
    rows = []
    for name in names_in(scores[task] for task in known):
        values = [scores[task][name]["score"] for task in known if name in scores[task]]
        mean = f"{sum(values) / len(values):.2f}" if len(values) == len(known) else "-"
        rows.append([name, *(cell(scores[task], name) for task in known), mean])
    return markdown_table(["", *(TITLES.get(task, task) for task in known), "mean"], rows) if rows else ""


def hidden(found: dict[str, Any]) -> str:
    """Scores: of all documents, by their length, and by the place of the answer, averaged over the lengths."""
    columns = [(task, "score") for task in found]
    columns += [(task, split) for task, own in found.items() for split in next(iter(own.values()))["splits"]]
    columns += [(task, place) for task in found for place in PLACES]

    def value(one: dict[str, Any], column: str) -> str:
        values = [own[column] for own in (one, one["splits"], *one["places"].values()) if column in own]
        return f"{sum(values) / len(values):.1f}" if values else "-"

    rows = [
        [name, *(value(found[task][name], column) if name in found[task] else "-" for task, column in columns)]
        for name in names_in(found.values())
    ]
    names = [f", {int(own):,}" if own.isdigit() else "" if own == "score" else f", {own}" for _, own in columns]
    header = [f"{TITLES[task]}{name}" for (task, _), name in zip(columns, names, strict=True)]
    return markdown_table(["", *header], rows) if rows else ""


def late_title(result: dict[str, Any]) -> str:
    """What the table of late chunking shows."""
    counts = ", ".join(f"{number:,} {name}" for name, number in result.get("late_counts", {}).items())
    return f"Passages that do not name their subject ({counts}), nDCG@10 x 100, by the tokens before the passage"


def late(result: dict[str, Any]) -> str:
    """Scores of late chunking and its opponents."""
    found = result["late"]
    places = list(dict.fromkeys(place for own in found.values() for place in own["places"]))
    rows = []
    for name in names_in([found]):
        own = found[name]
        values = [own["score"], own["named"], *(own["places"].get(place) for place in places)]
        rows.append([name, *("-" if value is None else f"{value:.2f}" for value in values)])
    return markdown_table(["", "all", "subject in the question", *places], rows) if rows else ""


def shared(scores: dict[str, Any]) -> str:
    """Mixed pairs, and each conversion and the source alone beside them."""
    tasks = [task for task, found in scores.items() if any(map(is_shared, found))]
    mixed = [name for name in names_in(scores[task] for task in tasks) if is_shared(name)]
    models = list(dict.fromkeys(name.partition(", ")[0] for name in mixed))
    alone = ["teacher, cut at 256", "teacher, mean of windows of 128", *models]
    rows = [[name, *(cell(scores[task], name) for task in tasks)] for name in (*alone, *mixed)]
    return markdown_table(["", *(TITLES.get(task, task) for task in tasks)], rows) if tasks else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the scores of long texts, and late chunking, as bars."""
    shown = [task for task in ("race", "novels", "papers", "qmsum") if result["scores"].get(task)]
    groups = [
        (TITLES[task], {n: one["score"] for n, one in result["scores"][task].items() if not is_shared(n)})
        for task in shown
    ]
    groups += (
        [("late chunking", {name: own["score"] for name, own in result["late"].items()})] if result["late"] else []
    )
    rows, most = max(1, math.ceil(len(groups) / 2)), max((len(values) for _, values in groups), default=1)
    figure, axes = panels(rows, 2, (12, rows * (0.8 + 0.2 * most)), squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place < len(groups):
            draw(axis, *groups[place])
        else:
            axis.set_visible(False)
    save(figure, path)


def draw(axis: Any, title: str, values: dict[str, float]) -> None:
    """Bars of one task, the best above."""
    names: Sequence[str] = sorted(values, key=values.__getitem__)
    colors = ["0.7" if name.startswith(_KINDS) else "tab:blue" for name in names]
    axis.barh(names, [values[name] for name in names], color=colors)
    axis.set_xlim(0, 100)
    axis.set_title(title, fontsize=10)
    axis.tick_params(labelsize=7)
    plain(axis)
