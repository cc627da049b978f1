"""The command for text to text, with summaries: columns of any names, sources that are cut, and ROUGE."""

import json

import pandas
import pytest
import train_translation
from helpers import refused
from rouge_score.tokenizers import DefaultTokenizer
from tiny_training import start
from tiny_translation import RECIPES, arguments
from translation.pairs import Pairs, encode_pairs
from translation.scores import rouge
from translation.words import UnicodeTokenizer

from luna_hf.scripting import UserError, read_json

LAVO = next(path for path in RECIPES if path.stem == "summarize_lavo")
WORDS = ["one", "two", "red", "dog", "runs", "cat", "sees"]
MODEL = {"model__projection_length": None, "model__num_bases": 4, "model__local_window": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summaries")
    for split, number in {"train": 40, "validation": 6, "test": 6}.items():
        rows = [
            {
                "document": " ".join(WORDS[(place + n) % 7] for n in range(5 + 10 * (place % 4))),
                "summary": WORDS[place % 7],
            }
            for place in range(number)
        ]
        pandas.DataFrame(rows).to_json(folder / f"{split}.jsonl", orient="records", lines=True)
    return folder


def run(data, folder, **changes):
    return start(train_translation, arguments(data, folder, LAVO, **{**MODEL, "max_length": 30, **changes}))


def test_summaries_are_trained_and_scored(data, tmp_path, capsys):
    assert run(data, tmp_path / "out", num_beams=1) == 0
    figures = read_json(tmp_path / "out" / "metrics.json")
    assert {"rouge1", "rouge2", "rougeL"} <= figures["test"].keys() and "bleu" not in figures["test"]
    assert "ROUGE-L" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: summarization" in card and "| ROUGE-1 | ROUGE-2 | ROUGE-L |" in card
    assert "Summarizes texts, from `document` to `summary`" in card
    assert "training sources were cut to 30 tokens" in card
    assert "\nGreedy search, one reference" in card and "one byte-level BPE with" in card
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "lavo"


def test_columns_may_have_any_name(data, tmp_path):
    path, *words = arguments(data, tmp_path, LAVO, **MODEL, source_language="article body")
    assert train_translation.read_recipe(path, words).source_language == "article body"
    for changes in (["--task", "translation"], ["--source_language", " "]):
        with refused("source_language", error=UserError):
            train_translation.read_recipe(path, [*words, *changes])


def test_sources_are_cut_only_if_asked(data, tmp_path, capsys):
    assert run(data, tmp_path / "out", truncate_source=False) == 2
    assert "max_length" in capsys.readouterr().err
    assert run(data, tmp_path / "out", min_bleu=3) == 2
    assert "min_bleu" in capsys.readouterr().err


def test_a_cut_source_keeps_its_beginning_and_its_end():
    rows = [[4, 5, 6, 7, 8, 2], [4, 2]]

    def tokenizer(texts, **_):
        return {"input_ids": [rows[int(text)] for text in texts]}

    encoded = encode_pairs(Pairs(["0", "1"], ["1", "1"], "train"), tokenizer, 4, leave_out=True, cut=True)
    assert [ids.tolist() for ids in encoded.source] == [[4, 5, 6, 2], [4, 2]] and encoded.cut == 1
    plain = encode_pairs(Pairs(["0", "1"], ["1", "1"], "train"), tokenizer, 4, leave_out=True)
    assert len(plain.source) == 1 and plain.left_out == 1 and plain.cut == 0


def test_rouge_by_hand():
    """Two of three words, one of two pairs of words; stems count as words."""
    scores = {name: own["score"] for name, own in rouge(["the cat ran"], ["the cats sat"]).items()}
    assert scores == pytest.approx({"rouge1": 200 / 3, "rouge2": 50.0, "rougeL": 200 / 3})
    assert "rouge-score" in rouge(["a"], ["a"])["rouge1"]["signature"]


ENGLISH = "The dogs' running-times (12.5%) weren't snake_case: flies, happily, 3rd generalization\nof A.I. & skis"


def test_rouge_of_ascii_text_is_that_of_rouge_score():
    assert UnicodeTokenizer().tokenize(ENGLISH) == DefaultTokenizer(use_stemmer=True).tokenize(ENGLISH)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Дом стоит.", ["дом", "стоит"]),
        ("Ma\u0308nner", ["m\u00e4nner"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("ラーメンを2杯。", ["ラ", "ー", "メ", "ン", "を", "2", "杯"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("ที่นี่", ["ที่", "นี่"]),
    ],
)
def test_rouge_of_other_scripts(text, words):
    assert UnicodeTokenizer().tokenize(text) == words
    assert rouge([text], [text])["rouge1"]["score"] == 100


def test_rouge_does_not_split_words_at_letters_with_accents():
    assert rouge(["M nner"], ["Männer"])["rouge1"]["score"] == 0
