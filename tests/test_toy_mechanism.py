"""CONTRIBUTING.md, "Adding a mechanism", taken at its word: the files in `tests/toy/`, laid over a copy of this
repository, and the rows in `ROWS` make a family that models, checkpoints and the shared tests know.

Whatever uses the new family runs in processes that import the copy.
"""

import ast
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
# Pure functions are maths; the lines of all else are counted.
MATHS = ("src/luna_hf/attention_toy.py", "tests/reference/toy.py")
MOST_LINES = 200

# What is added to files that exist: each text before the place where it belongs.
ROWS = {
    "src/luna_hf/families.py": [
        ("    modeling_abc,\n", "    configuration_toy,\n"),
        (")\nfrom .configuration_abc", "    modeling_toy,\n    modeling_toy_causal,\n"),
        ("from .modeling_abc import *", "from .configuration_toy import *\n"),
        ("from .tokenization_fairseq", "from .modeling_toy import *\nfrom .modeling_toy_causal import *\n"),
        ("    )\n}\n", "        Family(ToyConfig, modeling_toy, modeling_toy_causal),\n"),
        ("__all__ += modeling_abc.__all__", "__all__ += configuration_toy.__all__\n"),
        ("__all__ += modeling_abc.__all__", "__all__ += modeling_toy.__all__\n"),
        ("__all__ += modeling_abc.__all__", "__all__ += modeling_toy_causal.__all__\n"),
    ],
    "tests/variants.py": [
        ("from transformers import", "from reference import toy\n"),
        ("ROWS: dict", 'TOY = Variants(causal_reference=toy.attend, deviation={"centres": 1.0})\n\n'),
        ('"luna": LUNA', '"toy": TOY, '),
    ],
}

# Shared tests that every run repeats on the new family, and what is left out of them for its time.
TELLING = ("reference_toy", "padding", "model_contract", "configuration", "saving", "causal_models", "generation")
LONG = "4096"
LIBRARY_LONG = "compile or overfit or bc_torch_dtype or eager_matches_sdpa"

# Runs with the copy's package: what a user does. Saves an encoder and a causal model, and what they compute.
WITH_PACKAGE = """
import sys
import torch
from helpers import TINY, inputs_for, padded_batch, randomise, tiny_config_for
from transformers import (
    AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, RobertaConfig,
    RobertaForMaskedLM,
)
from luna_hf import ToyCausalModel, ToyForCausalLM, ToyForMaskedLM, ToyForSequenceClassification, ToyModel

def learn(auto_class, wanted, inputs):
    torch.manual_seed(0)
    model = auto_class.from_config(tiny_config_for("toy")).double()
    assert type(model) is wanted
    randomise(model)
    model.train()(**inputs).loss.backward()
    for name, parameter in model.named_parameters():
        # A softmax does not see a constant that is added to all keys.
        assert parameter.grad is not None and (parameter.grad.any() or name.endswith("key.bias")), name
    return model.eval()

encoder = learn(AutoModelForMaskedLM, ToyForMaskedLM, inputs_for("mlm", labels=True))
learn(AutoModelForSequenceClassification, ToyForSequenceClassification, inputs_for("sequence", labels=True))
rows = padded_batch([9, 14, 3])
ids, mask = rows["input_ids"].flip(1), rows["attention_mask"].flip(1)  # padded on the left
causal = learn(AutoModelForCausalLM, ToyForCausalLM, {**rows, "labels": rows["input_ids"]})
causal.generation_config.eos_token_id = None
torch.set_grad_enabled(False)

# Padding changes nothing.
states = encoder.toy(ids, attention_mask=mask).last_hidden_state
for row, kept, own in zip(ids, mask == 1, states, strict=True):
    torch.testing.assert_close(own[kept], encoder.toy(row[kept][None]).last_hidden_state[0], rtol=0, atol=1e-12)

# Greedy text is that of every row alone, and the logits of the steps are those of the whole text at once.
options = {"max_new_tokens": 12, "do_sample": False}
out = causal.generate(ids, attention_mask=mask, **options, return_dict_in_generate=True, output_logits=True)
for row, kept, text in zip(ids, mask == 1, out.sequences, strict=True):
    assert torch.equal(causal.generate(row[kept][None], **options)[0, -12:], text[-12:])
whole = causal(out.sequences, attention_mask=torch.cat([mask, torch.ones(3, 12)], 1)).logits[:, -13:-1]
torch.testing.assert_close(torch.stack(out.logits, 1), whole.float(), rtol=0, atol=1e-5)  # `generate` keeps float32

source = RobertaForMaskedLM(RobertaConfig(**{**TINY, "max_position_embeddings": 66}))
warm = ToyForMaskedLM.from_roberta(source)
assert all(torch.equal(warm.toy.get_parameter(name), weight) for name, weight in source.roberta.named_parameters())
assert warm(**inputs_for("mlm", labels=True)).loss.isfinite()

folder = sys.argv[1]
encoder.save_pretrained(f"{folder}/encoder")
causal.save_pretrained(f"{folder}/causal")
assert type(AutoModel.from_pretrained(f"{folder}/encoder")) is ToyModel
assert type(AutoModel.from_pretrained(f"{folder}/causal")) is ToyCausalModel
results = {"logits": encoder(ids, attention_mask=mask).logits, "text": out.sequences}
torch.save({"inputs": {"input_ids": ids, "attention_mask": mask}, **results}, f"{folder}/results.pt")
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


def insert(path, additions):
    text = path.read_text()
    for place, addition in additions:
        assert text.count(place) == 1, f"{path.name}: {place!r}"
        text = text.replace(place, addition + place)
    path.write_text(text)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository with the mechanism in it."""
    root = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", TOY.name, Path(__file__).name)
    for folder in ("src", "tests", "conversion", "training", "benchmarks", "experiments", "model_cards"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml")):
        shutil.copy(path, root)
    # Where transformers' own tests are kept once they have been fetched.
    (ROOT / ".cache").mkdir(exist_ok=True)
    (root / ".cache").symlink_to(ROOT / ".cache")
    shutil.copytree(TOY, root, ignore=ignored, dirs_exist_ok=True)
    for name, additions in ROWS.items():
        insert(root / name, additions)
    return root


def run_tests(repository, *words):
    """Run tests of the copy with its package; fail with their report, skip if there is nothing to run them with."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={repository}-tests", *words]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    if result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and "OWN TESTS WERE NOT RUN" in result.stdout:
        pytest.skip("no package index to fetch transformers' own tests from")
    assert result.returncode == 0, result.stdout[-6000:]


def modules(root):
    """The text of every file of the package and the tests, without this one and the toy's folder."""
    paths = [path for folder in ("src", "tests") for path in (root / folder).rglob("*.py")]
    paths = [path for path in paths if TOY not in path.parents and path.name != Path(__file__).name]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def test_the_files_are_those_that_contributing_lists(repository):
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding a mechanism")[1].split("\n## ")[0]
    listed = {name.replace("<name>", "toy") for name in re.findall(r"`([\w/]*<name>\w*\.py)`", section)}
    optional = {"warm_start_toy.py"}
    assert {name.removeprefix("src/luna_hf/") for name in FILES} == listed - optional
    before, after = modules(ROOT), modules(repository)
    assert after.keys() - before.keys() == set(FILES)
    assert {name for name in before if before[name] != after[name]} == set(ROWS)
    assert all(f"`{name.removeprefix('src/luna_hf/')}`" in section for name in ROWS)


def test_it_costs_few_lines(capsys):
    lines = {name: len((TOY / name).read_text().splitlines()) for name in FILES}
    for name in MATHS:
        functions = [node for node in ast.parse((TOY / name).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert functions
        lines[name] -= sum(node.end_lineno - node.lineno + 1 for node in functions)
    rows = sum(len(addition.splitlines()) for additions in ROWS.values() for _, addition in additions)
    mechanism = rows + sum(count for name, count in lines.items() if name.startswith("src/"))
    with capsys.disabled():
        print(
            f"\nA mechanism costs {mechanism} lines besides its maths, {rows} of them in tables; "
            f"its reference and the test of it another {sum(lines.values()) + rows - mechanism}."
        )
    assert mechanism <= MOST_LINES


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_it_follows_the_rules_of_the_repository(repository, command):
    words = [*command.split(), "src", "tests"]
    result = subprocess.run([sys.executable, "-m", "ruff", *words], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.fixture(scope="module")
def folders(repository, tmp_path_factory):
    """Folders of an encoder and a causal model, saved with the copy's package after it has been put to use."""
    root = tmp_path_factory.mktemp("saved")
    run_python(WITH_PACKAGE, root, env={"PYTHONPATH": os.pathsep.join(str(repository / f) for f in ("src", "tests"))})
    return root


def test_it_loads_without_the_package(folders, tmp_path):
    said = run_python(WITHOUT_PACKAGE, folders, env={"HF_MODULES_CACHE": str(tmp_path)}, blocked=True)
    assert said.split() == ["ToyForMaskedLM", "ToyForCausalLM"]


def test_a_folder_carries_what_its_model_needs(folders):
    encoder, causal = ({path.stem for path in (folders / kind).glob("*.py")} for kind in ("encoder", "causal"))
    assert {"configuration_toy", "attention_toy", "modeling_toy"} <= encoder
    assert {"configuration_toy", "attention_toy_causal", "modeling_toy_causal"} <= causal
    assert not [name for name in encoder if "causal" in name or name == "state"]
    assert not causal & {"modeling_toy", "modeling_encoder"}
    others = tuple(f"_{code_name(family)}" for family in FAMILIES)
    assert not [name for name in encoder | causal if name.startswith("warm_start") or name.endswith(others)]


def test_shared_tests_know_it(repository):
    run_tests(repository, "-k", f"toy and not ({LONG})", *(f"tests/test_{name}.py" for name in TELLING))


def test_the_tests_of_transformers_know_it(repository):
    run_tests(repository, "-k", f"(ToyDefault or ToyCausalDefault) and not ({LIBRARY_LONG})", "tests/library")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_shared_test_knows_it(repository):
    """Those that take a family, and those that go through all of them."""
    run_tests(repository, "-k", "toy", "-m", "not gpu", "tests")
    shared = [name for name, text in modules(repository).items() if "/test_" in name and "FAMIL" in text]
    others = " and ".join(f"not {code_name(family)}" for family in FAMILIES)
    run_tests(repository, "-k", f"not toy and {others}", "-m", "not slow and not gpu", *shared)
