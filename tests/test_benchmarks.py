"""The benchmarks run at tiny size, their arithmetic is right, and committed results name their origin."""

import json
import math
import re
import subprocess
import sys

import attention
import contenders
import encoder
import floors
import generation
import guarantees
import measuring
import pytest
import torch
import uneven
from helpers import ROOT, refused
from summaries import growth, growth_exponent, ratios, summary, win_length
from transformers import ModernBertConfig, RobertaConfig

from luna_hf import LunaConfig
from luna_hf.ops.attention import split_heads
from luna_hf.ops.context import make_context
from luna_hf.scripting import UserError

BENCHMARKS = ROOT / "benchmarks"
TINY = ["--lengths", "16", "32", "--layers", "3", "--width", "32", "--heads", "4", "--slots", "8"]
TINY += ["--tokens-per-batch", "64", "--rounds", "2"]
GENERATION = ["--lengths", "16", "64", "--heads", "2", "--width", "32", "--layers", "2", "--vocab-size", "99"]
GENERATION += ["--rounds", "2"]
TEXTS = ["--layers", "1", "--width", "32", "--heads", "4", "--slots", "8", "--rounds", "1", "--rows", "3"]
# Those of Long Range Arena are in test_lra.py.
COMMITTED = sorted(path for path in (BENCHMARKS / "results").glob("*.json") if not path.name.startswith("lra-"))


def check_header(result, script):
    assert result["command"].startswith(f"python benchmarks/{script}.py")
    assert result["machine"]["cpu"] and result["machine"]["cores"] >= 1 and result["machine"]["threads"] >= 1
    assert {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()
    assert result["date"] and result["protocol"]


def run_here(script, arguments, folder, monkeypatch):
    """The path and result of a benchmark run in this process; every ratio is that of the rounds."""
    monkeypatch.setattr(measuring, "in_own_process", lambda function, *words: function(*words))
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)  # slow in this large process
    assert script.main([*arguments, "--check-floors", "--output", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    result = json.loads(path.read_text())
    check_header(result, script.__name__)
    for entry in result["lengths"]:
        for model in entry["models"].values():
            for peer, over in model.get("speed_over", {}).items():
                if peer in entry["models"]:
                    rounds = entry["models"][peer]["seconds"]["rounds"]
                    assert over["rounds"] == pytest.approx(ratios(rounds, model["seconds"]["rounds"]), rel=1e-3)
    return path, result


# ---- encoders ----


def test_forward_with_padding(tmp_path, monkeypatch, capsys):
    models = ["roberta-eager", "modernbert", "luna-tied", "abc-mlp-64"]
    path, result = run_here(encoder, [*TINY, "--padding", "--models", *models], tmp_path, monkeypatch)
    assert path.name.startswith("encoder-forward-3-layer-padding-chosen-cpu-float32-torch")
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "luna-tied against roberta" in capsys.readouterr().out
    assert list(result["models"]) == ["roberta", *models]  # roberta always takes part
    assert result["peers"] == ["roberta", "roberta-eager", "modernbert"]
    rivals = {name: {"roberta"} if name in result["peers"] else set(result["peers"]) for name in models}
    assert [(row["length"], row["rows"]) for row in result["lengths"]] == [(16, 4), (32, 2)]
    for row in result["lengths"]:
        for name, model in row["models"].items():
            assert len(model["seconds"]["rounds"]) == 2 and model["seconds"]["median"] > 0
            assert model["peak_memory_bytes"] >= 0 and len(model["padded_over_unpadded"]["rounds"]) == 2
            assert set(model.get("speed_over", ())) == rivals.get(name, set())


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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_are_built_with_checkpointing(checkpointing):
    words = [*TINY, "--mode", "class_step", *["--checkpointing"] * checkpointing]
    for name in ("roberta", "luna-tied"):
        assert contenders.build(name, encoder.parse(words)).is_gradient_checkpointing == checkpointing
    with pytest.raises(UserError):
        encoder.parse([*TINY, "--checkpointing"])


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


def test_flash_contenders_need_the_package_a_gpu_and_half_precision(monkeypatch):
    half = ["--models", "gpu", "--dtype", "bfloat16"]
    assert not any("flash" in name for name in encoder.parse(half).names)
    with refused("roberta-flash", "flash-attn", error=UserError):
        encoder.parse(["--models", "roberta-flash"])
    monkeypatch.setattr(encoder, "is_flash_attn_2_available", lambda: True)
    assert {"roberta-flash", "modernbert-flash"} <= set(encoder.parse([*half, "--device", "cuda"]).names)
    with refused("roberta-flash", "bfloat16", error=UserError):
        encoder.parse(["--models", "roberta-flash", "--device", "cuda"])


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


def test_padded_batches_have_the_documented_shape():
    options = encoder.parse(TINY)
    plain, padded = (encoder.make_batch(options, rows=4, length=32, padded=padded) for padded in (False, True))
    assert "attention_mask" not in plain and plain["input_ids"].shape == padded["input_ids"].shape
    assert padded["attention_mask"].sum(-1).tolist() == [24, 24, 32, 32]
    assert (padded["input_ids"][0, 24:] == 1).all()
    assert encoder.rows_for(16384, encoder.parse([*TINY, "--padding"])) == 2


# ---- other benchmarks ----


def test_variable_length_texts(tmp_path, monkeypatch):
    words = [*TEXTS, "--models", "luna-tied", "--mixes", "sst2", "together"]
    path, result = run_here(uneven, [*words, "--calls", "finetune", "encode"], tmp_path, monkeypatch)
    assert path.name.startswith("uneven-finetune-encode-cpu-float32")
    entries = [(entry["call"], entry["mix"]) for entry in result["lengths"]]
    assert entries == [(call, mix) for call in ("finetune", "encode") for mix in ("sst2", "together")]
    for entry in result["lengths"]:
        peers = {"roberta", "padded"} if entry["call"] == "finetune" else {"roberta"}
        assert set(entry["models"]["luna-tied"]["speed_over"]) == peers
    texts, tokenizer = uneven.make_texts("together", 9, 1), uneven.make_tokenizer(512)
    ids = tokenizer(texts)["input_ids"]
    assert all({*map(len, ids)} & set(uneven.MIXES[name]) for name in ("sst2", "mrpc", "imdb"))
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert uneven.make_texts("together", 9, 1) == texts != uneven.make_texts("together", 9, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_alone(causal, tmp_path, monkeypatch):
    words = ["--lengths", "24", "32", "--heads", "2", "--size", "8", "--slots", "4", "--rounds", "2", "--rows", "2"]
    path, result = run_here(attention, [*words, *["--causal"] * causal], tmp_path, monkeypatch)
    assert path.name.startswith("attention-causal" if causal else "attention-2-heads-of-8-cpu-float32")
    for entry in result["lengths"]:
        assert list(entry["models"]) == list(attention.CONTENDERS[causal])


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_attention_alone_is_that_of_the_models(causal):
    """The contenders are given what a layer's projections make of its states; both kinds of softmax agree."""
    states = torch.randn(2, 24, 16)
    for name in ("leapformer", "lavo"):
        module = attention.make_module(name, causal, 2, 8, 4).eval()
        key_value = module.key_and_value(states)
        query, window = split_heads(module.query(states), 2), 4 if name == "lavo" else 0
        expected = module(states, None, make_context(None, 24, states.device, window=window))[0]
        found = attention.attend(name, causal, [query, *key_value, torch.zeros(2, 2, 24, 4)])
        found = found.transpose(1, 2) if found.shape[:3] == (2, 2, 24) else found
        assert torch.allclose(found.flatten(2), expected, atol=1e-6)
    inputs = attention.make_inputs(24, 2, 2, 8, 4, "cpu")
    if not causal:
        softmax = [attention.attend(name, False, inputs) for name in ("eager", "sdpa")]
        assert torch.allclose(*softmax, atol=1e-6)


@pytest.mark.parametrize("kind", generation.KINDS)
def test_generation(kind, tmp_path, monkeypatch):
    path, result = run_here(generation, [*GENERATION, "--kind", kind], tmp_path, monkeypatch)
    own, peers, calls, _ = generation.KINDS[kind]
    assert path.name.startswith(f"generation-{kind}-2-layer-cpu-float32-torch") and result["peers"] == peers
    assert [(entry["length"], entry["call"]) for entry in result["lengths"]] == [
        (n, c) for n in (16, 64) for c in calls
    ]
    short, long = (result["lengths"][place]["models"] for place in (len(calls) - 1, -1))
    assert list(long) == [*own, *peers]
    for name in own if kind == "decoding" else ():
        assert short[name]["state_bytes"] == long[name]["state_bytes"] > 0
        assert long[name]["peak_memory_bytes"] >= long[name]["state_bytes"]
    # Keys and values of 2 layers of width 32 in float32; translation: and of the start token.
    tokens = {"decoding": 64, "translation": 64 + 1}
    if kind in tokens:
        assert long[peers[0]]["state_bytes"] == tokens[kind] * 2 * 2 * 32 * 4


@pytest.mark.parametrize("name", [*generation.OWN, generation.DYNAMIC, generation.STATIC])
def test_a_step_after_a_context_continues_the_text(name):
    setting = generation.parse(GENERATION)
    model = generation.build(name, setting)
    states = generation.make_states(name, model, [16, 64], setting)
    if name in generation.OWN:
        for length, cache in states.items():
            logits = generation.make_step(model, cache, length, setting)()
            context, token = generation.random_tokens(64, setting)[:, :length], generation.random_tokens(1, setting)
            with torch.no_grad():
                expected = model(torch.cat([context, token], dim=1)).logits[:, -1:]
            assert torch.allclose(logits, expected, atol=1e-5)
    else:  # both caches hold the same
        other = generation.fill_cache(generation.DYNAMIC, model, 64, setting)
        logits = [generation.make_step(model, cache, 64, setting)() for cache in (states[64], other)]
        assert states[64].get_seq_length() == 65 and torch.allclose(*logits, atol=1e-5)


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


def mebibytes_of_a_call(numbers):
    measuring.steady_allocator()
    return measuring.extra_memory(lambda: torch.ones(numbers), "cpu") / 2**20


def test_peak_memory_of_a_call():
    # In a new process, which cannot reuse memory of earlier tests.
    assert 60 < measuring.in_own_process(mebibytes_of_a_call, 2**24) < 90
    assert measuring.in_own_process(mebibytes_of_a_call, 1) < 8


@pytest.mark.parametrize(
    ("script", "words", "named"),
    [
        (encoder, ["--models", "abc-mlp-65"], "abc-mlp-65"),
        (encoder, ["--layers", "0"], "0"),
        (encoder, ["--device", "cuda:99"], "cuda:99"),
        (attention, ["--rows", "0"], "--rows"),
        (generation, ["--lengths", "x"], "--lengths"),
        (uneven, ["--models", "lavo-65"], "lavo-65"),
        (guarantees, ["--models", "NoModel"], "NoModel"),
    ],
)
def test_a_mistake_is_one_line(script, words, named, tmp_path, capsys):
    assert script.main([*words, "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["benchmarks/encoder", "benchmarks/lra/run", "experiments/multi30k", "conversion/roberta_to_abc"]
)
def test_commands_start_in_any_folder(script, tmp_path):
    """Each command finds its modules from another working directory, without the path of the tests."""
    command = [sys.executable, str(ROOT / f"{script}.py"), "--help"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


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


def test_growth_is_that_of_a_row():
    def entry(length, rows, seconds):
        return {"length": length, "rows": rows, "models": {"m": {"seconds": {"rounds": seconds}}}}

    result = {"lengths": [entry(16, 1, [9.0]), entry(1024, 4, [4.0, 8.0]), entry(2048, 2, [4.0, 16.0])]}
    assert growth(result, within=(1024, 4096))["m"]["rounds"] == pytest.approx([1.0, 2.0])
    assert not growth(result, within=(2048, 4096))


# ---- floors ----


@pytest.mark.parametrize(
    ("name", "entry", "model", "figure", "value"),
    [
        ("encoder-forward-1-layer-abc-cpu-float32", 4, "luna-untied", "speed roberta", 3.99),
        ("encoder-class_step-base-chosen", 2, "luna-tied", "memory", 2**40),
        ("encoder-forward-6-layer-windowed-cpu-float32", 0, "abc-means-16-w256", "speed bert", 0.96),
        ("attention-causal", 2, "abc", "speed sdpa", 7.9),
        ("attention-causal", 3, "scan", "memory", 2**40),
        ("generation-decoding-4-layer-cpu", 4, "luna-64", "speed gpt2", 3.9),
        ("uneven-forward", 0, "luna-tied", "speed padded", 1.89),
    ],
)
def test_a_missed_floor_fails_alone(name, entry, model, figure, value):
    (path,) = (BENCHMARKS / "results").glob(f"{name}*.json")
    result, script = json.loads(path.read_text()), name.split("-")[0]
    change, key = result["lengths"][entry]["models"][model], "peak_memory_bytes"
    if figure != "memory":
        change, key = change["speed_over"][figure.split()[1]], "median"
    before = [one["holds"] for one in floors.check(script, result)]
    change[key] = value
    after = [one["holds"] for one in floors.check(script, result)]
    assert before.count(False) + 1 == after.count(False) and len(before) == len(after)
    result["settings"]["threads"] = 2
    assert not floors.check(script, result)  # they hold for one thread


# ---- committed results ----


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_name_their_origin(path):
    result, name = json.loads(path.read_text()), path.name.split("-")[0]
    check_header(result, name)
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text())
    assert path.stem.endswith("torch" + result["versions"]["torch"].split("+")[0])
    if name == "guarantees":
        assert path.with_suffix(".md").read_text() == guarantees.markdown(result["results"]) + "\n"
