"""The study of conversions with a teacher: its driver runs what it promises, and the report compares with the twin."""

import conversion
import conversion_layers
import conversion_report
import learning
import pytest
import running
import torch
from test_learning import RESULTS, SHRINK_WORDS, check
from test_learning import data as learning_data  # noqa: F401  a fixture
from test_swap import SHRINK
from transformers import AutoConfig, RobertaForMaskedLM

from luna_hf.scripting import UserError

CELLS = ["teacher", "window", "mlp", "luna-full-1", "mlp-slots", "mlp-no-teacher"]


@pytest.fixture(scope="module")
def runs(learning_data, tmp_path_factory):  # noqa: F811
    """A folder with a run of each kind."""
    folder = tmp_path_factory.mktemp("conversion")
    where = ["--data", str(learning_data), "--runs", str(folder / "learning")]
    assert learning.main(["pretrain", *where, "--systems", "roberta", "--seeds", "1", *SHRINK_WORDS]) == 0
    teacher = folder / "learning" / "pretrain" / "roberta-seed1"
    where = ["--data", str(learning_data), "--runs", str(folder / "runs"), "--teacher", str(teacher)]
    sizes = ["--window", "4", "--slots", "4", "--steps", "4", "--transfer-steps", "2"]
    words = running.option_words({name: value for name, value in SHRINK.items() if name != "max_steps"})
    assert conversion.main(["run", *where, "--seeds", "0", "--cells", *CELLS, *sizes, *words]) == 0
    return folder / "runs"


def test_steps_of_stage_a_are_part_of_the_budget(runs):
    found = {run["name"]: run for run in conversion_report.read(runs)}
    assert found.keys() == set(CELLS)
    for name, run in found.items():
        assert run["curve"]["step"] == [0, 2, 4], name
        fitted = name not in ("teacher", "window", "mlp-no-teacher")
        assert (run["layer_errors"] is not None) == fitted
        assert run["transfer_steps"] == 2 * fitted


def test_cells_are_what_their_names_say(runs):
    configs = {name: AutoConfig.from_pretrained(runs / "runs" / f"{name}-seed0") for name in CELLS}
    assert configs["mlp"].local_window == configs["window"].memory_size == 4
    assert configs["mlp-slots"].local_window == 0 and configs["mlp-slots"].memory_control == "mlp"
    assert configs["luna-full-1"].full_attention_layers == [1]


def test_what_a_model_loses_without_a_branch_is_reported(runs):
    found = {run["name"]: run for run in conversion_report.condense(conversion_report.read(runs), CELLS)["runs"]}
    assert found["mlp"]["slots_off"] > 0 and found["mlp"]["window_off"] > 0
    assert found["mlp"]["slots_off"] != found["mlp"]["final_loss"]
    assert found["window"]["slots_off"] is None and found["teacher"]["over_twin"] == 0


def test_the_report_is_complete(runs, tmp_path):
    assert conversion.main(["report", "--runs", str(runs), "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("conversion-*.json")
    assert len(check(path, conversion_report.text)["runs"]) == len(CELLS)


def test_an_unknown_cell_is_refused():
    with pytest.raises(UserError, match="no cell 'lunar'"):
        conversion.parse(["run", "--cells", "lunar"])


def test_committed_results():
    """Their comparisons with the twin, too, are those that the report computes."""
    (path,) = RESULTS.glob("conversion-cpu-*.json")
    result = check(path, conversion_report.text)
    computed = conversion_report.condense(result["runs"], list(conversion.cells(8, 64)))
    for run, again in zip(result["runs"], computed["runs"], strict=True):
        for name in ("over_twin", "cost_of_slots_off"):
            assert again.pop(name) == pytest.approx(run.pop(name), abs=1e-4), run["name"]
        assert again == run


def test_layers_are_converted_one_at_a_time(runs, learning_data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(conversion_layers, "BLOCK", 16)
    teacher = runs.parent / "learning" / "pretrain" / "roberta-seed1"
    where = ["--data", str(learning_data), "--runs", str(runs), "--teacher", str(teacher), "--results", str(tmp_path)]
    assert conversion.main(["layers", *where, "--models", "mlp-seed0"]) == 0
    (path,) = tmp_path.glob("conversion-layers-*.json")
    (over,) = running.read_json(path)["over_teacher"].values()
    assert over.keys() == {"all", "0", "1"} and len(set(over.values())) == 3
    kept, ids = conversion_layers.keep(runs / "fitted" / "mlp-seed0", [0, 1]), torch.arange(5, 15)[None]
    softmax = RobertaForMaskedLM.from_pretrained(teacher).eval()
    torch.testing.assert_close(kept.eval()(ids).logits, softmax(ids).logits, rtol=1e-4, atol=1e-5)
    assert conversion.main(["layers", *where, "--models", "nobody"]) == 2
    assert conversion.main(["layers", *where, "--models", "mlp-seed0", "--block", "8"]) == 2
