"""From the recipe's text to rows for training: tokenizer, token stores or streams, held-out rows, and the baseline.

corpus = open_corpus(recipe)
tokenizer = train_tokenizer(corpus.training_documents(), 32768, max_length=512)
text = prepare_text(recipe, corpus, tokenizer, accelerator)
for micro_batches in text.rows.updates(plan, first_update=0): ...
"""

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, RobertaTokenizer

from data.corpus import Corpus, open_corpus
from data.masking import IGNORED, collate, make_masking
from data.rows import HELD_OUT_MASKS, Blocks, Mixture, Plan, RowFormat, Targets, TrainingRows, quotas
from data.sources import Source
from data.streaming import Reading, StreamingRows
from data.token_store import TokenStore, borders, build_stores, encode, open_store, store_folder, tokens_of
from luna_hf.scripting import UserError

__all__ = [
    "Corpus",
    "Plan",
    "PreparedText",
    "encode",
    "held_out_rows",
    "open_corpus",
    "prepare_text",
    "train_causal_tokenizer",
    "train_tokenizer",
    "unigram_baseline",
]


def train_tokenizer(documents: Iterable[str], vocab_size: int, max_length: int) -> RobertaTokenizer:
    """A byte-level BPE in RoBERTa's layout: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, and `<mask>` last.

    The vocabulary is smaller than `vocab_size` where the text has too few pairs to merge.
    """
    bpe = _train_bpe(documents, vocab_size - 1, ["<s>", "<pad>", "</s>", "<unk>"])  # <mask> follows
    trained = json.loads(bpe.to_str())["model"]
    vocab = {**trained["vocab"], "<mask>": len(trained["vocab"])}
    merges = [tuple(merge) for merge in trained["merges"]]
    # RoBERTa's mask takes the space before it, so that "The <mask> of" asks for " end" and not for "end".
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return RobertaTokenizer(vocab=vocab, merges=merges, mask_token=mask, model_max_length=max_length)


def train_causal_tokenizer(
    documents: Iterable[str], vocab_size: int, max_length: int | float
) -> PreTrainedTokenizerFast:
    """A byte-level BPE for a causal model, which starts a text with `<s>` and leaves its end open.

    `<s>` is 0, `<pad>` 1 and `</s>` 2, as in `train_tokenizer`. Padding stands on the left, as generation needs it.

    Args:
        documents: to train on.
        vocab_size: tokens, the special ones among them; fewer where the text has too few pairs to merge.
        max_length: longest input of the model, `math.inf` if it has none.
    """
    bpe = _train_bpe(documents, vocab_size, ["<s>", "<pad>", "</s>"])
    bpe.decoder = decoders.ByteLevel()
    return open_ended(bpe, {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}, max_length)


def open_ended(backend: Tokenizer, special: dict[str, str], max_length: int | float) -> PreTrainedTokenizerFast:
    """A tokenizer that puts the `bos_token` before a text and nothing behind it.

    No class of a model type is used: RoBERTa's, for example, would close every text with an end token when it is loaded
    again, and a model that is asked to go on after that begins another text.

    Args:
        backend: its post-processor is replaced.
        special: special tokens by their names in transformers.
        max_length: longest input of the model, `math.inf` if it has none.
    """
    start = special["bos_token"]
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, backend.token_to_id(start))]
    )
    limit = {} if math.isinf(max_length) else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **limit, **special)


def _train_bpe(documents: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return bpe


def held_out_rows(blocks: list[np.ndarray], targets: Targets, pad_token_id: int, seed: int) -> list[dict[str, Tensor]]:
    """Blocks with targets that the seed fixes, to evaluate on: rows of `input_ids`, `attention_mask` and `labels`,
    int64 [longest], equally long."""
    made = [targets(block, np.random.default_rng((seed, HELD_OUT_MASKS, row))) for row, block in enumerate(blocks)]
    batch = collate(made, pad_token_id)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(blocks))]


def unigram_baseline(counts: np.ndarray, held_out: list[dict[str, Tensor]]) -> dict[str, float]:
    """What token frequencies alone predict for the labels of `held_out`.

    Args:
        counts: [vocabulary], how often each id occurs in the text the frequencies are from.
        held_out: what `held_out_rows` gives.

    Returns:
        `loss`: cross-entropy in nats under these frequencies, add-one smoothed. `accuracy`: of always answering the
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


@dataclass(frozen=True)
class PreparedText:
    """A corpus, ready for training: rows to train on, rows with fixed targets to evaluate on, and the baseline there.

    What is not known while streaming is None in `facts`.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: TrainingRows | StreamingRows
    held_out: list[dict[str, Tensor]]
    unigram: dict[str, float]
    facts: dict[str, Any]


def masked_rows(settings: Any, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
    """Rows `<s> ... </s>` with the masks of a recipe.

    Raises:
        UserError: See `make_masking`.
    """
    return RowFormat(make_masking(tokenizer, settings.mask_probability, settings.whole_word_masking), closed=True)


def prepare_text(
    settings: Any,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Any,
    row_format: RowFormat | None = None,
) -> PreparedText:
    """Tokenize what is to be kept on disk (unless an earlier run has) and open what every process needs.

    That is the whole corpus, or in streaming only the held-out text, collected from the start of each source.

    Args:
        settings: with the recipe's `block_size`, `eval_blocks`, `cache_dir` and `seed`.
        corpus: what to read.
        tokenizer: with which.
        accelerator: of accelerate; tells the processes apart.
        row_format: what rows are like; by default `masked_rows` of the settings.

    Raises:
        UserError: Nothing is held out, or everything; the tokenizer lacks a token; a weight is too small.
    """
    row_format = row_format or masked_rows(settings, tokenizer)
    first, last = borders(tokenizer)
    closing = last if row_format.closed else None
    quotas(list(corpus.weights))
    training, held_out = open_stores(settings, corpus, tokenizer, accelerator)
    held_out_blocks = [Blocks(store, settings.block_size, first, closing) for store in held_out]
    evaluated = [
        block
        for of_source, share in zip(held_out_blocks, evaluation_shares(corpus), strict=True)
        for block in spread_blocks(of_source, max(1, round(settings.eval_blocks * share)))
    ]
    rows_evaluated = held_out_rows(evaluated, row_format.targets, tokenizer.pad_token_id, settings.seed)
    facts = {
        "corpus": corpus.description,
        "training_documents": None,
        "held_out_documents": sum(store.documents for store in held_out),
        "training_tokens": None,
        "held_out_tokens": sum(map(tokens_of, held_out)),
        "training_blocks": None,
        "held_out_blocks": sum(map(len, held_out_blocks)),
        "evaluated_blocks": len(rows_evaluated),
        "unigram_from": "held-out text",
        "vocabulary": len(tokenizer),
    }
    if corpus.streaming:
        processes, index = accelerator.num_processes, accelerator.process_index
        reading = Reading(corpus, tokenizer, settings.block_size, first, last, index, processes, row_format.closed)
        rows: TrainingRows | StreamingRows = StreamingRows(corpus, reading, row_format.targets, settings.seed)
        counts = sum(store.counts for store in held_out)
    else:
        blocks = [Blocks(store, settings.block_size, first, closing) for store in training]
        mixture = Mixture([len(of_source) for of_source in blocks], list(corpus.weights), settings.seed)
        rows = TrainingRows(blocks, mixture, row_format.targets, tokenizer.pad_token_id)
        counts = mixed_counts(training, corpus.weights)
        facts["training_documents"] = sum(store.documents for store in training)
        facts["training_tokens"] = sum(map(tokens_of, training))
        facts["training_blocks"] = sum(map(len, blocks))
        facts["unigram_from"] = "training text"
    baseline = unigram_baseline(counts, rows_evaluated)
    return PreparedText(tokenizer, rows, rows_evaluated, baseline, facts)


def open_stores(
    settings: Any, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, accelerator: Any
) -> tuple[list[TokenStore], list[TokenStore]]:
    """The stores to train on (none in streaming) and to evaluate on; those that are missing are built first.

    Raises:
        UserError: Nothing is held out, or everything.
    """
    # Enough for the blocks that are evaluated: streaming must not read everything to find what is held out.
    enough = [math.ceil(settings.eval_blocks * share) * settings.block_size for share in evaluation_shares(corpus)]
    plans: list[tuple[Source, dict[str, int | None]]] = []
    if not corpus.streaming:
        sides = {"training": None} if corpus.validation else {"training": None, "held_out": None}
        plans = [(source, sides) for source in corpus.sources]
    evaluated = corpus.validation or (corpus.sources if corpus.streaming else ())
    side = "training" if corpus.validation else "held_out"
    for source, tokens in zip(evaluated, enough, strict=False):
        plans.append((source, {side: tokens if corpus.streaming else None}))

    folders = [
        store_folder(settings.cache_dir, source, corpus.split_rule, limits, tokenizer) for source, limits in plans
    ]
    # The first process of every machine builds, as machines may share no disk. The others look for the folder instead
    # of waiting in a collective operation, which would time out while a large corpus is tokenized.
    for folder, (source, limits) in zip(folders, plans, strict=True):
        if accelerator.is_local_main_process:
            build_stores(folder, source, corpus.side_of, limits, tokenizer)
        while not folder.is_dir():
            time.sleep(0.2)
    accelerator.wait_for_everyone()
    opened = [
        {name: open_store(folder, name) for name in limits} for folder, (_, limits) in zip(folders, plans, strict=True)
    ]
    whole = 0 if corpus.streaming else len(corpus.sources)
    training = [stores["training"] for stores in opened[:whole]]
    held_out = [stores[side] for stores in opened[whole:]] or [stores["held_out"] for stores in opened]
    check_split(corpus, training, held_out)
    return training, held_out


def evaluation_shares(corpus: Corpus) -> list[float]:
    """The share of the evaluated blocks that each source of held-out text gives."""
    if corpus.validation:
        return [1 / len(corpus.validation)] * len(corpus.validation)
    return list(corpus.weights)


def spread_blocks(blocks: Blocks, count: int) -> list[np.ndarray]:
    """`count` blocks at even distances, or all if there are fewer."""
    count = min(count, len(blocks))
    return [blocks[index * len(blocks) // count] for index in range(count)]


def mixed_counts(stores: list[TokenStore], weights: tuple[float, ...]) -> np.ndarray:
    """How often each id occurs in training: the counts of the sources by their weights, for all tokens there are."""
    total = sum(map(tokens_of, stores))
    return sum(
        store.counts * (weight * total / tokens_of(store)) for store, weight in zip(stores, weights, strict=True)
    )


def check_split(corpus: Corpus, training: list[TokenStore], held_out: list[TokenStore]) -> None:
    """Whether there is something to train on in every source, and something to evaluate on.

    Raises:
        UserError: There is not.
    """
    more = "give more documents (in text files, blank lines separate them)"
    for source, store in zip(corpus.sources, training, strict=not corpus.streaming):
        if not store.documents:
            raise UserError(
                f"No document of {source.description} is left to train on. Lower `held_out_fraction`, or {more}."
            )
    if not any(store.documents for store in held_out):
        raise UserError(
            f"`held_out_fraction` of {corpus.held_out_fraction} holds out none of the documents of "
            f"{corpus.description}. Raise it, {more}, or name a `validation` text."
        )
