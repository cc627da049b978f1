"""Pretraining from end to end: what a run leaves, exact resumption after any interruption, mistakes in its input."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pretrain_mlm
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from engine import log, pretraining
from helpers import ROOT, run_python, tiny_model, tiny_tokenizer
from hub_stub import HubStub
from objectives.masked import MaskedPretraining, SparseHead
from tiny_training import (
    DEMO,
    SCRIPT,
    SETTINGS,
    arguments,
    environment,
    files_of,
    run,
    script,
    start,
    truncated,
    without_model_section,
)
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

# ---- what a run leaves ----


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of the script that misses the gain it asks for."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    return script(*arguments(DEMO, folder, data=corpus, batch_size=4, min_gain_nats=50)), folder


def test_the_script_writes_a_checkpoint_with_its_figures(finished):
    process, folder = finished
    assert process.returncode == 1 and "`min_gain_nats`" in process.stderr.splitlines()[-1]
    written = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "metrics.json", "log.jsonl"} <= written
    assert {"modeling_luna.py", "configuration_luna.py"} <= written and "checkpoints" not in written
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((folder / "metrics.json").read_text())
    entries = log.read_log(folder / "log.jsonl")
    held_out = [entry for entry in entries if entry["kind"] == "held_out"]
    training = [entry for entry in entries if entry["kind"] == "train"]
    assert [entry["step"] for entry in held_out] == [2, 3]
    assert [entry["step"] for entry in training] == [1, 2, 3]
    assert held_out[-1]["loss"] == pytest.approx(figures["held_out_loss"], rel=1e-5)
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    assert figures["gain_nats"] == pytest.approx(figures["unigram_loss"] - figures["held_out_loss"])
    assert figures["seen_tokens"] == training[-1]["seen_tokens"]
    assert 0 < training[-1]["mfu"] < 1.5 and training[-1]["seconds"] > training[0]["seconds"] > 0
    (probe, *_) = [entry for entry in entries if entry["kind"] == "probe"]
    assert probe["pack_entropy"][0] > 0.9 and probe["unpack_entropy"][0] > 0.9  # nothing is learnt yet
    for value in (
        f"{figures['held_out_loss']:.3f}",
        f"{figures['unigram_loss']:.3f}",
        "2 passes of 4 on each of 1 process.",
    ):
        assert value in process.stdout


@pytest.mark.slow
def test_the_checkpoint_answers_alike_without_the_package(finished):
    _, folder = finished
    code = """
import json, sys
from transformers import pipeline
fill_mask = pipeline("fill-mask", sys.argv[1], trust_remote_code=True, top_k=3)
print(json.dumps([fill_mask(sentence) for sentence in json.loads(sys.argv[2])]))
"""
    expected = json.loads((folder / "metrics.json").read_text())["fill_mask"]
    sentences = json.dumps([answer["sentence"] for answer in expected])
    answers = json.loads(run_python(code, folder, sentences, blocked=True).splitlines()[-1])
    for answer, rows in zip(expected, answers, strict=True):
        assert [guess["token"] for guess in answer["guesses"]] == [row["token_str"] for row in rows]
        scores = [row["score"] for row in rows]
        assert [guess["score"] for guess in answer["guesses"]] == pytest.approx(scores, rel=1e-4)


def test_the_head_of_roberta_runs_at_labelled_positions_alone():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=50, **sizes)).eval()
    ids = torch.randint(4, 50, (3, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids % 3 > 0, -100)}
    batch["attention_mask"][0, 5:] = 0
    rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    loss = SparseHead(model)(**batch).loss
    assert rows == [(batch["labels"] != -100).sum()]
    own = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    full = torch.autograd.grad(expected := model(**batch).loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own, full)


def test_a_sharded_roberta_is_called_itself():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=50, **sizes))
    run = MaskedPretraining(SimpleNamespace(separate_documents=False, **SETTINGS))

    def made(backend):
        run.accelerator = SimpleNamespace(distributed_type=backend)
        return type(run.wrap(model))

    assert made(DistributedType.NO) is made(DistributedType.MULTI_GPU) is SparseHead
    assert made(DistributedType.FSDP) is made(DistributedType.DEEPSPEED) is RobertaForMaskedLM


def test_roberta_trains_with_the_same_recipe(corpus, tmp_path, capsys):
    figures = run(tmp_path / "out", data=corpus, model__model_type="roberta")
    assert "projection_length" in capsys.readouterr().out
    assert figures["longest_input"] == 62  # 64 rows, of which RoBERTa leaves two unused
    assert "custom_code" not in (tmp_path / "out" / "README.md").read_text()


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps the precision of a process; a test with another one starts and ends without any."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_all_options_at_once(corpus, tmp_path, monkeypatch, fresh_accelerate):
    settings, optimizer = {}, torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **own: settings.update(own) or optimizer(groups, **own))
    options = {"gradient_checkpointing": "true", "mixed_precision": "bf16", "whole_word_masking": "true"}
    options["separate_documents"] = "true"
    run(tmp_path / "out", data=corpus, trackers="[tensorboard]", **options)
    assert settings == {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-6, "fused": True}
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))
    assert "words, with all their tokens" in " ".join((tmp_path / "out" / "README.md").read_text().split())


def test_separate_documents_are_refused_where_they_would_mix(corpus, tmp_path, capsys):
    for options, named in (({"compile": "true"}, "compile"), ({"model__model_type": "roberta"}, "roberta")):
        words = arguments(DEMO, tmp_path / named, data=corpus, separate_documents="true", **options)
        assert start(pretrain_mlm, words) == 2
        message = capsys.readouterr().err
        assert "separate_documents" in message and named in message


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"local_window": 4}, {"model_type": "roberta"}], ids=str)
def test_a_compiled_model_learns_the_same(fields, corpus, tmp_path):
    options = {"data": corpus, **{f"model__{name}": value for name, value in fields.items()}}
    plain, compiled = (run(tmp_path / name, compile=name, **options) for name in ("false", "true"))
    assert compiled["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=1e-4)


# ---- starting from a checkpoint ----


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    run(folder, data=corpus)
    return folder


def continued(folder, base, corpus, **options):
    return without_model_section(arguments(DEMO, folder, data=corpus, model_name_or_path=base, **options))


def test_continued_pretraining_extends_positions(corpus, base, tmp_path, capsys):
    longer = {"block_size": 128, "global_batch_tokens": 256, "eval_steps": 3}
    words = continued(tmp_path / "long", base, corpus, **longer)
    assert start(pretrain_mlm, [*words, "--model.hidden_dropout_prob", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "from 64 to 128" in printed and "hidden_dropout_prob=0.25" in printed and "`validation`" in printed
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "long").config
    assert config.max_position_embeddings == 128 and config.sparse_prediction and config.hidden_dropout_prob == 0.25
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "long"))
    assert new.model_max_length == 128 and old.get_vocab() == new.get_vocab()
    figures, before = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path / "long", base))
    assert figures["held_out_loss"] < before["held_out_loss"]  # it starts where the other ended
    entries = log.read_log(tmp_path / "long" / "log.jsonl")
    assert [entry["step"] for entry in entries if entry["kind"] == "held_out"] == [0, 3]
    card = (tmp_path / "long" / "README.md").read_text()
    assert "from `base`" in card and "from 64 to 128" in card


@pytest.mark.parametrize("model_type", ["luna", "roberta"])
def test_continued_pretraining_drops_out(model_type, corpus, tmp_path):
    """`from_pretrained` returns a model for inference; a run continues in training mode."""
    kind = {} if model_type == "luna" else {"model__model_type": model_type}
    run(tmp_path / "base", data=corpus, **kind)
    losses = []
    for rate in ("0.0", "0.5"):
        words = continued(tmp_path / rate, tmp_path / "base", corpus)
        assert start(pretrain_mlm, [*words, "--model.hidden_dropout_prob", rate, "--log_steps", "1"]) == 0
        entries = log.read_log(tmp_path / rate / "log.jsonl")
        losses.append(next(entry["loss"] for entry in entries if entry["kind"] == "train"))
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


# ---- the Hub ----


def test_push_to_hub_sends_what_loads_again(corpus, tmp_path, monkeypatch):
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        options = {"hub_model_id": "tester/pushed", "hub_private": "true", "push_to_hub": "true"}
        run(tmp_path / "out", data=corpus, **options)
    files = hub.repositories["tester/pushed"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_luna.py", "log.jsonl"} <= set(files)
    assert files["README.md"] == (tmp_path / "out" / "README.md").read_bytes()
    assert not [name for name in files if name.startswith(("checkpoints", "."))]
    assert hub.private == {"tester/pushed"} and not hub.unknown


# ---- mistakes ----


def test_mistakes_leave_earlier_results_alone(corpus, base, tmp_path, capsys):
    before = files_of(base)
    damaged = truncated(base, tmp_path / "damaged")
    for words, named in (
        (arguments(DEMO, base, data=tmp_path / "none"), "none"),
        (arguments(DEMO, base, data=corpus, model__hidden_size=33), "hidden_size"),
        (arguments(DEMO, base, data=corpus, overwrite_output_dir="false"), "--overwrite_output_dir"),
        (continued(base, base, corpus), "`model_name_or_path`"),
        (continued(base, damaged, corpus), str(damaged)),
        (continued(tmp_path / "new", damaged, corpus), str(damaged)),
        (continued(tmp_path / "new", base, corpus, fill_mask=f"['{'word ' * 99}<mask>']"), "`fill_mask`"),
        (arguments(DEMO, tmp_path / "new", data=corpus, tokenizer=base, fill_mask=f"['{'word ' * 99}<mask>']"), "word"),
    ):
        assert pretrain_mlm.main(words) == 2
        assert named in capsys.readouterr().err
    assert files_of(base) == before and not (tmp_path / "new").exists()


def test_files_of_something_else_are_never_overwritten(corpus, tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("somebody's own")
    monkeypatch.setattr(pretraining, "open_corpus", None)  # the folder is refused before the data are read
    assert pretrain_mlm.main(arguments(DEMO, tmp_path, data=corpus, cache_dir=tmp_path.parent / "cache")) == 2
    assert "--output_dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"data": "no/such/folder"}, "no/such/folder"),
        ({"block_size": 80, "global_batch_tokens": 160}, "`model.max_position_embeddings`"),
        ({"model__model_type": "lunar"}, "'lunar'"),
        ({"model_name_or_path": "no/model"}, "no/model"),
        ({"model_name_or_path": "GPT2"}, "gpt2 checkpoint"),
        ({"model_name_or_path": "LUNA"}, "tokens, but the model 100"),
        ({"tokenizer": "no/tokenizer"}, "no/tokenizer"),
        ({"tokenizer": "a", "train_tokenizer": "true"}, "`train_tokenizer`"),
        ({"trackers": "[nonsense]"}, "'nonsense'"),
        ({"push_to_hub": "true"}, "'luna-demo'"),
        ({"output_dir": "FILE"}, "is a file"),
        ({"output_dir": "FILE/out"}, "cannot be written to"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(corpus, tmp_path, capsys, overrides, named):
    (tmp_path / "FILE").touch()
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=300)).save_pretrained(tmp_path / "GPT2")
    tiny_model("luna", "mlm", vocab_size=100).save_pretrained(tmp_path / "LUNA")
    tiny_tokenizer().save_pretrained(tmp_path / "LUNA")
    values = {key: tmp_path / value if str(value).isupper() else value for key, value in overrides.items()}
    folder = tmp_path / values.pop("output_dir", "out")
    words = arguments(DEMO, folder, **{"data": corpus, "cache_dir": tmp_path / "cache", **values})
    capsys.readouterr()
    assert pretrain_mlm.main(without_model_section(words) if "model_name_or_path" in values else words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error
    assert not (folder / "log.jsonl").exists()


@pytest.mark.parametrize(("content", "named"), [(None, "texts"), (b" \n\n", "no text"), (b"one\n", "held_out")])
def test_unusable_text_is_refused(tmp_path, capsys, content, named):
    (tmp_path / "texts").mkdir()
    if content is not None:
        (tmp_path / "texts" / "a.txt").write_bytes(content)
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=tmp_path / "texts")) == 2
    assert named in capsys.readouterr().err


def test_without_the_train_extra_the_script_names_what_to_install():
    code = f"""
import runpy, sys
sys.path.insert(0, "training")
sys.modules["accelerate"] = None
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1
    assert "accelerate" in process.stderr and 'pip install -e ".[train]"' in process.stderr


def test_ctrl_c_outside_training_has_its_exit_status(corpus, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "prepare_text", interrupt)
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus)) == 130
