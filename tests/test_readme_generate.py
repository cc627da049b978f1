"""The README's section "Generate": its commands and examples run, its output and figures are the committed ones."""

import json
import re
import shlex

import pytest
from helpers import ROOT, run_python
from tiny_training import SHRINK, pretrain_clm, write_corpus

import evaluate_perplexity  # isort: skip  # tiny_training has put the scripts on the path

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("\n## Generate\n")[1].split("\n## ")[0]
TEXT = " ".join(SECTION.split())
RESULTS = ROOT / "experiments" / "results"
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", SECTION, re.DOTALL)
OWN = ("luna-64", "abc-mlp-64", "abc-window-64")


def result(name):
    (path,) = ROOT.glob(f"*/results/{name}-torch2.13.0.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Where the section's command has left its checkpoint, in small."""
    folder = tmp_path_factory.mktemp("readme")
    write_corpus(folder / "texts")
    line = re.findall(r"^    (python [^\n#]*)", SECTION, re.MULTILINE)[0]
    script, recipe = shlex.split(line)[1:]
    assert script == "training/pretrain_clm.py"
    small = {**SHRINK, "model.num_attention_heads": 4, "data": "texts", "sample_tokens": 2}
    shrunk = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        assert pretrain_clm.main([str(ROOT / recipe), *shrunk]) == 0
    return folder


def test_the_pipeline_example_runs_on_what_the_command_leaves(workplace):
    code, _ = BLOCKS[0]
    written = run_python(f"import os; os.chdir({str(workplace)!r})\n{code}")
    prompt = re.search(r'generate\("(.*?)"', code)[1]
    assert written.startswith(prompt) and len(written) > len(prompt) + 1


def test_perplexity_is_evaluated_as_shown(workplace, monkeypatch, capsys):
    line = re.findall(r"^    (python [^\n#]*)", SECTION, re.MULTILINE)[1]
    script, *words = shlex.split(line)[1:]
    assert script == "training/evaluate_perplexity.py"
    monkeypatch.chdir(workplace)
    small = ["--lengths", "16", "64", "--tokens", "128", "--part", "16"]
    assert evaluate_perplexity.main([*words, *small]) == 0
    assert "carried state" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["clm-demo-cpu-float32", "perplexity-enwiki-cpu-float32"])
def test_results_say_how_they_were_made(name):
    figures = result(name)
    assert figures["command"].startswith("python training/") and figures["hardware"]
    assert "torch 2.13.0" in figures["versions"]
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", json.dumps(figures))


def test_the_output_shown_is_the_demos():
    code, shown = BLOCKS[0]
    figures = result("clm-demo-cpu-float32")
    asked = next(row for row in figures["continuations"] if row["prompt"] in code)
    whole = asked["prompt"] + asked["greedy"]
    assert whole.startswith(shown.strip()) and len(shown.strip()) > len(asked["prompt"]) + 20


def test_demo_figures():
    figures = result("clm-demo-cpu-float32")
    assert figures["command"].startswith("python training/pretrain_clm.py") and "torch 2.13.0" in figures["versions"]
    for fact in (
        f"{figures['parameters'] / 1e6:.1f} M parameters",
        f"perplexity of {figures['held_out_perplexity']:.0f}",
        f"{figures['held_out_targets']:,} tokens",
        f"unigram frequencies have {2.718281828459045 ** figures['unigram_loss']:.0f}",
    ):
        assert fact in TEXT, fact


def test_the_state_example_prints_what_the_readme_says():
    code, shown = BLOCKS[1]
    assert run_python(code) == shown
    sizes = {line.split(", ")[1] for line in shown.splitlines()}
    assert len(sizes) == 1 < len(shown.splitlines())


def test_speed_figures():
    measured = result("generation-4-layer-cpu-float32")
    assert all(check["holds"] for check in measured["floors"])
    last = measured["lengths"][-1]
    assert last["length"] == 16384
    models = last["models"]
    over = {peer: [models[name]["speed_over"][peer]["median"] for name in OWN] for peer in measured["peers"]}
    said = {peer: f"{min(ratios):.1f} to {max(ratios):.1f} times" for peer, ratios in over.items()}
    assert f"{said['gpt2']} as fast as GPT-2 of the same size with its KV cache" in TEXT
    assert f"and {said['gpt2-static']} with transformers' `StaticCache`" in TEXT
    growth = [measured["growth"][name]["median"] for name in OWN]
    assert f"a token after 16,384 costs {min(growth):.2f} to {max(growth):.2f} times one after 1,024" in TEXT
    state = [models[name]["state_bytes"] / 2**20 for name in OWN]
    assert (
        f"state of {min(state):.1f} to {max(state):.1f} MiB against {models['gpt2']['state_bytes'] / 2**20:.0f}" in TEXT
    )


def test_scan_figures():
    measured = result("causal-attention-cpu-float32")
    assert all(check["holds"] for check in measured["floors"])
    (row,) = (row for row in measured["lengths"] if row["length"] == 8192)
    for mode, words in (("forward", "forward"), ("backward", "with backward")):
        ratios = [row["contenders"][name][mode]["speed_over"]["sdpa"]["median"] for name in ("luna", "abc")]
        assert f"{ratios[0]:.1f} (Luna) and {ratios[1]:.1f} (ABC) times as fast {words}" in TEXT


def test_the_perplexity_table_is_the_measured_one():
    table = (RESULTS / "perplexity-enwiki-cpu-float32-torch2.13.0.md").read_text(encoding="utf-8").strip()
    assert table in SECTION
    measured = result("perplexity-enwiki-cpu-float32")
    models = {model["model"]: model for model in measured["models"]}
    assert {*OWN, "gpt2"} <= models.keys()
    assert all(model["mode"] == "carried" for name, model in models.items() if name != "gpt2")
    assert f"the same {models['luna-64']['tokens']:,} tokens" in TEXT
    for name, model in models.items():
        for length, figures in model["lengths"].items():
            column = sorted(map(int, model["lengths"])).index(int(length))
            cells = next(row for row in table.splitlines() if row.startswith(f"| {name} |")).split(" | ")
            assert cells[3 + column] == f"{figures['perplexity']:.2f}"
