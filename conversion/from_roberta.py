"""What `roberta_to_abc.py` and `roberta_to_luna.py` run: from a trained encoder's checkpoint to one of this package.

The model itself is made by `luna_hf.warm_start`; here stand the command line, the tokenizer, the card and the folder.
"""

import argparse
import shlex
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError
from next_steps import next_steps
from shared import (
    ROOT,
    Parser,
    UserError,
    check_target,
    find,
    load_tokenizer,
    portable,
    run_script,
    save,
    writing,
)
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import FAMILIES
from luna_hf.memory_control import ACTIVATIONS, CONTROLS
from luna_hf.warm_start import WarmStart, warm_start
from luna_hf.warm_start_source import read_config

TEMPLATE = ROOT / "model_cards" / "converted.md"
# Of a text, this much is read for Luna's packed sequence: far more than it has slots.
TEXT_CHARACTERS = 1_000_000


# ---- what the two families differ in ----


class Conversion:
    """A family's part of the command line."""

    model_type: str
    script: str
    recipe: str  # its recipes for transfer and continued training begin with this
    own: tuple[str, ...]  # fields of the config that are options

    def __init__(self) -> None:
        family = FAMILIES[self.model_type]
        self.model_class, self.config_class, self.rules = family.masked_lm, family.config, family.warm_start

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the family's own options, named after fields of its config."""
        raise NotImplementedError

    def extra(self, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """What `warm_start` takes for this family besides fields of the config.

        Raises:
            UserError: It cannot be had.
        """
        given = {name: getattr(options, name) for name in self.rules.options()}
        return {name: value for name, value in given.items() if value is not None}

    def check(self, options: argparse.Namespace, source: PreTrainedConfig) -> None:
        """Refuse options that would change nothing.

        Raises:
            UserError: An option, and what it is for.
        """

    def is_alike(self, source: PreTrainedConfig, config: PreTrainedConfig, made: WarmStart) -> bool:
        """Whether the converted model attends as the source does."""
        return False

    def note(self, source: PreTrainedConfig, config: PreTrainedConfig, made: WarmStart, name: str) -> str:
        """What to know about the converted model, in a sentence; `name` is the source's."""
        raise NotImplementedError


class AbcConversion(Conversion):
    """To ABC."""

    model_type, script, recipe = "abc_memory", "roberta_to_abc.py", "abc"
    own = (
        *("memory_control", "memory_size", "control_activation", "share_control", "control_seed"),
        *("cluster_iterations", "conv_kernel_size"),
    )
    # Options that some controls have no use for.
    controls = {
        "memory_size": tuple(control for control in CONTROLS if control != "full"),
        "control_activation": ("mlp",),
        "share_control": ("mlp", "linformer", "random"),
        "control_init": ("mlp", "linformer"),
        "control_seed": ("random",),
        "cluster_iterations": ("cluster",),
    }

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the family's own options, named after fields of its config."""
        add = parser.add_argument
        add("--memory-control", choices=CONTROLS, help=f"how the memory is written {_default('mlp')}")
        add("--memory-size", type=int, metavar="M", help=f"of all but full: slots of every head {_default('64')}")
        add(
            "--control-activation",
            choices=ACTIVATIONS,
            help="of mlp; relu and sigmoid are the paper's ablations, and start at random " + _default("exp"),
        )
        add(
            "--control-per-layer",
            dest="share_control",
            action="store_false",
            default=None,
            help="of mlp, linformer and random: a control for every layer, not one for all",
        )
        add(
            "--control-init",
            choices=("attention", "random"),
            help="of mlp and linformer: start as the source's own attention from evenly spread positions, or at random "
            "as in the paper (default: attention)",
        )
        add("--control-seed", type=int, metavar="N", help=f"of random: chooses the slots {_default('0')}")
        add("--cluster-iterations", type=int, metavar="N", help=f"of cluster: steps of k-means {_default('2')}")

    def check(self, options: argparse.Namespace, source: PreTrainedConfig) -> None:
        """Refuse options that would change nothing.

        Raises:
            UserError: An option, and the controls it is for.
        """
        control = options.memory_control or getattr(source, "memory_control", self.config_class().memory_control)
        for name, controls in self.controls.items():
            if getattr(options, name) is not None and control not in controls:
                whose = "" if options.memory_control else " (--memory-control chooses another)"
                raise UserError(
                    f"{_flag(name)} is an option of {_listed(controls)}, and without effect on {control}{whose}: leave "
                    "it out."
                )

    def is_alike(self, source: PreTrainedConfig, config: PreTrainedConfig, made: WarmStart) -> bool:
        """Whether the converted model attends as the source does."""
        if "full" in (theirs := getattr(source, "memory_control", "full"), config.memory_control):
            return theirs == config.memory_control
        fields = [name for name in self.own if name != "conv_kernel_size"]  # a new one is zero
        same = all(getattr(source, name) == getattr(config, name) for name in fields)
        return same and not any("control." in name for name in made.new)

    def note(self, source: PreTrainedConfig, config: PreTrainedConfig, made: WarmStart, name: str) -> str:
        """What to know about the converted model, in a sentence; `name` is the source's."""
        reads, before = _reads(config), _reads(source)
        if self.is_alike(source, config, made):
            return f"Its attention reads {reads}, as that of {name}, so it computes what {name} computes."
        if reads == before:
            return f"Its attention reads {reads}, by another control than {name}: it has to be trained on before use."
        return f"Its attention reads {reads} where that of {name} read {before}: it has to be trained on before use."


def _reads(config: PreTrainedConfig) -> str:
    control = getattr(config, "memory_control", "full")
    return "all tokens" if control == "full" else f"{config.memory_size} slots a head (`{control}`)"


def _default(value: str) -> str:
    return f"(default: {value}, or an ABC source's own)"


def _flag(name: str) -> str:
    return "--control-per-layer" if name == "share_control" else f"--{name.replace('_', '-')}"


def _listed(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


class LunaConversion(Conversion):
    """To Luna."""

    model_type, script, recipe = "luna", "roberta_to_luna.py", "luna"
    own = ("projection_length", "num_projected_attention_heads", "conv_kernel_size")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the family's own options, named after fields of its config."""
        add = parser.add_argument
        add(
            "--projection-length",
            type=int,
            metavar="L",
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

    def note(self, source: PreTrainedConfig, config: PreTrainedConfig, made: WarmStart, name: str) -> str:
        """What to know about the converted model, in a sentence; `name` is the source's."""
        return (
            f"Its tokens read {config.projection_length} packed slots where those of {name} read {_reads(source)}: "
            "it has to be trained on before use."
        )


# ---- the command line ----


def parse(conversion: Conversion, description: str, words: list[str] | None) -> argparse.Namespace:
    """The options of a script, whose help begins with `description`.

    Raises:
        UserError: A word that is no option, or a value of another type.
    """
    parser = Parser(
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
        help="add a convolution of K taps beside every attention, which starts as zero; odd, for example 5 "
        + _default("none"),
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
        parts += [_flag(name)] if name == "share_control" else [_flag(name), portable(str(value))]
    return shlex.join(["python", f"conversion/{conversion.script}", *parts])


# ---- tokenizer and card ----


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
    conversion: Conversion,
    options: argparse.Namespace,
    source_config: PreTrainedConfig,
    model: PreTrainedModel,
    made: WarmStart,
    notes: list[str],
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
        note=conversion.note(source_config, model.config, made, f"`{source}`"),
        longest=f"{model.config.max_position_embeddings:,}",
        license_note=license_note,
        notes="".join(f"- {note}\n" for note in notes),
        command=command(conversion, options),
        report="\n".join(made.lines()),
    )


# ---- all of it ----


def convert(conversion: Conversion, options: argparse.Namespace) -> None:
    """Make the model, write it, and print what became of every parameter.

    Raises:
        UserError: Something in the options, in the source or at the target that the user can mend.
    """
    check_target(options.target, options.source, options.overwrite)
    try:
        source_config = read_config(options.source)
    except ValueError as error:
        raise UserError(str(error)) from error
    conversion.check(options, source_config)
    tokenizer = load_tokenizer(options.source)
    own = {name: value for name in conversion.own if (value := getattr(options, name)) is not None}
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
    if tokenizer is not None:
        check_tokenizer(tokenizer, model.config, options.source)
        tokenizer.model_max_length = model.config.max_position_embeddings
    notes = make_notes(conversion, model, made, tokenizer)
    card = make_card(conversion, options, source_config, model, made, notes)
    with writing(options.target) as folder:
        save(folder, model, tokenizer, card)
    print("\n".join([*made.lines(), "", *(f"Note: {note}" for note in notes)]))
    longest = model.config.max_position_embeddings
    print(f"Written to {options.target}: {model.num_parameters():,} parameters, inputs of up to {longest:,} tokens.")
    print(conversion.note(source_config, model.config, made, options.source))
    alike, names = conversion.is_alike(source_config, model.config, made), dict(model.named_parameters())
    for line in next_steps(conversion.recipe, options.source, str(options.target), names, made.new, alike):
        print(line)


def make_notes(
    conversion: Conversion, model: PreTrainedModel, made: WarmStart, tokenizer: PreTrainedTokenizerBase | None
) -> list[str]:
    """What the user should know besides, for the card and the terminal."""
    notes, config = [], model.config
    if tokenizer is None:
        notes.append("The source has no tokenizer files: put the tokenizer's beside the model.")
    if "lm_head.dense.weight" in made.new:
        notes.append("The source has no masked-LM head: the new one is untrained.")
    name, longest = conversion.rules.slots_field(config), config.max_position_embeddings
    slots = getattr(config, name) if name else 0
    if slots > longest:
        notes.append(
            f"`{name}` is {slots:,}, but inputs are at most {longest:,} tokens long: the memory costs more than "
            "attention to all of them."
        )
    return notes


def main(conversion: Conversion, description: str, words: list[str] | None = None) -> int:
    """Run a script; 0, or 2 for something the user can mend."""
    return run_script(lambda: convert(conversion, parse(conversion, description, words)))
