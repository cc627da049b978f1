"""Causal pretraining from end to end: what a run leaves, what differs from masked language modelling, mistakes."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pretrain_clm
import pytest
import torch
from common import models
from data import masking, prepare, rows
from data.tokenizer import train_causal_tokenizer
from engine import log, loop
from gpt2_files import gpt2_folder
from helpers import FAMILIES, code_name, slots_of, tiny_model, tiny_tokenizer
from huggingface_hub import ModelCard
from objectives.causal import CausalPretraining, continue_text
from tiny_training import (
    CAUSAL,
    SETTINGS,
    Killed,
    arguments,
    dies_at_call,
    losses,
    same_weights,
    start,
    without_model_section,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from luna_hf import MemoryCache
from luna_hf.markdown import code
from luna_hf.scripting import UserError

DEMO = CAUSAL[0]
SCRIPT = "training/pretrain_clm.py"
PHRASE = ["the", "token", "reads", "every", "packed", "sequence", "of", "fixed", "length", "in", "its", "layer", "and"]
KINDS = {
    code_name(family): {
        f"model__{name}": value for name, value in {"model_type": family, **slots_of(family, 4)}.items()
    }
    for family in FAMILIES
}
KINDS["gpt2"] = {"model__model_type": "gpt2"}
QUICK = {"sample_tokens": 4, "prompts": "['the token', 'fixed length']"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents that repeat a phrase, each from another word on: every next word follows from the one before."""
    generator = random.Random(0)
    texts = [" ".join((PHRASE * 4)[generator.randrange(12) :]) + f", document {index}." for index in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("\n\n".join(texts))
    return path


def words(output_dir, **overrides):
    """Command line of a shrunk run; a gpt2 has no width of its feed-forward network."""
    words = arguments(DEMO, output_dir, **{**QUICK, **overrides})
    if overrides.get("model__model_type") == "gpt2":
        place = words.index("--model.intermediate_size")
        del words[place : place + 2]
    return words


def run(output_dir, **overrides):
    """A shrunk run in this process; its figures."""
    assert start(pretrain_clm, words(output_dir, **overrides)) == 0
    return json.loads((output_dir / "metrics.json").read_text())


# ---- rows ----


def store_of(tokens):
    return type("Store", (), {"tokens": np.array(tokens, dtype=np.uint16)})()


def test_rows_are_running_text_behind_a_start_token():
    text = [5, 6, 7, 2, 8, 9, 10, 11, 2, 12]
    blocks = rows.Blocks(store_of(text), rows.Frame(4, 0, None))
    assert [block.tolist() for block in blocks] == [[0, 5, 6, 7], [0, 2, 8, 9], [0, 10, 11, 2], [0, 12]]
    closed = rows.Blocks(store_of(text), rows.Frame(4, 0, 2))
    assert closed[0].tolist() == [0, 5, 6, 2]


def test_every_token_but_the_first_is_predicted():
    held_out = prepare.held_out_rows([np.array([0, 5, 6, 7]), np.array([0, 12])], masking.next_tokens, 1, seed=0)
    assert [row["labels"].tolist() for row in held_out] == [[-100, 5, 6, 7], [-100, 12, -100, -100]]
    assert [row["input_ids"].tolist() for row in held_out] == [[0, 5, 6, 7], [0, 12, 1, 1]]
    assert prepare.unigram_baseline(np.ones(20), held_out)["targets"] == 4


@pytest.mark.parametrize("family", ["luna", "gpt2"])
def test_evaluation_and_targets_agree_with_the_loss_of_the_model(family):
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = models.make_config({"model_type": family, **fields}, None, 60, models.CAUSAL)
    model = AutoModelForCausalLM.from_config(config).eval()
    blocks = [np.array([0, *range(5, 5 + length)]) for length in (9, 9, 4)]
    held_out = prepare.held_out_rows(blocks, masking.next_tokens, 1, seed=0)
    result = loop.evaluate(loop.make_accelerator(SimpleNamespace(**SETTINGS)), model, held_out, 2, next_token=True)
    batch = {name: torch.stack([row[name] for row in held_out]) for name in held_out[0]}
    assert result.targets == (batch["labels"] != -100).sum() == 9 + 9 + 4
    assert result.loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    logits = model(**batch).logits[:, :-1].argmax(-1)
    targets = batch["labels"][:, 1:]
    assert result.accuracy == pytest.approx(((logits == targets)[targets != -100]).double().mean().item())


# ---- what a run leaves ----


@pytest.fixture(scope="module", params=["abc", "gpt2"])
def trained(request, corpus, tmp_path_factory):
    """A model of each family that has learnt the phrase."""
    folder = tmp_path_factory.mktemp(request.param) / "out"
    long = {"max_steps": 80, "learning_rate": 2e-2, "eval_steps": 40, "save_steps": 40, "min_gain_nats": 1.0}
    figures = run(folder, data=corpus, **long, **KINDS[request.param])
    return request.param, folder, figures


def test_every_family_learns_what_follows(trained):
    family, folder, figures = trained
    assert figures["held_out_loss"] < figures["unigram_loss"] - 1.0
    held_out = [entry["loss"] for entry in log.read_log(folder / "log.jsonl") if entry["kind"] == "held_out"]
    assert held_out[-1] < held_out[0] and held_out[-1] == pytest.approx(figures["held_out_loss"], rel=1e-5)
    assert figures["model_type"] == KINDS[family]["model__model_type"]
    assert figures["longest_input"] == (64 if family == "gpt2" else None)
    assert not (folder / "checkpoints").exists()


def test_the_saved_files_continue_the_prompts_as_reported(trained):
    family, folder, figures = trained
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert [row["prompt"] for row in figures["continuations"]] == ["the token", "fixed length"]
    for row in figures["continuations"]:
        (answer,) = generate(row["prompt"], max_new_tokens=4, do_sample=False, return_full_text=False)
        assert answer["generated_text"] == row["greedy"]
    assert "reads" in figures["continuations"][0]["greedy"]
    settings = model.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (0, 2, 1)
    if family == "gpt2":
        assert figures["state_bytes"] is None
        return
    cache = MemoryCache(model.config)
    for part in torch.arange(5, 60)[None].split(20, dim=1):
        with torch.no_grad():
            model(part, cache=cache, use_cache=True)
        assert cache.nbytes == figures["state_bytes"]


def test_sampling_follows_the_seed(trained):
    _, folder, figures = trained
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    state = torch.get_rng_state()
    for seed, row in enumerate(figures["continuations"]):  # the recipe's is 0
        assert continue_text(model, tokenizer, row["prompt"], 4, seed) == row
    assert torch.equal(torch.get_rng_state(), state)
    unsure = AutoModelForCausalLM.from_config(model.config).eval()
    drawn = [continue_text(unsure, tokenizer, "the", 12, seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1] and drawn[0]["greedy"] == drawn[1]["greedy"]


def test_card_is_what_the_hub_reads_and_its_figures_are_those_of_the_run(trained):
    family, folder, figures = trained
    made = ModelCard.load(folder / "README.md")
    assert (made.data.library_name, made.data.pipeline_tag) == ("transformers", "text-generation")
    assert {figures["model_type"], "causal-lm"} <= set(made.data.tags)
    assert ("custom_code" in made.data.tags) == (family != "gpt2")
    measured = {result.metric_type: result.metric_value for result in made.data.eval_results}
    assert measured["perplexity"] == round(figures["held_out_perplexity"], 4)
    assert measured["loss"] == round(figures["held_out_loss"], 4)
    text = " ".join(made.text.split())
    assert f"| {figures['held_out_loss']:.3f} | {figures['held_out_perplexity']:.1f} |" in text
    for row in figures["continuations"]:
        assert all(code(row[name]).replace("|", "\\|") in text for name in ("prompt", "greedy"))
    state = figures["state_bytes"]
    assert f"{state:,} bytes" in text if state else "at most 64 tokens" in text
    assert ("trust_remote_code=True" in text) == (family != "gpt2")
    assert str(folder.parent) not in text and "masked" not in made.text.split("The recipe:")[0]


def test_training_continues_from_a_causal_checkpoint(trained, corpus, tmp_path, capsys):
    _, folder, _ = trained
    # Blocks may be longer than the positions of a family, which its decoders do not have.
    size = 64 if trained[0] == "gpt2" else 128
    longer = {"block_size": size, "global_batch_tokens": 256, "model_name_or_path": folder, "learning_rate": 1e-4}
    assert start(pretrain_clm, without_model_section(words(tmp_path / "out", data=corpus, **longer))) == 0
    assert "Positions" not in capsys.readouterr().out
    again = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert again["held_out_loss"] < again["unigram_loss"] - 1.0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 64 or trained[0] != "gpt2"
    assert "from `out`" in (tmp_path / "out" / "README.md").read_text()


# ---- the tokenizer ----


def test_a_trained_tokenizer_starts_a_text_and_leaves_its_end_open(tmp_path, trained):
    tokenizer = train_causal_tokenizer(["a rose is a rose"] * 3, 280, max_length=40)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = loaded("a rose")["input_ids"]
        assert ids[0] == loaded.bos_token_id == 0 and loaded.eos_token_id == 2 not in ids
        assert loaded.decode(ids, skip_special_tokens=True) == "a rose"
        assert loaded.mask_token is None and loaded.pad_token_id == 1 and loaded.model_max_length == 40
        padded = loaded(["a", "a rose is"], padding=True)["input_ids"]
        assert padded[0][0] == 1 and padded[0][-1] != 1  # on the left
        assert loaded("<s>", add_special_tokens=False, split_special_tokens=True)["input_ids"] != [0]
    # Also beside the config of a family, though its encoders have RoBERTa's tokenizer.
    _, folder, _ = trained
    beside = AutoTokenizer.from_pretrained(folder)
    assert beside("a")["input_ids"] == [0, beside.convert_tokens_to_ids("a")]


def test_a_tokenizer_that_ends_every_text_is_adapted(corpus, tmp_path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path / "roberta")
    assert AutoTokenizer.from_pretrained(tmp_path / "roberta")("a")["input_ids"][-1] == 2
    figures = run(tmp_path / "out", data=corpus, tokenizer=tmp_path / "roberta")
    assert figures["notes"][0] in capsys.readouterr().out and "`</s>`" in figures["notes"][0]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = AutoTokenizer.from_pretrained(tmp_path / "roberta")
    for text in ("a token, of the\n layer", "", "naïve  text"):
        assert loaded(text)["input_ids"] == original(text)["input_ids"][:-1]
        assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    assert loaded.get_vocab() == original.get_vocab()


def test_a_tokenizer_of_bert_ends_documents_and_generation_alike(corpus, tmp_path):
    special = ["[UNK]", "[unused1]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"##{word}" for word in special[6:])])}
    BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path / "bert")
    run(tmp_path / "out", data=corpus, tokenizer=tmp_path / "bert")
    config, loaded = AutoConfig.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, 4, 2)
    assert loaded.eos_token == "[SEP]" and loaded("a").input_ids == [3, 6]
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert generation.eos_token_id == 4
    masked = models.make_config(
        {"model_type": "luna"}, AutoTokenizer.from_pretrained(tmp_path / "bert"), len(vocabulary)
    )
    assert (masked.bos_token_id, masked.eos_token_id, masked.sep_token_id) == (None, None, 4)


def test_the_tokenizer_of_gpt2_gets_a_padding_token(corpus, tmp_path, capsys):
    folder = gpt2_folder(tmp_path / "gpt2", merges=40)
    backend = AutoTokenizer.from_pretrained(folder, tokenizer_type="gpt2")
    backend.save_pretrained(folder)
    assert backend.pad_token is None
    figures = run(tmp_path / "out", data=corpus, tokenizer=folder)
    assert "`<pad>`" in capsys.readouterr().out
    loaded, model = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, AutoModelForCausalLM))
    assert loaded.pad_token == "<pad>" and loaded.pad_token_id == len(backend) == model.config.pad_token_id
    assert model.config.vocab_size == figures["vocabulary"] == len(backend) + 1
    # A checkpoint's vocabulary cannot grow: there the end token pads.
    adapted, notes = CausalPretraining(SimpleNamespace(**SETTINGS)).adapt_tokenizer(backend, "gpt2", new_model=False)
    assert adapted.pad_token == "<|endoftext|>" and "`<|endoftext|>`" in notes[0]
    assert backend.pad_token is None  # the one that was given is as it was


def test_a_tokenizer_without_a_start_token_is_refused():
    backend = tiny_tokenizer().backend_tokenizer
    ending = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    run = CausalPretraining(SimpleNamespace(**SETTINGS))
    with pytest.raises(UserError, match=r"some/tokenizer.*`train_tokenizer`"):
        run.adapt_tokenizer(ending, "some/tokenizer", new_model=True)
    endless = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    with pytest.raises(UserError, match=r"some/tokenizer.*\(eos\)"):
        run.adapt_tokenizer(endless, "some/tokenizer", new_model=True)


# ---- interruptions, streaming, several processes ----

DROPOUT = {"model__hidden_dropout_prob": 0.1, "max_steps": 6, "save_steps": 2, "eval_steps": 3, "log_steps": 2}


def test_a_killed_run_resumes_exactly(corpus, tmp_path, monkeypatch):
    options = {"data": corpus, "streaming": "true", **DROPOUT}
    run(tmp_path / "whole", **options)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, CausalPretraining, "update", 5)
        pretrain_clm.main(words(tmp_path / "out", **options))
    run(tmp_path / "out", **options)
    assert "resumed" in (tmp_path / "out" / "log.jsonl").read_text()
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def test_streamed_rows_are_open_as_well(corpus, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(CausalPretraining, "update", lambda run: seen.append(next(run.updates)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrain_clm.main(words(tmp_path / "out", data=corpus, streaming="true"))
    ids = torch.cat([batch["input_ids"] for batch in seen[0]])
    assert ids.shape == (8, 32) and (ids[:, 0] == 0).all()
    assert (ids[:, -1] != 2).any() and (ids[:, 1:] == 2).any()  # documents end within rows
    assert torch.equal(torch.cat([batch["labels"] for batch in seen[0]])[:, 1:], ids[:, 1:])


# ---- options and mistakes ----


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model__model_type": "gpt2", "block_size": 80, "global_batch_tokens": 160}, "`block_size` is 80"),
        ({"model__model_type": "gpt2", "sample_tokens": 70}, "`sample_tokens` of 70"),
        ({"model__model_type": "modernbert"}, "'modernbert'"),
        ({"model__model_type": "bart"}, "'bart'"),
        ({"model__is_decoder": "false"}, "`model.is_decoder`"),
        ({"model__model_type": "abc_memory", "model__memory_control": "cluster"}, "cluster"),
        ({"prompts": "['  ']"}, "`prompts`"),
        ({"sample_tokens": 0}, "`sample_tokens`"),
        ({"vocab_size": 259}, "259"),
        ({"block_size": 2, "global_batch_tokens": 8}, "at least 3"),
        ({"mask_probability": 0.2}, "`mask_probability`"),
        ({"model_name_or_path": "no/model"}, "no/model"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(corpus, tmp_path, capsys, overrides, named):
    line = words(tmp_path / "out", data=corpus, **overrides)
    if "model_name_or_path" in overrides:
        line = without_model_section(line)
    assert pretrain_clm.main(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_encoders_and_causal_models_are_not_confused(tmp_path, trained):
    tiny_model("luna", "mlm").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="luna encoder"):
        models.load_config(str(tmp_path), kind=models.CAUSAL)
    _, folder, figures = trained
    with pytest.raises(UserError, match=f"{figures['model_type']} checkpoint"):
        models.load_config(str(folder))
