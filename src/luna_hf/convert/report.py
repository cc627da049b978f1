"""What a converted encoder is worth without training: closeness to its source and speed, by the length of a text.

Nothing here reads or writes a checkpoint. Texts become rows of ids of exactly the lengths that are measured.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedConfig, PreTrainedModel

from ..scripting import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096)

# Rows of each length: up to the source's longest input, and beyond it.
WITHIN, BEYOND = 4, 2

# Timed passes of a row that the source reads whole; passes of longer ones take seconds and vary less.
REPEATS = 3

# Beyond its longest input, a source may be read in short windows of so many tokens, which search documents well.
REFERENCE_WINDOW = 128


# ---- embeddings ----


def pool_states(states: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """Pool states (b, n, d) to (b, d) as sentence-transformers does; the result is not normalised.

    Args:
        attention_mask: (b, n), 1 for tokens and 0 for padding.
        pooling: "mean" over the tokens, "cls" (the first token), or "max" (the largest values).
    """
    if pooling == "cls":
        return states[torch.arange(len(states)), attention_mask.argmax(1)]
    keep = attention_mask.unsqueeze(-1)
    if pooling == "max":
        return states.masked_fill(keep == 0, -torch.inf).amax(1)
    return (states * keep).sum(1) / keep.sum(1)


@dataclass(frozen=True)
class Encoder:
    """A model that embeds rows of ids.

    Args:
        model: an encoder without a head.
        pooling: see `pool_states`.
        first: special tokens before a text.
        last: special tokens after it.
        padding: id of the padding token.
    """

    model: PreTrainedModel
    pooling: str
    first: Tensor
    last: Tensor
    padding: int

    @torch.no_grad()
    def read(self, texts: Sequence[Tensor]) -> Tensor:
        """Embed texts in one batch: (texts, d), normalised, in float64; each text holds ids without special tokens."""
        rows = [torch.cat([self.first, text, self.last]) for text in texts]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return normalize(pool_states(states, mask, self.pooling).double(), dim=-1)

    def read_in_windows(self, text: Tensor, size: int) -> Tensor:
        """Embed a text, (1, d): the normalised mean of equal windows of at most `size` tokens."""
        number = math.ceil(len(text) / (size - len(self.first) - len(self.last)))
        return normalize(self.read(text.tensor_split(number)).mean(0, keepdim=True), dim=-1)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[Tensor, Tensor]:
    """The special tokens that a tokenizer puts before and after a text."""
    ids = torch.tensor(tokenizer("").input_ids, dtype=torch.long)
    return ids[:1], ids[1:]


# ---- texts ----


def shipped_texts() -> list[str]:
    """The texts of this package: three excerpts of English novels, each without the line that names its author."""
    folder = files("luna_hf.convert") / "sample_texts"
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".txt")), key=lambda path: path.name)
    return [path.read_text(encoding="utf-8").partition("\n\n")[2] for path in paths]


def read_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], lower: bool = False) -> list[Tensor]:
    """The ids of texts without special tokens; `lower` is the `do_lower_case` of sentence-transformers."""
    plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
    return [torch.tensor(tokenizer(text.lower() if lower else text, **plain).input_ids) for text in texts]


def spread_rows(texts: Sequence[Tensor], length: int, count: int) -> list[Tensor]:
    """Cut rows that do not overlap from texts, from each in turn, spread over its whole length.

    Args:
        texts: ids of each text.
        length: tokens of a row.
        count: rows at most.

    Returns:
        Up to `count` rows; none if every text is too short.
    """
    texts = [text for text in texts if len(text) >= length]
    most = math.ceil(count / max(1, len(texts)))
    of_each = []
    for text in texts:
        number = min(most, len(text) // length)
        starts = [len(text) // number * place for place in range(number)]
        of_each.append([text[start : start + length] for start in starts])
    turns = itertools.zip_longest(*of_each)
    return [row for turn in turns for row in turn if row is not None][:count]


# ---- figures ----


@dataclass(frozen=True)
class Figure:
    """What was measured on the rows of one length.

    Args:
        tokens: length of a row, with its special tokens.
        rows: number of rows.
        cosine: mean cosine of the converted model's embedding to the source's. Beyond its longest input, the source
            reads windows of that length.
        speed: median of the source's time over the converted model's, row by row.
        milliseconds: median time of the converted model for a row.
        short_windows: mean cosine to the source's windows of `REFERENCE_WINDOW` tokens, beyond its longest input.
        source_short_windows: the same of the source's own embedding, that of its long windows.
    """

    tokens: int
    rows: int
    cosine: float
    speed: float
    milliseconds: float
    short_windows: float | None = None
    source_short_windows: float | None = None


def measured_lengths(longest: int, max_length: int) -> list[int]:
    """The lengths to measure, of a model that reads up to `max_length` tokens and a source that reads `longest`."""
    top = min(max_length, LENGTHS[-1])
    return [length for length in LENGTHS if length <= top] + [top] * (top > longest and top not in LENGTHS)


def exact_length(config: PreTrainedConfig) -> int:
    """The longest text, in tokens, that a converted model reads by softmax attention alone, just as its source does."""
    full = len(config.full_attention_layers or ()) == config.num_hidden_layers
    short = max(config.num_selected_tokens, config.softmax_length, config.local_window // 2)
    exact = config.max_position_embeddings if full else short
    return min(exact, config.position_rows())


def measure_length(ours: Encoder, source: Encoder, rows: Sequence[Tensor], longest: int) -> Figure:
    """Compare both models on rows of one length, one row at a time; passes of the two alternate.

    Args:
        ours: the converted model.
        source: the source.
        rows: ids without special tokens, of the same number.
        longest: the source's longest input in tokens.
    """
    tokens = len(rows[0]) + len(source.first) + len(source.last)
    is_long = tokens > longest
    goals, found, short, ratios, times = [], [], [], [], []
    if not is_long:  # the first pass of a shape is slow
        source.read(rows[:1]), ours.read(rows[:1])
    for row in rows:
        for _ in range(1 if is_long else REPEATS):
            start = time.perf_counter()
            goal = source.read_in_windows(row, longest) if is_long else source.read([row])
            between = time.perf_counter()
            embedding = ours.read([row])
            own = time.perf_counter() - between
            ratios.append((between - start) / own)
            times.append(1000 * own)
        goals.append(goal)
        found.append(embedding)
        short += [source.read_in_windows(row, min(REFERENCE_WINDOW, longest))] if is_long else []

    return Figure(
        tokens=tokens,
        rows=len(rows),
        cosine=_mean_cosine(found, goals),
        speed=statistics.median(ratios),
        milliseconds=statistics.median(times),
        short_windows=_mean_cosine(found, short) if short else None,
        source_short_windows=_mean_cosine(goals, short) if short else None,
    )


def _mean_cosine(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return float((torch.cat([*ones]) * torch.cat([*others])).sum(-1).mean())


def measure(ours: Encoder, source: Encoder, texts: Sequence[Tensor], longest: int, max_length: int) -> Iterator[Figure]:
    """Measure every length for which the texts suffice, with a line of progress for each.

    Args:
        ours: the converted model.
        source: the source.
        texts: ids of each text, see `read_ids`.
        longest: the source's longest input in tokens.
        max_length: the converted model's.
    """
    specials = len(source.first) + len(source.last)
    for tokens in measured_lengths(longest, max_length):
        if rows := spread_rows(texts, tokens - specials, BEYOND if tokens > longest else WITHIN):
            progress(f"measuring texts of {tokens:,} tokens ...")
            yield measure_length(ours, source, rows, longest)


# ---- the table ----


def table(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """The header and the rows of the table, as text; a star marks texts longer than the source reads."""
    rows = [("tokens", "cosine", "speed", "short windows")]
    for one in figures:
        windows = (one.short_windows, one.source_short_windows)
        star, short = ("", "") if None in windows else ("*", "{:.3f} ({:.3f})".format(*windows))
        rows.append((f"{one.tokens:,}{star}", f"{one.cosine:.3f}", f"{one.speed:.2f}", short))
    return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def table_lines(figures: Sequence[Figure]) -> list[str]:
    """The table for a terminal, in aligned columns."""
    rows = [(first if "*" in first else f"{first} ", *others) for first, *others in table(figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def explain(figures: Sequence[Figure], exact: int, longest: int, dtype: str, rounded: str = "") -> list[str]:
    """What the table means, a paragraph each.

    Args:
        figures: the rows of the table.
        exact: see `exact_length`.
        longest: the source's longest input in tokens.
        dtype: in which both models were measured.
        rounded: words for the rounding of the weights, if they are not the source's.
    """
    lines = [f"Texts of up to {exact:,} tokens are read exactly as by the source{rounded}."]
    if figures:
        threads = torch.get_num_threads()
        lines.append(
            "cosine: to the source's embedding. speed: the source's time over this model's, so 2 is twice as fast. Up "
            f"to {WITHIN} texts of each length, one at a time, in {dtype} on {threads} CPU "
            f"thread{'s' * (threads > 1)}."
        )
    if any(figure.short_windows is not None for figure in figures):
        lines.append(
            f"With a star: the source reads at most {longest:,} tokens, so its embedding is the mean of its windows. "
            f"short windows: the cosine with windows of {min(REFERENCE_WINDOW, longest):,} tokens instead; in "
            "brackets, that of the source's two means."
        )
    return lines
