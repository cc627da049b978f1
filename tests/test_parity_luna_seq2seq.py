"""Luna's encoder-decoder: parity with the authors' numbers, in parallel and step by step.

Tolerances: 1e-5, or twice the distance between the authors' float32 and float64 runs if that is larger; in float64,
where ours is exact, that distance and a quarter. Padding is not compared: here it starts as zero, in the authors' code
not, and nothing reads it.
"""

import pytest
import torch
from fairseq_format.names import to_ours
from official_luna import Fixture, seq2seq_config

from luna_hf import LunaForConditionalGeneration, MemoryCache

NAMES = ["learned_lnemb_fixed", "post_tied_sinusoidal", "post_untied_sinusoidal_shared", "pre_tied_pheads2"]
CASES = ["left_padded", "right_padded", "short_source"]
PAD = 1

pytestmark = [
    pytest.mark.parametrize("name", NAMES),
    pytest.mark.parametrize("case", CASES),
    pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"]),
]


def load(name, dtype):
    fixture = Fixture("luna_seq2seq", name)
    model = LunaForConditionalGeneration(seq2seq_config(fixture, attn_implementation="eager"))
    tensors, _ = to_ours(fixture.weights(), "translation")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    tied = {n for n in missing if n in model.all_tied_weights_keys}
    assert set(missing) == tied
    return fixture, model.to(dtype).eval()


def assert_near(ours, fixture, case, name, keep):
    """Compare where `keep` (b, n) is True."""
    theirs, error = fixture.output(case, name), fixture.float32_error(case)
    atol = 1.25 * error if ours.dtype == torch.float64 else max(1e-5, 2 * error)
    assert ours.shape == theirs.shape
    difference = (ours.double() - theirs.double())[keep].abs().max().item()
    assert difference <= atol, f"{name}: {difference:.2e} > {atol:.2e}"


def used_slots(fixture, case, slots):
    padding = fixture.output(case, "encoder.projected_padding_mask")
    rows = fixture.input(case, "src_tokens").shape[0]
    return torch.ones(rows, slots, dtype=torch.bool) if padding is None else ~padding


@torch.no_grad()
def test_states_and_logits(name, case, dtype):
    fixture, model = load(name, dtype)
    source, target = fixture.input(case, "src_tokens"), fixture.input(case, "prev_output_tokens")
    real, given = source != PAD, target != PAD
    encoded = model.get_encoder()(source, output_hidden_states=True, output_packed_hidden_states=True)
    slots = used_slots(fixture, case, encoded.packed_last_hidden_state.shape[1])
    assert_near(encoded.last_hidden_state, fixture, case, "encoder.x", real)
    assert_near(encoded.packed_last_hidden_state, fixture, case, "encoder.px", slots)
    if model.config.norm_first:  # the last of ours includes the final norm
        assert_near(encoded.hidden_states[1], fixture, case, "encoder.layer0.x", real)
    for i in range(0 if model.config.norm_first else 2):
        assert_near(encoded.hidden_states[i + 1], fixture, case, f"encoder.layer{i}.x", real)
    for i in range(2):
        assert_near(encoded.packed_hidden_states[i + 1], fixture, case, f"encoder.layer{i}.px", slots)

    packed = []
    for layer in model.get_decoder().encoder.layer:
        layer.register_forward_hook(lambda module, args, output: packed.append(output[1]))
    outputs = model(
        source, decoder_input_ids=target, use_cache=False, output_hidden_states=True, output_attentions=True
    )
    assert_near(outputs.logits, fixture, case, "logits", given)
    states = outputs.decoder_hidden_states
    assert_near(states[0], fixture, case, "decoder.embedding", given)
    assert_near(states[1], fixture, case, "decoder.layer0.x", given)
    assert_near(states[2], fixture, case, "decoder.features", given)
    for i in range(2):
        assert_near(packed[i], fixture, case, f"decoder.layer{i}.px", slots)
    read = outputs.cross_attentions[-1].mean(1)
    assert_near(read, fixture, case, "decoder.cross_unpack_weights_last_layer", given)


@torch.no_grad()
@pytest.mark.parametrize("sizes", ["steps", "parts"])
def test_incremental_decoding(name, case, dtype, sizes):
    """The state alone: neither the source nor the encoder's states are given again."""
    fixture, model = load(name, dtype)
    source, target = fixture.input(case, "src_tokens"), fixture.input(case, "prev_output_tokens")
    cache, parts = MemoryCache(model.config), []
    first = {"input_ids": source, "attention_mask": (source != PAD).long()}
    for tokens in target.split(1 if sizes == "steps" else 3, dim=1):
        outputs = model(**first, decoder_input_ids=tokens, cache=cache)
        parts.append(outputs.logits)
        first = {}
    assert_near(torch.cat(parts, dim=1), fixture, case, "logits_incremental", target != PAD)
