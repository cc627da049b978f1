"""The hardware and the versions that a run's figures depend on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import luna_hf
from luna_hf.scripting import cpu_name

_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets")


def machine(*packages: str) -> dict[str, str]:
    """`hardware` and `versions` (also of `packages`) in one line each, without names of hosts or users."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    threads = f"{plural(torch.get_num_threads(), 'thread')}, {plural(os.cpu_count(), 'core')}"
    versions = ", ".join(f"{package} {_version(package)}" for package in (*_PACKAGES, *packages))
    return {
        "hardware": f"{device}, {threads}, {platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, luna-hf {luna_hf.__version__}, {versions}",
    }


def _version(package: str) -> str:
    """The version of a package; one that is on the path without being installed has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def plural(number: int, one: str, several: str = "") -> str:
    """A number and its noun: "1 pass", "2 passes"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
