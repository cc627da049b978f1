"""Finetune a Luna with the plain Trainer of Transformers, on rows made by this script.

    python examples/finetune_with_trainer.py [MODEL]

MODEL is a pretrained folder, by default `checkpoints/luna-minilm-en-4096`. The model learns whether a sentence is
favourable. The words of praise and blame are the same in training and test, the sentences around them are not. It takes
about half a minute on a CPU core, and needs `pip install -e ".[train]"`. `training/finetune_glue.py` finetunes on real
tasks, with tuned settings.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

import luna_hf  # noqa: F401  registers the models with Transformers
from luna_hf.scripting import Parser, UserError, load_tokenizer, run_script

GOOD = ["wonderful", "excellent", "charming", "clever", "beautiful", "moving", "delightful", "strong"]
BAD = ["terrible", "awful", "boring", "stupid", "ugly", "dull", "tiresome", "weak"]
THINGS = ["book", "play", "speech", "song", "story", "painting", "meal", "journey", "house", "garden"]
TRAIN = ["The {thing} was {word}.", "It is a {word} {thing}.", "I found the {thing} {word} from the first day."]
TEST = ["Everyone said that the {thing} had been {word}.", "What a {word} {thing} we saw in London!"]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="checkpoints/luna-minilm-en-4096")
    parser.add_argument("--epochs", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="default: %(default)s")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Finetune and print the accuracy before and after. Returns the exit status."""
    return run_script(lambda: finetune(parse(sys.argv[1:] if words is None else words)))


def finetune(options: argparse.Namespace) -> None:
    """Finetune and print the accuracy before and after.

    Raises:
        UserError: There is no such model.
    """
    if not Path(options.model).is_dir():
        raise UserError(f"There is no {options.model}. Name the folder of a pretrained model.")
    set_seed(0)
    tokenizer = load_tokenizer(options.model, required=True)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    train, test = (
        rows(patterns).map(lambda row: tokenizer(row["text"]), remove_columns="text") for patterns in (TRAIN, TEST)
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                num_train_epochs=options.epochs,
                learning_rate=options.learning_rate,
                warmup_steps=0.1,  # a share of all steps
                per_device_train_batch_size=16,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=train,
            eval_dataset=test,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
        )
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on {len(test)} new sentences: {before:.2f} before, {after:.2f} after")


def rows(patterns: Sequence[str]) -> datasets.Dataset:
    """Every pattern with every thing and word, in a random order: `text`, and `label` 1 for praise."""
    made = [
        {"text": pattern.format(thing=thing, word=word), "label": int(word in GOOD)}
        for pattern, thing, word in itertools.product(patterns, THINGS, GOOD + BAD)
    ]
    random.Random(0).shuffle(made)
    return datasets.Dataset.from_list(made)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of rows whose label has the highest logit."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


if __name__ == "__main__":
    sys.exit(main())
