"""Every option of transformers' training arguments works in the finetuning commands, or is refused with a reason."""

from dataclasses import fields

import finetune_embeddings
import finetune_glue
import pytest
from sentence_transformers import SentenceTransformerTrainingArguments
from tasks.arguments import REFUSED
from tiny_finetuning import run, topics, write_rows
from transformers import TrainingArguments

from luna_hf.scripting import UserError

# Values that all take part in one run.
WORKING = {
    **{"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "disable_tqdm": True},
    **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1.0e-5}', "warmup_steps": 1},
    **{"optim": "adamw_torch", "weight_decay": 0.05, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7},
    **{"gradient_accumulation_steps": 2, "average_tokens_across_devices": False, "max_grad_norm": 0.5, "bf16": True},
    **{"activation_checkpointing": True, "activation_checkpointing_kwargs": '{"use_reentrant": false}'},
    **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": '{"use_reentrant": false}'},
    **{"use_cache": True, "torch_empty_cache_steps": 1, "logging_strategy": "steps", "logging_steps": 1},
    **{"logging_first_step": True, "log_on_each_node": False, "log_level": "error", "log_level_replica": "error"},
    **{"report_to": "none", "run_name": "run", "project": "project", "save_strategy": "epoch", "save_steps": 2},
    **{"save_on_each_node": True, "save_total_limit": 1, "enable_jit_checkpoint": True, "ignore_data_skip": True},
    **{"restore_callback_states_from_checkpoint": False, "seed": 3, "use_cpu": True, "ddp_timeout": 100},
    **{"accelerator_config": '{"split_batches": true}', "dataloader_num_workers": 1, "dataloader_pin_memory": False},
    **{"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 1, "dataloader_in_order": False},
    **{"dataloader_multiprocessing_context": "fork", "skip_memory_metrics": False, "per_device_eval_batch_size": 8},
}
# In the commands with evaluations alone.
EVALUATION = {
    **{"neftune_noise_alpha": 5, "label_smoothing_factor": 0.1, "train_sampling_strategy": "random"},
    **{"eval_strategy": "epoch", "eval_steps": 3, "eval_delay": 0.5, "eval_on_start": True},
    **{"eval_accumulation_steps": 1, "load_best_model_at_end": True},
}
PAIRS = {"batch_sampler": "no_duplicates"}
# What another device, several processes, a further package, a compiler or the Hub is needed for.
ELSEWHERE = {
    *("output_dir", "max_steps", "fp16", "tf32", "local_rank", "fsdp", "fsdp_config", "deepspeed", "full_determinism"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("optim_args", "optim_target_modules", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
}
HUB = {"push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"}


def test_every_option_is_supported_or_refused():
    classes = (TrainingArguments, SentenceTransformerTrainingArguments)
    names, pairs = ({field.name for field in fields(one)} for one in classes)
    supported = {*WORKING, *EVALUATION, *ELSEWHERE, *HUB}
    assert supported | REFUSED.keys() == names and not supported & REFUSED.keys()
    supported, refused = {*WORKING, *PAIRS, *ELSEWHERE, "warmup_ratio"}, finetune_embeddings.REFUSED_HERE.keys()
    assert supported | refused == pairs and not supported & refused


@pytest.mark.parametrize("name", REFUSED)
def test_options_of_glue_are_refused_with_the_reason(name, tmp_path):
    words = ["--model_name_or_path", "model", "--task_name", "sst2", "--output_dir", str(tmp_path), f"--{name}", "true"]
    with pytest.raises(UserError, match=f"`{name}` cannot be set here: .+"):
        finetune_glue.parse(words)


@pytest.mark.parametrize("name", finetune_embeddings.REFUSED_HERE)
def test_options_of_embeddings_are_refused_with_the_reason(name, tmp_path):
    words = ["--model_name_or_path", "model", "--output_dir", str(tmp_path), f"--{name}", "true"]
    with pytest.raises(UserError, match=f"`{name}` cannot be set here: .+"):
        finetune_embeddings.parse(words)


def test_all_other_options_work_together_in_glue(luna, tmp_path):
    texts, labels = topics(18)
    train = write_rows(tmp_path / "train.jsonl", {"text": texts, "label": labels})
    dev = write_rows(tmp_path / "dev.jsonl", {"text": texts[:9], "label": labels[:9]})
    options = {**WORKING, **EVALUATION, "train_file": train, "validation_file": dev}
    assert not run(luna, tmp_path / "out", **options)["runs"][0]["diverged"]


def test_all_other_options_work_together_in_embeddings(luna, tmp_path):
    texts, _ = topics(18)
    for split in ("train", "validation"):
        columns = {"sentence1": texts, "sentence2": texts[::-1], "label": [number % 6 / 1 for number in range(18)]}
        write_rows(tmp_path / "data" / f"{split}.jsonl", columns)
    options = {**WORKING, **PAIRS, "model_name_or_path": luna, "dataset_name": tmp_path / "data"}
    words = [f"--{name}={value}" for name, value in {**options, "output_dir": tmp_path / "out"}.items()]
    assert finetune_embeddings.main(words) == 0
