"""Translating with a beam, BLEU and chrF with their signatures, and the average of checkpoints."""

import re
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.scripting import UserError, progress
from luna_hf.simultaneous import WaitK
from translation.latency import mean_latencies
from translation.pairs import Pairs, cut_to, encode
from translation.recipe import TranslationRecipe

# Codes of languages without spaces between words: Chinese, Japanese, Thai, Lao, Khmer, Burmese.
_NO_SPACES = {"zh", "zho", "ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya"}
# What is scored, by task, and its name.
METRICS = {
    "translation": {"bleu": "BLEU", "bleu_lowercase": "BLEU, lower case", "chrf": "chrF"},
    "summarization": {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
}


def search(recipe: TranslationRecipe) -> dict[str, Any]:
    """How the recipe searches, for a model's `generation_config`."""
    options = {"do_sample": False, "num_beams": recipe.num_beams, "max_new_tokens": recipe.max_new_tokens}
    if recipe.num_beams > 1:
        options |= {"length_penalty": recipe.length_penalty, "early_stopping": True}
    return options


@torch.no_grad()
def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    batch_size: int,
    longest: int | None = None,
    **options: Any,
) -> list[str]:
    """Translate texts as the model's `generation_config` and `options` say, in batches of similar length.

    With `longest`, texts of more tokens are cut.
    """
    rows = encode(texts, tokenizer)
    rows = rows if longest is None else cut_to(rows, longest)
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    found: dict[int, str] = {}
    shown = time.monotonic()
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        ids = [torch.from_numpy(rows[place]) for place in places]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        made = model.generate(padded.to(model.device), attention_mask=mask.to(model.device), **options)
        texts_of = tokenizer.batch_decode(made, skip_special_tokens=True)
        found |= {place: text.strip() for place, text in zip(places, texts_of, strict=True)}
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            progress(f"Wrote {len(found):,} of {len(rows):,} texts.")
    return [found[place] for place in range(len(rows))]


def score(written: list[str], references: list[str], task: str = "translation", language: str = "") -> dict[str, Any]:
    """The metrics of a task, see `METRICS`, on a corpus with one reference, each with a signature."""
    return rouge(written, references) if task == "summarization" else bleu(written, references, language)


def rouge(written: list[str], references: list[str]) -> dict[str, Any]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (F, x 100), means over the texts, as rouge-score computes them, in any script."""
    from rouge_score.rouge_scorer import RougeScorer

    from translation.words import UnicodeTokenizer

    names = METRICS["summarization"]
    scorer = RougeScorer([*names], tokenizer=UnicodeTokenizer())
    rows = [scorer.score(reference, text) for reference, text in zip(references, written, strict=True)]
    signature = f"rouge-score {version('rouge-score')}, with stemmer, Unicode words"
    means = {name: 100 * fmean(row[name].fmeasure for row in rows) for name in names}
    return {name: {"score": mean, "signature": signature} for name, mean in means.items()}


def bleu(translations: list[str], references: list[str], language: str = "") -> dict[str, Any]:
    """BLEU, lower-case BLEU and chrF, with the signatures of sacreBLEU.

    In a `language` without spaces between words, BLEU counts Chinese as sacreBLEU does, and others by characters.
    """
    scores, code = {}, re.split("[-_]", language.lower())[0]
    own = {"tokenize": "zh" if code in ("zh", "zho") else "char"} if code in _NO_SPACES else {}
    metrics = {"bleu": BLEU(**own), "bleu_lowercase": BLEU(lowercase=True, **own), "chrf": CHRF()}
    for name, metric in metrics.items():
        result = metric.corpus_score(translations, [references])
        scores[name] = {"score": result.score, "signature": str(metric.get_signature())}
    return scores


def evaluate_split(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Pairs,
    batch_size: int,
    longest: int | None = None,
    task: str = "translation",
    language: str = "",
) -> dict[str, Any]:
    """Scores of a split, its number of pairs, and a few of the texts written."""
    made = translate(model, tokenizer, pairs.source, batch_size, longest)
    samples = [
        {"source": source, "translation": text, "reference": reference}
        for source, text, reference in list(zip(pairs.source, made, pairs.target, strict=True))[:5]
    ]
    return {"pairs": len(pairs), **score(made, pairs.target, task, language), "samples": samples}


def evaluate_wait(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Pairs,
    batch_size: int,
    k: int,
    longest: int | None = None,
    language: str = "",
) -> dict[str, Any]:
    """Scores of a split in simultaneous translation by wait-k with greedy search, and mean latencies in tokens.

    Latencies count the tokens of whole texts, with the end token: a translation is tokenized again after its tokens
    have become text, and has an end token even if it was stopped at `max_new_tokens`. `longest` is that of `translate`.
    """
    made = translate(model, tokenizer, pairs.source, batch_size, longest, policy=WaitK(k), num_beams=1)
    sides = [[len(ids) for ids in encode(texts, tokenizer)] for texts in (pairs.source, made, pairs.target)]
    sides[0] = [min(length, longest or length) for length in sides[0]]
    return {**bleu(made, pairs.target, language), **mean_latencies(WaitK(k), *sides)}


def average(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in checkpoints, in float64, by name.

    Raises:
        UserError: A checkpoint has no weights in one file.
    """
    total: dict[str, Tensor] = {}
    for folder in folders:
        path = folder / "model.safetensors"
        if not path.is_file():
            raise UserError(f"{folder} has no model.safetensors to average. Set `average_checkpoints` to 1.")
        for name, tensor in load_file(path).items():
            total[name] = total.get(name, 0) + tensor.double()
    return {name: tensor / len(folders) for name, tensor in total.items()}
