"""The study of translation: every recipe takes part, training is equal, and what is finished is kept."""

import json
import re
import signal

import multi30k
import pytest
import running
from tiny_translation import RECIPES, SETTINGS, write_parallel

from luna_hf.scripting import UserError

SOFTMAX = {
    **{"model.d_model": 16, "model.encoder_layers": 1, "model.decoder_layers": 1, "model.encoder_ffn_dim": 24},
    **{"model.encoder_attention_heads": 2, "model.decoder_attention_heads": 2, "model.decoder_ffn_dim": 24},
}


def check(path):
    """A result file names its origin and no machine's folders, and its table and plot are there."""
    result = running.read_json(path)
    assert re.fullmatch(r"python experiments/\w+\.py report", result["command"])
    assert result["protocol"] and result["date"] and result["machine"]["cpu"] and result["machine"]["threads"] >= 1
    assert {"python", "torch", "transformers", "luna_hf"} <= result["versions"].keys()
    assert path.with_suffix(".md").read_text() == multi30k.text(result) + "\n"
    assert path.with_suffix(".png").stat().st_size > 5_000
    return result


def test_every_recipe_takes_part():
    names = [path.stem for path in RECIPES if path.stem.startswith("multi30k_")]
    recipes = {name.removeprefix("multi30k_") for name in names if "_wait_" not in name}
    assert recipes == set(multi30k.SYSTEMS) - set(multi30k.VARIANTS)
    assert {recipe for recipe, _ in multi30k.VARIANTS.values()} <= recipes
    assert multi30k.parse(["run", "--data", "data"]).systems == list(multi30k.SYSTEMS)


@pytest.mark.slow
def test_systems_are_compared(tmp_path):
    write_parallel(tmp_path / "data" / "multi30k")
    where = ["--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs")]
    shared = {name: value for name, value in SETTINGS.items() if not name.startswith("model.")}
    shared["model.max_position_embeddings"] = 64
    luna = {name: value for name, value in SETTINGS.items() if name.startswith("model.")}
    for system, own in (("softmax", SOFTMAX), ("luna16", luna)):
        words = running.option_words({**shared, **own})
        assert multi30k.main(["run", *where, "--systems", system, "--seeds", "0", *words]) == 0
    kept = tmp_path / "runs" / "train" / "luna16-en-de-seed0" / "run.json"
    before = kept.stat().st_mtime_ns
    assert multi30k.main(["run", *where, "--systems", "luna16", "--seeds", "0"]) == 0
    assert kept.stat().st_mtime_ns == before
    report = ["report", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert multi30k.main(report) == 0
    (path,) = (tmp_path / "results").glob("translation-multi30k-*.json")
    result = check(path)
    assert [run["system"] for run in result["runs"]] == ["softmax", "luna16"]
    for run in result["runs"]:
        assert set(run["scores"]) == set(multi30k.METRICS) and run["curve"]["step"][-1] == SETTINGS["max_steps"]


def test_published_runs_stay_unless_repeated_or_made_with_another_recipe(tmp_path):
    (path,) = running.RESULTS.glob("translation-multi30k-*.json")
    published = running.read_json(path)
    kept = published["runs"][0]
    run = {name: kept[name] for name in ("system", "direction")} | {"seed": 77, "command": "own"}
    run |= {
        "date": published["date"],
        "versions": {"torch": "99.0"},
        "machine": {**published["machine"], "cpu": "Zuse"},
    }
    folder = tmp_path / "runs" / "train" / "new"
    folder.mkdir(parents=True)
    scores = {name: {"score": 1.0, "signature": "none"} for name in multi30k.METRICS}
    names = ("parameters", "vocabulary", "training_seconds", "held_out_loss", "unigram_loss")
    metrics = {name: kept[name] for name in names} | {"test": {**scores, "samples": []}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    point = {"kind": "held_out", "step": 1, "loss": 2.0}
    (folder / "log.jsonl").write_text(json.dumps(point) + "\n")
    results = tmp_path / "results"
    results.mkdir()
    # A key that the published recipe does not have is of a later version.
    for change, repeated in (({}, False), ({}, True), ({"later": 1}, False), ({"warmup_steps": 1}, False)):
        stays = "warmup_steps" not in change
        run["seed"] = kept["seed"] if repeated else 77
        recipe = {**published["recipe"], "model": {"model_type": "none"}, **change}
        (folder / "run.json").write_text(json.dumps({**run, "recipe": recipe}))
        (results / path.name).write_text(json.dumps(published))
        assert multi30k.main(["report", "--runs", str(tmp_path / "runs"), "--results", str(results)]) == 0
        made = running.read_json(results / path.name)
        others = (
            [] if not stays else [other for other in published["runs"] if multi30k.cell(other) != multi30k.cell(run)]
        )
        assert [other for other in made["runs"] if other["scores"]["bleu"] != 1.0] == others
        assert len(made["runs"]) == len(others) + 1
        assert made["commands"] == (["own"] if not stays else sorted({*published["commands"], "own"}))
        for kind, name, own in (("versions", "torch", "99.0"), ("machine", "cpu", "Zuse")):
            former = running.listed(published[kind][name]) if stays else []
            assert running.listed(made[kind][name]) == [*former, own]


def test_what_differs_between_results_is_listed():
    parts = [{"cpu": "B and C", "cores": 2}, {"cpu": "B"}, {"cpu": "A", "cores": 4}]
    assert running.joined(parts) == {"cpu": "A, B and C", "cores": 4}
    assert running.joined([running.joined(parts), {"cpu": "D"}]) == {"cpu": "A, B, C and D", "cores": 4}


@pytest.mark.parametrize(
    ("words", "named"),
    [(["run"], "--data"), (["report", "--max_steps", "3"], "--max_steps"), (["report"], "30k.py run")],
)
def test_mistakes_are_named(words, named, tmp_path, capsys):
    assert multi30k.main([*words, "--runs", str(tmp_path)]) == 2
    assert named in capsys.readouterr().err


def test_commands_run_in_processes_that_may_save_when_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "ROOT", tmp_path)
    (tmp_path / "fails.py").write_text("import sys; sys.exit(len(sys.argv))")
    with pytest.raises(UserError, match=r"fails\.py.*3"):
        running.launch("fails.py", ["--key", "value"], threads=1)
    (tmp_path / "stops.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            running.launch("stops.py", [str(tmp_path / "saved")], threads=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()


def test_committed_results():
    for path in running.RESULTS.glob("translation-*.json"):
        check(path)
