"""A translation run: from a recipe to a folder that is ready for the Hub."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.hub import push_folder
from common.machine import machine, plural
from common.models import SEQ2SEQ, load_tokenizer, make_config
from data.tokenizer import ending
from engine.checkpoint import (
    Counters,
    StopRequest,
    checkpoints,
    load_checkpoint,
    read_state,
    remove_all,
    remove_unfinished,
    save_checkpoint,
)
from engine.groups import parameter_groups
from engine.loop import Evaluation, Run, evaluate, make_accelerator, train
from engine.output import (
    changed_inputs,
    clear_output,
    find_checkpoint,
    fingerprint_tokenizer,
    held,
    on_main,
    save_model,
)
from engine.setup import Opened, close_trackers, make_optimizer, reserve, start_log, stopped
from engine.sharding import prepare_model
from engine.throughput import peak_flops
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from luna_hf.scripting import TOKENIZER_FILES, UserError, write_json, write_text
from translation.card import PLOT, make_card
from translation.objective import TranslationObjective, inverse_square_root, unigram_loss
from translation.pairs import (
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
from translation.scores import average, evaluate_split, search


def run(recipe: TranslationRecipe, command: str) -> dict[str, Any] | None:
    """Start or resume a run; `command` is the command line for the card.

    Returns:
        The content of `metrics.json`; `None` if a signal stopped the run.

    Raises:
        UserError: A mistake in the recipe, a folder or a text; where possible before anything is written.
    """
    accelerator = make_accelerator(recipe)
    accelerator.gradient_accumulation_steps = recipe.accumulation
    folder = Path(recipe.output_dir)
    tokenizer = ending(load_tokenizer(recipe.tokenizer)) if recipe.tokenizer else None
    config = make_config(recipe.model, tokenizer, len(tokenizer) if tokenizer else recipe.vocab_size, SEQ2SEQ)
    limit = getattr(config, "max_position_embeddings", math.inf)
    if recipe.max_length > limit:
        raise UserError(f"`max_length` is {recipe.max_length}, but the model takes at most {limit} tokens.")
    splits = {name: read_pairs(recipe, name) for name in (recipe.train_split, recipe.validation_split)}
    if recipe.test_split:
        splits["test"] = read_pairs(recipe, recipe.test_split)
    with held(accelerator, folder):
        found = on_main(accelerator, lambda: find_checkpoint(recipe, print))
        repository = on_main(accelerator, lambda: reserve(recipe))
        opened = on_main(accelerator, lambda: _open(recipe, found, tokenizer, splits))
        stored = load_tokenizer(str(folder))
        tokenizer = ending(stored)
        if recipe.test_split:
            check_sources(splits["test"], tokenizer, limit)
        run, counters = _prepare(recipe, accelerator, tokenizer, splits, opened)
        with run.stop:
            last = train(run, counters)
        if last is None:
            accelerator.print(stopped(run, counters))
            close_trackers(accelerator)
            return None
        figures = _finish(run, tokenizer, splits, counters, command)
        if tokenizer is not stored and accelerator.is_main_process:  # of a run that an earlier version began
            tokenizer.save_pretrained(folder)
        close_trackers(accelerator)
        if repository and accelerator.is_main_process:
            push_folder(folder, repository, "Translation model", ignore=["checkpoints/**", f"{recipe.model_name}/**"])
            print(f"Pushed to {repository}.")
    return figures


def _open(
    recipe: TranslationRecipe,
    found: Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    splits: dict[str, Pairs],
) -> Opened:
    """Clean the output folder, and give a run that starts its tokenizer."""
    folder = Path(recipe.output_dir)
    if found:
        remove_unfinished(folder)
    else:
        clear_output(folder)
        for name in TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
        tokenizer = tokenizer or joint_tokenizer(splits[recipe.train_split], recipe.vocab_size, recipe.max_length)
        tokenizer.save_pretrained(folder)
    inputs = {f"{recipe.data} ({name})": pairs.digest() for name, pairs in splits.items()}
    inputs |= fingerprint_tokenizer(folder)
    return Opened(found, inputs, changed_inputs(recipe, found, inputs) if found else [])


def _prepare(
    recipe: TranslationRecipe,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, Pairs],
    opened: Opened,
) -> tuple[Run, Counters]:
    """Model, optimizer and schedule, new or from a checkpoint, and the run's progress."""
    objective, folder = TranslationObjective(), Path(recipe.output_dir)
    training = encode_pairs(splits[recipe.train_split], tokenizer, recipe.max_length, leave_out=True)
    held_out = encode_pairs(splits[recipe.validation_split], tokenizer, recipe.max_length, leave_out=False)
    set_seed(recipe.seed)
    model = AutoModelForSeq2SeqLM.from_config(make_config(recipe.model, tokenizer, len(tokenizer), SEQ2SEQ))
    start, pad = model.config.decoder_start_token_id, tokenizer.pad_token_id
    rows = _rows(held_out, pad, start)
    module = objective.make_module(model, recipe, accelerator)
    flops = objective.flops_per_token(module, held_out.batch([held_out.lengths.argmax()], pad, start))
    groups = parameter_groups(model, recipe.weight_decay)
    optimizer = make_optimizer(recipe, groups, accelerator.device)
    scheduler = LambdaLR(optimizer, lambda step: inverse_square_root(step, recipe.warmup_steps))
    accelerator.register_for_checkpointing(scheduler)
    module, optimizer = prepare_model(accelerator, module, optimizer, recipe, 1)
    peak, _ = peak_flops(accelerator.device, recipe.mixed_precision)
    order = Order(
        recipe.batch_tokens, recipe.accumulation, accelerator.num_processes, accelerator.process_index, recipe.seed
    )
    # Between here and the loop no random number may be drawn, or a resumed run would draw others.
    set_seed(recipe.seed, device_specific=True)
    counters = Counters(processes=accelerator.num_processes)
    if opened.found:
        load_checkpoint(accelerator, opened.found)
        counters = read_state(opened.found)[0]
    log = start_log(recipe, accelerator, counters, opened)
    record = {"recipe": dataclasses.asdict(recipe), "inputs": opened.inputs}

    def save(counters: Counters) -> None:
        counters.logged = len(log.entries)
        save_checkpoint(accelerator, folder, counters, record, {}, recipe.save_total_limit)

    notes = [f"{training.left_out:,} training pairs of more than {recipe.max_length} tokens were left out."]
    run = Run(
        recipe=recipe,
        objective=objective,
        accelerator=accelerator,
        module=module,
        optimizer=optimizer,
        scheduler=scheduler,
        updates=updates(training, order, pad, start, counters.step),
        held_out=rows,
        save=save,
        stop=StopRequest(),
        log=log,
        unigram_loss=unigram_loss(rows, _counts(training, len(tokenizer))),
        flops_per_token=flops,
        peak_flops=peak,
        notes=notes if training.left_out else [],
    )
    batches, processes = plural(recipe.accumulation, "batch", "batches"), accelerator.num_processes
    accelerator.print(
        f"Pairs: {len(training.source):,} for training, {len(held_out.source):,} held out. Vocabulary: "
        f"{len(tokenizer):,}.\nModel: {recipe.model['model_type']}, {model.num_parameters():,} parameters.\n"
        f"Steps: {recipe.max_steps - counters.step:,} to go, each of {batches} of at most {recipe.batch_tokens:,} "
        f"tokens a side on {plural(processes, 'process', 'processes')}."
    )
    return run, counters


def _rows(pairs: EncodedPairs, pad: int, start: int) -> list[dict[str, Tensor]]:
    """Held-out pairs as rows of one width."""
    width = int(pairs.lengths.max())
    batches = (pairs.batch([row], pad, start, width) for row in range(len(pairs.source)))
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]


def _counts(pairs: EncodedPairs, vocabulary: int) -> Tensor:
    return torch.bincount(torch.cat([torch.from_numpy(ids) for ids in pairs.target]), minlength=vocabulary)


def _finish(
    run: Run, tokenizer: PreTrainedTokenizerBase, splits: dict[str, Pairs], counters: Counters, command: str
) -> dict[str, Any]:
    """Average the last checkpoints, save the model, translate with its files, and write card and figures."""
    recipe, accelerator, folder = run.recipe, run.accelerator, Path(run.recipe.output_dir)
    model = accelerator.unwrap_model(run.trained)
    averaged = checkpoints(folder)[-recipe.average_checkpoints :]
    if len(averaged) > 1:
        weights = {name.removeprefix("model."): tensor for name, tensor in average(averaged).items()}
        own = model.state_dict()
        missing, unexpected = model.load_state_dict({n: t.to(own[n].dtype) for n, t in weights.items()}, strict=False)
        if unexpected or set(missing) - set(model.all_tied_weights_keys):
            raise RuntimeError(f"The checkpoints hold other weights: {missing}, {unexpected}")
    model.generation_config.update(**search(recipe))
    save_model(accelerator, model, folder)
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(folder).to(accelerator.device)
    result: Evaluation = evaluate(accelerator, reloaded, run.held_out, recipe.eval_batch_size)
    figures: dict[str, Any] = {
        **{f"held_out_{name}": value for name, value in dataclasses.asdict(result).items()},
        "unigram_loss": run.unigram_loss,
        "gain_nats": run.unigram_loss - result.loss,
        "training_seconds": counters.seconds,
        "parameters": sum(parameter.numel() for parameter in reloaded.parameters()),
        "model_type": reloaded.config.model_type,
        "seen_tokens": counters.seen_tokens,
        "skipped_updates": counters.skipped,
        "averaged_checkpoints": len(averaged),
        "training_pairs": len(splits[recipe.train_split]),
        "vocabulary": len(tokenizer),
        "notes": run.notes,
        "command": command,
        **machine(),
    }
    if accelerator.is_main_process:
        names = {"validation": recipe.validation_split, **({"test": "test"} if recipe.test_split else {})}
        for name, split in names.items():
            figures[name] = evaluate_split(reloaded, tokenizer, splits[split], recipe.eval_batch_size)
            bleu, chrf = (figures[name][metric]["score"] for metric in ("bleu", "chrf"))
            print(f"{name}: BLEU {bleu:.2f}, chrF {chrf:.2f} on {figures[name]['pairs']:,} pairs")
        run.objective.plot(run.log, run.unigram_loss, folder / PLOT)
        write_text(folder / "README.md", make_card(recipe, figures))
        write_json(folder / "metrics.json", figures)  # a run that has this file is finished
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_all(folder)
    return figures
