"""What every model of every family guarantees, apart from padding (`test_padding.py`) and the library's own tests."""

import copy
import itertools

import pytest
import torch
from helpers import (
    FAMILIES,
    FAMILY_CAUSAL_VARIANTS,
    FAMILY_KINDS,
    FAMILY_POOLINGS,
    FAMILY_VARIANTS,
    KINDS_FIRST,
    MODELS,
    causal_variants_of,
    covering,
    inputs_for,
    model_class,
    padded_batch,
    random_ids,
    refused,
    slots_of,
    slow_unless,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
    tiny_seq2seq_model,
    variants_of,
)
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    DataCollatorWithFlattening,
    DynamicCache,
    RobertaTokenizer,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from variants import ROWS

from luna_hf import LunaForCausalLM, LunaForQuestionAnswering

families = pytest.mark.parametrize("model_type", FAMILIES)


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
    assert issubclass(TOKENIZER_MAPPING[family.config], RobertaTokenizer)


@pytest.mark.parametrize(("model_type", "variant"), KINDS_FIRST)
@torch.no_grad()
def test_any_length_up_to_the_limit(model_type, variant):
    model = tiny_model(model_type, **variants_of(model_type)[variant])
    for length in (1, 2, 7, 8, 9, 63, 64):  # the memory has 8 slots
        states = model(random_ids(2, length)).last_hidden_state
        assert states.shape == (2, length, 48) and torch.isfinite(states).all()


@families
def test_inputs_beyond_the_limit_are_refused(model_type):
    model = tiny_model(model_type, position_embedding_type="learned")
    for inputs in ({"input_ids": random_ids(1, 65)}, {"inputs_embeds": torch.zeros(1, 65, 48)}):
        with refused(65, 64):
            model(**inputs)


IDS = {"input_ids": random_ids(2, 4)}
# Inputs that encoders and decoders refuse, and what the message names.
REFUSED = {
    "none": ({}, ["input_ids", "inputs_embeds"]),
    "both": ({**IDS, "inputs_embeds": torch.zeros(2, 4, 48)}, ["input_ids", "inputs_embeds"]),
    "1d": ({"input_ids": IDS["input_ids"][0]}, ["input_ids", "(4,)"]),
    "empty": ({"input_ids": IDS["input_ids"][:, :0]}, [0]),
    "mask-length": ({**IDS, "attention_mask": torch.ones(2, 5)}, ["attention_mask", "(2, 4)", "(2, 5)"]),
    "mask-4d": ({**IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, ["attention_mask", "(2, 4)", "(2, 1, 4, 4)"]),
    "additive": ({**IDS, "attention_mask": torch.tensor([[0.0, 0, -1e9, -1e9]] * 2)}, ["attention_mask", 1, 0]),
    "segments": ({**IDS, "token_type_ids": torch.tensor([[0, 0, 0, 0], [0, 0, 2, 2]])}, ["token_type_ids", 2]),
    "misspelt": ({**IDS, "atention_mask": torch.ones(2, 4)}, ["atention_mask", "attention_mask"]),
    "misspelt-output": ({**IDS, "output_hiden_states": True}, ["output_hiden_states", "output_hidden_states"]),
    "fallen-positions": ({**IDS, "position_ids": torch.tensor([[2, 3, 4, 5], [2, 3, 4, 3]])}, ["position_ids", 3, 1]),
    "misspelt-cache": ({**IDS, "caches": 1}, ["caches", "cache"]),
    "misspelt-option": ({**IDS, "use_caches": False}, ["use_caches", "use_cache"]),
    "misspelt-head-input": ({**IDS, "logit_to_keep": 1}, ["logit_to_keep", "logits_to_keep"]),
    "unknown": ({**IDS, "nonsense": 1}, ["nonsense"]),
    "head-mask": ({**IDS, "head_mask": torch.ones(3, 4)}, ["head_mask"]),
    "cache": ({**IDS, "cache": DynamicCache()}, ["cache"]),
}


@pytest.mark.parametrize(("model_type", "case"), zip(itertools.cycle(FAMILIES), REFUSED, strict=False))
def test_wrong_inputs_are_refused_by_name(model_type, case):
    """By code that all families share."""
    inputs, named = REFUSED[case]
    for make in (tiny_model, tiny_causal_model):
        with refused(*named):
            make(model_type)(**inputs)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        slow_unless(kind == "base" or family == "luna", family, kind)
        for family in FAMILIES
        for kind in [*MODELS, "causal"]
    ],
)
@torch.no_grad()
def test_packed_texts_are_refused_where_they_would_mix_and_padded_ones_are_not(model_type, kind):
    """The default `DataCollatorWithFlattening` marks its texts only by positions; those of padding may have any."""
    model = tiny_causal_model(model_type) if kind == "causal" else tiny_model(model_type, kind)
    rows = [{"input_ids": row.tolist()} for row in random_ids(3, 4)]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    padded, ids = padded_batch([6, 3]), packed["input_ids"]
    if kind == "choice":
        ids, padded = ids.unsqueeze(1), {name: tensor.unsqueeze(1) for name, tensor in padded.items()}
    if kind not in ("base", "mlm", "token"):
        for name in ("position_ids", "seq_idx", "cu_seq_lens_q"):
            given = packed[name].unsqueeze(1) if (kind, name) == ("choice", "position_ids") else packed[name]
            with refused(name, "DataCollatorWithPadding"):
                model(ids, **{name: given})
    for side in ("right", "left"):
        inputs = padded if side == "right" else {name: tensor.flip(-1) for name, tensor in padded.items()}
        mask = inputs["attention_mask"]
        counted = mask.cumsum(-1) - 1 + (0 if kind == "causal" else 2)
        given, default = model(**inputs, position_ids=counted.masked_fill(mask == 0, 1))[0], model(**inputs)[0]
        kept = mask.bool() if given.shape[:2] == mask.shape else slice(None)
        torch.testing.assert_close(given[kept], default[kept], atol=1e-6, rtol=1e-5)


@families
@torch.no_grad()
def test_keywords_of_every_transformers_model_are_accepted(model_type):
    for model in (tiny_model(model_type, "mlm"), tiny_causal_model(model_type)):
        expected = model(**IDS)[0]
        for extra in ({"num_items_in_batch": 3}, {"is_causal": True}, {"use_cache": False}, {"nonsense": None}):
            assert torch.equal(model(**IDS, **extra)[0], expected)


@pytest.mark.parametrize(("model_type", "kind", "train"), covering(list(FAMILIES), MODELS, [False, True]))
def test_a_forward_changes_nothing(model_type, kind, train):
    """Parameters, buffers, configuration and later results stay the same; the kind of labels is recorded."""
    model = tiny_model(model_type, kind, norm_first=True, position_embedding_type="sinusoidal").train(train)
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    inputs = inputs_for(kind, labels=True)
    first = model(**inputs)[0]
    model(**inputs_for(kind, seed=7))
    assert torch.equal(model(**inputs)[0], first)
    config["problem_type"] = "single_label_classification" if kind == "sequence" else None
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@families
@torch.no_grad()
def test_units_of_fsdp_return_no_weights(model_type):
    """FSDP frees a unit's weights after its forward, before other modules could use what it returned."""
    for make in (tiny_model, tiny_causal_model, tiny_seq2seq_model):
        model = make(model_type)
        weights, units = {id(parameter) for parameter in model.parameters()}, set(model._no_split_modules)
        called = []

        def check(module, _, output, weights=weights, called=called):
            called.append(type(module).__name__)
            assert id(output) not in weights, called[-1]

        for module in model.modules():
            if type(module).__name__ in units:
                module.register_forward_hook(check)
        model(**IDS, **({"decoder_input_ids": IDS["input_ids"]} if model.config.is_encoder_decoder else {}))
        assert {"TokenEmbeddings", "TransformerLayer"} <= set(called)


# Every head, every pooling, and every variant with the masked-LM head, which uses all that an encoder has.
GRADIENTS = [
    (family, kind, "cls", "default") for family in FAMILIES for kind in MODELS if kind not in ("mlm", "sequence")
]
GRADIENTS += [(family, "sequence", pooling, "default") for family, pooling in FAMILY_POOLINGS]
GRADIENTS += [(family, "mlm", "cls", variant) for family, variant in FAMILY_VARIANTS]
GRADIENTS += [(family, "causal", "cls", variant) for family, variant in FAMILY_CAUSAL_VARIANTS]


@pytest.mark.parametrize(("model_type", "kind", "pooling", "variant"), GRADIENTS)
def test_every_parameter_gets_a_gradient(model_type, kind, pooling, variant):
    """Including those of a stream that the loss does not read, as distributed training requires."""
    if kind == "causal":
        model = tiny_causal_model(model_type, **causal_variants_of(model_type)[variant]).train()
        inputs = inputs_for("base", length=32)  # more tokens than slots, whose counts otherwise change nothing
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    else:
        model = tiny_model(model_type, kind, classifier_pooling=pooling, **variants_of(model_type)[variant]).train()
        inputs = inputs_for(kind, labels=True)
    outputs = model(**inputs)
    (outputs[0].sum() if kind == "base" else outputs.loss).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    unused = {name for name, p in model.named_parameters() if not p.grad.any()}
    assert all(unimportant(name, model) for name in unused), unused


def unimportant(name, model):
    """Whether a parameter has a zero gradient by construction."""
    return (
        # A constant added to all keys of a softmax, and segments that the batch does not contain.
        name.endswith(("key.bias", "token_type_embeddings.weight"))
        # A constant added to the scores of all choices or all places.
        or (name == "classifier.out_proj.bias" and "MultipleChoice" in type(model).__name__)
        or name == "qa_outputs.bias"
        or ROWS[model.config.model_type].unused(name, model.config)
    )


@families
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_items", [None, 11], ids=["mean", "num-items"])
def test_sparse_prediction_equals_the_dense_head(model_type, tie, num_items):
    inputs = inputs_for("mlm", batch=4, labels=True)
    results = []
    for sparse in (False, True):
        model = tiny_model(model_type, "mlm", sparse_prediction=sparse, tie_word_embeddings=tie).double().train()
        outputs = model(**inputs, num_items_in_batch=num_items)
        outputs.loss.backward()
        results.append((outputs, {n: p.grad for n, p in model.named_parameters()}))
        logits = model.eval()(**inputs).logits
        assert logits.shape == (4, 12, 120)  # evaluation computes all logits
    (dense, dense_gradients), (sparse, sparse_gradients) = results
    torch.testing.assert_close(sparse.loss, dense.loss, rtol=0, atol=1e-12)
    labelled = inputs["labels"] != -100
    torch.testing.assert_close(sparse.logits, dense.logits[labelled], rtol=0, atol=1e-12)
    for name, gradient in dense_gradients.items():
        torch.testing.assert_close(sparse_gradients[name], gradient, rtol=0, atol=1e-12, msg=lambda m, n=name: n + m)


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
            assert model.config.problem_type == problem  # as in every model of transformers
    with refused("(4,)", "(4, 3)"):
        tiny_model(model_type, "sequence", num_labels=3)(ids, labels=torch.randn(4))


@families
def test_initialisation(model_type):
    """normal(0, 0.02) for matrices, embeddings and convolutions, with a family's exceptions; zero biases and padding
    rows; norms 1."""
    torch.manual_seed(0)
    others = ROWS[model_type].deviation
    sizes = {"hidden_size": 128, "vocab_size": 500, "intermediate_size": 256, **slots_of(model_type, 64)}
    config = tiny_config_for(model_type, **sizes, conv_kernel_size=5)
    models = [model_class(model_type, kind)._from_config(config) for kind in MODELS]
    models.append(FAMILIES[model_type].causal_lm._from_config(config.as_decoder()))
    for model in models:
        for name, parameter in model.named_parameters():
            if name.lower().replace("_", "").endswith("layernorm.weight"):
                assert (parameter == 1).all(), name
            elif name.endswith("bias"):
                assert not parameter.any(), name
            else:
                # The standard error of a standard deviation is 1 / sqrt(2 N). Five of them, and 5 % for padding rows.
                error = 5 / (2 * parameter.numel()) ** 0.5 + 0.05
                deviation = next((others[end] for end in others if name.endswith(end)), 0.02)
                assert parameter.std().item() == pytest.approx(deviation, rel=error), name
                assert abs(parameter.mean().item()) < 5 * deviation / parameter.numel() ** 0.5, name
        embeddings = model.base_model.embeddings
        assert model.config.is_decoder or not embeddings.word_embeddings.weight[1].any()
        if isinstance(embeddings.position_embeddings, torch.nn.Embedding):
            assert not embeddings.position_embeddings.weight[1].any()


@families
def test_refused_inputs_may_be_none(model_type):
    """Generic wrappers pass unused inputs as `None`."""
    model, ids = tiny_model(model_type), random_ids(2, 4)
    assert torch.equal(model(ids, cache=None, encoder_hidden_states=None)[0], model(ids)[0])


@families
@pytest.mark.parametrize("make", [tiny_model, tiny_causal_model])
def test_dropout_only_in_training(model_type, make):
    ids = random_ids(2, 40)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"):
        model = make(model_type, **{name: 0.3})
        assert torch.equal(model(ids)[0], model(ids)[0])
        model.train()
        assert not torch.equal(model(ids)[0], model(ids)[0]), name


@pytest.mark.parametrize(("model_type", "variant"), FAMILY_KINDS)
@torch.no_grad()
def test_explicit_positions_segments_and_embeddings(model_type, variant):
    """Positions are rows of RoBERTa's table, if there is one, and by default count tokens from `pad_token_id + 1`."""
    model = tiny_model(model_type, "mlm", **{**variants_of(model_type)[variant], "type_vocab_size": 2})
    inputs = inputs_for("mlm")
    default, ids, mask = model(**inputs).logits, inputs["input_ids"], inputs["attention_mask"]
    counted = mask.cumsum(1) * mask + model.config.pad_token_id
    segments = torch.zeros_like(ids)
    for same in ({"position_ids": counted}, {"token_type_ids": segments}):
        assert torch.equal(model(**inputs, **same).logits, default)
    segments[:, 4:] = 1
    assert (model(**inputs, token_type_ids=segments).logits - default).abs().max() > 1e-3
    moved = (model(**inputs, position_ids=counted + 5 * mask).logits - default).abs().max().item()
    assert moved > 1e-3 if model.get_position_embeddings() else moved == 0
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, default)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("streams", [False, True])
def test_an_encoder_decoder_refuses_another_cache(model_type, streams):
    model = tiny_seq2seq_model(model_type, source_is_causal=streams)
    with refused("`cache` is a DynamicCache", "MemoryCache"):
        model(random_ids(2, 7), decoder_input_ids=random_ids(2, 3), cache=DynamicCache())


def test_a_subclass_keeps_its_loss_whatever_its_name():
    """Transformers chooses the loss by the name of the class."""

    class Reader(LunaForQuestionAnswering):
        pass

    class ScoreForSequenceClassification(LunaForCausalLM):
        pass

    ids, places = random_ids(2, 6), {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([2, 3])}
    own, causal = tiny_model(kind="span"), tiny_causal_model()
    for model, kind, labels in ((own, Reader, places), (causal, ScoreForSequenceClassification, {"labels": ids})):
        derived = kind(model.config).eval()
        derived.load_state_dict(model.state_dict())
        assert torch.equal(derived(ids, **labels).loss, model(ids, **labels).loss)
