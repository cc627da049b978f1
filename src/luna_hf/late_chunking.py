"""Late chunking (Günther et al. 2024, arXiv 2409.04701): vectors of passages that know the whole document."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def embed_spans(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> Tensor:
    """Read a text in one pass, and average the states of each span.

    Args:
        model: an encoder whose embeddings are means of its states.
        tokenizer: its tokenizer, with offsets (every `tokenizer.json` has them).
        text: the document.
        spans: of each passage, the place of its first character and that after its last. They may overlap.

    Returns:
        (spans, d) normalised vectors in float32, in the order of the spans. They can be compared with the embedding of
        a query by the same model.

    Raises:
        ValueError: The text is too long for the model, a span holds no token or is not inside the text, or the
            tokenizer has no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not tell where its tokens stand: save it as tokenizer.json.")
    encoded = tokenizer(text, truncation=False, padding=False, return_offsets_mapping=True, verbose=False)
    ids, longest = encoded["input_ids"], model.config.max_position_embeddings
    if len(ids) > longest:
        raise ValueError(f"The text has {len(ids):,} tokens, but the model takes {longest:,}: split it into parts.")
    # Special tokens stand nowhere: their offsets are equal.
    starts, ends = torch.tensor(encoded["offset_mapping"]).T
    first, last = torch.tensor([*spans], dtype=torch.long).reshape(-1, 2).T.unsqueeze(-1)
    held = ((starts < last) & (ends > first) & (ends > starts)).float()
    for (start, end), number in zip(spans, held.sum(1).tolist(), strict=True):
        if not 0 <= start < end <= len(text) or not number:
            raise ValueError(f"The span {start, end} holds no token of the text, which has {len(text):,} characters.")
    row = torch.tensor([ids], device=model.device)
    states = model(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0].float()
    return normalize(held.to(states.device) @ states, dim=-1)
