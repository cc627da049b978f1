"""training/evaluate_perplexity.py: every length scores the same tokens, with a carried state or sliding windows."""

import json
import math
import os
import shutil

import evaluate_perplexity
import numpy as np
import pytest
import torch
from engine.perplexity import Settings, load, read_tokens, score
from helpers import FAMILIES, SENTENCES, tiny_causal_model, tiny_model, tiny_tokenizer
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from luna_hf.scripting import locked

SMALL = {"models": [], "data": "", "lengths": [16, 64], "tokens": 128, "part": 16, "stride": 4, "rows": 32}
SETTINGS = Settings(**SMALL)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(SENTENCES * 8), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved causal model of each family, and GPT-2 with 16 positions."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=2)
    models = {family: tiny_causal_model(family, vocab_size=400) for family in FAMILIES}
    models["gpt2"] = GPT2LMHeadModel(config)
    made = {}
    for kind, model in models.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(made[kind])
        tiny_tokenizer().save_pretrained(made[kind])
    return made


@torch.no_grad()
def literal_losses(model, tokens, length, window=lambda index: 0):
    """The loss of each token from those before it in its sequence, one forward pass per position."""
    sequences = torch.from_numpy(tokens).view(-1, length)
    inputs = F.pad(sequences, (1, 0), value=model.config.bos_token_id)
    losses = []
    for index in range(length):
        logits = model(inputs[:, window(index) : index + 1], use_cache=False).logits[:, -1]
        losses.append(F.cross_entropy(logits, sequences[:, index], reduction="none"))
    return torch.stack(losses, 1).numpy()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_carried_state_sees_all_of_the_context(folders, text, kind):
    model, tokenizer = load(str(folders[kind]), torch.float32)
    tokens = read_tokens(tokenizer, str(text), "text", 128)
    for length in (16, 64):
        scores = score(model, tokens, length, "carried", SETTINGS)
        np.testing.assert_allclose(scores.losses, literal_losses(model, tokens, length), atol=1e-5)


def test_sliding_windows_score_each_token_once(folders, text):
    model, tokenizer = load(str(folders["gpt2"]), torch.float32)
    tokens = read_tokens(tokenizer, str(text), "text", 128)
    joined = [token for sentence in SENTENCES * 8 for token in [*tokenizer(sentence).input_ids[1:-1], 2]]
    assert tokens.tolist() == joined[:128]

    def window(index):
        end = 16 if index < 16 else min(64, 16 + -(-(index - 15) // 4) * 4)
        return max(0, end - 16)

    scores = score(model, tokens, 64, "sliding", SETTINGS)
    np.testing.assert_allclose(scores.losses, literal_losses(model, tokens, 64, window), atol=1e-5)


def test_the_state_has_the_same_size_at_every_length_and_is_float32(folders, text):
    model, tokenizer = load(str(folders["luna"]), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    tokens = read_tokens(tokenizer, str(text), "text", 128)
    sizes = {score(model, tokens, length, "carried", SETTINGS).state_bytes for length in (16, 64)}
    exact, _ = load(str(folders["luna"]), torch.float32)
    assert len(sizes) == 1
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    sums = 4 * config.num_hidden_layers * config.num_attention_heads * 2 * head * config.projection_length
    assert sums <= sizes.pop()
    losses = [score(each, tokens, 64, "carried", SETTINGS).loss for each in (model, exact)]
    assert math.isclose(*losses, rel_tol=2e-2)


def test_the_script_writes_figures_table_and_plot(folders, text, tmp_path, capsys):
    words = [f"{kind}={folder}" for kind, folder in folders.items()]
    options = ["--lengths", "64", "16", "--tokens", "150", "--part", "16", "--rows", "32"]
    given = [*words, "--data", str(text), *options, "--output", str(tmp_path / "out")]
    assert evaluate_perplexity.main(given) == 0
    result = json.loads((tmp_path / "out" / "perplexity.json").read_text())
    assert [model["mode"] for model in result["models"]] == [*["carried"] * len(FAMILIES), "sliding"]
    assert {model["tokens"] for model in result["models"]} == {128}
    assert result["stride"] == 8 and str(tmp_path) not in result["command"]
    for model in result["models"]:
        for figures in model["lengths"].values():
            assert math.isclose(math.log(figures["perplexity"]), figures["loss"])
        losses, longest = model["by_position"]["loss"], model["lengths"]["64"]["loss"]
        assert math.isclose((losses[0] * 16 + losses[1] * 48) / 64, longest)
    written = (tmp_path / "out" / "perplexity.md").read_text()
    assert written.strip() in capsys.readouterr().out
    assert f"{result['models'][0]['lengths']['16']['perplexity']:.2f}" in written
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 5000


def test_all_models_are_looked_for_before_the_first_is_evaluated(folders, text, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_perplexity, "evaluate", lambda *_: pytest.fail("evaluated"))
    words = [str(folders["luna"]), "other=nowhere", "--data", str(text), "--lengths", "16", "--tokens", "64"]
    assert evaluate_perplexity.main(words) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_short_text_is_scored_as_far_as_it_goes(folders, text, tmp_path, capsys):
    options = ["--lengths", "64", "--tokens", "100000", "--part", "16", "--rows", "32", "--output", str(tmp_path)]
    with locked(tmp_path / ".lock"):
        assert evaluate_perplexity.main([str(folders["luna"]), "--data", str(text), *options]) == 2
    assert str(os.getpid()) in capsys.readouterr().err
    assert evaluate_perplexity.main([str(folders["luna"]), "--data", str(text), *options]) == 0
    found = len(read_tokens(tiny_tokenizer(), str(text), "text", 100000))
    assert f"{found:,} of the 100,000" in capsys.readouterr().err
    (model,) = json.loads((tmp_path / "perplexity.json").read_text())["models"]
    assert model["tokens"] == found // 64 * 64


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("luna", ["--lengths", "48", "64"], "48"),
        ("luna", ["--lengths", "1", "64"], "below 2"),
        ("luna", ["--tokens", "20"], "`--tokens` is 20"),
        ("luna", ["--stride", "99"], "`--stride` is 99"),
        ("luna", ["--tokens", "100000", "--lengths", "4096"], "4,096"),
        ("diverged", [], "diverged"),
        ("luna", ["--rows", "0"], "`--rows` (0)"),
        ("luna", ["--mode", "held"], "`mode` is 'held'"),
        ("luna", ["--output", "taken"], "is a file"),
        ("encoder", [], "luna encoder"),
        ("damaged", [], "damaged"),
        ("gpt2", ["--mode", "carried"], "`--mode sliding`"),
        ("gpt2", ["--part", "32"], "16 positions"),
        ("nothing", [], "nothing"),
    ],
)
def test_mistakes_are_reported(folders, text, capsys, model, options, words):
    plain = ["--lengths", "16", "64", "--tokens", "128", "--part", "16", "--stride", "4"]
    folder = folders.get(model, text.parent / model)
    if model == "encoder":
        tiny_model("luna", "mlm", vocab_size=400).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    elif model == "damaged":
        shutil.copytree(folders["luna"], folder)
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])
    elif model == "diverged":
        broken, tokenizer = load(str(folders["luna"]), torch.float32)
        with torch.no_grad():
            next(broken.parameters()).fill_(math.nan)
        broken.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if "taken" in options:
        (text.parent / "taken").touch()
        options = [option.replace("taken", str(text.parent / "taken")) for option in options]
    folder = str(folder)
    assert evaluate_perplexity.main([folder, "--data", str(text), *plain, *options]) == 2
    assert words in capsys.readouterr().err
