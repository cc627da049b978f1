"""A release: its metadata agree, `python -m luna_hf` describes an installation, and the built packages work."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from datetime import date
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT, tiny_tokenizer

import luna_hf
from luna_hf import __main__ as command

# ---- metadata ----


@pytest.fixture(scope="module")
def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_has_the_keys_of_its_format(citation):
    """GitHub shows nothing for a file that lacks one."""
    assert citation["cff-version"] and citation["message"]
    for work in (citation, *citation["references"]):
        assert work["title"] and work["type"]
        assert all(
            {"name"} == person.keys() or {"given-names", "family-names"} == person.keys() for person in work["authors"]
        )


def test_version_and_date_agree(citation):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, day = re.search(r"^## (\S+) - (\S+)$", changelog, re.MULTILINE).groups()
    assert version == luna_hf.__version__ == citation["version"]
    assert date.fromisoformat(day) == citation["date-released"]


# ---- python -m luna_hf ----


def test_the_command_describes_this_installation(capsys):
    assert command.main([]) == 0
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["luna_hf"] == luna_hf.__version__ and lines["torch"] == torch.__version__
    assert lines["families"].split(", ") == list(luna_hf.FAMILIES)
    assert {"sdpa (default)", "eager"} <= set(lines["attention backends"].split(", "))
    assert (lines["CUDA"] == "no device") is not torch.cuda.is_available()


def test_it_reports_a_gpu_and_what_is_missing(monkeypatch):
    answers = {
        **{"is_available": True, "device_count": 1, "get_device_name": "Some GPU", "is_bf16_supported": False},
        **{"device": memoryview(b""), "get_device_properties": type("P", (), {"total_memory": 80 * 2**30})},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(command.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(command, "is_flash_attn_2_available", lambda: True)
    facts = command.facts()
    assert facts["GPU 0"] == "Some GPU, 80 GiB" and "no instructions" in facts["GPU 0 bf16"]
    assert facts["CPU bf16"] == "yes (AMX)" and "flash_attention_2" in facts["attention backends"]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert "no instructions" in command.cpu_bf16()


def test_a_mistake_in_its_options_is_one_line(capsys):
    assert command.main(["--speed"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--speed" in line


# ---- packages ----

_BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"

_SMOKE = """
import json, sys
import torch
import luna_hf
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained("tokenizer")
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = luna_hf.LunaForMaskedLM(luna_hf.LunaConfig(vocab_size=len(tokenizer), projection_length=8, **sizes)).eval()
model.save_pretrained("model")
tokenizer.save_pretrained("model")
loaded = AutoModelForMaskedLM.from_pretrained("model").eval()
ids = tokenizer("every token reads", return_tensors="pt").input_ids
with torch.no_grad():
    assert torch.equal(model(ids).logits, loaded(ids).logits)
(answer,) = pipeline("fill-mask", model="model")("every <mask> reads", top_k=1)
print(json.dumps({"file": luna_hf.__file__, "version": luna_hf.__version__, "score": answer["score"]}))
"""


def run(*words, folder):
    environment = {**os.environ, "PYTHONPATH": ""}  # only what is installed
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """An sdist of the tracked files and what is not ignored, and a wheel made from the unpacked sdist, as pip does."""
    folder = tmp_path_factory.mktemp("release")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", folder=ROOT)
    for name in filter(None, listed.split("\0")):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target)
    weights = folder / "source" / "checkpoints" / "some" / "model.safetensors"  # of the zoo
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"0")
    run(sys.executable, "-c", _BUILD, "build_sdist", folder, folder=folder / "source")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", _BUILD, "build_wheel", folder, folder=unpacked)
    (wheel,) = folder.glob("*.whl")
    return unpacked, wheel


@pytest.mark.slow
def test_what_the_packages_contain(packages):
    unpacked, wheel = packages
    assert unpacked.name == f"luna_hf-{luna_hf.__version__}"
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "luna_hf").rglob("*.py")}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "src/luna_hf/py.typed"):
        assert (unpacked / name).is_file(), name
    assert all((unpacked / "src" / name).is_file() for name in modules)
    assert not (unpacked / "checkpoints").exists() and not (unpacked / "tests").exists()

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
    data = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "luna_hf").rglob("*.txt")}
    assert {name for name in names if not name.startswith(info)} == modules | data | {"luna_hf/py.typed"}
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["Version"] == luna_hf.__version__ and metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(packages, tmp_path):
    """Only luna_hf is installed; torch and transformers, which take gigabytes, are borrowed from this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", "empty", folder=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    # Files `.pth` of a folder added this way are not read, so the editable luna_hf of this environment stays out.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", packages[1], folder=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    tiny_tokenizer().save_pretrained(tmp_path / "elsewhere" / "tokenizer")
    printed = json.loads(run(python, "-c", _SMOKE, folder=tmp_path / "elsewhere").splitlines()[-1])
    assert Path(printed["file"]) == site / "luna_hf" / "__init__.py"
    assert printed["version"] == luna_hf.__version__ and 0 < printed["score"] < 1
    assert "families" in run(python, "-m", "luna_hf", folder=tmp_path / "elsewhere")
    assert "TARGET" in run(python, "-m", "luna_hf", "convert", "--help", folder=tmp_path / "elsewhere")
