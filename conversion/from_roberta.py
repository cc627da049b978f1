"""What `roberta_to_abc.py` and `roberta_to_luna.py` run: from a trained encoder's checkpoint to one of this package.

The model itself is made by `luna_hf.warm_start`; here stand the command line, the tokenizer, the card and the folder.
"""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from string import Template
from typing import Any, NoReturn

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from luna_hf import AbcConfig, AbcForMaskedLM, LunaConfig, LunaForMaskedLM
from luna_hf.memory_control import ACTIVATIONS, CONTROLS
from luna_hf.warm_start import WarmStart, warm_start

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "model_cards" / "converted.md"
# Of a text, this much is read for Luna's packed sequence: far more than it has slots.
TEXT_CHARACTERS = 1_000_000
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "sentencepiece.bpe.model"),
    *("spiece.model", "special_tokens_map.json"),
)


class UserError(ValueError):
    """Something the user can mend; printed without a traceback."""


# ---- what the two families differ in ----


class Conversion:
    """A family's part of the command line."""

    script: str
    recipe: str  # its recipes for transfer and continued training begin with this
    model_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    own: tuple[str, ...]  # fields of the config that are options

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the family's own options, named after fields of its config."""
        raise NotImplementedError

    def extra(self, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """What `warm_start` takes for this family besides fields of the config.

        Raises:
            UserError: It cannot be had.
        """
        raise NotImplementedError

    def note(self, model: PreTrainedModel, source: str) -> str:
        """What to know about the converted model, in a sentence."""
        raise NotImplementedError


class AbcConversion(Conversion):
    """To ABC."""

    script, recipe = "roberta_to_abc.py", "abc"
    model_class, config_class = AbcForMaskedLM, AbcConfig
    own = (
        *("memory_control", "memory_size", "control_activation", "share_control", "control_seed"),
        *("cluster_iterations", "conv_kernel_size"),
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the family's own options, named after fields of its config."""
        add = parser.add_argument
        add("--memory-control", choices=CONTROLS, default="mlp", help="how the memory is written (default: mlp)")
        add("--memory-size", type=int, metavar="M", default=64, help="slots of every head (default: 64)")
        add(
            "--control-activation",
            choices=ACTIVATIONS,
            default="exp",
            help="of mlp; relu and sigmoid are the paper's ablations (default: exp)",
        )
        add(
            "--control-per-layer",
            dest="share_control",
            action="store_false",
            help="of mlp, linformer and random: a control for every layer, not one for all",
        )
        add(
            "--control-init",
            choices=("attention", "random"),
            help="of mlp and linformer: start as the source's own attention from evenly spread positions, or at random "
            "as in the paper (default: attention)",
        )
        add("--control-seed", type=int, metavar="N", default=0, help="of random: chooses the slots (default: 0)")
        add("--cluster-iterations", type=int, metavar="N", default=2, help="of cluster: steps of k-means (default: 2)")

    def extra(self, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """How the control starts."""
        return {} if options.control_init is None else {"control_init": options.control_init}

    def note(self, model: PreTrainedModel, source: str) -> str:
        """What to know about the converted model, in a sentence."""
        config = model.config
        if config.memory_control == "full":
            return f"It attends to all tokens (`full`), so it computes what {source} computes."
        return (
            f"Its attention reads {config.memory_size} slots a head (`{config.memory_control}`) where that of {source} "
            "read all tokens: it has to be trained on before use."
        )


class LunaConversion(Conversion):
    """To Luna."""

    script, recipe = "roberta_to_luna.py", "luna"
    model_class, config_class = LunaForMaskedLM, LunaConfig
    own = ("projection_length", "num_projected_attention_heads", "conv_kernel_size")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the family's own options, named after fields of its config."""
        add = parser.add_argument
        add(
            "--projection-length",
            type=int,
            metavar="L",
            default=128,
            help="slots of the packed sequence (default: 128)",
        )
        add(
            "--num-projected-attention-heads",
            type=int,
            metavar="H",
            help="heads of the pack attention (default: the source's, to which its queries and keys were trained)",
        )
        add(
            "--text",
            type=Path,
            metavar="FILE",
            help="plain text, UTF-8, whose tokens the packed sequence is made from (the first million characters are "
            "read; default: tokens are drawn from the vocabulary, by Zipf's law where it goes from frequent to rare)",
        )

    def extra(self, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """The token ids that the packed sequence is made from, if a text was given.

        Raises:
            UserError: The text cannot be read, or there is no tokenizer.
        """
        if options.text is None:
            return {}
        if tokenizer is None:
            raise UserError(f"--text needs a tokenizer, and there is none at {options.source}. Leave it out.")
        try:
            with open(options.text, encoding="utf-8") as file:
                text = file.read(TEXT_CHARACTERS)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {options.text} cannot be read as UTF-8 text ({error}).") from error
        return {"slot_tokens": tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]}

    def note(self, model: PreTrainedModel, source: str) -> str:
        """What to know about the converted model, in a sentence."""
        return (
            f"Its tokens read {model.config.projection_length} packed slots where those of {source} read all tokens: "
            "it has to be trained on before use."
        )


# ---- the command line ----


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def parse(conversion: Conversion, description: str, words: list[str] | None) -> argparse.Namespace:
    """The options of a script, whose help begins with `description`.

    Raises:
        UserError: A word that is no option, or a value of another type.
    """
    parser = _Parser(
        prog=f"python conversion/{conversion.script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source", metavar="SOURCE", help="folder or Hub name of a RoBERTa, XLM-R, CamemBERT, data2vec-text, BERT or ABC"
    )
    add("target", metavar="TARGET", type=Path, help="folder to write; it must be new or empty")
    conversion.add_options(parser)
    add(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help="longest input, if more than the source's: its positions are repeated (default: the source's)",
    )
    add(
        "--conv-kernel-size",
        type=int,
        metavar="K",
        default=0,
        help="add a convolution of K taps beside every attention, which starts as zero; odd, for example 5 (default: "
        "none)",
    )
    add("--seed", type=int, metavar="N", default=0, help="of everything that is new (default: 0)")
    add("--overwrite", action="store_true", help="replace TARGET if an earlier conversion wrote it")
    return parser.parse_args(words)


def command(conversion: Conversion, options: argparse.Namespace) -> str:
    """The command that makes the same model, without the folders of this machine."""
    parts = [portable(options.source), portable(str(options.target))]
    for name, value in sorted(vars(options).items()):
        if name in ("source", "target", "overwrite") or value is None:
            continue
        if name == "share_control":
            parts += [] if value else ["--control-per-layer"]
        else:
            parts += [f"--{name.replace('_', '-')}", portable(str(value))]
    return shlex.join(["python", f"conversion/{conversion.script}", *parts])


def portable(text: str) -> str:
    """A path without the machine it is on: relative to the repository if inside it, else its last part."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


# ---- tokenizer and card ----


def find(source: str, name: str) -> str | None:
    """The path of a file of a folder or Hub name; `None` if it is not there."""
    return cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or Hub name; `None` if it has none.

    Raises:
        UserError: It has files of a tokenizer that cannot be read, or too few of them.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer, reason = AutoTokenizer.from_pretrained(source), "its vocabulary is missing"
    except Exception as error:  # tokenizer files fail in many ways, all of them the user's to mend
        tokenizer, reason = None, (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    finally:
        logging.set_verbosity(verbosity)
    # Without files, transformers makes an empty one.
    if tokenizer is not None and len(tokenizer) > len(tokenizer.all_special_ids):
        return tokenizer
    try:
        present = [name for name in TOKENIZER_FILES if find(source, name)]
    except (OSError, ValueError):  # no such source, which loading the model says better
        return None
    if present:
        raise UserError(f"The tokenizer at {source} ({present[0]}) cannot be read: {reason}.")
    return None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, source: str) -> None:
    """Refuse a tokenizer that does not fit the model.

    Raises:
        UserError: More tokens than rows, or another padding token.
    """
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer at {source} has {len(tokenizer):,} tokens, but the model {config.vocab_size:,}: they do "
            "not belong together."
        )
    if tokenizer.pad_token_id != config.pad_token_id:
        raise UserError(
            f"The tokenizer at {source} pads with token {tokenizer.pad_token_id}, but the model takes token "
            f"{config.pad_token_id} for padding: they do not belong together."
        )


def source_card(source: str) -> ModelCardData:
    """The metadata of the source's own card, empty if it has none."""
    try:
        path = find(source, "README.md")
        return ModelCard.load(path, ignore_metadata_errors=True).data if path else ModelCardData()
    except (OSError, ValueError):  # no card that can be read
        return ModelCardData()


def make_card(
    conversion: Conversion, options: argparse.Namespace, model: PreTrainedModel, made: WarmStart, notes: list[str]
) -> str:
    """Fill `model_cards/converted.md`."""
    source, known = portable(options.source), source_card(options.source)
    is_name = not Path(options.source).exists()
    metadata = ModelCardData(
        language=known.language,
        license=known.license,
        license_name=known.get("license_name"),
        license_link=known.get("license_link"),
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=[model.config.model_type, "masked-lm", "linear-attention", "custom_code"],
        base_model=options.source if is_name else None,
    )
    if known.license:
        license_note = f"The licence is that of the source's card: `{known.license}`."
    else:
        license_note = "The source's card states no licence: ask its authors before you pass the model on."
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        metadata=metadata.to_yaml(),
        model_name=options.target.resolve().name,
        model_type=model.config.model_type,
        parameters=f"{model.num_parameters():,}",
        source=source,
        note=conversion.note(model, f"`{source}`"),
        longest=f"{model.config.max_position_embeddings:,}",
        license_note=license_note,
        notes="".join(f"- {note}\n" for note in notes),
        command=command(conversion, options),
        report="\n".join(made.lines()),
    )


# ---- the folder ----


def check_target(target: Path, source: str, overwrite: bool) -> None:
    """Refuse a folder that holds anything but an earlier conversion that may be replaced.

    Raises:
        UserError: What it holds, and what to do.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"TARGET {target} is a file. Name a folder.")
    if Path(source).exists() and target.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise UserError(f"TARGET {target} is SOURCE, or holds it. Name another folder.")
    present = sorted(target.iterdir()) if target.exists() else []
    if not present:
        return
    card = target / "README.md"
    converted = card.is_file() and "conversion/roberta_to_" in card.read_text(encoding="utf-8", errors="replace")
    if not converted or any(path.is_dir() for path in present):
        raise UserError(
            f"TARGET {target} holds files that no conversion wrote ({present[0].name}). Name another folder."
        )
    if not overwrite:
        raise UserError(
            f"TARGET {target} holds an earlier conversion. Name another folder, or replace it (--overwrite)."
        )


def write(target: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, card: str) -> None:
    """Write the checkpoint beside its place and move it there when it is complete.

    Raises:
        UserError: The disk does not take it.
    """
    unfinished, earlier = (target.parent / f".{target.name}.{word}-{os.getpid()}" for word in ("unfinished", "earlier"))
    try:
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        if target.exists():
            target.rename(earlier)
        unfinished.rename(target)
    except OSError as error:
        raise UserError(f"TARGET {target} cannot be written ({error.strerror or error}).") from error
    finally:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        for leftover in (unfinished, earlier):
            shutil.rmtree(leftover, ignore_errors=True)


# ---- all of it ----


def convert(conversion: Conversion, options: argparse.Namespace) -> None:
    """Make the model, write it, and print what became of every parameter.

    Raises:
        UserError: Something in the options, in the source or at the target that the user can mend.
    """
    check_target(options.target, options.source, options.overwrite)
    tokenizer = load_tokenizer(options.source)
    own = {name: getattr(options, name) for name in conversion.own}
    try:
        model, made = warm_start(
            conversion.model_class,
            options.source,
            max_length=options.max_length,
            seed=options.seed,
            **conversion.extra(options, tokenizer),
            **own,
        )
    except (ValueError, StrictDataclassError) as error:
        raise UserError(str(error)) from error
    notes = []
    if tokenizer is None:
        notes.append("The source has no tokenizer files: put the tokenizer's beside the model.")
    else:
        check_tokenizer(tokenizer, model.config, options.source)
        tokenizer.model_max_length = model.config.max_position_embeddings
    if "lm_head.dense.weight" in made.new:
        notes.append("The source has no masked-LM head: the new one is untrained.")
    write(options.target, model, tokenizer, make_card(conversion, options, model, made, notes))
    print("\n".join([*made.lines(), "", *(f"Note: {note}" for note in notes)]))
    longest = model.config.max_position_embeddings
    print(f"Written to {options.target}: {model.num_parameters():,} parameters, inputs of up to {longest:,} tokens.")
    print("\n".join([conversion.note(model, options.source), *next_steps(conversion, options, model)]))


def next_steps(conversion: Conversion, options: argparse.Namespace, model: PreTrainedModel) -> list[str]:
    """The commands that train the converted model on."""
    if getattr(model.config, "memory_control", None) == "full":
        return []
    target, fitted = str(options.target), f"{options.target}-fitted"
    words = [
        *(
            "python",
            "training/transfer_attention.py",
            f"training/recipes/transfer_attention/{conversion.recipe}-base.yaml",
        ),
        *("--teacher", options.source, "--model_name_or_path", target, "--output_dir", fitted),
    ]
    continued = [
        *(
            "python",
            "training/pretrain_mlm.py",
            f"training/recipes/pretrain_mlm/{conversion.recipe}-base-continue.yaml",
        ),
        *("--model_name_or_path", fitted, "--output_dir", f"{target}-continued"),
    ]
    return [
        "Next, fit what is new to the source's attention, then go on with masked words (`--data` names your text):",
        f"  {shlex.join(words)}",
        f"  {shlex.join(continued)}",
    ]


def main(conversion: Conversion, description: str, words: list[str] | None = None) -> int:
    """Run a script; 0, or 2 for something the user can mend."""
    try:
        convert(conversion, parse(conversion, description, words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
