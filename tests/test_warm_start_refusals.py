"""What a warm start refuses, by name and with the way round it."""

import json
import shutil

import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from test_warm_start import SMALL, make_source
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    RobertaForMaskedLM,
)

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.warm_start import warm_start


def config_with(tmp_path, kind="roberta", **fields):
    make_source(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("bert", {"is_decoder": True}, "is a decoder .`is_decoder` is true.*have learned to look back"),
        ("roberta", {"is_decoder": True, "add_cross_attention": True}, "is a decoder"),
        ("bert", {"add_cross_attention": True}, "has cross-attention"),
        ("bert", {"is_encoder_decoder": True}, "is an encoder-decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative positions .*'relative_key'.*absolute"),
        ("bert", {"position_embedding_type": "relative_key_query"}, "relative positions"),
        ("roberta", {"quantization_config": {"quant_method": "x"}}, "is quantized. Give the checkpoint"),
        ("roberta", {"pad_token_id": None}, "no `pad_token_id`"),
        ("roberta", {"model_type": None}, "names no `model_type`"),
        ("roberta", {"hidden_size": 52}, r"lm_head.\S+ has the shape \(48,.* in the file, but \(52,.* by config"),
        ("roberta", {"vocab_size": 130}, r"has the shape \(120.* in the file, but \(130"),
        ("roberta", {"num_hidden_layers": 2}, "has 3 layers, but 2 by `num_hidden_layers` of its config"),
        ("bert", {"num_hidden_layers": 1}, "has 3 layers, but 1 by"),
        ("roberta", {"num_hidden_layers": 4}, r"lacks weights of its own architecture \(roberta.encoder.layer.3"),
        ("roberta", {"num_attention_heads": "four"}, "config of .* cannot be read"),
        ("roberta", {"hidden_act": "relu"}, "head uses gelu and its layers relu.*without its head"),
    ],
)
def test_configs_that_cannot_be_mapped(kind, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        warm_start(AbcForMaskedLM, config_with(tmp_path, kind, **fields))


OTHERS = {
    "gpt2": (AutoModelForCausalLM, {"n_embd": 12, "n_layer": 1, "n_head": 2, "vocab_size": 9}, "gpt2 model, a decoder"),
    "bart": (
        AutoModelForSeq2SeqLM,
        {"d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9, "max_position_embeddings": 9}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 9, "decoder_ffn_dim": 9},
        "is an encoder-decoder",
    ),
    **{
        kind: (AutoModelForMaskedLM, {**SMALL, "num_hidden_layers": 1}, f"is a {kind} model, another architecture")
        for kind in ("electra", "albert", "deberta-v2", "roberta-prelayernorm")
    },
    "modernbert": (
        AutoModelForMaskedLM,
        {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "intermediate_size": 9}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        "is a modernbert model, another architecture",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("where", ["folder", "memory"])
def test_other_architectures(kind, where, tmp_path):
    auto_class, fields, message = OTHERS[kind]
    config = AutoConfig.for_model(kind, **fields)
    source = auto_class.from_config(config) if where == "memory" else tmp_path
    if where == "folder":
        config.save_pretrained(tmp_path)  # refused before any weights are looked for
    with pytest.raises(ValueError, match=message):
        warm_start(AbcForMaskedLM, source)
    with pytest.raises(ValueError, match="needs an encoder of RoBERTa's architecture: roberta, xlm-roberta"):
        warm_start(LunaForMaskedLM, source)


def test_a_luna_model_is_no_source():
    with pytest.raises(ValueError, match="is a luna model already: load it with `from_pretrained`"):
        warm_start(LunaForMaskedLM, tiny_model("luna", "mlm"))


@pytest.mark.parametrize("fields", [{"norm_first": True}, {"position_embedding_type": "sinusoidal"}])
def test_luna_needs_the_layout_of_roberta(fields):
    with pytest.raises(ValueError, match="post-norm encoders with learned positions"):
        warm_start(LunaForMaskedLM, tiny_model("abc_memory", "mlm", **fields))


# What stands where weights should: a page of HTML, a pointer of Git LFS, nothing.
GARBAGE = {
    "html": b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 501200538\n",
    "nothing": b"",
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_files_that_are_no_weights(file, what, tmp_path):
    make_source().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(GARBAGE[what])
    with pytest.raises(ValueError, match=r"weights of .* cannot be loaded .*copy or download it again") as raised:
        warm_start(AbcForMaskedLM, tmp_path)
    assert "weights_only" not in str(raised.value)


def test_a_model_in_memory_with_more_layers_than_its_config_says():
    source = make_source()
    source.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="has 3 layers, but 2"):
        warm_start(AbcForMaskedLM, source)


@pytest.mark.parametrize("damage", ["empty", "no-weights", "truncated", "truncated-bin", "broken-config", "missing"])
def test_damaged_folders(damage, tmp_path):
    if damage != "empty":
        make_source().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "no-weights":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "truncated-bin":
        torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
        weights.unlink()
        file = tmp_path / "pytorch_model.bin"
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "broken-config":
        (tmp_path / "config.json").write_text("{")
    elif damage == "missing":
        shutil.rmtree(tmp_path)
    message = {
        "empty": "is no checkpoint: it holds no config.json. Name a folder",
        "broken-config": "The config.json of .* cannot be read .*JSON",
        "missing": "There is no model .*neither as a folder nor on the Hub",
    }.get(damage, "weights of .* cannot be loaded .*copy or download it again")
    with pytest.raises(ValueError, match=message):
        warm_start(AbcForMaskedLM, tmp_path)


def test_a_head_of_which_a_part_is_missing(tmp_path):
    make_source().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.layer_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of its own architecture \(lm_head.layer_norm.weight"):
        warm_start(AbcForMaskedLM, tmp_path)


@pytest.mark.parametrize(
    ("model_class", "fields", "message"),
    [
        (AbcForMaskedLM, {"memory_size": 0}, "`memory_size` is 0, but must be at least 1"),
        (AbcForMaskedLM, {"memory_control": "mpl"}, "must be one of mlp"),
        (AbcForMaskedLM, {"conv_kernel_size": 4}, "odd number"),
        (AbcForMaskedLM, {"memory_sise": 8}, "Did you mean `memory_size`"),
        (AbcForMaskedLM, {"slots": 8}, "AbcConfig has no field `slots`"),
        (AbcForMaskedLM, {"projection_length": 8}, "AbcConfig has no field `projection_length`"),
        (AbcForMaskedLM, {"hidden_size": 48}, "`hidden_size` follows from the source .48.. Leave it out"),
        (AbcForMaskedLM, {"tie_word_embeddings": False}, "follows from the source"),
        (AbcForMaskedLM, {"max_position_embeddings": 64}, "Give `max_length`"),
        (AbcForMaskedLM, {"max_length": 37}, "`max_length` is 37, but the source has positions for 38 tokens"),
        (AbcForMaskedLM, {"max_length": 0}, "`max_length` is 0"),
        (AbcForMaskedLM, {"slot_tokens": [5]}, "no field `slot_tokens`; it is an option of luna models"),
        (AbcForMaskedLM, {"control_init": "zero"}, "`control_init` is 'zero'"),
        (LunaForMaskedLM, {"tie_kv": True}, "`tie_kv=True` cannot be warm-started"),
        (LunaForMaskedLM, {"projection_length": 0}, "`projection_length` is 0"),
        (LunaForMaskedLM, {"num_projected_attention_heads": 5}, "not a multiple of `num_projected_attention_heads`"),
        (LunaForMaskedLM, {"slot_tokens": [0, 1]}, "no tokens besides special ones"),
        (LunaForMaskedLM, {"slot_tokens": []}, "no tokens besides special ones"),
        (LunaForMaskedLM, {"slot_tokens": [5, 120]}, "ids up to 120, but the vocabulary has 120"),
    ],
)
def test_wrong_fields(model_class, fields, message):
    with pytest.raises(ValueError, match=message):
        warm_start(model_class, make_source(), **fields)


def test_a_class_of_another_package():
    with pytest.raises(ValueError, match="RobertaForMaskedLM is not a model of this package, whose families are luna"):
        warm_start(RobertaForMaskedLM, make_source())


def test_something_else_than_a_model():
    with pytest.raises(ValueError, match="not a Linear"):
        warm_start(AbcForMaskedLM, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not in memory"):
        warm_start(AbcForMaskedLM, make_source().to("meta"))


def test_adapters_have_to_be_merged():
    source = make_source()
    attention = source.roberta.encoder.layer[0].attention.self
    attention.query = torch.nn.Sequential(attention.query)
    with pytest.raises(
        ValueError, match=r"no parameter for abc\.encoder\.layer\.0\.attention\.self\.query\.weight\. Adapters"
    ):
        warm_start(AbcForMaskedLM, source)
