"""Comparing a converted model with the authors' checkpoint, layer by layer, in float64; see `reference`."""

import math
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

import luna_hf
from luna_hf.scripting import UserError, reason

from .arguments import TRANSLATION
from .checkpoint import Original
from .config import MODELS, head_name
from .reference import PADDING_ID, Stored, embed, run, translate

EXACT = 1e-9  # of the difference, relative to the largest number of a layer where that exceeds 1
BEYOND_SLOTS = 32  # tokens of the longest row beyond the number of slots
_LOADING_ERRORS = (
    *(OSError, SafetensorError, ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError),
    *(StrictDataclassError, HFValidationError, HfHubHTTPError),
)
# The states of a row by the names of `reference`.
States = dict[str, Tensor]


# ---- the report ----


@dataclass(frozen=True)
class Row:
    """One comparison: the states of one stream after one layer, over all inputs."""

    layer: str  # "embedding", "layer 1", ..., "logits" or the name of a head
    stream: str  # "tokens", "packed", or "" for a head
    difference: float  # the largest absolute one
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the difference is a number within its limit."""
        return self.difference <= self.limit < math.inf


@dataclass(frozen=True)
class Report:
    """All comparisons of a model with its original."""

    rows: list[Row]  # in the order of the computation
    inputs: str  # of both models, for example "4 rows of 1, 64, 128, 160 tokens"

    @property
    def ok(self) -> bool:
        """Whether everything is equal."""
        return all(row.ok for row in self.rows)

    def summary(self) -> str:
        """The result in a sentence."""
        wrong = [row for row in self.rows if not row.ok]
        row = wrong[0] if wrong else max(self.rows, key=lambda row: row.difference / row.limit)
        found = "Not equal to the original: first" if wrong else f"Equal to the original on {self.inputs}: largest"
        name = f"{row.layer}, {row.stream}" if row.stream else row.layer
        return f"{found} difference {row.difference:.1e} ({name}), limit {row.limit:.1e}."

    def lines(self) -> list[str]:
        """The table, with a line for every layer, and the summary."""
        width = max(len(row.layer) for row in self.rows)
        lines = [f"Inputs: {self.inputs}", "", f"{'':{width}}    tokens     limit    packed     limit"]
        for layer in dict.fromkeys(row.layer for row in self.rows):
            here = [row for row in self.rows if row.layer == layer]
            cells = "".join(f"  {row.difference:8.1e}  {row.limit:8.1e}" for row in here)
            lines.append(f"{layer:{width}}{cells}" + "  not equal" * any(not row.ok for row in here))
        return [*lines, "", self.summary()]


# ---- our model ----


def load(source: str | Path, dtype: torch.dtype | str = "auto") -> tuple[PreTrainedModel, torch.dtype | None]:
    """The model of a folder or Hub repository in eval mode, and its type according to config.json.

    `dtype="auto"` keeps the type of the stored weights, whatever config.json says.

    Raises:
        UserError: It cannot be read or is incomplete, or the authors have no such model.
    """
    known = dict.fromkeys(model.__name__ for model in MODELS.values())
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its warnings are raised here
    try:
        config = AutoConfig.from_pretrained(source)
        kind = (config.architectures or ["a model without a class (`architectures`)"])[0]
        if config.model_type != luna_hf.LunaConfig.model_type or kind not in known:
            raise UserError(
                f"{source} is {kind} of the type {config.model_type!r}, but the authors' code has only counterparts of "
                f"{', '.join(known)}."
            )
        stored, config.dtype = config.dtype, None
        model, info = getattr(luna_hf, kind).from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True
        )
    except UserError:
        raise
    except _LOADING_ERRORS as error:
        raise UserError(f"{source} is no folder or Hub name of a complete model ({reason(error)}).") from error
    finally:
        logging.set_verbosity(verbosity)
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise UserError(f"The weights of {source} do not fit its config.json: {', '.join(wrong[:3])}.")
    return model.eval(), stored


@torch.no_grad()
def states_of(model: PreTrainedModel, inputs: list[tuple[Tensor, ...]], part: str | None) -> States:
    """The states by the names of `reference`, with a dimension for the rows in front; see `head_name` for `part`.

    An input is a row of ids (n,), and for translation also a row of the target's ids (m,).
    """
    tokens, *target = (pad_sequence(rows, True, PADDING_ID) for rows in zip(*inputs, strict=True))
    given = {"attention_mask": (tokens != PADDING_ID).long(), "output_hidden_states": True}
    if part == "translation":
        encoded = model.get_encoder()(tokens, output_packed_hidden_states=True, **given)
        outputs = model(encoder_outputs=encoded, decoder_input_ids=target[0], use_cache=False, **given)
        # In a pre-norm model, the last packed states of the list are those before the norm.
        packed = [*encoded.packed_hidden_states[:-1], encoded.packed_last_hidden_state]
        made = {"encoder": encoded.hidden_states, "decoder": outputs.decoder_hidden_states}
    else:
        if isinstance(model, luna_hf.LunaForMultipleChoice):  # one choice per question
            tokens, given["attention_mask"] = tokens.unsqueeze(1), given["attention_mask"].unsqueeze(1)
        outputs = model(tokens, output_packed_hidden_states=True, **given)
        packed, made = outputs.packed_hidden_states, {"hidden": outputs.hidden_states}
    named = {f"{name}.{i}.x": states for name, every in made.items() for i, states in enumerate(every)}
    named |= {f"{next(iter(made))}.{i}.px": states for i, states in enumerate(packed)}
    name = "logits" if part in ("lm_head", "translation") else f"head.{part}"
    return named if part is None else {**named, name: outputs.logits}


# ---- comparing ----


def compare(source: str | Path, original: Original, head: str | None = None, limit: float = EXACT) -> Report:
    """Compare a model with the stored tensors of its original.

    Args:
        source: folder or Hub name of the model.
        original: the authors' checkpoint.
        head: the head that the model has, if not the one that it was converted from.
        limit: of the difference, relative to numbers above 1.

    Raises:
        UserError: They cannot be compared.
    """
    model, stored = load(source, torch.float64)
    part = head_name(model, head)
    available = [TRANSLATION] if original.kind == TRANSLATION else [None, "lm_head", *original.heads()]
    if part not in available:
        raise UserError(f"{original.name} has no counterpart of a {type(model).__name__} ({part}).")
    original, rounded = _rounded(original, stored)
    slots, longest = model.config.projection_length, model.config.max_position_embeddings
    lengths = sorted({min(length, longest) for length in (1, max(1, slots // 2), slots, slots + BEYOND_SLOTS)})
    try:
        rows = _random_rows(original, lengths)
        theirs = [translate(original, *row) if part == "translation" else run(original, *row, part) for row in rows]
        pairs = chain(_embeddings(model, original), _pairs(model, rows, theirs, part))
        inputs = f"{len(lengths)} rows of {', '.join(map(str, lengths))} random tokens{rounded}"
        return Report(_measure(pairs, limit), inputs)
    except (KeyError, IndexError, RuntimeError) as error:
        why = f"a tensor is missing or misshapen, or an argument is wrong: {reason(error)}"
        raise UserError(f"{original.name} cannot be compared with this model ({why}).") from error


def _rounded(original: Original, dtype: torch.dtype | None) -> tuple[Original, str]:
    """The original rounded to the half precision in which a model is stored, and a note on it; rounding is no error."""
    if dtype not in (torch.float16, torch.bfloat16):
        return original, ""
    weights = {name: tensor.to(dtype) for name, tensor in original.weights.items()}
    changed = sum(not torch.equal(weights[name].double(), tensor.double()) for name, tensor in original.weights.items())
    name = str(dtype).removeprefix("torch.")
    return replace(original, weights=weights), f" ({changed} tensors rounded to {name})" if changed else ""


def _ids(original: Original, part: str) -> Tensor:
    """Every id of the vocabulary except padding's."""
    ids = torch.arange(len(original.weights[f"{part}embed_tokens.weight"]))
    return ids[ids != PADDING_ID]


def _random_rows(original: Original, lengths: list[int]) -> list[tuple[Tensor, ...]]:
    """Rows of these lengths with random ids other than padding's, always the same; for translation, pairs of rows."""
    parts = [original.encoder, *["decoder."] * (original.kind == TRANSLATION)]
    generator, columns = torch.Generator().manual_seed(0), []
    for part, wanted in zip(parts, (lengths, lengths[::-1]), strict=False):
        ids = _ids(original, part)
        columns.append([ids[torch.randint(len(ids), (length,), generator=generator)] for length in wanted])
    return list(zip(*columns, strict=True))


@torch.no_grad()
def _embeddings(model: PreTrainedModel, original: Original) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every id and every position, of which random rows hold few: names, our states and theirs."""
    parts = {original.encoder: ("hidden.0.x", model.base_model)}
    if original.kind == TRANSLATION:
        parts = {"encoder.": ("encoder.0.x", model.get_encoder()), "decoder.": ("decoder.0.x", model.get_decoder())}
    longest = model.config.max_position_embeddings
    for part, (name, module) in parts.items():
        ids = _ids(original, part)
        for row in ids.repeat(-(-longest // len(ids))).split(longest):
            # Decoders count positions themselves, from 0.
            places = torch.arange(len(row)).unsqueeze(0) if part == "decoder." else None
            ours = module.embeddings(row.unsqueeze(0), None, places, None, None)
            yield name, ours.squeeze(0), embed(Stored(original, part), row)


def _pairs(
    model: PreTrainedModel, rows: list[tuple[Tensor, ...]], theirs: list[States], part: str | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, our states, computed as one padded batch, and theirs.

    Raises:
        UserError: One of the models has more layers.
    """
    ours = states_of(model, rows, part)
    for b, expected in enumerate(theirs):
        if surplus := sorted(ours.keys() ^ expected.keys()):
            raise UserError(f"Only one of the models has {', '.join(surplus)}.")
        for name, states in expected.items():
            yield name, ours[name][b, : len(states)], states


def _measure(pairs: Iterable[tuple[str, Tensor, Tensor]], limit: float) -> list[Row]:
    """The largest differences by layer and stream.

    Raises:
        UserError: States differ in shape.
    """
    measured: dict[tuple[str, str], Tensor] = {}
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape:
            raise UserError(f"At {name}, the model gives {(*ours.shape,)}, the original {(*theirs.shape,)}.")
        new = torch.stack([(ours - theirs.double()).abs().max(), theirs.double().abs().max()])
        measured[_place(name)] = torch.maximum(measured.get(_place(name), new), new)  # NaN stays
    return [
        Row(*key, *(difference.item(), limit * max(1, size.item()))) for key, (difference, size) in measured.items()
    ]


def _place(name: str) -> tuple[str, str]:
    """Layer and stream of a name of `reference`."""
    if name == "logits" or name.startswith("head."):
        return name.removeprefix("head."), ""
    kind, number, stream = name.split(".")
    layer = "embedding" if number == "0" else f"layer {number}"
    return f"{kind} {layer}".removeprefix("hidden "), "tokens" if stream == "x" else "packed"
