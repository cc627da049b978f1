"""Pretraining: a run on text that is cut to rows, of a new model or of a checkpoint."""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from accelerate.utils import set_seed
from common.machine import plural
from common.models import (
    MASKED,
    ModelKind,
    load_config,
    load_encoder,
    load_tokenizer,
    longest_input,
    make_config,
    sketch,
)
from data.corpus import Corpus, open_corpus
from data.masking import RowFormat
from data.prepare import PreparedText, prepare_text
from data.rows import Plan
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from engine.card import count
from engine.groups import check_groups, parameter_groups
from engine.loop import Evaluation, split_update, warmup_then_decay
from engine.output import fingerprint_inputs
from engine.recipe import RunRecipe
from engine.run import Run
from engine.throughput import peak_flops, training_flops
from luna_hf.scripting import UserError, portable


class Pretraining(Run):
    """A pretraining run; subclasses say what a row predicts.

    Attributes:
        kind: of model.
        targets_name: what the loss is a mean over, in words.
        tokenizer: chosen by the recipe; `None` until it is trained.
        longest: most tokens of an input.
        model: without what wraps it.
    """

    kind: ClassVar[ModelKind]
    targets_name: ClassVar[str]
    uploaded = "Pretrained model"

    recipe: RunRecipe
    corpus: Corpus
    text: PreparedText
    plan: Plan

    tokenizer: PreTrainedTokenizerBase | None = None
    longest: int | float = math.inf
    model: PreTrainedModel | None = None

    # ---- what subclasses define; the methods raise `UserError` for bad input ----

    @abstractmethod
    def train_tokenizer(self, documents: Iterable[str], vocab_size: int, max_length: Any) -> PreTrainedTokenizerBase:
        """A new tokenizer for a model that takes `max_length` tokens."""

    def adapt_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: str, new_model: bool
    ) -> tuple[PreTrainedTokenizerBase, list[str]]:
        """A loaded tokenizer as the model needs it, and notes; the vocabulary may grow only for a new model."""
        return tokenizer, []

    @abstractmethod
    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Check that the recipe's sample texts can be used with a tokenizer, in at most `longest` tokens."""

    @abstractmethod
    def row_format(self, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """How text is cut to rows, and their labels."""

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """The module that is called with a batch and returns a `loss`; it contains the model."""
        return model

    @abstractmethod
    def answers(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Answers of the finished model, and other figures of its files."""

    @abstractmethod
    def answers_text(self, figures: dict[str, Any]) -> str:
        """The answers as text to print."""

    # ---- the start ----

    def check(self) -> None:
        """Load the tokenizer, and check the model that the recipe describes."""
        recipe, accelerator, kind = self.recipe, self.accelerator, self.kind
        micro_batch, passes = split_update(recipe.update_rows, recipe.batch_size, accelerator.num_processes)
        accelerator.gradient_accumulation_steps = passes
        self.plan = Plan(micro_batch, passes, accelerator.num_processes, accelerator.process_index)
        start = recipe.model_name_or_path
        config = load_config(start, kind=kind) if start else None
        if name := recipe.tokenizer or start:
            tokenizer = load_tokenizer(name, config, padded=kind is MASKED)
            self.tokenizer, notes = self.adapt_tokenizer(tokenizer, portable(name), new_model=config is None)
            self.notes += notes
        if config:
            self.longest = max(recipe.block_size, longest_input(config))  # positions are extended where needed
        else:
            vocabulary = len(self.tokenizer) if self.tokenizer else recipe.vocab_size
            config = make_config(recipe.model, self.tokenizer, vocabulary, kind)
            self.longest = longest_input(config)
        if recipe.block_size > self.longest:
            raise UserError(
                f"`block_size` is {recipe.block_size}, but the model takes at most {self.longest} tokens. Lower "
                f"`block_size`, or raise `model.max_position_embeddings` (now {config.max_position_embeddings})."
            )
        if recipe.windows:
            recipe.windows.check(recipe.model.get("local_window", getattr(config, "local_window", 0)))
        if self.tokenizer:
            self.check_tokenizer(self.tokenizer, self.longest)
        check_groups(parameter_names(config, kind), recipe.groups, recipe.max_steps)

    def read(self) -> None:
        """Open the corpus, and load the checkpoint; a new model needs the tokenizer first."""
        self.corpus = open_corpus(self.recipe)
        self.accelerator.print(f"Read {self.corpus.description}.")
        if self.recipe.model_name_or_path:
            self._make_model()

    def _make_model(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        recipe, kind, start = self.recipe, self.kind, self.recipe.model_name_or_path
        set_seed(recipe.seed)
        if start:
            fields = dict(recipe.model)
            if kind is MASKED and hasattr(load_config(start), "sparse_prediction"):
                fields.setdefault("sparse_prediction", True)
            self.model, notes = load_encoder(kind.auto_class, start, recipe.block_size, **fields)
            self.model.train()  # `from_pretrained` returns it without dropout, and its head would run everywhere
            self.notes += notes
            if not recipe.validation:
                self.notes.append(
                    "Held-out documents are drawn anew: if the checkpoint was trained on this text, it has seen them. "
                    "Name a `validation` text to be sure."
                )
        else:
            self.model = kind.auto_class.from_config(make_config(recipe.model, tokenizer, len(tokenizer), kind))
        self.module = self.wrap(self.model)

    def write_tokenizer(self) -> None:
        """Train the tokenizer if none was chosen, and save it."""
        tokenizer, recipe = self.tokenizer, self.recipe
        if tokenizer is None:
            documents = self.corpus.training_documents()
            tokenizer = self.train_tokenizer(documents, recipe.vocab_size, self.longest)
            if len(tokenizer) < recipe.vocab_size:
                print(f"The text has enough pairs for only {len(tokenizer):,} of {recipe.vocab_size:,} tokens.")
        else:
            tokenizer.model_max_length = VERY_LARGE_INTEGER if math.isinf(self.longest) else self.longest
        tokenizer.save_pretrained(self.folder)

    def fingerprint(self) -> dict[str, str]:
        """Text and tokenizer."""
        return fingerprint_inputs(self.recipe, self.corpus)

    def prepare(self) -> None:
        """Rows, model, optimizer and schedule."""
        recipe, accelerator = self.recipe, self.accelerator
        tokenizer = load_tokenizer(str(self.folder))
        self.check_tokenizer(tokenizer, tokenizer.model_max_length)  # it may have just been trained
        self.text = prepare_text(recipe, self.corpus, tokenizer, accelerator, self.row_format(tokenizer))
        self.held_out, self.unigram_loss = self.text.held_out, self.text.unigram["loss"]
        digest = hashlib.blake2b(" ".join(sorted(self.inputs.values())).encode(), digest_size=16)
        self.text.facts["inputs_fingerprint"] = digest.hexdigest()
        if self.model is None:
            self._make_model(self.text.tokenizer)
        for note in self.notes:
            accelerator.print(note)
        model, module = self.model, self.module
        self.parameters = sum(parameter.numel() for parameter in model.parameters())  # before they may be sharded
        sample = {name: tensor.unsqueeze(0) for name, tensor in self.held_out[0].items()}
        self.flops_per_token = training_flops(module, sample)
        if recipe.gradient_checkpointing:  # by the name that the installed transformers has for it
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if recipe.compile:
            module.compile()
        groups = parameter_groups(model, recipe.weight_decay, recipe.learning_rate, recipe.groups, recipe.max_steps)
        self.prepare_training(
            module,
            groups,
            lambda optimizer: warmup_then_decay(
                optimizer, recipe.max_steps, recipe.warmup_fraction, recipe.decay_power
            ),
            self.plan.micro_batch,
        )

    def start_updates(self, data_state: dict[str, Any] | None) -> None:
        """The rows from `counters.step` on."""
        if data_state is not None:
            self.text.rows.load_state_dict(data_state)
        self.updates = self.text.rows.updates(self.plan, self.counters.step)

    def data_state(self) -> dict[str, Any]:
        """The position in the text, when streaming."""
        return self.text.rows.state_dict()

    def announce(self) -> None:
        """Print what is about to run."""
        recipe, facts, plan, accelerator = self.recipe, self.text.facts, self.plan, self.accelerator
        peak, source = peak_flops(accelerator.device, recipe.mixed_precision)
        accelerator.print(
            f"Documents: {count(facts['training_documents'])} for training, {count(facts['held_out_documents'])} held "
            f"out. Vocabulary: {len(self.text.tokenizer):,}.\n"
            f"Text: {count(facts['training_tokens'])} tokens in {count(facts['training_blocks'])} blocks of "
            f"{recipe.block_size}; {facts['evaluated_blocks']:,} of {count(facts['held_out_blocks'])} held-out blocks "
            "are evaluated.\n"
            f"Model: {recipe.model_name_or_path or recipe.model['model_type']}, {self.parameters:,} parameters.\n"
            f"Steps: {recipe.max_steps - self.counters.step:,} to go, each of {recipe.update_rows} blocks "
            f"({recipe.global_batch_tokens:,} tokens): {plural(plan.accumulation, 'pass', 'passes')} of "
            f"{plan.micro_batch} on each of {plural(plan.processes, 'process', 'processes')}.\n"
            f"Device: {accelerator.device}, {plural(torch.get_num_threads(), 'thread')}; peak {peak / 1e12:.2f} "
            f'TFLOP/s ({source}) per process. Below, "mfu" (model FLOPs utilisation) is the share of the peak that the '
            "model uses.\n"
            f"Unigram baseline on {self.text.unigram['targets']:,} held-out {self.targets_name}: "
            f"{self.unigram_loss:.3f} nats."
        )

    # ---- the end ----

    def results(self, last: Evaluation) -> dict[str, Any]:
        """The held-out loss of the saved model beside the baseline, and what it was trained on."""
        recipe, text, figures = self.recipe, self.text, self.measure_saved()
        loss = figures["held_out_loss"]
        if not math.isclose(loss, last.loss, rel_tol=1e-2):  # allows for mixed precision, which the files lack
            raise RuntimeError(f"The saved model has a loss of {loss:.4f}, but the trained one had {last.loss:.4f}.")
        longest = longest_input(self.model.config)
        self.notes += [
            f"Continued from step {entry['step']:,} on data that had changed: "
            f"{', '.join(map(portable, entry['changed']))}."
            for entry in self.log.entries
            if entry.get("changed")
        ]
        return {
            **figures,
            "unigram_accuracy": text.unigram["accuracy"],
            **text.facts,
            "longest_input": None if math.isinf(longest) else longest,
            "mfu": self.utilisation(self.counters.seen_tokens / self.counters.seconds),
            "processes": self.accelerator.num_processes,
            "start": f"trained further from `{portable(recipe.model_name_or_path)}`"
            if recipe.model_name_or_path
            else "pretrained from scratch",
        }

    def samples(self) -> dict[str, Any]:
        """Answers of the saved model with the saved tokenizer."""
        return self.answers(self.model, AutoTokenizer.from_pretrained(self.folder))

    def report(self, figures: dict[str, Any]) -> None:
        """Print the results and the answers."""
        print(f"\nReloaded from {self.folder}; held-out {self.targets_name}: {figures['held_out_targets']:,}")
        print(f"  model            loss {figures['held_out_loss']:.3f}  accuracy {figures['held_out_accuracy']:.1%}")
        print(f"  unigram baseline loss {figures['unigram_loss']:.3f}  accuracy {figures['unigram_accuracy']:.1%}")
        print(f"  gain {figures['gain_nats']:.3f} nats after {figures['training_seconds']:.0f} s of training")
        print(self.answers_text(figures))

    @staticmethod
    def shortfall(recipe: RunRecipe, figures: dict[str, Any]) -> str:
        """Whether the gain over the baseline is below the recipe's `min_gain_nats`."""
        if figures["gain_nats"] >= recipe.min_gain_nats:
            return ""
        return (
            f"The gain over the unigram baseline is {figures['gain_nats']:.3f} nats, below the recipe's "
            f"`min_gain_nats` of {recipe.min_gain_nats}. Train longer (`max_steps`) or on more text."
        )


def parameter_names(config: PreTrainedConfig, kind: ModelKind = MASKED) -> list[str]:
    """The names of a model's parameters, without making them."""
    return [name for name, _ in sketch(config, kind).named_parameters()]
