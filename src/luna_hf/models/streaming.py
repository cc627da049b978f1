"""The decoder of an encoder-decoder whose source is causal, for simultaneous translation (LeaPformer, section 4.3).

Encoder and decoder keep states of constant size. Each source token is written to the memory of every cross-attention
as soon as it is known, and each target token reads what has been written before it:

    encoder           causal attention
    decoder           causal attention to the target, then to the source tokens that have been written

In training, one scan over source and target does this for all target tokens at once, see `ops/interleaving.py`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput
from transformers.utils import is_tracing

from ..configuration import BoundedMemoryConfig
from ..layers.block import LayerStack
from ..layers.cache import MemoryCache
from ..layers.cross_attention import StreamedLayer
from ..ops.context import ForwardContext, make_context
from ..ops.interleaving import Interleaving, interleave
from .encoder_decoder import CrossDecoderMixin


class StreamingDecoderMixin(CrossDecoderMixin):
    """The decoder of an encoder-decoder with a causal source, without a head.

    `forward` takes `encoder_outputs` and `encoder_attention_mask` as `CrossDecoderMixin` does, with the source tokens
    that the state does not contain yet, if there are any; and `visible_source`.
    """

    layer_inputs = (*CrossDecoderMixin.layer_inputs, "visible_source")
    _no_split_modules = [*CrossDecoderMixin._no_split_modules, "StreamedLayer"]

    def add_layers(self, config: BoundedMemoryConfig) -> None:
        """Create the layers."""
        classes = (self.attention_class, self.convolution_class, self.attention_class)
        self.encoder = LayerStack(config, *classes, layer_class=StreamedLayer)

    def run_layers(
        self,
        hidden_states: Tensor,
        context: ForwardContext,
        encoder_outputs: ModelOutput | tuple | None,
        encoder_attention_mask: Tensor | None,
        visible_source: Tensor | None,
    ) -> Tensor:
        """Apply the layers to embedded tokens (b, n, d), which read the source as far as it is visible.

        Args:
            encoder_outputs, encoder_attention_mask: see `CrossDecoderMixin.begin_source`.
            visible_source: (b, n) long, number of source tokens that each target token may read, those in the state
                included, which cannot be hidden again; it never falls along a row. By default, all.

        Raises:
            ValueError: There is no source, or a shape or a number is wrong.
        """
        (batch, length), cache = hidden_states.shape[:2], context.cache
        source = self.source_states(encoder_outputs, encoder_attention_mask, batch)
        if source is None and (cache is None or not cache.has_source):
            raise ValueError(
                "The decoder has no source: pass `input_ids` or `encoder_outputs`, or a state in `cache` "
                "that contains some of it."
            )
        states, keep = (None, hidden_states.new_zeros(batch, 0, dtype=torch.bool)) if source is None else source
        written = None if cache is None else self.open_written(cache)
        before = 0 if written is None or written.tokens is None else written.tokens[:, None]
        if visible_source is None:
            visible = (keep.sum(1, keepdim=True) + before).expand(batch, length)
        else:
            visible = check_visible(visible_source, (batch, length), before, context.keep)
        order, targets, writes = interleave(keep, (visible - before).clamp(min=0))
        merged = make_context(writes, writes.shape[1], writes.device, written, context.options, context.window)
        merged = merged._replace(slots=context.slots, readers=targets)
        context = context._replace(source=Interleaving(order, targets, merged))
        if cache is not None:
            cache.begin()
            written.begin()
        hidden_states, _ = self.encoder(hidden_states, self.first_slot_states(), states, context)
        if written is not None:
            written.count(merged.lengths[:, 0], keep.shape[1])
        return hidden_states

    def write_source(
        self,
        cache: MemoryCache,
        outputs: ModelOutput | tuple | None,
        attention_mask: Tensor | None,
        rows: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Write more of a source to a state; arguments as of `CrossDecoderMixin.write_source`."""
        source = self.source_states(outputs, attention_mask, rows)
        if source is None:
            return
        (states, keep), written = source, self.open_written(cache)
        context = make_context(keep, keep.shape[1], keep.device, written, options, self.config.local_window)
        outer = ForwardContext(None, None, None, None, source=Interleaving(None, None, context))
        written.begin()
        for layer in self.encoder.layer:
            layer.write_source(None, states, outer)
        written.count(context.lengths[:, 0], keep.shape[1])

    def open_written(self, cache: MemoryCache) -> MemoryCache:
        """Return the state of the cross-attentions within a decoder's state."""
        if cache.written is None:
            cache.written = MemoryCache(self.config)
        return cache.written

    def source_states(
        self, outputs: ModelOutput | tuple | None, attention_mask: Tensor | None, rows: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return new source states (b, s, d) and their padding mask (b, s); `None` if there are none."""
        if isinstance(outputs, tuple | list):
            outputs = self.name_outputs(outputs)
        if outputs is None or outputs.get("last_hidden_state") is None:
            return None
        states, keep = self.check_source(outputs, attention_mask, rows)
        return states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if keep is None else keep


def check_visible(visible: Tensor, shape: tuple[int, int], before: Tensor | int, keep: Tensor | None) -> Tensor:
    """Return the numbers of visible source tokens (b, n) after a check; their values are not checked while tracing.

    Args:
        visible, shape: the numbers, and the shape that they must have.
        before: (b, 1) source tokens that the state has read.
        keep: (b, n) which target tokens are no padding.

    Raises:
        ValueError: The shape is wrong, a number is below 1 or what the state has read, or below the number before it.
    """
    if visible.shape != shape:
        raise ValueError(f"`visible_source` has shape {tuple(visible.shape)}, but the target has {shape}.")
    if is_tracing(visible) or visible.is_meta:
        return visible.long()
    if (visible.diff(dim=1) < 0).any() or visible.min() < 1:
        raise ValueError("`visible_source` must be at least 1, and may not fall from one target token to the next.")
    hidden = visible < before
    if (hidden if keep is None else hidden & keep).any():
        raise ValueError(
            "`visible_source` is below the number of source tokens that the state has read, which every later target "
            "token reads. Pass source tokens only when the policy reads them."
        )
    return visible.long()
