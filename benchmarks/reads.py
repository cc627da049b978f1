"""What queries read: the share of the attention that window, selected tokens and slots get in each layer of a model.

    python benchmarks/reads.py checkpoints/luna-minilm-en-4096

The texts are the beginnings of three excerpts of novels. `figures.py` draws the result.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, write_result
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import luna_hf
from luna_hf.scripting import Parser, describe_run, run_script

TOKENS, WORDS = 2048, 8
PROTOCOL = (
    "Eager attention over the first tokens of each text; means over queries, heads and texts. `text` is the share of "
    "the tokens that each part stands for."
)
TEXTS = sorted((Path(luna_hf.__file__).parent / "convert" / "sample_texts").glob("*.txt"))


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> dict[str, Any]:
    """Measure the attention that each part gets.

    Returns:
        `text`: the share of each part in the tokens of a text. `layers`: its share of the attention in each layer, as a
        mean over texts, heads and queries, and the words that get most of the attention to selected tokens. `first` is
        the first token, `selected` all others that are selected.
    """
    config, chosen = model.config, []
    slots, number = getattr(config, config.slots_field), config.num_selected_tokens
    # The weights say how much a selected token is read, but not which token it is.
    attentions = [module for module in model.modules() if hasattr(module, "select_tokens")]
    for module in attentions:
        module.select_tokens = partial(recorded, module.select_tokens, chosen)
    shares = [Counter() for _ in attentions]
    words = [Counter() for _ in attentions]
    for text in texts:
        chosen.clear()
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=TOKENS)
        with torch.no_grad():
            layers = model(**inputs, output_attentions=True).attentions
        for layer, (weights, tokens) in enumerate(zip(layers, chosen, strict=True)):
            own, exact, window = weights[0].mean(1).split([slots, number, config.local_window], -1)  # (heads, keys)
            places = tokens.places[0]
            first = exact[places == 0].sum()
            parts = {"window": window.sum(), "first": first, "selected": exact.sum() - first, "slots": own.sum()}
            shares[layer].update({part: float(weight) / len(exact) for part, weight in parts.items()})
            names = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0, places.flatten()])
            for name, weight in zip(names, exact.flatten().tolist(), strict=True):
                words[layer][name] += weight
    text = {"window": config.local_window / TOKENS, "first": 1 / TOKENS, "selected": (number - 1) / TOKENS}
    return {
        "text": {**text, "slots": 1 - sum(text.values())},
        "layers": [
            {part: weight / len(texts) for part, weight in share.items()}
            | {"most_read": [name for name, _ in counted.most_common(WORDS)]}
            for share, counted in zip(shares, words, strict=True)
        ],
    }


def recorded(call: Callable[..., Any], results: list[Any], *arguments: Any) -> Any:
    """Call a function and keep what it returns."""
    results.append(call(*arguments))
    return results[-1]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model with a window and selected tokens")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure and write the result."""

    def script() -> int:
        options = parse(arguments)
        torch.set_num_threads(1)
        header = describe_run(__file__, arguments, "cpu")
        model = AutoModel.from_pretrained(options.model, attn_implementation="eager").eval()
        texts = [path.read_text(encoding="utf-8") for path in TEXTS]
        found = measure(model, AutoTokenizer.from_pretrained(options.model), texts)
        settings = {"protocol": PROTOCOL, "texts": [path.name for path in TEXTS], "tokens": TOKENS}
        write_result(options.output, f"reads-{options.model.name}", "cpu", "float32", {**header, **settings, **found})
        return 0

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
