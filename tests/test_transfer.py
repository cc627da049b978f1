"""The error of a converted model's attention is the literal one, on the teacher's own states."""

from functools import partial

import pytest
import torch
from converting.attention import make_lesson, mean_error, relative_errors, squared_errors
from helpers import TINY, padded_batch, randomise, tiny_model
from reference import abc as abc_reference
from reference import lavo as lavo_reference
from reference import leapformer as leapformer_reference
from reference import luna as luna_reference
from transformers import RobertaConfig, RobertaForMaskedLM

from luna_hf import AbcModel
from luna_hf.warm_start import warm_start

LENGTHS = [12, 5, 9]
SHAPE = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
SHAPE |= {"intermediate_size": TINY["intermediate_size"], "max_position_embeddings": 66}
# Students of every kind that the error is computed for; the first few have a literal definition below.
STUDENTS = {
    "mlp": ("abc_memory", {"memory_size": 3, "conv_kernel_size": 3}),
    "mlp-of-each-layer": ("abc_memory", {"memory_size": 3, "share_control": False}),
    "luna": ("luna", {"projection_length": 6, "tie_kv": False}),
    "luna-convolution": ("luna", {"projection_length": 20, "conv_kernel_size": 3}),
    "leapformer": ("leapformer", {"conv_kernel_size": 3}),
    "cosformer": ("leapformer", {"reweighting": "cosine"}),
    "lavo": ("lavo", {"num_bases": 3, "local_window": 4}),
}


def roberta():
    torch.manual_seed(1)
    model = RobertaForMaskedLM(RobertaConfig(**SHAPE)).eval()
    randomise(model)
    return model


def full_attention():
    """`roberta()` in our layers, as conversions read their teacher."""
    return warm_start(AbcModel, roberta(), memory_control="full")[0].eval()


def errors_of(student, teacher, batch):
    """The sums of `squared_errors` on a batch."""
    lesson = make_lesson(teacher, **batch)
    return squared_errors(student, lesson, student.tokens_to_keep(batch["input_ids"], batch["attention_mask"]))


# ---- the error ----


def teaching(teacher, ids):
    """States into each layer and what its attention adds, of a RoBERTa on one row, by the definition."""
    states = [layer[0] for layer in teacher(ids[None], output_hidden_states=True).hidden_states[:-1]]
    added = []
    for layer, x in zip(teacher.encoder.layer, states, strict=True):
        own = layer.attention.state_dict()
        query, key, value = (luna_reference.linear(own, f"self.{name}", x) for name in ("query", "key", "value"))
        mixed = luna_reference.attention(query, key, value, teacher.config.num_attention_heads)
        added.append(luna_reference.linear(own, "output.dense", mixed))
    return states, added


def abc_added(student, states):
    """What the layers of an ABC add to given states of one row."""
    for layer, x in zip(student.encoder.layer, states, strict=True):
        own = dict(layer.attention.named_parameters())
        control = own.get("self.control.weight", getattr(student.control, "weight", None))
        projections = {name.removeprefix("self."): value for name, value in own.items()}
        mixed, _ = abc_reference.attention(projections, x, student.config, control)
        yield luna_reference.linear(own, "output.dense", mixed) + convolved(own, x)


def luna_added(student, states):
    """What the layers of a Luna add to given states of one row; its packed sequence runs on."""
    config, packed = student.config, dict(student.packed_embeddings.named_parameters())
    used, eps = min(len(states[0]), config.projection_length), config.layer_norm_eps
    p = luna_reference.layer_norm(packed, "LayerNorm", packed["weight"][:used], eps)
    for layer, x in zip(student.encoder.layer, states, strict=True):
        own = dict(layer.attention.named_parameters())
        keys, values = luna_reference.key_value(own, "self.pack", x)
        query = luna_reference.linear(own, "self.pack.query", p)
        y = luna_reference.attention(query, keys, values, config.num_attention_heads)
        keys, values = luna_reference.key_value(own, "self", y)
        query = luna_reference.linear(own, "self.query", x)
        mixed = luna_reference.attention(query, keys, values, config.num_attention_heads)
        p = luna_reference.layer_norm(own, "self.packed_layer_norm", p + y, eps)
        yield luna_reference.linear(own, "output.dense", mixed) + convolved(own, x)


def added_by(reference, student, states):
    """What the layers of a family with such a reference add to given states of one row."""
    for layer, x in zip(student.encoder.layer, states, strict=True):
        own = dict(layer.attention.named_parameters())
        heads, _ = reference.attention(
            {name.removeprefix("self."): value for name, value in own.items()}, x, student.config
        )
        yield luna_reference.linear(own, "output.dense", heads.transpose(0, 1).flatten(1)) + convolved(own, x)


LITERAL = {
    "luna": luna_added,
    "abc_memory": abc_added,
    "leapformer": partial(added_by, leapformer_reference),
    "lavo": partial(added_by, lavo_reference),
}


def convolved(own, x):
    return luna_reference.convolution(own, "convolution", x) if "convolution.weight" in own else 0


@torch.no_grad()
@pytest.mark.parametrize("kind", STUDENTS)
def test_the_error_is_the_literal_one(kind):
    family, options = STUDENTS[kind]
    student = tiny_model(family, **options).double()
    batch, literal = padded_batch(LENGTHS), roberta().double().base_model
    found = errors_of(student, full_attention().double(), batch)
    sums = torch.zeros(student.config.num_hidden_layers, 2, dtype=torch.float64)
    for ids, length in zip(batch["input_ids"], LENGTHS, strict=True):
        states, expected = teaching(literal, ids[:length])
        added = LITERAL[family](student, states)
        for layer, (own, target) in enumerate(zip(added, expected, strict=True)):
            sums[layer] += torch.stack([((own - target) ** 2).sum(), (target**2).sum()])
    torch.testing.assert_close(found, sums, rtol=1e-9, atol=0)
    mean = (sums[:, 0] / sums[:, 1]).mean().item()
    assert mean > 0.05 and mean_error(found).item() == pytest.approx(mean)


def mixed(**fields):
    """A student with a window and slots, made from `roberta()`."""
    return warm_start(AbcModel, roberta(), memory_size=3, local_window=4, **fields)[0].eval()


@torch.no_grad()
def test_full_attention_has_no_error_and_layers_that_keep_it_are_left_out():
    batch, teacher = padded_batch(LENGTHS), full_attention()
    assert mean_error(errors_of(full_attention(), teacher, batch)) < 1e-10
    every, some = (errors_of(mixed(**fields), teacher, batch) for fields in ({}, {"full_attention_layers": [1]}))
    torch.testing.assert_close(some[0], every[0])
    assert some[1].tolist() == [0, 0]
    errors = relative_errors(every)
    assert mean_error(some).item() == pytest.approx(errors[0].item())


def test_only_the_attention_has_a_gradient_and_the_teacher_is_as_it_was():
    for family, options in STUDENTS.values():
        student, teacher = tiny_model(family, **options), full_attention()
        mean_error(errors_of(student, teacher, padded_batch(LENGTHS))).backward()
        names = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
        assert all(".attention." in name or "control" in name or "packed" in name for name in names)
        assert {name for name, _ in student.named_parameters() if "query" in name} <= names
        assert all(parameter.grad is None for parameter in teacher.parameters())
        assert not [module for module in teacher.modules() if module._forward_pre_hooks]
