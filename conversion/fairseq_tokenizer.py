"""Tokenizers of fairseq models over GPT-2's byte-level BPE, from fairseq's files and back to them.

fairseq encodes a text in two steps: GPT-2's BPE gives ids (`encoder.json`, `vocab.bpe`), and a dictionary (`dict.txt`),
whose symbols are these ids in decimal, gives the rows of the model. A piece whose id the dictionary lacks is `<unk>`.
"""

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import UserError, without_retry_warnings
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, RobertaTokenizer
from transformers.utils import cached_file

from luna_hf import FairseqBpeTokenizer

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3 of every dictionary of fairseq
MASK = "<mask>"
END_OF_TEXT = "<|endoftext|>"  # GPT-2's last token, which no text is cut into
OVERWRITE = "#fairseq:overwrite"
# Rows without a use, which fill a dictionary up to a multiple of 8, and further symbols such as <sep>.
FILLER, BRACKETED = re.compile(r"madeupword\d+", re.ASCII), re.compile(r"<.+>")
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
# SHA-256 of the symbols of RoBERTa's dict.txt, in the order of `read_dictionary`, joined by line feeds.
ROBERTA_SYMBOLS = "fdd498f7559a263e2bdb3afd43fce08a5fff3c2a4cf1002f68fb447ca56c07be"


@dataclass(frozen=True)
class Bpe:
    """A byte-level BPE.

    Attributes:
        tokens: the pieces by their ids; a byte stands as the character that `byte_characters` gives it.
        merges: pairs of pieces, the most urgent first.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]

    def from_text(self) -> list[str]:
        """The tokens that a text can be cut into, by their ids: bytes and what merges make."""
        possible = {*byte_characters(), *("".join(merge) for merge in self.merges)}
        return [token for token in self.tokens if token in possible]


def byte_characters() -> list[str]:
    """The 256 characters that stand for bytes, in the order of their ids in GPT-2.

    A printable byte stands for itself, and they come first. The other 68 are the characters from U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*map(chr, printable), *(chr(0x100 + place) for place in range(256 - len(printable)))]


def bpe_from_merges(merges: list[tuple[str, str]]) -> Bpe:
    """The BPE of these merges with GPT-2's ids: bytes, what the merges make in their order, `<|endoftext|>`."""
    made = ("".join(merge) for merge in merges)
    return Bpe(list(dict.fromkeys([*byte_characters(), *made, END_OF_TEXT])), merges)


# ---- reading ----


def read_dictionary(path: Path) -> list[str]:
    """Symbols of a `dict.txt` by their ids: `<s>`, `<pad>`, `</s>`, `<unk>`, the lines of the file, `<mask>`.

    Fillers (`madeupword0000`) are kept, since the model has rows for them. A `<mask>` in the file keeps its place.

    Raises:
        UserError: The file cannot be read, or a line of it is not one of a dictionary over GPT-2's BPE.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors put a mark in front
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"The dictionary {path} cannot be read ({reason}).") from error
    if not lines:
        raise UserError(f"The dictionary {path} is empty. It has a line for every symbol: the symbol and its count.")
    symbols = dict.fromkeys(SPECIALS)
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        symbol = _read_line(line, place)
        if symbol in symbols:
            raise UserError(f"{place}: {symbol!r} is in the dictionary already.")
        symbols[symbol] = None
    return [*symbols] if MASK in symbols else [*symbols, MASK]


def _read_line(line: str, place: str) -> str:
    symbol, _, count = line.rstrip().rpartition(" ")
    if count == OVERWRITE:
        raise UserError(
            f"{place}: the flag {OVERWRITE} gives one symbol two rows, which no tokenizer here can hold. Remove the "
            "flag and rename the symbol, for example to madeupword9999, if its first row is the one in use."
        )
    if not symbol or not re.fullmatch(r"\d+", count, re.ASCII):
        raise UserError(f"{place}: {line.rstrip()!r} is not a symbol and its count, with a blank between.")
    if not (_is_bpe_id(symbol) or FILLER.fullmatch(symbol) or BRACKETED.fullmatch(symbol)):
        raise UserError(
            f"{place}: {symbol!r} is not the id of a piece in decimal, nor a filler (madeupword0000), nor a special "
            "symbol (<sep>). The dictionary is not one over GPT-2's BPE, the only kind that can be converted."
        )
    return symbol


def _is_bpe_id(symbol: str) -> bool:
    return re.fullmatch(r"0|[1-9]\d*", symbol, re.ASCII) is not None


def read_bpe(source: str) -> Bpe:
    """The BPE of a folder or Hub name: vocab.json and merges.txt, or encoder.json and vocab.bpe, as fairseq calls them.

    Raises:
        UserError: They are not there, or do not belong together.
    """
    vocab_file, merges_file = _bpe_files(source)
    tokens, merges = _read_tokens(vocab_file), _read_merges(merges_file)
    known = set(tokens)
    for character in byte_characters():
        if character not in known:
            raise UserError(
                f"{vocab_file} has no token for every byte ({character!r} is missing): it is not of a byte-level BPE."
            )
    for merge in merges:
        for token in (*merge, "".join(merge)):
            if token not in known:
                raise UserError(
                    f"{merges_file} merges {merge[0]!r} and {merge[1]!r}, but {vocab_file} has no token {token!r}: the "
                    "two files do not belong together."
                )
    return Bpe(tokens, merges)


def _bpe_files(source: str) -> tuple[str, str]:
    if Path(source).exists():
        for vocab, merges in ((Path(source) / a, Path(source) / b) for a, b in BPE_FILES):
            if vocab.is_file() and merges.is_file():
                return str(vocab), str(merges)
        reason = f"the folder {source} does not have them"
    else:
        try:
            return _bpe_from_hub(source)
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0].rstrip(".")
            reason = f"there is no folder {source}, nor can they be had of that name ({cause})"
    raise UserError(
        f"The dictionary is one over GPT-2's BPE, whose files are needed, vocab.json and merges.txt (encoder.json and "
        f"vocab.bpe to fairseq), but {reason}. Download the two files and name their folder: --gpt2-bpe FOLDER."
    )


def _bpe_from_hub(name: str) -> tuple[str, str]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ValueError("and it is no name on the Hub")
    print(f"GPT-2's BPE files: from {name} on the Hub", file=sys.stderr, flush=True)
    with without_retry_warnings():
        vocab, merges = (cached_file(name, file) for file in BPE_FILES[0])
    return vocab, merges


def _read_tokens(path: str) -> list[str]:
    try:
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from error
    ids = vocab.values() if isinstance(vocab, dict) else ()
    if not ids or not all(type(index) is int for index in ids) or sorted(ids) != list(range(len(ids))):
        raise UserError(f"{path} does not give every token an id, from 0 without a gap: it is not a vocabulary.")
    return sorted(vocab, key=vocab.__getitem__)


def _read_merges(path: str) -> list[tuple[str, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}).") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        # A later line may well begin with a number sign, which is a token too.
        if not parts or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2:
            raise UserError(f"{path}, line {number}: {line!r} is not two tokens with a blank between.")
        merges.append((parts[0], parts[1]))
    return merges


# ---- from fairseq ----


def is_roberta(symbols: list[str]) -> bool:
    """Whether these are RoBERTa's own ids, for which a tokenizer is published: that of `FacebookAI/roberta-base`."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest() == ROBERTA_SYMBOLS


def build_tokenizer(symbols: list[str], bpe: Bpe, max_length: int) -> RobertaTokenizer:
    """A tokenizer that gives a text the ids that fairseq gives it.

    `<s> a </s>`, and `<s> a </s></s> b </s>` for pairs. `<mask>` takes the blanks before it, as where fairseq fills
    masks (it also drops those at the end of such a text, and counts the control characters U+001C to U+001F among them:
    both are kept here). Elsewhere special tokens that stand in a text as words are text to fairseq; here they are with
    `split_special_tokens=True`.

    Args:
        symbols: what `read_dictionary` gives.
        bpe: what the dictionary is over.
        max_length: the model's longest input, in tokens.

    Returns:
        A plain `RobertaTokenizer`, or a `FairseqBpeTokenizer` if the dictionary lacks a piece that a text can have.

    Raises:
        UserError: The dictionary is not one over this BPE.
    """
    vocab: dict[str, int] = {}
    for index, symbol in enumerate(symbols):
        token = _token_of(symbol, bpe)
        if token in vocab:
            raise UserError(
                f"The dictionary has the symbol {token!r}, which is a piece of the BPE as well (symbol "
                f"{symbols[vocab[token]]!r} or {symbol!r}): no tokenizer can hold both."
            )
        vocab[token] = index
    missing = [token for token in bpe.from_text() if token not in vocab]
    options: dict[str, Any] = {
        "merges": bpe.merges,
        # By transformers' own default the blank before it is a piece.
        "mask_token": AddedToken(MASK, lstrip=True, special=True),
        "model_max_length": max_length,
    }
    if not missing:
        return RobertaTokenizer(vocab=vocab, **options)
    vocab.update((token, index) for index, token in enumerate(missing, start=len(symbols)))
    return FairseqBpeTokenizer(vocab=vocab, missing_tokens=len(missing), **options)


def _token_of(symbol: str, bpe: Bpe) -> str:
    if not _is_bpe_id(symbol):
        return symbol
    if int(symbol) >= len(bpe.tokens):
        raise UserError(
            f"The dictionary has the symbol {symbol}, but the BPE has only the tokens 0 to {len(bpe.tokens) - 1}: they "
            "do not belong together. Name the folder with the BPE's own files: --gpt2-bpe FOLDER."
        )
    return bpe.tokens[int(symbol)]


def write_vocabulary(tokenizer: RobertaTokenizer, folder: Path) -> None:
    """Write vocab.json (fairseq's ids) and merges.txt, which other programs read; transformers reads tokenizer.json.

    Pieces that the dictionary lacks have no id in vocab.json, and the merges that make them are in merges.txt.
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
    """Write `dict.txt`, `encoder.json` and `vocab.bpe`, with which fairseq gives the same ids to any text.

    The ids of the BPE are GPT-2's (`bpe_from_merges`). How often a symbol occurred is not known: the counts are 0.

    Args:
        tokenizer: a byte-level BPE in RoBERTa's form.
        folder: exists.

    Raises:
        UserError: fairseq cannot express the tokenizer; the message names the token or the option.
    """
    bpe = bpe_from_merges(_merges_of(tokenizer))
    vocab = tokenizer.get_vocab()
    _check_ids(vocab)
    _check_pieces(vocab, bpe, len(tokenizer) == tokenizer.backend_tokenizer.get_vocab_size())
    ids = {token: index for index, token in enumerate(bpe.tokens)}
    lines = []
    for token in sorted(vocab, key=vocab.__getitem__)[len(SPECIALS) :]:
        symbol = str(ids.get(token, token))
        if not (token in ids or FILLER.fullmatch(token) or BRACKETED.fullmatch(token)) or any(map(str.isspace, symbol)):
            raise UserError(
                f"The tokenizer has the token {token!r} (id {vocab[token]}), which is no piece of its BPE: fairseq's "
                "dictionary has no symbol for it."
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
        raise UserError(
            f"The tokenizer ({type(tokenizer).__name__}) does not cut texts as GPT-2's byte-level BPE does, the only "
            "kind that can be exported."
        )
    if cut["add_prefix_space"]:
        raise UserError("The tokenizer puts a blank before every text (add_prefix_space), which fairseq does not.")
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in merges]


def _check_ids(vocab: dict[str, int]) -> None:
    names = {index: token for token, index in vocab.items()}
    for index, token in enumerate(SPECIALS):
        if names.get(index) != token:
            raise UserError(
                f"The tokenizer has {token!r} {_place(vocab, token)}, and {names.get(index)!r} at {index}. fairseq has "
                f"{', '.join(SPECIALS)} at 0 to 3: the rows of the model would have to be put in another order first."
            )
    if MASK not in vocab:
        raise UserError(f"The tokenizer has no token {MASK!r}, which fairseq adds: the model would lack its row.")
    for index in range(len(vocab)):
        if index not in names:
            raise UserError(f"The tokenizer has no token with the id {index}, but has ids above: fairseq has no gaps.")


def _place(vocab: dict[str, int], token: str) -> str:
    return f"at id {vocab[token]}" if token in vocab else "nowhere"


def _check_pieces(vocab: dict[str, int], bpe: Bpe, complete: bool) -> None:
    pieces = set(bpe.from_text())
    for token in (*SPECIALS, MASK):
        if token in pieces:
            raise UserError(f"The tokenizer's BPE makes the special token {token!r} from text, which fairseq does not.")
    # Without a place for missing pieces, tokenizers skips them in a text, where fairseq has <unk>.
    for piece in byte_characters() if complete else ():
        if piece not in vocab:
            raise UserError(f"The tokenizer has no token for the byte {piece!r}, which it leaves out of a text.")
