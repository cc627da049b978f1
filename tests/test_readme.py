"""The README's code runs, its commands exist, and its figures are those of the committed results."""

import json
import re
import shlex
import sys

import pytest
from helpers import ROOT, SENTENCES, run_python, tiny_model, tiny_tokenizer

sys.path.insert(0, str(ROOT / "experiments"))
sys.path.insert(0, str(ROOT / "training"))

import swap_report

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
# A block of code, and the block of output right behind it, if there is one.
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", README, re.DOTALL)


def result(name):
    (path,) = ROOT.glob(f"*/results/{name}-torch2.13.0.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def demo_folder(tmp_path):
    """What `make demo` leaves, in small."""
    tokenizer = tiny_tokenizer([*SENTENCES, "Return the value if the object is a string, False otherwise."])
    folder = tmp_path / "outputs" / "luna-demo"
    tiny_model("luna", "mlm", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tmp_path


def test_the_fill_mask_example_runs(demo_folder):
    code, shown = BLOCKS[0]
    assert "outputs/luna-demo" in code
    lines = run_python(f"import os; os.chdir({str(demo_folder)!r})\n{code}").splitlines()
    assert len(lines) == len(shown.splitlines())
    assert all(re.fullmatch(r".*\d\.\d\d", line) for line in lines)


def test_the_fill_mask_output_is_the_demos():
    code, shown = BLOCKS[0]
    figures = result("demo-cpu-float32")
    asked = next(row for row in figures["fill_mask"] if row["sentence"] in code)
    expected = [f"{guess['token'].strip()} {guess['score']:.2f}" for guess in asked["guesses"]]
    assert shown.splitlines() == expected


def test_the_model_example_prints_what_the_readme_says():
    code, shown = next(block for block in BLOCKS if "LunaModel(LunaConfig())" in block[0])
    assert run_python(code) == shown


def test_demo_figures():
    figures = result("demo-cpu-float32")
    assert figures["command"].startswith("python training/pretrain_mlm.py") and figures["hardware"]
    assert "torch 2.13.0" in figures["versions"]
    row = f"{figures['held_out_loss']:.3f} | {100 * figures['held_out_accuracy']:.1f} %"
    baseline = f"{figures['unigram_loss']:.3f} | {100 * figures['unigram_accuracy']:.1f} %"
    assert f"| {figures['parameters'] / 1e6:.1f} M parameters |".replace("| ", "") in README
    assert f"| {row} |" in README and f"| {baseline} |" in README
    assert f"{figures['held_out_targets']:,}" in README


def speed_rows(heading):
    """First cell and the others of every row of a section that begins with a length."""
    section = README.split(f"\n{heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\| (\d[\d,]*) \| (.+) \|$", section, re.MULTILINE)


def test_abc_speed_figures():
    forward = result("encoder-forward-1-layer-abc-cpu-float32")
    rows = {row["length"]: row["models"] for row in forward["lengths"]}
    table = speed_rows("### ABC")
    assert {int(length.replace(",", "")) for length, _ in table} == set(rows)
    for length, cells in table:
        models = rows[int(length.replace(",", ""))]
        names = ["abc-mlp-64", "abc-mlp-128", "luna-untied"]
        expected = [f"{models[name]['speed_over']['roberta']['median']:.2f}" for name in names]
        expected += [
            f"{models[name]['peak_memory_bytes'] / 2**20:.0f}" for name in ("abc-mlp-64", "abc-mlp-128", "roberta")
        ]
        assert cells.split(" | ") == expected, length
    text = " ".join(README.split())
    (row,) = result("encoder-forward-1-layer-eager-cpu-float32")["lengths"]
    ratios = speeds(row, "roberta-eager")
    assert f"Against unfused attention on this CPU it is {ratios} times" in text
    growth = [forward["growth"]["exponents"][f"abc-mlp-{size}"]["median"] for size in (64, 128)]
    assert f"to the power {growth[0]:.2f} (64 slots) and {growth[1]:.2f} (128) from 2K to 16K" in text
    assert f"from about {round(forward['wins']['abc-mlp-128']['roberta']):,} tokens on" in text
    (row,) = result("encoder-mlm_step-4-layer-abc-cpu-float32")["lengths"]
    assert f"A masked-LM step of 4 layers at 512 tokens is {speeds(row)} times as fast" in text
    (row,) = result("encoder-forward-1-layer-abc-cpu-bfloat16")["lengths"]
    assert f"ABC is {speeds(row)} times as fast as RoBERTa at 4,096 tokens" in text
    padded = [
        model["padded_over_unpadded"]["median"]
        for row in result("encoder-forward-2-layer-padding-abc-cpu-float32")["lengths"]
        for name, model in row["models"].items()
        if name.startswith("abc")
    ]
    assert f"a padded batch costs {min(padded):.2f} to {max(padded):.2f} times an unpadded one" in text


def test_figures_of_the_other_controls():
    measured = result("encoder-forward-1-layer-controls-cpu-float32")
    rows = {row["length"]: row["models"] for row in measured["lengths"]}
    names = [name for name in rows[2048] if name.startswith("abc-") and name not in ("abc-mlp-64", "abc-full")]
    assert len(names) == 7
    said = []
    for length in (2048, 16384):
        ratios = [rows[length][name]["speed_over"]["roberta"]["median"] for name in names]
        said.append(f"{min(ratios):.2f} to {max(ratios):.2f} times")
    text = " ".join(README.split())
    assert f"{said[0]} as fast as RoBERTa at 2,048 tokens and {said[1]} at 16,384" in text
    growth = max(measured["growth"]["exponents"][name]["median"] for name in [*names, "abc-mlp-64"])
    assert f"no exponent is above {growth:.2f}" in text


def speeds(row, peer="roberta"):
    """Speed of ABC with 64 and with 128 slots over a peer's."""
    return " and ".join(f"{row['models'][f'abc-mlp-{size}']['speed_over'][peer]['median']:.2f}" for size in (64, 128))


def test_speed_figures():
    """Every row `| length | untied | tied | ... |` of the speed table, against the JSON."""
    forward = result("encoder-forward-1-layer-cpu-float32")
    rows = {row["length"]: row["models"] for row in forward["lengths"]}
    table = speed_rows("## Speed and memory")
    assert {int(length.replace(",", "")) for length, _ in table} == set(rows)
    for length, cells in table:
        models = rows[int(length.replace(",", ""))]
        expected = [
            f"{models[model]['speed_over'][peer]['median']:.2f}"
            for peer in ("roberta", "modernbert")
            for model in ("luna-untied", "luna-tied")
        ]
        expected += [f"{models[m]['peak_memory_bytes'] / 2**20:.0f}" for m in ("luna-tied", "roberta", "modernbert")]
        assert cells.split(" | ") == expected, length


def test_training_step_and_padding_figures():
    text = " ".join(README.split())
    for layers in (4, 12):
        (row,) = result(f"encoder-mlm_step-{layers}-layer-cpu-float32")["lengths"]
        untied, tied = (row["models"][n]["speed_over"]["roberta"]["median"] for n in ("luna-untied", "luna-tied"))
        assert f"{untied:.2f} (untied) and {tied:.2f} (tied) times as fast with {layers} layers" in text
        untied, tied = (row["models"][n]["speed_over"]["modernbert"]["median"] for n in ("luna-untied", "luna-tied"))
        assert f"{untied:.2f} and {tied:.2f} with {layers}" in text
    (row,) = result("encoder-forward-1-layer-cpu-bfloat16")["lengths"]
    assert f"{row['models']['luna-tied']['speed_over']['roberta']['median']:.1f} times as fast as RoBERTa in" in text
    padded = [
        model["padded_over_unpadded"]["median"]
        for row in result("encoder-forward-2-layer-padding-cpu-float32")["lengths"]
        for name, model in row["models"].items()
        if name.startswith("luna")
    ]
    assert f"{min(padded):.2f} to {max(padded):.2f} times an unpadded one" in text


def test_growth_and_crossing_figures():
    text, forward = " ".join(README.split()), result("encoder-forward-1-layer-cpu-float32")
    exponents, wins = forward["growth"]["exponents"], forward["wins"]
    growth = [exponents[name]["median"] for name in ("luna-tied", "roberta")]
    assert f"to the power {growth[0]:.2f} (tied) from 2K to 16K, RoBERTa's with {growth[1]:.2f}" in text
    tied, untied = (round(wins[name]["roberta"]) for name in ("luna-tied", "luna-untied"))
    assert f"from about {tied:,} tokens (tied) and {untied:,} (untied) on" in text


def test_the_guarantees_table_is_the_measured_one():
    measured = (RESULTS / "guarantees-cpu-float32-torch2.13.0.md").read_text(encoding="utf-8")
    rows = [line for line in measured.splitlines() if line.startswith("|")]
    assert rows and "\n".join(rows) in README


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", README)) - {"one"}:
        assert f"\n{target}:" in makefile, target
    for command in re.findall(
        r"^    (python (?:training|benchmarks|experiments|conversion)/[^\\\n]*)", README, re.MULTILINE
    ):
        words = [word for word in shlex.split(command) if word.endswith((".py", ".yaml"))]
        assert words and all((ROOT / word).exists() for word in words), command
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_swap_figures():
    """The table of "Warm-start" is the measured one, and so are the sentences below it."""
    swapped = result("swap-pretrain-cpu-bfloat16")
    section = README.split("\n## Warm-start from RoBERTa\n")[1].split("\n## ")[0]
    text = " ".join(section.split())
    assert swap_report.summary(swapped) in section
    assert f"(unigram entropy {swapped['teacher']['unigram_loss']:.2f})" in text
    assert f"after {swapped['steps']:,} more steps" in text and f"{swapped['transfer_steps']} are transfer" in text
    assert swapped["goal"] == 0.02
    found = {run["name"]: run for run in swapped["runs"]}
    window = found["window-64-peak"]["swapped_loss"] - swapped["teacher"]["held_out_loss"]
    assert f"loses {window:.2f} nats by the swap" in text
    near = {name for name, run in found.items() if run["over_twin"] <= swapped["goal"]} - {
        name for name in found if name.startswith("teacher")
    }
    assert near == {name for name in found if name.startswith("window")}, "only windows are said to be near"
    scores = {
        name: own["scores"] for name, own in result("swap-finetune-cpu-bfloat16")["tasks"]["qnli"]["models"].items()
    }
    means = {name: 100 * sum(score["accuracy"] for score in own) / len(own) for name, own in scores.items()}
    qnli = [
        means[name] for name in ("window-64-peak", "teacher-peak", "mlp-128-conv-transfer-peak", "luna-128-conv-peak")
    ]
    window, teacher, mlp, luna = (f"{mean:.1f} %" for mean in qnli)
    assert f"at chance ({window}); the teacher has {teacher}, `mlp-128` {mlp}, `luna-128` {luna}" in text
    order = [found[f"{system}-64-peak"]["final_loss"] for system in ("luna", "mlp", "linformer", "random")]
    assert order == sorted(order)
    pairs = [(found[f"{system}-random-peak"], found[f"{system}-peak"]) for system in ("mlp-64", "linformer-64")]
    gains = [paper["final_loss"] - ours["final_loss"] for paper, ours in pairs]
    assert all(0.45 < gain < 0.65 for gain in gains), "0.5 nats"


def test_learning_figures():
    """The rows of "What it learns" against the runs, and the sentences against the conclusions."""
    learnt = result("learning-pretrain-cpu-bfloat16")
    section = README.split("\n## What it learns\n")[1].split("\n## ")[0]
    systems = ["luna-32", "roberta", "luna-conv", "roberta-conv", "luna-conv-1"]
    rows = re.findall(r"^\| (?!system|---)(.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert len(rows) == len(systems)
    for (_, losses, accuracy), system in zip(rows, systems, strict=True):
        runs = sorted((run for run in learnt["runs"] if run["system"] == system), key=lambda run: run["seed"])
        assert losses == ", ".join(f"{run['final_loss']:.3f}" for run in runs)
        mean = sum(run["curve"]["accuracy"][-1] for run in runs) / len(runs)
        assert accuracy == f"{100 * mean:.1f} %"
    assert f"is {learnt['unigram_loss']:.2f} nats" in section
    reached = learnt["conclusions"]["luna_conv_reaches_roberta"]
    shares = [100 * seed["share"] for seed in reached["seeds"]]
    assert f"{min(shares):g} to {max(shares):g} % of the steps" in " ".join(section.split())
    recipe = learnt["recipe"]
    for fact in (f"{recipe['max_steps']:,} steps of {recipe['global_batch_tokens']:,} tokens", "blocks of 64"):
        assert fact in section
    assert recipe["block_size"] == 64 and learnt["body"]["num_hidden_layers"] == 2
