"""The study of simultaneous translation: systems are trained and scored at every k; parts keep softmax attention."""

import multi30k_simultaneous as study
import pytest
import running
import torch
from multi30k_parts import PARTS, PartsConfig, PartsForConditionalGeneration
from tiny_translation import SETTINGS, write_parallel
from transformers import AutoModelForSeq2SeqLM

from luna_hf.families.abc.attention import AbcCausalAttention
from luna_hf.simultaneous import WaitK

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_parts_keep_softmax_attention(part, tmp_path):
    config = PartsConfig(
        **TINY, vocab_size=50, softmax_parts=[part], source_is_causal=True, is_encoder_decoder=True, pad_token_id=1
    )
    model = PartsForConditionalGeneration(config).eval()
    found = [name for name, module in model.named_modules() if isinstance(module, AbcCausalAttention)]
    places = {
        "encoder": "leapformer.encoder",
        "decoder": "decoder.encoder.layer.0.attention",
        "cross": "crossattention",
    }
    assert len(found) == 1 and places[part] in found[0]
    assert model.get_submodule(found[0]).query.weight.std() < 0.1  # initialised
    model.save_pretrained(tmp_path)
    source, target = torch.randint(3, 50, (2, 9)), torch.randint(3, 50, (2, 5))
    inputs = {"input_ids": source, "decoder_input_ids": target}
    inputs["visible_source"] = WaitK(2).visible(torch.tensor([9, 9]), 5)
    expected = model(**inputs).logits
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**inputs).logits, expected, atol=1e-5, rtol=0)


def test_tables_hold_every_k_and_the_cost():
    scores = {str(k): {"bleu": 20.0 + k, "chrf": 50.0, "lagging": k + 0.5} for k in study.WAITS}
    scores["whole"] = {"bleu": 30.0, "chrf": 55.0}
    runs = [{"direction": "en-de", "system": name, "seed": 0, "scores": scores} for name in study.SYSTEMS]
    cost = [
        {"system": name, "length": n, "bytes": 2048, "seconds": [0.01] * 3}
        for name in study.WHOLE
        for n in range(3 if name == "softmax" else 4)
    ]
    table = study.text({"runs": runs, "cost": {"rows": cost}})
    assert "| en-de | LeaPformer | 1 | 21.0 / 50.0 | 23.0 / 50.0 | 25.0 / 50.0 | 27.0 / 50.0 | 30.0 / 55.0 |" in table
    assert table.count("2 / 10.0") == 4 * len(study.WHOLE) - 1 and "LeaPformer, cross alone" in table


@pytest.mark.slow
def test_systems_are_trained_and_scored(tmp_path, monkeypatch):
    write_parallel(tmp_path / "data" / "multi30k")
    where = ["--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs")]
    shared = {name: value for name, value in SETTINGS.items() if not name.startswith("model.")}
    shared |= {f"model.{name}": value for name, value in TINY.items()} | {"model.decoder_layers": 1}
    words = [word for name, value in shared.items() for word in (f"--{name}", str(value))]
    systems = ["--systems", "softmax", "linear", "leapformer_cross", "--directions", "en-de"]
    assert study.main(["run", *where, *systems, *words]) == 0
    monkeypatch.setattr(study, "LENGTHS", (10, 20, 40))
    monkeypatch.setattr(study, "MOST_SOFTMAX", 20)
    monkeypatch.setattr(study, "PIECE", 15)
    monkeypatch.setattr(study, "STEPS", 3)
    assert study.main(["cost", *where]) == 0
    times = (tmp_path / "runs" / "cost.json").stat().st_mtime_ns
    assert study.main(["cost", *where]) == 0 and (tmp_path / "runs" / "cost.json").stat().st_mtime_ns == times
    report = ["report", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    assert study.main(report) == 0
    for gone in ("cost.json", "train/softmax-en-de-seed0/run.json"):  # published figures stay
        (tmp_path / "runs" / gone).unlink()
    assert study.main(report) == 0
    (path,) = tmp_path.glob("simultaneous-multi30k-*.json")
    result = running.read_json(path)
    assert {run["system"] for run in result["runs"]} == {"softmax", "linear", "leapformer_cross"}
    sizes = {row["bytes"] for row in result["cost"]["rows"] if row["system"] == "leapformer"}
    assert len(sizes) == 1 and path.with_suffix(".png").is_file()
