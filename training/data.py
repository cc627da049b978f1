"""Documents to masked rows: training a tokenizer, the token store on disk, blocks, mixing, and the order of a run.

Which tokens row `i` of a run holds, and which of them are masked, follows from the seed and `i` alone: not from the
number of processes, and not from where a run was interrupted.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Corpus, Source
from masking import IGNORED, Masking, collate, make_masking, mask_row
from recipe import UserError
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, RobertaTokenizer

# Part of the name of a token store: raised when its files change.
_FORMAT = 1
# Documents are tokenized together up to this many characters: enough to keep every core busy, little memory.
_BATCH_CHARACTERS = 2_000_000
# Rows over which the sources of a mixture get exactly their shares.
CYCLE = 1000
# Random streams of a run, which must not repeat each other.
_ORDER, _PATTERN, _MASKS, _HELD_OUT_MASKS = range(4)


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
        documents,
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return encoded["input_ids"]


def borders(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids that start and end a row: `<s>` and `</s>`, or `[CLS]` and `[SEP]`.

    Raises:
        UserError: The tokenizer has neither, or no padding token.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    last = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if first is None or last is None or tokenizer.pad_token_id is None:
        raise UserError(
            "The tokenizer lacks tokens that rows need: one to start with (bos or cls), one to end with (eos or sep) "
            "and one to pad with. Use another, or train one."
        )
    return first, last


@dataclass(frozen=True)
class TokenStore:
    """Token ids of documents on disk, in a row, with the end token between documents.

    Attributes:
        tokens: uint16 or uint32 [tokens], mapped into memory.
        counts: int64 [vocabulary], how often each id occurs in the documents.
        documents: number of documents that have tokens.
    """

    tokens: np.ndarray
    counts: np.ndarray
    documents: int


class StoreWriter:
    """Writes the files of one `TokenStore`."""

    def __init__(self, folder: Path, name: str, vocabulary: int, last: int) -> None:
        self.folder, self.name, self.last, self.documents = folder, name, last, 0
        self.dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        self.counts = np.zeros(vocabulary, dtype=np.int64)
        self.file = (folder / f"{name}.bin").open("wb")

    def add(self, ids: list[int]) -> None:
        """Append a document; an empty one leaves no trace."""
        if not ids:
            return
        if self.documents:
            self.file.write(np.array([self.last], dtype=self.dtype).tobytes())
        array = np.array(ids, dtype=self.dtype)
        self.file.write(array.tobytes())
        self.counts += np.bincount(array, minlength=len(self.counts))
        self.documents += 1

    def close(self) -> None:
        """Finish; the description is written last."""
        self.file.close()
        np.save(self.folder / f"{self.name}_counts.npy", self.counts)
        description = {"documents": self.documents, "dtype": self.dtype.name}
        (self.folder / f"{self.name}.json").write_text(json.dumps(description) + "\n", encoding="utf-8")


def open_store(folder: Path, name: str) -> TokenStore:
    """Open a store that `build_stores` has written."""
    description = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    file = folder / f"{name}.bin"
    tokens = np.empty(0, np.uint16)  # an empty file cannot be mapped
    if file.stat().st_size:
        tokens = np.memmap(file, dtype=description["dtype"], mode="r")
    return TokenStore(tokens, np.load(folder / f"{name}_counts.npy"), description["documents"])


def store_folder(cache_dir: str, source: Source, split_rule: list[Any], tokenizer: PreTrainedTokenizerBase) -> Path:
    """Where the tokens of a source are kept: a name that changes with the text, its split and the tokenizer."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules.update(truncation=None, padding=None)  # of the last call, and not used here
    parts = [_FORMAT, source.identity, split_rule, rules, borders(tokenizer), len(tokenizer)]
    return Path(cache_dir) / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def build_stores(folder: Path, source: Source, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tokenize a source into `folder`, which appears at once and complete; nothing to do if it is there.

    The stores are `training`, and `held_out` with the documents that `corpus` holds out.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".building", dir=folder.parent))
    try:
        names = ("training", "held_out")
        writers = {name: StoreWriter(building, name, len(tokenizer), borders(tokenizer)[1]) for name in names}
        with tqdm(desc=f"tokenizing {source.description}"[:60], unit=" tokens", unit_scale=True, leave=False) as bar:
            for documents in document_batches(source.stream(), _BATCH_CHARACTERS):
                for document, ids in zip(documents, encode(tokenizer, documents), strict=True):
                    writers["held_out" if corpus.is_held_out(document) else "training"].add(ids)
                    bar.update(len(ids))
        for writer in writers.values():
            writer.close()
        try:
            building.replace(folder)
        except OSError:
            if not folder.is_dir():  # another process was first, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def document_batches(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Documents with text in them, in lists of about `characters`."""
    batch, size = [], 0
    for document in documents:
        if not document.strip():
            continue
        batch.append(document)
        size += len(document)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class Blocks:
    """A store cut into rows `<s> ... </s>` of `block_size` tokens; the last may be shorter.

    Rows cross the borders between documents, which an end token marks. Every token is in exactly one row.
    """

    store: TokenStore
    block_size: int
    first: int
    last: int

    def __len__(self) -> int:
        return -(-len(self.store.tokens) // (self.block_size - 2))

    def __getitem__(self, index: int) -> np.ndarray:
        """Row `index`: int64 [at most block_size]."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        room = self.block_size - 2
        inner = self.store.tokens[index * room : (index + 1) * room]
        row = np.empty(len(inner) + 2, dtype=np.int64)
        row[0], row[1:-1], row[-1] = self.first, inner, self.last
        return row


def quotas(weights: list[float]) -> list[int]:
    """Rows that each source gives to a cycle: the largest remainders of its share are rounded up.

    Raises:
        UserError: A share is too small for a single row.
    """
    exact = [weight / sum(weights) * CYCLE for weight in weights]
    rows = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: rows[source] - exact[source])
    for source in by_remainder[: CYCLE - sum(rows)]:
        rows[source] += 1
    if 0 in rows:
        raise UserError(
            f"`data`: source {rows.index(0) + 1} has a weight of {weights[rows.index(0)]:.2g} of all, which is less "
            f"than one row of {CYCLE:,}. Raise it, or leave the source out."
        )
    return rows


@dataclass
class Mixture:
    """The order of a run: row `i` to a source and a block of it, for any `i`, without an end.

    Every cycle of `CYCLE` rows holds each source as often as its weight says, in a random pattern. A source gives its
    blocks in a random order, each once before any comes again.
    """

    lengths: list[int]
    weights: list[float]
    seed: int
    _pattern: tuple[int, Any, Any] | None = field(default=None, repr=False)
    _orders: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.quotas = quotas(self.weights)

    def __call__(self, row: int) -> tuple[int, int]:
        """Source and block of a row of the run."""
        cycle, place = divmod(row, CYCLE)
        sources, ranks = self._cycle(cycle)
        source = int(sources[place])
        epoch, position = divmod(cycle * self.quotas[source] + int(ranks[place]), self.lengths[source])
        return source, int(self._order(source, epoch)[position])

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each row of a cycle, and how many of the same came before in it."""
        if self._pattern is None or self._pattern[0] != cycle:
            sources = pattern(self.quotas, self.seed, cycle)
            ranks = np.empty(CYCLE, dtype=np.int64)
            for source, quota in enumerate(self.quotas):
                ranks[sources == source] = np.arange(quota)
            self._pattern = cycle, sources, ranks
        return self._pattern[1:]

    def _order(self, source: int, epoch: int) -> np.ndarray:
        """The blocks of a source in the order of an epoch: the only thing in memory that grows with the corpus."""
        if self._orders.get(source, (None,))[0] != epoch:
            generator = np.random.default_rng((self.seed, _ORDER, source, epoch))
            order = np.arange(self.lengths[source], dtype=np.uint32 if self.lengths[source] < 2**32 else np.uint64)
            generator.shuffle(order)
            self._orders[source] = epoch, order
        return self._orders[source][1]


def pattern(rows: list[int], seed: int, cycle: int) -> np.ndarray:
    """The sources of the rows of a cycle in a random order: int64 [CYCLE]."""
    return np.random.default_rng((seed, _PATTERN, cycle)).permutation(np.repeat(np.arange(len(rows)), rows))


@dataclass(frozen=True)
class Plan:
    """How the rows of an update are dealt out to processes and their micro-batches."""

    micro_batch: int
    accumulation: int
    processes: int
    process_index: int

    @property
    def rows_per_update(self) -> int:
        """Rows of all processes."""
        return self.micro_batch * self.accumulation * self.processes

    def rows(self, update: int) -> list[range]:
        """The rows of the run in each micro-batch of this process."""
        parts = [part * self.processes + self.process_index for part in range(self.accumulation)]
        starts = [update * self.rows_per_update + part * self.micro_batch for part in parts]
        return [range(start, start + self.micro_batch) for start in starts]


@dataclass
class TrainingRows:
    """The masked rows of a run, read from token stores.

    Attributes:
        blocks: those of each source.
        mixture: which block row `i` is.
        masking: how it is masked.
        pad_token_id: fills up shorter rows.
    """

    blocks: list[Blocks]
    mixture: Mixture
    masking: Masking
    pad_token_id: int

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Input ids and labels of a row of the run, int64 [length] each."""
        source, block = self.mixture(row)
        generator = np.random.default_rng((self.mixture.seed, _MASKS, row))
        return mask_row(self.blocks[source][block], self.masking, generator)

    def updates(self, plan: Plan, first_update: int = 0) -> Iterator[list[dict[str, Tensor]]]:
        """The micro-batches of this process for one update after the other, without an end.

        Yields:
            For every update a list of `input_ids`, `attention_mask` and `labels`, int64 [micro_batch, longest] each.
        """
        update = first_update
        while True:
            yield [collate([self.row(row) for row in rows], self.pad_token_id) for rows in plan.rows(update)]
            update += 1

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the number of the update says all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do; `updates` starts anywhere."""


def held_out_rows(blocks: list[np.ndarray], masking: Masking, pad_token_id: int, seed: int) -> list[dict[str, Tensor]]:
    """Blocks with masks that the seed fixes, to evaluate on: rows of `input_ids`, `attention_mask` and `labels`,
    int64 [longest], equally long."""
    masked = [
        mask_row(block, masking, np.random.default_rng((seed, _HELD_OUT_MASKS, row)))
        for row, block in enumerate(blocks)
    ]
    batch = collate(masked, pad_token_id)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(blocks))]


def unigram_baseline(counts: np.ndarray, held_out: list[dict[str, Tensor]]) -> dict[str, float]:
    """What token frequencies alone predict at the masked positions of `held_out`.

    Args:
        counts: [vocabulary], how often each id occurs in the text the frequencies are from.
        held_out: what `held_out_rows` gives.

    Returns:
        `loss`: cross-entropy in nats under these frequencies, add-one smoothed. `accuracy`: of always answering the
        most frequent token. `targets`: number of masked positions.
    """
    smoothed = torch.from_numpy(counts + 1.0)
    labels = torch.cat([row["labels"] for row in held_out])
    labels = labels[labels != IGNORED]
    return {
        "loss": -(smoothed / smoothed.sum()).log()[labels].mean().item(),
        "accuracy": (labels == smoothed.argmax()).double().mean().item(),
        "targets": labels.numel(),
    }


@dataclass(frozen=True)
class PreparedText:
    """A corpus, ready for training: rows to train on, rows with fixed masks to evaluate on, and the baseline there."""

    tokenizer: PreTrainedTokenizerBase
    rows: TrainingRows
    held_out: list[dict[str, Tensor]]
    unigram: dict[str, float]
    facts: dict[str, Any]


def spread(blocks: Blocks, count: int) -> list[np.ndarray]:
    """`count` blocks at even distances, or all if there are fewer."""
    count = min(count, len(blocks))
    return [blocks[index * len(blocks) // count] for index in range(count)]


def prepare_text(settings: Any, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, accelerator: Any) -> PreparedText:
    """Tokenize a corpus (the main process does, unless an earlier run has) and open what every process needs.

    Args:
        settings: with the recipe's `block_size`, `mask_probability`, `whole_word_masking`, `eval_blocks`, `cache_dir`
            and `seed`.
        accelerator: of accelerate; tells the processes apart.

    Raises:
        UserError: Nothing is held out, or everything; the tokenizer lacks a token; a weight is too small.
    """
    masking = make_masking(tokenizer, settings.mask_probability, settings.whole_word_masking)
    first, last = borders(tokenizer)
    folders = [
        store_folder(settings.cache_dir, source, corpus.split_rule, tokenizer)
        for source in (*corpus.sources, *corpus.validation)
    ]
    # On several machines that share no disk, each needs its own copy: the first process of all builds, then the first
    # of every machine whose folder is still missing.
    for builds in (accelerator.is_main_process, accelerator.is_local_main_process):
        if builds:
            for folder, source in zip(folders, (*corpus.sources, *corpus.validation), strict=True):
                build_stores(folder, source, corpus, tokenizer)
        accelerator.wait_for_everyone()
    training = [open_store(folder, "training") for folder in folders[: len(corpus.sources)]]
    held_out = [open_store(folder, "held_out") for folder in folders[: len(corpus.sources)]]
    if corpus.validation:
        held_out = [open_store(folder, "training") for folder in folders[len(corpus.sources) :]]
    check_split(corpus, training, held_out)

    blocks, held_out_blocks = (
        [Blocks(store, settings.block_size, first, last) for store in stores] for stores in (training, held_out)
    )
    shares = [1 / len(held_out)] * len(held_out) if corpus.validation else corpus.weights
    evaluated = [
        block
        for of_source, share in zip(held_out_blocks, shares, strict=True)
        for block in spread(of_source, max(1, round(settings.eval_blocks * share)))
    ]
    masked = held_out_rows(evaluated, masking, tokenizer.pad_token_id, settings.seed)
    # The frequencies that training shows: those of each source by its weight.
    counts = sum(
        store.counts * (weight * sum(map(tokens_of, training)) / tokens_of(store))
        for store, weight in zip(training, corpus.weights, strict=True)
    )
    mixture = Mixture([len(of_source) for of_source in blocks], list(corpus.weights), settings.seed)
    return PreparedText(
        tokenizer,
        TrainingRows(blocks, mixture, masking, tokenizer.pad_token_id),
        masked,
        unigram_baseline(counts, masked),
        {
            "corpus": corpus.description,
            "training_documents": sum(store.documents for store in training),
            "held_out_documents": sum(store.documents for store in held_out),
            "training_tokens": sum(map(tokens_of, training)),
            "training_blocks": sum(map(len, blocks)),
            "held_out_blocks": sum(map(len, held_out_blocks)),
            "evaluated_blocks": len(masked),
            "unigram_from": "training text",
            "vocabulary": len(tokenizer),
        },
    )


def tokens_of(store: TokenStore) -> int:
    """Tokens of the documents, without those between them."""
    return int(store.counts.sum())


def check_split(corpus: Corpus, training: list[TokenStore], held_out: list[TokenStore]) -> None:
    """Whether there is something to train on in every source, and something to evaluate on.

    Raises:
        UserError: There is not.
    """
    for source, store in zip(corpus.sources, training, strict=True):
        if not store.documents:
            raise UserError(
                f"No document of {source.description} is left to train on. Lower `held_out_fraction`, or give more "
                "documents (in text files, blank lines separate them)."
            )
    if not any(store.documents for store in held_out):
        documents = sum(store.documents for store in training)
        raise UserError(
            f"`held_out_fraction` of {corpus.held_out_fraction} holds out none of {documents:,} document(s). Raise it, "
            "give more documents (in text files, blank lines separate them), or name a `validation` text."
        )
