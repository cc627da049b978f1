"""The warm-start study: its driver runs what it promises, and the report compares each run with its twin."""

import finetuning
import learning
import pytest
import running
import swap
import swap_report
import torch
from test_learning import RESULTS, SHRINK_WORDS, check
from test_learning import data as learning_data  # noqa: F401  a fixture
from transformers import AutoModelForMaskedLM

# At the size of the shrunk base model: memories of 64 slots in blocks of 16 tokens.
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
    where = ["--data", str(learning_data), "--runs", str(folder / "runs"), "--base", str(base)]
    # The teacher's steps are those of the recipe: a short one is trained first, and then found finished.
    swap.train_teacher(swap.parse(["run", *where, *running.option_words(SHRINK)]))
    own = ["--systems", "teacher", "luna-64", "--rates", "peak", "--continued-steps", "4", "--transfer-steps", "2"]
    words = running.option_words({name: value for name, value in SHRINK.items() if name != "max_steps"})
    assert swap.main(["run", *where, *own, *words]) == 0
    return folder / "runs"


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
    found = {run["name"]: run for run in swap_report.read(runs)[1]}
    assert found.keys() == {
        *("teacher-peak", "teacher-conv-peak", "luna-64-peak", "luna-64-conv-peak"),
        *("luna-64-transfer-peak", "luna-64-conv-transfer-peak"),
    }
    plain, moved = found["luna-64-peak"], found["luna-64-transfer-peak"]
    assert plain["curve"]["step"] == [0, 2, 4] and plain["transferred_loss"] is None
    assert moved["curve"]["step"] == [0, 2, 4] and moved["transferred_loss"] == moved["curve"]["loss"][1]
    assert len(moved["layer_errors"]) == 2 and all(0 < error < 10 for error in moved["layer_errors"])
    assert moved["swapped_loss"] == pytest.approx(plain["swapped_loss"], abs=1e-6)


def test_finished_runs_are_skipped_and_the_report_is_complete(runs, learning_data, tmp_path, capsys):  # noqa: F811
    weights = {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    where = ["--data", str(learning_data), "--runs", str(runs)]
    base = ["--base", str(runs.parent / "learning" / "pretrain" / "roberta-seed1")]
    assert swap.main(["run", *where, *base, "--systems", "teacher", "luna-64", "--rates", "peak"]) == 0
    assert weights == {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    tuning = ["--tasks", "sst2", "--seeds", "0", "--models", "luna-64-peak", "--max_steps", "2"]
    assert swap.main(["finetune", *where, *tuning]) == 0
    assert swap.main(["report", "--runs", str(runs), "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("swap-pretrain-cpu-float32-torch*.json")
    assert len(check(path, swap_report.text)["runs"]) == 6
    check(path.with_name(path.name.replace("pretrain", "finetune")), finetuning.table)


def test_variants_are_those_of_the_protocol():
    names = {variant.name for variant in swap.variants(list(swap.SYSTEMS), list(swap.RATES))}
    (path,) = RESULTS.glob("swap-pretrain-*.json")
    assert names == {run["name"] for run in running.read_json(path)["runs"]}


def test_committed_results():
    """Their comparisons with the twin, too, are those that the report computes."""
    (path,) = RESULTS.glob("swap-pretrain-*.json")
    result = check(path, swap_report.text)
    runs = [{**run, "transfer_steps": result["transfer_steps"] * run["transfer"]} for run in result["runs"]]
    computed = swap_report.condense(result["teacher"], runs, list(swap.SYSTEMS))
    for run, again in zip(result["runs"], computed["runs"], strict=True):
        assert again.pop("over_twin") == pytest.approx(run.pop("over_twin"), abs=1e-4), run["name"]
        assert again == run and run["final_loss"] == run["curve"]["loss"][-1]
    twins = {run["twin_loss"] for run in result["runs"] if run["system"] == "teacher"}
    assert len(twins) == 4  # of two rates, with and without convolution
