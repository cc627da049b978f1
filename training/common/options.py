"""Options of the training commands: dataclasses filled from an optional YAML recipe and the command line.

    python training/COMMAND.py [RECIPE.yaml] [--key value ...]

The command line overrides the recipe, the recipe overrides the defaults of the dataclasses.

* Hyphens and underscores are the same in a key. `--key=value` and `--key value` are the same.
* A boolean key needs no value to be true; `--no_key` makes it false.
* Lists are several words (`--seeds 1 2 3`) or YAML (`--seeds '[1, 2, 3]'`).
* `--section.key value` sets one key of a section, such as `--model.hidden_size 64`.
"""

import dataclasses
import difflib
import inspect
import json
import math
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.dataclasses import type_validator

from luna_hf.scripting import UserError

Values = dict[str, Any]

TRAINING = Path(__file__).resolve().parents[1]
_WIDTH = 110
# Ranges of numbers in all commands, by the words of a message. A message ends with "but must be at least 0".
_RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "above 0": (
        lambda value: 0 < value < math.inf,
        (
            *("adam_epsilon", "decay_power", "num_train_epochs", "max_steps", "sweep_learning_rates"),
            *("log_steps", "logging_steps", "eval_steps", "save_steps", "save_total_limit", "torch_empty_cache_steps"),
            *("batch_size", "batch_tokens", "pass_tokens", "eval_batch_size", "sweep_batch_sizes", "accumulation"),
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("max_train_samples", "max_eval_samples", "eval_blocks", "eval_tokens", "eval_accumulation_steps"),
            "max_question_length",
            *("average_checkpoints", "num_beams", "max_new_tokens", "sample_tokens", "dataloader_prefetch_factor"),
            *("share", "new_learning_rate", "ddp_bucket_cap_mb", "ddp_timeout"),
        ),
    ),
    "at least 0": (
        lambda value: 0 <= value < math.inf,
        (
            *("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "max_skipped_steps", "eval_delay"),
            *("early_stopping_patience", "dataloader_num_workers", "neftune_noise_alpha", "frozen_steps"),
        ),
    ),
    "at least 0 and below 1": (
        lambda value: 0 <= value < 1,
        (
            *("adam_beta1", "adam_beta2", "dropout", "sweep_dropouts", "label_smoothing", "label_smoothing_factor"),
            *("warmup_fraction", "warmup_ratio", "sentence_share"),
        ),
    ),
    "between 0 and 1, both excluded": (lambda value: 0 < value < 1, ("held_out_fraction", "mask_probability")),
    "at least 0 and below 2**32": (lambda value: 0 <= value < 2**32, ("seed", "seeds")),  # what NumPy takes
    "at least 2": (lambda value: 2 <= value < math.inf, ("max_length",)),
    "finite": (math.isfinite, ("length_penalty", "min_bleu", "min_gain_nats")),
}
_TRAINER_DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"


def parse(
    classes: Sequence[type],
    words: Sequence[str],
    description: str = "",
    *,
    command: str = "",
    recipe: Literal["required", "optional", "none"] = "optional",
    positional: str = "",
    refused: Mapping[str, str] | None = None,
    adapt: Callable[[Values, Values], None] | None = None,
) -> tuple[Any, ...]:
    """Fill dataclasses from a recipe and the command line.

    Args:
        classes: dataclasses with distinct fields. A field without a default must be given. Its line in `--help` is
            `Annotated[type, "line"]` or `metadata["help"]`; a required recipe explains its keys itself.
        words: the command line without the name of the command.
        description: what `--help` prints first.
        command: name of the command, `pretrain_mlm`; its recipes are in `training/recipes/<command>/`.
        recipe: whether the first word names a recipe.
        positional: field that takes the words before the first option, where there is no recipe.
        refused: keys that may not be given, with the reason.
        adapt: called with the recipe's values and the overrides, both of which it may change, before they are merged.
            An override of a section has the key `section.key`.

    Returns:
        An instance of each class.

    Raises:
        UserError: No such recipe, an unknown, refused or missing key, or a value of the wrong type.
        SystemExit: After `--help`.
    """
    kinds = {key: kind for one in classes for key, kind in _kinds(one).items()}
    if {"-h", "--help"} & set(words):
        print(help_text(classes, description, command, recipe, positional, refused or {}))
        raise SystemExit(0)
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    bare, words = list(words[:first]), list(words[first:])
    values: Values = {}
    source = ""
    if recipe != "none" and bare:
        source = bare.pop(0)
        # `key:` without a value is the same as leaving the key out.
        read = [(key.replace("-", "_"), value) for key, value in read_yaml(Path(source)).items()]
        values = {key: value for key, value in read if value is not None}
        if twice := [key for key, _ in read if [other for other, _ in read].count(key) > 1]:
            raise UserError(f"{source} sets `{twice[0]}` twice, once with hyphens.")
    elif recipe == "required":
        raise UserError(f"The first argument is a recipe, for example {', '.join(recipes_of(command))}.")
    elif positional and bare:
        values, bare = {positional: _from_texts(positional, bare, kinds[positional])}, []
    if bare:
        raise UserError(f"Unexpected argument {bare[0]!r}; options are written `--key value`.")
    overrides = _overrides(words, kinds)
    for key in [*values, *overrides]:
        if key in (refused or {}):
            raise UserError(f"`{key}` cannot be set here: {refused[key]}.")
        if "." not in key and key not in kinds:
            raise UserError(f"Unknown key `{key}`{f' in {source}' * (key in values)}.{did_you_mean(key, kinds)}")
    if adapt:
        adapt(values, overrides)
    for key, value in overrides.items():
        section, _, field = key.partition(".")
        if "." not in key:
            values[key] = value
        elif isinstance(values.get(section), dict):
            values[section][field] = value
        else:
            raise UserError(f"--{key}: there is no section `{section}`.")
    return tuple(fill(one, values, f"{source}: " if source else "") for one in classes)


def read_yaml(path: Path) -> Values:
    """The keys and values of a YAML file.

    Raises:
        UserError: No such file, not YAML, or not a mapping.
    """
    if not path.is_file():
        raise UserError(f"There is no recipe {path}. Recipes: {', '.join(recipes_of(path.parent.name))}.")
    values = parse_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} must consist of `key: value` lines.")
    return values


def parse_yaml(text: str | bytes, what: str) -> Any:
    """The value of a YAML text; a tag that would make anything but plain values is not valid.

    Raises:
        UserError: It is not valid; `what` begins the message.
    """
    try:
        value = yaml.load(text, Loader=_Loader)
        json.dumps(value, default=str, skipkeys=True)  # raises an error for a value that contains itself
        return value
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # the second: 2026-13-45, or not UTF-8
        raise UserError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The closest known word as a question, or the known words if none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    if close:
        return f" Did you mean `{close[0]}`?"
    return f" Known: {', '.join(known)}." if len(known) < 60 else " `--help` lists the keys."


class _Loader(yaml.SafeLoader):
    """Numbers as in YAML 1.2: `1e-3` is one, and neither `010` is 8 nor `1:30` 90. No key may come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Values:
        """A mapping.

        Raises:
            ConstructorError: It has a key twice.
        """
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1 and key != "<<"]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


_NUMBERS = {"int": r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+)$", "float": r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"}
_NUMBERS["float"] += r"|^[-+]?(\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] not in _NUMBERS]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_form), list("-+.0123456789"))


# ---- types ----


def _kinds(one: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a dataclass accepts."""
    hints = get_type_hints(one)
    return {
        field.name: get_args(hint) if get_origin(hint := hints[field.name]) in (Union, types.UnionType) else (hint,)
        for field in dataclasses.fields(one)
        if field.init
    }


def _name(kind: Any) -> str:
    """What a type is called in messages."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null", list: "a list"}
    names[str] = "text (in quotes if YAML reads it as something else)"
    return names.get(get_origin(kind) or kind, "a section of `key: value` lines")


def _accepts(kind: Any, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_accepts(get_args(kind)[0], item) for item in value)
    try:
        type_validator("", value, kind)
    except TypeError:
        return False
    return True


def _typed(key: str, value: Any, kinds: tuple[Any, ...], source: str) -> Any:
    """The value as one of the types; a single item where a list is expected becomes a list."""
    kind = next((kind for kind in kinds if _accepts(kind, value)), None)
    if kind is None and not isinstance(value, list):
        kind = next((kind for kind in kinds if get_origin(kind) is list and _accepts(kind, [value])), None)
        value = [value] if kind else value
    if kind is None:
        allowed = " or ".join(map(_name, kinds))
        raise UserError(f"{source}`{key}` is {value!r}, but must be {allowed}.")
    for number in value if isinstance(value, list) else [value]:
        if type(number) is int and abs(number) >= 10**18:
            raise UserError(f"{source}`{key}` has {len(str(number))} digits, but may have 18.")
    if kind is float:
        return float(value)
    return list(map(float, value)) if kind == list[float] else value


def _check_range(key: str, value: Any, source: str) -> None:
    """Check a number, or those of a list.

    Raises:
        UserError: One is out of the range of its key.
    """
    for number in value if isinstance(value, list) else [value]:
        for allowed, (accepts, keys) in _RANGES.items():
            if key in keys and number is not None and not accepts(number):
                raise UserError(f"{source}`{key}` is {number!r}, but must be {allowed}.")


def _from_texts(key: str, texts: list[str], kinds: tuple[Any, ...]) -> Any:
    """What the words after an option stand for."""
    if not texts:
        if bool in kinds:
            return True
        raise UserError(f"--{key} needs a value: `--{key} VALUE`.")
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]
    if len(texts) > 1 or (items and str not in kinds and not texts[0].startswith("[")):
        if not items:
            raise UserError(f"--{key} takes one value, but {len(texts)} follow it: {' '.join(texts)}")
        return [_from_texts(key, [text], (items[0],)) for text in texts]
    (text,) = texts
    if set(kinds) <= {str, type(None)}:
        return text
    try:
        value = parse_yaml(text, f"--{key} {text}")
    except UserError:
        if str not in kinds:
            raise
        return text
    return value if str not in kinds or any(_accepts(kind, value) for kind in kinds) else text


def _overrides(words: list[str], kinds: dict[str, tuple[Any, ...]]) -> Values:
    """`--key value ...` and `--key=value` as a dictionary; later options replace earlier ones."""
    overrides: Values = {}
    remaining = list(words)
    while remaining:
        key, equals, text = remaining.pop(0).partition("=")
        if not key.startswith("--"):  # behind `--key=value`
            raise UserError(f"Unexpected argument {key + equals + text!r}; options are written `--key value`.")
        key, texts = key[2:].replace("-", "_"), [text] if equals else []
        while not equals and remaining and not remaining[0].startswith("--"):
            texts.append(remaining.pop(0))
        if key not in kinds and key.startswith("no_") and bool in kinds.get(key[3:], ()) and not texts:
            overrides[key[3:]] = False
        else:
            overrides[key] = _from_texts(key, texts, kinds.get(key, (Any,)))
    return overrides


def fill(one: type, values: Values, where: str = "") -> Any:
    """An instance of a dataclass from those of the values that are its fields.

    Args:
        one: the dataclass.
        values: by field, as YAML gives them.
        where: start of the messages, for example "recipe.yaml: ".

    Raises:
        UserError: A field without a default is missing, or a value has the wrong type, is out of range or is refused by
            the dataclass.
    """
    given = {key: _typed(key, values[key], kinds, where) for key, kinds in _kinds(one).items() if key in values}
    defaults = {field.name: field.default for field in dataclasses.fields(one)}
    for key, value in given.items():
        if value != defaults[key]:  # such as the -1 of transformers' `max_steps`
            _check_range(key, value, where)
    required = [field.name for field in dataclasses.fields(one) if field.init and _is_required(field)]
    if missing := [key for key in required if key not in given]:
        raise UserError(f"{where}Set `{'`, `'.join(missing)}`; see `--help`.")
    try:
        return one(**given)
    except UserError:
        raise
    except (ValueError, ImportError, TypeError, OSError) as error:  # OSError: a file that an option names
        raise UserError(" ".join(str(error).split())) from error


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# ---- help ----


def help_text(
    classes: Sequence[type], description: str, command: str, recipe: str, positional: str, refused: Mapping[str, str]
) -> str:
    """The description, the first recipe with its comments or one entry an option, and the names of inherited options.

    A recipe is shown where one is required: it explains every key.
    """
    word = {"required": " RECIPE.yaml", "optional": " [RECIPE.yaml]", "none": f" {positional.upper()} ..."}[recipe]
    lines = [f"usage: python training/{command}.py{word} [--key value ...]", "", description.strip(), ""]
    recipes = recipes_of(command) if recipe != "none" else []
    if recipes:
        lines += ["Recipes:", *(f"  {path}" for path in recipes), ""]
    shown, inherited = "", []
    if recipe == "required" and recipes:
        text = (TRAINING.parent / recipes[0]).read_text(encoding="utf-8").partition("\n\n")[2]
        shown = re.sub(r"^(\w+): *", r"--\1 ", text, flags=re.MULTILINE)
    lines += ["Options:", *shown.splitlines()]
    for field, owner in declared(classes, refused):
        if f"--{field.name} " in shown:
            continue
        if owner.__module__.startswith("transformers."):
            inherited.append(f"--{field.name}")
            continue
        text, default = explained(field, owner)
        if default not in (dataclasses.MISSING, None, False, "", []):
            text += f" [default: {default}]"
        entry = textwrap.fill(text, _WIDTH, initial_indent=" " * 30, subsequent_indent=" " * 30)
        option = f"  {positional.upper() if field.name == positional else '--' + field.name}"
        lines.append(f"{option:<29} {entry.strip()}" if len(option) < 29 else f"{option}\n{entry}")
    if inherited:
        lines += ["", "Options of transformers.TrainingArguments, described at", f"  {_TRAINER_DOCS}"]
        lines += [textwrap.fill(" ".join(inherited), _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(line.rstrip() for line in lines)


def declared(classes: Sequence[type], refused: Iterable[str]) -> list[tuple[dataclasses.Field, type]]:
    """The fields that are options, each with the class that declares it last."""
    fields = [field for one in classes for field in dataclasses.fields(one) if field.init and field.name not in refused]
    parents = [parent for one in classes for parent in one.__mro__]
    return [(field, next(c for c in parents if field.name in inspect.get_annotations(c))) for field in fields]


def explained(field: dataclasses.Field, owner: type) -> tuple[str, Any]:
    """What an option means, or "" where recipes say so, and its default, `MISSING` if there is none."""
    annotated = getattr(get_type_hints(owner, include_extras=True)[field.name], "__metadata__", ("",))
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return annotated[0] or field.metadata.get("help", ""), default


def recipes_of(command: str) -> list[str]:
    """The recipes of a command, the demo first; those of all commands if it has none."""
    found = sorted(TRAINING.glob("recipes/*/*.yaml"), key=lambda path: (path.stem != "demo", path))
    own = [path for path in found if path.parent.name == command]
    return [path.relative_to(TRAINING.parent).as_posix() for path in own or found]
