"""The encoder shared by all families, without a head.

Each `...Mixin` implements a complete model; a family's class only names its parts.
"""

import contextlib
import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.output_capturing import capture_outputs

from ..configuration import BoundedMemoryConfig
from ..layers.block import DepthwiseConvolution
from ..ops.context import ForwardContext, make_encoder_context, whole_length
from ..ops.positions import repeat_positions
from ..ops.recompute import is_watched
from ..ops.unpadding import BOUNDARIES, UnpaddedBatch, UnpaddedContext, find_starts, is_readable, unpad_batch
from .base import BaseModelMixin, BoundedMemoryPreTrainedModel


class EncoderPreTrainedModel(BoundedMemoryPreTrainedModel):
    """Base class of all encoders: adds a position table of any length."""

    @classmethod
    def length_to_set(
        cls, source: str | os.PathLike | None, options: dict[str, Any]
    ) -> tuple[int | None, dict[str, Any]]:
        """The `max_position_embeddings` that a user or an adapter wants, if the weights have another.

        The model is loaded with that of its weights, and its positions are then resized.
        """
        config = options.get("config")
        given = isinstance(config, PreTrainedConfig)
        wanted = config.max_position_embeddings if given else options.get("max_position_embeddings")
        stored = {}
        if source is not None and wanted is not None:
            place = {name: value for name, value in options.items() if name not in ("trust_remote_code", "config")}
            with contextlib.suppress(OSError):  # a folder of weights alone
                stored, _ = cls.config_class.get_config_dict(source, **place)
        length = stored.get("max_position_embeddings", wanted)
        if length == wanted:
            return None, options
        if not given:
            return wanted, {**options, "max_position_embeddings": length}
        config = copy.deepcopy(config)
        config.max_position_embeddings = length
        return wanted, {**options, "config": config}

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
    """Resize a table of learned positions in place, from one number of positions to another; others need no change."""
    weight = getattr(table, "weight", None)
    if weight is not None:
        rows = repeat_positions(weight.detach(), table.num_embeddings - trained, length)
        table.weight, table.num_embeddings = nn.Parameter(rows, requires_grad=weight.requires_grad), len(rows)


# Keywords of the encoders' forward pass besides those of every model.
_OWN_KEYWORDS = (*BOUNDARIES, "max_length_q", "max_length_k", "unpad_inputs", "num_global_tokens")


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
            position_ids: (b, n) rows of the position table; by default `config.first_position + t` for the t-th real
                token (from 0). Positions that begin at 0 are counted from there instead. Where they return to the row's
                first, the next text begins. Memories that depend on token order ignore them and use the order of the
                input.
            inputs_embeds: (b, n, d) token embeddings, instead of `input_ids`; before scaling, positions and LayerNorm.
            global_attention_mask: (b, n), 1 for tokens to mark, as in Longformer: every token reads them, and they read
                every token (`config.global_tokens_read_all`).

        Keyword Args:
            output_hidden_states, output_attentions, return_dict: as in Transformers. Attentions (eager only) are the
                read weights: (b, h, n, keys) over slots, marked tokens, selected tokens and window positions, in this
                order, as far as the layer has them; or (b, h, n, n) where every token is read. A token that is read as
                marked or selected has no weight in the window, and rows of marked tokens that read all others are zero.
                A family may record more.
            local_window, read_slots: for models with `config.local_window`. A smaller window for this
                pass, 0 for none; and `False` to read no slots.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: where the texts of a row begin, if it holds several.
                Each has its own memory. The output has the shape of the input, but packed states are (texts, l, d).
            unpad_inputs: overrides `config.unpad_inputs`.
            num_global_tokens: the largest number of marked tokens in a row, if known: compiled and
                exported models otherwise have `config.max_global_tokens` places for them.

        Raises:
            ValueError: A shape is wrong, the input is empty or longer than `max_position_embeddings`, `position_ids`
                fall within a text, or a keyword is unknown or not supported.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        hidden_states, slot_states, context = self.prepare_inputs(*inputs, kwargs)
        hidden_states, slot_states = self.encoder(hidden_states, slot_states, context)
        if isinstance(context, UnpaddedContext):
            hidden_states, slot_states = context.restore(hidden_states, slot_states)
        elif context.keep is not None and kwargs["unpad_inputs"] is not False:  # in every batch alike
            hidden_states = hidden_states.masked_fill(~context.keep.unsqueeze(-1), 0.0)
        return self.make_output(hidden_states, slot_states, context)

    def prepare_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        global_attention_mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, ForwardContext | UnpaddedContext]:
        """Check the arguments of `forward`, and decide all that is the same in every layer.

        Returns:
            The embedded tokens, (b, n, d), or (1, t, d) without padding; the first layer's `slot_states`, see
            `MemoryAttention.write`; and the context shared by all layers.

        Raises:
            ValueError: See `forward`.
        """
        self.check_keywords(keywords)
        if keywords.get("unpad_inputs") is None:
            keywords["unpad_inputs"] = self.config.unpad_inputs
        ids = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        longest = self.check_shapes(input_ids, inputs_embeds, attention_mask, **ids)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        keep, starts = self.tokens_to_keep(input_ids, attention_mask), None
        is_hidden_zero = keep is not None and keywords["unpad_inputs"] is not False
        if is_hidden_zero and input_ids is not None and attention_mask is not None:
            self.warn_of_hidden(input_ids, keep)
        marked = None if global_attention_mask is None else self.find_marked(inputs, global_attention_mask)
        may_hold_several = position_ids is not None
        for name in BOUNDARIES:
            may_hold_several = may_hold_several or keywords.get(name) is not None
        if may_hold_several:
            starts = self.find_texts(inputs, keep, position_ids, keywords)
            position_ids = self.table_positions(position_ids, keep)
        unpadded = None if keep is None and starts is None else self.unpad(inputs, keep, starts, keywords)
        longest, limit = longest if unpadded is None else unpadded.longest, self.config.max_position_embeddings
        if longest > limit and self.config.longest_input() is not None:
            raise ValueError(
                f"The input has {longest} tokens, but the model accepts at most {limit} (`max_position_embeddings`). "
                f"Pass `truncation=True, max_length={limit}` to the tokenizer or pipeline, or use a longer model."
            )
        options = {**keywords, "most_marked": keywords.get("num_global_tokens")}
        for name in _OWN_KEYWORDS:
            options.pop(name, None)
        if unpadded is None:
            hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
            return hidden_states, *self.begin(hidden_states, keep, marked, **options)
        if position_ids is None:
            position_ids = unpadded.positions + self.config.first_position
        else:
            position_ids = unpadded.select(position_ids)
            if ((position_ids[:, 1:] < position_ids[:, :-1]) & (unpadded.positions[:, 1:] > 0)).any():
                raise ValueError("`position_ids` fall within a text: count them up from each text's first token.")
        tokens = map(unpadded.select, (input_ids, inputs_embeds, token_type_ids, marked))
        input_ids, inputs_embeds, token_type_ids, marked = tokens
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, None)
        return hidden_states, *self.begin_unpadded(hidden_states, unpadded, marked, options)

    def begin(
        self, hidden_states: Tensor, keep: Tensor | None, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor | None, ForwardContext]:
        """Return the first layer's `slot_states` for (b, n, d) states, and the context shared by all layers."""
        context = self.make_context(hidden_states, keep, marked, options)
        slot_states = self.first_slot_states()
        return slot_states, self.attention_class.prepare(self.config, hidden_states, slot_states, context)

    def begin_unpadded(
        self, hidden_states: Tensor, unpadded: UnpaddedBatch, marked: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor | None, UnpaddedContext]:
        """Like `begin`, for an unpadded batch (1, t, d)."""
        slot_states, slots = self.text_slot_states(unpadded)
        marks = [None] * len(unpadded.buckets) if marked is None else unpadded.in_buckets(marked.squeeze(0))
        context, contexts = UnpaddedContext(unpadded, (), slots, unpadded.lengths), []
        for bucket, rows, mark in zip(unpadded.buckets, context.split(hidden_states, slot_states), marks, strict=True):
            own = self.make_context(rows[0], bucket.keep, mark, options)
            contexts.append(self.attention_class.prepare(self.config, *rows, own))
        return slot_states, context._replace(contexts=tuple(contexts))

    def make_context(
        self, states: Tensor, keep: Tensor | None, marked: Tensor | None, options: dict[str, Any]
    ) -> ForwardContext:
        """Return the context of (b, n, d) states, without the family's masks."""
        return make_encoder_context(self.config, states, keep, options, marked, self.attention_class.has_slots)

    def text_slot_states(self, unpadded: UnpaddedBatch) -> tuple[Tensor | None, tuple[int, ...] | None]:
        """Return the first layer's `slot_states` for an unpadded batch, and `UnpaddedContext.slots`."""
        return self.first_slot_states(), None

    def make_output(
        self, hidden_states: Tensor, slot_states: Tensor | None, context: ForwardContext | UnpaddedContext
    ) -> BaseModelOutput:
        """Build the model's output from that of the last layer."""
        return BaseModelOutput(last_hidden_state=hidden_states)

    def warn_of_hidden(self, input_ids: Tensor, keep: Tensor) -> None:
        """Warn once of masked tokens (b, n) that are not padding: unlike in a BERT, their states are zero."""
        pad = self.config.pad_token_id
        if pad is not None and is_readable(keep) and ((input_ids != pad) & ~keep).any():
            logging.get_logger(__name__).warning_once(
                "`attention_mask` hides tokens that are not padding (`pad_token_id`). Their states are zero: pass "
                "1 for these tokens if you need states."
            )

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

    def find_texts(
        self, inputs: Tensor, keep: Tensor | None, position_ids: Tensor | None, keywords: dict[str, Any]
    ) -> Tensor | None:
        """Return where the texts of (b, n) or (b, n, d) inputs begin, see `find_starts`.

        Raises:
            ValueError: A row holds several texts, and is read as one, or all are padding; or positions fall in a row
                that is one text.
        """
        markers = {name: keywords[name] for name in BOUNDARIES if keywords.get(name) is not None}
        starts = find_starts(inputs.shape[:2], keep, position_ids, markers)
        if starts is None:
            self.check_positions(position_ids, keep)
        elif self.one_text_per_row:
            raise ValueError(
                f"`{next(iter(markers), 'position_ids')}` marks several texts in a row, but what reads this encoder "
                "takes one text per row: pad the texts (DataCollatorWithPadding), whose padding is not computed."
            )
        elif keep is not None and not keep.any():
            raise ValueError("The rows hold several texts, but all tokens are padding.")
        return starts

    def unpad(
        self, inputs: Tensor, keep: Tensor | None, starts: Tensor | None, keywords: dict[str, Any]
    ) -> UnpaddedBatch | None:
        """Leave out the padding of a batch, or return `None` to compute its rows as they are.

        Args:
            inputs: (b, n) or (b, n, d).
            keep, starts: see `unpad_batch`.
            keywords: keyword arguments of `forward`, with its `unpad_inputs` or the config's.

        Raises:
            ValueError: Several texts in a row, and an input or output that only padded rows have.
        """
        wanted, needs_rows = keywords["unpad_inputs"], []
        if starts is None and wanted is False:
            return None
        if keywords.get("packed_states") is not None:
            needs_rows.append("packed_states")
        one_text = starts is not None and len(inputs) == 1 and keep is None  # whose states are those of its row
        for name in self._can_record_outputs:
            output = f"output_{name}"
            is_asked = keywords.get(output, getattr(self.config, output, False))
            if is_asked and not (one_text and name == "hidden_states"):
                needs_rows.append(output)
        if starts is not None and needs_rows:
            raise ValueError(f"`{needs_rows[0]}` needs one text per row: pad the texts (DataCollatorWithPadding).")
        if starts is None:
            # Eager attention is for looking at attention, row by row.
            is_automatic = wanted is None and self.config._attn_implementation != "eager"
            if needs_rows or not is_readable(keep) or not (wanted or is_automatic):
                return None
            if not wanted and is_watched(*self.children()):
                return None
        shape, window = inputs.shape[:2], keywords.get("local_window")
        border = whole_length(self.config, self.config.local_window if window is None else window)
        unpadded = unpad_batch(keep, starts, shape, inputs.device, self.config.hidden_size, border)
        if starts is not None:
            return unpadded
        has_empty_row = not unpadded.lengths.all()
        return None if has_empty_row or not (wanted or unpadded.cost < shape[0] * shape[1]) else unpadded

    def table_positions(self, position_ids: Tensor | None, keep: Tensor | None) -> Tensor | None:
        """Return rows of the position table for `position_ids` (1 or b, n), which may count from 0 instead.

        No token has row 0, so that positions from 0, as `DataCollatorWithFlattening` counts them, are no rows.

        Raises:
            ValueError: They start in between, at a row that no token has.
        """
        if position_ids is None:
            return None
        first = self.config.first_position
        real = position_ids if keep is None else position_ids.masked_fill(~keep, first)
        begin = real.amin(-1, keepdim=True)
        if is_readable(begin) and ((begin > 0) & (begin < first)).any():
            raise ValueError(f"`position_ids` start at {begin.max()}. Count them from 0, or from {first}.")
        return position_ids + (begin == 0) * first
