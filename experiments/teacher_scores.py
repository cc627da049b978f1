"""Scores of a sentence encoder and its conversions, zero-shot: similar sentences, and long documents in one pass.

STS-B: Spearman's correlation of cosines with people's scores, validation pairs. RACE: a question with its answer finds
the article (high school, test). Novels: the first half of a piece finds the second half.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pyarrow import parquet
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.convert import report as conversion_report
from luna_hf.convert.report import special_tokens

# From the ids of texts, without ends, to their normalised vectors.
Embed = Callable[[list[list[int]]], Tensor]
ARTICLES, QUESTIONS, PIECES, HALF = 350, 1200, 100, 1390
_PASS_TOKENS = 4096


class Encoder:
    """A model with mean pooling that embeds texts."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        first, last = special_tokens(tokenizer)
        self.reader = conversion_report.Encoder(model.eval(), "mean", first, last, tokenizer.pad_token_id)
        self.found: list[tuple[list[list[int]], int, Tensor]] = []

    def whole(self, texts: list[list[int]]) -> Tensor:
        """Vectors (texts, d) of whole texts, each in one pass."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found: list[Tensor] = [torch.empty(0)] * len(texts)
        while order:
            longest = len(texts[order[-1]]) + 2
            places = [order.pop() for _ in range(min(len(order), max(1, _PASS_TOKENS // longest)))]
            vectors = self.reader.read([torch.tensor(texts[place], dtype=torch.long) for place in places]).float()
            for place, vector in zip(places, vectors, strict=True):
                found[place] = vector
        return torch.stack(found)

    def cut(self, size: int) -> Embed:
        """Vectors of texts cut to `size` tokens, ends included."""
        return lambda texts: self.whole([text[: size - 2] for text in texts])

    def windows(self, *sizes: int) -> Embed:
        """Normalised means of the vectors of successive windows of each size, and the normalised mean of these."""
        return lambda texts: F.normalize(sum(self.window_means(texts, size) for size in sizes), dim=-1)

    def window_means(self, texts: list[list[int]], size: int) -> Tensor:
        """Normalised means of the vectors of windows of one size, computed once for a list of texts."""
        for known, own, vectors in self.found:
            if known is texts and own == size:
                return vectors
        parts = [[text[at : at + size - 2] for at in range(0, max(1, len(text)), size - 2)] for text in texts]
        vectors = self.whole([part for each in parts for part in each]).split([len(each) for each in parts])
        means = F.normalize(torch.stack([vector.mean(0) for vector in vectors]), dim=-1)
        self.found.append((texts, size, means))
        return means


class Tasks:
    """The tasks, as token ids."""

    def __init__(self, data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read and tokenize them."""

        def ids(texts: Sequence[str]) -> list[list[int]]:
            plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
            return tokenizer(list(texts), **plain)["input_ids"]

        pairs = parquet.read_table(data / "glue/stsb/validation.parquet").to_pylist()
        self.pairs = ids([row["sentence1"] for row in pairs]), ids([row["sentence2"] for row in pairs])
        self.labels = [row["label"] for row in pairs]
        rows = parquet.read_table(data / "race/high/test.parquet").to_pylist()
        articles = {
            text: place for place, text in enumerate(list(dict.fromkeys(r["article"] for r in rows))[:ARTICLES])
        }
        asked = [row for row in rows if row["article"] in articles][:QUESTIONS]
        self.articles = ids(list(articles))
        self.questions = ids([f"{row['question']} {row['options'][ord(row['answer']) - 65]}" for row in asked])
        self.answers = torch.tensor([articles[row["article"]] for row in asked])
        texts = parquet.read_table(data / "novels/validation.parquet").column("text").to_pylist()
        pieces = [piece for piece in ids(texts) if len(piece) >= 2 * HALF]
        step = len(pieces) / PIECES
        chosen = [pieces[int(place * step)] for place in range(PIECES)]
        self.halves = [[piece[start : start + HALF] for piece in chosen] for start in (0, HALF)]

    def score(self, embed: Embed, short: Embed) -> dict[str, float]:
        """Scores x 100 of a way to embed documents, with another for sentences and questions."""
        first, second = (short(texts) for texts in self.pairs)
        ranks = rank(short(self.questions), embed(self.articles), self.answers)
        found = rank(*map(embed, self.halves), torch.arange(PIECES))
        figures = {
            "stsb": spearmanr((first * second).sum(-1).numpy(), self.labels).statistic,
            "race_ndcg": sum(1 / math.log2(place + 1) for place in ranks if place <= 10) / len(ranks),
            "novels_r1": sum(place == 1 for place in found) / len(found),
            "novels_mrr": sum(1 / place for place in found) / len(found),
        }
        return {name: round(100 * float(value), 2) for name, value in figures.items()}


def rank(queries: Tensor, documents: Tensor, answers: Tensor) -> list[int]:
    """The rank, from 1, of each query's document among all; ties count against it."""
    scores = queries @ documents.T
    own = scores.gather(1, answers.unsqueeze(1))
    return (scores >= own).sum(1).tolist()
