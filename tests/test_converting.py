"""`training/convert.py`: rows and losses are the literal ones, runs resume exactly, the result is a whole folder."""

import dataclasses
import json
import math
import socket
from types import SimpleNamespace

import convert as convert_command
import numpy as np
import pytest
import torch
from converting.objective import Pair, pool, split_windows
from converting.recipe import Lengths, stage_at
from converting.run import Conversion, read_frame
from converting.texts import Documents, Frame, Rows
from data.token_store import TokenStore
from engine import output
from helpers import ROOT
from processes import run_pair
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from test_convert_command import WORDS, write_model, write_sentences
from test_launch import pretrain_as
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

from luna_hf import AbcForMaskedLM, AbcModel, LunaForMaskedLM
from luna_hf.scripting import UserError, write_json
from luna_hf.warm_start import warm_start

FRAME = Frame(2, 3, 0)
RECIPES = ROOT / "training" / "recipes" / "convert"
MODEL = {"local_window": 8, "num_selected_tokens": 4, "memory_size": 2}
STAGE = {"name": "all", "share": 1.0, "learning_rate": 1e-3, "new_learning_rate": 1e-2}


# ---- rows ----


def documents(*texts):
    tokens = [token for text in texts for token in [*text, FRAME.last]][:-1]
    return Documents([TokenStore(np.array(tokens), np.zeros(1), len(texts))], [1.0], FRAME.last)


def test_passages_are_successive_tokens_of_one_document():
    texts = [list(range(10, 40)), list(range(50, 55)), list(range(60, 90))]
    found, generator = documents(*texts), np.random.default_rng(0)
    starts = set()
    for _ in range(300):
        passage = found.passage(generator, 20).tolist()
        assert any(passage == text[at : at + 20] for text in texts for at in range(11))
        starts.add(passage[0])
    assert {10, 60} <= starts and len(starts) > 10
    assert found.passage(generator, 100).tolist() in (texts[0], texts[2])  # the longest, whole
    drawn = [tuple(found.document(generator, by_tokens=False)) for _ in range(300)]
    assert {len(text) for text in drawn} == {30, 5} and 60 < sum(len(text) == 5 for text in drawn) < 140


def test_a_batch_depends_on_its_place_alone():
    rows = Rows(documents(list(range(10, 200))), documents([7, 8], [9]), 0.3, FRAME, 64, seed=1)
    lengths = [Lengths(8, 16, 1), Lengths(64, 128, 1)]
    batches = [rows.batch(lengths, step, 0) for step in range(40)]
    again = [rows.batch(lengths, step, 0) for step in reversed(range(40))][::-1]
    for one, other in zip(batches, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    assert any(shape[1] == 4 for shape in shapes) and any(shape[0] == 1 and 64 <= shape[1] <= 128 for shape in shapes)
    for batch in batches:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        assert (ids[:, 0] == FRAME.first).all() and (ids.gather(1, mask.sum(1, keepdim=True) - 1) == FRAME.last).all()
        assert (ids[~mask] == FRAME.pad).all()
        assert ids.numel() <= 64 or len(ids) == 1
    assert not torch.equal(rows.batch(lengths, 0, 0)["input_ids"], rows.batch(lengths, 0, 1)["input_ids"])


def test_rows_are_placed_among_new_positions():
    rows = Rows(documents(list(range(10, 60)), list(range(60, 75))), None, 0.0, FRAME, 64, seed=1, positions=100)
    firsts = set()
    for step in range(60):
        batch = rows.batch([Lengths(8, 40, 1)], step, 0)
        places, mask = batch["position_ids"], batch["attention_mask"].bool()
        assert torch.equal(places, rows.batch([Lengths(8, 40, 1)], step, 0)["position_ids"])
        assert (places[:, 0] == FRAME.pad + 1).all() and (places[~mask] == FRAME.pad).all()
        for row, keep in zip(places, mask, strict=True):
            own = row[keep][1:]
            assert (own.diff() == 1).all() and FRAME.pad + 1 < own[0] and own[-1] <= FRAME.pad + 100
            firsts.add(int(own[0]))
    assert min(firsts) < 20 and max(firsts) > 60


# ---- targets and losses ----


def literal_windows(ids, size):
    inner = ids[1:-1].tolist()
    return [[FRAME.first, *inner[at : at + size - 2], FRAME.last] for at in range(0, len(inner), size - 2)]


@pytest.mark.parametrize("length", [9, 10, 26, 27, 34])
def test_windows_cover_a_row(length):
    ids = torch.cat([torch.tensor([FRAME.first]), torch.arange(10, 8 + length), torch.tensor([FRAME.last])])
    windows = split_windows(torch.stack([ids, ids + (ids > 9)]), 10, FRAME)
    rows = [row[keep].tolist() for row, keep in zip(windows.ids, windows.keep, strict=True)]
    number = len(windows.spans)
    assert rows[:number] == literal_windows(ids, 10) and len(rows) == 2 * number
    assert [ids[start:end].tolist() for start, end in windows.spans] == [row[1:-1] for row in rows[:number]]


@pytest.fixture
def pair(tmp_path):
    source = write_model(tmp_path / "source", BertForMaskedLM)
    student, _ = warm_start(
        AbcForMaskedLM, source, memory_control="compressive", max_length=200, position_period=40, **MODEL
    )
    teacher, _ = warm_start(AbcForMaskedLM, source, memory_control="full")
    return Pair(student.double(), teacher.double(), "mean", 20, (10,), FRAME)


def text_ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(5, 12, (length - 2,), generator=generator)
    return torch.cat([torch.tensor([FRAME.first]), inner, torch.tensor([FRAME.last])])


def batch_of(*lengths):
    rows = [text_ids(length, seed) for seed, length in enumerate(lengths)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()}


@torch.no_grad()
def states_of(model, ids):
    return [state[0] for state in model.base_model(ids[None], output_hidden_states=True).hidden_states]


def test_losses_of_short_rows_are_literal(pair):
    batch = batch_of(18, 11)
    labels = batch["input_ids"].where(torch.arange(18) % 5 == 2, -100).where(batch["attention_mask"].bool(), -100)
    found = pair.losses(batch | {"labels": labels}, ["hidden", "pooled", "mlm", "kl"])
    errors, distances, own_logits, logits, words = [], [], [], [], []
    for row, length in enumerate((18, 11)):
        own, goal = (states_of(model, batch["input_ids"][row, :length]) for model in (pair.student, pair.teacher))
        for token in range(length):
            each = [
                (o[token] - g[token]).square().sum() / g[token].square().sum()
                for o, g in zip(own[1:], goal[1:], strict=True)
            ]
            errors.append(sum(each) / len(each))
        distances.append((F.normalize(own[-1].mean(0), dim=0) - F.normalize(goal[-1].mean(0), dim=0)).square().sum())
        for token in range(2, length, 5):
            own_logits.append(pair.student.lm_head(own[-1][token]).log_softmax(-1))
            logits.append(pair.teacher.lm_head(goal[-1][token]).log_softmax(-1))
            words.append(int(labels[row, token]))
    expected = {
        "hidden": sum(errors) / len(errors),
        "pooled": sum(distances) / 2,
        "mlm": -sum(each[word] for each, word in zip(own_logits, words, strict=True)) / len(words),
        "kl": sum((goal.exp() * (goal - own)).sum() for own, goal in zip(own_logits, logits, strict=True)) / len(words),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    assert found["hidden"] > 1e-4 and found["pooled"].requires_grad


def test_losses_of_long_rows_are_literal(pair):
    batch = batch_of(50, 37)
    found = pair.losses(batch, ["hidden", "pooled", "spans"])
    pooled, spans = [], []
    for row, length in enumerate((50, 37)):
        ids = batch["input_ids"][row, :length]
        goals = [
            F.normalize(states_of(pair.teacher, torch.tensor(w))[-1].mean(0), dim=0) for w in literal_windows(ids, 10)
        ]
        own = states_of(pair.student, ids)[-1]
        mean = F.normalize(sum(goals), dim=0)
        pooled.append((F.normalize(own.mean(0), dim=0) - mean).square().sum())
        parts = own[1:-1].split(8)
        spans.append(
            sum((F.normalize(p.mean(0), dim=0) - g).square().sum() for p, g in zip(parts, goals, strict=True))
            / len(goals)
        )
        assert torch.allclose(pair.embed(ids[None])[0], mean)
    assert found.keys() == {"pooled", "spans"}  # the teacher has no states of these rows
    torch.testing.assert_close(found["pooled"], sum(pooled) / 2, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["spans"], sum(spans) / 2, rtol=1e-9, atol=1e-12)


def test_a_short_row_of_a_long_pass_is_read_whole(pair):
    batch = batch_of(50, 15)
    found = pair.losses(batch, ["pooled", "spans"])
    rows = [{name: part[row : row + 1, :length] for name, part in batch.items()} for row, length in ((0, 50), (1, 15))]
    long, short = (pair.losses(row, ["pooled", "spans"]) for row in rows)
    torch.testing.assert_close(found["pooled"], (long["pooled"] + short["pooled"]) / 2)
    torch.testing.assert_close(found["spans"], long["spans"])


def test_goals_of_windows_of_several_sizes(pair):
    sizes, batch = (10, 16), batch_of(50, 47)
    both = dataclasses.replace(pair, windows=sizes)
    alone = {size: dataclasses.replace(pair, windows=(size,)) for size in sizes}
    embedded = both.embed(batch["input_ids"][:1])
    expected = F.normalize(sum(each.embed(batch["input_ids"][:1]) for each in alone.values()), dim=-1)
    torch.testing.assert_close(embedded, expected)
    found = both.losses(batch, ["pooled", "spans"])
    chosen = [sizes[int(text_ids(length, seed).sum()) % 2] for seed, length in enumerate((50, 47))]
    assert set(chosen) == set(sizes)
    rows = [{"input_ids": text_ids(length, seed)[None]} for seed, length in enumerate((50, 47))]
    rows = [row | {"attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    own = [alone[size].losses(row, ["pooled", "spans"]) for size, row in zip(chosen, rows, strict=True)]
    for name, value in found.items():
        torch.testing.assert_close(value, (own[0][name] + own[1][name]) / 2, rtol=1e-9, atol=1e-12)


def test_pooling():
    states, keep = torch.randn(2, 4, 3), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for row, length in enumerate((4, 2)):
        own = states[row, :length]
        for name, value in {"mean": own.mean(0), "cls": own[0], "max": own.amax(0)}.items():
            torch.testing.assert_close(pool(states, keep, name)[row], F.normalize(value, dim=0))


# ---- the command ----


def write_texts(folder):
    generator = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(generator.choice(WORDS, size=300))}) for _ in range(40)]
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"text": " ".join(generator.choice(WORDS, size=5))}) for _ in range(40)]
    (folder / "sentences.jsonl").write_text("\n".join(lines) + "\n")


def words_for(tmp_path, teacher, model, weights, lengths=((8, 20, 1), (50, 200, 1)), **options):
    if not (tmp_path / "documents.jsonl").exists():
        write_texts(tmp_path)
    stages = [{**STAGE, "lengths": [list(each) for each in lengths], "weights": weights}]
    values = {
        "teacher": teacher,
        "model": json.dumps(model),
        "data": tmp_path / "documents.jsonl",
        "sentences": tmp_path / "sentences.jsonl",
        "sentence_share": 0.2,
        "output_dir": tmp_path / "out",
        "cache_dir": tmp_path / "cache",
        "max_steps": 4,
        "pass_tokens": 256,
        "global_batch_tokens": 512,
        "teacher_longest": 20,
        "teacher_windows": [10],
        "eval_tokens": 64,
        "eval_steps": 2,
        "save_steps": 1,
        "log_steps": 1,
        "stages": json.dumps(stages),
        **options,
    }
    return [str(RECIPES / "minilm.yaml"), *(part for key, value in values.items() for part in (f"--{key}", str(value)))]


SELECTED = {
    "model_type": "abc_memory",
    "memory_control": "compressive",
    "max_length": 200,
    "position_period": 40,
    **MODEL,
}


def log_of(folder):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if "second" not in key} for entry in entries]


def test_a_sentence_folder_becomes_one_again(tmp_path):
    teacher = write_sentences(tmp_path / "teacher", {"pooling_mode_mean_tokens": True})
    (teacher / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    weights = {"hidden": 1.0, "pooled": 5.0, "spans": 5.0}
    assert convert_command.main(words_for(tmp_path, teacher, SELECTED, weights, teacher_longest=16)) == 0
    out = tmp_path / "out"
    figures = json.loads((out / "metrics.json").read_text())
    log = [entry for entry in log_of(out) if entry["kind"] == "held_out"]
    assert [entry["step"] for entry in log] == [0, 2, 4]
    assert figures["cosine"].keys() == {"16", "64", "128"} and figures["slots_off"].keys() == {"16", "64", "128"}
    assert figures["cosine"]["128"] == pytest.approx(log[-1]["cosine"]["128"], abs=1e-5)
    assert log[-1]["cosine"]["128"] > log[0]["cosine"]["128"]
    encoder = SentenceTransformer(str(out), trust_remote_code=True, device="cpu")
    text = " ".join(WORDS * 18)
    assert encoder.max_seq_length == 200
    model, tokenizer = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.sep_token_id == tokenizer.sep_token_id > 0
    states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    assert states.shape[1] == 146
    torch.testing.assert_close(
        torch.tensor(encoder.encode(text)), F.normalize(states[0].mean(0), dim=0).detach(), rtol=1e-4, atol=1e-5
    )
    card = (out / "README.md").read_text()
    assert "license: cc-by-nc-4.0" in card and "tokens in linear time" in card
    assert "sentence-transformers" in card and f"{figures['cosine']['128']:.4f}" in card
    assert (out / "conversion.png").is_file() and not (out / "checkpoints").exists()
    frozen = AutoModel.from_pretrained(teacher).embeddings.word_embeddings.weight
    assert torch.equal(model.embeddings.word_embeddings.weight, frozen)


def test_new_positions_are_trained_and_the_sources_stay(tmp_path):
    teacher = write_model(tmp_path / "teacher")
    model = {name: value for name, value in SELECTED.items() if name != "position_period"}
    assert convert_command.main(words_for(tmp_path, teacher, model, {"pooled": 5.0, "spans": 5.0})) == 0
    table = AutoModel.from_pretrained(tmp_path / "out").embeddings.position_embeddings.weight
    source = AutoModel.from_pretrained(teacher).embeddings.position_embeddings.weight
    trained = len(source)
    assert table.shape == (201, source.shape[1]) and torch.equal(table[1 : trained + 1], source)
    repeated = source.repeat(5, 1)[trained:200]
    changed = (table[trained + 1 :] != repeated).any(1)
    assert changed.float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_source_in_half_precision_is_trained_in_float32(dtype, tmp_path):
    teacher = write_model(tmp_path / "teacher")
    AutoModel.from_pretrained(teacher, dtype=dtype).save_pretrained(teacher)
    model = {**SELECTED, "full_attention_layers": [1]}
    assert convert_command.main(words_for(tmp_path, teacher, model, {"pooled": 5.0, "spans": 5.0})) == 0
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "Softmax attention remains in layer 1 (the first is 0), in quadratic time." in card
        and "linear time" not in card
    )


def test_a_period_beyond_the_sources_positions_places_no_rows(tmp_path):
    teacher = write_model(tmp_path / "teacher")
    model = SELECTED | {"position_period": 80}
    assert convert_command.main(words_for(tmp_path, teacher, model, {"pooled": 5.0, "spans": 5.0})) == 0
    table = AutoModel.from_pretrained(tmp_path / "out").embeddings.position_embeddings.weight
    source = AutoModel.from_pretrained(teacher).embeddings.position_embeddings.weight
    assert torch.equal(table[1:], source.repeat(2, 1))


@pytest.mark.parametrize("family", ["abc_memory", "luna"])
def test_stages_and_a_masked_lm_head(family, tmp_path):
    teacher = write_model(tmp_path / "teacher", BertForMaskedLM)
    slots = {"luna": {"projection_length": 4}, "abc_memory": {"memory_size": 4, "share_control": False}}[family]
    fit = {**STAGE, "name": "fit", "share": 0.5, "lengths": [[8, 20, 1]], "weights": {"attention": 1.0}}
    fit["learning_rate"] = 0  # new parameters alone
    rest = {
        **STAGE,
        "name": "rest",
        "share": 0.5,
        "lengths": [[8, 40, 1]],
        "weights": {"hidden": 1.0, "mlm": 1.0, "kl": 1.0},
    }
    model = {"model_type": family, "local_window": 8, **slots}
    words = words_for(tmp_path, teacher, model, {"hidden": 1.0}, max_steps=8, stages=json.dumps([fit, rest]))
    assert convert_command.main(words) == 0
    parts = [entry for entry in log_of(tmp_path / "out") if entry["kind"] == "train"]
    assert [entry["stage"] for entry in parts] == ["fit"] * 4 + ["rest"] * 4
    assert parts[3]["attention"] < parts[0]["attention"] and {"mlm", "hidden"} <= parts[-1].keys()
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(model) in (AbcForMaskedLM, LunaForMaskedLM)


def test_with_a_rate_of_zero_new_parameters_learn_alone(tmp_path):
    source = write_model(tmp_path / "source", BertForMaskedLM)
    teacher = tmp_path / "teacher"  # softmax attention in our layers is a source, too
    warm_start(AbcForMaskedLM, source, memory_control="full")[0].save_pretrained(teacher)
    AutoTokenizer.from_pretrained(source).save_pretrained(teacher)
    stage = {**STAGE, "learning_rate": 0, "lengths": [[8, 20, 1]], "weights": {"attention": 1.0}}
    model = {"model_type": "abc_memory", "memory_control": "mlp", "memory_size": 4}
    options = {"stages": json.dumps([stage]), "freeze_embeddings": "false", "weight_decay": 0.1}
    assert convert_command.main(words_for(tmp_path, teacher, model, {}, **options)) == 0
    before = warm_start(AbcModel, source, memory_control="mlp", memory_size=4)[0].state_dict()
    after = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["control.weight"]


def test_a_killed_run_resumes_exactly(tmp_path, monkeypatch):
    teacher = write_model(tmp_path / "teacher")
    weights = {"pooled": 1.0, "hidden": 1.0}
    assert convert_command.main(words_for(tmp_path, teacher, SELECTED, weights, output_dir=tmp_path / "whole")) == 0
    calls, update = [], Conversion.update

    def dies(run):
        calls.append(run.counters.step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return update(run)

    monkeypatch.setattr(Conversion, "update", dies)
    words = words_for(tmp_path, teacher, SELECTED, weights, output_dir=tmp_path / "killed")
    assert convert_command.main(words) == 130
    assert convert_command.main(words) == 0 and calls == [0, 1, 2, 3, 3]
    whole, killed = (AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    kept = [entry for entry in log_of(tmp_path / "killed") if entry["kind"] != "resumed"]
    assert kept == log_of(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    teacher = write_model(tmp_path / "teacher")
    both = [
        words_for(tmp_path, teacher, SELECTED, {"pooled": 1.0}, output_dir=tmp_path / name) for name in ("one", "two")
    ]
    assert convert_command.main(both[0]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_pair(pretrain_as, port, both[1], "convert")
    one, two = (AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
    counted = [json.loads((tmp_path / name / "metrics.json").read_text())["seen_tokens"] for name in ("one", "two")]
    assert counted[0] == counted[1]


def refusal(words, capsys):
    assert convert_command.main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_files_of_the_teacher_that_an_earlier_version_did_not_note(tmp_path, monkeypatch):
    teacher = str(write_model(tmp_path / "teacher"))
    recipe = SimpleNamespace(teacher=teacher, accept_changed_data=False)
    before = {f"{teacher}/config.json": "a", "text": "b"}
    monkeypatch.setattr(output, "read_state", lambda path: (None, {"inputs": before}))
    added = {**before, f"{teacher}/tokenizer.json": "c"}
    assert output.changed_inputs(recipe, tmp_path, added) == []
    for changed in ({**added, f"{teacher}/config.json": "d"}, {**added, "more text": "d"}):
        with pytest.raises(UserError, match="Data have changed"):
            output.changed_inputs(recipe, tmp_path, changed)


def test_the_config_of_a_model_that_training_starts_from_is_an_input(tmp_path):
    start = write_model(tmp_path / "start")
    recipe = SimpleNamespace(model_name_or_path=str(start), output_dir=str(tmp_path / "out"))
    before = output.fingerprint_inputs(recipe, SimpleNamespace(fingerprint=dict))
    assert list(before) == [str(start / "config.json")]
    (start / "config.json").write_text((start / "config.json").read_text() + " ")
    assert output.fingerprint_inputs(recipe, SimpleNamespace(fingerprint=dict)) != before


def test_bad_input_gets_a_line(tmp_path, capsys):
    teacher = write_model(tmp_path / "teacher")

    def said(model=SELECTED, weights=None, **options):
        return refusal(words_for(tmp_path, teacher, model, weights or {"pooled": 1.0}, **options), capsys)

    assert "masked-LM head" in said(weights={"mlm": 1.0})
    assert "`lengths`" in said(lengths=((3, 2, 1),))
    assert "unknown objective `poled`. Did you mean `pooled`?" in said(weights={"poled": 1.0})
    longer, both = ((8, 200, 1),), {"attention": 1.0, "hidden": 1.0}
    assert "Add `pooled` or `spans`" in said(weights={"hidden": 1.0}, lengths=longer)
    assert "have no `spans`" in said(weights={"spans": 1.0}, lengths=longer)
    assert "the only objective" in said(weights=both, lengths=((8, 20, 1),))
    assert "raise `max_length`" in said({**SELECTED, "max_length": 250}, {"pooled": 1.0}, lengths=((8, 300, 1),))
    assert "`attention` needs rows of at most 20 tokens" in said(weights={"attention": 1.0}, lengths=((8, 30, 1),))
    assert "at most 40" in said(teacher_longest=60)
    short = write_sentences(tmp_path / "short")
    words = words_for(tmp_path, short, SELECTED, {"pooled": 1.0}, teacher_longest=17)
    assert "at most 16" in refusal(words, capsys)
    write_json(short / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    if_cased = AutoTokenizer.from_pretrained(short, do_lower_case=False)
    if_cased.save_pretrained(short)
    assert "lowercases texts" in refusal(words, capsys)
    padded = write_model(tmp_path / "padded")
    write_json(padded / "config.json", {**json.loads((padded / "config.json").read_text()), "pad_token_id": 3})
    assert "pads with token" in refusal(words_for(tmp_path, padded, SELECTED, {"pooled": 1.0}), capsys)
    full = {"model_type": "abc_memory", "full_attention_layers": "all"}
    assert "nothing to fit" in said(full, {"attention": 1.0}, lengths=((8, 20, 1),))
    assert "must be 1" in said(
        stages=json.dumps([{**STAGE, "share": 0.5, "lengths": [[8, 20, 1]], "weights": {"hidden": 1}}])
    )
    assert "neither a folder" in refusal(words_for(tmp_path, tmp_path / "nowhere", SELECTED, {"pooled": 1.0}), capsys)
    own = ROOT / "checkpoints" / "abc-mini-en"
    assert "already" in refusal(words_for(tmp_path, own, SELECTED, {"pooled": 1.0}), capsys)
    assert not (tmp_path / "out").exists()
    short = [json.dumps({"text": f"{first} {second}"}) for first in WORDS for second in WORDS]
    (tmp_path / "documents.jsonl").write_text("\n".join(short) + "\n")
    assert "14 tokens to evaluate on" in said(held_out_fraction=0.5)


def test_a_teacher_that_reads_less_than_the_shortest_held_out_rows(tmp_path):
    words = words_for(tmp_path, write_model(tmp_path / "teacher"), SELECTED, {"pooled": 1.0}, teacher_longest=10)
    assert convert_command.main(words) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["hidden"] == {}


def test_texts_stand_between_the_tokens_that_the_tokenizer_adds(tmp_path):
    """Not between others that it names."""
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "teacher"))
    first, *_, last = tokenizer("").input_ids
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.mask_token
    assert read_frame(tokenizer)[:2] == (first, last) and tokenizer.bos_token_id not in (first, last)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_complete(path):
    recipe = convert_command.read_recipe(path)
    stages = recipe.plan()
    assert stages[0].first == 0 and stages[-1].last == recipe.max_steps
    for stage in stages:
        factors = [stage.factor(step, recipe.warmup_fraction) for step in range(stage.first, stage.last)]
        assert max(factors) <= 1 and min(factors) > 0 and math.isclose(max(factors), 1, abs_tol=0.1)
        assert stage_at(stages, stage.first) is stage
