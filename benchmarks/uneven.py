"""Variable-length texts: classifiers with padding computed and left out, and whole calls, beside RoBERTa's.

    python benchmarks/uneven.py --check-floors

`forward` and `finetune` take batches of 32 texts. `pipeline` and `encode` (of SentenceTransformer) are called with 64
texts as users call them, tokenization included. The lengths are drawn from those of SST-2, MRPC and IMDB
(`length_mixes.json`), and from all three at once (`together`); `full` has texts of one length, where there is nothing
to gain.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import summaries
import torch
from contenders import ENCODER_VOCABULARY, OWN, PAD, configure, make_action
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast, pipeline
from transformers.utils import logging

from luna_hf.scripting import progress

PROTOCOL = (
    "Sequence classifiers with random weights, vocabulary 1000, no dropout, sdpa. padded: every row is computed to the "
    "longest of the batch (unpad_inputs=False); by default the models leave padding out where that is faster. forward: "
    "eval, no gradients. finetune: forward, backward and fused AdamW. pipeline: text-classification; encode: "
    "SentenceTransformer with mean pooling, which sorts texts by length; both get a list of texts and batches of 32. "
    "Every round draws the lengths of the texts from the quantiles of length_mixes.json and runs all models on them, "
    "in an order that rotates; ratios are taken within a round, medians over rounds."
)
MIXES = json.loads((Path(__file__).resolve().parent / "length_mixes.json").read_text(encoding="utf-8"))
NAMES = tuple(name for name in MIXES if name != "note")
TOGETHER, FULL, FULL_LENGTH = "together", "full", 128
PEER, PADDED = "roberta", "padded"
MODELS = ["luna-tied", "abc-mlp-64", "leapformer", "lavo-64"]
BATCH = 32
STEPS, CALLS = ("forward", "finetune"), ("pipeline", "encode")
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"layers": 2, "width": 768, "heads": 12, "slots": 128, "rows": BATCH, "rounds": 9}
    parser = measuring.make_parser(__doc__, **sizes)
    mixes, calls = [*NAMES, TOGETHER, FULL], [*STEPS, *CALLS]
    parser.add_argument("--mixes", nargs="+", choices=mixes, default=mixes, help="default: all")
    parser.add_argument("--calls", nargs="+", choices=calls, default=calls, help="default: all")
    parser.add_argument("--models", nargs="+", choices=OWN, default=MODELS, help=f"default: {' '.join(MODELS)}")
    options = parser.parse_args(arguments)
    options.mode, options.max_length = "forward", max(max(MIXES[name]) for name in NAMES)
    return options


def draw_lengths(mix: str, rows: int, seed: int) -> list[int]:
    """The lengths of some texts, in random order."""
    draw = random.Random(seed)
    if mix == FULL:
        return [FULL_LENGTH] * rows
    return [draw.choice(MIXES[NAMES[row % len(NAMES)] if mix == TOGETHER else mix]) for row in range(rows)]


def make_batch(lengths: Sequence[int], device: str) -> dict[str, Tensor]:
    """Random ids, padded on the right, and labels."""
    generator = torch.Generator().manual_seed(sum(lengths))
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, ENCODER_VOCABULARY, keep.shape, generator=generator).masked_fill(~keep, PAD)
    labels = torch.randint(0, 2, (len(lengths),), generator=generator)
    batch = {"input_ids": ids, "attention_mask": keep.long(), "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def make_texts(mix: str, rows: int, seed: int) -> list[str]:
    """Texts of random words with the lengths of a mix."""
    draw, words = random.Random(seed), range(len(_SPECIAL), ENCODER_VOCABULARY)
    lengths = draw_lengths(mix, rows, seed)
    return [" ".join(f"w{word}" for word in draw.choices(words, k=max(1, length - 2))) for length in lengths]


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


def build(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """A classifier with random weights."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(configure(name, options))
    return model.to(device=options.device, dtype=getattr(torch, options.dtype))


def make_steps(model: PreTrainedModel, call: str, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """The timed steps of a model, which take a batch: as it is, and with padding computed."""
    training = call == "finetune"
    model.train(training)
    setting = argparse.Namespace(**{**vars(options), "mode": "class_step" if training else "forward"})
    step = make_action(model, setting)
    if model.config.model_type == PEER:
        return {"": step}
    return {"": step, f", {PADDED}": lambda batch: step({**batch, "unpad_inputs": False})}


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


def measure_mix(call: str, mix: str, actions: dict[str, Callable[..., Any]], options: argparse.Namespace) -> Any:
    """Time every model on the same texts: one entry of the result's `lengths`."""
    rows = options.rows if call in STEPS else 2 * options.rows
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(options.rounds):
        if call in STEPS:
            inputs: Any = make_batch(draw_lengths(mix, rows, turn), options.device)
        else:
            inputs = make_texts(mix, rows, turn)
        drawn = {name: partial(action, inputs) for name, action in actions.items()}
        own = {name: drawn[name] for name in measuring.rotated(list(drawn), turn)}
        for name, taken in measuring.interleave(own, 1, options.device, warm_up=turn == 0).items():
            times[name] += taken
    found = summaries.describe({name: times[name] for name in (PEER, *options.models)}, [PEER])
    for name in options.models if call in STEPS else ():
        ratios = summaries.ratios(times[f"{name}, {PADDED}"], times[name])
        found[name]["speed_over"][PADDED] = summaries.summary(ratios)
    progress(f"{call}, {mix}")
    return {"call": call, "mix": mix, "models": found}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    logging.set_verbosity_error()  # `encode` has no use for the classifier's weights, and says so
    entries, names = [], (PEER, *options.models)
    for call in (call for call in STEPS if call in options.calls):
        steps = {name: make_steps(build(name, options), call, options) for name in names}
        actions = {f"{name}{kind}": action for name, own in steps.items() for kind, action in own.items()}
        entries += [measure_mix(call, mix, actions, options) for mix in options.mixes]
    with tempfile.TemporaryDirectory() as folder:
        calls = [call for call in CALLS if call in options.calls]
        loaded = {name: load_calls(name, Path(folder, name), options) for name in names} if calls else {}
        for call in calls:
            actions = {name: own[call] for name, own in loaded.items()}
            entries += [measure_mix(call, mix, actions, options) for mix in options.mixes]
    return {"peers": [PEER, PADDED], "lengths": entries}


def subject(options: argparse.Namespace) -> str:
    """First part of the file name."""
    return f"uneven-{'-'.join(options.calls)}"


main = measuring.Benchmark(__file__, PROTOCOL, parse, measure, subject, summaries.table).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
