"""Held-out figures of a conversion by length, and their plot."""

from pathlib import Path
from typing import Any

import torch
from engine.card import drawing
from engine.log import RunLog
from engine.windows import SWITCHES, is_mixed
from torch import Tensor

from converting.objective import Pair
from converting.texts import Rows
from luna_hf.scripting import UserError

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
_LEAST_ROWS = 2


class HeldOut:
    """Held-out rows by length, with the teacher's embeddings of them, which are computed once."""

    def __init__(self, pair: Pair, rows: Rows, tokens: int, longest: int) -> None:
        """Choose about `tokens` of each length up to `longest`.

        Raises:
            UserError: There are none of any length.
        """
        found = {
            length: rows.held_out(length, max(_LEAST_ROWS, tokens // length)) for length in LENGTHS if length <= longest
        }
        self.rows: dict[int, Tensor] = {length: ids for length, ids in found.items() if ids is not None}
        if not self.rows:
            raise UserError(
                f"Rows of {LENGTHS[0]} tokens are the shortest that are evaluated. Raise `lengths`."
                if longest < LENGTHS[0]
                else f"No held-out document has {LENGTHS[0] - 2} tokens to evaluate on. Name longer documents."
            )
        self.goals = {
            length: torch.cat([pair.embed(part) for part in _split(ids)]) for length, ids in self.rows.items()
        }

    def measure(self, pair: Pair) -> dict[str, Any]:
        """By length: `cosine` to the teacher, `hidden` errors of the layers, and the cosine without a part.

        `slots_off` and `window_off` are for models with a window beside slots.
        """
        mixed = is_mixed(pair.student.config)
        switched = {name.removesuffix("_loss"): reads for name, reads in SWITCHES.items() if mixed}
        figures: dict[str, Any] = {"cosine": {}, "hidden": {}, **{name: {} for name in switched}}
        for length, ids in self.rows.items():
            parts = list(zip(_split(ids), _split(self.goals[length], ids.shape[1]), strict=True))
            found = [(len(part), pair.measure(part, goal)) for part, goal in parts]
            figures["cosine"][str(length)] = mean([(count, each["cosine"]) for count, each in found])
            if "hidden" in found[0][1]:
                layers = torch.tensor([each["hidden"] for _, each in found])
                counts = torch.tensor([float(count) for count, _ in found])
                figures["hidden"][str(length)] = (layers * counts[:, None]).sum(0).div(counts.sum()).tolist()
            for name, reads in switched.items():
                off = [(len(part), pair.measure(part, goal, **reads)["cosine"]) for part, goal in parts]
                figures[name][str(length)] = mean(off)
        return figures


def _split(rows: Tensor, length: int | None = None) -> tuple[Tensor, ...]:
    """Parts of about 4,096 tokens, of rows of `length` (their own, by default)."""
    return rows.split(max(1, 4096 // (length or rows.shape[1])))


def mean(pairs: list[tuple[int, float]]) -> float:
    """The mean of values, each with its weight."""
    return sum(count * value for count, value in pairs) / sum(count for count, _ in pairs)


def summary(figures: dict[str, Any]) -> str:
    """Cosines by length in a line."""
    return ", ".join(f"{int(length):,}: {value:.4f}" for length, value in figures["cosine"].items())


def plot(log: RunLog, path: Path) -> None:
    """Draw cosines by length, the hidden errors, and what the parts of the memory are worth, against tokens."""
    entries = [entry for entry in log.entries if entry["kind"] == "held_out"]
    tokens = [entry["seen_tokens"] for entry in entries]
    with drawing(path, panels=3, width=15) as (left, middle, right):
        for place, length in enumerate(entries[0]["cosine"]):
            shade = str(0.75 - 0.75 * place / max(1, len(entries[0]["cosine"]) - 1))
            distances = [1 - entry["cosine"][length] for entry in entries]
            left.plot(tokens, distances, color=shade, marker="o", markersize=2, label=f"{int(length):,} tokens")
        left.set_ylabel("1 - cosine to the teacher")
        left.set_yscale("log")
        for longest in list(entries[0]["hidden"])[-1:]:  # none if the teacher reads less than the shortest rows
            for layer, errors in enumerate(zip(*(entry["hidden"][longest] for entry in entries), strict=True), 1):
                middle.plot(tokens, errors, marker="o", markersize=2, label=f"layer {layer}")
            middle.set_ylabel(f"relative error of the states, {longest} tokens")
        for name, style in (("cosine", "-"), ("slots_off", "--"), ("window_off", ":")):
            for color, length in zip(("tab:blue", "tab:red"), list(entries[0].get(name, {}))[-4::3], strict=False):
                values = [entry[name][length] for entry in entries]
                right.plot(
                    tokens, values, style, color=color, label=f"{name.replace('_', ' ')}, {int(length):,} tokens"
                )
        right.set_ylabel("cosine to the teacher")
        for axes in (left, middle, right):
            axes.set_xlabel("tokens")
