"""What objectives with a teacher share: the recipe's key, the pair of models, and which models can be a pair."""

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from common.models import load_config, load_encoder, longest_input
from engine.sharding import is_sharded
from torch import nn
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from luna_hf import FAMILIES
from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.scripting import UserError
from objectives.masked import MaskedObjective, PretrainRecipe

# Types with RoBERTa's module names, for messages; `check_names` looks at the modules.
TEACHERS = f"{', '.join(FAMILIES)}, roberta, xlm-roberta, camembert, data2vec-text or bert"


@dataclasses.dataclass(frozen=True)
class TeacherRecipe(PretrainRecipe):
    """The keys of `pretrain_mlm.py`, and the teacher."""

    teacher: str

    def __post_init__(self) -> None:
        self.require(("teacher",), bool, "the folder or Hub name of the model to learn from")
        converted = "a converted model, see conversion/roberta_to_abc.py"
        self.require(("model_name_or_path",), bool, converted)
        self.require(("separate_documents",), lambda value: not value, "false: the teacher reads rows whole")
        super().__post_init__()


class StudentAndTeacher(nn.Module):
    """A student to train, and a teacher without gradients, always in eval mode."""

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        super().__init__()
        self.student = student
        # In a tuple it is not a sub-module: not saved, not trained, not wrapped for several processes.
        self._teacher = (teacher.eval().requires_grad_(False),)

    @property
    def teacher(self) -> PreTrainedModel:
        """The model to learn from."""
        return self._teacher[0]

    def _apply(self, *args: Any, **kwargs: Any) -> "StudentAndTeacher":
        self.teacher._apply(*args, **kwargs)  # moves with the student
        return super()._apply(*args, **kwargs)


class TeacherObjective(MaskedObjective):
    """An objective that compares a student with its teacher."""

    def check(self, recipe: TeacherRecipe) -> None:
        """Check the pair of models."""
        teacher = load_config(recipe.teacher, TEACHERS)
        check_pair(load_config(recipe.model_name_or_path), teacher, recipe)
        check_names(teacher, recipe.teacher)

    def load_teacher(self, recipe: TeacherRecipe, accelerator: Accelerator) -> tuple[PreTrainedModel, list[str]]:
        """The teacher with its masked-LM head, and the notes of `load_encoder`.

        Raises:
            UserError: The run is sharded, or the teacher is damaged.
        """
        if is_sharded(accelerator):
            raise UserError(
                f"A run with a teacher cannot be sharded ({accelerator.distributed_type.value}), since it reads the "
                "states between layers. Launch with training/accelerate/multi_gpu.yaml."
            )
        return load_encoder(AutoModelForMaskedLM, recipe.teacher)

    def trained(self, module: nn.Module, accelerator: Accelerator) -> nn.Module:
        """The student."""
        return accelerator.unwrap_model(module).student


def check_pair(student: PreTrainedConfig, teacher: PreTrainedConfig, recipe: TeacherRecipe) -> None:
    """Check that a model of luna_hf can learn from a teacher of its shape, which takes blocks of the recipe's size."""
    begin, name = recipe.model_name_or_path, recipe.teacher
    if not isinstance(student, BoundedMemoryConfig):
        raise UserError(
            f"`model_name_or_path` {begin} is a {student.model_type} checkpoint, but only models of luna_hf can learn "
            "from a teacher. Convert it first: conversion/roberta_to_abc.py."
        )
    for field in ("is_decoder", "hidden_size", "num_hidden_layers", "vocab_size", "pad_token_id", "norm_first"):
        own = getattr(student, field)
        other = getattr(teacher, field, False if isinstance(own, bool) else None)
        if own != other:
            raise UserError(
                f"`teacher` {name} has {field} {other}, but {begin} has {own}. Name the model that it was made from."
            )
    if recipe.block_size > longest_input(teacher):
        raise UserError(
            f"`block_size` is {recipe.block_size}, but `teacher` {name} takes at most {longest_input(teacher)} tokens."
        )


def check_names(config: PreTrainedConfig, name: str) -> None:
    """Check that a teacher's modules have RoBERTa's names, without making the model."""
    with torch.device("meta"):
        teacher = AutoModelForMaskedLM.from_config(config).base_model
    try:
        found = [layer.attention.output.dropout for layer in teacher.encoder.layer]
    except AttributeError:
        found = []
    if not found:
        raise UserError(
            f"`teacher` {name} is a {config.model_type} checkpoint, which does not name its layers like RoBERTa. "
            f"Name an encoder: {TEACHERS}."
        )
