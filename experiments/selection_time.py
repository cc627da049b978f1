"""Time of a converted encoder beside the encoder itself and beside a window alone."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from selection_rules import Memory
from torch import Tensor
from transformers import PreTrainedModel

from luna_hf import AbcModel
from luna_hf.warm_start import warm_start

WINDOW = Memory(64)  # the opponent: a window alone
Pass = Callable[[], Any]


def convert(source: str, rule: Memory, length: int) -> PreTrainedModel:
    """The encoder with a rule's window, selected tokens and slots, for rows of up to `length` tokens.

    Raises:
        ValueError: The rule is a variant that the library does not have.
    """
    if rule != Memory(rule.window, rule.selected, rule.queries, rule.slots):
        raise ValueError(f"The library has no {rule.name()}.")
    selection = {"num_selected_tokens": rule.selected, "num_selection_queries": rule.queries} if rule.selected else {}
    slots = {"memory_control": "compressive", "memory_size": rule.slots or 1}
    model, _ = warm_start(AbcModel, source, max_length=length, local_window=rule.window, **selection, **slots)
    return model


def options_of(rule: Memory) -> dict[str, bool]:
    """Options of a pass of the converted encoder."""
    return {} if rule.slots else {"read_slots": False}


def converted_pass(model: PreTrainedModel, rule: Memory, ids: Tensor) -> Pass:
    """A pass of a converted encoder."""
    return lambda: model(ids, **options_of(rule))


def source_pass(model: PreTrainedModel, ids: Tensor) -> Pass:
    """A pass of the encoder itself, whose positions are repeated beyond those that it has."""
    first = 0 if model.config.model_type == "bert" else model.config.pad_token_id + 1
    position_ids = first + torch.arange(ids.shape[1])[None] % (model.config.max_position_embeddings - first)
    return lambda: model(ids, position_ids=position_ids)


def random_row(model: PreTrainedModel, length: int) -> Tensor:
    """A row of random ids."""
    first = max(model.config.pad_token_id + 1, 5)
    return torch.randint(first, model.config.vocab_size - 1, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def interleave(passes: dict[str, Pass], repeats: int) -> dict[str, list[float]]:
    """Seconds of every pass, taken in turns, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(1 + repeats):
        for name, run in passes.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median milliseconds of "own", and the medians of its ratios to the others of the same turn."""
    own = seconds["own"]
    found = {"milliseconds": 1000 * statistics.median(own)}
    for name, others in seconds.items():
        if name != "own":
            found[f"over_{name}"] = statistics.median(mine / other for mine, other in zip(own, others, strict=True))
    return found
