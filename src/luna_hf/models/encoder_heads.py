"""The task heads of encoders, what they are made of, and their losses.

Each `...Mixin` implements a complete model; a family's class only names its parts:

    class LunaForMaskedLM(MaskedLMMixin, LunaPreTrainedModel):
        base_model_class = LunaModel

Every loss divides by `num_items_in_batch` if the Trainer passes it, so that gradient accumulation is equivalent to
one large batch.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple

from ..configuration import BoundedMemoryConfig
from ..ops.attention import float32_products, linear
from ..ops.tokens import first_kept, masked_mean
from .base import HeadMixin


def classifier_dropout(config: BoundedMemoryConfig) -> nn.Dropout:
    """Create the dropout layer of a classification head."""
    p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if p is None else p)


class MaskedLMHead(nn.Module):
    """Masked-LM head as in RoBERTa: dense, activation, LayerNorm, and an output layer tied to the token embedding."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        width = config.embedding_width()
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def initialise(self, config: BoundedMemoryConfig) -> None:
        """Initialise the bias of the output layer, a parameter that transformers does not initialise."""
        init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Compute logits: (..., d) to (..., vocab_size)."""
        with float32_products(states):
            return self.decoder(self.layer_norm(self.activation(self.dense(states))))


class TokenPooling(nn.Module):
    """Pool the token states to one vector per row, by `"cls"` or `"mean"`."""

    def __init__(self, config: BoundedMemoryConfig) -> None:
        super().__init__()
        self.pool = {"cls": first_kept, "mean": masked_mean}[config.classifier_pooling]

    def forward(self, outputs: ModelOutput, keep: Tensor | None) -> Tensor:
        """Pool the base model's outputs, given the padding mask (b, n), to (b, d)."""
        return self.pool(outputs.last_hidden_state, keep)


class ClassificationHead(nn.Module):
    """Head over a pooled state: dropout, dense, activation, dropout, output layer."""

    def __init__(self, config: BoundedMemoryConfig, num_labels: int) -> None:
        super().__init__()
        inner = config.classifier_hidden_size or config.hidden_size
        self.dropout = classifier_dropout(config)
        self.dense = nn.Linear(config.hidden_size, inner)
        self.activation = ACT2FN[config.classifier_activation]
        self.out_proj = nn.Linear(inner, num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute logits: (b, d) to (b, num_labels)."""
        states = self.activation(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(states))


def first_marked(keep: Tensor) -> Tensor:
    """Mark the first real token of every row: padding mask (b, n) to (b, n)."""
    return keep & (keep.long().cumsum(-1) == 1)


def question_marked(keep: Tensor, ends: Tensor, most: int) -> Tensor:
    """Mark the tokens before the first separator, the question's, given a padding mask (b, n).

    `ends` (b, n) is True for separators, or for all tokens from the one that ends the first text. Where the question
    has more than `most` tokens, or no second text follows, the first token is marked.
    """
    ended = (ends & keep).long().cumsum(-1) > 0
    # A single separator at the end leaves no second text.
    last = keep.long().cumsum(-1) == keep.sum(-1, keepdim=True)
    is_pair, question = (ended & keep & ~last).any(-1, keepdim=True), keep & ~ended
    return torch.where(is_pair & (question.sum(-1, keepdim=True) <= most), question, first_marked(keep))


def cross_entropy(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Cross-entropy of logits (..., classes) and labels (...), of which -100 are ignored, in float32 or wider.

    The mean over the labels, or the sum divided by `num_items_in_batch` if given.

    Raises:
        ValueError: Labels are no integers, have another shape, or (on a CPU) are no classes.
    """
    if labels.is_floating_point():
        raise ValueError(f"`labels` are {labels.dtype}, but classes are integers: convert them with `labels.long()`.")
    rows = logits.shape[:-1]
    if labels.numel() != rows.numel() or (len(rows) > 1 and labels.shape != rows):
        advice = " For several classes at once, pass floats." if labels.shape == logits.shape else ""
        raise ValueError(f"`labels` have shape {tuple(labels.shape)}, but must have {tuple(rows)}.{advice}")
    reduction, classes = "mean" if num_items_in_batch is None else "sum", logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    try:
        loss = F.cross_entropy(logits, labels.flatten().to(logits.device, torch.long), reduction=reduction)
    except IndexError:
        found = f"from {labels[labels != -100].min()} to {labels.max()}"
        raise ValueError(
            f"`labels` run {found}, but the model has the classes 0 to {classes - 1} (`num_labels`, or `vocab_size`); "
            "only -100 is ignored."
        ) from None
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def problem_of(labels: Tensor, config: BoundedMemoryConfig) -> str:
    """The `problem_type` that labels stand for.

    One output means regression, integer labels single-label, and float labels multi-label classification.
    """
    if config.num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


@torch.compiler.assume_constant_result
def kept_problem(config: BoundedMemoryConfig, problem: str) -> str:
    """`config.problem_type`, set to `problem` if it is `None`; a compiled graph does not depend on the field."""
    config.problem_type = config.problem_type or problem
    return config.problem_type


def classification_loss(
    logits: Tensor, labels: Tensor, problem: str, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Loss of a `problem_type`: regression (MSE), single-label (cross-entropy) or multi-label (BCE).

    Logits are (b, num_labels), labels (b,), or (b, num_labels) for multi-label classification and regression with
    several targets.

    Raises:
        ValueError: The shapes of labels and logits do not match, or there is no such `problem_type`.
    """
    if problem == "single_label_classification":
        return cross_entropy(logits, labels, num_items_in_batch)
    losses = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}
    if problem not in losses:
        known = ", ".join(("single_label_classification", *losses))
        raise ValueError(f"`problem_type` is {problem!r}, but must be one of {known}.")
    if labels.numel() != logits.numel():
        raise ValueError(
            f"`labels` have shape {tuple(labels.shape)}, but {problem} with {logits.shape[-1]} outputs needs "
            f"{tuple(logits.shape)}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits).view_as(logits)
    if num_items_in_batch is None:
        return losses[problem](logits, labels)
    return losses[problem](logits, labels, reduction="sum") / num_items_in_batch


class EncoderHeadMixin(HeadMixin):
    """A head on an encoder; each head implements `add_head`, `predict` and `head_loss`."""

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
    ) -> MaskedLMOutput | SequenceClassifierOutput | MultipleChoiceModelOutput | TokenClassifierOutput:
        """Like `EncoderModelMixin.forward`, with a head.

        Args:
            labels: what to predict, see the class; a label of -100 is ignored.
            num_items_in_batch: number of labels in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            An `output_class` with `loss` if labels are given, and `logits`, see the class.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        logits, labels = self.predict(outputs, labels, *inputs)
        loss = None if labels is None else self.head_loss(logits, labels, num_items_in_batch)
        return self.make_output(outputs, loss=loss, logits=logits)

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute logits from the base model's outputs; returns them and the labels of the loss."""
        raise NotImplementedError(f"{type(self).__name__} must implement `predict`.")

    def head_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Compute the loss: cross-entropy, unless the head has another."""
        return cross_entropy(logits, labels, num_items_in_batch)

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
            starts = self.base_model.find_texts(keep, keep, position_ids, kwargs)
            ends = self.text_ends(input_ids, token_type_ids) if marks == "question" and starts is None else None
            most = self.config.max_global_tokens
            global_attention_mask = first_marked(keep) if ends is None else question_marked(keep, ends, most)
            if starts is not None:  # several texts in a row
                global_attention_mask = global_attention_mask | (starts & keep)
            kwargs["num_global_tokens"] = 1 if ends is None else most
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return self.base_model(*inputs, global_attention_mask=global_attention_mask, return_dict=True, **kwargs)

    def text_ends(self, input_ids: Tensor | None, token_type_ids: Tensor | None) -> Tensor | None:
        """Return where the first text of a pair has ended, (b, n) boolean: separators, or tokens of another type."""
        end = self.config.eos_token_id if self.config.sep_token_id is None else self.config.sep_token_id
        ends = [input_ids == end] if input_ids is not None and isinstance(end, int) else []
        if token_type_ids is not None:
            second = token_type_ids != 0
            # Without ids, the separator is the last token of the first text.
            ends.append(second if ends else second | F.pad(second[:, 1:], (0, 1)))
        if not ends and not torch.compiler.is_compiling():
            logging.get_logger(__name__).warning_once(
                "The model cannot tell where the question ends, and marks its first token alone: set "
                "`model.config.sep_token_id` to the tokenizer's, or pass `token_type_ids`."
            )
        return reduce(torch.logical_or, ends) if ends else None


class MaskedLMMixin(EncoderHeadMixin):
    """Masked language modelling.

    `labels` are the token ids (b, n) to predict, `logits` (b, n, vocab_size). In training with `sparse_prediction`, the
    head runs only on labelled positions, and logits are (number of labels, vocab_size).
    """

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

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`."""
        states = outputs.last_hidden_state
        if labels is not None and self.training and self.config.sparse_prediction:
            labelled = labels != -100
            states, labels = states[labelled], labels[labelled]
        return self.lm_head(states), labels


class SequenceClassificationMixin(EncoderHeadMixin):
    """Classification of, or regression on, a whole sequence or pair of sequences.

    `labels` are class indices or values (b,), or (b, num_labels), see `classification_loss`; `logits` (b, num_labels).
    """

    auto_classes = ("AutoModelForSequenceClassification",)
    one_text_per_row = True
    marks = "first"
    output_class = SequenceClassifierOutput
    pooling_class: type[nn.Module] = TokenPooling

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.pooling = self.pooling_class(config)
        self.classifier = ClassificationHead(config, config.num_labels)

    def predict(
        self,
        outputs: ModelOutput,
        labels: Tensor | None,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        *inputs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`, from one pooled vector per row."""
        keep = self.base_model.tokens_to_keep(input_ids, attention_mask)
        return self.classifier(self.pooling(outputs, keep)), labels

    def head_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Compute the loss for `config.problem_type`, which is kept: pipelines decide by it what they show."""
        if torch.compiler.is_compiling():
            problem = kept_problem(self.config, problem_of(labels, self.config))
            return classification_loss(logits, labels, problem, num_items_in_batch)
        problem = self.config.problem_type or problem_of(labels, self.config)
        loss = classification_loss(logits, labels, problem, num_items_in_batch)  # raises if the labels do not fit
        self.config.problem_type = problem
        return loss


class MultipleChoiceMixin(EncoderHeadMixin):
    """Multiple choice: one score per choice, with a softmax over the choices.

    The inputs have an additional dimension, (b, choices, n) or (b, choices, n, d). `labels` are the indices of the
    correct choices (b,), `logits` (b, choices).
    """

    auto_classes = ("AutoModelForMultipleChoice",)
    one_text_per_row = True
    marks = "question"
    output_class = MultipleChoiceModelOutput
    pooling_class: type[nn.Module] = TokenPooling

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.pooling = self.pooling_class(config)
        self.classifier = ClassificationHead(config, 1)

    def encode(self, *inputs: Tensor | None, **kwargs: Any) -> ModelOutput:
        """Like `EncoderHeadMixin.encode`, with a row for each choice.

        Raises:
            ValueError: The input has no dimension for the choices.
        """
        ids = inputs[0]
        if ids is not None and ids.dim() != 3:
            raise ValueError(f"`input_ids` must have shape (batch, choices, length), but have {tuple(ids.shape)}.")
        return super().encode(*(None if tensor is None else tensor.flatten(0, 1) for tensor in inputs), **kwargs)

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`."""
        ids, mask = (None if tensor is None else tensor.flatten(0, 1) for tensor in inputs[:2])
        scores = self.classifier(self.pooling(outputs, self.base_model.tokens_to_keep(ids, mask)))
        num_choices = next(tensor for tensor in inputs if tensor is not None).shape[1]
        return scores.view(-1, num_choices), labels


class TokenClassificationMixin(EncoderHeadMixin):
    """Token classification: `labels` are class indices (b, n), `logits` (b, n, num_labels)."""

    auto_classes = ("AutoModelForTokenClassification",)
    output_class = TokenClassifierOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = config.num_labels
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def predict(self, outputs: ModelOutput, labels: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Like `EncoderHeadMixin.predict`."""
        return linear(self.classifier, self.dropout(outputs.last_hidden_state)), labels


class QuestionAnsweringMixin(EncoderHeadMixin):
    """Extractive question answering: start and end of the answer span."""

    auto_classes = ("AutoModelForQuestionAnswering",)
    one_text_per_row = True
    marks = "question"
    output_class = QuestionAnsweringModelOutput

    def add_head(self, config: BoundedMemoryConfig) -> None:
        """Create the head's modules."""
        self.num_labels = 2
        self.loss_type = "ForQuestionAnswering"  # also of subclasses with another name
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
        """Like `EncoderModelMixin.forward`, with a head.

        Args:
            start_positions: (b,) first token of the answer; positions beyond the input are ignored by the loss.
            end_positions: (b,) last token of the answer.
            num_items_in_batch: number of rows in the whole update; the summed loss is divided by it.
            global_attention_mask: see `EncoderModelMixin.forward`; by default what `config.global_tokens` says.

        Returns:
            `loss` if both positions are given; `start_logits` and `end_logits` (b, n), of padding -10,000.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask)
        outputs = self.encode(*inputs, **kwargs)
        logits = linear(self.qa_outputs, outputs.last_hidden_state)
        if (keep := self.base_model.tokens_to_keep(input_ids, attention_mask)) is not None:
            logits = logits.masked_fill(~keep.unsqueeze(-1), -1e4)  # finite in sums, and in half precision
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
            )
        return self.make_output(outputs, loss=loss, start_logits=start_logits, end_logits=end_logits)
