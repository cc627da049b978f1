"""`generate(policy=...)`: a source that is known from the start, read as far as a policy has read it at each token."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from ..layers.cache import MemoryCache


class EndAfterSource(LogitsProcessor):
    """Forbids the end of a translation before its policy has read the whole source.

    Args:
        policy: a policy, see `luna_hf.simultaneous.Policy`.
        lengths: (b,) number of source tokens of each row.
        ends: ids that end a translation.
        prompt_mask: (b, n) padding mask of the first target tokens; `None` if nothing is padded.
    """

    def __init__(self, policy: Any, lengths: Tensor, ends: list[int], prompt_mask: Tensor | None) -> None:
        self.policy, self.lengths, self.ends = policy, lengths, ends
        self.padding = torch.zeros_like(lengths) if prompt_mask is None else (prompt_mask == 0).sum(1)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the end in the scores (b, vocabulary) after the target tokens (b, n)."""
        rows = len(scores) // len(self.lengths)  # of beams
        lengths, padding = (counts.repeat_interleave(rows) for counts in (self.lengths, self.padding))
        written = input_ids.shape[1] - 1 - padding
        reading = visible(self.policy, lengths, written[:, None])[:, 0] < lengths
        scores = scores.clone()
        scores[:, self.ends] = scores[:, self.ends].masked_fill(reading[:, None], -torch.inf)
        return scores


def needed(policy: Any, written: Tensor) -> Tensor:
    """Ask a policy what it needs, and check the answer.

    Args:
        policy: see `EndAfterSource`.
        written: see `luna_hf.simultaneous.Policy.needed`.

    Raises:
        TypeError: It is no policy, or does not return integers of the shape of `written`.
        ValueError: It needs fewer tokens for a later target token.
    """
    if not hasattr(policy, "needed"):
        raise TypeError(f"{policy!r} is no policy. Pass `WaitK(3)`, or another one of `luna_hf.simultaneous`.")
    asked = torch.stack([written, written + 1])
    found = policy.needed(asked)
    if not isinstance(found, Tensor) or found.is_floating_point() or found.shape != asked.shape:
        raise TypeError(
            f"`needed` of {type(policy).__name__} must return integers in a tensor of the shape of `written`: round "
            "them, or use `torch.full_like(written, ...)` for a constant."
        )
    if (found[1] < found[0]).any():
        raise ValueError(f"`needed` of {type(policy).__name__} may not fall from one target token to the next.")
    return found[0]


def visible(policy: Any, lengths: Tensor, written: Tensor) -> Tensor:
    """Return how many source tokens a policy has read before each target token, (b, n).

    Args:
        policy: see `EndAfterSource`.
        lengths: (b,) number of source tokens.
        written: (b or 1, n) number of target tokens before each.
    """
    return torch.minimum(needed(policy, written), lengths[:, None]).clamp(min=1)


def next_source(
    policy: Any, outputs: ModelOutput, mask: Tensor, target_mask: Tensor, cache: MemoryCache
) -> dict[str, Any]:
    """Return what a step reads: the source tokens that are not yet in the state, and how far each target token reads.

    Args:
        policy: see `EndAfterSource`.
        outputs: of the encoder, for the whole source (b, s).
        mask: (b, s) padding mask of the source.
        target_mask: (b, n) padding mask of the target tokens, those in the state included.
        cache: the state.
    """
    counts, written = mask.long().cumsum(1), cache.written
    read = 0 if written is None or written.tokens is None else written.tokens[:, None]
    ranks = (target_mask.long().cumsum(1) - 1).clamp(min=0)
    shown = visible(policy, counts[:, -1], ranks[:, cache.get_seq_length() :])
    new = (mask != 0) & (counts > read) & (counts <= shown[:, -1:])
    columns = new.any(0).nonzero().flatten()
    if not len(columns):
        return {"visible_source": shown, "encoder_outputs": None, "attention_mask": None}
    part = slice(int(columns[0]), int(columns[-1]) + 1)
    states = BaseModelOutput(outputs.last_hidden_state[:, part])
    return {"visible_source": shown, "encoder_outputs": states, "attention_mask": new[:, part]}
