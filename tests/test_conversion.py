"""Converting a RoBERTa, BERT or ABC: complete folders, what the commands print, and what they refuse."""

import json
import re
import shlex

import from_roberta
import pytest
import roberta_to_abc
import roberta_to_luna
import torch
from helpers import ROOT, SENTENCES, randomise, tiny_tokenizer
from huggingface_hub import ModelCard
from test_convert_command import write_sentences
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.warm_start import warm_start

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 66,
}
COMMANDS = {"abc": roberta_to_abc, "luna": roberta_to_luna}
both = pytest.mark.parametrize("family", COMMANDS)


def convert(family, source, target, *words):
    return COMMANDS[family].main([str(source), str(target), *map(str, words)])


def save_roberta(folder, model_class=RobertaForMaskedLM, tokenizer=True, **fields):
    torch.manual_seed(5)
    own = tiny_tokenizer()
    model = model_class(RobertaConfig(**{"vocab_size": len(own), "type_vocab_size": 1, **SIZES, **fields})).eval()
    randomise(model)
    model.save_pretrained(folder)
    if tokenizer:
        own.save_pretrained(folder)
    return folder


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = save_roberta(tmp_path_factory.mktemp("source") / "tiny-roberta")
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\nlanguage: en\n---\n# tiny\n")
    return folder


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """A folder with one conversion to each family, with all extras."""
    folder = tmp_path_factory.mktemp("converted")
    text = folder / "text.txt"
    text.write_text("\n".join(SENTENCES))
    own = {
        "abc": ["--memory-size", 8, "--memory-control", "mlp", "--control-per-layer"],
        "luna": ["--projection-length", 8, "--text", text],
    }
    extras = ["--max-length", 100, "--conv-kernel-size", 5, "--seed", 3]
    for family in COMMANDS:
        assert convert(family, source, folder / family, *own[family], *extras) == 0
    return folder


@both
def test_the_folder_holds_what_the_package_makes(converted, source, family):
    folder = converted / family
    config = config_of(folder)
    assert config["max_position_embeddings"] == 100 and config["conv_kernel_size"] == 5
    assert config["auto_map"]["AutoModelForMaskedLM"].startswith(f"modeling_{family}.")
    assert {f"modeling_{family}.py", f"configuration_{family}.py"} == {path.name for path in folder.glob("*.py")}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 100
    ids = AutoTokenizer.from_pretrained(source)("\n".join(SENTENCES), add_special_tokens=False)["input_ids"]
    assert tokenizer("\n".join(SENTENCES), add_special_tokens=False)["input_ids"] == ids
    options = {"abc": {"memory_size": 8, "share_control": False}, "luna": {"projection_length": 8, "slot_tokens": ids}}
    model_class = {"abc": AbcForMaskedLM, "luna": LunaForMaskedLM}[family]
    expected, _ = warm_start(model_class, source, max_length=100, conv_kernel_size=5, seed=3, **options[family])
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    assert type(loaded) is model_class and not loaded.training
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in expected.state_dict().items())


@both
def test_the_card(converted, source, family):
    card = ModelCard.load(converted / family / "README.md")
    assert (card.data.license, card.data.language, card.data.pipeline_tag) == ("cc-by-4.0", "en", "fill-mask")
    assert {"custom_code", config_of(converted / family)["model_type"]} <= set(card.data.tags)
    assert f"python conversion/roberta_to_{family}.py tiny-roberta {family}" in card.content
    assert "its 64 positions repeated to 100" in card.content and from_roberta.TRAIN in card.content
    assert str(source.parent) not in card.content and not re.search(r"\$\{?\w", card.content)


def test_settings_of_a_source_of_abc_are_kept(source, tmp_path):
    assert convert("abc", source, tmp_path / "cluster", "--memory-control", "cluster", "--memory-size", 9) == 0
    assert convert("abc", tmp_path / "cluster", tmp_path / "mlp", "--memory-control", "mlp") == 0
    config = config_of(tmp_path / "mlp")
    assert (config["memory_size"], config["memory_control"]) == (9, "mlp")


def test_a_source_without_tokenizer_head_or_licence(tmp_path, capsys):
    save_roberta(tmp_path / "source", RobertaModel, tokenizer=False)
    assert convert("luna", tmp_path / "source", tmp_path / "new", "--projection-length", "65") == 0
    printed, card = capsys.readouterr().out, ModelCard.load(tmp_path / "new" / "README.md")
    for note in ("no tokenizer files", "no masked-LM head", "`projection_length` is 65, more than the 64 tokens"):
        assert note in printed and note in card.content
    assert not list((tmp_path / "new").glob("tokenizer*")) and card.data.license is None
    assert convert("luna", tmp_path / "source", tmp_path / "other", "--text", ROOT / "README.md") == 2
    assert "--text" in capsys.readouterr().err


@both
@pytest.mark.parametrize(("words", "longest"), [((), 16), (("--max-length", 100), 100)])
def test_a_sentence_encoder_keeps_its_modules(family, words, longest, tmp_path):
    from sentence_transformers import SentenceTransformer

    source, target = write_sentences(tmp_path / "source", path="0_Transformer"), tmp_path / "target"
    words = [*words, *(("--memory-control", "full") if family == "abc" else ())]
    assert convert(family, source, target, *words) == 0
    before, after = (SentenceTransformer(str(folder), device="cpu") for folder in (source, target))
    assert [type(module) for module in after] == [type(module) for module in before]
    assert after[1].get_config_dict() == before[1].get_config_dict()
    assert after.prompts == before.prompts and after.similarity_fn_name == before.similarity_fn_name
    assert (before.max_seq_length, after.max_seq_length) == (16, longest)
    if family == "abc" and longest == 16:  # softmax attention, and texts cut alike
        texts = [text.upper() for text in SENTENCES]
        torch.testing.assert_close(after.encode(texts[:3]), before.encode(texts[:3]), rtol=0, atol=1e-5)
    assert convert(family, source, target, *words, "--overwrite") == 0


def test_the_output_in_the_documentation(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "warm-start.md").read_text(encoding="utf-8")
    fields = {"num_hidden_layers": 12, "max_position_embeddings": 514, "intermediate_size": 8}  # narrow
    save_roberta(tmp_path / "FacebookAI" / "roberta-base", **fields)
    monkeypatch.chdir(tmp_path)
    command = re.search(r"python conversion/roberta_to_abc\.py ([^\n]*\\\n[^\n]*)", page)[1].replace("\\\n", "")
    (shown,) = re.findall(r"```\n(copied.*?)```", page, re.DOTALL)
    assert roberta_to_abc.main(shlex.split(command)) == 0
    without_size = [re.sub(r"[\d,]+ parameters, inputs", "", text) for text in (capsys.readouterr().out, shown)]
    assert without_size[0] == without_size[1]


# ---- what is refused ----


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs a command, which must refuse, leave nothing, and name each of these words."""

    def run(family, source, *named, words=()):
        capsys.readouterr()
        assert convert(family, source, tmp_path / "new", *words) == 2
        message = capsys.readouterr().err.split("error: ")[1]
        assert not [word for word in named if word not in message], message
        assert not list(tmp_path.glob("*new*")) and "Traceback" not in message

    return run


@pytest.mark.parametrize(
    ("family", "words", "named"),
    [
        ("abc", "--memory-size 0", "`memory_size` is 0"),
        ("abc", "--memory-size many", "'many'"),
        ("abc", "--max-length 10", "`max_length` is 10"),
        ("abc", "--projection-length 8", "--projection-length"),
        ("abc", "--memory-size 8 --memory-control full", "--memory-size"),
        ("abc", "--memory-control dilated --control-per-layer", "--control-per-layer"),
        ("luna", "--text nowhere.txt", "nowhere.txt"),
        ("luna", "--text {binary}", "binary.txt"),
    ],
)
def test_wrong_options(source, refused, tmp_path, family, words, named):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    refused(family, source, named, words=words.format(binary=binary).split())


def test_sources_that_cannot_be_converted(refused, tmp_path):
    refused("abc", tmp_path, str(tmp_path))
    refused("abc", tmp_path / "nowhere", "nowhere is neither a folder")
    refused("abc", save_roberta(tmp_path / "small", vocab_size=100), "100", "tokenizer")
    broken = save_roberta(tmp_path / "broken")
    file = broken / "tokenizer.json"
    file.write_text(file.read_text()[:-50])
    refused("abc", broken, str(broken), "tokenizer")
    (broken / "config.json").write_text("{")
    refused("abc", broken, "config.json")
