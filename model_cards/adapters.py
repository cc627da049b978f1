"""Checkpoints that are PEFT adapters: weights of a few MB on the model of another checkpoint, and a head."""

import math
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from luna_hf.scripting import TOKENIZER_FILES, read_json, write_json

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# PEFT's names of tasks, by the end of the model's class, for its `AutoPeftModelFor...`. It has none for choices.
_TASKS = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS", "QuestionAnswering": "QUESTION_ANS"}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / SETTINGS).is_file()


def save(source: Path, target: Path, base: str) -> None:
    """Write an adapter in bfloat16, with the config and the tokenizer of its model.

    Args:
        source: folder of a run, or of a checkpoint; may be the target.
        target: folder of the copy.
        base: where the model is that it belongs to: a folder in the clone, or a repository on the Hub.
    """
    # With `bias="all"`, PEFT writes the biases of whole trained modules thrice, twice by the names of its wrapper.
    weights = {
        name: weight.to(torch.bfloat16)
        for name, weight in load_file(source / WEIGHTS).items()
        if not {"modules_to_save", "original_module"} & set(name.split("."))
    }
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    config, settings = read_json(source / "config.json"), read_json(source / SETTINGS)
    write_json(target / "config.json", {**config, "dtype": "float32"})
    (name,) = config["architectures"]
    if task := _TASKS.get(name.partition("For")[2]):
        settings |= {"task_type": task, "auto_mapping": None}
    write_json(target / SETTINGS, {**settings, "base_model_name_or_path": base})
    for file in filter(Path.is_file, (source / file for file in TOKENIZER_FILES)):
        if source != target:
            shutil.copyfile(file, target / file.name)


def parameters(folder: Path) -> int:
    """The parameters of an adapter, its head among them."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
