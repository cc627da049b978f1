"""The card of a model converted from the authors' code."""

from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from luna_hf.markdown import Markdown, bullets, code, fill, quoted

from .checkpoint import Original
from .config import Head

TEMPLATE = Path(__file__).with_name("model.md")
# By kind of model: pipeline tag, Auto class, and the beginning of the card.
KINDS = {
    "masked_lm": ("fill-mask", "AutoModelForMaskedLM", "A masked language model"),
    "encoder": ("feature-extraction", "AutoModel", "An encoder"),
    "classification": ("text-classification", "AutoModelForSequenceClassification", "A sequence classifier"),
    "regression": ("text-classification", "AutoModelForSequenceClassification", "A regression model for sequences"),
    "ranking": ("multiple-choice", "AutoModelForMultipleChoice", "A multiple-choice model"),
    "translation": ("translation", "AutoModelForSeq2SeqLM", "An encoder-decoder for translation"),
}
_INPUTS = {
    "classification": "Pass a pair of texts as `tokenizer(first, second)`.",
    "regression": "Pass a pair of texts as `tokenizer(first, second)`.",
    "ranking": "Each row has question and answer as its first text and the passage as its second.",
    "commonsense_qa": 'Each row is one text: `tokenizer("Q: the question</s>A: an answer")`.',
    "translation": "The tokenizer looks up words: split texts as in the training run, and undo it on the output. Where "
    "the target has its own dictionary, its tokenizer is in the folder `target`.",
}


def make_card(
    name: str, original: Original, head: Head, model: PreTrainedModel, command: str, facts: Sequence[str]
) -> str:
    """Fill `model.md`.

    Args:
        name: of the converted model.
        original: its source.
        head: what it has on its encoder.
        model: as converted.
        command: repeats the conversion.
        facts: what was found and done, a line each.
    """
    tag, auto_class, title = KINDS[head.kind]
    languages = [getattr(original.options, f"{side}_lang", "") for side in ("source", "target")]
    metadata = ModelCardData(
        language=[language for language in languages if language] or None,
        library_name="transformers",
        pipeline_tag=tag,
        tags=["luna", "linear-attention", "custom_code", "fairseq"],
        model_name=name,
    )
    inputs = [f"Inputs have at most {model.config.max_position_embeddings:,} tokens."]
    inputs += [_INPUTS[key] for key in (original.options.task, head.kind) if key in _INPUTS][:1]
    if head.kind == "classification" and not head.labels:
        inputs.append("The classes have no names; their order is that of the training run's `label/dict.txt`.")
    if model.dtype in (torch.float16, torch.bfloat16):
        dtype = str(model.dtype).removeprefix("torch.")
        inputs.append(f"The weights are {dtype}, for inference: load them with `dtype=torch.float32` to train them.")
    return fill(
        TEMPLATE.read_text(encoding="utf-8"),
        metadata=Markdown(metadata.to_yaml()),
        model_name=name,
        quoted_name=quoted(name),
        title=f"{title} of the type `luna` with {model.num_parameters():,} parameters",
        original=code(original.name),
        auto_class=auto_class,
        inputs=" ".join(inputs),
        command=code(command),
        facts=bullets(facts),
    )
