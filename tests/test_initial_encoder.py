"""Encoder-decoders that start from a trained encoder: its states, its tokenizer, what is new, and what is refused."""

import json
import shutil

import pandas
import pytest
import torch
import train_translation
from helpers import FAMILIES, ROOT, slots_of
from safetensors.torch import load_file, save_file
from test_convert_command import WORDS, write_model
from tiny_training import Killed, dies_at_call, same_weights, start
from tiny_translation import RECIPES, SETTINGS
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, BertForMaskedLM
from translation.encoder import complete_section, encoder_config, encoder_weights, seq2seq_config, with_ends
from translation.run import Translation

from luna_hf.scripting import UserError

MINILM = next(path for path in RECIPES if path.stem == "summarize_minilm")
WINDOW = {"local_window": 8, "num_selected_tokens": 4, "num_selection_queries": 2, "softmax_length": 16}
# What each family's encoder reads; positions of the source's 40 are repeated in the table or by a period.
FIELDS = {
    "luna": {**WINDOW, "position_period": 16},
    "abc_memory": WINDOW,
    "leapformer": {},
    "lavo": {"local_window": 8},
}
LENGTH = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summaries")
    for split, number in {"train": 24, "validation": 4, "test": 4}.items():
        rows = [
            {
                "document": " ".join(WORDS[(place + n) % 8] for n in range(5 + 20 * (place % 4))),
                "summary": WORDS[place % 8],
            }
            for place in range(number)
        ]
        pandas.DataFrame(rows).to_json(folder / f"{split}.jsonl", orient="records", lines=True)
    return folder


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """A folder with an encoder of every family that starts from one source, with its tokenizer."""
    folder = tmp_path_factory.mktemp("encoders")
    source = write_model(folder / "source", BertForMaskedLM)
    for family, fields in FIELDS.items():
        options = {**slots_of(family, 4), **fields, "max_length": LENGTH}
        model = FAMILIES[family].base_model.from_pretrained_encoder(source, **options)
        model.save_pretrained(folder / family)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder / family)
    return folder


def words(data, folder, encoder, **changes):
    values = {name: value for name, value in SETTINGS.items() if not name.startswith("model.")}
    values |= {
        "data": data,
        "output_dir": folder,
        "initial_encoder": encoder,
        "max_length": 80,
        "model.decoder_layers": 1,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [str(MINILM), *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


@torch.no_grad()
def states(encoder, ids, mask):
    return encoder.eval()(ids, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("family", FIELDS)
def test_the_encoder_computes_what_it_did(family, data, encoders, tmp_path):
    """Also beyond `softmax_length`, where slots and selected tokens matter; training almost does not move it."""
    changes = {"learning_rate": 1e-12, "max_steps": 2, "average_checkpoints": 1}
    assert start(train_translation, words(data, tmp_path, encoders / family, **changes)) == 0
    source, model = AutoModel.from_pretrained(encoders / family), AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    ids, mask = torch.randint(5, source.config.vocab_size, (2, 80)), torch.ones(2, 80, dtype=torch.long)
    mask[1, 60:] = 0
    expected = states(source, ids, mask)
    assert model.config.max_position_embeddings == LENGTH and model.config.decoder_layers == 1
    torch.testing.assert_close(states(model.get_encoder(), ids, mask), expected, atol=1e-6, rtol=0)
    assert torch.equal(model.lm_head.weight, model.get_encoder().get_input_embeddings().weight)
    if family in ("luna", "abc_memory"):
        with pytest.raises(AssertionError):  # the test sees the slots
            alone = source(ids, attention_mask=mask, read_slots=False).last_hidden_state
            torch.testing.assert_close(alone, expected, atol=1e-3, rtol=0)
    card = (tmp_path / "README.md").read_text()
    assert "New, and trained from the start" in card and "decoder.encoder.layer" in card
    assert "and a new decoder" in card


def test_texts_end_and_summaries_stop(data, encoders, tmp_path):
    changes = {"max_steps": 60, "learning_rate": 0.01, "eval_steps": 30, "save_steps": 30, "max_new_tokens": 30}
    assert start(train_translation, words(data, tmp_path, encoders / "luna", **changes)) == 0
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    first, last, pad = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[PAD]"])
    source = AutoTokenizer.from_pretrained(encoders / "luna")
    assert tokenizer("the token")["input_ids"] == source("the token")["input_ids"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (first, last, pad)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (first, last, pad)
        assert config.decoder_start_token_id == last
    assert model.config.use_cache and model.generation_config.use_cache
    batch = tokenizer(["every token reads the packed", "sequence"], padding=True, return_tensors="pt")
    made = model.generate(**batch)
    assert all(last in row[1:] for row in made.tolist()) and made.shape[1] < 30
    card = (tmp_path / "README.md").read_text()
    assert "BPE" not in card and "by the tokenizer of `" in card and "Beam search with 2 beams, one reference" in card
    assert set(tokenizer.batch_decode(made, skip_special_tokens=True)) <= {*WORDS}


def test_a_killed_run_continues_without_the_weights(data, encoders, tmp_path, monkeypatch, capsys):
    encoder = shutil.copytree(encoders / "luna", tmp_path / "encoder")
    command = words(data, tmp_path / "out", encoder)
    assert start(train_translation, words(data, tmp_path / "whole", encoder)) == 0
    with monkeypatch.context() as patch:
        dies_at_call(patch, Translation, "save", 3)
        with pytest.raises(Killed):
            start(train_translation, command)
    (encoder / "model.safetensors").unlink()
    config = (encoder / "config.json").read_text()
    (encoder / "config.json").write_text(json.dumps({**json.loads(config), "local_window": 6}))
    assert start(train_translation, command) == 2
    assert "config.json" in capsys.readouterr().err
    (encoder / "config.json").write_text(config)
    assert start(train_translation, command) == 0
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert start(train_translation, words(data, tmp_path / "new", encoder)) == 2
    assert "weights" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__local_window": 6}, "`model.local_window` is 6, but 8"),
        ({"model__hidden_size": 16}, "`model.hidden_size` is 16, but 32"),
        ({"model__model_type": "lavo"}, "`model.model_type` is 'lavo', but 'luna'"),
        ({"model__norm_first": True}, "norm_first"),
        ({"model__scale_embedding": True}, "scale_embedding"),
        ({"model__source_is_causal": True}, "source_is_causal"),
        ({"model__decoder_layer": 1}, "decoder_layers"),
        ({"model__max_position_embeddings": 70}, "max_length"),
        ({"initial_weights": "somewhere"}, "initial_weights"),
    ],
)
def test_contradictions_are_refused(changes, named, data, encoders, tmp_path, capsys):
    assert start(train_translation, words(data, tmp_path / "out", encoders / "luna", **changes)) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_other_sources_are_refused(data, encoders, tmp_path, capsys):
    FAMILIES["abc_memory"].base_model.from_pretrained_encoder(
        encoders / "source", memory_control="compressive", memory_size=4
    ).save_pretrained(tmp_path / "means")
    AutoTokenizer.from_pretrained(encoders / "source").save_pretrained(tmp_path / "means")
    for encoder, named in ((encoders / "source", "convert it first"), (tmp_path / "means", "`memory_control`")):
        assert start(train_translation, words(data, tmp_path / "out", encoder, max_length=40)) == 2
        assert named in capsys.readouterr().err


def test_an_encoder_without_all_weights_is_refused(encoders, tmp_path):
    folder = shutil.copytree(encoders / "luna", tmp_path / "cut")
    weights = load_file(folder / "model.safetensors")
    gone = next(name for name in weights if ".layer" in name)
    kept = {name: weight for name, weight in weights.items() if name != gone}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"lacks 1 weights of the encoder.*{gone}"):
        encoder_weights(str(folder), {"max_position_embeddings": LENGTH})


def test_the_recipe_fits_the_shipped_encoder():
    recipe = train_translation.read_recipe(MINILM)
    folder = ROOT / recipe.initial_encoder
    encoder = encoder_config(str(folder))
    section = complete_section(recipe.model, encoder, str(folder))
    tokenizer = with_ends(AutoTokenizer.from_pretrained(folder))
    config = seq2seq_config(section, encoder, tokenizer, str(folder))
    assert (config.hidden_size, config.num_hidden_layers, config.decoder_layers) == (384, 6, 3)
    assert config.max_position_embeddings == recipe.max_length and not config.scales_embedding()
    assert recipe.output_dir.endswith(recipe.model_name)


def test_fields_that_agree_and_shorter_positions_are_accepted(data, encoders, tmp_path):
    changes = {"model__local_window": 8, "model__model_type": "luna", "model__max_position_embeddings": 80}
    assert (
        start(
            train_translation,
            words(data, tmp_path, encoders / "luna", **changes, max_steps=2, tokenizer=encoders / "source"),
        )
        == 0
    )
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).config.max_position_embeddings == 80
