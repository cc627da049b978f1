"""Write the tables of Long Range Arena from all finished cells, a result for each recipe and precision.

    python benchmarks/lra/report.py

Published cells stay: those of the same task, sizes and data get the new runs, unless these chose another learning rate;
then they are replaced. `benchmarks/update_docs.py` then brings them to docs/results/lra.md. Accuracy is set against
cost where `benchmarks/lra/cost.py` has left a result for the same recipe.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lra_path  # noqa: F401

# isort: split
import measuring
from trade_off import plot_trade_off

from lra import results
from lra.recipes import SHORTENED
from luna_hf.scripting import Parser, UserError, run_script

SCRIPT = "benchmarks/lra/report.py"
_SHARED = ("command", "date", "machine", "versions")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--runs",
        type=Path,
        nargs="+",
        default=[Path("outputs/lra")],
        help="folders of the cells (default: outputs/lra)",
    )
    add("--output", type=Path, default=measuring.RESULTS, help="folder for JSON, tables and plots")
    return parser.parse_args(arguments)


def read_cells(folders: Sequence[Path]) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """Finished cells by recipe and whether they were trained in bfloat16, by folder in the order of their names.

    Raises:
        UserError: There is none, or one twice.
    """
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    paths: dict[tuple[Any, ...], Path] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*/*/cell.json"))):
        cell = json.loads(path.read_text(encoding="utf-8"))
        group = cell["recipe"]["name"], cell["bf16"]
        same = paths.setdefault((group, cell["model"], cell["task"]["name"], results.settings(cell)), path)
        if same is not path:
            raise UserError(f"{path} is the same cell as {same}. Leave one of the folders out.")
        groups.setdefault(group, []).append(cell)
    if not groups:
        raise UserError(
            f"{' '.join(map(str, folders))} has no finished cell. Run `python benchmarks/lra/run.py` first."
        )
    return groups


def read_cost(folder: Path, recipe: str) -> dict[str, Any] | None:
    """The newest result of `cost.py` for a recipe or one with the same models, if there is one."""
    costs = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("lra-cost*.json")]
    same = (recipe, SHORTENED.get(recipe))
    own = [cost for cost in costs if Path(cost["settings"]["recipe"]).stem in same]
    return max(own, key=lambda cost: cost["date"], default=None)


def read_published(folder: Path, recipe: str, dtype: str, machine: dict[str, Any]) -> dict[str, Any] | None:
    """The newest result of a recipe on the same kind of device, if there is one."""
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"lra-{recipe}-*-{dtype}-torch*.json")
    ]
    own = [one for one in found if one["machine"].get("accelerator") == machine.get("accelerator")]
    return max(own, key=lambda one: one["date"], default=None)


def joined(published: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Published cells and new ones, with the runs of both where a cell is in both with the same learning rate."""
    found = {_identity(cell): cell for cell in published}
    for cell in cells:
        before = found.get(_identity(cell))
        if before and before["rate"] == cell["rate"]:
            runs = {(run["rate"], run["seed"]): run for run in [*before["runs"], *cell["runs"]]}
            cell = {**cell, "runs": [runs[key] for key in sorted(runs)]}
        found[_identity(cell)] = cell
    return [found[key] for key in sorted(found)]


def _identity(cell: dict[str, Any]) -> str:
    """What a cell is, but for its runs: task, model, sizes and data, as text that sorts by task and model."""
    parts = cell["task"]["name"], cell["model"], cell["task"], cell["recipe"], cell["rows"]
    return json.dumps(parts, sort_keys=True)


def publish(recipe: str, bf16: bool, cells: list[dict[str, Any]], folder: Path) -> None:
    """Write JSON, Markdown and plots of the cells of one recipe, and print the Markdown."""
    cost, dtype = read_cost(folder, recipe), "bfloat16" if bf16 else "float32"
    commands, shared = {cell["command"] for cell in cells}, {name: cells[0][name] for name in _SHARED[1:]}
    cells = [{name: value for name, value in cell.items() if name not in _SHARED} for cell in cells]
    before = read_published(folder, recipe, dtype, shared["machine"]) or {"cells": [], "commands": []}
    cells = joined(before["cells"], cells)
    result = {
        "command": f"python {SCRIPT}",
        "commands": sorted(commands.union(before["commands"])),
        **shared,
        "recipe": recipe,
        "trade_off": results.trade_off(cells, cost) if cost else "",
        "cells": cells,
    }
    device = "cuda" if "accelerator" in result["machine"] else "cpu"
    path, result = measuring.write_result(folder, f"lra-{recipe}", device, dtype, result)
    path.with_suffix(".md").write_text(results.text(result) + "\n", encoding="utf-8")
    results.plot_curves(result["cells"], path.with_name(f"{path.stem}-curves.png"))
    if result["trade_off"]:
        systems, _ = results.systems(cells, cost)
        softmax = next(system for system in systems if system.name == results.SOFTMAX)
        others = [system for system in systems if system is not softmax]
        for memory, ending in ((False, "rcp"), (True, "rcp-mem")):
            plot_trade_off(others, softmax, path.with_name(f"{path.stem}-{ending}.png"), memory)
    print(results.text(result))


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def script() -> None:
        options = parse(arguments)
        for (recipe, bf16), cells in read_cells(options.runs).items():
            publish(recipe, bf16, cells, options.output)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
