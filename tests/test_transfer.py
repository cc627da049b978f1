"""Attention transfer: the error is the literal one, only new parameters change, and the result is the student."""

import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transfer_attention
from accelerate.utils import DistributedType
from engine import log, pretraining
from engine.throughput import forward_flops
from helpers import TINY, padded_batch, randomise, tiny_model
from objectives import teacher as teachers
from objectives import transfer as objective
from objectives.transfer import AttentionTransfer
from reference import abc as abc_reference
from reference import lavo as lavo_reference
from reference import leapformer as leapformer_reference
from reference import luna as luna_reference
from safetensors.torch import save_file
from tiny_training import (
    TRANSFERS,
    Killed,
    arguments,
    dies_at_call,
    files_of,
    losses,
    same_weights,
    start,
    truncated,
    weights,
    without_model_section,
    write_corpus,
    write_student,
    write_teacher,
)
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.scripting import UserError
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


def roberta(**options):
    torch.manual_seed(1)
    model = RobertaForMaskedLM(RobertaConfig(**{**SHAPE, **options})).eval()
    randomise(model)
    return model


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
    teacher = roberta().double().base_model
    student = tiny_model(family, "mlm", **options).double()
    batch = padded_batch(LENGTHS)
    out = AttentionTransfer(student, teacher)(**batch)
    sums = torch.zeros(3, 2, dtype=torch.float64)
    for ids, length in zip(batch["input_ids"], LENGTHS, strict=True):
        states, expected = teaching(teacher, ids[:length])
        added = LITERAL[family](student.base_model, states)
        for layer, (own, target) in enumerate(zip(added, expected, strict=True)):
            sums[layer] += torch.stack([((own - target) ** 2).sum(), (target**2).sum()])
    torch.testing.assert_close(out.sums, sums, rtol=1e-10, atol=0)
    assert out.loss.item() == pytest.approx((sums[:, 0] / sums[:, 1]).mean().item()) and out.loss > 0.05


@torch.no_grad()
@pytest.mark.parametrize("source", ["roberta", "bert", "full"])
def test_full_attention_with_the_teachers_weights_has_no_error(source):
    if source == "bert":
        teacher = BertForMaskedLM(BertConfig(**SHAPE, pad_token_id=1)).eval()
        randomise(teacher)
    elif source == "full":
        options = {"memory_control": "full", "conv_kernel_size": 3, "norm_first": True}
        teacher = tiny_model("abc_memory", "mlm", **options)
    else:
        teacher = roberta()
    student = warm_start(AbcForMaskedLM, teacher, memory_control="full")[0]
    if source == "full":
        student.load_state_dict(teacher.state_dict())
    batch = padded_batch(LENGTHS)
    made = AttentionTransfer(student, teacher.base_model)
    assert made(**batch).loss < 1e-10
    swapped = warm_start(AbcForMaskedLM, teacher, memory_control="mlp", memory_size=2)[0]
    assert AttentionTransfer(swapped, teacher.base_model)(**batch).loss > 1e-4


def mixed(**fields):
    """A student with a window and slots, made from `roberta()`."""
    return warm_start(AbcForMaskedLM, roberta(), memory_size=3, local_window=4, **fields)[0].eval()


@torch.no_grad()
def test_without_its_window_a_student_is_one_with_slots_alone():
    student, teacher, batch = mixed(slot_count_bias=False), roberta().base_model, padded_batch(LENGTHS)
    alone = warm_start(AbcForMaskedLM, roberta(), memory_size=3)[0]
    alone.load_state_dict(student.state_dict())
    found = AttentionTransfer(student, teacher)(**batch, local_window=0)
    torch.testing.assert_close(found.sums, AttentionTransfer(alone, teacher)(**batch).sums, rtol=0, atol=0)
    assert not torch.allclose(AttentionTransfer(student, teacher)(**batch).sums, found.sums)


def test_layers_that_stay_full_are_left_out():
    batch = padded_batch(LENGTHS)
    student = mixed(full_attention_layers=[1])
    transfer = AttentionTransfer(student, roberta().base_model)
    out = transfer(**batch)
    every = AttentionTransfer(mixed(), roberta().base_model)(**batch)
    torch.testing.assert_close(out.sums[[0, 2]], every.sums[[0, 2]])
    assert out.sums[1].tolist() == [0, 0]
    errors = objective.relative_errors(every.sums)
    assert out.loss.item() == pytest.approx((errors[0] + errors[2]).item() / 2)
    names = objective.freeze_unused(transfer, batch)
    assert names and not any(".1." in name for name in names)


def test_what_stands_at_padding_does_not_count():
    student, teacher = tiny_model("abc_memory", "mlm"), roberta().base_model
    transfer = AttentionTransfer(student, teacher)
    (short,) = padded_batch([5])["input_ids"]
    alone = transfer(short[None], torch.ones(1, 5, dtype=torch.long))
    ids = torch.full((1, 9), 1)
    ids[0, :5] = short
    padded = transfer(ids, (ids != 1).long())
    torch.testing.assert_close(padded.sums, alone.sums)


def test_teacher_and_dropout_stay_out_of_it():
    student, teacher = tiny_model("luna", "mlm", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5), roberta()
    transfer = AttentionTransfer(student, teacher.base_model).train()
    assert not any(module.training for module in (*student.modules(), *teacher.base_model.modules()))
    assert {name.partition(".")[0] for name, _ in transfer.named_parameters()} == {"student"}
    assert {name.partition(".")[0] for name in transfer.state_dict()} == {"student"}
    batch = padded_batch(LENGTHS)
    first = transfer(**batch)
    first.loss.backward()
    assert torch.equal(first.loss, transfer(**batch).loss)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.base_model.parameters())
    hooks = [module for module in teacher.modules() if module._forward_pre_hooks]
    assert not hooks
    transfer.double()
    assert {parameter.dtype for parameter in teacher.base_model.parameters()} == {torch.float64}


def test_what_the_error_does_not_depend_on_needs_no_gradient():
    for family, options in STUDENTS.values():
        student = tiny_model(family, "mlm", **options)
        transfer = AttentionTransfer(student, roberta().base_model)
        names = objective.freeze_unused(transfer, padded_batch(LENGTHS))
        assert names == [name for name, parameter in student.named_parameters() if parameter.requires_grad]
        assert all(".attention." in name or "control" in name or "packed" in name for name in names)
        assert {name for name, _ in student.named_parameters() if "query" in name} <= set(names)
        assert all(parameter.grad is None for parameter in student.parameters())
    batch = padded_batch(LENGTHS)
    both, teacher = (forward_flops(module, batch) for module in (transfer, transfer.teacher))
    backward = 2 * (both - teacher)  # the teacher has none
    found = objective.TransferObjective().flops_per_token(transfer, batch)
    assert found == pytest.approx((both + backward) / sum(LENGTHS)) and both > teacher > 0


# ---- whole runs ----

TINY_RECIPE = next(path for path in TRANSFERS if path.stem == "tiny")
NEW = "{match: control|convolution|pack, learning_rate: 3e-2}"
ALWAYS, FOR_A_WHILE = (f"[{NEW}, {{match: '', frozen_steps: {steps}}}]" for steps in (1000, 3))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    """A RoBERTa of two layers with maps that are not flat."""
    folder = write_teacher(tmp_path_factory.mktemp("teacher") / "out", corpus, model__num_hidden_layers=2)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(15)
    model.save_pretrained(folder)
    return folder


STARTS = {
    "abc": (AbcForMaskedLM, {"memory_size": 4, "conv_kernel_size": 3}),
    "luna": (LunaForMaskedLM, {"projection_length": 4}),
    "random": (AbcForMaskedLM, {"memory_control": "random", "memory_size": 4}),
    "full": (AbcForMaskedLM, {"memory_size": 4, "full_attention_layers": [0, 1]}),
    "mixed": (AbcForMaskedLM, {"memory_size": 4, "local_window": 4}),
}


@pytest.fixture(scope="module")
def starts(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    return {name: write_student(folder / name, teacher, kind, **fields) for name, (kind, fields) in STARTS.items()}


def words(corpus, guide, start, folder, **overrides):
    values = {"data": corpus, "teacher": guide, "model_name_or_path": start, "parameter_groups": ALWAYS}
    values |= {"output_dir": folder, **overrides}
    return without_model_section(arguments(TINY_RECIPE, values.pop("output_dir"), **values))


def measured(folder):
    return [entry for entry in log.read_log(folder / "log.jsonl") if entry["kind"] == "objective"]


@pytest.mark.parametrize("name", ["abc", "luna"])
def test_the_new_parameters_learn_and_the_student_is_saved(corpus, teacher, starts, tmp_path, name):
    folder = tmp_path / "out"
    options = {"max_steps": 30, "eval_steps": 15, "save_steps": 100}
    assert transfer_attention.main(words(corpus, teacher, starts[name], folder, **options)) == 0
    before, after = weights(starts[name]), weights(folder)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and changed == {key for key in changed if re.search("control|convolution|pack", key)}
    assert {"abc": "abc.control.weight", "luna": "luna.packed_embeddings.weight"}[name] in changed

    errors = measured(folder)
    assert [entry["step"] for entry in errors] == [0, 15, 30] and all(len(entry["layers"]) == 2 for entry in errors)
    assert errors[-1]["loss"] < 0.95 * errors[0]["loss"]
    assert errors[-1]["loss"] == pytest.approx(sum(errors[-1]["layers"]) / 2)
    _, training = log.RunLog(folder / "log.jsonl", False, 99).series("train", "loss")
    assert training[0] == pytest.approx(errors[0]["loss"], rel=0.3)  # of other rows

    figures = json.loads((folder / "metrics.json").read_text())
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert figures["objective"]["layers"] == errors[-1]["layers"]
    assert figures["parameters"] == model.num_parameters() and figures["model_type"] == model.config.model_type
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    card = (folder / "README.md").read_text()
    assert "to that of `out`" in " ".join(card.split())
    assert str(tmp_path) not in card and "teacher: out" in card
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


HALF = "{windows: [0], probability: 0.5, final_probability: 0.5}"


@pytest.mark.parametrize(("name", "more"), [("luna", {}), ("mixed", {"window_dropout": HALF})])
def test_killed_and_resumed_is_uninterrupted(corpus, teacher, starts, tmp_path, monkeypatch, name, more):
    options = {"max_steps": 6, "save_steps": 1, "parameter_groups": FOR_A_WHILE, **more}
    assert start(transfer_attention, words(corpus, teacher, starts[name], tmp_path / "whole", **options)) == 0
    own = words(corpus, teacher, starts[name], tmp_path / "out", **options)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, pretraining, "save_checkpoint", 2)  # while some parameters are frozen
        transfer_attention.main(own)
    assert start(transfer_attention, own) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "out", tmp_path / "whole")
    before, after = weights(starts[name]), weights(tmp_path / "out")
    (key,) = (key for key in before if key.endswith("encoder.layer.0.attention.output.dense.weight"))
    assert not torch.equal(before[key], after[key])  # it is frozen no longer


def test_a_teacher_that_changes_is_refused_on_resume(corpus, teacher, starts, tmp_path, monkeypatch, capsys):
    guide = tmp_path / "guide"
    shutil.copytree(teacher, guide)
    own = words(corpus, guide, starts["abc"], tmp_path / "out", save_steps=1)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, pretraining, "save_checkpoint", 1)
        transfer_attention.main(own)
    changed = weights(guide)
    changed["lm_head.bias"] += 1
    save_file(changed, guide / "model.safetensors", metadata={"format": "pt"})
    assert transfer_attention.main(own) == 2
    assert str(guide / "model.safetensors") in capsys.readouterr().err


def test_a_run_with_every_update_skipped_ends_in_one_line(corpus, teacher, starts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(objective, "relative_errors", lambda sums: sums[:, 0] * math.nan)
    own = words(corpus, teacher, starts["abc"], tmp_path / "out", max_skipped_steps=9)
    assert start(transfer_attention, own) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "`learning_rate`" in error


def test_passes_of_an_update_count_by_their_tokens(corpus, teacher, starts, tmp_path):
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    for folder, size in ((whole, 8), (parts, 2)):
        own = words(corpus, teacher, starts["abc"], folder, max_steps=2, batch_size=size)
        assert start(transfer_attention, own) == 0
    # A mean of ratios is not the ratio of sums, but near it.
    assert measured(parts)[-1]["loss"] == pytest.approx(measured(whole)[-1]["loss"], rel=1e-2)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"teacher": ""}, "`teacher` is ''"),
        ({"model_name_or_path": ""}, "`model_name_or_path` is ''"),
        ({"compile": "true"}, "`compile` is True"),
        ({"model_name_or_path": "TEACHER"}, "roberta checkpoint"),
        ({"model_name_or_path": "random"}, "random .*--parameter_groups"),
        ({"teacher": "wide"}, "wide has hidden_size 24, but .*abc has 32"),
        ({"teacher": "decoder"}, "is_decoder"),
        ({"teacher": "gpt2"}, "gpt2 checkpoint"),
        ({"teacher": "distil"}, "distilbert checkpoint"),
        ({"teacher": "short"}, "`block_size` is 32, but `teacher` .*short takes at most 16 tokens"),
        ({"parameter_groups": "[{match: lm_head}, {match: '', frozen_steps: 9}]"}, "the whole run"),
        ({"parameter_groups": "[{match: intermediate}]"}, "'intermediate' .*intermediate.dense"),
        ({"output_dir": "TEACHER"}, "`teacher`"),
        ({"model_name_or_path": "full"}, "full keep full attention"),
    ],
)
def test_mistakes_are_reported(corpus, teacher, starts, tmp_path, capsys, overrides, named):
    shape = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 66}
    others = {
        "wide": {"hidden_size": 24},
        "decoder": {"is_decoder": True},
        "short": {"max_position_embeddings": 18},
    }
    name = overrides.get("teacher")
    if name in others:
        RobertaForMaskedLM(RobertaConfig(**{**shape, **others[name]})).save_pretrained(tmp_path / name)
    elif name == "gpt2":
        GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)).save_pretrained(tmp_path / name)
    elif name == "distil":
        config = DistilBertConfig(vocab_size=300, dim=32, n_layers=2, n_heads=4, hidden_dim=64, pad_token_id=1)
        DistilBertForMaskedLM(config).save_pretrained(tmp_path / name)
    if name and name != "TEACHER":
        overrides = {**overrides, "teacher": tmp_path / name}
    folders = {"TEACHER": teacher, **{name: starts[name] for name in ("random", "full")}}
    overrides = {key: folders.get(value, value) for key, value in overrides.items()}
    capsys.readouterr()
    before = sorted(path.name for path in teacher.iterdir())
    assert transfer_attention.main(words(corpus, teacher, starts["abc"], tmp_path / "out", **overrides)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and re.search(named, error), error
    assert sorted(path.name for path in teacher.iterdir()) == before


def test_types_that_are_named_as_teachers_can_be_one():
    for model_type in re.split(", | or ", teachers.TEACHERS):
        teachers.check_names(AutoConfig.for_model(model_type), model_type)


def test_a_damaged_teacher_is_found_before_an_earlier_model_is_removed(corpus, teacher, starts, tmp_path, capsys):
    folder, options = tmp_path / "keep", {"max_steps": 1, "parameter_groups": "[]"}
    assert start(transfer_attention, words(corpus, teacher, starts["random"], folder, **options)) == 0
    before, damaged = files_of(folder), truncated(teacher, tmp_path / "damaged")
    assert transfer_attention.main(words(corpus, damaged, starts["abc"], folder, **options)) == 2
    assert str(damaged) in capsys.readouterr().err
    assert files_of(folder) == before


def test_sharding_is_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(UserError, match=r"FSDP.*multi_gpu\.yaml"):
        objective.TransferObjective().make_module(None, None, accelerator)
