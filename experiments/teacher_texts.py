"""Texts for the conversion of a sentence encoder: documents and sentences, as JSON lines.

    python experiments/teacher_texts.py DATA outputs/texts

DATA holds the public data sets that docs/results/README.md names, in folders of parquet files. What the study scores
is left out: validation and test splits, and sets that share rows with STS12 to STS16.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyarrow import parquet

from luna_hf.scripting import Parser, run_script, writing

# Files and their text columns.
DOCUMENTS = {
    "enwiki": [("enwiki/train", ["text"])],
    "novels": [("novels/train", ["text"])],
    "reviews": [("imdb/train", ["text"]), ("imdb/unsupervised", ["text"])],
    "race": [("race/high/train", ["article"]), ("race/middle/train", ["article"])],
    "squad": [("squad/train", ["context"])],
}
SENTENCES = [
    ("glue/sst2/train", ["sentence"]),
    ("glue/cola/train", ["sentence"]),
    ("glue/qnli/train", ["question", "sentence"]),
    ("glue/qqp/train", ["question1", "question2"]),
    ("glue/mnli/train", ["premise", "hypothesis"]),
    ("glue/rte/train", ["sentence1", "sentence2"]),
    ("banking77/train", ["text"]),
    ("clinc150/train", ["text"]),
    ("trec/train", ["text"]),
]


def read(data: Path, files: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    """Different texts of columns of files."""
    seen = set()
    for name, columns in files:
        for column in parquet.read_table(data / f"{name}.parquet", columns=columns).columns:
            for text in column.to_pylist():
                if text and text not in seen:
                    seen.add(text)
                    yield text


def medical(data: Path) -> Iterator[str]:
    """Answers of MedQuAD that no scored question asks for."""
    scored = set(parquet.read_table(data / "medquad/qrels_test.parquet")["corpus-id"].to_pylist())
    for row in parquet.read_table(data / "medquad/corpus.parquet").to_pylist():
        if row["_id"] not in scored:
            yield row["text"]


def write(data: Path, target: Path) -> None:
    """Write a folder of documents for each source, and one of sentences."""
    with writing(target) as folder:
        texts = {name: read(data, files) for name, files in DOCUMENTS.items()} | {"medquad": medical(data)}
        for name, found in {**texts, "sentences": read(data, SENTENCES)}.items():
            (folder / name).mkdir()
            lines = [json.dumps({"text": text}) + "\n" for text in found]
            (folder / name / "train.jsonl").write_text("".join(lines), encoding="utf-8")
            print(f"{name}: {len(lines):,} texts")


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit status."""

    def script() -> None:
        parser = Parser(prog="python experiments/teacher_texts.py", description=__doc__)
        parser.add_argument("data", type=Path)
        parser.add_argument("target", type=Path)
        options = parser.parse_args(words)
        write(options.data, options.target)

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
