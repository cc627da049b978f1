"""Convert a Luna of this package to a checkpoint for the code of Luna's authors (fairseq).

    python conversion/luna_to_fairseq.py outputs/my-luna outputs/my-luna-fairseq

SOURCE is a folder or Hub name with a masked language model, a sequence classifier, a multiple-choice model or an
encoder. Writes model.pt, the dictionary and GPT-2's BPE by fairseq's names, and a README.md. Every weight is kept
bitwise, in its type. What the authors' model cannot express is refused.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from fairseq_format.checkpoint import DICTIONARY, HEADS, LABELS, LM_HEAD, check_finite
from fairseq_format.config import (
    CHOICES,
    DEFAULT_HEAD,
    check_class,
    check_config,
    head_name,
    label_names,
    make_arguments,
)
from fairseq_format.converted import load, read_config
from fairseq_format.names import OUR_ALIASES, to_theirs
from fairseq_format.tokenizer import export_tokenizer
from safetensors import safe_open
from shared import check_target, command, make_parser
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.convert.files import find
from luna_hf.scripting import UserError, load_tokenizer, portable, run_script, writing

SCRIPT = "luna_to_fairseq.py"
MODEL_FILE = "model.pt"
# The class of the training criterion, which fairseq looks up in the checkpoint, by the criterion's name.
CRITERIA = {
    "masked_lm": "MaskedLmLoss",
    "sentence_prediction": "SentencePredictionCriterion",
    "sentence_ranking": "SentenceRankingCriterion",
}


def parse(words: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: An unknown option, or a value that is not allowed.
    """
    parser = make_parser(SCRIPT, __doc__, "folder or Hub name of a Luna")
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="name of the classification head in the checkpoint (default: pooling_classification_head for packed_max, "
        "attention_classification_head for packed_attention; for cls the name that the model was converted from, or "
        f"{DEFAULT_HEAD})",
    )
    parser.add_argument(
        "--layer-norm",
        choices=("plain", "offset"),
        default="plain",
        help="what to store for each LayerNorm: its weight, like the published checkpoints, or its weight less 1, for "
        "the authors' code of 2023 and later (default: plain)",
    )
    options = parser.parse_args(words)
    options.command = command(SCRIPT, words)
    return options


def to_state(model: PreTrainedModel, head: str | None = None, norm_offset: float = 0.0) -> dict[str, Any]:
    """A fairseq checkpoint, for `torch.save`. Its tensors share the model's memory unless the offset changes them.

    Args:
        model: a Luna.
        head: name of the classification head; by default that before an earlier conversion, or the authors' name for
            the pooling.
        norm_offset: subtracted from every LayerNorm weight: 0, or 1 for the authors' code of 2023 and later.

    Raises:
        UserError: The authors' model cannot express it.
    """
    check_class(type(model).__name__)
    check_config(model.config)
    part = head_name(model, head)
    arguments = make_arguments(model, part)
    return {
        "args": argparse.Namespace(**arguments),
        "model": {name: tensor.cpu() for name, tensor in to_theirs(model.state_dict(), part, norm_offset).items()},
        # fairseq reads the last entry. No optimizer has this name, so resuming requires --reset-optimizer.
        "optimizer_history": [
            {
                "criterion_name": CRITERIA[arguments["criterion"]],
                "optimizer_name": "none",
                "lr_scheduler_state": {"best": None},
                "num_updates": 0,
            }
        ],
        "extra_state": {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }


def load_source(source: str) -> PreTrainedModel:
    """The model of a folder or Hub repository, in the type of its weights.

    Raises:
        UserError: It cannot be read, is incomplete or of several types, has weights that are not finite, or the authors
            have no such model.
    """
    check_config(read_config(source))
    model, problems = load(source)
    if problems:
        raise UserError(f"The weights of {source} do not fit its config.json: {'; '.join(problems[:5])}.")
    check_finite(model.state_dict(), source)
    kinds = set()
    for path in Path(find(source, "config.json")).parent.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            kinds |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 (not a mapping)
    if len(kinds := {kind for kind in kinds if "F" in kind}) > 1:
        raise UserError(
            f"The weights of {source} have several types ({', '.join(sorted(kinds))}), so some would be rounded. Load "
            "the model with dtype=torch.float32, save it, and convert that."
        )
    return model


def write(
    folder: Path, state: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, labels: list[str]
) -> dict[str, str]:
    """Write fairseq's files; what each contains, by its name.

    Raises:
        UserError: fairseq cannot express the tokenizer.
    """
    torch.save(state, folder / MODEL_FILE)
    files = {MODEL_FILE: "`model`, the weights, and `args`, the arguments of the training run"}
    if tokenizer is not None:
        export_tokenizer(tokenizer, folder)
        files |= {
            DICTIONARY: "the ids of the tokens; their counts are unknown, hence 0",
            "encoder.json": "ids of the BPE, for `gpt2_encoder_json`",
            "vocab.bpe": "merges of the BPE, for `gpt2_vocab_bpe`",
        }
    if labels:
        path = folder / LABELS
        path.parent.mkdir()
        path.write_text("".join(f"{label} 0\n" for label in labels), encoding="utf-8")
        files[LABELS] = "the names of the classes, in the order of the outputs"
    return files


def make_notes(
    model: PreTrainedModel, state: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, labels: list[str]
) -> list[str]:
    """What a user of the checkpoint must know, a sentence or two each."""
    notes = []
    task, arguments = state["args"].task, state["args"]
    if not any(name.startswith(LM_HEAD) for name in state["model"]):
        notes.append(
            f"There are no weights `{LM_HEAD}*`, because a {type(model).__name__} has no masked-LM head. The authors' "
            "strict loading refuses such a file: load `model` with `load_state_dict(..., strict=False)`, or add the "
            "head of the pretrained model."
        )
    if tokenizer is None:
        notes.append(
            f"The model has no tokenizer, so there is no {DICTIONARY}. fairseq needs the dictionary of the model's "
            f"{model.config.vocab_size:,} tokens there."
        )
    if task != "masked_lm":
        needed = f"input0/{DICTIONARY} (a copy of {DICTIONARY})"
        if task == "sentence_prediction" and not arguments.regression_target:
            needed += f" and {LABELS}{'' if labels else ' (not written, because `id2label` has no names)'}"
        notes.append(f"The data folder of the task {task} must hold {needed}.")
    if task == "sentence_ranking":
        notes.append(
            f"`num_classes`, the number of answers to a question, is {CHOICES} as for RACE, because the model does not "
            "store it. The weights do not depend on it."
        )
    return notes


def describe(model: PreTrainedModel, state: Mapping[str, Any], source: str, layer_norm: str) -> list[str]:
    """What was converted and how, a line each."""
    weights, arguments, own = state["model"], vars(state["args"]), model.state_dict()
    dtype = str(model.dtype).removeprefix("torch.")
    aliases = [f"{name} (the same as {whole})" for name, whole in OUR_ALIASES.items() if name in own]
    lines = [
        f"Read {source}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}",
        f"Tensors: {len(weights)} in {dtype}; without a counterpart: {', '.join(aliases) or 'none'}",
    ]
    head = next((name.split(".")[1] for name in weights if name.startswith(HEADS)), None)
    if head is not None:
        outputs = len(weights[f"{HEADS}{head}.out_proj.weight"])
        lines.append(f"Head: {head} ({model.config.classifier_pooling}; {outputs} output{'s' * (outputs > 1)})")
    if layer_norm == "offset":
        lines.append("LayerNorm: weights less 1, which may be rounded")
    shown = {name: value for name, value in arguments.items() if value is not None and value != ""}
    return [*lines, "Arguments: " + ", ".join(f"{name} {value}" for name, value in shown.items())]


def make_readme(options: argparse.Namespace, files: dict[str, str], notes: list[str]) -> str:
    """The folder's README.md, from `to_fairseq.md`."""
    arguments, bpe = ['"FOLDER"', f'"{MODEL_FILE}"'], ""
    if DICTIONARY in files:
        arguments += ['gpt2_encoder_json="FOLDER/encoder.json"', 'gpt2_vocab_bpe="FOLDER/vocab.bpe"']
        bpe = " Without the two `gpt2_` arguments, fairseq downloads GPT-2's own BPE."
    general = [
        f"`FOLDER` is the folder of this file.{bpe}",
        "There is no state of an optimizer or of the data. Train with `--restore-file FOLDER/model.pt "
        "--reset-optimizer --reset-dataloader --reset-meters`.",
    ]
    if options.layer_norm == "offset":
        general.append("LayerNorm weights are stored less 1, for the authors' code of 2023 and later.")
    template = Path(__file__).with_name("to_fairseq.md").read_text(encoding="utf-8")
    return Template(template).substitute(
        name=options.target.resolve().name,
        source=portable(options.source),
        command=options.command,
        files="\n".join(f"| {name} | {what} |" for name, what in files.items()),
        arguments=", ".join(arguments),
        notes="\n".join(f"- {note}" for note in [*general, *notes]),
    )


def convert(options: argparse.Namespace) -> None:
    """Convert, write, and report.

    Raises:
        UserError: The user can fix the source, the options or the target.
    """
    check_target(options.target, options.source, options.overwrite)
    with writing(options.target) as folder:  # first, because only one process may
        model = load_source(options.source)
        tokenizer = load_tokenizer(options.source)
        if tokenizer is not None and len(tokenizer) != model.config.vocab_size:
            raise UserError(
                f"The tokenizer has {len(tokenizer):,} tokens, but `vocab_size` is {model.config.vocab_size:,}, and "
                "fairseq needs one row for every token. Save the right tokenizer with the model, or remove its files."
            )
        state, labels = to_state(model, options.head, float(options.layer_norm == "offset")), label_names(model)
        notes = make_notes(model, state, tokenizer, labels)
        files = write(folder, state, tokenizer, labels)
        (folder / "README.md").write_text(make_readme(options, files, notes), encoding="utf-8")
    print(
        "\n".join([*describe(model, state, options.source, options.layer_norm), *(f"Note: {note}" for note in notes)])
    )
    print(f"Written to {options.target}: {', '.join(files)}. It has not been run in fairseq.")


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: convert(parse(sys.argv[1:] if words is None else words)))


if __name__ == "__main__":
    sys.exit(main())
