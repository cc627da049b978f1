"""What the tests of finetuning share: tiny checkpoints, data that can be learnt, and short runs."""

import csv
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import finetune_csqa
import finetune_glue
import finetune_race
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import ROOT, randomise, tiny_config_for, tiny_tokenizer
from tasks import classification
from transformers import (
    AutoModelForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from luna_hf import FAMILIES

COMMANDS = {"finetune_glue": finetune_glue, "finetune_race": finetune_race, "finetune_csqa": finetune_csqa}
RECIPES = sorted((ROOT / "training" / "recipes").glob("finetune_*/*.yaml"))
MODEL_TYPES = [*FAMILIES, "roberta", "modernbert"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = ["every", "token", "reads", "the", "packed", "sequence", "in", "turn", "quick", "brown", "lazy"]
# Without evaluations and checkpoints on the way.
PLAIN = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
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


# ---- data ----


def topics(count: int, seed: int = 0, classes: int = 2) -> tuple[list[str], list[int]]:
    """Texts of unequal lengths, and which of the words fox, dog and cat each contains."""
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
    """A file of any kind that the commands read, by its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def write_split(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows."""
    return write_rows(path, {name: [row[name] for row in rows] for name in rows[0]})


def glue_folder(folder: Path, task: str = "sst2", rows: int = 48, suffix: str = ".parquet") -> Path:
    """A task of GLUE as the Hub has it, with plain integers for labels and -1 in the test splits."""
    spec = classification.TASKS[task]
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


def race_rows(count: int, level: str, seed: int) -> list[dict[str, Any]]:
    """Questions with the right option `the fox`; every passage has two of them."""
    generator = random.Random(f"{level}{seed}")
    rows = []
    for index in range(count):
        options = ["the fox", "a dog reads", "cat", "the packed sequence"]
        generator.shuffle(options)
        words = generator.choices(WORDS, k=generator.randint(2, 9))
        rows.append(
            {
                "example_id": f"{level}{index // 2}.txt",
                "article": " ".join(words) + ".",
                "question": generator.choice(["the token reads _ .", "every token reads"]),
                "options": options,
                "answer": "ABCD"[options.index("the fox")],
            }
        )
    return rows


def csqa_rows(count: int, seed: int, answers: bool = True) -> list[dict[str, Any]]:
    """Questions with the right option `fox`."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        options = ["fox", "dog", "cat", "lazy token", "sequence"]
        generator.shuffle(options)
        rows.append(
            {
                "id": f"{seed}-{index}",
                "question": " ".join(generator.choices(WORDS, k=generator.randint(2, 9))),
                "question_concept": "fox",
                "choices": {"label": list("ABCDE"), "text": options},
                "answerKey": "ABCDE"[options.index("fox")] if answers else "",
            }
        )
    return rows


# ---- runs ----


def command(model: Any, output_dir: Path, **options: Any) -> list[str]:
    """Words of a short run; lists become several words."""
    words = ["--model_name_or_path", *map(str, model if isinstance(model, list) else [model])]
    for name, value in {**SHORT, "output_dir": output_dir, **options}.items():
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def run(model: Any, output_dir: Path, script: Any = finetune_glue, **options: Any) -> dict[str, Any]:
    """A short run in this process; the content of its results.json."""
    assert script.main(command(model, output_dir, **options)) == 0
    return json.loads((output_dir / "results.json").read_text())


def refused(capsys: pytest.CaptureFixture, words: list[str], script: Any = finetune_glue) -> str:
    """The message of a run that ends with an error."""
    capsys.readouterr()
    assert script.main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message
