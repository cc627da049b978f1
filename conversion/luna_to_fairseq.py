"""Convert a Luna of this package to a checkpoint for the code of Luna's authors (fairseq).

    python conversion/luna_to_fairseq.py outputs/my-luna outputs/my-luna-fairseq

Takes a folder or a name on the Hub with a masked language model, a sequence classifier, a multiple-choice model or an
encoder. Writes model.pt, the dictionary and GPT-2's BPE under fairseq's names, and a README.md. Every weight is kept
bitwise, in its type. What the authors' model cannot express is refused.
"""

import argparse
import pickle
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from common import Parser, UserError, check_target, find, portable, run_script, writing
from fairseq_checkpoint import DICTIONARY, HEADS, LABELS, NORM
from fairseq_config import ACTIVATIONS, BOS, EOS, PAD, POOLINGS
from fairseq_names import OUR_ALIASES, THEIR_LM_HEAD, to_theirs
from fairseq_tokenizer import MASK, SPECIALS, export_tokenizer
from from_roberta import load_tokenizer
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from luna_hf import LunaConfig, LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification, LunaModel

MODEL_FILE = "model.pt"
MODELS: dict[str, type[PreTrainedModel]] = {
    model.__name__: model
    for model in (LunaForMaskedLM, LunaModel, LunaForSequenceClassification, LunaForMultipleChoice)
}
CLASSIFIERS = ("LunaForSequenceClassification", "LunaForMultipleChoice")
# The name that the authors' code gives to a head if none is chosen; the others choose what a head reads.
DEFAULT_HEAD = "sentence_classification_head"
# What the authors' masked language model always is. The values are those of our config.
FIXED: dict[str, tuple[Any, str]] = {
    "position_embedding_type": ("learned", "has learned positions"),
    "norm_first": (False, "has post-norm layers"),
    "embedding_layer_norm": (True, "has a LayerNorm on the embeddings"),
    "layer_norm_eps": (1e-5, "has this epsilon in every LayerNorm"),
    "type_vocab_size": (0, "has no segment embeddings"),
    "conv_kernel_size": (0, "has no convolution"),
    "bos_token_id": (BOS, "takes the special tokens from its dictionary, where they have fixed ids"),
    "pad_token_id": (PAD, "takes the special tokens from its dictionary, where they have fixed ids"),
    "eos_token_id": (EOS, "takes the special tokens from its dictionary, where they have fixed ids"),
}
# Of the authors' names for one activation, the first is written.
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# Number of answers to a question, which a ranking task has to be told and on which the model does not depend: RACE's.
CHOICES = 4
# Class of the training criterion, which fairseq looks up in the checkpoint, by the criterion's name.
CRITERIA = {
    "masked_lm": "MaskedLmLoss",
    "sentence_prediction": "SentencePredictionCriterion",
    "sentence_ranking": "SentenceRankingCriterion",
}
# Arguments that a task wants besides what the model says, as the authors have them.
EVERY_TASK = {"data": ".", "dataset_impl": None, "seed": 1, "shorten_method": "none", "shorten_data_split_list": ""}
MASKED_LM = {
    "sample_break_mode": "complete",
    "mask_prob": 0.15,
    "leave_unmasked_prob": 0.1,
    "random_token_prob": 0.1,
    "freq_weighted_replacement": False,
    "mask_whole_words": False,
}
SENTENCES = {"init_token": BOS, "separator_token": EOS, "no_shuffle": False, "load_checkpoint_heads": True}
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


# ---- what can be converted ----


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the authors' model cannot express.

    Raises:
        UserError: The field of the config, its value, and what the authors' model has.
    """
    if config.model_type != LunaConfig.model_type:
        raise UserError(f"The model is of the type {config.model_type!r}. The authors' code has Luna only (`luna`).")
    for field, (value, reason) in FIXED.items():
        if getattr(config, field) != value:
            raise UserError(
                f"`{field}` is {getattr(config, field)!r}, which cannot be converted: the authors' model {reason} "
                f"({value!r})."
            )
    heads, packed = config.num_attention_heads, config.num_projected_attention_heads
    if packed not in (None, heads):
        raise UserError(
            f"`num_projected_attention_heads` is {packed}, and `num_attention_heads` is {heads}: the authors' model "
            "has as many heads in the pack attention as in the unpack attention."
        )
    for field in ("hidden_act", "classifier_activation"):
        if getattr(config, field) not in THEIR_ACTIVATIONS:
            raise UserError(
                f"`{field}` is {getattr(config, field)!r}, which the authors' code does not have. It has "
                f"{', '.join(THEIR_ACTIVATIONS)}."
            )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError("`quantization_config` is set: a quantized model cannot be converted. Take the original one.")


def check_class(name: str) -> None:
    """Refuse models that the authors do not have.

    Raises:
        UserError: The class, and those that can be converted.
    """
    if name not in MODELS:
        raise UserError(
            f"The model is a {name}, which the authors' code does not have. These can be converted: "
            f"{', '.join(MODELS)}."
        )


def head_name(model: PreTrainedModel, given: str | None = None) -> str | None:
    """What the authors call the model's head: `"lm_head"`, the name of a classification head, `None` if there is none.

    Raises:
        UserError: The given name cannot be that of the model's head, or the head reads what no head of theirs reads.
    """
    if type(model).__name__ not in CLASSIFIERS:
        if given is not None:
            raise UserError(f"A {type(model).__name__} has no classification head that could be called {given}.")
        return "lm_head" if isinstance(model, LunaForMaskedLM) else None
    pooling = model.config.classifier_pooling
    names = {"cls": DEFAULT_HEAD} | {pooling: name for name, pooling in POOLINGS.items()}
    if pooling not in names:
        raise UserError(
            f"`classifier_pooling` is {pooling!r}, which no head of the authors has. They have {', '.join(names)}."
        )
    name = names[pooling] if given is None else given
    if not name or "." in name or name.split() != [name]:
        raise UserError(f"--head {name!r} is no name for a head: it may hold neither a dot nor a blank.")
    meaning = POOLINGS.get(name, "cls")
    if meaning != pooling:
        raise UserError(
            f"--head {name}: a head of that name reads {meaning!r} in the authors' code, but the model's "
            f"`classifier_pooling` is {pooling!r}. "
            + (
                "Leave --head out."
                if pooling != "cls"
                else f"Choose another name, or leave --head out ({DEFAULT_HEAD})."
            )
        )
    return name


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


def make_arguments(model: PreTrainedModel, part: str | None) -> dict[str, Any]:
    """The authors' arguments for a model.

    Raises:
        UserError: It was trained for something that they do not have.
    """
    config = model.config
    pooler_dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return {
        "arch": f"luna_base_{'tied' if config.tie_kv else 'untied'}_512",
        **_task(model, part),
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "max_positions": config.max_position_embeddings,
        "tokens_per_sample": config.max_position_embeddings,
        "projection_length": config.projection_length,
        "fix_projection_length": not config.dynamic_projection,
        "untie_luna_kv": not config.tie_kv,
        "untie_weights_luna": isinstance(model, LunaForMaskedLM) and not config.tie_word_embeddings,
        "activation_fn": THEIR_ACTIVATIONS[config.hidden_act],
        "pooler_activation_fn": THEIR_ACTIVATIONS[config.classifier_activation],
        "dropout": float(config.hidden_dropout_prob),
        "attention_dropout": float(config.attention_probs_dropout_prob),
        "activation_dropout": float(config.activation_dropout),
        "pooler_dropout": float(pooler_dropout),
        "encoder_layerdrop": 0,
        "encoder_layers_to_keep": None,
        "quant_noise_pq": 0,
        "quant_noise_pq_block_size": 8,
        "quant_noise_scalar": 0,
    }


def _task(model: PreTrainedModel, part: str | None) -> dict[str, Any]:
    """The task, its criterion (which has the same name), and what they have to be told."""
    kind = type(model).__name__
    if kind == "LunaForMultipleChoice":
        own = {**SENTENCES, "num_classes": CHOICES, "max_option_length": None, "ranking_head_name": part}
        return {"task": "sentence_ranking", "criterion": "sentence_ranking", **EVERY_TASK, **own}
    if kind == "LunaForSequenceClassification":
        own = {
            **SENTENCES,
            "num_classes": model.config.num_labels,
            "regression_target": _is_regression(model.config),
            "add_prev_output_tokens": False,
            "classification_head_name": part,
        }
        return {"task": "sentence_prediction", "criterion": "sentence_prediction", **EVERY_TASK, **own}
    return {"task": "masked_lm", "criterion": "masked_lm", **EVERY_TASK, **MASKED_LM}


def _is_regression(config: PreTrainedConfig) -> bool:
    """Whether a sequence classifier gives a number instead of a class."""
    kind, outputs = config.problem_type, config.num_labels
    if kind == "multi_label_classification":
        raise UserError(f"`problem_type` is {kind!r}: the authors' heads choose one class, or give a number.")
    regression = kind == "regression" or (kind is None and outputs == 1)
    if regression != (outputs == 1):
        raise UserError(
            f"`problem_type` is {kind!r}, and `num_labels` is {outputs}: the authors' heads choose among several "
            "classes, or give one number."
        )
    return regression


def label_names(model: PreTrainedModel) -> list[str]:
    """Names of the classes in the order of the outputs; none if the model has no classes, or no names for them.

    Raises:
        UserError: fairseq's dictionary cannot hold a name.
    """
    config = model.config
    if not isinstance(model, LunaForSequenceClassification) or _is_regression(config):
        return []
    names = [str(config.id2label[index]) for index in sorted(config.id2label)]
    if names == [f"LABEL_{index}" for index in range(len(names))]:
        return []
    for place, name in enumerate(names):
        is_word = bool(name.strip()) and name == name.strip() and len(name.splitlines()) == 1
        if not is_word or name in (*SPECIALS, MASK, *names[:place]) or name.startswith("madeupword"):
            raise UserError(
                f"`id2label` names class {place} {name!r}. A class in fairseq's label/dict.txt has a name of its own, "
                "in one line, without blanks around it, and not one of fairseq's own symbols: rename it."
            )
    return names


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
    try:
        values, _ = PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError, HFValidationError, HfHubHTTPError) as error:
        what = f"The config.json of {source} cannot be read" if Path(source).is_dir() else f"There is no model {source}"
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
            "nothing was made up for it. The authors' model always has one, so their strict loading refuses this file: load "
            "`model` with `load_state_dict(..., strict=False)`, or add the head of the model that this one was "
            "finetuned from."
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
        "There is no state of an optimizer or of the data: train with `--restore-file FOLDER/model.pt --reset-optimizer "
        "--reset-dataloader --reset-meters`.",
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
