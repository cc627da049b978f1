"""The training loop and its checkpoints, piece by piece: updates, schedule, evaluation, log, save and load."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from engine import checkpoint, log, loop
from helpers import refused
from tiny_training import SETTINGS, Killed, batch_of, make_run, masked_rows, small_model
from torch import nn

from luna_hf.scripting import UserError


def train(run):
    result = run.train()
    return dict(run.module.named_parameters()), result


# ---- updates ----


@pytest.mark.parametrize("kind", ["luna", "roberta"])
def test_accumulated_update_is_that_of_one_large_batch(kind, tmp_path):
    rows = masked_rows()
    whole_run = make_run(tmp_path / "a", [[batch_of(rows)]], kind)
    whole, _ = train(whole_run)
    parts_run = make_run(tmp_path / "b", [[batch_of(rows[first : first + 2]) for first in (0, 2, 4)]], kind)
    parts, _ = train(parts_run)
    start = dict(small_model(kind).named_parameters())
    assert max((whole[name] - start[name]).abs().max().item() for name in start) > 0.01
    for name in whole:  # float32 sums in another order
        torch.testing.assert_close(
            parts[name], whole[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert parts_run.log.series("train", "loss")[1] == pytest.approx(whole_run.log.series("train", "loss")[1], rel=1e-5)


def test_a_log_entry_is_the_mean_since_the_last_one(tmp_path):
    updates = [[batch_of(masked_rows()[first : first + 2])] for first in (0, 2, 4)]
    each, pairs = (make_run(tmp_path / str(n), updates, max_steps=3, log_steps=n) for n in (1, 2))
    train(each)
    train(pairs)
    steps, losses = each.log.series("train", "loss")
    assert steps == [1, 2, 3] and len(set(losses)) == 3
    assert pairs.log.series("train", "loss") == ([2, 3], pytest.approx([sum(losses[:2]) / 2, losses[2]]))


def test_gradients_are_clipped_over_the_whole_update(tmp_path):
    rows = masked_rows()
    run = make_run(tmp_path, [[batch_of(rows[:3]), batch_of(rows[3:])]], max_grad_norm=0.1)
    after, _ = train(run)
    start = dict(small_model("luna").named_parameters())
    moved = torch.cat([(after[name] - start[name]).flatten() for name in start]).norm().item()
    assert moved == pytest.approx(0.5 * 0.1, rel=1e-3) and run.log.series("train", "grad_norm")[1][0] > 0.2


@pytest.mark.parametrize(
    ("rows", "batch_size", "processes", "expected"),
    [
        (32, 32, 1, (32, 1)),
        (32, 8, 1, (8, 4)),
        (32, 7, 1, (4, 8)),
        (32, 8, 2, (8, 2)),
        (12, 5, 3, (4, 1)),
        (7, 3, 1, (1, 7)),
    ],
)
def test_the_global_batch_is_the_same_on_any_number_of_processes(rows, batch_size, processes, expected):
    micro, passes = loop.split_update(rows, batch_size, processes)
    assert (micro, passes) == expected
    assert micro * passes * processes == rows and micro <= batch_size


def test_a_global_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(UserError, match=r"9 blocks .* 2 processes"):
        loop.split_update(9, 4, 2)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_schedule(power):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = loop.warmup_then_decay(optimizer, max_steps=10, warmup_fraction=0.4, power=power)
    rates = []
    for _ in range(11):
        rates.append(scheduler.get_last_lr()[0] / 2.0)
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5])
    assert rates[4:] == pytest.approx([((10 - step) / 6) ** power for step in range(4, 11)])


# ---- non-finite losses ----


class Breaks(nn.Module):
    """A model with a loss that is not finite in chosen calls."""

    def __init__(self, bad_calls):
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.ones(2, 2)), None
        self.calls, self.bad_calls = 0, bad_calls

    def forward(self, **_):
        self.calls += 1
        factor = math.nan if self.calls in self.bad_calls else 1.0
        return SimpleNamespace(loss=(self.weight * factor).sum())


def broken_run(tmp_path, bad_calls, allowed):
    updates = [[batch_of(masked_rows(2))] for _ in range(4)]
    run = make_run(tmp_path, updates, model=Breaks(bad_calls), max_steps=4, max_skipped_steps=allowed)
    run.measure, run.probe = lambda: loop.Evaluation(1.0, 1.0, 1.0, 1), lambda: None
    return run


def test_a_step_that_is_not_finite_is_skipped_as_often_as_allowed(tmp_path, capsys):
    run = broken_run(tmp_path, {2, 4}, allowed=2)
    parameters, _ = train(run)
    assert run.counters.skipped == 2 and "step 2: loss nan" in capsys.readouterr().out
    assert [entry["step"] for entry in run.log.entries if entry["kind"] == "train"] == [1, 3]
    # Two steps of 0.5 times a gradient of 1, at rates of 1 and 3/4 (skipped updates do not move the schedule).
    assert torch.allclose(parameters["weight"], torch.full((2, 2), 1 - 0.5 - 0.5 * 0.75))


def test_a_skipped_step_leaves_the_scaler_of_fp16_ready(tmp_path):
    run = broken_run(tmp_path, {2}, allowed=1)
    scaler = run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.optimizer = AcceleratedOptimizer(run.optimizer.optimizer, device_placement=False, scaler=scaler)
    run.accelerator.unscale_gradients = lambda: scaler.unscale_(run.optimizer.optimizer)  # as with mixed precision
    parameters, _ = train(run)
    assert run.counters.skipped == 1 and scaler.get_scale() == 2.0
    assert parameters["weight"].isfinite().all()


def test_a_step_that_is_not_finite_stops_the_run_with_a_message(tmp_path):
    run = broken_run(tmp_path, {3}, allowed=0)
    with pytest.raises(UserError, match=r"step 3: loss nan.*`learning_rate`"):
        train(run)
    assert torch.isfinite(run.module.weight).all()


def test_a_run_in_which_every_step_is_skipped_stops_with_a_message(tmp_path):
    with refused("All 4", "`learning_rate`", error=UserError):
        train(broken_run(tmp_path, {1, 2, 3, 4}, allowed=4))


@pytest.mark.parametrize("size", [math.nan, math.inf, 1e6])
def test_a_held_out_loss_without_a_perplexity_is_refused(size):
    model = small_model("luna")
    with torch.no_grad():
        model.lm_head.bias[5] = size
    with refused("held-out text", error=UserError):
        loop.evaluate(loop.make_accelerator(SimpleNamespace(**SETTINGS)), model, masked_rows(2), 2)


# ---- evaluation and log ----


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_evaluation_equals_a_literal_computation(batch_size):
    rows = masked_rows(5)
    accelerator, model = loop.make_accelerator(SimpleNamespace(**SETTINGS)), small_model("luna").train()
    result = loop.evaluate(accelerator, model, rows, batch_size)
    assert model.training
    losses, hits = [], []
    with torch.no_grad():
        for row in rows:
            logits = model.eval()(row["input_ids"][None], row["attention_mask"][None]).logits[0]
            for position, label in enumerate(row["labels"].tolist()):
                if label != -100:
                    losses.append(-logits[position].log_softmax(-1)[label].item())
                    hits.append(int(logits[position].argmax()) == label)
    assert result.targets == len(losses) == 1 + 2 + 3 + 4 + 5
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.accuracy == sum(hits) / len(hits)


def test_a_model_on_the_plateau_is_reported(tmp_path, capsys):
    run = make_run(tmp_path, [[batch_of(masked_rows())]])
    for unigram, expected in ((5.0, True), (9.0, False)):
        run.unigram_loss = unigram
        run.measure = lambda: loop.Evaluation(4.5, 90.0, 0.1, 50)
        run.evaluate(loop.tqdm(disable=True))
        printed = capsys.readouterr().out
        assert f"{unigram:.3f}" in printed and ("plateau" in printed) is expected


def test_a_resumed_log_keeps_what_was_before_and_drops_what_comes_again(tmp_path):
    path = tmp_path / "log.jsonl"
    first = log.RunLog(path, is_main_process=True)
    for step in (1, 2, 3):
        first.add("train", step, loss=float(step))
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # cut short by a kill
    again = log.RunLog(path, is_main_process=True, resume_step=2)
    again.add("train", 3, loss=3.5)
    assert log.read_log(path) == again.entries
    assert again.series("train", "loss") == ([1, 2, 3], [1.0, 2.0, 3.5])
    assert log.RunLog(path, is_main_process=False, resume_step=2).path is None


# ---- checkpoints ----


def counters_at(step):
    return checkpoint.Counters(step=step, seen_tokens=7 * step, seconds=1.5, skipped=2, window=[0.5, 0.25])


def written(tmp_path, steps, keep=2):
    run = make_run(tmp_path, [[batch_of(masked_rows())]])
    for step in steps:
        checkpoint.save_checkpoint(run.accelerator, tmp_path, counters_at(step), {"seed": 1}, {"position": step}, keep)
    return run


def test_checkpoints_are_rotated_and_read_back(tmp_path):
    run = written(tmp_path, (1, 2, 30))
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000002", "step-00000030"]
    newest = checkpoint.newest_complete(tmp_path, print)
    assert newest.name == "step-00000030"
    before = {name: tensor.clone() for name, tensor in run.module.state_dict().items()}
    with torch.no_grad():
        for parameter in run.module.parameters():
            parameter.add_(1.0)
    torch.manual_seed(123)
    assert checkpoint.load_checkpoint(run.accelerator, newest) == {"position": 30}
    assert all(torch.equal(before[name], tensor) for name, tensor in run.module.state_dict().items())
    assert checkpoint.read_state(newest) == (counters_at(30), {"seed": 1})


def test_a_truncated_checkpoint_is_named_and_an_older_one_taken(tmp_path):
    written(tmp_path, (1, 2))
    weights = tmp_path / "checkpoints" / "step-00000002" / "model.safetensors"
    os.truncate(weights, 100)
    logged = []
    assert checkpoint.newest_complete(tmp_path, logged.append).name == "step-00000001"
    assert "step-00000002" in logged[0] and "model.safetensors" in logged[0] and "100" in logged[0]
    (tmp_path / "checkpoints" / "step-00000001" / "optimizer.bin").unlink()
    with pytest.raises(UserError, match="checkpoints"):
        checkpoint.newest_complete(tmp_path, logged.append)


def test_a_damaged_newer_checkpoint_does_not_count_as_kept(tmp_path):
    run = written(tmp_path, (3,))
    (tmp_path / "checkpoints" / "step-00000003" / "optimizer.bin").unlink()
    checkpoint.save_checkpoint(run.accelerator, tmp_path, counters_at(2), {}, {}, keep=1)
    assert checkpoint.newest_complete(tmp_path, print).name == "step-00000002"


def test_a_kill_leaves_all_checkpoints_or_none(tmp_path, monkeypatch):
    def dies(path, ignore_errors):
        if path.exists():
            (path / "step-00000001" / "model.safetensors").unlink()
            raise Killed

    written(tmp_path, (1,))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint.shutil, "rmtree", dies)
        checkpoint.remove_all(tmp_path)
    assert checkpoint.newest_complete(tmp_path, print) is None
    checkpoint.remove_all(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_another_number_of_processes_is_refused(tmp_path):
    run = written(tmp_path, (1,))
    state = tmp_path / "checkpoints" / "step-00000001" / "state.json"
    content = json.loads(state.read_text())
    content["counters"]["processes"] = 4
    state.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"step-00000001 .*4 .*1"):
        checkpoint.load_checkpoint(run.accelerator, state.parent)


def test_the_first_signal_asks_for_a_stop_and_the_second_has_its_usual_effect():
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("before"))
    try:
        with checkpoint.StopRequest() as stop:
            assert stop.name is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.name == "SIGTERM" and received == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == ["before"]
    finally:
        signal.signal(signal.SIGTERM, before)
