"""What the converter of the authors' checkpoints refuses; it names the value, and leaves no folder behind."""

import argparse
import io
import json
import shutil
import tarfile
import zipfile

import fairseq_luna
import pytest
import torch
from tiny_fairseq import ENCODER, HEAD, make_state, tiny_state, write_archive, write_fairseq, write_tiny
from tiny_translation import write_checkpoint, write_dictionary

LAYER = f"{ENCODER}layers.1."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny checkpoint, which tests must not change."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "source")


@pytest.fixture
def copied(tiny, tmp_path):
    """A copy of it."""
    return shutil.copytree(tiny, tmp_path / "source")


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs the converter, which must refuse and leave nothing, and name each of these words."""

    def run(source, *named, words=()):
        capsys.readouterr()
        assert fairseq_luna.main([str(source), str(tmp_path / "out"), *map(str, words)]) == 2
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.*"))
        message = capsys.readouterr().err
        assert "error: " in message and "Traceback" not in message
        assert not [word for word in named if word not in message], message

    return run


def save(folder, value, **options):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / "model.pt", **options)
    return folder


# ---- pickles ----


class RunsCode:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", ["args", "model", "extra_state"])
def test_a_pickle_that_runs_code(place, legacy, tmp_path, refused):
    marker = tmp_path / "marker"
    harmful = {"x": RunsCode(marker)} if place == "model" else RunsCode(marker)
    state = {**make_state(*tiny_state()), place: harmful}
    refused(save(tmp_path / "source", state, _use_new_zipfile_serialization=not legacy), "source/model.pt", "open`")
    assert not marker.exists()


ROBERTA = {
    "decoder.sentence_encoder.embed_tokens.weight": torch.zeros(60, 8),
    "decoder.sentence_encoder.layers.0.self_attn.in_proj_weight": torch.zeros(8, 8),
}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"model": {"a": torch.zeros(2)}, "cfg": pytest.approx(1)}, "approx"),
        (3, "int"),
        ({"model": 3}, "`model`"),
        ({"other": "words"}, "`model`"),
        ({"args": argparse.Namespace(arch="roberta_base"), "model": ROBERTA}, "projected_embeddings`"),
    ],
)
def test_other_states(state, named, tmp_path, refused):
    refused(save(tmp_path / "source", state), "source/model.pt", named)


# ---- damaged files ----


@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 0.99])
@pytest.mark.parametrize("kind", ["zip", "tar", "gztar", "checkpoint", "legacy"])
def test_a_truncated_file(kind, share, tmp_path, refused):
    source = write_tiny(tmp_path / "source", legacy=kind == "legacy")
    path = write_archive(source, kind) if kind in ("zip", "tar", "gztar") else source / "model.pt"
    content = path.read_bytes().rstrip(b"\0") if kind == "tar" else path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(path, path.name)


@pytest.mark.parametrize("form", ["zip", "gztar", "checkpoint"])
def test_a_flipped_bit(form, copied, refused):
    """In the weights, where only checksums show it."""
    path = copied / "model.pt" if form == "checkpoint" else write_archive(copied, form)
    content = bytearray(path.read_bytes())
    weight = tiny_state()[0][f"{LAYER}fc1.weight"].numpy().tobytes()
    content[content.index(weight) + 9 if form == "checkpoint" else len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(path, path.name, "damaged")


def test_files_that_are_no_archive_or_checkpoint(copied, tmp_path, refused):
    page = tmp_path / "luna.base.tied.zip"
    page.write_text("<!DOCTYPE html><html><title>Virus scan warning</title></html>")
    refused(page, page.name, "web page")
    (copied / "model.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n")
    refused(copied, "source/model.pt")
    refused(tmp_path / "nothing", "nothing")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "model.pt")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_reaches_outside(kind, tiny, tmp_path, monkeypatch):
    path, inner = tmp_path / f"luna.{kind}", tmp_path / "temporary" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(inner))
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tiny / "model.pt", "model.pt")
            archive.writestr("../harm.txt", "0 0\n")
    else:
        with tarfile.open(path, "w") as archive:
            archive.add(tiny / "model.pt", "model.pt")
            archive.addfile(tarfile.TarInfo("../harm.txt"), io.BytesIO())
    assert fairseq_luna.main([str(path), str(tmp_path / "out")]) == 2  # the tar archive, or for want of a dictionary
    assert not list(tmp_path.rglob("harm.txt"))


def test_a_disk_without_room(copied, refused, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", fail)
    refused(write_archive(copied), "TMPDIR", "No space left")


# ---- models, dictionaries and options that do not fit ----


def put(name, tensor):
    return lambda weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put(f"{ENCODER}quant_noise.weight", torch.zeros(4, 4)), "quant_noise.weight"),
        (lambda w: w.pop(f"{LAYER}self_attn.q_proj.bias"), "luna.encoder.layer.1.attention.self.query.bias"),
        (put(f"{LAYER}fc1.weight", torch.zeros(24, 15)), "luna.encoder.layer.1.intermediate.dense.weight"),
        (put(f"{ENCODER}layers.3.fc1.bias", torch.zeros(24)), "luna.encoder.layer.3.intermediate.dense.bias"),
        (put(f"{ENCODER}layer_norm.weight", torch.ones(16)), "final_layer_norm.weight"),
        (put(f"{ENCODER}embed_tokens.weight", torch.zeros(60)), "embed_tokens.weight`"),
        (put(f"{LAYER}fc1.bias", torch.zeros(24).long()), f"{LAYER}fc1.bias"),
        (put("decoder.lm_head.bias", torch.zeros(60)), "`decoder`"),
        (lambda w: w.pop(f"classification_heads.{HEAD}.dense.weight"), "dense.weight`"),
        (put(f"{LAYER}fc1.bias", torch.full((24,), torch.nan)), f"{LAYER}fc1.bias"),
    ],
)
def test_tensors(change, named, tmp_path, refused):
    weights, arguments = tiny_state(heads={HEAD: 2})
    change(weights)
    refused(write_fairseq(tmp_path / "source", weights, arguments), named)


def test_a_position_table_without_the_rows_of_the_padding_id(tmp_path, refused):
    """It would otherwise give a model with two positions fewer."""
    source = write_tiny(tmp_path / "source", fields={"max_position_embeddings": 18}, changes={"max_positions": 20})
    refused(source, "embed_positions.weight", "20 rows", "`max_positions` is 20", "22")
    assert fairseq_luna.main([str(source), str(tmp_path / "out"), "--override", "max_positions=18"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 18


def test_numbers_too_large_for_the_type(tmp_path, refused):
    weights, arguments = tiny_state()
    weights[f"{LAYER}fc1.bias"][3] = 1e5
    source = write_fairseq(tmp_path / "source", weights, arguments)
    refused(source, "luna.encoder.layer.1.intermediate.dense.bias", "float16", words=["--dtype", "float16"])


def test_files_that_hold_other_tensors(tiny, refused, monkeypatch):
    """The result is read back before it is kept."""
    load = fairseq_luna.load

    def other(folder):
        model = load(folder)
        model.lm_head.bias.data[3] += 1e-6
        return model

    monkeypatch.setattr(fairseq_luna, "load", other)
    refused(tiny, "lm_head.bias")


@pytest.mark.parametrize("lines", ["one fewer", "one more", "none"])
def test_dictionaries(lines, copied, refused):
    path = copied / "dict.txt"
    text = path.read_text().splitlines()
    path.write_text("\n".join(text[:-1] if lines == "one fewer" else [*text, "madeupword0009 0"]) + "\n")
    if lines == "none":
        path.unlink()
    refused(copied, "--dict", *{"one fewer": ["59", "60"], "one more": ["61", "60"], "none": []}[lines])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--override heads=3", "heads"),
        ("--override dropout", "NAME=VALUE"),
        ("--override encoder_attention_heads=4.5", "`encoder_attention_heads` is 4.5"),
        ("--override encoder_attention_heads=3", "hidden_size"),
        ("--override activation_fn=swish", "`activation_fn` is 'swish'"),
        ("--head-type ranking", "--head-type"),
        ("--target-dict dict.txt", "--target-dict"),
        ("--head cls_classification_head", "Choose one"),
        ("--checkpoint other.pt", "other.pt, but has model.pt"),
        ("--gpt2-bpe .", "--gpt2-bpe"),
    ],
)
def test_options(words, named, tiny, refused):
    refused(tiny, named, words=words.split())


@pytest.mark.parametrize(
    ("outputs", "labels", "words", "named"),
    [
        (1, "", "", "--head-type ranking"),
        (1, "", "--head-type classification", "one output"),
        (2, "", "--head-type ranking", "2 outputs"),
        (2, "aa", "", "label/dict.txt"),
        (3, "ab", "--labels {source}/label/dict.txt", "2 classes"),
    ],
)
def test_heads(outputs, labels, words, named, tmp_path, refused):
    source = write_tiny(tmp_path / "source", heads={HEAD: outputs}, labels=tuple(labels))
    refused(source, named, words=words.format(source=source).split())


@pytest.mark.parametrize(
    ("arguments", "words", "named"),
    [
        ({"decoder_attention_heads": 2}, "", "decoder_attention_heads"),
        ({"no_token_positional_embeddings": True}, "", "no_token_positional_embeddings"),
        ({"target_lang": "fr"}, "", "--target-dict"),
        ({}, "--dict {source}/short.txt", "40"),
        ({}, "--gpt2-bpe x", "--gpt2-bpe"),
    ],
)
def test_translation(arguments, words, named, tmp_path, refused):
    _, source = write_checkpoint(tmp_path / "wmt", "post_tied_sinusoidal", **arguments)
    write_dictionary(source / "short.txt", 40)
    refused(source, named, words=words.format(source=source).split())
