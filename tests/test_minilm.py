"""The judgement of converted sentence encoders: its tasks, ways and figures are what its page says."""

import json
import math
from collections import Counter
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import late_chunking
import minilm
import minilm_contenders
import minilm_late
import minilm_tasks
import pytest
import torch
from minilm_contenders import Bm25, Contender, Reader
from minilm_tasks import Labels, Pairs, Search
from pyarrow import Table, parquet
from sentence_transformers import SentenceTransformer
from test_convert_command import WORDS, write_model
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from luna_hf import AbcModel
from luna_hf.late_chunking import embed_spans

needs_mteb = pytest.mark.skipif(find_spec("mteb") is None, reason="mteb is not installed")
TEXTS = [" ".join((WORDS * 3)[start : start + size]) for start, size in ((0, 3), (1, 9), (2, 20), (1, 9))]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def reader(source):
    return Reader(partial(AutoModel.from_pretrained, source), AutoTokenizer.from_pretrained(source))


@pytest.fixture(scope="module")
def conversion(source):
    """A Reader of texts of up to 60 tokens, and its folder."""
    fields = {"local_window": 4, "num_selected_tokens": 4, "memory_size": 2, "memory_control": "compressive"}
    model = AbcModel.from_pretrained_encoder(source, max_length=60, position_period=40, **fields)
    return Reader(lambda: model, AutoTokenizer.from_pretrained(source))


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pydict(columns), path)


# ---- ways ----


def test_windows_are_averaged_and_the_best_one_counts(reader):
    ids = reader.ids(TEXTS)
    assert [len(text) for text in ids] == [3, 9, 20, 9]
    bounds = [[0, 3], [0, 5, 9], [0, 5, 10, 15, 20], [0, 5, 9]]  # windows of 6 tokens and two ends, equally long
    parts = [
        reader.read([text[first:last] for first, last in pairwise(own)]) for text, own in zip(ids, bounds, strict=True)
    ]
    means = normalize(torch.stack([part.mean(0) for part in parts]), dim=-1)
    torch.testing.assert_close(reader.windows(8)(ids), means)
    torch.testing.assert_close(reader.cut(8)(ids), reader.read([text[:6] for text in ids]))
    best = minilm_contenders.similarity(means[:2], reader.best_window(8)(ids))
    torch.testing.assert_close(best[1, 2], (parts[2] @ means[1]).max())
    table = reader.model.get_input_embeddings().weight
    torch.testing.assert_close(reader.bag(ids)[0], normalize(table[ids[0]].mean(0), dim=0))
    assert torch.equal(reader.read(ids)[1], reader.read(ids)[3])
    reader.forget()
    assert not reader.known


def test_long_texts_are_read_in_equal_passes(conversion):
    ids = [conversion.ids(TEXTS)[2] * 4]  # 80 tokens; a pass takes 58
    own = minilm_contenders.in_one_pass(conversion)
    parts = conversion.read([ids[0][:40], ids[0][40:]])
    for read in (own.documents, own.queries):
        torch.testing.assert_close(read(ids)[0], normalize(parts.mean(0), dim=0))


def test_every_contender_reads_whole_queries(reader, conversion, monkeypatch):
    monkeypatch.setattr(minilm_contenders, "SOURCE_LENGTH", 8)
    models = SimpleNamespace(teacher=reader, readers={"abc": {"": conversion, "untrained": conversion}})
    ids = reader.ids(TEXTS)
    for step, task in (("long", "race"), ("shared", "race")):
        for name, contender in minilm.contenders(models, step, task).items():
            is_source = name.startswith("teacher") or name.endswith("of the teacher")
            if contender is not None and name != "bag of word vectors":
                whole = reader.windows(8)(ids) if is_source else conversion.windows(60)(ids)
                torch.testing.assert_close(contender.queries(ids), whole)


def test_long_answers_are_also_cut_where_the_source_cuts_them(reader, conversion, monkeypatch):
    monkeypatch.setattr(minilm, "SOURCE_LENGTH", 8)
    models = SimpleNamespace(teacher=reader, readers={"abc": {"": conversion, "untrained": conversion}})
    assert "abc, cut at 8" not in minilm.contenders(models, "short", "stsb")
    assert "abc, cut at 8" not in minilm.contenders(models, "long", "race")
    found = minilm.contenders(models, "short", "medquad")["abc, cut at 8"]
    cut = conversion.read([ids[:6] for ids in conversion.ids(TEXTS)])
    for are_queries in (False, True):
        torch.testing.assert_close(found.embed(TEXTS, are_queries), cut)


@torch.no_grad()
def test_parts_are_switched_off(source):
    fields = {"local_window": 4, "num_selected_tokens": 4, "softmax_length": 4, "memory_size": 2}
    make = partial(AbcModel.from_pretrained_encoder, source, memory_control="compressive", **fields)
    ids = torch.randint(5, 12, (1, 30))
    slots = minilm_contenders.without(make().eval(), "slots")(ids).last_hidden_state
    torch.testing.assert_close(slots, make().eval()(ids, read_slots=False).last_hidden_state)
    exact = AbcModel.from_pretrained_encoder(source, memory_control="compressive", local_window=4, memory_size=2).eval()
    selected = minilm_contenders.without(make().eval(), "selected tokens")(ids).last_hidden_state
    torch.testing.assert_close(selected, exact(ids).last_hidden_state)
    both = minilm_contenders.without(make().eval(), minilm_contenders.BOTH)(ids).last_hidden_state
    torch.testing.assert_close(both, exact(ids, read_slots=False).last_hidden_state)
    assert minilm_contenders.switches(make().config) == ["slots", "selected tokens", minilm_contenders.BOTH]
    assert minilm_contenders.switches(exact.config) == ["slots"]
    assert not torch.allclose(slots, selected) and not torch.allclose(slots, both)


def test_bm25_is_its_formula():
    texts, query = ["a b b c", "b d", "e e e f g A"], "a b z b"
    lengths = [4, 2, 6]

    def weight(word, number):
        count = texts[number].lower().split().count(word)
        having = sum(word in text.lower().split() for text in texts)
        rare = math.log(1 + (3 - having + 0.5) / (having + 0.5))
        return rare * count / (count + 1.5 * (0.25 + 0.75 * lengths[number] / 4))

    expected = [
        sum(times * weight(word, number) for word, times in Counter(query.split()).items()) for number in range(3)
    ]
    assert Bm25(texts).scores([query, "z"]).tolist() == [pytest.approx(expected), [0, 0, 0]]


# ---- late chunking ----


@torch.no_grad()
def test_a_span_is_the_mean_of_its_states(conversion):
    text, model, tokenizer = TEXTS[2], conversion.model, conversion.tokenizer
    spans = [(0, len("reads the")), (len("reads "), len(text)), (len("re"), len("reads t"))]
    states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    expected = [states[1:3].mean(0), states[2:-1].mean(0), states[1:3].mean(0)]
    found = embed_spans(model, tokenizer, text, spans)
    torch.testing.assert_close(found, normalize(torch.stack(expected), dim=-1))
    assert embed_spans(model, tokenizer, text, []).shape == (0, 32)
    torch.testing.assert_close(embed_spans(model, tokenizer, text, iter(torch.tensor(spans))), found)


def test_a_prompt_stands_before_the_document_and_before_each_passage(conversion):
    model, tokenizer = conversion.model, conversion.tokenizer
    text, prompt, spans = "the token packed", "in turn ", [(0, 9), (4, 16)]
    after = [(start + len(prompt), end + len(prompt)) for start, end in spans]
    expected = embed_spans(model, tokenizer, prompt + text, after)
    torch.testing.assert_close(embed_spans(model, tokenizer, text, spans, prompt=prompt), expected)
    alone = conversion.read(conversion.ids([prompt + text[start:end] for start, end in spans]))
    both = embed_spans(model, tokenizer, text, spans, alone=True, prompt=prompt)
    torch.testing.assert_close(both, normalize(expected + alone, dim=-1))


def test_what_would_embed_silently_wrong_is_refused(conversion, source):
    with pytest.raises(TypeError, match="list, not a string"):
        embed_spans(conversion.model, conversion.tokenizer, ["the turn"], [(0, 3)])
    for module in (SentenceTransformer(str(source)), SentenceTransformer(str(source))[0]):
        with pytest.raises(TypeError, match="auto_model"):
            embed_spans(module, conversion.tokenizer, "the turn", [(0, 3)])
    conversion.model.train()
    with pytest.raises(ValueError, match="training mode"):
        embed_spans(conversion.model, conversion.tokenizer, "the turn", [(0, 3)])
    conversion.model.eval()


@pytest.mark.parametrize(
    ("text", "span", "named"),
    [
        (" ".join(WORDS * 8), (0, 5), "66"),
        ("the  turn", (3, 5), "(3, 5)"),
        ("the turn", (4, 9), "9"),
        ("the", (-1, 2), "-1"),
    ],
)
def test_spans_that_cannot_be_embedded(text, span, named, conversion):
    with pytest.raises(ValueError, match=named.replace("(", r"\(").replace(")", r"\)")):
        embed_spans(conversion.model, conversion.tokenizer, text, [span])


ARTICLES = {"Packed_token": [WORDS[3:6], WORDS[5:8] * 9, ["token"]], "Turn": [["in", "the"], ["every", "turn"]]}


@pytest.fixture
def late(tmp_path, reader, monkeypatch):
    rows = [
        {"title": title, "context": " ".join(passage), "question": f"{number} {asked} {' '.join(passage)}"}
        for title, passages in ARTICLES.items()
        for number, passage in enumerate(passages)
        for asked in ("sequence", "packing", "turned")
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    monkeypatch.setattr(minilm_late, "FILES", ["one", "other"])
    monkeypatch.setattr(minilm_late, "LONGEST", 34)
    write(tmp_path / "one.parquet", **{name: values[:6] for name, values in columns.items()})
    write(tmp_path / "other.parquet", **{name: values[6:] for name, values in columns.items()})
    return minilm_late.Late(tmp_path, reader)


def test_questions_whose_passage_does_not_name_the_subject(late):
    assert late.counts() == {"articles": 2, "passages": 5, "questions": 6}
    # "the packed sequence" and "token" name the first article, "every turn" the second.
    assert {question.passage for question in late.questions} == {1, 3}
    asked = {(question.text.split(" ")[0], question.names) for question in late.questions}
    assert asked == {("1", True), ("0", True), ("Packed", False), ("Turn:", False)}
    assert late.runs == [[range(0, 2), range(2, 3)], [range(0, 2)]]


def test_passages_in_context_are_spans_of_their_article(late, conversion):
    found = late.in_context(conversion, titles=True)
    text = "Turn\n\nin the\n\nevery turn"
    expected = embed_spans(conversion.model, conversion.tokenizer, text, [(6, 12), (14, 24)])
    torch.testing.assert_close(found[3:], expected)
    assert found.shape == late.alone(conversion).shape and not torch.allclose(found, late.in_context(conversion))
    alone = late.alone(conversion)
    both = embed_spans(conversion.model, conversion.tokenizer, text, [(6, 12), (14, 24)], alone=True)
    torch.testing.assert_close(both, normalize(late.in_context(conversion, titles=True) + alone, dim=-1)[3:])
    mean = late.with_mean(alone)
    torch.testing.assert_close(mean[4], normalize(alone[4] + normalize(alone[3:].mean(0), dim=0) / 2, dim=0))


def test_figures_of_late_chunking(late):
    scores = torch.zeros(len(late.questions), 5)
    scores[:, 0] = 1.0
    scores[0, late.answers[0]] = 2.0
    figures = late.figures(scores)
    tie = 100 / math.log2(6)  # all others are tied behind the first passage
    assert figures["score"] == pytest.approx((100 + 5 * tie) / 6, abs=0.01)
    assert figures["places"].keys() <= {*minilm_late.PLACES.values()}


def test_the_example_of_late_chunking(source, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("the token\n\nin turn\n")
    assert late_chunking.main([str(source), "--document", str(path), "--question", "the token"]) == 0
    question, _, first, second = capsys.readouterr().out.splitlines()
    assert question == "the token" and first.endswith("the token") and second.endswith("in turn")
    path.write_text(" ".join(WORDS * 9))
    assert late_chunking.main([str(source), "--document", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- tasks ----


def test_texts_with_a_hidden_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(minilm_tasks, "LENGTHS", (256,))
    texts = ["xx answer", "answer x x x x", "none"]
    write(tmp_path / "needle/corpus.parquet", doc_id=["2", "1", "0"], text=texts, context_length=[256] * 3)
    write(tmp_path / "needle/qrels.parquet", qid=["a", "b"], doc_id=["2", "1"])
    asked = {"text": ["what", "who"], "answer": ["answer", "answer"], "context_length": [256] * 2}
    write(tmp_path / "needle/queries.parquet", qid=["a", "b"], **asked)
    part = minilm_tasks.LONG["needle"](tmp_path)["256"]
    assert part.answers == {"a": ["a-2"], "b": ["a-1"]} and sorted(part.documents)[-1] == "b-0"
    assert part.places == {"a": "second third", "b": "first third"}


def test_documents_of_beir_are_sampled_with_the_right_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(minilm_tasks, "MEDICAL", 4)
    names = [str(number) for number in range(9)]
    write(tmp_path / "medquad/corpus.parquet", _id=names, title=["t"] * 9, text=["x"] * 9)
    write(tmp_path / "medquad/queries.parquet", _id=["a", "b"], text=["what", "who"])
    write(tmp_path / "medquad/qrels_test.parquet", **{"query-id": ["a", "a"], "corpus-id": ["8", "7"]})
    part = minilm_tasks.SHORT["medquad"](tmp_path)["test"]
    assert part.queries == {"a": "what"} and part.answers == {"a": ["8", "7"]}
    assert {"7", "8"} < part.documents.keys() and len(part.documents) < 7 and set(part.documents.values()) == {"x"}


# ---- the command ----


def test_report(tmp_path):
    scores = {
        "sts12": {"teacher, cut at 256": {"score": 72.366}, "abc": {"score": 72.0}},
        "race": {
            "teacher, cut at 256": {"score": 80.0},
            "abc, queries of the teacher": {"score": 79.0},
            "abc": {"score": 81.0},
        },
        "needle": {
            "abc": {"score": 50.0, "splits": {"256": 60.0, "1024": 40.0}, "places": {"256": {"last third": 30.0}}}
        },
        "ArguAna": {"abc": {"score": 50.17}},
    }
    late = {"abc, late chunking": {"score": 70.0, "named": 60.5, "places": {"0 to 255": 71.0}}}
    path = tmp_path / "minilm.json"
    path.write_text(json.dumps({"scores": scores, "late": late}))
    assert minilm.main(["report", "--results", str(tmp_path)]) == 0
    text = path.with_suffix(".md").read_text()
    for row in (
        "| teacher, cut at 256 | 72.37 | 72.37 |",
        "| abc | 81.00 | 81.00 |",
        "| teacher, cut at 256 | 80.00 | 80.00 |",
        "| abc, queries of the teacher | 79.00 |",
        "| abc | 50.0 | 60.0 | 40.0 | - | - | 30.0 |",
        "| abc, late chunking | 70.00 | 60.50 | 71.00 |",
        "| abc | 50.17 | 50.17 |",
    ):
        assert row in text, text
    assert path.with_suffix(".png").stat().st_size > 1000


def test_mistakes_are_one_line(source, late, tmp_path, monkeypatch, capsys):
    shared = ["--teacher", str(source), "--results", str(tmp_path / "results")]
    for words, named in {
        ("late",): "--data",
        ("late", "--data", tmp_path, "--models", tmp_path / "none"): "none",
        ("late", "--data", tmp_path, "--models", source): "card",
        ("late", "--data", tmp_path, "--contenders", "techer"): "techer",
        ("report",): "minilm.py",
    }.items():
        assert minilm.main([*map(str, words), *shared]) == 2
        assert named in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(minilm, "find_spec", lambda _: None)
    assert minilm.main(["short", *shared]) == 2
    assert "judge" in capsys.readouterr().err.splitlines()[-1]


def test_late_is_kept_and_continued(source, late, tmp_path, capsys):
    words = ["late", "--teacher", str(source), "--data", str(tmp_path), "--results", str(tmp_path)]
    assert minilm.main([*words, "--contenders", "BM25, passage alone"]) == 0
    path = tmp_path / "minilm.json"
    result = json.loads(path.read_text())
    result["late"]["BM25, passage alone"]["score"] = "kept"
    path.write_text(json.dumps(result))
    assert minilm.main(words) == 0
    scores = json.loads(path.read_text())["late"]
    assert scores.pop("BM25, passage alone")["score"] == "kept" and len(scores) == 4


# ---- mteb ----


@needs_mteb
def test_tasks_of_mteb(reader):
    from minilm_mteb import VectorModel, WordModel, local_task, score

    own = Contender(reader.ids, reader.cut(40), reader.cut(4))
    model = VectorModel("tiny", own)
    pairs = Pairs(TEXTS[:3], [TEXTS[0], TEXTS[2], TEXTS[0]], [5.0, 1.0, 2.0])
    assert -100 <= score(model, local_task("stsb", {"test": pairs}))["score"] <= 100
    labels = Labels((TEXTS[:3] * 8, [0, 1, 2] * 8), (TEXTS[:3], [0, 1, 2]))
    whole = VectorModel("tiny", Contender(reader.ids, reader.cut(40), reader.cut(40)))
    assert score(whole, local_task("trec", {"test": labels})) == {"score": 100, "error": 0}
    # Documents that are equal up to the cut are tied, and a tie counts against the model.
    documents = {"a-1": "the turn in", "b-0": "the turn every", "b-2": "token"}
    search = {"256": Search({"q": "the turn"}, documents, {"q": ["a-1"]}, {"q": "last third"})}
    search["1024"] = search["256"]
    tied = score(model, local_task("needle", search))
    assert tied == {
        "score": 0,
        "splits": {"256": 0, "1024": 0},
        "places": {"256": {"last third": 0}, "1024": {"last third": 0}},
    }
    found = score(WordModel(), local_task("race", {"test": Search({"q": "in turn"}, documents, {"q": ["a-1"]})}))
    assert found == {"score": 100}
    best = VectorModel("best", Contender(reader.ids, reader.cut(40), reader.best_window(4)))
    searched = {"test": Search({"q": "every turn"}, {"a": "the token in turn every turn", "b": "the"}, {"q": ["a"]})}
    assert score(best, local_task("race", searched)) == {"score": 100}


@needs_mteb
def test_names_of_tasks(tmp_path):
    from minilm_mteb import find_tasks

    assert [task.metadata.name for task in find_tasks("STS12", None)] == ["STS12"]
    assert "LEMBPasskeyRetrieval" in {task.metadata.name for task in find_tasks("LongEmbed", None)}
    for name, data in (("race", None), ("nothing", tmp_path)):
        with pytest.raises(ValueError, match=name):
            find_tasks(name, data)
