"""Luna's encoder-decoder against a literal definition in float64: logits and the gradient of every parameter."""

from types import SimpleNamespace

import pytest
import torch
from helpers import in_turn, padded_batch, tiny_seq2seq_model, weighted_sum
from reference.luna_seq2seq import translate_row

VARIANTS = {
    "tied": {},
    "untied-packed-heads": {"tie_kv": False, "num_projected_attention_heads": 2},
    "tokens-per-slot": {"tokens_per_slot": 3},
    "fixed-unscaled": {"dynamic_projection": False, "scale_embedding": False},
    "prenorm-sinusoidal": {"norm_first": True, "position_embedding_type": "sinusoidal", "embedding_layer_norm": False},
    "odd-width": {"hidden_size": 33, "num_attention_heads": 3, "position_embedding_type": "sinusoidal"},
    "one-slot": {"projection_length": 1},
    "elu-one-decoder-layer": {"pack_activation": "elu", "decoder_layers": 1},
    "exp": {"pack_activation": "exp"},
    "own-vocabulary": {
        **{"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 130, "tie_word_embeddings": False},
    },
}


@pytest.mark.parametrize(("variant", "side"), in_turn(VARIANTS, ["right", "left"]))
def test_logits_and_gradients(variant, side):
    """A batch with padding on either side of the source against every row alone."""
    model = tiny_seq2seq_model("luna", num_hidden_layers=2, **VARIANTS[variant]).double()
    source, target = padded_batch([13, 5, 1]), padded_batch([7, 4, 1], seed=1)
    if side == "left":
        source = {name: tensor.flip(1) for name, tensor in source.items()}
    target_inputs = {f"decoder_{name}": tensor for name, tensor in target.items()}
    logits = model(**source, **target_inputs, use_cache=False).logits
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    shared = {name: weights[origin] for name, origin in model.all_tied_weights_keys.items()}
    config = SimpleNamespace(**model.config.to_dict())
    config.packed_heads = config.num_projected_attention_heads or config.num_attention_heads
    loss = loss_ref = 0.0
    for row in range(3):
        ids, given = (inputs["input_ids"][row][inputs["attention_mask"][row] == 1] for inputs in (source, target))
        expected = translate_row({**weights, **shared}, ids.tolist(), given.tolist(), config)
        actual = logits[row][: len(given)]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        loss, loss_ref = loss + weighted_sum(actual), loss_ref + weighted_sum(expected)
    loss.backward()
    loss_ref.backward()
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        expected = torch.zeros_like(parameter) if expected is None else expected
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
