"""Growing a RoBERTa: the wide one computes the same, and the deep one nearly so."""

import pytest
import torch
from grow import deepen, widen
from transformers import RobertaConfig, RobertaForMaskedLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = RobertaForMaskedLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, parameter in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                parameter *= 2
    return model


def test_the_wide_model_computes_the_same(model):
    ids = torch.arange(4, 24)[None]
    wide = widen(model)
    assert wide.config.hidden_size == 32 and wide.config.num_attention_heads == 4
    torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-9)
    # The copies of a unit have different outgoing weights, so that training can tell them apart.
    left, right = wide.base_model.encoder.layer[0].output.dense.weight.chunk(2, dim=1)
    assert (left - right).abs().max() > 0.01


def test_the_deep_model_starts_near_the_shallow_one(model):
    ids = torch.arange(4, 24)[None]
    deep = deepen(model, ids)
    assert deep.config.num_hidden_layers == len(deep.base_model.encoder.layer) == 4
    expected, found = model(ids).logits, deep(ids).logits
    assert (found - expected).norm() < 0.1 * expected.norm()  # the scale of states differs a little between tokens
