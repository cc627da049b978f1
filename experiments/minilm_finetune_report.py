"""Tables of `minilm_finetune.py`."""

from typing import Any


def text(result: dict[str, Any]) -> str:
    """All tables that have results."""
    return ""
