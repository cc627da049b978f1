"""The Trainer of the finetuning commands: one update whatever its micro batches, and the order of the rows."""

import copy
from collections import Counter

import pytest
import torch
from tasks.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from tasks.trainer import FinetuneTrainer, SeededSampler, task_loss
from tiny_finetuning import MODEL_TYPES, encoder
from torch.nn import functional as F
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_pt_utils import LabelSmoother

# ---- one update, whatever its micro batches ----

KINDS = {
    "single-label": (SINGLE_LABEL, 0.0, {"num_labels": 3}),
    "label-smoothing": (SINGLE_LABEL, 0.1, {"num_labels": 3}),
    "regression": (REGRESSION, 0.0, {"num_labels": 1}),
    "regression-three-targets": (REGRESSION, 0.0, {"num_labels": 3}),
    "multi-label": (MULTI_LABEL, 0.0, {"num_labels": 3}),
    "multiple-choice": (SINGLE_LABEL, 0.0, {}),
}
# Every kind once, and every type of model once.
CASES = [*(("roberta", kind) for kind in KINDS), *((name, "single-label") for name in MODEL_TYPES if name != "roberta")]
ROWS = 7  # in micro batches of two, the last holds one row


def head_and_rows(model_type, kind):
    """A model in float64 without dropout, and seven labelled rows of one length."""
    problem, _, fields = KINDS[kind]
    auto_class = AutoModelForMultipleChoice if kind == "multiple-choice" else AutoModelForSequenceClassification
    config = copy.deepcopy(encoder(model_type).config)
    for name, value in {**fields, **({"problem_type": problem} if fields else {})}.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    model = auto_class.from_config(config).double().eval()
    for module in model.modules():  # train() would turn it on
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    shape = (ROWS, 3, 9) if kind == "multiple-choice" else (ROWS, 9)
    ids = torch.randint(4, 300, shape)
    if problem == SINGLE_LABEL:
        labels = torch.randint(0, 3, (ROWS,))
    else:
        labels = torch.randn(ROWS, fields["num_labels"], dtype=torch.float64) * 2
        labels[::2, 0] = -100  # with which labels of classes are marked as missing
        labels = (labels > 0).double() if problem == MULTI_LABEL else labels.squeeze(-1)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def update(model, batch, kind, folder):
    """Change of every parameter in one step over all rows, in micro batches of two."""
    problem, smoothing, _ = KINDS[kind]
    trained = copy.deepcopy(model)
    plain = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 1}
    quiet = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, label_smoothing_factor=smoothing, **plain, **quiet, **batches
    )
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(ROWS)]
    trainer = FinetuneTrainer(
        problem_type=problem,
        model=trained,
        args=arguments,
        train_dataset=rows,
        data_collator=default_data_collator,
    )
    trainer.train()
    assert trainer.seconds > 0
    before = dict(model.named_parameters())
    return {name: (parameter - before[name]).detach() for name, parameter in trained.named_parameters()}


def expected_loss(logits, labels, kind):
    """The mean over all rows, computed independently."""
    problem, smoothing, _ = KINDS[kind]
    if smoothing:
        return LabelSmoother(epsilon=smoothing)({"logits": logits}, labels)
    if problem == SINGLE_LABEL:
        return -logits.log_softmax(-1).gather(-1, labels[:, None]).mean()
    labels = labels.view_as(logits)
    if problem == REGRESSION:
        return ((logits - labels) ** 2).mean()
    return -(labels * F.logsigmoid(logits) + (1 - labels) * F.logsigmoid(-logits)).mean()


@pytest.mark.parametrize(("model_type", "kind"), CASES)
def test_accumulation_gives_the_update_of_one_large_batch(model_type, kind, tmp_path):
    model, batch = head_and_rows(model_type, kind)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    expected_loss(model(**inputs).logits, batch["labels"], kind).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    change = update(model, batch, kind, tmp_path)
    for name, gradient in gradients.items():
        # Float64 except for what the models compute in float32.
        torch.testing.assert_close(change[name], -gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_loss_without_a_number_of_items_is_the_mean_of_the_batch():
    logits, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    loss = task_loss({"logits": logits.bfloat16()}, labels, problem_type=SINGLE_LABEL)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.bfloat16().float(), labels))


# ---- order ----


def test_order_is_a_permutation_of_the_seed_and_the_epoch_alone():
    lengths = [3 + (row * 7919) % 50 for row in range(1003)]
    epoch = 0
    sampler = SeededSampler(lengths, 8, 1, lambda: epoch)
    first = list(sampler)
    torch.rand(5)  # what the model draws must not matter
    assert list(sampler) == first and Counter(first) == Counter(range(1003))
    epoch = 1
    second = list(sampler)
    assert second != first and Counter(second) == Counter(range(1003))
    assert list(SeededSampler(lengths, 8, 2, lambda: 0)) != first


def test_batches_hold_rows_of_similar_length_and_the_longest_comes_first():
    lengths = torch.randint(1, 500, (1003,), generator=torch.Generator().manual_seed(0)).tolist()

    def padded(order):
        batches = [order[start : start + 8] for start in range(0, len(order), 8)]
        return sum(len(batch) * max(lengths[row] for row in batch) for batch in batches), batches

    grouped, batches = padded(list(SeededSampler(lengths, 8, 0, int)))
    plain, _ = padded(list(SeededSampler([1] * 1003, 8, 0, int)))
    # Without grouping the longest of eight rows makes the others about 1.8 times too long.
    assert grouped < 1.05 * sum(lengths) and plain > 1.5 * sum(lengths)
    assert max(lengths) in [lengths[row] for row in batches[0]]
    assert [len(batch) for batch in batches] == [8] * 125 + [3]
