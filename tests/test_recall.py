"""The recall study: its tasks have one right answer beyond the reach of a window, and its driver resumes."""

import json
from dataclasses import replace

import pytest
import recall_study
import torch
from recall import report
from recall.systems import LAYERS, REACH, TAPS, WINDOW, fields_of, make_model, state_bytes
from recall.tasks import FILLER, IGNORED, MARKER, MASK, NUM_SPECIAL, QUESTION, Task
from recall.training import TEST_ROWS, TEST_SEED, Curriculum, Recipe, scheduled, sizes, train

TASKS = [Task(name, causal, 6, 8, 5) for name in ("recall", "copy", "needle") for causal in (True, False)]
BY_NAME = pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name}-{'causal' if task.causal else 'mask'}")


def drawn(task, rows=40, seed=0):
    return task.draw(rows, torch.Generator().manual_seed(seed))


def solve(task, row):
    """Position and answer of every question, read from the row alone."""
    end = len(row) - row[::-1].index(FILLER)  # the questions follow the last filler
    before, asked = row[: end - task.gap], row[end:]
    if task.name == "recall":
        pairs = dict(zip(before[::2], before[1::2], strict=True))
        keys = asked if task.causal else asked[::2]
        assert len(pairs) == len(keys) == task.items
        found = [pairs[key] for key in keys]
    elif task.name == "copy":
        found = before
        assert asked == ([QUESTION, *before[:-1]] if task.causal else [MASK] * task.items)
    else:
        found = [before[before.index(MARKER) + 1]]
        assert asked[0] == QUESTION and len(before) == task.items
    if task.causal or task.name == "copy":
        return list(range(end, end + len(found))), found
    assert all(token == MASK for token in asked[1::2])
    return list(range(end + 1, len(row), 2)), found


@BY_NAME
def test_labels_are_the_answers(task):
    ids, labels = drawn(task)
    assert ids.shape == labels.shape == (40, task.length)
    assert ids.min() >= 0 and ids.max() < task.vocab_size
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        places, answers = solve(task, row)
        assert [place for place, token in enumerate(label) if token != IGNORED] == places
        assert [label[place] for place in places] == answers


@BY_NAME
def test_the_answer_lies_beyond_the_gap(task):
    """Between an answer's last occurrence before the questions and its question lie all fillers."""
    ids, labels = drawn(task)
    first = (labels != IGNORED).int().argmax(1)
    fillers = (ids == FILLER).int()
    assert fillers.sum(1).eq(task.gap).all()
    last = task.length - 1 - fillers.flip(1).argmax(1)
    assert last.lt(first).all()
    assert (ids[torch.arange(40), last - task.gap + 1] == FILLER).all()  # in one piece


@BY_NAME
def test_rows_differ_between_training_and_test(task):
    """Rows of 6 symbols from 8 can coincide by chance, so this asks for the sizes of the study."""
    task = replace(task, items=16, symbols=32)
    test = set(map(tuple, drawn(task, TEST_ROWS, TEST_SEED)[0].tolist()))
    assert len(test) == TEST_ROWS
    assert not test & set(map(tuple, drawn(task, 2000, 0)[0].tolist()))


def test_values_cannot_be_guessed_from_keys():
    """Over many rows, a key occurs with every value."""
    ids, _ = drawn(Task("recall", True, 4, 4, 1), rows=400)
    pairs = set(map(tuple, ids[:, :8].reshape(-1, 2).tolist()))
    assert len(pairs) == 4 * 4
    assert {key for key, _ in pairs} == set(range(NUM_SPECIAL, NUM_SPECIAL + 4))


def test_the_default_gap_exceeds_the_reach():
    """Of a window and a convolution in every layer."""
    options = recall_study.parse(["run"])
    assert options.gap >= REACH >= LAYERS * (WINDOW - 1) + LAYERS * (TAPS - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("system", ["window", "window+conv"])
def test_a_window_alone_does_not_see_the_values(system, causal):
    """Other values leave its answers unchanged, where softmax attention's change."""
    task = Task("recall", causal, 4, 8, REACH + 2)
    ids, labels = drawn(task, 2)
    other = ids.clone()
    other[:, 1:8:2] = ids[:, 1:8:2].flip(1)
    for name, same in ((system, True), ("softmax", False)):
        torch.manual_seed(0)
        model = make_model(name, task).eval()
        with torch.no_grad():
            first, second = (model(input_ids=row).logits[labels != IGNORED] for row in (ids, other))
        assert torch.equal(first, second) == same


def test_state_bytes_count_slots_and_window():
    """Float32 sums of keys and values with a total and a peak for each slot, and the window's keys and values."""
    task = Task("recall", True, 4, 8, 5)
    slots, window, layers, width = 16, WINDOW, LAYERS, 64
    per_layer = 4 * (slots * (2 * width + 2) + 0)
    plain = state_bytes(make_model("abc-16", task), task)
    mixed = state_bytes(make_model("abc-16+window", task), task)
    assert 0 <= plain - layers * per_layer < 64  # a few counters
    assert mixed - plain == layers * 4 * (window * 2 * width + slots)  # and the counts


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("system", ["leapformer+conv", "linear", "lavo-4", "lavo-4+window"])
def test_systems_of_the_linear_families(system, causal):
    """Each is what its name says, and reads across the gap."""
    task = Task("recall", causal, 4, 8, REACH + 2)
    torch.manual_seed(0)
    model = make_model(system, task).eval()
    fields = {"leapformer+conv": ("learned", TAPS, 0), "linear": ("none", None, 0)}
    fields |= {"lavo-4": (4, None, 0), "lavo-4+window": (4, None, WINDOW)}
    first = "num_bases" if system.startswith("lavo") else "reweighting"
    found = [getattr(model.config, name) for name in (first, "conv_kernel_size", "local_window")]
    assert (found[0], found[1] or None, found[2]) == fields[system]
    ids, labels = drawn(task, 2)
    other = ids.clone()
    other[:, 1:8:2] = ids[:, 1:8:2].flip(1)
    with torch.no_grad():
        one, two = (model(input_ids=row).logits[labels != IGNORED] for row in (ids, other))
    assert torch.isfinite(one).all() and not torch.equal(one, two)


@pytest.mark.parametrize(
    "name",
    ["luna", "luna-x", "softmax+shift", "mamba-16", "lavo", "leapformer-16", "linear+window", "lavo-4+both-uncounted"],
)
def test_unknown_systems_are_refused(name):
    with pytest.raises(ValueError, match="no system"):
        fields_of(name, TASKS[0])


def test_unanswerable_tasks_are_refused():
    with pytest.raises(ValueError, match="symbols"):
        Task("recall", True, 9, 8, 1)
    with pytest.raises(ValueError, match="no task"):
        Task("recal", True, 4, 8, 1)


def test_the_curriculum_grows_with_accuracy():
    task, recipe = Task("recall", True, 12, 16, 5), Recipe(1e-3, steps=100)
    assert sizes(task) == [2, 4, 8, 12]
    curriculum = Curriculum(task, recipe, torch.Generator().manual_seed(0))
    assert {curriculum.draw(step) for step in range(20)} == {0}
    assert not curriculum.advance(lambda size: 0.95 if size <= 4 else 0.2)
    drawn = [curriculum.draw(0) for _ in range(400)]
    assert set(drawn) == {0, 1, 2}
    assert drawn.count(2) > 200  # half of them, and a third of the rest
    assert not curriculum.advance(lambda size: 0.95)  # the largest is learned, but not solved
    assert curriculum.advance(lambda size: 0.995)
    late = Curriculum(task, recipe, torch.Generator().manual_seed(0))
    assert {late.draw(75) for _ in range(400)} == {0, 1, 2, 3}
    encoder = Curriculum(replace(task, causal=False), recipe, torch.Generator().manual_seed(0))
    assert encoder.sizes == [1, 2, 4, 8, 12]
    assert {encoder.draw(0) for _ in range(400)} == {0, 1, 2, 3, 4}


def test_the_rate_rises_and_falls():
    recipe = Recipe(1.0, steps=1000)
    assert scheduled(recipe, 0) == 1 / 50
    assert scheduled(recipe, 500) == pytest.approx(0.55)  # halfway from 1 to 0.1
    assert scheduled(recipe, 999) == pytest.approx(0.1, abs=1e-3)


def test_training_is_repeatable():
    task = Task("recall", True, 2, 4, 1)
    recipe = Recipe(3e-3, steps=4, rows=2, eval_steps=2)
    first, second = (train("luna-exp-2+window", task, recipe) for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["curve"]["step"] == [2, 4]


def test_finished_runs_are_kept(tmp_path):
    words = ["run", "--runs", str(tmp_path), "--items", "2", "--symbols", "4", "--steps", "50", "--systems"]
    assert recall_study.main([*words, "window"]) == 0
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "steps": -1}))
    assert recall_study.main([*words, "window", "abc-2"]) == 0
    assert json.loads(path.read_text())["steps"] == -1
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("words", [[], ["--systems", "mamba-16"], ["--systems", "window", "--items", "64"]])
def test_wrong_options_are_refused_before_training(words, tmp_path, capsys):
    assert recall_study.main(["run", "--runs", str(tmp_path), *words]) != 0
    assert not list(tmp_path.iterdir())


def finished(folder, system, rate, seed, accuracy, causal=True):
    """Write a finished run that ends with this accuracy at 4 pairs."""
    task = {"name": "recall", "causal": causal, "items": 4, "symbols": 8, "gap": 5}
    content = {
        "command": "python experiments/recall_study.py run",
        "date": "2026-01-01",
        "machine": {"cpu": "none"},
        "versions": {"torch": "2"},
        "system": system,
        "task": task,
        "recipe": {"rate": rate, "seed": seed, "positions": None},
        "accuracy": {"2": 1.0, "4": accuracy},
        "curve": {"step": [50, 100], "size": [2, 4], "accuracy": [1.0, accuracy]},
        "steps": 100,
        "state_bytes": 64 if causal else None,
    }
    (folder / f"{system}-{rate:g}-{seed}-{causal}.json").write_text(json.dumps(content))


def test_the_report_shows_the_best_rate_and_the_sweep(tmp_path):
    for rate, seed, accuracy in ((1e-3, 0, 0.5), (3e-3, 0, 0.25), (3e-3, 1, 0.85), (1e-2, 0, 0.125)):
        finished(tmp_path, "luna-exp-16+window", rate, seed, accuracy)
    finished(tmp_path, "window", 3e-3, 0, 0.125, causal=False)
    assert recall_study.main(["report", "--runs", str(tmp_path), "--results", str(tmp_path / "results")]) == 0
    (written,) = (tmp_path / "results").glob("*.md")
    lines = written.read_text().splitlines()
    row = "| luna-exp-16+window | 100.0 (100.0 to 100.0) | 55.0 (25.0 to 85.0) | 100, 100 | 64 "
    assert f"{row}| 50.0 at 0.001; 55.0 (25.0 to 85.0) at 0.003; 12.5 at 0.01 |" in lines
    assert "| window | 100.0 | 12.5 | 100 | - | 12.5 at 0.003 |" in lines
    assert len(list((tmp_path / "results").glob("*.png"))) == 3


def test_published_runs_stay_when_their_files_are_gone(tmp_path):
    words = ["report", "--runs", str(tmp_path), "--results", str(tmp_path / "results")]
    for system, accuracy in (("luna-64", 0.25), ("window", 0.125)):
        finished(tmp_path, system, 3e-3, 0, accuracy)
    assert recall_study.main(words) == 0
    for path in tmp_path.glob("*.json"):
        path.unlink()
    finished(tmp_path, "window", 3e-3, 0, 0.5)
    assert recall_study.main(words) == 0
    (written,) = (tmp_path / "results").glob("*.json")
    found = {run["system"]: run["accuracy"]["4"] for run in json.loads(written.read_text())["runs"]}
    assert found == {"luna-64": 0.25, "window": 0.5}


def test_systems_are_sorted_by_mechanism_and_slots():
    runs = [{"system": system} for system in ("luna-64", "abc-16+conv", "abc-64", "softmax+conv", "window", "abc-1")]
    assert report.systems_of(runs) == ["softmax+conv", "window", "abc-1", "abc-64", "abc-16+conv", "luna-64"]


def test_a_report_without_runs_is_refused(tmp_path):
    assert recall_study.main(["report", "--runs", str(tmp_path)]) != 0
