"""Convert a checkpoint of Luna's authors (fairseq) to transformers.

    python conversion/fairseq_luna.py luna.base.tied.zip outputs/luna-base-tied

SOURCE is a published archive, or whatever was trained or finetuned with that code: an archive, a folder with model.pt
(or checkpoint_best.pt, ...) and dict.txt, or a checkpoint file. A translation model has two dictionaries, dict.de.txt
and dict.en.txt for example. Writes weights, config, code, tokenizer and card. Every tensor is accounted for, and the
written files are read back and compared.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from fairseq_format.card import KINDS, TEMPLATE, make_card
from fairseq_format.checkpoint import DICTIONARIES, Original, add_reading_options, check_finite, open_checkpoint
from fairseq_format.config import HEAD_TYPES, MODELS, Head, make_config, matrix
from fairseq_format.names import HEADS, LM_HEAD, OUR_ALIASES, to_ours
from fairseq_format.tokenizer import build_tokenizer, read_bpe, read_dictionary, read_labels, word_tokenizer
from shared import check_target, command, different_tensors, load, make_parser, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.scripting import UserError, portable, run_script, writing

SCRIPT = "fairseq_luna.py"
GPT2 = "openai-community/gpt2"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
RANKING_TASKS = {"sentence_ranking", "commonsense_qa"}


def parse(words: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: An unknown option, or a value that is not allowed.
    """
    parser = make_parser(SCRIPT, __doc__, "archive (.zip, .tar.gz), folder, or checkpoint file")
    add_reading_options(parser)
    add = parser.add_argument
    add("--dict", type=Path, metavar="FILE", help="the dictionary (default: dict.txt beside the model file)")
    add("--target-dict", type=Path, metavar="FILE", help="the target's dictionary of a translation model")
    about = f"folder or Hub name with GPT-2's vocab.json and merges.txt (default: beside the model file, or {GPT2})"
    add("--gpt2-bpe", metavar="SOURCE", help=about)
    about = "classification head to convert, or lm_head for the masked language model (default: the only head)"
    add("--head", metavar="NAME", help=about)
    add("--head-type", choices=HEAD_TYPES, help="purpose of a head with one output, where the file does not show it")
    add("--labels", type=Path, metavar="FILE", help="dictionary of the classes (default: label/dict.txt)")
    add("--dtype", choices=DTYPES, help="type to write (default: the checkpoint's)")
    options = parser.parse_args(words)
    options.source, options.command = Path(options.source), command(SCRIPT, words)
    return options


# ---- the head ----


def choose_head(original: Original, options: argparse.Namespace) -> Head:
    """The head of the converted model.

    Raises:
        UserError: The choice is missing or impossible, the head's purpose is unknown, or an option does not apply.
    """
    names = original.heads()
    available = [*names, *["lm_head"] * any(name.startswith(LM_HEAD) for name in original.weights)]
    name = options.head or next(iter(available), None)
    if name not in (None, *available) or (options.head is None and len(names) > 1):
        raise UserError(f"{original.name} has the heads {', '.join(available) or 'none'}. Choose one with --head NAME.")
    if original.kind == "translation":
        head = Head("translation", "translation")
    elif name in names:
        head = _classifier(original, name, options)
    else:
        head = Head(name, "masked_lm" if name else "encoder")
    unfit = {"head_type": name not in names, "labels": head.kind != "classification"}
    is_translation = head.kind == "translation"
    unfit |= {"gpt2_bpe": is_translation, "target_dict": not is_translation}
    for option in (option for option, is_unfit in unfit.items() if is_unfit and getattr(options, option)):
        raise UserError(f"--{option.replace('_', '-')} does not apply to {KINDS[head.kind][2].lower()}. Leave it out.")
    return head


def _classifier(original: Original, name: str, options: argparse.Namespace) -> Head:
    count, arguments = len(matrix(original, f"{HEADS}{name}.out_proj.weight")), original.options
    kind = options.head_type
    if kind is None and count == 1:
        kind = "regression" if arguments.regression_target else None
        kind = "ranking" if RANKING_TASKS & {arguments.task, arguments.criterion} else kind
    if count == 1 and kind in (None, "classification"):
        raise UserError(
            f"The head {name} has one output for an unknown purpose. Add --head-type ranking (multiple choice, as in "
            "RACE) or --head-type regression (a score, as in STS-B)."
        )
    if count == 1:
        return Head(name, kind)
    if kind not in (None, "classification"):
        raise UserError(f"--head-type {kind} does not suit the head {name}, which has {count} outputs.")
    path = options.labels or original.labels
    labels = read_labels(path) if path else ()
    if options.labels and len(labels) != count:
        raise UserError(f"--labels {options.labels} has {len(labels)} classes, but the head {name} has {count}.")
    return Head(name, "classification", labels if len(labels) == count else ())


# ---- model and tokenizer ----


def make_model(original: Original, head: Head, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, list[str]]:
    """Our model with the checkpoint's weights, by default in their type, and the names of unused tensors.

    Raises:
        UserError: The tensors do not make a complete model, or the type cannot hold them.
    """
    state, unused = to_ours(original.weights, head.part)
    model = MODELS[head.kind](make_config(original, head))
    own = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in OUR_ALIASES}
    given = {name: tensor.shape for name, tensor in state.items()}
    tied = model.all_tied_weights_keys.keys() - given.keys()
    if wrong := sorted(name for name in (own.keys() | given.keys()) - tied if own.get(name) != given.get(name)):
        raise UserError(
            f"{original.name} is damaged or not of the authors' code: under our names, these tensors are missing, "
            f"unknown or of the wrong shape: {', '.join(wrong[:3])}."
        )
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.to(dtype or original.dtype).eval()
    check_finite(model.state_dict(), f"the model in {model.dtype}")
    return model, unused


def make_tokenizers(
    original: Original, model: PreTrainedModel, options: argparse.Namespace
) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizer by its subfolder, which is empty, or `target` for a target that has its own dictionary.

    Raises:
        UserError: A dictionary does not fit its embedding, or files cannot be read.
    """
    config, made, is_translation = model.config, {}, original.kind == "translation"
    wanted = [("", "--dict", options.dict, original.dictionary, config.vocab_size)]
    if is_translation and not config.share_encoder_decoder_embeddings:
        found = original.target_dictionary
        wanted.append(("target", "--target-dict", options.target_dict, found, config.decoder_vocab_size))
    for place, option, given, found, rows in wanted:
        if given is not None and given.is_dir():
            found = next((given / name for name in DICTIONARIES if (given / name).is_file()), None)
        elif given is not None:
            found = given
        if found is None:
            raise UserError(f"There is no dictionary in or beside {given or original.name}. Name it: {option} FILE.")
        symbols = read_dictionary(found, mask=not is_translation)
        if len(symbols) != rows:
            raise UserError(
                f"{portable(found)} makes {len(symbols):,} tokens (its lines and the special ones), but the "
                f"embedding has {rows:,} rows. Name the dictionary of the training run: {option} FILE."
            )
        if is_translation:
            made[place] = word_tokenizer(symbols, config.max_position_embeddings)
        else:
            bpe = read_bpe(options.gpt2_bpe or str(original.bpe or GPT2))
            made[place] = build_tokenizer(symbols, bpe, config.max_position_embeddings)
    return made


# ---- the conversion ----


def convert(options: argparse.Namespace) -> None:
    """Convert, verify, write, and report.

    Raises:
        UserError: The user can fix the options, the source or the target.
    """
    check_target(options.target, str(options.source), options.overwrite, TEMPLATE)
    # The target comes first, so that one that cannot be written fails before long work.
    source = (options.source, options.checkpoint, options.layer_norm, options.override)
    with writing(options.target) as folder, open_checkpoint(*source) as original:
        head = choose_head(original, options)
        model, unused = make_model(original, head, DTYPES.get(options.dtype))
        tokenizers = make_tokenizers(original, model, options)
        facts = describe(original, model, unused, tokenizers)
        print("\n".join(facts), flush=True)
        save(folder, model, tokenizers.pop(""))
        for place, tokenizer in tokenizers.items():
            tokenizer.save_pretrained(folder / place)
        if wrong := different_tensors(load(folder), model):
            raise UserError(f"The written files do not hold the tensors of the checkpoint: see {', '.join(wrong[:3])}.")
        card = make_card(options.target.resolve().name, original, head, model, options.command, facts)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"Written to {options.target}. Load it with {KINDS[head.kind][1]}.from_pretrained.")


def describe(
    original: Original, model: PreTrainedModel, unused: list[str], tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> list[str]:
    """What was found in the checkpoint and what became of it, a line each."""
    config, options = model.config, original.options
    dtypes = [str(dtype).removeprefix("torch.") for dtype in (original.dtype, model.dtype)]
    assumed = ", ".join(f"{name} {getattr(options, name)}" for name in options.assumed)
    lines = {
        "Read": f"{original.name} ({dtypes[0]}; architecture {options.arch or 'unnamed'})",
        "Model:": f"{type(model).__name__}, {model.num_parameters():,} parameters in {dtypes[1]}; "
        f"{config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"{config.projection_length} slots ({'dynamic' if config.dynamic_projection else 'fixed'} projection), key and "
        f"value {'tied' if config.tie_kv else 'untied'}, {config.max_position_embeddings:,} positions",
        "LayerNorm:": "weights less 1, to which 1 was added" if original.norm_offset else "plain weights",
        "Tensors:": f"{len(original.weights) - len(unused)} used, {len(unused)} unused"
        + (f" ({', '.join(unused)})" if unused else ""),
        "Left out:": ", ".join(original.left_out),
        "Not in the file, so the authors' defaults apply:": assumed,
    }
    for place, tokenizer in tokenizers.items():
        missing = getattr(tokenizer, "missing_tokens", 0)
        lacking = f"; {missing:,} of GPT-2's tokens are not in the dictionary and become <unk>" if missing else ""
        lines[f"Tokenizer{place and f' of the {place}'}:"] = f"{len(tokenizer):,} tokens{lacking}"
    return [f"{name} {text}" for name, text in lines.items() if text]


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: convert(parse(sys.argv[1:] if words is None else words)))


if __name__ == "__main__":
    sys.exit(main())
