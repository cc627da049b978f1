"""`from_roberta` for every class of every family, with and without rules, with and without the package."""

import dataclasses
import inspect
import re

import pytest
import torch
from helpers import MODELS, code_name, inputs_for, model_class, refused, run_python, tiny_causal_model
from test_warm_start import body, make_source

from luna_hf import FAMILIES
from luna_hf.families import warm_start_rules
from luna_hf.families.warm_start_rules import INITIALISED
from luna_hf.warm_start import source as warm_start_source
from luna_hf.warm_start import transfer as warm_start_module
from luna_hf.warm_start import warm_start

families = pytest.mark.parametrize("family", FAMILIES)
kinds = pytest.mark.parametrize("kind", MODELS)
heads = pytest.mark.parametrize("kind", ["sequence", "span"])


def head_names(model):
    """A model's parameters without those of its base model."""
    encoder = {parameter.data_ptr() for parameter in model.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if parameter.data_ptr() not in encoder}


# Runs with luna_hf, on classes that come from a folder all the same.
OF_A_FOLDER = """
import sys, torch, luna_hf
from transformers.dynamic_module_utils import get_class_from_dynamic_module
source, *words = sys.argv[1:]
for folder, reference in (word.split("--") for word in words):
    loaded = get_class_from_dynamic_module(reference, folder)
    own = getattr(luna_hf, loaded.__name__)
    assert loaded is not own and loaded.__module__.startswith("transformers_modules")
    try:
        states = [made.from_roberta(source).state_dict() for made in (loaded, own)]
    except ValueError as error:
        print("refused" if "cannot start from an encoder" in str(error) else error)
    else:
        same = states[0].keys() == states[1].keys() and all(map(torch.equal, *(state.values() for state in states)))
        print(loaded.__name__ if same else f"{loaded.__name__} differs")
"""


@families
@kinds
def test_every_class_starts_from_the_encoder(family, kind, caplog):
    source, wanted = make_source(), model_class(family, kind)
    model = wanted.from_roberta(source, max_length=50, seed=3, conv_kernel_size=3)
    assert type(model) is wanted and not model.training and model.config.max_position_embeddings == 50
    own = dict(model.base_model.named_parameters())
    for name, expected in body(source).items():
        assert torch.equal(own[name][: len(expected)], expected), name
    with torch.no_grad():
        outputs = model(**inputs_for(kind))
    assert all(torch.isfinite(value).all() for value in outputs.values() if isinstance(value, torch.Tensor))
    (logged,) = caplog.messages
    expected, made = warm_start(wanted, source, max_length=50, seed=3, conv_kernel_size=3)
    assert logged.endswith("\n".join(made.lines("extended", "new", *["unused"] * bool(made.unused))))
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    # Only a masked LM keeps the source's head.
    assert sorted([*made.copied, *made.extended, *made.new]) == sorted(dict(model.named_parameters()))
    heads = {name for name, _ in source.named_parameters() if name.startswith("lm_head.")}
    if kind == "mlm":
        assert heads - {"lm_head.bias"} <= set(made.copied.values()) and not made.unused
    else:
        assert set(made.unused) == heads
        assert {name for name, rule in made.new.items() if rule == INITIALISED} >= head_names(model)


@families
@heads
def test_a_new_head_is_that_of_a_new_model(family, kind):
    """Even if the source has one with the same names and shapes, trained for another purpose."""
    source = make_source(head="sequence")
    wanted = model_class(family, kind)
    model, made = warm_start(wanted, source, seed=1)
    assert {name for name, _ in source.named_parameters() if name.startswith("classifier.")} <= set(made.unused)
    for name in head_names(model):
        parameter = model.get_parameter(name)
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(model.config.initializer_range, rel=0.3), name
        else:
            assert not parameter.any(), name
    again, other = (warm_start(wanted, source, seed=seed)[0] for seed in (1, 2))
    weights = [name for name in head_names(model) if model.get_parameter(name).dim() == 2]
    assert all(torch.equal(model.get_parameter(name), again.get_parameter(name)) for name in weights)
    assert not any(torch.equal(model.get_parameter(name), other.get_parameter(name)) for name in weights)


@families
@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_the_dtype_of_the_new_model(family, dtype):
    source, wanted = make_source().half(), torch.float16 if dtype == "auto" else torch.bfloat16
    model = model_class(family, "sequence").from_roberta(source, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {model.config.dtype} == {wanted}
    assert model_class(family, "sequence").from_roberta(source, torch_dtype=dtype).dtype == wanted
    own = dict(model.base_model.named_parameters())
    assert all(torch.equal(own[name], expected.to(wanted)) for name, expected in body(source).items())
    with refused("`dtype`", "'bf16'"):
        model_class(family, "sequence").from_roberta(source, dtype="bf16")


@families
@pytest.mark.parametrize("kind", ["base", "sequence"])
def test_only_a_used_head_must_have_the_layers_activation(family, kind):
    source = make_source(hidden_act="relu")
    assert model_class(family, kind).from_roberta(source).config.hidden_act == "relu"
    with refused("gelu", "relu", "`hidden_act`"):
        model_class(family, "mlm").from_roberta(source)


@families
def test_a_causal_model_is_refused(family):
    row = FAMILIES[family]
    own = [(row.base_model, {"is_decoder": True}), *((causal_class, {}) for causal_class in row.causal_models)]
    assert len(own) > 1
    for wanted, fields in own:
        with refused(wanted.__name__, row.masked_lm.__name__):
            wanted.from_roberta("nowhere", **fields)


# ---- where the code is ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For every family the folder of a warm-started model, and one of a causal model."""
    root = tmp_path_factory.mktemp("warm-started")
    for family, row in FAMILIES.items():
        row.masked_lm.from_roberta(make_source()).save_pretrained(root / family)
        tiny_causal_model(family).save_pretrained(root / f"{family}-causal")
    return root


def references(saved):
    """`folder--module.Class` of the masked and the causal language model of every family."""
    return [
        f"{saved / folder}--modeling_{code_name(family)}.{model.__name__}"
        for family, row in FAMILIES.items()
        for folder, model in ((family, row.masked_lm), (f"{family}-causal", row.causal_lm))
    ]


def test_a_class_from_a_folder_starts_like_the_package_s(saved, tmp_path):
    make_source().save_pretrained(tmp_path / "source")
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    said = run_python(OF_A_FOLDER, tmp_path / "source", *references(saved), env=environment)
    assert said.split() == [word for row in FAMILIES.values() for word in (row.masked_lm.__name__, "refused")]


def test_shared_files_name_no_family():
    text = "".join(map(inspect.getsource, (warm_start_module, warm_start_source, warm_start_rules)))
    known = [{item.name for item in dataclasses.fields(row.config)} for row in FAMILIES.values()]
    own = set.union(*known) - set.intersection(*known)
    for family, row in FAMILIES.items():
        own |= {family, code_name(family), *row.warm_start.options(), row.base_model.__name__}
    assert own and not [word for word in sorted(own) if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
