"""Tiny checkpoints of the authors' fairseq code, in every layout found in practice.

Random ones have the names and arguments of `luna_to_fairseq`, which `test_luna_to_fairseq.py` compares with the
authors' own.
"""

import argparse
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq_format.config import POOLINGS as PACKED
from fairseq_format.config import head_of
from fairseq_format.names import HEADS
from gpt2_files import small_gpt2_folder
from helpers import randomise
from luna_to_fairseq import to_state
from official_luna import CHECKPOINTS, POOLINGS, Fixture
from torch import Tensor

from luna_hf import LunaConfig, LunaForMaskedLM, LunaForSequenceClassification

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "projection_length": 4,
    "max_position_embeddings": 20,
    "classifier_dropout": 0.0,
}
HEAD, ENCODER = "sentence_classification_head", "encoder.sentence_encoder."
# Sections of the newer `cfg`, and what they choose by `_name`; the arguments of a task are in its section.
SECTIONS = {"model": "arch", "task": "task", "criterion": "criterion"}
TASK_ARGUMENTS = ("data", "num_classes", "mask_prob", "tokens_per_sample")


def tiny_state(
    heads: Mapping[str, int] | None = None, seed: int = 0, **fields: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and arguments of a random masked language model with classification heads, by name and outputs.

    `fields` change the config of the model that they come from.
    """
    torch.manual_seed(seed)
    parts = [LunaForMaskedLM(LunaConfig(**{**SIZES, **fields}))]
    for name, labels in (heads or {}).items():
        own = {"classifier_pooling": PACKED.get(name, "cls"), "num_labels": labels}
        parts.append(LunaForSequenceClassification(LunaConfig(**{**SIZES, **fields, **own})))
    for part in parts:
        randomise(part)
    states = [to_state(part, head_of(part, head)) for part, head in zip(parts, [None, *(heads or {})], strict=True)]
    weights = {n: t.detach() for state in states[1:] for n, t in state["model"].items() if n.startswith(HEADS)}
    return {**states[0]["model"], **weights}, vars(states[0]["args"])


def write_dictionary(path: Path, vocab_size: int) -> Path:
    """A dict.txt for an embedding with `vocab_size` rows; it ends with two fillers, like the authors' files."""
    lines = vocab_size - 5  # the file lacks <s> <pad> </s> <unk> and <mask>
    symbols = [*map(str, range(lines - 2)), "madeupword0000", "madeupword0001"]
    path.write_text("".join(f"{symbol} {1000 - place}\n" for place, symbol in enumerate(symbols)))
    return path


def make_state(
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    form: str = "namespace",
    encoder: str = "encoder",
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """The content of a checkpoint file.

    The arguments are stored as `form`: `"namespace"` or `"dict"` (under `args`), `"cfg"` (in sections, like newer
    files), `"none"` (not at all), or `"bare"` (the file holds only the tensors). Names of the encoder begin with
    `encoder`, or with `decoder` as in older files.
    """
    model = {
        re.sub(r"^encoder\.", f"{encoder}.", name): value.to(dtype or value.dtype, copy=True)
        for name, value in weights.items()
    }
    if form == "bare":
        return model
    history = [{"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "num_updates": 4}]
    state = {"args": None, "model": model, "optimizer_history": history, "extra_state": {"val_loss": 9.7}}
    if form == "cfg":
        state["cfg"] = {section: {"_name": arguments[name]} for section, name in SECTIONS.items()}
        for name, value in arguments.items():
            section = "task" if name in TASK_ARGUMENTS else "criterion" if name == "regression_target" else "model"
            state["cfg"][section] |= {name: value} if name not in SECTIONS.values() else {}
    elif form != "none":
        state["args"] = argparse.Namespace(**arguments) if form == "namespace" else dict(arguments)
    return state


def write_fairseq(
    folder: Path,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    file: str = "model.pt",
    legacy: bool = False,
    bpe: bool = True,
    labels: tuple[str, ...] = (),
    **options: Any,
) -> Path:
    """A folder with a checkpoint, its dictionary and, so that no test needs the Hub, GPT-2's first merges.

    Other options are those of `make_state`. `legacy` is PyTorch's format before 1.6, which is no zip file. `labels` are
    written with fairseq's fillers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(make_state(weights, arguments, **options), folder / file, _use_new_zipfile_serialization=not legacy)
    write_dictionary(folder / "dict.txt", len(weights[f"{ENCODER}embed_tokens.weight"]))
    if bpe:
        small_gpt2_folder(folder)
    if labels:
        (folder / "label").mkdir()
        lines = "".join(f"{label} 10\n" for label in labels)
        (folder / "label" / "dict.txt").write_text(f"{lines}madeupword0000 0\nmadeupword0001 0\n")
    return folder


def write_fixture(
    folder: Path, name: str, heads: Collection[str] = POOLINGS, task: str = "masked_lm", **options: Any
) -> Path:
    """A folder with the model of a `luna_mlm` fixture and some of its heads; options of `write_fairseq`."""
    fixture = Fixture("luna_mlm", name)
    arch = f"luna_base_{name.split('_')[0]}_512"
    arguments = {**fixture.config["args"], "arch": arch, "task": task, "criterion": task}
    weights = {n: t for n, t in fixture.weights().items() if not n.startswith("class") or n.split(".")[1] in heads}
    return write_fairseq(folder, weights, arguments, **options)


def write_tiny(
    folder: Path,
    heads: Mapping[str, int] | None = None,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A folder with a model of `tiny_state`, `changes` to its arguments, and options of `write_fairseq`."""
    weights, arguments = tiny_state(heads, seed, **(fields or {}))
    return write_fairseq(folder, weights, {**arguments, **(changes or {})}, **options)


def genuine_folder(folder: Path, name: str) -> Path:
    """A copy of a checkpoint that the authors' code wrote (`tied` or `untied`), with GPT-2's BPE files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("model.pt", "dict.txt"):
        shutil.copy(CHECKPOINTS / name / file, folder / file)
    return small_gpt2_folder(folder)


def write_archive(folder: Path, kind: str = "zip") -> Path:
    """Pack a folder like the published archives, which contain the folder. `kind`: zip, tar, gztar."""
    return Path(shutil.make_archive(str(folder), kind, root_dir=folder.parent, base_dir=folder.name))
