"""The keys of a translation recipe. Their meaning stands beside them in the recipes, and in `--help`."""

import dataclasses
import re
from typing import ClassVar

from engine.recipe import Recipe

TASKS = ("translation", "summarization")


@dataclasses.dataclass(frozen=True)
class TranslationRecipe(Recipe):
    """The keys of a translation recipe.

    Raises:
        UserError: As for `Recipe`.
    """

    # data
    task: str
    data: str
    source_language: str
    target_language: str
    train_split: str
    validation_split: str
    test_split: str
    tokenizer: str
    vocab_size: int
    max_length: int
    truncate_source: bool
    # model
    initial_weights: str
    initial_encoder: str
    # optimisation
    batch_tokens: int
    accumulation: int
    warmup_steps: int
    label_smoothing: float
    wait_k: list[int]
    # translating
    average_checkpoints: int
    num_beams: int
    length_penalty: float
    max_new_tokens: int
    eval_batch_size: int
    min_bleu: float

    free_to_change: ClassVar[frozenset[str]] = Recipe.free_to_change | {
        *("average_checkpoints", "num_beams", "length_penalty", "max_new_tokens", "eval_batch_size", "min_bleu"),
        "test_split",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(("warmup_steps",), bool, "at least 1")
        self.require(("task",), TASKS.__contains__, f"one of {', '.join(TASKS)}")
        translates = self.task == "translation"
        self.require(("wait_k", "min_bleu"), lambda value: translates or not value, "left out in a summarization")
        accepted = (re.compile(r"[\w-]+").fullmatch, "a code such as de") if translates else (str.strip, "a column")
        self.require(("source_language", "target_language"), *accepted)
        self.require(("data", "train_split", "validation_split"), str.strip, "given")
        begun = self.initial_encoder
        typed = "a section with `model_type`, for example luna"
        self.require(("model",), lambda value: begun or "model_type" in value, typed)
        self.require(("initial_weights",), lambda value: not (value and begun), "left out with `initial_encoder`")
        splits = [split for split in (self.train_split, self.validation_split, self.test_split) if split]
        self.require(("train_split",), lambda _: len({*splits}) == len(splits), "another split than the others")
        self.require(("target_language",), lambda value: value != self.source_language, "another language")
        simultaneous = self.model.get("source_is_causal", False)
        whole = "without `source_is_causal` if there is an `initial_encoder`, which reads its text whole"
        self.require(("model",), lambda _: not (simultaneous and begun), whole)
        self.require(("wait_k",), lambda value: simultaneous or not value, "[] unless `model.source_is_causal` is true")
        self.require(("wait_k",), lambda value: all(k >= 0 for k in value), "numbers of at least 0")
        least = self.max_length
        self.require(("batch_tokens",), lambda value: value >= least, f"at least `max_length` ({least})")
        if not self.tokenizer:
            self.require(("vocab_size",), lambda value: value > 261, "above 261: bytes and special tokens come first")
        most = self.save_total_limit
        self.require(("average_checkpoints",), lambda value: value <= most, f"at most `save_total_limit` ({most})")

    @property
    def batch_size(self) -> int:
        """Pairs in a batch of an evaluation."""
        return self.eval_batch_size
