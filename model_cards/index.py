"""The table of all checkpoints, `checkpoints/README.md`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from catalogue import Zoo
from golden import KINDS

from luna_hf.scripting import markdown_table

HEAD = """\
# Models in this folder

Each folder loads with the Auto classes and pipelines of Transformers, once `luna_hf` is imported, or with
`trust_remote_code=True`. Adapters need the package `peft`, and find their base beside them (in `CrossEncoder` and
`SparseEncoder` only from the root of the repository; `CrossEncoder` also needs `num_labels`). The cards say how each
was made, what it scores, and what it cannot do. The score of a conversion is the mean cosine between its vectors and
its source's, for the longest texts that the source reads whole.

"""


def path(zoo: Zoo) -> Path:
    """Where the table lies."""
    return zoo.root / "checkpoints" / "README.md"


def text(cards: Iterable[Any]) -> str:
    """The page: a row for each checkpoint, given the `Card` of each."""
    rows = []
    for card in cards:
        folder = card.checkpoint.folder
        size = sum(file.stat().st_size for file in folder.glob("*model.safetensors")) / 1e6
        kind, task = "adapter" if card.is_adapter else card.model_type, KINDS[card.kind].pipeline
        link, summary = f"[{card.name}]({card.name}/README.md)", " ".join(card.entry.summary.split())
        rows.append([link, summary, kind, task, f"{size:.1f}", score(card)])
    return HEAD + markdown_table(["model", "what it is", "type", "task", "MB", "score"], rows) + "\n"


def score(card: Any) -> str:
    """The first score of a finetuned model, a language model's accuracy, or a conversion's cosine to its source."""
    found = [f"{metric} {value:.3f}" for _, metric, value in card.own_scores]
    found += [
        f"{name} {card.metrics[f'held_out_{key}']:.3f}" for name, (key, _) in card.shown.items() if key == "accuracy"
    ]
    if cosines := card.metrics.get("cosine"):
        reach = card.checkpoint.stages[-1].recipe["teacher_longest"]  # of texts that the source reads whole
        found += [f"cosine {value:.3f}" for length, value in cosines.items() if int(length) <= reach][-1:]
    return found[0] if found else "-"
