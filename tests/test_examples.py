"""The scripts of `examples`, with tiny models."""

import fill_and_classify
import finetune_with_trainer
import pytest
import swap_roberta
from finetune_with_trainer import TEST, TRAIN, rows
from helpers import tiny_tokenizer
from tiny_finetuning import encoder

from luna_hf import LunaForSequenceClassification


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    texts = [*fill_and_classify.MASKED, *fill_and_classify.REVIEWS, swap_roberta.TEXT, *rows([*TRAIN, *TEST])["text"]]
    tokenizer = tiny_tokenizer(texts * 3, vocab_size=900)
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    luna = encoder("luna", classifier_pooling="mean", conv_kernel_size=3, **fields)  # learns fastest
    luna.save_pretrained(folder / "luna-mini-en")
    encoder("roberta", **fields).save_pretrained(folder / "roberta-mini-en")
    LunaForSequenceClassification(luna.config).save_pretrained(folder / "luna-mini-en-sst2")
    for name in ("luna-mini-en", "roberta-mini-en", "luna-mini-en-sst2"):
        tokenizer.save_pretrained(folder / name)
    return folder


def test_fill_and_classify(models, capsys):
    assert fill_and_classify.main([str(models)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * len(fill_and_classify.MASKED) + len(fill_and_classify.REVIEWS)
    assert all(review in line for review, line in zip(fill_and_classify.REVIEWS, lines[-3:], strict=True))


def test_finetuning_learns(models, capsys):
    words = ["--epochs", "2", "--learning-rate", "1e-2"]
    assert finetune_with_trainer.main([str(models / "luna-mini-en"), *words]) == 0
    *_, before, _, after, _ = capsys.readouterr().out.splitlines()[-1].split()
    assert float(before) < 0.7 < 0.9 < float(after)


def test_train_and_test_sentences_differ():
    assert not set(rows(TRAIN)["text"]) & set(rows(TEST)["text"])
    labels = rows(TEST)["label"]
    assert sum(labels) == len(labels) / 2


def test_only_full_attention_keeps_the_predictions(models, capsys):
    assert swap_roberta.main([str(models / "roberta-mini-en")]) == 0
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row[1].strip() for row in table] == list(swap_roberta.SWAPS)
    changed = [float(row[5]) for row in table]
    assert table[0][4].strip() == "100%" and changed[0] < 1e-4 < min(changed[1:])


@pytest.mark.parametrize("script", [fill_and_classify, finetune_with_trainer])
def test_a_missing_checkpoint_is_one_line(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert script.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoints/" in line


def test_a_roberta_that_cannot_be_loaded_is_one_line(tmp_path, capsys):
    assert swap_roberta.main([str(tmp_path / "nowhere")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in line
