"""Positions of an encoder beyond the length that it was trained on, or fewer of them."""

import contextlib
import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .modeling_base import BoundedMemoryPreTrainedModel


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """Extend a position table by repeating its rows, or truncate it (Beltagy et al. 2020, Longformer, section 5).

    Repetition preserves the learned relations between neighbouring positions, except where two copies meet.

    Args:
        table: (first + trained, d).
        first: number of leading rows that are not positions (in RoBERTa, those up to the padding row).
        length: number of positions to return, at least 1.

    Returns:
        (first + length, d).
    """
    rows = table[first:]
    repeated = rows.repeat(-(-length // rows.shape[0]), 1)[:length]
    return torch.cat([table[:first], repeated])


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
