"""What every model of the zoo shares: loading and saving, inputs and their checks, a head on a base model."""

import difflib
import os
import sys
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder

from .configuration_base import BoundedMemoryConfig
from .context import drop_if_full
from .memory_attention import MemoryAttention
from .modeling_layers import DepthwiseConvolution, LayerStack, TokenEmbeddings, TransformerLayer

_INPUT_NAMES = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels"]
_REFUSED_KEYWORDS = {
    "head_mask": "transformers 5 has no head masks.",
    "encoder_hidden_states": "the model has no cross-attention.",
    "past_key_values": "the model is an encoder and keeps no cache.",
    **dict.fromkeys(
        ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        "every row needs its own memory, so several texts in one row would mix. Pad them (DataCollatorWithPadding).",
    ),
}


@torch.compiler.assume_constant_result  # torch.compile cannot trace difflib
def _closest_input(name: str, outputs: tuple[str, ...]) -> str | None:
    if name in outputs:
        return None
    close = difflib.get_close_matches(name, [*_INPUT_NAMES, *outputs], n=1, cutoff=0.85)
    return close[0] if close else None


class BoundedMemoryPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation that all families share."""

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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "initialise"):  # a module of ours with parameters or tables that the library does not know
            module.initialise(self.config)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`; with the code that the Auto classes need where luna_hf is missing."""
        # transformers enters only the class that is being saved; every head can be loaded from these files.
        self.config.auto_map = self.auto_map()
        super().save_pretrained(*args, **kwargs)

    def auto_map(self) -> dict[str, str]:
        """The class that each Auto class takes for this checkpoint, as `module.Class`: those beside the model's own."""
        parts = {"attention_class", "base_model_class"}  # what a family's model names
        module = sys.modules[next(cls for cls in type(self).__mro__ if parts & vars(cls).keys()).__module__]
        models = [
            value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
        ]
        classes = {model._auto_class: model for model in models if getattr(model, "_auto_class", None)}
        classes = {"AutoConfig": self.config_class, **classes}
        return {auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in classes.items()}

    @classmethod
    def from_roberta(
        cls, source: str | os.PathLike | PreTrainedModel, *, max_length: int | None = None, seed: int = 0, **fields: Any
    ) -> "BoundedMemoryPreTrainedModel":
        """A model that starts from a trained RoBERTa, XLM-R, CamemBERT, data2vec-text or BERT; needs the package.

        The encoder's weights are kept; a masked-LM model keeps the source's masked-LM head, too. Any other head, and
        what the family has besides RoBERTa, is new, which is logged. `luna_hf.warm_start.warm_start` takes the same
        arguments, and returns the report with the model.

        Args:
            source: folder, name on the Hub, or a model in memory.
            max_length: tokens that the model must take, if more than the source does.
            seed: of what is new.
            fields: of the config (`num_labels`, `conv_kernel_size`, ...), and options of the family's rules in
                `warm_start_<family>.py` (such as `slot_tokens` or `control_init`).

        Raises:
            ImportError: luna_hf is not installed. A checkpoint folder carries what its model needs to run, no more.
            ValueError: A causal model, a source that cannot be mapped or read, or a field that is wrong.
        """
        # In a `try` and absolute: transformers neither asks for the package nor copies the file into checkpoints.
        try:
            from luna_hf.warm_start import warm_start
        except ImportError as error:
            raise ImportError(
                "`from_roberta` needs the package, which a checkpoint folder does not carry: `pip install luna-hf`."
            ) from error
        model, made = warm_start(cls, source, max_length=max_length, seed=seed, **fields)
        made.warn()
        return model


class BaseModelMixin:
    """What a family's encoder and its decoder have in common: parts, inputs and their checks."""

    _auto_class = "AutoModel"
    attention_class: type[MemoryAttention]
    convolution_class: type[DepthwiseConvolution]

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        self.embeddings = TokenEmbeddings(config)
        self.add_layers(config)
        self.gradient_checkpointing = False
        self.post_init()

    def add_layers(self, config: BoundedMemoryConfig) -> None:
        """Create the layers; a family adds what stands beside them."""
        self.encoder = LayerStack(config, self.attention_class, self.convolution_class)

    def first_carried(self) -> Tensor | None:
        """What the first layer is given besides the tokens."""
        return None

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embeddings.word_embeddings = value

    def check_keywords(self, keywords: dict[str, Any]) -> None:
        """Refuse keywords that are misspelt, or that ask for what the model does not do.

        Raises:
            ValueError: There is one.
        """
        outputs = ("return_dict", *(f"output_{name}" for name in self._can_record_outputs))
        for name, value in keywords.items():
            if name in _REFUSED_KEYWORDS and value is not None:
                raise ValueError(f"`{name}` is not supported: {_REFUSED_KEYWORDS[name]}")
            meant = _closest_input(name, outputs)
            if meant:
                raise ValueError(f"There is no input `{name}`. Did you mean `{meant}`?")

    def check_shapes(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        with_past: bool = False,
    ) -> int:
        """The length of the input; with a past, the mask may begin before it.

        Raises:
            ValueError: Not exactly one kind of input, an empty one, or a mask that does not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:2]
        if len(shape) != 2:
            raise ValueError(f"`input_ids` must have the shape (batch, length), but it is {tuple(shape)}.")
        if shape[1] == 0:
            with_state = " With a state, give `generate` the whole text so far and what is new." if with_past else ""
            raise ValueError(f"The input has no tokens (length 0).{with_state}")
        fits = attention_mask is None or attention_mask.shape == shape
        if with_past and not fits:
            fits = (
                attention_mask.dim() == 2 and attention_mask.shape[0] == shape[0] and attention_mask.shape[1] > shape[1]
            )
        if not fits:
            raise ValueError(
                f"`attention_mask` must have the shape {tuple(shape)} (batch, length), with 1 for tokens and 0 for "
                f"padding, but it is {tuple(attention_mask.shape)}. Masks between pairs of tokens have no meaning here."
            )
        return shape[1]

    def tokens_to_keep(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """(b, n) boolean, True for tokens; `None` if nothing is padded.

        Without an `attention_mask` the padding is read off the ids, as the authors do.

        Raises:
            ValueError: The mask is an additive one.
        """
        if attention_mask is not None:
            if attention_mask.is_floating_point() and not is_tracing(attention_mask) and (attention_mask < 0).any():
                raise ValueError(
                    "`attention_mask` has negative entries, as masks that are added to logits do. "
                    "Give 1 for tokens and 0 for padding."
                )
            keep = attention_mask != 0
        elif input_ids is not None:
            keep = input_ids != self.config.pad_token_id
        else:
            return None
        return drop_if_full(keep)


class HeadMixin:
    """What the heads have in common: a base model under `base_model_prefix`, and an output class."""

    base_model_class: type[nn.Module]
    output_class: type[ModelOutput]
    # Tied weights by name; `{}` stands for the family's `base_model_prefix`.
    tied_weights: dict[str, str] = {}
    # The Trainer passes `num_items_in_batch` and leaves the division to the loss; every loss here does it.
    accepts_loss_kwargs = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        prefix = getattr(cls, "base_model_prefix", "")
        cls._tied_weights_keys = {name: source.format(prefix) for name, source in cls.tied_weights.items()} or None

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__(config)
        # Here and not in `make_output`: torch.compile cannot trace `fields`.
        self.output_fields = tuple(field.name for field in fields(self.output_class))
        setattr(self, self.base_model_prefix, self.base_model_class(config))
        self.add_head(config)
        self.post_init()

    def make_output(self, outputs: ModelOutput, **own: Any) -> ModelOutput:
        """The head's output: its own fields, and whatever it shares with the base model's output."""
        shared = {name: outputs.get(name) for name in self.output_fields if name not in own}
        return self.output_class(**own, **shared)
