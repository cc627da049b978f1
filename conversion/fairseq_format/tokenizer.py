"""Tokenizers of fairseq models, from fairseq's files and back.

fairseq encodes a text for a masked language model in two steps. GPT-2's BPE gives ids (`encoder.json`, `vocab.bpe`),
and a dictionary (`dict.txt`) of these ids, as decimal symbols, gives the rows of the model. A token with an id that the
dictionary lacks is `<unk>`. A translation model has a dictionary of words for each language.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, RobertaTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import cached_file

from luna_hf import FairseqBpeTokenizer
from luna_hf.scripting import UserError, reason

from .checkpoint import DICTIONARY
from .config import EOS, MASK, SPECIALS, UNK

END_OF_TEXT = "<|endoftext|>"  # GPT-2's last token, which no text produces
BYTES = list(bytes_to_unicode().values())  # the characters that stand for bytes, in the order of their ids in GPT-2
# Unused rows that fill a dictionary up to a multiple of 8, and additional symbols such as <sep>.
_SPECIAL = re.compile(r"madeupword\d+|<.+>", re.ASCII)
_ID = re.compile(r"0|[1-9]\d*", re.ASCII)
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


@dataclass(frozen=True)
class Bpe:
    """A byte-level BPE."""

    tokens: list[str]  # in the order of their ids
    merges: list[tuple[str, str]]  # in order of priority

    def from_text(self) -> list[str]:
        """The tokens that a text can produce, in the order of their ids: bytes and results of merges."""
        possible = {*BYTES, *("".join(merge) for merge in self.merges)}
        return [token for token in self.tokens if token in possible]


def bpe_from_merges(merges: list[tuple[str, str]]) -> Bpe:
    """The BPE of these merges with GPT-2's ids: bytes, results of the merges in order, `<|endoftext|>`."""
    made = ("".join(merge) for merge in merges)
    return Bpe(list(dict.fromkeys([*BYTES, *made, END_OF_TEXT])), merges)


# ---- reading ----


def read_dictionary(path: Path, mask: bool = True) -> list[str]:
    """Symbols of a dictionary by their ids: `<s>`, `<pad>`, `</s>`, `<unk>`, the lines of the file, `<mask>`.

    Fillers (`madeupword0000`) are kept because the model has rows for them. A `<mask>` in the file keeps its place, and
    is added only with `mask`, as in a masked language model.

    Raises:
        UserError: The file cannot be read, or is no dictionary.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The dictionary {path} cannot be read ({error}).") from error
    symbols = dict.fromkeys(SPECIALS)
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        symbol, _, count = line.rstrip("\r").rpartition(" ")
        if not symbol or not re.fullmatch(r"\d+", count, re.ASCII) or symbol in symbols:
            raise UserError(f"{path}, line {number}: {line!r} is not a new symbol and a count, separated by a space.")
        symbols[symbol] = None
    return [*symbols, MASK] if mask and MASK not in symbols else [*symbols]


def read_labels(path: Path) -> tuple[str, ...]:
    """Names of the classes in the order of the outputs: the lines of fairseq's label dictionary before its fillers.

    Raises:
        UserError: The file cannot be read, or is no dictionary.
    """
    symbols = read_dictionary(path, mask=False)[len(SPECIALS) :]
    return tuple(name for name in symbols if not name.startswith("madeupword"))


def read_bpe(source: str) -> Bpe:
    """The BPE of a folder or Hub repository: vocab.json and merges.txt, or fairseq's encoder.json and vocab.bpe.

    Raises:
        UserError: They are missing, damaged, or do not belong together.
    """
    files = _bpe_files(source)
    try:
        vocab, merges = BPE.read_file(*files)
        BPE(vocab, merges)  # fails for a merge of unknown tokens
        if sorted(vocab.values()) != list(range(len(vocab))) or not vocab.keys() >= set(BYTES):
            raise ValueError("the vocabulary lacks ids or bytes")
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{files[0]} and {files[1]} are not the files of one byte-level BPE ({error}).") from error
    return Bpe(sorted(vocab, key=vocab.__getitem__), merges)


def _bpe_files(source: str) -> tuple[str, str]:
    """Paths of the vocabulary and of the merges."""
    for vocab, merges in ((Path(source) / a, Path(source) / b) for a, b in BPE_FILES):
        if vocab.is_file() and merges.is_file():
            return str(vocab), str(merges)
    why = "not in that folder"
    if not Path(source).exists():
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


def build_tokenizer(symbols: list[str], bpe: Bpe, max_length: int | None) -> RobertaTokenizer:
    """A tokenizer that gives a text the ids that fairseq gives it, with the symbols of `read_dictionary`.

    It is a `RobertaTokenizer`, or a `FairseqBpeTokenizer` if the dictionary lacks a token that a text can produce.
    `<mask>` absorbs the spaces before it, as in fairseq's `fill_mask` (which also drops spaces at the end, and counts
    U+001C to U+001F as spaces; both are kept here). Other special tokens written in a text are text to fairseq, and
    here with `split_special_tokens=True`.

    Raises:
        UserError: The dictionary is not over this BPE.
    """
    vocab: dict[str, int] = {}
    from_text = bpe.from_text()
    made = set(from_text)
    for index, symbol in enumerate(symbols):
        is_id = _ID.fullmatch(symbol) is not None
        known = int(symbol) < len(bpe.tokens) if is_id else _SPECIAL.fullmatch(symbol) and symbol not in made
        token = bpe.tokens[int(symbol)] if is_id and known else symbol
        if not known or token in vocab:
            raise UserError(
                f"The symbol {symbol!r} is neither the id of one of the {len(bpe.tokens)} tokens of the BPE nor a "
                "special symbol, or it appears twice. Only dictionaries over GPT-2's BPE can be converted: --gpt2-bpe "
                "FOLDER."
            )
        vocab[token] = index
    missing = [token for token in from_text if token not in vocab]
    options: dict[str, Any] = {
        "merges": bpe.merges,
        "mask_token": AddedToken(MASK, lstrip=True, special=True),  # transformers' default keeps the space
        "model_max_length": max_length,
    }
    if not missing:
        return RobertaTokenizer(vocab=vocab, **options)
    vocab.update((token, index) for index, token in enumerate(missing, start=len(symbols)))
    return FairseqBpeTokenizer(vocab=vocab, missing_tokens=len(missing), **options)


def word_tokenizer(symbols: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of text that is already split as in the training run (Moses and BPE, for example).

    It looks words up and ends each text with `</s>`; decoding joins `@@ `, the mark of subword-nmt.
    """
    backend = Tokenizer(WordLevel({symbol: place for place, symbol in enumerate(symbols)}, unk_token=SPECIALS[UNK]))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    # Each symbol gets a space, unless it goes on.
    steps = [decoders.Replace(Regex(r"(?<!@@)\z"), " "), decoders.Replace(Regex(r"@@\z"), ""), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 0, 1)])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **names)


# ---- to fairseq ----


def export_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `dict.txt`, `encoder.json` and `vocab.bpe`, with which fairseq gives every text the same ids.

    The BPE's ids are GPT-2's (`bpe_from_merges`). Counts are 0, because they are unknown. The files are read back, and
    must make the same tokenizer.

    Raises:
        UserError: fairseq cannot express the tokenizer.
    """
    steps = _steps(tokenizer)
    bpe = bpe_from_merges([tuple(merge) for merge in steps["merges"]])
    ids = {token: index for index, token in enumerate(bpe.tokens)}
    vocab = tokenizer.get_vocab()
    symbols = [str(ids.get(token, token)) for token in sorted(vocab, key=vocab.__getitem__)]
    if symbols[-1] == MASK:
        symbols.pop()  # fairseq adds it
    lines = "".join(f"{symbol} 0\n" for symbol in symbols[len(SPECIALS) :])
    (folder / DICTIONARY).write_text(lines, encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "".join(f"{left} {right}\n" for left, right in bpe.merges)
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    again = build_tokenizer(read_dictionary(folder / DICTIONARY), read_bpe(str(folder)), None)
    if odd := vocab.items() ^ again.get_vocab().items():
        raise UserError(f"fairseq would give {min(odd)[0]!r} another id than the tokenizer does.")
    if odd := sorted(name for name, value in _steps(again).items() if steps[name] != value):
        raise UserError(f"A {type(tokenizer).__name__} with other {', '.join(odd)} than fairseq's cannot be exported.")


def write_labels(names: tuple[str, ...], path: Path) -> None:
    """Write label/dict.txt, which is read back and must give the same names.

    Raises:
        UserError: It cannot hold a name.
    """
    path.parent.mkdir()
    path.write_text("".join(f"{name} 0\n" for name in names), encoding="utf-8")
    if read_labels(path) != names:
        raise UserError(f"`id2label` is {names}, which label/dict.txt cannot hold.")


def _steps(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a tokenizer does to a text.

    The vocabulary here includes the tokens that have no id but stand for `<unk>`: the library drops others from a text.

    Raises:
        UserError: It has no BPE.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if state["model"].get("type") != "BPE":
        raise UserError(f"A {type(tokenizer).__name__} without GPT-2's byte-level BPE cannot be exported to fairseq.")
    model, cut = state["model"], state["pre_tokenizer"] or {}
    own = {name: model[name] or None for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")}
    split = {name: cut.get(name) for name in ("type", "use_regex", "add_prefix_space")}
    known = {"merges": model["merges"], "normalizer": state["normalizer"], "tokens": sorted(backend.get_vocab())}
    return {**known, "pre_tokenizer": split, **own}
