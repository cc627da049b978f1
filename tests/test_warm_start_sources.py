"""Any common encoder as a source: with softmax attention in all layers, the new model is the source itself."""

import json

import pytest
import roberta_to_abc
import torch
from helpers import refused
from hub_stub import HubStub
from test_convert_command import write_model
from test_warm_start import SMALL, batch_for, logits
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    ElectraForPreTraining,
)

from luna_hf import AbcConfig, AbcForMaskedLM, AbcModel, LunaForMaskedLM
from luna_hf.warm_start import warm_start
from luna_hf.warm_start.sentence_folder import find_transformer

DISTILBERT = {
    "dim": 48,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_size": 120,
    "max_position_embeddings": 40,
}
SOURCES = {
    "bert": ("bert", SMALL),
    "roberta": ("roberta", SMALL),
    "xlm-roberta": ("xlm-roberta", SMALL),
    "camembert": ("camembert", SMALL),
    "data2vec-text": ("data2vec-text", SMALL),
    "distilbert": ("distilbert", DISTILBERT),
    "distilbert-sinusoids": ("distilbert", {**DISTILBERT, "sinusoidal_pos_embds": True, "activation": "relu"}),
    "electra": ("electra", {**SMALL, "embedding_size": 48}),
    "electra-factorised": ("electra", {**SMALL, "embedding_size": 20}),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
HEADS = {"base": AutoModel, "mlm": AutoModelForMaskedLM}


@torch.no_grad()
def make(name, head="mlm", dtype=torch.float32, model_class=None):
    """A source with noise in every parameter, norms and biases included."""
    torch.manual_seed(11)
    kind, fields = SOURCES[name]
    config = AutoConfig.for_model(kind, **fields)
    model = model_class(config) if model_class else HEADS[head].from_config(config)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def inputs_of(source, *lengths):
    """A batch padded on the right, with segments where the source has them."""
    batch = batch_for(source, lengths or (12, 7, 3))
    if not getattr(source.config, "type_vocab_size", 0):
        del batch["token_type_ids"]
    return batch


@torch.no_grad()
def layers(model, batch):
    """The states of every layer at real tokens."""
    states = model.base_model(**batch, output_hidden_states=True).hidden_states
    return [state[batch["attention_mask"].bool()] for state in states]


def assert_same(model, source, batch, atol):
    ours, theirs = layers(model, batch), layers(source, batch)
    assert len(ours) == len(theirs) == 4
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_new_model_is_the_source(name, dtype, tmp_path):
    source, atol = make(name, dtype=dtype), TOLERANCE[dtype]
    source.save_pretrained(tmp_path / "source")
    model, made = warm_start(AbcForMaskedLM, tmp_path / "source", full_attention_layers="all")
    assert model.config.full_attention_layers == [0, 1, 2] and model.dtype == dtype
    assert not made.new and not made.unused
    batch = inputs_of(source)
    longest = inputs_of(source, model.config.max_position_embeddings)
    for inputs in (batch, longest):
        assert_same(model, source, inputs, atol)
        torch.testing.assert_close(logits(model, inputs), logits(source, inputs), rtol=0, atol=10 * atol)
    model.save_pretrained(tmp_path / "own")
    again = AbcForMaskedLM.from_pretrained(tmp_path / "own")
    assert again.config.full_attention_layers == [0, 1, 2]
    assert torch.equal(logits(again, batch), logits(model, batch))


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_in_memory_without_a_head(name):
    source = make(name, "base")
    model, made = warm_start(AbcModel, source, full_attention_layers="all")
    assert_same(model, source, inputs_of(source), 1e-5)
    assert not made.new and all("pooler" in unused for unused in made.unused)


def test_fields_by_other_names():
    config = warm_start(AbcForMaskedLM, make("distilbert-sinusoids"))[0].config
    assert (config.hidden_size, config.intermediate_size, config.hidden_act) == (48, 96, "relu")
    assert (config.num_hidden_layers, config.num_attention_heads) == (3, 4)
    assert (config.layer_norm_eps, config.type_vocab_size, config.hidden_dropout_prob) == (1e-12, 0, 0.0)
    with refused("`intermediate_size` (96)"):
        warm_start(AbcForMaskedLM, make("distilbert"), intermediate_size=64)
    with refused("`embedding_size` (20)"):
        warm_start(AbcForMaskedLM, make("electra-factorised"), embedding_size=48)


@pytest.mark.parametrize("name", ["electra", "electra-factorised"])
def test_the_head_of_a_discriminator_is_unused(name, tmp_path):
    source = make(name, model_class=ElectraForPreTraining)
    source.save_pretrained(tmp_path)
    for given in (source, tmp_path):
        model, made = warm_start(AbcForMaskedLM, given, full_attention_layers="all")
        assert_same(model, source, inputs_of(source), 1e-5)
        assert made.unused and all(name.startswith("discriminator_predictions.") for name in made.unused)
        assert all(name.startswith("lm_head.") for name in made.new)


@pytest.mark.parametrize("control", ["mlp", "linformer"])
def test_slots_of_a_factorised_source_start_as_its_attention(control):
    source = make("electra-factorised")
    model, made = warm_start(AbcForMaskedLM, source, memory_control=control, memory_size=8)
    assert "attention" in made.new["abc.control.weight"]
    assert logits(model, inputs_of(source)).isfinite().all()
    assert model.abc.embeddings.embeddings_project.weight.shape == (48, 20)


@pytest.mark.parametrize("name", ["distilbert", "electra"])
def test_luna_starts_from_them(name):
    source = make(name)
    model, made = warm_start(LunaForMaskedLM, source, projection_length=8)
    assert logits(model, inputs_of(source)).isfinite().all()
    embedded = model.base_model.embeddings.word_embeddings.weight
    assert torch.equal(embedded, source.get_input_embeddings().weight) and not made.unused
    exact, _ = warm_start(LunaForMaskedLM, source, projection_length=8, full_attention_layers="all")
    assert_same(exact, source, inputs_of(source), 1e-5)


def test_luna_needs_embeddings_of_the_layers_width():
    with refused("`embedding_size` 20", "48", "ABC"):
        warm_start(LunaForMaskedLM, make("electra-factorised"))


# ---- all layers ----


def test_all_layers_become_a_list(tmp_path):
    config = AbcConfig(num_hidden_layers=3, full_attention_layers="all")
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["full_attention_layers"] == [0, 1, 2]
    AbcConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    assert AbcConfig.from_pretrained(tmp_path, full_attention_layers="all").full_attention_layers == [0, 1, 2]
    for wrong in ("first", ""):
        with refused("`full_attention_layers`", repr(wrong), "'all'", "num_hidden_layers=3"):
            AbcConfig(num_hidden_layers=3, full_attention_layers=wrong)


# ---- refusals ----

WIDTHS = {"vocab_size": 20, "d_model": 12, "d_kv": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2}
OTHERS = {
    "mpnet": ({**SMALL, "num_hidden_layers": 1}, "relative positions"),
    "t5": (WIDTHS, "`is_encoder_decoder`"),
    "gpt2": ({"n_embd": 12, "n_layer": 1, "n_head": 2, "vocab_size": 9}, "type gpt2"),
    "albert": (SMALL, "type albert"),
    "deberta-v2": (SMALL, "type deberta-v2"),
    "modernbert": ({**SMALL, "pad_token_id": 0}, "type modernbert"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_encoders_are_refused_in_a_line(kind, tmp_path):
    fields, named = OTHERS[kind]
    AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path)  # refused before weights are needed
    with pytest.raises(ValueError, match=named) as raised:
        warm_start(AbcForMaskedLM, tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_weights_in_a_pickle_need_consent(tmp_path):
    source = make("bert")
    source.save_pretrained(tmp_path)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    warm_start(AbcForMaskedLM, tmp_path)  # reads the other file
    (tmp_path / "model.safetensors").unlink()
    for start in (warm_start, lambda model_class, *given: model_class.from_pretrained_encoder(*given)):
        with refused(tmp_path, "`allow_pickle=True`"):
            start(AbcForMaskedLM, tmp_path)
    model = AbcForMaskedLM.from_pretrained_encoder(tmp_path, allow_pickle=True, full_attention_layers="all")
    assert_same(model, source, inputs_of(source), 1e-5)


# ---- sentence-transformers ----


def save_sentence_folder(source, folder, path):
    source.save_pretrained(folder / path)
    modules = [
        {"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if path:
        (folder / "config.json").write_text('{"__version__": "2.0.0"}')  # as early versions did


@pytest.mark.parametrize("path", ["", "0_Transformer"])
def test_the_transformer_of_a_sentence_folder(path, tmp_path):
    source = make("distilbert", "base")
    save_sentence_folder(source, tmp_path, path)
    assert find_transformer(str(tmp_path)) == path
    model, _ = warm_start(AbcModel, tmp_path, full_attention_layers="all")
    assert_same(model, source, inputs_of(source), 1e-5)
    (tmp_path / path / "model.safetensors").rename(tmp_path / path / "pytorch_model.bin")
    with refused(tmp_path, "`allow_pickle=True`"):
        warm_start(AbcModel, tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    with refused(tmp_path, "modules.json"):
        warm_start(AbcModel, tmp_path)


@pytest.mark.parametrize("path", ["", "0_Transformer"])
def test_the_transformer_of_a_hub_name(path, tmp_path, monkeypatch):
    source, folder = make("distilbert", "base"), tmp_path / "local"
    folder.mkdir()
    save_sentence_folder(source, folder, path)
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    pickled = {name.replace("model.safetensors", "pytorch_model.bin"): content for name, content in files.items()}
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        hub.repositories |= {"tester/sentences": files, "tester/pickled": pickled}
        model, _ = warm_start(AbcModel, "tester/sentences", full_attention_layers="all")
        assert_same(model, source, inputs_of(source), 1e-5)
        with refused("tester/pickled", "`allow_pickle=True`"):
            warm_start(AbcModel, "tester/pickled")
    assert not hub.unknown


def test_a_command_reads_a_pickle_only_when_asked(tmp_path, capsys):
    source = write_model(tmp_path / "source")
    torch.save(AutoModel.from_pretrained(source).state_dict(), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    words = [str(source), str(tmp_path / "out"), "--memory-size", "4"]
    assert roberta_to_abc.main(words) == 2 and "--allow-pickle" in capsys.readouterr().err
    assert roberta_to_abc.main([*words, "--allow-pickle"]) == 0
