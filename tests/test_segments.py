"""Packed states as a memory across segments. Values and gradients: `test_reference_luna.py`."""

import pytest
import torch
from helpers import (
    padded_batch,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_config,
    tiny_model,
    tiny_seq2seq_model,
    tiny_tokenizer,
)

from luna_hf import LunaConfig, LunaForSequenceClassification, LunaModel, stream_document

SIZE = 10
LENGTHS = [37, 12, 3]


@pytest.fixture(params=[False, True], ids=["published", "self"])
def model(request):
    fields = {"segment_length": SIZE, "packed_self_attention": request.param}
    return tiny_model(**fields, max_position_embeddings=16).double()


def by_hand(model, ids):
    """Token states, and packed states, of a row (1, n) that is read in one call for each segment."""
    states, packed = [], None
    for segment in ids.split(SIZE, dim=1):
        output = model(segment, packed_states=packed, output_packed_states=True)
        packed = output.packed_states
        states.append(output.last_hidden_state)
    return torch.cat(states, dim=1), packed


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_long_rows_is_read_like_each_row_segment_by_segment(model, side):
    inputs = padded_batch(LENGTHS)
    if side == "left":
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    output = model(**inputs)
    for row, length in enumerate(LENGTHS):
        real = inputs["attention_mask"][row] == 1
        states, packed = by_hand(model, inputs["input_ids"][row : row + 1, real])
        used = min(length, model.config.projection_length)
        assert output.packed_attention_mask[row].tolist() == [1] * used + [0] * (8 - used)
        torch.testing.assert_close(output.last_hidden_state[row, real], states[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(output.packed_last_hidden_state[row, :used], packed[0, :used], rtol=0, atol=1e-12)


def test_a_later_segment_depends_on_an_earlier_one_but_not_the_other_way_round(model):
    ids = random_ids(1, 25)
    changed = ids.clone()
    changed[0, 12] = ids[0, 12] % 100 + 5
    before, after = model(ids).last_hidden_state, model(changed).last_hidden_state
    assert torch.equal(before[:, :SIZE], after[:, :SIZE])
    assert ((before - after)[0, SIZE:].abs().amax(-1) > 1e-6).all()


def test_a_short_last_segment_has_all_slots_in_use():
    """They hold what earlier segments wrote, so that poolings read them all."""
    fields = {"segment_length": SIZE, "max_position_embeddings": 16, "classifier_pooling": "packed_mean"}
    model, ids, packed = tiny_model(kind="sequence", **fields).double(), random_ids(1, SIZE + 3), None
    for segment in ids.split(SIZE, dim=1):
        output = model(segment, packed_states=packed, output_packed_states=True)
        packed = output.packed_states
    torch.testing.assert_close(output.logits, model(ids).logits, rtol=0, atol=1e-12)
    assert model.luna(ids[:, :3], packed_states=packed).packed_attention_mask.tolist() == [[1] * 8]


def test_one_segment_is_read_as_without_the_field():
    ids = random_ids(2, SIZE)
    plain, segmented = tiny_model(), tiny_model(segment_length=SIZE)
    assert torch.equal(plain(ids).last_hidden_state, segmented(ids).last_hidden_state)


def test_states_and_weights_of_all_segments_are_returned(model):
    model.set_attn_implementation("eager")
    names = ("hidden_states", "attentions", "packed_hidden_states", "pack_attentions")
    inputs = padded_batch([25, 25])
    whole = model(**inputs, **{f"output_{name}": True for name in names})
    first = model(inputs["input_ids"][:, :SIZE], **{f"output_{name}": True for name in names})
    assert whole.hidden_states[-1].shape == (2, 25, 48) and whole.attentions[0].shape[2:] == (25, 8)
    assert whole.pack_attentions[0].shape[2:] == (8, 25)
    torch.testing.assert_close(whole.hidden_states[1][:, :SIZE], first.hidden_states[1])
    torch.testing.assert_close(whole.pack_attentions[0][..., :SIZE], first.pack_attentions[0])
    assert isinstance(model(**inputs, return_dict=False), tuple)


@pytest.mark.parametrize("kind", ["mlm", "sequence", "token", "span"])
def test_every_head_passes_packed_states_on(kind):
    model = tiny_model(kind=kind)
    ids = random_ids(2, 12)
    first = model(ids, output_packed_states=True)
    assert first.packed_states.shape == (2, 8, 48)
    assert model(ids).packed_states is None
    second = model(ids, packed_states=first.packed_states)
    assert not torch.allclose(first[0], second[0], atol=1e-4)


@pytest.mark.parametrize("window", [0, 4])
def test_sdpa_equals_eager(window):
    model = tiny_model(segment_length=SIZE, local_window=window)
    inputs = padded_batch(LENGTHS)
    real = inputs["attention_mask"] == 1
    expected = model(**inputs).last_hidden_state[real]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(**inputs).last_hidden_state[real], expected, rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    model = tiny_model(kind="mlm", segment_length=SIZE)
    inputs = padded_batch(LENGTHS)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(**inputs, labels=labels).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_gradients_pass_through_the_segments(model):
    ids = random_ids(1, 35)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).last_hidden_state[:, 30:].sum().backward()
    assert (embedded.grad[0, :SIZE].abs().amax(-1) > 0).all()


def test_unsuitable_inputs_and_configurations_are_refused(model):
    with refused("packed_states", "(1, 8, 48)", "(1, 3, 48)"):
        model(random_ids(1, 12), packed_states=torch.zeros(1, 3, 48))
    with refused("position_ids"):
        model(random_ids(1, 12), position_ids=torch.arange(12)[None])
    with refused("segment_length", "projection_length"):
        tiny_config(segment_length=4)
    with refused("segment_length", "tokens_per_slot", 16):
        tiny_config(segment_length=15, tokens_per_slot=2)
    with refused("packed_states", "(1, 8, 48)", "24 tokens"):
        tiny_model(tokens_per_slot=3)(random_ids(1, 12), packed_states=torch.zeros(1, 4, 48))
    with refused("segment_length", "max_position_embeddings"):
        tiny_config(segment_length=1000)
    with refused("classifier_pooling", "packed_mean"):
        LunaForSequenceClassification(tiny_config(segment_length=SIZE))


# ---- documents ----


def test_a_document_is_streamed_like_one_long_input():
    tokenizer = tiny_tokenizer()
    fields = {"segment_length": SIZE, "max_position_embeddings": 16, "vocab_size": len(tokenizer)}
    model = tiny_model(kind="sequence", classifier_pooling="packed_mean", **fields)
    text = "the quick brown fox reads every token in turn " * 5
    outputs = list(stream_document(model, tokenizer, text))
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert len(outputs) == -(-ids.shape[1] // SIZE) > 3
    torch.testing.assert_close(outputs[-1].logits, model(ids).logits)
    assert not torch.is_inference_mode_enabled()


def test_without_the_field_segments_have_the_models_length():
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=16)
    lengths = [output.last_hidden_state.shape[1] for output in stream_document(model, tokenizer, "a fox " * 30)]
    assert lengths[:-1] == [16] * (len(lengths) - 1)


def test_what_cannot_be_streamed_is_refused():
    tokenizer, text = tiny_tokenizer(), "a fox"
    for model in (tiny_model("abc_memory"), tiny_seq2seq_model("luna"), tiny_causal_model("luna")):
        with refused("packed states"):
            next(stream_document(model, tokenizer, text))
    for pooling in ("cls", "mean", "packed_attention"):
        model = tiny_model(kind="sequence", classifier_pooling=pooling, vocab_size=len(tokenizer))
        with refused("classifier_pooling", pooling, "packed_mean"):
            next(stream_document(model, tokenizer, text))
    model = tiny_model(vocab_size=len(tokenizer))
    with refused("text", "list"):
        next(stream_document(model, tokenizer, [text, text]))
    with refused("segment_length", 0):
        next(stream_document(model, tokenizer, text, segment_length=0))


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_rows_that_have_ended_keep_their_memory(norm_first, attends):
    """Documents of unlike length can be read segment by segment by hand, with the same memory as in one call."""
    fields = {"segment_length": SIZE, "norm_first": norm_first, "packed_self_attention": attends}
    model = tiny_model(**fields)
    ids, mask = random_ids(2, 3 * SIZE), torch.ones(2, 3 * SIZE, dtype=torch.long)
    mask[1, SIZE:] = 0
    packed = None
    for part, keep in zip(ids.split(SIZE, 1), mask.split(SIZE, 1), strict=True):
        packed = model(part, keep, packed_states=packed, output_packed_states=True).packed_states
    torch.testing.assert_close(packed, model(ids, mask).packed_last_hidden_state, rtol=0, atol=1e-5)


def test_packed_states_of_another_dtype_are_converted(model):
    ids = random_ids(2, 16)
    packed = model(ids, output_packed_states=True).packed_states.bfloat16()
    states = [model(ids, packed_states=given).last_hidden_state for given in (packed, packed.float())]
    assert torch.equal(*states)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("attends", [False, True])
def test_memory_stays_finite_over_many_segments(dtype, norm_first, attends):
    torch.manual_seed(0)
    fields = {"norm_first": norm_first, "initializer_range": 0.5, "segment_length": 16}
    config = LunaConfig(**{**tiny_config().to_dict(), **fields, "packed_self_attention": attends})
    model, packed = LunaModel(config).eval().to(dtype), None
    with torch.inference_mode():
        norms = []
        for step in range(10_000):
            output = model(random_ids(1, 16, seed=step), packed_states=packed, output_packed_states=True)
            packed = output.packed_states
            norms.append(packed.float().norm(dim=-1).mean().item())
    assert max(norms) < 2 * max(norms[:10])
