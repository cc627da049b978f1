"""Tables and plot of the conversions of a real encoder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plots import panels, plain, save

from luna_hf.scripting import markdown_table

TASKS = ("needle", "recall")
SCORES = {"stsb": "STS-B", "race_ndcg": "RACE, nDCG@10", "novels_r1": "novels, R@1", "novels_mrr": "novels, MRR"}


def text(result: dict[str, Any]) -> str:
    """All tables that have results."""
    tables = {"Cosine to the source's embedding by tokens": cosines(result), "Zero-shot scores x 100": scores(result)}
    tables["Facts far from the question, right answers x 100 by tokens between them"] = distant(result)
    tables["Slots before any training, by the factor of the logits that write them"] = slots(result)
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in tables.items() if table)


def by_length(values: dict[str, float]) -> list[str]:
    """Values by length, shortest first."""
    return [f"{value:.4f}" for _, value in sorted(values.items(), key=lambda item: int(item[0]))]


def cosines(result: dict[str, Any]) -> str:
    """Cosines by length, and those without the slots and without the window at the longest."""
    if not result["runs"]:
        return ""
    figures = {(name, when): own for name, run in result["runs"].items() for when, own in run.items()}
    lengths = sorted(map(int, next(iter(figures.values()))["cosine"]))
    rows = []
    for (name, when), own in figures.items():
        off = [own[part][str(lengths[-1])] if own.get(part) else None for part in ("slots_off", "window_off")]
        rows.append([name, when, *by_length(own["cosine"]), *dashed(off)])
    header = ["model", "", *(f"{length:,}" for length in lengths), "slots off", "window off"]
    return markdown_table(header, rows)


def dashed(values: Iterable[float | None]) -> list[str]:
    """Values, or dashes for those that there are not."""
    return ["-" if value is None else f"{value:.4f}" for value in values]


def scores(result: dict[str, Any]) -> str:
    """Every score of every contender."""
    rows = [[name, *(f"{own[key]:.1f}" for key in SCORES)] for name, own in result["scores"].items()]
    return markdown_table(["model", *SCORES.values()], rows) if rows else ""


def distant(result: dict[str, Any]) -> str:
    """Accuracy by task and distance."""
    if not result["distant"]:
        return ""
    distances = sorted({int(each) for own in result["distant"].values() for each in own["accuracy"]["needle"]})
    rows = []
    for name, own in result["distant"].items():
        found = [own["accuracy"][task].get(str(distance)) for task in TASKS for distance in distances]
        rows.append([name, *("-" if value is None else f"{value:.1f}" for value in found)])
    return markdown_table(["model", *(f"{task}, {distance:,}" for task in TASKS for distance in distances)], rows)


def slots(result: dict[str, Any]) -> str:
    """Cosine and the share of the ends by factor."""
    rows = [
        [name, f"{own['factor']:g}", f"{own['ends']:.1%}", *by_length(own["cosine"])]
        for name, found in result["slots"].items()
        for own in found
    ]
    lengths = sorted(map(int, next(iter(result["slots"].values()))[0]["cosine"])) if rows else []
    header = ["model", "factor", "held by [CLS] and [SEP]", *(f"cosine, {length:,} tokens" for length in lengths)]
    return markdown_table(header, rows) if rows else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the distance to the source by length, after training."""
    figure, axis = panels(1, 1, (7.5, 4.8))
    for name, run in result["runs"].items():
        cosine = run["trained"]["cosine"]
        lengths = sorted(map(int, cosine))
        values = [max(1e-5, 1 - cosine[str(length)]) for length in lengths]
        axis.plot(lengths, values, marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens")
    axis.set_ylabel("1 - cosine to the source")
    plain(axis)
    if result["runs"]:
        axis.legend(frameon=False, fontsize=8)
    save(figure, path)
