"""The words of a text in any script, for ROUGE."""

from unicodedata import normalize

import regex
from rouge_score.tokenizers import DefaultTokenizer, Tokenizer

# Scripts that put no spaces between words: each character is one, with its marks.
_UNSPACED = "".join(rf"\p{{scx={script}}}" for script in ("Hani", "Hira", "Kana", "Thai", "Laoo", "Khmr", "Mymr"))
_WORD = regex.compile(rf"(?V1)[[\p{{L}}\p{{N}}]&&[{_UNSPACED}]]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[{_UNSPACED}]]+")


class UnicodeTokenizer(Tokenizer):
    """Lower-case runs of letters, marks and digits; ASCII words are those of rouge-score, with its stemmer."""

    def __init__(self) -> None:
        self.ascii = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        words = _WORD.findall(normalize("NFC", text.lower()))
        return [part for word in words for part in (self.ascii.tokenize(word) if word.isascii() else [word])]
