"""Warm start: every weight of the source is kept, and rules make the rest.

That full attention computes what the source computes is the subject of `test_warm_start_sources.py`.
"""

import json
import re

import pytest
import torch
from helpers import padded_batch, randomise, refused, tiny_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from luna_hf import AbcForMaskedLM, LunaForMaskedLM
from luna_hf.families.luna.warm_start import LunaRules
from luna_hf.families.warm_start_rules import CONVOLUTION
from luna_hf.warm_start import WarmStart, warm_start
from luna_hf.warm_start.source import layouts

KINDS = ["roberta", "xlm-roberta", "camembert", "data2vec-text", "bert"]
HEADS = {
    "mlm": AutoModelForMaskedLM,
    "base": AutoModel,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
CONTROLS = ["mlp", "linformer", "random", "cluster", "sliding_window", "dilated", "local_to_global", "compressive"]
SMALL = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def make_source(kind="roberta", head="mlm", dtype=torch.float32, **fields):
    torch.manual_seed(7)
    model = HEADS[head].from_config(AutoConfig.for_model(kind, **{**SMALL, **fields})).eval()
    randomise(model)
    return model.to(dtype)


def body(model):
    """Parameters of an encoder by the names that all model types share."""
    return dict(model.base_model.named_parameters())


def longest(model):
    layout = layouts()[model.config.model_type]
    return model.config.max_position_embeddings - (model.config.pad_token_id + 1) * layout.counts_pad_rows


def batch_for(model, lengths=(12, 7, 3)):
    batch = padded_batch(list(lengths), pad_token_id=model.config.pad_token_id)
    batch["input_ids"][batch["input_ids"] == model.config.pad_token_id] = 9  # the first token of BERT's rows
    batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
    segments = torch.randint(0, 2, batch["input_ids"].shape, generator=torch.Generator().manual_seed(3))
    return {**batch, "token_type_ids": segments}


@torch.no_grad()
def states(model, batch):
    return model.base_model(**batch).last_hidden_state[batch["attention_mask"].bool()]


@torch.no_grad()
def logits(model, batch):
    return model(**batch).logits[batch["attention_mask"].bool()]


# ---- sources ----


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_untied_sources(kind, tmp_path):
    source = make_source(kind, tie_word_embeddings=False)
    assert not torch.equal(*(source.get_input_embeddings().weight, source.get_output_embeddings().weight))
    model, made = warm_start(AbcForMaskedLM, source, memory_control="full")
    batch = batch_for(source)
    torch.testing.assert_close(logits(model, batch), logits(source, batch), rtol=0, atol=1e-5)
    assert model.config.tie_word_embeddings is False and "lm_head.decoder.weight" in made.copied
    # The output layer computes with its own bias, so the head's is unused.
    assert list(made.unused) == ["lm_head.bias" if kind == "roberta" else "cls.predictions.bias"]


@pytest.mark.parametrize("variant", [{}, {"conv_kernel_size": 3}, {"norm_first": True}, {"memory_control": "mlp"}])
def test_an_abc_model_is_a_source(variant):
    source = tiny_model("abc_memory", "mlm", **{"memory_control": "full", **variant})
    model, made = warm_start(AbcForMaskedLM, source)
    batch = padded_batch([12, 7])
    assert torch.equal(logits(model, batch), logits(source, batch))
    assert not made.new and not made.unused
    other, made = warm_start(AbcForMaskedLM, source, memory_control="linformer", memory_size=8, conv_kernel_size=5)
    convolutions = {name for name in dict(source.named_parameters()) if "convolution" in name or "control" in name}
    assert set(made.unused) == convolutions
    assert all("convolution" in name or "control" in name for name in made.new)
    assert other.config.norm_first == source.config.norm_first


# ---- other controls: the same weights ----


@pytest.mark.parametrize(
    ("kind", "control"), [*(("roberta", control) for control in CONTROLS), *((kind, "mlp") for kind in KINDS[1:])]
)
def test_every_weight_is_the_sources_and_only_the_control_is_new(kind, control):
    source = make_source(kind)
    model, made = warm_start(AbcForMaskedLM, source, memory_control=control, memory_size=8, conv_kernel_size=3)
    parameters = dict(model.named_parameters())
    for name, expected in body(source).items():
        if name == "embeddings.position_embeddings.weight" and kind == "bert":
            zeros = model.config.pad_token_id + 1
            assert not parameters[f"abc.{name}"][:zeros].any()
            assert torch.equal(parameters[f"abc.{name}"][zeros:], expected)
        else:
            assert torch.equal(parameters[f"abc.{name}"], expected), name
    source_state = source.state_dict(keep_vars=True)
    for name in (name for name in made.copied if name.startswith("lm_head.")):
        assert torch.equal(model.get_parameter(name), source_state[made.copied[name]]), name
    new = {"abc.control.weight"} if control in ("mlp", "linformer") else set()
    convolutions = {f"abc.encoder.layer.{layer}.attention.convolution.weight" for layer in range(3)}
    assert set(made.new) == new | convolutions
    assert all(made.new[name] == "zero" and not parameters[name].any() for name in convolutions)


@pytest.mark.parametrize("model_class", [AbcForMaskedLM, LunaForMaskedLM])
def test_the_convolution_changes_nothing_at_first_and_learns(model_class):
    source = make_source()
    plain, _ = warm_start(model_class, source)
    convolved, _ = warm_start(model_class, source, conv_kernel_size=5)
    batch = batch_for(source)
    assert torch.equal(logits(plain, batch), logits(convolved, batch))
    shared = dict(convolved.named_parameters())
    assert all(torch.equal(parameter, shared[name]) for name, parameter in plain.named_parameters())
    convolved(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(parameter.grad.any() for name, parameter in convolved.named_parameters() if "convolution" in name)


@pytest.mark.parametrize("fields", [{}, {"memory_control": "linformer"}, {"share_control": False}])
def test_a_control_depends_on_the_seed_alone(fields):
    source = make_source()
    fields = {"control_init": "random", "memory_size": 8, **fields}
    made = []
    for state, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(state)
        model, _ = warm_start(AbcForMaskedLM, source, seed=seed, **fields)
        made.append([parameter for name, parameter in model.named_parameters() if "control" in name])
    for first, second, other in zip(*made, strict=True):
        assert torch.equal(first, second) and not torch.equal(first, other)
    if "share_control" in fields:
        assert len(made[0]) == 3 and not torch.equal(made[0][0], made[0][1])
    # As large as in a new model.
    expected = longest(source) ** -0.5 if fields.get("memory_control") == "linformer" else 0.02
    assert made[0][0].std().item() == pytest.approx(expected, rel=0.1)


def test_global_random_states_are_not_affected(tmp_path):
    make_source(head="base").save_pretrained(tmp_path)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    warm_start(LunaForMaskedLM, tmp_path, projection_length=4)
    warm_start(AbcForMaskedLM, tmp_path, control_init="random")
    assert torch.equal(torch.rand(3), expected)


# ---- positions ----


@pytest.mark.parametrize(
    ("kind", "model_class", "prefix"),
    [*((kind, AbcForMaskedLM, "abc") for kind in KINDS), ("roberta", LunaForMaskedLM, "luna")],
)
def test_longer_positions(kind, model_class, prefix):
    source = make_source(kind)
    trained, name = longest(source), "embeddings.position_embeddings.weight"
    model, made = warm_start(model_class, source, max_length=100)
    table, old = model.base_model.get_parameter(name), body(source)[name]
    front, first = model.config.pad_token_id + 1, len(old) - trained
    assert table.shape == (100 + front, 48) and model.config.max_position_embeddings == 100
    for position in range(100):
        assert torch.equal(table[front + position], old[first + position % trained])
    assert list(made.extended) == [f"{prefix}.{name}"] and f"repeated to {100}" in made.extended[f"{prefix}.{name}"]
    assert model(torch.full((1, 100), 9)).logits.isfinite().all()
    with refused(100, 101):
        model(torch.full((1, 101), 9))


# ---- Luna, rule by rule ----


@pytest.fixture(scope="module")
def luna():
    source = make_source()
    model, made = warm_start(LunaForMaskedLM, source, projection_length=8, conv_kernel_size=3)
    return source, model, made


def layers(luna):
    source, model, _ = luna
    pairs = zip(source.roberta.encoder.layer, model.luna.encoder.layer, strict=True)
    return [(old.attention, new.attention) for old, new in pairs]


def test_luna_reads_with_the_sources_weights(luna):
    for old, new in layers(luna):
        for kind in ("weight", "bias"):
            for part in ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"):
                assert torch.equal(new.get_parameter(f"{part}.{kind}"), old.get_parameter(f"{part}.{kind}")), part
            for part in ("query", "key"):
                packed = new.self.pack.get_parameter(f"{part}.{kind}")
                assert torch.equal(packed, old.self.get_parameter(f"{part}.{kind}"))
            norm = new.self.get_parameter(f"packed_layer_norm.{kind}")
            assert torch.equal(norm, old.output.get_parameter(f"LayerNorm.{kind}"))
        assert torch.equal(new.self.pack.value.weight, torch.eye(48)) and not new.self.pack.value.bias.any()
    source, model, _ = luna
    norms = model.luna.packed_embeddings.LayerNorm, source.roberta.embeddings.LayerNorm
    assert all(map(torch.equal, *(norm.parameters() for norm in norms)))


def test_beside_a_window_luna_packs_with_a_tenth_of_the_logits():
    source = make_source()
    model, made = warm_start(LunaForMaskedLM, source, projection_length=8, local_window=4)
    for number, (old, new) in enumerate(zip(source.roberta.encoder.layer, model.luna.encoder.layer, strict=True)):
        own, pack = old.attention.self, new.attention.self.pack
        assert torch.equal(pack.query.weight, 0.1 * own.query.weight)
        assert torch.equal(pack.query.bias, 0.1 * own.query.bias)
        assert torch.equal(pack.key.weight, own.key.weight)
        name = f"encoder.layer.{number}.attention.self"
        expected = f"a copy of the source's roberta.{name}.query.weight, its logits times 0.1"
        assert made.new[f"luna.{name}.pack.query.weight"] == expected


def test_luna_is_untied_and_its_rules_cover_everything_new(luna):
    source, model, made = luna
    assert model.config.tie_kv is False
    new = {re.sub(r"layer\.\d+", "layer.{}", name).removeprefix("luna.") for name in made.new}
    assert new == {*LunaRules.table, CONVOLUTION}
    assert len(made.copied) == len(list(source.parameters()))


@torch.no_grad()
def test_the_first_pack_equals_a_memory_written_by_the_packed_embeddings():
    """With one pack head and identity values, Luna's slots are ABC's `sum_i phi_i x_i` (phi from P and text)."""
    source = make_source()
    model, _ = warm_start(LunaForMaskedLM, source, projection_length=8, num_projected_attention_heads=1)
    states = torch.randn(2, 12, 48)
    memory, context = model.luna.begin(states, None)
    pack = model.luna.encoder.layer[0].attention.self.pack
    packed, _ = pack(memory, states, context)
    attention = source.roberta.encoder.layer[0].attention.self
    phi = torch.einsum("bmd,bnd->bmn", attention.query(memory), attention.key(states)).div(48**0.5).softmax(-1)
    torch.testing.assert_close(packed, phi @ states)


def test_luna_s_slots_are_tokens_at_evenly_spread_positions():
    def words(source, **options):
        model, _ = warm_start(LunaForMaskedLM, source, projection_length=600, **options)
        positions = source.base_model.embeddings.position_embeddings.weight[-longest(source) :]
        rest = positions[[(2 * slot + 1) * longest(source) // 1200 for slot in range(600)]]
        rest = rest + source.base_model.embeddings.token_type_embeddings.weight[0]
        distance = torch.cdist(model.luna.packed_embeddings.weight - rest, source.get_input_embeddings().weight)
        assert distance.amin(-1).max() < 1e-3
        return distance.argmin(-1)

    ordered, other = words(make_source()), words(make_source("bert"))
    assert not torch.isin(ordered, torch.tensor([0, 1, 2])).any()
    # Zipf: the first tenth of the vocabulary has over half of the mass. BERT's ids have no order.
    assert (ordered < 15).float().mean() > 0.5
    assert 0.05 < (other < 15).float().mean() < 0.2
    assert torch.equal(ordered, words(make_source())) and not torch.equal(ordered, words(make_source(), seed=1))
    assert set(words(make_source(), slot_tokens=[0, 31, 32, 2, 1]).tolist()) == {31, 32}


# ---- types ----


@pytest.mark.parametrize(("model_class", "dtype"), [(AbcForMaskedLM, torch.bfloat16), (LunaForMaskedLM, torch.float64)])
def test_the_type_of_the_source_is_kept(model_class, dtype, tmp_path):
    source = make_source(dtype=dtype)
    model, _ = warm_start(model_class, source, conv_kernel_size=3)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype} == {model.dtype}
    parameters = dict(model.base_model.named_parameters())
    assert all(torch.equal(parameters[name], expected) for name, expected in body(source).items())
    model.save_pretrained(tmp_path / "target")
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "target").dtype == dtype


def test_the_weights_decide_the_type_not_the_config(tmp_path):
    source = make_source()
    source.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32"
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    model, _ = warm_start(AbcForMaskedLM, tmp_path)
    assert model.dtype == torch.float32
    assert torch.equal(model.get_input_embeddings().weight, source.get_input_embeddings().weight)


# ---- files ----


@pytest.mark.parametrize("form", ["sharded", "old-names"])
def test_files_of_any_form(form, tmp_path):
    source = make_source("bert")
    source.save_pretrained(tmp_path, max_shard_size="50KB" if form == "sharded" else "5GB")
    if form == "sharded":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, before in old.items():
            tensors = {name.replace(new, before): tensor for name, tensor in tensors.items()}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    model, made = warm_start(AbcForMaskedLM, tmp_path, memory_control="full", allow_pickle=form != "sharded")
    batch = batch_for(source)
    torch.testing.assert_close(logits(model, batch), logits(source, batch), rtol=0, atol=1e-5)
    assert not made.new and not made.unused


# ---- the report ----


@pytest.mark.parametrize(
    ("model_class", "kind", "head"),
    [
        *((AbcForMaskedLM, kind, "mlm") for kind in KINDS),
        *((AbcForMaskedLM, "roberta", head) for head in ("base", "token")),
        (LunaForMaskedLM, "roberta", "sequence"),
        (LunaForMaskedLM, "bert", "mlm"),
    ],
)
def test_the_report_is_disjoint_and_complete(kind, head, model_class, tmp_path):
    source = make_source(kind, head)
    source.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    model, made = warm_start(model_class, tmp_path, max_length=64, conv_kernel_size=3)
    named = [*made.copied, *made.extended, *made.new]
    assert sorted(named) == sorted(dict(model.named_parameters()))
    # Every tensor of the files is used or reported as unused; the decoder's bias is stored as the head's.
    prefix = f"{source.base_model_prefix}."
    taken = {name.removeprefix(prefix).replace("decoder.bias", "bias") for name in made.copied.values()}
    taken |= {"embeddings.position_embeddings.weight"}
    unused = {name.removeprefix(prefix) for name in made.unused}
    assert taken | unused == {name.removeprefix(prefix) for name in files} and not taken & unused
    if head == "mlm":
        assert not unused
    else:
        assert unused and all(name.startswith(("pooler.", "classifier.")) for name in unused)


def test_lines_are_grouped():
    def named(stem, how=""):
        return {
            f"encoder.layer.{layer}.{stem}.{kind}": how and f"{how}.layer.{layer}.x.{kind}"
            for layer in range(12)
            for kind in ("weight", "bias")
        }

    made = WarmStart(
        copied={**named("output.dense"), "embeddings.word.weight": "w"},
        new={**named("pack.key", "a copy of old"), "control.weight": "zero"},
        unused={"pooler.dense.weight": "", "pooler.dense.bias": ""},
    )
    assert made.lines() == [
        "copied: 25 parameters",
        "  encoder.layer.{0..11}.output.dense.{weight,bias}",
        "  embeddings.word.weight",
        "extended: 0 parameters",
        "new: 25 parameters",
        "  encoder.layer.{0..11}.pack.key.{weight,bias}: a copy of old.layer.{0..11}.x.{weight,bias}",
        "  control.weight: zero",
        "unused: 2 parameters",
        "  pooler.dense.{weight,bias}",
    ]
    assert made.lines("unused") == made.lines()[-2:]
