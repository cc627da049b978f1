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
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, RobertaTokenizer
from transformers.utils import cached_file

from luna_hf import FairseqBpeTokenizer
from luna_hf.scripting import UserError, reason

from .checkpoint import DICTIONARY
from .config import EOS, MASK, SPECIALS, UNK

END_OF_TEXT = "<|endoftext|>"  # GPT-2's last token, which no text produces
# Unused rows that fill a dictionary up to a multiple of 8, and additional symbols such as <sep>.
_SPECIAL = re.compile(r"madeupword\d+|<.+>", re.ASCII)
_ID = re.compile(r"0|[1-9]\d*", re.ASCII)
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


@dataclass(frozen=True)
class Bpe:
    """A byte-level BPE."""

    tokens: list[str]  # in the order of their ids; bytes are written as the characters of `byte_characters`
    merges: list[tuple[str, str]]  # in order of priority

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
    vocab_file, merges_file = _bpe_files(source)
    try:
        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        tokens = sorted(vocab, key=vocab.__getitem__)
        lines = Path(merges_file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{vocab_file} and {merges_file} cannot be read as JSON and UTF-8 text ({error}).") from error
    if [vocab[token] for token in tokens] != list(range(len(tokens))):
        raise UserError(f"{vocab_file} is no vocabulary: it must give every token an id, from 0 without gaps.")
    # A later line may begin with a number sign, which is a token.
    merges = [tuple(line.split()) for line in lines[lines[0].startswith("#version") :] if line.strip()]
    wrong = [" ".join(merge) for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys()]
    if wrong := [*wrong, *(byte for byte in byte_characters() if byte not in vocab)]:
        raise UserError(f"{vocab_file} and {merges_file} do not belong together: see {wrong[0]!r}.")
    return Bpe(tokens, merges)


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
        if (is_id and int(symbol) >= len(bpe.tokens)) or not (is_id or _SPECIAL.fullmatch(symbol)):
            raise UserError(
                f"The symbol {symbol!r} is neither the id of one of the {len(bpe.tokens)} tokens of the BPE nor a "
                "special symbol. Only dictionaries over GPT-2's BPE can be converted: --gpt2-bpe FOLDER."
            )
        token = bpe.tokens[int(symbol)] if is_id else symbol
        if token in vocab or (not is_id and token in made):
            raise UserError(f"The dictionary has the symbol {token!r}, which is also a token of the BPE.")
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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = _steps(backend) if backend is not None else {}
    if steps.get("type") != "BPE":
        raise UserError(f"A {type(tokenizer).__name__} without GPT-2's byte-level BPE cannot be exported to fairseq.")
    bpe = bpe_from_merges(steps["merges"])
    ids = {token: index for index, token in enumerate(bpe.tokens)}
    vocab = tokenizer.get_vocab()
    lines = [f"{ids.get(token, token)} 0\n" for token in sorted(vocab, key=vocab.__getitem__)[len(SPECIALS) :]]
    if vocab.get(MASK) == len(vocab) - 1:
        lines.pop()  # fairseq adds it
    (folder / DICTIONARY).write_text("".join(lines), encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "".join(f"{left} {right}\n" for left, right in bpe.merges)
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    again = build_tokenizer(read_dictionary(folder / DICTIONARY), read_bpe(str(folder)), None)
    if odd := vocab.items() ^ (theirs := again.get_vocab()).items():
        token = min(odd, key=lambda item: (item[1], item[0]))[0]
        raise UserError(f"The tokenizer gives {token!r} the id {vocab.get(token)}, fairseq {theirs.get(token)}.")
    # Where nothing stands for missing tokens, the library drops them from a text; fairseq writes <unk>.
    if odd := backend.get_vocab().keys() ^ again.backend_tokenizer.get_vocab().keys():
        raise UserError(f"The tokenizer has no id for {min(odd)!r}, which it would drop from a text.")
    if odd := sorted(name for name, value in _steps(again.backend_tokenizer).items() if steps.get(name) != value):
        raise UserError(f"A {type(tokenizer).__name__} with other {', '.join(odd)} than fairseq's cannot be exported.")


def write_labels(names: list[str], path: Path) -> None:
    """Write label/dict.txt, which is read back and must give the same names.

    Raises:
        UserError: It cannot hold a name.
    """
    path.parent.mkdir()
    path.write_text("".join(f"{name} 0\n" for name in names), encoding="utf-8")
    if list(read_labels(path)) != names:
        raise UserError(f"`id2label` is {names}, which label/dict.txt cannot hold.")


def _steps(backend: Tokenizer) -> dict[str, Any]:
    """What a tokenizer does to a text, apart from its vocabulary; merges as pairs."""
    state = json.loads(backend.to_str())
    cut, model = state["pre_tokenizer"] or {}, state["model"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges", ())]
    altered = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return {
        **{"type": model.get("type"), "merges": merges, "normalizer": state["normalizer"]},
        **{"pre_tokenizer": cut.get("type"), "use_regex": cut.get("use_regex", True)},
        **{"add_prefix_space": cut.get("add_prefix_space"), **{name: model.get(name) or None for name in altered}},
    }
