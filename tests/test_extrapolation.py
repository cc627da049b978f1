"""The study of extrapolation: equal training, the same tokens at every length, and what is finished is kept."""

import extrapolation
import pytest
import running
from test_learning import check
from test_learning import data as learning_data  # noqa: F401  a fixture

from luna_hf.scripting import UserError

SHRINK = {
    **{"max_steps": 2, "eval_steps": 1, "log_steps": 1, "vocab_size": 300, "block_size": 32, "eval_blocks": 8},
    **{"global_batch_tokens": 64, "min_gain_nats": -100, "sample_tokens": 2, "mixed_precision": "no"},
    **{"model.hidden_size": 32, "model.intermediate_size": 32, "model.max_position_embeddings": 32},
}


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(extrapolation, "launch", lambda *words: running.launch(*words))


def test_every_family_and_the_peer_take_part():
    types = [fields["model_type"] for fields in extrapolation.SYSTEMS.values()]
    assert {"luna", "abc_memory", "leapformer", "lavo", "gpt2"} == set(types)
    assert extrapolation.parse(["train", "--data", "data"]).systems == list(extrapolation.SYSTEMS)


def test_perplexities_at_every_length(learning_data, tmp_path, here):  # noqa: F811
    where = ["--data", str(learning_data), "--runs", str(tmp_path / "runs")]
    systems = ["leapformer", "lavo", "gpt2"]
    for own in (systems[:2], systems[2:]):
        shrink = {key: value for key, value in SHRINK.items() if (own, key) != (["gpt2"], "model.intermediate_size")}
        words = ["--systems", *own, *running.option_words(shrink)]
        assert extrapolation.main(["train", *where, *words]) == 0
    lengths = ["--lengths", "32", "64", "--tokens", "128"]
    assert extrapolation.main(["evaluate", *where, "--systems", "lavo", *lengths]) == 0
    kept = tmp_path / "runs" / "evaluate" / "lavo" / "perplexity.json"
    before = kept.stat().st_mtime_ns
    assert extrapolation.main(["evaluate", *where, *lengths]) == 0
    assert kept.stat().st_mtime_ns == before
    report = ["report", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert extrapolation.main(report) == 0
    (path,) = (tmp_path / "results").glob("extrapolation-enwiki-*.json")
    models = check(path, extrapolation.text)["models"]
    assert list(models) == systems
    for name, model in models.items():
        assert set(model["lengths"]) == {"32", "64"} and model["mode"] == ("sliding" if name == "gpt2" else "carried")
        # The shortest context is that of training, so a window of a peer is never cut.
        assert all(found["perplexity"] > 1 for found in model["lengths"].values())
    for name in ("leapformer", "lavo"):
        states = {found["state_bytes"] for found in models[name]["lengths"].values()}
        assert len(states) == 1 and states != {None}
    assert path.with_suffix(".png").stat().st_size > 5_000


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"extrapolation\.py train"):
        extrapolation.report(extrapolation.parse(["report", "--runs", str(tmp_path)]))
    with pytest.raises(UserError, match="--max_steps"):
        extrapolation.parse(["evaluate", "--data", "data", "--max_steps", "3"])


def test_committed_results():
    for path in running.RESULTS.glob("extrapolation-*.json"):
        check(path, extrapolation.text)
