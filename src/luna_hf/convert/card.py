"""The card of a converted encoder."""

from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedConfig

from ..markdown import Markdown, code, code_block, escape, fill, quoted
from ..markdown import table as markdown_table
from ..scripting import portable
from .files import source_card
from .report import Figure, table

_CARD = """---
$metadata
---

# $name

$source, converted to read texts of up to $longest tokens. It was not trained: the weights are those of its source.
$attention

$licence

## Use

$usage

`trust_remote_code` runs the code in this folder, and is not needed once the package `luna_hf` is imported.

## Compared with its source

$results

$measured

## Conversion

$command

$date, with $versions. `conversion.json` repeats the figures.

## Limits

The model inherits what its source has learned, including errors and biases. For texts that its source reads whole, the
source is as good. To search documents, you can just as well cut them into windows and embed these with the source.
"""


_FULL = "All layers keep softmax attention, in time that grows with the square of the length."

_NO_LICENCE = "No licence of the source was found. Ask its authors before you pass the model on."

_SENTENCES = """from sentence_transformers import SentenceTransformer

# The name of this repository on the Hub, or the folder of this card.
model = SentenceTransformer($name, trust_remote_code=True)
embeddings = model.encode(["A text.", "Another text."])  # longer texts are cut, without a warning"""


_STATES = """from transformers import $auto, AutoTokenizer

# The name of this repository on the Hub, or the folder of this card.
tokenizer = AutoTokenizer.from_pretrained($name, trust_remote_code=True)
model = $auto.from_pretrained($name, trust_remote_code=True)"""


# Library, task and tags of each kind of result.
KINDS = {
    "sentences": ("sentence-transformers", "sentence-similarity", ["sentence-transformers", "sentence-similarity"]),
    "masked words": ("transformers", "fill-mask", ["masked-lm"]),
    "states": ("transformers", "feature-extraction", []),
}


def usage(kind: str, name: str) -> Markdown:
    """The code that loads a result of one of `KINDS`."""
    auto = "AutoModelForMaskedLM" if kind == "masked words" else "AutoModel"
    template = Template(_SENTENCES if kind == "sentences" else _STATES)
    return code_block(template.substitute(name=quoted(name), auto=auto), "python")


def attention(config: PreTrainedConfig) -> str:
    """What the tokens of a conversion read, and in what time."""
    if (full := full_layers(config)) == "all layers":
        return _FULL
    near = ["its neighbours"] if config.local_window else []
    near += ["some tokens that its head selects"] if config.num_selected_tokens else []
    parts = enumerated([*near, "means of the rest" if near else "means of the text"])
    words = f"Each token reads {parts}, in time that grows linearly with the length."
    return f"{words} Softmax attention remains in {full}, in quadratic time." if full else words


def full_layers(config: PreTrainedConfig) -> str:
    """The layers with softmax attention, in words; empty if there are none."""
    full = sorted(config.full_attention_layers or ())
    if len(full) == config.num_hidden_layers:
        return "all layers"
    return f"layer{'s' * (len(full) > 1)} {enumerated(map(str, full))} (the first is 0)" if full else ""


def enumerated(words: Iterable[str]) -> str:
    """Words as a list in a sentence."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def make_card(name: str, source: str, kind: str, config: PreTrainedConfig, facts: dict[str, Any]) -> str:
    """The card as Markdown, with its metadata.

    Args:
        name: the folder's.
        source: folder or Hub name of what was converted.
        kind: one of `KINDS`.
        config: that of the conversion.
        facts: the content of `conversion.json`.
    """
    known, (library, task, tags) = source_card(source), KINDS[kind]
    metadata = ModelCardData(
        **{key: known.get(key) for key in ("language", "license", "license_name", "license_link")},
        library_name=library,
        pipeline_tag=task,
        tags=[*tags, "abc_memory", "linear-attention", "custom_code"],
        base_model=None if Path(source).exists() else source,
    )
    licence = f"The licence is the one on the source's card: {code(known.license)}."
    measured = f"Measured on {facts['texts']}, with this CPU: {facts['machine']['cpu']}."
    header, *rows = table([Figure(**figure) for figure in facts["figures"]])
    results = [*([markdown_table(header, rows)] if rows else []), *map(escape, facts["explanations"])]
    return fill(
        _CARD,
        metadata=Markdown(metadata.to_yaml()),
        name=name,
        source=code(portable(source)),
        longest=f"{config.max_position_embeddings:,}",
        attention=attention(config),
        licence=Markdown(licence) if known.license else _NO_LICENCE,
        usage=usage(kind, name),
        results=Markdown("\n\n".join(results)),
        measured=measured if rows else "Nothing has been measured.",
        command=code_block(facts["command"], "sh"),
        date=facts["date"],
        versions=", ".join(f"{name} {facts['versions'][name]}" for name in ("torch", "transformers", "luna_hf")),
    )
