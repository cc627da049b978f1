"""What follows a conversion: the commands that are printed can run, and ABC sources keep what is theirs."""

import json
import re
import shlex

import pytest
import torch
from helpers import ROOT, SENTENCES, tiny_model, tiny_tokenizer
from test_conversion import convert, run, save_roberta
from tiny_training import pretrain_mlm, transfer_attention
from transformers import AutoModelForMaskedLM, RobertaModel

from luna_hf.memory_control import CONTROLS

LEARNED = ("mlp", "linformer")
FIRST = ["training/transfer_attention.py", "training/pretrain_mlm.py"]
READERS = dict(zip(FIRST, (transfer_attention.read_recipe, pretrain_mlm.read_recipe), strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "tiny-roberta"
    save_roberta(folder)
    return folder


def save_abc(folder, **fields):
    tokenizer = tiny_tokenizer(SENTENCES)
    tiny_model("abc_memory", "mlm", vocab_size=len(tokenizer), **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def recipes(said, target):
    """The printed commands as script and recipe, each checked against the model that was written."""
    found = []
    for line in said.splitlines():
        if not line.startswith("  python"):
            continue
        script, *words = shlex.split(line)[1:]
        recipe = READERS[script](words[0], [*words[1:], "--block_size", "32"])
        names = [name for name, _ in AutoModelForMaskedLM.from_pretrained(target).named_parameters()]
        if script == FIRST[0]:
            transfer_attention.TransferObjective().check(recipe)
        transfer_attention.check_groups(names, recipe.groups, recipe.max_steps)
        found.append((script, recipe))
    return found


@pytest.mark.parametrize("taps", [0, 5])
@pytest.mark.parametrize("control", [*CONTROLS, "luna"])
def test_the_next_commands_can_run(source, tmp_path, capsys, monkeypatch, control, taps):
    target = tmp_path / "new"
    size = {"luna": ["--projection-length", 8], "full": []}.get(control, ["--memory-size", 8])
    options = [] if control == "luna" else ["--memory-control", control]
    family = "luna" if control == "luna" else "abc"
    assert convert(family, source, target, *options, *size, *(["--conv-kernel-size", taps] if taps else [])) == 0
    said = capsys.readouterr().out
    monkeypatch.chdir(ROOT)
    found = recipes(said, target)
    scripts, starts = [script for script, _ in found], [recipe.model_name_or_path for _, recipe in found]
    if control in (*LEARNED, "luna") or (taps and control != "full"):
        assert scripts == FIRST and starts == [str(target), f"{target}-fitted"]
    elif control == "full" and not taps:
        assert not scripts and "Next" not in said
    else:
        assert scripts == FIRST[1:] and starts == [str(target)]
    groups = [group.match for group in found[-1][1].groups] if found else []
    assert bool(groups) == (control in (*LEARNED, "luna") or taps > 0)


@pytest.mark.parametrize("control", ["full", "cluster"])
def test_a_new_head_is_trained_too(tmp_path, capsys, control):
    save_roberta(tmp_path / "source", RobertaModel)
    assert convert("abc", tmp_path / "source", tmp_path / "new", "--memory-control", control) == 0
    assert len(recipes(capsys.readouterr().out, tmp_path / "new")) == 1


# ---- ABC sources ----

OWN = {
    "window": {"memory_control": "sliding_window", "memory_size": 9, "conv_kernel_size": 3},
    "random": {"memory_control": "random", "control_seed": 4, "share_control": False},
    "cluster": {"memory_control": "cluster", "cluster_iterations": 4},
    "mlp": {"memory_size": 9, "share_control": False, "control_activation": "relu"},
    "linformer": {"memory_control": "linformer", "memory_size": 9},
}


@pytest.mark.parametrize("kind", OWN)
def test_an_abc_source_keeps_its_own_fields(tmp_path, capsys, kind):
    save_abc(tmp_path / "source", **OWN[kind])
    assert convert("abc", tmp_path / "source", tmp_path / "new") == 0
    said, config = capsys.readouterr().out, config_of(tmp_path / "new")
    assert {name: config[name] for name in OWN[kind]} == OWN[kind]
    before, after = (AutoModelForMaskedLM.from_pretrained(tmp_path / name) for name in ("source", "new"))
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert "so it computes what" in said and "Next" not in said and "new: 0 parameters" in said


def test_what_is_given_replaces_a_field(tmp_path, capsys):
    save_abc(tmp_path / "source", **OWN["window"])
    assert (
        convert("abc", tmp_path / "source", tmp_path / "new", "--memory-control", "mlp", "--conv-kernel-size", 0) == 0
    )
    said, config = capsys.readouterr().out, config_of(tmp_path / "new")
    assert (config["memory_control"], config["memory_size"], config["conv_kernel_size"]) == ("mlp", 9, 0)
    assert "reads 9 slots a head (`mlp`) where that of" in said and "read 9 slots a head (`sliding_window`)" in said
    assert "convolution.weight" in said.split("unused")[1]


def test_options_are_checked_against_the_sources_own_control(tmp_path, capsys):
    save_abc(tmp_path / "source", **OWN["cluster"])
    assert convert("abc", tmp_path / "source", tmp_path / "new", "--control-seed", 3) == 2
    assert "--control-seed is an option of random, and without effect on cluster" in capsys.readouterr().err
    assert convert("abc", tmp_path / "source", tmp_path / "new", "--cluster-iterations", 3) == 0


def test_a_longer_linformer_starts_anew_and_says_so(tmp_path, capsys):
    save_abc(tmp_path / "source", **OWN["linformer"])
    assert convert("abc", tmp_path / "source", tmp_path / "new", "--max-length", 80) == 0
    said = capsys.readouterr().out
    assert "; the source's own (linformer, 36 x 64) does not fit" in said and "by another control than" in said
    assert [script for script, _ in recipes(said, tmp_path / "new")] == FIRST


@pytest.mark.parametrize("recipe", ["transfer_attention/tiny.yaml", "pretrain_mlm/abc-tiny-continue.yaml"])
def test_the_command_of_the_tiny_recipes(tmp_path, monkeypatch, recipe):
    head = (ROOT / "training" / "recipes" / recipe).read_text().replace("\\\n#", "")
    (words,) = re.findall(r"python conversion/roberta_to_abc\.py (.*)", head)
    save_abc(tmp_path / "outputs" / "full-tiny", memory_control="full", conv_kernel_size=5)
    monkeypatch.chdir(tmp_path)
    assert convert("abc", *shlex.split(words)) == 0
    config = config_of(tmp_path / "outputs" / "abc-tiny-start")
    assert (config["memory_control"], config["memory_size"], config["conv_kernel_size"]) == ("mlp", 16, 5)


def test_luna_keeps_the_convolution(tmp_path):
    save_abc(tmp_path / "source", memory_control="full", conv_kernel_size=3)
    assert run("luna", tmp_path / "source", tmp_path / "new") == 0
    assert config_of(tmp_path / "new")["conv_kernel_size"] == 3


@pytest.mark.parametrize(("family", "option"), [("abc", "--memory-size"), ("luna", "--projection-length")])
@pytest.mark.parametrize("more", [0, 1])
def test_more_slots_than_tokens_get_a_note(source, tmp_path, capsys, family, option, more):
    assert convert(family, source, tmp_path / "new", option, 64 + more) == 0
    said, card = capsys.readouterr().out, (tmp_path / "new" / "README.md").read_text()
    for text in (said, card):
        noted = re.search(r"is 65, but inputs are at most 64 tokens long: the memory costs more than attention", text)
        assert bool(noted) == bool(more)
