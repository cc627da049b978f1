"""The way back to the authors' fairseq code: bitwise, with their arguments, and what is refused."""

import argparse
import json
import sys

import pytest
import torch
from gpt2_files import small_gpt2_folder
from helpers import ROOT, inputs_for, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny_fairseq import (
    GENUINE,
    MIXED_HEADS,
    genuine_folder,
    official_shapes,
    random_weights,
    tiny_arguments,
    write_fairseq,
    write_fixture,
    write_tiny,
)

sys.path.insert(0, str(ROOT / "conversion"))  # the scripts import their sibling plainly

import fairseq_luna
import luna_to_fairseq
from fairseq_checkpoint import HEADS, open_original
from fairseq_tokenizer import build_tokenizer, read_bpe, read_dictionary
from luna_to_fairseq import to_state
from shared import UserError

from luna_hf import LunaForMaskedLM

genuine = pytest.mark.parametrize("name", ["tied", "untied"])
# What our config has no place for, so that it is made anew.
OF_THE_RUN = {"data", "tokens_per_sample"}
POOLINGS = {
    "cls": "sentence_classification_head",
    "packed_max": "pooling_classification_head",
    "packed_attention": "attention_classification_head",
}


def to_ours(source, target, *words):
    assert fairseq_luna.main([str(source), str(target), *words]) == 0
    return target


def to_fairseq(source, target, *words):
    assert luna_to_fairseq.main([str(source), str(target), *words]) == 0
    return target


def read(path):
    """The entries of a checkpoint, read as `open_original` reads them."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name


def refused(capsys, *words):
    """The message with which a command line is refused."""
    capsys.readouterr()
    assert luna_to_fairseq.main(list(map(str, words))) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    return message


def random_model(kind="mlm", **overrides):
    return tiny_model("luna", kind, **overrides)


# ---- there and back ----


@genuine
def test_genuine_checkpoint_comes_back_bitwise(name, tmp_path):
    """Every tensor, its type, the arguments of the model and the dictionary are those of the authors' file."""
    source = genuine_folder(tmp_path / "theirs", name)
    back = to_fairseq(to_ours(source, tmp_path / "ours"), tmp_path / "back")
    before, after = read(source / "model.pt"), read(back / "model.pt")
    assert_same(after["model"], before["model"])
    theirs, ours = vars(before["args"]), vars(after["args"])
    shared = (theirs.keys() & ours.keys()) - OF_THE_RUN
    assert len(shared) > 30
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert read_dictionary(back / "dict.txt") == read_dictionary(source / "dict.txt")


@genuine
def test_result_has_exactly_the_official_parameters(name, tmp_path):
    """Names and shapes are those that the authors' code was seen to write."""
    back = to_fairseq(to_ours(genuine_folder(tmp_path / "theirs", name), tmp_path / "ours"), tmp_path / "back")
    expected = json.loads((GENUINE / name / "config.json").read_text())["model_keys"]
    assert {key: list(tensor.shape) for key, tensor in read(back / "model.pt")["model"].items()} == expected


@genuine
def test_result_converts_again_to_the_same_model(name, tmp_path):
    """The authors' file, read back by the converter, gives our files again: weights, config and tokenizer."""
    ours = to_ours(genuine_folder(tmp_path / "theirs", name), tmp_path / "ours")
    again = to_ours(to_fairseq(ours, tmp_path / "back"), tmp_path / "again")
    assert_same(load_file(again / "model.safetensors"), load_file(ours / "model.safetensors"))
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((again / file).read_text()) == json.loads((ours / file).read_text()), file


@pytest.mark.parametrize("head", ["lm_head", *MIXED_HEADS])
@pytest.mark.parametrize("name", ["tied_fixed", "untied_dynamic"])
def test_every_head_comes_back_bitwise(name, head, tmp_path):
    """Of a checkpoint with several heads, each comes back alone, with the encoder, whatever its inner width."""
    changes = {} if head == "lm_head" else {"task": "sentence_prediction"}
    source = write_fixture(tmp_path / "theirs", name, changes=changes)
    ours = to_ours(source, tmp_path / "ours", "--head", head)
    back = to_fairseq(ours, tmp_path / "back", *(["--head", head] if head == "cls_classification_head" else []))
    before, after = read(source / "model.pt"), read(back / "model.pt")
    kept = "encoder.lm_head." if head == "lm_head" else f"{HEADS}{head}."
    parts = ("encoder.sentence_encoder.", kept)
    assert_same(after["model"], {key: value for key, value in before["model"].items() if key.startswith(parts)})
    if head != "lm_head":
        arguments = after["args"]
        assert arguments.task == arguments.criterion == "sentence_prediction"
        assert arguments.classification_head_name == head
        assert arguments.num_classes == len(before["model"][f"{kept}out_proj.bias"])


@pytest.mark.parametrize(
    ("task", "kind"), [("sentence_ranking", "ranking"), ("sentence_prediction", "regression")], ids=["rank", "regress"]
)
def test_heads_with_one_output_come_back(task, kind, tmp_path):
    """The arguments say what the output is for, so that nothing has to be told when it is converted again."""
    source = write_tiny(
        tmp_path / "theirs",
        heads={"sentence_classification_head": 1},
        changes={"task": task, "regression_target": True},
    )
    ours = to_ours(source, tmp_path / "ours", "--head-type", kind)
    back = to_fairseq(ours, tmp_path / "back")
    state = read(back / "model.pt")
    assert state["args"].task == task
    if kind == "ranking":
        assert (state["args"].num_classes, state["args"].ranking_head_name) == (4, "sentence_classification_head")
    else:
        assert (state["args"].num_classes, state["args"].regression_target) == (1, True)
    again = to_ours(back, tmp_path / "again")
    assert_same(load_file(again / "model.safetensors"), load_file(ours / "model.safetensors"))
    assert (again / "config.json").read_text() == (ours / "config.json").read_text()


def test_untied_output_layer_and_other_arguments_come_back(tmp_path):
    """An output layer of its own, fixed projection, other activations and dropouts."""
    changes = {
        "untie_weights_luna": True,
        "untie_luna_kv": True,
        "fix_projection_length": True,
        "activation_fn": "gelu_accurate",
        "pooler_activation_fn": "relu",
        "dropout": 0.2,
        "attention_dropout": 0.0,
        "activation_dropout": 0.05,
        "pooler_dropout": 0.3,
    }
    source = write_tiny(tmp_path / "theirs", changes=changes)
    back = to_fairseq(to_ours(source, tmp_path / "ours"), tmp_path / "back")
    before, after = read(source / "model.pt"), read(back / "model.pt")
    assert_same(after["model"], before["model"])
    assert not torch.equal(
        after["model"]["encoder.lm_head.weight"], random_weights(tiny_arguments())["encoder.lm_head.weight"]
    )
    assert {key: getattr(after["args"], key) for key in changes} == changes


def test_labels_keep_the_order_of_the_outputs(tmp_path):
    labels = ("not_entailment", "entailment", "neutral")
    source = write_tiny(
        tmp_path / "theirs",
        heads={"pooling_classification_head": 3},
        labels=labels,
        changes={"task": "sentence_prediction"},
    )
    ours = to_ours(source, tmp_path / "ours")
    back = to_fairseq(ours, tmp_path / "back")
    assert (back / "label" / "dict.txt").read_text() == "not_entailment 0\nentailment 0\nneutral 0\n"
    again = to_ours(back, tmp_path / "again")
    assert (again / "config.json").read_text() == (ours / "config.json").read_text()


# ---- models of ours ----


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_model_of_ours_computes_the_same_afterwards(untied, dynamic, tmp_path):
    """Ours to fairseq and back: equal logits, and the names that the authors' code has for such a model."""
    options = {"tie_kv": not untied, "dynamic_projection": dynamic, "tie_word_embeddings": not untied}
    model = random_model(hidden_act="gelu_pytorch_tanh", **options)
    state = to_state(model)
    arguments = vars(state["args"])
    shapes = official_shapes(arguments, model.config.vocab_size)
    assert {name: tuple(tensor.shape) for name, tensor in state["model"].items()} == shapes
    source = write_fairseq(tmp_path / "theirs", state["model"], arguments)
    again, inputs = LunaForMaskedLM.from_pretrained(to_ours(source, tmp_path / "ours")), inputs_for("mlm")
    assert_same(again.state_dict(), model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "choice"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_classifier_of_ours_computes_the_same_afterwards(pooling, kind, tmp_path):
    """Also without tokenizer and labels; the name of the head follows from what it reads."""
    model = random_model(kind, classifier_pooling=pooling, num_labels=3, classifier_dropout=None)
    model.save_pretrained(tmp_path / "ours")
    back = to_fairseq(tmp_path / "ours", tmp_path / "back")
    state = read(back / "model.pt")
    assert {name.split(".")[1] for name in state["model"] if name.startswith(HEADS)} == {POOLINGS[pooling]}
    assert state["args"].pooler_dropout == model.config.hidden_dropout_prob
    assert not (back / "dict.txt").exists() and not (back / "label").exists()
    again = to_ours(write_fairseq(tmp_path / "theirs", state["model"], vars(state["args"])), tmp_path / "again")
    model_again, inputs = type(model).from_pretrained(again), inputs_for(kind)
    assert_same(model_again.state_dict(), model.state_dict())
    with torch.no_grad():
        # Products with one row depend on where a tensor lies in memory, by a rounding.
        torch.testing.assert_close(model_again(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-6)


def test_encoder_of_ours_comes_back(tmp_path):
    model = random_model("base")
    model.save_pretrained(tmp_path / "ours")
    state = read(to_fairseq(tmp_path / "ours", tmp_path / "back") / "model.pt")
    again = to_ours(write_fairseq(tmp_path / "theirs", state["model"], vars(state["args"])), tmp_path / "again")
    assert_same(load_file(again / "model.safetensors"), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_keep_their_type(dtype, tmp_path):
    """The type of the file's weights counts, also where config.json says another one."""
    model = random_model().to(dtype)
    model.save_pretrained(tmp_path / "ours")
    path = tmp_path / "ours" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float64"}))
    weights = read(to_fairseq(tmp_path / "ours", tmp_path / "back") / "model.pt")["model"]
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert torch.equal(weights["encoder.lm_head.bias"], model.lm_head.bias)


def test_tied_output_layer_is_stored_once(tmp_path):
    """It has two names in the file, as in the authors', and one storage."""
    weights = to_state(random_model())["model"]
    output, embedding = weights["encoder.lm_head.weight"], weights["encoder.sentence_encoder.embed_tokens.weight"]
    assert output.data_ptr() == embedding.data_ptr()


# ---- LayerNorm less 1 ----


def test_offset_layer_norm_is_within_rounding(tmp_path, capsys):
    """The weights are stored less 1, which is found out and undone; what is rounded is said."""
    model = random_model()
    with torch.no_grad():
        model.luna.embeddings.LayerNorm.weight[0] = 0.1  # less 1, this has no float32 that gives it back
    model.save_pretrained(tmp_path / "ours")
    plain = to_state(model)["model"]
    back = to_fairseq(tmp_path / "ours", tmp_path / "back", "--layer-norm", "offset")
    assert "LayerNorm: weights less 1, rounded by at most" in capsys.readouterr().out
    with open_original(back) as original:
        assert original.norm_offset == 1
        norms = [name for name in plain if "norm" in name and name.endswith("weight")]
        assert len(norms) == 3 * 3 + 2 + 1
        for name, tensor in original.weights.items():
            expected = plain[name] - 1 if name in norms else plain[name]
            assert torch.equal(tensor, expected), name
    state = read(back / "model.pt")
    again = to_ours(write_fairseq(tmp_path / "theirs", state["model"], vars(state["args"])), tmp_path / "again")
    for name, tensor in load_file(again / "model.safetensors").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=6e-8)


# ---- what is printed and written besides ----


def test_what_is_printed(tmp_path, capsys):
    model = random_model("sequence", classifier_pooling="packed_max", num_labels=3)
    model.save_pretrained(tmp_path / "ours")
    to_fairseq(tmp_path / "ours", tmp_path / "back")
    printed = capsys.readouterr().out
    count = len(model.state_dict())
    assert f"Tensors: {count} in float32; of ours, without a counterpart: none" in printed
    assert "Head: pooling_classification_head (packed_max; 3 outputs)" in printed
    assert "encoder_layers 3, encoder_embed_dim 48" in printed and "untie_luna_kv False" in printed
    assert "no `encoder.lm_head.*`" in printed and "strict loading refuses" in printed
    assert "there is no dict.txt" in printed and "It has not been run in fairseq." in printed
    random_model().save_pretrained(tmp_path / "mlm")
    to_fairseq(tmp_path / "mlm", tmp_path / "other")
    printed = capsys.readouterr().out
    assert "without a counterpart: lm_head.decoder.bias (the same as lm_head.bias)" in printed
    assert "strict" not in printed


def test_readme_says_what_the_folder_is(tmp_path):
    """The command is that of any machine, and every file beside it is explained."""
    back = to_fairseq(to_ours(genuine_folder(tmp_path / "theirs", "tied"), tmp_path / "ours"), tmp_path / "back")
    text = (back / "README.md").read_text()
    assert "    python conversion/luna_to_fairseq.py ours back\n" in text
    assert "**not been run in fairseq**" in text and str(tmp_path) not in text and "$" not in text
    files = {path.name for path in back.iterdir()} - {"README.md"}
    assert files == {"model.pt", "dict.txt", "encoder.json", "vocab.bpe"}
    assert all(f"| {file} |" in text for file in files)


def test_earlier_conversion_is_replaced_on_request(tmp_path, capsys):
    random_model().save_pretrained(tmp_path / "ours")
    back = to_fairseq(tmp_path / "ours", tmp_path / "back")
    assert "--overwrite" in refused(capsys, tmp_path / "ours", back)
    random_model(seed=1).save_pretrained(tmp_path / "ours")
    to_fairseq(tmp_path / "ours", back, "--overwrite")
    assert torch.equal(read(back / "model.pt")["model"]["encoder.lm_head.bias"], random_model(seed=1).lm_head.bias)


def test_an_earlier_conversion_with_labels_is_replaced_but_nothing_else(tmp_path, capsys):
    random_model("sequence", id2label={0: "no", 1: "yes"}).save_pretrained(tmp_path / "ours")
    back = to_fairseq(tmp_path / "ours", tmp_path / "back")
    random_model("sequence", id2label={0: "yes", 1: "no"}).save_pretrained(tmp_path / "ours")
    to_fairseq(tmp_path / "ours", back, "--overwrite")
    assert (back / "label" / "dict.txt").read_text() == "yes 0\nno 0\n"
    (back / "label" / "mine.txt").write_text("mine")
    assert "no conversion wrote (label)" in refused(capsys, tmp_path / "ours", back, "--overwrite")
    (back / "label" / "mine.txt").unlink()
    (back / "thesis").mkdir()
    assert "no conversion wrote (thesis)" in refused(capsys, tmp_path / "ours", back, "--overwrite")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_kernel_size", 3),
        ("norm_first", True),
        ("position_embedding_type", "sinusoidal"),
        ("type_vocab_size", 2),
        ("embedding_layer_norm", False),
        ("num_projected_attention_heads", 2),
        ("layer_norm_eps", 1e-12),
        ("pad_token_id", 0),
        ("bos_token_id", 5),
        ("eos_token_id", 3),
        ("eos_token_id", None),
        ("hidden_act", "silu"),
        ("classifier_activation", "gelu_new"),
    ],
)
def test_fields_that_the_authors_do_not_have(field, value, tmp_path, capsys):
    """The field is named, in the script and in the function, and nothing is written."""
    model = random_model(**{field: value})
    with pytest.raises(UserError, match=f"`{field}` is {value!r}"):
        to_state(model)
    model.save_pretrained(tmp_path / "ours")
    assert f"`{field}` is {value!r}" in refused(capsys, tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_projected_heads_may_be_named_if_they_are_as_many():
    assert to_state(random_model(num_projected_attention_heads=4))["args"].encoder_attention_heads == 4


@pytest.mark.parametrize("kind", ["sequence", "choice"])
@pytest.mark.parametrize("pooling", ["mean", "packed_mean"])
def test_poolings_that_the_authors_do_not_have(pooling, kind):
    with pytest.raises(UserError, match=f"`classifier_pooling` is '{pooling}'.*cls, packed_max, packed_attention"):
        to_state(random_model(kind, classifier_pooling=pooling))


@pytest.mark.parametrize(
    ("kind", "name"), [("token", "LunaForTokenClassification"), ("span", "LunaForQuestionAnswering")]
)
def test_models_that_the_authors_do_not_have(kind, name, tmp_path, capsys):
    model = random_model(kind)
    with pytest.raises(UserError, match=name):
        to_state(model)
    model.save_pretrained(tmp_path / "ours")
    assert name in refused(capsys, tmp_path / "ours", tmp_path / "back")


def test_other_families(tmp_path, capsys):
    model = tiny_model("abc_memory", "mlm")
    with pytest.raises(UserError, match="AbcForMaskedLM"):
        to_state(model)
    model.save_pretrained(tmp_path / "ours")
    assert "'abc_memory'" in refused(capsys, tmp_path / "ours", tmp_path / "back")


@pytest.mark.parametrize(
    ("pooling", "name", "word"),
    [
        ("cls", "pooling_classification_head", "'packed_max'"),
        ("packed_max", "attention_classification_head", "'packed_attention'"),
        ("packed_attention", "mine", "'cls'"),
        ("cls", "a.b", "dot"),
        ("cls", "a b", "blank"),
        ("cls", "", "dot"),
    ],
)
def test_names_of_heads_that_mean_something_else(pooling, name, word):
    with pytest.raises(UserError, match=word):
        to_state(random_model("sequence", classifier_pooling=pooling), name)


@pytest.mark.parametrize("kind", ["mlm", "base"])
def test_names_for_heads_that_there_are_not(kind):
    with pytest.raises(UserError, match="has no classification head that could be called mine"):
        to_state(random_model(kind), "mine")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 3}, "multi_label_classification"),
        ({"problem_type": "regression", "num_labels": 3}, "`num_labels` is 3"),
    ],
)
def test_purposes_that_the_authors_do_not_have(fields, word):
    with pytest.raises(UserError, match=word):
        to_state(random_model("sequence", **fields))


@pytest.mark.parametrize("label", ["", " a", "a\nb", "madeupword0000", "<s>", "<mask>", "other"])
def test_labels_that_a_dictionary_cannot_hold(label, tmp_path, capsys):
    model = random_model("sequence", id2label={0: "other", 1: label})
    model.save_pretrained(tmp_path / "ours")
    assert f"`id2label` names class 1 {label!r}" in refused(capsys, tmp_path / "ours", tmp_path / "back")


# ---- what cannot be read ----


def test_sources_that_are_no_model(tmp_path, capsys):
    target = tmp_path / "back"
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(capsys, tmp_path / "empty", target)
    assert "is a file" in refused(capsys, ROOT / "README.md", target)
    assert "There is no folder" in refused(capsys, tmp_path / "nowhere", target)
    assert "no model of that name can be had" in refused(capsys, "some/where", target)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "config.json" in refused(capsys, tmp_path / "broken", target)
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "roberta"}')
    assert "'roberta'" in refused(capsys, tmp_path / "broken", target)
    values = {"model_type": "luna", "architectures": ["LunaForMaskedLM"], "hidden_size": 7}
    (tmp_path / "broken" / "config.json").write_text(json.dumps(values))
    assert "`hidden_size`" in refused(capsys, tmp_path / "broken", target)
    values["architectures"] = None
    (tmp_path / "broken" / "config.json").write_text(json.dumps(values | {"hidden_size": 48}))
    assert "LunaForMaskedLM" in refused(capsys, tmp_path / "broken", target)


def test_weights_that_are_damaged_or_do_not_fit(tmp_path, capsys):
    """Nothing is made up for what is not there."""
    folder, target = tmp_path / "ours", tmp_path / "back"
    random_model().save_pretrained(folder)
    path = folder / "model.safetensors"
    whole, weights = path.read_bytes(), load_file(path)

    def refused_with(changed):
        save_file(changed, path, metadata={"format": "pt"})
        return refused(capsys, folder, target)

    assert "lacks lm_head.bias" in refused_with({n: t for n, t in weights.items() if n != "lm_head.bias"})
    assert "has besides odd" in refused_with({**weights, "odd": torch.zeros(2)})
    assert "another shape lm_head.bias" in refused_with({**weights, "lm_head.bias": torch.zeros(7)})
    assert "several types" in refused_with({**weights, "lm_head.bias": weights["lm_head.bias"].half()})
    path.write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refused(capsys, folder, target)
    path.unlink()
    assert "cannot be loaded" in refused(capsys, folder, target)
    assert not target.exists()


def test_tokenizers_that_do_not_fit(tmp_path, capsys):
    folder, target = tmp_path / "ours", tmp_path / "back"
    random_model(vocab_size=294).save_pretrained(folder)
    bpe = read_bpe(str(small_gpt2_folder(tmp_path / "bpe")))
    symbols = read_dictionary(GENUINE / "tied" / "dict.txt")
    build_tokenizer([*symbols[:-2], symbols[-1]], bpe, 64).save_pretrained(folder)
    assert "293 tokens, and `vocab_size` is 294" in refused(capsys, folder, target)
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(capsys, folder, target)
    # The right number of tokens, but pieces with no place in fairseq's dictionary.
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["unheard of"])
    for file in folder.glob("tokenizer*"):
        file.unlink()
    random_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert "unheard of" in refused(capsys, folder, target)
    assert not target.exists() and not list(tmp_path.glob(".back*"))
