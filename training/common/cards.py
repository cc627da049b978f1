"""Model cards: a template of `model_cards/` filled with figures, under a header that the Hub reads."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from luna_hf import FAMILIES
from luna_hf.scripting import markdown_table

_TEMPLATES = Path(__file__).resolve().parents[2] / "model_cards"


def fill_card(template: str, /, **fields: Any) -> str:
    """Fill a file of `model_cards/`; surplus fields are ignored.

    Raises:
        KeyError: A field of the template is missing.
    """
    return Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(fields)


def fill(template: str, model_type: str, metadata: str, **fields: Any) -> str:
    """Fill a card that loads a model: its type decides `$trust` and `$trust_note`, `fields` are the others.

    Raises:
        KeyError: A field of the template is missing.
    """
    custom = model_type in FAMILIES
    return fill_card(
        template,
        **fields,
        metadata=metadata,
        model_type=model_type,
        trust=", trust_remote_code=True" if custom else "",
        trust_note=" With the package `luna_hf` imported, `trust_remote_code` is not needed." if custom else "",
    )


def metadata(
    *,
    name: str,
    model_type: str,
    base_model: str,
    tags: Sequence[str],
    results: Iterable[EvalResult],
    library: str = "transformers",
    **fields: Any,
) -> str:
    """The YAML header of a card, as the Hub reads it.

    A `base_model` that is a local folder is omitted, as are empty `fields` of `ModelCardData`; custom code is tagged.
    """
    return ModelCardData(
        library_name=library,
        model_name=name,
        base_model=base_model if on_hub(base_model) else None,
        tags=[*tags, *(["linear-attention", "custom_code"] if model_type in FAMILIES else [])],
        eval_results=[*results] or None,
        **{key: value or None for key, value in fields.items()},
    ).to_yaml()


def on_hub(name: str) -> bool:
    """Whether a name can be one of the Hub, and is no local path."""
    return bool(name) and name.count("/") <= 1 and not Path(name).exists()


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    escaped = [[str(cell).replace("\\|", "|").replace("|", "\\|") for cell in line] for line in (header, *rows)]
    return markdown_table(escaped[0], escaped[1:])


def code(text: str) -> str:
    """Text as inline code for a table cell.

    Whitespace alone is shown by its `repr`, line breaks become spaces, and a backtick does not end the code.
    """
    text = " ".join((text.strip() or repr(text)).splitlines())
    return (f"`` {text} ``" if "`" in text else f"`{text}`").replace("|", "\\|")


def bullets(notes: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {note}" for note in notes)
