"""What the slots of an untrained conversion hold, by the sharpness of the attention that writes them.

Slots are written with the source's own attention, its logits times a factor. At 1, they are what this attention reads,
which may be the ends of the text ([CLS] and [SEP]). At 0, all are the mean of the text.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from teacher_scores import Encoder, Tasks
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.families.warm_start_rules import BLUR

FACTORS = (1.0, 0.5, 0.25, BLUR, 0.0)
LENGTHS, TEXTS = (512, 1024), 8
# What training aims at, see `teacher_windows` of teacher.yaml.
GOAL = (64, 128, 256)


def sharpened(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """A copy of an untrained conversion whose slots are written with `factor` times the logits of its source."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".pack.query." in name or name.endswith("control.weight"):
                parameter.mul_(factor / BLUR)
    return model


@contextmanager
def watch_ends(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """While it lasts, collects the share of slots' weights that the first and the last token get, by layer."""
    shares: list[Tensor] = []

    def pack(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        slots, states = inputs[:2]
        parts = module.query(slots), module.key(states)
        query, key = (part.unflatten(-1, (module.num_heads, -1)) for part in parts)
        keep(torch.einsum("blhc,bnhc->bhln", query, key).mul(query.shape[-1] ** -0.5).softmax(-1))

    def control(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        keep(F.linear(inputs[0], module.control.weight).softmax(1).mT)

    def keep(weights: Tensor) -> None:
        shares.append((weights[..., 0] + weights[..., -1]).mean())

    attention = [layer.attention.self for layer in model.encoder.layer]
    hooks = [
        own.pack.register_forward_pre_hook(pack) if hasattr(own, "pack") else own.register_forward_pre_hook(control)
        for own in attention
    ]
    try:
        yield shares
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def measure(
    model: PreTrainedModel, source: Encoder, tasks: Tasks, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """By factor: mean cosine to the source's windows by length, and the share of the slots that the ends take."""
    texts = {length: [text[: length - 2] for text in tasks.halves[0][:TEXTS]] for length in LENGTHS}
    goals = {length: source.windows(*GOAL)(own) for length, own in texts.items()}
    rows = []
    for factor in FACTORS:
        own = sharpened(model, factor)
        encoder = Encoder(own, tokenizer)
        with watch_ends(own) as shares:
            vectors = {length: encoder.whole(each) for length, each in texts.items()}
        cosines = {str(length): (vectors[length] * goal).sum(-1).mean().item() for length, goal in goals.items()}
        rows.append({"factor": factor, "ends": torch.stack(shares).mean().item(), "cosine": cosines})
    return rows
