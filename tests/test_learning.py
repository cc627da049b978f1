"""The learning experiments: the softmax control is RoBERTa plus the package's convolution."""

import sys

import pytest
import torch
from helpers import ROOT, padded_batch, random_ids
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

sys.path.insert(0, str(ROOT / "benchmarks"))

import learning_models

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 34,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}


def conv_model(seed=0, **fields):
    torch.manual_seed(seed)
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("roberta-conv", **SHAPE, **fields)).eval()


def test_without_weights_the_convolution_leaves_roberta():
    control = conv_model()
    plain = RobertaForMaskedLM(RobertaConfig(**SHAPE)).eval()
    loaded = plain.load_state_dict(control.state_dict(), strict=False)
    assert not loaded.missing_keys
    assert [name.split(".")[-2] for name in loaded.unexpected_keys] == ["convolution"] * 2
    batch = padded_batch([12, 5, 9])
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert (control(**batch).logits - plain(**batch).logits).abs().max() > 0.1
    for layer in control.roberta.encoder.layer:
        torch.nn.init.zeros_(layer.attention.convolution.weight)
    with torch.no_grad():
        got, expected = control(**batch), plain(**batch)
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


def test_one_layer_equals_a_literal_computation():
    """LN(x + W_o attention(x) + convolution(x)), the convolution written as a sum over taps."""
    attention = conv_model().roberta.encoder.layer[0].attention
    states = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0))
    mixed = attention.output.dense(attention.self(states)[0])
    weight, taps = attention.convolution.weight, 5
    assert weight.shape == (48, taps)
    for position in range(7):
        for tap in range(taps):
            source = position + tap - taps // 2
            if 0 <= source < 7:
                mixed[:, position] = mixed[:, position] + weight[:, tap] * states[:, source]
    torch.testing.assert_close(attention(states)[0], attention.output.LayerNorm(mixed + states))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_pads_reach_no_token(backend):
    model = conv_model()
    model.set_attn_implementation(backend)
    batch = padded_batch([12, 5])
    with torch.no_grad():
        alone = model(input_ids=batch["input_ids"][1:, :5]).logits
        padded = model(**batch).logits[1:, :5]
    torch.testing.assert_close(padded, alone)


def test_weights_start_as_in_the_package_and_survive_saving(tmp_path):
    model = conv_model(conv_kernel_size=7)
    weights = torch.stack([layer.attention.convolution.weight for layer in model.roberta.encoder.layer])
    assert weights.shape == (2, 48, 7) and weights.std().item() == pytest.approx(0.2, rel=0.2)
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is learning_models.RobertaConvForMaskedLM and loaded.config.conv_kernel_size == 7
    ids = random_ids(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits)
    trunk, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert all("pooler" in name for name in info["missing_keys"])
    torch.testing.assert_close(trunk.encoder.layer[1].attention.convolution.weight.detach(), weights[1].detach())


def test_every_parameter_learns():
    model = conv_model().train()
    ids = random_ids(2, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
