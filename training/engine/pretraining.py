"""A pretraining run: from a recipe and an objective to a folder that is ready for the Hub."""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.hub import push_folder
from common.machine import machine, plural
from common.models import load_tokenizer, longest_input
from data.corpus import Corpus, open_corpus
from data.prepare import PreparedText, prepare_text
from data.rows import Plan
from transformers import AutoTokenizer

from engine.card import PLOT, count
from engine.checkpoint import (
    Counters,
    StopRequest,
    load_checkpoint,
    read_state,
    remove_all,
    remove_unfinished,
    save_checkpoint,
)
from engine.groups import parameter_groups
from engine.loop import (
    Evaluation,
    Run,
    evaluate,
    make_accelerator,
    split_update,
    switched_losses,
    train,
    utilisation,
    warmup_then_decay,
)
from engine.objective import PretrainingObjective
from engine.output import (
    changed_inputs,
    clear_output,
    find_checkpoint,
    fingerprint_inputs,
    held,
    on_main,
    save_model,
)
from engine.recipe import RunRecipe
from engine.setup import Opened, close_trackers, make_optimizer, reserve, start_log, stopped
from engine.sharding import prepare_model
from engine.start import Choice, Start, choose, make_start, write_tokenizer
from engine.throughput import peak_flops
from luna_hf.scripting import portable, write_json, write_text


def pretrain(recipe: RunRecipe, command: str, objective: PretrainingObjective) -> dict[str, Any] | None:
    """Start or resume a run; `command` is the command line for the card. The caller parts the processes at the end.

    Returns:
        The content of `metrics.json`; `None` if a signal stopped the run.

    Raises:
        UserError: A mistake in the recipe, a folder or a text; where possible before anything is written.
    """
    accelerator = make_accelerator(recipe)
    micro_batch, passes = split_update(recipe.update_rows, recipe.batch_size, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = passes
    plan = Plan(micro_batch, passes, accelerator.num_processes, accelerator.process_index)
    # Whatever can be wrong is checked before the folder, which may hold an earlier model, is changed.
    objective.check(recipe)
    choice, folder = choose(recipe, objective), Path(recipe.output_dir)
    with held(accelerator, folder):
        found = on_main(accelerator, lambda: find_checkpoint(recipe, print))
        corpus = open_corpus(recipe)
        accelerator.print(f"Read {corpus.description}.")
        # Loading finds damaged files. A new model needs the tokenizer first.
        start = make_start(recipe, objective, accelerator) if recipe.model_name_or_path else None
        repository = on_main(accelerator, lambda: reserve(recipe))
        opened = on_main(accelerator, lambda: open_folder(recipe, objective, choice, corpus, found))
        tokenizer = load_tokenizer(str(folder))
        objective.check_tokenizer(recipe, tokenizer, tokenizer.model_max_length)  # it may have just been trained
        text = prepare_text(recipe, corpus, tokenizer, accelerator, objective.row_format(recipe, tokenizer))
        start = start or make_start(recipe, objective, accelerator, text.tokenizer)
        start.notes[:0] = choice.notes
        run, counters = prepare_run(recipe, objective, accelerator, plan, text, start, opened)
        with run.stop:  # before and after training nothing can be lost, and signals have their usual effect
            last = train(run, counters)
        if last is None:
            accelerator.print(stopped(run, counters))
            close_trackers(accelerator)
            return None
        figures = finish(run, text, counters, last, command)
        close_trackers(accelerator)
        if repository and accelerator.is_main_process:
            push_folder(folder, repository, "Pretrained model", ignore=["checkpoints/**", f"{recipe.model_name}/**"])
            print(f"Pushed to {repository}.")
    return figures


def open_folder(
    recipe: RunRecipe, objective: PretrainingObjective, choice: Choice, corpus: Corpus, found: Path | None
) -> Opened:
    """Clean the output folder, and give a run that starts its tokenizer.

    Raises:
        UserError: Inputs have changed since the checkpoint `found`, or a text cannot be read.
    """
    folder = Path(recipe.output_dir)
    if found:
        remove_unfinished(folder)
    else:
        clear_output(folder)
        write_tokenizer(recipe, objective, choice, corpus.training_documents(), folder)
    inputs = fingerprint_inputs(recipe, corpus)
    return Opened(found, inputs, changed_inputs(recipe, found, inputs) if found else [])


def prepare_run(
    recipe: RunRecipe,
    objective: PretrainingObjective,
    accelerator: Accelerator,
    plan: Plan,
    text: PreparedText,
    start: Start,
    opened: Opened,
) -> tuple[Run, Counters]:
    """Model, optimizer and schedule, new or from a checkpoint, and the run's progress.

    Raises:
        UserError: The checkpoint cannot be loaded, or the backend cannot follow the recipe.
    """
    model, module, notes = start
    for note in notes:
        accelerator.print(note)
    sample = {name: tensor.unsqueeze(0) for name, tensor in text.held_out[0].items()}
    flops_per_token = objective.flops_per_token(module, sample)
    if recipe.gradient_checkpointing:  # by the name that the installed transformers has for it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if recipe.compile:
        objective.compile(model, module)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    groups = parameter_groups(model, recipe.weight_decay, recipe.learning_rate, recipe.groups, recipe.max_steps)
    optimizer = make_optimizer(recipe, groups, accelerator.device)
    scheduler = warmup_then_decay(optimizer, recipe.max_steps, recipe.warmup_fraction, recipe.decay_power)
    accelerator.register_for_checkpointing(scheduler)
    module, optimizer = prepare_model(accelerator, module, optimizer, recipe, plan.micro_batch)
    peak, peak_source = peak_flops(accelerator.device, recipe.mixed_precision)
    # Weights are the same in every process, dropout is not. Between here and the loop no random number may be drawn,
    # or a resumed run would draw others.
    set_seed(recipe.seed, device_specific=True)

    counters, folder = Counters(processes=accelerator.num_processes), Path(recipe.output_dir)
    if found := opened.found:
        text.rows.load_state_dict(load_checkpoint(accelerator, found))
        counters = read_state(found)[0]
    log = start_log(recipe, accelerator, counters, opened)
    record = {"recipe": dataclasses.asdict(recipe), "inputs": opened.inputs}
    text.facts["inputs_fingerprint"] = hashlib.blake2b(
        " ".join(sorted(opened.inputs.values())).encode(), digest_size=16
    ).hexdigest()

    def save(counters: Counters) -> None:
        counters.logged = len(log.entries)
        save_checkpoint(accelerator, folder, counters, record, text.rows.state_dict(), recipe.save_total_limit)

    run = Run(
        recipe=recipe,
        objective=objective,
        accelerator=accelerator,
        module=module,
        optimizer=optimizer,
        scheduler=scheduler,
        updates=text.rows.updates(plan, counters.step),
        held_out=text.held_out,
        save=save,
        stop=StopRequest(),
        log=log,
        unigram_loss=text.unigram["loss"],
        flops_per_token=flops_per_token,
        peak_flops=peak,
        notes=notes,
    )
    announce(run, text, plan, counters, parameters, f"{peak / 1e12:.2f} TFLOP/s ({peak_source})")
    return run, counters


def announce(run: Run, text: PreparedText, plan: Plan, counters: Counters, parameters: int, peak: str) -> None:
    """Print what is about to run."""
    recipe, facts = run.recipe, text.facts
    run.accelerator.print(
        f"Documents: {count(facts['training_documents'])} for training, {count(facts['held_out_documents'])} held out. "
        f"Vocabulary: {len(text.tokenizer):,}.\n"
        f"Text: {count(facts['training_tokens'])} tokens in {count(facts['training_blocks'])} blocks of "
        f"{recipe.block_size}; {facts['evaluated_blocks']:,} of {count(facts['held_out_blocks'])} held-out blocks are "
        "evaluated.\n"
        f"Model: {recipe.model_name_or_path or recipe.model['model_type']}, {parameters:,} parameters.\n"
        f"Steps: {recipe.max_steps - counters.step:,} to go, each of {recipe.update_rows} blocks "
        f"({recipe.global_batch_tokens:,} tokens): {plural(plan.accumulation, 'pass', 'passes')} of {plan.micro_batch} "
        f"on each of {plural(plan.processes, 'process', 'processes')}.\n"
        f"Device: {run.accelerator.device}, {plural(torch.get_num_threads(), 'thread')}; peak {peak} per process. "
        'Below, "mfu" (model FLOPs utilisation) is the share of the peak that the model uses.\n'
        f"Unigram baseline on {text.unigram['targets']:,} held-out {run.objective.targets_name}: "
        f"{text.unigram['loss']:.3f} nats."
    )


def finish(run: Run, text: PreparedText, counters: Counters, last: Evaluation, command: str) -> dict[str, Any]:
    """Save the model, evaluate its files, write plot, card and figures, and remove the checkpoints.

    Raises:
        RuntimeError: The saved model is not the trained one.
    """
    recipe, objective, accelerator, folder = run.recipe, run.objective, run.accelerator, Path(run.recipe.output_dir)
    save_model(accelerator, run.trained, folder)
    # The figures are those of the saved files, so that whatever saving loses shows in them.
    reloaded = objective.kind.auto_class.from_pretrained(folder).to(accelerator.device)
    result = evaluate(accelerator, reloaded, text.held_out, recipe.batch_size, objective.next_token)
    if not math.isclose(result.loss, last.loss, rel_tol=1e-2):  # allows for mixed precision, which the files lack
        raise RuntimeError(f"The saved model has a loss of {result.loss:.4f}, but the trained one had {last.loss:.4f}.")
    longest = longest_input(reloaded.config)
    changes = [
        f"Continued from step {entry['step']:,} on data that had changed: {', '.join(map(portable, entry['changed']))}."
        for entry in run.log.entries
        if entry.get("changed")
    ]
    figures = {
        **{f"held_out_{name}": value for name, value in dataclasses.asdict(result).items()},
        **switched_losses(accelerator, reloaded, text.held_out, recipe.batch_size, objective.next_token),
        "unigram_loss": text.unigram["loss"],
        "unigram_accuracy": text.unigram["accuracy"],
        "gain_nats": text.unigram["loss"] - result.loss,
        "training_seconds": counters.seconds,
        "parameters": sum(parameter.numel() for parameter in reloaded.parameters()),
        **text.facts,
        "longest_input": None if math.isinf(longest) else longest,
        "model_type": reloaded.config.model_type,
        "seen_tokens": counters.seen_tokens,
        "skipped_updates": counters.skipped,
        "mfu": utilisation(run, counters.seen_tokens / counters.seconds),
        "processes": accelerator.num_processes,
        "start": objective.start(recipe),
        "notes": [*run.notes, *changes],
        "command": command,
        **machine(),
    }
    if measured := [entry for entry in run.log.entries if entry["kind"] == "objective"]:
        figures["objective"] = {name: value for name, value in measured[-1].items() if name != "kind"}
    if accelerator.is_main_process:
        figures |= objective.samples(reloaded, AutoTokenizer.from_pretrained(folder), recipe)
        objective.plot(run.log, text.unigram["loss"], folder / PLOT)
        write_text(folder / "README.md", objective.card(recipe, figures))
        write_json(folder / "metrics.json", figures)  # a run that has this file is finished
        report(figures, recipe.output_dir, objective)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_all(folder)
    return figures


def report(figures: dict[str, Any], folder: str, objective: PretrainingObjective) -> None:
    """Print the results and samples."""
    print(f"\nReloaded from {folder}; held-out {objective.targets_name}: {figures['held_out_targets']:,}")
    print(f"  model            loss {figures['held_out_loss']:.3f}  accuracy {figures['held_out_accuracy']:.1%}")
    print(f"  unigram baseline loss {figures['unigram_loss']:.3f}  accuracy {figures['unigram_accuracy']:.1%}")
    print(f"  gain {figures['gain_nats']:.3f} nats after {figures['training_seconds']:.0f} s of training")
    print(objective.samples_text(figures))
