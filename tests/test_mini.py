"""The small English models: what runs after what, and the positions of the longer twin."""

import signal

import mini
import pytest
import running
import torch
from helpers import ROOT, tiny_tokenizer
from pretrain_mlm import read_recipe
from transformers import RobertaForMaskedLM

from luna_hf.ops.positions import sinusoids
from luna_hf.scripting import UserError

RECIPE = ROOT / "training" / "recipes" / "pretrain_mlm" / "luna-mini-en.yaml"


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Names of the commands that are started, with their options; each run finishes at once."""
    calls = []

    def launch(script, words, threads):
        options = dict(zip(words[1::2], words[2::2], strict=True))
        calls.append((script, options))
        folder = tmp_path / options["--model_name"]
        folder.mkdir()
        (folder / "metrics.json").touch()

    monkeypatch.setattr(mini, "launch", launch)
    monkeypatch.setattr(mini, "ROOT", tmp_path)  # nothing is shipped
    monkeypatch.setattr(mini, "lengthen_twin", lambda folder, source, length: folder)
    for name, file in ((mini.TOKENIZER, "tokenizer.json"), ("roberta-mini-en-start", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    return calls


def train(tmp_path, *names):
    assert mini.main(["train", *names, "--data", str(tmp_path), "--runs", str(tmp_path)]) == 0


def test_a_model_is_trained_after_what_it_starts_from_and_finished_stages_are_skipped(launched, tmp_path):
    train(tmp_path, "roberta-mini-en")
    assert [options["--model_name"] for _, options in launched] == ["roberta-mini-en-128", "roberta-mini-en"]
    assert launched[0][1]["--model_name_or_path"] == str(tmp_path / "roberta-mini-en-start")
    train(tmp_path, "luna-mini-en-clm", "luna-mini-en")
    names = ["luna-mini-en-clm", "luna-mini-en-128", "luna-mini-en"]
    assert [options["--model_name"] for _, options in launched[2:]] == names
    assert launched[2][0] == "training/pretrain_clm.py"
    train(tmp_path, "luna-mini-en", "roberta-mini-en")
    assert len(launched) == 5


def test_a_shipped_stage_is_not_trained_again(launched, tmp_path):
    shipped = tmp_path / "checkpoints" / "luna-mini-en-128"
    shipped.mkdir(parents=True)
    train(tmp_path, "luna-mini-en")
    ((_, options),) = launched
    assert (options["--model_name"], options["--model_name_or_path"]) == ("luna-mini-en", str(shipped))
    train(tmp_path, "luna-mini-en-128")  # but itself it can be repeated
    assert launched[1][1]["--output_dir"] == str(tmp_path / "luna-mini-en-128")


def tokens(name):
    """What a stage and those before it read, in tokens."""
    if name in mini.STARTS:
        source, _ = mini.STARTS[name]
        return tokens(source) if source else 0
    stage, recipe = mini.STAGES[name], read_recipe(RECIPE)
    keys = {key: stage.changes.get(key, getattr(recipe, key)) for key in ("max_steps", "global_batch_tokens")}
    return keys["max_steps"] * keys["global_batch_tokens"] + (tokens(stage.start) if stage.start else 0)


def test_models_and_their_twins_read_the_same_number_of_tokens():
    assert tokens("luna-mini-en") == tokens("roberta-mini-en") >= 80e6
    assert tokens("leapformer-mini-en") == tokens("lavo-mini-en") == tokens("roberta-tiny-en") >= 15e6
    assert tokens("luna-mini-en-4096") - tokens("luna-mini-en") >= 8e6


def test_new_positions_are_extrapolated():
    waves = sinusoids(torch.arange(514), 16)
    waves = torch.cat([torch.randn(2, 16), 0.3 * waves[2:].roll(1, 1) + 0.2])  # a linear function of the sinusoids
    long = mini.extrapolate(waves[:130], 2, 512)
    assert long.shape == (514, 16) and torch.equal(long[:130], waves[:130])
    assert (long - waves)[130:].std() < 0.65 * waves[130:].std()  # 128 positions do not show the slow waves


def test_the_longer_twin_is_the_same_on_short_texts(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokens")
    source = mini.start_twin(tmp_path / "short", tmp_path / "tokens")
    target = mini.lengthen_twin(tmp_path / "long", source, 512)
    ids = torch.arange(5, 105).unsqueeze(0)
    short, long = (RobertaForMaskedLM.from_pretrained(folder)(ids).logits for folder in (source, target))
    assert torch.equal(short, long)
    assert RobertaForMaskedLM.from_pretrained(target)(torch.full((1, 512), 5)).logits.isfinite().all()


def test_missing_texts_are_refused(tmp_path, capsys):
    assert mini.main(["train", "luna-mini-en", "--data", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert str(tmp_path / "enwiki" / "train.parquet") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["luna-large", "abc-mini-en"])
def test_a_model_that_cannot_be_trained_is_refused(name, capsys):
    assert mini.main(["train", name, "--data", "data"]) == 2
    assert f"There is no model {name} to train" in capsys.readouterr().err


def test_commands_run_in_processes_that_may_save_when_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "ROOT", tmp_path)
    (tmp_path / "fails.py").write_text("import sys; sys.exit(len(sys.argv))")
    with pytest.raises(UserError, match=r"fails\.py.*3"):
        running.launch("fails.py", ["--key", "value"], threads=1)
    (tmp_path / "stops.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            running.launch("stops.py", [str(tmp_path / "saved")], threads=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()
