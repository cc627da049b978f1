"""Long Range Arena: every model takes every kind of input, runs resume exactly, tables are right."""

import dataclasses
import json
import re
import shutil

import measuring
import numpy as np
import pytest
import report
import run
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from helpers import refused
from lra import cells, models, tables
from lra.recipes import FOLDER, load_recipe, names
from lra.tasks import NAMES, Task
from safetensors.torch import load_file
from transformers import TrainerCallback

from luna_hf import AbcConfig, AbcModel

KINDS = {"listops": ("tokens", 24, 10), "retrieval": ("pairs", 24, 2), "pathfinder": ("pixels", 256, 2)}
EVERY = [*models.ENCODERS, "luna-4", "lavo-4"]


def toy_task(name="listops", length=24):
    inputs, words, labels = KINDS.get(name, ("tokens", 24, 2))
    return Task(name, inputs, words, length, labels, "a toy")


def toy_rows(task, count, seed):
    """Rows whose first symbol tells their label."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(task.num_labels, size=count)

    def sequences():
        sizes = generator.integers(task.max_length // 2, task.max_length + 1, size=count)
        sizes[0] = task.max_length
        return [
            [1 + label, *generator.integers(1, task.vocab_size, size=n - 1)]
            for label, n in zip(labels, sizes, strict=True)
        ]

    if task.inputs == "pixels":
        columns = {"pixel_values": generator.integers(256, size=(count, task.max_length)).astype(np.uint8)}
    else:
        columns = {name: sequences() for name in cells.columns(task)}
    return Dataset.from_dict({**columns, "label": labels})


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Toy tasks instead of the real ones, and a small recipe."""

    def load(name, data, cache, rows=None, max_length=None):
        task = toy_task(name, max_length or 24)
        sizes = rows or {"train": 40, "validation": 16, "test": 16}
        return task, {split: toy_rows(task, size, seed) for seed, (split, size) in enumerate(sizes.items())}

    monkeypatch.setattr(run.tasks, "load_task", load)


def tiny(task="listops", **fields):
    return dataclasses.replace(load_recipe("tiny", task), slots=4, window=4, **fields)


def batch_of(task, rows=3):
    return cells.collate(list(toy_rows(task, rows, 0).with_format("numpy")))


# ---- models ----


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("task", KINDS)
def test_every_model_takes_every_task(task, name):
    """Every parameter has a gradient, and more padding changes nothing."""
    task = toy_task(task)
    torch.manual_seed(0)
    model = models.build(name, task, tiny(classifier_pooling="mean" if task.inputs == "pixels" else "cls"))
    batch = batch_of(task)
    model(**batch).loss.backward()
    missing = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    assert not {key for key in missing if "slot_scale" not in key}, missing
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
        assert logits.shape == (3, task.num_labels)
        if task.inputs != "pixels":
            row = {key: value[2:] for key, value in batch.items()}
            for key in cells.columns(task):
                keep = row[key.replace("input_ids", "attention_mask")].bool()
                row[key] = row[key][keep][None]
                del row[key.replace("input_ids", "attention_mask")]
            assert torch.allclose(model(**row).logits, logits[2:], atol=1e-5)


def test_the_roberta_of_a_pre_norm_recipe_is_our_model_with_softmax():
    task, recipe = toy_task(), tiny(num_hidden_layers=2)
    theirs = models.build("roberta", task, recipe).eval()
    fields = models._body(recipe, task.max_length) | {"norm_first": True, "embedding_layer_norm": False}
    ours = AbcModel(AbcConfig(memory_control="full", type_vocab_size=1, **fields)).eval()
    renamed = {"attention.LayerNorm": "attention.output.LayerNorm", "intermediate.LayerNorm": "output.LayerNorm"}
    weights = {"embeddings.word_embeddings.weight": ours.embeddings.word_embeddings.weight}
    for key, tensor in theirs.encoder.state_dict().items():
        key = re.sub("^LayerNorm", "encoder.final_layer_norm", key)
        for old, new in renamed.items():
            key = key.replace(old, new)
        weights[key] = tensor
    ours.load_state_dict(weights)
    states = torch.randn(2, 20, recipe.hidden_size)
    mask = (torch.arange(20) < torch.tensor([[20], [13]])).long()
    with torch.no_grad():
        ours, theirs = (model(inputs_embeds=states, attention_mask=mask)[0] for model in (ours, theirs.encoder))
    assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-5)


def test_shared_layers_have_the_weights_of_one():
    task, own = toy_task(), {"num_hidden_layers": 3, "share_layers": True}
    one, shared = (models.build("luna", task, tiny(**fields)) for fields in ({}, own))
    assert shared.state_dict().keys() == one.state_dict().keys()
    shared.load_state_dict(one.state_dict())
    batch = batch_of(task)
    with torch.no_grad():
        assert not torch.allclose(shared.eval()(**batch).logits, one.eval()(**batch).logits)


def test_an_unknown_or_impossible_model_is_refused(capsys):
    with refused("lunar"):
        models.find_encoder("lunar")
    with refused("window-16"):
        models.find_encoder("window-16")
    with refused("packed_mean"):
        models.build("abc", toy_task(), tiny(classifier_pooling="packed_mean"))


@pytest.fixture
def average(tmp_path):
    """The command of a run of the documented class, and its file."""
    code = re.search(r"(    from lra.models import register\n.*?)\n    python", models.__doc__, re.DOTALL)[1]
    path = tmp_path / "average.py"
    path.write_text(re.sub("^    ", "", code, flags=re.MULTILINE))
    words = ["--task", "listops", "--model", "average", "--plugin", str(path), "--steps", "4"]
    yield [*words, "--output", str(tmp_path / "runs")], path
    models.ENCODERS.pop("average", None)
    models.PLUGINS.pop("average", None)


def test_the_documented_class_is_a_model(average, tmp_path, capsys):
    words, path = average
    assert run.main([*words, "--recipe", "tiny"]) == 0
    cell = json.loads((tmp_path / "runs/tiny/listops/average/cell.json").read_text())
    assert cell["runs"][0]["steps"] == 4 and 0 <= cell["runs"][0]["test"] <= 1
    assert run.main([*words, "--recipe", "tiny"]) == 0
    assert models.PLUGINS.keys() == {"average"}
    # A changed file is another model.
    path.write_text(path.read_text() + "\n")
    assert run.main([*words, "--recipe", "tiny"]) == 2 and "plugin" in capsys.readouterr().err


def test_a_model_of_ones_own_that_does_not_fit_is_refused(average, capsys):
    words, path = average
    assert run.main([*words, "--recipe", "luna"]) == 2 and "encoder.layer" in capsys.readouterr().err
    path.write_text(path.read_text().replace("inputs_embeds + self.mix(mean.unsqueeze(1))", "self.mix(mean)"))
    assert run.main([*words, "--recipe", "tiny"]) == 2
    assert "Average returned states of shape (8, 32) instead of (8, 24, 32)" in capsys.readouterr().err


# ---- recipes ----


@pytest.mark.parametrize("task", NAMES)
@pytest.mark.parametrize("name", names())
def test_recipes_are_complete(name, task):
    recipe = load_recipe(name, task)
    assert recipe.learning_rates == sorted(recipe.learning_rates)
    assert len(recipe.learning_rates) == (1 if name == "tiny" else 3)
    half = recipe.shortened(recipe.steps // 2)
    assert half.warmup_steps == pytest.approx(recipe.warmup_steps / 2, abs=1)
    sizes = (recipe.num_hidden_layers, recipe.hidden_size)
    if name in ("small", "short"):
        assert (*sizes, recipe.num_attention_heads, recipe.intermediate_size) == (2, 64, 2, 128)
    if name == "luna":
        widths = {"listops": 512, "text": 256, "retrieval": 128, "image": 64, "pathfinder": 128}
        assert recipe.hidden_size == widths[task] and recipe.share_layers == (task == "listops")


def test_a_wrong_recipe_is_refused(tmp_path):
    text = (FOLDER / "tiny.yaml").read_text()
    for old, new, named in (("slots: 16", "slot: 16", "slot"), ("slots: 16\n", "", "slots"), ("text: {}", "", "text")):
        path = tmp_path / "own.yaml"
        path.write_text(text.replace(old, new))
        with refused(named):
            load_recipe(str(path), "text")
    with refused("small"):
        load_recipe("smal", "text")


# ---- runs ----

WORDS = ["--task", "listops", "--model", "luna", "--recipe", "tiny", "--steps", "8"]


class Kill(TrainerCallback):
    """Ctrl-C between two checkpoints, or behind the last one, which is inside an epoch of five updates."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step == 5:
            raise KeyboardInterrupt

    def on_train_end(self, args, state, control, **_):
        if self.step == 8:
            raise KeyboardInterrupt


def command(folder, *words):
    return run.main([*WORDS, "--output", str(folder), *words])


def left(folder):
    """What a command has left, without seconds and dates, and the weights of every run."""
    found = json.loads((folder / "tiny/listops/luna/cell.json").read_text())
    for one in found["runs"]:
        del one["seconds"], one["rows_per_second"]
    for key in ("command", "date"):
        del found[key]
    weights = sorted(folder.glob("tiny/listops/luna/*/model.safetensors"))
    return found, {path.parent.name: load_file(path) for path in weights}


@pytest.mark.parametrize("step", [5, 8])
def test_a_killed_run_continues_exactly(tmp_path, monkeypatch, step):
    assert command(tmp_path / "whole") == 0
    make = cells.make_trainer

    def make_killed(*arguments):
        trainer = make(*arguments)
        trainer.add_callback(Kill(step))
        return trainer

    monkeypatch.setattr(cells, "make_trainer", make_killed)
    assert command(tmp_path / "killed") == 130
    assert list((tmp_path / "killed").glob("tiny/listops/luna/*/checkpoint-*"))
    monkeypatch.setattr(cells, "make_trainer", make)
    assert command(tmp_path / "killed") == 0
    (expected, weights), (found, own) = left(tmp_path / "whole"), left(tmp_path / "killed")
    assert found == expected and own.keys() == weights.keys()
    for name, tensors in weights.items():
        assert all(torch.equal(tensor, own[name][key]) for key, tensor in tensors.items())
    assert not list((tmp_path / "killed").glob("tiny/listops/luna/*/checkpoint-*"))


def test_a_cell_chooses_its_rate_and_grows(tmp_path, monkeypatch, capsys):
    assert command(tmp_path, "--rates", "1e-3", "1e-2") == 0
    cell, _ = left(tmp_path)
    best = max(cell["runs"], key=lambda one: one["validation"])
    assert cell["rate"] == best["rate"] and tables.chosen(cell) == [best]
    for one in cell["runs"]:  # the best weights score after loading as they did before
        assert one["validation"] == max(row["accuracy"] for row in one["curve"])
        assert [row["step"] for row in one["curve"]] == [2, 4, 6, 8] and all("loss" in row for row in one["curve"])
    assert len(list(tmp_path.glob("**/test.json"))) == 1  # the test split is read for the chosen rate alone
    assert (tmp_path / "tiny/listops/luna/curve.png").stat().st_size > 5_000

    assert command(tmp_path, "--rates", "1e-3", "--seeds", "1") == 0
    grown, _ = left(tmp_path)
    assert [(one["rate"], one["seed"]) for one in grown["runs"]] == [(1e-3, 0), (1e-3, 1), (1e-2, 0)]
    monkeypatch.setattr(cells.FinetuneTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    assert command(tmp_path, "--rates", "1e-3", "--seeds", "1") == 0 and left(tmp_path)[0] == grown
    capsys.readouterr()
    assert command(tmp_path, "--steps", "4") == 2 and "--output" in capsys.readouterr().err
    assert command(tmp_path, "--rows", "32") == 2 and "data_train" in capsys.readouterr().err


def test_rows_of_every_split(tmp_path):
    assert command(tmp_path, "--steps", "2", "--rows", "24", "8") == 0
    assert tuple(left(tmp_path)[0]["rows"].values()) == (24, 8, 8)
    assert command(tmp_path, "--rows", "1", "2", "3", "4") == 2


def test_a_run_that_diverges_has_no_score(tmp_path):
    assert command(tmp_path, "--rates", "1e30") == 0
    cell = json.loads((tmp_path / "tiny/listops/luna/cell.json").read_text())
    assert cell["rate"] is None and "not finite" in cell["runs"][0]["diverged"]
    assert tables.verdict(cell) == "diverged" and "diverged" in tables.details([cell])


@pytest.mark.slow
def test_bfloat16_has_a_folder_of_its_own(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert command(tmp_path, "--bf16", "--steps", "4") == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert (tmp_path / "tiny-bf16/listops/luna/cell.json").is_file()


# ---- tables and reports ----


def toy_cell(task, model, tests, validation=0.6, losses=(0.8, 0.7, 0.6, 0.5), steps=100):
    rows = {"train": 1000, "validation": 400, "test": 400}
    curve = [{"step": index, "loss": loss, "accuracy": validation} for index, loss in enumerate(losses)]
    one = {"rate": 1e-3, "validation": validation, "steps": steps, "seconds": 50.0, "parameters": 7, "curve": curve}
    runs = [{**one, "seed": seed, "test": test} for seed, test in enumerate(tests)]
    recipe = dataclasses.asdict(tiny(task, steps=steps))
    own = {"task": dataclasses.asdict(toy_task(task)), "rows": rows, "model": model, "recipe": recipe, "bf16": False}
    return {**own, "majority": 0.5, "rate": 1e-3, "runs": runs}


def test_accuracy_by_task():
    found = [toy_cell("listops", "luna", [0.3, 0.4]), toy_cell("text", "luna", [0.6])]
    found += [toy_cell("listops", "roberta", [0.45]), toy_cell("text", "roberta", [0.7])]
    lines = tables.accuracy(found).splitlines()
    assert lines[0] == "| test accuracy (%) | ListOps | Text | mean |"
    assert lines[2] == "| Luna | 35.00 ± 7.07 (2) | 60.00 | 47.50 |"
    assert "| 500 |" in tables.details(found[:1])  # seconds of 1,000 updates
    found.append(toy_cell("text", "abc", [0.7], steps=200))
    header, *rows = tables.accuracy(found).splitlines()
    assert "Text (100 x" in header and "Text (200 x" in header and rows[-1].startswith("| ABC | - | - | 70.00 | -")


def test_chance_and_flat_curves_are_told():
    assert tables.verdict(toy_cell("text", "luna", [0.5])) == ""
    stuck = toy_cell("text", "luna", [0.5], validation=0.52, losses=[0.69] * 8)
    assert "loss flat" in tables.verdict(stuck)
    falls = toy_cell("text", "luna", [0.5], validation=0.52, losses=[0.69, 0.69, 0.66, 0.6])
    assert "falling" in tables.verdict(falls)


def test_report(tmp_path, capsys):
    """From cells to the JSON, table and plot of a report."""
    folder = tmp_path / "results"
    words = ["--task", "listops", "--model", "luna-4", "roberta", "--recipe", "tiny", "--steps", "4"]
    assert run.main([*words, "--output", str(tmp_path / "runs")]) == 0
    longer = ["--task", "listops", "--model", "roberta", "--recipe", "tiny", "--steps", "6"]
    assert run.main([*longer, "--output", str(tmp_path / "longer")]) == 0
    capsys.readouterr()
    assert report.main(["--runs", str(tmp_path / "runs"), str(tmp_path / "longer"), "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    (path,) = folder.glob("lra-tiny-cpu-float32-*.json")
    assert path.with_suffix(".md").read_text() == printed
    assert "ListOps (4 x 40 rows of 24) | ListOps (6 x 40 rows of 24)" in printed
    assert "a toy" in printed and str(tmp_path) not in path.read_text()
    assert path.with_name(f"{path.stem}-curves.png").stat().st_size > 5_000
    # What is published stays, unless it is run again.
    assert run.main([*words, "--seeds", "0", "1", "--output", str(tmp_path / "other")]) == 0
    assert report.main(["--runs", str(tmp_path / "other"), "--output", str(folder)]) == 0
    after = json.loads(path.read_text())["cells"]
    seeds = {(cell["model"], cell["recipe"]["steps"]): [one["seed"] for one in cell["runs"]] for cell in after}
    assert seeds == {("luna-4", 4): [0, 1], ("roberta", 4): [0, 1], ("roberta", 6): [0]}

    twice = [str(tmp_path / "runs"), str(tmp_path / "runs")]
    assert report.main(["--runs", *twice, "--output", str(folder)]) == 2 and "twice" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "runs")
    assert report.main(["--runs", str(tmp_path / "runs"), "--output", str(folder)]) == 2


def test_committed_results_name_their_origin():
    (path,) = measuring.RESULTS.glob("lra-*.json")
    result = json.loads(path.read_text())
    assert result["command"] == "python benchmarks/lra/report.py" and result["machine"]["cpu"] and result["date"]
    assert path.with_suffix(".md").read_text() == tables.text(result) + "\n"
