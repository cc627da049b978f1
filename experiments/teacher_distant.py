"""What a window cannot do: facts and a question far apart, finetuned on short distances and tested on long ones.

A row is who lives where, encyclopaedia, and the question where one of them lives; the head reads the states of the
question alone. One fact is a needle, four are associative recall. Training rows have up to 300 tokens between the facts
and the question, half of them at most 40, which a window reads; test rows also have more than any of them. `marked`
marks the question.
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

# fmt: off
NAMES = [
    "Anna", "Peter", "Mary", "David", "Sarah", "Paul", "Lisa", "Mark", "Emma", "Henry", "Julia", "Frank", "Alice",
    "George", "Laura", "Simon",
]
CITIES = [
    "Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Moscow", "Tokyo", "Boston", "Chicago", "Dublin", "Cairo",
    "Delhi", "Oslo", "Sydney", "Toronto",
]
# fmt: on
TASKS = {"needle": 1, "recall": 4}  # facts of a test row
# Tokens between facts and question: of half of the training batches, of the others, and of test rows.
NEAR, FAR, DISTANCES = (0, 40), (40, 300), (20, 256, 1024, 3000)
# Test rows of each distance and task.
TESTED = {20: 200, 256: 200, 1024: 150, 3000: 60}
UPDATES, BATCH, WARMUP = 300, 8, 30
BODY_RATE, HEAD_RATE = 1e-4, 1e-3


class Batch(NamedTuple):
    """Rows (b, n), the tokens of the facts, those of the question, and the answers (b,)."""

    ids: Tensor
    mask: Tensor
    facts: Tensor
    question: Tensor
    labels: Tensor


class Distant:
    """The rows of the task."""

    def __init__(self, data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tokenize the filler."""
        self.ends, self.pad = (tokenizer.cls_token_id, tokenizer.sep_token_id), tokenizer.pad_token_id
        self.tokenizer = tokenizer
        texts = parquet.read_table(data / "enwiki/validation.parquet").column("text").to_pylist()
        self.filler = np.array([token for text in self.ids(texts) for token in text])

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, without ends."""
        plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        return self.tokenizer(list(texts), **plain)["input_ids"]

    def batch(self, counts: Sequence[int], distances: Sequence[int], generator: np.random.Generator) -> Batch:
        """Rows, each with its number of facts and of filler tokens."""
        rows, spans, labels = [], [], []
        for count, distance in zip(counts, distances, strict=True):
            names, cities = (generator.choice(len(words), count, replace=False) for words in (NAMES, CITIES))
            stated = " ".join(
                f"{NAMES[name]} lives in {CITIES[city]}." for name, city in zip(names, cities, strict=True)
            )
            facts, question = self.ids([stated, f"Where does {NAMES[names[0]]} live?"])
            start = generator.integers(len(self.filler) - distance)
            before = [self.ends[0], *facts, self.ends[1], *self.filler[start : start + distance].tolist()]
            rows.append([*before, *question, self.ends[1]])
            spans.append((slice(1, 1 + len(facts)), slice(len(before), len(before) + len(question))))
            labels.append(int(cities[0]))
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=self.pad)
        mask, facts, question = (torch.zeros_like(ids) for _ in range(3))
        for place, (row, (stated, asked)) in enumerate(zip(rows, spans, strict=True)):
            mask[place, : len(row)], facts[place, stated], question[place, asked] = 1, 1, 1
        return Batch(ids, mask, facts, question, torch.tensor(labels))

    def updates(self, seed: int) -> Iterator[Batch]:
        """Training batches."""
        generator = np.random.default_rng((seed, 0))
        while True:
            distances = NEAR if generator.random() < 0.5 else FAR
            counts = generator.integers(1, 1 + max(TASKS.values()), size=BATCH)
            yield self.batch(counts.tolist(), [int(generator.integers(*distances))] * BATCH, generator)

    def tests(self, count: int, distance: int) -> Iterator[Batch]:
        """Test batches of a number of facts and a distance, the same for every model."""
        generator, size = np.random.default_rng((1, count, distance)), max(1, 4096 // distance)
        for place in range(0, TESTED[distance], size):
            rows = min(size, TESTED[distance] - place)
            yield self.batch([count] * rows, [distance] * rows, generator)


class Reader(nn.Module):
    """An encoder and a head on the mean state of the question."""

    def __init__(self, encoder: PreTrainedModel, marked: bool) -> None:
        super().__init__()
        self.encoder, self.marked = encoder.eval(), marked  # no dropout: few updates
        self.encoder.embeddings.requires_grad_(False)
        self.head = nn.Linear(encoder.config.hidden_size, len(CITIES))

    def forward(self, batch: Batch) -> Tensor:
        """Logits (b, cities)."""
        own = {"global_attention_mask": batch.question} if self.marked else {}
        states = self.encoder(batch.ids, attention_mask=batch.mask, **own).last_hidden_state
        question = batch.question.unsqueeze(-1)
        return self.head((states * question).sum(1) / question.sum(1))


def finetune(encoder: PreTrainedModel, marked: bool, task: Distant, longest: int, seed: int = 0) -> dict[str, Any]:
    """Finetune, and return the accuracy x 100 by task and distance, as far as rows of `longest` tokens reach."""
    torch.manual_seed(seed)
    model, started = Reader(encoder, marked), time.perf_counter()
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
    seconds = round(time.perf_counter() - started)
    reached = [distance for distance in DISTANCES if distance + 100 <= longest]
    found = {
        name: {str(distance): accuracy(model, task, count, distance) for distance in reached}
        for name, count in TASKS.items()
    }
    return {"accuracy": found, "loss": round(sum(losses[-50:]) / 50, 4), "seconds": seconds}


@torch.no_grad()
def accuracy(model: Reader, task: Distant, count: int, distance: int) -> float:
    """Right answers x 100 of rows of a number of facts at a distance."""
    hits = [(model(batch).argmax(-1) == batch.labels).float() for batch in task.tests(count, distance)]
    return round(100 * torch.cat(hits).mean().item(), 2)
