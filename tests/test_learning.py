"""The learning experiments: the driver compares what it says it compares."""

import json
import random
import re
import sys

import pyarrow
import pytest
from helpers import ROOT
from pyarrow.parquet import write_table

sys.path.insert(0, str(ROOT / "experiments"))
sys.path.insert(0, str(ROOT / "training"))  # the scripts import their siblings plainly

import learning
import learning_finetune
import learning_report
from common.models import make_config
from tasks import arguments as finetune_arguments

from luna_hf.scripting import UserError

WORDS = ["the", "token", "reads", "every", "packed", "sequence", "of", "fixed", "length", "in", "its", "layer"]
SHRINK = {
    "max_steps": 4,
    "eval_steps": 2,
    "log_steps": 2,
    "vocab_size": 300,
    "block_size": 16,
    "global_batch_tokens": 64,
    "eval_blocks": 20,
    "model.hidden_size": 32,
    "model.intermediate_size": 32,
    "mixed_precision": "no",
}
SHRINK_WORDS = [word for name, value in SHRINK.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a corpus and a task, in the layout that the driver wants."""
    folder = tmp_path_factory.mktemp("data")
    generator = random.Random(0)
    for name, columns, rows in (
        ("enwiki/train", ("text",), 60),
        ("enwiki/validation", ("text",), 12),
        ("glue/sst2/train", ("sentence", "label"), 24),
        ("glue/sst2/validation", ("sentence", "label"), 12),
    ):
        texts = [" ".join(generator.choices(WORDS, k=20)) + f" {index}." for index in range(rows)]
        values = {columns[0]: texts} | ({"label": [index % 2 for index in range(rows)]} if "label" in columns else {})
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(pyarrow.table(values), path)
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A folder with finished runs of two systems."""
    folder = tmp_path_factory.mktemp("runs")
    where = ["--data", str(data), "--runs", str(folder)]
    assert learning.main(["pretrain", *where, "--systems", "roberta", "luna-conv", *SHRINK_WORDS]) == 0
    return folder


def test_runs_differ_in_the_system_alone(runs, data, capsys):
    folders = {path.name: path for path in (runs / "pretrain").iterdir()}
    assert folders.keys() == {"roberta-seed0", "luna-conv-seed0"}
    described = {name: json.loads((path / "run.json").read_text()) for name, path in folders.items()}
    recipes = {name: run["recipe"] for name, run in described.items()}
    differing = {key for key, value in recipes["roberta-seed0"].items() if value != recipes["luna-conv-seed0"][key]}
    assert differing == {"model_name", "output_dir", "model"}
    tokenizers = {(path / "tokenizer.json").read_text() for path in folders.values()}
    assert len(tokenizers) == 1
    assert str(runs) not in json.dumps(described) and str(data) not in json.dumps(described)

    # Finished runs are left alone, and an interrupted list goes on where it was.
    weights = {name: (path / "model.safetensors").stat().st_mtime_ns for name, path in folders.items()}
    where = ["--data", str(data), "--runs", str(runs)]
    assert learning.main(["pretrain", *where, "--systems", "roberta", "luna-conv", *SHRINK_WORDS]) == 0
    assert capsys.readouterr().err.count("finished before") == 2
    assert weights == {name: (path / "model.safetensors").stat().st_mtime_ns for name, path in folders.items()}


def test_report_of_finished_runs(runs, data, tmp_path, capsys):
    folder = tmp_path / "results"
    command = ["report", "--runs", str(runs), "--results", str(folder)]
    (runs / "speed.json").unlink(missing_ok=True)
    assert learning.main(command) == 2
    assert "learning.py speed" in capsys.readouterr().err
    where = ["--data", str(data), "--runs", str(runs)]
    assert learning.main(["speed", *where, "--rounds", "1", *SHRINK_WORDS]) == 0
    assert learning.main(["finetune", *where, "--tasks", "sst2", "--systems", "luna-conv", "--max_steps", "2"]) == 0
    assert learning.main(command) == 0

    (path,) = folder.glob("learning-pretrain-cpu-float32-torch*.json")
    result = check_pretraining(path)
    assert [run["system"] for run in result["runs"]] == ["roberta", "luna-conv"]
    seconds = json.loads((runs / "speed.json").read_text())["seconds_per_step"]
    assert seconds.keys() == learning.SYSTEMS.keys()
    curve = result["runs"][0]["curve"]
    assert curve["step"] == [2, 4]
    assert curve["seconds"] == pytest.approx([2 * seconds["roberta"]["median"], 4 * seconds["roberta"]["median"]], 1e-4)
    log = [json.loads(line) for line in (runs / "pretrain" / "roberta-seed0" / "log.jsonl").read_text().splitlines()]
    assert curve["loss"] == pytest.approx([row["loss"] for row in log if row["kind"] == "held_out"], rel=1e-5)

    (path,) = folder.glob("learning-finetune-cpu-float32-torch*.json")
    result = check_finetuning(path)
    assert list(result["tasks"]) == ["sst2"] and result["tasks"]["sst2"]["models"]["luna-conv"]["seeds"] == [0, 1]
    for written in folder.iterdir():
        text = written.read_bytes()
        assert str(tmp_path).encode() not in text and str(runs).encode() not in text and str(data).encode() not in text


def check_header(result):
    assert result["command"] == "python experiments/learning.py report" and result["protocol"] and result["date"]
    assert result["machine"]["cpu"] and result["machine"]["cores"] >= 1 and result["machine"]["threads"] >= 1
    assert {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()


def check_pretraining(path):
    """A result file is whole, and its table and plots belong to it."""
    result = json.loads(path.read_text())
    check_header(result)
    text = learning_report.table(result["runs"], list(result["systems"]))
    text += f"\n\n{learning_report.sentences(result['conclusions'])}\n"
    assert path.with_suffix(".md").read_text() == text
    for plot in (path.with_suffix(".png"), path.with_name(f"{path.stem}-attention.png")):
        assert plot.stat().st_size > 10_000
    return result


def check_finetuning(path):
    result = json.loads(path.read_text())
    check_header(result)
    assert path.with_suffix(".md").read_text() == learning_finetune.table(result["tasks"]) + "\n"
    assert path.with_suffix(".png").stat().st_size > 5_000
    return result


def test_runs_of_different_recipes_are_not_compared(runs, tmp_path):
    other = tmp_path / "pretrain" / "luna-32-seed0"
    for source in (runs / "pretrain" / "roberta-seed0", runs / "pretrain" / "luna-conv-seed0"):
        target = other if "luna" in source.name else tmp_path / "pretrain" / source.name
        target.mkdir(parents=True)
        for name in ("run.json", "metrics.json", "log.jsonl"):
            (target / name).write_text((source / name).read_text())
    (tmp_path / "speed.json").write_text(
        json.dumps({"seconds_per_step": {name: {"median": 1} for name in learning.SYSTEMS}})
    )
    assert len(learning_report.read_runs(tmp_path)) == 2
    run = json.loads((other / "run.json").read_text())
    run["recipe"]["learning_rate"] = 1.0
    (other / "run.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match="different values of learning_rate"):
        learning_report.read_runs(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pretrain", "--data", "nowhere"], "nowhere"),
        (["pretrain", "--data", "nowhere", "--max_stepz", "3"], "max_steps"),
        (["finetune", "--data", "nowhere"], "Run `pretrain` with that system first"),
        (["report"], "holds no finished run"),
    ],
)
def test_mistakes_are_told(arguments, said, tmp_path, capsys):
    assert learning.main([*arguments, "--runs", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_systems_differ_as_their_names_say():
    configs = {name: make_config(own, None, 300) for name, own in learning.SYSTEMS.items()}
    lunas = {name: config for name, config in configs.items() if name.startswith("luna")}
    assert {name: config.projection_length for name, config in lunas.items()} == {
        "luna-32": 32,
        "luna-128": 128,
        "luna-conv": 32,
        "luna-conv-1": 1,
        "luna-conv-tied": 32,
    }
    assert {name for name, config in lunas.items() if config.tie_kv} == {"luna-conv-tied"}
    kernels = {name: getattr(config, "conv_kernel_size", 0) for name, config in configs.items()}
    assert all(kernel == (5 if "conv" in name else 0) for name, kernel in kernels.items())
    assert all(config._attn_implementation == "eager" for name, config in configs.items() if name not in lunas)


def test_a_recipe_cannot_choose_an_unknown_attention_backend():
    with pytest.raises(UserError, match=r"attn_implementation.*'fast'.*eager, sdpa"):
        make_config({"model_type": "roberta", "attn_implementation": "fast"}, None, 300)


@pytest.mark.parametrize("task", learning_finetune.TASKS)
def test_options_of_every_task_are_those_of_its_script(task, tmp_path):
    own = learning_finetune.TASKS[task]
    script = sys.modules[own.main.__module__]
    arguments_class = script.CsqaArguments if task == "csqa" else script.GlueArguments
    words = learning_finetune.command_words(task, tmp_path, [tmp_path / "a", tmp_path / "b"], [0, 1], tmp_path / "out")
    arguments, training = finetune_arguments.parse(arguments_class, words)
    assert arguments.seeds == [0, 1] and len(arguments.model_name_or_path) == 2
    assert arguments.max_length == own.max_length and training.num_train_epochs == own.epochs
    assert training.eval_strategy == "no" and not training.load_best_model_at_end


# What the report computes.


def made_up(system, losses, seed=0):
    steps = [100 * (index + 1) for index in range(len(losses))]
    return {
        "system": system,
        "seed": seed,
        "unigram_loss": 6.0,
        "final_loss": losses[-1],
        "curve": {"step": steps, "loss": losses},
    }


def test_conclusions():
    runs = [
        made_up("roberta", [5.5, 5.4, 5.3, 5.0]),
        made_up("luna-conv", [5.2, 4.9, 4.2, 4.0]),
        made_up("roberta-conv", [5.0, 4.5, 4.2, 3.95]),
        made_up("luna-conv-1", [5.1, 4.9, 4.4, 4.2]),
    ]
    found = learning_report.conclude(runs)
    reached = found["luna_conv_reaches_roberta"]
    assert reached["holds"] and reached["seeds"] == [{"seed": 0, "target": 5.0, "step": 200, "share": 0.5}]
    softmax = found["luna_conv_against_roberta_conv"]
    assert softmax["holds"] and softmax["seeds"][0]["steps"] == [100, 200, 300, 400]
    assert softmax["seeds"][0]["relative"] == pytest.approx([0.04, 4.9 / 4.5 - 1, 0, 4.0 / 3.95 - 1])
    assert found["luna_conv_against_one_slot"]["seeds"][0]["nats"] == pytest.approx([0.1, 0, -0.2, -0.2])
    assert found["roberta_gain"] == [1.0] and found["seed_spread"] == {}

    # A second seed that fails either expectation makes it fail; seeds are compared with themselves.
    runs += [
        made_up("roberta", [5.5, 5.4, 5.3, 4.4], seed=1),
        made_up("luna-conv", [5.2, 4.9, 4.4, 4.3], seed=1),
        made_up("roberta-conv", [5.0, 4.5, 4.2, 4.2], seed=1),
    ]
    found = learning_report.conclude(runs)
    assert [row["share"] for row in found["luna_conv_reaches_roberta"]["seeds"]] == [0.5, 0.75]
    assert not found["luna_conv_reaches_roberta"]["holds"] and not found["luna_conv_against_roberta_conv"]["holds"]
    assert found["seed_spread"] == pytest.approx({"roberta": 0.6, "luna-conv": 0.3, "roberta-conv": 0.25})
    assert "It does not hold." in learning_report.sentences(found)


def test_a_loss_that_is_not_reached():
    assert learning_report.first_step_at({"step": [1, 2], "loss": [3.0, 2.0]}, 1.9) is None
    assert learning_report.first_step_at({"step": [1, 2], "loss": [3.0, 2.0]}, 2.0) == 2


# What is committed.


def leaves(value, path=()):
    """Every number of nested lists and dictionaries by where it stands."""
    if not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, item in items for place, leaf in leaves(item, (*path, key)).items()}


def test_committed_results():
    results = ROOT / "experiments" / "results"
    (pretraining,) = results.glob("learning-pretrain-*.json")
    (finetuning,) = results.glob("learning-finetune-*.json")
    found = check_pretraining(pretraining)
    # The file's numbers are rounded, so what follows from them may differ in the last digits.
    written, computed = (
        leaves(found["conclusions"]),
        leaves(json.loads(json.dumps(learning_report.conclude(found["runs"])))),
    )
    assert written.keys() == computed.keys()
    for path, value in written.items():
        assert value == pytest.approx(computed[path], abs=1e-4), path
    check_finetuning(finetuning)
    for path in results.glob("learning-*"):
        if path.suffix != ".png":
            assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text()), path.name
