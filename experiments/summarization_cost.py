"""Time and memory of the systems of `summarization.py` with random weights, each cell in its own process."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from running import DEVICE

# isort: split
import measuring
import torch
import train_translation
from transformers import AutoModelForSeq2SeqLM
from translation.run import SmoothedLoss, Translation

from luna_hf.scripting import markdown_table

SUMMARY_TOKENS, GENERATED, ROUNDS = 150, 100, 3
PROTOCOL = (
    f"One document, random weights: an update with a summary of {SUMMARY_TOKENS} tokens, and greedy generation of "
    f"{GENERATED} tokens, reading included. CPU time on a CPU, medians of {ROUNDS} rounds. Memory is the peak of an "
    "update beyond the model with its optimizer. Each system and length has its own process."
)


def measure_cell(words: list[str], length: int, threads: int) -> dict[str, float]:
    """Seconds and peak bytes of an update, and seconds of generating; run it in a separate process.

    Args:
        words: of the training command.
        length: of the source, in tokens.
        threads: of the CPU.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    recipe = train_translation.read_recipe(words[0], words[1:])
    planned = Translation(recipe)
    planned.check()
    model = AutoModelForSeq2SeqLM.from_config(planned.make_config()).to(DEVICE)
    module = SmoothedLoss(model, recipe.label_smoothing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=DEVICE == "cpu")

    def ids(number: int) -> torch.Tensor:
        return torch.randint(model.config.vocab_size // 2, model.config.vocab_size, (1, number), device=DEVICE)

    def update(number: int) -> None:
        source, target = ids(number), ids(SUMMARY_TOKENS)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
            given = {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": target}
            loss = module(target, **given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    measuring.steady_allocator()
    update(2)  # makes the state of the optimizer
    peak = measuring.extra_memory(partial(update, length), DEVICE)
    measuring.keeping_allocator()
    trained = _seconds(partial(update, length))
    model.eval()
    limits = {"min_new_tokens": GENERATED, "max_new_tokens": GENERATED, "do_sample": False, "num_beams": 1}
    generated = _seconds(lambda: model.generate(ids(length), **limits))
    return {"peak_bytes": peak, "update_seconds": trained, "generate_seconds": generated}


def _seconds(action: Callable[[], Any]) -> float:
    clock = time.process_time if DEVICE == "cpu" else time.perf_counter
    return statistics.median(measuring.seconds(action, DEVICE, clock) for _ in range(ROUNDS))


def cost_text(rows: list[dict[str, Any]], names: dict[str, str]) -> str:
    """A row for each system: seconds of an update, its memory, and seconds of generating."""
    lines = {row["system"]: [names[row["system"]]] for row in rows}
    for row in rows:
        figures = f"{row['update_seconds']:.2f} / {row['peak_bytes'] / 2**20:,.0f} / {row['generate_seconds']:.2f}"
        lines[row["system"]].append(figures)
    header = ["", *(f"{length:,} tokens" for length in dict.fromkeys(row["length"] for row in rows))]
    title = f"Seconds of an update / MiB / seconds of generating {GENERATED} tokens"
    return f"{title}:\n\n{markdown_table(header, lines.values())}"
