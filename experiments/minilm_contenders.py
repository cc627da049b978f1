"""Ways to turn texts into vectors: conversions in one pass, their source on windows, and what needs no encoder."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from teacher_scores import Encoder
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

# Vectors (texts, d) of lists of ids without ends; or (parts, d) of each text, of which the best counts.
Embed = Callable[[list[list[int]]], Tensor | list[Tensor]]
# Tokens of the longest text that the source was made for.
SOURCE_LENGTH = 256
# What its table of positions has room for.
SOURCE_POSITIONS = 512
# Both of a conversion's parts that reach beyond its window.
BOTH = "slots and selected tokens"


class Reader:
    """A model that embeds texts in one pass each, loaded when it is first needed.

    It remembers vectors, which several ways share, until `forget`. With `bf16`, it multiplies matrices in bfloat16.
    """

    def __init__(
        self, load: Callable[[], PreTrainedModel], tokenizer: PreTrainedTokenizerBase, bf16: bool = False
    ) -> None:
        self.load, self.tokenizer, self.bf16 = load, tokenizer, bf16
        self.known: dict[tuple[int, ...], Tensor] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, for inference."""
        return self.load().eval()

    @cached_property
    def encoder(self) -> Encoder:
        """What embeds batches of ids."""
        return Encoder(self.model, self.tokenizer)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts without ends."""
        plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        return self.tokenizer(list(texts), **plain)["input_ids"]

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Normalised vectors (texts, d); equal texts have exactly equal vectors."""
        keys = [tuple(text) for text in texts]
        new = [key for key in dict.fromkeys(keys) if key not in self.known]
        if new:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                self.known.update(zip(new, self.encoder.whole([list(key) for key in new]), strict=True))
        return torch.stack([self.known[key] for key in keys])

    def forget(self) -> None:
        """Forget all vectors."""
        self.known.clear()

    def cut(self, size: int) -> Embed:
        """Read the first `size` tokens of a text, ends included."""
        return lambda texts: self.read([text[: size - 2] for text in texts])

    def parts(self, texts: list[list[int]], size: int) -> list[Tensor]:
        """Vectors (windows, d) of the fewest windows of each text that hold `size` tokens, ends included.

        They are equally long, up to a token: a short rest would count as much as a whole window in their mean.
        """
        counts = [max(1, math.ceil(len(text) / (size - 2))) for text in texts]
        parts = [
            [part.tolist() for part in np.array_split(np.array(text, dtype=int), count)]
            for text, count in zip(texts, counts, strict=True)
        ]
        return list(self.read([part for each in parts for part in each]).split([len(each) for each in parts]))

    def windows(self, size: int) -> Embed:
        """The normalised mean of a text's windows; for a text of up to `size` tokens, its one pass."""
        return lambda texts: F.normalize(torch.stack([each.mean(0) for each in self.parts(texts, size)]), dim=-1)

    def best_window(self, size: int) -> Embed:
        """All windows of a text, of which the closest to the query counts."""
        return lambda texts: self.parts(texts, size)

    def bag(self, texts: list[list[int]]) -> Tensor:
        """The normalised mean of the model's word vectors: no layer, no positions."""
        table = self.model.get_input_embeddings().weight.detach()
        return F.normalize(
            torch.stack([table[text or [self.tokenizer.unk_token_id]].mean(0) for text in texts]), dim=-1
        )


@dataclass(frozen=True)
class Contender:
    """A way to read queries and one to read documents; tasks without queries read all texts as documents.

    `tokens` gives the ids of texts.
    """

    tokens: Callable[[Sequence[str]], list[list[int]]]
    queries: Embed
    documents: Embed

    def embed(self, texts: Sequence[str], are_queries: bool) -> Tensor | list[Tensor]:
        """Vectors of texts."""
        return (self.queries if are_queries else self.documents)(self.tokens(texts))


def similarity(queries: Tensor, documents: Tensor | list[Tensor]) -> Tensor:
    """Cosines (queries, documents) of normalised vectors; of a list, those of each document's best part."""
    if isinstance(documents, Tensor):
        return queries @ documents.T
    scores = (queries @ torch.cat(documents).T).split([len(each) for each in documents], dim=1)
    return torch.stack([score.amax(1) for score in scores], 1)


def source_ways(source: Reader) -> dict[str, Contender]:
    """The unmodified encoder, cut and on windows, and its word vectors; all read whole queries, in windows."""
    documents = {"teacher, cut at 256": source.cut(SOURCE_LENGTH), "teacher, cut at 512": source.cut(SOURCE_POSITIONS)}
    for size in (128, 256):
        documents[f"teacher, mean of windows of {size}"] = source.windows(size)
        documents[f"teacher, best window of {size}"] = source.best_window(size)
    ways = {name: Contender(source.ids, source.windows(SOURCE_LENGTH), way) for name, way in documents.items()}
    return {**ways, "bag of word vectors": Contender(source.ids, source.bag, source.bag)}


def in_one_pass(documents: Reader, queries: Reader | None = None) -> Contender:
    """A conversion that reads a text in one pass; one longer than it takes in equal passes, averaged.

    Without `queries`, another conversion, it reads queries alike.
    """

    def one_pass(reader: Reader) -> Embed:
        return lambda texts: reader.windows(reader.model.config.max_position_embeddings)(texts)

    return Contender(documents.ids, one_pass(queries or documents), one_pass(documents))


def switches(config: PreTrainedConfig) -> list[str]:
    """What `without` can take from a conversion; without both, its window is left."""
    parts = {"slots": config.mixed_window() > 0, "selected tokens": config.num_selected_tokens > 0}
    found = [name for name, has in parts.items() if has]
    return [*found, BOTH] if len(found) > 1 else found


def without(model: PreTrainedModel, part: str) -> PreTrainedModel:
    """The same model without one of its `switches`."""
    if part in ("slots", BOTH):
        model.register_forward_pre_hook(lambda _, words, own: (words, {**own, "read_slots": False}), with_kwargs=True)
    if part in ("selected tokens", BOTH):
        model.config.num_selected_tokens = model.config.softmax_length = 0
    return model


def in_windows(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """The same encoder, reading texts of any length in the fewest windows of at most `size` tokens.

    Each window has the text's first token (of a pair, its whole first text), a part of the rest, and the last token.
    The parts are equally long, up to a token. A head gets the states of the whole text, side by side: it finds an
    answer in any window, and pools all of them; what is in each window has the state of the last one. Inputs are
    padded on the right and have `token_type_ids`; a first text leaves room for others.
    """
    whole = model.forward

    def forward(
        input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, *_: None, **keywords: Any
    ) -> BaseModelOutput:
        rows, places = [], []
        window, place = torch.zeros_like(input_ids), torch.zeros_like(input_ids)  # where the state of each token is
        for row, count in enumerate(attention_mask.sum(-1).tolist()):
            types = token_type_ids[row, :count]
            first = int((types == 0).sum()) if types.any() else 1
            rest = torch.arange(first, count - 1)
            for part in rest.tensor_split(max(1, math.ceil(len(rest) / (size - first - 1)))):
                own = torch.cat([torch.arange(first), part, torch.tensor([count - 1])])
                window[row, own], place[row, own] = len(rows), torch.arange(len(own))
                rows.append(row)
                places.append(own)
        keep = pad_sequence([torch.ones_like(own) for own in places], batch_first=True)
        at = torch.tensor(rows)[:, None], pad_sequence(places, batch_first=True)
        ids = input_ids[at].masked_fill(keep == 0, model.config.pad_token_id)
        outputs = whole(ids, attention_mask=keep, token_type_ids=token_type_ids[at], **keywords)
        return BaseModelOutput(last_hidden_state=outputs.last_hidden_state[window, place])

    model.forward = forward
    return model


class Bm25:
    """BM25 (Robertson et al. 1994), k1 1.5 and b 0.75, of words in lower case, with Lucene's weights of rare words."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.places: dict[str, int] = {}
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([sum(own.values()) for own in counts], dtype=float)
        norms = 1.5 * (0.25 + 0.75 * lengths / lengths.mean())
        rows, columns, values = self._matrix(counts, grow=True)
        having = np.bincount(columns, minlength=len(self.places))
        rare = np.log1p((len(texts) - having + 0.5) / (having + 0.5))
        weights = rare[columns] * values / (values + norms[rows])
        self.weights = csr_array((weights, (rows, columns)), shape=(len(texts), len(self.places)))

    def scores(self, queries: Sequence[str]) -> Any:
        """Scores (queries, texts)."""
        rows, columns, values = self._matrix([Counter(words(query)) for query in queries], grow=False)
        asked = csr_array((values, (rows, columns)), shape=(len(queries), len(self.places)))
        return (asked @ self.weights.T).toarray()

    def _matrix(self, counts: list[Counter[str]], grow: bool) -> tuple[Any, Any, Any]:
        found = []
        for row, own in enumerate(counts):
            for word, count in own.items():
                column = self.places.setdefault(word, len(self.places)) if grow else self.places.get(word)
                found += [] if column is None else [(row, column, count)]
        rows, columns, values = np.array(found, dtype=int).reshape(-1, 3).T
        return rows, columns, values.astype(float)


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())
