"""Converting the authors' checkpoints: every kind of file, argument and head gives the authors' numbers."""

import json
import re
import shutil

import fairseq_luna
import pytest
import torch
from fairseq_format import card, config, names, reference
from fairseq_format.checkpoint import NORM, open_original
from huggingface_hub import ModelCard
from official_luna import CHECKPOINTS, MLM, POOLINGS, Fixture, attention_weights
from reference.gpt2_bpe import FairseqEncoder, Gpt2Bpe
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_fairseq import (
    genuine_folder,
    random_weights,
    tiny_arguments,
    write_archive,
    write_fairseq,
    write_fixture,
    write_tiny,
)
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from luna_hf import LunaConfig, LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification, LunaModel

GENUINE = {"tied": torch.float32, "untied": torch.float16}
HEAD = "sentence_classification_head"


def convert(source, target, *words):
    """Run the converter, which also verifies every layer; it must succeed."""
    assert fairseq_luna.main([str(source), str(target), *map(str, words)]) == 0
    return target


def near(ours, theirs, tolerance=1e-5):
    """Equal within the tolerance, relative to numbers above 1."""
    difference = (ours.double() - theirs.double()).abs().max()
    return ours.shape == theirs.shape and difference <= tolerance * max(1.0, theirs.abs().max().item())


def stored_types(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {str(file.get_tensor(name).dtype).removeprefix("torch.") for name in file.keys()}  # noqa: SIM118


def test_names_are_one_to_one():
    for table in (names.ENCODER, names.MASKED_LM, names.CLASSIFIER):
        named = [ours for ours in table.values() if ours is not None]
        assert len(set(named)) == len(named)
    assert names.look_up("layers.11.self_attn.c_proj.bias", names.ENCODER) == (
        "encoder.layer.11.attention.self.key_value.bias"
    )
    for unknown in (lambda: names.look_up("layers.0.q.weight", names.ENCODER), lambda: attention_weights({"a.b": 0})):
        with pytest.raises(KeyError):
            unknown()


# ---- files of the authors' code ----


@pytest.fixture(scope="module", params=GENUINE)
def genuine(request, tmp_path_factory):
    """A checkpoint that the authors' code wrote, in an archive: its name, the archive and the converted folder."""
    folder = tmp_path_factory.mktemp("genuine")
    source = write_archive(genuine_folder(folder / f"luna.base.{request.param}", request.param))
    return request.param, source, convert(source, folder / "out")


def test_every_state_equals_the_authors(genuine):
    name, _, folder = genuine
    numbers = load_file(CHECKPOINTS / name / "expected.safetensors")
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model) is LunaForMaskedLM and not model.training
    for case in ("case0", "case1", "case2"):
        with torch.no_grad():
            tokens = numbers[f"{case}.input.tokens"]
            outputs = model(tokens, output_hidden_states=True, output_packed_hidden_states=True)
        for i in range(3):
            theirs = numbers[f"{case}.output.hidden.{i}.px"]
            assert near(outputs.hidden_states[i], numbers[f"{case}.output.hidden.{i}.x"])
            assert near(outputs.packed_hidden_states[i][:, : theirs.shape[1]], theirs)
        assert near(outputs.logits, numbers[f"{case}.output.logits"])


def test_the_stored_type_is_kept(genuine):
    name, _, folder = genuine
    assert stored_types(folder) == {str(GENUINE[name]).removeprefix("torch.")}
    assert AutoModel.from_pretrained(folder).dtype == GENUINE[name]
    assert ("dtype=torch.float32" in (folder / "README.md").read_text()) == (name == "untied")


def test_the_tokenizer_has_fairseq_s_ids(genuine):
    name, source, folder = genuine
    expected = json.loads((CHECKPOINTS / name / "config.json").read_text())["token_to_id"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(expected) and tokenizer.model_max_length == 40
    bpe = json.loads((source.with_suffix("") / "vocab.json").read_text())
    symbols = {token: str(index) for token, index in bpe.items() if str(index) in expected}
    written = json.loads((folder / "vocab.json").read_text())
    assert {symbols.get(token, token): index for token, index in written.items()} == expected
    assert (folder / "merges.txt").read_text() == (source.with_suffix("") / "merges.txt").read_text()
    encoder = FairseqEncoder(Gpt2Bpe(source.with_suffix("")), list(expected)[4:])
    for text in ("Hello world", " the and of\tto in a", "naïve café 12", "", "it's a test of the thing"):
        assert tokenizer(text)["input_ids"] == encoder.encode(text)


def test_the_folder_is_complete(genuine):
    name, _, folder = genuine
    values = json.loads((folder / "config.json").read_text())
    assert values["auto_map"]["AutoModelForMaskedLM"] == "modeling_luna.LunaForMaskedLM"
    files = {path.name for path in folder.iterdir()}
    assert {"modeling_luna.py", "configuration_luna.py", "tokenizer.json", "tokenizer_config.json"} <= files
    assert len({path.stat().st_mode & 0o777 for path in folder.iterdir()}) == 1  # others may read the weights
    assert not list(folder.parent.glob(".out.*"))
    made = ModelCard.load(folder / "README.md")
    assert made.data.pipeline_tag == "fill-mask" and "luna" in made.data.tags
    assert f"python conversion/fairseq_luna.py luna.base.{name}.zip out" in made.text
    assert str(folder.parent) not in made.text and not re.search(r"\$\{?\w", made.text)
    assert all(" | ".join(scores) in made.text for scores in card.PUBLISHED.values())


# ---- layouts, heads and arguments ----

# The four fixtures in every kind of file.
LAYOUTS = {
    "decoder": ("tied_dynamic", {"prefix": "decoder.sentence_encoder."}),
    "no-prefix": ("tied_fixed", {"prefix": "sentence_encoder.", "file": "checkpoint_last.pt"}),
    "bare-names": ("untied_dynamic", {"prefix": "", "file": "checkpoint_best.pt"}),
    "arguments-as-dict": ("untied_fixed", {"form": "dict", "file": "checkpoint12.pt"}),
    "newer-arguments": ("tied_dynamic", {"form": "cfg"}),
    "before-zip": ("untied_dynamic", {"legacy": True}),
    "half": ("untied_fixed", {"dtype": torch.float16, "form": "cfg", "prefix": "decoder.sentence_encoder."}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_authors_logits(layout, tmp_path):
    name, options = LAYOUTS[layout]
    folder = convert(write_fixture(tmp_path / "source", name, heads=(), **options), tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.tie_kv == name.startswith("tied") and model.config.dynamic_projection == ("dynamic" in name)
    fixture, tolerance = Fixture("luna_mlm", name), 2e-2 if "dtype" in options else 1e-5  # float16 rounds the weights
    for case in fixture.cases:
        with torch.no_grad():
            logits = model(fixture.input(case, "tokens").long()).logits
        assert near(logits, fixture.output(case, "logits"), tolerance)


@pytest.mark.parametrize(("name", "head"), zip(MLM, [*POOLINGS, "attention_classification_head"], strict=True))
def test_classification_heads_give_the_authors_outputs(name, head, tmp_path):
    source = write_fixture(tmp_path / "source", name, task="sentence_prediction")
    model = AutoModelForSequenceClassification.from_pretrained(convert(source, tmp_path / "out", "--head", head))
    fixture = Fixture("luna_mlm", name)
    assert type(model) is LunaForSequenceClassification and model.config.classifier_pooling == POOLINGS[head]
    assert model.config.classifier_dropout == 0.0
    for case in fixture.cases:
        with torch.no_grad():
            logits = model(fixture.input(case, "tokens").long()).logits
        assert near(logits, fixture.output(case, f"head.{head}"))


def test_of_several_heads_one_is_chosen(tmp_path, capsys):
    source = write_fixture(tmp_path / "source", "tied_dynamic")
    for words in ([], ["--head", "nothing"]):
        assert fairseq_luna.main([str(source), str(tmp_path / "out"), *words]) == 2
        message = capsys.readouterr().err
        assert all(name in message for name in (*POOLINGS, *words[1:])) and not (tmp_path / "out").exists()
    assert type(AutoModel.from_pretrained(convert(source, tmp_path / "out", "--head", "lm_head"))) is LunaModel
    unused = [name for name in Fixture("luna_mlm", "tied_dynamic").weights() if name.startswith("classification")]
    assert f"{len(unused)} unused ({', '.join(unused)})" in capsys.readouterr().out


@pytest.mark.parametrize("labels", [("b", "a", "c"), (), ("too", "few")])
def test_labels_keep_the_order_of_the_outputs(labels, tmp_path, capsys):
    source = write_tiny(tmp_path / "source", heads={HEAD: 3}, labels=labels)
    folder = convert(source, tmp_path / "out")
    found = labels if len(labels) == 3 else ("LABEL_0", "LABEL_1", "LABEL_2")
    assert LunaConfig.from_pretrained(folder).id2label == dict(enumerate(found))
    assert pipeline("text-classification", model=str(folder))("the end")[0]["label"] in found
    printed = capsys.readouterr().out
    assert "6 unused (encoder.lm_head." in printed and ("Classes: " in printed) == (len(labels) == 2)
    given = tmp_path / "given.txt"
    given.write_text("x 1\ny 1\nz 1\n")
    folder = convert(source, tmp_path / "other", "--labels", given)
    assert LunaConfig.from_pretrained(folder).label2id == {"x": 0, "y": 1, "z": 2}


@pytest.mark.parametrize(
    ("task", "layout"), [("sentence_ranking", "the passage"), ("commonsense_qa", "</s>A: an answer"), (None, "passage")]
)
def test_a_ranking_head_becomes_multiple_choice(task, layout, tmp_path):
    source = write_tiny(tmp_path / "source", heads={"pooling_classification_head": 1}, changes={"task": task})
    folder = convert(source, tmp_path / "out", *([] if task else ["--head-type", "ranking"]))
    model = AutoModelForMultipleChoice.from_pretrained(folder)
    assert type(model) is LunaForMultipleChoice and layout in (folder / "README.md").read_text()
    choices = torch.randint(4, 50, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), open_original(source) as original:
        head = "pooling_classification_head"
        rows = [reference.run(original, row, head)[f"head.{head}"] for row in choices.flatten(0, 1)]
        assert near(model(choices).logits, torch.cat(rows).view(2, 3))


@pytest.mark.parametrize("told", [False, True])
def test_a_regression_head_has_one_output(told, tmp_path):
    changes = {} if told else {"task": "sentence_prediction", "regression_target": True}
    source = write_tiny(tmp_path / "source", heads={HEAD: 1}, changes=changes)
    folder = convert(source, tmp_path / "out", *(["--head-type", "regression"] if told else []))
    values = LunaConfig.from_pretrained(folder)
    assert (values.problem_type, values.num_labels) == ("regression", 1)


@pytest.mark.parametrize("stored", ["twice", "once", "declared-untied", "different", "different-but-declared-tied"])
def test_the_output_layer_is_tied_or_not(stored, tmp_path, capsys):
    arguments = tiny_arguments(untie_weights_luna=stored.startswith("different"))
    weights = random_weights(arguments)
    if stored == "once":
        del weights["encoder.lm_head.weight"]
    arguments["untie_weights_luna"] = stored in ("different", "declared-untied")
    folder = convert(write_fairseq(tmp_path / "source", weights, arguments), tmp_path / "out")
    model, tied = LunaForMaskedLM.from_pretrained(folder), stored in ("twice", "once")
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.decoder.weight is model.luna.embeddings.word_embeddings.weight) == tied
    expected = weights.get("encoder.lm_head.weight", weights["encoder.sentence_encoder.embed_tokens.weight"])
    assert torch.equal(model.lm_head.decoder.weight, expected)
    assert ("Output layer: " in capsys.readouterr().out) == (stored == "different-but-declared-tied")


def test_an_encoder_without_heads_becomes_the_base_model(tmp_path):
    arguments = tiny_arguments()
    weights = {n: t for n, t in random_weights(arguments).items() if "lm_head" not in n}
    source = write_fairseq(tmp_path / "source", weights, arguments, prefix="")
    folder = convert(source, tmp_path / "out")
    assert LunaConfig.from_pretrained(folder).architectures == ["LunaModel"]


@pytest.mark.parametrize("activation", ["relu", "gelu_accurate", "gelu_fast", "tanh", "linear"])
def test_activations(activation, tmp_path):
    """The converter compares its result with the formula of each."""
    changes = {"activation_fn": activation, "pooler_activation_fn": "relu"}
    source = write_tiny(tmp_path / "source", heads={"cls_classification_head": 2}, changes=changes)
    values = LunaConfig.from_pretrained(convert(source, tmp_path / "out"))
    assert (values.hidden_act, values.classifier_activation) == (config.ACTIVATIONS[activation], "relu")


def test_all_arguments_reach_the_config(tmp_path):
    dropouts = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4, "pooler_dropout": 0.05}
    changes = {**dropouts, "fix_projection_length": True, "untie_luna_kv": True, "arch": "luna_base_untied_512"}
    values = LunaConfig.from_pretrained(convert(write_tiny(tmp_path / "s", changes=changes), tmp_path / "out"))
    expected = {
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.3,
        "activation_dropout": 0.4,
        "classifier_dropout": 0.05,
        "dynamic_projection": False,
        "tie_kv": False,
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_length": 4,
        "max_position_embeddings": 20,
    }
    assert {name: getattr(values, name) for name in expected} == expected


@pytest.mark.parametrize("form", ["none", "bare"])
def test_missing_arguments_have_the_authors_defaults(form, tmp_path, capsys):
    source = write_tiny(tmp_path / "source", form=form)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "12 attention heads (the authors' default" in capsys.readouterr().err
    convert(source, tmp_path / "out", "--override", "encoder_attention_heads=2", "--override", "activation_fn=relu")
    assert "pooler_activation_fn tanh, fix_projection_length False, dropout 0.1, atten" in capsys.readouterr().out
    values = LunaConfig.from_pretrained(tmp_path / "out")
    assert values.num_attention_heads == 2 and values.hidden_act == "relu"


def test_a_large_model_has_sixteen_heads_by_default(tmp_path):
    arguments = tiny_arguments(arch="luna_large_512", encoder_embed_dim=32)
    weights = random_weights(arguments)
    del arguments["encoder_attention_heads"]
    folder = convert(write_fairseq(tmp_path / "source", weights, arguments), tmp_path / "out")
    assert LunaConfig.from_pretrained(folder).num_attention_heads == 16


# ---- LayerNorm, types ----


def less_one(weights):
    return {name: tensor - 1 if NORM.search(name) else tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("given", [(), ("--layer-norm", "offset")])
def test_norms_stored_less_one(given, tmp_path, capsys):
    arguments = tiny_arguments()
    weights = random_weights(arguments, heads={"attention_classification_head": 2})
    plain = convert(write_fairseq(tmp_path / "plain", weights, arguments), tmp_path / "plain-out")
    source = write_fairseq(tmp_path / "offset", less_one(weights), arguments)
    offset = convert(source, tmp_path / "offset-out", *given)
    assert "which 1 was added" in capsys.readouterr().out
    for name, tensor in load_file(plain / "model.safetensors").items():
        torch.testing.assert_close(load_file(offset / "model.safetensors")[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_stored_less_one_in_half_precision(dtype, tmp_path, capsys):
    """`w` has more digits than `1 + w` in that type: the result is rounded, unless float32 is requested."""
    arguments = tiny_arguments()
    weights = {name: tensor.to(dtype) for name, tensor in less_one(random_weights(arguments)).items()}
    source = write_fairseq(tmp_path / "source", weights, arguments)
    assert stored_types(convert(source, tmp_path / "half")) == {str(dtype).removeprefix("torch.")}
    assert re.search(r": [1-9]\d* of \d+ tensors were rounded", capsys.readouterr().out)
    model = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "wide", "--dtype", "float32"))
    stored = weights["encoder.sentence_encoder.proj_emb_layer_norm.weight"]
    assert torch.equal(model.luna.packed_embeddings.LayerNorm.weight, stored.float() + 1)


def test_ambiguous_norms_need_an_option(tmp_path, capsys):
    arguments = tiny_arguments()
    halved = {n: t / 2 if NORM.search(n) else t for n, t in random_weights(arguments).items()}
    source = write_fairseq(tmp_path / "source", halved, arguments)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "--layer-norm" in capsys.readouterr().err
    model = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "out", "--layer-norm", "plain"))
    assert torch.equal(model.lm_head.layer_norm.weight, halved["encoder.lm_head.layer_norm.weight"])


@pytest.mark.parametrize(("name", "dtype", "rounded"), [("untied", "float32", False), ("tied", "bfloat16", True)])
def test_another_type_on_request(name, dtype, rounded, tmp_path, capsys):
    folder = convert(genuine_folder(tmp_path / "source", name), tmp_path / "out", "--dtype", dtype)
    assert stored_types(folder) == {dtype}
    assert bool(re.search(r": [1-9]\d* of \d+ tensors were rounded", capsys.readouterr().out)) == rounded
    assert "Equal to the original" in (folder / "README.md").read_text()


# ---- where files are ----


def test_the_model_file_among_several(tmp_path, capsys):
    source = write_tiny(tmp_path / "source", file="checkpoint1.pt", seed=1)
    write_tiny(source, file="checkpoint2.pt", seed=2)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "checkpoint1.pt, checkpoint2.pt" in capsys.readouterr().err
    folders = [convert(source, tmp_path / "a", "--checkpoint", "checkpoint1.pt")]
    (source / "checkpoint2.pt").rename(source / "two.pth")  # by its content, whatever the name
    folders.append(convert(source / "two.pth", tmp_path / "b"))
    write_tiny(source, file="checkpoint_best.pt", seed=3)
    folders.append(convert(source, tmp_path / "c"))
    for seed, folder in enumerate(folders, start=1):
        expected = random_weights(tiny_arguments(), seed=seed)["encoder.lm_head.bias"]
        assert torch.equal(load_file(folder / "model.safetensors")["lm_head.bias"], expected)


@pytest.mark.parametrize("kind", ["tar", "gztar"])
def test_other_archives(kind, tmp_path):
    source = write_archive(write_tiny(tmp_path / "luna.tiny"), kind)
    assert type(AutoModelForMaskedLM.from_pretrained(convert(source, tmp_path / "out"))) is LunaForMaskedLM


@pytest.mark.parametrize("place", ["input0", "file", "folder"])
def test_dictionary_and_bpe_in_other_places(place, tmp_path):
    source, elsewhere = write_tiny(tmp_path / "source"), tmp_path / "elsewhere"
    target = {
        "input0": source / "input0/dict.txt",
        "file": elsewhere / "symbols.txt",
        "folder": elsewhere / "input0/dict.txt",
    }[place]
    target.parent.mkdir(parents=True)
    (source / "dict.txt").rename(target)
    words = {"input0": (), "file": ("--dict", target), "folder": ("--dict", elsewhere)}[place]
    if place == "file":
        for old, new in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
            (source / old).rename(elsewhere / new)
        words += ("--gpt2-bpe", elsewhere)
    folder = convert(source, tmp_path / "out", *words)
    assert len(AutoTokenizer.from_pretrained(folder)) == 60
    assert place != "file" or "--dict symbols.txt --gpt2-bpe elsewhere" in (folder / "README.md").read_text()


@pytest.mark.parametrize("place", ["folder", "file", "elsewhere"])
def test_a_tokenizer_alone(place, tmp_path, capsys):
    source = genuine_folder(tmp_path / "source", "tied")
    (source / "model.pt").unlink()
    words = ["--tokenizer-only", "--gpt2-bpe", source]
    if place == "elsewhere":
        shutil.move(source / "dict.txt", tmp_path / "dict.txt")
        words += ["--dict", tmp_path]
    for more in ([], ["--overwrite"]):
        given = source / "dict.txt" if place == "file" else source
        folder = convert(given, tmp_path / "out", *words, *more)
    assert "Tokenizer: 294 tokens" in capsys.readouterr().out
    assert not (folder / "config.json").exists() and ModelCard.load(folder / "README.md").data.tags == ["fairseq"]
    assert len(AutoTokenizer.from_pretrained(folder)) == 294
