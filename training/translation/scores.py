"""Translating with a beam, BLEU and chrF with their signatures, and the average of checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.scripting import UserError
from luna_hf.simultaneous import WaitK
from translation.latency import mean_latencies
from translation.pairs import Pairs, encode
from translation.recipe import TranslationRecipe


def search(recipe: TranslationRecipe) -> dict[str, Any]:
    """How the recipe searches, for a model's `generation_config`."""
    options = {"do_sample": False, "num_beams": recipe.num_beams, "max_new_tokens": recipe.max_new_tokens}
    if recipe.num_beams > 1:
        options |= {"length_penalty": recipe.length_penalty, "early_stopping": True}
    return options


@torch.no_grad()
def translate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], batch_size: int, **options: Any
) -> list[str]:
    """Translate texts as the model's `generation_config` and `options` say, in batches of similar length."""
    rows = encode(texts, tokenizer)
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    found: dict[int, str] = {}
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        ids = [torch.from_numpy(rows[place]) for place in places]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        made = model.generate(padded.to(model.device), attention_mask=mask.to(model.device), **options)
        texts_of = tokenizer.batch_decode(made, skip_special_tokens=True)
        found |= {place: text.strip() for place, text in zip(places, texts_of, strict=True)}
    return [found[place] for place in range(len(rows))]


def score(translations: list[str], references: list[str]) -> dict[str, Any]:
    """BLEU, lower-case BLEU and chrF of a corpus with one reference, each with the signature of sacreBLEU."""
    scores = {}
    for name, metric in (("bleu", BLEU()), ("bleu_lowercase", BLEU(lowercase=True)), ("chrf", CHRF())):
        result = metric.corpus_score(translations, [references])
        scores[name] = {"score": result.score, "signature": str(metric.get_signature())}
    return scores


def evaluate_split(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Pairs, batch_size: int
) -> dict[str, Any]:
    """Scores of a split, its number of pairs, and a few translations."""
    made = translate(model, tokenizer, pairs.source, batch_size)
    samples = [
        {"source": source, "translation": text, "reference": reference}
        for source, text, reference in list(zip(pairs.source, made, pairs.target, strict=True))[:5]
    ]
    return {"pairs": len(pairs), **score(made, pairs.target), "samples": samples}


def evaluate_wait(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Pairs, batch_size: int, k: int
) -> dict[str, Any]:
    """Scores of a split in simultaneous translation by wait-k with greedy search, and mean latencies in tokens."""
    made = translate(model, tokenizer, pairs.source, batch_size, policy=WaitK(k), num_beams=1)
    sides = [[len(ids) for ids in encode(texts, tokenizer)] for texts in (pairs.source, made, pairs.target)]
    return {**score(made, pairs.target), **mean_latencies(WaitK(k), *sides)}


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
