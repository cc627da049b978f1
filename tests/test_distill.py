"""Distillation: the loss is the literal one, passes and processes add up exactly, and the result is the student."""

import json
import re

import distill_mlm
import pytest
import torch
from engine import checkpoint, log, loop, pretraining
from helpers import TINY, padded_batch, randomise, tiny_model
from objectives.distill import Distillation, DistillObjective, Weights
from tiny_training import (
    DISTILLATIONS,
    Killed,
    arguments,
    batch_of,
    dies_at_call,
    losses,
    make_run,
    masked_rows,
    same_weights,
    start,
    without_model_section,
    write_corpus,
    write_student,
    write_teacher,
)
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from luna_hf.warm_start import warm_start

LENGTHS = [12, 5, 9]
SHAPE = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
SHAPE |= {"intermediate_size": TINY["intermediate_size"], "max_position_embeddings": 66, "pad_token_id": 1}
WEIGHTS = Weights(0.5, 2.0, 3.0)
STUDENTS = {
    "abc": ("abc_memory", {"memory_size": 3, "sparse_prediction": True}),
    "luna": ("luna", {"projection_length": 6}),
    "prenorm": ("abc_memory", {"memory_size": 3, "norm_first": True}),
    "leapformer": ("leapformer", {"sparse_prediction": True}),
    "lavo": ("lavo", {"num_bases": 3, "local_window": 4}),
}


def teacher_of(kind):
    if kind == "ours":
        return tiny_model("abc_memory", "mlm", seed=1, memory_control="full", norm_first=True)
    torch.manual_seed(1)
    config, model_class = {"roberta": (RobertaConfig, RobertaForMaskedLM), "bert": (BertConfig, BertForMaskedLM)}[kind]
    model = model_class(config(**SHAPE)).eval()
    randomise(model)
    return model


def labelled_batch(lengths):
    batch = padded_batch(lengths)
    places = torch.arange(max(lengths))
    masked = (places % 4 == 1) & (places < torch.tensor(lengths)[:, None])
    return {**batch, "labels": batch["input_ids"].where(masked, torch.tensor(-100))}


# ---- the loss ----


@torch.no_grad()
def literal(student, teacher, batch):
    """The parts of the loss by their definitions, row by row without padding."""
    mlm, divergence, teacher_mlm, layers = [], [], [], []
    for ids, labels, mask in zip(*(batch[key] for key in ("input_ids", "labels", "attention_mask")), strict=True):
        length = int(mask.sum())
        inputs = {"input_ids": ids[None, :length], "attention_mask": mask[None, :length]}
        own, other = (model(**inputs, output_hidden_states=True) for model in (student, teacher))
        for place in (labels != -100).nonzero().flatten().tolist():
            p, q = other.logits[0, place].softmax(0), own.logits[0, place].softmax(0)
            divergence.append((p * (p / q).log()).sum())
            mlm.append(-q[labels[place]].log())
            teacher_mlm.append(-p[labels[place]].log())
        for place in range(length):
            pairs = zip(own.hidden_states[1:], other.hidden_states[1:], strict=True)
            layers.append(
                torch.stack([((a[0, place] - b[0, place]) ** 2).sum() / (b[0, place] ** 2).sum() for a, b in pairs])
            )
    nats = torch.stack([torch.stack(part).mean() for part in (mlm, divergence, teacher_mlm)])
    return nats, torch.stack(layers).mean(0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "source"), [("abc", "roberta"), ("luna", "bert"), ("prenorm", "ours")])
def test_the_loss_is_the_literal_one(kind, source, training):
    family, options = STUDENTS[kind]
    student, teacher = tiny_model(family, "mlm", **options).double(), teacher_of(source).double()
    batch = labelled_batch(LENGTHS)
    out = Distillation(student, teacher, WEIGHTS).train(training)(**batch)
    nats, layers = literal(student.eval(), teacher, batch)
    torch.testing.assert_close(out.nats, nats, rtol=1e-9, atol=0)
    torch.testing.assert_close(out.layers, layers, rtol=1e-9, atol=0)
    assert min(nats[1], *layers) > 0.01
    expected = 0.5 * nats[0] + 2 * nats[1] + 3 * layers.mean()
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_without_a_weight_for_the_teacher_it_is_masked_language_modelling():
    student, batch = tiny_model("abc_memory", "mlm", **STUDENTS["abc"][1]).train(), labelled_batch(LENGTHS)
    plain = student(**batch).loss
    expected = torch.autograd.grad(plain, student.parameters())
    out = Distillation(student, teacher_of("roberta"), Weights(1.0, 0.0, 0.0)).train()(**batch)
    assert torch.equal(out.loss, plain)
    for found, gradient in zip(torch.autograd.grad(out.loss, student.parameters()), expected, strict=True):
        assert torch.equal(found, gradient)


def test_the_teacher_is_its_own_perfect_student():
    teacher = teacher_of("roberta")
    student = warm_start(type(tiny_model("abc_memory", "mlm")), teacher, memory_control="full")[0].eval()
    out = Distillation(student, teacher, WEIGHTS)(**labelled_batch(LENGTHS))
    assert out.nats[1] < 1e-6 and out.layers.max() < 1e-9  # float32
    assert out.nats[0].item() == pytest.approx(out.nats[2].item(), rel=1e-5)


def distillation(seed=0):
    torch.manual_seed(seed)
    return Distillation(tiny_model("luna", "mlm", projection_length=6), teacher_of("roberta"), WEIGHTS).double()


def updated(folder, updates):
    """The parameters after updates of some passes, in float64."""
    run = make_run(folder, updates, model=distillation(), objective=DistillObjective(), max_steps=1, eval_steps=9)
    loop.one_update(run, checkpoint.Counters())
    return dict(run.module.named_parameters())


def test_passes_of_an_update_add_up_exactly(tmp_path):
    rows = masked_rows()  # the numbers of labels and of tokens differ, and their ratio
    whole = updated(tmp_path / "whole", [[batch_of(rows)]])
    parts = updated(tmp_path / "parts", [[batch_of(rows[first : first + 2]) for first in (0, 2, 4)]])
    begin = dict(distillation().named_parameters())
    assert max((whole[name] - begin[name]).abs().max().item() for name in begin) > 0.01
    for name in whole:  # the shares that the passes have in the update are float32
        torch.testing.assert_close(parts[name], whole[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_held_out_parts_are_means_over_all_rows(tmp_path, size):
    rows = masked_rows()
    run = make_run(tmp_path, [[]], model=distillation(), objective=DistillObjective())
    found = DistillObjective().measure(run.module, run.accelerator, rows, size)
    nats, layers = literal(run.module.student.eval(), run.module.teacher, batch_of(rows))
    assert [found["mlm"], found["kl"], found["teacher_mlm"]] == pytest.approx(nats.tolist(), rel=1e-5)  # float32 sums
    assert found["layers"] == pytest.approx(layers.tolist(), rel=1e-5)
    assert found["hidden"] == pytest.approx(sum(found["layers"]) / len(found["layers"]))
    assert found["loss"] == pytest.approx(0.5 * found["mlm"] + 2 * found["kl"] + 3 * found["hidden"])


# ---- whole runs ----

TINY_RECIPE = next(path for path in DISTILLATIONS if path.stem == "tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "out", corpus, model__num_hidden_layers=2)


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """A student with noise, so that there is something to learn from an untrained teacher."""
    folder = write_student(tmp_path_factory.mktemp("start") / "abc", teacher, memory_size=4)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def words(corpus, guide, begin, folder, **overrides):
    values = {"data": corpus, "teacher": guide, "model_name_or_path": begin, "output_dir": folder, **overrides}
    return without_model_section(arguments(TINY_RECIPE, values.pop("output_dir"), **values))


def test_the_student_learns_and_is_saved_with_its_figures(corpus, teacher, student, tmp_path):
    folder = tmp_path / "out"
    options = {"max_steps": 20, "eval_steps": 10, "save_steps": 100, "mlm_weight": 0.1, "hidden_weight": 0.5}
    assert distill_mlm.main(words(corpus, teacher, student, folder, **options)) == 0
    entries = log.read_log(folder / "log.jsonl")
    measured = [entry for entry in entries if entry["kind"] == "objective"]
    held_out = [entry["loss"] for entry in entries if entry["kind"] == "held_out"]
    assert [entry["step"] for entry in measured] == [0, 10, 20]
    assert [entry["mlm"] for entry in measured] == pytest.approx(held_out, rel=1e-5)
    assert len({entry["teacher_mlm"] for entry in measured}) == 1
    assert all(measured[-1][part] < measured[0][part] for part in ("loss", "kl", "hidden"))
    figures = json.loads((folder / "metrics.json").read_text())
    assert figures["objective"]["kl"] == measured[-1]["kl"]
    assert figures["held_out_loss"] == pytest.approx(measured[-1]["mlm"], rel=1e-5)
    card = " ".join((folder / "README.md").read_text().split())
    assert f"| relative squared error of the hidden states | 0.5 | {measured[-1]['hidden']:.3f} |" in card
    assert f"(the teacher's: {measured[-1]['teacher_mlm']:.3f}) | 0.1 | {measured[-1]['mlm']:.3f} |" in card
    assert "to imitate its teacher, `out`" in card and str(tmp_path) not in card
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_killed_and_resumed_is_uninterrupted(corpus, teacher, tmp_path, monkeypatch):
    student = write_student(tmp_path / "student", teacher, memory_size=4, local_window=4)
    options = {"max_steps": 6, "save_steps": 2, "model": "{hidden_dropout_prob: 0.1}"}
    options |= {"window_dropout": "{windows: [0, 2]}"}
    assert start(distill_mlm, words(corpus, teacher, student, tmp_path / "whole", **options)) == 0
    own = words(corpus, teacher, student, tmp_path / "out", **options)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, pretraining, "save_checkpoint", 2)
        start(distill_mlm, own)
    assert start(distill_mlm, own) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def test_gradient_checkpointing_keeps_the_hidden_states(corpus, teacher, student, tmp_path):
    for name, value in (("plain", "false"), ("less", "true")):
        own = words(corpus, teacher, student, tmp_path / name, gradient_checkpointing=value)
        assert start(distill_mlm, own) == 0
    pairs = zip(losses(tmp_path / "plain"), losses(tmp_path / "less"), strict=True)
    assert all(one[2] == pytest.approx(other[2], rel=1e-5) for one, other in pairs)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"kl_weight": 0, "hidden_weight": 0}, r"`kl_weight` is 0\.0.*pretrain_mlm"),
        ({"mlm_weight": -1}, "`mlm_weight` is -1"),
        ({"teacher": ""}, "`teacher` is ''"),
        ({"model_name_or_path": "TEACHER"}, "roberta checkpoint"),
        ({"teacher": "headless"}, "headless has no trained masked-LM head"),
        ({"teacher": "wide"}, "wide has hidden_size 24"),
        ({"output_dir": "TEACHER"}, "`teacher`"),
    ],
)
def test_mistakes_are_reported(corpus, teacher, student, tmp_path, capsys, overrides, named):
    if overrides.get("teacher") == "headless":
        AutoModel.from_pretrained(teacher).save_pretrained(tmp_path / "headless")
    elif overrides.get("teacher") == "wide":
        RobertaForMaskedLM(RobertaConfig(**{**SHAPE, "hidden_size": 24})).save_pretrained(tmp_path / "wide")
    places = {"TEACHER": teacher, "headless": tmp_path / "headless", "wide": tmp_path / "wide"}
    overrides = {key: places.get(value, value) for key, value in overrides.items()}
    capsys.readouterr()
    assert distill_mlm.main(words(corpus, teacher, student, tmp_path / "out", **overrides)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and re.search(named, error), error
    assert not (tmp_path / "out").exists()
