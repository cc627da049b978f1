"""What the converter of the authors' checkpoints refuses: every message names the fix, and no folder is left behind."""

import argparse
import io
import os
import pickle
import re
import shutil
import sys
import tarfile
import zipfile

import fairseq_checkpoint
import fairseq_luna
import fairseq_names
import pytest
import torch
from gpt2_files import roberta_dictionary
from helpers import tiny_model
from tiny_fairseq import (
    genuine_folder,
    make_state,
    random_weights,
    tiny_arguments,
    write_archive,
    write_fairseq,
    write_tiny,
)


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs the converter, which must refuse and leave nothing, and gives the message."""

    def run(source, *words):
        capsys.readouterr()
        assert fairseq_luna.main([str(source), str(tmp_path / "out"), *map(str, words)]) == 2
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.*"))
        captured = capsys.readouterr()
        assert re.search("^error: ", captured.err, re.MULTILINE) and "Traceback" not in captured.err
        return captured.err

    return run


def save(path, value, legacy=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


# ---- pickles that run code ----


class RunsCode:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


class Unknown:
    """A class of someone's own, as omegaconf's in some later files."""


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", ["args", "model", "extra_state"])
def test_a_pickle_that_wants_to_run_code(place, legacy, tmp_path, refused):
    marker = tmp_path / "marker"
    arguments = tiny_arguments()
    state = make_state(random_weights(arguments), arguments)
    state[place] = {"x": RunsCode(marker)} if place == "model" else RunsCode(marker)
    message = refused(save(tmp_path / "source" / "model.pt", state, legacy).parent)
    assert "wants to run `" in message and "open" in message and "`args` and `model` alone" in message
    assert not marker.exists()


def test_a_class_that_is_not_known(tmp_path, refused):
    arguments = tiny_arguments()
    state = {**make_state(random_weights(arguments), arguments), "args": None, "cfg": Unknown()}
    assert "test_fairseq_refusals.Unknown`" in refused(save(tmp_path / "source" / "model.pt", state).parent)


def test_what_omegaconf_leaves(tmp_path, refused, monkeypatch):
    """Some revisions of fairseq store their `cfg` as an object; by its name the fix is told."""
    monkeypatch.setattr(Unknown, "__module__", "omegaconf.dictconfig")
    for name in ("omegaconf", "omegaconf.dictconfig"):
        monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    arguments = tiny_arguments()
    state = {**make_state(random_weights(arguments), arguments), "args": None, "cfg": Unknown()}
    assert "OmegaConf.to_container" in refused(save(tmp_path / "source" / "model.pt", state).parent)


def test_instructions_of_newer_pickles(tmp_path, refused):
    arguments = tiny_arguments()
    (tmp_path / "source").mkdir()
    torch.save(make_state(random_weights(arguments), arguments), tmp_path / "source" / "model.pt", pickle_protocol=4)
    assert "save it again with torch.save" in refused(tmp_path / "source")


def test_a_plain_pickle(tmp_path, refused):
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps({"model": 1}))
    assert "model.pt is damaged, or a pickle with instructions" in refused(path)


# ---- damaged files ----


@pytest.mark.parametrize("kind", ["zip", "tar", "gztar"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6])
def test_an_archive_that_is_cut_short(kind, share, tmp_path, refused):
    archive = write_archive(write_tiny(tmp_path / "luna.tiny"), kind)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    message = refused(archive)
    assert "Download" in message or "copy" in message
    assert "cut short" in message


def test_an_archive_with_a_wrong_byte(tmp_path, refused):
    archive = write_archive(write_tiny(tmp_path / "luna.tiny"))
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 255
    archive.write_bytes(content)
    assert "damaged" in refused(archive)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_checkpoint_that_is_cut_short(share, legacy, tmp_path, refused):
    source = write_tiny(tmp_path / "source", legacy=legacy)
    content = (source / "model.pt").read_bytes()
    (source / "model.pt").write_bytes(content[: int(share * len(content))])
    message = refused(source)
    assert "source/model.pt is damaged" in message and "again" in message


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("form", ["zip", "gztar", "checkpoint"])
def test_a_wrong_bit_anywhere(form, tmp_path, refused):
    """In the weights, where only the checksums of the file show it."""
    source = write_tiny(tmp_path / "luna.tiny")
    path = source / "model.pt" if form == "checkpoint" else write_archive(source, form)
    content = path.read_bytes()
    for place in range(len(content) // 7, len(content), len(content) // 7):
        path.write_bytes(flipped(content, place))
        if fairseq_luna.main([str(path), str(tmp_path / "out")]) == 0:  # a byte that means nothing, such as a date
            assert form != "gztar"
            intact = write_tiny(tmp_path / "intact")
            assert fairseq_luna.main([str(intact), str(tmp_path / "expected")]) == 0
            expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
            assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
            shutil.rmtree(tmp_path / "out")
            shutil.rmtree(tmp_path / "expected")
        else:
            path.write_bytes(flipped(content, place))
            message = refused(path)
            assert "again" in message or "damaged" in message


def test_a_stretch_that_is_missing(tmp_path, refused):
    archive = write_archive(write_tiny(tmp_path / "luna.tiny"))
    content = archive.read_bytes()
    archive.write_bytes(content[:4000] + content[5000:])
    assert "damaged" in refused(archive)


def test_a_compression_that_python_does_not_have(tmp_path, refused):
    archive = write_archive(write_tiny(tmp_path / "luna.tiny"))
    content = bytearray(archive.read_bytes())
    for start in (b"PK\x03\x04", b"PK\x01\x02"):  # the number of the method in both headers: 9 is Deflate64
        at = content.find(start)
        while at >= 0:
            content[at + (8 if start[2] == 3 else 10)] = 9
            at = content.find(start, at + 4)
    archive.write_bytes(content)
    assert "Unpack it and name the folder" in refused(archive)


def test_a_web_page_instead_of_the_archive(tmp_path, refused):
    page = tmp_path / "luna.base.tied.zip"
    page.write_text("<!DOCTYPE html><html><title>Virus scan warning</title></html>")
    assert "web page" in refused(page)


def test_a_pointer_of_git_lfs(tmp_path, refused):
    source = write_tiny(tmp_path / "source")
    (source / "model.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n")
    assert "is damaged, or a pickle" in refused(source)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_reaches_outside(kind, tmp_path, refused):
    source = write_tiny(tmp_path / "source")
    path = tmp_path / f"luna.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(source / "model.pt", "model.pt")
            archive.writestr("../dict.txt", "0 0\n")
    else:
        with tarfile.open(path, "w") as archive:
            archive.add(source / "model.pt", "model.pt")
            archive.addfile(tarfile.TarInfo("../dict.txt"), io.BytesIO())
    assert "outside itself (../dict.txt)" in refused(path)


# ---- not what it should be ----


def test_another_name_than_that_of_the_file(tmp_path, refused):
    source = write_tiny(tmp_path / "source")
    assert "--checkpoint names other.pt: leave it out" in refused(source / "model.pt", "--checkpoint", "other.pt")


def test_a_missing_source(tmp_path, refused):
    assert "There is no" in refused(tmp_path / "nothing")


def test_a_folder_without_a_checkpoint(tmp_path, refused):
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint (model.pt" in refused(tmp_path / "empty")


def test_a_checkpoint_further_down_or_packed(tmp_path, refused):
    write_archive(write_tiny(tmp_path / "one" / "two" / "three" / "luna.tiny"))
    assert "But there is two/three/luna.tiny: name that" in refused(tmp_path / "one")
    (tmp_path / "one" / "two" / "three" / "luna.tiny" / "model.pt").unlink()
    assert "But there is luna.tiny.zip: name that" in refused(tmp_path / "one" / "two" / "three")


def test_a_dictionary_as_source(tmp_path, refused):
    source = write_tiny(tmp_path / "source")
    assert "Name the folder it is in" in refused(source / "dict.txt")


def test_files_without_permission(tmp_path, refused, monkeypatch):
    """Simulated, because root may read everything."""
    source = write_tiny(tmp_path / "source")

    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", forbidden)
        assert "source/model.pt cannot be read: you have no permission" in refused(source)
    with monkeypatch.context() as patch:
        patch.setattr(fairseq_checkpoint, "_listed", forbidden)
        assert "source cannot be read (Permission denied)" in refused(source)
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "source cannot be read: you have no permission" in refused(source)


def test_a_checkpoint_of_transformers(tmp_path, refused):
    tiny_model("luna", "mlm").save_pretrained(tmp_path / "ours")
    assert "is a checkpoint of transformers" in refused(tmp_path / "ours")


@pytest.mark.parametrize("prefix", ["encoder.", "decoder."])
@pytest.mark.parametrize("attention", ["k_proj.weight", "in_proj_weight"])
def test_a_roberta_checkpoint(prefix, attention, tmp_path, refused):
    place = f"{prefix}sentence_encoder."
    model = {
        f"{place}embed_tokens.weight": torch.zeros(60, 8),
        f"{place}layers.0.self_attn.{attention}": torch.zeros(8, 8),
        f"{place}layers.0.self_attn_layer_norm.weight": torch.ones(8),
    }
    state = {"args": argparse.Namespace(arch="roberta_base"), "model": model}
    message = refused(save(tmp_path / "source" / "model.pt", state).parent)
    assert "RoBERTa" in message and "conversion/roberta_to_luna.py" in message
    assert "FacebookAI/roberta-base" in message


def test_another_sentence_encoder(tmp_path, refused):
    model = {"encoder.sentence_encoder.embed_tokens.weight": torch.zeros(60, 8)}
    message = refused(save(tmp_path / "source" / "model.pt", {"model": model}).parent)
    assert "no packed sequence" in message and "is not a Luna" in message and "RoBERTa" not in message


def test_a_translation_model(tmp_path, refused):
    model = {"encoder.embed_tokens.weight": torch.zeros(9, 4), "decoder.embed_tokens.weight": torch.zeros(9, 4)}
    message = refused(save(tmp_path / "source" / "model.pt", {"model": model}).parent)
    assert "not a masked language model of Luna" in message


@pytest.mark.parametrize("value", [3, {"model": 3}, {"model": {}}, {"other": "words"}])
def test_files_without_tensors(value, tmp_path, refused):
    assert "no checkpoint of fairseq" in refused(save(tmp_path / "source" / "model.pt", value).parent)


def altered(tmp_path, change, **options):
    """A tiny checkpoint with other tensors."""
    arguments = tiny_arguments()
    weights = random_weights(arguments, **options)
    change(weights)
    return write_fairseq(tmp_path / "source", weights, arguments)


ENCODER = "encoder.sentence_encoder."
LAYER = f"{ENCODER}layers.1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({f"{ENCODER}quant_noise.weight": torch.zeros(4, 4)}), "quant_noise.weight"),
        (lambda w: w.pop(f"{LAYER}self_attn.q_proj.bias"), "lacks luna.encoder.layer.1.attention.self.query.bias"),
        (lambda w: w.update({f"{LAYER}fc1.weight": torch.zeros(24, 15)}), "another shape luna.encoder.layer.1"),
        (lambda w: w.update({f"{LAYER}self_attn.pk_proj.bias": torch.zeros(16)}), "has besides luna.encoder.layer.1"),
        (lambda w: w.update({f"{ENCODER}layers.3.fc1.bias": torch.zeros(24)}), "numbered [0, 1, 3]"),
        (
            lambda w: w.update({"encoder.sentence_encoder.layer_norm.weight": torch.ones(16)}),
            "it has layer_norm.weight",
        ),
        (lambda w: w.update({f"{ENCODER}embed_tokens.weight": torch.zeros(60)}), "should have rows and columns"),
        (lambda w: w.update({f"{LAYER}fc1.bias": torch.zeros(24).long()}), "a type that no Luna has"),
        (lambda w: w.update({f"{LAYER}fc1.bias": torch.zeros(24).to_sparse()}), "a type that no Luna has"),
        (lambda w: w.update({f"{LAYER}fc1.bias": torch.zeros(24).to(torch.float8_e4m3fn)}), "a type that no Luna has"),
        (lambda w: w.pop(f"{ENCODER}embed_positions.weight"), "it lacks embed_positions.weight"),
        (lambda w: w.update({"decoder.lm_head.bias": torch.zeros(60)}), "encoder.decoder.lm_head.bias"),
    ],
)
def test_tensors_that_do_not_fit(change, message, tmp_path, refused):
    assert message in refused(altered(tmp_path, change))


@pytest.mark.parametrize("layer", ["dense", "out_proj"])
def test_a_head_without_a_layer(layer, tmp_path, refused):
    head = "cls_classification_head"
    name = f"classification_heads.{head}.{layer}.weight"
    assert f"it has no `{layer}.weight`" in refused(altered(tmp_path, lambda w: w.pop(name), heads={head: 2}))
    flat = altered(tmp_path, lambda w: w.update({name: torch.tensor(1.0)}), heads={head: 2})
    assert f"it has no `{layer}.weight`" in refused(flat)


# ---- dictionary ----


def test_no_dictionary(tmp_path, refused):
    message = refused(write_tiny(tmp_path / "source", dictionary=False))
    assert "no dict.txt in or beside source/model.pt" in message and "--dict FILE" in message


@pytest.mark.parametrize("change", [-1, 1])
def test_dictionary_and_embedding_disagree(change, tmp_path, refused):
    source = write_tiny(tmp_path / "source")
    lines = (source / "dict.txt").read_text().splitlines()
    lines = lines[:-1] if change < 0 else [*lines, "madeupword0009 0"]
    (source / "dict.txt").write_text("\n".join(lines) + "\n")
    message = refused(source)
    assert f"makes {60 + change} tokens" in message and "60 rows" in message and "--dict FILE" in message


def test_no_files_of_the_bpe(tmp_path, refused):
    message = refused(write_tiny(tmp_path / "source", bpe=False))
    assert "--gpt2-bpe" in message and "vocab.json" in message and "merges.txt" in message


def test_roberta_s_own_tokenizer_is_not_rebuilt(tmp_path, refused):
    message = refused(roberta_dictionary(tmp_path / "dict.txt"), "--tokenizer-only")
    assert 'AutoTokenizer.from_pretrained("FacebookAI/roberta-base")' in message


# ---- options ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--override", "heads=3"], "knows no argument heads"),
        (["--override", "dropout"], "not of the form NAME=VALUE"),
        (["--override", "encoder_attention_heads=1e999"], "should be of the type int"),
        (["--override", "encoder_attention_heads=4.5"], "should be of the type int"),
        (["--override", "encoder_attention_heads=two"], "should be of the type int"),
        (["--override", "encoder_attention_heads=3"], "do not divide the width 16"),
        (["--override", "activation_fn=swish"], "known are gelu"),
        (["--override", "dropout=2"], "probability"),
        (["--head-type", "ranking"], "--head-type is without effect on lm_head"),
        (["--labels", "labels.txt"], "--labels is without effect on lm_head"),
        (["--head", "cls_classification_head"], "has no head cls_classification_head"),
        (["--checkpoint", "other.pt"], "no checkpoint other.pt: model.pt"),
        (["--layer-norm", "both"], "invalid choice"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_options(words, message, tmp_path, refused):
    assert message in refused(write_tiny(tmp_path / "source"), *words)


def test_an_unknown_activation_in_the_file(tmp_path, refused):
    assert "`activation_fn` is 'swish'" in refused(write_tiny(tmp_path / "source", changes={"activation_fn": "swish"}))


def test_a_head_with_one_output_of_unknown_use(tmp_path, refused):
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 1})
    message = refused(source)
    assert "--head-type ranking" in message and "--head-type regression" in message
    assert "does not choose among classes" in refused(source, "--head-type", "classification")


def test_a_type_that_the_head_is_not(tmp_path, refused):
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 2})
    assert "has 2 outputs" in refused(source, "--head-type", "ranking")


def test_labels_that_do_not_fit(tmp_path, refused):
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 2}, labels=("a", "a"))
    assert "is no dictionary of classes" in refused(source)
    assert "cannot be read" in refused(source, "--labels", tmp_path / "nothing.txt")
    (tmp_path / "labels.txt").write_text("a 1\nb 1\nc 1\n")
    assert "names 3 classes (a, b, c), but the head" in refused(source, "--labels", tmp_path / "labels.txt")


@pytest.mark.parametrize(
    "words", [["--head", "x"], ["--dtype", "float16"], ["--layer-norm", "plain"], ["--override", "dropout=0.1"]]
)
def test_options_of_models_with_a_tokenizer_alone(words, tmp_path, refused):
    source = write_tiny(tmp_path / "source")
    assert f"{words[0]} is without effect on a tokenizer alone" in refused(source, "--tokenizer-only", *words)


def test_a_tokenizer_alone_without_a_dictionary(tmp_path, refused):
    archive = write_archive(write_tiny(tmp_path / "luna.tiny"))
    message = refused(archive, "--tokenizer-only")
    assert "SOURCE is a folder with dict.txt, or that file" in message
    (tmp_path / "empty").mkdir()
    assert "no dict.txt in or beside the folder" in refused(tmp_path / "empty", "--tokenizer-only")


# ---- the target ----


def test_a_target_that_is_not_empty(tmp_path, capsys):
    source = write_tiny(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for words in ([], ["--overwrite"]):
        assert fairseq_luna.main([str(source), str(tmp_path / "out"), *words]) == 2
        assert "holds files that no conversion wrote (thesis.tex)" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"
    assert fairseq_luna.main([str(source), str(source)]) == 2
    assert "is SOURCE, or holds it" in capsys.readouterr().err


def test_a_refused_conversion_leaves_an_earlier_one(tmp_path, capsys):
    source = genuine_folder(tmp_path / "source", "tied")
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    (source / "dict.txt").unlink()
    assert fairseq_luna.main([str(source), str(tmp_path / "out"), "--overwrite"]) == 2
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_result_that_is_not_equal_is_not_written(tmp_path, refused, monkeypatch):
    """The check after the conversion works from the stored numbers, not from the tables of names."""
    swapped = dict(fairseq_names.ENCODER)
    a, b = "layers.{}.self_attn.q_proj.weight", "layers.{}.self_attn.pq_proj.weight"
    swapped[a], swapped[b] = swapped[b], swapped[a]
    monkeypatch.setattr(fairseq_names, "ENCODER", swapped)
    message = refused(write_tiny(tmp_path / "source"))
    assert "does not compute what the checkpoint does" in message and "layer 1" in message
