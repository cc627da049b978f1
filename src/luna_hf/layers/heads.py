"""What the encoders' task heads are made of: the masked-LM head, pooling, the classification head, and the losses."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import ModelOutput

from ..configuration import BoundedMemoryConfig
from ..ops.attention import float32_products
from ..ops.tokens import first_kept, masked_mean


def classifier_dropout(config: BoundedMemoryConfig) -> nn.Dropout:
    """Create the dropout layer of a classification head."""
    p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if p is None else p)


class MaskedLMHead(nn.Module):
    """Masked-LM head as in RoBERTa: dense, activation, LayerNorm, and an output layer tied to the token embedding."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width = config.embedding_width()
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the bias of the output layer, a parameter that transformers does not initialise."""
        init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Compute logits: (..., d) to (..., vocab_size)."""
        with float32_products(states):
            return self.decoder(self.layer_norm(self.activation(self.dense(states))))


class TokenPooling(nn.Module):
    """Pool the token states to one vector per row, by `"cls"` or `"mean"`."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.pool = {"cls": first_kept, "mean": masked_mean}[config.classifier_pooling]

    def forward(self, outputs: ModelOutput, keep: Tensor | None) -> Tensor:
        """Pool the base model's outputs, given the padding mask (b, n), to (b, d)."""
        return self.pool(outputs.last_hidden_state, keep)


class ClassificationHead(nn.Module):
    """Head over a pooled state: dropout, dense, activation, dropout, output layer."""

    def __init__(self, config: BoundedMemoryConfig, num_labels: int) -> None:
        super().__init__()
        inner = config.classifier_hidden_size or config.hidden_size
        self.dropout = classifier_dropout(config)
        self.dense = nn.Linear(config.hidden_size, inner)
        self.activation = ACT2FN[config.classifier_activation]
        self.out_proj = nn.Linear(inner, num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute logits: (b, d) to (b, num_labels)."""
        states = self.activation(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(states))


def first_marked(keep: Tensor) -> Tensor:
    """Mark the first real token of every row: padding mask (b, n) to (b, n)."""
    return keep & (keep.long().cumsum(-1) == 1)


def question_marked(keep: Tensor, ends: Tensor, most: int) -> Tensor:
    """Mark the tokens before the first separator, the question's.

    Where they are more than `most`, or no second text follows, the first token is marked.

    Args:
        keep: (b, n) padding mask.
        ends: (b, n), True for separators, or for all tokens after the first text.
        most: number of tokens to mark in a row, at most.
    """
    ended = (ends & keep).long().cumsum(-1) > 0
    # A single separator at the end leaves no second text.
    last = keep.long().cumsum(-1) == keep.sum(-1, keepdim=True)
    is_pair, question = (ended & keep & ~last).any(-1, keepdim=True), keep & ~ended
    return torch.where(is_pair & (question.sum(-1, keepdim=True) <= most), question, first_marked(keep))


def cross_entropy(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Cross-entropy in float32 or wider: the mean over the labels, or the sum divided by `num_items_in_batch` if given.

    Args:
        logits: (..., classes).
        labels: (...) integers; -100 is ignored.

    Raises:
        ValueError: Labels are no integers, have another shape, or (on a CPU) are no classes.
    """
    if labels.is_floating_point():
        raise ValueError(f"`labels` are {labels.dtype}, but classes are integers: convert them with `labels.long()`.")
    rows = logits.shape[:-1]
    if labels.numel() != rows.numel() or (len(rows) > 1 and labels.shape != rows):
        advice = " For several classes at once, pass floats." if labels.shape == logits.shape else ""
        raise ValueError(f"`labels` have shape {tuple(labels.shape)}, but must have {tuple(rows)}.{advice}")
    reduction, classes = "mean" if num_items_in_batch is None else "sum", logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    try:
        loss = F.cross_entropy(logits, labels.flatten().to(logits.device, torch.long), reduction=reduction)
    except IndexError:
        found = f"from {labels[labels != -100].min()} to {labels.max()}"
        raise ValueError(
            f"`labels` run {found}, but the model has the classes 0 to {classes - 1} (`num_labels`, or `vocab_size`); "
            "only -100 is ignored."
        ) from None
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def classification_loss(
    logits: Tensor, labels: Tensor, config: BoundedMemoryConfig, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Loss for `config.problem_type`: regression (MSE), single-label (cross-entropy) or multi-label (BCE).

    Without a `problem_type`, one output means regression, integer labels single-label, and float labels multi-label
    classification; the config is not changed.

    Args:
        logits: (b, num_labels).
        labels: (b,), or (b, num_labels) for multi-label classification and regression with several targets.

    Raises:
        ValueError: The shapes of labels and logits do not match, or there is no such `problem_type`.
    """
    problem = config.problem_type
    if problem is None:
        if config.num_labels == 1:
            problem = "regression"
        else:
            problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if problem == "single_label_classification":
        return cross_entropy(logits, labels, num_items_in_batch)
    losses = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}
    if problem not in losses:
        known = ", ".join(("single_label_classification", *losses))
        raise ValueError(f"`problem_type` is {problem!r}, but must be one of {known}.")
    if labels.numel() != logits.numel():
        raise ValueError(
            f"`labels` have shape {tuple(labels.shape)}, but {problem} with {config.num_labels} outputs needs "
            f"{tuple(logits.shape)}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits).view_as(logits)
    if num_items_in_batch is None:
        return losses[problem](logits, labels)
    return losses[problem](logits, labels, reduction="sum") / num_items_in_batch
