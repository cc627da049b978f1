"""What the studies share: they run the training commands as a user does, and read what these leave."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from luna_hf.scripting import Parser, UserError, describe_run, read_json, run_script, write_json

# Results are written and plotted as those of the benchmarks; studies import packages of `training`.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("benchmarks", "training"))

from measuring import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEPT = "finished runs are kept; the same command continues"
_DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


# ---- command line ----


def make_parser(description: str, commands: Collection[str], runs: str) -> Parser:
    """The options that every study has."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=commands, help="step of the study")
    add("--data", type=Path, help="folder with the corpora and tasks, for training")
    add("--runs", type=Path, default=Path(runs), help="folder of the runs (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON files, tables and plots of `report`")
    add("--threads", type=int, default=1, help="CPU threads of each run (default: %(default)s)")
    return parser


def run_study(
    script: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    commands: dict[str, Callable[[argparse.Namespace], None]],
    arguments: Sequence[str],
) -> int:
    """Run one command of a study and return its exit status, as `run_script` does."""

    def run() -> None:
        options = parse(arguments)
        if options.what not in ("cost", "report") and options.data is None:
            raise UserError(f"`{options.what}` needs --data, the folder with the corpora and tasks.")
        if options.what == "report" and options.overrides:
            raise UserError(f"`{options.what}` has no option {options.overrides[0]}.")
        torch.set_num_threads(options.threads)
        options.header = describe_run(script, arguments, DEVICE)
        commands[options.what](options)

    return run_script(run, stopped=KEPT)


def run_alone(
    script: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    study: Callable[[argparse.Namespace], None],
    arguments: Sequence[str],
    stopped: str = "nothing was written",
) -> int:
    """Run a study that needs no training command, on one CPU thread, and return its exit status."""

    def run() -> None:
        options = parse(arguments)
        torch.set_num_threads(1)
        options.header = describe_run(script, arguments, "cpu")
        study(options)

    return run_script(run, stopped=stopped)


# ---- runs ----


def launch(script: str, words: Sequence[str], threads: int) -> None:
    """Run a training command and wait for it.

    Raises:
        UserError: It failed, and has printed the reason.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(ROOT / script), *words]
    # A second signal would stop it without saving, so Ctrl-C must not reach it directly.
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if child.returncode:
        raise UserError(f"{script} failed with status {child.returncode}.")


def option_words(values: dict[str, Any]) -> list[str]:
    """Words of a command line, `["--key", "value"]`."""
    words = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
    return [part for key, value in words.items() for part in (f"--{key}", value)]


def describe(options: argparse.Namespace, folder: Path, **own: Any) -> None:
    """Write `run.json`, which marks a run as finished: where and how it was made, and its recipe from its card."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load(re.search(r"```yaml\n(model_name:.*?)```", card, re.DOTALL)[1])
    write_json(folder / "run.json", {**options.header, **own, "recipe": recipe})


# ---- reports ----


def finished_runs(folder: Path, kind: str, command: str) -> list[tuple[Path, dict[str, Any]]]:
    """Folder and `run.json` of every finished run of a kind.

    Raises:
        UserError: There is none; names the command that makes them.
    """
    runs = [(path.parent, read_json(path)) for path in sorted((folder / kind).glob("*/run.json"))]
    if not runs:
        raise UserError(f"{folder} has no finished run. Run `python experiments/{command}` first.")
    return runs


def read_log(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Entries of one kind in a run's log."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def shared_fields(script: str, runs: Sequence[dict[str, Any]], own: Iterable[str]) -> dict[str, Any]:
    """Head of a study's result: commands, machine and versions of its runs, and their recipe but for its `own` keys."""
    return {
        "command": f"python {script} report",
        "commands": sorted({run["command"] for run in runs}),
        "date": runs[0]["date"],
        **{name: joined(run[name] for run in runs) for name in ("machine", "versions")},
        "recipe": {name: value for name, value in runs[0]["recipe"].items() if name not in own},
    }


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Versions or machines of several results: texts that differ become "a, b and c"; of numbers, the last counts."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, str):
                *most, last = sorted({one for text in (found.get(name, value), value) for one in listed(text)})
                value = f"{', '.join(most)} and {last}" if most else last
            found[name] = value
    return found


def listed(text: str) -> list[str]:
    """The parts of "a, b and c"."""
    return re.split(", | and ", text)


def keep_published(result: dict[str, Any], folder: Path, subject: str, cell: Callable[[Any], Any]) -> None:
    """Add the published runs of the same recipe to those of a result, unless they have been repeated, and sort all.

    `cell` gives what identifies a run, in the order of the table. What else the result lacks is kept, too. Recipes are
    the same if all keys are equal that both have: a later version may have added some.
    """
    runs = {cell(run): run for run in result["runs"]}
    for published in map(read_json, folder.glob(f"{subject}-*.json")):
        own, before = result["recipe"], published["recipe"]
        if all(own[name] == before[name] for name in own.keys() & before.keys()):
            runs = {cell(run): run for run in published["runs"]} | runs
            result["commands"] = sorted({*published["commands"], *result["commands"]})
            result |= {name: joined([published[name], result[name]]) for name in ("machine", "versions")}
            result |= {name: value for name, value in published.items() if result.get(name) is None}
    result["runs"] = [runs[key] for key in sorted(runs)]


def publish(
    folder: Path,
    subject: str,
    precision: str,
    result: dict[str, Any],
    text: Callable[[Any], str],
    plots: dict[str, Callable[[Any, Path], None]],
) -> None:
    """Write a result as JSON, Markdown and plots (by the ending of their names), and print the Markdown.

    `precision` is the `mixed_precision` of the runs; `text` and `plots` get what the JSON file holds.
    """
    device = "cuda" if "accelerator" in result["machine"] else "cpu"
    path, result = write_result(folder, subject, device, _DTYPES[precision], result)
    path.with_suffix(".md").write_text(text(result) + "\n", encoding="utf-8")
    for ending, plot in plots.items():
        plot(result, path.with_name(f"{path.stem}{ending}.png"))
    print(text(result))
