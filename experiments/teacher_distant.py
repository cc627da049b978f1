"""What a window cannot do: two questions far apart, finetuned on short distances and tested on long ones.

A row is a question, encyclopaedia, and another question; the head reads the states of the second question alone, and
tells whether both ask the same (QQP). Training rows have 200 to 400 tokens between the questions, test rows also more
than any training row. `marked` marks the first question's tokens.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.scripting import progress

NEAR, DISTANCES = (200, 400), (256, 1024, 3000)
# Test pairs of each distance.
TESTED = {256: 400, 1024: 300, 3000: 100}
UPDATES, BATCH, WARMUP = 300, 8, 30
BODY_RATE, HEAD_RATE = 1e-4, 1e-3


class Pair(NamedTuple):
    """Token ids of two questions, and whether they ask the same."""

    first: list[int]
    second: list[int]
    label: int


class Batch(NamedTuple):
    """Rows (b, n), the first question's tokens, the second's, and the labels (b,)."""

    ids: Tensor
    mask: Tensor
    first: Tensor
    second: Tensor
    labels: Tensor


class Distant:
    """The rows of the task."""

    def __init__(self, data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read pairs and filler."""
        self.ends, self.pad = (tokenizer.cls_token_id, tokenizer.sep_token_id), tokenizer.pad_token_id
        plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}

        def pairs(split: str) -> list[Pair]:
            rows = parquet.read_table(data / f"glue/qqp/{split}.parquet").to_pylist()
            found = [
                tokenizer([row[name] for row in rows], **plain)["input_ids"] for name in ("question1", "question2")
            ]
            return [Pair(*each, row["label"]) for *each, row in zip(*found, rows, strict=True)]

        self.train, self.test = pairs("train"), pairs("validation")
        texts = parquet.read_table(data / "enwiki/validation.parquet").column("text").to_pylist()
        self.filler = np.array([token for ids in tokenizer(texts, **plain)["input_ids"] for token in ids])

    def batch(self, pairs: Sequence[Pair], distances: Sequence[int], generator: np.random.Generator) -> Batch:
        """Rows of pairs, each with its number of filler tokens."""
        rows, firsts, seconds = [], [], []
        for pair, distance in zip(pairs, distances, strict=True):
            start = generator.integers(len(self.filler) - distance)
            before = [self.ends[0], *pair.first, self.ends[1], *self.filler[start : start + distance].tolist()]
            rows.append([*before, *pair.second, self.ends[1]])
            firsts.append(range(1, 1 + len(pair.first)))
            seconds.append(range(len(before), len(before) + len(pair.second)))
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=self.pad)
        mask, first, second = (torch.zeros_like(ids) for _ in range(3))
        for place, row in enumerate(rows):
            mask[place, : len(row)] = 1
            first[place, list(firsts[place])] = 1
            second[place, list(seconds[place])] = 1
        return Batch(ids, mask, first, second, torch.tensor([pair.label for pair in pairs]))

    def updates(self, seed: int) -> Iterator[Batch]:
        """Training batches."""
        generator = np.random.default_rng((seed, 0))
        while True:
            chosen = generator.choice(len(self.train), BATCH, replace=False)
            distances = generator.integers(*NEAR, size=BATCH)
            yield self.batch([self.train[place] for place in chosen], distances.tolist(), generator)

    def tests(self, distance: int) -> Iterator[Batch]:
        """Test batches of a distance, the same for every model."""
        generator, size = np.random.default_rng((1, distance)), max(1, 4096 // distance)
        for place in range(0, TESTED[distance], size):
            chosen = self.test[place : min(place + size, TESTED[distance])]
            yield self.batch(chosen, [distance] * len(chosen), generator)


class Matcher(nn.Module):
    """An encoder and a head on the mean state of the second question."""

    def __init__(self, encoder: PreTrainedModel, marked: bool) -> None:
        super().__init__()
        self.encoder, self.marked = encoder.eval(), marked  # no dropout: few updates
        self.encoder.embeddings.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(encoder.config.hidden_size, 128), nn.GELU(), nn.Linear(128, 2))

    def forward(self, batch: Batch) -> Tensor:
        """Logits (b, 2)."""
        own = {"global_attention_mask": batch.first} if self.marked else {}
        states = self.encoder(batch.ids, attention_mask=batch.mask, **own).last_hidden_state
        second = batch.second.unsqueeze(-1)
        return self.head((states * second).sum(1) / second.sum(1))


def finetune(encoder: PreTrainedModel, marked: bool, task: Distant, longest: int, seed: int = 0) -> dict[str, Any]:
    """Finetune, and return the accuracy x 100 by distance, as far as rows of `longest` tokens reach."""
    torch.manual_seed(seed)
    model, started = Matcher(encoder, marked), time.perf_counter()
    body = [p for p in model.encoder.parameters() if p.requires_grad]
    groups = [{"params": body, "lr": BODY_RATE}, {"params": model.head.parameters(), "lr": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (UPDATES - step) / (UPDATES - WARMUP))
    )
    losses = []
    for step, batch in zip(range(1, UPDATES + 1), task.updates(seed), strict=False):
        loss = F.cross_entropy(model(batch), batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0:
            progress(f"update {step}: loss {sum(losses[-25:]) / 25:.3f}, {time.perf_counter() - started:.0f} s")
    found = {str(distance): accuracy(model, task, distance) for distance in DISTANCES if distance + 100 <= longest}
    return {
        "accuracy": found,
        "loss": round(sum(losses[-50:]) / 50, 4),
        "seconds": round(time.perf_counter() - started),
    }


@torch.no_grad()
def accuracy(model: Matcher, task: Distant, distance: int) -> float:
    """Right answers x 100 at a distance."""
    hits = [(model(batch).argmax(-1) == batch.labels).float() for batch in task.tests(distance)]
    return round(100 * torch.cat(hits).mean().item(), 2)


def majority(task: Distant, distance: int) -> float:
    """The share x 100 of the most frequent label among the test pairs of a distance."""
    labels = [pair.label for pair in task.test[: TESTED[distance]]]
    return round(100 * max(labels.count(label) for label in (0, 1)) / len(labels), 2)
