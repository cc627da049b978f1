"""Convert a Luna of this package to a checkpoint for the code of Luna's authors (fairseq).

    python conversion/luna_to_fairseq.py outputs/my-luna outputs/my-luna-fairseq

SOURCE is a folder or Hub name with a masked language model, a sequence classifier, a multiple-choice model or an
encoder. Writes model.pt, the dictionary and GPT-2's BPE by fairseq's names, and a README.md. Every weight is kept
bitwise, in its type: the files are converted back and compared. What the authors' model cannot express is refused.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from fairseq_format.checkpoint import LABELS, check_finite, open_checkpoint
from fairseq_format.config import DEFAULT_HEAD, Head, check_config, head_of, make_arguments
from fairseq_format.names import shift_norms, to_theirs
from fairseq_format.tokenizer import export_tokenizer, write_labels
from fairseq_luna import make_model
from shared import check_target, command, different_tensors, load, make_parser
from transformers import PreTrainedModel

from luna_hf.markdown import code, code_block, fill
from luna_hf.scripting import UserError, load_tokenizer, portable, run_script, writing

SCRIPT = "luna_to_fairseq.py"
TEMPLATE = Path(__file__).with_name("to_fairseq.md")
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
    about = (
        "name of the classification head in the checkpoint (default: the authors' name for what the head reads; for "
        f"cls the name that the model was converted from, or {DEFAULT_HEAD})"
    )
    parser.add_argument("--head", metavar="NAME", help=about)
    about = "; ".join(f"{name}: {what}" for name, (_, what) in NORMS.items())
    parser.add_argument("--layer-norm", choices=NORMS, default="plain", help=f"{about} (default: plain)")
    options = parser.parse_args(words)
    options.command = command(SCRIPT, words)
    return options


def to_state(model: PreTrainedModel, head: Head, norm_offset: float = 0.0) -> dict[str, Any]:
    """A fairseq checkpoint, for `torch.save`. Its tensors share the model's memory unless the offset changes them.

    Args:
        model: a Luna.
        head: what it has on its encoder, see `head_of`.
        norm_offset: subtracted from every LayerNorm weight: 0, or 1 for the authors' code of 2023 and later.

    Raises:
        UserError: The authors' model cannot express it.
    """
    check_config(model.config)
    arguments, weights = make_arguments(model, head), to_theirs(model.state_dict(), head.part)
    shifted = shift_norms(weights, -norm_offset)
    # fairseq reads the last entry. No optimizer has this name, so resuming requires --reset-optimizer.
    history = {"optimizer_name": "none", "lr_scheduler_state": {"best": None}, "num_updates": 0}
    return {
        "args": argparse.Namespace(**arguments),
        "model": {name: shifted[name].to(tensor.dtype).cpu() for name, tensor in weights.items()},
        "optimizer_history": [{"criterion_name": CRITERIA[arguments["criterion"]], **history}],
        "extra_state": {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }


def write(folder: Path, model: PreTrainedModel, head: Head, options: argparse.Namespace) -> None:
    """Write fairseq's files, and compare what they hold with the model.

    Raises:
        UserError: The tokenizer does not fit, or fairseq cannot express it or the model.
    """
    check_finite(model.state_dict(), options.source)
    torch.save(to_state(model, head, NORMS[options.layer_norm][0]), folder / MODEL_FILE)
    tokenizer = load_tokenizer(options.source)
    if tokenizer is not None and len(tokenizer) != model.config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} tokens, but `vocab_size` is {model.config.vocab_size:,}, and "
            "fairseq needs one row for every token. Save the right tokenizer with the model, or remove its files."
        )
    if tokenizer is not None:
        export_tokenizer(tokenizer, folder)
    if head.labels:
        write_labels(head.labels, folder / LABELS)
    with open_checkpoint(folder, layer_norm=options.layer_norm) as original:
        again, _ = make_model(original, head)
    rounding = 0.0 if options.layer_norm == "plain" else 100 * torch.finfo(model.dtype).eps  # of weights less 1
    if wrong := different_tensors(again.to(model.dtype), model, rounding):
        raise UserError(f"The checkpoint does not hold the tensors of {options.source}: see {', '.join(wrong[:3])}.")


def convert(options: argparse.Namespace) -> None:
    """Convert, write, verify, and report.

    Raises:
        UserError: The user can fix the source, the options or the target.
    """
    check_target(options.target, options.source, options.overwrite, TEMPLATE)
    norms = NORMS[options.layer_norm][1]
    with writing(options.target) as folder:  # first, because only one process may
        model = load(options.source)
        head = head_of(model, options.head)
        write(folder, model, head, options)
        template = TEMPLATE.read_text(encoding="utf-8")
        name, source = options.target.resolve().name, code(portable(options.source))
        command = code_block(options.command, "sh")
        card = fill(template, name=name, source=source, command=command, norms=norms)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"Read {options.source}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}")
    print(f"Head: {head.part or 'none'}. LayerNorm: {norms}.")
    print(f"Written to {options.target}: {', '.join(files)}. It has not been run in fairseq; README.md says how.")


def main(words: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_script(lambda: convert(parse(sys.argv[1:] if words is None else words)))


if __name__ == "__main__":
    sys.exit(main())
