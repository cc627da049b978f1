"""Convert a Luna of this package to a checkpoint for the code of Luna's authors (fairseq).

    python conversion/luna_to_fairseq.py outputs/my-luna outputs/my-luna-fairseq

SOURCE is a folder or Hub name with a masked language model, a sequence classifier, a multiple-choice model or an
encoder. Writes model.pt, the dictionary and GPT-2's BPE by fairseq's names, and a README.md. Every weight is kept
bitwise, in its type, and every layer is compared with SOURCE. What the authors' model cannot express is refused.
"""

import argparse
import sys
from pathlib import Path
from string import Template
from typing import Any

import torch
from fairseq_format.checkpoint import LABELS, open_checkpoint
from fairseq_format.config import DEFAULT_HEAD, check_config, head_name, label_names, make_arguments
from fairseq_format.names import shift_norms, to_theirs
from fairseq_format.tokenizer import export_tokenizer, write_labels
from fairseq_format.verification import EXACT, compare, load
from shared import check_target, command, make_parser
from transformers import PreTrainedModel

from luna_hf.scripting import UserError, load_tokenizer, portable, run_script, writing

SCRIPT = "luna_to_fairseq.py"
MODEL_FILE = "model.pt"
# What is stored for each LayerNorm: what is subtracted from its weight, and the description.
NORMS = {"plain": (0.0, "plain weights"), "offset": (1.0, "weights less 1, for the authors' code of 2023 and later")}
# The class of the training criterion, which fairseq looks up in the checkpoint, by the criterion's name.
CRITERIA = {
    "masked_lm": "MaskedLmLoss",
    "sentence_prediction": "SentencePredictionCriterion",
    "sentence_ranking": "SentenceRankingCriterion",
}


def parse(words: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: An unknown option, or a value that is not allowed.
    """
    parser = make_parser(SCRIPT, __doc__, "folder or Hub name of a Luna")
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="name of the classification head in the checkpoint (default: the authors' name for what the head reads; "
        f"for cls the name that the model was converted from, or {DEFAULT_HEAD})",
    )
    about = "; ".join(f"{name}: {what}" for name, (_, what) in NORMS.items())
    parser.add_argument("--layer-norm", choices=NORMS, default="plain", help=f"{about} (default: plain)")
    options = parser.parse_args(words)
    options.command = command(SCRIPT, words)
    return options


def to_state(model: PreTrainedModel, head: str | None = None, norm_offset: float = 0.0) -> dict[str, Any]:
    """A fairseq checkpoint, for `torch.save`. Its tensors share the model's memory unless the offset changes them.

    Args:
        model: a Luna.
        head: name of the classification head, see `head_name`.
        norm_offset: subtracted from every LayerNorm weight: 0, or 1 for the authors' code of 2023 and later.

    Raises:
        UserError: The authors' model cannot express it.
    """
    check_config(model.config)
    part = head_name(model, head)
    arguments, weights = make_arguments(model, part), to_theirs(model.state_dict(), part)
    shifted = shift_norms(weights, -norm_offset)
    # fairseq reads the last entry. No optimizer has this name, so resuming requires --reset-optimizer.
    history = {"optimizer_name": "none", "lr_scheduler_state": {"best": None}, "num_updates": 0}
    return {
        "args": argparse.Namespace(**arguments),
        "model": {name: shifted[name].to(tensor.dtype).cpu() for name, tensor in weights.items()},
        "optimizer_history": [{"criterion_name": CRITERIA[arguments["criterion"]], **history}],
        "extra_state": {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }


def write(folder: Path, options: argparse.Namespace) -> PreTrainedModel:
    """Write fairseq's files; the model that was converted.

    Raises:
        UserError: The source cannot be read or is incomplete, or fairseq cannot express it.
    """
    model = load(options.source)[0]
    torch.save(to_state(model, options.head, NORMS[options.layer_norm][0]), folder / MODEL_FILE)
    tokenizer = load_tokenizer(options.source)
    if tokenizer is not None and len(tokenizer) != model.config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} tokens, but `vocab_size` is {model.config.vocab_size:,}, and "
            "fairseq needs one row for every token. Save the right tokenizer with the model, or remove its files."
        )
    if tokenizer is not None:
        export_tokenizer(tokenizer, folder)
    if labels := label_names(model):
        write_labels(labels, folder / LABELS)
    return model


def convert(options: argparse.Namespace) -> None:
    """Convert, write, verify, and report.

    Raises:
        UserError: The user can fix the source, the options or the target.
    """
    check_target(options.target, options.source, options.overwrite)
    with writing(options.target) as folder:  # first, because only one process may
        model = write(folder, options)
        with open_checkpoint(folder, layer_norm=options.layer_norm) as original:
            part = head_name(model, options.head)
            rounding = 100 * torch.finfo(model.dtype).eps  # of weights less 1
            report = compare(options.source, original, part, EXACT if options.layer_norm == "plain" else rounding)
        if not report.ok:
            lines = "\n".join(report.lines())
            raise UserError(f"The checkpoint does not compute what {options.source} does:\n{lines}")
        template = Path(__file__).with_name("to_fairseq.md").read_text(encoding="utf-8")
        card = Template(template).substitute(
            name=options.target.resolve().name,
            source=portable(options.source),
            command=options.command,
            norms=NORMS[options.layer_norm][1],
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"Read {options.source}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}")
    print(f"Head: {part or 'none'}. LayerNorm: {NORMS[options.layer_norm][1]}.")
    print(report.summary())
    print(f"Written to {options.target}: {', '.join(files)}. It has not been run in fairseq; README.md says how.")


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: convert(parse(sys.argv[1:] if words is None else words)))


if __name__ == "__main__":
    sys.exit(main())
