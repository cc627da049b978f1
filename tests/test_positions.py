"""Other numbers of positions than a model was trained on: `resize_position_embeddings`, also while loading."""

import pytest
import torch
from helpers import TINY, model_class, padded_batch, random_ids, refused, tiny_causal_model, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from luna_hf import FAMILIES

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
def test_a_decoder_has_no_table(family, tmp_path):
    for positions in ("rotary", "sinusoidal"):
        model = tiny_causal_model(family, position_embedding_type=positions)
        expected = output(model, LONGER)
        model.save_pretrained(tmp_path)
        model.resize_position_embeddings(LONGER)
        for longer in (model, type(model).from_pretrained(tmp_path, max_position_embeddings=LONGER)):
            assert longer.config.max_position_embeddings == LONGER
            assert torch.equal(output(longer, LONGER), expected)
        trunk = AutoModel.from_pretrained(tmp_path, max_position_embeddings=LONGER)
        assert trunk.config.max_position_embeddings == LONGER


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
    with refused(tmp_path, "roberta", family, "from_roberta"):
        type(model).from_pretrained(tmp_path, config=model.config)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    loaded = type(model).from_pretrained(tmp_path, config=model.config)
    batch = padded_batch([12, 5])
    assert torch.equal(loaded(**batch)[0], model(**batch)[0])
