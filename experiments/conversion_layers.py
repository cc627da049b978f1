"""Which layers a conversion costs: the loss of fitted models in which all other layers keep the teacher's attention."""

import argparse
from pathlib import Path
from typing import Any

import torch
from pyarrow.parquet import ParquetFile
from running import publish
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel
from transformers.utils import logging

from luna_hf.scripting import UserError, load_tokenizer, markdown_table

BLOCKS, BLOCK, MASKED, BATCH = 60, 256, 0.3, 10
PROTOCOL = (
    f"Held-out masked-LM loss on {BLOCKS} blocks of {BLOCK} tokens, the same for all, with {MASKED:.0%} of the tokens "
    "masked. Only stage A was trained, so that all other weights are the teacher's."
)


def masked_blocks(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Held-out ids, the same with masks, and where the masks are, (blocks, n) each."""
    tokenizer = load_tokenizer(str(options.teacher), required=True)
    texts = next(ParquetFile(options.data / "enwiki" / "validation.parquet").iter_batches(BLOCKS, columns=["text"]))
    ids = [i for text in texts["text"] for i in tokenizer(text.as_py(), add_special_tokens=False).input_ids]
    count = min(BLOCKS, len(ids) // (BLOCK - 2))
    inner = torch.tensor(ids[: count * (BLOCK - 2)]).view(count, BLOCK - 2)
    ids = F.pad(F.pad(inner, (1, 0), value=tokenizer.bos_token_id), (0, 1), value=tokenizer.eos_token_id)
    masked = torch.rand(inner.shape, generator=torch.Generator().manual_seed(0)) < MASKED
    masked = F.pad(masked, (1, 1))
    return ids, ids.masked_fill(masked, tokenizer.mask_token_id), masked


@torch.no_grad()
def mean_loss(model: PreTrainedModel, ids: Tensor, inputs: Tensor, masked: Tensor) -> float:
    """Mean loss at the masked positions."""
    total = 0.0
    for rows in torch.arange(len(ids)).split(BATCH):
        places = masked[rows]
        logits = model.eval()(input_ids=inputs[rows]).logits[places]
        total += F.cross_entropy(logits, ids[rows][places], reduction="sum").item()
    return total / masked.sum().item()


def keep(folder: Path, layers: list[int]) -> PreTrainedModel:
    """A fitted model with the teacher's attention in some layers, whose weights it still has."""
    config = AutoConfig.from_pretrained(folder, full_attention_layers=layers)
    return AutoModelForMaskedLM.from_pretrained(folder, config=config)


def layers(options: argparse.Namespace) -> None:
    """Measure what each converted layer costs in fitted runs, and publish the table."""
    if options.overrides:
        raise UserError(f"`layers` has no option {options.overrides[0]}.")
    folders = [options.runs / "fitted" / name for name in options.models]
    if not folders or (missing := [folder for folder in folders if not folder.is_dir()]):
        raise UserError(f"There is no fitted run {missing[0]}." if folders else "`layers` needs --models, fitted runs.")
    logging.set_verbosity_error()  # the kept layers' new parameters are not used
    blocks = masked_blocks(options)
    result: dict[str, Any] = {**options.header, "protocol": PROTOCOL, "over_teacher": {}}
    teacher = mean_loss(AutoModelForMaskedLM.from_pretrained(options.teacher), *blocks)
    for folder in folders:
        every = range(AutoConfig.from_pretrained(folder).num_hidden_layers)
        kept = {"all": [], **{f"{layer}": [other for other in every if other != layer] for layer in every}}
        over = {name: mean_loss(keep(folder, full), *blocks) - teacher for name, full in kept.items()}
        result["over_teacher"][folder.name] = over
    publish(options.results, f"{options.subject}-layers", "no", result, text, {})


def text(result: dict[str, Any]) -> str:
    """A row for every run, a column for every layer."""
    found = result["over_teacher"]
    names = list(next(iter(found.values())))
    header = ["run", *("all layers" if name == "all" else f"layer {name} alone" for name in names)]
    return markdown_table(header, [[f"`{run}`", *(f"{over[n]:+.3f}" for n in names)] for run, over in found.items()])
