"""The models: encoders by name, and the classifier that they share.

To add your own model, write a class of about ten lines that maps embedded tokens (b, n, d) to states of the same shape;
the classifier embeds, pools and classifies. In your file:

    from lra.models import register
    from luna_hf.ops.tokens import masked_mean
    from torch import nn

    @register("average")
    class Average(nn.Module):
        def __init__(self, recipe, length):
            super().__init__()
            self.mix = nn.Linear(recipe.hidden_size, recipe.hidden_size)

        def forward(self, inputs_embeds, attention_mask):  # the mask is 0 at padding, or None if there is none
            mean = masked_mean(inputs_embeds, None if attention_mask is None else attention_mask != 0)
            return inputs_embeds + self.mix(mean.unsqueeze(1))

    python benchmarks/lra/run.py --task listops --model average --plugin average.py
"""

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers as hf
from common.options import did_you_mean
from measuring import slots_of
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from luna_hf import FAMILIES, LavoConfig
from luna_hf.models.encoder_heads import TokenPooling, cross_entropy
from luna_hf.scripting import UserError

from .recipes import Recipe

if TYPE_CHECKING:
    from .tasks import Task

# Makes an encoder from a recipe and the longest input, its class token included.
Encoder = Callable[[Recipe, int], nn.Module]
ENCODERS: dict[str, Encoder] = {}
PLUGINS: dict[str, str] = {}  # hash of the file that registered an encoder, by name
# The families' models; those with slots also take their number, as in `luna-16`.
_ABC, _LEAP = "abc_memory", "leapformer"
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0}  # linear attention has no weights to drop
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "luna": ("luna", {"tie_kv": False}),
    "luna-tied": ("luna", {"tie_kv": True}),
    "luna-packed": ("luna", {"tie_kv": False, "classifier_pooling": "packed_mean"}),
    "abc": (_ABC, {}),
    "linformer": (_ABC, {"memory_control": "linformer", "share_control": False}),
    "leapformer": (_LEAP, {"leap_factor": 1, **_NO_DROPOUT}),
    "cosformer": (_LEAP, {"reweighting": "cosine", **_NO_DROPOUT}),
    "linear": (_LEAP, {"reweighting": "none", "feature_map": "elu", **_NO_DROPOUT}),
    "lavo": ("lavo", LavoConfig.presets["lra"]),
}


def register(name: str) -> Callable[[Encoder], Encoder]:
    """Add an encoder under a name: a function, or a class, of a recipe and the longest input."""

    def add(encoder: Encoder) -> Encoder:
        ENCODERS[name] = encoder
        return encoder

    return add


def load_plugin(path: Path) -> None:
    """Run a Python file that registers encoders.

    Raises:
        UserError: There is no such file.
    """
    if not path.is_file():
        raise UserError(f"--plugin {path} is not a file.")
    before = dict(ENCODERS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    content = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    PLUGINS.update({name: content for name, encoder in ENCODERS.items() if before.get(name) is not encoder})


# ---- encoders ----


def _body(recipe: Recipe, length: int) -> dict[str, Any]:
    """What the config of a family and that of RoBERTa have in common. The classifier has the token embedding."""
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "initializer_range")
    shared += ("hidden_dropout_prob", "attention_probs_dropout_prob")
    special = {"vocab_size": 1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return {**{name: getattr(recipe, name) for name in shared}, **special, "max_position_embeddings": length}


def _library(family: str, fields: dict[str, Any], recipe: Recipe, length: int, slots: int | None = None) -> nn.Module:
    names = ("norm_first", "embedding_layer_norm", "position_embedding_type", "classifier_pooling")
    own = {**{name: getattr(recipe, name) for name in names}, **slots_of(family, recipe.slots), **fields}
    own |= slots_of(family, slots) if slots else {}
    kind = FAMILIES[family]
    return kind.base_model(kind.config(**_body(recipe, length) | own))


def _window(recipe: Recipe, length: int) -> nn.Module:
    return _library(_ABC, {"memory_control": "sliding_window", "memory_size": recipe.window}, recipe, length)


def _roberta(backend: str, recipe: Recipe, length: int) -> nn.Module:
    """The RoBERTa of transformers, post- or pre-norm.

    Raises:
        ValueError: The recipe asks for other positions than learned ones.
    """
    if recipe.position_embedding_type != "learned":
        raise ValueError("transformers' RoBERTa has learned positions only: set `position_embedding_type: learned`.")
    name = "RobertaPreLayerNorm" if recipe.norm_first else "Roberta"
    own = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "attn_implementation": backend}
    fields = {**_body(recipe, length + 1), **own}  # the position table has a row for padding
    encoder = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**fields), add_pooling_layer=False)
    if not recipe.embedding_layer_norm:
        encoder.embeddings.LayerNorm = nn.Identity()
    return encoder


for _name, (_family, _fields) in VARIANTS.items():
    register(_name)(partial(_library, _family, _fields))
register("window")(_window)
register("roberta")(partial(_roberta, "sdpa"))
register("roberta-eager")(partial(_roberta, "eager"))


def find_encoder(name: str) -> Encoder:
    """An encoder by name; a number behind that of a family with slots is their number.

    Raises:
        UserError: There is none.
    """
    if name in ENCODERS:
        return ENCODERS[name]
    base, _, slots = name.rpartition("-")
    if slots.isdecimal() and int(slots) and base in VARIANTS and slots_of(VARIANTS[base][0], 1):
        return partial(ENCODERS[base], slots=int(slots))
    raise UserError(
        f"There is no model {name!r}.{did_you_mean(name, ENCODERS)} Models: {', '.join(ENCODERS)}; with slots, "
        "luna-16. A model of your own needs --plugin."
    )


def pooling_of(encoder: nn.Module, recipe: Recipe) -> nn.Module:
    """The pooling of a family's own heads, or that of the token states."""
    config = getattr(encoder, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        return TokenPooling(recipe)
    return family.model("ForSequenceClassification").pooling_class(config)


class SharedLayer(nn.ModuleList):
    """One layer that stands for several with the same weights."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__([layer])
        self.times = times

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self[0]] * self.times)


# ---- the classifier ----


class PixelValues(nn.Linear):
    """Embedding of real numbers: the value of a pixel, from -1 to 1, times a learned vector, and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed grey levels (b, n), from 0 to 255: (b, n, d)."""
        return super().forward((pixels.to(self.weight.dtype) / 127.5 - 1).unsqueeze(-1))


def pair_features(first: Tensor, second: Tensor) -> Tensor:
    """Features of two texts (b, d) that are read separately: (b, 4 d)."""
    return torch.cat([first, second, first * second, first - second], -1)


class Classifier(nn.Module):
    """Embeds tokens or pixels, encodes, pools, and classifies with one hidden layer.

    Args:
        task: what is classified.
        recipe: sizes, pooling and the embedding of pixels.
        encoder: makes the encoder.
    """

    def __init__(self, task: "Task", recipe: Recipe, encoder: Encoder) -> None:
        super().__init__()
        width, has_class_token = recipe.hidden_size, recipe.classifier_pooling == "cls"
        self.encoder = encoder(recipe, task.max_length + has_class_token)
        if hasattr(self.encoder, "set_input_embeddings"):
            self.encoder.set_input_embeddings(None)
        if recipe.share_layers:
            stack = getattr(self.encoder, "encoder", None)
            if not hasattr(stack, "layer"):
                raise ValueError("layers can be shared only by a model that has them as `encoder.layer`.")
            stack.layer = SharedLayer(stack.layer[0], recipe.num_hidden_layers)
        if task.inputs == "pixels" and recipe.pixels == "values":
            self.embedding: nn.Module = PixelValues(width)
        else:
            self.embedding = nn.Embedding(task.vocab_size, width)
            nn.init.normal_(self.embedding.weight, std=recipe.initializer_range)
        self.class_token = nn.Parameter(recipe.initializer_range * torch.randn(width)) if has_class_token else None
        self.pooling = pooling_of(self.encoder, recipe)
        features = width * (4 if task.inputs == "pairs" else 1)
        inner = recipe.classifier_hidden_size
        self.head = nn.Sequential(nn.Linear(features, inner), nn.ReLU(), nn.Linear(inner, task.num_labels))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_2: Tensor | None = None,
        attention_mask_2: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids: (b, n) tokens, of the first text in a pair.
            attention_mask: (b, n), 0 at padding; `None` if there is none.
            input_ids_2, attention_mask_2: of the second text.
            pixel_values: (b, n) grey levels, instead of tokens.
            labels: (b,) classes.

        Returns:
            `logits` (b, classes), and with labels the `loss`.
        """
        pooled = self.encode(pixel_values if input_ids is None else input_ids, attention_mask)
        if input_ids_2 is not None:
            pooled = pair_features(pooled, self.encode(input_ids_2, attention_mask_2))
        logits = self.head(pooled)
        return SequenceClassifierOutput(loss=None if labels is None else cross_entropy(logits, labels), logits=logits)

    def encode(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """One vector for each row of (b, n) tokens or pixels: (b, d)."""
        states = self.embedding(inputs.long() if isinstance(self.embedding, nn.Embedding) else inputs)
        if self.class_token is not None:
            states = torch.cat([self.class_token.to(states.dtype).expand(len(states), 1, -1), states], 1)
            mask = None if mask is None else nn.functional.pad(mask, (1, 0), value=1)
        outputs = self.encoder(inputs_embeds=states, attention_mask=mask)
        if isinstance(outputs, Tensor):
            outputs = BaseModelOutput(last_hidden_state=outputs)
        if outputs.last_hidden_state.shape != states.shape:
            found, wanted = tuple(outputs.last_hidden_state.shape), tuple(states.shape)
            raise UserError(f"{type(self.encoder).__name__} returned states of shape {found} instead of {wanted}.")
        return self.pooling(outputs, None if mask is None else mask != 0)


def build(name: str, task: "Task", recipe: Recipe) -> Classifier:
    """A randomly initialised classifier.

    Raises:
        UserError: There is no such model, or it cannot have the sizes of the recipe.
    """
    encoder = find_encoder(name)
    try:
        return Classifier(task, recipe, encoder)
    except ValueError as error:
        raise UserError(f"{name} cannot be built with the recipe {recipe.name}: {error}") from error
