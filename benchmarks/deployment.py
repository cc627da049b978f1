"""Ways to run trained encoders on a CPU: PyTorch, ONNX Runtime, OpenVINO, AOTInductor, and 8-bit weights.

    python benchmarks/deployment.py --data data

DATA has `enwiki/validation.parquet` (column `text`) and `glue/sst2/validation.parquet` (`sentence`, `label`), which
score masked-LM models and classifiers; encoders without a head have no score. Every exported program is made once, for
all batch sizes and lengths. A way whose package is missing is left out.
"""

import argparse
import copy
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measuring
import summaries
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from luna_hf import FAMILIES
from luna_hf.scripting import UserError, markdown_table, progress, reason

PROTOCOL = (
    "Whole models with their heads, if they have one, float32 unless the way says int8. Speed: one text of random ids "
    "without padding, all ways in turn, in an order that rotates; ratios are taken within a round, medians over "
    "rounds. Error: root mean square of the difference from PyTorch's outputs at the real tokens, relative to theirs, "
    "at the worst of three padded batches, none of the shape that was exported. Score: accuracy, or cross-entropy at "
    "15% masked tokens, over the first rows of the data, cut to 128 tokens. Size: of the saved weights, or of the "
    "exported file."
)
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
MODELS = ("luna-minilm-en-4096", "abc-mini-en", "leapformer-mini-en", "lavo-mini-en")
HEADS = ("ForMaskedLM", "ForSequenceClassification")
CLASSES = {own.__name__: own for family in FAMILIES.values() for own in map(family.model, ("Model", *HEADS))}
# Rows and tokens.
EXPORTED, CHECKED = (2, 200), ((3, 45), (1, 7), (4, 100))
SCORED_LENGTH, SCORED_ROWS = 128, 16
FIRST_TOKEN = 4  # the ids before it are special
PEER = "pytorch"

Batch = dict[str, Tensor]
Run = Callable[[Batch], Tensor]  # returns the logits, or the states of an encoder without a head


# ---- ways: from a model, a folder and threads to the call and the bytes of the program ----


def use_pytorch(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """The model as it is."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return lambda batch: model(**batch)[0], file.tell()


def use_int8(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """Linear layers with 8-bit weights, and activations that are rounded to 8 bits in every call."""
    return use_pytorch(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}), folder, threads)


def use_torchao(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """The same by torchao, compiled, because without compilation it is slower than float32."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return use_pytorch(torch.compile(quantized, dynamic=True), folder, threads)


def dynamic_shapes(model: PreTrainedModel) -> dict[str, dict[int, Any]]:
    """Every batch size, and every length from 2 to the longest."""
    # The exporter specialises a program to length 1.
    length = torch.export.Dim("length", min=2, max=model.config.max_position_embeddings)
    axes = {0: torch.export.Dim("batch", min=1, max=1024), 1: length}
    return {"input_ids": axes, "attention_mask": axes}


def export_onnx(model: PreTrainedModel, folder: Path) -> Path:
    """Write the ONNX file of a model, once."""
    path = folder / "model.onnx"
    if not path.exists():
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=make_example(model),
            dynamo=True,
            dynamic_shapes=dynamic_shapes(model),
            output_names=["output"],
            external_data=False,
            verbose=False,
        )
    return path


def run_onnx(path: Path, threads: int) -> tuple[Run, int]:
    """An ONNX file in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(path, options)

    def run(batch: Batch) -> Tensor:
        return torch.from_numpy(session.run(["output"], {name: t.numpy() for name, t in batch.items()})[0])

    return run, path.stat().st_size


def use_onnx(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """ONNX Runtime."""
    return run_onnx(export_onnx(model, folder), threads)


def use_onnx_int8(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """ONNX Runtime's own rounding of the products with weights, a scale for each column."""
    from onnxruntime.quantization import quantize_dynamic

    path = folder / "int8.onnx"
    quantize_dynamic(export_onnx(model, folder), path, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True)
    return run_onnx(path, threads)


def use_openvino(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """OpenVINO, which reads the ONNX file; without the hint it may compute in bfloat16."""
    import openvino

    path = export_onnx(model, folder)
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    return lambda batch: torch.tensor(compiled({name: t.numpy() for name, t in batch.items()})[0]), path.stat().st_size


def use_aot_inductor(model: PreTrainedModel, folder: Path, threads: int) -> tuple[Run, int]:
    """A package of compiled code and weights."""
    path = folder / "model.pt2"
    example = make_example(model)
    program = torch.export.export(model, (), example, dynamic_shapes=dynamic_shapes(model), strict=False)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    compiled = torch._inductor.aoti_load_package(str(path))
    return lambda batch: compiled(**batch)[0], path.stat().st_size


ONNX = ("onnx", "onnxscript", "onnxruntime")
# What prepares a way, and the packages that it needs.
WAYS: dict[str, tuple[Callable[[PreTrainedModel, Path, int], tuple[Run, int]], tuple[str, ...]]] = {
    PEER: (use_pytorch, ()),
    "int8": (use_int8, ()),
    "torchao-int8": (use_torchao, ("torchao",)),
    "onnx": (use_onnx, ONNX),
    "onnx-int8": (use_onnx_int8, ONNX),
    "openvino": (use_openvino, (*ONNX, "openvino")),
    "aot-inductor": (use_aot_inductor, ()),
}


# ---- what they run on ----


def load(name: str) -> PreTrainedModel:
    """A checkpoint of this repository, or a folder, with its head if it has one.

    Raises:
        UserError: There is no such folder, or its model is none of `CLASSES`.
    """
    folder = find(name)
    kind = (AutoConfig.from_pretrained(folder).architectures or [""])[0]
    if kind not in CLASSES:
        raise UserError(f"{folder} holds {kind or 'no model'}; give one of {', '.join(CLASSES)}.")
    return CLASSES[kind].from_pretrained(folder, dtype=torch.float32).eval()


def find(name: str) -> Path:
    """The folder of a checkpoint.

    Raises:
        UserError: There is none.
    """
    for folder in (CHECKPOINTS / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder
    raise UserError(f"There is no checkpoint {name}; give a folder, or one of {', '.join(MODELS)}.")


def make_batch(model: PreTrainedModel, rows: int, length: int, padded: bool = True) -> Batch:
    """Random ids; with padding, every row is shorter by two tokens than the one above it."""
    generator = torch.Generator().manual_seed(rows * length)
    lengths = torch.tensor([max(1, length - 2 * row * padded) for row in range(rows)])
    keep = torch.arange(length) < lengths[:, None]
    ids = torch.randint(FIRST_TOKEN, model.config.vocab_size, keep.shape, generator=generator)
    return {"input_ids": ids.masked_fill(~keep, model.config.pad_token_id), "attention_mask": keep.long()}


def make_example(model: PreTrainedModel) -> Batch:
    """The batch that a model is exported with."""
    rows, length = EXPORTED
    return make_batch(model, rows, min(length, model.config.max_position_embeddings))


def scored_batches(model: PreTrainedModel, name: str, options: argparse.Namespace) -> Iterator[tuple[Batch, Tensor]]:
    """Batches with labels: classes of SST-2, or of masked tokens (-100 elsewhere)."""
    from pyarrow.parquet import read_table

    tokenizer, classifies = AutoTokenizer.from_pretrained(find(name)), is_classifier(model)
    path = options.data / ("glue/sst2" if classifies else "enwiki") / "validation.parquet"
    if not path.is_file():
        raise UserError(f"There is no {path}; leave --data out to measure without scores.")
    rows = read_table(path).slice(0, options.rows).to_pydict()
    texts, generator = rows["sentence" if classifies else "text"], torch.Generator().manual_seed(0)
    for first in range(0, len(texts), SCORED_ROWS):
        part = slice(first, first + SCORED_ROWS)
        encoded = tokenizer(
            texts[part],
            padding=True,
            truncation=True,
            max_length=SCORED_LENGTH,
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
        special = encoded.pop("special_tokens_mask").bool()
        ids = encoded["input_ids"]
        labels = torch.tensor(rows["label"][part]) if classifies else ids
        if not classifies:
            hidden = (torch.rand(ids.shape, generator=generator) < 0.15) & ~special
            labels, ids = ids.masked_fill(~hidden, -100), ids.masked_fill(hidden, tokenizer.mask_token_id)
        yield {"input_ids": ids, "attention_mask": encoded["attention_mask"]}, labels


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether the model classifies whole texts."""
    return type(model).__name__.endswith("ForSequenceClassification")


# ---- measurements ----


def score(run: Run, batches: Sequence[tuple[Batch, Tensor]]) -> float:
    """Accuracy of a classifier, or mean loss of the masked tokens in nats."""
    total, count = 0.0, 0
    for batch, labels in batches:
        logits = run(batch)
        if labels.dim() == 1:
            total += (logits.argmax(-1) == labels).sum().item()
        else:
            total += nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += (labels != -100).sum().item()
    return total / count


def error(run: Run, model: PreTrainedModel) -> float:
    """Relative error of the outputs, at the worst of the checked shapes."""

    def of_shape(shape: tuple[int, int]) -> float:
        batch = make_batch(model, *shape)
        real = ... if is_classifier(model) else batch["attention_mask"].bool()
        expected, actual = model(**batch)[0][real], run(batch)[real]
        return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()

    return max(map(of_shape, CHECKED))


@torch.no_grad()
def measure_model(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Prepare a model in every way and time them: what is known of every way, and an entry for each length."""
    torch.compiler.reset()  # past its limit of compilations, which all models share, PyTorch runs them uncompiled
    model = load(name)
    scored = options.data and type(model).__name__.endswith(HEADS)
    batches = list(scored_batches(model, name, options)) if scored else None
    runs: dict[str, Run] = {}
    ways: dict[str, Any] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            progress(f"{name}: {way}")
            try:
                runs[way], size = WAYS[way][0](model, Path(folder), options.threads)
            except Exception as failure:  # of any class: each exporter and compiler has its own
                failures[way] = f"{type(failure).__name__}: {reason(failure)}"
                progress(f"{name}: {way} failed ({failures[way]})")
                continue
            ways[way] = {"bytes": size, "error": error(runs[way], model)}
            if batches is not None:
                ways[way]["score"] = score(runs[way], batches)
        entries = [time_ways(name, runs, length, model, options) for length in options.lengths]
    kind = "accuracy" if is_classifier(model) else "loss"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "score": kind, "ways": ways, "failures": failures}, entries


def time_ways(
    name: str, runs: dict[str, Run], length: int, model: PreTrainedModel, options: argparse.Namespace
) -> dict[str, Any]:
    """Time all ways on one text, each several times a round: one entry of the result's `lengths`."""
    batch = make_batch(model, 1, length, padded=False)

    def repeat(run: Run) -> None:
        for _ in range(options.repeats):
            run(batch)

    actions = {way: partial(repeat, run) for way, run in runs.items()}
    times = measuring.interleave(actions, options.rounds, "cpu")
    own = {way: [taken / options.repeats for taken in rounds] for way, rounds in times.items()}
    models = summaries.describe(own, [PEER])
    return {"length": length, "call": Path(name).name, "rows": 1, "tokens": length, "models": models}


# ---- command ----


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"lengths": [32, 128, 512], "rounds": 9, "repeats": 5, "rows": 872}
    parser = measuring.make_parser(__doc__, **sizes)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--data", type=Path, help="folder of the texts to score; default: no scores")
    options = parser.parse_args(arguments)
    if options.device != "cpu" or options.dtype != "float32":
        parser.error("--device must be cpu and --dtype float32: the runtimes are measured on a CPU")
    return options


def installed_ways(ways: Sequence[str]) -> list[str]:
    """PyTorch and those of the ways whose packages are installed."""
    missing = {way: [name for name in WAYS[way][1] if not find_spec(name)] for way in ways}
    for way, names in missing.items():
        if names:
            progress(f"{way} is left out: pip install {' '.join(names)}")
    return list(dict.fromkeys([PEER, *(way for way, names in missing.items() if not names)]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    options.ways = installed_ways(options.ways)
    found = {Path(name).name: measure_model(name, options) for name in options.models}
    return {
        "peers": [PEER],
        "packages": {name: version(name) for way in options.ways for name in WAYS[way][1]},
        "models": {name: model for name, (model, _) in found.items()},
        "lengths": [entry for _, entries in found.values() for entry in entries],
    }


def markdown(result: dict[str, Any]) -> str:
    """A row for each model and way: size, error, score and times."""
    lengths = list(dict.fromkeys(entry["length"] for entry in result["lengths"]))
    header = ["model", "way", "MB", "error", "score", *(f"{n} tokens, ms" for n in lengths)]
    rows = []
    for name, model in result["models"].items():
        for way, one in model["ways"].items():
            found = f"{model['score']} {one['score']:.3f}" if "score" in one else "-"
            row = [name, way, f"{one['bytes'] / 1e6:.1f}", f"{one['error']:.0e}" if one["error"] else "0", found]
            for entry in (entry for entry in result["lengths"] if entry["call"] == name):
                timed = entry["models"][way]
                speed = f" (x {timed['speed_over'][PEER]['median']:.2f})" if "speed_over" in timed else ""
                row.append(f"{1000 * timed['seconds']['median']:.1f}{speed}")
            rows.append(row)
        rows += [[name, way, "failed", *["-"] * (len(header) - 3)] for way in model["failures"]]
    made = ", ".join(f"{name} {number}" for name, number in result["packages"].items())
    return markdown_table(header, rows) + (f"\n\nMade with {made}." if made else "")


main = measuring.Benchmark(__file__, PROTOCOL, parse, measure, lambda _: "deployment", markdown).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
