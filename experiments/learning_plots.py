"""Figures of the learning experiments: loss against steps and seconds, attention over training, task scores."""

from pathlib import Path
from typing import Any

STYLES = {
    "roberta": {"color": "0.45", "linestyle": "--"},
    "roberta-conv": {"color": "black"},
    "luna-32": {"color": "tab:blue", "linestyle": "--"},
    "luna-128": {"color": "tab:cyan", "linestyle": "--"},
    "luna-conv": {"color": "tab:red"},
    "luna-conv-tied": {"color": "tab:orange"},
    "luna-conv-1": {"color": "tab:green", "linestyle": "-."},
}


def plot_losses(runs: list[dict[str, Any]], title: str, path: Path) -> None:
    """Held-out loss of every run against steps and against seconds, with the unigram entropy."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    for axis, against in zip(axes, ("step", "seconds"), strict=True):
        for run in runs:
            axis.plot(run["curve"][against], run["curve"]["loss"], **_style(run))
        unigram = sum(run["unigram_loss"] for run in runs) / len(runs)
        axis.axhline(unigram, color="black", linestyle=":", linewidth=1, label="unigram entropy")
        axis.set_xlabel({"step": "steps", "seconds": "seconds (steps times the measured cost of one)"}[against])
        plain(axis)
    axes[0].set_ylabel("loss at masked held-out tokens (nats)")
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def plot_attention(runs: list[dict[str, Any]], title: str, path: Path) -> None:
    """Entropies and slot similarity over training, first layer solid and last layer dotted; first seeds only."""
    plt = pyplot()
    panels = {
        "pack_entropy": "entropy of pack maps",
        "unpack_entropy": "entropy of unpack maps",
        "slot_similarity": "cosine between slots",
        "attention_entropy": "entropy of softmax maps",
    }
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.2), layout="constrained", sharey=True)
    first = min(run["seed"] for run in runs)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for run in (run for run in runs if run["seed"] == first and name in run["probe"]):
            values = run["probe"][name]
            if values[0][0] is None:  # a single slot
                continue
            style = _style(run)
            axis.plot(run["probe"]["step"], [layers[0] for layers in values], **{**style, "linestyle": "-"})
            axis.plot(
                run["probe"]["step"], [layers[-1] for layers in values], **{**style, "linestyle": ":", "label": None}
            )
        axis.set_title(f"{label}\n(share of the maximum)" if "entropy" in label else label, fontsize=10)
        axis.set_xlabel("steps")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
        plain(axis)
    figure.suptitle(f"{title}; solid: first layer, dotted: last layer", fontsize=10)
    save(figure, path)


def plot_scores(tasks: dict[str, dict[str, Any]], path: Path) -> None:
    """Scores of every task and system: a point for each seed, a bar for their mean."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(11, 4.6), layout="constrained")
    systems = list(dict.fromkeys(system for task in tasks.values() for system in task["models"]))
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        color = STYLES.get(system, {}).get("color")
        for place, task in enumerate(tasks.values()):
            scores = [100 * score[task["metric"]] for score in task["models"][system]["scores"]]
            x = place + (index - (len(systems) - 1) / 2) * width
            label = system if place == 0 else None
            axis.bar(x, sum(scores) / len(scores), 0.9 * width, color=color, alpha=0.5, label=label)
            axis.plot([x] * len(scores), scores, ".", color="black", markersize=5)
    axis.set_xticks(range(len(tasks)), [f"{name}\n({task['metric']})" for name, task in tasks.items()], fontsize=9)
    axis.set_ylabel("per cent")
    axis.legend(frameon=False)
    plain(axis)
    save(figure, path)


def _style(run: dict[str, Any]) -> dict[str, Any]:
    label = run["system"] if run["seed"] == 0 else None  # one entry in the legend for all seeds
    alpha = 1.0 if run["seed"] == 0 else 0.45
    return {"linewidth": 1.6, "alpha": alpha, "label": label, **STYLES.get(run["system"], {})}


def plain(axis: Any) -> None:
    """A light grid, no frame."""
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def pyplot() -> Any:
    """pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def save(figure: Any, path: Path) -> None:
    """Write a figure and let go of it."""
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot().close(figure)
