"""Marked and selected tokens in compiled, exported and ONNX models: one program for all lengths, with equal numbers."""

import pytest
import torch
from helpers import MIXING_FAMILIES, random_ids, slow_unless, tiny_model

SELECTED = {"local_window": 6, "num_selected_tokens": 5, "num_selection_queries": 4, "max_global_tokens": 7}
SELECTED["softmax_length"] = 12
families = pytest.mark.parametrize("family", MIXING_FAMILIES)
SHAPES = [(3, 30), (1, 9), (2, 3), (4, 41)]


def inputs_of(batch, length):
    """Padded rows with a question, and marks in them."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - length // 3 :] = 0
    marks = ((torch.arange(length) % 7 == 1) | (torch.arange(length) == 0)).long().expand(batch, -1).contiguous()
    return {"input_ids": random_ids(batch, length), "attention_mask": mask, "global_attention_mask": marks}


def close(actual, expected, mask, atol=1e-5):
    real = mask == 1
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=atol)


@pytest.mark.parametrize("family", [slow_unless(family == "abc_memory", family) for family in MIXING_FAMILIES])
@torch.no_grad()
def test_one_graph_serves_all_lengths(family):
    model, graphs = tiny_model(family, num_hidden_layers=1, **SELECTED), []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for shape in [(max(rows, 2), tokens) for rows, tokens in SHAPES]:  # PyTorch compiles single rows apart
        inputs = inputs_of(*shape)
        close(compiled(**inputs)[0], model(**inputs)[0], inputs["attention_mask"])
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        slow_unless((family, kind) == ("luna", "span"), family, kind)
        for family in MIXING_FAMILIES
        for kind in ("base", "span", "sequence")
    ],
)
@torch.no_grad()
def test_one_export_serves_every_batch_and_length(family, kind):
    """With marks that are given, and with those of a head."""
    model = tiny_model(family, kind, num_hidden_layers=1, **SELECTED)
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)}
    names = list(inputs_of(3, 12)) if kind == "base" else ["input_ids", "attention_mask"]
    example = {name: inputs_of(3, 12)[name] for name in names}
    program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(names, axes), strict=False).module()
    for shape in [*SHAPES, (1, 2)]:
        inputs = {name: inputs_of(*shape)[name] for name in names}
        inputs["input_ids"][:, shape[1] // 3] = 2  # a separator
        mask = inputs["attention_mask"] if kind != "sequence" else torch.ones(shape[0], 2)
        close(program(**inputs)[0], model(**inputs)[0], mask)


@pytest.mark.slow
@families
@torch.no_grad()
def test_onnx_equals_the_model(family, tmp_path):
    import onnxruntime

    model = tiny_model(family, num_hidden_layers=1, **SELECTED)
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)}
    example = inputs_of(3, 12)
    torch.onnx.export(
        model, (), tmp_path / "model.onnx", kwargs=example, dynamo=True, dynamic_shapes=dict.fromkeys(example, axes)
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for shape in SHAPES:
        inputs = inputs_of(*shape)
        (states, *_) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        close(torch.from_numpy(states), model(**inputs)[0], inputs["attention_mask"], 1e-4)
