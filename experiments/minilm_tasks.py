"""The tasks of `minilm.py` as plain texts, from a folder of public data sets; `minilm_mteb.py` scores them.

Every task is a dict with a part for each length of its documents, or with one part. Nothing here needs mteb.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import parquet

MEDICAL, HALF, PIECES, PAPERS = 3000, 6000, 100, 200
# LongEmbed's lengths have 100 documents each; some suffice for a check.
LENGTHS = (256, 1024, 4096)
# Where the answer stands in a document, by the share of the text before it.
PLACES = ("first third", "second third", "last third")


@dataclass(frozen=True)
class Pairs:
    """Pairs of sentences, scored by people."""

    first: list[str]
    second: list[str]
    scores: list[float]


@dataclass(frozen=True)
class Labels:
    """Texts and their classes, to train a classifier of vectors and to test it."""

    train: tuple[list[str], list[int]]
    test: tuple[list[str], list[int]]


@dataclass(frozen=True)
class Search:
    """Queries, documents and which documents answer a query, by their ids.

    `places` groups queries by where the answer stands in its document.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    answers: dict[str, list[str]]
    places: dict[str, str] = field(default_factory=dict)


Parts = dict[str, Pairs | Labels | Search]


def read(data: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file."""
    return parquet.read_table(data / f"{name}.parquet").to_pylist()


# ---- short ----


def sentence_pairs(data: Path, *names: str, score: str = "score") -> Parts:
    """Sentences of one file or several, with the people's score."""
    rows = [row for name in names for row in read(data, name)]
    columns = ([row[column] for row in rows] for column in ("sentence1", "sentence2", score))
    return {"test": Pairs(*columns)}


def classes(data: Path, folder: str, test: str = "test", label: str = "label") -> Parts:
    """Texts of a training and a test split; those whose class is to have none are left out."""
    splits = (
        [row for row in read(data, f"{folder}/{name}") if row.get("label_text") != "oos"] for name in ("train", test)
    )
    return {"test": Labels(*(([row["text"] for row in rows], [row[label] for row in rows]) for rows in splits))}


def beir(data: Path, folder: str, titles: bool, most: int | None = None) -> Parts:
    """A data set in BEIR's form, its test queries. Of the documents, `most`: the right ones, and others evenly."""
    answers: dict[str, list[str]] = {}
    for row in read(data, f"{folder}/qrels_test"):
        answers.setdefault(row["query-id"], []).append(row["corpus-id"])
    rows = {row["_id"]: row for row in read(data, f"{folder}/corpus")}
    if most is not None:
        right = {name for names in answers.values() for name in names}
        others = [name for name in rows if name not in right]
        kept = right.union(others[:: max(1, len(others) // (most - len(right)))])
        rows = {name: row for name, row in rows.items() if name in kept}
    documents = {name: f"{row['title']} {row['text']}".strip() if titles else row["text"] for name, row in rows.items()}
    queries = {row["_id"]: row["text"] for row in read(data, f"{folder}/queries") if row["_id"] in answers}
    return {"test": Search(queries, documents, answers)}


# ---- long ----


def numbered(texts: Sequence[str], letter: str) -> dict[str, str]:
    """Texts with an id each."""
    return {f"{letter}{number}": text for number, text in enumerate(texts)}


def articles_of_questions(data: Path) -> Parts:
    """RACE, high school, test: a question with its answer finds the article."""
    rows = read(data, "race/high/test")
    documents = numbered(list(dict.fromkeys(row["article"] for row in rows)), "d")
    names = {text: name for name, text in documents.items()}
    queries = numbered([f"{row['question']} {row['options'][ord(row['answer']) - 65]}" for row in rows], "q")
    return {
        "test": Search(queries, documents, dict(zip(queries, ([names[row["article"]]] for row in rows), strict=True)))
    }


def halves(data: Path) -> Parts:
    """Novels: 6,000 characters of a piece, about 1,300 tokens, find the next 6,000."""
    size, pieces = HALF, [row["text"] for row in read(data, "novels/validation") if len(row["text"]) >= 2 * HALF]
    texts = [pieces[len(pieces) * number // PIECES] for number in range(min(PIECES, len(pieces)))]
    queries, documents = (
        numbered([text[at : at + size] for text in texts], letter) for at, letter in ((0, "q"), (size, "d"))
    )
    return {"test": Search(queries, documents, {f"q{number}": [f"d{number}"] for number in range(len(texts))})}


def meetings(data: Path) -> Parts:
    """QMSum, as in LongEmbed: a summary finds the meeting."""
    documents = {row["doc_id"]: row["text"] for row in read(data, "qmsum/corpus")}
    queries = {row["qid"]: row["text"] for row in read(data, "qmsum/queries")}
    return {"test": Search(queries, documents, {row["qid"]: [row["doc_id"]] for row in read(data, "qmsum/qrels")})}


def papers(data: Path) -> Parts:
    """ScisummNet: an abstract finds the body of its paper."""
    rows = [row for name in ("validation", "train") for row in read(data, f"scisummnet/{name}")][:PAPERS]
    queries, documents = (
        numbered([row[column] for row in rows], letter) for column, letter in (("abstract", "q"), ("document", "d"))
    )
    return {"test": Search(queries, documents, {f"q{number}": [f"d{number}"] for number in range(len(rows))})}


def hidden(data: Path, folder: str) -> Parts:
    """A question finds the text in which a sentence was hidden, among texts of equal length.

    Ids of texts that no question asks for come last, because mteb ranks equal scores by falling ids: a tie counts
    against the model.
    """
    parts: Parts = {}
    answers = {row["qid"]: row["doc_id"] for row in read(data, f"{folder}/qrels")}
    asked, texts = set(answers.values()), read(data, f"{folder}/corpus")
    for length in LENGTHS:
        own = {
            f"{'ab'[row['doc_id'] not in asked]}-{row['doc_id']}": row["text"]
            for row in texts
            if row["context_length"] == length
        }
        rows = [row for row in read(data, f"{folder}/queries") if row["context_length"] == length]
        queries = {row["qid"]: row["text"] for row in rows}
        right = {name: [f"a-{answers[name]}"] for name in queries}
        places = {row["qid"]: place(own[right[row["qid"]][0]], row["answer"]) for row in rows}
        parts[str(length)] = Search(queries, own, right, places)
    return parts


def place(text: str, answer: str) -> str:
    """The third of a text in which an answer starts.

    Raises:
        ValueError: The text does not hold it.
    """
    return PLACES[3 * text.index(answer) // len(text)]


SHORT: dict[str, Callable[[Path], Parts]] = {
    "stsb": lambda data: sentence_pairs(data, "glue/stsb/validation", score="label"),
    "sts12": lambda data: sentence_pairs(data, "sts12/test"),
    "sts13": lambda data: sentence_pairs(data, "sts13/test"),
    "sts14": lambda data: sentence_pairs(data, "sts14/test"),
    "sick": lambda data: sentence_pairs(data, "sick/train", "sick/validation"),
    "banking77": lambda data: classes(data, "banking77"),
    "clinc150": lambda data: classes(data, "clinc150", test="validation"),
    "trec": lambda data: classes(data, "trec", label="coarse_label"),
    "scifact": lambda data: beir(data, "scifact", titles=True),
    "medquad": lambda data: beir(data, "medquad", titles=False, most=MEDICAL),
}
LONG: dict[str, Callable[[Path], Parts]] = {
    "race": articles_of_questions,
    "novels": halves,
    "papers": papers,
    "qmsum": meetings,
    "needle": lambda data: hidden(data, "needle"),
    "passkey": lambda data: hidden(data, "passkey"),
}
# What a table calls a task and its score.
TITLES = {
    **{"stsb": "STS-B", "sts12": "STS12", "sts13": "STS13", "sts14": "STS14", "sick": "SICK"},
    **{"banking77": "Banking77", "clinc150": "CLINC150", "trec": "TREC", "scifact": "SciFact", "medquad": "MedQuAD"},
    **{
        "race": "RACE",
        "novels": "novels",
        "papers": "papers",
        "qmsum": "QMSum",
        "needle": "needle",
        "passkey": "passkey",
    },
}
# Tasks scored by how often the right document comes first, as in LongEmbed; other searches by nDCG@10.
FIRST = ("needle", "passkey")
