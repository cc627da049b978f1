"""Imported first by commands that need the `embed` extra: exits with one line if its package is missing."""

from common.extra import require

require("embed", "sentence_transformers")
