"""The encoder shared by all families, and its task heads.

Each `...Mixin` implements a complete model; a family's class only names its parts:

    class LunaForMaskedLM(MaskedLMMixin, LunaPreTrainedModel):
        base_model_class = LunaModel

Every loss divides by `num_items_in_batch` if the Trainer passes it, so that gradient accumulation is equivalent to one
large batch.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention_base import linear
from .configuration_base import BoundedMemoryConfig
from .context import ForwardContext
from .heads import (
    ClassificationHead,
    MaskedLMHead,
    TokenPooling,
    classification_loss,
    classifier_dropout,
    cross_entropy,
    first_marked,
    question_marked,
)
from .modeling_base import BaseModelMixin, HeadMixin
from .modeling_layers import DepthwiseConvolution
from .modeling_streams import StreamMixin
from .unpadding import BOUNDARIES, StreamContext, is_readable

# Keywords of the encoders' forward pass besides those of every model.
_OWN_KEYWORDS = (*BOUNDARIES, "max_length_q", "max_length_k", "unpad_inputs", "num_global_tokens")


class EncoderModelMixin(StreamMixin, BaseModelMixin):
    """The encoder without a head, the base model of a family's task models."""

    auto_classes = ("AutoModel", "AutoModelForTextEncoding")
    convolution_class = DepthwiseConvolution
    causal_model_class: type[PreTrainedModel] | None = None  # both are set by `families.py`
    seq2seq_model_class: type[PreTrainedModel] | None = None

    def __new__(cls, config: BoundedMemoryConfig | None = None, *args: Any, **kwargs: Any) -> Any:
        """Create the encoder, or the decoder or encoder-decoder if the config is one's: AutoModel knows one class.

        Raises:
            ValueError: It is, but `cls` comes from an encoder checkpoint's code.
        """
        if config is None or not (config.is_decoder or config.is_encoder_decoder):
            return super().__new__(cls)
        model_class = cls.causal_model_class if config.is_decoder else cls.seq2seq_model_class
        if model_class is None:
            kind = "is_decoder" if config.is_decoder else "is_encoder_decoder"
            raise ValueError(f"{cls.__name__} is an encoder, but the config has `{kind}=True`. Load it with AutoModel.")
        return model_class(config, *args, **kwargs)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (b, n) token ids.
            attention_mask: (b, n), 1 for tokens and 0 for padding on either side. Without it, every `pad_token_id` in
                `input_ids` is padding.
            token_type_ids: (b, n) segment ids, if the model has segment embeddings.
            position_ids: (b, n) rows of the position table; by default `pad_token_id + t` for the t-th real token (from
                1). Positions that begin at 0 are counted from there instead. Where they return to the row's first, the
                next text begins. Memories that depend on token order ignore them and use the order of the input.
            inputs_embeds: (b, n, d) token embeddings, instead of `input_ids`; before scaling, positions and LayerNorm.
            global_attention_mask: (b, n), 1 for tokens to mark, as in Longformer: every token reads them, and they read
                every token (`config.global_tokens_read_all`).
            output_hidden_states, output_attentions, return_dict: keyword only. Attentions (eager only) are the read
                weights: (b, h, n, keys) over slots, marked tokens, selected tokens and window positions, in this order,
                as far as the layer has them; or (b, h, n, n) where every token is read. A token that is read as marked
                or selected has no weight in the window, and rows of marked tokens that read all others are zero. A
                family may record more.
            local_window, read_slots: keyword only, for models with `config.local_window`. A smaller window for this
                pass, 0 for none; and `False` to read no slots.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: keyword only; where the texts of a row begin, if it holds several.
                Each has its own memory. The output has the shape of the input, but packed states are (texts, l, d).
            unpad_inputs: keyword only; overrides `config.unpad_inputs`.
            num_global_tokens: keyword only; the largest number of marked tokens in a row, if known: compiled and
                exported models otherwise have `config.max_global_tokens` places for them.

        Raises:
            ValueError: A shape is wrong, the input is empty or longer than `max_position_embeddings`, `position_ids`
                fall within a text, or a keyword is unknown or not supported.
        """
        self.check_keywords(kwargs)
        self.check_shapes(input_ids, inputs_embeds, attention_mask)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        keep = self.tokens_to_keep(input_ids, attention_mask)
        marked = self.find_marked(inputs, global_attention_mask)
        own = {name: kwargs.pop(name, None) for name in _OWN_KEYWORDS}
        unpad, most = own.pop("unpad_inputs"), own.pop("num_global_tokens")
        unpad = self.config.unpad_inputs if unpad is None else unpad
        starts = self.find_texts(inputs, keep, position_ids, own)
        position_ids = self.table_positions(position_ids, keep)
        stream = self.lay_out(inputs, keep, starts, unpad, kwargs)
        self.check_length(inputs.shape[1] if stream is None else stream.longest)
        if stream is None:
            hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
            carried, context = self.begin(hidden_states, keep, marked, most_marked=most, **kwargs)
        else:
            position_ids = self.stream_positions(position_ids, stream)
            input_ids, inputs_embeds, token_type_ids = map(stream.select, (input_ids, inputs_embeds, token_type_ids))
            hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, None)
            carried, context = self.begin_stream(
                hidden_states, stream, stream.select(marked), most_marked=most, **kwargs
            )
        hidden_states, carried = self.encoder(hidden_states, carried, context)
        if stream is not None:
            hidden_states, carried = context.restore(hidden_states, carried)
        return self.make_output(hidden_states, carried, context)

    def begin(
        self, hidden_states: Tensor, keep: Tensor | None, marked: Tensor | None = None, **options: Any
    ) -> tuple[Tensor | None, ForwardContext]:
        """Return the first layer's `carried` input for (b, n, d) states, and the context shared by all layers."""
        context = self.make_context(hidden_states, keep, marked, options)
        carried = self.first_carried()
        return carried, self.attention_class.prepare(self.config, hidden_states, carried, context)

    def find_marked(self, inputs: Tensor, global_attention_mask: Tensor | None) -> Tensor | None:
        """Return the marked tokens (b, n) of (b, n) or (b, n, d) inputs, or `None` if none is marked.

        Raises:
            ValueError: The family has no marked tokens, or the mask has another shape.
        """
        if global_attention_mask is None:
            return None
        if not self.config.reads_exact_tokens:
            raise ValueError(
                f"`global_attention_mask` is not supported: {self.config.model_type} models have no softmax over slots "
                "and window that marked tokens could join. Leave it out."
            )
        if global_attention_mask.shape != inputs.shape[:2]:
            raise ValueError(
                f"`global_attention_mask` must have the shape of the input, {tuple(inputs.shape[:2])}, but has shape "
                f"{tuple(global_attention_mask.shape)}."
            )
        marked = global_attention_mask != 0
        return marked if not is_readable(marked) or marked.any() else None

    def make_output(
        self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext | StreamContext
    ) -> BaseModelOutput:
        """Build the model's output from that of the last layer."""
        return BaseModelOutput(last_hidden_state=hidden_states)

    def check_keywords(self, keywords: dict[str, Any]) -> None:
        """Like `BaseModelMixin.check_keywords`; encoders also take what marks several texts in a row.

        Raises:
            ValueError: A keyword is unknown or not supported.
        """
        super().check_keywords({name: value for name, value in keywords.items() if name not in _OWN_KEYWORDS})

    def check_length(self, length: int) -> None:
        """Reject texts that are longer than the model's positions.

        Raises:
            ValueError: The longest text has more tokens.
        """
        limit = self.config.longest_input()
        if limit is not None and length > limit:
            raise ValueError(
                f"The input has {length} tokens, but the model accepts at most {limit} (`max_position_embeddings`). "
                f"Use `tokenizer(..., truncation=True, max_length={limit})`, or a model with more positions."
            )


class EncoderHeadMixin(HeadMixin):
    """A head on an encoder; rejects the config of a causal model."""

    one_text_per_row = False  # whether the head reads whole rows, which must not hold several texts
    marks = "none"  # what `config.global_tokens="auto"` marks

    def __init__(self, config: BoundedMemoryConfig) -> None:
        if config.is_decoder:
            raise ValueError(
                f"{type(self).__name__} needs an encoder, but the config is a causal model's (`is_decoder=True`). "
                f"Load it with AutoModelForCausalLM, or without its head with AutoModel."
            )
        config.refuse_encoder_decoder(type(self).__name__)
        super().__init__(config)
        self.base_model.one_text_per_row = self.one_text_per_row

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        global_attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Run the base model; without a `global_attention_mask`, the head marks what `config.global_tokens` says."""
        marks = self.config.global_tokens if self.config.local_window and self.config.reads_exact_tokens else "none"
        marks = self.marks if marks == "auto" else marks
        if global_attention_mask is None and marks != "none":
            keep = self.base_model.tokens_to_keep(input_ids, attention_mask)
            if keep is None:
                keep = torch.ones_like(input_ids if inputs_embeds is None else inputs_embeds[..., 0]).bool()
            ends = self.text_ends(input_ids, token_type_ids) if marks == "question" else None
            most = self.config.max_global_tokens
            global_attention_mask = first_marked(keep) if ends is None else question_marked(keep, ends, most)
            kwargs["num_global_tokens"] = 1 if ends is None else most
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return self.base_model(*inputs, global_attention_mask=global_attention_mask, return_dict=True, **kwargs)

    def text_ends(self, input_ids: Tensor | None, token_type_ids: Tensor | None) -> Tensor | None:
        """Return where the first text of a pair has ended, (b, n) boolean: separators, or tokens of another type."""
        end = self.config.eos_token_id if self.config.sep_token_id is None else self.config.sep_token_id
        ends = [input_ids == end] if input_ids is not None and isinstance(end, int) else []
        ends += [] if token_type_ids is None else [token_type_ids != 0]
        return reduce(torch.logical_or, ends) if ends else None


class MaskedLMMixin(EncoderHeadMixin):
    """Masked language modelling; in training with `sparse_prediction`, the head runs only on labelled positions."""

    auto_classes = ("AutoModelForMaskedLM", "AutoModelForPreTraining")
    output_class = MaskedLMOutput
    tied_weights = {
        "lm_head.decoder.weight": "{}.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.lm_head = MaskedLMHead(config)

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, tied to the token embedding."""
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer, and the head's bias by the output layer's."""
        self.lm_head.decoder = new_embeddings
        self.lm_head.bias = new_embeddings.bias

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied weights; `lm_head.bias` is the output layer's bias even if the matrices are not tied."""
        tied = super().get_expanded_tied_weights_keys(all_submodels)
        return tied or {name: source for name, source in self._tied_weights_keys.items() if name.endswith("bias")}

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see `EncoderModelMixin.forward`.
            labels: (b, n) token ids to predict; -100 is ignored.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if labels are given; `logits` (b, n, vocab_size), or (number of labels, vocab_size) in training with
            `sparse_prediction`.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        states, loss = outputs.last_hidden_state, None
        if labels is not None and self.training and self.config.sparse_prediction:
            labelled = labels != -100
            states, labels = states[labelled], labels[labelled]
        logits = self.lm_head(states)
        if labels is not None:
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class PooledHeadMixin(EncoderHeadMixin):
    """A head on one pooled vector per row."""

    one_text_per_row = True
    pooling_class: type[nn.Module] = TokenPooling

    def pooled_logits(self, outputs: ModelOutput, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """Pool the base model's outputs and compute logits (b, num_labels)."""
        keep = self.base_model.tokens_to_keep(input_ids, attention_mask)
        return self.classifier(self.pooling(outputs, keep))


class SequenceClassificationMixin(PooledHeadMixin):
    """Classification of, or regression on, a whole sequence or pair of sequences."""

    auto_classes = ("AutoModelForSequenceClassification",)
    marks = "first"
    output_class = SequenceClassifierOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.pooling = self.pooling_class(config)
        self.classifier = ClassificationHead(config, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see `EncoderModelMixin.forward`.
            labels: (b,) class indices or values, or (b, num_labels); see `classification_loss`.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if labels are given; `logits` (b, num_labels).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        logits = self.pooled_logits(outputs, input_ids, attention_mask)
        loss = None if labels is None else classification_loss(logits, labels, self.config, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class MultipleChoiceMixin(PooledHeadMixin):
    """Multiple choice: one score per choice, with a softmax over the choices."""

    auto_classes = ("AutoModelForMultipleChoice",)
    marks = "question"
    output_class = MultipleChoiceModelOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.pooling = self.pooling_class(config)
        self.classifier = ClassificationHead(config, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see `EncoderModelMixin.forward`;
                with an additional dimension for the choices, (b, choices, n) or (b, choices, n, d).
            labels: (b,) index of the correct choice.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if labels are given; `logits` (b, choices).
        """
        num_choices = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        flat = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "global_attention_mask": global_attention_mask,
        }
        flat = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in flat.items()}
        outputs = self.encode(**flat, **kwargs)
        logits = self.pooled_logits(outputs, flat["input_ids"], flat["attention_mask"]).view(-1, num_choices)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class TokenClassificationMixin(EncoderHeadMixin):
    """Token classification: one label per token."""

    auto_classes = ("AutoModelForTokenClassification",)
    output_class = TokenClassifierOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see `EncoderModelMixin.forward`.
            labels: (b, n) class indices; -100 is ignored.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if labels are given; `logits` (b, n, num_labels).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        logits = linear(self.classifier, self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class QuestionAnsweringMixin(EncoderHeadMixin):
    """Extractive question answering: start and end of the answer span."""

    auto_classes = ("AutoModelForQuestionAnswering",)
    one_text_per_row = True
    marks = "question"
    output_class = QuestionAnsweringModelOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = 2
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see `EncoderModelMixin.forward`.
            start_positions, end_positions: (b,) first and last token of the answer; positions beyond the input are
                ignored by the loss.
            num_items_in_batch: number of rows in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if both positions are given; `start_logits` and `end_logits` (b, n).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        if start_positions is not None and end_positions is not None:
            kwargs["unpad_inputs"] = False  # as in every model of transformers, padding competes in the loss
        outputs = self.encode(*inputs, **kwargs)
        start_logits, end_logits = linear(self.qa_outputs, outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
            )
        return self.make_output(outputs, loss=loss, start_logits=start_logits, end_logits=end_logits)
