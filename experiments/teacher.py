"""Which bounded memory computes what a real sentence encoder computes: conversions of it, trained alike.

    python experiments/teacher_texts.py DATA outputs/texts
    python experiments/teacher.py run --source sentence-transformers/all-MiniLM-L6-v2 --texts outputs/texts
    python experiments/teacher.py judge --source sentence-transformers/all-MiniLM-L6-v2 --data DATA
    python experiments/teacher.py report

`run` trains every cell with `training/convert.py` on the same rows in the same order, and keeps what is finished.
`judge` scores each result, the untrained conversions and the source on sentences and long documents.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from running import KEPT, RESULTS, ROOT, launch, run_alone

from luna_hf.scripting import Parser, UserError, progress, write_text

SCRIPT = "experiments/teacher.py"
RECIPE = ROOT / "experiments" / "teacher.yaml"


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
    return found


def _selected(count: int) -> dict[str, int]:
    return {"num_selected_tokens": count, "num_selection_queries": 32 if count > 64 else 16}


def recipe(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe of a cell."""
    values = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    weights = {"enwiki": 6, "novels": 2, "reviews": 1, "race": 1, "medquad": 0.5, "squad": 0.2}
    values["data"] = [{"path": str(options.texts / source), "weight": share} for source, share in weights.items()]
    values["sentences"] = str(options.texts / "sentences")
    values["teacher"], values["output_dir"] = str(options.source), str(options.runs / name)
    values["cache_dir"], values["model_name"] = str(options.runs / "cache"), name
    shared = {"max_length": 4096, "position_period": values["teacher_longest"]}
    values["model"] = {**cells()[name], **shared}
    (distil,) = values["stages"]
    if name.startswith(("mlp", "luna")):  # first the new parameters, layer by layer
        fit = {**distil, "name": "fit", "share": 0.2, "lengths": [[64, 256, 1]], "weights": {"attention": 1.0}}
        values["stages"] = [fit | {"new_learning_rate": 2e-3}, distil | {"share": 0.8}]
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
    needed = {"run": ("source", "texts"), "judge": ("source", "data"), "report": ()}[options.what]
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


COMMANDS = {"run": run}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return its exit status."""

    def study(options: argparse.Namespace) -> None:
        COMMANDS[options.what](options)

    return run_alone(SCRIPT, parse, study, arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
