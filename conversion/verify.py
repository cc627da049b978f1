"""Compare a converted model with its original, layer by layer.

    python conversion/verify.py outputs/luna-base luna.base.tied.zip
    python conversion/verify.py outputs/luna-base expected.safetensors

MODEL is the folder of a masked language model, a sequence classifier, a multiple-choice model or an encoder. ORIGINAL
is one of:

- The authors' checkpoint (archive, folder or .pt file). The authors' model, written out in float64 from the stored
  tensors (fairseq_format/reference.py), computes rows of random ids one by one; MODEL computes them as one padded
  batch. The rows have one token, fewer tokens than there are slots, as many, and more. The embeddings of every id and
  every position are compared as well.

- A .safetensors file with outputs of the authors' code: `<case>.input.tokens` (b, n) with padding id 1,
  `<case>.output.hidden.<i>.x` (b, n, d) and `.px` (b, l, d) after the embedding (0) and every layer, `.last.x`,
  `.last.px`, then `.logits` (b, n, vocabulary) or `.head.<name>` (b, classes). The masks `.x_padding_mask` (b, n) and
  `.px_padding_mask` (b, l) are true at padding, and may be absent without padding. Padding is not compared.

MODEL runs in float32, whatever its stored type. The table shows the largest absolute difference of every layer and
stream; 1e-5 is allowed. With large numbers or sharp attention, the rounding of float32 can exceed that:

- With a checkpoint, MODEL then runs in float64 too. Everything must agree to 1e-9 there (relative to numbers above 1).
  If it does, the float32 differences are rounding and the models are equal; if not, they are not equal.

- Outputs in a file are already rounded, so their limit is 1e-5 times the largest number of a layer where that exceeds
  1. Smaller errors are not found, and a correct model with sharp attention can exceed it; prefer a checkpoint.

Before that, config.json is compared with the tensors and arguments of the checkpoint, and with what never varies in
the authors' code, such as LayerNorm's epsilon. If fields contradict them, they are named and no numbers are compared.

Exit status: 0 if both are equal, 1 if they are not, 2 if they cannot be compared.
"""

import argparse
import sys
from pathlib import Path

from fairseq_format.arguments import add_reading_options, open_checkpoint
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
    parser.add_argument("--head", metavar="NAME", help="classification head of MODEL, if the weights do not show it")
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
        report, name = compare_outputs(options.model, options.original, options.head), options.original.name
    else:
        with open_checkpoint(options.original, options) as original:
            report, name = compare(options.model, original, options.head), original.name
    print(f"{options.model} and {name}")
    print("\n".join(report.lines()))
    return int(not report.ok)


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: verify(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
