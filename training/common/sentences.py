"""Loading models of sentence-transformers."""

from typing import Any

from sentence_transformers import SentenceTransformer

from luna_hf.scripting import UserError, reason


def load_sentences(name: str, **options: Any) -> SentenceTransformer:
    """The model of a folder or Hub name; `options` are those of `SentenceTransformer`.

    Raises:
        UserError: A file is missing or damaged, or names modules of other packages, whose code is not run.
    """
    try:
        return SentenceTransformer(name, **options)
    except Exception as error:  # modules read their files in many ways
        raise UserError(f"{name} is no model that sentence-transformers can load: {reason(error)}.") from error
