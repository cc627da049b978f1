"""The keys of a translation recipe. Their meaning stands beside them in the recipes, and in `--help`."""

import dataclasses
import math
import re
from typing import Any

from luna_hf.scripting import UserError

# Keys that may differ when a run is resumed: they do not change what is learnt.
_FREE_TO_CHANGE = {
    *("model_name", "license", "output_dir", "overwrite_output_dir", "resume", "accept_changed_data"),
    *("push_to_hub", "hub_model_id", "hub_private", "max_skipped_steps", "save_total_limit", "log_steps", "eval_steps"),
    *("trackers", "average_checkpoints", "num_beams", "length_penalty", "max_new_tokens", "eval_batch_size"),
    *("min_bleu", "test_split"),
}


@dataclasses.dataclass(frozen=True)
class TranslationRecipe:
    """The keys of a translation recipe. None has a default, so that a recipe is complete.

    Raises:
        UserError: A value is out of range, or two values contradict each other.
    """

    # output
    model_name: str
    license: str
    output_dir: str
    overwrite_output_dir: bool
    resume: bool
    accept_changed_data: bool
    push_to_hub: bool
    hub_model_id: str
    hub_private: bool
    # data
    data: str
    source_language: str
    target_language: str
    train_split: str
    validation_split: str
    test_split: str
    tokenizer: str
    vocab_size: int
    max_length: int
    # model
    model: dict[str, Any]
    # optimisation
    max_steps: int
    batch_tokens: int
    accumulation: int
    learning_rate: float
    warmup_steps: int
    label_smoothing: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    max_skipped_steps: int
    mixed_precision: str
    seed: int
    # translating
    average_checkpoints: int
    num_beams: int
    length_penalty: float
    max_new_tokens: int
    eval_batch_size: int
    # reporting
    log_steps: int
    eval_steps: int
    save_steps: int
    save_total_limit: int
    trackers: list[str]
    min_bleu: float

    # What the training loop asks of any recipe, and translation does not have.
    windows = None
    model_name_or_path = ""

    def __post_init__(self) -> None:
        counts = ("max_steps", "batch_tokens", "accumulation", "warmup_steps", "average_checkpoints", "num_beams")
        counts += ("max_new_tokens", "eval_batch_size", "log_steps", "eval_steps", "save_steps", "save_total_limit")
        self.require(counts, lambda value: value >= 1, "at least 1")
        self.require(("max_length",), lambda value: value >= 2, "at least 2: a token and the end")
        self.require(("adam_beta1", "adam_beta2"), lambda value: 0 <= value < 1, "at least 0 and below 1")
        self.require(("label_smoothing",), lambda value: 0 <= value < 1, "at least 0 and below 1")
        sizes = ("learning_rate", "adam_epsilon", "max_grad_norm")
        self.require(sizes, lambda value: 0 < value < math.inf, "above 0")
        self.require(("weight_decay", "max_skipped_steps", "seed"), lambda value: value >= 0, "at least 0")
        self.require(("model_name",), re.compile(r"[\w.-]+").fullmatch, "letters, digits, dots and dashes")
        self.require(("source_language", "target_language"), re.compile(r"[\w-]+").fullmatch, "a code such as de")
        self.require(("output_dir", "data", "train_split", "validation_split"), str.strip, "given")
        self.require(("mixed_precision",), lambda value: value in ("no", "bf16", "fp16"), "'no', 'bf16' or 'fp16'")
        self.require(("model",), lambda value: "model_type" in value, "a section with `model_type`, for example luna")
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

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Keys in which the recipe of a checkpoint differs so that the run would not be the same."""
        own = dataclasses.asdict(self)
        return [key for key in own if key not in _FREE_TO_CHANGE and own[key] != other.get(key)]

    def require(self, names: tuple[str, ...], accepts: Any, allowed: str) -> None:
        """Check values with a function that is false for bad ones; `allowed` completes the message "must be ...".

        Raises:
            UserError: A value is refused.
        """
        for name in names:
            if not accepts(getattr(self, name)):
                raise UserError(f"Recipe key `{name}` is {getattr(self, name)!r}, but must be {allowed}.")
