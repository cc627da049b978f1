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
from fairseq_format import reference, verification
from fairseq_format.checkpoint import open_original
from fairseq_format.config import Head
from fairseq_format.verification import compare, compare_outputs
from helpers import ROOT, refused, tiny_model
from official_luna import CHECKPOINTS, FIXTURES, MLM, POOLINGS, Fixture
from safetensors.torch import load_file, save_file

from luna_hf.scripting import UserError

HEADS = list(POOLINGS)
MODEL, OUTPUTS = CHECKPOINTS / "tied" / "model.pt", CHECKPOINTS / "tied" / "expected.safetensors"


def mlm_original(name="tied_dynamic", **changes):
    return Fixture("luna_mlm", name).original(**changes)


def mlm_file(name="tied_dynamic"):
    return FIXTURES / "luna_mlm" / f"{name}.safetensors"


def convert(original, folder, head="lm_head", kind="masked_lm"):
    """A converted model without its tokenizer."""
    model, _ = fairseq_luna.make_model(original, Head(head, kind))
    model.save_pretrained(folder)
    return folder


def scaled(original, part, factor):
    """The same, with every tensor multiplied that has `part` in its name."""
    weights = {name: t * factor if part in name else t for name, t in original.weights.items()}
    return dataclasses.replace(original, weights=weights)


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
    """Folders of conversions by fixture and head, made once; tests that edit one use `copy_of`."""
    made = {}

    def get(name, head="lm_head", kind="masked_lm"):
        if (name, head) not in made:
            folder = tmp_path_factory.mktemp("model")
            if name in MLM:
                convert(mlm_original(name), folder, head, "classification" if head in HEADS else kind)
            else:
                with open_original(CHECKPOINTS / name / "model.pt") as original:
                    convert(original, folder)
            made[name, head] = folder
        return made[name, head]

    return get


@pytest.fixture
def copy_of(converted, tmp_path):
    return lambda *which: shutil.copytree(converted(*which), tmp_path / "model")


# ---- correct conversions ----


@pytest.mark.parametrize("file", ["model.pt", "expected.safetensors"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_command_accepts_a_conversion(converted, capsys, name, file):
    assert verify.main([str(converted(name)), str(CHECKPOINTS / name / file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines[lines.index("") + 2 : -2]]
    assert rows == ["embedding", "layer 1", "layer 2", "logits"]
    assert lines[-1].startswith("Equal to the original") and "not equal" not in "".join(lines)
    assert ("4 rows of 1, 3, 6, 38 random" if file == "model.pt" else "7 rows of 2, 4, 5, 6, 12, 22, 40") in lines[1]


def test_the_table_in_the_documentation(converted, capsys):
    """Rounding depends on the machine, so differences are left out."""
    page = (ROOT / "docs" / "authors-checkpoints.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n( +tokens .*?)```", page, re.DOTALL)
    assert verify.main([str(converted("untied")), str(CHECKPOINTS / "untied")]) == 0
    printed, shown = (re.sub(r"\S+e-1\d ", "", text) for text in (capsys.readouterr().out, shown))
    assert shown in printed


@pytest.mark.parametrize("kind", ["classification", "ranking", "encoder", "masked_lm"])
@pytest.mark.parametrize("name", MLM)
def test_every_class(converted, tmp_path, name, kind):
    original = mlm_original(name)
    heads = {"classification": HEADS, "ranking": ["choice"], "encoder": [None], "masked_lm": ["lm_head"]}[kind]
    if kind == "ranking":
        for part in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias"):
            tensor = original.weights[f"classification_heads.cls_classification_head.{part}"]
            tensor = tensor[:1] if "out_proj" in part else tensor + 0.1
            original.weights[f"classification_heads.choice.{part}"] = tensor
    for head in heads:
        folder = convert(original, tmp_path, head, kind) if kind == "ranking" else converted(name, head, kind)
        reports = [compare(folder, original)]
        assert reports[0].rows[-1].layer == {"masked_lm": "logits", "encoder": "layer 3"}.get(kind, head)
        assert len(reports[0].rows) == 8 + (kind != "encoder")
        reports += [] if kind == "ranking" else [compare_outputs(folder, mlm_file(name))]
        for report in reports:
            assert report.ok, report.summary()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sharp_attention(tmp_path, dtype):
    """In float32, rounding would exceed any limit."""
    original = scaled(mlm_original("untied_fixed"), "_proj.weight", 3.0)
    original = dataclasses.replace(original, weights={n: t.to(dtype) for n, t in original.weights.items()}, dtype=dtype)
    folder = convert(original, tmp_path)
    assert compare(folder, original).ok
    edit_weights(folder, change("luna.encoder.layer.1.intermediate.dense.weight", (3, 5), 1e-2))
    assert not compare(folder, original).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_rounded_to_half_precision(tmp_path, dtype):
    model, _ = fairseq_luna.make_model(mlm_original(), Head("lm_head", "masked_lm"), dtype)
    model.save_pretrained(tmp_path)
    report = compare(tmp_path, mlm_original())
    assert report.ok and f"rounded to {str(dtype).removeprefix('torch.')}" in report.inputs


def test_limits_grow_with_the_numbers(copy_of):
    folder = copy_of("tied")
    rows = compare_outputs(folder, OUTPUTS).rows
    assert rows[-1].limit > 1e-4 and all(row.limit >= 1e-5 for row in rows)
    edit_weights(folder, change("lm_head.bias", 4, 2 * rows[-1].limit))
    assert not compare_outputs(folder, OUTPUTS).ok


# ---- wrong weights ----


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


@pytest.mark.parametrize("file", [MODEL, OUTPUTS], ids=["checkpoint", "outputs"])
@pytest.mark.parametrize("error", WEIGHT_ERRORS)
def test_wrong_weights(copy_of, capsys, error, file):
    folder, (edit, first) = copy_of("tied"), WEIGHT_ERRORS[error]
    edit_weights(folder, edit)
    if file == OUTPUTS and error == "one token":
        first = "logits"  # its rows lack that token, but the output layer has the same matrix
    assert verify.main([str(folder), str(file)]) == 1
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


# ---- wrong configs and options ----


@pytest.mark.parametrize("file", [MODEL, OUTPUTS], ids=["checkpoint", "outputs"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 2),
        ("num_projected_attention_heads", 2),
        ("hidden_act", "gelu_pytorch_tanh"),
        ("dynamic_projection", False),
        ("layer_norm_eps", 1e-4),
        ("tokens_per_slot", 2),
        ("local_window", 4),
        ("full_attention_layers", [0]),
    ],
)
def test_a_config_that_computes_something_else(copy_of, name, value, file):
    folder = copy_of("tied")
    edit_config(folder, **{name: value})
    assert verify.main([str(folder), str(file)]) != 0


@pytest.mark.parametrize(("right", "wrong"), [("--layer-norm plain", "--layer-norm offset"), ("4", "8")])
def test_reading_options(converted, right, wrong):
    words = [f"--override encoder_attention_heads={w}" if w.isdigit() else w for w in (right, wrong)]
    for status, options in enumerate(words):
        assert verify.main([str(converted("tied")), str(MODEL), *options.split()]) == status


# ---- what cannot be compared ----


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 1}, "luna.encoder.layer.1."),
        ({"num_hidden_layers": 3}, "luna.encoder.layer.2."),
        ({"vocab_size": 293}, "model"),
        ({"tie_kv": False}, "key.weight"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"architectures": ["LunaForTokenClassification"]}, "LunaForTokenClassification"),
        ({"architectures": ["LunaForMultipleChoice"]}, "classifier."),
    ],
)
def test_configs_that_do_not_fit_the_weights(copy_of, capsys, fields, named):
    folder = copy_of("tied")
    edit_config(folder, **fields)
    assert verify.main([str(folder), str(MODEL)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "file", "words", "named"),
    [
        ("nothing", MODEL, "", "nothing"),
        (MODEL, CHECKPOINTS, "", ".pt"),
        ("tied", "nothing.pt", "", "nothing.pt"),
        ("tied", "nothing.safetensors", "", "nothing.safetensors"),
        ("tied", OUTPUTS, "--layer-norm plain", "--layer-norm"),
        ("tied", MODEL, f"--head {HEADS[0]}", "--head"),
        ("tied", MODEL, "--override heads", "NAME=VALUE"),
        ("tied_dynamic", MODEL, "", "model.pt"),
        ("tied_dynamic", OUTPUTS, "", "expected.safetensors"),
        (HEADS[0], MODEL, "", HEADS[0]),
        (HEADS[0], mlm_file(), "--head other", "other"),
        (HEADS[0], mlm_file(), f"--head {HEADS[1]}", HEADS[1]),
    ],
)
def test_what_cannot_be_compared(converted, capsys, model, file, words, named):
    folder = converted("tied_dynamic", model) if model in HEADS else model
    folder = converted(model) if model in ("tied", "tied_dynamic") else folder
    assert verify.main([str(folder), str(file), *words.split()]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"case1.input.tokens": load_file(OUTPUTS)["case1.input.tokens"] + 280}, "ids"),
        ({"case1.input.tokens": torch.full((2, 41), 5)}, "outputs.safetensors"),
        ({"case1.output.hidden.1.x": torch.zeros(2, 5, 16)}, "hidden.1.x"),
        ({"case1.output.hidden.1.px": None}, "case1.output.hidden.1.px"),
        ({name: None for name in load_file(OUTPUTS) if name.endswith("tokens")}, "--help"),
    ],
)
def test_files_of_outputs_that_do_not_fit(converted, tmp_path, capsys, changes, named):
    changed = {**load_file(OUTPUTS), **changes}
    save_file({n: t for n, t in changed.items() if t is not None}, tmp_path / "outputs.safetensors")
    assert verify.main([str(converted("tied")), str(tmp_path / "outputs.safetensors")]) == 2
    assert named in capsys.readouterr().err


def test_originals_that_are_incomplete(converted):
    original, folder = mlm_original(), converted("tied_dynamic")
    for name in ("layers.1.fc2.bias", "embed_positions.weight"):
        weights = {n: t for n, t in original.weights.items() if not n.endswith(name)}
        with refused(original.name, error=UserError):
            compare(folder, dataclasses.replace(original, weights=weights))
    with refused(original.name, error=UserError):
        compare(folder, mlm_original(encoder_attention_heads=5))


def test_translation_models_and_others_are_not_mixed(converted):
    seq2seq = Fixture("luna_seq2seq", "post_tied_sinusoidal")
    original = dataclasses.replace(mlm_original(), weights=seq2seq.weights())
    with refused("LunaForMaskedLM", error=UserError):
        compare(converted("tied"), original)


def test_other_sizes_of_states():
    with refused("hidden.1.px", error=UserError):
        verification._measure([("hidden.1.px", torch.zeros(2, 3), torch.zeros(2, 4))], 1.0)
    assert tiny_model().config.pad_token_id == reference.PADDING_ID
