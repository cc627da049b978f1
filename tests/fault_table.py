"""The commands of test_faults.py: a row for each, with inputs that make a run of a second.

A new command in `training/` or `conversion/` needs a row here, and nothing else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT, SENTENCES, tiny_causal_model, tiny_tokenizer
from tiny_fairseq import write_tiny
from tiny_finetuning import checkpoint, command, csqa_rows, glue_folder, race_rows, write_split
from tiny_training import CAUSAL, DEMO, arguments, write_corpus
from tiny_translation import arguments as translation_arguments
from tiny_translation import pairs, write_checkpoint

OUT = Path("disk/out")


@dataclass(frozen=True)
class Row:
    """A command.

    Attributes:
        module: its name, without `.py`.
        make: writes its inputs into the folder `inputs`.
        words: its command line, with paths relative to the folder of the case.
        changes: a data file that is changed between a kill and the next run, and the words that accept the change; None
            for a command that keeps nothing between runs.
        models: folders of models among the inputs.
        checkpoints: pattern of its checkpoints below `disk`; empty for a command without any.
        last: pattern of the change of a file before which it has two whole checkpoints and nothing of a third.
    """

    module: str
    make: Callable[[Path], object]
    words: list[str]
    models: tuple[str, ...] = ()
    changes: tuple[str, list[str]] | None = None
    checkpoints: str = ""
    last: str = ""


# ---- pretraining ----

STEPS = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "log_steps": 1, "save_total_limit": 2}
STEPS |= {"model__hidden_dropout_prob": 0.1, "overwrite_output_dir": "false", "data": "inputs/corpus"}


def _corpus(inputs: Path) -> None:
    write_corpus(inputs / "corpus")


def _teacher(inputs: Path) -> None:
    _corpus(inputs)
    checkpoint(inputs / "teacher", "roberta")


def _pretraining(module: str, make: Callable[[Path], object], words: list[str], *models: str) -> Row:
    changes = ("inputs/corpus/a.txt", ["--accept_changed_data", "true"])
    return Row(module, make, words, models, changes, "out/checkpoints/step-*", r"os.rename out/checkpoints/step-0+6")


MINILM = ROOT / "training" / "recipes" / "convert" / "minilm.yaml"
CONVERT = {
    **{"teacher": "inputs/teacher", "data": "inputs/corpus", "output_dir": OUT, "cache_dir": OUT.parent / "cache"},
    **{"model": "{model_type: abc_memory, memory_size: 4, local_window: 4}", "held_out_fraction": 0.2},
    **{"sentences": "[]", "sentence_share": 0.0},
    "stages": "[{name: all, share: 1, lengths: [[8, 32, 1]], weights: {hidden: 1.0, mlm: 1.0}, "
    "learning_rate: 1e-3, new_learning_rate: 1e-2}]",
    **{"max_steps": 6, "save_steps": 2, "eval_steps": 2, "log_steps": 1},
    **{
        "pass_tokens": 64,
        "global_batch_tokens": 128,
        "teacher_longest": 32,
        "teacher_windows": [16],
        "eval_tokens": 64,
    },
}
PRETRAINING = {
    "pretrain_mlm": _pretraining("pretrain_mlm", _corpus, arguments(DEMO, OUT, **STEPS)),
    "pretrain_mlm, streaming": _pretraining("pretrain_mlm", _corpus, arguments(DEMO, OUT, **STEPS, streaming="true")),
    "pretrain_clm": _pretraining(
        "pretrain_clm", _corpus, arguments(CAUSAL[0], OUT, **STEPS, sample_tokens=4, prompts="['the token']")
    ),
    "convert": _pretraining(
        "convert",
        _teacher,
        [str(MINILM), *(word for name, value in CONVERT.items() for word in (f"--{name}", str(value)))],
        "teacher",
    ),
}

# ---- finetuning ----

TRAINERS_LAST = r"os.mkdir \S*checkpoint-18$"
DROPOUT = {"hidden_dropout_prob": 0.1}


def _glue(inputs: Path) -> None:
    checkpoint(inputs / "model", **DROPOUT)
    glue_folder(inputs / "data", suffix=".jsonl")


def _race(inputs: Path) -> None:
    checkpoint(inputs / "model", **DROPOUT)
    for level in ("middle", "high"):
        for seed, (split, count) in enumerate({"train": 24, "validation": 8, "test": 8}.items()):
            write_split(inputs / "data" / level / f"{split}.jsonl", race_rows(count, level, seed))


def _csqa(inputs: Path) -> None:
    checkpoint(inputs / "model", **DROPOUT)
    for seed, (split, count) in enumerate({"train": 48, "validation": 16, "test": 16}.items()):
        write_split(inputs / "data" / f"{split}.jsonl", csqa_rows(count, seed, answers=split != "test"))


def _finetuning(module: str, make: Callable[[Path], object], train: str, **options: object) -> Row:
    words = command("inputs/model", OUT, dataset_name="inputs/data", num_train_epochs=3, **options)
    changes = (f"inputs/data/{train}.jsonl", ["--accept_changed_data"])
    return Row(module, make, words, ("model",), changes, "out/**/checkpoint-*", TRAINERS_LAST)


SWEEP = {"sweep": True, "sweep_batch_sizes": [8, 16], "sweep_learning_rates": 3e-3, "seeds": 1}
FINETUNING = {
    "finetune_glue": _finetuning("finetune_glue", _glue, "train", task_name="sst2"),
    "finetune_glue, sweep": _finetuning("finetune_glue", _glue, "train", task_name="sst2", **SWEEP),
    "finetune_race": _finetuning("finetune_race", _race, "middle/train"),
    "finetune_csqa": _finetuning("finetune_csqa", _csqa, "train"),
}


def _stsb(inputs: Path) -> None:
    checkpoint(inputs / "model", **DROPOUT)
    glue_folder(inputs / "data", "stsb", suffix=".jsonl")


EMBED = {"model_name_or_path": "inputs/model", "dataset_name": "inputs/data", "output_dir": OUT, "use_cpu": True}
EMBED |= {"num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "disable_tqdm": True}
EMBEDDINGS = {
    "finetune_embeddings": Row(
        "finetune_embeddings",
        _stsb,
        [word for name, value in EMBED.items() for word in (f"--{name}", str(value))],
        ("model",),
        ("inputs/data/train.jsonl", ["--accept_changed_data", "true"]),
        "out/checkpoint-*",
        TRAINERS_LAST,
    )
}

# ---- translation ----


def _parallel(inputs: Path) -> None:
    for seed, (split, number) in enumerate({"train": 80, "validation": 8, "test": 8}.items()):
        rows = [{"en": f"token {one}", "de": f"zeichen {other}"} for one, other in pairs(number, seed)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (inputs / "data").mkdir(parents=True, exist_ok=True)
        (inputs / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")


TRANSLATION = {
    "train_translation": Row(
        "train_translation",
        _parallel,
        translation_arguments("inputs/data", OUT, model__hidden_dropout_prob=0.1),
        (),
        ("inputs/data/train.jsonl", ["--accept_changed_data", "true"]),
        "out/checkpoints/step-*",
        r"os.rename out/checkpoints/step-0+6",
    )
}

# ---- evaluation and conversion ----


def _causal(inputs: Path) -> None:
    tiny_causal_model(vocab_size=400).save_pretrained(inputs / "model")
    tiny_tokenizer().save_pretrained(inputs / "model")
    (inputs / "text.txt").write_text("\n\n".join(SENTENCES * 8))


def _roberta(inputs: Path) -> None:
    checkpoint(inputs / "model", "roberta")


def _both(inputs: Path) -> None:
    import fairseq_luna

    source = write_tiny(inputs / "theirs")
    assert fairseq_luna.main([str(source), str(inputs / "model")]) == 0


LENGTHS = "--lengths 16 64 --tokens 128 --part 16 --stride 4 --rows 32"
SCORE = ["inputs/model", "--data", "inputs/text.txt", "--output", "disk/out", *LENGTHS.split()]
EVALUATION = {"evaluate_perplexity": Row("evaluate_perplexity", _causal, SCORE, ("model",))}
CONVERSION = {
    "fairseq_luna": Row(
        "fairseq_luna", lambda inputs: write_tiny(inputs / "model"), ["inputs/model", "disk/out"], ("model",)
    ),
    "fairseq_luna, translation": Row(
        "fairseq_luna",
        lambda inputs: write_checkpoint(inputs / "model", "post_tied_sinusoidal"),
        ["inputs/model", "disk/out"],
        ("model",),
    ),
    "roberta_to_luna": Row(
        "roberta_to_luna", _roberta, ["inputs/model", "disk/out", "--projection-length", "8"], ("model",)
    ),
    "roberta_to_abc": Row("roberta_to_abc", _roberta, ["inputs/model", "disk/out", "--memory-size", "8"], ("model",)),
    "luna_to_fairseq": Row("luna_to_fairseq", _both, ["inputs/model", "disk/out"], ("model",)),
    "verify": Row("verify", _both, ["inputs/model", "inputs/theirs"], ("model", "theirs")),
}

ROWS = {**PRETRAINING, **FINETUNING, **EMBEDDINGS, **TRANSLATION, **EVALUATION, **CONVERSION}
