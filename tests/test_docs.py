"""README.md, docs/ and CONTRIBUTING.md: tables are fresh, links resolve, examples run, commands are accepted."""

import importlib
import itertools
import json
import re
import shlex

import pytest
import update_docs
from accelerate.state import AcceleratorState
from common import options
from helpers import ROOT
from test_convert_command import write_sentences
from tiny_finetuning import SHORT, checkpoint, glue_folder, topics, write_rows
from tiny_training import SHRINK, write_corpus
from tiny_translation import SETTINGS, write_parallel

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in update_docs.PAGES}
MORE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "conversion/README.md")
TEXTS = {**PAGES, **{page: (ROOT / page).read_text(encoding="utf-8") for page in MORE}}
RESULTS = {path: json.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob("*/results/*.json")}
# A Python block with the output right behind it, or an indented command with its continued lines.
STEPS = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```\n(?P<shown>.*?)^```)?"
    r"|^    (?P<command>(?:python|accelerate launch) (?:[^\n]*\\\n)*[^\n]*)$",
    re.MULTILINE | re.DOTALL,
)
PRETRAIN = {**SHRINK, "model.num_attention_heads": 4, "data": "texts"}
# What runs in miniature, with the options added to the command. All other commands are parsed.
MINIATURE = {
    "pretrain_mlm": {**PRETRAIN, "output_dir": "outputs/trained"},
    "pretrain_clm": {**PRETRAIN, "sample_tokens": 2},
    "finetune_glue": {**SHORT, "num_train_epochs": 1, "seeds": 1, "sweep_batch_sizes": 16, "dataset_name": "glue"},
    "train_translation": SETTINGS,
    "evaluate_perplexity": {"tokens": 2048, "part": 128},
    "roberta_to_abc": {},
    "roberta_to_luna": {},
    "luna_hf.convert.command": {"memory_size": 4},
}
# Fields that follow from an initial encoder.
ENCODERS_OWN = {"model." + name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    *("model.intermediate_size", "model.projection_length")
}
# Options of accelerate and of pytest.
FOREIGN = {"config-file", "num-processes"}


def split(command):
    """A command as (script, words), without a launcher; for `python -m luna_hf NAME`, the script is the module."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    if words[1:3] == ["-m", "luna_hf"]:
        return f"luna_hf.{words[3]}.command", words[4:]
    place = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return words[place], words[place + 1 :]


def entry(script):
    """The `main` of a command."""
    return importlib.import_module(script.split("/")[-1].removesuffix(".py")).main


def accept(script, words):
    """Parse a command with its own parser; raises if a word is refused."""
    module = importlib.import_module(script.split("/")[-1].removesuffix(".py"))
    if hasattr(module, "read_recipe"):
        return module.read_recipe(words[0], words[1:])
    if hasattr(module, "Settings"):
        return options.parse([module.Settings], words, recipe="none", positional="models")
    return module.parse(words)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the pages name: models, texts, task data, and a stand-in for roberta-base."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("luna-demo", "luna-base-tied"):
        checkpoint(folder / "outputs" / name, max_position_embeddings=128)
    checkpoint(folder / "outputs" / "abc-base-distilled", "abc_memory", max_position_embeddings=128)
    checkpoint(folder / "FacebookAI" / "roberta-base", "roberta")
    write_sentences(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    write_corpus(folder / "texts")
    write_parallel(folder / "bentrevett" / "multi30k")
    (folder / "FOLDER").mkdir()
    for split in ("train", "validation", "test"):
        documents = [f"one red dog runs {'and a cat sees it ' * (place % 3)}" for place in range(12)]
        summaries = ["a dog" if place % 3 else "a cat" for place in range(12)]
        write_rows(folder / "FOLDER" / f"{split}.csv", {"document": documents, "summary": summaries})
    glue_folder(folder / "glue")
    for name, seed in (("train", 0), ("dev", 1)):
        texts, labels = topics(32, seed)
        rows = {"text": texts, "label": [["no", "yes"][label] for label in labels]}
        for place in (folder, folder / "outputs"):
            write_rows(place / f"{name}.csv", rows)
    write_words(folder)
    for name in ("training", "checkpoints", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def write_words(folder):
    """Rows of labelled words, and questions with their contexts and answers."""
    people, places = ["Paul", "Mary", "John", "Jane"], ["London", "Paris", "England"]
    texts = ["{} is in {} .", "Yesterday {} went to {} .", "I saw {} in {} .", "{} will not leave {} ."]
    words, questions = [], []
    for text, person, place in itertools.product(texts, people, places):
        labels = {person: "PER", place: "LOC"}
        split = text.format(person, place).split()
        words.append({"words": split, "labels": [labels.get(word, "O") for word in split]})
        context = text.format(person, place).replace(" .", ".")
        row = {"question": f"Where is {person}?", "context": context, "answer": place, "start": context.index(place)}
        questions.append(row)
    for name, rows in (("names", words), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_miniature(script, words):
    """The words of a command with those that shrink it, where it does not set the option itself."""
    small = MINIATURE[script.split("/")[-1].removesuffix(".py")]
    given = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    if "minilm" in words[0]:  # which starts from a large encoder
        small = {**small, "initial_encoder": "outputs/luna-demo", "model.max_position_embeddings": 128}
        small = {name: value for name, value in small.items() if name not in ENCODERS_OWN}
    if "teacher" in given or "continue" in words[0]:
        small = {name: value for name, value in small.items() if not name.startswith("model.")}
    if "abc" in words[0] or "lavo" in words[0]:  # its slots are a field of another name
        small = {name: value for name, value in small.items() if name != "model.projection_length"}
    if "train_file" in given:
        small = {name: value for name, value in small.items() if name != "dataset_name"}
    added = {name: value for name, value in small.items() if name not in given - {"block_size", "batch_size"}}
    return [*words, *(word for name, value in added.items() for word in (f"--{name}", str(value)))]


def slow_if_exported(page):
    """A page as a parameter: exporting a large model and compiling one take minutes."""
    is_slow = any(name in PAGES[page] for name in ("aoti_compile", "torch.onnx.export(\n"))
    return pytest.param(page, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("page", [slow_if_exported(page) for page, text in PAGES.items() if STEPS.search(text)])
def test_examples_run(page, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    for step in STEPS.finditer(PAGES[page]):
        capsys.readouterr()
        if step["code"]:
            exec(step["code"], {})
            assert step["shown"] in (None, capsys.readouterr().out)
            continue
        script, words = split(step["command"])
        accept(script, words)
        if script.split("/")[-1].removesuffix(".py") in MINIATURE and step["command"].startswith("python"):
            AcceleratorState._reset_state(reset_partial_state=True)  # as in a separate process
            assert entry(script)(in_miniature(script, words)) == 0, capsys.readouterr().err


def test_commands_in_the_text_and_of_results_are_accepted(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = {command for text in TEXTS.values() for command in re.findall(r"`(python [\w/]+\.py[^`]*)`", text)}
    source = r"\[Commands and data\]\([./]*(\w+/results/[\w.-]+\.json)\)"
    for name in {name for text in PAGES.values() for name in re.findall(source, text)}:
        result = RESULTS[ROOT / name]
        commands |= {result["command"], *result.get("commands", [])}
    assert len(commands) > 60
    for script, words in map(split, commands):
        if script != "benchmarks/update_docs.py":
            accept(script, words)


def test_options_exist(capsys):
    commands = [split(step["command"]) for text in PAGES.values() for step in STEPS.finditer(text) if step["command"]]
    known = set(FOREIGN)
    for script, subcommand in {
        (script, words[0] if words[:1] and words[0].isalpha() else "") for script, words in commands
    }:
        with pytest.raises(SystemExit):
            entry(script)([*filter(None, [subcommand]), "--help"])
        known |= {key.replace("_", "-") for key in re.findall(r"--([a-z][\w-]+)", capsys.readouterr().out)}
    for page, text in PAGES.items():
        named = {key.replace("_", "-") for key in re.findall(r"`--([a-z][\w-]+)", text)}
        assert named <= known | {"model"}, (page, named - known)


def anchors(text):
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_paths_and_targets_exist(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXTS[page]):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    for path in re.findall(
        r"(?<![\w/.])(?:training|benchmarks|conversion|experiments|tests|src)/[\w./-]*\w(?![\w<])", TEXTS[page]
    ):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", TEXTS[page], re.MULTILINE):
        assert f"\n{target}:" in makefile, target


def test_measured_tables_are_fresh():
    for page, text in PAGES.items():
        assert update_docs.render(text, ROOT / page) == text, f"{page}: run `python benchmarks/update_docs.py`"
    used = [name for text in PAGES.values() for _, name, _ in update_docs.MARKER.findall(text)]
    assert set(used) == set(update_docs.BLOCKS)


def test_results_name_command_machine_and_versions():
    for path, result in RESULTS.items():
        assert result["command"].startswith("python ") and (result.get("machine") or result["hardware"]), path.name
        assert "torch" in result["versions"], path.name
        assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text(encoding="utf-8")), path.name
