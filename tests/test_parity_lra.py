"""Parity of the classifiers of Long Range Arena: Luna's LRA models, and those of LeaPformer's code.

Tolerance: 1e-5 in float32; in float64, where ours is exact, twice the distance between the authors' float32 and
float64 runs. Where the authors' code differs on purpose, the test says how:

- Their class token is a token of the text; ours is a vector that the classifier puts in front.
- Luna's release of 2021, and LeaPformer's code, average over the padded length; we average over the tokens.
- LeaPformer's cosFormer counts positions in the padded length, so that only rows without padding agree.
- Luna's matching models read [second, first], a part of our features.
"""

import dataclasses
from functools import partial

import pytest
import torch
from lra import models
from lra.models import Classifier, SharedLayer
from lra.recipes import load_recipe
from lra.tasks import Task
from official_luna import Fixture, encoder_weights, part
from test_parity_abc import PRECISIONS, assert_near, projections
from test_parity_leapformer import KINDS, layer_weights
from torch.nn import functional as F

from luna_hf.ops.positions import sinusoids

LUNA = [
    *("release_encoder_post_lnemb_cls", "release_encoder_pre_tiedlayers_mp", "release_encoder_pre_untied_cls"),
    *("release_model_classify", "release_model_match", "v2022_model_classify", "v2022_model_match"),
    *("v2022_linear_learned_pre", "v2022_linear_sinusoidal_tiedlayers", "v2022_sparse_learned_post_lnemb_mp"),
    *("v2022_sparse_learned_pre_tiedlayers_cls", "v2022_sparse_sinusoidal_pre_mp"),
]
PAD = 1  # of theirs; ours is 0, but positions start behind it
precisions = pytest.mark.parametrize("dtype", PRECISIONS)
cases = pytest.mark.parametrize("case", ["case0", "case1"])


def luna_options(fixture):
    """The options of a fixture's encoder, also if it is part of a model, whose layers are post-norm."""
    if "encoder" in fixture.config:
        return fixture.config["encoder"]
    own = fixture.config["args"]
    names = {"num_encoder_layers": "encoder_layers", "embedding_dim": "encoder_embed_dim"}
    names |= {"ffn_embedding_dim": "encoder_ffn_embed_dim", "num_attention_heads": "encoder_attention_heads"}
    names |= {"projection_length": "encoder_projection_length", "max_seq_len": "max_positions"}
    shared = ("tie_layer_weights", "activation_fn", "sen_rep_type")
    learned = own.get("encoder_learned_pos", True)
    fixed = {"layernorm_embedding": True, "normalize_before": False, "dynamic_projection": True, "tie_kv": False}
    fixed |= {name: own[theirs] for name, theirs in names.items()} | {name: own[name] for name in shared}
    return {**fixed, "vocab_size": fixture.config["vocab_size"], "learned_pos_embedding": learned}


def luna_classifier(fixture, dtype):
    """Our classifier with the weights of a fixture."""
    options, weights = luna_options(fixture), fixture.weights()
    model = fixture.config["kind"] == "model"
    recipe = dataclasses.replace(
        load_recipe("luna", "text"),
        hidden_size=options["embedding_dim"],
        num_hidden_layers=options["num_encoder_layers"],
        num_attention_heads=options["num_attention_heads"],
        intermediate_size=options["ffn_embedding_dim"],
        norm_first=options["normalize_before"],
        position_embedding_type="learned" if options["learned_pos_embedding"] else "sinusoidal",
        embedding_layer_norm=options["layernorm_embedding"],
        share_layers=options["tie_layer_weights"],
        classifier_pooling={"cls": "cls", "mp": "mean"}[options["sen_rep_type"]],
        classifier_hidden_size=40,
        slots=options["projection_length"],
    )
    pixels, pairs = (
        options.get("embedding_type") == "linear",
        model and "tokens1" in fixture.meta["cases"]["case0"]["inputs"],
    )
    inputs = "pixels" if pixels else "pairs" if pairs else "tokens"
    labels = fixture.config["args"]["sentence_class_num"] if model else 2
    length = options["max_seq_len"] - (recipe.classifier_pooling == "cls")
    task = Task("luna", inputs, options.get("vocab_size") or 256, length, labels, "fixture")
    fields = {"dynamic_projection": options["dynamic_projection"], "hidden_act": options["activation_fn"]}
    fields |= {"tie_kv": any("pc_proj" in name for name in weights), "vocab_size": PAD + 1, "pad_token_id": PAD}
    fields["first_position"] = PAD + 1
    classifier = Classifier(task, recipe, partial(models._library, "luna", fields))

    theirs = part(weights, "encoder.encoder.") if model else dict(weights)
    embedding = {
        name: theirs.pop(f"embed_tokens.{name}") for name in ("weight", "bias") if f"embed_tokens.{name}" in theirs
    }
    if pixels:
        embedding["weight"] = embedding["weight"].unsqueeze(1)
        if "embed_positions.weight" in theirs:  # without rows for what is no position
            theirs["embed_positions.weight"] = F.pad(theirs["embed_positions.weight"], (0, 0, PAD + 1, 0))
    missing, unexpected = classifier.encoder.load_state_dict(encoder_weights(theirs), strict=False)
    assert not unexpected and not missing
    classifier.embedding.load_state_dict(embedding)
    if pixels and not options["learned_pos_embedding"]:  # theirs count pixels from 0
        positions = classifier.encoder.embeddings.position_embeddings
        positions.forward = lambda ids: sinusoids(ids - PAD - 1, positions.dim)
    if classifier.class_token is not None:
        classifier.class_token.data = embedding["weight"][0]
    if model:
        load_luna_head(classifier, weights, pairs)
    return classifier.to(dtype).eval(), options


def load_luna_head(classifier, weights, pairs):
    inner = next(tensor for name, tensor in weights.items() if name.startswith("classifier.") and tensor.dim() == 2)
    bias = next(tensor for name, tensor in weights.items() if name.startswith("classifier.") and tensor.dim() == 1)
    if pairs:
        second, first = inner.chunk(2, 1)
        inner = F.pad(torch.cat([first, second], 1), (0, inner.shape[1]))
    out = weights["sentence_projection_layer.weight"]
    head = {"0.weight": inner, "0.bias": bias, "2.weight": out, "2.bias": torch.zeros(len(out))}
    classifier.head.load_state_dict(head)


def luna_inputs(fixture, case, name, classifier):
    """Inputs by our names, without the class token, and the mask of theirs."""
    values = fixture.input(case, name)
    if values.is_floating_point():  # real numbers, where our pixels are grey levels
        return (values.double() + 1) * 127.5, None
    keep = values != PAD
    first = int(classifier.class_token is not None)
    return values[:, first:], keep[:, first:].long()


@precisions
@cases
@pytest.mark.parametrize("name", LUNA)
@torch.no_grad()
def test_luna(name, case, dtype):
    """Every layer, the pooled vector, the packed states and the logits."""
    fixture = Fixture("luna_lra", name)
    classifier, options = luna_classifier(fixture, dtype)
    near = partial(assert_near, fixture=fixture, case=case)
    seen = []
    call = classifier.encoder.forward

    def forward(**inputs):
        states = {"output_hidden_states": True, "output_packed_hidden_states": True}
        seen.append(call(**inputs, unpad_inputs=False, **states))
        return seen[-1]

    classifier.encoder.forward = forward
    values, mask = luna_inputs(fixture, case, "tokens", classifier)
    pooled, states = classifier.encode(values, mask), seen[-1]
    longest = fixture.output(case, "hidden.0.px").shape[1]  # the authors cut P to the longest row
    for layer in range(options["num_encoder_layers"]):
        near(states.hidden_states[layer], fixture.output(case, f"hidden.{layer}.x"), what=f"layer {layer}")
        packed = states.packed_hidden_states[layer][:, :longest]
        near(packed, fixture.output(case, f"hidden.{layer}.px"), what=f"P of layer {layer}")
    assert isinstance(classifier.encoder.encoder.layer, SharedLayer) == options["tie_layer_weights"]
    if name == "release_encoder_pre_tiedlayers_mp":
        pooled = states.last_hidden_state.mean(1)
    near(pooled, fixture.output(case, "sentence_rep"), what="pooled")
    near(states.packed_last_hidden_state[:, :longest], fixture.output(case, "sentence_proj_rep"), what="P")
    if fixture.output(case, "logits") is not None:
        pair = {}
        if classifier.head[0].in_features == 4 * pooled.shape[1]:
            names = ("input_ids_2", "attention_mask_2")
            pair = dict(zip(names, luna_inputs(fixture, case, "tokens1", classifier), strict=True))
        logits = classifier(input_ids=values, attention_mask=mask, **pair).logits
        near(logits, fixture.output(case, "logits"), what="logits")


def leapformer_classifier(group, kind, fields, dtype):
    """Our classifier with the weights of a model of LeaPformer's code."""
    fixture = Fixture(group, f"{kind}_lra_model")
    options, weights = fixture.config, {name: tensor.to(dtype) for name, tensor in fixture.weights().items()}
    recipe = dataclasses.replace(
        load_recipe("small", "text"),
        hidden_size=options["transformer_dim"],
        num_attention_heads=options["num_head"],
        intermediate_size=options["transformer_hidden_dim"],
        classifier_hidden_size=len(weights["seq_classifer.mlpblock.0.weight"]),
    )
    task = Task("lra", "tokens", options["vocab_size"], options["max_seq_len"], options["num_classes"], "fixture")
    family = "abc_memory" if kind == "linformer" else "leapformer"
    classifier = Classifier(task, recipe, partial(models._library, family, fields)).to(dtype).eval()
    positions = weights["model.embeddings.position_embeddings.weight"]
    ours = {"embeddings.position_embeddings.weight": F.pad(positions, (0, 0, 1, 0))}
    for number in (0, 1):
        ours |= layer_weights(kind, weights, options["num_head"], number)
        if kind == "linformer":
            theirs = part(weights, f"model.transformer_{number}.mha.")
            prefix = f"encoder.layer.{number}.attention.self."
            ours |= {prefix + name: tensor for name, tensor in projections(theirs, "W_{}").items()}
            ours[f"{prefix}control.weight"] = theirs["attn.E"].flatten(0, 1)
    ours |= {f"encoder.final_layer_norm.{name}": weights[f"model.norm.{name}"] for name in ("weight", "bias")}
    classifier.encoder.load_state_dict(ours)
    classifier.embedding.load_state_dict({"weight": weights["model.embeddings.word_embeddings.weight"]})
    classifier.head.load_state_dict(part(weights, "seq_classifer.mlpblock."))
    return fixture, classifier


@precisions
@pytest.mark.parametrize("kind", [*KINDS, "linformer"])
@torch.no_grad()
def test_models_of_leapformers_code(kind, dtype):
    group, fields = KINDS.get(kind, ("linformer", {}))
    if kind == "linformer":
        fields = {"memory_control": "linformer", "share_control": False, "memory_size": 6}
    fixture, classifier = leapformer_classifier(group, kind, fields, dtype)
    ids, keep = fixture.input("case0", "input_ids"), fixture.input("case0", "mask") != 0
    pooled = classifier.encode(ids, keep.long())
    logits = classifier.head(pooled * (keep.sum(1, keepdim=True) / keep.shape[1]))
    rows = keep.all(1) if kind == "cosformer" else slice(None)
    assert len(logits[rows])
    assert_near(logits[rows], fixture.output("case0", "logits")[rows], fixture, "case0", "logits")
