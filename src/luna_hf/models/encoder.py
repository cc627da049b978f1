"""The encoder shared by all families, without a head.

Each `...Mixin` implements a complete model; a family's class only names its parts.
"""

import contextlib
import copy
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from ..configuration import BoundedMemoryConfig
from ..layers.block import DepthwiseConvolution
from ..ops.context import ForwardContext, make_encoder_context, whole_length
from ..ops.positions import repeat_positions
from ..ops.unpadding import BOUNDARIES, Stream, StreamContext, find_starts, is_readable, make_stream
from .base import BaseModelMixin, BoundedMemoryPreTrainedModel


class EncoderPreTrainedModel(BoundedMemoryPreTrainedModel):
    """Base class of all encoders: adds a position table of any length."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like `PreTrainedModel.from_pretrained`, but resize the positions if `max_position_embeddings` is overridden.

        Raises:
            ValueError: The checkpoint has another architecture, or its positions cannot be resized.
        """
        source, given = pretrained_model_name_or_path, isinstance(config, PreTrainedConfig)
        wanted = config.max_position_embeddings if given else kwargs.get("max_position_embeddings")
        stored = {}
        if source is not None and wanted is not None:
            with contextlib.suppress(OSError):  # a folder of weights alone
                stored, _ = cls.config_class.get_config_dict(source, **kwargs)
        length = stored.get("max_position_embeddings", wanted)
        if length != wanted and given:
            config = copy.deepcopy(config)
            config.max_position_embeddings = length
        elif length != wanted:
            kwargs["max_position_embeddings"] = length
        loaded = super().from_pretrained(source, *model_args, config=config, **kwargs)
        if length != wanted:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
            model.resize_position_embeddings(wanted)
        return loaded

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Accept inputs of up to this number of tokens, in place, and set `config.max_position_embeddings`.

        Learned positions are repeated after the trained ones (`repeat_positions`), or cut; with a `position_period`,
        the table keeps its rows. Sinusoids are computed.

        Raises:
            ValueError: The number is below 1, the attention has weights for each position, or the table is not in
                memory (offloaded or sharded).
        """
        trained, table = self.config.position_rows(), None
        if new_num_position_embeddings != self.config.max_position_embeddings:
            table = self.get_position_embeddings()
        weight = getattr(table, "weight", None)
        if weight is not None and (len(weight) < trained or (weight.is_meta and hasattr(table, "_hf_hook"))):
            raise ValueError("The position table is sharded or offloaded. Resize it before you distribute the model.")
        super().resize_position_embeddings(new_num_position_embeddings)
        resize_table(table, trained, self.config.position_rows())


def resize_table(table: nn.Module | None, trained: int, length: int) -> None:
    """Resize a table of learned or sinusoidal positions in place, from one number of positions to another."""
    weight = getattr(table, "weight", None)
    if weight is not None:
        rows = repeat_positions(weight.detach(), table.num_embeddings - trained, length)
        table.weight, table.num_embeddings = nn.Parameter(rows, requires_grad=weight.requires_grad), len(rows)
    elif hasattr(table, "make_table"):  # sinusoids; a decoder's are endless
        table.num_positions += length - trained
        table.table = nn.Buffer(table.make_table().to(table.table), persistent=False)


# Keywords of the encoders' forward pass besides those of every model.
_OWN_KEYWORDS = (*BOUNDARIES, "max_length_q", "max_length_k", "unpad_inputs", "num_global_tokens")


class EncoderInputs(NamedTuple):
    """What the layers of an encoder get."""

    hidden_states: Tensor  # (b, n, d) embedded tokens, or (1, t, d) as a stream without padding
    carried: Tensor | None  # the first layer's other input, see `MemoryAttention.write`
    context: ForwardContext | StreamContext


class EncoderModelMixin(BaseModelMixin):
    """The encoder without a head, the base model of a family's task models."""

    auto_classes = ("AutoModel", "AutoModelForTextEncoding")
    convolution_class = DepthwiseConvolution
    own_keywords = _OWN_KEYWORDS
    one_text_per_row = False  # whether rows of several texts are refused, for a head or decoder that reads whole rows

    def __init__(self, config: BoundedMemoryConfig) -> None:
        for kind in ("is_decoder", "is_encoder_decoder"):
            if getattr(config, kind):
                name = type(self).__name__
                raise ValueError(f"{name} is an encoder, but the config has `{kind}=True`. Load it with AutoModel.")
        super().__init__(config)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (b, n) token ids.
            attention_mask: (b, n), 1 for tokens and 0 for padding on either side. Without it, every `pad_token_id` in
                `input_ids` is padding.
            token_type_ids: (b, n) segment ids, if the model has segment embeddings.
            position_ids: (b, n) rows of the position table; by default `pad_token_id + t` for the t-th real token (from
                1). Positions that begin at 0 are counted from there instead. Where they return to the row's first, the
                next text begins. Memories that depend on token order ignore them and use the order of the input.
            inputs_embeds: (b, n, d) token embeddings, instead of `input_ids`; before scaling, positions and LayerNorm.
            global_attention_mask: (b, n), 1 for tokens to mark, as in Longformer: every token reads them, and they read
                every token (`config.global_tokens_read_all`).
            output_hidden_states, output_attentions, return_dict: keyword only. Attentions (eager only) are the read
                weights: (b, h, n, keys) over slots, marked tokens, selected tokens and window positions, in this order,
                as far as the layer has them; or (b, h, n, n) where every token is read. A token that is read as marked
                or selected has no weight in the window, and rows of marked tokens that read all others are zero. A
                family may record more.
            local_window, read_slots: keyword only, for models with `config.local_window`. A smaller window for this
                pass, 0 for none; and `False` to read no slots.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: keyword only; where the texts of a row begin, if it holds several.
                Each has its own memory. The output has the shape of the input, but packed states are (texts, l, d).
            unpad_inputs: keyword only; overrides `config.unpad_inputs`.
            num_global_tokens: keyword only; the largest number of marked tokens in a row, if known: compiled and
                exported models otherwise have `config.max_global_tokens` places for them.

        Raises:
            ValueError: A shape is wrong, the input is empty or longer than `max_position_embeddings`, `position_ids`
                fall within a text, or a keyword is unknown or not supported.
        """
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        hidden_states, carried, context = self.prepare_inputs(*given, kwargs)
        hidden_states, carried = self.encoder(hidden_states, carried, context)
        if isinstance(context, StreamContext):
            hidden_states, carried = context.restore(hidden_states, carried)
        return self.make_output(hidden_states, carried, context)

    def prepare_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        global_attention_mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> EncoderInputs:
        """Check the arguments of `forward`, lay out the tokens with or without padding, and embed them.

        Raises:
            ValueError: See `forward`.
        """
        self.check_keywords(keywords)
        length = self.check_shapes(input_ids, inputs_embeds, attention_mask)
        options = {**keywords, "most_marked": keywords.get("num_global_tokens")}
        for name in _OWN_KEYWORDS:
            options.pop(name, None)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        keep, stream = self.tokens_to_keep(input_ids, attention_mask), None
        marked = None if global_attention_mask is None else self.find_marked(inputs, global_attention_mask)
        starts, may_hold_several = None, position_ids is not None
        for name in BOUNDARIES:
            may_hold_several = may_hold_several or keywords.get(name) is not None
        if may_hold_several:
            starts = self.find_texts(inputs, keep, position_ids, keywords)
            position_ids = self.table_positions(position_ids, keep)
        if keep is not None or starts is not None:
            stream = self.lay_out(inputs, keep, starts, keywords)
        limit, longest = self.config.longest_input(), length if stream is None else stream.longest
        if limit is not None and longest > limit:
            raise ValueError(
                f"The input has {longest} tokens, but the model accepts at most {limit} (`max_position_embeddings`). "
                f"Use `tokenizer(..., truncation=True, max_length={limit})`, or a model with more positions."
            )
        if stream is None:
            hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
            return EncoderInputs(hidden_states, *self.begin(hidden_states, keep, marked, **options))
        position_ids = self.stream_positions(position_ids, stream)
        input_ids, inputs_embeds, token_type_ids = map(stream.select, (input_ids, inputs_embeds, token_type_ids))
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, None)
        return EncoderInputs(hidden_states, *self.begin_stream(hidden_states, stream, stream.select(marked), **options))

    def begin(
        self, hidden_states: Tensor, keep: Tensor | None, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor | None, ForwardContext]:
        """Return the first layer's `carried` input for (b, n, d) states, and the context shared by all layers."""
        context = self.make_context(hidden_states, keep, marked, options)
        carried = self.first_carried()
        return carried, self.attention_class.prepare(self.config, hidden_states, carried, context)

    def find_marked(self, inputs: Tensor, global_attention_mask: Tensor) -> Tensor | None:
        """Return the marked tokens (b, n) of (b, n) or (b, n, d) inputs, or `None` if no token is marked.

        Raises:
            ValueError: The family has no marked tokens, or the mask has another shape.
        """
        if not self.config.reads_exact_tokens:
            raise ValueError(
                f"`global_attention_mask` is not supported: {self.config.model_type} models have no softmax over slots "
                "and window that marked tokens could join. Leave it out."
            )
        if global_attention_mask.shape != inputs.shape[:2]:
            raise ValueError(
                f"`global_attention_mask` must have the shape of the input, {tuple(inputs.shape[:2])}, but has shape "
                f"{tuple(global_attention_mask.shape)}."
            )
        marked = global_attention_mask != 0
        return marked if not is_readable(marked) or marked.any() else None

    def make_output(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext | StreamContext
    ) -> BaseModelOutput:
        """Build the model's output from that of the last layer."""
        return BaseModelOutput(last_hidden_state=hidden_states)

    def find_texts(
        self, inputs: Tensor, keep: Tensor | None, position_ids: Tensor | None, keywords: dict[str, Any]
    ) -> Tensor | None:
        """Return where the texts of (b, n) or (b, n, d) inputs begin, see `find_starts`.

        Raises:
            ValueError: A row holds several texts, and is read as one; or positions fall within a text.
        """
        markers = {name: keywords.get(name) for name in BOUNDARIES}
        starts = find_starts(inputs.shape[:2], keep, position_ids, markers)
        if starts is None:
            self.check_positions(position_ids, keep)
        elif self.one_text_per_row:
            given = next((name for name, marker in markers.items() if marker is not None), "position_ids")
            raise ValueError(
                f"`{given}` marks several texts in a row, but what reads this encoder takes one text per row: pad the "
                "texts instead (DataCollatorWithPadding), whose padding is not computed."
            )
        return starts

    def make_context(
        self, states: Tensor, keep: Tensor | None, marked: Tensor | None, options: dict[str, Any]
    ) -> ForwardContext:
        """Return the context of (b, n, d) states, without the family's masks."""
        return make_encoder_context(self.config, states, keep, options, marked, self.attention_class.has_slots)

    def begin_stream(
        self, hidden_states: Tensor, stream: Stream, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor | None, StreamContext]:
        """Like `begin`, for a stream (1, t, d)."""
        carried, slots = self.carried_by_texts(stream)
        marks = [None] * len(stream.buckets) if marked is None else stream.in_buckets(marked.squeeze(0))
        context = StreamContext(stream, (), slots, stream.lengths)
        parts = []
        for bucket, rows, mark in zip(stream.buckets, context.split(hidden_states, carried), marks, strict=True):
            own = self.make_context(rows[0], bucket.keep, mark, options)
            parts.append(self.attention_class.prepare(self.config, *rows, own))
        return carried, context._replace(parts=tuple(parts))

    def carried_by_texts(self, stream: Stream) -> tuple[Tensor | None, tuple[int, ...] | None]:
        """Return the first layer's `carried` input for a stream, and `StreamContext.slots`."""
        return self.first_carried(), None

    def lay_out(
        self,
        inputs: Tensor,
        keep: Tensor | None,
        starts: Tensor | None,
        keywords: dict[str, Any],
    ) -> Stream | None:
        """Lay out the tokens of a batch as a stream, or return `None` to compute its rows as they are.

        Args:
            inputs: (b, n) or (b, n, d).
            keep, starts: see `make_stream`.
            keywords: keyword arguments of `forward`.

        Raises:
            ValueError: Several texts in a row, and an input or output that only padded rows have.
        """
        unpad = keywords.get("unpad_inputs")
        unpad = self.config.unpad_inputs if unpad is None else unpad
        if starts is None and (keep is None or unpad is False):
            return None
        asked = [f"output_{name}" for name in self._can_record_outputs]
        asked = [name for name in asked if keywords.get(name, getattr(self.config, name, False))]
        given = [] if keywords.get("packed_states") is None else ["packed_states"]
        if starts is None:
            is_possible = is_readable(keep) and not given
            # Eager attention is for looking at attention, row by row.
            automatic = unpad is None and self.config._attn_implementation != "eager"
            if asked or not is_possible or not (unpad or automatic):
                return None
        elif wrong := given + [
            name for name in asked if name != "output_hidden_states" or len(inputs) > 1 or keep is not None
        ]:
            raise ValueError(f"`{wrong[0]}` needs one text per row: pad the texts (DataCollatorWithPadding).")
        shape, width = inputs.shape[:2], self.config.hidden_size
        window = keywords.get("local_window")
        border = whole_length(self.config, self.config.local_window if window is None else window)
        stream = make_stream(keep, starts, shape, inputs.device, width, border)
        if starts is None and (len(stream.lengths) < shape[0] or not (unpad or stream.pays(width))):
            return None  # the first: a row of padding alone
        return stream

    def table_positions(self, position_ids: Tensor | None, keep: Tensor | None) -> Tensor | None:
        """Return rows of the position table for `position_ids` (1 or b, n), which may count from 0 instead.

        No token has row 0, so that positions from 0, as `DataCollatorWithFlattening` counts them, are no rows.
        """
        if position_ids is None:
            return None
        padding_idx = self.config.pad_token_id
        real = position_ids if keep is None else position_ids.masked_fill(~keep, padding_idx + 1)
        return position_ids + (real.amin(-1, keepdim=True) == 0) * (padding_idx + 1)

    def stream_positions(self, position_ids: Tensor | None, stream: Stream) -> Tensor:
        """Return the positions of a stream's tokens, rows of the position table (1, t).

        Raises:
            ValueError: They fall within a text.
        """
        if position_ids is None:
            return stream.positions + self.config.pad_token_id + 1
        positions = stream.select(position_ids)
        if ((positions[:, 1:] < positions[:, :-1]) & (stream.positions[:, 1:] > 0)).any():
            raise ValueError("`position_ids` fall within a text: count them up from each text's first token.")
        return positions
