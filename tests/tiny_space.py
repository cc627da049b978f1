"""A folder of tiny checkpoints for the page of `examples/space`."""

from pathlib import Path

from helpers import tiny_causal_model
from tiny_finetuning import SHAPE, checkpoint, tokenizer

MIXED = {"local_window": 4, "conv_kernel_size": 3}


def tiny_space(folder: Path, longest: int = 40) -> Path:
    """A Luna, its twin, an ABC and a causal Luna, under the names of the real ones; and a folder without weights."""
    checkpoint(folder / "abc-mini-en", "abc_memory", max_position_embeddings=longest)
    checkpoint(folder / "luna-mini-en", num_hidden_layers=2, max_position_embeddings=longest, **MIXED)
    checkpoint(folder / "roberta-mini-en", "roberta", max_position_embeddings=longest + 2)
    causal = folder / "luna-mini-en-clm"
    tiny_causal_model(**{**SHAPE, **MIXED, "vocab_size": len(tokenizer())}).save_pretrained(causal)
    tokenizer().save_pretrained(causal)
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.json").write_text((folder / "luna-mini-en" / "config.json").read_text())
    return folder
