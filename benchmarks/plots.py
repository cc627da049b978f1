"""Plots of the benchmarks and studies."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLORS = ("blue", "orange", "green", "purple", "brown", "pink", "olive", "cyan", "red")
GRAYS = ("0.45", "black", "0.7", "0.6", "0.3")


class Panel(NamedTuple):
    """One plot of a figure."""

    title: str
    curves: dict[str, dict[int, float]]  # name, length: value


def plot_panels(panels: Sequence[Panel], title: str, path: Path, peers: Sequence[str] = ()) -> None:
    """Write a PNG of log-log panels side by side; a name has one colour in all of them, peers are gray and dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    own = zip([name for name in names if name not in peers], itertools.cycle(COLORS), strict=False)
    others = zip([name for name in names if name in peers], itertools.cycle(GRAYS), strict=False)
    styles = {name: {"color": f"tab:{color}", "marker": "o"} for name, color in own}
    styles |= {name: {"color": gray, "marker": "s", "linestyle": "--"} for name, gray in others}
    for axis, panel in zip(axes, panels, strict=True):
        for name, curve in panel.curves.items():
            lengths = sorted(curve)
            axis.plot(lengths, [curve[length] for length in lengths], label=name, linewidth=2, **styles[name])
        axis.set_title(panel.title, fontsize=11)
        _log_axes(axis, sorted({length for curve in panel.curves.values() for length in curve}))
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=150, metadata={"Software": None})


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
    """Accelerator, or processor and threads."""
    if "accelerator" in machine:
        return machine["accelerator"]
    return f"{machine['cpu']}, {machine['threads']} thread(s)"


def plot(result: dict[str, Any], path: Path) -> None:
    """Time per token against length, a panel for each call of a benchmark, and the peak memory of its last one."""
    panels: dict[str, Panel] = {}
    for entry in result["lengths"]:
        call, tokens = entry.get("call", "forward"), entry.get("tokens") or entry["rows"] * entry["length"]
        for name, model in entry["models"].items():
            times = panels.setdefault(call, Panel(f"{call}, microseconds per token", {}))
            times.curves.setdefault(name, {})[entry["length"]] = 1e6 * model["seconds"]["median"] / tokens
    memory = Panel(f"{call}, peak memory (MiB)", {})
    for entry in result["lengths"]:
        for name, model in entry["models"].items():
            if "peak_memory_bytes" in model and entry.get("call", "forward") == call:
                memory.curves.setdefault(name, {})[entry["length"]] = max(1, model["peak_memory_bytes"]) / 2**20
    sizes = ("layers", "width", "heads", "slots", "rows", "tokens_per_batch", "dtype")
    settings = [f"{name.replace('_', ' ')} {result['settings'][name]}" for name in sizes if name in result["settings"]]
    title = f"{', '.join(settings)}; {machine_name(result['machine'])}"
    plot_panels([*panels.values(), *([memory] if memory.curves else [])], title, path, peers=result["peers"])


# ---- studies ----


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure for a file, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def plain(axis: Any) -> None:
    """A light grid, no frame."""
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write a figure."""
    # Without the library's version in its metadata the file depends on the numbers only.
    figure.savefig(path, dpi=130, metadata={"Software": None})
