r"""Finetune an encoder on STS-B (Cer et al. 2017), into a sentence-transformers folder that embeds texts.

    python training/finetune_embeddings.py --model_name_or_path checkpoints/luna-mini-en-4096 \
        --output_dir outputs/luna-mini-en-stsb

An embedding is the mean of a text's token states. The cosine of two embeddings learns to order pairs of sentences as
people score them (CoSENT's loss). `--dataset_name` is a name on the Hub, or a folder with a file for each split:
columns `sentence1`, `sentence2` and `label`, from 0 to 5. Every option of sentence-transformers' training arguments is
accepted. After an interruption, the same command continues from the last epoch. Needs sentence-transformers:
pip install -e ".[train,embed]"
"""

from common import extra, extra_embed  # noqa: F401

# isort: split
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import torch
from common import options
from common.cards import bullets
from common.models import load_config, load_encoder, load_tokenizer
from common.tables import require_text
from datasets import Dataset, disable_progress_bars
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from tasks.arguments import option
from tasks.files import load_splits, require_columns
from tasks.labels import numbers_of_tables, read_labels
from tasks.plan import SETTINGS_FILE, check_output, check_settings, data_digest, is_begun, read_json, settings
from tasks.trainer import Clock, find_checkpoint, remove_checkpoints, seconds
from transformers import AutoModel
from transformers.utils import logging

from luna_hf.scripting import describe_run, locked, run_script, write_json

SCRIPT, RESULT = "training/finetune_embeddings.py", "metrics.json"
COLUMNS = ("sentence1", "sentence2", "label")


@dataclass
class EmbeddingArguments:
    """The encoder and its data."""

    model_name_or_path: str = option(MISSING, "Encoder: a folder or a name on the Hub (required).")
    dataset_name: str = option("nyu-mll/glue", "Hub name, or a folder with a file for each split.")
    max_length: int | None = option(None, "Tokens that are embedded at most; by default all that the model takes.")
    accept_changed_data: bool = option(False, "Continue a run although its data have changed.")


@dataclass
class TrainingArguments(SentenceTransformerTrainingArguments):
    """Those of sentence-transformers, with defaults that suit STS-B."""

    num_train_epochs: float = 4
    per_device_train_batch_size: int = 32
    learning_rate: float = 1e-4
    warmup_steps: float = 0.1
    logging_steps: float = 50
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2
    report_to: str = "none"


def parse(words: Sequence[str]) -> tuple[EmbeddingArguments, TrainingArguments]:
    """The options of a command line."""
    return options.parse((EmbeddingArguments, TrainingArguments), words, __doc__, command="finetune_embeddings")


def read_pairs(name: str) -> dict[str, Dataset]:
    """The splits train and validation, with a `score` from 0 to 1 for each pair.

    Raises:
        UserError: A split, a column, a text or a label is missing, or a label is no number.
    """
    splits = load_splits(name, "stsb", ("train", "validation"), required=(["train"], ["validation"]))
    splits = numbers_of_tables(splits, COLUMNS[2], regression=True)
    for split, rows in splits.items():
        require_columns(rows, COLUMNS, f"{name} ({split})")
        for column in COLUMNS[:2]:
            require_text(rows, column, f"{name} ({split})")
    read_labels({f"{name} ({split})": rows for split, rows in splits.items()}, COLUMNS[2], names=())
    return {
        split: rows.select_columns(list(COLUMNS)).map(lambda row: {"score": row["label"] / 5}, remove_columns="label")
        for split, rows in splits.items()
    }


def load(arguments: EmbeddingArguments) -> SentenceTransformer:
    """The encoder with mean pooling, in float32.

    Raises:
        UserError: There is no such encoder, or it is damaged.
    """
    name = arguments.model_name_or_path
    _, notes = load_encoder(AutoModel, name)  # finds what is missing
    load_tokenizer(name, load_config(name))
    print(bullets(notes))
    logging.set_verbosity_error()  # the notes replace the report of unused weights
    encoder = SentenceTransformer(name, model_kwargs={"dtype": torch.float32})
    if arguments.max_length:
        encoder.max_seq_length = arguments.max_length
    return encoder


def finetune(words: Sequence[str]) -> None:
    """Train, evaluate, and write the folder, with `metrics.json` at last.

    Raises:
        UserError: The model, the data or the folder cannot be used.
    """
    arguments, training = parse(words)
    folder = Path(training.output_dir)
    check_output(folder, [arguments.model_name_or_path])
    with locked(folder / ".lock"):
        pairs = read_pairs(arguments.dataset_name)
        print(f"Pairs: {len(pairs['train']):,} to train on, {len(pairs['validation']):,} to evaluate on.")
        encoder = None if (folder / RESULT).is_file() else load(arguments)
        begin(folder, arguments, training, pairs)
        if encoder:
            head = describe_run(SCRIPT, words, training.device.type)
            head |= {"model": arguments.model_name_or_path, "dataset": arguments.dataset_name}
            write_json(folder / RESULT, head | run(encoder, training, pairs))
        remove_checkpoints(folder)
        scores, before = (read_json(folder / RESULT)[name]["spearman"] for name in ("scores", "scores_before"))
    print(f"Spearman's correlation on the validation split: {scores:.3f} (before finetuning {before:.3f})")


def begin(folder: Path, arguments: EmbeddingArguments, training: TrainingArguments, pairs: dict[str, Dataset]) -> None:
    """Compare with the run that the folder holds, or write the settings of one that begins.

    Raises:
        UserError: That run has other settings or data.
    """
    values, data = training.to_dict(), {split: data_digest(rows) for split, rows in pairs.items()}
    own = {"model": arguments.model_name_or_path}
    own |= {name: values[name] for name in ("learning_rate", "per_device_train_batch_size", "seed")}
    wanted = settings(arguments.model_name_or_path, {**dataclasses.asdict(arguments), **values}, own, data)
    sources = {split: f"{arguments.dataset_name} ({split})" for split in pairs}
    for note in check_settings(folder, wanted, sources, arguments.accept_changed_data):
        print(note)
    if not is_begun(folder):
        write_json(folder / SETTINGS_FILE, wanted)


def run(encoder: SentenceTransformer, training: TrainingArguments, pairs: dict[str, Dataset]) -> dict[str, Any]:
    """Train and save the encoder; returns the figures."""
    folder, dev = Path(training.output_dir), pairs["validation"]
    evaluator = EmbeddingSimilarityEvaluator(dev["sentence1"], dev["sentence2"], dev["score"], show_progress_bar=False)
    before = evaluator(encoder)
    trainer = SentenceTransformerTrainer(
        encoder, training, pairs["train"], loss=CoSENTLoss(encoder), callbacks=[Clock()]
    )
    start = find_checkpoint(folder, print)
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    scores = evaluator(encoder)
    encoder.save_pretrained(str(folder))
    return {
        "train_rows": len(pairs["train"]),
        "validation_rows": len(dev),
        "max_length": encoder.max_seq_length,
        "steps": trainer.state.global_step,
        "seconds": round(seconds(trainer), 2),
        "scores": {name: scores[f"{name}_cosine"] for name in ("pearson", "spearman")},
        "scores_before": {name: before[f"{name}_cosine"] for name in ("pearson", "spearman")},
        "log": [row for row in trainer.state.log_history if "loss" in row],
        "training": training.to_dict(),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    stopped = "the same command continues from the last epoch"
    disable_progress_bars()  # of `datasets`
    return run_script(lambda: finetune(sys.argv[1:] if words is None else words), stopped, clean_on_sigterm=False)


if __name__ == "__main__":
    sys.exit(main())
