"""Compares the toy encoder's attention on padded rows with its reference in float64, gradients included."""

import torch
from helpers import normal_states, tiny_model
from reference import toy as reference


def test_equals_the_definition():
    model = tiny_model("toy", num_hidden_layers=1).double()
    attention = model.encoder.layer[0].attention.self
    weights = {name: parameter.detach().mul(4).requires_grad_() for name, parameter in attention.named_parameters()}
    states = normal_states(3, 9, 48).requires_grad_()
    keep = torch.arange(9) < torch.tensor([[2], [9], [6]])
    keep[2] = keep[2].flip(0)
    output, *_ = torch.func.functional_call(attention, weights, (states, *model.begin(states, keep)))
    expected = [reference.encode(weights, row[kept], 4) for row, kept in zip(states, keep, strict=True)]
    gradients = []
    for rows in (output[keep], torch.cat(expected)):
        gradients.append(torch.autograd.grad(rows.square().sum(), [states, *weights.values()]))
    torch.testing.assert_close(output[keep], torch.cat(expected), rtol=0, atol=1e-12)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
