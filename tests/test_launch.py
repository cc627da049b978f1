"""The launch configs in `training/accelerate`, and runs in several processes that equal those of one."""

import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys

import pretrain_mlm
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from common.machine import plural
from engine import sharding
from helpers import ROOT
from processes import exit_code, run_pair, started
from tiny_training import (
    DEMO,
    arguments,
    start,
)

from luna_hf.scripting import UserError, locked

CONFIGS = {path.stem: path for path in (ROOT / "training" / "accelerate").glob("*.yaml")}
SCRIPT = ROOT / "training" / "pretrain_mlm.py"
# Two passes an update on either of two processes; clipping that acts; a loss for every step.
OPTIONS = {"max_steps": 6, "batch_size": 2, "max_grad_norm": 0.3, "save_steps": 3, "eval_steps": 6}

# accelerate runs FSDP and DeepSpeed on devices only. Here a CPU poses as one; everything else is what a GPU would run.
POSING = """
import os, sys
import torch
os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
torch.accelerator.is_available = lambda: True
from accelerate import state
from accelerate.utils import DistributedType
state.PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
sys.path.insert(0, {folder!r})
import pretrain_mlm
sys.exit(pretrain_mlm.main(sys.argv[1:]))
"""


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def launch(name, script, words, **more):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS[name], script, *words]
    return subprocess.run(command, env=environment(**more), cwd=ROOT, capture_output=True, text=True, timeout=300)


def losses(folder):
    """(loss, norm of the gradient) of every step, and the held-out losses."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in entries if entry["kind"] == "train"}
    return [*steps.values(), *((entry["loss"],) for entry in entries if entry["kind"] == "held_out")]


def assert_same(one, other):
    assert len(one) == len(other) > OPTIONS["max_steps"]  # each step, and the held-out losses
    for values, others in zip(one, other, strict=True):
        # Another order of additions, and what that makes of small gradients in AdamW.
        assert values == pytest.approx(others, rel=1e-4)


def pretrain_as(rank, port, words, command="pretrain_mlm"):
    """One of two processes, as a launcher starts them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    sys.exit(importlib.import_module(command).main(words))


def test_two_processes_do_what_one_does(corpus, tmp_path):
    one, two = (arguments(DEMO, tmp_path / name, data=corpus, **OPTIONS) for name in ("one", "two"))
    compare(pretrain_mlm, one, two, tmp_path)


def compare(command, one, two, folder):
    assert start(command, one) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_pair(pretrain_as, port, two, command.__name__)
    assert_same(losses(folder / "two"), losses(folder / "one"))
    assert json.loads((folder / "two" / "metrics.json").read_text())["processes"] == 2


def test_every_process_is_refused_a_folder_in_use(corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / ".lock"):
        pair = [started(pretrain_as, rank, port, arguments(DEMO, tmp_path / "out", data=corpus)) for rank in range(2)]
        assert [exit_code(process) for process in pair] == [2, 2]


def parsed(name, *words):
    """What the launcher makes of a config."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS[name]), *words, "script.py", "recipe.yaml"])
    return _validate_launch_command(args)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_loads_the_config(name):
    config = load_config_from_file(str(CONFIGS[name]))  # unknown keys of the top level are an error there
    assert config.num_processes == (1 if name == "cpu" else 2) and config.num_machines == 1
    assert config.mixed_precision is None  # the recipe says it
    head = CONFIGS[name].read_text().split("compute_environment")[0]
    assert f"--config_file training/accelerate/{name}.yaml" in head


@pytest.mark.parametrize("name", ["fsdp", "deepspeed_zero2"])
def test_the_launcher_knows_every_key_of_the_section(name):
    args = parsed(name)
    untouched = vars(launch_command_parser().parse_args(["script.py"]))
    config = load_config_from_file(str(CONFIGS[name]))
    for key, value in (config.fsdp_config or config.deepspeed_config).items():
        assert key in untouched and str(getattr(args, key)) == str(value), key


def test_launcher_and_environment_are_those_of_the_backend():
    assert parsed("multi_gpu").multi_gpu and parsed("multi_cpu").multi_gpu and parsed("multi_cpu").use_cpu
    assert parsed("multi_gpu", "--num_processes", "8").num_processes == 8
    single = parsed("cpu")
    assert single.use_cpu and not (single.multi_gpu or single.use_fsdp or single.use_deepspeed)
    sharded = prepare_multi_gpu_env(parsed("fsdp"))
    assert (sharded["ACCELERATE_USE_FSDP"], sharded["FSDP_VERSION"]) == ("true", "2")
    assert sharded["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    args = parsed("deepspeed_zero2")
    assert args.use_deepspeed
    args.deepspeed_fields_from_accelerate_config = ""
    _, zero = prepare_deepspeed_cmd_env(args)
    assert (zero["ACCELERATE_USE_DEEPSPEED"], zero["ACCELERATE_DEEPSPEED_ZERO_STAGE"]) == ("true", "2")
    # Numbers here would overrule the recipe's.
    assert (zero["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], zero["ACCELERATE_GRADIENT_CLIPPING"]) == ("auto", "auto")


@pytest.mark.slow
def test_the_cpu_configs_start_one_and_two_processes(corpus, tmp_path):
    for name, processes in (("cpu", 1), ("multi_cpu", 2)):
        result = launch(name, SCRIPT, arguments(DEMO, tmp_path / name, data=corpus, **OPTIONS))
        assert result.returncode == 0, result.stderr
        assert f"on each of {plural(processes, 'process', 'processes')}" in result.stdout
    assert_same(losses(tmp_path / "cpu"), losses(tmp_path / "multi_cpu"))


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharding_that_accelerate_would_ignore_is_refused(monkeypatch, variable):
    class OneProcess:
        distributed_type = DistributedType.NO

    sharding.check_backend(OneProcess)
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UserError, match=r"multi_cpu\.yaml"):
        sharding.check_backend(OneProcess)


BACKENDS = [
    "fsdp",
    pytest.param(
        "deepspeed_zero2",
        marks=pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs deepspeed (pip install)"),
    ),
]


@pytest.fixture
def posing(tmp_path):
    script = tmp_path / "posing.py"
    script.write_text(POSING.format(folder=str(SCRIPT.parent)))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["luna", "roberta", "modernbert"])
@pytest.mark.parametrize("name", BACKENDS)
def test_sharded_training_is_that_of_one_process(posing, corpus, tmp_path, name, model_type):
    options = {"model__model_type": model_type, "model__tie_word_embeddings": "true", **OPTIONS}
    alone = launch("cpu", SCRIPT, arguments(DEMO, tmp_path / "alone", data=corpus, **options))
    sharded = launch(name, posing, arguments(DEMO, tmp_path / "sharded", data=corpus, **options))
    assert alone.returncode == sharded.returncode == 0, alone.stderr + sharded.stderr
    assert "on each of 2 processes" in sharded.stdout
    assert_same(losses(tmp_path / "sharded"), losses(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_sharded_training_resumes_exactly(posing, corpus, tmp_path, name):
    words = arguments(DEMO, tmp_path / "out", data=corpus, **OPTIONS)
    launch(name, posing, arguments(DEMO, tmp_path / "whole", data=corpus, **OPTIONS))
    dying = tmp_path / "dying.py"
    kill = "from engine.run import Run\nsave = Run.save\n"
    kill += f"Run.save = lambda run: (save(run), os.kill(os.getpid(), {int(signal.SIGKILL)}))\n"
    dying.write_text(posing.read_text().replace("sys.exit", kill + "sys.exit"))
    assert launch(name, dying, words).returncode != 0
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000003"]
    result = launch(name, posing, words)
    assert result.returncode == 0, result.stderr
    assert "step 3 of 6" in result.stdout
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs deepspeed (pip install)")
def test_deepspeed_cannot_skip_updates(posing, corpus, tmp_path):
    result = launch("deepspeed_zero2", posing, arguments(DEMO, tmp_path / "out", data=corpus, max_skipped_steps=1))
    assert "`max_skipped_steps`" in result.stderr
