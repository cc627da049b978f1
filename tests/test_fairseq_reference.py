"""The reference model in float64 gives the authors' numbers."""

import dataclasses

import pytest
import torch
from fairseq_format import reference
from fairseq_format.arguments import complete
from fairseq_format.checkpoint import Original, open_checkpoint
from official_luna import CHECKPOINTS, MLM, POOLINGS, Fixture
from safetensors.torch import load_file
from test_parity_luna_seq2seq import CASES
from test_parity_luna_seq2seq import NAMES as SEQ2SEQ
from torch.nn import functional as F


def assert_gives(original, tensors, case, heads, atol):
    """Row by row, without padding, what the authors' code gave for the padded batch."""
    layers = reference.Stored(original, original.encoder).layers()
    for b, row in enumerate(tensors[f"{case}.input.tokens"].long()):
        keep = row != reference.PADDING_ID
        ours = reference.run(original, row[keep])
        for head in heads:
            ours |= reference.run(original, row[keep], head)
        assert len(ours) == 2 * (1 + layers) + 1 + len(heads)
        for name, value in ours.items():
            theirs = tensors[f"{case}.output.{name}"][b]
            if name.endswith(".px"):
                padded = tensors.get(f"{case}.output.px_padding_mask")
                theirs = theirs if padded is None else theirs[~padded[b]]
            elif not name.startswith("head."):
                theirs = theirs[keep]
            assert value.dtype == torch.float64 and value.shape == theirs.shape, name
            torch.testing.assert_close(value, theirs.double(), rtol=0, atol=atol, msg=f"{case}, row {b}: {name}")


@pytest.mark.parametrize("name", MLM)
def test_the_authors_numbers(name):
    fixture = Fixture("luna_mlm", name)
    for case in fixture.cases:  # within the error of the authors' float32 run
        assert_gives(fixture.original(), fixture.tensors, case, POOLINGS, 1.25 * fixture.float32_error(case))


@pytest.mark.parametrize("name", SEQ2SEQ)
@pytest.mark.parametrize("case", CASES)
def test_the_authors_numbers_of_translation(name, case):
    fixture = Fixture("luna_seq2seq", name)
    arguments = complete("translation", fixture.config["args"])
    original = Original(name, fixture.weights(), arguments)
    pairs = zip(fixture.input(case, "src_tokens"), fixture.input(case, "prev_output_tokens"), strict=True)
    for b, (source, target) in enumerate(pairs):
        kept = target != reference.PADDING_ID
        ours = reference.translate(original, source[source != reference.PADDING_ID], target[kept])["logits"]
        theirs = fixture.output(case, "logits")[b][kept].double()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1.25 * fixture.float32_error(case))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_numbers_of_a_checkpoint(name):
    tensors = load_file(CHECKPOINTS / name / "expected.safetensors")
    with open_checkpoint(CHECKPOINTS / name / "model.pt") as original:
        for case in ("case0", "case1", "case2"):
            assert_gives(original, tensors, case, [], 2e-5)


def test_the_embedding_is_the_output_matrix_if_the_file_has_none():
    original, ids = Fixture("luna_mlm", "tied_dynamic").original(), torch.arange(5, 16)
    without = {n: t for n, t in original.weights.items() if n != "encoder.lm_head.weight"}
    expected = reference.run(original, ids)["logits"]
    assert torch.equal(reference.run(dataclasses.replace(original, weights=without), ids)["logits"], expected)
    doubled = without | {"encoder.lm_head.weight": 2 * original.weights["encoder.lm_head.weight"]}
    other = reference.run(dataclasses.replace(original, weights=doubled), ids)["logits"]
    bias = original.weights["encoder.lm_head.bias"].double()
    torch.testing.assert_close(other - bias, 2 * (expected - bias))


def test_activations():
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
        torch.testing.assert_close(reference.activation(name, x), value)
    with pytest.raises(KeyError, match="swish"):
        reference.activation("swish", x)
