"""A folder of tiny checkpoints for the page of `examples/space`."""

import json
from pathlib import Path

import torch
from helpers import tiny_causal_model
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_finetuning import SHAPE, checkpoint, encoder, tokenizer
from transformers import AutoModelForSequenceClassification

MIXED = {"local_window": 4, "conv_kernel_size": 3}
TOPICS = {0: "foxes", 1: "dogs", 2: "cats"}


def tiny_space(folder: Path, longest: int = 40) -> Path:
    """Checkpoints of each kind, classifiers both as an adapter and whole; and a folder without weights."""
    sentence_encoder(folder / "luna-minilm")
    adapter(folder / "luna-minilm-topics", folder / "luna-minilm")
    checkpoint(folder / "abc-mini-en", "abc_memory", max_position_embeddings=longest)
    checkpoint(folder / "luna-mini-en", num_hidden_layers=2, max_position_embeddings=longest, **MIXED)
    checkpoint(folder / "roberta-mini-en", "roberta", max_position_embeddings=longest + 2)
    whole = {"num_labels": 2, "id2label": {0: "negative", 1: "positive"}}
    classifier(folder / "luna-mini-en", **whole).save_pretrained(folder / "luna-mini-en-sst2")
    tokenizer().save_pretrained(folder / "luna-mini-en-sst2")
    causal = folder / "luna-mini-en-clm"
    tiny_causal_model(**{**SHAPE, **MIXED, "vocab_size": len(tokenizer())}).save_pretrained(causal)
    tokenizer().save_pretrained(causal)
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.json").write_text((folder / "luna-mini-en" / "config.json").read_text())
    return folder


def sentence_encoder(folder: Path, longest: int = 1024) -> None:
    """An encoder with the file that says how sentence-transformers pools it; a passage may have hundreds of tokens."""
    encoder("luna", max_position_embeddings=longest, **MIXED).base_model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))


def classifier(folder: Path, **fields: object) -> torch.nn.Module:
    """The encoder of a folder with a random head."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(folder, **fields).eval()


def adapter(folder: Path, base: Path) -> PeftModel:
    """Save LoRA and a head for a base, with the config of the task, as if the base had been elsewhere."""
    model = classifier(base, num_labels=len(TOPICS), id2label=TOPICS)
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)).eval()
    adapted.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = f"checkpoints/{base.name}"
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return adapted
