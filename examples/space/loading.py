"""Find and load the checkpoints that the page shows."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from luna_hf import BoundedMemoryConfig, LunaForCausalLM
from luna_hf.scripting import UserError, load_tokenizer, quiet, read_json, reason

ADAPTER, ADAPTED = "adapter_config.json", "adapter_model.safetensors"


class Loaded(NamedTuple):
    """A model in eval mode and float32, and its tokenizer."""

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

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.model.num_parameters()

    def encode(self, text: str, second: str = "") -> BatchEncoding:
        """Tokenize a text, or two as a pair, with special tokens: inputs of the model, each (1, n).

        Raises:
            UserError: The text is empty, or longer than the model accepts.
        """
        if not text.strip():
            raise UserError("The text is empty. Write a sentence.")
        texts = [text, second] if second.strip() else [text]
        inputs = self.tokenizer(*texts, return_tensors="pt", truncation=False, verbose=False)
        if self.longest is not None and (count := inputs.input_ids.shape[1]) > self.longest:
            raise UserError(
                f"The text has {count:,} tokens, but {self.name} reads at most {self.longest:,}. Shorten it."
            )
        return inputs


class Checkpoints(NamedTuple):
    """What a folder of checkpoints offers to the page; other models in it are not used."""

    encoders: list[Loaded]  # of sentences, by the mean of their states; those for the longest texts first
    masked: list[Loaded]  # the largest first
    classifiers: list[Loaded]  # whole models, and adapters merged into their base
    causal: list[Loaded]  # Lunas

    @property
    def memories(self) -> list[Loaded]:
        """The encoders whose speed is compared with softmax attention."""
        return [one for one in (*self.encoders, *self.masked) if isinstance(one.model.config, BoundedMemoryConfig)]


def load_checkpoints(folder: Path) -> Checkpoints:
    """Load the models in the subfolders of a folder.

    Raises:
        UserError: The folder holds no model that the page can use, or a checkpoint cannot be read.
    """
    paths = sorted(folder.glob("*/"))
    found = Checkpoints(
        encoders=[load(path, AutoModel) for path in paths if averages(path)],
        masked=[load(path, AutoModelForMaskedLM) for path in paths if architecture(path).endswith("ForMaskedLM")],
        classifiers=[load(path, AutoModelForSequenceClassification) for path in paths if classifies(path)],
        causal=[load(path, AutoModelForCausalLM) for path in paths if architecture(path) == "LunaForCausalLM"],
    )
    if not any(found):
        raise UserError(
            f"{folder} holds no sentence encoder, masked or causal language model or classifier. Name the folder of "
            "your checkpoints; `make demo` trains one, in `outputs`."
        )
    found.encoders.sort(key=lambda loaded: (loaded.longest, loaded.size), reverse=True)
    found.masked.sort(key=lambda loaded: loaded.size, reverse=True)
    return found


def architecture(folder: Path) -> str:
    """The class of the model in a folder, an adapter included; empty if there is none, or it is unknown."""
    if not any((folder / name).is_file() for name in ("model.safetensors", ADAPTED)):
        return ""
    return (settings(folder, "config.json").get("architectures") or [""])[0]


def settings(folder: Path, name: str) -> dict[str, Any]:
    """What a file of settings says; nothing if there is none."""
    return read_json(folder / name) if (folder / name).is_file() else {}


def averages(folder: Path) -> bool:
    """Whether a folder holds a sentence encoder that takes the mean of its states, as passages need."""
    pooling = settings(folder, "1_Pooling/config.json")  # in the format of today, or the one before
    means = pooling.get("pooling_mode") == "mean" or pooling.get("pooling_mode_mean_tokens")
    return bool(architecture(folder) and means)


def classifies(folder: Path) -> bool:
    """Whether a folder holds a model that chooses between classes, or PEFT's adapter for one."""
    named = architecture(folder).endswith("ForSequenceClassification")
    labels = settings(folder, "config.json").get("id2label")
    one_label = labels is not None and len(labels) == 1  # a score
    return (named or settings(folder, ADAPTER).get("task_type") == "SEQ_CLS") and not one_label


def load(folder: Path, auto_class: type) -> Loaded:
    """Load a checkpoint; an adapter, whose folder may have the config of its task, into its base.

    Raises:
        UserError: A file is missing or damaged, or parameters are missing, which would be random.
    """
    adapted = (folder / ADAPTER).is_file()
    source = base_of(folder) if adapted else folder
    try:
        config = AutoConfig.from_pretrained(folder if (folder / "config.json").is_file() else source)
        if adapted:
            config.architectures = None  # the base need not have the head, which comes with the adapter
        options = {"config": config, "dtype": torch.float32, "trust_remote_code": False}
        with quiet():  # what a base lacks is no news
            model, report = auto_class.from_pretrained(source, output_loading_info=True, **options)
        missing = {key for key in report["missing_keys"] if auto_class is not AutoModel or "pooler" not in key}
        if adapted:
            from peft import PeftModel

            missing -= {key.removeprefix("base_model.model.") for key in load_file(folder / ADAPTED)}
            model = PeftModel.from_pretrained(model, folder).merge_and_unload()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
    except Exception as error:  # damaged files fail in many ways, all of them the user's to fix
        raise UserError(f"The model in {folder} cannot be loaded ({reason(error)}). Copy it again.") from error
    own = folder if (folder / "tokenizer.json").is_file() else source
    return Loaded(folder.name, model.eval(), load_tokenizer(str(own), required=True))


def base_of(folder: Path) -> Path:
    """The folder of an adapter's base: beside it, or named from the current folder.

    Raises:
        UserError: It is in neither place.
    """
    name = read_json(folder / ADAPTER)["base_model_name_or_path"]
    for base in (folder.parent / Path(name).name, Path(name)):
        if architecture(base):
            return base
    raise UserError(f"{folder} adapts {name}, which is missing. Copy that model to {folder.parent}.")
