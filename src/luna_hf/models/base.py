"""Base classes shared by all models: loading and saving, input validation, and heads on a base model."""

import difflib
import inspect
import os
import sys
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import TransformersKwargs, is_tracing, logging
from transformers.utils.output_capturing import OutputRecorder

from ..configuration import BoundedMemoryConfig, is_ours, saved_file
from ..layers.block import DepthwiseConvolution, LayerStack, TransformerLayer
from ..layers.embeddings import TokenEmbeddings
from ..layers.memory_attention import MemoryAttention
from ..layers.recorded import Recorded
from ..ops.context import drop_if_full
from .adapters import base_of_adapter, refuse_random_head

# Inputs of some model here, in the order in which a misspelt one is compared with them.
_INPUT_NAMES = (
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels", "cache"),
    *("use_cache", "logits_to_keep", "shift_labels", "start_positions", "end_positions", "num_items_in_batch"),
)

# Keywords of every transformers model, the option of flex attention, and what `generate` passes on for stop strings.
_OPTIONS = (*TransformersKwargs.__optional_keys__, "kernel_options", "tokenizer")

# What sentence-transformers' modules add to the inputs, and give to the model in the next pass.
_FOREIGN = ("token_embeddings", "all_layer_embeddings", "sentence_embedding", "token_weights_sum", "scores")

# What a pass of a model with a local window reads, see `ForwardContext`.
_READS = ("local_window", "read_slots")

_PACKED = (
    "texts packed into one row would share its memory. Pad them instead (`DataCollatorWithPadding`; in TRL, leave out "
    "`packing` and `padding_free`)."
)

_NO_CACHE = "the model is an encoder and has no cache."

_REFUSED_KEYWORDS = {
    "head_mask": "transformers 5 has no head masks.",
    "encoder_hidden_states": "the model has no cross-attention.",
    **dict.fromkeys(("cache", "past_key_values", "use_cache"), _NO_CACHE),
    **dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"), _PACKED),
}


@torch.compiler.assume_constant_result  # torch.compile cannot trace difflib
def _closest_input(name: str, outputs: tuple[str, ...]) -> str:
    known = [known for known in (*_INPUT_NAMES, *outputs) if known != name]
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


class BoundedMemoryPreTrainedModel(Recorded, PreTrainedModel):
    """Base class of all models: loading, saving and initialisation."""

    config: BoundedMemoryConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["TokenEmbeddings", "TransformerLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": TransformerLayer,
        "attentions": OutputRecorder(MemoryAttention, index=2),
    }

    auto_classes: tuple[str, ...] = ()  # that load the model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Transformers copies the file of a class with an `_auto_class`; `hub.py` writes the code of the package's own.
        cls._auto_class = None if is_ours(cls) else next(iter(cls.auto_classes), None)
        # With label smoothing, the Trainer compares logits with the next label only for classes that this table names.
        if "AutoModelForCausalLM" in cls.auto_classes:
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __new__(cls, *args: Any, **keywords: Any) -> "BoundedMemoryPreTrainedModel":
        """Refuse another architecture's config, and what `from_pretrained` passes on as the config has no such field.

        Raises:
            ValueError: The config is not the class's, or a keyword is neither a field nor a parameter of the class.
        """
        config, own = keywords.get("config", args[0] if args else None), cls.config_class
        # Not only `isinstance`: the code of a checkpoint has its own copy of the class.
        if isinstance(config, PreTrainedConfig) and not isinstance(config, own) and config.model_type != own.model_type:
            raise ValueError(
                f"{cls.__name__} needs a {own.__name__}, but got a {type(config).__name__}. Use a model class of that "
                "config, such as the Auto classes choose with `from_config`."
            )
        known = inspect.signature(cls.__init__).parameters if keywords else {}
        if not any(own.kind is own.VAR_KEYWORD for own in known.values()):
            cls.config_class.refuse_unknown({name: keywords[name] for name in keywords.keys() - known.keys()})
        return super().__new__(cls)

    def __init__(self, config: BoundedMemoryConfig, *args: Any, **kwargs: Any) -> None:
        if getattr(config, "add_cross_attention", False):
            raise ValueError(
                f"{type(self).__name__} has no cross-attention (`add_cross_attention=True`). Use the family's "
                "encoder-decoder (`...ForConditionalGeneration`), or another decoder."
            )
        config.validate_values()  # a field that `from_pretrained` changed
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Like `PreTrainedModel.from_pretrained`, but refuse a checkpoint whose weights are not the model's.

        A PEFT adapter with a `config.json` is loaded into its base model, with the labels of that config, and all
        weights are frozen. If `max_position_embeddings` is overridden, an encoder's positions are resized.

        Raises:
            ImportError: The source is an adapter, and peft is not installed.
            OSError: The source, or the base model or the weights of an adapter, cannot be found.
            ValueError: None of the base model's weights are in the checkpoint, none of the head's although it names
                this class, an adapter is for another head or names no base, positions cannot be resized, or a keyword
                is no field of the config.
        """
        source, kwargs, adapter = base_of_adapter(cls, pretrained_model_name_or_path, kwargs)
        config = kwargs.get("config")  # which the Auto classes read from the source, too
        is_own = not isinstance(config, PreTrainedConfig) or config.name_or_path == str(source)
        length, kwargs = cls.length_to_set(source, kwargs)
        verbosity = logging.get_verbosity()
        if source is not pretrained_model_name_or_path:
            logging.set_verbosity_error()  # transformers would call the head new, which the adapter holds
        try:
            model, info = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        except OSError as error:
            place = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
            if place is None:
                raise
            raise OSError(
                f"{place} is an adapter for {source}, which cannot be loaded. Put that model's folder beside the "
                "adapter's, or correct `base_model_name_or_path` in its adapter_config.json."
            ) from error
        finally:
            logging.set_verbosity(verbosity)
        if source is not None:
            model.refuse_random(source, set(info["missing_keys"]), is_own)
        if adapter:
            refuse_random_head(model, source, adapter, kwargs)
            model.requires_grad_(False)  # PEFT has frozen its matrices: biases and head would train without them
        if length is not None:
            model.resize_position_embeddings(length)
        return (model, info) if output_loading_info else model

    @classmethod
    def length_to_set(
        cls, source: str | os.PathLike | None, options: dict[str, Any]
    ) -> tuple[int | None, dict[str, Any]]:
        """The longest input to set after loading, if any, and the options of `from_pretrained` for that."""
        return None, options

    def refuse_random(self, source: str | os.PathLike, missing: set[str], is_own: bool) -> None:
        """Refuse a model whose base, or whose head as the checkpoint names it, lacks all weights.

        Args:
            source: what it was loaded from.
            missing: the names of its weights that the source lacks.
            is_own: whether its config is the source's, rather than that of an adapter that holds the head.

        Raises:
            ValueError: Such a model.
        """
        stored, names = self.config.architectures or [], self.state_dict().keys() - self.all_tied_weights_keys.keys()
        start = "" if self.base_model is self else f"{self.base_model_prefix}."
        base = {name for name in names if name.startswith(start)}
        name = type(self).__name__
        if base <= missing:
            held = f"{' and '.join(stored)}, which its own Auto class loads" if stored else "another model"
            raise ValueError(f"{source} has no weights of {name}, which would be random: it holds {held}.")
        if is_own and name in stored and names - base and names - base <= missing:
            raise ValueError(
                f"{source} has no weights of the head of {name}, although its config.json names this class "
                "(`architectures`). Save the whole model again, or correct that name to train a new head."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "initialise"):  # a luna_hf module with parameters or buffers unknown to transformers
            module.initialise(self.config)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Like `PreTrainedModel.save_pretrained`, plus the code that lets the Auto classes load without luna_hf."""
        # transformers registers only the saved class, but any head can be loaded from these files.
        self.config.auto_map = self.auto_map()
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """Map each Auto class to `file.Class`, for the model classes of the file that is saved beside the weights.

        That file has the models on the same base model. Transformers saves none for a class from `__main__`, or for a
        user's class that is not registered with `register_for_auto_class`.
        """
        classes, module = {"AutoConfig": cls.config_class}, cls.__module__
        if is_ours(cls) or (cls.is_remote_code() and module != "__main__"):
            base = getattr(cls, "base_model_class", cls)
            own = [each for each in vars(sys.modules[module]).values() if getattr(each, "__module__", None) == module]
            own = [each for each in own if getattr(each, "base_model_class", each) is base]
            classes |= {auto_class: each for each in own for auto_class in getattr(each, "auto_classes", ())}
        return {auto: f"{saved_file(each)}.{each.__name__}" for auto, each in classes.items()}

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Like `PreTrainedModel.resize_token_embeddings`.

        Raises:
            ValueError: No row would be left for the padding token; the model stays as it is.
        """
        padding, size = self.config.pad_token_id, new_num_tokens
        if size is not None and -(-size // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1) <= padding:
            raise ValueError(
                f"The vocabulary cannot be resized to {size} tokens, since padding is token {padding}. Set "
                "`config.pad_token_id` to a smaller one first."
            )
        return super().resize_token_embeddings(size, pad_to_multiple_of, mean_resizing)

    def get_position_embeddings(self) -> nn.Module | None:
        """The position table; `None` if there is none."""
        return self.base_model.embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Set `config.max_position_embeddings`, which limits no decoder; encoders also resize their table.

        Raises:
            ValueError: The number is below 1, or the attention has weights for each position.
        """
        trained, length = self.config.max_position_embeddings, new_num_position_embeddings
        reason = "a model needs at least 1" if length < 1 else length != trained and self.config.fixed_length()
        if reason:
            raise ValueError(f"The model cannot be resized from {trained} to {length} positions, since {reason}.")
        self.config.max_position_embeddings = length

    @classmethod
    def from_pretrained_encoder(
        cls, source: str | os.PathLike | PreTrainedModel, **options: Any
    ) -> "BoundedMemoryPreTrainedModel":
        """Warm-start an encoder from a trained one, such as RoBERTa, BERT, DistilBERT or ELECTRA; needs the package.

        Takes the arguments of `luna_hf.warm_start.warm_start`, which also returns the report: the weights of the
        encoder are kept, and in a masked-LM model those of the masked-LM head. New and unused parameters are logged.

        Raises:
            ImportError: luna_hf is not installed; the code in a checkpoint folder does not suffice.
            ValueError: `cls` is causal, the source cannot be read or mapped, or an option is invalid.
        """
        # Absolute and inside a `try`, so that transformers neither requires the package nor copies the file.
        try:
            from luna_hf.warm_start import warm_start
        except ImportError as error:
            raise ImportError(
                "`from_pretrained_encoder` needs luna_hf, not only a checkpoint's code: `pip install luna-hf`."
            ) from error
        model, made = warm_start(cls, source, **options)
        made.warn()
        return model

    @classmethod
    def from_roberta(
        cls, source: str | os.PathLike | PreTrainedModel, **options: Any
    ) -> "BoundedMemoryPreTrainedModel":
        """The earlier name of `from_pretrained_encoder`."""
        return cls.from_pretrained_encoder(source, **options)


class BaseModelMixin:
    """Shared by a family's encoder and decoder: embeddings, layers and input validation."""

    auto_classes = ("AutoModel",)
    attention_class: type[MemoryAttention]
    convolution_class: type[DepthwiseConvolution]
    own_keywords: tuple[str, ...] = ()  # keywords of `forward` besides those of every model

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        outputs = (f"output_{name}" for name in self._can_record_outputs)
        known = frozenset(("return_dict", *outputs, *_READS, *_OPTIONS, *_FOREIGN)) - _REFUSED_KEYWORDS.keys()
        self.known_keywords = known | set(self.own_keywords)
        self.embeddings = TokenEmbeddings(config)
        self.add_layers(config)
        self.gradient_checkpointing = False
        self.post_init()

    def add_layers(self, config: BoundedMemoryConfig) -> None:
        """Create the layers; a family overrides this to add modules beside them."""
        self.encoder = LayerStack(config, self.attention_class, self.convolution_class)

    def first_slot_states(self) -> Tensor | None:
        """Return the first layer's `slot_states`, see `MemoryAttention.write`."""
        return None

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embeddings.word_embeddings = value

    def check_keywords(self, keywords: dict[str, Any]) -> None:
        """Reject unknown and unsupported keywords; those that every transformers model accepts pass.

        Raises:
            ValueError: A keyword is unknown or not supported.
        """
        for name, value in keywords.items():
            if value is None or name in self.known_keywords:
                continue
            if name not in _REFUSED_KEYWORDS:
                outputs = tuple(f"output_{recorded}" for recorded in self._can_record_outputs)
                raise ValueError(f"The model has no input `{name}`.{_closest_input(name, outputs)}")
            if value is not False:  # switched off
                raise ValueError(f"`{name}` is not supported: {_REFUSED_KEYWORDS[name]}")
        if "local_window" in keywords or "read_slots" in keywords:
            self.check_reads(keywords.get("local_window"), keywords.get("read_slots"))
        if keywords.get("output_attentions") and "attentions" not in self._can_record_outputs:
            raise ValueError(
                f"`output_attentions` is not supported: a causal {self.config.model_type} model computes no attention "
                "weights. Leave it out."
            )

    def check_reads(self, window: int | None, slots: bool | None) -> None:
        """Reject a choice of window and slots that the model does not have, or that reads nothing.

        Raises:
            ValueError: The model has no local window, the window is too large, or both parts are left out.
        """
        if window is None and slots is None:
            return
        own = self.config.mixed_window()
        allowed = f"a pass reads a window of at most {own} tokens, slots, or both" if own else "neither can be given"
        if not own or not 0 <= (own if window is None else window) <= own or (window == 0 and slots is False):
            raise ValueError(
                f"`local_window` is {window} and `read_slots` {slots}, but with config.local_window="
                f"{self.config.local_window} {allowed}."
            )

    def check_positions(self, position_ids: Tensor | None, keep: Tensor | None) -> None:
        """Reject positions (b or 1, n) that fall between real tokens, as in packed texts; not while tracing.

        Raises:
            ValueError: The positions of a row fall.
        """
        if position_ids is None or position_ids.shape[-1] == 1 or is_tracing(position_ids) or position_ids.is_meta:
            return
        real = position_ids if keep is None else position_ids.masked_fill(~keep, position_ids.min())
        falls = position_ids < real.cummax(-1).values
        falls = falls if keep is None else falls & keep
        if falls.any():
            row, column = falls.reshape(-1, falls.shape[-1]).nonzero()[0].tolist()
            raise ValueError(f"`position_ids` fall at token {column} of row {row}, as in packed texts, but {_PACKED}")

    def check_shapes(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        with_past: bool = False,
        **by_token: Tensor | None,
    ) -> int:
        """Check the inputs' shapes and return their length; `with_past` also allows a mask over earlier tokens.

        Args:
            by_token: other inputs by name, (b, n) or broadcastable to it along the batch.

        Raises:
            ValueError: Not exactly one kind of input is given, it is empty or of the wrong type, or a shape does not
                match.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape
        if inputs_embeds is None and (len(shape) != 2 or input_ids.is_floating_point()):
            found = f"are {input_ids.dtype} of shape {tuple(shape)}"
            raise ValueError(f"`input_ids` must be integers of shape (batch, length), but {found}.")
        if inputs_embeds is not None and (len(shape) != 3 or shape[2] != self.config.embedding_width()):
            needed = f"(batch, length, {self.config.embedding_width()})"
            raise ValueError(f"`inputs_embeds` must have shape {needed}, but have shape {tuple(shape)}.")
        shape = shape[:2]
        if shape[0] == 0 or shape[1] == 0:
            raise ValueError(f"The input has no {'tokens (length 0)' if shape[0] else 'rows (batch size 0)'}.")
        for name, given in by_token.items():
            if given is not None and given.shape not in (shape, (1, shape[1]), shape[1:]):
                raise ValueError(f"`{name}` must have shape {tuple(shape)}, but has shape {tuple(given.shape)}.")
        fits = attention_mask is None or attention_mask.shape == shape
        if with_past and not fits:
            fits = (
                attention_mask.dim() == 2 and attention_mask.shape[0] == shape[0] and attention_mask.shape[1] > shape[1]
            )
        if not fits:
            raise ValueError(
                f"`attention_mask` must have shape {tuple(shape)} (batch, length), with 1 for tokens and 0 for "
                f"padding, but has shape {tuple(attention_mask.shape)}; masks over token pairs are not supported."
            )
        return shape[1]

    def tokens_to_keep(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return the padding mask (b, n), True for tokens; `None` if nothing is padded.

        Without an `attention_mask`, every `pad_token_id` is padding, as in the authors' code.

        Raises:
            ValueError: `attention_mask` is an additive mask.
        """
        if attention_mask is not None:
            if attention_mask.is_floating_point() and not is_tracing(attention_mask) and (attention_mask < 0).any():
                raise ValueError(
                    "`attention_mask` has negative entries, as in an additive mask. Use 1 for tokens and 0 for padding."
                )
            keep = attention_mask != 0
        elif input_ids is not None:
            keep = input_ids != self.config.pad_token_id
        else:
            return None
        return drop_if_full(keep)


class HeadMixin:
    """Shared by all heads: a base model under `base_model_prefix`, and an output class."""

    base_model_class: type[nn.Module]
    output_class: type[ModelOutput]
    # Tied weights and their sources; `{}` stands for the family's `base_model_prefix`.
    tied_weights: dict[str, str] = {}
    # Makes the Trainer pass `num_items_in_batch`; every loss here divides by it.
    accepts_loss_kwargs = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        prefix = getattr(cls, "base_model_prefix", "")
        tied = {name.format(prefix): source.format(prefix) for name, source in cls.tied_weights.items()}
        cls._tied_weights_keys = tied or None

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        # Computed here because torch.compile cannot trace `fields`.
        self.output_fields = tuple(field.name for field in fields(self.output_class))
        setattr(self, self.base_model_prefix, self.base_model_class(config))
        self.add_head(config)
        self.post_init()

    def make_output(self, outputs: ModelOutput, **own: Any) -> ModelOutput:
        """Return the head's output: its own fields, and those it shares with the base model's output."""
        for name in self.output_fields:
            own.setdefault(name, outputs.get(name))
        return self.output_class(**own)
