"""What docs/ shows of converting the authors' checkpoints is what the commands print."""

import re
import shlex

import fairseq_luna
import pytest
import torch
import verify
from fairseq_format.checkpoint import open_original
from fairseq_format.verification import Report, Row
from gpt2_files import gpt2_folder, roberta_dictionary
from helpers import ROOT
from official_luna import CHECKPOINTS
from tiny_fairseq import genuine_folder, make_state, official_shapes, tiny_arguments, write_archive

PAGE = next(
    text
    for text in (path.read_text(encoding="utf-8") for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md"))
    if "Read luna.base.tied.zip" in text
)


@pytest.fixture(scope="module")
def base_archive(tmp_path_factory):
    """An archive of the published model's shape; its tensors each repeat one number, so it is small."""
    folder = tmp_path_factory.mktemp("base") / "luna.base.tied"
    folder.mkdir()
    sizes = {"encoder_layers": 12, "encoder_embed_dim": 768, "encoder_ffn_embed_dim": 3072}
    arguments = tiny_arguments(**sizes, encoder_attention_heads=12, max_positions=512, projection_length=128)
    shapes = official_shapes(arguments, 50265)
    weights = {name: torch.full((1,), 0.02).expand(shape) for name, shape in shapes.items()}
    weights |= {name: torch.ones(1).expand(weights[name].shape) for name in weights if name.endswith("norm.weight")}
    torch.save({**make_state({}, arguments), "model": weights}, folder / "model.pt")
    roberta_dictionary(folder / "dict.txt")
    gpt2_folder(folder)
    return write_archive(folder)


def test_the_output_for_the_published_archive(base_archive, monkeypatch):
    monkeypatch.chdir(base_archive.parent)
    (command,) = re.findall(r"^    python conversion/fairseq_luna.py (luna.base.*)$", PAGE, re.MULTILINE)
    (shown,) = re.findall(r"```\n(Read luna.base.*?)```", PAGE, re.DOTALL)
    options = fairseq_luna.parse(shlex.split(command))
    with open_original(options.source) as original:
        head = fairseq_luna.choose_head(original, options)
        model, unused = fairseq_luna.make_model(original, head)
        _, kind = fairseq_luna.make_tokenizer(original.dictionary, str(original.bpe), 50265, 512)
        assert "\n".join(fairseq_luna.describe(original, head, model, unused, kind)) + "\n" == shown


def shown_rows(pattern):
    """A table of the page, and its rows: `name` and `number number ...`."""
    (shown,) = re.findall(rf"```\n({pattern}.*?)```", PAGE, re.DOTALL)
    lines = [re.split(r" {2,}", line) for line in shown.splitlines()[1:]]
    return shown, {name: [float(word) for word in words if word[0].isdigit()] for name, *words in lines}


def test_the_table_of_verify(tmp_path, capsys):
    """Rounding depends on the machine, so the numbers are formatted again rather than measured."""
    shown, rows = shown_rows(" +tokens +packed\n")
    assert (CHECKPOINTS / "untied").relative_to(ROOT).as_posix() in PAGE
    source, target = str(genuine_folder(tmp_path / "source", "untied")), str(tmp_path / "untied")
    assert fairseq_luna.main([source, target]) == 0 and verify.main([target, source]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", printed, re.MULTILINE) for name in rows)
    streams = {1: ("",), 2: ("tokens", "packed")}
    made = [Row(name, *pair) for name, all in rows.items() for pair in zip(streams[len(all)], all, strict=True)]
    assert Report(made).ok and shown.rstrip("\n") in "\n".join(Report(made).lines())


def test_the_table_of_verify_with_rounding():
    shown, rows = shown_rows(" +tokens +float64 ")
    last, logits = rows["layer 12"], rows["logits"]
    made = [
        Row("embedding", "tokens", 0.0, exact=0.0),
        Row("layer 12", "tokens", last[0], last[2], exact=last[1]),
        Row("layer 12", "packed", last[3], last[5], exact=last[4]),
        Row("logits", "", logits[0], logits[2], exact=logits[1]),
    ]
    report = Report(made)
    assert report.ok and report.rounding
    lines = [line for line in report.lines() if "tokens  " in line or line.startswith(("layer 12", "logits"))]
    assert shown.splitlines() == lines
