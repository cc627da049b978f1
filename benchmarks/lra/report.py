"""Write the tables of Long Range Arena from all finished cells, a result for each recipe and precision.

    python benchmarks/lra/report.py

`benchmarks/update_docs.py` then brings them to docs/results/lra.md. Accuracy is set against cost where
`benchmarks/lra/cost.py` has left a result for the same recipe.
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
from luna_hf.scripting import Parser, UserError, run_script, write_result

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


def publish(recipe: str, bf16: bool, cells: list[dict[str, Any]], folder: Path) -> None:
    """Write JSON, Markdown and plots of the cells of one recipe, and print the Markdown."""
    cost = read_cost(folder, recipe)
    result = {
        "command": f"python {SCRIPT}",
        "commands": sorted({cell["command"] for cell in cells}),
        **{name: cells[0][name] for name in _SHARED[1:]},
        "recipe": recipe,
        "trade_off": results.trade_off(cells, cost) if cost else "",
        "cells": [{name: value for name, value in cell.items() if name not in _SHARED} for cell in cells],
    }
    device = "cuda" if "accelerator" in result["machine"] else "cpu"
    path, result = write_result(folder, f"lra-{recipe}", device, "bfloat16" if bf16 else "float32", result)
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
