"""Perplexity far beyond the length of training: causal models of every family and GPT-2 (LAVO's table 2 in shape).

    python experiments/extrapolation.py train --data DATA
    python experiments/extrapolation.py evaluate --data DATA
    python experiments/extrapolation.py report

`train` trains every system on rows of 512 tokens of English Wikipedia: same tokens in the same order, tokenizer, steps
and schedule. `evaluate` measures its perplexity on validation articles at every length; all lengths score the same
tokens. `report` writes JSON, a table and a plot of what is finished. All commands skip what is finished.

Options of `train` that are not listed here, `--key value`, override those of the training command.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import (
    ROOT,
    describe,
    finished_runs,
    launch,
    make_parser,
    option_words,
    pretrain,
    publish,
    read_json,
    run_study,
    shared_fields,
)
from study_plots import panels, plain, save

from luna_hf.scripting import UserError, markdown_table, progress

SCRIPT = "experiments/extrapolation.py"
RECIPE = ROOT / "training" / "recipes" / "pretrain_clm" / "enwiki-tiny.yaml"
SLOTS = WINDOW = 64
# LAVO has a window by design; with `+window`, Luna and ABC read as many neighbours beside their slots.
SYSTEMS: dict[str, dict[str, Any]] = {
    "luna": {"model_type": "luna", "projection_length": SLOTS},
    "luna+window": {"model_type": "luna", "projection_length": SLOTS, "local_window": WINDOW},
    "abc": {"model_type": "abc_memory", "memory_size": SLOTS},
    "abc+window": {"model_type": "abc_memory", "memory_size": SLOTS, "local_window": WINDOW},
    "leapformer": {"model_type": "leapformer"},
    "lavo": {"model_type": "lavo", "num_bases": SLOTS, "local_window": WINDOW},
    "gpt2": {
        "model_type": "gpt2",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "activation_function": "gelu_pytorch_tanh",
    },
}
LENGTHS = (512, 2048, 8192, 16384)
OWN = ("model", "model_name", "output_dir", "tokenizer", "seed")  # what differs between the recipes of the runs
PROTOCOL = (
    "All systems see the same tokens in the same order. Perplexity of validation articles at each context length; "
    "every length scores the same tokens. Models of luna_hf read the text in parts and carry their state; GPT-2 reads "
    "windows of the training length that advance by half of it. One seed."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/extrapolation")
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of `evaluate`, the shortest that of training")
    add("--tokens", type=int, default=262144, help="tokens that `evaluate` scores (default: %(default)s)")
    options, options.overrides = parser.parse_known_args(arguments)
    if options.what == "evaluate" and options.overrides:
        raise UserError(f"`evaluate` has no option {options.overrides[0]}.")
    return options


def run_folder(options: argparse.Namespace, system: str) -> Path:
    """Folder of a training run."""
    return options.runs / "train" / system


def recipe_values(folder: Path, system: str) -> dict[str, Any]:
    """What the recipe leaves open for one run."""
    values = {"model_name": f"extrapolation-{system.replace('+', '-')}", "output_dir": folder}
    return values | {f"model.{name}": value for name, value in SYSTEMS[system].items()}


def train(options: argparse.Namespace) -> None:
    """Train every system unless it is finished."""
    tokenizer = options.runs / "tokenizer"  # trained by a run of one step, and shared by all others
    words = [*options.overrides, "--max_steps", "1", "--min_gain_nats", "-100"]
    one_step = argparse.Namespace(**{**vars(options), "overrides": words})
    pretrain(one_step, RECIPE, recipe_values(tokenizer, "luna"), "pretrain_clm")
    for system in options.systems:
        folder = run_folder(options, system)
        if not (folder / "run.json").exists():
            progress(system)
            pretrain(options, RECIPE, {**recipe_values(folder, system), "tokenizer": tokenizer}, "pretrain_clm")
            describe(options, folder, system=system)


def evaluate(options: argparse.Namespace) -> None:
    """Measure the perplexity of every trained system unless that is done."""
    for path, run in finished_runs(options.runs, "train", f"{Path(SCRIPT).name} train"):
        output = options.runs / "evaluate" / run["system"]
        if run["system"] in options.systems and not (output / "perplexity.json").exists():
            words = [f"{run['system']}={path}", "--lengths", *map(str, options.lengths)]
            settings = {"data": options.data / "enwiki" / "validation.parquet", "tokens": options.tokens}
            settings |= {"part": min(options.lengths), "output": output}
            launch("training/evaluate_perplexity.py", [*words, *option_words(settings)], options.threads)


def report(options: argparse.Namespace) -> None:
    """Write the perplexities of the finished runs."""
    runs, models, commands = [], {}, []
    for _, run in finished_runs(options.runs, "train", f"{Path(SCRIPT).name} train"):
        path = options.runs / "evaluate" / run["system"] / "perplexity.json"
        if path.is_file():
            found = read_json(path)
            runs.append(run)
            commands.append(found["command"])
            models[run["system"]] = {**found["models"][0], "fields": SYSTEMS[run["system"]]}
    if not runs:
        raise UserError(f"Nothing in {options.runs} is evaluated. Run `python {SCRIPT} evaluate` first.")
    result = {
        **shared_fields(SCRIPT, runs, OWN),
        "evaluation": sorted(commands),
        "protocol": PROTOCOL,
        "models": {name: models[name] for name in SYSTEMS if name in models},
    }
    publish(options.results, "extrapolation-enwiki", result["recipe"]["mixed_precision"], result, text, {"": plot})


def text(result: dict[str, Any]) -> str:
    """A row for every system: perplexity at every length, and the longest relative to the shortest."""
    rows, lengths = [], []
    for name, model in result["models"].items():
        lengths = sorted(model["lengths"], key=int)
        found = [model["lengths"][length]["perplexity"] for length in lengths]
        state = model["lengths"][lengths[-1]]["state_bytes"]
        context = "carried state" if model["mode"] == "carried" else f"windows of {int(lengths[0]):,}"
        cells = [f"`{name}`", f"{model['parameters'] / 1e6:.2f} M", context, *(f"{value:.2f}" for value in found)]
        rows.append([*cells, f"{found[-1] / found[0]:.3f}", "-" if state is None else f"{state / 2**10:,.0f}"])
    header = ["system", "parameters", "context", *(f"{int(length):,}" for length in lengths)]
    return markdown_table([*header, "longest / shortest", "state (KiB)"], rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Perplexity against the length of the context."""
    figure, ((axis,),) = panels(1, 1, (7, 4.4), squeeze=False)
    for name, model in result["models"].items():
        lengths = sorted(map(int, model["lengths"]))
        values = [model["lengths"][str(length)]["perplexity"] for length in lengths]
        axis.plot(lengths, values, marker="o", label=name, linestyle="--" if name == "gpt2" else "-")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("perplexity")
    plain(axis)
    axis.legend(frameon=False)
    save(figure, path)


COMMANDS = {"train": train, "evaluate": evaluate, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
