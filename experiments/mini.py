"""The small English models in `checkpoints/`, from the texts to the weights.

    python experiments/mini.py tokenizer --data DATA
    python experiments/mini.py train luna-mini-en roberta-mini-en ... --data DATA

`tokenizer` trains the byte-level BPE that all models share. `train` runs the stages of models that are not finished,
after what they start from, unless that is in `checkpoints/`; without names, all models. After an interruption, run the
same command again. `abc-mini-en` is trained at commit 8a742e4, which has the command that converted it.

DATA has `enwiki` and `novels` (train.parquet, validation.parquet; column `text`). The recipes read `data/`. Options
that are not listed here, `--key value`, override those of the training commands.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from running import ROOT, launch, make_parser, option_words, run_study
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaTokenizer

from luna_hf.ops.positions import sinusoids
from luna_hf.scripting import UserError, progress

SCRIPT = "experiments/mini.py"
VOCABULARY, TOKENIZER = 8192, "bpe-mini-en"
# Twins before their first stage and before their second: what each is made from, with its width.
STARTS = {
    "roberta-mini-en-start": ("", 256),
    "roberta-mini-en-512-start": ("roberta-mini-en-128", 256),
    "roberta-tiny-en-start": ("", 128),
    "roberta-tiny-en-512-start": ("roberta-tiny-en-128", 128),
}


@dataclass(frozen=True)
class Stage:
    """A training run: its recipe, what it starts from (another run's folder), and the keys that it changes."""

    recipe: str = "pretrain_mlm/luna-mini-en"
    start: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


# The second stage of a model, and a third for longer texts: rows are longer, rates lower. Luna repeats its positions.
_AT_512 = {"block_size": 512, "batch_size": 4, "max_steps": 17100}
# sdpa's backward pass on a CPU makes an update of such short rows a third slower.
_EAGER = {"model": "{attn_implementation: eager}"}
# The models of width 128 read 10 and 5 million tokens; RoBERTa of that size is their twin.
_TINY, _TINY_AT_512 = {"max_steps": 5000}, {**_AT_512, "max_steps": 2500}
_TWIN = {**_EAGER, "min_gain_nats": 1.0}  # it gains 1.4 nats in its first stage
_SIZE_128 = "hidden_size: 128, num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 512, "
_SIZE_128 += "initializer_range: 0.04, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0"
_LEAPFORMER = "model_type: leapformer, max_position_embeddings: 128, conv_kernel_size: 3, conv_initializer_range: 0.58"
_LAVO = "model_type: lavo, num_bases: 64, local_window: 32"
_AT_4096 = {"block_size": 4096, "global_batch_tokens": 8192, "batch_size": 1, "max_steps": 1000, "learning_rate": 3e-4}
STAGES = {
    "luna-mini-en-128": Stage(),
    "luna-mini-en": Stage(start="luna-mini-en-128", changes={**_AT_512, "learning_rate": 7e-4}),
    "luna-mini-en-4096": Stage(start="luna-mini-en", changes=_AT_4096),
    "roberta-mini-en-128": Stage(start="roberta-mini-en-start", changes={**_EAGER, "learning_rate": 1e-3}),
    "roberta-mini-en": Stage(start="roberta-mini-en-512-start", changes={**_AT_512, **_EAGER, "learning_rate": 5e-4}),
    "leapformer-mini-en-128": Stage(changes={**_TINY, "model": f"{{{_LEAPFORMER}, {_SIZE_128}}}"}),
    "leapformer-mini-en": Stage(start="leapformer-mini-en-128", changes=_TINY_AT_512),
    "lavo-mini-en-128": Stage(changes={**_TINY, "model": f"{{{_LAVO}, {_SIZE_128}}}"}),
    "lavo-mini-en": Stage(start="lavo-mini-en-128", changes=_TINY_AT_512),
    "roberta-tiny-en-128": Stage(start="roberta-tiny-en-start", changes={**_TINY, **_TWIN, "learning_rate": 1e-3}),
    "roberta-tiny-en": Stage(
        start="roberta-tiny-en-512-start", changes={**_TINY_AT_512, **_TWIN, "learning_rate": 5e-4}
    ),
    "luna-mini-en-clm": Stage("pretrain_clm/luna-mini-en-clm"),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; unknown options are overrides."""
    parser = make_parser(__doc__, COMMANDS, "outputs")
    parser.add_argument("models", nargs="*", help="of `train` (default: all)")
    options, options.overrides = parser.parse_known_args(arguments)
    if unknown := [name for name in options.models if name not in (*STAGES, *STARTS)]:
        raise UserError(f"There is no model {unknown[0]} to train. Choose from {', '.join(STAGES)}.")
    return options


def tokenizer(options: argparse.Namespace) -> Path:
    """Train the byte-level BPE, unless it is there, and return its folder.

    Raises:
        UserError: A text is missing.
    """
    from data.tokenizer import train_tokenizer
    from datasets import load_dataset

    folder = options.runs / TOKENIZER
    if not (folder / "tokenizer.json").is_file():
        files = [options.data / name / "train.parquet" for name in ("enwiki", "novels")]
        if missing := [str(path) for path in files if not path.is_file()]:
            raise UserError(f"There is no {' and no '.join(missing)}. Name the folder of the texts: --data DATA.")
        texts = load_dataset("parquet", data_files=[str(path) for path in files], split="train")["text"]
        train_tokenizer(iter(texts), VOCABULARY, 512).save_pretrained(folder)
    return folder


def train(options: argparse.Namespace) -> None:
    """Run the stages of models, and those before them."""
    tokenizer(options)
    for name in options.models or STAGES:
        run_stage(options, name)


def start_of(options: argparse.Namespace, name: str) -> Path:
    """Return the folder that a stage starts from: a published checkpoint, so that others can repeat it, else a run."""
    shipped = ROOT / "checkpoints" / name
    return shipped if shipped.is_dir() else run_stage(options, name)


def run_stage(options: argparse.Namespace, name: str) -> Path:
    """Run a stage after what it starts from, unless it is finished, and return its folder.

    Raises:
        UserError: The run failed.
        KeyboardInterrupt: It was stopped by a signal, and is saved.
    """
    folder = options.runs / name
    if (folder / ("metrics.json" if name in STAGES else "config.json")).is_file():
        return folder
    if name in STARTS:
        source, width = STARTS[name]
        return (
            lengthen_twin(folder, start_of(options, source), 512)
            if source
            else start_twin(folder, options.runs / TOKENIZER, width)
        )
    stage = STAGES[name]
    command, _, recipe = stage.recipe.partition("/")
    values = {"model_name": name, "output_dir": folder, "cache_dir": options.runs / "cache", **stage.changes}
    if stage.start:
        values = {"model": "{}", **values, "model_name_or_path": start_of(options, stage.start), "tokenizer": ""}
    else:
        values["tokenizer"] = options.runs / TOKENIZER
    progress(f"training {name}")
    path = ROOT / "training" / "recipes" / command / f"{recipe}.yaml"
    launch(f"training/{command}.py", [str(path), *option_words(values), *options.overrides], options.threads)
    if not (folder / "metrics.json").is_file():
        raise KeyboardInterrupt
    return folder


def start_twin(folder: Path, tokenizer_folder: Path, width: int = 256) -> Path:
    """Write an untrained twin: a RoBERTa of four layers whose learned positions start as sinusoids.

    With random positions, a RoBERTa this small takes several times as long to learn more than token frequencies.
    """
    tokens = RobertaTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(tokens),
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=130,  # 128 tokens; RoBERTa counts from the padding token's id
        type_vocab_size=1,
        initializer_range=0.04,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
    )
    model = RobertaForMaskedLM(config)
    positions = model.roberta.embeddings.position_embeddings.weight
    waves = sinusoids(torch.arange(len(positions)), positions.shape[1])
    with torch.no_grad():
        positions.copy_(waves / waves.std() * 0.05)
        positions[config.pad_token_id] = 0
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def lengthen_twin(folder: Path, source: Path, length: int) -> Path:
    """Write the twin with positions for `length` tokens: the new ones are extrapolated from the trained ones.

    Repeated ones, as in Luna, would let softmax attention take tokens that are 128 apart for neighbours, and it would
    need many more updates to recover.
    """
    model, tokens = RobertaForMaskedLM.from_pretrained(source), RobertaTokenizer.from_pretrained(source)
    config, embeddings = model.config, model.roberta.embeddings
    trained = embeddings.position_embeddings.weight.detach()
    embeddings.position_embeddings = nn.Embedding.from_pretrained(
        extrapolate(trained, config.pad_token_id + 1, length), freeze=False, padding_idx=config.pad_token_id
    )
    config.max_position_embeddings, tokens.model_max_length = len(embeddings.position_embeddings.weight), length
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def extrapolate(trained: Tensor, first: int, length: int) -> Tensor:
    """Continue positions (first + n, d), of which row `first` is that of the first token, to (first + length, d).

    The new ones are a linear function of the sinusoids, fitted to the trained ones (ridge regression).
    """
    waves = sinusoids(torch.arange(first + length), trained.shape[1])
    waves = torch.cat([waves / waves[: len(trained)].std() * 0.05, torch.full((len(waves), 1), 0.05)], dim=1)
    known = waves[first : len(trained)]
    ridge = 0.1 * torch.eye(known.shape[1])
    weights = torch.linalg.solve(known.T @ known + ridge, known.T @ trained[first:])
    return torch.cat([trained, waves[len(trained) :] @ weights])


COMMANDS = {"tokenizer": tokenizer, "train": train}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit status."""
    return run_study(SCRIPT, parse, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
