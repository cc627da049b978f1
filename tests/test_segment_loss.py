"""The study of loss by segment: both trainings, equal masked tokens for every reading, and finished runs are kept."""

import pyarrow as pa
import pytest
import running
import segment_loss
import torch
from pyarrow import parquet
from test_learning import check
from transformers import AutoModelForMaskedLM, AutoTokenizer

from luna_hf.scripting import UserError

SHRINK = {
    **{"max_steps": 2, "eval_steps": 1, "save_steps": 1, "log_steps": 1, "eval_blocks": 2, "min_gain_nats": -100},
    **{"global_batch_tokens": 1024, "batch_size": 1},
}


@pytest.fixture
def novels(tmp_path):
    (tmp_path / "novels").mkdir()
    texts = [
        " ".join(f"The {word} went on and on in the rain." for word in range(start, start + 120)) for start in (0, 7)
    ]
    for split in ("train", "validation"):
        parquet.write_table(pa.table({"text": texts}), tmp_path / "novels" / f"{split}.parquet")
    return tmp_path


def options_of(data, *words):
    return segment_loss.parse(["report", "--data", str(data), *words])


def test_rows_are_equal_every_time_and_masked(novels):
    tokenizer = AutoTokenizer.from_pretrained(segment_loss.START)
    first, again = (
        segment_loss.held_out_rows(options_of(novels, "--segments", "3"), segment_loss.START) for _ in range(2)
    )
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    ids, labels = first
    assert ids.shape == labels.shape == (2, 3 * segment_loss.SEGMENT)
    masked = labels != segment_loss.IGNORED
    assert 0.25 < masked.float().mean() < 0.35 and (ids[~masked] != tokenizer.mask_token_id).all()
    with pytest.raises(UserError, match="--segments N"):
        segment_loss.held_out_rows(options_of(novels, "--segments", "900"), segment_loss.START)


def test_readings_differ_from_the_second_segment_on(novels):
    ids, labels = segment_loss.held_out_rows(options_of(novels, "--segments", "3"), segment_loss.START)
    fields = {"segment_length": segment_loss.SEGMENT, "packed_self_attention": True}
    model = AutoModelForMaskedLM.from_pretrained(segment_loss.START, **fields).eval()
    carried, reset = (segment_loss.segment_losses(model, ids, labels, reading) for reading in ("carried", "reset"))
    assert carried[0] == reset[0] and all(one != two for one, two in zip(carried[1:], reset[1:], strict=True))
    with torch.inference_mode():  # the model reads all segments of a row by itself
        whole = model(ids).logits[:, -segment_loss.SEGMENT :].flatten(0, 1)
    last = labels[:, -segment_loss.SEGMENT :].flatten()
    expected = torch.nn.functional.cross_entropy(whole, last, ignore_index=segment_loss.IGNORED).item()
    assert carried[-1] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_both_systems_are_trained_and_compared(novels, tmp_path, capsys):
    where = ["--data", str(novels), "--runs", str(tmp_path / "runs")]
    assert segment_loss.main(["train", *where, *running.option_words(SHRINK)]) == 0
    kept = tmp_path / "runs" / "train" / "memory" / "run.json"
    before = kept.stat().st_mtime_ns
    assert segment_loss.main(["train", *where]) == 0 and kept.stat().st_mtime_ns == before
    results = ["--results", str(tmp_path / "results"), "--segments", "3"]
    assert segment_loss.main(["report", *where, *results]) == 0
    (path,) = (tmp_path / "results").glob("segment-loss-*.json")
    result = check(path, segment_loss.text)
    assert set(result["losses"]) == set(segment_loss.READINGS)
    assert all(len(losses) == 3 for losses in result["losses"].values())


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"segment_loss\.py train"):
        segment_loss.report(segment_loss.parse(["report", "--data", str(tmp_path), "--runs", str(tmp_path)]))


def test_committed_results():
    for path in running.RESULTS.glob("segment-loss-*.json"):
        check(path, segment_loss.text)
