"""Other numbers of positions than a model was trained on: `resize_position_embeddings`, also while loading."""

import copy
import json
import math

import pytest
import torch
from helpers import (
    TINY,
    model_class,
    padded_batch,
    random_ids,
    refused,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
    tiny_seq2seq_model,
)
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from luna_hf import FAMILIES
from luna_hf.ops.positions import rotation, sinusoids

TRAINED = TINY["max_position_embeddings"]
LONGER, SHORTER = 2 * TRAINED + 5, TRAINED - 5

families = pytest.mark.parametrize("family", FAMILIES)
kinds = pytest.mark.parametrize("kind", ["base", "mlm"])
positions = pytest.mark.parametrize("positions", ["learned", "sinusoidal"])


@torch.no_grad()
def output(model, length):
    return model(random_ids(2, length))[0]


def table_of(model):
    """The rows of the position table, padding included."""
    table = model.get_position_embeddings()
    return table(torch.arange(model.config.max_position_embeddings + 2)).detach()


@families
@kinds
@positions
@pytest.mark.parametrize("length", [LONGER, SHORTER])
def test_resized_positions(family, kind, positions, length, tmp_path):
    """The rows are the trained ones, repeated; or sinusoids, which are those of a model made with this length."""
    model = tiny_model(family, kind, position_embedding_type=positions)
    before, expected = table_of(model), output(model, SHORTER)
    model.resize_position_embeddings(length)
    assert model.config.max_position_embeddings == model.base_model.config.max_position_embeddings == length
    after = table_of(model)
    if positions == "learned":
        assert torch.equal(after[:2], before[:2])
        assert all(torch.equal(after[2 + place], before[2 + place % TRAINED]) for place in range(length))
        assert model.get_position_embeddings().weight.requires_grad
        model.base_model(random_ids(2, length))[0].square().sum().backward()
        gradient = model.get_position_embeddings().weight.grad
        assert gradient[2:].any(-1).all() and not gradient[1].any()
    else:
        fresh = tiny_model(family, kind, position_embedding_type=positions, max_position_embeddings=length)
        assert torch.equal(after, table_of(fresh))
    assert torch.equal(output(model, SHORTER), expected)
    assert output(model, length).isfinite().all()
    with refused(length, length + 1):
        output(model, length + 1)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.max_position_embeddings == length
    assert torch.equal(output(loaded, length), output(model, length))


@families
@kinds
@positions
def test_another_number_of_positions_while_loading(family, kind, positions, tmp_path):
    expected = tiny_model(family, kind, position_embedding_type=positions)
    expected.save_pretrained(tmp_path)
    expected.resize_position_embeddings(LONGER)
    config = AutoConfig.from_pretrained(tmp_path, max_position_embeddings=LONGER)
    own, auto = model_class(family, kind), {"base": AutoModel, "mlm": AutoModelForMaskedLM}[kind]
    for load, keywords in [
        (own, {"max_position_embeddings": LONGER}),
        (own, {"config": config}),
        (auto, {"max_position_embeddings": LONGER, "dtype": torch.float32}),
    ]:
        loaded, info = load.from_pretrained(tmp_path, **keywords, output_loading_info=True)
        assert type(loaded) is own and not info["missing_keys"] and not info["mismatched_keys"]
        assert loaded.config.max_position_embeddings == config.max_position_embeddings == LONGER
        assert torch.equal(output(loaded, LONGER), output(expected, LONGER))


@families
def test_impossible_sizes_are_refused_and_change_nothing(family, tmp_path):
    model = tiny_model(family, position_embedding_type="learned")
    before = output(model, TRAINED)
    for length in (0, -3):
        with refused(TRAINED, length):
            model.resize_position_embeddings(length)
    model.save_pretrained(tmp_path)
    offloaded = type(model).from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    with refused("offloaded"):
        offloaded.resize_position_embeddings(LONGER)
    for unchanged in (model, offloaded):
        assert unchanged.config.max_position_embeddings == TRAINED
        assert torch.equal(output(unchanged, TRAINED), before)


def test_a_control_with_weights_for_every_position_keeps_its_length(tmp_path):
    for model in (make("abc_memory", memory_control="linformer") for make in (tiny_model, tiny_causal_model)):
        model.resize_position_embeddings(TRAINED)
        with refused(TRAINED, LONGER, "linformer"):
            model.resize_position_embeddings(LONGER)
        assert output(model, TRAINED).isfinite().all() and model.config.max_position_embeddings == TRAINED
    model = tiny_model("abc_memory", "mlm", memory_control="linformer")
    model.save_pretrained(tmp_path)
    with refused(TRAINED, LONGER, "linformer"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, max_position_embeddings=LONGER)


@families
def test_foreign_weights_with_a_config_of_ours_are_refused(family, tmp_path):
    """A folder without a config holds weights of any origin, which transformers reports."""
    model = tiny_model(family)
    AutoConfig.for_model("roberta").save_pretrained(tmp_path)
    with refused(tmp_path, "roberta", family, "from_pretrained_encoder"):
        type(model).from_pretrained(tmp_path, config=model.config)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    loaded = type(model).from_pretrained(tmp_path, config=model.config)
    batch = padded_batch([12, 5])
    assert torch.equal(loaded(**batch)[0], model(**batch)[0])


# ---- positions that repeat ----

PERIOD = 7


def repeating_model(family, **fields):
    fields = {"position_embedding_type": "learned", "max_position_embeddings": 64, **fields}
    return tiny_model(family, "base", position_period=PERIOD, **fields)


def period_rows(length):
    """The literal rule: row 0 for the first token, then rows 1 to PERIOD - 1 in turn."""
    rows, row = [], 0
    for _ in range(length):
        rows.append(row)
        row = 1 if row == PERIOD - 1 else row + 1
    return rows


@families
@torch.no_grad()
def test_repeating_positions_are_those_of_a_long_table(family, tmp_path):
    model = repeating_model(family).eval()
    table = model.get_position_embeddings().weight
    assert len(table) == PERIOD + 2
    config = copy.deepcopy(model.config)
    config.position_period = None
    full = type(model)(config).eval()
    rows = torch.cat([table[:2], table[2:][period_rows(64)]])
    weights = model.state_dict() | {"embeddings.position_embeddings.weight": rows}
    full.load_state_dict(weights)
    ids = random_ids(2, 50)
    assert torch.equal(model(ids)[0], full(ids)[0])
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids)[0], full(ids)[0])
    loaded.resize_position_embeddings(200)
    assert len(loaded.get_position_embeddings().weight) == PERIOD + 2
    assert torch.equal(loaded(ids)[0], full(ids)[0]) and loaded(random_ids(1, 200))[0].isfinite().all()
    with refused("64", "65"):
        model(random_ids(1, 65))


@families
@torch.no_grad()
def test_repeating_positions_ignore_padding_and_neighbours(family):
    model = repeating_model(family).eval()
    batch = padded_batch([40, 25, 3])
    out = model(**batch)[0]
    for row, keep in enumerate(batch["attention_mask"].bool()):
        alone = model(batch["input_ids"][row : row + 1, keep])[0]
        torch.testing.assert_close(out[row, keep], alone[0], atol=1e-5, rtol=1e-5)


def test_a_period_needs_learned_positions_and_an_encoder():
    for fields in ({"position_embedding_type": "sinusoidal"}, {"is_encoder_decoder": True}):
        with refused("position_period"):
            FAMILIES["luna"].config(**TINY, position_period=5, **fields)
    with refused("position_period"):
        FAMILIES["luna"].config(**TINY, position_period=1)


# ---- padding ids ----


@families
@torch.no_grad()
def test_a_large_padding_id_adds_no_positions(family):
    model = tiny_model(family, vocab_size=3000, pad_token_id=2983, position_embedding_type="learned")
    assert len(model.get_position_embeddings().weight) == TRAINED + 2
    batch = padded_batch([TRAINED, 5], pad_token_id=2983)
    for inputs in (batch, {"input_ids": batch["input_ids"]}):
        states = model(**inputs, unpad_inputs=False)[0]
        torch.testing.assert_close(states[1, :5], model(batch["input_ids"][1:, :5])[0][0], atol=1e-5, rtol=1e-5)
    with refused(TRAINED, TRAINED + 1):
        model(random_ids(1, TRAINED + 1))


@pytest.mark.parametrize("make", [tiny_model, tiny_seq2seq_model])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_folders_of_earlier_versions_keep_their_positions(make, positions, tmp_path):
    """They have no `first_position`: theirs is behind the row of padding."""
    model = make("luna", pad_token_id=7, first_position=8, position_embedding_type=positions)
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values.pop("first_position") == 8
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded, ids = type(model).from_pretrained(tmp_path), {"input_ids": random_ids(2, 9)}
    ids |= {"decoder_input_ids": random_ids(2, 4, seed=1)} if make is tiny_seq2seq_model else {}
    assert loaded.config.first_position == 8 and torch.equal(loaded(**ids)[0], model(**ids)[0])
    with pytest.raises(ValueError, match=r"start at 1\. Count them from 0, or from 8"):
        model(**ids, position_ids=torch.arange(1, 10)[None])
    assert [make("luna", pad_token_id=pad).config.first_position for pad in (0, 1, 7)] == [1, 2, 2]


@families
@pytest.mark.parametrize("role", ["eos_token_id", "bos_token_id", "decoder_start_token_id", None])
def test_a_token_that_also_pads_learns_where_it_is_read(family, role):
    """It starts as other tokens do; as padding it has no gradient."""
    special = {role: [2, 9] if role == "eos_token_id" else 9} if role else {}
    config, own = tiny_config_for(family, pad_token_id=9, **special), FAMILIES[family]
    for make in (own.base_model, own.causal_model, own.seq2seq_model):
        model = make(config.as_decoder() if make is own.causal_model else config)
        base = model.get_decoder() if make is own.seq2seq_model else model
        weight = base.get_input_embeddings().weight
        assert weight[9].any().item() is (role is not None)
        for mask, learns in (([1, 1, 1, 1], role is not None), ([1, 1, 1, 0], False)):
            inputs = {"input_ids": torch.tensor([[5, 6, 7, 9]]), "attention_mask": torch.tensor([mask])}
            if base is not model:
                inputs |= {f"decoder_{name}": tensor for name, tensor in inputs.items()}
            model.zero_grad()
            states = model(**inputs)[0][inputs["attention_mask"] == 1]
            (states * torch.randn_like(states)).sum().backward()
            assert weight.grad[9].any().item() is learns


# ---- angles ----

FAR = [0, 5, 1_000_000, 10_000_000, 2**31]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_are_exact_at_far_positions(dtype):
    places, exact = torch.tensor([FAR]), 1e-6 if dtype == torch.float32 else 1e-12
    cos, sin = rotation(places, 8, dtype)[0].unbind(-2)
    waves = sinusoids(places, 8)[0]
    for row, place in enumerate(FAR):
        for i in range(4):
            angle, wave = place * 10000.0 ** (-i / 4), place * 10000.0 ** (-i / 3)
            assert abs(cos[row, i] - math.cos(angle)) < exact and abs(sin[row, i] - math.sin(angle)) < exact
            assert abs(waves[row, i] - math.sin(wave)) < 1e-6 and abs(waves[row, 4 + i] - math.cos(wave)) < 1e-6


@pytest.mark.parametrize(
    ("family", "fields"), [("luna", {}), ("abc_memory", {"local_window": 4}), ("lavo", {}), ("leapformer", {})]
)
@torch.no_grad()
def test_rotary_positions_are_relative_however_far(family, fields):
    model, ids = tiny_causal_model(family, position_embedding_type="rotary", **fields), random_ids(1, 30)
    near, far = (model(ids, position_ids=first + torch.arange(30)[None]).logits for first in (0, 10_000_000))
    torch.testing.assert_close(far, near, atol=1e-4, rtol=1e-4)
