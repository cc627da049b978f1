"""`verify.py` accepts every correct conversion, and finds every error."""

import dataclasses
import json
import math
import re
import shutil

import fairseq_luna
import pytest
import torch
import verify
from fairseq_format import verification
from fairseq_format.checkpoint import open_checkpoint
from fairseq_format.config import Head
from fairseq_format.verification import compare
from helpers import ROOT, refused
from official_luna import CHECKPOINTS, POOLINGS, Fixture
from safetensors.torch import load_file, save_file

from luna_hf.scripting import UserError

HEADS = list(POOLINGS)
MODEL = CHECKPOINTS / "tied" / "model.pt"


def mlm_original(name="tied_dynamic"):
    return Fixture("luna_mlm", name).original()


def convert(original, folder, head="lm_head", kind="masked_lm"):
    """A converted model without its tokenizer."""
    fairseq_luna.make_model(original, Head(head, kind))[0].save_pretrained(folder)
    return folder


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Folders of conversions by fixture or checkpoint, made once; tests that edit one use `copy_of`."""
    names = ("tied_dynamic", "untied_dynamic")
    made = {name: convert(mlm_original(name), tmp_path_factory.mktemp(name)) for name in names}
    for name in ("tied", "untied"):
        with open_checkpoint(CHECKPOINTS / name / "model.pt") as original:
            made[name] = convert(original, tmp_path_factory.mktemp(name))
    return made


@pytest.fixture
def copy_of(converted, tmp_path):
    return lambda name: shutil.copytree(converted[name], tmp_path / "model")


# ---- correct conversions ----


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_command_accepts_a_conversion(converted, capsys, name):
    """And prints the table of the documentation, but for rounding, which depends on the machine."""
    assert verify.main([str(converted[name]), str(CHECKPOINTS / name)]) == 0
    printed = capsys.readouterr().out
    assert "4 rows of 1, 3, 6, 38 random" in printed and printed.splitlines()[-1].startswith("Equal to the original")
    page = (ROOT / "docs" / "authors-checkpoints.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n( +tokens .*?)```", page, re.DOTALL)
    printed, shown = (re.sub(r"\S+e-1\d ", "", text) for text in (printed, shown))
    assert name == "tied" or shown in printed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_rounded_to_half_precision(tmp_path, dtype):
    model, _ = fairseq_luna.make_model(mlm_original(), Head("lm_head", "masked_lm"), dtype)
    model.save_pretrained(tmp_path)
    report = compare(tmp_path, mlm_original())
    assert report.ok and f"rounded to {str(dtype).removeprefix('torch.')}" in report.inputs


# ---- errors ----


def swap_layers(tensors):
    for name in [name for name in tensors if "encoder.layer.0." in name]:
        other = name.replace("layer.0.", "layer.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def transpose(tensors):
    name = "luna.encoder.layer.1.attention.output.dense.weight"
    tensors[name] = tensors[name].T.contiguous()


def change(name, index, by):
    def edit(tensors):
        tensors[name][index] += by

    return edit


# The error, and the layer where the table shows it first.
WEIGHT_ERRORS = {
    "one weight": (change("luna.encoder.layer.1.intermediate.dense.weight", (3, 5), 1e-3), "layer 2"),
    "pack query": (change("luna.encoder.layer.1.attention.self.pack.query.weight", (3, 5), 1e-2), "layer 2"),
    "one token": (change("luna.embeddings.word_embeddings.weight", (77, 2), 1e-3), "embedding"),
    "last position": (change("luna.embeddings.position_embeddings.weight", (-1, 2), 1e-3), "embedding"),
    "last slot": (change("luna.packed_embeddings.weight", (-1, 2), 1e-3), "embedding"),
    "output bias": (change("lm_head.bias", 4, 1e-3), "logits"),
    "NaN": (change("luna.encoder.layer.1.output.dense.bias", 4, math.nan), "layer 2"),
    "infinity": (change("luna.encoder.layer.1.output.dense.bias", 4, math.inf), "layer 2"),
    "layers swapped": (swap_layers, "layer 1"),
    "transposed": (transpose, "layer 2"),
}


@pytest.mark.parametrize("error", WEIGHT_ERRORS)
def test_wrong_weights(copy_of, capsys, error):
    folder, (edit, first) = copy_of("tied"), WEIGHT_ERRORS[error]
    edit_weights(folder, edit)
    assert verify.main([str(folder), str(MODEL)]) == 1
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.endswith("not equal")]
    assert table[0].startswith(first) and lines[-1].startswith("Not equal to the original")
    assert ("nan" in table[-1]) == (error in ("NaN", "infinity"))


def test_every_parameter_matters(copy_of):
    """A change by 0.01 in any tensor is found, except in keys' biases, which a softmax cancels."""
    folder, original = copy_of("untied_dynamic"), mlm_original("untied_dynamic")
    path, unseen = folder / "model.safetensors", []
    for name, tensor in load_file(path).items():
        if "layer.0" in name or "layer.2" in name:
            continue  # like the layer between them
        edit_weights(folder, change(name, tuple(size // 2 for size in tensor.shape), 0.01))
        if compare(folder, original).ok:
            unseen.append(name)
        edit_weights(folder, lambda tensors, name=name, tensor=tensor: tensors.update({name: tensor}))
    assert len(unseen) == 2 and all(name.endswith("key.bias") for name in unseen), unseen


def test_what_is_not_a_number_is_never_equal():
    for difference in (math.nan, math.inf):
        assert not verification.Row("logits", "", difference, math.inf).ok


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"num_attention_heads": 2}, 1),
        ({"num_projected_attention_heads": 2}, 1),
        ({"hidden_act": "gelu_pytorch_tanh"}, 1),
        ({"dynamic_projection": False}, 1),
        ({"layer_norm_eps": 1e-4}, 1),
        ({"tokens_per_slot": 2}, 1),
        ({"num_hidden_layers": 1}, 2),
        ({"num_hidden_layers": 3}, 2),
        ({"vocab_size": 293}, 2),
        ({"tie_kv": False}, 2),
        ({"num_attention_heads": 5}, 2),
        ({"architectures": ["LunaForTokenClassification"]}, 2),
    ],
)
def test_wrong_configs(copy_of, fields, status):
    folder = copy_of("tied")
    edit_config(folder, **fields)
    assert verify.main([str(folder), str(MODEL)]) == status


@pytest.mark.parametrize(("right", "wrong"), [("--layer-norm plain", "--layer-norm offset"), ("4", "8")])
def test_reading_options(converted, right, wrong):
    words = [f"--override encoder_attention_heads={w}" if w.isdigit() else w for w in (right, wrong)]
    for status, options in enumerate(words):
        assert verify.main([str(converted["tied"]), str(MODEL), *options.split()]) == status


@pytest.mark.parametrize(
    ("model", "file", "words", "named"),
    [
        ("nothing", MODEL, "", "nothing"),
        (MODEL, CHECKPOINTS, "", ".pt"),
        ("tied", "nothing.pt", "", "nothing.pt"),
        ("tied", MODEL, f"--head {HEADS[0]}", "--head"),
        ("tied", MODEL, "--override heads", "NAME=VALUE"),
        ("tied_dynamic", MODEL, "", "model.pt"),
    ],
)
def test_what_cannot_be_compared(converted, capsys, model, file, words, named):
    assert verify.main([str(converted.get(str(model), model)), str(file), *words.split()]) == 2
    assert named in capsys.readouterr().err


def test_originals_that_do_not_fit(converted, tmp_path):
    original, folder = mlm_original(), converted["tied_dynamic"]
    seq2seq = Fixture("luna_seq2seq", "post_tied_sinusoidal").weights()
    lacking = [{n: t for n, t in original.weights.items() if not n.endswith(w)} for w in ("1.fc2.bias", "lm_head.bias")]
    for weights in (seq2seq, *lacking):
        with refused(original.name, error=UserError):
            compare(folder, dataclasses.replace(original, weights=weights))
    classifier = convert(original, tmp_path, HEADS[0], "classification")
    with open_checkpoint(MODEL) as other, refused(HEADS[0], error=UserError):
        compare(classifier, other)
