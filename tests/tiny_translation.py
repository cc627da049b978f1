"""A tiny parallel corpus, command lines of translation runs that take seconds, and checkpoints of the authors' code."""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from helpers import ROOT
from official_luna import Fixture

RECIPES = sorted((ROOT / "training" / "recipes" / "train_translation").glob("*.yaml"))
LUNA = next(path for path in RECIPES if path.stem == "multi30k_luna16")
WORDS = {"one": "eins", "two": "zwei", "red": "rot", "dog": "hund", "runs": "rennt", "cat": "katze", "sees": "sieht"}
SETTINGS = {
    "vocab_size": 300,
    "max_length": 40,
    "max_steps": 6,
    "batch_tokens": 160,
    "warmup_steps": 3,
    "average_checkpoints": 2,
    "num_beams": 2,
    "max_new_tokens": 6,
    "eval_batch_size": 8,
    "log_steps": 1,
    "eval_steps": 3,
    "save_steps": 2,
    "save_total_limit": 2,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 1,
    "model.decoder_layers": 1,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 24,
    "model.projection_length": 4,
    "model.max_position_embeddings": 64,
}


def pairs(number: int, seed: int) -> list[tuple[str, str]]:
    """Sentences of two to five words, and their words translated one by one, in reverse order."""
    generator = random.Random(seed)
    made = []
    for _ in range(number):
        words = generator.choices(list(WORDS), k=generator.randint(2, 5))
        made.append((" ".join(words), " ".join(WORDS[word] for word in reversed(words))))
    return made


def write_parallel(folder: Path, sizes: dict[str, int] | None = None) -> Path:
    """Text files in two languages for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, number) in enumerate((sizes or {"train": 80, "validation": 8, "test": 8}).items()):
        for place, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[place]}\n" for pair in pairs(number, seed))
            (folder / f"{split}.{language}").write_text(lines)
    return folder


def arguments(data: object, output_dir: object, recipe: Path = LUNA, **changes: Any) -> list[str]:
    """The command line of a shrunk run; `model__field` changes a field of the model."""
    values = {**SETTINGS, **{name.replace("__", "."): value for name, value in changes.items()}}
    words = [str(recipe), "--data", str(data), "--output_dir", str(output_dir)]
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


def write_dictionary(path: Path, rows: int) -> None:
    """A dictionary of BPE words for an embedding with so many rows."""
    words = [f"w{number}{'@@' if number % 2 else ''}" for number in range(rows - 4)]
    path.write_text("".join(f"{word} {1000 - place}\n" for place, word in enumerate(words)))


def write_checkpoint(
    folder: Path, name: str, changes: dict[str, torch.Tensor] | None = None, **arguments: Any
) -> tuple[Fixture, Path]:
    """A folder as fairseq writes it, with the weights of a fixture."""
    fixture = Fixture("luna_seq2seq", name)
    folder.mkdir(parents=True)
    options = {**fixture.config["args"], "task": "translation", "source_lang": "de", "target_lang": "en", **arguments}
    weights = {key: tensor.clone() for key, tensor in fixture.weights().items()} | (changes or {})
    torch.save({"model": weights, "args": argparse.Namespace(**options)}, folder / "checkpoint_best.pt")
    for language, rows in (("de", fixture.config["src_vocab"]), ("en", fixture.config["tgt_vocab"])):
        write_dictionary(folder / f"dict.{language}.txt", rows)
    return fixture, folder
