"""Hooks of transformers' `generate` for models whose decoding state is a `MemoryCache`."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode, MaxLengthCriteria, StoppingCriteriaList
from transformers.modeling_outputs import ModelOutput
from transformers.utils import is_tracing

from ..configuration import BoundedMemoryConfig
from ..layers.cache import MemoryCache
from ..ops.context import token_ranks


class GenerationHooks:
    """Mixin for models that generate, before `GenerationMixin`."""

    _is_stateful = True  # the state cannot be rolled back, which rules out assisted generation

    def is_endless(self) -> bool:
        """Whether the decoder accepts texts of any length, as without learned positions."""
        return self.get_decoder().config.longest_input() is None

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse continuous batching, which `generate_batch` starts with.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"Continuous batching (`generate_batch`) needs a cache of keys and values, but a {self.config.model_type} "
            "model has a state of constant size. Call `generate` with the prompts padded on the left."
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the state is a `MemoryCache`

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Create a `MemoryCache` unless one is given or `use_cache` is off; its size is always static."""
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic", "static"):
            raise ValueError(
                f"`cache_implementation` is {asked!r}, but a {self.config.model_type} model's state has constant size. "
                "Leave it out, or set it to 'static' to compile the decoding step."
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = MemoryCache(self.config, compileable=asked == "static")

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **others: Any
    ) -> ModelOutput:
        """Check that the prompt continues a given state, before transformers leaves out what the state contains."""
        if self.config.is_encoder_decoder:  # in chunks, transformers passes on masks of the whole target
            generation_config.prefill_chunk_size = None
        cache = self.get_decoder().open_cache(model_kwargs.get("cache"), False, input_ids.shape[0])
        if cache is not None and cache.is_initialized:
            translates = self.config.is_encoder_decoder
            mask = model_kwargs.get("decoder_attention_mask" if translates else "attention_mask")
            embeds = None if translates else model_kwargs.get("inputs_embeds")
            if translates and mask is None:
                generation_config._mask_length = input_ids.shape[1]
            columns = generation_config._mask_length if mask is None else mask.shape[1]  # of a mask that was dropped
            check_prompt(input_ids, embeds, mask, columns, cache)
        return super()._prefill(input_ids, generation_config, model_kwargs, **others)

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, has_default_max_length: bool, **others: Any
    ) -> GenerationConfig:
        """Like transformers', which lets a default length end at `max_position_embeddings`."""
        config, tokens = generation_config, generation_config.max_length
        config = super()._prepare_generated_length(config, has_default_max_length=has_default_max_length, **others)
        if has_default_max_length and config.max_new_tokens is None and self.is_endless():
            config.max_length = tokens + others["input_ids_length"]
        return config

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Like transformers', which warns of texts beyond `max_position_embeddings`; most models have no end."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria) and self.is_endless():
                criterion.max_position_embeddings = None
        return criteria

    @staticmethod
    def create_masks_for_generate(
        config: BoundedMemoryConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """Return the mask of the new tokens only: its shape stays constant, so a compiled step is not recompiled."""
        if attention_mask is None:
            return None
        length = inputs_embeds.shape[1]
        if kwargs.get("is_first_iteration"):
            check_mask_of_past(attention_mask, length, kwargs.get("cache"))
        return attention_mask[:, -length:]


def text_checksum(input_ids: Tensor, ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Sum each row's ids, weighted by hashes of their ranks, to tell texts apart: (b, n) to (b,); parts add up."""
    # Hashes of 20 bits (Knuth's multiplicative method): texts that differ in several tokens rarely share a sum, and
    # ids of 24 bits do not overflow it before 2 ** 19 tokens.
    weighted = input_ids * (((ranks + 1) * 2654435761 >> 12) % 2**20 + 1)
    return (weighted if keep is None else weighted.masked_fill(~keep, 0)).sum(1)


def check_prompt(
    input_ids: Tensor, inputs_embeds: Tensor | None, attention_mask: Tensor | None, columns: int, cache: MemoryCache
) -> None:
    """Check that a prompt (b, n) of `generate`, with a mask of so many columns, continues a state.

    Raises:
        ValueError: It is neither the state's text with more tokens, nor new tokens with a mask over all tokens.
    """
    seen, length = cache.get_seq_length(), (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
    continues = length > seen if columns == length else inputs_embeds is None and columns == seen + length
    if continues and input_ids.shape[1] == columns:
        keep = None if attention_mask is None else attention_mask[:, :seen] != 0
        given = text_checksum(input_ids[:, :seen], token_ranks(keep, seen, input_ids.device), keep)
        read = cache.rows.states["checksum"].to(given.device)
        continues = ((given == read) | (read < 0)).all()
    if not continues:
        raise ValueError(
            f"The state in `cache` contains {seen} tokens, and the given {length} do not continue it. Pass "
            f"the whole text, the same {seen} tokens and at least one more; or only new tokens, with an "
            f"`attention_mask` of {seen + length} columns."
        )


def check_mask_of_past(attention_mask: Tensor, length: int, cache: MemoryCache | None) -> None:
    """Check that a mask (b, n) or (b, seen + n) over n = `length` new tokens agrees with the state; not while tracing.

    Raises:
        ValueError: The mask's length, or its number of earlier real tokens, differs from the state's.
    """
    earlier = attention_mask[:, :-length]
    if earlier.shape[1] == 0 or is_tracing(attention_mask):
        return
    seen = 0 if cache is None else cache.get_seq_length()
    if earlier.shape[1] != seen:
        raise ValueError(
            f"`attention_mask` has {attention_mask.shape[1]} columns, but there are {length} new tokens and {seen} in "
            f"the state. It must have {length} or {seen + length} columns."
        )
    kept, read = (earlier != 0).sum(1), cache.tokens.to(earlier.device)
    if not torch.equal(kept, read):
        row = (kept != read).nonzero()[0].item()
        raise ValueError(
            f"`attention_mask` keeps {kept[row]} earlier tokens of row {row}, but the state contains {read[row]}, and "
            "they can no longer be masked (`generate` also adds the padding after a row that ends early). Leave the "
            "state out to process the whole text again, or pass the mask that the state was made with."
        )
