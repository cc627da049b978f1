"""Parameter groups: learning rates and frozen steps, on any number of passes, and after an interruption."""

import json

import pretrain_mlm
import pytest
import torch
from engine import groups
from engine.run import Run
from tiny_training import (
    DEMO,
    Killed,
    arguments,
    batch_of,
    dies_at_call,
    losses,
    make_run,
    masked_rows,
    run,
    same_weights,
    small_model,
    start,
)

from luna_hf.scripting import UserError

# Of the tiny Luna: the packed sequence and what packs, its first layer, and the rest.
PACK = {"match": "pack", "learning_rate": 0.5, "frozen_steps": 2}
FIRST = {"match": r"layer\.0\.", "frozen_steps": 3}


def optimizer_groups(model, entries, max_steps=10, rate=0.1):
    return groups.parameter_groups(model, 0.01, rate, groups.read_groups(entries), max_steps)


def names_of(model, group):
    held = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


# ---- who belongs where ----


def test_without_groups_decay_is_kept_off_vectors():
    decayed, kept = groups.parameter_groups(small_model("luna"), 0.01)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.01, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in kept["params"]} == {1}
    total = sum(p.numel() for group in (decayed, kept) for p in group["params"])
    assert total == sum(p.numel() for p in small_model("luna").parameters())


def test_the_first_match_counts_and_the_others_come_first():
    model = small_model("luna")
    found = optimizer_groups(model, [PACK, FIRST])
    assert [(group["lr"], group["weight_decay"], group["frozen_steps"]) for group in found] == [
        *((0.1, decay, 0) for decay in (0.01, 0.0)),
        *((0.5, decay, 2) for decay in (0.01, 0.0)),
        *((0.1, decay, 3) for decay in (0.01, 0.0)),
    ]
    owned = [names_of(model, group) for group in found]
    assert sum(map(len, owned)) == len(list(model.parameters()))
    assert "luna.encoder.layer.0.attention.self.pack.query.weight" in owned[2]
    assert "luna.encoder.layer.0.attention.self.query.bias" in owned[5]
    assert all("pack" not in name and "layer.0." not in name for name in owned[0] | owned[1])


def test_frozen_for_the_whole_run_is_not_trained_at_all():
    model = small_model("luna")
    found = optimizer_groups(model, [{"match": "embeddings", "frozen_steps": 10}])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "embeddings" in name} and frozen
    assert not frozen & set.union(*(names_of(model, group) for group in found))


# ---- updates ----


def updates(count, passes=1):
    rows = masked_rows()
    size = len(rows) // passes
    return [[batch_of(rows[first : first + size]) for first in range(0, len(rows), size)] for _ in range(count)]


def trained(tmp_path, entries, steps, passes=1, max_steps=10, clip=1e9):
    """The model after some steps of AdamW, the names that have moments, and the norms of the gradient."""
    model = small_model("luna")
    optimizer = torch.optim.AdamW(optimizer_groups(model, entries, max_steps, rate=1e-2))
    settings = {"max_steps": steps, "max_grad_norm": clip}
    made = make_run(tmp_path, updates(steps, passes), model=model, optimizer=optimizer, **settings)
    made.train()
    moved = {name for name, parameter in model.named_parameters() if parameter in made.optimizer.state}
    return dict(model.named_parameters()), moved, made.log.series("train", "grad_norm")[1]


@pytest.mark.parametrize("passes", [1, 3])
def test_a_frozen_group_waits_and_then_changes(tmp_path, passes):
    start = dict(small_model("luna").named_parameters())
    pack = {name for name in start if "pack" in name}
    # Nobody reads the packed sequence after the last layer.
    unread = {f"luna.encoder.layer.1.attention.self.packed_layer_norm.{kind}" for kind in ("weight", "bias")}
    for steps in (2, 3):
        after, moments, _ = trained(tmp_path / str(steps), [PACK], steps, passes)
        changed = {name for name in start if not torch.equal(start[name], after[name])}
        assert changed == start.keys() - (pack if steps == 2 else unread)
        assert moments == start.keys() - (pack if steps == 2 else set())  # none was kept of a dropped gradient


def test_a_dropped_gradient_does_not_count_in_the_norm(tmp_path):
    _, _, whole = trained(tmp_path / "a", [], 1)
    _, _, rest = trained(tmp_path / "b", [{"match": "embeddings", "frozen_steps": 1}], 1)
    _, _, other = trained(tmp_path / "c", [{"match": "^(?!.*embeddings)", "frozen_steps": 1}], 1)
    assert whole[0] ** 2 == pytest.approx(rest[0] ** 2 + other[0] ** 2, rel=1e-4)
    assert min(rest + other) > 0.1


def test_a_group_that_was_frozen_begins_with_fresh_moments(tmp_path):
    """Its first step of AdamW has the size of its rate, in every entry with a gradient."""
    before, _, _ = trained(tmp_path / "a", [PACK], 2)
    after, _, _ = trained(tmp_path / "b", [PACK], 3, max_steps=10)
    name = "luna.encoder.layer.0.attention.self.pack.key_value.weight"
    rate = 0.5 * 1 / 3  # the schedule of three steps, at its last
    step = (after[name] - before[name] * (1 - rate * 0.01)).abs()
    assert step.median().item() == pytest.approx(rate, rel=0.05)


# ---- whole runs ----

ENTRIES = "[{match: pack, learning_rate: 1e-2, frozen_steps: 3}, {match: word_embeddings, frozen_steps: 100}]"
OPTIONS = {"parameter_groups": ENTRIES, "max_steps": 6, "save_steps": 2, "eval_steps": 3, "log_steps": 2}
OPTIONS["model__hidden_dropout_prob"] = 0.1


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    run(folder, data=corpus, **OPTIONS)
    return folder


def test_killed_and_resumed_is_uninterrupted(corpus, tmp_path, monkeypatch, capsys, uninterrupted):
    words = arguments(DEMO, tmp_path / "out", data=corpus, **{**OPTIONS, "save_steps": 1})
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, Run, "save", 1)  # while some parameters are frozen
        pretrain_mlm.main(words)
    assert pretrain_mlm.main([*words, "--parameter-groups", "[]"]) == 2
    assert "parameter_groups" in capsys.readouterr().err
    assert start(pretrain_mlm, words) == 0
    assert losses(tmp_path / "out") == losses(uninterrupted) and same_weights(tmp_path / "out", uninterrupted)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("control", "'control'"),
        ({"learning_rate": 1.0}, "`match`"),
        ({"match": "a", "lr": 1.0}, "`lr`.*frozen_steps, learning_rate, match"),
        ({"match": "(a"}, r"'\(a'"),
        ({"match": 3}, "`match` is 3"),
        ({"match": "a", "learning_rate": 0.0}, "is 0.0"),
        ({"match": "a", "learning_rate": "fast"}, "is 'fast'"),
        ({"match": "a", "learning_rate": True}, "is True"),
        ({"match": "a", "frozen_steps": -1}, "is -1"),
        ({"match": "a", "frozen_steps": 0.5}, "is 0.5"),
    ],
)
def test_a_mistake_in_an_entry_is_found_when_the_recipe_is_read(entry, named):
    with pytest.raises(UserError, match=f"`parameter_groups`.*{named}"):
        pretrain_mlm.read_recipe(DEMO, ["--parameter_groups", json.dumps([entry])])


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ("[{match: control}]", "'control' .*luna.embeddings"),
        ("[{match: layer}, {match: layer.0}]", "'layer.0'"),
        ("[{match: .*, frozen_steps: 3}]", "the whole run"),
        ("[{match: pack, frozen_steps: 2}, {match: ., frozen_steps: 1}]", "the first 1 updates"),
    ],
)
def test_groups_must_fit_the_model(entries, named):
    names = [name for name, _ in small_model("luna").named_parameters()]
    with pytest.raises(UserError, match=named):
        groups.check_groups(names, pretrain_mlm.read_recipe(DEMO, ["--parameter_groups", entries]).groups, 3)
