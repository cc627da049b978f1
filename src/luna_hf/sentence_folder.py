"""What a sentence-transformers model stores beside its transformer."""

import json

from transformers.utils import cached_file

from .scripting import reason


def find_transformer(name: str) -> str:
    """Find the transformer inside a sentence-transformers model.

    Args:
        name: folder or Hub name of any model.

    Returns:
        The subfolder with the transformer's config and weights: the first module's. Empty if they are not in a
        subfolder, or if there is no such model.

    Raises:
        ValueError: Its `modules.json` cannot be read.
    """
    try:
        path = cached_file(name, "modules.json", _raise_exceptions_for_missing_entries=False)
    except OSError:  # no model of this name, which reading its config reports
        return ""
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)[0]["path"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"The modules.json of {name} cannot be read ({reason(error)}).") from error
