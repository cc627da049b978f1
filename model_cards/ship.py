"""Ship a finished run: write `checkpoints/NAME`, with weights in bfloat16.

    python model_cards/ship.py NAME RUN [RUN ...]

NAME is an entry of model_cards/zoo.yaml. RUN is the output folder of a training command; several are the stages of one
training, in their order, and the model is that of the last one. Afterwards, `python model_cards/build.py NAME` writes
the card.
"""

import training_path  # noqa: F401

# isort: split
import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import adapters
import golden
import torch
import yaml
from catalogue import Entry, Stage, Zoo, named
from common.models import longest_input
from engine.card import PLOT, drawing
from records import read_stages
from transformers import AutoConfig

import luna_hf
from luna_hf import FAMILIES
from luna_hf.scripting import TOKENIZER_FILES, Parser, read_json, run_script, write_json, write_text, writing

LOG_LIMIT = 200_000  # bytes
# What is plotted of a log.
_STYLES = {
    "train": ("training", {"alpha": 0.5}),
    "held_out": ("held-out", {"marker": "o", "markersize": 3}),
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="entry of model_cards/zoo.yaml")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="output folder of a run")
    return parser.parse_args(words)


def ship(zoo: Zoo, name: str, runs: Sequence[Path]) -> Path:
    """Write a checkpoint and return its folder.

    Raises:
        UserError: An unknown name, no finished run, or a model of a kind that is not published.
    """
    entry = zoo.entry(name)
    read = [read_stages(run) for run in runs]
    source, target = read[-1][0], zoo.root / "checkpoints" / name
    stages = repeatable([stage for _, stages in read for stage in stages], name, entry, zoo)
    kind = golden.kind_of(source)
    with writing(target) as folder:
        save(source, folder, f"checkpoints/{entry.base}")
        for number, stage in enumerate(stages[:-1], 1):
            write_stage(stage, folder / "stages" / str(number), f"stage {number} of {name}")
        write_stage(stages[-1], folder, name)
        plot(stages, folder / PLOT)
        cases = golden.make(folder, longest_input(AutoConfig.from_pretrained(folder, trust_remote_code=False)))
        golden.write(folder / "golden.json", kind, cases, rounding=rounding(kind, source, cases))
    return target


# ---- the model ----


def save(source: Path, target: Path, base: str) -> None:
    """Write a folder's model in bfloat16, with its code, and its tokenizer; an adapter is one on `base`.

    The config asks for float32: weights are small on disk, and suit CPUs and finetuning once they are loaded.
    """
    if adapters.is_adapter(source):
        adapters.save(source, target, base)
        renew_code(target)
        return
    model, _ = golden.load(source, dtype=torch.bfloat16)
    if golden.kind_of(source) == "sentences":
        model.save_pretrained(str(target), create_model_card=False)
    else:
        model.save_pretrained(target)
        for file in filter(Path.is_file, (source / file for file in TOKENIZER_FILES)):
            shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    write_json(path, {**read_json(path), "dtype": "float32"})


def renew_code(folder: Path) -> None:
    """Write the code of today's package into a folder, if its model is one of the package's."""
    path = folder / "config.json"
    if read_json(path)["model_type"] in FAMILIES:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.auto_map = getattr(luna_hf, config.architectures[0]).auto_map()
        config.write_code(config, folder)
        write_json(path, {**read_json(path), "auto_map": config.auto_map})


def rounding(kind: str, source: Path, cases: list[golden.Case]) -> float:
    """The largest change of a golden value by rounding the weights."""
    exact = golden.load(source, dtype=torch.float32, attn_implementation="eager")
    changes = [(golden.values(kind, *exact, case) - torch.tensor(case["values"])).abs().max() for case in cases]
    return round(max(changes).item(), 6)


# ---- the runs ----


def repeatable(stages: list[Stage], name: str, entry: Entry, zoo: Zoo) -> list[Stage]:
    """The stages with recipes that can be run one after the other in the root of the repository.

    A stage starts from the output of the one before it, and the first one from the entry's base, if it has one. The
    tokenizer is that of the checkpoint. An entry with a command of its own keeps the recipes that were run. An
    adapter's run has none.
    """
    if entry.command or not any(stage.recipe for stage in stages):
        return stages
    before = f"checkpoints/{entry.base}" if entry.base in zoo.entries else entry.base
    outputs = [*(f"outputs/{name}-{number}" for number in range(1, len(stages))), f"outputs/{name}"]
    changed = []
    for stage, folder in zip(stages, outputs, strict=True):
        recipe = {**stage.recipe, "output_dir": folder}
        for key, value in {"model_name_or_path": before, "tokenizer": f"checkpoints/{name}"}.items():
            if value and recipe.get(key):
                recipe[key] = [value] if isinstance(recipe[key], list) else value
        fixed = {"model_name": Path(folder).name, "push_to_hub": False}
        recipe |= {key: value for key, value in fixed.items() if key in recipe}
        before = folder
        changed.append(dataclasses.replace(stage, recipe=recipe))
    return changed


def write_stage(stage: Stage, folder: Path, title: str) -> None:
    """Write recipe, figures and log."""
    folder.mkdir(parents=True, exist_ok=True)
    if stage.recipe:
        text = yaml.safe_dump(stage.recipe, sort_keys=False, width=110, allow_unicode=True)
        write_text(folder / "recipe.yaml", f"# Repeats {title}, as a recipe of {stage.script}.\n{text}")
    write_json(folder / "metrics.json", stage.metrics)
    if stage.log:
        write_text(folder / "log.jsonl", thinned(stage.log))


def thinned(log: list[dict[str, Any]], limit: int = LOG_LIMIT) -> str:
    """A log as text of at most `limit` bytes: every second entry between evaluations is left out, repeatedly."""
    lines = [(entry["kind"] in ("train", "probe"), json.dumps(entry) + "\n") for entry in log]
    while sum(len(line) for _, line in lines) > limit and any(can_go for can_go, _ in lines):
        between = [index for index, (can_go, _) in enumerate(lines) if can_go]
        lines = [line for index, line in enumerate(lines) if index not in set(between[::2])]
    return "".join(line for _, line in lines)


def plot(stages: list[Stage], path: Path) -> None:
    """Draw the losses of all stages by tokens, or the main score by step where the log has that."""
    logs = [[entry for entry in stage.log if entry["kind"] in _STYLES] for stage in stages]
    if not any(logs):
        return
    along = "seen_tokens" if all("seen_tokens" in entry for log in logs for entry in log) else "step"
    score = stages[-1].metrics.get("main_metric")
    with drawing(path) as (axes,):
        offset = 0
        for number, (stage, log) in enumerate(zip(stages, logs, strict=True), 1):
            suffix = f", stage {number}" * (len(stages) > 1)
            # Where a run trains something else, only its held-out loss can be compared.
            other = any(entry["kind"] == "objective" for entry in stage.log)
            for kind, (label, style) in _STYLES.items():
                heights = {
                    offset + entry[along]: entry.get("loss", entry.get(f"eval_{score}"))
                    for entry in log
                    if entry["kind"] == kind and entry.keys() & {"loss", f"eval_{score}"}
                }
                if heights and not (other and kind == "train"):
                    axes.plot(*zip(*heights.items(), strict=True), label=label + suffix, **style)
            offset += log[-1][along] if log else 0
        axes.set_xlabel("tokens" if along == "seen_tokens" else "step")
        axes.set_ylabel(score or "loss")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""

    def script() -> None:
        options = parse(sys.argv[1:] if words is None else words)
        with named(f"{', '.join(map(str, options.runs))}, or model_cards/zoo.yaml,"):
            folder = ship(Zoo(), options.name, options.runs)
        print(f"Wrote {folder}. Next: python model_cards/build.py {options.name}")

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main())
