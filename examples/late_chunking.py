"""Search the passages of a document: each embedded alone, in one pass over the document (late chunking), and both.

    python examples/late_chunking.py [MODEL] [--document FILE] [--question QUESTION]

MODEL is a sentence encoder converted by `python -m luna_hf convert` or `training/convert.py`, by default
`checkpoints/luna-minilm-en-4096`. A passage is a line of the document. It takes seconds.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from transformers import AutoModel

from luna_hf.late_chunking import embed_spans
from luna_hf.scripting import Parser, UserError, load_tokenizer, run_script

DOCUMENT = """\
Reykjavik is the capital and largest city of Iceland. It lies on the southern shore of Faxa Bay.
The city was founded in 1786 as an official trading town and grew steadily over the following decades.
About 140,000 people live there today, which makes it the heart of the country's economy and government.
Nearly all of its houses are heated with hot water from geothermal wells.
Lisbon is the capital and largest city of Portugal. It lies on the estuary of the Tagus.
An earthquake destroyed most of the city in 1755; it was rebuilt on a grid of wide streets.
About 550,000 people live there today, and nearly three million in the metropolitan area.
Its yellow trams climb hills that are too steep for larger vehicles."""
QUESTION = "How many people live in Lisbon?"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = "checkpoints/luna-minilm-en-4096"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=own, help="a folder, or a name on the Hub")
    parser.add_argument("--document", type=Path, help="a UTF-8 text with a passage in each line")
    parser.add_argument("--question", default=QUESTION, help="default: %(default)s")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Print the similarities of every passage. Returns the exit status."""
    return run_script(lambda: search(parse(sys.argv[1:] if words is None else words)))


def search(options: argparse.Namespace) -> None:
    """Embed the passages in the three ways.

    Raises:
        UserError: The model cannot be loaded, or the document is too long for it.
    """
    text = options.document.read_text(encoding="utf-8") if options.document else DOCUMENT
    lines = text.splitlines(keepends=True)
    starts = accumulate(map(len, lines[:-1]), initial=0)
    spans = [(start, start + len(line.rstrip())) for start, line in zip(starts, lines, strict=True) if line.strip()]
    tokenizer = load_tokenizer(options.model, required=True)
    try:
        model = AutoModel.from_pretrained(options.model).eval()
        in_context = embed_spans(model, tokenizer, text, spans)
        both = embed_spans(model, tokenizer, text, spans, alone=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{options.model} cannot embed this document: {error}") from error
    passages = [text[start:end] for start, end in spans]
    question, *alone = (embed_spans(model, tokenizer, one, [(0, len(one))])[0] for one in (options.question, *passages))
    print(options.question, "alone in context both", sep="\n")
    for passage, *vectors in zip(passages, alone, in_context, both, strict=True):
        print(" {:.2f}       {:.2f} {:.2f} ".format(*(question @ vector for vector in vectors)), passage)


if __name__ == "__main__":
    sys.exit(main())
