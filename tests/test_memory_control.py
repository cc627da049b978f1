"""The control strategies as pure functions, and their cost."""

import itertools

import pytest
import torch
from helpers import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from luna_hf.families.abc.attention import _WRITERS, random_slots
from luna_hf.families.abc.configuration import ACTIVATIONS, CONTROLS
from luna_hf.ops import memory_control
from luna_hf.ops.context import row_lengths, token_ranks
from luna_hf.ops.memories import (
    join_blocks,
    key_blocks,
    key_places,
    query_blocks,
    window_mask,
)
from luna_hf.ops.memory_control import cluster_slots, compressive_slots, control_weights, global_slots, tokens_per_slot
from luna_hf.ops.tokens import move_to_ranks, window_reach, write_to_slots

LENGTHS = [1, 2, 7, 8, 9, 64, 100, 1000]
SIZES = [1, 2, 5, 8, 64]
ONE_SLOT = ["random", "compressive", "local_to_global"]  # every token writes into one slot or none


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def row(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks and length of one row without padding."""
    return token_ranks(None, length, torch.device("cpu")), row_lengths(None, length, torch.device("cpu"))


# ---- mlp ----


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_control_weights_sum_to_one_and_are_zero_at_padding(activation):
    logits = normal(3, 2, 5, 31).requires_grad_()
    keep = torch.rand(3, 31, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[2] = False
    phi = control_weights(logits, keep, activation)
    assert (phi >= 0).all()
    assert (phi.masked_select(~keep[:, None, None, :]) == 0).all()
    torch.testing.assert_close(phi[:2].sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
    assert not phi[2].any()
    phi.square().sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad.masked_select(~keep[:, None, None, :]).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_control_weights_are_the_quotient_of_equation_7(activation):
    logits = normal(2, 2, 5, 11)
    alpha = {"exp": logits.exp(), "relu": logits.clamp(min=0), "sigmoid": 1 / (1 + (-logits).exp())}[activation]
    torch.testing.assert_close(control_weights(logits, None, activation), alpha / alpha.sum(-1, keepdim=True))


def test_an_empty_slot_of_relu_has_a_zero_gradient():
    logits = torch.stack([-torch.ones(6), torch.arange(6.0) - 2])[None, None].requires_grad_()
    phi = control_weights(logits, None, "relu")
    assert not phi[0, 0, 0].any()
    torch.testing.assert_close(phi[0, 0, 1], torch.tensor([0, 0, 0, 1, 2, 3]) / 6)
    (phi * torch.arange(6.0)).sum().backward()
    assert not logits.grad[0, 0, 0].any() and logits.grad[0, 0, 1].any()


# ---- ranks ----


def test_ranks_count_the_real_tokens():
    keep = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    ranks, lengths = token_ranks(keep, 5, keep.device), row_lengths(keep, 5, keep.device)
    assert ranks.tolist() == [[0, 0, 1, 1, 2], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert lengths.tolist() == [[3], [2], [0]]
    states = normal(3, 2, 5, 4)
    moved = move_to_ranks(states, ranks, keep)
    for i, kept in enumerate(keep):
        real = int(kept.sum())
        assert torch.equal(moved[i, :, :real], states[i][:, kept])
        assert not moved[i, :, real:].any()


# ---- random ----


@pytest.mark.parametrize("m", [2, 5, 128])
def test_random_slots_are_uniform(m):
    """Chi-square against the uniform distribution exceeds its mean by six standard deviations once in 10^6 draws."""
    count = 200_000
    for seed in range(2):
        slots = random_slots(torch.arange(count)[None], m, seed)[0]
        assert slots.min() >= 0 and slots.max() < m
        observed = torch.bincount(slots, minlength=m).double()
        assert ((observed - count / m) ** 2 / (count / m)).sum() < (m - 1) + 6 * (2 * (m - 1)) ** 0.5


def test_random_slots_of_neighbours_and_of_other_seeds_are_independent():
    count, m = 200_000, 8
    first = random_slots(torch.arange(count)[None], m, 0)[0]
    for ranks, seed in ((torch.arange(1, count + 1), 0), (torch.arange(count), 1)):
        second = random_slots(ranks[None], m, seed)[0]
        observed = torch.bincount(first * m + second, minlength=m * m).double()
        expected = count / m**2
        assert ((observed - expected) ** 2 / expected).sum() < (m * m - 1) + 6 * (2 * (m * m - 1)) ** 0.5


def test_random_slots_never_change():
    """A checkpoint stores the seed only, so these numbers are part of its format."""
    ranks = torch.arange(16)[None]
    assert random_slots(ranks, 64, 0)[0].tolist() == [50, 19, 58, 5, 50, 1, 10, 44, 25, 10, 49, 50, 62, 45, 43, 12]
    assert random_slots(ranks, 64, 1)[0].tolist() == [60, 47, 48, 14, 43, 51, 53, 17, 20, 54, 48, 31, 3, 41, 9, 15]
    assert random_slots(ranks, 5, 12345)[0].tolist() == [1, 1, 3, 0, 0, 0, 1, 1, 3, 2, 3, 3, 1, 1, 3, 4]


# ---- compressive, global ----


@pytest.mark.parametrize("m", SIZES)
def test_compressive_slots_are_equal_parts_of_neighbours(m):
    for c in (1, 2, 3, 16):  # equation 8
        assert compressive_slots(*row(m * c), m)[0].tolist() == [i // c for i in range(m * c)]
    for length in LENGTHS:
        slots = compressive_slots(*row(length), m)[0]
        counts = torch.bincount(slots, minlength=m)
        assert (slots.diff() >= 0).all() and counts.shape == (m,)
        assert counts[: min(m, length)].min() >= 1 and counts[counts > 0].max() - counts[counts > 0].min() <= 1


@pytest.mark.parametrize("m", SIZES)
def test_global_slots_are_distinct_tokens_spread_over_the_row(m):
    for length in LENGTHS:
        slots, chosen = (part[0] for part in global_slots(*row(length), m))
        places = chosen.nonzero()[:, 0]
        assert len(places) == min(m, length) and places[0] == 0
        assert slots[chosen].tolist() == list(range(len(places)))
        if length > m:
            gaps = torch.cat([places, torch.tensor([length])]).diff()
            assert gaps.max() - gaps.min() <= 1


# ---- clusters ----


def k_means(key: torch.Tensor, m: int, iterations: int, keep: torch.Tensor | None = None) -> torch.Tensor:
    length = key.shape[2]
    ranks, lengths = token_ranks(keep, length, key.device), row_lengths(keep, length, key.device)
    return cluster_slots(key, ranks, lengths, keep, m, iterations)


def centroids_of(key: torch.Tensor, slots: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = tokens_per_slot(slots, m)
    return write_to_slots(key, slots, m) / counts.clamp(min=1).unsqueeze(-1), counts > 0


def spread(key: torch.Tensor, slots: torch.Tensor, m: int) -> float:
    """The objective of k-means: the sum of squared distances to the centroids."""
    centroids, _ = centroids_of(key, slots, m)
    own = centroids.gather(2, slots.unsqueeze(-1).expand_as(key))
    return (key - own).square().sum().item()


@pytest.mark.parametrize("m", [1, 5, 16])
def test_clusters_get_tighter_with_every_step(m):
    key = normal(2, 2, 120, 6)
    objective = [spread(key, k_means(key, m, steps), m) for steps in range(1, 12)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(objective))
    assert m == 1 or objective[-1] < 0.95 * objective[0]


def test_every_token_is_in_its_nearest_cluster():
    """Given the centroids before the last step, and given the final ones after convergence."""
    key, m = normal(2, 2, 120, 6), 8
    for steps in (2, 40):
        centroids, filled = centroids_of(key, k_means(key, m, steps - 1), m)
        assert filled.all()
        slots = k_means(key, m, steps)
        assert torch.equal(torch.cdist(key, centroids).argmin(-1), slots)
    assert torch.equal(k_means(key, m, 41), slots)


def test_clusters_do_not_depend_on_autocast():
    """Half precision would lose the distances between keys far from the origin."""
    key = (normal(2, 4, 256, 16) + 3 * normal(1, 4, 1, 16, seed=1)).bfloat16()
    expected = k_means(key.double(), 16, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slots = k_means(key, 16, 3)
    assert (slots != expected).double().mean() < 0.002  # ties in float32


def test_equal_tokens_share_a_cluster():
    """Duplicates leave slots empty; empty slots attract no token and cause no NaN."""
    key = normal(1, 1, 3, 4)[:, :, [0, 0, 1, 1, 0, 2, 0, 1, 2, 2]]
    slots = k_means(key, 5, 3)[0, 0]
    assert len(set(slots.tolist())) == 3
    for token in range(10):
        same = (key[0, 0] == key[0, 0, token]).all(-1)
        assert torch.equal(slots == slots[token], same)
    assert not k_means(torch.ones(1, 1, 9, 4), 4, 3).any()


def test_an_empty_cluster_keeps_its_place():
    """Of two centroids at 10 one gets no token; it must not move to zero, where it would win the 1."""
    key = torch.tensor([10.0, 10, 10, 10, 10, 10, 4, 4, 1]).view(1, 1, 9, 1)
    assert k_means(key, 3, 3)[0, 0].tolist() == [0] * 6 + [2] * 3


def test_clusters_of_a_padded_row_are_those_of_the_row_alone():
    key, keep = normal(2, 2, 30, 6), torch.rand(2, 30, generator=torch.Generator().manual_seed(0)) < 0.5
    slots = k_means(key, 6, 3, keep)
    for i, kept in enumerate(keep):
        assert torch.equal(slots[i][:, kept], k_means(key[i : i + 1, :, kept], 6, 3)[0])


# ---- windows ----


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 23])
@pytest.mark.parametrize(("window", "block"), [(1, 1), (2, 2), (5, 5), (8, 8), (30, 30), (1, 8), (5, 8), (8, 9)])
def test_blocks_hold_the_neighbours_of_their_queries(window, block, length):
    before, after = window_reach(window)
    assert before + 1 + after == window and before - after in (0, 1)
    keep = torch.rand(2, length, generator=torch.Generator().manual_seed(length)) < 0.7
    tokens = torch.arange(length).expand(2, -1)[..., None, None].double()  # one head of size one
    places, inside = key_places(2, length, window, block, keep.device)
    queries = query_blocks(tokens.transpose(1, 2), block)
    keys = key_blocks(tokens.flatten(0, 1), places).transpose(1, 2)
    mask = window_mask((inside & key_blocks(keep.flatten(), places)).unsqueeze(1), block)
    assert mask.shape == (queries.shape[0], 1, block, block + window - 1) and keys.shape[2] == block + window - 1
    keys = keys.transpose(-1, -2).expand(-1, -1, block, -1)  # for every query of a block
    queries, keys, mask = (join_blocks(part[:, 0], 2, length) for part in (queries, keys, mask))
    for b in range(2):
        for t in range(length):
            expected = [i for i in range(t - before, t + after + 1) if 0 <= i < length and keep[b, i]]
            assert queries[b, t, 0] == t
            assert keys[b, t][mask[b, t]].tolist() == expected


# ---- cost ----


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements in the output of any operation, backward pass included."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):  # an expanded view counts by its storage
                stored = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numel = max(self.numel, min(tensor.numel(), stored))
        return out


def attention_of(control: str, memory_size: int, implementation: str = "eager", **fields):
    model = tiny_model(
        "abc_memory", memory_control=control, memory_size=memory_size, max_position_embeddings=2048, **fields
    )
    model.set_attn_implementation(implementation)
    return model, model.encoder.layer[0].attention.self


def run_attention(control: str, length: int, counter, implementation: str = "eager", backward: bool = True):
    """One padded attention under a counter."""
    model, attention = attention_of(control, 16, implementation)
    states = normal(1, length, 48, dtype=torch.float32).requires_grad_()
    keep = torch.arange(length)[None] < length - 3
    with counter:
        slot_states, context = model.begin(states, keep)
        output, _, _ = attention(states, slot_states, context)
        if backward:
            output.sum().backward()
    return counter


@pytest.mark.parametrize("control", CONTROLS)
def test_cost_grows_linearly_with_the_text(control):
    """The largest tensor and the operations; quadratically for full attention, which shows that both are measured."""
    for implementation in ("eager", "sdpa") if control != "full" else ("eager",):
        short, long = (run_attention(control, n, LargestTensor(), implementation).numel for n in (512, 2048))
        assert long > 15 * short if control == "full" else long <= 4.2 * short
    counters = [run_attention(control, n, FlopCounterMode(display=False), backward=False) for n in (512, 2048)]
    short, long = (counter.get_total_flops() for counter in counters)
    assert short > 0
    assert long > 8 * short if control == "full" else long <= 4.2 * short


@pytest.mark.parametrize("control", ["mlp", *ONE_SLOT, "cluster"])
def test_cost_of_writing(control):
    """Strategies with one slot per token need no matrix product and no tensor of tokens times slots."""
    length, m, width, heads = 512, 128, 48, 4
    model, attention = attention_of(control, m, cluster_iterations=3)
    states = normal(1, length, width, dtype=torch.float32)
    key = value = states.unflatten(-1, (heads, -1)).transpose(1, 2)
    slot_states, context = model.begin(states, None)
    flops, largest = FlopCounterMode(display=False), LargestTensor()
    for counter in (flops, largest):
        with counter, torch.no_grad():
            _WRITERS[control](attention, states, (key, value), slot_states, context)
    if control in ONE_SLOT:
        assert flops.get_total_flops() == 0
        assert largest.numel <= max(length, m) * width
    elif control == "cluster":
        # Distances to the centroids in every step, but not the means.
        assert flops.get_total_flops() == 3 * 2 * length * m * width
    else:
        # W x, then phi times the keys and the values.
        assert flops.get_total_flops() == 2 * length * m * width * (heads + 2)


@pytest.mark.parametrize("control", ["sliding_window", "dilated"])
def test_a_window_multiplies_only_with_its_neighbourhood(control):
    """Logits and values of 2 m - 1 keys per query, and three projections."""
    length, m, width = 512, 16, 48
    model, attention = attention_of(control, m)
    states = normal(1, length, width, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(states, *model.begin(states, None))
    assert counter.get_total_flops() == 3 * 2 * length * width**2 + 2 * 2 * length * (2 * m - 1) * width


def test_clusters_are_found_in_blocks_of_tokens(monkeypatch):
    """Blocks, used on a CPU, do not change the membership."""
    torch.manual_seed(0)
    key = torch.randn(2, 3, 29, 4)
    ranks, lengths = token_ranks(None, 29, key.device), row_lengths(None, 29, key.device)
    whole = memory_control.cluster_slots(key, ranks, lengths, None, 5, iterations=3)
    monkeypatch.setattr(memory_control, "_NEAREST_TOKENS", 8)
    assert torch.equal(memory_control.cluster_slots(key, ranks, lengths, None, 5, iterations=3), whole)
