"""Configurations: every field is validated, every field changes something, presets are the published models."""

import dataclasses
import json

import pytest
import torch
from helpers import FAMILIES, OWN_FIELDS, padded_batch, tiny_causal_model, tiny_config_for, tiny_model
from transformers import AutoConfig, PreTrainedConfig

from luna_hf import LunaConfig, LunaForMaskedLM, LunaModel

LIBRARY_FIELDS = {field.name for field in dataclasses.fields(PreTrainedConfig)}

# A value that each field refuses, and a word of the fix that the message must name.
BAD_VALUES = {
    "vocab_size": (0, "at least 1"),
    "hidden_size": (0, "at least 1"),
    "num_hidden_layers": (0, "at least 1"),
    "num_attention_heads": (5, "1, 2, 3, 4"),
    "intermediate_size": (-1, "at least 1"),
    "hidden_act": ("gleu", "gelu"),
    "hidden_dropout_prob": (1.0, r"\[0, 1\)"),
    "attention_probs_dropout_prob": (-0.1, r"\[0, 1\)"),
    "activation_dropout": (2, r"\[0, 1\)"),
    "max_position_embeddings": (0, "at least 1"),
    "position_embedding_type": ("rotary", "sinusoidal"),
    "type_vocab_size": (-1, "0"),
    "layer_norm_eps": (0, "1e-5"),
    "initializer_range": (-0.02, "0.02"),
    "conv_kernel_size": (4, "odd"),
    "classifier_pooling": ("max", "mean"),
    "classifier_dropout": (1.5, r"\[0, 1\)"),
    "classifier_hidden_size": (0, "None or at least 1"),
    "classifier_activation": ("tahn", "tanh"),
    "pad_token_id": (120, "vocab_size"),
    "chunk_size_feed_forward": (-1, "0"),
    "projection_length": (0, "at least 1"),
    "num_projected_attention_heads": (7, "1, 2, 3, 4"),
    "pack_activation": ("softmax", "'softplus' or 'elu'"),
    "memory_control": ("mpl", "one of mlp, linformer"),
    "memory_size": (0, "at least 1"),
    "control_activation": ("softmax", "one of exp, relu, sigmoid"),
    "control_seed": (-1, "at least 0"),
    "cluster_iterations": (0, "at least 1"),
}
# Fields of other types than their values are refused by transformers' own strict configurations.
TYPED_ONLY = {"embedding_layer_norm", "norm_first", "sparse_prediction", "tie_word_embeddings", "tie_kv"}
TYPED_ONLY |= {"dynamic_projection", "share_control", "bos_token_id", "eos_token_id", "is_decoder", "use_cache"}
# What a decoder refuses besides, and a word of the fix.
BAD_IN_DECODERS = {
    "position_embedding_type": ("learned", "rotary or sinusoidal in a decoder"),
    "num_projected_attention_heads": (2, "None"),
    "memory_control": ("cluster", "one of mlp, linformer, random, sliding_window in a causal model"),
    "num_attention_heads": (16, "even size"),  # heads of 3
}


def own_fields(model_type):
    return {f.name for f in dataclasses.fields(FAMILIES[model_type].config)} - LIBRARY_FIELDS


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_in_the_tables(model_type):
    fields = own_fields(model_type)
    assert fields <= BAD_VALUES.keys() | TYPED_ONLY, "a field without a validation test"
    assert fields <= EFFECTS.keys() | {"bos_token_id", "eos_token_id"}, "a field without a test of its effect"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_documented(model_type):
    config = FAMILIES[model_type].config
    text = "".join(base.__doc__ for base in config.__mro__ if base.__module__.startswith("luna_hf"))
    missing = [name for name in own_fields(model_type) if f"{name} (`" not in text]
    assert not missing


def fields_of_families(names):
    """(family, field) for those of the names that are fields of the family."""
    return [(family, name) for family in FAMILIES for name in sorted(own_fields(family).intersection(names))]


@pytest.mark.parametrize(("model_type", "name"), fields_of_families(BAD_VALUES))
def test_bad_values_name_the_field_and_the_fix(model_type, name):
    value, fix = BAD_VALUES[name]
    with pytest.raises(ValueError, match=f"(?s)`{name}`.*{fix}"):
        tiny_config_for(model_type, **{name: value})


@pytest.mark.parametrize(("model_type", "name"), fields_of_families(BAD_IN_DECODERS))
def test_what_a_decoder_refuses_is_fine_in_an_encoder(model_type, name):
    """And an encoder's configuration of that kind becomes no decoder unsaid, but for the positions."""
    value, fix = BAD_IN_DECODERS[name]
    with pytest.raises(ValueError, match=f"(?s)`{name}`.*{fix}"):
        tiny_config_for(model_type, is_decoder=True, **{name: value})
    encoder = tiny_config_for(model_type, **{name: value})
    if name == "position_embedding_type":
        assert encoder.as_decoder().position_embedding_type == "rotary" and encoder.position_embedding_type == "learned"
    else:
        with pytest.raises(ValueError, match=f"(?s)`{name}`.*{fix}"):
            encoder.as_decoder()
        with pytest.raises(ValueError, match=f"(?s)`{name}`.*{fix}"):
            FAMILIES[model_type].causal_lm(encoder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_positions_by_default(model_type):
    """Learned in an encoder, rotary in a decoder; heads of an odd size are fine where nothing turns."""
    assert tiny_config_for(model_type).position_embedding_type == "learned"
    decoder = tiny_config_for(model_type, is_decoder=True)
    assert decoder.position_embedding_type == "rotary" and decoder.as_decoder() is decoder
    sinusoidal = tiny_config_for(model_type, position_embedding_type="sinusoidal", num_attention_heads=16)
    assert sinusoidal.as_decoder().position_embedding_type == "sinusoidal"
    assert not sinusoidal.is_decoder


@pytest.mark.parametrize(("model_type", "name"), fields_of_families({*TYPED_ONLY, *BAD_VALUES}))
def test_wrong_types_name_the_field(model_type, name):
    with pytest.raises(Exception, match=f"field '{name}'"):
        tiny_config_for(model_type, **{name: [object()]})


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("wrong", "right"),
    [("classifier_dropout_prob", "classifier_dropout"), ("num_lables", "num_labels"), ("own field", "own field")],
)
def test_a_misspelt_field_is_caught(model_type, wrong, right):
    if wrong == "own field":
        (right,) = OWN_FIELDS[model_type]
        wrong = right[:-2] + right[:-3:-1]  # projection_lenght
    with pytest.raises(ValueError, match=f"`{wrong}`.*`{right}`"):
        FAMILIES[model_type].config(**{wrong: 1})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bad_values_are_not_saved(model_type, tmp_path):
    config = tiny_config_for(model_type)
    config.num_attention_heads = 5
    with pytest.raises(Exception, match="num_attention_heads"):
        config.save_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Effects: (override, how it shows). Models are compared with the same seed; other parameters are an effect too.


def parameters(config):
    return {n: tuple(p.shape) for n, p in FAMILIES[config.model_type].masked_lm(config).named_parameters()}


def outputs(config, train=False, kind="base"):
    model = tiny_model(config.model_type, kind, **changed(config))
    # Weights at a scale where nothing is near its mean.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    torch.manual_seed(1)
    out = model.train(train)(**padded_batch([12, 5]))
    return out[0].detach()


def changed(config):
    default = tiny_config_for(config.model_type)
    return {n: getattr(config, n) for n in own_fields(config.model_type) if getattr(config, n) != getattr(default, n)}


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


def tied(config):
    model = FAMILIES[config.model_type].masked_lm(config)
    return model.lm_head.decoder.weight is model.get_input_embeddings().weight


def weight_scale(config):
    return FAMILIES[config.model_type].base_model(config).embeddings.word_embeddings.weight.std().item() > 0.1


def causal_outputs(config):
    """Of a causal model in training, with dropout if there is any."""
    others = {name: value for name, value in changed(config).items() if name != "is_decoder"}
    model = tiny_causal_model(config.model_type, **others)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    torch.manual_seed(1)
    return model.train()(**padded_batch([12, 5])).logits.detach()


def returns_state(config):
    model = tiny_causal_model(config.model_type, use_cache=config.use_cache)
    return model(**padded_batch([12, 5])).past_key_values is not None


EFFECTS = {
    "vocab_size": (130, parameters),
    "hidden_size": (64, parameters),
    "num_hidden_layers": (2, parameters),
    "num_attention_heads": (2, outputs),
    "intermediate_size": (64, parameters),
    "hidden_act": ("relu", outputs),
    "hidden_dropout_prob": (0.5, trained_outputs),
    "attention_probs_dropout_prob": (0.5, trained_outputs),
    "activation_dropout": (0.5, trained_outputs),
    "max_position_embeddings": (80, parameters),
    "position_embedding_type": ("sinusoidal", outputs),
    "type_vocab_size": (2, parameters),
    "embedding_layer_norm": (False, parameters),
    "norm_first": (True, parameters),
    "layer_norm_eps": (0.1, outputs),
    "initializer_range": (0.5, weight_scale),
    "conv_kernel_size": (5, parameters),
    "sparse_prediction": (True, sparse_logits),
    "classifier_pooling": ("mean", classifier_outputs),
    "classifier_dropout": (0.5, trained_classifier_outputs),
    "classifier_hidden_size": (16, classifier_parameters),
    "classifier_activation": ("relu", classifier_outputs),
    "pad_token_id": (2, parameters),
    "tie_word_embeddings": (False, tied),
    "projection_length": (6, parameters),
    "num_projected_attention_heads": (2, outputs),
    "tie_kv": (False, parameters),
    "pack_activation": ("elu", causal_outputs),
    "is_decoder": (True, outputs),
    "use_cache": (False, returns_state),
    "dynamic_projection": (False, outputs),
    "memory_control": ("linformer", parameters),
    "memory_size": (6, parameters),
    "control_activation": ("relu", outputs),
    "share_control": (False, parameters),
    "control_seed": (1, outputs),
    "cluster_iterations": (1, outputs),
}
# Other fields, where one has an effect only together with them.
TOGETHER = {
    "control_seed": {"memory_control": "random"},
    "cluster_iterations": {"memory_control": "cluster", "memory_size": 3},
    "pack_activation": {"is_decoder": True},
}
# Fields that a causal model has no use for: it takes any length, has no other head, and P has no use for fewer slots.
ENCODERS_ONLY = {"max_position_embeddings", "sparse_prediction", "dynamic_projection", "cluster_iterations"}
ENCODERS_ONLY |= {"num_projected_attention_heads", "is_decoder", "use_cache"}
ENCODERS_ONLY |= {name for name in EFFECTS if name.startswith("classifier")}


@pytest.mark.parametrize(("model_type", "name"), fields_of_families(EFFECTS))
def test_every_field_changes_something(model_type, name):
    value, probe = EFFECTS[name]
    others = TOGETHER.get(name, {})
    before = probe(tiny_config_for(model_type, **others))
    after = probe(tiny_config_for(model_type, **others, **{name: value}))
    if isinstance(before, torch.Tensor):
        assert before.shape != after.shape or (before - after).abs().max() > 1e-4
    else:
        assert before != after


@pytest.mark.parametrize(("model_type", "name"), fields_of_families(EFFECTS.keys() - ENCODERS_ONLY))
def test_every_field_of_a_causal_model_changes_something(model_type, name):
    """Its numbers, or its parameters."""
    others = {"is_decoder": True, **TOGETHER.get(name, {})}
    configs = [tiny_config_for(model_type, **{**others, **more}) for more in ({}, {name: EFFECTS[name][0]})]
    before, after = (causal_outputs(config) for config in configs)
    if before.shape == after.shape and (before - after).abs().max() <= 1e-4:
        counts = [len(list(FAMILIES[model_type].causal_lm(config).parameters())) for config in configs]
        assert counts[0] != counts[1]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_feed_forward_chunks_change_nothing(model_type, rows):
    expected = tiny_model(model_type)(**padded_batch([12, 5]))[0]
    actual = tiny_model(model_type, chunk_size_feed_forward=rows)(**padded_batch([12, 5]))[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_special_tokens_are_those_of_roberta(model_type):
    config = FAMILIES[model_type].config()
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id, config.vocab_size) == (0, 1, 2, 50265)


def test_presets_are_the_published_models():
    """Base tied and untied have the 132 M and 147 M parameters that the authors state."""
    base, long, large = (LunaConfig.preset(name) for name in ("base", "base-2048", "large"))
    assert base.to_dict() == LunaConfig().to_dict()
    assert (long.max_position_embeddings, long.projection_length) == (2048, 256)
    assert (large.num_hidden_layers, large.hidden_size, large.intermediate_size, large.num_attention_heads) == (
        24,
        1024,
        4096,
        16,
    )
    with torch.device("meta"):
        tied_size = LunaForMaskedLM(base).num_parameters()
        untied_size = LunaForMaskedLM(LunaConfig.preset("base", tie_kv=False)).num_parameters()
        assert LunaModel(LunaConfig()).config.num_hidden_layers == 12
    assert round(tied_size / 1e6) == 132
    # "147 M" in the authors' list; every matrix and vector that the untied model adds is accounted for here.
    assert untied_size - tied_size == 12 * 2 * (768 * 768 + 768)
    assert abs(untied_size / 1e6 - 147) < 1
    with pytest.raises(ValueError, match="base-2048"):
        LunaConfig.preset("huge")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_auto_config_round_trip(model_type, tmp_path):
    config = tiny_config_for(model_type, conv_kernel_size=5, num_labels=3)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config) and loaded.to_diff_dict() == config.to_diff_dict()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert own_fields(model_type) <= stored.keys()
    assert OWN_FIELDS[model_type].items() <= stored.items()
