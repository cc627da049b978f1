"""Comparing a converted model with its original, layer by layer.

The original is either the authors' checkpoint, computed in float64 from the stored tensors by `reference`, or a file of
outputs of the authors' code. `conversion/verify.py` documents both, and the limits.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from luna_hf.scripting import UserError

from .checkpoint import EMBEDDING, HEADS, Original
from .config import FIXED, POOLINGS, Head, make_config
from .converted import load, read_config
from .reference import PADDING_ID, activation, embed_tokens, encode, run

TOLERANCE = 1e-5
# In float64, where a correct model differs in its last digits only; relative to numbers above 1.
EXACT = 1e-9
SEED = 0
BEYOND_SLOTS = 32  # tokens of the longest row beyond the number of slots
HALF = (torch.float16, torch.bfloat16)
CLASSIFIERS = ("LunaForSequenceClassification", "LunaForMultipleChoice")
# Fields of config.json that decide what a model computes. Dropout does not, and may be changed.
_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("projection_length", "max_position_embeddings", "tie_kv", "dynamic_projection"),
)
_HEAD_FIELDS = ("classifier_hidden_size", "classifier_activation")
_ACTIVATIONS = {"hidden_act": "activation_fn", "classifier_activation": "pooler_activation_fn"}


# ---- the report ----


@dataclass(frozen=True)
class Row:
    """One comparison: the states of one stream after one layer, over all inputs."""

    layer: str  # "embedding", "layer 1", ..., "last", "logits" or the name of a head
    stream: str  # "tokens", "packed", or "" for a head
    difference: float  # the largest absolute one, with the model in float32
    magnitude: float = 1.0  # the largest absolute number of the original
    limit: float = TOLERANCE  # of the difference
    exact: float | None = None  # the difference with the model in float64; if measured, it decides

    @property
    def name(self) -> str:
        """Layer and stream."""
        return f"{self.layer}, {self.stream}" if self.stream else self.layer

    @property
    def within(self) -> bool:
        """Whether the difference in float32 is finite and within its limit."""
        return math.isfinite(self.difference) and self.difference <= self.limit

    @property
    def ok(self) -> bool:
        """Whether both are equal here: by the float64 run if there was one, else by float32."""
        if self.exact is None or not math.isfinite(self.difference):
            return self.within
        return self.exact <= EXACT * max(1.0, self.magnitude)


@dataclass(frozen=True)
class Report:
    """All comparisons of a model with its original."""

    rows: list[Row]  # in the order of the computation
    problems: list[str] = dataclasses.field(default_factory=list)  # found before any comparison; then without rows
    inputs: str = ""  # of both models, for example "4 rows of 1, 64, 128, 160 tokens"
    precision: str = ""  # of both models
    relative: bool = False  # whether limits grow with the numbers

    @property
    def ok(self) -> bool:
        """Whether everything was compared and is equal."""
        return bool(self.rows) and not self.problems and all(row.ok for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest difference in float32; NaN if any is."""
        return largest([row.difference for row in self.rows])

    @property
    def exact(self) -> float | None:
        """The largest difference in float64; `None` without that run."""
        measured = [row.exact for row in self.rows if row.exact is not None]
        return largest(measured) if measured else None

    @property
    def rounding(self) -> bool:
        """Whether both are equal although float32 exceeds its limit somewhere."""
        return self.ok and not all(row.within for row in self.rows)

    def with_exact(self, rows: list[Row]) -> "Report":
        """The same report with the differences of a second run, with the model in float64."""
        exact = {row.name: row.difference for row in rows}
        return dataclasses.replace(self, rows=[dataclasses.replace(row, exact=exact[row.name]) for row in self.rows])

    def summary(self) -> str:
        """The result in one or two sentences."""
        if self.problems:
            return f"Not equal to the original: {'; '.join(self.problems)}."
        if not self.ok:
            row = next(row for row in self.rows if not row.ok)
            text = f"Not equal to the original, first at {row.name}"
            text += f": difference {row.difference:.1e}, limit {row.limit:.1e}."
            if row.exact is not None:
                text += f" It is not rounding, since the difference is {row.exact:.1e} in float64."
            return text + " Sharp attention can cause it, which only a checkpoint can rule out." * self.relative
        equal = f"Equal to the original on {self.inputs}"
        if self.rounding:
            where = ", ".join(row.name for row in self.rows if not row.within)
            return (
                f"{equal}: largest difference {self.exact:.1e} in float64. The {self.largest:.1e} in float32 is "
                f"rounding ({where})."
            )
        row = max(self.rows, key=lambda row: row.difference / row.limit)
        return f"{equal}: largest difference {row.difference:.1e} ({row.name}), limit {row.limit:.1e}."

    def lines(self) -> list[str]:
        """The table, with a line for every layer, and the summary."""
        if not self.rows:
            return [self.summary()]
        beside = ("float64", "numbers") if self.exact is not None else ("limit",) if self.relative else ()
        width = max(len(row.layer) for row in self.rows)
        header = "".join(f"  {name:>8}" for stream in ("tokens", "packed") for name in (stream, *beside))
        lines = [f"Inputs: {self.inputs}", f"Types: {self.precision}", "", f"{'':{width}}{header}"]
        for layer in dict.fromkeys(row.layer for row in self.rows):
            here = [row for row in self.rows if row.layer == layer]
            cells = []
            for row in here:
                cells.append(f"{row.difference:.1e}")
                if row.exact is not None:
                    cells += [f"{row.exact:.1e}", f"{row.magnitude:.3g}"]
                elif self.relative:
                    cells.append(f"{row.limit:.1e}")
            mark = "" if all(row.within for row in here) else "  rounding"
            mark = mark if all(row.ok for row in here) else "  not equal"
            lines.append(f"{layer:{width}}{''.join(f'  {cell:>8}' for cell in cells)}{mark}")
        return [*lines, "", self.summary()]


def largest(numbers: list[float]) -> float:
    """The maximum; NaN if any number is, 0 if there are none."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


class Mismatch(Exception):
    """The two models give states of different shapes."""


class Comparison:
    """Collects differences by layer and stream.

    Args:
        relative: whether limits are relative to the largest number of a layer where that exceeds 1.
    """

    def __init__(self, relative: bool = False) -> None:
        self.relative = relative
        self.measured: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add(self, layer: str, stream: str, ours: Tensor, theirs: Tensor, where: Tensor | None = None) -> None:
        """Compare two tensors of one shape, or the part that a boolean mask `where` selects.

        Raises:
            Mismatch: Their shapes differ.
        """
        if ours.shape != theirs.shape:
            raise Mismatch(f"at {layer} {stream}, the model gives {(*ours.shape,)}, the original {(*theirs.shape,)}")
        ours, theirs = ours.double(), theirs.double()
        if where is not None:
            ours, theirs = ours[where], theirs[where]
        numbers = ((ours - theirs).abs().max().item(), theirs.abs().max().item())
        self.measured.setdefault((layer, stream), []).append(numbers)

    def rows(self) -> list[Row]:
        """A row for every layer and stream that was added."""
        rows = []
        for key, numbers in self.measured.items():
            difference, magnitude = map(largest, zip(*numbers, strict=True))
            rows.append(Row(*key, difference, magnitude, TOLERANCE * max(1.0, magnitude if self.relative else 1.0)))
        return rows


# ---- our model ----


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Tensor, keep: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Token states (b, n, d) and packed states (b, l, d) after the embedding and every layer, and the logits.

    Args:
        model: ours.
        tokens: (b, n) ids.
        keep: (b, n), True for tokens.
    """
    mask = keep.long()
    if type(model).__name__ == "LunaForMultipleChoice":
        tokens, mask = tokens.unsqueeze(1), mask.unsqueeze(1)  # one choice per question
    outputs = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True, output_packed_hidden_states=True)
    return outputs.hidden_states, outputs.packed_hidden_states, outputs.get("logits")


def config_problems(model: PreTrainedModel, head: str | None, original: Original | None = None) -> list[str]:
    """Fields of a model's config that contradict the authors' code or the checkpoint.

    Args:
        model: ours.
        head: name of the original's classification head that the model has.
        original: the checkpoint; without it, only fields that never vary are checked.
    """
    config = model.config
    expected = dict(FIXED)
    if config.num_projected_attention_heads is not None:
        expected["num_projected_attention_heads"] = config.num_attention_heads
    if head is not None:
        expected["classifier_pooling"] = POOLINGS.get(head, "cls")
    if original is not None:
        theirs = make_config(original, Head(head, "ranking" if head else "encoder"))
        names = [*_FIELDS, *(_HEAD_FIELDS if head else ())]
        names += ["tie_word_embeddings"] if type(model).__name__ == "LunaForMaskedLM" else []
        expected |= {name: getattr(theirs, name) for name in names}
        for name in _ACTIVATIONS.keys() & expected.keys():
            if _is_function(getattr(config, name), getattr(original.options, _ACTIVATIONS[name])):
                expected[name] = getattr(config, name)
    problems = []
    for name, value in expected.items():
        ours = getattr(config, name)
        ours = config.hidden_size if name == "classifier_hidden_size" and ours is None else ours
        if ours != value:
            problems.append(f"`{name}` is {ours!r} in config.json, but {value!r} in the original")
    if problems and original is not None and original.assumed:
        defaults = ", ".join(original.assumed)
        problems.append(
            f"the original has the authors' defaults for {defaults} (change them with --override NAME=VALUE)"
        )
    return problems


def _is_function(ours: str, theirs: str) -> bool:
    """Whether two names mean the same activation; transformers has several names for one."""
    x = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    return torch.allclose(ACT2FN[ours](x), activation(theirs, x), rtol=0, atol=1e-9)


def choose_head(
    model: PreTrainedModel, head: str | None, names: list[str], source: str, original: Original | None = None
) -> str | None:
    """The name of the original's head that a classifier has; `None` for other models.

    Args:
        model: ours.
        head: as the user names it, if at all.
        names: the heads of the original.
        source: name of the original.
        original: the checkpoint, to recognise the head by its weights.

    Raises:
        UserError: There is no such head, or the user must choose.
    """
    kind = type(model).__name__
    if kind not in CLASSIFIERS:
        if head not in (None, "lm_head" if kind == "LunaForMaskedLM" else None):
            raise UserError(f"--head {head} does not apply to a {kind}. Leave it out.")
        return None
    if not names or head not in (None, *names):
        raise UserError(f"{source} has no head {head or f'for the {kind}'}. It has {', '.join(names) or 'none'}.")
    found = [head] if head else names
    if len(found) > 1 and original is not None:
        dense = model.classifier.dense.weight
        found = [name for name in names if torch.equal(original.weights[f"{HEADS}{name}.dense.weight"].float(), dense)]
    if len(found) != 1:
        raise UserError(f"{source} has the heads {', '.join(names)}. Choose one with --head NAME.")
    return found[0]


# ---- with the authors' checkpoint ----


def compare(folder: Path, original: Original, head: str | None = None) -> Report:
    """Compare the model of a folder with the stored tensors of its original.

    Args:
        folder: a converted model.
        original: the authors' checkpoint.
        head: the head that the model has, where the weights do not show it.

    Raises:
        UserError: They cannot be compared.
    """
    model, problems = load(str(folder), torch.float32)
    head = choose_head(model, head, original.heads(), original.name, original)
    if problems := config_problems(model, head, original) + problems:
        return Report([], problems)
    stored = _type_name(original.weights[EMBEDDING])
    original, rounded = rounded_as_stored(original, folder)
    lengths = choose_lengths(model.config.projection_length, model.config.max_position_embeddings)
    rows = random_rows(original, lengths)
    theirs = their_states(model, original, rows, head)
    try:
        compared = compare_rows(model, original, rows, theirs, head)
    except Mismatch as error:
        return Report([], [str(error)])
    report = Report(
        compared,
        inputs=f"{len(lengths)} rows of {', '.join(map(str, lengths))} random tokens, and every embedding",
        precision=f"model: float32, all rows as one padded batch; original: float64 from {stored}{rounded}, row by row",
    )
    if report.ok or not math.isfinite(report.largest):
        return report
    # Large numbers or sharp attention can push float32's rounding over any limit; float64 separates it from an error.
    del model  # frees memory for the second one
    model, _ = load(str(folder), torch.float64)
    if original.norm_offset:
        original = original.with_plain_norms()
        theirs = their_states(model, original, rows, head)
    return report.with_exact(compare_rows(model, original, rows, theirs, head))


def rounded_as_stored(original: Original, folder: Path) -> tuple[Original, str]:
    """The original rounded to the half precision in which a model is stored, and a note on it; rounding is no error."""
    dtype = read_config(str(folder)).dtype
    if dtype not in HALF:
        return original, ""
    plain = original.with_plain_norms()
    weights = {name: tensor.to(dtype) for name, tensor in plain.weights.items()}
    changed = sum(not torch.equal(weights[name].double(), plain.weights[name].double()) for name in weights)
    if not changed:
        return original, ""
    note = f" rounded to {str(dtype).removeprefix('torch.')} like the model ({changed} tensors change)"
    return dataclasses.replace(plain, weights=weights), note


def choose_lengths(slots: int, longest: int) -> list[int]:
    """One token, fewer than slots, as many, and more, within the positions."""
    return sorted({min(length, longest) for length in (1, max(1, slots // 2), slots, slots + BEYOND_SLOTS)})


def random_rows(original: Original, lengths: list[int]) -> list[Tensor]:
    """Rows of these lengths with random ids other than padding's, always the same."""
    return random_ids(len(original.weights[EMBEDDING]), lengths)


def random_ids(vocab_size: int, lengths: list[int]) -> list[Tensor]:
    """Rows of these lengths with random ids of a vocabulary other than padding's, always the same."""
    ids = torch.arange(vocab_size)
    ids = ids[ids != PADDING_ID]
    generator = torch.Generator().manual_seed(SEED)
    return [ids[torch.randint(len(ids), (length,), generator=generator)] for length in lengths]


def usable_ids(original: Original) -> Tensor:
    """Every id of the vocabulary except padding's."""
    ids = torch.arange(len(original.weights[EMBEDDING]))
    return ids[ids != PADDING_ID]


def their_states(
    model: PreTrainedModel, original: Original, rows: list[Tensor], head: str | None
) -> list[dict[str, Tensor]]:
    """The reference on each row, with the head that our model has.

    Raises:
        UserError: A tensor is missing.
    """
    encoder_only = type(model).__name__ == "LunaModel"
    try:
        return [encode(original, row) if encoder_only else run(original, row, head) for row in rows]
    except KeyError as error:
        raise UserError(f"{original.name} lacks the tensor {error}.") from error


def compare_rows(
    model: PreTrainedModel, original: Original, rows: list[Tensor], theirs: list[dict[str, Tensor]], head: str | None
) -> list[Row]:
    """Compare all rows, ours as one padded batch, and every embedding, of which random rows hold few.

    Raises:
        Mismatch: States differ in shape.
    """
    comparison = Comparison()
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING_ID)
    hidden, packed, logits = states_of(model, tokens, tokens != PADDING_ID)
    for b, (row, expected) in enumerate(zip(rows, theirs, strict=True)):
        for i in range(len(hidden)):
            comparison.add(_layer_name(i), "tokens", hidden[i][b, : len(row)], expected[f"hidden.{i}.x"])
            px = expected[f"hidden.{i}.px"]
            comparison.add(_layer_name(i), "packed", packed[i][b, : len(px)], px)
        if head is not None:
            comparison.add(head, "", logits[b], expected[f"head.{head}"])
        elif logits is not None:
            comparison.add("logits", "", logits[b, : len(row)], expected["logits"])
    longest, ids = model.config.max_position_embeddings, usable_ids(original)
    for row in ids.repeat(-(-longest // len(ids))).split(longest):  # every id and every position
        with torch.no_grad():
            ours = model.base_model.embeddings(row.unsqueeze(0), None, None, None, None).squeeze(0)
        comparison.add("embedding", "tokens", ours, embed_tokens(original, row))
    return comparison.rows()


# ---- with a file of outputs ----


def compare_outputs(folder: Path, file: Path, head: str | None = None) -> Report:
    """Compare the model of a folder with outputs of the authors' code.

    Args:
        folder: a converted model.
        file: .safetensors in the layout that `verify.py` describes.
        head: the head that the model has, where the file has several.

    Raises:
        UserError: They cannot be compared.
    """
    model, problems = load(str(folder), torch.float32)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read as .safetensors ({error}).") from error
    cases = sorted(name.removesuffix(".input.tokens") for name in tensors if name.endswith(".input.tokens"))
    if not cases:
        raise UserError(f"{file} has no tensor `<case>.input.tokens` (see --help).")
    names = sorted({name.partition(".output.head.")[2] for name in tensors if ".output.head." in name})
    head = choose_head(model, head, names, str(file))
    if problems := config_problems(model, head) + problems:
        return Report([], problems)
    comparison, lengths = Comparison(relative=True), []
    for case in cases:
        given = {n.removeprefix(f"{case}."): t for n, t in tensors.items() if n.startswith(f"{case}.")}
        try:
            lengths += compare_case(comparison, model, given, head)
        except Mismatch as error:
            return Report([], [f"{case}: {error}"])
        except KeyError as error:
            raise UserError(f"{file} has no tensor {case}.{error.args[0]} (see --help).") from error
    return Report(
        comparison.rows(),
        inputs=f"{len(lengths)} rows of {', '.join(map(str, sorted(set(lengths))))} tokens",
        precision=f"model: float32; original: outputs in {_type_name(tensors[f'{cases[0]}.output.hidden.0.x'])}",
        relative=True,
    )


def compare_case(
    comparison: Comparison, model: PreTrainedModel, given: dict[str, Tensor], head: str | None
) -> list[int]:
    """Compare one batch; the lengths of its rows.

    Raises:
        Mismatch: Sizes differ.
        KeyError: An output is missing.
        UserError: A row has no tokens.
    """
    tokens, config = given["input.tokens"].long(), model.config
    keep = ~given["output.x_padding_mask"].bool() if "output.x_padding_mask" in given else tokens != PADDING_ID
    if not keep.any(1).all():
        raise UserError("A row of the file has no tokens, so its outputs are meaningless. Remove it.")
    layers = sum(name.startswith("output.hidden.") and name.endswith(".x") for name in given) - 1
    positions, ids = tokens.shape[1], int(tokens.max()) + 1
    if layers != config.num_hidden_layers:
        raise Mismatch(f"the model has {config.num_hidden_layers} layers, the original {layers}")
    if positions > config.max_position_embeddings or ids > config.vocab_size:
        raise Mismatch(
            f"the original reads {positions} positions and {ids} ids, the model has "
            f"{config.max_position_embeddings} and {config.vocab_size}"
        )
    hidden, packed, logits = states_of(model, tokens, keep)
    slots = given["output.hidden.0.px"].shape[1]
    padded = given.get("output.px_padding_mask", torch.zeros(len(tokens), slots))
    states = [(_layer_name(i), f"output.hidden.{i}", x, p) for i, (x, p) in enumerate(zip(hidden, packed, strict=True))]
    for layer, name, x, p in [*states, ("last", "output.last", hidden[-1], packed[-1])]:
        comparison.add(layer, "tokens", x, given[f"{name}.x"], keep)
        # The authors cut P to the longest row, we to the padded length; our additional slots are never read.
        comparison.add(layer, "packed", p[:, :slots], given[f"{name}.px"], ~padded.bool())
    if head is not None:
        comparison.add(head, "", logits, given[f"output.head.{head}"])
    elif logits is not None:
        comparison.add("logits", "", logits, given["output.logits"], keep)
    return keep.sum(1).tolist()


def _layer_name(i: int) -> str:
    return f"layer {i}" if i else "embedding"


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
