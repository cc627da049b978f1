"""Converting a RoBERTa, BERT or ABC: complete folders, what the commands print, and what they refuse."""

import json
import re
import shlex
import subprocess
import sys

import pretrain_mlm
import pytest
import roberta_to_abc
import roberta_to_luna
import torch
import transfer_attention
from engine.groups import check_groups
from helpers import ROOT, SENTENCES, padded_batch, randomise, run_python, tiny_model, tiny_tokenizer
from huggingface_hub import ModelCard
from objectives.transfer import TransferObjective
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    pipeline,
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
SLOTS = {"abc": ["--memory-size", "8"], "luna": ["--projection-length", "8"]}
LEARNED = ("mlp", "linformer", "luna")
STEPS = {"transfer_attention": transfer_attention.read_recipe, "pretrain_mlm": pretrain_mlm.read_recipe}
both = pytest.mark.parametrize("family", COMMANDS)

# Runs without luna_hf.
WITHOUT_PACKAGE = """
import sys
from transformers import pipeline
for folder in sys.argv[2:]:
    fill = pipeline("fill-mask", model=folder, trust_remote_code=True)
    print(type(fill.model).__module__.split(".")[0], *(answer["token"] for answer in fill(sys.argv[1])))
"""


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


def save_abc(folder, **fields):
    tokenizer = tiny_tokenizer(SENTENCES)
    tiny_model("abc_memory", "mlm", vocab_size=len(tokenizer), **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
    words = {"abc": ["--memory-control", "mlp", "--control-per-layer"], "luna": ["--text", text]}
    extras = ["--max-length", 100, "--conv-kernel-size", 5, "--seed", 3]
    for family in COMMANDS:
        assert convert(family, source, folder / family, *SLOTS[family], *words[family], *extras) == 0
    return folder


# ---- what is written ----


@both
def test_the_folder_is_complete(converted, source, family):
    folder = converted / family
    config = config_of(folder)
    assert config["max_position_embeddings"] == 100 and config["conv_kernel_size"] == 5
    assert config["auto_map"]["AutoModelForMaskedLM"].startswith(f"modeling_{family}.")
    code = {path.name for path in folder.glob("*.py")}
    assert {f"modeling_{family}.py", f"configuration_{family}.py"} <= code
    assert not any("warm_start" in name for name in code)
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
    assert "its 64 positions repeated to 100" in card.content and "convolution.weight: zero" in card.content
    assert "must be trained before use" in card.content and not re.search(r"\$\{?\w", card.content)
    assert str(source.parent) not in card.content and str(converted) not in card.content


def test_pipelines_with_and_without_the_package(converted, tmp_path):
    folders, question = [converted / family for family in COMMANDS], "every token <mask> the packed sequence"
    expected = [[a["token"] for a in pipeline("fill-mask", model=str(folder))(question)] for folder in folders]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    lines = run_python(WITHOUT_PACKAGE, question, *folders, env=environment, blocked=True).splitlines()
    assert lines == [" ".join(map(str, ["transformers_modules", *tokens])) for tokens in expected]


def test_the_command_on_the_card_makes_the_same_model(converted, source, monkeypatch, tmp_path):
    (line,) = re.findall(r"Command: `(.*)`", (converted / "abc" / "README.md").read_text())
    (tmp_path / "tiny-roberta").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    assert words[:2] == ["python", "conversion/roberta_to_abc.py"] and roberta_to_abc.main(words[2:]) == 0
    files = [(folder / "abc" / "model.safetensors").read_bytes() for folder in (tmp_path, converted)]
    assert files[0] == files[1]


def test_full_attention_equals_the_source(source, tmp_path, capsys):
    assert convert("abc", source, tmp_path / "full", "--memory-control", "full") == 0
    printed = capsys.readouterr().out
    assert f"computes what {source} computes" in printed and "new: 0 parameters" in printed and "Next" not in printed
    batch = padded_batch([12, 7])
    with torch.no_grad():
        expected = RobertaForMaskedLM.from_pretrained(source)(**batch).logits
        logits = AutoModelForMaskedLM.from_pretrained(tmp_path / "full")(**batch).logits
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[kept], expected[kept], rtol=0, atol=1e-5)


def test_a_bert_with_its_tokenizer(tmp_path):
    words = sorted({word for sentence in SENTENCES for word in sentence.lower().split()})
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = BertTokenizer.from_pretrained(tmp_path / "bert")
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(tmp_path / "bert")
    assert convert("luna", tmp_path / "bert", tmp_path / "new") == 0
    again = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert type(again) is BertTokenizer and again.model_max_length == 66
    assert again(*SENTENCES[:2]) == tokenizer(*SENTENCES[:2])
    assert len(pipeline("fill-mask", model=str(tmp_path / "new"))("the quick [MASK] fox")) == 5


def test_a_source_without_tokenizer_head_or_licence(tmp_path, capsys):
    save_roberta(tmp_path / "source", RobertaModel, tokenizer=False)
    assert convert("abc", tmp_path / "source", tmp_path / "new") == 0
    printed, card = capsys.readouterr().out, ModelCard.load(tmp_path / "new" / "README.md")
    assert "Note: The source has no tokenizer files" in printed and "Note: The source has no masked-LM head" in printed
    assert "pooler.dense.{weight,bias}" in printed and "lm_head.dense.{weight,bias}: initialised" in printed
    assert not list((tmp_path / "new").glob("tokenizer*")) and "no tokenizer files" in card.content
    assert card.data.license is None and "states no licence" in card.content
    assert convert("luna", tmp_path / "source", tmp_path / "other", "--text", ROOT / "README.md") == 2
    assert "--text" in capsys.readouterr().err


@pytest.mark.parametrize("more", [0, 1])
def test_more_slots_than_tokens_get_a_note(source, tmp_path, capsys, more):
    assert convert("luna", source, tmp_path / "new", "--projection-length", 64 + more) == 0
    for text in (capsys.readouterr().out, (tmp_path / "new" / "README.md").read_text()):
        assert bool(re.search("`projection_length` is 65, more than the 64 tokens", text)) == bool(more)


def test_the_script_in_a_process(source, tmp_path):
    words = [sys.executable, str(ROOT / "conversion" / "roberta_to_abc.py"), str(source), "new", "--memory-size", "8"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr  # not even progress bars
    assert (tmp_path / "new" / "model.safetensors").is_file() and "abc.control.weight" in done.stdout


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


# ---- the next commands ----


def next_recipes(printed, target):
    """The printed commands as script and recipe, each checked against the model that was written."""
    found = []
    names = [name for name, _ in AutoModelForMaskedLM.from_pretrained(target).named_parameters()]
    for line in printed.splitlines():
        if line.startswith("  python"):
            script, recipe, *words = shlex.split(line)[1:]
            script = script.removeprefix("training/").removesuffix(".py")
            recipe = STEPS[script](recipe, [*words, "--block_size", "32"])
            if script == "transfer_attention":
                TransferObjective().check(recipe)
            check_groups(names, recipe.groups, recipe.max_steps)
            found.append((script, recipe))
    return found


@pytest.mark.parametrize("taps", [0, 5])
@pytest.mark.parametrize("control", ["mlp", "linformer", "cluster", "full", "luna"])
def test_the_next_commands_are_accepted(source, tmp_path, capsys, monkeypatch, control, taps):
    target, family = tmp_path / "new", "luna" if control == "luna" else "abc"
    words = [] if control == "full" else SLOTS[family]
    words = [*words, *([] if control == "luna" else ["--memory-control", control])]
    assert convert(family, source, target, *words, *(["--conv-kernel-size", taps] if taps else [])) == 0
    monkeypatch.chdir(ROOT)
    found = next_recipes(capsys.readouterr().out, target)
    scripts, starts = [script for script, _ in found], [recipe.model_name_or_path for _, recipe in found]
    if control in LEARNED or (taps and control != "full"):
        assert scripts == list(STEPS) and starts == [str(target), f"{target}-fitted"]
    elif control == "full" and not taps:
        assert not scripts
    else:
        assert scripts == ["pretrain_mlm"] and starts == [str(target)]
    groups = [group.match for group in found[-1][1].groups] if found else []
    assert bool(groups) == (control in LEARNED or taps > 0)


# ---- ABC sources ----

OWN = {
    "window": {"memory_control": "sliding_window", "memory_size": 9, "conv_kernel_size": 3},
    "random": {"memory_control": "random", "control_seed": 4, "share_control": False},
    "cluster": {"memory_control": "cluster", "cluster_iterations": 4},
    "mlp": {"memory_size": 9, "share_control": False, "control_activation": "relu"},
}


@pytest.mark.parametrize("kind", OWN)
def test_an_abc_source_keeps_its_fields(tmp_path, capsys, kind):
    save_abc(tmp_path / "source", **OWN[kind])
    assert convert("abc", tmp_path / "source", tmp_path / "new") == 0
    printed, config = capsys.readouterr().out, config_of(tmp_path / "new")
    assert {name: config[name] for name in OWN[kind]} == OWN[kind]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("source", "new")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert "computes what" in printed and "Next" not in printed and "new: 0 parameters" in printed


def test_an_abc_source_with_other_fields(tmp_path, capsys):
    save_abc(tmp_path / "source", **OWN["window"])
    words = ["--memory-control", "mlp", "--conv-kernel-size", 0]
    assert convert("abc", tmp_path / "source", tmp_path / "new", *words) == 0
    printed, config = capsys.readouterr().out, config_of(tmp_path / "new")
    assert (config["memory_control"], config["memory_size"], config["conv_kernel_size"]) == ("mlp", 9, 0)
    assert "writes its memory differently" in printed and "convolution.weight" in printed.split("unused")[1]
    assert convert("luna", tmp_path / "source", tmp_path / "luna") == 0
    assert config_of(tmp_path / "luna")["conv_kernel_size"] == 3
    printed = capsys.readouterr().out
    assert "reads 128 slots where that of" in printed and "9 slots" in printed


def test_a_longer_linformer_starts_anew(tmp_path, capsys):
    save_abc(tmp_path / "source", memory_control="linformer", memory_size=9)
    assert convert("abc", tmp_path / "source", tmp_path / "new", "--max-length", 80) == 0
    printed = capsys.readouterr().out
    assert "(linformer, 36 x 64) does not fit" in printed and "computes what" not in printed


def test_the_commands_in_recipes_are_accepted():
    found = []
    for recipe in (ROOT / "training" / "recipes").glob("*/*.yaml"):
        text = recipe.read_text().replace("\\\n#", "")
        for family, words in re.findall(r"python conversion/roberta_to_(\w+)\.py (.*)", text):
            found.append(COMMANDS[family].parse(shlex.split(words)).target.name)
    assert {"abc-tiny-start", "abc-base-start", "luna-base-start"} <= set(found)


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
        ("abc", "--memory-control mpl", "'mpl'"),
        ("abc", "--conv-kernel-size 4", "`conv_kernel_size` is 4"),
        ("abc", "--max-length 10", "`max_length` is 10"),
        ("abc", "--projection-length 8", "--projection-length"),
        ("abc", "--memory-size 20000000000", "`memory_size` is 20,000,000,000"),
        ("abc", "--memory-size 8 --memory-control full", "--memory-size"),
        ("abc", "--control-seed 0", "--control-seed"),
        ("abc", "--cluster-iterations 3", "--cluster-iterations"),
        ("abc", "--memory-control linformer --control-activation exp", "--control-activation"),
        ("abc", "--memory-control dilated --control-per-layer", "--control-per-layer"),
        ("abc", "--memory-control cluster --control-init random", "`control_init`"),
        ("abc", "--control-activation relu --control-init attention", "'relu'"),
        ("luna", "--projection-length 0", "`projection_length` is 0"),
        ("luna", "--num-projected-attention-heads 5", "num_projected_attention_heads"),
        ("luna", "--text nowhere.txt", "nowhere.txt"),
    ],
)
def test_wrong_options(source, refused, family, words, named):
    refused(family, source, named, words=words.split())


def test_texts(source, refused, tmp_path):
    for name, content, named in (
        ("empty.txt", b"", "`slot_tokens`"),
        ("binary.txt", b"\xff\xfe\x00\xd8", "binary.txt"),
    ):
        (tmp_path / name).write_bytes(content)
        refused("luna", source, named, words=["--text", tmp_path / name])


def test_sources_that_cannot_be_converted(refused, tmp_path):
    refused("abc", tmp_path, str(tmp_path))
    refused("abc", tmp_path / "nowhere", "nowhere is neither a folder")
    refused("luna", save_roberta(tmp_path / "decoder", is_decoder=True), "`is_decoder`")
    refused("abc", save_roberta(tmp_path / "small", vocab_size=100), "100", "tokenizer")
    refused("abc", save_roberta(tmp_path / "pad", pad_token_id=3), "token 1", "token 3")
    broken = save_roberta(tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps({**config_of(broken), "num_hidden_layers": "three"}))
    refused("abc", broken, "num_hidden_layers")
    (broken / "config.json").write_text("{")
    refused("abc", broken, "config.json")


@pytest.mark.parametrize("damage", ["broken", "without-vocabulary"])
def test_a_damaged_tokenizer(refused, tmp_path, damage):
    file = save_roberta(tmp_path / "source") / "tokenizer.json"
    if damage == "broken":
        file.write_text(file.read_text()[:-50])
    else:
        file.unlink()
    refused("abc", tmp_path / "source", str(tmp_path / "source"), "tokenizer")
