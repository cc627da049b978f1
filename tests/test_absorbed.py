"""Projections absorbed by few slots: the numbers of the plain form, and only where that is cheaper and possible."""

from types import SimpleNamespace

import pytest
import torch
from helpers import in_turn, padded_batch, tiny_model
from reference import abc, luna
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from luna_hf import absorb, absorb_projections
from luna_hf.ops import absorbed, attention, dispatch
from luna_hf.ops.attention import split_heads

ROWS, LENGTH, SLOTS, WIDTH, HEADS = 3, 9, 4, 12, 3
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def layer(seed):
    torch.manual_seed(seed)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    nn.init.normal_(linear.bias)
    return linear


def states(seed, length=LENGTH):
    return torch.randn(ROWS, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def projected(linear, rows):
    return rows @ linear.weight.T + linear.bias


def padding():
    """Left padding, right padding, and a row of padding alone."""
    keep = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    keep[0, :2], keep[1, 5:], keep[2] = False, False, False
    return keep


# ---- pure functions against literal definitions ----


@pytest.mark.parametrize("keep", [None, padding()], ids=["full", "padded"])
@pytest.mark.parametrize("tied", [False, True])
def test_pack_is_softmax_attention(keep, tied):
    query, tokens, key = states(0, SLOTS), states(1), layer(2)
    value = key if tied else layer(3)
    packed = absorbed.absorbed_pack(split_heads(query, HEADS), tokens, key, value, keep)
    for i in range(ROWS):
        row = tokens[i] if keep is None else tokens[i][keep[i]]
        expected = luna.attention(query[i], projected(key, row), projected(value, row), HEADS)
        torch.testing.assert_close(packed[i], expected, **EXACT)


@pytest.mark.parametrize("filled", [None, padding()[:, :SLOTS]], ids=["all", "some"])
def test_read_is_softmax_attention_and_output_projection(filled):
    tokens, key, value, query, output = states(0), states(1, SLOTS), states(2, SLOTS), layer(3), layer(4)
    mask = None if filled is None else filled[:, None, None]
    read = absorbed.absorbed_read(tokens, query, split_heads(key, HEADS), split_heads(value, HEADS), output, mask)
    for i in range(ROWS):
        used = slice(None) if filled is None else filled[i]
        expected = luna.attention(projected(query, tokens[i]), key[i][used], value[i][used], HEADS)
        torch.testing.assert_close(read[i], projected(output, expected), **EXACT)


def test_a_bias_of_the_slots_counts_them_several_times():
    tokens, key, value, query, output = states(0), states(1, 2), states(2, 2), layer(3), layer(4)
    counts = torch.tensor([1, 3])
    bias = counts.double().log().expand(1, HEADS, 1, 2)
    read = absorbed.absorbed_read(tokens, query, split_heads(key, HEADS), split_heads(value, HEADS), output, bias)
    key, value = (side.repeat_interleave(counts, 1) for side in (key, value))
    for i in range(ROWS):
        expected = luna.attention(projected(query, tokens[i]), key[i], value[i], HEADS)
        torch.testing.assert_close(read[i], projected(output, expected), **EXACT)


@pytest.mark.parametrize("shared", [False, True], ids=["heads", "shared"])
def test_slots_can_be_projected_after_they_are_written(shared):
    tokens, key = states(0), layer(1)
    phi = torch.randn(ROWS, 1 if shared else HEADS, SLOTS, LENGTH, dtype=torch.float64)  # sums other than one
    slots = absorbed.project_slots(phi @ tokens[:, None], phi.sum(-1), key, HEADS)
    for i in range(ROWS):
        for h in range(HEADS):
            part = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
            expected = abc.write(phi[i, 0 if shared else h].T, projected(key, tokens[i])[:, part])
            torch.testing.assert_close(slots[i, h], expected, **EXACT)


def test_dropout_drops_weights(monkeypatch):
    """Packed and read states are those of the weights that are left, the value's bias included."""
    kept = []

    def drop(weights, probability):
        kept.append(functional.dropout(torch.ones_like(weights), probability))
        return weights * kept[-1]

    functional = nn.functional
    monkeypatch.setattr(absorbed, "F", SimpleNamespace(dropout=drop))
    query, tokens, linears, keep = states(0, SLOTS), states(1), [layer(seed) for seed in range(2, 5)], padding()
    packed = absorbed.absorbed_pack(split_heads(query, HEADS), tokens, *linears[:2], keep, 0.5)
    read = absorbed.absorbed_read(tokens, linears[0], *(split_heads(query, HEADS),) * 2, linears[2], None, 0.5)
    key, value, size = projected(linears[0], tokens), projected(linears[1], tokens), WIDTH // HEADS
    slots_kept, tokens_kept = kept[0].view(ROWS, HEADS, SLOTS, LENGTH), kept[1].view(ROWS, LENGTH, HEADS, SLOTS)
    for i in range(ROWS):
        written, taken = torch.zeros(SLOTS, WIDTH).double(), torch.zeros(LENGTH, WIDTH).double()
        for h in range(HEADS):
            part = slice(h * size, (h + 1) * size)
            if keep[i].any():
                logits = query[i, :, part] @ key[i, keep[i]][:, part].T / size**0.5
                written[:, part] = (logits.softmax(-1) * slots_kept[i, h][:, keep[i]]) @ value[i, keep[i]][:, part]
            logits = key[i, :, part] @ query[i, :, part].T / size**0.5
            taken[:, part] = (logits.softmax(-1) * tokens_kept[i, :, h]) @ query[i, :, part]
        torch.testing.assert_close(packed[i], written, **EXACT)
        torch.testing.assert_close(read[i], projected(linears[2], taken), **EXACT)


# ---- the rule ----


@pytest.mark.parametrize(
    ("sizes", "matrices", "chosen"),
    [
        *(((tokens, 16, 768, 12), matrices, True) for tokens in (512, 2048, 16384) for matrices in (1, 2)),
        *(((tokens, 128, 768, 12), 2, False) for tokens in (512, 2048, 16384)),
        ((2048, 32, 768, 12), 2, True),
        ((2048, 32, 768, 12), 1, False),
        ((128, 32, 768, 12), 2, False),  # folding the weights is shared by too few tokens
        ((16, 16, 768, 12), 2, False),
        ((2048, 64, 256, 4), 2, False),
    ],
)
def test_few_slots_pay(sizes, matrices, chosen):
    assert absorb.is_cheaper(*sizes, matrices=matrices) is chosen


def test_training_pays_later():
    """The gradient of the softmax costs as much again."""
    assert absorb.is_cheaper(2048, 16, 64, 2) and not absorb.is_cheaper(2048, 16, 64, 2, training=True)
    with torch.enable_grad():
        assert not absorb.is_cheaper(2048, 16, 64, 2)
        assert absorb.is_cheaper(2048, 16, 256, 4) and absorb.is_cheaper(2048, 16, 768, 12)


# ---- models ----

MODELS = {
    "luna-tied": ("luna", {}),
    "luna-untied-heads-prenorm": ("luna", {"tie_kv": False, "num_projected_attention_heads": 2, "norm_first": True}),
    "luna-fixed-convolution": ("luna", {"dynamic_projection": False, "conv_kernel_size": 3}),
    "luna-tokens-per-slot": ("luna", {"tokens_per_slot": 3}),
    "luna-mixed": ("luna", {"local_window": 4}),
    "luna-full-layer": ("luna", {"full_attention_layers": [1]}),
    **{
        f"abc-{control}": ("abc_memory", {"memory_control": control})
        for control in ("mlp", "linformer", "random", "cluster", "compressive", "local_to_global")
    },
    "abc-relu": ("abc_memory", {"memory_control": "mlp", "control_activation": "relu", "share_control": True}),
    "abc-sigmoid": ("abc_memory", {"memory_control": "mlp", "control_activation": "sigmoid"}),
    "abc-mixed": ("abc_memory", {"local_window": 4}),
    "abc-window": ("abc_memory", {"memory_control": "sliding_window"}),
}
# Which functions a model uses, if all pay; the others take the plain form.
USED = {
    "luna-mixed": {"pack", "project_slots"},
    **{f"abc-{control}": {"read"} for control in ("random", "cluster", "compressive", "local_to_global")},
    "abc-mixed": set(),
    "abc-window": set(),
}


def replace(monkeypatch, function, other):
    """Replace a function of `absorbed` wherever it is imported."""
    for module in (absorbed, absorb):
        for name in [name for name, value in vars(module).items() if value is function]:
            monkeypatch.setattr(module, name, other)


@pytest.fixture
def used(monkeypatch):
    """Let every absorption pay, and collect the names of the functions that ran."""
    names = set()
    for name in ("pack", "read", "project_slots"):
        function = getattr(absorbed, name if name == "project_slots" else f"absorbed_{name}")

        def recorded(*args, name=name, function=function):
            names.add(name)
            return function(*args)

        replace(monkeypatch, function, recorded)
    replace(monkeypatch, absorb.is_cheaper, lambda *sizes, **numbers: True)
    return names


def plainly(model, inputs):
    """The output of eager attention, which never absorbs."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    output = model(**inputs)
    model.set_attn_implementation(backend)
    return output.last_hidden_state


def model_of(family, **fields):
    return absorb_projections(tiny_model(family, **fields).double().eval())


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_same(name, used):
    family, fields = MODELS[name]
    model = model_of(family, **fields)
    for side in ("right", "left"):
        inputs = padded_batch([21, 17, 5])
        if side == "left":
            inputs = {key: tensor.flip(1) for key, tensor in inputs.items()}
        keep = inputs["attention_mask"] == 1
        expected = plainly(model, inputs)
        assert not used
        torch.testing.assert_close(model(**inputs).last_hidden_state[keep], expected[keep], rtol=0, atol=1e-10)
        assert used == USED.get(name, {"read", "project_slots"} | ({"pack"} if family == "luna" else set()))
        used.clear()


def gradients(model, inputs, keep):
    with torch.enable_grad():
        model.zero_grad()
        model(**inputs).last_hidden_state[keep].square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("name", "checkpointing"), in_turn(MODELS, [False, True]))
def test_models_have_the_same_gradients(name, checkpointing, used):
    family, fields = MODELS[name]
    model, inputs = model_of(family, **fields), padded_batch([21, 17, 5])
    if checkpointing:
        model.train().gradient_checkpointing_enable()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
    keep = inputs["attention_mask"] == 1
    found = gradients(model, inputs, keep)
    assert bool(used) == bool(USED.get(name, True))
    used.clear()
    model.set_attn_implementation("eager")
    expected = gradients(model, inputs, keep)
    assert not used and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-9, msg=lambda text, of=name: f"{of}: {text}"
        )


@pytest.mark.parametrize("family", ["luna", "abc_memory"])
def test_reentrant_checkpointing_chooses_once(family):
    """At a size where inference and training choose differently, both of its runs draw the same dropout."""
    size = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 2048}
    slots = {"projection_length": 16} if family == "luna" else {"memory_size": 16}
    model = absorb_projections(tiny_model(family, **size, **slots, attention_probs_dropout_prob=0.5)).train()
    inputs, found = padded_batch([2000]), []
    for options in ({"use_reentrant": False}, {"use_reentrant": True}):
        model.gradient_checkpointing_enable(options)
        torch.manual_seed(0)
        found.append(gradients(model, inputs, inputs["attention_mask"] == 1))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["luna", "abc_memory"])
def test_attention_dropout_is_passed_on(family, used):
    """Dropout of everything leaves what a model without attention computes, in both forms."""
    model = model_of(family, hidden_dropout_prob=0.0).train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 1.0
    inputs = padded_batch([21, 17])
    expected = plainly(model, inputs)
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=0, atol=1e-10)
    assert "read" in used
    model.eval()
    assert not torch.allclose(model(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize("family", ["luna", "abc_memory"])
def test_the_rule_chooses_in_a_wide_model(family, monkeypatch):
    size = {"hidden_size": 192, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512}
    slots = {"projection_length": 4} if family == "luna" else {"memory_size": 4}
    model = absorb_projections(tiny_model(family, **size, **slots)).eval()
    inputs, reads = padded_batch([500]), []
    function = absorbed.absorbed_read
    replace(monkeypatch, function, lambda *args: reads.append(0) or function(*args))
    torch.testing.assert_close(model(**inputs).last_hidden_state, plainly(model, inputs), rtol=0, atol=1e-5)
    assert len(reads) == model.config.num_hidden_layers


# ---- where the plain form must stay ----


class Adapter(nn.Linear):
    """A linear layer of another class, as adapters and quantized layers are."""


class Quantized(torch.Tensor):
    """A weight of another class."""


def replace_layer(attention, make):
    attention.query, attention.pack.value = make(attention.query), make(attention.pack.value)


def as_adapter(linear):
    linear.__class__ = Adapter
    return linear


def as_quantized(linear):
    linear.weight = nn.Parameter(linear.weight.as_subclass(Quantized), requires_grad=False)
    return linear


def as_pruned(linear):
    return prune.identity(linear, "weight")  # a hook makes its weight


@pytest.mark.parametrize("make", [as_adapter, as_quantized, as_pruned])
def test_other_layers_are_called(make, used):
    model = model_of("luna", tie_kv=False, num_hidden_layers=1)
    replace_layer(model.encoder.layer[0].attention.self, make)
    model(**padded_batch([21, 17]))
    assert not used


def test_an_untouched_model_calls_its_modules(used):
    model, seen = tiny_model("luna", num_hidden_layers=1).eval(), []
    block = model.encoder.layer[0].attention
    for module in (block.self, block.self.query, block.output.dense, block.self.pack.key_value):
        module.register_forward_hook(lambda *args: seen.append(args[0]))
    model(**padded_batch([21, 17]))
    assert not used and len(seen) == 4


class Products(TorchFunctionMode):
    """Collects the dtypes that matrix products compute in."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (nn.functional.linear, torch.matmul):
            self.seen.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cheaper", [True, False])
@pytest.mark.parametrize("family", ["luna", "abc_memory"])
def test_half_precision_is_not_emulated(family, cheaper, monkeypatch):
    """In both forms, on a CPU without instructions for it."""
    for module in (attention, dispatch):
        monkeypatch.setattr(module, "SLOW_CPU_DTYPES", frozenset([torch.bfloat16]))
    monkeypatch.setattr(absorb, "is_cheaper", lambda *sizes, **numbers: cheaper)
    model = absorb_projections(tiny_model(family)).bfloat16()
    with Products() as products:
        assert model(**padded_batch([21, 17])).last_hidden_state.dtype == torch.bfloat16
    assert products.seen == {torch.float32}


def test_what_is_saved_stays_the_same(tmp_path):
    model = tiny_model("luna", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "before")
    absorb_projections(model).save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()


@pytest.mark.parametrize("family", ["leapformer", "lavo"])
def test_other_families_are_refused(family):
    with pytest.raises(ValueError, match="no attention"):
        absorb_projections(tiny_model(family))


class Wrapper(nn.Module):
    """A wrapper with the attributes of what it wraps, such as FSDP's."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, 0

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args):
        self.calls += 1
        return self.module(*args)


def test_a_wrapper_is_called(used):
    model = model_of("luna", num_hidden_layers=1)
    block = model.encoder.layer[0].attention
    block.self = Wrapper(block.self)
    model(**padded_batch([21, 17]))
    assert block.self.calls == 1 and "read" not in used


def test_autocast_and_transforms(used):
    model, inputs = absorb_projections(tiny_model("luna")).eval(), padded_batch([21, 17])
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs)

    attention = model.encoder.layer[0].attention.self

    def transformed(states):
        assert not absorb.may_absorb(attention, states, attention.query)
        return states.sum()

    states = torch.zeros(1, 9, model.config.hidden_size)
    assert absorb.may_absorb(attention, states, attention.query)
    torch.func.grad(transformed)(states)
    assert not used


def test_a_graph_has_the_plain_form(used):
    model, ids = absorb_projections(tiny_model("luna")).requires_grad_(False), padded_batch([21])["input_ids"]
    traced = torch.jit.trace(lambda ids: model(ids).last_hidden_state, (ids,), check_trace=False)
    assert not used
    torch.testing.assert_close(traced(ids), model(ids).last_hidden_state, rtol=0, atol=1e-5)
    assert used
