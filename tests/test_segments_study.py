"""The study of recall across segments: the task, equal training, and what is finished is kept."""

import pytest
import running
import segments
import torch
from recall import training
from recall.tasks import IGNORED, MASK
from test_learning import check

from luna_hf.scripting import UserError


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_questions_stand_in_their_segment(distance):
    task = segments.SegmentedRecall("recall", False, 4, segments.SYMBOLS, 0, distances=(distance,))
    ids, labels = task.draw(6, torch.Generator().manual_seed(0))
    assert ids.shape[1] <= (distance + 1) * segments.SEGMENT
    for row, answers in zip(ids.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[0:8:2], row[1:8:2], strict=True))
        asked = [place for place, label in enumerate(answers) if label != IGNORED]
        assert len(asked) == 4 and {place // segments.SEGMENT for place in asked} == {distance}
        assert all(row[place] == MASK and answers[place] == pairs[row[place - 1]] for place in asked)


def test_without_memory_a_model_sees_the_questions_only():
    task = segments.SegmentedRecall("recall", False, 2, segments.SYMBOLS, 0, distances=(2,), memory=False)
    ids, labels = task.draw(5, torch.Generator().manual_seed(0))
    assert ids.shape == labels.shape == (5, 4)
    assert (labels[:, 1::2] != IGNORED).all() and (ids[:, 1::2] == MASK).all()


def test_systems_are_compared(tmp_path, capsys):
    where = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    run = ["run", *where, "--items", "1", "--seeds", "0", "--steps", "2"]
    assert segments.main([*run, "--systems", "none"]) == 0
    kept = tmp_path / "runs" / "1-items-none-seed0.json"
    before = kept.stat().st_mtime_ns
    assert segments.main(run) == 0 and kept.stat().st_mtime_ns == before
    assert segments.main(["report", *where]) == 0
    (path,) = (tmp_path / "results").glob("segments-*.json")
    result = check(path, segments.text)
    assert {run["system"] for run in result["runs"]} == set(segments.SYSTEMS)
    assert all(set(run["tests"]) == {str(distance) for distance in segments.DISTANCES} for run in result["runs"])
    assert "every segment for itself" in capsys.readouterr().out


def test_published_runs_stay(tmp_path):
    for system in ("self", "none"):
        where = ["--runs", str(tmp_path / system), "--results", str(tmp_path / "results")]
        own = [*where, "--items", "1", "--steps", "2", "--seeds", "0", "--systems", system]
        assert segments.main(["run", *own]) == segments.main(["report", *own]) == 0
    (path,) = (tmp_path / "results").glob("segments-*.json")
    result = running.read_json(path)
    assert {run["system"] for run in result["runs"]} == {"self", "none"} and len(result["commands"]) == 2


def test_distances_grow_once_the_last_is_learned(monkeypatch):
    task, read, found = (
        segments.SegmentedRecall("recall", False, 1, segments.SYMBOLS, 0),
        [],
        iter((0.5, 1, 0.9, 1, 1, 1)),
    )
    stages = segments.growing(task)
    assert [trained.distances for trained, _ in stages] == [segments.DISTANCES[:number] for number in range(1, 6)]

    def accuracy(model, test):
        read.append(test.distances)
        return next(found)

    monkeypatch.setattr(training, "evaluate", accuracy)
    recipe = training.Recipe(1e-3, steps=6, eval_steps=1, rows=2)
    with pytest.raises(StopIteration):  # solved after six evaluations; the accuracy at the end is the seventh
        training.train("luna-16+segments-self", task, recipe, stages=stages)
    assert read == [(0,), (0,), (1,), (2,), (4,), (8,), segments.DISTANCES]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"segments\.py run"):
        segments.report(segments.parse(["report", "--runs", str(tmp_path)]))


def test_committed_results():
    for path in running.RESULTS.glob("segments-*.json"):
        check(path, segments.text)
