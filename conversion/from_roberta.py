"""What `roberta_to_abc.py` and `roberta_to_luna.py` run: a trained encoder becomes a model of one of our families.

The options are the fields of the family's config and the options of its warm-start rules; `luna_hf.warm_start` makes
the model.
"""

import argparse
import sys
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from huggingface_hub import ModelCardData
from huggingface_hub.errors import StrictDataclassError
from shared import check_target, command, make_parser, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import FAMILIES
from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.convert.command import make_plain
from luna_hf.convert.files import check_tokenizer, source_card
from luna_hf.markdown import Markdown, bullets, code, code_block, fill, quoted
from luna_hf.scripting import UserError, load_tokenizer, portable, run_script, writing
from luna_hf.warm_start import WarmStart, warm_start
from luna_hf.warm_start.sentence_folder import find_transformer, read_sentence_folder

TRAIN = "Train the model before use, unless its attention is that of its source."
TEMPLATE = Path(__file__).with_name("converted.md")
TEXT_CHARACTERS = 1_000_000  # read from --text: far more tokens than there are slots


class Conversion:
    """A command that converts to one family.

    Args:
        model_type: the family.
        description: the command's help.
        flags: options of other names than their fields, for example the opposite of a boolean field.
    """

    def __init__(self, model_type: str, description: str | None, flags: dict[str, str] | None = None) -> None:
        family = FAMILIES[model_type]
        self.model_class, self.config_class, self.rules = family.masked_lm, family.config, family.warm_start
        self.description, self.renamed = description, flags or {}
        self.script = f"roberta_to_{self.config_class.__module__.split('.')[-2]}.py"

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Types of the config's fields that are options: the family's own, and the convolution's."""
        common = {item.name for item in fields(BoundedMemoryConfig)} - {"conv_kernel_size"}
        left_out = common | self.rules.decided.keys()
        return {item.name: item.type for item in fields(self.config_class) if item.name not in left_out}

    def flag(self, name: str) -> str:
        """The command-line option of a field or an option of the rules."""
        return self.renamed.get(name, f"--{name.replace('_', '-')}")

    def parse(self, words: list[str]) -> argparse.Namespace:
        """The command line.

        Raises:
            UserError: An unknown option, or a value of the wrong type.
        """
        source = "folder or Hub name of a RoBERTa, XLM-R, CamemBERT, data2vec-text, BERT, DistilBERT, ELECTRA or ABC"
        parser = make_parser(self.script, self.description, source)
        add = parser.add_argument
        for name, kind in self.fields.items():
            kinds, default = get_args(kind) or (kind,), getattr(self.config_class, name)
            about = f"`{name}` of the config (default: {default}, or the source's own)"
            if name in self.renamed:
                add(self.flag(name), dest=name, action="store_const", const=not default, help=about)
            elif bool in kinds:
                add(self.flag(name), action=argparse.BooleanOptionalAction, help=about)
            else:
                kind = next(kind for kind in (int, float, str) if kind in kinds)
                add(self.flag(name), type=kind, metavar="NAME" if kind is str else "N", help=about)
        for name in self.rules.options():
            if name == self.rules.text_option:
                about = f"UTF-8 text; its first million characters become `{name}`"
                add("--text", type=Path, metavar="FILE", help=about)
            else:
                add(self.flag(name), metavar="NAME", help=f"`{name}` of the family's warm start")
        about = "longest input, if longer than the source's: its positions are repeated (default: the source's)"
        add("--max-length", type=int, metavar="TOKENS", help=about)
        add("--seed", type=int, metavar="N", default=0, help="seed of everything new (default: 0)")
        add("--allow-pickle", action="store_true", help="read weights from a pickle, which can run code")
        options = parser.parse_args(words)
        options.command = command(self.script, words)
        return options

    def given(self, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """Keywords of `warm_start` that the user has chosen.

        Raises:
            UserError: The text cannot be read, or there is no tokenizer for it.
        """
        values = vars(options)
        given = {name: values[name] for name in (*self.fields, *self.rules.options()) if values.get(name) is not None}
        if (path := values.get("text")) is None:
            return given
        if tokenizer is None:
            raise UserError(f"--text needs a tokenizer, and {options.source} has none. Leave it out.")
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(TEXT_CHARACTERS)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {path} cannot be read as UTF-8 text ({error}).") from error
        return {**given, self.rules.text_option: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]}

    def main(self, words: list[str] | None = None) -> int:
        """Run the command; returns its exit status."""
        return run_script(lambda: convert(self, self.parse(sys.argv[1:] if words is None else words)))


def make_notes(slots: str | None, model: PreTrainedModel, made: WarmStart, has_tokenizer: bool) -> list[str]:
    """What else the user should know, for the card and the terminal; `slots` is the field with their number."""
    number, longest = getattr(model.config, slots) if slots else 0, model.config.max_position_embeddings
    more = f"`{slots}` is {number:,}, more than the {longest:,} tokens of the longest input, so"
    notes = {
        TRAIN: True,
        "The source has no tokenizer files. Copy its tokenizer into the folder.": not has_tokenizer,
        "The source has no masked-LM head, so the new one is untrained.": "lm_head.dense.weight" in made.new,
        f"{more} the memory costs more than full attention.": number > longest,
    }
    return [note for note, applies in notes.items() if applies]


def make_card(options: argparse.Namespace, model: PreTrainedModel, made: WarmStart, notes: list[str]) -> str:
    """Fill `converted.md`."""
    known, kind = source_card(options.source), model.config.model_type
    metadata = ModelCardData(
        **{name: known.get(name) for name in ("language", "license", "license_name", "license_link")},
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=[kind, "masked-lm", "linear-attention", "custom_code"],
        base_model=None if Path(options.source).exists() else options.source,
    )
    name = options.target.resolve().name
    return fill(
        TEMPLATE.read_text(encoding="utf-8"),
        metadata=Markdown(metadata.to_yaml()),
        model_name=name,
        quoted_name=quoted(name),
        model_type=kind,
        parameters=f"{model.num_parameters():,}",
        source=code(portable(options.source)),
        longest=f"{model.config.max_position_embeddings:,}",
        license=code(known.license) if known.license else "not stated; ask its authors before you pass the model on",
        notes=Markdown(f"{bullets(notes)}\n" if notes else ""),
        command=code(options.command),
        report=code_block("\n".join(made.lines())),
    )


def convert(conversion: Conversion, options: argparse.Namespace) -> None:
    """Make the model, write it, and report what became of every parameter.

    Raises:
        UserError: The user can fix the options, the source or the target.
    """
    check_target(options.target, options.source, options.overwrite, TEMPLATE)
    with writing(options.target) as folder:  # first, because only one process may
        try:
            sentences = read_sentence_folder(options.source)
            tokenizer = load_tokenizer(options.source, subfolder=find_transformer(options.source))
            given = conversion.given(options, tokenizer)
            own = {name: getattr(options, name) for name in ("max_length", "seed", "allow_pickle")}
            model, made = warm_start(conversion.model_class, options.source, **own, **given)
        except (ValueError, StrictDataclassError) as error:
            raise UserError(str(error).replace("`allow_pickle=True`", "--allow-pickle")) from error
        for name in given:
            if users := conversion.rules.without_effect(name, model.config):
                raise UserError(f"{conversion.flag(name)} only applies to {users}. Leave it out.")
        longest = model.config.max_position_embeddings
        if tokenizer is not None:
            check_tokenizer(tokenizer, model.config, options.source)
            make_plain(tokenizer, longest)
        save(folder, model, tokenizer)
        if sentences:
            sentences.write(folder, min(longest, (options.max_length is None and sentences.longest) or longest))
        notes = make_notes(conversion.rules.slots_field(model.config), model, made, tokenizer is not None)
        card = make_card(options, model, made, notes)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print("\n".join([*made.lines(), "", *(f"Note: {note}" for note in notes)]))
    print(f"Written to {options.target}: {model.num_parameters():,} parameters, inputs of up to {longest:,} tokens.")
