"""The study of long reviews: both finetunings, groups by length, and readings of the parts that they name."""

import pyarrow as pa
import pytest
import running
import segment_reviews
from pyarrow import parquet
from test_learning import check

from luna_hf.scripting import UserError


def test_groups_and_accuracy():
    right = {"all": [1, 0, 1, 1], "first": [0, 0, 0, 1], "last": [1, 1, 1, 1], "cut": [0, 0, 0, 0]}
    result = {"tokens": [600, 1024, 1025, 9000], "right": right}
    found = segment_reviews.groups(result)
    assert [rows for _, rows in found] == [[0, 1], [2], [3]]
    assert segment_reviews.accuracy(right["all"], [0, 1]) == (50.0, pytest.approx(35.36, abs=0.01))
    table = segment_reviews.text(result)
    assert "over 2,048 tokens (1 reviews)" in table and "50.0 ± 35.4" in table
    assert len(segment_reviews.groups({"tokens": [3]})) == 1  # empty groups are left out


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"segment_reviews\.py run"):
        segment_reviews.report(segment_reviews.parse(["report", "--runs", str(tmp_path)]))


@pytest.mark.slow
def test_both_systems_are_trained_and_compared(tmp_path):
    (tmp_path / "imdb").mkdir()
    reviews = pa.table({"text": ["good film " * 300, "bad film " * 300] * 3 + ["short"], "label": [1, 0] * 3 + [1]})
    for split in ("train", "test"):
        parquet.write_table(reviews, tmp_path / "imdb" / f"{split}.parquet")
    where = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert segment_reviews.main(["run", *where, "--max_train_samples", "2"]) == 0
    assert segment_reviews.main(["report", *where, "--results", str(tmp_path / "results"), "--reviews", "2"]) == 0
    (path,) = (tmp_path / "results").glob("segment-reviews-*.json")
    result = check(path, segment_reviews.text)
    assert set(result["right"]) == set(segment_reviews.READINGS) and len(result["tokens"]) == 2
    assert all(tokens > 2 * segment_reviews.SEGMENT for tokens in result["tokens"])


def test_committed_results():
    for path in running.RESULTS.glob("segment-reviews-*.json"):
        check(path, segment_reviews.text)
