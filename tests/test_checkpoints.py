"""Checkpoints give the outputs that they were shipped with: those of this repository, and tiny ones of every kind."""

import json
import re
import shutil

import golden
import pytest
import torch
import transformers
from catalogue import Checkpoint, Zoo
from common.models import longest_input
from helpers import ROOT, run_python, slow_unless
from safetensors.torch import load_file, save_file
from tiny_zoo import ENTRIES
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.utils import is_flash_attn_2_available

from luna_hf import FAMILIES

COMMITTED = list(Zoo().checkpoints)
ADAPTERS = [name for name in COMMITTED if (ROOT / "checkpoints" / name / "adapter_config.json").is_file()]
# Relative to the largest value of a case, or to 0.1. float32: sums in another order. bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
every = pytest.mark.parametrize("name", [*ENTRIES, *COMMITTED])
MEGABYTE = 10**6


@pytest.fixture
def checkpoint(name, zoo):
    return (zoo if name in ENTRIES else Zoo()).checkpoint(name)


def check(checkpoint, dtype, backend, device="cpu"):
    kind = checkpoint.golden["kind"]
    model, tokenizer = golden.load(checkpoint.folder, dtype=dtype, attn_implementation=backend)
    model.to(device)
    for case in checkpoint.golden["cases"]:
        expected, found = torch.tensor(case["values"]), golden.values(kind, model, tokenizer, case)
        scale = max(expected.abs().max().item(), 0.1)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype] * scale)
        if kind == "causal LM" and (backend, dtype) == ("eager", torch.float32):
            assert golden.continuation(model, tokenizer, case["texts"]) == case["tokens"]


# In every suite, the backend that computes step by step, and for tiny checkpoints the default one, too.
SETTINGS = (("eager", "float32"), ("sdpa", "float32"), ("sdpa", "bfloat16"))
CASES = [(name, *setting) for name in (*ENTRIES, *COMMITTED) for setting in SETTINGS]


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [slow_unless(name in ENTRIES or backend == "eager", name, backend, dtype) for name, backend, dtype in CASES],
)
def test_outputs_are_the_golden_ones(checkpoint, backend, dtype):
    check(checkpoint, getattr(torch, dtype), backend)


# Runs without luna_hf: the first numbers that each folder's own code computes.
LOAD = """
import json, sys, torch, transformers
found = {}
for folder, auto_class in json.loads(sys.argv[2]).items():
    model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.arange(5, 45).view(1, 1, 40) if "Choice" in auto_class else torch.arange(5, 45)[None]
    with torch.no_grad():
        found[folder] = model(ids)[0].flatten()[:50]
torch.save(found, sys.argv[1])
"""


@torch.no_grad()
def test_the_repositorys_folders_load_without_the_package(tmp_path):
    """As a stranger loads them: from a clone, with the code in the folder."""
    autos = {}
    for own in Zoo().checkpoints.values():
        names = [
            name for name, entry in own.config["auto_map"].items() if entry.endswith(own.config["architectures"][0])
        ]
        autos[str(own.folder)] = names[0]
    results = tmp_path / "found.pt"
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    run_python(LOAD, results, json.dumps(autos), env=cache, blocked=True)
    for folder, found in torch.load(results).items():
        model = getattr(transformers, autos[folder]).from_pretrained(folder).eval()
        ids = torch.arange(5, 45).view(1, 1, 40) if "Choice" in autos[folder] else torch.arange(5, 45)[None]
        torch.testing.assert_close(model(ids)[0].flatten()[:50], found)


@torch.no_grad()
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_merge_as_docs_adapters_says(name, tmp_path):
    peft = pytest.importorskip("peft")
    folder = ROOT / "checkpoints" / name
    own, tokenizer = golden.load(folder)
    config = AutoConfig.from_pretrained(folder)
    source = ROOT / json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = type(own).from_pretrained(source, config=config)
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded, inputs = type(own).from_pretrained(tmp_path), tokenizer("A text to classify.", return_tensors="pt")
    assert loaded.config.id2label == own.config.id2label
    torch.testing.assert_close(loaded(**inputs)[0], own.eval()(**inputs)[0], atol=1e-4, rtol=1e-4)


@every
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash_attention_2", "flex_attention"])
def test_outputs_on_a_gpu(checkpoint, dtype, backend):
    if backend == "flash_attention_2" and (dtype == torch.float32 or not is_flash_attn_2_available()):
        pytest.skip("flash-attn is not installed, or has no float32 kernels")
    check(checkpoint, dtype, backend, "cuda")


@every
def test_the_cases_cover_padding_and_the_longest_input(checkpoint):
    kind, cases = checkpoint.golden["kind"], {case["name"]: case for case in checkpoint.golden["cases"]}
    _, tokenizer = golden.load(checkpoint.folder)
    texts = {name: tree_leaves(case["texts"]) for name, case in cases.items()}
    lengths = {name: [len(tokenizer(text).input_ids) for text in own] for name, own in texts.items()}
    longest = min(longest_input(AutoConfig.from_pretrained(checkpoint.folder)), golden.UNLIMITED)
    added = golden.CONTINUED if kind == "causal LM" else 0
    assert len(cases) == 5 and longest - 10 <= max(lengths["longest"]) + added <= longest
    assert len(set(lengths["padded batch"])) > 1


@every
def test_what_is_shipped(checkpoint):
    """The code of our models, but no folders of the machine; weights in bfloat16, which load in float32."""
    folder, auto_map = checkpoint.folder, checkpoint.config.get("auto_map", {})
    assert bool(auto_map) == (checkpoint.config["model_type"] in FAMILIES)
    assert {path.stem for path in folder.rglob("*.py")} == {entry.partition(".")[0] for entry in auto_map.values()}
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".md") and path.name != "tokenizer.json":
            # Absolute paths of any kind, and those that leave the repository.
            assert re.findall(r"(?<![\w:.<`/])/\w+/|\.\./", path.read_text(encoding="utf-8")) == [], path
    for stage in checkpoint.stages:
        assert stage.metrics["training_seconds"] > 0 and stage.script.endswith(".py")
    (weights,) = folder.glob("*model.safetensors")  # an adapter's have another name
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.bfloat16}
    assert golden.load(folder)[0].dtype == torch.float32


def test_committed_weights_are_small():
    sizes = [path.stat().st_size for path in (ROOT / "checkpoints").glob("*/*model.safetensors")]
    assert max(sizes, default=0) <= 51 * MEGABYTE and sum(sizes) <= 120 * MEGABYTE


def test_a_changed_weight_is_found(zoo, tmp_path):
    folder = tmp_path / "tiny-luna"
    shutil.copytree(zoo.checkpoint("tiny-luna").folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.bias"] += torch.arange(len(weights["lm_head.bias"])) % 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError):
        check(Checkpoint(folder), torch.bfloat16, "eager")
