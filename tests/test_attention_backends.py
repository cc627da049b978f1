"""The attention backends: eager, sdpa, flash attention (a stand-in with the kernel's signature) and flex."""

import sys
from types import ModuleType

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from helpers import (
    FAMILIES,
    FAMILY_KINDS,
    FAMILY_VARIANTS,
    MODELS,
    in_turn,
    inputs_for,
    padded_batch,
    random_ids,
    refused,
    slow_unless,
    tiny_causal_model,
    tiny_config,
    tiny_model,
    variants_of,
)
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import DataCollatorWithFlattening
from variants import ROWS

from luna_hf.ops import attention, dispatch
from luna_hf.ops.attention import linear, make_key_mask, masked_softmax
from luna_hf.ops.context import whole_length
from luna_hf.ops.memory_read import attend_heads


class Caller(nn.Module):
    """A module with what `attend` needs."""

    is_causal = False
    attention_dropout = 0.0

    def __init__(self, implementation):
        super().__init__()
        self.config = tiny_config(attn_implementation=implementation)
        self.projection = nn.Linear(1, 1)  # the flash path reads the dtype of the weights here


def literal_attention(query, key, value, keep):
    """(b, h, q, c): one query at a time over the kept keys, float64."""
    out = torch.zeros_like(query)
    for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in query.shape[:3])).tolist():
        keys, values = key[b, h][keep[b]], value[b, h][keep[b]]
        if len(keys):
            out[b, h, i] = torch.softmax(keys @ query[b, h, i] / query.shape[-1] ** 0.5, 0) @ values
    return out


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 7), (63, 8), (8, 65)])
def test_unequal_lengths_match_the_definition(implementation, queries, keys):
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, n, 12, dtype=torch.float64) for n in (queries, keys, keys))
    keep = torch.rand(3, keys) > 0.4
    keep[1] = False  # a row without any key
    caller = Caller(implementation).eval()
    for mask in (keep, None):
        split = [states.view(3, -1, 4, 3).transpose(1, 2) for states in (query, key, value)]
        out, _ = attend_heads(caller, *split, make_key_mask(caller.config, mask))
        every = torch.ones_like(keep) if mask is None else mask
        expected = literal_attention(*split, every).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_unpadded_batches_are_not_causal(model_type):
    """Without a mask, transformers' sdpa treats a module that lacks `is_causal` as causal."""
    model = tiny_model(model_type)
    ids = padded_batch([20, 20])["input_ids"]
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 100 + 4
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        fused = model(ids).last_hidden_state
        assert (model(changed).last_hidden_state[:, 0] - fused[:, 0]).abs().max() > 1e-6
        model.set_attn_implementation("eager")
        torch.testing.assert_close(fused, model(ids).last_hidden_state, rtol=0, atol=1e-5)


def flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                 causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                 return_attn_probs=False, block_table=None):  # fmt: skip
    """`flash_attn_varlen_func`: (total, heads, head_dim), each document attended separately."""
    assert not causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.shape[0] == cu_seqlens_q[-1] and k.shape[0] == v.shape[0] == cu_seqlens_k[-1]
    assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
    out = torch.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(c[i].item(), c[i + 1].item()) for c in (cu_seqlens_q, cu_seqlens_k))
        if keys.start < keys.stop:
            logits = torch.einsum("qhc,khc->hqk", q[rows], k[keys]) * softmax_scale
            out[rows] = torch.einsum("hqk,khc->qhc", logits.softmax(-1), v[keys])
    return out


def flash_dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_func`: (batch, length, heads, head_dim)."""
    assert not causal
    logits = torch.einsum("bqhc,bkhc->bhqk", q, k) * softmax_scale
    return torch.einsum("bhqk,bkhc->bqhc", logits.softmax(-1), v)


@pytest.fixture
def flash_attention(monkeypatch):
    """A package `flash_attn` with CPU kernels; returns the list of kernels called."""
    calls = []

    def recorded(kernel):
        def call(*args, **kwargs):
            calls.append(kernel.__name__)
            return kernel(*args, **kwargs)

        call.__wrapped__ = kernel  # transformers reads the signature
        return call

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.flash_attn_func, package.flash_attn_varlen_func = recorded(flash_dense), recorded(flash_varlen)
    package.flash_attn_with_kvcache = None
    padding.pad_input, padding.unpad_input = flash_utils._pad_input, flash_utils._unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    return calls


def use_flash(model):
    """Select flash attention without the library's check for a GPU."""
    model.config._attn_implementation = "flash_attention_2"
    return model


FLASH_CASES = [(family, variant) for family in FAMILIES for variant in ("default", *ROWS[family].encoder)]


@pytest.mark.parametrize(("model_type", "variant", "side"), in_turn(FLASH_CASES, ["right", "left"]))
def test_flash_attention_under_padding(flash_attention, model_type, variant, side):
    """With more padding than slots, where the stock path loses all queries of Luna's packs."""
    kind = "sequence" if (variant, side) == ("default", "right") else "base"
    pooling = FAMILIES[model_type].config.choices["classifier_pooling"][-1]
    model = tiny_model(model_type, kind, classifier_pooling=pooling, **variants_of(model_type)[variant]).double()
    inputs = padded_batch([20, 3, 11, 1])
    if side == "left":
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    model.set_attn_implementation("eager")
    expected = model(**inputs)
    expected[0].pow(2).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    actual = use_flash(model)(**inputs)
    actual[0].pow(2).sum().backward()
    real = inputs["attention_mask"] == 1 if kind == "base" else slice(None)
    torch.testing.assert_close(actual[0][real], expected[0][real], rtol=0, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    # Dense if the memory has no padding. If slots may be empty or keys differ between queries, sdpa takes over.
    assert set(flash_attention) == {kernel for name, kernel in ROWS[model_type].flash.items() if name == variant}


@pytest.mark.parametrize(("model_type", "variant"), FLASH_CASES)
@torch.no_grad()
def test_flash_attention_without_padding(flash_attention, model_type, variant):
    """The dense kernel; `position_ids` that leave out positions do not mean packed documents."""
    model = tiny_model(model_type, attn_implementation="eager", **variants_of(model_type)[variant])
    inputs = {"input_ids": padded_batch([20])["input_ids"], "position_ids": torch.arange(2, 42, 2)[None]}
    expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(use_flash(model)(**inputs).last_hidden_state, expected, rtol=0, atol=1e-5)
    assert set(flash_attention) == ({"flash_dense"} if variant in ROWS[model_type].flash else set())


@pytest.mark.parametrize(("model_type", "variant"), FLASH_CASES)
@torch.no_grad()
def test_flash_attention_of_packed_texts(flash_attention, model_type, variant):
    """As sentence-transformers passes them; the marks must not reach the kernel, whose rows are others."""
    model = tiny_model(model_type, attn_implementation="eager", **variants_of(model_type)[variant])
    rows = [{"input_ids": random_ids(1, length, seed=length)[0].tolist()} for length in (20, 3, 11, 1)]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    del packed["labels"]
    expected = model(**packed).last_hidden_state
    torch.testing.assert_close(use_flash(model)(**packed).last_hidden_state, expected, rtol=0, atol=1e-5)
    reads_short_texts = whole_length(model.config, model.config.local_window) > 0  # as softmax attention
    assert bool(flash_attention) == (variant in ROWS[model_type].flash or reads_short_texts)


def test_missing_and_unknown_backends_are_refused(monkeypatch):
    model = tiny_model()
    with refused("no_such_attention"):
        model.set_attn_implementation("no_such_attention")
    with refused("no_such_attention"):
        tiny_model(attn_implementation="no_such_attention")
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: False)
    monkeypatch.setattr("transformers.utils.import_utils._is_package_available", lambda *_, **__: (False, "N/A"))
    with refused("FlashAttention2", error=ImportError):
        model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "sdpa"


# Every head, and every variant of one head.
SWITCHED = [(family, kind, "default") for family in FAMILIES for kind in MODELS]
SWITCHED += [(family, "mlm", variant) for family, variant in FAMILY_VARIANTS if variant != "default"]


@pytest.mark.parametrize(("family", "kind", "variant"), SWITCHED)
@torch.no_grad()
def test_sdpa_equals_eager(family, kind, variant):
    model = tiny_model(family, kind, attn_implementation="eager", **variants_of(family)[variant])
    inputs = inputs_for(kind)
    eager = model(**inputs)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        assert {config._attn_implementation for config in configs} == {implementation}
        for name, tensor in model(**inputs).items():
            torch.testing.assert_close(tensor, eager[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("unpad", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model_type", "variant"), [slow_unless(case[1] in ("default", "selected"), *case) for case in FAMILY_KINDS]
)
def test_flex_attention(model_type, variant, unpad):
    # PyTorch 2.13 compiles wrong kernels for CPUs, or none, if one is to serve several shapes; see docs/limits.md.
    torch._dynamo.reset()
    # The kernel requires head sizes that are powers of two, at least 16.
    model = tiny_model(model_type, hidden_size=64, **variants_of(model_type)[variant])
    inputs = padded_batch([40, 3, 17])
    real = inputs["attention_mask"] == 1
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        expected = model(**inputs).last_hidden_state
        model.set_attn_implementation("flex_attention")
        actual = model(**inputs, unpad_inputs=unpad).last_hidden_state
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masked_softmax(dtype):
    logits = torch.tensor([[1e4, -1e4, 3.0], [0.0, 1.0, 2.0]], dtype=dtype, requires_grad=True)
    keep = torch.tensor([[False, True, True], [False, False, False]])
    weights = masked_softmax(logits, keep)
    assert weights.dtype == dtype and weights.tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    weights.sum().backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("slow", [True, False], ids=["emulated", "native"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_half_precision_on_cpu(monkeypatch, model_type, slow):
    """Native and emulated bfloat16 both equal float32 within rounding, on any CPU."""
    for module in (dispatch, attention):
        monkeypatch.setattr(module, "SLOW_CPU_DTYPES", frozenset([torch.bfloat16] if slow else []))
    torch.manual_seed(0)
    layer, states = nn.Linear(32, 16), torch.randn(5, 32)
    expected = layer(states)
    layer, states = layer.bfloat16(), states.bfloat16()
    actual = linear(layer, states)
    assert actual.dtype == torch.bfloat16
    # The product of float32 numbers rounds once, at the end.
    in_float32 = layer.float()(states.float()).bfloat16()
    assert not slow or torch.equal(actual, in_float32)
    torch.testing.assert_close(actual.float(), expected, rtol=0.03, atol=0.03)

    inputs = padded_batch([20, 3])
    model = tiny_model(model_type)
    real = inputs["attention_mask"] == 1
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state[real]
        actual = model.to(torch.bfloat16)(**inputs).last_hidden_state[real]
    # Three layers of normed states of size 1 to 4, each rounded to 8 bits.
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0.1)


class LinearDtypes(TorchFunctionMode):
    """Records the dtypes in which linear layers compute."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            self.seen.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["mlm", "token", "span", "causal"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_linear_layer_avoids_emulation(monkeypatch, model_type, kind):
    model = (tiny_causal_model(model_type) if kind == "causal" else tiny_model(model_type, kind)).bfloat16()
    for slow, computes_in in ((True, torch.float32), (False, torch.bfloat16)):
        for module in (dispatch, attention):
            monkeypatch.setattr(module, "SLOW_CPU_DTYPES", frozenset([torch.bfloat16] if slow else []))
        with torch.no_grad(), LinearDtypes() as dtypes:
            assert model(**padded_batch([20, 3]))[0].dtype == torch.bfloat16
        assert dtypes.seen == {computes_in}
