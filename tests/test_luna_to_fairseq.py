"""Converting back to the authors' fairseq code: bitwise and with their arguments; what they lack is refused."""

import argparse
import json

import fairseq_luna
import luna_to_fairseq
import pytest
import torch
from fairseq_format.checkpoint import open_checkpoint
from fairseq_format.config import head_of
from fairseq_format.names import HEADS, is_norm
from fairseq_format.tokenizer import build_tokenizer, read_bpe, read_dictionary
from gpt2_files import small_gpt2_folder
from helpers import inputs_for, refused, tiny_model, tiny_tokenizer
from luna_to_fairseq import to_state
from official_luna import CHECKPOINTS, POOLINGS
from safetensors.torch import load_file, save_file
from tiny_fairseq import HEAD, genuine_folder, write_fairseq, write_fixture, write_tiny

from luna_hf.scripting import UserError

# Arguments of a training run that our config does not hold.
OF_THE_RUN = {"data", "tokens_per_sample"}
# What to call a head, by what it reads.
HEAD_NAMES = {"cls": HEAD, "packed_max": "pooling_classification_head", "packed_attention": list(POOLINGS)[2]}


def to_ours(source, target, *words):
    assert fairseq_luna.main([str(source), str(target), *words]) == 0
    return target


def to_fairseq(source, target, *words):
    """Run the command, which also converts back and compares; it must succeed."""
    assert luna_to_fairseq.main([str(source), str(target), *words]) == 0
    return target


def read(folder):
    """The entries of model.pt."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(folder / "model.pt", weights_only=True)


def back_to_ours(state, folder):
    """A state converted to our format, with a dictionary and a BPE."""
    return to_ours(write_fairseq(folder / "theirs", state["model"], vars(state["args"])), folder / "again")


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name


def assert_same_folders(first, second, *files):
    assert_same(load_file(first / "model.safetensors"), load_file(second / "model.safetensors"))
    for file in ("config.json", *files):
        assert json.loads((first / file).read_text()) == json.loads((second / file).read_text()), file


@pytest.fixture
def fails(tmp_path, capsys):
    """Runs the command, which must refuse, leave nothing, and name each of these words."""

    def run(source, *named, words=()):
        capsys.readouterr()
        assert luna_to_fairseq.main([str(source), str(tmp_path / "back"), *words]) == 2
        message = capsys.readouterr().err
        assert "error: " in message and "Traceback" not in message and not list(tmp_path.glob(".back*"))
        assert not [word for word in named if word not in message], message

    return run


# ---- there and back ----


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_checkpoint_of_the_authors_comes_back_bitwise(name, tmp_path):
    """Tensors, their types, the model's arguments and the dictionary; and the result converts to the same files."""
    source = genuine_folder(tmp_path / "theirs", name)
    ours = to_ours(source, tmp_path / "ours")
    back = to_fairseq(ours, tmp_path / "back")
    before, after = read(source), read(back)
    assert_same(after["model"], before["model"])
    shapes = json.loads((CHECKPOINTS / name / "config.json").read_text())["model_keys"]
    assert {key: list(tensor.shape) for key, tensor in after["model"].items()} == shapes
    theirs, arguments = vars(before["args"]), vars(after["args"])
    shared = (theirs.keys() & arguments.keys()) - OF_THE_RUN
    assert len(shared) > 30
    assert {key: arguments[key] for key in shared} == {key: theirs[key] for key in shared}
    assert read_dictionary(back / "dict.txt") == read_dictionary(source / "dict.txt")
    assert_same_folders(to_ours(back, tmp_path / "again"), ours, "tokenizer.json", "tokenizer_config.json")
    text = (back / "README.md").read_text()
    assert "\npython conversion/luna_to_fairseq.py ours back\n" in text
    assert str(tmp_path) not in text and "$" not in text
    assert {path.name for path in back.iterdir()} == {"README.md", "model.pt", "dict.txt", "encoder.json", "vocab.bpe"}


@pytest.mark.parametrize("head", ["lm_head", *POOLINGS])
def test_every_head_comes_back_bitwise(head, tmp_path):
    """One of several heads, with the encoder."""
    task = "masked_lm" if head == "lm_head" else "sentence_prediction"
    source = write_fixture(tmp_path / "theirs", "untied_dynamic", task=task)
    back = to_fairseq(to_ours(source, tmp_path / "ours", "--head", head), tmp_path / "back")
    before, after = read(source), read(back)
    kept = "encoder.lm_head." if head == "lm_head" else f"{HEADS}{head}."
    parts = ("encoder.sentence_encoder.", kept)
    assert_same(after["model"], {key: value for key, value in before["model"].items() if key.startswith(parts)})
    arguments = after["args"]
    assert arguments.task == arguments.criterion == task
    if head != "lm_head":
        assert arguments.classification_head_name == head
        assert arguments.num_classes == len(before["model"][f"{kept}out_proj.bias"])


ALL = {"fix_projection_length": True, "activation_fn": "gelu_accurate", "pooler_activation_fn": "relu"}
ALL |= {"dropout": 0.2, "attention_dropout": 0.0, "activation_dropout": 0.05, "pooler_dropout": 0.3}
RANKING = {"task": "sentence_ranking", "num_classes": 4, "ranking_head_name": HEAD}
REGRESSION = {"task": "sentence_prediction", "num_classes": 1, "regression_target": True}


@pytest.mark.parametrize(
    ("heads", "fields", "arguments", "words"),
    [
        ({"pooling_classification_head": 3}, {"tie_kv": False}, {"task": "sentence_prediction", **ALL}, ""),
        ({HEAD: 1}, {}, RANKING, "--head-type ranking"),
        ({HEAD: 1}, {}, REGRESSION, "--head-type regression"),
        ({}, {"tie_word_embeddings": False}, {"untie_weights_luna": True}, ""),
    ],
)
def test_arguments_and_labels_come_back(heads, fields, arguments, words, tmp_path):
    labels = ("not_entailment", "entailment", "neutral")[: 3 * (3 in heads.values())]
    source = write_tiny(tmp_path / "theirs", heads=heads, labels=labels, fields=fields, changes=arguments)
    ours = to_ours(source, tmp_path / "ours", *words.split())
    back = to_fairseq(ours, tmp_path / "back")
    found = vars(read(back)["args"])
    assert found["untie_luna_kv"] == ("tie_kv" in fields) and {key: found[key] for key in arguments} == arguments
    if labels:
        assert (back / "label" / "dict.txt").read_text() == "".join(f"{label} 0\n" for label in labels)
    assert_same_folders(to_ours(back, tmp_path / "again"), ours)


# ---- models of ours ----


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mlm", {"tie_kv": False, "dynamic_projection": False, "tie_word_embeddings": False}),
        ("mlm", {"hidden_act": "gelu_pytorch_tanh", "num_projected_attention_heads": 4}),
        ("sequence", {"classifier_pooling": "packed_max"}),
        ("sequence", {"classifier_pooling": "cls", "classifier_dropout": None, "num_labels": 3}),
        ("choice", {"classifier_pooling": "packed_attention"}),
        ("base", {}),
    ],
)
def test_models_of_ours(kind, fields, tmp_path):
    """To fairseq and back, without tokenizer and labels; what a head reads decides its name."""
    model = tiny_model("luna", kind, **fields)
    model.save_pretrained(tmp_path / "ours")
    back = to_fairseq(tmp_path / "ours", tmp_path / "back")
    assert not (back / "dict.txt").exists()
    state = read(back)
    heads = {name.split(".")[1] for name in state["model"] if name.startswith(HEADS)}
    assert heads == ({HEAD_NAMES[fields["classifier_pooling"]]} if "classifier_pooling" in fields else set())
    again = type(model).from_pretrained(back_to_ours(state, tmp_path))
    assert_same(again.state_dict(), model.state_dict())
    with torch.no_grad():
        inputs = inputs_for(kind)
        # Products with one row round differently by their place in memory.
        torch.testing.assert_close(again(**inputs)[0], model(**inputs)[0], rtol=0, atol=1e-6)


def test_norms_stored_less_one(tmp_path):
    model = tiny_model("luna", "mlm")
    with torch.no_grad():
        model.luna.embeddings.LayerNorm.weight[0] = 0.1  # no float32 less 1 gives this back exactly
    model.save_pretrained(tmp_path / "ours")
    plain = to_state(model, head_of(model))["model"]
    stored = read(to_fairseq(tmp_path / "ours", tmp_path / "back", "--layer-norm", "offset"))
    assert sum(map(is_norm, plain)) == 2 * 3 + 2 + 1
    for name, tensor in stored["model"].items():
        assert torch.equal(tensor, plain[name] - 1 if is_norm(name) else plain[name]), name
    with open_checkpoint(tmp_path / "back") as original:
        assert original.norm_offset == 1
    for name, tensor in load_file(back_to_ours(stored, tmp_path) / "model.safetensors").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=6e-8)


def test_an_earlier_conversion_with_labels_is_replaced_and_nothing_else(tmp_path, fails):
    ours, back = tmp_path / "ours", tmp_path / "back"
    tiny_model("luna", "sequence", id2label={0: "no", 1: "yes"}).save_pretrained(ours)
    to_fairseq(ours, back)
    fails(ours, "--overwrite")
    tiny_model("luna", "sequence", id2label={0: "yes", 1: "no"}).save_pretrained(ours)
    to_fairseq(ours, back, "--overwrite")
    assert (back / "label" / "dict.txt").read_text() == "yes 0\nno 0\n"
    (back / "label" / "mine.txt").write_text("mine")
    fails(ours, "label", words=["--overwrite"])


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        *(
            ("mlm", {field: value}, f"`{field}` is {value!r}")
            for field, value in [
                ("local_window", 4),
                ("scale_embedding", True),
                ("position_embedding_type", "sinusoidal"),
                ("num_projected_attention_heads", 2),
                ("layer_norm_eps", 1e-12),
                ("hidden_act", "silu"),
                ("classifier_activation", "gelu_new"),
            ]
        ),
        ("sequence", {"classifier_pooling": "mean"}, "'mean'"),
        ("choice", {"classifier_pooling": "packed_mean"}, "'packed_mean'"),
        ("sequence", {"problem_type": "multi_label_classification", "num_labels": 3}, "multi_label_classification"),
        ("sequence", {"problem_type": "regression", "num_labels": 3}, "`num_labels` is 3"),
        ("token", {}, "counterpart"),
    ],
)
def test_models_that_the_authors_lack(kind, fields, named):
    model = tiny_model("luna", kind, **fields)
    with refused(named, error=UserError):
        to_state(model, head_of(model))


@pytest.mark.parametrize(
    ("kind", "pooling", "name"),
    [
        ("sequence", "cls", "pooling_classification_head"),
        ("sequence", "packed_max", "attention_classification_head"),
        ("sequence", "packed_attention", "mine"),
        ("sequence", "cls", "a.b"),
        ("mlm", "cls", "mine"),
    ],
)
def test_names_of_heads(kind, pooling, name):
    with refused("--head", name, error=UserError):
        head_of(tiny_model("luna", kind, classifier_pooling=pooling), name)


def test_labels_that_a_dictionary_cannot_hold(tmp_path, fails):
    tiny_model("luna", "sequence", id2label={0: "other", 1: "a\nb"}).save_pretrained(tmp_path / "ours")
    fails(tmp_path / "ours", "label/dict.txt")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, "broken"),
        ({"model_type": "roberta"}, "'roberta'"),
        ({"model_type": "luna", "architectures": None}, "`architectures`"),
        ({"model_type": "luna", "architectures": ["LunaForMaskedLM"], "hidden_size": 7}, "hidden_size"),
    ],
)
def test_sources_that_are_no_luna(config, named, tmp_path, fails):
    (tmp_path / "broken").mkdir()
    if config is not None:
        (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    fails(tmp_path / "broken", named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("lm_head.bias"), "lm_head.bias"),
        (lambda w: w.update({"odd": torch.zeros(2)}), "odd"),
        (lambda w: w.update({"lm_head.bias": w["lm_head.bias"] * torch.nan}), "lm_head.bias`"),
    ],
)
def test_weights_that_do_not_fit(change, named, tmp_path, fails):
    folder = tmp_path / "ours"
    tiny_model("luna", "mlm").save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    fails(folder, named)


def test_tokenizers_that_do_not_fit(tmp_path, fails):
    folder = tmp_path / "ours"
    tiny_model("luna", "mlm", vocab_size=294).save_pretrained(folder)
    symbols = read_dictionary(CHECKPOINTS / "tied" / "dict.txt")
    bpe = read_bpe(str(small_gpt2_folder(tmp_path / "bpe")))
    build_tokenizer([*symbols[:-2], symbols[-1]], bpe, 64).save_pretrained(folder)
    fails(folder, "293", "294")
    (folder / "tokenizer.json").write_text("{")
    fails(folder, "tokenizer.json")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["unheard of"])  # fairseq's dictionary has no symbol for it
    tiny_model("luna", "mlm", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fails(folder, "'unheard of'")
