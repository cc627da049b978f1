"""ABC in the models: full attention equals RoBERTa's, what tokens read, the control and its sharing, the model type."""

import pytest
import torch
from helpers import padded_batch, random_ids, randomise, refused, tiny_config_for, tiny_model
from transformers import RobertaConfig, RobertaForMaskedLM

from luna_hf import AbcConfig, AbcForMaskedLM, AbcModel
from luna_hf.families.abc.configuration import CONTROLS

# ---- full attention ----


@pytest.fixture(params=["eager", "sdpa"])
def twins(request):
    """A random RoBERTa, and ABC with full attention and the same weights."""
    torch.manual_seed(0)
    own = tiny_config_for("abc_memory", memory_control="full", type_vocab_size=1, attn_implementation=request.param)
    fields = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = RobertaConfig(
        **{name: getattr(own, name) for name in fields},
        max_position_embeddings=own.max_position_embeddings + own.pad_token_id + 1,  # it counts the rows in front
        type_vocab_size=1,
        layer_norm_eps=own.layer_norm_eps,
        attn_implementation=request.param,
    )
    roberta, abc = RobertaForMaskedLM(config).eval(), AbcForMaskedLM(own).eval()
    randomise(roberta)
    abc.abc.load_state_dict(roberta.roberta.state_dict(), strict=True)
    abc.lm_head.load_state_dict(roberta.lm_head.state_dict(), strict=True)
    return roberta, abc


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@torch.no_grad()
def test_full_attention_equals_robertas(twins, padding):
    """Token states of every layer, attention maps and logits, at every token."""
    inputs = padded_batch([20, 20, 20] if padding == "none" else [20, 3, 11])
    if padding == "left":
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    real = inputs["attention_mask"] == 1
    expected, actual = (model(**inputs, output_hidden_states=True, output_attentions=True) for model in twins)
    assert len(actual.hidden_states) == len(expected.hidden_states) == 3
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=0, atol=1e-5)
    if twins[1].config._attn_implementation == "eager":
        assert len(actual.attentions) == len(expected.attentions) == 2
        for ours, theirs in zip(actual.attentions, expected.attentions, strict=True):
            queries = [weights.transpose(1, 2)[real] for weights in (ours, theirs)]  # (tokens, h, n)
            torch.testing.assert_close(*queries, rtol=0, atol=1e-5)


# ---- reads ----


@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_attentions_are_probabilities_over_what_is_read(control):
    """Over slots, places of the window, or all tokens; a row with fewer tokens than slots reads no empty slot."""
    model = tiny_model("abc_memory", memory_control=control, attn_implementation="eager")
    inputs = padded_batch([21, 3])
    attentions = model(**inputs, output_attentions=True).attentions
    assert len(attentions) == 2
    for weights in attentions:
        assert weights.shape == (2, 4, 21, 21 if control == "full" else 8)
        for row, length in enumerate((21, 3)):
            torch.testing.assert_close(weights[row, :, :length].sum(-1), torch.ones(4, length))
        if control in ("full", "local_to_global", "compressive"):
            assert not weights[1, :, :, 3:].any()
        if control == "sliding_window":
            # The window covers four tokens before a token and three after it.
            assert not weights[0, :, 0, :4].any() and not weights[0, :, -1, 5:].any()


# The window of token 15: four tokens before it, itself and three after it; in a dilated one, every other token.
@pytest.mark.parametrize(("control", "reach"), [("sliding_window", range(11, 19)), ("dilated", range(7, 23, 2))])
@torch.no_grad()
def test_a_window_reads_neighbours_only(control, reach):
    model, ids = tiny_model("abc_memory", memory_control=control, num_hidden_layers=1), random_ids(1, 30)
    others = ids.repeat(30, 1)
    others.fill_diagonal_(3)  # row t: another token at place t
    change = (model(others).last_hidden_state[:, 15] - model(ids).last_hidden_state[:, 15]).abs().amax(-1)
    assert (change > 1e-6).nonzero().flatten().tolist() == list(reach)


# ---- the control ----


@pytest.mark.parametrize("control", ["mlp", "linformer"])
def test_a_shared_control_is_one_tensor(control):
    model, seen = tiny_model("abc_memory", memory_control=control), []
    for layer in model.encoder.layer:
        layer.attention.self.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model(random_ids(2, 12))
    assert len(seen) == 2 and all(tensor is model.control.weight for tensor in seen)
    assert model.control.weight.shape == (4 * 8, 48 if control == "mlp" else 64)


def test_linformer_starts_with_slots_of_the_size_of_a_token():
    torch.manual_seed(0)
    fields = {"memory_control": "linformer", "max_position_embeddings": 256, "memory_size": 16}
    weight = AbcModel(tiny_config_for("abc_memory", **fields)).control.weight
    assert weight.std().item() == pytest.approx(256**-0.5, rel=0.05)


def test_linformer_refuses_more_tokens_than_it_has_weights_for():
    model = tiny_model("abc_memory", memory_control="linformer", max_position_embeddings=32)
    with refused(33, 32, "max_position_embeddings"):
        model(random_ids(1, 33))


def test_the_learned_control_adds_less_than_a_hundredth_to_the_base_model():
    """The paper's claim for its base model, which is RoBERTa's."""
    with torch.device("meta"):
        sizes = {
            control: AbcForMaskedLM(AbcConfig(memory_control=control)).num_parameters() for control in ("mlp", "full")
        }
    assert sizes["mlp"] - sizes["full"] == 12 * 64 * 768
    assert 0 < sizes["mlp"] / sizes["full"] - 1 < 0.01
