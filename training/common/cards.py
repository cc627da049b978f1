"""Model cards: a template of `model_cards/` filled with figures, under a header that the Hub reads."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from luna_hf import FAMILIES
from luna_hf.markdown import Markdown, quoted
from luna_hf.markdown import fill as fill_text

TEMPLATES = Path(__file__).resolve().parents[2] / "model_cards"


def fill_card(template: str, /, **fields: Any) -> str:
    """Fill a file of `model_cards/`, see `markdown.fill`."""
    return fill_text((TEMPLATES / template).read_text(encoding="utf-8"), **fields)


def fill(template: str, model_type: str, metadata: Markdown, **fields: Any) -> str:
    """Fill a card that loads a model: its type decides `$trust` and `$trust_note`, `fields` are the others.

    Raises:
        KeyError: A field of the template is missing.
    """
    custom = model_type in FAMILIES
    return fill_card(
        template,
        **fields,
        metadata=metadata,
        quoted_name=quoted(fields["model_name"]),
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
) -> Markdown:
    """The YAML header of a card, as the Hub reads it.

    A `base_model` that is a local folder is omitted, as are empty `fields` of `ModelCardData`; custom code is tagged.
    """
    data = ModelCardData(
        library_name=library,
        model_name=name,
        base_model=base_model if on_hub(base_model) else None,
        tags=[*tags, *(["linear-attention", "custom_code"] if model_type in FAMILIES else [])],
        eval_results=[*results] or None,
        **{key: value or None for key, value in fields.items()},
    )
    return Markdown(data.to_yaml())


def on_hub(name: str) -> bool:
    """Whether a name can be one of the Hub, and is no local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()
