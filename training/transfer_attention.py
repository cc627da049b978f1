"""Attention transfer: fit the attention of a converted model to that of the model it was made from.

    python conversion/roberta_to_abc.py FacebookAI/roberta-base outputs/abc-base-start --memory-control mlp
    python training/transfer_attention.py training/recipes/transfer_attention/abc-base.yaml
    python training/pretrain_mlm.py training/recipes/pretrain_mlm/abc-base-continue.yaml

On plain text, masked as in pretraining, every layer of the student is fed the token states that the teacher has at that
layer, and what its attention sub-layer adds to them is fitted to what the teacher's adds. So every layer learns from
exact targets, without those before or after it. The recipes, the checkpoints and everything that a run leaves are those
of `pretrain_mlm.py`; one more key names the teacher.
"""

from common import extra  # noqa: F401

# isort: split
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from common.models import load_config, load_encoder, longest_input
from common.options import load_recipe
from engine import pretraining
from engine.card import plot_transfer
from engine.groups import check_groups
from engine.loop import RunLog
from engine.objective import Objective, Rows
from engine.recipe import PretrainRecipe
from engine.throughput import forward_flops
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from luna_hf import FAMILIES
from luna_hf.configuration_base import BoundedMemoryConfig
from luna_hf.scripting import UserError, portable

# Types with RoBERTa's module names, for messages; `check_names` looks at the modules.
TEACHERS = f"{', '.join(FAMILIES)}, roberta, xlm-roberta, camembert, data2vec-text or bert"


@dataclasses.dataclass(frozen=True)
class TransferRecipe(PretrainRecipe):
    """A pretraining recipe, and the model to learn from."""

    teacher: str

    def __post_init__(self) -> None:
        self._require("teacher", self.teacher, "the folder or Hub name of the model to learn from")
        converted = "a converted model: see conversion/roberta_to_abc.py"
        self._require("model_name_or_path", self.model_name_or_path, converted)
        super().__post_init__()
        why = "false: the layers are trained one by one, and not called as a model"
        for name in ("gradient_checkpointing", "compile"):
            self._require(name, not getattr(self, name), why)


def read_recipe(path: str, words: list[str]) -> TransferRecipe:
    """A recipe with the overrides of the command line.

    Raises:
        UserError: See `load_recipe`, `PretrainRecipe` and `TransferRecipe`.
    """
    return load_recipe(TransferRecipe, path, words, adapt=pretraining.adapt_to_overrides)


# ---- the error ----


class Lesson(NamedTuple):
    """What a student learns from: of every layer the states that go in, and what attention adds, (b, n, d) each."""

    states: list[Tensor]
    added: list[Tensor]


class TransferOutput(NamedTuple):
    """The loss, and what it is made of: squared error and squared norm of every layer, (layers, 2)."""

    loss: Tensor
    sums: Tensor


@torch.no_grad()
def make_lesson(teacher: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Lesson:
    """Run a base model with RoBERTa's module names, and note down its attention."""
    with _recorded(teacher.encoder.layer) as lesson:
        teacher(input_ids=input_ids, attention_mask=attention_mask)
    return lesson


@contextmanager
def _recorded(layers: nn.ModuleList) -> Iterator[Lesson]:
    lesson, handles = Lesson([], []), []

    def note(into: list[Tensor]) -> Any:
        return lambda _, args, kwargs: into.append(args[0] if args else kwargs["hidden_states"])

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(note(lesson.states), with_kwargs=True))
        # What goes into this dropout is what the sub-layer adds: the output projection's states, and a convolution's.
        added = layer.attention.output.dropout
        handles.append(added.register_forward_pre_hook(note(lesson.added), with_kwargs=True))
    try:
        yield lesson
    finally:
        for handle in handles:
            handle.remove()


def squared_errors(student: PreTrainedModel, lesson: Lesson, keep: Tensor | None) -> Tensor:
    """How far the student's attention is from the lesson, layer by layer.

    A memory that runs on from layer to layer (Luna's packed sequence) is the student's own.

    Args:
        student: a base model of luna_hf.
        lesson: of the same tokens.
        keep: (b, n) boolean, True for tokens; `None` if nothing is padded.

    Returns:
        (layers, 2): the squared error and the squared norm of the lesson, summed over tokens and width, in float32 at
        least.
    """
    carried, context = student.begin(lesson.states[0], keep)
    sums = []
    for layer, states, expected in zip(student.encoder.layer, lesson.states, lesson.added, strict=True):
        added, carried = layer.attention.mix(states, carried, context)
        precise = torch.promote_types(added.dtype, torch.float32)
        parts = (added.to(precise) - expected.to(precise), expected.to(precise))
        if keep is not None:
            parts = (part.masked_fill(~keep.unsqueeze(-1), 0.0) for part in parts)
        sums.append(torch.stack([part.square().sum() for part in parts]))
    return torch.stack(sums)


def relative_errors(sums: Tensor) -> Tensor:
    """(layers, 2) from `squared_errors` to relative squared errors (layers,)."""
    return sums[:, 0] / sums[:, 1].clamp(min=torch.finfo(sums.dtype).tiny)


class AttentionTransfer(nn.Module):
    """Student and teacher; the loss is the mean over layers of the relative squared error."""

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        super().__init__()
        self.student = student
        # In a tuple it is no sub-module: neither saved, nor trained, nor wrapped for several processes.
        self._teacher = (teacher.eval().requires_grad_(False),)

    @property
    def teacher(self) -> PreTrainedModel:
        """The base model to learn from."""
        return self._teacher[0]

    def train(self, mode: bool = True) -> "AttentionTransfer":
        """The student stays without dropout: its targets are exact."""
        super().train(mode)
        self.student.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> TransferOutput:
        """The error on a batch of rows (b, n); labels are not looked at."""
        lesson = make_lesson(self.teacher, input_ids, attention_mask)
        keep = self.student.base_model.tokens_to_keep(input_ids, attention_mask)
        sums = squared_errors(self.student.base_model, lesson, keep)
        return TransferOutput(relative_errors(sums).mean(), sums)

    def _apply(self, *args: Any, **kwargs: Any) -> "AttentionTransfer":
        self.teacher._apply(*args, **kwargs)  # goes where the student goes
        return super()._apply(*args, **kwargs)


# ---- which models ----


def check_pair(student: PreTrainedConfig, teacher: PreTrainedConfig, recipe: TransferRecipe) -> None:
    """Whether a model can learn from another.

    Raises:
        UserError: It is none of ours; the teacher is a decoder, of another shape or vocabulary, has its norms
            elsewhere, or takes shorter texts than the recipe's blocks.
    """
    start, name = recipe.model_name_or_path, recipe.teacher
    if not isinstance(student, BoundedMemoryConfig):
        raise UserError(
            f"`model_name_or_path` {start} is a {student.model_type} checkpoint, but only models of luna_hf can be fed "
            "layer by layer. Convert it first: conversion/roberta_to_abc.py."
        )
    if getattr(teacher, "is_decoder", False):
        raise UserError(f"`teacher` {name} is a decoder (`is_decoder` is true). Name an encoder.")
    for field in ("hidden_size", "num_hidden_layers", "vocab_size", "pad_token_id"):
        own, other = getattr(student, field), getattr(teacher, field, None)
        if own != other:
            raise UserError(
                f"`teacher` {name} has {field} {other}, but {start} has {own}: it was not converted from it. Name the "
                "model that it was made from."
            )
    if student.norm_first != getattr(teacher, "norm_first", False):
        raise UserError(
            f"`norm_first` is {student.norm_first} in {start}, but not in `teacher` {name}: their layers "
            "read other states. Name the model that it was made from."
        )
    if recipe.block_size > longest_input(teacher):
        raise UserError(
            f"`block_size` is {recipe.block_size}, but `teacher` {name} takes at most {longest_input(teacher)} tokens. "
            "Lower `block_size`."
        )


def check_names(config: PreTrainedConfig, name: str) -> None:
    """Whether a teacher's layers are where they are looked for; no model is made for that.

    Raises:
        UserError: They have other names than RoBERTa's.
    """
    with torch.device("meta"):
        teacher = AutoModelForMaskedLM.from_config(config).base_model
    try:
        found = [layer.attention.output.dropout for layer in teacher.encoder.layer]
    except AttributeError:
        found = []
    if not found:
        raise UserError(
            f"`teacher` {name} is a {config.model_type} checkpoint, whose layers are not named as RoBERTa's. "
            f"An encoder is needed: {TEACHERS}."
        )


def plain_row(config: PreTrainedConfig, length: int) -> dict[str, Tensor]:
    """A row (1, length) without padding, to see with what the error depends on."""
    token = next(token for token in range(config.vocab_size) if token != config.pad_token_id)
    ids = torch.full((1, length), token)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def freeze_unused(module: AttentionTransfer, sample: dict[str, Tensor]) -> list[str]:
    """Mark the student's parameters that the error does not depend on (feed-forward, head, ...) as not to be trained.

    Returns:
        The names of those that it depends on.
    """
    with torch.enable_grad():
        module.train()(**sample).loss.backward()
    names = []
    for name, parameter in module.student.named_parameters():
        parameter.requires_grad_(parameter.grad is not None)
        if parameter.grad is not None:
            names.append(name)
        parameter.grad = None
    return names


def layer_parameters(config: PreTrainedConfig) -> set[tuple[str, torch.Size]]:
    """Names, without that of the base model, and shapes of a model's parameters besides embeddings and head."""
    with torch.device("meta"):
        parameters = AutoModel.from_config(config).named_parameters()
        return {(name, weight.shape) for name, weight in parameters if not name.startswith(("embeddings.", "pooler."))}


# ---- the run ----


class TransferObjective(Objective):
    """The relative squared error of the student's attention."""

    def check(self, recipe: TransferRecipe) -> None:
        """See `check_pair`, `check_names`; and a model whose attention has nothing new to train."""
        student = load_config(recipe.model_name_or_path)
        teacher = load_config(recipe.teacher, TEACHERS)
        check_pair(student, teacher, recipe)
        check_names(teacher, recipe.teacher)
        if recipe.groups and not layer_parameters(student) - layer_parameters(teacher):
            raise UserError(
                f"{recipe.model_name_or_path} ({student.model_type}, no convolution) has no parameters that its "
                "teacher lacks, so there is nothing new to fit. Convert with `--conv-kernel-size` or to a memory that "
                "is learned, leave this stage out, or fit all of its attention (`--parameter_groups []`)."
            )

    def make_module(
        self, model: PreTrainedModel, recipe: TransferRecipe, accelerator: Accelerator
    ) -> AttentionTransfer:
        """Student and teacher."""
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise UserError(
                f"Attention transfer does not run sharded ({accelerator.distributed_type.value}), since it calls parts "
                "of layers. Launch with training/accelerate/multi_gpu.yaml."
            )
        module = AttentionTransfer(model, load_encoder(AutoModelForMaskedLM, recipe.teacher)[0].base_model)
        trained = freeze_unused(module, plain_row(model.config, recipe.block_size))
        names = [name for name, _ in model.named_parameters()]
        check_groups(names, recipe.groups, recipe.max_steps, trained)
        return module

    def trained(self, module: nn.Module, accelerator: Accelerator) -> nn.Module:
        """The student."""
        return accelerator.unwrap_model(module).student

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        """Real tokens."""
        return batch["attention_mask"].sum()

    def flops_per_token(self, module: AttentionTransfer, sample: dict[str, Tensor]) -> float:
        """The teacher runs forward only."""
        rows = {name: sample[name] for name in ("input_ids", "attention_mask")}
        both, teacher = forward_flops(module, rows), forward_flops(module.teacher, rows)
        return (3 * both - 2 * teacher) / rows["attention_mask"].sum().item()

    @torch.no_grad()
    def measure(
        self, module: nn.Module, accelerator: Accelerator, held_out: Rows, batch_size: int
    ) -> dict[str, float | list[float]]:
        """Relative squared error over all held-out rows: `loss`, and of every layer."""
        own = held_out[accelerator.process_index :: accelerator.num_processes]
        transfer = accelerator.unwrap_model(module)
        sums = torch.zeros(len(transfer.student.base_model.encoder.layer), 2, device=accelerator.device)
        for first in range(0, len(own), batch_size):
            rows = own[first : first + batch_size]
            batch = {name: torch.stack([row[name] for row in rows]).to(accelerator.device) for name in rows[0]}
            sums += transfer(**batch).sums
        errors = relative_errors(accelerator.gather(sums.unsqueeze(0)).sum(0))
        return {"loss": errors.mean().item(), "layers": errors.tolist()}

    def start(self, recipe: TransferRecipe) -> str:
        """For the card."""
        return (
            f"made from `{portable(recipe.model_name_or_path)}` by fitting its attention, layer by layer, to that of "
            f"`{portable(recipe.teacher)}`"
        )

    def plot(self, log: RunLog, unigram_loss: float, path: Path) -> None:
        """Error and held-out loss."""
        plot_transfer(log, unigram_loss, path)


def transfer(recipe: TransferRecipe, command: str) -> dict[str, Any] | None:
    """Run a recipe, or go on with it: `pretraining.pretrain` with another objective.

    Returns:
        The figures of `metrics.json`, `objective` being those of `TransferObjective.measure` at the end; `None` if
        stopped by a signal.
    """
    return pretraining.pretrain(recipe, command, TransferObjective())


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line, see `pretraining.command_line`."""

    def run(path: str, words: list[str], command: str) -> tuple[TransferRecipe, dict[str, Any] | None]:
        recipe = read_recipe(path, words)
        return recipe, transfer(recipe, command)

    arguments = sys.argv[1:] if arguments is None else arguments
    return pretraining.command_line("training/transfer_attention.py", __doc__, TransferRecipe, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
