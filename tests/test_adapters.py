"""Folders of PEFT adapters, loaded by the model's own classes and by the Auto classes."""

import copy
import json

import pytest
import torch
from common.hub import push_folder, reserve_repository
from helpers import random_ids, refused, tiny_model
from hub_stub import HubStub
from transformers import AutoModelForSequenceClassification

from luna_hf import LunaForSequenceClassification
from luna_hf.scripting import write_json

peft = pytest.importorskip("peft")
LOADERS = [LunaForSequenceClassification, AutoModelForSequenceClassification]
IDS = random_ids(2, 9)


@pytest.fixture
def base(tmp_path):
    model = tiny_model("luna", "sequence")
    model.save_pretrained(tmp_path / "base")
    return model


def write_adapter(folder, bias="none", **options):
    """An adapter of the base beside the folder, with the config of its model; returns the adapted model."""
    model = LunaForSequenceClassification.from_pretrained(folder.parent / "base", **options)
    recipe = peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, bias=bias)
    adapted = peft.get_peft_model(model, recipe).eval()
    adapted.save_pretrained(folder)
    model.config.save_pretrained(folder)
    return adapted


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def other(base):
    """Another model of the same shape."""
    model = copy.deepcopy(base)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    return model


@pytest.mark.parametrize("loader", LOADERS)
def test_a_model_in_a_subfolder_is_not_the_adapter_above_it(loader, base, tmp_path):
    write_adapter(tmp_path / "adapter")
    merged = other(base)
    merged.save_pretrained(tmp_path / "adapter" / "merged")
    config = {} if loader is LunaForSequenceClassification else {"config": merged.config}
    loaded = loader.from_pretrained(tmp_path / "adapter", subfolder="merged", **config)
    assert torch.equal(logits(loaded), logits(merged))


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("loader", LOADERS)
def test_whole_weights_beside_an_adapter_count(loader, size, base, tmp_path):
    write_adapter(tmp_path / "adapter")
    whole = other(base)
    whole.save_pretrained(tmp_path / "adapter", max_shard_size=size)
    assert (tmp_path / "adapter" / "model.safetensors.index.json").is_file() == (size == "20KB")
    expected = logits(peft.PeftModel.from_pretrained(copy.deepcopy(whole), tmp_path / "adapter"))
    torch.testing.assert_close(logits(loader.from_pretrained(tmp_path / "adapter")), expected)


@pytest.mark.parametrize("length", [None, 24, 200])
@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_of_another_length(loader, length, base, tmp_path):
    adapted = write_adapter(tmp_path / "adapter", max_position_embeddings=128)
    loaded = loader.from_pretrained(tmp_path / "adapter", **({"max_position_embeddings": length} if length else {}))
    assert loaded.config.max_position_embeddings == (length or 128) != base.config.max_position_embeddings
    torch.testing.assert_close(logits(loaded), logits(adapted))


@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_of_the_hub_has_its_own_config(loader, monkeypatch, tmp_path):
    """Also if its base has the same class; the folder of the cache is that of both."""
    names, labels = {0: "joy", 1: "fear"}, {0: "spam", 1: "ham"}
    base = tiny_model("luna", "sequence", id2label=names)
    base.save_pretrained(tmp_path / "base")
    adapted = write_adapter(tmp_path / "adapter", id2label=labels)
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        push_folder(tmp_path / "base", reserve_repository("tester/base"), "Base")
        path = tmp_path / "adapter" / "adapter_config.json"
        write_json(path, {**json.loads(path.read_text()), "base_model_name_or_path": "tester/base"})
        push_folder(tmp_path / "adapter", reserve_repository("tester/adapter"), "Adapter")
        loaded = loader.from_pretrained("tester/adapter", cache_dir=tmp_path / "own-cache")
        assert any((tmp_path / "own-cache").glob("*base*")) and any((tmp_path / "own-cache").glob("*adapter*"))
    assert loaded.config.id2label == labels
    torch.testing.assert_close(logits(loaded), logits(adapted))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("length", [{}, {"max_position_embeddings": 80}])
def test_a_loaded_adapter_does_not_train_in_part(loader, bias, length, base, tmp_path):
    write_adapter(tmp_path / "adapter", bias)
    loaded = loader.from_pretrained(tmp_path / "adapter", **length)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    model = LunaForSequenceClassification.from_pretrained(tmp_path / "base")
    continued = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    trained = {name.split(".")[-3] for name, parameter in continued.named_parameters() if parameter.requires_grad}
    assert {"lora_A", "lora_B"} <= trained


def without_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


def damaged(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"cut off")


def without_base(folder):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("spoil", "named", "error"),
    [
        (without_weights, "adapter has no adapter_model.safetensors", OSError),
        (damaged, "adapter_model.safetensors is damaged", OSError),
        (without_base, "does not name its base model", ValueError),
    ],
)
def test_what_an_adapter_lacks_is_named(loader, spoil, named, error, base, tmp_path):
    write_adapter(tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with refused(named, error=error):
        loader.from_pretrained(tmp_path / "adapter")
