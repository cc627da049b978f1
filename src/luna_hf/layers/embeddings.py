"""Token, position and segment embeddings."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils import is_tracing

from ..configuration import BoundedMemoryConfig
from ..ops.attention import linear
from ..ops.positions import repeated_positions, sinusoids, sinusoids_at, token_positions


class SinusoidalPositions(nn.Module):
    """Fixed sinusoidal position table, indexed like an embedding."""

    def __init__(self, num_positions: int, dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_positions, self.dim, self.padding_idx = num_positions, dim, padding_idx
        self.table = nn.Buffer(self.make_table(), persistent=False)

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Recompute the table, which is not saved in checkpoints."""
        init.copy_(self.table, self.make_table())

    def make_table(self) -> Tensor:
        """Compute the table, (num_positions, dim) float32."""
        return sinusoids(self.num_positions, self.dim, self.padding_idx)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Look up positions: (b, n) to (b, n, d)."""
        return nn.functional.embedding(position_ids, self.table)


class EndlessSinusoids(nn.Module):
    """Sinusoidal positions computed on the fly, for decoders, which accept inputs of any length."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, position_ids: Tensor) -> Tensor:
        """Encode positions, counted from 0: (b, n) to (b, n, d)."""
        return sinusoids_at(position_ids, self.dim)


class TokenEmbeddings(nn.Module):
    """Token, position and segment embeddings, LayerNorm, dropout, projection if widths differ; padding is zero."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width, padding_idx = config.embedding_width(), config.pad_token_id
        num_positions = config.position_rows() + padding_idx + 1
        self.padding_idx, self.period = padding_idx, config.position_period
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_idx)
        self.scale = math.sqrt(width) if config.scales_embedding() else 1.0
        # Decoders count positions from 0. That of an encoder-decoder has the positions of its encoder.
        self.first_position = padding_idx + 1 if config.is_encoder_decoder else 0
        if config.position_embedding_type == "learned":
            self.position_embeddings = nn.Embedding(num_positions, width, padding_idx=padding_idx)
        elif config.position_embedding_type in ("rotary", "none"):  # rotary: applied to queries and keys
            self.position_embeddings = None
        elif config.is_decoder:
            self.position_embeddings = EndlessSinusoids(width)
        else:
            self.position_embeddings = SinusoidalPositions(num_positions, width, padding_idx)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.LayerNorm = (
            nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_layer_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.embeddings_project = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        keep: Tensor | None,
    ) -> Tensor:
        """Embed (b, n) ids, or complete (b, n, `embedding_size` or d) token embeddings, to (b, n, d) states."""
        tokens = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        length = tokens.shape[1]
        if position_ids is None and self.position_embeddings is not None:
            every = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if keep is None else keep
            position_ids = token_positions(every, self.padding_idx)
        states = tokens * self.scale if self.scale != 1.0 else tokens
        if self.period is not None:
            position_ids = repeated_positions(position_ids, self.padding_idx, self.period)
        if self.position_embeddings is not None:
            states = states + self.position_embeddings(position_ids + self.first_position).to(states.dtype)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, length, dtype=torch.long, device=tokens.device)
            states = states + self.token_type_embeddings(token_type_ids)
        # All-zero ids, as many tokenizers return, are the same as none; traced, they cannot be read.
        elif token_type_ids is not None and not is_tracing(token_type_ids) and token_type_ids.any():
            raise ValueError(
                f"`token_type_ids` contain {token_type_ids.max()}, but the model has no segment embeddings "
                "(`type_vocab_size` is 0). Leave them out, or use a model with `type_vocab_size` above 0."
            )
        # Masked before the norm, too: padding may hold anything, even NaN, which must not reach a state or a gradient.
        padding = None if keep is None else ~keep.unsqueeze(-1)
        states = states if padding is None else states.masked_fill(padding, 0.0)
        states = self.dropout(self.LayerNorm(states))
        states = states if self.embeddings_project is None else linear(self.embeddings_project, states)
        return states if padding is None else states.masked_fill(padding, 0.0)
