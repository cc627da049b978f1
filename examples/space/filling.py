"""Fill a mask."""

import torch
from loading import Loaded

from luna_hf.scripting import UserError


@torch.inference_mode()
def fill(loaded: Loaded, text: str, top_k: int = 5) -> dict[str, float]:
    """The most probable words for the one mask of a text, with their probabilities.

    A word that would continue the one before it, without a space, starts with an ellipsis.

    Raises:
        UserError: The text is empty or too long, or has not exactly one mask.
    """
    mask = loaded.tokenizer.mask_token
    if text.strip() and (count := text.count(mask)) != 1:
        raise UserError(f"The text has {count or 'no'} masks. Write {mask} exactly once, for the word to guess.")
    ids = loaded.encode(text)
    (place,) = (ids[0] == loaded.tokenizer.mask_token_id).nonzero()[0].tolist()
    best = loaded.model(ids).logits[0, place].softmax(-1).topk(top_k)
    continues = bool(text.partition(mask)[0].strip())
    words: dict[str, float] = {}
    for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        word = loaded.tokenizer.decode([token])
        if "\N{REPLACEMENT CHARACTER}" in word:  # a part of a character
            word = loaded.tokenizer.convert_ids_to_tokens(token)
        shown = word.strip() if word.startswith(" ") or not continues else f"…{word}"
        words[shown] = words.get(shown, 0.0) + probability
    return words
