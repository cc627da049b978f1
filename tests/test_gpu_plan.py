"""The plan for a GPU: what it runs, skips, stops and continues; and, at a tiny size on the CPU, all of its parts."""

import json
import subprocess
import sys
import tarfile

import gpu_plan
import pytest
import torch
from gpu_plan import DONE, FAILED, SKIPPED, UNFINISHED, WAITING, Part
from helpers import ROOT, refused, tiny_model, tiny_tokenizer
from safetensors import safe_open
from transformers import AutoModelForMaskedLM

from luna_hf.scripting import UserError

WRITE = "from pathlib import Path; Path({folder!r}, 'result.json').write_text('{{}}')"
CPU = ["--device", "cpu", "--minutes", "3"]


def fake(name, code=WRITE, minutes=0.1, **more):
    """A part that runs some Python; `{folder}` stands for its folder."""
    return Part(name, minutes, lambda plan: ["-c", code.format(folder=str(plan.folder(name)))], "result.json", **more)


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    """Run a plan of fake parts; returns its exit status and what it knows afterwards."""

    def run(*parts, words=()):
        monkeypatch.setattr(gpu_plan, "PARTS", {part.name: part for part in parts})
        status = gpu_plan.main([*CPU, "--out", str(tmp_path / "out"), *words])
        return status, json.loads((tmp_path / "out" / "state.json").read_text())

    return run


def states(known):
    return {name: part["state"] for name, part in known.items()}


def test_parts_run_once(plan_of, tmp_path, capsys):
    append = WRITE.replace("write_text('{{}}')", "open('a').write('x')")
    status, known = plan_of(fake("a", append), fake("b", append))
    assert (status, states(known)) == (0, {"a": DONE, "b": DONE})
    assert "luna_hf" in (tmp_path / "out" / "environment.txt").read_text()
    plan_of(fake("a", append), fake("b", append), fake("c", append))
    assert [(tmp_path / "out" / name / "result.json").read_text() for name in "abc"] == ["x"] * 3
    assert capsys.readouterr().out.count("| c | 0.1 | done |") == 1
    (tmp_path / "out" / "a" / "result.json").unlink()  # to repeat a part
    plan_of(fake("a"), fake("b", append))
    assert (tmp_path / "out" / "a" / "result.json").read_text() == "{}"


def test_a_part_is_stopped_at_its_limit_and_continued(plan_of, monkeypatch):
    monkeypatch.setattr(gpu_plan, "LIMIT", 0.06)
    monkeypatch.setattr(gpu_plan, "GRACE", 0.01)
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    status, known = plan_of(fake("slow", hangs), fake("next"))
    assert (status, states(known)) == (0, {"slow": UNFINISHED, "next": DONE})
    assert 0.04 < known["slow"]["minutes"] < 0.5
    assert states(plan_of(fake("slow"), fake("next"))[1])["slow"] == DONE


def test_training_that_is_asked_to_stop_is_not_finished(plan_of):
    assert states(plan_of(fake("train", "pass"))[1]) == {"train": UNFINISHED}


def test_a_failure_is_reported_and_does_not_stop_the_rest(plan_of, tmp_path, capsys):
    wrong = fake("wrong", "raise SystemExit('no kernel image')")
    status, known = plan_of(wrong, fake("next"))
    assert status == 1 and states(known) == {"wrong": FAILED, "next": DONE}
    assert "no kernel image" in known["wrong"]["remark"] and "no kernel image" in capsys.readouterr().out
    # The next time, it comes last.
    last = WRITE + "; assert not Path({folder!r}, '../wrong/again').exists()"
    again = fake("wrong", WRITE + "; Path({folder!r}, 'again').touch()")
    assert states(plan_of(again, fake("new", last))[1]) == {"wrong": DONE, "next": DONE, "new": DONE}
    assert (tmp_path / "out" / "wrong" / "again").exists()


def test_failing_tests_count_as_done_and_fail_the_plan(plan_of):
    status, known = plan_of(fake("tests", WRITE + "; raise SystemExit(1)"))
    assert status == 1 and known["tests"]["state"] == DONE and "1" in known["tests"]["remark"]


def test_what_cannot_run_is_skipped_with_its_reason(plan_of):
    parts = [fake("long", minutes=5), fake("needs", needs=("no_such_module",)), fake("after", after="long"), fake("a")]
    status, known = plan_of(*parts)
    assert status == 0 and states(known) == {"long": SKIPPED, "needs": SKIPPED, "after": SKIPPED, "a": DONE}
    reasons = [known[name]["remark"] for name in ("long", "needs", "after")]
    assert all(word in reason for word, reason in zip(("5 minutes", "no_such_module", "long"), reasons, strict=True))
    status, known = plan_of(*parts, words=["--minutes", "6", "--only", "after", "long"])
    assert states(known) == {"long": DONE, "needs": SKIPPED, "after": DONE, "a": DONE}


def test_a_plan_that_is_killed_continues(plan_of, tmp_path):
    (tmp_path / "out" / "a").mkdir(parents=True)
    before = {"a": {"state": UNFINISHED, "remark": "stopped with the plan"}, "b": {"state": DONE}}
    (tmp_path / "out" / "state.json").write_text(json.dumps(before))
    assert states(plan_of(fake("a"), fake("b"))[1]) == {"a": DONE, "b": DONE}


def test_the_archive_holds_the_results_without_weights(plan_of, tmp_path):
    write = WRITE + "; p = Path({folder!r}, 'run'); p.mkdir(); (p / 'x.json').touch(); (p / 'x.safetensors').touch()"
    shard = tmp_path / "out" / "luna-small-en-shards" / "model" / "model-00001.safetensors"
    for path in (shard, tmp_path / "out" / "cache" / "tokens.npy"):
        path.parent.mkdir(parents=True)
        path.touch()
    plan_of(fake("a", write), words=["--export", str(tmp_path / "fetched")])
    assert {path.name for path in (tmp_path / "fetched").iterdir()} == {"results.tar.gz", shard.name}
    with tarfile.open(tmp_path / "fetched" / "results.tar.gz") as archive:
        names = {entry.name for entry in archive if entry.isfile()}
        archive.extractall(tmp_path / "elsewhere", filter="data")
    assert {"./state.json", "./a/result.json", "./a/run/x.json", "./logs/a.log", "./environment.txt"} == names
    # The archive lets another machine continue.
    monkey = [*CPU, "--out", str(tmp_path / "elsewhere"), "--list"]
    assert gpu_plan.Plan(gpu_plan.parse(monkey)).state(fake("a")) == DONE


def test_the_number_of_updates_fits_the_time(tmp_path):
    entries = [
        {"kind": "train", "step": 10, "seen_tokens": 1000, "tokens_per_second": 20.0},  # compiling
        {"kind": "train", "step": 20, "seen_tokens": 2000, "tokens_per_second": 500.0},
        {"kind": "held_out", "step": 20, "loss": 1.0},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, entries)))
    assert gpu_plan.updates(tmp_path, minutes=2) == 600  # 120 s of 5 updates
    assert gpu_plan.updates(tmp_path, minutes=0.001) == gpu_plan.SPEED_STEPS


def test_the_number_of_updates_is_fixed_at_the_start(tmp_path):
    plan = gpu_plan.Plan(gpu_plan.parse([*CPU, "--out", str(tmp_path), "--train-minutes", "1"]))
    entry = {"kind": "train", "step": 10, "seen_tokens": 1000, "tokens_per_second": 500.0}
    log = tmp_path / "luna-small-en-speed" / "run" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(entry))
    words = gpu_plan.small(plan)
    assert words[words.index("--max_steps") + 1] == "300"
    log.write_text(json.dumps({**entry, "tokens_per_second": 900.0}))
    assert gpu_plan.small(gpu_plan.Plan(plan.options)) == words


def test_weights_are_saved_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_plan, "SHARD", "20KB")
    tokenizer, source, target = tiny_tokenizer(), tmp_path / "run", tmp_path / "model"
    model = tiny_model("luna", "mlm", vocab_size=len(tokenizer))
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    (source / "metrics.json").write_text("{}")
    gpu_plan.write_shards(str(source), str(target))
    shards = list(target.glob("*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 40_000 for path in shards)  # the embeddings are one tensor
    assert (target / "metrics.json").exists() and (target / "tokenizer.json").exists()
    with safe_open(shards[0], "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    loaded = AutoModelForMaskedLM.from_pretrained(target).state_dict()
    assert all(
        torch.equal(loaded[name].float(), tensor.bfloat16().float()) for name, tensor in model.state_dict().items()
    )
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(RuntimeError):
        gpu_plan.write_shards(str(source), str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_a_missing_gpu_is_named_before_anything_is_written(tmp_path, capsys):
    assert gpu_plan.main(["--out", str(tmp_path / "out")]) == 2
    assert "--device cpu" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "named"), [(["--only", "x"], "x"), (["--minutes", "0"], "--minutes")])
def test_mistakes_in_the_command_are_refused(words, named):
    with refused(named, error=UserError):
        gpu_plan.parse(words)


def test_every_part_is_listed(tmp_path, capsys):
    assert gpu_plan.main(["--list", "--out", str(tmp_path)]) == 0
    assert [line.split(" | ")[2] for line in capsys.readouterr().out.splitlines()[2:]] == [WAITING] * len(
        gpu_plan.PARTS
    )
    assert all(part.minutes < gpu_plan.LIMIT for part in gpu_plan.PARTS.values())


# ---- everything, tiny, on the CPU ----


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["measuring", "training"])
def test_the_plan_runs_in_miniature(kind, tmp_path):
    names = [name for name in gpu_plan.PARTS if name.startswith("luna-small-en") == (kind == "training")]
    command = [sys.executable, "benchmarks/gpu_plan.py", "--tiny", "--device", "cpu", "--train-minutes", "0.01"]
    command += ["--minutes", "30", "--out", str(tmp_path), "--only", *names]
    for time in ("first", "second"):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        known = json.loads((tmp_path / "state.json").read_text())
        assert done.returncode == 0 and states(known) == dict.fromkeys(names, DONE), known
        assert all(f"{name}: about" in done.stderr for name in names) == (time == "first")  # nothing is repeated
    assert names and known.keys() == set(names)
