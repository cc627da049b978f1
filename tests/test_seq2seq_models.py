"""Encoder-decoders of every family: what is written once is all that decoding needs, and its size is constant."""

import copy

import pytest
import torch
from helpers import COMMON, FAMILIES, ROWS, padded_batch, random_ids, refused, slots_of, slow_unless, tiny_config_for
from helpers import tiny_seq2seq_model as tiny
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

from luna_hf import LunaForConditionalGeneration, MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
# Every option of the backbone, and of each family what its cross-attention or its decoder depends on.
VARIANTS = [(family, name) for family in FAMILIES for name in (*COMMON, *ROWS[family].seq2seq)]
variants = pytest.mark.parametrize(
    ("family", "variant"), [slow_unless(case[1] in ("default", "mixed"), *case) for case in VARIANTS]
)
# Positions of one pass and of a step, and sums in another order.
NEAR = {"rtol": 0, "atol": 1e-10}


def make(family, variant="default", **more):
    options = {**COMMON, **ROWS[family].seq2seq}[variant]
    return tiny(family, **{**options, **more}).double()


def batch(lengths=(9, 14, 3), target=(6, 4, 5), side="right"):
    """Source and target; the source is padded on the given side."""
    source = padded_batch(list(lengths))
    if side == "left":
        source = {name: tensor.flip(1) for name, tensor in source.items()}
    return source, {f"decoder_{name}": tensor for name, tensor in padded_batch(list(target), seed=1).items()}


@variants
@torch.no_grad()
def test_padding_changes_nothing(family, variant):
    """Rows of a batch equal the rows alone, whatever the padding holds."""
    model = make(family, variant)
    for side in ("right", "left"):
        source, target = batch(side=side)
        source["input_ids"][source["attention_mask"] == 0] = 7
        logits = model(**source, **target).logits
        for row in range(3):
            ids, given = (
                inputs[name][row][inputs[name.replace("input_ids", "attention_mask")][row] == 1][None]
                for inputs, name in ((source, "input_ids"), (target, "decoder_input_ids"))
            )
            alone = model(input_ids=ids, decoder_input_ids=given).logits[0]
            torch.testing.assert_close(logits[row, : given.shape[1]], alone, **NEAR)


@variants
@torch.no_grad()
def test_step_by_step_without_the_source(family, variant):
    """After the first pass the state alone suffices, for targets padded on the left, too."""
    model = make(family, variant)
    source, target = batch()
    target = {name: tensor.flip(1) for name, tensor in target.items()}
    expected, mask = model(**source, **target).logits, target["decoder_attention_mask"]
    for sizes in ([1] * 6, [2, 3, 1]):
        cache, parts, given = MemoryCache(model.config), [], source
        for ids, part in zip(target["decoder_input_ids"].split(sizes, 1), mask.split(sizes, 1), strict=True):
            outputs = model(**given, decoder_input_ids=ids, decoder_attention_mask=part, cache=cache)
            parts.append(outputs.logits)
            given = {}
        assert outputs.cache is cache
        torch.testing.assert_close(torch.cat(parts, 1)[mask == 1], expected[mask == 1], **NEAR)


@variants
@torch.no_grad()
def test_the_state_has_one_size(family, variant):
    """For any length of source and target."""
    model, sizes = make(family, variant, max_position_embeddings=200), set()
    for source_length, target_length in ((1, 1), (5, 40), (190, 3)):
        cache = MemoryCache(model.config)
        ids = random_ids(2, source_length)
        model(input_ids=ids, decoder_input_ids=random_ids(2, target_length), cache=cache)
        model(decoder_input_ids=random_ids(2, 1), cache=cache)
        sizes.add(cache.nbytes)
    if family == "luna" and model.config.dynamic_projection:  # fewer slots for a source shorter than the slots
        assert len(sizes) == 3 and len({size for size in sizes if size > min(sizes)}) <= 2
    else:
        assert len(sizes) == 1


@variants
def test_every_parameter_has_a_gradient(family, variant):
    model = make(family, variant).train()
    source, target = batch()
    for cached in (False, True):
        model.zero_grad()
        labels = target["decoder_input_ids"].masked_fill(target["decoder_attention_mask"] == 0, -100)
        cache = MemoryCache(model.config) if cached else None
        model(**source, labels=labels, cache=cache).loss.backward()
        missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        # The last packed states are not computed with gradients where the state is kept.
        assert {name for name in missing if not (cached and name.endswith(("norm.weight", "norm.bias")))} == set()


@families
def test_gradient_checkpointing_changes_nothing(family):
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = make(family).train()
        source, target = batch()
        if options:
            model.gradient_checkpointing_enable(options)
        model(**source, labels=target["decoder_input_ids"]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0], **NEAR)


@families
def test_labels_are_shifted_and_weigh_the_same_in_any_split(family):
    """Loss without `decoder_input_ids`, and the gradient of an update in two parts with different numbers of labels."""
    model = make(family).train()
    source, target = batch()
    labels = target["decoder_input_ids"].masked_fill(target["decoder_attention_mask"] == 0, -100)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted[1].tolist() == [2, *labels[1, :4].tolist(), 1]
    outputs = model(**source, labels=labels)
    expected = torch.nn.functional.cross_entropy(
        model(**source, decoder_input_ids=shifted).logits.flatten(0, 1), labels.flatten()
    )
    torch.testing.assert_close(outputs.loss, expected, **NEAR)
    assert outputs.cache is None
    (gradient,) = torch.autograd.grad(outputs.loss, [model.lm_head.weight])
    total, parts = (labels != -100).sum(), 0.0
    for rows in (slice(0, 1), slice(1, 3)):
        part = {name: tensor[rows] for name, tensor in source.items()}
        loss = model(**part, labels=labels[rows], num_items_in_batch=total).loss
        parts = parts + torch.autograd.grad(loss, [model.lm_head.weight])[0]
    torch.testing.assert_close(parts, gradient, **NEAR)


@families
@torch.no_grad()
def test_what_the_encoder_gave_can_be_given(family):
    model = make(family)
    source, target = batch()
    expected = model(**source, **target)
    encoded = model.get_encoder()(**source)
    given = model(encoder_outputs=encoded, attention_mask=source["attention_mask"], **target)
    assert torch.equal(given.logits, expected.logits)
    assert torch.equal(given.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert model(**source, **target, return_dict=False)[0].equal(expected.logits)
    embeds = model.get_input_embeddings()(source["input_ids"])
    given = model(inputs_embeds=embeds, attention_mask=source["attention_mask"], **target)
    assert torch.equal(given.logits, expected.logits)
    without_mask = model(input_ids=source["input_ids"], **target)  # padding by its id
    assert torch.equal(without_mask.logits, expected.logits)


@pytest.mark.parametrize("dynamic", [True, False])
@families
@torch.no_grad()
def test_encoder_outputs_as_a_tuple(family, dynamic):
    model = tiny(family, **({"dynamic_projection": dynamic} if family == "luna" else {}))
    source, target = batch()
    expected = model(**source, **target)
    given = model.get_encoder()(**source, return_dict=False)
    mask = {"attention_mask": source["attention_mask"]}
    outputs = model(encoder_outputs=given, **mask, **target)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert outputs.encoder_hidden_states is None and outputs.encoder_attentions is None


@torch.no_grad()
def test_luna_needs_the_packed_states():
    model = make("luna")
    source, target = batch()
    states = model.get_encoder()(**source).last_hidden_state
    for outputs in (BaseModelOutput(states), (states,)):
        with refused("encoder_outputs", "get_encoder"):
            model(encoder_outputs=outputs, **target)


@families
@torch.no_grad()
def test_unusable_inputs_are_refused(family):
    model = make(family)
    source, target = batch()
    with refused("input_ids", "encoder_outputs", "cache"):
        model(**target)
    for part in (model, model.base_model):
        with refused("decoder_input_ids", "decoder_inputs_embeds", "labels"):
            part(**source)
    with refused(3, 2):
        model(**source, decoder_input_ids=random_ids(2, 4))
    encoded = model.get_encoder()(**source)
    with refused((3, 14), (3, 5)):
        model(encoder_outputs=encoded, attention_mask=torch.ones(3, 5), **target)
    cache = MemoryCache(tiny_config_for(family, is_decoder=True))
    with refused("is_encoder_decoder"):
        model(**source, **target, cache=cache)
    with refused("seq_idx"):
        model(**source, **target, seq_idx=torch.zeros(3, 14))


@torch.no_grad()
def test_learned_positions_end():
    model = make("luna", max_position_embeddings=16)
    ids, cache = random_ids(1, 16), MemoryCache(model.config)
    model(input_ids=ids, decoder_input_ids=ids, cache=cache)
    with refused(17, 16, "max_position_embeddings"):
        model(decoder_input_ids=ids[:, :1], cache=cache)
    model = make("luna", "prenorm-sinusoidal", max_position_embeddings=16)
    assert model(input_ids=ids, decoder_input_ids=random_ids(1, 40)).logits.shape[1] == 40


@families
def test_configs_of_other_kinds(family):
    row = FAMILIES[family]
    plain, decoder = tiny_config_for(family), tiny_config_for(family, is_decoder=True)
    model = row.seq2seq_lm(plain)
    assert model.config.is_encoder_decoder and not plain.is_encoder_decoder
    config = model.config
    assert config.as_encoder_decoder() is config
    for kind in (row.masked_lm, row.causal_lm):
        with refused("is_encoder_decoder", "AutoModelForSeq2SeqLM"):
            kind(config)
    with refused("is_decoder"):
        row.seq2seq_lm(decoder)
    assert type(AutoModel.from_config(config)) is row.seq2seq_model
    assert type(AutoModelForSeq2SeqLM.from_config(plain)) is row.seq2seq_lm
    with refused("decoder_vocab_size", 130, 120):
        tiny_config_for(family, is_encoder_decoder=True, decoder_vocab_size=130)
    with refused("decoder_start_token_id", 120):
        tiny_config_for(family, is_encoder_decoder=True, decoder_start_token_id=120)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("abc_memory", {"memory_control": "sliding_window"}),
        ("abc_memory", {"memory_control": "cluster"}),
        ("lavo", {"attention_parts": "local"}),
        ("leapformer", {"reweighting": "cosine"}),
    ],
)
def test_what_a_decoder_cannot_do_is_refused(family, options):
    with refused(*options, *options.values()):
        tiny_config_for(family, is_encoder_decoder=True, **options)


@families
@torch.no_grad()
def test_saved_and_loaded(family, tmp_path):
    """Every tie of embeddings, in the head's class and without it."""
    source, target = batch()
    for options in ({}, {"tie_word_embeddings": False}, {"share_encoder_decoder_embeddings": False}):
        model = tiny(family, **options)
        model.save_pretrained(tmp_path)
        loaded, info = FAMILIES[family].seq2seq_lm.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(loaded(**source, **target).logits, model(**source, **target).logits)
        words, output = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
        own = loaded.get_decoder().get_input_embeddings().weight
        assert (own is words) == ("share_encoder_decoder_embeddings" not in options)
        assert (output is own) == ("tie_word_embeddings" not in options)
        trunk = AutoModel.from_pretrained(tmp_path)
        assert type(trunk) is FAMILIES[family].seq2seq_model
        assert torch.equal(trunk(**source, **target).last_hidden_state, model.base_model(**source, **target)[0])


@families
@torch.no_grad()
def test_resized_vocabulary(family, tmp_path):
    source, target = batch()
    for options in ({}, {"tie_word_embeddings": False}):
        model = tiny(family, **options)
        expected = model(**source, **target).logits
        model.resize_token_embeddings(131)
        logits = model(**source, **target).logits
        assert logits.shape[-1] == model.config.vocab_size == model.config.decoder_vocab_size == 131
        torch.testing.assert_close(logits[..., :120], expected, rtol=0, atol=1e-6)
        model.save_pretrained(tmp_path)
        assert torch.equal(FAMILIES[family].seq2seq_lm.from_pretrained(tmp_path)(**source, **target).logits, logits)
    with refused("resize_token_embeddings"):
        model.resize_decoder_token_embeddings(131)
    changed = copy.deepcopy(model.config)
    changed.vocab_size = 140
    logits = FAMILIES[family].seq2seq_lm(changed).eval()(**source, **target).logits
    assert logits.shape[-1] == changed.decoder_vocab_size == 140


@pytest.mark.parametrize("tied", [True, False])
@families
@torch.no_grad()
def test_resized_vocabularies_of_source_and_target(family, tied, tmp_path):
    """Each has its own size; what the model said of the former tokens stays."""
    source, target = batch()
    model = tiny(family, share_encoder_decoder_embeddings=False, tie_word_embeddings=tied, decoder_vocab_size=130)
    expected = model(**source, **target).logits
    assert model.resize_token_embeddings(120) is model.get_input_embeddings()
    model.resize_token_embeddings(125)
    assert torch.equal(model(**source, **target).logits, expected)
    model.resize_decoder_token_embeddings(137)
    logits = model(**source, **target).logits
    assert (model.config.vocab_size, model.config.decoder_vocab_size, logits.shape[-1]) == (125, 137, 137)
    torch.testing.assert_close(logits[..., :130], expected, rtol=0, atol=1e-6)
    words = model.get_decoder().get_input_embeddings().weight
    assert words.shape[0] == 137 and (model.lm_head.weight is words) == tied
    model.base_model.resize_token_embeddings(126)
    model.save_pretrained(tmp_path)
    loaded = FAMILIES[family].seq2seq_lm.from_pretrained(tmp_path)
    assert torch.equal(loaded(**source, **target).logits, logits) and loaded.config.vocab_size == 126


@families
@torch.no_grad()
def test_maps_and_states_of_every_part(family):
    model = tiny(family, decoder_layers=2, attn_implementation="eager")
    source, target = batch()
    options = {"output_hidden_states": True}
    if ROWS[family].causal_maps:
        options["output_attentions"] = True
    outputs = model(**source, **target, **options)
    assert len(outputs.encoder_hidden_states) == 3 and len(outputs.decoder_hidden_states) == 3
    if ROWS[family].causal_maps:
        assert len(outputs.encoder_attentions) == 2
        assert len(outputs.decoder_attentions) == len(outputs.cross_attentions) == 2
        slots = next(iter(slots_of(family).values()))
        assert outputs.cross_attentions[0].shape == (3, 4, 6, slots)
        sums = outputs.cross_attentions[0].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@families
@torch.no_grad()
def test_backends_agree_and_reach_every_part(family):
    model = tiny(family)
    source, target = batch()
    expected = model(**source, **target).logits
    model.set_attn_implementation("eager")
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {"eager"}
    torch.testing.assert_close(model(**source, **target).logits, expected, rtol=0, atol=1e-5)


def test_copies_of_a_state_are_independent():
    model = make("luna")
    source, target = batch()
    with torch.no_grad():
        cache = model(**source, **target, use_cache=True).cache
        twin = copy.deepcopy(cache)
        step = {"decoder_input_ids": random_ids(3, 1)}
        first = model(**step, cache=cache).logits
        assert torch.equal(model(**step, cache=twin).logits, first)


@torch.no_grad()
def test_the_former_name_of_the_state_is_understood():
    model = make("luna")
    source, target = batch()
    for part in (model, model.base_model):
        cache = MemoryCache(model.config)
        with pytest.warns(FutureWarning, match="cache"):
            outputs = part(**source, **target, past_key_values=cache)
        assert outputs.past_key_values is outputs.cache is cache and cache.has_source


def test_the_names_of_luna():
    """The encoder is a `LunaModel`, so its weights fit."""
    model = LunaForConditionalGeneration(tiny_config_for("luna"))
    encoder = FAMILIES["luna"].base_model(tiny_config_for("luna"))
    assert model.get_encoder().state_dict().keys() == encoder.state_dict().keys()
