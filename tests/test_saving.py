"""Saving and loading: weights, buffers and configuration survive in every variant.

Transformers' own tests (`tests/library/`) cover tied and resized embeddings and offloading.
"""

import copy
import pickle

import pytest
import torch
from helpers import (
    FAMILY_KINDS,
    KINDS_FIRST,
    MODELS,
    covering,
    inputs_for,
    model_class,
    random_ids,
    randomise,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
    tiny_seq2seq_model,
    variants_of,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from variants import COMMON

from luna_hf import FAMILIES
from luna_hf.absorb import absorb_projections

families = pytest.mark.parametrize("family", list(FAMILIES))
kinds = pytest.mark.parametrize(("family", "variant"), FAMILY_KINDS)
# Every kind of model, and every variant of the masked language model.
CASES = [("luna", kind, "default") for kind in MODELS if kind != "mlm"]
CASES += [(family, "mlm", variant) for family, variant in FAMILY_KINDS]


def assert_same_tensors(actual, expected):
    """Every parameter and buffer is bitwise equal, including buffers that are not saved."""
    parameters, buffers = dict(actual.named_parameters()), dict(actual.named_buffers())
    expected_parameters, expected_buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    assert parameters.keys() == expected_parameters.keys() and buffers.keys() == expected_buffers.keys()
    for name, tensor in expected_parameters.items():
        assert parameters[name].dtype == tensor.dtype and torch.equal(parameters[name], tensor), name
    for name, tensor in expected_buffers.items():
        # A fixed table stays in float32 when a model is loaded in half precision.
        assert torch.equal(buffers[name].to(tensor.dtype), tensor), name


@torch.no_grad()
def assert_same_outputs(actual, expected, inputs, atol=1e-6):
    """Equal up to the order of additions, which depends on the alignment of weights mapped from a file."""
    for name, tensor in expected(**inputs).items():
        torch.testing.assert_close(actual(**inputs)[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(("family", "kind", "variant"), CASES)
def test_a_saved_model_comes_back_bitwise(family, kind, variant, tmp_path):
    model = tiny_model(family, kind, **variants_of(family)[variant])
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert not loaded.training
    assert_same_tensors(loaded, model)
    assert_same_outputs(loaded, model, inputs_for(kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@kinds
def test_loading_in_half_precision_equals_converting(family, dtype, variant, tmp_path):
    model = tiny_model(family, "mlm", **variants_of(family)[variant])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    assert_same_tensors(loaded, model.to(dtype))
    assert_same_outputs(loaded, model, inputs_for("mlm"), atol=0)
    loaded.save_pretrained(tmp_path / "half")
    assert type(model).from_pretrained(tmp_path / "half").dtype == dtype


@families
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "base"])
def test_a_base_checkpoint_loads_into_a_head_and_back(family, kind, tmp_path):
    base = tiny_model(family, "base", position_embedding_type="sinusoidal")
    base.save_pretrained(tmp_path / "base")
    head, info = model_class(family, kind).from_pretrained(tmp_path / "base", output_loading_info=True)
    prefix = f"{head.base_model_prefix}."
    assert info["missing_keys"] and not [name for name in info["missing_keys"] if name.startswith(prefix)]
    assert not info["unexpected_keys"]
    assert_same_tensors(head.base_model, base)

    randomise(head)
    head.save_pretrained(tmp_path / "head")
    back, info = model_class(family, "base").from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not info["missing_keys"] and not [name for name in info["unexpected_keys"] if name.startswith(prefix)]
    assert_same_tensors(back, head.base_model)


@families
@pytest.mark.parametrize("kind", ["base", "mlm", "sequence"])
def test_a_folder_of_another_kind_is_refused(family, kind, tmp_path):
    """Its weights are none of the model's, which would be random."""
    tiny_model(family, kind).save_pretrained(tmp_path)
    row = FAMILIES[family]
    for cls in (AutoModelForSeq2SeqLM, row.seq2seq_model):
        with pytest.raises(ValueError, match=model_class(family, kind).__name__):
            cls.from_pretrained(tmp_path)
    other = next(name for name in FAMILIES if name != family)
    with pytest.raises(ValueError, match=f"{family}, not {other}"):
        model_class(other, kind).from_pretrained(tmp_path)


@families
@pytest.mark.parametrize("name", ["memory_sise", "local_windw", "n_layers"])
def test_a_keyword_that_is_no_field_is_refused(family, name, tmp_path):
    model = tiny_model(family, "mlm")
    model.save_pretrained(tmp_path)
    for cls in (AutoModelForMaskedLM, type(model)):
        with pytest.raises(ValueError, match=name):
            cls.from_pretrained(tmp_path, **{name: 4})


@families
def test_a_field_of_another_family_is_refused(family, tmp_path):
    model = tiny_model(family, "mlm")
    model.save_pretrained(tmp_path)
    field = "memory_size" if family != "abc_memory" else "projection_length"
    with pytest.raises(ValueError, match=field):
        AutoModelForMaskedLM.from_pretrained(tmp_path, **{field: 4})


@families
@pytest.mark.parametrize("kind", ["mlm", "span"])
def test_a_folder_without_the_head_that_it_names_is_refused(family, kind, tmp_path):
    model = tiny_model(family, kind)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if name.startswith(f"{model.base_model_prefix}.")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="architectures"):
        type(model).from_pretrained(tmp_path)
    other = model_class(family, "token" if kind != "token" else "span")
    assert other.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"]  # a new head, to be trained


@families
def test_cross_attention_is_refused_at_once(family, tmp_path):
    """As TSDAE and `EncoderDecoderModel` ask for it: in the config of a folder, before the weights are read."""
    tiny_model(family, "mlm").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.is_decoder = config.add_cross_attention = True
    for make in (
        AutoModelForCausalLM.from_config,
        lambda own: AutoModelForCausalLM.from_pretrained(tmp_path, config=own),
    ):
        with pytest.raises(ValueError, match="add_cross_attention"):
            make(config)


@families
def test_every_configuration_has_an_auto_map(family, tmp_path):
    """Other libraries read it; transformers looks names up in it wherever it exists."""
    config, other = (tiny_config_for(family, is_decoder=True) for _ in range(2))
    assert config.auto_map == {} and config.auto_map is not other.auto_map
    assert type(AutoModelForCausalLM.from_config(config)) is FAMILIES[family].causal_lm
    assert type(config).from_dict({**config.to_dict(), "auto_map": None}).auto_map == {}
    config.save_pretrained(tmp_path)
    assert set(AutoConfig.from_pretrained(tmp_path).auto_map) == {"AutoConfig"}


@families
def test_a_configuration_comes_back_with_every_field(family, tmp_path):
    names = {0: "no", 1: "maybe", 2: "yes"}
    label2id = {name: label for label, name in names.items()}
    config = tiny_config_for(family, **COMMON["convolution-segments-untied"], id2label=names, label2id=label2id)
    config.save_pretrained(tmp_path)
    loaded = type(config).from_pretrained(tmp_path)
    for name in type(config).__dataclass_fields__:
        # Saving writes these two fields.
        if name not in ("transformers_version", "_name_or_path"):
            assert getattr(loaded, name) == getattr(config, name), name
    assert loaded.num_labels == 3 and loaded.id2label == names
    assert type(config)(**loaded.to_dict()).to_dict() == loaded.to_dict()


@pytest.mark.parametrize(("family", "variant"), KINDS_FIRST)
def test_every_tensor_moves_to_another_dtype(family, variant):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = tiny_model(family, "sequence", **variants_of(family)[variant]).to(dtype)
        assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {dtype}
        assert model(**inputs_for("sequence")).logits.dtype == dtype


# ---- state outside the state dict ----

MAKERS = {"encoder": tiny_model, "causal": tiny_causal_model, "seq2seq": tiny_seq2seq_model}
makers = pytest.mark.parametrize("kind", MAKERS)


def inputs_of(kind):
    ids = {"input_ids": random_ids(2, 12)}
    return ids | ({"decoder_input_ids": random_ids(2, 5, seed=1)} if kind == "seq2seq" else {})


@families
@makers
@torch.no_grad()
def test_the_state_dict_is_the_whole_state(family, kind):
    """A model made on `meta` computes the same from a state dict alone; fresh memory is NaN."""
    options = {} if kind == "seq2seq" and family == "leapformer" else {"conv_kernel_size": 3}
    model = MAKERS[kind](family, position_embedding_type="sinusoidal", **options)
    assert not [*model.buffers()]
    with torch.device("meta"):
        other = type(model)(model.config)
    other = other.to_empty(device="cpu").eval()
    for parameter in other.parameters():
        parameter.fill_(torch.nan)
    other.load_state_dict(model.state_dict(), strict=True)
    expected = model(**inputs_of(kind))[0]
    assert torch.equal(other(**inputs_of(kind))[0], expected)
    other.half().float().load_state_dict(model.state_dict())
    assert torch.equal(other(**inputs_of(kind))[0], expected)


def look(*_):
    """A user's hook."""


PREPARED = {
    "recorded": lambda model, inputs: None,
    "hooked": lambda model, inputs: [module.register_forward_hook(look) for module in model.modules()],
    "backwards": lambda model, inputs: model(**inputs)[0].sum().backward(),
}


@pytest.mark.parametrize(("family", "kind", "prepared"), covering(list(FAMILIES), list(MAKERS), list(PREPARED)))
def test_models_are_copied_and_pickled(family, kind, prepared):
    attentions = {} if family == "leapformer" and kind == "causal" else {"attn_implementation": "eager"}
    model, inputs = MAKERS[kind](family, num_hidden_layers=1, **attentions), inputs_of(kind)
    records = ("output_hidden_states", "output_attentions") if attentions else ("output_hidden_states",)
    records = dict.fromkeys(records, True)
    PREPARED[prepared](model, inputs)
    expected = model(**inputs, **records)
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        for _ in range(2):  # the second time with new hooks
            found = copied(**inputs, **records)
            assert found.keys() == expected.keys() and torch.equal(found[0], expected[0])
            assert [len(value) for value in found.values()] == [len(value) for value in expected.values()]
        assert sum(look in module._forward_hooks.values() for module in copied.modules()) == (
            len([*model.modules()]) if prepared == "hooked" else 0
        )
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


def test_a_model_with_absorbed_projections_is_pickled():
    model = absorb_projections(tiny_model("luna"))
    expected = model(**inputs_of("encoder"), output_hidden_states=True)
    found = pickle.loads(pickle.dumps(model))(**inputs_of("encoder"), output_hidden_states=True)
    assert torch.equal(found[0], expected[0]) and len(found.hidden_states) == len(expected.hidden_states)
