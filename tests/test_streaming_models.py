"""Encoder-decoders with a causal source: each target token reads the source tokens that were written before it."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    COMMON,
    FAMILIES,
    ROWS,
    normal_states,
    padded_batch,
    random_ids,
    refused,
    slow_unless,
    tiny_seq2seq_model,
)
from reference import causal, lavo, leapformer, luna
from transformers import AutoModelForSeq2SeqLM

from luna_hf import AbcForConditionalGeneration, MemoryCache
from luna_hf.families.abc.attention import random_slots
from luna_hf.ops.context import make_context
from luna_hf.ops.interleaving import Interleaving, interleave
from luna_hf.simultaneous import ReadAll, WaitK

families = pytest.mark.parametrize("family", list(FAMILIES))
# A window in both attentions; softmax attention to everything, as a window that holds it.
OWN = {"window": {"local_window": 3}, "softmax": {"memory_control": "sliding_window", "memory_size": 32}}
# Embeddings of segments would need ids of every piece of a source.
SHARED = {"default": {}, "prenorm": COMMON["prenorm-sinusoidal"], "convolution": {"conv_kernel_size": 3}}


def options_of(family):
    own = {name: OWN["window"] for name in ["window"] if family != "leapformer"}
    own |= {"softmax": OWN["softmax"]} if family == "abc_memory" else {}
    theirs = {name: row for name, row in ROWS[family].seq2seq.items() if "full_attention_layers" not in row}
    return {**SHARED, **own, **theirs}


VARIANTS = [(family, name) for family in FAMILIES for name in options_of(family)]
variants = pytest.mark.parametrize(
    ("family", "variant"), [slow_unless(case[1] in ("default", "window", "softmax"), *case) for case in VARIANTS]
)
# Sums in another order.
NEAR = {"rtol": 0, "atol": 1e-10}
LENGTHS, TARGETS = (9, 14, 4), (7, 5, 9)


def make(family, variant="default", **more):
    return tiny_seq2seq_model(family, source_is_causal=True, **{**options_of(family)[variant], **more}).double()


def batch(policy=None, side="right"):
    """Source and target, padded on the given side, and what is visible of the source."""
    source, target = padded_batch(list(LENGTHS)), padded_batch(list(TARGETS), seed=1)
    visible = None if policy is None else policy.visible(torch.tensor(LENGTHS), max(TARGETS))
    if side == "left":
        source, target = ({name: tensor.flip(1) for name, tensor in part.items()} for part in (source, target))
        if visible is not None:  # padding reads what the first token reads
            starts = max(TARGETS) - torch.tensor(TARGETS)[:, None]
            visible = visible.gather(1, (torch.arange(max(TARGETS)) - starts).clamp(min=0))
    target = {f"decoder_{name}": tensor for name, tensor in target.items()}
    return {**source, **target, **({} if visible is None else {"visible_source": visible})}


# ---- the order ----


def test_the_order_is_that_of_the_policy():
    """Literally: source tokens up to g(t), then target token t."""
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]], dtype=torch.bool)
    visible = torch.tensor([[1, 3, 3, 5], [2, 2, 3, 3]])
    order, targets, writes = interleave(keep, visible)
    for row in range(2):
        merged, read = [], 0
        real = keep[row].long().cumsum(0)
        for target, shown in enumerate(visible[row].tolist()):
            new = [place for place in range(5) if real[place] <= shown and place >= read]
            merged, read = [*merged, *new, 5 + target], read + len(new)
        merged += range(read, 5)
        assert order[row].tolist() == merged
        assert [merged[place] - 5 for place in targets[row].tolist()] == [0, 1, 2, 3]
        assert writes[row].tolist() == [place < 5 and bool(keep[row, place]) for place in merged]


# ---- numbers ----


@variants
@torch.no_grad()
def test_one_pass_equals_a_stream(family, variant):
    """Token by token: reads and writes in turn, with the state alone."""
    model = make(family, variant)
    for policy in (WaitK(1), WaitK(3), ReadAll()):
        inputs = batch(policy)
        logits = model(**inputs).logits
        for row, number in enumerate(TARGETS):
            cache, read, found = MemoryCache(model.config), 0, []
            for token in range(number):
                shown = int(inputs["visible_source"][row, token])
                new, read = inputs["input_ids"][row : row + 1, read:shown], shown
                given = {"input_ids": new} if new.shape[1] else {}
                step = inputs["decoder_input_ids"][row : row + 1, token : token + 1]
                found.append(model(**given, decoder_input_ids=step, cache=cache).logits[0])
            torch.testing.assert_close(torch.cat(found), logits[row, :number], **NEAR)


@variants
@torch.no_grad()
def test_a_token_by_definition(family, variant):
    """Token t of a target is that of a model which has read g(1), ... g(t) of the source, and nothing after it."""
    model, policy = make(family, variant), WaitK(2)
    inputs = batch(policy)
    logits = model(**inputs).logits[0]
    source, target, visible = (inputs[name][:1] for name in ("input_ids", "decoder_input_ids", "visible_source"))
    for token in range(TARGETS[0]):
        shown = slice(0, int(visible[0, token]))
        until = slice(0, token + 1)
        alone = model(source[:, shown], decoder_input_ids=target[:, until], visible_source=visible[:, until])
        torch.testing.assert_close(alone.logits[0, token], logits[token], **NEAR)


@families
def test_nothing_leaks(family):
    """No gradient reaches from a target token to a source token that it may not read, but to all that it may."""
    model, policy = make(family), WaitK(3)
    embeds = model.get_input_embeddings()(random_ids(1, 8)).detach().requires_grad_()
    visible = policy.visible(torch.tensor([8]), 6)
    logits = model(inputs_embeds=embeds, decoder_input_ids=random_ids(1, 6), visible_source=visible).logits[0]
    for token in range(6):
        (gradient,) = torch.autograd.grad(logits[token].sum(), embeds, retain_graph=True)
        reaches = gradient[0].abs().amax(-1)
        shown = int(visible[0, token])
        assert (reaches[:shown] > 1e-9).all() and (reaches[shown:] == 0).all()


@variants
@torch.no_grad()
def test_padding_changes_nothing(family, variant):
    model = make(family, variant)
    for side in ("right", "left"):
        inputs = batch(WaitK(2), side)
        inputs["input_ids"][inputs["attention_mask"] == 0] = 7
        logits = model(**inputs).logits
        for row in range(3):
            real, kept = inputs["attention_mask"][row] == 1, inputs["decoder_attention_mask"][row] == 1
            alone = {name: inputs[name][row][kept][None] for name in ("decoder_input_ids", "visible_source")}
            expected = model(inputs["input_ids"][row][real][None], **alone).logits[0]
            torch.testing.assert_close(logits[row][kept], expected, **NEAR)


@variants
@torch.no_grad()
def test_pieces_of_any_size_and_batches_of_streams(family, variant):
    """Rows that read and write at different times; and the whole source, by default."""
    model = make(family, variant)
    inputs = batch(ReadAll())
    expected = model(**inputs).logits
    del inputs["visible_source"]
    torch.testing.assert_close(model(**inputs).logits, expected, **NEAR)
    cache, found = MemoryCache(model.config), []
    for part in (slice(0, 1), slice(1, 8), slice(8, 14)):
        model.base_model.write_source(cache, inputs["input_ids"][:, part], inputs["attention_mask"][:, part])
    assert cache.written.tokens.tolist() == list(LENGTHS)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        target = {name: inputs[name][:, part] for name in ("decoder_input_ids", "decoder_attention_mask")}
        found.append(model(**target, cache=cache).logits)
    kept = inputs["decoder_attention_mask"] == 1
    torch.testing.assert_close(torch.cat(found, 1)[kept], expected[kept], **NEAR)


@variants
@torch.no_grad()
def test_the_state_has_one_size(family, variant):
    model, sizes = make(family, variant, position_embedding_type="sinusoidal"), set()
    for length, number in ((1, 1), (3, 30), (200, 2)):
        cache = MemoryCache(model.config)
        model(input_ids=random_ids(2, length), decoder_input_ids=random_ids(2, number), cache=cache)
        model(input_ids=random_ids(2, 1), decoder_input_ids=random_ids(2, 1), cache=cache)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1


def literal(family, weights, target, source, config):
    """What a target state (d,) reads after the source states (g, d) have been written: the heads, joined, (d,)."""
    names = {name.removeprefix("self."): tensor for name, tensor in weights.items()}
    if family == "leapformer":
        return leapformer.attention(names, target[None], config, context=source)[0][:, 0].flatten()
    if family == "lavo":
        return lavo.cross_attention(names, target[None], source, config)[0][:, 0].flatten()
    # The newest source token writes first, and then reads; here with the query of the target.
    _, key, value = causal.project(weights, "self", source, config)
    query = causal.heads(luna.linear(weights, "self.query", target[None]), config.num_attention_heads)
    states = [query.expand_as(key), key, value]
    attend = causal.attend_luna if family == "luna" else partial(causal.attend_abc, draw=random_slots)
    return attend(weights, "self", 0, source, states, config)[:, -1].flatten()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("luna", {}),
        ("luna", {"local_window": 3, "tie_kv": False}),
        ("luna", {"pack_activation": "exp"}),
        ("abc_memory", {}),
        ("abc_memory", {"local_window": 3, "control_activation": "relu"}),
        ("abc_memory", {"memory_control": "sliding_window", "memory_size": 4}),
        ("abc_memory", {"memory_control": "random"}),
        ("leapformer", {}),
        ("leapformer", {"reweighting": "none", "feature_map": "elu"}),
        ("lavo", {"local_window": 0}),
    ],
)
@torch.no_grad()
def test_cross_attention_equals_a_literal_reference(family, options):
    model = tiny_seq2seq_model(family, source_is_causal=True, **options).double()
    attention = model.base_model.decoder.encoder.layer[0].crossattention.self
    source, target = normal_states(1, 8, model.config.hidden_size), normal_states(1, 6, model.config.hidden_size, 1)
    visible = torch.tensor([[1, 3, 3, 4, 8, 8]])
    order, targets, writes = interleave(torch.ones(1, 8, dtype=torch.bool), visible)
    context = make_context(writes, 14, writes.device, window=model.config.local_window)._replace(readers=targets)
    merged = Interleaving(order, targets, context)
    found = merged.at_targets(attention(merged.merge(source, target), None, context)[0], 1)[0]
    weights = {f"self.{name}": tensor for name, tensor in attention.named_parameters()}
    config = SimpleNamespace(**{**model.config.to_dict(), "share_control": False})
    for token, shown in enumerate(visible[0].tolist()):
        expected = literal(family, weights, target[0, token], source[0, :shown], config)
        torch.testing.assert_close(found[token], expected, **NEAR)


# ---- as other models ----


@variants
def test_every_parameter_has_a_gradient(family, variant):
    model = make(family, variant).train()
    inputs = batch(WaitK(2))
    labels = inputs.pop("decoder_input_ids").masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    model(**inputs, labels=labels).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@families
def test_gradient_checkpointing_changes_nothing(family):
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = make(family).train()
        inputs = batch(WaitK(2))
        if options:
            model.gradient_checkpointing_enable(options)
        model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0], **NEAR)


@families
@torch.no_grad()
def test_saved_and_loaded(family, tmp_path):
    model, inputs = make(family), batch(WaitK(2))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.source_is_causal
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, **NEAR)


@families
@torch.no_grad()
def test_rows_of_a_state_can_be_chosen(family):
    """As beam search does; and copies are independent."""
    model, inputs = make(family), batch()
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    cache, step = MemoryCache(model.config), random_ids(3, 1)
    model(**source, decoder_input_ids=random_ids(3, 2), cache=cache)
    before = copy.deepcopy(cache)
    expected = model(decoder_input_ids=step, cache=cache).logits
    rows = torch.tensor([2, 0, 1])
    before.reorder_cache(rows)
    torch.testing.assert_close(model(decoder_input_ids=step[rows], cache=before).logits, expected[rows], **NEAR)
    before.reset()
    assert not before.has_source and before.batch_size == -1


# ---- errors ----


@families
@torch.no_grad()
def test_a_state_that_has_read_more_than_it_may(family):
    """What it has read cannot be hidden again, but from padding."""
    model, source, target = make(family), random_ids(2, 6), random_ids(2, 3)
    cache, few = MemoryCache(model.config), torch.full((2, 1), 2)
    model(source, decoder_input_ids=target[:, :1], visible_source=few, cache=cache)
    with refused("`visible_source`", "the state has read"):
        model(decoder_input_ids=target[:, 1:2], visible_source=few + 1, cache=cache)
    visible, mask = torch.tensor([[6], [3]]), torch.tensor([[1], [0]])
    model(decoder_input_ids=target[:, 1:2], decoder_attention_mask=mask, visible_source=visible, cache=cache)


@families
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_state_after_a_failed_pass(family, causal, monkeypatch):
    """It goes on as if there had been none, or not at all."""
    model = tiny_seq2seq_model(family, source_is_causal=causal).double()
    source, target = random_ids(2, 5), random_ids(2, 3)
    expected = model(source, decoder_input_ids=target).logits
    for wrong in ({"decoder_input_ids": target + 5000}, {"decoder_attention_mask": torch.ones(2, 9)}):
        cache = MemoryCache(model.config)
        with pytest.raises(ValueError, match=r"id|mask"):
            model(source, **{"decoder_input_ids": target, **wrong}, cache=cache)
        if not causal:
            torch.testing.assert_close(model(source, decoder_input_ids=target, cache=cache).logits, expected)
            continue
        for read_on in (model, model.base_model.write_source):
            with refused("the encoder's state has read", "Create another state"):
                read_on(input_ids=source, cache=cache, **({"decoder_input_ids": target} if read_on is model else {}))
    cache = MemoryCache(model.config)
    with monkeypatch.context() as patch:
        patch.setattr(model.get_decoder().encoder.layer[1], "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(source, decoder_input_ids=target, cache=cache)
    with refused("failed midway"):
        model(decoder_input_ids=target, cache=cache)
    cache.reset()
    torch.testing.assert_close(model(source, decoder_input_ids=target, cache=cache).logits, expected)


def interrupted(*args):
    raise KeyboardInterrupt


@torch.no_grad()
def test_a_source_read_in_another_way_cannot_go_on():
    """By a decoder without its encoder's state."""
    model, source, target = make("luna"), random_ids(2, 5), random_ids(2, 3)
    made = model.generate(source, policy=WaitK(2), max_new_tokens=3, num_beams=1, return_dict_in_generate=True)
    with refused("cannot go on"):
        model.base_model.write_source(made.cache, source)
    cache = MemoryCache(model.config)
    model(encoder_outputs=model.get_encoder()(source), decoder_input_ids=target, cache=cache)
    with refused("cannot go on"):
        model(source, decoder_input_ids=target, cache=cache)


def test_what_is_refused():
    model = make("abc_memory")
    source, target = random_ids(2, 5), random_ids(2, 3)
    with refused("no source"):
        model(decoder_input_ids=target)
    for wrong in ([[1, 2]], [[2, 1, 3]], [[0, 1, 2]]):
        with refused("visible_source"):
            model(source, decoder_input_ids=target, visible_source=torch.tensor(wrong).expand(2, -1))
    whole = tiny_seq2seq_model("abc_memory")
    with refused("visible_source", "source_is_causal"):
        whole(source, decoder_input_ids=target, visible_source=torch.ones(2, 3, dtype=torch.long))
    with refused("policy", "source_is_causal"):
        whole.generate(source, policy=WaitK(2))
    with refused("made for a different model"):
        model(source, decoder_input_ids=target, cache=MemoryCache(whole.config))
    for family, field in (("abc_memory", {"memory_control": "cluster"}), ("leapformer", {"reweighting": "cosine"})):
        with refused(next(iter(field))):
            tiny_seq2seq_model(family, source_is_causal=True, **field)
    for field in ({"full_attention_layers": [0]}, {"local_window": 2, "num_selected_tokens": 4}):
        with refused([*field][-1]):
            tiny_seq2seq_model("abc_memory", source_is_causal=True, **field)


def test_an_ordinary_model_can_be_continued():
    """The parameters have the same names, but for those of Luna's packs."""
    plain, model = tiny_seq2seq_model("abc_memory"), make("abc_memory").float()
    assert isinstance(model, AbcForConditionalGeneration)
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
