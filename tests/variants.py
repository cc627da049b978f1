"""What the tests know about each family: one row of `ROWS` a family, beside the options that every family has.

A new family adds a row. The defaults fit one that reads slots with a softmax and adds no options.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reference import causal as reference
from transformers import PreTrainedConfig

from luna_hf.memory_control import ACTIVATIONS, CAUSAL_CONTROLS, CONTROLS, random_slots

Options = dict[str, Any]  # fields of a config

# Options that every family has, in encoders and causal models: together each optional part of the shared backbone.
COMMON: dict[str, Options] = {
    "default": {},
    "prenorm-sinusoidal": {
        "norm_first": True,
        "position_embedding_type": "sinusoidal",
        "embedding_layer_norm": False,
    },
    "convolution-segments-untied": {"conv_kernel_size": 3, "type_vocab_size": 2, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class LibraryVariant:
    """One configuration for transformers' own tests (`tests/library/`), and what they must know about it."""

    fields: Options = field(default_factory=dict)
    opposite: bool = False  # the opposite of the default wherever there is a choice, and more slots than tokens
    num_keys: int | None = None  # that recorded attentions have, where it is not the number of slots
    maps_are_copies: bool = False  # an encoder's maps are put together for the record: they get no gradient
    overfit_steps: int = 300  # the library's own number


def _both_layouts() -> dict[str, LibraryVariant]:
    # After 300 steps the gradient of pre-norm models has fallen by about 89 %, of 90 % that are asked for.
    return {"Default": LibraryVariant(), "PreNorm": LibraryVariant(opposite=True, overfit_steps=400)}


@dataclass(frozen=True)
class ConfigField:
    """How `test_configuration.py` tests a field of a config.

    Args:
        bad: a value that is refused, then what the message names besides it; `None` if only the type is checked.
        bad_in_decoder: the same for a value that only decoders refuse.
        effect: another value, and the name of the function of `test_configuration.py` that shows what it changes.
        together: fields without which it has no effect.
        encoders_only: whether a causal model has no use for it.
    """

    bad: tuple | None = None
    bad_in_decoder: tuple | None = None
    effect: tuple[Any, str] | None = None
    together: Options = field(default_factory=dict)
    encoders_only: bool = False


@dataclass(frozen=True)
class Lora:
    """Modules that LoRA is asked to adapt, options of the model, and the last names of the modules then adapted."""

    targets: list[str] | str
    adapted: set[str]
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Variants:
    """The row of one family.

    Args:
        encoder: options of its encoder variants beside `COMMON`, by the variants' names.
        causal: the same for its causal models.
        library_encoder: configurations of encoders for transformers' own tests.
        library_causal: the same for causal models.
        fields: its own config fields, beside the number of slots.
        inexact_in_half: encoder variants that decide by comparing numbers, which half precision may turn around.
        compiled_training: encoder variants whose training step compiles fast enough for every run of the tests.
        flash: the flash-attention kernel that an encoder variant calls under padding; those not named call none.
        long: causal variants that are decoded over 512 tokens.
        queues: causal variants whose state holds states of tokens, in the model's type, instead of sums in float32.
        unscaled: by causal variant, the end of the names of parameters that are large enough without being scaled up.
        causal_reference: the attention of a causal layer, written out; see `reference.causal.decode_row`.
        deviation: standard deviation at initialisation, where it is not 0.02, by the end of a parameter's name.
        state_options: values of the family's fields with which a model makes states that the default model refuses.
        unused: whether a parameter (by name, with the config) has no gradient by construction.
        lora: what LoRA adapts, by names for the tests.
        modules: files that its checkpoints carry, beside those that are called after it and those of every family.
    """

    encoder: dict[str, Options] = field(default_factory=dict)
    causal: dict[str, Options] = field(default_factory=dict)
    library_encoder: dict[str, LibraryVariant] = field(default_factory=_both_layouts)
    library_causal: dict[str, LibraryVariant] = field(default_factory=_both_layouts)
    fields: dict[str, ConfigField] = field(default_factory=dict)
    inexact_in_half: tuple[str, ...] = ()
    compiled_training: tuple[str, ...] = ()
    flash: dict[str, str] = field(default_factory=lambda: {"default": "flash_dense"})
    long: tuple[str, ...] = ("default",)
    queues: tuple[str, ...] = ()
    unscaled: dict[str, str] = field(default_factory=dict)
    causal_reference: Callable[..., Any] | None = None
    deviation: dict[str, float] = field(default_factory=dict)
    state_options: Options = field(default_factory=dict)
    unused: Callable[[str, PreTrainedConfig], bool] = lambda name, config: False
    lora: dict[str, Lora] = field(default_factory=lambda: {"query-value": Lora(["query", "value"], {"query", "value"})})
    modules: tuple[str, ...] = ()


def _unused_in_luna(name: str, config: PreTrainedConfig) -> bool:
    """The packed stream of the last layer, where the loss reads the tokens; the tokens', where it reads P."""
    last = f"encoder.layer.{config.num_hidden_layers - 1}."
    packed = config.classifier_pooling.startswith("packed") and (last in name or "final_layer_norm" in name)
    return packed or "packed_layer_norm" in name


LUNA = Variants(
    causal={
        "elu": {"pack_activation": "elu"},
        "untied-kv": {"tie_kv": False},
        "elu-untied-kv-prenorm": {"pack_activation": "elu", "tie_kv": False, "norm_first": True},
    },
    library_encoder={
        "Default": LibraryVariant({"num_projected_attention_heads": 2}),
        "PreNorm": LibraryVariant(
            {"dynamic_projection": False, "tie_kv": False, "classifier_pooling": "packed_attention"}, opposite=True
        ),
    },
    library_causal={
        "Default": LibraryVariant(),
        # After 300 steps the gradient has fallen by 89.6 % (90 % are asked for), and it still falls.
        "PreNorm": LibraryVariant({"tie_kv": False, "pack_activation": "elu"}, opposite=True, overfit_steps=400),
    },
    fields={
        "num_projected_attention_heads": ConfigField(
            (7, "hidden_size", 48), bad_in_decoder=(2,), effect=(2, "outputs"), encoders_only=True
        ),
        "tie_kv": ConfigField(effect=(False, "parameters")),
        "dynamic_projection": ConfigField(effect=(False, "outputs"), encoders_only=True),
        "pack_activation": ConfigField(
            ("softmax", "softplus", "elu"), effect=("elu", "causal_outputs"), together={"is_decoder": True}
        ),
    },
    flash={"default": "flash_varlen"},
    long=("default", "convolution-segments-untied", "elu"),
    causal_reference=reference.attend_luna,
    deviation={"pack.slots": 1.0},  # as large as normed states
    state_options={"pack_activation": "elu"},
    unused=_unused_in_luna,
    lora={
        "query-value": Lora(["query", "value"], {"query", "value"}, {"tie_kv": False}),
        "query-tied-key-value": Lora(["query", "key_value"], {"query", "key_value"}),
        "all-linear": Lora("all-linear", {"query", "key_value", "dense"}),
    },
)

# Every control strategy beside the default, the shared `mlp` with exp.
ABC = Variants(
    encoder={
        **{control.replace("_", "-"): {"memory_control": control} for control in CONTROLS if control != "mlp"},
        "mlp-of-each-layer": {"share_control": False},
        "linformer-of-each-layer": {"memory_control": "linformer", "share_control": False},
        "relu": {"control_activation": "relu"},
        "sigmoid": {"control_activation": "sigmoid"},
    },
    causal={
        **{control.replace("_", "-"): {"memory_control": control} for control in CAUSAL_CONTROLS if control != "mlp"},
        "mlp-of-each-layer": {"share_control": False},
        "linformer-of-each-layer": {"memory_control": "linformer", "share_control": False},
        "random-of-each-layer": {"memory_control": "random", "share_control": False},
        "relu": {"control_activation": "relu"},
        "sigmoid": {"control_activation": "sigmoid"},
        "sliding-window-convolution": {"memory_control": "sliding_window", "conv_kernel_size": 3},
    },
    # The learned control shared by the layers and of each layer; the strategies that differ most from it.
    library_encoder={
        "Default": LibraryVariant(),
        # After 300 steps the loss has fallen by 98.7 %, the gradient by 89 % (90 % are asked for), and both still fall.
        "PreNorm": LibraryVariant(
            {"share_control": False, "classifier_pooling": "mean"}, opposite=True, overfit_steps=400
        ),
        "Full": LibraryVariant({"memory_control": "full"}, num_keys=9),
        "SlidingWindow": LibraryVariant({"memory_control": "sliding_window"}, maps_are_copies=True),
    },
    library_causal={
        "Default": LibraryVariant(),
        "Linformer": LibraryVariant({"memory_control": "linformer"}, opposite=True),
        "SlidingWindow": LibraryVariant({"memory_control": "sliding_window"}),
    },
    fields={
        "memory_control": ConfigField(
            ("mpl", *CONTROLS),
            bad_in_decoder=("cluster", *CAUSAL_CONTROLS),
            effect=("linformer", "parameters"),
        ),
        "control_activation": ConfigField(("softmax", *ACTIVATIONS), effect=("relu", "outputs")),
        "share_control": ConfigField(effect=(False, "parameters")),
        "control_seed": ConfigField((-1,), effect=(1, "outputs"), together={"memory_control": "random"}),
        "cluster_iterations": ConfigField(
            (0,),
            effect=(1, "outputs"),
            together={"memory_control": "cluster", "memory_size": 3},
            encoders_only=True,
        ),
    },
    # K-means: a rounding may put a token that lies between two clusters into the other one.
    inexact_in_half=("cluster",),
    compiled_training=("linformer", "cluster", "dilated"),
    flash={
        **dict.fromkeys(("default", "mlp-of-each-layer", "sigmoid"), "flash_dense"),
        **dict.fromkeys(("linformer", "linformer-of-each-layer"), "flash_dense"),
        "full": "flash_varlen",
    },
    long=("default", "linformer", "random", "relu", "sliding-window-convolution"),
    queues=("sliding-window", "sliding-window-convolution"),
    unscaled=dict.fromkeys(("linformer", "linformer-of-each-layer"), "control.weight"),  # sums, no means
    causal_reference=partial(reference.attend_abc, draw=random_slots),
    state_options={"memory_control": "sliding_window", "control_activation": "relu"},
    lora={
        "query-value": Lora(["query", "value"], {"query", "value"}),
        "all-linear": Lora("all-linear", {"query", "key", "value", "dense"}, {"share_control": False}),
    },
    modules=("memory_control",),
)

ROWS: dict[str, Variants] = {"luna": LUNA, "abc_memory": ABC}
