"""What a warm start refuses, with the value and the fix."""

import json

import pytest
import torch
from helpers import refused, tiny_model
from safetensors.torch import load_file, save_file
from test_warm_start import make_source

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.warm_start import warm_start


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("bert", {"is_decoder": True}, "`is_decoder`"),
        ("bert", {"add_cross_attention": True}, "`add_cross_attention`"),
        ("bert", {"is_encoder_decoder": True}, "`is_encoder_decoder`"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative positions"),
        ("roberta", {"quantization_config": {"quant_method": "x"}}, "`quantization_config`"),
        ("roberta", {"pad_token_id": None}, "`pad_token_id`"),
        ("bert", {"num_hidden_layers": 2}, "bert.encoder.layer.2"),
        ("roberta", {"num_hidden_layers": 4}, "roberta.encoder.layer.3"),
        ("roberta", {"num_attention_heads": "four"}, "num_attention_heads"),
        ("roberta", {"hidden_act": "relu"}, "`hidden_act`"),
    ],
)
def test_configs_that_cannot_be_mapped(kind, fields, named, tmp_path):
    make_source(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with refused(named):
        warm_start(AbcForMaskedLM, tmp_path)


def test_sources_of_our_own():
    with refused("luna", "`from_pretrained`"):
        warm_start(LunaForMaskedLM, tiny_model("luna", "mlm"))
    for fields, named in (
        ({"norm_first": True}, "`norm_first`"),
        ({"position_embedding_type": "sinusoidal"}, "'learned'"),
    ):
        with refused(named):
            warm_start(LunaForMaskedLM, tiny_model("abc_memory", "mlm", **fields))
    norm_first = tiny_model("abc_memory", "mlm", norm_first=True, memory_control="full")
    with refused("`control_init`", "'attention'"):
        warm_start(AbcForMaskedLM, norm_first, memory_control="mlp", control_init="attention")


# What is found in the place of weights: a web page, a Git LFS pointer, nothing.
GARBAGE = [b"<!DOCTYPE html><html></html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", b""]


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_damaged_weights(file, tmp_path):
    make_source().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    for allow_pickle in (False, True):
        with refused(tmp_path):
            warm_start(AbcForMaskedLM, tmp_path, allow_pickle=allow_pickle)
    if file == "pytorch_model.bin":
        torch.save(make_source().state_dict(), tmp_path / file)
        whole = (tmp_path / file).read_bytes()
    for content in (*GARBAGE, whole[:-1000]):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError, match="cannot be loaded") as raised:
            warm_start(AbcForMaskedLM, tmp_path, allow_pickle=file == "pytorch_model.bin")
        assert str(tmp_path) in str(raised.value) and "weights_only" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "dtype"), [(torch.nan, None), (-torch.inf, None), (torch.inf, "float16"), (1e6, "float16")]
)
def test_weights_that_are_not_finite(value, dtype, tmp_path):
    source, name = make_source(), "roberta.encoder.layer.1.output.dense.weight"
    with torch.no_grad():
        source.get_parameter(name)[2, 3] = value
    source.save_pretrained(tmp_path)
    for given in (source, tmp_path):
        with refused(name.removeprefix("roberta.")):
            warm_start(LunaForMaskedLM, given, dtype=dtype)


def test_folders_that_are_incomplete(tmp_path):
    make_source().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.layer_norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with refused("lm_head.layer_norm.weight"):
        warm_start(AbcForMaskedLM, tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text("{")
    for source in (tmp_path / "source", tmp_path, tmp_path / "nowhere"):
        with refused(source, "config.json"):
            warm_start(AbcForMaskedLM, source)


@pytest.mark.parametrize(
    ("model_class", "fields", "named"),
    [
        (AbcForMaskedLM, {"memory_size": 0}, "`memory_size` is 0"),
        (AbcForMaskedLM, {"memory_control": "mpl"}, "'mpl'"),
        (AbcForMaskedLM, {"conv_kernel_size": 4}, "`conv_kernel_size` is 4"),
        (AbcForMaskedLM, {"memory_sise": 8}, "`memory_size`"),
        (AbcForMaskedLM, {"slots": 8}, "`slots`"),
        (AbcForMaskedLM, {"hidden_size": 48}, "`hidden_size` (48)"),
        (AbcForMaskedLM, {"tie_word_embeddings": False}, "`tie_word_embeddings`"),
        (AbcForMaskedLM, {"max_position_embeddings": 64}, "`max_length`"),
        (AbcForMaskedLM, {"max_length": 37}, "37, but the source's 38"),
        (AbcForMaskedLM, {"control_init": "zero"}, "'zero'"),
        (AbcForMaskedLM, {"memory_control": "sliding_window", "control_init": "random"}, "sliding_window"),
        (AbcForMaskedLM, {"control_activation": "relu", "control_init": "attention"}, "'attention'"),
        (LunaForMaskedLM, {"tie_kv": True}, "`tie_kv=True`"),
        (LunaForMaskedLM, {"pack_activation": "elu"}, "`pack_activation='elu'`"),
        (LunaForMaskedLM, {"num_projected_attention_heads": 5}, "`num_projected_attention_heads`"),
        (LunaForMaskedLM, {"slot_tokens": [0, 1]}, "`slot_tokens`"),
        (LunaForMaskedLM, {"slot_tokens": [5, 120]}, "`slot_tokens`"),
    ],
)
def test_wrong_fields(model_class, fields, named):
    with refused(named):
        warm_start(model_class, make_source(), **fields)
