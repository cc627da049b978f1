"""The benchmark of windows beside BERT: its contenders are what their names say, and its floors can fail."""

import functools
import json
import operator

import floors
import pytest
import torch
import windowed
from contenders import WINDOWED, build
from helpers import ROOT

TINY = ["--layers", "1", "--width", "48", "--lengths", "40"]


@pytest.fixture
def result():
    (path,) = (ROOT / "benchmarks" / "results").glob("windowed-6-layer-cpu-float32-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WINDOWED)
def test_names_tell_the_fields(name):
    config = build(name, windowed.parse(TINY)).config
    window, selected, slots = windowed.describe(name)
    assert config._attn_implementation == "sdpa" and config.type_vocab_size == 2
    if name == windowed.ALONE:
        assert (config.memory_control, config.memory_size, slots) == ("sliding_window", window, "none")
        return
    assert config.local_window == window and str(getattr(config, config.slots_field)) in slots
    many = config.num_selected_tokens
    assert selected == (f"{many}, by {config.num_selection_queries} queries" if many else "none")
    for part in name.split("-")[1:]:
        assert part in {"means", "mlp", "selected", f"w{window}", str(many), *slots.split(", ")}


def test_bert_has_the_same_shape():
    options = windowed.parse([])
    bert, own = (build(name, options).config for name in (windowed.PEER, "abc-means-16-w256"))
    shape = ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
    shape += ["max_position_embeddings", "type_vocab_size", "_attn_implementation"]
    assert {part: getattr(bert, part) for part in shape} == {part: getattr(own, part) for part in shape}
    assert (bert.num_hidden_layers, bert.hidden_size, bert.intermediate_size) == (6, 384, 1536)
    assert bert.max_position_embeddings == 8192


@torch.no_grad()
def test_luna_runs_as_its_heads_run_it(monkeypatch):
    given = []
    monkeypatch.setattr(windowed, "make_action", lambda model, options: given.append)
    calls = windowed.make_calls(windowed.parse([*TINY, "--models", "luna-64-w64", "abc-means-16-w64"]))
    for call in calls.values():
        call({"input_ids": None})
    assert [batch.get("reads_packed_states") for batch in given] == [None, False, None]


def test_long_texts_get_fewer_rounds():
    assert [windowed.rounds_for(length, 4) for length in (16, 128, 512, 1024, 4096, 8192)] == [20, 20, 8, 4, 2, 2]


@pytest.mark.parametrize(
    ("place", "holds", "misses"),
    [
        ("lengths 0 models abc-means-16-w256 speed_over_bert median", 0.97, 0.96),
        ("lengths 6 models luna-64-w128 speed_over_bert median", 4.5, 4.49),
        ("lengths 5 models abc-selected time_over_window median", 1.35, 1.36),
        ("mixed abc-selected quartiles", [1.0, 1.1], [1.01, 1.1]),
    ],
)
def test_a_missed_floor_fails_alone(place, holds, misses, result):
    *keys, last = (int(key) if key.isdigit() else key for key in place.split())
    entry = functools.reduce(operator.getitem, keys, result)
    checks = []
    for entry[last] in (holds, misses):
        checks.append([check["holds"] for check in floors.check_windowed(result)])
    assert [pair for pair in zip(*checks, strict=True) if pair[0] != pair[1]] == [(True, False)]
    result["settings"]["threads"] = 2
    assert not floors.check_windowed(result)
