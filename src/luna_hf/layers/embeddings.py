"""Token, position and segment embeddings."""

import math

import torch
from torch import Tensor, nn
from transformers.utils import is_tracing

from ..configuration import BoundedMemoryConfig
from ..ops.attention import linear
from ..ops.positions import sinusoids


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions, called like an embedding.

    Computed in every pass: a table would be a buffer outside the state dict, which a model made on `meta` would lack,
    and which `model.to(dtype)` would round.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, position_ids: Tensor) -> Tensor:
        """Encode positions: (b, n) to (b, n, d) float32."""
        return sinusoids(position_ids, self.dim)


def token_positions(keep: Tensor, first: int) -> Tensor:
    """RoBERTa's position ids of a padding mask (b, n): `first + t` for the t-th real token, `first - 1` for padding."""
    return keep.long().cumsum(-1) * keep + first - 1  # `long` because ONNX has no cumsum of booleans


def repeated_positions(position_ids: Tensor, first: int, period: int) -> Tensor:
    """Position ids (..., n) whose rows repeat: positions 0 to `period - 1`, then 1 to `period - 1` again and again.

    `first` is the id of position 0, as in `token_positions`; the period is at least 2.
    """
    beyond = position_ids - first - 1  # position 1 is 0 here
    return torch.where(beyond < 0, position_ids, beyond % (period - 1) + first + 1)


def padding_row(config: BoundedMemoryConfig) -> int | None:
    """Return the token that only pads, or `None` if padding is also another special token, such as the last one."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    others = (*ends, config.bos_token_id, config.sep_token_id, config.decoder_start_token_id)
    return None if config.pad_token_id in others else config.pad_token_id


# Inputs that are rows of a table, and what helps if it lacks them.
_TABLES = {
    "Token ids": "Use the model's own tokenizer, or `resize_token_embeddings`.",
    "Position ids": "Use fewer positions, or `resize_position_embeddings`.",
    "`token_type_ids`": "Leave them out, or use a model with a larger `type_vocab_size`.",
}


class TokenEmbeddings(nn.Module):
    """Token, position and segment embeddings, LayerNorm, dropout, projection if widths differ; padding is zero."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width, self.period = config.embedding_width(), config.position_period
        # The embedding of `padding_idx` starts at zero and never learns.
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_row(config))
        self.scale = math.sqrt(width) if config.scales_embedding() else 1.0
        self.first_position = config.first_position
        # Decoders count positions from 0. That of an encoder-decoder has the positions of its encoder.
        self.offset = config.first_position if config.is_encoder_decoder else 0
        self.position_embeddings = None  # rotary: applied to queries and keys
        if config.position_embedding_type == "learned":
            rows = config.first_position + config.position_rows()
            self.position_embeddings = nn.Embedding(rows, width, padding_idx=config.first_position - 1)
        elif config.position_embedding_type == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(width)
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
        """Embed (b, n) ids, or complete (b, n, `embedding_size` or d) token embeddings, to (b, n, d) states.

        Raises:
            ValueError: A table has no row for an id (on a CPU; an accelerator reports it by itself, later), or segments
                have no embeddings.
        """
        try:
            tokens = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            length = tokens.shape[1]
            if position_ids is None and self.position_embeddings is not None:
                every = torch.ones(1, length, dtype=torch.bool, device=tokens.device) if keep is None else keep
                position_ids = token_positions(every, self.first_position)
            states = tokens * self.scale if self.scale != 1.0 else tokens
            if self.period is not None:
                position_ids = repeated_positions(position_ids, self.first_position, self.period)
            if self.position_embeddings is not None:
                states = states + self.position_embeddings(position_ids + self.offset).to(states.dtype)
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
        except IndexError:
            rows = None if position_ids is None else position_ids + self.offset
            raise self.missing_row(input_ids, rows, token_type_ids) from None
        # Masked before the norm, too: padding may hold anything, even NaN, which must not reach a state or a gradient.
        padding = None if keep is None else ~keep.unsqueeze(-1)
        states = states if padding is None else states.masked_fill(padding, 0.0)
        states = self.dropout(self.LayerNorm(states))
        states = states if self.embeddings_project is None else linear(self.embeddings_project, states)
        return states if padding is None else states.masked_fill(padding, 0.0)

    def missing_row(self, *given: Tensor | None) -> ValueError:
        """Return the error for token, position and segment ids, of which some have no row in their table."""
        tables = (self.word_embeddings, self.position_embeddings, self.token_type_embeddings)
        said = []
        for (name, advice), table, ids in zip(_TABLES.items(), tables, given, strict=True):
            rows = len(getattr(table, "weight", ()))
            if ids is not None and rows and (ids.min() < 0 or ids.max() >= rows):
                said.append(f"{name} run from {ids.min()} to {ids.max()}, but the table has {rows} rows. {advice}")
        return ValueError(" ".join(said))
