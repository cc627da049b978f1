"""From finished runs to published checkpoints: recipes that repeat them, cards, and what the Hub gets."""

import importlib
import itertools
import json
import math
import re
import shutil
import statistics

import adapters
import build
import catalogue
import golden
import publish
import pytest
import ship
import torch
import yaml
from accelerate.state import AcceleratorState
from catalogue import Zoo
from helpers import ROOT, refused, run_python, slow_unless
from hub_stub import HubStub
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny_zoo import ENTRIES

from luna_hf.scripting import UserError

COMMITTED = list(Zoo().checkpoints)
every = pytest.mark.parametrize("name", [*ENTRIES, *COMMITTED])


@pytest.fixture
def place(name, zoo):
    """The zoo that holds a checkpoint; the cards of the tiny ones are written first."""
    if name not in ENTRIES:
        return Zoo()
    build.write(zoo, name)
    return zoo


# ---- damaged files ----

CONTENTS = {"empty": b"", "cut": b'{"a": 1', "a list": b"[]", "no keys": b"{}", "missing": None}
# Without a recipe, a run is a part of the next stage's.
DAMAGED = [*itertools.product(("metrics.json", "golden.json", "config.json"), CONTENTS)]
DAMAGED += [("recipe.yaml", kind) for kind in ("empty", "cut", "a list")]


@pytest.mark.parametrize(("file", "kind"), DAMAGED)
def test_a_damaged_file_is_named(tmp_path, file, kind):
    name = "lavo-mini-en"
    for part in ("model_cards", "experiments/results", f"checkpoints/{name}"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.safetensors", "*.png", "*.py"))
    path, content = tmp_path / "checkpoints" / name / file, CONTENTS[kind]
    path.unlink() if content is None else path.write_bytes(content)
    with refused(name if (file, kind) == ("metrics.json", "missing") else path, error=UserError):
        build.write(Zoo(tmp_path), name)


def _changed(part, **values):
    return lambda root: (path := root / "checkpoints/lavo-mini-en" / part).write_text(
        json.dumps({**json.loads(path.read_text()), **values})
    )


def _catalogue(change):
    def changed(root):
        content = yaml.safe_load((root / "model_cards/zoo.yaml").read_text())
        change(content)
        (root / "model_cards/zoo.yaml").write_text(yaml.safe_dump(content))

    return changed


def _entry(**values):
    return _catalogue(lambda content: content["checkpoints"]["lavo-mini-en"].update(values))


ODD = {
    "no section of checkpoints": _catalogue(lambda content: content.pop("checkpoints")),
    "no section of data": _entry(data="nowhere"),
    "an empty entry": _catalogue(lambda content: content["checkpoints"].update({"lavo-mini-en": None})),
    "an unknown key": _entry(sumary="x"),
    "a loss that is a text": _changed("metrics.json", held_out_loss="x"),
    "a loss that is not finite": _changed("metrics.json", held_out_loss=float("nan")),
    "a baseline that is too large": _changed("metrics.json", unigram_loss=1e308),
    "no command": _changed("metrics.json", command="x"),
    "another kind": _changed("golden.json", kind="none"),
    "no cases": _changed("golden.json", cases=[]),
    "an unknown class": _changed("config.json", architectures=["__name__"]),
    "code of a stranger": _changed("config.json", model_type="other", auto_map={"AutoConfig": "code.Config"}),
    "a field of another type": _changed("config.json", hidden_size="x"),
    "a stage without a number": lambda root: shutil.copytree(
        root / "checkpoints/lavo-mini-en/stages/1", root / "checkpoints/lavo-mini-en/stages/one"
    ),
    "a row that is none": lambda root: (root / "experiments/results/mini-z.json").write_text('{"rows": ["x"]}'),
    "a link": lambda root: (root / "checkpoints/lavo-mini-en/modeling_lavo.py").symlink_to(root / "victim"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_of_a_checkpoint_take_one_line(tmp_path, monkeypatch, capsys, kind):
    for part in ("model_cards", "experiments/results", "checkpoints/lavo-mini-en"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.safetensors", "*.png", "*.py"))
    (tmp_path / "victim").write_text("mine")
    ODD[kind](tmp_path)
    monkeypatch.setattr(catalogue.Zoo.__init__, "__defaults__", (tmp_path,))
    assert build.main(["lavo-mini-en"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out
    assert (tmp_path / "victim").read_text() == "mine"


# ---- shipping ----


# In every suite, one of two stages and one that a sweep chose.
REPEATED = ("tiny-luna", "tiny-sst2", "tiny-clm", "tiny-stsb", "tiny-converted")


@pytest.mark.parametrize("name", [slow_unless(name in REPEATED[:2], name) for name in REPEATED])
def test_the_commands_of_the_card_repeat_the_training(name, zoo, monkeypatch):
    monkeypatch.chdir(zoo.root)
    build.write(zoo, name)
    card = (zoo.checkpoint(name).folder / "README.md").read_text()
    *training, last = re.search(r"```sh\n(.*?)\n```", card, re.DOTALL)[1].splitlines()
    for command in training:
        script, recipe = re.fullmatch(r"python training/(\w+)\.py (\S+)", command).groups()
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a separate process
        assert importlib.import_module(script).main([recipe]) == 0
    options = ship.parse(last.split()[2:])
    assert options.name == name
    found = load_file(options.runs[-1] / "model.safetensors")
    shipped = load_file(zoo.checkpoint(name).folder / "model.safetensors")
    assert found.keys() == shipped.keys()
    for key, weight in shipped.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(found[key].bfloat16(), weight), key


def test_all_stages_are_kept(zoo):
    stages = zoo.checkpoint("tiny-luna").stages
    assert [stage.recipe["block_size"] for stage in stages] == [16, 32]
    assert [stage.steps for stage in stages] == [3, 3]
    assert stages[1].recipe["model_name_or_path"] == stages[0].recipe["output_dir"]
    folder = zoo.checkpoint("tiny-roberta").folder  # of which the recipe's tokenizer is
    assert zoo.root / zoo.checkpoint("tiny-roberta").stages[0].recipe["tokenizer"] == folder
    assert (folder / "tokenizer.json").read_bytes() == (zoo.root / "runs/roberta/tokenizer.json").read_bytes()


def test_the_chosen_run_of_a_sweep_is_shipped(zoo):
    (stage,) = zoo.checkpoint("tiny-sst2").stages
    (best,) = (zoo.root / "runs/sst2/best").iterdir()
    run = json.loads((best / "run.json").read_text())
    assert stage.recipe["seed"] == stage.metrics["seed"] == run["seed"]
    assert [entry["eval_accuracy"] for entry in stage.log] == [row["eval_accuracy"] for row in run["history"]]


def test_a_long_log_loses_entries_between_evaluations():
    log = [{"kind": "held_out" if step % 10 == 0 else "train", "step": step, "loss": 1.0} for step in range(1, 101)]
    whole = ship.thinned(log)
    assert [json.loads(line) for line in whole.splitlines()] == log
    entries = [json.loads(line) for line in ship.thinned(log, len(whole) // 2).splitlines()]
    assert sum(entry["kind"] == "held_out" for entry in entries) == 10 and 20 <= len(entries) <= 55
    assert max(b["step"] - a["step"] for a, b in itertools.pairwise(entries)) <= 5
    assert len(ship.thinned(log, 1).splitlines()) == 10


def test_shipping_refuses(zoo, tmp_path):
    with refused("tiny-x", "tiny-luna", error=UserError):
        ship.ship(zoo, "tiny-x", [zoo.root / "runs/luna-1"])
    with refused(tmp_path, error=UserError):
        ship.ship(zoo, "tiny-luna", [tmp_path])
    for model in "ab":
        shutil.copytree(zoo.root / "runs/sst2/best/tiny-luna", tmp_path / "best" / model)
    shutil.copy(zoo.root / "runs/sst2/results.json", tmp_path)
    with refused(tmp_path / "best" / "a", error=UserError):
        ship.ship(zoo, "tiny-sst2", [tmp_path])


# ---- cards ----


@every
def test_a_card_is_what_the_hub_reads(name, place, tmp_path, monkeypatch):
    entry, checkpoint = place.entry(name), place.checkpoint(name)
    assert not build.is_stale(place, name)
    card = ModelCard.load(checkpoint.folder / "README.md")
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        card.validate()
        assert not hub.unknown
    data = card.data
    assert (data.license, data.language, data.model_name) == (entry.license, entry.language, name)
    assert data.pipeline_tag == golden.KINDS[checkpoint.golden["kind"]].pipeline
    library = "sentence-transformers" if checkpoint.golden["kind"] == "sentences" else "transformers"
    assert data.library_name == ("peft" if adapters.is_adapter(checkpoint.folder) else library)
    assert data.base_model == (entry.base or None) and (data.datasets or []) == entry.datasets
    assert ("custom_code" in data.tags) == ("roberta" not in name)
    assert not re.search(r"\$\{?\w", card.content)
    results = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results or []}
    if "held_out_loss" in checkpoint.metrics:
        found = results["held-out text of the training corpus", "loss"]
        assert found == pytest.approx(checkpoint.metrics["held_out_loss"], abs=1e-4)
    for row in place.rows:
        if row["model"] == name and not entry.task and "dataset" in row:
            assert results[row["task"], row["metric"]] == pytest.approx(statistics.mean(row["values"]), abs=1e-4)


def test_figures_are_those_of_the_runs(zoo):
    build.write(zoo, "tiny-luna")
    card = (zoo.checkpoint("tiny-luna").folder / "README.md").read_text()
    own, twin = zoo.checkpoint("tiny-luna").metrics, zoo.checkpoint("tiny-roberta").metrics
    assert f"| this model | {own['held_out_loss']:.3f} | {own['held_out_accuracy']:.1%} |" in card
    assert f"| `tiny-roberta` | {twin['held_out_loss']:.3f} | {twin['held_out_accuracy']:.1%} |" in card
    assert f"| unigram baseline | {own['unigram_loss']:.3f} |" in card
    assert "| sst2 | accuracy | 0.750 ± 0.250 | 0.250 (1) | 0.500 (1) |" in card and "the number in brackets" in card
    assert f"| all |  | 6 | {2 * own['seen_tokens']:,} |" in card
    value = math.exp(zoo.checkpoint("tiny-luna").golden["cases"][0]["values"][0][0])
    assert f"{value:.0%}" in card and own["hardware"] in card


def test_a_finetuned_model_has_its_own_score_in_the_header_and_all_seeds_in_the_table(zoo):
    card = ModelCard(build.Card(zoo, "tiny-sst2").text())
    own = zoo.checkpoint("tiny-sst2").metrics["scores"]["validation"]["accuracy"]
    assert "base_model: tester/tiny-luna" in build.Card(zoo, "tiny-sst2", "tester/tiny-sst2").text()
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_type) == (own, "stanfordnlp/sst2")
    assert f"| validation | accuracy | {own:.4f} |" in card.content and "0.750 ± 0.250" in card.content


def test_a_conversion_has_its_cosines(zoo):
    card, stage = build.Card(zoo, "tiny-converted").text(), zoo.checkpoint("tiny-converted").stages[-1]
    before, after = stage.log[0]["cosine"]["128"], stage.metrics["cosine"]["128"]
    assert before != after and f"| 128 | {before:.4f} | {after:.4f} |" in card and "`convert.py`" in card


def test_cards_without_scores_and_with_a_twin_that_is_not_shipped(zoo, tmp_path):
    for folder in ("checkpoints/tiny-luna", "model_cards"):
        shutil.copytree(zoo.root / folder, tmp_path / folder)
    assert "roberta" not in build.Card(Zoo(tmp_path), "tiny-luna").text()
    results = tmp_path / "experiments" / "results"
    results.mkdir(parents=True)
    twin = {**zoo.checkpoint("tiny-luna").metrics, "held_out_loss": 1.2345}
    (results / "mini-a.json").write_text(json.dumps({"models": {"tiny-roberta": twin}}))
    assert "| `tiny-roberta` | 1.234 |" in build.Card(Zoo(tmp_path), "tiny-luna").text()


def test_a_stale_card_is_found(zoo, monkeypatch, capsys):
    monkeypatch.setattr(catalogue.Zoo.__init__, "__defaults__", (zoo.root,))
    assert build.main([]) == 0 and build.main(["--check"]) == 0
    path = zoo.checkpoint("tiny-luna").folder / "README.md"
    path.write_text(path.read_text().replace("parameters", "weights"))
    assert build.main(["--check"]) == 2 and "tiny-luna" in capsys.readouterr().err
    assert build.main(["tiny-luna"]) == 0 and build.main(["--check"]) == 0
    table = zoo.root / "checkpoints" / "README.md"
    assert "| [tiny-luna](tiny-luna/README.md) |" in table.read_text()
    table.write_text("")
    assert build.main(["--check"]) == 2 and "checkpoints/README.md" in capsys.readouterr().err


def test_every_entry_of_the_catalogue_is_complete():
    zoo = Zoo()
    for name, entry in zoo.entries.items():
        assert zoo.data(entry) and entry.limits, name
        assert not entry.twin or zoo.figures(entry.twin), name


# ---- publishing ----

# Other heads load in the same way.
PUSHED = ["tiny-luna", "tiny-roberta", "tiny-clm", "tiny-stsb"]
# Runs without luna_hf: what the pipelines of each repository give for its first case.
LOAD = """
import json, sys, torch
from sentence_transformers import SentenceTransformer
from transformers import pipeline

folder, found = sys.argv[1], {}
options = {"trust_remote_code": True, "device": "cpu", "dtype": torch.float32}
cases = json.load(open(f"{folder}/cases.json"))

def fill(repository, text, **more):
    return [row["score"] for row in pipeline("fill-mask", repository, top_k=5, **{**options, **more})(text)]

found["tiny-luna"] = fill("tester/tiny-luna", cases["tiny-luna"])
found["tiny-roberta"] = fill("tester/tiny-roberta", cases["tiny-roberta"], trust_remote_code=False)
generate = pipeline("text-generation", "tester/tiny-clm", **options)
length = {"max_new_tokens": 12, "min_new_tokens": 12}
(answer,) = generate(cases["tiny-clm"], **length, do_sample=False, return_tensors=True)
found["tiny-clm"] = answer["generated_token_ids"][-12:]
encoder = SentenceTransformer(
    "tester/tiny-stsb", device="cpu", trust_remote_code=True, model_kwargs={"dtype": torch.float32}
)
found["tiny-stsb"] = encoder.encode(cases["tiny-stsb"])[:8].tolist()
json.dump(found, open(f"{folder}/found.json", "w"))
"""


@pytest.fixture(scope="module")
def published(zoo, tmp_path_factory):
    """The stand-in with all repositories, and what a process without luna_hf computed with them."""
    folder = tmp_path_factory.mktemp("published")
    cases = {name: zoo.checkpoint(name).golden["cases"][0] for name in PUSHED}
    (folder / "cases.json").write_text(json.dumps({name: case["texts"][0] for name, case in cases.items()}))
    with HubStub() as hub, pytest.MonkeyPatch.context() as monkeypatch:
        hub.patch(monkeypatch, folder)
        for name in PUSHED:
            build.write(zoo, name)
            publish.publish(zoo, name, f"tester/{name}")
        run_python(LOAD, folder, env=hub.environment(folder / "loading"), blocked=True)
        yield hub, cases, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", PUSHED)
def test_a_published_model_loads_from_the_hub_alone(published, name):
    case, found = published[1][name], published[2][name]
    expected = case["values"][0]
    if name == "tiny-clm":
        assert found == case["tokens"][0]
    elif "tokens" in case:
        assert found == pytest.approx([math.exp(value) for value in expected], rel=1e-4)
    else:
        assert sorted(found) == pytest.approx(sorted(expected), abs=1e-5)


@pytest.mark.parametrize("name", PUSHED)
def test_a_repository_holds_the_checkpoint_its_code_and_its_card(published, zoo, name):
    files, folder = published[0].repositories[f"tester/{name}"], zoo.checkpoint(name).folder
    shipped = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    code = {file for file in files if file.endswith(".py")}
    assert shipped | code == set(files) and bool(code) == (name != "tiny-roberta")
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert ("auto_map" in json.loads(files["config.json"])) == bool(code) and not published[0].unknown
    card = files["README.md"].decode()
    assert f'"tester/{name}"' in card and "checkpoints/" not in card.split("## Repeat it")[0]
    assert ("trust_remote_code=True" in card) == bool(code)


def test_publishing_refuses_early(zoo, monkeypatch, capsys):
    monkeypatch.setattr(catalogue.Zoo.__init__, "__defaults__", (zoo.root,))
    for words, named in {
        ("tiny-x", "tester/x"): "tiny-luna, tiny-roberta",
        ("tiny-luna", "x"): "USER/NAME",
        ("tiny-luna", "a/b/c"): "USER/NAME",
        ("tiny-luna", "tester/x"): "hf auth login",
    }.items():
        monkeypatch.setattr(publish, "get_token", lambda: None)
        assert publish.main(list(words)) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
        assert named in message


def test_a_failed_upload_is_one_sentence(zoo, monkeypatch, tmp_path):
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        monkeypatch.setattr(hub.server.RequestHandlerClass, "commit", lambda self, *_: self.answer({}, 500))
        with refused("tester/tiny-luna", error=UserError):
            publish.publish(zoo, "tiny-luna", "tester/tiny-luna")
