"""What the tests of `training/` share: a small corpus, and runs that take less than a second."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pretrain_mlm
import torch
from engine import log, loop
from engine.run import Run
from helpers import ROOT, tiny_config
from objectives.masked import MaskedPretraining
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, RobertaConfig

from luna_hf import AbcForMaskedLM
from luna_hf.warm_start import warm_start

RECIPES = sorted((ROOT / "training" / "recipes" / "pretrain_mlm").glob("*.yaml"))
CAUSAL = sorted((ROOT / "training" / "recipes" / "pretrain_clm").glob("*.yaml"))
DEMO = ROOT / "training" / "recipes" / "pretrain_mlm" / "demo.yaml"
SCRIPT = "training/pretrain_mlm.py"
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
    "validation": "",
    "compile": "false",
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


def start(command: ModuleType, words: list[str]) -> int:
    """The exit status of a command in this process, without the time that its plot takes."""
    with patch.object(Run, "plot"):
        return command.main(words)


def run(output_dir: Path, recipe_file: Path = DEMO, **overrides: Any) -> dict[str, Any]:
    """A shrunk run of `pretrain_mlm.py` in this process; its figures."""
    assert start(pretrain_mlm, arguments(recipe_file, output_dir, **overrides)) == 0
    return json.loads((output_dir / "metrics.json").read_text())


def environment() -> dict[str, str]:
    """Variables for a command on the CPU in a new process."""
    values = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **values, "ACCELERATE_USE_CPU": "true"}


def script(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """The script as a user starts it, from the repository root."""
    command = [sys.executable, *launcher, SCRIPT, *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def write_teacher(folder: Path, texts: Path, **overrides: Any) -> Path:
    """A small RoBERTa with its tokenizer."""
    run(folder, data=texts, model__model_type="roberta", model__max_position_embeddings=66, **overrides)
    return folder


def write_student(folder: Path, teacher: Path, model_class: type = AbcForMaskedLM, **fields: Any) -> Path:
    """A model made from the teacher, with the same tokenizer."""
    warm_start(model_class, str(teacher), **fields)[0].save_pretrained(folder)
    for path in teacher.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    return folder


def truncated(folder, copy):
    """A copy of a checkpoint without the second half of its weights file, as after an interrupted download."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.md", "log.jsonl", "metrics.json"))
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return copy


def without_model_section(words: list[str]) -> list[str]:
    """A command line without overrides of the model section, which a checkpoint replaces."""
    options = zip(words[1::2], words[2::2], strict=True)
    return [words[0], *(word for option in options for word in option if not option[0].startswith("--model."))]


def losses(folder):
    """Everything in a log that a resumed run must repeat exactly."""
    entries = log.read_log(folder / "log.jsonl")
    keep = ("kind", "step", "loss", "seen_tokens", "learning_rate", "grad_norm")
    return [tuple(e.get(name) for name in keep) for e in entries if e["kind"] in ("train", "held_out")]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same_weights(one, two):
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Killed(BaseException):
    """Stands for a kill: nothing in the code may catch it."""


def files_of(folder):
    """The content of every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dies_at_call(monkeypatch, module, name, call):
    """Let the n-th call of a function run, and the process die right after it."""
    original, calls = getattr(module, name), []

    def wrapped(*values, **keywords):
        result = original(*values, **keywords)
        calls.append(name)
        if len(calls) == call:
            raise Killed
        return result

    monkeypatch.setattr(module, name, wrapped)


# ---- runs without files: the loop alone ----


def masked_rows(rows=6, length=12, vocab_size=120):
    """Rows with padding, and a different number of labels in each (1, 2, ...)."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for row in range(rows):
        ids = torch.randint(4, vocab_size - 1, (length,), generator=generator)
        keep = torch.arange(length) < length - row
        labels = torch.where(torch.arange(length) <= row, ids, -100).where(keep, torch.tensor(-100))
        examples.append(
            {"input_ids": ids.where(keep, torch.tensor(1)), "attention_mask": keep.long(), "labels": labels}
        )
    return examples


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def small_model(kind, **options):
    torch.manual_seed(0)
    if kind == "luna":
        return AutoModelForMaskedLM.from_config(tiny_config(sparse_prediction=True, conv_kernel_size=3, **options))
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return AutoModelForMaskedLM.from_config(
        RobertaConfig(vocab_size=120, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    )


SETTINGS = {
    "mixed_precision": "no",
    "trackers": [],
    "output_dir": ".",
    "continues": False,
    "batch_size": 4,
    "max_steps": 1,
    "windows": None,
    "max_grad_norm": 1e9,
    "max_skipped_steps": 0,
    "log_steps": 1,
    "eval_steps": 100,
    "save_steps": 100,
}


def make_run(tmp_path, updates, kind="luna", model=None, optimizer=None, **settings):
    """A run on given micro-batches with plain gradient descent unless an optimizer is given; evaluated on
    `masked_rows`."""
    tmp_path.mkdir(exist_ok=True)
    run = MaskedPretraining(SimpleNamespace(**{**SETTINGS, **settings}))
    updates = list(updates)
    run.accelerator.gradient_accumulation_steps = len(updates[0])
    model = model or small_model(kind)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    run.scheduler = loop.warmup_then_decay(optimizer, run.recipe.max_steps, 0.0, 1.0)
    run.module, run.optimizer = run.accelerator.prepare(model, optimizer)
    run.updates, run.held_out, run.save = iter(updates), masked_rows(), lambda: None
    run.log = log.RunLog(tmp_path / "log.jsonl", is_main_process=True)
    run.unigram_loss, run.flops_per_token, run.peak_flops = 5.0, 1.0, 1e9
    return run
