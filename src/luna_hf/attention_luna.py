"""Luna's nested attention (Ma et al. 2021, section 3.1): pack the tokens into l slots, unpack the slots to the tokens.

    packed    Y_P = Attn(P, C, C)                 l queries over the tokens of the context C (C = X in an encoder)
    unpacked  Y_X = Attn(X, Y_P, Y_P) W_o         n queries over the l slots

Both are ordinary multi-head softmax attention, so both go through transformers' attention interface. The packed context
has no output projection; W_o belongs to the layer (`attention.output.dense`, as in RoBERTa).
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from .attention_base import KeyMask, Linear, attend
from .configuration_luna import LunaConfig


class LunaMasks(NamedTuple):
    """Keys that the two attentions may read; `None` where every key counts."""

    tokens: KeyMask | None
    memory: KeyMask | None


class LunaAttention(nn.Module):
    """Projected multi-head attention with a key and a value matrix, or one for both (`tie_kv`)."""

    is_causal = False  # transformers' sdpa takes a missing attribute for True

    def __init__(self, config: LunaConfig, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        width = config.hidden_size
        self.query = Linear(width, width)
        if config.tie_kv:
            self.key_value = Linear(width, width)
        else:
            self.key = Linear(width, width)
            self.value = Linear(width, width)

    def attend(
        self, queries: Tensor, context: Tensor, mask: KeyMask | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(b, q, d) queries over a (b, k, d) context: heads concatenated (b, q, d), and the weights (b, h, q, k)."""
        if self.config.tie_kv:
            key = value = self.key_value(context)
        else:
            key, value = self.key(context), self.value(context)
        return attend(self, self.query(queries), key, value, mask, self.num_heads, **kwargs)


class LunaPackAttention(LunaAttention):
    """Pack: the slots read the context."""

    def __init__(self, config: LunaConfig) -> None:
        super().__init__(config, config.num_projected_attention_heads or config.num_attention_heads)

    def forward(
        self, packed_query: Tensor, context: Tensor, mask: KeyMask | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(b, l, d) and (b, n, d) to Y_P (b, l, d) and the pack weights (b, h_p, l, n)."""
        return self.attend(packed_query, context, mask, **kwargs)


class LunaSelfAttention(LunaAttention):
    """Both attentions of a layer, with the residual and the norm of the packed stream.

    The module's own projections are those of the unpack attention, under RoBERTa's names.
    """

    def __init__(self, config: LunaConfig) -> None:
        super().__init__(config, config.num_attention_heads)
        self.pack = LunaPackAttention(config)
        self.packed_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: Tensor,
        memory: Tensor,
        masks: LunaMasks,
        context: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One pack and unpack.

        Args:
            hidden_states: (b, n, d) token states X, already normed in a pre-norm model.
            memory: (b, l, d) packed states P as they left the previous layer.
            masks: tokens of the context, and slots, that may be read.
            context: (b, m, d) what is packed; `hidden_states` unless given.

        Returns:
            Y_X before its output projection (b, n, d), the next packed states (b, l, d), and the unpack weights
            (b, h, n, l).
        """
        context = hidden_states if context is None else context
        norm_first = self.config.norm_first
        packed_query = self.packed_layer_norm(memory) if norm_first else memory
        packed_context, _ = self.pack(packed_query, context, masks.tokens, **kwargs)
        output, weights = self.attend(hidden_states, packed_context, masks.memory, **kwargs)
        memory = memory + self.dropout(packed_context)
        return output, memory if norm_first else self.packed_layer_norm(memory), weights
