"""sentence-transformers on saved folders: what rerankers, sparse and dense encoders compute.

`test_finetune_embeddings.py` trains them.

Heads are the same in every family: one represents all in every suite.
"""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
import torch
from helpers import MODELS, SENTENCES, inputs_for, tiny_causal_model, tiny_model, tiny_tokenizer

from luna_hf import FAMILIES

REPRESENTATIVE, *OTHERS = FAMILIES
families = pytest.mark.parametrize(
    "family", [REPRESENTATIVE, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
)
PAIRS = [(first, second) for first in SENTENCES for second in SENTENCES[:2]]
# Batches of unequal lengths differ from single texts by rounding in float32.
ATOL = 1e-5


def annotated(model_class):
    """Output classes in the return annotation of a model's forward."""
    hint = get_type_hints(model_class.forward)["return"]
    return get_args(hint) or (hint,)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [*MODELS, "causal"])
@torch.no_grad()
def test_the_annotation_names_the_output_and_its_fields(family, kind):
    model = tiny_causal_model(family) if kind == "causal" else tiny_model(family, kind)
    output = model(**inputs_for("mlm" if kind == "causal" else kind))
    classes = annotated(type(model))
    assert all(is_dataclass(output_class) for output_class in classes)
    returned = [output_class for output_class in classes if isinstance(output, output_class)]
    main = {"base": "last_hidden_state", "span": "start_logits"}.get(kind, "logits")
    assert any(main in {field.name for field in fields(output_class)} for output_class in returned)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each family, a plain folder of each kind of model that sentence-transformers loads."""
    root, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    for family in FAMILIES:
        for kind, options in (("base", {}), ("mlm", {}), ("sequence", {"num_labels": 1})):
            model = tiny_model(family, kind, vocab_size=len(tokenizer), **options)
            model.save_pretrained(root / family / kind)
            tokenizer.save_pretrained(root / family / kind)
    return root


@families
@torch.no_grad()
def test_a_batch_is_read_twice(family, folders):
    """As by two losses: the second pass gets what the modules of the first one added to the batch."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folders / family / "base"), device="cpu")
    batch = encoder.preprocess(SENTENCES)
    first = encoder(batch)["sentence_embedding"].clone()
    assert "token_embeddings" in batch
    assert torch.equal(encoder(batch)["sentence_embedding"], first)


@families
def test_cross_encoder(family, folders):
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(str(folders / family / "sequence"), device="cpu")
    for pair, score in zip(PAIRS, encoder.predict(PAIRS, batch_size=4), strict=True):
        with torch.no_grad():
            logits = encoder.model(**encoder.tokenizer(*pair, return_tensors="pt")).logits
        assert score == pytest.approx(logits.sigmoid().item(), abs=ATOL)
    ranking = encoder.rank(SENTENCES[0], SENTENCES)
    scores = torch.as_tensor(encoder.predict([(SENTENCES[0], text) for text in SENTENCES]))
    assert [entry["corpus_id"] for entry in ranking] == scores.argsort(descending=True).tolist()
    assert [entry["score"] for entry in ranking] == pytest.approx(
        scores.sort(descending=True).values.tolist(), abs=ATOL
    )


@families
def test_sparse_encoder(family, folders):
    from sentence_transformers import SparseEncoder

    encoder = SparseEncoder(str(folders / family / "mlm"), device="cpu")
    for text, embedding in zip(SENTENCES, encoder.encode(SENTENCES, batch_size=5).to_dense(), strict=True):
        # SPLADE (Formal et al. 2021, arXiv 2109.10086, equation 1): the largest log(1 + relu(logit)) of the tokens.
        with torch.no_grad():
            logits = encoder[0].model(**encoder.tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(embedding, logits.relu().log1p().amax(0), atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["base", "mlm"])
def test_flattened_batches(family, kind, folders, monkeypatch):
    """What the library sends to models with flash attention: the texts of a batch in one row."""
    import sentence_transformers as library

    encoder_class = library.SparseEncoder if kind == "mlm" else library.SentenceTransformer
    encoder, seen = encoder_class(str(folders / family / kind), device="cpu"), []

    def embed(model):
        embeddings = torch.as_tensor(model.encode(SENTENCES, batch_size=5))
        return embeddings.to_dense() if kind == "mlm" else embeddings

    expected = embed(encoder)
    kernels = ((None, print, None, None), None)
    monkeypatch.setattr("transformers.modeling_flash_attention_utils.lazy_import_flash_attention", lambda _: kernels)
    monkeypatch.setattr(type(encoder[0]), "_is_flash_attention_requested", lambda _: True)
    encoder[0].unpad_inputs = True
    encoder[0].register_forward_pre_hook(lambda _, args: seen.append(dict(args[0])))
    torch.testing.assert_close(embed(encoder), expected, atol=ATOL, rtol=1e-5)
    assert seen and all(given["input_ids"].shape[0] == 1 and "cu_seq_lens_q" in given for given in seen)
