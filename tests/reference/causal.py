"""A literal, slow reference of causal attention to a memory, token by token. Shares no code with the package.

Rows have no padding, because a padded row must give the same results as the row alone. States are (..., n, c) with any
leading dimensions. Sections and equations are those of Ma et al. 2021 (Luna, arXiv 2106.01540) and of Peng et al. 2022
(ABC, arXiv 2110.02488).
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from . import mixed
from .luna import gelu, key_value, layer_norm, linear


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, (..., p) and (..., r) to (..., p, r)."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def apply(vector: Tensor, matrix: Tensor) -> Tensor:
    """vector matrix, (..., p) and (..., p, r) to (..., r)."""
    return (vector.unsqueeze(-1) * matrix).sum(-2)


def scan(x: Tensor, y: Tensor, z: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Luna eq. 8 without the 1/t: out_t = x_t (state + sum_{j<=t} y_j^T z_j), (..., n, r), and the final sum."""
    total = torch.zeros_like(outer(y[..., 0, :], z[..., 0, :])) if state is None else state
    outputs = []
    for t in range(x.shape[-2]):
        total = total + outer(y[..., t, :], z[..., t, :])
        outputs.append(apply(x[..., t, :], total))
    return torch.stack(outputs, dim=-2), total


def softmax(logits: Tensor, used: Tensor | None = None) -> Tensor:
    """Softmax over the used entries of the last dimension; zeros if none is used."""
    if used is None:
        used = torch.ones_like(logits, dtype=torch.bool)
    used = used.expand(logits.shape)
    largest = torch.where(used, logits, -torch.inf).amax(-1, keepdim=True)
    exponentials = torch.where(used, torch.exp(torch.where(used, logits - largest, 0.0)), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / torch.where(total > 0, total, torch.ones_like(total))


def read(query: Tensor, keys: Tensor, values: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """ABC eq. 4: a query (..., c) reads keys and values (..., m, c); the output (..., c) and weights (..., m)."""
    logits = (keys * query.unsqueeze(-2)).sum(-1) / math.sqrt(query.shape[-1])
    weights = softmax(logits, used)
    return apply(weights, values), weights


class Window(NamedTuple):
    """What a mixed layer reads in one softmax with the slots."""

    key: Tensor  # (..., n, c)
    value: Tensor  # (..., n, c)
    size: int  # tokens that a token reads, ending with itself
    bias: Tensor  # (..., n, m) added to the logits of the slots that token t reads


def read_at(
    t: int, query: Tensor, keys: Tensor, values: Tensor, used: Tensor | None, window: Window | None
) -> tuple[Tensor, Tensor]:
    """Like `read` with the query of token t, from (..., n, c); with a window, the weights are (..., m + size)."""
    query = query[..., t, :]
    if window is None:
        return read(query, keys, values, used)
    outputs, every = [], torch.ones(keys.shape[:-1], dtype=torch.bool) if used is None else used
    inside = mixed.places(t, window.key.shape[-2], window.size, causal=True)
    for place in itertools.product(*(range(size) for size in query.shape[:-1])):
        slots, tokens = (keys[place], values[place]), (window.key[place], window.value[place])
        outputs.append(mixed.read(query[place], slots, every[place].tolist(), window.bias[place][t], tokens, inside))
    return tuple(torch.stack(parts).unflatten(0, query.shape[:-1]) for parts in zip(*outputs, strict=True))


def counts(writes: Tensor) -> Tensor:
    """The number of tokens that each slot stands for after each token, (..., n, m), from non-negative write weights."""
    totals = [torch.cumsum(mixed.shares(rows), 0) for rows in writes.flatten(0, -3)]
    return torch.stack(totals).unflatten(0, writes.shape[:-2])


def stack(steps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack the outputs and the weights of all tokens."""
    outputs, weights = zip(*steps, strict=True)
    return torch.stack(outputs, dim=-2), torch.stack(weights, dim=-2)


# ---- Luna, section 3.3 ----


def omega(logits: Tensor, activation: str) -> Tensor:
    """Softplus with beta = ln 2, that is log2(1 + 2^z); or elu + 1."""
    if activation == "softplus":
        return torch.logaddexp2(logits, torch.zeros_like(logits))
    return torch.where(logits > 0, logits + 1, torch.exp(torch.where(logits > 0, 0.0, logits)))


def luna(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Tensor,
    slots: Tensor | None = None,
    window: Window | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (..., n, c) and A_unpack (..., n, l) from A_pack (..., n, l); `slots` (..., l) masks the slots."""
    keys = values = torch.zeros_like(outer(pack[..., 0, :], key[..., 0, :]))
    steps = []
    for t in range(query.shape[-2]):
        keys = keys + outer(pack[..., t, :], key[..., t, :])
        values = values + outer(pack[..., t, :], value[..., t, :])
        steps.append(read_at(t, query, keys / (t + 1), values / (t + 1), slots, window))
    return stack(steps)


# ---- ABC, section 2 and appendix B.1 ----


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, phi: Tensor, unwritten: bool, window: Window | None = None
) -> tuple[Tensor, Tensor]:
    """Section 2: K~_t = K~_{t-1} + phi_t (x) k_t; `unwritten` is whether slots without a token are read."""
    keys = values = torch.zeros_like(outer(phi[..., 0, :], key[..., 0, :]))
    steps = []
    for t in range(query.shape[-2]):
        keys = keys + outer(phi[..., t, :], key[..., t, :])
        values = values + outer(phi[..., t, :], value[..., t, :])
        used = None if unwritten else (phi[..., : t + 1, :] != 0).any(-2)
        steps.append(read_at(t, query, keys, values, used, window))
    return stack(steps)


def columns(matrix: Tensor, n: int) -> Tensor:
    """Section 3.1: phi_t is column t mod N of a learned matrix (..., m, N); (..., n, m)."""
    return torch.stack([matrix[..., t % matrix.shape[-1]] for t in range(n)], dim=-2)


def one_hot(slots: list[int], m: int) -> Tensor:
    """Appendix A.2: phi_t = e_j with a random j for each t, (n, m); `slots` is the draw."""
    phi = torch.zeros(len(slots), m, dtype=torch.float64)
    for t, slot in enumerate(slots):
        phi[t, slot] = 1
    return phi


def alphas(logits: Tensor, activation: str) -> Tensor:
    """Eq. 7, and Table 8: what tokens write with a learned control, before normalisation."""
    if activation == "exp":
        return torch.exp(logits)
    return torch.where(logits > 0, logits, 0.0) if activation == "relu" else 1 / (1 + torch.exp(-logits))


def mlp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: Tensor,
    activation: str = "exp",
    window: Window | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 7 with the sums of appendix B.1: token t reads sum_{j<=t} alpha_j (x) k_j / sum_{j<=t} alpha_j.

    The quotients are recomputed for each t, in log space where possible, so that nothing overflows.
    """
    steps = []
    for t in range(query.shape[-2]):
        seen, used = logits[..., : t + 1, :], None
        if activation == "relu":
            alpha = torch.where(seen > 0, seen, 0.0)
            total = alpha.sum(-2)
            used = total > 0
            phi = alpha / torch.where(used, total, torch.ones_like(total)).unsqueeze(-2)
        else:
            if activation == "sigmoid":
                seen = -torch.logaddexp(torch.zeros_like(seen), -seen)
            phi = softmax(seen.transpose(-1, -2)).transpose(-1, -2)
        keys, values = ((phi.unsqueeze(-1) * states[..., : t + 1, :].unsqueeze(-2)).sum(-3) for states in (key, value))
        steps.append(read_at(t, query, keys, values, used, window))
    return stack(steps)


def sliding_window(query: Tensor, key: Tensor, value: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Section 3.3: each token reads a queue of the last m tokens, ending with itself; the weights are (..., n, m)."""
    steps = []
    for t in range(query.shape[-2]):
        first = max(0, t + 1 - m)
        out, weights = read(query[..., t, :], key[..., first : t + 1, :], value[..., first : t + 1, :])
        empty = torch.zeros(*weights.shape[:-1], m - weights.shape[-1], dtype=weights.dtype)
        steps.append((out, torch.cat([empty, weights], dim=-1)))
    return stack(steps)


# ---- a whole decoder ----


def heads(states: Tensor, num_heads: int) -> Tensor:
    """Split (n, d) into heads (h, n, c)."""
    size = states.shape[-1] // num_heads
    return torch.stack([states[:, h * size : (h + 1) * size] for h in range(num_heads)])


def rotate(states: Tensor) -> Tensor:
    """RoFormer eq. 15 for (h, n, c): rotate entries i and i + c/2 of token t by the angle t theta_i."""
    half = states.shape[-1] // 2
    turned = torch.empty_like(states)
    for t in range(states.shape[-2]):
        for i in range(half):
            angle = t * 10000 ** (-2 * i / (2 * half))
            a, b = states[:, t, i], states[:, t, i + half]
            turned[:, t, i] = a * math.cos(angle) - b * math.sin(angle)
            turned[:, t, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def sinusoid(position: int, dim: int) -> list[float]:
    """Sines, then cosines, of position * 10000^(-i / (d/2 - 1))."""
    angles = [position * 10000 ** (-i / (dim // 2 - 1)) for i in range(dim // 2)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def convolution(taps: Tensor, states: Tensor) -> Tensor:
    """Causal depthwise convolution out_t = sum_j w_j * x_{t + j - (k - 1)} of taps (d, k) and states (n, d)."""
    out = []
    for t in range(states.shape[0]):
        total = torch.zeros_like(states[0])
        for j in range(taps.shape[1]):
            source = t + j - (taps.shape[1] - 1)
            if source >= 0:
                total = total + taps[:, j] * states[source]
        out.append(total)
    return torch.stack(out)


def project(weights: dict, own: str, x: Tensor, config: SimpleNamespace) -> list[Tensor]:
    """Query, key and value (h, n, c) of a layer with input (n, d); query and key rotated if positions are rotary."""
    sides = linear(weights, f"{own}.query", x), *key_value(weights, own, x)
    query, key, value = (heads(side, config.num_attention_heads) for side in sides)
    if config.position_embedding_type == "rotary":
        query, key = rotate(query), rotate(key)
    return [query, key, value]


def window_of(weights: dict, own: str, states: list[Tensor], writes: Tensor, config: SimpleNamespace) -> Window | None:
    """The window of a mixed layer whose tokens write (h, n, m) to the slots, or `None`."""
    if not config.local_window:
        return None
    scale = weights[f"{own}.slot_scale"][:, None, None] if config.slot_count_bias else 0.0
    number = counts(writes)
    if config.slot_counts == "all":
        return Window(*states[1:], config.local_window, mixed.biases(number, scale))
    # A slot's part of the tokens so far that are not among the last of the window.
    outside = torch.tensor([max(t + 1 - config.local_window, 0) for t in range(number.shape[1])])[:, None]
    total = number.sum(-1, keepdim=True)
    mass = outside * number / torch.where(total > 0, total, torch.ones_like(total))
    bias = scale * torch.log(torch.where(mass > 0, mass, 1.0)) + 0 * number
    return Window(*states[1:], config.local_window, torch.where(outside > 0, bias, -torch.inf))


def attend_luna(
    weights: dict, own: str, index: int, x: Tensor, states: list[Tensor], config: SimpleNamespace
) -> Tensor:
    """Luna's attention, as `mechanism` of `decode_row`; the slots share the tokens evenly."""
    query = heads(linear(weights, f"{own}.pack.query", weights[f"{own}.pack.slots"]), config.num_attention_heads)
    key = heads(linear(weights, f"{own}.pack.key", x), config.num_attention_heads)
    logits = key @ query.transpose(-1, -2) / math.sqrt(key.shape[-1])
    if config.pack_activation == "exp":  # not in the paper: ABC's quotients and counts, with Luna's logits
        window = window_of(weights, own, states, alphas(logits, "exp"), config)
        return mlp(*states, logits, "exp", window)[0]
    window = window_of(weights, own, states, torch.ones_like(logits), config)
    return luna(*states, omega(logits, config.pack_activation), window=window)[0]


def attend_abc(
    weights: dict,
    own: str,
    index: int,
    x: Tensor,
    states: list[Tensor],
    config: SimpleNamespace,
    draw: Callable[[Tensor, int, int], Tensor],
) -> Tensor:
    """ABC's attention, as `mechanism` of `decode_row`; `draw` maps ranks (1, n), number of slots and seed to slots."""
    control, m, (n, num_heads) = config.memory_control, config.memory_size, (x.shape[0], config.num_attention_heads)
    if control == "sliding_window":
        return sliding_window(*states, m)[0]
    if control == "random":
        seed = config.control_seed if config.share_control else config.control_seed + index
        phi = one_hot(draw(torch.arange(n)[None], m, seed)[0].tolist(), m).expand(num_heads, n, m)
        return recurrence(*states, phi, False, window_of(weights, own, states, phi, config))[0]
    name = "control.weight" if config.share_control else f"{own}.control.weight"
    matrix = weights[name].unflatten(0, (num_heads, -1))  # (h, m, d or N)
    if control == "linformer":
        phi = columns(matrix, n)
        return recurrence(*states, phi, True, window_of(weights, own, states, phi, config))[0]
    logits, activation = x @ matrix.transpose(-1, -2), config.control_activation
    window = window_of(weights, own, states, alphas(logits, activation), config)
    return mlp(*states, logits, activation, window)[0]


def decode_row(
    weights: dict, token_ids: list[int], config: SimpleNamespace, mechanism: Callable[..., Tensor]
) -> Tensor:
    """Logits (n, vocab_size) of a causal model for one row.

    Args:
        weights: parameters under the base model's names, and `lm_head`.
        mechanism: the family's attention, which returns (h, n, c) given the weights, the attention's name, its layer's
            index, its input (n, d), query, key and value (h, n, c) after rotation, and the config.
    """
    eps = config.layer_norm_eps
    x = torch.stack([weights["embeddings.word_embeddings.weight"][i] for i in token_ids])
    if config.position_embedding_type == "sinusoidal":
        table = torch.tensor([sinusoid(t, x.shape[-1]) for t in range(x.shape[0])], dtype=x.dtype)
        x = x * math.sqrt(x.shape[-1]) + table
    if "embeddings.token_type_embeddings.weight" in weights:
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(weights, "embeddings.LayerNorm", x, eps)
    for index in range(config.num_hidden_layers):
        name = f"encoder.layer.{index}"
        norm_a, norm_f = f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"
        inner = layer_norm(weights, norm_a, x, eps) if config.norm_first else x
        own = f"{name}.attention.self"
        states = project(weights, own, inner, config)
        mixed = torch.cat(list(mechanism(weights, own, index, inner, states, config)), dim=-1)
        mixed = linear(weights, f"{name}.attention.output.dense", mixed)
        if f"{name}.attention.convolution.weight" in weights:
            mixed = mixed + convolution(weights[f"{name}.attention.convolution.weight"], inner)
        x = x + mixed if config.norm_first else layer_norm(weights, norm_a, x + mixed, eps)
        inner = layer_norm(weights, norm_f, x, eps) if config.norm_first else x
        inner = linear(weights, f"{name}.output.dense", gelu(linear(weights, f"{name}.intermediate.dense", inner)))
        x = x + inner if config.norm_first else layer_norm(weights, norm_f, x + inner, eps)
    return layer_norm(weights, "encoder.final_layer_norm", x, eps) @ weights["lm_head.weight"].T
