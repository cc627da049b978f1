"""Transformers models whose attention runs in linear time over a memory of bounded size.

Importing the package registers every model family with the Auto classes:

    >>> import luna_hf
    >>> from transformers import AutoModelForMaskedLM
    >>> model = AutoModelForMaskedLM.from_config(luna_hf.LunaConfig())
"""

from . import families
from .families import *
from .memory_attention import Memory
from .state import MemoryCache
from .tokenization_fairseq import FairseqBpeTokenizer
from .write_read import read_memory, write_memory

__version__ = "0.1.0"

__all__ = ["FairseqBpeTokenizer", "Memory", "MemoryCache", "read_memory", "write_memory"]
__all__ += families.__all__

families.register()
