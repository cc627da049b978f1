"""The engine of the pretraining scripts: from a recipe and an objective to a folder that is ready for the Hub."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from common.models import (
    MASKED,
    ModelKind,
    load_config,
    load_encoder,
    load_tokenizer,
    longest_input,
    make_config,
    model_fields,
)
from data.corpus import Corpus, open_corpus
from data.prepare import PreparedText, prepare_text
from data.rows import Plan
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils.logging import disable_progress_bar

from engine.card import PLOT, count, machine
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
from engine.groups import check_groups, parameter_groups
from engine.loop import (
    Evaluation,
    Run,
    RunLog,
    evaluate,
    make_accelerator,
    split_update,
    train,
    warmup_then_decay,
)
from engine.objective import Objective
from engine.output import clear_output, find_checkpoint, push, reserve_repository, save_model
from engine.recipe import RunRecipe
from engine.sharding import prepare_model
from engine.throughput import peak_flops
from luna_hf.scripting import UserError, portable, portable_command, write_json, write_text

# ---- what is run ----


def adapt_to_overrides(values: dict[str, Any], overrides: dict[str, Any], kind: ModelKind = MASKED) -> None:
    """Take out of the file's values what an override on the command line contradicts, and say so."""
    model = values.get("model") if isinstance(values.get("model"), dict) else {}
    if overrides.get("model_name_or_path"):
        if model:
            given = [f"{key[6:]}={value}" for key, value in overrides.items() if key.startswith("model.")]
            but = f" But for {', '.join(given)}, as given on the command line." if given else ""
            print(f"The file's model section is left out: {overrides['model_name_or_path']} has its own config.{but}")
        values["model"] = {}
        overrides.setdefault("train_tokenizer", False)
    elif overrides.get("model.model_type", model.get("model_type")) != model.get("model_type"):
        model_type = overrides["model.model_type"]
        unknown = sorted(set(model) - model_fields(model_type, kind) - {"model_type"})
        if unknown:
            print(
                f"Left out of the recipe's model section, since {model_type} has no such field: {', '.join(unknown)}."
            )
        values["model"] = {name: value for name, value in model.items() if name not in unknown}
    if "tokenizer" in overrides:
        overrides.setdefault("train_tokenizer", False)
    elif overrides.get("train_tokenizer") is True:
        values["tokenizer"] = ""


def check_model(recipe: RunRecipe, objective: Objective) -> list[str]:
    """Raise the errors of the recipe's model before anything is read or written.

    Returns:
        What the user should know about the tokenizer.

    Raises:
        UserError: See `models`, `groups` and `Objective.check_tokenizer`; or blocks that are longer than a new model's
            positions.
    """
    kind = objective.kind
    if recipe.model_name_or_path:
        config = load_config(recipe.model_name_or_path, kind=kind)
        tokenizer, notes = named_tokenizer(recipe, objective, config)
        objective.check_tokenizer(recipe, tokenizer, max(recipe.block_size, longest_input(config)))
        check_groups(parameter_names(config, kind), recipe.groups, recipe.max_steps)
        return notes
    tokenizer, notes = named_tokenizer(recipe, objective) if recipe.tokenizer else (None, [])
    config = make_config(recipe.model, tokenizer, len(tokenizer) if tokenizer else recipe.vocab_size, kind)
    if recipe.block_size > longest_input(config):
        raise UserError(
            f"`block_size` is {recipe.block_size}, but the model takes at most {longest_input(config)} tokens. Lower "
            f"`block_size`, or raise `model.max_position_embeddings` (now {config.max_position_embeddings})."
        )
    if tokenizer:
        objective.check_tokenizer(recipe, tokenizer, longest_input(config))
    check_groups(parameter_names(config, kind), recipe.groups, recipe.max_steps)
    return notes


def named_tokenizer(
    recipe: RunRecipe, objective: Objective, config: PreTrainedConfig | None = None
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The recipe's tokenizer, or the checkpoint's, as the objective needs it, and what was changed.

    Raises:
        UserError: See `load_tokenizer` and `Objective.adapt_tokenizer`.
    """
    name = recipe.tokenizer or recipe.model_name_or_path
    tokenizer = load_tokenizer(name, config, padded=objective.kind is MASKED)
    return objective.adapt_tokenizer(tokenizer, portable(name), new_model=config is None)


def parameter_names(config: PreTrainedConfig, kind: ModelKind = MASKED) -> list[str]:
    """The parameters of a model, which is not made for that."""
    with torch.device("meta"):
        return [name for name, _ in kind.auto_class.from_config(config).named_parameters()]


def make_model(
    recipe: RunRecipe, tokenizer: PreTrainedTokenizerBase | None, kind: ModelKind
) -> tuple[PreTrainedModel, list[str]]:
    """The model to train, new or from a checkpoint, and what the user should know about it.

    Raises:
        UserError: See `models.load_encoder` and `models.make_config`.
    """
    if recipe.model_name_or_path:
        overrides = dict(recipe.model)
        if kind is MASKED and hasattr(load_config(recipe.model_name_or_path), "sparse_prediction"):
            overrides.setdefault("sparse_prediction", True)
        return load_encoder(kind.auto_class, recipe.model_name_or_path, length=recipe.block_size, **overrides)
    return kind.auto_class.from_config(make_config(recipe.model, tokenizer, len(tokenizer), kind)), []


class Start(NamedTuple):
    """A model before its first update: itself, what is called with a batch, and what the user should know about it."""

    model: PreTrainedModel
    module: torch.nn.Module
    notes: list[str]


def make_start(
    recipe: RunRecipe,
    objective: Objective,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Start:
    """The model to train and what the objective needs, all of it read; `tokenizer` is for a new model.

    Raises:
        UserError: See `make_model` and `Objective.make_module`.
    """
    set_seed(recipe.seed)
    model, notes = make_model(recipe, tokenizer, objective.kind)
    return Start(model, objective.make_module(model, recipe, accelerator), notes)


# ---- the run ----


def make_tokenizer(
    recipe: RunRecipe, objective: Objective, accelerator: Accelerator, corpus: Corpus, folder: Path, resumed: bool
) -> PreTrainedTokenizerBase:
    """Train or load the tokenizer, and save it in `folder`; a resumed run reads it from there.

    Raises:
        UserError: See `Objective.check_tokenizer`.
    """
    kind = objective.kind
    if accelerator.is_main_process and not resumed:
        if recipe.train_tokenizer:
            longest = longest_input(make_config(recipe.model, None, recipe.vocab_size, kind))
            tokenizer = objective.train_tokenizer(corpus.training_documents(), recipe.vocab_size, longest)
            if len(tokenizer) < recipe.vocab_size:
                accelerator.print(f"The text has pairs for only {len(tokenizer):,} of {recipe.vocab_size:,} tokens.")
        else:
            config = load_config(recipe.model_name_or_path, kind=kind) if recipe.model_name_or_path else None
            tokenizer, _ = named_tokenizer(recipe, objective, config)
            if config:
                longest = max(recipe.block_size, longest_input(config))
            else:
                longest = longest_input(make_config(recipe.model, tokenizer, len(tokenizer), kind))
            tokenizer.model_max_length = VERY_LARGE_INTEGER if math.isinf(longest) else longest
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()
    tokenizer = load_tokenizer(str(folder))
    objective.check_tokenizer(recipe, tokenizer, tokenizer.model_max_length)  # one that was trained has just been made
    return tokenizer


def pretrain(recipe: RunRecipe, command: str, objective: Objective) -> dict[str, Any] | None:
    """Run a recipe, or go on with it, and return the figures of `metrics.json`; `None` if stopped by a signal.

    Args:
        recipe: what to run.
        command: for the card.
        objective: what to minimise.

    Raises:
        UserError: See the functions that are called.
    """
    accelerator = make_accelerator(recipe)
    micro_batch, passes = split_update(recipe.update_rows, recipe.batch_size, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = passes
    plan = Plan(micro_batch, passes, accelerator.num_processes, accelerator.process_index)
    # Mistakes are told before the folder, with perhaps an earlier model in it, is touched.
    objective.check(recipe)
    notes = check_model(recipe, objective)
    corpus = open_corpus(recipe)
    accelerator.print(f"Read {corpus.description}.")
    # Here a damaged file is found; a new model needs the tokenizer first. Every process reads for itself.
    start = make_start(recipe, objective, accelerator) if recipe.model_name_or_path else None
    found = find_checkpoint(recipe, accelerator.print)
    folder = Path(recipe.output_dir)
    repository = reserve_repository(recipe) if recipe.push_to_hub and accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_unfinished(folder) if found else clear_output(folder)
    tokenizer = make_tokenizer(recipe, objective, accelerator, corpus, folder, resumed=found is not None)
    text = prepare_text(recipe, corpus, tokenizer, accelerator, objective.row_format(recipe, tokenizer))

    stop = StopRequest()
    start = start or make_start(recipe, objective, accelerator, text.tokenizer)
    start.notes[:0] = notes
    run, counters, parameters = prepare_run(recipe, objective, accelerator, plan, text, start, found, stop)
    announce(recipe, objective, accelerator, text, parameters, plan, counters)
    with stop:  # before and after training a signal loses nothing, and does what it always does
        last = train(run, counters)
    if last is None:
        accelerator.print(
            f"Stopped by {stop.name or 'request'} after step {counters.step:,} of {recipe.max_steps:,}; everything "
            f"is saved in {checkpoints(folder)[-1]}. The same command goes on from there."
        )
        accelerator.end_training()
        return None
    figures = finish(run, objective, text, counters, last, parameters, command)
    accelerator.end_training()
    if repository is not None:
        push(recipe, folder, repository)
        print(f"Pushed to {repository}.")
    return figures


def prepare_run(
    recipe: RunRecipe,
    objective: Objective,
    accelerator: Accelerator,
    plan: Plan,
    text: PreparedText,
    start: Start,
    found: Path | None,
    stop: StopRequest,
) -> tuple[Run, Counters, int]:
    """Model, optimizer and schedule, new or from a checkpoint: the run, where it stands, and the parameter count."""
    model, module, notes = start
    if recipe.model_name_or_path and not recipe.validation:
        notes.append(
            "The held-out documents are drawn anew: if the checkpoint was trained on this text, it has seen them. Name "
            "a `validation` text to be sure."
        )
    for note in notes:
        accelerator.print(note)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sample = {name: tensor.unsqueeze(0) for name, tensor in text.held_out[0].items()}
    flops_per_token = objective.flops_per_token(module, sample)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if recipe.compile:
        model.compile()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay, recipe.learning_rate, recipe.groups, recipe.max_steps),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
    )
    scheduler = warmup_then_decay(optimizer, recipe.max_steps, recipe.warmup_fraction, recipe.decay_power)
    accelerator.register_for_checkpointing(scheduler)
    module, optimizer = prepare_model(accelerator, module, optimizer, recipe, plan.micro_batch)
    trained = objective.trained(module, accelerator)
    peak, peak_source = peak_flops(accelerator.device, recipe.mixed_precision)
    # The weights are the same in every process; dropout from here on is not. No random number may be drawn between
    # here and the loop, or a resumed run would draw others.
    set_seed(recipe.seed, device_specific=True)

    counters = Counters(processes=accelerator.num_processes)
    if found:
        text.rows.load_state_dict(load_checkpoint(accelerator, found))
        counters = read_state(found)[0]
    log = RunLog(Path(recipe.output_dir) / "log.jsonl", accelerator.is_main_process, counters.step if found else None)
    if found:
        log.add("resumed", counters.step)
        accelerator.print(f"Going on from {found}: step {counters.step:,} of {recipe.max_steps:,}.")
    if recipe.trackers:
        flat = {key: value for key, value in dataclasses.asdict(recipe).items() if isinstance(value, int | float | str)}
        accelerator.init_trackers(recipe.model_name, config=flat)
    accelerator.print(f"MFU counts from a peak of {peak / 1e12:.2f} TFLOP/s a process ({peak_source}).")

    def look_at_attention() -> dict[str, Any] | None:
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            return None  # the parameters are in shards
        return objective.probe(accelerator.unwrap_model(trained), probe_batch(text, accelerator))

    def save(counters: Counters) -> None:
        save_checkpoint(
            accelerator,
            Path(recipe.output_dir),
            counters,
            dataclasses.asdict(recipe),
            text.rows.state_dict(),
            recipe.save_total_limit,
        )

    run = Run(
        recipe=recipe,
        accelerator=accelerator,
        model=module,
        optimizer=optimizer,
        scheduler=scheduler,
        updates=text.rows.updates(plan, counters.step),
        evaluate=lambda: evaluate(accelerator, trained, text.held_out, recipe.batch_size, objective.next_token),
        targets=objective.targets,
        measure=lambda: objective.measure(module, accelerator, text.held_out, recipe.batch_size),
        probe=look_at_attention,
        save=save,
        stop_requested=lambda: stop.name is not None,
        log=log,
        evaluate_first=bool(recipe.model_name_or_path),
        unigram_loss=text.unigram["loss"],
        flops_per_token=flops_per_token,
        peak_flops=peak,
        notes=notes,
        plateau_gain=objective.plateau_gain,
    )
    return run, counters, parameters


def probe_batch(text: PreparedText, accelerator: Accelerator, rows: int = 8) -> dict[str, torch.Tensor]:
    """The first held-out rows, to look at attention with."""
    names = ("input_ids", "attention_mask")
    return {name: torch.stack([row[name] for row in text.held_out[:rows]]).to(accelerator.device) for name in names}


def finish(
    run: Run,
    objective: Objective,
    text: PreparedText,
    counters: Counters,
    last: Evaluation,
    parameters: int,
    command: str,
) -> dict[str, Any]:
    """Save the model, evaluate the files, and write plot, card and figures; then the checkpoints go.

    Raises:
        RuntimeError: The saved model is not the trained one.
    """
    recipe, accelerator, folder = run.recipe, run.accelerator, Path(run.recipe.output_dir)
    save_model(accelerator, objective.trained(run.model, accelerator), folder)
    # The figures are those of the files: whatever saving loses would show here.
    reloaded = objective.kind.auto_class.from_pretrained(folder).to(accelerator.device)
    result = evaluate(accelerator, reloaded, text.held_out, recipe.batch_size, objective.next_token)
    if not math.isclose(result.loss, last.loss, rel_tol=1e-2):  # room for mixed precision, which the files are not in
        raise RuntimeError(f"The saved model has a loss of {result.loss:.4f}, but the trained one had {last.loss:.4f}.")
    longest = longest_input(reloaded.config)
    figures = {
        "held_out_loss": result.loss,
        "held_out_perplexity": result.perplexity,
        "held_out_accuracy": result.accuracy,
        "held_out_targets": result.targets,
        "unigram_loss": text.unigram["loss"],
        "unigram_accuracy": text.unigram["accuracy"],
        "gain_nats": text.unigram["loss"] - result.loss,
        "training_seconds": counters.seconds,
        "parameters": parameters,
        **text.facts,
        "longest_input": None if math.isinf(longest) else longest,
        "model_type": reloaded.config.model_type,
        "seen_tokens": counters.seen_tokens,
        "skipped_updates": counters.skipped,
        "mfu": run.log.series("train", "mfu")[1][-1],
        "processes": accelerator.num_processes,
        "start": objective.start(recipe),
        "notes": run.notes,
        "command": command,
        **machine(),
    }
    if measured := [entry for entry in run.log.entries if entry["kind"] == "objective"]:
        figures["objective"] = {name: value for name, value in measured[-1].items() if name != "kind"}
    if accelerator.is_main_process:
        figures |= objective.samples(reloaded, AutoTokenizer.from_pretrained(folder), recipe)
        objective.plot(run.log, text.unigram["loss"], folder / PLOT)
        write_text(folder / "README.md", objective.card(recipe, figures))
        # Written last but for the checkpoints: a run that has it is finished.
        write_json(folder / "metrics.json", figures)
        report(figures, recipe.output_dir, objective)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_all(folder)
    return figures


def announce(
    recipe: RunRecipe,
    objective: Objective,
    accelerator: Accelerator,
    text: PreparedText,
    parameters: int,
    plan: Plan,
    counters: Counters,
) -> None:
    """Print what is about to run."""
    name, facts = recipe.model_name_or_path or recipe.model["model_type"], text.facts
    accelerator.print(
        f"{count(facts['training_documents'])} documents to train on, {count(facts['held_out_documents'])} held out; "
        f"{count(facts['training_tokens'])} tokens of a vocabulary of {len(text.tokenizer):,}, in "
        f"{count(facts['training_blocks'])} blocks of {recipe.block_size}; {facts['evaluated_blocks']:,} of "
        f"{count(facts['held_out_blocks'])} held-out blocks are evaluated.\n"
        f"{name} with {parameters:,} parameters; {recipe.max_steps - counters.step:,} steps to go, of "
        f"{recipe.update_rows} blocks ({recipe.global_batch_tokens:,} tokens): {plan.accumulation} pass(es) of "
        f"{plan.micro_batch} on each of {plan.processes} process(es), {accelerator.device}, "
        f"{torch.get_num_threads()} thread(s).\n"
        f"Unigram baseline on {text.unigram['targets']:,} held-out {objective.targets_name}: "
        f"{text.unigram['loss']:.3f} nats."
    )


def report(figures: dict[str, Any], folder: str, objective: Objective) -> None:
    """Print what was reached, and what the model answers."""
    print(f"\nLoaded back from {folder}; held-out {objective.targets_name}: {figures['held_out_targets']:,}")
    print(f"  model            loss {figures['held_out_loss']:.3f}  accuracy {figures['held_out_accuracy']:.1%}")
    print(f"  unigram baseline loss {figures['unigram_loss']:.3f}  accuracy {figures['unigram_accuracy']:.1%}")
    print(f"  gain {figures['gain_nats']:.3f} nats after {figures['training_seconds']:.0f} s of training")
    objective.show_samples(figures)


def command_line(
    script: str,
    description: str,
    recipe_class: type[RunRecipe],
    arguments: list[str],
    run: Callable[[str, list[str], str], tuple[RunRecipe, dict[str, Any] | None]],
) -> int:
    """Run a recipe from the command line.

    Args:
        script: its path from the repository root.
        description: for the help.
        recipe_class: what recipes of the script say.
        arguments: words after the script.
        run: called with the recipe's path, the overrides, and the whole command; returns the recipe and the figures.

    Returns:
        The exit status: 1 when the recipe's gain is missed, 2 for a mistake of the user, 130 for an interruption.
    """
    keys = ", ".join(field.name for field in dataclasses.fields(recipe_class))
    parser = argparse.ArgumentParser(
        description=description, epilog=f"Keys: {keys}.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help=f"YAML file, see training/recipes/{Path(script).stem}")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="--key value, for any key of the recipe")
    parsed = parser.parse_args(arguments)
    disable_progress_bar()  # of transformers: the bars of loading and saving a small file say nothing
    try:
        recipe, figures = run(parsed.recipe, parsed.overrides, portable_command(["python", script, *arguments]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from the last checkpoint, if there is one.", file=sys.stderr)
        return 130
    if figures is not None and figures["gain_nats"] < recipe.min_gain_nats:
        print(
            f"The gain over the unigram baseline is {figures['gain_nats']:.3f} nats, but the recipe asks for "
            f"{recipe.min_gain_nats} (`min_gain_nats`). Train longer (`max_steps`), or on more text.",
            file=sys.stderr,
        )
        return 1
    return 0
