"""Tiny checkpoints of the authors' fairseq code, in every layout found in practice."""

import argparse
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from gpt2_files import small_gpt2_folder
from official_luna import CHECKPOINTS, POOLINGS, Fixture
from torch import Tensor

TASKS = {
    "masked_lm": {"criterion": "masked_lm"},
    "sentence_prediction": {"criterion": "sentence_prediction", "regression_target": False},
    "sentence_ranking": {"criterion": "sentence_ranking", "num_classes": 2},
    "commonsense_qa": {"criterion": "sentence_ranking", "num_classes": 5},
}
# Sections of the newer `cfg`, and what they choose by `_name`; the arguments of a task are in its section.
SECTIONS = {"model": "arch", "task": "task", "criterion": "criterion"}
TASK_ARGUMENTS = ("data", "num_classes", "mask_prob", "tokens_per_sample")


def tiny_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of a tiny model by the authors' names; `None` removes one."""
    arguments = {
        "arch": "luna_base_tied_512",
        "task": "masked_lm",
        "data": "data-bin/corpus",
        "tokens_per_sample": 20,
        "mask_prob": 0.15,
        "encoder_layers": 2,
        "encoder_embed_dim": 16,
        "encoder_ffn_embed_dim": 24,
        "encoder_attention_heads": 2,
        "max_positions": 20,
        "projection_length": 4,
        "fix_projection_length": False,
        "untie_luna_kv": False,
        "untie_weights_luna": False,
        "activation_fn": "gelu",
        "pooler_activation_fn": "tanh",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.0,
        "pooler_dropout": 0.0,
    }
    arguments |= TASKS[changes.get("task") or "masked_lm"] | changes
    return {name: value for name, value in arguments.items() if value is not None}


def official_shapes(
    arguments: Mapping[str, Any], vocab_size: int, heads: Mapping[str, int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the authors' masked language model; `heads` gives the outputs of each head by its name."""
    width, inner = arguments["encoder_embed_dim"], arguments["encoder_ffn_embed_dim"]
    linears: dict[str, tuple[int, int]] = {}
    norms = []
    keys = ("pk_proj", "pv_proj", "k_proj", "v_proj") if arguments["untie_luna_kv"] else ("pc_proj", "c_proj")
    for layer in range(arguments["encoder_layers"]):
        place = f"encoder.sentence_encoder.layers.{layer}."
        linears |= {f"{place}self_attn.{name}": (width, width) for name in ("pq_proj", "q_proj", *keys, "out_proj")}
        linears |= {f"{place}fc1": (inner, width), f"{place}fc2": (width, inner)}
        norms += [f"{place}{name}" for name in ("self_attn_layer_norm", "self_atten_proj_layer_norm")]
        norms += [f"{place}final_layer_norm"]
    norms += [f"encoder.sentence_encoder.{name}" for name in ("emb_layer_norm", "proj_emb_layer_norm")]
    linears["encoder.lm_head.dense"] = (width, width)
    norms.append("encoder.lm_head.layer_norm")
    for name, classes in (heads or {}).items():
        place = f"classification_heads.{name}."
        linears |= {f"{place}dense": (width, width), f"{place}out_proj": (classes, width)}
        if name == "pooling_classification_head":
            linears[f"{place}in_proj"] = (width, width)
        if name == "attention_classification_head":
            linears |= {f"{place}attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")}
            norms.append(f"{place}layernorm")
    return {
        "encoder.sentence_encoder.projected_embeddings": (arguments["projection_length"], width),
        "encoder.sentence_encoder.embed_tokens.weight": (vocab_size, width),
        "encoder.sentence_encoder.embed_positions.weight": (arguments["max_positions"] + 2, width),
        "encoder.lm_head.weight": (vocab_size, width),
        "encoder.lm_head.bias": (vocab_size,),
        **{f"{name}.weight": shape for name, shape in linears.items()},
        **{f"{name}.bias": shape[:1] for name, shape in linears.items()},
        **{f"{name}.{kind}": (width,) for name in norms for kind in ("weight", "bias")},
    }


def random_weights(
    arguments: Mapping[str, Any], vocab_size: int = 60, heads: Mapping[str, int] | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights of a tiny model by the official names; see `official_shapes`.

    The output layer is the token embedding unless `untie_weights_luna`. LayerNorm weights are near 1.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in official_shapes(arguments, vocab_size, heads).items():
        drawn = torch.randn(shape, generator=generator)
        is_norm = "norm" in name and name.endswith("weight")
        weights[name] = 1 + 0.2 * drawn if is_norm else drawn * shape[-1] ** -0.5 if len(shape) > 1 else 0.3 * drawn
    if not arguments["untie_weights_luna"]:
        weights["encoder.lm_head.weight"] = weights["encoder.sentence_encoder.embed_tokens.weight"].clone()
    return weights


def write_dictionary(path: Path, vocab_size: int) -> Path:
    """A dict.txt for an embedding with `vocab_size` rows; it ends with two fillers, like the authors' files."""
    lines = vocab_size - 5  # the file lacks <s> <pad> </s> <unk> and <mask>
    symbols = [*map(str, range(lines - 2)), "madeupword0000", "madeupword0001"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{symbol} {1000 - place}\n" for place, symbol in enumerate(symbols)))
    return path


def write_labels(folder: Path, labels: tuple[str, ...]) -> Path:
    """The label/dict.txt of a finetuned model, with fairseq's fillers."""
    (folder / "label").mkdir(parents=True, exist_ok=True)
    path = folder / "label" / "dict.txt"
    path.write_text("".join(f"{label} 10\n" for label in labels) + "madeupword0000 0\nmadeupword0001 0\n")
    return path


def make_state(
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    form: str = "namespace",
    prefix: str = "encoder.sentence_encoder.",
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """The content of a checkpoint file.

    Args:
        weights: by the official names.
        arguments: the authors' arguments.
        form: how they are stored: `"namespace"` or `"dict"` (under `args`), `"cfg"` (in sections, like newer files),
            `"none"` (not at all), or `"bare"` (the file holds only the tensors).
        prefix: of the encoder's names: also `"decoder.sentence_encoder."`, `"sentence_encoder."` or `""`.
        dtype: to cast to.
    """
    model = {
        _renamed(name, prefix): value.clone() if dtype is None else value.to(dtype) for name, value in weights.items()
    }
    if form == "bare":
        return model
    history = [{"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "num_updates": 4}]
    state = {"args": None, "model": model, "optimizer_history": history, "extra_state": {"val_loss": 9.7}}
    if form == "namespace":
        state["args"] = argparse.Namespace(**arguments)
    elif form == "dict":
        state["args"] = dict(arguments)
    elif form == "cfg":
        state["cfg"] = {section: {"_name": arguments[name]} for section, name in SECTIONS.items()}
        for name, value in arguments.items():
            section = "task" if name in TASK_ARGUMENTS else "criterion" if name == "regression_target" else "model"
            state["cfg"][section] |= {name: value} if name not in SECTIONS.values() else {}
    else:
        assert form == "none", form
    return state


def _renamed(name: str, prefix: str) -> str:
    if name.startswith("encoder.sentence_encoder."):
        return prefix + name.removeprefix("encoder.sentence_encoder.")
    if name.startswith("encoder."):
        return prefix.removesuffix("sentence_encoder.") + name.removeprefix("encoder.")
    return name


def write_fairseq(
    folder: Path,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    file: str = "model.pt",
    legacy: bool = False,
    dictionary: bool = True,
    bpe: bool = True,
    labels: tuple[str, ...] = (),
    **options: Any,
) -> Path:
    """A folder with a checkpoint, its dictionary and, so that no test needs the Hub, the files of GPT-2's BPE.

    Args:
        folder: created if missing.
        weights, arguments, options: see `make_state`.
        file: name of the checkpoint.
        legacy: use PyTorch's format before 1.6, which is no zip file.
        dictionary, bpe: write dict.txt, and the first merges of GPT-2.
        labels: write label/dict.txt with these classes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(make_state(weights, arguments, **options), folder / file, _use_new_zipfile_serialization=not legacy)
    rows = next(len(value) for name, value in weights.items() if name.endswith("embed_tokens.weight"))
    if dictionary:
        write_dictionary(folder / "dict.txt", rows)
    if bpe:
        small_gpt2_folder(folder)
    if labels:
        write_labels(folder, labels)
    return folder


def write_fixture(
    folder: Path, name: str, heads: Collection[str] = POOLINGS, task: str = "masked_lm", **options: Any
) -> Path:
    """A folder with the model of a `luna_mlm` fixture and some of its heads; options of `write_fairseq`."""
    fixture = Fixture("luna_mlm", name)
    arguments = {**fixture.config["args"], "arch": f"luna_base_{name.split('_')[0]}_512", "task": task, **TASKS[task]}
    weights = {n: t for n, t in fixture.weights().items() if not n.startswith("class") or n.split(".")[1] in heads}
    return write_fairseq(folder, weights, arguments, **options)


def write_tiny(
    folder: Path, *, vocab_size: int = 60, heads: Mapping[str, int] | None = None, seed: int = 0, **options: Any
) -> Path:
    """A folder with a tiny random model; options of `write_fairseq`, and `changes` to its arguments."""
    arguments = tiny_arguments(**options.pop("changes", {}))
    return write_fairseq(folder, random_weights(arguments, vocab_size, heads, seed), arguments, **options)


def genuine_folder(folder: Path, name: str) -> Path:
    """A copy of a checkpoint that the authors' code wrote (`tied` or `untied`), with GPT-2's BPE files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("model.pt", "dict.txt"):
        shutil.copy(CHECKPOINTS / name / file, folder / file)
    return small_gpt2_folder(folder)


def write_archive(folder: Path, kind: str = "zip") -> Path:
    """Pack a folder like the published archives, which contain the folder. `kind`: zip, tar, gztar."""
    return Path(shutil.make_archive(str(folder), kind, root_dir=folder.parent, base_dir=folder.name))
