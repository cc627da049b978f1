"""What recipes of the pretraining scripts say. What each key means is written beside it in the recipes themselves."""

import dataclasses
import math
import re
from typing import Any

from engine.groups import ParameterGroup, read_groups
from luna_hf.scripting import UserError

# Keys that may differ when a run is resumed: they do not change what is learnt.
_FREE_TO_CHANGE = {
    "model_name",
    "language",
    "license",
    "output_dir",
    "overwrite_output_dir",
    "resume",
    "push_to_hub",
    "hub_model_id",
    "hub_private",
    "cache_dir",
    "batch_size",
    "max_skipped_steps",
    "save_steps",
    "save_total_limit",
    "log_steps",
    "eval_steps",
    "trackers",
    "min_gain_nats",
    "fill_mask",
    "prompts",
    "sample_tokens",
}


@dataclasses.dataclass(frozen=True)
class RunRecipe:
    """The keys of every pretraining recipe; none has a default, so that a recipe says all there is to know."""

    # output
    model_name: str
    language: str
    license: str
    output_dir: str
    overwrite_output_dir: bool
    resume: bool
    push_to_hub: bool
    hub_model_id: str
    hub_private: bool
    # data
    data: str | list[Any]
    text_column: str
    validation: str
    held_out_fraction: float
    eval_blocks: int
    streaming: bool
    cache_dir: str
    tokenizer: str
    train_tokenizer: bool
    vocab_size: int
    block_size: int
    # model
    model_name_or_path: str
    model: dict[str, Any]
    # optimisation
    max_steps: int
    global_batch_tokens: int
    batch_size: int
    learning_rate: float
    parameter_groups: list[Any]
    warmup_fraction: float
    decay_power: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    max_skipped_steps: int
    mixed_precision: str
    gradient_checkpointing: bool
    compile: bool
    seed: int
    # reporting
    log_steps: int
    eval_steps: int
    save_steps: int
    save_total_limit: int
    trackers: list[str]
    min_gain_nats: float

    # Of tokenizers that are trained: 256 bytes and the special tokens come first.
    _special_tokens = 5
    _smallest_block = 4, "<s>, two tokens, </s>"

    def __post_init__(self) -> None:
        at_least_one = ("max_steps", "batch_size", "log_steps", "eval_steps", "save_steps", "save_total_limit")
        for name in (*at_least_one, "eval_blocks"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("held_out_fraction", 0 < self.held_out_fraction < 1, "between 0 and 1, both excluded")
        for name in ("adam_beta1", "adam_beta2", "warmup_fraction"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("learning_rate", "adam_epsilon", "max_grad_norm", "decay_power"):
            self._require(name, 0 < getattr(self, name) < math.inf, "above 0")
        for name in ("weight_decay", "max_skipped_steps", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        named = re.fullmatch(r"[\w.-]+", self.model_name)
        self._require("model_name", named, "letters, digits, dots and dashes, such as luna-demo")
        coded = re.fullmatch(r"|[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code", self.language)
        self._require("language", coded, 'a code such as en or pt-BR, "multilingual", or "" for none')
        self._require("output_dir", self.output_dir.strip(), "the folder to write to")
        self._require("cache_dir", self.cache_dir.strip(), "a folder for the tokenized text")
        self._require("data", self.data, "`cpython`, files, a folder, a name on the Hub, or a list of these")
        smallest, block = self._smallest_block
        self._require("block_size", self.block_size >= smallest, f"at least {smallest}: {block}")
        self._require("mixed_precision", self.mixed_precision in ("no", "bf16", "fp16"), "'no', 'bf16' or 'fp16'")
        read_groups(self.parameter_groups)
        self._require_batch()
        self._require_model()
        self._require_tokenizer()

    @property
    def update_rows(self) -> int:
        """Blocks an update, over all processes."""
        return self.global_batch_tokens // self.block_size

    @property
    def groups(self) -> list[ParameterGroup]:
        """`parameter_groups`, parsed."""
        return read_groups(self.parameter_groups)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Keys in which the recipe of a checkpoint differs so that the run would not be the same."""
        own = dataclasses.asdict(self)
        return [key for key in own if key not in _FREE_TO_CHANGE and own[key] != other.get(key)]

    def _require_batch(self) -> None:
        below = max(self.global_batch_tokens // self.block_size, 1) * self.block_size
        self._require(
            "global_batch_tokens",
            self.global_batch_tokens == below,
            f"a multiple of `block_size` ({self.block_size}), for example {below}",
        )

    def _require_model(self) -> None:
        if self.model_name_or_path:
            self._require("model", "model_type" not in self.model, "without `model_type`: the checkpoint has one")
        else:
            self._require("model", "model_type" in self.model, "a section with `model_type`, for example luna")

    def _require_tokenizer(self) -> None:
        if self.train_tokenizer:
            self._require("tokenizer", not self.tokenizer, 'empty ("") where `train_tokenizer` is true')
            first = 256 + self._special_tokens
            which = f"above {first}: 256 bytes and {self._special_tokens} special tokens come first"
            self._require("vocab_size", self.vocab_size > first, which)
            if self.model_name_or_path:
                raise UserError(
                    f"{self.model_name_or_path} has its own tokenizer, and a new one would not fit its embeddings. "
                    "Set `train_tokenizer` to false."
                )
        elif not self.tokenizer and not self.model_name_or_path:
            raise UserError("Name a `tokenizer`, or train one (`--train_tokenizer true --vocab_size 50265`).")

    def _require(self, name: str, accepted: Any, allowed: str) -> None:
        if not accepted:
            raise UserError(f"Recipe key `{name}` is {getattr(self, name)!r}, but must be {allowed}.")


@dataclasses.dataclass(frozen=True)
class PretrainRecipe(RunRecipe):
    """Every key of a recipe of `pretrain_mlm.py`."""

    mask_probability: float
    whole_word_masking: bool
    fill_mask: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("mask_probability", 0 < self.mask_probability < 1, "between 0 and 1, both excluded")
        one_mask = all(sentence.count("<mask>") == 1 for sentence in self.fill_mask)
        self._require("fill_mask", self.fill_mask and one_mask, "sentences with exactly one <mask> each")


@dataclasses.dataclass(frozen=True)
class CausalRecipe(RunRecipe):
    """Every key of a recipe of `pretrain_clm.py`."""

    prompts: list[str]
    sample_tokens: int

    _special_tokens = 3
    _smallest_block = 3, "<s>, two tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        some = self.prompts and all(prompt.strip() for prompt in self.prompts)
        self._require("prompts", some, "texts that the finished model continues")
        self._require("sample_tokens", self.sample_tokens >= 1, "at least 1: tokens that every prompt is continued by")
