"""Contexts that are written once and read many times: self-attention, cross-attention, several memories.

ABC's cross-attention is compared with the literal definition in float64, Luna's with the authors' numbers
(`test_parity_luna.py`, `*_cross`).
"""

import math

import pytest
import torch
from helpers import (
    FAMILY_VARIANTS,
    covering,
    normal_states,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_model,
    variants_of,
    weighted_sum,
)
from test_reference_abc import HEADS, WIDTH, Literal, assert_near, assert_same_gradients, control_of, make_model
from torch.utils.flop_counter import FlopCounterMode

from luna_hf import FAMILIES, AbcConfig, read_memory, write_memory
from luna_hf.families.abc.attention import AbcAttention
from luna_hf.families.abc.configuration import CONTROLS
from luna_hf.ops import memory_read
from luna_hf.ops.memories import SlotMemory, WindowMemory
from luna_hf.ops.memory_read import read_memories

WINDOWS = ("sliding_window", "dilated")
SLOT_CONTROLS = [control for control in CONTROLS if control not in WINDOWS]
WRITES = {
    **{control: {"memory_control": control} for control in SLOT_CONTROLS},
    "mlp-relu": {"control_activation": "relu"},
    "mlp-sigmoid": {"control_activation": "sigmoid"},
    "mlp-of-each-layer": {"share_control": False},
}
backends = pytest.mark.parametrize("backend", ["eager", "sdpa"])


def slot_states_of(model):
    """What the first layer gets besides one row of tokens: ABC's shared control or Luna's packed states."""
    slot_states, _ = model.begin(normal_states(1, 40, model.config.hidden_size), None)
    return slot_states


# ---- cross-attention ----


@pytest.mark.parametrize(("variant", "length", "backend"), covering(list(WRITES), [1, 7, 30], ["eager", "sdpa"]))
def test_abc_reads_a_context_as_defined(variant, length, backend):
    """Output, weights and every gradient: 5 queries, a context of another length."""
    model = make_model(num_hidden_layers=1, **WRITES[variant])
    model.set_attn_implementation(backend)
    attention, literal = model.encoder.layer[0].attention.self, Literal(model)
    queries, context = normal_states(1, 5, WIDTH, seed=1), normal_states(1, length, WIDTH, seed=2)
    results = []
    for states in ([queries, context], [queries[0], context[0]]):
        states = [part.detach().clone().requires_grad_() for part in states]
        if states[0].dim() == 3:
            control = control_of(model, 0)
            memory = write_memory(attention, states[1], slot_states=control)
            output, weights = read_memory(attention, states[0], memory)
            output, weights = output[0], None if weights is None else weights[0]
        else:
            output, weights = literal.cross(*states)
        weighted_sum(output).backward()
        results.append((output, weights, [part.grad.reshape(-1, WIDTH) for part in states]))
    (output, weights, grads), (expected, expected_weights, expected_grads) = results
    assert_near(output, expected, 1e-10, "output")
    if backend == "eager":
        assert_near(weights, expected_weights, 1e-10, "weights")
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert_near(ours, theirs, 1e-8, "gradient of the states")
    assert_same_gradients(model, literal)


@backends
@pytest.mark.parametrize("variant", WRITES)
@torch.no_grad()
def test_padding_of_a_context_changes_nothing(variant, backend):
    model = make_model(num_hidden_layers=1, **WRITES[variant])
    model.set_attn_implementation(backend)
    attention, control = model.encoder.layer[0].attention.self, control_of(model, 0)
    queries, context = normal_states(2, 4, WIDTH, seed=1), normal_states(2, 20, WIDTH, seed=2)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    mask[1, 3::4] = 0
    garbage = context.masked_fill(mask[..., None] == 0, 1e3)
    output, _ = read_memory(attention, queries, write_memory(attention, garbage, mask, slot_states=control))
    for row in range(2):
        alone = write_memory(attention, context[row : row + 1, mask[row] == 1], slot_states=control)
        expected, _ = read_memory(attention, queries[row : row + 1], alone)
        assert_near(output[row], expected[0], 1e-10, f"row {row}")


def test_wrong_reads_and_writes_are_refused():
    """Other tokens reading a window, a decoder's attention writing a context, Luna without packed states."""
    for control in WINDOWS:
        model = make_model(num_hidden_layers=1, memory_control=control)
        attention = model.encoder.layer[0].attention.self
        memory = write_memory(attention, normal_states(1, 20, WIDTH))
        with refused(20, 3):
            read_memory(attention, normal_states(1, 3, WIDTH), memory)
    for family in FAMILIES:
        attention = tiny_causal_model(family).double().base_model.encoder.layer[0].attention.self
        with refused("encoder"):
            write_memory(attention, normal_states(1, 9, 48))
    with refused("slot_states"):
        write_memory(tiny_model("luna").double().encoder.layer[0].attention.self, normal_states(1, 9, 48))


# ---- written once, read many times ----


@pytest.mark.parametrize(
    ("family", "variant"),
    [case for case in FAMILY_VARIANTS if case[1] != "selected" and not (case[0] == "lavo" and "local" in case[1])],
)
@torch.no_grad()
def test_self_attention_is_a_read_of_what_the_tokens_wrote(family, variant):
    """Apart from a local window and selected tokens, which only the tokens themselves read."""
    model = tiny_model(family, **variants_of(family)[variant]).double()
    states, mask = normal_states(2, 20, 48), torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    reads = {"local_window": 0} if model.config.local_window else {}
    slot_states, context = model.begin(states, mask.bool(), **reads)
    attention = model.encoder.layer[0].attention.self
    expected, passed_on, _ = attention(states, slot_states, context)
    memory = write_memory(attention, states, mask, slot_states=slot_states)
    for _ in range(2):
        output, _ = read_memory(attention, states, memory, mask)
        assert torch.equal(output, expected)
    assert (memory.slot_states is None and passed_on is None) or torch.equal(memory.slot_states, passed_on)


@backends
@pytest.mark.parametrize("tokens", [1, 3])
@torch.no_grad()
def test_a_short_context_uses_as_few_slots_as_a_row_of_a_model(backend, tokens):
    """With and without a mask, and whatever the number of packed states that are passed."""
    model = tiny_model(tokens_per_slot=tokens, attn_implementation=backend).double()
    states, attention = normal_states(2, 7, 48), model.encoder.layer[0].attention.self
    slot_states, context = model.begin(states, None)
    assert slot_states.shape[1] == -(-7 // tokens)
    expected = attention(states, slot_states, context)[0]
    all_slots = model.packed_embeddings(2, 8, None)
    for mask in (None, torch.ones(2, 7)):
        output, _ = read_memory(attention, states, write_memory(attention, states, mask, slot_states=all_slots))
        assert_near(output, expected, 1e-12, f"mask {mask}")


def cost_of_reading(family, length, **options):
    """Operations of a second read by 16 states, and bytes of the memory."""
    model = tiny_model(family, max_position_embeddings=50_000, **options)
    model.set_attn_implementation("eager")  # its products are counted
    attention = model.encoder.layer[0].attention.self
    context, queries = normal_states(1, length, 48).float(), normal_states(1, 16, 48, seed=1).float()
    slot_states = slot_states_of(model.double())
    model.float()
    with torch.no_grad():
        memory = write_memory(attention, context, slot_states=None if slot_states is None else slot_states.float())
        read_memory(attention, queries, memory)
        with FlopCounterMode(display=False) as counter:
            read_memory(attention, queries, memory)
    sizes = [state.nbytes for part in memory.parts for state in part if isinstance(state, torch.Tensor)]
    return counter.get_total_flops(), sum(sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_read_costs_the_same_for_500_and_50000_tokens(family):
    short, long = (cost_of_reading(family, length) for length in (500, 50_000))
    assert short == long and short[0] > 0


def test_the_cost_of_a_growing_memory_is_measured():
    short, long = (cost_of_reading("abc_memory", length, memory_control="full") for length in (500, 5_000))
    assert long[0] > 5 * short[0] and long[1] == 10 * short[1]


# ---- several memories in one softmax ----


def make_attention(backend="eager"):
    fields = {"vocab_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 64}
    config = AbcConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attn_implementation=backend, **fields)
    return AbcAttention(config).double().eval()


def by_heads(length, seed, rows=2):
    return normal_states(rows, length, WIDTH, seed=seed).unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous()


def literal_read(query, keys, values, reads):
    """Token by token: softmax over the keys at the (memory, place) pairs of `reads(row, token)`."""
    rows, heads, length, size = query.shape
    output = torch.zeros(rows, length, heads * size, dtype=query.dtype)
    for row in range(rows):
        for head in range(heads):
            for token in range(length):
                found = [(keys[m][row, head, p], values[m][row, head, p]) for m, p in reads(row, token)]
                if not found:
                    continue
                logits = [math.exp(float(query[row, head, token] @ key) / size**0.5) for key, _ in found]
                mean = sum(logit / sum(logits) * value for logit, (_, value) in zip(logits, found, strict=True))
                output[row, token, head * size : (head + 1) * size] = mean
    return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("windows", [(), (4,), (4, 7)])
@backends
@torch.no_grad()
def test_one_softmax_over_a_list_of_memories(backend, windows, causal):
    """Slots, some of them empty, and windows of the same tokens; rows of 11 and 8 tokens."""
    attention, query = make_attention(backend), by_heads(11, seed=0)
    lengths, filled = [11, 8], torch.tensor([[True] * 3, [True, False, True]])[:, None]
    keep = torch.arange(11) < torch.tensor(lengths)[:, None]
    ranks = torch.arange(11).clamp(max=10).expand(2, -1)
    slots, few = (by_heads(3, seed=1), by_heads(3, seed=2)), (by_heads(2, seed=3), by_heads(2, seed=4))
    key, value = by_heads(11, seed=5), by_heads(11, seed=6)
    memories = [SlotMemory(*slots, filled), SlotMemory(*few)]
    memories += [WindowMemory(key, value, keep, w, ranks=ranks, keep=keep, causal=causal) for w in windows]

    def reads(row, token):
        places = [(0, p) for p in range(3) if filled[row, 0, p]] + [(1, p) for p in range(2)]
        for number, w in enumerate(windows):
            first = token - (w - 1 if causal else w // 2)
            places += [(2 + number, p) for p in range(first, first + w) if 0 <= p < lengths[row]]
        return places

    keys, values = zip(slots, few, *((key, value) for _ in windows), strict=True)
    expected = literal_read(query, keys, values, reads)
    output, weights = read_memories(attention, query, memories)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(output[row, :length], expected[row, :length], rtol=0, atol=1e-12)
    if backend == "eager":
        assert weights.shape == (2, HEADS, 11, 5 + sum(windows))
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(HEADS, 11, dtype=torch.float64))
    with torch.enable_grad():  # all heads at once instead of a few at a time
        whole, _ = read_memories(attention, query, memories)
    torch.testing.assert_close(whole.detach(), output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", [*WINDOWS, "mixed"])
@backends
def test_blocks_in_parts_equal_all_blocks_at_once(control, backend, monkeypatch):
    """Inference on a CPU computes windows a few blocks at a time; here the last part is smaller."""
    monkeypatch.setattr(memory_read, "_PART_QUERIES", 12)
    fields = {"memory_control": control, "memory_size": 4}
    if control == "mixed":
        fields = {"memory_control": "mlp", "memory_size": 3, "local_window": 5}
    model = tiny_model("abc_memory", attn_implementation=backend, num_hidden_layers=1, **fields).double()
    ids = random_ids(3, 13)
    ids[0, 6:], ids[1, :2] = 1, 1
    asked = {"output_attentions": backend == "eager"}
    whole = model(ids, **asked)
    with torch.no_grad():
        parts = model(ids, **asked)
    torch.testing.assert_close(parts.last_hidden_state[ids != 1], whole.last_hidden_state.detach()[ids != 1])
    if backend == "eager":
        torch.testing.assert_close(parts.attentions[0], whole.attentions[0].detach())
