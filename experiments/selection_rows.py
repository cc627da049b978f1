"""Rows of the study of selected tokens, and their embeddings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoTokenizer, PreTrainedModel

from luna_hf.scripting import UserError

LENGTHS = (256, 512)
BATCH = 2


def read_rows(source: str, texts: Sequence[Path], count: int) -> dict[int, Tensor]:
    """Full rows of every length, (count, n) each, as many from each text, spread over its whole length.

    Raises:
        UserError: The rows do not divide among the texts, or a file is missing or too short.
    """
    each, rest = divmod(count, len(texts))
    if rest or not each:
        raise UserError(f"--rows {count} is not a multiple of the number of files, {len(texts)}.")
    tokenizer = AutoTokenizer.from_pretrained(source)
    first, last = (torch.tensor([own]) for own in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    rows: dict[int, list[Tensor]] = {length: [] for length in LENGTHS}
    for path in texts:
        if not path.is_file():
            raise UserError(f"{path} is no file.")
        # Named, because the source's own files may truncate and pad.
        plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        ids = torch.tensor(tokenizer(path.read_text(encoding="utf-8"), **plain).input_ids)
        if len(ids) < each * max(LENGTHS):
            raise UserError(f"{path} has {len(ids):,} tokens, too few for {each} rows of {max(LENGTHS)}.")
        for start in range(0, len(ids) // each * each, len(ids) // each):
            for length in LENGTHS:
                rows[length].append(torch.cat([first, ids[start : start + length - 2], last]))
    return {length: torch.stack(found) for length, found in rows.items()}


@torch.no_grad()
def embed(
    model: PreTrainedModel, ids: Tensor, shorten: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> Tensor:
    """Embeddings of rows, the normalised means of their states, (rows, width) in float64."""
    found = []
    for batch in ids.split(BATCH):
        states = model(batch, **options).last_hidden_state.double()
        found.append((shorten(states) if shorten else states).mean(1))
    return normalize(torch.cat(found), dim=-1)


def cosines(found: Tensor, goal: Tensor) -> list[float]:
    """Cosine of every row's embedding to its goal."""
    return [round(value, 6) for value in (found * goal).sum(-1).tolist()]
