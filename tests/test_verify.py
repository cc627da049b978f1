"""`verify.py` accepts every correct conversion, and finds and names every error."""

import dataclasses
import json
import math
import shutil

import fairseq_luna
import pytest
import torch
import verify
from fairseq_format import reference, verification
from fairseq_format.checkpoint import open_original
from fairseq_format.config import Head
from fairseq_format.verification import compare, compare_outputs
from helpers import refused, tiny_model
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


def write_outputs(original, file):
    """A file of outputs: one row per case, as the reference gives it, in float32."""
    tensors = {}
    for case, row in enumerate(verification.random_rows(original, [3, 20])):
        outputs = reference.run(original, row)
        last = max(int(name.split(".")[1]) for name in outputs if name.startswith("hidden"))
        outputs |= {f"last.{stream}": outputs[f"hidden.{last}.{stream}"].clone() for stream in ("x", "px")}
        tensors[f"case{case}.input.tokens"] = row.unsqueeze(0)
        tensors |= {f"case{case}.output.{name}": value.float().unsqueeze(0) for name, value in outputs.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    return file


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

    def get(name, head="lm_head", kind=None):
        if (name, head) not in made:
            folder, kind = tmp_path_factory.mktemp("model"), kind or "masked_lm"
            if name in MLM:
                made[name, head] = convert(
                    mlm_original(name), folder, head, "classification" if head in HEADS else kind
                )
            else:
                with open_original(CHECKPOINTS / name / "model.pt") as original:
                    made[name, head] = convert(original, folder)
        return made[name, head]

    return get


@pytest.fixture
def copy_of(converted, tmp_path):
    return lambda *which: shutil.copytree(converted(*which), tmp_path / "model")


def fails(capsys, *words):
    """The command exits with 1 and says so; its output."""
    capsys.readouterr()
    status = verify.main([str(word) for word in words])
    captured = capsys.readouterr()
    assert status == 1 and not captured.err, captured
    assert captured.out.splitlines()[-1].startswith("Not equal to the original")
    return captured.out


# ---- correct conversions ----


@pytest.mark.parametrize("file", ["model.pt", "expected.safetensors"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_command_accepts_a_conversion(converted, capsys, name, file):
    assert verify.main([str(converted(name)), str(CHECKPOINTS / name / file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines[lines.index("") + 2 : -2]]
    last = ["last"] if file == "expected.safetensors" else []
    assert rows == ["embedding", "layer 1", "layer 2", *last, "logits"]
    assert lines[-1].startswith("Equal to the original") and "not equal" not in "".join(lines)
    assert ("7 rows of 2, 4, 5, 6, 12, 22, 40" if last else "4 rows of 1, 3, 6, 38 random tokens") in lines[1]


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
        reports = [compare(folder, original)]  # recognises the head by its weights
        assert reports[0].rows[-1].layer == {"masked_lm": "logits", "encoder": "layer 3"}.get(kind, head)
        assert len(reports[0].rows) == 8 + (kind != "encoder")
        reports += [] if kind == "ranking" else [compare_outputs(folder, mlm_file(name), head)]
        for report in reports:  # within a third of the limit, because float32 rounds differently by machine
            assert report.ok, report.summary()
            assert all(row.difference <= 3e-6 * max(1.0, row.magnitude) for row in report.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rounding_of_sharp_attention(tmp_path, offset, dtype):
    """float32 far exceeds its limit, and the float64 run shows that it is rounding, in any type of file."""
    original = scaled(mlm_original("untied_fixed"), "_proj.weight", 3.0)
    weights = {n: t.to(dtype) for n, t in original.weights.items()}
    if offset:  # in at least float32, like the converted model
        norms = {n: t for n, t in original.weights.items() if "norm.weight" in n}
        weights |= {n: (t - offset).to(torch.promote_types(dtype, torch.float32)) for n, t in norms.items()}
    original = dataclasses.replace(original, weights=weights, norm_offset=offset)
    folder = convert(original, tmp_path)
    report = compare(folder, original)
    assert report.ok and report.rounding and report.largest > 1e-4, report.summary()
    assert f"{report.exact:.1e}" in report.summary() and f"{report.largest:.1e}" in report.summary()
    edit_weights(folder, change("luna.encoder.layer.1.intermediate.dense.weight", (3, 5), 1e-2))
    report = compare(folder, original)
    assert not report.ok and not report.rounding and "float64" in report.summary()


def test_the_float64_run_happens_only_if_needed(converted, monkeypatch):
    types, load = [], verification.load
    monkeypatch.setattr(verification, "load", lambda folder, dtype: types.append(dtype) or load(folder, dtype))
    for head, expected in (("lm_head", [torch.float32, torch.float64]), (HEADS[0], [torch.float32])):
        types.clear()
        assert compare(converted("tied_dynamic", head), mlm_original()).ok and types == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_rounded_to_half_precision(tmp_path, dtype):
    folder = convert(mlm_original(), tmp_path)
    tensors = {n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype=str(dtype).removeprefix("torch."))
    report = compare(folder, mlm_original())
    assert report.ok and f"rounded to {str(dtype).removeprefix('torch.')}" in report.precision


def test_limits_of_a_file_of_outputs_grow_with_the_numbers(tmp_path):
    original = scaled(mlm_original(), "lm_head.layer_norm", 20.0)
    folder = convert(original, tmp_path)
    file = write_outputs(original, tmp_path / "outputs.safetensors")
    report = compare_outputs(folder, file)
    logits = report.rows[-1]
    assert report.ok and not report.rounding
    assert logits.limit > 1e-3 and logits.limit == pytest.approx(1e-5 * logits.magnitude)
    assert f"{logits.limit:.1e}" in report.lines()[-3]
    edit_weights(folder, change("lm_head.bias", 4, 2 * logits.limit))
    assert not compare_outputs(folder, file).ok
    comparison = verification.Comparison(relative=True)
    comparison.add("logits", "", torch.zeros(3), torch.full((3,), 0.5))
    assert comparison.rows() == [verification.Row("logits", "", 0.5, 0.5, 1e-5)]  # never below 1e-5


def test_rows_cover_every_relation_to_the_slots():
    assert verification.choose_lengths(128, 512) == [1, 64, 128, 160]
    assert verification.choose_lengths(1, 512) == [1, 33]
    assert verification.choose_lengths(64, 50) == [1, 32, 50]
    rows = verification.random_rows(mlm_original(), [1, 500])
    assert [len(row) for row in rows] == [1, 500]
    assert set(rows[1].tolist()) <= set(range(120)) - {1} and len(set(rows[1].tolist())) > 100


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
    "small output bias": (change("lm_head.bias", 4, 5e-5), "logits"),
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
    if file == OUTPUTS and error == "small output bias":
        assert verify.main([str(folder), str(file)]) == 0  # below the limit that a file of outputs has
        return
    if file == OUTPUTS and error == "one token":
        first = "logits"  # its rows lack that token, but the output layer has the same matrix
    table = [line for line in fails(capsys, folder, file).splitlines() if line.endswith("not equal")]
    assert table[0].startswith(first)
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


def test_an_error_among_rounding(tmp_path):
    """If float32 exceeds its limit anywhere, float64 decides everywhere, and 5e-6 is an error."""
    original = scaled(mlm_original(), "lm_head.layer_norm", 10.0)
    folder = convert(original, tmp_path)
    edit_weights(folder, change("luna.embeddings.LayerNorm.bias", 4, 5e-6))
    report = compare(folder, original)
    assert report.rows[0].within and not report.rows[0].ok and not report.ok


def test_what_is_not_a_number_is_never_equal(tmp_path):
    for difference in (math.nan, math.inf):
        row = verification.Row("logits", "", difference, magnitude=math.inf, limit=math.inf, exact=0.0)
        assert not row.within and not row.ok
    original = mlm_original()
    original.weights["encoder.lm_head.bias"][3] = math.nan
    report = compare(convert(original, tmp_path), original)
    assert [row.name for row in report.rows if not row.ok] == ["logits"] and math.isnan(report.largest)


# ---- wrong configs ----

# A wrong value, and the original's.
CONFIG_ERRORS = {
    "num_attention_heads": (2, 4),
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),
    "dynamic_projection": (False, True),
    "tie_kv": (False, True),
    "tie_word_embeddings": (False, True),
    "projection_length": (5, 6),
    "intermediate_size": (65, 64),
    "max_position_embeddings": (39, 40),
}
# The same in all models of the authors, so that a file of outputs suffices.
CONSTANT_ERRORS = {
    "num_projected_attention_heads": (2, 4),
    "pad_token_id": (0, 1),
    "layer_norm_eps": (1e-12, 1e-5),
    "position_embedding_type": ("sinusoidal", "learned"),
    "type_vocab_size": (2, 0),
    "embedding_layer_norm": (False, True),
    "norm_first": (True, False),
    "conv_kernel_size": (3, 0),
    "tokens_per_slot": (2, 1),
    "local_window": (4, 0),
    "full_attention_layers": ([0], None),
}


@pytest.mark.parametrize("name", [*CONFIG_ERRORS, *CONSTANT_ERRORS])
def test_wrong_config(copy_of, capsys, name):
    value, theirs = {**CONFIG_ERRORS, **CONSTANT_ERRORS}[name]
    folder = copy_of("tied")
    edit_config(folder, **{name: value})
    named = f"`{name}` is {value!r} in config.json, but {theirs!r} in the original"
    assert named in fails(capsys, folder, MODEL)
    if name not in ("tie_word_embeddings", "max_position_embeddings"):
        assert (named in fails(capsys, folder, OUTPUTS)) == (name in CONSTANT_ERRORS)


@pytest.mark.parametrize(
    ("head", "name", "value"),
    [
        (HEADS[0], "classifier_activation", "relu"),
        (HEADS[0], "classifier_pooling", "mean"),
        (HEADS[0], "classifier_hidden_size", 7),
        (HEADS[1], "classifier_pooling", "packed_mean"),
        (HEADS[2], "num_attention_heads", 8),
        (HEADS[2], "layer_norm_eps", 1e-12),
    ],
)
def test_wrong_config_of_a_classifier(copy_of, head, name, value):
    folder = copy_of("tied_dynamic", head)
    edit_config(folder, **{name: value})
    assert f"`{name}` is {value!r}" in compare(folder, mlm_original(), head).summary()
    assert not compare_outputs(folder, mlm_file(), head).ok


@pytest.mark.parametrize("name", MLM)
def test_dynamic_or_fixed_projection(copy_of, name):
    folder = copy_of(name)
    edit_config(folder, dynamic_projection=name.endswith("fixed"))
    assert not compare(folder, mlm_original(name)).ok
    assert not compare_outputs(folder, mlm_file(name)).ok  # in the numbers


def test_names_of_the_same_activation(copy_of):
    folder = copy_of("tied_dynamic")
    edit_config(folder, hidden_act="gelu_python")
    assert compare(folder, mlm_original()).ok
    edit_config(folder, hidden_act="gelu_new")
    assert compare(folder, mlm_original(activation_fn="gelu_accurate")).rows
    assert not compare(folder, mlm_original()).rows


def test_an_argument_missing_from_the_checkpoint(copy_of):
    folder = copy_of("tied_dynamic")
    edit_config(folder, num_attention_heads=8)
    original = dataclasses.replace(mlm_original(), assumed=("encoder_attention_heads",))
    summary = compare(folder, original).summary()
    assert "encoder_attention_heads" in summary and "--override" in summary
    assert "--override" not in compare(folder, mlm_original()).summary()


def test_reading_options(converted, capsys):
    words = [str(converted("tied")), str(MODEL)]
    for right, wrong in (
        (["--layer-norm", "plain"], ["--layer-norm", "offset"]),
        (["--override", "encoder_attention_heads=4"], ["--override", "encoder_attention_heads=8"]),
    ):
        assert verify.main([*words, *right]) == 0
        fails(capsys, *words, *wrong)


# ---- other sizes, and what cannot be compared ----


def test_other_sizes(converted, copy_of, capsys):
    printed = fails(capsys, converted("tied_dynamic"), MODEL)
    for named in ("`vocab_size` is 120", "`hidden_size`", "`num_hidden_layers` is 3", "`projection_length`"):
        assert named in printed
    assert "3 layers, the original 2" in fails(capsys, converted("tied_dynamic"), OUTPUTS)
    folder = copy_of("tied")
    edit_config(folder, num_hidden_layers=1)
    assert "luna.encoder.layer.1." in fails(capsys, folder, MODEL)
    edit_config(folder, num_hidden_layers=3)
    assert "luna.encoder.layer.2." in fails(capsys, folder, MODEL)
    edit_config(folder, num_hidden_layers=2, vocab_size=293)
    assert "word_embeddings.weight is (294, 32), but (293, 32)" in fails(capsys, folder, MODEL)


def test_files_of_outputs_that_do_not_fit(converted, tmp_path, capsys):
    tensors = load_file(OUTPUTS)
    tokens = tensors["case1.input.tokens"]
    for changes, status, named in (
        ({"case1.input.tokens": tokens + 280}, 1, "294"),
        ({"case1.input.tokens": torch.full((2, 41), 5)}, 1, "41"),
        ({"case1.output.hidden.1.x": torch.zeros(2, 5, 16)}, 1, "(2, 5, 16)"),
        ({"case1.output.hidden.1.px": None}, 2, "case1.output.hidden.1.px"),
        ({"case1.input.tokens": torch.ones_like(tokens), "case1.output.x_padding_mask": None}, 2, "no tokens"),
        ({name: None for name in tensors if name.endswith("tokens")}, 2, "<case>.input.tokens"),
    ):
        changed = {**tensors, **changes}
        save_file({n: t for n, t in changed.items() if t is not None}, tmp_path / "outputs.safetensors")
        assert verify.main([str(converted("tied")), str(tmp_path / "outputs.safetensors")]) == status
        captured = capsys.readouterr()
        assert named in (captured.out if status == 1 else captured.err)


def test_what_cannot_be_compared(converted, copy_of, tmp_path, capsys):
    def refuses(*words, named):
        assert verify.main([str(word) for word in words]) == 2
        assert named in capsys.readouterr().err

    tied, classifier = converted("tied"), converted("tied_dynamic", HEADS[0])
    refuses(tmp_path / "nothing", MODEL, named="nothing")
    refuses(MODEL, tied, named="transformers")
    refuses(tied, tmp_path / "nothing.pt", named="nothing.pt")
    refuses(tied, tmp_path / "nothing.safetensors", named="nothing.safetensors")
    refuses(tied, OUTPUTS, "--layer-norm", "plain", named="--layer-norm")
    refuses(tied, MODEL, "--head", HEADS[0], named="--head")
    refuses(tied, MODEL, "--override", "heads", named="NAME=VALUE")
    refuses(classifier, MODEL, named="LunaForSequenceClassification")
    refuses(classifier, mlm_file(), named=HEADS[1])
    refuses(classifier, mlm_file(), "--head", "other", named="other")
    folder = copy_of("tied")
    (folder / "model.safetensors").write_bytes(b"nothing")
    refuses(folder, MODEL, named=str(folder))
    edit_config(folder, num_attention_heads=5)
    refuses(folder, MODEL, named="config.json")
    tiny_model("luna", "token").save_pretrained(tmp_path / "tokens")
    refuses(tmp_path / "tokens", MODEL, named="LunaForTokenClassification")


def test_a_head_that_the_weights_do_not_show(copy_of):
    folder = copy_of("tied_dynamic", HEADS[0])
    edit_weights(folder, change("classifier.dense.weight", (0, 0), 1e-3))
    with refused(*HEADS, "--head", error=UserError):
        compare(folder, mlm_original())
    assert [row.name for row in compare(folder, mlm_original(), HEADS[0]).rows if not row.ok] == [HEADS[0]]


def test_originals_that_are_incomplete_or_impossible(converted):
    original, folder = mlm_original(), converted("tied_dynamic")
    for name in ("layers.1.fc2.bias", "embed_positions.weight"):
        weights = {n: t for n, t in original.weights.items() if not n.endswith(name)}
        with refused(name, error=UserError):
            compare(folder, dataclasses.replace(original, weights=weights))
    with refused("5 attention heads", 48, error=UserError):
        compare(folder, mlm_original(encoder_attention_heads=5))
    with refused("'swish'", error=UserError):
        compare(folder, mlm_original(activation_fn="swish"))
