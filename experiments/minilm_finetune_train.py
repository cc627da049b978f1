"""One LoRA finetuning with the Trainer, which continues after a kill exactly where its newest checkpoint is."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import running  # noqa: F401  # finds the packages of training
from peft import LoraConfig, PeftModel, get_peft_model

# isort: split
import torch
from tasks.trainer import (
    Clock,
    FiniteTraining,
    Sealing,
    SeededSampler,
    find_checkpoint,
    remove_checkpoints,
    seconds,
)
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from luna_hf.scripting import progress, quiet

# All linear layers of the body, whatever its family; heads are outside of `encoder.layer`.
LINEAR = r".*\.encoder\.layer\.\d+\..*\.(query|key|value|key_value|dense)"


@dataclass(frozen=True)
class LoraSettings:
    """How all contenders of a task are trained.

    Args:
        rank: of LoRA; `alpha` is twice the rank.
        bias: which biases are trained and saved, as of `LoraConfig`.
        trained: modules outside of LoRA, those of the head, by name; they are trained whole.
        batch: rows of an update.
        save_steps: updates between checkpoints.
        bf16: whether matrices are multiplied in bfloat16 during training.
    """

    rate: float
    batch: int
    epochs: int
    seed: int
    trained: Sequence[str]
    rank: int = 16
    bias: str = "none"
    save_steps: int = 250
    bf16: bool = False


class GroupedTrainer(FiniteTraining, Trainer):
    """Trainer whose updates hold rows of similar length, in an order of the seed and the epoch alone."""

    def __init__(self, lengths: list[int], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.lengths = lengths
        for callback in (Clock(), Sealing(), Lines()):
            self.add_callback(callback)
        self.remove_callback(PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        size, seed = self.args.train_batch_size, self.args.seed
        return SeededSampler(self.lengths, size, seed, lambda: int(self.state.epoch or 0))


class Lines(TrainerCallback):
    """Prints the loss."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """One line for each entry."""
        if logs and "loss" in logs:
            now = time.strftime("%H:%M")
            progress(f"  {now}  update {state.global_step:,} of {state.max_steps:,}: loss {float(logs['loss']):.4f}")


def adapt(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """The model with LoRA on the linear layers of its body; its body is frozen, and the head's modules are trained."""
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules=LINEAR,
        bias=settings.bias,
        modules_to_save=list(settings.trained) or None,
    )
    return get_peft_model(model, lora)


def train(
    model: PeftModel,
    rows: Dataset,
    lengths: list[int],
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
    settings: LoraSettings,
    folder: Path,
) -> dict[str, float]:
    """Train to the end, from the newest checkpoint in `folder` if there is one.

    Args:
        model: of `adapt`; trained in place.
        lengths: tokens of each row.
        collate: makes a batch of rows; must not draw from the global generator, or a resumed run would differ.

    Returns:
        Seconds of the updates, their tokens, and the mean loss of the last log entry.
    """
    arguments = TrainingArguments(
        str(folder),
        learning_rate=settings.rate,
        lr_scheduler_type="linear",
        warmup_steps=0.06,  # a share of all steps
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch,
        weight_decay=0.0,
        seed=settings.seed,
        save_steps=settings.save_steps,
        save_total_limit=2,
        logging_steps=25,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=settings.bf16,
        remove_unused_columns=False,
    )
    with quiet():
        # The model inside, whose checkpoints hold all weights: PEFT's would lack what is trained beside its modules.
        trainer = GroupedTrainer(
            lengths, model=model.get_base_model(), args=arguments, data_collator=collate, train_dataset=rows
        )
        start = find_checkpoint(folder, progress, needs_best=False)
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    model.eval()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = sum(lengths) * settings.epochs
    return {"seconds": round(seconds(trainer), 1), "tokens": tokens, "loss": float(losses[-1]) if losses else 0.0}


def tidy(folder: Path) -> None:
    """Remove the checkpoints and settings of a finished run, which `run.json` has, too."""
    remove_checkpoints(folder)
    (folder / "settings.json").unlink(missing_ok=True)
