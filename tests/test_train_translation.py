"""Translation from end to end: batches by tokens, schedule, average, scores, resuming, and what is refused."""

import csv
import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import train_translation
from data.tokenizer import encode, ending, train_tokenizer
from helpers import random_ids, refused, tiny_seq2seq_model
from safetensors.torch import load_file, save_file
from tiny_training import Killed, dies_at_call, same_weights, start
from tiny_translation import RECIPES, arguments, pairs, write_parallel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertTokenizer
from translation import run as runs
from translation import scores
from translation.pairs import EncodedPairs, Order, Pairs, _columns, epoch_batches, joint_tokenizer, read_pairs, updates
from translation.pairs import encode as encode_texts
from translation.run import SmoothedLoss, Translation, inverse_square_root, start_from

from luna_hf import LunaForConditionalGeneration
from luna_hf.scripting import UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_parallel(tmp_path_factory.mktemp("parallel"))


def run(data, folder, **changes):
    assert start(train_translation, arguments(data, folder, **changes)) == 0
    return json.loads((folder / "metrics.json").read_text())


# ---- parts ----


def test_batches_hold_every_pair_once_and_few_tokens():
    lengths = np.random.default_rng(0).integers(2, 30, 500)
    batches = epoch_batches(lengths, 120, seed=1, epoch=0)
    assert sorted(np.concatenate(batches)) == list(range(500))
    sizes = [len(batch) * lengths[batch].max() for batch in batches]
    assert max(sizes) <= 120 and np.mean(sizes) > 80
    again = epoch_batches(lengths, 120, seed=1, epoch=0)
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))
    assert not np.array_equal(batches[0], epoch_batches(lengths, 120, seed=1, epoch=1)[0])


def test_processes_share_the_batches_and_resuming_skips():
    rows = [np.arange(4, 4 + length) for length in (3, 5, 2, 4, 6, 3, 2, 5)]
    encoded = EncodedPairs(rows, rows, 0)
    whole = updates(encoded, Order(12, 2, 1, 0, 0), 1, 2)
    parts = [updates(encoded, Order(12, 1, 2, index, 0), 1, 2) for index in range(2)]
    first = [next(whole) for _ in range(6)]
    for update in first:
        for batch, part in zip(update, parts, strict=True):
            assert torch.equal(next(part)[0]["labels"], batch["labels"])
    resumed = next(updates(encoded, Order(12, 2, 1, 0, 0), 1, 2, first_update=5))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(resumed, first[5], strict=True))
    labels, shifted = first[0][0]["labels"], first[0][0]["decoder_input_ids"]
    assert (shifted[:, 0] == 2).all() and torch.equal(shifted[labels != -100][1:2], labels[labels != -100][:1])


def test_held_out_targets_are_as_wide_as_the_longest_target():
    """Each of their tokens has logits: long sources must not widen them."""
    encoded = EncodedPairs([np.arange(4, 34), np.arange(4, 10)], [np.arange(4, 7), np.arange(4, 9)], 0)
    rows = runs._rows(encoded, 1, 2, wait=None)
    assert {(len(row["input_ids"]), len(row["labels"]), len(row["decoder_input_ids"])) for row in rows} == {(30, 5, 5)}


def test_the_schedule_rises_and_falls_with_the_root():
    assert [inverse_square_root(step, 4) for step in (0, 1, 3)] == [0.25, 0.5, 1.0]
    assert inverse_square_root(15, 4) == 0.5


def test_smoothed_labels():
    """(1 - s) times the label's loss and s times the mean over the vocabulary."""

    class Logits(torch.nn.Module):
        def forward(self, logits, use_cache):
            return type("Output", (), {"logits": logits})

    logits, labels = torch.randn(2, 3, 7), torch.tensor([[1, 2, -100], [3, -100, -100]])
    loss = SmoothedLoss(Logits(), 0.1)(labels, logits=logits).loss
    negative = -logits.log_softmax(-1)[labels != -100]
    expected = 0.9 * negative[range(3), [1, 2, 3]] + 0.1 * negative.mean(-1)
    torch.testing.assert_close(loss, expected.mean())


def test_the_average_of_checkpoints(tmp_path):
    for name, value in (("a", 1.0), ("b", 4.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
    assert scores.average([tmp_path / "a", tmp_path / "b"])["w"].tolist() == [2.5, 2.5]
    with refused("average_checkpoints", error=UserError):
        scores.average([tmp_path])


def test_scores_name_their_signatures():
    perfect = scores.score(["ein hund rennt im park"], ["ein Hund rennt im Park"])
    assert perfect["bleu_lowercase"]["score"] == pytest.approx(100) and perfect["bleu"]["score"] < 100
    assert "tok:13a" in perfect["bleu"]["signature"] and "case:lc" in perfect["bleu_lowercase"]["signature"]
    assert perfect["chrf"]["signature"].startswith("nrefs:1")


@pytest.mark.parametrize(
    ("language", "text", "tokenizer"), [("zh-CN", "一只狗在公园里跑", "zh"), ("ja", "犬が公園を走っています", "char")]
)
def test_languages_without_spaces_have_words(language, text, tokenizer):
    found = scores.score([text[:-1]], [text], language=language)
    assert 50 < found["bleu"]["score"] < 100 and f"tok:{tokenizer}" in found["bleu"]["signature"]


def test_a_tokenizer_ends_texts_with_the_ids_of_training(tmp_path):
    """Plain calls give the tokens and the end, as `add_special_tokens=False` and the end would; a given one, too."""
    plain = train_tokenizer([text for pair in pairs(80, 0) for text in pair], 300, 40)
    joint = joint_tokenizer(Pairs(*map(list, zip(*pairs(80, 0), strict=True)), "train"), 300, 40)
    bert = BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5})
    texts = ["two red dog", "a </s> b", ""]
    expected = [[*ids, 2] for ids in encode(plain, texts)]
    joint.save_pretrained(tmp_path)
    for tokenizer in (joint, ending(plain), AutoTokenizer.from_pretrained(tmp_path)):
        assert [row.tolist() for row in encode_texts(texts, tokenizer)] == expected
        assert tokenizer("two red dog")["input_ids"] == tokenizer(text_target="two red dog")["input_ids"] == expected[0]
        assert tokenizer("two", "red")["input_ids"] == tokenizer("two")["input_ids"] + tokenizer("red")["input_ids"]
        assert tokenizer.decode(expected[0], skip_special_tokens=True) == "two red dog"
        assert tokenizer.get_vocab() == plain.get_vocab()
        assert tokenizer.special_tokens_map == plain.special_tokens_map and tokenizer.model_max_length == 40
        assert ending(tokenizer) is tokenizer
    with refused("eos", error=UserError):
        ending(bert)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_tables(suffix, tmp_path, data):
    import datasets

    rows = [{"en": source, "de": target} for source, target in pairs(5, 0)]
    write = {"jsonl": "to_json", "parquet": "to_parquet", "csv": "to_csv"}[suffix]
    getattr(datasets.Dataset.from_list(rows), write)(tmp_path / f"train.{suffix}")
    recipe = train_translation.read_recipe(*_recipe(tmp_path, tmp_path))
    assert read_pairs(recipe, "train").source == [row["en"] for row in rows]
    recipe = train_translation.read_recipe(*_recipe(tmp_path, tmp_path, target_language="fr"))
    with refused("fr", error=UserError):
        read_pairs(recipe, "train")
    with refused("test", error=UserError):
        read_pairs(recipe, "test")


ODD = [("null", "NA"), ("007", "1e5"), ('"', 'a 6" board'), ("True", "inf"), ("2026-01-02", "1.50")]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "lines"])
def test_every_pair_is_the_text_that_stands_in_the_file(kind, tmp_path, capsys):
    folder = tmp_path / "[0-9] x{1,2} **"
    folder.mkdir()
    if kind == "jsonl":
        lines = [json.dumps({"en": source, "de": target}) for source, target in [*ODD, ("left out", None)]]
        (folder / "train.jsonl").write_text("\n".join(lines))
    elif kind == "lines":
        for number, language in enumerate(("en", "de")):
            lines = [*(pair[number] for pair in ODD), ["left\rout", ""][number]]
            (folder / f"train.{language}").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", newline="")
    else:
        with (folder / f"train.{kind}").open("w", newline="") as file:
            pairs = [("en", "de"), *ODD, ("left out", "")]
            if kind == "csv":
                csv.writer(file).writerows(pairs)
            else:
                file.writelines("\t".join(pair) + "\n" for pair in pairs)
    read = read_pairs(train_translation.read_recipe(*_recipe(folder, tmp_path)), "train")
    assert list(zip(read.source, read.target, strict=True)) == ODD
    assert "1 of 6 pairs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"en": 7, "de": "sieben"}, ["Row 1", "7", "`en`"]),
        ({"translation": {"en": "a", "de": 1.5}}, ["Row 0", "2.5", "`de`"]),
        ({"translation": "a"}, ["'a'", "per language"]),
    ],
)
def test_sentences_that_are_no_text_are_refused(row, named, tmp_path):
    first = {"translation": {"en": "a", "de": 2.5}} if "translation" in row else {"en": "a", "de": "b"}
    (tmp_path / "train.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(row) + "\n")
    with refused(*named, error=UserError):
        read_pairs(train_translation.read_recipe(*_recipe(tmp_path, tmp_path)), "train")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("train.jsonl", '{"en": "a", "de": "b"}\n', ["both train.en and train.jsonl", "Remove"]),
        ("train.en", "a\rb\r", ["train.en", "CR alone"]),
    ],
)
def test_data_that_can_be_read_in_two_ways_are_refused(name, content, named, tmp_path):
    for file, text in {"train.en": "a\n", "train.de": "b\n", name: content}.items():
        (tmp_path / file).write_text(text, newline="")
    with refused(*named, error=UserError):
        read_pairs(train_translation.read_recipe(*_recipe(tmp_path, tmp_path)), "train")


def test_missing_data_are_named(data, tmp_path):
    """A file of a language, a folder, a name on the Hub: each with what to pass."""

    def message(data, **changes):
        with pytest.raises(UserError) as raised:
            read_pairs(train_translation.read_recipe(*_recipe(data, tmp_path, **changes)), "train")
        return str(raised.value)

    french = message(data, source_language="fr")
    assert "no train.fr." in french and "train.parquet" in french
    for name in ("nowhere/multi30k", "nowhere", "a/b/c", str(data / "train.en")):
        text = message(name)
        assert f"no folder {name!r}" in text and "--data" in text
        assert ("cannot be reached" in text) == (name == "nowhere/multi30k")


@pytest.mark.parametrize("configurations", [["default"], ["cs-en", "de-en"], ["en-de", "en-fr"]])
def test_a_data_set_on_the_hub_may_have_pairs_of_languages(configurations, tmp_path, monkeypatch):
    chosen = next((name for name in configurations if name in ("de-en", "en-de")), None)

    def load(name, configuration, split):
        assert (name, configuration, split) == ("some/pairs", chosen, "train")
        return datasets.Dataset.from_list([{"translation": {"en": "one", "de": "eins"}}])

    monkeypatch.setattr("datasets.get_dataset_config_names", lambda name: configurations)
    monkeypatch.setattr("datasets.load_dataset", load)
    pairs = read_pairs(train_translation.read_recipe(*_recipe("some/pairs", tmp_path)), "train")
    assert (pairs.source, pairs.target) == (["one"], ["eins"])


def test_a_test_source_that_is_too_long_is_found_before_training(data, tmp_path, capsys):
    own = Path(shutil.copytree(data, tmp_path / "data"))
    for language, words in (("en", "red " * 400), ("de", "rot")):
        with (own / f"test.{language}").open("a") as file:
            file.write(f"{words}\n")
    assert start(train_translation, arguments(own, tmp_path / "out")) == 2
    assert "the split test" in (error := capsys.readouterr().err) and "max_position_embeddings" in error
    assert not (tmp_path / "out" / "checkpoints").exists()


def _recipe(data, folder, **changes):
    words = arguments(data, folder, **changes)
    return words[0], words[1:]


SCRATCH = [path for path in RECIPES if path.stem != "summarize_minilm"]


@pytest.mark.parametrize("path", SCRATCH, ids=lambda path: path.stem)
def test_recipes_make_models_of_one_size(path):
    recipe = train_translation.read_recipe(path)
    config = runs.make_config(recipe.model, None, recipe.vocab_size, runs.SEQ2SEQ)
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    assert model.num_parameters() == pytest.approx(3.0e6, rel=0.3)
    assert recipe.output_dir.endswith(recipe.model_name)


# ---- runs ----


@pytest.mark.parametrize("kind", ["luna", "bart"])
def test_a_run(kind, data, tmp_path):
    changes = {"length_penalty": 1.5, "max_steps": 60, "learning_rate": 0.03, "save_steps": 30, "eval_steps": 30}
    if kind == "bart":
        recipe = next(path for path in RECIPES if path.stem == "multi30k_softmax")
        changes |= {f"model__{name}": None for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        changes |= {"model__intermediate_size": None, "model__projection_length": None, "recipe": recipe}
        changes |= {"model__d_model": 16, "model__encoder_layers": 1, "model__encoder_ffn_dim": 24}
        changes |= {"model__decoder_ffn_dim": 24}
    figures = run(data, tmp_path / "out", **changes)
    assert figures["averaged_checkpoints"] == 2 and figures["validation"]["pairs"] == figures["test"]["pairs"] == 8
    assert {"bleu", "bleu_lowercase", "chrf"} <= figures["test"].keys()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert (type(model) is LunaForConditionalGeneration) == (kind == "luna")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    source = (data / "test.en").read_text().splitlines()[0]
    made = model.generate(**tokenizer([source], return_tensors="pt"))
    translation = figures["test"]["samples"][0]["translation"]
    assert translation and tokenizer.decode(made[0], skip_special_tokens=True).strip() == translation
    asked = model.generation_config
    assert (asked.num_beams, asked.max_new_tokens, asked.length_penalty, asked.early_stopping) == (2, 6, 1.5, True)
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert figures["validation"]["bleu"]["signature"] in (tmp_path / "out" / "README.md").read_text()


ABC = next(path for path in RECIPES if path.stem == "multi30k_abc16")
DROPOUT = {"model__hidden_dropout_prob": 0.1}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a run that nothing interrupts, and its mean of the last checkpoints."""
    folder, kept, average = tmp_path_factory.mktemp("whole") / "out", {}, runs.average
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "average", lambda folders: kept.setdefault("mean", average(folders)))
        run(data, folder, **DROPOUT)
    return folder, kept["mean"]


@pytest.mark.parametrize("version", ["this", "earlier"])
def test_a_killed_run_continues_with_the_same_numbers(version, data, whole, tmp_path, monkeypatch):
    """An earlier version's tokenizer puts `<s>` before a text; the ids are the same, and the result has the new one."""
    with monkeypatch.context() as patch:
        if version == "earlier":
            patch.setattr("translation.pairs.with_end", lambda tokenizer: tokenizer)
        dies_at_call(patch, Translation, "save", 3)
        with pytest.raises(Killed):
            run(data, tmp_path / "out", **DROPOUT)
    ending = [0, 2] if version == "earlier" else [2]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("")["input_ids"] == ending
    run(data, tmp_path / "out", **DROPOUT)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("")["input_ids"] == [2]
    assert same_weights(whole[0], tmp_path / "out")


def test_splits_may_have_any_names(data, tmp_path):
    for language in ("en", "de"):
        for old, new in (("train", "fit"), ("validation", "test"), ("test", "train")):
            shutil.copyfile(data / f"{old}.{language}", tmp_path / f"{new}.{language}")
    splits = {"train_split": "fit", "validation_split": "test", "test_split": "train"}
    figures = run(tmp_path, tmp_path / "out", **splits)
    for name, split in (("validation", "test"), ("test", "train")):
        first = (tmp_path / f"{split}.en").read_text().splitlines()[0]
        assert figures[name]["samples"][0]["source"] == first


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": ABC, "model__projection_length": None, "model__memory_size": 4}, "model_type` is 'abc_memory'"),
        ({"model__num_attention_heads": 4}, "`model.num_attention_heads` is 4, but 2 in"),
        ({"model__norm_first": False}, "`model.norm_first` is False"),
        ({"model__decoder_layers": 2}, "`model.decoder_layers` is 2"),
    ],
)
def test_weights_of_another_model_are_refused(changes, named, whole, data, tmp_path, capsys):
    words = arguments(data, tmp_path / "out", initial_weights=whole[0], **changes)
    assert start(train_translation, words) == 2
    assert named in capsys.readouterr().err


def test_separate_embeddings_do_not_start_shared_ones(tmp_path):
    models = [tiny_seq2seq_model("luna", share_encoder_decoder_embeddings=shared) for shared in (False, True)]
    separate, shared = models
    separate.save_pretrained(tmp_path / "separate")
    shared.save_pretrained(tmp_path / "shared")
    with pytest.raises(UserError, match="share_encoder_decoder_embeddings` is True, but False in"):
        start_from(shared, str(tmp_path / "separate"))
    assert start_from(separate, str(tmp_path / "shared")) == []
    ids = random_ids(2, 6)
    assert torch.equal(*(model.eval()(ids, decoder_input_ids=ids).logits for model in models))


def test_a_resumed_run_does_not_load_its_first_weights_again(whole, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        dies_at_call(patch, Translation, "save", 1)
        with pytest.raises(Killed):
            run(data, tmp_path / "out", initial_weights=whole[0])
    monkeypatch.setattr(runs, "start_from", lambda *_: pytest.fail("loaded again"))
    run(data, tmp_path / "out", initial_weights=whole[0])


def test_incomplete_weights_and_adapters_are_refused(tmp_path):
    model = tiny_seq2seq_model("luna")
    model.save_pretrained(tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    gone = next(name for name in weights if "decoder" in name)
    save_file(
        {name: weight for name, weight in weights.items() if name != gone},
        tmp_path / "cut" / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match=f"has no finite {gone}"):
        start_from(tiny_seq2seq_model("luna", seed=1), str(tmp_path / "cut"))
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    model.config.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="is an adapter"):
        start_from(tiny_seq2seq_model("luna", seed=1), str(tmp_path / "adapter"))


def test_named_columns_beside_a_translation():
    table = datasets.Dataset.from_dict({"de": ["ein Haus"], "en": ["a house"], "translation": ["by hand"]})
    assert _columns(table, ("de", "en"), "table") == [["ein Haus"], ["a house"]]


def test_translations_longer_than_the_positions_are_refused(data, tmp_path, capsys):
    changes = {"model__position_embedding_type": "learned", "max_new_tokens": 300}
    assert start(train_translation, arguments(data, tmp_path / "out", **changes)) == 2
    assert "`max_new_tokens` is 300, but the decoder has" in capsys.readouterr().err


def test_a_given_tokenizer(data, tmp_path):
    train_tokenizer([text for pair in pairs(80, 0) for text in pair], 300, 40).save_pretrained(tmp_path / "given")
    figures = run(data, tmp_path / "out", tokenizer=tmp_path / "given")
    assert figures["vocabulary"] == len(AutoTokenizer.from_pretrained(tmp_path / "given"))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("")["input_ids"] == [2]


def test_the_model_is_the_mean_of_the_last_checkpoints(whole):
    folder, mean = whole
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, mean[f"model.{name}"].float(), rtol=0, atol=1e-7)


def test_damaged_checkpoints_and_those_of_later_steps_are_not_averaged(data, tmp_path, monkeypatch, capsys):
    save = runs.Translation.save

    def damaged(self):
        save(self)
        folder = tmp_path / "out" / "checkpoints"
        (folder / "step-99999999").mkdir(exist_ok=True)
        if self.counters.step == 6:
            path = folder / "step-00000004" / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(runs.Translation, "save", damaged)
    assert run(data, tmp_path / "out")["averaged_checkpoints"] == 1
    assert "damaged checkpoint step-00000004: model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_tokens": 10}, "max_length"),
        ({"average_checkpoints": 3}, "save_total_limit"),
        ({"max_length": 65, "batch_tokens": 100}, "64"),
        ({"label_smoothing": 1}, "label_smoothing"),
        ({"model__is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_bad_values(changes, named, data, tmp_path, capsys):
    assert start(train_translation, arguments(data, tmp_path / "out", **changes)) != 0
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
