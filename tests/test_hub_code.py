"""A saved folder carries its own code: it loads where luna_hf is missing, and asks for no flag where it is installed.

Each family is saved once with plain `save_pretrained`, one folder for each model. The processes without the package run
once for all tests here.
"""

import json

import pytest
import torch
import transformers
from helpers import (
    FAMILY_OWN_VARIANTS,
    HEADS,
    MODELS,
    code_name,
    inputs_for,
    model_class,
    run_python,
    tiny_causal_model,
    tiny_model,
    tiny_tokenizer,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
)
from variants import ROWS

from luna_hf import FAMILIES

families = pytest.mark.parametrize("family", list(FAMILIES))
kinds = pytest.mark.parametrize("kind", MODELS)

AUTO_CLASSES = {"base": AutoModel, "mlm": AutoModelForMaskedLM, **HEADS}
TEXT = "the quick brown fox"

# Runs without luna_hf. Loads every model from the code in its folder, computes, and saves it again.
WITHOUT_PACKAGE = """
import json, sys
import torch, transformers
source, target = sys.argv[1:3]
results = {}
try:
    transformers.AutoModel.from_pretrained(f"{source}/base", trust_remote_code=False)
except ValueError as error:
    results["refused"] = str(error)
alone = transformers.AutoConfig.from_pretrained(sys.argv[4], trust_remote_code=True)
results["configuration alone"] = type(alone).__name__, alone.hidden_size
for kind, auto_class in json.loads(sys.argv[3]).items():
    folder = f"{source}/{kind}"
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        outputs = model(**torch.load(f"{source}/{kind}/inputs.pt"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    results[kind] = {
        "config": config.to_dict(),
        "class": type(model).__name__,
        "modules": [type(config).__module__, type(model).__module__],
        "outputs": outputs[0],
        "tokens": tokenizer("the quick brown fox")["input_ids"],
        "tokenizer": type(tokenizer).__name__,
    }
    model.save_pretrained(f"{target}/{kind}")
    tokenizer.save_pretrained(f"{target}/{kind}")
    torch.save(torch.load(f"{source}/{kind}/inputs.pt"), f"{target}/{kind}/inputs.pt")
# One checkpoint, every class that its configuration offers.
auto_map = transformers.AutoConfig.from_pretrained(f"{source}/mlm", trust_remote_code=True).auto_map
for auto_class in auto_map:
    loaded = getattr(transformers, auto_class).from_pretrained(f"{source}/mlm", trust_remote_code=True)
    results[auto_class] = type(loaded).__name__
    results[auto_class + " embedding"] = getattr(loaded, "get_input_embeddings", lambda: None)()
# A causal checkpoint: the model that generates, and its trunk.
causal = transformers.AutoModelForCausalLM.from_pretrained(f"{source}/causal", trust_remote_code=True)
trunk = transformers.AutoModel.from_pretrained(f"{source}/causal", trust_remote_code=True)
prompt = torch.load(f"{source}/causal/inputs.pt")
with torch.no_grad():
    results["causal"] = {
        "classes": [type(causal).__name__, type(trunk).__name__],
        "modules": [type(causal).__module__, type(trunk).__module__],
        "outputs": causal(**prompt).logits,
        "states": trunk(**prompt).last_hidden_state,
        "generated": causal.generate(**prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False),
    }
causal.save_pretrained(f"{target}/causal")
torch.save(prompt, f"{target}/causal/inputs.pt")
assert sys.modules["luna_hf"] is None
results = {k: v.weight.detach() if isinstance(v, torch.nn.Module) else v for k, v in results.items()}
torch.save(results, f"{target}/results.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For every family: its folders, and the folders and results of a process without the package, and of a second."""
    root, folders = tmp_path_factory.mktemp("hub"), {}
    tokenizer = tiny_tokenizer()
    for family in FAMILIES:
        first, second, third = (root / family / name for name in ("saved", "saved-again", "saved-third"))
        for kind in MODELS:
            model = tiny_model(family, kind, vocab_size=len(tokenizer), conv_kernel_size=3)
            model.save_pretrained(first / kind)
            tokenizer.save_pretrained(first / kind)
            torch.save(inputs_for(kind), first / kind / "inputs.pt")
        for variant, options in ROWS[family].encoder.items():
            tiny_model(family, vocab_size=len(tokenizer), **options).save_pretrained(first / variant)
            tokenizer.save_pretrained(first / variant)
            torch.save(inputs_for("base"), first / variant / "inputs.pt")
        tiny_causal_model(family, vocab_size=len(tokenizer), conv_kernel_size=3).save_pretrained(first / "causal")
        torch.save(inputs_for("base"), first / "causal" / "inputs.pt")
        alone = root / family / "configuration"
        model.config.save_pretrained(alone)
        auto_classes = AUTO_CLASSES | dict.fromkeys(ROWS[family].encoder, AutoModel)
        classes = json.dumps({name: auto_class.__name__ for name, auto_class in auto_classes.items()})
        for source, target in ((first, second), (second, third)):
            cache = {"HF_MODULES_CACHE": str(target) + "-modules", "HF_HOME": str(root / "home")}
            run_python(WITHOUT_PACKAGE, source, target, classes, alone, env=cache, blocked=True)
        folders[family] = first, second, third
    return folders


def results_of(folder):
    return torch.load(folder / "results.pt", weights_only=False)


@torch.no_grad()
def outputs_here(family, kind, folder):
    model = model_class(family, kind).from_pretrained(folder)
    return model(**torch.load(folder / "inputs.pt"))[0]


@families
@kinds
def test_equal_outputs_without_the_package(saved, family, kind):
    first, second, _ = saved[family]
    result = results_of(second)[kind]
    assert result["class"] == model_class(family, kind).__name__
    assert all(module.startswith("transformers_modules.") for module in result["modules"])
    assert torch.equal(result["outputs"], outputs_here(family, kind, first / kind))


@families
@kinds
def test_equal_outputs_after_saving_again_without_the_package(saved, family, kind):
    first, second, third = saved[family]
    expected = outputs_here(family, kind, first / kind)
    assert torch.equal(results_of(third)[kind]["outputs"], expected)
    assert torch.equal(outputs_here(family, kind, second / kind), expected)


@pytest.mark.parametrize(("family", "variant"), FAMILY_OWN_VARIANTS)
def test_equal_outputs_of_every_variant_without_the_package(saved, family, variant):
    first, second, third = saved[family]
    expected = outputs_here(family, "base", first / variant)
    for folder in (second, third):
        assert torch.equal(results_of(folder)[variant]["outputs"], expected)


@families
def test_one_checkpoint_loads_into_every_class_of_its_auto_map(saved, family):
    first, second, _ = saved[family]
    results = results_of(second)
    embedding = model_class(family, "mlm").from_pretrained(first / "mlm").get_input_embeddings().weight
    auto_map = json.loads((first / "mlm" / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", *(auto_class.__name__ for auto_class in AUTO_CLASSES.values())}
    for auto_class, reference in auto_map.items():
        assert results[auto_class] == reference.split(".")[-1]
        if auto_class != "AutoConfig":
            assert torch.equal(results[auto_class + " embedding"], embedding), auto_class


@families
def test_a_causal_checkpoint_generates_the_same_without_the_package(saved, family):
    """Also after it was saved again there; and its trunk has the same states."""
    classes = FAMILIES[family]
    for folder, results in zip(saved[family], saved[family][1:], strict=False):
        model = AutoModelForCausalLM.from_pretrained(folder / "causal")
        assert type(model) is classes.causal_lm
        prompt, result = torch.load(folder / "causal" / "inputs.pt"), results_of(results)["causal"]
        assert result["classes"] == [classes.causal_lm.__name__, classes.causal_model.__name__]
        assert all(module.startswith("transformers_modules.") for module in result["modules"])
        with torch.no_grad():
            assert torch.equal(result["outputs"], model(**prompt).logits)
            assert torch.equal(result["states"], model.base_model(**prompt).last_hidden_state)
            generated = model.generate(**prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False)
        assert torch.equal(result["generated"], generated)


@families
@kinds
def test_with_the_package_no_flag_is_needed(saved, family, kind):
    for folder in saved[family]:
        config = AutoConfig.from_pretrained(folder / kind)
        model = AUTO_CLASSES[kind].from_pretrained(folder / kind)
        assert type(config) is FAMILIES[family].config
        assert type(model) is model_class(family, kind)


@families
def test_pre_training_class_is_the_masked_lm(saved, family):
    model = AutoModelForPreTraining.from_pretrained(saved[family][0] / "mlm")
    assert type(model) is FAMILIES[family].masked_lm


@families
def test_without_package_and_flag_the_error_names_the_flag(saved, family):
    assert "trust_remote_code=True" in results_of(saved[family][1])["refused"]


@families
@kinds
def test_the_configuration_is_the_same_in_every_folder(saved, family, kind):
    first, second, third = (json.loads((folder / kind / "config.json").read_text()) for folder in saved[family])
    assert first == second == third
    assert "auto_map" in first and first["architectures"] == [model_class(family, kind).__name__]


@families
@kinds
def test_the_tokenizer_loads_with_and_without_the_package(saved, family, kind):
    expected = tiny_tokenizer()(TEXT)["input_ids"]
    first, second, third = saved[family]
    assert results_of(second)[kind]["tokens"] == results_of(third)[kind]["tokens"] == expected
    assert results_of(second)[kind]["tokenizer"] == "RobertaTokenizer"
    tokenizer = AutoTokenizer.from_pretrained(first / kind)
    assert tokenizer(TEXT)["input_ids"] == expected and tokenizer.model_max_length == 64


@families
def test_a_tokenizer_without_its_class_name_is_found_by_the_model_type(saved, family, tmp_path):
    # As authors publish it: vocabulary and merges only.
    state = json.loads((saved[family][0] / "mlm" / "tokenizer.json").read_text())["model"]
    (tmp_path / "config.json").write_text((saved[family][0] / "mlm" / "config.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is transformers.RobertaTokenizer
    assert tokenizer(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]


@families
def test_a_folder_carries_only_its_own_family(saved, family):
    own, others = code_name(family), [code_name(name) for name in FAMILIES if name != family]
    for folder in saved[family]:
        for kind in MODELS:
            code = {path.stem for path in (folder / kind).glob("*.py")}
            assert {f"modeling_{own}", f"attention_{own}", f"configuration_{own}", "modeling_base"} <= code
            assert not [name for name in code if name.endswith(tuple(f"_{other}" for other in others))]
            assert not [name for name in code if "causal" in name]
            assert code & {name for row in ROWS.values() for name in row.modules} == set(ROWS[family].modules)


@families
def test_a_folder_carries_what_its_model_needs_and_no_more(saved, family):
    """No decoder beside an encoder, no task heads beside a decoder, no warm start anywhere, and not many lines."""
    first = saved[family][0]
    for kind in (*MODELS, "causal"):
        files = {path.stem: len(path.read_text().splitlines()) for path in (first / kind).glob("*.py")}
        assert not {"families", "positions"} & files.keys()
        assert not [name for name in files if name.startswith("warm_start")]
        assert {"modeling_encoder", "modeling_decoder", "state"} & files.keys() == (
            {"modeling_decoder", "state"} if kind == "causal" else {"modeling_encoder"}
        )
        assert sum(files.values()) <= 3300


@families
def test_a_configuration_alone_carries_its_code(saved, family):
    assert results_of(saved[family][1])["configuration alone"] == (FAMILIES[family].config.__name__, 48)


def test_importing_the_package_loads_nothing_heavy():
    # Beyond what `from transformers import AutoModel, PreTrainedModel` and torch bring anyway.
    code = """
import sys
import torch
from transformers import AutoModel, PreTrainedModel
AutoModel.from_config, PreTrainedModel.from_pretrained
before = {name.split(".")[0] for name in sys.modules}
import luna_hf
for family in luna_hf.FAMILIES.values():
    family.base_model(family.config(num_hidden_layers=1, hidden_size=12, vocab_size=9, intermediate_size=12))
print(*{name.split(".")[0] for name in sys.modules} - before)
"""
    loaded = set(run_python(code, env={"CUDA_VISIBLE_DEVICES": ""}).split())
    heavy = {"accelerate", "datasets", "flash_attn", "kernels", "pandas", "peft", "sentence_transformers", "triton"}
    assert "luna_hf" in loaded and not loaded & (heavy | {"matplotlib", "pyarrow", "scipy", "sklearn", "wandb"})
