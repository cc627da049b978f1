"""Compare a converted model with its original, layer by layer.

    python conversion/verify.py outputs/luna-base luna.base.tied.zip

MODEL is the folder of a masked language model, a sequence classifier, a multiple-choice model, an encoder or a
translation model, ORIGINAL the authors' checkpoint (archive, folder or .pt file). The authors' model, written out in
float64 from the stored tensors (fairseq_format/reference.py), computes rows of random ids one by one; MODEL computes
them as one padded batch, in float64, too. The rows have one token, fewer tokens than there are slots, as many, and
more. The embeddings of every id and every position are compared as well.

The table shows the largest absolute difference of every layer and stream, and its limit: 1e-9, or 1e-9 times the
largest number of the layer if that exceeds 1.

Exit status: 0 if both are equal, 1 if they are not, 2 if they cannot be compared.
"""

import argparse
import sys
from pathlib import Path

from fairseq_format.checkpoint import add_reading_options, open_checkpoint
from fairseq_format.verification import compare

from luna_hf.scripting import Parser, run_script


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
    parser.add_argument("original", metavar="ORIGINAL", type=Path, help="the authors' checkpoint")
    parser.add_argument("--head", metavar="NAME", help="classification head to compare with (default: MODEL's own)")
    add_reading_options(parser)
    return parser.parse_args(words)


def verify(options: argparse.Namespace) -> int:
    """Compare, print the table, and return the exit status.

    Raises:
        UserError: The two cannot be compared.
    """
    with open_checkpoint(options.original, options.checkpoint, options.layer_norm, options.override) as original:
        report = compare(options.model, original, options.head)
    print(f"{options.model} and {options.original.name}")
    print("\n".join(report.lines()))
    return int(not report.ok)


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: verify(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
