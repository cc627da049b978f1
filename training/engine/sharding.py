"""FSDP and DeepSpeed: what they need beyond `accelerator.prepare`."""

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.recipe import Recipe
from luna_hf.scripting import UserError

# Variables that `accelerate launch` sets for a sharding backend.
_ASKED_FOR = {"ACCELERATE_USE_FSDP": DistributedType.FSDP, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether parameters, gradients or optimizer states are split between the processes (FSDP, DeepSpeed)."""
    return accelerator.distributed_type in _ASKED_FOR.values()


def check_backend(accelerator: Accelerator) -> None:
    """Check that the sharding backend of the launch config is active; accelerate ignores it on CPUs.

    Raises:
        UserError: It is not active.
    """
    for variable, backend in _ASKED_FOR.items():
        if os.environ.get(variable, "false").lower() == "true" and accelerator.distributed_type != backend:
            raise UserError(
                f"{backend.value} needs a GPU, and this machine has none. On CPUs, launch with "
                "--config_file training/accelerate/multi_cpu.yaml."
            )


def stored_classes(accelerator: Accelerator) -> list[type]:
    """Classes that the sharding backend stores in checkpoints, beside tensors and plain values."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return []
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return [LossScaler, DynamicLossScaler, ZeroStageEnum]


def prepare_model(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, recipe: Recipe, micro_batch: int
) -> tuple[nn.Module, Optimizer]:
    """`accelerator.prepare`, with the settings that the sharding backends need.

    Raises:
        UserError: The recipe asks DeepSpeed to skip updates or to unfreeze parameters, which it cannot.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if recipe.max_skipped_steps:
            raise UserError(
                "DeepSpeed updates within the backward pass and cannot skip steps: set `max_skipped_steps` to 0."
            )
        if any(group["frozen_steps"] for group in optimizer.param_groups):
            raise UserError(
                "DeepSpeed updates within the backward pass and cannot unfreeze parameters later (`frozen_steps` in "
                "`parameter_groups`). Use another launch config, or freeze them for the whole run (`max_steps`)."
            )
        # accelerate takes the first from a data loader, which does not exist here, and sets the second to 1.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = micro_batch
        config["gradient_clipping"] = recipe.max_grad_norm
    if accelerator.distributed_type != DistributedType.FSDP:
        return accelerator.prepare(model, optimizer)
    # Every layer is a shard; all the rest is one more, since embeddings and head share a matrix, and the head's parts a
    # bias. accelerate would wrap embedding and output layer separately, which separates what is shared.
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers)
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        return accelerator.prepare(model, optimizer)
    finally:
        del model.get_input_embeddings, model.get_output_embeddings
