"""The promise of CONTRIBUTING.md, "Adding a mechanism": the files in `tests/toy/` and the rows in `ROWS`, added to a
copy of this repository, make a family that models, checkpoints and the shared tests support.

The new family runs in processes that import the copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import FAMILIES, ROOT, code_name, run_python

TOY = ROOT / "tests" / "toy"
FILES = sorted(str(path.relative_to(TOY)) for path in TOY.rglob("*.py"))

# Additions to existing files, each inserted before the given text.
ROWS = {
    "src/luna_hf/registry.py": [
        ("from .families.warm_start_rules", "from .families.toy import modeling as toy\n"),
        ("from .families.warm_start_rules", "from .families.toy.configuration import *\n"),
        ("from .families.warm_start_rules", "from .families.toy.modeling import *\n"),
        ("    )\n}\n", "        Family(ToyConfig, toy),\n"),
        ("__all__ += abc.__all__", '__all__ += ["ToyConfig", *toy.__all__]\n'),
    ],
    "tests/variants.py": [
        ("from transformers import", "from reference import toy\n"),
        ("ROWS: dict", 'TOY = Variants(causal_reference=toy.attend, deviation={"centres": 1.0})\n\n'),
        ('"luna": LUNA', '"toy": TOY, '),
    ],
}

# Shared tests that every suite runs on the new family; the slow suite runs them all.
TELLING = ("reference_toy", "padding", "configuration", "causal_models")

# A test added to the copy: starts from RoBERTa, saves an encoder and a causal model, and what they compute.
IN_USE = """
import os
import torch
from helpers import TINY, padded_batch, tiny_causal_model, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM
from luna_hf import ToyCausalModel, ToyForCausalLM, ToyForMaskedLM, ToyModel


@torch.no_grad()
def test_toy_in_use():
    source = RobertaForMaskedLM(RobertaConfig(**{**TINY, "max_position_embeddings": 66}))
    warm = ToyForMaskedLM.from_roberta(source)
    for name, weight in source.roberta.named_parameters():
        assert torch.equal(warm.toy.get_parameter(name), weight), name

    encoder, causal = tiny_model("toy", "mlm"), tiny_causal_model("toy")
    assert type(AutoModelForMaskedLM.from_config(encoder.config)) is ToyForMaskedLM
    assert type(AutoModelForCausalLM.from_config(causal.config)) is ToyForCausalLM
    causal.generation_config.eos_token_id = None
    inputs = {name: tensor.flip(1) for name, tensor in padded_batch([9, 14, 3]).items()}  # padded on the left
    folder = os.environ["SAVED"]
    encoder.save_pretrained(f"{folder}/encoder")
    causal.save_pretrained(f"{folder}/causal")
    assert type(AutoModel.from_pretrained(f"{folder}/encoder")) is ToyModel
    assert type(AutoModel.from_pretrained(f"{folder}/causal")) is ToyCausalModel
    text = causal.generate(**inputs, max_new_tokens=12, do_sample=False)
    torch.save({"inputs": inputs, "logits": encoder(**inputs).logits, "text": text}, f"{folder}/results.pt")
"""

WITHOUT_PACKAGE = """
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
folder = sys.argv[1]
expected = torch.load(f"{folder}/results.pt")
encoder = AutoModelForMaskedLM.from_pretrained(f"{folder}/encoder", trust_remote_code=True)
causal = AutoModelForCausalLM.from_pretrained(f"{folder}/causal", trust_remote_code=True)
assert sys.modules["luna_hf"] is None
with torch.no_grad():
    assert torch.equal(encoder(**expected["inputs"]).logits, expected["logits"])
assert torch.equal(causal.generate(**expected["inputs"], max_new_tokens=12, do_sample=False), expected["text"])
print(type(encoder).__name__, type(causal).__name__)
"""

COPIED = ("src", "tests", "benchmarks", "conversion", "docs", "examples", "experiments", "model_cards", "training")


def insert(path, additions):
    text = path.read_text()
    for place, addition in additions:
        assert text.count(place) == 1, f"{path.name}: {place!r}"
        text = text.replace(place, addition + place)
    path.write_text(text)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository with the mechanism added."""
    root = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", TOY.name, Path(__file__).name)
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "CITATION.cff", ROOT / "mkdocs.yml"):
        shutil.copy(path, root)
    # The cache of transformers' own tests.
    (ROOT / ".cache").mkdir(exist_ok=True)
    (root / ".cache").symlink_to(ROOT / ".cache")
    shutil.copytree(TOY, root, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name, additions in ROWS.items():
        insert(root / name, additions)
    return root


def run_tests(repository, *words, **env):
    """Run tests of the copy with its package; fail with their report."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={repository}-tests", *words]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), **env}
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:]


def modules(root):
    """The text of every file of the package and the tests, except this file and the toy's folder."""
    paths = [path for folder in ("src", "tests") for path in (root / folder).rglob("*.py")]
    paths = [path for path in paths if TOY not in path.parents and path.name != Path(__file__).name]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def test_the_files_are_those_that_contributing_lists(repository):
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding a mechanism")[1].split("\n## ")[0]
    listed = {name.replace("<name>", "toy") for name in re.findall(r"`([\w/]*<name>[\w/]*\.py)`", section)}
    optional = {"families/toy/warm_start.py"}
    assert {name.removeprefix("src/luna_hf/") for name in FILES} == listed - optional
    before, after = modules(ROOT), modules(repository)
    assert after.keys() - before.keys() == set(FILES)
    assert {name for name in before if before[name] != after[name]} == set(ROWS)
    assert all(f"`{name.removeprefix('src/luna_hf/')}`" in section for name in ROWS)


@pytest.fixture(scope="module")
def folders(repository, tmp_path_factory):
    """Folders of an encoder and a causal model, saved by the copy after its shared tests have passed."""
    root = tmp_path_factory.mktemp("saved")
    in_use = repository / "tests" / "test_toy_in_use.py"
    in_use.write_text(IN_USE)
    files = [f"tests/test_{name}.py" for name in TELLING]
    run_tests(repository, "-k", "toy", "-m", "not slow and not gpu", *files, str(in_use), SAVED=str(root))
    in_use.unlink()
    return root


def test_it_loads_without_the_package(folders, tmp_path):
    printed = run_python(WITHOUT_PACKAGE, folders, env={"HF_MODULES_CACHE": str(tmp_path)}, blocked=True)
    assert printed.split() == ["ToyForMaskedLM", "ToyForCausalLM"]


def test_a_folder_carries_two_files(folders):
    for kind in ("encoder", "causal"):
        assert {path.name for path in (folders / kind).glob("*.py")} == {"configuration_toy.py", "modeling_toy.py"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_shared_test_supports_it(repository):
    """Tests with a family as parameter, transformers' own tests, and tests that iterate over all families."""
    # The copy has no checkpoints, and its pages of the reference no entries of the toy.
    run_tests(repository, "-k", "toy or Toy", "-m", "not gpu", "tests", "--ignore=tests/test_reference_pages.py")
    own = modules(repository).items()
    shared = [name for name, text in own if "/test_" in name and "FAMIL" in text and "reference_pages" not in name]
    others = " and ".join(f"not {code_name(family)}" for family in FAMILIES)
    run_tests(repository, "-k", f"not toy and not shipped_encoder and {others}", "-m", "not slow and not gpu", *shared)
