"""The conversion in one command: its stages are the runs that the other commands make, and a kill loses none."""

import json
import re
import shutil

import convert_mlm
import distill_mlm
import pytest
import transfer_attention
from engine import pretraining
from tiny_training import (
    CONVERSIONS,
    Killed,
    arguments,
    dies_at_call,
    files_of,
    losses,
    same_weights,
    start,
    without_model_section,
    write_corpus,
    write_student,
    write_teacher,
)
from transformers import AutoConfig

from luna_hf.scripting import UserError

RECIPE = next(path for path in CONVERSIONS if path.stem == "tiny")
FIELDS = {"memory_size": 4, "local_window": 4}
STAGES = [
    {"name": "fit", "command": "transfer_attention", "share": 0.25, "parameter_groups": [], "window_dropout": {}},
    {
        "name": "last",
        "command": "distill_mlm",
        "share": 0.75,
        "learning_rate": 1e-3,
        "window_dropout": {"windows": [0]},
    },
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "out", corpus)


def words(corpus, source, folder, **overrides):
    values = {"data": corpus, "teacher": source, "max_steps": 8, "save_steps": 2, "overwrite_output_dir": "false"}
    values |= {"convert": json.dumps({"model_type": "abc_memory", **FIELDS}), "stages": json.dumps(STAGES), **overrides}
    return without_model_section(arguments(RECIPE, folder, **values))


@pytest.fixture(scope="module")
def converted(corpus, teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    assert start(convert_mlm, words(corpus, teacher, folder / "out")) == 0
    return folder


def test_the_stages_are_runs_of_the_other_commands(corpus, teacher, converted, tmp_path):
    student = write_student(tmp_path / "start", teacher, **FIELDS)
    assert same_weights(student, converted / "out-start")
    shared = {"data": corpus, "teacher": teacher, "save_steps": 2}
    begins = {"fit": student, "last": tmp_path / "fit"}
    for stage, command, steps in zip(STAGES, (transfer_attention, distill_mlm), (2, 6), strict=True):
        recipe = RECIPE.parents[1] / stage["command"] / "tiny.yaml"
        own = {key: value if key == "learning_rate" else json.dumps(value) for key, value in stage.items()}
        own = {key: own[key] for key in own if key not in ("name", "command", "share")}
        own |= {
            "model_name_or_path": begins[stage["name"]],
            "max_steps": steps,
            "learning_rate": own.get("learning_rate", 3e-4),
        }
        own |= {"parameter_groups": own.get("parameter_groups", json.dumps(list(tiny().parameter_groups)))}
        assert start(command, without_model_section(arguments(recipe, tmp_path / stage["name"], **shared, **own))) == 0
    for alone, staged in {"fit": "out-fit", "last": "out"}.items():
        assert losses(tmp_path / alone) == losses(converted / staged)
        assert same_weights(tmp_path / alone, converted / staged)


def tiny():
    return convert_mlm.read_recipe(RECIPE)


def test_the_result_is_a_mixed_model_with_the_figures_of_its_stages(converted, capsys):
    config = AutoConfig.from_pretrained(converted / "out")
    assert (config.model_type, config.local_window, config.memory_size) == ("abc_memory", 4, 4)
    card = (converted / "out" / "README.md").read_text()
    assert "training/convert_mlm.py" in card and "| window alone |" in card
    assert (
        "model_name: mixed-tiny\n" in card
        and "model_name: mixed-tiny-fit\n" in (converted / "out-fit" / "README.md").read_text()
    )
    assert not list(converted.glob("*/checkpoints"))


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (convert_mlm, "convert", 1),
        (convert_mlm, "prepare", 1),
        (pretraining, "save_checkpoint", 1),  # in the first stage
        (convert_mlm, "pretrain", 1),  # between the stages
        (pretraining, "save_checkpoint", 3),  # in the second
    ],
    ids=["conversion", "start", "first-stage", "between", "second-stage"],
)
def test_killed_and_resumed_is_uninterrupted(corpus, teacher, converted, tmp_path, monkeypatch, module, name, call):
    own = words(corpus, teacher, tmp_path / "out")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, module, name, call)
        start(convert_mlm, own)
    assert start(convert_mlm, own) == 0
    for folder in ("out-start", "out-fit", "out"):
        assert same_weights(tmp_path / folder, converted / folder)
    assert losses(tmp_path / "out") == losses(converted / "out")


def test_a_finished_conversion_is_kept_or_replaced_as_a_whole(corpus, teacher, converted, tmp_path, capsys):
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    before = files_of(tmp_path)
    assert start(convert_mlm, words(corpus, teacher, tmp_path / "out")) == 2
    assert "holds an earlier run" in capsys.readouterr().err and files_of(tmp_path) == before
    again = {"overwrite_output_dir": "true", "max_steps": 4}
    assert start(convert_mlm, words(corpus, teacher, tmp_path / "out", **again)) == 0
    assert not same_weights(tmp_path / "out-fit", converted / "out-fit")


def test_another_recipe_does_not_continue_a_conversion(corpus, teacher, converted, tmp_path, capsys):
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "out")
    other = words(corpus, teacher, tmp_path / "out", kl_weight=2.0)
    assert start(convert_mlm, other) == 2
    assert "kl_weight" in capsys.readouterr().err
    (tmp_path / "out-start" / "conversion.json").write_text("{")
    assert start(convert_mlm, other) == 2
    assert "conversion.json is damaged" in capsys.readouterr().err


def changed(number, **keys):
    return json.dumps([{**stage, **keys} if place == number else stage for place, stage in enumerate(STAGES)])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"teacher": ""}, "`teacher` is ''"),
        ({"model_name_or_path": "x"}, "`model_name_or_path` is 'x'"),
        ({"convert": "{memory_size: 4}"}, "`convert` is .*model_type"),
        ({"convert": "{model_type: luna, slots: 4}"}, "`convert`: .*slots"),
        ({"stages": "[]"}, r"`stages` is \[\]"),
        ({"stages": "[{name: a}]"}, "`share`"),
        ({"stages": changed(0, share=0.5)}, r"sum 1, but they are \[0\.5, 0\.75\]"),
        ({"stages": changed(0, command="transfer")}, "fit: unknown command 'transfer'.*transfer_attention"),
        ({"stages": changed(1, max_steps=3)}, "last: `max_steps` cannot be set"),
        ({"stages": changed(0, kl_weight=3)}, "fit: `kl_weight` cannot be set for transfer_attention"),
        ({"stages": changed(1, learning_rate="fast")}, "last: `learning_rate` is 'fast'"),
        ({"stages": changed(0, name="start")}, "called start"),
        # Found before the first stage, although it is the second that cannot run.
        ({"stages": changed(1, window_dropout={"windows": [64]})}, "`local_window` is 4"),
        ({"stages": changed(1, parameter_groups=[{"match": "nothing"}])}, "'nothing'"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(corpus, teacher, tmp_path, capsys, overrides, named):
    assert convert_mlm.main(words(corpus, teacher, tmp_path / "runs" / "out", **overrides)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and re.search(named, error), error
    assert not list(tmp_path.glob("runs/out*"))


def test_shares_are_rounded_to_all_steps():
    recipe = convert_mlm.read_recipe(RECIPE, ["--max_steps", "17"])
    assert [run.max_steps for run, _ in recipe.runs()] == [2, 13, 2]
    with pytest.raises(UserError, match=r"fit: .*`max_steps` is 0"):
        convert_mlm.read_recipe(RECIPE, ["--max_steps", "3"])


@pytest.mark.slow
def test_a_stage_can_train_longer_rows_than_the_teacher_takes(corpus, teacher, tmp_path):
    longer = {"name": "long", "command": "pretrain_mlm", "share": 0.5, "block_size": 128, "window_dropout": {}}
    stages = json.dumps([{**STAGES[0], "share": 0.5}, longer])
    assert start(convert_mlm, words(corpus, teacher, tmp_path / "out", stages=stages)) == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 128
