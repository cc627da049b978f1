"""Transformers models whose attention runs in linear time over a memory of bounded size.

Importing the package registers every model family with the Auto classes:

    >>> import luna_hf
    >>> from transformers import AutoModelForMaskedLM
    >>> model = AutoModelForMaskedLM.from_config(luna_hf.LunaConfig())
"""

from . import hub, registry
from .absorb import absorb_projections
from .configuration import BoundedMemoryConfig
from .layers.cache import MemoryCache
from .layers.memory_attention import Memory
from .layers.write_read import read_memory, write_memory
from .registry import *
from .tokenization_fairseq import FairseqBpeTokenizer

__version__ = "0.2.0"

__all__ = ["FairseqBpeTokenizer", "Memory", "MemoryCache", "absorb_projections", "read_memory", "write_memory"]
__all__ += registry.__all__

registry.register()
BoundedMemoryConfig.write_code = staticmethod(hub.write_code)
