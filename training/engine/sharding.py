"""What FSDP and DeepSpeed need beyond `accelerator.prepare`."""

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.recipe import RunRecipe
from luna_hf.scripting import UserError

# What `accelerate launch` sets for a sharding backend.
_ASKED_FOR = {"ACCELERATE_USE_FSDP": DistributedType.FSDP, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}


def check_backend(accelerator: Accelerator) -> None:
    """Whether the backend that the launcher asked for is the one that runs; accelerate passes over it on CPUs.

    Raises:
        UserError: It is not.
    """
    for variable, backend in _ASKED_FOR.items():
        if os.environ.get(variable, "false").lower() == "true" and accelerator.distributed_type != backend:
            raise UserError(
                f"{backend.value} was asked for, but this machine has no device for it. On CPUs, launch with "
                "--config_file training/accelerate/multi_cpu.yaml."
            )


def prepare_model(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, recipe: RunRecipe, micro_batch: int
) -> tuple[nn.Module, Optimizer]:
    """`accelerator.prepare`, with what the backends cannot know by themselves.

    Args:
        accelerator: with the number of passes an update already set.
        model: to be trained.
        optimizer: of its parameters.
        recipe: says how to clip gradients.
        micro_batch: rows of a forward pass.

    Raises:
        UserError: DeepSpeed is to skip updates, or to leave out some parameters for a while, which it cannot.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if recipe.max_skipped_steps:
            raise UserError("DeepSpeed updates within the backward pass, and skips nothing: set `max_skipped_steps` 0.")
        if any(group["frozen_steps"] for group in optimizer.param_groups):
            raise UserError(
                "DeepSpeed updates within the backward pass, and cannot unfreeze parameters later (`frozen_steps` of "
                "`parameter_groups`). Use another launch config, or freeze them for the whole run (`max_steps`)."
            )
        # accelerate would take the first from a data loader, of which there is none, and the second to be 1.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = micro_batch
        config["gradient_clipping"] = recipe.max_grad_norm
    if accelerator.distributed_type != DistributedType.FSDP:
        return accelerator.prepare(model, optimizer)
    # Every layer is sharded by itself; all the rest together, since embeddings and head share a matrix and the head's
    # parts a bias. accelerate would take embedding and output layer out of it, which cuts through what is shared.
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers)
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        return accelerator.prepare(model, optimizer)
    finally:
        del model.get_input_embeddings, model.get_output_embeddings
