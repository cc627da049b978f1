"""Recipes: each one parses, explains its keys and runs; its comments state the right figures."""

import dataclasses
import json
import re

import pretrain_clm
import pretrain_mlm
import pytest
import yaml
from common import models
from helpers import FAMILIES, code_name, slots_of, slow_unless
from tiny_training import (
    CAUSAL,
    DEMO,
    RECIPES,
    SHRINK,
    arguments,
    start,
    without_model_section,
    write_corpus,
    write_student,
    write_teacher,
)

from luna_hf.scripting import UserError

PATHS = {path.stem: path for path in RECIPES}
CONTINUED = [name for name in PATHS if name.endswith("-continue")]
# What any recipe needs beside SHRINK to run here: a tokenizer made for the text, and the precision of the other tests.
LOCAL = {"train_tokenizer": "true", "mixed_precision": "no", "model.num_attention_heads": 4}
COMMANDS = (pretrain_mlm, pretrain_clm)
SCRIPTS = {command.__name__: command for command in COMMANDS}
NEW_MODELS = [*(path for name, path in PATHS.items() if name not in CONTINUED), *CAUSAL]
EVERY = [*RECIPES, *CAUSAL]


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def load(path):
    return SCRIPTS[path.parent.name].read_recipe(path)


def local_texts(data, folder):
    """What stands in for a recipe's data: its mixture, of local texts."""
    if not isinstance(data, list):
        return write_corpus(folder / "texts")
    for number, section in enumerate(data):
        path = write_corpus(folder / f"texts{number}", documents=20 + number)
        section |= {"path": str(path), "name": "", "split": "train"}
    return json.dumps([{key: value for key, value in section.items() if value} for section in data])


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_a_recipe_parses_and_explains_every_key(path):
    text, loaded = path.read_text(), load(path)
    assert loaded.max_steps > loaded.eval_steps and loaded.max_steps > loaded.save_steps
    assert f"training/recipes/{path.parent.name}/{path.name}" in text.split("\n\n")[0]  # its own command
    keys = [line for line in text.splitlines() if re.match(r"\w+:", line)]
    names = [line.partition(":")[0] for line in keys]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(loaded))
    model = [line for line in text.splitlines() if re.match(r" {2}\w+:", line)]
    assert len(model) == len(loaded.model)
    assert [line for line in keys + model if " # " not in line] == []


# In every suite, one recipe of each command runs, and one with a mixture of texts.
RUN = [DEMO, CAUSAL[0], next(path for path in NEW_MODELS if isinstance(load(path).data, list))]


@pytest.mark.parametrize("path", [slow_unless(path in RUN, path) for path in NEW_MODELS], ids=name_of)
def test_a_recipe_for_a_new_model_runs(path, tmp_path):
    own = {"sample_tokens": 4} if path in CAUSAL else {}
    words = arguments(path, tmp_path / "out", data=local_texts(load(path).data, tmp_path), **LOCAL, **own)
    assert start(SCRIPTS[path.parent.name], words) == 0
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert figures["held_out_targets"] > 0 and figures["model_type"] == "luna"
    seen, full = figures["seen_tokens"], SHRINK["max_steps"] * SHRINK["global_batch_tokens"]
    assert 0.95 * full < seen <= full  # the last row of a text may be short


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return write_teacher(folder / "out", write_corpus(folder / "texts"))


@pytest.mark.parametrize("name", [slow_unless(name == CONTINUED[0], name) for name in CONTINUED])
def test_a_recipe_for_a_converted_model_runs(name, teacher, tmp_path):
    path = PATHS[name]
    family = next(family for family in FAMILIES if name.startswith(code_name(family)))
    begin = write_student(tmp_path / "start", teacher, FAMILIES[family].masked_lm, **slots_of(family, 4))
    data = local_texts(load(path).data, tmp_path)
    words = arguments(path, tmp_path / "out", data=data, model_name_or_path=begin, mixed_precision="no")
    assert start(pretrain_mlm, without_model_section(words)) == 0
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert figures["model_type"] == family
    assert figures["seen_tokens"] == SHRINK["max_steps"] * SHRINK["global_batch_tokens"]


def test_base_recipes_are_the_model_of_the_paper_with_the_optimisation_of_roberta():
    for name, tied in (("luna-base-160gb", False), ("luna-base-16gb", True)):
        loaded = load(PATHS[name])
        # The paper's section 4.3: RoBERTa-base's configuration, which is the default of every family, and l = 128.
        config = models.make_config(loaded.model, None, 50265)
        assert (
            config.to_diff_dict()
            == models.make_config({"model_type": "luna", "tie_kv": tied}, None, 50265).to_diff_dict()
        )
        # Liu et al. 2019, table 9.
        assert (loaded.block_size, loaded.learning_rate, loaded.weight_decay) == (512, 6e-4, 0.01)
        assert (loaded.adam_beta1, loaded.adam_beta2, loaded.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert (loaded.decay_power, loaded.mask_probability, loaded.tokenizer) == (1.0, 0.15, "FacebookAI/roberta-base")


# ---- options ----


def test_a_checkpoint_keeps_its_tokenizer(capsys):
    """That of the recipe may have other ids for the same words."""
    path, words = PATHS["luna-base-16gb"], ["--model_name_or_path", "some/model"]
    loaded = pretrain_mlm.read_recipe(path, words)
    assert (loaded.tokenizer, loaded.model) == ("", {})
    assert "Ignoring the recipe's tokenizer, FacebookAI/roberta-base" in capsys.readouterr().out
    assert pretrain_mlm.read_recipe(path, [*words, "--tokenizer", "other/one"]).tokenizer == "other/one"


def test_another_model_type_keeps_the_fields_that_it_has(capsys):
    loaded = pretrain_mlm.read_recipe(DEMO, ["--model.model_type", "roberta"])
    assert loaded.model["hidden_size"] == 128 and "projection_length" not in loaded.model
    assert "conv_kernel_size, projection_length" in capsys.readouterr().out
    gpt2 = pretrain_clm.read_recipe(CAUSAL[0], ["--model.model_type", "gpt2"])
    assert "projection_length" in capsys.readouterr().out
    config = models.make_config(gpt2.model, None, gpt2.vocab_size, models.CAUSAL)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    assert (config.n_embd, config.n_layer, config.n_head, config.n_positions) == tuple(gpt2.model[n] for n in names)


def test_a_checkpoint_or_a_tokenizer_replaces_what_the_recipe_says(capsys):
    loaded = pretrain_mlm.read_recipe(DEMO, ["--model-name-or-path", "some/model"])
    assert (loaded.model, loaded.train_tokenizer) == ({}, False)
    assert "some/model" in capsys.readouterr().out
    assert not pretrain_mlm.read_recipe(DEMO, ["--tokenizer", "some/tokenizer"]).train_tokenizer
    assert pretrain_mlm.read_recipe(PATHS["luna-small"], ["--train-tokenizer"]).tokenizer == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_describes_every_key(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        SCRIPTS[name].main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    some = next(path for path in EVERY if path.parent.name == name)
    for field in dataclasses.fields(load(some)):
        assert re.search(rf"--{field.name} (?!--)\S", printed), field.name


def changed(tmp_path, **values):
    """The demo's recipe with some keys set, or left out where the value is `...`."""
    content = {**yaml.safe_load(DEMO.read_text()), **values}
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": ""}, "`data` is ''"),
        ({"model": {"hidden_size": 8}}, "`model_type`"),
        ({"fill_mask": ["No mask."]}, "`fill_mask`"),
        ({"max_steps": 0}, "`max_steps` is 0"),
        ({"global_batch_tokens": 2000}, r"`block_size` \(64\).* 1984"),
        ({"global_batch_tokens": 32}, " 64"),
        ({"block_size": 3}, "`block_size` is 3"),
        ({"held_out_fraction": 1.0}, "`held_out_fraction` is 1.0"),
        ({"mask_probability": 0}, "`mask_probability` is 0"),
        ({"warmup_fraction": 1.0}, "`warmup_fraction` is 1.0"),
        ({"adam_beta2": -0.1}, "`adam_beta2` is -0.1"),
        ({"vocab_size": 200}, "`vocab_size` is 200"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1.0"),
        ({"weight_decay": -1.0}, "`weight_decay` is -1.0"),
        ({"mixed_precision": "half"}, "`mixed_precision` is 'half'"),
        ({"model_name": "my/model"}, "`model_name` is 'my/model'"),
        ({"output_dir": " "}, "`output_dir`"),
        ({"tokenizer": "some/tokenizer"}, "`train_tokenizer`"),
        ({"train_tokenizer": False}, "`tokenizer`"),
        ({"model_name_or_path": "some/model"}, "`model_type`"),
        ({"model_name_or_path": "some/model", "model": {}}, "some/model.*`train_tokenizer`"),
    ],
)
def test_a_value_out_of_range_names_the_key(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        pretrain_mlm.read_recipe(changed(tmp_path, **values), [])
