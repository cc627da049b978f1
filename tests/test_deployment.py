"""The benchmark of ways to run a model: it scores, sizes and times them, and refuses what it cannot measure."""

import json
import re

import deployment
import pytest
import torch
from helpers import refused, tiny_model
from test_benchmarks import check_header
from tiny_finetuning import WORDS, checkpoint, write_split

from luna_hf import FAMILIES
from luna_hf.scripting import UserError

TINY = ["--lengths", "8", "32", "--rounds", "2", "--repeats", "1", "--rows", "20"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The folder of a tiny masked-LM model with positions for the shapes that the benchmark checks."""
    monkeypatch.setattr(deployment, "CHECKED", ((3, 31), (1, 7)))
    return checkpoint(tmp_path / "tiny", "luna")


def test_ways_are_scored_and_timed(model, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise NotImplementedError("no such operator")

    monkeypatch.setitem(deployment.WAYS, "aot-inductor", (fail, ()))
    write_split(tmp_path / "data" / "enwiki" / "validation.parquet", [{"text": " ".join(WORDS)}] * 20)
    words = [*TINY, "--models", str(model), "--ways", "int8", "aot-inductor", "--data", str(tmp_path / "data")]
    assert deployment.main([*words, "--output", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*.json")
    result = json.loads(path.read_text())
    check_header(result, "deployment")
    plain, rounded = (result["models"]["tiny"]["ways"][way] for way in ("pytorch", "int8"))
    assert plain["error"] == 0 < rounded["error"] < 0.1
    assert rounded["bytes"] < plain["bytes"] and 0 < abs(rounded["score"] - plain["score"]) < 0.1
    assert "no such operator" in result["models"]["tiny"]["failures"]["aot-inductor"]
    for entry in result["lengths"]:
        assert entry["call"] == "tiny" and entry["models"]["int8"]["speed_over"]["pytorch"]["median"] > 0
    assert path.with_suffix(".png").stat().st_size > 10_000 and "| tiny | int8 |" in capsys.readouterr().out


@pytest.mark.slow
@torch.no_grad()
def test_exported_programs_equal_the_model(model, tmp_path):
    loaded = deployment.load(str(model))
    for way in ("onnx", "aot-inductor"):
        run, size = deployment.WAYS[way][0](loaded, tmp_path, 1)
        assert deployment.error(run, loaded) < 1e-5 and size > 0
    run, smaller = deployment.use_onnx_int8(loaded, tmp_path, 1)
    assert 1e-5 < deployment.error(run, loaded) < 0.1 and smaller < (tmp_path / "model.onnx").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_torchao_rounds_every_family(family, tmp_path, monkeypatch):
    pytest.importorskip("torchao")  # in no extra: with it, every import of Transformers takes a second and warns
    monkeypatch.setattr(deployment, "CHECKED", ((3, 31), (1, 7)))
    loaded = deployment.load(str(checkpoint(tmp_path / family, family)))
    run, size = deployment.use_torchao(loaded, tmp_path, 1)
    assert 1e-5 < deployment.error(run, loaded) < 0.1 and size < deployment.use_pytorch(loaded, tmp_path, 1)[1]


def test_a_score_is_an_accuracy_or_a_loss():
    logits = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    assert deployment.score(lambda batch: logits, [({}, torch.tensor([1, 1]))] * 2) == 0.5
    masked = [({}, torch.tensor([[-100, 0]]))]
    expected = torch.nn.functional.cross_entropy(logits[1:], torch.tensor([0])).item()
    assert deployment.score(lambda batch: logits[None], masked) == pytest.approx(expected)


def test_a_way_without_its_package_is_left_out(monkeypatch):
    monkeypatch.setattr(deployment, "find_spec", lambda name: None if name == "openvino" else name)
    assert deployment.installed_ways(["openvino", "onnx", "pytorch"]) == ["pytorch", "onnx"]


def test_an_encoder_without_a_head_has_no_score(tmp_path, capsys):
    tiny_model(max_position_embeddings=128).save_pretrained(tmp_path / "bare")
    words = [*TINY, "--models", str(tmp_path / "bare"), "--ways", "int8", "--data", str(tmp_path)]
    assert deployment.main([*words, "--output", str(tmp_path / "out")]) == 0
    (row,) = re.findall(r"^\| bare \| int8 \|.*", capsys.readouterr().out, re.MULTILINE)
    _, _, _, _, error, score, *_ = row.split("|")
    assert 0 < float(error) < 0.1 and score.strip() == "-"


def test_mistakes_are_named(model, tmp_path, capsys):
    with refused("no-model", error=UserError):
        deployment.load("no-model")
    assert deployment.main([*TINY, "--models", str(model), "--data", str(tmp_path), "--ways", "pytorch"]) == 2
    assert str(tmp_path / "enwiki") in capsys.readouterr().err
