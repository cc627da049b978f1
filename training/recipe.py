"""Recipes: a complete YAML file, parsed into a typed and validated dataclass, with overrides from the command line.

    python training/pretrain_mlm.py RECIPE.yaml --max_steps 20 --model.hidden_size 64

`load_recipe` reads any dataclass; `PretrainRecipe` is what `pretrain_mlm.py` reads. What each key means is written
beside it in the recipes themselves.
"""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

RecipeType = TypeVar("RecipeType")


class UserError(ValueError):
    """Something the user can mend; scripts print the message without a traceback."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes `1e-3` for text, because it has no point; here it is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclasses.dataclass(frozen=True)
class PretrainRecipe:
    """Every key of a recipe of `pretrain_mlm.py`; none has a default, so that a recipe says all there is to know."""

    model_name: str
    language: str
    license: str
    output_dir: str
    overwrite_output_dir: bool
    data: str
    held_out_fraction: float
    vocab_size: int
    block_size: int
    mask_probability: float
    model: dict[str, Any]
    max_steps: int
    batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    warmup_fraction: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    mixed_precision: str
    seed: int
    log_steps: int
    eval_steps: int
    min_gain_nats: float
    fill_mask: list[str]

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "gradient_accumulation_steps", "log_steps", "eval_steps"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("held_out_fraction", "mask_probability"):
            self._require(name, 0 < getattr(self, name) < 1, "between 0 and 1, both excluded")
        for name in ("adam_beta1", "adam_beta2", "warmup_fraction"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("learning_rate", "adam_epsilon", "max_grad_norm"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("weight_decay", self.weight_decay >= 0, "at least 0")
        self._require("seed", self.seed >= 0, "at least 0")
        named = re.fullmatch(r"[\w.-]+", self.model_name)
        self._require("model_name", named, "letters, digits, dots and dashes, such as luna-demo")
        self._require("output_dir", self.output_dir.strip(), "the folder to write to")
        self._require("data", self.data.strip(), "`cpython`, or a .txt file or a folder of them")
        self._require("vocab_size", self.vocab_size > 261, "above 261: 256 bytes and 5 special tokens come first")
        self._require("block_size", self.block_size >= 3, "at least 3: <s>, one token, </s>")
        self._require("mixed_precision", self.mixed_precision in ("no", "bf16", "fp16"), "'no', 'bf16' or 'fp16'")
        self._require("model", "model_type" in self.model, "a section with `model_type`, for example luna")
        one_mask = all(sentence.count("<mask>") == 1 for sentence in self.fill_mask)
        self._require("fill_mask", self.fill_mask and one_mask, "sentences with exactly one <mask> each")

    def _require(self, name: str, accepted: Any, allowed: str) -> None:
        if not accepted:
            raise UserError(f"Recipe key `{name}` is {getattr(self, name)!r}, but must be {allowed}.")


def load_recipe(recipe_class: type[RecipeType], path: str | Path, overrides: list[str] | None = None) -> RecipeType:
    """Read a recipe file and apply `--key value` overrides.

    Args:
        recipe_class: dataclass with one field per key.
        path: YAML file.
        overrides: command line words, `["--max_steps", "20", "--model.hidden_size=64"]`.

    Raises:
        UserError: No such file, not YAML, a missing or unknown key, a value of a wrong type or out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no recipe file {path}. Those that exist: {', '.join(_recipes_near(path))}.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold `key: value` lines, but it is a {type(values).__name__}.")
    types = get_type_hints(recipe_class)
    for key, text in parse_overrides(overrides or []).items():
        value = text if types.get(key) is str else _yaml_value(key, text)  # `no` is a text where text is wanted
        section, _, field = key.partition(".")
        if field and isinstance(values.get(section), dict):
            values[section][field] = value
        elif field:
            raise UserError(f"--{key}: the recipe has no section `{section}`.")
        else:
            values[key] = value
    return recipe_class(**check_types(values, types, str(path)))


def check_types(values: dict[str, Any], types: dict[str, Any], source: str) -> dict[str, Any]:
    """The values, each of its declared type (whole numbers are taken for `float` fields).

    Raises:
        UserError: A key is unknown or missing, or a value has another type.
    """
    for key in values:
        if key not in types:
            raise UserError(f"{source}: unknown key `{key}`.{did_you_mean(key, types)}")
    missing = [key for key in types if key not in values]
    if missing:
        raise UserError(f"{source}: missing key `{'`, `'.join(missing)}`. A recipe states every key.")
    return {key: _typed(key, value, types[key], source) for key, value in values.items()}


def did_you_mean(word: str, known: Any) -> str:
    """The closest known word as a question, or all of them if nothing is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(sorted(known))}."


def parse_overrides(words: list[str]) -> dict[str, str]:
    """`--key value` and `--key=value` to a dictionary of texts.

    Raises:
        UserError: A word that is no option, or an option without a value.
    """
    overrides = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise UserError(f"Unexpected argument {word!r}: after the recipe come options, `--key value`.")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise UserError(f"--{key} needs a value: `--{key} VALUE`, with any key of the recipe.")
            text = remaining.pop(0)
        overrides[key] = text
    return overrides


def _yaml_value(key: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"--{key} {text}: not a YAML value ({error}).") from error


def _typed(key: str, value: Any, expected: Any, source: str) -> Any:
    name = {
        str: "text (in quotes if YAML takes it for something else)",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
    }.get(expected)
    if expected == list[str]:
        accepted = isinstance(value, list) and all(isinstance(item, str) for item in value)
        name = "a list of text"
    elif expected == dict[str, Any]:
        accepted = isinstance(value, dict) and all(isinstance(item, str) for item in value)
        name = "a section of `key: value` lines"
    elif expected is float:
        accepted = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if accepted else value
    else:
        accepted = type(value) is expected
    if not accepted:
        raise UserError(f"{source}: `{key}` is {value!r} ({type(value).__name__}), but must be {name}.")
    return value


def _recipes_near(path: Path) -> list[str]:
    known = Path(__file__).resolve().parent / "recipes"
    found = sorted(known.rglob("*.yaml"))
    same_script = [recipe for recipe in found if recipe.parent.name == path.parent.name]
    return [f"training/{recipe.relative_to(known.parent).as_posix()}" for recipe in same_script or found]
