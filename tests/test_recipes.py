"""Recipes: every one parses against its script and runs; what is wrong in one is told with its key."""

import re

import pytest
import yaml
from tiny_training import DEMO, RECIPES, SHRINK, recipe, run, write_corpus

NAMES = [path.stem for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_parses_and_is_a_manual(path):
    loaded = recipe.load_recipe(recipe.PretrainRecipe, path)
    assert loaded.max_steps > loaded.eval_steps and len(loaded.fill_mask) >= 1
    head = path.read_text().split("\n\n")[0]
    for word in ("command", "hardware", "wall time", "expect", f"training/recipes/pretrain_mlm/{path.name}"):
        assert word in head
    keys = [line for line in path.read_text().splitlines() if re.match(r"\s*\w+:", line)]
    assert [key for key in keys if "#" not in key] == []


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_runs_three_steps(path, tmp_path):
    figures = run(tmp_path, path, held_out_fraction=0.01)
    assert figures["held_out_targets"] > 0
    assert figures["seen_tokens"] == SHRINK["max_steps"] * SHRINK["batch_size"] * SHRINK["block_size"]


def test_recipe_runs_on_files_of_the_user(tmp_path):
    figures = run(tmp_path / "out", data=write_corpus(tmp_path / "texts"))
    assert figures["corpus"].startswith("40 documents")


def changed(tmp_path, **values):
    """The demo's recipe with some keys set, or left out where the value is `...`."""
    content = {**yaml.safe_load(DEMO.read_text()), **values}
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_step": 3}, r"unknown key `max_step`\. Did you mean `max_steps`\?"),
        ({"colour": 3}, r"unknown key `colour`.*Known: .*adam_beta1"),
        ({"seed": ..., "data": ...}, "missing key `data`, `seed`"),
        ({"max_steps": "many"}, r"`max_steps` is 'many' \(str\), but must be a whole number"),
        ({"max_steps": 2.5}, "must be a whole number"),
        ({"seed": True}, "must be a whole number"),
        ({"learning_rate": False}, "must be a number"),
        ({"mixed_precision": False}, "must be text .in quotes"),
        ({"overwrite_output_dir": "yes please"}, "must be true or false"),
        ({"model": ["luna"]}, "must be a section"),
        ({"model": {"hidden_size": 8}}, "`model_type`"),
        ({"fill_mask": "The <mask>."}, "must be a list of text"),
        ({"fill_mask": ["No mask."]}, "exactly one <mask>"),
        ({"max_steps": 0}, "`max_steps` is 0, but must be at least 1"),
        ({"held_out_fraction": 1.0}, "between 0 and 1"),
        ({"mask_probability": 0}, "between 0 and 1"),
        ({"vocab_size": 200}, "256 bytes"),
        ({"learning_rate": -1.0}, "above 0"),
        ({"weight_decay": -1.0}, "at least 0"),
        ({"mixed_precision": "half"}, "'no', 'bf16' or 'fp16'"),
        ({"model_name": "my/model"}, "letters, digits"),
    ],
)
def test_mistake_in_a_recipe_names_the_key(tmp_path, values, message):
    with pytest.raises(recipe.UserError, match=message):
        recipe.load_recipe(recipe.PretrainRecipe, changed(tmp_path, **values))


def test_overrides_have_the_types_of_the_recipe():
    words = ["--max_steps", "7", "--learning_rate=1e-4", "--model.hidden_size", "64", "--mixed_precision", "no"]
    loaded = recipe.load_recipe(recipe.PretrainRecipe, DEMO, [*words, "--data", "123", "--fill_mask", "['A <mask>.']"])
    assert (loaded.max_steps, loaded.learning_rate, loaded.model["hidden_size"]) == (7, 1e-4, 64)
    assert (loaded.mixed_precision, loaded.data, loaded.fill_mask) == ("no", "123", ["A <mask>."])
    assert loaded.model["model_type"] == "luna" and loaded.seed == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_stesp", "3"], "Did you mean `max_steps`"),
        (["--max_steps"], "--max_steps needs a value"),
        (["--max_steps", "--seed", "1"], "--max_steps needs a value"),
        (["max_steps", "3"], "Unexpected argument 'max_steps'"),
        (["--modle.hidden_size", "3"], "no section `modle`"),
        (["--fill_mask", "[one"], "not a YAML value"),
    ],
)
def test_mistake_in_an_override_is_told(words, message):
    with pytest.raises(recipe.UserError, match=message):
        recipe.load_recipe(recipe.PretrainRecipe, DEMO, words)


def test_override_values_may_hold_equal_signs_and_minus_signs():
    assert recipe.parse_overrides(["--a=b=c", "--d", "-1"]) == {"a": "b=c", "d": "-1"}


def test_missing_recipe_file_names_those_that_exist(tmp_path):
    with pytest.raises(recipe.UserError, match=r"no recipe file .*training/recipes/pretrain_mlm/demo\.yaml"):
        recipe.load_recipe(recipe.PretrainRecipe, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1", "not valid YAML"), ("- a", "`key: value` lines"), ("", "lines")]
)
def test_file_that_is_no_recipe_is_refused(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(recipe.UserError, match=message):
        recipe.load_recipe(recipe.PretrainRecipe, tmp_path / "x.yaml")
