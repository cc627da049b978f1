"""What every model of every family promises, besides padding (test_padding.py) and the library's own tests."""

import copy

import pytest
import torch
from helpers import (
    FAMILIES,
    FAMILY_POOLINGS,
    FAMILY_VARIANTS,
    MODELS,
    inputs_for,
    model_class,
    random_ids,
    refused,
    slots_of,
    tiny_config_for,
    tiny_model,
    variants_of,
)
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    RobertaTokenizer,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from variants import ROWS

families = pytest.mark.parametrize("model_type", FAMILIES)
variants = pytest.mark.parametrize(("model_type", "variant"), FAMILY_VARIANTS)


@families
def test_registered_with_the_auto_classes(model_type):
    family, config = FAMILIES[model_type], tiny_config_for(model_type)
    assert type(AutoModel.from_config(config)) is family.base_model
    assert type(AutoModelForMaskedLM.from_config(config)) is family.masked_lm
    assert type(AutoModelForPreTraining.from_config(config)) is family.masked_lm
    for causal in (config, config.as_decoder()):
        assert type(AutoModelForCausalLM.from_config(causal)) is family.causal_lm
    assert len(family.heads) == 4
    for auto_class, head in family.heads.items():
        assert type(auto_class.from_config(config)) is head
    assert TOKENIZER_MAPPING[family.config] is RobertaTokenizer


@variants
@torch.no_grad()
def test_any_length_up_to_the_limit(model_type, variant):
    model = tiny_model(model_type, **variants_of(model_type)[variant])
    for length in (1, 2, 7, 8, 9, 17, 63, 64):  # the memory has 8 slots
        states = model(random_ids(2, length)).last_hidden_state
        assert states.shape == (2, length, 48) and torch.isfinite(states).all()


@families
def test_beyond_the_limit_is_an_error_with_both_numbers(model_type):
    model = tiny_model(model_type)
    for inputs in ({"input_ids": random_ids(1, 65)}, {"inputs_embeds": torch.zeros(1, 65, 48)}):
        with refused(65, 64):
            model(**inputs)


@families
@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({}, ["input_ids", "inputs_embeds"]),
        ({"input_ids": random_ids(1, 4), "inputs_embeds": torch.zeros(1, 4, 48)}, ["input_ids", "inputs_embeds"]),
        ({"input_ids": random_ids(1, 4)[0]}, ["input_ids", "(4,)"]),
        ({"input_ids": random_ids(1, 4)[:, :0]}, [0]),
        ({"input_ids": random_ids(2, 4), "attention_mask": torch.ones(2, 5)}, ["attention_mask", "(2, 4)", "(2, 5)"]),
        (
            {"input_ids": random_ids(2, 4), "attention_mask": torch.ones(2, 1, 4, 4)},
            ["attention_mask", "(2, 4)", "(2, 1, 4, 4)"],
        ),
        (
            {"input_ids": random_ids(2, 4), "token_type_ids": torch.zeros(2, 4).long()},
            ["token_type_ids", "type_vocab_size"],
        ),
        ({"input_ids": random_ids(2, 4), "atention_mask": torch.ones(2, 4)}, ["atention_mask", "attention_mask"]),
        ({"input_ids": random_ids(2, 4), "output_hiden_states": True}, ["output_hiden_states", "output_hidden_states"]),
        (
            {"input_ids": random_ids(2, 4), "attention_mask": torch.tensor([[0.0, 0, -1e9, -1e9]] * 2)},
            ["attention_mask", 1, 0],
        ),
        ({"input_ids": random_ids(1, 4), "seq_idx": torch.tensor([[0, 0, 1, 1]])}, ["seq_idx"]),
        ({"input_ids": random_ids(2, 4), "head_mask": torch.ones(3, 4)}, ["head_mask"]),
        ({"input_ids": random_ids(1, 4), "cu_seq_lens_q": torch.tensor([0, 2, 4])}, ["cu_seq_lens_q"]),
    ],
    ids=[
        "none",
        "both",
        "1d",
        "empty",
        "mask-length",
        "mask-4d",
        "segments",
        "misspelt",
        "misspelt-output",
        "additive",
        "packed",
        "head-mask",
        "unpadded",
    ],
)
def test_wrong_inputs_are_refused_by_name(model_type, inputs, named):
    with refused(*named):
        tiny_model(model_type)(**inputs)


@families
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_forward_changes_nothing(model_type, kind, train):
    """No parameter, buffer or configuration field, and no later result."""
    model = tiny_model(model_type, kind, norm_first=True, position_embedding_type="sinusoidal").train(train)
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    inputs = inputs_for(kind, labels=True)
    first = model(**inputs)[0]
    model(**inputs_for(kind, seed=7))
    assert torch.equal(model(**inputs)[0], first)
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(("model_type", "pooling"), FAMILY_POOLINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_gets_a_gradient(model_type, kind, pooling):
    """Also what serves only the stream that the loss does not read: distributed training needs it."""
    for variant in variants_of(model_type).values():
        model = tiny_model(model_type, kind, classifier_pooling=pooling, **variant).train()
        outputs = model(**inputs_for(kind, labels=True))
        (outputs[0].sum() if kind == "base" else outputs.loss).backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert not missing
        unused = {name for name, p in model.named_parameters() if not p.grad.any()}
        assert all(unimportant(name, model) for name in unused), unused


def unimportant(name, model):
    """Gradients that are zero by construction."""
    return (
        # A constant added to all keys of a softmax, and segments or positions that the batch does not contain.
        name.endswith(("key.bias", "token_type_embeddings.weight"))
        # A constant added to the scores of all choices, or of all places where a span may start or end.
        or (name == "classifier.out_proj.bias" and "MultipleChoice" in type(model).__name__)
        or name == "qa_outputs.bias"
        or ROWS[model.config.model_type].unused(name, model.config)
    )


@families
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_items", [None, 11], ids=["mean", "num-items"])
def test_sparse_prediction_equals_the_dense_head(model_type, dtype, tie, num_items):
    inputs = inputs_for("mlm", batch=4, labels=True)
    results = []
    for sparse in (False, True):
        model = tiny_model(model_type, "mlm", sparse_prediction=sparse, tie_word_embeddings=tie).to(dtype).train()
        outputs = model(**inputs, num_items_in_batch=num_items)
        outputs.loss.backward()
        results.append((outputs, {n: p.grad for n, p in model.named_parameters()}))
        logits = model.eval()(**inputs).logits
        assert logits.shape == (4, 12, 120), "in evaluation every position has its logits"
    (dense, dense_gradients), (sparse, sparse_gradients) = results
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(sparse.loss, dense.loss, rtol=0, atol=atol)
    labelled = inputs["labels"] != -100
    torch.testing.assert_close(sparse.logits, dense.logits[labelled], rtol=0, atol=atol)
    for name, gradient in dense_gradients.items():
        torch.testing.assert_close(sparse_gradients[name], gradient, rtol=0, atol=atol, msg=lambda m, n=name: n + m)


@families
def test_losses_equal_their_definitions(model_type):
    torch.manual_seed(0)
    ids = random_ids(4, 12)
    for problem, labels, loss in [
        ("regression", torch.randn(4), F.mse_loss),
        ("single_label_classification", torch.tensor([0, 2, 1, 2]), F.cross_entropy),
        ("multi_label_classification", torch.rand(4, 3).round(), F.binary_cross_entropy_with_logits),
    ]:
        count = 1 if problem == "regression" else 3
        for given in (problem, None):
            model = tiny_model(model_type, "sequence", num_labels=count, problem_type=given)
            outputs = model(ids, labels=labels)
            expected = loss(outputs.logits.squeeze(-1) if count == 1 else outputs.logits, labels)
            torch.testing.assert_close(outputs.loss, expected)
            per_item = model(ids, labels=labels, num_items_in_batch=2 * labels.numel()).loss
            torch.testing.assert_close(per_item, expected / 2)
            assert model.config.problem_type == given
    with refused("(4,)", "(4, 3)"):
        tiny_model(model_type, "sequence", num_labels=3)(ids, labels=torch.randn(4))


@families
def test_initialisation(model_type):
    """normal(0, 0.02) for matrices, embeddings and convolutions, but for what a family says otherwise; zero biases and
    padding rows; norms 1."""
    torch.manual_seed(0)
    others = ROWS[model_type].deviation
    sizes = {
        "hidden_size": 128,
        "vocab_size": 500,
        "intermediate_size": 256,
        **slots_of(model_type, 64),
    }
    for kind in MODELS:
        model = model_class(model_type, kind)._from_config(tiny_config_for(model_type, **sizes, conv_kernel_size=5))
        for name, parameter in model.named_parameters():
            if name.endswith("LayerNorm.weight") or name.endswith("layer_norm.weight"):
                assert (parameter == 1).all(), name
            elif name.endswith("bias"):
                assert not parameter.any(), name
            else:
                # Standard error of a standard deviation: 1 / sqrt(2 N); five of them, and 5 % for the padding rows.
                error = 5 / (2 * parameter.numel()) ** 0.5 + 0.05
                deviation = next((others[end] for end in others if name.endswith(end)), 0.02)
                assert parameter.std().item() == pytest.approx(deviation, rel=error), name
                assert abs(parameter.mean().item()) < 5 * deviation / parameter.numel() ** 0.5, name
        embeddings = model.base_model.embeddings
        assert not embeddings.word_embeddings.weight[1].any() and not embeddings.position_embeddings.weight[1].any()


@families
def test_refused_inputs_may_be_none(model_type):
    """Wrappers made for any model pass what they do not use as `None`."""
    model, ids = tiny_model(model_type), random_ids(2, 4)
    assert torch.equal(model(ids, past_key_values=None, encoder_hidden_states=None)[0], model(ids)[0])


@families
def test_dropout_only_in_training(model_type):
    model = tiny_model(model_type, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    ids = random_ids(2, 12)
    assert torch.equal(model(ids)[0], model(ids)[0])
    model.train()
    assert not torch.equal(model(ids)[0], model(ids)[0])


@families
def test_positions_given_by_hand(model_type):
    """Rows of the table, as RoBERTa counts: the default is `pad_token_id + 1` and on."""
    model = tiny_model(model_type)
    ids = random_ids(2, 12)
    default = model(ids)[0]
    assert torch.equal(model(ids, position_ids=torch.arange(2, 14)[None])[0], default)
    assert not torch.equal(model(ids, position_ids=torch.arange(3, 15)[None])[0], default)
