"""Compare a converted model with its original.

    python conversion/verify.py outputs/luna-base luna.base.tied.zip

MODEL is the folder of a converted model, ORIGINAL the authors' checkpoint (archive, folder or .pt file). Every tensor
must be the original's bit for bit, rounded to MODEL's dtype, and so must the fields of the config that the original
decides.

Exit status: 0 if both are equal, 1 if they are not, 2 if they cannot be compared.
"""

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from fairseq_format.arguments import TABLE
from fairseq_format.checkpoint import add_reading_options, open_checkpoint
from fairseq_format.config import FIXED, head_of
from fairseq_luna import make_model
from shared import different_tensors, load

from luna_hf.scripting import Parser, run_script

FIELDS = [*FIXED, *(row.ours for row in TABLE), "num_projected_attention_heads"]


def parse(words: list[str] | None) -> Namespace:
    """The command line.

    Raises:
        UserError: An unknown option, or a value that is not allowed.
    """
    parser = Parser(
        prog="python conversion/verify.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the converted model")
    parser.add_argument("original", metavar="ORIGINAL", type=Path, help="the authors' checkpoint")
    parser.add_argument("--head", metavar="NAME", help="classification head to compare with (default: MODEL's own)")
    add_reading_options(parser)
    return parser.parse_args(words)


def verify(options: Namespace) -> int:
    """Compare, print what differs, and return the exit status.

    Raises:
        UserError: The two cannot be compared.
    """
    model = load(options.model)
    head = head_of(model, options.head)
    with open_checkpoint(options.original, options.checkpoint, options.layer_norm, options.override) as original:
        expected, _ = make_model(original, head, model.dtype)
    ours, theirs = model.config, expected.config
    lines = [
        f"`{name}` is {getattr(ours, name)!r}, but {getattr(theirs, name)!r} in the original"
        for name in dict.fromkeys(FIELDS)
        if getattr(ours, name) != getattr(theirs, name)
    ]
    lines += [f"`{name}` differs from the original" for name in different_tensors(model, expected)]
    print("\n".join(lines or [f"Equal to {original.name}: {len(model.state_dict())} tensors, bit for bit."]))
    return int(bool(lines))


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: verify(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
