"""The authors' model written out (`fairseq_reference.py`) gives the authors' numbers."""

import dataclasses

import fairseq_reference
import pytest
import torch
from fairseq_checkpoint import layers, open_original
from safetensors.torch import load_file
from torch.nn import functional as F
from verify_originals import CHECKPOINTS, HEADS, MLM, mlm_file, mlm_meta, mlm_original


def assert_gives(original, tensors, case, heads, atol):
    """Row by row, without padding, what the authors' code gave for the padded batch."""
    tokens = tensors[f"{case}.input.tokens"].long()
    for b, row in enumerate(tokens):
        keep = row != fairseq_reference.PADDING_ID
        ours = fairseq_reference.run(original, row[keep])
        for head in heads:
            ours |= fairseq_reference.run(original, row[keep], head)
        assert len(ours) == 2 * (1 + layers(original.weights)) + 1 + len(heads)
        for name, value in ours.items():
            theirs = tensors[f"{case}.output.{name}"][b]
            if name.endswith(".px"):
                padded = tensors.get(f"{case}.output.px_padding_mask")
                theirs = theirs if padded is None else theirs[~padded[b]]
            elif not name.startswith("head."):
                theirs = theirs[keep]
            assert value.dtype == torch.float64 and value.shape == theirs.shape, name
            difference = (value - theirs).abs().max().item()
            assert difference <= atol, f"row {b}, {name}: {difference:.1e} > {atol:.1e}"


@pytest.mark.parametrize("case", ["case0", "case1", "case2", "case3"])
@pytest.mark.parametrize("name", MLM)
def test_reference_gives_the_authors_numbers(name, case):
    error = mlm_meta(name)["max_abs_diff_float32_vs_float64"][case]  # of the authors' own float32 run
    assert_gives(mlm_original(name), load_file(mlm_file(name)), case, HEADS, 1.25 * error)


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_reference_gives_the_numbers_of_a_checkpoint(name, case):
    with open_original(CHECKPOINTS / name / "model.pt") as original:
        assert_gives(original, load_file(CHECKPOINTS / name / "expected.safetensors"), case, [], 2e-5)


def test_reference_adds_the_offset_of_layer_norms():
    original, ids = mlm_original("tied_dynamic"), torch.arange(5, 16)
    lower = {n: t - 1 if "norm.weight" in n else t for n, t in original.weights.items()}
    assert sum(not torch.equal(lower[n], t) for n, t in original.weights.items()) == 2 + 3 * 3 + 1 + 1
    less_one = dataclasses.replace(original, weights=lower, norm_offset=1.0)
    for head in (None, *HEADS):
        plain, offset = fairseq_reference.run(original, ids, head), fairseq_reference.run(less_one, ids, head)
        for name, value in plain.items():
            torch.testing.assert_close(offset[name], value, atol=1e-4, rtol=0)  # `weight - 1` rounds


def test_reference_takes_the_embedding_where_the_file_has_no_output_matrix():
    original, ids = mlm_original("tied_dynamic"), torch.arange(5, 16)
    without = {n: t for n, t in original.weights.items() if n != "encoder.lm_head.weight"}
    expected = fairseq_reference.run(original, ids)["logits"]
    assert torch.equal(fairseq_reference.run(dataclasses.replace(original, weights=without), ids)["logits"], expected)
    doubled = without | {"encoder.lm_head.weight": 2 * original.weights["encoder.lm_head.weight"]}
    other = fairseq_reference.run(dataclasses.replace(original, weights=doubled), ids)["logits"]
    bias = original.weights["encoder.lm_head.bias"].double()
    torch.testing.assert_close(other - bias, 2 * (expected - bias))


def test_reference_activations():
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    expected = {
        "gelu": F.gelu(x),
        "gelu_accurate": F.gelu(x, approximate="tanh"),
        "gelu_fast": F.gelu(x, approximate="tanh"),
        "relu": F.relu(x),
        "tanh": x.tanh(),
        "linear": x,
    }
    for name, value in expected.items():
        torch.testing.assert_close(fairseq_reference.activation(name, x), value)
    with pytest.raises(ValueError, match="swish"):
        fairseq_reference.activation("swish", x)
