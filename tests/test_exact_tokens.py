"""Windows, marked and selected tokens, and slots in one softmax: what the sum of the parts must be.

The literal definition is `reference/mixed.py`, with which `test_reference_<family>.py` and this file compare.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    FAMILIES,
    MIXING_FAMILIES,
    TINY,
    covering,
    model_class,
    normal_states,
    padded_batch,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
    weighted_sum,
)
from reference.luna import encode_row
from test_mixed import float64, with_weights_of
from test_reference_abc import Literal, assert_near, assert_same_gradients, make_model, make_states, padded_rows
from test_warm_start import batch_for, make_source
from test_warm_start import states as states_of
from transformers import AutoConfig
from transformers.utils import logging

from luna_hf.families.abc.configuration import CONTROLS, WITHOUT_SLOTS
from luna_hf.ops.exact_tokens import first_tokens, marked_tokens, tokens_outside
from luna_hf.ops.tokens import window_reach

backends = pytest.mark.parametrize("backend", ["eager", "sdpa"])
families = pytest.mark.parametrize("family", MIXING_FAMILIES)
# Every way of writing slots beside a window.
WRITES = {
    **{control: ("abc_memory", {"memory_control": control}) for control in CONTROLS if control not in WITHOUT_SLOTS},
    "relu": ("abc_memory", {"control_activation": "relu"}),
    "luna": ("luna", {"tie_kv": False}),
    "luna-without-bias": ("luna", {"tie_kv": False, "slot_count_bias": False}),
}
writes = pytest.mark.parametrize("write", WRITES)
WINDOW = 12
FITS = window_reach(WINDOW)[1] + 1


def pair(write, **fields):
    """A mixed model, and one with softmax attention and the same weights."""
    family, own = WRITES[write]
    mixed = float64(family, local_window=WINDOW, **{**own, **fields})
    return mixed, with_weights_of(float64("abc_memory", memory_control="full"), mixed)


def in_blocks(monkeypatch):
    """Read short texts like long ones."""
    for module in ("ops.context", "models.encoder"):
        monkeypatch.setattr(f"luna_hf.{module}.whole_length", lambda config, window: 0)


def assert_same_states_and_gradients(model, other, atol=1e-9, **inputs):
    """Of real tokens, and of every parameter that both have."""
    keep = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 1
    states, expected = (m.train()(**inputs, **more)[0] for m, more in ((model, {}), (other, {})))
    torch.testing.assert_close(states[keep], expected[keep], rtol=0, atol=1e-11)
    weighted_sum(states[keep]).backward()
    weighted_sum(expected[keep]).backward()
    own, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for name in own.keys() & theirs.keys():
        torch.testing.assert_close(
            own[name].grad, theirs[name].grad, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in own.keys() - theirs.keys():  # of the slots, which nothing reads
        assert own[name].grad is not None and (own[name].grad == 0).all(), name


# ---- the slots' mass ----


@pytest.mark.parametrize(("write", "backend", "path"), covering(list(WRITES), ["eager", "sdpa"], ["whole", "blocks"]))
def test_a_text_that_every_window_holds_is_read_by_softmax_attention(write, backend, path, monkeypatch):
    """States and gradients, of full and padded rows; read at once, and like a longer text, in blocks with slots."""
    if path == "blocks":
        in_blocks(monkeypatch)
    for inputs in ({"input_ids": random_ids(2, FITS)}, padded_batch([FITS, 3, 1])):
        mixed, full = pair(write)
        for model in (mixed, full):
            model.set_attn_implementation(backend)
        assert_same_states_and_gradients(mixed, full, **inputs)


@writes
@torch.no_grad()
def test_packed_texts_that_windows_hold_are_read_by_softmax_attention(write):
    mixed, full = pair(write)
    ids = random_ids(1, 30)
    positions = torch.cat([torch.arange(length) for length in (FITS, 20, 30 - 20 - FITS)])[None]
    states, expected = mixed(ids, position_ids=positions)[0][0], full(ids, position_ids=positions)[0][0]
    short = torch.ones(30, dtype=torch.bool)
    short[FITS : FITS + 20] = False
    torch.testing.assert_close(states[short], expected[short], rtol=0, atol=1e-12)
    assert (states - expected)[~short].abs().max() > 1e-4


@pytest.mark.parametrize("architecture", ["roberta", "bert"])
@families
@torch.no_grad()
def test_a_converted_encoder_reads_short_texts_as_its_source(family, architecture):
    """Without any training; padded, and packed."""
    source = make_source(architecture, dtype=torch.float64)
    fields = {"tie_kv": False} if family == "luna" else {}
    model = model_class(family, "mlm").from_roberta(source, local_window=64, **fields)
    batch = batch_for(source)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(states_of(model, batch), states_of(source, batch), rtol=0, atol=1e-12)
    lengths = real.sum(1).tolist()
    packed = {
        **{name: batch[name][real][None] for name in ("input_ids", "token_type_ids")},
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    torch.testing.assert_close(model.base_model(**packed)[0][0], states_of(source, batch), rtol=0, atol=1e-12)


def without_logits(write, **fields):
    """A model of one layer whose queries are zero, so that every token weighs the same."""
    family, own = WRITES[write]
    model = tiny_model(family, **{"num_hidden_layers": 1, "local_window": WINDOW, **own, **fields}).double()
    model.set_attn_implementation("eager")
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.query.weight.zero_()
        attention.query.bias.zero_()
        if attention.slot_scale is not None:
            attention.slot_scale.fill_(1.0)
    return model


@pytest.mark.parametrize(
    ("write", "more", "length"),
    covering(
        [name for name in WRITES if "without" not in name],
        [{}, {"num_selected_tokens": 5}, {"marked": 4}, {"num_selected_tokens": 3, "marked": 2}],
        [FITS + 1, 2 * WINDOW, 60],
    ),
)
@torch.no_grad()
def test_slots_weigh_the_tokens_that_are_read_nowhere_else(write, more, length):
    """Where all tokens weigh the same, so does each of these; just beyond the window, it is at most one."""
    number = more.get("marked", 0)
    model = without_logits(write, **{name: value for name, value in more.items() if name != "marked"})
    marks = torch.zeros(1, length, dtype=torch.long)
    marks[0, torch.arange(number) * 5 % length] = 1
    weights = model(random_ids(1, length), global_attention_mask=marks, output_attentions=True).attentions[0][0]
    slots = weights[..., : -(number + more.get("num_selected_tokens", 0) + WINDOW)]
    exact = weights[..., slots.shape[-1] :]
    reads = marks[0] == 0  # marked tokens read everything
    single = exact[:, reads].amax(-1)
    outside = length - (exact > 0)[:, reads].sum(-1)
    if write == "relu":  # tokens may be in no slot
        outside = outside * (slots[:, reads].sum(-1) > 0)
    torch.testing.assert_close(slots[:, reads].sum(-1), outside * single, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        single * length, torch.ones_like(single), rtol=0, atol=1e-12
    ) if write != "relu" else None
    if length == FITS + 1:
        assert outside.max() <= 1


@families
@pytest.mark.parametrize("length", [WINDOW, 3 * WINDOW])
@torch.no_grad()
def test_causal_slots_weigh_the_tokens_before_the_window(family, length):
    model = tiny_causal_model(family, num_hidden_layers=1, local_window=WINDOW).double()
    model.set_attn_implementation("eager")
    attention = model.base_model.encoder.layer[0].attention.self
    for parameter in attention.query.parameters():
        parameter.zero_()
    attention.slot_scale.fill_(1.0)
    weights = model(random_ids(1, length), output_attentions=True).attentions[0][0]
    slots = weights[..., :-WINDOW].sum(-1)
    tokens = torch.arange(1, length + 1, dtype=torch.float64)
    torch.testing.assert_close(slots, ((tokens - WINDOW).clamp(min=0) / tokens).expand_as(slots), rtol=0, atol=1e-12)


WRITING = ("control", "pack", "centres")  # in the names of parameters that write slots; the last is the toy family's


@families
def test_a_causal_window_over_the_text_is_softmax_attention(family):
    """States and gradients of a text that the window holds: what the slots hold changes nothing."""
    one, other = (float64(family, "causal", local_window=40) for _ in range(2))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if any(part in name for part in WRITING):
                parameter.normal_()
    ids = random_ids(2, 40)
    first, second = one(ids).logits, other(ids).logits
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    weighted_sum(first).backward()
    own = (*WRITING, "slot_scale")
    slots = [p.grad for name, p in one.named_parameters() if any(part in name for part in own)]
    assert slots and all(grad.abs().max() < 1e-12 for grad in slots)
    assert (one(random_ids(2, 44)).logits - other(random_ids(2, 44)).logits).abs().max() > 1e-4


# ---- old folders ----


@families
@torch.no_grad()
def test_folders_of_earlier_versions_keep_their_rule(family, tmp_path):
    """A config without the field, with a window: its slots stand for all tokens, and its heads mark none."""
    model = tiny_model(family, "sequence", local_window=5, slot_counts="all", global_tokens="none")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    fields = ("slot_counts", "global_tokens", "global_tokens_read_all", "max_global_tokens", "num_selected_tokens")
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in (*fields, "num_selection_queries")}))
    loaded = type(model).from_pretrained(tmp_path)
    assert (loaded.config.slot_counts, loaded.config.global_tokens) == ("all", "none")
    assert AutoConfig.from_pretrained(tmp_path).slot_counts == "all"
    inputs = padded_batch([30, 9])
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert type(model).from_pretrained(tmp_path / "again").config.slot_counts == "all"
    new = tiny_config_for(family, local_window=5)
    new.save_pretrained(tmp_path / "new")
    assert AutoConfig.from_pretrained(tmp_path / "new").slot_counts == "outside"


# ---- marked tokens ----

MARKED_VARIANTS = {
    **{f"{control}-alone": {"memory_control": control} for control in CONTROLS},
    **{
        f"{control}-mixed": {"memory_control": control, "local_window": 4}
        for control in CONTROLS
        if control not in WITHOUT_SLOTS
    },
    "mlp-selected": {"local_window": 4, "num_selected_tokens": 3},
    "mlp-mixed-all": {"local_window": 4, "slot_counts": "all"},
}


@pytest.mark.parametrize(
    ("variant", "side", "read_all"),
    covering(
        [name for name in MARKED_VARIANTS if "window" not in name and "dilated" not in name],
        ["right", "left", "middle"],
        [True, False],
    ),
)
def test_marked_tokens_in_abc_equal_their_definition(variant, side, read_all):
    """Outputs and gradients of padded rows with marked tokens."""
    model = make_model(num_hidden_layers=1, global_tokens_read_all=read_all, **MARKED_VARIANTS[variant])
    literal, keep = Literal(model), padded_rows(side)
    marks = torch.zeros_like(keep)
    marks[:, ::3] = True  # of padding, too
    states = make_states(*keep.shape)
    slot_states, context_ = model.begin(states, keep, marks)
    output, _, _ = model.encoder.layer[0].attention.self(states, slot_states, context_)
    assert output.isfinite().all()
    row_states = states.detach().clone().requires_grad_()
    loss = loss_ref = 0.0
    for row, kept in enumerate(keep[:-1]):
        literal.config.marked = marks[row][kept].nonzero().flatten().tolist()
        expected, _ = literal(row_states[row][kept])
        assert_near(output[row][kept], expected, 1e-10, f"row {row}")
        loss, loss_ref = loss + weighted_sum(output[row][kept]), loss_ref + weighted_sum(expected)
    (loss + 0.0 * output[-1].sum()).backward()
    loss_ref.backward()
    assert_near(states.grad, row_states.grad, 1e-8, "gradient of the states")
    assert_same_gradients(model, literal)


@pytest.mark.parametrize("fields", [{}, {"local_window": 5}, {"local_window": 4, "num_selected_tokens": 3}], ids=str)
@torch.no_grad()
def test_marked_tokens_in_luna_equal_their_definition(fields):
    model = tiny_model(num_hidden_layers=2, **fields).double()
    ids, marks = random_ids(1, 23), torch.zeros(1, 23, dtype=torch.long)
    marks[0, [0, 3, 17]] = 1
    config = SimpleNamespace(**model.config.to_dict(), packed_heads=4, marked=[0, 3, 17])
    config.packed_heads = 4
    expected, packed = encode_row(dict(model.named_parameters()), ids[0].tolist(), config)
    output = model(ids, global_attention_mask=marks)
    torch.testing.assert_close(output.last_hidden_state[0], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(output.packed_last_hidden_state[0], packed, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("write", "backend", "window", "read_all"),
    covering([*WRITES, "sliding_window"], ["eager", "sdpa"], [0, WINDOW], [True, False]),
)
@torch.no_grad()
def test_all_tokens_marked_is_softmax_attention(write, backend, window, read_all):
    family, own = WRITES.get(write, ("abc_memory", {"memory_control": write}))
    window = {} if write == "sliding_window" else {"local_window": window}
    mixed = float64(family, **own, **window, global_tokens_read_all=read_all)
    full = with_weights_of(float64("abc_memory", memory_control="full"), mixed)
    inputs = padded_batch([40, 17])
    real = inputs["attention_mask"] == 1
    for model in (mixed, full):
        model.set_attn_implementation(backend)
    output = mixed(**inputs, global_attention_mask=torch.ones_like(inputs["input_ids"]))[0]
    torch.testing.assert_close(output[real], full(**inputs)[0][real], rtol=0, atol=1e-11)


@pytest.mark.parametrize("write", ["mlp", "compressive", "luna", "sliding_window", "dilated"])
@torch.no_grad()
def test_marks_with_padding_packing_and_other_backends(write):
    """Each row alone gives what it gives padded on either side, packed, or with eager attention."""
    family, own = WRITES.get(write, ("abc_memory", {"memory_control": write}))
    model = float64(family, **own, **({} if write in WITHOUT_SLOTS else {"local_window": 6, "num_selected_tokens": 4}))
    rows = [random_ids(1, length, seed=length) for length in (33, 21, 5)]
    marks = [(torch.arange(row.shape[1])[None] % 9 == 2).long() for row in rows]
    alone = [model(row, global_attention_mask=mark)[0][0] for row, mark in zip(rows, marks, strict=True)]
    assert (alone[0] - model(rows[0])[0][0]).abs().max() > 1e-3
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        for left in (False, True):
            ids, mask, marked = (torch.zeros(3, 36, dtype=torch.long) for _ in range(3))
            for index, (row, mark) in enumerate(zip(rows, marks, strict=True)):
                places = slice(36 - row.shape[1], 36) if left else slice(0, row.shape[1])
                ids[index, places], mask[index, places], marked[index, places] = row, 1, mark
            for unpad in (False, True):
                output = model(ids, mask, global_attention_mask=marked, unpad_inputs=unpad)[0]
                for index, expected in enumerate(alone):
                    torch.testing.assert_close(output[index][mask[index] == 1], expected, rtol=0, atol=1e-11)
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = model(torch.cat(rows, 1), position_ids=positions, global_attention_mask=torch.cat(marks, 1))[0][0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-11)


@torch.no_grad()
def test_wrong_marks_are_refused():
    for family in set(FAMILIES) - set(MIXING_FAMILIES):
        with refused("global_attention_mask", family):
            tiny_model(family)(random_ids(1, 9), global_attention_mask=torch.ones(1, 9))
        with refused("num_selected_tokens", FAMILIES[family].config.__name__):
            tiny_config_for(family, num_selected_tokens=4)
    for family in MIXING_FAMILIES:
        model = tiny_model(family, local_window=4, max_global_tokens=3)
        with refused(4, 3, "max_global_tokens"):
            model(random_ids(1, 30), global_attention_mask=(torch.arange(30)[None] < 4).long())
        with refused("global_attention_mask", (1, 30), (1, 29)):
            model(random_ids(1, 30), global_attention_mask=torch.zeros(1, 29))
        with refused("softmax_length", "num_selected_tokens"):
            tiny_config_for(family, softmax_length=4, local_window=4)
        with refused("num_selected_tokens", "local_window"):
            tiny_config_for(family, num_selected_tokens=4)
        with refused("num_selected_tokens", "encoder"):
            tiny_config_for(family, num_selected_tokens=4, local_window=4, is_decoder=True)


def marks_of(kind, family="abc_memory", ids=None, types=None, **fields):
    """The tokens that a head marks, (b, n)."""
    model, seen = tiny_model(family, kind, local_window=4, **fields), []
    original = model.base_model.find_marked
    model.base_model.find_marked = lambda inputs, mask: seen.append(mask) or original(inputs, mask)
    with torch.no_grad():
        model(input_ids=ids, **({} if types is None else {"token_type_ids": types}))
    return seen[0] if seen else None


def test_what_heads_mark_by_default():
    """As Longformer's: the first token, or the question; `eos_token_id` separates."""
    ids = random_ids(2, 20).clamp(min=3)
    ids[:, 6] = ids[0, 7] = ids[:, -1] = 2
    for family in MIXING_FAMILIES:
        assert marks_of("sequence", family, ids).nonzero().tolist() == [[0, 0], [1, 0]]
        for marks in (marks_of("span", family, ids), marks_of("choice", family, ids[None])):
            assert (marks == (torch.arange(20) < 6)).all()
        for kind in ("base", "mlm", "token"):
            assert marks_of(kind, family, ids) is None
        assert marks_of("sequence", family, ids, global_tokens="none") is None
        assert (marks_of("token", family, ids, global_tokens="question") == (torch.arange(20) < 6)).all()
    single = random_ids(1, 20).clamp(min=3)
    single[0, -1] = 2
    assert marks_of("span", ids=single).nonzero().tolist() == [[0, 0]]
    types = (torch.arange(20) >= 8).long()[None]
    marks = marks_of("span", ids=single, types=types, type_vocab_size=2)
    assert (marks == (torch.arange(20) < 8)).all()
    assert (marks_of("span", ids=ids, sep_token_id=int(ids[0, 3]))[0] == (torch.arange(20) < 3)).all()
    assert marks_of("span", ids=ids, max_global_tokens=5).nonzero().tolist() == [[0, 0], [1, 0]]


@torch.no_grad()
def test_heads_mark_the_same_without_ids():
    ids, types = random_ids(1, 20).clamp(min=3), (torch.arange(20) >= 8).long()[None]
    ids[:, [7, 19]] = 2
    model = tiny_model("abc_memory", "span", local_window=4, type_vocab_size=2).double()
    found = model(ids, token_type_ids=types).start_logits
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds, token_type_ids=types).start_logits, found)


@torch.no_grad()
@pytest.mark.parametrize("marks", ["first", "question"])
def test_every_text_of_a_row_has_its_mark(marks):
    model = tiny_model("luna", "token", local_window=4, global_tokens=marks).double()
    texts = [random_ids(1, length, seed=length).clamp(min=3) for length in (19, 23)]  # no separator: no question
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    found = model(torch.cat(texts, 1), position_ids=positions).logits.split([19, 23], 1)
    for text, own in zip(texts, found, strict=True):
        torch.testing.assert_close(model(text).logits, own)


def test_a_question_without_an_end_is_reported(caplog):
    """Sources such as DistilBERT have neither token types nor, in their config, a separator."""
    logging.warning_once.cache_clear()  # another test may have had the same warning
    marks = marks_of("span", ids=random_ids(1, 20).clamp(min=3), eos_token_id=None)
    assert marks.nonzero().tolist() == [[0, 0]] and "sep_token_id" in caplog.text


@families
@torch.no_grad()
def test_models_of_the_papers_mark_nothing_by_default(family):
    model = tiny_model(family, "sequence")
    ids = random_ids(1, 30)
    none = torch.zeros_like(ids)
    assert torch.equal(model(ids).logits, model(ids, global_attention_mask=none).logits)
    assert not torch.equal(model(ids).logits, model(ids, global_attention_mask=none + (torch.arange(30) == 4)).logits)


# ---- selected tokens ----


@pytest.mark.parametrize("path", ["whole", "blocks"])
@writes
def test_a_text_of_no_more_tokens_than_are_selected_is_read_by_softmax_attention(write, path, monkeypatch):
    if path == "blocks":
        in_blocks(monkeypatch)
    mixed, full = pair(write, num_selected_tokens=30)
    assert_same_states_and_gradients(mixed, full, **padded_batch([30, 21, 2]))


@pytest.mark.parametrize("path", ["whole", "blocks"])
@writes
def test_texts_up_to_the_softmax_length_are_read_by_softmax_attention(write, path, monkeypatch):
    """Also in a batch with longer texts, which are not."""
    mixed, full = pair(write, num_selected_tokens=3, softmax_length=24)
    if path == "blocks":
        in_blocks(monkeypatch)
        assert_same_states_and_gradients(mixed, full, **padded_batch([24, 21, 2]))
        return
    assert_same_states_and_gradients(mixed, full, **padded_batch([24, 21, 2]))
    batch = padded_batch([40, 24, 25, 2])
    for unpad in (False, True):
        with torch.no_grad():
            states, expected = mixed(**batch, unpad_inputs=unpad)[0], full(**batch)[0]
        for row, (length, is_short) in enumerate([(40, False), (24, True), (25, False), (2, True)]):
            distance = (states[row, :length] - expected[row, :length]).abs().max()
            assert (distance < 1e-11) == is_short
            alone = {name: value[row : row + 1, :length] for name, value in batch.items()}
            with torch.no_grad():
                torch.testing.assert_close(mixed(**alone)[0][0], states[row, :length], rtol=0, atol=1e-11)


@pytest.mark.parametrize("unpad", [False, True])
def test_packed_states_of_short_texts_are_made_on_request(unpad):
    """Nothing reads them there: an embedding should not pay for them."""
    model = float64("luna", local_window=8, num_selected_tokens=3, softmax_length=24)
    batch = padded_batch([40, 24, 2]) | {"unpad_inputs": unpad}
    plain, asked = model(**batch), model(**batch, output_packed_states=True)
    assert list(plain) == ["last_hidden_state"] and asked.packed_states is asked.packed_last_hidden_state
    assert torch.equal(plain.last_hidden_state, asked.last_hidden_state)
    alone = model(input_ids=batch["input_ids"][1:2, :24], output_packed_states=True).packed_states
    torch.testing.assert_close(alone[0], asked.packed_states[1, : alone.shape[1]], rtol=0, atol=1e-11)
    plain.last_hidden_state.sum().backward()  # distributed training stops where a parameter has no gradient
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_equal_scores_are_taken_in_order():
    scores = torch.tensor([[[0.5, 0.1, 0.5, -torch.inf, 0.5, 0.1]]])
    chosen = first_tokens(scores, 4)
    assert chosen.places.tolist() == [[[0, 2, 4, 1]]]
    assert chosen.mask.tolist() == [[[True, True, True, False, True, False]]]
    all_of_them = first_tokens(scores, 9)
    assert all_of_them.places.tolist() == [[[0, 2, 4, 1, 5, 0]]]
    assert all_of_them.valid.tolist() == [[[True] * 5 + [False]]]


def test_the_choice_has_no_gradient_and_keys_and_values_do():
    """A token that only the selection brings near still gets a gradient."""
    model = float64("abc_memory", local_window=4, num_selected_tokens=3, num_hidden_layers=1)
    states = normal_states(1, 50, 48).requires_grad_()
    slot_states, own = model.begin(states, None)
    attention = model.encoder.layer[0].attention.self
    key, _ = attention.key_and_value(states)
    selected = attention.select_tokens(states, key, own)
    assert not selected.places.requires_grad
    output, _, _ = attention(states, slot_states, own)
    output[0, 25].sum().backward()
    far = [place for place in selected.places.flatten().tolist() if abs(place - 25) > 4]
    assert far and all(states.grad[0, place].abs().max() > 0 for place in far)


def test_counts_of_tokens_outside():
    """For a row of 10 tokens, of which 2 and 7 are read elsewhere, and windows of 4."""
    left = torch.ones(1, 1, 12, dtype=torch.bool)
    left[..., [2, 7, 10, 11]] = False
    counts = tokens_outside(left, torch.tensor([[10]]), 12, 4)[0, 0, :10].tolist()
    reach = [range(max(t - 2, 0), min(t + 2, 10)) for t in range(10)]
    assert counts == [len([j for j in range(10) if j not in (2, 7) and j not in window]) for window in reach]
    assert tokens_outside(None, torch.tensor([[10]]), 10, 4)[0, 0].tolist() == [10 - len(window) for window in reach]


def test_marked_tokens_are_counted():
    marks = torch.tensor([[True, False, True], [False, False, True]])
    found = marked_tokens(marks, 2)
    assert found.places.tolist() == [[[0, 2]], [[2, 0]]] and found.valid.tolist() == [[[True, True]], [[True, False]]]
    with refused(2, 1):
        marked_tokens(marks, 1)


def test_a_model_on_the_meta_device_computes_shapes():
    model = tiny_model("abc_memory", local_window=4, num_selected_tokens=3, softmax_length=12).to("meta")
    assert model(torch.zeros(2, 40, dtype=torch.long, device="meta"))[0].shape == (2, 40, TINY["hidden_size"])
