"""The card of a checkpoint that was converted from the authors' code."""

from collections.abc import Sequence
from pathlib import Path
from string import Template

import torch
from fairseq_checkpoint import Original
from fairseq_config import Head
from huggingface_hub import ModelCardData
from shared import ROOT
from transformers import PreTrainedModel

from luna_hf import LunaConfig

TEMPLATE = ROOT / "model_cards" / "fairseq.md"
# Accuracies on the development sets as the paper gives them (Table 6), by the keys and values and the training text.
PUBLISHED = {
    ("tied", "16 GB"): ("93.1", "91.2", "90.8", "65.2", "53.1"),
    ("tied", "160 GB"): ("94.3", "91.5", "91.2", "71.50", "61.48"),
    ("untied", "160 GB"): ("94.6", "92.2", "91.3", "72.25", "62.08"),
}
TAGS = {
    "masked_lm": "fill-mask",
    "encoder": "feature-extraction",
    "classification": "text-classification",
    "regression": "text-classification",
    "ranking": "multiple-choice",
}
AUTO_CLASSES = {
    "masked_lm": "AutoModelForMaskedLM",
    "encoder": "AutoModel",
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "ranking": "AutoModelForMultipleChoice",
}
TITLES = {
    "masked_lm": "A masked language model",
    "encoder": "An encoder",
    "classification": "A sequence classifier",
    "regression": "A model that gives a score to a sequence",
    "ranking": "A model that scores the answers of multiple-choice questions",
}
HALF_NOTE = Template(
    "\n\nThe weights are stored in $dtype, and transformers loads them so, which is for inference. To train on, load "
    "them with `dtype=torch.float32`: an optimizer that works on half precision loses small steps, or ends in NaN."
)
TOKENIZER_CARD = Template(
    "---\n$metadata\n---\n\n# $name\n\nA tokenizer, converted from a dictionary of fairseq over GPT-2's byte-level "
    "BPE: $kind.\n\n- Command: `$command`\n"
)


def make_card(
    name: str, original: Original, head: Head, model: PreTrainedModel, command: str, facts: Sequence[str]
) -> str:
    """Fill `model_cards/fairseq.md`.

    Args:
        name: of the converted model.
        original: where it comes from.
        head: what it has on its encoder.
        model: as converted.
        command: that was given.
        facts: what was found and done, a line each.
    """
    config = model.config
    published = is_published_shape(config)
    metadata = ModelCardData(
        language="en" if published else None,
        library_name="transformers",
        pipeline_tag=TAGS[head.kind],
        tags=["luna", "linear-attention", "custom_code", "fairseq"],
        model_name=name,
    )
    who = "the authors of Luna, or with their code" if published else "someone with the code of Luna's authors"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        metadata=metadata.to_yaml(),
        model_name=name,
        title=f"{TITLES[head.kind]} of the type `luna` with {model.num_parameters():,} parameters",
        trainer=who,
        original=original.name,
        usage=_usage(name, head),
        inputs=_inputs(config, head, original.options.task),
        half_note=HALF_NOTE.substitute(dtype=str(model.dtype).removeprefix("torch.")) if is_half(model) else "",
        published_note=_published_note(config, head, published),
        published="\n".join(
            f"| Luna-128, key and value {kv} | {text} | {' | '.join(scores)} |"
            for (kv, text), scores in PUBLISHED.items()
        ),
        command=command,
        facts="\n".join(f"- {fact}" for fact in facts),
    )


def make_tokenizer_card(name: str, command: str, kind: str) -> str:
    """The card of a tokenizer that was converted alone; `kind` says in a few words what it is."""
    metadata = ModelCardData(library_name="transformers", tags=["fairseq"], model_name=name)
    return TOKENIZER_CARD.substitute(metadata=metadata.to_yaml(), name=name, command=command, kind=kind)


def is_half(model: PreTrainedModel) -> bool:
    """Whether the weights are stored in 16 bits, which an optimizer should not work on."""
    return model.dtype in (torch.float16, torch.bfloat16)


def is_published_shape(config: LunaConfig) -> bool:
    """Whether the model has the size of the paper's base model, whatever its vocabulary."""
    base = LunaConfig.preset("base")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "projection_length")
    return all(getattr(config, name) == getattr(base, name) for name in names)


def _published_note(config: LunaConfig, head: Head, published: bool) -> str:
    """Whose the figures below are."""
    kv = "tied" if config.tie_kv else "untied"
    figures = (
        "These are the authors' figures as published (Table 6 of the paper: accuracy on the development sets, after "
        "finetuning a model for each task). They were **not measured here**."
    )
    if not published:
        return (
            f"{figures} They belong to models of base size (12 layers of width 768) and not to this one, which has "
            f"{config.num_hidden_layers} layers of width {config.hidden_size}."
        )
    if head.kind in ("masked_lm", "encoder"):
        return (
            f"{figures} This checkpoint has key and value {kv}: if it is the authors' `luna.base.{kv}`, its row is "
            "that of 160 GB."
        )
    return f"{figures} They are those of the authors' runs, and not of this finetuned checkpoint."


def _inputs(config: LunaConfig, head: Head, task: str | None) -> str:
    longest = f"Inputs are at most {config.max_position_embeddings:,} tokens long"
    layout = {
        "classification": "A pair of texts is given as such: `tokenizer(first, second)`",
        "regression": "A pair of texts is given as such: `tokenizer(first, second)`",
        "ranking": (
            'Each row is one text, `tokenizer("Q: the question</s>A: an answer")`'
            if task == "commonsense_qa"
            else "Each row is question and answer in one text, and the passage as second text"
        ),
    }.get(head.kind)
    sentences = [longest] + ([layout] if layout else [])
    if head.kind == "classification" and not head.labels:
        sentences.append(
            "The classes have no names: their order is that of the `label/dict.txt` that the model was trained with"
        )
    return ". ".join(sentences) + "."


def _usage(name: str, head: Head) -> str:
    if (task := TAGS[head.kind]) == "text-classification":
        return (
            "from transformers import pipeline\n\n"
            "# The name of this repository on the Hub, or the folder that holds this card.\n"
            f'classify = pipeline("{task}", "{name}", trust_remote_code=True)\n'
            'classify({"text": "A first text.", "text_pair": "A second one, if the task has pairs."})'
        )
    if head.kind == "masked_lm":
        return (
            "from transformers import pipeline\n\n"
            "# The name of this repository on the Hub, or the folder that holds this card.\n"
            f'fill_mask = pipeline("fill-mask", "{name}", trust_remote_code=True)\n'
            'fill_mask("The capital of France is <mask>.")'
        )
    auto_class = AUTO_CLASSES[head.kind]
    return (
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        "# The name of this repository on the Hub, or the folder that holds this card.\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)\n'
        f'model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)'
    )


def target_name(target: Path) -> str:
    """What the card calls the model: the folder's name."""
    return target.resolve().name
