"""A user's own head in a file beside their script: its folder names no code that it lacks, and loads again."""

import importlib
import json
import sys

import pytest
import torch
from helpers import model_class, run_python, tiny_config_for

from luna_hf import FAMILIES

FILE = """
import torch
from torch import nn
from luna_hf import {base_model}, {config}, {pretrained}, {sequence}


class OwnHead({pretrained}):
    def __init__(self, config):
        super().__init__(config)
        setattr(self, self.base_model_prefix, {base_model}(config))
        self.score = nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return self.score(self.base_model(input_ids, attention_mask).last_hidden_state[:, 0])


class Registered(OwnHead):
    pass


Registered.register_for_auto_class("AutoModelForSequenceClassification")


class Derived({sequence}):
    pass


class OwnConfig({config}):
    model_type = "own"


class WithConfig({sequence}):
    config_class = OwnConfig
"""
IDS = torch.tensor([[0, 5, 6, 2]])
ATOL = 1e-6  # the order of additions depends on the alignment of weights mapped from a file


@pytest.fixture
def user_module(family, tmp_path, monkeypatch):
    """The user's module, imported from its own folder."""
    base = model_class(family, "base")
    names = {"config": FAMILIES[family].config.__name__, "base_model": base.__name__}
    names |= {"sequence": model_class(family, "sequence").__name__}
    pretrained = base.__name__.replace("Model", "PreTrainedModel")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_heads.py").write_text(FILE.format(pretrained=pretrained, **names))
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield importlib.import_module("own_heads")
    del sys.modules["own_heads"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("in_main", [False, True], ids=["module", "script"])
@pytest.mark.parametrize("name", ["OwnHead", "Registered", "Derived"])
@torch.no_grad()
def test_it_loads_again(family, name, in_main, user_module, tmp_path, monkeypatch):
    head = getattr(user_module, name)
    if in_main:
        monkeypatch.setattr(head, "__module__", "__main__")
    model = head(tiny_config_for(family)).eval()
    model.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    # Transformers copies no file for a class of the script, or for one that is not registered.
    shipped = not in_main and name != "OwnHead"
    expected = {"AutoModelForSequenceClassification": f"own_heads.{name}"} if shipped else {}
    assert auto_map == {"AutoConfig": auto_map["AutoConfig"], **expected}
    assert all((tmp_path / f"{reference.split('.')[0]}.py").is_file() for reference in auto_map.values())
    loaded = head.from_pretrained(tmp_path)
    assert type(loaded) is head
    torch.testing.assert_close(loaded(IDS)[0], model(IDS)[0], rtol=0, atol=ATOL)


LOAD = """
import sys
import torch
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save((type(model).__name__, model(torch.tensor([[0, 5, 6, 2]]))[0]), f"{sys.argv[1]}/result.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "first"), [("Registered", ""), ("Derived", ""), ("WithConfig", "import luna_hf")])
@torch.no_grad()
def test_its_code_loads_in_a_new_process(family, name, first, user_module, tmp_path):
    head, fields = getattr(user_module, name), tiny_config_for(family).to_dict()
    model = head(head.config_class(**{**fields, "model_type": head.config_class.model_type})).eval()
    model.save_pretrained(tmp_path / "saved")
    # While luna_hf is imported, the Auto classes load its own heads for its own configs.
    run_python(first + LOAD, tmp_path / "saved", env={"HF_MODULES_CACHE": str(tmp_path / "modules")})
    loaded, outputs = torch.load(tmp_path / "saved" / "result.pt")
    assert loaded == name
    torch.testing.assert_close(outputs, model(IDS)[0], rtol=0, atol=ATOL)
