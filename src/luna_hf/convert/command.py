"""Convert a trained encoder so that it reads long texts in linear time, without any training.

    python -m luna_hf convert sentence-transformers/all-MiniLM-L6-v2 outputs/minilm-8192

SOURCE is a folder or Hub name of a BERT, RoBERTa, XLM-R, DistilBERT or ELECTRA, or of a sentence-transformers model
of one. TARGET becomes the same kind of folder, which loads without this package. The table shows how close the result
is to its source, and how fast.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel, PreTrainedModel

from ..families.abc.modeling import AbcForMaskedLM, AbcModel
from ..families.warm_start_rules import LoadedSource
from ..ops.dispatch import SLOW_CPU_DTYPES
from ..registry import FAMILIES
from ..scripting import (
    Parser,
    UserError,
    describe_run,
    load_tokenizer,
    portable,
    progress,
    quiet,
    run_script,
    write_json,
    writing,
)
from ..warm_start.sentence_folder import SentenceFolder, find_transformer, read_sentence_folder
from ..warm_start.source import load_source, read_config
from ..warm_start.transfer import WarmStart, warm_start
from . import report
from .card import make_card
from .files import check_target, check_tokenizer, is_module
from .report import Encoder, Figure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


COMMAND = "luna_hf convert"

DEFAULT_LENGTH = 8192

# Beyond, softmax attention takes longer than window and selected tokens do.
MOST_SOFTMAX = 512

# Fields of the config that are options, with their help.
FIELDS = {
    "local_window": "neighbouring tokens that each token reads",
    "num_selected_tokens": "tokens of the whole text that each head selects and reads",
    "memory_size": "number of means that stand for all other tokens",
    "softmax_length": "texts of up to this many tokens are read as the source reads them (default: all that it reads, "
    f"at most {MOST_SOFTMAX})",
    "position_period": "number of positions after which they repeat (default: as many as the source reads)",
}

# Of a tokenizer: what the source's last call left in its files.
_CALL_SETTINGS = ("max_length", "stride", "truncation", "truncation_strategy", "padding", "pad_to_multiple_of")


# ---- the command line ----


def layers(text: str) -> list[int] | str:
    """The value of `--full_attention_layers`."""
    return text if text == "all" else [int(number) for number in text.split(",")]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: An unknown option, or a value of the wrong type.
    """
    parser = Parser(
        prog=f"python -m {COMMAND}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, preset = parser.add_argument, AbcModel.config_class.presets["selected"]
    add("source", metavar="SOURCE", help="folder or Hub name of a trained encoder")
    add("target", metavar="TARGET", type=Path, help="folder to write; must be new or empty")
    add("--max_length", type=int, metavar="TOKENS", help=f"longest input (default: {DEFAULT_LENGTH})")
    for name, about in FIELDS.items():
        default = f" (default: {preset[name]})" if name in preset else ""
        add(f"--{name}", type=int, metavar="N", help=about + default)
    add(
        "--full_attention_layers",
        type=layers,
        metavar="LAYERS",
        help="layers that keep softmax attention, in quadratic time: `all`, or numbers from 0, such as 0,5",
    )
    add("--dtype", metavar="NAME", help="of the weights, such as bfloat16 (default: the source's)")
    add("--texts", type=Path, metavar="FILE", help="UTF-8 text to measure on (default: English novels)")
    add("--no_measure", action="store_true", help="convert only")
    add("--allow_pickle", action="store_true", help="read weights from a pickle, which can run code")
    add("--overwrite", action="store_true", help="replace TARGET if an earlier conversion wrote it")
    options = parser.parse_args(words)
    options.words = [word for word in words if word != "--overwrite"]
    return options


# ---- the source ----


@dataclass(frozen=True)
class Source:
    """What is converted.

    Args:
        loaded: its weights.
        tokenizer: its tokenizer, see `make_plain`.
        sentences: what sentence-transformers stores beside them, or `None` for a plain model.
    """

    loaded: LoadedSource
    tokenizer: "PreTrainedTokenizerBase"
    sentences: SentenceFolder | None

    @property
    def longest(self) -> int:
        """How many tokens of a text it reads."""
        longest = self.sentences and self.sentences.longest
        return min(longest, self.loaded.longest) if longest else self.loaded.longest

    @property
    def kind(self) -> str:
        """What the result is for: one of `card.KINDS`."""
        has_head = "lm_head.dense.weight" in self.loaded.tensors
        return "sentences" if self.sentences else "masked words" if has_head else "states"


def read_source(options: argparse.Namespace) -> Source:
    """Read everything, before anything is converted.

    Raises:
        ValueError: A part is missing, or cannot be read or converted.
    """
    name = options.source
    sentences, config = read_sentence_folder(name), read_config(name)
    if config.model_type in FAMILIES:
        raise UserError(f"{name} is a model of this package already. Name the encoder that it was made from.")
    tokenizer = load_tokenizer(name, required=True, subfolder=find_transformer(name))
    check_tokenizer(tokenizer, config, name)
    return Source(load_source(name, options.allow_pickle), tokenizer, sentences)


def make_plain(tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
    """Let a tokenizer cut and pad only when asked, whatever its files say; and cut at `max_length`."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    for name in _CALL_SETTINGS:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.model_max_length = max_length


# ---- converting and measuring ----


def make_model(source: Source, options: argparse.Namespace) -> tuple[PreTrainedModel, WarmStart]:
    """The converted model, and what became of every parameter.

    Raises:
        ValueError: An option has a wrong value, or the source cannot be converted.
    """
    chosen = {name: getattr(options, name) for name in (*FIELDS, "full_attention_layers")}
    given = {name: value for name, value in chosen.items() if value is not None}
    # Nothing is selected without a window, nor does a text select all its tokens.
    selected = {"num_selected_tokens": 0} if given.get("local_window") == 0 else {}
    selects = {**selected, **given}.get("num_selected_tokens") != 0
    own = {"position_period": source.longest, "softmax_length": min(source.longest, MOST_SOFTMAX) if selects else 0}
    if source.sentences and source.sentences.pooling == "mean":
        own["classifier_pooling"] = "mean"  # what the states have been trained for
    return warm_start(
        AbcForMaskedLM if source.kind == "masked words" else AbcModel,
        source.loaded,
        preset="selected",
        max_length=max(DEFAULT_LENGTH, source.loaded.longest) if options.max_length is None else options.max_length,
        dtype=options.dtype,
        **{**selected, **own, **given},
    )


def read_texts(path: Path | None) -> list[str]:
    """The texts to measure on.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return report.shipped_texts() if path is None else [path.read_text(encoding="utf-8-sig")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--texts {path} cannot be read as UTF-8 text ({error}).") from error


def compare(source: Source, model: PreTrainedModel, texts: list[str], options: argparse.Namespace) -> list[Figure]:
    """Compare a converted model with its source, in the same dtype, on the CPU.

    Raises:
        UserError: The texts are too short.
    """
    dtype, tokenizer = measured_dtype(model), source.tokenizer
    with quiet():  # the source's head is not loaded
        original = AutoModel.from_pretrained(options.source, subfolder=find_transformer(options.source), dtype=dtype)
    pooling, lower = (source.sentences.pooling, source.sentences.lower) if source.sentences else ("mean", False)
    ours, theirs = (
        Encoder(encoder.eval(), pooling, *report.special_tokens(tokenizer), tokenizer.pad_token_id)
        for encoder in (model.base_model.to(dtype), original)
    )
    ids = report.read_ids(tokenizer, texts, lower)
    figures = list(report.measure(ours, theirs, ids, source.longest, model.config.max_position_embeddings))
    if not figures:
        raise UserError(f"--texts {options.texts} is too short. Name a file with at least a page of text.")
    return figures


def measured_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of both models while they are compared: float32 where this CPU only emulates the result's."""
    return torch.float32 if model.dtype in {*SLOW_CPU_DTYPES, torch.float16} else model.dtype


# ---- writing ----


def save(folder: Path, source: Source, model: PreTrainedModel) -> None:
    """Write weights, config, code and tokenizer, and what sentence-transformers needs."""
    longest = model.config.max_position_embeddings
    make_plain(source.tokenizer, longest)
    model.config.sep_token_id = source.tokenizer.sep_token_id  # ends a question, which heads mark
    model.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    if source.sentences:
        source.sentences.write(folder, longest)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # safetensors makes its files readable to their owner only


def describe(
    source: Source, model: PreTrainedModel, figures: list[Figure], options: argparse.Namespace
) -> dict[str, Any]:
    """The content of `conversion.json`."""
    rounded = "" if model.dtype == source.loaded.embedding.dtype else f" up to the rounding of {model.dtype}"
    exact = min(report.exact_length(model.config), source.longest)
    words = [str(word).replace("torch.", "") for word in (measured_dtype(model), rounded)]
    explained = report.explain(figures, exact, source.longest, *words)
    if figures and source.sentences and source.sentences.has_dense:
        explained.append("The cosines are those of the pooled states, before the Dense module.")
    return {
        **describe_run("-m", [*COMMAND.split(), *options.words], "cpu"),
        "texts": portable(options.texts) if options.texts else "English novels that luna_hf ships",
        "exact_length": exact,
        "explanations": explained,
        "figures": [
            {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(figure).items()}
            for figure in figures
        ],
    }


def convert(options: argparse.Namespace) -> None:
    """Convert, measure, write, and print the table."""
    texts, target = [] if options.no_measure else read_texts(options.texts), options.target
    check_target(target, options.source, options.overwrite, f"python -m {COMMAND}", is_module)
    with writing(target) as folder:
        progress(f"reading {options.source} ...")
        try:
            source = read_source(options)
            model, made = make_model(source, options)
        except (ValueError, StrictDataclassError) as error:
            raise UserError(" ".join(str(error).split()).replace("`allow_pickle=True`", "--allow_pickle")) from error
        save(folder, source, model)
        figures = compare(source, model, texts, options) if texts else []
        facts = describe(source, model, figures, options)
        write_json(folder / "conversion.json", facts)
        card = make_card(target.resolve().name, options.source, source.kind, model.config, facts)
        (folder / "README.md").write_text(card, encoding="utf-8")
    lines, longest = [*facts["explanations"]], f"{model.config.max_position_embeddings:,}"
    if made.unused:
        names = ", ".join(line.strip() for line in made.lines("unused")[1:])
        lines.append(f"Not converted, because only heads of the source use it: {names}.")
    lines.append(f"Written to {target}: {model.num_parameters():,} parameters, inputs of up to {longest} tokens.")
    print("\n".join([*report.table_lines(figures), ""] * bool(figures) + [fill(line, 100) for line in lines]))


def main(words: Sequence[str]) -> int:
    """Run the command; see `run_script` for the exit status."""
    return run_script(lambda: convert(parse(words)))
