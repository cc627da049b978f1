"""The benchmarks of the causal models run at tiny size and compare equal computations."""

import causal
import causal_training
import generation
import measuring
import pytest
import seq2seq_generation
import torch
from helpers import FAMILIES
from test_benchmarks import CAUSAL, GENERATION, assert_ratios, run_here


def test_causal(tmp_path, monkeypatch, capsys):
    path, result = run_here(causal, CAUSAL, tmp_path, monkeypatch)
    assert path.name.startswith("causal-attention-cpu-float32-torch")
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    assert [row["length"] for row in result["lengths"]] == [64, 96] and result["growth"] is None
    for row in result["lengths"]:
        assert list(row["contenders"]) == list(causal.CONTENDERS)
        for contender, modes in row["contenders"].items():
            for measured in modes.values():
                assert len(measured["seconds"]["rounds"]) == 2 and measured["seconds"]["median"] > 0
                assert measured["peak_memory_bytes"] >= 0
                assert ("speed_over" in measured) == (contender in causal.OWN)
        luna, outer = (row["contenders"][name]["backward"] for name in ("luna", "luna-outer"))
        assert_ratios(luna["speed_over"]["luna-outer"], outer, luna)
    # Only errors have floors at this size.
    assert len(result["floors"]) == len(result["errors"]) == 2 * len(causal.OWN) + 4


@pytest.mark.parametrize("name", causal.OWN)
def test_contenders_and_their_peers_by_outer_products_are_the_recurrence(name):
    options = causal.parse(CAUSAL)
    inputs = [states.double() for states in causal.make_inputs(name, 80, options)]
    expected = causal.recurrence(name, *inputs)
    for contender in (name, *([causal.OUTER[name]] if name in causal.OUTER else [])):
        assert torch.allclose(causal.CONTENDERS[contender](*inputs)[0], expected, rtol=0, atol=1e-12)


def test_an_error_is_detected(monkeypatch):
    options = causal.parse(CAUSAL)
    monkeypatch.setitem(causal.CONTENDERS, "abc", lambda *inputs: causal.abc(*inputs) * (1 + 2e-6))
    assert causal.relative_error("abc", 64, options) > causal.ERROR > causal.relative_error("luna", 64, options)


def test_generation(tmp_path, monkeypatch):
    path, result = run_here(generation, [*GENERATION, "--rows", "2"], tmp_path, monkeypatch)
    assert path.name.startswith("generation-2-layer-2-rows-cpu-float32-torch")
    assert result["peers"] == ["gpt2", "gpt2-static"] and list(result["models"]) == list(generation.NAMES)
    short, long = (row["models"] for row in result["lengths"])
    for own in generation.OWN:
        assert short[own]["state_bytes"] == long[own]["state_bytes"] > 0
        assert long[own]["memory_bytes"] >= long[own]["state_bytes"]
        assert set(long[own]["speed_over"]) == set(result["peers"])
        assert_ratios(long[own]["speed_over"]["gpt2"], long["gpt2"], long[own])
    # Keys and values of 2 layers, width 32, 2 rows, float32.
    assert long["gpt2"]["state_bytes"] == 64 * 2 * 2 * 32 * 2 * 4
    assert long["gpt2-static"]["state_bytes"] == (64 + result["settings"]["room"]) * 2 * 2 * 32 * 2 * 4
    assert set(result["generate"]) == {*generation.OWN, "gpt2"}
    assert len(result["floors"]) == len(generation.OWN)


def test_generation_of_encoder_decoders(tmp_path, monkeypatch):
    words = [*GENERATION, "--slots", "8"]
    path, result = run_here(seq2seq_generation, words, tmp_path, monkeypatch)
    assert path.name.startswith("seq2seq_generation-2-layer-cpu-float32-torch")
    assert result["peers"] == ["bart"] and list(result["models"]) == list(seq2seq_generation.NAMES)
    short, long = (row["models"] for row in result["lengths"])
    for own in FAMILIES:
        assert short[own]["state_bytes"] == long[own]["state_bytes"] > 0
        for call in seq2seq_generation.CALLS:
            assert long[own]["speed_over"]["bart"][call]["rounds"] == pytest.approx(
                measuring.ratios(long["bart"][call]["rounds"], long[own][call]["rounds"]), rel=1e-3
            )
    # Keys and values of 64 source tokens and the start token, 2 layers, width 32, float32.
    assert long["bart"]["state_bytes"] == 65 * 2 * 2 * 32 * 4
    assert [check["holds"] for check in result["floors"]] == [True] * len(FAMILIES)


def test_causal_training(tmp_path, monkeypatch, capsys):
    path, result = run_here(causal_training, [*GENERATION, "--lengths", "32", "64"], tmp_path, monkeypatch)
    assert path.name.startswith("causal_training-2-layer-cpu-float32-torch")
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    for row in result["lengths"]:
        peer = row["models"]["gpt2"]
        assert list(row["models"]) == [*generation.OWN, "gpt2"]
        for own in generation.OWN:
            model = row["models"][own]
            assert_ratios(model["speed_over"]["gpt2"], peer, model)
            share = model["peak_memory_bytes"] / peer["peak_memory_bytes"]
            assert model["memory_over"]["gpt2"] == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("name", causal_training.NAMES)
def test_a_causal_training_step_learns(name, monkeypatch):
    setting = causal_training.parse(GENERATION)
    model = generation.build(name, setting)
    monkeypatch.setattr(causal_training, "build", lambda *_: model)
    ids = generation.random_tokens(64, setting)
    before = model(ids, labels=ids).loss.item()
    step, held = causal_training.make_step(name, setting)
    for _ in range(3):
        step(64)
    assert model.training and model(ids, labels=ids).loss.item() < before
    assert held == 4 * 4 * model.num_parameters()


@pytest.fixture(scope="module")
def setting():
    return generation.parse(GENERATION)


@pytest.mark.parametrize("name", generation.OWN)
def test_a_step_after_a_context_continues_the_text(name, setting):
    model = generation.build(name, setting)
    for length, cache in generation.read_tokens(model, [16, 64], setting).items():
        logits = generation.make_step(model, cache, length, setting)()
        context, token = generation.random_tokens(64, setting)[:, :length], generation.random_tokens(1, setting)
        with torch.no_grad():
            expected = model(torch.cat([context, token], dim=1)).logits[:, -1:]
        assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("name", generation.NAMES)
def test_models_and_caches_in_half_precision(name):
    setting = generation.parse([*GENERATION, "--dtype", "bfloat16"])
    model = generation.build(name, setting)
    cache = generation.make_states(name, model, setting)[16]
    assert generation.make_step(model, cache, 16, setting)().dtype == model.dtype == torch.bfloat16
    if name in generation.PEERS:
        assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    step, held = causal_training.make_step(name, setting) if name != generation.STATIC else (None, None)
    assert step is None or held == 4 * 2 * model.num_parameters()


def test_both_caches_of_the_peer_hold_the_same(setting):
    model = generation.build("gpt2", setting)
    steps = []
    for name in generation.PEERS:
        cache = generation.fill_cache(name, model, 64, setting)
        step = generation.make_step(model, cache, 64, setting)
        step()
        assert cache.get_seq_length() == 65
        steps.append(step())
    assert torch.allclose(*steps, atol=1e-5)
