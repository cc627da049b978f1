"""Converting the authors' checkpoints: every kind of file, argument and head gives the authors' numbers."""

import json
import re
import time

import fairseq_luna
import pytest
import torch
from fairseq_format import arguments, names
from gpt2_files import gpt2_folder, roberta_dictionary
from helpers import ROOT
from huggingface_hub import ModelCard
from official_luna import CHECKPOINTS, MLM, POOLINGS, Fixture
from reference.gpt2_bpe import FairseqEncoder, Gpt2Bpe
from safetensors import safe_open
from safetensors.torch import load_file
from test_parity_luna_seq2seq import CASES, NAMES, PAD
from tiny_fairseq import (
    ENCODER,
    HEAD,
    SIZES,
    genuine_folder,
    make_state,
    tiny_state,
    write_archive,
    write_fairseq,
    write_fixture,
    write_tiny,
)
from tiny_translation import write_checkpoint
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaTokenizer,
)

from luna_hf import LunaConfig, LunaForConditionalGeneration, LunaForMaskedLM

GENUINE = {"tied": torch.float32, "untied": torch.float16}


def convert(source, target, *words):
    """Run the converter; it must succeed."""
    assert fairseq_luna.main([str(source), str(target), *map(str, words)]) == 0
    return target


def run(model, *inputs, **options):
    with torch.no_grad():
        return model(*inputs, **options)


def near(ours, theirs, tolerance=1e-5):
    """Equal within the tolerance, relative to numbers above 1."""
    difference = (ours.double() - theirs.double()).abs().max()
    return ours.shape == theirs.shape and difference <= tolerance * max(1.0, theirs.abs().max().item())


def stored_types(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {str(file.get_tensor(name).dtype).removeprefix("torch.") for name in file.keys()}  # noqa: SIM118


def test_the_tables_are_one_to_one():
    named = {theirs: ours for theirs, ours in names.NAMES.items() if ours is not None}
    assert len(set(named.values())) == len(named)
    norms = [theirs for theirs, ours in named.items() if ours.endswith("weight") and "norm" in ours.lower()]
    assert norms == list(filter(names.is_norm, named))
    for row in arguments.TABLE:
        for theirs in row.values or ():
            assert row.to_ours(row.to_theirs(row.to_ours(theirs))) == row.to_ours(theirs)
    assert arguments.complete("masked_lm", {"arch": "luna_large_512"}).encoder_attention_heads == 16


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
        tokens = numbers[f"{case}.input.tokens"]
        outputs = run(model, tokens, unpad_inputs=False, output_hidden_states=True, output_packed_hidden_states=True)
        for i in range(3):
            theirs = numbers[f"{case}.output.hidden.{i}.px"]
            assert near(outputs.hidden_states[i], numbers[f"{case}.output.hidden.{i}.x"])
            assert near(outputs.packed_hidden_states[i][:, : theirs.shape[1]], theirs)
        assert near(outputs.logits, numbers[f"{case}.output.logits"])


def test_the_folder_is_complete(genuine):
    name, source, folder = genuine
    assert stored_types(folder) == {str(GENUINE[name]).removeprefix("torch.")}
    assert json.loads((folder / "config.json").read_text())["auto_map"]
    files = {path.name for path in folder.iterdir()}
    assert {"modeling_luna.py", "configuration_luna.py", "tokenizer.json", "tokenizer_config.json"} <= files
    assert len({path.stat().st_mode & 0o777 for path in folder.iterdir()}) == 1  # others may read the weights
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "fill-mask"
    assert f"python conversion/fairseq_luna.py luna.base.{name}.zip out" in card.text
    assert str(folder.parent) not in card.text and not re.search(r"\$\{?\w", card.text)
    assert ("dtype=torch.float32" in card.text) == (name == "untied")
    expected = json.loads((CHECKPOINTS / name / "config.json").read_text())["token_to_id"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(expected) and tokenizer.model_max_length == 40
    encoder = FairseqEncoder(Gpt2Bpe(source.with_suffix("")), list(expected)[4:])
    for text in ("Hello world", " the and of\tto in a", "naïve café 12", ""):
        assert tokenizer(text)["input_ids"] == encoder.encode(text)


def test_the_output_in_the_documentation(tmp_path, capsys):
    page = (ROOT / "docs" / "authors-checkpoints.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(Read .*?)```", page, re.DOTALL)
    convert(CHECKPOINTS / "tied", tmp_path / "out", "--gpt2-bpe", gpt2_folder(tmp_path / "gpt2"))
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "dtype", "parameters"), [(True, torch.float32, 131_902_041), (False, torch.float16, 146_076_249)]
)
def test_an_archive_of_the_published_size(tied, dtype, parameters, tmp_path, capsys):
    folder = tmp_path / "luna.base"
    folder.mkdir()
    base = LunaConfig.preset("base", tie_kv=tied, vocab_size=50265)
    fields = {name: getattr(base, name) for name in (*SIZES, "tie_kv") if name != "classifier_dropout"}
    torch.save(make_state(*tiny_state(**fields), dtype=dtype), folder / "model.pt")
    roberta_dictionary(folder / "dict.txt")
    gpt2_folder(folder)
    archive = write_archive(folder)
    started = time.monotonic()
    convert(archive, tmp_path / "out")
    seconds = time.monotonic() - started
    assert f"{parameters:,} parameters" in capsys.readouterr().out
    assert seconds < 180, f"the conversion took {seconds:.0f} s, and the documentation says seconds"
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.dtype == dtype and model.num_parameters() == parameters
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(tokenizer) is RobertaTokenizer and tokenizer("Hello world")["input_ids"] == [0, 31414, 232, 2]


# ---- layouts and heads ----

# The four fixtures in every kind of file.
LAYOUTS = {
    "decoder": ("tied_dynamic", {"encoder": "decoder"}),
    "arguments-as-dict": ("untied_fixed", {"form": "dict", "file": "checkpoint12.pt"}),
    "newer-arguments": ("tied_fixed", {"form": "cfg", "file": "checkpoint_last.pt"}),
    "before-zip": ("untied_dynamic", {"legacy": True, "file": "checkpoint_best.pt"}),
    "half": ("untied_fixed", {"dtype": torch.float16, "form": "cfg", "encoder": "decoder"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_authors_logits(layout, tmp_path):
    name, options = LAYOUTS[layout]
    folder = convert(write_fixture(tmp_path / "source", name, heads=(), **options), tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.tie_kv == name.startswith("tied") and model.config.dynamic_projection == ("dynamic" in name)
    fixture, tolerance = Fixture("luna_mlm", name), 2e-2 if "dtype" in options else 1e-5  # float16 rounds the weights
    for case in fixture.cases:
        logits = run(model, fixture.input(case, "tokens").long(), unpad_inputs=False).logits
        assert near(logits, fixture.output(case, "logits"), tolerance)


@pytest.mark.parametrize(("name", "head"), zip(MLM, [*POOLINGS, "attention_classification_head"], strict=True))
def test_classification_heads_give_the_authors_outputs(name, head, tmp_path):
    source = write_fixture(tmp_path / "source", name, task="sentence_prediction")
    model = AutoModelForSequenceClassification.from_pretrained(convert(source, tmp_path / "out", "--head", head))
    fixture = Fixture("luna_mlm", name)
    assert model.config.classifier_pooling == POOLINGS[head] and model.config.classifier_dropout == 0.0
    for case in fixture.cases:
        logits = run(model, fixture.input(case, "tokens").long()).logits
        assert near(logits, fixture.output(case, f"head.{head}"))


@pytest.mark.parametrize("name", NAMES)
def test_translation_gives_the_authors_numbers(name, tmp_path):
    fixture, source = write_checkpoint(tmp_path / "wmt", name)
    for more in ([], ["--overwrite"]):
        folder = convert(source, tmp_path / "out", *more)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    shared = fixture.config["args"]["share_all_embeddings"]
    assert type(model) is LunaForConditionalGeneration
    assert model.config.share_encoder_decoder_embeddings == model.config.tie_word_embeddings == shared
    for case in CASES:
        target = fixture.input(case, "prev_output_tokens")
        logits = run(model, fixture.input(case, "src_tokens"), decoder_input_ids=target).logits
        difference = (logits - fixture.output(case, "logits"))[target != PAD].abs().max()
        assert difference <= max(1e-5, 2 * fixture.float32_error(case))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w0 w1@@ w2 new")["input_ids"] == [4, 5, 6, 3, 2]
    assert tokenizer.decode([4, 5, 6, 2], skip_special_tokens=True) == "w0 w1w2"
    assert (folder / "target").exists() == (not shared)
    assert ModelCard.load(folder / "README.md").data.language == ["de", "en"]


def test_translation_with_the_older_activation_and_offset_norms(tmp_path):
    """Files of 2023 store LayerNorm weights less 1; `--override` tells of elu + 1, which no argument shows.

    It also corrects an argument that the decoder has, too.
    """
    fixture = Fixture("luna_seq2seq", "learned_lnemb_fixed")
    changes = {name: tensor - 1 for name, tensor in fixture.weights().items() if names.is_norm(name)}
    _, source = write_checkpoint(tmp_path / "wmt", "learned_lnemb_fixed", changes, decoder_attention_heads=2)
    words = ("--override", "pack_activation=elu", "--override", "encoder_attention_heads=4")
    model = AutoModelForSeq2SeqLM.from_pretrained(convert(source, tmp_path / "out", *words))
    stored = model.luna.encoder.packed_embeddings.LayerNorm.weight
    expected = fixture.weights()["encoder.layernorm_porjected_embedding.weight"]
    torch.testing.assert_close(stored, expected, rtol=0, atol=1e-6)
    assert model.config.pack_activation == "elu"


def test_of_several_heads_one_is_chosen(tmp_path, capsys):
    source = write_fixture(tmp_path / "source", "tied_dynamic")
    for words in ([], ["--head", "nothing"]):
        assert fairseq_luna.main([str(source), str(tmp_path / "out"), *words]) == 2
        message = capsys.readouterr().err
        assert all(name in message for name in POOLINGS) and not (tmp_path / "out").exists()
    folder = convert(source, tmp_path / "out", "--head", "lm_head")
    assert LunaConfig.from_pretrained(folder).architectures == ["LunaForMaskedLM"]
    unused = [name for name in Fixture("luna_mlm", "tied_dynamic").weights() if name.startswith("classification")]
    assert f"{len(unused)} unused ({', '.join(unused)})" in capsys.readouterr().out


@pytest.mark.parametrize(("labels", "words"), [(("b", "a", "c"), []), ((), []), (("x", "y", "z"), ["--labels"])])
def test_labels_keep_the_order_of_the_outputs(labels, words, tmp_path):
    source = write_tiny(tmp_path / "source", heads={HEAD: 3}, labels=() if words else labels)
    given = tmp_path / "given.txt"
    given.write_text("".join(f"{label} 1\n" for label in labels))
    folder = convert(source, tmp_path / "out", *words, *[given] * len(words))
    assert LunaConfig.from_pretrained(folder).id2label == dict(enumerate(labels or ("LABEL_0", "LABEL_1", "LABEL_2")))


@pytest.mark.parametrize(
    ("task", "kind", "layout"),
    [
        ("sentence_ranking", "", "the passage"),
        ("commonsense_qa", "", "</s>A: an answer"),
        ("", "ranking", "passage"),
        ("", "regression", "pair of texts"),
        ("regression_target", "", "pair of texts"),
    ],
)
def test_heads_with_one_output(task, kind, layout, tmp_path):
    """Multiple choice gives every choice the number that regression gives it."""
    changes = {"task": task, "criterion": "", "regression_target": task == "regression_target"}
    source = write_tiny(tmp_path / "source", heads={"pooling_classification_head": 1}, changes=changes)
    folder = convert(source, tmp_path / "out", *(["--head-type", kind] if kind else []))
    assert layout in (folder / "README.md").read_text()
    values = LunaConfig.from_pretrained(folder)
    is_regression = "regression" in f"{task} {kind}"
    assert (values.problem_type, values.num_labels) == (("regression", 1) if is_regression else (None, 2))
    if not is_regression:
        regression = convert(source, tmp_path / "regression", "--head-type", "regression")
        rows = torch.randint(4, 50, (2, 3, 9), generator=torch.Generator().manual_seed(0))
        scores = run(AutoModelForSequenceClassification.from_pretrained(regression), rows.flatten(0, 1)).logits
        assert near(run(AutoModelForMultipleChoice.from_pretrained(folder), rows).logits, scores.view(2, 3))


@pytest.mark.parametrize("stored", ["twice", "once", "declared-untied", "different"])
def test_the_output_layer_is_tied_or_not(stored, tmp_path):
    weights, values = tiny_state(tie_word_embeddings=stored != "different")
    if stored == "once":
        del weights["encoder.lm_head.weight"]
    values["untie_weights_luna"] = stored == "declared-untied"
    folder = convert(write_fairseq(tmp_path / "source", weights, values), tmp_path / "out")
    model, tied = LunaForMaskedLM.from_pretrained(folder), stored in ("twice", "once")
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.decoder.weight is model.luna.embeddings.word_embeddings.weight) == tied
    expected = weights.get("encoder.lm_head.weight", weights[f"{ENCODER}embed_tokens.weight"])
    assert torch.equal(model.lm_head.decoder.weight, expected)


# ---- arguments, LayerNorm, types ----


@pytest.mark.parametrize("form", ["none", "bare"])
def test_missing_arguments_have_the_authors_defaults(form, tmp_path, capsys):
    source = write_tiny(tmp_path / "source", form=form)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2  # 12 heads do not divide the width
    assert "Not in the file: encoder_attention_heads" in capsys.readouterr().err
    convert(source, tmp_path / "out", "--override", "encoder_attention_heads=2", "--override", "activation_fn=relu")
    assert "pooler_activation_fn tanh, fix_projection_length False, dropout 0.1, atten" in capsys.readouterr().out
    values = LunaConfig.from_pretrained(tmp_path / "out")
    assert values.num_attention_heads == 2 and values.hidden_act == "relu"


@pytest.mark.parametrize("given", [(), ("--layer-norm", "offset")])
def test_norms_stored_less_one(given, tmp_path, capsys):
    weights, values = tiny_state(heads={"attention_classification_head": 2})
    plain = convert(write_fairseq(tmp_path / "plain", weights, values), tmp_path / "plain-out")
    source = write_fairseq(tmp_path / "offset", names.shift_norms(weights, -1), values)
    offset = convert(source, tmp_path / "offset-out", *given)
    assert "which 1 was added" in capsys.readouterr().out
    for name, tensor in load_file(plain / "model.safetensors").items():
        torch.testing.assert_close(load_file(offset / "model.safetensors")[name], tensor, rtol=0, atol=1e-6)


def test_norms_stored_less_one_in_half_precision(tmp_path):
    """`w` has more digits than `1 + w` in that type: the result is rounded, unless float32 is requested."""
    weights, values = tiny_state()
    weights = {name: tensor.half() for name, tensor in names.shift_norms(weights, -1).items()}
    source = write_fairseq(tmp_path / "source", weights, values)
    assert stored_types(convert(source, tmp_path / "half")) == {"float16"}
    model = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "wide", "--dtype", "float32"))
    stored = weights[f"{ENCODER}proj_emb_layer_norm.weight"]
    assert torch.equal(model.luna.packed_embeddings.LayerNorm.weight, stored.float() + 1)


def test_ambiguous_norms_need_an_option(tmp_path, capsys):
    weights, values = tiny_state()
    halved = {name: tensor / 2 if names.is_norm(name) else tensor for name, tensor in weights.items()}
    source = write_fairseq(tmp_path / "source", halved, values)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "--layer-norm" in capsys.readouterr().err
    model = LunaForMaskedLM.from_pretrained(convert(source, tmp_path / "out", "--layer-norm", "plain"))
    assert torch.equal(model.lm_head.layer_norm.weight, halved["encoder.lm_head.layer_norm.weight"])


# ---- where files are ----


def test_the_model_file_among_several(tmp_path, capsys):
    source = write_tiny(tmp_path / "source", file="checkpoint1.pt", seed=1)
    write_tiny(source, file="checkpoint2.pt", seed=2)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 2
    assert "checkpoint1.pt, checkpoint2.pt" in capsys.readouterr().err
    folders = [convert(source, tmp_path / "a", "--checkpoint", "checkpoint1.pt")]
    folders.append(convert(source / "checkpoint2.pt", tmp_path / "b"))
    write_tiny(source, file="checkpoint_best.pt", seed=3)
    folders.append(convert(source, tmp_path / "c"))
    for seed, folder in enumerate(folders, start=1):
        expected = tiny_state(seed=seed)[0]["encoder.lm_head.bias"]
        assert torch.equal(load_file(folder / "model.safetensors")["lm_head.bias"], expected)


@pytest.mark.parametrize("kind", ["tar", "gztar"])
def test_other_archives(kind, tmp_path):
    source = write_archive(write_tiny(tmp_path / "luna.tiny"), kind)
    assert type(AutoModelForMaskedLM.from_pretrained(convert(source, tmp_path / "out"))) is LunaForMaskedLM


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("source/input0/dict.txt", ()),
        ("symbols.txt", ("--dict", "symbols.txt")),
        ("data/input0/dict.txt", ("--dict", "data")),
    ],
)
def test_a_dictionary_in_another_place(place, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_tiny(tmp_path / "source")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (source / "dict.txt").rename(place)
    assert len(AutoTokenizer.from_pretrained(convert(source, tmp_path / "out", *words))) == 60


def test_a_bpe_in_another_place(tmp_path):
    source, bpe = write_tiny(tmp_path / "source"), tmp_path / "bpe"
    bpe.mkdir()
    for old, new in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (source / old).rename(bpe / new)
    folder = convert(source, tmp_path / "out", "--gpt2-bpe", bpe)
    assert "--gpt2-bpe bpe" in (folder / "README.md").read_text()
