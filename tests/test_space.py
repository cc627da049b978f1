"""The functions behind the page of `examples/space`, and its files for a Space."""

import re

import app
import filling
import pytest
import slot_maps
import speed
import tomllib
import torch
import writing
import yaml
from helpers import ROOT, refused
from loading import load_checkpoints
from tiny_finetuning import checkpoint, tokenizer
from tiny_space import tiny_space
from tiny_training import truncated

from luna_hf import LunaConfig
from luna_hf.scripting import UserError

SPACE = ROOT / "examples" / "space"
SENTENCE = "the quick brown fox reads every packed sequence"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return load_checkpoints(tiny_space(tmp_path_factory.mktemp("space")))


# ---- loading ----


def test_every_kind_has_its_place(found):
    assert [loaded.name for loaded in found.masked] == ["luna-mini-en", "abc-mini-en", "roberta-mini-en"]
    assert [loaded.name for loaded in found.lunas] == ["luna-mini-en"]
    assert [loaded.name for loaded in found.causal] == ["luna-mini-en-clm"]
    assert [loaded.longest for loaded in (*found.masked, *found.causal)] == [40, 40, 40, None]


def test_a_folder_without_a_luna_is_refused(tmp_path):
    checkpoint(tmp_path / "some-roberta", "roberta")
    with refused(tmp_path, "make demo", error=UserError):
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
    words = filling.fill(loaded, "the quick <mask> fox", top_k=3)
    ids = loaded.tokenizer("the quick <mask> fox", return_tensors="pt").input_ids
    with torch.no_grad():
        best = loaded.model(ids).logits.softmax(-1)[ids == loaded.tokenizer.mask_token_id][0].topk(3)
    assert list(words.values()) == pytest.approx(best.values.tolist())
    for word, token in zip(words, best.indices.tolist(), strict=True):
        written = loaded.tokenizer.decode([token])
        raw = loaded.tokenizer.convert_ids_to_tokens(token)
        assert word in (f"…{raw}", f"…{written}", written.removeprefix(" ")) and "\ufffd" not in word
        assert word.startswith("…") != written.startswith(" ")


def test_a_mask_at_the_start_continues_nothing(found):
    assert not any(word.startswith("…") for word in filling.fill(found.masked[0], " <mask> reads"))


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "empty"), ("no word is missing", "no masks"), ("<mask> and <mask>", "2 masks"), ("a <mask> " * 50, "50")],
)
def test_a_text_without_one_mask_is_refused(found, text, named):
    with refused(named, error=UserError):
        filling.fill(found.masked[0], text)


@pytest.mark.parametrize("place", [0, 2])
def test_a_long_text_is_refused(found, place):
    loaded = found.masked[place]
    text = "<mask>" + " fox" * 37
    assert loaded.encode(text).shape == (1, 40) and filling.fill(loaded, text)
    with refused(41, 40, loaded.name, error=UserError):
        filling.fill(loaded, text + " fox")


# ---- what the slots read ----


def test_maps_have_the_words_of_the_text(found):
    loaded = found.lunas[0]
    text = "  the unknownword,  reads\tevery   fox. "
    words, places = slot_maps.words_of_tokens(loaded, text)
    assert words == [slot_maps.START, "the", "unknownword,", "reads", "every", "fox.", slot_maps.END]
    tokens = loaded.tokenizer(text).input_ids
    assert len(places) == len(tokens) and places == sorted(places) and set(places) == set(range(len(words)))
    for place, word in enumerate(words[1:-1], 1):
        mine = [token for token, its in zip(tokens, places, strict=True) if its == place]
        assert loaded.tokenizer.decode(mine).strip() == word


@pytest.mark.parametrize("layer", [None, 1, 2])
def test_maps_are_those_of_the_model(found, layer):
    loaded = found.lunas[0]
    maps = slot_maps.read_slots(loaded, SENTENCE, layer)
    outputs = loaded.model(loaded.encode(SENTENCE), output_attentions=True, output_pack_attentions=True)
    layers = [0, 1] if layer is None else [layer - 1]
    pack = sum(outputs.pack_attentions[i][0].mean(0) for i in layers) / len(layers)  # (slots, tokens)
    read = sum(outputs.attentions[i][0].mean(0) for i in layers)[:, : len(pack)]
    _, places = slot_maps.words_of_tokens(loaded, SENTENCE)
    slots = [slot - 1 for slot in maps.slots]
    for word in range(len(maps.words)):
        mine = [token for token, place in enumerate(places) if place == word]
        torch.testing.assert_close(maps.pack[word], pack[slots][:, mine].sum(1))
        torch.testing.assert_close(maps.unpack[word], (read[mine].sum(0) / read[mine].sum())[slots])
    torch.testing.assert_close(maps.pack.sum(0), torch.ones(len(slots)))
    assert 0 < maps.slot_share < 1  # the rest is the window


def test_the_slots_that_are_read_most_come_first(found, monkeypatch):
    every = slot_maps.read_slots(found.lunas[0], SENTENCE)
    read = every.unpack.mean(0)
    assert sorted(every.slots) == list(range(1, 9)) and torch.equal(read, read.sort(descending=True).values)
    monkeypatch.setattr(slot_maps, "SHOWN_SLOTS", 3)
    few = slot_maps.read_slots(found.lunas[0], SENTENCE)
    assert few.slots == every.slots[:3] and torch.equal(few.pack, every.pack[:, :3])


def test_the_picture_and_its_explanation(found):
    maps = slot_maps.read_slots(found.lunas[0], "a price of $5 or $6 for averyveryveryverylongword")
    left, right = slot_maps.draw(maps).axes
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels[4] == r"\$5" and labels[-2].endswith("…") and len(labels) == len(maps.words)
    assert [label.get_text() for label in right.get_xticklabels()] == [f"slot {slot}" for slot in maps.slots]
    shown = [round(100 * value) for value in maps.pack.flatten().tolist() if value >= 0.005]
    assert [int(text.get_text()) for text in left.texts] == shown
    share, place = maps.pack[:, 0].max(0)
    assert f"Slot {maps.slots[0]} takes {share:.0%}" in slot_maps.explain(maps)
    assert maps.words[place] in slot_maps.explain(maps) and f"{maps.slot_share:.0%}" in slot_maps.explain(maps)


def test_a_text_with_too_many_words_is_refused(found, monkeypatch):
    monkeypatch.setattr(slot_maps, "MOST_WORDS", 4)
    with refused(5, 4, error=UserError):
        slot_maps.read_slots(found.lunas[0], "one two three four five")
    with refused("empty", error=UserError):
        slot_maps.read_slots(found.lunas[0], "  ")


# ---- speed ----


def test_the_twins_have_the_same_sizes():
    config = LunaConfig(num_hidden_layers=1, hidden_size=24, num_attention_heads=2, local_window=4, vocab_size=50)
    models = speed.make_models(config, 70)
    luna, twin = models[speed.LUNA], models[speed.TWIN]
    assert luna.config.local_window == 4 and config.max_position_embeddings == 512
    assert luna.embeddings.word_embeddings.weight.shape == twin.embeddings.word_embeddings.weight.shape
    assert len(luna.encoder.layer) == len(twin.encoder.layer) == 1
    ids = torch.full((1, 70), 5)
    assert luna(ids).last_hidden_state.shape == twin(ids).last_hidden_state.shape


def test_both_models_are_measured_at_every_length(found):
    threads = torch.get_num_threads()
    rows = list(speed.measure(found.lunas[0].model.config, [64, 32]))
    assert [row.length for row in rows] == [32, 64] and torch.get_num_threads() == threads
    for row in rows:
        assert all(row.seconds[name] > 0 for name in (speed.LUNA, speed.TWIN))
    assert all(rows[0].memory[name] < rows[1].memory[name] for name in (speed.LUNA, speed.TWIN))
    assert all(len(line) == len(speed.HEADER) for line in speed.table(rows))
    for axes in speed.draw_speed(rows).axes:
        assert [list(line.get_xdata()) for line in axes.lines] == [[32, 64], [32, 64]]


def test_the_peak_counts_what_is_held_at_once():
    def call():
        first, second = torch.empty(1000), torch.empty(500)  # float32
        del first
        return second, torch.empty(700)

    assert speed.peak_bytes(call) == 6000


def test_a_length_must_be_chosen(found):
    with refused("length", error=UserError):
        next(speed.measure(found.lunas[0].model.config, []))


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


def test_the_end_token_ends_the_text(found, monkeypatch):
    loaded = found.causal[0]
    first = loaded.model.generate
    monkeypatch.setattr(
        type(loaded.model),
        "generate",
        lambda self, ids, **options: torch.cat([first(ids, **options), torch.tensor([[2]])], dim=1),
    )
    assert len(list(writing.write(loaded, "the fox", 100, 0))) == 1


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

    every = ["Fill a mask", "What the slots read", "Speed", "Generate"]
    assert tabs(found) == every and tabs(found._replace(causal=[])) == every[:3]


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
