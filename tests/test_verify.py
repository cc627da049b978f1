"""`verify.py` takes every right conversion for equal, and finds every error."""

import dataclasses
import json
import math
import shutil

import fairseq_luna
import fairseq_reference
import pytest
import torch
import verify
import verify_report
from fairseq_checkpoint import open_original
from fairseq_config import Head
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from shared import UserError
from transformers import AutoModelForTokenClassification
from verify_originals import CHECKPOINTS, ENCODER, HEADS, MLM, mlm_file, mlm_original


def convert(original, folder, head=None, kind="masked_lm"):
    """A converted model without its tokenizer, which plays no part here."""
    model, _ = fairseq_luna.make_model(original, Head(head, kind))
    model.save_pretrained(folder)
    return folder


def write_outputs(original, file, lengths=(3, 20), head=None):
    """A file of outputs: a batch of one row for each length, as the reference gives it, in float32."""
    tensors = {}
    for case, row in enumerate(verify.random_rows(original, lengths)):
        tensors[f"case{case}.input.tokens"] = row.unsqueeze(0)
        outputs = fairseq_reference.run(original, row, head)
        last = max(int(name.split(".")[1]) for name in outputs if name.startswith("hidden"))
        outputs |= {f"last.{stream}": outputs[f"hidden.{last}.{stream}"].clone() for stream in ("x", "px")}
        tensors |= {f"case{case}.output.{name}": value.float().unsqueeze(0) for name, value in outputs.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    return file


def scaled(original, part, factor):
    """The same with the tensors whose names contain `part` multiplied."""
    weights = {name: t * factor if part in name else t for name, t in original.weights.items()}
    return dataclasses.replace(original, weights=weights)


def assert_close(report):
    """Equal, and to a fifth of what is allowed for numbers of this size: float32 rounds by 1e-6 on some machines."""
    assert report.ok, report.summary()
    for row in report.rows:
        assert row.difference <= 2e-6 * max(1.0, row.magnitude), row


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


# ---- right conversions ----


@pytest.mark.parametrize("file", ["model.pt", "expected.safetensors"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_right_conversion(converted, capsys, name, file):
    assert verify.main([str(converted(name)), str(CHECKPOINTS / name / file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines[lines.index("") + 2 : -2]]
    last = ["last"] if file == "expected.safetensors" else []
    assert rows == ["embedding", "layer 1", "layer 2", *last, "logits"]
    assert lines[-1].startswith("Equal to the original") and "not equal" not in "".join(lines)
    assert ("limit" in lines[lines.index("") + 1]) == bool(last)
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
            assert_close(report)
            last = {"masked_lm": "logits", "encoder": "layer 3"}.get(kind, head)
            assert report.rows[-1].layer == last and len(report.rows) == 8 + (kind != "encoder")
        if kind != "ranking":
            report = verify.compare_outputs(folder, mlm_file(name), head)
            assert report.ok, report.summary()
            for row in report.rows:
                assert row.difference <= 3e-6 * max(1.0, row.magnitude), row


def test_float16_is_read_as_stored(converted):
    weights = load_file(converted("untied") / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    with open_original(CHECKPOINTS / "untied" / "model.pt") as original:
        assert_close(verify.compare(converted("untied"), original))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("name", ["tied_fixed", "untied_dynamic"])
def test_sharp_attention(tmp_path, name, offset, dtype):
    """Float32 is far above 1e-5, and the float64 run tells that this is rounding, in whatever type the file is."""
    original = scaled(mlm_original(name), "_proj.weight", 3.0)
    weights = {n: t.to(dtype) for n, t in original.weights.items()}
    if offset:  # in float32 at least, in which the converted model can hold them
        norms = {n: t for n, t in original.weights.items() if "norm.weight" in n}
        weights |= {n: (t - offset).to(torch.promote_types(dtype, torch.float32)) for n, t in norms.items()}
    original = dataclasses.replace(original, weights=weights, norm_offset=offset)
    report = verify.compare(convert(original, tmp_path, "lm_head"), original)
    assert report.ok and report.rounding and report.largest > 1e-4, report.summary()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_large_numbers_in_a_file_of_outputs(tmp_path, name, dtype):
    with open_original(CHECKPOINTS / name / "model.pt") as genuine:
        original = scaled(scaled(genuine, "q_proj.weight", 3.0), "lm_head.layer_norm", 20.0)
    original = dataclasses.replace(original, weights={n: t.to(dtype) for n, t in original.weights.items()})
    folder = convert(original, tmp_path, "lm_head")
    report = verify.compare(folder, original)
    assert report.ok and report.rounding, report.summary()
    report = verify.compare_outputs(folder, write_outputs(original, tmp_path / "outputs.safetensors"))
    assert report.ok and not report.rounding and report.rows[-1].limit > 1e-3, report.summary()


def test_what_is_rounding_is_said(tmp_path, capsys):
    original = scaled(mlm_original("tied_dynamic"), "lm_head.layer_norm", 10.0)
    report = verify.compare(convert(original, tmp_path, "lm_head"), original)
    *_, logits, _, summary = report.lines()
    magnitude = f"{report.rows[-1].magnitude:.3g}"
    assert logits.startswith("logits") and logits.endswith(f"{magnitude}  rounding")
    assert summary.startswith("Equal to the original") and f"(logits, with numbers of up to {magnitude})" in summary
    assert f"{report.exact:.1e}" in summary and f"{report.largest:.1e}" in summary


def test_the_float64_run_is_made_only_where_it_is_needed(converted, monkeypatch):
    types, load_model = [], verify.load
    monkeypatch.setattr(verify, "load", lambda folder, *dtype: types.append(dtype) or load_model(folder, *dtype))
    original = mlm_original("tied_dynamic")
    for head, expected in (("lm_head", [(), (torch.float64,)]), (HEADS[0], [()])):
        types.clear()
        assert verify.compare(converted("tied_dynamic", head), original).ok
        assert types == expected


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
# Fields of a model with the masked-LM head, and what the authors' checkpoint has instead.
CONFIG_ERRORS = {
    "num_attention_heads": (2, "4 in the original"),
    "num_projected_attention_heads": (2, "always `num_attention_heads` (4)"),
    "hidden_act": ("gelu_pytorch_tanh", "gelu in the original"),
    "dynamic_projection": (False, "True in the original"),
    "tie_kv": (False, "True in the original"),
    "tie_word_embeddings": (False, "True in the original"),
    "projection_length": (5, "6 in the original"),
    "intermediate_size": (65, "64 in the original"),
    "max_position_embeddings": (39, "40 in the original"),
    "pad_token_id": (0, "always 1 in the authors' code"),
    "layer_norm_eps": (1e-12, "always 1e-05 in the authors' code"),
    "position_embedding_type": ("sinusoidal", "always 'learned' in the authors' code"),
    "type_vocab_size": (2, "always 0 in the authors' code"),
    "embedding_layer_norm": (False, "always True in the authors' code"),
    "norm_first": (True, "always False in the authors' code"),
    "conv_kernel_size": (3, "always 0 in the authors' code"),
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


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_wrong_config(copy_of, capsys, name):
    folder, (value, theirs) = copy_of("tied"), CONFIG_ERRORS[name]
    edit_config(folder, **{name: value})
    out = fails(capsys, folder, CHECKPOINTS / "tied" / "model.pt")
    shown = repr(value) if "always" in theirs else value
    assert f"in config.json, `{name}` is {shown}, but {theirs}" in out
    # A file of outputs has no arguments: numbers or sizes tell, but for what is always so.
    if name not in ("tie_word_embeddings", "max_position_embeddings"):
        out = fails(capsys, folder, CHECKPOINTS / "tied" / "expected.safetensors")
        assert (f"`{name}`" in out) == ("always" in theirs)


@pytest.mark.parametrize("head", ["lm_head", None, *HEADS])
@pytest.mark.parametrize("name", ["tied_dynamic", "untied_fixed"])
def test_wrong_epsilon(copy_of, capsys, name, head):
    """So small an error that the numbers of some models do not show it."""
    folder = copy_of(name, head, "encoder" if head is None else None)
    edit_config(folder, layer_norm_eps=1e-12)
    named = "`layer_norm_eps` is 1e-12, but always 1e-05 in the authors' code"
    assert named in verify.compare(folder, mlm_original(name), head).summary()
    assert named in fails(capsys, folder, mlm_file(name), *([] if head in (None, "lm_head") else ["--head", head]))


def test_output_layer_that_is_tied_or_not(tmp_path):
    original = mlm_original("tied_dynamic")
    original.weights["encoder.lm_head.weight"] = 1.01 * original.weights[f"{ENCODER}embed_tokens.weight"]
    folder = convert(original, tmp_path, "lm_head")
    assert verify.compare(folder, original).ok
    edit_config(folder, tie_word_embeddings=True)
    report = verify.compare(folder, original)
    assert not report.ok and "`tie_word_embeddings` is True, but False in the original" in report.summary()


def test_another_name_of_the_same_activation(copy_of):
    folder = copy_of("tied_dynamic")
    edit_config(folder, hidden_act="gelu_python")
    assert verify.compare(folder, mlm_original("tied_dynamic")).ok
    edit_config(folder, hidden_act="gelu_new")
    assert verify.compare(folder, mlm_original("tied_dynamic", activation_fn="gelu_accurate")).rows
    assert not verify.compare(folder, mlm_original("tied_dynamic")).rows


def test_argument_that_the_checkpoint_does_not_have(copy_of):
    folder = copy_of("tied_dynamic")
    edit_config(folder, num_attention_heads=8)
    original = dataclasses.replace(mlm_original("tied_dynamic"), assumed=("encoder_attention_heads",))
    summary = verify.compare(folder, original).summary()
    assert "authors' default" in summary and "--override encoder_attention_heads=VALUE" in summary
    assert "authors' default" not in verify.compare(folder, mlm_original("tied_dynamic")).summary()


@pytest.mark.parametrize("by", [1e-4, -1e-4])
@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_small_error_in_large_logits(tmp_path, by, factor):
    """Absolute differences decide: 1e-4 is an error for logits of 18 and of 180, too."""
    original = scaled(mlm_original("tied_dynamic"), "lm_head.layer_norm", factor)
    folder = convert(original, tmp_path, "lm_head")
    edit_weights(folder, change("lm_head.bias", 4, by))
    report = verify.compare(folder, original)
    assert report.rows[-1].magnitude > 15 * factor
    assert [row.name for row in report.rows if not row.ok] == ["logits"] and not report.rounding
    assert report.lines()[-3].endswith("not equal")
    assert "first at logits" in report.summary() and "not rounding, for in float64 it is 1.0e-04" in report.summary()


def test_an_error_hidden_by_rounding_elsewhere(tmp_path):
    """Where float32 is above 1e-5, float64 decides everywhere, and 5e-6 is an error."""
    original = scaled(mlm_original("tied_dynamic"), "lm_head.layer_norm", 10.0)
    folder = convert(original, tmp_path, "lm_head")
    edit_weights(folder, change("luna.embeddings.LayerNorm.bias", 4, 5e-6))
    report = verify.compare(folder, original)
    assert report.rows[0].within and not report.rows[0].ok and not report.ok


def test_limits_of_a_file_of_outputs(copy_of, capsys):
    """They grow with the numbers, and stand in the table."""
    folder, file = copy_of("tied"), CHECKPOINTS / "tied" / "expected.safetensors"
    edit_weights(folder, change("lm_head.bias", 4, 1e-4))
    report = verify.compare_outputs(folder, file)
    logits = report.rows[-1]
    assert report.ok and logits.limit == pytest.approx(1e-5 * logits.magnitude) and logits.magnitude > 10
    assert report.lines()[-3].split() == ["logits", f"{logits.difference:.1e}", f"{logits.limit:.1e}"]
    assert 9e-5 < logits.difference < logits.limit < 2e-4 and f"{logits.limit:.1e}" in report.summary()
    edit_weights(folder, change("lm_head.bias", 4, 1e-4))
    assert f"{logits.limit:.1e} is allowed" in fails(capsys, folder, file).splitlines()[-1]


def test_limits_are_1e_5_at_least():
    comparison = verify_report.Comparison(relative=True)
    comparison.add("logits", "", torch.zeros(3), torch.full((3,), 0.5))
    (row,) = comparison.rows()
    assert (row.difference, row.magnitude, row.limit) == (0.5, 0.5, 1e-5) and not row.ok


def test_what_is_no_number_is_never_rounding():
    for difference in (math.nan, math.inf):
        row = verify_report.Row("logits", "", difference, magnitude=math.inf, limit=math.inf, exact=0.0)
        assert not row.within and not row.ok


def test_ranges():
    names = ["embedding", "layer 1", "layer 2", "layer 3", "layer 4", "logits"]
    assert verify_report.ranges([5], names) == "logits"
    assert verify_report.ranges([1, 2], names) == "layer 1, layer 2"
    assert verify_report.ranges([0, 2, 3, 4], names) == "embedding, layer 2 to layer 4"


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
        (HEADS[0], {"classifier_hidden_size": 7}),
        (HEADS[1], {"classifier_activation": "gelu"}),
        (HEADS[1], {"classifier_pooling": "packed_mean"}),
        (HEADS[2], {"num_attention_heads": 8}),
    ],
)
def test_wrong_classifier(copy_of, head, fields):
    folder, (name,) = copy_of("tied_dynamic", head), fields
    edit_config(folder, **fields)
    report = verify.compare(folder, mlm_original("tied_dynamic"), head)
    assert not report.ok and f"in config.json, `{name}` is " in report.summary()
    report = verify.compare_outputs(folder, mlm_file("tied_dynamic"), head)
    said = "its config makes it" if name == "classifier_hidden_size" else f"`{name}` is "
    assert not report.ok and (report.rows or said in report.summary())


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
    assert report.ok and report.rounding and report.largest > 1e-4 and "is its rounding" in report.summary()
    edit_weights(folder, WEIGHT_ERRORS["one weight"][0])
    report = verify.compare(folder, original)
    assert not report.ok and not report.rounding and "it is not rounding" in report.summary()


# ---- other sizes, and what cannot be compared ----


def test_other_sizes(converted, copy_of, capsys):
    other = CHECKPOINTS / "tied" / "model.pt"
    out = fails(capsys, converted("tied_dynamic"), other)
    for what in (
        "`vocab_size` is 120, but 294",
        "`hidden_size`",
        "`num_hidden_layers` is 3, but 2",
        "`projection_length`",
    ):
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
    for source in (original, original.parent, outputs):
        message = refusal(source, converted("tied"))
        assert "MODEL comes first" in message and f"verify.py {converted('tied')} {source}" in message
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
