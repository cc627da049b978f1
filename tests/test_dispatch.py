"""The choice of implementations by device and mode."""

import pytest
import torch

from luna_hf.ops.dispatch import IMPLEMENTATIONS, choose
from luna_hf.ops.scan import causal_scan

CPU, ACCELERATOR = torch.zeros(1), torch.zeros(1, device="meta")


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_every_operation_has_an_implementation_everywhere(operation):
    for states in (CPU, ACCELERATOR):
        for training in (True, False):
            assert choose(operation, states, training) in IMPLEMENTATIONS[operation].values()


def test_the_device_decides():
    assert choose("causal_scan", CPU) == "loop" and choose("causal_scan", ACCELERATOR) == "at_once"
    assert choose("nearest_centroid", CPU) == "parts" and choose("nearest_centroid", ACCELERATOR) == "whole"


@pytest.mark.parametrize("operation", ["window_blocks", "token_parts"])
def test_parts_are_for_inference(operation):
    assert choose(operation, CPU, training=False) == "whole"  # gradients may be needed
    with torch.no_grad():
        assert choose(operation, CPU, training=False) == "parts"
        assert choose(operation, CPU, training=True) == "whole"  # dropout must be the same as in the second pass
        assert choose(operation, ACCELERATOR, training=False) == "whole"


def test_a_graph_has_its_own_implementations():
    chosen = {}

    def step(states):
        with torch.no_grad():
            chosen.update({operation: choose(operation, states, training=False) for operation in IMPLEMENTATIONS})
        return states + 1

    torch.jit.trace(step, (CPU,), check_trace=False)
    assert chosen["causal_softmax_memory"] == "tree" and chosen["causal_scan"] == "at_once"


def test_the_table_is_what_runs(monkeypatch):
    tensors = [torch.randn(1, 1, 200, 4) for _ in range(3)]
    monkeypatch.setitem(IMPLEMENTATIONS, "causal_scan", {"default": "no such thing"})
    with pytest.raises(KeyError):
        causal_scan(*tensors)
