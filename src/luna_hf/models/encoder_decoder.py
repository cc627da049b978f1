"""The encoder-decoder shared by all families: a source is written to a memory once, and the target reads it.

    encoder           x = read(x, write(x))
    decoder           y = causal attention to the target, then read(y, write(x)), in every layer

The encoder is the family's encoder. A decoder layer has causal attention with a state of constant size, and
cross-attention to a memory of constant size: once the source is written, nothing of its length remains, and
`cache` holds all that decoding needs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    ModelOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_tracing
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from ..configuration import BoundedMemoryConfig
from ..layers.block import LayerStack
from ..layers.cache import MemoryCache
from ..layers.cross_attention import CrossAttentionBlock, CrossLayer
from ..layers.memory_attention import MemoryAttention
from ..ops.context import ForwardContext, drop_if_full, make_context, token_ranks
from .base import BoundedMemoryPreTrainedModel
from .decoder import DecoderModelMixin
from .encoder import EncoderPreTrainedModel, resize_table
from .generation import text_checksum

SOURCE_WORDS = "encoder.embeddings.word_embeddings.weight"

TARGET_WORDS = "decoder.embeddings.word_embeddings.weight"


class CrossDecoderMixin(DecoderModelMixin):
    """The decoder of an encoder-decoder, without a head.

    `forward` also takes `encoder_outputs`, the output of the encoder, and `encoder_attention_mask`, (b, s), the padding
    mask of the source. Neither is read if the state contains the memory of the source.
    """

    cross_attention_class: type[MemoryAttention]
    output_class = BaseModelOutputWithPastAndCrossAttentions
    layer_inputs = ("encoder_outputs", "encoder_attention_mask")
    _no_split_modules = [*BoundedMemoryPreTrainedModel._no_split_modules, "CrossLayer"]
    _can_record_outputs = {
        **BoundedMemoryPreTrainedModel._can_record_outputs,
        "cross_attentions": OutputRecorder(CrossAttentionBlock, index=2),
    }
    auto_classes = ()

    def add_layers(self, config: BoundedMemoryConfig) -> None:
        """Create the layers."""
        classes = (self.attention_class, self.convolution_class, self.cross_attention_class)
        self.encoder = LayerStack(config, *classes, layer_class=CrossLayer)

    def name_outputs(self, outputs: Sequence[Tensor]) -> ModelOutput:
        """Return the encoder's outputs that the decoder reads, given as a tuple (`return_dict=False`), by name."""
        return BaseModelOutput(*outputs[:1])

    def source_slot_states(self, outputs: ModelOutput) -> tuple[Tensor | None, Tensor | None]:
        """Return the first layer's `slot_states`, see `MemoryAttention.write`, and its mask."""
        return self.first_slot_states(), None

    def run_layers(
        self,
        hidden_states: Tensor,
        context: ForwardContext,
        encoder_outputs: ModelOutput | tuple | None,
        encoder_attention_mask: Tensor | None,
    ) -> Tensor:
        """Apply the layers to embedded tokens (b, n, d), after writing the source to the cache if there is one."""
        cache, source = context.cache, (encoder_outputs, encoder_attention_mask, hidden_states.shape[0])
        if cache is not None:
            if not cache.has_source:
                self.write_source(cache, *source, context.options)
            cache.begin()
            return self.encoder(hidden_states, self.first_slot_states(), None, context)[0]
        states, slot_states, context = self.begin_source(*source, context)
        hidden_states, slot_states = self.encoder(hidden_states, slot_states, states, context)
        return self.join_slot_states(hidden_states, slot_states)

    def join_slot_states(self, hidden_states: Tensor, slot_states: Tensor | None) -> Tensor:
        """Return the states (b, n, d), linked to the last layer's `slot_states` output if that has parameters."""
        return hidden_states

    def write_source(
        self,
        cache: MemoryCache,
        outputs: ModelOutput | tuple | None,
        attention_mask: Tensor | None,
        rows: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Write a source to a state that has none, for any number of targets; the encoder's states are not kept.

        Args:
            cache: a new state.
            outputs, attention_mask, rows: see `begin_source`.
            options: keyword arguments for the attention backend.
        """
        context = ForwardContext(None, None, None, None, cache=cache, options=options or {})
        states, slot_states, context = self.begin_source(outputs, attention_mask, rows, context)
        cache.begin()
        for layer in self.encoder.layer:
            slot_states = layer.write_source(slot_states, states, context)
        cache.finish()

    def begin_source(
        self,
        outputs: ModelOutput | tuple | None,
        attention_mask: Tensor | None,
        rows: int,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor | None, ForwardContext]:
        """Return the source's states (b, s, d), the first layer's `slot_states`, and the context with the source's.

        Args:
            outputs: output of the encoder.
            attention_mask: (b, s) padding mask of the source.
            rows: number of rows of the target.
            context: context of the target.

        Raises:
            ValueError: There is no source, or its number of rows or the shape of its mask is wrong.
        """
        if isinstance(outputs, tuple | list):
            outputs = self.name_outputs(outputs)
        states, keep = self.check_source(outputs, attention_mask, rows)
        slot_states, slot_keep = self.source_slot_states(outputs)
        keep = None if keep is None else drop_if_full(keep)
        written = make_context(keep, states.shape[1], states.device, options=context.options)
        written = written._replace(slot_keep=slot_keep)
        written = self.cross_attention_class.prepare(self.config, states, slot_states, written)
        return states, slot_states, context._replace(source=written)

    def check_source(
        self, outputs: ModelOutput | None, attention_mask: Tensor | None, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the source's states (b, s, d) and padding mask (b, s); arguments and errors as of `begin_source`."""
        states = None if outputs is None else outputs.get("last_hidden_state")
        if states is None:
            raise ValueError(
                "The decoder has no source: pass `input_ids` or `encoder_outputs`, or a state in `cache` "
                "that contains one."
            )
        if attention_mask is not None and attention_mask.shape != states.shape[:2]:
            raise ValueError(
                f"The source's mask must have shape {tuple(states.shape[:2])} (batch, length), like the encoder's "
                f"states, but has shape {tuple(attention_mask.shape)}."
            )
        if states.shape[0] != rows:
            raise ValueError(
                f"The source has {states.shape[0]} rows, but the target has {rows}. Repeat the source's rows "
                "(`repeat_interleave`), or select them."
            )
        return states, None if attention_mask is None else attention_mask != 0


def source_checksum(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the checksum (b,) of the ids of a source (b, s), whatever its padding."""
    keep = None if attention_mask is None else attention_mask != 0
    return text_checksum(input_ids, token_ranks(keep, input_ids.shape[1], input_ids.device), keep)


class Seq2SeqPreTrainedModel(EncoderPreTrainedModel):
    """Base class of the encoder-decoders: embeddings, which source, target and output layer may share."""

    _no_split_modules = CrossDecoderMixin._no_split_modules
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_record_outputs = {}  # the encoder and the decoder record theirs

    def post_init(self) -> None:
        """Like `PreTrainedModel.post_init`; saving must know which of the embeddings are tied by this config."""
        self._tied_weights_keys = self.get_expanded_tied_weights_keys() or None
        super().post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied weights and their sources, by the config's two fields."""
        base = "" if self.base_model is self else f"{self.base_model_prefix}."
        source, target = base + SOURCE_WORDS, base + TARGET_WORDS
        tied = {target: source} if self.config.share_encoder_decoder_embeddings else {}
        if base and self.config.tie_word_embeddings:
            tied["lm_head.weight"] = tied.get(target, target)
        return tied

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding of the source."""
        return self.base_model.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding of the source, and of the target if they share it."""
        self.base_model.encoder.set_input_embeddings(value)
        if self.config.share_encoder_decoder_embeddings:
            self.base_model.decoder.set_input_embeddings(value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Like `PreTrainedModel.resize_token_embeddings`, of the source's vocabulary, which the target may share.

        A separate target vocabulary is not changed; see `resize_decoder_token_embeddings`.
        """
        encoder, decoder = self.base_model.encoder, self.base_model.decoder
        if not self.config.share_encoder_decoder_embeddings:
            embeddings = encoder.resize_token_embeddings(*args, **kwargs)
            self.config.vocab_size = encoder.config.vocab_size
            return embeddings
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        for part in (encoder, decoder):
            part.config.vocab_size = self.config.vocab_size
        return embeddings

    def resize_decoder_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize the target's own vocabulary, with the head; arguments as of `resize_token_embeddings`.

        Raises:
            ValueError: Source and target share their vocabulary.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "Source and target share their vocabulary (`share_encoder_decoder_embeddings=True`): call "
                "`resize_token_embeddings`."
            )
        decoder, head = self.base_model.decoder, self.get_output_embeddings()
        embeddings = decoder.resize_token_embeddings(*args, **kwargs)
        size = decoder.config.vocab_size
        self.config.decoder_vocab_size = decoder.config.decoder_vocab_size = size
        self.base_model.encoder.config.decoder_vocab_size = size
        if head is not None:
            self.set_output_embeddings(self._get_resized_lm_head(head, size))
            self.tie_weights()
        return embeddings

    def get_position_embeddings(self) -> tuple[nn.Module | None, ...]:
        """The position tables of encoder and decoder; `None` where there is none."""
        return tuple(part.embeddings.position_embeddings for part in (self.base_model.encoder, self.base_model.decoder))

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Like `EncoderPreTrainedModel.resize_position_embeddings`, for source and target."""
        trained = self.config.max_position_embeddings
        encoder, decoder = self.base_model.encoder, self.base_model.decoder
        encoder.resize_position_embeddings(new_num_position_embeddings)
        resize_table(decoder.embeddings.position_embeddings, trained, new_num_position_embeddings)
        for part in (self, decoder):
            part.config.max_position_embeddings = new_num_position_embeddings


class Seq2SeqModelMixin:
    """Encoder and decoder without a head, the base model of a family's encoder-decoder."""

    auto_classes = ("AutoModel",)
    _tied_weights_keys = {TARGET_WORDS: SOURCE_WORDS}
    encoder_class: type[nn.Module]
    decoder_class: type[nn.Module]
    streaming_classes: tuple[type[nn.Module], type[nn.Module]]  # encoder and decoder of a causal source

    def __init__(self, config: BoundedMemoryConfig) -> None:
        config = config.as_encoder_decoder()
        super().__init__(config)
        classes = self.streaming_classes if config.source_is_causal else (self.encoder_class, self.decoder_class)
        self.encoder = classes[0](config.encoder_part())
        self.encoder.one_text_per_row = True  # the decoder reads one memory per row
        self.decoder = classes[1](config.decoder_part())
        self.post_init()

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
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        visible_source: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Read a source (b, s), and predict a target (b, n).

        The inputs of the source are those of `EncoderModelMixin.forward`; they are not read if the state contains the
        memory of the source. Those of the target are those of `DecoderModelMixin.forward`, with `decoder_` before their
        names except for `cache` and `use_cache`.

        Args:
            encoder_outputs: output of the encoder (`model.get_encoder()`), instead of a source.
            visible_source: (b, n) long, with `source_is_causal` only: how many source tokens each target token may
                read, those in the state included; all by default. A source that is given with a state continues that
                of the state.

        Raises:
            ValueError: The target is missing, or given twice; see `CrossDecoderMixin.forward` for the rest.
        """
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError(
                "Pass the target as exactly one of `decoder_input_ids` and `decoder_inputs_embeds`, or pass `labels` "
                "to a model with a head."
            )
        use_cache = self.config.use_cache if use_cache is None else use_cache
        for name in ("output_attentions", "output_hidden_states"):
            kwargs.setdefault(name, getattr(self.config, name, None))
        streams, own = self.config.source_is_causal, {}
        if streams:
            own["visible_source"] = visible_source
        elif visible_source is not None:
            raise ValueError(
                "`visible_source` is only for models with `source_is_causal=True`; this one reads its source whole."
            )
        if cache is not None:
            target = decoder_inputs_embeds if decoder_input_ids is None else decoder_input_ids
            self.decoder.open_cache(cache, False, target.shape[0])
        written = not streams and cache is not None and cache.has_source
        self.share_padding()
        encodes = encoder_outputs is None and not written and (input_ids is not None or inputs_embeds is not None)
        if streams or (input_ids is not None and encoder_outputs is not None):  # which take no id for padding
            attention_mask = self.encoder.tokens_to_keep(input_ids, attention_mask)
        if encodes:
            past = {"cache": self.open_source(cache)} if streams and cache is not None else {}
            source = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
            encoder_outputs = self.encoder(*source, return_dict=True, **past, **kwargs)
            if not streams:
                attention_mask = self.encoder.tokens_to_keep(input_ids, attention_mask)
                if input_ids is not None and cache is not None:
                    cache.note_source(source_checksum(input_ids, attention_mask))
        if "attentions" not in self.decoder._can_record_outputs:  # LeaPformer's decoder has no weights to return
            kwargs.pop("output_attentions", None)
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            encoder_outputs=None if written else encoder_outputs,
            encoder_attention_mask=attention_mask,
            return_dict=True,
            **own,
            **kwargs,
        )
        given = encoder_outputs
        if given is None or isinstance(given, tuple | list):
            given = BaseModelOutput(*(given or ())[:1])
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            cache=outputs.cache,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=given.get("last_hidden_state"),
            encoder_hidden_states=given.get("hidden_states"),
            encoder_attentions=given.get("attentions"),
        )

    def write_source(
        self,
        cache: MemoryCache,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
    ) -> None:
        """Encode a source (b, s), and write it to a state; where it is causal, it continues that of the state.

        Raises:
            ValueError: The state has a whole source already; see `forward` for the rest.
        """
        streams = self.config.source_is_causal
        if cache.has_source and not streams:
            raise ValueError("The state has a source, which cannot go on. Create another state.")
        self.share_padding()
        keep = self.encoder.tokens_to_keep(input_ids, attention_mask)
        past = {"cache": self.open_source(cache)} if streams else {}
        own = keep if streams else attention_mask  # without a mask, ids of padding are padding
        outputs = self.encoder(input_ids, own, inputs_embeds=inputs_embeds, return_dict=True, **past)
        self.decoder.write_source(cache, outputs, keep, outputs.last_hidden_state.shape[0])
        if input_ids is not None and not streams:
            cache.note_source(source_checksum(input_ids, keep))

    def share_padding(self) -> None:
        """Copy `pad_token_id`, which may have been changed, to the encoder's own config."""
        if self.encoder.config.pad_token_id != self.config.pad_token_id:
            self.encoder.config.pad_token_id = self.config.pad_token_id

    def open_source(self, cache: MemoryCache) -> MemoryCache:
        """Return the state of a causal encoder within a decoder's state.

        Raises:
            ValueError: It has not read what the decoder has: a pass failed between the two, or the decoder was given
                `encoder_outputs`.
        """
        if cache.source is None:
            cache.source = MemoryCache(self.encoder.config)
        read, written = cache.source.tokens, None if cache.written is None else cache.written.tokens
        if is_tracing(read):
            return cache.source
        if (read is None) != (written is None) or (read is not None and not torch.equal(read, written.to(read.device))):
            tokens = [0 if part is None else part.tolist() for part in (read, written)]
            raise ValueError(
                f"The source cannot go on: the encoder's state has read {tokens[0]} tokens, and the decoder's "
                f"{tokens[1]} (after a failed pass, `generate` or `encoder_outputs`). Create another state."
            )
        return cache.source
