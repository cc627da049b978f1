"""Training with transformers' Trainer and with peft: learning, accumulation, precision, checkpoints, adapters."""

import copy
import random

import pytest
import torch
from helpers import (
    FAMILY_OWN_VARIANTS,
    FAMILY_POOLINGS,
    MODELS,
    code_name,
    inputs_for,
    model_class,
    padded_batch,
    tiny_config_for,
    tiny_model,
    tiny_tokenizer,
    variants_of,
)
from transformers import (
    DataCollatorWithPadding,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from variants import ROWS

from luna_hf import FAMILIES, modeling_layers

families = pytest.mark.parametrize("family", list(FAMILIES))


def arguments(folder, **overrides):
    plain = {
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**plain, **overrides})


# Accumulation: four rows at once, or one at a time.

TASKS = {
    "masked-lm": ("mlm", {}),
    "single-label": ("sequence", {}),
    "regression": ("sequence", {"num_labels": 1}),
    "regression-three-targets": ("sequence", {"num_labels": 3, "problem_type": "regression"}),
    "multi-label": ("sequence", {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "multiple-choice": ("choice", {}),
    "token-classification": ("token", {}),
    "question-answering": ("span", {}),
}


def four_rows(kind, options):
    batch = inputs_for(kind, batch=4, labels=True)
    if kind == "sequence" and options:
        width = options["num_labels"]
        values = torch.linspace(-1, 2, 4 * width, dtype=torch.float64).view(4, width)
        batch["labels"] = values.round().clamp(0, 1) if "multi" in options.get("problem_type", "") else values
        batch["labels"] = batch["labels"].squeeze(-1)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(4)]


def one_update(model, rows, folder, batch_size, accumulation):
    """Change of every parameter in one optimizer step over all rows, by the Trainer."""
    trained = copy.deepcopy(model)
    args = arguments(
        folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
    )
    Trainer(trained, args, train_dataset=rows, data_collator=default_data_collator).train()
    before = dict(model.named_parameters())
    return {name: parameter.detach() - before[name].detach() for name, parameter in trained.named_parameters()}


@families
@pytest.mark.parametrize("task", list(TASKS))
def test_accumulation_gives_the_update_of_one_large_batch(family, task, tmp_path):
    kind, options = TASKS[task]
    model, rows = tiny_model(family, kind, **options).double(), four_rows(kind, options)
    large = one_update(model, rows, tmp_path, 4, 1)
    for batch_size, accumulation in ((1, 4), (2, 2)):
        small = one_update(model, rows, tmp_path, batch_size, accumulation)
        for name, change in large.items():
            # Float64: only the order of additions differs.
            torch.testing.assert_close(small[name], change, atol=1e-12, rtol=1e-9, msg=name)
    assert max(change.abs().max() for change in large.values()) > 1e-4


def test_the_accumulation_check_finds_a_head_that_ignores_the_number_of_items(tmp_path):
    # transformers' own masked LM is such a head: four micro batches give about four times the update. When this fails,
    # the library has been corrected, and this test has served its purpose.
    torch.manual_seed(0)
    model = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=120,
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=96,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    ).double()
    rows = four_rows("mlm", {})
    large, small = (one_update(model, rows, tmp_path, size, 4 // size) for size in (4, 1))
    name = "roberta.encoder.layer.0.output.dense.weight"
    assert 2 < (small[name].norm() / large[name].norm()).item() < 8


# Learning.


def topic_texts(count, seed):
    """Texts of unequal lengths; the class is which of two words occurs, anywhere among others."""
    words = ["every", "token", "reads", "the", "packed", "sequence", "in", "turn", "quick", "brown", "lazy"]
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        label = generator.randrange(2)
        text = generator.choices(words, k=generator.randint(4, 14))
        text.insert(generator.randrange(len(text) + 1), ["fox", "dog"][label])
        rows.append({"text": " ".join(text), "label": label})
    return rows


def tokenized(rows, tokenizer):
    return [{**tokenizer(row["text"]), "label": row["label"]} for row in rows]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def classification_trainer(family, folder, pooling="mean", **overrides):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = tiny_config_for(
        family, vocab_size=len(tokenizer), classifier_pooling=pooling, hidden_dropout_prob=0.1, num_hidden_layers=2
    )
    defaults = {
        "optim": "adamw_torch",
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
    }
    return Trainer(
        model_class(family, "sequence")(config),
        arguments(folder, **{**defaults, **overrides}),
        train_dataset=tokenized(topic_texts(640, seed=1), tokenizer),
        eval_dataset=tokenized(topic_texts(200, seed=2), tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )


@pytest.mark.parametrize(("family", "pooling"), FAMILY_POOLINGS)
def test_finetuning_learns_a_classification(family, pooling, tmp_path):
    trainer = classification_trainer(family, tmp_path, pooling, num_train_epochs=6)
    # 200 unseen texts: guessing stays below 0.6 in all but a few of a thousand cases.
    assert trainer.evaluate()["eval_accuracy"] < 0.65
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.95


OPTIONS = {
    "bf16": {"bf16": True},
    "activation-checkpointing": {"activation_checkpointing": True},
    "label-smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "grouped-by-length": {"train_sampling_strategy": "group_by_length"},
    "auto-batch-size": {"auto_find_batch_size": True},
    "bf16-evaluation": {"bf16_full_eval": True},
    "gradient-clipping": {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2},
}


@families
@pytest.mark.parametrize("option", list(OPTIONS))
def test_options_of_the_trainer_work(family, option, tmp_path):
    trainer = classification_trainer(family, tmp_path, max_steps=4, **OPTIONS[option])
    loss = trainer.train().training_loss
    # The first steps stay at the loss of guessing, ln 2.
    assert 0.4 < loss < 1.2
    assert 0.4 < trainer.evaluate()["eval_loss"] < 1.2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@families
def test_resuming_within_an_epoch_gives_the_same_weights(family, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    straight = classification_trainer(family, tmp_path, **options)
    straight.train()
    resumed = classification_trainer(family, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, parameter in straight.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), parameter, atol=1e-6, rtol=1e-5, msg=name)


@families
def test_a_checkpoint_of_the_trainer_is_a_complete_model_folder(family, tmp_path):
    trainer = classification_trainer(family, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", f"modeling_{code_name(family)}.py"} <= names
    loaded, batch = type(trainer.model).from_pretrained(tmp_path / "checkpoint-1"), padded_batch([9, 5])
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, trainer.model.eval()(**batch).logits)


# Gradient checkpointing.


def gradients(model, batch, **kwargs):
    model.zero_grad()
    torch.manual_seed(0)  # the same dropout
    model(**batch, **kwargs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


CHECKPOINTED = [(family, kind, "default") for family in FAMILIES for kind in MODELS if kind != "base"]
CHECKPOINTED += [(family, "mlm", variant) for family, variant in FAMILY_OWN_VARIANTS]


@pytest.mark.parametrize(("family", "kind", "variant"), CHECKPOINTED)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_gradient(family, kind, variant, reentrant):
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = tiny_model(family, kind, **dropout, **variants_of(family)[variant]).double().train()
    batch = inputs_for(kind, labels=True)
    expected = gradients(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    layers, calls = model.base_model.encoder.layer, []
    for layer in layers:
        layer.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model, batch)
    # Every layer ran again in the backward pass: checkpointing was on.
    assert len(calls) == 2 * len(layers)
    for name, gradient in expected.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-12, rtol=1e-9, msg=name)


def test_reentrant_checkpointing_draws_the_same_dropout_in_blocks_of_rows(monkeypatch):
    """Its first pass has no gradients, but is no inference: the feed-forward network must not be cut into blocks."""
    monkeypatch.setattr(modeling_layers, "_FEED_FORWARD_ROWS", {"cpu": 8})
    model = tiny_model("luna", "mlm", hidden_dropout_prob=0.1, activation_dropout=0.1).double().train()
    batch = inputs_for("mlm", labels=True)
    expected = gradients(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": True})
    for name, gradient in gradients(model, batch).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-9, msg=name)


# LoRA.


@pytest.mark.parametrize(("family", "targets"), [(family, name) for family in FAMILIES for name in ROWS[family].lora])
def test_lora_trains_merges_and_comes_back(family, targets, tmp_path):
    peft = pytest.importorskip("peft")
    lora = ROWS[family].lora[targets]
    base = tiny_model(family, "sequence", **lora.options)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=lora.targets, modules_to_save=["classifier"], lora_dropout=0.0
    )
    model = peft.get_peft_model(copy.deepcopy(base), config)
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == lora.adapted
    assert 0 < model.get_nb_trainable_parameters()[0] < model.get_nb_trainable_parameters()[1] / 2

    rows, batch = four_rows("sequence", {}), inputs_for("sequence")
    args = arguments(tmp_path, optim="adamw_torch", learning_rate=1e-2, max_steps=5, per_device_train_batch_size=4)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())
    model.eval()
    with torch.no_grad():
        trained = model(**batch).logits
        assert (trained - base(**batch).logits).abs().max() > 1e-2

        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
        torch.testing.assert_close(loaded(**batch).logits, trained)

        merged = model.merge_and_unload()
        assert type(merged) is type(base)
        # Float32: B A is added to the weights instead of to the outputs.
        torch.testing.assert_close(merged(**batch).logits, trained, atol=1e-5, rtol=1e-5)
        merged.save_pretrained(tmp_path / "merged")
        again = type(base).from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(again(**batch).logits, merged(**batch).logits)
