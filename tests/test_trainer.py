"""Training with transformers' Trainer and with peft: learning, accumulation, precision, checkpoints, adapters.

The Trainer does not depend on the mechanism: one encoder and one causal model represent all.
"""

import copy
import random

import pytest
import torch
from helpers import (
    FAMILY_CAUSAL_KINDS,
    FAMILY_KINDS,
    FAMILY_POOLINGS,
    MODELS,
    causal_variants_of,
    in_turn,
    inputs_for,
    model_class,
    random_ids,
    slow_unless,
    tiny_causal_model,
    tiny_config_for,
    tiny_model,
    tiny_seq2seq_model,
    tiny_tokenizer,
    variants_of,
)
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, default_data_collator
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from variants import ROWS

from luna_hf import FAMILIES, MemoryCache
from luna_hf.layers import block as modeling_layers
from luna_hf.ops import unpadding
from luna_hf.ops.recompute import is_watched


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


# ---- accumulation ----

# Heads and losses, by the kind of model and fields of its config.
TASKS = {
    "masked-lm": ("mlm", {}),
    "causal-lm": ("causal", {}),
    "single-label": ("sequence", {}),
    "regression": ("sequence", {"num_labels": 1}),
    "regression-three-targets": ("sequence", {"num_labels": 3, "problem_type": "regression"}),
    "multi-label": ("sequence", {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "multiple-choice": ("choice", {}),
    "token-classification": ("token", {}),
    "question-answering": ("span", {}),
}


def four_rows(kind, options):
    if kind == "causal":
        ids = random_ids(4, 12)
        labels = ids.masked_fill(torch.arange(12) < torch.tensor([[2], [5], [1], [9]]), -100)
        return [{"input_ids": row, "labels": targets} for row, targets in zip(ids, labels, strict=True)]
    batch = inputs_for(kind, batch=4, labels=True)
    if kind == "sequence" and options:
        width = options["num_labels"]
        values = torch.linspace(-1, 2, 4 * width, dtype=torch.float64).view(4, width)
        batch["labels"] = values.round().clamp(0, 1) if "multi" in options.get("problem_type", "") else values
        batch["labels"] = batch["labels"].squeeze(-1)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(4)]


@pytest.mark.parametrize("task", TASKS)
def test_an_accumulated_update_is_the_gradient_of_the_loss_of_all_rows(task, tmp_path):
    kind, options = TASKS[task]
    model = (tiny_causal_model() if kind == "causal" else tiny_model("luna", kind, **options)).double()
    rows = four_rows(kind, options)
    trained = copy.deepcopy(model)
    args = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1)
    Trainer(trained, args, train_dataset=rows, data_collator=default_data_collator).train()
    model(**default_data_collator(rows)).loss.backward()
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in parameters.items():
        # A causal loss is computed in float32. Elsewhere only the order of additions differs.
        atol = 1e-7 if kind == "causal" else 1e-12
        change = trained.get_parameter(name) - parameter
        torch.testing.assert_close(change, -args.learning_rate * parameter.grad, atol=atol, rtol=1e-9, msg=name)
    assert max(parameter.grad.abs().max() for parameter in parameters.values()) > 1e-3


# ---- learning ----


def topic_texts(count, seed):
    """Texts of unequal lengths; the class is which of two words occurs among the others."""
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
        train_dataset=tokenized(topic_texts(512, seed=1), tokenizer),
        eval_dataset=tokenized(topic_texts(200, seed=2), tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )


@pytest.mark.parametrize(
    ("family", "pooling"),
    [slow_unless(case == ("luna", "mean"), *case) for case in FAMILY_POOLINGS],
)
def test_finetuning_learns_a_classification(family, pooling, tmp_path):
    trainer = classification_trainer(family, tmp_path, pooling, num_train_epochs=6)
    # On 200 unseen texts guessing exceeds 0.65 less than once in 10,000 cases.
    assert trainer.evaluate()["eval_accuracy"] < 0.65
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.95


def test_half_precision_with_checkpointed_activations(tmp_path):
    trainer = classification_trainer("luna", tmp_path, max_steps=3, bf16=True, activation_checkpointing=True)
    loss = trainer.train().training_loss
    # The first steps stay near the loss of guessing, ln 2.
    assert 0.4 < loss < 1.2 and 0.4 < trainer.evaluate()["eval_loss"] < 1.2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


# ---- label smoothing ----


class OwnCausalLM(FAMILIES["luna"].causal_lm):
    """A user's subclass."""


def from_saved_code(folder):
    """A causal model whose class comes from its folder, not from the package."""
    model = tiny_causal_model("luna")
    model.save_pretrained(folder)
    name = model.config.auto_map["AutoModelForCausalLM"]
    return get_class_from_dynamic_module(name, str(folder)).from_pretrained(folder)


SMOOTHED = {
    **{f"{name}-masked": lambda _, name=name: tiny_model(name, "mlm") for name in FAMILIES},
    **{f"{name}-causal": lambda _, name=name: tiny_causal_model(name) for name in FAMILIES},
    **{f"{name}-seq2seq": lambda _, name=name: tiny_seq2seq_model(name) for name in FAMILIES},
    "subclass": lambda _: OwnCausalLM(tiny_config_for("luna", is_decoder=True)).eval(),
    "saved code": from_saved_code,
}


@pytest.mark.parametrize("case", SMOOTHED)
def test_label_smoothing_compares_with_the_right_token(case, tmp_path, monkeypatch):
    for name in [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if "Luna" in name and "saved" in case]:
        monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, name)  # as without the package
    model = SMOOTHED[case](tmp_path)
    batch = {"input_ids": random_ids(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    labels = batch["input_ids"].masked_fill(torch.arange(12) < torch.tensor([[3], [0]]), -100)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=0.1))
    with torch.no_grad():
        logits = model(**batch).logits
        loss = trainer.compute_loss(model, {**batch, "labels": labels})
        share = trainer.compute_loss(model, {**batch, "labels": labels}, num_items_in_batch=50)
    if type(model).__name__.endswith("CausalLM"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits[labels != -100].double(), labels[labels != -100]
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), expected / len(labels), atol=1e-5, rtol=0)
    torch.testing.assert_close(share.double(), expected / 50, atol=1e-5, rtol=0)


# ---- activation checkpointing ----


def gradients(model, batch, **kwargs):
    model.zero_grad()
    torch.manual_seed(0)  # the same dropout
    model(**batch, **kwargs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


CHECKPOINTED = [("luna", kind, "default") for kind in MODELS if kind not in ("base", "mlm")]
CHECKPOINTED += [(family, "mlm", variant) for family, variant in FAMILY_KINDS]
CHECKPOINTED += [(family, "causal", variant) for family, variant in FAMILY_CAUSAL_KINDS]


@pytest.mark.parametrize(("family", "kind", "variant", "reentrant"), in_turn(CHECKPOINTED, [False, True]))
def test_checkpointing_changes_no_gradient(family, kind, variant, reentrant):
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    if kind == "causal":
        model = tiny_causal_model(family, **dropout, **causal_variants_of(family)[variant]).double().train()
        batch = {"input_ids": random_ids(2, 70), "labels": random_ids(2, 70)}  # more than a chunk of the scan
    else:
        model = tiny_model(family, kind, **dropout, **variants_of(family)[variant]).double().train()
        batch = inputs_for(kind, labels=True)
    expected = gradients(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    layers, calls = model.base_model.encoder.layer, []
    for layer in layers:
        layer.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model, batch)
    assert len(calls) == 2 * len(layers)  # every layer ran again in the backward pass
    for name, gradient in expected.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-12, rtol=1e-9, msg=name)


def test_reentrant_checkpointing_draws_the_same_dropout_in_blocks_of_rows(monkeypatch):
    """Its first pass has no gradients but is part of training: the feed-forward network must not split into blocks."""
    monkeypatch.setattr(modeling_layers, "_CPU_ROWS", 8)
    model = tiny_model("luna", "mlm", hidden_dropout_prob=0.1, activation_dropout=0.1).double().train()
    batch = inputs_for("mlm", labels=True)
    expected = gradients(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": True})
    for name, gradient in gradients(model, batch).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-9, msg=name)


# ---- LoRA ----


@pytest.mark.parametrize(
    ("family", "targets"),
    [slow_unless(name == "all-linear", family, name) for family in FAMILIES for name in ROWS[family].lora],
)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [tiny_model, tiny_causal_model, tiny_seq2seq_model])
@torch.no_grad()
def test_every_row_has_its_adapter(family, make, monkeypatch):
    """PEFT counts the rows of what its layers get: neither padding, blocks of rows nor slots may change them."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(modeling_layers, "_CPU_ROWS", 8)
    monkeypatch.setattr(unpadding, "bucket_cost", lambda device, width: 1.0)  # padding would be skipped
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    fields = {"source_is_causal": True} if make is tiny_seq2seq_model else {}
    model = peft.get_peft_model(make(family, **fields).double(), config, adapter_name="a")
    model.add_adapter("b", config)
    model.eval()
    ids, names = random_ids(3, 30).clamp(min=3), ["a", "b", "__base__"]
    mask = (torch.arange(30) < torch.tensor([[30], [4], [9]])).long()
    target = {"decoder_input_ids": random_ids(3, 30, seed=1)} if make is tiny_seq2seq_model else {}

    def states(names, **inputs):
        outputs = model(**inputs, adapter_names=names)
        return outputs.last_hidden_state if make is tiny_model else outputs.logits

    found = states(names, input_ids=ids * mask + 1 - mask, attention_mask=mask, **target)
    for row, length, name in zip(range(3), (30, 4, 9), names, strict=True):
        own = {key: value[row : row + 1] for key, value in target.items()}
        alone = states([name], input_ids=ids[row : row + 1, :length], **own)
        torch.testing.assert_close(found[row : row + 1, : alone.shape[1]], alone)


def test_a_change_of_adapters_reaches_a_state():
    """Nothing that a state keeps of Luna's parameters belongs to adapters that may be off in the next pass."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_causal_model("luna").double(), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    ).eval()
    ids, made = random_ids(2, 9), []
    for grad in (False, True):  # with gradients, a state keeps none
        cache = MemoryCache(model.config)
        with torch.set_grad_enabled(grad):
            with model.disable_adapter():
                model(ids[:, :4], cache=cache)
            made.append(model(ids[:, 4:], cache=cache).logits.detach())
    torch.testing.assert_close(*made)


@torch.no_grad()
def test_a_change_of_masks_and_data_reaches_a_state():
    """As of a pruned layer, and of parameters whose data are replaced."""
    model, ids, made = tiny_causal_model("luna").double(), random_ids(2, 9), []
    queries = [layer.attention.self.pack.query for layer in model.base_model.encoder.layer]
    changes = [
        lambda query: prune.l1_unstructured(query, "weight", 0.7),
        lambda query: prune.l1_unstructured(query, "weight", 0.7),
        lambda query: setattr(query.weight_orig, "data", -query.weight_orig.data),
    ]
    for change in changes:
        cache = MemoryCache(model.config)
        model(ids[:, :4], cache=cache)
        for query in queries:
            change(query)
        fresh = MemoryCache(model.config)
        fresh.load_state_dict(cache.state_dict())  # without what it keeps of the parameters
        made = [model(ids[:, 4:], cache=state).logits for state in (cache, fresh)]
        torch.testing.assert_close(*made)


def test_hooks_on_the_embedding_see_rows(monkeypatch):
    """As NEFTune's, whose noise is scaled by their length. Those of transformers itself take any shape."""
    monkeypatch.setattr(unpadding, "bucket_cost", lambda device, width: 1.0)  # padding would be skipped
    model, seen = tiny_model("luna"), []
    ids, mask = random_ids(2, 30), (torch.arange(30) < torch.tensor([[30], [2]])).long()
    model.enable_input_require_grads()
    torch.nn.utils.spectral_norm(model.encoder.layer[0].output.dense)  # a hook of PyTorch, as those of sharding
    model(ids, attention_mask=mask, output_hidden_states=True)
    assert not is_watched(model)
    hook = model.get_input_embeddings().register_forward_hook(lambda module, given, out: seen.append(out.shape[:2]))
    model(ids, attention_mask=mask)
    assert seen == [(2, 30)]
    hook.remove()
    inner = model.encoder.layer[0].intermediate
    hook = inner.register_full_backward_hook(lambda module, given, grad: seen.append(grad[0].shape[:2]))
    model(ids, attention_mask=mask).last_hidden_state.sum().backward()
    hook.remove()
    hook = model.packed_embeddings.register_forward_hook(lambda module, given, out: seen.append(out.shape[:1]))
    model(ids, attention_mask=mask)
    hook.remove()
    hook = register_module_forward_hook(lambda part, _, out: seen.append(out.shape[:2]) if part is inner else None)
    model(ids, attention_mask=mask)
    hook.remove()
    inner.forward = lambda states, forward=inner.forward: (seen.append(states.shape[:2]), forward(states))[1]
    model(ids, attention_mask=mask)
    assert seen == [(2, 30), (2, 30), (2,), (2, 30), (2, 30)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_targets_of_adapters_are_those_of_roberta(family, monkeypatch):
    """Where keys and values share a matrix, it stands for both."""
    peft = pytest.importorskip("peft")
    configs = [
        (peft.LoraConfig(task_type="SEQ_CLS"), ("query", "value", "key_value")),
        (peft.IA3Config(task_type="SEQ_CLS"), ("key", "value", "key_value", "output.dense")),
    ]
    for options in (lora.options for lora in ROWS[family].lora.values()):
        for config, names in configs:
            base = tiny_model(family, "sequence", **options)
            wanted = {name for name, _ in base.named_modules() if name.endswith(tuple(f".{end}" for end in names))}
            model = peft.get_peft_model(base, copy.deepcopy(config)).base_model.model
            adapted = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
            assert adapted == wanted and len(adapted) >= 2 * base.config.num_hidden_layers
        base = tiny_model(family, "sequence", **options)
        monkeypatch.delitem(peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, family)
        peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS"))  # as if PEFT were imported after the model
        causal = peft.get_peft_model(tiny_causal_model(family, **options), peft.LoraConfig(task_type="CAUSAL_LM"))
        assert any("query.lora_A" in name for name, _ in causal.named_parameters())
