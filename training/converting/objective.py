"""The loss of a conversion: what the student computes, compared with its teacher on the same text.

`attention`: what each layer's attention adds to the teacher's own states, relative squared error.
`hidden`: the states after each layer, relative squared error.
`pooled`: the embedding of a text, squared distance of the normalised vectors.
`spans`: the embedding of each window of a text that is too long for the teacher, within the student's one pass.
`mlm`, `kl`: masked words, and the divergence from the teacher's distribution of them.

The teacher reads texts up to `teacher_longest` tokens as they are. For longer ones its embedding is the mean of the
embeddings of successive windows, of every size in `teacher_windows`, and it has no states to compare with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from converting.attention import make_lesson, mean_error, squared_errors
from converting.texts import Frame
from luna_hf.convert.report import pool_states


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


def pool(states: Tensor, keep: Tensor, pooling: str) -> Tensor:
    """The normalised embeddings (b, d) of rows of states (b, n, d), at least float32.

    Args:
        keep: (b, n), nonzero for tokens.
        pooling: see `pool_states`.
    """
    return F.normalize(pool_states(precise(states), keep.long(), pooling), dim=-1)


class Windows(NamedTuple):
    """The windows of full rows.

    Attributes:
        ids: (b * k, w), with the row's ends around each window; the last window of a row may be shorter.
        keep: (b * k, w).
        spans: first and last token (excluded) of each of the k windows within the row.
    """

    ids: Tensor
    keep: Tensor
    spans: list[tuple[int, int]]


def split_windows(ids: Tensor, size: int, frame: Frame) -> Windows:
    """Full rows (b, n) cut into successive windows of at most `size` tokens, ends included."""
    length, room = ids.shape[1], size - 2
    spans = [(start, min(start + room, length - 1)) for start in range(1, length - 1, room)]
    parts = [F.pad(ids[:, start:end], (0, room - (end - start)), value=frame.pad) for start, end in spans]
    tokens = torch.stack(parts, 1).flatten(0, 1)
    sizes = torch.tensor([end - start for start, end in spans], device=ids.device).repeat(len(ids))
    rows = F.pad(F.pad(tokens, (1, 0), value=frame.first), (0, 1), value=frame.pad)
    rows.scatter_(1, sizes.unsqueeze(1) + 1, frame.last)
    keep = torch.arange(size, device=ids.device) < sizes.unsqueeze(1) + 2
    return Windows(rows, keep, spans)


@dataclass(frozen=True)
class Pair:
    """A student and its teacher, the unmodified source in our own layers.

    Attributes:
        pooling: see `pool`.
        reach: the longest text that the teacher reads as it is, in tokens.
        windows: sizes of the teacher's windows of longer texts, in tokens.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel
    pooling: str
    reach: int
    windows: tuple[int, ...]
    frame: Frame

    @torch.no_grad()
    def embed_windows(self, ids: Tensor, size: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """The teacher's embeddings (b, k, d) of the windows of full rows (b, n), and the windows' spans."""
        windows = split_windows(ids, size, self.frame)
        found = []
        for rows, keep in zip(windows.ids.split(32), windows.keep.split(32), strict=True):
            states = self.teacher.base_model(rows, attention_mask=keep.long()).last_hidden_state
            found.append(pool(states, keep, self.pooling))
        return torch.cat(found).unflatten(0, (len(ids), -1)), windows.spans

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """The teacher's embeddings (b, d) of full rows (b, n): of the rows, or means of their windows of all sizes."""
        if ids.shape[1] > self.reach:
            means = [F.normalize(self.embed_windows(ids, size)[0].mean(1), dim=-1) for size in self.windows]
            return F.normalize(torch.stack(means).sum(0), dim=-1)
        keep = torch.ones_like(ids)
        return pool(self.teacher.base_model(ids, attention_mask=keep).last_hidden_state, keep, self.pooling)

    def losses(self, batch: dict[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
        """The parts of the loss on a batch that are `wanted` and defined for its rows, by objective."""
        if "attention" in wanted:
            return {"attention": self.attention_error(batch["input_ids"], batch["attention_mask"])}
        if batch["input_ids"].shape[1] > self.reach:
            return self.long_losses(batch, wanted)
        return self.short_losses(batch, wanted)

    def attention_error(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The relative squared error of the attention, mean over the layers; every layer reads the teacher's states."""
        lesson = make_lesson(self.teacher.base_model, ids, mask)
        student = self.student.base_model
        return mean_error(squared_errors(student, lesson, student.tokens_to_keep(ids, mask)))

    def short_losses(self, batch: dict[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
        """The parts for rows that the teacher reads as they are."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        keep = batch["attention_mask"] != 0
        with torch.no_grad():
            goal = self.teacher.base_model(**inputs, output_hidden_states=True)
        found = self.student.base_model(**student_inputs(batch), output_hidden_states="hidden" in wanted)
        states, own, parts = found.last_hidden_state, goal.last_hidden_state, {}
        if "hidden" in wanted:
            parts["hidden"] = hidden_errors(found.hidden_states[1:], goal.hidden_states[1:], keep).mean()
        if "pooled" in wanted:
            parts["pooled"] = distance(pool(states, keep, self.pooling), pool(own, keep, self.pooling)).mean()
        return parts | self.word_losses(states, own, batch, wanted)

    def long_losses(self, batch: dict[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
        """The parts for rows beyond the teacher's reach; rows of different lengths are compared one by one.

        The teacher reads each row with windows of one size, which the row's tokens choose: the mean over many rows is
        that over all sizes, in a fraction of the time. It reads a row within its reach, which a short document gives,
        as it is.
        """
        states = self.student.base_model(**student_inputs(batch)).last_hidden_state
        pooled, spans = [], []
        for row, ids, mask in zip(states, batch["input_ids"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            own = pool(row[None, :length], mask[None, :length], self.pooling)
            if length <= self.reach:
                pooled.append(distance(own, self.embed(ids[None, :length])))
                continue
            size = self.windows[int(ids[:length].sum()) % len(self.windows)]
            goals, borders = self.embed_windows(ids[None, :length], size)
            mean = F.normalize(goals.mean(1), dim=-1)
            pooled.append(distance(own, mean))
            parts = torch.stack([precise(row[start:end]).mean(0) for start, end in borders])
            spans.append(distance(F.normalize(parts, dim=-1), goals[0]).mean())
        parts = {"pooled": torch.cat(pooled).mean()}
        if spans:
            parts["spans"] = torch.stack(spans).mean()
        return {name: part for name, part in parts.items() if name in wanted} | self.word_losses(
            states, None, batch, wanted
        )

    def word_losses(
        self, states: Tensor, own: Tensor | None, batch: dict[str, Tensor], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """The parts about masked words, from the student's states and the teacher's, if it has any."""
        if not {"mlm", "kl"} & set(wanted):
            return {}
        labelled, parts = batch["labels"] != -100, {}
        logits = self.student.lm_head(states[labelled])
        if "mlm" in wanted:
            parts["mlm"] = F.cross_entropy(precise(logits), batch["labels"][labelled])
        if "kl" in wanted and own is not None:
            with torch.no_grad():
                expected = self.teacher.lm_head(own[labelled])
            parts["kl"] = divergence(logits, expected)
        return parts

    @torch.no_grad()
    def measure(self, ids: Tensor, goal: Tensor, **reads: Any) -> dict[str, Any]:
        """Figures of full rows (b, n): mean `cosine` to the teacher's embeddings `goal` (b, d), and `hidden` errors.

        `hidden` has the relative squared error of every layer, for rows that the teacher reads as they are. `reads` are
        further inputs of the student.
        """
        keep = torch.ones_like(ids)
        hidden = ids.shape[1] <= self.reach and not reads
        inputs = {"attention_mask": keep, "output_hidden_states": hidden}
        out = self.student.base_model(ids, **inputs, **reads)
        found: dict[str, Any] = {
            "cosine": (pool(out.last_hidden_state, keep, self.pooling) * goal).sum(-1).mean().item()
        }
        if hidden:
            states = self.teacher.base_model(ids, **inputs).hidden_states
            found["hidden"] = hidden_errors(out.hidden_states[1:], states[1:], keep.bool()).tolist()
        return found


def student_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the student reads of a batch: the teacher keeps its own positions."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def distance(own: Tensor, goal: Tensor) -> Tensor:
    """Squared distances (b,) of vectors (b, d)."""
    return (own - goal).square().sum(-1)
