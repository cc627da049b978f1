"""Models of any type: new configs, loading that reports every missing weight, and longer positions."""

import dataclasses
import math
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
)
from transformers.utils import find_adapter_config_file

from common.options import did_you_mean
from luna_hf import FAMILIES, scripting
from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.ops.positions import repeat_positions
from luna_hf.scripting import UserError

# What reading damaged weights may raise, a pickle that holds code, or a config whose numbers no layer can have.
DAMAGED = (
    *(OSError, SafetensorError, ValueError, RuntimeError, EOFError, LookupError, TypeError, UnpicklingError),
    *(ArithmeticError, AssertionError),
)
# Fields of a config that follow from the tokenizer, and their values in the tokenizers that a run trains.
_FROM_TOKENIZER = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}


class ModelKind(NamedTuple):
    """A kind of model: its Auto class, the types that have it, and words for messages."""

    auto_class: type
    types: Any  # config classes
    name: str
    to_compare: str
    choice: str


_OURS = ", ".join(FAMILIES)
MASKED = ModelKind(
    AutoModelForMaskedLM,
    MODEL_FOR_MASKED_LM_MAPPING,
    "An encoder",
    "roberta or modernbert",
    f"{_OURS}, roberta, modernbert, or another that has a masked-LM head",
)
CAUSAL = ModelKind(
    AutoModelForCausalLM,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    "A causal model",
    "gpt2",
    f"{_OURS} made by training/pretrain_clm.py, gpt2, or another that has a causal-LM head",
)
SEQ2SEQ = ModelKind(
    AutoModelForSeq2SeqLM,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "An encoder-decoder",
    "bart",
    f"{_OURS} made by training/train_translation.py, bart, or another that is an encoder-decoder",
)
# Fields of a config that commands set for a task.
_LABELS = ("num_labels", "id2label", "label2id", "problem_type")
# Attention backends that a recipe may choose; transformers' default is sdpa.
_BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Types with a position table that begins with rows up to the padding token, which the config counts.
_COUNTS_PAD_ROWS = {
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def model_fields(model_type: str, kind: ModelKind = MASKED) -> set[str]:
    """Names that the model section of a recipe may hold for a model type, including aliases.

    Raises:
        UserError: An unknown type, or one of another kind.
    """
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    known = known and model_type in {config.model_type for config in kind.types}
    config_class = CONFIG_MAPPING[model_type] if known else PreTrainedConfig
    names = _own_fields(config_class)
    if kind is CAUSAL:  # an encoder becomes causal by `is_decoder`
        only_encoder = config_class in MODEL_FOR_MASKED_LM_MAPPING and "is_decoder" not in names
        known = known and not only_encoder and not config_class.is_encoder_decoder
    if not known:
        raise UserError(f"Unknown `model_type` {model_type!r}. Choose {_OURS}, or {kind.to_compare} to compare.")
    return names | set(config_class.attribute_map) | {"attn_implementation"}


def _own_fields(config: PreTrainedConfig | type[PreTrainedConfig]) -> set[str]:
    """Without those that all configs have, which say how a model answers, what it is called, and its labels."""
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name for field in dataclasses.fields(config)} - shared


def make_config(
    fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, kind: ModelKind = MASKED
) -> PreTrainedConfig:
    """A new model's config from a recipe's model section; the tokenizer (`None`: to be trained) decides special tokens.

    Encoders that support sparse prediction use it by default. Causal models of a type that is an encoder by default get
    `is_decoder`.

    Raises:
        UserError: An unknown model type or field, or a value that the config refuses.
    """
    fields = dict(fields)
    model_type = fields.pop("model_type")
    known = model_fields(model_type, kind)
    special = {name: getattr(tokenizer, name, None) if tokenizer else own for name, own in _FROM_TOKENIZER.items()}
    # Those that a tokenizer lacks are `None`: a config's defaults are ids of another vocabulary.
    special = {name: value for name, value in special.items() if name in known}
    for name in fields:
        if name in ("vocab_size", "is_decoder", "is_encoder_decoder", *_FROM_TOKENIZER):
            cause = "command" if name.startswith("is_") else "tokenizer"
            raise UserError(f"`model.{name}` follows from the {cause}: remove it from the model section.")
        if name not in known:
            raise UserError(f"A {model_type} config has no field `{name}`.{did_you_mean(name, known)}")
    _check_values(fields)
    if kind is MASKED and "sparse_prediction" in known:
        fields.setdefault("sparse_prediction", True)
    if kind is CAUSAL and "is_decoder" in known:
        fields["is_decoder"] = True
    if kind is SEQ2SEQ:
        fields["is_encoder_decoder"] = True
        # Their defaults are ids of another vocabulary.
        fields |= {"decoder_start_token_id": special["eos_token_id"]}
        fields |= {"forced_eos_token_id": None} if "forced_eos_token_id" in known else {}
    try:
        return AutoConfig.for_model(model_type, vocab_size=vocab_size, **special, **fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"Model section of the recipe: {error}") from error


def sketch(config: PreTrainedConfig, kind: ModelKind = MASKED) -> PreTrainedModel:
    """A model without memory for its parameters.

    Raises:
        UserError: There is none with these values of the config.
    """
    try:
        with torch.device("meta"):
            return kind.auto_class.from_config(config)
    except DAMAGED as error:
        raise UserError(
            f"There is no {config.model_type} model with these values: {scripting.reason(error)}."
        ) from error


def _check_values(fields: dict[str, Any]) -> None:
    backend = fields.get("attn_implementation", "sdpa")
    if backend not in _BACKENDS:
        raise UserError(f"`model.attn_implementation` is {backend!r}, but must be {', '.join(_BACKENDS)}.")
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"`model.{name}` is {value}, but must be finite.")
        if "layer" in name and type(value) is int and value < 0:  # Python makes none
            raise UserError(f"`model.{name}` is {value}, but must be at least 0.")


def longest_input(config: PreTrainedConfig) -> int | float:
    """The number of positions of a model, `math.inf` for the decoders of luna_hf.

    Raises:
        UserError: The config has no such number.
    """
    if isinstance(config, BoundedMemoryConfig) and config.is_decoder:
        return math.inf
    if not hasattr(config, "max_position_embeddings"):
        raise UserError(f"A {config.model_type} config has no `max_position_embeddings` to limit its input by.")
    if isinstance(config, RobertaConfig) or config.model_type in _COUNTS_PAD_ROWS:
        return config.max_position_embeddings - config.pad_token_id - 1
    return config.max_position_embeddings


def extend_positions(model: PreTrainedModel, length: int) -> str | None:
    """Make a model accept `length` tokens, in place.

    Learned positions are repeated after the trained ones, so that neighbours keep the offsets they were trained with
    (`positions.repeat_positions`). Sinusoidal and rotary positions are functions of the index.

    Returns:
        A note on the change; `None` if the model accepts `length` tokens already.

    Raises:
        UserError: The model keeps its positions elsewhere, or its attention has weights for each position.
    """
    config, trained = model.config, longest_input(model.config)
    if length <= trained:
        return None
    added = length - trained
    embeddings = getattr(model.base_model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    learned = isinstance(table, nn.Embedding)
    rule = f"the {trained:,} learned positions are repeated" if learned else "the sinusoids continue"
    rule = "there are none to extend" if getattr(config, "position_embedding_type", None) == "none" else rule
    note = f"Positions extended from {trained:,} to {length:,} tokens: {rule}."
    if isinstance(config, BoundedMemoryConfig):
        try:
            model.resize_position_embeddings(length)
        except ValueError as error:
            raise UserError(
                f"{error} Shorten the inputs, or convert the original model with `--max-length {length}` "
                "(docs/warm-start.md)."
            ) from error
        return note
    if table is None and hasattr(config, "rope_parameters"):
        config.max_position_embeddings += added
        return f"Rotary positions: the model accepts {length:,} tokens; it was trained on at most {trained:,}."
    if not learned:
        raise UserError(f"A {config.model_type} model cannot be extended: where it keeps its positions is unknown.")
    first = table.num_embeddings - trained  # rows before the first position
    rows = repeat_positions(table.weight.detach(), first, length)
    embeddings.position_embeddings = nn.Embedding(*rows.shape, padding_idx=table.padding_idx, _weight=rows)
    config.max_position_embeddings += added
    if hasattr(embeddings, "max_position_embeddings"):
        embeddings.max_position_embeddings += added
    for name in ("position_ids", "token_type_ids"):  # RoBERTa's and BERT's buffers, one entry per position
        buffer = getattr(embeddings, name, None)
        if isinstance(buffer, torch.Tensor):
            longer = torch.arange(buffer.shape[1] + added, device=buffer.device).expand(1, -1)
            embeddings.register_buffer(name, longer if name == "position_ids" else longer * 0, persistent=False)
    return note


def load_encoder(
    auto_class: type, name_or_path: str, length: int | None = None, /, **config_overrides: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load an encoder for a task, or a causal model, that accepts `length` tokens.

    Returns:
        The model, and notes on new parameters, unused weights and extended positions.

    Raises:
        UserError: No such model, another kind of model, a damaged file, an unknown field of the config, or weights of
            the body that are missing or not finite.
    """
    config = load_config(name_or_path, kind=CAUSAL if auto_class is AutoModelForCausalLM else MASKED)
    if type(config) not in auto_class._model_mapping:
        raise UserError(
            f"{name_or_path} is a {config.model_type} checkpoint, for which there is no {auto_class.__name__}."
        )
    override(config, config_overrides)
    try:
        with scripting.quiet():  # the notes replace its report of missing weights
            model, info = auto_class.from_pretrained(
                name_or_path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32
            )
    except DAMAGED as error:
        fields = ", ".join(f"{name}={value!r}" for name, value in config_overrides.items())
        chosen = f" with {fields}" if fields else ""
        raise UserError(
            f"The weights of {name_or_path} cannot be loaded{chosen}: {scripting.reason(error)}."
        ) from error
    notes = _loading_notes(model, info, name_or_path)
    if odd := [name for name, weight in model.named_parameters() if not weight.detach().isfinite().all()]:
        raise UserError(f"{name_or_path} has weights that are not finite ({_some(odd)}): it cannot be used.")
    if "num_labels" in config_overrides and _keeps_head(model, info):
        outputs = ", ".join(map(str, model.config.id2label.values()))
        notes.append(f"The head of the checkpoint is kept; its outputs are {outputs}.")
    try:
        extended = None if length is None else extend_positions(model, length)
    except RuntimeError as error:  # of PyTorch, which has no class for a lack of memory
        raise UserError(
            f"{name_or_path} cannot be extended to {length:,} tokens: {scripting.reason(error)}."
        ) from error
    return model, [*notes, *([extended] if extended else [])]


def override(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """Set fields of a loaded config, in place, with the checks of a new one.

    Raises:
        UserError: An unknown field, or a value that the config refuses.
    """
    _check_values(fields)
    known = _own_fields(config) | {*config.attribute_map, "attn_implementation", *_LABELS}
    for name, value in fields.items():
        if name in ("vocab_size", "is_decoder", *_FROM_TOKENIZER):
            raise UserError(f"`{name}` follows from the checkpoint and cannot be set.")
        if name not in known:
            raise UserError(f"A {config.model_type} config has no field `{name}`.{did_you_mean(name, known)}")
        name = "_attn_implementation" if name == "attn_implementation" else name  # how a config keeps it
        try:
            setattr(config, name, value)
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise UserError(f"A {config.model_type} config cannot have {name}={value!r}: {error}") from error
    if isinstance(config, BoundedMemoryConfig):
        try:
            config.validate_values()
        except ValueError as error:
            raise UserError(str(error)) from error


def refuse_adapter(name_or_path: str) -> None:
    """Refuse an adapter, also one beside whole weights: its model would be frozen.

    Raises:
        UserError: It is one.
    """
    if find_adapter_config_file(name_or_path) is not None:
        raise UserError(
            f"{name_or_path} is an adapter, which this command cannot train: merge it into its base (docs/adapters.md) "
            "and name the merged folder."
        )


def load_config(name_or_path: str, kind: ModelKind = MASKED) -> PreTrainedConfig:
    """The config of an encoder with a masked-LM head, or of a causal model.

    Raises:
        UserError: No such folder or name, no config in it, an adapter, or another kind of model.
    """
    folder = Path(name_or_path)
    if not folder.exists():
        require_hub_name(name_or_path)
    refuse_adapter(name_or_path)
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"{name_or_path} is not a checkpoint: it has no config.json.")
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)  # otherwise it asks on a terminal
    except Exception as error:  # config files fail in many ways, all of them the user's to fix
        raise UserError(
            f"There is no model {name_or_path!r}, neither as a folder nor on the Hub ({scripting.reason(error)})."
        ) from error
    if type(config) not in kind.types or getattr(config, "is_encoder_decoder", False):
        found = f"{config.model_type} checkpoint"
    elif kind is MASKED and isinstance(config, BoundedMemoryConfig) and config.is_decoder:
        found = f"causal {config.model_type} checkpoint"
    elif kind is CAUSAL and type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        found = f"{config.model_type} encoder"
    else:
        return config
    article = "an" if found[0] in "aeiou" else "a"
    raise UserError(f"{name_or_path} is {article} {found}. {kind.name} is needed: {kind.choice}.")


def require_hub_name(name: str) -> None:
    """Check that what is no local path can be a name on the Hub.

    Raises:
        UserError: It can only be a path: `./x`, `/x`, `a/b/c`.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"There is no folder {name!r}.") from error


def load_tokenizer(
    name_or_path: str, config: PreTrainedConfig | None = None, padded: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, which must fit the model's config if there is one.

    Raises:
        UserError: There is none, it lacks a padding token though `padded`, or it does not fit.
    """
    tokenizer = scripting.load_tokenizer(name_or_path, required=True)
    if padded and tokenizer.pad_token_id is None:
        raise UserError(f"The tokenizer at {name_or_path!r} has no padding token.")
    if config is None:
        return tokenizer
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer at {name_or_path!r} has {len(tokenizer):,} tokens, but the model {config.vocab_size:,}."
        )
    if None not in (config.pad_token_id, tokenizer.pad_token_id) and tokenizer.pad_token_id != config.pad_token_id:
        raise UserError(
            f"The tokenizer at {name_or_path!r} pads with token {tokenizer.pad_token_id}, but the model with token "
            f"{config.pad_token_id}: they do not belong together."
        )
    return tokenizer


def _loading_notes(model: PreTrainedModel, info: dict[str, Any], name_or_path: str) -> list[str]:
    """Notes on new and unused weights; raises `UserError` if the body lacks some, or has them in other shapes."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    mismatched = sorted(key for key, *_ in info["mismatched_keys"])
    new = sorted({*info["missing_keys"], *mismatched})
    body = [key for key in new if key.startswith(prefix) and ".pooler." not in f".{key}"]
    if body:
        what = "decoder" if model.can_generate() else "encoder"
        raise UserError(
            f"{name_or_path} lacks {len(body)} weights of the {what}, or has them in other shapes ({_some(body)}): its "
            "files do not belong together."
        )
    notes = [f"New parameters, to be trained: {_some(new)}."] if new else []
    if unused := sorted(info["unexpected_keys"]):
        notes.append(f"Unused weights of the checkpoint: {_some(unused)}.")
    return notes


def _keeps_head(model: PreTrainedModel, info: dict[str, Any]) -> bool:
    """Whether a model has a head, and the checkpoint had all its weights."""
    new = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    head = {key for key in model.state_dict() if not key.startswith(model.base_model_prefix + ".")}
    return bool(head) and not head & new


def _some(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
