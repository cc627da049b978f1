"""Model cards: metadata for the Hub, the figures of the run, and no folders of this machine."""

import os
import re
import socket
from pathlib import Path

import pytest
from helpers import ROOT
from huggingface_hub import ModelCard
from tasks.plan import unique_labels
from tiny_training import run, write_corpus

from luna_hf.markdown import code, table
from luna_hf.scripting import portable, portable_command


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards")
    stated = {"model_name": "tiny-luna", "language": "de", "license": ""}
    figures = run(folder / "checkpoint", data=write_corpus(folder / "texts"), **stated)
    return ModelCard.load(folder / "checkpoint" / "README.md"), figures, folder


def test_metadata_is_what_the_hub_reads(made):
    metadata, figures = made[0].data, made[1]
    assert (metadata.library_name, metadata.pipeline_tag) == ("transformers", "fill-mask")
    assert (metadata.license, metadata.language, metadata.model_name) == (None, "de", "tiny-luna")
    assert {"luna", "custom_code"} <= set(metadata.tags)
    results = {result.metric_type: result.metric_value for result in metadata.eval_results}
    assert results == {name: round(figures[f"held_out_{name}"], 4) for name in ("loss", "accuracy")}


def test_figures_are_those_of_the_run(made):
    text, figures = " ".join(made[0].text.split()), made[1]
    assert f"| this model | {figures['held_out_loss']:.3f} | {figures['held_out_accuracy']:.1%} |" in text
    assert f"| {figures['unigram_loss']:.3f} | {figures['unigram_accuracy']:.1%} |" in text
    assert f"{figures['held_out_targets']:,} held-out" in text
    assert f"{figures['parameters']:,} parameters" in text
    for name in ("corpus", "hardware", "versions", "command"):
        assert figures[name] in text
    assert "max_steps: 3" in text and "![Loss by step](loss.png)" in text


def test_card_is_filled_completely_and_names_no_folder_of_the_machine(made):
    content, folder = made[0].content, made[2]
    assert not re.search(r"\$\{?\w", content)
    machine = [str(folder), str(ROOT), str(Path.home()), os.getcwd(), socket.gethostname()]
    assert [name for name in machine if name in content] == []
    # Absolute paths of any kind: a slash that starts a word and leads to another.
    assert re.findall(r"(?<![\w:.<`/])/\w+/", content) == []
    assert "--output_dir checkpoint" in content and "--data texts" in content


def test_paths_and_commands_are_portable(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert portable(str(ROOT / "outputs" / "demo")) == portable("outputs/demo") == "outputs/demo"
    assert portable("/home/someone/texts") == "texts"
    words = ["python", "x.py", str(ROOT / "a.yaml"), "--data=/home/someone/texts", "--fill_mask", "[A <mask>.]"]
    assert portable_command(words) == "python x.py a.yaml --data=texts --fill_mask '[A <mask>.]'"
    words = ["--data", "[{path: /home/someone/texts, weight: 1}]", '--data=["/home/x/a.txt", https://host/b, ./c]']
    assert portable_command(words) == "--data '[{path: texts, weight: 1}]' '--data=[\"a.txt\", https://host/b, ./c]'"


@pytest.mark.parametrize(
    ("token", "cell"), [(" end", "`end`"), ("\n", "`'\\n'`"), ("`", "`` ` ``"), ("a|b", "`a|b`"), ("", "`''`")]
)
def test_any_token_fits_into_a_table(token, cell):
    assert code(token) == cell
    escaped = cell.replace("|", "\\|")
    assert table(["a"], [[code(token)], ["x|y"]]) == f"| a |\n| --- |\n| {escaped} |\n| x\\|y |"


@pytest.mark.parametrize(
    ("models", "labels"),
    [
        (["."], ["here"]),
        (["./"], ["here"]),
        (["../here/"], ["here"]),
        ([".."], ["models"]),
        (["../a/tiny", "../b/tiny/"], ["a-tiny", "b-tiny"]),
        (["someone/tiny"], ["tiny"]),
    ],
)
def test_models_are_named_after_their_folders(models, labels, tmp_path, monkeypatch):
    (tmp_path / "models" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models" / "here")
    assert list(unique_labels(models).values()) == labels
