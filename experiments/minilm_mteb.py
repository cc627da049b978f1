"""The tasks of `minilm_tasks.py` as tasks of mteb, whose evaluators score them; other names are mteb's own tasks.

The names of a benchmark, such as "MTEB(eng, v2)" or "LongEmbed", stand for all its tasks. mteb downloads them.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset, DatasetDict, disable_progress_bars
from minilm_contenders import Bm25, Contender, similarity
from minilm_tasks import FIRST, LONG, SHORT, Labels, Pairs, Parts, Search
from mteb.abstasks import AbsTask, AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.model_meta import ModelMeta
from mteb.types import PromptType
from torch import Tensor

from luna_hf.scripting import UserError


class VectorModel:
    """A contender as mteb's `EncoderProtocol`."""

    def __init__(self, name: str, contender: Contender) -> None:
        self.contender, self.mteb_model_meta = contender, _meta(name)

    def encode(
        self, inputs: Iterable[dict[str, Any]], *, prompt_type: PromptType | None = None, **_: Any
    ) -> Tensor | list[Tensor]:
        """Vectors of batches of texts; of a list, mteb hands all to `similarity`."""
        texts = [text for batch in inputs for text in batch["text"]]
        return self.contender.embed(texts, prompt_type == PromptType.query)

    def similarity(self, embeddings1: Tensor, embeddings2: Tensor | list[Tensor]) -> Tensor:
        """Cosines of all pairs, rounded: equal texts in one batch may differ in the last bit, and would not be tied."""
        return similarity(embeddings1, embeddings2).round(decimals=5)

    def similarity_pairwise(self, embeddings1: Tensor, embeddings2: Tensor) -> Tensor:
        """Cosines row by row."""
        return (embeddings1 * embeddings2).sum(-1)


class WordModel:
    """BM25 as mteb's `SearchProtocol`."""

    def __init__(self) -> None:
        self.mteb_model_meta = _meta("bm25")

    def index(self, corpus: Dataset, **_: Any) -> None:
        """Count the words of documents."""
        self.names = list(corpus["id"])
        self.counted = Bm25(list(corpus["text"]))

    def search(self, queries: Dataset, *, top_k: int, **_: Any) -> dict[str, dict[str, float]]:
        """Scores of the best documents of each query."""
        found = {}
        for name, scores in zip(queries["id"], self.counted.scores(list(queries["text"])), strict=True):
            best = scores.argsort()[::-1][:top_k]
            found[name] = {self.names[place]: float(scores[place]) for place in best}
        return found


def _meta(name: str) -> ModelMeta:
    return ModelMeta.create_empty({"name": f"local/{name}", "revision": "none"})


class Placed(AbsTaskRetrieval):
    """A search that also scores groups of queries."""

    places: dict[str, str]

    def task_specific_scores(self, scores: dict[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        """The mean of the main score in each group."""
        groups: dict[str, list[float]] = {}
        measure = self.metadata.main_score.replace("ndcg_at_", "ndcg_cut_")
        for name, place in self.places.items():
            if name in scores:
                groups.setdefault(place, []).append(scores[name][measure])
        return {f"place {place}": sum(own) / len(own) for place, own in groups.items()}


def local_task(name: str, parts: Parts) -> AbsTask:
    """A task of texts at hand."""
    first = next(iter(parts.values()))
    base, kind, score = {
        Pairs: (AbsTaskSTS, "STS", "cosine_spearman"),
        Labels: (AbsTaskClassification, "Classification", "accuracy"),
        Search: (Placed, "Retrieval", "ndcg_at_1" if name in FIRST else "ndcg_at_10"),
    }[type(first)]
    metadata = TaskMetadata(
        **{"name": name, "description": name, "type": kind, "main_score": score, "eval_langs": ["eng-Latn"]},
        **{"dataset": {"path": "local", "revision": "none"}, "eval_splits": list(parts)},
    )
    found = type(name, (base,), {"metadata": metadata})()
    if isinstance(first, Search):
        found.dataset = {"default": {split: _searched(part) for split, part in parts.items()}}
        found.places = {query: place for part in parts.values() for query, place in part.places.items()}
    elif isinstance(first, Labels):
        found.dataset = DatasetDict(
            {
                split: Dataset.from_dict(dict(zip(("text", "label"), getattr(first, split), strict=True)))
                for split in ("train", "test")
            }
        )
    else:
        columns = {"sentence1": first.first, "sentence2": first.second, "score": first.scores}
        found.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
    found.data_loaded = True
    return found


def _searched(part: Search) -> dict[str, Any]:
    tables = ({"id": list(texts), "text": list(texts.values())} for texts in (part.queries, part.documents))
    queries, corpus = map(Dataset.from_dict, tables)
    relevant = {query: dict.fromkeys(names, 1) for query, names in part.answers.items()}
    return {"queries": queries, "corpus": corpus, "relevant_docs": relevant, "top_ranked": None}


def find_tasks(name: str, data: Path | None) -> list[AbsTask]:
    """The tasks of a name: one of ours, of mteb, or of a benchmark of mteb.

    Raises:
        UserError: There is none, or one of ours without a folder of data.
    """
    if read := {**SHORT, **LONG}.get(name):
        if data is None:
            raise UserError(f"The task {name} needs --data, the folder with the tasks.")
        return [local_task(name, read(data))]
    try:
        return [mteb.get_task(name)]
    except KeyError:
        pass
    try:
        return list(mteb.get_benchmark(name).tasks)
    except KeyError as error:
        raise UserError(
            f"There is no task {name}. Ours are {', '.join((*SHORT, *LONG))}; others are mteb's."
        ) from error


def score(model: VectorModel | WordModel, task: AbsTask) -> dict[str, Any]:
    """The main score x 100, by split if there are several, and by place.

    For classes also its standard error over the samples of training rows that mteb draws.
    """
    disable_progress_bars()
    result = mteb.evaluate(model, task, cache=None, co2_tracker=False, show_progress_bar=False).task_results[0]
    entries = {split: own[0] for split, own in result.scores.items()}
    places: dict[str, dict[str, float]] = {
        split: {key.removeprefix("place "): _percent(own[key]) for key in own if key.startswith("place ")}
        for split, own in entries.items()
    }
    found: dict[str, Any] = {"score": _percent(result.get_score())}
    if len(entries) > 1:
        found["splits"] = {split: _percent(own["main_score"]) for split, own in entries.items()}
    if rounds := [one["accuracy"] for own in entries.values() for one in own.get("scores_per_experiment", ())]:
        found["error"] = _percent(statistics.stdev(rounds) / len(rounds) ** 0.5)
    return found | ({"places": places} if any(places.values()) else {})


def _percent(value: float) -> float:
    return round(100 * float(value), 2)
