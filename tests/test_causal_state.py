"""The state of a causal model outside plain decoding: gradients, dtypes, other models, the Trainer."""

import copy

import pytest
import torch
from helpers import (
    CAUSAL_KINDS_FIRST,
    FAMILY_CAUSAL_KINDS,
    causal_variants_of,
    random_ids,
    refused,
    relative_rms,
    slots_of,
    tiny_causal_model,
    window_of,
)
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments
from variants import ROWS

from luna_hf import FAMILIES, MemoryCache
from luna_hf.ops.causal_memory import attend_causal_memory

IDS = random_ids(2, 24)
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def variant(family, name, **overrides):
    return tiny_causal_model(family, **{**causal_variants_of(family)[name], **overrides})


@FAMILY
def test_the_trainer_evaluates_and_predicts(family, tmp_path):
    model = tiny_causal_model(family)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS]
    options = TrainingArguments(str(tmp_path), use_cpu=True, per_device_eval_batch_size=2, report_to=[])
    trainer = Trainer(model, options, eval_dataset=rows, compute_metrics=lambda made: {"rows": len(made.label_ids)})
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(model(IDS, labels=IDS).loss.item(), rel=1e-5)
    assert metrics["eval_rows"] == 2
    assert trainer.predict(rows).predictions.shape == (2, 24, model.config.vocab_size)


@FAMILY
@torch.no_grad()
def test_the_former_name_of_the_state_is_understood(family):
    """`past_key_values`, as it was called before Transformers 5.24, is accepted and returned with a warning."""
    model = tiny_causal_model(family)
    expected = model(IDS).logits[:, -1]
    for part in (model, model.base_model):
        cache = MemoryCache(model.config)
        with pytest.warns(FutureWarning, match="cache"):
            outputs = part(IDS[:, :9], past_key_values=cache)
        assert outputs.past_key_values is outputs.cache is cache
    assert_close(model(IDS[:, 9:], cache=cache).logits[:, -1], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "name"), FAMILY_CAUSAL_KINDS)
def test_a_state_made_in_inference_mode_continues_outside_it(family, name):
    model = variant(family, name)
    with torch.inference_mode():
        cache = model(IDS[:, :9]).cache
    with torch.no_grad():
        for part in IDS[:, 9:].split(5, 1):
            logits = model(part, cache=cache).logits[:, -1]
        assert_close(logits, model(IDS, use_cache=False).logits[:, -1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "name"), CAUSAL_KINDS_FIRST)
@torch.no_grad()
def test_the_dtype_of_a_model_may_change_between_two_passes(family, name):
    model = variant(family, name)
    whole = copy.deepcopy(model).double()(IDS, use_cache=False).logits[:, -1]
    cache = model(IDS[:, :12]).cache
    assert_close(model.double()(IDS[:, 12:], cache=cache).logits[:, -1], whole, atol=2e-5, rtol=1e-5)
    if name in ROWS[family].queues:
        assert {state.dtype for layer in cache.layers for state in layer.states.values()} == {torch.float64}
    cache = model.float()(IDS[:, :12]).cache
    assert model.bfloat16()(IDS[:, 12:], cache=cache).logits.isfinite().all()


@pytest.mark.parametrize(("family", "name"), FAMILY_CAUSAL_KINDS)
@torch.no_grad()
def test_autocast_may_end_between_two_passes(family, name):
    model = variant(family, name)
    whole = model(IDS, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        cache = model(IDS[:, :12]).cache
    parts = [model(IDS[:, 12:13], cache=cache).logits]
    with torch.autocast("cpu", torch.bfloat16):
        parts.append(model(IDS[:, 13:], cache=cache).logits)
    assert relative_rms(torch.cat(parts, 1), whole[:, 12:]) < 0.03


@pytest.mark.parametrize(("family", "name"), FAMILY_CAUSAL_KINDS)
@torch.no_grad()
def test_rows_of_a_state_can_be_rearranged(family, name):
    """Reordered, repeated and selected; rows of different lengths continue like the same rows alone."""
    model, start, lengths = variant(family, name), random_ids(3, 12), torch.tensor([12, 5, 9])
    mask = (torch.arange(12) >= 12 - lengths[:, None]).long()
    operations = {
        "reorder_cache": (torch.tensor([2, 0, 1]), [2, 0, 1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
        "batch_select_indices": (torch.tensor([2, 1]), [2, 1]),
    }
    for operation, (argument, rows) in operations.items():
        cache = model(start, attention_mask=mask).cache
        getattr(cache, operation)(argument)
        assert cache.tokens.tolist() == lengths[rows].tolist() and cache.batch_size == len(rows)
        new = random_ids(len(rows), 4, seed=1)
        logits = model(new, cache=cache).logits
        for index, row in enumerate(rows):
            whole = torch.cat([start[row, 12 - lengths[row] :], new[index]])[None]
            assert_close(logits[index], model(whole).logits[0, -4:], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_cached_functions_of_the_weights_follow_them():
    model = tiny_causal_model("luna")
    cache = model(IDS[:, :12]).cache
    pack = model.base_model.encoder.layer[0].attention.self.pack
    kept = cache.layers[0].constants["pack_query"].clone()
    pack.slots.add_(0.5)
    model(IDS[:, 12:13], cache=cache)
    assert not torch.allclose(cache.layers[0].constants["pack_query"], kept)
    expected = pack.query(pack.slots).unflatten(-1, (model.config.num_attention_heads, -1)).transpose(0, 1)
    assert_close(cache.layers[0].constants["pack_query"][0], expected)


@pytest.mark.parametrize(("family", "name"), CAUSAL_KINDS_FIRST)
@pytest.mark.parametrize("trained", ["all", "query"])
def test_gradients_through_a_carried_state_are_those_of_the_whole_text(family, name, trained):
    gradients = []
    for parts in ([IDS], IDS.split(7, 1)):
        model = variant(family, name).double().train()
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(trained == "all" or ".self.query." in parameter_name)
        cache, total = MemoryCache(model.config), 0.0
        for part in parts:
            total = total + model(part, cache=cache, use_cache=True).logits.square().sum()
        total.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    scale = max(gradient.abs().max().item() for gradient in gradients[0])
    for whole, carried in zip(*gradients, strict=True):
        # In float64, because nearly uniform reads leave only rounding errors in float32 gradients of the queries.
        assert_close(carried, whole, atol=1e-12 * scale, rtol=1e-9)


@pytest.mark.parametrize(("family", "name"), FAMILY_CAUSAL_KINDS)
def test_a_detached_state_keeps_its_numbers_and_no_gradients(family, name):
    """Truncated back-propagation: each part has the gradients that it has after a state made without any."""
    gradients, (first, second) = [], IDS.split(12, 1)
    for detached in (True, False):
        model = variant(family, name).double().train()
        cache = MemoryCache(model.config)
        with torch.set_grad_enabled(detached):
            loss = model(first, cache=cache, use_cache=True).logits.square().sum()
        if detached:
            loss.backward()
            model.zero_grad()
            cache.detach()
            assert not any(state.requires_grad for layer in cache.layers for state in layer.states.values())
        model(second, cache=cache, use_cache=True).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert_close(*gradients, atol=1e-12, rtol=1e-9)


@FAMILY
def test_gradient_checkpointing_with_a_state_is_refused(family):
    model = tiny_causal_model(family).train()
    model.activation_checkpointing_enable()
    with refused("cache"):
        model(IDS, cache=MemoryCache(model.config))
    assert model(IDS, labels=IDS).cache is None
    assert model.eval()(IDS, cache=MemoryCache(model.config)).logits.isfinite().all()


@pytest.mark.parametrize("rise", [45.0, 60.0, 100.0, 300.0])
@pytest.mark.parametrize("padded", ["left", "middle"])
def test_padding_in_front_of_a_rise_stays_finite(rise, padded):
    """Padding between a state and tokens with far larger logits."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 1, 40, 4, requires_grad=True) for _ in range(3))
    logits = torch.cat([torch.zeros(2, 1, 20, 3), torch.full((2, 1, 20, 3), rise)], 2).requires_grad_()
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[:, 15:22] = False
    parts = [slice(0, 40)] if padded == "middle" else [slice(0, 15), slice(15, 40)]
    memory, outputs = None, []
    for part in parts:
        tokens = (states[:, :, part] for states in (query, key, value, logits))
        out, _, memory = attend_causal_memory(*tokens, "softmax", memory=memory, keep=keep[:, part])
        outputs.append(out)
    out = torch.cat(outputs, 2)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out[:, :, keep[0]].sum(), (query, key, value, logits)):
        assert gradient.isfinite().all()
    rows = [states[:, :, keep[0]] for states in (query, key, value, logits)]
    assert_close(out[:, :, keep[0]], attend_causal_memory(*rows, "softmax")[0], atol=1e-6, rtol=1e-5)


BACKBONE = {"num_hidden_layers": 1, "conv_kernel_size": 3}
OTHERS = [
    pytest.param(family, options, id=f"{family}-{'-'.join(options)}")
    for family in FAMILIES
    for options in ({**BACKBONE, **window_of(family, 4)}, slots_of(family, 5), ROWS[family].state_options)
    if options
]


@pytest.mark.parametrize(("family", "options"), OTHERS)
def test_the_state_of_another_model_is_refused(family, options):
    for name, value in options.items():
        cache = MemoryCache(tiny_causal_model(family, **{name: value}).config)
        with refused(name, repr(value)):
            tiny_causal_model(family)(IDS, cache=cache)


def test_the_state_of_another_family_is_refused():
    with refused("abc_memory", "luna"):
        tiny_causal_model("luna")(IDS, cache=MemoryCache(tiny_causal_model("abc_memory").config))


@FAMILY
def test_a_cache_may_be_made_from_an_encoders_config(family):
    model = tiny_causal_model(family)
    encoder = type(model.config)(**{**model.config.to_dict(), "is_decoder": False, "position_embedding_type": None})
    assert model(IDS, cache=MemoryCache(encoder)).logits.isfinite().all()
