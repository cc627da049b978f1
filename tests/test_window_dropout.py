"""Window dropout, and the loss of a mixed model without its window or its slots."""

import json
from types import SimpleNamespace

import pretrain_clm
import pretrain_mlm
import pytest
import torch
from engine import log, loop, windows
from engine.windows import WindowDropout
from helpers import slots_of, tiny_model
from tiny_training import CAUSAL, DEMO, arguments, batch_of, make_run, masked_rows, run, start
from torch.nn.functional import cross_entropy

from luna_hf.scripting import UserError

STEPS = 4000


# ---- the draw ----


def test_the_probability_of_drawing_falls_linearly_and_windows_are_alike():
    draws = [WindowDropout([0, 16], 0.8, 0.2).draw(step, STEPS, seed=0) for step in range(STEPS)]
    assert set(draws) == {None, 0, 16}
    for quarter, expected in enumerate([0.725, 0.575, 0.425, 0.275]):
        part = draws[quarter * 1000 : (quarter + 1) * 1000]
        drawn = [window for window in part if window is not None]
        # 1,000 draws: four standard deviations are 0.063, and 0.12 of the 275 drawn.
        assert len(drawn) / 1000 == pytest.approx(expected, abs=0.063)
        assert drawn.count(0) / len(drawn) == pytest.approx(0.5, abs=0.12)


def test_by_default_the_first_update_draws_and_the_last_does_not():
    for seed in range(20):
        found = [WindowDropout([4]).draw(step, 3, seed) for step in (0, 2)]
        assert found == [4, None]
    # Seeds and steps give different draws.
    orders = [tuple(WindowDropout([0, 1], 1, 1).draw(step, 9, seed) for step in range(9)) for seed in range(20)]
    assert len(set(orders)) > 15 and all(len(set(order)) == 2 for order in orders[:3])


def test_all_passes_of_an_update_read_the_window_that_its_step_draws(tmp_path):
    model, read = tiny_model("abc_memory", "mlm", local_window=4).train(), []
    forward = model.forward
    model.forward = lambda **inputs: (read.append(inputs.get("local_window")), forward(**inputs))[1]
    dropout, rows = WindowDropout([0, 2], 0.5, 0.5), masked_rows()
    updates = [[batch_of(rows[:3]), batch_of(rows[3:])] for _ in range(8)]
    made = make_run(tmp_path, updates, model=model, windows=dropout, seed=7, max_steps=8)
    for step in range(8):
        made.counters.step = step
        made.update()
    expected = [dropout.draw(step, 8, 7) for step in range(8)]
    assert read == [window for window in expected for _ in range(2)] and {None, 0, 2} == set(expected)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"windows": [0], "chance": 0.5}, "`chance`"),
        ({"probability": 0.5}, "`windows`"),
        ({"windows": [0, -1]}, r"\[0, -1\]"),
        ({"windows": []}, r"\[\]"),
        ({"windows": [0], "probability": 1.5}, r"`probability` is 1\.5"),
        ({"windows": [0], "final_probability": "no"}, "`final_probability` is 'no'"),
    ],
)
def test_mistakes_in_the_section_are_reported(section, named):
    with pytest.raises(UserError, match=named):
        windows.read_window_dropout(section)


@pytest.mark.parametrize(("own", "named"), [(0, "`local_window` is 0"), (8, r"\[0, 16\].* is 8")])
def test_windows_beyond_the_models_are_refused(own, named):
    with pytest.raises(UserError, match=named):
        WindowDropout([0, 16]).check(own)
    WindowDropout([0, 16]).check(16)


def test_a_recipe_for_a_model_without_a_window_is_refused(corpus, tmp_path, capsys):
    words = ["--window_dropout", "{windows: [0]}"]
    assert pretrain_mlm.main([*arguments(DEMO, tmp_path / "out", data=corpus), *words]) == 2
    assert "`local_window` is 0" in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- the loss without a part ----


@torch.no_grad()
@pytest.mark.parametrize("family", ["luna", "abc_memory", "lavo"])
def test_switched_losses_are_those_of_passes_that_read_one_part(family, tmp_path):
    model, rows = tiny_model(family, "mlm", **slots_of(family, 4), local_window=4), masked_rows()
    made = make_run(tmp_path, [[]], model=model)
    found = loop.switched_losses(made.accelerator, made.module, rows, 4, False)
    batch, places = batch_of(rows), batch_of(rows)["labels"] != -100
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for name, reads in {"slots_off_loss": {"read_slots": False}, "window_off_loss": {"local_window": 0}}.items():
        expected = cross_entropy(model(**inputs, **reads).logits[places], batch["labels"][places])
        assert found[name] == pytest.approx(expected.item(), rel=1e-5)
    both = loop.evaluate(made.accelerator, made.module, rows, 4).loss
    assert len({round(value, 6) for value in (*found.values(), both)}) == 3


def test_models_that_are_not_mixed_have_none(tmp_path):
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    for model in (tiny_model("luna", "mlm"), tiny_model("abc_memory", "mlm", memory_control="sliding_window")):
        assert loop.switched_losses(accelerator, model, masked_rows(), 4, False) == {}


def check_files(folder, figures):
    entries = [entry for entry in log.read_log(folder / "log.jsonl") if entry["kind"] == "held_out"]
    card = (folder / "README.md").read_text()
    for name, words in {"slots_off_loss": "window alone", "window_off_loss": "slots alone"}.items():
        assert figures[name] == pytest.approx(entries[-1][name], rel=1e-5)
        assert f"| {words} | {figures[name]:.3f} |" in card
    assert f"| window and slots | {figures['held_out_loss']:.3f} |" in card


def test_a_run_reports_the_loss_of_each_part(corpus, tmp_path, capsys):
    mixed = {"model__local_window": 4, "window_dropout": "{windows: [0, 2]}"}
    figures = run(tmp_path / "out", data=corpus, **mixed)
    check_files(tmp_path / "out", figures)
    assert f"slots off {figures['slots_off_loss']:.3f}, window off" in capsys.readouterr().out


def test_so_does_a_causal_run(corpus, tmp_path):
    own = {"sample_tokens": 4, "model__local_window": 4, "window_dropout": "{windows: [0]}"}
    assert start(pretrain_clm, arguments(CAUSAL[0], tmp_path / "out", data=corpus, **own)) == 0
    check_files(tmp_path / "out", json.loads((tmp_path / "out" / "metrics.json").read_text()))
