"""How encoders read texts of unlike lengths: padding is left out, and a row may hold several texts (`unpadding.py`)."""

from typing import Any

from torch import Tensor

from .context import ForwardContext, make_encoder_context, whole_length
from .unpadding import Stream, StreamContext, find_starts, is_readable, make_stream


class StreamMixin:
    """The parts of a base model that lay out its inputs as a stream."""

    one_text_per_row = False  # whether rows of several texts are refused, for a head or decoder that reads whole rows

    def find_texts(
        self, inputs: Tensor, keep: Tensor | None, position_ids: Tensor | None, markers: dict[str, Any]
    ) -> Tensor | None:
        """Return where the texts of (b, n) or (b, n, d) inputs begin, see `unpadding.find_starts`.

        Raises:
            ValueError: A row holds several texts, and is read as one; or positions fall within a text.
        """
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
        unpad: bool | None,
        options: dict[str, Any],
    ) -> Stream | None:
        """Lay out the tokens of a batch as a stream, or return `None` to compute its rows as they are.

        Args:
            inputs: (b, n) or (b, n, d).
            keep, starts: see `unpadding.make_stream`.
            unpad: whether to remove padding; `None` to do so where that is faster.
            options: keyword arguments of `forward`.

        Raises:
            ValueError: Several texts in a row, and an input or output that only padded rows have.
        """
        asked = [f"output_{name}" for name in self._can_record_outputs]
        asked = [name for name in asked if options.get(name, getattr(self.config, name, False))]
        given = [] if options.get("packed_states") is None else ["packed_states"]
        if starts is None:
            is_possible = keep is not None and is_readable(keep) and not given
            # Eager attention is for looking at attention, row by row.
            automatic = unpad is None and self.config._attn_implementation != "eager"
            if asked or not is_possible or not (unpad or automatic):
                return None
        elif wrong := given + [
            name for name in asked if name != "output_hidden_states" or len(inputs) > 1 or keep is not None
        ]:
            raise ValueError(f"`{wrong[0]}` needs one text per row: pad the texts (DataCollatorWithPadding).")
        shape, width = inputs.shape[:2], self.config.hidden_size
        window = options.get("local_window")
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
