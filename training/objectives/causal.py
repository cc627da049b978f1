"""Causal language modelling: every token is predicted from those before it."""

import copy
import dataclasses
from typing import Any

import torch
from common.models import CAUSAL
from data.masking import RowFormat, next_tokens
from data.tokenizer import open_ended, train_causal_tokenizer
from engine.card import make_card
from engine.pretraining import Pretraining
from engine.recipe import RunRecipe
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import FAMILIES, MemoryCache
from luna_hf.markdown import Markdown, code, quoted, table
from luna_hf.scripting import UserError

# Special tokens that a tokenizer may have, by their names in transformers.
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class CausalRecipe(RunRecipe):
    """The keys of the recipes of `pretrain_clm.py`."""

    prompts: list[str]
    sample_tokens: int

    special_tokens = 3
    smallest_block = 3  # <s>, two tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        some = bool(self.prompts) and all(prompt.strip() for prompt in self.prompts)
        self.require(("prompts",), lambda _: some, "texts for the finished model to continue")


class CausalPretraining(Pretraining):
    """Pretraining by the loss of the next token, over rows `<s> ...` cut from running text."""

    kind = CAUSAL
    targets_name = "tokens"
    loss_name = "next-token loss"
    next_token = True
    train_tokenizer = staticmethod(train_causal_tokenizer)

    recipe: CausalRecipe

    def adapt_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: str, new_model: bool
    ) -> tuple[PreTrainedTokenizerBase, list[str]]:
        """Add a padding token, and remove the end token that a tokenizer may append to every text."""
        tokenizer, notes = copy.deepcopy(tokenizer), []
        if tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
            raise UserError(f"The tokenizer at {name!r} has no end token (eos) to separate documents.")
        if tokenizer.eos_token_id is None:
            tokenizer.eos_token = tokenizer.sep_token  # ends documents, so generation stops at it
        if tokenizer.pad_token_id is None and new_model:
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
            notes.append(f"The tokenizer of `{name}` has no padding token; `<pad>` was added to its vocabulary.")
        elif tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
            notes.append(f"The tokenizer of `{name}` has no padding token; it pads with `{tokenizer.pad_token}`.")
        end = tokenizer("a", verbose=False).input_ids[-1]
        if end in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            tokenizer = _without_end(tokenizer, name)
            notes.append(
                f"The tokenizer of `{name}` appends `{tokenizer.convert_ids_to_tokens(end)}` to every text, so that a "
                "model would begin a new one; the saved tokenizer does not."
            )
        tokenizer.padding_side = "left"
        return tokenizer, notes

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Check that every prompt leaves room for the tokens that continue it."""
        recipe = self.recipe
        for prompt in recipe.prompts:
            length = len(tokenizer(prompt, verbose=False).input_ids)
            if length + recipe.sample_tokens > longest:
                raise UserError(
                    f"A prompt of {length} tokens and `sample_tokens` of {recipe.sample_tokens} exceed the model's "
                    f"{longest} tokens: {prompt!r}"
                )

    def row_format(self, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """Rows of running text, with an end token where a document ends, not where a row ends."""
        return RowFormat(next_tokens, closed=False)

    def probe(self) -> None:
        """Nothing: causal models of luna_hf have no attention maps."""
        return None

    def answers(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """`continuations` of the prompts, and `state_bytes`, the size of the decoding state (`None` if it grows)."""
        recipe = self.recipe
        # With one seed for all prompts, every text would show the same draws.
        continued = [
            continue_text(model, tokenizer, prompt, recipe.sample_tokens, recipe.seed + place)
            for place, prompt in enumerate(recipe.prompts)
        ]
        return {"continuations": continued, "state_bytes": state_bytes(model)}

    def answers_text(self, figures: dict[str, Any]) -> str:
        """Prompts, each with its continuations."""
        lines = [
            f"  {row['prompt']!r}\n    greedy:  {row['greedy']!r}\n    sampled: {row['sampled']!r}"
            for row in figures["continuations"]
        ]
        if figures["state_bytes"] is not None:
            lines.append(f"  decoding state of a sequence of any length: {figures['state_bytes']:,} bytes")
        return "\n".join(lines)

    def card(self, figures: dict[str, Any]) -> str:
        """Fill `model_cards/causal.md`."""
        recipe, state = self.recipe, figures["state_bytes"]
        if state is None:
            memory = f"The input and the generated text have at most {figures['longest_input']} tokens together."
        else:
            memory = (
                f"The decoding state of a sequence in float32 takes {state:,} bytes, after ten tokens and after ten "
                f"thousand. The model was trained on {recipe.block_size} tokens at a time. It accepts longer texts, "
                "but how well it reads them was not measured."
            )
        return make_card(
            "causal.md",
            recipe,
            figures,
            task="text-generation",
            metrics={
                "perplexity": ("perplexity per token", "held_out_perplexity"),
                "loss": ("next-token loss (nats)", "held_out_loss"),
                "accuracy": ("next-token accuracy", "held_out_accuracy"),
            },
            memory=memory,
            continuations=Markdown("\n\n".join(_continuation(row) for row in figures["continuations"])),
            example=quoted(recipe.prompts[0]),
            sample_tokens=recipe.sample_tokens,
            seed=recipe.seed,
        )


def _continuation(row: dict[str, str]) -> str:
    return table([code(row["prompt"]), "continuation"], [[how, code(row[how])] for how in ("greedy", "sampled")])


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, seed: int
) -> dict[str, str]:
    """Continue a prompt by at most `tokens`, greedily and by sampling with a seed."""
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
    """Bytes of the decoding state of a luna_hf model; `None` for other models, with a growing cache."""
    if model.config.model_type not in FAMILIES:
        return None
    cache = MemoryCache(model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), cache=cache, use_cache=True)
    return cache.nbytes


def _without_end(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = {key: token for key in _SPECIAL if (token := getattr(tokenizer, key, None)) is not None}
    special.setdefault("bos_token", special.get("cls_token"))
    if backend is None or special["bos_token"] is None:
        raise UserError(
            f"The tokenizer at {name!r} appends an end token to every text, so that a model would begin a new one. "
            "Train a tokenizer (`train_tokenizer`), or name one without it, such as gpt2's."
        )
    return open_ended(backend, special, tokenizer.model_max_length)
