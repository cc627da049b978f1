"""What the converter of the authors' checkpoints refuses; it names the value, and leaves no folder behind."""

import argparse
import io
import json
import pickle
import shutil
import tarfile
import zipfile

import fairseq_luna
import pytest
import torch
from fairseq_format import checkpoint, names
from gpt2_files import roberta_dictionary
from helpers import tiny_model
from tiny_fairseq import make_state, random_weights, tiny_arguments, write_archive, write_fairseq, write_tiny

HEAD = "sentence_classification_head"
ENCODER = "encoder.sentence_encoder."
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


def state():
    arguments = tiny_arguments()
    return make_state(random_weights(arguments), arguments)


# ---- pickles that run code ----


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
    source = save(tmp_path / "source", {**state(), place: harmful}, _use_new_zipfile_serialization=not legacy)
    refused(source, "source/model.pt", "open`")
    assert not marker.exists()


def test_other_pickles_that_are_not_read(tmp_path, refused):
    refused(save(tmp_path / "class", {**state(), "cfg": pytest.approx(1)}), "class/model.pt", "approx")
    refused(save(tmp_path / "protocol", state(), pickle_protocol=4), "protocol/model.pt", "torch.save")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"model": 1}))
    refused(tmp_path / "plain.pt", "plain.pt")
    for number, value in enumerate([3, {"model": 3}, {"model": {}}, {"other": "words"}]):
        refused(save(tmp_path / f"none{number}", value), f"none{number}/model.pt")


# ---- damaged files ----


@pytest.mark.parametrize("kind", ["zip", "tar", "gztar"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.6])
def test_a_truncated_archive(kind, share, copied, refused):
    archive = write_archive(copied, kind)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    refused(archive, archive.name)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.999])
def test_a_truncated_checkpoint(share, legacy, tmp_path, refused):
    source = write_tiny(tmp_path / "source", legacy=legacy)
    content = (source / "model.pt").read_bytes()
    (source / "model.pt").write_bytes(content[: int(share * len(content))])
    refused(source, "source/model.pt")


@pytest.mark.parametrize("form", ["zip", "gztar", "checkpoint"])
def test_a_flipped_bit(form, copied, refused):
    """In the weights, where only checksums show it."""
    path = copied / "model.pt" if form == "checkpoint" else write_archive(copied, form)
    content = bytearray(path.read_bytes())
    weight = state()["model"][f"{LAYER}fc1.weight"].numpy().tobytes()
    content[content.index(weight) + 9 if form == "checkpoint" else len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(path, path.name, "damaged")


def test_an_archive_without_a_stretch_or_with_an_unknown_compression(copied, refused):
    archive = write_archive(copied)
    content = archive.read_bytes()
    archive.write_bytes(content[:4000] + content[5000:])
    refused(archive, archive.name, "damaged")
    method = bytearray(content)
    for start, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # 9 is Deflate64
        at = method.find(start)
        while at >= 0:
            method[at + offset] = 9
            at = method.find(start, at + 4)
    archive.write_bytes(method)
    refused(archive, archive.name, "Unpack")


def test_files_that_are_no_archive_or_checkpoint(copied, tmp_path, refused):
    page = tmp_path / "luna.base.tied.zip"
    page.write_text("<!DOCTYPE html><html><title>Virus scan warning</title></html>")
    refused(page, page.name, "web page")
    refused(copied / "dict.txt", "dict.txt")
    (copied / "model.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n")
    refused(copied, "source/model.pt")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_reaches_outside(kind, tiny, tmp_path, refused):
    path = tmp_path / f"luna.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tiny / "model.pt", "model.pt")
            archive.writestr("../dict.txt", "0 0\n")
    else:
        with tarfile.open(path, "w") as archive:
            archive.add(tiny / "model.pt", "model.pt")
            archive.addfile(tarfile.TarInfo("../dict.txt"), io.BytesIO())
    refused(path, "../dict.txt")


def test_a_disk_without_room_and_a_file_without_permission(copied, refused, monkeypatch):
    def failing(number, reason):
        def fail(*args, **kwargs):
            raise OSError(number, reason)

        return fail

    archive = write_archive(copied)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "copyfileobj", failing(28, "No space left on device"))
        refused(archive, "TMPDIR", "No space left")
    monkeypatch.setattr(torch, "load", failing(13, "Permission denied"))
    refused(copied, "source", "Permission denied")


# ---- other models, incomplete models ----


def test_sources_without_a_luna(tmp_path, refused):
    refused(tmp_path / "nothing", "nothing")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "model.pt")
    tiny_model("luna", "mlm").save_pretrained(tmp_path / "ours")
    refused(tmp_path / "ours", "transformers")
    roberta = {
        "decoder.sentence_encoder.embed_tokens.weight": torch.zeros(60, 8),
        "decoder.sentence_encoder.layers.0.self_attn.in_proj_weight": torch.zeros(8, 8),
    }
    source = save(tmp_path / "roberta", {"args": argparse.Namespace(arch="roberta_base"), "model": roberta})
    refused(source, "roberta/model.pt", "RoBERTa", "roberta_to_luna.py")
    refused(save(tmp_path / "other", {"model": dict(list(roberta.items())[:1])}), "`projected_embeddings`")
    translation = {"encoder.embed_tokens.weight": torch.zeros(9, 4), "decoder.embed_tokens.weight": torch.zeros(9, 4)}
    refused(save(tmp_path / "translation", {"model": translation}), "translation/model.pt")


def put(name, tensor):
    return lambda weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put(f"{ENCODER}quant_noise.weight", torch.zeros(4, 4)), "quant_noise.weight"),
        (lambda w: w.pop(f"{LAYER}self_attn.q_proj.bias"), "luna.encoder.layer.1.attention.self.query.bias"),
        (put(f"{LAYER}fc1.weight", torch.zeros(24, 15)), "luna.encoder.layer.1.intermediate.dense.weight"),
        (put(f"{LAYER}self_attn.pk_proj.bias", torch.zeros(16)), "luna.encoder.layer.1.attention.self.pack.key.bias"),
        (put(f"{ENCODER}layers.3.fc1.bias", torch.zeros(24)), "[0, 1, 3]"),
        (put(f"{ENCODER}layer_norm.weight", torch.ones(16)), "`layer_norm.weight`"),
        (put(f"{ENCODER}embed_tokens.weight", torch.zeros(60)), "`embed_tokens.weight`"),
        (put(f"{LAYER}fc1.bias", torch.zeros(24).long()), f"{LAYER}fc1.bias"),
        (put(f"{LAYER}fc1.bias", torch.zeros(24).to_sparse()), f"{LAYER}fc1.bias"),
        (lambda w: w.pop(f"{ENCODER}embed_positions.weight"), "`embed_positions.weight`"),
        (put("decoder.lm_head.bias", torch.zeros(60)), "decoder.lm_head.bias"),
        (lambda w: w.pop(f"classification_heads.{HEAD}.dense.weight"), "`dense.weight`"),
        (put(f"classification_heads.{HEAD}.out_proj.weight", torch.tensor(1.0)), "`out_proj.weight`"),
        (put(f"{LAYER}fc1.bias", torch.full((24,), torch.nan)), f"{LAYER}fc1.bias"),
        (put(f"{LAYER}self_attn_layer_norm.weight", torch.full((16,), torch.inf)), "self_attn_layer_norm.weight"),
    ],
)
def test_tensors_that_do_not_fit(change, named, tmp_path, refused):
    arguments = tiny_arguments()
    weights = random_weights(arguments, heads={HEAD: 2})
    change(weights)
    refused(write_fairseq(tmp_path / "source", weights, arguments), named)


def test_a_position_table_without_the_rows_of_the_padding_id(tmp_path, refused):
    """It would otherwise give a model with two positions fewer."""
    arguments = tiny_arguments()
    source = write_fairseq(tmp_path / "source", random_weights({**arguments, "max_positions": 18}), arguments)
    refused(source, "embed_positions.weight", "20 rows", "`max_positions` is 20", "22")
    words = [str(source), str(tmp_path / "out"), "--override", "max_positions=18"]
    assert fairseq_luna.main(words) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 18


def test_numbers_too_large_for_the_type(tmp_path, refused):
    arguments = tiny_arguments()
    weights = random_weights(arguments)
    weights[f"{LAYER}fc1.bias"][3] = 1e5
    source = write_fairseq(tmp_path / "source", weights, arguments)
    refused(source, "luna.encoder.layer.1.intermediate.dense.bias", "float16", words=["--dtype", "float16"])


def test_a_result_that_differs_is_not_written(tiny, refused, monkeypatch):
    """Verification works from the stored numbers, without the table of names."""
    swapped = dict(names.ENCODER)
    a, b = "layers.{}.self_attn.q_proj.weight", "layers.{}.self_attn.pq_proj.weight"
    swapped[a], swapped[b] = swapped[b], swapped[a]
    monkeypatch.setattr(names, "ENCODER", swapped)
    refused(tiny, "Not equal to the original", "layer 1")


# ---- dictionary, options ----


def test_dictionaries_that_do_not_fit(copied, tmp_path, refused):
    lines = (copied / "dict.txt").read_text().splitlines()
    for changed, rows in ((lines[:-1], 59), ([*lines, "madeupword0009 0"], 61)):
        (copied / "dict.txt").write_text("\n".join(changed) + "\n")
        refused(copied, f"{rows} tokens", "60 rows", "--dict")
    (copied / "dict.txt").unlink()
    refused(copied, "source/model.pt", "--dict")
    refused(copied, "source", "dict.txt", words=["--tokenizer-only"])
    refused(write_archive(copied), "source.zip", words=["--tokenizer-only"])
    refused(roberta_dictionary(tmp_path / "dict.txt"), "FacebookAI/roberta-base", words=["--tokenizer-only"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--override heads=3", "heads"),
        ("--override dropout", "NAME=VALUE"),
        ("--override encoder_attention_heads=4.5", "`encoder_attention_heads` is 4.5"),
        ("--override encoder_attention_heads=two", "'two'"),
        ("--override encoder_attention_heads=3", "width 16"),
        ("--override activation_fn=swish", "`activation_fn` is 'swish'"),
        ("--override dropout=2", "hidden_dropout_prob"),
        ("--head-type ranking", "--head-type"),
        ("--labels labels.txt", "--labels"),
        ("--head cls_classification_head", "cls_classification_head"),
        ("--checkpoint other.pt", "other.pt: model.pt"),
        ("--layer-norm both", "'both'"),
        ("--dtype int8", "'int8'"),
        ("--tokenizer-only --head x", "--head"),
        ("--tokenizer-only --override dropout=0.1", "--override"),
        ("--gpt2-bpe nowhere", "nowhere"),
    ],
)
def test_options(words, named, tiny, refused):
    refused(tiny, named, words=words.split())


def test_heads_that_do_not_fit_their_options(tiny, tmp_path, refused):
    refused(tiny / "model.pt", "other.pt", words=["--checkpoint", "other.pt"])
    one = write_tiny(tmp_path / "one", heads={HEAD: 1})
    refused(one, HEAD, "--head-type ranking", "--head-type regression")
    refused(one, HEAD, "classification", words=["--head-type", "classification"])
    two = write_tiny(tmp_path / "two", heads={HEAD: 2}, labels=("a", "a"))
    refused(two, HEAD, "2 outputs", words=["--head-type", "ranking"])
    refused(two, "label/dict.txt")
    refused(two, "nothing.txt", words=["--labels", tmp_path / "nothing.txt"])
    (tmp_path / "labels.txt").write_text("a 1\nb 1\nc 1\n")
    refused(two, "3 classes", HEAD, words=["--labels", tmp_path / "labels.txt"])
