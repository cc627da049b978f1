"""The option system of the training commands, on small dataclasses."""

import dataclasses
from typing import Annotated, Any

import convert
import finetune_glue
import pretrain_clm
import pretrain_mlm
import pytest
import train_translation
from common.options import TRAINING, parse

from luna_hf.scripting import UserError


@dataclasses.dataclass
class Complete:
    """Every key must be given, as in a pretraining recipe."""

    name: str
    steps: int
    rate: float
    fast: bool
    data: str | list[Any]
    prompts: list[str]
    model: dict[str, Any]


@dataclasses.dataclass
class Defaults:
    """Every key has a default, as in finetuning."""

    seeds: list[int] = dataclasses.field(default_factory=list, metadata={"help": "Seeds of the runs."})
    rates: list[float] = dataclasses.field(default_factory=lambda: [1.0])
    limit: Annotated[int | None, "Rows to read."] = 2
    keep: bool = True


FINETUNE = ["--model_name_or_path", "model", "--task_name", "sst2"]
RECIPE = """
name: tiny
steps: 3
rate: 1e-3
fast: false
data: texts
prompts: [one]
model:
  width: 8
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def complete(path, *words, **options):
    return parse([Complete], [str(path), *words], recipe="required", **options)[0]


def test_a_recipe_gives_typed_values(recipe):
    expected = Complete("tiny", 3, 1e-3, False, "texts", ["one"], {"width": 8})
    assert complete(recipe) == expected
    assert type(complete(recipe, "--rate", "2").rate) is float


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--steps", "7"], "steps", 7),
        (["--steps=7", "--steps", "8"], "steps", 8),
        (["--rate", "-1e-4"], "rate", -1e-4),
        (["--fast"], "fast", True),
        (["--fast", "false"], "fast", False),
        (["--name", "no"], "name", "no"),
        (["--name=a=b"], "name", "a=b"),
        (["--data", "123"], "data", "123"),
        (["--data", "[a.txt, {path: b, weight: 2}]"], "data", ["a.txt", {"path": "b", "weight": 2}]),
        (["--prompts", "['A <mask>.', b]"], "prompts", ["A <mask>.", "b"]),
        (["--prompts", "A b", "c"], "prompts", ["A b", "c"]),
        (["--prompts", "alone"], "prompts", ["alone"]),
        (["--model.width", "16", "--model.tied=true"], "model", {"width": 16, "tied": True}),
        (["--model", "{width: 4}"], "model", {"width": 4}),
    ],
)
def test_the_command_line_overrides_the_recipe(recipe, words, key, value):
    assert getattr(complete(recipe, *words), key) == value


def test_several_classes_with_defaults(recipe, tmp_path):
    assert parse([Defaults], []) == (Defaults(),)
    words = ["--seeds", "1", "2", "--rates=3", "--no-keep", "--limit", "null"]
    given = parse([Complete, Defaults], [str(recipe), *words])
    assert given == (complete(recipe), Defaults([1, 2], [3.0], None, False))
    (tmp_path / "other.yaml").write_text("seeds: 4\nlimit:\n")
    (from_file,) = parse([Defaults], [str(tmp_path / "other.yaml")])
    assert from_file == Defaults(seeds=[4])


def test_words_before_the_first_option_may_fill_a_field():
    (given,) = parse([Defaults], ["1.5", "2", "--seeds", "1"], positional="rates", recipe="none")
    assert (given.rates, given.seeds) == ([1.5, 2.0], [1])


def test_values_are_adapted_before_they_are_merged(recipe):
    def adapt(values, overrides):
        assert values["model"] == {"width": 8} and overrides == {"name": "big", "model.depth": 2}
        values["model"] = {}
        overrides.setdefault("steps", 9)

    given = complete(recipe, "--name", "big", "--model.depth", "2", adapt=adapt)
    assert (given.name, given.steps, given.model) == ("big", 9, {"depth": 2})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--stesp", "3"], "`steps`"),
        (["--steps"], "--steps"),
        (["--steps", "--fast"], "--steps"),
        (["--steps", "many"], "`steps` is 'many'"),
        (["--steps", "2.5"], "`steps` is 2.5"),
        (["--steps", "true"], "`steps` is True"),
        (["--steps", "1", "2"], "1 2"),
        (["--rate", "false"], "`rate` is False"),
        (["--rate", "1" + "0" * 400], "`rate` has 401 digits"),
        (["--steps", "1" + "0" * 30], "`steps` has 31 digits"),
        (["--steps", "010"], "`steps` is '010'"),
        (["--steps", "1:30"], "`steps` is '1:30'"),
        (["--rate", "1:30.5"], "`rate` is '1:30.5'"),
        (["--fast", "perhaps"], "`fast` is 'perhaps'"),
        (["--model", "luna"], "`model` is 'luna'"),
        (["--modle.width", "3"], "`modle`"),
        (["--prompts", "[one"], "--prompts"),
        (["--prompts", "[1]"], r"`prompts` is \[1\]"),
        (["steps", "3"], "'steps'"),
        (["--prompts=one", "two"], "Unexpected argument 'two'"),
        (["--secret", "3"], "`secret`.*the reason"),
    ],
)
def test_a_mistake_on_the_command_line_names_the_key(recipe, words, named):
    with pytest.raises(UserError, match=named):
        complete(recipe, *words, refused={"secret": "the reason"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (RECIPE.replace("steps:", "step:"), "`step`.*`steps`"),
        (RECIPE.replace("steps: 3", "").replace("name: tiny", ""), "`name`, `steps`"),
        (RECIPE.replace("tiny", "false"), "`name` is False"),
        (RECIPE + "steps: 4\n", "'steps' stands there twice"),
        (RECIPE + "a-b: 4\na_b: 4\n", "`a_b` twice"),
        (RECIPE.replace("width: 8", "width: &m [*m]"), "recipe.yaml.*[Cc]ircular"),
        ("a: [1", "recipe.yaml"),
        ("- a", "recipe.yaml"),
        ("", "recipe.yaml"),
    ],
)
def test_a_mistake_in_a_recipe_names_the_key_or_the_file(recipe, text, named):
    recipe.write_text(text)
    with pytest.raises(UserError, match=named):
        complete(recipe)


def test_a_missing_recipe_names_those_of_the_command(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml.*training/recipes/pretrain_mlm/demo\.yaml"):
        complete(tmp_path / "pretrain_mlm" / "none.yaml")
    with pytest.raises(UserError, match=r"training/recipes/pretrain_clm/demo\.yaml"):
        parse([Complete], ["--steps", "3"], recipe="required", command="pretrain_clm")


def test_help_lists_own_options_with_their_lines_and_inherited_ones_by_name(capsys):
    from tasks.arguments import FinetuneTrainingArguments

    with pytest.raises(SystemExit, match="0"):
        parse([Defaults, FinetuneTrainingArguments], ["--help"], "What it does.", command="finetune_glue")
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python training/finetune_glue.py [RECIPE.yaml]")
    assert "What it does." in printed and "training/recipes/finetune_glue/tiny.yaml" in printed
    assert (
        "--seeds " in printed
        and "Seeds of the runs." in printed
        and "Rows to read." in printed
        and "[default: 2]" in printed
    )
    assert "--ddp_backend" in printed.rpartition("transformers.TrainingArguments")[2]


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        *[(key, (0, -1), 1) for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "save_steps")],
        *[(key, (0, -1), 1) for key in ("max_train_samples", "sweep_batch_sizes", "eval_accumulation_steps")],
        *[(key, (0, ".nan", ".inf"), 0.5) for key in ("num_train_epochs", "adam_epsilon", "sweep_learning_rates")],
        *[(key, (-1, ".nan", ".inf"), 0) for key in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm")],
        *[(key, (1, 1.5, -0.1, ".nan"), 0) for key in ("dropout", "sweep_dropouts", "adam_beta2")],
        *[(key, (-1, 2**32), 7) for key in ("seed", "seeds")],
        ("max_length", (1, -5), 2),
        ("max_steps", (0, -2), -1),  # transformers' default
    ],
)
def test_numbers_out_of_range_are_refused_in_finetuning(key, bad, good, tmp_path):
    for value in bad:
        with pytest.raises(UserError, match=f"`{key}` is .*must be"):
            finetune_glue.parse([*FINETUNE, "--output_dir", str(tmp_path), f"--{key}", str(value)])
    assert finetune_glue.parse([*FINETUNE, "--output_dir", str(tmp_path), f"--{key}", str(good)])


@pytest.mark.parametrize(
    ("command", "key", "bad"),
    [
        *[(pretrain_mlm, key, 0) for key in ("max_steps", "batch_size", "learning_rate", "max_grad_norm", "log_steps")],
        *[(pretrain_mlm, key, 1.0) for key in ("mask_probability", "held_out_fraction", "warmup_fraction")],
        *[(pretrain_mlm, key, ".inf") for key in ("learning_rate", "decay_power", "weight_decay", "min_gain_nats")],
        *[(pretrain_clm, key, 0) for key in ("sample_tokens", "adam_epsilon", "eval_blocks")],
        *[(convert, key, 0) for key in ("pass_tokens", "eval_tokens", "mask_probability", "save_total_limit")],
        *[(train_translation, key, 0) for key in ("accumulation", "warmup_steps", "num_beams", "eval_batch_size")],
        *[(train_translation, key, value) for key, value in (("label_smoothing", 1.0), ("max_length", 1))],
    ],
)
def test_numbers_out_of_range_are_refused_in_recipes(command, key, bad, capsys):
    recipe = sorted((TRAINING / "recipes" / command.__name__).glob("*.yaml"))[0]
    assert command.main([str(recipe), f"--{key}", str(bad)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and f"`{key}` is" in line and "must be" in line
