"""The options of the converter of the authors' checkpoints, and what it finds out without them."""

import json
import os
import re
import subprocess
import sys

import fairseq_luna
import fairseq_names
import pytest
import torch
import verify
from helpers import ROOT
from huggingface_hub import ModelCard
from test_fairseq_luna import convert, stored_types
from tiny_fairseq import genuine_folder, random_weights, tiny_arguments, write_archive, write_fairseq, write_tiny
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaTokenizer

from luna_hf import LunaConfig, LunaForMaskedLM, LunaForSequenceClassification

# ---- LayerNorm ----


def less_one(weights):
    norm = fairseq_names.NORM
    return {name: tensor - 1 if norm.search(name) else tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("told", [(), ("--layer-norm", "offset")])
def test_norms_stored_less_one(told, tmp_path, capsys):
    arguments = tiny_arguments()
    weights = random_weights(arguments, heads={"attention_classification_head": 2})
    plain = write_fairseq(tmp_path / "plain", weights, arguments)
    offset = write_fairseq(tmp_path / "offset", less_one(weights), arguments)
    models = [
        LunaForSequenceClassification.from_pretrained(convert(source, tmp_path / f"{source.name}-out", *words))
        for source, words in ((plain, ()), (offset, told))
    ]
    printed = capsys.readouterr().out
    assert "LayerNorm: plain weights (found out" in printed
    assert f"LayerNorm: weights less 1, to which 1 was added ({'as told' if told else 'found out'}" in printed
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_stored_less_one_in_half_precision(dtype, tmp_path, capsys):
    """They have more digits than 1 + w has in that type: compared in float32, then rounded, unless float32 is asked."""
    arguments = tiny_arguments()
    weights = {name: tensor.to(dtype) for name, tensor in less_one(random_weights(arguments)).items()}
    source = write_fairseq(tmp_path / "source", weights, arguments)
    folder = convert(source, tmp_path / "half")
    assert re.search(r"the checkpoint's type: [1-9]\d* of \d+ tensors are rounded", capsys.readouterr().out)
    assert stored_types(folder) == {str(dtype).removeprefix("torch.")}
    assert verify.main([str(folder), str(source)]) == 0
    model = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "wide", "--dtype", "float32"))
    for stored, ours in (
        ("encoder.lm_head.layer_norm.weight", model.lm_head.layer_norm.weight),
        ("encoder.sentence_encoder.proj_emb_layer_norm.weight", model.luna.packed_embeddings.LayerNorm.weight),
    ):
        assert torch.equal(ours, weights[stored].float() + 1)


def test_norms_that_do_not_tell(tmp_path, capsys):
    arguments = tiny_arguments()
    halved = {n: t / 2 if fairseq_names.NORM.search(n) else t for n, t in random_weights(arguments).items()}
    source = write_fairseq(tmp_path / "source", halved, arguments)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "--layer-norm plain" in capsys.readouterr().err
    model = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "out", "--layer-norm", "plain"))
    assert torch.equal(model.lm_head.layer_norm.weight, halved["encoder.lm_head.layer_norm.weight"])
    assert "as told" in capsys.readouterr().out


# ---- options ----


def test_another_type_if_asked(tmp_path, capsys):
    """The result is compared with the original before it is rounded."""
    source = genuine_folder(tmp_path / "source", "untied")
    folder = convert(source, tmp_path / "wide", "--dtype", "float32")
    printed = capsys.readouterr().out
    assert stored_types(folder) == {"float32"} and "written in float32, as asked: no number changes" in printed
    assert "stored in" not in printed and "dtype=torch.float32" not in (folder / "README.md").read_text()
    folder = convert(genuine_folder(tmp_path / "single", "tied"), tmp_path / "narrow", "--dtype", "bfloat16")
    printed = capsys.readouterr().out
    assert stored_types(folder) == {"bfloat16"} and re.search(
        r"in bfloat16, as asked: \d+ of \d+ tensors are rounded", printed
    )
    assert "Equal to the original" in printed and "Equal to the original" in (folder / "README.md").read_text()
    assert verify.main([str(folder), str(tmp_path / "single")]) == 0
    assert "rounded to bfloat16, as the model is stored (" in capsys.readouterr().out


def test_half_precision_is_said_to_be_for_inference(tmp_path, capsys):
    folder = convert(genuine_folder(tmp_path / "source", "untied"), tmp_path / "out")
    assert "stored in float16. To train it, load it with dtype=torch.float32" in capsys.readouterr().out
    assert "`dtype=torch.float32`" in (folder / "README.md").read_text()


def test_mixed_types_become_the_wider(tmp_path):
    arguments = tiny_arguments()
    weights = {n: t.half() if "fc1" in n else t for n, t in random_weights(arguments).items()}
    assert stored_types(convert(write_fairseq(tmp_path / "source", weights, arguments), tmp_path / "out")) == {
        "float32"
    }


@pytest.mark.parametrize("form", ["none", "bare"])
def test_without_arguments_the_defaults_are_said(form, tmp_path, capsys):
    source = write_tiny(tmp_path / "source", form=form)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "12 attention heads (not in the file" in capsys.readouterr().err
    convert(source, tmp_path / "out", "--override", "encoder_attention_heads=2", "--override", "activation_fn=relu")
    printed = capsys.readouterr().out
    assert "authors' defaults: pooler_activation_fn tanh, fix_projection_length False, dropout 0.1, atten" in printed
    config = LunaConfig.from_pretrained(tmp_path / "out")
    assert config.num_attention_heads == 2 and config.hidden_act == "relu"


def test_a_large_model_has_sixteen_heads_by_default(tmp_path):
    changes = {"arch": "luna_large_512", "encoder_attention_heads": None, "encoder_embed_dim": 32}
    folder = convert(write_tiny_with_heads(tmp_path / "source", changes), tmp_path / "out")
    assert LunaConfig.from_pretrained(folder).num_attention_heads == 16


def write_tiny_with_heads(folder, changes):
    """Without the argument for the heads: `None` takes it out of the file."""
    arguments = tiny_arguments(**changes)
    return write_fairseq(folder, random_weights(arguments), arguments)


@pytest.mark.parametrize("name", ["model.pth", "model"])
def test_a_checkpoint_file_of_another_name(name, tmp_path):
    source = write_tiny(tmp_path / "source")
    (source / "model.pt").rename(source / name)
    convert(source / name, tmp_path / "out")


def test_a_folder_that_may_not_be_read_beside_the_checkpoint(tmp_path, monkeypatch):
    """Simulated, because root may read everything."""
    source, access = write_tiny(tmp_path / "source"), os.access
    (source / "locked").mkdir()
    write_tiny(source / "locked" / "inner")
    (source / "locked" / "model.pt").write_text("not to be looked at")
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    convert(source, tmp_path / "out")


def test_the_folder_one_is_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_tiny(tmp_path / "luna.tiny"))
    convert(".", tmp_path / "out")
    assert "Read luna.tiny/model.pt" in capsys.readouterr().out


def test_a_checkpoint_file_and_one_of_several(tmp_path, capsys):
    source = write_tiny(tmp_path / "source", file="checkpoint1.pt", seed=1)
    write_tiny(source, file="checkpoint2.pt", seed=2)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "several checkpoints: checkpoint1.pt, checkpoint2.pt" in message and "--checkpoint NAME" in message
    first = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "a", "--checkpoint", "checkpoint1.pt"))
    second = LunaForMaskedLM.from_pretrained(convert(source / "checkpoint2.pt", tmp_path / "b"))
    for seed, model in ((1, first), (2, second)):
        weights = random_weights(tiny_arguments(), seed=seed)
        assert torch.equal(model.lm_head.bias, weights["encoder.lm_head.bias"])
    write_tiny(source, file="checkpoint_best.pt", seed=3)
    best = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "c"))
    assert torch.equal(best.lm_head.bias, random_weights(tiny_arguments(), seed=3)["encoder.lm_head.bias"])


@pytest.mark.parametrize("kind", ["zip", "tar", "gztar"])
def test_archives(kind, tmp_path):
    source = write_archive(write_tiny(tmp_path / "luna.tiny", labels=()), kind)
    assert type(AutoModelForMaskedLM.from_pretrained(convert(source, tmp_path / "out"))) is LunaForMaskedLM


def test_a_dictionary_and_bpe_files_elsewhere(tmp_path):
    source = write_tiny(tmp_path / "source")
    for old, new in (("dict.txt", "dictionary.txt"), ("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (source / old).rename(tmp_path / "elsewhere" / new)
    words = ("--dict", tmp_path / "elsewhere" / "dictionary.txt", "--gpt2-bpe", tmp_path / "elsewhere")
    folder = convert(source, tmp_path / "out", *words)
    assert len(AutoTokenizer.from_pretrained(folder)) == 60
    assert "--dict dictionary.txt --gpt2-bpe elsewhere" in (folder / "README.md").read_text()


def test_the_binarized_task_has_its_dictionary_in_a_folder(tmp_path):
    source = write_tiny(tmp_path / "source")
    (source / "input0").mkdir()
    (source / "dict.txt").rename(source / "input0" / "dict.txt")
    convert(source, tmp_path / "out")


@pytest.mark.parametrize("place", ["folder", "file", "input0", "elsewhere"])
def test_a_tokenizer_alone(place, tmp_path, capsys):
    source = genuine_folder(tmp_path / "source", "tied")
    (source / "model.pt").unlink()
    words = ["--tokenizer-only", "--gpt2-bpe", source]
    if place == "input0":
        (source / "input0").mkdir()
        (source / "dict.txt").rename(source / "input0" / "dict.txt")
    elif place == "elsewhere":
        (source / "dict.txt").rename(tmp_path / "dict.txt")
        words += ["--dict", tmp_path]
    folder = convert(source / "dict.txt" if place == "file" else source, tmp_path / "out", *words)
    assert "Tokenizer: 294 tokens" in capsys.readouterr().out
    assert not (folder / "config.json").exists() and ModelCard.load(folder / "README.md").data.tags == ["fairseq"]
    assert len(AutoTokenizer.from_pretrained(folder)) == 294
    convert(source / "dict.txt" if place == "file" else source, folder, *words, "--overwrite")


def test_a_dictionary_with_a_byte_order_mark_and_windows_line_ends(tmp_path):
    source = genuine_folder(tmp_path / "source", "tied")
    plain = AutoTokenizer.from_pretrained(convert(source, tmp_path / "plain")).get_vocab()
    text = (source / "dict.txt").read_text()
    (source / "dict.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert AutoTokenizer.from_pretrained(convert(source, tmp_path / "marked")).get_vocab() == plain


def test_a_folder_for_the_dictionary(tmp_path):
    source = write_tiny(tmp_path / "source")
    (tmp_path / "data-bin" / "input0").mkdir(parents=True)
    (source / "dict.txt").rename(tmp_path / "data-bin" / "input0" / "dict.txt")
    convert(source, tmp_path / "out", "--dict", tmp_path / "data-bin")


def test_overwrite_replaces_a_conversion_only(tmp_path, capsys):
    source = write_tiny(tmp_path / "source")
    convert(source, tmp_path / "out")
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    convert(source, tmp_path / "out", "--overwrite")


def test_a_complete_dictionary_needs_no_class_of_ours(tmp_path):
    """With all of the BPE's tokens, the tokenizer is transformers' own."""
    source = write_tiny(tmp_path / "source", vocab_size=5 + 256 + 400 + 2)
    folder = convert(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is RobertaTokenizer
    from_files = RobertaTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    text = " naïve text, with\tthe\n unusual  ☃ in it"
    assert from_files(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())


def test_the_script_as_a_user_runs_it(tmp_path):
    genuine_folder(tmp_path / "luna.tiny", "tied")
    words = [sys.executable, str(ROOT / "conversion" / "fairseq_luna.py"), "luna.tiny", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Read luna.tiny/model.pt (float32") and lines[-1].startswith("Written to out")
    assert "Traceback" not in done.stderr and "UserWarning" not in done.stderr
