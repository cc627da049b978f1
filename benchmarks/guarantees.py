"""Guarantees of encoders about padding, batching and length, measured on tiny random models.

    python benchmarks/guarantees.py

Writes a Markdown table and a JSON file with the differences behind it. Outputs are compared at real tokens only. Every
forward runs in a fresh copy of the model, because some models change their attention permanently after a short input.
"""

import argparse
import copy
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, positive, seconds, write_result
from summaries import growth_exponent
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging
from zoo import FIRST_TOKEN, NOTES, PAD, SUBJECTS, VOCAB_SIZE, Subject, randomised

from luna_hf.scripting import Parser, describe_run, markdown_table, progress, run_script

TOLERANCE = 1e-4
LONGEST = 256  # the batch's length
ROW_LENGTHS = (LONGEST, 200, 9)
ANY_LENGTHS = (1, 2, 3, 63, 257, 512)
COST_LENGTHS = (1024, 4096)

CHECKS = {
    "right_padding": "row alone = row right-padded in a batch",
    "left_padding": "row alone = row left-padded in a batch",
    "pad_content": "independent of the ids at pads",
    "other_rows": "independent of the other rows",
    "any_length": "any length from 1 to the maximum",
    "deterministic": "two forwards are equal",
    "cost": "time in length n: documented / measured exponent",
}
PROTOCOL = (
    f"Two layers of width 32, random weights, float32, eval; rows of {', '.join(map(str, ROW_LENGTHS))} tokens in a "
    f"batch of length {LONGEST}, with an attention_mask where the model takes one, and with explicit position_ids for "
    "left padding where the model would otherwise count pads as positions. yes: the largest difference (in brackets) "
    f"at real tokens is at most {TOLERANCE:g}. Lengths tried: {', '.join(map(str, ANY_LENGTHS))}; the maximum is "
    f"{ANY_LENGTHS[-1]}. Time: best of 3 forwards of one row at {COST_LENGTHS[0]} and at {COST_LENGTHS[1]} tokens; the "
    "exponent is the slope between them in logarithms (fixed costs lower it: linear time may give less than 1)."
)

Rows = list[Tensor]  # ids of every row, without padding


def random_rows(lengths: Sequence[int], seed: int) -> Rows:
    """Random ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST_TOKEN, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def pad_rows(rows: Rows, length: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """(rows, length) ids and mask."""
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(length - len(row), length) if left else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    return ids, mask


def accepted(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
    """The inputs that a model's forward accepts."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    names = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in names and value is not None}


def forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """Last hidden states (rows, length, d) of a fresh copy of the model."""
    with torch.no_grad():
        return copy.deepcopy(model)(**accepted(model, ids, mask, positions)).last_hidden_state


def difference(states: Tensor, others: Tensor) -> float:
    """Largest absolute difference."""
    return (states - others).abs().max().item()


def differences_alone(model: PreTrainedModel, rows: Rows, left: bool, first_position: int | None) -> list[float]:
    """Largest difference between a row in a padded batch and alone, for every row."""
    ids, mask = pad_rows(rows, LONGEST, left)
    counted = left and first_position is not None
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + first_position if counted else None
    together = forward(model, ids, mask, positions)
    alone = [forward(model, row[None], torch.ones(1, len(row), dtype=torch.long))[0] for row in rows]
    return [difference(together[i][mask[i] == 1], states) for i, states in enumerate(alone)]


def difference_repeated(model: PreTrainedModel, rows: Rows, other_pads: bool = False) -> float:
    """Largest difference at real tokens between two forwards, the second one with other ids at pads if asked."""
    ids, mask = pad_rows(rows, LONGEST)
    other = torch.where(mask == 1, ids, torch.stack(random_rows([LONGEST] * len(rows), seed=2))) if other_pads else ids
    return difference(forward(model, ids, mask)[mask == 1], forward(model, other, mask)[mask == 1])


def difference_neighbours(model: PreTrainedModel, rows: Rows) -> float:
    """Largest difference in one row when all other rows and their lengths change."""
    index = 1  # of 200 tokens: padded itself
    others = random_rows([57, len(rows[index]), LONGEST], seed=3)
    others[index] = rows[index]
    before, after = (forward(model, *pad_rows(batch, LONGEST))[index, : len(rows[index])] for batch in (rows, others))
    return difference(before, after)


def reads_other_tokens(model: PreTrainedModel) -> bool:
    """Whether a token's state depends on its neighbour; without attention every guarantee holds trivially."""
    ids, mask = pad_rows(random_rows([LONGEST], seed=4), LONGEST)
    changed = ids.clone()
    changed[0, 1] = FIRST_TOKEN + (ids[0, 1] - FIRST_TOKEN + 1) % (VOCAB_SIZE - FIRST_TOKEN)
    return difference(forward(model, ids, mask)[0, 0], forward(model, changed, mask)[0, 0]) > TOLERANCE


def attempt(measure: Callable[[], float | list[float]]) -> dict[str, Any]:
    """Verdict on a difference, or on one for each row, or the error that the model raised."""
    try:
        measured = measure()
    except Exception as error:  # a model's error is a result here
        return {"holds": False, "error": f"{type(error).__name__}: {error}"}
    by_row = measured if isinstance(measured, list) else [measured]
    return {"holds": max(by_row) <= TOLERANCE, "difference": max(by_row), "by_row": by_row}


def check_lengths(build: Callable[[int], PreTrainedModel]) -> dict[str, Any]:
    """Lengths at which the model raises, or does not return one finite state for each token."""
    model = randomised(build(ANY_LENGTHS[-1]))
    failures = {}
    for length in ANY_LENGTHS:
        ids, mask = pad_rows(random_rows([length], seed=length), length)
        try:
            states = forward(model, ids, mask)
        except Exception as error:  # as above
            failures[length] = f"{type(error).__name__}: {error}"
            continue
        if states.shape[:2] != ids.shape or not states.isfinite().all():
            failures[length] = f"shape {tuple(states.shape)}, or not finite"
    return {"holds": not failures, "failures": failures}


def cost_exponent(build: Callable[[int], PreTrainedModel]) -> float:
    """Exponent of the time between the two cost lengths."""
    best = []
    for length in COST_LENGTHS:
        model = build(length).eval()
        inputs = accepted(model, *pad_rows(random_rows([length], seed=5), length))
        with torch.no_grad():
            model(**inputs)
            best.append(min(seconds(lambda model=model, inputs=inputs: model(**inputs), "cpu") for _ in range(3)))
    return growth_exponent(dict(zip(COST_LENGTHS, best, strict=True)))


def check(subject: Subject, with_cost: bool = True) -> dict[str, Any]:
    """All checks of one model."""
    torch.manual_seed(0)
    model = randomised(subject.build(LONGEST))
    if not reads_other_tokens(model):
        return {}
    rows = random_rows(ROW_LENGTHS, seed=1)
    results = {
        "right_padding": attempt(lambda: differences_alone(model, rows, False, subject.first_position)),
        "left_padding": attempt(lambda: differences_alone(model, rows, True, subject.first_position)),
        "pad_content": attempt(lambda: difference_repeated(model, rows, other_pads=True)),
        "other_rows": attempt(lambda: difference_neighbours(model, rows)),
        "any_length": check_lengths(subject.build),
        "deterministic": attempt(lambda: difference_repeated(model, rows)),
    }
    if with_cost:
        results["cost"] = {"documented": subject.cost, "exponent": cost_exponent(subject.build)}
    return results


def cell(name: str, result: dict[str, Any] | None) -> str:
    """One cell of the table."""
    if result is None:
        return "not run"
    if "error" in result:
        return "no: raises an error"
    if name == "cost":
        return f"{result['documented']} / {result['exponent']:.2f}"
    if name == "any_length":
        failures = result["failures"]
        if not failures:
            return "yes"
        return f"no: {', '.join(map(str, failures))} raise" if len(failures) < len(ANY_LENGTHS) else "no"
    worst = result["difference"]
    return ("yes" if result["holds"] else "no") + (f" ({worst:.0e})" if worst else " (0)")


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The comparison as a Markdown table with numbered notes."""
    rows, notes = [], []
    for subject in (subject for subject in SUBJECTS if subject.name in results):
        checks, label = results[subject.name], subject.name
        if note := NOTES.get(subject.name):
            notes.append(f"[{len(notes) + 1}] {note}.")
            label += f" [{len(notes)}]"
        rows.append([label, *(cell(name, checks.get(name)) if checks else "no attention" for name in CHECKS)])
    return "\n\n".join([markdown_table(["Model", *CHECKS.values()], rows), "  \n".join([PROTOCOL, *notes])])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="only models with names that begin with one of these")
    parser.add_argument("--no-cost", action="store_true", help="skip the timing")
    parser.add_argument("--threads", type=positive, default=1, help="default: 1")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file and the table")
    options = parser.parse_args(arguments)
    begins = tuple(options.models or [""])
    options.subjects = [subject for subject in SUBJECTS if subject.name.startswith(begins)]
    if not options.subjects:
        parser.error(f"no model begins with {' or '.join(begins)}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 2 after a mistake in the command."""
    return run_script(lambda: run(parse(arguments), arguments))


def run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure, print and write what the options ask for."""
    torch.set_num_threads(options.threads)
    hf_logging.set_verbosity(logging.ERROR)  # models announce every internal padding
    results = {}
    for subject in options.subjects:
        progress(subject.name)
        results[subject.name] = check(subject, with_cost=not options.no_cost)
    notes = {name: note for name, note in NOTES.items() if name in results}
    result = {**describe_run(__file__, arguments, "cpu"), "protocol": PROTOCOL, "notes": notes, "results": results}
    path, result = write_result(options.output, "guarantees", "cpu", "float32", result)
    text = markdown(result["results"])
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
