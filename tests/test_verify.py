"""`verify.py` accepts correct conversions, and finds every changed tensor and field."""

import json
import re
import shutil

import fairseq_luna
import pytest
import torch
import verify
from fairseq_format.checkpoint import open_checkpoint
from fairseq_format.config import Head
from official_luna import CHECKPOINTS
from safetensors.torch import load_file, save_file
from tiny_fairseq import write_fixture

MODEL = CHECKPOINTS / "tied" / "model.pt"


def convert(source, folder, dtype=None, head=("lm_head", "masked_lm")):
    """A converted model without its tokenizer."""
    with open_checkpoint(source) as original:
        fairseq_luna.make_model(original, Head(*head), dtype)[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return convert(MODEL, tmp_path_factory.mktemp("converted"))


@pytest.fixture
def copied(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "model")


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_conversions_of_every_dtype(name, dtype, tmp_path, capsys):
    convert(CHECKPOINTS / name, tmp_path, dtype)
    assert verify.main([str(tmp_path), str(CHECKPOINTS / name)]) == 0
    assert capsys.readouterr().out.startswith(f"Equal to {name}/model.pt: ")


@pytest.mark.parametrize("factor", [torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)), torch.tensor(torch.nan)])
def test_every_changed_tensor_is_found(factor, copied, capsys):
    """By one bit, too."""
    path = copied / "model.safetensors"
    tensors = load_file(path)
    changed = [name for name in tensors if "layer.0" not in name]
    save_file({n: t * factor if n in changed else t for n, t in tensors.items()}, path, metadata={"format": "pt"})
    assert verify.main([str(copied), str(MODEL)]) == 1
    found = set(re.findall(r"`(\S+)` differs", capsys.readouterr().out))
    assert found - {"lm_head.decoder.weight", "lm_head.decoder.bias"} == set(changed)


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"num_attention_heads": 2}, 1, "`num_attention_heads` is 2, but 4 in the original"),
        ({"num_projected_attention_heads": 2}, 1, "num_projected_attention_heads"),
        ({"hidden_act": "gelu_pytorch_tanh"}, 1, "hidden_act"),
        ({"layer_norm_eps": 1e-4}, 1, "layer_norm_eps"),
        ({"num_hidden_layers": 1}, 2, "do not fit"),
        ({"vocab_size": 293}, 2, "complete model"),
        ({"architectures": ["LunaForTokenClassification"]}, 2, "architectures"),
    ],
)
def test_wrong_configs(fields, status, named, copied, capsys):
    path = copied / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    assert verify.main([str(copied), str(MODEL)]) == status
    assert named in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "--layer-norm plain --override encoder_attention_heads=4"),
        (1, "--layer-norm offset"),
        (1, "--override encoder_attention_heads=8"),
        (2, "--head cls_classification_head"),
        (2, "--override heads"),
    ],
)
def test_options(converted, status, words):
    assert verify.main([str(converted), str(MODEL), *words.split()]) == status


def test_the_head_counts(tmp_path, capsys):
    source = write_fixture(tmp_path / "source", "tied_dynamic", task="sentence_prediction")
    folder = convert(source, tmp_path / "out", head=("cls_classification_head", "classification"))
    assert verify.main([str(folder), str(source)]) == 0
    for model, original, named in ((folder, MODEL, "cls_classification_head"), ("nothing", MODEL, "nothing")):
        assert verify.main([str(model), str(original)]) == 2
        assert named in capsys.readouterr().err
