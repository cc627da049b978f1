"""Embeddings finetuned on pairs of sentences: the folder that the command writes, and what it refuses."""

import json

import finetune_embeddings
import pyarrow
import pytest
from helpers import SENTENCES, refused, tiny_model, tiny_tokenizer
from pyarrow.parquet import write_table

from luna_hf.scripting import UserError


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), tiny_tokenizer()
    tiny_model("luna", "mlm", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    """Equal sentences score 5, others 0."""
    pairs = [(first, second) for first in SENTENCES for second in SENTENCES]
    columns = {"sentence1": [first for first, _ in pairs], "sentence2": [second for _, second in pairs]}
    table = pyarrow.table({**columns, "label": [5.0 if first == second else 0.0 for first, second in pairs]})
    folder = tmp_path / "glue" / "stsb"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        write_table(table, folder / f"{split}.parquet")
    return folder.parent


def words(encoder, data, output, **more):
    options = {"model_name_or_path": encoder, "dataset_name": data, "output_dir": output, "use_cpu": True, **more}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_the_folder_embeds_and_the_scores_are_those_of_the_saved_model(encoder, data, tmp_path):
    from sentence_transformers import SentenceTransformer

    output = tmp_path / "out"
    assert finetune_embeddings.main(words(encoder, data, output, max_steps=3, learning_rate=1e-2, max_length=16)) == 0
    figures = json.loads((output / "metrics.json").read_text())
    assert figures["scores"] != figures["scores_before"] and figures["steps"] == 3
    assert not list(output.glob("checkpoint-*"))
    model = SentenceTransformer(str(output), device="cpu")
    assert model.max_seq_length == 16
    pairs = finetune_embeddings.read_pairs(str(data))["validation"]
    evaluator = finetune_embeddings.EmbeddingSimilarityEvaluator(
        pairs["sentence1"], pairs["sentence2"], pairs["score"], show_progress_bar=False
    )
    assert evaluator(model)["spearman_cosine"] == pytest.approx(figures["scores"]["spearman"], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"label": "high"}, ["'high'", "number"]),
        ({"label": float("nan")}, ["Row 1", "nan"]),
        ({"label": 1e39}, ["Row 1", "1e+39"]),
        ({"label": None}, ["Row 1", "None"]),
        ({"sentence1": None}, ["Row 1", "`sentence1`"]),
        ({"sentence2": 7}, ["Row 1", "7", "`sentence2`"]),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_that_are_no_scored_pairs_are_refused(change, named, split, tmp_path):
    good = {"sentence1": "A.", "sentence2": "B.", "label": 2.5}
    for name in ("train", "validation"):
        rows = [good, {**good, **change}] if name == split else [good, good]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused(split, *named, error=UserError):
        finetune_embeddings.read_pairs(str(tmp_path))


def test_scores_of_a_table_are_numbers(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.tsv").write_text('sentence1\tsentence2\tlabel\n"007\tnull\t5\nx\ty\t1e0\n')
    pairs = finetune_embeddings.read_pairs(str(tmp_path))["train"]
    assert pairs.to_dict() == {"sentence1": ['"007', "x"], "sentence2": ["null", "y"], "score": [1.0, 0.2]}


def test_a_missing_model_and_a_missing_split_are_refused(encoder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert finetune_embeddings.main(words(tmp_path / "none", data, tmp_path / "out")) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    (data / "stsb" / "validation.parquet").unlink()
    assert finetune_embeddings.main(words(encoder, data, tmp_path / "out")) == 2
    assert "validation" in capsys.readouterr().err
