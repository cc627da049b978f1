"""Model FLOPs utilisation: floating-point operations of a model, and the peak rate of the device."""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Dense half-precision rate of matrix products in FLOP/s by part of the device's name, from data sheets.
_DATA_SHEET = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """The two products of a fused attention; sizes are (batch, heads, length, head width)."""
    return 2 * query[:3].numel() * key[2] * (query[3] + value[3])


def training_flops(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Floating-point operations of a training step per token; a backward pass takes twice those of the forward pass.

    Mode and random state are restored.
    """
    was_training, random_state = model.training, torch.get_rng_state()
    model.train()
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}  # PyTorch knows the others
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        model(**batch)
    model.train(was_training)
    torch.set_rng_state(random_state)
    return 3.0 * counter.get_total_flops() / batch["attention_mask"].sum().item()


def peak_flops(device: torch.device, mixed_precision: str) -> tuple[float, str]:
    """The device's peak rate in FLOP/s, and its source: the data sheet, or a large matrix product measured here."""
    if device.type == "cuda" and mixed_precision != "no":
        name = torch.cuda.get_device_name(device)
        for part, rate in _DATA_SHEET.items():
            if part in name:
                return rate, "data sheet"
    return _measured(device, mixed_precision), "measured matrix product"


@cache
def _measured(device: torch.device, mixed_precision: str) -> float:
    """The best rate of a large matrix product; CPUs that emulate half precision are faster in float32."""
    half = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed_precision]
    return max(_product_rate(device, dtype) for dtype in {half, torch.float32 if device.type == "cpu" else half})


def _product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        product = left @ right
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - before)
    return 2.0 * size**3 / best
