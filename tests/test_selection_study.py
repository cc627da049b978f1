"""The study of selected tokens: its emulation is the library's attention, and what is finished is kept."""

import random

import docs_studies
import pytest
import running
import selection
import selection_report
import selection_time
import torch
from selection_rules import Lsg, Memory, install
from transformers import BertConfig, BertModel, BertTokenizer

WORDS = ["a", "query", "reads", "its", "window", "and", "what", "each", "head", "selects", "far", "away"]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
RULE = Memory(8, 5, queries=4, slots=4)
COMMAND = "python experiments/selection.py"


def make_source(folder):
    """A BERT whose attention is far from uniform, with a tokenizer of a few words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, vocab_size=len(special) + len(WORDS), initializer_range=0.5)).eval()
    model.save_pretrained(folder)
    BertTokenizer({word: number for number, word in enumerate([*special, *WORDS])}).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    make_source(folder)
    return str(folder)


@pytest.fixture
def model(source):
    return BertModel.from_pretrained(source).eval()


@pytest.fixture
def words(source, tmp_path):
    """The words of a command behind its step: two rows of each length from one text."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=1100)))
    results = ["--results", str(tmp_path / "results")]
    return ["--source", source, "--texts", str(text), "--rows", "2", "--length", "600", "--repeats", "1", *results]


@pytest.fixture
def few(monkeypatch):
    """The study with a few rules in every table."""
    rules = {
        "sizes": [Memory(64, 16, slots=16)],
        "parts": [Memory(1024), Memory(64)],
        "queries": [Memory(64, 64, count, 16) for count in (4, 8)],
        **{"slots": [], "more": [], "variants": [], "lsg": [Lsg(256), Lsg(32)]},
    }
    monkeypatch.setattr(selection, "groups", lambda: rules)
    return [rule.name() for group in rules.values() for rule in group]


def row(length):
    return torch.randint(5, 5 + len(WORDS), (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def states(model, ids, **options):
    return model(ids, **options).last_hidden_state


def check(path):
    result = running.read_json(path)
    assert path.with_suffix(".md").read_text() == selection_report.text(result, selection.groups()) + "\n"
    assert result["command"].startswith(f"{COMMAND} ") and result["command"] in result["commands"]
    assert path.with_suffix(".png").stat().st_size > 5_000
    return result


# ---- rules ----


@pytest.mark.parametrize("rule", [Memory(96), Memory(4, 48), Memory(4, 60, slots=8), Memory(4, 2, slots=48)])
def test_a_memory_of_all_tokens_is_the_source(model, rule):
    goal = states(model, row(48))
    install(model).rule = rule
    torch.testing.assert_close(states(model, row(48)), goal, rtol=1e-5, atol=1e-5)
    install(model).rule = RULE
    assert not torch.allclose(states(model, row(48)), goal, atol=1e-2)


@pytest.mark.parametrize("rule", [RULE, Memory(8, 5, queries=4), Memory(9, slots=4), Memory(8)])
def test_the_emulation_is_the_librarys_model(source, model, rule):
    converted = selection_time.convert(source, rule, 512)
    install(model).rule = rule
    found = states(converted, row(50), **selection_time.options_of(rule))
    torch.testing.assert_close(states(model, row(50)), found, rtol=1e-5, atol=1e-5)


def test_a_variant_is_not_converted(source):
    with pytest.raises(ValueError, match="shared=True"):
        selection_time.convert(source, Memory(8, 5, shared=True), 512)


@pytest.mark.parametrize(
    "rule",
    [Lsg(24), *(Lsg(16, 1, kind) for kind in ("stride", "block_stride", "norm", "pooling", "bos_pooling"))],
    ids=lambda rule: f"{rule.block}-{rule.kind}",
)
def test_lsg_attention_of_all_tokens_is_the_source(model, rule):
    """Rows of two blocks, and of three with every token kept; the source reads the global token as well."""
    ids, position_ids = rule.lengthen(row(48)), rule.positions(48)[None]
    goal = states(model, ids, position_ids=position_ids)
    install(model).rule = rule
    found = states(model, ids, position_ids=position_ids)
    torch.testing.assert_close(found, goal, rtol=1e-5, atol=1e-5)
    assert rule.shorten(found).shape == (2, 48, SIZES["hidden_size"])
    install(model).rule = Lsg(8)
    assert not torch.allclose(states(model, ids, position_ids=position_ids), goal, atol=1e-2)


# ---- commands ----


def test_a_stopped_run_continues(words, few, tmp_path, monkeypatch):
    compared, compare = [], selection.compare

    def stop_at_the_third(model, emulation, rule, *rest):
        if len(compared) == 4:  # two rules, each at both lengths
            raise KeyboardInterrupt
        compared.append(rule.name())
        return compare(model, emulation, rule, *rest)

    monkeypatch.setattr(selection, "compare", stop_at_the_third)
    assert selection.main(["cosine", *words]) != 0
    path = tmp_path / "results" / "selection.json"
    before = running.read_json(path)["cells"]
    assert list(before) == few[:2]

    monkeypatch.setattr(selection, "compare", lambda *given: compared.append(given[2].name()) or compare(*given))
    assert selection.main(["cosine", *words]) == 0
    result = check(path)
    assert list(result["cells"]) == few and compared == [name for name in few for _ in range(2)]
    assert all(result["cells"][name] == cell for name, cell in before.items())
    whole = result["cells"][Memory(1024).name()]["cosines"]
    assert {round(value, 5) for length in ("256", "512") for value in whole[length]} == {1.0}

    assert selection.main(["cosine", *words, "--rows", "1"]) == 2  # other rows


def test_conversions_are_timed(words, few, tmp_path, monkeypatch, capfd):
    assert selection.main(["cosine", *words]) == selection.main(["time", *words]) == 0
    assert "Warm-started" not in capfd.readouterr().err
    path = tmp_path / "results" / "selection.json"
    result = check(path)
    windows = [Memory(width).name() for width in selection.WINDOWS]
    assert list(result["times"]) == [*windows, few[0], *few[3:5]]
    for name in result["times"].keys() & result["cells"].keys():
        emulated, converted = (result[kind][name]["cosines"] for kind in ("cells", "times"))
        for length in ("256", "512"):
            assert converted[length] == pytest.approx(emulated[length], abs=1e-5)
    kept = path.read_text()
    assert selection.main(["time", *words]) == selection.main(["report", *words]) == 0
    assert path.read_text() == kept

    monkeypatch.setattr(docs_studies, "load", lambda _: result)
    section = docs_studies.selection_times()
    assert section.startswith("## Time\n\n") and section.count("\n| 64 |") == 3
    result["times"] = {}
    assert docs_studies.selection_times() == ""


def test_committed_results():
    result = check(running.RESULTS / "selection.json")
    assert {rule.name() for group in selection.groups().values() for rule in group} == set(result["cells"])
