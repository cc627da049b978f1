"""Plots of the studies: loss against steps and seconds, attention over training, task scores."""

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
PROBES = {
    "pack_entropy": "entropy of pack maps\n(share of the maximum)",
    "unpack_entropy": "entropy of unpack maps\n(share of the maximum)",
    "slot_similarity": "cosine between slots",
    "attention_entropy": "entropy of softmax maps\n(share of the maximum)",
}


def plot_losses(result: dict[str, Any], path: Path) -> None:
    """Held-out loss of every run against steps and against seconds, with the unigram entropy."""
    figure, axes = panels(1, 2, (12, 4.8), sharey=True)
    labels = {"step": "steps", "seconds": "seconds (steps times the measured cost of one)"}
    for axis, (against, label) in zip(axes, labels.items(), strict=True):
        for run in result["runs"]:
            axis.plot(run["curve"][against], run["curve"]["loss"], **_style(run))
        unigram = sum(run["unigram_loss"] for run in result["runs"]) / len(result["runs"])
        axis.axhline(unigram, color="black", linestyle=":", linewidth=1, label="unigram entropy")
        axis.set_xlabel(label)
        plain(axis)
    axes[0].set_ylabel("loss at masked held-out tokens (nats)")
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(_title(result), fontsize=10)
    save(figure, path)


def plot_attention(result: dict[str, Any], path: Path) -> None:
    """Entropies and slot similarity over training, first layer solid and last layer dotted; first seed only."""
    figure, axes = panels(1, 4, (16, 4.2), sharey=True)
    runs = [run for run in result["runs"] if run["seed"] == min(run["seed"] for run in result["runs"])]
    for axis, (name, title) in zip(axes, PROBES.items(), strict=True):
        for run in runs:
            values = run["probe"].get(name)
            if values and values[0][0] is not None:  # a single slot has no entropy
                style, steps = _style(run), run["probe"]["step"]
                axis.plot(steps, [layers[0] for layers in values], **{**style, "linestyle": "-"})
                axis.plot(steps, [layers[-1] for layers in values], **{**style, "linestyle": ":", "label": None})
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("steps")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
        plain(axis)
    figure.suptitle(f"{_title(result)}; solid: first layer, dotted: last layer", fontsize=10)
    save(figure, path)


def plot_scores(result: dict[str, Any], path: Path) -> None:
    """Scores of every task and system: a point for each seed, a bar for their mean."""
    figure, axis = panels(1, 1, (11, 4.6))
    tasks = result["tasks"]
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


def _title(result: dict[str, Any]) -> str:
    recipe, machine, model = result["recipe"], result["machine"], result["body"]
    return (
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, blocks of {recipe['block_size']}, "
        f"{recipe['global_batch_tokens']:,} tokens a step, vocabulary of {recipe['vocab_size']:,}; "
        f"{machine.get('accelerator', machine['cpu'])}, {machine['threads']} thread(s)"
    )


def _style(run: dict[str, Any]) -> dict[str, Any]:
    label = run["system"] if run["seed"] == 0 else None  # one entry in the legend for all seeds
    alpha = 1.0 if run["seed"] == 0 else 0.45
    return {"linewidth": 1.6, "alpha": alpha, "label": label, **STYLES.get(run["system"], {})}


def plain(axis: Any) -> None:
    """A light grid, no frame."""
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure for a file, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Any, path: Path) -> None:
    """Write a figure."""
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=130, metadata={"Software": None})
