"""Replace the attention of a trained RoBERTa, and check what that changed.

    python examples/swap_roberta.py [ROBERTA]

ROBERTA is a folder or a name on the Hub, by default DistilRoBERTa, a download of 330 MB. Four models are made from it:
ABC with full attention, which computes the same; ABC with a window, ABC with slots, and Luna. They keep its weights,
but have to be trained before use (docs/warm-start.md). Without the download, it takes seconds.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.scripting import Parser, UserError, load_tokenizer, markdown_table, run_script
from luna_hf.warm_start import warm_start

TEXT = """The town lies on the left bank of the river, some ten miles from the sea. In the middle ages it was a port;
ships from the north brought timber and fish and took away wool. Later the river silted up, the merchants left, and the
houses near the old harbour fell into ruin. Today the town has a school, two churches and a small museum."""
SWAPS = {
    "ABC, full attention": (AbcForMaskedLM, {"memory_control": "full"}),
    "ABC, window of 16": (AbcForMaskedLM, {"memory_control": "sliding_window", "memory_size": 16}),
    "ABC, 16 slots": (AbcForMaskedLM, {"memory_control": "mlp", "memory_size": 16}),
    "Luna, 16 slots": (LunaForMaskedLM, {"projection_length": 16}),
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roberta", metavar="ROBERTA", nargs="?", default="distilbert/distilroberta-base")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Make the models and print what changed. Returns the exit status."""
    return run_script(lambda: swap(parse(sys.argv[1:] if words is None else words).roberta))


def swap(name: str) -> None:
    """Make the models and print what changed.

    Raises:
        UserError: There is no such model, or the Hub cannot be reached.
    """
    try:
        roberta = AutoModelForMaskedLM.from_pretrained(name, dtype=torch.float32).eval()
    except OSError as error:
        raise UserError(f"{name} is not a folder, and cannot be downloaded. Name the folder of a RoBERTa.") from error
    ids = load_tokenizer(name, required=True)(TEXT, return_tensors="pt").input_ids
    expected = predict(roberta, ids)

    lines = []
    for label, (model_class, fields) in SWAPS.items():
        model, report = warm_start(model_class, roberta, **fields)
        print(f"\n{label}", *report.lines("new"), sep="\n")
        found = predict(model.eval(), ids)
        same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
        lines.append(
            [label, len(report.copied), len(report.new), f"{same:.0%}", f"{(found - expected).abs().max():.1e}"]
        )
    print(f"\nPredictions at {ids.shape[1]} tokens, beside those of {name}:\n")
    print(markdown_table(["model", "copied", "new", "same best token", "largest difference of a logit"], lines))


@torch.inference_mode()
def predict(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of every token: (1, n) to (n, vocabulary)."""
    return model(ids).logits[0]


if __name__ == "__main__":
    sys.exit(main())
