"""A literal, slow reference of ABC: one row, one head and one token at a time. Shares no code with the package.

Equations and sections are those of Peng et al. 2022 (arXiv 2110.02488); tokens and slots count from 0. A strategy is
its control vectors phi_i, (n, m) with one row per token. Only the windows, whose tokens leave the memory again, are
queues instead. A slot that no token has written is not read.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from . import mixed
from .luna import linear

# ---- writing and reading the memory ----


def write(phi: Tensor, states: Tensor) -> Tensor:
    """Eq. 3: the memory sum_i phi_i (x) s_i, from (n, m) and (n, c) to (m, c)."""
    memory = torch.zeros(phi.shape[1], states.shape[1], dtype=states.dtype)
    for control, state in zip(phi, states, strict=True):
        memory = memory + torch.outer(control, state)
    return memory


def read(query: Tensor, keys: Tensor, values: Tensor, used: list[bool]) -> tuple[Tensor, Tensor]:
    """Eq. 4: softmax(K~ q / sqrt(c))^T V~ over the used slots, (c,), and the weights (m,)."""
    places = [j for j in range(len(used)) if used[j]]
    if not places:
        return 0 * query, torch.zeros(len(used), dtype=query.dtype)
    exponentials = torch.exp(keys[places] @ query / math.sqrt(query.shape[0]))
    weights = torch.zeros(len(used), dtype=query.dtype)
    weights[places] = exponentials / exponentials.sum()
    return weights @ values, weights


# ---- control vectors ----


def standard_basis(slots: list[int | None], m: int) -> Tensor:
    """Return a matrix whose row i is the unit vector e_{slots[i]}, or zero if `slots[i]` is `None`."""
    phi = torch.zeros(len(slots), m, dtype=torch.float64)
    for i, slot in enumerate(slots):
        if slot is not None:
            phi[i, slot] = 1
    return phi


def full(n: int) -> Tensor:
    """Eq. 2: phi_i = e_i, one slot per token, which turns eq. 4 into the softmax attention of eq. 1."""
    return standard_basis(list(range(n)), n)


def alphas(x: Tensor, matrix: Tensor, activation: str = "exp") -> Tensor:
    """Eq. 7: alpha_i = exp(W x_i), (n, m). Table 8: relu and sigmoid."""
    functions = {
        "exp": torch.exp,
        "relu": lambda z: torch.where(z > 0, z, torch.zeros_like(z)),
        "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    }
    return torch.stack([functions[activation](matrix @ token) for token in x])


def mlp(x: Tensor, matrix: Tensor, activation: str = "exp") -> Tensor:
    """Eq. 7: phi_i = alpha_i / sum_j alpha_j, elementwise."""
    alpha = alphas(x, matrix, activation)
    total = alpha.sum(0)
    return alpha / torch.where(total > 0, total, torch.ones_like(total))


def linformer(n: int, matrix: Tensor) -> Tensor:
    """Section 3.1: phi_i is the i-th column of the learned (m, N) matrix."""
    return torch.stack([matrix[:, i] for i in range(n)])


def random(slots: list[int], m: int) -> Tensor:
    """Appendix A.2: phi_i = e_j with a random j for each i; `slots` is the draw."""
    return standard_basis(slots, m)


def global_tokens(n: int, m: int) -> list[int]:
    """The choice that appendix A.1 leaves to "some heuristic": m evenly spaced tokens from the first, or all n <= m."""
    return [j * n // m for j in range(m)] if n > m else list(range(n))


def local_to_global(n: int, m: int) -> Tensor:
    """Appendix A.1: phi_i = e_j if token i is the j-th global token, else 0."""
    chosen = global_tokens(n, m)
    return standard_basis([chosen.index(i) if i in chosen else None for i in range(n)], m)


def compressive(n: int, m: int) -> Tensor:
    """Eq. 8: phi_i = e_floor(i / c) / c, c = n / m; for fractional c, divided by the slot's tokens; c = 1 if n < m."""
    c = max(n / m, 1)
    phi = standard_basis([math.floor(i * m / n) if c > 1 else i for i in range(n)], m)
    return phi / phi.sum(0).clamp(min=1)


def nearest(keys: Tensor, centroids: Tensor) -> list[int]:
    """Return the index of each key's nearest centroid, the first one in a tie."""
    return [min(range(len(centroids)), key=lambda j: float(((key - centroids[j]) ** 2).sum())) for key in keys]


def k_means(keys: Tensor, m: int, iterations: int) -> Tensor:
    """The binary membership M (n, m) of eq. 6: Lloyd's algorithm on keys (n, c), started at evenly spaced tokens."""
    keys = keys.detach()
    centroids = keys[global_tokens(len(keys), m)].clone()
    slots = nearest(keys, centroids)
    for _ in range(iterations - 1):
        for j in range(len(centroids)):
            own = [i for i in range(len(keys)) if slots[i] == j]
            if own:
                centroids[j] = keys[own].mean(0)
        slots = nearest(keys, centroids)
    return standard_basis(slots, m)


def clusters(membership: Tensor) -> Tensor:
    """Eq. 6: phi_i = sum_j M_ij / (sum_l M_lj) e_j."""
    n, m = membership.shape
    phi = torch.zeros_like(membership)
    for i in range(n):
        for j in range(m):
            if membership[i, j]:
                phi[i, j] = membership[i, j] / membership[:, j].sum()
    return phi


# ---- windows ----


def queue(states: Tensor, m: int, steps: int) -> list[Tensor]:
    """Section 3.3: S~_t = U S~_{t-1} + e_m (x) s_t, with U the shift matrix; the memory (m, c) after each step.

    Steps beyond the last state only shift.
    """
    shift = torch.diag(torch.ones(m - 1, dtype=states.dtype), 1)
    newest = standard_basis([m - 1], m)[0]
    memory, memories = torch.zeros(m, states.shape[1], dtype=states.dtype), []
    for t in range(steps):
        memory = shift @ memory
        if t < len(states):
            memory = memory + torch.outer(newest, states[t])
        memories.append(memory)
    return memories


def window(query: Tensor, key: Tensor, value: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Each token attends to m tokens: m // 2 before it, itself, the rest after; (n, c), and weights (n, m)."""
    n, before = len(query), m // 2
    outputs, weights = [], []
    for t in range(n):
        places = range(t - before, t - before + m)
        inside = [0 <= place < n for place in places]
        safe = [place if ok else 0 for place, ok in zip(places, inside, strict=True)]
        output, weight = read(query[t], key[safe], value[safe], inside)
        outputs.append(output)
        weights.append(weight)
    return torch.stack(outputs), torch.stack(weights)


def dilated_window(query: Tensor, key: Tensor, value: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Eq. 9 and appendix A.4: separate windows over even and odd tokens; a token reads the window of its parity."""
    n = len(query)
    outputs, weights = [None] * n, [None] * n
    for parity in (0, 1):
        own = list(range(parity, n, 2))
        if not own:
            continue
        output, weight = window(query[own], key[own], value[own], m)
        for place, token in enumerate(own):
            outputs[token], weights[token] = output[place], weight[place]
    return torch.stack(outputs), torch.stack(weights)


# ---- attention ----


def controls(x: Tensor, key: Tensor, config: SimpleNamespace, matrix: Tensor | None, slots: list[int] | None) -> Tensor:
    """phi of one head, from x (n, d), its keys (n, c), its rows of the control matrix, and the random draw."""
    n, m = len(x), config.memory_size
    strategies = {
        "full": lambda: full(n),
        "mlp": lambda: mlp(x, matrix, config.control_activation),
        "linformer": lambda: linformer(n, matrix),
        "random": lambda: random(slots, m),
        "cluster": lambda: clusters(k_means(key, m, config.cluster_iterations)),
        "local_to_global": lambda: local_to_global(n, m),
        "compressive": lambda: compressive(n, m),
    }
    return strategies[config.memory_control]()


def writes(x: Tensor, phi: Tensor, config: SimpleNamespace, matrix: Tensor | None) -> Tensor:
    """What tokens write to the slots of a mixed layer, (n, m), before it is normalised over the tokens."""
    if config.memory_control == "mlp":
        return alphas(x, matrix, config.control_activation)
    if config.memory_control == "local_to_global":  # the chosen tokens are a sample of all
        return phi.any(0).to(phi).expand(phi.shape)
    return phi


def leave_out(phi: Tensor, tokens: list[int]) -> Tensor:
    """Let some tokens write nothing."""
    return torch.stack([0 * row if i in tokens else row for i, row in enumerate(phi)])


def normalise_left(phi: Tensor, config: SimpleNamespace) -> Tensor:
    """Make the slots that are means those of the tokens that still write to them."""
    if config.memory_control not in ("mlp", "cluster", "compressive"):
        return phi
    total = phi.sum(0)
    return phi / torch.where(total > 0, total, torch.ones_like(total))


def attention(
    weights: dict,
    x: Tensor,
    config: SimpleNamespace,
    control: Tensor | None = None,
    slots: list[int] | None = None,
    context: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head ABC on one row without padding, in a mixed layer if `config.local_window` is not 0.

    Args:
        weights: the parameters of query, key and value, by name.
        x: (n, d) states that read.
        config: fields of `AbcConfig`.
        control: the learned matrix, (h * m, d) or (h * m, N).
        slots: the random draw, one slot per token of the context.
        context: (any, d) states to write; x (self-attention) by default.

    Returns:
        The concatenated heads (n, d) before the output projection, and the weights (h, n, m), or (h, n, m + w) with a
        local window; 0 where nothing is read.
    """
    context = x if context is None else context
    query = linear(weights, "query", x)
    key, value = (linear(weights, name, context) for name in ("key", "value"))
    heads, m = config.num_attention_heads, config.memory_size
    size = x.shape[-1] // heads
    outputs, reads = [], []
    for h in range(heads):
        q, k, v = (states[:, h * size : (h + 1) * size] for states in (query, key, value))
        if config.memory_control in ("sliding_window", "dilated"):
            attend = window if config.memory_control == "sliding_window" else dilated_window
            output, weight = attend(q, k, v, m)
        else:
            matrix = None if control is None else control[h * m : (h + 1) * m]
            phi = controls(context, k, config, matrix, slots)
            rule, selected = mixed.Rule.of(config, weights["slot_scale"][h] if "slot_scale" in weights else 0.0), []
            if rule.selected:
                selected = mixed.select(q, k, rule)
            exact = [*rule.marked, *selected]
            raw = leave_out(writes(context, phi, config, matrix), exact)
            member = [int(row.argmax()) for row in phi] if config.memory_control == "compressive" else None
            phi = normalise_left(leave_out(phi, exact), config) if exact else phi
            used = [bool(column.any()) for column in phi.T]
            memory_k, memory_v = write(phi, k), write(phi, v)
            if config.local_window or rule.marked:
                if config.memory_control == "local_to_global":
                    raw = writes(context, phi, config, matrix)
                counts, memory = sum(mixed.shares(raw)), (memory_k, memory_v)
                output, weight = mixed.attention(q, memory, used, counts, (k, v), rule, selected, member)
            else:
                rows = [read(token, memory_k, memory_v, used) for token in q]
                output, weight = (torch.stack(part) for part in zip(*rows, strict=True))
        outputs.append(output)
        reads.append(weight)
    return torch.cat(outputs, dim=-1), torch.stack(reads)
