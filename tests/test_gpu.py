"""Tests that need a GPU; run with `make test-gpu`. The CPU tests check the same guarantees for every backend."""

import pytest
import torch
from helpers import FAMILIES, padded_batch, tiny_model
from transformers.utils import is_flash_attn_2_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.parametrize("model_type", FAMILIES),
]

# bfloat16 has 8 bits: three layers of LayerNormed states of size 1 to 4.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def batch(side="right"):
    inputs = padded_batch([40, 3, 17, 1])
    if side == "left":
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def states_and_gradients(model, inputs):
    model.zero_grad()
    states = model(**inputs).last_hidden_state[inputs["attention_mask"] == 1].float()
    (states * torch.linspace(-1, 1, states.numel(), device="cuda").view_as(states)).sum().backward()
    return states.detach(), {n: p.grad.float() for n, p in model.named_parameters()}


def assert_equal(actual, expected, dtype):
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=TOLERANCE[dtype])
    for name, gradient in expected[1].items():
        scale = max(gradient.abs().max().item(), 1.0)
        difference = (actual[1][name] - gradient).abs().max().item()
        assert difference <= TOLERANCE[dtype] * scale, f"{name}: {difference:.2e} of {scale:.2e}"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2", "flex_attention"])
def test_backends_equal_eager(model_type, implementation, dtype, side):
    if implementation == "flash_attention_2" and (dtype == torch.float32 or not is_flash_attn_2_available()):
        pytest.skip("flash-attn is not installed, or has no float32 kernels")
    # Every kernel supports the head size 16.
    model = tiny_model(model_type, hidden_size=64, conv_kernel_size=5).cuda().to(dtype)
    model.set_attn_implementation("eager")
    expected = states_and_gradients(model, batch(side))
    model.set_attn_implementation(implementation)
    assert_equal(states_and_gradients(model, batch(side)), expected, dtype)


def test_compiled(model_type):
    model = tiny_model(model_type, hidden_size=64).cuda()
    expected = states_and_gradients(model, batch())
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=True)
    assert_equal(states_and_gradients(model, batch()), expected, torch.float32)


def test_equals_the_cpu(model_type):
    model = tiny_model(model_type)
    inputs = batch()
    expected = model(**{name: tensor.cpu() for name, tensor in inputs.items()}).last_hidden_state
    actual = model.cuda()(**inputs).last_hidden_state
    real = inputs["attention_mask"].cpu() == 1
    torch.testing.assert_close(actual.cpu()[real], expected[real], rtol=0, atol=1e-4)
