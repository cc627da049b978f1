"""What a row predicts, as pure functions of its token ids and a random generator: masked tokens, or the next ones.

80 % of the chosen tokens become the mask token, 10 % a random one, and 10 % stay (BERT, section 3.1). The choice is
made anew for every row of a run (the dynamic masking of RoBERTa, section 4.1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from luna_hf.scripting import UserError

IGNORED = -100  # label of positions without a target
# How a vocabulary may mark words, and what then begins the tokens that start one, or continue one (##). Byte-level BPE
# writes white space so: space, newline, tab, return.
_MARKS = {"Ġ": ("Ġ", "Ċ", "ĉ", "č"), "▁": ("▁",), "##": ("##",)}
# From the ids of a row and a generator to input ids and labels, int64 [length] each.
Targets = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class RowFormat:
    """What a row predicts, whether an end token closes it, and the token that ends a text, if texts are kept apart."""

    targets: Targets
    closed: bool
    separator: int | None = None


@dataclass(frozen=True)
class Masking:
    """Masks rows.

    Attributes:
        probability: of choosing a token (or a word).
        mask_token_id: replaces 80 % of the chosen tokens.
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
        """Mask a row: at least one token, but never a special one.

        Args:
            ids: int64 [length].

        Returns:
            Input ids and labels, int64 [length]; labels are `IGNORED` where nothing is predicted.
        """
        maskable = ~self.special[ids]
        if self.starts is None:
            units = np.arange(len(ids))
        else:
            after_special = np.concatenate([[True], ~maskable[:-1]])
            units = np.cumsum(self.starts[ids] | after_special | ~maskable) - 1
        picked = generator.random(len(ids)) < self.probability  # one draw per unit
        chosen = picked[units] & maskable
        if not chosen.any() and maskable.any():
            chosen = (units == generator.choice(np.unique(units[maskable]))) & maskable
        fate = generator.random(len(ids))
        random_ids = self.ordinary_ids[generator.integers(len(self.ordinary_ids), size=len(ids))]
        replaced = np.where(fate < 0.8, self.mask_token_id, np.where(fate < 0.9, random_ids, ids))
        return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORED)


def next_tokens(ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The row itself, int64 [length], as labels for a causal model; nothing predicts the first token."""
    labels = ids.copy()
    labels[0] = IGNORED
    return ids, labels


def make_masking(tokenizer: PreTrainedTokenizerBase, probability: float, whole_words: bool) -> Masking:
    """The masking for a tokenizer.

    Raises:
        UserError: It has no mask token, or no marks for the start of words.
    """
    if tokenizer.mask_token_id is None:
        raise UserError("The tokenizer has no mask token. Use another tokenizer, or train one.")
    special = np.zeros(len(tokenizer), dtype=bool)
    special[tokenizer.all_special_ids] = True
    starts = word_starts(tokenizer) if whole_words else None
    return Masking(probability, tokenizer.mask_token_id, np.flatnonzero(~special), special, starts)


def word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Which ids start a word: bool [vocabulary].

    Byte-level BPE and SentencePiece mark the space before a word; WordPiece marks what continues one.

    Raises:
        UserError: The vocabulary has none of these marks.
    """
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    # A mark may also be a token's own letter or sign, such as the Maltese Ġ: that of most tokens counts.
    counts = {mark: sum(token.startswith(mark) for token in tokens) for mark in _MARKS}
    mark = max(counts, key=counts.__getitem__)
    if not counts[mark]:
        raise UserError(
            f"`whole_word_masking` needs a vocabulary that marks words ({', '.join(_MARKS)}), and the tokenizer's does "
            "not. Set it to false."
        )
    return np.array([token.startswith(_MARKS[mark]) != (mark == "##") for token in tokens])


def collate(
    rows: list[tuple[np.ndarray, np.ndarray]], pad_token_id: int, separator: int | None = None
) -> dict[str, Tensor]:
    """A padded batch: `input_ids`, `attention_mask` and `labels`, int64 [rows, longest].

    With a `separator`, which is never masked, also `seq_idx`: the number of the text that a token belongs to.
    """
    shape = len(rows), max(len(ids) for ids, _ in rows)
    fill = {"input_ids": pad_token_id, "attention_mask": 0, "labels": IGNORED}
    batch = {name: np.full(shape, value, dtype=np.int64) for name, value in fill.items()}
    for row, (ids, labels) in enumerate(rows):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, : len(ids)] = labels
    if separator is not None:
        ends = batch["input_ids"] == separator
        batch["seq_idx"] = np.cumsum(ends, axis=1) - ends
    return {name: torch.from_numpy(array) for name, array in batch.items()}
