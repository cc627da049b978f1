"""The models of the encoder benchmark, all at one size, and what is done with them: a forward or a training step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measuring import extra_memory, slots_of, steady_allocator
from torch import Tensor, nn
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

from luna_hf import FAMILIES
from luna_hf.memory_control import CONTROLS

# roberta-eager computes its softmax step by step, as models did before fused kernels.
PEERS = ("roberta", "roberta-eager", "modernbert")

# Every variant of a family that the benchmark distinguishes; a family without a row joins with its defaults.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "luna": {"luna-untied": {"tie_kv": False}, "luna-tied": {"tie_kv": True}},
    "abc_memory": {
        "abc-mlp-128": {"memory_control": "mlp", "memory_size": 128},
        "abc-mlp-64": {"memory_control": "mlp", "memory_size": 64},
        **{
            f"abc-{control.replace('_', '-')}-64": {"memory_control": control, "memory_size": 64}
            for control in CONTROLS
            if control not in ("mlp", "full")
        },
        "abc-full": {"memory_control": "full"},
    },
}

# What `--models` may name besides single models; `standard` is what a run measures unless told.
MODEL_SETS: dict[str, tuple[str, ...]] = {
    "standard": (
        *("roberta", "modernbert", "luna-untied", "luna-tied", "abc-mlp-128", "abc-mlp-64"),
        *(family for family in FAMILIES if family not in VARIANTS),
    ),
    "abc": ("roberta", "luna-untied", "abc-mlp-128", "abc-mlp-64"),
    "eager": ("roberta", "roberta-eager", "luna-untied", "abc-mlp-128", "abc-mlp-64"),
    "controls": ("roberta", "abc-mlp-64", *(name for name in VARIANTS["abc_memory"] if "mlp" not in name)),
}

PAD, WARM_UP_LENGTH = 1, 16
LABELLED = 0.15  # share of the positions that carry a label, as in BERT
PADDED_ROWS, PADDED_TOKENS = 0.5, 0.25  # a padded batch: this share of the rows lacks this share of its tokens


@dataclass(frozen=True)
class Setting:
    """Sizes and conditions that all models of a run share."""

    mode: str  # forward or mlm_step
    layers: int
    width: int
    heads: int
    modernbert_intermediate: int
    slots: int  # where the name of a model does not say how many
    max_length: int
    dtype: str
    device: str
    threads: int

    @property
    def vocab_size(self) -> int:
        """RoBERTa's for training; small where only the encoder is measured."""
        return 50265 if self.mode == "mlm_step" else 1000


def own_variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of every contender of this package, with its family and the fields that make it."""
    return {
        name: (family, fields) for family in FAMILIES for name, fields in VARIANTS.get(family, {family: {}}).items()
    }


def contender_names(chosen: Sequence[str] = ("standard",)) -> list[str]:
    """Models in the order in which they are measured and listed, peers first; `roberta` is always among them.

    Args:
        chosen: names of models or of sets of them.

    Raises:
        ValueError: An unknown name.
    """
    every = [*PEERS, *own_variants()]
    wanted = {"roberta"} | {name for word in chosen for name in MODEL_SETS.get(word, (word,))}
    if unknown := wanted - set(every):
        raise ValueError(
            f"There is no model {', '.join(sorted(unknown))}. Sets: {', '.join(MODEL_SETS)}. "
            f"Models: {', '.join(every)}."
        )
    return [name for name in every if name in wanted]


def build(name: str, setting: Setting) -> PreTrainedModel:
    """A randomly initialised model without dropout, with sdpa unless it is an eager one, on the device, in its mode."""
    torch.manual_seed(0)
    training = setting.mode == "mlm_step"
    if name in ("roberta", "roberta-eager"):
        fields = {**_common(setting), "attn_implementation": "sdpa" if name == "roberta" else "eager"}
        config = RobertaConfig(**fields, **_NO_DROPOUT, max_position_embeddings=setting.max_length + 2)
        model = RobertaForMaskedLM(config) if training else RobertaModel(config, add_pooling_layer=False)
    elif name == "modernbert":
        config = _modernbert_config(setting)
        model = ModernBertForMaskedLM(config) if training else ModernBertModel(config)
    else:
        family, fields = own_variants()[name]
        config = _own_config(family, fields, setting)
        model = (FAMILIES[family].masked_lm if training else FAMILIES[family].base_model)(config)
    return model.to(device=setting.device, dtype=getattr(torch, setting.dtype)).train(training)


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _common(setting: Setting) -> dict[str, Any]:
    return {
        "vocab_size": setting.vocab_size,
        "hidden_size": setting.width,
        "num_hidden_layers": setting.layers,
        "num_attention_heads": setting.heads,
        "intermediate_size": 4 * setting.width,
        "attn_implementation": "sdpa",
    }


def _modernbert_config(setting: Setting) -> ModernBertConfig:
    tokens = {"pad_token_id": PAD, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    fields = {**_common(setting), "intermediate_size": setting.modernbert_intermediate}
    return ModernBertConfig(**fields, **tokens, max_position_embeddings=setting.max_length, sparse_prediction=True)


def _own_config(family: str, fields: dict[str, Any], setting: Setting) -> Any:
    positions = {"max_position_embeddings": setting.max_length, "sparse_prediction": True}
    own = {**slots_of(family, setting.slots), **fields}
    return FAMILIES[family].config(**_common(setting), **_NO_DROPOUT, **positions, **own)


def make_batch(setting: Setting, rows: int, length: int, padded: bool = False) -> dict[str, Tensor]:
    """Random ids, an attention mask only if something is padded (on the right), and labels for a training step."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, setting.vocab_size, (rows, length), generator=generator)
    batch = {"input_ids": ids}
    keep = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        keep[: max(1, int(rows * PADDED_ROWS)), length - int(length * PADDED_TOKENS) :] = False
        batch = {"input_ids": ids.masked_fill(~keep, PAD), "attention_mask": keep.long()}
    if setting.mode == "mlm_step":
        labelled = (torch.rand(rows, length, generator=generator) < LABELLED) & keep
        batch["labels"] = ids.masked_fill(~labelled, -100)
    return {name: tensor.to(setting.device) for name, tensor in batch.items()}


def make_action(model: nn.Module, setting: Setting) -> Callable[[dict[str, Tensor]], None]:
    """What is timed: a forward without gradients, or forward, backward and fused AdamW."""
    if setting.mode == "forward":

        def forward(batch: dict[str, Tensor]) -> None:
            with torch.no_grad():
                model(**batch)

        return forward

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def peak_memory(name: str, setting: Setting, rows: int, length: int) -> int:
    """Bytes that one call takes at its peak beyond model and optimizer state; run it in a process of its own."""
    steady_allocator()
    torch.set_num_threads(setting.threads)
    action = make_action(build(name, setting), setting)
    action(make_batch(setting, 1, min(WARM_UP_LENGTH, length)))
    batch = make_batch(setting, rows, length)
    return extra_memory(lambda: action(batch), setting.device)
