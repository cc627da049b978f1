"""The card of a converted encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from huggingface_hub import ModelCardData

_CARD = Template("""---
$metadata
---

# $name

`$source`, converted to read texts of up to $longest tokens. It was not trained: the weights are those of its source.
$attention

$licence

## Use

```python
$usage
```

`trust_remote_code` runs the code in this folder, and is not needed once the package `luna_hf` is imported.

## Compared with its source

$results

$measured

## Conversion

    $command

$date, with $versions. `conversion.json` repeats the figures.

## Limits

The model inherits what its source has learned, including errors and biases. For texts that its source reads whole, the
source is as good. Documents that are searched may as well be cut into windows for the source.
""")


_LINEAR = (
    "Each token reads its neighbours, some tokens that its head selects, and means of the rest, in time that grows "
    "linearly with the length."
)

_FULL = "All layers keep softmax attention, in time that grows with the square of the length."


_SENTENCES = """from sentence_transformers import SentenceTransformer

# The name of this repository on the Hub, or the folder of this card.
model = SentenceTransformer("$name", trust_remote_code=True)
embeddings = model.encode(["A text.", "Another text."])"""


_STATES = """from transformers import $auto, AutoTokenizer

# The name of this repository on the Hub, or the folder of this card.
tokenizer = AutoTokenizer.from_pretrained("$name", trust_remote_code=True)
model = $auto.from_pretrained("$name", trust_remote_code=True)"""


# Library, task and tags of each kind of result.
KINDS = {
    "sentences": ("sentence-transformers", "sentence-similarity", ["sentence-transformers", "sentence-similarity"]),
    "masked words": ("transformers", "fill-mask", ["masked-lm"]),
    "states": ("transformers", "feature-extraction", []),
}


def usage(kind: str, name: str) -> str:
    """The code that loads a result of one of `KINDS`."""
    auto = "AutoModelForMaskedLM" if kind == "masked words" else "AutoModel"
    return Template(_SENTENCES if kind == "sentences" else _STATES).substitute(name=name, auto=auto)


@dataclass(frozen=True)
class Card:
    """What a card says.

    Args:
        kind: what the result is for: "sentences", "masked words" or "states".
        name: the folder's.
        source: what was converted.
        base_model: its name on the Hub, or `None` for a folder.
        known: the metadata of the source's card, see `source_card`.
        longest: the longest input in tokens.
        is_full: whether all layers keep softmax attention.
        results: the table and what it means, a paragraph each.
        facts: the content of `conversion.json`.
    """

    kind: str
    name: str
    source: str
    base_model: str | None
    known: ModelCardData
    longest: int
    is_full: bool
    results: Sequence[str]
    facts: dict[str, Any]

    def text(self) -> str:
        """The card as Markdown, with its metadata."""
        versions = ", ".join(f"{name} {self.facts['versions'][name]}" for name in ("torch", "transformers", "luna_hf"))
        return _CARD.substitute(
            metadata=self.metadata().to_yaml(),
            name=self.name,
            source=self.source,
            longest=f"{self.longest:,}",
            attention=_FULL if self.is_full else _LINEAR,
            licence=self.licence(),
            usage=usage(self.kind, self.name),
            results="\n\n".join(self.results),
            measured=self.measured(),
            command=self.facts["command"],
            date=self.facts["date"],
            versions=versions,
        )

    def metadata(self) -> ModelCardData:
        """The metadata for the Hub."""
        library, task, tags = KINDS[self.kind]
        return ModelCardData(
            language=self.known.language,
            license=self.known.license,
            license_name=self.known.get("license_name"),
            license_link=self.known.get("license_link"),
            library_name=library,
            pipeline_tag=task,
            tags=[*tags, "abc_memory", "linear-attention", "custom_code"],
            base_model=self.base_model,
        )

    def licence(self) -> str:
        """A sentence on the licence."""
        if self.known.license:
            return f"The licence is the one on the source's card: `{self.known.license}`."
        return "The source's card states no licence. Ask its authors before you pass the model on."

    def measured(self) -> str:
        """A sentence on the texts and the machine of the figures."""
        if not self.facts["figures"]:
            return "Nothing has been measured."
        return f"Measured on {self.facts['texts']}, with this CPU: {self.facts['machine']['cpu']}."
