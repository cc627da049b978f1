"""Documents of any length, segment by segment: the packed states of a segment are what the next one starts from.

The paper names P as a memory across segments as future work (Ma et al. 2021, section 5).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import ModelOutput

# The dimension of an output's field along which segments lie. Of other fields the last segment's is returned.
_TOKEN_DIMS = {"last_hidden_state": 1, "hidden_states": 1, "attentions": 2, "pack_attentions": 3}


def read_segments(
    read: Callable[..., ModelOutput],
    inputs: dict[str, Tensor | None],
    keep: Tensor | None,
    segment_length: int,
    packed_states: Tensor | None = None,
) -> ModelOutput:
    """Read rows of any length in segments, each of which starts from the packed states of the one before it.

    A row's segments are counted from its first real token, so that padding on either side changes nothing.

    Args:
        read: the model: maps `attention_mask`, `packed_states` and `inputs` of a segment to an output with
            `last_hidden_state` (b, n, d), `packed_last_hidden_state` (b, l, d) and `packed_attention_mask`. A row
            without a token in the segment keeps its packed states.
        inputs: (b, n, ...) by name; `None` is passed on.
        keep: (b, n) padding mask, or `None` if nothing is padded.
        segment_length: tokens of a segment, enough to use all slots.
        packed_states: (b, l, d) packed states of an earlier segment.

    Returns:
        The output of the whole rows. Token states are in the order of the input; packed states are those of each row's
        last segment.
    """
    order = None if keep is None else (~keep).long().argsort(dim=1, stable=True)  # (b, n): real tokens first
    given = {name: None if tensor is None else _reorder(tensor, order, 1) for name, tensor in inputs.items()}
    given["attention_mask"] = None if keep is None else keep.gather(1, order)
    length = next(tensor.shape[1] for tensor in given.values() if tensor is not None)
    outputs, slots = [], None
    for start in range(0, length, segment_length):
        end = min(start + segment_length, length)
        segment = {name: None if tensor is None else tensor[:, start:end] for name, tensor in given.items()}
        output = read(packed_states=packed_states, **segment)
        if start == 0:
            slots = output.packed_attention_mask
        packed_states = output.packed_last_hidden_state
        outputs.append(output)
    joined = _join(outputs, None if order is None else order.argsort(dim=1))
    joined.packed_attention_mask = slots
    return joined


def _join(outputs: list[ModelOutput], order: Tensor | None) -> ModelOutput:
    """Join the fields that have an entry for each token, in the given order (b, n)."""
    joined = dict(outputs[-1].items())
    for name, dim in _TOKEN_DIMS.items():
        if (last := joined.get(name)) is None:
            continue
        parts = [output[name] for output in outputs]
        if isinstance(last, Tensor):
            joined[name] = _reorder(torch.cat(parts, dim), order, dim)
        else:
            joined[name] = tuple(_reorder(torch.cat(layer, dim), order, dim) for layer in zip(*parts, strict=True))
    return type(outputs[-1])(**joined)


def _reorder(tensor: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """Take (b, ..., n, ...) in another order (b, n) along `dim`."""
    if order is None:
        return tensor
    shape = [tensor.shape[0], *[1] * (tensor.dim() - 1)]
    shape[dim] = order.shape[1]
    return tensor.take_along_dim(order.view(shape), dim)


def stream_document(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, segment_length: int | None = None
) -> Iterator[ModelOutput]:
    """Read a document of any length with a Luna encoder, in memory that does not grow with it.

    Each segment starts from the packed states of the one before it. The last output of a classifier is that of the
    whole document, which it must pool from the packed states alone (`classifier_pooling="packed_mean"` or
    `"packed_max"`).

    Args:
        model: a Luna encoder, with or without a head, in evaluation mode.
        tokenizer: its tokenizer. Special tokens stand only at the ends of the document.
        text: the document.
        segment_length: tokens per segment; by default `config.segment_length`, or else `max_position_embeddings`.

    Yields:
        The model's output for each segment, with `packed_states` (1, l, d).

    Raises:
        ValueError: The model is not a Luna encoder, or is a classifier that reads token states; `text` is not one
            text; or a segment has too few tokens to use all slots.
    """
    config = model.config
    if not hasattr(config, "segment_length") or config.is_decoder or config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has no packed states that pass from one segment to the next.")
    if hasattr(model, "pooling") and config.classifier_pooling not in ("packed_mean", "packed_max"):
        raise ValueError(
            f'`classifier_pooling="{config.classifier_pooling}"` would read tokens of the last segment alone. Choose '
            '"packed_mean" or "packed_max", and finetune the model with it.'
        )
    if not isinstance(text, str):
        raise ValueError(f"`text` is a {type(text).__name__}, but must be one text. Stream each document by itself.")
    default = config.segment_length or config.max_position_embeddings
    size = default if segment_length is None else segment_length
    config.check_segment_length(size)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids.to(model.device)
    packed_states = None
    for segment in ids.split(size, dim=1):
        with torch.inference_mode():  # not across `yield`, which would leave it on in the caller
            output = model(segment, packed_states=packed_states, output_packed_states=True, return_dict=True)
        packed_states = output.packed_states
        yield output
