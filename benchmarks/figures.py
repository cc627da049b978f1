"""Draw the figures of the documentation: diagrams of the mechanisms, and committed results at a glance.

    python benchmarks/figures.py

Nothing is measured here. `reads.py` measures what `reads-real.png` shows.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle, Wedge
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from update_docs import load

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
# Colours of Okabe and Ito, which colour-blind readers tell apart, by what they stand for in all diagrams.
BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
TOKEN, SLOT, QUERY, WINDOW, SELECTED, MARKED, REST = SKY, ORANGE, GREEN, BLUE, RED, PINK, "#F3D9A4"
INK, GRAY = "#222222", "#767676"
TOKENS = 8  # of a diagram
DIGEST = "Digest"  # in the information of a PNG


def canvas(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def digest(figure: Figure) -> str:
    """Of the texts and the data in a figure: a picture carries it, so that a test sees whether it is fresh."""
    found = [text.get_text() for text in figure.findobj(Text)]
    found += [line.get_xydata().round(6).tolist() for line in figure.findobj(Line2D)]
    found += [points.get_offsets().round(6).tolist() for points in figure.findobj(PathCollection)]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of few colours, which is small."""
    figure.set_dpi(110)
    drawing = FigureCanvasAgg(figure)
    drawing.draw()
    picture = Image.fromarray(np.asarray(drawing.buffer_rgba())).convert("RGB")
    information = PngInfo()
    information.add_text(DIGEST, digest(figure))
    picture.quantize(112, dither=Image.Dither.NONE).save(path, optimize=True, pnginfo=information)


# ---- parts of diagrams, on axes of 10 by 6 ----


def blank(axis: Axes, bottom: float = 0.0, top: float = 6.6) -> None:
    """Axes for a diagram."""
    axis.set(xlim=(0, 10), ylim=(bottom, top), aspect="equal")
    axis.axis("off")


def say(axis: Axes, x: float, y: float, text: str, size: float = 13, colour: str = INK, **options: Any) -> None:
    """Write centred text."""
    axis.text(x, y, text, fontsize=size, color=colour, **{"ha": "center", "va": "center", **options})


def column(axis: Axes, x: float, colour: str, count: int = TOKENS, low: float = 0.6, high: float = 5.4) -> np.ndarray:
    """Draw a column of boxes; returns their heights."""
    places = np.linspace(high, low, count)
    size = 0.46 if count > 3 else 0.7
    for y in places:
        box = FancyBboxPatch((x - size / 2, y - size / 2), size, size, boxstyle="round,pad=0,rounding_size=0.08")
        box.set(facecolor=colour, edgecolor="white", linewidth=1, zorder=3)
        axis.add_patch(box)
    return places


def weights(rows: int, columns: int, seed: int) -> np.ndarray:
    """Uneven weights (rows, columns), as of a softmax; every row has sum 1."""
    drawn = np.exp(1.6 * np.random.default_rng(seed).standard_normal((rows, columns)))
    return drawn / drawn.sum(1, keepdims=True)


def link(axis: Axes, x: tuple[float, float], starts: Sequence[float], ends: Sequence[float], strength: Any) -> None:
    """Draw lines from every start to every end, as thick as `strength` (starts, ends) says."""
    for start, row in zip(starts, np.broadcast_to(strength, (len(starts), len(ends))), strict=True):
        for end, weight in zip(ends, row, strict=True):
            axis.plot(x, (start, end), color=GRAY, linewidth=0.3 + 5 * weight, alpha=0.25 + 0.6 * weight, zorder=1)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow."""
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, linewidth=2, color=INK, zorder=4))


def grid(axis: Axes, x: float, y: float, values: np.ndarray, cell: float) -> None:
    """Draw a matrix around a point, with dark cells for values near 1 and light ones for those near 0."""
    rows, columns = values.shape
    for (row, place), value in np.ndenumerate(values):
        corner = (x + (place - columns / 2) * cell, y + (rows / 2 - row - 1) * cell)
        colour = np.array(to_rgb(SLOT)) * (share := 0.12 + 0.88 * value) + 1 - share
        axis.add_patch(Rectangle(corner, cell, cell, facecolor=colour, edgecolor="white", linewidth=1, zorder=3))


def ends(axis: Axes) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens at the left and queries at the right."""
    say(axis, 0.7, 6.1, "tokens")
    say(axis, 9.3, 6.1, "queries")
    return column(axis, 0.7, TOKEN), column(axis, 9.3, QUERY)


# ---- the mechanisms ----


def luna(axis: Axes) -> None:
    """Slots read the tokens, then tokens read the slots."""
    tokens, queries = ends(axis)
    slots = column(axis, 5, SLOT, 3, 1.4, 4.6)
    link(axis, (0.7, 5), tokens, slots, weights(3, TOKENS, 3).T)
    link(axis, (5, 9.3), slots, queries, weights(TOKENS, 3, 5).T)
    say(axis, 5, 6.1, "slots")
    say(axis, 2.8, 6.1, "pack", colour=GRAY)
    say(axis, 7.2, 6.1, "unpack", colour=GRAY)
    arrow(axis, (5, 0.95), (5, 0.0))
    say(axis, 5.2, 0.35, "next layer", 12, ha="left")


def abc(axis: Axes) -> None:
    """A control weighs what each token writes into slots of keys and values."""
    tokens, queries = ends(axis)
    control = weights(3, TOKENS, 118).T
    for token, row in zip(tokens, control, strict=True):
        grid(axis, 2.5, token, row[None] / control.max(), 0.55)
        axis.plot((0.95, 1.65), (token, token), color=GRAY, linewidth=1.2)
    say(axis, 2.5, 6.1, "control")
    _, values = (column(axis, x, SLOT, 3, 1.4, 4.6) for x in (5.3, 6.3))
    arrow(axis, (3.5, 3), (4.7, 3))
    say(axis, 5.3, 0.6, "keys", 12)
    say(axis, 6.4, 0.6, "values", 12)
    say(axis, 5.8, 6.1, "slots")
    link(axis, (6.3, 9.3), values, queries, weights(TOKENS, 3, 11).T)


def gauge(axis: Axes, x: float, y: float, proportion: float) -> None:
    """Draw a proportion as part of a quarter of a circle."""
    axis.add_patch(Wedge((x - 0.2, y - 0.2), 0.45, 0, 90, facecolor="#dddddd", zorder=3))
    axis.add_patch(Wedge((x - 0.2, y - 0.2), 0.45, 0, 90 * proportion, facecolor=PINK, zorder=3))


def leapformer(axis: Axes) -> None:
    """Features, weighted by a proportion, are summed into one matrix."""
    tokens, queries = ends(axis)
    drawn = np.random.default_rng(2).random((2, TOKENS))
    for side, (x, places) in enumerate(((1.6, tokens), (8.4, queries))):
        for y, proportion in zip(places, drawn[side], strict=True):
            gauge(axis, x, y, proportion)
    link(axis, (1.6, 5), tokens, [3], 0.2)
    link(axis, (5, 8.4), [3], queries, 0.2)
    say(axis, 2.75, 6.1, "proportion", 12, PINK)
    grid(axis, 5, 3, np.random.default_rng(4).random((5, 5)), 0.5)
    say(axis, 5, 6.1, "sums")


def lavo(axis: Axes) -> None:
    """One mean for each basis, and a window."""
    tokens, queries = ends(axis)
    say(axis, 5, 6.1, "one number per basis")
    axis.add_patch(Rectangle((4, 2.4), 2, 3, facecolor="white", edgecolor="0.6", linewidth=1.5, zorder=2))
    for y, length in zip(np.linspace(4.9, 2.9, 4), (1.5, 0.6, 1.1, 0.35), strict=True):
        axis.add_patch(Rectangle((4.2, y - 0.17), length, 0.34, facecolor=SLOT, zorder=3))
    link(axis, (0.7, 4), tokens, [3.9], 0.2)
    link(axis, (6, 9.3), [3.9], queries, 0.2)
    for place in (5, 6, 7):
        axis.plot((0.95, 9.05), (tokens[place], queries[6]), color=WINDOW, linewidth=4, alpha=0.55, zorder=2)
    say(axis, 5, 0.35, "window", colour=WINDOW)


class Family(NamedTuple):
    """A family: its diagram, its equations, and what it keeps."""

    draw: Callable[[Axes], None]
    write: str
    read: str
    keeps: str


_LUNA = (r"slots $= \mathrm{softmax}(P\,K^T)\,V$", r"output $= \mathrm{softmax}(Q\,K_s^T)\,V_s$")
_ABC = (r"$K_s = \Sigma_j \varphi_j k_j,\;\; V_s = \Sigma_j \varphi_j v_j$", _LUNA[1])
_LEAP = (
    r"$S = \Sigma_j \varphi(k_j)\,v_j,\;\; z = \Sigma_j \varphi(k_j)$",
    r"output $= \varphi(q)\,S\;/\;\varphi(q)\,z$",
)
_LAVO = (r"$X_s = B \cdot \mathrm{mean}_j(B\,x_j)$", r"½ $\mathrm{softmax}(Q\,X_s^T)\,X_s$ + ½ window")
FAMILIES = {
    "Luna": Family(luna, *_LUNA, "keeps a few slots, which read the text"),
    "ABC": Family(abc, *_ABC, "keeps a few slots, which the text is written into"),
    "LeaPformer": Family(leapformer, *_LEAP, "keeps one table of sums"),
    "LAVO": Family(lavo, *_LAVO, "keeps one number per basis, and a window"),
}


def draw_family(name: str) -> Figure:
    """The diagram of one mechanism with its equations."""
    figure, (axis,) = canvas(7.6, 6)
    blank(axis, -1.4, 6.5)
    FAMILIES[name].draw(axis)
    for x, step, equation in ((2.4, "write", FAMILIES[name].write), (7.6, "read", FAMILIES[name].read)):
        say(axis, x, -0.45, step, 15, fontweight="bold")
        say(axis, x, -1.05, equation, 15)
    return figure


def draw_zoo() -> Figure:
    """The four families at a glance."""
    figure, axes = canvas(11, 8.4, 2, 2)
    for axis, (name, family) in zip(axes, FAMILIES.items(), strict=True):
        blank(axis, -1.1, 7.4)
        family.draw(axis)
        say(axis, 5, 7.05, name, 20, fontweight="bold")
        say(axis, 5, -0.6, family.keeps, 15)
    return figure


def draw_write_read() -> Figure:
    """Softmax attention, and a memory of bounded size that is written and read."""
    slots = 2
    figure, axes = canvas(11, 4.6, 2)
    for axis, name in zip(axes, ("Softmax attention", "Write and read"), strict=True):
        blank(axis, -1.3, 7.4)
        say(axis, 5, 7.05, name, 20, fontweight="bold")
        places, _ = ends(axis)
    link(axes[0], (0.7, 9.3), places, places, 0.15)
    memory = column(axes[1], 5, SLOT, slots, 2, 4)
    link(axes[1], (0.7, 5), places, memory, 0.25)
    link(axes[1], (5, 9.3), memory, places, 0.25)
    say(axes[1], 5, 6.1, "memory")
    for axis, pairs in zip(axes, (lambda count: count**2, lambda count: 2 * slots * count), strict=True):
        text = "\n".join(f"{count} tokens: {pairs(count)} pairs" for count in (TOKENS, 2 * TOKENS))
        say(axis, 5, -0.65, text, 15)
    return figure


def draw_reads() -> Figure:
    """The part in which each query reads each token: window, marked and selected tokens, or slots."""
    tokens, window, marked, selected = 64, 16, 4, (13, 22, 31, 40, 50, 59)
    figure, (axis, legend) = canvas(9.4, 5.2, 2, width_ratios=(1.25, 1))
    distance = np.arange(tokens) - np.arange(tokens)[:, None]
    parts = ((distance >= -window // 2) & (distance < window // 2)).astype(int)
    parts[:, selected] = 3
    parts[:, :marked] = parts[:marked] = 2
    colours = (REST, WINDOW, MARKED, SELECTED)
    axis.imshow(parts, cmap=ListedColormap(colours), vmin=0, vmax=3)
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel("tokens that are read", fontsize=15)
    axis.set_ylabel("queries, from first to last", fontsize=15)
    texts = ["slots\nall the rest, summarised", "window\nthe neighbours"]
    texts += ["marked\nread by all, read all", "selected\nby each head"]
    blank(legend, 0, 10)
    for y, part in zip((8.6, 6.3, 4.0, 1.7), (2, 1, 3, 0), strict=True):
        legend.add_patch(Rectangle((0, y - 0.6), 1.2, 1.2, facecolor=colours[part]))
        say(legend, 1.8, y, texts[part], 16, ha="left")
    return figure


# ---- results ----


def tidy(axis: Axes, title: str) -> None:
    """Large labels, no frame, a light grid."""
    axis.set_title(title, fontsize=17, fontweight="bold", loc="left", pad=12)
    axis.tick_params(labelsize=14, length=0)
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)


def below(axis: Axes, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """A legend in one row below the axes."""
    axis.legend(handles, labels, frameon=False, loc="upper center", ncols=len(labels), **options)


def by_length(axis: Axes, lengths: Sequence[int], ratios: Sequence[float]) -> None:
    """Axes of a speed ratio against length, with the line of equal speed."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set_yticks(ratios, [f"{ratio:g}x" for ratio in ratios])
    axis.axhline(1, color=INK, linewidth=2, linestyle="--")
    axis.set_xlabel("tokens in a text", fontsize=15)


def draw_speed() -> Figure:
    """Speed relative to RoBERTa against length, for every family."""
    # The first run has the short texts, without LAVO. All families at 512 tokens and more are from the second.
    short, rows = (load(f"encoder-forward-1-layer-{name}-cpu-float32")["lengths"] for name in ("chosen", "families"))
    rows = [row for row in short if 64 <= row["length"] < rows[0]["length"]] + rows
    figure, (axis,) = canvas(9, 5.4)
    by_length(axis, [64, 256, 1024, 4096, 16384], [1, 2, 3, 4, 5])
    styles = {"luna-tied": ("Luna", BLUE, "o", 0.1), "abc-mlp-64": ("ABC", RED, "s", 0.08)}
    styles |= {"leapformer": ("LeaPformer", GREEN, "^", -0.19), "lavo-64": ("LAVO", PINK, "D", -0.12)}
    for model, (name, colour, marker, shift) in styles.items():
        curve = {row["length"]: row["models"][model] for row in rows if model in row["models"]}
        speeds = [entry["speed_over"]["roberta"]["median"] for entry in curve.values()]
        axis.plot(list(curve), speeds, color=colour, marker=marker, linewidth=3, markersize=8)
        text = {"color": colour, "fontsize": 15, "fontweight": "bold", "va": "center"}
        axis.text(max(curve) * 1.15, speeds[-1] + shift, f"{name} {speeds[-1]:.1f}x", **text)
    axis.set(xlim=(56, 16384 * 5), ylim=(0.6, 5.3))
    axis.text(75000, 1.1, "faster than RoBERTa", fontsize=15, ha="right")
    axis.text(75000, 0.88, "slower", fontsize=15, ha="right", va="top")
    tidy(axis, "Speed of an encoder layer, relative to RoBERTa's")
    return figure


POINTS = {
    "many": {"s": 170, "marker": "s", "color": ORANGE},
    "one": {"s": 170, "marker": "D", "color": GRAY},
    "own": {"s": 170, "marker": "o", "color": BLUE},
}
LABELS = ("source, a vector for each window", "source, one vector", "converted, one vector")

OURS, SOURCE = "luna-minilm-en-4096", "teacher"
ONE = [f"{SOURCE}, {way}" for way in ("cut at 256", "cut at 512", "mean of windows of 128", "mean of windows of 256")]
MANY = [f"{SOURCE}, best window of {size}" for size in (128, 256)]


def draw_quality() -> Figure:
    """Scores and speed of the converted encoder beside its source's."""
    scores = load("minilm")["scores"]
    tasks = {"stsb": "similarity", "banking77": "intents", "race": "find an article", "novels": "find a novel"}
    tasks |= {"passkey": "find a passkey", "needle": "find one fact"}
    figure, (axis, speeds) = canvas(13, 5.6, 2, width_ratios=(1.25, 1))
    for place, task in enumerate(reversed(tasks)):
        points = {"own": scores[task][OURS]["score"]}
        for way, names in (("one", ONE), ("many", MANY)):
            found = [scores[task][name]["score"] for name in names if name in scores[task]]
            points |= {way: max(found)} if found else {}
        axis.plot((min(points.values()), max(points.values())), (place, place), color="0.8", linewidth=3, zorder=1)
        for way, style in POINTS.items():
            axis.scatter(points.get(way, []), [place] * (way in points), zorder=3, **style)
    axis.set_yticks(range(len(tasks)), list(tasks.values())[::-1])
    axis.set(xlim=(0, 100), ylim=(-0.6, len(tasks) - 0.4))
    tidy(axis, "Score: equal on short texts, mixed on long")
    handles = [axis.scatter([], [], **style) for style in POINTS.values()]
    below(axis, handles, LABELS, fontsize=13, bbox_to_anchor=(0.42, -0.07), handletextpad=0, columnspacing=0.8)
    axis.axhline(len(tasks) - 2.5, color=INK, linewidth=1)
    axis.text(1, len(tasks) - 1.5, "short\ntexts", fontsize=14, va="center", color=GRAY)
    axis.text(1, 2.5, "long\ntexts", fontsize=14, va="center", color=GRAY)
    rows = [row for row in load("minilm_cost")["lengths"] if (row["call"], row["rows"]) == ("pytorch", 1)]
    ratios = []
    for row in rows:
        peer = row["models"].get(SOURCE) or row["models"][f"{SOURCE}, windows of 256"]
        rounds = zip(peer["seconds"]["rounds"], row["models"][OURS]["seconds"]["rounds"], strict=True)
        ratios.append(float(np.median([theirs / own for theirs, own in rounds])))
    by_length(speeds, [16, 64, 256, 1024, 4096], [0, 0.5, 1])
    speeds.plot([row["length"] for row in rows], ratios, color=BLUE, marker="o", linewidth=3, markersize=8)
    speeds.set(ylim=(0, 1.25))
    speeds.text(16, 1.04, "as fast as the source", fontsize=15)
    tidy(speeds, "Speed: 2/3 on long texts")
    return figure


def draw_reads_real() -> Figure:
    """Where the attention of the shipped model goes, by layer."""
    result = load("reads-luna-minilm-en-4096-cpu-float32")
    rows = {"share of the text": result["text"]}
    rows |= {f"layer {place}": layer for place, layer in enumerate(result["layers"], 1)}
    figure, (axis,) = canvas(10, 5.6)
    parts = {"window": ("window", WINDOW, "white"), "first": ("[CLS]", PINK, INK)}
    parts |= {"selected": ("selected tokens", RED, "white"), "slots": ("slots", REST, INK)}
    places = [0, *(place + 0.5 for place in range(1, len(rows)))]
    left = np.zeros(len(rows))
    for part, (name, colour, ink) in parts.items():
        shares = np.array([100 * row[part] for row in rows.values()])
        axis.barh(places, shares, left=left, color=colour, edgecolor="white", linewidth=2, height=0.85, label=name)
        for place, share, start in zip(places, shares, left, strict=True):
            if share >= 5:
                axis.text(start + share / 2, place, f"{share:.0f}", ha="center", va="center", fontsize=14, color=ink)
        left += shares
    axis.set_yticks(places, list(rows))
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xticks=[])
    tidy(axis, "A few selected tokens get much of the attention (%)")
    below(axis, *axis.get_legend_handles_labels(), fontsize=15, bbox_to_anchor=(0.45, 0), handlelength=1)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "write-read": draw_write_read,
    "zoo": draw_zoo,
    **{name.lower(): partial(draw_family, name) for name in FAMILIES},
    "reads": draw_reads,
    "reads-real": draw_reads_real,
    "speed": draw_speed,
    "quality": draw_quality,
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder for the figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Draw all figures."""
    folder = parse(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        save(draw(), folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
