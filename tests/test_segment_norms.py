"""The study of long streams: every segment starts from the one before it, and the norms are those of P."""

import running
import segment_norms
import torch
from test_segment_loss import novels  # noqa: F401  a fixture
from transformers import AutoModel


def check(path):
    result = running.read_json(path)
    assert path.with_suffix(".md").read_text() == segment_norms.text(result) + "\n"
    assert result["command"].startswith("python experiments/segment_norms.py --data ")
    return result


def test_norms_are_those_of_the_packed_states():
    segments = torch.randint(4, 8000, (3, 32), generator=torch.Generator().manual_seed(0))
    measured = segment_norms.norms("paper", "float32", segments)
    model = AutoModel.from_pretrained(segment_norms.START, segment_length=32).eval()
    with torch.no_grad():
        packed = model(segments.view(1, -1)).packed_last_hidden_state
    torch.testing.assert_close(measured[-1], packed.norm(dim=-1).mean().item(), rtol=1e-4, atol=1e-4)
    assert len(set(measured)) == 3


def test_numbers_that_are_not_finite_are_shown():
    kept = segment_norms.thinned([1.0] * 9 + [float("nan")] + [2.0] * 3)
    assert list(kept) == [*map(str, range(1, 11)), "13"] and kept["10"] is None
    run = {"system": "self", "dtype": "float32", "norms": kept, "highest": None}
    assert segment_norms.text({"runs": [run]}).count("not finite") == 2


def test_both_systems_are_measured(novels, tmp_path):  # noqa: F811
    words = ["--data", str(novels), "--results", str(tmp_path), "--segments", "12"]
    assert segment_norms.main(words) == 0
    (path,) = tmp_path.glob("segment-norms-*.json")
    runs = check(path)["runs"]
    assert [(run["system"], run["dtype"]) for run in runs] == [
        (system, dtype) for system in segment_norms.SYSTEMS for dtype in segment_norms.DTYPES
    ]
    assert all(run["highest"] >= max(run["norms"].values()) - 1e-9 for run in runs)
    assert segment_norms.main([*words, "--segments", "10000"]) == 2


def test_committed_results():
    for path in running.RESULTS.glob("segment-norms-*.json"):
        runs = check(path)["runs"]
        assert all(run["highest"] is not None for run in runs)
