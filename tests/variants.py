"""What the tests know about each family: one row of `ROWS` per family, and the options common to all.

The comparisons with references and the tests of padding run every variant of a row. What depends less on the attention
(decoding, heads, checkpoints, the Trainer) runs once per kind: `kinds` and `causal_kinds` name the variants that
represent the code paths. The slow suite runs the others, too.

A new family adds a row. The defaults fit a family that reads slots with a softmax and adds no options.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reference import causal as reference
from reference import lavo as lavo_reference
from reference import leapformer as leapformer_reference
from transformers import PreTrainedConfig

from luna_hf.families.abc.attention import random_slots
from luna_hf.families.abc.configuration import ACTIVATIONS, CAUSAL_CONTROLS, CONTROLS
from luna_hf.families.lavo.configuration import PARTS
from luna_hf.families.leapformer.configuration import CAUSAL_REWEIGHTINGS, FEATURE_MAPS, REWEIGHTINGS

Options = dict[str, Any]  # fields of a config

# Options of every family, in encoders and causal models. Together they cover each optional part of the backbone.
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
    """One configuration for transformers' own tests (`tests/library/`). A row's first runs in every suite."""

    fields: Options = field(default_factory=dict)
    opposite: bool = False  # inverts every option of the backbone, and has more slots than tokens
    num_keys: int | None = None  # keys in the recorded attentions, if not the number of slots
    maps_are_copies: bool = False  # recorded attention maps are assembled copies and get no gradient
    overfit_steps: int = 300  # the library's default


def _both_layouts() -> dict[str, LibraryVariant]:
    # After 300 steps the gradient of pre-norm models has fallen by 89 %; the library asks for 90 %.
    return {"Default": LibraryVariant(), "PreNorm": LibraryVariant(opposite=True, overfit_steps=400)}


@dataclass(frozen=True)
class ConfigField:
    """How `test_configuration.py` tests a field of a config.

    Args:
        bad: a refused value, followed by what the message must name; `None` if only the type is checked.
        bad_in_decoder: the same for a value refused in decoders only.
        effect: another value, and the function of `test_configuration.py` that shows its effect.
        together: fields required for the effect.
        encoders_only: whether the field has no effect in a causal model.
    """

    bad: tuple | None = None
    bad_in_decoder: tuple | None = None
    effect: tuple[Any, str] | None = None
    together: Options = field(default_factory=dict)
    encoders_only: bool = False


@dataclass(frozen=True)
class Lora:
    """The `target_modules` of LoRA, the names of the modules it then adapts, and options of the model."""

    targets: list[str] | str
    adapted: set[str]
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Variants:
    """The row of one family.

    Args:
        encoder: options of the family's encoder variants, by name.
        causal: options of the family's causal variants, by name.
        seq2seq: options of the family's encoder-decoder variants, by name.
        kinds: encoder variants, `COMMON` included, that represent the code paths.
        causal_kinds: the same for causal models.
        library_encoder: configurations of encoders for transformers' own tests.
        library_causal: configurations of causal models for transformers' own tests.
        library_seq2seq: configurations of encoder-decoders for transformers' own tests.
        fields: its own config fields, except the number of slots.
        sizes: fields of the tiny models, besides those of all families and the number of slots.
        positions: default types of positions, of encoders and of decoders.
        mixes: whether its layers can read a window beside the slots, in one softmax.
        inexact_in_half: encoder variants with comparisons that half precision may flip.
        flash: encoder variants that call a flash-attention kernel under padding, with the kernel.
        queues: causal variants with a state of token states in the model's dtype, not of sums in float32.
        unscaled: by causal variant, the suffix of parameters that are large enough without scaling.
        causal_reference: the literal attention of a causal layer, see `reference.causal.decode_row`.
        causal_maps: whether its causal models return attention weights.
        causal_keys: the number of keys of these weights, with 8 slots.
        deviation: standard deviation at initialisation by the suffix of a parameter, where it is not 0.02.
        state_options: field values that lead to a decoding state incompatible with the default model's.
        unused: whether a parameter (by name, with the config) has a zero gradient by construction.
        lora: LoRA configurations, by name.
    """

    encoder: dict[str, Options] = field(default_factory=dict)
    causal: dict[str, Options] = field(default_factory=dict)
    seq2seq: dict[str, Options] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("default",)
    causal_kinds: tuple[str, ...] = ("default",)
    library_encoder: dict[str, LibraryVariant] = field(default_factory=_both_layouts)
    library_causal: dict[str, LibraryVariant] = field(default_factory=_both_layouts)
    library_seq2seq: dict[str, LibraryVariant] = field(default_factory=_both_layouts)
    fields: dict[str, ConfigField] = field(default_factory=dict)
    sizes: Options = field(default_factory=dict)
    positions: tuple[str, str] = ("learned", "rotary")
    mixes: bool = True
    inexact_in_half: tuple[str, ...] = ()
    flash: dict[str, str] = field(default_factory=lambda: {"default": "flash_dense"})
    queues: tuple[str, ...] = ()
    unscaled: dict[str, str] = field(default_factory=dict)
    causal_reference: Callable[..., Any] | None = None
    causal_maps: bool = True
    causal_keys: Callable[[PreTrainedConfig], int] = lambda config: 8 + config.local_window
    deviation: dict[str, float] = field(default_factory=dict)
    state_options: Options = field(default_factory=dict)
    unused: Callable[[str, PreTrainedConfig], bool] = lambda name, config: False
    lora: dict[str, Lora] = field(default_factory=lambda: {"query-value": Lora(["query", "value"], {"query", "value"})})


def _unused_in_luna(name: str, config: PreTrainedConfig) -> bool:
    """The last layer of the stream that the loss does not read: packed states or token states."""
    last = f"encoder.layer.{config.num_hidden_layers - 1}."
    packed = config.classifier_pooling.startswith("packed") and (last in name or "final_layer_norm" in name)
    return packed or "packed_layer_norm" in name


LUNA = Variants(
    encoder={
        "mixed": {"local_window": 5},
        "selected": {"local_window": 4, "num_selected_tokens": 4, "num_selection_queries": 5},
        "full-layer": {"local_window": 4, "full_attention_layers": [0]},
        "tokens-per-slot": {"tokens_per_slot": 3},
    },
    causal={
        "mixed": {"local_window": 5},
        "mixed-untied-convolution": {"local_window": 4, "tie_kv": False, "conv_kernel_size": 3},
        "elu": {"pack_activation": "elu"},
        "exp": {"pack_activation": "exp"},
        "exp-mixed": {"pack_activation": "exp", "local_window": 4},
        "untied-kv": {"tie_kv": False},
        "elu-untied-kv-prenorm": {"pack_activation": "elu", "tie_kv": False, "norm_first": True},
    },
    seq2seq={
        "mixed": {"local_window": 5},
        "fixed-untied-kv": {"dynamic_projection": False, "tie_kv": False, "num_projected_attention_heads": 2},
        "tokens-per-slot": {"tokens_per_slot": 3},
        "exp-mixed-full-layer": {"pack_activation": "exp", "local_window": 4, "full_attention_layers": [0]},
    },
    kinds=("default", "convolution-segments-untied", "mixed"),
    causal_kinds=("default", "convolution-segments-untied", "mixed"),
    library_encoder={
        "Default": LibraryVariant({"num_projected_attention_heads": 2}),
        "PreNorm": LibraryVariant(
            {"dynamic_projection": False, "tie_kv": False, "classifier_pooling": "packed_attention"}, opposite=True
        ),
        "Mixed": LibraryVariant({"local_window": 3, "global_tokens": "none"}, num_keys=7, maps_are_copies=True),
    },
    library_causal={
        "Default": LibraryVariant(),
        "Mixed": LibraryVariant({"local_window": 3}, num_keys=7),
        # After 300 steps the gradient has fallen by 89.6 % of the required 90 %.
        "PreNorm": LibraryVariant({"tie_kv": False, "pack_activation": "elu"}, opposite=True, overfit_steps=400),
    },
    library_seq2seq={
        "Default": LibraryVariant(),
        # A source of 9 tokens uses 9 of 12 slots, also in the decoder.
        "PreNorm": LibraryVariant(opposite=True, num_keys=9, overfit_steps=400),
    },
    fields={
        "num_projected_attention_heads": ConfigField(
            (7, "hidden_size", 48), bad_in_decoder=(2,), effect=(2, "outputs"), encoders_only=True
        ),
        "tie_kv": ConfigField(effect=(False, "parameters")),
        "dynamic_projection": ConfigField(effect=(False, "outputs"), encoders_only=True),
        "tokens_per_slot": ConfigField((0,), effect=(3, "outputs"), encoders_only=True),
        "pack_activation": ConfigField(
            ("softmax", "softplus", "elu", "exp"), effect=("exp", "causal_outputs"), together={"is_decoder": True}
        ),
    },
    flash=dict.fromkeys(("default", "mixed", "selected", "full-layer", "tokens-per-slot"), "flash_varlen"),
    causal_reference=reference.attend_luna,
    deviation={"pack.slots": 1.0},  # the size of normed states
    state_options={"pack_activation": "elu"},
    unused=_unused_in_luna,
    lora={
        "query-value": Lora(["query", "value"], {"query", "value"}, {"tie_kv": False}),
        "query-tied-key-value": Lora(["query", "key_value"], {"query", "key_value"}),
        "all-linear": Lora("all-linear", {"query", "key_value", "dense"}),
    },
)

# Every control strategy except the default, the shared `mlp` with exp.
ABC = Variants(
    encoder={
        **{control.replace("_", "-"): {"memory_control": control} for control in CONTROLS if control != "mlp"},
        "mlp-of-each-layer": {"share_control": False},
        "linformer-of-each-layer": {"memory_control": "linformer", "share_control": False},
        "relu": {"control_activation": "relu"},
        "sigmoid": {"control_activation": "sigmoid"},
        "mixed": {"local_window": 5},
        "selected": {
            **{"memory_control": "compressive", "memory_size": 3, "local_window": 4},
            **{"num_selected_tokens": 4, "num_selection_queries": 5},
        },
        "mixed-random-full-layer": {"memory_control": "random", "local_window": 4, "full_attention_layers": [0]},
    },
    causal={
        **{control.replace("_", "-"): {"memory_control": control} for control in CAUSAL_CONTROLS if control != "mlp"},
        "mlp-of-each-layer": {"share_control": False},
        "linformer-of-each-layer": {"memory_control": "linformer", "share_control": False},
        "random-of-each-layer": {"memory_control": "random", "share_control": False},
        "relu": {"control_activation": "relu"},
        "sigmoid": {"control_activation": "sigmoid"},
        "sliding-window-convolution": {"memory_control": "sliding_window", "conv_kernel_size": 3},
        "mixed": {"local_window": 5},
        "mixed-linformer": {"memory_control": "linformer", "local_window": 4},
        "mixed-relu": {"control_activation": "relu", "local_window": 4},
    },
    seq2seq={
        "mixed": {"local_window": 5},
        "linformer": {"memory_control": "linformer"},
        "random-of-each-layer": {"memory_control": "random", "share_control": False},
        "relu-of-each-layer": {"control_activation": "relu", "share_control": False},
    },
    kinds=("default", "prenorm-sinusoidal", "sliding-window", "mixed", "selected"),
    causal_kinds=("default", "prenorm-sinusoidal", "sliding-window", "mixed"),
    library_encoder={
        "Default": LibraryVariant(),
        # After 300 steps the gradient has fallen by 89 % of the required 90 %.
        "PreNorm": LibraryVariant(
            {"share_control": False, "classifier_pooling": "mean"}, opposite=True, overfit_steps=400
        ),
        "Full": LibraryVariant({"memory_control": "full"}, num_keys=9),
        "SlidingWindow": LibraryVariant({"memory_control": "sliding_window"}, maps_are_copies=True),
        "Mixed": LibraryVariant({"local_window": 3, "global_tokens": "none"}, num_keys=7, maps_are_copies=True),
    },
    library_causal={
        "Default": LibraryVariant(),
        "Linformer": LibraryVariant({"memory_control": "linformer"}, opposite=True),
        "SlidingWindow": LibraryVariant({"memory_control": "sliding_window"}),
        "Mixed": LibraryVariant({"local_window": 3}, num_keys=7),
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
    # K-means: rounding may move a token between two equally near clusters.
    inexact_in_half=("cluster",),
    flash={
        **dict.fromkeys(("default", "mlp-of-each-layer", "sigmoid"), "flash_dense"),
        **dict.fromkeys(("linformer", "linformer-of-each-layer"), "flash_dense"),
        **dict.fromkeys(("full", "mixed-random-full-layer"), "flash_varlen"),
    },
    queues=("sliding-window", "sliding-window-convolution"),
    # Sums, not means.
    unscaled=dict.fromkeys(("linformer", "linformer-of-each-layer", "mixed-linformer"), "control.weight"),
    causal_reference=partial(reference.attend_abc, draw=random_slots),
    state_options={"memory_control": "sliding_window", "control_activation": "relu"},
    lora={
        "query-value": Lora(["query", "value"], {"query", "value"}),
        "all-linear": Lora("all-linear", {"query", "key", "value", "dense"}, {"share_control": False}),
    },
)

LEAPFORMER = Variants(
    encoder={
        "elu": {"feature_map": "elu", "leap_factor": 1},
        "cosine": {"reweighting": "cosine"},
        "rotary": {"reweighting": "rotary", "feature_map": "elu"},
        "linear": {"reweighting": "none"},
        "full-layer": {"full_attention_layers": [0]},
    },
    causal={
        "elu": {"feature_map": "elu", "leap_factor": 1},
        "linear": {"reweighting": "none"},
        "linear-elu-rotary": {"reweighting": "none", "feature_map": "elu", "position_embedding_type": "rotary"},
        "rotary-convolution": {"reweighting": "rotary", "conv_kernel_size": 3},
    },
    seq2seq={"rotary": {"reweighting": "rotary", "feature_map": "elu"}, "linear": {"reweighting": "none"}},
    kinds=("default", "prenorm-sinusoidal", "cosine", "rotary"),
    causal_kinds=("default", "prenorm-sinusoidal", "linear"),
    positions=("learned", "sinusoidal"),
    library_encoder={
        # Maps of every pair of tokens, which the output does not depend on.
        "Default": LibraryVariant(num_keys=9, maps_are_copies=True),
        "PreNorm": LibraryVariant({"reweighting": "cosine"}, opposite=True, num_keys=9, maps_are_copies=True),
        "Rotary": LibraryVariant({"reweighting": "rotary", "feature_map": "elu"}, num_keys=9, maps_are_copies=True),
    },
    # After 300 steps the gradient has fallen by 45 % of the required 90 %.
    library_causal={
        "Default": LibraryVariant(overfit_steps=600),
        "PreNorm": LibraryVariant(opposite=True, overfit_steps=500),
    },
    fields={
        "position_embedding_type": ConfigField(
            ("rotary", "sinusoidal"),
            bad_in_decoder=("learned", "rotary", "sinusoidal"),
            effect=("sinusoidal", "outputs"),
            encoders_only=True,
        ),
        "reweighting": ConfigField(
            ("cosin", *REWEIGHTINGS), bad_in_decoder=("cosine", *CAUSAL_REWEIGHTINGS), effect=("none", "parameters")
        ),
        "feature_map": ConfigField(("exp", *FEATURE_MAPS), effect=("elu", "outputs")),
        "leap_factor": ConfigField((3, 1, 2, 4), effect=(2, "parameters")),
    },
    mixes=False,
    flash={"full-layer": "flash_varlen"},
    causal_reference=leapformer_reference.attend,
    causal_maps=False,
    state_options={"reweighting": "none", "feature_map": "elu"},
    lora={
        "query-value": Lora(["query", "value"], {"query", "value"}),
        "all-linear": Lora("all-linear", {"query", "key", "value", "dense", "inner", "outer"}),
    },
)


def _keys_of_lavo(config: PreTrainedConfig) -> int:
    """Slots, and places of the window, as far as the output contains them."""
    return 8 * (config.attention_parts != "local") + config.local_window * (config.attention_parts != "global")


_CAUSAL_LAVO: dict[str, Options] = {
    "without-dissection": {"context_dissection": False},
    "without-position-bias": {"window_position_bias": False, "local_window": 4},
    "global": {"attention_parts": "global"},
    "local": {"attention_parts": "local"},
    "no-window": {"local_window": 0},
    "rotary-convolution": {"position_embedding_type": "rotary", "conv_kernel_size": 3},
}
# Tiny windows, and the parts of the attention one by one.
LAVO = Variants(
    encoder={
        "without-dissection": {"context_dissection": False},
        "without-position-bias": {"window_position_bias": False, "local_window": 4},
        "global": {"attention_parts": "global"},
        "global-of-values": {"attention_parts": "global", "context_dissection": False},
        "local": {"attention_parts": "local"},
        "no-window": {"local_window": 0},
        "learned-positions": {"position_embedding_type": "learned"},
        "local-full-layer": {"attention_parts": "local", "full_attention_layers": [0]},
    },
    causal=_CAUSAL_LAVO,
    seq2seq={
        "global": {"attention_parts": "global"},
        "no-window": {"local_window": 0},
        "learned-positions": {"position_embedding_type": "learned"},
    },
    kinds=("default", "prenorm-sinusoidal", "local", "no-window"),
    causal_kinds=("default", "prenorm-sinusoidal", "local", "no-window"),
    library_encoder={
        "Default": LibraryVariant({"local_window": 3}, num_keys=7, maps_are_copies=True),
        "PreNorm": LibraryVariant({"local_window": 3}, opposite=True, num_keys=15, maps_are_copies=True),
        "Local": LibraryVariant({"local_window": 3, "attention_parts": "local"}, num_keys=3, maps_are_copies=True),
        "NoWindow": LibraryVariant({"local_window": 0}),
    },
    library_causal={
        "Default": LibraryVariant({"local_window": 3}, num_keys=7),
        "PreNorm": LibraryVariant({"local_window": 3}, opposite=True, num_keys=15),
    },
    # Without a window: cross-attention has none, and the library expects maps of one width.
    library_seq2seq={
        "Default": LibraryVariant({"local_window": 0}),
        "PreNorm": LibraryVariant({"local_window": 0}, opposite=True, overfit_steps=400),
    },
    fields={
        "local_window": ConfigField((-1,), effect=(7, "outputs")),
        "slot_count_bias": ConfigField(),
        "max_position_embeddings": ConfigField(
            (0,), effect=(80, "parameters"), together={"position_embedding_type": "learned"}, encoders_only=True
        ),
        "position_embedding_type": ConfigField(
            ("rotary", "none", "learned", "sinusoidal"),
            bad_in_decoder=("learned", "none", "rotary", "sinusoidal"),
            effect=("sinusoidal", "outputs"),
        ),
        "attention_parts": ConfigField(("all", *PARTS), effect=("global", "outputs")),
        "context_dissection": ConfigField(effect=(False, "outputs")),
        "window_position_bias": ConfigField(effect=(False, "parameters")),
    },
    sizes={"local_window": 5},
    positions=("none", "none"),
    mixes=False,
    # The window's masks need sdpa.
    flash={
        **dict.fromkeys(("default", "without-dissection", "without-position-bias", "learned-positions"), "flash_dense"),
        **dict.fromkeys(("global", "global-of-values", "no-window"), "flash_dense"),
        "local-full-layer": "flash_varlen",
    },
    causal_reference=lavo_reference.attend,
    unscaled=dict.fromkeys((*COMMON, *_CAUSAL_LAVO), "bases"),  # vectors of length 1
    causal_keys=_keys_of_lavo,
    deviation={"bases": 0.125},  # columns of length 1 with 64 entries
    state_options={"attention_parts": "global", "context_dissection": False, "local_window": 4},
    lora={
        "query-value": Lora(["query", "value"], {"query", "value"}),
        "all-linear": Lora("all-linear", {"query", "key", "value", "dense"}),
    },
)

ROWS: dict[str, Variants] = {"luna": LUNA, "abc_memory": ABC, "leapformer": LEAPFORMER, "lavo": LAVO}
