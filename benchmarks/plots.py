"""Figure of an encoder benchmark: time and memory against length, for every model of the run."""

from pathlib import Path
from typing import Any

STYLES = {
    "roberta": {"color": "0.45", "marker": "s", "linestyle": "--"},
    "roberta-eager": {"color": "black", "marker": "x", "linestyle": "--"},
    "modernbert": {"color": "tab:red", "marker": "^", "linestyle": "--"},
}
LABELS = {"roberta": "RoBERTa", "roberta-eager": "RoBERTa, eager", "modernbert": "ModernBERT"}
COLORS = ("blue", "orange", "green", "purple", "brown", "pink", "olive", "cyan")  # of the other models, in their order


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG with two log-log panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    lengths = [row["length"] for row in result["lengths"]]
    for axis in axes:
        axis.set_prop_cycle(color=[f"tab:{color}" for color in COLORS])
    for name in result["models"]:
        rows = [row["models"][name] for row in result["lengths"]]
        style = {"linewidth": 2, "marker": "o", "label": LABELS.get(name, name), **STYLES.get(name, {})}
        per_token = [1e6 / row["tokens_per_second"] for row in rows]
        axes[0].plot(lengths, per_token, **style)
        axes[1].plot(lengths, [row["peak_memory_bytes"] / 2**20 for row in rows], **style)
    settings = result["settings"]
    what = "training step" if settings["mode"] == "mlm_step" else "forward"
    axes[0].set_title(f"time of a {what} per token (microseconds)", fontsize=11)
    axes[1].set_title(f"peak memory of a {what} (MiB)", fontsize=11)
    for axis in axes:
        _log_axes(axis, lengths)
    axes[0].legend(frameon=False)
    figure.suptitle(
        f"{settings['layers']} layer(s) of width {settings['width']}, batches of {settings['tokens_per_batch']} tokens "
        f"(one row beyond), {settings['dtype']}, {_machine(result['machine'])}",
        fontsize=10,
    )
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def _log_axes(axis: Any, lengths: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xlabel("length in tokens")
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="major", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)


def _machine(machine: dict[str, Any]) -> str:
    if "accelerator" in machine:
        return machine["accelerator"]
    return f"{machine['cpu']}, {machine['threads']} thread(s)"
