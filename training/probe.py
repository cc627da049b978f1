"""What the attention of a model does on a batch: how flat its maps are, and how alike the slots of its memory.

At initialisation the maps of Luna and of ABC's learned control are uniform and all slots hold the mean of the tokens,
so the entropies and the similarity below are near 1. They fall as soon as a model reads its context; a model whose loss
stays next to the unigram entropy while they stay near 1 has not started to.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from luna_hf.attention_abc import AbcSelfAttention, Memory
from luna_hf.attention_luna import LunaPackAttention
from luna_hf.memory_control import control_weights

Probe = dict[str, list[float | None]]


def normalised_entropy(weights: Tensor, queries: Tensor, keys: Tensor) -> float | None:
    """Mean entropy of attention weights, divided by its maximum: 1 for uniform weights, 0 for a single key.

    Args:
        weights: (b, h, q, k), rows that sum to one over the keys in use.
        queries: (b, q) boolean, True for the queries that count.
        keys: (b, k) boolean, or (b, 1 or h, k), or (b, h, q, k), True for the keys in use; their number is what a row
            could at most spread over.

    Returns:
        The mean over rows, heads and queries; rows with a single key have no maximum and do not count. `None` if no row
        is left.
    """
    used = keys.sum(-1)
    used = used.view(*used.shape, *[1] * (3 - used.ndim))  # (b, 1 or h, 1 or q)
    entropy = torch.special.entr(weights.double()).sum(-1)  # (b, h, q)
    counts = (queries[:, None] & (used > 1)).expand_as(entropy)
    share = entropy / used.clamp(min=2).double().log()
    return share[counts].mean().item() if counts.any() else None


def slot_similarity(slots: Tensor, used: Tensor) -> float | None:
    """Mean cosine between different slots of the same row.

    Args:
        slots: (b, l, d), or of every head (b, h, l, c).
        used: (b, l) or (b, h, l) boolean, True for the slots that hold something.

    Returns:
        The mean over all pairs, rows with more slots weighing more; `None` if no row has two.
    """
    unit = F.normalize(slots.double(), dim=-1)
    pairs = used[..., :, None] & used[..., None, :]
    pairs &= ~torch.eye(slots.shape[-2], dtype=torch.bool, device=slots.device)
    cosines = unit @ unit.mT
    return cosines[pairs].mean().item() if pairs.any() else None


@torch.no_grad()
def probe(model: PreTrainedModel, batch: dict[str, Tensor], rows: int = 8) -> Probe | None:
    """Look into the attention of a model; the model is left as it was, random numbers are not used.

    Args:
        model: with any head or none; unwrapped, and with its parameters whole (no shards).
        batch: `input_ids` (b, n), and `attention_mask` (b, n) if something is padded; the rest is not read.
        rows: only so many rows of it are looked at, because all maps are kept at once.

    Returns:
        One value a layer, `None` where there is nothing to compare (a single slot or token). Of a Luna:
        `pack_entropy` (slots over tokens), `unpack_entropy` (tokens over slots), each `normalised_entropy`, and
        `slot_similarity` of the packed context Y_P, which is what the tokens read. Of an ABC with slots: `read_entropy`
        (tokens over slots), `slot_similarity` of their keys, head by head, and `write_entropy` (slots over tokens) of
        the learned control `mlp`. Of another model with attention maps, also ABC's windows and full attention:
        `attention_entropy`. `None` for a model without any.
    """
    ids = batch["input_ids"][:rows]
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask[:rows]
    tokens = mask != 0
    trunk = model.base_model
    packs = [module for module in trunk.modules() if isinstance(module, LunaPackAttention)]
    writers = [module for module in trunk.modules() if isinstance(module, AbcSelfAttention)]
    asked = {"output_attentions": True, **({"output_pack_attentions": True} if packs else {})}
    with _eager_and_eval(model), _recorded(packs) as packed, _memories(writers) as memories:
        outputs = trunk(input_ids=ids, attention_mask=mask, **asked)
    if packs:
        slots = outputs.packed_attention_mask  # (b, l)
        slots = ids.new_ones(packed[0].shape[:2]) if slots is None else slots
        slots = slots != 0
        return {
            "pack_entropy": [normalised_entropy(weights, slots, tokens) for weights in outputs.pack_attentions],
            "unpack_entropy": [normalised_entropy(weights, tokens, slots) for weights in outputs.attentions],
            "slot_similarity": [slot_similarity(states, slots) for states in packed],
        }
    maps = outputs.get("attentions") or ()
    if memories:
        return _probe_memory(model.config, maps, memories, tokens)
    # A window's places beyond the text have no weight.
    window = getattr(model.config, "memory_control", None) in ("sliding_window", "dilated")
    found = [normalised_entropy(weights, tokens, weights > 0 if window else tokens) for weights in maps]
    return {"attention_entropy": found} if found else None


def _probe_memory(
    config: PreTrainedConfig, maps: tuple[Tensor, ...], written: list["_Written"], tokens: Tensor
) -> Probe:
    """Of an ABC with slots."""
    found: Probe = {"read_entropy": [], "slot_similarity": []}
    if config.memory_control == "mlp":
        found["write_entropy"] = []
    for weights, layer in zip(maps, written, strict=True):
        keys, filled = layer.memory.key, layer.memory.filled
        slots = torch.ones_like(keys[..., 0], dtype=torch.bool) if filled is None else filled.expand(keys.shape[:3])
        found["read_entropy"].append(normalised_entropy(weights, tokens, slots))
        found["slot_similarity"].append(slot_similarity(keys, slots))
        if config.memory_control == "mlp":
            logits = layer.states @ layer.control.T  # (b, n, h * m)
            logits = logits.mT.unflatten(1, (config.num_attention_heads, -1))
            phi = control_weights(logits, tokens, config.control_activation)
            found["write_entropy"].append(_write_entropy(phi, slots, tokens))
    return found


def _write_entropy(phi: Tensor, slots: Tensor, tokens: Tensor) -> float | None:
    """Of weights (b, h, m, n), for the slots (b, h, m) that hold something."""
    heads = phi.shape[1]
    phi, slots = phi.flatten(0, 1).unsqueeze(1), slots.flatten(0, 1)
    return normalised_entropy(phi, slots, tokens.repeat_interleave(heads, 0))


@dataclass
class _Written:
    """What one layer wrote its slots from, and the slots."""

    states: Tensor  # (b, n, d)
    control: Tensor | None  # (h * m, d)
    memory: Memory


@contextmanager
def _memories(modules: list[AbcSelfAttention]) -> Iterator[list[_Written]]:
    """What the modules write, in the order of their calls."""
    written: list[_Written] = []

    def recording(module: AbcSelfAttention) -> Callable[..., Memory]:
        def write(states: Tensor, key: Tensor, value: Tensor, memory: Tensor | None, masks: Any) -> Memory:
            control = memory if module.control is None else module.control()
            written.append(_Written(states, control, type(module).write(module, states, key, value, memory, masks)))
            return written[-1].memory

        return write

    for module in modules:
        module.write = recording(module)
    try:
        yield written
    finally:
        for module in modules:
            del module.write


@contextmanager
def _eager_and_eval(model: PreTrainedModel) -> Iterator[None]:
    """Only eager attention returns its maps; and a look must not depend on dropout."""
    was_training, backend = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(backend)
        model.train(was_training)


@contextmanager
def _recorded(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """The first outputs of the modules, in the order of their calls."""
    outputs: list[Tensor] = []
    handles = [module.register_forward_hook(lambda _, __, output: outputs.append(output[0])) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
