"""Recall: what a memory of bounded size keeps of what lies farther back than a window reaches.

    python experiments/recall_study.py run --systems softmax luna-64+window --rates 1e-3 3e-3
    python experiments/recall_study.py report

`run` trains every system on a task (recall, copy or needle; `recall/tasks.py`) with every learning rate and seed, on
one thread, one after the other. It skips finished runs: stop and repeat it freely. `report` writes JSON, tables and
plots of all finished runs. `recall/systems.py` explains the names of systems.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from recall.systems import REACH, fields_of
from recall.tasks import Task
from recall.training import Recipe, train
from running import KEPT, RESULTS, run_alone

from luna_hf.scripting import Parser, UserError, progress, write_json

SCRIPT = "experiments/recall_study.py"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=("run", "report"), help="step of the study")
    add("--runs", type=Path, default=Path("outputs/recall"), help="folder of the runs (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON files, tables and plots of `report`")
    add("--systems", nargs="+", default=[], help="systems to train")
    add("--task", choices=("recall", "copy", "needle"), default="recall", help="default: %(default)s")
    add("--form", choices=("causal", "encoder"), default="causal", help="default: %(default)s")
    add("--items", type=int, default=16, help="pairs, symbols to copy, or length of the hay (default: %(default)s)")
    add("--symbols", type=int, default=16, help="different keys, and different values (default: %(default)s)")
    add("--gap", type=int, default=REACH + 2, help="fillers before the first question (default: %(default)s)")
    add("--rates", type=float, nargs="+", default=[3e-3], help="learning rates (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0], help="default: %(default)s")
    add("--positions", choices=("sinusoidal", "rotary", "learned"), help="default: sinusoidal; in encoders, learned")
    add("--steps", type=int, default=Recipe.steps, help="largest number of updates (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Train every system unless it is finished."""
    if not options.systems:
        raise UserError("`run` needs --systems, for example softmax window luna-64+window.")
    try:
        task = Task(options.task, options.form == "causal", options.items, options.symbols, options.gap)
        for system in options.systems:
            fields_of(system, task)
    except ValueError as error:
        raise UserError(str(error)) from error
    options.runs.mkdir(parents=True, exist_ok=True)
    for seed, rate, system in itertools.product(options.seeds, options.rates, options.systems):
        name = f"{task.name}-{options.form}-{task.items}of{task.symbols}-{system}-{rate:g}-seed{seed}"
        name += f"-{options.positions}" if options.positions else ""
        path = options.runs / f"{name}.json"
        if path.exists():
            continue
        recipe = Recipe(rate, options.steps, seed=seed, positions=options.positions)
        found = train(system, task, recipe)
        write_json(path, {**options.header, "system": system, "task": asdict(task), "recipe": asdict(recipe), **found})
        accuracy = found["accuracy"][str(task.items)]
        progress(f"{name}: accuracy {accuracy:.3f} after {found['steps']:,} steps, {found['seconds']:.0f} s")


def report(options: argparse.Namespace) -> None:
    """Write the results of all finished runs."""
    from recall.report import publish_all  # imports matplotlib

    publish_all(options.runs, options.results)


def main(arguments: Sequence[str]) -> int:
    """Run the study and return its exit status."""
    commands = {"run": run, "report": report}
    return run_alone(SCRIPT, parse, lambda options: commands[options.what](options), arguments, stopped=KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
