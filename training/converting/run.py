"""A conversion with training: from a recipe to a folder that is ready for the Hub."""

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from data.corpus import Corpus, open_corpus
from data.masking import make_masking
from data.prepare import open_stores
from data.tokenizer import borders
from engine.loop import Update
from engine.output import fingerprint_inputs
from engine.run import Run
from engine.sharding import is_sharded
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from converting.card import make_card
from converting.evaluation import HeldOut, plot, summary
from converting.models import Made, groups, make_pair
from converting.objective import Pair
from converting.recipe import ConvertRecipe, Stage, stage_at
from converting.texts import Documents, Frame, Rows
from luna_hf import FAMILIES
from luna_hf.convert.command import make_plain
from luna_hf.convert.files import check_tokenizer
from luna_hf.convert.report import special_tokens
from luna_hf.scripting import UserError, load_tokenizer
from luna_hf.warm_start.sentence_folder import SentenceFolder, find_transformer, read_sentence_folder
from luna_hf.warm_start.source import read_config

PLOT = "conversion.png"


class Conversion(Run):
    """A run that converts an encoder, and trains the result to compute what its source computes."""

    loss_name = "loss"
    uploaded = "Converted model"

    recipe: ConvertRecipe
    tokenizer: PreTrainedTokenizerBase
    sentences: SentenceFolder | None
    frame: Frame
    made: Made
    pair: Pair
    corpora: list[Corpus]
    rows: Rows
    evaluated: HeldOut

    @property
    def trained(self) -> PreTrainedModel:
        """The student."""
        return self.pair.student

    # ---- the start ----

    def check(self) -> None:
        """Check that the processes can share an update."""
        passes, processes = self.recipe.global_batch_tokens // self.recipe.pass_tokens, self.accelerator.num_processes
        if is_sharded(self.accelerator) or passes % processes:
            raise UserError(
                f"`global_batch_tokens` gives {passes} passes, which {processes} processes cannot share evenly. Raise "
                "it, and launch without sharding."
            )
        self.passes, self.stages = passes // processes, self.recipe.plan()

    def read(self) -> None:
        """Convert the source, and open documents and, if the recipe names any, sentences."""
        recipe = self.recipe
        self.tokenizer, self.sentences = read_source(recipe)
        self.frame = read_frame(self.tokenizer)
        self.made = make_pair(recipe, self.sentences, self.frame)
        self.pair = self.made.pair
        make_plain(self.tokenizer, self.pair.student.config.max_position_embeddings)
        self.pair.student.config.sep_token_id = self.tokenizer.sep_token_id  # ends a question, which heads mark
        self.corpora = [open_corpus(recipe)]
        if recipe.sentences:
            self.corpora.append(open_corpus(dataclasses.replace(recipe, data=recipe.sentences, validation="")))
        found = "; ".join(corpus.description for corpus in self.corpora)
        self.accelerator.print(f"Read {found}.", *self.made.report, sep="\n")

    def write_tokenizer(self) -> None:
        """Save the source's tokenizer."""
        self.tokenizer.save_pretrained(self.folder)

    def fingerprint(self) -> dict[str, str]:
        """Texts, tokenizer and teacher."""
        found = [fingerprint_inputs(self.recipe, corpus) for corpus in self.corpora]
        return {name: content for inputs in found for name, content in inputs.items()}

    def prepare(self) -> None:
        """Rows, optimizer and schedule."""
        recipe, accelerator, made, stages = self.recipe, self.accelerator, self.made, self.stages
        self.rows, held_out = self._open_rows()
        found = groups(made.pair.student, made.new, recipe.weight_decay, recipe.freeze_embeddings, made.kept_positions)
        optimizer = self.make_optimizer(found)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1.0  # the schedule gives the rates themselves
        self.scheduler = LambdaLR(optimizer, [rate(recipe, stages, group["is_new"]) for group in found])
        accelerator.register_for_checkpointing(self.scheduler)
        # Not wrapped for several processes: what has a gradient changes with the stage, so `update` sums gradients.
        self.pair = dataclasses.replace(
            made.pair,
            student=accelerator.prepare_model(made.pair.student, evaluation_mode=True),
            teacher=made.pair.teacher.to(accelerator.device),
        )
        self.module, self.optimizer = self.pair.student, accelerator.prepare_optimizer(optimizer)
        self.evaluated = HeldOut(self.pair, held_out, recipe.eval_tokens, recipe.longest)

    def _open_rows(self) -> tuple[Rows, Rows]:
        """Rows to train on, and held-out ones."""
        recipe, corpora, tokenizer, last = self.recipe, self.corpora, self.tokenizer, borders(self.tokenizer)[1]
        stores = [open_stores(recipe, corpus, tokenizer, self.accelerator) for corpus in corpora]
        training = [Documents(own, corpus.weights, last) for (own, _), corpus in zip(stores, corpora, strict=True)]
        has_mask = tokenizer.mask_token_id is not None
        masking = make_masking(tokenizer, recipe.mask_probability, False) if has_mask else None
        positions = self.pair.student.config.max_position_embeddings if self.made.kept_positions else 0
        shared = {"frame": self.frame, "pass_tokens": recipe.pass_tokens, "seed": recipe.seed}
        held_out = Documents(stores[0][1], corpora[0].evaluation_shares, last)
        sentences = training[1] if len(training) > 1 else None
        rows = Rows(training[0], sentences, recipe.sentence_share, masking=masking, positions=positions, **shared)
        return rows, Rows(held_out, None, 0.0, **shared)

    def start_updates(self, data_state: dict[str, Any] | None) -> None:
        """Nothing: rows depend on the number of the update alone."""

    # ---- the loop ----

    def update(self) -> Update:
        """One update by the loss of its stage, whose parts it returns."""
        accelerator, step = self.accelerator, self.counters.step
        stage, tokens, sums = stage_at(self.stages, step), 0, {}
        masked = bool({"mlm", "kl"} & set(stage.weights))
        for part in range(self.passes):
            number = part * accelerator.num_processes + accelerator.process_index
            batch = self.rows.batch(stage.lengths, step, number, masked=masked)
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            with accelerator.autocast():
                losses = self.pair.losses(batch, list(stage.weights))
            loss = sum(stage.weights[name] * value for name, value in losses.items())
            accelerator.backward(loss / self.passes)
            for name, value in {**losses, "loss": loss}.items():
                sums.setdefault(name, []).append(float(value.detach()))
            tokens += int(batch["attention_mask"].sum())
        parameters = average_gradients(accelerator, self.pair.student)
        norm = float(accelerator.clip_grad_norm_(parameters, self.recipe.max_grad_norm))
        parts = {name: sum(values) / len(values) for name, values in sums.items()}
        self.step(parts["loss"], norm)
        rate = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        own = torch.tensor([tokens, int(self.stop.name is not None)], device=accelerator.device)
        total = accelerator.reduce(own, "sum")
        return Update(parts["loss"], norm, rate, int(total[0]), bool(total[1]), parts)

    def figures(self, update: Update, speed: float) -> dict[str, Any]:
        """The stage and the parts of the last update's loss."""
        stage = stage_at(self.stages, self.counters.step - 1)
        seen = {"seen_tokens": self.counters.seen_tokens, "tokens_per_second": speed}
        return {"stage": stage.name, **update.parts, "grad_norm": update.grad_norm, **seen}

    def measure(self) -> dict[str, Any]:
        """Held-out figures, which the main process measures."""
        return self.evaluated.measure(self.pair) if self.accelerator.is_main_process else {}

    def evaluate(self, progress: tqdm) -> dict[str, Any]:
        """Log held-out figures."""
        figures, counters = self.measure(), self.counters
        if figures:
            seen = {"seen_tokens": counters.seen_tokens, "seconds": counters.seconds}
            self.log.add("held_out", counters.step, **figures, **seen)
            self._track("cosine", figures["cosine"])
            at = f"step {counters.step:>6}, {counters.seen_tokens:,} tokens"
            progress.write(f"{at}: cosine at {summary(figures)}")
        return figures

    # ---- the end ----

    def results(self, last: dict[str, Any]) -> dict[str, Any]:
        """Figures of the saved model by length, and what it was trained on."""
        has_head = hasattr(self.pair.student, "lm_head")
        reloaded = (AutoModelForMaskedLM if has_head else AutoModel).from_pretrained(self.folder).eval()
        pair = dataclasses.replace(self.pair, student=reloaded.to(self.accelerator.device))
        return {
            **self.evaluated.measure(pair),
            "rows": {str(length): len(ids) for length, ids in self.evaluated.rows.items()},
            "kind": "sentences" if self.sentences else "masked words" if has_head else "states",
            "model_type": reloaded.config.model_type,
            "parameters": reloaded.num_parameters(),
            "longest_input": reloaded.config.max_position_embeddings,
            "corpus": "; ".join(corpus.description for corpus in self.corpora),
        }

    def plot(self) -> None:
        """Draw the log."""
        plot(self.log, self.folder / PLOT)

    def card(self, figures: dict[str, Any]) -> str:
        """Fill `model_cards/trained_conversion.md`, after writing what a sentence-transformers folder has beside."""
        if self.sentences:
            self.sentences.write(self.folder, figures["longest_input"])
        return make_card(self.recipe, self.pair.student.config, figures, PLOT)

    def report(self, figures: dict[str, Any]) -> None:
        """Print the results."""
        print(f"Written to {self.folder}: cosine to the source at {summary(figures)}")


def read_source(recipe: ConvertRecipe) -> tuple[PreTrainedTokenizerBase, SentenceFolder | None]:
    """The source's tokenizer, and what sentence-transformers stores beside its transformer, if it is of that library.

    Raises:
        UserError: It has no tokenizer that fits, or a pooling, module or setting that cannot be kept.
    """
    try:
        sentences, config = read_sentence_folder(recipe.teacher), read_config(recipe.teacher)
        subfolder = find_transformer(recipe.teacher)
    except ValueError as error:
        raise UserError(f"`teacher`: {error}") from error
    own = FAMILIES.get(config.model_type)
    softmax = own and own.warm_start.softmax  # fields of a model of this package that has softmax attention
    if own and not (softmax and all(getattr(config, name) == value for name, value in softmax.items())):
        raise UserError(f"`teacher` {recipe.teacher} is a model of this package already. Name what it was made from.")
    tokenizer = load_tokenizer(recipe.teacher, required=True, subfolder=subfolder)
    check_tokenizer(tokenizer, config, recipe.teacher)
    if sentences and sentences.lower and tokenizer("A").input_ids != tokenizer("a").input_ids:
        raise UserError(
            f"`teacher` {recipe.teacher} lowercases texts before its tokenizer (`do_lower_case`), but training reads "
            "them as they are. Convert it without training (python -m luna_hf convert)."
        )
    return tokenizer, sentences


def read_frame(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """The ids around a text.

    Raises:
        UserError: The tokenizer puts none or several there, or does not pad.
    """
    borders(tokenizer)  # of documents, which may have other ids
    first, last = special_tokens(tokenizer)
    if len(first) != 1 or len(last) != 1:
        raise UserError("The tokenizer must put one token before and one after a text. Use another source.")
    return Frame(int(first), int(last), tokenizer.pad_token_id)


def rate(recipe: ConvertRecipe, stages: list[Stage], is_new: bool) -> Any:
    """The learning rate of a group by update."""

    def at(step: int) -> float:
        stage = stage_at(stages, step)
        return (stage.new_learning_rate if is_new else stage.learning_rate) * stage.factor(step, recipe.warmup_fraction)

    return at


def average_gradients(accelerator: Accelerator, model: PreTrainedModel) -> list[nn.Parameter]:
    """Average the gradients of all processes, in place; returns the parameters that have one in any process."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=accelerator.device)
    found = [
        parameter for parameter, any_has in zip(parameters, accelerator.reduce(has, "sum"), strict=True) if any_has
    ]
    if accelerator.num_processes > 1:
        for parameter in found:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = accelerator.reduce(own, "mean")
    return found
