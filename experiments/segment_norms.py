"""Whether packed states stay finite over a long stream: their norm over 10,000 segments, in float32 and bfloat16.

    python experiments/segment_norms.py --data DATA

`checkpoints/luna-mini-en` reads novels as one stream, each segment starting from the packed states of the one before
it. Writes the mean norm of P's rows as JSON and a table. DATA has the folder `novels`.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from running import RESULTS, ROOT, publish, run_alone
from transformers import AutoModel, AutoTokenizer

from luna_hf.scripting import Parser, UserError, markdown_table, progress

SCRIPT = "experiments/segment_norms.py"
START = ROOT / "checkpoints" / "luna-mini-en"
SYSTEMS = {"paper": "attention of the paper", "self": "`packed_self_attention`"}
DTYPES = ("float32", "bfloat16")
PROTOCOL = (
    "The published `luna-mini-en`, without further training, reads the training novels from the first segment on. "
    "Norm: Euclidean, the mean over the rows of P after the last layer. Highest: over all segments."
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the folder `novels`")
    add("--segment", type=int, default=32, help="tokens of a segment (default: %(default)s)")
    add("--segments", type=int, default=10_000, help="segments to read (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help="folder for the JSON file and the table")
    return parser.parse_args(arguments)


def stream_tokens(data: Path) -> Iterator[int]:
    """The tokens of the novels, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(START)
    for text in load_dataset("parquet", data_files=str(data / "novels" / "train.parquet"), split="train")["text"]:
        yield from tokenizer(text, add_special_tokens=False, verbose=False).input_ids


@torch.inference_mode()
def norms(system: str, dtype: str, segments: torch.Tensor) -> list[float]:
    """Mean norm of P's rows after each of the segments (count, tokens)."""
    fields = {"segment_length": segments.shape[1], "packed_self_attention": system == "self"}
    model = AutoModel.from_pretrained(START, dtype=getattr(torch, dtype), **fields).eval()
    packed, found = None, []
    for ids in segments.split(1):
        packed = model(ids, packed_states=packed, output_packed_states=True).packed_states
        found.append(packed.float().norm(dim=-1).mean().item())
    return found


def run(options: argparse.Namespace) -> None:
    """Measure both systems in both dtypes.

    Raises:
        UserError: The novels have too few tokens.
    """
    wanted = options.segments * options.segment
    ids = list(itertools.islice(stream_tokens(options.data), wanted))
    if len(ids) < wanted:
        raise UserError(f"The novels have {len(ids):,} tokens, fewer than {wanted:,}. Use fewer: --segments N.")
    segments, found = torch.tensor(ids).view(options.segments, options.segment), []
    for system, dtype in itertools.product(SYSTEMS, DTYPES):
        measured = norms(system, dtype, segments)
        highest = max(measured) if all(map(math.isfinite, measured)) else None
        found.append({"system": system, "dtype": dtype, "norms": thinned(measured), "highest": highest})
        progress(f"{system}, {dtype}: {measured[0]:.2f} after the first segment, {measured[-1]:.2f} after the last")
    result = {**options.header, "protocol": PROTOCOL, "segment": options.segment, "runs": found}
    publish(options.results, "segment-norms", "no", result, text, {})


def thinned(measured: Sequence[float]) -> dict[str, float | None]:
    """The norms after 1, 2, 3, ..., 10, 20, ..., 100, 200, ... segments and after the last; `None` if not finite."""
    tens = range(int(math.log10(len(measured))) + 1)
    numbers = {digit * 10**ten for ten in tens for digit in range(1, 10)} | {len(measured)}
    kept = {number: measured[number - 1] for number in sorted(numbers) if number <= len(measured)}
    return {str(number): norm if math.isfinite(norm) else None for number, norm in kept.items()}


def text(result: dict[str, Any]) -> str:
    """A row for each system and dtype: the norm after 1, 10, 100, ... segments, and the highest."""
    numbers = [number for number in result["runs"][0]["norms"] if number.strip("0") == "1"]
    rows = []
    for run in result["runs"]:
        values = [*(run["norms"][number] for number in numbers), run["highest"]]
        cells = ["not finite" if value is None else f"{value:.2f}" for value in values]
        rows.append([SYSTEMS[run["system"]], run["dtype"], *cells])
    return markdown_table(["model", "dtype", *(f"{int(number):,}" for number in numbers), "highest"], rows)


def main(arguments: Sequence[str]) -> int:
    """Run the study and return its exit status."""
    return run_alone(SCRIPT, parse, run, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
