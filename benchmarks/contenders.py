"""The models of the encoder benchmark in their published shapes, and what is timed: a forward or a training step."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers as hf
from measuring import extra_memory, slots_of
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from luna_hf import FAMILIES, absorb_projections
from luna_hf.families.abc.configuration import CONTROLS

# The peers: a model, and its attention backend if that is not sdpa. roberta-eager computes its softmax step by step, as
# models did before fused kernels. modernbert-flash skips what lies outside its windows, which sdpa computes and masks.
PEERS = ("roberta", "roberta-eager", "roberta-flash", "modernbert", "modernbert-flash", "bert")
BACKENDS = {"eager": "eager", "flash": "flash_attention_2"}
PEER_CONFIGS = {"modernbert": hf.ModernBertConfig, "bert": hf.BertConfig}  # others: RoBERTa's
PEER_MODELS = {
    "roberta": {
        "forward": partial(hf.RobertaModel, add_pooling_layer=False),
        "mlm_step": hf.RobertaForMaskedLM,
        "class_step": hf.RobertaForSequenceClassification,
    },
    "modernbert": {
        "forward": hf.ModernBertModel,
        "mlm_step": hf.ModernBertForMaskedLM,
        "class_step": hf.ModernBertForSequenceClassification,
    },
    "bert": {
        "forward": partial(hf.BertModel, add_pooling_layer=False),
        "mlm_step": hf.BertForMaskedLM,
        "class_step": hf.BertForSequenceClassification,
    },
}

# A window and slots.
MIXED = {"local_window": 32}
# Every variant of a family that the benchmark distinguishes; a family without an entry joins with its defaults.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "luna": {
        "luna-untied": {"tie_kv": False},
        "luna-tied": {"tie_kv": True},
        **{
            f"luna-{kind}-per-{tokens}": {"tie_kv": kind == "tied", "tokens_per_slot": tokens}
            for tokens in (4, 8)
            for kind in ("untied", "tied")
        },
        "luna-16": {"projection_length": 16},
        "luna-mixed-64": {**MIXED, "projection_length": 64},
        "luna-mixed-64-untied": {**MIXED, "projection_length": 64, "tie_kv": False},
    },
    "abc_memory": {
        "abc-mlp-128": {"memory_control": "mlp", "memory_size": 128},
        "abc-mlp-64": {"memory_control": "mlp", "memory_size": 64},
        "abc-mlp-16": {"memory_control": "mlp", "memory_size": 16},
        **{
            f"abc-{control.replace('_', '-')}-64": {"memory_control": control, "memory_size": 64}
            for control in CONTROLS
            if control not in ("mlp", "full")
        },
        "abc-full": {"memory_control": "full"},
        "abc-mixed-64": {**MIXED, "memory_size": 64},
    },
    "leapformer": {
        "leapformer": {"reweighting": "learned"},
        "cosformer": {"reweighting": "cosine"},
        "linear-attention": {"reweighting": "none"},
    },
    "lavo": {"lavo-64": {"num_bases": 64, "local_window": 64}},
}
# With BERT's segments: a window (w) alone, beside slots, and beside slots and selected tokens.
WINDOWS, SEGMENTS = (64, 128, 256), {"type_vocab_size": 2}
_MEANS = {**SEGMENTS, "memory_control": "compressive", "memory_size": 16}
_MLP = {**SEGMENTS, "memory_control": "mlp", "memory_size": 64, "share_control": False}
_LUNA = {**SEGMENTS, "projection_length": 64, "tie_kv": False}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "abc-window-64": ("abc_memory", {**SEGMENTS, "memory_control": "sliding_window", "memory_size": 64}),
    **{f"abc-means-16-w{w}": ("abc_memory", {**_MEANS, "local_window": w}) for w in WINDOWS},
    **{f"abc-mlp-64-w{w}": ("abc_memory", {**_MLP, "local_window": w}) for w in WINDOWS},
    **{f"luna-64-w{w}": ("luna", {**_LUNA, "local_window": w}) for w in WINDOWS},
    "abc-selected-128-w64": ("abc_memory", {**_MEANS, "local_window": 64, "num_selected_tokens": 128}),
    "abc-selected-64-w128": ("abc_memory", {**_MEANS, "local_window": 128, "num_selected_tokens": 64}),
    "abc-selected": ("abc_memory", {**SEGMENTS, **FAMILIES["abc_memory"].config.preset_fields("selected")}),
}
OWN = {name: (family, fields) for family in FAMILIES for name, fields in VARIANTS.get(family, {family: {}}).items()}
OWN |= WINDOWED

# Sets of models that `--models` accepts.
MODEL_SETS: dict[str, tuple[str, ...]] = {
    "standard": (
        *("roberta", "modernbert", "luna-untied", "luna-tied", "abc-mlp-128", "abc-mlp-64", "leapformer", "lavo-64"),
        *(family for family in FAMILIES if family not in VARIANTS),
    ),
    "luna": ("roberta", "modernbert", "luna-untied", "luna-tied"),
    "abc": ("roberta", "luna-untied", "abc-mlp-128", "abc-mlp-64"),
    "few": ("roberta", "luna-16", "abc-mlp-16"),
    "short": (
        *("roberta", "luna-untied", "luna-tied"),
        *("luna-untied-per-4", "luna-tied-per-4", "luna-untied-per-8", "luna-tied-per-8"),
    ),
    "families": ("roberta", "luna-tied", "abc-mlp-64", *VARIANTS["leapformer"], *VARIANTS["lavo"]),
    "eager": ("roberta", "roberta-eager", "luna-untied", "abc-mlp-128", "abc-mlp-64"),
    "controls": (
        *("roberta", "abc-mlp-64"),
        *(name for name in VARIANTS["abc_memory"] if "mlp" not in name and "mixed" not in name),
    ),
    "mixed": ("roberta", "luna-mixed-64", "luna-mixed-64-untied", "abc-mixed-64", "abc-mlp-64"),
    "windowed": ("bert", *WINDOWED),
    "gpu": (
        *("roberta", "roberta-flash", "modernbert", "modernbert-flash"),
        *("luna-untied", "luna-tied", "luna-mixed-64", "abc-mlp-64"),
    ),
}

BASE = "base"  # number of layers: that of the published base model
CYCLE = hf.ModernBertConfig().layer_types.index("full_attention", 1)  # ModernBERT's layers from one global to the next
PAD, WARM_UP_LENGTH = 1, 16
ENCODER_VOCABULARY = 1000  # where only layers are measured
LABELLED = 0.15  # share of the positions with a label, as in BERT
PADDED_ROWS, PADDED_TOKENS = 0.5, 0.25  # a padded batch: this share of the rows lacks this share of its tokens


def contender_names(chosen: Sequence[str] = ("standard",)) -> list[str]:
    """The chosen models, or sets of them, in the order of measurement, peers first.

    `roberta` is always among them, or `bert` where all have its segments.

    Raises:
        ValueError: An unknown name.
    """
    every = [*PEERS, *OWN]
    wanted = {name for word in chosen for name in MODEL_SETS.get(word, (word,))}
    wanted.add("bert" if wanted <= {"bert", *WINDOWED} else "roberta")
    if unknown := wanted - set(every):
        known = f"Sets: {', '.join(MODEL_SETS)}. Models: {', '.join(every)}."
        raise ValueError(f"There is no model {', '.join(sorted(unknown))}. {known}")
    return [name for name in every if name in wanted]


def configure(name: str, setting: argparse.Namespace) -> PreTrainedConfig:
    """The config of a model without dropout: its family's published base shape, scaled to the width of the setting."""
    family, fields = OWN.get(name, ("", {}))
    peer = PEER_CONFIGS.get(name.partition("-")[0], hf.RobertaConfig)
    config_class = FAMILIES[family].config if family else peer
    published = config_class()
    fields = {
        "hidden_size": setting.width,
        "num_hidden_layers": published.num_hidden_layers if setting.layers == BASE else setting.layers,
        "num_attention_heads": setting.heads,
        "intermediate_size": published.intermediate_size * setting.width // published.hidden_size,
        "max_position_embeddings": setting.max_length + (2 if peer is hf.RobertaConfig and not family else 0),
        **(slots_of(family, setting.slots) if family else {}),
        **fields,
    }
    if not full_vocabulary(setting):
        fields["vocab_size"] = ENCODER_VOCABULARY
    if is_modernbert(name):
        fields |= {"pad_token_id": PAD, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    else:
        fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name not in PEERS or is_modernbert(name):
        fields["sparse_prediction"] = True
    if backend := backend_of(name):
        fields["attn_implementation"] = backend
    return config_class(**fields)


def is_modernbert(name: str) -> bool:
    """Whether a name is ModernBERT's, with any backend."""
    return name.partition("-")[0] == "modernbert"


def backend_of(name: str) -> str | None:
    """The attention backend that a peer's name asks for."""
    return BACKENDS.get(name.partition("-")[2]) if name in PEERS else None


def is_training(setting: argparse.Namespace) -> bool:
    """Whether a training step is measured."""
    return setting.mode != "forward"


def full_vocabulary(setting: argparse.Namespace) -> bool:
    """Whether the models have their published vocabularies: in training, and as whole models."""
    return is_training(setting) or setting.layers == BASE


def build(name: str, setting: argparse.Namespace) -> PreTrainedModel:
    """A randomly initialised model without dropout, on the device, in training mode for a training step."""
    torch.manual_seed(0)
    makers = PEER_MODELS.get(name.partition("-")[0], {})
    if name not in PEERS:
        family = FAMILIES[OWN[name][0]]
        classifier = family.heads[hf.AutoModelForSequenceClassification]
        makers = {"forward": family.base_model, "mlm_step": family.masked_lm, "class_step": classifier}
    with torch.device(setting.device):  # an accelerator draws random weights faster
        model = makers[setting.mode](configure(name, setting))
    if name not in PEERS and OWN[name][0] in ("luna", "abc_memory"):  # no effect but where slots are few
        absorb_projections(model)
    if setting.checkpointing:
        model.activation_checkpointing_enable()
    return model.to(device=setting.device, dtype=getattr(torch, setting.dtype)).train(is_training(setting))


def held_bytes(model: PreTrainedModel, setting: argparse.Namespace) -> int:
    """What a model holds between two calls: its weights, and in training as much for gradients and each Adam moment."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights * (4 if is_training(setting) else 1)


def make_batch(setting: argparse.Namespace, rows: int, length: int, padded: bool = False) -> dict[str, Tensor]:
    """Random ids, an attention mask only if rows are padded (on the right), and labels for a training step."""
    generator = torch.Generator().manual_seed(length)
    words = hf.RobertaConfig().vocab_size if full_vocabulary(setting) else ENCODER_VOCABULARY
    ids = torch.randint(3, words, (rows, length), generator=generator)
    batch = {"input_ids": ids}
    keep = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        keep[: max(1, int(rows * PADDED_ROWS)), length - int(length * PADDED_TOKENS) :] = False
        batch = {"input_ids": ids.masked_fill(~keep, PAD), "attention_mask": keep.long()}
    if setting.mode == "mlm_step":
        labelled = (torch.rand(rows, length, generator=generator) < LABELLED) & keep
        batch["labels"] = ids.masked_fill(~labelled, -100)
    elif setting.mode == "class_step":
        batch["labels"] = torch.arange(rows) % 2
    return {name: tensor.to(setting.device) for name, tensor in batch.items()}


def make_action(
    model: nn.Module, setting: argparse.Namespace, name: str = "", keep_gradients: bool = False
) -> Callable[[dict[str, Tensor]], None]:
    """The timed call: a forward without gradients, or forward, backward and fused AdamW.

    With `keep_gradients` the memory of the gradients is used again, not taken anew. A Luna with a window runs as its
    heads run it: nothing reads the packed states after the last layer.
    """
    if not is_training(setting):
        own = {"reads_packed_states": False} if WINDOWED.get(name, ("", {}))[0] == "luna" else {}

        @torch.no_grad()
        def forward(batch: dict[str, Tensor]) -> None:
            model(**batch, **own)

        return forward

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad(set_to_none=not keep_gradients)
        model(**batch).loss.backward()
        optimizer.step()

    return step


def rows_for(length: int, setting: argparse.Namespace) -> int:
    """Rows of a batch; a padded batch needs two, and is compared with an unpadded one of the same shape."""
    return max(2 if setting.padding else 1, setting.tokens_per_batch // length)


def peak_memory(name: str, length: int, setting: argparse.Namespace) -> int:
    """Peak bytes of one call beyond weights, gradients and optimizer state; run it in a separate process."""
    action = make_action(build(name, setting), setting, name, keep_gradients=True)
    action(make_batch(setting, 1, min(WARM_UP_LENGTH, length)))
    batch = make_batch(setting, rows_for(length, setting), length)
    return extra_memory(lambda: action(batch), setting.device)
