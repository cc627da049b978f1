"""Names, labels and texts of data in cards: a reader of Markdown shows them as they are, and renders nothing."""

from pathlib import Path
from types import SimpleNamespace

import finetune_embeddings
import from_roberta
import pytest
import torch
import train_translation
import translation.card
from common.cards import fill_card
from fairseq_format import card as fairseq
from helpers import tiny_model
from huggingface_hub import ModelCard, ModelCardData
from markdown_it import MarkdownIt
from tasks import report
from tiny_translation import arguments

import luna_hf.convert.card
from luna_hf.markdown import bullets, code, code_block, escape, fill, quoted, table

IMAGE, LINK = "<img src=x onerror=alert(1)>", "[free](http://evil.example)"
READER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
SHOWN = ("text", "text_special", "code_inline")


def parts(card):
    """The elements of a card."""
    blocks = READER.parse(card.partition("\n---\n")[2] if card.startswith("---\n") else card)
    return [part for block in blocks for part in (block, *(block.children or []))]


def shown(card):
    """The text that a reader sees."""
    return " ".join("".join(part.content for part in parts(card) if part.type in SHOWN).split())


def kinds(card):
    return {part.type for part in parts(card)} - {"inline", "paragraph_open", "paragraph_close", *SHOWN}


TEXTS = [
    *(IMAGE, LINK, f"</details>{IMAGE}", "![a](b)", "[a]: b", "<http://x.y>", "&lt;b&gt;", "1 < 2 & 3 > 2"),
    *("*x* **y** _z_ __z__ ~~z~~", "a_b c_d_", "- a", "+", "# a", "1. a", "2) a", "---", "=== x", "> q", "-0.5"),
    *("a | b", "a\\|b", "\\", "\\<b>", "``", "x `` y", "` x", "```sh", "$x$ $$y$$", "C#", "\N{FULL BLOCK} Привет"),
]
MADE = {
    "text": lambda text: escape(text),
    "code": lambda text: code(text),
    "heading": lambda text: fill("# $text", text=text),
    "item": lambda text: bullets([text]),
    "cell": lambda text: table(["", ""], [[text, code(text)]]),
}


@pytest.mark.parametrize("place", MADE)
def test_a_text_is_shown_as_it_is(place):
    for text in TEXTS:
        card = MADE[place](text)
        assert shown(card) == text * (2 if place == "cell" else 1)
        assert kinds(card) == kinds(MADE[place]("word")), text


@pytest.mark.parametrize("place", MADE)
def test_a_text_takes_one_line_and_fits_into_a_file(place):
    card = MADE[place]("a\n\n# b\r\v\f\x1c\x85\u2028c\0\x1b[2J\udcd0\udc9f\ud800")
    assert len(card.splitlines()) == len(MADE[place]("word").splitlines())
    assert kinds(card) == kinds(MADE[place]("word")) and card.encode() and "\x1b" not in card


def test_code_between_backticks_stays_code():
    assert escape("`a_*b*` and *c*") == "`a_*b*` and \\*c\\*"
    assert escape(f"The labels `{IMAGE}` and `x` {LINK}").count("<img") == 1
    assert kinds(escape(f"The tokenizer of `a ` {IMAGE} ` b` {LINK}")) == set()


def test_a_block_of_code_ends_where_it_should():
    blocks = READER.parse(code_block(f"a\n```\n{IMAGE}\n  ````\n", "yaml"))
    assert [(block.type, block.info, block.content) for block in blocks] == [
        ("fence", "yaml", f"a\n```\n{IMAGE}\n  ````\n")
    ]
    assert eval(quoted('a"\n\\')) == 'a"\n\\'


# ---- the cards ----

BAD = f"{IMAGE} {LINK} ` ``` </details> a | b\n\n# PWNED\n\n```\n{IMAGE}"


def finetuned(folder):
    task = SimpleNamespace(
        name="own", title=BAD, dataset=BAD, dataset_name=None, dataset_config=None, problem_type="", pipeline_tag=BAD
    )
    task.model_fields = lambda: {"id2label": {0: BAD, 1: "x"}}
    task.usage = lambda name, trust: f"load({name}{trust})"
    training = SimpleNamespace(hub_model_id=None, bf16=False, fp16=False)
    training.to_dict = lambda: dict.fromkeys(report._CARD_OPTIONS, BAD)
    result = dict.fromkeys(("model", "model_name_or_path", "hardware", "versions", "development", "main_metric"), BAD)
    result |= dict.fromkeys(("batch_size", "seed", "max_length", "steps", "best_step", "processes", "parameters"), 1)
    result |= dict.fromkeys(("epochs", "seconds", "samples_per_second", "tokens_per_second", "learning_rate"), 1.0)
    result |= {"model_type": "luna", "dropout": None, "resumed_from_step": 0, "notes": [BAD]}
    result["scores"] = {BAD: {BAD: 0.5}}
    options = SimpleNamespace(model_name=None, language=None, license=None)
    job = SimpleNamespace(task=task, training=training, arguments=options, command=["x.py", "--data", BAD])
    report.write_card(job, result, folder)
    return (folder / "README.md").read_text(encoding="utf-8")


def table_of_runs(folder):
    row = {"model": BAD, "batch_size": 1, "learning_rate": 1.0, "dropout": None, "seed": 1, "notes": [BAD]}
    row |= {"parameters": 1, "epochs": 1.0, "training_seconds": 1.0, "samples_per_second": 1.0}
    row |= {"tokens_per_second": 1.0, "hardware": BAD, "versions": BAD, "scores": {BAD: {BAD: 0.5}}}
    return report.report_text({"title": BAD, "runs": [row], "main_metric": BAD, "command": BAD})


def translated(folder):
    score = {metric: {"score": 1.0, "signature": BAD} for metric in ("bleu", "bleu_lowercase", "chrf")}
    texts = dict.fromkeys(("source", "translation", "reference"), BAD)
    figures = {"validation": {**score, "pairs": 1, "samples": [texts]}, "model_type": "luna", "notes": [BAD]}
    figures |= dict.fromkeys(("parameters", "training_seconds", "held_out_loss", "unigram_loss", "training_pairs"), 1)
    figures |= {"vocabulary": 1, "averaged_checkpoints": 1, "command": BAD, "hardware": BAD, "versions": BAD}
    path, *words = arguments(BAD, "out")
    recipe = train_translation.read_recipe(path, words)
    return translation.card.make_card(recipe, figures)


def converted(folder):
    facts = {"texts": BAD, "machine": {"cpu": BAD}, "figures": [], "explanations": [BAD], "command": BAD}
    facts |= {"date": BAD, "versions": dict.fromkeys(("torch", "transformers", "luna_hf"), BAD)}
    source, config = str(folder / BAD.replace("/", "")), luna_hf.AbcConfig()
    return luna_hf.convert.card.make_card(BAD, source, "states", config, facts)


def warm_started(folder):
    source = folder / "source"
    source.mkdir()
    ModelCard(f"---\n{ModelCardData(license=BAD, language='en').to_yaml()}\n---\n").save(source / "README.md")
    options = SimpleNamespace(source=str(source), target=Path(BAD.replace("/", "")), command=BAD)
    return from_roberta.make_card(options, tiny_model("luna", "mlm"), SimpleNamespace(lines=lambda: [BAD]), [BAD])


def from_fairseq(folder):
    original = SimpleNamespace(name=BAD, options=SimpleNamespace(task=""))
    head = SimpleNamespace(kind="classification", labels=())
    return fairseq.make_card(BAD, original, head, tiny_model("luna", "sequence"), BAD, [BAD])


def to_fairseq(folder):
    template = (Path(fairseq.__file__).parents[1] / "to_fairseq.md").read_text(encoding="utf-8")
    return fill(template, name=BAD, source=code(BAD), command=code_block(BAD), norms=BAD)


def embedding(folder):
    encoder = torch.nn.ModuleList([torch.nn.Module()])
    encoder[0].auto_model = tiny_model("luna")
    scores = {"pearson": 0.5, "spearman": 0.5}
    figures = {"model": BAD, "dataset": BAD, "scores": scores, "scores_before": scores, "command": BAD}
    figures |= dict.fromkeys(("train_rows", "validation_rows", "max_length", "steps", "seconds"), 1)
    return finetune_embeddings.make_card(encoder, figures)


CARDS = [finetuned, table_of_runs, translated, converted, warm_started, from_fairseq, to_fairseq, embedding]


@pytest.mark.parametrize("make", CARDS)
def test_no_card_renders_what_is_planted(make, tmp_path):
    card = make(tmp_path)
    assert "onerror" in card
    found = parts(card)
    live = [part.content for part in found if part.type in ("html_inline", "html_block")]
    live += [part.attrs for part in found if part.type == "link_open" and "evil" in str(part.attrs)]
    live += [part.content for part in found if part.type == "inline" and part.content.strip() == "PWNED"]
    assert live == []
    if card.startswith("---\n"):
        assert ModelCard(card).data.library_name


def test_surplus_fields_are_ignored_and_missing_ones_are_not():
    assert fill("$a", a=1, b=2) == "1"
    with pytest.raises(KeyError):
        fill_card("embeddings.md")
