"""Long Range Arena, one command a cell: a model on a task.

    python benchmarks/lra/run.py --task listops --model luna
    python benchmarks/lra/run.py --task listops text image pathfinder --model luna-16 abc roberta --seeds 0 1 2

It trains every learning rate of the recipe with every seed, chooses the rate by validation, reads the test split for
it once, and prints a row of the table. The same command continues after a kill; what is finished is kept.
docs/results/lra.md describes tasks, models and recipes; lra/models.py says how to add a model.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import lra_path  # noqa: F401

# isort: split
import torch
from datasets import disable_progress_bars
from measuring import positive

from lra import tables, tasks
from lra.cells import Cell, run_cell
from lra.models import find_encoder, load_plugin
from lra.recipes import load_recipe
from lra.recipes import names as recipe_names
from luna_hf.scripting import Parser, describe_run, locked, run_script, write_json

SCRIPT, OUTPUT = "benchmarks/lra/run.py", Path("outputs/lra")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--task", nargs="+", choices=tasks.NAMES, required=True, help="tasks")
    add("--model", nargs="+", required=True, help="models, such as luna, luna-16, abc, leapformer, window, roberta")
    add("--recipe", default="small", help=f"{', '.join(recipe_names())}, or a YAML file (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    add("--rates", type=float, nargs="+", help="learning rates (default: the recipe's)")
    add("--steps", type=positive, help="updates of each run (default: the recipe's)")
    add("--rows", type=positive, nargs="+", help="use so many rows of train, validation and test")
    add("--length", type=positive, help="cut inputs to so many tokens")
    add("--data", help="folder or Hub name of the data of text, image or retrieval; other tasks are generated")
    add("--cache", type=Path, default=OUTPUT / "data", help="folder of generated data (default: %(default)s)")
    add("--output", type=Path, default=OUTPUT, help="folder of the runs (default: %(default)s)")
    add("--threads", type=positive, default=1, help="CPU threads (default: 1)")
    add("--bf16", action="store_true", help="train in bfloat16 autocast")
    add("--plugin", type=Path, help="Python file that registers models of your own")
    options = parser.parse_args(arguments)
    if options.rows and len(options.rows) > 3:
        parser.error("--rows takes up to three numbers, for train, validation and test; the last stands for the rest")
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Train and report every cell."""
    torch.set_num_threads(options.threads)
    if options.plugin:
        load_plugin(options.plugin)
    for model in options.model:
        find_encoder(model)
    given = options.rows or []
    rows = dict(zip(tasks.SPLITS, given + given[-1:] * 2, strict=False))
    header = describe_run(SCRIPT, arguments, "cuda" if torch.cuda.is_available() else "cpu")
    for name in options.task:
        recipe = load_recipe(options.recipe, name).shortened(options.steps)
        task, splits = tasks.load_task(name, options.data, options.cache, rows=rows, max_length=options.length)
        for model in options.model:
            folder = options.output / (recipe.name + "-bf16" * options.bf16) / name / model
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                cell = Cell(task, splits, model, recipe, folder, options.bf16)
                found = run_cell(cell, options.rates or recipe.learning_rates, options.seeds)
                result = {**header, **found}
                write_json(folder / "cell.json", result)
                tables.plot_curves([result], folder / "curve.png")
            print(tables.details([result]), f"Learning curve: {folder / 'curve.png'}", sep="\n\n", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    disable_progress_bars()  # of `datasets`
    stopped = "finished runs are kept; the same command continues"
    return run_script(lambda: run(parse(arguments), arguments), stopped)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
