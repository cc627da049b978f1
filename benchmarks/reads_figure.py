"""Draw what the queries of one head read: window, marked and selected tokens, and slots.

    python benchmarks/reads_figure.py docs/images/reads.png

The parts are those of a model of this package with random weights, found by its own functions.
"""

import argparse
from pathlib import Path

import matplotlib
import torch

from luna_hf import AbcConfig, AbcModel
from luna_hf.ops.window import window_reach

TOKENS, WINDOW, MARKED, SELECTED, SLOTS = 64, 16, 4, 6, 6
# Part, colour, and what the legend says.
PARTS = (
    ("slots", "#dfe7f2", "slots: means of the rest"),
    ("window", "#3b6fb6", "window"),
    ("marked", "#d95f30", "marked tokens, which read all"),
    ("selected", "#e8b53a", "selected tokens"),
)


def parts_of_a_head() -> tuple[torch.Tensor, list[int]]:
    """Return the part (TOKENS, TOKENS) in which each query reads each token, and where the slots' stretches begin."""
    torch.manual_seed(3)
    config = AbcConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        memory_control="compressive",
        memory_size=SLOTS,
        local_window=WINDOW,
        num_selected_tokens=SELECTED,
        initializer_range=0.3,
    )
    model = AbcModel(config).eval()
    marks = torch.arange(TOKENS)[None] < MARKED
    states = torch.randn(1, TOKENS, 32)
    _, context = model.begin(states, None, marks)
    attention = model.encoder.layer[0].attention.self
    selected = attention.select_tokens(states, attention.key_and_value(states)[0], context)
    distance = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    before, after = window_reach(WINDOW)
    parts = ((distance >= -before) & (distance <= after)).long()
    parts[:, context.marked.mask[0, 0]] = 2
    parts[:, selected.mask[0, 0]] = 3
    parts[context.marked.mask[0, 0]] = 2
    return parts, [slot * TOKENS // SLOTS for slot in range(1, SLOTS)]


def draw(path: Path) -> None:
    """Draw the figure."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    parts, borders = parts_of_a_head()
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    axes.imshow(parts, cmap=ListedColormap([colour for _, colour, _ in PARTS]), vmin=0, vmax=len(PARTS) - 1)
    for border in borders:
        axes.axvline(border - 0.5, color="#9db2cf", linewidth=0.8, linestyle=":")
    axes.set(xlabel="tokens that are read", ylabel="queries", xticks=[0, TOKENS - 1], yticks=[0, TOKENS - 1])
    handles = [Patch(color=colour, label=text) for _, colour, text in PARTS]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    draw(parser.parse_args().output)
