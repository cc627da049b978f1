"""Converting the authors' translation checkpoints: both dictionaries, shared or not, and the authors' numbers."""

import fairseq_luna
import pytest
import torch
from fairseq_format import translation
from fairseq_format.checkpoint import open_original
from official_luna import Fixture
from test_parity_luna_seq2seq import CASES, NAMES, PAD
from tiny_translation import write_checkpoint, write_dictionary
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from luna_hf import LunaForConditionalGeneration


@pytest.mark.parametrize("name", NAMES)
def test_the_authors_numbers(name, tmp_path, capsys):
    fixture, source = write_checkpoint(tmp_path / "wmt", name)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) == 0
    assert "Equal to the original" in capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(model) is LunaForConditionalGeneration
    shared = fixture.config["args"]["share_all_embeddings"]
    assert model.config.share_encoder_decoder_embeddings == model.config.tie_word_embeddings == shared
    for case in CASES:
        target = fixture.input(case, "prev_output_tokens")
        with torch.no_grad():
            logits = model(fixture.input(case, "src_tokens"), decoder_input_ids=target).logits
        difference = (logits - fixture.output(case, "logits"))[target != PAD].abs().max()
        assert difference <= max(1e-5, 2 * fixture.float32_error(case))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w0 w1@@ w2 new")["input_ids"] == [4, 5, 6, 3, 2]
    assert tokenizer.decode([4, 5, 6, 2], skip_special_tokens=True) == "w0 w1w2"
    assert (tmp_path / "out" / "target").exists() == (not shared)
    assert "pipeline_tag: translation" in (tmp_path / "out" / "README.md").read_text()


def test_a_difference_is_found(tmp_path, monkeypatch, capsys):
    """A mistake in the table of names shows, as the check does not use it."""
    _, source = write_checkpoint(tmp_path / "wmt", "post_tied_sinusoidal")
    read, pack = ".crossattention.self.query.", ".crossattention.self.pack.query."
    real = translation.to_ours

    def swap(weights):
        tensors, unused = real(weights)
        exchanged = {name: name.replace(read, "?").replace(pack, read).replace("?", pack) for name in tensors}
        return {exchanged[name]: tensor for name, tensor in tensors.items()}, unused

    monkeypatch.setattr(translation, "to_ours", swap)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) != 0
    assert "decoder 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"decoder_attention_heads": 2}, "decoder_attention_heads"),
        ({"activation_fn": "swish"}, "swish"),
        ({"no_token_positional_embeddings": True}, "no_token_positional_embeddings"),
    ],
)
def test_unsupported_arguments(arguments, named, tmp_path, capsys):
    _, source = write_checkpoint(tmp_path / "wmt", "post_tied_sinusoidal", **arguments)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) != 0
    assert named in capsys.readouterr().err


def test_a_dictionary_that_does_not_fit(tmp_path, capsys):
    _, source = write_checkpoint(tmp_path / "wmt", "post_tied_sinusoidal")
    write_dictionary(source / "dict.en.txt", 40)
    assert fairseq_luna.main([str(source), str(tmp_path / "out")]) != 0
    assert "40" in capsys.readouterr().err


def test_the_older_activation_and_offset_norms(tmp_path):
    """Files of 2023 store LayerNorm weights less 1; `--override` tells of elu + 1, which no argument shows."""
    fixture = Fixture("luna_seq2seq", "learned_lnemb_fixed")
    changes = {
        key: tensor - 1 for key, tensor in fixture.weights().items() if "norm" in key and key.endswith(".weight")
    }
    _, source = write_checkpoint(tmp_path / "wmt", "learned_lnemb_fixed", changes)
    with open_original(source) as original:
        model, _ = translation.make_model(original)
    name = "encoder.layernorm_porjected_embedding.weight"
    stored = model.luna.encoder.packed_embeddings.LayerNorm.weight
    torch.testing.assert_close(stored, fixture.weights()[name], rtol=0, atol=1e-6)
    assert fairseq_luna.main([str(source), str(tmp_path / "out"), "--override", "pack_activation=elu"]) == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config.pack_activation == "elu"
