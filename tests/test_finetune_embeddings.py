"""Embeddings finetuned on pairs of sentences: the folder that the command writes, and what it refuses."""

import json
import shutil

import finetune_embeddings
import pyarrow
import pytest
from helpers import SENTENCES, tiny_model, tiny_tokenizer
from pyarrow.parquet import write_table
from tiny_finetuning import write_split

from luna_hf.scripting import write_json


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


def test_training_uses_the_default_prompt_as_encode_does(encoder, data, tmp_path):
    from sentence_transformers import SentenceTransformer

    model, losses = SentenceTransformer(str(encoder), device="cpu"), {}
    model.prompts |= {"query": SENTENCES[0]}
    for name in (None, "query"):
        model.default_prompt_name, folder = name, tmp_path / f"prompt-{name}"
        model.save_pretrained(str(folder / "encoder"))
        options = {"max_steps": 1, "logging_steps": 1}
        assert finetune_embeddings.main(words(folder / "encoder", data, folder / "out", **options)) == 0
        figures = json.loads((folder / "out" / "metrics.json").read_text())
        losses[name] = figures["log"][0]["loss"]
        assert figures["training"]["prompts"] == (SENTENCES[0] if name else None)
    assert abs(losses["query"] - losses[None]) > 1e-3


BAD_ROWS = {
    **{f"label {value}": {"label": value} for value in (None, float("nan"), float("inf"), 1e39, -1, True, "high")},
    **{f"sentence {value}": {"sentence1": value} for value in (None, 7)},
}


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused_before_training(case, split, encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune_embeddings, "load", None)
    for part in ("train", "validation"):
        rows = [{"sentence1": text, "sentence2": "a", "label": number / 2} for number, text in enumerate(SENTENCES)]
        rows[1] |= BAD_ROWS[case] if part == split else {}
        write_split(tmp_path / "data" / f"{part}.jsonl", rows)
    assert finetune_embeddings.main(words(encoder, tmp_path / "data", tmp_path / "out")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_run_that_diverges_leaves_no_weights_and_the_folder_can_be_used(encoder, data, tmp_path, capsys):
    out, steps = tmp_path / "out", {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    assert finetune_embeddings.main(words(encoder, data, out, **steps, learning_rate=1e30)) == 2
    assert "error: The run diverged" in capsys.readouterr().err
    assert not list(out.rglob("*.safetensors")) and not (out / "metrics.json").exists()
    assert finetune_embeddings.main(words(encoder, data, out, **steps)) == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_length": 1000}, "--max_length is 1000"),
        ({"optim": "adalomo"}, "--optim adalomo"),
        ({"fsdp": "full_shard"}, "distributed"),
        ({"save_strategy": "best"}, "`save_strategy` is 'best'"),
    ],
)
def test_options_that_cannot_be_used(more, named, encoder, data, tmp_path, capsys):
    assert finetune_embeddings.main(words(encoder, data, tmp_path / "out", **more)) == 2
    assert named in capsys.readouterr().err


def test_what_a_source_stores_beside_its_transformer(encoder, data, tmp_path, capsys):
    """A similarity other than the cosine, which training changes, and the transformer's own folder."""
    from sentence_transformers import SentenceTransformer

    source = SentenceTransformer(str(encoder), similarity_fn_name="dot", device="cpu")
    source.max_seq_length = 20
    source.save(str(tmp_path / "source"))
    modules = json.loads((tmp_path / "source" / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    own = [path for path in (tmp_path / "source").iterdir() if path.is_file()]
    (tmp_path / "source" / "0_Transformer").mkdir()
    for path in own:
        if path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(path.parent / "0_Transformer" / path.name)
    write_json(tmp_path / "source" / "modules.json", modules)
    given = words(tmp_path / "source", data, tmp_path / "out", max_steps=2)
    assert finetune_embeddings.main(given) == 0
    assert "cut at 20 tokens" in capsys.readouterr().out
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").similarity_fn_name == "cosine"
    assert finetune_embeddings.main([*given, "--gradient_accumulation_steps", "2"]) == 2
    assert "gradient_accumulation_steps 1 instead of 2" in capsys.readouterr().err


def test_equal_labels_have_no_correlation(encoder, data, tmp_path, capsys):
    rows = [{"sentence1": text, "sentence2": text, "label": 5.0} for text in SENTENCES]
    (data / "stsb" / "validation.parquet").unlink()
    write_split(data / "stsb" / "validation.jsonl", rows)
    assert finetune_embeddings.main(words(encoder, data, tmp_path / "out")) == 2
    assert "equal labels" in capsys.readouterr().err


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


@pytest.mark.parametrize("kind", ["code.Evil", "antigravity.Evil", None])
def test_modules_of_other_packages_are_refused(encoder, data, tmp_path, capsys, kind):
    source = shutil.copytree(encoder, tmp_path / "source")
    (source / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\nclass Evil: pass\n")
    write_json(source / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": kind}])
    assert finetune_embeddings.main(words(source, data, tmp_path / "out")) == 2
    assert str(source) in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "made").exists()


def test_a_run_killed_after_its_last_update_does_not_train_on(encoder, data, tmp_path, monkeypatch):
    output = tmp_path / "out"
    given = words(encoder, data, output, num_train_epochs=1.5, per_device_train_batch_size=16, learning_rate=1e-2)
    with monkeypatch.context() as patch:
        patch.setattr(finetune_embeddings.EmbeddingTrainer, "require_finite", _killed_at_the_end)
        with pytest.raises(ArithmeticError, match="killed"):
            finetune_embeddings.main(given)
    monkeypatch.setattr(finetune_embeddings.EmbeddingTrainer, "train", None)
    assert finetune_embeddings.main(given) == 0
    figures = json.loads((output / "metrics.json").read_text())
    assert figures["steps"] == 3 and figures["scores"] != figures["scores_before"]


def _killed_at_the_end(trainer, values):
    if "training loss" not in values:
        raise ArithmeticError("killed")


def test_damaged_checkpoints_are_named_and_an_older_one_used(encoder, data, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    given = words(encoder, data, output, num_train_epochs=3, per_device_train_batch_size=16, save_total_limit=3)
    with monkeypatch.context() as patch:
        patch.delattr(finetune_embeddings, "seconds")  # a kill after the training
        with pytest.raises(NameError):
            finetune_embeddings.main(given)
    flipped, lost = output / "checkpoint-6" / "optimizer.pt", output / "checkpoint-4" / "scheduler.pt"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 0x40
    flipped.write_bytes(content)
    lost.unlink()
    assert finetune_embeddings.main(given) == 0
    printed = capsys.readouterr().out
    assert "checkpoint-6: optimizer.pt differs" in printed and "checkpoint-4: scheduler.pt is missing" in printed
    assert "Continuing from checkpoint-2" in printed
