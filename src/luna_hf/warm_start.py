"""Warm start: a model of this package made from a trained encoder of RoBERTa's architecture.

Every weight of the source is kept as it is. What the target has besides (a memory control, a packed sequence, a
convolution) is made by a rule that a table here names, and reported.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from .positions import repeat_positions
from .warm_start_control import place_states, pseudo_queries, spread_places
from .warm_start_source import HEAD_NAMES, LoadedSource, Source, load_source

logger = logging.get_logger(__name__)


# ---- how new parameters are made ----

# A rule is the source's name whose values are taken, or one of these words.
INITIALISED = "initialised as in a new model"
ZERO = "zero"
IDENTITY = "the identity"
TEXT_TOKENS = "embeddings of text tokens at evenly spread positions, before their LayerNorm"
OWN_ATTENTION = "the source's own attention from evenly spread positions"
_WORDS = (INITIALISED, ZERO, IDENTITY, TEXT_TOKENS, OWN_ATTENTION)

_ATTENTION = "encoder.layer.{}.attention"
_SHARED_RULES = {
    # A swapped model starts as it would without the convolution.
    f"{_ATTENTION}.convolution.weight": ZERO,
    **dict.fromkeys(HEAD_NAMES, INITIALISED),
}
# Luna's pack reads with the teacher's queries and keys and hands on token states as they are; the unpack attention is
# the teacher's own, and its biases pass, since attention weights sum to one.
RULES: dict[str, dict[str, str]] = {
    "abc_memory": {
        "control.weight": OWN_ATTENTION,
        f"{_ATTENTION}.self.control.weight": OWN_ATTENTION,
        **_SHARED_RULES,
    },
    "luna": {
        "packed_embeddings.weight": TEXT_TOKENS,
        "packed_embeddings.LayerNorm.weight": "embeddings.LayerNorm.weight",
        "packed_embeddings.LayerNorm.bias": "embeddings.LayerNorm.bias",
        f"{_ATTENTION}.self.pack.query.weight": f"{_ATTENTION}.self.query.weight",
        f"{_ATTENTION}.self.pack.query.bias": f"{_ATTENTION}.self.query.bias",
        f"{_ATTENTION}.self.pack.key.weight": f"{_ATTENTION}.self.key.weight",
        f"{_ATTENTION}.self.pack.key.bias": f"{_ATTENTION}.self.key.bias",
        f"{_ATTENTION}.self.pack.value.weight": IDENTITY,
        f"{_ATTENTION}.self.pack.value.bias": ZERO,
        f"{_ATTENTION}.self.packed_layer_norm.weight": f"{_ATTENTION}.output.LayerNorm.weight",
        f"{_ATTENTION}.self.packed_layer_norm.bias": f"{_ATTENTION}.output.LayerNorm.bias",
        **_SHARED_RULES,
    },
}
_POSITIONS = "embeddings.position_embeddings.weight"

# Fields that the weights decide: the source has them, nobody else.
_FIXED_FIELDS = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("position_embedding_type", "type_vocab_size", "embedding_layer_norm", "norm_first", "layer_norm_eps"),
    *("pad_token_id", "tie_word_embeddings"),
}


# ---- the report ----


@dataclass
class WarmStart:
    """What became of every parameter. The first three name each parameter of the new model exactly once.

    Args:
        copied: parameter of the new model -> the source's name for it; bitwise equal.
        extended: -> what was done to the source's rows (positions only).
        new: -> the rule it was made by.
        unused: parameter of the source that no parameter of the new model stands for -> why.
    """

    copied: dict[str, str] = field(default_factory=dict)
    extended: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)

    def lines(self, *kinds: str) -> list[str]:
        """The report to print, layers and weight with bias on one line.

        Args:
            kinds: of `copied`, `extended`, `new`, `unused`; all of them if none is given.
        """
        lines = []
        for kind in kinds or ("copied", "extended", "new", "unused"):
            made = getattr(self, kind)
            lines.append(f"{kind}: {len(made)} parameter{'' if len(made) == 1 else 's'}")
            lines += [f"  {line}" for line in _grouped(made, with_how=kind in ("extended", "new"))]
        return lines

    def warn(self) -> None:
        """Log the new and the unused parameters, as `from_pretrained` does."""
        kinds = [kind for kind in ("extended", "new", "unused") if getattr(self, kind)]
        if kinds:
            said = "Warm-started. What is new has to be trained on text:" if self.new else "Warm-started:"
            logger.warning("\n".join([said, *self.lines(*kinds)]))


def _template(name: str) -> tuple[str, str | None]:
    """A name with `{}` for the number of its layer, and that number."""
    match = re.search(r"(?<=\blayer\.)\d+(?=\.)", name)
    return (name, None) if match is None else (f"{name[: match.start()]}{{}}{name[match.end() :]}", match[0])


def _grouped(made: dict[str, str], with_how: bool) -> list[str]:
    """Names with `{0..11}` for the layers and `{weight,bias}` for both, each with how it was made."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name, how in made.items():
        template, layer = _template(name)
        numbers = layers.setdefault((template, _template(how)[0] if with_how else ""), [])
        numbers += [] if layer is None else [int(layer)]
    stems: dict[tuple[str, str], list[str]] = {}
    for (template, how), numbers in layers.items():
        span = "" if not numbers else f"{{{min(numbers)}..{max(numbers)}}}" if len(numbers) > 1 else str(numbers[0])
        stem, _, last = template.replace("{}", span).rpartition(".")
        # A copy of `b.weight` and one of `b.bias` stand on one line.
        how = how.replace("{}", span).removesuffix(last) + "*" if how.endswith(f".{last}") else how
        stems.setdefault((stem, how), []).append(last)
    lines = []
    for (stem, how), lasts in stems.items():
        last = lasts[0] if len(lasts) == 1 else f"{{{','.join(sorted(lasts, reverse=True))}}}"  # weight first
        name = f"{stem}.{last}" if stem else last
        lines.append(f"{name}: {how.removesuffix('*')}{last if how.endswith('*') else ''}" if how else name)
    return lines


# ---- the target ----


def _target_config(
    config_class: type[PreTrainedConfig], loaded: LoadedSource, max_length: int | None, given: dict[str, Any]
) -> PreTrainedConfig:
    """The config of the new model.

    Raises:
        ValueError: A field that the source decides, an unknown one, a value that the config refuses, fewer positions.
    """
    known = {item.name for item in fields(config_class)}
    for name in given:
        if name == "max_position_embeddings":
            raise ValueError("Give `max_length` (tokens) instead of `max_position_embeddings`.")
        if name in _FIXED_FIELDS:
            raise ValueError(
                f"`{name}` follows from the source ({getattr(loaded.config, name, None)!r}). Leave it out."
            )
        if name not in known and name != "attn_implementation":
            # Near misses are named by the config; anything else it would keep without a word.
            config_class(**{name: given[name]})
            raise ValueError(f"{config_class.__name__} has no field `{name}`.")
    length = loaded.longest if max_length is None else max_length
    if length < loaded.longest:
        raise ValueError(
            f"`max_length` is {length}, but the source has positions for {loaded.longest} tokens, and none is thrown "
            "away. Leave it out, and give shorter texts to the model."
        )
    base = {item.name for item in fields(PreTrainedConfig)}
    shared = known & {item.name for item in fields(loaded.config)} - base - {"tie_word_embeddings"}
    values = {name: getattr(loaded.config, name) for name in shared}
    values |= {"max_position_embeddings": length, "tie_word_embeddings": _is_tied(loaded)}
    if "tie_kv" in known:
        if given.get("tie_kv"):
            raise ValueError(
                "`tie_kv=True` cannot be warm-started: the source has a key and a value matrix where a tied Luna has "
                "one for both. Leave it out."
            )
        values["tie_kv"] = False
    return config_class(**{**values, **given})


def _is_tied(loaded: LoadedSource) -> bool:
    decoder = loaded.tensors.get(loaded.layout.head["lm_head.decoder.weight"][0])
    if decoder is None:
        return bool(loaded.config.tie_word_embeddings)
    return decoder.data_ptr() == loaded.embedding.data_ptr()


def _check_pair(loaded: LoadedSource, config: PreTrainedConfig) -> None:
    """Refuse what the target would compute otherwise than the source.

    Raises:
        ValueError: What differs, and the way round it.
    """
    source = loaded.config
    has_head = loaded.layout.head["lm_head.dense.weight"][0] in loaded.tensors
    if has_head and loaded.layout.fixed_head_activation and source.hidden_act not in ("gelu", "gelu_python"):
        raise ValueError(
            f"The source's masked-LM head uses gelu and its layers {source.hidden_act}; here both use `hidden_act`. "
            "Give the encoder without its head (load it with AutoModel): the head is then made anew."
        )
    plain = {"norm_first": False, "position_embedding_type": "learned", "embedding_layer_norm": True}
    if config.model_type == "luna" and any(getattr(config, name) != value for name, value in plain.items()):
        raise ValueError(
            "Luna is warm-started from post-norm encoders with learned positions and a LayerNorm on the embeddings, as "
            "RoBERTa's; the source has others."
        )


def _check_control_init(loaded: LoadedSource, config: PreTrainedConfig, control_init: str | None) -> None:
    """Refuse a start that the control cannot have.

    Raises:
        ValueError: Why, and what to do.
    """
    if control_init is None:
        return
    if getattr(config, "memory_control", None) not in ("mlp", "linformer"):
        raise ValueError("`control_init` is for ABC's learned controls, `mlp` and `linformer`. Leave it out.")
    if control_init == "attention" and not _can_start_control(loaded, config):
        reason = "the source's attention does not read embedded positions and a norm alone"
        if config.memory_control == "mlp" and config.control_activation != "exp":
            reason = f"`control_activation` {config.control_activation!r} weighs tokens otherwise than attention"
        raise ValueError(f"`control_init` cannot be 'attention': {reason}. Leave it out, to start at random.")


# Slots for each token of the longest input; beyond them a size is a slip of the pen, and no memory would hold it.
_MOST_SLOTS = 100


def _check_slots(config: PreTrainedConfig) -> None:
    """Refuse a memory far larger than any text, before it is allocated.

    Raises:
        ValueError: Its size, and the longest input.
    """
    name = "memory_size" if hasattr(config, "memory_size") else "projection_length"
    slots, longest = getattr(config, name), config.max_position_embeddings
    if slots > _MOST_SLOTS * longest and getattr(config, "memory_control", None) != "full":
        raise ValueError(
            f"`{name}` is {slots:,}, but inputs are at most {longest:,} tokens long: give no more slots than tokens."
        )


def _draw_slot_tokens(loaded: LoadedSource, slots: int, text: Sequence[int] | Tensor | None, seed: int) -> Tensor:
    """(slots,) ids: of a text, each token as likely; or of the vocabulary.

    Raises:
        ValueError: The text is empty, or has ids that the vocabulary has not.
    """
    config, generator = loaded.config, torch.Generator().manual_seed(seed)
    special = [config.pad_token_id, config.bos_token_id, config.eos_token_id]
    special = torch.tensor([token for token in special if isinstance(token, int)])
    if text is not None:
        ids = torch.as_tensor(text, dtype=torch.long).flatten()
        ids = ids[~torch.isin(ids, special)]
        if not len(ids):
            raise ValueError("`slot_tokens` holds no tokens besides special ones. Give the ids of a text.")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(
                f"`slot_tokens` holds ids up to {int(ids.max())}, but the vocabulary has {config.vocab_size}. "
                "Use the source's own tokenizer."
            )
        return ids[torch.randint(len(ids), (slots,), generator=generator)]
    ids = torch.arange(config.vocab_size)
    ids = ids[~torch.isin(ids, special)]
    ranks = torch.arange(1, len(ids) + 1, dtype=torch.float64)
    weights = 1 / ranks if loaded.layout.ordered_vocabulary else torch.ones_like(ranks)
    return ids[torch.multinomial(weights, slots, replacement=True, generator=generator)]


def _start_control(loaded: LoadedSource, config: PreTrainedConfig, layer: str) -> Tensor:
    """(h * m, d) for a learned control, (h * m, N) for Linformer's: its maps as they are over places without words."""
    tensors, positions = loaded.tensors, loaded.tensors[_POSITIONS][loaded.first :]
    segments = tensors.get("embeddings.token_type_embeddings.weight")
    norm = tuple(tensors[f"embeddings.LayerNorm.{kind}"] for kind in ("weight", "bias"))
    states = place_states(positions, None if segments is None else segments[0], norm, config.layer_norm_eps)
    projections = f"{_ATTENTION}.self.".replace("{}", layer)
    query = tuple(tensors[f"{projections}query.{kind}"] for kind in ("weight", "bias"))
    asking = states[spread_places(config.memory_size, loaded.longest)]
    weight = pseudo_queries(asking, query, tensors[f"{projections}key.weight"], config.num_attention_heads)
    if config.memory_control == "mlp":
        return weight
    repeats = -(-config.max_position_embeddings // loaded.longest)
    return (weight @ states.repeat(repeats, 1)[: config.max_position_embeddings].T).softmax(-1)


def _can_start_control(loaded: LoadedSource, config: PreTrainedConfig) -> bool:
    """Whether the source's attention reads embedded positions, and ABC's control weighs tokens as attention does."""
    plain = loaded.first + loaded.longest == len(loaded.tensors.get(_POSITIONS, ()))
    plain &= "embeddings.LayerNorm.weight" in loaded.tensors and not getattr(config, "norm_first", False)
    return plain and (config.memory_control == "linformer" or config.control_activation == "exp")


def _embed_slots(loaded: LoadedSource, tokens: Tensor) -> Tensor:
    """(l, d): the source's embeddings of the tokens, at positions spread evenly over those it was trained on."""
    places = spread_places(len(tokens), loaded.longest) + loaded.first
    parts = [loaded.embedding[tokens], loaded.tensors[_POSITIONS][places]]
    segments = loaded.tensors.get("embeddings.token_type_embeddings.weight")
    parts += [] if segments is None else [segments[:1]]
    return sum(part.float() for part in parts)


class _Maker:
    """Makes the parameters of a new model one by one, and keeps the report."""

    def __init__(
        self, loaded: LoadedSource, model: PreTrainedModel, packed: Tensor | None, control_init: str | None
    ) -> None:
        self.loaded, self.model, self.packed = loaded, model, packed
        self.rules = RULES[model.config.model_type]
        is_abc = hasattr(model.config, "memory_control")
        if control_init == "random" or (is_abc and not _can_start_control(loaded, model.config)):
            self.rules = {name: INITIALISED if rule == OWN_ATTENTION else rule for name, rule in self.rules.items()}
        self.report = WarmStart()
        self.used: set[int] = set()  # addresses: a tied parameter has several names
        self.initialised: set[str] = set()

    def shorten(self, name: str) -> str:
        """A parameter's name without that of the base model."""
        return name.removeprefix(self.model.base_model_prefix + ".")

    def has_rule(self, name: str) -> bool:
        """Whether a parameter can be made without one of the source."""
        return _template(self.shorten(name))[0] in self.rules

    def make(self, name: str, empty: Tensor) -> Tensor:
        """The values of one parameter: the source's, its rows extended, or by the rule for its name.

        Args:
            name: in the new model.
            empty: the parameter, with nothing in it yet.

        Raises:
            ValueError: The source has it in another shape, or neither has it nor is there a rule.
        """
        ours = self.shorten(name)
        template, layer = _template(ours)
        own = self.find(ours, template, empty)
        if own is None:
            if template not in self.rules:
                raise ValueError(self.lacking(name))
            rule = self.rules[template].replace("{}", layer or "")
            how = rule if rule in _WORDS else f"a copy of the source's {self.loaded.names[rule]}"
            self.report.new[name] = how + self.left_out(ours)
            return self.apply(rule, name, empty)
        values, own_name = self.loaded.tensors[own], self.loaded.names[own]
        self.used.add(values.data_ptr())
        if ours == _POSITIONS and values.shape != empty.shape:
            values, self.report.extended[name] = self.extend(values, own_name)
        elif values.shape == empty.shape:
            self.report.copied[name] = own_name
        else:
            raise ValueError(
                f"The source's {own_name} has the shape {tuple(values.shape)}, but by its config it is "
                f"{tuple(empty.shape)}: files and config do not belong together."
            )
        return values.clone()

    def find(self, ours: str, template: str, empty: Tensor) -> str | None:
        """The source's parameter that stands for one of ours."""
        head = self.loaded.layout.head
        own = next((own for own in head.get(ours, (ours,)) if own in self.loaded.tensors), None)
        if own is None or ours in head or template not in self.rules:
            return own
        # Optional parts of an ABC source: taken over where they are of the same kind and size.
        source, config = self.loaded.config, self.model.config
        same_kind = "control." not in ours or source.memory_control == config.memory_control
        return own if same_kind and self.loaded.tensors[own].shape == empty.shape else None

    def left_out(self, ours: str) -> str:
        """That an ABC source has an optional part of its own, which does not fit; empty if it has none."""
        if ours in HEAD_NAMES or ours not in self.loaded.tensors:
            return ""
        kind = f"{self.loaded.config.memory_control}, " if "control." in ours else ""
        return f"; the source's own ({kind}{' x '.join(map(str, self.loaded.tensors[ours].shape))}) does not fit"

    def extend(self, table: Tensor, own_name: str) -> tuple[Tensor, str]:
        """The table of positions with our rows in front and `max_position_embeddings` behind, and what was done."""
        config, trained, first = self.model.config, self.loaded.longest, self.loaded.first
        wanted, length = config.pad_token_id + 1, config.max_position_embeddings
        if table.shape[0] != first + trained:
            raise ValueError(
                f"The source's {own_name} has {table.shape[0]} rows, but by its config {first + trained}: files and "
                "config do not belong together."
            )
        done = [own_name]
        if wanted > first:
            table = torch.cat([table.new_zeros(wanted - first, table.shape[1]), table])
            done.append(f"{wanted - first} row{'s' * (wanted - first > 1)} of zeros in front, as padding has positions")
        if length > trained:
            table = repeat_positions(table, wanted, length)
            done.append(f"its {trained} positions repeated to {length}")
        return table, ", ".join(done)

    def apply(self, rule: str, name: str, empty: Tensor) -> Tensor:
        """The values that a rule gives, in the source's type."""
        like = self.loaded.embedding
        if rule == INITIALISED:
            self.initialise(name.rpartition(".")[0])
            values = empty.detach().clone()
        elif rule == ZERO:
            values = torch.zeros_like(empty)
        elif rule == IDENTITY:
            values = torch.eye(len(empty))
        elif rule == TEXT_TOKENS:
            values = self.packed
        elif rule == OWN_ATTENTION:
            values = _start_control(self.loaded, self.model.config, _template(name)[1] or "0")
        else:
            values = self.loaded.tensors[rule].clone()
        return values.to(like)

    def lacking(self, name: str) -> str:
        """Why there is no value for a parameter."""
        if name.startswith(self.model.base_model_prefix + "."):
            return f"The source has no parameter for {name}. Adapters have to be merged into it first."
        return (
            f"There is no rule for {name}. A warm start makes masked-LM models: save one, and load it into another "
            "class with `from_pretrained`."
        )

    def finish(self) -> WarmStart:
        """The report, with the parameters of the source that were not used."""
        tensors, names = self.loaded.tensors, self.loaded.names
        unused = [names[own] for own, tensor in tensors.items() if tensor.data_ptr() not in self.used]
        self.report.unused = dict.fromkeys([*unused, *self.loaded.ignored], "no place for it")
        return self.report

    def initialise(self, owner: str) -> None:
        """Initialise a module's own parameters, all of them once."""
        if owner not in self.initialised:
            self.initialised.add(owner)
            self.model._init_weights(self.model.get_submodule(owner))


def warm_start(
    model_class: type[PreTrainedModel],
    source: Source,
    *,
    max_length: int | None = None,
    slot_tokens: Sequence[int] | Tensor | None = None,
    control_init: str | None = None,
    seed: int = 0,
    **fields: Any,
) -> tuple[PreTrainedModel, WarmStart]:
    """A masked-LM model of this package that starts from a trained encoder of RoBERTa's architecture.

    All weights of the encoder and of its masked-LM head are kept bitwise, in their type; a source without such a head
    leaves it to be trained. How the rest is made is said in `RULES`.

    Args:
        model_class: `AbcForMaskedLM` or `LunaForMaskedLM`.
        source: folder, name on the Hub, or a model in memory (which stays as it is): RoBERTa, XLM-R, CamemBERT,
            data2vec-text, BERT, or an ABC model (whose own fields stay where none are given); with any head or none.
        max_length: tokens that the model must take, if more than the source does: its positions are then repeated
            (`functional.repeat_positions`).
        slot_tokens: for Luna, the token ids of a text, from which the packed embeddings' tokens are drawn. Without it
            they are drawn from the vocabulary by Zipf's law, which is a fair guess where ids go from frequent to rare
            (RoBERTa's and its sisters' do), and uniformly for BERT and ABC sources, where they do not.
        control_init: for ABC's learned controls. `"attention"`, the default, starts every slot as the source's own
            attention (that of the first layer, where the layers share the control) from one of `memory_size` evenly
            spread positions; `"random"` as in a new model, which is the paper's way and takes far longer to recover.
            Where the control weighs tokens otherwise than attention (`mlp` with relu or sigmoid), or the source's
            embeddings have no learned positions and norm, it starts at random; the report says which it was. The
            trained control of an ABC source is kept where it fits: in kind and in shape, which for Linformer is that of
            the longest input.
        seed: of what is drawn or initialised. Global random numbers go on as if nothing had been drawn.
        fields: of the new model's config: `memory_control`, `memory_size`, `projection_length`, `conv_kernel_size`,
            `num_projected_attention_heads` (other pack heads than the source's cut its queries and keys where they were
            not trained to be cut: each pack head then mixes parts of the source's), dropouts, `attn_implementation`.

    Returns:
        The model in eval mode, and what became of every parameter.

    Raises:
        ValueError: A source that cannot be mapped or read; a field that is unknown or follows from the source; fewer
            positions than the source's; more slots than texts can have tokens, by far; a `control_init` that the
            control cannot have; `tie_kv=True` for Luna, since the source has two matrices.
    """
    if control_init not in (None, "attention", "random"):
        raise ValueError(f"`control_init` is {control_init!r}, but must be 'attention' or 'random'.")
    with torch.random.fork_rng(devices=[]):
        loaded = load_source(source)
        config = _target_config(model_class.config_class, loaded, max_length, fields)
        _check_pair(loaded, config)
        _check_control_init(loaded, config, control_init)
        _check_slots(config)
        packed = None
        if hasattr(config, "projection_length"):
            packed = _embed_slots(loaded, _draw_slot_tokens(loaded, config.projection_length, slot_tokens, seed))
        elif slot_tokens is not None:
            raise ValueError("`slot_tokens` are for Luna's packed sequence, which this model does not have.")
        with no_init_weights():
            model = model_class(config)
        model.tie_weights()
        torch.manual_seed(seed)
        maker = _Maker(loaded, model, packed, control_init)
        # What the source must have comes first: rules read it.
        named = sorted(model.named_parameters(), key=lambda item: maker.has_rule(item[0]))
        made = {name: maker.make(name, empty) for name, empty in named}
    if control_init and not any("control." in name for name in maker.report.new):
        raise ValueError("`control_init` has nothing to start: the source's own control is kept. Leave it out.")
    model.load_state_dict(made, strict=False, assign=True)
    model.tie_weights()
    model.to(loaded.embedding.device)  # buffers; the parameters are there
    model.config.dtype = loaded.embedding.dtype
    return model.eval(), maker.finish()
