r"""Finetune an encoder on STS-B (Cer et al. 2017), into a sentence-transformers folder that embeds texts.

    python training/finetune_embeddings.py --model_name_or_path checkpoints/luna-minilm-en-4096 \
        --output_dir outputs/luna-minilm-en-stsb

An embedding is the mean of a text's token states. The cosine of two embeddings learns to order pairs of sentences as
people score them (CoSENT's loss). `--dataset_name` is a name on the Hub, or a folder with a file for each split:
columns `sentence1`, `sentence2` and `label`, from 0 to 5. Options of sentence-transformers' training arguments work,
or are refused with the reason. After an interruption, the same command continues from the last epoch. Needs
sentence-transformers: pip install -e ".[train,embed]"
"""

from common import extra, extra_embed  # noqa: F401

# isort: split
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from common import cards, options
from common.machine import machine
from common.models import load_encoder, load_tokenizer, longest_input
from common.sentences import load_sentences
from common.tables import require_text, shorten
from datasets import Dataset, disable_progress_bars
from huggingface_hub import EvalResult
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from tasks.arguments import REFUSED, CheckedTraining, option
from tasks.files import load_splits, require_columns
from tasks.labels import numbers_of_tables, refuse_codes
from tasks.plan import (
    SETTINGS_FILE,
    check_output,
    check_settings,
    data_digest,
    is_begun,
    read_json,
    settings,
    unique_labels,
)
from tasks.trainer import Clock, Diverged, FiniteTraining, Sealing, find_checkpoint, remove_checkpoints, seconds, train
from transformers import AutoModel

from luna_hf.convert.card import KINDS, usage
from luna_hf.markdown import code, table
from luna_hf.scripting import UserError, describe_run, locked, portable, quiet, run_script, write_json, write_text
from luna_hf.warm_start.sentence_folder import find_transformer

SCRIPT, RESULT = "training/finetune_embeddings.py", "metrics.json"
COLUMNS = ("sentence1", "sentence2", "label")
_EVALUATION = ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps")
_BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
_HUB = ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token")
REFUSED_HERE = REFUSED | {
    **dict.fromkeys(_EVALUATION, "the validation split is scored once before and once after training"),
    **dict.fromkeys(_BEST, "the weights of the last update are kept"),
    **dict.fromkeys((*_HUB, "hub_always_push"), "the folder is not pushed: use `hf upload`"),
    "label_smoothing_factor": "labels are numbers",
    "learning_rate_mapping": "all parameters have the same --learning_rate",
    "neftune_noise_alpha": "the Trainer does not find the table of embeddings in a SentenceTransformer",
    "include_num_input_tokens_seen": "tokens are not counted",
    "train_sampling_strategy": "--batch_sampler chooses the order of the rows",
    "prompts": "texts get the encoder's default prompt, if it has one",
    "router_mapping": "the encoder is the same for both sentences",
    "multi_dataset_batch_sampler": "there is one data set",
}


@dataclass
class EmbeddingArguments:
    """The encoder and its data."""

    model_name_or_path: str = option(MISSING, "Encoder: a folder or a name on the Hub (required).")
    dataset_name: str = option("nyu-mll/glue", "Hub name, or a folder with a file for each split.")
    max_length: int | None = option(None, "Most tokens of a text to embed; by default those of the encoder.")
    accept_changed_data: bool = option(False, "Continue a run although its data have changed.")


@dataclass
class TrainingArguments(CheckedTraining, SentenceTransformerTrainingArguments):
    """Those of sentence-transformers, with defaults that suit STS-B."""

    output_dir: str = option(MISSING, "Folder to write to (required).")
    num_train_epochs: float = option(4, "Epochs.")
    per_device_train_batch_size: int = option(32, "Pairs per forward pass and process.")
    per_device_eval_batch_size: int = option(16, "Pairs per evaluation step.")
    learning_rate: float = option(1e-4, "Peak learning rate.")
    warmup_steps: float = option(0.1, "Warm-up: a share of the steps below 1, or a count.")
    logging_steps: float = option(50, "Updates between two lines of the log.")
    save_strategy: Literal["epoch", "steps", "no"] = option(
        "epoch", "When to save a checkpoint: after every epoch, every --save_steps updates (steps), or never (no)."
    )
    save_total_limit: int | None = option(2, "Checkpoints to keep while a run is unfinished.")
    report_to: str = option("none", "Tracker that gets the log, such as tensorboard.")


class EmbeddingTrainer(FiniteTraining, SentenceTransformerTrainer):
    """That of sentence-transformers; a loss that is not finite ends the run."""


def parse(words: Sequence[str]) -> tuple[EmbeddingArguments, TrainingArguments]:
    """The options of a command line."""
    classes, command = (EmbeddingArguments, TrainingArguments), "finetune_embeddings"
    return options.parse(classes, words, __doc__, command=command, refused=REFUSED_HERE)


def _number(label: Any) -> float:
    """A label as a number, NaN if it is none."""
    try:
        return math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError):
        return math.nan


def read_pairs(name: str) -> dict[str, Dataset]:
    """The splits train and validation, with a `score` from 0 to 1 for each pair.

    Raises:
        UserError: A split, a column or a text is missing, a label is no number from 0 to 5, or those of the validation
            split are all equal.
    """
    splits = load_splits(name, "stsb", ("train", "validation"), required=(["train"], ["validation"]))
    splits = numbers_of_tables(splits, COLUMNS[2], regression=True)
    for split, rows in splits.items():
        source = f"{name} ({split})"
        require_columns(rows, COLUMNS, source)
        for column in COLUMNS[:2]:
            require_text(rows, column, source)
        refuse_codes(rows, COLUMNS[2], source)
        for row, label in enumerate(rows["label"]):
            if not 0 <= _number(label) <= 5:
                raise UserError(
                    f"Row {row} of {source} has the label {shorten(repr(label))}; it must be a number from 0 to 5."
                )
    if len(set(map(float, splits["validation"]["label"]))) == 1:
        raise UserError(f"{name} (validation) has equal labels in all rows, so there is no correlation. Add others.")
    return {
        split: rows.select_columns(list(COLUMNS)).map(
            lambda row: {"score": float(row["label"]) / 5}, remove_columns="label"
        )
        for split, rows in splits.items()
    }


def load(arguments: EmbeddingArguments, training: TrainingArguments) -> SentenceTransformer:
    """The encoder with mean pooling, in float32.

    Raises:
        UserError: There is no such encoder, it is damaged, or takes fewer tokens than `max_length`; or the optimizer or
            schedule cannot be created.
    """
    name = arguments.model_name_or_path
    try:
        body = str(Path(name, find_transformer(name))) if Path(name).is_dir() else name
    except ValueError as error:
        raise UserError(str(error)) from error
    model, notes = load_encoder(AutoModel, body)  # finds what is missing
    load_tokenizer(body, model.config)
    training.check_with(model)
    if (arguments.max_length or 0) > (longest := longest_input(model.config)):
        raise UserError(f"--max_length is {arguments.max_length}, but {name} takes at most {longest} tokens.")
    print("\n".join(f"- {note}" for note in notes))
    with quiet():  # the notes replace the report of unused weights
        encoder = load_sentences(name, model_kwargs={"dtype": torch.float32})
    encoder.similarity_fn_name = "cosine"  # which the loss trains
    encoder.max_seq_length = min(arguments.max_length or encoder.max_seq_length or longest, longest)
    print(f"- Texts are cut at {encoder.max_seq_length:,} tokens; the model takes {longest:,}.")
    return encoder


def finetune(words: Sequence[str]) -> None:
    """Train, evaluate, and write the folder, with `metrics.json` at last.

    Raises:
        UserError: The model, the data or the folder cannot be used, or the run diverged.
    """
    arguments, training = parse(words)
    folder = Path(training.output_dir)
    check_output(folder, [arguments.model_name_or_path])
    with locked(folder / ".lock"):
        pairs = read_pairs(arguments.dataset_name)
        print(f"Pairs: {len(pairs['train']):,} to train on, {len(pairs['validation']):,} to evaluate on.")
        encoder = None if (folder / RESULT).is_file() else load(arguments, training)
        begin(folder, arguments, training, pairs)
        if encoder:
            head = describe_run(SCRIPT, words, training.device.type)
            head |= {"model": arguments.model_name_or_path, "dataset": arguments.dataset_name}
            figures = head | run(encoder, training, pairs)
            write_text(folder / "README.md", make_card(encoder, figures))
            write_json(folder / RESULT, figures)
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
    names = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "seed")
    own |= {name: values[name] for name in names}
    wanted = settings(arguments.model_name_or_path, {**dataclasses.asdict(arguments), **values}, own, data)
    sources = {split: f"{arguments.dataset_name} ({split})" for split in pairs}
    for note in check_settings(folder, wanted, sources, arguments.accept_changed_data):
        print(note)
    if not is_begun(folder):
        write_json(folder / SETTINGS_FILE, wanted)


def run(encoder: SentenceTransformer, training: TrainingArguments, pairs: dict[str, Dataset]) -> dict[str, Any]:
    """Train and save the encoder; returns the figures.

    Raises:
        UserError: The scores before training are not finite; or a loss, a weight or a score after it, of which nothing
            is left that another setting would continue.
    """
    folder, dev = Path(training.output_dir), pairs["validation"]
    evaluator = EmbeddingSimilarityEvaluator(
        *(dev["sentence1"], dev["sentence2"], dev["score"]),
        batch_size=training.per_device_eval_batch_size,
        show_progress_bar=False,
    )
    before = evaluator(encoder)
    if not all(map(math.isfinite, before.values())):
        raise UserError(
            "The encoder gives all pairs of the validation split the same cosine, or none. Name another encoder, "
            "or raise --max_length."
        )
    training.prompts = encoder.prompts.get(encoder.default_prompt_name)  # as `encode` does
    trainer = EmbeddingTrainer(
        encoder, training, pairs["train"], loss=CoSENTLoss(encoder), callbacks=[Clock(), Sealing()]
    )
    try:
        start = find_checkpoint(folder, print, training.load_best_model_at_end)
        train(trainer, start)
        trainer.require_finite(dict(encoder.named_parameters()))
        scores = evaluator(encoder)
        trainer.require_finite(scores)
    except Diverged as error:
        remove_checkpoints(folder)
        raise UserError(f"The run diverged: {error}. No model was saved. Lower --learning_rate.") from error
    encoder.save_pretrained(str(folder), create_model_card=False)  # which would show texts unescaped
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


def make_card(encoder: SentenceTransformer, figures: dict[str, Any]) -> str:
    """Fill `model_cards/embeddings.md` from what `metrics.json` holds."""
    base, dataset, config = figures["model"], figures["dataset"], encoder[0].auto_model.config
    name = re.sub(r"[^\w.-]+", "-", f"{unique_labels([base])[base]}-embeddings")
    library, task, tags = KINDS["sentences"]
    before, after = figures["scores_before"], figures["scores"]
    measured = {"dataset_type": "text", "dataset_name": portable(dataset), "dataset_split": "validation"}
    results = [
        EvalResult(task, metric_type=metric, metric_name=metric, metric_value=round(value, 4), **measured)
        for metric, value in after.items()
    ]
    metadata = cards.metadata(
        name=name,
        model_type=config.model_type,
        base_model=base,
        tags=["luna_hf-finetuned", *tags],
        results=results,
        library=library,
        pipeline_tag=task,
        datasets=[dataset] if cards.on_hub(dataset) else None,
    )
    counts = ("train_rows", "validation_rows", "max_length", "steps", "seconds")
    rows = [[metric, *(f"{scores[metric]:.4f}" for scores in (before, after))] for metric in after]
    return cards.fill(
        "embeddings.md",
        config.model_type,
        metadata,
        **{count: f"{figures[count]:,}" for count in counts},
        model_name=name,
        base=code(portable(base)),
        dataset=code(portable(dataset)),
        parameters=f"{sum(parameter.numel() for parameter in encoder.parameters()):,}",
        usage=usage("sentences", name),
        scores=table(["", "before finetuning", "after"], rows),
        command=code(figures["command"]),
        **machine("sentence-transformers"),
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    stopped = "the same command continues from the last epoch"
    disable_progress_bars()  # of `datasets`
    return run_script(lambda: finetune(sys.argv[1:] if words is None else words), stopped, clean_on_sigterm=False)


if __name__ == "__main__":
    sys.exit(main())
