"""What the slots of a Luna read: pack and unpack maps over the words of a text, and their picture."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from loading import Loaded
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from luna_hf.scripting import UserError

MOST_WORDS, SHOWN_SLOTS = 40, 8
START, END = "(start)", "(end)"  # of the text; tokens that the model adds


class SlotMaps(NamedTuple):
    """Shares between 0 and 1, means over heads and the chosen layers."""

    words: list[str]  # n, the marks of start and end included
    slots: list[int]  # the k slots that the words read most, the first of them most; numbered from 1
    pack: Tensor  # (n, k): the share of a slot's content that comes from a word; over all words, 1
    unpack: Tensor  # (n, k): the share of what a word reads from slots that comes from one; over all slots, 1
    slot_share: float  # of what a word reads, all slots together; the rest is the window


@torch.inference_mode()
def read_slots(loaded: Loaded, text: str, layer: int | None = None) -> SlotMaps:
    """Compute the maps of a text.

    Args:
        loaded: a Luna encoder.
        text: a sentence.
        layer: from 1; `None` for the mean over all layers.

    Raises:
        UserError: The text is empty, or has too many words for a picture.
    """
    ids = loaded.encode(text)
    if (count := len(text.split())) > MOST_WORDS:
        raise UserError(f"The text has {count} words, but the picture shows at most {MOST_WORDS}. Shorten it.")
    outputs = loaded.model(ids, output_attentions=True, output_pack_attentions=True)
    chosen = slice(None) if layer is None else slice(layer - 1, layer)
    pack = torch.stack(outputs.pack_attentions[chosen]).mean((0, 1, 2)).T  # (tokens, slots)
    # Slots come first; a window's positions, if there is one, follow them.
    unpack = torch.stack(outputs.attentions[chosen]).mean((0, 1, 2))[:, : pack.shape[1]]
    words, places = words_of_tokens(loaded, text)
    members = torch.nn.functional.one_hot(torch.tensor(places), len(words)).T.float()  # (words, tokens)
    pack, unpack = members @ pack, (members @ unpack) / members.sum(1, keepdim=True)
    from_slots = unpack.sum(1, keepdim=True)  # the rest comes from the window
    unpack = unpack / from_slots
    best = unpack.mean(0).argsort(descending=True, stable=True)[:SHOWN_SLOTS]
    return SlotMaps(words, (best + 1).tolist(), pack[:, best], unpack[:, best], from_slots.mean().item())


def words_of_tokens(loaded: Loaded, text: str) -> tuple[list[str], list[int]]:
    """Words (what stands between spaces, with marks of start and end), and for every token the place of its word."""
    found = list(re.finditer(r"\S+", text))
    starts = [match.start() for match in found]
    encoded = loaded.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    last = [end - 1 for _, end in encoded["offset_mapping"]]  # a token may begin with a space
    ordinary = [place for place, special in enumerate(encoded["special_tokens_mask"]) if not special]
    first, after = ordinary[0], ordinary[-1] + 1
    inside = [max(bisect_right(starts, place), 1) for place in last[first:after]]
    words = [START, *(match.group() for match in found), END]
    return words, [*[0] * first, *inside, *[len(words) - 1] * (len(last) - after)]


def explain(maps: SlotMaps) -> str:
    """How to read the picture, with an example from it, as Markdown."""
    share, place = maps.pack[:, 0].max(0)
    lines = [
        "**Left, column by column:** which words fill a slot. "
        f"Slot {maps.slots[0]} takes {share:.0%} of its content from *{maps.words[place]}*.",
        "**Right, row by row:** how much of what a word reads from the slots comes from each of them.",
        f"Numbers are per cent, and darker is more. The {len(maps.slots)} slots that the words read most are shown, so "
        "rows on the right may add up to less than 100.",
    ]
    if maps.slot_share < 0.995:
        lines.append(f"Of all that a word reads, {maps.slot_share:.0%} comes from slots, the rest from neighbours.")
    return " ".join(lines)


def draw(maps: SlotMaps) -> Figure:
    """Draw both maps side by side; they share the words on the vertical axis."""
    figure = Figure(figsize=(11, 1.7 + 0.3 * len(maps.words)), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _heat_map(left, maps.pack, maps.slots, "Pack: which words fill each slot", "Blues")
    _heat_map(right, maps.unpack, maps.slots, "Unpack: which slots each word reads", "Oranges")
    left.set_yticks(range(len(maps.words)), [_short(word) for word in maps.words])
    left.set_ylabel("words of the text")
    return figure


def _heat_map(axes: Axes, shares: Tensor, slots: Sequence[int], title: str, colours: str) -> None:
    words = shares[1:-1]  # start and end may take so much that all words would look alike
    lowest, highest = words.min().item(), words.max().item()
    axes.imshow(shares.numpy(), aspect="auto", cmap=colours, vmin=lowest, vmax=highest)
    axes.set_title(title, fontsize=12, fontweight="bold")
    axes.set_xlabel("slots, the most read first")
    axes.set_xticks(range(len(slots)), [f"slot {slot}" for slot in slots])
    axes.tick_params(length=0)
    for row, values in enumerate(shares.tolist()):
        for column, value in enumerate(values):
            if value >= 0.005:
                colour = "white" if value > 0.4 * lowest + 0.6 * highest else "black"
                axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=colour)


def _short(word: str, most: int = 18) -> str:
    # A dollar sign would start a formula.
    return (word if len(word) <= most else f"{word[: most - 1]}…").replace("$", r"\$")
