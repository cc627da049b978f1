"""The pair of models of a conversion."""

from typing import Any, NamedTuple

from torch.nn import functional as F
from transformers import PreTrainedModel

from converting.objective import Pair
from converting.recipe import ConvertRecipe
from converting.texts import Frame
from luna_hf import FAMILIES, AbcForMaskedLM, AbcModel
from luna_hf.scripting import UserError
from luna_hf.warm_start import warm_start
from luna_hf.warm_start.sentence_folder import SentenceFolder


class Made(NamedTuple):
    """Student and teacher, and what became of the source's parameters.

    Attributes:
        new: names of the student's parameters that the source lacks.
        kept_positions: leading rows of the student's position table that are the source's, if others are new; else 0.
        report: of the warm start, in lines.
    """

    pair: Pair
    new: set[str]
    kept_positions: int
    report: list[str]


def make_pair(recipe: ConvertRecipe, sentences: SentenceFolder | None, frame: Frame) -> Made:
    """Convert the source, and read it unchanged as the teacher, both in float32, whatever it is stored in.

    Raises:
        UserError: It cannot be read or converted, a field of `model` is wrong, or an objective does not suit it.
    """
    pooling = sentences.pooling if sentences else "mean"
    objectives = {name for stage in recipe.plan() for name in stage.weights}
    words = bool(objectives & {"mlm", "kl"})
    fields = dict(recipe.model)
    family = FAMILIES[fields.pop("model_type")]
    student_class = family.masked_lm if words else family.base_model
    teacher_class = AbcForMaskedLM if words else AbcModel
    try:
        shared = {"allow_pickle": recipe.allow_pickle, "seed": recipe.seed, "dtype": "float32"}
        student, made = warm_start(student_class, recipe.teacher, **shared, **fields)
        teacher, read = warm_start(teacher_class, recipe.teacher, memory_control="full", **shared)
    except (ValueError, TypeError) as error:
        raise UserError(f"`model`: {error}") from error
    if words and any(name.startswith("lm_head") for name in read.new):
        raise UserError(f"`teacher` {recipe.teacher} has no masked-LM head. Leave `mlm` and `kl` out of the `weights`.")
    if "spans" in objectives and pooling != "mean":
        raise UserError(f"`spans` needs mean pooling, but {recipe.teacher} pools by {pooling!r}. Leave it out.")
    if recipe.longest > (longest := student.config.longest_input() or recipe.longest):
        raise UserError(
            f"`stages` have rows of {recipe.longest:,} tokens, but the model takes {longest:,}: raise `max_length`."
        )
    places = teacher.config.max_position_embeddings
    longest = min(places, sentences.longest or places) if sentences else places
    if max(recipe.teacher_longest, *recipe.teacher_windows) > longest:
        raise UserError(
            f"`teacher_longest` and `teacher_windows` may be at most {longest}, which {recipe.teacher} reads."
        )
    reads = {"reach": recipe.teacher_longest, "windows": tuple(recipe.teacher_windows)}
    pair = Pair(student.eval(), teacher.requires_grad_(False), pooling, frame=frame, **reads)
    if _longest(recipe, "attention") > pair.reach:
        raise UserError(
            f"`attention` needs rows of at most {pair.reach} tokens, which the teacher reads. Lower `lengths`."
        )
    config = student.config
    if "attention" in objectives and len(config.full_attention_layers or ()) == config.num_hidden_layers:
        raise UserError("All layers of `model` keep full attention: there is nothing to fit. Leave out `attention`.")
    is_table = config.position_embedding_type == "learned" and not config.position_period
    has_new = is_table and config.position_rows() > places
    kept = config.first_position + places if has_new else 0
    return Made(pair, set(made.new), kept, made.lines("extended", "new", "unused"))


def _longest(recipe: ConvertRecipe, objective: str) -> int:
    stages = [stage for stage in recipe.plan() if objective in stage.weights]
    return max((part.high for stage in stages for part in stage.lengths), default=0)


def groups(
    model: PreTrainedModel, new: set[str], weight_decay: float, freeze_embeddings: bool, kept_positions: int = 0
) -> list[dict[str, Any]]:
    """Groups of an optimizer: the source's parameters and the `new` ones, matrices (which decay) and vectors.

    Frozen embeddings stop needing a gradient, but for rows of the position table beyond `kept_positions`, if that is
    not 0. Each group has the key `is_new`.
    """
    found, positions = [], None
    if freeze_embeddings:
        model.base_model.embeddings.requires_grad_(False)
    if freeze_embeddings and kept_positions:
        positions = model.base_model.get_position_embeddings().weight
        positions.requires_grad_(True).register_hook(
            lambda grad: F.pad(grad[kept_positions:], (0, 0, kept_positions, 0))
        )
        new = new | {name for name, parameter in model.named_parameters() if parameter is positions}
    for is_new in (False, True):
        own = [p for name, p in model.named_parameters() if p.requires_grad and (name in new) == is_new]
        for decay, parameters in (
            (weight_decay, [p for p in own if p.ndim >= 2 and p is not positions]),
            (0.0, [p for p in own if p.ndim < 2 or p is positions]),
        ):
            if parameters:
                found.append({"params": parameters, "weight_decay": decay, "is_new": is_new})
    return found
