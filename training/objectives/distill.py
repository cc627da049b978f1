"""Distillation: masked-language-model training in which a converted model also imitates its teacher.

Both read the same masked text. The loss has three parts: the masked-LM loss; at the masked positions, the
Kullback-Leibler divergence of the student's distribution from the teacher's; and the distance of the student's hidden
states from the teacher's, layer by layer (as in CALD, "Cross-Architecture Layerwise Distillation").
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from common.cards import table
from data.masking import IGNORED
from engine.card import draw_held_out, drawing
from engine.log import RunLog
from engine.objective import Rows, stack
from engine.throughput import forward_flops
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from luna_hf.scripting import UserError, portable
from objectives.teacher import StudentAndTeacher, TeacherObjective, TeacherRecipe


@dataclasses.dataclass(frozen=True)
class DistillRecipe(TeacherRecipe):
    """The keys of the recipes of `distill_mlm.py`: those of `pretrain_mlm.py`, the teacher, and three weights."""

    mlm_weight: float
    kl_weight: float
    hidden_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(("mlm_weight", "kl_weight", "hidden_weight"), lambda value: value >= 0, "at least 0")
        alone = "above 0 if `hidden_weight` is 0; without a teacher, use training/pretrain_mlm.py"
        self.require(("kl_weight",), lambda value: value + self.hidden_weight > 0, alone)

    @property
    def weights(self) -> "Weights":
        """The weights of the loss."""
        return Weights(self.mlm_weight, self.kl_weight, self.hidden_weight)


# ---- the loss ----


class Weights(NamedTuple):
    """How much each part of the loss counts."""

    mlm: float
    kl: float
    hidden: float


class DistillationOutput(NamedTuple):
    """The loss of a batch and its parts.

    Attributes:
        by_targets: weighted sum of the means over the masked positions.
        by_tokens: weighted mean over the tokens.
        nats: (3,) masked-LM loss, divergence from the teacher, and the teacher's masked-LM loss.
        layers: (layers,) relative squared errors of the hidden states.
    """

    by_targets: Tensor
    by_tokens: Tensor
    nats: Tensor
    layers: Tensor

    @property
    def loss(self) -> Tensor:
        """The weighted sum of all parts."""
        return self.by_targets + self.by_tokens


def precise(values: Tensor) -> Tensor:
    """The values in at least float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence of a student's distributions from a teacher's.

    Args:
        student, teacher: (targets, vocabulary) logits.
    """
    logs = (F.log_softmax(precise(logits), -1) for logits in (student, teacher))
    return F.kl_div(*logs, reduction="batchmean", log_target=True)


def hidden_errors(student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor) -> Tensor:
    """Squared distance of a student's states from a teacher's, relative to the squared norm of the teacher's.

    The ratio is taken token by token, so that the mean over a batch is exactly that over its parts.

    Args:
        student, teacher: (b, n, d) states of each layer.
        keep: (b, n) boolean, True for tokens.

    Returns:
        (layers,): the mean over tokens.
    """
    means = []
    for own, other in zip(student, teacher, strict=True):
        own, other = precise(own[keep]), precise(other[keep])
        norms = other.square().sum(-1).clamp(min=torch.finfo(other.dtype).tiny)
        means.append(((own - other).square().sum(-1) / norms).mean())
    return torch.stack(means)


class Distillation(StudentAndTeacher):
    """The weighted sum of masked-LM loss, divergence and hidden error; both models have a masked-LM head."""

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, weights: Weights) -> None:
        super().__init__(student, teacher)
        self.weights = weights

    @torch.no_grad()
    def teach(self, input_ids: Tensor, attention_mask: Tensor, labelled: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The teacher's logits at the labelled positions, and its hidden states."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        outputs = self.teacher.base_model(**inputs, output_hidden_states=True)
        # BERT calls it `cls`, all others `lm_head`.
        head = getattr(self.teacher, "lm_head", None) or self.teacher.cls
        return head(outputs.last_hidden_state[labelled]), outputs.hidden_states

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> DistillationOutput:
        """The loss on a batch of rows (b, n); `options` are further inputs of the student."""
        labelled = labels != IGNORED
        expected, states = self.teach(input_ids, attention_mask, labelled)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        outputs = self.student(**inputs, output_hidden_states=True, **options)
        # With sparse prediction, in training, the student's head runs at the labelled positions alone.
        logits = outputs.logits if outputs.logits.ndim == 2 else outputs.logits[labelled]
        kl = divergence(logits, expected)
        errors = hidden_errors(outputs.hidden_states[1:], states[1:], attention_mask != 0)
        return DistillationOutput(
            by_targets=self.weights.mlm * outputs.loss + self.weights.kl * kl,
            by_tokens=self.weights.hidden * errors.mean(),
            nats=torch.stack([outputs.loss, kl, F.cross_entropy(precise(expected), labels[labelled])]).detach(),
            layers=errors.detach(),
        )


# ---- the run ----


class DistillObjective(TeacherObjective):
    """Masked-LM loss, divergence from the teacher, and error of the hidden states."""

    def make_module(self, model: PreTrainedModel, recipe: DistillRecipe, accelerator: Accelerator) -> Distillation:
        """Student and teacher.

        Raises:
            UserError: The run is sharded, or the teacher has no trained head.
        """
        teacher, notes = self.load_teacher(recipe, accelerator)
        if notes and notes[0].startswith("New parameters"):
            raise UserError(
                f"`teacher` {recipe.teacher} has no trained masked-LM head. Name a checkpoint that has one. {notes[0]}"
            )
        return Distillation(model, teacher, recipe.weights)

    def loss(self, output: DistillationOutput, targets: Tensor, tokens: Tensor) -> Tensor:
        """The parts, each with the share of what it is a mean over."""
        return output.by_targets * targets + output.by_tokens * tokens

    def flops_per_token(self, module: Distillation, sample: dict[str, Tensor]) -> float:
        """Forward and backward of the student, forward of the teacher."""
        both, student = forward_flops(module, sample), forward_flops(module.student, sample)
        return (both + 2 * student) / sample["attention_mask"].sum().item()

    @torch.no_grad()
    def measure(
        self, module: nn.Module, accelerator: Accelerator, held_out: Rows, batch_size: int
    ) -> dict[str, float | list[float]]:
        """The parts of the loss over all held-out rows, and their weighted sum as `loss`."""
        own = held_out[accelerator.process_index :: accelerator.num_processes]
        distillation = accelerator.unwrap_model(module)
        was_training = distillation.training
        distillation.eval()
        layers = distillation.student.config.num_hidden_layers
        sums = torch.zeros(5 + layers, device=accelerator.device)  # nats, errors, and what they are means over
        for first in range(0, len(own), batch_size):
            batch = stack(own[first : first + batch_size], accelerator.device)
            targets, tokens = (batch["labels"] != IGNORED).sum(), batch["attention_mask"].sum()
            out = distillation(**batch)
            sums += torch.cat([out.nats * targets, out.layers * tokens, torch.stack([targets, tokens])])
        distillation.train(was_training)
        sums = accelerator.gather(sums.unsqueeze(0)).sum(0)
        (mlm, kl, teacher_mlm), layers = (sums[:3] / sums[-2]).tolist(), (sums[3:-2] / sums[-1]).tolist()
        hidden, weights = sum(layers) / len(layers), distillation.weights
        loss = weights.mlm * mlm + weights.kl * kl + weights.hidden * hidden
        return {"loss": loss, "mlm": mlm, "kl": kl, "hidden": hidden, "teacher_mlm": teacher_mlm, "layers": layers}

    def start(self, recipe: DistillRecipe) -> str:
        """Where the model comes from, for the card."""
        return (
            f"trained further from `{portable(recipe.model_name_or_path)}` to imitate its teacher, "
            f"`{portable(recipe.teacher)}`"
        )

    def results(self, recipe: DistillRecipe, figures: dict[str, Any]) -> str:
        """The parts of the held-out loss as a table, for the card."""
        found, weights = figures["objective"], recipe.weights
        rows = [
            (f"masked-LM loss in nats (the teacher's: {found['teacher_mlm']:.3f})", weights.mlm, found["mlm"]),
            ("divergence from the teacher's distribution in nats", weights.kl, found["kl"]),
            ("relative squared error of the hidden states", weights.hidden, found["hidden"]),
        ]
        shown = [[name, f"{weight:g}", f"{value:.3f}"] for name, weight, value in rows]
        return table(["part of the loss, on held-out text", "weight", "value"], shown)

    def plot(self, log: RunLog, unigram_loss: float, path: Path) -> None:
        """Draw the parts of the held-out objective by step, beside the held-out loss."""
        with drawing(path, panels=2, width=10) as (left, right):
            left.plot(*log.series("train", "loss"), color="tab:blue", alpha=0.5, label="training, weighted sum")
            for name, words in {"kl": "divergence (nats)", "hidden": "relative error of hidden states"}.items():
                left.plot(*log.series("objective", name), marker="o", markersize=2, label=f"held-out {words}")
            left.set_ylim(bottom=0)
            left.set_xlabel("step")
            left.set_ylabel("objective")
            draw_held_out(right, log, unigram_loss, self.loss_name)
            right.plot(*log.series("objective", "teacher_mlm"), color="black", linewidth=1, label="teacher, held-out")
