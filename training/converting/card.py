"""The card of a trained conversion."""

from typing import Any

from common import cards
from engine.card import run_fields
from transformers import PreTrainedConfig

from converting.recipe import ConvertRecipe
from luna_hf.convert.card import KINDS, full_layers, usage
from luna_hf.convert.files import source_card
from luna_hf.markdown import code, table
from luna_hf.scripting import portable

_COLUMNS = {"cosine": "cosine", "slots_off": "without slots", "window_off": "without window"}


def make_card(recipe: ConvertRecipe, config: PreTrainedConfig, figures: dict[str, Any], plot: str) -> str:
    """Fill `model_cards/trained_conversion.md` from a conversion's config and what `metrics.json` holds."""
    library, task, tags = KINDS[figures["kind"]]
    known, full = source_card(recipe.teacher), full_layers(config)
    metadata = cards.metadata(
        name=recipe.model_name,
        model_type=figures["model_type"],
        base_model=recipe.teacher,
        tags=tags,
        results=[],
        library=library,
        language=recipe.language or known.language,
        license=recipe.license or known.license,
        pipeline_tag=task,
    )
    columns = {name: title for name, title in _COLUMNS.items() if name in figures}
    rows = [[f"{int(length):,}", *(f"{figures[name][length]:.4f}" for name in columns)] for length in figures["cosine"]]
    return cards.fill(
        "trained_conversion.md",
        figures["model_type"],
        metadata,
        **run_fields(recipe, figures, plot),
        source=code(portable(recipe.teacher)),
        longest=f"{figures['longest_input']:,}",
        time="" if full else " in linear time",
        layers=f" Softmax attention remains in {full}, in quadratic time." if full else "",
        usage=usage(figures["kind"], recipe.model_name),
        rows=f"{min(figures['rows'].values())} to {max(figures['rows'].values())}",
        reach=f"{recipe.teacher_longest:,}",
        windows=", ".join(map(str, recipe.teacher_windows)),
        table=table(["tokens", *columns.values()], rows),
        seen=f"{figures['seen_tokens']:,}",
        steps=f"{recipe.max_steps:,}",
        corpus=figures["corpus"],
    )
