"""Masked language modelling."""

import dataclasses
from typing import Any

import torch.nn.functional as F
from common.models import MASKED
from data.masking import IGNORED, RowFormat
from data.prepare import masked_rows
from data.tokenizer import train_tokenizer
from engine.card import make_card
from engine.pretraining import Pretraining
from engine.recipe import RunRecipe
from engine.sharding import is_sharded
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.roberta.modeling_roberta import RobertaLMHead

from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.markdown import Markdown, code, quoted, table
from luna_hf.scripting import UserError


@dataclasses.dataclass(frozen=True)
class PretrainRecipe(RunRecipe):
    """The keys of the recipes of `pretrain_mlm.py`."""

    mask_probability: float
    whole_word_masking: bool
    separate_documents: bool
    fill_mask: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile:
            self.require(("separate_documents",), lambda value: not value, "false with `compile`, or `compile` false")
        one_mask = all(sentence.count("<mask>") == 1 for sentence in self.fill_mask)
        self.require(("fill_mask",), lambda value: value and one_mask, "sentences with exactly one <mask> each")


class SparseHead(nn.Module):
    """The loss of transformers' RoBERTa, whose head runs at the labelled positions alone, as `sparse_prediction` does.

    The same loss for less: with 30 % of the tokens masked, the head over all positions takes a third of an update.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> MaskedLMOutput:
        """The loss on a batch of rows (b, n); logits are left out."""
        states = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        labelled = labels != IGNORED
        logits = self.model.lm_head(states[labelled])
        return MaskedLMOutput(loss=F.cross_entropy(logits.float(), labels[labelled]))


class MaskedPretraining(Pretraining):
    """Pretraining by the loss of masked tokens."""

    kind = MASKED
    targets_name = "masked tokens"
    loss_name = "masked-token loss"
    # A model that knows token statistics and topic but ignores its context stays within this many nats of the unigram
    # baseline (measured in the study of learning curves).
    plateau_gain = 0.75
    train_tokenizer = staticmethod(train_tokenizer)

    recipe: PretrainRecipe

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, longest: int | float) -> None:
        """Check that words can be masked, and that the sentences of `fill_mask` have at most `longest` tokens."""
        if tokenizer.mask_token is None:
            raise UserError("The tokenizer has no mask token, which masked language modelling needs.")
        for sentence in self.recipe.fill_mask:
            length = len(tokenizer(sentence.replace("<mask>", tokenizer.mask_token), verbose=False).input_ids)
            if length > longest:
                raise UserError(
                    f"A sentence of `fill_mask` has {length} tokens, but the model takes {longest}: {sentence!r}"
                )

    def row_format(self, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """Rows `<s> ... </s>`, masked."""
        return masked_rows(self.recipe, tokenizer)

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """The model, behind `SparseHead` if it is a RoBERTa of transformers and the run is not sharded."""
        if self.recipe.separate_documents and not isinstance(model.config, BoundedMemoryConfig):
            raise UserError(
                f"`separate_documents` needs an encoder of luna_hf, but the model is a {model.config.model_type}: set "
                "it to false."
            )
        # Sharded parameters are gathered when the prepared module is called, but evaluations call the model inside it.
        sparse = isinstance(getattr(model, "lm_head", None), RobertaLMHead) and not is_sharded(self.accelerator)
        return SparseHead(model) if sparse else model

    @property
    def trained(self) -> nn.Module:
        """The model without `SparseHead`."""
        inner = self.accelerator.unwrap_model(self.module)
        return inner.model if isinstance(inner, SparseHead) else self.module

    def answers(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """`fill_mask`: the three most probable tokens for the `<mask>` of each sentence."""
        fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
        rows = []
        for sentence in (sentence.replace("<mask>", tokenizer.mask_token) for sentence in self.recipe.fill_mask):
            guesses = [{"token": row["token_str"], "score": row["score"]} for row in fill_mask(sentence)]
            rows.append({"sentence": sentence, "guesses": guesses})
        return {"fill_mask": rows}

    def answers_text(self, figures: dict[str, Any]) -> str:
        """Sentences, each with its answers."""
        lines = []
        for row in figures["fill_mask"]:
            guesses = (f"{guess['token'].strip() or guess['token']!r} {guess['score']:.0%}" for guess in row["guesses"])
            lines.append(f"  {row['sentence']}\n    {', '.join(guesses)}")
        return "\n".join(lines)

    def card(self, figures: dict[str, Any]) -> str:
        """Fill `model_cards/template.md`."""
        recipe, answers = self.recipe, []
        for row in figures["fill_mask"]:
            guesses = Markdown(", ".join(f"{code(guess['token'])} {guess['score']:.0%}" for guess in row["guesses"]))
            answers.append([code(row["sentence"]), guesses])
        return make_card(
            "template.md",
            recipe,
            figures,
            task="fill-mask",
            metrics={
                "loss": ("masked-token loss (nats)", "held_out_loss"),
                "accuracy": ("masked-token accuracy", "held_out_accuracy"),
            },
            answers=table(["sentence", "answers"], answers),
            example=quoted(figures["fill_mask"][0]["sentence"]),
            mask_probability=f"{recipe.mask_probability:.0%}",
            masked_unit="words, with all their tokens," if recipe.whole_word_masking else "tokens",
            longest=figures["longest_input"],
        )
