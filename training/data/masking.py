"""What a row is to predict, as pure functions of its token ids and a random generator: masks, or the next token.

Of the tokens chosen to be masked 80 % become the mask token, 10 % a random one, 10 % stay (BERT, section 3.1), drawn
anew for every row of a run ("dynamic masking" of RoBERTa, section 4.1).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError

IGNORED = -100  # label of positions that are no targets
# Of the characters that byte-level BPE writes for bytes, those of white space: tab, newline, return, space.
_BYTE_SPACES = ("Ġ", "Ċ", "ĉ", "č")


@dataclass(frozen=True)
class Masking:
    """How rows are masked.

    Attributes:
        probability: of a token (or a word) to be chosen.
        mask_token_id: what 80 % of the chosen tokens become.
        ordinary_ids: int64 [ordinary], the ids that random replacements are drawn from.
        special: bool [vocabulary], ids that are never chosen.
        starts: bool [vocabulary], ids that start a word, to choose whole words; None to choose tokens.
    """

    probability: float
    mask_token_id: int
    ordinary_ids: np.ndarray
    special: np.ndarray
    starts: np.ndarray | None = None

    def __call__(self, ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """See `mask_row`."""
        return mask_row(ids, self, generator)


def next_tokens(ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The row itself as labels, for a model that predicts every token from those before it; the first has none.

    Args:
        ids: int64 [length].
        generator: not used; masks draw from theirs.

    Returns:
        Input ids and labels, int64 [length].
    """
    labels = ids.copy()
    labels[0] = IGNORED
    return ids, labels


def make_masking(tokenizer: PreTrainedTokenizerBase, probability: float, whole_words: bool) -> Masking:
    """The masking for a tokenizer.

    Raises:
        UserError: It has no mask token, or does not tell where words start.
    """
    if tokenizer.mask_token_id is None:
        raise UserError("The tokenizer has no mask token, so nothing can be masked. Use another, or train one.")
    special = np.zeros(len(tokenizer), dtype=bool)
    special[tokenizer.all_special_ids] = True
    starts = word_starts(tokenizer) if whole_words else None
    return Masking(probability, tokenizer.mask_token_id, np.flatnonzero(~special), special, starts)


def word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Which ids start a word: bool [vocabulary].

    Byte-level BPE marks the space before a word, SentencePiece as well, WordPiece what continues one.

    Raises:
        UserError: The vocabulary has none of these marks.
    """
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    if any(token.startswith("Ġ") for token in tokens):
        starts = [token.startswith(_BYTE_SPACES) for token in tokens]
    elif any(token.startswith("▁") for token in tokens):
        starts = [token.startswith("▁") for token in tokens]
    elif any(token.startswith("##") for token in tokens):
        starts = [not token.startswith("##") for token in tokens]
    else:
        raise UserError(
            "`whole_word_masking` is true, but the tokenizer's vocabulary does not tell where words start (no Ġ, ▁ or "
            "##). Set it to false."
        )
    return np.array(starts)


def mask_row(ids: np.ndarray, masking: Masking, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Mask one row; special tokens never, and at least one other if there is one.

    Args:
        ids: int64 [length].

    Returns:
        Input ids and labels, int64 [length]; the labels are `IGNORED` where nothing is to be predicted.
    """
    maskable = ~masking.special[ids]
    if masking.starts is None:
        units = np.arange(len(ids))
    else:
        after_special = np.concatenate([[True], ~maskable[:-1]])
        units = np.cumsum(masking.starts[ids] | after_special | ~maskable) - 1
    picked = generator.random(len(ids)) < masking.probability  # one draw a unit
    chosen = picked[units] & maskable
    if not chosen.any() and maskable.any():
        chosen = (units == generator.choice(np.unique(units[maskable]))) & maskable
    fate = generator.random(len(ids))
    random_ids = masking.ordinary_ids[generator.integers(len(masking.ordinary_ids), size=len(ids))]
    replaced = np.where(fate < 0.8, masking.mask_token_id, np.where(fate < 0.9, random_ids, ids))
    return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORED)


def collate(rows: list[tuple[np.ndarray, np.ndarray]], pad_token_id: int, length: int = 0) -> dict[str, Tensor]:
    """A batch of masked rows, padded to the longest, or to `length`.

    Returns:
        `input_ids`, `attention_mask` and `labels`, int64 [rows, longest].
    """
    longest = max(length, *(len(ids) for ids, _ in rows))
    batch: dict[str, Any] = {
        "input_ids": np.full((len(rows), longest), pad_token_id, dtype=np.int64),
        "attention_mask": np.zeros((len(rows), longest), dtype=np.int64),
        "labels": np.full((len(rows), longest), IGNORED, dtype=np.int64),
    }
    for row, (ids, labels) in enumerate(rows):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, : len(ids)] = labels
    return {name: torch.from_numpy(array) for name, array in batch.items()}
