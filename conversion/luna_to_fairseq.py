"""Convert a Luna of this package to a checkpoint for the code of Luna's authors (fairseq).

    python conversion/luna_to_fairseq.py outputs/my-luna outputs/my-luna-fairseq

Takes a folder or a name on the Hub with a masked language model, a sequence classifier, a multiple-choice model or an
encoder. Writes model.pt, the dictionary and GPT-2's BPE under fairseq's names, and a README.md. Every weight is kept
bitwise, in its type. What the authors' model cannot express is refused.
"""

import argparse
import pickle
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from fairseq_arguments import (
    CHOICES,
    DEFAULT_HEAD,
    MODELS,
    check_class,
    check_config,
    head_name,
    label_names,
    make_arguments,
)
from fairseq_checkpoint import DICTIONARY, HEADS, LABELS, NORM
from fairseq_names import OUR_ALIASES, THEIR_LM_HEAD, to_theirs
from fairseq_tokenizer import export_tokenizer
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from shared import (
    Parser,
    UserError,
    check_target,
    find,
    load_tokenizer,
    portable,
    run_script,
    without_retry_warnings,
    writing,
)
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from luna_hf import LunaConfig

MODEL_FILE = "model.pt"
# Class of the training criterion, which fairseq looks up in the checkpoint, by the criterion's name.
CRITERIA = {
    "masked_lm": "MaskedLmLoss",
    "sentence_prediction": "SentencePredictionCriterion",
    "sentence_ranking": "SentenceRankingCriterion",
}
_LOADING_ERRORS = (OSError, SafetensorError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError)

README = Template("""\
# $name

A checkpoint for the fairseq code of Luna's authors, made from `$source` by

    $command

It has **not been run in fairseq** by the conversion, which only writes what that code reads:

| file | what the authors' code takes from it |
| --- | --- |
$files

```python
from fairseq.models.luna_bert import LunaBertModel

luna = LunaBertModel.from_pretrained($arguments)
```

$notes
""")


# ---- the checkpoint ----


def to_state(model: PreTrainedModel, head: str | None = None, norm_offset: float = 0.0) -> dict[str, Any]:
    """A checkpoint of fairseq, as `torch.save` writes it to model.pt.

    The tensors are the model's own and share its memory, save for what the offset changes.

    Args:
        model: one of `MODELS`.
        head: name of the classification head; by default what the authors' code wants for the pooling.
        norm_offset: taken from the weight of every LayerNorm: 0, or 1 for the authors' code of 2023 and later.

    Raises:
        UserError: The authors' model cannot express it; the message names the field.
    """
    check_class(type(model).__name__)
    check_config(model.config)
    part = head_name(model, head)
    arguments = make_arguments(model, part)
    return {
        "args": argparse.Namespace(**arguments),
        "model": {name: tensor.cpu() for name, tensor in to_theirs(model.state_dict(), part, norm_offset).items()},
        # fairseq reads the last entry. No optimizer has this name, so it asks for --reset-optimizer to train on.
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


# ---- reading ours ----


def load(source: str) -> PreTrainedModel:
    """The model of a folder or Hub name, in the type of its weights.

    Raises:
        UserError: There is none, it cannot be read, it is incomplete, or the authors do not have such a model.
    """
    config = _read_config(source)
    name = (config.architectures or ["none"])[0]
    check_class(name)
    config.dtype = None  # the type of the weights counts, whatever the config says
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing weights is replaced by ours
    try:
        model, info = MODELS[name].from_pretrained(
            source, config=config, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except _LOADING_ERRORS as error:
        raise UserError(
            f"The weights of {source} cannot be loaded ({_first_line(error)}). The folder must hold the whole file or "
            "files that `save_pretrained` wrote: copy or download it again."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    wrong = {
        "lacks": sorted(info["missing_keys"]),
        "has besides": sorted(info["unexpected_keys"]),
        "has in another shape": sorted(key for key, *_ in info["mismatched_keys"]),
    }
    if any(wrong.values()):
        what = "; ".join(f"{verb} {', '.join(names[:3])}" for verb, names in wrong.items() if names)
        raise UserError(
            f"The weights of {source} do not fit its config: by config.json ({name}), the folder {what}. Nothing is "
            "made up for weights that are not there."
        )
    if len(kinds := _types(source)) > 1:
        raise UserError(
            f"The weights of {source} are of several types ({', '.join(sorted(kinds))}), of which some would be "
            "rounded. Load the model with dtype=torch.float32, save it, and convert that."
        )
    return model.eval()


def _read_config(source: str) -> LunaConfig:
    if Path(source).is_file():
        raise UserError(f"MODEL {source} is a file. Name the folder that `save_pretrained` wrote.")
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UserError(f"MODEL {source} holds no config.json: it is no model of transformers.")
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).parent.exists()
    if not Path(source).exists() and not is_name:
        raise UserError(f"There is no folder {source}, and it is no name on the Hub, which has an owner: owner/name.")
    try:
        with without_retry_warnings():
            values, _ = PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError, HFValidationError, HfHubHTTPError) as error:
        no_such = f"There is no folder {source}, and no model of that name can be had"
        what = f"The config.json of {source} cannot be read" if Path(source).is_dir() else no_such
        raise UserError(f"{what} ({_first_line(error)}).") from error
    if values.get("model_type") != LunaConfig.model_type:
        raise UserError(
            f"{source} is of the type {values.get('model_type')!r}. The authors' code has Luna only (`luna`)."
        )
    try:
        config = LunaConfig.from_dict(values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"The config.json of {source} is not that of a Luna ({error}).") from error
    check_config(config)
    return config


def _types(source: str) -> set[str]:
    """Types of the floating-point tensors in the files of a folder or Hub name."""
    folder = Path(find(source, "config.json")).parent
    kinds = set()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            kinds |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - it is no mapping
    return {kind for kind in kinds if "F" in kind}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Refuse a tokenizer whose dictionary would not fit the embedding, row by row.

    Raises:
        UserError: It has more or fewer tokens.
    """
    if len(tokenizer) != model.config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} tokens, and `vocab_size` is {model.config.vocab_size:,}: fairseq "
            "makes one row of the embedding for every token of its dictionary. Save the tokenizer that belongs to the "
            "model with it, or take its files out of the folder to convert the weights alone."
        )


# ---- writing theirs ----


def write(
    folder: Path, state: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, labels: list[str]
) -> dict[str, str]:
    """Write the files of fairseq; what each is for, by its name.

    Raises:
        UserError: fairseq cannot express the tokenizer.
    """
    torch.save(state, folder / MODEL_FILE)
    files = {MODEL_FILE: "`model`, the weights, and `args`, the arguments of the training run"}
    if tokenizer is not None:
        export_tokenizer(tokenizer, folder)
        files |= {
            DICTIONARY: "the ids of the tokens; the counts are 0, since they are not known",
            "encoder.json": "ids of the BPE, with `gpt2_encoder_json`",
            "vocab.bpe": "merges of the BPE, with `gpt2_vocab_bpe`",
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
    """What has to be known to use the checkpoint, a sentence or two each."""
    notes = []
    task, weights = state["args"].task, state["model"]
    if not any(name.startswith(THEIR_LM_HEAD) for name in weights):
        notes.append(
            f"The weights have no `{THEIR_LM_HEAD}*`, since a {type(model).__name__} has no masked-LM head, and "
            "nothing was made up for it. The authors' model always has one, so their strict loading refuses this "
            "file: load `model` with `load_state_dict(..., strict=False)`, or add the head of the model that this one "
            "was finetuned from."
        )
    if tokenizer is None:
        notes.append(
            f"The model has no tokenizer files, so there is no {DICTIONARY}: put the dictionary of the model's "
            f"{model.config.vocab_size:,} tokens there, without which fairseq cannot load it."
        )
    if task != "masked_lm":
        needed = [f"input0/{DICTIONARY} (a copy of {DICTIONARY})"]
        needed += [LABELS] if task == "sentence_prediction" and not state["args"].regression_target else []
        notes.append(f"In its data folder, the task {task} wants {' and '.join(needed)}.")
    if task == "sentence_prediction" and not state["args"].regression_target and not labels:
        notes.append(f"The classes have no names (`id2label`), so {LABELS} was not written.")
    if task == "sentence_ranking":
        notes.append(
            f"The model does not say how many answers a question has: `num_classes` is {CHOICES}, as for RACE. The "
            "weights do not depend on it."
        )
    return notes


def describe(model: PreTrainedModel, state: Mapping[str, Any], source: str, norm_offset: float) -> list[str]:
    """What was converted and how, a line each."""
    weights, arguments, own = state["model"], vars(state["args"]), model.state_dict()
    dtype = str(model.dtype).removeprefix("torch.")
    aliases = [f"{name} (the same as {whole})" for name, whole in OUR_ALIASES.items() if name in own]
    lines = [
        f"Read {source}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}",
        f"Tensors: {len(weights)} in {dtype}; of ours, without a counterpart: {', '.join(aliases) or 'none'}",
    ]
    head = next((name.split(".")[1] for name in weights if name.startswith(HEADS)), None)
    if head is not None:
        outputs = len(weights[f"{HEADS}{head}.out_proj.weight"])
        lines.append(f"Head: {head} ({model.config.classifier_pooling}; {outputs} output{'s' * (outputs > 1)})")
    if norm_offset:
        plain = to_state(model, head)["model"]
        lines.append(f"LayerNorm: weights less 1, {_rounding(weights, plain, norm_offset)}")
    shown = {name: value for name, value in arguments.items() if value is not None and value != ""}
    return [*lines, "Arguments: " + ", ".join(f"{name} {value}" for name, value in shown.items())]


def _rounding(weights: Mapping[str, Tensor], plain: Mapping[str, Tensor], offset: float) -> str:
    """How far the weights of the norms are from ours once the offset is added again."""
    norms = [name for name in weights if NORM.search(name)]
    largest = max((weights[name].double() + offset - plain[name].double()).abs().max().item() for name in norms)
    return "exactly" if largest == 0 else f"rounded by at most {largest:.1e}"


def make_readme(options: argparse.Namespace, state: Mapping[str, Any], files: dict[str, str], notes: list[str]) -> str:
    """What the folder is."""
    arguments = ['"FOLDER"', f'"{MODEL_FILE}"']
    if DICTIONARY in files:
        arguments += ['gpt2_encoder_json="FOLDER/encoder.json"', 'gpt2_vocab_bpe="FOLDER/vocab.bpe"']
    bpe = " Without the two `gpt2_` arguments, fairseq downloads GPT-2's own BPE." if DICTIONARY in files else ""
    later = [
        f"`FOLDER` is the folder of this file.{bpe}",
        "There is no state of an optimizer or of the data: train with `--restore-file FOLDER/model.pt "
        "--reset-optimizer --reset-dataloader --reset-meters`.",
    ]
    if options.layer_norm == "offset":
        later.append("The weights of every LayerNorm are stored less 1, as the authors' code of 2023 and later has it.")
    return README.substitute(
        name=options.target.resolve().name,
        source=portable(options.model),
        command=command(options),
        files="\n".join(f"| {name} | {what} |" for name, what in files.items()),
        arguments=", ".join(arguments),
        notes="\n".join(f"- {note}" for note in [*later, *notes]),
    )


# ---- the command line ----


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: A word that is no option, or a value that is none of those allowed.
    """
    parser = Parser(
        prog="python conversion/luna_to_fairseq.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub name of a Luna")
    add("target", metavar="TARGET", type=Path, help="folder to write; it must be new or empty")
    add(
        "--head",
        metavar="NAME",
        help="what to call the classification head (default: pooling_classification_head for packed_max, "
        f"attention_classification_head for packed_attention, {DEFAULT_HEAD} for cls)",
    )
    add(
        "--layer-norm",
        choices=("plain", "offset"),
        default="plain",
        help="what to write of a LayerNorm: its weights, as the published checkpoints, or these less 1, for the "
        "authors' code of 2023 and later (default: plain)",
    )
    add("--overwrite", action="store_true", help="replace TARGET if an earlier conversion wrote it")
    return parser.parse_args(words)


def command(options: argparse.Namespace) -> str:
    """The command that makes the same checkpoint, without the folders of this machine."""
    parts = [portable(options.model), portable(str(options.target))]
    if options.head is not None:
        parts += ["--head", options.head]
    if options.layer_norm != "plain":
        parts += ["--layer-norm", options.layer_norm]
    return shlex.join(["python", "conversion/luna_to_fairseq.py", *parts])


def convert(options: argparse.Namespace) -> None:
    """Convert, write, and say what was done.

    Raises:
        UserError: Something at the model, in the options or at the target that the user can mend.
    """
    check_target(options.target, options.model, options.overwrite)
    model = load(options.model)
    tokenizer = load_tokenizer(options.model)
    if tokenizer is not None:
        check_tokenizer(tokenizer, model)
    offset = float(options.layer_norm == "offset")
    state, labels = to_state(model, options.head, offset), label_names(model)
    notes = make_notes(model, state, tokenizer, labels)
    with writing(options.target) as folder:
        files = write(folder, state, tokenizer, labels)
        (folder / "README.md").write_text(make_readme(options, state, files, notes), encoding="utf-8")
    print("\n".join(describe(model, state, options.model, offset)))
    for note in notes:
        print(f"Note: {note}")
    print(f"Written to {options.target}: {', '.join(files)}. It has not been run in fairseq.")


def main(words: list[str] | None = None) -> int:
    """Run the script; 0, or 2 for something the user can mend."""
    return run_script(lambda: convert(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
