"""Warm start: a model of this package made from a trained encoder with softmax attention.

Every weight of the encoder is kept unchanged, and so is a masked-LM head, in a masked-LM model. The rules of the
target's family (`warm_start_<family>.py`) make the remaining parameters. A report lists them, and the weights of the
source that are not used, such as a classifier's head.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from ..families.warm_start_rules import BLURRED, INITIALISED, POSITIONS, LoadedSource, WarmStartRules
from ..ops.positions import repeat_positions
from ..registry import FAMILIES, Family
from .source import Source, load_source

logger = logging.get_logger(__name__)


# Fields that the source's weights decide.
_FIXED_FIELDS = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("position_embedding_type", "type_vocab_size", "embedding_layer_norm", "norm_first", "layer_norm_eps"),
    *("embedding_size", "pad_token_id", "tie_word_embeddings", "max_position_embeddings"),
}

# Parameters that every source must have.
_SHARED = re.compile(
    r"embeddings\.|encoder\.layer\.\d+\."
    r"(attention\.self\.(query|key|value)|(attention\.)?output\.(dense|LayerNorm)|intermediate\.dense)\."
)


# ---- the report ----


@dataclass
class WarmStart:
    """What became of every parameter. The first three name each parameter of the new model exactly once.

    Args:
        copied: parameter of the new model -> its name in the source; bitwise equal, or rounded to `dtype`.
        extended: -> what was done to the source's rows (positions only).
        new: -> the rule that made it.
        unused: parameter of the source without a counterpart in the new model -> the reason.
    """

    copied: dict[str, str] = field(default_factory=dict)
    extended: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)

    def lines(self, *kinds: str) -> list[str]:
        """The report to print; layers share a line, and so do weight and bias.

        Args:
            kinds: some of `copied`, `extended`, `new` and `unused`; all by default.
        """
        lines = []
        for kind in kinds or ("copied", "extended", "new", "unused"):
            made = getattr(self, kind)
            lines.append(f"{kind}: {len(made)} parameter{'' if len(made) == 1 else 's'}")
            lines += [f"  {line}" for line in _grouped(made, with_how=kind in ("extended", "new"))]
        return lines

    def warn(self) -> None:
        """Log the new and unused parameters, as `from_pretrained` does."""
        kinds = [kind for kind in ("extended", "new", "unused") if getattr(self, kind)]
        if kinds:
            # A scale of 1 is right for slots that are means, and a good start for others.
            untrained = [name for name in self.new if not name.endswith("slot_scale")]
            title = "Warm-started. New parameters must be trained:" if untrained else "Warm-started:"
            logger.warning("\n".join([title, *self.lines(*kinds)]))


def template_of(name: str) -> tuple[str, str | None]:
    """A name with `{}` for the number of its layer, and that number."""
    match = re.search(r"(?<=\blayer\.)\d+(?=\.)", name)
    return (name, None) if match is None else (f"{name[: match.start()]}{{}}{name[match.end() :]}", match[0])


def _grouped(made: dict[str, str], with_how: bool) -> list[str]:
    """Names with `{0..11}` for the layers and `{weight,bias}` for both, each with how it was made."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name, how in made.items():
        template, layer = template_of(name)
        layers.setdefault((template, template_of(how)[0] if with_how else ""), []).append(layer or "")
    kinds: dict[tuple[str, str], list[str]] = {}
    for (template, how), numbers in layers.items():
        span = numbers[0] if len(numbers) == 1 else f"{{{numbers[0]}..{numbers[-1]}}}"
        stem, dot, kind = template.replace("{}", span).rpartition(".")
        kinds.setdefault((stem + dot, how.replace("{}", span).replace(f".{kind}", ".*")), []).append(kind)
    lines = []
    for (stem, how), own in kinds.items():
        kind = own[0] if len(own) == 1 else f"{{{','.join(sorted(own, reverse=True))}}}"  # weight first
        lines.append(f"{stem}{kind}" + (f": {how.replace('*', kind)}" if how else ""))
    return lines


# ---- the target ----


def _find_family(model_class: type[PreTrainedModel], is_decoder: bool) -> Family:
    """The family of a model class, by model type, since the code in a checkpoint folder defines other classes."""
    family = FAMILIES[model_class.config_class.model_type]
    causal = {causal_class.__name__ for causal_class in family.causal_models}
    if is_decoder or causal & {parent.__name__ for parent in model_class.__mro__}:
        raise ValueError(
            f"A {model_class.__name__} cannot start from an encoder, because its tokens see only earlier ones. Train "
            f"it from scratch, or start a {family.masked_lm.__name__}."
        )
    return family


def _find_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of a name, as in `from_pretrained`; `None` for the source's."""
    if dtype in (None, "auto"):
        return None
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"`dtype` is {dtype!r}, but must be a floating-point type, such as torch.bfloat16.")
    return found


def _target_config(
    config_class: type[PreTrainedConfig], loaded: LoadedSource, max_length: int | None, given: dict[str, Any]
) -> PreTrainedConfig:
    """The config of the new model."""
    own, decided = loaded.values, FAMILIES[config_class.model_type].warm_start.decided
    for name, value in given.items():
        if name in _FIXED_FIELDS:
            raise ValueError(f"The source decides `{name}` ({own.get(name)!r}); only `max_length` adds positions.")
        if name in decided and value != decided[name][0]:
            raise ValueError(f"`{name}={value!r}` is not possible in a warm start: {decided[name][1]}. Leave it out.")
    length = loaded.longest if max_length is None else max_length
    if length < loaded.longest and not given.get("position_period"):
        raise ValueError(
            f"`max_length` is {length}, but the source's {loaded.longest} positions are all kept. Leave it out; the "
            "model also takes shorter texts."
        )
    known, base = ({item.name for item in fields(one)} for one in (config_class, PreTrainedConfig))
    values = {"position_embedding_type": "learned"}  # unless the source says otherwise
    values |= {name: own[name] for name in known & own.keys() - base - {"tie_word_embeddings"}}
    values |= {name: value for name, (value, _) in decided.items()}
    values |= {"max_position_embeddings": length, "tie_word_embeddings": _is_tied(loaded)}
    return config_class(**{**values, **given})


def _is_tied(loaded: LoadedSource) -> bool:
    decoder = loaded.tensors.get("lm_head.decoder.weight")
    if decoder is None:
        return bool(loaded.config.tie_word_embeddings)
    return decoder.data_ptr() == loaded.embedding.data_ptr()


# ---- its parameters ----


class _Maker:
    """Makes the parameters of a new model one by one and records them."""

    def __init__(self, rules: WarmStartRules, model: PreTrainedModel) -> None:
        self.rules, self.loaded, self.model = rules, rules.loaded, model
        self.prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        self.report = WarmStart()
        self.used: set[int] = set()  # addresses: a tied parameter has several names
        self.initialised: set[str] = set()

    def make_all(self) -> dict[str, Tensor]:
        """The values of every parameter, by its name in the new model.

        Raises:
            ValueError: The source lacks a required parameter, or its masked-LM head has another activation than ours.
        """
        named, activation = dict(self.model.named_parameters()), self.loaded.values["hidden_act"]
        has_head = "lm_head.dense.weight" in named and "lm_head.dense.weight" in self.loaded.tensors
        if has_head and self.loaded.layout.fixed_head_activation and activation not in ("gelu", "gelu_python"):
            raise ValueError(
                f"The source's masked-LM head uses gelu but its layers {activation}; ours have one `hidden_act`. Pass "
                "the encoder alone (load it with AutoModel) to start with a new head."
            )
        # Required parameters come first, because rules read them.
        return {name: self.make(name, named[name]) for name in sorted(named, key=lambda name: not self.is_shared(name))}

    def is_head(self, name: str) -> bool:
        """Whether a parameter is not the base model's."""
        return not name.startswith(self.prefix)

    def is_shared(self, name: str) -> bool:
        """Whether the source must have a parameter, in its shape."""
        ours = name.removeprefix(self.prefix)
        has_rule = template_of(ours)[0] in self.rules.table
        return not self.is_head(name) and not has_rule and bool(_SHARED.match(ours))

    def make(self, name: str, empty: Tensor) -> Tensor:
        """The values of one parameter: the source's, the source's with further rows, or new ones.

        Args:
            name: in the new model.
            empty: the parameter, uninitialised.

        Raises:
            ValueError: The source lacks a required parameter, or has it in another shape.
        """
        ours, is_required = name.removeprefix(self.prefix), self.is_shared(name)
        # Of all heads, only the masked-LM head has the same purpose in the source. The bias of its decoder comes first:
        # it can differ from the head's if the matrices are untied.
        own = "lm_head.decoder.bias" if name == "lm_head.bias" else ours
        own = own if own in self.loaded.tensors else ours
        if own not in self.loaded.tensors or (self.is_head(name) and not name.startswith("lm_head.")):
            if is_required:
                raise ValueError(f"The source has no parameter for {name}. Merge any adapters into it first.")
            return self.make_new(name, empty)
        values, own_name = self.loaded.tensors[own], self.loaded.names[own]
        kind, wanted = (self.rules.kind(ours, config) for config in (self.loaded.config, self.model.config))
        fits = values.shape == empty.shape and kind == wanted
        if not fits and not is_required and not self.is_head(name):
            size = " x ".join(map(str, values.shape))
            return self.make_new(name, empty, f"; the source's own ({kind}{', ' * bool(kind)}{size}) does not fit")
        self.used.add(values.data_ptr())
        if ours == POSITIONS and not fits:
            values, self.report.extended[name] = self.extend(values, own_name)
        else:
            self.report.copied[name] = own_name
        return values.clone()

    def extend(self, table: Tensor, own_name: str) -> tuple[Tensor, str]:
        """The position table with our padding rows and the config's positions, and what was done to it."""
        config, trained, first = self.model.config, self.loaded.longest, self.loaded.first
        wanted, length, done = config.first_position, config.position_rows(), [own_name]
        if wanted > first:
            table = torch.cat([table.new_zeros(wanted - first, table.shape[1]), table])
            done.append(f"{wanted - first} row{'s' * (wanted - first > 1)} of zeros added in front for padding")
        if length > trained:
            table = repeat_positions(table, wanted, length)
            done.append(f"its {trained} positions repeated to {length}")
        elif length < trained:
            table = table[: wanted + length]
            done.append(f"the first {length} of its {trained} positions")
        return table, ", ".join(done)

    def make_new(self, name: str, empty: Tensor, but: str = "") -> Tensor:
        """The values that a parameter's rule gives, in the source's dtype; `but` is a remark for the report."""
        template, layer = template_of(name.removeprefix(self.prefix))
        rule = INITIALISED if self.is_head(name) else self.rules.rule(template).replace("{}", layer or "")
        source = rule.removesuffix(BLURRED)
        copied = self.loaded.names.get(source)
        made = f"a copy of the source's {copied}" if copied else source
        self.report.new[name] = made + rule.removeprefix(source) + but
        if rule == INITIALISED:
            self.initialise(name.rpartition(".")[0])
            values = empty.detach().clone()
        else:
            values = self.rules.make(rule, layer, empty)
        return values.to(self.loaded.embedding)

    def initialise(self, owner: str) -> None:
        """Initialise a module's own parameters, once."""
        if owner not in self.initialised:
            self.initialised.add(owner)
            self.model._init_weights(self.model.get_submodule(owner))

    def finish(self) -> WarmStart:
        """The report, with the source's unused parameters."""
        unused = {}  # by address
        for own, tensor in self.loaded.tensors.items():
            unused.setdefault(tensor.data_ptr(), self.loaded.names[own])
        names = [name for address, name in unused.items() if address not in self.used]
        self.report.unused = dict.fromkeys([*names, *self.loaded.ignored], "no counterpart")
        return self.report


def _check_finite(tensors: dict[str, Tensor], problem: str) -> None:
    """Refuse NaN and infinities; `problem` completes the message after the name of a tensor."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} {problem}")


def warm_start(
    model_class: type[PreTrainedModel],
    source: Source,
    *,
    max_length: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    preset: str | None = None,
    allow_pickle: bool = False,
    **given: Any,
) -> tuple[PreTrainedModel, WarmStart]:
    """A model of this package that starts from a trained encoder with softmax attention and learned positions.

    All weights of the encoder are kept, bitwise unless `dtype` is given. A masked-LM model also keeps the source's
    masked-LM head. No other head of the source is used: a classifier's starts as in a new model, and the source's is
    listed under `unused`. The family's rules make what the source lacks.

    Args:
        model_class: an encoder of this package, with any head or none.
        source: folder, Hub name, or a model in memory (which is not changed): RoBERTa, XLM-R, CamemBERT, data2vec-text,
            BERT, DistilBERT, ELECTRA, the transformer of a sentence-transformers model, or a model of a family with a
            `layout` in its rules, which keeps its fields unless others are given; with any head or none.
        max_length: longest input in tokens, if longer than the source's: its positions are then repeated, in the table
            (`repeat_positions`) or, with a `position_period`, by their ids.
        seed: of everything drawn or initialised. Global random states are not affected.
        dtype: of the new model's parameters, such as `torch.bfloat16` or "bfloat16"; the source's if `None` or "auto".
        preset: name of an entry of the config's `presets`, whose fields are used unless others are given. With
            "selected", where a family has it, texts are read much as by the source, without any training.
        allow_pickle: whether to read weights from a pickle, which can run code, where there are no safetensors.
        given: fields of the new model's config (size of the memory, `conv_kernel_size`, `num_labels`, dropouts,
            `attn_implementation`, ...), and options of the family's rules, documented in their class.

    Returns:
        The model in eval mode, and what became of every parameter.

    Raises:
        ValueError: The model is causal; the source cannot be read or mapped; a weight of it is not finite, or not in
            `dtype`, or `dtype` is no floating-point type; a field is unknown or decided by the source; there would be
            fewer positions than the source's; or the family's rules refuse.
    """
    family = _find_family(model_class, given.pop("is_decoder", False))
    if preset is not None:
        given = {**model_class.config_class.preset_fields(preset), **given}
    dtype = _find_dtype(given.pop("torch_dtype", dtype))  # the name before transformers 5
    options = {name: given.pop(name) for name in family.warm_start.options() if name in given}
    with torch.random.fork_rng(devices=[]):
        loaded = load_source(source, allow_pickle)
        weights = {loaded.names[name]: tensor for name, tensor in loaded.tensors.items()}
        _check_finite(weights, "of the source holds NaN or infinity. Use an earlier checkpoint.")
        config = _target_config(model_class.config_class, loaded, max_length, given)
        rules = family.warm_start(loaded, config, seed, **options)
        rules.check()
        with no_init_weights():
            model = model_class(config)
        model.tie_weights()
        torch.manual_seed(seed)
        maker = _Maker(rules, model)
        made = maker.make_all()
    report = maker.finish()
    if dtype is not None:
        made = {name: values.to(dtype) for name, values in made.items()}
        _check_finite(made, f"has values that are too large for {dtype}. Choose torch.bfloat16 or torch.float32.")
    model.load_state_dict(made, strict=False, assign=True)
    model.tie_weights()
    model.to(loaded.embedding.device)
    model.config.dtype = dtype or loaded.embedding.dtype
    return model.eval(), report
