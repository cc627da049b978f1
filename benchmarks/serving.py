"""Many variable-length texts through one call: a pipeline and `SentenceTransformer.encode`, against RoBERTa's.

    python benchmarks/serving.py

Models and tokenizer are saved and loaded as users load them, and every text is tokenized in the call. The lengths are
drawn from those of SST-2, MRPC and IMDB (`length_mixes.json`), from all three at once (`together`), and `full` has
texts of one length. Every round draws new texts and runs every model on them.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import floors
import measuring
import torch
from contenders import ENCODER_VOCABULARY, OWN, PAD
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.utils import logging
from uneven import FULL, MIXES, MODELS, PEER, build, draw_lengths

from luna_hf.scripting import describe_run, markdown_table, progress, run_script

PROTOCOL = (
    "Encoders with random weights, vocabulary 1000, no dropout, sdpa. pipeline: text-classification; encode: "
    "SentenceTransformer with mean pooling, which sorts texts by length. Both get a list of texts and batches of 32; "
    "time includes tokenization. Every round draws the lengths of the texts from the quantiles of "
    "length_mixes.json and runs all models on them, in an order that rotates; ratios are taken within a round, medians "
    "over rounds."
)
TOGETHER = "together"
BATCH = 32
CALLS = ("pipeline", "encode")
SETTINGS = ("models", "layers", "width", "heads", "slots", "rows", "dtype", "device", "threads", "rounds")
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"layers": 2, "width": 768, "heads": 12, "slots": 128, "rows": 64, "rounds": 5}
    parser = measuring.make_parser(__doc__, **sizes)
    own = [name for name in MIXES if name != "note"]
    mixes = [*own, TOGETHER, FULL]
    parser.add_argument("--mixes", nargs="+", choices=mixes, default=mixes, help="default: all")
    parser.add_argument("--models", nargs="+", choices=OWN, default=MODELS, help=f"default: {' '.join(MODELS)}")
    measuring.add_dtype(parser)
    options = parser.parse_args(arguments)
    options.mode, options.max_length = "forward", max(max(MIXES[name]) for name in own)
    return options


def make_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A token for every word `w<id>`."""
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), ENCODER_VOCABULARY))]
    own = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    special = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=own, **special, pad_token=_SPECIAL[PAD], model_max_length=max_length
    )


def make_texts(mix: str, rows: int, seed: int) -> list[str]:
    """Texts of random words with the lengths of a mix, in random order."""
    if mix == TOGETHER:
        parts = [name for name in MIXES if name != "note"]
        lengths = [draw_lengths(parts[row % len(parts)], 1, rows * seed + row)[0] for row in range(rows)]
    else:
        lengths = draw_lengths(mix, rows, seed)
    draw = random.Random(seed)
    draw.shuffle(lengths)
    words = range(len(_SPECIAL), ENCODER_VOCABULARY)
    return [" ".join(f"w{word}" for word in draw.choices(words, k=max(1, length - 2))) for length in lengths]


def load_calls(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Callable[[list[str]], Any]]:
    """Save a model with its tokenizer, and load it for a pipeline and for `encode`."""
    from sentence_transformers import SentenceTransformer

    build(name, options).save_pretrained(folder)
    make_tokenizer(options.max_length).save_pretrained(folder)
    classify = pipeline("text-classification", model=str(folder), device=options.device)
    encoder = SentenceTransformer(str(folder), device=options.device)
    encoder.to(getattr(torch, options.dtype))
    return {
        "pipeline": partial(classify, batch_size=BATCH),
        "encode": partial(encoder.encode, batch_size=BATCH, show_progress_bar=False),
    }


def measure(
    kind: str, mix: str, calls: dict[str, dict[str, Callable[[list[str]], Any]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Time every model on the same texts: one entry of the result's `lengths`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, options.rounds):  # the first warms up
        texts = make_texts(mix, options.rows, max(turn, 0))
        for name in measuring.rotated(list(calls), max(turn, 0)):
            taken = measuring.seconds(partial(calls[name][kind], texts if turn >= 0 else texts[:2]), options.device)
            if turn >= 0:
                times[name].append(taken)
    own = {
        name: {
            "seconds": measuring.summary(times[name]),
            "speed_over_roberta": measuring.compare(times[PEER], times[name]),
        }
        for name in options.models
    }
    speeds = ", ".join(f"{name} x {model['speed_over_roberta']['median']:.2f}" for name, model in own.items())
    progress(f"{kind}, {mix}: {speeds}")
    return {"call": kind, "mix": mix, "models": own}


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()  # `encode` has no use for the classifier's weights, and says so
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: load_calls(name, Path(folder, name), options) for name in (PEER, *options.models)}
        entries = [measure(kind, mix, calls, options) for kind in CALLS for mix in options.mixes]
    result = {
        **describe_run(__file__, arguments, options.device),
        "protocol": PROTOCOL,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "lengths": entries,
    }
    return {**result, "floors": floors.check_serving(result)}


def markdown(result: dict[str, Any]) -> str:
    """Speed over RoBERTa: a row for each call and mix, a column for each model."""
    rows = []
    for entry in result["lengths"]:
        speeds = [model["speed_over_roberta"] for model in entry["models"].values()]
        cells = [f"{one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})" for one in speeds]
        rows.append([entry["call"], entry["mix"], *cells])
    return markdown_table(["call", "lengths of", *result["settings"]["models"]], rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 if floors are checked and one is missed, 2 after a mistake in the command."""

    def script() -> int:
        options = parse(arguments)
        measuring.require_device(options.device)
        return measuring.publish(options, "serving", run(options, arguments), markdown, lambda *_: None)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
