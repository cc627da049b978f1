"""What a training step keeps for the backward pass: fewer bytes, the same gradients."""

import pytest
import torch
from helpers import MIXING_FAMILIES, tiny_causal_model, tiny_model, window_of
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, stack_module_state, vmap

from luna_hf import FAMILIES
from luna_hf.ops import recompute
from luna_hf.ops.causal_memory import attend_causal_memory
from luna_hf.ops.scan import causal_scan

# The same operations in the same order; only the parts in which weights' gradients are summed may differ.
NEAR = {"rtol": 1e-9, "atol": 1e-12}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "activation_dropout": 0.1}


@pytest.fixture(params=[True, False], ids=["recomputed", "kept"])
def both(request, monkeypatch):
    """With recomputation for tensors of any size, and without."""
    monkeypatch.setattr(recompute, "LEAST_ENTRIES", 0 if request.param else 2**60)
    return request.param


def step(model, monkeypatch, least):
    """Gradients of all parameters of a model in float64 after a step on two texts, one of them padded."""
    monkeypatch.setattr(recompute, "LEAST_ENTRIES", least)
    ids = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    model.zero_grad()
    torch.manual_seed(0)
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def models(causal=False):
    """Every family, with dropout: post- and pre-norm, and with a window where it can have one."""
    for family in FAMILIES:
        windows = [{}, window_of(family, 6)] if causal and family in MIXING_FAMILIES else [{}]
        for options in [*windows, {"norm_first": True}]:
            make = tiny_causal_model if causal else tiny_model
            kind = {} if causal else {"kind": "mlm"}
            yield make(family, **kind, num_hidden_layers=2, **DROPOUT, **options).double().train()
    if causal:
        yield tiny_causal_model("abc_memory", memory_control="sliding_window", memory_size=8).double().train()


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
def test_the_gradients_stay_the_same(causal, monkeypatch):
    """Under dropout, and with both kinds of checkpointing of whole layers."""
    for model in models(causal):
        expected = step(model, monkeypatch, 2**60)
        torch.testing.assert_close(step(model, monkeypatch, 0), expected, **NEAR)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            torch.testing.assert_close(step(model, monkeypatch, 0), expected, **NEAR)


@pytest.mark.parametrize("normaliser", ["steps", "softmax"])
def test_second_derivatives(normaliser, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(recompute, "LEAST_ENTRIES", 0)
    tensors = [torch.randn(1, 2, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    steps = torch.arange(1, 6)[None]

    def attend(*tensors):
        return attend_causal_memory(*tensors, normaliser, steps=steps, chunk_size=2)[0]

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *own: causal_scan(*own, chunk_size=2)[0], tensors[:3], fast_mode=True)


def test_transforms_of_functions(both):
    """`torch.func.grad` knows no saved tensors, so that everything is kept."""
    model = tiny_model("abc_memory", num_hidden_layers=1)
    states = torch.randn(1, 20, 48)

    def loss(states):
        return model(inputs_embeds=states).last_hidden_state.square().sum()

    actual = torch.func.grad(loss)(states)
    (expected,) = torch.autograd.grad(loss(states.requires_grad_()), states)
    torch.testing.assert_close(actual, expected)


def recorded(model, change, forward, undo):
    """Gradients by name after a pass, if the model is as `undo` leaves it in the backward pass."""
    model.zero_grad()
    torch.manual_seed(0)
    state = change(model)
    loss = forward(model)
    undo(model, state)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def scale_queries(model):
    queries = [module for name, module in model.named_modules() if name.endswith(("query", "output.dense"))]
    return [module.register_forward_hook(lambda module, given, output: -3 * output) for module in queries]


CHANGES = {
    "hooks": (scale_queries, lambda model, hooks: [hook.remove() for hook in hooks]),
    "mode": (lambda model: model.train(), lambda model, _: model.eval()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
def test_a_backward_pass_belongs_to_its_forward_pass(family, causal, change, monkeypatch):
    """Whatever hooks and mode the model has by then."""
    model = (tiny_causal_model(family, **DROPOUT) if causal else tiny_model(family, kind="mlm", **DROPOUT)).double()
    ids, found = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(0)), []
    for least in (2**60, 0):
        monkeypatch.setattr(recompute, "LEAST_ENTRIES", least)
        found.append(recorded(model, CHANGES[change][0], lambda model: model(ids, labels=ids).loss, CHANGES[change][1]))
    torch.testing.assert_close(*found, **NEAR)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
def test_gradients_of_other_parameters(family, causal, monkeypatch):
    """`functional_call` gives a module its own parameters back before the backward pass."""
    model = (tiny_causal_model(family) if causal else tiny_model(family, kind="mlm")).double()
    ids, found = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(0)), []
    for least in (2**60, 0):
        monkeypatch.setattr(recompute, "LEAST_ENTRIES", least)
        others = {name: (-1.5 * weight.detach()).requires_grad_() for name, weight in model.named_parameters()}
        functional_call(model, others, (ids,), {"labels": ids}).loss.backward()
        found.append({name: weight.grad for name, weight in others.items() if weight.grad is not None})
    torch.testing.assert_close(*found, **NEAR)
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_ensemble(family):
    """Of causal models, which keep a state, too."""
    members = [tiny_causal_model(family, seed=seed) for seed in (0, 1)]
    parameters, buffers = stack_module_state(members)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    both = vmap(lambda *own: functional_call(members[0], own, (ids,)).logits)(parameters, buffers)
    for found, member in zip(both, members, strict=True):
        torch.testing.assert_close(found, member(ids).logits)


def test_gradients_of_two_adapters(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(kind="mlm").double(), config, adapter_name="first")
    model.add_adapter("second", config)
    ids, found = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(0)), []
    for least in (2**60, 0):
        monkeypatch.setattr(recompute, "LEAST_ENTRIES", least)
        losses = []
        for name in ("first", "second"):
            model.set_adapter(name)
            model.set_requires_grad(["first", "second"])
            losses.append(model(input_ids=ids, labels=ids).loss)
        model.zero_grad()
        sum(losses).backward()
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad})
    torch.testing.assert_close(*found, **NEAR)


def test_hooks_see_one_computation(both):
    model, seen = tiny_model(num_hidden_layers=1).train(), []
    layer = model.encoder.layer[0]
    modules = (layer.intermediate, layer.intermediate.dense, layer.output.dense, layer.attention.output.LayerNorm)
    for module in (*modules, layer.attention.self.query):
        module.register_forward_hook(lambda *called: seen.append(called[0]))
    model(torch.full((1, 20), 5)).last_hidden_state.sum().backward()
    assert len(seen) == 5


def kept_bytes(call, *own):
    """Bytes of the distinct storages that a call keeps for its backward pass, without `own` tensors."""
    storages, own = {}, {tensor.untyped_storage().data_ptr() for tensor in own}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    del result
    return sum(storage.nbytes() for storage in storages.values())


# Per layer, in tensors as large as the states. RoBERTa's layer keeps 16.
MOST = {"luna": (9.5, 14.5), "abc_memory": (10.5, 13.5)}


@pytest.mark.parametrize("family", MOST)
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
def test_what_a_layer_keeps(family, causal, monkeypatch):
    monkeypatch.setattr(recompute, "LEAST_ENTRIES", 0)
    size = {"hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 1024, "chunk_size_feed_forward": 0}
    slots = {"luna": {"projection_length": 16}, "abc_memory": {"memory_size": 16}}[family]
    make, totals = tiny_causal_model if causal else tiny_model, []
    for layers in (1, 2):
        model = make(family, num_hidden_layers=layers, **size, **slots).train()
        model = model.base_model
        ids = torch.randint(3, 120, (1, 1024))
        totals.append(kept_bytes(lambda model=model, ids=ids: model(ids), *model.parameters(), *model.buffers()))
    assert (totals[1] - totals[0]) / (1024 * 64 * 4) <= MOST[family][causal]
