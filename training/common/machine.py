"""The hardware and the versions that a run's figures depend on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

_PACKAGES = ("luna-hf", "torch", "transformers", "tokenizers", "accelerate", "datasets")


def machine(*packages: str) -> dict[str, str]:
    """`hardware` and `versions` in one line each, without names of hosts or users.

    Args:
        packages: more packages to give the version of.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    threads = f"{torch.get_num_threads()} thread(s), {os.cpu_count()} core(s)"
    versions = ", ".join(f"{package} {version(package)}" for package in (*_PACKAGES, *packages))
    return {
        "hardware": f"{device}, {threads}, {platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {versions}",
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
