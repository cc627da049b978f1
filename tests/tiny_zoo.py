"""A clone in miniature with a checkpoint of every kind, trained by the commands and shipped."""

import json
from pathlib import Path

import convert
import finetune_csqa
import finetune_embeddings
import pretrain_clm
import tiny_finetuning
import yaml
from catalogue import Zoo
from ship import ship
from test_converting import SELECTED, words_for
from tiny_training import CAUSAL, arguments, run, start, write_corpus

BASE = "checkpoints/tiny-luna"
SHARED = {"summary": "A tiny model. It is a test.", "data": "words", "limits": ["It knows nothing."]}
ENTRIES = {
    "tiny-luna": {"twin": "tiny-roberta"},
    "tiny-roberta": {"twin": "tiny-luna"},
    "tiny-clm": {},
    "tiny-sst2": {"base": "tiny-luna", "twin": "tiny-roberta", "task": "sst2", "datasets": ["stanfordnlp/sst2"]},
    "tiny-csqa": {"base": "tiny-luna", "task": "csqa", "datasets": ["tau/commonsense_qa"]},
    "tiny-stsb": {"base": "tiny-luna", "task": "stsb"},
    "tiny-converted": {"base": "tiny-roberta"},
}
CATALOGUE = {
    "defaults": {"language": "en", "license": "cc-by-sa-4.0"},
    "data": {"words": "Words in a random order."},
    "checkpoints": {name: {**SHARED, **entry} for name, entry in ENTRIES.items()},
}


def _row(model: str, task: str, metric: str, dataset: str, *values: float, **more: object) -> dict[str, object]:
    return {"model": model, "task": task, "metric": metric, "dataset": dataset, "split": "validation"} | {
        "values": values,
        **more,
    }


SCORES = [
    _row("tiny-luna", "sst2", "accuracy", "stanfordnlp/sst2", 0.75, 0.5, 1.0),
    _row("tiny-roberta", "sst2", "accuracy", "stanfordnlp/sst2", 0.25),
    _row("most frequent class", "sst2", "accuracy", "stanfordnlp/sst2", 0.5, baseline=True),
    _row("tiny-luna", "csqa", "accuracy", "tau/commonsense_qa", 0.2, type="multiple-choice"),
]
FINETUNED = {"num_train_epochs": 1, "max_length": None}


def make_zoo(root: Path) -> Zoo:
    """Train and ship every checkpoint of `ENTRIES`. The current folder must be `root`, as it is a clone for a user."""
    for path, content in {
        "model_cards/zoo.yaml": yaml.safe_dump(CATALOGUE),
        "experiments/results/mini-scores.json": json.dumps({"rows": SCORES}),
    }.items():
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(content)
    write_corpus(root / "texts")
    zoo, runs = Zoo(root), root / "runs"
    heads = {"model__num_attention_heads": 2}  # their size, 16, suits every kernel of a GPU
    run(runs / "luna-1", data="texts", block_size=16, **heads)
    run(runs / "luna-2", data="texts", model_name_or_path=runs / "luna-1")
    ship(zoo, "tiny-luna", [runs / "luna-1", runs / "luna-2"])
    roberta = {"model__model_type": "roberta", "model__max_position_embeddings": 66}
    run(runs / "roberta", data="texts", tokenizer=BASE, train_tokenizer=False, **roberta, **heads)
    ship(zoo, "tiny-roberta", [runs / "roberta"])
    (root / "passages").mkdir()
    words = words_for(
        root / "passages", "checkpoints/tiny-roberta", SELECTED, {"hidden": 1.0, "mlm": 1.0, "pooled": 1.0}
    )
    assert convert.main([*words, "--output_dir", str(runs / "converted")]) == 0
    ship(zoo, "tiny-converted", [runs / "converted"])
    causal = arguments(CAUSAL[0], runs / "clm", data="texts", prompts="['the token']", sample_tokens=2, **heads)
    assert start(pretrain_clm, causal) == 0
    ship(zoo, "tiny-clm", [runs / "clm"])
    tiny_finetuning.glue_folder(root / "glue")
    task = {"dataset_name": "glue", "task_name": "sst2", "seeds": [0, 1]}
    tiny_finetuning.run(BASE, runs / "sst2", **{**FINETUNED, **task})
    ship(zoo, "tiny-sst2", [runs / "sst2"])
    for split, seed in (("train", 0), ("validation", 1)):
        tiny_finetuning.write_split(root / "csqa" / f"{split}.parquet", tiny_finetuning.csqa_rows(16, seed))
    tiny_finetuning.run(BASE, runs / "csqa", finetune_csqa, dataset_name="csqa", **FINETUNED)
    ship(zoo, "tiny-csqa", [runs / "csqa"])
    tiny_finetuning.glue_folder(root / "glue" / "stsb", "stsb", rows=64)
    words = ["--model_name_or_path", BASE, "--dataset_name", "glue", "--output_dir", str(runs / "stsb")]
    assert finetune_embeddings.main([*words, "--num_train_epochs", "2", "--use_cpu", "--logging_steps", "1"]) == 0
    ship(zoo, "tiny-stsb", [runs / "stsb"])
    return zoo
