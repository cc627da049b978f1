"""Outputs and gradients of every variant, which `record_pins.py` records and `test_pins.py` compares.

Everything is float64 and follows from names: the checksum of its name seeds the generator of every weight, label and
direction. So no weight is stored, none depends on the order of construction, and a renamed parameter is a difference.

Only public names are used and the variants are written out, so that restructuring the package or the tests' tables
changes nothing here.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

import luna_hf
from luna_hf import MemoryCache

FOLDER = Path(__file__).resolve().parent / "fixtures" / "pins"
TOLERANCE = 1e-12  # relative to the largest entry of a tensor, and to 1 where all are smaller
FLOAT32_TOLERANCE = 1e-6  # causal losses, which transformers computes in float32

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 160,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
PAD = 1
NAMES = {"luna": "Luna", "abc_memory": "Abc"}
SLOTS = {"luna": {"projection_length": 8}, "abc_memory": {"memory_size": 8}}

# ---- variants ----

SHARED = {
    "default": {},
    "prenorm-sinusoidal": {
        "norm_first": True,
        "position_embedding_type": "sinusoidal",
        "embedding_layer_norm": False,
    },
    "convolution-segments-untied": {"conv_kernel_size": 3, "type_vocab_size": 2, "tie_word_embeddings": False},
}
# Every option of the backbone inverted.
OPPOSITE = {**SHARED["prenorm-sinusoidal"], **SHARED["convolution-segments-untied"]}
OPPOSITE_DECODER = {name: value for name, value in OPPOSITE.items() if name != "type_vocab_size"}

ENCODERS = {
    "luna": {
        **SHARED,
        "four-slots-two-pack-heads": {"projection_length": 4, "num_projected_attention_heads": 2},
        "untied-kv": {"tie_kv": False},
        "all-slots": {"dynamic_projection": False},
        "opposite": {**OPPOSITE, "projection_length": 12, "dynamic_projection": False, "tie_kv": False},
        "chunked-feed-forward": {"chunk_size_feed_forward": 5},
    },
    "abc_memory": {
        **SHARED,
        "linformer": {"memory_control": "linformer"},
        "random": {"memory_control": "random"},
        "cluster": {"memory_control": "cluster"},
        "sliding-window": {"memory_control": "sliding_window"},
        "dilated": {"memory_control": "dilated"},
        "local-to-global": {"memory_control": "local_to_global"},
        "compressive": {"memory_control": "compressive"},
        "full": {"memory_control": "full"},
        "mlp-of-each-layer": {"share_control": False},
        "linformer-of-each-layer": {"memory_control": "linformer", "share_control": False},
        "random-of-each-layer": {"memory_control": "random", "share_control": False, "control_seed": 5},
        "relu": {"control_activation": "relu"},
        "sigmoid": {"control_activation": "sigmoid"},
        "four-slots": {"memory_size": 4},
        "opposite": {**OPPOSITE, "memory_size": 12, "share_control": False},
        "sliding-window-of-four": {"memory_control": "sliding_window", "memory_size": 4},
        "sliding-window-opposite": {**OPPOSITE, "memory_control": "sliding_window", "memory_size": 5},
        "dilated-of-five": {"memory_control": "dilated", "memory_size": 5},
        "cluster-of-four": {"memory_control": "cluster", "memory_size": 4, "cluster_iterations": 3},
    },
}
DECODERS = {
    "luna": {
        **SHARED,
        "elu": {"pack_activation": "elu"},
        "untied-kv": {"tie_kv": False},
        "elu-untied-kv-prenorm": {"pack_activation": "elu", "tie_kv": False, "norm_first": True},
        "four-slots": {"projection_length": 4},
        "opposite": {**OPPOSITE_DECODER, "projection_length": 12, "tie_kv": False, "pack_activation": "elu"},
    },
    "abc_memory": {
        **SHARED,
        "linformer": {"memory_control": "linformer", "max_position_embeddings": 16},  # its columns repeat
        "random": {"memory_control": "random"},
        "sliding-window": {"memory_control": "sliding_window"},
        "mlp-of-each-layer": {"share_control": False},
        "linformer-of-each-layer": {"memory_control": "linformer", "share_control": False},
        "random-of-each-layer": {"memory_control": "random", "share_control": False, "control_seed": 5},
        "relu": {"control_activation": "relu"},
        "sigmoid": {"control_activation": "sigmoid"},
        "sliding-window-convolution": {"memory_control": "sliding_window", "conv_kernel_size": 3},
        "four-slots": {"memory_size": 4},
        "linformer-opposite": {**OPPOSITE_DECODER, "memory_control": "linformer", "memory_size": 12},
        "sliding-window-of-four": {"memory_control": "sliding_window", "memory_size": 4},
    },
}
POOLINGS = {
    "luna": ("cls", "mean", "packed_max", "packed_mean", "packed_attention"),
    "abc_memory": ("cls", "mean"),
}
POOLED = {
    family: {pooling.replace("_", "-"): {"classifier_pooling": pooling} for pooling in poolings}
    for family, poolings in POOLINGS.items()
}
REGRESSION = {"num_labels": 1, "classifier_hidden_size": 10, "classifier_activation": "relu"}
HEADS = {
    family: {
        "ForMaskedLM": {**SHARED, "sparse": {"sparse_prediction": True}},
        "ForSequenceClassification": {
            **POOLED[family],
            "regression": REGRESSION,
            "multi-label": {"problem_type": "multi_label_classification"},
            "opposite": {**ENCODERS[family]["opposite"], "classifier_pooling": POOLINGS[family][-1]},
        },
        "ForMultipleChoice": POOLED[family],
        "ForTokenClassification": {"default": {}},
        "ForQuestionAnswering": {"default": {}},
    }
    for family in NAMES
}


class Case(NamedTuple):
    """One model: the family, the suffix of its class, and config fields in addition to `SIZES`."""

    family: str
    kind: str  # "Model" of a decoder is the trunk, as `AutoModel` makes it
    variant: str
    fields: dict
    causal: bool = False

    @property
    def name(self) -> str:
        """The name of its file."""
        trunk = "CausalModel" if self.causal else "Model"
        return f"{NAMES[self.family]}{trunk if self.kind == 'Model' else self.kind}-{self.variant}"


def all_cases() -> Iterator[Case]:
    """Every pinned model."""
    for family in NAMES:
        kinds = {"Model": ENCODERS[family], **HEADS[family]}
        yield from (Case(family, kind, *item) for kind, table in kinds.items() for item in table.items())
        yield from (Case(family, "ForCausalLM", *item, causal=True) for item in DECODERS[family].items())
        yield from (Case(family, "Model", *item, causal=True) for item in SHARED.items())


CASES = {case.name: case for case in all_cases()}

# ---- from names to numbers ----


def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Float64 of mean 0 and variance 1, from random bits alone, independent of any library's logarithm."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * 3**0.5


def draw(name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """Integers in [low, high)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def digest(name: str, tensor: Tensor) -> Tensor:
    """(5,): norm, sum, and products with three directions drawn from the name."""
    tensor = tensor.detach().double()
    products = [(tensor * uniform(f"{name} {index}", tensor.shape)).sum() for index in range(3)]
    return torch.stack([tensor.norm(), tensor.sum(), *products])


def names_of_parameters(model: PreTrainedModel) -> dict[Tensor, list[str]]:
    """Every parameter with its sorted names; a tied one has several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        names.setdefault(parameter, []).append(name)
    return names


@torch.no_grad()
def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Fill every parameter by the first of its names, at a size that keeps attention far from uniform."""
    for parameter, (name, *_) in names_of_parameters(model).items():
        values = uniform(name, parameter.shape)
        if parameter.dim() == 1:
            norm = name.lower().replace("_", "").endswith("layernorm.weight")
            values = 1 + values / 4 if norm else values / 5
        elif not name.endswith(("slots", "packed_embeddings.weight")):  # the size of token states
            attention = ".attention.self." in name or name.endswith("control.weight")
            values = values * (2 if attention else 1) * parameter.shape[-1] ** -0.5
        parameter.copy_(values)
    return model.eval()


def make_config(case: Case, **fields: object) -> PreTrainedConfig:
    """The config of a case."""
    fields = {**SIZES, **SLOTS[case.family], **case.fields, **fields}
    if case.kind in ("ForSequenceClassification", "ForTokenClassification"):
        fields = {"num_labels": 3, **fields}
    return getattr(luna_hf, f"{NAMES[case.family]}Config")(**fields, **({"is_decoder": True} if case.causal else {}))


def make_model(case: Case, **fields: object) -> PreTrainedModel:
    """The model of a case in float32, before `fill`."""
    config = make_config(case, **fields)
    if case.causal and case.kind == "Model":
        return AutoModel.from_config(config)
    return getattr(luna_hf, f"{NAMES[case.family]}{case.kind}")(config)


# ---- inputs ----


def masks() -> dict[str, Tensor]:
    """(b, n) by the name of a batch: rows without padding, and padded on the right, left and in the middle."""
    wide = (draw("mask of wide", (2, 150), 0, 4) > 0).long()
    wide[0] = 1
    long = torch.ones(4, 11, dtype=torch.long)
    long[1, 6:] = long[2, :2] = long[3, 3:5] = long[3, 8] = 0
    short = torch.ones(3, 5, dtype=torch.long)
    short[0, 4:] = short[1, :3] = short[2, 1:3] = 0
    return {"long": long, "short": short, "wide": wide}


def batches(case: Case) -> dict[str, dict[str, Tensor]]:
    """Inputs by name: with a mask (more or fewer tokens than slots, several chunks of a scan), and without one."""
    inputs = {
        name: {"input_ids": draw(f"ids of {name}", mask.shape, 4, 31).where(mask == 1, PAD), "attention_mask": mask}
        for name, mask in masks().items()
    }
    if case.kind != "Model" and not case.causal:
        del inputs["wide"]  # only for the trunk
    plain = draw("ids of plain", (4, 11), 4, 31)
    inputs["plain"] = {"input_ids": plain}  # without padding
    padded = plain.clone()
    padded[1, 8:] = padded[2, :3] = PAD
    inputs["ids"] = {"input_ids": padded}  # an encoder derives the padding from the ids
    if case.kind == "ForMultipleChoice":
        del inputs["short"]  # three rows
    for batch in inputs.values():
        if case.fields.get("type_vocab_size"):
            batch["token_type_ids"] = draw("segments", batch["input_ids"].shape, 0, 2)
        if case.kind == "ForMultipleChoice":
            batch.update({name: tensor.unflatten(0, (2, 2)) for name, tensor in batch.items()})
    if case.kind == "Model":
        length = inputs["plain"]["input_ids"].shape[1]
        inputs["positions"] = {**inputs["plain"], "position_ids": draw("positions", (4, length), PAD + 1, 100)}
    return inputs


def labels_for(case: Case, ids: Tensor, keep: Tensor) -> dict[str, Tensor]:
    """Labels for the head of a case."""
    some = keep & (draw("labelled", ids.shape, 0, 2) == 1)
    rows = ids.shape[:1]
    if case.kind in ("ForMaskedLM", "ForCausalLM"):
        return {"labels": ids.where(some, -100)}
    if case.kind == "ForTokenClassification":
        return {"labels": draw("classes", ids.shape, 0, 3).where(some, -100)}
    if case.kind == "ForQuestionAnswering":
        return {"start_positions": draw("starts", rows, 0, 3), "end_positions": draw("ends", rows, 3, 5)}
    if case.kind == "ForSequenceClassification":
        classes = draw("classes", rows, 0, 3)
        other = {"regression": uniform("targets", rows), "multi-label": torch.eye(3)[classes].double()}
        return {"labels": other.get(case.variant, classes)}
    return {"labels": draw("choices", rows, 0, 2)} if case.kind == "ForMultipleChoice" else {}


# ---- what is computed ----

OBJECTIVES = (
    *("loss", "logits", "start_logits", "end_logits"),
    *("last_hidden_state", "packed_last_hidden_state"),
)


def objective(outputs: dict[str, Tensor], keep: Tensor) -> Tensor:
    """The sum of all float64 outputs times random weights, without padding and unused slots."""
    total = torch.zeros((), dtype=torch.float64)
    for name in OBJECTIVES:
        if outputs.get(name) is None or outputs[name].dtype != torch.float64:
            continue
        weights, mask = uniform(f"weights of {name}", outputs[name].shape), None
        weights = weights * max(1, weights.numel()) ** -0.5  # gradients of about 1
        if name == "packed_last_hidden_state":
            mask = outputs.get("packed_attention_mask")
        elif weights.shape[:2] == keep.shape:
            mask = keep
        if mask is not None:
            weights = weights * mask.reshape(*mask.shape, *[1] * (weights.dim() - 2))
        total = total + (outputs[name] * weights).sum()
    return total


def flatten(outputs: dict) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model's output with its name, numbered per layer."""
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from ((f"{name}.{index}", tensor) for index, tensor in enumerate(value))


def run_batch(model: PreTrainedModel, case: Case, name: str, inputs: dict[str, Tensor], gradients: bool) -> dict:
    """Outputs of one batch, in full where they are small; with gradients, that of the token embeddings.

    Gradients of the parameters add up over the batches.
    """
    eager, ids = model.config._attn_implementation == "eager", inputs["input_ids"]
    keep = inputs.get("attention_mask", torch.ones_like(ids) if case.causal else ids.ne(PAD).long()) == 1
    asked = ["hidden_states", *["attentions"] * eager]
    if case.family == "luna" and not case.causal:
        asked += ["packed_hidden_states", *["pack_attentions"] * eager]
    options = {f"output_{kind}": True for kind in asked} if name in ("long", "short") else {}
    inputs = {**inputs, **labels_for(case, ids, keep), **options, **({"use_cache": False} if case.causal else {})}
    embeddings = None
    # The recorded positions fall within a row, which a model refuses by now.
    unchecked = patch.object(type(model), "check_positions") if name == "positions" else nullcontext()
    with unchecked, nullcontext() if gradients else torch.no_grad():
        if name != "ids":
            embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = embeddings
        outputs = model(**inputs)
    # In full, so that a difference has a place; the trunk's twice.
    whole = name == "long" or (name == "short" and case.kind == "Model" and not case.causal)
    values = {}
    for field, tensor in flatten(outputs):
        kept = field == "loss" or (whole and field in OBJECTIVES)
        values[f"{name}.{field}"] = tensor.detach().clone() if kept else digest(field, tensor)
    if gradients:
        if embeddings is not None:
            embeddings.retain_grad()
        objective(outputs, keep).backward()
        if embeddings is not None:
            values[f"{name}.gradient"] = embeddings.grad if whole else digest("gradient", embeddings.grad)
    return values


def decoding_batch() -> tuple[Tensor, Tensor]:
    """(3, 20) ids and mask; the last row is nothing but padding for the first five columns."""
    mask = torch.arange(20) >= torch.tensor([[0], [3], [5]])
    return draw("ids of decoding", (3, 20), 4, 31).where(mask, PAD), mask.long()


def decode(model: PreTrainedModel, case: Case, sizes: tuple[int, ...]) -> tuple[list[Tensor], MemoryCache]:
    """Logits (or states) of a text in parts of these sizes, and the state after it."""
    ids, mask = decoding_batch()
    segments = draw("segments", ids.shape, 0, 2) if case.fields.get("type_vocab_size") else None
    cache, parts, first = MemoryCache(model.config), [], 0
    for size in sizes:
        part = slice(first, first + size)
        inputs = {} if segments is None else {"token_type_ids": segments[:, part]}
        inputs |= {"attention_mask": mask[:, part], "cache": cache, "use_cache": True}
        outputs = model(ids[:, part], **inputs)
        parts.append(outputs.logits if case.kind == "ForCausalLM" else outputs.last_hidden_state)
        first += size
    return parts, cache


@torch.no_grad()
def run_decoding(model: PreTrainedModel, case: Case) -> dict[str, Tensor]:
    """Token by token with a state (and once a few at a time), what is in the state, and greedy ids."""
    parts, cache = decode(model, case, (5, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1))
    values = {f"decode.{index}": digest("decode", part) for index, part in enumerate(parts)}
    for index, layer in enumerate(cache.layers):
        values |= {f"state.{index}.{name}": digest(name, state) for name, state in layer.states.items()}
    values["state.tokens"] = cache.tokens.clone()
    values["state.columns"] = torch.tensor(cache.get_seq_length())
    if case.kind == "ForCausalLM":
        ids, mask = decoding_batch()
        options = {"max_new_tokens": 8, "do_sample": False}
        values["generate"] = model.generate(ids, attention_mask=mask, **options)
    return values


def compute(case: Case, backend: str = "eager", gradients: bool = True) -> dict[str, Tensor]:
    """All that is pinned of a case, by name."""
    model = fill(make_model(case, attn_implementation=backend).double())
    model.train(case.variant == "sparse")  # where the head is another one in training
    values = {}
    for name, inputs in batches(case).items():
        values |= run_batch(model, case, name, inputs, gradients)
    if case.causal:
        values |= run_decoding(model, case)
    if gradients:
        if case.causal:  # through the state
            parts, _ = decode(model, case, (9, 11))
            (parts[1] * uniform("weights of carried", parts[1].shape)).sum().backward()
        for parameter, names in names_of_parameters(model).items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            values |= {f"gradient of {name}": digest(name, gradient) for name in names}
    return values


# ---- files ----


def expected(case: Case, backend: str = "eager", gradients: bool = True) -> dict[str, Tensor]:
    """What is recorded of a case, as far as a run with this backend computes it."""
    values = load(FOLDER / f"{case.name}.safetensors")
    if not gradients:
        values = {name: value for name, value in values.items() if "gradient" not in name}
    if backend != "eager":
        values = {name: value for name, value in values.items() if "attentions" not in name}
    return values


def save(path: Path, values: dict[str, Tensor]) -> None:
    """One file; digests as the rows of one tensor, since a tensor's entry in the header is larger than a digest."""
    digests = sorted(name for name, value in values.items() if value.dtype == torch.float64 and value.shape == (5,))
    tensors = {name: value.contiguous() for name, value in values.items() if name not in digests}
    if digests:
        tensors["digests"] = torch.stack([values[name] for name in digests])
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"digests": json.dumps(digests)})


def load(path: Path) -> dict[str, Tensor]:
    """What `save` wrote."""
    with safe_open(path, "pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        names = json.loads(file.metadata()["digests"])
    digests = values.pop("digests", ())
    return {**values, **dict(zip(names, digests, strict=True))}


def differences(values: dict[str, Tensor], pinned: dict[str, Tensor], tolerance: float = TOLERANCE) -> list[str]:
    """A line for every name that only one of them has, and for every tensor that differs."""
    lines = [f"{name}: not computed any more" for name in sorted(pinned.keys() - values.keys())]
    lines += [f"{name}: not recorded" for name in sorted(values.keys() - pinned.keys())]
    for name in sorted(pinned.keys() & values.keys()):
        ours, recorded = values[name].detach(), pinned[name]
        if ours.shape != recorded.shape:
            lines.append(f"{name}: {tuple(ours.shape)}, not {tuple(recorded.shape)}")
            continue
        scale = max(1.0, recorded.double().abs().max().item())
        error = (ours.double() - recorded.double()).abs().max().item() / scale
        if not error <= (FLOAT32_TOLERANCE if recorded.dtype == torch.float32 else tolerance):  # also NaN
            lines.append(f"{name}: differs by {error:.1e}")
    return lines
