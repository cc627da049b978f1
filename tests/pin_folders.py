"""Small folders saved by an earlier version, and what the Auto classes load from them; see `record_pins.py`.

A folder holds what a model needs apart from its code: `config.json`, `generation_config.json` for models that generate,
and `model.safetensors`.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from pins import FOLDER, NAMES, PAD, Case, draw, fill, flatten, load, make_model, save
from torch import Tensor
from transformers import PreTrainedModel

FOLDERS = FOLDER / "folders"
FILES = ("config.json", "generation_config.json", "model.safetensors")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
SLOTS = {"luna": {"projection_length": 4}, "abc_memory": {"memory_size": 4}}
# Options that add parameters to a default model, in one folder each.
MORE = {
    ("luna", "ForSequenceClassification"): {"classifier_pooling": "packed_attention"},
    ("luna", "ForTokenClassification"): {"tie_kv": False, "conv_kernel_size": 3, "type_vocab_size": 2},
    ("abc_memory", "ForTokenClassification"): {"share_control": False, "conv_kernel_size": 3, "type_vocab_size": 2},
}
KINDS = (
    *("Model", "ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForCausalLM", "CausalModel"),
)
# Other Auto classes that load a folder.
OTHERS = {
    "Model": ("ModelForMaskedLM", "ModelForCausalLM", "ModelForSequenceClassification"),
    "ForMaskedLM": ("Model", "ModelForPreTraining", "ModelForCausalLM", "ModelForSequenceClassification"),
    "CausalModel": ("ModelForCausalLM",),
}


def saved_cases() -> Iterator[tuple[Path, Case]]:
    """Every folder, and the model in it."""
    for family, name in NAMES.items():
        for kind in KINDS:
            fields = {**SIZES, **SLOTS[family], **MORE.get((family, kind), {})}
            causal = "Causal" in kind
            yield FOLDERS / f"{name}{kind}", Case(family, kind.removeprefix("Causal"), "saved", fields, causal)


def loads() -> Iterator[tuple[Path, Case, str]]:
    """Every folder, with the Auto class it was saved for and then the others (names without `Auto`)."""
    for folder, case in saved_cases():
        kind = folder.name.removeprefix(NAMES[case.family])
        own = "Model" if case.kind == "Model" else f"Model{case.kind}"
        others = OTHERS.get(kind, ("Model",))
        yield from ((folder, case, auto) for auto in (own, *others))


def save_folder(folder: Path, case: Case) -> None:
    """Save the model of a case, in float32, without its code."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as everything:
        fill(make_model(case)).save_pretrained(everything)
        for name in FILES:
            if (Path(everything) / name).exists():
                shutil.copy(Path(everything) / name, folder / name)


def load_folder(folder: Path, case: Case, auto: str) -> tuple[PreTrainedModel, dict[str, object], dict[str, Tensor]]:
    """Load with an Auto class.

    Returns:
        The model; its class and the keys that did not match; the outputs that the file determines.
    """
    auto_class = getattr(transformers, f"Auto{auto}")
    model, info = auto_class.from_pretrained(folder, output_loading_info=True)
    facts = {"class": type(model).__name__}
    if auto == "Model" and case.causal:
        del facts["class"]  # a decoder's trunk may have its own class
    facts |= {name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return model, facts, outputs_of(model.double(), case, info["missing_keys"])


@torch.no_grad()
def outputs_of(model: PreTrainedModel, case: Case, missing: set[str]) -> dict[str, Tensor]:
    """Float64 outputs of trunk and head for a padded batch, without those that depend on random weights."""
    inputs = {"input_ids": draw("ids of folders", (2, 7), 4, 40), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    inputs["attention_mask"][1, 5:] = 0
    inputs["input_ids"][1, 5:] = PAD
    if model.config.type_vocab_size:
        inputs["token_type_ids"] = draw("segments", (2, 7), 0, 2)
    options = {"use_cache": False} if model.config.is_decoder else {}
    trunk = model.base_model
    values = {}
    if not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        values |= {f"trunk.{name}": tensor for name, tensor in flatten(trunk(**inputs, **options))}
    if not missing and model is not trunk:
        given = {name: tensor.unflatten(0, (1, 2)) for name, tensor in inputs.items()}
        given = given if "MultipleChoice" in type(model).__name__ else inputs
        values |= dict(flatten(model(**given, **options)))
        if model.can_generate():
            values["generate"] = model.generate(inputs["input_ids"][:1], max_new_tokens=8, do_sample=False)
    return values


def record() -> None:
    """Save every new folder, and what the Auto classes load from all; what older code saved is kept."""
    for folder, case in saved_cases():
        if not folder.exists():
            save_folder(folder, case)
    facts, outputs = {}, {}
    for folder, case, auto in loads():
        name = f"{folder.name} as Auto{auto}"
        _, facts[name], values = load_folder(folder, case, auto)
        outputs |= {f"{name}: {field}": tensor for field, tensor in values.items()}
    (FOLDER / "folders.json").write_text(json.dumps(facts, indent=1) + "\n")
    save(FOLDER / "folders.safetensors", outputs)


def expected(folder: Path, auto: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The recorded facts and outputs of a load."""
    name = f"{folder.name} as Auto{auto}"
    facts = json.loads((FOLDER / "folders.json").read_text())[name]
    outputs = load(FOLDER / "folders.safetensors")
    return facts, {
        key.removeprefix(f"{name}: "): tensor for key, tensor in outputs.items() if key.startswith(f"{name}: ")
    }
