"""Which bounded memory computes what a real sentence encoder computes: conversions of it, trained alike.

    python experiments/teacher_texts.py DATA outputs/texts
    python experiments/teacher.py run --source sentence-transformers/all-MiniLM-L6-v2 --texts outputs/texts
    python experiments/teacher.py judge --source sentence-transformers/all-MiniLM-L6-v2 --data DATA
    python experiments/teacher.py distant --source sentence-transformers/all-MiniLM-L6-v2 --data DATA
    python experiments/teacher.py slots --source sentence-transformers/all-MiniLM-L6-v2 --data DATA
    python experiments/teacher.py report

`run` trains every cell with `training/convert.py` on the same rows in the same order. `judge` scores each result, each
untrained conversion and the source on sentences and long documents (`teacher_scores.py`), `distant` finetunes untrained
conversions on what a window cannot do (`teacher_distant.py`), `slots` looks into untrained slots (`teacher_slots.py`).
`run`, `judge` and `distant` keep what is finished. `report` writes the tables and the plot.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from running import KEPT, RESULTS, ROOT, launch, read_json, run_alone
from teacher_distant import Distant, finetune
from teacher_report import plot, text
from teacher_scores import Encoder, Tasks
from teacher_slots import measure
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import FAMILIES
from luna_hf.convert.command import make_plain
from luna_hf.scripting import Parser, UserError, load_tokenizer, progress, write_json, write_text
from luna_hf.warm_start import warm_start

SCRIPT = "experiments/teacher.py"
RECIPE = ROOT / "experiments" / "teacher.yaml"
# Cells that are also trained longer, with the recipe for users: "...-2m", on two million tokens.
LONGER_RECIPE, LONGER = ROOT / "training" / "recipes" / "convert" / "minilm.yaml", "-2m"
TRAINED_LONGER = ("window-64", "luna-128-64", "means-128-64")
LONGER_UPDATES = 500
LONGEST = 4096
# The source's windows that `judge` scores; the mean of several sizes is what training aims at.
WINDOWS = [(64,), (128,), (256,), (64, 128, 256)]
# What `report` keeps of a run.
FIGURES = ("cosine", "slots_off", "window_off", "hidden", "seen_tokens", "training_seconds")
# What `distant` finetunes: cell, and whether the question is marked.
FINETUNED = {
    "source": ("source", False),
    "window-64": ("window-64", False),
    "means-128-64": ("means-128-64", False),
    "luna-128-64": ("luna-128-64", False),
    "window-64, marked": ("window-64", True),
    "mlp-128-64": ("mlp-128-64", False),
    "luna-0-64": ("luna-0-64", False),
    "mlp-0-64": ("mlp-0-64", False),
    "means-128-64, marked": ("means-128-64", True),
}
# What `slots` measures.
SHARPENED = ("luna-128-64", "luna-0-64", "mlp-128-64", "mlp-0-64")


def cells() -> dict[str, dict[str, Any]]:
    """The fields of every cell's model, the most informative first."""
    found: dict[str, dict[str, Any]] = {}
    means = {"model_type": "abc_memory", "memory_control": "compressive", "memory_size": 16}
    learned = {"model_type": "abc_memory", "memory_control": "mlp", "memory_size": 64, "share_control": False}
    luna = {"model_type": "luna", "projection_length": 64, "tie_kv": False}
    slots = {"means": means, "mlp": learned, "luna": luna}
    for window in (64, 128):
        own = {"local_window": window}
        found[f"window-{window}"] = {
            **{"model_type": "abc_memory", "memory_control": "sliding_window", "memory_size": window}
        }
        found[f"means-128-{window}"] = means | own | _selected(128)
        found[f"means-48-{window}"] = means | own | _selected(48)
        found[f"luna-128-{window}"] = luna | own | _selected(128)
        found |= {f"{name}-0-{window}": slots[name] | own for name in ("mlp", "luna")}
        found[f"mlp-128-{window}"] = learned | own | _selected(128)
    found["means-128-64-last"] = found["means-128-64"] | {"full_attention_layers": [5]}
    found["means-128-64-rows"] = found["means-128-64"] | {"position_period": None}
    return found | {f"{name}{LONGER}": found[name] for name in TRAINED_LONGER}


def fields(name: str) -> dict[str, Any]:
    """The fields of a cell's model, with what all cells share."""
    own, known = cells()[name], yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["teacher_longest"]
    exact = {"softmax_length": known} if own.get("num_selected_tokens") else {}
    return {"max_length": LONGEST, "position_period": known, **exact, **own}


def _selected(count: int) -> dict[str, int]:
    return {"num_selected_tokens": count, "num_selection_queries": 32 if count > 64 else 16}


def recipe(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe of a cell."""
    is_longer = name.endswith(LONGER)
    values = yaml.safe_load((LONGER_RECIPE if is_longer else RECIPE).read_text(encoding="utf-8"))
    if is_longer:
        values["max_steps"] = LONGER_UPDATES
    weights = {"enwiki": 6, "novels": 2, "reviews": 1, "race": 1, "medquad": 0.5, "squad": 0.2}
    values["data"] = [{"path": str(options.texts / source), "weight": share} for source, share in weights.items()]
    values["sentences"] = str(options.texts / "sentences")
    values["teacher"], values["output_dir"] = str(options.source), str(options.runs / name)
    values["cache_dir"], values["model_name"] = str(options.runs / "cache"), name
    values["model"] = fields(name)
    return values


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=COMMANDS, help="step of the study")
    add("--source", help="folder of the encoder, or its name on the Hub")
    add("--texts", type=Path, help="folder of teacher_texts.py")
    add("--data", type=Path, help="folder with the tasks")
    add("--runs", type=Path, default=Path("outputs/teacher"), help="folder of the runs (default: %(default)s)")
    add("--cells", nargs="+", choices=list(cells()), default=list(cells()), help="default: all")
    add("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    needed = {"run": ("source", "texts"), "report": ()}.get(options.what, ("source", "data"))
    for name in needed:
        if getattr(options, name) is None:
            raise UserError(f"`{options.what}` needs --{name}.")
    return options


def run(options: argparse.Namespace) -> None:
    """Train every cell that is not finished."""
    options.runs.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(options.cells, 1):
        if (options.runs / name / "metrics.json").is_file():
            continue
        progress(f"---- {name}, {number} of {len(options.cells)} ----")
        path = options.runs / f"{name}.yaml"
        write_text(path, yaml.safe_dump(recipe(name, options), sort_keys=False))
        launch("training/convert.py", [str(path)], threads=1)


# ---- scores ----


def untrained(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """The conversion of a cell before any training."""
    own = fields(name)
    return warm_start(FAMILIES[own.pop("model_type")].base_model, options.source, **own)[0]


def trained(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """The result of a cell."""
    return AutoModel.from_pretrained(options.runs / name)


def open_result(options: argparse.Namespace) -> tuple[Path, dict[str, Any], PreTrainedTokenizerBase]:
    """The result so far, its path, and the source's tokenizer."""
    path = options.results / "teacher.json"
    result = (
        read_json(path) if path.is_file() else {"commands": [], "scores": {}, "distant": {}, "slots": {}, "runs": {}}
    )
    result = {**options.header, **{name: value for name, value in result.items() if name not in options.header}}
    if options.header["command"] not in result["commands"]:
        result["commands"].append(options.header["command"])
    options.results.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.source, required=True)
    make_plain(tokenizer, LONGEST)
    return path, result, tokenizer


def contenders(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    """What `judge` scores in one pass: every cell, before its training and after."""
    for name in options.cells:
        if not name.endswith(LONGER):
            yield f"{name}, untrained", partial(untrained, name, options)
        if (options.runs / name / "metrics.json").is_file():
            yield name, partial(trained, name, options)


def judge(options: argparse.Namespace) -> None:
    """Score what is not in the results, the source first."""
    path, result, tokenizer = open_result(options)
    tasks, scores = Tasks(options.data, tokenizer), result["scores"]
    source = Encoder(AutoModel.from_pretrained(options.source), tokenizer)
    ways = {"cut at 256": source.cut(256)}
    ways |= {f"windows of {' and '.join(map(str, sizes))}": source.windows(*sizes) for sizes in WINDOWS}
    for name, embed in ways.items():
        if f"source, {name}" not in scores:
            scores[f"source, {name}"] = tasks.score(embed, source.whole)
            write_json(path, result)
    for name, load in contenders(options):
        if name not in scores:
            encoder = Encoder(load(), tokenizer)
            scores[name] = tasks.score(encoder.whole, encoder.whole)
            write_json(path, result)
        progress(f"{name}: {scores[name]}")


def distant(options: argparse.Namespace) -> None:
    """Finetune what is not in the results."""
    path, result, tokenizer = open_result(options)
    task = Distant(options.data, tokenizer)
    for name, (cell, marked) in FINETUNED.items():
        if name in result["distant"]:
            continue
        progress(f"---- {name} ----")
        model = AutoModel.from_pretrained(options.source) if cell == "source" else untrained(cell, options)
        result["distant"][name] = finetune(model, marked, task, model.config.max_position_embeddings)
        write_json(path, result)
        progress(f"{name}: {result['distant'][name]}")


def slots(options: argparse.Namespace) -> None:
    """Measure what the slots of untrained conversions hold."""
    path, result, tokenizer = open_result(options)
    tasks = Tasks(options.data, tokenizer)
    source = Encoder(AutoModel.from_pretrained(options.source), tokenizer)
    for name in SHARPENED:
        progress(f"---- {name} ----")
        result["slots"][name] = measure(untrained(name, options), source, tasks, tokenizer)
        write_json(path, result)


def report(options: argparse.Namespace) -> None:
    """Write the tables and the plot.

    Raises:
        UserError: There are no results.
    """
    path = options.results / "teacher.json"
    if not path.is_file():
        raise UserError(f"{path} is missing. Run `python {SCRIPT} judge` first.")
    result = read_json(path)
    for name in cells():
        folder = options.runs / name
        if (folder / "metrics.json").is_file():
            figures = {"trained": read_json(folder / "metrics.json")}
            if not name.endswith(LONGER):
                figures = {"untrained": first_figures(folder / "log.jsonl"), **figures}
            result["runs"][name] = {
                when: {key: own[key] for key in FIGURES if key in own} for when, own in figures.items()
            }
    write_json(path, result)
    write_text(path.with_suffix(".md"), text(result) + "\n")
    plot(result, path.with_suffix(".png"))


def first_figures(path: Path) -> dict[str, Any]:
    """The held-out figures of a log before the first update."""
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return next(entry for entry in entries if entry["kind"] == "held_out")


COMMANDS = {"run": run, "judge": judge, "distant": distant, "slots": slots, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return its exit status."""

    def study(options: argparse.Namespace) -> None:
        COMMANDS[options.what](options)

    return run_alone(SCRIPT, parse, study, arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
