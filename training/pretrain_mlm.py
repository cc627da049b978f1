"""Pretrain a masked language model from a recipe, and leave a folder that is ready for the Hub.

    python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml
    python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml --data texts/ --output_dir outputs/mine
    torchrun --nproc_per_node 2 training/pretrain_mlm.py RECIPE.yaml

Every key of the recipe can be overridden by `--key value`, those of its model section by `--model.key value`.
It needs the `train` extra: pip install -e ".[train]"
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from card import PLOT, machine, make_card, plot_loss, portable_command
from data import encode, mask_once, masking, pack, read_corpus, split_documents, train_tokenizer, unigram_baseline
from huggingface_hub.errors import StrictDataclassError
from loop import RunLog, evaluate, make_accelerator, parameter_groups, train, warmup_then_linear
from recipe import PretrainRecipe, UserError, did_you_mean, load_recipe
from torch.utils.data import DataLoader
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
)
from transformers.utils.logging import disable_progress_bar

from luna_hf import FAMILIES
from luna_hf.configuration_base import EncoderConfig

# Fields of a config that the tokenizer decides.
_FROM_TOKENIZER = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"}


def make_config(recipe: PretrainRecipe, vocab_size: int) -> PreTrainedConfig:
    """The recipe's model section as a config, for RoBERTa's special tokens.

    Raises:
        UserError: An unknown model type or field, a value that the config refuses, or blocks that do not fit.
    """
    fields = dict(recipe.model)
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"Unknown `model_type` {model_type!r}. Choose {', '.join(FAMILIES)}, or roberta to compare.")
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])} - _FROM_TOKENIZER
    for name in fields:
        if name in _FROM_TOKENIZER:
            raise UserError(f"`model.{name}` follows from the tokenizer: take it out of the model section.")
        if name not in known:
            raise UserError(f"A {model_type} config has no field `{name}`.{did_you_mean(name, known)}")
    try:
        config = AutoConfig.for_model(
            model_type, vocab_size=vocab_size, pad_token_id=1, bos_token_id=0, eos_token_id=2, **fields
        )
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"Model section of the recipe: {error}") from error
    if recipe.block_size > longest_input(config):
        raise UserError(
            f"`block_size` is {recipe.block_size}, but the model takes at most {longest_input(config)} tokens. Lower "
            f"`block_size`, or raise `model.max_position_embeddings` (now {config.max_position_embeddings})."
        )
    return config


def longest_input(config: PreTrainedConfig) -> int:
    """Tokens that the position table has room for."""
    if isinstance(config, EncoderConfig):
        return config.max_position_embeddings
    return config.max_position_embeddings - config.pad_token_id - 1  # RoBERTa counts the rows up to the pad's too


def prepare_output(recipe: PretrainRecipe) -> Path:
    """Create the output folder; of an earlier run in it, the results go.

    Raises:
        UserError: It is a file, or holds something that must not be overwritten.
    """
    folder = Path(recipe.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"`output_dir` {folder} is a file. Name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not recipe.overwrite_output_dir:
        raise UserError(
            f"`output_dir` {folder} is not empty. Name another (--output_dir FOLDER), or write over what is in it "
            "(--overwrite_output_dir true)."
        )
    # A run that stopped before its first log line has left its tokenizer alone.
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "log.jsonl" not in present and not present <= {"tokenizer.json", "tokenizer_config.json"}:
        raise UserError(
            f"`output_dir` {folder} holds files, but no log.jsonl of an earlier run, so none of them is overwritten. "
            "Name another folder (--output_dir FOLDER)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for result in ("model.safetensors", "metrics.json", "README.md", PLOT):
        # A run that is interrupted must not leave an older model beside its own tokenizer.
        (folder / result).unlink(missing_ok=True)
    return folder


def save(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Write config, weights and code; the tokenizer is there already."""
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str], guesses: int = 3
) -> list[dict[str, Any]]:
    """The most probable tokens for the `<mask>` of each sentence."""
    fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=guesses)
    return [
        {
            "sentence": sentence,
            "guesses": [{"token": row["token_str"], "score": row["score"]} for row in fill_mask(sentence)],
        }
        for sentence in sentences
    ]


@dataclasses.dataclass(frozen=True)
class PreparedText:
    """A corpus, ready for training: tokenizer, blocks, rows with fixed masks to evaluate on, and the baseline there."""

    tokenizer: PreTrainedTokenizerBase
    blocks: list[dict[str, Any]]
    held_out: list[dict[str, torch.Tensor]]
    unigram: dict[str, float]
    facts: dict[str, Any]


def prepare_text(
    recipe: PretrainRecipe,
    accelerator: Accelerator,
    folder: Path,
    corpus: str,
    split: tuple[list[str], list[str]],
) -> PreparedText:
    """Tokenize and pack training and held-out documents; the tokenizer, trained here, is saved in `folder`."""
    training, held_out = split
    if accelerator.is_main_process:
        longest = longest_input(make_config(recipe, recipe.vocab_size))
        train_tokenizer(training, recipe.vocab_size, longest).save_pretrained(folder)
    accelerator.wait_for_everyone()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    for sentence in recipe.fill_mask:
        length, limit = len(tokenizer(sentence, verbose=False).input_ids), tokenizer.model_max_length
        if length > limit:
            raise UserError(f"A sentence of `fill_mask` has {length} tokens, but the model takes {limit}: {sentence!r}")

    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    training_ids = encode(tokenizer, training)
    held_out_blocks = pack(encode(tokenizer, held_out), recipe.block_size, **special)
    masked = mask_once(held_out_blocks, tokenizer, recipe.mask_probability, recipe.seed)
    return PreparedText(
        tokenizer,
        blocks=pack(training_ids, recipe.block_size, **special),
        held_out=masked,
        unigram=unigram_baseline(training_ids, masked, len(tokenizer)),
        facts={
            "corpus": corpus,
            "training_documents": len(training),
            "held_out_documents": len(held_out),
            "training_tokens": sum(map(len, training_ids)),
            "vocabulary": len(tokenizer),
            "longest_input": tokenizer.model_max_length,
        },
    )


def pretrain(recipe: PretrainRecipe, command: str) -> dict[str, Any]:
    """Run a recipe and return the figures of `metrics.json`.

    Raises:
        UserError: See the functions that are called.
    """
    accelerator = make_accelerator(recipe.mixed_precision, recipe.gradient_accumulation_steps, recipe.seed)
    # Mistakes are told before the folder, with perhaps an earlier model in it, is touched.
    make_config(recipe, recipe.vocab_size)
    corpus = read_corpus(recipe.data)
    accelerator.print(f"Read {corpus.description}.")
    split = split_documents(corpus.documents, recipe.held_out_fraction, recipe.seed)
    folder = prepare_output(recipe) if accelerator.is_main_process else Path(recipe.output_dir)
    text = prepare_text(recipe, accelerator, folder, corpus.description, split)

    set_seed(recipe.seed)
    model = AutoModelForMaskedLM.from_config(make_config(recipe, len(text.tokenizer)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
    )
    scheduler = warmup_then_linear(optimizer, recipe.max_steps, recipe.warmup_fraction)
    # The model is the same in every process; the masks, and dropout from here on, are not.
    collator = masking(text.tokenizer, recipe.mask_probability, seed=recipe.seed + 1 + accelerator.process_index)
    set_seed(recipe.seed, device_specific=True)
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(text.blocks, batch_size=recipe.batch_size, shuffle=True, collate_fn=collator),
        DataLoader(text.held_out, batch_size=recipe.batch_size),
    )
    announce(recipe, accelerator, text, parameters)

    log = RunLog(folder / "log.jsonl", accelerator.is_main_process)
    started = time.perf_counter()
    last = train(
        accelerator,
        model,
        optimizer,
        scheduler,
        loader,
        lambda: evaluate(accelerator, model, eval_loader),
        log,
        max_steps=recipe.max_steps,
        max_grad_norm=recipe.max_grad_norm,
        log_steps=recipe.log_steps,
        eval_steps=recipe.eval_steps,
    )
    training_seconds = time.perf_counter() - started
    save(accelerator, model, folder)

    # The figures are those of the files: whatever saving loses would show here.
    reloaded = AutoModelForMaskedLM.from_pretrained(folder).to(accelerator.device)
    result = evaluate(accelerator, reloaded, eval_loader)
    if not math.isclose(result.loss, last.loss, rel_tol=1e-2):  # room for mixed precision, which the files are not in
        raise RuntimeError(f"The saved model has a loss of {result.loss:.4f}, but the trained one had {last.loss:.4f}.")
    figures = {
        "held_out_loss": result.loss,
        "held_out_accuracy": result.accuracy,
        "held_out_targets": result.targets,
        "unigram_loss": text.unigram["loss"],
        "unigram_accuracy": text.unigram["accuracy"],
        "gain_nats": text.unigram["loss"] - result.loss,
        "training_seconds": training_seconds,
        "parameters": parameters,
        **text.facts,
        "seen_tokens": log.series("train", "seen_tokens")[1][-1],
        "processes": accelerator.num_processes,
        "command": command,
        **machine(),
    }
    if accelerator.is_main_process:
        figures["fill_mask"] = answer(reloaded, AutoTokenizer.from_pretrained(folder), recipe.fill_mask)
        (folder / "metrics.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        plot_loss(log, text.unigram["loss"], folder / PLOT)
        (folder / "README.md").write_text(make_card(recipe, figures), encoding="utf-8")
        report(figures, recipe.output_dir)
    accelerator.end_training()
    return figures


def announce(recipe: PretrainRecipe, accelerator: Accelerator, text: PreparedText, parameters: int) -> None:
    """Print what is about to run."""
    rows = recipe.batch_size * recipe.gradient_accumulation_steps * accelerator.num_processes
    accelerator.print(
        f"{text.facts['training_documents']:,} documents to train on, {text.facts['held_out_documents']:,} held out; "
        f"{text.facts['training_tokens']:,} tokens of a vocabulary of {len(text.tokenizer):,}, "
        f"in {len(text.blocks):,} blocks of {recipe.block_size}.\n"
        f"{recipe.model['model_type']} with {parameters:,} parameters; {recipe.max_steps:,} steps of {rows} blocks "
        f"({recipe.max_steps * rows / len(text.blocks):.1f} epochs) on {accelerator.device}, "
        f"{accelerator.num_processes} process(es), {torch.get_num_threads()} thread(s).\n"
        f"Unigram baseline on {text.unigram['targets']:,} held-out masked tokens: {text.unigram['loss']:.3f} nats."
    )


def report(figures: dict[str, Any], folder: str) -> None:
    """Print what was reached, and what the model answers."""
    print(f"\nLoaded back from {folder}; held-out masked tokens: {figures['held_out_targets']:,}")
    print(f"  model            loss {figures['held_out_loss']:.3f}  accuracy {figures['held_out_accuracy']:.1%}")
    print(f"  unigram baseline loss {figures['unigram_loss']:.3f}  accuracy {figures['unigram_accuracy']:.1%}")
    print(f"  gain {figures['gain_nats']:.3f} nats after {figures['training_seconds']:.0f} s of training")
    for row in figures["fill_mask"]:
        guesses = ", ".join(
            f"{guess['token'].strip() or guess['token']!r} {guess['score']:.0%}" for guess in row["guesses"]
        )
        print(f"  {row['sentence']}\n    {guesses}")


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 when the recipe's gain is missed, 2 for a mistake of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="YAML file, see training/recipes/pretrain_mlm")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="--key value, for any key of the recipe")
    parsed = parser.parse_args(arguments)
    disable_progress_bar()  # of transformers: the bars of loading and saving a small file say nothing
    try:
        recipe = load_recipe(PretrainRecipe, parsed.recipe, parsed.overrides)
        figures = pretrain(recipe, portable_command(["python", "training/pretrain_mlm.py", *arguments]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if figures["gain_nats"] < recipe.min_gain_nats:
        print(
            f"The gain over the unigram baseline is {figures['gain_nats']:.3f} nats, but the recipe asks for "
            f"{recipe.min_gain_nats} (`min_gain_nats`). Train longer (`max_steps`), or on more text.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
