"""The conversion scripts: a complete checkpoint from a folder, what they print, and what they refuse."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, SENTENCES, padded_batch, randomise, run_python, tiny_model, tiny_tokenizer
from huggingface_hub import ModelCard
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

from luna_hf import AbcConfig, LunaConfig
from luna_hf.warm_start import warm_start

sys.path.insert(0, str(ROOT / "conversion"))  # the scripts import their sibling plainly

import from_roberta

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 66,
}
CONVERSIONS = {"abc": from_roberta.AbcConversion(), "luna": from_roberta.LunaConversion()}
SLOTS = {"abc": ["--memory-size", "8"], "luna": ["--projection-length", "8"]}
both = pytest.mark.parametrize("family", CONVERSIONS)
QUESTION = "every token <mask> the packed sequence"

# Runs without luna_hf.
WITHOUT_PACKAGE = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
for folder in sys.argv[2:]:
    fill = pipeline("fill-mask", model=folder, trust_remote_code=True)
    print(type(fill.model).__module__.split(".")[0], *(answer["token"] for answer in fill(sys.argv[1])))
"""


def convert(family, source, target, *words):
    return from_roberta.main(CONVERSIONS[family], "", [str(source), str(target), *map(str, words)])


def run(family, source, target, *words):
    return convert(family, source, target, *SLOTS[family], *words)


def save_roberta(folder, model_class=RobertaForMaskedLM, tokenizer=True, **fields):
    torch.manual_seed(5)
    own = tiny_tokenizer()
    model = model_class(RobertaConfig(**{"vocab_size": len(own), "type_vocab_size": 1, **SIZES, **fields})).eval()
    randomise(model)
    model.save_pretrained(folder)
    if tokenizer:
        own.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "tiny-roberta"
    save_roberta(folder)
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\nlanguage: en\n---\n# tiny\n")
    return folder


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """One conversion to each family, with all the extras: folders."""
    folder = tmp_path_factory.mktemp("converted")
    text = folder / "text.txt"
    text.write_text("\n".join(SENTENCES))
    words = {"abc": ["--memory-control", "mlp"], "luna": ["--text", text]}
    for family in CONVERSIONS:
        extras = ["--max-length", 100, "--conv-kernel-size", 5, "--seed", 3]
        assert run(family, source, folder / family, *words[family], *extras) == 0
    return folder


# ---- what is written ----


@both
def test_the_checkpoint_is_complete(converted, source, family):
    folder = converted / family
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 100 and config["conv_kernel_size"] == 5
    assert config["auto_map"]["AutoModelForMaskedLM"].startswith(f"modeling_{family}.")
    code = {path.name for path in folder.glob("*.py")}
    assert {f"modeling_{family}.py", f"configuration_{family}.py", "functional.py"} <= code
    assert not any("warm_start" in name for name in code)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 100
    assert tokenizer(SENTENCES[0]) == AutoTokenizer.from_pretrained(source)(SENTENCES[0])
    assert not [path for path in converted.iterdir() if "unfinished" in path.name]


@both
def test_the_weights_are_those_of_warm_start(converted, source, family):
    tokenizer = AutoTokenizer.from_pretrained(source)
    options = {"abc": {"memory_size": 8}, "luna": {"projection_length": 8}}[family]
    if family == "luna":
        options["slot_tokens"] = tokenizer("\n".join(SENTENCES), add_special_tokens=False)["input_ids"]
    conversion = CONVERSIONS[family]
    expected, _ = warm_start(conversion.model_class, source, max_length=100, conv_kernel_size=5, seed=3, **options)
    loaded = AutoModelForMaskedLM.from_pretrained(converted / family)
    assert type(loaded) is conversion.model_class and not loaded.training
    states = loaded.state_dict()
    assert all(torch.equal(tensor, states[name]) for name, tensor in expected.state_dict().items())


def test_pipelines_with_and_without_the_package(converted, tmp_path):
    folders = [converted / family for family in CONVERSIONS]
    expected = [[a["token"] for a in pipeline("fill-mask", model=str(folder))(QUESTION)] for folder in folders]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    lines = run_python(WITHOUT_PACKAGE, QUESTION, *folders, env=environment, blocked=True).splitlines()
    assert lines == [" ".join(map(str, ["transformers_modules", *tokens])) for tokens in expected]


def test_full_control_equals_the_source(source, tmp_path, capsys):
    assert convert("abc", source, tmp_path / "full", "--memory-control", "full") == 0
    said = capsys.readouterr().out
    assert f"it computes what {source} computes" in said and "new: 0 parameters" in said and "Next" not in said
    batch = padded_batch([12, 7])
    with torch.no_grad():
        expected = RobertaForMaskedLM.from_pretrained(source)(**batch).logits
        logits = AutoModelForMaskedLM.from_pretrained(tmp_path / "full")(**batch).logits
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[kept], expected[kept], rtol=0, atol=1e-5)


@both
def test_a_bert_with_its_own_tokenizer(family, tmp_path):
    words = sorted({word for sentence in SENTENCES for word in sentence.lower().split()})
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = BertTokenizer.from_pretrained(tmp_path / "bert")
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(tmp_path / "bert")
    assert run(family, tmp_path / "bert", tmp_path / "new") == 0
    again = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert type(again) is BertTokenizer and again.model_max_length == 66
    assert again(*SENTENCES[:2]) == tokenizer(*SENTENCES[:2])
    fill = pipeline("fill-mask", model=str(tmp_path / "new"))
    assert len(fill("the quick [MASK] fox")) == 5


@both
def test_the_card(converted, source, family):
    card = ModelCard.load(converted / family / "README.md")
    assert (card.data.license, card.data.language) == ("cc-by-4.0", "en")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "fill-mask"
    assert {"custom_code", AbcConfig.model_type if family == "abc" else LunaConfig.model_type} <= set(card.data.tags)
    text = " ".join(card.content.split())
    assert "made from `tiny-roberta` and not trained since" in text and "has to be trained on before use" in text
    assert "license" in card.content and "licence is that of the source's card: `cc-by-4.0`" in text
    assert f"python conversion/roberta_to_{family}.py tiny-roberta {family}" in text
    assert "its 64 positions repeated to 100" in text and "convolution.weight: zero" in text
    assert not re.search(r"\$\{?\w", card.content)
    # No folder of this machine.
    assert str(source.parent) not in card.content and str(converted) not in card.content


def test_a_card_without_a_licence_says_so(tmp_path):
    save_roberta(tmp_path / "source")
    assert run("abc", tmp_path / "source", tmp_path / "new") == 0
    card = ModelCard.load(tmp_path / "new" / "README.md")
    assert card.data.license is None and "states no licence" in card.content


def test_the_command_in_the_card_makes_the_same_model(converted, source, monkeypatch, tmp_path):
    (line,) = re.findall(r"Command: `(.*)`", (converted / "abc" / "README.md").read_text())
    (tmp_path / "tiny-roberta").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    assert words[:2] == ["python", "conversion/roberta_to_abc.py"]
    assert from_roberta.main(CONVERSIONS["abc"], "", words[2:]) == 0
    files = [(folder / "abc" / "model.safetensors").read_bytes() for folder in (tmp_path, converted)]
    assert files[0] == files[1]


# ---- what is printed ----


@both
def test_what_is_printed(source, tmp_path, capsys, family):
    assert run(family, source, tmp_path / "new", "--max-length", 80) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^(\w+): \d+ parameters?$", said, re.MULTILINE) == ["copied", "extended", "new", "unused"]
    assert f"Written to {tmp_path / 'new'}:" in said and "inputs of up to 80 tokens" in said
    assert len(said.splitlines()) < 50
    new = {"abc": "abc.control.weight", "luna": "attention.self.pack.value.weight: the identity"}[family]
    assert new in said and "has to be trained on" in said
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  python")]
    assert [words[1] for words in commands] == ["training/transfer_attention.py", "training/pretrain_mlm.py"]
    assert str(source) in commands[0] and str(tmp_path / "new") in commands[0]


@both
def test_the_commands_that_are_named_exist(source, tmp_path, capsys, family):
    run(family, source, tmp_path / "new")
    named = re.findall(r"training/[\w/.-]+\.(?:py|yaml)", capsys.readouterr().out)
    assert len(named) == 4 and all((ROOT / name).is_file() for name in named), named


def test_a_source_without_a_tokenizer_or_a_head(tmp_path, capsys):
    save_roberta(tmp_path / "source", RobertaModel, tokenizer=False)
    assert run("abc", tmp_path / "source", tmp_path / "new") == 0
    said = capsys.readouterr().out
    assert "Note: The source has no tokenizer files" in said and "Note: The source has no masked-LM head" in said
    assert "pooler.dense.{weight,bias}" in said and "lm_head.dense.{weight,bias}: initialised" in said
    assert not list((tmp_path / "new").glob("tokenizer*"))
    assert "no tokenizer files" in (tmp_path / "new" / "README.md").read_text()
    assert run("luna", tmp_path / "source", tmp_path / "other", "--text", ROOT / "README.md") == 2
    assert "--text needs a tokenizer" in capsys.readouterr().err


def start(*words, **options):
    """A script in a process of its own."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_the_script_for_abc(source, tmp_path):
    done = start(ROOT / "conversion" / "roberta_to_abc.py", source, "new", "--memory-size", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # no progress bars
    assert (tmp_path / "new" / "model.safetensors").is_file() and "abc.control.weight" in done.stdout


def test_the_script_for_luna(tmp_path):
    # Its help, and an error, in one process: starting one takes seconds.
    script = ROOT / "conversion" / "roberta_to_luna.py"
    both = "import runpy, sys\nfor sys.argv[1:] in (['--help'], ['nowhere', 'new']):\n    "
    both += (
        f"try: runpy.run_path({str(script)!r}, run_name='__main__')\n    except SystemExit as end: print('status', end)"
    )
    done = start("-c", f"import sys\nsys.path.insert(0, {str(script.parent)!r})\n{both}", cwd=tmp_path)
    assert "python conversion/roberta_to_luna.py FacebookAI/roberta-base" in done.stdout, done.stderr
    assert re.findall(r"status (.*)", done.stdout) == ["0", "2"]
    assert done.stderr.startswith("error: There is no model 'nowhere'") and "Traceback" not in done.stderr


# ---- docs/warm-start.md ----

PAGE = (ROOT / "docs" / "warm-start.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def base_like(tmp_path_factory):
    """A folder with a RoBERTa of as many layers and positions as the base model, but narrow."""
    folder = tmp_path_factory.mktemp("readme")
    fields = {"num_hidden_layers": 12, "max_position_embeddings": 514, "intermediate_size": 8}
    save_roberta(folder / "FacebookAI" / "roberta-base", **fields)
    return folder


def test_the_commands_of_the_readme_print_what_it_says(base_like, monkeypatch, capsys):
    monkeypatch.chdir(base_like)
    text = PAGE.replace("\\\n", "")
    commands = re.findall(r"^    python conversion/roberta_to_(abc|luna)\.py (.*)$", text, re.MULTILINE)
    assert [family for family, _ in commands] == ["abc", "luna"]
    (shown,) = re.findall(r"```\n(copied.*?)```", PAGE, re.DOTALL)
    printed = []
    for family, words in commands:
        assert from_roberta.main(CONVERSIONS[family], "", shlex.split(words)) == 0
        printed.append(re.sub(r"[\d,]+ parameters, inputs", "parameters, inputs", capsys.readouterr().out))
    assert printed[0] == re.sub(r"[\d,]+ parameters, inputs", "parameters, inputs", shown)


def test_the_code_of_the_readme_runs(base_like, monkeypatch, capsys):
    monkeypatch.chdir(base_like)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("new: 99 parameters\n")


# ---- what is refused ----


def refused(capsys, family, source, target, *words):
    assert run(family, source, target, *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("abc", ["--memory-size", "0"], "AbcConfig: `memory_size` is 0, but must be at least 1"),
        ("abc", ["--memory-size", "many"], "invalid int value"),
        ("abc", ["--memory-control", "mpl"], "invalid choice: 'mpl'"),
        ("abc", ["--conv-kernel-size", "4"], "odd number"),
        ("abc", ["--max-length", "10"], "`max_length` is 10, but the source has positions for 64 tokens"),
        ("abc", ["--projection-length", "8"], "unrecognized arguments: --projection-length 8 .see --help"),
        ("abc", ["--memory-size", "20000000000"], "is 20,000,000,000, but inputs are at most 64 tokens long"),
        ("abc", ["--memory-control", "full"], "--memory-size is an option of mlp, .*, and without effect on full"),
        (
            "abc",
            ["--control-seed", "0"],
            "--control-seed is an option of random, and without effect on mlp .--memory-control",
        ),
        ("abc", ["--cluster-iterations", "3"], "--cluster-iterations is an option of cluster,"),
        (
            "abc",
            ["--memory-control", "linformer", "--control-activation", "exp"],
            "--control-activation is an option of mlp, and without effect on linformer",
        ),
        (
            "abc",
            ["--memory-control", "dilated", "--control-per-layer"],
            "--control-per-layer is an option of mlp, linformer and random, and without effect on dilated",
        ),
        ("abc", ["--memory-control", "cluster", "--control-init", "random"], "--control-init is an option of mlp and"),
        (
            "abc",
            ["--control-activation", "relu", "--control-init", "attention"],
            "cannot be 'attention': `control_activation` 'relu'",
        ),
        ("luna", ["--projection-length", "0"], "`projection_length` is 0"),
        ("luna", ["--num-projected-attention-heads", "5"], "not a multiple"),
        ("luna", ["--text", "nowhere.txt"], "--text nowhere.txt cannot be read"),
    ],
)
def test_wrong_options(capsys, source, tmp_path, family, words, message):
    assert re.search(message, refused(capsys, family, source, tmp_path / "new", *words))
    assert not list(tmp_path.iterdir())


def test_sources_that_cannot_be_converted(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refused(capsys, "abc", tmp_path / "empty", tmp_path / "new")
    save_roberta(tmp_path / "decoder", is_decoder=True)
    assert "is a decoder" in refused(capsys, "luna", tmp_path / "decoder", tmp_path / "new")
    tiny_model("luna", "mlm").save_pretrained(tmp_path / "luna")
    assert "is a luna model already" in refused(capsys, "luna", tmp_path / "luna", tmp_path / "new")
    assert "There is no model" in refused(capsys, "abc", tmp_path / "nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_of_another_model(capsys, tmp_path):
    save_roberta(tmp_path / "small", vocab_size=100)
    assert "tokens, but the model 100" in refused(capsys, "abc", tmp_path / "small", tmp_path / "new")
    save_roberta(tmp_path / "pad", pad_token_id=3)
    assert "pads with token 1, but the model takes token 3" in refused(capsys, "abc", tmp_path / "pad", tmp_path / "n")


def test_the_config_is_read_before_the_tokenizer(capsys, tmp_path):
    save_roberta(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text("{")
    assert "config.json of" in refused(capsys, "abc", tmp_path / "source", tmp_path / "new")
    save_roberta(tmp_path / "layers")
    config = json.loads((tmp_path / "layers" / "config.json").read_text())
    (tmp_path / "layers" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "three"}))
    assert "The config of" in refused(capsys, "abc", tmp_path / "layers", tmp_path / "new")


@pytest.mark.parametrize("damage", ["broken", "without-vocabulary"])
def test_a_damaged_tokenizer(capsys, tmp_path, damage):
    save_roberta(tmp_path / "source")
    file = tmp_path / "source" / "tokenizer.json"
    if damage == "broken":
        file.write_text(file.read_text()[:-50])
    else:
        file.unlink()
    message = refused(capsys, "abc", tmp_path / "source", tmp_path / "new")
    assert re.search(r"The tokenizer at .* \(tokenizer(_config)?.json\) cannot be read: ", message)


def test_a_text_that_is_empty_or_no_text(capsys, source, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\xd8")
    message = refused(capsys, "luna", source, tmp_path / "new", "--text", tmp_path / "empty.txt")
    assert "no tokens besides special ones" in message
    message = refused(capsys, "luna", source, tmp_path / "new", "--text", tmp_path / "binary.txt")
    assert "cannot be read as UTF-8" in message


def test_targets(capsys, source, tmp_path):
    target = tmp_path / "new"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    for words in ([], ["--overwrite"]):
        assert "holds files that no conversion wrote (thesis.txt)" in refused(capsys, "abc", source, target, *words)
    (target / "thesis.txt").unlink()
    assert run("abc", source, target, "--seed", 1) == 0  # an empty folder will do
    assert "holds an earlier conversion" in refused(capsys, "luna", source, target)
    assert run("luna", source, target, "--overwrite") == 0
    assert not list(target.glob("*_abc.py"))  # nothing of the earlier one is left
    (target / "checkpoints").mkdir()
    assert "no conversion wrote" in refused(capsys, "abc", source, target, "--overwrite")
    assert "is a file" in refused(capsys, "abc", source, source / "config.json")
    assert "is SOURCE, or holds it" in refused(capsys, "abc", source, source, "--overwrite")
    assert "is SOURCE, or holds it" in refused(capsys, "abc", source, source.parent)


def test_a_target_that_is_a_link_stays_one(source, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for words in ([], ["--overwrite"]):
        assert run("abc", source, tmp_path / "link", *words) == 0
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_the_folder_it_runs_in_is_no_target(capsys, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in (".", tmp_path):
        assert "the folder that this runs in" in refused(capsys, "abc", source, target)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_nothing(capsys, source, tmp_path, monkeypatch):
    assert run("abc", source, tmp_path / "new") == 0
    before = (tmp_path / "new" / "model.safetensors").read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("luna_hf.LunaForMaskedLM.save_pretrained", full_disk)
    message = refused(capsys, "luna", source, tmp_path / "new", "--overwrite")
    assert "cannot be written (No space left on device)" in message
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == before
