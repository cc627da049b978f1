"""The converter of the authors' checkpoints: every layout of file, arguments, names and heads gives their numbers."""

import json

import fairseq_card
import fairseq_config
import fairseq_luna
import fairseq_names
import fairseq_reference
import pytest
import torch
from fairseq_checkpoint import open_original
from helpers import run_python
from huggingface_hub import ModelCard
from official_luna import FIXTURES, Fixture, attention_weights
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

MLM = ["tied_dynamic", "tied_fixed", "untied_dynamic", "untied_fixed"]
HEADS = {
    "cls_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}
GENUINE = {"tied": torch.float32, "untied": torch.float16}


def convert(source, target, *words):
    """Run the converter; it must succeed, and with that its own check of every layer."""
    assert fairseq_luna.main([str(source), str(target), *map(str, words)]) == 0
    return target


def near(ours, theirs, tolerance=1e-5):
    """Equal to the tolerance, relative to the largest number where that is above 1."""
    difference = (ours.double() - theirs.double()).abs().max()
    return ours.shape == theirs.shape and difference <= tolerance * max(1.0, theirs.abs().max().item())


def stored_types(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {str(file.get_tensor(name).dtype).removeprefix("torch.") for name in file.keys()}  # noqa: SIM118


def test_the_names_are_one_to_one():
    for table in (fairseq_names.ENCODER, fairseq_names.LM_HEAD, fairseq_names.CLASSIFIER):
        named = [ours for ours in table.values() if ours is not None]
        assert len(set(named)) == len(named)
        assert fairseq_names.inverse(table) == {ours: theirs for theirs, ours in table.items() if ours is not None}
    assert fairseq_names.look_up("layers.11.self_attn.c_proj.bias", fairseq_names.ENCODER) == (
        "encoder.layer.11.attention.self.key_value.bias"
    )
    assert fairseq_names.look_up("projected_positions", fairseq_names.ENCODER) is None
    with pytest.raises(KeyError):
        fairseq_names.look_up("layers.0.self_attn.in_proj_weight", fairseq_names.ENCODER)
    with pytest.raises(KeyError):
        attention_weights({"in_proj.weight": torch.zeros(1)})


# ---- genuine files ----


@pytest.fixture(scope="module", params=GENUINE)
def genuine(request, tmp_path_factory):
    """A genuine file of the authors' code, from an archive: its name, the source and the converted folder."""
    folder = tmp_path_factory.mktemp("genuine")
    source = write_archive(genuine_folder(folder / f"luna.base.{request.param}", request.param))
    return request.param, source, convert(source, folder / "out")


def test_every_state_of_the_genuine_files_is_equal(genuine):
    name, _, folder = genuine
    numbers = load_file(FIXTURES / "luna_fairseq_checkpoint" / name / "expected.safetensors")
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model) is LunaForMaskedLM and not model.training
    for case in ("case0", "case1", "case2"):
        tokens = numbers[f"{case}.input.tokens"]
        with torch.no_grad():
            outputs = model(tokens, output_hidden_states=True, output_packed_hidden_states=True)
        for i in range(3):
            theirs = numbers[f"{case}.output.hidden.{i}.px"]
            assert near(outputs.hidden_states[i], numbers[f"{case}.output.hidden.{i}.x"])
            assert near(outputs.packed_hidden_states[i][:, : theirs.shape[1]], theirs)
        assert near(outputs.logits, numbers[f"{case}.output.logits"])


def test_the_stored_type_stays(genuine):
    name, _, folder = genuine
    dtype = str(GENUINE[name]).removeprefix("torch.")
    assert stored_types(folder) == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    assert AutoModel.from_pretrained(folder).dtype == GENUINE[name]


def test_the_tokenizer_has_the_expected_ids(genuine):
    name, source, folder = genuine
    expected = json.loads((FIXTURES / "luna_fairseq_checkpoint" / name / "config.json").read_text())["token_to_id"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(expected) and tokenizer.model_max_length == 40
    bpe = json.loads((source.with_suffix("") / "vocab.json").read_text())
    symbols = {token: str(index) for token, index in bpe.items() if str(index) in expected}
    written = json.loads((folder / "vocab.json").read_text())
    assert {symbols.get(token, token): index for token, index in written.items()} == expected
    assert (folder / "merges.txt").read_text() == (source.with_suffix("") / "merges.txt").read_text()
    reference = FairseqEncoder(Gpt2Bpe(source.with_suffix("")), list(expected)[4:])
    for text in ("Hello world", " the and of\tto in a", "naïve café 12", "", "it's a test of the thing"):
        assert tokenizer(text)["input_ids"] == reference.encode(text)
    assert [tokenizer.convert_tokens_to_ids(f"madeupword000{i}") for i in range(3)] == [290, 291, 292]
    specials = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert specials == (0, 1, 2, 3) and tokenizer.mask_token_id == 293


def test_fill_mask_answers_as_the_original(genuine):
    _, source, folder = genuine
    text = " the <mask> of a"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    with open_original(source) as original:
        logits = fairseq_reference.run(original, torch.tensor(ids))["logits"][ids.index(tokenizer.mask_token_id)]
    scores, tokens = logits.softmax(-1).topk(5)
    answers = pipeline("fill-mask", model=str(folder), dtype=torch.float32)(text, top_k=5)
    assert [answer["token"] for answer in answers] == tokens.tolist()
    assert near(torch.tensor([answer["score"] for answer in answers]), scores)


def test_the_folder_needs_no_package(genuine, tmp_path):
    """Model and tokenizer from the code in the folder, where luna_hf cannot be imported."""
    _, _, folder = genuine
    code = """
import sys
from transformers import AutoTokenizer, pipeline
fill = pipeline("fill-mask", model=sys.argv[1], trust_remote_code=True, dtype="float32")
print(*(answer["token"] for answer in fill(" the <mask> of a")))
print(*AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("Hello world, the end").input_ids)
"""
    printed = run_python(code, folder, env={"HF_HOME": str(tmp_path)}, blocked=True).splitlines()
    here = pipeline("fill-mask", model=str(folder), dtype=torch.float32)(" the <mask> of a")
    assert [int(token) for token in printed[-2].split()] == [answer["token"] for answer in here]
    assert [int(token) for token in printed[-1].split()] == AutoTokenizer.from_pretrained(folder)(
        "Hello world, the end"
    )["input_ids"]


def test_the_folder_is_complete(genuine):
    name, _, folder = genuine
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_luna.LunaForMaskedLM"
    for file in ("modeling_luna.py", "configuration_luna.py", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (folder / file).is_file()
    assert not list(folder.parent.glob(".out.*"))
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "fill-mask" and "luna" in card.data.tags
    text = card.text
    assert "github.com/XuezheMax/fairseq-apollo" in text and "arxiv.org/abs/2106.01540" in text
    assert "MIT" in text and "as published" in text and "not measured here" in text
    assert f"python conversion/fairseq_luna.py luna.base.{name}.zip out" in text
    assert str(folder.parent) not in text
    for scores in fairseq_card.PUBLISHED.values():
        assert " | ".join(scores) in text


# ---- layouts ----

LAYOUTS = {
    "plain": {},
    "decoder": {"prefix": "decoder.sentence_encoder."},
    "no-prefix": {"prefix": "sentence_encoder."},
    "bare-names": {"prefix": ""},
    "arguments-as-dict": {"form": "dict"},
    "newer-arguments": {"form": "cfg"},
    "before-zip": {"legacy": True},
    "best": {"file": "checkpoint_best.pt"},
    "last": {"file": "checkpoint_last.pt"},
    "any-name": {"file": "checkpoint12.pt"},
    "half": {"dtype": torch.float16},
    "newer-half-decoder-before-zip": {
        "form": "cfg",
        "dtype": torch.float16,
        "prefix": "decoder.sentence_encoder.",
        "legacy": True,
    },
}


@pytest.mark.parametrize("name", MLM)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_authors_logits(name, layout, tmp_path):
    source = write_fixture(tmp_path / "source", name, heads=(), **LAYOUTS[layout])
    model = AutoModelForMaskedLM.from_pretrained(convert(source, tmp_path / "out"), dtype=torch.float32)
    assert model.config.tie_kv == name.startswith("tied") and model.config.dynamic_projection == ("dynamic" in name)
    fixture = Fixture("luna_mlm", name)
    tolerance = 2e-2 if "dtype" in LAYOUTS[layout] else 1e-5  # half holds the fixture's weights roughly
    for case in fixture.cases:
        with torch.no_grad():
            logits = model(fixture.input(case, "tokens").long()).logits
        assert near(logits, fixture.output(case, "logits"), tolerance)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MLM)
def test_classification_heads_give_the_authors_outputs(name, head, tmp_path):
    source = write_fixture(tmp_path / "source", name, changes={"task": "sentence_prediction"})
    folder = convert(source, tmp_path / "out", "--head", head)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    fixture = Fixture("luna_mlm", name)
    options = fixture.config["heads"][head]
    assert type(model) is LunaForSequenceClassification
    assert model.config.classifier_pooling == HEADS[head] and model.config.num_labels == options["num_classes"]
    assert model.config.classifier_dropout == 0.0
    for case in fixture.cases:
        with torch.no_grad():
            logits = model(fixture.input(case, "tokens").long()).logits
        assert near(logits, fixture.output(case, f"head.{head}"))


def test_several_heads_are_chosen_by_name(tmp_path, capsys):
    source = write_fixture(tmp_path / "source", "tied_dynamic")
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "several heads" in message and "--head NAME" in message
    for name, told in zip(HEADS, ("first token", "maximum over P", "attention over P"), strict=True):
        assert f"{name} (" in message and told in message
    assert not (tmp_path / "out").exists()
    assert fairseq_luna.main([str(source), str(tmp_path / "out"), "--head", "nothing"]) == 2
    message = capsys.readouterr().err
    assert "has no head nothing. It has " in message and all(name in message for name in (*HEADS, "lm_head"))
    model = AutoModelForMaskedLM.from_pretrained(convert(source, tmp_path / "out", "--head", "lm_head"))
    assert type(model) is LunaForMaskedLM
    printed = capsys.readouterr().out
    unused = [name for name in Fixture("luna_mlm", "tied_dynamic").weights() if name.startswith("classification")]
    assert f"{len(unused)} unused ({', '.join(unused)})" in printed


def test_the_only_head_is_taken_and_what_is_unused_is_listed(tmp_path, capsys):
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 3}, labels=("b", "a", "c"))
    folder = convert(source, tmp_path / "out")
    config = LunaConfig.from_pretrained(folder)
    # The outputs stand in the order of the label dictionary, which goes by frequency and not by name.
    assert config.id2label == {0: "b", 1: "a", 2: "c"} and config.label2id == {"b": 0, "a": 1, "c": 2}
    printed = capsys.readouterr().out
    assert "LunaForSequenceClassification" in printed and "Head: sentence_classification_head (3 outputs" in printed
    unused = ("weight", "bias", "dense.weight", "dense.bias", "layer_norm.weight", "layer_norm.bias")
    assert all(f"encoder.lm_head.{name}" in printed for name in unused) and "6 unused" in printed
    answer = pipeline("text-classification", model=str(folder))("the end")
    assert answer[0]["label"] in ("a", "b", "c")
    card = (folder / "README.md").read_text()
    assert "not of this finetuned checkpoint" in card or "not to this one" in card
    assert "have no names" not in card


def test_labels_of_another_head_are_left_out(tmp_path, capsys):
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 2}, labels=("a", "b", "c"))
    assert LunaConfig.from_pretrained(convert(source, tmp_path / "out")).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert "label/dict.txt does not have as many" in capsys.readouterr().out


def test_the_card_has_the_layout_of_the_task(tmp_path):
    heads = {"sentence_classification_head": 1}
    for task, layout in (("commonsense_qa", "Q: the question</s>A: an answer"), ("sentence_ranking", "the passage")):
        source = write_tiny(tmp_path / task, heads=heads, changes={"task": task})
        card = (convert(source, tmp_path / f"{task}-out") / "README.md").read_text()
        assert layout in card and "pipeline_tag: multiple-choice" in card


def test_labels_without_names_are_said(tmp_path):
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 2})
    folder = convert(source, tmp_path / "out")
    assert LunaConfig.from_pretrained(folder).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert "The classes have no names" in (folder / "README.md").read_text()


@pytest.mark.parametrize("task", ["sentence_ranking", "told"])
@pytest.mark.parametrize("head", ["sentence_classification_head", "pooling_classification_head"])
def test_a_ranking_head_becomes_multiple_choice(task, head, tmp_path):
    changes = {"task": "masked_lm" if task == "told" else task}
    source = write_tiny(tmp_path / "source", heads={head: 1}, changes=changes)
    told = ("--head-type", "ranking") if task == "told" else ()
    model = AutoModelForMultipleChoice.from_pretrained(convert(source, tmp_path / "out", *told))
    assert type(model) is LunaForMultipleChoice
    choices = torch.randint(4, 50, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(choices).logits
    with open_original(source) as original:
        rows = [fairseq_reference.run(original, row, head)[f"head.{head}"] for row in choices.flatten(0, 1)]
    assert near(logits, torch.cat(rows).view(2, 3))


@pytest.mark.parametrize("told", [False, True])
def test_a_regression_head_keeps_its_one_output(told, tmp_path):
    changes = {} if told else {"task": "sentence_prediction", "regression_target": True}
    source = write_tiny(tmp_path / "source", heads={"sentence_classification_head": 1}, changes=changes)
    words = ("--head-type", "regression") if told else ()
    model = AutoModelForSequenceClassification.from_pretrained(convert(source, tmp_path / "out", *words))
    assert model.config.problem_type == "regression" and model.config.num_labels == 1


@pytest.mark.parametrize("stored", ["twice", "once", "said-apart", "apart", "apart-and-said-tied"])
def test_the_output_layer_is_tied_or_not(stored, tmp_path, capsys):
    apart = stored in ("apart", "apart-and-said-tied")
    arguments = tiny_arguments(untie_weights_luna=apart)
    weights = random_weights(arguments)
    if stored == "once":
        del weights["encoder.lm_head.weight"]
    arguments["untie_weights_luna"] = stored in ("apart", "said-apart")
    folder = convert(write_fairseq(tmp_path / "source", weights, arguments), tmp_path / "out")
    model = LunaForMaskedLM.from_pretrained(folder)
    tied = stored in ("twice", "once")
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.decoder.weight is model.luna.embeddings.word_embeddings.weight) == tied
    expected = weights.get("encoder.lm_head.weight", weights["encoder.sentence_encoder.embed_tokens.weight"])
    assert torch.equal(model.lm_head.decoder.weight, expected)
    assert ("but it differs" in capsys.readouterr().out) == (stored == "apart-and-said-tied")


def test_an_encoder_without_heads_becomes_the_base_model(tmp_path):
    arguments = tiny_arguments()
    weights = {n: t for n, t in random_weights(arguments).items() if "lm_head" not in n}
    source = write_fairseq(tmp_path / "source", weights, arguments, prefix="")
    assert type(AutoModel.from_pretrained(convert(source, tmp_path / "out"))) is LunaModel


@pytest.mark.parametrize("activation", ["relu", "gelu_accurate", "gelu_fast", "gelu", "tanh", "linear"])
def test_activations(activation, tmp_path):
    """The converter checks its result against the formula of each."""
    changes = {"activation_fn": activation, "pooler_activation_fn": "relu"}
    source = write_tiny(tmp_path / "source", heads={"cls_classification_head": 2}, changes=changes)
    config = LunaConfig.from_pretrained(convert(source, tmp_path / "out"))
    assert config.hidden_act == fairseq_config.ACTIVATIONS[activation] and config.classifier_activation == "relu"


def test_all_arguments_reach_the_config(tmp_path):
    changes = {
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "activation_dropout": 0.4,
        "pooler_dropout": 0.05,
        "fix_projection_length": True,
        "untie_luna_kv": True,
        "arch": "luna_base_untied_512",
    }
    config = LunaConfig.from_pretrained(convert(write_tiny(tmp_path / "s", changes=changes), tmp_path / "out"))
    found = {
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
    assert {name: getattr(config, name) for name in found} == found
