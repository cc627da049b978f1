"""The benchmarks run at tiny size, their arithmetic is right, and committed results say how they were made."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"


import encoder  # noqa: E402
import floors  # noqa: E402
import guarantees  # noqa: E402
from measuring import growth_exponent, ratios, summary, win_length  # noqa: E402

from luna_hf.memory_control import CONTROLS  # noqa: E402

TINY = ["--lengths", "16", "32", "--layers", "2", "--width", "32", "--heads", "4", "--slots", "8"]
TINY += ["--tokens-per-batch", "64", "--rounds", "2"]
# Those of the causal models are in test_benchmarks_causal.py.
COMMITTED = sorted(
    path
    for path in (ROOT / "benchmarks" / "results").glob("*.json")
    if not path.name.startswith(("causal", "generation"))
)


def check_header(result, script):
    assert result["command"].startswith(f"python benchmarks/{script}")
    assert result["machine"]["cpu"] and result["machine"]["cores"] >= 1 and result["machine"]["threads"] >= 1
    assert {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()
    assert result["date"] and result["protocol"]


def test_forward_with_padding_as_a_script(tmp_path):
    models = ["roberta-eager", "modernbert", "luna-tied", "abc-mlp-64"]
    command = [sys.executable, "benchmarks/encoder.py", *TINY, "--padding", "--output", str(tmp_path)]
    command += ["--models", *models]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "luna-tied against roberta" in done.stdout

    (path,) = tmp_path.glob("encoder-forward-2-layer-padding-chosen-cpu-float32-torch*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    result = json.loads(path.read_text())
    check_header(result, "encoder.py")
    assert list(result["models"]) == ["roberta", *models]  # roberta always takes part
    assert result["peers"] == ["roberta", "roberta-eager", "modernbert"]
    assert all(set(wins) == set(result["peers"]) for wins in result["wins"].values())
    assert [(row["length"], row["rows"]) for row in result["lengths"]] == [(16, 4), (32, 2)]
    for row in result["lengths"]:
        for name, model in row["models"].items():
            assert len(model["seconds"]["rounds"]) == 2 and model["seconds"]["median"] > 0
            assert model["peak_memory_bytes"] >= 0
            assert len(model["padded_over_unpadded"]["rounds"]) == 2
            assert ("speed_over" in model) == name.startswith(("luna", "abc"))
        tied = row["models"]["luna-tied"]
        peer = row["models"]["roberta"]["seconds"]["rounds"]
        expected = [theirs / ours for theirs, ours in zip(peer, tied["seconds"]["rounds"], strict=True)]
        assert tied["speed_over"]["roberta"]["rounds"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [*encoder.contender_names(), "roberta-eager", "abc-linformer-64"])
def test_a_training_step_of_every_model_learns(name):
    setting = encoder.make_setting(encoder.parse([*TINY, "--mode", "mlm_step"]))
    model = encoder.build(name, setting)
    batch = encoder.make_batch(setting, rows=2, length=16)
    share = (batch["labels"] != -100).float().mean().item()
    assert 0 < share < 0.5
    before = model(**batch).loss.item()
    step = encoder.make_action(model, setting)
    for _ in range(3):
        step(batch)
    assert model.training and model(**batch).loss.item() < before


def test_models_are_chosen_by_name_or_set(capsys):
    standard = ["roberta", "modernbert", "luna-untied", "luna-tied", "abc-mlp-128", "abc-mlp-64"]
    options = encoder.parse(TINY)
    assert options.names == standard and encoder.subject(options) == "encoder-forward-2-layer"
    controls = encoder.parse([*TINY, "--models", "controls"])
    strategies = {name.removeprefix("abc-").removesuffix("-64") for name in controls.names if name.startswith("abc-")}
    assert strategies == {control.replace("_", "-") for control in CONTROLS}
    assert encoder.subject(controls) == "encoder-forward-2-layer-controls"
    with pytest.raises(SystemExit):
        encoder.parse([*TINY, "--models", "abc-mlp-65"])
    assert "no model abc-mlp-65" in capsys.readouterr().err


@pytest.mark.parametrize("name", encoder.contender_names(["controls"]))
def test_names_of_contenders_say_what_they_are(name):
    model = encoder.build(name, encoder.make_setting(encoder.parse([*TINY, "--models", name])))
    if name.startswith("abc-") and name != "abc-full":
        control, size = name.removeprefix("abc-").rsplit("-", 1)
        assert model.config.memory_control == control.replace("-", "_") and model.config.memory_size == int(size)
    assert model.config._attn_implementation == "sdpa" and not model.training


def test_padded_batches_have_the_documented_shape():
    setting = encoder.make_setting(encoder.parse(TINY))
    plain, padded = (encoder.make_batch(setting, rows=4, length=32, padded=padded) for padded in (False, True))
    assert "attention_mask" not in plain and plain["input_ids"].shape == padded["input_ids"].shape
    assert padded["attention_mask"].sum(-1).tolist() == [24, 24, 32, 32]
    assert (padded["input_ids"][0, 24:] == 1).all()
    assert encoder.rows_for(16384, encoder.parse([*TINY, "--padding"])) == 2


def test_guarantees(tmp_path, capsys):
    models = ["LunaModel", "AbcModel", "RobertaModel", "FNetModel", "MraModel"]
    assert guarantees.main(["--models", *models, "--no-cost", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("guarantees-cpu-float32-torch*.json")
    result = json.loads(path.read_text())
    check_header(result, "guarantees.py")
    luna, abc, roberta, fnet, mra = result["results"].values()
    for own in (luna, abc):
        assert all(check["holds"] for check in own.values()) and len(own) == 6
    assert all(check["holds"] for check in roberta.values())
    # The harness must be able to say no: FNet mixes pads into every token, Mra without its kernel mixes nothing.
    assert not fnet["pad_content"]["holds"] and fnet["deterministic"]["holds"]
    assert mra == {}
    table = path.with_suffix(".md").read_text()
    assert table.startswith("| Model |") and "| no attention |" in table and table == capsys.readouterr().out


def test_summary_and_ratios():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert summary([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "quartiles": [1.5, 2.5],
        "min": 1.0,
        "max": 3.0,
        "rounds": [3.0, 1.0, 2.0],
    }
    assert summary([4.0])["quartiles"] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({512: 1.2, 2048: 1.5}, 512),  # ahead from the start: the shortest length measured
        ({512: 0.5, 2048: 2.0}, 1024),  # halfway in log length and log ratio
        ({2048: 2.0, 512: 0.5}, 1024),  # in any order
        ({512: 1.1, 1024: 0.8, 4096: 1.25}, 2048),  # a win that does not last does not count
        ({512: 1.0, 1024: 2.0}, 512),  # a draw is where the crossing is
        ({512: 0.5, 2048: 0.9}, None),
    ],
)
def test_win_length(speedups, expected):
    length = win_length(speedups)
    assert length is None if expected is None else length == pytest.approx(expected)


def test_growth_exponent():
    lengths = (2048, 4096, 16384)
    assert growth_exponent({n: 3e-6 * n for n in lengths}) == pytest.approx(1)
    assert growth_exponent({n: 1e-9 * n**2 for n in lengths}) == pytest.approx(2)
    assert 1 < growth_exponent({n: n * math.log(n) for n in lengths}) < 1.2
    with pytest.raises(ValueError, match="at least two lengths"):
        growth_exponent({512: 1.0})


def result_with(speed, memory=1.0, padding=1.0, length=512, exponent=1.0):
    """A made-up result with one length, in which both Luna variants measured the same."""
    own = {
        "peak_memory_bytes": memory,
        "speed_over": {"roberta": {"median": speed}},
        "padded_over_unpadded": {"median": padding},
    }
    models = {"roberta": {"peak_memory_bytes": 1.0}, "luna-untied": own, "luna-tied": own}
    return {
        "settings": {**floors.BASE, "mode": "forward", "dtype": "float32", "layers": 1, "device": "cpu"},
        "peers": ["roberta"],
        "models": models,
        "growth": {"range": [2048, 16384], "exponents": {name: {"median": exponent} for name in models}},
        "lengths": [{"length": length, "models": models}],
    }


def test_floors_of_abc():
    result = result_with(speed=0.9)
    own = result["models"].pop("luna-untied")
    del result["models"]["luna-tied"]
    result["models"] |= {"abc-mlp-128": own, "abc-mlp-64": own, "abc-full": own}
    result["growth"]["exponents"] = {name: {"median": 1.5} for name in result["models"]}
    checks = floors.check(result)
    speed = {check["model"]: check["holds"] for check in checks if "speed" in check["what"]}
    assert speed == {"abc-mlp-128": True, "abc-mlp-64": False}
    # Softmax attention is quadratic and stands there as such.
    assert {check["model"] for check in checks if "growth" in check["what"]} == {"abc-mlp-128", "abc-mlp-64"}


def test_floors():
    checks = floors.check(result_with(speed=1.0))
    assert [(check["model"], check["holds"]) for check in checks[:2]] == [("luna-untied", True), ("luna-tied", False)]
    assert all(check["holds"] for check in checks[2:]) and len(checks) == 8
    for worse in ({"memory": 1.1}, {"padding": 1.06}, {"exponent": 1.06}):
        assert [check["holds"] for check in floors.check(result_with(speed=9.0, **worse))].count(False) == 2
    assert not any("speed" in check["what"] for check in floors.check(result_with(speed=1.0, length=1024)))


def test_results_are_committed():
    assert {path.name.split("-")[0] for path in COMMITTED} >= {"encoder", "guarantees"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_say_how_they_were_made(path):
    result = json.loads(path.read_text())
    subject = path.name.split("-")[0]
    check_header(result, f"{subject}.py")
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text())
    assert path.stem.endswith("torch" + result["versions"]["torch"].split("+")[0])
    if subject == "encoder":
        encoder.parse(result["command"].split()[2:])
        assert path.with_suffix(".png").exists() or len(result["lengths"]) == 1
    else:
        assert path.with_suffix(".md").read_text() == guarantees.markdown(result["results"]) + "\n"
