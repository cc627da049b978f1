"""Late chunking (Günther et al. 2024, arXiv 2409.04701): vectors of passages that know the whole document."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH = 16


@torch.no_grad()
def embed_spans(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    spans: Sequence[tuple[int, int]],
    alone: bool = False,
    prompt: str = "",
) -> Tensor:
    """Read a text in one pass, and average the states of each span.

    Args:
        model: an encoder of `AutoModel`, in evaluation mode. Its embeddings are normalised means of its states, without
            further modules such as `Dense`.
        tokenizer: its tokenizer, with offsets (every `tokenizer.json` has them).
        text: the document.
        spans: of each passage, the place of its first character and that after its last. They may overlap.
        alone: also embed each span by itself, and return the normalised sums of both vectors. Searches find more: what
            a passage says is clearer alone, and what it is about in context. Every token is read twice.
        prompt: what the model expects before a document, such as E5's "passage: ".

    Returns:
        (spans, d) normalised vectors in float32, in the order of the spans. They can be compared with the embedding of
        a query by the same model.

    Raises:
        TypeError: `text` is not one string, or `model` is not a model of Transformers.
        ValueError: The text is too long for the model, a span holds no token or is not inside the text, the tokenizer
            has no offsets, or the model is in training mode.
    """
    if not isinstance(text, str):
        raise TypeError(f"`text` is {type(text).__name__}, not a string: call `embed_spans` once for each document.")
    if type(model).__module__.startswith("sentence_transformers"):
        raise TypeError("`model` is of sentence-transformers: pass the model inside, `encoder[0].auto_model`.")
    if model.training:
        raise ValueError("The model is in training mode, whose dropout changes its vectors: call `model.eval()` first.")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not tell where its tokens stand: save it as tokenizer.json.")
    spans = [(int(start), int(end)) for start, end in spans]
    encoded = tokenizer(prompt + text, truncation=False, padding=False, return_offsets_mapping=True, verbose=False)
    ids, longest = encoded["input_ids"], model.config.max_position_embeddings
    if len(ids) > longest:
        raise ValueError(f"The text has {len(ids):,} tokens, but the model takes {longest:,}: split it into parts.")
    # Special tokens stand nowhere: their offsets are equal.
    starts, ends = (torch.tensor(encoded["offset_mapping"]) - len(prompt)).unbind(1)
    first, last = torch.tensor(spans, dtype=torch.long).reshape(-1, 2, 1).unbind(1)
    held = ((starts < last) & (ends > first) & (ends > starts)).float()
    for (start, end), number in zip(spans, held.sum(1).tolist(), strict=True):
        if not 0 <= start < end <= len(text):
            raise ValueError(f"The span {start, end} is not inside the text, which has {len(text):,} characters.")
        if not number:
            raise ValueError(f"The span {start, end} holds no token of the text.")
    row = torch.tensor([ids], device=model.device)
    states = model(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0].float()
    vectors = normalize(held.to(states.device) @ states, dim=-1)
    if not alone:
        return vectors
    return normalize(vectors + _embed(model, tokenizer, [prompt + text[a:b] for a, b in spans]), dim=-1)


def _embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tensor:
    """The mean of all states of each text, normalised (texts, d), in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    vectors = torch.empty(len(texts), model.config.hidden_size, device=model.device)
    for numbers in (order[at : at + _BATCH] for at in range(0, len(order), _BATCH)):
        batch = tokenizer([texts[number] for number in numbers], truncation=False, padding=True, return_tensors="pt")
        batch = batch.to(model.device)
        states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"].unsqueeze(-1)
        vectors[numbers] = normalize((states * mask).sum(1), dim=-1)
    return vectors
