"""The padding guarantee: the number, side and contents of pads, and the other rows of a batch, change nothing in values
or gradients."""

import pytest
import torch
from helpers import (
    FAMILIES,
    FAMILY_KINDS,
    FAMILY_POOLINGS,
    FAMILY_VARIANTS,
    covering,
    in_turn,
    model_class,
    random_ids,
    tiny_config_for,
    tiny_model,
    variants_of,
)
from transformers.utils import logging

# Relative to the largest entry. In float64 and float32 only the order of summation differs. In bfloat16 (8 bits) a
# state of size 1 to 4 is rounded by up to 2^-7 at every step, and a gradient is a sum of such terms.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.04}
LENGTHS = [3, 17, 9, 1]  # with 8 slots: rows shorter and longer than the memory


@pytest.fixture(params=FAMILIES)
def model_type(request):
    return request.param


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


def pad(rows, width, side, content):
    """Rows in one batch of this width; `content` fills in the pads."""
    ids = content(torch.empty(len(rows), width, dtype=torch.long))
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def pad_tokens(ids):
    return ids.fill_(1)


def garbage(ids):
    return ids.random_(0, 120, generator=torch.Generator().manual_seed(5))


def loss_of(states):
    """A loss with a different weight for every entry."""
    states = states.double()
    return (states * torch.linspace(-1, 1, states.numel(), dtype=torch.float64).view_as(states)).sum() / states.shape[0]


def run(model, rows, width, side, content):
    """Token states of every row without its pads, and the gradients of a loss on these states."""
    ids, mask = pad(rows, width, side, content)
    model.zero_grad()
    states = model(ids, attention_mask=mask).last_hidden_state
    assert not states[mask == 0].any()  # whether padding is skipped or computed
    real = [states[i][mask[i] == 1] for i in range(len(rows))]
    sum(loss_of(row) for row in real).backward()
    return [row.detach() for row in real], {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_near(actual, expected, dtype, what):
    scale = max(expected.abs().max().item(), 1.0)
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= TOLERANCE[dtype] * scale, f"{what}: {difference:.2e} (largest entry {scale:.2e})"


def check_padding(model, dtype):
    """Compare every row alone with batches: outputs, and gradients summed over the rows in float64."""
    rows = [random_ids(1, length, seed=length)[0] for length in LENGTHS]
    alone, gradients = [], {}
    for row in rows:
        (states,), row_gradients = run(model, [row], len(row), "right", pad_tokens)
        alone.append(states)
        gradients = {n: g.double() + gradients.get(n, 0.0) for n, g in row_gradients.items()}
    for width, side, content in [(17, "left", garbage), (33, "right", garbage)]:
        together, together_gradients = run(model, rows, width, side, content)
        for i, states in enumerate(alone):
            assert_near(together[i], states, dtype, f"row {i} padded on the {side} to {width}")
        for name, gradient in gradients.items():
            assert_near(together_gradients[name], gradient, dtype, f"gradient of {name}, {side}, width {width}")


@pytest.mark.parametrize(("family", "variant", "attention"), in_turn(FAMILY_VARIANTS, ["eager", "sdpa"]))
def test_padding_changes_nothing(family, variant, attention):
    model = tiny_model(family, attn_implementation=attention, **variants_of(family)[variant]).double()
    check_padding(model, torch.float64)


@pytest.mark.parametrize(
    ("case", "dtype", "attention"), covering(FAMILY_KINDS, [torch.float32, torch.bfloat16], ["eager", "sdpa"])
)
def test_padding_in_other_precisions(case, attention, dtype):
    family, variant = case
    model = tiny_model(family, attn_implementation=attention, **variants_of(family)[variant]).to(dtype)
    check_padding(model, dtype)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_may_hold_anything_as_embeddings(model_type, attention, side):
    """Infinity and NaN at padding reach neither a state nor a gradient."""
    model = tiny_model(model_type, conv_kernel_size=3)
    model.set_attn_implementation(attention)
    _, mask = pad([random_ids(1, 5)[0], random_ids(1, 12)[0]], 12, side, pad_tokens)
    embeds = torch.randn(2, 12, 48)
    results = []
    for filler in (0.0, float("nan"), float("inf")):
        model.zero_grad()
        states = model(
            inputs_embeds=embeds.masked_fill(mask[..., None] == 0, filler), attention_mask=mask
        ).last_hidden_state
        loss_of(states[mask == 1]).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((states[mask == 1].detach(), gradients))
    for states, gradients in results[1:]:
        assert torch.equal(states, results[0][0])
        for name, gradient in gradients.items():
            assert torch.equal(gradient, results[0][1][name]), name


@pytest.mark.parametrize(
    ("model_type", "dtype", "attention"), covering(list(FAMILIES), list(TOLERANCE), ["eager", "sdpa"])
)
def test_a_row_of_padding_stays_finite(model_type, attention, dtype):
    model = tiny_model(model_type, "sequence", conv_kernel_size=3).to(dtype)
    model.set_attn_implementation(attention)
    ids, mask = pad([random_ids(1, 6)[0], torch.empty(0, dtype=torch.long)], 6, "right", pad_tokens)
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    for states in output.hidden_states:
        assert torch.isfinite(states).all()
    output.logits.double().pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
    alone = model(ids[:1], attention_mask=mask[:1]).logits
    assert_near(output.logits[:1], alone, dtype, "the other row")


# A new model, unlike one with noise in its biases, gives padding a state of zeros, whose gradient every norm enlarges.


def new_model(family, make, **fields):
    torch.manual_seed(0)
    return make(FAMILIES[family])(tiny_config_for(family, num_hidden_layers=12, **fields)).double().eval()


def learned(model, inputs, labels):
    """The sum of the losses, and its gradients."""
    model.zero_grad()
    loss = model(**inputs, labels=labels, num_items_in_batch=1).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_learned(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, torch.float32, "from the left")  # in which Transformers sums the loss


def test_a_new_decoder_learns_the_same_from_padding_on_either_side(model_type):
    model = new_model(model_type, lambda family: family.causal_lm, is_decoder=True)
    rows, results = [random_ids(1, length, seed=length)[0] for length in LENGTHS[:3]], []
    for side in ("right", "left"):
        ids, mask = pad(rows, 17, side, garbage)
        inputs, labels = {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)
        results.append(learned(model, inputs, labels))
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        loss = model(**inputs, shift_labels=shifted, num_items_in_batch=1).loss
        torch.testing.assert_close(loss, results[-1][0])
    assert_learned(*results)


def test_what_follows_unread_padding_teaches_a_new_encoder_decoder_nothing(model_type):
    model = new_model(model_type, lambda family: family.seq2seq_lm, is_encoder_decoder=True)
    rows = [random_ids(1, length, seed=length)[0] for length in LENGTHS[:3]]
    ids, mask = pad(rows, 17, "left", garbage)
    inputs = {"input_ids": random_ids(3, 9), "decoder_input_ids": ids, "decoder_attention_mask": mask}
    found, expected = (learned(model, inputs, labels) for labels in (ids, ids.masked_fill(mask == 0, -100)))
    assert_learned(found[1:], expected[1:])


@pytest.mark.parametrize("kind", ["sequence", "choice"])
def test_a_row_of_padding_teaches_a_new_model_nothing(model_type, kind):
    model = new_model(model_type, lambda family: model_class(model_type, kind), num_labels=3)
    ids = random_ids(3, 9)
    mask = torch.ones_like(ids).index_fill(0, torch.tensor([1]), 0)
    if kind == "choice":
        ids, mask = ids[None], mask[None]
    model(ids, attention_mask=mask, labels=torch.arange(len(ids))).loss.backward()
    assert max(parameter.grad.abs().max() for parameter in model.parameters() if parameter.grad is not None) < 10


def test_without_a_mask_the_ids_give_the_padding(model_type):
    model = tiny_model(model_type)
    ids, mask = pad([random_ids(1, 5)[0], random_ids(1, 12)[0]], 12, "right", pad_tokens)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, model(ids, attention_mask=mask).last_hidden_state)


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
def test_masks_of_any_type(model_type, kind):
    model = tiny_model(model_type)
    ids, mask = pad([random_ids(1, 5)[0], random_ids(1, 12)[0]], 12, "left", garbage)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        assert torch.equal(model(ids, attention_mask=getattr(mask, kind)()).last_hidden_state, expected)


@pytest.mark.parametrize(("case", "head", "side"), covering(FAMILY_POOLINGS, ["sequence", "choice"], ["left", "right"]))
def test_pooled_heads(case, head, side):
    family, pooling = case
    model = tiny_model(family, head, classifier_pooling=pooling).double()
    rows = [random_ids(1, length, seed=length)[0] for length in (3, 14)]
    shape = (1, 2) if head == "choice" else (2,)

    def logits(rows, width, content):
        ids, mask = pad(rows, width, side, content)
        with torch.no_grad():
            return model(ids.view(*shape, width), attention_mask=mask.view(*shape, width)).logits

    expected = logits(rows, 14, pad_tokens)
    torch.testing.assert_close(logits(rows, 14, garbage), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits(rows, 30, garbage), expected, rtol=0, atol=1e-12)
    if head == "sequence":
        with torch.no_grad():
            alone = torch.cat([model(row[None]).logits for row in rows])
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12)


def test_masked_tokens_that_are_not_padding_are_reported(caplog):
    """A BERT computes their states, which ColBERT's query expansion scores."""
    logging.warning_once.cache_clear()  # another test may have had the same warning
    model, ids = tiny_model("luna"), random_ids(1, 9)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    model(pad_tokens(ids.clone()).where(mask == 0, ids), attention_mask=mask)
    model(ids, attention_mask=mask, unpad_inputs=False)  # which computes them
    assert "attention_mask" not in caplog.text
    model(ids, attention_mask=mask)
    assert "`attention_mask` hides tokens" in caplog.text


@pytest.mark.parametrize("unpad_inputs", [None, False, True])
def test_masked_tokens_have_the_same_states_in_every_batch(model_type, unpad_inputs):
    model, ids = tiny_model(model_type, unpad_inputs=unpad_inputs), random_ids(6, 40)
    mask = (torch.arange(40) < torch.tensor([[40], [3], [2], [2], [1], [5]])).long()
    states = model(ids, attention_mask=mask).last_hidden_state
    alone = [model(ids[i : i + 1], attention_mask=mask[i : i + 1]).last_hidden_state for i in range(6)]
    torch.testing.assert_close(torch.cat(alone), states, rtol=0, atol=1e-5)


@torch.no_grad()
def test_padding_has_no_part_in_an_answer(model_type):
    """Not in the loss, nor in the probabilities that a user makes of the logits."""
    model, rows = tiny_model(model_type, "span").double(), [random_ids(1, size, seed=size)[0] for size in LENGTHS]
    answers = {"start_positions": torch.tensor([1, 4, 2, 0]), "end_positions": torch.tensor([2, 9, 2, 0])}
    for width in (17, 30):
        ids, mask = pad(rows, width, "right", garbage)
        found = model(input_ids=ids, attention_mask=mask, **answers)
        losses = []
        for number, row in enumerate(rows):
            alone = model(row[None], **{name: each[number : number + 1] for name, each in answers.items()})
            losses.append(alone.loss)
            starts = found.start_logits[number].softmax(-1)
            torch.testing.assert_close(starts[: len(row)], alone.start_logits[0].softmax(-1))
            assert not starts[len(row) :].any()
        torch.testing.assert_close(found.loss, torch.stack(losses).mean())
