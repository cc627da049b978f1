"""Variable-length texts without padding: a text gets the values and gradients that it has alone, in a padded batch or
in a row with others, and nothing of it reaches another. Flash and flex attention: `test_attention_backends.py`."""

import itertools
import random

import pytest
import torch
from helpers import (
    FAMILIES,
    FAMILY_VARIANTS,
    KINDS_FIRST,
    in_turn,
    inputs_for,
    padded_batch,
    random_ids,
    refused,
    slow_unless,
    tiny_model,
    tiny_seq2seq_model,
    tiny_tokenizer,
    variants_of,
)
from transformers import DataCollatorForTokenClassification, DataCollatorWithFlattening, Trainer, TrainingArguments

from luna_hf.ops import unpadding
from luna_hf.ops.unpadding import find_starts, plan_buckets

# In float64 only the order of summation differs.
TOLERANCE = {"rtol": 0, "atol": 1e-12}
LENGTHS = [17, 3, 40, 1, 9, 17, 25]  # with 8 slots: shorter and longer than the memory, alone and alike

families = pytest.mark.parametrize("family", FAMILIES)
variants = pytest.mark.parametrize(("family", "variant"), KINDS_FIRST)
backends = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture
def free_buckets(monkeypatch):
    """As in a large model, where a bucket costs little beside the tokens."""
    monkeypatch.setattr(unpadding, "bucket_cost", lambda device, width: 1.0)


def texts(lengths=LENGTHS):
    return [random_ids(1, length, seed=seed)[0] for seed, length in enumerate(lengths)]


def padded(rows, side="left", width=44):
    ids, mask = torch.ones(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def flat(rows, marks="cu_seq_lens"):
    """The rows in one, with the kind of marks; `rows` counts positions from 0 and `table` as RoBERTa's table does."""
    first = 2 if marks == "table" else 0
    collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=marks == "cu_seq_lens",
        return_seq_idx=marks == "seq_idx",
        return_position_ids=marks in ("rows", "table", "cu_seq_lens"),
        position_ids_start=first,
    )
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    return {name: value for name, value in batch.items() if name != "labels"}


def alone(model, rows):
    return [model(row[None]).last_hidden_state[0] for row in rows]


def weighted(states):
    return (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).sum()


def gradients(model, states):
    """The gradients of a loss that weighs every entry of every text's states differently."""
    model.zero_grad()
    sum(weighted(text) for text in states).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def assert_equal_gradients(actual, expected):
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1.0)
        torch.testing.assert_close(actual[name] / scale, gradient / scale, **TOLERANCE, msg=lambda m, n=name: n + m)


def model_of(family, variant="default", kind="base", **options):
    return tiny_model(family, kind, **{**variants_of(family)[variant], **options}).double()


# ---- values and gradients ----


@pytest.mark.parametrize(("family", "variant", "attention"), in_turn(FAMILY_VARIANTS, ["eager", "sdpa"]))
def test_a_text_has_the_values_and_gradients_that_it_has_alone(family, variant, attention, free_buckets):
    model, rows = model_of(family, variant, attn_implementation=attention), texts()
    expected = alone(model, rows)
    expected_gradients = gradients(model, expected)
    packed = model(**flat(rows)).last_hidden_state
    assert packed.shape == (1, sum(LENGTHS), 48)
    batch = padded(rows)
    unpadded = model(**batch, unpad_inputs=True).last_hidden_state
    assert unpadded.shape == (len(rows), 44, 48) and not unpadded[batch["attention_mask"] == 0].any()
    real = [row[keep == 1] for row, keep in zip(unpadded, batch["attention_mask"], strict=True)]
    for states in (packed[0].split(LENGTHS), real):
        assert_equal(states, expected)
        assert_equal_gradients(gradients(model, states), expected_gradients)


@variants
def test_nothing_of_a_text_reaches_another(family, variant, free_buckets):
    """Neither values, even if they are NaN, nor gradients."""
    model = model_of(family, variant)
    marks = {name: value for name, value in flat(texts()).items() if name != "input_ids"}
    embeds = torch.randn(1, sum(LENGTHS), 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = model(inputs_embeds=embeds, **marks).last_hidden_state[0].split(LENGTHS)
    for chosen in (2, 5):
        own = torch.arange(sum(LENGTHS)).split(LENGTHS)[chosen]
        spoilt = embeds.clone()
        spoilt[:, own] = float("nan")
        if "cluster" not in variant:  # whose gradient path is blocked by a choice of the nearest centroid
            spoilt.requires_grad_()
            actual = model(inputs_embeds=spoilt, **marks).last_hidden_state[0].split(LENGTHS)
            for i, states in enumerate(actual):
                assert states.isnan().all() if i == chosen else torch.equal(states, expected[i])
            weighted(actual[0]).backward()
            assert spoilt.grad[0, : LENGTHS[0]].isfinite().all()
        inputs = embeds.clone().requires_grad_()
        weighted(model(inputs_embeds=inputs, **marks).last_hidden_state[0, own]).backward()
        others = torch.ones(sum(LENGTHS), dtype=torch.bool)
        others[own] = False
        assert inputs.grad[0, own].any() and not inputs.grad[0, others].any()


@families
@pytest.mark.parametrize("marks", ["cu_seq_lens", "seq_idx", "rows", "table"])
@torch.no_grad()
def test_every_way_to_mark_texts(family, marks):
    model, rows = model_of(family), texts()
    assert_equal(model(**flat(rows, marks)).last_hidden_state[0].split(LENGTHS), alone(model, rows))


@families
@torch.no_grad()
def test_a_single_text_counts_its_positions_from_0(family):
    """As the flattening collator does, which marks nothing else in a batch of one."""
    model, (row,) = model_of(family), texts([12])
    assert_equal(model(row[None], position_ids=torch.arange(12)[None]).last_hidden_state, alone(model, [row]))


@families
@torch.no_grad()
def test_blocks_of_several_rows_with_padding(family):
    """Rows of packed documents, as a pretraining run fills them, one with padding at its end."""
    model = model_of(family, "convolution-segments-untied")
    rows = texts([5, 11, 7, 8])
    ids = torch.ones(2, 16, dtype=torch.long)
    ids[0], ids[1, :15] = torch.cat(rows[:2]), torch.cat(rows[2:])
    numbers = torch.tensor([[0] * 5 + [1] * 11, [0] * 7 + [1] * 9])
    segments = torch.arange(16).remainder(2)[None]
    mask = (ids != 1).long()
    mask[1, 15] = 0
    states = model(ids, attention_mask=mask, seq_idx=numbers, token_type_ids=segments).last_hidden_state
    actual = [states[0, :5], states[0, 5:], states[1, :7], states[1, 7:15]]
    for one, row, first in zip(actual, rows, (0, 5, 0, 7), strict=True):
        types = segments[:, first : first + len(row)]
        torch.testing.assert_close(one, model(row[None], token_type_ids=types).last_hidden_state[0], **TOLERANCE)


@families
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family, reentrant, free_buckets):
    results = []
    for checkpointing in (False, True):
        model = model_of(family).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        states = model(**padded(texts()), unpad_inputs=True).last_hidden_state
        results.append(gradients(model, states))
    assert_equal_gradients(results[1], results[0])


@families
@torch.no_grad()
def test_lunas_packed_states_are_in_the_order_of_the_texts(family, free_buckets):
    model, rows = model_of(family), texts()
    batch = padded(rows)
    outputs = [model(**batch, unpad_inputs=unpad) for unpad in (False, True)] + [model(**flat(rows))]
    if "packed_last_hidden_state" not in outputs[0]:
        assert all(output.keys() == {"last_hidden_state"} for output in outputs)
        return
    used = outputs[0].packed_attention_mask
    for output in outputs[1:]:
        assert torch.equal(output.packed_attention_mask, used)
        actual, expected = (out.packed_last_hidden_state[used == 1] for out in (output, outputs[0]))
        torch.testing.assert_close(actual, expected, **TOLERANCE)


# ---- heads ----


@families
@pytest.mark.parametrize("kind", ["mlm", "token"])
def test_heads_on_tokens(family, kind, free_buckets):
    model, rows = model_of(family, kind=kind), texts()
    labels = [row % 2 if kind == "token" else row for row in rows]
    expected = [model(row[None], labels=label[None]) for row, label in zip(rows, labels, strict=True)]
    packed = model(**flat(rows), labels=torch.cat(labels)[None])
    assert_equal(packed.logits[0].split(LENGTHS), [output.logits[0] for output in expected])
    mean = sum(output.loss * length for output, length in zip(expected, LENGTHS, strict=True)) / sum(LENGTHS)
    torch.testing.assert_close(packed.loss, mean, **TOLERANCE)


@families
@pytest.mark.parametrize("kind", ["mlm", "sequence", "choice", "token", "span"])
def test_heads_give_the_same_with_and_without_padding(family, kind, free_buckets):
    """Loss, outputs at real tokens, and gradients."""
    inputs, results = inputs_for(kind, batch=4, length=30, labels=True), []
    keep = inputs["attention_mask"] == 1
    assert not keep.all()
    for unpad in (False, True):
        model = model_of(family, kind=kind, unpad_inputs=unpad)
        output = model(**inputs)
        output.loss.backward()
        if kind == "span":  # in the loss, padding competes with the tokens
            unlabelled = {name: tensor for name, tensor in inputs.items() if "positions" not in name}
            output.logits = model(**unlabelled).start_logits
        logits = output.logits
        logits = logits[keep] if kind in ("mlm", "token", "span") else logits
        results.append((output.loss, logits, {name: p.grad for name, p in model.named_parameters()}))
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    assert_equal_gradients(results[1][2], results[0][2])


@families
@torch.no_grad()
def test_an_encoder_decoder_refuses_packed_sources(family):
    model, packed, target = tiny_seq2seq_model(family), flat(texts([4, 5]), "rows"), random_ids(1, 3)
    with refused("position_ids", "DataCollatorWithPadding"):
        model(**packed, decoder_input_ids=target)
    with refused("cu_seq_lens_q", "DataCollatorWithPadding"):
        model(packed["input_ids"], decoder_input_ids=target, cu_seq_lens_q=torch.tensor([0, 4, 9]))


@pytest.mark.parametrize(
    ("family", "kind"),
    [slow_unless(family == "luna", family, kind) for family in FAMILIES for kind in ("mlm", "token")],
)
def test_the_trainer_with_the_flattening_collator(family, kind, tmp_path):
    """An update on flattened texts is that on padded ones; the collator labels no first token of a text."""
    rows = texts([9, 4, 21, 1, 13, 30])
    data = [{"input_ids": row.tolist(), "labels": [-100, *(row[1:] % 2).tolist()]} for row in rows]
    collators = {
        "padded": DataCollatorForTokenClassification(tiny_tokenizer()),
        "positions": DataCollatorWithFlattening(),
        "lengths": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    }
    updated = {}
    for name, collator in collators.items():
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_steps=2,
            per_device_train_batch_size=3,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = model_of(family, kind=kind)
        Trainer(model, arguments, data_collator=collator, train_dataset=data).train()
        updated[name] = dict(model.named_parameters())
    for name in ("positions", "lengths"):
        for parameter, value in updated[name].items():
            torch.testing.assert_close(value, updated["padded"][parameter], rtol=0, atol=1e-6, msg=parameter)
    fresh = dict(model_of(family, kind=kind).named_parameters())
    assert max((updated["lengths"][name] - fresh[name]).abs().max() for name in fresh) > 1e-3


# ---- when padding is left out ----


@families
@torch.no_grad()
def test_padding_is_left_out_where_it_pays(family, free_buckets, monkeypatch):
    model, seen = tiny_model(family, attn_implementation="sdpa"), []
    inner = type(model.encoder.layer[0].intermediate)
    forward = inner.forward  # a hook would see rows
    monkeypatch.setattr(
        inner, "forward", lambda own, states: seen.append(states[..., 0].numel()) or forward(own, states)
    )
    model.register_forward_hook(lambda *_: None)  # one on the whole model sees rows
    batch = padded(texts())
    empty = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in batch.items()}
    for inputs, options, expected in [
        (batch, {}, sum(LENGTHS)),
        (batch, {"unpad_inputs": False}, 7 * 44),
        (batch, {"output_hidden_states": True}, 7 * 44),
        (padded_batch([20, 20]), {}, 40),
        (padded_batch([20, 19]), {}, 40),  # too little to pay
        (empty, {"unpad_inputs": True}, 8 * 44),  # a row of padding alone keeps its place
    ]:
        model(**inputs, **options)
        assert {*seen} == {expected}
        seen.clear()
    model.set_attn_implementation("eager")
    model(**batch)
    assert {*seen} == {7 * 44}


@torch.no_grad()
def test_hidden_states_of_packed_texts():
    model, rows = model_of("luna"), texts()
    states = model(**flat(rows), output_hidden_states=True).hidden_states
    expected = [model(row[None], output_hidden_states=True).hidden_states for row in rows]
    for layer, layers in zip(states, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(layer, torch.cat(layers, 1), **TOLERANCE)
    for name in ("output_attentions", "output_packed_hidden_states"):
        with refused(name, "DataCollatorWithPadding"):
            model(**flat(rows), **{name: True})


# ---- marks and buckets ----


def test_wrong_marks_are_refused():
    model, ids = tiny_model("luna"), random_ids(1, 6)
    for wrong in ([0, 3], [1, 6], [0, 3, 3, 6], [0, 4, 2, 6]):
        with refused("cu_seq_lens_q", 6):
            model(ids, cu_seq_lens_q=torch.tensor(wrong))
    with refused("cu_seq_lens_q", "every row", 3):
        model(ids.view(2, 3), cu_seq_lens_q=torch.tensor([0, 4, 6]))
    with refused("cu_seq_lens_q", 6):
        model(ids, cu_seq_lens_q=torch.tensor([], dtype=torch.int32))
    with refused("cu_seq_lens_k"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 2, 6]), cu_seq_lens_k=torch.tensor([0, 3, 6]))
    with refused("seq_idx", "(1, 6)", "(1, 4)"):
        model(ids, seq_idx=torch.zeros(1, 4))
    both = {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    for name, marks in both.items():
        for wrong in ([0, 1, 0, 2, 1, 3], [0, 1, 0, 1, 0, 1], [2, 3, 2, 3, 2, 2], [5, 4, 5, 6, 7, 8]):
            with refused("position_ids"):
                model(ids, position_ids=torch.tensor([wrong]), **{name: marks})
        model(ids, position_ids=torch.tensor([[2, 3, 2, 3, 4, 5]]), **{name: marks})
    with refused("position_ids"):  # of a row that is one text
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), cu_seq_lens_q=torch.tensor([0, 6]))
    with refused("cu_seq_lens_q", "seq_idx"):
        model(ids, **{**both, "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])})
    model(ids, **both)
    with refused(65, 64):
        model(random_ids(1, 70), cu_seq_lens_q=torch.tensor([0, 65, 70]))
    assert model(random_ids(1, 70), cu_seq_lens_q=torch.tensor([0, 30, 70])).last_hidden_state.shape == (1, 70, 48)


PADDING = {"first": slice(0, 3), "inner": slice(3, 7), "last": slice(7, 12)}


@families
@pytest.mark.parametrize("empty", PADDING)
@torch.no_grad()
def test_a_text_of_padding_alone_keeps_its_place(family, empty, free_buckets):
    model, ids, mask = model_of(family), random_ids(1, 12), torch.ones(1, 12, dtype=torch.long)
    mask[0, PADDING[empty]] = 0
    cumulated, numbers = torch.tensor([0, 3, 7, 12]), torch.tensor([[0] * 3 + [1] * 4 + [2] * 5])
    for marks in ({"cu_seq_lens_q": cumulated}, {"seq_idx": numbers}):
        output = model(ids, attention_mask=mask, **marks)
        assert output.last_hidden_state.isfinite().all() and not output.last_hidden_state[0, PADDING[empty]].any()
        packed = output.get("packed_last_hidden_state")
        assert packed is None or (len(packed) == 3 and packed.isfinite().all())
        for number, (name, place) in enumerate(PADDING.items()):
            if name != empty:
                own = model(ids[:, place])
                torch.testing.assert_close(output.last_hidden_state[:, place], own[0], **TOLERANCE)
                if packed is not None:
                    slots = own.packed_last_hidden_state.shape[1]
                    torch.testing.assert_close(packed[number, :slots], own.packed_last_hidden_state[0], **TOLERANCE)
                    assert output.packed_attention_mask[number].sum() == slots
    if empty == "inner":  # padding may have any position, which marks nothing
        with refused("position_ids", "cu_seq_lens_q", "seq_idx"):
            model(ids, attention_mask=mask, position_ids=torch.tensor([[*range(3), *range(4), *range(5)]]))
    with refused("padding"):
        model(ids, attention_mask=0 * mask, cu_seq_lens_q=cumulated)


def test_several_texts_cannot_start_from_packed_states():
    model, given = tiny_model("luna"), {"packed_states": torch.zeros(1, 8, 48)}
    with refused("packed_states", "DataCollatorWithPadding"):
        model(**flat(texts([20, 20])), **given)
    with refused("packed_states", "DataCollatorWithPadding"):
        model(random_ids(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), **given)


def test_starts_by_positions():
    positions = torch.tensor([[3, 4, 0, 1, 0, 0], [2, 3, 4, 2, 2, 3]])
    keep = torch.ones(2, 6, dtype=torch.bool)
    expected = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0]]).bool()
    assert torch.equal(find_starts((2, 6), None, positions, {}), expected)
    keep[1, 3] = False  # padding may have any position
    expected[1, 3] = False
    assert torch.equal(find_starts((2, 6), keep, positions, {}), expected)
    assert find_starts((2, 6), None, torch.arange(6)[None], {}) is None


@pytest.mark.parametrize("cost", [0.5, 3.0, 20.0])
def test_buckets_are_the_cheapest(cost):
    draw = random.Random(0)
    for _ in range(20):
        lengths = sorted(draw.randrange(1, 12) for _ in range(8))
        sizes = plan_buckets(lengths, cost)

        def total(sizes, lengths=lengths):
            ends = [*itertools.accumulate(sizes)]
            return sum(size * lengths[end - 1] + cost for size, end in zip(sizes, ends, strict=True))

        every = [
            [b - a for a, b in itertools.pairwise((0, *cuts, 8))]
            for count in range(8)
            for cuts in itertools.combinations(range(1, 8), count)
        ]
        assert total(sizes) == min(map(total, every))


def test_many_lengths_are_planned_in_few_buckets():
    sizes = plan_buckets(list(range(1, 3001)), 1.0)
    assert sum(sizes) == 3000 and len(sizes) <= 65
