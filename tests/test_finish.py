"""What a run needs at its end is checked at its start."""

import importlib.metadata
import sys

import evaluate_perplexity
import finetune_embeddings
import finetune_glue
import pretrain_mlm
import pytest
from common import finish, hub
from common.machine import machine
from helpers import ROOT, refused
from hub_stub import HubStub
from tiny_training import arguments

import luna_hf
from luna_hf.scripting import UserError

PRETRAIN = ROOT / "training" / "recipes" / "pretrain_mlm" / "demo.yaml"


def commands(out):
    """Command lines whose data and models are missing: whatever is refused otherwise is refused before these."""
    tune = ["--model_name_or_path", "missing", "--dataset_name", "missing", "--output_dir", str(out)]
    return {
        pretrain_mlm: arguments(PRETRAIN, out, data="cpython"),
        finetune_glue: tune,
        finetune_embeddings: tune,
        evaluate_perplexity: ["missing", "--data", "missing", "--output", str(out)],
    }


@pytest.fixture
def refusal(tmp_path, capsys):
    """Runs a command that is refused; returns its one line."""

    def run(command, *more):
        assert command.main([*commands(tmp_path / "out")[command], *more]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        return error

    return run


COMMANDS = [pretrain_mlm, finetune_glue, finetune_embeddings, evaluate_perplexity]


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_templates(command, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "TEMPLATES", tmp_path / "none")
    assert str(tmp_path / "none") in refusal(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_broken_matplotlib(command, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert "matplotlib" in refusal(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written(command, refusal, tmp_path):
    (tmp_path / "out").write_text("")
    assert f"{tmp_path / 'out'} is a file" in refusal(command)


@pytest.mark.parametrize("command", [pretrain_mlm, finetune_glue])
@pytest.mark.parametrize(
    ("name", "token", "why"), [("a b", "hf_x", "'a b'"), ("a--b", "hf_x", "'a--b'"), ("me/x", "", "auth login")]
)
def test_a_push_that_would_fail(command, name, token, why, refusal, monkeypatch):
    monkeypatch.setattr(hub, "get_token", lambda: token)
    assert why in refusal(command, "--push_to_hub", "true", "--hub_model_id", name)


@pytest.mark.parametrize("role", ["read", "write"])
def test_a_token_must_be_able_to_write(role, tmp_path, monkeypatch):
    with HubStub() as server:
        server.patch(monkeypatch, tmp_path)
        monkeypatch.setattr(hub.HfApi, "whoami", lambda *_: {"auth": {"accessToken": {"role": role}}})
        if role == "write":
            assert hub.reserve_repository("tester/x") == "tester/x"
        else:
            with refused("may only read", error=UserError):
                hub.reserve_repository("tester/x")


def test_versions_of_packages_that_are_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("common.machine.version", missing)
    assert f"luna-hf {luna_hf.__version__}, torch unknown" in machine("scikit-learn")["versions"]
