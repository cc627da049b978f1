"""Common mistakes end in one line that names them, before they reach PyTorch: wrong ids, shapes, labels and configs."""

import copy

import pytest
import torch
from helpers import (
    model_class,
    padded_batch,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
    tiny_seq2seq_model,
)
from transformers import RobertaConfig

from luna_hf import FAMILIES, MemoryCache

families = pytest.mark.parametrize("family", list(FAMILIES))
IDS, LEARNED = random_ids(2, 8), {"position_embedding_type": "learned", "type_vocab_size": 2}

# What is given in place of `IDS`, and what the message must name.
INPUTS = {
    "token beyond the vocabulary": ({"input_ids": IDS + 500}, "500", "resize_token_embeddings"),
    "ignored label as a token": ({"input_ids": IDS.clone().index_fill_(1, torch.tensor(3), -100)}, "-100", "Token ids"),
    "position beyond the table": ({"position_ids": torch.arange(200, 208)[None]}, "207", "Position ids"),
    "equal positions": ({"position_ids": torch.zeros(1, 8).long()}, "position_ids", "equal", "seq_idx"),
    "negative position": ({"position_ids": torch.arange(-3, 5)[None]}, "-3", "Position ids"),
    "segment beyond the table": ({"token_type_ids": torch.full((2, 8), 2)}, "token_type_ids", "type_vocab_size"),
    "longer positions": ({"position_ids": torch.arange(9)[None]}, "position_ids", (2, 8), (1, 9)),
    "positions of more rows": ({"position_ids": torch.arange(8).expand(3, 8)}, "position_ids", (2, 8), (3, 8)),
    "longer segments": ({"token_type_ids": torch.zeros(2, 9).long()}, "token_type_ids", (2, 8), (2, 9)),
    "floats": ({"input_ids": IDS.float()}, "integers", "float32"),
    "no batch": ({"input_ids": None, "inputs_embeds": torch.zeros(8, 48)}, "inputs_embeds", "48", (8, 48)),
    "another width": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 8, 40)}, "inputs_embeds", (2, 8, 40)),
    "no rows": ({"input_ids": IDS[:0]}, "no rows"),
}


@families
@pytest.mark.parametrize("case", INPUTS)
def test_an_encoder_refuses(family, case):
    given, *named = INPUTS[case]
    with refused(*named):
        tiny_model(family, **LEARNED)(**{"input_ids": IDS, **given})


@families
@pytest.mark.parametrize("case", ["token beyond the vocabulary", "longer positions", "another width", "no rows"])
def test_a_decoder_refuses(family, case):
    given, *named = INPUTS[case]
    with refused(*named):
        tiny_causal_model(family)(**{"input_ids": IDS, **given})
    if case == "token beyond the vocabulary":
        with refused("resize_token_embeddings"):
            tiny_seq2seq_model(family)(IDS, labels=IDS + 500)


# Head, fields, labels of two rows of 8 tokens, and what the message must name.
LABELS = {
    "no class": ("sequence", {}, [0, 5], "5", "num_labels"),
    "no token": ("mlm", {}, (IDS + 300).tolist(), "vocab_size"),
    "a float": ("sequence", {"problem_type": "single_label_classification"}, [0.0, 1.0], "float32"),
    "several classes as integers": ("sequence", {"num_labels": 3}, [[0, 1, 1], [1, 0, 0]], (2, 3), "floats"),
    "too few": ("token", {}, [[0] * 6] * 2, (2, 6), (2, 8)),
    "rows and columns exchanged": ("token", {}, [[0] * 2] * 8, (8, 2), (2, 8)),
}


@pytest.mark.parametrize("case", LABELS)
def test_a_loss_refuses_labels(case):
    kind, fields, labels, *named = LABELS[case]
    with refused(*named):
        tiny_model("luna", kind, **fields)(IDS, labels=torch.tensor(labels))


def test_labels_of_any_integer_type():
    model, labels = tiny_model("luna", "token"), torch.arange(16).view(2, 8) % 2
    expected = model(IDS, labels=labels).loss
    for dtype in (torch.int32, torch.uint8, torch.bool):
        assert torch.equal(model(IDS, labels=labels.to(dtype)).loss, expected)


def test_a_misspelt_problem_type():
    with refused("problem_type", "multi_class", "regression"):
        tiny_config_for("luna", problem_type="multi_class")
    model = tiny_model("luna", "sequence", num_labels=3)
    model.config.problem_type = "multi_class"
    with refused("problem_type", "multi_class", "regression"):
        model(IDS, labels=torch.rand(2, 3))


def test_multiple_choice_needs_choices():
    with refused("choices", (2, 8)):
        tiny_model("luna", "choice")(IDS)


@families
def test_a_model_refuses_the_config_of_another_architecture(family):
    other = next(name for name in FAMILIES if name != family)
    for config in (tiny_config_for(other), RobertaConfig()):
        for kind in ("base", "mlm"):
            with refused(type(config).__name__, FAMILIES[family].config.__name__):
                model_class(family, kind)(config)


@pytest.mark.parametrize("make", [lambda **fields: tiny_model(kind="mlm", **fields), tiny_causal_model])
def test_a_vocabulary_keeps_its_padding_token(make):
    model = make(pad_token_id=119)
    before = copy.deepcopy(model.state_dict())
    with refused("100", "pad_token_id", "119"):
        model.resize_token_embeddings(100)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.config.vocab_size == 120
    model.resize_token_embeddings(113, pad_to_multiple_of=8)  # to 120


@families
def test_texts_of_equal_weighted_sums_do_not_continue_each_other(family):
    """The state keeps a checksum of its text: 2 * 10 + 3 * 20 = 2 * 13 + 3 * 18."""
    model = tiny_causal_model(family)
    cache = MemoryCache(model.config)
    with torch.no_grad():
        model(torch.tensor([[0, 10, 20, 30]]), cache=cache)
    with refused("do not continue"):
        model.generate(torch.tensor([[0, 13, 18, 30, 9]]), cache=cache, max_new_tokens=2, do_sample=False)


@families
@torch.no_grad()
def test_a_default_device_changes_nothing(family):
    """PyTorch makes tensors there that are made without a device."""
    model, batch = tiny_model(family, unpad_inputs=True), padded_batch([8, 5])
    bounds = torch.tensor([0, 5, 8, 16])
    packed = {"input_ids": batch["input_ids"].view(1, -1), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    expected = [model(**batch)[0], model(**packed)[0]]
    with torch.device("meta"):
        found = [model(**batch)[0], model(**packed)[0]]
    assert all(map(torch.equal, found, expected))


@families
def test_gradients_of_torch_func(family):
    model = tiny_model(family, "sequence").double().eval()
    labels, parameters = torch.tensor([0, 1]), dict(model.named_parameters())
    ids = random_ids(2, 9)

    def loss(values):
        return torch.func.functional_call(model, values, (), {"input_ids": ids, "labels": labels}).loss

    found = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    for name, parameter in parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected)


@families
@pytest.mark.parametrize("make", [tiny_model, tiny_causal_model])
@torch.no_grad()
def test_an_ensemble_by_vmap(family, make):
    models = [make(family, seed=seed) for seed in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)

    def run(*state):
        options = {"use_cache": False} if make is tiny_causal_model else {}
        return torch.func.functional_call(models[0], state, (IDS,), options)[0]

    for model, found in zip(models, torch.func.vmap(run)(parameters, buffers), strict=True):
        torch.testing.assert_close(found, model(IDS)[0], atol=1e-5, rtol=1e-4)


@families
@torch.no_grad()
def test_a_decoder_whose_weights_are_loaded_on_demand(family):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_causal_model(family)
    expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(offloaded.generate(IDS, max_new_tokens=3, do_sample=False), expected)
