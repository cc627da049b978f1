"""What docs/authors-checkpoints.md shows is what the commands print."""

import re
import shlex

import fairseq_luna
import luna_to_fairseq
import pytest
import torch
import verify
from fairseq_checkpoint import open_original
from gpt2_files import gpt2_folder, roberta_dictionary
from helpers import ROOT
from tiny_fairseq import GENUINE, make_state, official_shapes, small_gpt2_folder, tiny_arguments, write_archive
from transformers import AutoModelForMaskedLM
from verify_report import Report, Row

PAGE = (ROOT / "docs" / "authors-checkpoints.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def base_archive(tmp_path_factory):
    """An archive of the published model's shape, every tensor of which is one number: small, but of full size."""
    folder = tmp_path_factory.mktemp("base") / "luna.base.tied"
    folder.mkdir()
    sizes = {"encoder_layers": 12, "encoder_embed_dim": 768, "encoder_ffn_embed_dim": 3072}
    arguments = tiny_arguments(**sizes, encoder_attention_heads=12, max_positions=512, projection_length=128)
    shapes = official_shapes(arguments, 50265)
    weights = {name: torch.full((1,), 0.02).expand(shape) for name, shape in shapes.items()}
    weights |= {name: torch.ones(1).expand(weights[name].shape) for name in weights if name.endswith("norm.weight")}
    state = make_state({}, arguments)
    torch.save({**state, "model": weights}, folder / "model.pt")
    roberta_dictionary(folder / "dict.txt")
    gpt2_folder(folder)
    return write_archive(folder)


def test_the_first_lines_for_the_published_archive(base_archive, monkeypatch, tmp_path):
    monkeypatch.chdir(base_archive.parent)
    (command,) = re.findall(r"^    python (conversion/fairseq_luna.py luna.base.*)$", PAGE, re.MULTILINE)
    options = fairseq_luna.parse(shlex.split(command)[1:])
    with open_original(options.source) as original:
        head = fairseq_luna.choose_head(original, options)
        model, translated = fairseq_luna.make_model(original, head)
        tokenizer = fairseq_luna.make_tokenizer(original.dictionary, str(original.bpe), 50265, 512)[1]
        lines = fairseq_luna.describe(original, head, model, translated, tokenizer)
    (shown,) = re.findall(r"```\n(Read luna\.base.*?)```", PAGE, re.DOTALL)
    assert shown.splitlines() == lines


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The page's command for the tiny genuine file; GPT-2's files come from a folder, not the Hub."""
    folder = tmp_path_factory.mktemp("tiny")
    bpe = small_gpt2_folder(folder / "bpe")
    (command,) = re.findall(r"^    python conversion/fairseq_luna.py (tests/.*)$", PAGE, re.MULTILINE)
    source, target = shlex.split(command)
    assert fairseq_luna.main([str(ROOT / source), str(folder / target), "--gpt2-bpe", str(bpe)]) == 0
    return folder, folder / target


def test_the_table_of_verify(tiny, tmp_path, capsys):
    """The command runs, and the table is what it prints where float32 alone decides, which depends on the machine."""
    assert str((GENUINE / "untied").relative_to(ROOT)) in PAGE
    words = [str(GENUINE / "untied"), str(tmp_path / "untied"), "--gpt2-bpe", str(tiny[0] / "bpe")]
    assert fairseq_luna.main(words) == 0
    assert verify.main([words[1], words[0]]) == 0
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"```\n( +tokens +packed\n.*?)```", PAGE, re.DOTALL)
    rows = []
    for line in shown.splitlines()[1:]:
        layer, *differences = re.split(r" {2,}", line)
        streams = ("tokens", "packed") if len(differences) == 2 else ("",)
        rows += [Row(layer, *pair, exact=None) for pair in zip(streams, map(float, differences), strict=True)]
        assert re.search(rf"^{layer} ", printed, re.MULTILINE)
    report = Report(rows, [])
    assert report.ok and not report.rounding
    assert "\n".join(report.lines()).find(shown.rstrip("\n")) >= 0


def test_the_table_of_verify_with_rounding():
    (shown,) = re.findall(r"```\n( +tokens +float64 .*?)```", PAGE, re.DOTALL)
    _, last, logits = ([float(word) for word in line.split() if "." in word] for line in shown.splitlines())
    rows = [
        Row("layer 12", "tokens", last[0], last[2], exact=last[1]),
        Row("layer 12", "packed", last[3], last[5], exact=last[4]),
        Row("logits", "", logits[0], logits[2], exact=logits[1]),
    ]
    report = Report([Row("embedding", "tokens", 0.0, exact=0.0), *rows], [])
    assert report.ok and report.rounding
    printed = report.lines()
    header = next(line for line in printed if "tokens" in line)
    assert shown.splitlines() == [header, *(line for line in printed if line.startswith(("layer 12", "logits")))]


def test_the_way_back(tiny, monkeypatch):
    folder, _ = tiny
    (command,) = re.findall(r"^    python conversion/luna_to_fairseq.py (.*)$", PAGE, re.MULTILINE)
    monkeypatch.chdir(folder)
    words = [word.replace("luna-base-tied", "luna-tiny") for word in shlex.split(command)]
    assert luna_to_fairseq.main(words) == 0
    assert {path.name for path in (folder / words[1]).iterdir()} >= {
        "model.pt",
        "dict.txt",
        "encoder.json",
        "vocab.bpe",
    }


def test_the_example_of_the_readme(tiny, monkeypatch):
    folder, target = tiny
    (code,) = re.findall(r"```python\n([^`]*outputs/luna-base-tied.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(folder)
    scope = {}
    exec(code.replace("luna-base-tied", "luna-tiny"), scope)
    assert isinstance(scope["fill_mask"].model, type(AutoModelForMaskedLM.from_pretrained(target)))
