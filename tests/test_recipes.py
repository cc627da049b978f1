"""Recipes: every one parses against its script and runs; what is wrong in one is told with its key."""

import dataclasses
import json
import re

import pytest
import torch
import yaml
from helpers import FAMILIES, code_name, slots_of
from tiny_training import (
    CAUSAL,
    DEMO,
    RECIPES,
    ROOT,
    SHRINK,
    TRANSFERS,
    arguments,
    groups,
    models,
    pretrain_clm,
    pretrain_mlm,
    pretraining,
    run,
    transfer_attention,
    without_model_section,
    write_corpus,
    write_student,
    write_teacher,
)
from transformers import AutoModelForMaskedLM, RobertaConfig

from luna_hf import AbcConfig, LunaConfig
from luna_hf.scripting import UserError

PATHS = {path.stem: path for path in RECIPES}
CONTINUED = [name for name in PATHS if name.endswith("-continue")]
# What any recipe needs beside SHRINK to run here: a tokenizer made for the text, and the precision of the other tests.
LOCAL = {"train_tokenizer": "true", "mixed_precision": "no", "model.num_attention_heads": 4}


def load(name):
    return pretrain_mlm.read_recipe(PATHS[name], [])


def test_the_recipes_are_these():
    new = {"demo", "luna-tiny", "luna-small", "luna-base-16gb", "luna-base-160gb"}
    assert set(PATHS) == new | {"abc-tiny-continue", "abc-base-continue", "luna-base-continue"}
    assert {path.stem for path in TRANSFERS} == {"tiny", "abc-base", "luna-base"}
    assert {path.stem for path in CAUSAL} == {"demo", "enwiki-tiny", "luna-base-clm"}


def local_texts(data, folder):
    """What stands in for a recipe's data: its mixture, of local texts."""
    if not isinstance(data, list):
        return write_corpus(folder / "texts")
    for number, section in enumerate(data):
        path = write_corpus(folder / f"texts{number}", documents=20 + number)
        section |= {"path": str(path), "name": "", "split": "train"}
    return json.dumps([{key: value for key, value in section.items() if value} for section in data])


@pytest.mark.parametrize("path", [*RECIPES, *CAUSAL, *TRANSFERS], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipe_parses_and_is_a_manual(path):
    text, scripts = path.read_text(), (pretrain_mlm, pretrain_clm, transfer_attention)
    (script,) = (script for script in scripts if script.__name__ == path.parent.name)
    loaded = script.read_recipe(path, [])
    assert loaded.max_steps > loaded.eval_steps and loaded.max_steps > loaded.save_steps
    names = {
        "demo": "luna-demo" if script is pretrain_mlm else "luna-clm-demo",
        "tiny": "abc-tiny-fitted",
        "abc-base": "abc-base-fitted",
        "luna-base": "luna-base-fitted",
    }
    assert loaded.model_name == names.get(path.stem, path.stem)
    head = text.split("\n\n")[0]
    for word in ("command", "hardware", "wall time", "expect", f"training/recipes/{path.parent.name}/{path.name}"):
        assert word in head
    # Every key stands there once, in the order of the others, with its comment.
    keys = [line for line in text.splitlines() if re.match(r"\w+:", line)]
    names = [line.partition(":")[0] for line in keys]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(loaded))
    assert names == list(yaml.safe_load(sorted(path.parent.glob("*.yaml"))[0].read_text()))
    model = [line for line in text.splitlines() if re.match(r" {2}\w+:", line)]
    assert len(model) == len(loaded.model)
    assert [line for line in keys + model if " # " not in line] == []


@pytest.mark.parametrize("name", [name for name in PATHS if name not in CONTINUED])
def test_recipe_runs_three_steps(name, tmp_path):
    figures = run(tmp_path / "out", PATHS[name], data=local_texts(load(name).data, tmp_path), **LOCAL)
    assert figures["held_out_targets"] > 0 and figures["model_type"] == "luna"
    assert figures["seen_tokens"] == SHRINK["max_steps"] * SHRINK["global_batch_tokens"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return write_teacher(folder / "out", write_corpus(folder / "texts"))


@pytest.mark.parametrize(
    "path",
    [*TRANSFERS, *(PATHS[name] for name in CONTINUED)],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_recipe_goes_on_from_a_converted_model(path, teacher, tmp_path):
    script = {"pretrain_mlm": pretrain_mlm, "transfer_attention": transfer_attention}[path.parent.name]
    # A recipe that names no family is ABC's.
    family = next((family for family in FAMILIES if path.stem.startswith(code_name(family))), "abc_memory")
    model = FAMILIES[family].masked_lm
    start = write_student(tmp_path / "start", teacher, model, **slots_of(family, 4))
    data = local_texts(script.read_recipe(path, []).data, tmp_path)
    others = {"teacher": teacher} if script is transfer_attention else {}
    words = arguments(path, tmp_path / "out", data=data, model_name_or_path=start, mixed_precision="no", **others)
    assert script.main(without_model_section(words)) == 0
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert figures["model_type"] == family and ("objective" in figures) == bool(others)
    assert figures["seen_tokens"] == SHRINK["max_steps"] * SHRINK["global_batch_tokens"]


@pytest.mark.parametrize(
    ("name", "blocks", "steps", "tokens"),
    [("abc-base-continue", 8192, 7000, 29e9), ("luna-base-continue", 8192, 7000, 29e9)],
)
def test_continued_recipes_have_roberta_s_optimisation_and_a_rate_for_what_is_new(name, blocks, steps, tokens):
    loaded, base = load(name), load("luna-base-160gb")
    same = ("block_size", "global_batch_tokens", "learning_rate", "warmup_fraction", "decay_power", "weight_decay")
    for key in (*same, "adam_beta1", "adam_beta2", "adam_epsilon", "mask_probability"):
        assert getattr(loaded, key) == getattr(base, key), key
    assert (loaded.update_rows, loaded.max_steps) == (blocks, steps)
    assert loaded.max_steps * loaded.global_batch_tokens == pytest.approx(tokens, rel=0.02)
    (new,) = loaded.groups
    assert new.learning_rate > loaded.learning_rate and new.frozen_steps == 0
    roberta = {key.partition(".")[2] for key in pretraining.parameter_names(RobertaConfig())}
    for taps in (0, 3):
        options = {"conv_kernel_size": taps} if taps else {}
        config = AbcConfig(**options) if name.startswith("abc") else LunaConfig(tie_kv=False, **options)
        names = pretraining.parameter_names(config)
        owned = {key for key, group in groups.assign(names, loaded.groups).items() if group}
        assert any("convolution" in key for key in names) == bool(taps)
        unmatched = {key.partition(".")[2] for key in set(names) - owned}
        assert unmatched <= roberta  # all that RoBERTa has not is in the group


@pytest.mark.parametrize("path", TRANSFERS, ids=lambda path: path.stem)
def test_transfer_recipes_begin_with_what_is_new_and_at_base_size_all_of_attention_follows(path):
    loaded = transfer_attention.read_recipe(path, [])
    new, others = loaded.groups
    assert new.frozen_steps == 0 and others.match == ""
    if path.stem == "tiny":
        assert others.frozen_steps >= loaded.max_steps and others.learning_rate is None  # no rate of what never moves
    else:
        assert 0 < others.frozen_steps <= loaded.max_steps / 2 and others.learning_rate < loaded.learning_rate


def test_the_benchmarks_recipes_have_the_order_of_the_others():
    scripts = {"swap": pretrain_mlm, "learning": pretrain_mlm, "swap_transfer": transfer_attention}
    for name, script in scripts.items():
        path = ROOT / "experiments" / f"{name}.yaml"
        kind = transfer_attention.TransferRecipe if script is transfer_attention else pretrain_mlm.PretrainRecipe
        keys = re.findall(r"^(\w+):", path.read_text(), re.MULTILINE)
        like = PATHS["demo"] if script is pretrain_mlm else TRANSFERS[0]
        assert keys == list(yaml.safe_load(like.read_text())), name
        assert sorted(keys) == sorted(field.name for field in dataclasses.fields(kind)), name


def test_lines_of_recipes_fit_a_page():
    paths = [*(ROOT / "training" / "recipes").rglob("*.yaml"), *(ROOT / "experiments").glob("*.yaml")]
    long = [(path.name, line) for path in paths for line in path.read_text().splitlines() if len(line) > 120]
    assert len(paths) > 15 and long == []


@pytest.mark.parametrize(
    ("name", "blocks", "steps", "warmup", "tokens", "parameters"),
    [
        ("luna-base-160gb", 8192, 500_000, 24_000, 2.1e12, 147e6),
        ("luna-base-16gb", 2048, 250_000, 15_000, 262e9, 132e6),
        ("luna-small", 512, 80_000, 4_800, 21e9, 58e6),
        ("luna-tiny", 32, 3_000, 300, 12.3e6, 3.1e6),
    ],
)
def test_figures_that_the_comments_state(name, blocks, steps, warmup, tokens, parameters):
    loaded = load(name)
    assert (loaded.update_rows, loaded.max_steps) == (blocks, steps)
    assert loaded.warmup_fraction * steps == pytest.approx(warmup)
    assert steps * loaded.global_batch_tokens == pytest.approx(tokens, rel=0.01)
    config = models.make_config(loaded.model, None, loaded.vocab_size)
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config)
    assert model.num_parameters() == pytest.approx(parameters, rel=0.01)


def test_base_recipes_are_the_papers_model_with_roberta_s_optimisation():
    for name, tied in (("luna-base-160gb", False), ("luna-base-16gb", True)):
        loaded = load(name)
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


def test_paths_and_overrides_in_any_spelling(tmp_path):
    texts = write_corpus(tmp_path / "texts")
    words = ["--block-size", "32", "--global_batch_tokens=64", "--push-to-hub", "--model.tie_kv", "true"]
    loaded = pretrain_mlm.read_recipe(DEMO, [*words, "--data", str(texts), "--hub-private", "false"])
    assert (loaded.block_size, loaded.global_batch_tokens, loaded.push_to_hub) == (32, 64, True)
    assert (loaded.data, loaded.hub_private, loaded.model["tie_kv"]) == (str(texts), False, True)


def test_another_model_type_keeps_the_fields_that_it_has(capsys):
    loaded = pretrain_mlm.read_recipe(DEMO, ["--model.model_type", "roberta"])
    assert loaded.model["hidden_size"] == 128 and "projection_length" not in loaded.model
    assert "roberta has no such field: conv_kernel_size, projection_length" in capsys.readouterr().out


def test_a_checkpoint_takes_the_place_of_model_section_and_tokenizer(capsys):
    loaded = pretrain_mlm.read_recipe(DEMO, ["--model-name-or-path", "some/model"])
    assert (loaded.model, loaded.train_tokenizer) == ({}, False)
    assert "file's model section is left out: some/model" in capsys.readouterr().out


def test_a_tokenizer_is_named_or_trained_without_a_second_key():
    assert not pretrain_mlm.read_recipe(DEMO, ["--tokenizer", "some/tokenizer"]).train_tokenizer
    assert pretrain_mlm.read_recipe(PATHS["luna-small"], ["--train-tokenizer"]).tokenizer == ""


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
