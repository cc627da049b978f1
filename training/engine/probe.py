"""Statistics of a model's attention on a batch: the entropy of its maps, and the similarity of its memory's slots.

At initialisation, the maps of Luna and of ABC's learned control are uniform, and all slots hold the mean of the tokens:
entropies and similarity are near 1. They fall as soon as a model uses its context. If they and a loss near the
unigram entropy do not change, it has not started to.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine.inspection import inspect, is_inspectable

Probe = dict[str, list[float | None]]


def normalised_entropy(weights: Tensor, queries: Tensor, keys: Tensor) -> float | None:
    """Mean entropy of attention weights, divided by its maximum: 1 for uniform weights, 0 for a single key.

    Args:
        weights: (b, h, q, k), rows that sum to one over the keys in use.
        queries: (b, q) boolean, True for the queries that count.
        keys: (b, k) boolean, or (b, 1 or h, k), or (b, h, q, k), True for the keys in use; their number determines the
            maximum.

    Returns:
        The mean over rows, heads and queries with more than one key; `None` if there are none.
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
        used: (b, l) or (b, h, l) boolean, True for the slots in use.

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
    """Measure the attention of a model; the model and the random state are restored.

    Args:
        model: with any head or none; unwrapped and not sharded.
        batch: `input_ids` (b, n), and `attention_mask` (b, n) with padding; the rest is ignored.
        rows: number of rows to use.

    Returns:
        One value per layer, `None` where there is nothing to compare (a single slot or token). An encoder of luna_hf
        chooses its statistics (`engine/inspection.py`), each an entropy (`normalised_entropy`) or a similarity
        (`slot_similarity`). Luna: `pack_entropy` (slots over tokens), `unpack_entropy` (tokens over slots), and
        `slot_similarity` of the packed context. ABC with slots: `read_entropy` (tokens over slots), `slot_similarity`
        of the slots' keys per head, and for the control `mlp` `write_entropy` (slots over tokens). Other models with
        attention maps, and windows and full attention of ABC: `attention_entropy`. `None` for a model without maps.
    """
    ids = batch["input_ids"][:rows]
    mask = batch["attention_mask"][:rows] if "attention_mask" in batch else torch.ones_like(ids)
    trunk = model.base_model
    shown = [module for module in trunk.modules() if is_inspectable(module)]
    found: Probe = {}

    def measure(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name, view in inspect(module, *args).items():
            value = slot_similarity(*view) if len(view) == 2 else normalised_entropy(*view)
            found.setdefault(name, []).append(value)

    with _eager_and_eval(model), ExitStack() as hooks:
        for module in shown:
            hooks.enter_context(module.register_forward_hook(measure))
        outputs = trunk(input_ids=ids, attention_mask=mask, output_attentions=not shown)
    if shown:
        return found
    tokens = mask != 0
    entropies = [normalised_entropy(weights, tokens, tokens) for weights in outputs.get("attentions") or ()]
    return {"attention_entropy": entropies} if entropies else None


@contextmanager
def _eager_and_eval(model: PreTrainedModel) -> Iterator[None]:
    """Switch to eager attention, which alone returns its maps, and to eval mode."""
    was_training, backend = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(backend)
        model.train(was_training)
