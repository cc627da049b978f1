"""Convert a trained encoder: replace its attention, then train the result in stages, from one recipe.

    python training/convert_mlm.py training/recipes/convert_mlm/tiny.yaml
    python training/convert_mlm.py RECIPE.yaml --teacher FOLDER --data texts/ --output_dir outputs/mine
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/convert_mlm.py RECIPE.yaml

The converted model is written to OUTPUT_DIR-start, each stage to OUTPUT_DIR-NAME, and the last one to OUTPUT_DIR. A
stage is a run of `transfer_attention.py`, `distill_mlm.py` or `pretrain_mlm.py`; its entry in `stages` may replace keys
of the recipe. If the command is interrupted, the same command resumes the stage that was running.
"""

from common import extra  # noqa: F401

# isort: split
import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from common.options import did_you_mean, fill, parse
from engine.checkpoint import checkpoints, remove_all
from engine.loop import make_accelerator
from engine.objective import PretrainingObjective
from engine.output import on_main
from engine.pretraining import pretrain
from engine.start import choose
from objectives.distill import DistillObjective, DistillRecipe
from objectives.masked import MaskedObjective, PretrainRecipe
from objectives.transfer import TransferObjective, TransferRecipe

from luna_hf import FAMILIES
from luna_hf.scripting import (
    UserError,
    load_tokenizer,
    markdown_table,
    portable_command,
    run_script,
    write_json,
    writing,
)
from luna_hf.warm_start import warm_start

COMMANDS: dict[str, tuple[type[PretrainRecipe], type[PretrainingObjective]]] = {
    "transfer_attention": (TransferRecipe, TransferObjective),
    "distill_mlm": (DistillRecipe, DistillObjective),
    "pretrain_mlm": (PretrainRecipe, MaskedObjective),
}
# What the command decides for every stage.
_OWN = ("model_name", "output_dir", "model_name_or_path", "teacher", "max_steps", "resume", "overwrite_output_dir")
_STATE = "conversion.json"


@dataclasses.dataclass(frozen=True)
class ConvertRecipe(DistillRecipe):
    """The keys of the recipes of `convert_mlm.py`: those of `distill_mlm.py`, the conversion, and the stages."""

    convert: dict[str, Any]
    stages: list[Any]

    def __post_init__(self) -> None:
        self.require(("teacher",), bool, "the folder or Hub name of the model to convert")
        self.require(("model_name_or_path",), lambda value: not value, 'empty (""): `teacher` is what is converted')
        family = self.convert.get("model_type")
        self.require(("convert",), lambda _: family in FAMILIES, f"a section with `model_type`: {', '.join(FAMILIES)}")
        self.require(("stages",), bool, "a list of stages, see training/recipes/convert_mlm/tiny.yaml")
        self.runs()

    @property
    def start(self) -> Path:
        """The folder of the converted model before training."""
        return Path(f"{self.output_dir}-start")

    def runs(self) -> list[tuple[PretrainRecipe, type[PretrainingObjective]]]:
        """The recipe and objective of each stage.

        Raises:
            UserError: A stage has an unknown key or a wrong value, or the shares of the steps do not add up to 1.
        """
        for stage in self.stages:
            if not isinstance(stage, dict) or not {"name", "command", "share"} <= set(stage):
                raise UserError(f"`stages`: {stage!r} must be a section with `name`, `command` and `share`.")
        shares = [stage["share"] for stage in self.stages]
        if any(type(share) not in (int, float) or share <= 0 for share in shares) or abs(sum(shares) - 1) > 1e-9:
            raise UserError(f"`stages`: each `share` must be above 0 and their sum 1, but they are {shares}.")
        ends = [round(sum(shares[:number]) * self.max_steps) for number in range(len(shares) + 1)]
        before, found = self.start, []
        for stage, (first, last) in zip(self.stages, itertools.pairwise(ends), strict=True):
            is_last = len(found) == len(self.stages) - 1
            folder = self.output_dir if is_last else f"{self.output_dir}-{stage['name']}"
            own = {"output_dir": folder, "model_name_or_path": str(before), "max_steps": last - first}
            if not is_last:
                own |= {"model_name": f"{self.model_name}-{stage['name']}", "push_to_hub": False}
            found.append(self._run(stage, own))
            before = folder
        if len({recipe.output_dir for recipe, _ in found} | {str(self.start)}) <= len(found):
            raise UserError("`stages`: two stages have the same `name`, or one is called start. Rename it.")
        return found

    def _run(self, stage: dict[str, Any], own: dict[str, Any]) -> tuple[PretrainRecipe, type[PretrainingObjective]]:
        changes = {key: value for key, value in stage.items() if key not in ("name", "command", "share")}
        where = f"`stages`, {stage['name']}: "
        if stage["command"] not in COMMANDS:
            raise UserError(f"{where}unknown command {stage['command']!r}.{did_you_mean(stage['command'], COMMANDS)}")
        recipe_class, objective = COMMANDS[stage["command"]]
        known = [field.name for field in dataclasses.fields(recipe_class) if field.name not in _OWN]
        for key in changes:
            if key not in known:
                raise UserError(f"{where}`{key}` cannot be set for {stage['command']}.{did_you_mean(key, known)}")
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(recipe_class)}
        try:
            return fill(recipe_class, {**shared, **changes, **own}), objective
        except UserError as error:
            raise UserError(f"{where}{error}") from error


# ---- the start ----


def prepare(recipe: ConvertRecipe) -> None:
    """Convert the teacher, unless an earlier run of the same recipe has; check all stages before the first one.

    Raises:
        UserError: The conversion or a stage is not possible, or a folder holds another run.
    """
    folders = [Path(stage.output_dir) for stage, _ in recipe.runs()]
    state = recipe.start / _STATE
    for folder in filter(is_finished, folders):
        remove_all(folder)  # a kill may have stopped the removal of its checkpoints
    if recipe.resume and state.is_file() and not is_finished(folders[-1]):
        other = recipe.differences(read_state(state))
        if other:
            raise UserError(
                f"{recipe.start} was made with other values of {', '.join(other)}. Name another `output_dir`, restore "
                "the values, or start again (--no_resume --overwrite_output_dir)."
            )
        return
    taken = [recipe.start] * recipe.start.exists() + [folder for folder in folders if used(folder)]
    if taken and not recipe.overwrite_output_dir:
        raise UserError(
            f"{taken[-1]} holds an earlier run. Name another folder (--output_dir FOLDER), or overwrite it "
            "(--overwrite_output_dir)."
        )
    # The start goes first and comes last, so that a kill in between leaves a run that starts again.
    shutil.rmtree(recipe.start, ignore_errors=True)
    for folder in folders:
        remove_all(folder)
        (folder / "metrics.json").unlink(missing_ok=True)
    with writing(recipe.start) as unfinished:
        convert(recipe, unfinished)
        for stage, objective in recipe.runs():
            begun = dataclasses.replace(stage, model_name_or_path=str(unfinished))
            objective().check(begun)
            choose(begun, objective())
        write_json(unfinished / _STATE, dataclasses.asdict(recipe))


def convert(recipe: ConvertRecipe, folder: Path) -> None:
    """Write the converted teacher and its tokenizer.

    Raises:
        UserError: The teacher cannot be read or converted, or a field of `convert` is wrong.
    """
    tokenizer = load_tokenizer(recipe.tokenizer or recipe.teacher, required=True)
    fields = dict(recipe.convert)
    model_class = FAMILIES[fields.pop("model_type")].masked_lm
    try:
        model, made = warm_start(model_class, recipe.teacher, **fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"`convert`: {error}") from error
    print(f"Converted {recipe.teacher}.", *made.lines("new"), sep="\n")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_state(path: Path) -> dict[str, Any]:
    """The recipe of the run that has written a start.

    Raises:
        UserError: The file is damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Start again (--no_resume --overwrite_output_dir).") from error


def is_finished(folder: Path) -> bool:
    """Whether a stage has written its results."""
    return (folder / "metrics.json").is_file()


def used(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return is_finished(folder) or bool(checkpoints(folder))


# ---- the stages ----


def run(recipe: ConvertRecipe, command: str) -> int:
    """Convert, and train all stages that are not finished; `command` is the command line for the cards.

    Returns:
        The exit status: 1 if the gain of the last stage is below the recipe's `min_gain_nats`.
    """
    accelerator = make_accelerator(recipe)
    on_main(accelerator, lambda: prepare(recipe))
    rows, runs = [], recipe.runs()
    for stage, (own, objective) in zip(recipe.stages, runs, strict=True):
        folder = Path(own.output_dir)
        if not is_finished(folder):
            accelerator.print(f"\n---- {stage['name']}: {own.max_steps:,} steps of {stage['command']} ----")
            if pretrain(own, command, objective()) is None:
                return 0
        figures = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        losses = [figures.get(key) for key in ("held_out_loss", "slots_off_loss", "window_off_loss")]
        rows.append([stage["name"], own.max_steps, *("-" if loss is None else f"{loss:.3f}" for loss in losses)])
    accelerator.print("\n" + markdown_table(["stage", "steps", "held-out loss", "slots off", "window off"], rows))
    if figures["gain_nats"] >= own.min_gain_nats:
        return 0
    print(f"The gain is {figures['gain_nats']:.3f} nats, below `min_gain_nats`: train longer.", file=sys.stderr)
    return 1


def read_recipe(path: str | Path, words: Sequence[str] = ()) -> ConvertRecipe:
    """A recipe with overrides; raises the `UserError`s of `options.parse` and of `ConvertRecipe`."""
    return parse([ConvertRecipe], [str(path), *words], __doc__, command="convert_mlm", recipe="required")[0]


def main(words: Sequence[str] | None = None) -> int:
    """Run from the command line; see `run` and `run_script` for the exit status."""
    words = sys.argv[1:] if words is None else list(words)

    def script() -> int:
        (recipe,) = parse([ConvertRecipe], words, __doc__, command="convert_mlm", recipe="required")
        status = run(recipe, portable_command(["python", "training/convert_mlm.py", *words]))
        PartialState().destroy_process_group()
        return status

    stopped = "the same command resumes the stage that was running, from its last checkpoint"
    return run_script(script, stopped, clean_on_sigterm=False)


if __name__ == "__main__":
    sys.exit(main())
