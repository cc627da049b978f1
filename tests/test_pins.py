"""The code computes what `record_pins.py` recorded, to 1e-12 in float64, and loads what was saved then."""

import itertools

import pin_folders
import pytest
import torch
from helpers import slow_unless
from pins import CASES, compute, differences, expected, fill, make_model
from safetensors.torch import load_file


def path(name, backend, gradients):
    """A case of `test_outputs`: with gradients, or as inference, which takes other code paths."""
    fast = [("eager", True)]
    if CASES[name].kind in ("Model", "ForCausalLM"):  # heads do not depend on the backend
        fast.append(("sdpa", False))
    return slow_unless((backend, gradients) in fast, name, backend, gradients)


PATHS = [path(*values) for values in itertools.product(CASES, ("eager", "sdpa"), (True, False))]
loads = pytest.mark.parametrize(
    ("folder", "case", "auto"),
    [pytest.param(*load, id=f"{load[0].name}-{load[2]}") for load in pin_folders.loads()],
)


@pytest.mark.parametrize(("name", "backend", "gradients"), PATHS)
def test_outputs(name, backend, gradients):
    values = compute(CASES[name], backend, gradients=gradients)
    assert not differences(values, expected(CASES[name], backend, gradients=gradients))


@loads
def test_folders_load(folder, case, auto):
    _, facts, outputs = pin_folders.load_folder(folder, case, auto)
    pinned_facts, pinned_outputs = pin_folders.expected(folder, auto)
    assert facts == pinned_facts
    assert not differences(outputs, pinned_outputs)


@pytest.mark.parametrize("folder", [folder for folder, _ in pin_folders.saved_cases()], ids=lambda folder: folder.name)
def test_own_classes_take_every_weight_and_add_none(folder):
    case, auto = next((case, auto) for own, case, auto in pin_folders.loads() if own == folder)
    model, facts, outputs = pin_folders.load_folder(folder, case, auto)
    assert not facts["missing_keys"] and not facts["unexpected_keys"] and not facts["mismatched_keys"]
    assert outputs
    stored, loaded = load_file(folder / "model.safetensors"), model.state_dict()
    for name, tensor in stored.items():
        assert torch.equal(loaded.pop(name), tensor.double())
    assert loaded.keys() <= {"lm_head.weight", "lm_head.decoder.weight", "lm_head.decoder.bias"}  # tied, stored once


# ---- sensitivity of the comparison ----


def test_a_small_difference_of_one_weight_is_noticed(monkeypatch):
    case = CASES["LunaModel-default"]

    def disturb(model):
        fill(model)
        with torch.no_grad():
            model.encoder.layer[0].attention.self.query.weight[0, 0] += 1e-9
        return model

    monkeypatch.setattr("pins.fill", disturb)
    lines = differences(compute(case), expected(case))
    assert any(line.startswith("long.last_hidden_state: differs") for line in lines)
    assert any(line.startswith("gradient of embeddings.word_embeddings.weight: differs") for line in lines)


def test_a_renamed_parameter_is_noticed(monkeypatch):
    case = CASES["AbcModel-default"]

    def rename(case, **fields):
        model = make_model(case, **fields)
        model.embeddings.renamed = model.embeddings._modules.pop("LayerNorm")
        model.embeddings.__dict__["LayerNorm"] = model.embeddings.renamed
        return model

    monkeypatch.setattr("pins.make_model", rename)
    lines = differences(compute(case), expected(case))
    assert {"LayerNorm", "renamed"} <= {line.split(".")[1] for line in lines if "gradient of embeddings." in line}
