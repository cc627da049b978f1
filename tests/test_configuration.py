"""Configurations: every field is validated and has an effect, presets are the published models."""

import dataclasses
import json
import math
import re
from functools import partial

import pytest
import torch
from helpers import (
    FAMILIES,
    padded_batch,
    random_ids,
    randomise,
    refused,
    slots_of,
    slow_unless,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
)
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from variants import ROWS, ConfigField

from luna_hf import AbcConfig, LunaConfig, LunaForMaskedLM, LunaModel

LIBRARY_FIELDS = {field.name for field in dataclasses.fields(PreTrainedConfig)}
# Of fields of encoder-decoders only.
SEQ2SEQ = {"together": {"is_encoder_decoder": True}, "encoders_only": True}

# Checks of the common fields; those of a family's own fields are in its row of `variants.py`.
FIELDS = {
    "vocab_size": ConfigField((0,), effect=(130, "parameters")),
    "hidden_size": ConfigField((0,), effect=(64, "parameters")),
    "num_hidden_layers": ConfigField((0,), effect=(1, "parameters")),
    # In a decoder, 16 heads have the odd size 3.
    "num_attention_heads": ConfigField((5, "hidden_size", 48), bad_in_decoder=(16,), effect=(2, "outputs")),
    "intermediate_size": ConfigField((-1,), effect=(64, "parameters")),
    "hidden_act": ConfigField(("gleu", "gelu"), effect=("relu", "outputs")),
    "hidden_dropout_prob": ConfigField((1.0,), effect=(0.5, "trained_outputs")),
    "attention_probs_dropout_prob": ConfigField((-0.1,), effect=(0.5, "trained_outputs")),
    "activation_dropout": ConfigField((2,), effect=(0.5, "trained_outputs")),
    "max_position_embeddings": ConfigField((0,), effect=(80, "parameters"), encoders_only=True),
    "first_position": ConfigField(
        (0,), effect=(4, "outputs"), together={"position_embedding_type": "sinusoidal"}, encoders_only=True
    ),
    "position_period": ConfigField(
        (1,), effect=(9, "parameters"), together={"position_embedding_type": "learned"}, encoders_only=True
    ),
    "position_embedding_type": ConfigField(
        ("rotary", "sinusoidal"),
        bad_in_decoder=("learned", "rotary", "sinusoidal"),
        effect=("sinusoidal", "outputs"),
    ),
    "type_vocab_size": ConfigField((-1,), effect=(2, "parameters")),
    "embedding_size": ConfigField((0,), bad_in_decoder=(24,), effect=(24, "parameters"), encoders_only=True),
    "embedding_layer_norm": ConfigField(effect=(False, "parameters")),
    "norm_first": ConfigField(effect=(True, "parameters")),
    "layer_norm_eps": ConfigField((0,), effect=(0.1, "outputs")),
    "initializer_range": ConfigField((-0.02,), effect=(0.5, "weight_scale")),
    "conv_kernel_size": ConfigField((4,), effect=(5, "parameters")),
    "conv_initializer_range": ConfigField((0,), effect=(0.5, "filter_scale"), together={"conv_kernel_size": 5}),
    "local_window": ConfigField((-1,), effect=(5, "outputs")),
    "slot_count_bias": ConfigField(effect=(False, "parameters"), together={"local_window": 5}),
    "slot_counts": ConfigField(("some", "outside", "all"), effect=("all", "outputs"), together={"local_window": 5}),
    "global_tokens": ConfigField(
        ("cls", "auto", "none", "first", "question"),
        **{"effect": ("none", "classifier_outputs"), "together": {"local_window": 5}, "encoders_only": True},
    ),
    "global_tokens_read_all": ConfigField(
        effect=(False, "classifier_outputs"), together={"local_window": 5}, encoders_only=True
    ),
    "max_global_tokens": ConfigField((0,), effect=(2, "takes_three_marks"), encoders_only=True),
    "num_selected_tokens": ConfigField((-1,), effect=(3, "outputs"), together={"local_window": 4}, encoders_only=True),
    "softmax_length": ConfigField(
        (-1,),
        effect=(64, "outputs"),
        together={"local_window": 4, "num_selected_tokens": 3},
        encoders_only=True,
    ),
    "num_selection_queries": ConfigField(
        (0,),
        effect=(2, "outputs"),
        together={"local_window": 4, "num_selected_tokens": 3},
        encoders_only=True,
    ),
    "sep_token_id": ConfigField(
        effect=(int(padded_batch([12, 5])["input_ids"][0, 4]), "answers"),
        together={"local_window": 5},
        encoders_only=True,
    ),
    "full_attention_layers": ConfigField(
        ([3], "num_hidden_layers", "all"), bad_in_decoder=([0],), effect=([0], "outputs"), encoders_only=True
    ),
    "sparse_prediction": ConfigField(effect=(True, "sparse_logits"), encoders_only=True),
    "unpad_inputs": ConfigField(effect=(True, "encoded_tokens"), encoders_only=True),
    "classifier_pooling": ConfigField(("max", "mean"), effect=("mean", "classifier_outputs"), encoders_only=True),
    "classifier_dropout": ConfigField((1.5,), effect=(0.5, "trained_classifier_outputs"), encoders_only=True),
    "classifier_hidden_size": ConfigField((0,), effect=(16, "classifier_parameters"), encoders_only=True),
    "classifier_activation": ConfigField(("tahn", "tanh"), effect=("relu", "classifier_outputs"), encoders_only=True),
    "pad_token_id": ConfigField((120, "vocab_size"), effect=(5, "embeddings")),
    "bos_token_id": ConfigField(),
    "eos_token_id": ConfigField(),
    "tie_word_embeddings": ConfigField(effect=(False, "tied")),
    "scale_embedding": ConfigField(effect=(False, "outputs"), together={"position_embedding_type": "sinusoidal"}),
    "is_decoder": ConfigField(effect=(True, "trunk_outputs"), encoders_only=True),
    "decoder_layers": ConfigField((0,), effect=(1, "seq2seq_parameters"), **SEQ2SEQ),
    "source_is_causal": ConfigField(effect=(True, "seq2seq_encoder"), **SEQ2SEQ),
    "decoder_vocab_size": ConfigField(
        (0,),
        effect=(130, "seq2seq_parameters"),
        together={"is_encoder_decoder": True, "share_encoder_decoder_embeddings": False},
        encoders_only=True,
    ),
    "share_encoder_decoder_embeddings": ConfigField(effect=(False, "seq2seq_parameters"), **SEQ2SEQ),
    "decoder_start_token_id": ConfigField((-1,), effect=(5, "shifted_labels"), **SEQ2SEQ),
    "use_cache": ConfigField(effect=(False, "returns_state"), encoders_only=True),
}
SLOTS = ConfigField((0,), effect=(6, "outputs"))
# Fields of what is read in one softmax with a window; without effect in families that have none.
BESIDE_WINDOWS = (
    *("slot_count_bias", "slot_counts", "global_tokens", "global_tokens_read_all", "max_global_tokens"),
    *("num_selected_tokens", "softmax_length", "num_selection_queries", "sep_token_id"),
)


def own_fields(model_type):
    return {f.name for f in dataclasses.fields(FAMILIES[model_type].config)} - LIBRARY_FIELDS


def checks_of(model_type):
    """The check of every field of a family, in the order of their names."""
    checks = {**FIELDS, **dict.fromkeys(slots_of(model_type), SLOTS)}
    if not ROWS[model_type].mixes:
        checks |= {name: ConfigField() for name in BESIDE_WINDOWS} | {"local_window": ConfigField((5, 0))}
    if ROWS[model_type].positions[1] != "rotary":  # heads of any size
        checks["num_attention_heads"] = dataclasses.replace(checks["num_attention_heads"], bad_in_decoder=())
    return dict(sorted({**checks, **ROWS[model_type].fields}.items()))


def fields_where(condition):
    """(family, field) for every field with a check that meets the condition."""
    return [(family, name) for family in FAMILIES for name, check in checks_of(family).items() if condition(check)]


def in_families(condition):
    """The same; in every suite, a common field in one family, another one for each field."""
    cases = fields_where(condition)
    holders = {name: [family for family, field in cases if field == name] for _, name in cases}
    chosen = {name: own[place % len(own)] for place, (name, own) in enumerate(holders.items())}
    return [slow_unless(name not in FIELDS or family == chosen[name], family, name) for family, name in cases]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_in_the_tables(model_type):
    checks = checks_of(model_type)
    assert own_fields(model_type) == checks.keys(), "a field without a check, or a check without a field"
    without_effect = {name for name, check in checks.items() if check.effect is None}
    window = () if ROWS[model_type].mixes else ("local_window", *BESIDE_WINDOWS)
    assert without_effect <= {"bos_token_id", "eos_token_id", *window}, "a field without a check of its effect"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_documented(model_type):
    config = FAMILIES[model_type].config
    text = "".join(base.__doc__ for base in config.__mro__[: config.__mro__.index(PreTrainedConfig)])
    assert not [name for name in own_fields(model_type) if not re.search(rf"^        (\w+, )*{name}[:,]", text, re.M)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bad_values_are_refused_by_name(model_type):
    for name, check in checks_of(model_type).items():
        if check.bad:
            value, *allowed = check.bad
            with refused(name, value, *allowed):
                tiny_config_for(model_type, **{name: value})


@pytest.mark.parametrize(("model_type", "name"), fields_where(lambda check: check.bad_in_decoder))
def test_decoders_refuse_some_values_of_encoders(model_type, name):
    """An encoder's config with this value cannot become a decoder's, except for learned positions, which change."""
    value, *allowed = checks_of(model_type)[name].bad_in_decoder
    with refused(name, value, *allowed):
        tiny_config_for(model_type, is_decoder=True, **{name: value})
    encoder = tiny_config_for(model_type, **{name: value})
    if name == "position_embedding_type":
        assert encoder.as_decoder().position_embedding_type == ROWS[model_type].positions[1]
        assert encoder.position_embedding_type == "learned"
    else:
        with refused(name, value, *allowed):
            encoder.as_decoder()
        with refused(name, value, *allowed):
            FAMILIES[model_type].causal_lm(encoder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_positions_by_default(model_type):
    """Learned in an encoder, rotary in a decoder, or those of the family; others allow heads of an odd size."""
    encoder, decoder = (tiny_config_for(model_type, is_decoder=is_decoder) for is_decoder in (False, True))
    assert (encoder.position_embedding_type, decoder.position_embedding_type) == ROWS[model_type].positions
    assert decoder.as_decoder() is decoder
    sinusoidal = tiny_config_for(model_type, position_embedding_type="sinusoidal", num_attention_heads=16)
    assert sinusoidal.as_decoder().position_embedding_type == "sinusoidal"
    assert not sinusoidal.is_decoder


@pytest.mark.parametrize("model_type", FAMILIES)
def test_wrong_types_are_refused_by_name(model_type):
    for name in checks_of(model_type):
        with refused(name, error=Exception):
            tiny_config_for(model_type, **{name: [object()]})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_misspelt_field_is_refused(model_type):
    config = FAMILIES[model_type].config
    for field in ("classifier_dropout", "num_labels", config.slots_field or "norm_first"):
        wrong = "classifier_dropout_prob" if field == "classifier_dropout" else field[:-1] + 2 * field[-1]
        with refused(f"`{wrong}`", f"`{field}`"):
            config(**{wrong: 1})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_that_are_no_field_are_refused(model_type):
    """Those of other libraries and users: a config would silently keep them as attributes."""
    for name in ("n_layers", "finetuning_task"):
        for make in (FAMILIES[model_type].config, partial(AutoConfig.for_model, model_type)):
            with refused(f"`{name}`"):
                make(**{name: 2})
    assert FAMILIES[model_type].config(tokenizer_class="RobertaTokenizer").tokenizer_class == "RobertaTokenizer"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_unknown_names_while_loading(model_type, tmp_path, caplog):
    """A file may hold anything ever set on a config; of names in the call, misspelt ones are reported."""
    config = tiny_config_for(model_type)
    config.note, config.n_layers = {"by": "me"}, 7
    config.save_pretrained(tmp_path)
    for load in (FAMILIES[model_type].config.from_pretrained, AutoConfig.from_pretrained):
        loaded = load(tmp_path)
        assert (loaded.note, loaded.n_layers, caplog.text) == ({"by": "me"}, 7, "")
        assert load(tmp_path, note="mine").note == "mine"
        load(tmp_path, num_attention_head=2)
        assert "`num_attention_head`" in caplog.text and "`num_attention_heads`" in caplog.text
        caplog.clear()
    assert type(loaded)(**tiny_config_for(model_type).to_dict()).to_dict() == tiny_config_for(model_type).to_dict()
    tiny_model(model_type).save_pretrained(tmp_path)
    with refused("n_heads"):
        AutoModel.from_pretrained(tmp_path, n_heads=2)


@pytest.mark.parametrize(("length", "attends"), [(None, False), (16, True)])
def test_fields_of_earlier_versions(length, attends, tmp_path, caplog):
    """Saved models with removed fields load, with a warning if these were set; a call that sets one is refused."""
    fields = {"segment_length": length, "packed_self_attention": attends}
    tiny_config_for("luna").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **fields}))
    assert not fields.keys() & LunaConfig.from_pretrained(tmp_path).to_dict().keys()
    assert all((f"`{name}`" in caplog.text) == bool(value) for name, value in fields.items())
    LunaConfig(segment_length=None, packed_self_attention=False)
    with refused("`segment_length`"):
        LunaConfig(segment_length=16)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("other", ["roberta", "family"])
def test_a_checkpoint_of_another_architecture_is_refused_in_one_line(model_type, other, tmp_path, caplog):
    if other == "family":
        other = next(name for name in FAMILIES if name != model_type)
    AutoConfig.for_model(other).save_pretrained(tmp_path)
    family = FAMILIES[model_type]
    for kind in (family.config, family.base_model, family.masked_lm, family.causal_lm, *family.heads.values()):
        with refused(tmp_path, other, model_type, "from_pretrained_encoder"):
            kind.from_pretrained(tmp_path)
    assert caplog.text == ""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bad_values_are_not_saved(model_type, tmp_path):
    config = tiny_config_for(model_type)
    config.num_attention_heads = 5
    with refused("num_attention_heads", 5, error=Exception):
        config.save_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Functions that show an effect, by the names in the checks. Models have the same seed; other parameters are an effect.


def parameters(config):
    return {n: tuple(p.shape) for n, p in FAMILIES[config.model_type].masked_lm(config).named_parameters()}


def embeddings(config):
    weight = FAMILIES[config.model_type].base_model(config).get_input_embeddings().weight
    return [token for token, row in enumerate(weight) if not row.any()]


@torch.no_grad()
def run(model, train):
    """The first output, with weights large enough that no activation stays near its mean."""
    for parameter in model.parameters():
        parameter.mul_(3.0)
    torch.manual_seed(1)
    return model.train(train)(**padded_batch([12, 5]))[0]


def outputs(config, train=False, kind="base"):
    return run(tiny_model(config.model_type, kind, **changed(config)), train)


def trunk_outputs(config):
    """The outputs of what AutoModel makes."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    randomise(model)
    return run(model, train=False)


def changed(config):
    default = tiny_config_for(config.model_type)
    return {n: getattr(config, n) for n in own_fields(config.model_type) if getattr(config, n) != getattr(default, n)}


def takes_three_marks(config):
    model, marks = tiny_model(config.model_type, **changed(config)), torch.zeros(1, 9, dtype=torch.long)
    marks[0, ::4] = 1
    try:
        model(random_ids(1, 9), global_attention_mask=marks)
    except ValueError:
        return False
    return True


def answers(config):
    return outputs(config, kind="span")


def trained_outputs(config):
    return outputs(config, train=True)


def classifier_outputs(config):
    return outputs(config, kind="sequence")


def trained_classifier_outputs(config):
    return outputs(config, train=True, kind="sequence")


def classifier_parameters(config):
    model = tiny_model(config.model_type, "sequence", **changed(config))
    return {n: tuple(p.shape) for n, p in model.named_parameters()}


def sparse_logits(config):
    model = tiny_model(config.model_type, "mlm", **changed(config)).train()
    batch = padded_batch([12, 5])
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 3] = 7
    return tuple(model(**batch, labels=labels).logits.shape)


def encoded_tokens(config):
    """The number of tokens, or places of padded rows, that pass through a feed-forward network."""
    model, sizes = tiny_model(config.model_type, **changed(config)), []
    inner = model.encoder.layer[0].intermediate
    forward = inner.forward  # a hook would see rows
    inner.forward = lambda states: sizes.append(states[..., 0].numel()) or forward(states)
    model(**padded_batch([12, 5]))
    return sizes


def tied(config):
    model = FAMILIES[config.model_type].masked_lm(config)
    return model.lm_head.decoder.weight is model.get_input_embeddings().weight


def weight_scale(config):
    return FAMILIES[config.model_type].base_model(config).embeddings.word_embeddings.weight.std().item() > 0.1


def filter_scale(config):
    parameters = FAMILIES[config.model_type].base_model(config).named_parameters()
    return next(parameter for name, parameter in parameters if "convolution" in name).std().item() > 0.1


def causal_outputs(config):
    """Of a causal model in training, to include dropout."""
    others = {name: value for name, value in changed(config).items() if name != "is_decoder"}
    return run(tiny_causal_model(config.model_type, **others), train=True)


def seq2seq_encoder(config):
    return type(FAMILIES[config.model_type].seq2seq_lm(config).get_encoder()).__name__


def seq2seq_parameters(config):
    return {n: tuple(p.shape) for n, p in FAMILIES[config.model_type].seq2seq_lm(config).named_parameters()}


def shifted_labels(config):
    model = FAMILIES[config.model_type].seq2seq_lm(config)
    return model.prepare_decoder_input_ids_from_labels(padded_batch([4])["input_ids"]).tolist()


def returns_state(config):
    model = tiny_causal_model(config.model_type, use_cache=config.use_cache)
    return model(**padded_batch([12, 5])).cache is not None


@pytest.mark.parametrize(("model_type", "name"), in_families(lambda check: check.effect))
def test_every_field_has_an_effect(model_type, name):
    check = checks_of(model_type)[name]
    value, probe = check.effect
    configs = [tiny_config_for(model_type, **{**check.together, **more}) for more in ({}, {name: value})]
    before, after = (globals()[probe](config) for config in configs)
    if isinstance(before, torch.Tensor):
        assert before.shape != after.shape or (before - after).abs().max() > 1e-4
    else:
        assert before != after


@pytest.mark.parametrize(("model_type", "name"), in_families(lambda check: check.effect and not check.encoders_only))
def test_every_field_has_an_effect_in_a_causal_model(model_type, name):
    """On outputs or parameters."""
    check = checks_of(model_type)[name]
    others = {"is_decoder": True, **check.together}
    configs = [tiny_config_for(model_type, **{**others, **more}) for more in ({}, {name: check.effect[0]})]
    before, after = (causal_outputs(config) for config in configs)
    if before.shape == after.shape and (before - after).abs().max() <= 1e-4:
        counts = [len(list(FAMILIES[model_type].causal_lm(config).parameters())) for config in configs]
        assert counts[0] != counts[1]


@pytest.mark.parametrize(("model_type", "name"), in_families(lambda check: check.effect))
def test_every_parameter_is_initialised(model_type, name, monkeypatch):
    check, empty = checks_of(model_type)[name], torch.empty

    def fill(*args, **options):
        """Fill what is usually finite by chance with NaN."""
        tensor = empty(*args, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", fill)
    config = tiny_config_for(model_type, **{**check.together, name: check.effect[0]})
    kind = "seq2seq_lm" if config.is_encoder_decoder else "causal_lm" if config.is_decoder else "masked_lm"
    model = getattr(FAMILIES[model_type], kind)(config)
    assert all(state.isfinite().all() for state in model.state_dict().values())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_feed_forward_chunks_do_not_change_the_result(model_type):
    expected = tiny_model(model_type)(**padded_batch([12, 5]))[0]
    for rows in (1, 7):
        actual = tiny_model(model_type, chunk_size_feed_forward=rows)(**padded_batch([12, 5]))[0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_presets_are_the_published_models():
    """The authors state 132 M parameters for the tied base model and 147 M for the untied one."""
    base, long, large = (LunaConfig.preset(name) for name in ("base", "base-2048", "large"))
    assert base.to_dict() == LunaConfig().to_dict()
    assert (long.max_position_embeddings, long.projection_length) == (2048, 256)
    sizes = (large.num_hidden_layers, large.hidden_size, large.intermediate_size, large.num_attention_heads)
    assert sizes == (24, 1024, 4096, 16)
    with torch.device("meta"):
        tied_size = LunaForMaskedLM(base).num_parameters()
        untied_size = LunaForMaskedLM(LunaConfig.preset("base", tie_kv=False)).num_parameters()
        assert LunaModel(LunaConfig()).config.num_hidden_layers == 12
    assert round(tied_size / 1e6) == 132
    # Every matrix and vector that untying adds.
    assert untied_size - tied_size == 12 * 2 * (768 * 768 + 768)
    assert abs(untied_size / 1e6 - 147) < 1
    for config in (family.config for family in FAMILIES.values()):
        with refused("huge", *config.presets):
            config.preset("huge")
        assert config.preset("base").to_dict() == config().to_dict()
    assert AbcConfig.preset("base-128", num_labels=3).memory_size == 128
