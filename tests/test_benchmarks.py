"""The encoder benchmarks run at tiny size, their arithmetic is right, and committed results name their origin."""

import functools
import json
import math
import operator
import os
import re
import subprocess
import sys

import attention
import causal
import causal_training
import contenders
import deployment
import encoder
import floors
import generation
import guarantees
import measuring
import pytest
import seq2seq_generation
import serving
import torch
import uneven
import windowed
from helpers import ROOT, refused
from measuring import growth_exponent, ratios, summary, win_length
from transformers import ModernBertConfig, RobertaConfig

from luna_hf import LunaConfig
from luna_hf.families.abc.configuration import CONTROLS
from luna_hf.ops.attention import split_heads
from luna_hf.ops.context import make_context
from luna_hf.scripting import UserError

BENCHMARKS = ROOT / "benchmarks"
TINY = ["--lengths", "16", "32", "--layers", "3", "--width", "32", "--heads", "4", "--slots", "8"]
TINY += ["--tokens-per-batch", "64", "--rounds", "2"]
CAUSAL = ["--lengths", "64", "96", "--heads", "2", "--size", "8", "--slots", "8", "--rounds", "2"]
GENERATION = ["--lengths", "16", "64", "--heads", "2", "--width", "32", "--layers", "2", "--vocab-size", "99"]
GENERATION += ["--rounds", "2"]

# Those of Long Range Arena are in test_lra.py.
COMMITTED = sorted(path for path in (BENCHMARKS / "results").rglob("*.json") if not path.name.startswith("lra-"))


def check_header(result, script):
    assert result["command"].startswith(f"python benchmarks/{script}.py")
    assert result["machine"]["cpu"] and result["machine"]["cores"] >= 1 and result["machine"]["threads"] >= 1
    assert {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()
    assert result["date"] and result["protocol"]


def run_here(script, arguments, folder, monkeypatch):
    """The result of a benchmark run in this process, which must write a readable plot as well."""
    monkeypatch.setattr(measuring, "in_own_process", lambda function, *words: function(*words))
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)  # slow in this large process
    assert script.main([*arguments, "--check-floors", "--output", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    result = json.loads(path.read_text())
    check_header(result, script.__name__)
    return path, result


def assert_ratios(measured, numerators, denominators):
    """The ratios of a result are those of its rounds."""
    pairs = zip(numerators["seconds"]["rounds"], denominators["seconds"]["rounds"], strict=True)
    assert measured["rounds"] == pytest.approx([above / below for above, below in pairs], rel=1e-4)


def test_forward_with_padding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(floors, "check", lambda result: [])  # of noise at this size
    models = ["roberta-eager", "modernbert", "luna-tied", "abc-mlp-64"]
    path, result = run_here(encoder, [*TINY, "--padding", "--models", *models], tmp_path, monkeypatch)
    assert path.name.startswith("encoder-forward-3-layer-padding-chosen-cpu-float32-torch")
    assert "luna-tied against roberta" in capsys.readouterr().out
    assert list(result["models"]) == ["roberta", *models]  # roberta always takes part
    assert result["peers"] == ["roberta", "roberta-eager", "modernbert"]
    rivals = {name: {"roberta"} if name in result["peers"] else set(result["peers"]) for name in models}
    assert {name: set(wins) for name, wins in result["wins"].items()} == rivals
    assert [(row["length"], row["rows"]) for row in result["lengths"]] == [(16, 4), (32, 2)]
    for row in result["lengths"]:
        for name, model in row["models"].items():
            assert len(model["seconds"]["rounds"]) == 2 and model["seconds"]["median"] > 0
            assert model["peak_memory_bytes"] >= 0 and len(model["padded_over_unpadded"]["rounds"]) == 2
            assert set(model.get("speed_over", ())) == rivals.get(name, set())
        tied, roberta = row["models"]["luna-tied"], row["models"]["roberta"]
        assert_ratios(tied["speed_over"]["roberta"], roberta, tied)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_of_a_training_step_has_ceilings(checkpointing, tmp_path, monkeypatch, capsys):
    words = ["--mode", "class_step", "--models", "luna-tied", *["--checkpointing"] * checkpointing]
    path, result = run_here(encoder, [*TINY, *words], tmp_path, monkeypatch)
    kind = "-checkpointing" * checkpointing
    assert path.name.startswith(f"encoder-class_step-3-layer{kind}-chosen-cpu-float32-torch")
    assert "luna-tied against roberta" in capsys.readouterr().out and result["floors"] == []
    result["settings"] |= floors.BASE
    result["lengths"][1] |= {"length": 4096}
    luna, roberta = (result["lengths"][1]["models"][name] for name in ("luna-tied", "roberta"))
    for share, holds in ((0.59, True), (0.84, checkpointing), (0.86, False)):
        luna["peak_memory_bytes"], roberta["peak_memory_bytes"] = 100 * share, 100
        assert [check["holds"] for check in floors.check(result)] == [holds]


def test_checkpointing_is_for_training():
    with pytest.raises(UserError):
        encoder.parse([*TINY, "--checkpointing"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_are_built_with_checkpointing(checkpointing):
    words = [*TINY, "--mode", "class_step", *["--checkpointing"] * checkpointing]
    for name in ("roberta", "luna-tied"):
        assert contenders.build(name, encoder.parse(words)).is_gradient_checkpointing == checkpointing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"), [("encoder", [*TINY, "--models", "abc"]), ("causal", CAUSAL), ("generation", GENERATION)]
)
def test_benchmarks_as_scripts(script, words, tmp_path):
    command = [sys.executable, f"benchmarks/{script}.py", *words, "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_variable_length_texts(tmp_path, capsys):
    words = ["--layers", "1", "--width", "32", "--heads", "4", "--slots", "8", "--rounds", "2", "--rows", "3"]
    words += ["--models", "luna-tied", "lavo-64", "--mixes", "sst2", "full", "--output", str(tmp_path)]
    assert uneven.main([*words, "--check-floors"]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    check_header(result, "uneven")
    entries = [(entry["mode"], entry["mix"]) for entry in result["lengths"]]
    assert entries == [(mode, mix) for mode in ("forward", "finetune") for mix in ("sst2", "full")]
    for entry in result["lengths"]:
        assert list(entry["models"]) == ["luna-tied", "lavo-64"]
        assert (entry["real_tokens"] == 1) == (entry["mix"] == "full")
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    settings = {**result["settings"], **floors.UNEVEN_BASE}
    checks = floors.check_uneven({**result, "settings": settings})
    assert [check["bound"] for check in checks] == [1.9, 1.9, 0.98, 0.98] * 2 and not floors.check_uneven(result)
    with refused("lavo-65", error=UserError):
        uneven.parse(["--models", "lavo-65"])


def test_windows_beside_bert(tmp_path, capsys):
    words = ["--layers", "1", "--width", "32", "--heads", "4", "--rounds", "1", "--lengths", "16", "200"]
    words += ["--models", "abc-window-64", "abc-means-16-w128", "luna-64-w256", "abc-selected"]
    assert windowed.main([*words, "--check-floors", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    check_header(result, "windowed")
    assert [row["length"] for row in result["lengths"]] == [16, 200]
    for row in result["lengths"]:
        for name in set(row["models"]) - {"bert"}:
            model = row["models"][name]
            assert_ratios(model["speed_over_bert"], row["models"]["bert"], model)
    assert set(result["mixed"]) == {"luna-64-w256", "abc-selected"}
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    assert not floors.check_windowed(result)
    settings = {**result["settings"], **floors.WINDOWED_BASE}
    bounds = [check["bound"] for check in floors.check_windowed({**result, "settings": settings})]
    assert bounds == [0.97, floors.MIXED_TIME, floors.MIXED_TIME]
    with refused("abc-window-65", error=UserError):
        windowed.parse(["--models", "abc-window-65"])


def test_whole_calls_over_texts(tmp_path, capsys):
    words = ["--layers", "1", "--width", "32", "--heads", "4", "--slots", "8", "--rounds", "2", "--rows", "6"]
    words += ["--models", "luna-tied", "--mixes", "sst2", "together", "--output", str(tmp_path)]
    assert serving.main([*words, "--check-floors"]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    check_header(result, "serving")
    entries = [(entry["call"], entry["mix"]) for entry in result["lengths"]]
    assert entries == [(call, mix) for call in ("pipeline", "encode") for mix in ("sst2", "together")]
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    settings = {**result["settings"], **floors.UNEVEN_BASE, "rows": 64}
    checks = floors.check_serving({**result, "settings": settings})
    assert [check["bound"] for check in checks] == [1.0] * 4 and not floors.check_serving(result)

    texts, tokenizer = serving.make_texts("together", 9, 1), serving.make_tokenizer(512)
    ids = tokenizer(texts)["input_ids"]
    found = [*map(len, ids)]
    assert len(texts) == 9 and max(found) > 2 * min(found)
    lengths = {name: set(found) & set(uneven.MIXES[name]) for name in ("sst2", "mrpc", "imdb")}
    assert all(lengths.values()) and not any(tokenizer.unk_token_id in row for row in ids)
    assert serving.make_texts("together", 9, 1) == texts != serving.make_texts("together", 9, 2)


def test_attention_alone(tmp_path, monkeypatch, capsys):
    words = ["--lengths", "24", "32", "--heads", "2", "--size", "8", "--slots", "4", "--rounds", "2", "--rows", "2"]
    path, result = run_here(attention, words, tmp_path, monkeypatch)
    assert path.name.startswith("attention-2-heads-of-8-cpu-float32-torch")
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
    for row in result["lengths"]:
        assert list(row["contenders"]) == [*attention.OWN, *attention.PEERS]
        linear, cosformer, eager = (
            {"seconds": row["contenders"][name]["training"]["seconds"]} for name in ("linear", "cosformer", "eager")
        )
        measured = row["contenders"]["cosformer"]["training"]
        assert_ratios(measured["speed_over"]["eager"], eager, cosformer)
        assert_ratios(measured["time_over_linear"], cosformer, linear)


@torch.no_grad()
def test_attention_alone_is_that_of_the_models():
    """The contenders are given what a layer's projections make of its states; both kinds of softmax agree."""
    inputs = attention.make_inputs(24, attention.parse(["--heads", "2", "--size", "8", "--rows", "2"]))
    assert torch.allclose(*(attention.attend(name, inputs, 4, False) for name in attention.PEERS), atol=1e-6)
    states = torch.randn(2, 24, 16)
    for name in attention.OWN:
        module = attention.make_module(name, 2, 8, 4).eval()
        key_value = module.key_and_value(states)
        query = split_heads(module.query(states), 2)
        window = 4 if name == "lavo" else 0
        expected, _, _ = module(states, None, make_context(None, 24, states.device, window=window))
        assert torch.allclose(attention.attend(name, (query, *key_value), 4, False).flatten(2), expected, atol=1e-6)


def mebibytes_of_a_call(numbers):
    measuring.steady_allocator()
    return measuring.extra_memory(lambda: torch.ones(numbers), "cpu") / 2**20


def test_peak_memory_of_a_call():
    # In a process of its own, where no memory of earlier tests can be used again.
    assert 60 < measuring.in_own_process(mebibytes_of_a_call, 2**24) < 90
    assert measuring.in_own_process(mebibytes_of_a_call, 1) < 8


@pytest.mark.parametrize("mode", ["mlm_step", "class_step"])
@pytest.mark.parametrize("name", ["roberta", "modernbert", "luna-tied", "abc-mlp-64"])
def test_a_training_step_of_every_kind_learns(name, mode):
    options = encoder.parse([*TINY, "--mode", mode])
    model = encoder.build(name, options)
    batch = encoder.make_batch(options, rows=2, length=16)
    assert mode == "class_step" or 0 < (batch["labels"] != -100).float().mean().item() < 0.5
    before = model(**batch).loss.item()
    step = encoder.make_action(model, options)
    for _ in range(3):
        step(batch)
    assert model.training and model(**batch).loss.item() < before


def test_models_are_chosen_by_name_or_set():
    standard = ["roberta", "modernbert", "luna-untied", "luna-tied", "abc-mlp-128", "abc-mlp-64"]
    standard += ["leapformer", "lavo-64"]
    options = encoder.parse(TINY)
    assert options.names == standard and encoder.subject(options) == "encoder-forward-3-layer"
    controls = encoder.parse([*TINY, "--models", "controls"])
    strategies = {name.removeprefix("abc-").removesuffix("-64") for name in controls.names if name.startswith("abc-")}
    assert strategies == {control.replace("_", "-") for control in CONTROLS}
    assert encoder.subject(controls) == "encoder-forward-3-layer-controls"


@pytest.mark.parametrize(
    ("script", "words", "named"),
    [
        (encoder, ["--models", "abc-mlp-65"], "abc-mlp-65"),
        (encoder, ["--layers", "0"], "0"),
        (encoder, ["--device", "cuda:99"], "cuda:99"),
        (causal, ["--rounds", "0"], "--rounds"),
        (causal_training, ["--lengths", "x"], "--lengths"),
        (attention, ["--rows", "0"], "--rows"),
        (generation, ["--speed"], "--speed"),
        (guarantees, ["--models", "NoModel"], "NoModel"),
    ],
)
def test_a_mistake_is_one_line(script, words, named, tmp_path, capsys):
    assert script.main([*words, "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("layers", ["3", "base"])
@pytest.mark.parametrize(
    ("name", "published"),
    [("roberta", RobertaConfig()), ("modernbert", ModernBertConfig()), ("luna-tied", LunaConfig())],
)
def test_models_have_their_published_shape(name, published, layers):
    config = contenders.configure(name, encoder.parse(["--layers", layers]))
    shape = ["hidden_size", "intermediate_size", "num_attention_heads"]
    shape += ["local_attention"] if name == "modernbert" else []
    shape += ["projection_length", "tie_kv"] if name == "luna-tied" else []
    shape += ["num_hidden_layers", "vocab_size"] if layers == "base" else []
    assert {part: getattr(config, part) for part in shape} == {part: getattr(published, part) for part in shape}
    if name == "modernbert":
        assert config.layer_types == published.layer_types[: config.num_hidden_layers]
    if layers == "3":
        assert config.num_hidden_layers == 3
        step = contenders.configure(name, encoder.parse(["--mode", "mlm_step"]))
        assert step.vocab_size == published.vocab_size


def test_modernbert_runs_in_whole_cycles(capsys):
    with refused("--layers 4", 3, error=UserError):
        encoder.parse(["--layers", "4", "--models", "modernbert"])
    assert encoder.parse(["--layers", "4", "--models", "luna"]).names == ["roberta", "luna-untied", "luna-tied"]
    assert "modernbert" in capsys.readouterr().err
    assert "modernbert" in encoder.parse(["--layers", "6"]).names


def test_flash_contenders_need_the_package_a_gpu_and_half_precision(capsys, monkeypatch):
    flash, rest = ["roberta-flash", "modernbert-flash"], ["--models", "gpu", "--dtype", "bfloat16"]
    without = encoder.parse(rest).names
    assert without[:2] == ["roberta", "modernbert"] and not set(flash) & set(without)
    printed = capsys.readouterr().err
    assert all(name in printed for name in flash)
    with refused("roberta-flash", "flash-attn", error=UserError):
        encoder.parse(["--models", "roberta-flash"])
    monkeypatch.setattr(encoder, "is_flash_attn_2_available", lambda: True)
    assert set(encoder.parse([*rest, "--device", "cuda"]).names) == {*without, *flash}
    with refused("roberta-flash", "bfloat16", error=UserError):
        encoder.parse(["--models", "roberta-flash", "--device", "cuda"])
    for name in flash:
        config = contenders.configure(name, encoder.parse([*rest, "--device", "cuda"]))
        assert config._attn_implementation == "flash_attention_2"
        assert config.model_type == name.removesuffix("-flash")


def test_memory_of_an_accelerator_is_read_in_this_process(monkeypatch):
    monkeypatch.setattr(measuring, "in_own_process", None)
    options = encoder.parse([*TINY, "--device", "cuda"])
    peaks = measuring.measure_memory(lambda name, length, _: len(name) + length, {16: ["a", "bc"]}, options)
    assert peaks == {16: {"a": 17, "bc": 18}}


@pytest.mark.parametrize(("mode", "copies"), [("forward", 1), ("mlm_step", 4)])  # + gradients and two moments
@pytest.mark.parametrize(("name", "layers"), [("roberta", 12), ("modernbert", 22), ("luna-tied", 12)])
def test_whole_models_hold_their_weights(name, layers, mode, copies):
    options = encoder.parse([*TINY, "--layers", "base", "--mode", mode])
    assert encoder.subject(options) == f"encoder-{mode}-base"
    model = encoder.build(name, options)
    described = encoder.describe_model(model, options)
    assert described["layers"] == layers and described["held_bytes"] == copies * 4 * model.num_parameters()
    encoder.make_action(model, options)(encoder.make_batch(options, rows=1, length=16))


def test_names_of_contenders_match_their_configs():
    options = encoder.parse(TINY)
    for name in encoder.contender_names(["controls", "eager"]):
        model = encoder.build(name, options)
        assert model.config._attn_implementation == ("eager" if "eager" in name else "sdpa") and not model.training
        if name.startswith("abc-") and name != "abc-full":
            control, size = name.removeprefix("abc-").rsplit("-", 1)
            assert (model.config.memory_control, model.config.memory_size) == (control.replace("-", "_"), int(size))


def test_contenders_for_short_texts():
    """Their names tell their fields; those that are fast enough at 64 and 128 tokens have floors."""
    options = encoder.parse([*TINY, "--models", "short"])
    assert encoder.subject(options) == "encoder-forward-3-layer-short"
    for name in options.names[1:]:
        _, kind, *rest = name.split("-")
        config = contenders.configure(name, options)
        assert (config.tie_kv, config.tokens_per_slot) == (kind == "tied", int(rest[-1]) if rest else 1)
    short = floors.SPEED["forward", "float32", None]
    held = {name for name in options.names if {64, 128} <= short.get(name, {}).keys()}
    assert held == {"luna-tied-per-4", "luna-untied-per-8", "luna-tied-per-8"}


def test_padded_batches_have_the_documented_shape():
    options = encoder.parse(TINY)
    plain, padded = (encoder.make_batch(options, rows=4, length=32, padded=padded) for padded in (False, True))
    assert "attention_mask" not in plain and plain["input_ids"].shape == padded["input_ids"].shape
    assert padded["attention_mask"].sum(-1).tolist() == [24, 24, 32, 32]
    assert (padded["input_ids"][0, 24:] == 1).all()
    assert encoder.rows_for(16384, encoder.parse([*TINY, "--padding"])) == 2


def test_guarantees(tmp_path, capsys):
    models = ["LunaModel", "RobertaModel", "FNetModel", "MraModel"]
    assert guarantees.main(["--models", *models, "--no-cost", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("guarantees-cpu-float32-torch*.json")
    result = json.loads(path.read_text())
    check_header(result, "guarantees")
    luna, roberta, fnet, mra = result["results"].values()
    assert all(check["holds"] for check in luna.values()) and len(luna) == 6
    assert all(check["holds"] for check in roberta.values())
    # The harness must be able to fail: FNet mixes pads into every token, Mra without its kernel mixes nothing.
    assert not fnet["pad_content"]["holds"] and fnet["deterministic"]["holds"]
    assert mra == {}
    table = path.with_suffix(".md").read_text()
    assert "| no attention |" in table and table == capsys.readouterr().out
    failed = guarantees.attempt(lambda: [].pop())
    assert "IndexError" in failed["error"] and "Error" not in guarantees.cell("right_padding", failed)


# ---- arithmetic ----


def test_summary_and_ratios():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    three = {"median": 2.0, "quartiles": [1.5, 2.5], "min": 1.0, "max": 3.0, "rounds": [3.0, 1.0, 2.0]}
    assert summary([3.0, 1.0, 2.0]) == three
    assert summary([4.0])["quartiles"] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({512: 1.2, 2048: 1.5}, 512),  # ahead from the start: the shortest length measured
        ({2048: 2.0, 512: 0.5}, 1024),  # halfway in log length and log ratio, in any order
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
    with pytest.raises(ValueError):
        growth_exponent({512: 1.0})


ENCODER, PADDED = "encoder-forward-1-layer-abc-cpu-float32", "encoder-forward-2-layer-padding-abc-cpu"
CHECKS = {"encoder": floors.check, "causal": causal.check, "generation": generation.check}


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        (ENCODER, "lengths 4 models luna-untied speed_over roberta median", 3.99),
        (ENCODER, "lengths 0 models luna-untied peak_memory_bytes", 2**40),
        (ENCODER, "growth exponents luna-untied median", 1.06),
        (PADDED, "lengths 0 models luna-untied padded_over_unpadded median", 1.06),
        ("causal-attention", "lengths 0 contenders abc forward speed_over abc-outer median", 19.9),
        ("causal-attention", "lengths 1 contenders abc forward speed_over sdpa median", 7.9),
        ("causal-attention", "growth abc forward median", 2.11),
        ("causal-attention", "errors 0 relative_rms", math.nan),
        ("generation-4-layer-cpu", "lengths 4 models luna-64 speed_over gpt2 median", 3.9),
        ("generation-4-layer-cpu", "lengths 4 models luna-64 state_bytes", 2**40),
        ("generation-4-layer-cpu", "growth luna-64 median", 1.06),
        ("generation-4-layer-cpu", "generate luna-64 median", 1.11),
    ],
)
def test_a_missed_floor_fails_alone(name, place, value):
    (path,) = (BENCHMARKS / "results").glob(f"{name}*.json")
    result, check = json.loads(path.read_text()), CHECKS[name.split("-")[0]]
    before = [one["holds"] for one in check(result)]
    *keys, last = (int(key) if key.isdigit() else key for key in place.split())
    functools.reduce(operator.getitem, keys, result)[last] = value
    after = [one["holds"] for one in check(result)]
    assert before.count(False) + 1 == after.count(False) and len(before) == len(after)
    result["settings"]["heads"] = 8
    assert not any("speed" in one["what"] for one in check(result))  # floors of speed hold for one size


# ---- committed results ----


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_name_their_origin(path):
    result, name = json.loads(path.read_text()), path.name.split("-")[0]
    scripts = (
        attention,
        causal,
        causal_training,
        deployment,
        encoder,
        generation,
        guarantees,
        seq2seq_generation,
        serving,
        uneven,
        windowed,
    )
    script = {module.__name__: module for module in scripts}[name]
    check_header(result, name)
    script.parse(result["command"].split()[2:])
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text())
    assert path.stem.endswith("torch" + result["versions"]["torch"].split("+")[0])
    if name == "encoder":
        assert path.with_suffix(".png").exists() or len(result["lengths"]) == 1
        assert encoder.table(result) and encoder.conclusions(result)
    else:
        text = script.markdown(result["results"] if name == "guarantees" else result)
        assert path.with_suffix(".md").read_text() == text + "\n"
    if name in ("causal", "generation", "seq2seq_generation"):
        assert path.with_suffix(".png").exists() or len(result["lengths"]) == 1
        assert result["floors"] and result["floors"] == script.check(result)
        # A repeated run in a subfolder shows the spread, and may be one on a busy machine.
        assert path.parent != BENCHMARKS / "results" or all(check["holds"] for check in result["floors"])
