"""What the tests of finetuning share: tiny checkpoints, data that can be learnt, and short runs."""

import csv
import json
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from helpers import ROOT, randomise, tiny_config_for, tiny_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from luna_hf import FAMILIES

sys.path.insert(0, str(ROOT / "training"))  # the scripts import their siblings plainly

import finetune_glue
from common import options as recipe
from tasks import arguments as finetune_arguments
from tasks import best as finetune_best
from tasks import files as finetune_data
from tasks import labels as finetune_labels
from tasks import plan as finetune_plan
from tasks import report as finetune_report
from tasks import runs as finetuning
from tasks import trainer as finetune_trainer

__all__ = [
    "finetune_arguments",
    "finetune_best",
    "finetune_data",
    "finetune_glue",
    "finetune_labels",
    "finetune_plan",
    "finetune_report",
    "finetune_trainer",
    "finetuning",
    "recipe",
]

SCRIPT = "training/finetune_glue.py"
RECIPES = sorted((ROOT / "training" / "recipes" / "finetune_glue").glob("*.yaml"))
MODEL_TYPES = [*FAMILIES, "roberta", "modernbert"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = ["every", "token", "reads", "the", "packed", "sequence", "in", "turn", "quick", "brown", "lazy"]
# A run that takes a second.
SHORT = {
    "num_train_epochs": 2,
    "learning_rate": 3e-3,
    "per_device_train_batch_size": 8,
    "max_length": 32,
    "use_cpu": True,
    "disable_tqdm": True,
}


@cache
def tokenizer() -> Any:
    """One tokenizer for all."""
    return tiny_tokenizer([" ".join([*WORDS, "fox dog cat"])] * 3, vocab_size=320)


def encoder(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A tiny masked-LM model with random parameters and 40 positions."""
    torch.manual_seed(seed)
    vocab = len(tokenizer())
    if model_type in FAMILIES:
        config = tiny_config_for(model_type, **{**SHAPE, "vocab_size": vocab, "max_position_embeddings": 40, **fields})
        model = AutoModelForMaskedLM.from_config(config)
    elif model_type == "roberta":
        shape = {**SHAPE, "vocab_size": vocab, "max_position_embeddings": 42, "hidden_dropout_prob": 0.0}
        model = RobertaForMaskedLM(RobertaConfig(**{**shape, "attention_probs_dropout_prob": 0.0, **fields}))
    else:
        special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
        shape = {**SHAPE, "vocab_size": vocab, "max_position_embeddings": 40, "num_hidden_layers": 2}
        model = ModernBertForMaskedLM(ModernBertConfig(**{**shape, **special, **fields}))
    randomise(model)
    return model


def checkpoint(folder: Path, model_type: str = "luna", **options: Any) -> Path:
    """A pretrained folder with model and tokenizer."""
    encoder(model_type, **options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def topics(count: int, seed: int = 0, classes: int = 2) -> tuple[list[str], list[int]]:
    """Texts of unequal lengths, and which of the words fox, dog and cat stands in each."""
    generator = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        label = generator.randrange(classes)
        words = generator.choices(WORDS, k=generator.randint(3, 9))
        words.insert(generator.randrange(len(words) + 1), ["fox", "dog", "cat"][label])
        texts.append(" ".join(words))
        labels.append(label)
    return texts, labels


def write_rows(path: Path, columns: dict[str, list[Any]]) -> Path:
    """A file of any kind that the scripts read, by its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix == ".jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    return path


def glue_folder(folder: Path, task: str = "sst2", rows: int = 48, suffix: str = ".parquet") -> Path:
    """A task of GLUE as the Hub has it, with plain integers for labels and -1 in the test splits."""
    spec = finetune_glue.TASKS[task]
    for place, split in enumerate(["train", *spec.development, *spec.tests]):
        count = rows if split == "train" else rows // 3
        texts, labels = topics(count, seed=place, classes=max(2, len(spec.labels)))
        columns: dict[str, list[Any]] = {spec.columns[0]: texts}
        if len(spec.columns) > 1:
            columns[spec.columns[1]] = topics(count, seed=place + 10)[0]
        values: list[Any] = [2.5 * label for label in labels] if task == "stsb" else labels
        columns["label"] = [type(value)(-1) for value in values] if split in spec.tests else values
        columns["idx"] = list(range(count))
        write_rows(folder / f"{split}{suffix}", columns)
    return folder


def command(model: Path, output_dir: Path, **options: Any) -> list[str]:
    """Words of a short run; lists become several words."""
    words = ["--model_name_or_path", *map(str, model if isinstance(model, list) else [model])]
    for name, value in {**SHORT, "output_dir": output_dir, **options}.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def run(model: Any, output_dir: Path, **options: Any) -> dict[str, Any]:
    """A short run in this process; the content of its results.json."""
    assert finetune_glue.main(command(model, output_dir, **options)) == 0
    return json.loads((output_dir / "results.json").read_text())


def start_script(words: list[str], launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    """The script as a user starts it, from the repository root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    line = [sys.executable, *launcher, SCRIPT, *words]
    return subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
