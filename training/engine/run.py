"""The life of a training run, and the command line around it: from a recipe to a folder that is ready for the Hub."""

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from common.hub import push_folder, reserve_repository
from common.machine import machine
from common.models import ModelKind, model_fields
from common.options import parse
from torch.optim.lr_scheduler import LambdaLR

from engine.card import PLOT, plot_loss
from engine.checkpoint import checkpoints, load_checkpoint, read_state, remove_all, remove_unfinished, save_checkpoint
from engine.log import RunLog
from engine.loop import Loop, evaluate, switched_losses
from engine.output import changed_inputs, clear_output, find_checkpoint, held, on_main, save_model
from engine.recipe import Recipe
from engine.sharding import prepare_model
from engine.throughput import peak_flops
from luna_hf.scripting import portable_command, run_script, write_json, write_text


class Run(Loop, ABC):
    """A run of one command. Its methods are called in the order in which they stand here.

    Attributes:
        kind: of the model that a recipe describes; `None` if the recipe is no description of a new model.
        uploaded: message of the upload.
    """

    kind: ClassVar[ModelKind | None] = None
    uploaded: ClassVar[str]

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.folder = Path(recipe.output_dir)
        self.found: Path | None = None  # the checkpoint to resume from
        self.inputs: dict[str, str] = {}  # fingerprints of what the run reads

    def execute(self, command: str) -> dict[str, Any] | None:
        """Start or resume the run; `command` is the command line for the card.

        Returns:
            The content of `metrics.json`; `None` if a signal stopped the run.

        Raises:
            UserError: A mistake in the recipe, a folder or a text; where possible before anything is written.
        """
        accelerator, recipe = self.accelerator, self.recipe
        # Whatever can be wrong is checked before the folder, which may hold an earlier model, is changed.
        self.check()
        with held(accelerator, self.folder, self.repository):
            self.found = on_main(accelerator, lambda: find_checkpoint(recipe, print))
            self.read()
            repository = on_main(accelerator, self._reserve)
            self.inputs, changed = on_main(accelerator, self._open)
            self.prepare()
            self._restore(changed)
            self.announce()
            with self.stop:  # before and after training nothing can be lost, and signals have their usual effect
                last = self.train()
            figures = None if last is None else self.finish(last, command)
            if figures is None:
                accelerator.print(
                    f"Stopped by {self.stop.name or 'request'} after step {self.counters.step:,} of "
                    f"{recipe.max_steps:,}, saved in {checkpoints(self.folder)[-1]}. The same command resumes from "
                    "there."
                )
            for tracker in accelerator.trackers:  # `Accelerator.end_training` would also part the processes
                tracker.finish()
            if figures and repository and accelerator.is_main_process:
                push_folder(
                    self.folder, repository, self.uploaded, ignore=["checkpoints/**", f"{recipe.model_name}/**"]
                )
                print(f"Pushed to {repository}.")
        return figures

    # ---- the start ----

    @abstractmethod
    def check(self) -> None:
        """Check the recipe, and what it names, as far as that takes little time."""

    @abstractmethod
    def read(self) -> None:
        """Open texts and models, which finds missing and damaged ones; nothing may be written yet."""

    @abstractmethod
    def write_tokenizer(self) -> None:
        """Save the tokenizer in the output folder of a run that starts."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """The content of what the run reads again when it resumes, by name."""

    @abstractmethod
    def prepare(self) -> None:
        """Make or load the model, and set the attributes of `Loop`, but for `log` and `updates`."""

    @abstractmethod
    def start_updates(self, data_state: dict[str, Any] | None) -> None:
        """Set `updates` from `counters.step` on; `data_state` is that of a checkpoint, if there is one."""

    def announce(self) -> None:
        """Print what is about to run."""
        return

    @property
    def repository(self) -> str:
        """The name on the Hub that the recipe asks for, or ""."""
        return (self.recipe.hub_model_id or self.recipe.model_name) if self.recipe.push_to_hub else ""

    def _reserve(self) -> str:
        """The full name of the repository that the run will be pushed to, or "" if it will not be."""
        return reserve_repository(self.repository, self.recipe.hub_private) if self.repository else ""

    def _open(self) -> tuple[dict[str, str], list[str]]:
        """Clean the output folder; returns the inputs, and the names of those that have changed since `found`."""
        if self.found:
            remove_unfinished(self.folder)
        else:
            clear_output(self.folder)
            self.write_tokenizer()
        inputs = self.fingerprint()
        return inputs, changed_inputs(self.recipe, self.found, inputs) if self.found else []

    def prepare_training(
        self,
        module: torch.nn.Module,
        groups: Iterable[dict[str, Any]],
        schedule: Callable[[torch.optim.Optimizer], LambdaLR],
        micro_batch: int = 1,
    ) -> None:
        """Set module, optimizer and schedule, prepared by `accelerate`."""
        self.peak_flops, _ = peak_flops(self.accelerator.device, self.recipe.mixed_precision)
        optimizer = self.make_optimizer(groups)
        self.scheduler = schedule(optimizer)
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.module, self.optimizer = prepare_model(self.accelerator, module, optimizer, self.recipe, micro_batch)

    def make_optimizer(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """AdamW with the values of the recipe."""
        return torch.optim.AdamW(
            groups,
            lr=self.recipe.learning_rate,
            betas=(self.recipe.adam_beta1, self.recipe.adam_beta2),
            eps=self.recipe.adam_epsilon,
            # Faster on a CPU. Not elsewhere: accelerate cannot tell that loss scaling has skipped a fused step.
            fused=self.accelerator.device.type == "cpu",
        )

    def _restore(self, changed: list[str]) -> None:
        """Load the checkpoint, if there is one, and start the log and the recipe's trackers."""
        recipe, accelerator, data_state = self.recipe, self.accelerator, None
        # Weights are the same in every process, dropout is not. Between here and the loop no random number may be
        # drawn, or a resumed run would draw others.
        set_seed(recipe.seed, device_specific=True)
        if self.found:
            data_state = load_checkpoint(accelerator, self.found)
            self.counters = read_state(self.found)[0]
        self.start_updates(data_state)
        step = self.counters.step
        self.log = RunLog(self.folder / "log.jsonl", accelerator.is_main_process, step if self.found else None)
        self.log.report_lost(self.counters.logged, accelerator.print)
        if self.found:
            self.log.add("resumed", step, **({"changed": changed} if changed else {}))
            accelerator.print(f"Resuming from {self.found}: step {step:,} of {recipe.max_steps:,}.")
        if changed:
            accelerator.print(f"Data have changed since, which the recipe accepts: {', '.join(changed)}.")
        if recipe.trackers:
            values = dataclasses.asdict(recipe)
            flat = {key: value for key, value in values.items() if isinstance(value, int | float | str)}
            accelerator.init_trackers(recipe.model_name, config=flat)

    def data_state(self) -> dict[str, Any]:
        """What the data need to resume besides the number of the update."""
        return {}

    def save(self) -> None:
        """Write a checkpoint."""
        self.counters.logged = len(self.log.entries)
        record = {"recipe": dataclasses.asdict(self.recipe), "inputs": self.inputs}
        state, keep = self.data_state(), self.recipe.save_total_limit
        save_checkpoint(self.accelerator, self.folder, self.counters, record, state, keep)

    # ---- the end ----

    def finish(self, last: Any, command: str) -> dict[str, Any]:
        """Save the model, evaluate its files, write plot, card and figures, and remove the checkpoints."""
        accelerator, counters = self.accelerator, self.counters
        save_model(accelerator, self.final_model(), self.folder)
        # The figures are those of the saved files, so that whatever saving loses shows in them.
        figures = {
            **self.results(last),
            "training_seconds": counters.seconds,
            "seen_tokens": counters.seen_tokens,
            "skipped_updates": counters.skipped,
            "notes": self.notes,
            "command": command,
            **machine(),
        }
        if accelerator.is_main_process:
            figures |= self.samples()
            self.plot()
            write_text(self.folder / "README.md", self.card(figures))
            write_json(self.folder / "metrics.json", figures)  # a run that has this file is finished
            self.report(figures)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            remove_all(self.folder)
        return figures

    def final_model(self) -> torch.nn.Module:
        """The model to save."""
        return self.trained

    @abstractmethod
    def results(self, last: Any) -> dict[str, Any]:
        """Figures of the saved model, which every process measures; `last` is the last evaluation of the run.

        Raises:
            RuntimeError: The saved model is not the trained one.
        """

    def measure_saved(self) -> dict[str, Any]:
        """Set `model` to the saved one; returns its held-out figures beside the baseline."""
        self.model = self.kind.auto_class.from_pretrained(self.folder).to(self.accelerator.device)
        evaluated = self.held_out, self.recipe.batch_size, self.next_token
        result = evaluate(self.accelerator, self.model, *evaluated)
        return {
            **{f"held_out_{name}": value for name, value in dataclasses.asdict(result).items()},
            **switched_losses(self.accelerator, self.model, *evaluated),
            "unigram_loss": self.unigram_loss,
            "gain_nats": self.unigram_loss - result.loss,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_type": self.model.config.model_type,
        }

    def samples(self) -> dict[str, Any]:
        """Further figures of the saved model, which the main process measures."""
        return {}

    def plot(self) -> None:
        """Draw the log."""
        plot_loss(self.log, self.unigram_loss, self.folder / PLOT, self.loss_name)

    @abstractmethod
    def card(self, figures: dict[str, Any]) -> str:
        """The model card, from what `metrics.json` holds."""

    @abstractmethod
    def report(self, figures: dict[str, Any]) -> None:
        """Print the results."""

    @staticmethod
    def shortfall(recipe: Recipe, figures: dict[str, Any]) -> str:
        """In which respect a run is worse than its recipe demands, or ""."""
        return ""


class Command:
    """A command: the name and docstring of its script, the keys of its recipes, and its kind of run."""

    def __init__(self, name: str, description: str, recipe_class: type[Recipe], run_class: type[Run]) -> None:
        self.name, self.description, self.recipe_class, self.run_class = name, description, recipe_class, run_class

    def read_recipe(self, path: str | Path, words: Sequence[str] = ()) -> Any:
        """A recipe with overrides; raises the `UserError`s of `options.parse` and of the recipe's class."""
        return self._parse([str(path), *words])

    def run(self, recipe: Recipe, command: str) -> dict[str, Any] | None:
        """Start or resume a run, see `Run.execute`, and part the processes."""
        figures = self.run_class(recipe).execute(command)
        PartialState().destroy_process_group()
        return figures

    def main(self, words: Sequence[str] | None = None) -> int:
        """Run from the command line; the exit status is 1 if the run has a `shortfall`, or see `run_script`."""
        words = sys.argv[1:] if words is None else list(words)
        stopped = "the same command resumes from the last checkpoint, if there is one"
        return run_script(lambda: self._main(words), stopped, clean_on_sigterm=False)

    def _main(self, words: list[str]) -> int:
        recipe = self._parse(words)
        figures = self.run(recipe, portable_command(["python", f"training/{self.name}.py", *words]))
        if lack := "" if figures is None else self.run_class.shortfall(recipe, figures):
            print(lack, file=sys.stderr)
        return int(bool(lack))

    def _parse(self, words: list[str]) -> Any:
        kind = self.run_class.kind
        adapt = (lambda values, overrides: adapt_to_overrides(values, overrides, kind)) if kind else None
        options = {"command": self.name, "recipe": "required", "adapt": adapt}
        return parse([self.recipe_class], words, self.description, **options)[0]


def adapt_to_overrides(values: dict[str, Any], overrides: dict[str, Any], kind: ModelKind) -> None:
    """Drop values of the recipe that an override on the command line contradicts, and print which."""
    model = values.get("model") if isinstance(values.get("model"), dict) else {}
    new_type = overrides.get("model.model_type", model.get("model_type"))
    if start := overrides.get("model_name_or_path"):
        if model:
            given = [f"{key[6:]}={value}" for key, value in overrides.items() if key.startswith("model.")]
            but = f"; overridden: {', '.join(given)}" if given else ""
            print(f"Ignoring the recipe's model section, since the model starts from {start}{but}.")
        values["model"] = {}
        if values.get("tokenizer") and "tokenizer" not in overrides:
            print(f"Ignoring the recipe's tokenizer, {values['tokenizer']}: the model has its own.")
            values["tokenizer"] = ""
    elif new_type != model.get("model_type"):
        unknown = sorted(set(model) - model_fields(new_type, kind) - {"model_type"})
        if unknown:
            print(f"Ignoring fields of the recipe's model section that {new_type} does not have: {', '.join(unknown)}.")
        values["model"] = {name: value for name, value in model.items() if name not in unknown}
    if start or "tokenizer" in overrides:
        overrides.setdefault("train_tokenizer", False)
    elif overrides.get("train_tokenizer") is True:
        values["tokenizer"] = ""
