"""What the attention of a pretrained encoder needs from afar, without any training.

    python experiments/selection.py cosine --source FOLDER --texts FILE FILE ...
    python experiments/selection.py time --source FOLDER --texts FILE FILE ...
    python experiments/selection.py report

`cosine` runs the encoder with attention that is masked to what a bounded memory holds (`selection_rules.py`), on full
rows of 256 and 512 tokens, and compares the embedding of a row, the normalised mean of its states, with that of the
unmodified encoder. `time` converts the encoder with the same windows, selected tokens and slots, and measures a forward
pass of 4,096 tokens and, again, cosines. Both skip what is in the results. `report` writes tables and a plot, as the
others do at their end.

FOLDER is an encoder that `AutoModel` loads, or its name on the Hub. A FILE is plain text; every file gives as many rows
as the others.
"""

import argparse
import dataclasses
import hashlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import KEPT, RESULTS, read_json, run_alone
from selection_report import plot, text
from selection_rows import BATCH, LENGTHS, cosines, embed, read_rows
from selection_rules import Emulation, Lsg, Memory, install
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from luna_hf.scripting import Parser, UserError, portable, progress, write_json, write_text

SCRIPT = "experiments/selection.py"
WINDOWS, SELECTED, QUERIES, SLOTS = (32, 64, 128, 256), (16, 32, 64, 128), (4, 8, 16, 32, 64, 0), (0, 1, 4, 16, 64)
CENTRES = tuple(Memory(width, 64, slots=16) for width in (64, 128))
KINDS = ("stride", "block_stride", "norm", "pooling", "bos_pooling", "lsh")
PROTOCOL = (
    "No training. Cosine between the embeddings of a row by the encoder with emulated attention and by the unmodified "
    "encoder; an embedding is the normalised mean of the states. Full rows: [CLS], text, [SEP]; float32. A few rows, "
    "so a difference counts beside its standard error, not beside that of the means. LSG: the rules of lsg-converter "
    "0.1.9, which does not run with transformers 5."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=COMMANDS, help="step of the study")
    add("--source", help="folder of the encoder, or its name on the Hub")
    add("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="plain texts")
    add("--rows", type=int, default=24, help="rows of each length (default: %(default)s)")
    add("--groups", nargs="+", choices=groups(), default=list(groups()), help="what `cosine` compares (default: all)")
    add("--length", type=int, default=4096, help="tokens of a measured pass (default: %(default)s)")
    add("--repeats", type=int, default=5, help="measured passes of each model (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON file, the tables and the plot")
    options = parser.parse_args(arguments)
    if options.what != "report" and not (options.source and options.texts):
        raise UserError(f"`{options.what}` needs --source FOLDER and --texts FILE ...")
    return options


def groups() -> dict[str, list[Memory | Lsg]]:
    """What is compared, by the table that shows it; a rule may be in several."""
    alone = [Memory(width) for width in WINDOWS]
    means = [Memory(centre.window, slots=count) for centre in CENTRES for count in SLOTS[1:]]
    even = [dataclasses.replace(centre, score="even", slots=count) for centre in CENTRES for count in (0, 16)]
    first = [Memory(width, 1, score="even") for width in WINDOWS]
    return {
        "sizes": [Memory(width, count, slots=16) for width in WINDOWS for count in SELECTED],
        "parts": [Memory(max(LENGTHS) * 2), *alone, *first, *means, *even],
        "queries": [dataclasses.replace(centre, queries=count) for centre in CENTRES for count in QUERIES],
        "slots": [dataclasses.replace(centre, slots=count) for centre in CENTRES for count in SLOTS],
        "more": [
            Memory(width, *rest)
            for width in WINDOWS[:3]
            for rest in ((64, 32, 64), (128, 32, 16), (128, 16, 64), (128, 32, 64))
        ],
        "variants": [rule for centre in CENTRES for rule in variants(centre)],
        "lsg": [
            *(Lsg(32, factor, kind) for kind in KINDS for factor in (2, 4, 8)),
            *(
                Lsg(size, factor, kind)
                for size in (16, 64)
                for kind in ("stride", "norm", "pooling")
                for factor in (2, 4, 8)
            ),
            *(Lsg(size, kind="none") for size in (16, 32, 64)),
        ],
    }


def variants(centre: Memory) -> list[Memory]:
    """A rule, and others that differ from it in one choice."""
    choices = [
        {"score": "maximum"},
        {"place": "centred"},
        {"score": "maximum", "place": "centred"},
        *({"place": "drawn", "seed": seed} for seed in range(3)),
        {"shared": True},
        {"mass": "outside"},
        {"counts": "uniform"},
    ]
    return [centre, *(dataclasses.replace(centre, **choice) for choice in choices)]


def cosine(options: argparse.Namespace) -> None:
    """Compare every rule that is not in the results."""
    rows = read_rows(options.source, options.texts, options.rows)
    path, result = open_result(options, rows)
    model = AutoModel.from_pretrained(options.source, attn_implementation="sdpa").eval()
    goals = {length: embed(model, ids) for length, ids in rows.items()}
    emulation = install(model)
    wanted = {rule.name(): rule for group in options.groups for rule in groups()[group]}
    missing = [name for name in wanted if name not in result["cells"]]
    for number, name in enumerate(missing, 1):
        started, rule = time.perf_counter(), wanted[name]
        found = {str(length): compare(model, emulation, rule, ids, goals[length]) for length, ids in rows.items()}
        own = {"attention": type(rule).__name__.lower(), **dataclasses.asdict(rule), "keys": rule.keys}
        result["cells"][name] = {**own, "cosines": found}
        write_json(path, result)
        means = ", ".join(f"{statistics.mean(values):.4f} at {length}" for length, values in found.items())
        progress(f"{number} of {len(missing)}, {time.perf_counter() - started:.0f} s, {name}: {means}")
    report(options)


def compare(model: PreTrainedModel, emulation: Emulation, rule: Memory | Lsg, ids: Tensor, goal: Tensor) -> list[float]:
    """Cosine of every row's embedding to its goal, with emulated attention.

    Raises:
        UserError: A layer has not used it.
    """
    emulation.rule, emulation.calls, options = rule, 0, {}
    if isinstance(rule, Lsg):
        first = 0 if model.config.model_type == "bert" else model.config.pad_token_id + 1
        options = {"shorten": rule.shorten, "position_ids": first + rule.positions(ids.shape[1])[None]}
        ids = rule.lengthen(ids)
    found = embed(model, ids, **options)
    if emulation.calls != model.config.num_hidden_layers * len(ids.split(BATCH)):
        raise UserError(f"{type(model).__name__} does not use transformers' attention interface in every layer.")
    return cosines(found, goal)


def measure(options: argparse.Namespace) -> None:
    """Time and cosines of every conversion that is not in the results, beside a window alone and the encoder."""
    from selection_time import WINDOW, convert, converted_pass, interleave, options_of, random_row, ratios, source_pass

    rows = read_rows(options.source, options.texts, options.rows)
    path, result = open_result(options, rows)
    encoder = AutoModel.from_pretrained(options.source, attn_implementation="sdpa").eval()
    goals = {length: embed(encoder, ids) for length, ids in rows.items()}
    row = random_row(encoder, options.length)
    opponents = {
        "source": source_pass(encoder, row),
        "window": converted_pass(convert(options.source, WINDOW, options.length), WINDOW, row),
    }
    wanted = [rule for group in ("sizes", "queries", "slots", "more") for rule in groups()[group] if rule.queries]
    for rule in dict.fromkeys([*(Memory(width) for width in WINDOWS), *wanted]):
        name = rule.name()
        if name in result["times"]:
            continue
        model = convert(options.source, rule, options.length)
        seconds = interleave({**opponents, "own": converted_pass(model, rule, row)}, options.repeats)
        found = {
            str(length): cosines(embed(model, ids, **options_of(rule)), goals[length]) for length, ids in rows.items()
        }
        own = {**dataclasses.asdict(rule), "length": options.length, **ratios(seconds), "cosines": found}
        result["times"][name] = own
        write_json(path, result)
        progress(
            f"{name}: {own['milliseconds']:.0f} ms, {own['over_window']:.2f} x that of a window of {WINDOW.window}"
        )
    report(options)


def open_result(options: argparse.Namespace, rows: dict[int, Tensor]) -> tuple[Path, dict[str, Any]]:
    """The result so far, and its path.

    Raises:
        UserError: It is of another encoder or other rows.
    """
    digest = hashlib.sha256(b"".join(rows[length].numpy().tobytes() for length in LENGTHS)).hexdigest()
    setting = {
        "source": portable(options.source),
        "texts": [path.name for path in options.texts],
        "rows": options.rows,
        "rows_sha256": digest,
    }
    path = options.results / "selection.json"
    result = {"commands": [], "protocol": PROTOCOL, **setting, "cells": {}, "times": {}}
    if path.is_file():
        result = read_json(path)
        if any(result[name] != value for name, value in setting.items()):
            raise UserError(f"{path} is of another encoder or of other rows. Name another folder: --results FOLDER.")
    result = {**options.header, **{name: value for name, value in result.items() if name not in options.header}}
    if options.header["command"] not in result["commands"]:
        result["commands"].append(options.header["command"])
    options.results.mkdir(parents=True, exist_ok=True)
    return path, result


def report(options: argparse.Namespace) -> None:
    """Write the tables and the plot of the results.

    Raises:
        UserError: There are none.
    """
    path = options.results / "selection.json"
    if not path.is_file():
        raise UserError(f"{path} is missing. Run `python {SCRIPT} cosine` first.")
    result = read_json(path)
    write_text(path.with_suffix(".md"), text(result, groups()) + "\n")
    plot(result, path.with_suffix(".png"))


COMMANDS = {"cosine": cosine, "time": measure, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return its exit status."""

    def study(options: argparse.Namespace) -> None:
        COMMANDS[options.what](options)

    return run_alone(SCRIPT, parse, study, arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
