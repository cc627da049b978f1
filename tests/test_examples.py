"""The scripts of `examples`, with tiny models."""

import finetune_with_trainer
import pytest
import swap_roberta
from finetune_with_trainer import TEST, TRAIN, rows
from helpers import tiny_tokenizer
from tiny_finetuning import encoder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer([swap_roberta.TEXT, *rows([*TRAIN, *TEST])["text"]] * 3, vocab_size=900)
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    # The convolution lets Luna learn fastest.
    own = {"luna": {"classifier_pooling": "mean", "conv_kernel_size": 3}, "roberta": {}}
    for family, more in own.items():
        encoder(family, **more, **fields).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder


def test_finetuning_learns(models, capsys):
    words = ["--epochs", "2", "--learning-rate", "1e-2"]
    assert finetune_with_trainer.main([str(models / "luna"), *words]) == 0
    *_, before, _, after, _ = capsys.readouterr().out.splitlines()[-1].split()
    assert float(before) < 0.7 < 0.9 < float(after)


def test_train_and_test_sentences_differ():
    assert not set(rows(TRAIN)["text"]) & set(rows(TEST)["text"])
    labels = rows(TEST)["label"]
    assert sum(labels) == len(labels) / 2


def test_only_full_attention_keeps_the_predictions(models, capsys):
    assert swap_roberta.main([str(models / "roberta")]) == 0
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row[1].strip() for row in table] == list(swap_roberta.SWAPS)
    changed = [float(row[5]) for row in table]
    assert table[0][4].strip() == "100%" and changed[0] < 1e-4 < min(changed[1:])


def test_a_missing_checkpoint_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert finetune_with_trainer.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoints/" in line


def test_a_roberta_that_cannot_be_loaded_is_one_line(tmp_path, capsys):
    assert swap_roberta.main([str(tmp_path / "nowhere")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in line
