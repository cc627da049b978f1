"""Convert a checkpoint of Luna's authors (fairseq) to transformers.

    python conversion/fairseq_luna.py luna.base.tied.zip outputs/luna-base-tied

Takes the published archives and whatever was trained or finetuned with that code: an archive, a folder with model.pt
(or checkpoint_best.pt, ...) and dict.txt, or a checkpoint file. Writes weights, config, code, tokenizer and card, and
checks the result layer by layer against the numbers in the checkpoint.
"""

import argparse
import shlex
import sys
from collections import Counter
from functools import reduce
from pathlib import Path

import torch
from fairseq_card import AUTO_CLASSES, is_half, make_card, make_tokenizer_card, target_name
from fairseq_checkpoint import BPE_NAMES, DICTIONARIES, Original, heads, open_original
from fairseq_config import HEAD_TYPES, POOLINGS, RANKING, UNK, Head, classes, is_tied, make_config
from fairseq_names import EMBEDDING, THEIR_LM_HEAD, TIED, Translated, to_ours
from fairseq_tokenizer import build_tokenizer, is_roberta, read_bpe, read_dictionary, write_vocabulary
from shared import Parser, UserError, check_target, portable, run_script, save, writing
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verify import compare, parse_override

from luna_hf import (
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForSequenceClassification,
    LunaModel,
)

GPT2 = "openai-community/gpt2"
MODELS: dict[str, type[PreTrainedModel]] = {
    "masked_lm": LunaForMaskedLM,
    "encoder": LunaModel,
    "classification": LunaForSequenceClassification,
    "regression": LunaForSequenceClassification,
    "ranking": LunaForMultipleChoice,
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: A word that is no option, or a value that is none of those allowed.
    """
    parser = Parser(
        prog="python conversion/fairseq_luna.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="archive (.zip, .tar.gz), folder, or checkpoint file")
    add("target", metavar="TARGET", type=Path, help="folder to write; it must be new or empty")
    add("--checkpoint", metavar="NAME", help="which model file, where there are several")
    add("--dict", type=Path, metavar="FILE", help="the dictionary (default: dict.txt beside the model file)")
    add(
        "--gpt2-bpe",
        metavar="SOURCE",
        help=f"folder or Hub name with GPT-2's vocab.json and merges.txt (default: beside the model file, or {GPT2})",
    )
    add(
        "--head",
        metavar="NAME",
        help="which classification head becomes the model's; lm_head for the masked language model "
        "(default: the only one there is)",
    )
    add(
        "--head-type",
        choices=HEAD_TYPES,
        help="of a head with one output: what it was trained for, where the file does not say",
    )
    add("--labels", type=Path, metavar="FILE", help="dictionary of the classes (default: label/dict.txt)")
    add(
        "--layer-norm",
        choices=("plain", "offset"),
        help="what the file holds of a LayerNorm: its weights (the published checkpoints), or these less 1 (code of "
        "2023 and later); default: found out, and said",
    )
    add("--dtype", choices=DTYPES, help="type to write (default: the checkpoint's own)")
    add(
        "--override",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="an argument of the training run that takes the place of that in the file, as encoder_attention_heads=12",
    )
    add("--tokenizer-only", action="store_true", help="convert the dictionary alone")
    add("--overwrite", action="store_true", help="replace TARGET if an earlier conversion wrote it")
    options = parser.parse_args(words)
    options.overrides = dict(parse_override(text) for text in options.override)
    return options


def command(options: argparse.Namespace) -> str:
    """The command that makes the same model, without the folders of this machine."""
    parts = [portable(str(options.source)), portable(str(options.target))]
    for name in ("checkpoint", "dict", "gpt2_bpe", "head", "head_type", "labels", "layer_norm", "dtype"):
        if (value := getattr(options, name)) is not None:
            parts += [f"--{name.replace('_', '-')}", portable(str(value))]
    for text in options.override:
        parts += ["--override", text]
    if options.tokenizer_only:
        parts += ["--tokenizer-only"]
    return shlex.join(["python", "conversion/fairseq_luna.py", *parts])


# ---- the head ----


def choose_head(original: Original, options: argparse.Namespace) -> Head:
    """What the converted model has on its encoder.

    Raises:
        UserError: There are several heads and none is chosen, there is no such head, or its use is not known.
    """
    names = heads(original.weights)
    has_lm_head = any(name.startswith(THEIR_LM_HEAD) for name in original.weights)
    available = ", ".join([*(f"{name} ({_describe(original, name)})" for name in names), *["lm_head"] * has_lm_head])
    if options.head is None and len(names) > 1:
        raise UserError(f"{original.name} has several heads: {available}. Choose one with --head NAME.")
    name = options.head or (names[0] if names else "lm_head" if has_lm_head else None)
    if name is None:
        head = Head(None, "encoder")
    elif name == "lm_head" and has_lm_head:
        head = Head(name, "masked_lm")
    elif name in names:
        head = _classifier(original, name, options)
    else:
        raise UserError(f"{original.name} has no head {name}. It has {available or 'none'}.")
    for option, fits in (("head_type", head.kind in ("regression", "ranking")), ("labels", bool(head.labels))):
        if getattr(options, option) is not None and not fits:
            what = name or "an encoder without a head"
            raise UserError(f"--{option.replace('_', '-')} is without effect on {what}: leave it out.")
    return head


def _describe(original: Original, name: str) -> str:
    reads = {"packed_max": "maximum over P", "packed_attention": "attention over P"}
    count = classes(original.weights, name)
    return f"{count} output{'s' * (count > 1)}, {reads.get(POOLINGS.get(name), 'first token')}"


def _classifier(original: Original, name: str, options: argparse.Namespace) -> Head:
    count = classes(original.weights, name)
    if count > 1:
        if options.head_type not in (None, "classification"):
            raise UserError(f"The head {name} has {count} outputs: it is no head for {options.head_type}.")
        given = None if options.labels is None else _labels(options.labels)
        if given is not None and len(given) != count:
            raise UserError(
                f"--labels {options.labels} names {len(given)} classes ({', '.join(given[:5])}), but the head {name} "
                f"has {count} outputs."
            )
        found = given or (_labels(original.labels) if original.labels else ())
        return Head(name, "classification", found if len(found) == count else ())
    kind = options.head_type
    if kind == "classification":
        raise UserError(f"The head {name} has one output, so it does not choose among classes.")
    if kind is None and (original.options.task in RANKING or original.options.criterion in RANKING):
        kind = "ranking"
    if kind is None and original.options.regression_target:
        kind = "regression"
    if kind is None:
        raise UserError(
            f"The head {name} has one output, and the checkpoint does not say what for. Tell it: --head-type ranking "
            "(multiple choice, as RACE) or --head-type regression (a score, as STS-B)."
        )
    return Head(name, kind)


def _labels(path: Path) -> tuple[str, ...]:
    """Names of the classes: the first lines of fairseq's label dictionary, in whose order the outputs stand.

    Raises:
        UserError: The file cannot be read, or is no such dictionary.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The dictionary of the classes, {path}, cannot be read ({error}).") from error
    names = tuple(line.rpartition(" ")[0] for line in lines if not line.startswith("madeupword"))
    if not names or len(set(names)) != len(names) or not all(names):
        raise UserError(
            f"{path} is no dictionary of classes, with a line for each: its name and a count. Name another: "
            "--labels FILE."
        )
    return names


# ---- model and tokenizer ----


def make_model(original: Original, head: Head) -> tuple[PreTrainedModel, Translated]:
    """Our model with the checkpoint's weights, and what became of its tensors.

    It has the checkpoint's type, but float32 where that is half precision and 1 is added to the weights of the norms.

    Raises:
        UserError: The tensors do not make a complete model.
    """
    config = make_config(original, head)
    translated = to_ours(original.weights, head.part, original.norm_offset)
    state = dict(translated.tensors)
    if head.kind == "masked_lm":
        state["lm_head.decoder.bias"] = state.get("lm_head.bias")
        if TIED not in original.weights:
            state["lm_head.decoder.weight"] = original.weights[EMBEDDING]
    model = MODELS[head.kind](config)
    own = model.state_dict()
    missing, foreign = [n for n in own if state.get(n) is None], [n for n in state if n not in own]
    wrong = [n for n in own if n in state and n not in missing and state[n].shape != own[n].shape]
    if missing or foreign or wrong:
        kinds = (("lacks", missing), ("has besides", foreign), ("has in another shape", wrong))
        what = "; ".join(f"{verb} {', '.join(names[:3])}" for verb, names in kinds if names)
        raise UserError(
            f"{original.name} does not make a whole model (under our names, it {what}): it is damaged, or not of the "
            "authors' code."
        )
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    dtype = widest(original)
    return model.to(torch.promote_types(dtype, torch.float32) if original.norm_offset else dtype).eval(), translated


def widest(original: Original) -> torch.dtype:
    """The checkpoint's type; of several, the one that holds them all."""
    types = {tensor.dtype for tensor in original.weights.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, types)


def find_dictionary(given: Path | None, found: Path | None, beside: str) -> Path:
    """The dictionary: that of --dict, or the one that was found beside `beside`.

    Raises:
        UserError: There is none.
    """
    if given is not None and given.is_dir():
        found = next((given / name for name in DICTIONARIES if (given / name).is_file()), None)
        beside = f"the folder {given}" if found is None else beside
    elif given is not None:
        return given
    if found is None:
        raise UserError(
            f"There is no dict.txt in or beside {beside}. It holds the order of the tokens: copy it there from the "
            "archive or from the training data, or name it with --dict FILE."
        )
    return found


def make_tokenizer(
    dictionary: Path, source: str, rows: int | None, longest: int | None
) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer of a dictionary, and what it is in a few words.

    Args:
        dictionary: dict.txt.
        source: folder or Hub name with GPT-2's BPE.
        rows: of the model's embedding, if there is a model.
        longest: input of the model.

    Raises:
        UserError: The dictionary has not as many tokens as the embedding has rows, or the files cannot be read.
    """
    symbols = read_dictionary(dictionary)
    if rows is not None and len(symbols) != rows:
        raise UserError(
            f"{portable(str(dictionary))} makes {len(symbols):,} tokens (its lines, 4 specials and <mask>), but the "
            f"embedding has {rows:,} rows: they do not belong together. Name the dictionary that the model was trained "
            "with: --dict FILE."
        )
    tokenizer = build_tokenizer(symbols, read_bpe(source), longest)
    kind = "the ids of FacebookAI/roberta-base" if is_roberta(symbols) else "the ids of dict.txt"
    if type(tokenizer).__name__ == "FairseqBpeTokenizer":
        kind += f"; GPT-2 tokens that the dictionary lacks become {symbols[UNK]}, by the class FairseqBpeTokenizer"
    return tokenizer, f"{len(symbols):,} tokens, {kind}"


# ---- all of it ----


def convert(options: argparse.Namespace) -> None:
    """Convert, check, write, and say what was found.

    Raises:
        UserError: Something at the source, in the options or at the target that the user can mend.
    """
    check_target(options.target, str(options.source), options.overwrite)
    if options.tokenizer_only:
        convert_tokenizer(options)
        return
    opened = open_original(options.source, options.checkpoint, options.layer_norm, options.overrides)
    # The target first: whether it can be written is known at once, and what cannot be is said before long work.
    with writing(options.target) as folder, opened as original:
        head = choose_head(original, options)
        config = make_config(original, head)
        dictionary = find_dictionary(options.dict, original.dictionary, original.name)
        bpe = options.gpt2_bpe or (str(original.bpe) if original.bpe else GPT2)
        tokenizer, kind = make_tokenizer(dictionary, bpe, config.vocab_size, config.max_position_embeddings)
        model, translated = make_model(original, head)
        facts = describe(original, head, model, translated, kind)
        print("\n".join(facts), flush=True)
        save(folder, model, tokenizer, "")
        write_vocabulary(tokenizer, folder)
        report = compare(folder, original, head.part if head.kind in HEAD_TYPES else None)
        if not report.ok:
            lines = "\n".join(report.lines())
            raise UserError(f"The converted model does not compute what the checkpoint does:\n{lines}")
        results = [report.summary()]
        if (dtype := DTYPES.get(options.dtype, widest(original))) != model.dtype:
            results.append(cast(model, dtype, "as asked" if options.dtype else "the checkpoint's type"))
            save(folder, model, tokenizer, "")
        card = make_card(target_name(options.target), original, head, model, command(options), [*facts, *results])
        (folder / "README.md").write_text(card, encoding="utf-8")
    print("\n".join(results))
    print(f"Written to {options.target}: load it with {AUTO_CLASSES[head.kind]}.from_pretrained.")
    if is_half(model):
        print(f"It is stored in {name_of(model.dtype)}. To train it, load it with dtype=torch.float32.")


def cast(model: PreTrainedModel, dtype: torch.dtype, why: str) -> str:
    """Change the type of a model, and say what that does and why it is done."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.to(dtype)
    wide = torch.float64
    changed = [name for name, new in model.named_parameters() if not torch.equal(before[name].to(wide), new.to(wide))]
    how = f"{len(changed)} of {len(before)} tensors are rounded" if changed else "no number changes"
    return f"Then written in {name_of(dtype)}, {why}: {how}."


def name_of(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def describe(
    original: Original, head: Head, model: PreTrainedModel, translated: Translated, tokenizer: str
) -> list[str]:
    """What was found in the checkpoint and what became of it, a line each."""
    config, options = model.config, original.options
    types = Counter(name_of(tensor.dtype) for tensor in original.weights.values())
    norm = "weights less 1, to which 1 was added" if original.norm_offset else "plain weights"
    why = "found out" if original.norm_detected else "as told"
    lines = [
        f"Read {original.name} ({', '.join(types)}; arguments of {options.arch or 'an unnamed architecture'})",
        f"Model: {type(model).__name__}, {model.num_parameters():,} parameters in {name_of(model.dtype)}; "
        f"{config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"{config.projection_length} slots ({'dynamic' if config.dynamic_projection else 'fixed'} projection), key and "
        f"value {'tied' if config.tie_kv else 'untied'}, {config.max_position_embeddings:,} positions",
        f"LayerNorm: {norm} ({why}; the median of their means is {original.norm_mean:.2f})",
        f"Tensors: {len(translated.tensors)} used, {len(translated.unused)} unused"
        + (f" ({', '.join(translated.unused)})" if translated.unused else ""),
    ]
    if head.part not in (None, "lm_head"):
        names = ", ".join(config.id2label.values()) if head.kind == "classification" else head.kind
        lines.append(f"Head: {head.part} ({_describe(original, head.part)}; {names})")
    if original.labels and head.kind == "classification" and not head.labels:
        lines.append("Classes: label/dict.txt does not have as many as the head has outputs, so they have no names")
    if original.left_out:
        lines.append(f"Left out: {', '.join(original.left_out)}")
    if original.assumed:
        given = ", ".join(f"{name} {getattr(options, name)}" for name in original.assumed)
        lines.append(f"Not in the file, so the authors' defaults: {given}")
    if TIED in original.weights and not options.untie_weights_luna and not is_tied(original):
        lines.append("The arguments say that the output layer is the token embedding, but it differs: kept apart.")
    return [*lines, f"Tokenizer: {tokenizer}"]


def convert_tokenizer(options: argparse.Namespace) -> None:
    """Write the tokenizer of a dictionary, unless transformers has it ready.

    Raises:
        UserError: It is RoBERTa's, there is no dictionary, or an option is one of models.
    """
    for name in ("checkpoint", "head", "head_type", "labels", "layer_norm", "dtype"):
        if getattr(options, name) is not None or options.override:
            flag = name.replace("_", "-") if getattr(options, name) is not None else "override"
            raise UserError(f"--{flag} is without effect on a tokenizer alone: leave it out.")
    source = options.source
    if not source.is_dir() and source.suffix != ".txt":
        raise UserError(f"With --tokenizer-only, SOURCE is a folder with dict.txt, or that file; {source} is neither.")
    dictionary = find_dictionary(options.dict or source, None, str(source))
    if is_roberta(read_dictionary(dictionary)):
        raise UserError(
            f"{portable(str(dictionary))} is RoBERTa's own dictionary, whose tokenizer transformers has ready: "
            'AutoTokenizer.from_pretrained("FacebookAI/roberta-base").'
        )
    beside = dictionary.parent
    bpe = options.gpt2_bpe or (str(beside) if any((beside / name).is_file() for name in BPE_NAMES) else GPT2)
    with writing(options.target) as folder:
        tokenizer, kind = make_tokenizer(dictionary, bpe, None, None)
        tokenizer.save_pretrained(folder)
        write_vocabulary(tokenizer, folder)
        card = make_tokenizer_card(target_name(options.target), command(options), kind)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"Tokenizer: {kind}")
    print(f"Written to {options.target}: load it with AutoTokenizer.from_pretrained.")


def main(words: list[str] | None = None) -> int:
    """Run the script; 0, or 2 for something the user can mend."""
    return run_script(lambda: convert(parse(words)))


if __name__ == "__main__":
    sys.exit(main())
