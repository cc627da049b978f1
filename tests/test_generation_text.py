"""Text in, text out: tokenizer, streamers, stop strings and the text-generation pipeline with the causal models."""

import json
from threading import Thread

import pytest
import torch
from helpers import SENTENCES, run_python, tiny_causal_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from luna_hf import FAMILIES

families = pytest.mark.parametrize("family", list(FAMILIES))
PROMPTS = ["the quick brown fox", "short", "Paris is the capital of France, and"]


def causal_tokenizer():
    """The tests' tokenizer for a decoder: `<s>` in front and no `</s>` behind, which would end the text.

    Not a `RobertaTokenizer`: that class puts its own `</s>` back when it is loaded.
    """
    roberta = tiny_tokenizer()
    backend = roberta.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", roberta.bos_token_id)]
    )
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
    tokens = {name: getattr(roberta, name) for name in names}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **tokens)


def text_model(family, tokenizer):
    """A model whose text varies; in float64, where no padding can turn a near tie."""
    model = tiny_causal_model(
        family, vocab_size=len(tokenizer), tie_word_embeddings=False, initializer_range=0.2
    ).double()
    # Whole letters, so that decoded text can be compared.
    allowed = [index for token, index in tokenizer.get_vocab().items() if token.strip("Ġ").isascii() and index > 3]
    model.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - set(allowed) - {2})
    return model


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request, tmp_path_factory):
    """Folder of a causal model with its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = causal_tokenizer()
    tokenizer.save_pretrained(folder)
    text_model(request.param, tokenizer).save_pretrained(folder)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_keeps_its_form(saved):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    ids = tokenizer(SENTENCES[0]).input_ids
    assert ids[0] == 0 and 2 not in ids
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert (batch["input_ids"][:, -1] != tokenizer.pad_token_id).all()
    # With `</s>` behind the prompt a model that has learned what it means has nothing to add.
    assert tiny_tokenizer()(SENTENCES[0]).input_ids[-1] == 2


def test_streamers_get_the_text(saved, capsys):
    model, tokenizer = load(saved)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=10)[0])
    new = text.removeprefix(tokenizer.decode(inputs["input_ids"][0]))
    assert len(new) > 5
    model.generate(**inputs, max_new_tokens=10, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, "max_new_tokens": 10, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == new
    assert len(pieces) > 1  # the text comes as it is made, held back only within a word
    with pytest.raises(ValueError, match="streamer"):
        model.generate(**inputs, streamer=TextStreamer(tokenizer), num_beams=2, max_new_tokens=3)


def test_stop_strings(saved):
    model, tokenizer = load(saved)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    free = model.generate(**inputs, max_new_tokens=20)[0]
    stop = tokenizer.decode(free[prompt + 4 : prompt + 6])
    stopped = model.generate(**inputs, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer)[0]
    assert prompt + 1 <= len(stopped) <= prompt + 6
    assert torch.equal(stopped, free[: len(stopped)])
    assert stop in tokenizer.decode(stopped[prompt:])


def test_token_healing(saved):
    model, tokenizer = load(saved)
    inputs = tokenizer("every token rea", return_tensors="pt")
    healed = model.generate(**inputs, max_new_tokens=6, token_healing=True, tokenizer=tokenizer)
    assert tokenizer.decode(healed[0], skip_special_tokens=True).startswith("every token")


def test_pipeline(saved):
    generator = pipeline("text-generation", model=str(saved))
    assert generator.tokenizer.padding_side == "left"
    options = {"max_new_tokens": 10, "do_sample": False}
    singles = [generator(prompt, **options)[0]["generated_text"] for prompt in PROMPTS]
    model, tokenizer = load(saved)
    for prompt, text in zip(PROMPTS, singles, strict=True):
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), **options)
        assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
        assert text.startswith(prompt) and len(text) > len(prompt) + 5
    assert len({text[len(prompt) :] for prompt, text in zip(PROMPTS, singles, strict=True)}) == 3
    for size in (2, 3):
        batch = generator(PROMPTS, batch_size=size, **options)
        assert [row[0]["generated_text"] for row in batch] == singles
    new = generator(PROMPTS, batch_size=2, return_full_text=False, **options)
    assert [prompt + row[0]["generated_text"] for prompt, row in zip(PROMPTS, new, strict=True)] == singles
    torch.manual_seed(0)
    several = generator(PROMPTS[0], max_new_tokens=10, do_sample=True, num_return_sequences=3)
    assert len({row["generated_text"] for row in several}) == 3
    beams = generator(PROMPTS, num_beams=3, num_return_sequences=2, batch_size=2, **options)
    alone = [generator(prompt, num_beams=3, num_return_sequences=2, **options) for prompt in PROMPTS]
    assert beams == alone


PIPELINE = """
import json, sys
from transformers import pipeline
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
generator = pipeline("text-generation", model=folder, trust_remote_code=True)
assert "transformers_modules" in type(generator.model).__module__
options = {"max_new_tokens": 10, "do_sample": False}
whole = generator(prompts, batch_size=2, **options)
cached = generator.model.generate(
    **generator.tokenizer(prompts, padding=True, return_tensors="pt"),
    return_dict_in_generate=True, cache_implementation="static", **options,
).past_key_values
print(json.dumps([[row[0]["generated_text"] for row in whole], type(cached).__name__]))
"""


def test_pipeline_where_the_package_is_missing(saved, tmp_path):
    generator = pipeline("text-generation", model=str(saved))
    rows = generator(PROMPTS, batch_size=2, max_new_tokens=10, do_sample=False)
    out = run_python(PIPELINE, saved, json.dumps(PROMPTS), env={"HF_HOME": str(tmp_path)}, blocked=True)
    texts, cache = json.loads(out.splitlines()[-1])
    assert texts == [row[0]["generated_text"] for row in rows]
    assert cache == "MemoryCache"
