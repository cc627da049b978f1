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
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common.options import parse
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from tasks.arguments import option
from tasks.files import load_splits, require_columns
from transformers.trainer_utils import get_last_checkpoint

from luna_hf.scripting import UserError, describe_run, reason, run_script, write_json

SCRIPT = "training/finetune_embeddings.py"
COLUMNS = ("sentence1", "sentence2", "label")


@dataclass
class EmbeddingArguments:
    """The encoder and its data."""

    model_name_or_path: str = option("", "Encoder: a folder or a name on the Hub.")
    dataset_name: str = option("nyu-mll/glue", "Hub name, or a folder with a file for each split.")
    max_length: int | None = option(None, "Tokens that are embedded at most; by default all that the model takes.")


@dataclass
class TrainingArguments(SentenceTransformerTrainingArguments):
    """Those of sentence-transformers, with defaults that suit STS-B."""

    num_train_epochs: float = 4
    per_device_train_batch_size: int = 32
    learning_rate: float = 1e-4
    warmup_steps: float = 0.1
    save_strategy: str = "epoch"
    save_total_limit: int | None = 1
    report_to: str = "none"


def read_pairs(name: str) -> dict[str, Dataset]:
    """The splits train and validation, with a `score` from 0 to 1 for each pair.

    Raises:
        UserError: A split or column is missing.
    """
    splits = load_splits(name, "stsb", ("train", "validation"))
    for split in ("train", "validation"):
        if split not in splits:
            raise UserError(f"{name} has no split {split}.")
        require_columns(splits[split], COLUMNS, f"{name} ({split})")
    return {
        split: rows.select_columns(list(COLUMNS)).map(lambda row: {"score": row["label"] / 5}, remove_columns="label")
        for split, rows in splits.items()
    }


def load(arguments: EmbeddingArguments) -> SentenceTransformer:
    """The encoder with mean pooling, in float32.

    Raises:
        UserError: There is no such encoder.
    """
    try:
        encoder = SentenceTransformer(arguments.model_name_or_path, model_kwargs={"dtype": torch.float32})
    except (OSError, ValueError) as error:
        raise UserError(f"--model_name_or_path {arguments.model_name_or_path!r}: {reason(error)}.") from error
    if arguments.max_length:
        encoder.max_seq_length = arguments.max_length
    return encoder


def finetune(words: Sequence[str]) -> None:
    """Train, evaluate, and write the folder with `metrics.json`.

    Raises:
        UserError: The model or the data cannot be used.
    """
    arguments, training = parse((EmbeddingArguments, TrainingArguments), words, __doc__, command="finetune_embeddings")
    folder, pairs, encoder = Path(training.output_dir), read_pairs(arguments.dataset_name), load(arguments)
    dev = pairs["validation"]
    evaluator = EmbeddingSimilarityEvaluator(dev["sentence1"], dev["sentence2"], dev["score"], show_progress_bar=False)
    before = evaluator(encoder)
    trainer = SentenceTransformerTrainer(encoder, training, pairs["train"], loss=CoSENTLoss(encoder))
    output = trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    scores = evaluator(encoder)
    encoder.save_pretrained(str(folder))
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    figures = {
        **describe_run(SCRIPT, words, training.device.type),
        "model": arguments.model_name_or_path,
        "dataset": arguments.dataset_name,
        "train_rows": len(pairs["train"]),
        "validation_rows": len(dev),
        "max_length": encoder.max_seq_length,
        "steps": trainer.state.global_step,
        "seconds": output.metrics["train_runtime"],
        "scores": {name: scores[f"{name}_cosine"] for name in ("pearson", "spearman")},
        "scores_before": {name: before[f"{name}_cosine"] for name in ("pearson", "spearman")},
        "training": training.to_dict(),
    }
    write_json(folder / "metrics.json", figures)
    print(f"Spearman's correlation on the validation split: {figures['scores']['spearman']:.3f} ", end="")
    print(f"(before finetuning {figures['scores_before']['spearman']:.3f})")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run_script(lambda: finetune(sys.argv[1:] if words is None else words), "the last epoch is kept")


if __name__ == "__main__":
    sys.exit(main())
