"""Warm starts: models whose weights come from a trained encoder, such as RoBERTa, BERT or a sentence-transformer."""

from .source import load_source
from .transfer import WarmStart, warm_start

__all__ = ["WarmStart", "load_source", "warm_start"]
