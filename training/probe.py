"""What the attention of a model does on a batch: how flat its maps are, and how alike the slots of a packed sequence.

At initialisation Luna's maps are uniform and all its slots hold the mean of the tokens, so the entropies and the
similarity below are near 1. They fall as soon as a model reads its context; a model whose loss stays next to the
unigram entropy while they stay near 1 has not started to.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from luna_hf.attention_luna import LunaPackAttention

Probe = dict[str, list[float | None]]


def normalised_entropy(weights: Tensor, queries: Tensor, keys: Tensor) -> float | None:
    """Mean entropy of attention weights, divided by its maximum: 1 for uniform weights, 0 for a single key.

    Args:
        weights: (b, h, q, k), rows that sum to one over the keys in use.
        queries: (b, q) boolean, True for the queries that count.
        keys: (b, k) boolean, True for the keys in use; their number is what a row could at most spread over.

    Returns:
        The mean over rows, heads and queries; rows with a single key have no maximum and do not count. `None` if no row
        is left.
    """
    used = keys.sum(-1)  # (b,)
    entropy = torch.special.entr(weights.double()).sum(-1).mean(1)  # (b, q)
    counts = queries & (used > 1)[:, None]
    share = entropy / used.clamp(min=2).double().log()[:, None]
    return share[counts].mean().item() if counts.any() else None


def slot_similarity(slots: Tensor, used: Tensor) -> float | None:
    """Mean cosine between different slots of the same row.

    Args:
        slots: (b, l, d).
        used: (b, l) boolean, True for the slots that hold something.

    Returns:
        The mean over all pairs, rows with more slots weighing more; `None` if no row has two.
    """
    unit = F.normalize(slots.double(), dim=-1)
    pairs = used[:, :, None] & used[:, None, :]
    pairs &= ~torch.eye(slots.shape[1], dtype=torch.bool, device=slots.device)
    cosines = unit @ unit.transpose(1, 2)
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
        `slot_similarity` of the packed context Y_P, which is what the tokens read. Of another model with attention
        maps: `attention_entropy`. `None` for a model without any.
    """
    ids = batch["input_ids"][:rows]
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask[:rows]
    tokens = mask != 0
    trunk = model.base_model
    packs = [module for module in trunk.modules() if isinstance(module, LunaPackAttention)]
    with _eager_and_eval(model), _recorded(packs) as packed:
        asked = {"output_attentions": True, **({"output_pack_attentions": True} if packs else {})}
        outputs = trunk(input_ids=ids, attention_mask=mask, **asked)
    if not packs:
        maps = outputs.get("attentions") or ()
        found = [normalised_entropy(weights, tokens, tokens) for weights in maps]
        return {"attention_entropy": found} if found else None
    slots = outputs.packed_attention_mask  # (b, l)
    slots = ids.new_ones(packed[0].shape[:2]) if slots is None else slots
    slots = slots != 0
    return {
        "pack_entropy": [normalised_entropy(weights, slots, tokens) for weights in outputs.pack_attentions],
        "unpack_entropy": [normalised_entropy(weights, tokens, slots) for weights in outputs.attentions],
        "slot_similarity": [slot_similarity(states, slots) for states in packed],
    }


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
