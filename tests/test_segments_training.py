"""Training with packed states as a memory across segments, through the commands."""

import pretrain_mlm
import pytest
from engine import loop
from tiny_finetuning import glue_folder
from tiny_finetuning import run as finetune
from tiny_training import (
    DEMO,
    Killed,
    arguments,
    dies_at_call,
    losses,
    run,
    same_weights,
    start,
    without_model_section,
    write_corpus,
)
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

SEGMENTS = {
    **{"block_size": 64, "global_batch_tokens": 512, "max_steps": 4},
    **{"model__segment_length": 32, "model__projection_length": 8, "model__max_position_embeddings": 32},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments") / "run"
    run(folder, data=corpus, **SEGMENTS)
    return folder


def test_rows_of_several_segments_need_positions_for_one(trained):
    config = AutoModelForMaskedLM.from_pretrained(trained).config
    assert (config.segment_length, config.max_position_embeddings) == (32, 32)
    assert "Inputs have any number of tokens." in (trained / "README.md").read_text()


def test_an_interrupted_run_resumes_exactly(corpus, trained, tmp_path, monkeypatch):
    words = arguments(DEMO, tmp_path / "run", data=corpus, **SEGMENTS)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, loop, "one_update", 4)
        start(pretrain_mlm, words)
    assert start(pretrain_mlm, words) == 0
    assert losses(tmp_path / "run") == losses(trained) and same_weights(tmp_path / "run", trained)


def test_a_model_learns_to_read_segments_when_it_is_trained_further(corpus, tmp_path):
    plain = {name: value for name, value in SEGMENTS.items() if name != "model__segment_length"}
    run(tmp_path / "short", data=corpus, **{**plain, "block_size": 32, "fill_mask": "[a <mask>]"})
    further = {"data": corpus, "model": "{}", "block_size": 64, "global_batch_tokens": 512}
    words = without_model_section(arguments(DEMO, tmp_path / "long", **further))
    words += ["--model_name_or_path", str(tmp_path / "short"), "--train_tokenizer", "false"]
    assert start(pretrain_mlm, [*words, "--model.segment_length", "32"]) == 0
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "long").config
    assert (config.segment_length, config.max_position_embeddings) == (32, 32)  # positions were not extended


def test_a_trained_model_is_finetuned_in_segments(trained, tmp_path):
    options = {"dataset_name": glue_folder(tmp_path / "glue"), "task_name": "sst2", "num_train_epochs": 1}
    finetune(trained, tmp_path / "run", max_length=64, model_config="classifier_pooling=packed_mean", **options)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert (model.config.segment_length, model.config.classifier_pooling) == (32, "packed_mean")
