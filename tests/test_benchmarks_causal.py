"""The benchmarks of the causal models run at tiny size, compare like with like, and say how it was done."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import causal  # noqa: E402
import generation  # noqa: E402

CAUSAL = ["--lengths", "64", "96", "--heads", "2", "--size", "8", "--slots", "8", "--rounds", "2"]
GENERATION = ["--lengths", "16", "64", "--heads", "2", "--width", "32", "--layers", "2", "--vocab-size", "99"]
GENERATION += ["--rounds", "2"]


def run_script(name, arguments, folder):
    command = [sys.executable, f"benchmarks/{name}", *arguments, "--check-floors", "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    result = json.loads(path.read_text())
    assert result["command"].startswith(f"python benchmarks/{name}") and result["protocol"] and result["date"]
    assert result["machine"]["threads"] == 1 and "torch" in result["versions"]
    assert path.with_suffix(".md").read_text().strip() in done.stdout
    return path.stem, result


def test_causal_as_a_script(tmp_path):
    name, result = run_script("causal.py", CAUSAL, tmp_path)
    assert name.startswith("causal-attention-cpu-float32-torch")
    assert [row["length"] for row in result["lengths"]] == [64, 96] and result["growth"] is None
    for row in result["lengths"]:
        assert list(row["contenders"]) == list(causal.CONTENDERS)
        for contender, modes in row["contenders"].items():
            for measured in modes.values():
                assert len(measured["seconds"]["rounds"]) == 2 and measured["seconds"]["median"] > 0
                assert measured["peak_memory_bytes"] >= 0
                assert ("speed_over" in measured) == (contender in causal.OWN)
        luna, outer = (row["contenders"][name]["backward"] for name in ("luna", "luna-outer"))
        pairs = zip(outer["seconds"]["rounds"], luna["seconds"]["rounds"], strict=True)
        expected = [theirs / ours for theirs, ours in pairs]
        assert luna["speed_over"]["luna-outer"]["rounds"] == pytest.approx(expected, rel=1e-4)
    # Only errors have floors at this size.
    assert len(result["floors"]) == len(result["errors"]) == 2 * 3 + 4
    assert all(check["holds"] for check in result["floors"])


@pytest.mark.parametrize("name", causal.OWN)
def test_the_peers_by_outer_products_compute_the_same(name):
    options = causal.parse(CAUSAL)
    inputs = [states.double() for states in causal.make_inputs(name, 80, options)]
    expected = causal.recurrence(name, *inputs)
    for contender in (name, causal.OUTER[name]):
        assert torch.allclose(causal.CONTENDERS[contender](*inputs)[0], expected, rtol=0, atol=1e-12)


def test_an_error_is_seen(monkeypatch):
    options = causal.parse(CAUSAL)
    monkeypatch.setitem(causal.CONTENDERS, "abc", lambda *inputs: causal.abc(*inputs) * (1 + 2e-6))
    assert causal.relative_error("abc", 64, options) > causal.ERROR > causal.relative_error("luna", 64, options)


def test_outer_products_are_left_out_where_they_do_not_fit():
    assert causal.contenders_at(2 * causal.OUTER_LENGTH) == [*causal.OWN, causal.SDPA]


def causal_result(outer=20.0, sdpa=8.0, growth=2.1, error=1e-6):
    """A made-up result at the sizes of the floors."""
    modes = {
        name: {
            mode: {"speed_over": {causal.OUTER[name]: {"median": outer}, "sdpa": {"median": sdpa}}}
            for mode in causal.MODES
        }
        for name in causal.OWN
    }
    return {
        "settings": dict(causal.BASE),
        "errors": [{"contender": "abc", "length": 2048, "scale": 300, "relative_rms": error}],
        "growth": {name: {mode: {"median": growth} for mode in causal.MODES} for name in causal.OWN},
        "lengths": [{"length": length, "contenders": modes} for length in (2048, 8192)],
    }


def test_floors_of_the_causal_scan():
    checks = causal.check(causal_result())
    assert len(checks) == 1 + 6 + 6 + 6 and all(check["holds"] for check in checks)
    missed = {"outer": (19.9, 6), "sdpa": (7.9, 3), "growth": (2.11, 6), "error": (float("nan"), 1)}
    for name, (value, count) in missed.items():
        assert [check["holds"] for check in causal.check(causal_result(**{name: value}))].count(False) == count
    other = causal_result()
    other["settings"]["heads"] = 8
    assert len(causal.check(other)) == 1


def test_generation_as_a_script(tmp_path):
    name, result = run_script("generation.py", [*GENERATION, "--rows", "2"], tmp_path)
    assert name.startswith("generation-2-layer-2-rows-cpu-float32-torch")
    assert result["peers"] == ["gpt2", "gpt2-static"] and list(result["models"]) == list(generation.NAMES)
    short, long = (row["models"] for row in result["lengths"])
    for own in generation.OWN:
        assert short[own]["state_bytes"] == long[own]["state_bytes"] > 0
        assert long[own]["memory_bytes"] >= long[own]["state_bytes"]
        assert set(long[own]["speed_over"]) == set(result["peers"])
        pairs = zip(long["gpt2"]["seconds"]["rounds"], long[own]["seconds"]["rounds"], strict=True)
        expected = [theirs / ours for theirs, ours in pairs]
        assert long[own]["speed_over"]["gpt2"]["rounds"] == pytest.approx(expected, rel=1e-4)
    # Keys and values of 2 layers, width 32, 2 rows, float32.
    assert long["gpt2"]["state_bytes"] == 64 * 2 * 2 * 32 * 2 * 4
    assert long["gpt2-static"]["state_bytes"] == (64 + result["settings"]["room"]) * 2 * 2 * 32 * 2 * 4
    assert set(result["generate"]) == {*generation.OWN, "gpt2"}
    assert len(result["floors"]) == len(generation.OWN) and all(check["holds"] for check in result["floors"])


@pytest.fixture(scope="module")
def setting():
    return generation.make_setting(generation.parse(GENERATION))


@pytest.mark.parametrize("name", generation.OWN)
def test_a_step_after_a_context_is_that_of_the_whole_text(name, setting):
    model = generation.build(name, setting)
    states = generation.read_tokens(model, [16, 64], setting)
    for length, cache in states.items():
        logits = generation.make_step(model, cache, length, setting)()
        text = torch.cat(
            [generation.random_tokens(64, setting)[:, :length], generation.random_tokens(1, setting)], dim=1
        )
        with torch.no_grad():
            assert torch.allclose(logits, model(text).logits[:, -1:], atol=1e-5)


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


def generation_result(growth=1.05, generate=1.1, speed=4.0, state=1):
    """A made-up result at the sizes of the floors."""
    own = {"state_bytes": 1, "speed_over": {peer: {"median": speed} for peer in generation.PEERS}}
    return {
        "settings": {**generation.BASE, "rows": 1},
        "growth": {name: {"median": growth} for name in generation.OWN},
        "generate": {name: {"median": generate} for name in generation.OWN},
        "lengths": [
            {"length": 1024, "models": dict.fromkeys(generation.OWN, own)},
            {"length": 16384, "models": {name: {**own, "state_bytes": state} for name in generation.OWN}},
        ],
    }


def test_floors_of_generation():
    checks = generation.check(generation_result())
    assert len(checks) == 3 * 5 and all(check["holds"] for check in checks)
    missed = {"growth": (1.06, 3), "generate": (1.11, 3), "speed": (3.9, 3), "state": (2, 3)}
    for name, (value, count) in missed.items():
        assert [check["holds"] for check in generation.check(generation_result(**{name: value}))].count(False) == count


# ---- committed results ----


COMMITTED = {
    script: sorted((BENCHMARKS / "results").glob(f"{script.__name__}-*.json")) for script in (causal, generation)
}


@pytest.mark.parametrize("script", COMMITTED, ids=lambda script: script.__name__)
def test_committed_results_say_how_they_were_made(script):
    assert COMMITTED[script]
    for path in COMMITTED[script]:
        result = json.loads(path.read_text())
        assert result["command"].startswith(f"python benchmarks/{script.__name__}.py")
        script.parse(result["command"].split()[2:])
        assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text())
        assert path.stem.endswith("torch" + result["versions"]["torch"].split("+")[0])
        assert path.with_suffix(".md").read_text() == script.markdown(result) + "\n"
        assert path.with_suffix(".png").exists()
        assert result["floors"] and all(check["holds"] for check in result["floors"])
