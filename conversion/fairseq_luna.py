"""Convert a checkpoint of Luna's authors (fairseq) to transformers.

    python conversion/fairseq_luna.py luna.base.tied.zip outputs/luna-base-tied

SOURCE is a published archive, or whatever was trained or finetuned with that code: an archive, a folder with model.pt
(or checkpoint_best.pt, ...) and dict.txt, or a checkpoint file. A translation model has two dictionaries, dict.de.txt
and dict.en.txt for example. Writes weights, config, code, tokenizer and card, after
every layer of the result has been compared with the numbers in the checkpoint.
"""

import argparse
import sys
from collections import Counter
from functools import reduce
from pathlib import Path

import torch
from fairseq_format import translation
from fairseq_format.arguments import add_reading_options, open_checkpoint
from fairseq_format.card import KINDS, is_half, make_card, make_tokenizer_card, make_translation_card
from fairseq_format.checkpoint import BPE_NAMES, DICTIONARIES, EMBEDDING, LM_HEAD, OUTPUT, Original, TranslationOptions
from fairseq_format.config import HEAD_TYPES, MODELS, POOLINGS, RANKING_TASKS, UNK, Head, classes, make_config
from fairseq_format.names import to_ours
from fairseq_format.tokenizer import build_tokenizer, is_roberta, read_bpe, read_dictionary, write_vocabulary
from fairseq_format.verification import compare
from shared import check_target, command, make_parser, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.scripting import UserError, portable, run_script, writing

SCRIPT = "fairseq_luna.py"
GPT2 = "openai-community/gpt2"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


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
    add(
        "--gpt2-bpe",
        metavar="SOURCE",
        help=f"folder or Hub name with GPT-2's vocab.json and merges.txt (default: beside the model file, or {GPT2})",
    )
    add(
        "--head",
        metavar="NAME",
        help="classification head to convert, or lm_head for the masked language model (default: the only head)",
    )
    add("--head-type", choices=HEAD_TYPES, help="purpose of a head with one output, where the file does not show it")
    add("--labels", type=Path, metavar="FILE", help="dictionary of the classes (default: label/dict.txt)")
    add("--dtype", choices=DTYPES, help="type to write (default: the checkpoint's)")
    add("--tokenizer-only", action="store_true", help="convert only the dictionary")
    options = parser.parse_args(words)
    options.source, options.command = Path(options.source), command(SCRIPT, words)
    return options


# ---- the head ----


def choose_head(original: Original, options: argparse.Namespace) -> Head:
    """The head of the converted model.

    Raises:
        UserError: The choice is missing or impossible, or the head's purpose is unknown.
    """
    names = original.heads()
    has_lm_head = any(name.startswith(LM_HEAD) for name in original.weights)
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
    for option, fits in (("head_type", head.classifier), ("labels", head.labels)):
        if getattr(options, option) is not None and not fits:
            flag = option.replace("_", "-")
            raise UserError(f"--{flag} does not apply to {name or 'an encoder without a head'}. Leave it out.")
    return head


def _describe(original: Original, name: str) -> str:
    reads = {"packed_max": "maximum over P", "packed_attention": "attention over P"}
    count = classes(original, name)
    return f"{count} output{'s' * (count > 1)}, {reads.get(POOLINGS.get(name), 'first token')}"


def _classifier(original: Original, name: str, options: argparse.Namespace) -> Head:
    count, kind = classes(original, name), options.head_type
    if kind is not None and (kind == "classification") != (count > 1):
        raise UserError(f"--head-type {kind} does not suit the head {name}, which has {count} outputs.")
    if count > 1:
        labels = _labels(options.labels or original.labels)
        if options.labels and len(labels) != count:
            raise UserError(f"--labels {options.labels} has {len(labels)} classes, but the head {name} has {count}.")
        return Head(name, "classification", labels if len(labels) == count else ())
    if kind is None and {original.options.task, original.options.criterion} & set(RANKING_TASKS):
        kind = "ranking"
    if kind is None and original.options.regression_target:
        kind = "regression"
    if kind is None:
        raise UserError(
            f"The head {name} has one output for an unknown purpose. Add --head-type ranking (multiple choice, as in "
            "RACE) or --head-type regression (a score, as in STS-B)."
        )
    return Head(name, kind)


def _labels(path: Path | None) -> tuple[str, ...]:
    """Names of the classes in the order of the outputs: the lines of fairseq's label dictionary before its fillers."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The dictionary of the classes, {path}, cannot be read ({error}).") from error
    names = tuple(line.rpartition(" ")[0] for line in lines if not line.startswith("madeupword"))
    if not names or len(set(names)) != len(names) or not all(names):
        raise UserError(f"{path} must have a line for every class, with its unique name and a count.")
    return names


# ---- model and tokenizer ----


def make_model(original: Original, head: Head) -> tuple[PreTrainedModel, list[str]]:
    """Our model with the checkpoint's weights, and the names of unused tensors.

    It has the checkpoint's type, or float32 where 1 is added to LayerNorm weights in half precision.

    Raises:
        UserError: The tensors do not make a complete model.
    """
    state, unused = to_ours(original.weights, head.part, original.norm_offset)
    if head.kind == "masked_lm":
        state["lm_head.decoder.bias"] = state.get("lm_head.bias")
        if OUTPUT not in original.weights:
            state["lm_head.decoder.weight"] = original.weights[EMBEDDING]
    model = MODELS[head.kind](make_config(original, head))
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in state.items() if tensor is not None}
    if wrong := sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name)):
        raise UserError(
            f"{original.name} is damaged or not of the authors' code: under our names, {', '.join(wrong[:3])} "
            f"{'is' if len(wrong) == 1 else 'are'} missing, unknown or of the wrong shape."
        )
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    dtype = widest(original)
    return model.to(torch.promote_types(dtype, torch.float32) if original.norm_offset else dtype).eval(), unused


def widest(original: Original) -> torch.dtype:
    """The checkpoint's type; of several, one that holds them all."""
    return reduce(torch.promote_types, {tensor.dtype for tensor in original.weights.values()})


def find_dictionary(given: Path | None, found: Path | None, place: str) -> Path:
    """The dictionary that --dict names (a file, or a folder that holds it), or the one found at `place`.

    Raises:
        UserError: There is none.
    """
    if given is not None and not given.is_dir():
        return given
    if given is not None:
        found = next((given / name for name in DICTIONARIES if (given / name).is_file()), None)
    if found is None:
        raise UserError(f"There is no dict.txt in or beside {given or place}. Name the dictionary with --dict FILE.")
    return found


def make_tokenizer(
    dictionary: Path, source: str, rows: int | None = None, longest: int | None = None
) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer of a dictionary, and its description in a few words.

    Args:
        dictionary: dict.txt.
        source: folder or Hub name with GPT-2's BPE.
        rows: of the model's embedding, if there is a model.
        longest: input of the model.

    Raises:
        UserError: The dictionary does not fit the embedding, or files cannot be read.
    """
    symbols = read_dictionary(dictionary)
    if rows is not None and len(symbols) != rows:
        raise UserError(
            f"{portable(dictionary)} makes {len(symbols):,} tokens (its lines, 4 specials and <mask>), but the "
            f"embedding has {rows:,} rows. Name the dictionary of the training run: --dict FILE."
        )
    tokenizer = build_tokenizer(symbols, read_bpe(source), longest)
    kind = "the ids of FacebookAI/roberta-base" if is_roberta(symbols) else "the ids of dict.txt"
    if type(tokenizer).__name__ == "FairseqBpeTokenizer":
        kind += f"; FairseqBpeTokenizer maps GPT-2 tokens that the dictionary lacks to {symbols[UNK]}"
    return tokenizer, f"{len(symbols):,} tokens, {kind}"


# ---- the conversion ----


def convert(options: argparse.Namespace) -> None:
    """Convert, verify, write, and report.

    Raises:
        UserError: The user can fix the source, the options or the target.
    """
    check_target(options.target, str(options.source), options.overwrite)
    if options.tokenizer_only:
        convert_tokenizer(options)
        return
    # The target comes first, so that one that cannot be written fails before long work.
    with writing(options.target) as folder, open_checkpoint(options.source, options) as original:
        if isinstance(original.options, TranslationOptions):
            results = convert_translation(options, folder, original)
            print("\n".join(results))
            print(f"Written to {options.target}. Load it with AutoModelForSeq2SeqLM.from_pretrained.")
            return
        head = choose_head(original, options)
        config = make_config(original, head)
        dictionary = find_dictionary(options.dict, original.dictionary, original.name)
        bpe = options.gpt2_bpe or (str(original.bpe) if original.bpe else GPT2)
        tokenizer, kind = make_tokenizer(dictionary, bpe, config.vocab_size, config.max_position_embeddings)
        model, unused = make_model(original, head)
        facts = describe(original, head, model, unused, kind)
        print("\n".join(facts), flush=True)
        save(folder, model, tokenizer, "")
        write_vocabulary(tokenizer, folder)
        report = compare(folder, original, head.classifier)
        if not report.ok:
            lines = "\n".join(report.lines())
            raise UserError(f"The converted model does not compute what the checkpoint does:\n{lines}")
        results = [report.summary()]
        if (dtype := DTYPES.get(options.dtype, widest(original))) != model.dtype:
            results.append(cast(model, dtype))
            save(folder, model, tokenizer, "")
        name = options.target.resolve().name
        card = make_card(name, original, head, model, options.command, [*facts, *results])
        (folder / "README.md").write_text(card, encoding="utf-8")
    print("\n".join(results))
    print(f"Written to {options.target}. Load it with {KINDS[head.kind][1]}.from_pretrained.")
    if is_half(model):
        print(f"It is stored in {name_of(model.dtype)}. To train it, load it with dtype=torch.float32.")


def convert_translation(options: argparse.Namespace, folder: Path, original: Original) -> list[str]:
    """Convert an encoder-decoder; the tokenizer of a target with its own dictionary goes to the folder `target`.

    Raises:
        UserError: An option applies to encoders only, a dictionary does not fit, or the result is not equal.
    """
    for name in ("head", "head_type", "labels", "gpt2_bpe", "dtype"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} does not apply to a translation model. Leave it out.")
    model, unused = translation.make_model(original)
    config, facts = model.config, []
    source = find_dictionary(options.dict, original.dictionary, original.name)
    shared = config.share_encoder_decoder_embeddings
    target = source if shared else find_dictionary(options.target_dict, original.target_dictionary, original.name)
    for path, rows, place in (
        (source, config.vocab_size, folder),
        (target, config.decoder_vocab_size, folder / "target"),
    ):
        symbols = translation.read_symbols(path)
        if len(symbols) != rows:
            raise UserError(
                f"{portable(path)} makes {len(symbols):,} tokens (its lines and 4 specials), but the embedding has "
                f"{rows:,} rows. Name the dictionary of the training run: --dict FILE, --target-dict FILE."
            )
        facts.append(f"Tokenizer: {len(symbols):,} words of {path.name}, for text split as in the training run")
        if place == folder:
            save(folder, model, translation.make_tokenizer(symbols, config.max_position_embeddings), "")
        elif not shared:
            translation.make_tokenizer(symbols, config.max_position_embeddings).save_pretrained(place)
    report = translation.compare(folder, original)
    if not report.ok:
        lines = "\n".join(report.lines())
        raise UserError(f"The converted model does not compute what the checkpoint does:\n{lines}")
    described = (
        f"Model: {model.num_parameters():,} parameters; {config.num_hidden_layers} and {config.decoder_layers} layers "
        f"of width {config.hidden_size}, {config.projection_length} slots"
    )
    facts = [f"Read {original.name}", described, *facts[: 1 if shared else 2]]
    facts += [f"Tensors: {len(original.weights) - len(unused)} used, {len(unused)} unused", report.summary()]
    name = options.target.resolve().name
    card = make_translation_card(name, options.command, original, facts)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return facts


def cast(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Change the type of a model, and say what that changed.

    Raises:
        UserError: A number is too large for the type.
    """
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"`{name}` has numbers that {name_of(dtype)} cannot hold. Choose another --dtype.")
    changed = sum(not torch.equal(before[name].double(), new.double()) for name, new in model.named_parameters())
    return f"Stored in {name_of(dtype)}: {changed} of {len(before)} tensors were rounded."


def name_of(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def describe(original: Original, head: Head, model: PreTrainedModel, unused: list[str], tokenizer: str) -> list[str]:
    """What was found in the checkpoint and what became of it, a line each."""
    config, options = model.config, original.options
    types = Counter(name_of(tensor.dtype) for tensor in original.weights.values())
    norm = "weights less 1, to which 1 was added" if original.norm_offset else "plain weights"
    source = "detected" if original.norm_detected else "given"
    lines = [
        f"Read {original.name} ({', '.join(types)}; architecture {options.arch or 'unnamed'})",
        f"Model: {type(model).__name__}, {model.num_parameters():,} parameters in {name_of(model.dtype)}; "
        f"{config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"{config.projection_length} slots ({'dynamic' if config.dynamic_projection else 'fixed'} projection), key and "
        f"value {'tied' if config.tie_kv else 'untied'}, {config.max_position_embeddings:,} positions",
        f"LayerNorm: {norm} ({source}; median mean {original.norm_mean:.2f})",
        f"Tensors: {len(original.weights) - len(unused)} used, {len(unused)} unused"
        + (f" ({', '.join(unused)})" if unused else ""),
    ]
    if head.classifier:
        names = ", ".join(config.id2label.values()) if head.kind == "classification" else head.kind
        lines.append(f"Head: {head.part} ({_describe(original, head.part)}; {names})")
    if original.labels and head.kind == "classification" and not head.labels:
        lines.append("Classes: without names, because label/dict.txt has another number of classes than the head")
    if original.left_out:
        lines.append(f"Left out: {', '.join(original.left_out)}")
    if original.assumed:
        given = ", ".join(f"{name} {getattr(options, name)}" for name in original.assumed)
        lines.append(f"Not in the file, so the authors' defaults apply: {given}")
    if OUTPUT in original.weights and not options.untie_weights_luna and not original.is_tied():
        lines.append("Output layer: kept separate, although the arguments tie it to the token embedding")
    return [*lines, f"Tokenizer: {tokenizer}"]


def convert_tokenizer(options: argparse.Namespace) -> None:
    """Write the tokenizer of a dictionary alone.

    Raises:
        UserError: transformers already has it, there is no dictionary, or an option applies to models only.
    """
    for name in ("checkpoint", "head", "head_type", "labels", "layer_norm", "dtype", "override"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} does not apply to a tokenizer alone. Leave it out.")
    source = options.source
    if not source.is_dir() and source.suffix != ".txt":
        raise UserError(f"With --tokenizer-only, SOURCE must be a folder with dict.txt, or that file, not {source}.")
    dictionary = find_dictionary(options.dict or source, None, str(source))
    if is_roberta(read_dictionary(dictionary)):
        raise UserError(
            f"{portable(dictionary)} is RoBERTa's own dictionary. Use its tokenizer: "
            'AutoTokenizer.from_pretrained("FacebookAI/roberta-base").'
        )
    has_bpe = any((dictionary.parent / name).is_file() for name in BPE_NAMES)
    bpe = options.gpt2_bpe or (str(dictionary.parent) if has_bpe else GPT2)
    with writing(options.target) as folder:
        tokenizer, kind = make_tokenizer(dictionary, bpe)
        tokenizer.save_pretrained(folder)
        write_vocabulary(tokenizer, folder)
        card = make_tokenizer_card(options.target.resolve().name, options.command, kind)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"Tokenizer: {kind}")
    print(f"Written to {options.target}. Load it with AutoTokenizer.from_pretrained.")


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: convert(parse(sys.argv[1:] if words is None else words)))


if __name__ == "__main__":
    sys.exit(main())
