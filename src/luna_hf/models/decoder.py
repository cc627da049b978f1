"""The decoder shared by all families, with its decoding state and language modelling head."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, ModelOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_tracing
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration import BoundedMemoryConfig
from ..layers.block import DepthwiseConvolution
from ..layers.cache import MemoryCache, state_fields
from ..ops.attention import linear
from ..ops.context import ForwardContext, leading_padding, make_context, token_ranks
from ..ops.convolution import causal_convolution
from ..ops.positions import rotation
from ..ops.tokens import move_to_ranks
from .base import BaseModelMixin, HeadMixin
from .generation import GenerationHooks, check_mask_of_past, text_checksum


class CausalConvolution(DepthwiseConvolution):
    """Causal depthwise convolution; the cache keeps the states of the last taps - 1 tokens."""

    def forward(self, states: Tensor, context: ForwardContext) -> Tensor:
        """Convolve (b, n, d) states to the same shape, and update the cache."""
        keep, cache = context.keep, context.layer_cache(self.layer_idx)
        before = None if cache is None else cache.states.get("convolution")
        ranks = None
        if keep is not None:
            # Real tokens move to the front, so that no padding lies between them and the cached ones.
            ranks = token_ranks(keep, states.shape[1], keep.device)
            states = move_to_ranks(states.unsqueeze(1), ranks, keep).squeeze(1)
        if before is None:
            before = states.new_zeros(states.shape[0], self.weight.shape[-1] - 1, states.shape[-1])
        seen = torch.cat([before.to(states.dtype), states], dim=1)
        out = causal_convolution(seen, self.weight)
        if cache is not None:  # last, because writing in place overwrites `before`
            places = states.shape[1] if keep is None else keep.sum(1, keepdim=True)
            places = (places + torch.arange(before.shape[1], device=seen.device)).expand(seen.shape[0], -1)
            cache.write(convolution=seen.gather(1, places.unsqueeze(-1).expand(-1, -1, seen.shape[-1])))
        return out if ranks is None else out.gather(1, ranks.unsqueeze(-1).expand(out.shape))


class DecoderModelMixin(BaseModelMixin):
    """The decoder without a head, the base model of a family's causal language model."""

    convolution_class = CausalConvolution
    output_class = BaseModelOutputWithPast
    layer_inputs: tuple[str, ...] = ()  # keywords of `forward` for `run_layers`
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        is_rotary = config.position_embedding_type == "rotary"
        self.rotary_size = self.attention_class.rotary_size(config) if is_rotary else 0

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: MemoryCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ModelOutput:
        """
        Args:
            input_ids: (b, n) token ids.
            attention_mask: (b, n), or (b, seen + n) with a state; 1 for tokens and 0 for padding on either side.
                Without it nothing is padding, whatever its id.
            token_type_ids: (b, n) segment ids, if the model has segment embeddings.
            position_ids: (b, n) from 0; by default, counts real tokens, those in the state included.
            inputs_embeds: (b, n, d) token embeddings, instead of `input_ids`.
            cache: the state after earlier tokens, or a new `MemoryCache`; updated in place.
            use_cache: whether to return a state, created if none is given (but not in training); defaults to
                `config.use_cache`.

        Keyword Args:
            local_window, read_slots: see `EncoderModelMixin.forward`.

        Raises:
            ValueError: A shape is wrong, the input is empty, the cache belongs to another model or batch, the mask
                contradicts the tokens in the state, `position_ids` fall within a row, or a keyword is unknown.
        """
        layer_inputs = {name: kwargs.pop(name, None) for name in self.layer_inputs}
        if kwargs:
            self.check_keywords(kwargs)
        ids = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        self.check_shapes(input_ids, inputs_embeds, attention_mask, with_past=cache is not None, **ids)
        use_cache = use_cache and (cache is not None or not self.training)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        batch, length = inputs.shape[:2]
        cache = self.open_cache(cache, use_cache, batch)
        keep = None
        if attention_mask is not None:
            check_mask_of_past(attention_mask, length, cache)
            keep = self.tokens_to_keep(None, attention_mask[:, -length:])  # unlike in an encoder, ids are ignored
        if position_ids is not None:
            position_ids = position_ids.expand(position_ids.shape if position_ids.dim() > 1 else (1, -1))
            self.check_positions(position_ids, keep)
        context = make_context(keep, length, inputs.device, cache, kwargs, self.config.local_window)
        if self.config.position_embedding_type == "learned":
            self.check_length(length, context)
        positions = context.ranks if position_ids is None else position_ids
        context = context._replace(rotation=self.rotation(positions))
        hidden_states = self.embeddings(input_ids, inputs_embeds, positions, token_type_ids, keep)
        hidden_states = self.run_layers(hidden_states, context, **layer_inputs)
        if keep is not None:
            # Padding that has read nothing may have a state of zeros, whose gradient every norm enlarges.
            unread = leading_padding(keep) & (context.before == 0)
            hidden_states = hidden_states.masked_fill(unread.unsqueeze(-1), 0.0)
        if cache is not None:
            checksum = -1 if input_ids is None else text_checksum(input_ids, context.ranks, keep)
            cache.count(context.lengths[:, 0].expand(batch), length, checksum)
        return self.output_class(last_hidden_state=hidden_states, cache=cache if use_cache else None)

    def run_layers(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """Apply the layers to embedded tokens (b, n, d)."""
        if context.cache is not None:
            context.cache.begin()
        return self.encoder(hidden_states, self.first_slot_states(), context)[0]

    def check_length(self, length: int, context: ForwardContext) -> None:
        """Reject n tokens that go beyond the learned positions; skipped while tracing.

        Raises:
            ValueError: A row has more tokens than positions.
        """
        if is_tracing(context.lengths) or context.lengths.is_meta:
            return
        limit, seen = self.config.longest_input(), 0 if context.cache is None else context.cache.get_seq_length()
        if seen + length > limit and context.lengths.max() > limit:
            raise ValueError(
                f"A text has {context.lengths.max()} tokens, but {type(self).__name__} has {limit} learned positions "
                "(`max_position_embeddings`). Use fewer tokens, or a model with sinusoidal positions."
            )

    def rotation(self, positions: Tensor) -> Tensor | None:
        """Return the cosines and sines (b or 1, n, 2, r / 2) of rotary positions (b or 1, n); `None` if not rotary."""
        if not self.rotary_size:
            return None
        return rotation(positions, self.rotary_size, self.embeddings.word_embeddings.weight.dtype)

    def open_cache(self, cache: Any, use_cache: bool, batch: int) -> MemoryCache | None:
        """Validate the given cache; without one, create a new one if `use_cache`.

        Raises:
            ValueError: The cache is not a `MemoryCache`, was made for another model or batch size, or layers are
                checkpointed.
        """
        if cache is None:
            return MemoryCache(self.config) if use_cache else None
        if self.training and self.gradient_checkpointing:
            raise ValueError(
                "`cache` cannot be used with gradient checkpointing, which runs each layer twice, the second "
                "time from the updated state. Leave it out, or turn checkpointing off."
            )
        # Not `isinstance`: a model loaded from a checkpoint's code has its own copy of the class.
        if not hasattr(cache, "made_for"):
            raise ValueError(
                f"`cache` is a {type(cache).__name__}, but must be a `luna_hf.MemoryCache` for a "
                f"{self.config.model_type} model. Leave it out, or create one with `MemoryCache(model.config)`."
            )
        if cache.made_for is not self.config:
            own, given = state_fields(self.config), state_fields(cache.made_for)
            if own != given:
                wrong = [
                    f"{name}={given.get(name)!r}, not {own[name]!r}" for name in own if own[name] != given.get(name)
                ]
                raise ValueError(
                    f"The cache was made for a different model ({'; '.join(wrong)}). Create one from this config."
                )
            cache.made_for = self.config  # so that the next pass need not compare the two
        if cache.batch_size not in (-1, batch):
            raise ValueError(
                f"The cache holds {cache.batch_size} rows, but the input has {batch}. Create a new cache, or "
                "select or repeat its rows (`batch_select_indices`, `batch_repeat_interleave`)."
            )
        return cache


class CausalLMMixin(GenerationHooks, HeadMixin):
    """Causal language modelling, with an output layer tied to the token embedding, and `generate`."""

    auto_classes = ("AutoModelForCausalLM",)
    _supports_flash_attn = False
    _supports_flex_attn = False
    output_class = CausalLMOutputWithPast
    tied_weights = {"lm_head.weight": "{}.embeddings.word_embeddings.weight"}

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config.as_decoder())

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # also of subclasses with another name

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Like `DecoderModelMixin.forward`, with a head.

        Args:
            labels: (b, n) the token ids themselves, shifted internally; -100 is ignored, and so is the first token of
                a row that is padded on the left, which nothing predicts.
            logits_to_keep: number of final positions to compute logits for, 0 for all; or a tensor of positions.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.

        Keyword Args:
            shift_labels: (b, n) labels that are already shifted, instead of `labels`.

        Returns:
            `loss` if labels are given; `logits` (b, n, vocab_size); `cache`, the state after the last token.
        """
        # Not a parameter, because the Trainer would take it for a label column.
        shift_labels = kwargs.pop("shift_labels", None)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, cache=cache, use_cache=use_cache, return_dict=True, **kwargs)
        logits = linear(self.lm_head, slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if attention_mask is not None and cache is None:
            unread = leading_padding(attention_mask != 0)
            if labels is not None:
                labels = labels.masked_fill(F.pad(unread[:, :-1], (1, 0)), -100)
            if shift_labels is not None:
                shift_labels = shift_labels.masked_fill(unread, -100)
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
        return self.make_output(outputs, loss=loss, logits=logits)
