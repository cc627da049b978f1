"""How far the attention of a converted model is from its teacher's, layer by layer.

The student's layers read the states that go into the teacher's layers, and the error compares what both add to them. So
every layer has exact targets, independent of the other layers.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Lesson(NamedTuple):
    """For every layer of a teacher, its input states and what its attention adds to them, (b, n, d) each."""

    states: list[Tensor]
    added: list[Tensor]


@torch.no_grad()
def make_lesson(teacher: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Lesson:
    """Run a base model of luna_hf and record its attention."""
    lesson = Lesson([], [])

    def record(into: list[Tensor]) -> Any:
        return lambda _, args, kwargs: into.append(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as hooks:
        for layer in teacher.encoder.layer:
            # The input of this dropout is what the sub-layer adds: output projection and convolution.
            for module, into in ((layer, lesson.states), (layer.attention.output.dropout, lesson.added)):
                hooks.enter_context(module.register_forward_pre_hook(record(into), with_kwargs=True))
        # Hooks see the states of padded rows, not of a stream.
        teacher(input_ids=input_ids, attention_mask=attention_mask, unpad_inputs=False)
    return lesson


def squared_errors(student: PreTrainedModel, lesson: Lesson, keep: Tensor | None) -> Tensor:
    """How far the student's attention is from the lesson, layer by layer.

    What passes from layer to layer beside the tokens (Luna's packed sequence) is the student's own. Layers that keep
    full attention have nothing to learn: they are left out, and their sums are 0.

    Args:
        student: a base model of luna_hf.
        lesson: of the same tokens.
        keep: (b, n) boolean, True for tokens; `None` without padding.

    Returns:
        (layers, 2): the squared error and the lesson's squared norm, summed over tokens and width, at least float32.
    """
    slot_states, context = student.begin(lesson.states[0], keep)
    sums, full = [], student.config.full_attention_layers or ()
    pairs = zip(student.encoder.layer, lesson.states, lesson.added, strict=True)
    for number, (layer, states, expected) in enumerate(pairs):
        if number in full:
            sums.append(states.new_zeros(2, dtype=torch.promote_types(states.dtype, torch.float32)))
            continue
        added, slot_states = layer.attention(states, slot_states, context)
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
