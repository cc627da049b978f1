"""A masked-LM head for a sentence encoder: blocks of text, masks that depend on the seed alone, and the score."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from minilm_tasks import read
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.scripting import progress

TOKENS, LENGTH, SHORT, LEAST = 10_000_000, 256, 64, 16
# Shares of the tokens.
SOURCES = {"enwiki": 0.75, "novels": 0.25}
# Every so many documents, one is cut into short blocks, because users will send single sentences.
EVERY = 8
TEST_BLOCKS, TEST_MASKED, TRAIN_MASKED = 400, 0.15, 0.2
_BATCH = 500


class Blocks(Dataset):
    """Blocks of ids with masks, which depend on the seed and the block alone; a run that continues sees the same.

    Args:
        ids: of all blocks in a row.
        ends: where each block ends in `ids`.
        masked: share of the tokens to predict; of these, 80 % become the mask token, 10 % a random one.
    """

    def __init__(
        self, ids: np.ndarray, ends: np.ndarray, tokenizer: PreTrainedTokenizerBase, masked: float, seed: int
    ) -> None:
        self.ids, self.ends, self.seed = ids, ends, seed
        self.masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=masked)
        self.starts = np.concatenate([[0], ends[:-1]])

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each block."""
        return (self.ends - self.starts).tolist()

    def block(self, index: int) -> list[int]:
        """The ids of a block."""
        return self.ids[self.starts[index] : self.ends[index]].tolist()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` (n,)."""
        self.masking.generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        batch = self.masking([{"input_ids": self.block(index)}])
        return {name: batch[name][0] for name in ("input_ids", "labels")}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of blocks, padded with 0, BERT's padding token."""
    width = max(len(row["input_ids"]) for row in rows)

    def stack(name: str, value: int) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, width - len(row[name])), value=value) for row in rows]
        )

    mask = [torch.arange(width) < len(row["input_ids"]) for row in rows]
    return {
        "input_ids": stack("input_ids", 0),
        "labels": stack("labels", -100),
        "attention_mask": torch.stack(mask).long(),
    }


def cut(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, first: int) -> list[list[int]]:
    """Blocks of texts with their ends, of at most `LENGTH` tokens; `first` is the number of the first text."""
    plain = {"add_special_tokens": False, "truncation": False, "verbose": False}
    blocks = []
    for number, ids in enumerate(tokenizer(list(texts), **plain)["input_ids"], first):
        room = (LENGTH if number % EVERY else SHORT) - 2
        parts = (ids[at : at + room] for at in range(0, len(ids), room))
        blocks += [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts if len(part) + 2 >= LEAST]
    return blocks


def collect(data: Path, name: str, tokenizer: PreTrainedTokenizerBase, most: float, seed: int) -> list[list[int]]:
    """Blocks of a file, its texts in a random order, until they have `most` tokens."""
    texts = [row["text"] for row in read(data, name)]
    order, blocks, count = np.random.default_rng(seed).permutation(len(texts)), [], 0
    for at in range(0, len(texts), _BATCH):
        for block in cut([texts[index] for index in order[at : at + _BATCH]], tokenizer, at):
            if count >= most:
                return blocks
            blocks.append(block)
            count += len(block)
    return blocks


def training_blocks(
    data: Path, tokenizer: PreTrainedTokenizerBase, seed: int, cache: Path, tokens: int = TOKENS
) -> Blocks:
    """The blocks to train on, from `cache` if it holds them: they are tokenised once."""
    if not cache.is_file():
        progress("  Tokenising ...")
        found = [
            block
            for source, share in SOURCES.items()
            for block in collect(data, f"{source}/train", tokenizer, tokens * share, seed)
        ]
        unfinished = cache.with_suffix(".unfinished.npz")
        ends = np.cumsum([len(block) for block in found])
        np.savez(unfinished, ids=np.concatenate(found).astype(np.int32), ends=ends)
        unfinished.rename(cache)
    stored = np.load(cache)
    return Blocks(stored["ids"], stored["ends"], tokenizer, TRAIN_MASKED, seed)


def test_blocks(data: Path, tokenizer: PreTrainedTokenizerBase, count: int = TEST_BLOCKS) -> Blocks:
    """The blocks to score: the same for every seed."""
    found = [b for b in collect(data, "enwiki/validation", tokenizer, math.inf, 0) if len(b) == LENGTH][:count]
    ends = np.cumsum([len(block) for block in found])
    return Blocks(np.concatenate(found), ends, tokenizer, TEST_MASKED, 0)


@torch.no_grad()
def score(model: PreTrainedModel, blocks: Blocks, batch: int = 16) -> dict[str, float]:
    """Share of the masked tokens whose most probable token is right, x 100, and the mean loss in nats."""
    right, loss, count = 0, 0.0, 0
    for at in range(0, len(blocks), batch):
        rows = pad([blocks[index] for index in range(at, min(at + batch, len(blocks)))])
        masked = rows["labels"] != -100
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
        logits, labels = model(**inputs).logits[masked], rows["labels"][masked]
        right += int((logits.argmax(-1) == labels).sum())
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += len(labels)
    return {"score": 100 * right / count, "loss": loss / count, "masked": count}


def unigram(train: Blocks, test: Blocks, vocabulary: int) -> dict[str, Any]:
    """Scores of the frequencies of tokens in the training blocks, with one added to each."""
    counts = np.bincount(train.ids, minlength=vocabulary) + 1.0
    counts[list(set(train.masking.tokenizer.all_special_ids))] = 1.0  # never predicted
    labels = np.concatenate([test[index]["labels"].numpy() for index in range(len(test))])
    labels = labels[labels != -100]
    losses = -np.log(counts / counts.sum())
    return {"score": 100 * float((labels == counts.argmax()).mean()), "loss": float(losses[labels].mean())}
