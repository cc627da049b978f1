"""Text to masked blocks: reading a corpus, training a tokenizer, packing, masking.

Two kinds of corpus need no download: the documentation inside every CPython (`cpython`), and your own .txt files.
"""

import ast
import json
import os
import platform
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recipe import UserError
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, RobertaTokenizer

# Folders of the standard library's tree that are not the library: installed packages, and tests.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
_BLANK_LINES = re.compile(r"\n\s*\n")
# The lines of dashes and stars under a heading.
_UNDERLINE = re.compile(r"^[ \t]*[*=~^+#-]{4,}[ \t]*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """Documents, and one sentence that says what was read."""

    documents: list[str]
    description: str


def read_corpus(source: str) -> Corpus:
    """Read `cpython`, a .txt file, or every .txt file below a folder.

    In text files a blank line ends a document, as in the files RoBERTa was trained on.

    Raises:
        UserError: No such file or folder, a file that is not UTF-8, or nothing to read in it.
    """
    if source == "cpython":
        return read_cpython()
    path = Path(source)
    if not path.exists():
        raise UserError(f"`data` is {source!r}, but there is no such file or folder. Give one, or `cpython`.")
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise UserError(f"The folder {source} (`data`) holds no .txt file.")
    documents = [document for file in files for document in _text_documents(file)]
    if not documents:
        raise UserError(f"{source} (`data`) holds no text: {len(files)} file(s), all blank.")
    characters = sum(map(len, documents))
    return Corpus(
        documents, f"{len(documents):,} documents ({characters:,} characters) of {len(files)} text file(s), {path.name}"
    )


def read_cpython(library: Path | None = None) -> Corpus:
    """The English inside CPython: the language reference of `pydoc_data.topics`, and the library's docstrings.

    A topic is a document, and so are the docstrings of one module. Topics quote each other, and classes repeat the
    docstrings of their bases: a paragraph is kept where it comes first, so that no held-out document shares one with
    the training text. Sources are parsed, never imported.

    Args:
        library: folder of the standard library; by default that of the running interpreter.

    Raises:
        UserError: The folder holds no sources (some distributions strip them).
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    topics = read_topics(library / "pydoc_data" / "topics.py")
    modules = [text for text in map(read_docstrings, library_sources(library)) if text]
    seen: set[str] = set()
    documents = [kept for text in topics + modules if (kept := drop_seen_paragraphs(text, seen))]
    if not documents:
        raise UserError(
            "This Python comes without the sources of its standard library, so `data: cpython` has nothing to read. "
            "Use another Python, or set `data` to a .txt file or a folder of them."
        )
    characters = sum(map(len, documents))
    return Corpus(
        documents,
        f"the documentation inside CPython {platform.python_version()}: {len(topics)} topics of the language reference "
        f"and the docstrings of {len(modules)} modules, {characters:,} characters without repeated paragraphs",
    )


def read_topics(path: Path) -> list[str]:
    """The texts of `pydoc_data/topics.py` in the order of their names; none if the file is missing.

    Some versions of Python write escaped strings there, others raw ones; read as a literal they are the same.
    """
    if not path.is_file():
        return []
    for node in _parse(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return [topics[name] for name in sorted(topics)]
    return []


def library_sources(library: Path) -> Iterator[Path]:
    """The library's .py files, without tests and installed packages, in an order that no file system changes."""
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _NOT_LIBRARY)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def read_docstrings(path: Path) -> str:
    """The docstrings of a module, its classes and functions, in source order, with a blank line between them."""
    try:
        tree = _parse(path)
    except (SyntaxError, ValueError):  # templates and samples of broken code
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def drop_seen_paragraphs(text: str, seen: set[str]) -> str:
    """The text without the paragraphs that `seen` holds (spacing aside); adds the others to `seen`."""
    kept = []
    for paragraph in _BLANK_LINES.split(_UNDERLINE.sub("", text)):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def split_documents(documents: list[str], held_out_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out documents, each in its original order; at least one of both.

    Raises:
        UserError: There are fewer than two documents.
    """
    if len(documents) < 2:
        raise UserError("The corpus is a single document, and none could be held out. Separate them by blank lines.")
    count = min(max(1, round(held_out_fraction * len(documents))), len(documents) - 1)
    held_out = set(random.Random(seed).sample(range(len(documents)), count))
    training = [text for index, text in enumerate(documents) if index not in held_out]
    return training, [documents[index] for index in sorted(held_out)]


def train_tokenizer(documents: Iterable[str], vocab_size: int, max_length: int) -> RobertaTokenizer:
    """A byte-level BPE in RoBERTa's layout: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, and `<mask>` last.

    The vocabulary is smaller than `vocab_size` where the text has too few pairs to merge.
    """
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,  # <mask> follows
        min_frequency=2,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = {**trained["vocab"], "<mask>": len(trained["vocab"])}
    merges = [tuple(merge) for merge in trained["merges"]]
    # RoBERTa's mask takes the space before it, so that "The <mask> of" asks for " end" and not for "end".
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return RobertaTokenizer(vocab=vocab, merges=merges, mask_token=mask, model_max_length=max_length)


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[list[int]]:
    """Token ids of every document, whole and without special tokens; a "<s>" that stands in the text is text."""
    encoded = tokenizer(
        documents, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return encoded["input_ids"]


def pack(documents: list[list[int]], block_size: int, bos_token_id: int, eos_token_id: int) -> list[dict[str, Any]]:
    """Cut the running text into blocks `<s> ... </s>` of `block_size` tokens; the last may be shorter.

    Blocks cross the borders between documents, which a `</s>` marks. Every token of the documents is in one block.

    Returns:
        One example a block: `input_ids`, and `special_tokens_mask` with 1 for what is not to be masked.
    """
    stream, special = [], []
    for document in documents:
        if stream and document:
            stream.append(eos_token_id)
            special.append(1)
        stream.extend(document)
        special.extend([0] * len(document))
    room = block_size - 2
    return [
        {
            "input_ids": [bos_token_id, *stream[start : start + room], eos_token_id],
            "special_tokens_mask": [1, *special[start : start + room], 1],
        }
        for start in range(0, len(stream), room)
    ]


def masking(tokenizer: PreTrainedTokenizerBase, mask_probability: float, seed: int) -> DataCollatorForLanguageModeling:
    """Collator that pads examples of `pack` and masks them anew every time (80 % `<mask>`, 10 % random, 10 % kept)."""
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=mask_probability, mask_replace_prob=0.8, random_replace_prob=0.1, seed=seed
    )


def mask_once(
    blocks: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, mask_probability: float, seed: int
) -> list[dict[str, Tensor]]:
    """Blocks with fixed masks, to evaluate on: rows of `input_ids`, `attention_mask` and `labels`, equally long.

    Raises:
        UserError: No token was masked.
    """
    batch = masking(tokenizer, mask_probability, seed)(blocks)
    if not (batch["labels"] != -100).any():
        raise UserError("The held-out text is too short: none of its tokens is masked. Raise `held_out_fraction`.")
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(blocks))]


def unigram_baseline(training: list[list[int]], held_out: list[dict[str, Tensor]], vocab_size: int) -> dict[str, float]:
    """What token frequencies alone predict at the masked positions of `held_out`.

    Args:
        training: token ids of the training documents.
        held_out: rows of `mask_once`.

    Returns:
        `loss`: cross-entropy in nats under the training frequencies, add-one smoothed. `accuracy`: of always answering
        the most frequent token. `targets`: number of masked positions.
    """
    counts = torch.ones(vocab_size, dtype=torch.float64)
    for document in training:
        counts += torch.bincount(torch.tensor(document, dtype=torch.long), minlength=vocab_size)
    labels = torch.cat([row["labels"] for row in held_out])
    labels = labels[labels != -100]
    return {
        "loss": -(counts / counts.sum()).log()[labels].mean().item(),
        "accuracy": (labels == counts.argmax()).double().mean().item(),
        "targets": labels.numel(),
    }


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own sources
        return ast.parse(path.read_bytes())


def _text_documents(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it.") from error
    return [document.strip("\n") for document in _BLANK_LINES.split(text) if document.strip()]
