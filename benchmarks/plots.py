"""Figures of the benchmarks: time and memory against length, for everything that a run compares."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

STYLES = {
    "roberta": {"color": "0.45", "marker": "s", "linestyle": "--"},
    "roberta-eager": {"color": "black", "marker": "x", "linestyle": "--"},
    "modernbert": {"color": "tab:red", "marker": "^", "linestyle": "--"},
}
LABELS = {"roberta": "RoBERTa", "roberta-eager": "RoBERTa, eager", "modernbert": "ModernBERT"}
COLORS = ("blue", "orange", "green", "purple", "brown", "pink", "olive", "cyan")  # of the other models, in their order


def plot(result: dict[str, Any], path: Path) -> None:
    """Write an encoder benchmark as a PNG with two log-log panels."""
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
        f"(one row beyond), {settings['dtype']}, {machine_name(result['machine'])}",
        fontsize=10,
    )
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


class Panel(NamedTuple):
    """One plot of a figure: curves against length."""

    title: str
    curves: dict[str, dict[int, float]]  # name, length: value


def plot_panels(panels: Sequence[Panel], title: str, path: Path, dashed: Sequence[str] = ()) -> None:
    """Write a PNG with log-log panels beside each other; a name has one colour in all of them, peers are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.4), layout="constrained")
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colors = dict(zip([name for name in names if name not in dashed], COLORS, strict=False))
    grays = dict(zip([name for name in names if name in dashed], ("0.45", "black", "0.7", "0.6", "0.3"), strict=False))
    for axis, panel in zip(axes, panels, strict=True):
        for name, curve in panel.curves.items():
            own = name in colors
            style = {"color": f"tab:{colors[name]}" if own else grays[name], "marker": "o" if own else "s"}
            lengths = sorted(curve)
            values = [curve[length] for length in lengths]
            axis.plot(lengths, values, label=name, linewidth=2, linestyle="-" if own else "--", **style)
        axis.set_title(panel.title, fontsize=11)
        _log_axes(axis, sorted({length for curve in panel.curves.values() for length in curve}))
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150, metadata={"Software": None})  # as above
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


def machine_name(machine: dict[str, Any]) -> str:
    """What a run was measured on, in few words."""
    if "accelerator" in machine:
        return machine["accelerator"]
    return f"{machine['cpu']}, {machine['threads']} thread(s)"
