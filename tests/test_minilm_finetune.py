"""The finetuning of converted sentence encoders: its tasks, its scores, and runs that continue exactly."""

import json
import shutil
from functools import partial

import minilm_finetune
import minilm_finetune_kinds as kinds
import minilm_finetune_mlm as mlm
import minilm_finetune_tasks as tasks
import minilm_finetune_train as training
import numpy as np
import pytest
import torch
from pyarrow import Table, parquet
from test_convert_command import WORDS, write_model
from transformers import AutoTokenizer, set_seed

from luna_hf import AbcForMaskedLM, AbcForSequenceClassification

FIELDS = {"memory_control": "compressive", "local_window": 4, "num_selected_tokens": 4, "memory_size": 2}
TEXTS = [" ".join((WORDS * 3)[start : start + size]) for start, size in ((0, 3), (1, 9), (2, 20), (3, 6))]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def tokenizer(source):
    return AutoTokenizer.from_pretrained(source)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pylist(rows), path)


class Killed(Exception):
    pass


def train_mlm(source, tokenizer, folder, stop=None):
    """LoRA and a masked-LM head for six updates, of which the run is killed after `stop`; returns its weights."""
    ends = np.arange(1, 25) * 12
    blocks = mlm.Blocks(np.random.default_rng(0).integers(5, 13, 24 * 12), ends, tokenizer, 0.3, 0)
    set_seed(0)
    model = AbcForMaskedLM.from_pretrained_encoder(source, sparse_prediction=True, max_length=40, **FIELDS)
    settings = training.Settings(1e-2, 4, 1, 0, (), rank=2, save_steps=2)
    adapted = training.adapt(model, settings)
    for name, parameter in model.lm_head.named_parameters():
        parameter.requires_grad = name != "decoder.weight"

    def collate(rows):
        if stop is not None:
            collate.calls += 1
            if collate.calls > stop:
                raise Killed
        return mlm.pad(rows)

    collate.calls = 0
    training.train(adapted, blocks, blocks.lengths, collate, settings, folder)
    return {name: value.clone() for name, value in adapted.state_dict().items()}


def test_a_killed_run_continues_exactly(source, tokenizer, tmp_path):
    whole = train_mlm(source, tokenizer, tmp_path / "whole")
    with pytest.raises(Killed):
        train_mlm(source, tokenizer, tmp_path / "killed", stop=5)
    assert not (tmp_path / "killed" / "checkpoint-6").exists()
    continued = train_mlm(source, tokenizer, tmp_path / "killed")
    fresh = AbcForMaskedLM.from_pretrained_encoder(source, max_length=40, **FIELDS).state_dict()
    assert whole.keys() == continued.keys()
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    moved = [name for name, value in whole.items() if "lora_B" in name and value.abs().sum() > 0]
    assert moved and torch.equal(
        fresh["abc.embeddings.word_embeddings.weight"], whole["base_model.model.lm_head.decoder.weight"]
    )
