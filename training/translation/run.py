"""A translation run: from a recipe and parallel text to a folder that is ready for the Hub."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from common.extra import require
from common.fingerprint import fingerprint
from common.machine import plural
from common.models import DAMAGED, SEQ2SEQ, load_tokenizer, make_config, refuse_adapter, sketch
from data.tokenizer import ending
from datasets import disable_progress_bars
from engine.checkpoint import intact_until
from engine.groups import parameter_groups
from engine.loop import Evaluation
from engine.output import fingerprint_tokenizer
from engine.run import Run
from engine.throughput import training_flops
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.scripting import TOKENIZER_FILES, UserError, reason
from translation.card import make_card
from translation.encoder import (
    complete_section,
    differences,
    encoder_config,
    encoder_weights,
    new_parts,
    seq2seq_config,
    with_ends,
)
from translation.pairs import (
    IGNORED,
    EncodedPairs,
    Order,
    Pairs,
    check_sources,
    encode_pairs,
    joint_tokenizer,
    read_pairs,
    updates,
)
from translation.recipe import TranslationRecipe
from translation.scores import METRICS, average, evaluate_split, evaluate_wait, search


class SmoothedLoss(nn.Module):
    """A model with the loss of smoothed labels (Szegedy et al. 2016), as in fairseq.

    The loss of a token is (1 - s) times that of the label and s times the mean over the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, labels: Tensor, **inputs: Tensor) -> SimpleNamespace:
        """Return the mean `loss` over the labels (b, n) that are not ignored."""
        logits = self.model(**inputs, use_cache=False).logits.float()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing
        )
        return SimpleNamespace(loss=loss)


class Translation(Run):
    """A run that trains an encoder-decoder, and scores its translations."""

    kind = SEQ2SEQ
    loss_name = "loss of the target's tokens"
    uploaded = "Translation model"

    recipe: TranslationRecipe
    tokenizer: PreTrainedTokenizerBase | None
    encoder: BoundedMemoryConfig | None
    section: dict[str, Any]
    encoder_weights: dict[str, Tensor] | None
    splits: dict[str, Pairs]
    model: PreTrainedModel

    @property
    def trained(self) -> nn.Module:
        """The model without its loss."""
        return self.accelerator.unwrap_model(self.module).model

    def probe(self) -> None:
        """Nothing."""
        return None

    # ---- the start ----

    def check(self) -> None:
        """Load the tokenizer, and check the model."""
        recipe = self.recipe
        self.accelerator.gradient_accumulation_steps = recipe.accumulation
        if recipe.task == "summarization":
            require("summarize", "rouge_score")
        start = recipe.initial_encoder
        self.encoder = encoder_config(start) if start else None
        self.section = complete_section(recipe.model, self.encoder, start) if start else recipe.model
        named = recipe.tokenizer or recipe.initial_weights or start
        self.tokenizer = self.ended(load_tokenizer(named, self.encoder)) if named else None
        config = self.make_config()
        sketch(config, SEQ2SEQ)
        self.limit = getattr(config, "max_position_embeddings", math.inf)
        if recipe.max_length > self.limit:
            raise UserError(f"`max_length` is {recipe.max_length}, but the model takes at most {self.limit} tokens.")
        own = isinstance(config, BoundedMemoryConfig)
        longest = config.decoder_part().longest_input() if own else getattr(config, "max_position_embeddings", None)
        if longest and recipe.max_new_tokens > longest:
            raise UserError(
                f"`max_new_tokens` is {recipe.max_new_tokens}, but the decoder has {longest} positions. Lower it, or "
                "raise `model.max_position_embeddings`."
            )

    def ended(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """A tokenizer that ends texts; it begins them as the initial encoder expects, if there is one."""
        return with_ends(tokenizer) if self.encoder else ending(tokenizer)

    def make_config(self) -> PreTrainedConfig:
        """The model's config, with a tokenizer or before one is trained."""
        recipe, tokenizer = self.recipe, self.tokenizer
        if self.encoder:
            return seq2seq_config(self.section, self.encoder, tokenizer, recipe.initial_encoder)
        return make_config(recipe.model, tokenizer, len(tokenizer) if tokenizer else recipe.vocab_size, SEQ2SEQ)

    def read(self) -> None:
        """Read the pairs of all splits, and the weights of the initial encoder unless a checkpoint has them."""
        recipe = self.recipe
        disable_progress_bars()
        self.splits = {name: read_pairs(recipe, name) for name in (recipe.train_split, recipe.validation_split)}
        if recipe.test_split:
            self.splits[recipe.test_split] = read_pairs(recipe, recipe.test_split)
        loads = self.encoder and not self.found
        self.encoder_weights = encoder_weights(recipe.initial_encoder, self.section) if loads else None

    def write_tokenizer(self) -> None:
        """Train the tokenizer if the recipe names none, and save it."""
        recipe = self.recipe
        for name in TOKENIZER_FILES:
            (self.folder / name).unlink(missing_ok=True)
        if self.tokenizer is None:
            self.tokenizer = joint_tokenizer(self.splits[recipe.train_split], recipe.vocab_size, recipe.max_length)
        self.tokenizer.save_pretrained(self.folder)

    def fingerprint(self) -> dict[str, str]:
        """The pairs, the tokenizer, and the config of an initial encoder in a folder."""
        texts = {f"{self.recipe.data} ({name})": pairs.digest() for name, pairs in self.splits.items()}
        path = Path(self.recipe.initial_encoder, "config.json")
        configs = fingerprint([path] if self.encoder and path.is_file() else [])
        return texts | configs | fingerprint_tokenizer(self.folder)

    def prepare(self) -> None:
        """Encoded pairs, model, optimizer and schedule."""
        recipe = self.recipe
        self.stored = load_tokenizer(str(self.folder))
        self.tokenizer = tokenizer = self.ended(self.stored)
        if recipe.test_split and not recipe.truncate_source:
            check_sources(self.splits[recipe.test_split], tokenizer, self.limit)
        training, held_out = (
            encode_pairs(
                *(self.splits[name], tokenizer, recipe.max_length),
                leave_out=name == recipe.train_split,
                cut=recipe.truncate_source,
            )
            for name in (recipe.train_split, recipe.validation_split)
        )
        set_seed(recipe.seed)
        model = AutoModelForSeq2SeqLM.from_config(self.make_config())
        if self.encoder_weights:
            model.base_model.encoder.load_state_dict(self.encoder_weights)
        if recipe.initial_encoder:
            self.notes.append(new_parts(model, recipe.initial_encoder))
        if recipe.initial_weights and not self.found:
            self.notes += start_from(model, recipe.initial_weights)
        self.training, self.parameters = training, model.num_parameters()
        self.ends = tokenizer.pad_token_id, model.config.decoder_start_token_id
        self.held_out = _rows(held_out, *self.ends, wait=recipe.wait_k[0] if recipe.wait_k else None)
        targets = torch.from_numpy(np.concatenate(training.target))
        counts = torch.bincount(targets, minlength=len(tokenizer))
        self.unigram_loss = unigram_loss(self.held_out, counts)
        if training.left_out:
            self.notes.append(
                f"{training.left_out:,} training pairs of more than {recipe.max_length} tokens were left out."
            )
        module = SmoothedLoss(model, recipe.label_smoothing)
        self.flops_per_token = training_flops(module, held_out.batch([held_out.lengths.argmax()], *self.ends))
        if training.cut:
            self.notes.append(f"{training.cut:,} training sources were cut to {recipe.max_length} tokens.")
        self.prepare_training(
            module,
            parameter_groups(model, recipe.weight_decay),
            lambda optimizer: LambdaLR(optimizer, lambda step: inverse_square_root(step, recipe.warmup_steps)),
        )

    def start_updates(self, data_state: dict[str, Any] | None) -> None:
        """The batches from `counters.step` on."""
        recipe, accelerator = self.recipe, self.accelerator
        processes = accelerator.num_processes, accelerator.process_index
        order = Order(recipe.batch_tokens, recipe.accumulation, *processes, recipe.seed)
        self.updates = updates(self.training, order, *self.ends, self.counters.step, recipe.wait_k)

    def announce(self) -> None:
        """Print what is about to run."""
        recipe = self.recipe
        batches = plural(recipe.accumulation, "batch", "batches")
        processes = plural(self.accelerator.num_processes, "process", "processes")
        self.accelerator.print(
            f"Pairs: {len(self.training.source):,} for training, {len(self.held_out):,} held out. Vocabulary: "
            f"{len(self.tokenizer):,}.\nModel: {self.section['model_type']}, {self.parameters:,} parameters.\n"
            f"Steps: {recipe.max_steps - self.counters.step:,} to go, each of {batches} of at most "
            f"{recipe.batch_tokens:,} tokens a side on {processes}."
        )
        for note in self.notes:
            self.accelerator.print(f"- {note}")

    # ---- the end ----

    def final_model(self) -> PreTrainedModel:
        """The mean of the last intact checkpoints."""
        model = self.accelerator.unwrap_model(self.trained)
        found = intact_until(self.folder, self.counters.step, self.accelerator.print)
        self.averaged = found[-self.recipe.average_checkpoints :]
        if len(self.averaged) > 1:
            weights = {name.removeprefix("model."): tensor for name, tensor in average(self.averaged).items()}
            own = model.state_dict()
            weights = {name: tensor.to(own[name].dtype) for name, tensor in weights.items()}
            missing, unexpected = model.load_state_dict(weights, strict=False)
            if unexpected or set(missing) - set(model.all_tied_weights_keys):
                raise RuntimeError(f"The checkpoints hold other weights: {missing}, {unexpected}")
        model.generation_config.update(**search(self.recipe))
        return model

    def results(self, last: Evaluation) -> dict[str, Any]:
        """The held-out loss of the saved model beside the baseline, and what it was trained on."""
        return {
            **self.measure_saved(),
            "averaged_checkpoints": len(self.averaged),
            "training_pairs": len(self.splits[self.recipe.train_split]),
            "vocabulary": len(self.tokenizer),
        }

    def samples(self) -> dict[str, Any]:
        """Scores of the splits."""
        recipe, scores = self.recipe, {}
        longest = recipe.max_length if recipe.truncate_source else None
        names = {"validation": recipe.validation_split, **({"test": recipe.test_split} if recipe.test_split else {})}
        for name, split in names.items():
            own = self.model, self.tokenizer, self.splits[split], recipe.eval_batch_size
            scores[name] = evaluate_split(*own, longest, recipe.task, recipe.target_language)
            if waits := [k for k in recipe.wait_k if k]:
                scores[name]["simultaneous"] = {
                    str(k): evaluate_wait(*own, k, longest, recipe.target_language) for k in waits
                }
        return scores

    def card(self, figures: dict[str, Any]) -> str:
        """Fill `model_cards/translation.md`."""
        return make_card(self.recipe, figures)

    def report(self, figures: dict[str, Any]) -> None:
        """Print the scores."""
        if self.tokenizer is not self.stored:  # of a run that an earlier version began
            self.tokenizer.save_pretrained(self.folder)
        for name in ("validation", "test"):
            if name in figures:
                metrics = METRICS[self.recipe.task].items()
                scores = ", ".join(f"{shown} {figures[name][metric]['score']:.2f}" for metric, shown in metrics)
                print(f"{name}: {scores} on {figures[name]['pairs']:,} pairs")

    @staticmethod
    def shortfall(recipe: TranslationRecipe, figures: dict[str, Any]) -> str:
        """Whether BLEU on the validation split is below the recipe's `min_bleu`."""
        if (
            "validation" not in figures
            or not recipe.min_bleu
            or figures["validation"]["bleu"]["score"] >= recipe.min_bleu
        ):
            return ""
        return f"BLEU is below the recipe's `min_bleu` of {recipe.min_bleu}. Train longer (`max_steps`)."


def start_from(model: PreTrainedModel, source: str) -> list[str]:
    """Load the weights of another encoder-decoder, and return what the two do not share.

    Raises:
        UserError: It cannot be loaded, is an adapter or of another type, has another shape or another value of a field,
            or lacks weights.
    """
    refuse_adapter(source)
    try:
        loaded, info = AutoModelForSeq2SeqLM.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    except DAMAGED as error:
        raise UserError(f"The model cannot start from {source} ({reason(error)}).") from error
    own, other = model.config, loaded.config
    if names := differences(own, other):
        name = names[0]
        raise UserError(
            f"`model.{name}` is {getattr(own, name)!r}, but {getattr(other, name, None)!r} in {source}, the "
            "`initial_weights`: give it that value."
        )
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    lacking |= {name for name, weight in loaded.named_parameters() if not weight.isfinite().all()}
    if lacking:
        raise UserError(f"{source}, the `initial_weights`, has no finite {min(lacking)}. Save the whole model again.")
    try:
        missing, unused = model.load_state_dict(loaded.state_dict(), strict=False)
    except DAMAGED as error:
        raise UserError(f"The model cannot start from {source} ({reason(error)}).") from error
    found = {"new": set(missing) - set(model.all_tied_weights_keys), "not used": unused}
    return [f"Of `{source}`, {', '.join(sorted(names))} were {kind}." for kind, names in found.items() if names]


def _rows(pairs: EncodedPairs, pad: int, start: int, wait: int | None) -> list[dict[str, Tensor]]:
    """Held-out pairs as rows of one width for the sources, and one for the targets, which have logits."""
    widths = tuple(max(map(len, side)) for side in (pairs.source, pairs.target))
    batches = (pairs.batch([row], pad, start, widths, wait) for row in range(len(pairs.source)))
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]


def inverse_square_root(step: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then falling with the root of the step (Vaswani et al. 2017)."""
    return (step + 1) / warmup if step < warmup else (warmup / (step + 1)) ** 0.5


def unigram_loss(rows: list[dict[str, Tensor]], counts: Tensor) -> float:
    """Cross-entropy in nats of the labels of rows under the frequencies `counts` (vocabulary,), with one added."""
    labels = torch.cat([row["labels"][row["labels"] != IGNORED] for row in rows])
    return -((counts + 1).double() / (counts + 1).sum()).log()[labels].mean().item()
