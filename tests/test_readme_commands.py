"""The commands of the README's sections from Finetune to Reproduce run as they stand, on small data."""

import re
import shlex
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import ROOT
from test_benchmarks import TINY, encoder, guarantees
from test_benchmarks_causal import causal, generation
from test_learning import SHRINK_WORDS, learning
from test_learning import data as learning_data  # noqa: F401  a fixture
from test_multiple_choice import csqa_rows, finetune_csqa, finetune_race, race_rows, write_split
from test_swap import SHRINK as SWAP_SHRINK
from test_swap import swap
from tiny_finetuning import SHORT, checkpoint, finetune_glue, glue_folder, topics, write_rows
from tiny_training import SHRINK, pretrain_mlm, transfer_attention, without_model_section, write_corpus
from transformers import AutoModelForMaskedLM

sys.path.insert(0, str(ROOT / "conversion"))  # the scripts import their sibling plainly

import from_roberta

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(section):
    """The `python` commands of a section, their continued lines joined, as (script, words)."""
    body = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    (python (?:[^\n]*\\\n)*[^\n]*)$", body, re.MULTILINE)
    words = [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]
    return [(line[1], line[2:]) for line in words]


def ids(section):
    return [f"{number}-{script.split('/')[-1]}" for number, (script, _) in enumerate(commands(section))]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the commands name: checkpoints, texts, and files of one's own."""
    folder = tmp_path_factory.mktemp("readme")
    checkpoint(folder / "outputs" / "luna-demo")
    checkpoint(folder / "roberta", "roberta")
    write_corpus(folder / "texts")
    glue_folder(folder / "glue")
    for name, seed in (("train", 0), ("dev", 1)):
        texts, labels = topics(32, seed)
        write_rows(folder / f"{name}.csv", {"text": texts, "label": [["no", "yes"][label] for label in labels]})
    for split, seed in (("train", 0), ("validation", 1)):
        for level in ("middle", "high"):
            write_split(folder / "race" / level / f"{split}.parquet", race_rows(8, level, seed))
        write_split(folder / "csqa" / f"{split}.parquet", csqa_rows(8, seed))
    return folder


def here(words):
    """The words with the repository's files and the stand-in for RoBERTa, since commands run in another folder."""
    words = [str(ROOT / word) if word.startswith("training/") else word for word in words]
    return ["roberta" if word == "FacebookAI/roberta-base" else word for word in words]


@pytest.mark.parametrize("number", range(len(commands("Finetune"))), ids=ids("Finetune"))
def test_finetuning_commands(workplace, monkeypatch, capsys, number):
    script, words = commands("Finetune")[number]
    module = {"finetune_glue": finetune_glue, "finetune_race": finetune_race, "finetune_csqa": finetune_csqa}[
        script.split("/")[-1].removesuffix(".py")
    ]
    data = {finetune_glue: "glue", finetune_race: "race", finetune_csqa: "csqa"}[module]
    own_files = "--train_file" in words
    small = {**SHORT, "num_train_epochs": 1, **({} if own_files else {"dataset_name": data})}
    if any("paper.yaml" in word for word in words):
        small |= {"seeds": 1, "sweep_batch_sizes": 16}
    monkeypatch.chdir(workplace)
    shrunk = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    assert module.main([*here(words), *shrunk]) == 0, capsys.readouterr().err
    output = workplace / words[words.index("--output_dir") + 1]
    assert (output / "results.json").is_file()
    table = (output / "results.md").read_text()
    assert "luna-demo" in table and ("roberta" in table) == ("FacebookAI/roberta-base" in words)


@pytest.mark.parametrize("number", range(len(commands("Pretrain"))), ids=ids("Pretrain"))
def test_pretraining_commands(workplace, monkeypatch, capsys, number):
    script, words = commands("Pretrain")[number]
    assert script == "training/pretrain_mlm.py"
    monkeypatch.chdir(workplace)
    # What the command says itself comes last, and wins.
    shrunk = [
        word
        for name, value in {**SHRINK, "model.num_attention_heads": 4, "data": "texts"}.items()
        for word in (f"--{name}", str(value))
    ]
    assert pretrain_mlm.main([*here(words[:1]), *shrunk, *words[1:]]) == 0, capsys.readouterr().err
    assert list((workplace / "outputs").glob("*/metrics.json"))


def test_warm_start_commands(workplace, monkeypatch, capsys):
    """In order: each goes on from what the one before has written."""
    monkeypatch.chdir(workplace)
    small = {**SHRINK, "data": "texts", "block_size": 32, "save_steps": 100}
    shrunk = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    conversions = {"roberta_to_abc": from_roberta.AbcConversion(), "roberta_to_luna": from_roberta.LunaConversion()}
    scripts = {"transfer_attention": transfer_attention, "pretrain_mlm": pretrain_mlm}
    run = []
    for script, words in commands("Warm-start from RoBERTa"):
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        run.append(script.split("/")[-1].removesuffix(".py"))
        if conversion := conversions.get(run[-1]):
            status = from_roberta.main(conversion, "", here(words))
        else:
            words = here(words)
            status = scripts[run[-1]].main(without_model_section([*words, *shrunk]))
        assert status == 0, capsys.readouterr().err
    assert run == ["roberta_to_abc", "roberta_to_luna", "transfer_attention", "pretrain_mlm"]
    made = AutoModelForMaskedLM.from_pretrained(workplace / "outputs" / "abc-base")
    assert made.config.model_type == "abc_memory" and made.config.max_position_embeddings == 4096
    assert torch.isfinite(made(torch.arange(5, 45)[None]).logits).all()


def test_reproducing_commands(learning_data, tmp_path):  # noqa: F811
    """In order, since the last ones read what the ones before have written."""
    systems = ["--systems", "roberta", "luna-conv"]
    where = ["--data", str(learning_data), "--runs", str(tmp_path / "runs")]
    base = tmp_path / "runs" / "pretrain" / "roberta-seed0"
    swapped = ["--data", str(learning_data), "--runs", str(tmp_path / "swap")]
    swaps = ["--base", str(base), "--systems", "teacher", "window-64", "--rates", "peak"]
    few = [word for name, value in SWAP_SHRINK.items() for word in (f"--{name}", str(value))]
    small = {
        ("encoder.py", ""): [*TINY, "--output", str(tmp_path)],
        ("guarantees.py", ""): ["--models", "LunaModel", "--no-cost", "--output", str(tmp_path)],
        ("learning.py", "pretrain"): [*where, *systems, *SHRINK_WORDS],
        ("learning.py", "speed"): [*where, "--rounds", "1"],
        ("learning.py", "finetune"): [*where, "--systems", "luna-conv", "--tasks", "sst2", "--max_steps", "2"],
        ("learning.py", "report"): ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path)],
        ("swap.py", "run"): [*swapped, *swaps, *few],
        ("swap.py", "finetune"): [*swapped, "--tasks", "sst2", "--max_steps", "2"],
        ("swap.py", "report"): ["--runs", str(tmp_path / "swap"), "--results", str(tmp_path)],
    }
    # Run as scripts in tests/test_benchmarks_causal.py.
    parsed = {"causal.py": causal, "generation.py": generation}
    modules = {"encoder.py": encoder, "guarantees.py": guarantees, "learning.py": learning, "swap.py": swap}
    for script, words in commands("Reproduce"):
        name = script.split("/")[-1]
        if name in parsed:
            assert parsed.pop(name).parse(words)
            continue
        what = (name, words[0] if name in ("learning.py", "swap.py") else "")
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        assert not modules[name].main([*words, *small.pop(what)]), what
    assert not small and not parsed  # the section has all of them
    written = {path.name.split("-cpu")[0] for path in tmp_path.glob("*.json")}
    assert {"encoder-forward-2-layer", "guarantees", "learning-pretrain", "learning-finetune"} <= written
    assert {"swap-pretrain", "swap-finetune"} <= written


def test_the_table_of_pretraining_options_names_options_that_exist():
    """Every `--key` in the Pretrain section is a key of the recipes, in its own form."""
    body = README.split("\n## Pretrain\n")[1].split("\n## ")[0]
    keys = {field.replace("_", "-") for field in pretrain_mlm.PretrainRecipe.__dataclass_fields__}
    written = {key.replace("_", "-") for key in re.findall(r"--([a-z][a-z_-]+)", body)} - {"config-file", "model"}
    assert written and written <= keys, written - keys
