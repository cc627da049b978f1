"""Encoders of any kind: loading reports missing weights, and longer positions change nothing else."""

import json

import pytest
import torch
from common import models
from common.models import (
    extend_positions,
    load_config,
    load_encoder,
    load_tokenizer,
    longest_input,
    make_config,
    model_fields,
)
from engine.throughput import training_flops
from helpers import FAMILIES, random_ids, randomise, slots_of, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from luna_hf.scripting import UserError

LENGTH = 24
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Fields beyond the sizes with which a model takes LENGTH tokens and leaves nothing out at random.
POSITIONS = {"max_position_embeddings": LENGTH, "position_embedding_type": "learned"}
OWN = {family: {**slots_of(family), **POSITIONS, **NO_DROPOUT} for family in FAMILIES}
FIELDS = {
    **OWN,
    "luna-sinusoidal": {**OWN["luna"], "model_type": "luna", "position_embedding_type": "sinusoidal"},
    "roberta": {"max_position_embeddings": LENGTH + 2, **NO_DROPOUT},
    "bert": {"max_position_embeddings": LENGTH, **NO_DROPOUT},
    "modernbert": {"max_position_embeddings": LENGTH},
}
LEARNED = [*FAMILIES, "roberta", "bert"]


def new_model(name, seed=0, **fields):
    """A tiny masked-LM model in eval mode, every parameter random."""
    torch.manual_seed(seed)
    config = make_config({"model_type": name, **SIZES, **FIELDS[name], **fields}, None, 120)
    model = AutoModelForMaskedLM.from_config(config).eval()
    randomise(model)
    return model


@pytest.fixture(scope="module", params=FIELDS)
def saved(request, tmp_path_factory):
    """(name, folder, model) of every kind."""
    folder = tmp_path_factory.mktemp("saved") / request.param
    model = new_model(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model


def save(folder, name="luna"):
    new_model(name).save_pretrained(folder)
    return folder


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def logits(model, length, seed=1):
    with torch.no_grad():
        return model(input_ids=random_ids(2, length, seed=seed)).logits


def position_table(model):
    return model.base_model.embeddings.position_embeddings.weight.detach()


# ---- loading ----


def test_a_checkpoint_loads_unchanged_and_without_notes(saved):
    _, folder, model = saved
    loaded, notes = load_encoder(AutoModelForMaskedLM, str(folder))
    assert notes == []
    torch.testing.assert_close(logits(loaded.eval(), 10), logits(model, 10), rtol=0, atol=0)


def test_a_new_head_and_an_unused_one_are_named(saved):
    name, folder, model = saved
    loaded, notes = load_encoder(AutoModelForSequenceClassification, str(folder), num_labels=3)
    assert loaded.config.num_labels == 3
    new, unused = notes
    assert "classifier" in new
    assert {"bert": "cls.predictions", "modernbert": "decoder.bias"}.get(name, "lm_head") in unused
    # The body is that of the checkpoint.
    for key, parameter in loaded.base_model.named_parameters():
        if "pooler" not in key:
            assert torch.equal(parameter, model.base_model.get_parameter(key)), key


def test_a_checkpoint_of_the_body_alone_gets_a_head(saved, tmp_path):
    model = saved[2]
    model.base_model.save_pretrained(tmp_path)
    loaded, notes = load_encoder(AutoModelForMaskedLM, str(tmp_path))
    assert (len(notes) == 1 and "head" in notes[0]) or "cls.predictions" in notes[0] or "decoder" in notes[0]
    for key, parameter in loaded.base_model.named_parameters():
        assert torch.equal(parameter, model.base_model.get_parameter(key)), key


def test_missing_weights_of_the_body_are_an_error_that_names_them(saved, tmp_path):
    name, _, model = saved
    model.save_pretrained(tmp_path)
    body = [key for key in load_file(tmp_path / "model.safetensors") if key.startswith(model.base_model_prefix + ".")]
    lost = [key for key in body if "layers.1." in key or "layer.1." in key][:2]
    change_weights(tmp_path, lambda weights: {key: tensor for key, tensor in weights.items() if key not in lost})
    with pytest.raises(UserError, match="2 weights") as error:
        load_encoder(AutoModelForMaskedLM, str(tmp_path))
    assert len(lost) == 2 and all(key in str(error.value) for key in lost), name


def test_weights_of_another_shape_are_an_error_that_names_them(tmp_path):
    config = json.loads((save(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"projection_length": 4}))
    with pytest.raises(UserError, match=r"luna\.\S*packed"):
        load_encoder(AutoModelForMaskedLM, str(tmp_path))


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_weights_are_an_error(tmp_path, damage):
    file = save(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=str(tmp_path)):
        load_encoder(AutoModelForMaskedLM, str(tmp_path))


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_model_that_is_no_encoder_is_refused(tmp_path, kind):
    if kind == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    else:
        T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=8, num_layers=1, d_ff=8)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{kind} checkpoint"):
        load_encoder(AutoModelForMaskedLM, str(tmp_path))


def test_folders_and_names_that_are_no_checkpoint(tmp_path):
    for content in (None, "{", '{"model_type": "unheard-of"}'):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=str(tmp_path)):
            load_config(str(tmp_path))
    with pytest.raises(UserError, match="nobody/nothing"):
        load_config("nobody/nothing")


@pytest.mark.parametrize("name", ["./nope", "../nope", "nope/", "/nope/x", "not/a/hub/name"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", None)
    with pytest.raises(UserError, match=f"folder '{name}'"):
        load_config(name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value, tmp_path):
    model = new_model("luna")
    name, weight = list(model.named_parameters())[3]
    weight.data.view(-1)[-1] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=name):
        load_encoder(AutoModelForMaskedLM, str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hiden_dropout_prob": 0.2}, "`hiden_dropout_prob`.*`hidden_dropout_prob`"),
        ({"hidden_dropout_prob": 2.0}, r"`hidden_dropout_prob` is 2\.0"),
        ({"hidden_dropout_prob": "abc"}, "hidden_dropout_prob='abc'"),
        ({"classifier_pooling": "median"}, "'median'.*packed_max"),
    ],
)
def test_overrides_of_the_config_are_checked(tmp_path, fields, named):
    with pytest.raises(UserError, match=named):
        load_encoder(AutoModelForMaskedLM, str(save(tmp_path)), **fields)


def test_overrides_of_the_config_are_set_and_weights_become_float32(tmp_path):
    new_model("luna").to(torch.bfloat16).save_pretrained(tmp_path)
    model, _ = load_encoder(AutoModelForMaskedLM, str(tmp_path), hidden_dropout_prob=0.2)
    assert model.config.hidden_dropout_prob == 0.2 and model.dtype == torch.float32


# ---- positions ----


def test_longest_input_is_what_the_model_takes(saved):
    name, _, model = saved
    assert longest_input(model.config) == LENGTH
    assert logits(model, LENGTH).isfinite().all()
    if name != "modernbert":  # rotary positions have no end
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            logits(model, LENGTH + 1)


@pytest.mark.parametrize("model_type", ["camembert", "mpnet", "roberta-prelayernorm", "xlm-roberta", "electra"])
def test_longest_input_where_the_config_counts_the_rows_before_the_first_position(model_type):
    fields = {name: value for name, value in SIZES.items() if name in model_fields(model_type)}
    config = make_config({"model_type": model_type, **fields, "max_position_embeddings": 20}, None, 120)
    model = AutoModelForMaskedLM.from_config(config).eval()
    assert longest_input(config) == (20 if model_type == "electra" else 18)
    for length in (longest_input(config), 37):
        extend_positions(model, length)
        assert longest_input(model.config) == length and logits(model, length).isfinite().all()
        with pytest.raises((IndexError, RuntimeError)):
            logits(model, length + 1)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("length", [LENGTH + 1, 2 * LENGTH + 5])
def test_learned_positions_are_repeated_row_by_row(name, length):
    model = new_model(name)
    before = position_table(model).clone()
    note = extend_positions(model, length)
    assert f"from {LENGTH} to {length} tokens" in note
    after = position_table(model)
    first = 0 if name == "bert" else 2  # rows up to the pad's own belong to no position
    assert after.shape[0] == first + length
    assert torch.equal(after[:first], before[:first])
    for position in range(length):
        assert torch.equal(after[first + position], before[first + position % LENGTH]), position
    assert model.base_model.embeddings.position_embeddings.weight.requires_grad


def test_extension_changes_nothing_for_what_fitted_before(saved):
    name = saved[0]
    model = new_model(name)
    before = logits(model, LENGTH)
    note = extend_positions(model, 3 * LENGTH)
    assert str(3 * LENGTH) in note and longest_input(model.config) == 3 * LENGTH
    if name == "luna-sinusoidal":
        longer = new_model(name, max_position_embeddings=3 * LENGTH)
        longer.load_state_dict(model.state_dict())
        assert torch.equal(logits(model, 3 * LENGTH), logits(longer, 3 * LENGTH))
    assert torch.equal(logits(model, LENGTH), before)
    assert logits(model, 3 * LENGTH).isfinite().all()
    if name != "modernbert":
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            logits(model, 3 * LENGTH + 1)


def test_an_extended_model_is_saved_and_loaded_with_its_length(saved, tmp_path):
    model = new_model(saved[0])
    extend_positions(model, 50)
    model.save_pretrained(tmp_path)
    loaded, notes = load_encoder(AutoModelForMaskedLM, str(tmp_path), 50)
    assert notes == [] and longest_input(loaded.config) == 50
    assert len(load_encoder(AutoModelForMaskedLM, str(tmp_path), 51)[1]) == 1
    torch.testing.assert_close(logits(loaded.eval(), 50), logits(model, 50), rtol=0, atol=0)


def test_extended_positions_learn():
    model = new_model("roberta").train()
    extend_positions(model, 2 * LENGTH)
    ids = random_ids(2, 2 * LENGTH)
    model(input_ids=ids, labels=ids).loss.backward()
    gradient = model.base_model.embeddings.position_embeddings.weight.grad
    assert (gradient[2:].abs().sum(-1) > 0).all() and gradient[1].abs().sum() == 0


def test_a_model_without_positions_takes_any_length():
    model = new_model("lavo", position_embedding_type="none")
    expected = logits(model, 2 * LENGTH)
    assert "none to extend" in extend_positions(model, 2 * LENGTH)
    assert longest_input(model.config) == 2 * LENGTH and torch.equal(logits(model, 2 * LENGTH), expected)


def test_positions_that_cannot_be_found_are_not_guessed():
    fields = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 12}
    model = AutoModelForMaskedLM.from_config(make_config({"model_type": "xlm", **fields}, None, 120))
    with pytest.raises(UserError, match="xlm"):
        extend_positions(model, 13)
    with pytest.raises(UserError, match="funnel"):
        longest_input(make_config({"model_type": "funnel"}, None, 120))


def test_a_control_with_weights_for_every_position_is_not_extended():
    fields = {**SIZES, **FIELDS["abc_memory"], "memory_control": "linformer"}
    model = AutoModelForMaskedLM.from_config(make_config({"model_type": "abc_memory", **fields}, None, 120))
    assert extend_positions(model, LENGTH) is None
    with pytest.raises(UserError, match=rf"linformer.*--max-length {LENGTH + 1}`"):
        extend_positions(model, LENGTH + 1)
    assert longest_input(model.config) == LENGTH


# ---- new models ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lunar"}, "'lunar'"),
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"model_type": "luna", "hiden_size": 8}, "`hiden_size`.*`hidden_size`"),
        ({"model_type": "roberta", "projection_length": 8}, "roberta .*`projection_length`"),
        ({"model_type": "luna", "vocab_size": 8}, r"`model\.vocab_size`"),
        ({"model_type": "luna", "hidden_size": 10, "num_attention_heads": 3}, "num_attention_heads"),
        ({"model_type": "luna", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "luna", "hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
    ],
)
def test_mistakes_of_a_model_section(fields, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        make_config(fields, None, 120)


def test_special_tokens_follow_from_the_tokenizer():
    tokenizer = tiny_tokenizer()
    for model_type in ("luna", "roberta", "modernbert"):
        config = make_config({"model_type": model_type, **SIZES}, tokenizer, len(tokenizer))
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 0, 2)
        assert config.vocab_size == len(tokenizer)
    assert make_config({"model_type": "luna"}, None, 120).sparse_prediction
    assert not make_config({"model_type": "luna", "sparse_prediction": False}, None, 120).sparse_prediction


# ---- tokenizers ----


def test_tokenizers_that_are_missing_broken_or_of_another_model(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(str(tmp_path / "good")).get_vocab() == tokenizer.get_vocab()
    fitting = make_config({"model_type": "luna", **SIZES}, tokenizer, len(tokenizer))
    assert len(load_tokenizer(str(tmp_path / "good"), fitting)) == len(tokenizer)

    (tmp_path / "empty").mkdir()
    for missing in (str(tmp_path / "empty"), "nobody/nothing"):
        with pytest.raises(UserError, match=missing):
            load_tokenizer(missing)
    (tmp_path / "good" / "broken").mkdir()
    whole = (tmp_path / "good" / "tokenizer.json").read_text()
    for content in ("", "{", whole[: len(whole) // 2]):
        (tmp_path / "good" / "broken" / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"broken \(tokenizer\.json\) cannot be read"):
            load_tokenizer(str(tmp_path / "good" / "broken"))

    unpadded = tiny_tokenizer()
    unpadded.pad_token = None
    unpadded.save_pretrained(tmp_path / "unpadded")
    with pytest.raises(UserError, match="unpadded"):
        load_tokenizer(str(tmp_path / "unpadded"))
    small = make_config({"model_type": "luna", **SIZES}, tokenizer, 120)
    with pytest.raises(UserError, match=f"{len(tokenizer)} .*120"):
        load_tokenizer(str(tmp_path / "good"), small)
    other = make_config({"model_type": "luna", **SIZES}, tokenizer, len(tokenizer))
    other.pad_token_id = 0
    with pytest.raises(UserError, match=r"token 1\b.*token\s+0\b"):
        load_tokenizer(str(tmp_path / "good"), other)


# ---- operations ----

ROW, LABELLED, VOCABULARY = 40, 6, 120


def labelled_row():
    ids = random_ids(1, ROW)
    labels = torch.full_like(ids, -100)
    labels[0, 3 : 3 + LABELLED] = ids[0, 3 : 3 + LABELLED]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def multiplications(model_type, tie_kv=False, sparse=True):
    """Of the forward pass of a row, counted by hand from the layers' shapes."""
    width, inner, layers, slots = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_hidden_layers"], 8
    square = width * width
    if model_type == "roberta":
        attention = 3 * ROW * square + 2 * ROW * ROW * width  # query, key, value; scores and their sum over values
    else:
        context = 1 if tie_kv else 2
        pack = slots * square + context * ROW * square + 2 * slots * ROW * width
        unpack = ROW * square + context * slots * square + 2 * ROW * slots * width
        attention = pack + unpack
    layer = attention + ROW * square + 2 * ROW * width * inner
    predicted = LABELLED if model_type == "luna" and sparse else ROW
    return layers * layer + predicted * (square + width * VOCABULARY)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [("roberta", {}), ("luna", {}), ("luna", {"tie_kv": True}), ("luna", {"sparse": False})],
    ids=["roberta", "luna", "luna-tied", "luna-dense-head"],
)
def test_operations_are_those_of_a_count_by_hand(model_type, options, attention):
    own = {"projection_length": 8, "tie_kv": False, "sparse_prediction": options.get("sparse", True)}
    own["tie_kv"] = options.get("tie_kv", False)
    fields = {"model_type": model_type, **SIZES, "max_position_embeddings": 64, **(own if model_type == "luna" else {})}
    model = AutoModelForMaskedLM.from_config(make_config(fields, None, VOCABULARY), attn_implementation=attention)
    # Two operations a multiplication (with its addition); a backward pass is two forward passes.
    expected = 3 * 2 * multiplications(model_type, **options) / ROW
    assert training_flops(model, labelled_row()) == pytest.approx(expected, rel=0.01)


def test_counting_leaves_the_model_and_the_random_state_as_they_were():
    model = new_model("luna")
    batch = labelled_row() | {"input_ids": random_ids(1, LENGTH), "labels": random_ids(1, LENGTH)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model.config.hidden_dropout_prob = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5  # so that counting draws numbers
    for training in (True, False):
        model.train(training)
        torch.manual_seed(7)
        first = torch.rand(3)
        torch.manual_seed(7)
        training_flops(model, batch)
        assert torch.equal(torch.rand(3), first)
        assert model.training is training
        assert all(parameter.grad is None for parameter in model.parameters())
