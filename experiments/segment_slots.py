"""What of earlier segments helps a masked language model that was not trained for it: P, slots or the tokens.

    python experiments/segment_slots.py --data DATA

`checkpoints/luna-mini-en` reads novels in segments. Beside the segment at hand it is given nothing, the packed states
P of the segment before, the slots that its layers wrote in earlier segments (those of the same text, or of another
one), or the earlier tokens themselves. Writes the loss in later segments as JSON and a table. DATA has the folder
`novels`.
"""

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from running import RESULTS, publish, run_alone
from segment_loss import CONTEXT, IGNORED, START, held_out_rows, segment_losses
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel

from luna_hf.attention_luna import LunaAttention
from luna_hf.memory_attention import Memory
from luna_hf.memory_read import SlotMemory
from luna_hf.scripting import Parser, markdown_table, progress

SCRIPT = "experiments/segment_slots.py"
EARLIER = CONTEXT - 1
READINGS = {
    "alone": "each segment alone",
    "packed": "P of the segment before, `packed_self_attention`",
    "slots": f"slots of the {EARLIER} segments before",
    "others": f"slots of another text's {EARLIER} segments",
    "tokens": f"tokens of the {EARLIER} segments before",
}
PROTOCOL = (
    "The published `luna-mini-en`, without further training, on pieces of two novels that no training has seen; 30% of "
    "the tokens are masked, the same for every reading. Loss at these tokens from the second segment on. Slots of "
    "earlier segments are read beside a layer's own, in one softmax."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the folder `novels`")
    add("--lengths", type=int, nargs="+", default=[32, 64, 128], help="tokens of a segment (default: 32 64 128)")
    add("--tokens", type=int, default=1024, help="tokens of a piece (default: %(default)s)")
    add("--pieces", type=int, default=80, help="pieces at most (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON file and the table")
    return parser.parse_args(arguments)


def read_and_remember(layer: LunaAttention, past: deque[SlotMemory], *inputs: Any) -> Memory:
    """Write like `layer`, let the tokens also read the slots in `past`, and add the new ones to these."""
    memory = type(layer).write(layer, *inputs)
    parts = [*memory.parts, *past]
    past.extend(memory.parts)
    return memory._replace(parts=parts)


@contextmanager
def remembering(model: PreTrainedModel, segments: int) -> Iterator[list[deque[SlotMemory]]]:
    """Let each layer read the slots of the last forward passes, `segments` of them; yields what the layers hold."""
    layers = [module for module in model.modules() if isinstance(module, LunaAttention)]
    held: list[deque[SlotMemory]] = [deque(maxlen=segments) for _ in layers]
    for layer, past in zip(layers, held, strict=True):
        layer.write = partial(read_and_remember, layer, past)
    try:
        yield held
    finally:
        for layer in layers:
            del layer.write


def swap_texts(memory: SlotMemory) -> SlotMemory:
    """Give every row the slots of the row before it."""
    return memory._replace(key=memory.key.roll(1, 0), value=memory.value.roll(1, 0))


@torch.inference_mode()
def losses_with_slots(model: PreTrainedModel, ids: Tensor, labels: Tensor, length: int, others: bool) -> list[float]:
    """Mean loss at the masked tokens of each segment, given the slots of earlier ones or those of another text."""
    found = []
    with remembering(model, EARLIER) as held:
        for part, targets in zip(ids.split(length, 1), labels.split(length, 1), strict=True):
            logits = model(part).logits.flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
            found.append(loss.item())
            if others:  # those of this segment; older ones are another text's already
                for past in held:
                    past.append(swap_texts(past.pop()))
    return found


def measure(options: argparse.Namespace, length: int) -> dict[str, float]:
    """Mean loss from the second segment on, in every reading."""
    rows = held_out_rows(options, START, length)
    model = AutoModelForMaskedLM.from_pretrained(START).eval()
    fields = {"segment_length": length, "packed_self_attention": True}
    passing = AutoModelForMaskedLM.from_pretrained(START, **fields).eval()
    found = {
        "alone": segment_losses(model, *rows, "reset", length),
        "packed": segment_losses(passing, *rows, "carried", length),
        "slots": losses_with_slots(model, *rows, length, others=False),
        "others": losses_with_slots(model, *rows, length, others=True),
        "tokens": segment_losses(model, *rows, "context", length),
    }
    return {name: statistics.mean(losses[1:]) for name, losses in found.items()}


def run(options: argparse.Namespace) -> None:
    """Measure every length and write the result."""
    found = {}
    for length in options.lengths:
        options.segments = options.tokens // length
        found[str(length)] = measure(options, length)
        progress(f"{length}: " + ", ".join(f"{name} {loss:.3f}" for name, loss in found[str(length)].items()))
    publish(options.results, "segment-slots", "no", {**options.header, "protocol": PROTOCOL, "losses": found}, text, {})


def text(result: dict[str, Any]) -> str:
    """A row for each reading: the loss with segments of each length, and what it gains over segments alone."""
    rows = []
    for name, label in READINGS.items():
        cells = []
        for losses in result["losses"].values():
            gain = "" if name == "alone" else f" ({losses[name] - losses['alone']:+.3f})"
            cells.append(f"{losses[name]:.3f}{gain}")
        rows.append([label, *cells])
    return markdown_table(["given", *(f"segments of {length}" for length in result["losses"])], rows)


def main(arguments: Sequence[str]) -> int:
    """Run the study and return its exit status."""
    return run_alone(SCRIPT, parse, run, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
