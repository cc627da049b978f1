"""The cost of converted sentence encoders: what is timed, how it is compared, and where the plot puts it."""

import json
from functools import partial

import measuring
import minilm_cost
import minilm_cost_report
import pytest
import torch
from minilm_contenders import Reader
from minilm_tasks import Search
from test_convert_command import WORDS, write_model
from transformers import AutoModel, AutoTokenizer

from luna_hf import AbcModel

TEXTS = {"d": " ".join(WORDS * 2), "e": " ".join(WORDS)}
FIELDS = {"local_window": 4, "memory_size": 2, "memory_control": "compressive", "max_length": 60, "position_period": 40}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def conversion(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "abc-tiny"
    AbcModel.from_pretrained_encoder(source, **FIELDS).save_pretrained(folder)
    return folder


@pytest.fixture
def words(source, conversion, tmp_path, monkeypatch):
    """A command line of seconds: windows of 16 and 24 tokens, 40 positions, two number formats."""
    for module in (minilm_cost, minilm_cost_report):
        monkeypatch.setattr(module, "WINDOWS", (16, 24))
    tasks = dict.fromkeys(minilm_cost.TASKS, lambda _: {"test": Search({}, TEXTS, {})})
    monkeypatch.setattr(minilm_cost, "LONG", tasks)
    monkeypatch.setattr(minilm_cost, "FORMAT_LENGTHS", (48,))
    monkeypatch.setattr(measuring, "in_own_process", lambda function, *words: function(*words))
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)  # slow in this large process
    options = {"--teacher": source, "--data": tmp_path, "--models": conversion, "--results": tmp_path}
    return ["measure", *(str(word) for pair in options.items() for word in pair)]


def test_all_is_measured_and_reported(words, tmp_path, monkeypatch, capsys):
    scores = {"teacher, cut at 256": 60.0, "teacher, mean of windows of 24": 70.0, "BM25": 80.0, "other": 90.0}
    scores |= {"abc-tiny": 75.0, "abc-tiny, untrained": 65.0, "abc-tiny, queries of the teacher": 50.0}
    tasks = {task: {name: {"score": score} for name, score in scores.items()} for task in ("race", "novels")}
    (tmp_path / "minilm.json").write_text(json.dumps({"scores": tasks}))
    words += ["--lengths", "16", "32", "48", "100", "--ways", "bfloat16", "int8", "--rounds", "2"]
    assert minilm_cost.main(words) == 0
    path = tmp_path / "minilm_cost.json"
    result = json.loads(path.read_text())
    assert result["document_tokens"] == dict.fromkeys(minilm_cost.TASKS, 14)
    assert result["models"]["abc-tiny"]["bfloat16"]["cosine"] == pytest.approx(1, abs=0.01)
    found = {(entry["length"], entry["rows"], entry["call"]): entry["models"] for entry in result["lengths"]}
    assert {key for key in found if key[2] != "pytorch"} == {(48, 1, "bfloat16"), (48, 1, "int8")}
    assert set(found[16, 8, "pytorch"]) == {"teacher", "abc-tiny"}
    assert set(found[32, 1, "pytorch"]) == {
        *("teacher", "teacher, windows of 16", "teacher, windows of 24", "abc-tiny", "bag of word vectors", "BM25")
    }
    long = found[100, 1, "pytorch"]
    assert "teacher" not in long and long["abc-tiny"]["speed_over"].keys() == {"teacher, windows of 24"}
    assert set(found[48, 1, "int8"]) == {"teacher, windows of 24", "abc-tiny"}
    assert found[48, 1, "int8"]["abc-tiny"]["over_float32"]["median"] > 0
    assert all("peak_memory_bytes" in found[48, 1, way]["abc-tiny"] for way in ("pytorch", "int8"))
    text = path.with_suffix(".md").read_text()
    assert "| 8 x 16 |" in text and "| abc-tiny | bfloat16 |" in text and "| teacher | int8 |" in text
    plot = path.with_suffix(".png").read_bytes()
    assert len(plot) > 10_000
    assert minilm_cost.main(["report", "--results", str(tmp_path)]) == 0
    assert path.with_suffix(".png").read_bytes() == plot  # the report measures nothing
    monkeypatch.delattr(minilm_cost, "time_job")
    assert minilm_cost.main(words) == 0 and json.loads(path.read_text()) == result  # all is kept
    path.write_text(json.dumps({**result, "machine": {"cpu": "another"}}))
    assert minilm_cost.main(words) == 2 and "--results" in capsys.readouterr().err.splitlines()[-1]


def test_texts_become_equal_windows(source):
    tokenizer = AutoTokenizer.from_pretrained(source)
    plan = minilm_cost.Plan(str(source), 16, range(99), True)
    (batch,) = minilm_cost.make_batches(tokenizer, plan, 30, rows=2)
    ids = batch["input_ids"]
    assert ids.shape == (4, 16) and batch["attention_mask"].all()
    assert set(ids[:, 0].tolist()) == {tokenizer.cls_token_id} and set(ids[:, -1].tolist()) == {tokenizer.sep_token_id}
    assert torch.equal(ids[:, 1:-1].flatten(), minilm_cost.novel_ids(tokenizer)[: 4 * 14])
    assert len(minilm_cost.make_batches(tokenizer, plan._replace(together=False), 30)) == 2
    vectors = minilm_cost.Embedder(str(source))(**batch).logits
    reader = Reader(partial(AutoModel.from_pretrained, source), tokenizer)
    torch.testing.assert_close(vectors, reader.read(ids[:, 1:-1].tolist()), check_dtype=False)


def test_time_between_the_measured_lengths():
    curve = {100: 1.0, 200: 2.0, 400: 8.0}
    assert [minilm_cost_report.at(curve, n) for n in (50, 150, 200, 300, 800)] == pytest.approx([0.5, 1.5, 2, 4.5, 32])


def test_cost_of_the_contenders_of_the_judgement():
    seconds = {"teacher": {100: 1.0, 400: 4.0}, "teacher, windows of 128": {400: 3.0, 800: 6.0}}
    seconds["abc"] = {100: 2.0, 800: 16.0}
    lengths = [
        {"call": "pytorch", "rows": 1, "length": n, "models": {name: {"seconds": {"median": own[n]}}}}
        for name, own in seconds.items()
        for n in own
    ]
    cost = partial(minilm_cost_report.cost, {"lengths": lengths})
    assert cost("teacher, cut at 256", 800) == pytest.approx(2.56)
    assert cost("teacher, best window of 128", 800) == pytest.approx(6)
    assert cost("teacher, mean of windows of 128", 100) == pytest.approx(1)
    assert cost("abc, untrained", 400) == cost("abc", 400) == pytest.approx(8)
    assert cost("abc, without slots", 400) is None and cost("teacher, mean of windows of 256", 400) is None


def test_names_in_the_plot_cover_nothing():
    figure, axes = minilm_cost_report.panels(1, 1, (8, 6), squeeze=False)
    points = [minilm_cost_report.Point(f"contender {n}", 1 + n / 100, 50 + n / 10) for n in range(8)]
    minilm_cost_report.draw(axes[0, 0], "", points, {})
    figure.draw_without_rendering()
    minilm_cost_report.label(axes[0, 0], points)
    figure.draw_without_rendering()
    from matplotlib.text import Text

    boxes = [Text.get_window_extent(text) for text in axes[0, 0].texts]
    assert len(boxes) == 8
    assert not any(box.overlaps(other) for n, box in enumerate(boxes) for other in boxes[:n])


def test_mistakes_are_one_line(source, conversion, tmp_path, capsys):
    shared = ["--teacher", str(source), "--results", str(tmp_path)]
    for words, named in {
        ("measure", "--models", conversion): "--data",
        ("measure", "--data", tmp_path): "--models",
        ("measure", "--data", tmp_path, "--models", tmp_path / "none"): "none",
        ("measure", "--data", tmp_path, "--models", conversion, conversion): "Rename",
        ("measure", "--data", tmp_path, "--models", conversion, "--lengths", "2"): "--lengths",
        ("report",): "measure",
    }.items():
        assert minilm_cost.main([*map(str, words), *shared]) == 2
        assert named in capsys.readouterr().err.splitlines()[-1]
