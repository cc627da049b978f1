"""Compare a converted model with the original, layer by layer.

    python conversion/verify.py outputs/luna-base luna.base.tied.zip
    python conversion/verify.py outputs/luna-base expected.safetensors

MODEL is the folder of a masked language model, of a sequence classification or multiple choice model, or of the encoder
alone. ORIGINAL is one of two things.

The authors' checkpoint (archive, folder or .pt file): rows of random ids go through the authors' model, written out in
float64 from the stored tensors (fairseq_reference.py), each row alone and without padding; and through MODEL, all rows
as one padded batch. The rows have one token, fewer tokens than the packed sequence has slots, as many, and more.
Besides, the embedding of every id and of every position is compared.

A .safetensors file of what the authors' code gave: `<case>.input.tokens` (b, n) with padding id 1,
`<case>.output.hidden.<i>.x` (b, n, d) and `.px` (b, l, d) after the embedding (0) and every layer, `.last.x`,
`.last.px`, then `.logits` (b, n, vocabulary) or `.head.<name>` (b, classes). The masks `.x_padding_mask` (b, n) and
`.px_padding_mask` (b, l) are true at padding, and absent where nothing is padded. What the original computes at padding
has no meaning and is not compared.

MODEL runs in float32, whatever it is stored in. For every layer and stream the largest difference is printed, as it is
and not relative to anything, and 1e-5 is allowed. float32 keeps 7 digits, so that a right model can be above that, too,
where numbers are large or attention is sharp. What then decides depends on ORIGINAL:

The authors' checkpoint: a second run has MODEL in float64, too. All of it has to agree to 1e-9 there (times the largest
number of a layer where that is above 1). If it does, what is above 1e-5 is float32's rounding, and the two are equal;
the table has the differences of both runs and the largest numbers. If it does not, they are not equal.

A file of outputs: its numbers are rounded already, so that float64 tells nothing. The limit of a layer is 1e-5 times
its largest number where that is above 1, and stands beside the difference. An error that is smaller than this is not
found, and a right model with sharp attention can be above it: where there is a checkpoint, compare with that.

Before that, config.json is compared with the tensors and arguments of a checkpoint, and with what is always so in the
authors' code, such as LayerNorm's epsilon. A field that contradicts them is named, and no numbers are compared.

Exit status: 0 where the two are equal, 1 where they are not, 2 where they cannot be compared.
"""

import argparse
import ast
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq_checkpoint import NORM, Original, heads, open_original
from fairseq_reference import PADDING_ID, embed_tokens, encode, run
from safetensors import SafetensorError
from safetensors.torch import load_file
from shared import Parser, UserError, run_script
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging
from verify_config import config_problems, constant_problems
from verify_report import Comparison, Mismatch, Report, counted, layer_name, listed

import luna_hf  # noqa: F401  (registers the models with the Auto classes)

SEED = 0
# Tokens of the longest row beyond the number of slots.
BEYOND_SLOTS = 32

CLASSES = {
    "LunaModel": AutoModel,
    "LunaForMaskedLM": AutoModelForMaskedLM,
    "LunaForSequenceClassification": AutoModelForSequenceClassification,
    "LunaForMultipleChoice": AutoModelForMultipleChoice,
}
HALF = (torch.float16, torch.bfloat16)
CLASSIFIERS = ("LunaForSequenceClassification", "LunaForMultipleChoice")


# ---- our model ----


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, list[str]]:
    """The model of a folder in a type and in eval mode, and what is wrong with its weights.

    Raises:
        UserError: There is none, it cannot be read, or it is not a model that the authors have.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"MODEL {folder} is not a folder with a config.json. Name what fairseq_luna.py wrote.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"The config of {folder} cannot be read: {error}") from error
    name = (config.architectures or ["unknown"])[0]
    if name not in CLASSES:
        raise UserError(
            f"{folder} holds the class {name}. The authors' code has no such model; these can be compared: "
            f"{', '.join(CLASSES)}."
        )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is a problem here
    try:
        model, info = CLASSES[name].from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"The weights of {folder} cannot be read: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    problems = [f"the folder has no weight {name}" for name in sorted(info["missing_keys"])]
    problems += [f"the model has no place for the weight {name}" for name in sorted(info["unexpected_keys"])]
    problems += [
        f"the weight {name} is {tuple(stored)}, but its config makes it {tuple(wanted)}"
        for name, stored, wanted in sorted(info["mismatched_keys"])
    ]
    return model.eval(), problems


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Tensor, keep: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Token states (b, n, d) and packed states (b, l, d) after the embedding and every layer, and the logits.

    Args:
        model: ours.
        tokens: (b, n) ids.
        keep: (b, n), True for tokens.
    """
    mask = keep.long()
    if type(model).__name__ == "LunaForMultipleChoice":
        tokens, mask = tokens.unsqueeze(1), mask.unsqueeze(1)  # one choice a question: its score is the head's output
    outputs = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True, output_packed_hidden_states=True)
    return outputs.hidden_states, outputs.packed_hidden_states, outputs.get("logits")


# ---- with the authors' checkpoint ----


def compare(folder: Path, original: Original, head: str | None = None) -> Report:
    """Compare the model of a folder with the stored tensors it was made from.

    Args:
        folder: a converted model.
        original: the authors' checkpoint.
        head: which of its heads the model has, as fairseq_luna.py names them; needed only where it cannot be told.

    Raises:
        UserError: They cannot be compared.
    """
    model, weight_problems = load(folder)
    head = choose_head(model, original, head)
    with _incomplete_told(original):
        check_attention_heads(original)
        problems = config_problems(model.config, original, head, type(model).__name__ == "LunaForMaskedLM")
    if problems := problems + weight_problems:
        return Report([], problems)
    stored = _type_name(original.weights["encoder.sentence_encoder.embed_tokens.weight"])
    original, rounded = rounded_as_stored(original, folder)
    lengths = choose_lengths(model.config.projection_length, model.config.max_position_embeddings)
    rows = random_rows(original, lengths)
    theirs = their_states(model, original, rows, head)
    report = dataclasses.replace(
        compare_all(model, original, rows, theirs, head),
        inputs=f"{counted(len(lengths), 'row')} of {listed(lengths)} random tokens, and every embedding",
        precision=f"model: float32, the rows as one padded batch; original: float64 from {stored}{rounded}, row by row",
    )
    if report.problems or report.ok or not math.isfinite(report.largest):
        return report
    # Large numbers or sharp attention can bring float32's rounding above any limit; float64 tells it from an error.
    del model  # two of them would need twice the memory
    model, _ = load(folder, torch.float64)
    if original.norm_offset:
        original = with_plain_norms(original)
        theirs = their_states(model, original, rows, head)
    return report.with_exact(compare_all(model, original, rows, theirs, head).rows)


def check_attention_heads(original: Original) -> None:
    """Refuse a number of heads that cannot be.

    Raises:
        UserError: It does not divide the width.
    """
    count = original.options.encoder_attention_heads
    width = original.weights["encoder.sentence_encoder.embed_tokens.weight"].shape[1]
    if count < 1 or width % count:
        raise UserError(
            f"{original.name} has {count} attention heads by its arguments, which do not divide its width {width}. "
            "Give the right number: --override encoder_attention_heads=N."
        )


def rounded_as_stored(original: Original, folder: Path) -> tuple[Original, str]:
    """The original with its tensors rounded to the type that a model is stored in, and what was done, in words.

    That a model of half precision was rounded from more digits, as asked or where 1 is added to a norm, is no error.
    """
    dtype = AutoConfig.from_pretrained(folder).dtype
    plain = with_plain_norms(original)
    if not isinstance(dtype, torch.dtype) or dtype not in HALF:
        return original, ""
    weights = {name: tensor.to(dtype) for name, tensor in plain.weights.items()}
    changed = sum(not torch.equal(weights[name].double(), plain.weights[name].double()) for name in weights)
    if not changed:
        return original, ""
    told = f" rounded to {_type_name(next(iter(weights.values())))}, as the model is stored ({changed} tensors change)"
    return dataclasses.replace(original, weights=weights, norm_offset=0.0), told


def with_plain_norms(original: Original) -> Original:
    """The same with the weights of the LayerNorms as a converted model can hold them.

    Where the file has them less 1, adding that to float32 rounds, which float64 would show.
    """
    if not original.norm_offset:
        return original
    plain = {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + original.norm_offset
        for name, tensor in original.weights.items()
        if NORM.search(name)
    }
    return dataclasses.replace(original, weights={**original.weights, **plain}, norm_offset=0.0)


@contextmanager
def _incomplete_told(original: Original) -> Iterator[None]:
    """Say it of the original where a tensor is missing, or where it has an activation that the authors do not have."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{original.name} has no tensor {error}.") from error
    except ValueError as error:
        raise UserError(f"{original.name}: {error}") from error


def compare_all(
    model: PreTrainedModel, original: Original, rows: list[Tensor], theirs: list[dict[str, Tensor]], head: str | None
) -> Report:
    """Rows of ids and all embeddings, with the model in whatever type it is."""
    comparison = Comparison()
    try:
        compare_rows(comparison, model, rows, theirs, head)
        compare_embeddings(comparison, model, original)
    except Mismatch as error:
        return Report([], [str(error)])
    return Report(comparison.rows(), [])


def choose_head(model: PreTrainedModel, original: Original, head: str | None) -> str | None:
    """The name of the original's head that the model has; `None` for a model without a classification head.

    Raises:
        UserError: There is none of that name, or it cannot be told which it is.
    """
    names = heads(original.weights)
    _check_head(model, head, names, original.name)
    if type(model).__name__ not in CLASSIFIERS:
        return None
    if head is not None:
        return head
    if len(names) == 1:
        return names[0]
    ours = {n: t for n, t in model.classifier.state_dict().items() if n.endswith("weight")}
    equal = [
        name
        for name in names
        if all(torch.equal(original.weights[f"classification_heads.{name}.{n}"].float(), t) for n, t in ours.items())
    ]
    if len(equal) != 1:
        raise UserError(f"{original.name} has the heads {', '.join(names)}: choose one (--head).")
    return equal[0]


def _check_head(model: PreTrainedModel, head: str | None, names: list[str], source: str) -> None:
    kind = type(model).__name__
    if kind not in CLASSIFIERS:
        if head not in (None, "lm_head" if kind == "LunaForMaskedLM" else None):
            raise UserError(f"MODEL is a {kind}, which has no head {head!r}: leave --head out.")
    elif not names:
        raise UserError(f"The model is a {kind}, but {source} has no classification head.")
    elif head is not None and head not in names:
        raise UserError(f"{source} has no head {head!r}, but {', '.join(names)}.")


def choose_lengths(slots: int, longest: int) -> list[int]:
    """One token, fewer than slots, as many, and more, as far as the positions go."""
    return sorted({min(length, longest) for length in (1, max(1, slots // 2), slots, slots + BEYOND_SLOTS)})


def random_rows(original: Original, lengths: list[int]) -> list[Tensor]:
    """Rows of ids of these lengths; any id but padding's, always the same ones."""
    usable = usable_ids(original)
    generator = torch.Generator().manual_seed(SEED)
    return [usable[torch.randint(len(usable), (length,), generator=generator)] for length in lengths]


def usable_ids(original: Original) -> Tensor:
    """Every id of the vocabulary but padding's."""
    ids = torch.arange(len(original.weights["encoder.sentence_encoder.embed_tokens.weight"]))
    return ids[ids != PADDING_ID]


def compare_rows(
    comparison: Comparison,
    model: PreTrainedModel,
    rows: list[Tensor],
    their_rows: list[dict[str, Tensor]],
    head: str | None,
) -> None:
    """Ours on all rows at once, padded to the longest; theirs row by row (`their_states`).

    Raises:
        Mismatch: States of different shapes.
    """
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING_ID)
    keep = tokens != PADDING_ID
    hidden, packed, logits = states_of(model, tokens, keep)
    for b, (row, theirs) in enumerate(zip(rows, their_rows, strict=True)):
        for i in range(len(hidden)):
            comparison.add(layer_name(i), "tokens", hidden[i][b, : len(row)], theirs[f"hidden.{i}.x"])
            px = theirs[f"hidden.{i}.px"]
            comparison.add(layer_name(i), "packed", packed[i][b, : len(px)], px)
        if head is not None:
            comparison.add(head, "", logits[b], theirs[f"head.{head}"])
        elif logits is not None:
            comparison.add("logits", "", logits[b, : len(row)], theirs["logits"])


def their_states(
    model: PreTrainedModel, original: Original, rows: list[Tensor], head: str | None
) -> list[dict[str, Tensor]]:
    """The reference on each row, without the masked-LM head where our model has none.

    Raises:
        UserError: The original is incomplete.
    """
    encoder_only = head is None and type(model).__name__ == "LunaModel"
    with _incomplete_told(original):
        return [encode(original, row) if encoder_only else run(original, row, head) for row in rows]


@torch.no_grad()
def compare_embeddings(comparison: Comparison, model: PreTrainedModel, original: Original) -> None:
    """Every id once at least, and every position: the random rows hold few of either."""
    longest = model.config.max_position_embeddings
    ids = usable_ids(original)
    for row in ids.repeat(-(-longest // len(ids))).split(longest):
        ours = model.base_model.embeddings(row.unsqueeze(0), None, None, None, None).squeeze(0)
        comparison.add("embedding", "tokens", ours, embed_tokens(original, row))


# ---- with a file of outputs ----


def compare_outputs(folder: Path, file: Path, head: str | None = None) -> Report:
    """Compare the model of a folder with outputs of the authors' code.

    Args:
        folder: a converted model.
        file: .safetensors in the layout that the head of this script describes.
        head: which of its heads, for a model with one; needed only where there are several.

    Raises:
        UserError: They cannot be compared.
    """
    model, problems = load(folder)
    tensors = read_outputs(file)
    cases = sorted(name.removesuffix(".input.tokens") for name in tensors if name.endswith(".input.tokens"))
    if not cases:
        raise UserError(f"{file} holds no `<case>.input.tokens` (see --help for the layout).")
    names = sorted({name.partition(".output.head.")[2] for name in tensors if ".output.head." in name})
    _check_head(model, head, names, str(file))
    if type(model).__name__ not in CLASSIFIERS:
        head = None
    elif head is None:
        if len(names) > 1:
            raise UserError(f"{file} has outputs of the heads {', '.join(names)}: choose one (--head).")
        head = names[0]
    if problems := constant_problems(model.config, head) + problems:
        return Report([], problems)
    comparison, lengths = Comparison(relative=True), []
    for case in cases:
        given = {n.removeprefix(f"{case}."): t for n, t in tensors.items() if n.startswith(f"{case}.")}
        try:
            lengths += compare_case(comparison, model, given, head)
        except Mismatch as error:
            return Report([], [f"{case}: {error}"])
        except KeyError as error:
            raise UserError(f"{file} holds no {case}.{error.args[0]} (see --help for the layout).") from error
    batches, rows = counted(len(cases), "batch", "es"), counted(len(lengths), "row")
    return Report(
        comparison.rows(),
        [],
        f"{batches} with {rows} of {listed(sorted(set(lengths)))} tokens",
        f"model: float32; original: outputs in {_type_name(tensors[f'{cases[0]}.output.hidden.0.x'])}",
        relative=True,
    )


def read_outputs(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read as .safetensors ({error}).") from error


def compare_case(
    comparison: Comparison, model: PreTrainedModel, given: dict[str, Tensor], head: str | None
) -> list[int]:
    """Ours and theirs on one batch; the lengths of its rows.

    Raises:
        Mismatch: Different sizes.
        KeyError: An output is missing.
    """
    tokens = given["input.tokens"].long()
    keep = _kept(given, "output.x_padding_mask", tokens != PADDING_ID)
    check_case(model.config, tokens, keep, given)
    hidden, packed, logits = states_of(model, tokens, keep)
    slots = given["output.hidden.0.px"].shape[1]
    used = _kept(given, "output.px_padding_mask", torch.ones(len(tokens), slots, dtype=torch.bool))
    states = [(layer_name(i), f"output.hidden.{i}", x, p) for i, (x, p) in enumerate(zip(hidden, packed, strict=True))]
    for layer, name, x, p in [*states, ("last", "output.last", hidden[-1], packed[-1])]:
        comparison.add(layer, "tokens", x, given[f"{name}.x"], keep)
        # The authors cut P to the longest row, we to the padded length: our further slots are never read.
        comparison.add(layer, "packed", p[:, :slots], given[f"{name}.px"], used)
    if head is not None:
        comparison.add(head, "", logits, given[f"output.head.{head}"])
    elif logits is not None:
        comparison.add("logits", "", logits, given["output.logits"], keep)
    return keep.sum(1).tolist()


def _kept(given: dict[str, Tensor], name: str, default: Tensor) -> Tensor:
    return ~given[name].bool() if name in given else default


def check_case(config: PreTrainedConfig, tokens: Tensor, keep: Tensor, given: dict[str, Tensor]) -> None:
    """Find what the model cannot take, or what would not be looked at.

    Raises:
        Mismatch: Another number of layers, too long rows, ids beyond the vocabulary.
        UserError: A row without tokens, which has no result.
    """
    if not keep.any(1).all():
        raise UserError("A row of the file has no tokens, so that the original's numbers have no meaning.")
    their_layers = sum(name.startswith("output.hidden.") and name.endswith(".x") for name in given) - 1
    if their_layers != config.num_hidden_layers:
        raise Mismatch(f"the model has {counted(config.num_hidden_layers, 'layer')}, the original {their_layers}")
    if tokens.shape[1] > config.max_position_embeddings:
        raise Mismatch(f"rows of {tokens.shape[1]} tokens, but the model takes {config.max_position_embeddings}")
    if tokens.max() >= config.vocab_size:
        raise Mismatch(f"the id {tokens.max()}, but `vocab_size` is {config.vocab_size}")


# ---- the command line ----


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options.

    Raises:
        UserError: A word that is no option, or a value that is none of those allowed.
    """
    parser = Parser(
        prog="python conversion/verify.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="folder of the converted model")
    add("original", metavar="ORIGINAL", type=Path, help="the authors' checkpoint, or a .safetensors file of outputs")
    add("--head", metavar="NAME", help="the classification head that MODEL has, where it cannot be told")
    add("--checkpoint", metavar="NAME", help="of an archive or folder with several model files: which one")
    add(
        "--layer-norm",
        choices=("plain", "offset"),
        help="what a checkpoint holds of a LayerNorm: its weights, or these less 1 (default: found out)",
    )
    add(
        "--override",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="an argument of the training run that takes the place of that in the checkpoint",
    )
    return parser.parse_args(words)


def parse_override(text: str) -> tuple[str, Any]:
    """Name and value of an argument of the training run, from `NAME=VALUE`.

    Raises:
        UserError: It has another form.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--override {text} is not of the form NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word, such as gelu
        return name, value


def check_order(model: Path, original: Path) -> None:
    """Refuse arguments in the wrong order.

    Raises:
        UserError: ORIGINAL is a model of transformers, and MODEL is there, but none.
    """
    if model.exists() and not is_converted(model) and is_converted(original):
        raise UserError(
            f"MODEL comes first and ORIGINAL second, but {original} is the converted model: "
            f"python conversion/verify.py {original} {model}"
        )


def is_converted(folder: Path) -> bool:
    """Whether it is a folder with a config of transformers; the authors' config.json names no type of model."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and "model_type" in fields


def verify(options: argparse.Namespace) -> Report:
    """Compare, and print the table.

    Raises:
        UserError: They cannot be compared.
    """
    check_order(options.model, options.original)
    if options.original.suffix == ".safetensors":
        for name in ("checkpoint", "layer_norm", "override"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is without effect on a file of outputs: leave it out.")
        report, name = compare_outputs(options.model, options.original, options.head), options.original.name
    else:
        overrides = dict(map(parse_override, options.override))
        with open_original(options.original, options.checkpoint, options.layer_norm, overrides) as original:
            report, name = compare(options.model, original, options.head), original.name
    print(f"{options.model} and {name}")
    print("\n".join(report.lines()))
    return report


def main(words: list[str] | None = None) -> int:
    """Run the script; 0, 1 where the two differ, or 2 for something the user can mend."""
    reports = []
    status = run_script(lambda: reports.append(verify(parse(words))))
    return status or int(not reports[0].ok)


if __name__ == "__main__":
    sys.exit(main())
