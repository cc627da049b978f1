"""Draw what the queries of one head read: window, marked and selected tokens, and slots.

python benchmarks/reads_figure.py docs/images/reads.png
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

TOKENS, WINDOW, MARKED, SLOTS = 64, 16, 4, 6
SELECTED = (11, 17, 27, 35, 46, 57)
# Colour of a part, and what the legend says.
PARTS = (
    ("#dfe7f2", "slots: means of the rest"),
    ("#3b6fb6", "window"),
    ("#d95f30", "marked tokens, which read all"),
    ("#e8b53a", "selected tokens"),
)


def parts_of_a_head() -> np.ndarray:
    """The part (TOKENS, TOKENS) in which each query reads each token."""
    distance = np.arange(TOKENS) - np.arange(TOKENS)[:, None]
    parts = ((distance >= -WINDOW // 2) & (distance < WINDOW // 2)).astype(int)
    parts[:, SELECTED] = 3
    parts[:, :MARKED] = parts[:MARKED] = 2
    return parts


def draw(path: Path) -> None:
    """Draw the figure."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.imshow(parts_of_a_head(), cmap=ListedColormap([colour for colour, _ in PARTS]), vmin=0, vmax=len(PARTS) - 1)
    for slot in range(1, SLOTS):
        axes.axvline(slot * TOKENS // SLOTS - 0.5, color="#9db2cf", linewidth=0.8, linestyle=":")
    axes.set(xlabel="tokens that are read", ylabel="queries", xticks=[0, TOKENS - 1], yticks=[0, TOKENS - 1])
    handles = [Patch(color=colour, label=text) for colour, text in PARTS]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    draw(parser.parse_args().output)
