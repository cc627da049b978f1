"""Write the tables of Long Range Arena from all finished cells, a result for each recipe and precision.

    python benchmarks/lra/report.py

Published cells stay, unless there is a new one of the same task, model, sizes and data.
`benchmarks/update_docs.py` then brings the tables to docs/results/lra.md.
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

from lra import tables
from luna_hf.scripting import Parser, UserError, run_script

SCRIPT = "benchmarks/lra/report.py"
_SHARED = ("command", "date", "machine", "versions")
Cell = dict[str, Any]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    runs = [Path("outputs/lra")]
    add("--runs", type=Path, nargs="+", default=runs, help="folders of the cells (default: outputs/lra)")
    add("--output", type=Path, default=measuring.RESULTS, help="folder for JSON, tables and plots")
    return parser.parse_args(arguments)


def read_cells(folders: Sequence[Path]) -> dict[tuple[str, bool], dict[str, Cell]]:
    """Finished cells by recipe and whether they were trained in bfloat16, then by identity.

    Raises:
        UserError: There is none, or one twice.
    """
    groups: dict[tuple[str, bool], dict[str, Cell]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*/*/cell.json"))):
        cell = json.loads(path.read_text(encoding="utf-8"))
        group = groups.setdefault((cell["recipe"]["name"], cell["bf16"]), {})
        if identity(cell) in group:
            raise UserError(f"{path} is in the folders twice. Leave one of them out.")
        group[identity(cell)] = cell
    if not groups:
        names = " ".join(map(str, folders))
        raise UserError(f"{names} has no finished cell. Run `python benchmarks/lra/run.py` first.")
    return groups


def identity(cell: Cell) -> str:
    """What a cell is, but for its runs: task, model, sizes and data, as text that sorts by task and model."""
    parts = cell["task"]["name"], cell["model"], cell["task"], cell["recipe"], cell["rows"]
    return json.dumps(parts, sort_keys=True)


def publish(recipe: str, bf16: bool, cells: dict[str, Cell], folder: Path) -> None:
    """Write JSON, Markdown and plot of the cells of one recipe, and print the Markdown."""
    first, dtype = next(iter(cells.values())), "bfloat16" if bf16 else "float32"
    device = "cuda" if "accelerator" in first["machine"] else "cpu"
    commands = {cell["command"] for cell in cells.values()}
    own = {key: {name: value for name, value in cell.items() if name not in _SHARED} for key, cell in cells.items()}
    for path in folder.glob(f"lra-{recipe}-{device}-{dtype}-torch*.json"):
        published = json.loads(path.read_text(encoding="utf-8"))
        own = {identity(cell): cell for cell in published["cells"]} | own
        commands |= set(published["commands"])
    result = {
        "command": f"python {SCRIPT}",
        "commands": sorted(commands),
        **{name: first[name] for name in _SHARED[1:]},
        "recipe": recipe,
        "cells": [own[key] for key in sorted(own)],
    }
    path, result = measuring.write_result(folder, f"lra-{recipe}", device, dtype, result)
    path.with_suffix(".md").write_text(tables.text(result) + "\n", encoding="utf-8")
    tables.plot_curves(result["cells"], path.with_name(f"{path.stem}-curves.png"))
    print(tables.text(result))


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def script() -> None:
        options = parse(arguments)
        for (recipe, bf16), cells in read_cells(options.runs).items():
            publish(recipe, bf16, cells, options.output)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
