"""The systems that the recall study compares, as fields of a config.

A name is a base, and what is added to it: `luna-16+window`. Bases are `softmax`, `window` (sliding-window attention
alone), `leapformer` and `linear` (attention with LeaPformer's re-weighting and without one, whose memory has no slots),
and Luna, ABC-MLP or LAVO with a number of slots. LAVO without a window writes values to its slots. `+window` reads the
slots and a window in one softmax; `+conv` adds a depthwise convolution, `+both` both. Behind them, `-uncounted` leaves
out the bias by counts, and `-narrow` starts the filters like any other matrix. `luna-exp` is causal Luna with
`pack_activation="exp"`. In this study only, `luna-total` divides the sums of causal Luna by the sum of the weights
instead of the number of tokens. LAVO's window has its own softmax, which ignores these counts, and linear
attention reads none.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from luna_hf import FAMILIES, MemoryCache
from luna_hf.families.luna.attention import LunaCausalAttention

from .tasks import FILLER, PAD, QUESTION, Task

WINDOW, TAPS, LAYERS = 4, 3, 2
# How far back information travels through the window and the convolution of all layers.
REACH = LAYERS * (WINDOW - 1 + TAPS - 1)
# A deviation of 1 / sqrt(width) keeps the scale of what a matrix multiplies. With the library's default of 0.02, meant
# for a width of 768, no system learned recall in the same time.
BODY = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "intermediate_size": 128,
    "norm_first": True,
    "initializer_range": 64**-0.5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LUNA = {"family": "luna", "tie_kv": False}
BASES: dict[str, dict[str, Any]] = {
    "luna": LUNA,
    "luna-tied": {"family": "luna"},
    "luna-exp": {**LUNA, "pack_activation": "exp"},
    "luna-exp-tied": {"family": "luna", "pack_activation": "exp"},
    "luna-total": LUNA,
    "abc": {"family": "abc_memory"},
    "lavo": {"family": "lavo", "local_window": 0},
}
# Without slots.
LINEAR: dict[str, dict[str, Any]] = {
    "leapformer": {"family": "leapformer"},
    "linear": {"family": "leapformer", "reweighting": "none"},
}
CONV = {"conv_kernel_size": TAPS, "conv_initializer_range": TAPS**-0.5}
ADDED: dict[str, dict[str, Any]] = {"": {}, "window": {"local_window": WINDOW}, "conv": CONV}
# With the library's default, filters start like any other matrix.
ADDED["conv-narrow"] = {"conv_kernel_size": TAPS}
ADDED["both"] = {**ADDED["window"], **ADDED["conv"]}
for name in ("window", "both"):
    ADDED[f"{name}-uncounted"] = {**ADDED[name], "slot_count_bias": False}


def fields_of(system: str, task: Task) -> dict[str, Any]:
    """Fields of a system's config that differ from `BODY`, and its family.

    Raises:
        ValueError: The name is unknown.
    """
    base, _, added = system.partition("+")
    name, _, slots = base.rpartition("-")
    if added in ADDED and base == "softmax":
        # A causal model has no `full`: a window over the whole row is the same.
        control = {"memory_control": "sliding_window", "memory_size": task.length} if task.causal else {}
        return {"family": "abc_memory", "memory_control": "full", **control, **ADDED[added]}
    if added in ADDED and base == "window":
        return {"family": "abc_memory", "memory_control": "sliding_window", "memory_size": WINDOW, **ADDED[added]}
    if added in ADDED and base in LINEAR and "local_window" not in ADDED[added]:
        return {**LINEAR[base], **ADDED[added]}
    uncounted = name == "lavo" and "slot_count_bias" in ADDED.get(added, {})
    if added in ADDED and name in BASES and slots.isdecimal() and not uncounted:
        fields = BASES[name]
        return {**fields, FAMILIES[fields["family"]].config.slots_field: int(slots), **ADDED[added]}
    bases = ", ".join(["softmax", "window", *LINEAR, *(f"{name}-<slots>" for name in BASES)])
    added = " or ".join(f"+{name}" for name in ADDED if name)
    raise ValueError(f"There is no system {system!r}. Choose {bases}; add {added}.")


def make_model(system: str, task: Task, positions: str | None = None) -> nn.Module:
    """A masked or causal language model for a task; `positions` are those of `Recipe`."""
    fields = {**BODY, **fields_of(system, task)}
    family = FAMILIES[fields.pop("family")]
    config: PreTrainedConfig = family.config(
        vocab_size=task.vocab_size,
        max_position_embeddings=task.length,
        bos_token_id=FILLER,
        pad_token_id=PAD,
        eos_token_id=QUESTION,
        is_decoder=task.causal,
        position_embedding_type=positions or ("sinusoidal" if task.causal else "learned"),
        **fields,
    )
    model = (family.causal_lm if task.causal else family.masked_lm)(config)
    return model.apply(divide_by_total) if system.startswith("luna-total") else model


def divide_by_total(module: nn.Module) -> None:
    """Divide the sums of Luna's causal attention by the running sum of the weights."""
    if isinstance(module, LunaCausalAttention):
        write_weights = module.write_weights
        module.write_weights = lambda *inputs: (write_weights(*inputs)[0], "total")


def state_bytes(model: nn.Module, task: Task) -> int:
    """Size of a causal model's decoding state after a row, without what all rows share."""
    cache = MemoryCache(model.config)
    ids, _ = task.draw(1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.eval()(input_ids=ids, cache=cache)
    return cache.nbytes - sum(tensor.nbytes for layer in cache.layers for tensor in layer.constants.values())
