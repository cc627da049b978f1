"""The keys that every pretraining recipe has. Their meaning stands beside them in the recipes, and in `--help`."""

import dataclasses
import re
from typing import Any, ClassVar

from engine.groups import ParameterGroup, read_groups
from engine.windows import WindowDropout, read_window_dropout
from luna_hf.scripting import UserError


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The keys that the training loop reads. None has a default, so that a recipe is complete.

    Attributes:
        free_to_change: keys that may differ when a run is resumed: they do not change what is learnt.

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
    # model
    model: dict[str, Any]
    # optimisation
    max_steps: int
    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    max_skipped_steps: int
    mixed_precision: str
    seed: int
    # reporting
    log_steps: int
    eval_steps: int
    save_steps: int
    save_total_limit: int
    trackers: list[str]

    free_to_change: ClassVar[frozenset[str]] = frozenset(
        {
            *("model_name", "license", "output_dir", "overwrite_output_dir", "resume", "accept_changed_data"),
            *("push_to_hub", "hub_model_id", "hub_private", "max_skipped_steps", "save_total_limit"),
            *("log_steps", "eval_steps", "trackers"),
        }
    )

    def __post_init__(self) -> None:
        self.require(("learning_rate", "max_grad_norm"), bool, "above 0")
        self.require(("model_name",), re.compile(r"(?!\.+$)[\w.-]+").fullmatch, "letters, digits, dots and dashes")
        self.require(("output_dir",), str.strip, "a folder")
        self.require(("mixed_precision",), lambda value: value in ("no", "bf16", "fp16"), "'no', 'bf16' or 'fp16'")

    @property
    def continues(self) -> bool:
        """Whether the run starts from a trained model."""
        return False

    @property
    def windows(self) -> WindowDropout | None:
        """The windows that updates read instead of the config's, if any."""
        return None

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Keys in which the recipe of a checkpoint differs so that the run would not be the same."""
        own = dataclasses.asdict(self)
        return [key for key in own if key not in self.free_to_change and own[key] != other.get(key)]

    def require(self, names: tuple[str, ...], accepts: Any, allowed: str) -> None:
        """Check values with a function that is false for bad ones; `allowed` completes the message "must be ...".

        Raises:
            UserError: A value is refused.
        """
        for name in names:
            if not accepts(getattr(self, name)):
                raise UserError(f"Recipe key `{name}` is {getattr(self, name)!r}, but must be {allowed}.")


@dataclasses.dataclass(frozen=True)
class RunRecipe(Recipe):
    """The keys of every pretraining recipe.

    Raises:
        UserError: As for `Recipe`.
    """

    # output
    language: str
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
    # optimisation
    global_batch_tokens: int
    batch_size: int
    parameter_groups: list[Any]
    window_dropout: dict[str, Any]
    warmup_fraction: float
    decay_power: float
    gradient_checkpointing: bool
    compile: bool
    # reporting
    min_gain_nats: float

    # Of trained tokenizers: 256 bytes and the special tokens come first.
    special_tokens: ClassVar[int] = 5
    smallest_block: ClassVar[int] = 4  # <s>, two tokens, </s>

    free_to_change: ClassVar[frozenset[str]] = Recipe.free_to_change | {
        *("language", "cache_dir", "batch_size", "save_steps", "min_gain_nats", "fill_mask", "prompts"),
        "sample_tokens",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        code = re.compile(r"|[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code")
        self.require(("language",), code.fullmatch, 'a code such as en or pt-BR, "multilingual", "code" or ""')
        self.require(("cache_dir",), str.strip, "a folder")
        self.require(("data",), bool, "`cpython`, files, a folder, a name on the Hub, or a list of these")
        least = self.smallest_block
        self.require(("block_size",), lambda value: value >= least, f"at least {least}")
        below = max(self.update_rows, 1) * self.block_size
        multiple = f"a multiple of `block_size` ({self.block_size}), for example {below}"
        self.require(("global_batch_tokens",), lambda value: value == below, multiple)
        read_groups(self.parameter_groups)
        read_window_dropout(self.window_dropout)
        self._check_model_and_tokenizer()

    @property
    def update_rows(self) -> int:
        """Blocks in an update, over all processes."""
        return self.global_batch_tokens // self.block_size

    @property
    def groups(self) -> list[ParameterGroup]:
        """`parameter_groups`, parsed."""
        return read_groups(self.parameter_groups)

    @property
    def windows(self) -> WindowDropout | None:
        """`window_dropout`, parsed; `None` if every update reads the config's window."""
        return read_window_dropout(self.window_dropout)

    @property
    def continues(self) -> bool:
        """Whether the run starts from a trained model."""
        return bool(self.model_name_or_path)

    def _check_model_and_tokenizer(self) -> None:
        start, typed = self.model_name_or_path, "model_type" in self.model
        if start:
            self.require(("model",), lambda _: not typed, "without `model_type`: the checkpoint has one")
        else:
            self.require(("model",), lambda _: typed, "a section with `model_type`, for example luna")
        if self.train_tokenizer:
            self.require(("tokenizer",), lambda value: not value, 'empty ("") if `train_tokenizer` is true')
            first = 256 + self.special_tokens
            allowed = f"above {first}: 256 bytes and {self.special_tokens} special tokens come first"
            self.require(("vocab_size",), lambda value: value > first, allowed)
            if start:
                raise UserError(
                    f"A new tokenizer would not fit the embeddings of {start}: set `train_tokenizer` to false."
                )
        elif not self.tokenizer and not start:
            raise UserError("Name a `tokenizer`, or train one (`--train_tokenizer --vocab_size 50265`).")
