"""Five fixed inputs of a checkpoint, and what the model answers: `golden.json`.

The outputs are those of the shipped files, computed in float32 with the backend `eager`. A case holds `texts`, `tokens`
where the figures belong to tokens, and `values` as nested lists:

    masked LM        log-probabilities of the five most probable `tokens` (in words: `answers`) at each mask
    causal LM        the greedy continuation, `tokens`, and their log-probabilities
    classification   logits
    multiple choice  logits; `texts` holds the options of each question
    tokens           logits of the first token of each text
    answers          the largest logits of a start and of an end in each text
    sentences        the first eight numbers of each embedding
"""

import json
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from common.models import DAMAGED

from luna_hf.scripting import UserError, load_tokenizer, read_json, reason, write_text

PASSAGE = (
    "The old harbour lies at the mouth of the river. In the morning, boats bring fish and coal to the town, and in the "
    "evening the lamps are lit along the wall. A narrow street leads up to the church, where the bells ring every hour."
)
CONTINUED = 12  # tokens that a causal model adds
# The length of the longest case for a model without a limit.
UNLIMITED = 1024
Case = dict[str, Any]
# A text, or the options of a question.
Text = str | list[str]


class Kind(NamedTuple):
    """A kind of model: its Auto class in transformers, the Hub's tags of its task, its inputs, and what is read.

    `texts` are two short inputs and what ends `PASSAGE` in the longer ones; `[MASK]` and `[SEP]` stand for tokens.
    `choose(model, tokenizer, texts)` finds the tokens whose values are recorded, or `None`;
    `read(model, tokenizer, texts, tokens)` gives the values.
    """

    auto_class: str
    pipeline: str
    tag: str
    texts: tuple[Text, Text, Text]
    choose: Callable[..., list[list[int]]] | None
    read: Callable[..., torch.Tensor]


def kind_of(folder: Path) -> str:
    """The key of `KINDS` of a folder with a model.

    Raises:
        UserError: It is none of them.
    """
    if (folder / "modules.json").is_file():
        return "sentences"
    (name,) = read_json(folder / "config.json")["architectures"]
    found = next((kind for kind, row in KINDS.items() if name.endswith(row.auto_class.removeprefix("AutoModel"))), None)
    if found is None:
        raise UserError(f"{folder} holds a {name}. Checkpoints are models for: {', '.join(KINDS)}.")
    return found


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    """The model of a folder in evaluation mode, and its tokenizer; `options` are those of `from_pretrained`.

    Raises:
        UserError: A file is missing or damaged.
    """
    kind = kind_of(folder)
    if kind == "sentences":
        from common import extra_embed  # noqa: F401

        # isort: split
        from common.sentences import load_sentences

        model = load_sentences(str(folder), device="cpu", model_kwargs=options)
        return model.eval(), model.tokenizer
    try:
        model = getattr(transformers, KINDS[kind].auto_class).from_pretrained(folder, **options)
    except DAMAGED as error:
        raise UserError(f"The model in {folder} cannot be loaded ({reason(error)}).") from error
    return model.eval(), load_tokenizer(str(folder), required=True)


def make(folder: Path, longest: int | float) -> list[Case]:
    """The cases for a folder whose model takes `longest` tokens."""
    kind = kind_of(folder)
    model, tokenizer = load(folder, dtype=torch.float32, attn_implementation="eager")
    cases = []
    choose, added = KINDS[kind].choose, CONTINUED if kind == "causal LM" else 0
    for name, texts in inputs(KINDS[kind].texts, tokenizer, int(min(longest, UNLIMITED)) - added).items():
        tokens = choose(model, tokenizer, texts) if choose else None
        case = {"name": name, "texts": texts}
        if tokens:
            words = [[tokenizer.decode([token]) for token in row] for row in tokens]
            case |= {"tokens": tokens, "answers": words}
        found = values(kind, model, tokenizer, case)
        cases.append({**case, "values": [[round(number, 6) for number in row] for row in found.tolist()]})
    return cases


def write(path: Path, kind: str, cases: list[Case], **figures: Any) -> None:
    """Write `golden.json`, a line for each case."""
    head = json.dumps({"kind": kind, **figures}).removesuffix("}")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    write_text(path, f'{head}, "cases": [\n{lines}\n]}}\n')


@torch.no_grad()
def values(kind: str, model: Any, tokenizer: Any, case: Case) -> torch.Tensor:
    """What a model gives for a case, to compare with its `values`: (rows, figures) in float32 on the CPU."""
    return KINDS[kind].read(model, tokenizer, case["texts"], case.get("tokens")).float().cpu()


# ---- inputs ----


def inputs(texts: tuple[Text, Text, Text], tokenizer: Any, longest: int) -> dict[str, list[Text]]:
    """The inputs of every case, see `Kind`; the longest one has `longest` tokens."""

    def spelled(text: Text) -> Text:
        if isinstance(text, list):
            return [spelled(option) for option in text]
        return text.replace("[MASK]", tokenizer.mask_token or "").replace("[SEP]", tokenizer.sep_token or "")

    def long(count: int) -> Text:
        if isinstance(end, list):
            return [filled(tokenizer, count, option) for option in end]
        return filled(tokenizer, count, end)

    first, second, end = map(spelled, texts)
    paragraph = long(min(longest, 60))
    return {
        "short": [first],
        "another": [second],
        "paragraph": [paragraph],
        "padded batch": [first, paragraph, second],
        "longest": [long(longest)],
    }


def filled(tokenizer: Any, longest: int, end: str) -> str:
    """As many words of `PASSAGE`, repeated, and `end` as fit into `longest` tokens."""
    words = PASSAGE.split()

    def text(count: int) -> str:
        return " ".join([*(words[index % len(words)] for index in range(count)), *filter(None, [end])])

    counts = range(1, longest)
    return text(max(1, bisect_right(counts, longest, key=lambda n: len(tokenizer(text(n), verbose=False).input_ids))))


# ---- outputs ----


def _encode(model: Any, tokenizer: Any, texts: list[str]) -> Any:
    return tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False).to(model.device)


def _at_masks(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    batch = _encode(model, tokenizer, texts)
    logits = model(**batch).logits[batch["input_ids"] == tokenizer.mask_token_id]
    return logits.float().log_softmax(-1)


def _most_probable(model: Any, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    with torch.no_grad():
        return _at_masks(model, tokenizer, texts).topk(5).indices.tolist()


def _read_masks(model: Any, tokenizer: Any, texts: list[str], tokens: list[list[int]]) -> torch.Tensor:
    found = _at_masks(model, tokenizer, texts)
    return found.gather(-1, torch.tensor(tokens, device=found.device))


def continuation(model: Any, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens that a causal model adds greedily to each text."""
    batch = _encode(model, tokenizer, texts)
    pad = {"pad_token_id": tokenizer.pad_token_id}
    ids = model.generate(**batch, min_new_tokens=CONTINUED, max_new_tokens=CONTINUED, do_sample=False, **pad)
    return ids[:, batch["input_ids"].shape[1] :].tolist()


def _read_continuation(model: Any, tokenizer: Any, texts: list[str], tokens: list[list[int]]) -> torch.Tensor:
    batch, new = _encode(model, tokenizer, texts), torch.tensor(tokens, device=model.device)
    ids, mask = (
        torch.cat([batch[name], more], 1)
        for name, more in (("input_ids", new), ("attention_mask", torch.ones_like(new)))
    )
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -CONTINUED - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)


def _read_logits(model: Any, tokenizer: Any, texts: list[str], tokens: None) -> torch.Tensor:
    return model(**_encode(model, tokenizer, texts)).logits


def _read_choices(model: Any, tokenizer: Any, texts: list[list[str]], tokens: None) -> torch.Tensor:
    batch = _encode(model, tokenizer, [option for options in texts for option in options])
    shape = (len(texts), len(texts[0]), -1)
    return model(**{name: tensor.view(shape) for name, tensor in batch.items()}).logits


def _read_first(model: Any, tokenizer: Any, texts: list[str], tokens: None) -> torch.Tensor:
    return model(**_encode(model, tokenizer, texts)).logits[:, 1]


def _read_ends(model: Any, tokenizer: Any, texts: list[str], tokens: None) -> torch.Tensor:
    batch = _encode(model, tokenizer, texts)
    outputs, padding = model(**batch), batch["attention_mask"] == 0
    logits = (outputs.start_logits, outputs.end_logits)
    return torch.stack([own.masked_fill(padding, -torch.inf).amax(1) for own in logits], 1)


def _read_embeddings(model: Any, tokenizer: Any, texts: list[str], tokens: None) -> torch.Tensor:
    return model.encode(texts, convert_to_tensor=True)[:, :8]


_REVIEWS = ("A warm and funny film.", "The plot is dull, and the ending makes no sense.", "")
_BOATS = ["the harbour", "the church", "the lamp", "the hill", "bed"]
_QUESTIONS = (
    [f"Q: Where do boats bring their fish?[SEP]A: to {place}" for place in _BOATS],
    [f"Q: What rings every hour?[SEP]A: a {thing}" for thing in ("bell", "boat", "wall", "fish", "street")],
    [f"Q: Where do boats bring their fish?[SEP]A: to {place}" for place in _BOATS],
)
_NAMED = ("Anna Brandt works for Siemens in Munich.", "New York wins again", "")
_ANSWERED = (
    "Where do boats bring their fish?[SEP]In the morning, boats bring fish and coal to the town.",
    "What rings every hour?[SEP]The bells of the church ring every hour.",
    "[SEP]What rings every hour?",
)
_MASKED = (
    *("The capital of France is [MASK].", "She opened the [MASK] and looked [MASK] at the rain."),
    "The boats come back in the [MASK].",
)
_CONTINUED = ("The capital of France", "She opened the door and", "")
KINDS = {
    "masked LM": Kind("AutoModelForMaskedLM", "fill-mask", "masked-lm", _MASKED, _most_probable, _read_masks),
    "causal LM": Kind(
        "AutoModelForCausalLM", "text-generation", "causal-lm", _CONTINUED, continuation, _read_continuation
    ),
    "classification": Kind(
        "AutoModelForSequenceClassification", *["text-classification"] * 2, _REVIEWS, None, _read_logits
    ),
    "multiple choice": Kind("AutoModelForMultipleChoice", *["multiple-choice"] * 2, _QUESTIONS, None, _read_choices),
    "tokens": Kind("AutoModelForTokenClassification", *["token-classification"] * 2, _NAMED, None, _read_first),
    "answers": Kind("AutoModelForQuestionAnswering", *["question-answering"] * 2, _ANSWERED, None, _read_ends),
    "sentences": Kind("AutoModel", "sentence-similarity", "sentence-transformers", _REVIEWS, None, _read_embeddings),
}
