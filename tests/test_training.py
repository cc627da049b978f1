"""The pretraining script from end to end: what a run leaves, resuming after any interruption, mistakes of the user."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.state import AcceleratorState
from helpers import ROOT, run_python, tiny_model, tiny_tokenizer
from hub_stub import HubStub
from tiny_training import (
    DEMO,
    Killed,
    arguments,
    checkpoint,
    dies_at_call,
    loop,
    losses,
    objective,
    pretrain_mlm,
    pretraining,
    run,
    same_weights,
    truncated,
    without_model_section,
    write_corpus,
)
from transformers import AutoModelForMaskedLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

SCRIPT = "training/pretrain_mlm.py"


def environment():
    values = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **values, "ACCELERATE_USE_CPU": "true"}


def script(*words, launcher=()):
    """The script as a user starts it, from the repository root."""
    command = [sys.executable, *launcher, SCRIPT, *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# ---- what a run leaves ----


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A finished run of the script, with a gain asked for that no one reaches."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    return script(*arguments(DEMO, folder, data=corpus, batch_size=4, min_gain_nats=50)), folder


def test_missed_gain_fails_the_process(finished):
    process, _ = finished
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("The gain over the unigram baseline is ")


def test_script_writes_a_checkpoint_with_its_figures(finished):
    process, folder = finished
    written = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "metrics.json", "log.jsonl"} <= written
    assert {"modeling_luna.py", "configuration_luna.py", "loss.png"} <= written
    assert "checkpoints" not in written  # the run is done
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((folder / "metrics.json").read_text())
    entries = loop.read_log(folder / "log.jsonl")
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
    for value in (f"{figures['held_out_loss']:.3f}", f"{figures['unigram_loss']:.3f}", "(2 text files)"):
        assert value in process.stdout
    assert "2 pass(es) of 4" in process.stdout
    assert "step      2: held-out loss" in process.stdout


def test_checkpoint_answers_alike_where_the_package_is_missing(finished):
    _, folder = finished
    code = """
import json, sys
from transformers import pipeline
fill_mask = pipeline("fill-mask", sys.argv[1], trust_remote_code=True, top_k=3)
print(json.dumps([fill_mask(sentence) for sentence in json.loads(sys.argv[2])]))
"""
    expected = json.loads((folder / "metrics.json").read_text())["fill_mask"]
    assert len(expected) == 3 and all(len(answer["guesses"]) == 3 for answer in expected)
    sentences = json.dumps([answer["sentence"] for answer in expected])
    answers = json.loads(run_python(code, folder, sentences, blocked=True).splitlines()[-1])
    for answer, rows in zip(expected, answers, strict=True):
        assert [guess["token"] for guess in answer["guesses"]] == [row["token_str"] for row in rows]
        assert [guess["score"] for guess in answer["guesses"]] == pytest.approx(
            [row["score"] for row in rows], rel=1e-4
        )


def test_runs_are_reproducible_and_the_folder_can_be_written_again(corpus, tmp_path):
    first, again, other = (run(tmp_path / "out", data=corpus, seed=seed) for seed in (1, 1, 2))
    assert first["held_out_loss"] == again["held_out_loss"]
    assert first["held_out_loss"] != other["held_out_loss"]


@pytest.mark.parametrize("model_type", ["roberta", "modernbert"])
def test_other_encoders_train_with_the_same_script(corpus, tmp_path, capsys, model_type):
    figures = run(tmp_path / "out", data=corpus, model__model_type=model_type)
    assert f"since {model_type} has no such field: " in capsys.readouterr().out
    # 64 rows, of which RoBERTa leaves two unused
    assert figures["longest_input"] == {"roberta": 62, "modernbert": 64}[model_type]
    assert "custom_code" not in (tmp_path / "out" / "README.md").read_text()
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config.model_type == model_type


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps the precision of a process; a test with another one starts and leaves it without any."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_all_options_at_once(corpus, tmp_path, fresh_accelerate):
    options = {"gradient_checkpointing": "true", "mixed_precision": "bf16", "whole_word_masking": "true"}
    figures = run(tmp_path / "out", data=corpus, trackers="[tensorboard]", **options)
    assert figures["held_out_loss"] > 0
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))
    assert "words, and with them all their tokens" in " ".join((tmp_path / "out" / "README.md").read_text().split())


def test_streaming_trains_as_well(corpus, tmp_path):
    figures = run(tmp_path / "out", data=corpus, streaming="true")
    assert figures["held_out_targets"] > 0 and len(losses(tmp_path / "out")) == 3 + 2


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(corpus, tmp_path):
    plain, compiled = (run(tmp_path / name, data=corpus, compile=name) for name in ("false", "true"))
    assert compiled["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=1e-4)


# ---- going on from a checkpoint, and longer blocks ----


def test_continued_pretraining_extends_positions_and_says_so(corpus, tmp_path, capsys):
    run(tmp_path / "base", data=corpus)
    capsys.readouterr()
    longer = {"block_size": 128, "global_batch_tokens": 256, "model_name_or_path": tmp_path / "base"}
    words = arguments(DEMO, tmp_path / "long", data=corpus, **longer)
    assert pretrain_mlm.main(without_model_section(words)) == 0
    shown = capsys.readouterr().out
    assert "Positions extended from 64 to 128 tokens: the 64 learned positions are repeated." in shown
    assert "The file's model section is left out" in shown and "if the checkpoint was trained on this text" in shown
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "long")
    assert model.config.max_position_embeddings == 128 and model.config.sparse_prediction
    assert AutoTokenizer.from_pretrained(tmp_path / "long").model_max_length == 128
    old, new = (AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("base", "long"))
    assert old == new
    figures = json.loads((tmp_path / "long" / "metrics.json").read_text())
    base = json.loads((tmp_path / "base" / "metrics.json").read_text())
    assert figures["held_out_loss"] < base["held_out_loss"]  # it starts where the other ended
    card = (tmp_path / "long" / "README.md").read_text()
    assert "trained on from `base`" in card and "- Positions extended from 64 to 128 tokens" in card


def test_a_checkpoint_is_never_the_output_folder(corpus, tmp_path, capsys):
    run(tmp_path / "base", data=corpus)
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    words = arguments(DEMO, tmp_path / "base", data=corpus, model_name_or_path=tmp_path / "base")
    assert pretrain_mlm.main(without_model_section(words)) == 2
    assert "is `model_name_or_path`, which would be overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before


def test_what_the_command_line_says_about_a_loaded_model_is_done_and_said(corpus, tmp_path, capsys):
    run(tmp_path / "base", data=corpus)
    words = without_model_section(arguments(DEMO, tmp_path / "out", data=corpus, model_name_or_path=tmp_path / "base"))
    assert pretrain_mlm.main([*words, "--model.hidden_dropout_prob", "0.25"]) == 0
    assert "But for hidden_dropout_prob=0.25, as given on the command line." in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_dropout_prob"] == 0.25
    assert pretrain_mlm.main([*words, "--model.classifier_pooling", "median"]) == 2
    assert "`classifier_pooling` is 'median', but must be one of cls, mean" in capsys.readouterr().err


# ---- interruptions ----

DROPOUT = {"model__hidden_dropout_prob": 0.1, "max_steps": 6, "save_steps": 2, "eval_steps": 3, "log_steps": 2}


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    run(folder, data=corpus, **DROPOUT)
    return folder


MOMENTS = {
    "the tokenizer is saved": (pretraining, "make_tokenizer", 1),
    "the text is prepared": (pretraining, "prepare_text", 1),
    "before the first checkpoint": (loop, "one_update", 1),
    "between checkpoints": (loop, "one_update", 5),
    "files of a checkpoint are written": (checkpoint, "_data_file", 2),
    "a checkpoint is complete under its other name": (checkpoint, "_seal", 2),
    "a checkpoint is in place": (pretraining, "save_checkpoint", 2),
    "the model is saved": (pretraining, "save_model", 1),
    "the card is written": (objective, "make_card", 1),
    "all but the checkpoints is done": (pretraining, "report", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_a_run_goes_on_as_if_nothing_had_been(
    corpus, tmp_path, monkeypatch, uninterrupted, moment
):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, *MOMENTS[moment])
        pretrain_mlm.main(words)
    logged = losses(folder) if (folder / "log.jsonl").is_file() else []
    assert pretrain_mlm.main(words) == 0
    assert losses(folder) == losses(uninterrupted)
    assert losses(folder)[: len(logged)] == logged  # nothing that was logged is lost
    entries = [(e["kind"], e["step"]) for e in loop.read_log(folder / "log.jsonl") if e["kind"] != "resumed"]
    assert len(entries) == len(set(entries))
    assert same_weights(folder, uninterrupted)
    assert not list(folder.rglob("*.unfinished")) and not (folder / "checkpoints").exists()


def start_and_wait(words, folder, entries):
    """The script in a process of its own, once its log has so many lines."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *words], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        if (folder / "log.jsonl").is_file() and len((folder / "log.jsonl").read_text().splitlines()) >= entries:
            return process
        time.sleep(0.01)
    raise AssertionError("the run ended before it could be interrupted")


LONG = {**DROPOUT, "max_steps": 300, "save_steps": 10, "eval_steps": 1000, "log_steps": 1}


def test_sigkill_and_sigterm_in_turn_and_the_losses_are_those_of_one_run(corpus, tmp_path):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **LONG)
    process = start_and_wait(words, folder, entries=25)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    logged = losses(folder)
    process = start_and_wait(words, folder, entries=45)
    process.terminate()
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Stopped by SIGTERM after step" in shown and "The same command goes on from there" in shown
    stopped_at = losses(folder)[-1][1]
    assert checkpoint.checkpoints(folder)[-1].name == f"step-{stopped_at:08d}"  # saved where it stood
    assert pretrain_mlm.main(words) == 0
    reference = tmp_path / "reference"
    run(reference, data=corpus, **LONG)
    assert losses(folder)[: len(logged)] == logged
    assert losses(folder) == losses(reference) and same_weights(folder, reference)
    assert len([e for e in loop.read_log(folder / "log.jsonl") if e["kind"] == "resumed"]) == 2


def test_streaming_resumes_exactly(corpus, tmp_path, monkeypatch):
    options = {**DROPOUT, "streaming": "true"}
    run(tmp_path / "whole", data=corpus, **options)
    words = arguments(DEMO, tmp_path / "out", data=corpus, **options)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, loop, "one_update", 5)
        pretrain_mlm.main(words)
    assert pretrain_mlm.main(words) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_truncated_checkpoint_is_passed_over(corpus, tmp_path, monkeypatch, capsys, uninterrupted):
    folder, words = tmp_path / "out", arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, loop, "one_update", 5)
        pretrain_mlm.main(words)
    newest = checkpoint.checkpoints(folder)[-1]
    os.truncate(newest / "model.safetensors", 64)
    capsys.readouterr()
    assert pretrain_mlm.main(words) == 0
    shown = capsys.readouterr().out
    assert f"{newest.name} is damaged (model.safetensors" in shown and "step-00000002: step 2 of 6" in shown
    assert losses(folder) == losses(uninterrupted)


def interrupted(corpus, tmp_path, monkeypatch, **options):
    words = arguments(DEMO, tmp_path / "out", data=corpus, **DROPOUT, **options)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies_at_call(patched, loop, "one_update", 5)
        pretrain_mlm.main(words)
    return words


def test_another_recipe_does_not_go_on_with_the_checkpoints_of_this_one(corpus, tmp_path, monkeypatch, capsys):
    words = interrupted(corpus, tmp_path, monkeypatch)
    assert pretrain_mlm.main([*words, "--learning-rate", "1e-4"]) == 2
    assert "other values of learning_rate" in capsys.readouterr().err
    assert len(checkpoint.checkpoints(tmp_path / "out")) == 2
    assert pretrain_mlm.main([*words, "--log-steps", "3"]) == 0  # what is not learnt from may change


def test_starting_again_must_be_asked_for(corpus, tmp_path, monkeypatch, capsys):
    words = interrupted(corpus, tmp_path, monkeypatch, overwrite_output_dir="false")
    assert pretrain_mlm.main([*words, "--resume", "false"]) == 2
    assert "--overwrite_output_dir true" in capsys.readouterr().err
    assert len(checkpoint.checkpoints(tmp_path / "out")) == 2
    assert pretrain_mlm.main([*words, "--resume", "false", "--overwrite-output-dir", "true"]) == 0
    assert "resumed" not in (tmp_path / "out" / "log.jsonl").read_text()


# ---- several processes ----


@pytest.mark.slow
def test_two_processes_resume_exactly(corpus, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = {**LONG, "max_steps": 60}
    words = arguments(DEMO, tmp_path / "out", data=corpus, **options)
    process = subprocess.Popen([sys.executable, *launcher, SCRIPT, *words], cwd=ROOT, env=environment())
    log = tmp_path / "out" / "log.jsonl"
    while not (log.is_file() and len(log.read_text().splitlines()) >= 25):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    process.wait()
    assert script(*words, launcher=launcher).returncode == 0
    assert script(*arguments(DEMO, tmp_path / "whole", data=corpus, **options), launcher=launcher).returncode == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


# ---- the Hub ----


def test_push_to_hub_sends_what_loads_again(corpus, tmp_path):
    with HubStub() as hub:
        words = arguments(DEMO, tmp_path / "out", data=corpus, hub_model_id="tester/pushed", hub_private="true")
        code = f"import pretrain_mlm; assert pretrain_mlm.main({[*words, '--push-to-hub']!r}) == 0"
        run_python(f"import sys; sys.path.insert(0, 'training')\n{code}", env=hub.environment(tmp_path / "home"))
    files = hub.repositories["tester/pushed"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_luna.py", "loss.png"} <= set(files)
    assert files["README.md"] == (tmp_path / "out" / "README.md").read_bytes()
    assert not [name for name in files if name.startswith("checkpoints") or name.endswith(".unfinished")]
    assert hub.private == {"tester/pushed"} and not hub.unknown


# ---- mistakes ----


def test_a_mistake_leaves_the_earlier_run_alone(corpus, tmp_path):
    run(tmp_path / "out", data=corpus)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=tmp_path / "none")) == 2
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus, model__hidden_size=33)) == 2
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus, overwrite_output_dir="false")) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()} == before


def test_damaged_weights_are_found_before_an_earlier_model_is_removed(corpus, tmp_path, capsys):
    run(tmp_path / "keep", data=corpus)
    before = {path.name: path.read_bytes() for path in (tmp_path / "keep").iterdir() if path.is_file()}
    damaged = truncated(tmp_path / "keep", tmp_path / "damaged")
    for name in ("keep", "new"):
        words = arguments(DEMO, tmp_path / name, data=corpus, model_name_or_path=damaged)
        assert pretrain_mlm.main(without_model_section(words)) == 2
        assert "error: The weights of" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "keep").iterdir() if path.is_file()} == before
    assert not (tmp_path / "new").exists()


def test_a_sentence_that_is_too_long_for_a_known_tokenizer_is_told_before_the_folder_is_made(corpus, tmp_path, capsys):
    start, options = tmp_path / "start", {"data": corpus, "fill_mask": f"['{'word ' * 99}<mask>']"}
    run(start, data=corpus)
    words = without_model_section(arguments(DEMO, tmp_path / "new", model_name_or_path=start, **options))
    new = arguments(DEMO, tmp_path / "new", tokenizer=start, **options)
    for own in (words, new):
        assert pretrain_mlm.main(own) == 2
        assert "but the model takes 64: 'word word" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_files_of_no_earlier_run_are_never_overwritten(corpus, tmp_path, capsys):
    (tmp_path / "README.md").write_text("somebody's own")
    assert pretrain_mlm.main(arguments(DEMO, tmp_path, data=corpus)) == 2
    assert "--output_dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_the_trial_file_of_another_process_is_no_file_of_somebody_else(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".writable-1").touch()
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus)) == 0


def gpt2_folder(tmp_path):
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=300)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data": "no/such/folder"}, "no such file or folder"),
        ({"block_size": 80, "global_batch_tokens": 160}, "raise `model.max_position_embeddings`"),
        ({"global_batch_tokens": 100}, "a multiple of `block_size`"),
        ({"fill_mask": f"['{'word ' * 99}<mask>']"}, "`fill_mask`"),
        ({"model__model_type": "lunar"}, "Choose luna"),
        ({"model__model_type": "gpt2"}, "Unknown `model_type` 'gpt2'"),
        ({"model__hiden_size": 32}, "Did you mean `hidden_size`"),
        ({"model__vocab_size": 32}, "follows from the tokenizer"),
        ({"model__num_attention_heads": 5}, "num_attention_heads"),
        ({"model__num_attention_heads": "many"}, "num_attention_heads"),
        ({"model_name_or_path": "no/model"}, "neither as a folder nor on the Hub"),
        ({"tokenizer": "no/tokenizer"}, "There is no tokenizer"),
        ({"tokenizer": "a", "train_tokenizer": "true"}, "where `train_tokenizer` is true"),
        ({"trackers": "[nonsense]"}, "`trackers`: 'nonsense' is not installed or unknown"),
        ({"language": "English"}, "a code such as en"),
        ({"push_to_hub": "true"}, "the repository 'luna-demo' cannot be made"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(corpus, tmp_path, capsys, overrides, message):
    words = arguments(DEMO, tmp_path / "out", **{"data": corpus, **overrides})
    if "model_name_or_path" in overrides:
        words = without_model_section(words)
    assert pretrain_mlm.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_checkpoints_of_other_families_are_refused(corpus, tmp_path, capsys):
    words = ["--data", str(corpus), "--output-dir", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]
    assert pretrain_mlm.main([str(DEMO), *words, "--model-name-or-path", str(gpt2_folder(tmp_path))]) == 2
    assert "is a gpt2 checkpoint. An encoder is needed" in capsys.readouterr().err
    # A model and a tokenizer that do not belong together.
    tiny_model("luna", "mlm", vocab_size=100).save_pretrained(tmp_path / "luna")
    tiny_tokenizer().save_pretrained(tmp_path / "luna")
    assert pretrain_mlm.main([str(DEMO), *words, "--model-name-or-path", str(tmp_path / "luna")]) == 2
    assert "tokens, but the model 100" in capsys.readouterr().err


def test_output_folders_that_cannot_be_written_are_refused(corpus, tmp_path, capsys):
    (tmp_path / "note").write_text("mine")
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "note", data=corpus)) == 2
    assert "is a file" in capsys.readouterr().err
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "note" / "out", data=corpus, cache_dir=tmp_path / "c")) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no"), (b" \n\n", "no text"), (b"one document\n", "held_out"), (b"\xff\xfe", "UTF-8")],
)
def test_unusable_text_is_refused(tmp_path, capsys, content, message):
    texts = tmp_path / "texts"
    texts.mkdir()
    if content is not None:
        (texts / "a.txt").write_bytes(content)
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=texts)) == 2
    assert message in capsys.readouterr().err


def test_without_the_train_extra_the_script_says_what_to_install():
    code = f"""
import runpy, sys
sys.path.insert(0, "training")
sys.modules["accelerate"] = None
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr == (
        'error: accelerate not installed. The scripts need the train extra: pip install -e ".[train]"\n'
    )


def test_ctrl_c_outside_training_says_how_to_go_on(corpus, tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "prepare_text", interrupt)
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus)) == 130
    assert "The same command goes on" in capsys.readouterr().err


def test_help_lists_every_key():
    process = script("--help")
    assert process.returncode == 0
    keys = set(yaml.safe_load(Path(DEMO).read_text()))
    assert [key for key in keys if key not in process.stdout] == []
