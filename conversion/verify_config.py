"""What `verify.py` tells from a model's config alone: the fields that contradict the original.

A wrong field mostly shows in the numbers, too, but some only a little (`layer_norm_eps`), and none by its name. Dropout
is not looked at: it plays no part here, and may be chosen anew.
"""

from typing import Any

import torch
from fairseq_checkpoint import HEADS, Original, layers
from fairseq_config import POOLINGS, is_tied
from fairseq_reference import EPSILON, PADDING_ID, SENTENCE_ENCODER, activation
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

# What is the same in every masked language model of the authors.
ALWAYS = {
    "layer_norm_eps": EPSILON,
    "pad_token_id": PADDING_ID,
    "position_embedding_type": "learned",
    "type_vocab_size": 0,
    "embedding_layer_norm": True,
    "norm_first": False,
    "conv_kernel_size": 0,
}
# Our fields that the authors' arguments tell, and no tensor does.
ARGUMENTS = {
    "num_attention_heads": "encoder_attention_heads",
    "dynamic_projection": "fix_projection_length",
    "hidden_act": "activation_fn",
    "classifier_activation": "pooler_activation_fn",
}


def constant_problems(config: PreTrainedConfig, head: str | None) -> list[str]:
    """Fields that contradict the authors' code, whatever the original is.

    Args:
        config: ours.
        head: name of the original's classification head that the model has, if it has one.
    """
    wrong = [
        f"in config.json, `{name}` is {getattr(config, name)!r}, but always {theirs!r} in the authors' code"
        for name, theirs in ALWAYS.items()
        if getattr(config, name) != theirs
    ]
    pack, unpack = config.num_projected_attention_heads, config.num_attention_heads
    if pack not in (None, unpack):
        wrong.append(
            f"in config.json, `num_projected_attention_heads` is {pack}, but always `num_attention_heads` ({unpack}) "
            "in the authors' code"
        )
    ours, theirs = config.classifier_pooling, POOLINGS.get(head, "cls")
    if head is not None and ours != theirs:
        wrong.append(f"in config.json, `classifier_pooling` is {ours!r}, but {head} is {theirs!r}")
    return wrong


def config_problems(config: PreTrainedConfig, original: Original, head: str | None, masked_lm: bool) -> list[str]:
    """Fields that contradict the original's tensors or arguments, or the authors' code.

    Args:
        config: ours.
        original: the authors' checkpoint.
        head: name of its classification head that the model has, if it has one.
        masked_lm: whether the model has the masked-LM head.

    Raises:
        KeyError: The original lacks a tensor.
        ValueError: It has an activation that the authors do not have.
    """
    theirs = _by_tensors(original, head)
    if masked_lm:
        theirs["tie_word_embeddings"] = is_tied(original)
    theirs |= _by_arguments(config, original, head)
    ours = {name: getattr(config, name) for name in theirs}
    if head is not None and config.classifier_hidden_size is None:
        ours["classifier_hidden_size"] = config.hidden_size
    wrong = [
        f"in config.json, `{name}` is {ours[name]}, but {value} in the original{_assumed(name, original)}"
        for name, value in theirs.items()
        if ours[name] != value
    ]
    return wrong + constant_problems(config, head)


def _by_tensors(original: Original, head: str | None) -> dict[str, Any]:
    """Our fields as names and shapes of the tensors have them."""
    encoder = {name.removeprefix(SENTENCE_ENCODER): tensor for name, tensor in original.weights.items()}
    fields: dict[str, Any] = {
        "vocab_size": encoder["embed_tokens.weight"].shape[0],
        "hidden_size": encoder["embed_tokens.weight"].shape[1],
        "num_hidden_layers": layers(original.weights),
        "intermediate_size": encoder["layers.0.fc1.weight"].shape[0],
        "projection_length": encoder["projected_embeddings"].shape[0],
        "max_position_embeddings": encoder["embed_positions.weight"].shape[0] - PADDING_ID - 1,
        "tie_kv": "layers.0.self_attn.c_proj.weight" in encoder,
    }
    if head is not None:
        fields["classifier_hidden_size"] = original.weights[f"{HEADS}{head}.dense.weight"].shape[0]
    return fields


def _by_arguments(config: PreTrainedConfig, original: Original, head: str | None) -> dict[str, Any]:
    """Our fields as the authors' arguments have them; an activation is ours where it is the same function."""
    options = original.options
    fields: dict[str, Any] = {
        "num_attention_heads": options.encoder_attention_heads,
        "dynamic_projection": not options.fix_projection_length,
        "hidden_act": _named(config.hidden_act, options.activation_fn),
    }
    if head is not None:
        fields["classifier_activation"] = _named(config.classifier_activation, options.pooler_activation_fn)
    return fields


def _named(ours: str, theirs: str) -> str:
    """Our name of an activation if it is the function that theirs names, else theirs.

    Functions and not names, because transformers has several names for one.
    """
    x = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    same = torch.allclose(ACT2FN[ours](x), activation(theirs, x), rtol=0, atol=1e-9)
    return ours if same else theirs


def _assumed(name: str, original: Original) -> str:
    if ARGUMENTS.get(name) not in original.assumed:
        return ""
    return f" (the authors' default, for the checkpoint does not say; else --override {ARGUMENTS[name]}=VALUE)"
