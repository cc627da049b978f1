"""Find and load the checkpoints that the page shows."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import LunaForCausalLM, LunaForMaskedLM
from luna_hf.scripting import UserError, load_tokenizer, read_json, reason


class Loaded(NamedTuple):
    """A model in eval mode and float32, with eager attention, and its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def longest(self) -> int | None:
        """The longest input in tokens, with the special ones; `None` for no limit."""
        config = self.model.config
        if isinstance(self.model, LunaForCausalLM):
            return None
        # RoBERTa counts positions from the id after the padding token's.
        return config.max_position_embeddings - (config.pad_token_id + 1 if config.model_type == "roberta" else 0)

    def encode(self, text: str) -> torch.Tensor:
        """Tokenize a text with its special tokens: (1, n) ids.

        Raises:
            UserError: The text is empty, or longer than the model accepts.
        """
        if not text.strip():
            raise UserError("The text is empty. Write a sentence.")
        ids = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        if self.longest is not None and ids.shape[1] > self.longest:
            raise UserError(
                f"The text has {ids.shape[1]:,} tokens, but {self.name} reads at most {self.longest:,}. Shorten it."
            )
        return ids


class Checkpoints(NamedTuple):
    """What a folder of checkpoints offers to the page; other models in it are not used."""

    masked: list[Loaded]  # Lunas first
    causal: list[Loaded]  # Lunas

    @property
    def lunas(self) -> list[Loaded]:
        """The masked language models that have slots to look at."""
        return [loaded for loaded in self.masked if isinstance(loaded.model, LunaForMaskedLM)]


def load_checkpoints(folder: Path) -> Checkpoints:
    """Load the masked and causal language models in the subfolders of a folder.

    Raises:
        UserError: The folder holds no masked-language-model Luna, or a checkpoint cannot be read.
    """
    found = Checkpoints(
        masked=[load(path, AutoModelForMaskedLM) for path in checkpoints_of(folder, "ForMaskedLM")],
        causal=[load(path, AutoModelForCausalLM) for path in checkpoints_of(folder, "LunaForCausalLM")],
    )
    if not found.lunas:
        raise UserError(
            f"{folder} holds no Luna for masked language modelling. Name the folder of your checkpoints; "
            "`make demo` trains one, in `outputs`."
        )
    found.masked.sort(key=lambda loaded: not isinstance(loaded.model, LunaForMaskedLM))
    return found


def checkpoints_of(folder: Path, architecture: str) -> Iterator[Path]:
    """The subfolders, by name, with a model whose class ends like this."""
    for path in sorted(folder.glob("*/config.json")):
        classes = read_json(path).get("architectures") or [""]
        if classes[0].endswith(architecture) and (path.parent / "model.safetensors").is_file():
            yield path.parent


def load(folder: Path, auto_class: type) -> Loaded:
    """Load a checkpoint.

    Raises:
        UserError: A file is missing or damaged.
    """
    try:
        model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # damaged files fail in many ways, all of them the user's to fix
        raise UserError(f"The model in {folder} cannot be loaded ({reason(error)}). Copy it again.") from error
    return Loaded(folder.name, model.eval(), load_tokenizer(str(folder), required=True))
