"""Window dropout, the recipes' `window_dropout`, and the loss of a mixed model without its window or its slots.

A model that reads a window and slots may learn to use the window alone. While it trains, some updates therefore read a
smaller window, or none, so that the slots must carry what the window does not show.
"""

import dataclasses
from typing import Any

import numpy as np
from common.sections import read_section
from data.rows import WINDOWS
from transformers import PreTrainedConfig

from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.markdown import table
from luna_hf.scripting import UserError

# What a pass of a mixed model reads instead of both, by the name of its held-out loss in the log.
SWITCHES: dict[str, dict[str, Any]] = {
    "slots_off_loss": {"read_slots": False},
    "window_off_loss": {"local_window": 0},
}


@dataclasses.dataclass(frozen=True)
class WindowDropout:
    """The recipes' `window_dropout`.

    Attributes:
        windows: to draw from, each as likely as the others; 0 leaves the window out.
        probability: of drawing at the first update, instead of reading the config's window.
        final_probability: at the last update; in between it changes linearly.

    Raises:
        UserError: An invalid value.
    """

    windows: list[int]
    probability: float = 1.0
    final_probability: float = 0.0

    def __post_init__(self) -> None:
        if not self.windows or min(self.windows) < 0:
            raise UserError(
                f"`window_dropout`: `windows` is {self.windows}, but must be a list of sizes, such as [0, 16]."
            )
        for key in ("probability", "final_probability"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"`window_dropout`: `{key}` is {getattr(self, key)}, but must be from 0 to 1.")

    def draw(self, step: int, max_steps: int, seed: int) -> int | None:
        """The window of the update after `step` updates; `None` for the config's.

        It depends on the arguments alone, so that every process and a resumed run draw the same.
        """
        generator = np.random.default_rng((seed, WINDOWS, step))
        share = step / max(max_steps - 1, 1)
        if generator.random() >= (1 - share) * self.probability + share * self.final_probability:
            return None
        return int(generator.choice(self.windows))

    def check(self, config_window: int) -> None:
        """Check the windows against the `local_window` of the model's config.

        Raises:
            UserError: It has none, or a smaller one.
        """
        if max(self.windows) > config_window or not config_window:
            raise UserError(
                f"`window_dropout` draws from the windows {self.windows}, but the model's `local_window` is "
                f"{config_window}. Name smaller windows, or leave them out (`--window_dropout {{}}`)."
            )


def read_window_dropout(section: dict[str, Any]) -> WindowDropout | None:
    """The `window_dropout` of a recipe; `None` if it is empty. Raises the `UserError`s of `WindowDropout`."""
    return read_section(WindowDropout, section, "`window_dropout`") if section else None


def is_mixed(config: PreTrainedConfig) -> bool:
    """Whether a model reads a window and slots."""
    return isinstance(config, BoundedMemoryConfig) and config.mixed_window() > 0


def switches_table(figures: dict[str, Any]) -> str:
    """A table of the held-out loss with and without each part, for the card; "" for a model that is not mixed."""
    if "slots_off_loss" not in figures:
        return ""
    rows = {"window and slots": "held_out_loss", "window alone": "slots_off_loss", "slots alone": "window_off_loss"}
    return table(["this model reads", "loss (nats)"], [[name, f"{figures[key]:.3f}"] for name, key in rows.items()])
