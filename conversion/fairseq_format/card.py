"""The card of a model converted from the authors' code."""

from collections.abc import Sequence
from pathlib import Path
from string import Template

import torch
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from luna_hf import LunaConfig

from .checkpoint import Original
from .config import Head

# Accuracies on the development sets in the paper (Table 6), by key and value and by training text.
PUBLISHED = {
    ("tied", "16 GB"): ("93.1", "91.2", "90.8", "65.2", "53.1"),
    ("tied", "160 GB"): ("94.3", "91.5", "91.2", "71.50", "61.48"),
    ("untied", "160 GB"): ("94.6", "92.2", "91.3", "72.25", "62.08"),
}
# By kind of model: pipeline tag, Auto class, and the beginning of the card.
KINDS = {
    "masked_lm": ("fill-mask", "AutoModelForMaskedLM", "A masked language model"),
    "encoder": ("feature-extraction", "AutoModel", "An encoder"),
    "classification": ("text-classification", "AutoModelForSequenceClassification", "A sequence classifier"),
    "regression": ("text-classification", "AutoModelForSequenceClassification", "A regression model for sequences"),
    "ranking": ("multiple-choice", "AutoModelForMultipleChoice", "A multiple-choice model"),
}
_PIPELINES = {
    "fill-mask": 'model("The capital of France is <mask>.")',
    "text-classification": 'model({"text": "A first text.", "text_pair": "A second one, if the task has pairs."})',
}
_COMMENT = "# Name of this repository on the Hub, or the folder of this card."
_TOKENIZER_CARD = Template(
    "---\n$metadata\n---\n\n# $name\n\nA tokenizer converted from a fairseq dictionary over GPT-2's byte-level BPE: "
    "$kind.\n\n- Command: `$command`\n"
)


_TRANSLATION_CARD = Template(
    "---\n$metadata\n---\n\n# $name\n\nAn encoder-decoder of the type `luna` (Ma et al. 2021, arXiv 2106.01540), "
    "converted from the authors' fairseq format. Its tokenizer looks up words: split texts first as in the training "
    "run, and undo these steps on the model's output.\n\n$facts\n- Command: `$command`\n"
)


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
    config, (tag, auto_class, title) = model.config, KINDS[head.kind]
    published = is_published_shape(config)
    metadata = ModelCardData(
        language="en" if published else None,
        library_name="transformers",
        pipeline_tag=tag,
        tags=["luna", "linear-attention", "custom_code", "fairseq"],
        model_name=name,
    )
    template = Path(__file__).with_name("model.md").read_text(encoding="utf-8")
    return Template(template).substitute(
        metadata=metadata.to_yaml(),
        model_name=name,
        title=f"{title} of the type `luna` with {model.num_parameters():,} parameters",
        trainer="the authors of Luna, or with their code" if published else "users of the Luna authors' code",
        original=original.name,
        usage=_usage(name, tag, auto_class),
        inputs=_inputs(config, head, original.options.task),
        half_note=_half_note(model),
        published_note=_published_note(config, head, published),
        published="\n".join(
            f"| Luna-128, key and value {kv} | {text} | {' | '.join(scores)} |"
            for (kv, text), scores in PUBLISHED.items()
        ),
        command=command,
        facts="\n".join(f"- {fact}" for fact in facts),
    )


def make_tokenizer_card(name: str, command: str, kind: str) -> str:
    """The card of a tokenizer converted alone, which `kind` describes in a few words."""
    metadata = ModelCardData(library_name="transformers", tags=["fairseq"], model_name=name)
    return _TOKENIZER_CARD.substitute(metadata=metadata.to_yaml(), name=name, command=command, kind=kind)


def make_translation_card(name: str, command: str, original: Original, facts: Sequence[str]) -> str:
    """The card of a translation model."""
    languages = [language for language in (original.options.source_lang, original.options.target_lang) if language]
    metadata = ModelCardData(
        language=languages or None,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["luna", "linear-attention", "custom_code", "fairseq"],
        model_name=name,
    )
    return _TRANSLATION_CARD.substitute(
        metadata=metadata.to_yaml(), name=name, command=command, facts="\n".join(f"- {fact}" for fact in facts)
    )


def is_half(model: PreTrainedModel) -> bool:
    """Whether the weights have 16 bits, too few for an optimizer."""
    return model.dtype in (torch.float16, torch.bfloat16)


def is_published_shape(config: LunaConfig) -> bool:
    """Whether the model has the size of the paper's base model, whatever its vocabulary."""
    base = LunaConfig.preset("base")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "projection_length")
    return all(getattr(config, name) == getattr(base, name) for name in names)


def _half_note(model: PreTrainedModel) -> str:
    if not is_half(model):
        return ""
    return (
        f"\n\nThe weights are stored, and by default loaded, in {str(model.dtype).removeprefix('torch.')}, which is "
        "meant for inference. Before training, load them with `dtype=torch.float32`: in half precision, small updates "
        "are lost and losses can become NaN."
    )


def _published_note(config: LunaConfig, head: Head, published: bool) -> str:
    figures = (
        "Accuracies on the development sets as published by the authors (Table 6 of the paper), from a model finetuned "
        "for each task. They were **not measured here**."
    )
    if not published:
        return (
            f"{figures} They are for models of base size (12 layers of width 768), not for this one "
            f"({config.num_hidden_layers} layers of width {config.hidden_size})."
        )
    if head.kind in ("masked_lm", "encoder"):
        kv = "tied" if config.tie_kv else "untied"
        return (
            f"{figures} This checkpoint has {kv} key and value: if it is the authors' `luna.base.{kv}`, its row is "
            "160 GB."
        )
    return f"{figures} They belong to the authors' runs, not to this finetuned checkpoint."


def _inputs(config: LunaConfig, head: Head, task: str | None) -> str:
    sentences = [f"Inputs have at most {config.max_position_embeddings:,} tokens."]
    if head.kind in ("classification", "regression"):
        sentences.append("Pass a pair of texts as `tokenizer(first, second)`.")
    elif head.kind == "ranking" and task == "commonsense_qa":
        sentences.append('Each row is one text: `tokenizer("Q: the question</s>A: an answer")`.')
    elif head.kind == "ranking":
        sentences.append("Each row has question and answer as its first text and the passage as its second.")
    if head.kind == "classification" and not head.labels:
        sentences.append("The classes have no names; their order is that of the training run's `label/dict.txt`.")
    return " ".join(sentences)


def _usage(name: str, tag: str, auto_class: str) -> str:
    if tag in _PIPELINES:
        load = f'model = pipeline("{tag}", "{name}", trust_remote_code=True)'
        return f"from transformers import pipeline\n\n{_COMMENT}\n{load}\n{_PIPELINES[tag]}"
    return (
        f"from transformers import {auto_class}, AutoTokenizer\n\n{_COMMENT}\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)\n'
        f'model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)'
    )
