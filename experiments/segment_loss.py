"""What a memory across segments is worth to a masked language model: loss on novels by segment.

    python experiments/segment_loss.py train --data DATA
    python experiments/segment_loss.py report --data DATA

`train` continues `checkpoints/luna-mini-en` on novels: once on rows of several segments, whose packed states pass
on, and once on single segments, with as many tokens. Finished runs are skipped. `report` masks the same tokens of
held-out novels for both and writes the loss by segment as JSON, a table and a plot. DATA has the folder `novels`.

Options of `train` that are not listed here, `--key value`, override those of the training command.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from running import ROOT, describe, finished_runs, make_parser, pretrain, publish, run_study, shared_fields
from study_plots import panels, plain, save
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel

from luna_hf.scripting import UserError, markdown_table, progress

SCRIPT = "experiments/segment_loss.py"
RECIPE = ROOT / "training" / "recipes" / "pretrain_mlm" / "luna-mini-en.yaml"
START = ROOT / "checkpoints" / "luna-mini-en"
SEGMENT, SEGMENTS_TRAINED = 128, 8
IGNORED = -100  # label of tokens that are not masked
MEMORY = {
    "block_size": SEGMENT * SEGMENTS_TRAINED,
    "batch_size": 4,
    "model.segment_length": SEGMENT,
    "model.packed_self_attention": True,
}
SYSTEMS: dict[str, dict[str, Any]] = {"memory": MEMORY, "alone": {"block_size": SEGMENT, "batch_size": 32}}
SETTING = {
    "model_name_or_path": START,
    "tokenizer": START,
    "max_steps": 400,
    "global_batch_tokens": 4096,
    "learning_rate": 5e-4,
    "mixed_precision": "no",  # bf16 adds noise to a state that passes many segments
    "compile": False,
    "eval_steps": 100,
    "save_steps": 100,
    "eval_blocks": 100,
    "min_gain_nats": 0.5,
}
CONTEXT = 4  # segments that `luna-mini-en` was pretrained to read at once
# How a trained model, or without a name the one that training starts from, reads a document.
READINGS = {
    "carried": ("memory", "P passed on"),
    "reset": ("memory", "the same model, P forgotten at every border"),
    "alone": ("alone", "trained on single segments"),
    "start": (None, "before training, each segment alone"),
    "context": (None, f"before training, with the {CONTEXT - 1} segments before it in view"),
}
OWN = ("model", "model_name", "output_dir", "block_size", "batch_size")
PROTOCOL = (
    f"Both runs continue `luna-mini-en` with the same number of tokens of 50 novels, in rows of {SEGMENTS_TRAINED} "
    f"segments of {SEGMENT} tokens or of one. Pieces of two other novels are cut into as many segments as the longest "
    "table row has; 30% of the tokens are masked, the same for every reading. Loss at these tokens. What the segments "
    "in view are worth to the model before training is about what a memory could gain."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs/segment-loss")
    add = parser.add_argument
    add("--segments", type=int, default=16, help="segments of a held-out piece to read (default: %(default)s)")
    add("--pieces", type=int, default=160, help="held-out pieces at most (default: %(default)s)")
    options, options.overrides = parser.parse_known_args(arguments)
    return options


def train(options: argparse.Namespace) -> None:
    """Train both systems unless that is done."""
    novels = options.data / "novels"
    texts = {"data": novels / "train.parquet", "validation": novels / "validation.parquet"}
    for system, values in SYSTEMS.items():
        folder = options.runs / "train" / system
        if not (folder / "run.json").exists():
            progress(system)
            own = {"model_name": f"segments-{system}", "output_dir": folder}
            pretrain(options, RECIPE, {**texts, **SETTING, **own, **values})
            describe(options, folder, system=system)


def report(options: argparse.Namespace) -> None:
    """Measure the finished runs and write their losses.

    Raises:
        UserError: A run or the held-out text is missing.
    """
    found = finished_runs(options.runs, "train", f"{Path(SCRIPT).name} train")
    folders = {run["system"]: folder for folder, run in found}
    if missing := set(SYSTEMS) - set(folders):
        raise UserError(f"{', '.join(missing)} is not trained. Run `python {SCRIPT} train` first.")
    rows = held_out_rows(options, folders["memory"])
    readings = {}
    for name, (system, _) in READINGS.items():
        model = AutoModelForMaskedLM.from_pretrained(folders[system] if system else START).eval()
        readings[name] = segment_losses(model, *rows, name)
        progress(f"{name}: {statistics.mean(readings[name]):.3f} nats")
    result = {
        **shared_fields(SCRIPT, [run for _, run in found], OWN),
        "protocol": PROTOCOL,
        "pieces": rows[0].shape[0],
        "masked_tokens": int((rows[1] != IGNORED).sum()),
        "losses": readings,
    }
    publish(options.results, "segment-loss", result["recipe"]["mixed_precision"], result, text, {"": plot})


def held_out_rows(options: argparse.Namespace, checkpoint: Path, segment: int = SEGMENT) -> tuple[Tensor, Tensor]:
    """Ids and labels (pieces, tokens) of the held-out pieces of enough segments, with their tokens masked."""
    sys.path.append(str(ROOT / "training"))
    from data.masking import make_masking

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    masking = make_masking(tokenizer, 0.3, whole_words=False)
    length, rows = segment * options.segments, []
    texts = load_dataset("parquet", data_files=str(options.data / "novels" / "validation.parquet"), split="train")
    for number, text in enumerate(texts["text"]):
        ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: length - 1])
        if len(ids) == length - 1 and len(rows) < options.pieces:
            rows.append(masking(np.array([tokenizer.bos_token_id, *ids]), np.random.default_rng(number)))
    if not rows:
        raise UserError(f"No held-out piece has {options.segments} segments. Use fewer: --segments N.")
    ids, labels = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
    return ids, labels


@torch.inference_mode()
def segment_losses(
    model: PreTrainedModel, ids: Tensor, labels: Tensor, reading: str, segment: int = SEGMENT
) -> list[float]:
    """Mean loss at the masked tokens of each segment, of rows (pieces, tokens) in one of the ways of `READINGS`."""
    losses, states = [], None
    for number, targets in enumerate(labels.split(segment, 1)):
        start, end = number * segment, number * segment + targets.shape[1]
        if reading in ("carried", "reset"):
            given = {"packed_states": states} if reading == "carried" else {}
            output = model(ids[:, start:end], output_packed_states=True, **given)
            logits, states = output.logits, output.packed_states
        else:
            first = max(0, start - segment * (CONTEXT - 1)) if reading == "context" else start
            logits = between_ends(model, ids[:, first:end])[:, start - end :]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        losses.append(loss.item())
    return losses


def between_ends(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits (pieces, n, vocabulary) of ids read between <s> and </s>, as in pretraining; the longest fit exactly."""
    config = model.config
    ids = ids[:, max(0, ids.shape[1] + 2 - config.max_position_embeddings) :]
    ends = [torch.full_like(ids[:, :1], value) for value in (config.bos_token_id, config.eos_token_id)]
    return model(torch.cat([ends[0], ids, ends[1]], 1)).logits[:, 1:-1]


def text(result: dict[str, Any]) -> str:
    """A row for each reading: loss in the first segment, and the means over the later ones, doubling."""
    rows, ranges = [], []
    for name, losses in result["losses"].items():
        ranges = [(first, min(2 * first - 1, len(losses))) for first in (1, 2, 4, 8, 16, 32) if first <= len(losses)]
        means = [statistics.mean(losses[first - 1 : last]) for first, last in ranges]
        rows.append([READINGS[name][1], *(f"{mean:.3f}" for mean in means)])
    names = [f"segment {first}" if first == last else f"{first} to {last}" for first, last in ranges]
    return markdown_table(["reading", *names], rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Loss against the number of the segment."""
    figure, ((axis,),) = panels(1, 1, (7, 4.2), squeeze=False)
    for name, losses in result["losses"].items():
        axis.plot(range(1, len(losses) + 1), losses, label=READINGS[name][1])
    axis.set_xlabel("segment")
    axis.set_ylabel("loss at masked tokens (nats)")
    axis.legend(frameon=False)
    plain(axis)
    save(figure, path)


COMMANDS = {"train": train, "report": report}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
