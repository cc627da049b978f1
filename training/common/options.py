"""Recipes: a complete YAML file, parsed into a typed and validated dataclass, with overrides from the command line.

    python training/pretrain_mlm.py RECIPE.yaml --max-steps 20 --model.hidden_size 64 --push-to-hub

Hyphens and underscores are the same in a key, and a key that is true or false needs no value to be true.
"""

import difflib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from luna_hf.scripting import UserError

RecipeType = TypeVar("RecipeType")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes `1e-3` for text, because it has no point; here it is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_recipe(
    recipe_class: type[RecipeType],
    path: str | Path,
    words: list[str] | None = None,
    adapt: Callable[[dict[str, Any], dict[str, str]], None] | None = None,
) -> RecipeType:
    """Read a recipe file and apply `--key value` overrides.

    Args:
        recipe_class: dataclass with one field per key.
        path: YAML file.
        words: command line words, `["--max_steps", "20", "--model.hidden_size=64"]`.
        adapt: called with the file's values (to change) and the overrides, before these are applied.

    Raises:
        UserError: No such file, not YAML, a missing or unknown key, a value of a wrong type or out of range.
    """
    types = get_type_hints(recipe_class)
    values = read_yaml(Path(path))
    overrides = parse_overrides(words or [], flags={key for key, kind in types.items() if kind is bool})
    for key in overrides:
        if "." not in key and key not in types:
            raise UserError(f"--{key}: unknown key `{key}`.{did_you_mean(key, types)}")
    if adapt:
        adapt(values, overrides)
    for key, text in overrides.items():
        # `no` is a text where text is wanted.
        is_text = types.get(key) is str or (types.get(key) == str | list[Any] and not text.startswith("["))
        value = text if is_text else _yaml_value(key, text)
        section, _, field = key.partition(".")
        if field and isinstance(values.get(section), dict):
            values[section][field] = value
        elif field:
            raise UserError(f"--{key}: the recipe has no section `{section}`.")
        else:
            values[key] = value
    return recipe_class(**check_types(values, types, str(path)))


def read_yaml(path: Path) -> dict[str, Any]:
    """The `key: value` lines of a recipe file.

    Raises:
        UserError: No such file, not YAML, or something else than keys and values.
    """
    if not path.is_file():
        raise UserError(f"There is no recipe file {path}. Those that exist: {', '.join(_recipes_near(path))}.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold `key: value` lines, but it is a {type(values).__name__}.")
    return values


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


def parse_overrides(words: list[str], flags: Collection[str] = ()) -> dict[str, str]:
    """`--key value` and `--key=value` to a dictionary of texts.

    Args:
        words: of the command line.
        flags: keys that stand for true where no value follows.

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
        key = key.replace("-", "_")
        if not equals:
            if remaining and not remaining[0].startswith("--"):
                text = remaining.pop(0)
            elif key in flags:
                text = "true"
            else:
                raise UserError(f"--{key} needs a value: `--{key} VALUE`, with any key of the recipe.")
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
    elif expected == list[Any]:
        accepted = isinstance(value, list)
        name = "a list"
    elif expected == str | list[Any]:
        accepted = isinstance(value, str | list)
        name = "text, or a list"
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
    known = Path(__file__).resolve().parents[1] / "recipes"
    found = sorted(known.rglob("*.yaml"))
    same_script = [recipe for recipe in found if recipe.parent.name == path.parent.name]
    return [f"training/{recipe.relative_to(known.parent).as_posix()}" for recipe in same_script or found]
