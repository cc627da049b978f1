"""What the tests of corpora and rows share: a recipe's settings, and small files of every kind."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from data.corpus import open_corpus
from data.prepare import PreparedText, masked_rows, prepare_text
from torch import Tensor

TEXTS = [f"text {number}: the packed sequence reads {number * 37} tokens in turn." for number in range(23)]


def settings(folder: Path, **changes: Any) -> SimpleNamespace:
    """The keys of a recipe that concern text."""
    values = {
        "data": "cpython",
        "text_column": "text",
        "validation": "",
        "held_out_fraction": 0.2,
        "streaming": False,
        "cache_dir": str(folder / "cache"),
        "eval_blocks": 1000,
        "block_size": 16,
        "mask_probability": 0.3,
        "whole_word_masking": False,
        "separate_documents": False,
        "seed": 0,
    }
    return SimpleNamespace(**{**values, **changes})


def write_texts(path: Path, texts: list[str] = TEXTS, column: str = "text") -> Path:
    """A file of the kind given by its suffix; tables have a second column `number`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"number": number, column: text} for number, text in enumerate(texts)]
    if path.suffix == ".txt":
        path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["number", column])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        table = pyarrow.table({"number": list(range(len(texts))), column: pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=5)
    return path


def prepared(folder: Path, tokenizer: Any, index: int = 0, processes: int = 1, **changes: Any) -> PreparedText:
    """The text of a recipe, as the process with this index sees it."""
    recipe = settings(folder, **changes)
    process = SimpleNamespace(is_local_main_process=index == 0, process_index=index, num_processes=processes)
    process.wait_for_everyone = lambda: None
    row_format = masked_rows(recipe, tokenizer)
    return prepare_text(recipe, open_corpus(recipe), tokenizer, process, row_format)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two batches are equal."""
    return all(torch.equal(first[name], second[name]) for name in ("input_ids", "attention_mask", "labels"))
