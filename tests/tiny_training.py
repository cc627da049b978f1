"""What the tests of `training/` share: the scripts on the path, a small corpus, and a run that takes a second."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from helpers import ROOT

sys.path.insert(0, str(ROOT / "training"))  # the scripts import their siblings plainly

import card
import checkpoint
import data
import loop
import pretrain_mlm
import pretrain_recipe
import recipe

__all__ = ["card", "checkpoint", "data", "loop", "pretrain_mlm", "pretrain_recipe", "recipe"]

RECIPES = sorted((ROOT / "training" / "recipes" / "pretrain_mlm").glob("*.yaml"))
DEMO = ROOT / "training" / "recipes" / "pretrain_mlm" / "demo.yaml"
WORDS = ["the", "token", "reads", "every", "packed", "sequence", "of", "fixed", "length", "in", "its", "layer"]
SHRINK = {
    "vocab_size": 300,
    "held_out_fraction": 0.2,
    "block_size": 32,
    "max_steps": 3,
    "batch_size": 8,
    "global_batch_tokens": 256,
    "eval_blocks": 16,
    "save_steps": 2,
    "log_steps": 1,
    "eval_steps": 2,
    "min_gain_nats": -100,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 1,
    "model.intermediate_size": 64,
    "model.max_position_embeddings": 64,
}


def write_corpus(folder: Path, documents: int = 40) -> Path:
    """A folder with two text files; words follow a seeded random order."""
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=30)) + f", document {index}." for index in range(documents)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text("\n\n".join(texts[::2]) + "\n")
    (folder / "b.txt").write_text("\n\n".join(texts[1::2]) + "\n")
    return folder


def arguments(recipe_file: Path, output_dir: Path, **overrides: Any) -> list[str]:
    """Command line of a shrunk run; a double underscore stands for the dot of a section."""
    paths = {"output_dir": output_dir, "cache_dir": output_dir.parent / "cache"}
    values = {**SHRINK, **paths, **{name.replace("__", "."): value for name, value in overrides.items()}}
    return [str(recipe_file), *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


def run(output_dir: Path, recipe_file: Path = DEMO, **overrides: Any) -> dict[str, Any]:
    """A shrunk run in this process; its figures."""
    assert pretrain_mlm.main(arguments(recipe_file, output_dir, **overrides)) == 0
    return json.loads((output_dir / "metrics.json").read_text())
