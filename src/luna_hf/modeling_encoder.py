"""The encoder that all families share, and its task heads.

Each `...Mixin` holds the whole model; a family's class only names its parts:

    class LunaForMaskedLM(MaskedLMMixin, LunaPreTrainedModel):
        base_model_class = LunaModel

Losses divide by `num_items_in_batch` where the Trainer passes it, for every kind of loss: gradient accumulation then
gives the update of one large batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
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

from .attention_base import Linear
from .configuration_base import BoundedMemoryConfig
from .context import ForwardContext, make_context
from .functional import first_kept, masked_mean
from .modeling_base import BaseModelMixin, HeadMixin
from .modeling_layers import DepthwiseConvolution


class EncoderModelMixin(BaseModelMixin):
    """The encoder of a family."""

    convolution_class = DepthwiseConvolution
    # AutoModel knows one class for a configuration, encoder or decoder: the package enters the decoder here.
    causal_model_class: type[PreTrainedModel] | None = None

    def __new__(cls, config: BoundedMemoryConfig | None = None, *args: Any, **kwargs: Any) -> Any:
        """The encoder; or the family's decoder without a head, for a config that describes one (`is_decoder`).

        Raises:
            ValueError: The config is a decoder's, and the code of a checkpoint folder has no decoder.
        """
        if config is None or not config.is_decoder:
            return super().__new__(cls)
        if cls.causal_model_class is None:
            raise ValueError(
                f"{cls.__name__} is an encoder, but the config is a causal model's: load it with AutoModel."
            )
        return cls.causal_model_class(config, *args, **kwargs)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (b, n) token ids, or instead
            inputs_embeds: (b, n, d) token embeddings, before scale, positions and LayerNorm.
            attention_mask: (b, n), 1 for tokens and 0 for padding on whichever side. Without it, padding is where
                `input_ids` is `pad_token_id`.
            token_type_ids: (b, n) segments, if the model has segment embeddings.
            position_ids: (b, n) rows of the position table; by default the t-th token has row `pad_token_id + t`. A
                memory that goes by the order of the tokens does so whatever these say.
            output_hidden_states, output_attentions, return_dict: as keywords. The attentions (eager only) are what each
                token reads: (b, h, n, m) over the slots, over the places of its window, or (b, h, n, n) of full
                attention. A family may have more to record.

        Raises:
            ValueError: Wrong shapes, no tokens, more than `max_position_embeddings`, a keyword without a meaning.
        """
        self.check_inputs(input_ids, inputs_embeds, attention_mask, kwargs)
        keep = self.tokens_to_keep(input_ids, attention_mask)
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, token_type_ids, keep)
        carried, context = self.begin(hidden_states, keep, **kwargs)
        hidden_states, carried = self.encoder(hidden_states, carried, context)
        return self.make_output(hidden_states, carried, context)

    def begin(self, hidden_states: Tensor, keep: Tensor | None, **options: Any) -> tuple[Tensor | None, ForwardContext]:
        """What the first layer takes besides the (b, n, d) states: what is carried, and the context of all layers."""
        context = make_context(keep, hidden_states.shape[1], hidden_states.device, options=options)
        carried = self.first_carried()
        return carried, self.attention_class.prepare(self.config, hidden_states, carried, context)

    def make_output(self, hidden_states: Tensor, carried: Tensor | None, context: ForwardContext) -> BaseModelOutput:
        """The output from what has left the last layer."""
        return BaseModelOutput(last_hidden_state=hidden_states)

    def check_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        """Refuse what an encoder would compute wrongly or silently ignore.

        Args:
            input_ids, inputs_embeds, attention_mask: as given to the model.
            keywords: whatever else was given.

        Raises:
            ValueError: Not exactly one kind of input; an empty or too long one; a mask that is not (batch, length); a
                keyword that is misspelt, or that asks for what the model does not do.
        """
        self.check_keywords(keywords)
        length, limit = self.check_shapes(input_ids, inputs_embeds, attention_mask), self.config.max_position_embeddings
        if length > limit:
            raise ValueError(
                f"The input is {length} tokens long, but the model takes at most {limit} "
                f"(`max_position_embeddings`). Truncate it (`tokenizer(..., truncation=True, max_length={limit})`) "
                "or use a model with more positions."
            )


def classifier_dropout(config: BoundedMemoryConfig) -> nn.Dropout:
    """Dropout of the classification heads."""
    p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if p is None else p)


class MaskedLMHead(nn.Module):
    """Dense, activation, LayerNorm, decoder tied to the token embedding, bias."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """The bias of the output layer, which is the head's own."""
        init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """(..., d) to (..., vocab_size)."""
        return self.decoder(self.layer_norm(self.activation(self.dense(states))))


class TokenPooling(nn.Module):
    """One vector a row from the token states: `"cls"` or `"mean"`."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.pool = {"cls": first_kept, "mean": masked_mean}[config.classifier_pooling]

    def forward(self, outputs: ModelOutput, keep: Tensor | None) -> Tensor:
        """Base model outputs and (b, n) token mask to (b, d)."""
        return self.pool(outputs.last_hidden_state, keep)


class ClassificationHead(nn.Module):
    """Dropout, dense, activation, dropout, output, over a pooled state."""

    def __init__(self, config: BoundedMemoryConfig, num_labels: int) -> None:
        super().__init__()
        inner = config.classifier_hidden_size or config.hidden_size
        self.dropout = classifier_dropout(config)
        self.dense = Linear(config.hidden_size, inner)
        self.activation = ACT2FN[config.classifier_activation]
        self.out_proj = Linear(inner, num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """(b, d) to (b, num_labels)."""
        states = self.activation(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(states))


def cross_entropy(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Mean over the labels that are not -100, or their sum over `num_items_in_batch`; in float32 at least.

    Args:
        logits: (..., classes).
        labels: (...) long.
    """
    reduction = "mean" if num_items_in_batch is None else "sum"
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    loss = F.cross_entropy(logits, labels.flatten().to(logits.device), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def classification_loss(
    logits: Tensor, labels: Tensor, config: BoundedMemoryConfig, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Loss of `config.problem_type`: regression (MSE), single label (cross-entropy) or multi label (BCE).

    Without a `problem_type`, one output means regression, integer labels mean single label, anything else multi label;
    the configuration is left as it is.

    Args:
        logits: (b, num_labels).
        labels: (b,), or (b, num_labels) for multi label and for regression on several targets.

    Raises:
        ValueError: Labels and logits do not fit.
    """
    problem = config.problem_type
    if problem is None:
        if config.num_labels == 1:
            problem = "regression"
        else:
            problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if problem == "single_label_classification":
        return cross_entropy(logits, labels, num_items_in_batch)
    if labels.numel() != logits.numel():
        raise ValueError(
            f"`labels` of shape {tuple(labels.shape)} do not fit {problem} with {config.num_labels} outputs: "
            f"they must have the shape {tuple(logits.shape)}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits).view_as(logits)
    loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    if num_items_in_batch is None:
        return loss(logits, labels)
    return loss(logits, labels, reduction="sum") / num_items_in_batch


class EncoderHeadMixin(HeadMixin):
    """A head that reads both sides of a token."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        if config.is_decoder:
            raise ValueError(
                f"{type(self).__name__} reads both sides of a token, but the config is a causal model's "
                f"(`is_decoder`). Load it with AutoModelForCausalLM, or its trunk with AutoModel."
            )
        super().__init__(config)


class MaskedLMMixin(EncoderHeadMixin):
    """Masked language modelling; with `sparse_prediction` the head runs only at labelled positions in training."""

    _auto_class = "AutoModelForMaskedLM"
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
        """Replace the output layer (its bias is the head's)."""
        self.lm_head.decoder = new_embeddings
        self.lm_head.bias = new_embeddings.bias

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Tied weights by name; `lm_head.bias` is the output layer's bias even where the matrices are not tied."""
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: as the base model.
            labels: (b, n) token ids to predict; -100 where there is nothing to predict.
            num_items_in_batch: number of labels of the whole update; the loss is then a sum divided by it.

        Returns:
            `loss` if there are labels; `logits` (b, n, vocab_size), or (number of labels, vocab_size) in training with
            `sparse_prediction`.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, return_dict=True, **kwargs)
        states, loss = outputs.last_hidden_state, None
        if labels is not None and self.training and self.config.sparse_prediction:
            labelled = labels != -100
            states, labels = states[labelled], labels[labelled]
        logits = self.lm_head(states)
        if labels is not None:
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class PooledHeadMixin(EncoderHeadMixin):
    """Heads that read one vector a row."""

    pooling_class: type[nn.Module] = TokenPooling

    def pooled_logits(self, outputs: ModelOutput, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """(b, num_labels)."""
        keep = self.base_model.tokens_to_keep(input_ids, attention_mask)
        return self.classifier(self.pooling(outputs, keep))


class SequenceClassificationMixin(PooledHeadMixin):
    """Classification or regression of a whole sequence (or pair)."""

    _auto_class = "AutoModelForSequenceClassification"
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: as the base model.
            labels: (b,) class indices or values, or (b, num_labels); see `config.problem_type`.
            num_items_in_batch: number of labels of the whole update; the loss is then a sum divided by it.

        Returns:
            `loss` if there are labels; `logits` (b, num_labels).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, return_dict=True, **kwargs)
        logits = self.pooled_logits(outputs, input_ids, attention_mask)
        loss = None if labels is None else classification_loss(logits, labels, self.config, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class MultipleChoiceMixin(PooledHeadMixin):
    """One score for each choice; a softmax over the choices."""

    _auto_class = "AutoModelForMultipleChoice"
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: as the base model, with one more
                dimension for the choices: (b, choices, n) or (b, choices, n, d).
            labels: (b,) index of the right choice.
            num_items_in_batch: number of labels of the whole update; the loss is then a sum divided by it.

        Returns:
            `loss` if there are labels; `logits` (b, choices).
        """
        num_choices = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        flat = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        flat = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in flat.items()}
        outputs = self.base_model(**flat, return_dict=True, **kwargs)
        logits = self.pooled_logits(outputs, flat["input_ids"], flat["attention_mask"]).view(-1, num_choices)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class TokenClassificationMixin(EncoderHeadMixin):
    """A label for each token."""

    _auto_class = "AutoModelForTokenClassification"
    output_class = TokenClassifierOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.dropout = classifier_dropout(config)
        self.classifier = Linear(config.hidden_size, config.num_labels)

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: as the base model.
            labels: (b, n) class indices; -100 where there is no label.
            num_items_in_batch: number of labels of the whole update; the loss is then a sum divided by it.

        Returns:
            `loss` if there are labels; `logits` (b, n, num_labels).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)


class QuestionAnsweringMixin(EncoderHeadMixin):
    """Start and end of an answer span."""

    _auto_class = "AutoModelForQuestionAnswering"
    output_class = QuestionAnsweringModelOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = 2
        self.qa_outputs = Linear(config.hidden_size, 2)

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: as the base model.
            start_positions, end_positions: (b,) first and last token of the answer; a position outside the input is
                not counted in the loss.
            num_items_in_batch: number of rows of the whole update; the loss is then a sum divided by it.

        Returns:
            `loss` if there are both positions; `start_logits` and `end_logits` (b, n).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, return_dict=True, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
            )
        return self.make_output(outputs, loss=loss, start_logits=start_logits, end_logits=end_logits)
