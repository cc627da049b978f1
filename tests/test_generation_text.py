"""Text in, text out: tokenizer, streamers, stop strings and the text-generation pipeline.

Nothing here depends on the mechanism: one family represents all.
"""

from threading import Thread

import pytest
import torch
from helpers import SENTENCES, tiny_causal_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

PROMPTS = ["the quick brown fox", "short", "Paris is the capital of France, and"]


def causal_tokenizer():
    """The tests' tokenizer for a decoder: `<s>` in front, and no `</s>` at the end, which would end the text.

    Not a `RobertaTokenizer`, which restores its own `</s>` when loaded.
    """
    roberta = tiny_tokenizer()
    backend = roberta.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", roberta.bos_token_id)]
    )
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
    tokens = {name: getattr(roberta, name) for name in names}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **tokens)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a causal model with its tokenizer; in float64, where padding cannot flip a near tie."""
    folder, tokenizer = tmp_path_factory.mktemp("causal"), causal_tokenizer()
    tokenizer.save_pretrained(folder)
    options = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, "initializer_range": 0.2}
    model = tiny_causal_model("luna", **options).double()
    # Whole letters only, so that decoded text can be compared.
    allowed = {index for token, index in tokenizer.get_vocab().items() if token.strip("Ġ").isascii() and index > 3}
    model.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - allowed - {2})
    model.save_pretrained(folder)
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
    # A trained model has nothing to add after `</s>`.
    assert tiny_tokenizer()(SENTENCES[0]).input_ids[-1] == 2


def test_a_streamer_gets_the_text(saved):
    model, tokenizer = load(saved)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=10)[0])
    new = text.removeprefix(tokenizer.decode(inputs["input_ids"][0]))
    assert len(new) > 5
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, "max_new_tokens": 10, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == new
    assert len(pieces) > 1  # word by word


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
