"""Attention transfer: the attention of a converted model is fitted, layer by layer, to that of its teacher.

The student's layers read the states that go into the teacher's layers, and the loss compares what both add to them.
"""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from common.models import load_config
from engine.card import draw_held_out, drawing
from engine.groups import check_groups
from engine.log import RunLog
from engine.objective import Rows, stack
from engine.throughput import forward_flops
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.scripting import UserError, portable
from objectives.teacher import TEACHERS, StudentAndTeacher, TeacherObjective, TeacherRecipe


@dataclasses.dataclass(frozen=True)
class TransferRecipe(TeacherRecipe):
    """The keys of the recipes of `transfer_attention.py`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = ("gradient_checkpointing", "compile")
        self.require(unused, lambda value: not value, "false: layers are trained one by one, not called as a model")


# ---- the error ----


class Lesson(NamedTuple):
    """For every layer of a teacher, its input states and what its attention adds to them, (b, n, d) each."""

    states: list[Tensor]
    added: list[Tensor]


class TransferOutput(NamedTuple):
    """The loss, and the squared error and squared norm of every layer, (layers, 2), that it is made of."""

    loss: Tensor
    sums: Tensor


@torch.no_grad()
def make_lesson(teacher: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Lesson:
    """Run a base model with RoBERTa's module names and record its attention."""
    lesson = Lesson([], [])

    def record(into: list[Tensor]) -> Any:
        return lambda _, args, kwargs: into.append(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as hooks:
        for layer in teacher.encoder.layer:
            # The input of this dropout is what the sub-layer adds: output projection and convolution.
            for module, into in ((layer, lesson.states), (layer.attention.output.dropout, lesson.added)):
                hooks.enter_context(module.register_forward_pre_hook(record(into), with_kwargs=True))
        # Hooks see the states of padded rows, not of a stream.
        own = {"unpad_inputs": False} if isinstance(teacher.config, BoundedMemoryConfig) else {}
        teacher(input_ids=input_ids, attention_mask=attention_mask, **own)
    return lesson


def squared_errors(student: PreTrainedModel, lesson: Lesson, keep: Tensor | None, **options: Any) -> Tensor:
    """How far the student's attention is from the lesson, layer by layer.

    A memory that is carried from layer to layer (Luna's packed sequence) is the student's own. Layers that keep full
    attention have nothing to learn: they are left out, and their sums are 0.

    Args:
        student: a base model of luna_hf.
        lesson: of the same tokens.
        keep: (b, n) boolean, True for tokens; `None` without padding.
        options: further inputs of the student, such as `local_window`.

    Returns:
        (layers, 2): the squared error and the lesson's squared norm, summed over tokens and width, at least float32.
    """
    carried, context = student.begin(lesson.states[0], keep, **options)
    sums, full = [], student.config.full_attention_layers or ()
    pairs = zip(student.encoder.layer, lesson.states, lesson.added, strict=True)
    for number, (layer, states, expected) in enumerate(pairs):
        if number in full:
            sums.append(states.new_zeros(2, dtype=torch.promote_types(states.dtype, torch.float32)))
            continue
        added, carried = layer.attention(states, carried, context)
        precise = torch.promote_types(added.dtype, torch.float32)
        parts = (added.to(precise) - expected.to(precise), expected.to(precise))
        if keep is not None:
            parts = (part.masked_fill(~keep.unsqueeze(-1), 0.0) for part in parts)
        sums.append(torch.stack([part.square().sum() for part in parts]))
    return torch.stack(sums)


def relative_errors(sums: Tensor) -> Tensor:
    """Relative squared errors (layers,) from the (layers, 2) of `squared_errors`."""
    return sums[:, 0] / sums[:, 1].clamp(min=torch.finfo(sums.dtype).tiny)


def mean_error(sums: Tensor) -> Tensor:
    """The mean relative squared error over the layers of `squared_errors` that are not left out."""
    return relative_errors(sums)[sums[:, 1] > 0].mean()


class AttentionTransfer(StudentAndTeacher):
    """The loss is the mean over layers of the relative squared error; the teacher is a base model."""

    def train(self, mode: bool = True) -> "AttentionTransfer":
        """Keep the student in eval mode: its targets are exact, so dropout would only add noise."""
        super().train(mode)
        self.student.eval()
        return self

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **options: Any
    ) -> TransferOutput:
        """The error on a batch of rows (b, n); labels are ignored, `options` are further inputs of the student."""
        lesson = make_lesson(self.teacher, input_ids, attention_mask)
        keep = self.student.base_model.tokens_to_keep(input_ids, attention_mask)
        sums = squared_errors(self.student.base_model, lesson, keep, **options)
        return TransferOutput(mean_error(sums), sums)


# ---- which parameters ----


def freeze_unused(module: AttentionTransfer, sample: dict[str, Tensor]) -> list[str]:
    """Freeze the student's parameters that the error does not depend on: feed-forward, head and others.

    Returns:
        The names of the parameters that it depends on.
    """
    with torch.enable_grad():
        module.train()(**sample).loss.backward()
    for parameter in module.student.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    return [name for name, parameter in module.student.named_parameters() if parameter.requires_grad]


def layer_parameters(config: PreTrainedConfig) -> set[tuple[str, torch.Size]]:
    """Names (within the base model) and shapes of a model's parameters, without embeddings and head."""
    with torch.device("meta"):
        parameters = AutoModel.from_config(config).named_parameters()
        return {(name, weight.shape) for name, weight in parameters if not name.startswith(("embeddings.", "pooler."))}


# ---- the run ----


class TransferObjective(TeacherObjective):
    """The relative squared error of the student's attention."""

    def check(self, recipe: TransferRecipe) -> None:
        """Check the pair of models, and that the student's attention has new parameters."""
        super().check(recipe)
        student, teacher = load_config(recipe.model_name_or_path), load_config(recipe.teacher, TEACHERS)
        if len(getattr(student, "full_attention_layers", None) or ()) == student.num_hidden_layers:
            raise UserError(f"All layers of {recipe.model_name_or_path} keep full attention: there is nothing to fit.")
        if recipe.groups and not layer_parameters(student) - layer_parameters(teacher):
            raise UserError(
                f"The attention of {recipe.model_name_or_path} has no parameters that its teacher lacks. Leave this "
                "stage out, train all of the attention (`--parameter_groups []`), or convert with a learned memory or "
                "`--conv-kernel-size`."
            )

    def make_module(
        self, model: PreTrainedModel, recipe: TransferRecipe, accelerator: Accelerator
    ) -> AttentionTransfer:
        """Student and teacher.

        Raises:
            UserError: The run is sharded, or a parameter group has nothing to train.
        """
        module = AttentionTransfer(model, self.load_teacher(recipe, accelerator)[0].base_model)
        row = torch.full((1, recipe.block_size), int(model.config.pad_token_id == 0))  # no padding
        trained = freeze_unused(module, {"input_ids": row, "attention_mask": torch.ones_like(row)})
        names = [name for name, _ in model.named_parameters()]
        check_groups(names, recipe.groups, recipe.max_steps, trained)
        return module

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        """Real tokens."""
        return batch["attention_mask"].sum()

    def flops_per_token(self, module: AttentionTransfer, sample: dict[str, Tensor]) -> float:
        """Forward and backward of the student, forward of the teacher."""
        rows = {name: sample[name] for name in ("input_ids", "attention_mask")}
        both, teacher = forward_flops(module, rows), forward_flops(module.teacher, rows)
        return (3 * both - 2 * teacher) / rows["attention_mask"].sum().item()

    @torch.no_grad()
    def measure(
        self, module: nn.Module, accelerator: Accelerator, held_out: Rows, batch_size: int
    ) -> dict[str, float | list[float]]:
        """Relative squared error over all held-out rows: `loss`, and `layers` of every layer (0 if it stays full)."""
        own = held_out[accelerator.process_index :: accelerator.num_processes]
        transfer = accelerator.unwrap_model(module)
        sums = torch.zeros(len(transfer.student.base_model.encoder.layer), 2, device=accelerator.device)
        for first in range(0, len(own), batch_size):
            sums += transfer(**stack(own[first : first + batch_size], accelerator.device)).sums
        sums = accelerator.gather(sums.unsqueeze(0)).sum(0)
        return {"loss": mean_error(sums).item(), "layers": relative_errors(sums).tolist()}

    def start(self, recipe: TransferRecipe) -> str:
        """Where the model comes from, for the card."""
        return (
            f"made from `{portable(recipe.model_name_or_path)}` by fitting its attention, layer by layer, to that of "
            f"`{portable(recipe.teacher)}`"
        )

    def plot(self, log: RunLog, unigram_loss: float, path: Path) -> None:
        """Draw the transfer error by step, of training and of each held-out layer, beside the held-out loss."""
        with drawing(path, panels=2, width=10) as (left, right):
            left.plot(*log.series("train", "loss"), color="tab:blue", alpha=0.5, label="training, mean of the layers")
            steps, layers = log.series("objective", "layers")
            for number, errors in enumerate(zip(*layers, strict=True)):
                shade = 0.2 + 0.7 * number / len(layers[0])
                label = f"held-out, layer {number + 1}" if number in (0, len(layers[0]) - 1) else None
                left.plot(steps, errors, color=str(shade), marker="o", markersize=2, linewidth=1, label=label)
            left.set_ylim(bottom=0)
            left.set_xlabel("step")
            left.set_ylabel("relative squared error of attention")
            draw_held_out(right, log, unigram_loss, self.loss_name)
