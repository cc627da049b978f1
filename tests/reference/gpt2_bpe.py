"""A literal, slow reference of GPT-2's byte-level BPE and fairseq's dictionary, merging one pair at a time.

The BPE is that of Radford et al. 2019 (section 2.2); the regular expression that splits words is from their code.
"""

import json
from itertools import pairwise
from pathlib import Path

import regex

WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def character_of(byte: int) -> str:
    """Map printable bytes to themselves, and the n-th of the others (the space included) to character 256 + n."""

    def is_printable(value: int) -> bool:
        return ord("!") <= value <= ord("~") or ord("¡") <= value <= ord("¬") or ord("®") <= value <= ord("ÿ")

    if is_printable(byte):
        return chr(byte)
    return chr(256 + sum(not is_printable(value) for value in range(byte)))


class Gpt2Bpe:
    """BPE from a folder with vocab.json and merges.txt, or encoder.json and vocab.bpe."""

    def __init__(self, folder: Path) -> None:
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        if not vocab.exists():
            vocab, merges = folder / "encoder.json", folder / "vocab.bpe"
        self.ids = json.loads(vocab.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")[1:]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines) if line}

    def pieces(self, word: str) -> list[str]:
        """Merge all occurrences of the pair with the lowest rank, left to right, until no pair has a rank."""
        parts = [character_of(byte) for byte in word.encode("utf-8")]
        while True:
            pairs = [pair for pair in pairwise(parts) if pair in self.ranks]
            if not pairs:
                return parts
            best, merged = min(pairs, key=self.ranks.__getitem__), []
            while parts:
                if tuple(parts[:2]) == best:
                    merged.append(parts[0] + parts[1])
                    parts = parts[2:]
                else:
                    merged.append(parts[0])
                    parts = parts[1:]
            parts = merged

    def encode(self, text: str) -> list[int]:
        """Return BPE ids without special tokens."""
        return [self.ids[piece] for word in WORD.findall(text) for piece in self.pieces(word)]


class FairseqEncoder:
    """Encode text as embedding rows of a fairseq model: BPE ids are looked up in the dictionary as decimal strings."""

    def __init__(self, bpe: Gpt2Bpe, lines: list[str]) -> None:
        self.bpe = bpe
        self.rows = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
        for line in lines:
            self.rows[line.split(" ")[0]] = len(self.rows)
        self.rows.setdefault("<mask>", len(self.rows))

    def row(self, symbol: str) -> int:
        """Return the row of a symbol, or that of <unk>."""
        return self.rows.get(symbol, self.rows["<unk>"])

    def words(self, text: str) -> list[int]:
        """Return the rows of a text without special tokens."""
        return [self.row(str(index)) for index in self.bpe.encode(text)]

    def encode(self, text: str, *more: str) -> list[int]:
        """Encode `<s> text </s>`, followed by `</s> text </s>` for each additional text."""
        rows = [self.row("<s>"), *self.words(text), self.row("</s>")]
        for other in more:
            rows += [self.row("</s>"), *self.words(other), self.row("</s>")]
        return rows

    def encode_masked(self, text: str) -> list[int]:
        """Encode a text with `<mask>` tokens; the parts between are stripped at the end and encoded separately."""
        rows = [self.row("<s>")]
        for place, part in enumerate(text.split("<mask>")):
            rows += [self.row("<mask>")] if place else []
            rows += self.words(part.rstrip())
        return [*rows, self.row("</s>")]
