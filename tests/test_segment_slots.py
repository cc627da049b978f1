"""The study of what earlier segments offer an untrained reader: slots add up, belong to their text, and go away."""

import running
import segment_slots
import torch
from helpers import random_ids, tiny_model
from test_segment_loss import novels  # noqa: F401  a fixture

LENGTH = 8


def check(path):
    result = running.read_json(path)
    assert path.with_suffix(".md").read_text() == segment_slots.text(result) + "\n"
    assert result["command"].startswith("python experiments/segment_slots.py --data ")
    return result


def states_of(model, ids, segments):
    with torch.no_grad(), segment_slots.remembering(model, segments):
        return [model(part).last_hidden_state for part in ids.split(LENGTH, 1)]


def test_slots_of_earlier_segments_are_read_and_forgotten():
    model, ids = tiny_model("luna", local_window=4), random_ids(2, 3 * LENGTH)
    with torch.no_grad():
        alone = [model(part).last_hidden_state for part in ids.split(LENGTH, 1)]
        one, two = states_of(model, ids, 1), states_of(model, ids, 2)
        again = [model(part).last_hidden_state for part in ids.split(LENGTH, 1)]
    assert torch.equal(one[0], alone[0]) and torch.equal(one[1], two[1])
    assert not torch.allclose(one[1], alone[1]) and not torch.allclose(one[2], two[2])
    assert all(torch.equal(first, second) for first, second in zip(alone, again, strict=True))


def test_a_repeated_segment_adds_nothing_without_a_window():
    """Equal slots twice are read like once: what is passed on has the place and scale of a layer's own slots."""
    model, part = tiny_model("luna"), random_ids(2, LENGTH)
    first, second = states_of(model, torch.cat([part, part], 1), 1)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_readings_are_compared(novels, tmp_path):  # noqa: F811
    words = ["--data", str(novels), "--results", str(tmp_path), "--lengths", "32", "--tokens", "96", "--pieces", "2"]
    assert segment_slots.main(words) == 0
    (path,) = tmp_path.glob("segment-slots-*.json")
    losses = check(path)["losses"]["32"]
    assert set(losses) == set(segment_slots.READINGS)
    assert len(set(losses.values())) == len(losses)


def test_committed_results():
    for path in running.RESULTS.glob("segment-slots-*.json"):
        check(path)
