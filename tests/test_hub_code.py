"""A saved folder carries its own code: it loads where luna_hf is missing, and needs no flag where it is installed.

A folder's code depends on the family and on encoder or decoder alone. One process without the package loads every
folder and saves it again; all tests here read its results.
"""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers
from helpers import (
    HEADS,
    code_name,
    inputs_for,
    model_class,
    run_python,
    tiny_causal_model,
    tiny_model,
    tiny_seq2seq_model,
    tiny_tokenizer,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForTextEncoding,
    AutoTokenizer,
    pipeline,
)

from luna_hf import FAMILIES
from luna_hf.hub import defined, gather

KINDS_OF_CODE = ("masked_lm", "causal_lm", "seq2seq_lm")

families = pytest.mark.parametrize("family", list(FAMILIES))

KINDS = {"mlm": AutoModelForMaskedLM, "sequence": HEADS["sequence"]}
AUTO_CLASSES = {"base": AutoModel, "mlm": AutoModelForMaskedLM, **HEADS}
TEXT = "the quick brown fox"

# Runs without luna_hf: loads every folder from its own code, computes, and saves it again.
WITHOUT_PACKAGE = """
import json, logging.handlers
import torch, transformers
logged = logging.handlers.BufferingHandler(10**6)
logging.getLogger("transformers").addHandler(logged)
root, families, kinds = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
results = {}

def load(auto_class, folder, **fields):
    return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, **fields)

def run(family):
    for kind, auto_class in kinds.items():
        folder = f"{root}/{family}/saved/{kind}"
        config, model, tokenizer = load("AutoConfig", folder), load(auto_class, folder), load("AutoTokenizer", folder)
        with torch.no_grad():
            outputs = model(**torch.load(f"{root}/{family}/inputs.pt"))[0]
        results[family, kind] = {
            "class": type(model).__name__,
            "modules": [type(config).__module__, type(model).__module__],
            "outputs": outputs,
            "tokens": tokenizer("the quick brown fox")["input_ids"],
            "tokenizer": type(tokenizer).__name__,
        }
        model.save_pretrained(f"{root}/{family}/again/{kind}")
        tokenizer.save_pretrained(f"{root}/{family}/again/{kind}")
    folder, prompt = f"{root}/{family}/saved/causal", torch.load(f"{root}/{family}/inputs.pt")
    causal, trunk = load("AutoModelForCausalLM", folder), load("AutoModel", folder)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    with torch.no_grad():
        generated = causal.generate(**prompt, **options, cache_implementation="static", disable_compile=True)
        results[family, "causal"] = {
            "classes": [type(causal).__name__, type(trunk).__name__],
            "modules": [type(causal).__module__, type(trunk).__module__],
            "outputs": causal(**prompt).logits,
            "states": trunk(**prompt).last_hidden_state,
            "generated": generated.sequences,
            "cache": type(generated.cache).__name__,
        }
    causal.save_pretrained(f"{root}/{family}/again/causal")
    folder = f"{root}/{family}/saved/seq2seq"
    translator, whole = load("AutoModelForSeq2SeqLM", folder), load("AutoModel", folder)
    found = translator.generate(**prompt, num_beams=2, max_new_tokens=9)
    results[family, "seq2seq"] = type(translator).__name__, type(whole).__name__, found

for family in families:
    alone = load("AutoConfig", f"{root}/{family}/configuration")
    results[family, "configuration"] = type(alone).__name__, alone.hidden_size
    run(family)
# One checkpoint, every class that its configuration offers.
mlm = f"{root}/{families[0]}/saved/mlm"
results["auto_map"] = {name: type(load(name, mlm)).__name__ for name in load("AutoConfig", mlm).auto_map}
results["longer"] = load("AutoModel", mlm, max_position_embeddings=99).config.max_position_embeddings
results["warnings"] = {record.getMessage() for record in logged.buffer if record.levelno >= logging.WARNING}
assert sys.modules["luna_hf"] is None
torch.save(results, f"{root}/results.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder per family with what was saved with the package and, in `again`, without it; and all results."""
    root, tokenizer = tmp_path_factory.mktemp("hub"), tiny_tokenizer()
    for family in FAMILIES:
        options = {"vocab_size": len(tokenizer), "conv_kernel_size": 3}
        poolings = {"sequence": {"classifier_pooling": FAMILIES[family].config.choices["classifier_pooling"][-1]}}
        for kind in KINDS:
            model = tiny_model(family, kind, **options, **poolings.get(kind, {}))
            model.save_pretrained(root / family / "saved" / kind)
            tokenizer.save_pretrained(root / family / "saved" / kind)
        tiny_causal_model(family, **options).save_pretrained(root / family / "saved" / "causal")
        tiny_seq2seq_model(family).save_pretrained(root / family / "saved" / "seq2seq")
        model.config.save_pretrained(root / family / "configuration")
        torch.save(inputs_for("base"), root / family / "inputs.pt")
    kinds = json.dumps({kind: auto_class.__name__ for kind, auto_class in KINDS.items()})
    cache = {"HF_MODULES_CACHE": str(root / "modules"), "HF_HOME": str(root / "home")}
    run_python(WITHOUT_PACKAGE, root, json.dumps(list(FAMILIES)), kinds, env=cache, blocked=True)
    return root, torch.load(root / "results.pt", weights_only=False)


@families
@torch.no_grad()
def test_equal_outputs_without_the_package(saved, family):
    root, results = saved
    inputs = torch.load(root / family / "inputs.pt")
    for kind in KINDS:
        expected, result = model_class(family, kind), results[family, kind]
        assert result["class"] == expected.__name__
        assert all(module.startswith("transformers_modules.") for module in result["modules"])
        for folder in ("saved", "again"):
            model = expected.from_pretrained(root / family / folder / kind)
            assert torch.equal(result["outputs"], model(**inputs)[0]), (folder, kind)
        assert result["tokens"] == tiny_tokenizer()(TEXT)["input_ids"]
        assert result["tokenizer"] == "RobertaTokenizer"


@families
def test_one_checkpoint_loads_into_every_class_of_its_auto_map(saved, family):
    """In the first family; the others have the same names, and their classes are in the file."""
    root, results = saved
    auto_map = json.loads((root / family / "saved" / "mlm" / "config.json").read_text())["auto_map"]
    more = ("AutoConfig", "AutoModelForPreTraining", "AutoModelForTextEncoding")
    assert set(auto_map) == {*more, *(auto_class.__name__ for auto_class in AUTO_CLASSES.values())}
    for file, _, name in (reference.partition(".") for reference in auto_map.values()):
        assert f"class {name}(" in (root / family / "saved" / "mlm" / f"{file}.py").read_text()
    if family == next(iter(FAMILIES)):
        assert results["auto_map"] == {name: reference.split(".")[-1] for name, reference in auto_map.items()}
        assert results["longer"] == 99


def test_loading_with_the_flag_does_not_warn_of_the_flag(saved):
    warnings = saved[1]["warnings"]
    assert warnings and not [warning for warning in warnings if "trust_remote_code" in warning]


@families
@torch.no_grad()
def test_a_causal_checkpoint_generates_the_same_without_the_package(saved, family):
    root, results = saved
    classes, prompt = FAMILIES[family], torch.load(root / family / "inputs.pt")
    for source in ("saved", "again"):
        model = AutoModelForCausalLM.from_pretrained(root / family / source / "causal")
        result = results[family, "causal"]
        assert type(model) is classes.causal_lm
        assert result["classes"] == [classes.causal_lm.__name__, classes.causal_model.__name__]
        assert result["cache"] == "MemoryCache"
        assert all(module.startswith("transformers_modules.") for module in result["modules"])
        assert torch.equal(result["outputs"], model(**prompt).logits)
        assert torch.equal(result["states"], model.base_model(**prompt).last_hidden_state)
        generated = model.generate(**prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False)
        assert torch.equal(result["generated"], generated)


@families
@torch.no_grad()
def test_an_encoder_decoder_generates_the_same_without_the_package(saved, family):
    root, results = saved
    row, model = FAMILIES[family], tiny_seq2seq_model(family)
    *classes, generated = results[family, "seq2seq"]
    assert classes == [row.seq2seq_lm.__name__, row.seq2seq_model.__name__]
    inputs = torch.load(root / family / "inputs.pt")
    assert torch.equal(generated, model.generate(**inputs, num_beams=2, max_new_tokens=9))


@families
def test_with_the_package_no_flag_is_needed(saved, family):
    for source in ("saved", "again"):
        folder = saved[0] / family / source / "mlm"
        assert type(AutoConfig.from_pretrained(folder)) is FAMILIES[family].config
        assert type(AutoModelForPreTraining.from_pretrained(folder)) is FAMILIES[family].masked_lm
        assert type(AutoModelForTextEncoding.from_pretrained(folder)) is FAMILIES[family].base_model
        for kind, auto_class in AUTO_CLASSES.items():
            assert type(auto_class.from_pretrained(folder)) is model_class(family, kind)


@families
@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_is_the_same_in_every_folder(saved, family, kind):
    folders = [saved[0] / family / source / kind for source in ("saved", "again")]
    first, second = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert first == second
    assert "auto_map" in first and first["architectures"] == [model_class(family, kind).__name__]


@families
def test_a_folder_without_a_tokenizer_is_refused(family, tmp_path):
    tiny_model(family, "sequence").save_pretrained(tmp_path)
    for load in (AutoTokenizer.from_pretrained, partial(pipeline, "text-classification")):
        with pytest.raises(OSError, match="has no tokenizer"):
            load(str(tmp_path))


@families
def test_a_tokenizer_without_its_class_name_is_found_by_the_model_type(saved, family, tmp_path):
    # As authors publish it: vocabulary and merges only.
    folder = saved[0] / family / "saved" / "mlm"
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 64
    state = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is transformers.RobertaTokenizer
    assert tokenizer(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]


@families
@pytest.mark.parametrize("kind", [*KINDS, "causal"])
def test_a_folder_carries_two_files_of_code(saved, family, kind):
    """The same with the package and without it, and in the repository's format."""
    files = {f"{name}_{code_name(family)}.py" for name in ("configuration", "modeling")}
    first, second = (saved[0] / family / source / kind for source in ("saved", "again"))
    assert {path.name for path in first.glob("*.py")} == {path.name for path in second.glob("*.py")} == files
    assert all((first / name).read_text() == (second / name).read_text() for name in files)
    for command in (["check", "--select", "E,F,W"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--isolated", "--line-length=120", first], check=True)


@families
@pytest.mark.parametrize("kind", KINDS_OF_CODE)
def test_no_name_means_two_things_in_a_file(family, kind):
    """What is joined from several modules defines and imports each name once, or alike."""
    model_class = getattr(FAMILIES[family], kind)
    room = tuple(model_class.__module__.split(".")[1:-1])
    modules, configuration = gather((*room, "modeling")), gather((*room, "configuration"))
    meanings = {name: {"configuration"} for module in configuration for name in defined(module)}
    for module in modules:
        if module in configuration:
            continue
        for name in defined(module):
            meanings.setdefault(name, set()).add(module.path)
        for name, imported in module.externals.items():
            meanings.setdefault(name, set()).add(imported)
    assert not {name: meant for name, meant in meanings.items() if len(meant) > 1}


@families
def test_code_that_no_model_of_a_file_runs_is_left_out(saved, family):
    encoder, causal = (
        (saved[0] / family / "saved" / kind / f"modeling_{code_name(family)}.py").read_text()
        for kind in ("mlm", "causal")
    )
    assert "class MaskedLMHead" in encoder and "class MaskedLMHead" not in causal
    assert "class MemoryCache(" in causal and "class MemoryCache(" not in encoder
    for name in FAMILIES:
        other = FAMILIES[name].config.__name__
        assert (f"{other}\n" in encoder or f"{other}," in encoder) == (name == family)


@families
def test_a_loaded_configuration_is_saved_with_the_code_of_its_models(saved, family, tmp_path):
    folder = saved[0] / family / "saved" / "mlm"
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    for name in ("configuration", "modeling"):
        file = f"{name}_{code_name(family)}.py"
        assert (tmp_path / file).read_text() == (folder / file).read_text()


@families
def test_a_configuration_alone_carries_its_code(saved, family):
    assert saved[1][family, "configuration"] == (FAMILIES[family].config.__name__, 48)


@families
def test_a_configuration_of_earlier_versions_names_the_files_it_has(family, tmp_path):
    """They had one file for encoders and one for decoders; a user's own file stays named."""
    row, own = FAMILIES[family], code_name(family)
    config = row.config(is_decoder=True)
    config.auto_map = {
        "AutoModelForCausalLM": f"modeling_{own}_causal.{row.causal_lm.__name__}",
        "AutoModelForMaskedLM": f"modeling_{own}.{row.masked_lm.__name__}",
        "AutoModelForTokenClassification": "mine.Tagger",
    }
    config.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map.pop("AutoModelForTokenClassification") == "mine.Tagger"
    for file, _, name in (entry.partition(".") for entry in auto_map.values()):
        assert f"class {name}(" in (tmp_path / f"{file}.py").read_text()


def test_importing_the_package_loads_nothing_heavy():
    # Beyond what torch and `from transformers import AutoModel, PreTrainedModel` load.
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
