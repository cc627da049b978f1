"""Compare a converted model with its original, layer by layer.

    python conversion/verify.py outputs/luna-base luna.base.tied.zip
    python conversion/verify.py outputs/luna-base expected.safetensors

MODEL is the folder of a masked language model, a sequence classifier, a multiple-choice model, an encoder or a
translation model, and runs in float64, whatever its stored type. ORIGINAL is one of:

- The authors' checkpoint (archive, folder or .pt file). The authors' model, written out in float64 from the stored
  tensors (fairseq_format/reference.py), computes rows of random ids one by one; MODEL computes them as one padded
  batch. The rows have one token, fewer tokens than there are slots, as many, and more. The embeddings of every id and
  every position are compared as well. A difference of 1e-9 is allowed.

- A .safetensors file with outputs of the authors' code: `<case>.input.tokens` (b, n) with padding id 1,
  `<case>.output.hidden.<i>.x` (b, n, d) and `.px` (b, l, d) after the embedding (0) and every layer, then `.logits`
  (b, n, vocabulary) or `.head.<name>` (b, classes). The masks `.x_padding_mask` (b, n) and `.px_padding_mask` (b, l)
  are true at padding, and may be absent without padding. Padding is not compared. These numbers are already rounded,
  so 1e-5 is allowed, and smaller errors are not found.

Both limits grow with the largest number of a layer where that exceeds 1. The table shows the largest absolute
difference of every layer and stream, and its limit.

Exit status: 0 if both are equal, 1 if they are not, 2 if they cannot be compared.
"""

import argparse
import sys
from pathlib import Path

from fairseq_format.checkpoint import add_reading_options, open_checkpoint
from fairseq_format.verification import compare, compare_outputs

from luna_hf.scripting import Parser, UserError, run_script


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: An unknown option, or a value that is not allowed.
    """
    parser = Parser(
        prog="python conversion/verify.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the converted model")
    parser.add_argument(
        "original", metavar="ORIGINAL", type=Path, help="the authors' checkpoint, or a .safetensors file of outputs"
    )
    parser.add_argument("--head", metavar="NAME", help="classification head to compare with (default: MODEL's own)")
    add_reading_options(parser)
    return parser.parse_args(words)


def verify(options: argparse.Namespace) -> int:
    """Compare, print the table, and return the exit status.

    Raises:
        UserError: The two cannot be compared.
    """
    if options.original.suffix == ".safetensors":
        for name in ("checkpoint", "layer_norm", "override"):
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')} does not apply to a file of outputs. Leave it out.")
        report = compare_outputs(options.model, options.original, options.head)
    else:
        with open_checkpoint(options.original, options) as original:
            report = compare(options.model, original, options.head)
    print(f"{options.model} and {options.original.name}")
    print("\n".join(report.lines()))
    return int(not report.ok)


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: verify(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
