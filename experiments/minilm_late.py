"""Passages whose subject is named only earlier in their document: questions of SQuAD and SquadShifts (new Wikipedia).

An article is its paragraphs in order; the candidates are all paragraphs of all articles. Scored are questions whose
paragraph has no word of the article's title. Some name the subject themselves; the others are asked as a reader who
searches many articles would have to ask them, with the title before the question.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from minilm_contenders import Bm25, Reader, words
from minilm_tasks import read
from torch import Tensor
from torch.nn import functional as F

from luna_hf.late_chunking import embed_spans

FILES = ("squad/validation", "squadshifts_new_wiki/train", "squadshifts_new_wiki/validation")
LONGEST, QUESTIONS = 4096, 2000
SOURCE_WAYS = ("passage alone", "title and passage", "passage and mean of the article")
OWN_WAYS = (
    *("late chunking", "late chunking and mean of the article", "late chunking, with title", "passage alone"),
    *("late chunking and passage alone", "late chunking, passage alone and mean of the article"),
)
# By the tokens between the start of the pass and the passage.
PLACES = {256: "0 to 255", 1024: "256 to 1,023", LONGEST: "1,024 to 4,095"}
_COMMON = {"the", "and", "for", "with"}
_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Article:
    """A title, and paragraphs in the order of the article."""

    title: str
    passages: list[str]

    def named_in(self, text: str) -> bool:
        """Whether a text has a word of the title, or one with the same beginning."""
        stems = [word[: max(4, len(word) - 2)] for word in words(self.title) if len(word) > 2 and word not in _COMMON]
        return any(word.startswith(stem) for word in words(text) for stem in stems)


@dataclass(frozen=True)
class Question:
    """A question, the number of its passage among all passages, and whether it names the subject by itself."""

    text: str
    passage: int
    names: bool


def read_articles(data: Path) -> tuple[list[Article], list[Question]]:
    """All articles, and the questions that are scored."""
    rows = [row for name in FILES for row in read(data, name)]
    passages: dict[str, dict[str, None]] = {}
    for row in rows:
        passages.setdefault(row["title"], {})[row["context"]] = None
    articles = {title: Article(re.sub("_", " ", title), list(own)) for title, own in passages.items()}
    order = [(title, text) for title, own in passages.items() for text in own]
    numbers = {key: number for number, key in enumerate(order)}
    asked = {row["question"]: (articles[row["title"]], (row["title"], row["context"])) for row in rows}
    hard = [(text, one, key) for text, (one, key) in asked.items() if not one.named_in(key[1])]
    named = [Question(text, numbers[key], True) for text, one, key in hard if one.named_in(text)]
    others = [
        Question(f"{one.title}: {text}", numbers[key], False) for text, one, key in hard if not one.named_in(text)
    ]
    questions = named + others[:: max(1, len(others) // QUESTIONS)]
    return list(articles.values()), questions


def split_passages(sizes: Sequence[int], room: int) -> list[range]:
    """Group successive passages into runs of at most `room` tokens; a longer passage forms its own run."""
    starts, used = [0], 0
    for number, size in enumerate(sizes):
        if used and used + size > room:
            starts.append(number)
            used = 0
        used += size
    return [range(*pair) for pair in zip(starts, [*starts[1:], len(sizes)], strict=True)]


class Late:
    """The task, and the ways to embed its passages."""

    def __init__(self, data: Path, reader: Reader) -> None:
        """Read it; `reader` counts tokens."""
        self.articles, self.questions = read_articles(data)
        self.answers = torch.tensor([question.passage for question in self.questions])
        self.texts = [question.text for question in self.questions]
        self.runs: list[list[range]] = []
        before: list[int] = []
        for article in self.articles:
            sizes = [len(ids) for ids in reader.ids(article.passages)]
            runs = split_passages(sizes, LONGEST - 2 - len(reader.ids([article.title])[0]))
            self.runs.append(runs)
            before += [count for run in runs for count in accumulate([sizes[n] for n in run][:-1], initial=0)]
        self.places = [next(name for end, name in PLACES.items() if before[number] < end) for number in self.answers]

    def counts(self) -> dict[str, int]:
        """How many articles, passages and questions there are."""
        return {"articles": len(self.articles), "passages": len(self.passages(False)), "questions": len(self.questions)}

    def passages(self, titles: bool) -> list[str]:
        """All passages, with or without the title before each."""
        return [f"{one.title}. {text}" if titles else text for one in self.articles for text in one.passages]

    def alone(self, reader: Reader, titles: bool = False) -> Tensor:
        """Each passage read by itself, with or without the title before it."""
        return reader.windows(512)(reader.ids(self.passages(titles)))

    def with_mean(self, passages: Tensor) -> Tensor:
        """Vectors of passages, plus half of the mean of those of their article."""
        parts = passages.split([len(article.passages) for article in self.articles])
        return F.normalize(torch.cat([part + 0.5 * F.normalize(part.mean(0), dim=0) for part in parts]), dim=-1)

    def in_context(self, reader: Reader, titles: bool = False) -> Tensor:
        """Passages within one pass over their article; a long one is read in parts, each below the title, if any."""
        found = []
        for article, runs in zip(self.articles, self.runs, strict=True):
            for run in runs:
                head = [article.title] if titles else []
                pieces = [*head, *(article.passages[number] for number in run)]
                ends = list(accumulate(len(piece) + len(_SEPARATOR) for piece in pieces))
                spans = [
                    (end - len(_SEPARATOR) - len(piece), end - len(_SEPARATOR))
                    for piece, end in zip(pieces, ends, strict=True)
                ]
                found.append(embed_spans(reader.model, reader.tokenizer, _SEPARATOR.join(pieces), spans[len(head) :]))
        return torch.cat(found)

    def ways(self, reader: Reader, name: str, wanted: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
        """Functions that score the `wanted` ways of a model to embed passages, by name."""
        alone, late = cache(partial(self.alone, reader)), cache(partial(self.in_context, reader))
        embed: dict[str, Callable[[], Tensor]] = {
            "passage alone": alone,
            "title and passage": partial(self.alone, reader, titles=True),
            "passage and mean of the article": lambda: self.with_mean(alone()),
            "late chunking": late,
            "late chunking and mean of the article": lambda: self.with_mean(late()),
            "late chunking, with title": partial(self.in_context, reader, titles=True),
            "late chunking and passage alone": lambda: both(),
            "late chunking, passage alone and mean of the article": lambda: self.with_mean(both()),
        }

        def both() -> Tensor:
            return F.normalize(late() + alone(), dim=-1)

        def score(way: str) -> dict[str, Any]:
            return self.figures(reader.cut(512)(reader.ids(self.texts)) @ embed[way]().T)

        return {f"{name}, {way}": partial(score, way) for way in wanted}

    def count_words(self, titles: bool) -> dict[str, Any]:
        """Figures of BM25."""
        return self.figures(torch.from_numpy(Bm25(self.passages(titles)).scores(self.texts)))

    def figures(self, scores: Tensor) -> dict[str, Any]:
        """nDCG@10 x 100 of scores (questions, passages); ties count against them.

        Over all questions, over those that name the subject by themselves, and by place.
        """
        own = scores.gather(1, self.answers.unsqueeze(1))
        ranks = (scores >= own).sum(1).tolist()
        gains = [1 / math.log2(rank + 1) if rank <= 10 else 0.0 for rank in ranks]
        named = [gain for gain, question in zip(gains, self.questions, strict=True) if question.names]
        groups = {"all": gains, "named": named}
        for name in PLACES.values():
            groups[name] = [gain for gain, place in zip(gains, self.places, strict=True) if place == name]
        means = {name: round(100 * sum(own) / len(own), 2) for name, own in groups.items() if own}
        return {"score": means.pop("all"), "named": means.pop("named", None), "places": means}
