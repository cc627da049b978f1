"""The encoder-decoder with a language modelling head, and its `generate`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, ModelOutput, Seq2SeqLMOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from ..configuration import BoundedMemoryConfig
from ..layers.cache import MemoryCache
from ..ops.attention import linear
from .base import HeadMixin
from .encoder_decoder import SOURCE_WORDS, TARGET_WORDS, source_checksum
from .encoder_heads import cross_entropy
from .generation import GenerationHooks
from .policy import EndAfterSource, next_source


class ConditionalGenerationMixin(GenerationHooks, HeadMixin):
    """An encoder-decoder with a language modelling head, for translation and other tasks from text to text."""

    auto_classes = ("AutoModelForSeq2SeqLM",)
    output_class = Seq2SeqLMOutput
    tied_weights = {f"{{}}.{TARGET_WORDS}": f"{{}}.{SOURCE_WORDS}", "lm_head.weight": f"{{}}.{SOURCE_WORDS}"}

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config.as_encoder_decoder())

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.lm_head = nn.Linear(config.hidden_size, config.decoder_vocab_size, bias=False)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: ModelOutput | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        visible_source: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Like `Seq2SeqModelMixin.forward`, with a loss.

        Args:
            labels: (b, n) the target's ids, without the start token; -100 is ignored. Without `decoder_input_ids` and
                `decoder_inputs_embeds`, the decoder's inputs are the labels shifted to the right.
            logits_to_keep: number of final positions to compute logits for, 0 for all; or a tensor of positions.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.

        Returns:
            `loss` if labels are given; `logits` (b, n, decoder_vocab_size); `cache`, the state after the last
            token, with the memory of the source.
        """
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            use_cache = False if use_cache is None else use_cache
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            visible_source=visible_source,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = linear(self.lm_head, slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels (b, n) to the right, behind the start token; -100 becomes padding."""
        first = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.config.pad_token_id)], dim=1)

    # ---- hooks of `generate` ----

    def _prepare_model_inputs(
        self, inputs: Tensor | None, bos_token_id: Tensor | None, model_kwargs: dict[str, Any]
    ) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Like transformers', with a source's checksum, and the mask that the encoder derives from its ids."""
        self.base_model.share_padding()
        ids = model_kwargs.get("input_ids") if inputs is None else inputs
        if ids is not None and not ids.is_floating_point():
            if model_kwargs.get("attention_mask") is None:
                model_kwargs["attention_mask"] = (ids != self.config.pad_token_id).long()
            if model_kwargs["attention_mask"].shape == ids.shape:  # otherwise, the encoder refuses it
                model_kwargs["source_checksum"] = source_checksum(ids, model_kwargs["attention_mask"])
        return super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Like transformers', without the target."""
        others = ("labels", "logits_to_keep", "policy", "source_checksum")
        given = {name: value for name, value in model_kwargs.items() if name not in others}
        given = super()._prepare_text_encoder_decoder_kwargs_for_generation(inputs_tensor, given, *args, **kwargs)
        return model_kwargs | {"encoder_outputs": given["encoder_outputs"]}

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
    ) -> None:
        """Write the source to the state, and drop the encoder's states, which would grow with its length.

        Raises:
            ValueError: The state has another source, or a policy cannot be followed.
        """
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args)
        cache, outputs = model_kwargs.get("cache"), model_kwargs["encoder_outputs"]
        checksum = model_kwargs.pop("source_checksum", None)
        if model_kwargs.get("policy") is not None:
            if cache is None or not self.config.source_is_causal:
                raise ValueError("`policy` needs a model with `source_is_causal=True`, and `use_cache`.")
            if cache.has_source:
                raise ValueError("With a `policy`, `generate` reads its source from the start. Leave `cache` out.")
            if model_kwargs.get("attention_mask") is None:
                model_kwargs["attention_mask"] = torch.ones(outputs[0].shape[:2], dtype=torch.long, device=self.device)
            if checksum is not None:
                cache.note_source(checksum)
            return
        if cache is None:
            return
        decoder, mask = self.get_decoder(), model_kwargs.pop("attention_mask", None)
        rows = outputs[0].shape[0]
        if not decoder.open_cache(cache, False, rows).has_source:
            decoder.write_source(cache, outputs, mask, rows)
            if checksum is not None:
                cache.note_source(checksum)
        elif checksum is None:
            raise ValueError("The state in `cache` has a source, which `generate` knows by its `input_ids`: pass them.")
        else:
            check_source(cache, checksum, mask)
        maps = {name: outputs.get(name) for name in ("hidden_states", "attentions")}
        model_kwargs["encoder_outputs"] = BaseModelOutput(**maps)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> LogitsProcessorList:
        """Like transformers'; with a policy, a translation does not end before its source."""
        processors = super()._get_logits_processor(generation_config, *args, model_kwargs=model_kwargs, **kwargs)
        if (policy := model_kwargs.get("policy")) is not None:
            mask, ends = model_kwargs["attention_mask"], generation_config._eos_token_tensor
            # Before all others, so that an end can be forced where the tokens run out.
            ends = [] if ends is None else ends.tolist()
            lengths, prompt_mask = (mask != 0).sum(1), model_kwargs.get("decoder_attention_mask")
            processors.insert(0, EndAfterSource(policy, lengths, ends, prompt_mask))
        return processors

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, cache: MemoryCache | None = None, policy: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Like transformers', without a source if the state contains it, or with what a policy reads of it next."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, cache=cache, **kwargs)
        if policy is not None:
            mask = kwargs.get("decoder_attention_mask")
            mask = torch.ones_like(input_ids) if mask is None else mask
            return inputs | next_source(policy, kwargs["encoder_outputs"], kwargs["attention_mask"], mask, cache)
        if cache is not None and cache.has_source:
            for name in ("encoder_outputs", "attention_mask"):
                inputs.pop(name, None)
        return inputs


def check_source(cache: MemoryCache, checksum: Tensor, mask: Tensor) -> None:
    """Refuse a state that has not read exactly the source with this checksum (b,) and this mask (b, s).

    Raises:
        ValueError: Such a state.
    """
    found, written = cache.source_checksum, None if cache.written is None else cache.written.tokens
    if found is not None and not torch.equal(checksum, found.to(checksum.device)):
        raise ValueError("The state in `cache` contains another source. Create a new state for this one.")
    if written is not None and (written.to(mask.device) < (mask != 0).sum(1)).any():
        raise ValueError("The state in `cache` has read only a part of the source. Create a new state for this one.")
