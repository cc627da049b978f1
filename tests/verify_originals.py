"""The originals that the tests of `verify.py` and of `fairseq_reference.py` compare with."""

import dataclasses
import json

from fairseq_checkpoint import Options, Original
from helpers import ROOT
from safetensors.torch import load_file

FIXTURES = ROOT / "tests" / "fixtures"
CHECKPOINTS = FIXTURES / "luna_fairseq_checkpoint"
MLM = ["tied_dynamic", "tied_fixed", "untied_dynamic", "untied_fixed"]
HEADS = ["cls_classification_head", "pooling_classification_head", "attention_classification_head"]
ENCODER = "encoder.sentence_encoder."


def mlm_file(name):
    return FIXTURES / "luna_mlm" / f"{name}.safetensors"


def mlm_meta(name):
    return json.loads(mlm_file(name).with_suffix(".json").read_text())


def mlm_original(name, **changes):
    """The stored tensors and arguments of a `luna_mlm` fixture."""
    known = {field.name for field in dataclasses.fields(Options)}
    arguments = {key: value for key, value in mlm_meta(name)["config"]["args"].items() if key in known}
    tensors = load_file(mlm_file(name))
    weights = {n.removeprefix("state_dict."): t for n, t in tensors.items() if n.startswith("state_dict.")}
    return Original(name, weights, Options(**{**arguments, **changes}))
