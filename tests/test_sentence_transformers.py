"""sentence-transformers on saved folders: rerankers, sparse and dense encoders score, train, save and load.

Heads are the same in every family: one represents all in every suite.
"""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
import torch
from datasets import Dataset
from helpers import MODELS, SENTENCES, inputs_for, run_python, tiny_causal_model, tiny_model, tiny_tokenizer

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


def train(trainer_class, arguments_class, model, data, loss, folder):
    """Two steps at a high learning rate, so that the outputs change clearly."""
    arguments = arguments_class(
        output_dir=str(folder),
        max_steps=2,
        learning_rate=0.01,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer_class(model=model, args=arguments, train_dataset=data, loss=loss).train()


def assert_trained(compute, before, reload):
    """The result of `compute` has changed, and `reload` gives it again."""
    after = torch.as_tensor(compute())
    assert (after - torch.as_tensor(before)).abs().max() > 100 * ATOL
    assert torch.equal(torch.as_tensor(reload()), after)


@families
def test_a_cross_encoder_scores_trains_and_comes_back(family, folders, tmp_path):
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    encoder = CrossEncoder(str(folders / family / "sequence"), device="cpu")
    scores = encoder.predict(PAIRS, batch_size=4)
    for pair, score in zip(PAIRS, scores, strict=True):
        with torch.no_grad():
            logits = encoder.model(**encoder.tokenizer(*pair, return_tensors="pt")).logits
        assert score == pytest.approx(logits.sigmoid().item(), abs=ATOL)
    first, second = zip(*PAIRS, strict=True)
    data = Dataset.from_dict({"query": first, "answer": second, "label": [float(a == b) for a, b in PAIRS]})
    loss = BinaryCrossEntropyLoss(encoder)
    train(CrossEncoderTrainer, CrossEncoderTrainingArguments, encoder, data, loss, tmp_path / "run")
    encoder.save_pretrained(str(tmp_path / "saved"))
    assert_trained(
        lambda: encoder.predict(PAIRS),
        scores,
        lambda: CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(PAIRS),
    )


@families
def test_a_cross_encoder_starts_from_a_masked_language_model(family, folders):
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(str(folders / family / "mlm"), num_labels=3, device="cpu")
    assert encoder.predict(PAIRS).shape == (len(PAIRS), 3)


@families
def test_a_sparse_encoder_pools_trains_and_comes_back(family, folders, tmp_path):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    encoder = SparseEncoder(str(folders / family / "mlm"), device="cpu")
    embeddings = encoder.encode(SENTENCES, batch_size=len(SENTENCES)).to_dense()
    for text, embedding in zip(SENTENCES, embeddings, strict=True):
        # SPLADE (Formal et al. 2021, arXiv 2109.10086, equation 1): the greatest log(1 + relu(logit)) of the tokens.
        with torch.no_grad():
            logits = encoder[0].model(**encoder.tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(embedding, logits.relu().log1p().amax(0), atol=ATOL, rtol=1e-5)
    data = Dataset.from_dict({"anchor": SENTENCES[:4], "positive": SENTENCES[1:]})
    ranking = SparseMultipleNegativesRankingLoss(encoder)
    loss = SpladeLoss(encoder, ranking, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3)
    train(SparseEncoderTrainer, SparseEncoderTrainingArguments, encoder, data, loss, tmp_path / "run")
    encoder.save_pretrained(str(tmp_path / "saved"))
    assert_trained(
        lambda: encoder.encode(SENTENCES).to_dense(),
        embeddings,
        lambda: SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(SENTENCES).to_dense(),
    )


@families
def test_a_sentence_transformer_trains_and_comes_back(family, folders, tmp_path):
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    encoder = SentenceTransformer(str(folders / family / "base"), device="cpu")
    embeddings = encoder.encode(SENTENCES)
    data = Dataset.from_dict({"anchor": SENTENCES[:4], "positive": SENTENCES[1:]})
    loss = MultipleNegativesRankingLoss(encoder)
    train(SentenceTransformerTrainer, SentenceTransformerTrainingArguments, encoder, data, loss, tmp_path / "run")
    encoder.save_pretrained(str(tmp_path / "saved"))
    assert_trained(
        lambda: encoder.encode(SENTENCES),
        embeddings,
        lambda: SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(SENTENCES),
    )


WITHOUT_THE_PACKAGE = """
import sys
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

root, families, texts = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
options = {"device": "cpu", "trust_remote_code": True}
for family in families:
    results = [
        torch.as_tensor(CrossEncoder(f"{root}/{family}/sequence", **options).predict([texts])),
        SparseEncoder(f"{root}/{family}/mlm", **options).encode(texts).to_dense(),
        torch.as_tensor(SentenceTransformer(f"{root}/{family}/base", **options).encode(texts)),
    ]
    torch.save(results, f"{root}/{family}/results.pt")
"""


@pytest.mark.slow
def test_all_three_without_the_package(folders, tmp_path):
    from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

    texts = SENTENCES[:2]
    names = ",".join(FAMILIES)
    run_python(WITHOUT_THE_PACKAGE, folders, names, *texts, env={"HF_HOME": str(tmp_path)}, blocked=True)
    for family in FAMILIES:
        results = torch.load(folders / family / "results.pt")
        expected = [
            torch.as_tensor(CrossEncoder(str(folders / family / "sequence"), device="cpu").predict([texts])),
            SparseEncoder(str(folders / family / "mlm"), device="cpu").encode(texts).to_dense(),
            torch.as_tensor(SentenceTransformer(str(folders / family / "base"), device="cpu").encode(texts)),
        ]
        torch.testing.assert_close(results, expected, atol=ATOL, rtol=1e-5)
