"""The card of a translation model."""

from typing import Any

from common import cards
from engine.card import PLOT, run_fields
from huggingface_hub import EvalResult

from luna_hf.markdown import Markdown, bullets, code, quoted, table
from luna_hf.scripting import portable
from translation.recipe import TranslationRecipe
from translation.scores import METRICS


def make_card(recipe: TranslationRecipe, figures: dict[str, Any]) -> str:
    """Fill `model_cards/translation.md` from what `metrics.json` holds."""
    splits = [name for name in ("validation", "test") if name in figures]
    names, translates = METRICS[recipe.task], recipe.task == "translation"
    results = []
    for split in splits:
        dataset = {"dataset_type": "text", "dataset_name": portable(recipe.data), "dataset_split": split}
        for metric, name in names.items():
            value = round(figures[split][metric]["score"], 2)
            results.append(EvalResult(recipe.task, metric_type=metric, metric_name=name, metric_value=value, **dataset))
    metadata = cards.metadata(
        name=recipe.model_name,
        model_type=figures["model_type"],
        base_model="",
        tags=[figures["model_type"], recipe.task],
        results=results,
        language=[recipe.source_language, recipe.target_language] if translates else [],
        license=recipe.license,
        pipeline_tag=recipe.task,
        datasets=[recipe.data] if "/" in recipe.data and cards.on_hub(recipe.data) else [],
    )
    scores = [
        [split, f"{figures[split]['pairs']:,}", *(f"{figures[split][metric]['score']:.2f}" for metric in names)]
        for split in splits
    ]
    samples = [[code(row[part]) for part in row] for row in figures[splits[-1]]["samples"]]
    averaged = figures["averaged_checkpoints"]
    return cards.fill(
        "translation.md",
        figures["model_type"],
        metadata,
        **run_fields(recipe, figures, PLOT),
        does="Translates" if translates else "Summarizes texts,",
        by="sacreBLEU" if translates else "rouge-score",
        made="translates" if translates else "summarizes",
        source=code(recipe.source_language),
        target=code(recipe.target_language),
        search=f"Beam search with {recipe.num_beams} beams" if recipe.num_beams > 1 else "Greedy search",
        scores=table(["split", "pairs", *names.values()], scores),
        start=_start(recipe),
        simultaneous=_simultaneous(splits[-1], figures[splits[-1]]),
        streaming=_streaming(recipe),
        read=_read(recipe),
        signatures=bullets(f"{names[m]}: `{figures[splits[0]][m]['signature']}`" for m in names),
        samples=table(["source", "translation" if translates else "summary", "reference"], samples),
        loss=f"{figures['held_out_loss']:.3f}",
        unigram_loss=f"{figures['unigram_loss']:.3f}",
        pairs=f"{figures['training_pairs']:,}",
        data=code(portable(recipe.data)),
        tokenizer=_tokenizer(recipe, f"{figures['vocabulary']:,} tokens"),
        steps=f"{recipe.max_steps:,} of at most {recipe.accumulation * recipe.batch_tokens:,} tokens a side",
        averaged=f"the mean of the last {averaged} checkpoints" if averaged > 1 else "the last checkpoint",
    )


def _start(recipe: TranslationRecipe) -> Markdown:
    if recipe.initial_encoder:
        return Markdown(f"with the encoder of {code(portable(recipe.initial_encoder))} and a new decoder")
    if not recipe.initial_weights:
        return Markdown("from scratch")
    return Markdown(f"from the weights of {code(portable(recipe.initial_weights))}")


def _tokenizer(recipe: TranslationRecipe, size: str) -> str:
    if given := recipe.tokenizer or recipe.initial_weights or recipe.initial_encoder:
        return Markdown(f"Both sides are split by the tokenizer of {code(portable(given))}, with {size}.")
    return f"Both sides are split by one byte-level BPE with {size}, trained on both sides of the training split."


def _read(recipe: TranslationRecipe) -> str:
    """How much of its source each token of the held-out loss has read."""
    if not recipe.wait_k:
        return ""
    first = recipe.wait_k[0]
    return f", with {f'k = {first}' if first else 'the source read whole'} (the first value of `wait_k`),"


def _streaming(recipe: TranslationRecipe) -> Markdown:
    """An example of translating while reading, at the first k that waits."""
    k = next(filter(None, recipe.wait_k), None)
    filled = cards.fill_card("streaming.md", quoted_name=quoted(recipe.model_name), k=k)
    return Markdown(f"{filled}\n" if k else "")


def _simultaneous(split: str, figures: dict[str, Any]) -> Markdown:
    """Quality and latency at each k, of a model that translates while it reads."""
    found = figures.get("simultaneous")
    if not found:
        return Markdown("")
    latencies = {
        "AL": "average_lagging",
        "LAAL": "length_adaptive_average_lagging",
        "DAL": "differentiable_average_lagging",
    }
    rows = [
        [
            k,
            *(f"{own[name]['score']:.2f}" for name in ("bleu", "chrf")),
            *(f"{own[name]:.2f}" for name in latencies.values()),
        ]
        for k, own in found.items()
    ]
    shown = table(["k", "BLEU", "chrF", *latencies], rows)
    return Markdown(
        f"Simultaneous translation of the split {split} by wait-k, with greedy search; latencies in tokens of the "
        f"source, with the end token:\n\n{shown}\n\n"
    )
