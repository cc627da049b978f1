"""Pipelines on saved folders: batches of unequal lengths equal single texts."""

import pytest
import torch
from helpers import MODELS, SENTENCES, tiny_model, tiny_tokenizer
from transformers import pipeline

from luna_hf import FAMILIES

# Heads are the same in every family: one represents all in every suite.
REPRESENTATIVE, *OTHERS = FAMILIES
# In float64 only leaking padding could make batches differ; pipelines may round to float32.
DTYPE, ATOL = torch.float64, 1e-6


@pytest.fixture(
    scope="module", params=[REPRESENTATIVE, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
)
def folders(request, tmp_path_factory):
    """One folder for each kind of model of a family."""
    root, tokenizer = tmp_path_factory.mktemp(request.param), tiny_tokenizer()
    own = {
        "sequence": {"id2label": {0: "contradiction", 1: "entailment"}},
        "token": {"id2label": {0: "O", 1: "B-LOC", 2: "I-LOC"}},
    }
    for kind in MODELS:
        names = own.get(kind, {})
        if names:
            names["label2id"] = {name: label for label, name in names["id2label"].items()}
        model = tiny_model(request.param, kind, vocab_size=len(tokenizer), **names)
        with torch.no_grad():
            # Larger weights make the answers differ clearly between texts.
            for parameter in model.parameters():
                parameter.mul_(3)
        model.save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    return root


def make(task, folder, **kwargs):
    return pipeline(task, model=str(folder), device="cpu", dtype=DTYPE, **kwargs)


def test_fill_mask_proposes_the_tokens_of_the_largest_logits(folders):
    fill = make("fill-mask", folders / "mlm")
    text = "the quick <mask> fox"
    proposals = fill(text, top_k=3)
    with torch.no_grad():
        logits = fill.model(**fill.tokenizer(text, return_tensors="pt")).logits[0]
    position = fill.tokenizer(text)["input_ids"].index(fill.tokenizer.mask_token_id)
    expected = logits[position].softmax(-1).topk(3)
    assert [proposal["token"] for proposal in proposals] == expected.indices.tolist()
    assert [proposal["score"] for proposal in proposals] == pytest.approx(expected.values.tolist(), abs=ATOL)


def test_fill_mask_in_batches_of_unequal_lengths(folders):
    fill = make("fill-mask", folders / "mlm")
    texts = ["<mask> one", "every token reads the packed <mask> in turn", "the <mask>", SENTENCES[3] + "<mask>"]
    assert len({len(fill.tokenizer(text)["input_ids"]) for text in texts}) == len(texts)
    for text, batched in zip(texts, fill(texts, batch_size=2), strict=True):
        for one, other in zip(fill(text), batched, strict=True):
            assert one["token"] == other["token"]
            assert one["score"] == pytest.approx(other["score"], abs=ATOL)


def test_text_classification_in_batches_of_unequal_lengths(folders):
    classify = make("text-classification", folders / "sequence")
    for text, batched in zip(SENTENCES, classify(SENTENCES, batch_size=2, top_k=None), strict=True):
        alone = {answer["label"]: answer["score"] for answer in classify(text, top_k=None)}
        assert alone == pytest.approx({answer["label"]: answer["score"] for answer in batched}, abs=ATOL)


def test_feature_extraction_gives_the_token_states(folders):
    extract = make("feature-extraction", folders / "base")
    with torch.no_grad():
        expected = extract.model(**extract.tokenizer(SENTENCES[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(extract(SENTENCES[0], return_tensors=True), expected)
    # Outputs of a batch keep their padding behind the text.
    for text, batched in zip(SENTENCES, extract(SENTENCES, batch_size=2), strict=True):
        alone = torch.tensor(extract(text)[0])
        torch.testing.assert_close(torch.tensor(batched[0])[: len(alone)], alone, atol=ATOL, rtol=1e-5)
