"""Imported first by commands that need the `translate` extra: exits with one line if its package is missing."""

from common.extra import require

require("translate", "sacrebleu")
