"""The authors' model written out (`fairseq_reference.py`) gives the authors' numbers; `verify.py` finds every error."""

import dataclasses
import json
import math
import shutil
import sys

import pytest
import torch
from helpers import ROOT, tiny_model
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification

sys.path.insert(0, str(ROOT / "conversion"))  # the scripts import their siblings plainly

import fairseq_luna
import fairseq_reference
import verify
from common import UserError
from fairseq_checkpoint import Options, Original, open_original
from fairseq_config import Head

FIXTURES = ROOT / "tests" / "fixtures"
CHECKPOINTS = FIXTURES / "luna_fairseq_checkpoint"
MLM = ["tied_dynamic", "tied_fixed", "untied_dynamic", "untied_fixed"]
HEADS = ["cls_classification_head", "pooling_classification_head", "attention_classification_head"]
ENCODER = "encoder.sentence_encoder."


def mlm_file(name):
    return FIXTURES / "luna_mlm" / f"{name}.safetensors"


def mlm_meta(name):
    return json.loads(mlm_file(name).with_suffix(".json").read_text())


def mlm_original(name, **changes):
    """The stored tensors and arguments of a `luna_mlm` fixture."""
    known = {field.name for field in dataclasses.fields(Options)}
    arguments = {key: value for key, value in mlm_meta(name)["config"]["args"].items() if key in known}
    tensors = load_file(mlm_file(name))
    weights = {n.removeprefix("state_dict."): t for n, t in tensors.items() if n.startswith("state_dict.")}
    return Original(name, weights, Options(**{**arguments, **changes}))


def convert(original, folder, head=None, kind="masked_lm"):
    """A converted model without its tokenizer, which plays no part here."""
    model, _ = fairseq_luna.make_model(original, Head(head, kind), None)
    model.save_pretrained(folder)
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
    """Folders of conversions by fixture and head, made once; a test that edits one edits a copy (`copy_of`)."""
    made = {}

    def get(name, head="lm_head", kind=None):
        if (name, head, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{head}")
            if name in MLM:
                original, usual = mlm_original(name), "masked_lm" if head == "lm_head" else "classification"
                made[name, head, kind] = convert(original, folder, head, kind or usual)
            else:
                with open_original(CHECKPOINTS / name / "model.pt") as original:
                    made[name, head, kind] = convert(original, folder, head, kind or "masked_lm")
        return made[name, head, kind]

    return get


@pytest.fixture
def copy_of(converted, tmp_path):
    return lambda *which: shutil.copytree(converted(*which), tmp_path / "model")


# ---- the authors' model written out ----


def assert_gives(original, tensors, case, heads, atol):
    """Row by row, without padding, what the authors' code gave for the padded batch."""
    tokens = tensors[f"{case}.input.tokens"].long()
    for b, row in enumerate(tokens):
        keep = row != fairseq_reference.PADDING_ID
        ours = fairseq_reference.run(original, row[keep])
        for head in heads:
            ours |= fairseq_reference.run(original, row[keep], head)
        assert len(ours) == 2 * (1 + verify.layers(original.weights)) + 1 + len(heads)
        for name, value in ours.items():
            theirs = tensors[f"{case}.output.{name}"][b]
            if name.endswith(".px"):
                padded = tensors.get(f"{case}.output.px_padding_mask")
                theirs = theirs if padded is None else theirs[~padded[b]]
            elif not name.startswith("head."):
                theirs = theirs[keep]
            assert value.dtype == torch.float64 and value.shape == theirs.shape, name
            difference = (value - theirs).abs().max().item()
            assert difference <= atol, f"row {b}, {name}: {difference:.1e} > {atol:.1e}"


@pytest.mark.parametrize("case", ["case0", "case1", "case2", "case3"])
@pytest.mark.parametrize("name", MLM)
def test_reference_gives_the_authors_numbers(name, case):
    error = mlm_meta(name)["max_abs_diff_float32_vs_float64"][case]  # of the authors' own float32 run
    assert_gives(mlm_original(name), load_file(mlm_file(name)), case, HEADS, 1.25 * error)


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_reference_gives_the_numbers_of_a_checkpoint(name, case):
    with open_original(CHECKPOINTS / name / "model.pt") as original:
        assert_gives(original, load_file(CHECKPOINTS / name / "expected.safetensors"), case, [], 2e-5)


def test_reference_adds_the_offset_of_layer_norms():
    original, ids = mlm_original("tied_dynamic"), torch.arange(5, 16)
    lower = {n: t - 1 if "norm.weight" in n else t for n, t in original.weights.items()}
    assert sum(not torch.equal(lower[n], t) for n, t in original.weights.items()) == 2 + 3 * 3 + 1 + 1
    less_one = dataclasses.replace(original, weights=lower, norm_offset=1.0)
    for head in (None, *HEADS):
        plain, offset = fairseq_reference.run(original, ids, head), fairseq_reference.run(less_one, ids, head)
        for name, value in plain.items():
            torch.testing.assert_close(offset[name], value, atol=1e-4, rtol=0)  # `weight - 1` rounds


def test_reference_takes_the_embedding_where_the_file_has_no_output_matrix():
    original, ids = mlm_original("tied_dynamic"), torch.arange(5, 16)
    without = {n: t for n, t in original.weights.items() if n != "encoder.lm_head.weight"}
    expected = fairseq_reference.run(original, ids)["logits"]
    assert torch.equal(fairseq_reference.run(dataclasses.replace(original, weights=without), ids)["logits"], expected)
    doubled = without | {"encoder.lm_head.weight": 2 * original.weights["encoder.lm_head.weight"]}
    other = fairseq_reference.run(dataclasses.replace(original, weights=doubled), ids)["logits"]
    bias = original.weights["encoder.lm_head.bias"].double()
    torch.testing.assert_close(other - bias, 2 * (expected - bias))


def test_reference_activations():
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    expected = {
        "gelu": F.gelu(x),
        "gelu_accurate": F.gelu(x, approximate="tanh"),
        "gelu_fast": F.gelu(x, approximate="tanh"),
        "relu": F.relu(x),
        "tanh": x.tanh(),
        "linear": x,
    }
    for name, value in expected.items():
        torch.testing.assert_close(fairseq_reference.activation(name, x), value)
    with pytest.raises(ValueError, match="swish"):
        fairseq_reference.activation("swish", x)


# ---- right conversions ----


@pytest.mark.parametrize("file", ["model.pt", "expected.safetensors"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_right_conversion(converted, capsys, name, file):
    assert verify.main([str(converted(name)), str(CHECKPOINTS / name / file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines[lines.index("") + 2 : -2]]
    last = ["last"] if file == "expected.safetensors" else []
    assert rows == ["embedding", "layer 1", "layer 2", *last, "logits"]
    assert "1e-05 is allowed" in lines[-1] and lines[-1].startswith("Equal to the original")
    assert ("float32" in lines[2] and "float64" in lines[2]) or last
    assert ("4 rows of 1, 3, 6 and 38 random tokens" if not last else "7 rows of 2, 4, 5, 6, 12, 22 and 40") in lines[1]


@pytest.mark.parametrize("kind", ["classification", "ranking", "encoder", "masked_lm"])
@pytest.mark.parametrize("name", MLM)
def test_every_class(converted, tmp_path, name, kind):
    original = mlm_original(name)
    heads = {"classification": HEADS, "ranking": ["choice"], "encoder": [None], "masked_lm": ["lm_head"]}[kind]
    if kind == "ranking":
        for part in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias"):
            tensor = original.weights[f"classification_heads.cls_classification_head.{part}"]
            original.weights[f"classification_heads.choice.{part}"] = tensor[:1] if "out_proj" in part else tensor
    for head in heads:
        folder = convert(original, tmp_path, head, kind) if kind == "ranking" else converted(name, head, kind)
        # Of several heads, the one is found whose weights the model has.
        for chosen in (head, None):
            report = verify.compare(folder, original, chosen)
            assert report.ok and report.largest < 3e-6, report.summary()
            last = {"masked_lm": "logits", "encoder": "layer 3"}.get(kind, head)
            assert report.rows[-1].layer == last and len(report.rows) == 8 + (kind != "encoder")
        if kind != "ranking":
            report = verify.compare_outputs(folder, mlm_file(name), head)
            assert report.ok and report.largest < 3e-6, report.summary()


def test_float16_is_read_as_stored(converted):
    weights = load_file(converted("untied") / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    with open_original(CHECKPOINTS / "untied" / "model.pt") as original:
        assert verify.compare(converted("untied"), original).largest < 1e-6


def test_rows_cover_every_relation_to_the_slots():
    assert verify.choose_lengths(128, 512) == [1, 64, 128, 160]
    assert verify.choose_lengths(6, 40) == [1, 3, 6, 38]
    assert verify.choose_lengths(1, 512) == [1, 33]
    assert verify.choose_lengths(64, 50) == [1, 32, 50]
    rows = verify.random_rows(mlm_original("tied_dynamic"), [1, 4, 500])
    assert [len(row) for row in rows] == [1, 4, 500]
    assert set(rows[2].tolist()) <= set(range(120)) - {1} and len(set(rows[2].tolist())) > 100


# ---- wrong conversions ----


def swap_layers(tensors):
    first, second = "encoder.layer.0.", "encoder.layer.1."
    for name in [name for name in tensors if first in name]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def change(name, index, by):
    def edit(tensors):
        tensors[name][index] += by

    return edit


# What is wrong, and the layer at which the table shows it first.
WEIGHT_ERRORS = {
    "one weight": (change("luna.encoder.layer.1.intermediate.dense.weight", (3, 5), 1e-3), "layer 2"),
    "pack query": (change("luna.encoder.layer.1.attention.self.pack.query.weight", (3, 5), 1e-2), "layer 2"),
    "one token": (change("luna.embeddings.word_embeddings.weight", (77, 2), 1e-3), "embedding"),
    "the last position": (change("luna.embeddings.position_embeddings.weight", (-1, 2), 1e-3), "embedding"),
    "the last slot": (change("luna.packed_embeddings.weight", (-1, 2), 1e-3), "embedding"),
    "output bias": (change("lm_head.bias", 4, 1e-3), "logits"),
    "NaN": (change("luna.encoder.layer.1.output.dense.bias", 4, math.nan), "layer 2"),
    "infinity": (change("luna.encoder.layer.1.output.dense.bias", 4, math.inf), "layer 2"),
    "layers swapped": (swap_layers, "layer 1"),
}
CONFIG_ERRORS = {
    "heads": {"num_attention_heads": 2},
    "heads of the pack attention": {"num_projected_attention_heads": 2},
    "activation": {"hidden_act": "gelu_pytorch_tanh"},
    "fixed projection": {"dynamic_projection": False},
    "padding id": {"pad_token_id": 0, "max_position_embeddings": 41},
    "LayerNorm's epsilon": {"layer_norm_eps": 1e-3},
}


def fails(capsys, *words):
    """The script's status is 1, and it says so; its output."""
    capsys.readouterr()
    status = verify.main([str(word) for word in words])
    captured = capsys.readouterr()
    assert status == 1 and not captured.err, captured
    assert captured.out.splitlines()[-1].startswith("Not equal to the original: ")
    return captured.out


@pytest.mark.parametrize("file", ["model.pt", "expected.safetensors"])
@pytest.mark.parametrize("error", WEIGHT_ERRORS)
def test_wrong_weights(copy_of, capsys, error, file):
    folder, given = copy_of("tied"), CHECKPOINTS / "tied" / file
    edit, first = WEIGHT_ERRORS[error]
    edit_weights(folder, edit)
    if error == "one token" and file == "expected.safetensors":
        first = "logits"  # its rows do not hold that token, but the output layer has the same matrix
    table = [line for line in fails(capsys, folder, given).splitlines() if line.endswith("not equal")]
    assert table[0].startswith(first)
    assert ("nan" in table[-1]) == (error in ("NaN", "infinity"))


@pytest.mark.parametrize("file", ["model.pt", "expected.safetensors"])
@pytest.mark.parametrize("error", CONFIG_ERRORS)
def test_wrong_config(copy_of, capsys, error, file):
    folder = copy_of("tied")
    edit_config(folder, **CONFIG_ERRORS[error])
    fails(capsys, folder, CHECKPOINTS / "tied" / file)


@pytest.mark.parametrize("name", MLM)
def test_projection_is_dynamic_or_fixed(copy_of, name):
    folder, original = copy_of(name), mlm_original(name)
    edit_config(folder, dynamic_projection=name.endswith("fixed"))
    report = verify.compare(folder, original)
    assert not report.ok and not report.rounding
    assert not verify.compare_outputs(folder, mlm_file(name)).ok


def test_every_parameter_matters(copy_of):
    """A hundredth more in any tensor is found, but for a key's bias, on which a softmax does not depend."""
    folder, original = copy_of("untied_dynamic"), mlm_original("untied_dynamic")
    path, unseen = folder / "model.safetensors", []
    for name, tensor in load_file(path).items():
        edit_weights(folder, change(name, tuple(size // 2 for size in tensor.shape), 0.01))
        if verify.compare(folder, original).ok:
            unseen.append(name)
        edit_weights(folder, lambda tensors, name=name, tensor=tensor: tensors.update({name: tensor}))
    assert len(unseen) == 6 and all(name.endswith("key.bias") for name in unseen), unseen
    assert verify.compare(folder, original).ok


def test_wrong_layer_norm(converted, capsys):
    words = [converted("tied"), CHECKPOINTS / "tied" / "model.pt", "--layer-norm"]
    assert verify.main([str(word) for word in [*words, "plain"]]) == 0
    capsys.readouterr()
    assert "embedding" in fails(capsys, *words, "offset").splitlines()[-1]


def test_wrong_argument(converted, capsys):
    words = [converted("tied"), CHECKPOINTS / "tied" / "model.pt", "--override"]
    assert verify.main([str(word) for word in [*words, "encoder_attention_heads=4"]]) == 0
    capsys.readouterr()
    fails(capsys, *words, "encoder_attention_heads=8")


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        (HEADS[0], {"classifier_activation": "relu"}),
        (HEADS[0], {"classifier_pooling": "mean"}),
        (HEADS[1], {"classifier_activation": "gelu"}),
        (HEADS[2], {"num_attention_heads": 8}),
    ],
)
def test_wrong_classifier(copy_of, head, fields):
    folder = copy_of("tied_dynamic", head)
    edit_config(folder, **fields)
    report = verify.compare(folder, mlm_original("tied_dynamic"))
    assert not report.ok and not report.rows[-1].ok and not report.rounding
    report = verify.compare_outputs(folder, mlm_file("tied_dynamic"), head)
    assert not report.ok and not report.rows[-1].ok


def test_nan_in_the_original_is_no_agreement(tmp_path):
    original = mlm_original("tied_dynamic")
    original.weights["encoder.lm_head.bias"][3] = math.nan
    report = verify.compare(convert(original, tmp_path, "lm_head"), original)
    assert [row.name for row in report.rows if not row.ok] == ["logits"] and math.isnan(report.largest)


def test_rounding_is_told_from_an_error(tmp_path):
    """Attention so sharp that float32 is above the tolerance: the report says that the function is the same."""
    original = mlm_original("tied_dynamic")
    for name, tensor in original.weights.items():
        if "q_proj.weight" in name:
            tensor.mul_(100.0)
    folder = convert(original, tmp_path, "lm_head")
    report = verify.compare(folder, original)
    assert not report.ok and report.rounding and "It is rounding" in report.summary()
    edit_weights(folder, WEIGHT_ERRORS["one weight"][0])
    report = verify.compare(folder, original)
    assert not report.ok and not report.rounding and "rounding" not in report.summary()


# ---- other sizes, and what cannot be compared ----


def test_other_sizes(converted, copy_of, capsys):
    other = CHECKPOINTS / "tied" / "model.pt"
    out = fails(capsys, converted("tied_dynamic"), other)
    for what in ("vocab_size` is 120, but 294", "hidden_size", "num_hidden_layers` is 3, but 2", "projection_length"):
        assert what in out
    out = fails(capsys, converted("tied_dynamic"), other.with_name("expected.safetensors"))
    assert "3 layers, the original 2" in out
    folder = copy_of("tied")
    edit_config(folder, num_hidden_layers=1)
    assert "no place for the weight luna.encoder.layer.1." in fails(capsys, folder, other)
    edit_config(folder, num_hidden_layers=3)
    assert "no weight luna.encoder.layer.2." in fails(capsys, folder, other)
    edit_config(folder, num_hidden_layers=2, vocab_size=293)
    assert "word_embeddings.weight is (294, 32), but its config makes it (293, 32)" in fails(capsys, folder, other)


def test_files_that_do_not_fit(converted, tmp_path, capsys):
    tensors = load_file(CHECKPOINTS / "tied" / "expected.safetensors")

    def saying(**changes):
        changed = {**tensors, **changes}
        save_file({n: t for n, t in changed.items() if t is not None}, tmp_path / "outputs.safetensors")
        return verify.main([str(converted("tied")), str(tmp_path / "outputs.safetensors")]), capsys.readouterr()

    tokens = tensors["case1.input.tokens"]
    status, captured = saying(**{"case1.input.tokens": tokens + 280})
    assert status == 1 and "case1: the id " in captured.out and "`vocab_size` is 294" in captured.out
    status, captured = saying(**{"case1.input.tokens": torch.full((2, 41), 5)})
    assert status == 1 and "41 tokens, but the model takes 40" in captured.out
    status, captured = saying(**{"case1.output.hidden.1.x": torch.zeros(2, 5, 16)})
    assert status == 1 and "layer 1, tokens: the model gives (2, 5, 32), the original (2, 5, 16)" in captured.out
    status, captured = saying(**{"case1.output.hidden.1.px": None})
    assert status == 2 and "no case1.output.hidden.1.px" in captured.err
    status, captured = saying(**{"case1.input.tokens": torch.ones_like(tokens), "case1.output.x_padding_mask": None})
    assert status == 2 and "no tokens" in captured.err
    status, captured = saying(**{name: None for name in tensors if name.endswith("tokens")})
    assert status == 2 and "<case>.input.tokens" in captured.err


def test_what_cannot_be_compared(converted, copy_of, tmp_path, capsys):
    original, outputs = CHECKPOINTS / "tied" / "model.pt", mlm_file("tied_dynamic")

    def refusal(*words):
        assert verify.main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "not a folder with a config.json" in refusal(tmp_path / "nothing", original)
    assert "nothing.pt" in refusal(converted("tied"), tmp_path / "nothing.pt")
    assert "nothing.safetensors" in refusal(converted("tied"), tmp_path / "nothing.safetensors")
    assert "without effect on a file" in refusal(converted("tied"), outputs, "--layer-norm", "plain")
    assert "leave --head out" in refusal(converted("tied"), original, "--head", HEADS[0])
    classifier = converted("tied_dynamic", HEADS[0])
    assert "has no classification head" in refusal(classifier, original)
    assert all(head in refusal(classifier, outputs) for head in HEADS)
    assert "no head 'other'" in refusal(classifier, outputs, "--head", "other")
    assert "NAME=VALUE" in refusal(converted("tied"), original, "--override", "heads")

    folder = copy_of("tied")
    (folder / "model.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in refusal(folder, original)
    edit_config(folder, num_attention_heads=5)
    assert "config" in refusal(folder, original)
    tiny_model("luna", "token").save_pretrained(tmp_path / "tokens")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "tokens")
    assert "LunaForTokenClassification" in refusal(tmp_path / "tokens", original)


def test_head_that_cannot_be_told(copy_of):
    folder = copy_of("tied_dynamic", HEADS[0])
    edit_weights(folder, change("classifier.dense.weight", (0, 0), 1e-3))
    with pytest.raises(UserError, match=r"has the heads .*pooling_classification_head.*: choose one"):
        verify.compare(folder, mlm_original("tied_dynamic"))
    report = verify.compare(folder, mlm_original("tied_dynamic"), HEADS[0])
    assert [row.name for row in report.rows if not row.ok] == [HEADS[0]]


@pytest.mark.parametrize("name", ["layers.1.fc2.bias", "embed_positions.weight"])
def test_incomplete_original(converted, name):
    original = mlm_original("tied_dynamic")
    weights = {n: t for n, t in original.weights.items() if n != ENCODER + name}
    with pytest.raises(UserError, match=f"no tensor .*{name}"):
        verify.compare(converted("tied_dynamic"), dataclasses.replace(original, weights=weights))


def test_arguments_that_cannot_be(converted):
    with pytest.raises(UserError, match=r"5 attention heads .* width 48"):
        verify.compare(converted("tied_dynamic"), mlm_original("tied_dynamic", encoder_attention_heads=5))
    with pytest.raises(UserError, match=r"tied_dynamic: .* no activation 'swish'"):
        verify.compare(converted("tied_dynamic"), mlm_original("tied_dynamic", activation_fn="swish"))
