"""Causal attention: parity with the authors' module of Luna, and with the definition of ABC.

Tolerances come from each fixture, as in `test_parity_luna.py`: in float32 twice the distance between the authors'
float32 and float64 runs, in float64, where ours is exact, that distance and a quarter. It is measured at the outputs;
sums over tokens are larger, and so are their rounding errors.
"""

import pytest
import torch
from official_luna import Fixture, part

from luna_hf import LunaConfig, MemoryCache
from luna_hf.families.luna.attention import LunaCausalAttention, pack_weights
from luna_hf.ops.attention import split_heads
from luna_hf.ops.causal_memory import attend_causal_memory
from luna_hf.ops.context import make_context

NAMES = ["tied_softplus", "untied_softplus", "tied_elu", "untied_elu"]
CASES = ["plain", "masked_px", "key_mask_ignored", "large"]
ACTIVATIONS = {"softplus_beta_ln2": "softplus", "elu_plus_1": "elu"}
# The authors' layers under our names; the output projection is not the attention's.
OURS = {"pq_proj": "pack.query", "pc_proj": "pack.key", "q_proj": "query", "c_proj": "key_value"}
OURS |= {"k_proj": "key", "v_proj": "value"}

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
fixtures = pytest.mark.parametrize("name", NAMES)


def assert_near(ours, theirs, fixture, case, what):
    error = fixture.float32_error(case)
    atol = 1.25 * error if ours.dtype == torch.float64 else min(2 * error + 1e-6, 1e-4)
    if what.startswith("sum"):
        atol += torch.finfo(torch.float32).eps * theirs.abs().max().item()
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert ours.shape == theirs.shape and difference <= atol, f"{what}: {difference:.2e} > {atol:.2e}"


def linear(weights, name, states):
    return torch.nn.functional.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])


def project(fixture, case, dtype):
    """Query, key, value and pack weights by heads, and the output projection, from the authors' weights."""
    weights = {name: tensor.to(dtype) for name, tensor in fixture.weights().items()}
    states, packed = (fixture.input(case, name).to(dtype) for name in ("query", "pquery"))
    names = ("c_proj", "c_proj") if fixture.config["tie_kv"] else ("k_proj", "v_proj")
    query, key, value, pack_key, pack_query = (
        split_heads(linear(weights, name, source), fixture.config["num_heads"])
        for name, source in [
            ("q_proj", states),
            *((n, states) for n in names),
            ("pc_proj", states),
            ("pq_proj", packed),
        ]
    )
    pack = pack_weights(pack_query, pack_key, ACTIVATIONS[fixture.config["activation"]])
    return (query, key, value, pack), lambda output: linear(weights, "out_proj", output.transpose(1, 2).flatten(2))


def readable(fixture, case):
    """Slots that may be read, if the case masks any."""
    padding = fixture.input(case, "pkey_padding_mask")
    return None if padding is None else ~padding


@dtypes
@fixtures
@pytest.mark.parametrize("case", CASES)
def test_in_parallel(name, case, dtype):
    """Output, unpack weights and pack weights, without a mask of the tokens, which the authors ignore."""
    fixture = Fixture("luna_causal_attention", name)
    tensors, project_out = project(fixture, case, dtype)
    steps = torch.arange(1, tensors[0].shape[2] + 1)[None]
    options = {"steps": steps, "slots": readable(fixture, case), "need_weights": True}
    for chunk_size in (2, 64):
        output, read, _ = attend_causal_memory(*tensors, "steps", **options, chunk_size=chunk_size)
        assert_near(project_out(output), fixture.output(case, "parallel"), fixture, case, "output")
        assert_near(read, fixture.output(case, "unpack_weights"), fixture, case, "unpack weights")
    assert_near(tensors[3], fixture.output(case, "pack_weights"), fixture, case, "pack weights")


@dtypes
@fixtures
@pytest.mark.parametrize("case", CASES)
def test_step_by_step(name, case, dtype):
    """Output, and both accumulators at the steps that the fixture lists."""
    fixture = Fixture("luna_causal_attention", name)
    tensors, project_out = project(fixture, case, dtype)
    outputs, memory, compared = [], None, 0
    for step in range(tensors[0].shape[2]):
        token = [tensor[:, :, step : step + 1] for tensor in tensors]
        output, _, memory = attend_causal_memory(
            *token, "steps", memory=memory, steps=torch.tensor([[step + 1]]), slots=readable(fixture, case)
        )
        outputs.append(output)
        theirs = fixture.output(case, f"state.step{step}.prev_key_accum_mat")
        if theirs is not None:
            compared += 1
            assert_near(memory.key, theirs, fixture, case, f"sum of keys at step {step}")
            theirs = fixture.output(case, f"state.step{step}.prev_value_accum_mat")
            assert_near(memory.value, theirs, fixture, case, f"sum of values at step {step}")
            assert (fixture.output(case, f"state.step{step}.prev_num_steps") == step + 1).all()
    assert compared == 3
    output = project_out(torch.cat(outputs, dim=2))
    assert_near(output, fixture.output(case, "incremental"), fixture, case, "output")


@dtypes
@fixtures
@pytest.mark.parametrize("case", ["plain", "key_mask_ignored", "large"])
@pytest.mark.parametrize("parts", ["parallel", "incremental"])
def test_module(name, case, dtype, parts):
    """`LunaCausalAttention` with the authors' weights; their P comes with the input, one per row."""
    fixture = Fixture("luna_causal_attention", name)
    config = LunaConfig(
        is_decoder=True,
        hidden_size=fixture.config["embed_dim"],
        num_attention_heads=fixture.config["num_heads"],
        projection_length=fixture.input(case, "pquery").shape[1],
        tie_kv=fixture.config["tie_kv"],
        pack_activation=ACTIVATIONS[fixture.config["activation"]],
        position_embedding_type="sinusoidal",
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    attention = LunaCausalAttention(config)
    weights = fixture.weights()
    out_proj = {f"out_proj.{kind}": tensor.to(dtype) for kind, tensor in part(weights, "out_proj.").items()}
    ours = {name: tensor for name, tensor in weights.items() if not name.startswith("out_proj")}
    ours = {f"{OURS[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": tensor for name, tensor in ours.items()}
    states = fixture.input(case, "query").to(dtype)
    sizes = [states.shape[1]] if parts == "parallel" else [1] * states.shape[1]
    for row, packed in enumerate(fixture.input(case, "pquery")):
        attention.load_state_dict({**ours, "pack.slots": packed})
        attention.to(dtype).eval()
        cache, outputs, reads, first = MemoryCache(config), [], [], 0
        for tokens in states[row : row + 1].split(sizes, dim=1):
            context = make_context(None, tokens.shape[1], tokens.device, cache)
            with torch.no_grad():
                output, _, read = attention(tokens, None, context)
            outputs.append(output)
            reads.append(read)
            first += tokens.shape[1]
            cache.count(context.lengths[0], tokens.shape[1])
        output = linear(out_proj, "out_proj", torch.cat(outputs, dim=1))
        read = torch.cat(reads, dim=2)
        assert_near(output, fixture.output(case, parts)[row : row + 1], fixture, case, "output")
        assert_near(read, fixture.output(case, "unpack_weights")[row : row + 1], fixture, case, "unpack weights")
        last = f"state.step{first - 1}.prev_"
        for name_of_ours, theirs in (("key", "key_accum_mat"), ("value", "value_accum_mat")):
            kept, wanted = cache.layers[0].states[name_of_ours], fixture.output(case, last + theirs)
            assert_near(kept, wanted[row : row + 1], fixture, case, f"sum {theirs}")


# ---- ABC ----


@dtypes
@pytest.mark.parametrize("case", ["self", "padded"])
def test_equation_7_from_left_to_right(case, dtype):
    fixture = Fixture("abc", "equation7")
    query, key, value, logits = (fixture.input(case, name).to(dtype) for name in ("q", "k", "v", "slot_logits"))
    padding = fixture.input(case, "padding_mask")
    keep = None if padding is None else ~padding
    begun = torch.ones(query.shape[0], query.shape[2]) if keep is None else keep.cumsum(1)
    for chunk_size in (3, 64):
        output, _, memory = attend_causal_memory(query, key, value, logits, "softmax", keep=keep, chunk_size=chunk_size)
        theirs = [n for n in ("causal", "causal_cumsum", "causal_recurrent") if fixture.output(case, n) is not None]
        assert len(theirs) == (3 if case == "self" else 1)
        for name in theirs:
            read = (begun > 0)[:, None, :, None]  # leading padding reads nothing
            expected = fixture.output(case, name)
            assert_near(output.where(read, 0.0), expected.where(read, 0.0), fixture, case, name)
        if case == "self":
            final = (memory.key / memory.total).transpose(-1, -2), memory.value / memory.total.transpose(-1, -2)
            for ours, name in zip(final, ("final_memory_k", "final_memory_v"), strict=True):
                assert_near(ours, fixture.output(case, name), fixture, case, name)
