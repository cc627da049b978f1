"""The functions behind the page of `examples/space`, and its files for a Space."""

import copy
import json
import re
from types import SimpleNamespace

import answering
import app
import pytest
import searching
import speed
import tomllib
import torch
import writing
import yaml
from helpers import ROOT, refused
from loading import Loaded, load_checkpoints
from safetensors.torch import load_file, save_file
from tiny_finetuning import WORDS, checkpoint, tokenizer
from tiny_space import TOPICS, adapter, classifier, sentence_encoder, tiny_space
from tiny_training import truncated
from transformers import BertTokenizer

from luna_hf import LunaConfig
from luna_hf.late_chunking import embed_spans
from luna_hf.scripting import UserError

SPACE = ROOT / "examples" / "space"
SENTENCE = "the quick brown fox reads every packed sequence"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return load_checkpoints(tiny_space(tmp_path_factory.mktemp("space")))


# ---- loading ----


def test_every_kind_has_its_place(found):
    names = [[loaded.name for loaded in kind] for kind in found]
    masked = ["luna-mini-en", "abc-mini-en", "roberta-mini-en"]  # by size
    assert names == [["luna-minilm"], masked, ["luna-mini-en-sst2", "luna-minilm-topics"], ["luna-mini-en-clm"]]
    assert [loaded.name for loaded in found.memories] == ["luna-minilm", *masked[:2]]
    assert [loaded.longest for loaded in (*found.masked, *found.causal)] == [40, 40, 40, None]


def test_the_encoder_for_the_longest_texts_comes_first_and_needs_the_mean(tmp_path):
    for name, longest in (("a-short", 40), ("b-long", 80), ("c-cls", 80)):
        sentence_encoder(tmp_path / name, longest)
    (tmp_path / "a-short" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "c-cls" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    assert [loaded.name for loaded in load_checkpoints(tmp_path).encoders] == ["b-long", "a-short"]


def test_a_folder_without_a_model_for_the_page_is_refused(tmp_path):
    checkpoint(tmp_path / "score")
    classifier(tmp_path / "score", num_labels=1).save_pretrained(tmp_path / "score")
    with refused(tmp_path, "make demo", error=UserError):
        load_checkpoints(tmp_path)


@pytest.mark.parametrize(("file", "field"), [("config.json", "architectures"), ("adapter_config.json", "task_type")])
def test_an_adapter_is_found_with_the_base_beside_it(tmp_path, file, field):
    sentence_encoder(tmp_path / "base")
    adapted = adapter(tmp_path / "topics", tmp_path / "base")
    path = tmp_path / "topics" / file  # the other file names the task, too
    path.write_text(json.dumps({**json.loads(path.read_text()), field: None}))
    (loaded,) = load_checkpoints(tmp_path).classifiers
    with torch.no_grad():
        logits = adapted(**loaded.encode(SENTENCE)).logits[0]
        with adapted.disable_adapter():
            assert (adapted(**loaded.encode(SENTENCE)).logits[0] - logits).abs().max() > 1e-3
    answers = answering.classify(loaded, SENTENCE)
    assert [*answers] == [*TOPICS.values()]
    torch.testing.assert_close(torch.tensor([*answers.values()]), logits.softmax(-1))


def test_an_adapter_finds_its_base_from_the_current_folder(tmp_path, monkeypatch):
    sentence_encoder(tmp_path / "checkpoints" / "base")
    adapter(tmp_path / "mine" / "topics", tmp_path / "checkpoints" / "base")
    with refused("topics", "checkpoints/base", error=UserError):
        load_checkpoints(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert load_checkpoints(tmp_path / "mine").classifiers


def test_an_adapter_without_its_head_is_refused(tmp_path):
    sentence_encoder(tmp_path / "base")
    adapter(tmp_path / "topics", tmp_path / "base")
    path = tmp_path / "topics" / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "classifier" not in key}, path)
    with refused(tmp_path / "topics", "classifier", error=UserError):
        load_checkpoints(tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path):
    checkpoint(tmp_path / "whole")
    truncated(tmp_path / "whole", tmp_path / "half")
    with refused(tmp_path / "half", error=UserError):
        load_checkpoints(tmp_path)


def test_a_mistake_on_the_command_line_is_one_line(tmp_path, capsys):
    assert app.main([str(tmp_path / "missing")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "missing" in line


# ---- fill a mask ----


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_mask_is_filled_by_every_model(found, place):
    loaded = found.masked[place]
    words = answering.fill(loaded, "the quick <mask> fox", top_k=3)
    ids = loaded.tokenizer("the quick <mask> fox", return_tensors="pt").input_ids
    with torch.no_grad():
        best = loaded.model(ids).logits.softmax(-1)[ids == loaded.tokenizer.mask_token_id][0].topk(3)
    assert list(words.values()) == pytest.approx(best.values.tolist())
    for word, token in zip(words, best.indices.tolist(), strict=True):
        written = loaded.tokenizer.decode([token])
        raw = loaded.tokenizer.convert_ids_to_tokens(token)
        assert word in (f"…{raw}", f"…{written}", written.removeprefix(" ")) and "\ufffd" not in word
        assert word.startswith("…") != written.startswith(" ")


@pytest.mark.parametrize("written", ["<mask>", "[MASK]"])
def test_pieces_of_words_continue_the_word_before(written):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "house"]
    logits = torch.tensor([0.0, 0, 0, 0, 0, 0, 3, 2]).log_softmax(-1).expand(1, 4, 8)
    config = SimpleNamespace(max_position_embeddings=9, model_type="bert")
    model = type("Model", (), {"config": config, "__call__": lambda self, ids: SimpleNamespace(logits=logits)})()
    loaded = Loaded("fake", model, BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}))
    assert [*answering.fill(loaded, f"play {written}", top_k=2)] == ["…ing", "house"]


def test_a_mask_at_the_start_continues_nothing(found):
    assert not any(word.startswith("…") for word in answering.fill(found.masked[0], " <mask> reads"))


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "empty"), ("no word is missing", "no masks"), ("<mask> and <mask>", "2 masks"), ("a <mask> " * 50, "50")],
)
def test_a_text_without_one_mask_is_refused(found, text, named):
    with refused(named, error=UserError):
        answering.fill(found.masked[0], text)


@pytest.mark.parametrize("place", [0, 2])
def test_a_long_text_is_refused(found, place):
    loaded = found.masked[place]
    text = "<mask>" + " fox" * 37
    assert loaded.encode(text).input_ids.shape == (1, 40) and answering.fill(loaded, text)
    with refused(41, 40, loaded.name, error=UserError):
        answering.fill(loaded, text + " fox")


# ---- search a document ----


def document(paragraphs):
    """Paragraphs of three sentences and about 250 characters."""
    words = [WORDS[place % len(WORDS)] for place in range(paragraphs)]
    return "\n\n".join(f"{place}:" + f" {SENTENCE} and {word} in turn." * 4 for place, word in enumerate(words))


def test_passages_are_paragraphs_or_parts_of_them():
    paragraph = "Ten words are in this sentence about passages of it. " * 5
    longer = "This one is too long to stay whole. " * 40
    text = f"  A heading\n\n{paragraph}\n\n{paragraph}\n\n{longer}\n\n{'x' * 1700}\n"
    passages = searching.PASSAGE.findall(text)
    assert passages[:2] == [f"A heading\n\n{paragraph}".strip(), paragraph.strip()]
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert len(passages) == 7 and max(map(len, passages)) <= 803
    assert all(passage.endswith(".") for passage in passages[:4])
    lines = searching.PASSAGE.findall("\n".join([paragraph.strip()] * 3))
    assert lines == [paragraph.strip()] * 3


def test_a_document_is_read_in_one_pass(found):
    (reader,), text = found.encoders, document(5)
    read = searching.read(reader, text)
    assert read.passes == 1 and read.passages == text.split("\n\n") and read.seconds > 0
    assert read.tokens == len(reader.tokenizer(text, add_special_tokens=False).input_ids)
    spans = [(text.index(passage), text.index(passage) + len(passage)) for passage in read.passages]
    torch.testing.assert_close(read.vectors, embed_spans(reader.model, reader.tokenizer, text, spans, alone=True))


def test_a_longer_document_is_read_in_few_passes(found, monkeypatch):
    parts, embed = [], searching.embed
    monkeypatch.setattr(searching, "embed", lambda *given, **how: parts.append(given[1]) or embed(*given, **how))
    (reader,), text = found.encoders, document(40)
    read = searching.read(reader, text)
    assert "\n\n".join(parts) == text and read.passes == len(parts) > 1 and len(read.passages) == 40
    sizes = [len(reader.tokenizer(part).input_ids) for part in parts]
    assert all(reader.longest - 100 < size <= reader.longest for size in sizes[:-1])
    assert read.vectors.shape == (40, 32)
    assert f"{len(parts)} passes" in searching.explain(reader, searching.search(reader, text, "fox"))


def test_a_question_is_compared_with_every_passage(found, monkeypatch):
    (reader,), text = found.encoders, document(6)
    answer = searching.search(reader, text, "a brown dog")
    (vector,) = embed_spans(reader.model, reader.tokenizer, "a brown dog", [(0, 11)])
    assert answer.similarities == pytest.approx((searching.read(reader, text).vectors @ vector).tolist())
    assert searching.search(reader, text, "a cat").document is answer.document  # read once
    said = searching.explain(reader, answer)
    assert "one pass" in said and "(6 passages)" in said and reader.name in said


def test_the_best_passages_light_up():
    passages = ["low", "<b>best</b> & {{so}}", "lower", "good", "mean", "bad", "worst"]
    read = searching.Document(passages, torch.empty(7, 0), 10, 1, 0.1)
    answer = searching.Found(read, [0.1, 0.9, 0.0, 0.5, 0.3, 0.2, 0.1], 0.01)
    listed = re.findall(r'href="#passage-(\d)">([\d.]+)<', searching.list_best(answer))
    assert listed == [("1", "0.90"), ("3", "0.50"), ("4", "0.30"), ("5", "0.20"), ("0", "0.10")]
    shown = searching.light_up(answer)
    alphas = [float(alpha) for alpha in re.findall(r"170, 0, ([\d.]+)\)", shown)]
    assert alphas == [0, 0.6, 0, 0.07, 0, 0, 0]  # the share of 0.6 above the mean, squared
    assert shown.count('class="best"') == 1 and "&lt;b&gt;best&lt;/b&gt; &amp; {{so}}" in shown
    alike = searching.light_up(searching.Found(read, [0.3] * 7, 0.01))
    assert alike.count("170, 0, 0.00)") == 7


def test_the_example_ends_with_a_sentence():
    assert len(searching.EXAMPLE.split()) > 2500 and searching.EXAMPLE.endswith((".", '"'))


@pytest.mark.parametrize(
    ("text", "question", "named"), [(" ", "a", "document"), ("a", "", "empty"), ("a" * 20, "a", 20)]
)
def test_a_search_for_or_in_nothing_is_refused(found, monkeypatch, text, question, named):
    monkeypatch.setattr(searching, "MOST_CHARACTERS", 19)
    with refused(named, error=UserError):
        searching.search(found.encoders[0], text, question)


# ---- classify ----


def test_classes_have_the_names_of_the_config(found, monkeypatch):
    loaded = found.classifiers[0]
    answers = answering.classify(loaded, SENTENCE)
    assert [*answers] == ["negative", "positive"] and sum(answers.values()) == pytest.approx(1)
    monkeypatch.setattr(loaded.model.config, "problem_type", "multi_label_classification")
    logits = loaded.model(**loaded.encode(SENTENCE)).logits[0]
    assert [*answering.classify(loaded, SENTENCE).values()] == pytest.approx(logits.sigmoid().tolist())


def test_a_pair_is_read_as_one(found):
    loaded = found.classifiers[0]
    pair = loaded.tokenizer(SENTENCE, WORDS[0], return_tensors="pt")
    expected = loaded.model(**pair).logits[0].softmax(-1)
    assert [*answering.classify(loaded, SENTENCE, WORDS[0]).values()] == pytest.approx(expected.tolist())
    assert answering.classify(loaded, SENTENCE, " ") == answering.classify(loaded, SENTENCE)
    with refused("at most 40", error=UserError):
        answering.classify(loaded, SENTENCE, "the " * 40)


# ---- speed ----


def test_the_twins_have_the_same_sizes():
    config = LunaConfig(num_hidden_layers=1, hidden_size=24, num_attention_heads=2, local_window=4, vocab_size=50)
    models = speed.make_models(config, 70)
    luna, twin = models[speed.OURS], models[speed.TWIN]
    assert luna.config.local_window == 4 and config.max_position_embeddings == 512
    assert luna.embeddings.word_embeddings.weight.shape == twin.embeddings.word_embeddings.weight.shape
    assert len(luna.encoder.layer) == len(twin.encoder.layer) == 1
    ids = torch.full((1, 70), 5)
    assert luna(ids).last_hidden_state.shape == twin(ids).last_hidden_state.shape


def test_both_models_are_measured_at_every_length(found):
    threads = torch.get_num_threads()
    rows = list(speed.measure(found.memories[0].model.config, [64, 32]))
    assert [row.length for row in rows] == [32, 64] and torch.get_num_threads() == threads
    for row in rows:
        assert all(row.seconds[name] > 0 for name in (speed.OURS, speed.TWIN))
    assert all(len(line) == len(speed.HEADER) for line in speed.table(rows))
    (axes,) = speed.draw_speed(rows).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[32, 64], [32, 64]]


def test_a_length_must_be_chosen(found):
    with refused("length", error=UserError):
        next(speed.measure(found.memories[0].model.config, []))


# ---- generate ----


def test_the_state_has_one_size(found):
    loaded = found.causal[0]
    rows = list(writing.write(loaded, "the quick ", 50, 0))
    start = 1 + len(tokenizer()("the quick", add_special_tokens=False).input_ids)
    assert [row.tokens for row in rows] == [start + 20, start + 40, start + 50]
    assert len({row.state_bytes for row in rows}) == 1
    assert next(writing.write(loaded, "a", 1, 0)).state_bytes == rows[0].state_bytes
    assert all(row.text.startswith("the quick") for row in rows) and rows[1].text.startswith(rows[0].text)
    assert rows[-1].cache_bytes == 2 * 1 * 32 * 4 * rows[-1].tokens  # keys and values, layers, width, float32
    assert f"{rows[-1].state_bytes:,} bytes" in writing.explain_state(rows[-1])
    state, cache = writing.draw_state(rows).axes[0].lines
    assert len(set(state.get_ydata())) == 1 and list(cache.get_ydata()) == [row.cache_bytes / 1024 for row in rows]


def test_parts_continue_each_other(found, monkeypatch):
    whole = list(writing.write(found.causal[0], "the fox", 40, 0))[-1]
    monkeypatch.setattr(writing, "PART", 7)
    assert list(writing.write(found.causal[0], "the fox", 40, 0))[-1] == whole


def test_the_text_does_not_end_early(found, monkeypatch):
    loaded = found.causal[0]._replace(tokenizer=copy.deepcopy(tokenizer()))
    ids = loaded.tokenizer("the fox", return_tensors="pt").input_ids[:, :-1]
    end = loaded.model(ids).logits[0, -1].argmax().item()  # what would end the text at once
    loaded.tokenizer.eos_token = loaded.tokenizer.convert_ids_to_tokens(end)
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", end)
    *_, last = writing.write(loaded, "the fox", 30, 0)
    assert last.tokens == ids.shape[1] + 30


def test_sampling_differs_from_the_best_token(found):
    torch.manual_seed(0)
    loaded = found.causal[0]
    texts = {next(writing.write(loaded, "the", 20, heat)).text for heat in (0, 0, 1.5)}
    assert len(texts) == 2


def test_an_empty_prompt_is_refused(found):
    with refused("empty", error=UserError):
        next(writing.write(found.causal[0], " ", 20, 0))


# ---- the page ----


@pytest.mark.slow
def test_a_tab_without_a_model_is_left_out(found):
    import page  # and Gradio, which takes seconds

    def tabs(checkpoints):
        parts = page.build(checkpoints).config["components"]
        return [part["props"]["label"] for part in parts if part["type"] == "tabitem"]

    names = ["Search a document", "Fill a mask", "Classify", "Speed", "Generate"]
    assert tabs(found) == names
    assert tabs(found._replace(encoders=[], causal=[])) == names[1:4]
    assert tabs(found._replace(encoders=[], masked=[])) == [names[2], names[4]]


def test_the_files_of_a_space_agree_with_the_package():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (SPACE / "requirements.txt").read_text().splitlines()
    demo = [need for need in needs["optional-dependencies"]["demo"] if not need.startswith("gradio")]
    assert [line for line in lines if not line.startswith("#")] == [*needs["dependencies"], *demo]
    (head,) = re.findall(r"\A---\n(.*?)^---\n", (SPACE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    head = yaml.safe_load(head)
    assert head["sdk"] == "gradio" and int(head["sdk_version"].split(".")[0]) >= 6
    assert (SPACE / head["app_file"]).is_file()


def test_a_space_finds_its_own_checkpoints(tmp_path, monkeypatch):
    assert app.parse([]).checkpoints == ROOT / "checkpoints"
    monkeypatch.setattr(app, "HERE", tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert app.parse([]).checkpoints == tmp_path / "checkpoints"
