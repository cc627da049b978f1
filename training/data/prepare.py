"""From the text of a recipe to rows: token stores or streams, held-out rows, and the unigram baseline.

corpus = open_corpus(recipe)
tokenizer = train_tokenizer(corpus.training_documents(), 32768, max_length=512)
text = prepare_text(recipe, corpus, tokenizer, accelerator, masked_rows(recipe, tokenizer))
for micro_batches in text.rows.updates(plan, first_update=0): ...
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.corpus import Corpus
from data.masking import IGNORED, RowFormat, Targets, collate, make_masking
from data.rows import HELD_OUT_MASKS, Blocks, Frame, Mixture, Rows, TrainingRows, quotas
from data.sources import Source
from data.streaming import StreamingRows
from data.token_store import Limits, TokenStore, build_stores, open_store, remove_damaged, store_folder
from data.tokenizer import borders


@dataclass(frozen=True)
class PreparedText:
    """A corpus ready for training: rows to train on, rows with fixed targets to evaluate on, and the baseline there.

    `facts` has None for what is unknown when streaming.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    held_out: list[dict[str, Tensor]]
    unigram: dict[str, float]
    facts: dict[str, Any]


def masked_rows(settings: Any, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
    """Rows `<s> ... </s>` with the masks of a recipe; raises the errors of `make_masking`."""
    masking = make_masking(tokenizer, settings.mask_probability, settings.whole_word_masking)
    return RowFormat(masking, closed=True, separator=borders(tokenizer)[1] if settings.separate_documents else None)


def prepare_text(
    settings: Any, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, accelerator: Any, row_format: RowFormat
) -> PreparedText:
    """Tokenize the corpus (unless an earlier run has) and open what every process needs.

    When streaming, only held-out text is tokenized here, taken from the start of each source. `settings` has the
    recipe's `block_size`, `eval_blocks`, `cache_dir` and `seed`.

    Raises:
        UserError: Nothing is held out, or everything; the tokenizer lacks a token; a weight is too small.
    """
    first, last = borders(tokenizer)
    frame = Frame(settings.block_size, first, last if row_format.closed else None)
    weights = list(corpus.weights)
    quotas(weights)  # before long work
    training, held_out = open_stores(settings, corpus, tokenizer, accelerator)
    blocks = {
        "training": [Blocks(store, frame) for store in training],
        "held_out": [Blocks(store, frame) for store in held_out],
    }
    evaluated = [
        block
        for cut, share in zip(blocks["held_out"], corpus.evaluation_shares, strict=True)
        for block in spread_blocks(cut, max(1, round(settings.eval_blocks * share)))
    ]
    fixed = row_format.targets, tokenizer.pad_token_id, settings.seed, row_format.separator
    rows_evaluated = held_out_rows(evaluated, *fixed)
    if corpus.streaming:
        process = accelerator.process_index, accelerator.num_processes
        rows: Rows = StreamingRows(corpus, tokenizer, frame, row_format, settings.seed, *process)
        counts = sum(store.counts for store in held_out)
    else:
        mixture = Mixture([len(cut) for cut in blocks["training"]], weights, settings.seed)
        rows = TrainingRows(blocks["training"], mixture, row_format, tokenizer.pad_token_id)
        counts = mixed_counts(training, corpus.weights)
    facts: dict[str, Any] = {"corpus": corpus.description}
    for side, cuts in blocks.items():  # 0 is unknown: there is no store to train on when streaming
        facts[f"{side}_documents"] = sum(cut.store.documents for cut in cuts) or None
        facts[f"{side}_tokens"] = sum(cut.store.size for cut in cuts) or None
        facts[f"{side}_blocks"] = sum(map(len, cuts)) or None
    facts["evaluated_blocks"] = len(rows_evaluated)
    facts["unigram_from"] = "held-out text" if corpus.streaming else "training text"
    facts["vocabulary"] = len(tokenizer)
    return PreparedText(tokenizer, rows, rows_evaluated, unigram_baseline(counts, rows_evaluated), facts)


def open_stores(
    settings: Any, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, accelerator: Any
) -> tuple[list[TokenStore], list[TokenStore]]:
    """The stores to train on (none when streaming) and to evaluate on. Missing ones are built first.

    Raises:
        UserError: Nothing is held out, or everything.
    """
    side = "training" if corpus.validation else "held_out"
    evaluated = corpus.validation or corpus.sources
    if corpus.streaming:
        # No more than is evaluated: finding all held-out text would mean reading everything.
        enough = [math.ceil(settings.eval_blocks * share) * settings.block_size for share in corpus.evaluation_shares]
        wanted = [(source, {side: tokens}) for source, tokens in zip(evaluated, enough, strict=True)]
    else:
        wanted = [(source, dict.fromkeys(("training", side))) for source in corpus.sources]
        wanted += [(source, {side: None}) for source in corpus.validation]

    folders = [store_folder(settings.cache_dir, source, corpus, limits, tokenizer) for source, limits in wanted]
    # The first process of every machine checks and builds, as machines may not share a disk. The others look for the
    # folders; a collective operation would time out while a large corpus is tokenized.
    if accelerator.is_local_main_process:
        for folder in folders:
            remove_damaged(folder)
    accelerator.wait_for_everyone()

    def opened(folder: Path, source: Source, limits: Limits) -> dict[str, TokenStore]:
        if accelerator.is_local_main_process:
            build_stores(folder, source, corpus, limits, tokenizer)
        while not folder.is_dir():
            time.sleep(0.2)
        return {name: open_store(folder, name) for name in limits}

    stores = [opened(folder, *each) for folder, each in zip(folders, wanted, strict=True)]
    accelerator.wait_for_everyone()
    training = [] if corpus.streaming else [store["training"] for store in stores[: len(corpus.sources)]]
    held_out = [store[side] for store in stores[-len(evaluated) :]]
    return training, held_out


def spread_blocks(blocks: Blocks, count: int) -> list[np.ndarray]:
    """`count` blocks at even distances, or all if there are fewer."""
    count = min(count, len(blocks))
    return [blocks[index * len(blocks) // count] for index in range(count)]


def held_out_rows(
    blocks: list[np.ndarray], targets: Targets, pad_token_id: int, seed: int, separator: int | None = None
) -> list[dict[str, Tensor]]:
    """For every block a row of `collate`'s batch, int64 [longest] by name, with targets fixed by the seed."""
    made = [targets(block, np.random.default_rng((seed, HELD_OUT_MASKS, row))) for row, block in enumerate(blocks)]
    batch = collate(made, pad_token_id, separator)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(blocks))]


def mixed_counts(stores: list[TokenStore], weights: tuple[float, ...]) -> np.ndarray:
    """Occurrences of each id in training: those in the sources by weight, scaled to the number of all tokens."""
    total = sum(store.size for store in stores)
    return sum(store.counts * (weight * total / store.size) for store, weight in zip(stores, weights, strict=True))


def unigram_baseline(counts: np.ndarray, held_out: list[dict[str, Tensor]]) -> dict[str, float]:
    """How well `counts` [vocabulary], the occurrences of each id, alone predict the labels of `held_out`.

    Returns:
        `loss`: cross-entropy in nats under these frequencies, add-one smoothed. `accuracy`: of always predicting the
        most frequent token. `targets`: number of labels.
    """
    smoothed = torch.from_numpy(counts + 1.0)
    labels = torch.cat([row["labels"] for row in held_out])
    labels = labels[labels != IGNORED]
    return {
        "loss": -(smoothed / smoothed.sum()).log()[labels].mean().item(),
        "accuracy": (labels == smoothed.argmax()).double().mean().item(),
        "targets": labels.numel(),
    }
