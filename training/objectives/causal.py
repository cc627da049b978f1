"""Causal language modelling: every token is predicted from those before it."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from common.models import CAUSAL
from data.masking import RowFormat, next_tokens
from data.tokenizer import open_ended, train_causal_tokenizer
from engine.card import make_causal_card
from engine.objective import Objective
from engine.recipe import CausalRecipe
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import FAMILIES, MemoryCache
from luna_hf.scripting import UserError

# Special tokens that a tokenizer may have, by their names in transformers.
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class CausalObjective(Objective):
    """The mean loss of the next token, over rows `<s> ...` that are cut from running text."""

    kind = CAUSAL
    targets_name = "tokens"
    loss_name = "next-token loss"
    next_token = True
    # A few words of context are worth more than a masked model's whole plateau: only a loss above the baseline tells.
    plateau_gain = 0.0

    def train_tokenizer(
        self, documents: Iterable[str], vocab_size: int, longest: int | float
    ) -> PreTrainedTokenizerBase:
        """See `train_causal_tokenizer`."""
        return train_causal_tokenizer(documents, vocab_size, longest)

    def adapt_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: str, new_model: bool
    ) -> tuple[PreTrainedTokenizerBase, list[str]]:
        """Give it a padding token, and take away the end token that it puts behind a text.

        Raises:
            UserError: It has no end token; or puts one behind every text, and has no parts that could be changed.
        """
        tokenizer, notes = copy.deepcopy(tokenizer), []
        if tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
            raise UserError(f"The tokenizer at {name!r} has no end token (eos), which separates documents.")
        if tokenizer.pad_token_id is None and new_model:
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
            notes.append(f"The tokenizer of `{name}` has no padding token: `<pad>` was added to its vocabulary.")
        elif tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
            notes.append(f"The tokenizer of `{name}` has no padding token: it pads with `{tokenizer.pad_token}`.")
        end = tokenizer("a", verbose=False).input_ids[-1]
        if end in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            tokenizer = _without_end(tokenizer, name)
            notes.append(
                f"The tokenizer of `{name}` put `{tokenizer.convert_ids_to_tokens(end)}` behind every text, after "
                "which a model would begin another one: the tokenizer that is saved does not."
            )
        tokenizer.padding_side = "left"
        return tokenizer, notes

    def check_tokenizer(self, recipe: CausalRecipe, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Whether every prompt leaves room for the tokens that continue it.

        Raises:
            UserError: Not so.
        """
        for prompt in recipe.prompts:
            length = len(tokenizer(prompt, verbose=False).input_ids)
            if length + recipe.sample_tokens > longest:
                raise UserError(
                    f"A prompt has {length} tokens, with the {recipe.sample_tokens} of `sample_tokens` "
                    f"{length + recipe.sample_tokens}, but the model takes {longest}: {prompt!r}"
                )

    def row_format(self, recipe: CausalRecipe, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """Rows of running text; an end token stands where a document ends, and not where a row does."""
        return RowFormat(next_tokens, closed=False)

    def probe(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
        """Nothing: a causal model of luna_hf makes no attention maps."""
        return None

    def samples(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: CausalRecipe
    ) -> dict[str, Any]:
        """`continuations` of the prompts, and `state_bytes`, the size of the decoding state of one sequence (`None` if
        it grows with the text)."""
        # Of one seed for all, the same draws would show in every text.
        continued = [
            continue_text(model, tokenizer, prompt, recipe.sample_tokens, recipe.seed + place)
            for place, prompt in enumerate(recipe.prompts)
        ]
        return {"continuations": continued, "state_bytes": state_bytes(model)}

    def show_samples(self, figures: dict[str, Any]) -> None:
        """Print them."""
        for row in figures["continuations"]:
            print(f"  {row['prompt']!r}\n    greedy:  {row['greedy']!r}\n    sampled: {row['sampled']!r}")
        if figures["state_bytes"] is not None:
            print(f"  decoding state of one sequence, however long: {figures['state_bytes']:,} bytes")

    def card(self, recipe: CausalRecipe, figures: dict[str, Any]) -> str:
        """The model card."""
        return make_causal_card(recipe, figures)


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, seed: int
) -> dict[str, str]:
    """What follows a prompt, at most so many `tokens`: the most probable each time, and drawn with a seed."""
    batch = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    new = {"max_new_tokens": tokens, "pad_token_id": tokenizer.pad_token_id}
    row = {"prompt": prompt}
    for name, how in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = model.generate(**batch, **new, **how)[0, batch["input_ids"].shape[1] :]
        row[name] = tokenizer.decode(ids, skip_special_tokens=True)
    return row


@torch.no_grad()
def state_bytes(model: PreTrainedModel) -> int | None:
    """Bytes that a model of luna_hf keeps of a text while it generates; `None` of another, whose cache grows."""
    if model.config.model_type not in FAMILIES:
        return None
    cache = MemoryCache(model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    return cache.nbytes


def _without_end(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = {key: token for key in _SPECIAL if (token := getattr(tokenizer, key, None)) is not None}
    special.setdefault("bos_token", special.get("cls_token"))
    if backend is None or special["bos_token"] is None:
        raise UserError(
            f"The tokenizer at {name!r} puts an end token behind every text, after which a model would begin another "
            "one. Train a tokenizer (`train_tokenizer`), or name one that does not, such as gpt2's."
        )
    return open_ended(backend, special, tokenizer.model_max_length)
