"""Fill a mask, and classify a text."""

import torch
from loading import Loaded

from luna_hf.scripting import UserError

MASKS = ("<mask>", "[MASK]")  # of RoBERTa and BERT; users write either for every model


@torch.inference_mode()
def fill(loaded: Loaded, text: str, top_k: int = 5) -> dict[str, float]:
    """The most probable words for the one mask of a text, with their probabilities.

    A word that would continue the one before it, without a space, starts with an ellipsis.

    Raises:
        UserError: The text is empty or too long, or has not exactly one mask.
    """
    mask = loaded.tokenizer.mask_token
    for written in MASKS:
        text = text.replace(written, mask)
    if text.strip() and (count := text.count(mask)) != 1:
        raise UserError(f"The text has {count or 'no'} masks. Write {MASKS[0]} exactly once, for the word to guess.")
    ids = loaded.encode(text).input_ids[0]
    (place,) = (ids == loaded.tokenizer.mask_token_id).nonzero()[0].tolist()
    best = loaded.model(ids[None]).logits[0, place].softmax(-1).topk(top_k)
    before = [ids[place - 1].item()] if text.partition(mask)[0].strip() else []
    words: dict[str, float] = {}
    for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        word = loaded.tokenizer.decode([*before, token])
        if "\N{REPLACEMENT CHARACTER}" in word:  # a part of a character
            word = loaded.tokenizer.convert_ids_to_tokens(token)
        elif before:
            word = word.removeprefix(loaded.tokenizer.decode(before))
        shown = word.strip() if word.startswith(" ") or not before else f"…{word}"
        words[shown] = words.get(shown, 0.0) + probability
    return words


@torch.inference_mode()
def classify(loaded: Loaded, text: str, second: str = "") -> dict[str, float]:
    """The probability of each class of a text or of a pair; if it can have several, they do not add up to 1.

    Raises:
        UserError: The text is empty or too long.
    """
    config, logits = loaded.model.config, loaded.model(**loaded.encode(text, second)).logits[0]
    several = config.problem_type == "multi_label_classification"
    probabilities = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
    return {config.id2label[label]: probability for label, probability in enumerate(probabilities)}
