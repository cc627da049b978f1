"""Search the passages of a document, each of which was read within the whole of it (late chunking) and by itself."""

import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import NamedTuple

import torch
from loading import Loaded
from torch import Tensor

from luna_hf.late_chunking import embed_spans
from luna_hf.scripting import UserError

MOST_CHARACTERS, LISTED = 400_000, 5
# At least 200 characters (shorter paragraphs are joined) up to a blank line or a line that ends with a sentence; if
# there is none within 800 characters, up to the end of a sentence, a word, or anywhere.
PASSAGE = re.compile(
    r"""\S(?:.{200,800}?(?:(?=\s*\n\s*\n|\s*\Z) | [.!?][^\w\s]?(?=\n)) | .{200,800}[.!?][^\w\s]?(?=\s)
    | .{0,800}(?=\s|\Z) | .{800})""",
    re.DOTALL | re.VERBOSE,
)
# A text of the package, without its racist opening: nearly as much as the model in `checkpoints` reads in one pass.
EXAMPLE = (files("luna_hf.convert") / "sample_texts" / "burnett.txt").read_text(encoding="utf-8")
EXAMPLE = EXAMPLE[EXAMPLE.index("\"It's time for thee to get up now") :].strip()


class Document(NamedTuple):
    """A text that was read."""

    passages: list[str]  # n
    vectors: Tensor  # (n, d), normalised
    tokens: int
    passes: int
    seconds: float  # of reading it, by the clock


class Found(NamedTuple):
    """How well each passage fits a question."""

    document: Document
    similarities: list[float]  # n cosines
    seconds: float  # of reading the question and comparing it, by the clock


def search(loaded: Loaded, text: str, question: str) -> Found:
    """Compare a question with the passages of a text, which is read only the first time.

    Raises:
        UserError: Text or question is empty or too long.
    """
    loaded.encode(question)
    document, start = read(loaded, text), time.perf_counter()
    (vector,) = embed(loaded, question, [(0, len(question))])
    return Found(document, (document.vectors @ vector).tolist(), time.perf_counter() - start)


@lru_cache(maxsize=4)
def read(loaded: Loaded, text: str) -> Document:
    """Read a text in as few passes as the model allows; each ends with a passage.

    Raises:
        UserError: The text is empty or too long.
    """
    if not text.strip():
        raise UserError("The document is empty. Paste a text, or upload a file.")
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"The document has {len(text):,} characters, but the page reads {MOST_CHARACTERS:,}. Shorten it."
        )
    start = time.perf_counter()
    tokenizer = loaded.tokenizer
    encoded = tokenizer(text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    spans = [match.span() for match in PASSAGE.finditer(text)]
    # A part that is tokenized alone may have a token more at each end.
    most = loaded.longest - tokenizer.num_special_tokens_to_add() - 2
    parts: list[list[tuple[int, int]]] = []
    for first, last in spans:
        before = bisect_right(ends, parts[-1][0][0]) if parts else 0
        if not parts or bisect_right(ends, last - 1) + 1 - before > most:
            parts.append([])
        parts[-1].append((first, last))
    vectors = []
    for part in parts:
        first, last = part[0][0], part[-1][1]
        vectors.append(embed(loaded, text[first:last], [(a - first, b - first) for a, b in part], alone=True))
    passages = [text[first:last] for first, last in spans]
    return Document(passages, torch.cat(vectors), len(ends), len(parts), time.perf_counter() - start)


def embed(loaded: Loaded, text: str, spans: Sequence[tuple[int, int]], alone: bool = False) -> Tensor:
    """The vectors of spans of a text, as `embed_spans` computes them.

    Raises:
        UserError: The text does not suit the model.
    """
    try:
        return embed_spans(loaded.model, loaded.tokenizer, text, spans, alone)
    except ValueError as error:
        raise UserError(str(error)) from error


def explain(loaded: Loaded, found: Found) -> str:
    """What was read, and how long it took, as Markdown."""
    document = found.document
    passes = "one pass" if document.passes == 1 else f"{document.passes} passes"
    text = (
        f"{loaded.name} read **{document.tokens:,} tokens** ({len(document.passages)} passages) in **{passes}**, and "
        f"each passage by itself, in **{document.seconds:.1f} seconds**, "
        f"once for all questions. This one took {1000 * found.seconds:.0f} ms."
    )
    if document.passes > 1:
        text += f" A pass takes at most {loaded.longest:,} tokens; a passage knows the text of its pass."
    return text


def list_best(found: Found) -> str:
    """The best passages with links to their places in the document, as HTML."""
    best = sorted(enumerate(found.similarities), key=lambda pair: -pair[1])[:LISTED]
    passages = found.document.passages
    lines = [
        f'<li><a href="#passage-{place}">{similarity:.2f}</a> <span>{escape(passages[place])}</span></li>'
        for place, similarity in best
    ]
    return f"<ol>{''.join(lines)}</ol>"


def light_up(found: Found) -> str:
    """The document as HTML: the further a passage is above the mean similarity, the brighter."""
    highest, mean = max(found.similarities), sum(found.similarities) / len(found.similarities)
    shares = [max(0.0, cosine - mean) / (highest - mean or 1.0) for cosine in found.similarities]
    return "".join(
        f'<p id="passage-{place}" class="{"best" if share == 1 else ""}" '
        f'style="background: rgba(255, 170, 0, {0.6 * share**2:.2f})">{escape(passage)}</p>'
        for place, (share, passage) in enumerate(zip(shares, found.document.passages, strict=True))
    )
