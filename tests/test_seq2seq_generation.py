"""`generate` of encoder-decoders: every way of decoding equals decoding without a state, and the source is dropped."""

import weakref

import pytest
import torch
from datasets import Dataset
from helpers import FAMILIES, padded_batch, random_ids, refused, tiny_tokenizer
from helpers import tiny_seq2seq_model as tiny
from test_generation_compile import compiled_with
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from luna_hf import MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "forced": {"num_beams": 2, "forced_bos_token_id": 5, "forced_eos_token_id": 2},
    "prompt": {"decoder_input_ids": torch.tensor([[2, 7, 9]] * 3)},
}


def make(family, **options):
    """A model whose texts differ by source and do not end early."""
    model = tiny(family, **{"position_embedding_type": "sinusoidal", "tie_word_embeddings": False, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0 if name == "lm_head.weight" or "crossattention" in name else 1.5)
    model.generation_config.eos_token_id = None
    return model


def source(side="right"):
    """The same three texts with padding on either side."""
    inputs = padded_batch([9, 14, 3])
    if side == "left":
        rolled = [[row.roll(14 - n) for row, n in zip(tensor, (9, 14, 3), strict=True)] for tensor in inputs.values()]
        inputs = {name: torch.stack(rows) for name, rows in zip(inputs, rolled, strict=True)}
    return inputs


def texts(model, inputs, **options):
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 9, **options})


@families
@pytest.mark.parametrize("way", WAYS)
def test_the_state_changes_nothing(family, way):
    model, inputs = make(family), source()
    expected = texts(model, inputs, use_cache=False, **WAYS[way])
    assert torch.equal(texts(model, inputs, **WAYS[way]), expected)
    assert torch.equal(texts(model, source("left"), **WAYS[way]), expected)
    encoded = model.get_encoder()(**inputs)
    given = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    assert torch.equal(texts(model, given, **WAYS[way]), expected)
    encoded = model.get_encoder()(**inputs)  # transformers repeats the rows of a given output in place
    given = {"encoder_outputs": encoded, "input_ids": inputs["input_ids"]}  # whose padding is known by its id
    assert torch.equal(texts(model, given, **WAYS[way]), expected)


@families
def test_rows_do_not_depend_on_the_batch(family):
    model, inputs = make(family), source()
    together = texts(model, inputs, num_beams=2)
    for row, length in enumerate((9, 14, 3)):
        alone = texts(model, {"input_ids": inputs["input_ids"][row : row + 1, :length]}, num_beams=2)
        assert torch.equal(alone[0], together[row])
    assert len({tuple(text.tolist()) for text in together}) > 1


@families
def test_the_encoders_states_are_dropped(family, monkeypatch):
    """At the first step of the decoder nothing refers to them, and the state has one size."""
    model, sizes = make(family, max_position_embeddings=400), set()
    encoder, decoder, kept, dropped = model.get_encoder(), model.get_decoder(), [], []
    original, decode = encoder.forward, decoder.run_layers

    def forward(*args, **kwargs):
        outputs = original(*args, **kwargs)
        kept.append(weakref.ref(outputs.last_hidden_state))
        return outputs

    def step(*args, **kwargs):
        dropped.append(kept[-1]() is None)
        return decode(*args, **kwargs)

    monkeypatch.setattr(encoder, "forward", forward)
    monkeypatch.setattr(decoder, "run_layers", step)
    for length in (20, 300):
        made = texts(model, {"input_ids": random_ids(2, length)}, return_dict_in_generate=True)
        sizes.add(made.cache.nbytes)
    assert len(kept) == 2 and len(sizes) == 1
    assert len(dropped) == 18 and all(dropped)


@families
def test_a_state_continues_a_text(family):
    model, inputs = make(family), source()
    whole = texts(model, inputs, max_new_tokens=10)
    first = texts(model, inputs, max_new_tokens=4, return_dict_in_generate=True)
    # The last token is not yet in the state.
    given = {"decoder_input_ids": first.sequences, "cache": first.cache}
    assert torch.equal(texts(model, {**inputs, **given}, max_new_tokens=6), whole)
    other = {**given, "decoder_input_ids": first.sequences + 1}
    with refused("cache"):
        texts(model, {**inputs, **other})


@families
def test_a_state_of_another_source_is_refused(family):
    """However the state was made; and not for other padding, nor with beams."""
    model, inputs = make(family), source()
    other = {**inputs, "input_ids": inputs["input_ids"].roll(1, 1)}
    for beams in (1, 2):
        made = texts(model, inputs, num_beams=beams, return_dict_in_generate=True)
        with refused("another source"):
            texts(model, {**other, "cache": made.cache}, num_beams=beams)
    cache = MemoryCache(model.config)
    first = torch.full((3, 1), model.config.decoder_start_token_id)
    with torch.no_grad():
        model(**inputs, decoder_input_ids=first, cache=cache)
    start = {"cache": cache, "decoder_input_ids": torch.cat([first, first + 3], 1)}
    with refused("3 rows", "repeat its rows"):
        texts(model, {**inputs, **start}, num_beams=2)
    assert len(texts(model, {**source("left"), **start})) == 3
    with refused("another source"):
        texts(model, {**other, "cache": cache})


@families
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_the_id_of_padding_can_be_changed(family, causal):
    """In the model's config, which `forward`, `write_source` and `generate` follow."""
    model, target = make(family, source_is_causal=causal).double(), random_ids(2, 3)
    model.config.pad_token_id = 7
    ids = random_ids(2, 8).masked_fill(torch.arange(8) > torch.tensor([[7], [4]]), 7)
    mask, cache = (ids != 7).long(), MemoryCache(model.config)
    expected = model(ids, attention_mask=mask, decoder_input_ids=target).logits
    kept, whole = {"attention_mask": torch.ones_like(ids)}, MemoryCache(model.config)
    with_all = model(ids, **kept, decoder_input_ids=target).logits
    assert not torch.allclose(with_all, expected)
    model.base_model.write_source(whole, ids, **kept)
    torch.testing.assert_close(model(decoder_input_ids=target, cache=whole).logits, with_all)
    torch.testing.assert_close(model(ids, decoder_input_ids=target).logits, expected)
    model.base_model.write_source(cache, ids)
    torch.testing.assert_close(model(decoder_input_ids=target, cache=cache).logits, expected)
    assert torch.equal(texts(model, {"input_ids": ids}), texts(model, {"input_ids": ids, "attention_mask": mask}))


@pytest.mark.parametrize("family", ["luna", "leapformer"])
def test_a_compiled_step(family):
    """One compilation serves sources and targets of every length."""
    torch._dynamo.reset()
    model, counter = make(family, num_hidden_layers=1, decoder_layers=1), CompileCounterWithBackend("eager")
    options = compiled_with(counter)
    for lengths, tokens in (((9, 14, 12), 8), ((30, 20, 25), 4)):
        inputs = padded_batch(list(lengths))
        expected = texts(model, inputs, max_new_tokens=tokens)
        assert torch.equal(texts(model, inputs, max_new_tokens=tokens, **options), expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_learned_positions_end_a_default_length():
    model = make("luna", position_embedding_type="learned", max_position_embeddings=16)
    assert model.generate(random_ids(1, 5)).shape[1] == 16
    assert make("luna").generate(random_ids(1, 5)).shape[1] > 16


def test_the_trainer_generates(tmp_path):
    tokenizer = tiny_tokenizer()
    model = tiny("luna", vocab_size=len(tokenizer), position_embedding_type="sinusoidal")
    rows = [{"input_ids": [0, *range(5, 5 + n), 2], "labels": [*range(9, 9 + n), 2]} for n in (3, 5, 4, 6)]
    rows = Dataset.from_list([{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows])
    seen = []

    def metrics(predicted):
        seen.append(predicted.predictions)
        return {"rows": len(predicted.predictions)}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        predict_with_generate=True,
        generation_max_length=7,
        label_smoothing_factor=0.1,
        report_to="none",
    )
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        compute_metrics=metrics,
    )
    assert trainer.train().training_loss > 0
    assert trainer.evaluate()["eval_rows"] == 4
    assert (seen[0][:, 0] == 2).all() and (seen[0][:, 7:] == 1).all()  # the start token; padding behind the maximum
