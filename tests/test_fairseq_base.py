"""Conversions at the size of the published checkpoints, with random weights: `make test-all`."""

import time

import fairseq_luna
import pytest
import torch
from gpt2_files import gpt2_folder, roberta_dictionary
from tiny_fairseq import make_state, random_weights, tiny_arguments, write_archive
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaTokenizer

SIZES = {
    "encoder_layers": 12,
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_attention_heads": 12,
    "max_positions": 512,
    "projection_length": 128,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("untied", "dtype", "parameters"), [(False, torch.float32, 131_902_041), (True, torch.float16, 146_076_249)]
)
def test_an_archive_of_the_published_size(untied, dtype, parameters, tmp_path, capsys):
    arguments = tiny_arguments(**SIZES, untie_luna_kv=untied)
    folder = tmp_path / "luna.base"
    folder.mkdir()
    torch.save(make_state(random_weights(arguments, 50265), arguments, dtype=dtype), folder / "model.pt")
    roberta_dictionary(folder / "dict.txt")
    gpt2_folder(folder)
    archive = write_archive(folder)
    started = time.monotonic()
    assert fairseq_luna.main([str(archive), str(tmp_path / "out")]) == 0
    seconds = time.monotonic() - started
    printed = capsys.readouterr().out
    assert f"{parameters:,} parameters" in printed and "Equal to the original" in printed
    assert seconds < 120, f"the conversion took {seconds:.0f} s, and the documentation says half a minute"
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.dtype == dtype and model.num_parameters() == parameters
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(tokenizer) is RobertaTokenizer and tokenizer("Hello world")["input_ids"] == [0, 31414, 232, 2]
