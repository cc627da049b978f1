"""The warm-start experiment: the driver runs what it says, and the report compares each run with its twin."""

import json
import re
import sys

import pytest
import torch
from helpers import ROOT
from test_learning import SHRINK_WORDS, learning
from test_learning import data as learning_data  # noqa: F401  a fixture
from transformers import AutoModelForMaskedLM

sys.path.insert(0, str(ROOT / "experiments"))

import swap
import swap_report

# At the size of the shrunk base model: memories of 64 in blocks of 16 are larger than the text, which is fine.
SHRINK = {
    "max_steps": 2,
    "eval_steps": 2,
    "log_steps": 2,
    "block_size": 16,
    "global_batch_tokens": 64,
    "eval_blocks": 10,
    "mixed_precision": "no",
}


@pytest.fixture(scope="module")
def runs(learning_data, tmp_path_factory):  # noqa: F811
    """A folder with a teacher, and with runs of the teacher and of a Luna at one rate."""
    folder = tmp_path_factory.mktemp("swap")
    where = ["--data", str(learning_data), "--runs", str(folder / "learning")]
    assert learning.main(["pretrain", *where, "--systems", "roberta", "--seeds", "1", *SHRINK_WORDS]) == 0
    base = folder / "learning" / "pretrain" / "roberta-seed1"
    words = [word for name, value in SHRINK.items() if name != "max_steps" for word in (f"--{name}", str(value))]
    own = ["--systems", "teacher", "luna-64", "--rates", "peak", "--continued-steps", "4"]
    command = ["run", "--data", str(learning_data), "--runs", str(folder / "runs"), "--base", str(base)]
    # The teacher's own steps come from the recipe: a short one first, which is then left alone.
    teacher = swap.words(swap.parse([*command, *words, "--max_steps", "2"]), "teacher", model_name_or_path=base)
    assert swap.pretrain_mlm.pretrain(swap.pretrain_mlm.read_recipe(str(swap.RECIPE), teacher), "teacher")
    assert swap.main([*command, *own, "--transfer-steps", "2", *words]) == 0
    return folder / "runs"


def test_every_run_is_there(runs):
    names = {path.name for path in (runs / "continued").iterdir()}
    assert names == {
        *("teacher-peak", "teacher-conv-peak", "luna-64-peak", "luna-64-conv-peak"),
        *("luna-64-transfer-peak", "luna-64-conv-transfer-peak"),
    }
    assert not list(runs.rglob("*.unfinished"))


def test_a_converted_teacher_is_the_teacher_and_the_others_are_not(runs):
    ids = torch.arange(5, 15)[None]
    teacher = AutoModelForMaskedLM.from_pretrained(runs / "teacher")(ids).logits
    for name in ("teacher", "teacher-conv"):
        converted = AutoModelForMaskedLM.from_pretrained(runs / "converted" / name)(ids).logits
        torch.testing.assert_close(converted, teacher, rtol=0, atol=1e-5)
    folders = [runs / "converted" / name for name in ("luna-64", "luna-64-conv")]
    plain, conv = (AutoModelForMaskedLM.from_pretrained(folder)(ids).logits for folder in folders)
    torch.testing.assert_close(plain, conv, rtol=0, atol=1e-5)
    assert (plain - teacher).abs().max() > 1e-3


def test_steps_of_transfer_are_part_of_the_budget(runs):
    found = {run["name"]: run for run in swap_report.read(runs)["runs"]}
    assert found["luna-64-peak"]["curve"]["step"] == [0, 2, 4]
    moved = found["luna-64-transfer-peak"]
    assert moved["curve"]["step"] == [0, 2, 4] and moved["transferred_loss"] == moved["curve"]["loss"][1]
    assert len(moved["layer_errors"]) == 2 and all(0 < error < 10 for error in moved["layer_errors"])
    assert moved["swapped_loss"] == pytest.approx(found["luna-64-peak"]["swapped_loss"], abs=1e-6)
    assert found["luna-64-peak"]["transferred_loss"] is None


def test_finished_runs_are_left_alone_and_the_report_is_whole(runs, learning_data, tmp_path, capsys):  # noqa: F811
    weights = {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    command = ["run", "--data", str(learning_data), "--runs", str(runs), "--systems", "teacher", "luna-64"]
    assert swap.main([*command, "--rates", "peak"]) == 0
    assert weights == {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    tuning = ["finetune", "--data", str(learning_data), "--runs", str(runs), "--tasks", "sst2", "--seeds", "0"]
    assert swap.main([*tuning, "--models", "luna-64-peak", "--max_steps", "2"]) == 0
    assert swap.main(["report", "--runs", str(runs), "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("swap-pretrain-cpu-float32-torch*.json")
    result = check(path)
    assert len(result["runs"]) == 6
    assert (tmp_path / path.name.replace("pretrain", "finetune")).is_file()
    for written in tmp_path.iterdir():
        text = written.read_bytes()
        assert str(runs).encode() not in text and str(learning_data).encode() not in text


def check(path):
    """A result file is whole, and its tables and plot belong to it."""
    result = json.loads(path.read_text())
    assert result["command"] == "python experiments/swap.py report" and result["protocol"] and result["date"]
    assert result["machine"]["cpu"] and {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()
    assert path.with_suffix(".md").read_text() == swap_report.text(result)
    assert path.with_suffix(".png").stat().st_size > 10_000
    return result


def test_the_full_experiment_has_the_runs_that_it_is_about():
    names = {variant.name for variant in swap.variants(list(swap.SYSTEMS), list(swap.RATES))}
    for system in ("mlp-64", "mlp-128", "linformer-64", "luna-64", "luna-128"):
        for kind in ("", "-conv", "-transfer", "-conv-transfer"):
            assert {f"{system}{kind}-peak", f"{system}{kind}-third"} <= names
    assert {"teacher-peak", "teacher-third", "random-64-peak", "random-64-conv-transfer-third"} <= names
    assert not any(name.startswith(("teacher-transfer", "random-64-transfer", "window-64-transfer")) for name in names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--data", "nowhere"], "learning.py pretrain"),
        (["finetune", "--data", "nowhere", "--models", "x"], "There is no pretrained model"),
        (["report"], "holds no finished run"),
    ],
)
def test_mistakes_are_told(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert swap.main([*arguments, "--runs", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


# What the report computes.


def made_up(system, losses, *, convolution=False, transfer=False, rate="peak"):
    kind = f"{'-conv' if convolution else ''}{'-transfer' if transfer else ''}"
    return {
        "name": f"{system}{kind}-{rate}",
        "system": system,
        "convolution": convolution,
        "transfer": transfer,
        "rate": rate,
        "parameters": 10,
        "transfer_steps": 100 if transfer else 0,
        "curve": {"step": [100 * index for index in range(len(losses))], "loss": losses},
        "swapped_loss": losses[0],
        "transferred_loss": losses[1] if transfer else None,
        "layer_errors": [0.5, 0.1] if transfer else None,
        "final_loss": losses[-1],
    }


def test_comparison_with_the_twin():
    runs = [
        made_up("teacher", [3.0, 2.5, 2.0]),
        made_up("teacher", [3.0, 2.6, 2.4], rate="third"),
        made_up("mlp-64", [6.0, 4.0, 3.0]),
        made_up("luna-64", [6.0, 3.05, 2.03], transfer=True),
        made_up("luna-64", [6.0, 3.0, 2.0], convolution=True),
    ]
    figures = {"held_out_loss": 3.0, "unigram_loss": 5.0, "seen_tokens": 1_000_000, "parameters": 9}
    result = swap_report.condense({"teacher": figures, "runs": runs}, ["teacher", "mlp-64", "luna-64"])
    found = {run["name"]: run for run in result["runs"]}
    assert found["mlp-64-peak"]["over_twin"] == pytest.approx(0.5)
    assert found["luna-64-transfer-peak"]["over_twin"] == pytest.approx(0.015)
    assert found["teacher-third"]["twin_loss"] == 2.4
    assert found["luna-64-conv-peak"]["over_twin"] is None, "the twin with a convolution was not run"
    assert [found[name]["steps_to_teacher"] for name in ("mlp-64-peak", "luna-64-transfer-peak")] == [200, 100]
    text = swap_report.text(result)
    assert "| mlp-64 | 6.000 | - | 3.000 | +50.0% | - | - | 200 / - |" in text
    assert "nearest to the equally continued teacher: luna-64-transfer-peak, +1.5%" in text


def test_committed_results():
    for path in (ROOT / "experiments" / "results").glob("swap-pretrain-*.json"):
        result = check(path)
        teacher = {
            (run["convolution"], run["rate"]): run["final_loss"] for run in result["runs"] if run["system"] == "teacher"
        }
        for run in result["runs"]:
            twin = teacher[run["convolution"], run["rate"]]
            assert run["over_twin"] == pytest.approx(run["final_loss"] / twin - 1, abs=1e-4), run["name"]
            assert run["final_loss"] == run["curve"]["loss"][-1]
        assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text())
