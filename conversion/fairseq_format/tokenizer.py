"""Tokenizers of fairseq models over GPT-2's byte-level BPE, from fairseq's files and back.

fairseq encodes a text in two steps. GPT-2's BPE gives ids (`encoder.json`, `vocab.bpe`), and a dictionary (`dict.txt`)
of these ids, as decimal symbols, gives the rows of the model. A token with an id that the dictionary lacks is `<unk>`.
"""

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, RobertaTokenizer
from transformers.utils import cached_file

from luna_hf import FairseqBpeTokenizer
from luna_hf.scripting import UserError, reason

from .config import MASK, SPECIALS

END_OF_TEXT = "<|endoftext|>"  # GPT-2's last token, which no text produces
OVERWRITE = "#fairseq:overwrite"
# Unused rows that fill a dictionary up to a multiple of 8, and additional symbols such as <sep>.
FILLER, BRACKETED = re.compile(r"madeupword\d+", re.ASCII), re.compile(r"<.+>")
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
# SHA-256 of the symbols of RoBERTa's dict.txt, as `read_dictionary` returns them, joined by line feeds.
ROBERTA_SYMBOLS = "fdd498f7559a263e2bdb3afd43fce08a5fff3c2a4cf1002f68fb447ca56c07be"


@dataclass(frozen=True)
class Bpe:
    """A byte-level BPE.

    Attributes:
        tokens: in the order of their ids; bytes are written as the characters of `byte_characters`.
        merges: pairs of tokens, in order of priority.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]

    def from_text(self) -> list[str]:
        """The tokens that a text can produce, in the order of their ids: bytes and results of merges."""
        possible = {*byte_characters(), *("".join(merge) for merge in self.merges)}
        return [token for token in self.tokens if token in possible]


def byte_characters() -> list[str]:
    """The 256 characters that stand for bytes, in the order of their ids in GPT-2.

    Printable bytes come first and stand for themselves. The other 68 are the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*map(chr, printable), *(chr(0x100 + place) for place in range(256 - len(printable)))]


def bpe_from_merges(merges: list[tuple[str, str]]) -> Bpe:
    """The BPE of these merges with GPT-2's ids: bytes, results of the merges in order, `<|endoftext|>`."""
    made = ("".join(merge) for merge in merges)
    return Bpe(list(dict.fromkeys([*byte_characters(), *made, END_OF_TEXT])), merges)


# ---- reading ----


def read_dictionary(path: Path) -> list[str]:
    """Symbols of a `dict.txt` by their ids: `<s>`, `<pad>`, `</s>`, `<unk>`, the lines of the file, `<mask>`.

    Fillers (`madeupword0000`) are kept because the model has rows for them. A `<mask>` in the file keeps its place.

    Raises:
        UserError: The file cannot be read, or is no dictionary over GPT-2's BPE.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # some editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The dictionary {path} cannot be read ({error}).") from error
    if not lines:
        raise UserError(f"The dictionary {path} is empty. Each of its lines must hold a symbol and a count.")
    symbols = dict.fromkeys(SPECIALS)
    for number, line in enumerate(lines, start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        place = f"{path}, line {number}"
        if count == OVERWRITE:
            raise UserError(
                f"{place}: {OVERWRITE} gives {symbol!r} a second row, which no tokenizer here can have. Remove the "
                "flag, and rename the symbol if its first row is in use."
            )
        if not symbol or not re.fullmatch(r"\d+", count, re.ASCII):
            raise UserError(f"{place}: {line!r} is not a symbol and a count, separated by a space.")
        if not (_is_bpe_id(symbol) or FILLER.fullmatch(symbol) or BRACKETED.fullmatch(symbol)):
            raise UserError(
                f"{place}: {symbol!r} is neither the decimal id of a token nor a special symbol. Only dictionaries "
                "over GPT-2's BPE can be converted."
            )
        if symbol in symbols:
            raise UserError(f"{place}: {symbol!r} occurs twice in the dictionary.")
        symbols[symbol] = None
    return [*symbols] if MASK in symbols else [*symbols, MASK]


def _is_bpe_id(symbol: str) -> bool:
    return re.fullmatch(r"0|[1-9]\d*", symbol, re.ASCII) is not None


def read_bpe(source: str) -> Bpe:
    """The BPE of a folder or Hub repository: vocab.json and merges.txt, or fairseq's encoder.json and vocab.bpe.

    Raises:
        UserError: They are missing, damaged, or do not belong together.
    """
    vocab_file, merges_file = _bpe_files(source)
    try:
        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        lines = Path(merges_file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{vocab_file} and {merges_file} cannot be read as JSON and UTF-8 text ({error}).") from error
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(type(index) is int for index in ids) or sorted(ids) != list(range(len(ids))):
        raise UserError(f"{vocab_file} is no vocabulary: it must give every token an id, from 0 without gaps.")
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        # A later line may begin with a number sign, which is a token.
        if not parts or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2:
            raise UserError(f"{merges_file}, line {number}: {line!r} is not two tokens separated by a space.")
        merges.append((parts[0], parts[1]))
    for token in (*byte_characters(), *(token for merge in merges for token in (*merge, "".join(merge)))):
        if token not in vocab:
            raise UserError(f"{vocab_file} lacks the token {token!r}, which {merges_file} and byte-level BPE need.")
    return Bpe(sorted(vocab, key=vocab.__getitem__), merges)


def _bpe_files(source: str) -> tuple[str, str]:
    """Paths of the vocabulary and of the merges."""
    for vocab, merges in ((Path(source) / a, Path(source) / b) for a, b in BPE_FILES):
        if vocab.is_file() and merges.is_file():
            return str(vocab), str(merges)
    why = "not in that folder"
    if not Path(source).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        print(f"GPT-2's BPE files: from {source} on the Hub", file=sys.stderr, flush=True)
        try:
            vocab, merges = (cached_file(source, file) for file in BPE_FILES[0])
            return vocab, merges
        except (OSError, ValueError) as error:
            why = reason(error)
    raise UserError(
        f"GPT-2's vocab.json and merges.txt (fairseq's encoder.json and vocab.bpe) were not found at {source} ({why}). "
        "Download them and name their folder: --gpt2-bpe FOLDER."
    )


# ---- from fairseq ----


def is_roberta(symbols: list[str]) -> bool:
    """Whether these are RoBERTa's ids, for which `FacebookAI/roberta-base` has a tokenizer."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest() == ROBERTA_SYMBOLS


def build_tokenizer(symbols: list[str], bpe: Bpe, max_length: int | None) -> RobertaTokenizer:
    """A tokenizer that gives a text the ids that fairseq gives it.

    The forms are `<s> a </s>` and `<s> a </s></s> b </s>`. `<mask>` absorbs the spaces before it, as in fairseq's
    `fill_mask` (which also drops spaces at the end, and counts U+001C to U+001F as spaces; both are kept here). Other
    special tokens written in a text are text to fairseq, and here with `split_special_tokens=True`.

    Args:
        symbols: the result of `read_dictionary`.
        bpe: the BPE below the dictionary.
        max_length: the model's longest input, in tokens.

    Returns:
        A plain `RobertaTokenizer`, or a `FairseqBpeTokenizer` if the dictionary lacks a token that a text can produce.

    Raises:
        UserError: The dictionary is not over this BPE.
    """
    vocab: dict[str, int] = {}
    for index, symbol in enumerate(symbols):
        token = symbol
        if _is_bpe_id(symbol):
            if int(symbol) >= len(bpe.tokens):
                raise UserError(
                    f"The dictionary has the symbol {symbol}, but the BPE only {len(bpe.tokens)} tokens. Name the "
                    "folder of the right BPE files: --gpt2-bpe FOLDER."
                )
            token = bpe.tokens[int(symbol)]
        if token in vocab:
            raise UserError(f"The dictionary has the symbol {token!r}, which is also a token of the BPE.")
        vocab[token] = index
    missing = [token for token in bpe.from_text() if token not in vocab]
    options: dict[str, Any] = {
        "merges": bpe.merges,
        "mask_token": AddedToken(MASK, lstrip=True, special=True),  # transformers' default keeps the space
        "model_max_length": max_length,
    }
    if not missing:
        return RobertaTokenizer(vocab=vocab, **options)
    vocab.update((token, index) for index, token in enumerate(missing, start=len(symbols)))
    return FairseqBpeTokenizer(vocab=vocab, missing_tokens=len(missing), **options)


def write_vocabulary(tokenizer: RobertaTokenizer, folder: Path) -> None:
    """Write vocab.json (fairseq's ids) and merges.txt for other programs; transformers reads tokenizer.json.

    Tokens that the dictionary lacks are not in vocab.json, but the merges that make them are in merges.txt.
    """
    vocab = tokenizer.get_vocab()
    ordered = {token: vocab[token] for token in sorted(vocab, key=vocab.__getitem__)}
    (folder / "vocab.json").write_text(json.dumps(ordered, ensure_ascii=False), encoding="utf-8")
    _write_merges(_merges_of(tokenizer), folder / "merges.txt")


def _write_merges(merges: list[tuple[str, str]], path: Path) -> None:
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    path.write_text(f"#version: 0.2\n{lines}", encoding="utf-8")


# ---- to fairseq ----


def export_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `dict.txt`, `encoder.json` and `vocab.bpe`, with which fairseq gives every text the same ids.

    The BPE's ids are GPT-2's (`bpe_from_merges`). Counts are 0, because they are unknown.

    Args:
        tokenizer: a byte-level BPE in RoBERTa's form.
        folder: an existing folder.

    Raises:
        UserError: fairseq cannot express the tokenizer.
    """
    bpe = bpe_from_merges(_merges_of(tokenizer))
    vocab = tokenizer.get_vocab()
    complete = len(tokenizer) == tokenizer.backend_tokenizer.get_vocab_size()
    _check_vocabulary(vocab, bpe, complete)
    ids = {token: index for index, token in enumerate(bpe.tokens)}
    lines = []
    for token in sorted(vocab, key=vocab.__getitem__)[len(SPECIALS) :]:
        symbol = str(ids.get(token, token))
        if not (token in ids or FILLER.fullmatch(token) or BRACKETED.fullmatch(token)) or any(map(str.isspace, symbol)):
            raise UserError(
                f"The tokenizer's token {token!r} (id {vocab[token]}) has no symbol in fairseq's dictionary, because "
                "it is not a token of the BPE."
            )
        lines.append(f"{symbol} 0\n")
    if vocab[MASK] == len(vocab) - 1:
        lines.pop()  # fairseq adds it
    (folder / "dict.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    _write_merges(bpe.merges, folder / "vocab.bpe")


def _merges_of(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {}
    model, cut = state.get("model") or {}, state.get("pre_tokenizer") or {}
    byte_level = cut.get("type") == "ByteLevel" and cut.get("use_regex", True) and not state["normalizer"]
    altered = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    if model.get("type") != "BPE" or not byte_level or any(model.get(name) for name in altered):
        raise UserError(f"A {type(tokenizer).__name__} without GPT-2's byte-level BPE cannot be exported to fairseq.")
    if cut["add_prefix_space"]:
        raise UserError("`add_prefix_space` is set, but fairseq puts no space before a text.")
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in merges]


def _check_vocabulary(vocab: dict[str, int], bpe: Bpe, complete: bool) -> None:
    names = {index: token for token, index in vocab.items()}
    for index, token in enumerate(SPECIALS):
        if names.get(index) != token:
            raise UserError(f"The tokenizer has {names.get(index)!r} with the id {index}, where fairseq has {token!r}.")
    if MASK not in vocab:
        raise UserError(f"The tokenizer has no token {MASK!r}, for which fairseq's model has a row.")
    if gaps := set(range(len(vocab))) - names.keys():
        raise UserError(f"The tokenizer has no token with the id {min(gaps)}, but fairseq's ids have no gaps.")
    if made := {*SPECIALS, MASK} & set(bpe.from_text()):
        raise UserError(f"The tokenizer's BPE makes the special token {min(made)!r} from text, unlike fairseq's.")
    # Where nothing stands for missing tokens, the library drops them from a text; fairseq writes <unk>.
    if complete and (absent := [byte for byte in byte_characters() if byte not in vocab]):
        raise UserError(f"The tokenizer has no token for the byte {absent[0]!r}, which it would drop from a text.")
